"""Checkpoints that transformers reads: what it would load wrong is refused, in one sentence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import check_listed_files, weight_files


class MissingModelError(FarspanError):
    """There is no model under this name."""


def check_weights(source: str | Path) -> None:
    if not Path(source).is_dir():
        return
    check_listed_files(Path(source))
    if not weight_files(Path(source)):
        raise FarspanError(
            f"{source} has a config but no weights; add model.safetensors, or run "
            f"`farspan inspect {source}` to inspect the config"
        )


def check_report(source: str | Path, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that does not match its config.

    transformers would continue with random numbers where weights are missing or have another
    shape, and without the layers that the config does not mention.
    """
    way_out = "download or export the checkpoint again"
    if missing := sorted(report["missing_keys"]):
        raise CorruptError(
            f"{source} lacks {len(missing)} weight{'s' * (len(missing) > 1)} that its config "
            f"requires, first {missing[0]!r}; {way_out}"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, required = mismatched[0]
        raise CorruptError(
            f"{source} has {len(mismatched)} weights of other shapes than its config requires, "
            f"first {name} with {list(stored)} instead of {list(required)}; {way_out}"
        )
    if extra := _extra_layers(model, report["unexpected_keys"]):
        raise CorruptError(
            f"{source} has {len(extra)} weights of layers that its config does not have, first "
            f"{extra[0]!r}; {way_out}"
        )


def _extra_layers(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Unexpected weights of layers after the last one, in the order of layers.

    Other unexpected weights are harmless: buffers of old releases, an image tower. Layers for
    multi-token prediction are left out on purpose.
    """
    counts = {
        name: len(part)
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.ModuleList)
    }
    prediction_layers = (
        getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    )
    extra = []
    for key in unexpected:
        for number in re.finditer(r"\.(\d+)\.", key):
            parent, index = key[: number.start()], int(number[1])
            count = counts.get(parent, counts.get(f"{model.base_model_prefix}.{parent}"))
            if count is not None and index >= count + prediction_layers:
                extra.append((index, key))
    return [key for _, key in sorted(extra)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers: farspan reports what matters."""
    bars = logging.is_progress_bar_enabled()
    loggers = (logging, huggingface_hub.utils.logging)
    # A level that is set clears the caches of all loggers, so only others than this one are.
    levels = [
        (logger, level) for logger in loggers if (level := logger.get_verbosity()) != logging.ERROR
    ]
    for logger, _ in levels:
        logger.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in levels:
            logger.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def readable(
    source: str | Path,
    way_out: str = "check its config.json and that this transformers supports the family",
) -> Iterator[None]:
    """Turn an error of transformers about a checkpoint into one sentence."""
    try:
        yield
    except FarspanError:
        raise
    except Exception as error:  # a checkpoint can be wrong in more ways than can be listed
        raise FarspanError(
            f"transformers cannot load {source} ({type(error).__name__}: {first_line(error)}); "
            f"{way_out}"
        ) from error
