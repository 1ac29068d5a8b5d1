"""Does an engine compute what a model does here: the same, the same as its base, or neither?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farspan.errors import FarspanError

EQUAL, IGNORED, DIFFERENT = "equal", "base", "different"
BLOCK = 32  # positions that are averaged; engines round in other ways at single positions
TOLERANCE = 0.05  # nats, the largest mean difference of a block; bf16 stays below it
LEAST_EFFECT = 1e-3  # nats; a patch that changes less than this cannot be seen


@dataclass(frozen=True)
class Agreement:
    """The verdict, and the first position (or prompt length) at which an engine differs."""

    verdict: str
    position: int | None = None
    difference: float | None = None  # nats, the largest mean of a block
    tolerance: float | None = None  # nats


@dataclass(frozen=True)
class Continuation:
    """The greedy continuation of a prompt, as far as no rounding could change it."""

    length: int  # tokens of the prompt
    text: str


def compare_losses(
    engine: Sequence[float],
    here: Sequence[float],
    base: Sequence[float] | None = None,
    tolerance: float | None = None,
) -> Agreement:
    """By the losses of one text, position by position; the first loss is that of position 2.

    The default tolerance is a quarter of what the patch changes, at most 0.05 nats.

    >>> compare_losses([1.0] * 64, [1.0] * 64, [1.0] * 32 + [2.0] * 32).verdict
    'equal'
    """
    effect = None if base is None else float(_blocks(here, base).max())
    if effect is not None and effect < LEAST_EFFECT:
        raise FarspanError(
            f"the patch changes the losses of {len(here) + 1} tokens by less than {LEAST_EFFECT} "
            "nats, so its effect cannot be checked; use a longer --length"
        )
    if tolerance is None:
        tolerance = TOLERANCE if effect is None else min(TOLERANCE, effect / 4)
    differences = _blocks(engine, here)
    largest = float(differences.max())
    if largest <= tolerance:
        return Agreement(EQUAL, None, largest, tolerance)
    if base is not None and (to_base := float(_blocks(engine, base).max())) <= tolerance:
        return Agreement(IGNORED, None, to_base, tolerance)
    start = int(np.argmax(differences > tolerance)) * BLOCK
    single = np.abs(np.subtract(engine, here))[start:] > tolerance
    return Agreement(DIFFERENT, start + int(np.argmax(single)) + 2, largest, tolerance)


def _blocks(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    """The mean absolute difference of each block; positions after the last join that one."""
    difference = np.abs(np.subtract(first, second, dtype=np.float64))
    starts = np.arange(max(1, len(difference) // BLOCK)) * BLOCK
    sizes = np.diff([*starts, len(difference)])
    return np.add.reduceat(difference, starts) / sizes


def compare_continuations(
    engine: Sequence[str], here: Sequence[Continuation], base: Sequence[Continuation] = ()
) -> Agreement:
    """By greedy continuations of the same prompts; leading and final spaces do not count.

    >>> prompts = [Continuation(64, " the cat"), Continuation(128, " sat down")]
    >>> compare_continuations([" the cat", " sat up"], prompts).position
    128
    """

    def agrees(text: str, expected: Continuation) -> bool:
        return text.strip().startswith(expected.text.strip())

    if not any(each.text.strip() for each in here):
        raise FarspanError(
            "rounding could change the first token of every greedy continuation of the model, so "
            "there is nothing to compare; use a longer --length, or an engine that returns "
            "log-probabilities of prompts"
        )
    agree = [agrees(text, each) for text, each in zip(engine, here, strict=True)]
    first = next((each.length for each, same in zip(here, agree, strict=True) if not same), 0)
    if not base:
        return Agreement(DIFFERENT, first) if first else Agreement(EQUAL)
    as_base = [agrees(text, each) for text, each in zip(engine, base, strict=True)]
    if all(agree) and all(as_base):
        raise FarspanError(
            "the greedy continuations of the model and of its base are the same at these lengths, "
            "so the effect of the patch cannot be checked; use a longer --length, or an engine "
            "that returns log-probabilities of prompts"
        )
    if all(agree):
        return Agreement(EQUAL)
    return Agreement(IGNORED) if all(as_base) else Agreement(DIFFERENT, first)
