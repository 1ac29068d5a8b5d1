"""Loss and attention entropy by position, from one pass over each window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.entropy import EntropyByPosition
from farspan.model.loss import token_losses

ROWS_ON_CPU = 2048  # entropy is taken of about so many queries of a window where it costs as much as the model


@dataclass(frozen=True, eq=False)
class Curves:
    """Means over windows, by bins of positions; a position is the number of tokens that the model has seen there."""

    positions: np.ndarray  # [bins] the middle of each bin
    loss: np.ndarray  # [bins] nats a token
    heads: dict[int, np.ndarray]  # layer -> [H, bins] entropy in nats
    variance: dict[int, np.ndarray]  # layer -> [H, bins] −dH/d ln λ̂
    windows: int
    length: int  # tokens of a window
    every: int  # entropy is of every so-many-th query

    @property
    def entropy(self) -> np.ndarray:
        """Mean over all heads of all layers, [bins]."""
        return np.concatenate(list(self.heads.values())).mean(0)

    def loss_at(self, length: int, span: int) -> float:
        """Mean loss over the `span` positions before a length."""
        near = (self.positions > length - span) & (self.positions <= length)
        return float(self.loss[near].mean())


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    bins: int,
    every: int | None = None,
    after_window: Callable[[], None] = lambda: None,
) -> Curves:
    """Run the model once over each window of ids [windows, length]; memory is that of one window."""
    length = ids.shape[1]
    bins = min(bins, length // 2)  # so that the last one holds a prediction too: the last token makes none
    if every is None:
        every = 1 if model.device.type == "cuda" else max(1, length // ROWS_ON_CPU)
    profile = EntropyByPosition(length, bins=bins, every=min(every, length // bins))
    bin_of = torch.arange(length - 1) * bins // length
    total, count = torch.zeros(bins, dtype=torch.float64), torch.bincount(bin_of, minlength=bins)
    for window in ids:
        window = window[None].to(model.device)
        with seam.using(model, profile.fused(model)):
            losses = token_losses(model, window)
        total.index_add_(0, bin_of, losses[0].double().cpu())
        after_window()
    edges = np.arange(bins + 1) * length / bins
    return Curves(
        positions=(edges[:-1] + edges[1:] + 1) / 2,
        loss=(total / (count * len(ids))).numpy(),
        heads={layer: table.numpy() for layer, table in profile.entropy.items()},
        variance={layer: table.numpy() for layer, table in profile.variance.items()},
        windows=len(ids),
        length=length,
        every=profile.every,
    )
