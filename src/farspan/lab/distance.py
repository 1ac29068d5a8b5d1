"""Compare the attention of two models head by head, and measure what each head does.

Two models read the same tokens. In each layer, every head of one model is compared with every head
of the other by the Jensen–Shannon divergence of their attention, averaged over positions: 0 for
identical attention, ln 2 for attention to disjoint tokens. The nearest pair of heads is taken
sample by sample and then averaged, as in Kazemnejad 2023, or from the mean over all samples.
Attention probabilities are computed a few rows at a time, so that long texts fit in memory.

The code released with Kazemnejad 2023 computes a different number, kept here as `legacy`:
½[KL(m‖p) + KL(m‖q)], which has no upper bound, over the pairs of heads i < j only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.backends import own_attention
from farspan.attention.scores import Scores
from farspan.batching import run_in_batches
from farspan.errors import FarspanError
from farspan.model.loss import token_losses
from farspan.summaries import Plotted

BINS = 20  # of distances relative to the tokens before
BUDGET = 1 << 24  # attention probabilities in memory at once
ABLATED_LAYERS = 4
DistanceRule = Callable[[Tensor, Tensor], Tensor]


def entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """H(½p + ½q) − ½H(p) − ½H(q) of each pair of rows, in nats: 0 … ln 2."""
    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).clamp(min=0)


def legacy(p: Tensor, q: Tensor) -> Tensor:
    """½[KL(m‖p) + KL(m‖q)] with m = ½p + ½q: Jensen–Shannon with its arguments swapped."""
    tiny = torch.finfo(p.dtype).tiny  # stands for probabilities that underflow to 0
    m = (p + q) / 2
    logs = (p.clamp(min=tiny).log() + q.clamp(min=tiny).log()) / 2
    return -entropy(m) - (m * logs).sum(-1)


RULES: dict[str, DistanceRule] = {"jsd": jsd, "legacy": legacy}
MINIMA = ("sample", "mean")  # the nearest pair of heads: of each sample, or of their mean


@dataclass(frozen=True, eq=False)
class Distance:
    """The attention distance between two models, for every pair of heads in every layer."""

    samples: np.ndarray  # [samples, layers, heads, heads'] nats, the mean over positions
    lengths: np.ndarray  # [samples] in tokens
    rule: str = "jsd"
    minimum: str = "sample"

    @property
    def pairs(self) -> np.ndarray:
        """The mean over all positions of all samples, [layers, heads, heads']."""
        return np.average(self.samples, axis=0, weights=self.lengths)

    @property
    def nearest(self) -> np.ndarray:
        """The smallest distance over pairs of heads, [layers]; `legacy` uses pairs i < j only.

        By `minimum`, the mean of each sample's smallest distance, or the smallest mean distance.
        """
        tables = self.samples if self.minimum == "sample" else self.pairs[None]
        if self.rule == "legacy":
            tables = np.where(np.triu(np.ones(tables.shape[2:], dtype=bool), 1), tables, np.inf)
        return tables.min((2, 3)).mean(0)

    @property
    def matched(self) -> np.ndarray:
        """The mean distance under the best one-to-one matching of heads, [layers]."""
        from scipy.optimize import linear_sum_assignment

        return np.array([table[linear_sum_assignment(table)].mean() for table in self.pairs])


@dataclass(frozen=True, eq=False, repr=False)
class AttentionComparison(Plotted):
    """The attention of several models on the same tokens."""

    models: list[str]
    tokens: int
    pairs: dict[tuple[int, int], Distance]  # by the indices of two models
    mass: list[np.ndarray]  # for each model, [layers, heads, distances]
    attended: list[np.ndarray]  # for each model, [layers, heads, BINS] fractions of queries
    ablations: list[np.ndarray]  # for each model, [layers, heads] in nats per token

    def to_json(self) -> dict[str, Any]:
        distances = [
            {
                "models": [self.models[first], self.models[second]],
                "nearest": distance.nearest,
                "matched": distance.matched,
            }
            for (first, second), distance in self.pairs.items()
        ]
        attended = [fractions.mean((0, 1)) for fractions in self.attended]
        return {
            "tokens": self.tokens,
            "distances": distances,
            "loss_without_head": dict(zip(self.models, self.ablations, strict=True)),
            "attended_distance": dict(zip(self.models, attended, strict=True)),
        }


@torch.no_grad()
def distances(
    models: Sequence[PreTrainedModel],
    batches: Sequence[Tensor],
    *,
    rule: str = "jsd",
    minimum: str = "sample",
    reference: int | None = None,
) -> dict[tuple[int, int], Distance]:
    """The distance between every two models, by their indices, over batches of tokens [B, T].

    With `reference`, only the distances to the model of that index.

    >>> distances([nope, t5], [ids])[0, 1].nearest
    """
    pairs = [(one, other) for one in range(len(models)) for other in range(one + 1, len(models))]
    if reference is not None:
        pairs = [pair for pair in pairs if reference in pair]
    tables: dict[tuple[int, int], list[Tensor]] = {pair: [] for pair in pairs}
    for ids in batches:
        scores = [attention_scores(model, ids) for model in models]
        _check_comparable(scores, rule)
        for one, other in pairs:
            layers = [
                _sum_head_pairs(p, q, RULES[rule])
                for p, q in zip(scores[one], scores[other], strict=True)
            ]
            tables[one, other].append(torch.stack(layers, dim=1) / ids.shape[1])
    lengths = np.concatenate([[ids.shape[1]] * len(ids) for ids in batches])
    return {
        pair: Distance(torch.cat(parts).numpy(), lengths, rule, minimum)
        for pair, parts in tables.items()
    }


def attention_scores(model: PreTrainedModel, ids: Tensor) -> list[Scores]:
    """The attention scores of each layer on tokens [B, T], to be computed for any rows."""
    calls: list[seam.Call] = []
    with seam.observing(model, calls.append), seam.eval_mode(model):
        model(input_ids=ids.to(model.device), use_cache=False)
    return [Scores.from_call(call) for call in calls]


def attention_weights(scores: Scores, start: int, stop: int) -> Tensor:
    """The attention of query rows start:stop, [B, H, rows, stop] float32. Later keys are masked."""
    return scores.rows(start, stop, 1, torch.float32).softmax(-1)[..., :stop]


def _check_comparable(scores: Sequence[Sequence[Scores]], rule: str) -> None:
    depths = sorted({len(layers) for layers in scores})
    if len(depths) > 1:
        raise FarspanError(
            f"models of {' and '.join(map(str, depths))} attention layers cannot be compared layer "
            "by layer; choose models of equal depth"
        )
    if rule == "legacy" and any(layer.q.shape[1] == 1 for layers in scores for layer in layers):
        raise FarspanError(
            "the legacy rule compares heads i < j, but one of the models has a single head; "
            "use the rule jsd"
        )


def _sum_head_pairs(one: Scores, other: Scores, rule: DistanceRule) -> Tensor:
    """[B, H, H'] of two layers, summed over positions, float64 on the CPU."""
    batch, heads, queries, _ = one.q.shape
    total = torch.zeros(batch, heads, other.q.shape[1], dtype=torch.float64)

    def add_rows(start: int, stop: int) -> None:
        nonlocal total
        p = attention_weights(one, start, stop)
        q = attention_weights(other, start, stop).to(one.q.device)
        divergence = rule(p[:, :, None], q[:, None])  # [B, H, H', rows]
        total = total + divergence.sum(3, dtype=torch.float64).cpu()

    run_in_batches(queries, max(1, BUDGET // (total.numel() * queries)), add_rows)
    return total


@torch.no_grad()
def mass_by_distance(model: PreTrainedModel, batches: Sequence[Tensor]) -> np.ndarray:
    """Attention mass by distance in tokens, [layers, heads, T]; distance 0 is the token itself.

    The mean is over the queries that have a key at that distance.
    """
    longest = max(ids.shape[1] for ids in batches)
    total = queries = torch.zeros(longest, dtype=torch.float64)
    for ids in batches:
        layers = [_sum_mass(scores, longest) for scores in attention_scores(model, ids)]
        total = total + torch.stack(layers)
        queries = queries + len(ids) * (ids.shape[1] - torch.arange(longest)).clamp(min=0)
    return (total / queries).numpy()


def _sum_mass(scores: Scores, longest: int) -> Tensor:
    batch, heads, queries, _ = scores.q.shape
    total = torch.zeros(heads, longest, dtype=torch.float64, device=scores.q.device)

    def add_rows(start: int, stop: int) -> None:
        p = attention_weights(scores, start, stop).sum(0).double()  # [H, rows, keys]
        rows, keys = (
            torch.arange(start, stop, device=p.device),
            torch.arange(p.shape[-1], device=p.device),
        )
        back = rows[:, None] - keys
        total.index_add_(1, back.clamp(min=0).flatten(), (p * (back >= 0)).flatten(1))

    run_in_batches(queries, max(1, BUDGET // (batch * heads * queries)), add_rows)
    return total.cpu()


@torch.no_grad()
def attended_distance(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    starts: Sequence[Tensor] | None = None,
) -> np.ndarray:
    """How far back the most attended token is, as fractions of queries [layers, heads, BINS].

    A distance is divided by the number of tokens up to the query: 0 is the query itself, and the
    first token is near 1. Only queries from `starts` [B] on count, by default all of them.
    """
    totals: Tensor | float = 0.0
    for number, ids in enumerate(batches):
        start = torch.zeros(len(ids)) if starts is None else starts[number]
        layers = [_count_attended(scores, start) for scores in attention_scores(model, ids)]
        totals = totals + torch.stack(layers)
    assert isinstance(totals, Tensor)
    return (totals / totals.sum(-1, keepdim=True)).numpy()


def _count_attended(scores: Scores, start: Tensor) -> Tensor:
    """The number of queries whose most attended token is in each bin of distances, [H, BINS]."""
    batch, heads, queries, _ = scores.q.shape
    counts = torch.zeros(heads, BINS, dtype=torch.float64)

    def add_rows(first: int, last: int) -> None:
        weights = attention_weights(scores, first, last)  # [B, H, rows, keys]
        rows = torch.arange(first, last)
        back = rows - weights.argmax(-1).cpu()  # [B, H, rows]
        bins = back * BINS // (rows + 1) + BINS * torch.arange(heads)[:, None]
        counted = (rows >= start[:, None])[:, None].expand(back.shape)
        counts.add_(torch.bincount(bins[counted], minlength=heads * BINS).view(heads, BINS))

    run_in_batches(queries, max(1, BUDGET // (batch * heads * queries)), add_rows)
    return counts


def ablation(model: PreTrainedModel, batches: Sequence[Tensor]) -> np.ndarray:
    """How much the loss rises when one head outputs zeros, in nats per token [layers, heads].

    Only the first layers are ablated.
    """
    calls = seam.attention_calls(model)[:ABLATED_LAYERS]
    baseline = _mean_loss(model, batches)
    increases = np.zeros((len(calls), calls[0].q.shape[1]))
    for row, call in enumerate(calls):
        for head in range(increases.shape[1]):
            with seam.using(model, _zero_head(call.module, head)):
                increases[row, head] = _mean_loss(model, batches) - baseline
    return increases


def _zero_head(ablated: torch.nn.Module, head: int) -> seam.Backend:
    """The model's own attention, except that one head of one module outputs zeros."""

    def attend(module, *arguments, **options):
        output, probabilities = own_attention(module, *arguments, **options)
        if module is ablated:
            output = output.clone()
            output[:, :, head] = 0  # [B, Q, H, D]
        return output, probabilities

    return attend


def _mean_loss(model: PreTrainedModel, batches: Sequence[Tensor]) -> float:
    with seam.eval_mode(model):
        losses = [token_losses(model, ids.to(model.device)) for ids in batches]
    return float(sum(part.double().sum() for part in losses) / sum(part.numel() for part in losses))
