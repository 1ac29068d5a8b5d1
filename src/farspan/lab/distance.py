"""How alike do two models attend, and what do their heads do?

Two models read the same tokens. For each layer, every head of the one is compared with every head of the other by the
Jensen–Shannon divergence of what they attend to, averaged over the positions: from 0, the same, to ln 2, nothing in
common. Probabilities exist for a few rows at a time, so that real text fits.

Paper B's released code gives another number, which `legacy` names: ½[KL(m‖p) + KL(m‖q)], with no upper bound, over the
pairs of heads i < j alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.entropy import Scores
from farspan.errors import FarspanError
from farspan.memory import in_pieces
from farspan.model.loss import token_losses

BUDGET = 1 << 24  # numbers held at once
Rule = Callable[[Tensor, Tensor], Tensor]


def entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """H(½p + ½q) − ½H(p) − ½H(q) of each pair of rows, in nats: 0 … ln 2."""
    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).clamp(min=0)


def legacy(p: Tensor, q: Tensor) -> Tensor:
    """½[KL(m‖p) + KL(m‖q)] with m = ½p + ½q: the divergence of Jensen and Shannon the wrong way round."""
    tiny = torch.finfo(p.dtype).tiny  # what no float can hold counts as the smallest that it can
    m = (p + q) / 2
    logs = (p.clamp(min=tiny).log() + q.clamp(min=tiny).log()) / 2
    return -entropy(m) - (m * logs).sum(-1)


RULES: dict[str, Rule] = {"jsd": jsd, "legacy": legacy}


@dataclass(frozen=True, eq=False)
class Distance:
    """Between two models: every head of a layer of the one with every head of that layer of the other."""

    pairs: np.ndarray  # [layers, heads, heads'] nats
    rule: str = "jsd"

    @property
    def nearest(self) -> np.ndarray:
        """Of the two heads that are most alike, [layers]; the legacy rule looks at pairs i < j alone."""
        pairs = self.pairs
        if self.rule == "legacy":
            pairs = np.where(np.triu(np.ones(pairs.shape[1:], dtype=bool), 1), pairs, np.inf)
        return pairs.min((1, 2))

    @property
    def matched(self) -> np.ndarray:
        """The mean over heads when each is matched with another one's so that the sum is least, [layers]."""
        from scipy.optimize import linear_sum_assignment

        return np.array([table[linear_sum_assignment(table)].mean() for table in self.pairs])


@torch.no_grad()
def distances(
    models: Sequence[PreTrainedModel], batches: Sequence[Tensor], *, rule: str = "jsd", budget: int = BUDGET
) -> dict[tuple[int, int], Distance]:
    """The distance between every two of the models, by their numbers, over batches of tokens [B, T].

    >>> distances([nope, t5], [ids])[0, 1].nearest
    """
    pairs = [(one, other) for one in range(len(models)) for other in range(one + 1, len(models))]
    sums = dict.fromkeys(pairs, torch.zeros((), dtype=torch.float64))
    positions = 0
    for ids in batches:
        seen = [attention(model, ids) for model in models]
        _check_alike(seen, rule)
        for one, other in pairs:
            found = torch.stack(
                [_head_pairs(p, q, RULES[rule], budget) for p, q in zip(seen[one], seen[other], strict=True)]
            )
            sums[one, other] = sums[one, other] + found
        positions += ids.numel()
    return {pair: Distance((total / positions).numpy(), rule) for pair, total in sums.items()}


def attention(model: PreTrainedModel, ids: Tensor) -> list[Scores]:
    """What each layer attends by, on tokens [B, T]: scores that can be computed for any rows."""
    calls: list[seam.Call] = []
    with seam.observing(model, calls.append), seam.evaluating(model):
        model(input_ids=ids.to(model.device), use_cache=False)
    return [Scores.of(call) for call in calls]


def weights(scores: Scores, start: int, stop: int) -> Tensor:
    """The attention of query rows start:stop, [B, H, rows, stop] float32: no row looks beyond the last of them."""
    return scores.rows(start, stop, 1, torch.float32).softmax(-1)[..., :stop]


def _check_alike(seen: Sequence[Sequence[Scores]], rule: str) -> None:
    depths = sorted({len(layers) for layers in seen})
    if len(depths) > 1:
        raise FarspanError(
            f"models of {' and '.join(map(str, depths))} attention layers cannot be compared layer by layer; "
            "give models of one depth"
        )
    if rule == "legacy" and any(scores.q.shape[1] == 1 for layers in seen for scores in layers):
        raise FarspanError("the legacy rule compares heads i < j, and a model here has one head; leave that rule out")


def _head_pairs(one: Scores, other: Scores, rule: Rule, budget: int) -> Tensor:
    """[H, H'] of two layers, summed over batch and positions, float64 on the CPU."""
    batch, heads, queries, _ = one.q.shape
    total = torch.zeros(heads, other.q.shape[1], dtype=torch.float64)

    def some_rows(start: int, stop: int) -> None:
        nonlocal total
        p, q = weights(one, start, stop), weights(other, start, stop).to(one.q.device)
        found = rule(p[:, :, None], q[:, None])  # [B, H, H', rows]
        total = total + found.sum((0, 3), dtype=torch.float64).cpu()

    in_pieces(queries, max(1, budget // (batch * total.numel() * queries)), some_rows)
    return total


@torch.no_grad()
def mass_by_distance(model: PreTrainedModel, batches: Sequence[Tensor], *, budget: int = BUDGET) -> np.ndarray:
    """How much attention goes so many tokens back, [layers, heads, T]: 0 is the token itself. The mean over the queries
    that can look back that far."""
    longest = max(ids.shape[1] for ids in batches)
    total = queries = torch.zeros(longest, dtype=torch.float64)
    for ids in batches:
        total = total + torch.stack([_mass(scores, longest, budget) for scores in attention(model, ids)])
        queries = queries + len(ids) * (ids.shape[1] - torch.arange(longest)).clamp(min=0)
    return (total / queries).numpy()


def _mass(scores: Scores, longest: int, budget: int) -> Tensor:
    batch, heads, queries, _ = scores.q.shape
    total = torch.zeros(heads, longest, dtype=torch.float64, device=scores.q.device)

    def some_rows(start: int, stop: int) -> None:
        p = weights(scores, start, stop).sum(0).double()  # [H, rows, keys]
        back = torch.arange(start, stop, device=p.device)[:, None] - torch.arange(p.shape[-1], device=p.device)
        total.index_add_(1, back.clamp(min=0).flatten(), (p * (back >= 0)).flatten(1))

    in_pieces(queries, max(1, budget // (batch * heads * queries)), some_rows)
    return total.cpu()


def ablation(model: PreTrainedModel, batches: Sequence[Tensor], *, layers: int = 4) -> np.ndarray:
    """How much the loss rises when one head says nothing, nats a token [layers, heads], for the first layers."""
    calls = seam.attention_calls(model)[:layers]
    whole = _mean_loss(model, batches)
    found = np.zeros((len(calls), calls[0].q.shape[1]))
    for row, call in enumerate(calls):
        for head in range(found.shape[1]):
            with seam.using(model, _silencing(call.module, head)):
                found[row, head] = _mean_loss(model, batches) - whole
    return found


def _silencing(silenced: torch.nn.Module, head: int) -> seam.Backend:
    """The model's own attention, but for one head of one module, which gives zeros."""

    def attend(module, *arguments, **options):
        output, probabilities = seam.own_backend(module)(module, *arguments, **options)
        if module is silenced:
            output = output.clone()
            output[:, :, head] = 0  # [B, Q, H, D]
        return output, probabilities

    return attend


def _mean_loss(model: PreTrainedModel, batches: Sequence[Tensor]) -> float:
    with seam.evaluating(model):
        losses = [token_losses(model, ids.to(model.device)) for ids in batches]
    return float(sum(part.double().sum() for part in losses) / sum(part.numel() for part in losses))
