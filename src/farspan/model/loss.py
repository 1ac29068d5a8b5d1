"""Loss without the L×V logits, token by token or as a mean with a gradient, by the model's own head whatever it does.

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
from transformers import Cache, PreTrainedModel

from farspan.errors import FarspanError
from farspan.memory import in_pieces
from farspan.model.transformer import FarspanModel

BUDGET = 1 << 24  # logits held at once


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Tensor, *, budget: int = BUDGET) -> Tensor:
    """−ln p of each token given those before it, [B, T − 1] for ids [B, T], in float32 or the model's float64; one pass
    of the decoder.

    >>> token_losses(model, ids).mean().exp()  # perplexity
    """
    return last_losses(model, ids, ids.shape[1] - 1, budget=budget)


@torch.no_grad()
def last_losses(model: PreTrainedModel, ids: Tensor, count: int, *, budget: int = BUDGET) -> Tensor:
    """−ln p of the last `count` tokens of each row of ids [B, T], given those before: [B, count] in float32 or float64.

    It equals token_losses(model, ids)[:, -count:], and costs less.
    """
    output = _ending(model, ids, count + 1)
    hidden = output.last_hidden_state
    losses = torch.empty(ids.shape[0], count, dtype=_wide(hidden), device=hidden.device)
    wanted = ids[:, -count:].to(hidden.device)

    def some_rows(start: int, stop: int) -> None:
        logits = own_logits(model, output, slice(start, stop))
        some = wanted[:, start:stop].to(logits.device)
        scores = logits.to(_wide(logits)).flatten(0, 1)  # one row after the other: sums along strides round worse
        losses[:, start:stop] = F.cross_entropy(scores, some.flatten(), reduction="none").view_as(some)

    in_pieces(count, max(1, budget // (ids.shape[0] * model.config.get_text_config().vocab_size)), some_rows)
    return losses


def mean_loss(model: PreTrainedModel, ids: Tensor, *, budget: int = BUDGET) -> Tensor:
    """The mean of token_losses(model, ids), with a gradient to whatever the hidden states depend on, and none to the
    head. The gradient is taken while the loss is computed, so that no more than `budget` logits ever exist.

    >>> mean_loss(model, ids).backward()  # to scales on the seam
    """
    output = _decoder(model)(input_ids=ids, use_cache=False)
    return _HeadLoss.apply(output.last_hidden_state, output, model, ids, budget)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, output: Any, model: PreTrainedModel, ids: Tensor, budget: int) -> Tensor:
        vocabulary = model.config.get_text_config().vocab_size
        count = ids.shape[0] * (ids.shape[1] - 1)
        total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
        gradient = torch.zeros_like(hidden)

        def some_rows(start: int, stop: int) -> None:
            nonlocal total
            part = hidden[:, start:stop].detach().requires_grad_()
            some = copy.copy(output)
            some.last_hidden_state = part
            with torch.enable_grad():
                logits = own_logits(model, some, slice(None))
                wanted = ids[:, start + 1 : stop + 1].to(logits.device)
                scores = logits.to(_wide(logits)).flatten(0, 1)
                loss = F.cross_entropy(scores, wanted.flatten(), reduction="sum") / count
            (gradient[:, start:stop],) = torch.autograd.grad(loss, part)
            total = total + loss.detach()

        in_pieces(ids.shape[1] - 1, max(1, budget // (ids.shape[0] * vocabulary)), some_rows)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def last_logits(model: PreTrainedModel, ids: Tensor, count: int) -> Tensor:
    """The logits [B, count, V] of the last positions of ids [B, T], float32 on the CPU."""
    return ending_logits(model, ids.to(model.device), count).float().cpu()


def ending_logits(model: PreTrainedModel, ids: Tensor, count: int, past: Cache | None = None) -> Tensor:
    """The logits [B, count, V] of the last positions of ids [B, T], which go on from what a cache holds."""
    return own_logits(model, _ending(model, ids, count, past), slice(None))


def _ending(model: PreTrainedModel, ids: Tensor, count: int, past: Cache | None = None) -> Any:
    """The decoder's output at the last positions; of our own models, what only the others need is not computed."""
    decoder = _decoder(model)
    given = {"input_ids": ids, "past_key_values": past, "use_cache": past is not None}
    if isinstance(decoder, FarspanModel):
        return decoder(**given, last=count)
    output = decoder(**given)
    output.last_hidden_state = output.last_hidden_state[:, -count:]
    return output


def own_logits(model: PreTrainedModel, output: Any, rows: slice) -> Tensor:
    """The logits [B, rows, V] that the model itself makes of some rows of its decoder's output."""
    some = copy.copy(output)
    some.last_hidden_state = output.last_hidden_state[:, rows]
    with _standing_aside(_decoder(model), some):
        batch, count = some.last_hidden_state.shape[:2]
        return model(input_ids=torch.zeros(batch, count, dtype=torch.long, device=model.device), use_cache=False).logits


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    """What makes hidden states of tokens: the model inside the model, or inside that one, which OPT's head asks. Not
    every family's `base_model` finds it."""
    inside = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if not inside:
        raise FarspanError(f"{type(model).__name__} holds no decoder apart from its head; load a causal language model")
    while len(deeper := [child for child in inside[0].children() if isinstance(child, PreTrainedModel)]) == 1:
        inside = deeper
    return inside[0]


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
