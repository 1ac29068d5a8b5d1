"""Intervals: of means whose values share documents, and of a bootstrap for any estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def bootstrap_interval(value: float, draws: np.ndarray, n: int) -> tuple[float, float]:
    """The 95% percentile interval of an estimate from its values on resamples of n units.

    Percentile intervals of few units are too narrow, so they are widened by the ratio of Student's
    t to the normal. A single unit has no spread: the interval is the value itself.
    """
    low, high = value + _small_sample_factor(n) * (np.quantile(draws, (0.025, 0.975)) - value)
    return float(low), float(high)


def mean_bound(values: np.ndarray, documents: Sequence[Any] | None = None) -> float | None:
    """Half of the 95% interval of a mean, by Student's t; None for one value or one document.

    documents: of which document each value is. Values of one document are not independent, so the
    deviations of a document count as one.
    """
    deviations = np.asarray(values) - np.mean(values)
    documents = range(len(values)) if documents is None else documents
    _, groups = np.unique(documents, return_inverse=True)
    sums = np.bincount(groups, weights=deviations)
    if len(sums) < 2:
        return None
    variance = (sums**2).sum() * len(sums) / (len(sums) - 1)
    return _student_t(len(sums)) * math.sqrt(variance) / len(values)


def _small_sample_factor(n: int) -> float:
    """By how much to widen a percentile interval of n values: √(n/(n−1)) · t / 1.96.

    The root corrects that a resample spreads less than the population it stands for.
    """
    from scipy.special import ndtri

    if n == 1:
        return 1.0
    return math.sqrt(n / (n - 1)) * _student_t(n) / float(ndtri(0.975))


def _student_t(n: int) -> float:
    """Standard errors to either side of a mean of n values that make its 95% interval."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 0.975))
