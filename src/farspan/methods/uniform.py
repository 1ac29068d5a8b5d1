"""UniformScale (Wang 2024, §2): one λ̂ for all heads, and how the best λ̂ grows with length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.methods.job import FitJob, loss_by_position, scaled_loss, search_best

COARSE = tuple(round(0.8 + 0.2 * number, 2) for number in range(12))  # 0.80 … 3.00
STEP = 0.01


def uniform(model: PreTrainedModel, job: FitJob) -> Patch:
    """The λ̂ with the lowest mean loss over the target length."""
    advance = job.progress("uniform", 0)

    def uniform_loss(value: float) -> float:
        loss = scaled_loss(model, job.choose, job.uniform(value))
        advance(1, f"λ̂ {value:g}: loss {loss:.4f}")
        return loss

    best, _ = search_best(uniform_loss, COARSE, STEP)
    return job.patch("uniform", scales=job.uniform(best))


@dataclass(frozen=True, eq=False)
class ScaleGrid:
    """Loss by position for a grid of λ̂, the best λ̂ at each position, and a law fitted to it."""

    values: np.ndarray  # [S]
    loss: np.ndarray  # [S, bins] nats
    positions: np.ndarray  # [bins]
    best: np.ndarray  # [bins]
    slope: float  # a of 1 + a·ln(i / L), fitted over L … 8L
    interval: tuple[float, float]  # 95%, of the slope
    r2: float


def full_grid(
    model: PreTrainedModel, job: FitJob, windows: Tensor, low: float, high: float, bins: int = 64
) -> ScaleGrid:
    """Every λ̂ from low to high in steps of 0.01 over whole windows (Appendix B, Figure 7)."""
    values = np.round(np.arange(round(low / STEP), round(high / STEP) + 1) * STEP, 2)
    advance = job.progress("grid", len(values))
    rows = []
    try:
        for value in values:
            seam.install(model, job.uniform(float(value)))
            curve = loss_by_position(model, windows)
            rows.append([float(part.mean()) for part in torch.tensor_split(curve, bins)])
            advance(1, f"λ̂ {value:g}")
    finally:
        seam.remove_scales(model)
    loss = np.array(rows)
    length = windows.shape[1]
    positions = (np.arange(bins) + 0.5) * length / bins
    best = values[loss.argmin(0)]
    slope, interval, r2 = fit_log(positions, best, job.train_length)
    return ScaleGrid(values, loss, positions, best, slope, interval, r2)


def fit_log(
    positions: np.ndarray, best: np.ndarray, length: int
) -> tuple[float, tuple[float, float], float]:
    """a of best = 1 + a·ln(i / L) over L ≤ i ≤ 8L by least squares, its 95% interval and R²."""
    fitted = (positions >= length) & (positions <= 8 * length)
    x, y = np.log(positions[fitted] / length), best[fitted] - 1
    slope = float(x @ y / (x @ x))
    residuals = y - slope * x
    squares = float(residuals @ residuals)
    error = math.sqrt(squares / max(1, len(x) - 1) / float(x @ x))
    variance = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - squares / variance if variance else 1.0
    return slope, (slope - 1.96 * error, slope + 1.96 * error), r2
