"""A layout in the config of a model, for exports that run without the seam.

farspan's own config has a position for every layer. Llama, Mistral and Qwen2 have the modules of a
SmolLM3, whose config says which layers rotate and which see a window. Gemma 3 has windows already,
and one rope for all of its global layers. No other config expresses a layout.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from farspan.attention import seam
from farspan.attention.layout import THETA
from farspan.attention.probe import probe
from farspan.attention.small_config import head_dim
from farspan.errors import FarspanError
from farspan.formats.stock import SHARED, smollm3_config
from farspan.model.config import FULL, FarspanConfig
from farspan.model.transformer import FarspanForCausalLM

SMOLLM3_SHAPED = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, SmolLM3ForCausalLM)
STOCK_CLASSES: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {
    SmolLM3Config: SmolLM3ForCausalLM,
    Llama4TextConfig: Llama4ForCausalLM,
    Ministral3Config: Ministral3ForCausalLM,
}
ADDED_ROTATION = {"rope_type": "default", "rope_theta": THETA}
# Rotation that is none. float32 loses angles below 2^-25 beside 1, and with this factor those of
# 2^35 tokens are smaller. The lowest frequencies are still normal float32 numbers, about 1e-27.
# linear, because llama.cpp's converter writes that type; it would skip llama3 in silence.
NO_ROTATION = {"rope_type": "linear", "factor": 2.0**60}


@dataclass(frozen=True)
class ConfigLayout:
    """What a config must say of each layer of a model with a layout."""

    positions: tuple[str, ...]
    windows: tuple[int | None, ...]
    own_rotation: bool  # some layers rotate by themselves
    added_rotation: bool  # the layout adds rotation to some layers

    @classmethod
    def observe(cls, model: PreTrainedModel) -> ConfigLayout:
        """The layout of a model on the seam, with the layers that its patch does not name."""
        layers, layout = probe(model), seam.installed_layout(model)
        partial = [entry for entry in layout.layers.values() if entry.max_period] if layout else []
        if partial:
            raise FarspanError(
                f"layers of this model rotate up to a period of {partial[0].max_period} tokens "
                "only, which no config expresses; use --format live, or convert the model with "
                "swan.rotation=none swan.sharpen=false"
            )
        added = [seam.adds_rotation(layer.module) for layer in layers if layer.position == "rope"]
        return cls(
            tuple(layer.position for layer in layers),
            tuple(layer.window for layer in layers),
            own_rotation=not all(added),
            added_rotation=any(added),
        )

    def window(self) -> int | None:
        """The window of all layers that have one; raise if there are several."""
        sizes = sorted({window for window in self.windows if window is not None})
        if len(sizes) > 1:
            raise FarspanError(
                f"the layers have windows of {' and '.join(map(str, sizes))} keys, and a config "
                "has one sliding_window; use --format live"
            )
        return sizes[0] if sizes else None

    def rope(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The rope parameters of all rotary layers, given those of the model.

        Raise if layers rotate in two ways.
        """
        if not self.own_rotation:
            return dict(ADDED_ROTATION)
        if self.added_rotation and dict(parameters) != ADDED_ROTATION:
            raise FarspanError(
                f"the layout adds rotation with rope_theta {THETA:,.0f} to some layers, others "
                f"rotate by {dict(parameters)}, and a config has one rope for both; "
                "use --format live"
            )
        return dict(parameters)


def config_with_layout(model: PreTrainedModel, layout: ConfigLayout) -> PreTrainedConfig:
    """A config of the same weights that expresses the layout; raise if there is none."""
    if isinstance(model, FarspanForCausalLM):
        return _farspan_config(model.config, layout)
    if type(model) in SMOLLM3_SHAPED:
        return _smollm3_config(model, layout)
    if _has_rope_by_layer_type(model.config):
        return _config_without_global_rotation(model.config, layout)
    raise FarspanError(
        f"a {model.config.model_type} checkpoint cannot express a layout, and its layers are not "
        "those of a SmolLM3, which can; use --format live"
    )


def model_with_config(
    model: PreTrainedModel, config: PreTrainedConfig, weights: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """A model of this config with the weights of another one that is not on the seam.

    weights: those of the other model, where the new one has other names for them.
    """
    with torch.device(model.device):
        new = STOCK_CLASSES.get(type(config), type(model))(config).to(model.dtype)
    weights = dict(model.state_dict() if weights is None else weights)
    for name, weight in new.state_dict().items():
        # Stock classes have a bias on all four projections or on none, Qwen2 on three of them.
        if name.endswith("o_proj.bias") and name not in weights:
            weights[name] = torch.zeros_like(weight)
    new.load_state_dict(weights)
    new.generation_config = copy.deepcopy(model.generation_config)
    return new.eval()


def describe_config(config: PreTrainedConfig) -> str:
    """How a stock config expresses a layout, for the model card; empty where nothing is special."""
    if isinstance(config, SmolLM3Config):
        return (
            "The checkpoint is a SmolLM3. In its config `no_rope_layers` names the layers that "
            "rotate (1) and `layer_types` those with a window, and an engine must read both."
        )
    if not _has_rope_by_layer_type(config):
        return ""
    return (
        "vLLM cannot load this checkpoint. Its global layers have a linear rope with factor "
        f"{NO_ROTATION['factor']:.2g}, which turns by no angle that float32 can hold, and vLLM "
        "builds a table of `max_position_embeddings` × factor rows."
    )


def _farspan_config(config: FarspanConfig, layout: ConfigLayout) -> FarspanConfig:
    layout.window()  # FarspanConfig would refuse a second one too, but names no way out
    values = {
        **config.to_dict(),
        "position": [
            kind if window is None else f"{kind}/{window}"
            for kind, window in zip(layout.positions, layout.windows, strict=True)
        ],
        "layer_types": None,
        "sliding_window": None,
        "rope_parameters": layout.rope(config.rope_parameters),
    }
    if not layout.own_rotation:
        values["rotary_fraction"] = 1.0  # added rotation turns whole heads
    return FarspanConfig.from_dict(values)


def shape_of(model: PreTrainedModel) -> dict[str, Any]:
    """What the config of a model with the modules of a SmolLM3 says, except positions."""
    config = model.config
    return {
        **{key: getattr(config, key) for key in SHARED if key != "head_dim"},
        "head_dim": head_dim(config),
        "hidden_act": config.hidden_act,
        "attention_bias": model.model.layers[0].self_attn.q_proj.bias is not None,
        "attention_dropout": config.attention_dropout,
        "mlp_bias": getattr(config, "mlp_bias", False),
    }


def _smollm3_config(model: PreTrainedModel, layout: ConfigLayout) -> SmolLM3Config:
    return smollm3_config(
        shape_of(model),
        layout.rope(model.config.rope_parameters),
        layout.positions,
        layout.windows,
        layout.window(),
    )


def _has_rope_by_layer_type(config: PreTrainedConfig) -> bool:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return isinstance(rope.get(FULL), Mapping)


def _config_without_global_rotation(
    config: PreTrainedConfig, layout: ConfigLayout
) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    expected = [
        ("none", None) if kind == FULL else ("rope", text.sliding_window)
        for kind in text.layer_types
    ]
    if list(zip(layout.positions, layout.windows, strict=True)) != expected:
        raise FarspanError(
            f"a {config.model_type} checkpoint can remove the rotation of all its global layers "
            "and nothing else, and the layout has other changes; use --format live"
        )
    rope = text.rope_parameters
    theta = {"rope_theta": rope[FULL]["rope_theta"]}
    text.rope_parameters = {**rope, FULL: {**theta, **NO_ROTATION}}
    return config
