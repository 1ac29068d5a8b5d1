"""Scales that grow with the context, as a stock class that computes them.

    λ̂(n) = base·(1 + rate·ln(1 + ⌊n/L⌋))     Llama 4, layers without rotation
    λ̂(n) = base·(1 + rate·ln(1 + ⌊p/L⌋))     Ministral 3, every layer, all rotary; p = n − 1

The base of each head is in its query projection. One rate and L are in the config. Both classes
have the weights of a Llama: Llama 4 without experts and query norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import Llama4TextConfig, Ministral3Config, PreTrainedConfig, PreTrainedModel

from farspan.attention.probe import Layer, probe
from farspan.attention.scales import Scales
from farspan.checkpoints import quiet
from farspan.errors import FarspanError
from farspan.formats.layout import SMOLLM3_SHAPED, ConfigLayout, model_with_config, shape_of
from farspan.model.config import FULL

CLASSES = {"floor": "Llama 4", "floor-position": "Ministral 3"}  # by basis
NO_CHUNKS = (
    2**30
)  # no layer has chunks, but transformers builds their mask, and skips it below this


def check_no_windows(layout: ConfigLayout) -> None:
    """Raise if layers of a converted model see windows: no class has windows and growth."""
    if (window := layout.window()) is not None:
        raise FarspanError(
            f"the scales of this model grow with the context and layers see {window} keys, and no "
            "stock class has both; use --format live, or convert the model with "
            "swan.rotation=none swan.sharpen=false"
        )


def check_growth(scales: Scales) -> None:
    """Raise if no stock class computes scales that grow like these."""
    if scales.basis not in CLASSES:
        raise FarspanError(
            f"scales with basis {scales.basis!r} grow with the context by a formula that no stock "
            "class for these weights has; use --format live, or fit headlog with "
            "search.shared=true"
        )
    if scales.rate is None:
        raise FarspanError(
            f"the heads grow at different rates, and {CLASSES[scales.basis]} has one for all; "
            "use --format live, or fit headlog with search.shared=true"
        )


def model_with_growth(model: PreTrainedModel, scales: Scales) -> PreTrainedModel:
    """A stock model, whose weights already hold the bases, as the class that adds the growth."""
    check_growth(scales)
    layers, name = probe(model), CLASSES[scales.basis]
    if type(model) not in SMOLLM3_SHAPED:
        raise FarspanError(
            f"{name} computes this growth, and it has no place for the weights of a "
            f"{model.config.model_type} model; use --format live"
        )
    if windows := {layer.window for layer in layers if layer.window}:
        raise FarspanError(
            f"{name} computes this growth, and it has no sliding windows of {min(windows)} keys "
            "among layers that see all; use --format live"
        )
    if shape_of(model)["mlp_bias"]:
        raise FarspanError(
            f"{name} computes this growth, and its MLP has no biases; use --format live"
        )
    if scales.basis == "floor":
        return _llama4(model, layers, scales)
    return _ministral3(model, layers, scales)


def describe_growth(config: PreTrainedConfig) -> str:
    """Where a stock config has the growth, for the model card."""
    if isinstance(config, Llama4TextConfig):
        return (
            "The checkpoint is a Llama 4 without experts. Its config has the growth of the scales "
            "in `attn_scale` and `floor_scale`, and an engine must read both. Llama 4 counts "
            "padding on the left as keys, so pad on the right."
        )
    return (
        "The checkpoint is a Ministral 3. Its config has the growth of the scales in "
        "`rope_parameters`, as `llama_4_scaling_beta` and `original_max_position_embeddings`, and "
        "an engine must read both."
    )


def _llama4(model: PreTrainedModel, layers: Sequence[Layer], scales: Scales) -> PreTrainedModel:
    without = tuple(layer.index for layer in layers if layer.position == "none")
    if without != tuple(sorted(scales.layers)):
        raise FarspanError(
            f"Llama 4 scales all layers without rotation and no others, here {list(without)}, and "
            f"the patch scales {list(scales.layers)}; use --format live, or fit headlog with "
            "search.shared=true"
        )
    shape = shape_of(model)
    del shape["mlp_bias"]
    config = Llama4TextConfig(
        **shape,
        intermediate_size_mlp=shape["intermediate_size"],
        moe_layers=[],
        interleave_moe_layer_step=0,  # the same for engines that do not read moe_layers
        use_qk_norm=False,
        no_rope_layers=[int(layer.position == "rope") for layer in layers],
        layer_types=[FULL] * len(layers),
        attention_chunk_size=NO_CHUNKS,
        rope_parameters=dict(model.config.rope_parameters),
        attn_temperature_tuning=True,
        attn_scale=scales.rate,
        floor_scale=scales.length,
    )
    rotary = [layer.index for layer in layers if layer.position == "rope"]
    return model_with_config(model, config, _llama4_weights(model.state_dict(), rotary, config))


def _llama4_weights(
    weights: Mapping[str, Tensor], rotary: Sequence[int], config: Llama4TextConfig
) -> dict[str, Tensor]:
    """The weights of a Llama by Llama 4's names and in its order of rotary dimensions.

    Llama rotates dimension i with i + d/2, Llama 4 rotates neighbors.
    """
    renamed = {name.replace(".mlp.", ".feed_forward."): value for name, value in weights.items()}
    rotated = tuple(
        f"layers.{layer}.self_attn.{part}." for layer in rotary for part in ("q_proj", "k_proj")
    )
    for name in renamed:
        if name.removeprefix("model.").startswith(rotated):
            halves = renamed[name].unflatten(0, (-1, 2, config.head_dim // 2))
            renamed[name] = halves.transpose(1, 2).flatten(0, 2)
    return renamed


def _ministral3(model: PreTrainedModel, layers: Sequence[Layer], scales: Scales) -> PreTrainedModel:
    rotary = tuple(layer.index for layer in layers if layer.position == "rope")
    if not len(layers) == len(rotary) == len(scales.layers):
        raise FarspanError(
            f"Ministral 3 rotates and scales every layer, and of these {len(layers)} layers "
            f"{len(rotary)} rotate and {len(scales.layers)} have scales; use --format live"
        )
    shape = shape_of(model)
    if shape.pop("attention_bias"):
        raise FarspanError(
            "Ministral 3 computes this growth, and its projections have no biases, which those of "
            f"this {model.config.model_type} model have; use --format live"
        )
    del shape["mlp_bias"]
    rope = dict(model.config.rope_parameters)
    length = rope.get("original_max_position_embeddings", scales.length)
    if length != scales.length:
        raise FarspanError(
            f"the rotation is scaled from {length} tokens and the scales grow from "
            f"{scales.length}, and Ministral 3 has one number for both; use --format live"
        )
    growth = {"llama_4_scaling_beta": scales.rate, "original_max_position_embeddings": length}
    with quiet():  # transformers warns of keys that rope_type does not need
        config = Ministral3Config(**shape, rope_parameters={**rope, **growth}, sliding_window=None)
    return model_with_config(model, config)
