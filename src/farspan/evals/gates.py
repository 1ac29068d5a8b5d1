"""Gates: what a score must reach, in one line, so that a release can be held to it."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.errors import FarspanError
from farspan.evals.longbench import tasks
from farspan.evals.scores import Cell, Score, beside
from farspan.lengths import parse_lengths

SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
GRAMMAR = re.compile(
    r"(?:(?P<task>[\w.-]+):)?(?P<metric>[a-z][a-z0-9_]*)(?:@(?P<length>\w+))?\s*"
    r"(?P<sign><=|>=|<|>)\s*(?P<value>\d+\.?\d*(?:e[+-]?\d+)?)(?P<times>x?)"
)
METRICS = {  # of each evaluation; LongBench's tasks have others besides
    "perplexity": ("ppl",),
    "passkey": ("passkey", "passkey_mean"),
    "needle": ("recall", "effective_length"),
    "longbench": ("average",),
    "commonsense": ("acc", "acc_norm", "average"),
}


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

    def names(self, score: Score) -> bool:
        return (
            score.metric == self.metric
            and self.length in (None, score.length)
            and self.task in (None, score.eval, score.tags.get("task"))
            and not score.tags.get("detail")
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
    known = list(dict.fromkeys([*sum(METRICS.values(), ()), *(task.metric for task in tasks().values())]))
    if found["metric"] not in known:
        near = difflib.get_close_matches(found["metric"], known, 1, 0)
        raise FarspanError(f"the gate {text!r} names {found['metric']!r}, which is no metric; the nearest is {near[0]}")
    (length,) = parse_lengths(found["length"]) if found["length"] else (None,)
    sign, value = found["sign"], float(found["value"])
    return Gate(text, found["task"], found["metric"], length, sign, value, bool(found["times"]))


def check_gates(gates: Sequence[Gate], cells: Sequence[Cell]) -> None:
    """Tell of a gate on what will not be measured, before anything is."""
    for gate in gates:
        there = list(dict.fromkeys(metric for cell in cells for metric in _metrics(cell)))
        if gate.metric not in there:
            raise FarspanError(
                f"the gate {gate.text!r} asks for {gate.metric}, and this suite measures {', '.join(there)}"
            )
        mine = [cell for cell in cells if gate.metric in _metrics(cell)]
        named = list(dict.fromkeys(cell.task for cell in mine))
        if gate.task not in (None, "average", *named, *(cell.eval for cell in mine)):
            raise FarspanError(
                f"the gate {gate.text!r} asks for {gate.task}, and {gate.metric} is measured on {', '.join(named)}"
            )
        lengths = sorted({cell.length for cell in mine})
        if gate.length is not None and gate.length not in lengths:
            told = ", ".join(map(str, lengths))
            raise FarspanError(
                f"the gate {gate.text!r} asks for {gate.length} tokens, and measured are {told}; add it to --lengths"
            )


def _metrics(cell: Cell) -> tuple[str, ...]:
    own = (tasks()[cell.task].metric,) if cell.eval == "longbench" else ()
    return METRICS[cell.eval] + own


def judge(gate: Gate, scores: Sequence[Score], base: Sequence[Score] = ()) -> Verdict:
    """A gate holds when every score that it names does."""
    mine = [score for score in scores if gate.names(score)]
    if not mine:
        there = ", ".join(dict.fromkeys(f"{s.metric}@{s.length}" for s in scores if not s.tags.get("detail")))
        raise FarspanError(f"the gate {gate.text!r} names no score of this suite; there are {there}")
    told, holds = [], True
    for score in mine:
        bound, how = _bound(gate, score, base)
        meets = SIGNS[gate.sign](score.value, bound)
        holds = holds and meets
        task = score.tags.get("task", score.eval)
        what = f"{'' if task == score.eval else f'{task} '}{score.metric}@{score.length}"
        told.append(f"{what} is {score.value:.4g}, {'' if meets else 'not '}{gate.sign} {how}")
    return Verdict(gate.text, holds, "; ".join(told))


def _bound(gate: Gate, score: Score, base: Sequence[Score]) -> tuple[float, str]:
    if not gate.relative:
        return gate.value, f"{gate.value:g}"
    other = beside(score, base)
    if other is None:
        raise FarspanError(f"the gate {gate.text!r} has nothing to compare {score.metric}@{score.length} with")
    bound = gate.value * other.value
    return bound, f"{bound:.4g} ({gate.value:g} × the base's {other.value:.4g})"
