"""Configs of small random models that attend as a model of the given config does."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig

SPAN = 8  # keys of the windows and chunks of a short config, and the keys that top-k selects
MIN_LAYERS = 4  # of a short config: patterns that no list shows repeat within it


def head_dim(config: PreTrainedConfig) -> int:
    """The head width by the config.

    Where layer types have different widths, the share of the hidden size stands for all of them
    until the model is run.
    """
    width = _value(config, "head_dim")
    return width or config.hidden_size // _largest(config.num_attention_heads)


def head_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """The numbers of query and of key/value heads by the config, the most of any layer."""
    layers = [config]
    if getattr(config, "is_heterogeneous", False):
        layers = list(config.per_layer_config)
    heads = max(_largest(layer.num_attention_heads) for layer in layers)
    kv_heads = [getattr(layer, "num_key_value_heads", None) or heads for layer in layers]
    return heads, max(map(_largest, kv_heads))


def _value(config: PreTrainedConfig, name: str) -> Any:
    """None where transformers refuses to name one of several values."""
    with suppress(RuntimeError):
        return getattr(config, name, None)
    return None


def _largest(value: int | list[int]) -> int:
    return max(value) if isinstance(value, list) else value


def narrow_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Every layer of the config, narrow where width changes no pattern.

    Heads keep their width, because rotation depends on it.
    """
    small = copy.deepcopy(config)
    small.__dict__.pop("quantization_config", None)
    text = small.get_text_config()
    (heads, kv_heads), width = head_counts(text), head_dim(text)
    group = min(2, heads // kv_heads)
    groups = min(4 if group == 1 else 2, kv_heads)
    heads = group * groups
    expand = getattr(text, "mamba_expand", None) or 2
    # Zamba concatenates the embeddings to the hidden states, and attends to both.
    copies = (getattr(text, "attention_hidden_size", None) or text.hidden_size) // text.hidden_size
    hidden = heads * width // copies
    _set(text, _WIDTHS)
    _set(
        text,
        {
            "num_attention_heads": heads,
            "decoder_attention_heads": heads,
            "encoder_attention_heads": heads,
            "num_decoder_attention_heads": heads,
            "num_encoder_attention_heads": heads,
            "num_key_value_heads": groups,
            "swa_num_attention_heads": heads,
            "swa_num_key_value_heads": groups,
            "index_n_heads": groups,
            "o_groups": groups,
            "hidden_size": hidden,
            "attention_hidden_size": heads * width,
            "mamba_n_heads": expand * heads,
            "mamba_d_head": width // copies,
            "mamba_num_heads": expand * heads,
            "mamba_head_dim": width,
            "n_mamba_heads": expand * heads,
            "mamba_headdim": width // copies,
        },
    )
    _small_towers(small, hidden)
    return small


# What no position, window or temperature depends on.
_WIDTHS = {
    **dict.fromkeys(
        (
            "vocab_size",
            "vocab_size_per_layer_input",
            "ngram_vocab_size_base",
            "intermediate_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "o_lora_rank",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "moe_hidden_size",
            "shared_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_num_heads",
        ),
        2,
    ),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 16),
    # Shorter texts are padded to it.
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), SPAN),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}


_TOWER = {
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers"), 1),
    **dict.fromkeys(("hidden_size", "embed_dim"), 128),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    "intermediate_size": 64,
}


def short_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A narrow config whose windows, chunks and selections end within a few dozen tokens.

    It keeps the first layers, with one of every kind that its lists name.
    """
    small = narrow_config(config)
    text = small.get_text_config()
    _set(
        text,
        {
            **dict.fromkeys(
                (
                    "sliding_window",
                    "sliding_window_size",
                    "window_size",
                    "attention_chunk_size",
                    "index_topk",
                    "indexer_budget",
                ),
                SPAN,
            ),
            **dict.fromkeys(
                ("index_kpool", "index_block_size", "indexer_compress_ratio"), SPAN // 2
            ),
            "index_topk_blocks": 2,
        },
    )
    kinds = layer_kinds(text)
    kept = max([MIN_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))])
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers, kept = 1, kept + 1  # the others give it their keys
    keep_layers(text, kept)
    return small


def layer_kinds(config: PreTrainedConfig) -> list[tuple[str, ...]]:
    """What the lists of the config say of each layer."""
    layers = config.num_hidden_layers
    # A list of indices says which layer, not of what kind.
    lists = [v for v in _layer_lists(config).values() if len(set(map(str, v))) < layers]
    computed = getattr(config, "layers_block_type", None)  # Bamba, Jamba: from a period or indices
    if isinstance(computed, list) and len(computed) == layers:
        lists.append(computed)
    return [tuple(str(values[index]) for values in lists) for index in range(layers)]


def _layer_lists(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """The lists of the config with one value for each layer."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers
    }


def keep_layers(config: PreTrainedConfig, count: int) -> None:
    """Cut the text config to its first layers, at most to those that it has."""
    if count >= config.num_hidden_layers:
        return  # ProphetNet computes the number, and refuses one
    lists = _layer_lists(config)
    by_layer = None
    if getattr(config, "is_heterogeneous", False):  # Gemma 4: values of single layers
        by_layer = config.to_dict()["per_layer_config"]
    config.num_hidden_layers = count
    for name, values in lists.items():
        setattr(config, name, values[:count])
    if by_layer is not None:
        config.per_layer_config = {key: by_layer[key] for key in by_layer if int(key) < count}


def _small_towers(config: PreTrainedConfig, hidden: int) -> None:
    """Leave one layer to the encoders of images and sound, which text does not reach."""
    text = config.get_text_config()
    _set(config, dict.fromkeys(("projector_hidden_size", "out_hidden_size"), 64))
    for name in config.sub_configs:
        tower = getattr(config, name, None)
        if isinstance(tower, PreTrainedConfig) and tower is not text:
            if _value(tower, "num_hidden_layers"):
                keep_layers(tower, 1)
            _set(tower, {**_TOWER, "out_hidden_size": hidden})


def _set(config: PreTrainedConfig, values: dict[str, int]) -> None:
    """Set the values that the config has; a limit that is off stays off."""
    for key, value in values.items():
        before = _value(config, key)
        if before is not None:
            setattr(config, key, [value] * len(before) if isinstance(before, list) else value)
