"""Facts about a model that its config and its probed layers give, for every command alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention.probe import Layer, probe
from farspan.errors import FarspanError

OTHER_LENGTHS = ("max_seq_len", "seq_length")  # names that MPT and BLOOM use


def config_train_length(config: PreTrainedConfig) -> int | None:
    """The length that the model was trained on, as far as its config says.

    This is `max_position_embeddings`, `max_seq_len` of MPT or `seq_length` of BLOOM. The length
    that a rotation was scaled from (8,192 of Llama 3.1's 131,072) is not it: the model was trained
    beyond that. Some configs write 0, 1 or −1 for no limit.
    """
    text = config.get_text_config()
    values = (getattr(text, name, None) for name in ("max_position_embeddings", *OTHER_LENGTHS))
    return next((value for value in values if isinstance(value, int) and value > 1), None)


def probe_or_none(model: PreTrainedModel) -> list[Layer] | None:
    """The probed layers; None if the model does not call transformers' attention interface."""
    with suppress(FarspanError):
        return probe(model)
    return None


def max_positions(config: PreTrainedConfig, layers: Sequence[Layer] | None) -> int | None:
    """The number of positions that a learned table has; None if no table limits the model."""
    if layers is None or all(layer.position != "learned" for layer in layers):
        return None
    text = config.get_text_config()
    names = ("position_table", "max_position_embeddings", "max_target_positions")  # Whisper's last
    return next((value for name in names if (value := getattr(text, name, None))), None)


def default_scaled_layers(layers: Sequence[Layer]) -> tuple[int, ...]:
    """The layers that get scales by default: those without positions, or all if there are none."""
    without = tuple(layer.index for layer in layers if layer.position == "none")
    return without or tuple(layer.index for layer in layers)


def layer_heads(config: PreTrainedConfig, layer: int, window: int | None) -> tuple[int, int]:
    """The query and key/value heads of a layer by its config: by its list for all layers, by its
    numbers for layers with a window or without one, or the same for all."""

    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]

    def first(*names: str) -> int | None:
        values = [getattr(config, name, None) for name in names]
        values = [value[layer] if isinstance(value, list) else value for value in values]
        return next((value for value in values if value), None)

    if window is None:
        special: tuple[tuple[str, ...], tuple[str, ...]] = ((), ("num_global_key_value_heads",))
    else:
        special = (
            ("swa_num_attention_heads", "num_sliding_attention_heads"),
            ("swa_num_key_value_heads", "num_sliding_key_value_heads"),
        )
    heads = first("num_attention_heads_per_layer", *special[0], "num_attention_heads") or 0
    keys = first("num_key_value_heads_per_layer", *special[1], "num_key_value_heads")
    return heads, keys or heads


def most_heads(layers: Sequence[Layer]) -> int:
    """The columns that a table of scales needs: the most query heads of a layer."""
    return max(layer.heads for layer in layers)


class CachingLayer(Protocol):
    """A probed layer, or what a report says of one."""

    @property
    def position(self) -> str: ...
    @property
    def window(self) -> int | None: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def cache_bytes(layers: Sequence[CachingLayer], tokens: int, element_size: int) -> int:
    """The size of the cached keys and values of one text; a window keeps no more than its keys."""
    return sum(
        2 * layer.kv_heads * layer.head_dim * min(tokens, layer.window or tokens) * element_size
        for layer in layers
    )


def forward_flops(model: PreTrainedModel, layers: Sequence[Layer], length: int) -> float:
    """Of one token in a text of `length` tokens, on average."""
    table = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", None)
    matrices = model.num_parameters()
    matrices -= 0 if head is table else table.numel()
    return 2 * matrices + sum(_attention_flops(layer, length) for layer in layers)


def _attention_flops(layer: Layer, length: int) -> float:
    """Of the scores and the weighted values of one token, forward, on average over a text."""
    window = min(layer.window or length, length)
    mean_keys = window - window * (window - 1) / (2 * length)
    return 4 * layer.heads * layer.head_dim * mean_keys


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


def required_attention(config: PreTrainedConfig) -> str | None:
    """The backend that a model needs: some releases of transformers let SDPA drop a soft cap."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
