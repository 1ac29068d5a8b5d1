"""How widely attention looks: the entropy of every query's attention, exact, without the L×L matrix.

With s_j the scores of one query, m their maximum and x_j = s_j − m ≤ 0, three sums tell all of it:

    l = Σ e^x        t = Σ e^x·x        u = Σ e^x·x²
    lse = m + ln l   H = ln l − t/l     Var[s] = u/l − (t/l)² = −dH/d ln λ̂

t is the *shifted* moment: nothing as large as |s| is ever subtracted, so H keeps full float32 precision where
lse − E[s] would lose it. Three implementations give the same numbers: a float64 reference that materialises
everything, a chunked float32 one for any device, mask and bias, and Triton kernels (`kernels.py`) for plain
causal attention on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention.seam import Backend, Call, as_call, attention_calls, own_backend, shown
from farspan.memory import in_pieces

HIDDEN = -1e30  # the score of a key that is not visible: e^x is 0 and e^x·x is 0, never NaN


@dataclass(frozen=True, eq=False)
class Entropy:
    """What the attention of each query looks like, each [B, H, rows] float32 (float64 from the reference).

    A query that sees no key (padding) has entropy 0 and lse −∞.
    """

    nats: Tensor
    lse: Tensor  # log-sum-exp of the scores
    sink: Tensor | None  # probability of the first key; None where it was not asked for
    variance: Tensor | None = None  # of the scores under attention; −dH/d ln λ̂

    @property
    def keys(self) -> Tensor:
        """e^H: how many keys a uniform attention of the same entropy would look at."""
        return self.nats.exp()


@dataclass(frozen=True, eq=False)
class Scores:
    """One attention call's scores, ready to be computed for any rows: q·k·scaling, capped, biased, masked."""

    q: Tensor  # [B, H, Q, D]
    k: Tensor  # [B, KV, K, D]
    scaling: float | Tensor  # a number, or one for each head [H]
    mask: Tensor | None = None  # boolean or additive [B, 1, Q, K]; None is causal
    bias: Any = None  # its .tensor(rows) is added to the scores
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] the score of an extra key that holds no value
    added: Tensor | None = None  # [1 or B, H, Q, K] what a family of transformers adds to them by position

    @classmethod
    def of(cls, call: Call) -> Scores:
        """The scores of a call seen at the seam."""
        queries = call.q.shape[2]
        # Without a mask several queries see no further than themselves; a static cache may hold more.
        k = call.k[:, :, :queries] if call.mask is None and queries > 1 else call.k
        options = call.options
        names = ("bias", "softcap", "s_aux", "position_bias")
        return cls(call.q, k, call.scaling, call.mask, *(options.get(name) for name in names))

    @property
    def plain(self) -> bool:
        """Causal, of all keys, with nothing added: what the kernels compute."""
        return self.mask is self.bias is self.softcap is self.sinks is self.added is None

    def rows(self, start: int, stop: int, step: int, dtype: torch.dtype) -> Tensor:
        """The scores of query rows start:stop:step, [B, H, rows, keys]; hidden keys are HIDDEN.

        Keys that no row of a causal call sees are left out."""
        q, k = self.q[:, :, start:stop:step], self.k
        rows = torch.arange(start, stop, step, device=q.device) + (k.shape[2] - self.q.shape[2])
        if self.mask is None:
            k = k[:, :, : int(rows[-1]) + 1]
        scores = self._products(q.to(dtype), k.to(dtype))
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        if self.bias is not None:
            scores += self.bias.tensor(slice(start, stop, step))[..., : k.shape[2]].to(dtype)
        if self.added is not None:
            scores += self.added[:, :, start:stop:step, : k.shape[2]].to(dtype)
        if self.mask is None:
            hidden = torch.arange(k.shape[2], device=q.device) > rows[:, None]
            scores.masked_fill_(hidden, HIDDEN)
        else:
            mask = self.mask[:, :, start:stop:step]
            if mask.dtype != torch.bool:
                scores = scores + mask.to(dtype)
            scores.masked_fill_(~shown(mask), HIDDEN)
        if self.sinks is not None:
            extra = self.sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, extra), dim=-1)
        return scores

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        batch, heads, rows, width = q.shape
        scale = self.scaling
        if isinstance(scale, Tensor):
            q = q * scale.to(q)[:, None, None]
        grouped = q.reshape(batch, k.shape[1], -1, width)  # the query heads of one key head, as more rows
        products = grouped @ k.transpose(-1, -2)
        if not isinstance(scale, Tensor):
            products *= scale
        return products.reshape(batch, heads, rows, -1)


def entropy(scores: Scores, *, every: int = 1, variance: bool = False) -> Entropy:
    """The entropy of every `every`-th query, by the fastest implementation that can compute it.

    >>> entropy(Scores(q, k, scaling=0.125)).nats.mean()
    """
    kernels = kernels_for(scores)
    if kernels is not None:
        return kernels.entropy(scores, every=every, variance=variance)
    return chunked_entropy(scores, every=every, variance=variance)


def kernels_for(scores: Scores, v: Tensor | None = None) -> Any:
    """The Triton kernels, if they can compute this call here."""
    if not (scores.q.is_cuda and scores.plain):
        return None
    from farspan.attention import kernels

    return kernels if kernels.supported(scores, v) else None


def reference_entropy(scores: Scores, *, every: int = 1, variance: bool = False) -> Entropy:
    """The oracle: float64, everything materialised, straight from the definitions."""
    s = scores.rows(0, scores.q.shape[2], every, torch.float64)
    hidden = s <= HIDDEN
    s = s.masked_fill(hidden, -math.inf)
    log_p = s.log_softmax(-1)
    p = log_p.exp()
    empty = hidden.all(-1)
    finite = s.masked_fill(hidden, 0)
    nats = -torch.special.xlogy(p, p).sum(-1).masked_fill(empty, 0)
    mean = (p * finite).sum(-1, keepdim=True)
    spread = (p * (finite - mean) ** 2).sum(-1).masked_fill(empty, 0)
    return Entropy(nats, s.logsumexp(-1), p[..., 0].masked_fill(empty, 0), spread if variance else None)


def chunked_entropy(scores: Scores, *, every: int = 1, variance: bool = False, budget: int = 1 << 22) -> Entropy:
    """Some rows at a time, in float32: at most `budget` scores are held at once, so memory grows with the length
    and not with its square. Out of memory halves the budget and goes on; rows do not depend on each other."""
    batch, heads, queries, _ = scores.q.shape
    count = (queries + every - 1) // every
    out = scores.q.new_empty((4, batch, heads, count), dtype=torch.float32)

    def some_rows(start: int, stop: int) -> None:
        part = scores.rows(start * every, min(stop * every, queries), every, torch.float32)
        out[:, :, :, start:stop] = _moments(part)

    with _full_precision():
        in_pieces(count, max(1, budget // (batch * heads * scores.k.shape[2])), some_rows)
    nats, lse, sink, spread = out
    return Entropy(nats, lse, sink, spread if variance else None)


def _moments(s: Tensor) -> Tensor:
    """[4, B, H, rows]: H, lse, the first key's mass and Var[s] of scores [B, H, rows, K]."""
    m = s.amax(-1, keepdim=True)
    first = s[..., 0].clone()
    x = s.sub_(m)
    p = x.exp()
    l = p.sum(-1)
    px = p.mul_(x)
    mean = px.sum(-1) / l
    spread = px.mul_(x).sum(-1) / l - mean**2
    m = m.squeeze(-1)
    empty = m <= HIDDEN
    stacked = torch.stack((l.log() - mean, m + l.log(), (first - m).exp() / l, spread))
    stacked.masked_fill_(empty, 0)
    stacked[1].masked_fill_(empty, -math.inf)
    return stacked


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 products in float32: TF32 keeps ten bits of them, and entropy would lose five digits."""
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [each.fp32_precision for each in products]  # torch's older setting is lost for who uses this one
    for each in products:
        each.fp32_precision = "ieee"
    try:
        yield
    finally:
        for each, precision in zip(products, before, strict=True):
            each.fp32_precision = precision


def _slots(call: Call) -> Tensor:
    """Where each query stands in the sequence, [Q]: at the last key that it sees, for it sees itself."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    if call.mask is None:  # a single query stands at the end of what the cache holds
        return torch.arange(queries, device=call.q.device) + (keys - 1 if queries == 1 else 0)
    return (shown(call.mask)[:, 0] * torch.arange(keys, device=call.q.device)).amax(-1).amax(0)


class EntropyByPosition:
    """An observer that averages entropy by layer, head and position while a model runs: O(length) memory.

    Positions are grouped into `bins` of equal width; `every` looks at every so-many-th query only.

    >>> profile = EntropyByPosition(length=4096, bins=128)
    >>> with seam.observing(model, profile):
    ...     model(ids, use_cache=False)
    >>> profile.entropy[0].shape  # of layer 0
    torch.Size([heads, 128])
    """

    def __init__(self, length: int, *, bins: int | None = None, every: int = 1):
        self.length, self.bins, self.every = length, bins or length, every
        self._sums: dict[int, Tensor] = {}  # layer -> [2, H, bins]: entropy, first-key mass
        self._counts: dict[int, Tensor] = {}  # layer -> [bins]

    def __call__(self, call: Call) -> None:
        """Look at a call and leave its computation to the model's own backend."""
        found = entropy(Scores.of(call), every=self.every)
        self._add(call.layer, _slots(call)[:: self.every], found)

    def fused(self, model: PreTrainedModel) -> Backend:
        """The same as a backend for `seam.using`: where the kernels can, output and entropy come from one pass, of all
        queries; where they cannot, the model's own backend computes and this looks on."""
        layers = {call.module: call.layer for call in attention_calls(model)}

        def attend(module, query, key, value, attention_mask, **options):
            call = as_call(layers[module], module, query, key, value, attention_mask, options)
            scores = Scores.of(call)
            kernels = kernels_for(scores, call.v)
            if kernels is None:
                self(call)
                return own_backend(module)(module, query, key, value, attention_mask, **options)
            output, found = kernels.attention(scores, call.v[:, :, : scores.k.shape[2]])
            self._add(call.layer, _slots(call), found)
            return output.transpose(1, 2).contiguous(), None

        return attend

    def _add(self, layer: int, slots: Tensor, found: Entropy) -> None:
        nats = found.nats
        if layer not in self._sums:
            self._sums[layer] = nats.new_zeros((2, nats.shape[1], self.bins), dtype=torch.float64)
            self._counts[layer] = nats.new_zeros(self.bins, dtype=torch.float64)
        bin_of = (slots * self.bins // self.length).clamp(max=self.bins - 1)
        # A query that sees nothing is padding; one beyond the length was not asked for.
        seen = (torch.isfinite(found.lse[:, 0]) & (slots < self.length)).double()  # [B, rows]
        for which, values in enumerate((nats, found.sink)):
            assert values is not None
            self._sums[layer][which].index_add_(1, bin_of, (values.double() * seen[:, None]).sum(0))
        self._counts[layer].index_add_(0, bin_of, seen.sum(0))

    @property
    def layers(self) -> list[int]:
        return sorted(self._sums)

    def _mean(self, which: int) -> dict[int, Tensor]:
        return {layer: (self._sums[layer][which] / self._counts[layer]).cpu() for layer in self.layers}

    @property
    def entropy(self) -> dict[int, Tensor]:
        """Mean entropy in nats by layer, [H, bins]; NaN where no query stood."""
        return self._mean(0)

    @property
    def sink(self) -> dict[int, Tensor]:
        """Mean probability of the first key by layer, [H, bins]."""
        return self._mean(1)
