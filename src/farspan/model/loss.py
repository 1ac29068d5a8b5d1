"""Losses by token, or their mean with a gradient, without the L×V logits, for any model head.

Heads may scale their logits, cap them or add a bias. To support all of them, the model's own
forward pass is run on a few rows of hidden states at a time, with its decoder replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from farspan.batching import run_in_batches
from farspan.errors import FarspanError
from farspan.model.compile import raise_recompile_limit
from farspan.model.recompute import recomputed_layers
from farspan.model.transformer import FarspanModel

BUDGET, GPU_BUDGET = 1 << 24, 1 << 28  # logits held at once


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Tensor, *, budget: int = BUDGET) -> Tensor:
    """−ln p of each token after the first, [B, T − 1] for ids [B, T], in one pass of the decoder.

    The result is float32, or float64 for a float64 model.

    >>> token_losses(model, ids).mean().exp()  # perplexity
    """
    return last_losses(model, ids, ids.shape[1] - 1, budget=budget)


@torch.no_grad()
def last_losses(model: PreTrainedModel, ids: Tensor, count: int, *, budget: int = BUDGET) -> Tensor:
    """−ln p of the last `count` tokens of each row of ids [B, T], [B, count].

    It equals token_losses(model, ids)[:, -count:] and costs less.
    """
    output = _decode(model, ids, count + 1)
    hidden = output.last_hidden_state
    losses = torch.empty(ids.shape[0], count, dtype=_loss_dtype(hidden), device=hidden.device)
    targets = ids[:, -count:].to(hidden.device)

    def compute_rows(start: int, stop: int) -> None:
        logits = head_logits(model, output, slice(start, stop))
        chunk = targets[:, start:stop].to(logits.device)
        rows = logits.to(_loss_dtype(logits)).flatten(0, 1)  # sums along strides round worse
        row_losses = F.cross_entropy(rows, chunk.flatten(), reduction="none")
        losses[:, start:stop] = row_losses.view_as(chunk)

    run_in_batches(count, _positions_within(budget, model, len(ids)), compute_rows)
    return losses


def losses_by_context(
    model: PreTrainedModel, windows: Tensor, contexts: Sequence[int], count: int, begin: int = 0
) -> dict[int, list[float]]:
    """The mean loss of the last `count` tokens of each window, by the length of their context.

    begin: the number of tokens in front of each window that stay in front of every context.
    Windows with short contexts are read together, as many tokens as the longest context has.
    """

    def mean_losses(context: int) -> list[float]:
        rows = torch.cat((windows[:, :begin], windows[:, begin - context :]), 1)
        return [
            loss
            for batch in rows.split(max(1, max(contexts) // context))
            for loss in last_losses(model, batch.to(model.device), count).mean(1).tolist()
        ]

    return {context: mean_losses(context) for context in contexts}


def mean_loss(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    answers: Tensor | None = None,
    answer_weight: float = 0.0,
    tail_weight: float = 0.0,
    gradient_factor: float = 1.0,
    budget: int = BUDGET,
) -> Tensor:
    """The mean of token_losses(model, ids), with a gradient to the hidden states, not to the head.

    answers: above 0 [B, T] at their tokens. The mean over rows of the mean loss of a row's answers,
        0 where a row has none, is added with `answer_weight`.
    tail_weight: in the mean, tokens of the last quarter of a row count 1 + tail_weight times.
    gradient_factor: multiplies the gradient and not the loss; that of one token among many is too
        small for float16.
    The gradient is computed together with the loss, so that at most `budget` logits exist at once.

    >>> mean_loss(model, ids).backward()  # to scales on the seam
    """
    output = decoder_output(model, ids)
    weights = torch.ones_like(ids[:, 1:], dtype=_loss_dtype(output.last_hidden_state))
    weights[:, -(ids.shape[1] // 4) :] += tail_weight
    weights /= weights.mean()
    if answers is not None:
        marks = (answers[:, 1:] > 0).to(weights)
        by_row = marks.sum(1, keepdim=True).clamp(min=1.0)
        weights += answer_weight * marks.shape[1] * marks / by_row
    weights /= weights.numel() / gradient_factor
    hidden = output.last_hidden_state
    return _HeadLoss.apply(hidden, output, model, ids, weights, gradient_factor, budget)


def training_loss(model: PreTrainedModel, ids: Tensor, *, budget: int = BUDGET) -> Tensor:
    """The mean of token_losses(model, ids), with a gradient to all weights.

    Logits are computed again in the backward pass, so that at most `budget` of them exist at once:
    those of a long window take more memory than all activations of a small model.

    >>> training_loss(model, ids).backward()
    """
    output = decoder_output(model, ids)

    def loss_of_rows(hidden: Tensor, targets: Tensor) -> Tensor:
        chunk = copy.copy(output)
        chunk.last_hidden_state = hidden
        logits = head_logits(model, chunk, slice(None))
        rows = logits.to(_loss_dtype(logits)).flatten(0, 1)
        return F.cross_entropy(rows, targets.flatten(), reduction="sum")

    count = _positions_within(budget, model, len(ids))
    pairs = zip(
        output.last_hidden_state[:, :-1].split(count, 1), ids[:, 1:].split(count, 1), strict=True
    )
    sums = [checkpoint(loss_of_rows, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(sums).sum() / ids[:, 1:].numel()


class _HeadLoss(torch.autograd.Function):
    """The weighted loss of the head on hidden states, divided by `gradient_factor`. Its gradient,
    which is not divided, is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        output: Any,
        model: PreTrainedModel,
        ids: Tensor,
        weights: Tensor,
        gradient_factor: float,
        budget: int,
    ) -> Tensor:
        total = torch.zeros((), dtype=_loss_dtype(hidden), device=hidden.device)
        gradient = torch.zeros_like(hidden)

        def add_rows(start: int, stop: int) -> None:
            nonlocal total
            chunk = copy.copy(output)
            chunk.last_hidden_state = hidden[:, start:stop].detach().requires_grad_()
            with torch.enable_grad():
                logits = head_logits(model, chunk, slice(None))
                targets = ids[:, start + 1 : stop + 1].to(logits.device)
                rows = logits.to(_loss_dtype(logits)).flatten(0, 1)
                losses = F.cross_entropy(rows, targets.flatten(), reduction="none")
                loss = (losses * weights[:, start:stop].flatten().to(losses)).sum()
            (gradient[:, start:stop],) = torch.autograd.grad(loss, chunk.last_hidden_state)
            total = total + loss.detach()

        run_in_batches(ids.shape[1] - 1, _positions_within(budget, model, len(ids)), add_rows)
        ctx.save_for_backward(gradient)
        return total / gradient_factor

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None, None, None


def mean_kl(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    ids: Tensor,
    *,
    token_weights: Tensor | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """The mean over all positions of KL(teacher ‖ student), with a gradient to all weights of the
    student.

    token_weights: of the cross-entropy of each token [B, T], which is added to the KL before the
        mean is taken.
    At most `budget` logits of each model exist at once.

    >>> mean_kl(student, teacher, ids).backward()
    """
    with torch.no_grad():
        target = decoder_output(teacher, ids)
    output = decoder_output(student, ids)
    hidden, head = output.last_hidden_state, _head_parameters(student)
    known = None if token_weights is None else _next_tokens(ids, token_weights)
    return _HeadKL.apply(hidden, output, target, student, teacher, budget, known, *head)


def _next_tokens(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The token after each position [B, T], and the weight of its cross-entropy."""
    targets, of_targets = ids.roll(-1, 1), weights.roll(-1, 1).float()
    of_targets[:, -1] = 0.0  # nothing follows
    return targets, of_targets


def decoder_output(model: PreTrainedModel, ids: Tensor) -> Any:
    """The hidden states of all positions, in the form that the model's decoder returns."""
    with recomputed_layers(model):
        return _decoder(model)(input_ids=ids, use_cache=False)


@torch.no_grad()
def token_kl(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    ids: Tensor,
    target: Any = None,
    *,
    budget: int = BUDGET,
) -> tuple[Tensor, Tensor]:
    """KL(teacher ‖ model) and the model's −ln p of the next token, each [B, T − 1].

    target: the output of the teacher's decoder for these ids, if it is known."""
    target = decoder_output(teacher, ids) if target is None else target
    outputs = [target, decoder_output(model, ids)]
    kl, losses = torch.empty(2, ids.shape[0], ids.shape[1] - 1, device=ids.device)

    def compare_rows(start: int, stop: int) -> None:
        log_p, log_q = (
            head_logits(each, output, slice(start, stop)).float().log_softmax(-1)
            for each, output in zip((teacher, model), outputs, strict=True)
        )
        kl[:, start:stop] = (log_p.exp() * (log_p - log_q)).sum(-1)
        targets = ids[:, start + 1 : stop + 1, None]
        losses[:, start:stop] = -log_q.gather(-1, targets)[..., 0]

    of_each = _positions_within(budget // 2, model, len(ids))
    run_in_batches(ids.shape[1] - 1, of_each, compare_rows)
    return kl, losses


def _head_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The trainable weights that turn hidden states into logits, tied ones included."""
    inside = set(map(id, _decoder(model).parameters()))
    outside = [weight for weight in model.parameters() if id(weight) not in inside]
    tied = model.get_output_embeddings()
    candidates = [*outside, *(tied.parameters() if tied is not None else ())]
    unique = {id(weight): weight for weight in candidates if weight.requires_grad}
    return list(unique.values())


def kl_and_gradient(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum over rows of KL(teacher ‖ student) of logits [rows, V], and its gradient by the
    student's logits, which is softmax(student) − softmax(teacher).

    The cross-entropy of `targets` [rows] is added, times `weights` [rows].
    """
    dtype = _loss_dtype(student)
    log_q, log_p = student.to(dtype).log_softmax(-1), teacher.to(dtype).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    by_row, gradient = (p * (log_p - log_q)).sum(-1), q - p  # by row: one kernel when compiled
    if targets is not None and weights is not None:
        weights = weights.to(dtype)
        by_row = by_row - weights * log_q.gather(-1, targets[:, None])[:, 0]
        is_target = torch.arange(q.shape[1], device=q.device) == targets[:, None]
        gradient = gradient + weights[:, None] * (q - is_target.to(dtype))
    return by_row.sum(), gradient.to(student.dtype)


class _HeadKL(torch.autograd.Function):
    """Mean KL of two heads on hidden states, whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        output: Any,
        target: Any,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        budget: int,
        known: tuple[Tensor, Tensor] | None,
        *head: torch.nn.Parameter,
    ) -> Tensor:
        count = hidden.shape[0] * hidden.shape[1]
        total = torch.zeros((), dtype=_loss_dtype(hidden), device=hidden.device)
        gradient = torch.zeros_like(hidden)
        head_gradients = [torch.zeros_like(weight) for weight in head]
        compare = compiled_on_gpu(kl_and_gradient) if hidden.is_cuda else kl_and_gradient

        def add_rows(start: int, stop: int) -> None:
            nonlocal total
            chunk = copy.copy(output)
            chunk.last_hidden_state = hidden[:, start:stop].detach().requires_grad_()
            expected = head_logits(teacher, target, slice(start, stop)).flatten(0, 1)
            with torch.enable_grad():
                logits = head_logits(student, chunk, slice(None))
            answers = [part[:, start:stop].flatten() for part in known or ()]
            kl, by_logits = compare(logits.detach().flatten(0, 1), expected, *answers)
            gradient[:, start:stop], *by_head = torch.autograd.grad(
                logits,
                [chunk.last_hidden_state, *head],
                by_logits.view_as(logits),
                materialize_grads=True,  # some weights beside the decoder make no logits
            )
            for sum_of_chunks, part in zip(head_gradients, by_head, strict=True):
                sum_of_chunks.add_(part)
            total = total + kl

        run_in_batches(hidden.shape[1], _positions_within(budget, student, len(hidden)), add_rows)
        ctx.save_for_backward(gradient, *head_gradients)
        ctx.count = count
        return total / count

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[0] / ctx.count
        hidden, *head = (gradient * factor.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return hidden, None, None, None, None, None, None, *head


@cache
def compiled_on_gpu(function: Any) -> Any:
    raise_recompile_limit()
    # For each shape: a run has a few, and code for any shape makes a whole step 6% slower.
    return torch.compile(function, dynamic=False)


def _positions_within(budget: int, model: PreTrainedModel, rows: int) -> int:
    """How many positions of so many rows have at most `budget` logits; at least one."""
    return max(1, budget // (rows * model.config.get_text_config().vocab_size))


def _loss_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def last_logits_cpu(model: PreTrainedModel, ids: Tensor, count: int) -> Tensor:
    """Logits [B, count, V] of the last positions of ids [B, T], in float32 on the CPU."""
    return last_logits(model, ids.to(model.device), count).float().cpu()


def last_logits(
    model: PreTrainedModel, ids: Tensor, count: int, past: Cache | None = None
) -> Tensor:
    """Logits [B, count, V] of the last positions of ids [B, T], after the tokens of a cache."""
    return head_logits(model, _decode(model, ids, count, past), slice(None))


def _decode(model: PreTrainedModel, ids: Tensor, count: int, past: Cache | None = None) -> Any:
    """The decoder's output at the last positions; farspan models skip other queries."""
    decoder = _decoder(model)
    inputs = {"input_ids": ids, "past_key_values": past, "use_cache": past is not None}
    if isinstance(decoder, FarspanModel):
        return decoder(**inputs, positions_to_keep=count)
    output = decoder(**inputs)
    output.last_hidden_state = output.last_hidden_state[:, -count:]
    return output


def head_logits(model: PreTrainedModel, output: Any, rows: slice) -> Tensor:
    """Logits [B, rows, V] of the model's own head for these rows of its decoder's output."""
    chunk = copy.copy(output)
    chunk.last_hidden_state = output.last_hidden_state[:, rows]
    batch, count = chunk.last_hidden_state.shape[:2]
    ids = torch.zeros(batch, count, dtype=torch.long, device=model.device)
    with _replaced_forward(_decoder(model), chunk):
        return model(input_ids=ids, use_cache=False).logits


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    """The module that computes hidden states: the innermost model in the model.

    `base_model` is not it in every family, and OPT nests a decoder in its base model."""
    nested = _child_models(model)
    if not nested:
        raise FarspanError(
            f"{type(model).__name__} has no decoder apart from its head; "
            "load a causal language model"
        )
    decoder = nested[0]
    while len(nested := _child_models(decoder)) == 1:
        decoder = nested[0]
    return decoder


def _child_models(model: torch.nn.Module) -> list[PreTrainedModel]:
    return [child for child in model.children() if isinstance(child, PreTrainedModel)]


@contextmanager
def _replaced_forward(decoder: torch.nn.Module, output: Any) -> Iterator[None]:
    """Make the decoder return this output in this block."""
    before = decoder.__dict__.get("forward")  # set by libraries that wrap modules
    decoder.forward = lambda *args, **kwargs: output  # on the instance; the class stays unchanged
    try:
        yield
    finally:
        del decoder.forward
        if before is not None:
            decoder.forward = before
