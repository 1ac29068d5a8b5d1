"""What follows from an inspection: layers without attention, the KV cache, the next command."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention.model_facts import CachingLayer, cache_bytes
from farspan.methods.auto import recommended_method

CACHE_LENGTHS = (32_768, 131_072)


@dataclass(frozen=True)
class CacheReport:
    """The keys and values that the layers of one type keep, in bytes."""

    layer_type: str  # position encoding, and the window if there is one
    layers: int
    per_token: int  # while no window is full
    at: dict[int, int]  # length of a text -> bytes


def cache_reports(layers: Sequence[CachingLayer], dtype: torch.dtype) -> tuple[CacheReport, ...]:
    groups: dict[str, list[CachingLayer]] = {}
    for layer in layers:
        window = f", window {layer.window:,}" if layer.window else ""
        groups.setdefault(f"{layer.position}{window}", []).append(layer)
    return tuple(
        CacheReport(
            layer_type,
            len(group),
            cache_bytes(group, 1, dtype.itemsize),
            {length: cache_bytes(group, length, dtype.itemsize) for length in CACHE_LENGTHS},
        )
        for layer_type, group in groups.items()
    )


def stored_dtype(config: PreTrainedConfig, model: PreTrainedModel) -> torch.dtype:
    """The dtype that a checkpoint names, or else that of the model."""
    named = getattr(config, "dtype", None)
    return named if isinstance(named, torch.dtype) else model.dtype


def latent_numbers(config: PreTrainedConfig) -> int:
    """What multi-head latent attention (DeepSeek V2 and V3) needs of a token, over all layers: the
    compressed keys and values and one rotated key. 0: the config names no latent attention."""
    ranks = (getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    latent, rotated = (rank or 0 for rank in ranks)
    return config.num_hidden_layers * (latent + rotated) if latent else 0


def describe_rope_scaling(config: PreTrainedConfig) -> str | None:
    """`llama3, factor 8, from 8,192 tokens; base 500,000`, by type of layer if these differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = {kind: values for kind, values in rope.items() if isinstance(values, dict)}
    if not nested:
        return _describe_rope(rope) if rope.get("rope_theta") else None
    return "; ".join(f"{kind}: {_describe_rope(values)}" for kind, values in nested.items())


def _describe_rope(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type", "default")
    parts = ["not scaled" if kind == "default" else kind]
    if factor := rope.get("factor"):
        parts.append(f"factor {factor:g}")
    if original := rope.get("original_max_position_embeddings"):
        parts.append(f"from {original:,} tokens")
    if theta := rope.get("rope_theta"):
        parts.append(f"base {theta:,.0f}")
    return ", ".join(parts)


def layers_without_attention(
    config: PreTrainedConfig, attending: Collection[int]
) -> dict[str, int]:
    """The number of the other layers of each kind that the config of a hybrid names.

    attending: the indices of the layers with attention.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    counts = Counter(kind for index, kind in enumerate(kinds) if index not in attending)
    if "linear_attention" in counts and any("mamba" in name for name in vars(config)):
        counts["mamba"] = counts.pop("linear_attention")  # transformers' common name for both
    return dict(counts)


def describe_other_layers(counts: dict[str, int]) -> str:
    """`36 mamba, 2 mlp`"""
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items())


def next_calls(
    layers: Sequence[CachingLayer], train_length: int | None, scaled: bool
) -> tuple[str, ...]:
    """`next_commands` as calls in Python, for a model object."""
    length = "" if train_length else ", train_length=N"
    calls = [f"farspan.diagnose((model, tokenizer){length})"]
    if method := recommended_method(layers, scaled):
        target = 2 * train_length if train_length else "M"
        calls.append(f'farspan.extend((model, tokenizer), {target}, method="{method}"{length})')
    return tuple(calls)


def next_commands(
    name: str, layers: Sequence[CachingLayer], train_length: int | None, scaled: bool
) -> tuple[str, ...]:
    """Measure first, then extend by the method for this kind of model."""
    length = "" if train_length else " --train-length N"
    name = shlex.quote(name)
    commands = [f"farspan diagnose {name}{length}"]
    method = recommended_method(layers, scaled)
    if method is not None:
        target = 2 * train_length if train_length else "M"
        commands.append(f"farspan extend {name} --to {target} --method {method}{length}")
    return tuple(commands)
