"""Where a curve leaves its trend, which heads are distracted, and which scale to start from.

Inside the train length, loss and entropy follow a + b·ln(position) closely. A **knee** is the
first position after which the smoothed curve stays above the extrapolated trend by more than a
margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from farspan.errors import FarspanError

SLOPE = 0.36  # of the best λ̂ over ln(length/train_length)


@dataclass(frozen=True)
class KneeRule:
    """When a curve counts as having left its trend; recorded with every diagnosis."""

    margin: float = 0.1  # nats above the trend,
    noise: float = 3.0  # and at least this many standard errors of the smoothed curve
    smoothing: float = 1 / 16  # width of the running mean, in train lengths
    trend_from: float = 1 / 4  # the trend is fitted from this part of the train length on
    head_margin: float = 0.25  # a head whose last eighth is so many nats too high is distracted
    inside_margin: float = 1.0  # nats that a scale may add to the loss inside the train length
    doubt: float = 0.5  # a loss without a knee that ends so many nats too high is inconclusive


@dataclass(frozen=True)
class Trend:
    """a + b·ln(position), with the scatter of the smoothed curve around it."""

    a: float
    b: float
    scatter: float
    middle: float  # mean of ln(position) over the fitted points
    spread: float  # standard deviation of ln(position) over them
    points: float  # independent ones: those within one smoothing width count as one

    def at(self, positions: np.ndarray) -> np.ndarray:
        return self.a + self.b * np.log(positions)

    def error(self, positions: np.ndarray) -> np.ndarray:
        """One standard deviation of a smoothed value around the extrapolated trend."""
        leverage = (np.log(positions) - self.middle) / self.spread
        return self.scatter * np.sqrt(1 + (1 + leverage**2) / self.points)


def smooth(positions: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """Mean of all finite values within half a width of each position.

    Values that are not finite stay as they are.
    """
    finite = np.isfinite(values)
    near = positions[:, None] - positions  # 1 or 0 below, in place: it is large for many bins
    np.less_equal(np.abs(near, out=near), width / 2, out=near, casting="unsafe")
    near *= finite
    return np.where(finite, near @ np.where(finite, values, 0) / near.sum(1).clip(1), values)


def fit_trend(
    positions: np.ndarray, values: np.ndarray, train_length: int, rule: KneeRule, rising: bool
) -> Trend:
    """The trend inside the train length; with `rising` False, as for loss, b is at most 0."""
    smoothed = smooth(positions, values, rule.smoothing * train_length)
    return _fit_smoothed(positions, smoothed, train_length, rule, rising)


def _fit_smoothed(
    positions: np.ndarray, smoothed: np.ndarray, train_length: int, rule: KneeRule, rising: bool
) -> Trend:
    inside = (
        (positions >= rule.trend_from * train_length)
        & (positions <= train_length)
        & np.isfinite(smoothed)
    )
    if inside.sum() < 4:
        raise FarspanError(
            f"only {inside.sum()} finite points of the curve lie inside the train length of "
            f"{train_length} tokens, too few for a trend; choose shorter lengths, or check "
            "the train length"
        )
    x, y = np.log(positions[inside]), smoothed[inside]
    b, a = np.polyfit(x, y, 1)
    if b > 0 and not rising:
        b, a = 0.0, y.mean()
    return Trend(
        a=float(a),
        b=float(b),
        scatter=float(np.std(y - (a + b * x))),
        middle=float(x.mean()),
        spread=float(x.std()),
        points=(1 - rule.trend_from) / rule.smoothing,
    )


def excess(
    positions: np.ndarray, values: np.ndarray, train_length: int, rule: KneeRule, rising: bool
) -> np.ndarray:
    """How far the smoothed curve lies above its trend, in margins: above 1 is off the trend.

    Values that are not finite are infinitely far off.
    """
    smoothed = smooth(positions, values, rule.smoothing * train_length)
    trend = _fit_smoothed(positions, smoothed, train_length, rule, rising)
    margin = np.maximum(rule.margin, rule.noise * trend.error(positions))
    above = smoothed - trend.at(positions)
    return np.where(np.isfinite(above), above / margin, np.inf)


def find_knee(
    positions: np.ndarray, values: np.ndarray, train_length: int, rule: KneeRule, rising: bool
) -> int | None:
    """The first position after which the curve stays off its trend; None if it ends on it."""
    outside = excess(positions, values, train_length, rule, rising) > 1
    if not outside[-1]:
        return None
    inside = np.flatnonzero(~outside)
    first = inside[-1] + 1 if len(inside) else 0
    short = positions[-1] - positions[first] < 2 * rule.smoothing * train_length
    if short and np.isfinite(values[-1]):
        return None  # so short a stretch may be noise, unless it is not finite
    return round(float(positions[first]))


def excess_at_end(
    positions: np.ndarray, values: np.ndarray, train_length: int, rule: KneeRule, rising: bool
) -> float:
    """Mean nats above the trend over the last eighth of positions, whether noise or not."""
    last = positions > positions[-1] * 7 / 8
    trend = fit_trend(positions, values, train_length, rule, rising)
    return float((values - trend.at(positions))[last].mean())


def distracted_heads(
    positions: np.ndarray, heads: dict[int, np.ndarray], train_length: int, rule: KneeRule
) -> list[tuple[int, int]]:
    """(layer, head) of heads whose entropy lies above its trend over the last eighth."""
    last = positions > positions[-1] * 7 / 8
    distracted = []
    for layer, table in heads.items():
        for head, values in enumerate(table):
            trend = fit_trend(positions, values, train_length, rule, rising=True)
            margin = max(rule.head_margin, rule.noise * float(trend.error(positions[last]).mean()))
            if (values - trend.at(positions))[last].mean() > margin:
                distracted.append((layer, head))
    return distracted


def suggest_scale(train_length: int, length: int) -> float:
    """A uniform λ̂ to start a search from, for `length` tokens and layers without positions.

    In Wang 2024 the best λ̂ of such models grows as 1 + a·ln(length/train_length). a is 0.397 for
    their 1.1B model and 0.317 for `small-nope` (29M); 0.36 lies between. The curves are not used
    on purpose: the first-order step in ln λ̂ that would bring entropy back to its trend,
    excess/variance, is far too large because entropy is not linear over such a distance.

    >>> suggest_scale(2048, 8192)
    1.5
    """
    return round(1 + SLOPE * math.log(length / train_length), 2)
