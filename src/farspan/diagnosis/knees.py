"""Where does a curve leave its trend, which heads spread their attention, and how much sharper should it be?

Inside the training length, loss and entropy follow a + b·ln(position) closely. A **knee** is the first position after
which the smoothed curve stays above that trend, carried on, by more than a margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from farspan.errors import FarspanError

SLOPE = 0.36  # of the best λ̂ over ln(length/train_length)


@dataclass(frozen=True)
class Rule:
    """What counts as leaving a trend; part of every record."""

    margin: float = 0.1  # nats above the trend
    noise: float = 3.0  # … and at least so many standard deviations of the smoothed curve around the trend
    smoothing: float = 1 / 16  # width of the running mean, in training lengths
    trend_from: float = 1 / 4  # the trend is fitted between this part of the training length and all of it
    head_margin: float = 0.25  # a head is distracted when its last eighth lies so many nats above its own trend
    inside_margin: float = 1.0  # nats above the loss without a scale, at the end of the training length: it fails
    doubt: float = 0.5  # nats above its trend over the last eighth: a loss without a knee is not said to keep it


@dataclass(frozen=True)
class Trend:
    """a + b·ln(position), with the scatter of the smoothed curve around it."""

    a: float
    b: float
    scatter: float
    middle: float  # mean and spread of ln(position) where it was fitted
    spread: float
    points: float  # independent ones: what lies within one smoothing width counts as one

    def at(self, positions: np.ndarray) -> np.ndarray:
        return self.a + self.b * np.log(positions)

    def error(self, positions: np.ndarray) -> np.ndarray:
        """One standard deviation of a smoothed value around the trend carried on to a position."""
        lever = (np.log(positions) - self.middle) / self.spread
        return self.scatter * np.sqrt(1 + (1 + lever**2) / self.points)


def smooth(positions: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """The mean of all finite values within half a width of each position; where a value is not finite, that value."""
    finite = np.isfinite(values)
    near = (np.abs(positions[:, None] - positions) <= width / 2) & finite
    return np.where(finite, near @ np.where(finite, values, 0) / near.sum(1).clip(1), values)


def fit_trend(positions: np.ndarray, values: np.ndarray, train_length: int, rule: Rule, rising: bool) -> Trend:
    """The trend inside the training length. Loss never rises there by nature: with `rising` False, b is at most 0."""
    inside = (positions >= rule.trend_from * train_length) & (positions <= train_length) & np.isfinite(values)
    if inside.sum() < 4:
        raise FarspanError(
            f"only {inside.sum()} finite points of the curve lie inside the training length of {train_length} tokens, "
            "too few for a trend; ask for shorter lengths, or check --train-length"
        )
    x, y = np.log(positions[inside]), smooth(positions, values, rule.smoothing * train_length)[inside]
    b, a = np.polyfit(x, y, 1)
    if b > 0 and not rising:
        b, a = 0.0, y.mean()
    independent = (1 - rule.trend_from) / rule.smoothing
    return Trend(float(a), float(b), float(np.std(y - (a + b * x))), float(x.mean()), float(x.std()), independent)


def excess(positions: np.ndarray, values: np.ndarray, train_length: int, rule: Rule, rising: bool) -> np.ndarray:
    """How far the smoothed curve lies above its trend, in margins: more than 1 is outside; so is what is not finite."""
    trend = fit_trend(positions, values, train_length, rule, rising)
    margin = np.maximum(rule.margin, rule.noise * trend.error(positions))
    above = smooth(positions, values, rule.smoothing * train_length) - trend.at(positions)
    return np.where(np.isfinite(above), above / margin, np.inf)


def find_knee(positions: np.ndarray, values: np.ndarray, train_length: int, rule: Rule, rising: bool) -> int | None:
    """The first position after which the curve stays outside its trend; None if it ends inside."""
    outside = excess(positions, values, train_length, rule, rising) > 1
    if not outside[-1]:
        return None
    inside = np.flatnonzero(~outside)
    first = inside[-1] + 1 if len(inside) else 0
    short = positions[-1] - positions[first] < 2 * rule.smoothing * train_length
    if short and np.isfinite(values[-1]):
        return None  # too short a stretch to say that it stays there; what is not finite does not come from noise
    return round(float(positions[first]))


def above_at_the_end(positions: np.ndarray, values: np.ndarray, train_length: int, rule: Rule, rising: bool) -> float:
    """How far a curve lies above its trend over the last eighth of positions, in its mean, whether noise or not."""
    last = positions > positions[-1] * 7 / 8
    return float((values - fit_trend(positions, values, train_length, rule, rising).at(positions))[last].mean())


def distracted_heads(
    positions: np.ndarray, heads: dict[int, np.ndarray], train_length: int, rule: Rule
) -> list[tuple[int, int]]:
    """(layer, head) of every head whose entropy over the last eighth of positions stays above its own trend."""
    last = positions > positions[-1] * 7 / 8
    found = []
    for layer, table in heads.items():
        for head, values in enumerate(table):
            trend = fit_trend(positions, values, train_length, rule, rising=True)
            margin = max(rule.head_margin, rule.noise * float(trend.error(positions[last]).mean()))
            if (values - trend.at(positions))[last].mean() > margin:
                found.append((layer, head))
    return found


def suggest_scale(train_length: int, length: int) -> float:
    """One λ̂ to start a search from, for reading `length` tokens with layers that have no positions.

    Paper A's law for such models: the best λ̂ grows as 1 + a·ln(length/train_length). a is 0.397 for its 1.1B model and
    0.317 for our 29M one; 0.36 lies between. It looks at no curve on purpose: the first-order step that would bring
    entropy back to its trend, excess/variance in ln λ̂, asks for far too much, for so far away entropy is not linear.

    >>> suggest_scale(2048, 8192)
    1.5
    """
    return round(1 + SLOPE * math.log(length / train_length), 2)
