"""What a patch, a layout, rope parameters and built-in temperatures are, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel

from farspan.attention.layout import Layout
from farspan.attention.patch import Patch
from farspan.attention.probe import Layer
from farspan.attention.temperature import LONGEST, Temperature, temperatures
from farspan.errors import FarspanError


def describe_patch(patch: Patch) -> list[str]:
    """What a patch changes, one phrase for each part."""
    parts = []
    if patch.scales is not None:
        layers = len(patch.scales.layers)
        parts.append(f"attention scales of {layers} layers: {_scale_statistics(patch)}")
    if patch.rope is not None:
        parts.append(f"rope parameters: {describe_rope(patch.rope)}")
    if patch.layout is not None:
        parts.append(f"layout: {describe_layout(patch.layout)}")
    if patch.weights is not None:
        parts.append(f"tuned weights: {len(patch.weights)} tensors")
    return parts


def describe_layout(layout: Layout) -> str:
    """`rope/512 in layers 0–2, none in layer 3`."""
    groups: dict[str, list[int]] = {}
    for index, entry in sorted(layout.layers.items()):
        groups.setdefault(str(entry), []).append(index)
    return ", ".join(
        f"{entry} in layer{'s' if len(indices) > 1 else ''} {format_ranges(indices)}"
        for entry, indices in groups.items()
    )


def describe_rope(rope: Mapping[str, Any]) -> str:
    """Rope parameters in six digits; patch.json has all of them."""
    values = {key: f"{v:.6g}" if isinstance(v, float) else v for key, v in rope.items()}
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _scale_statistics(patch: Patch) -> str:
    """Of constant scales, or of growing ones at the target."""
    assert patch.scales is not None
    at_target = patch.scales.at(torch.tensor([float(patch.target)]))
    values = patch.scales.used(at_target).detach()
    spread = f"min {values.min():.3f}, mean {values.mean():.3f}, max {values.max():.3f}"
    if patch.scales.constant:
        return spread
    rate = patch.scales.rate
    shared = "" if rate is None else f" as base·(1 + {rate:.3g}·basis) in all heads"
    growth = f"growing by the basis `{patch.scales.basis}`{shared}"
    return f"{spread} at {patch.target:,} keys, {growth}"


def describe_temperatures(
    model: PreTrainedModel, layers: Sequence[Layer], length: int | None
) -> tuple[str | None, list[str]]:
    """The built-in temperatures in words, with their size at a length, and what to know of them."""
    try:
        measured = temperatures(model, layers, length)
    except FarspanError as error:
        return None, [str(error)]
    if not measured:
        return None, []
    text = "; ".join(_describe_temperature(part, length) for part in measured)
    return text, [f"the model already scales its attention ({text}); farspan's scales multiply it"]


def _describe_temperature(temperature: Temperature, length: int | None) -> str:
    """`1 + 0.1·ln(1 + ⌊n/8192⌋) in layers 3, 7, 11: ×1.32 at 262,144 tokens`."""
    law = temperature.formula or "a growing factor that no known law fits"
    length = min(length or LONGEST, LONGEST)
    low, high = (f"×{value:.3g}" for value in temperature.at(length))
    factor = low if low == high else f"{low} to {high} by head"
    return f"{law} in layers {format_ranges(temperature.layers)}: {factor} at {length:,} tokens"


def format_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
