"""A tiny random model of every causal family that the installed transformers has.

A family's default config is made small by the same rules that farspan uses for its own small
models, so a new family needs no work. Some defaults leave out what every released config has; those
values are here.
"""

from __future__ import annotations

from functools import cache

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from farspan.attention.guard import spread_weights
from farspan.attention.small_config import narrow_config, short_config

VOCABULARY = 384
POSITIONS = 64
HEAD_DIM = 32
MAX_PARAMETERS = 150_000_000
# What the default config of a family leaves out.
REQUIRED: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1, 9, 18, 27]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": (["mamba"] * 3 + ["attention"]) * 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "xmod": {"default_language": "en_XX"},
}
# Families whose sizes the rules of farspan do not know: without attention heads, or derived.
TINY: dict[str, dict] = {
    "dbrx": dict(
        d_model=64,
        n_heads=4,
        n_layers=2,
        attn_config={"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
    ),
    "falcon_mamba": dict(hidden_size=64, num_hidden_layers=2),
    "longcat_flash": dict(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "mamba": dict(hidden_size=64, num_hidden_layers=2),
    "mamba2": dict(hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, n_groups=1),
    "rwkv": dict(hidden_size=64, attention_hidden_size=64, num_hidden_layers=2),
    "xlstm": dict(hidden_size=64, num_hidden_layers=2, num_heads=2),
}


@cache
def families() -> dict[str, str]:
    """The class of every family: those that AutoModelForCausalLM knows, then the models of text and
    images whose text part it does not know."""
    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    named = dict(known)
    for family, owner in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        config = hf.CONFIG_MAPPING[family]()
        if family in known or config.is_encoder_decoder:
            continue
        if config.get_text_config().model_type not in known:
            named[family] = owner
    return named


def default_config(family: str) -> PreTrainedConfig:
    """The config of the sizes that the family's first model has."""
    owner = getattr(hf, families()[family])
    config_class = owner.config_class or hf.CONFIG_MAPPING[family]
    config = config_class(**REQUIRED.get(config_class.model_type, {}))
    text = config.get_text_config()
    if hasattr(text, "is_decoder"):
        text.is_decoder = True  # encoders attend in both directions otherwise
    config.architectures = [owner.__name__]
    return config


def tiny_model(family: str) -> PreTrainedModel:
    """A model that runs, with short windows and all kinds of layers."""
    owner, errors = getattr(hf, families()[family]), []
    if family in TINY:
        return _random_model(owner, owner.config_class(**TINY[family]))
    for width, shrink in ((HEAD_DIM, short_config), (None, short_config), (None, narrow_config)):
        try:
            config = default_config(family)
            if width:
                _narrow_heads(config.get_text_config(), width)
            return _random_model(owner, shrink(config))
        except Exception as error:  # sizes that depend on each other
            errors.append(error)
    raise errors[0]


def _narrow_heads(config: PreTrainedConfig, width: int) -> None:
    config.hidden_size = width * config.num_attention_heads
    for name in ("head_dim", "global_head_dim", "swa_head_dim"):
        if getattr(config, name, None):
            setattr(config, name, width)


def _random_model(owner: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    text = config.get_text_config()
    for name, value in {
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "max_seq_len": POSITIONS,
    }.items():
        if getattr(text, name, None):
            setattr(text, name, value)
    with torch.device("meta"):
        size = sum(part.numel() for part in owner._from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = owner._from_config(config, dtype=torch.float32).eval()
    spread_weights(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".temp"):  # Zaya's temperature: zeros would hide all queries
            torch.nn.init.ones_(parameter)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 27)[None], use_cache=False)
    return model
