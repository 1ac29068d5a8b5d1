"""The average over tasks, each counting the same however many items it has, with an interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 2000


def average(tasks: Sequence[Sequence[float]], *, seed: int = 0) -> tuple[float, float, float]:
    """The mean of the tasks' means, and its 95% interval: the items of every task are drawn again by themselves.

    >>> average([[1.0, 1.0], [0.0]])
    (0.5, 0.5, 0.5)
    """
    rng = np.random.default_rng(seed)
    drawn = np.zeros(DRAWS)
    for values in map(np.asarray, tasks):
        for start in range(0, DRAWS, 100):  # a few at a time, for there may be many items
            drawn[start : start + 100] += values[rng.integers(0, len(values), (100, len(values)))].mean(1)
    low, high = np.quantile(drawn / len(tasks), (0.025, 0.975))
    return float(np.mean([np.mean(values) for values in tasks])), float(low), float(high)
