"""Scales that follow a formula of the number of visible keys, with one slope per model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.methods.job import FitJob, scaled_loss, search_best


@dataclass(frozen=True)
class Schedule:
    """λ̂(n) = base(slope) + slope·basis(n), and the grid to fit the slope on.

    The grid has `coarse` values first, then is refined to `step` around the best one. A schedule
    whose formula gives no slope has no default and is always fitted.
    """

    basis: str
    base: Callable[[float, int], float]  # of the slope and the train length
    default_slope: Callable[[int], float] | None  # of the train length
    coarse: tuple[float, ...]
    step: float = 0.005


def _grid(low: float, high: float, step: float) -> tuple[float, ...]:
    count = round((high - low) / step)
    return tuple(round(low + step * number, 6) for number in range(count + 1))


SCHEDULES = {
    # Wang 2024, §2.4: 1 inside the train length, one λ̂ beyond.
    "piecewise": Schedule("step", lambda slope, length: 1.0, None, _grid(-0.2, 2.0, 0.2), 0.01),
    # Su: max(1, ln n / ln L) = 1 + ln⁺(n/L) / ln L
    "logn": Schedule(
        "log", lambda slope, length: 1.0, lambda length: 1 / math.log(length), _grid(0, 1, 0.1)
    ),
    # Llama 4: 1 + β·ln(1 + ⌊n/L⌋), β = 0.1
    "llama4": Schedule("floor", lambda slope, length: 1.0, lambda length: 0.1, _grid(0, 1, 0.1)),
    # SSMax: s·ln n, with the base that keeps λ̂(L) = 1 for any s.
    "ssmax": Schedule(
        "ln",
        lambda slope, length: 1 - slope * math.log(length),
        lambda length: 1 / math.log(length),
        _grid(0, 1, 0.1),
    ),
}


def fit_schedule(model: PreTrainedModel, job: FitJob, method: str, fitted: bool) -> Patch:
    """A schedule with its default slope, or with the slope fitted to the choose split."""
    schedule = SCHEDULES[method]
    if not fitted and schedule.default_slope:
        default = schedule.default_slope(job.train_length)
        return job.patch(method, scales=_scales(job, schedule, default))
    advance = job.progress(method, 0)

    def slope_loss(slope: float) -> float:
        scales = _scales(job, schedule, slope)
        if float(scales.at(torch.tensor([2.0, job.target])).min()) <= 0:
            return math.inf
        loss = scaled_loss(model, job.choose, scales)
        advance(1, f"slope {slope:g}: loss {loss:.4f}")
        return loss

    best, _ = search_best(slope_loss, schedule.coarse, schedule.step)
    return job.patch(method, scales=_scales(job, schedule, best))


def _scales(job: FitJob, schedule: Schedule, slope: float) -> Scales:
    table = torch.full((len(job.layers), job.heads), slope)
    base = torch.full_like(table, schedule.base(slope, job.train_length))
    return Scales(job.layers, base, table, schedule.basis, job.train_length)
