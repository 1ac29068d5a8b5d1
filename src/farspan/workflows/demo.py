"""A first look that needs no download: build small models of the kinds people run today, for `inspect` to see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Cohere2Config, PreTrainedConfig, Qwen3Config, SmolLM3Config

from farspan.files import new_folder
from farspan.loading import quiet
from farspan.model import FarspanConfig

SHAPE = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def configs() -> dict[str, tuple[str, PreTrainedConfig]]:
    """Folder name -> what it shows and how it is built."""
    swan = ["rope/128", "rope/128", "rope/128", "none"]
    return {
        "nope": (
            "no position encoding in any layer (paper A's model)",
            FarspanConfig(**SHAPE, position="none"),
        ),
        "swan": (
            "rotary layers in windows, one global layer without positions",
            FarspanConfig(**SHAPE, position=swan),
        ),
        "smollm3": ("a stock SmolLM3: one layer in four without rotation", SmolLM3Config(**SHAPE)),
        "cohere2": ("a stock Command A: its config does not say which layers rotate", Cohere2Config(**SHAPE)),
        "qwen3": ("a stock Qwen3: its query norm is shared by the heads", Qwen3Config(**SHAPE)),
    }


def build_models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Write each model into the folder; yields what it shows and where it is."""
    for name, (what, config) in configs().items():
        torch.manual_seed(0)
        with new_folder(folder / name) as new, quiet():
            AutoModelForCausalLM.from_config(config).save_pretrained(new)
        yield what, folder / name
