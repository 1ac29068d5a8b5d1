"""Configs of small random models that attend as a model of the given config does."""

from __future__ import annotations

import copy
from contextlib import suppress

from transformers import PreTrainedConfig

SPAN = 8  # keys of the windows and chunks of a short config, and the keys that top-k selects
MIN_LAYERS = 4  # of a short config: patterns that no list shows repeat within it


def head_dim(config: PreTrainedConfig) -> int:
    """The head width by the config.

    Where layer types have different widths, the share of the hidden size stands for all of them
    until the model is run.
    """
    width = None
    with suppress(RuntimeError):  # transformers refuses to name one of several
        width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


def narrow_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Every layer of the config, narrow where width changes no pattern.

    Heads keep their width, because rotation depends on it.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width, group = head_dim(text), heads // kv_heads
    groups = 2 if group < 4 else 1
    _set(
        text,
        {
            "vocab_size": 64,
            "vocab_size_per_layer_input": 64,
            "num_attention_heads": groups * group,
            "num_key_value_heads": groups,
            "swa_num_attention_heads": groups * group,
            "swa_num_key_value_heads": groups,
            "hidden_size": groups * group * width,
            "intermediate_size": 64,
            "intermediate_size_mlp": 64,
            "dense_intermediate_size": 64,
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
            "index_n_heads": groups,
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
        },
    )
    return small


def short_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A narrow config whose windows, chunks and selections end within a few dozen tokens.

    It keeps the first layers, with one of every kind that its lists name.
    """
    small = narrow_config(config)
    text = small.get_text_config()
    _one_layer_towers(small)
    _set(
        text,
        {
            "sliding_window": SPAN,
            "sliding_window_size": SPAN,
            "window_size": SPAN,
            "attention_chunk_size": SPAN,
            "index_topk": SPAN,
            "index_block_size": SPAN // 2,
            "index_topk_blocks": 2,
        },
    )
    layers = text.num_hidden_layers
    lists = [
        name
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == layers
    ]
    # A list of indices says which layer, not of what kind.
    named = [name for name in lists if len(set(map(str, getattr(text, name)))) < layers]
    kinds = [tuple(str(getattr(text, name)[index]) for name in named) for index in range(layers)]
    kept = max([MIN_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))])
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers, kept = 1, kept + 1  # the others give it their keys
    if kept < layers:
        text.num_hidden_layers = kept
        for name in lists:
            setattr(text, name, getattr(text, name)[:kept])
    return small


def _one_layer_towers(config: PreTrainedConfig) -> None:
    """Leave one layer to the encoders of images and sound, which text does not reach."""
    text = config.get_text_config()
    for name in config.sub_configs:
        tower = getattr(config, name, None)
        if isinstance(tower, PreTrainedConfig) and tower is not text:
            _set(tower, {"num_hidden_layers": 1, "depth": 1})


def _set(config: PreTrainedConfig, values: dict[str, int]) -> None:
    """Set the values that the config has; a limit that is off stays off."""
    for key, value in values.items():
        before = getattr(config, key, None)
        if before is not None:
            setattr(config, key, [value] * len(before) if isinstance(before, list) else value)
