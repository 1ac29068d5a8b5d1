"""Which methods fit each other, a model, its patch and the settings; others are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention.patch import Patch
from farspan.attention.probe import Layer
from farspan.errors import FarspanError, suggest
from farspan.methods.auto import candidate_methods
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.job import FitJob
from farspan.methods.registry import (
    METHOD_SETTINGS,
    METHODS,
    ROPE_METHODS,
    SCALE_METHODS,
    SEARCHES,
    TRAINED_METHODS,
    methods_using,
)
from farspan.methods.rope import ROPE_SCALINGS, existing_rope_scaling
from farspan.methods.swan_layout import check_layers


def parse_methods(method: str) -> list[str]:
    """`yarn+headscale` -> ["yarn", "headscale"], checked."""
    names = method.split("+")
    if "auto" in names and len(names) > 1:
        raise FarspanError(
            f"{method} combines auto with other methods; use auto alone, or name the methods"
        )
    for name in names:
        if name not in METHODS and name != "auto":
            raise FarspanError(f"method {name!r} is unknown; {suggest(name, [*METHODS, 'auto'])}")
    check_combination(method)
    return names


def check_combination(method: str) -> None:
    """Refuse known methods that cannot follow each other."""
    names = method.split("+")
    repeated = next((name for name in names if names.count(name) > 1), "")
    if repeated:
        raise FarspanError(
            f"{method} has {repeated} {names.count(repeated)} times, and only one of them would "
            f"take effect; write {repeated} once"
        )
    rotary = [name for name in names if name in ROPE_METHODS]
    if len(rotary) > 1:
        raise FarspanError(
            f"{method} sets rotation {len(rotary)} times, and only {rotary[-1]} would take effect; "
            f"choose one of {', '.join(rotary)}"
        )
    if "swan" in names and rotary:
        raise FarspanError(
            f"{method} sets rotation twice: swan itself sets the rotation and the window of every "
            f"layer, so {rotary[0]} gains nothing; choose one of them"
        )
    scaling = [name for name in names if name in SCALE_METHODS]
    if len(scaling) > 1 or (scaling and names[-1] not in SCALE_METHODS):
        raise FarspanError(
            f"{method} scales attention twice or too early; write the rotary method first, then "
            "one that scales"
        )


def check_start(source: str | Path, patch: Patch, names: Sequence[str]) -> None:
    """Refuse methods that cannot be fitted on a model with this patch."""
    other = next((name for name in names if name not in {*SCALE_METHODS, "auto"}), None)
    if other is not None:
        raise FarspanError(
            f"{source} is a patch, and only scales can be fitted on one, not {other}; use "
            "headscale or headlog, or extend its base model (methods can be joined with +)"
        )
    if patch.scales is not None and not SEARCHES & set(names):
        raise FarspanError(
            f"{source} is a patch with scales, which {'+'.join(names)} would replace; use "
            "headscale or headlog, which start from them, or extend its base model"
        )


def check_unused_settings(
    names: Sequence[str], config: ExtendConfig, default: ExtendConfig | None = None
) -> None:
    """Refuse a setting that differs from the default and that none of the methods uses."""
    method = "+".join(names)
    for key, value in _changed_settings(config, default or ExtendConfig()):
        part = key.partition(".")[0]
        setting = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        users = methods_using(key, names)
        if not users:
            others = ", ".join(methods_using(key, [*METHOD_SETTINGS]))
            raise FarspanError(
                f"{method} does not use {setting}; remove it, or choose a method that does: "
                f"{others}"
            )
        if part == "tuning" and not config.tune and not TRAINED_METHODS & set(users):
            raise FarspanError(
                f"{method} tunes no weights, so it does not use {setting}; add tune=fair, or "
                "remove it"
            )


def check_trains_no_weights(
    names: Sequence[str], config: ExtendConfig, problem: str, way_out: str
) -> None:
    """Refuse methods that update weights, because of a problem with these."""
    trained = TRAINED_METHODS & set(names)
    if trained or config.tune:
        method = min(trained) if trained else f"tune={config.tune}"
        raise FarspanError(
            f"{method} trains weights, which {problem}; {way_out}, or choose a method that trains "
            "none, as headscale or yarn"
        )


def _changed_settings(config: ExtendConfig, default: ExtendConfig) -> Iterator[tuple[str, Any]]:
    """The method-specific settings that differ from the default, by dotted key."""
    values, defaults = asdict(config), asdict(default)
    for part in ("tune", "fitted"):
        if values[part] != defaults[part]:
            yield part, values[part]
    for part in ("search", "tuning", "swan"):
        for key, value in values[part].items():
            if value != defaults[part][key]:
                yield f"{part}.{key}", value


def check_compatible(
    names: list[str],
    layers: Sequence[Layer],
    config: PreTrainedConfig,
    source: str,
    extend: ExtendConfig,
) -> tuple[str, ...]:
    """Refuse methods that do not apply to this model; return notes about unusual choices."""
    positions = {layer.position for layer in layers}
    replacing = set(names) & set(ROPE_SCALINGS) - {"ntk"}
    if (scaling := existing_rope_scaling(config)) is not None and replacing:
        raise FarspanError(
            f"the rotation of {source} is already scaled ({scaling}), and {min(replacing)} would "
            "replace that; use ntk, which keeps it"
        )
    for name in names:
        if name in ROPE_METHODS and "rope" not in positions:
            raise FarspanError(
                f"{name} changes rotation, and {source} has no rotary layer (positions: "
                f"{', '.join(sorted(positions))}); use uniform, headscale or headlog"
            )
    if "swan" in names:
        check_layers(layers, source, extend.swan, scaling)
    scales_only = set(names) <= set(SCALE_METHODS)
    if scales_only and "rope" in positions and "none" not in positions:
        rotary = "yarn" if scaling is None else "ntk"
        return (
            f"all layers of this model are rotary, and scales alone gain little there; try {rotary}"
            f" or {rotary}+headscale",
        )
    return ()


def unused_settings(
    names: Sequence[str],
    layers: Sequence[Layer],
    model: PreTrainedModel,
    job: FitJob,
    extend: ExtendConfig,
    default: ExtendConfig,
) -> Iterator[str]:
    """Notes on settings that auto, which accepts every setting, does not use on this model."""
    if list(names) != ["auto"]:
        return
    candidates = candidate_methods(names, layers, model, job)
    used = [name for candidate in candidates for name in candidate.split("+")]
    for key, _ in _changed_settings(extend, default):
        if not methods_using(key, used):
            choices = ", ".join(candidates)
            yield f"{key} was not used: on this model auto chooses among {choices}"
