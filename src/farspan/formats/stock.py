"""farspan's none/rope models as checkpoints that stock transformers loads without farspan.

Models with rotation in every layer and no window become Llamas. Every other mixture, NoPE included,
becomes a SmolLM3 with explicit `no_rope_layers` and `layer_types`, because its defaults would put
the pattern elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from farspan.attention import seam
from farspan.errors import FarspanError, ProofError
from farspan.formats.fold import compare_logits, logits, random_tokens
from farspan.model.config import FULL, SLIDING, FarspanConfig
from farspan.model.transformer import FarspanForCausalLM

SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def to_stock(model: FarspanForCausalLM) -> PreTrainedModel:
    """A stock model that is proven to have the same logits.

    The proof of an export in bf16 allows a difference that is a thousand times larger.
    """
    if seam.installed(model):
        raise FarspanError(
            "the model is on the seam; fold its scales or call seam.uninstall before a stock export"
        )
    config = stock_config(model.config)
    dtype = next(model.parameters()).dtype
    with torch.device(model.device):
        stock = (LlamaForCausalLM if isinstance(config, LlamaConfig) else SmolLM3ForCausalLM)(
            config
        ).to(dtype)
    weights = dict(model.state_dict())
    correction = model.config.base_scale * model.config.head_dim**0.5
    if correction != 1:  # stock models scale scores by 1/√d: the queries take the rest
        for name in [name for name in weights if name.endswith("q_proj.weight")]:
            weights[name] = (weights[name].float() * correction).to(dtype)
    stock.load_state_dict(weights)
    stock.generation_config = copy.deepcopy(model.generation_config)
    stock.eval()
    tokens = random_tokens(model)
    proof = compare_logits(logits(model, tokens), stock, tokens)
    if not proof.holds:
        raise ProofError(
            f"the stock model differs from the farspan model by {proof.max_abs_logit:.2g} in a "
            f"logit (allowed {proof.tolerance:.2g}), so nothing was written; use --format live"
        )
    return stock


def stock_config(config: FarspanConfig) -> LlamaConfig | SmolLM3Config:
    """The stock config for a farspan config; raise if no stock family can express it."""
    if not isinstance(config, FarspanConfig):
        raise FarspanError(
            f"a {config.model_type} model is stock already; save it with save_pretrained"
        )
    # Read again, so that removed rotation shows as "none" layer by layer.
    config = FarspanConfig.from_dict(config.to_dict())
    unsupported = sorted(set(config.position) - {"none", "rope"})
    if unsupported:
        raise FarspanError(
            f"no stock family has {unsupported[0]} layers in this shape; only none and rope layers "
            "can be exported as stock, so use --format live or folded"
        )
    if config.mlp != "swiglu":
        raise FarspanError(
            f"no stock family has this shape with a {config.mlp} mlp; only swiglu can be exported "
            "as stock, so use --format live or folded"
        )
    if "rope" in config.position and config.rotary_fraction != 1:
        raise FarspanError(
            "stock Llama and SmolLM3 rotate whole heads, and this model rotates "
            f"{config.rotary_fraction:g} of each; use --format live or folded"
        )
    shared = {key: getattr(config, key) for key in SHARED}
    windows = [config.sliding_window if kind == SLIDING else None for kind in config.layer_types]
    rope = dict(config.rope_parameters) if "rope" in config.position else None
    if rope is not None and not any(windows) and "none" not in config.position:
        return LlamaConfig(**shared, rope_parameters=rope)
    # SmolLM3 computes rotary angles even if no layer uses them.
    rope = rope or {"rope_type": "default", "rope_theta": 10_000.0}
    return smollm3_config(shared, rope, config.position, windows, config.sliding_window)


def smollm3_config(
    shared: Mapping[str, Any],
    rope: Mapping[str, Any],
    positions: Sequence[str],
    windows: Sequence[int | None],
    window: int | None,
) -> SmolLM3Config:
    """A SmolLM3 config with these positions, "rope" or "none", and one size of window."""
    return SmolLM3Config(
        **shared,
        rope_parameters=dict(rope),
        no_rope_layers=[int(kind == "rope") for kind in positions],
        layer_types=[FULL if size is None else SLIDING for size in windows],
        use_sliding_window=window is not None,
        sliding_window=window,
    )
