"""Work in pieces that fit: out of memory halves the piece and goes on, with the same result."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)


def out_of_memory(error: BaseException) -> bool:
    """Was it for want of memory? The CPU's allocator and CUDA's libraries have no error of their own, only words."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in words)


def in_pieces(total: int, size: int, run: Callable[[int, int], None]) -> None:
    """Call run(start, stop) over consecutive ranges of at most `size` until `total` is covered.

    Each range must stand for itself, for the sizes may change on the way. At one row there is nothing left to halve,
    and the error is the caller's.
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
            log.warning("out of memory with %d rows at once; going on with %d", stop - start, size)
            continue
        start = stop
