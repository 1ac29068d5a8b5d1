"""What every evaluation yields: cells of work, samples that are stored and shown, and scores with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Sample = dict[str, Any]  # one prompt, window or document with its outcome; JSON holds it


@dataclass(frozen=True)
class Cell:
    """A unit of work. What its samples depend on besides the model is all in here."""

    eval: str
    task: str
    length: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Which number a score is, whatever its value: what a gate can name before anything is measured."""

    eval: str
    task: str
    metric: str
    length: int


@dataclass(frozen=True)
class Score:
    """One measured number with its 95% interval, and how many things were counted for it."""

    eval: str
    metric: str
    length: int
    value: float
    low: float
    high: float
    n: int
    tags: Mapping[str, Any] = field(default_factory=dict)  # task, data, truncated, skipped, …

    @property
    def place(self) -> Place:
        return Place(self.eval, self.tags.get("task", self.eval), self.metric, self.length)


def beside(score: Score, others: Sequence[Score]) -> Score | None:
    """The same measurement of another model, if it was made."""

    def which(one: Score) -> tuple[Place, Any]:
        return one.place, one.tags.get("depth")

    return next((other for other in others if which(other) == which(score)), None)


class Eval(Protocol):
    """An evaluation: a frozen dataclass of its settings. It receives a model and never knows how it was extended."""

    def cells(self) -> list[Cell]: ...

    def places(self) -> list[Place]:
        """Of which numbers there will be scores when all cells are run, details left away, in the order of `score`."""

    def run(self, cell: Cell, model: Any, tokenizer: Any) -> list[Sample]:
        """The samples of a cell. Each carries `eval`, `task` and `length`."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """Scores from samples alone, of any number of cells."""


def bootstrap(
    values: Sequence[float],
    weights: Sequence[float] | None = None,
    groups: Sequence[Any] | None = None,
    *,
    within: tuple[float, float] = (-math.inf, math.inf),
    seed: int = 0,
    draws: int = 2000,
) -> tuple[float, float, float]:
    """The weighted mean of values and its 95% interval by percentiles, cut to the range `within` that values have. What
    is drawn again are groups (documents) where given, for values of one group are no independent witnesses; else
    single values. Percentiles of few are too narrow, and are stretched as far as Student's t reaches beyond the normal;
    one alone tells nothing about the others, and its interval is itself.

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
    for start in range(0, draws, 100):  # a few at a time, for there may be many values
        drawn = rng.integers(0, len(sums), (min(100, draws - start), len(sums)))
        means[start : start + len(drawn)] = sums[drawn].sum(1) / totals[drawn].sum(1)
    bounds = mean + _stretch(len(sums)) * (np.quantile(means, (0.025, 0.975)) - mean)
    low, high = np.clip(bounds, *within).tolist()
    return mean, low, high


def _stretch(n: int) -> float:
    """How much wider than percentiles an interval of n has to be: √(n/(n−1)), for what is drawn again spreads less than
    what it is drawn from, times Student's t over the normal's 1.96."""
    from scipy.special import ndtri, stdtrit

    if n == 1:
        return 1.0
    return math.sqrt(n / (n - 1)) * float(stdtrit(n - 1, 0.975) / ndtri(0.975))


def average(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The mean of independent means, each with its interval, and its own interval: their distances to a bound add up
    as variances do, so that it is honest where every part's is.

    >>> average([(1.0, 0.8, 1.0), (0.0, 0.0, 0.2)])
    (0.5, 0.4, 0.6)
    """
    values, lows, highs = np.array(parts, dtype=np.float64).T
    below, above = (math.hypot(*distances) / len(parts) for distances in (values - lows, highs - values))
    mean = float(values.mean())
    return mean, mean - below, mean + above


def wilson(hits: float, n: int) -> tuple[float, float, float]:
    """The share of hits and its 95% interval by Wilson's formula, which is honest where all or none hit. Where things
    hit in part, it is wider than it need be.

    >>> wilson(0, 10)[:2]
    (0.0, 0.0)
    """
    share, z = hits / n, 1.959964
    middle, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    whole = 1 + z * z / n
    low, high = (middle - spread) / whole, (middle + spread) / whole
    return share, low if hits else 0.0, high if hits < n else 1.0
