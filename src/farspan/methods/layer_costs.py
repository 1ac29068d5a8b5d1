"""Which layers look far: what a window, or the loss of rotation, costs in each layer.

One layer at a time is changed, and the model runs over rows of text in which spans stand twice,
farther apart than the window. Two costs are measured against the unchanged model: the KL of its
output, and the loss that the repeated tokens gain, which only a look far back can predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.layout import LayerLayout, Layout
from farspan.data.recall import repeat_spans
from farspan.errors import FarspanError
from farspan.methods.job import FitJob
from farspan.model.loss import decoder_output, token_kl, token_losses


@dataclass(frozen=True)
class LayerCost:
    """What a change of one layer costs, in nats a token."""

    layer: int
    window_kl: float  # of a window on this layer
    window_retrieval: float  # loss that repeated tokens gain by it
    rotation_kl: float  # of dropping the layer's rotation; 0 if it has none
    rotation_retrieval: float


def measure_layers(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    job: FitJob,
    layers: Sequence[int],
    rotary: Sequence[int],
    window: int,
    rows: int,
) -> list[LayerCost]:
    """The cost of each of these layers; the model ends up as it was."""
    ids, known = rows_with_repeats(job.search[:rows], job.seed, window)
    advance = job.progress("measure layers", len(layers) + len(rotary))
    with torch.no_grad():
        targets = [decoder_output(teacher, row[None].to(model.device)) for row in ids]
    _, unchanged = _costs(model, teacher, ids, known, targets)

    def cost(layer: int, entry: LayerLayout) -> tuple[float, float]:
        try:
            # Not `set_layout`: it would probe the model at every change, and that takes longer.
            seam.install_layout(model, Layout({layer: entry}))
            kl, loss = _costs(model, teacher, ids, known, targets)
        finally:
            seam.remove_layout(model)
        advance(1, f"layer {layer} as {entry}: KL {kl:.4f}, retrieval {loss - unchanged:+.4f}")
        return kl, loss - unchanged

    costs = []
    for layer in layers:
        # A layer without positions is measured without them, although it gains rotation in a
        # window of a model that has none: untrained rotation would cost more than most windows.
        windowed = cost(layer, LayerLayout(layer in rotary, window))
        unrotated = cost(layer, LayerLayout(False)) if layer in rotary else (0.0, 0.0)
        costs.append(LayerCost(layer, *windowed, *unrotated))
    return costs


def retrieval_loss(model: PreTrainedModel, job: FitJob) -> float:
    """The loss of tokens that stand twice in the choose split, inside the train length."""
    length = job.train_length
    ids, known = rows_with_repeats(job.choose[:, :length], job.seed, length // 4)
    # Training holds fewer tokens at once than all rows have.
    losses = torch.cat([token_losses(model, row[None].to(model.device)).cpu() for row in ids])
    return losses[known[:, 1:]].mean().item()


def rows_with_repeats(windows: Tensor, seed: int, window: int) -> tuple[Tensor, Tensor]:
    """Windows [W, T] with spans that stand twice, and the mask of the repeated tokens."""
    rng = np.random.default_rng((seed, 0))
    pairs = [repeat_spans(row, rng, window) for row in windows]
    ids, known = (torch.stack(part) for part in zip(*pairs, strict=True))
    if not known.any():
        raise FarspanError(
            f"in windows of {ids.shape[1]} tokens nothing can stand twice more than {window} "
            "tokens apart, so no layer can be measured; choose a shorter swan.window, longer "
            "windows (swan.length), or swan.layers=even"
        )
    return ids, known


def _costs(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    ids: Tensor,
    known: Tensor,
    targets: Sequence[Any],
) -> tuple[float, float]:
    """Mean KL over all tokens, and the mean loss of the repeated tokens."""
    divergences, losses = [], []
    for row, mask, target in zip(ids, known, targets, strict=True):
        kl, loss = token_kl(model, teacher, row[None].to(model.device), target)
        divergences.append(kl.mean().item())
        losses.append(loss.cpu()[0, mask[1:]])
    return float(np.mean(divergences)), torch.cat(losses).mean().item()


def choose_layers(costs: Sequence[LayerCost], count: int, spacing: int) -> tuple[int, ...]:
    """The layers in which a window costs most retrieval, at least `spacing` layers apart.

    Where the spacing leaves too few, the dearest of the others follow.
    """
    ranked = [
        cost.layer
        for cost in sorted(costs, key=lambda cost: (-cost.window_retrieval, -cost.window_kl))
    ]
    chosen: list[int] = []
    for distance in range(max(1, spacing), 0, -1):
        for layer in ranked:
            apart = all(abs(layer - other) >= distance for other in chosen)
            if len(chosen) < count and apart:
                chosen.append(layer)
    return tuple(sorted(chosen))


def as_table(costs: Sequence[LayerCost]) -> list[dict[str, Any]]:
    """For the record, rounded."""
    return [
        {key: value if key == "layer" else round(value, 5) for key, value in asdict(cost).items()}
        for cost in costs
    ]
