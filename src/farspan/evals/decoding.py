"""Greedy and beam decoding, independent of the sampling settings stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from farspan.attention import caches
from farspan.attention.rope import reset_dynamic_rope
from farspan.checkpoints import quiet
from farspan.data.tokens import adds_begin_of_text, adds_end_of_text
from farspan.train.metadata import begin_of_text


@torch.no_grad()
def generate_tokens(
    model: PreTrainedModel,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    end_ids: Sequence[int],
    beams: int = 1,
    min_new_tokens: int = 0,
) -> list[list[int]]:
    """The continuation of each prompt [B, T], up to the first of `end_ids`: greedy or by beams.

    All prompts have one length, so that none is padded.
    """
    prompts = prompts.to(model.device)
    reset_dynamic_rope(model)
    with quiet(), default_generation_config(model):
        generated = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens or None,
            num_beams=beams,
            do_sample=False,
            eos_token_id=list(end_ids) or None,
            pad_token_id=end_ids[0] if end_ids else 0,
            **caches.cache_options(model),
        )
    return [_cut_at_end(row, end_ids) for row in generated[:, prompts.shape[1] :].tolist()]


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """A prompt as the tokenizer encodes it, with a begin-of-text token if the model expects one."""
    begin, ids = begin_of_text(tokenizer), tokenizer(text, verbose=False)["input_ids"]
    if adds_begin_of_text(tokenizer):
        ids = ids[1:]
    if adds_end_of_text(tokenizer):  # which would end the text before the answer
        ids = ids[:-1]
    return ids if begin and ids[:1] == begin else [*begin, *ids]


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """The ids that end a text, according to the checkpoint and to its tokenizer."""
    configured = model.generation_config.eos_token_id
    ids = [configured] if isinstance(configured, int) else list(configured or [])
    return sorted({*ids, tokenizer.eos_token_id} - {None})


@contextmanager
def default_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Replace the checkpoint's generation config by the default one.

    transformers would otherwise take what a caller leaves open (a repetition penalty, say) from it.
    """
    stored, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = stored


def _cut_at_end(row: list[int], end_ids: Sequence[int]) -> list[int]:
    return row[: next((index for index, token in enumerate(row) if token in end_ids), len(row))]
