"""How examples of a task are drawn: distinct, by the weights of lengths, in disjoint splits."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from farspan.errors import FarspanError
from farspan.lab.scratchpad import parse_parts, write_scratchpad
from farspan.lab.tasks import Example, LabTask, Range

log = logging.getLogger(__name__)


class Splits(NamedTuple):
    """Disjoint splits of distinct inputs."""

    train: list[Example]
    held_out: list[Example]  # of the train lengths
    beyond: list[Example]  # of the longer test lengths


HELD_OUT = 0.1  # of the distinct examples of a length, at most: training needs the few short ones


def draw_examples(
    task: LabTask,
    lengths: Range,
    n: int,
    seed: int,
    *,
    scratchpad: str | None = None,
    exclude: Iterable[Example] = (),
    even_lengths: bool = True,
) -> list[Example]:
    """n distinct examples in random order, equally many of each length as far as they exist.

    With even_lengths=False, lengths are as frequent as in the released data of Kazemnejad 2023, or
    in the files of the user's own task.
    The result depends on the arguments only. If fewer distinct examples exist, all of them are
    returned, with a warning. `scratchpad` is a setting such as "icovr", "input+output" or "full":
    then targets begin with the steps. Examples in `exclude` are not drawn.

    >>> draw_examples(TASKS["addition"], (1, 8), 100_000, seed=0)
    """
    excluded = {example.input: example.length for example in exclude}
    taken = Counter(excluded.values())
    available = {
        length: task.count(length) - taken[length] for length in _existing_lengths(task, lengths)
    }
    weights = length_weights(task, available, even_lengths)
    return _draw(task, available, weights, n, seed, scratchpad, excluded)


def length_weights(task: LabTask, lengths: Iterable[int], even: bool) -> dict[int, int]:
    """How often each length is drawn, relative to the others."""
    if even:
        return dict.fromkeys(lengths, 1)
    weights = {length: task.frequency(length) for length in lengths}
    if not any(weights.values()):
        raise FarspanError(
            f"the released data of {task.name} have no example of {min(weights)} to "
            f"{max(weights)} {task.length_unit}; set even_lengths to true, or choose other lengths"
        )
    return weights


def make_splits(
    task: LabTask,
    train_n: int,
    test_n: int,
    seed: int,
    *,
    train: Range | None = None,
    test: Range | None = None,
    scratchpad: str | None = None,
    even_lengths: bool = True,
) -> Splits:
    """`train_n` examples to train on, `test_n` others of the same lengths, and `test_n` longer.

    At most a tenth of each length is held out. Parity up to length 8 has 510 distinct examples in
    all. SCAN up to 25 actions has 17,774, of which Kazemnejad 2023 trained on 15,997, nine tenths.
    (SCAN's authors cut at 22 actions.)
    """
    train, test = train or task.train, test or task.test
    if test[0] <= train[1]:
        log.warning(
            "%s is trained on lengths %d to %d and tested on %d to %d, which are not all longer; "
            "such a test does not measure length generalization",
            *(task.name, *train, *test),
        )
    # Counts of long examples exceed the range of a float.
    holdable = {
        length: min(task.count(length), 10**15) * HELD_OUT
        for length in _existing_lengths(task, train)
    }
    weights = length_weights(task, holdable, even_lengths)
    held_out = _draw(task, holdable, weights, test_n, seed, scratchpad, {})
    trained = draw_examples(
        task,
        train,
        train_n,
        seed,
        scratchpad=scratchpad,
        exclude=held_out,
        even_lengths=even_lengths,
    )
    beyond = draw_examples(
        task,
        test,
        test_n,
        seed,
        scratchpad=scratchpad,
        exclude=[*held_out, *trained],
        even_lengths=even_lengths,
    )
    return Splits(trained, held_out, beyond)


def _existing_lengths(task: LabTask, lengths: Range) -> list[int]:
    """The lengths of a range that the task has examples of."""
    low, high = lengths
    if not 1 <= low <= high:
        raise FarspanError(
            f"lengths {low}:{high} are not a range; write the shortest first, from 1 on, as in 2:20"
        )
    existing = [length for length in range(low, high + 1) if task.count(length) > 0]
    if not existing:
        raise FarspanError(no_examples(task, lengths))
    return existing


def check_lengths(task: LabTask, ranges: Iterable[Range], even_lengths: bool) -> None:
    """Raise an error if a task has no example in one of these ranges of lengths."""
    for low, high in ranges:
        if not any(map(task.count, range(low, high + 1))):
            raise FarspanError(no_examples(task, (low, high)))
        length_weights(task, range(low, high + 1), even_lengths)


def no_examples(task: LabTask, lengths: Range) -> str:
    """The message for a range of lengths without examples."""
    low, high = lengths
    return (
        f"{task.name} has no example of {low} to {high} {task.length_unit}; by default it trains "
        f"on {task.train[0]}:{task.train[1]} and tests on {task.test[0]}:{task.test[1]}"
    )


def _draw(
    task: LabTask,
    available: Mapping[int, float],
    weights: Mapping[int, int],
    n: int,
    seed: int,
    scratchpad: str | None,
    excluded: Collection[str],
) -> list[Example]:
    """n distinct examples, by the weights of lengths, at most as many as each has available."""
    if n < 1 or seed < 0:
        raise FarspanError(
            f"{n} examples by seed {seed} cannot be drawn; choose at least 1 example and a seed "
            "from 0 on"
        )
    parts = "" if scratchpad is None else parse_parts(scratchpad, task.name)
    drawn: list[Example] = []
    for length, quota in _balance(n, available, weights).items():
        rng = np.random.default_rng((seed, zlib.crc32(task.name.encode()), length))
        drawn += _draw_distinct(task, length, quota, rng, excluded)
    if len(drawn) < n:
        log.warning(
            "%s has only %d distinct examples of %d to %d %s available; %d were requested",
            *(task.name, len(drawn), min(available), max(available), task.length_unit, n),
        )
    if parts:
        drawn = [
            replace(
                example,
                target=write_scratchpad(task.name, example.input, example.target, parts),
            )
            for example in drawn
        ]
    order = np.random.default_rng((seed, zlib.crc32(task.name.encode()))).permutation(len(drawn))
    return [drawn[index] for index in order]


def _balance(n: int, available: Mapping[int, float], weights: Mapping[int, int]) -> dict[int, int]:
    """Distribute n over lengths by their weights; what one length lacks goes to the others."""
    drawn = [length for length in available if weights[length]]
    quotas, left = {}, sum(weights[length] for length in drawn)
    for length in sorted(drawn, key=lambda length: min(available[length], n) / weights[length]):
        quotas[length] = int(min(available[length], -(-n * weights[length] // left)))
        n -= quotas[length]
        left -= weights[length]
    return dict(sorted(quotas.items()))


def _draw_distinct(
    task: LabTask, length: int, quota: int, rng: np.random.Generator, excluded: Collection[str]
) -> list[Example]:
    """Draw until there are `quota` distinct examples of one length; that many must exist."""
    distinct: dict[str, Example] = {}
    repeats, limit = 0, 1000 + 20 * (quota + len(excluded))  # the last of n takes n draws
    while len(distinct) < quota:
        example = task.make(length, rng)
        repeats += 1
        if example.input not in excluded and example.input not in distinct:
            distinct[example.input] = example
            repeats = 0
        if repeats > limit:
            raise FarspanError(
                f"{task.name} has only {len(distinct):,} distinct examples of {length} "
                f"{task.length_unit}, and {quota:,} are needed; draw fewer examples, or others"
            )
    return list(distinct.values())
