"""Which layers of a SWAN model are global: measured, or at equal distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from farspan.attention.layout import LENGTH_DEPENDENT, LayerLayout, Layout
from farspan.attention.probe import Layer, probe
from farspan.errors import FarspanError
from farspan.methods.job import FitJob
from farspan.methods.layer_costs import as_table, choose_layers, measure_layers
from farspan.methods.rope import existing_rope_scaling
from farspan.methods.swan_config import SwanConfig


def choose_layout(
    model: PreTrainedModel, teacher: PreTrainedModel, job: FitJob, config: SwanConfig
) -> Layout:
    """The new layout; the sentence that explains it goes to the record."""
    layers = probe(model)
    window = config.window_for(job.train_length)
    scaling = existing_rope_scaling(model.config)
    check_layers(layers, type(model).__name__, config, scaling)
    open_layers = [layer for layer in layers if layer.window is None]
    if len(open_layers) < len(layers):
        job.details["choice"] = (
            "the model has windows of its own, so only the layers that see all keys change: "
            f"they become {config.global_layout(open_layers[0], job.train_length)}"
        )
        return Layout(
            {layer.index: config.global_layout(layer, job.train_length) for layer in open_layers}
        )
    indices = [layer.index for layer in layers]
    count = global_count(layers, config)
    if count == len(layers) and all(layer.position == "none" for layer in layers):
        raise FarspanError(
            f"no layer of {type(model).__name__} has positions, and with a swan.global_share of "
            f"{config.global_share:g} none gets a window, so nothing would change; choose a "
            "smaller share"
        )
    if not measures_layers(layers, config):
        chosen = even_layers(indices, count)
        job.details["choice"] = (
            f"{_layers_are(chosen)} global, {count} of {len(layers)} layers at equal distances"
        )
    else:
        rotary = [layer.index for layer in layers if layer.position == "rope"]
        costs = measure_layers(model, teacher, job, indices, rotary, window, config.measured_rows)
        chosen = choose_layers(costs, count, config.spacing)
        retrieval = {cost.layer: cost.window_retrieval for cost in costs}
        dearest = max(retrieval[layer] for layer in chosen)
        others = max(retrieval[layer] for layer in indices if layer not in chosen)
        job.details["layer_costs"] = as_table(costs)
        job.details["choice"] = (
            f"{_layers_are(chosen)} global: of layers {config.spacing} or more apart, a window of "
            f"{window} keys costs retrieval most there, up to {dearest:.3f} nats a token, and at "
            f"most {others:.3f} in any other layer"
        )
    # Among rotary layers, layers without positions stay so: rotation would be new to them.
    unrotated = {"none"} if any(layer.position == "rope" for layer in layers) else set()
    return Layout(
        {
            layer.index: (
                config.global_layout(layer, job.train_length)
                if layer.index in chosen
                else LayerLayout(layer.position not in unrotated, window)
            )
            for layer in layers
        }
    )


def check_layers(
    layers: Sequence[Layer], name: str, config: SwanConfig, scaling: str | None = None
) -> None:
    """Refuse models that no layout can change, and settings that would have no effect.

    scaling: the RoPE scaling that the model has already.
    """
    other = next((layer for layer in layers if layer.position not in ("rope", "none")), None)
    if other is not None:
        raise FarspanError(
            f"swan changes rotary layers and layers without positions, and layer {other.index} of "
            f"{name} has {other.position} positions; use uniform, headscale or headlog"
        )
    if all(layer.window is not None for layer in layers):
        raise FarspanError(
            f"every layer of {name} sees a window by its config, so none can become global; "
            "choose a model with layers that see all keys"
        )
    seeing_all = [layer for layer in layers if layer.window is None]
    if len(seeing_all) < len(layers) and all(layer.position == "none" for layer in seeing_all):
        raise FarspanError(
            f"{name} has this layout already: its layers that see all keys have no positions, and "
            "the others see a window; use uniform, headscale or headlog"
        )
    rotates = any(layer.position == "rope" for layer in layers)
    all_lose_it = config.rotation == "none" and global_count(layers, config) == len(layers)
    if scaling in LENGTH_DEPENDENT and rotates and not all_lose_it:
        same = " or set its rope_type to default, which is the same up to max_position_embeddings"
        raise FarspanError(
            f"the rotation of {name} changes with the length of the text ({scaling}), also in "
            "windows, which would turn in ways that were not distilled; use ntk"
            + same
            * (scaling == "dynamic")
        )
    if config.max_period and config.rotation == "none":
        raise FarspanError(
            f"with swan.rotation=none, swan.max_period={config.max_period} would have no effect; "
            "remove one of them"
        )
    if config.max_period and all(layer.position == "none" for layer in seeing_all):
        raise FarspanError(
            f"no layer of {name} rotates, so swan.max_period={config.max_period} would have no "
            "effect; remove it"
        )
    for setting in ("window", "global_share", "layers", "spacing"):
        value = getattr(config, setting)
        if len(seeing_all) < len(layers) and value != getattr(SwanConfig, setting):
            raise FarspanError(
                f"{name} has windows of its own, which stay, so swan.{setting}={value} would have "
                "no effect; remove it"
            )


def planned_layers(layers: Sequence[Layer], config: SwanConfig, train_length: int) -> list[Layer]:
    """The layers of the converted model, with the global ones at equal distances."""
    window, count = config.window_for(train_length), global_count(layers, config)
    chosen = even_layers([layer.index for layer in layers], count)
    if any(layer.window for layer in layers):  # its windows stay
        return list(layers)
    return [layer if layer.index in chosen else replace(layer, window=window) for layer in layers]


def measures_layers(layers: Sequence[Layer], config: SwanConfig) -> bool:
    """Whether the global layers are chosen by measuring; windows of the model's own stay."""
    if config.layers == "even" or any(layer.window is not None for layer in layers):
        return False
    return global_count(layers, config) < len(layers)


def even_layers(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` layers at equal distances, the last one included: 3 and 7 of 8."""
    return tuple(indices[round((number + 1) * len(indices) / count) - 1] for number in range(count))


def global_count(layers: Sequence[Layer], config: SwanConfig) -> int:
    return max(1, round(config.global_share * len(layers)))


def _layers_are(layers: Sequence[int]) -> str:
    """
    >>> _layers_are((3, 7))
    'layers 3, 7 are'
    """
    if len(layers) == 1:
        return f"layer {layers[0]} is"
    return f"layers {', '.join(map(str, layers))} are"
