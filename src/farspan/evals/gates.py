"""Gates: what a score must reach, in one line, so that a release can be held to it."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.errors import FarspanError, nearest
from farspan.evals.longbench import tasks
from farspan.evals.scores import Place, Score, beside
from farspan.lengths import parse_lengths

SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
GRAMMAR = re.compile(
    r"(?:(?P<task>[\w.-]+):)?(?P<metric>[a-z][a-z0-9_]*)(?:@(?P<length>\w+))?\s*"
    r"(?P<sign><=|>=|<|>)\s*(?P<value>\d+\.?\d*(?:e[+-]?\d+)?)(?P<times>x?)"
)
# LongBench's tasks have others besides.
METRICS = ("ppl", "passkey", "passkey_mean", "recall", "effective_length", "acc", "acc_norm", "average")


@dataclass(frozen=True)
class Gate:
    """`ppl@512<=1.05x`: a metric, at a length, against a number or (x) so many times what the base reaches."""

    text: str
    task: str | None  # or the name of an evaluation
    metric: str
    length: int | None
    sign: str
    value: float
    relative: bool

    def names(self, place: Place) -> bool:
        return (
            self.metric == place.metric
            and self.task in (None, place.eval, place.task)
            and self.length in (None, place.length)
        )


@dataclass(frozen=True)
class Verdict:
    gate: str
    holds: bool
    told: str


def parse_gate(text: str) -> Gate:
    """`[TASK:]METRIC[@LENGTH] SIGN NUMBER[x]`, where x makes the number a multiple of what the base reaches.

    >>> parse_gate("ppl@512<=1.05x").relative
    True
    """
    found = GRAMMAR.fullmatch(text.strip())
    if found is None:
        raise FarspanError(f"{text!r} is no gate; write it as ppl@512<=1.05x, pg19:ppl@4k<=20 or passkey@1024>=0.9")
    known = list(dict.fromkeys([*METRICS, *(task.metric for task in tasks().values())]))
    if found["metric"] not in known:
        way = nearest(found["metric"], known)
        raise FarspanError(f"the gate {text!r} names {found['metric']!r}, which is no metric; {way}")
    (length,) = parse_lengths(found["length"]) if found["length"] else (None,)
    sign, value = found["sign"], float(found["value"])
    return Gate(text, found["task"], found["metric"], length, sign, value, bool(found["times"]))


def check_gates(gates: Sequence[Gate], places: Sequence[Place]) -> None:
    """Refuse a gate that will name no score, before anything is measured, and tell what there will be."""
    for gate in gates:
        there = [place for place in places if place.metric == gate.metric]
        if not there:
            measured = ", ".join(dict.fromkeys(place.metric for place in places))
            raise FarspanError(f"the gate {gate.text!r} asks for {gate.metric}, and this suite measures {measured}")
        named = ", ".join(dict.fromkeys(place.task for place in there))
        there = [place for place in there if gate.task in (None, place.eval, place.task)]
        if not there:
            raise FarspanError(f"the gate {gate.text!r} asks for {gate.task}, and {gate.metric} is measured on {named}")
        if not any(map(gate.names, there)):
            lengths = ", ".join(map(str, sorted({place.length for place in there})))
            raise FarspanError(
                f"the gate {gate.text!r} asks for {gate.length} tokens, and {gate.metric} is measured at {lengths}; "
                "name one of these, or ask for other --lengths"
            )


def judge(gate: Gate, scores: Sequence[Score], base: Sequence[Score] = ()) -> Verdict:
    """A gate holds when every score that it names does. One that nothing can be said of does not hold: what was
    measured by then must still be written and shown."""
    shown = [score for score in scores if not score.tags.get("detail")]
    mine = [_compared(gate, score, base) for score in shown if gate.names(score.place)]
    if not mine:
        there = ", ".join(dict.fromkeys(f"{score.metric}@{score.length}" for score in shown))
        return Verdict(gate.text, False, f"{gate.text} names no score of this suite; there are {there}")
    return Verdict(gate.text, all(meets for meets, _ in mine), "; ".join(told for _, told in mine))


def _compared(gate: Gate, score: Score, base: Sequence[Score]) -> tuple[bool, str]:
    """Does one score meet the gate, and in what words."""
    place, other = score.place, beside(score, base)
    what = f"{'' if place.task == place.eval else f'{place.task} '}{place.metric}@{place.length}"
    if not gate.relative:
        bound, how = gate.value, f"{gate.value:g}"
    elif other is None:
        return False, f"{what} is {score.value:.4g}, and the base has nothing to compare it with"
    else:
        bound = gate.value * other.value
        how = f"{bound:.4g} ({gate.value:g} × the base's {other.value:.4g})"
    meets = SIGNS[gate.sign](score.value, bound)
    return meets, f"{what} is {score.value:.4g}, {'' if meets else 'not '}{gate.sign} {how}"
