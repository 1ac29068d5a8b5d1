"""Intervals of a bootstrap, for any estimate."""

from __future__ import annotations

import math

import numpy as np


def bootstrap_interval(value: float, draws: np.ndarray, n: int) -> tuple[float, float]:
    """The 95% percentile interval of an estimate from its values on resamples of n units.

    Percentile intervals of few units are too narrow, so they are widened by the ratio of Student's
    t to the normal. A single unit has no spread: the interval is the value itself.
    """
    low, high = value + _small_sample_factor(n) * (np.quantile(draws, (0.025, 0.975)) - value)
    return float(low), float(high)


def _small_sample_factor(n: int) -> float:
    """By how much to widen a percentile interval of n values: √(n/(n−1)) · t / 1.96.

    The root corrects that a resample spreads less than the population it stands for.
    """
    from scipy.special import ndtri, stdtrit

    if n == 1:
        return 1.0
    return math.sqrt(n / (n - 1)) * float(stdtrit(n - 1, 0.975) / ndtri(0.975))
