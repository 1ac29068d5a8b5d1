"""Loss of every token without the L×V logits, by the model's own head whatever it does.

Some heads scale their logits, some cap them, some add a bias. Instead of knowing which, the model's own forward pass is
run on a few rows of hidden states at a time, with its decoder standing aside.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from farspan.errors import FarspanError
from farspan.memory import in_pieces

BUDGET = 1 << 24  # logits held at once


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Tensor, *, budget: int = BUDGET) -> Tensor:
    """−ln p of each token given those before it, [B, T − 1] float32 for ids [B, T]; one pass of the decoder.

    >>> token_losses(model, ids).mean().exp()  # perplexity
    """
    output = _decoder(model)(input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state
    losses = torch.empty(ids.shape[0], ids.shape[1] - 1, dtype=torch.float32, device=hidden.device)
    vocabulary = model.config.get_text_config().vocab_size

    def some_rows(start: int, stop: int) -> None:
        logits = own_logits(model, output, slice(start, stop))
        wanted = ids[:, start + 1 : stop + 1].to(logits.device)
        losses[:, start:stop] = F.cross_entropy(logits.float().transpose(1, 2), wanted, reduction="none")

    in_pieces(ids.shape[1] - 1, max(1, budget // (ids.shape[0] * vocabulary)), some_rows)
    return losses


def own_logits(model: PreTrainedModel, output: Any, rows: slice) -> Tensor:
    """The logits [B, rows, V] that the model itself makes of some rows of its decoder's output."""
    some = copy.copy(output)
    some.last_hidden_state = output.last_hidden_state[:, rows]
    with _standing_aside(_decoder(model), some):
        batch, count = some.last_hidden_state.shape[:2]
        return model(input_ids=torch.zeros(batch, count, dtype=torch.long, device=model.device), use_cache=False).logits


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    """What makes hidden states of tokens: the model inside the model. Not every family's `base_model` finds it."""
    for child in model.children():
        if isinstance(child, PreTrainedModel):
            return child
    raise FarspanError(f"{type(model).__name__} holds no decoder apart from its head; load a causal language model")


@contextmanager
def _standing_aside(decoder: torch.nn.Module, output: Any) -> Iterator[None]:
    """Let the decoder answer with this output instead of computing, for this block."""
    before = decoder.__dict__.get("forward")  # as a library that hooks objects may have left it
    decoder.forward = lambda *args, **kwargs: output  # on the object alone; its class is not ours
    try:
        yield
    finally:
        del decoder.forward
        if before is not None:
            decoder.forward = before
