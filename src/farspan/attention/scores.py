"""The scores of one attention call, for any query rows, and the entropy computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farspan.attention.call import Call
from farspan.attention.layout import visible_mask

HIDDEN = -1e30  # the score of a masked key: e^x is 0 and e^x·x is 0, never NaN


@dataclass(frozen=True, eq=False)
class Entropy:
    """Entropy of each query's attention, [B, H, rows] float32 (float64 from the reference).

    A query that sees no key (padding) has entropy 0 and lse −∞.
    """

    nats: Tensor
    lse: Tensor  # log-sum-exp of the scores


@dataclass(frozen=True, eq=False)
class Scores:
    """The inputs of one call's scores: q·k·scaling, capped, biased, masked."""

    q: Tensor  # [B, H, Q, D]
    k: Tensor  # [B, KV, K, D]
    scaling: float | Tensor  # a number, or one for each head [H]
    mask: Tensor | None = None  # boolean or additive [B, 1, Q, K]; None is causal in the window
    bias: Any = None  # a PlacedBias: its .tensor(rows) is added to the scores
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] the score of an extra key without a value
    position_bias: Tensor | None = None  # [1 or B, H, Q, K] added by some families of transformers
    window: int | None = None  # of a call without a mask, in keys; None: all keys

    @classmethod
    def from_call(cls, call: Call) -> Scores:
        """The scores of a call observed at the seam."""
        queries = call.q.shape[2]
        # Without a mask, several queries are causal from the first key; a static cache may hold
        # more keys than that.
        k = call.k[:, :, :queries] if call.mask is None and queries > 1 else call.k
        options = call.options
        window = options.get("sliding_window") if call.mask is None else None
        return cls(
            call.q,
            k,
            call.scaling,
            call.mask,
            options.get("bias"),
            options.get("softcap"),
            options.get("s_aux"),
            options.get("position_bias"),
            None if window is None or window >= k.shape[2] else window,
        )

    @property
    def plain(self) -> bool:
        """Causal over all keys, with nothing added: the case that the kernels compute."""
        added = (self.mask, self.bias, self.softcap, self.sinks, self.position_bias, self.window)
        return all(term is None for term in added)

    def rows(self, start: int, stop: int, step: int, dtype: torch.dtype) -> Tensor:
        """Scores of query rows start:stop:step, [B, H, rows, keys]; masked keys are HIDDEN.

        Keys that no row of a causal call, or of its window, sees are left out."""
        q, k = self.q[:, :, start:stop:step], self.k
        offset = k.shape[2] - self.q.shape[2]
        rows = torch.arange(start, stop, step, device=q.device) + offset
        first = 0
        if self.mask is None:  # these numbers come from Python: a tensor's would wait for the GPU
            first = max(0, start + offset - self.window + 1) if self.window is not None else 0
            k = k[:, :, first : range(start, stop, step)[-1] + offset + 1]
        seen = slice(first, first + k.shape[2])
        scores = self._products(q.to(dtype), k.to(dtype))
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        if self.bias is not None:
            scores += self.bias.tensor(slice(start, stop, step))[..., seen].to(dtype)
        if self.position_bias is not None:
            scores += self.position_bias[:, :, start:stop:step, seen].to(dtype)
        if self.mask is None:
            distance = rows[:, None] - first - torch.arange(k.shape[2], device=q.device)
            hidden = distance < 0
            if self.window is not None:
                hidden |= distance >= self.window
            scores.masked_fill_(hidden, HIDDEN)
        else:
            mask = self.mask[:, :, start:stop:step]
            if mask.dtype != torch.bool:
                scores = scores + mask.to(dtype)
            scores.masked_fill_(~visible_mask(mask), HIDDEN)
        if self.sinks is not None:
            extra = self.sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, extra), dim=-1)
        return scores

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        batch, heads, rows, width = q.shape
        scale = self.scaling
        if isinstance(scale, Tensor):
            q = q * scale.to(q)[:, None, None]
        grouped = q.reshape(batch, k.shape[1], -1, width)  # query heads of a key head as more rows
        products = grouped @ k.transpose(-1, -2)
        if not isinstance(scale, Tensor):
            products *= scale
        return products.reshape(batch, heads, rows, -1)
