"""Facts about a model that its config and its probed layers give, for every command alike."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from farspan.attention.probe import Layer, probe
from farspan.errors import FarspanError


def config_train_length(config: PreTrainedConfig) -> int | None:
    """The length that the model was trained on, as far as its config says.

    This is `max_position_embeddings`, `max_seq_len` of MPT or `seq_length` of BLOOM. The length
    that a rotation was scaled from (8,192 of Llama 3.1's 131,072) is not it: the model was trained
    beyond that.
    """
    text = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    return next((getattr(text, name) for name in names if getattr(text, name, None)), None)


def probe_or_none(model: PreTrainedModel) -> list[Layer] | None:
    """The probed layers; None if the model does not call transformers' attention interface."""
    with suppress(FarspanError):
        return probe(model)
    return None


def max_positions(config: PreTrainedConfig, layers: Sequence[Layer] | None) -> int | None:
    """The number of positions that a learned table has; None if no table limits the model."""
    if layers is None or all(layer.position != "learned" for layer in layers):
        return None
    config = config.get_text_config()
    return getattr(config, "position_table", None) or config.max_position_embeddings


def default_scaled_layers(layers: Sequence[Layer]) -> tuple[int, ...]:
    """The layers that get scales by default: those without positions, or all if there are none."""
    without = tuple(layer.index for layer in layers if layer.position == "none")
    return without or tuple(layer.index for layer in layers)


def cache_bytes(layers: Sequence[Layer], tokens: int, element_size: int) -> int:
    """The size of the cached keys and values of one text; a window keeps no more than its keys."""
    return sum(
        2 * layer.kv_heads * layer.head_dim * min(tokens, layer.window or tokens) * element_size
        for layer in layers
    )


def claimed_position(config: PreTrainedConfig, layer: int) -> str:
    """The position encoding of a layer by its config, which may be silent or wrong.

    In `no_rope_layers` a 1 means that rotation is on.
    """
    if isinstance(positions := getattr(config, "position", None), list):
        removed = positions[layer] == "rope" and config.rope_parameters["rope_type"] == "none"
        return "none" if removed else positions[layer]
    if flags := getattr(config, "no_rope_layers", None):
        return "rope" if flags[layer] else "none"
    if (kind := getattr(config, "position_embedding_type", None)) is not None:
        kinds = {"rope": "rope", "nope": "none", "none": "none", "alibi": "alibi"}
        return (kinds | {"absolute": "learned"}).get(kind, "unknown")
    attention = getattr(config, "attn_config", None)
    has_alibi = getattr(config, "alibi", False) or getattr(attention, "alibi", False)
    if has_alibi or config.model_type == "bloom":
        return "alibi"
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "unknown"
    if rope.get("rope_type") == "none":
        return "none"
    layer_types = getattr(config, "layer_types", None) or []
    nested = rope.get(layer_types[layer], rope) if layer < len(layer_types) else rope
    return "none" if nested is None else "rope"


def built_in_temperature(config: PreTrainedConfig) -> str | None:
    """A scale that grows with position and was trained in: Llama 4 has it on NoPE layers,
    Ministral 3 on all layers."""
    if getattr(config, "attn_temperature_tuning", False):
        formula = f"1 + {config.attn_scale:g}·ln(1 + ⌊n/{config.floor_scale:g}⌋)"
        return f"{formula} on layers without positions"
    rope = getattr(config, "rope_parameters", None) or {}
    if beta := rope.get("llama_4_scaling_beta"):
        return f"1 + {beta:g}·ln(1 + ⌊p/{rope['original_max_position_embeddings']}⌋)"
    return None


def head_dim(config: PreTrainedConfig) -> int:
    """The head width by the config.

    Where layer types have different widths, the share of the hidden size stands for all of them
    until the model is run.
    """
    width = None
    with suppress(RuntimeError):  # transformers refuses to name one of several
        width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


def required_attention(config: PreTrainedConfig) -> str | None:
    """The backend that a model needs: some releases of transformers let SDPA drop a soft cap."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def small_model(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """A random model with every layer of the config, narrow where width changes no pattern.

    Heads keep their width, because rotation depends on it.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width, group = head_dim(text), heads // kv_heads
    groups = 2 if group < 4 else 1
    narrow = {
        "vocab_size": 64,
        "num_attention_heads": groups * group,
        "num_key_value_heads": groups,
        "hidden_size": groups * group * width,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "moe_intermediate_size": 32,
        "shared_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts": 2,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "mamba_n_heads": 2 * groups * group,
        "mamba_d_head": width,
        "mamba_num_heads": 2 * groups * group,
        "mamba_head_dim": width,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_num_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for key, value in narrow.items():
        if getattr(text, key, None) is not None:
            setattr(text, key, value)
    return AutoModelForCausalLM.from_config(
        small, trust_remote_code=trust_remote_code, attn_implementation=required_attention(config)
    ).eval()
