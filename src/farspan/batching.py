"""Run work in batches that fit in memory: an out-of-memory error halves the batch size."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from farspan.errors import first_line

log = logging.getLogger(__name__)

# The CPU allocator and CUDA's libraries have no error class for this, only these texts.
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "ALLOC_FAILED",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error was caused by too little memory, on a CPU or a GPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


def failure_reason(error: BaseException) -> str:
    """Why a model could not run, for the sentence about it."""
    named = f"{type(error).__name__}: {first_line(error)}"
    return "out of memory" if out_of_memory(error) else named


def run_in_batches(total: int, size: int, run: Callable[[int, int], None]) -> None:
    """Call run(start, stop) over consecutive ranges of at most `size` until `total` is covered.

    The result of a range must not depend on its size, which may shrink on the way. A batch of one
    row that does not fit raises the error.
    """
    start = 0
    while start < total:
        stop = min(start + size, total)
        try:
            run(start, stop)
        except RuntimeError as error:
            if not out_of_memory(error) or stop - start == 1:
                raise
            size = (stop - start) // 2
            log.warning("out of memory with %d rows; continuing with %d", stop - start, size)
            continue
        start = stop
