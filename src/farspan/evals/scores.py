"""Shared by all evaluations: cells of work, stored samples, and scores with 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from farspan.intervals import bootstrap_interval

Sample = dict[str, Any]  # one prompt, window or document with its outcome; JSON-serializable


@dataclass(frozen=True)
class EvalCell:
    """A unit of work. It holds everything its samples depend on besides the model."""

    eval: str
    task: str
    length: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ScoreKey:
    """Identifies a score, so that a gate can refer to it before anything is measured."""

    eval: str
    task: str
    metric: str
    length: int


@dataclass(frozen=True)
class Score:
    """A measured value, its 95% interval and the number of samples or tokens behind it."""

    eval: str
    metric: str
    length: int
    value: float
    low: float
    high: float
    n: int
    tags: Mapping[str, Any] = field(default_factory=dict)  # task, data, truncated, skipped, …

    @property
    def key(self) -> ScoreKey:
        return ScoreKey(self.eval, self.tags.get("task", self.eval), self.metric, self.length)


def matching_score(score: Score, others: Sequence[Score]) -> Score | None:
    """The same measurement of another model, or None.

    A task that the other does not solve in short texts is no measure of its context.
    """

    def identity(candidate: Score) -> tuple[ScoreKey, Any, tuple[str, ...]]:
        tasks = tuple(candidate.tags.get("task_names", ()))  # of an average
        return candidate.key, candidate.tags.get("depth"), tasks

    return next(
        (
            other
            for other in others
            if identity(other) == identity(score) and not other.tags.get("unsolved")
        ),
        None,
    )


class Eval(Protocol):
    """An evaluation: a frozen dataclass of its settings, which can run any causal LM."""

    def cells(self) -> list[EvalCell]: ...

    def score_keys(self) -> list[ScoreKey]:
        """The keys of the scores that all cells yield, without details, in the order of `score`."""

    def run(self, cell: EvalCell, model: Any, tokenizer: Any) -> list[Sample]:
        """The samples of a cell. Each has the keys `eval`, `task` and `length`."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """Scores computed from samples alone, from any number of cells."""


def bootstrap(
    values: Sequence[float],
    weights: Sequence[float] | None = None,
    groups: Sequence[Any] | None = None,
    *,
    within: tuple[float, float] = (-math.inf, math.inf),
    seed: int = 0,
    draws: int = 2000,
) -> tuple[float, float, float]:
    """The weighted mean of values and its 95% percentile bootstrap interval, clipped to `within`.

    With `groups` (documents, say) whole groups are resampled, since values of one group are not
    independent.

    >>> bootstrap([1.0, 1.0, 1.0])
    (1.0, 1.0, 1.0)
    """
    amounts = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=float)
    sums, totals = np.asarray(values, dtype=float) * amounts, amounts
    if groups is not None:
        _, member = np.unique(np.array([str(group) for group in groups]), return_inverse=True)
        sums, totals = np.bincount(member, sums), np.bincount(member, totals)
    mean = float(sums.sum() / totals.sum())
    rng = np.random.default_rng(seed)
    means = np.empty(draws)
    for start in range(0, draws, 100):  # 100 at a time bounds memory when there are many values
        drawn = rng.integers(0, len(sums), (min(100, draws - start), len(sums)))
        means[start : start + len(drawn)] = sums[drawn].sum(1) / totals[drawn].sum(1)
    low, high = np.clip(bootstrap_interval(mean, means, len(sums)), *within).tolist()
    return mean, low, high


def average(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The mean of independent (mean, low, high) triples, with its interval.

    Distances to a bound add up as standard deviations do, so the interval keeps its coverage.

    >>> average([(1.0, 0.8, 1.0), (0.0, 0.0, 0.2)])
    (0.5, 0.4, 0.6)
    """
    values, lows, highs = np.array(parts, dtype=np.float64).T
    below, above = (
        math.hypot(*distances) / len(parts) for distances in (values - lows, highs - values)
    )
    mean = float(values.mean())
    return mean, mean - below, mean + above


def wilson(hits: float, n: int) -> tuple[float, float, float]:
    """The share of hits and its 95% Wilson interval, which stays valid at 0 and at 1.

    With fractional hits the interval is conservative.

    >>> wilson(0, 10)[:2]
    (0.0, 0.0)
    """
    share, z = hits / n, 1.959964
    middle, spread = (
        share + z * z / (2 * n),
        z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2),
    )
    norm = 1 + z * z / n
    low, high = (middle - spread) / norm, (middle + spread) / norm
    return share, low if hits else 0.0, high if hits < n else 1.0
