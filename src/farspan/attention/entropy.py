"""Attention entropy of every query, exact, without the L×L matrix.

With s_j the scores of one query, m their maximum and x_j = s_j − m ≤ 0, two sums are enough:

    l = Σ e^x        t = Σ e^x·x
    lse = m + ln l   H = ln l − t/l

t is the *shifted* moment: nothing as large as |s| is ever subtracted, so H keeps full float32
precision where lse − E[s] would lose it. Three implementations give the same numbers: a float64
reference that materializes everything, a chunked float32 one for any device, mask and bias, and
Triton kernels (`kernels.py`) for plain causal attention on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention.backends import Backend, own_attention
from farspan.attention.call import Call, as_call
from farspan.attention.layout import visible_mask
from farspan.attention.scores import HIDDEN, Entropy, Scores
from farspan.attention.seam import attention_calls
from farspan.batching import run_in_batches


def entropy(scores: Scores, *, every: int = 1) -> Entropy:
    """Entropy of every `every`-th query, by the fastest implementation that supports the call.

    >>> entropy(Scores(q, k, scaling=0.125)).nats.mean()
    """
    kernels = supported_kernels(scores)
    if kernels is not None:
        return kernels.entropy(scores, every=every)
    return chunked_entropy(scores, every=every)


def supported_kernels(scores: Scores, v: Tensor | None = None) -> Any:
    """The module of Triton kernels if it supports this call on this device, else None."""
    if not (scores.q.is_cuda and scores.plain):
        return None
    from farspan.attention import kernels  # needs Triton

    return kernels if kernels.supported(scores, v) else None


def reference_entropy(scores: Scores, *, every: int = 1) -> Entropy:
    """The reference: float64, everything materialized, straight from the definitions."""
    s = scores.rows(0, scores.q.shape[2], every, torch.float64)
    hidden = s <= HIDDEN
    s = s.masked_fill(hidden, -math.inf)
    p = s.log_softmax(-1).exp()
    nats = -torch.special.xlogy(p, p).sum(-1).masked_fill(hidden.all(-1), 0)
    return Entropy(nats, s.logsumexp(-1))


def chunked_entropy(scores: Scores, *, every: int = 1, budget: int = 1 << 22) -> Entropy:
    """A chunk of rows at a time, in float32, with at most `budget` scores in memory.

    Memory grows with the length and not with its square. Out of memory halves the chunk; rows do
    not depend on each other."""
    batch, heads, queries, _ = scores.q.shape
    count = (queries + every - 1) // every
    out = scores.q.new_empty((2, batch, heads, count), dtype=torch.float32)

    def compute_rows(start: int, stop: int) -> None:
        chunk = scores.rows(start * every, min(stop * every, queries), every, torch.float32)
        out[:, :, :, start:stop] = _entropy_and_lse(chunk)

    with _full_precision(scores.q.device):
        run_in_batches(count, _rows_within(scores, every, budget // (batch * heads)), compute_rows)
    return Entropy(*out)


def _rows_within(scores: Scores, every: int, budget: int) -> int:
    """The rows of a chunk of at most `budget` scores per head; at least one.

    r rows in a window of w keys see at most w + r·every keys.
    """
    rows = budget // scores.k.shape[2]
    if (w := scores.window) is not None:
        rows = max(rows, int((math.sqrt(w * w + 4 * every * budget) - w) / (2 * every)))
    return max(1, rows)


def _entropy_and_lse(s: Tensor) -> Tensor:
    """[2, B, H, rows]: H and lse of scores [B, H, rows, K], which are overwritten."""
    m = s.amax(-1, keepdim=True)
    x = s.sub_(m)
    p = x.exp()
    l = p.sum(-1)
    mean = p.mul_(x).sum(-1) / l
    m = m.squeeze(-1)
    empty = m <= HIDDEN
    stacked = torch.stack((l.log() - mean, m + l.log()))
    stacked[0].masked_fill_(empty, 0)
    stacked[1].masked_fill_(empty, -math.inf)
    return stacked


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32: TF32 keeps ten bits, and entropy would lose five digits;
    under autocast they would be bf16.

    This sets torch's newer option; a caller may have set the older one."""
    backends: Any = torch.backends
    options = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [option.fp32_precision for option in options]
    for option in options:
        option.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for option, precision in zip(options, before, strict=True):
            option.fp32_precision = precision


def _slots(call: Call) -> tuple[Tensor, Tensor]:
    """The sequence position of each query, [Q], and whether it is text, [B or 1, Q].

    The last key that a query of text sees is itself. Padding is a key that no query sees."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    index = torch.arange(queries, device=call.q.device)
    if call.mask is None:  # a single query is at the end of the cache
        slots = index + (keys - 1 if queries == 1 else 0)
        return slots, torch.ones_like(slots, dtype=torch.bool)[None]
    visible = visible_mask(call.mask)[:, 0]
    last = (visible * torch.arange(keys, device=call.q.device)).amax(-1)
    slots = index + (last - index).amax().clamp(max=keys - queries)
    return slots, visible.any(1)[:, slots]


class EntropyByPosition:
    """An observer that averages entropy by layer, head and position in O(length) memory.

    Positions are grouped into `bins` of equal width; only every `every`-th query is measured.

    >>> profile = EntropyByPosition(length=4096, bins=128)
    >>> with seam.observing(model, profile):
    ...     model(ids, use_cache=False)
    >>> profile.entropy[0].shape  # of layer 0
    torch.Size([heads, 128])
    """

    def __init__(self, length: int, *, bins: int | None = None, every: int = 1):
        self.length, self.bins, self.every = length, bins or length, every
        self._sums: dict[int, Tensor] = {}  # layer -> [H, bins]
        self._counts: dict[int, Tensor] = {}  # layer -> [bins]

    def __call__(self, call: Call) -> None:
        """Measure a call; the model's own backend computes its output."""
        measured = entropy(Scores.from_call(call), every=self.every)
        slots, text = _slots(call)
        self._add(call.layer, slots[:: self.every], text[:, :: self.every], measured)

    def fused_backend(self, model: PreTrainedModel) -> Backend:
        """The same as a backend for `seam.using`.

        Where the kernels support a call, output and entropy of all queries come from one pass;
        elsewhere the model's own backend computes the output and this observes the call."""
        layers = {call.module: call.layer for call in attention_calls(model)}

        def attend(module, query, key, value, attention_mask, **options):
            call = as_call(layers[module], module, query, key, value, attention_mask, options)
            scores = Scores.from_call(call)
            kernels = supported_kernels(scores, call.v)
            if kernels is None:
                self(call)
                return own_attention(module, query, key, value, attention_mask, **options)
            output, measured = kernels.attention(scores, call.v[:, :, : scores.k.shape[2]])
            self._add(call.layer, *_slots(call), measured)
            return output.transpose(1, 2).contiguous(), None

        return attend

    def _add(self, layer: int, slots: Tensor, text: Tensor, measured: Entropy) -> None:
        nats = measured.nats
        if layer not in self._sums:
            self._sums[layer] = nats.new_zeros((nats.shape[1], self.bins), dtype=torch.float64)
            self._counts[layer] = nats.new_zeros(self.bins, dtype=torch.float64)
        bin_of = (slots * self.bins // self.length).clamp(max=self.bins - 1)
        # Padding before a text sees no key; a query beyond the length was not asked for.
        counted = torch.isfinite(measured.lse[:, 0]) & text & (slots < self.length)  # [B, rows]
        self._sums[layer].index_add_(1, bin_of, (nats.double() * counted[:, None]).sum(0))
        self._counts[layer].index_add_(0, bin_of, counted.double().sum(0))

    @property
    def layers(self) -> list[int]:
        return sorted(self._sums)

    @property
    def entropy(self) -> dict[int, Tensor]:
        """Mean entropy in nats by layer, [H, bins]; NaN in a bin without queries."""
        return {layer: (self._sums[layer] / self._counts[layer]).cpu() for layer in self.layers}
