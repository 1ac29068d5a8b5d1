"""Scales that follow a formula of the number of visible keys: one number for the whole model, given or fitted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.methods.job import Job, best_of, scaled_loss


@dataclass(frozen=True)
class Schedule:
    """λ̂(n) = base(slope) + slope·basis(n): the slope that the formula has by itself, and those to look among."""

    basis: str
    base: Callable[[float, int], float]  # of the slope and the training length
    given: Callable[[int], float]  # the slope, of the training length
    coarse: tuple[float, ...]
    step: float = 0.005


def _tenths(low: float, high: float, step: float) -> tuple[float, ...]:
    count = round((high - low) / step)
    return tuple(round(low + step * number, 6) for number in range(count + 1))


SCHEDULES = {
    # Paper A, §2.4: 1 inside the training length, one λ̂ beyond; it has no number of its own, so it is always fitted.
    "piecewise": Schedule("step", lambda slope, length: 1.0, lambda length: 0.0, _tenths(-0.2, 2.0, 0.2), 0.01),
    # Su: max(1, ln n / ln L) = 1 + ln⁺(n/L) / ln L
    "logn": Schedule("log", lambda slope, length: 1.0, lambda length: 1 / math.log(length), _tenths(0, 1, 0.1)),
    # Llama 4: 1 + β·ln(1 + ⌊n/L⌋), β = 0.1
    "llama4": Schedule("floor", lambda slope, length: 1.0, lambda length: 0.1, _tenths(0, 1, 0.1)),
    # SSMax: s·ln n, here with the s that leaves a context of L as it was, and b so that it stays so for any s.
    "ssmax": Schedule(
        "ln",
        lambda slope, length: 1 - slope * math.log(length),
        lambda length: 1 / math.log(length),
        _tenths(0, 1, 0.1),
    ),
}


def scheduled(model: PreTrainedModel, job: Job, method: str, fitted: bool) -> Patch:
    """A schedule zero-shot, or with its number fitted to the second split."""
    schedule = SCHEDULES[method]
    if not fitted and schedule.given(job.train_length):
        return job.patch(method, scales=_scales(job, schedule, schedule.given(job.train_length)))
    advance = job.progress(method, 0)

    def loss(slope: float) -> float:
        scales = _scales(job, schedule, slope)
        if float(scales.at(torch.tensor([2.0, job.target])).min()) <= 0:
            return math.inf
        found = scaled_loss(model, job.choose, scales)
        advance(1, f"slope {slope:g}: loss {found:.4f}")
        return found

    best, _ = best_of(loss, schedule.coarse, schedule.step)
    return job.patch(method, scales=_scales(job, schedule, best))


def _scales(job: Job, schedule: Schedule, slope: float) -> Scales:
    table = torch.full((len(job.layers), job.heads), slope)
    base = torch.full_like(table, schedule.base(slope, job.train_length))
    return Scales(job.layers, base, table, schedule.basis, job.train_length)
