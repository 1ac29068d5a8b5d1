"""Differences of two models on the same samples, which vary less than two separate scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farspan.evals.perplexity import MIN_DOCUMENTS
from farspan.evals.scores import average, bootstrap

GroupKey = tuple[str, str, int]  # eval, task, length
# By evaluation: what the score of a sample is multiplied by. Commonsense has two scores a sample,
# and is not paired.
SCALES = {"needle": 1.0, "ruler": 100.0, "longbench": 1.0, "nonliteral": 1.0}
# The difference between the best and the worst score.
LARGEST = {"passkey": 1.0, "needle": 1.0, "ruler": 100.0, "longbench": 100.0, "nonliteral": 1.0}


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference of a model to a reference, with its 95% interval."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero; one window of text has none."""
        return self.low < self.high and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class _Outcome:
    value: float
    weight: float = 1.0
    document: Hashable = None
    text: str | None = None  # the hash of its tokens, if it is known

    def pairs_with(self, other: _Outcome | None) -> bool:
        return other is not None and (self.text == other.text or None in (self.text, other.text))


def paired_differences(
    samples: Iterable[Mapping[str, Any]], reference: Iterable[Mapping[str, Any]]
) -> dict[GroupKey, PairedDifference]:
    """By evaluation, task and length, over the samples that both have.

    That of perplexity is a difference of losses, in nats. Averages over tasks are those of their
    tasks.
    """
    own, other = _outcomes(samples), _outcomes(reference)
    differences = {}
    for key in own:
        twins = other.get(key, {})
        shared = [name for name, outcome in own[key].items() if outcome.pairs_with(twins.get(name))]
        if shared:
            differences[key] = _difference(own[key], other[key], shared, LARGEST.get(key[0]))
    return differences


def average_difference(parts: Sequence[PairedDifference]) -> PairedDifference:
    mean = average([(part.value, part.low, part.high) for part in parts])
    return PairedDifference(*mean, sum(part.pairs for part in parts))


def _difference(
    own: Mapping[Hashable, _Outcome],
    other: Mapping[Hashable, _Outcome],
    shared: list[Hashable],
    largest: float | None,
) -> PairedDifference:
    """largest: the difference between the best and the worst score; None for losses."""
    values = [own[name].value - other[name].value for name in shared]
    if largest is not None:
        return PairedDifference(*bounded_difference(values, largest), len(shared))
    documents = [own[name].document for name in shared]
    few = len(set(documents)) < MIN_DOCUMENTS  # then windows are resampled
    weights, groups = [own[name].weight for name in shared], None if few else documents
    return PairedDifference(*bootstrap(values, weights, groups), len(shared))


def bounded_difference(values: Sequence[float], largest: float) -> tuple[float, float, float]:
    """The mean of differences that are at most `largest`, with its 95% interval.

    Two pairs more, half of one for each outcome of two answers that are right or wrong (Agresti and
    Min 2005), keep it valid for few or equal pairs. One pair says nothing.

    >>> bounded_difference([-1.0], 1.0)
    (-1.0, -1.0, 1.0)
    """
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, -largest, largest
    middle = math.fsum(values) / (n + 2)
    squares = math.fsum(value**2 for value in values) + largest**2
    deviation = math.sqrt(max(0.0, squares / (n + 2) - middle**2) / (n + 2))
    margin = float(stdtrit(n - 1, 0.975)) * deviation
    return mean, max(-largest, middle - margin), min(largest, middle + margin)


def _outcomes(samples: Iterable[Mapping[str, Any]]) -> dict[GroupKey, dict[Hashable, _Outcome]]:
    """Every sample by what identifies its prompt; repeated prompts are numbered."""
    groups: dict[GroupKey, dict[Hashable, _Outcome]] = {}
    seen: Counter[Hashable] = Counter()
    for sample in samples:
        read = _read(sample)
        if read is not None:
            key = (sample["eval"], sample["task"], sample["length"])
            name, outcome = read
            seen[key, name] += 1
            groups.setdefault(key, {})[name, seen[key, name]] = outcome
    return groups


def _read(sample: Mapping[str, Any]) -> tuple[Hashable, _Outcome] | None:
    evaluation: Any = sample["eval"]
    name: Hashable
    if evaluation == "passkey":
        return (sample["depth"], sample["key"]), _Outcome(float(sample["hit"]))
    if evaluation in SCALES:
        name = (
            str(sample["id"]),
            sample.get("question", ""),
            tuple(sample["answers"]),
            tuple(sorted(sample.get("depths", ()))),  # earlier versions had another order
            sample.get("form", ""),
            sample.get("haystack", "").rpartition(" ")[2],  # the hash of a text
        )
        return name, _Outcome(SCALES[evaluation] * sample["score"])
    if evaluation == "perplexity" and "nll" in sample and "losses" not in sample:
        loss = sample["nll"] / sample["scored"]
        if not math.isfinite(loss):
            return None
        name = (sample["document"], sample["end"], sample["scored"])
        weight = 1.0 if sample.get("mode") == "yarn" else sample["scored"]  # as in its score
        return name, _Outcome(loss, weight, sample["document"], sample.get("sha256"))
    return None
