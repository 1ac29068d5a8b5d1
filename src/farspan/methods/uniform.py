"""UniformScale (Wang 2024, §2): one λ̂ for all heads, and how the best λ̂ grows with length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.intervals import bootstrap_interval
from farspan.methods.job import FitJob, loss_by_position, scaled_loss, search_best

COARSE = tuple(number / 5 for number in range(4, 16))  # 0.80 … 3.00
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
    interval: tuple[float, float] | None  # 95%, of the slope; None for a single window
    r2: float | None  # None if every best λ̂ is the same


def full_grid(
    model: PreTrainedModel, job: FitJob, windows: Tensor, low: float, high: float, bins: int
) -> ScaleGrid:
    """Every λ̂ from low to high in steps of 0.01 over whole windows (Appendix B, Figure 7)."""
    values = np.arange(round(low / STEP), round(high / STEP) + 1) / round(1 / STEP)
    advance = job.progress("grid", len(values))
    rows = []
    for value in values:
        with seam.scaled(model, job.uniform(float(value))):
            rows.append(_losses_by_bin(model, windows, bins))
        advance(1, f"λ̂ {value:g}")
    losses = np.array(rows)  # [S, W, bins]
    length = windows.shape[1]
    positions = (np.arange(bins) + 0.5) * length / bins
    loss = losses.mean(1)
    best = values[_lowest(loss)]
    slope, r2 = fit_log(positions, best, job.train_length)
    interval = slope_interval(slope, values, losses, positions, job.train_length)
    return ScaleGrid(values, loss, positions, best, slope, interval, r2)


def _losses_by_bin(model: PreTrainedModel, windows: Tensor, bins: int) -> np.ndarray:
    """The mean loss of each window in each bin of positions, [W, bins]."""
    curves = (loss_by_position(model, window[None]) for window in windows)
    return np.array(
        [[float(part.mean()) for part in torch.tensor_split(curve, bins)] for curve in curves]
    )


def _lowest(loss: np.ndarray) -> np.ndarray:
    """The index of the lowest loss at each position; a loss that is no number is the highest."""
    return np.where(np.isnan(loss), np.inf, loss).argmin(0)


def fit_log(positions: np.ndarray, best: np.ndarray, length: int) -> tuple[float, float | None]:
    """a of best = 1 + a·ln(i / L) over L ≤ i ≤ 8L by least squares, and R².

    The variance of equal values is 0, or a rounding error: they have no R²."""
    x, fitted = _log_positions(positions, length)
    y = best[fitted] - 1
    slope = float(x @ y / (x @ x))
    if not np.ptp(y):
        return slope, None
    residuals = y - slope * x
    return slope, 1 - float(residuals @ residuals) / float(((y - y.mean()) ** 2).sum())


def slope_interval(
    slope: float,
    values: np.ndarray,
    losses: np.ndarray,
    positions: np.ndarray,
    length: int,
    draws: int = 1000,
) -> tuple[float, float] | None:
    """The 95% interval of the slope by a bootstrap over windows; None for a single window.

    losses: [S, W, bins]. Neighboring positions share their text, so their best λ̂ move together, and
    residuals of the fit say too little about the error of the slope. Windows are independent: each
    draw resamples whole windows, chooses the best λ̂ at every position anew and fits the law again.
    """
    count = losses.shape[1]
    if count < 2:
        return None
    x, fitted = _log_positions(positions, length)
    rng = np.random.default_rng(0)
    slopes = []
    for _ in range(draws):
        drawn = losses[:, rng.integers(0, count, count)][..., fitted].mean(1)
        slopes.append(x @ (values[_lowest(drawn)] - 1) / (x @ x))
    return bootstrap_interval(slope, np.array(slopes), count)


def _log_positions(positions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """ln(i / L) of the positions that the law is fitted to, L ≤ i ≤ 8L, and which these are."""
    fitted = (positions >= length) & (positions <= 8 * length)
    return np.log(positions[fitted] / length), fitted
