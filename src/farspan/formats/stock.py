"""Our none/rope models as checkpoints that stock transformers, and engines built on it, load without farspan.

Pure rotary models without a window are Llamas. Every other mixture, NoPE throughout included, is a SmolLM3 with
its `no_rope_layers` and `layer_types` spelled out: its own defaults would put the pattern elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from farspan.attention import seam
from farspan.errors import FarspanError, ProofError
from farspan.files import new_folder
from farspan.formats.fold import Proof, logits, prove, random_tokens
from farspan.loading import quiet
from farspan.model.config import SLIDING, FarspanConfig
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


def to_stock(model: FarspanForCausalLM) -> tuple[PreTrainedModel, Proof]:
    """A stock model with the same logits, and the proof that it has them."""
    if seam.installed(model):
        raise FarspanError("the model is on the seam; fold its scales or take it off before a stock export")
    config = stock_config(model.config)
    dtype = next(model.parameters()).dtype
    with torch.device(model.device):
        stock = (LlamaForCausalLM if isinstance(config, LlamaConfig) else SmolLM3ForCausalLM)(config).to(dtype)
    weights = dict(model.state_dict())
    correction = model.config.base_scale * model.config.head_dim**0.5
    if correction != 1:  # stock models score by 1/√d: the rest goes into the queries
        for name in [name for name in weights if name.endswith("q_proj.weight")]:
            weights[name] = (weights[name].float() * correction).to(dtype)
    stock.load_state_dict(weights)
    stock.eval()
    tokens = random_tokens(model)
    proof = prove(logits(model, tokens), stock, tokens)
    if not proof.holds:
        raise ProofError(
            f"the stock model differs from ours by {proof.max_abs_logit:.2g} in a logit (allowed "
            f"{proof.tolerance:.2g}); nothing was written"
        )
    return stock, proof


def save_stock(model: FarspanForCausalLM, folder: Path) -> Proof:
    """Write the stock checkpoint to a folder, once it is proven."""
    stock, proof = to_stock(model)
    with new_folder(Path(folder)) as new, quiet():
        stock.save_pretrained(new)
    return proof


def stock_config(config: FarspanConfig) -> LlamaConfig | SmolLM3Config:
    """Our config in stock terms, or the reason why there are none."""
    if not isinstance(config, FarspanConfig):
        raise FarspanError(f"a {config.model_type} model is stock already; save it with save_pretrained")
    config = FarspanConfig.from_dict(config.to_dict())  # where rotation was removed, say so layer by layer
    unknown = sorted(set(config.position) - {"none", "rope"})
    if unknown:
        raise FarspanError(
            f"no stock family has {unknown[0]} layers in this shape; only none and rope layers can be exported as stock"
        )
    if config.mlp != "swiglu":
        raise FarspanError(f"no stock family has this shape with a {config.mlp} mlp; only swiglu can be exported")
    if "rope" in config.position and config.rotary_fraction != 1:
        raise FarspanError(
            f"stock Llama and SmolLM3 rotate whole heads, and this model rotates {config.rotary_fraction:g} of each; "
            "it cannot be exported as stock"
        )
    shared = {key: getattr(config, key) for key in SHARED}
    windowed = SLIDING in config.layer_types
    rope = dict(config.rope_parameters) if "rope" in config.position else None
    if rope is not None and not windowed and "none" not in config.position:
        return LlamaConfig(**shared, rope_parameters=rope)
    return SmolLM3Config(
        **shared,
        # SmolLM3 builds its angles even where no layer reads them.
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10_000.0},
        no_rope_layers=[int(kind == "rope") for kind in config.position],
        layer_types=list(config.layer_types),
        use_sliding_window=windowed,
        sliding_window=config.sliding_window,
    )
