"""Presets of `farspan extend`: named sets of defaults, by the time that one has."""

from __future__ import annotations

from pathlib import Path

import torch

from farspan.errors import FarspanError, suggest
from farspan.methods.extend_config import ExtendConfig, read_extend_config

PRESETS: dict[str, tuple[str, ...]] = {
    # Of a bundled model to twice its train length: minutes on two cores.
    "quick": (
        "search.quick=true",
        "search.max_steps=50",
        "choose_windows=4",
        "report_windows=4",
        "passkeys=1",
    ),
    "full": (),
}


def choose_preset(
    preset: str | None, recipe: ExtendConfig | str | Path | None, device: str
) -> str | None:
    """The preset by name; without one, quick on a CPU and full elsewhere. A recipe has none."""
    if preset is not None and preset not in PRESETS:
        raise FarspanError(f"preset {preset!r} is unknown; {suggest(preset, PRESETS)}")
    if preset is not None and recipe is not None:
        raise FarspanError(
            f"the preset {preset} and a recipe both give all settings; choose one of them"
        )
    if preset is not None or recipe is not None:
        return preset
    return "quick" if torch.device(device).type == "cpu" else "full"


def preset_config(preset: str | None) -> ExtendConfig:
    """The settings of a preset; without one, the defaults."""
    return read_extend_config(ExtendConfig(), PRESETS[preset or "full"])
