"""What a model says after a prompt: the likeliest tokens, whatever settings for sampling its checkpoint carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from farspan.attention.patch import forget_lengths
from farspan.loading import quiet


@torch.no_grad()
def continuations(
    model: PreTrainedModel, prompts: Tensor, tokens: int, *, ends: Sequence[int], beams: int = 1, least: int = 0
) -> list[list[int]]:
    """At most `tokens` after each prompt [B, T], up to the first of `ends`: greedy, or the best of some beams.

    All prompts are of one length, so that none is padded. Before the first `least` tokens none ends.
    """
    given = prompts.to(model.device)
    forget_lengths(model)
    with quiet(), own_settings_set_aside(model):
        said = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            min_new_tokens=least or None,
            num_beams=beams,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=ends[0] if ends else 0,
        )
    return [_until(row, ends) for row in said[:, given.shape[1] :].tolist()]


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """The tokens that end a text, by the checkpoint's word and by its tokenizer's."""
    own = model.generation_config.eos_token_id
    listed = [own] if isinstance(own, int) else list(own or [])
    return sorted({*listed, tokenizer.eos_token_id} - {None})


@contextmanager
def own_settings_set_aside(model: PreTrainedModel) -> Iterator[None]:
    """transformers fills what a caller leaves open, a repetition penalty say, from the checkpoint."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _until(row: list[int], ends: Sequence[int]) -> list[int]:
    return row[: next((place for place, token in enumerate(row) if token in ends), len(row))]
