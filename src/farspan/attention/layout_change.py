"""A layout on a loaded model: set and observed by behavior, or restored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.layout import LayerLayout, Layout
from farspan.attention.probe import Layer, probe, turning_dimensions
from farspan.errors import FarspanError, IncompatiblePatchError


def set_layout(model: PreTrainedModel, layout: Layout) -> None:
    """Give the model this layout, or restore it and raise if it does not behave so afterwards."""
    before = seam.installed_layout(model)
    seam.install_layout(model, None)
    layers = {layer.index: layer for layer in probe(model)}
    without_rotation = [index for index in layers if layers[index].position == "none"]
    try:
        _check_layout(model, layout, layers)
        span = max((entry.max_period or 0 for entry in layout.layers.values()), default=0)
        turning = turning_dimensions(model, span) if span else {}
        seam.install_layout(model, layout, without_rotation)
        for layer in probe(model):
            _check_observed(model, layer, layout.layers.get(layer.index))
        if span:
            _check_dimensions(model, layout, turning, turning_dimensions(model, span))
    except FarspanError:
        seam.install_layout(model, before, without_rotation)
        raise


def _check_layout(model: PreTrainedModel, layout: Layout, layers: Mapping[int, Layer]) -> None:
    """Refuse a layout for layers that the model lacks or that cannot have it."""
    name = type(model).__name__
    for index, entry in layout.layers.items():
        if index not in layers:
            raise IncompatiblePatchError(
                f"the layout names layer {index}, but {name} has attention in layers "
                f"{sorted(layers)}; use a layout for this model"
            )
        layer = layers[index]
        if layer.position not in ("rope", "none"):
            raise IncompatiblePatchError(
                f"layer {index} of {name} has {layer.position} positions; a layout changes only "
                "layers with rotary encoding or without positions"
            )
        if entry.max_period is not None and layer.position == "none":
            raise IncompatiblePatchError(
                f"layer {index} of {name} does not rotate, so it cannot become {entry}; write "
                f"{replace(entry, max_period=None)}, which adds rotation, or "
                f"{replace(entry, rotary=False, max_period=None)}"
            )
        if layer.window is not None and (entry.window or math.inf) > layer.window:
            raise IncompatiblePatchError(
                f"layer {index} of {name} sees {layer.window} keys by its config, so it cannot "
                f"become {entry}; leave it out, or choose a layer that sees all keys"
            )


def _check_observed(model: PreTrainedModel, layer: Layer, entry: LayerLayout | None) -> None:
    """Raise if a layer does not behave as its layout says."""
    if entry is None:
        return
    expected = "rope" if entry.rotary else "none"
    if layer.position != expected:
        raise IncompatiblePatchError(
            f"{type(model).__name__} does not hand the rotation to its attention modules, so layer "
            f"{layer.index} cannot become {entry}; use scales (headscale) or rope parameters (yarn)"
        )
    if entry.window is not None and layer.window != entry.window:
        raise IncompatiblePatchError(
            f"attention in layer {layer.index} of {type(model).__name__} does not keep to a window "
            f"of {entry.window} keys; choose another attn_implementation"
        )


def _check_dimensions(
    model: PreTrainedModel, layout: Layout, before: Mapping[int, int], after: Mapping[int, int]
) -> None:
    """Raise if as many dimensions of a layer turn as before, although some are too slow."""
    for state in seam.attached_states(model):
        entry = layout.layers.get(state.layer)
        if entry is None or entry.max_period is None or not state.fixes_dimensions:
            continue
        if after[state.layer] >= before[state.layer]:
            raise IncompatiblePatchError(
                f"{after[state.layer]} dimensions turn in layer {state.layer} of "
                f"{type(model).__name__} as before, so it cannot become {entry}; use scales "
                "(headscale) or rope parameters (yarn)"
            )
