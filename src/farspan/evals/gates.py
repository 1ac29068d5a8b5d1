"""Gates: one-line thresholds on scores, so that a release can be checked against them."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.errors import FarspanError, suggest
from farspan.evals.longbench import load_tasks
from farspan.evals.scores import Score, ScoreKey, matching_score
from farspan.lengths import parse_lengths

OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
GRAMMAR = re.compile(
    r"(?:(?P<task>[\w.-]+):)?(?P<metric>[a-z][a-z0-9_]*)(?:@(?P<length>\w+))?\s*"
    r"(?P<sign><=|>=|<|>)\s*(?P<value>\d+\.?\d*(?:e[+-]?\d+)?)(?P<times>x?)"
)
# The metrics of LongBench's tasks are added to these.
METRICS = (
    "ppl",
    "longppl",
    "passkey",
    "passkey_mean",
    "passkey_grid_mean",
    "recall",
    "string_match",
    "effective_length",
    "acc",
    "acc_norm",
    "average",
)


@dataclass(frozen=True)
class Gate:
    """`ppl@512<=1.05x`: a bound on a metric at a length, or (x) on its ratio to the baseline."""

    text: str
    task: str | None  # a task or an evaluation
    metric: str
    length: int | None
    sign: str
    value: float
    relative: bool

    def matches(self, key: ScoreKey) -> bool:
        return (
            self.metric == key.metric
            and self.task in (None, key.eval, key.task)
            and self.length in (None, key.length)
        )


@dataclass(frozen=True)
class GateResult:
    gate: str
    holds: bool
    detail: str

    def to_json(self) -> dict[str, str | bool]:
        return {"gate": self.gate, "holds": self.holds, "told": self.detail}


def parse_gate(text: str) -> Gate:
    """Parse `[TASK:]METRIC[@LENGTH] SIGN NUMBER[x]`; x makes the number a multiple of the baseline.

    >>> parse_gate("ppl@512<=1.05x").relative
    True
    """
    match = GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise FarspanError(
            f"{text!r} is not a valid gate; write it as ppl@512<=1.05x, pg19:ppl@4k<=20 or "
            "passkey@1024>=0.9"
        )
    known = list(dict.fromkeys([*METRICS, *(task.metric for task in load_tasks().values())]))
    if match["metric"] not in known:
        raise FarspanError(
            f"the gate {text!r} uses the unknown metric {match['metric']!r}; "
            f"{suggest(match['metric'], known)}"
        )
    (length,) = parse_lengths(match["length"]) if match["length"] else (None,)
    sign, value = match["sign"], float(match["value"])
    return Gate(text, match["task"], match["metric"], length, sign, value, bool(match["times"]))


def check_gates(gates: Sequence[Gate], keys: Sequence[ScoreKey]) -> None:
    """Reject a gate that will match no score, before anything is measured."""
    for gate in gates:
        candidates = [key for key in keys if key.metric == gate.metric]
        if not candidates:
            metrics = ", ".join(dict.fromkeys(key.metric for key in keys))
            raise FarspanError(
                f"the gate {gate.text!r} uses {gate.metric}, but this suite measures {metrics}; "
                "change the metric or the suite"
            )
        tasks = ", ".join(dict.fromkeys(key.task for key in candidates))
        candidates = [key for key in candidates if gate.task in (None, key.eval, key.task)]
        if not candidates:
            raise FarspanError(
                f"the gate {gate.text!r} uses the task {gate.task}, but {gate.metric} is measured "
                f"on {tasks}; change the task"
            )
        if not any(map(gate.matches, candidates)):
            lengths = ", ".join(map(str, sorted({key.length for key in candidates})))
            raise FarspanError(
                f"the gate {gate.text!r} uses the length {gate.length}, but {gate.metric} is "
                f"measured at {lengths}; change the length or --lengths"
            )


def check_gate(gate: Gate, scores: Sequence[Score], baseline: Sequence[Score] = ()) -> GateResult:
    """A gate holds when every score that it matches meets it.

    A gate that matches nothing, or has nothing to compare with, fails instead of raising, so that
    finished measurements are still written and shown.
    """
    shown = [score for score in scores if not score.tags.get("detail")]
    comparisons = [_compare(gate, score, baseline) for score in shown if gate.matches(score.key)]
    if not comparisons:
        available = ", ".join(dict.fromkeys(f"{score.metric}@{score.length}" for score in shown))
        message = f"{gate.text} matches no score of this suite; choose one of {available}"
        return GateResult(gate.text, False, message)
    holds = all(meets for meets, _ in comparisons)
    return GateResult(gate.text, holds, "; ".join(detail for _, detail in comparisons))


def _compare(gate: Gate, score: Score, baseline: Sequence[Score]) -> tuple[bool, str]:
    """Whether one score meets the gate, and the comparison in words."""
    key, reference = score.key, matching_score(score, baseline)
    name = f"{'' if key.task == key.eval else f'{key.task} '}{key.metric}@{key.length}"
    if not gate.relative:
        bound, bound_text = gate.value, f"{gate.value:g}"
    elif reference is None:
        return False, f"{name} is {score.value:.4g}, but the baseline has no score to compare with"
    else:
        bound = gate.value * reference.value
        bound_text = f"{bound:.4g} ({gate.value:g} × the baseline's {reference.value:.4g})"
    meets = OPERATORS[gate.sign](score.value, bound)
    return meets, f"{name} is {score.value:.4g}, {'' if meets else 'not '}{gate.sign} {bound_text}"
