"""Fit methods one after the other: the windows that they read, the job, and the patch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention.model_facts import default_scaled_layers, most_heads
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import Layer, probe
from farspan.methods.auto import fit_best
from farspan.methods.extend_config import TUNING_STEPS, ExtendConfig
from farspan.methods.job import FitJob
from farspan.methods.registry import METHODS, SCALE_METHODS, SEARCHES
from farspan.methods.swan_config import DistillPlan
from farspan.methods.tuning import BATCH, FAIR_STEPS


def search_windows(
    names: Sequence[str], config: ExtendConfig, to: int, train_length: int
) -> tuple[int, int]:
    """The length and the number of the search windows that these methods use.

    Only a search for scales reads beyond the target. Distillation alone reads short windows.
    """
    length = round(config.search.beyond * to) if SEARCHES & set(names) else to
    count = config.search_windows or _windows_read(names, config)
    if "swan" not in names:
        return length, count
    plan = DistillPlan.make(config.swan, config.tuning, train_length)
    long = config.swan.long_plan(train_length, to)
    tokens = plan.tokens + (long.tokens if long else 0)
    if list(names) == ["swan"]:
        length = long.length if long else plan.length
    return length, config.search_windows or max(count, math.ceil(tokens / length))


def _windows_read(names: Sequence[str], config: ExtendConfig) -> int:
    """The most windows that one of the methods reads: no window twice, if the text has them."""
    counts = [1]
    if SEARCHES & set(names):
        counts.append(config.search.most_windows)
    if config.tune or {"drope", "continue"} & set(names):
        steps = config.tuning.steps or TUNING_STEPS[config.tune] or FAIR_STEPS
        counts.append(steps * (config.tuning.batch or BATCH))
    return max(counts)


def make_fit_job(
    model: PreTrainedModel,
    layers: Sequence[Layer],
    to: int,
    train_length: int,
    search: Tensor,
    choose: Tensor,
    **settings: Any,
) -> FitJob:
    """The job of extending this model, whose probed layers are `layers`."""
    return FitJob(
        to,
        train_length,
        search,
        choose,
        default_scaled_layers(layers),
        most_heads(layers),
        fingerprint(model),
        has_nope(layers),
        {layer.index: layer.heads for layer in layers},
        **settings,
    )


def start_from(patch: Patch, job: FitJob, source: str) -> FitJob:
    """The job of extending a patched model, to which all of the patch but its scales is applied.

    A search starts from these scales."""
    name = f"{source} ({patch.method} for {patch.target} tokens)"
    if patch.scales is not None:
        job = replace(job, layers=patch.scales.layers)
    elif patch.layout is not None:
        job = replace(job, layers=patch.layout.global_layers)
    return replace(job, model=patch.model, start=patch.scales, start_name=name)


def joint_settings(names: Sequence[str], config: ExtendConfig) -> ExtendConfig:
    """The settings of methods that are fitted one after the other."""
    if set(names) & set(SCALE_METHODS):  # it sharpens the global layers instead of swan
        return replace(config, swan=replace(config.swan, sharpen=False))
    return config


def fit_methods(
    model: PreTrainedModel,
    layers: Sequence[Layer],
    job: FitJob,
    config: ExtendConfig,
    names: list[str],
    start: Patch | None = None,
) -> tuple[Patch, tuple[str, ...]]:
    """Fit one method after the other, each on the model that those before it patched.

    start: what the model is patched with already, without its scales.
    The model ends up patched. Returns the combined patch, and notes.
    """
    if names == ["auto"]:
        best, notes = fit_best(model, layers, job, config)
        return _apply_after(model, start, best), notes
    config = joint_settings(names, config)
    combined = start
    for name in names:
        part = METHODS[name](model, job, config)
        combined = _apply_after(model, combined, part)
        if part.layout is not None or part.rope:  # layers that lost their rotation get scales too
            probed = probe(model)
            scaled = part.layout.global_layers if part.layout else default_scaled_layers(probed)
            job = replace(job, layers=scaled, has_nope=has_nope(probed))
    assert combined is not None
    return combined, ()


def _apply_after(model: PreTrainedModel, earlier: Patch | None, part: Patch) -> Patch:
    """Apply a patch to the model that an earlier one patched; returns both as one."""
    if earlier is None:
        part.apply(model)
        return part
    # It was fitted on a model whose weights are no longer those of the base.
    replace(part, model=fingerprint(model)).apply(model)
    return earlier.then(part)


def has_nope(layers: Sequence[Layer]) -> bool:
    return any(layer.position == "none" for layer in layers)
