"""Tiny random models of every supported family, with the properties that tests expect of each.

Only widths are small: each model has the layer types, norms, fused projections and windows of its
family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from farspan.model import FarspanConfig, FarspanForCausalLM

VOCABULARY = 128
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@dataclass(frozen=True)
class Family:
    """A model family: how to build a tiny model of it, and what farspan must measure in it."""

    name: str
    config: Callable[[], PreTrainedConfig]
    positions: tuple[str, ...]  # the position encoding of each attention layer
    folds: str | None  # the submodule into which per-head scales fold; None: refused
    refused: tuple[int, ...] = ()  # layers whose scales cannot be folded
    uniform: str | None = None  # the submodule into which one scale per layer folds
    attention: str = "sdpa"

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = self.config()
        if isinstance(config, FarspanConfig):
            model: PreTrainedModel = FarspanForCausalLM(config)
        else:
            model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=self.attention)
        for name, parameter in model.named_parameters():
            # New norms are all ones and new biases zero, which would hide an error in a fold.
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name and "wte" not in name:
                parameter.data.mul_(4)  # larger scores: attention is not uniform
        return model.to(dtype).eval()


def _farspan(position, **extra) -> Callable[[], PreTrainedConfig]:
    return lambda: FarspanConfig(**{**SHAPE, "position": position, **extra})


def _without(*keys: str) -> dict:
    return {key: value for key, value in SHAPE.items() if key not in keys}


MIXED = ("alibi", "t5", "none", "rope")
HYBRID = ("rope", "rope", "rope", "none")
SPANS = ["sliding_attention"] * 3 + ["full_attention"]
OURS = [
    Family("farspan-none", _farspan("none"), ("none",) * 4, "q_proj"),
    Family("farspan-rope", _farspan("rope"), ("rope",) * 4, "q_proj"),
    Family("farspan-alibi", _farspan("alibi"), ("alibi",) * 4, "q_proj", attention="farspan_sdpa"),
    Family(
        "farspan-t5",
        _farspan("t5", base_scale=1.0, mlp="relu"),
        ("t5",) * 4,
        "q_proj",
        attention="farspan_sdpa",
    ),
    Family("farspan-learned", _farspan("learned"), ("learned",) * 4, "q_proj"),
    Family("farspan-sinusoidal", _farspan("sinusoidal"), ("sinusoidal",) * 4, "q_proj"),
    Family("farspan-hybrid", _farspan(list(HYBRID)), HYBRID, "q_proj"),
    Family("farspan-swan", _farspan(["rope/8", "rope/8", "rope/8", "none"]), HYBRID, "q_proj"),
    Family("farspan-quarter-rope", _farspan("rope", rotary_fraction=0.25), ("rope",) * 4, "q_proj"),
    Family(
        "farspan-mixed",
        _farspan(["alibi/8", "t5", "none", "rope"]),
        MIXED,
        "q_proj",
        attention="farspan_sdpa",
    ),
]
FOREIGN = [
    Family("llama", lambda: hf.LlamaConfig(**SHAPE), ("rope",) * 4, "q_proj"),
    Family(
        "llama-bias", lambda: hf.LlamaConfig(**SHAPE, attention_bias=True), ("rope",) * 4, "q_proj"
    ),
    Family("mistral", lambda: hf.MistralConfig(**SHAPE, sliding_window=8), ("rope",) * 4, "q_proj"),
    Family("smollm3", lambda: hf.SmolLM3Config(**SHAPE), HYBRID, "q_proj"),
    Family(
        "llama4",
        lambda: hf.Llama4TextConfig(
            **SHAPE,
            intermediate_size_mlp=48,
            num_local_experts=2,
            interleave_moe_layer_step=2,
            attention_chunk_size=8,
            attn_temperature_tuning=True,
            floor_scale=8,
        ),
        HYBRID,
        "q_proj",
        refused=(0, 1, 2),
    ),
    Family("cohere2", lambda: hf.Cohere2Config(**SHAPE, sliding_window=8), HYBRID, "q_proj"),
    Family(
        "granitemoehybrid",
        lambda: hf.GraniteMoeHybridConfig(
            **_without("head_dim"),
            layer_types=["mamba", "attention", "mamba", "attention"],
            position_embedding_type="nope",
            shared_intermediate_size=48,
            num_local_experts=2,
            num_experts_per_tok=1,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_chunk_size=8,
            attention_multiplier=0.2,
        ),
        ("none", "none"),
        "q_proj",
    ),
    Family(
        "exaone4",
        lambda: hf.Exaone4Config(
            **SHAPE, sliding_window=8, sliding_window_pattern=4, layer_types=SPANS
        ),
        HYBRID,
        None,
        uniform="q_norm",
    ),
    Family("qwen3", lambda: hf.Qwen3Config(**SHAPE), ("rope",) * 4, None, uniform="q_norm"),
    Family(
        "gemma3",
        lambda: hf.Gemma3TextConfig(
            **SHAPE, sliding_window=8, layer_types=SPANS, query_pre_attn_scalar=8
        ),
        ("rope",) * 4,
        None,
        uniform="q_norm",
    ),
    Family("olmo2", lambda: hf.Olmo2Config(**SHAPE), ("rope",) * 4, "q_norm"),
    Family("phi3", lambda: hf.Phi3Config(**SHAPE), ("rope",) * 4, "qkv_proj"),
    Family(
        "gpt-neox",
        lambda: hf.GPTNeoXConfig(**_without("num_key_value_heads")),
        ("rope",) * 4,
        "query_key_value",
    ),
    Family(
        "gpt2",
        lambda: hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64
        ),
        ("learned",) * 4,
        "c_attn",
    ),
    Family(
        "nemotron-h",
        lambda: hf.NemotronHConfig(
            **_without("num_hidden_layers"),
            layers_block_type=["mamba", "attention", "moe", "attention"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=1,
            chunk_size=8,
            n_routed_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
        ),
        ("none", "none"),
        "q_proj",
    ),
    Family(
        "kimi-linear",
        lambda: hf.KimiLinearConfig(
            **_without("head_dim", "num_key_value_heads"),
            num_key_value_heads=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=6,
            linear_head_dim=8,
            linear_num_heads=4,
            moe_intermediate_size=16,
            num_local_experts=2,
            num_experts_per_tok=1,
        ),
        ("none", "none"),
        "q_b_proj",
    ),
    Family(
        "ministral3",
        lambda: hf.Ministral3Config(
            **SHAPE,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        ("rope",) * 4,
        "q_proj",
    ),
    Family(
        "gpt-oss",
        lambda: hf.GptOssConfig(
            **SHAPE, num_local_experts=2, num_experts_per_tok=1, sliding_window=8
        ),
        ("rope",) * 4,
        "q_proj",
        attention="eager",
    ),
    Family(
        "gemma2",
        lambda: hf.Gemma2Config(**SHAPE, sliding_window=8, query_pre_attn_scalar=8),
        ("rope",) * 4,
        "q_proj",
        attention="eager",
    ),
]
FAMILIES = OURS + FOREIGN
# ALiBi models that compute attention themselves, trained on 64 tokens by their configs: no scales
# and no entropies, but losses and passkeys at any length.
OWN_ATTENTION: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, seq_length=64
    ),
    "mpt": lambda: hf.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64
    ),
}
LATENT = dict(
    **_without("head_dim", "num_key_value_heads"),
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=6,
    moe_intermediate_size=16,
    n_routed_experts=2,
    num_experts_per_tok=1,
    n_group=1,
    topk_group=1,
    index_topk=4,
    index_head_dim=8,
    index_n_heads=2,
)
# Sparse attention: a query sees 4 selected keys, or 2 blocks of 4 in the first layers of MiniMax.
SPARSE: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek_v32": lambda: hf.DeepseekV32ForCausalLM(
        hf.DeepseekV32Config(**LATENT, q_lora_rank=12)
    ),
    "glm_moe_dsa": lambda: hf.GlmMoeDsaForCausalLM(hf.GlmMoeDsaConfig(**LATENT, q_lora_rank=12)),
    "axk2": lambda: hf.AXK2ForCausalLM(hf.AXK2Config(**LATENT, q_lora_rank=12)),
    "hy_v4": lambda: hf.HYV4ForCausalLM(hf.HYV4Config(**LATENT, q_lora_rank=12)),
    "mistral_large4": lambda: hf.MistralLarge4ForConditionalGeneration(
        hf.MistralLarge4Config(
            text_config=hf.MistralLarge4TextConfig(**LATENT).to_dict(),
            vision_config=dict(
                model_type="pixtral",
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                head_dim=8,
                image_size=16,
                patch_size=4,
            ),
        )
    ),
    "minimax_m3_vl": lambda: hf.MiniMaxM3VLForCausalLM(
        hf.MiniMaxM3VLTextConfig(
            **SHAPE,
            layer_types=["minimax_m3_sparse"] * 3 + ["full_attention"],
            dense_intermediate_size=32,
            shared_intermediate_size=32,
            num_local_experts=2,
            num_experts_per_tok=1,
            rotary_dim=4,
            index_n_heads=2,
            index_head_dim=8,
            index_block_size=4,
            index_topk_blocks=2,
        )
    ),
}
# Families with a built-in temperature that FAMILIES does not have.
TEMPERED: dict[str, Callable[[], PreTrainedModel]] = {
    "beam": lambda: hf.BeamForCausalLM(
        hf.BeamConfig(
            **SHAPE,
            sliding_window=8,
            layer_types=SPANS,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
        )
    ),
    "inkling": lambda: hf.InklingForCausalLM(
        hf.InklingTextConfig(
            **SHAPE,
            layer_types=["hybrid_sliding", "hybrid"] * 2,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=8,
            sliding_window_size=8,
            d_rel=4,
            rel_extent=16,
            log_scaling_n_floor=16,
            moe_intermediate_size=16,
            n_routed_experts=2,
            num_experts_per_tok=1,
        )
    ),
    "mistral_large4": SPARSE["mistral_large4"],
}


def randomized(build: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """A model whose every weight is random: new gates, norms and temperatures do nothing."""
    torch.manual_seed(seed)
    try:
        model = build().eval()
    except AttributeError as error:
        if "has no attribute" in str(error) and "transformers" in str(error):
            pytest.skip(f"this release of transformers lacks the family: {error}")
        raise
    for name, parameter in model.named_parameters():
        if name.endswith("softmax_scaling.scale"):
            parameter.data.uniform_(0.01, 0.3)
        else:
            parameter.data.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.3))
    return model


def tokens(length: int = 24, batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(
        3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )
