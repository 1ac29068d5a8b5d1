"""The result of `farspan eval`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from farspan.evals.gates import GateResult
from farspan.evals.scores import Score, matching_score
from farspan.summaries import Plotted

T = TypeVar("T")


def _interval(score: Score) -> str:
    """None where a single window has none."""
    return f" ({score.low:.4g}–{score.high:.4g})" if score.low < score.high else ""


@dataclass(frozen=True, eq=False, repr=False)
class EvalResult(Plotted):
    """The scores of a model, of its baseline, and the gates."""

    model: str
    suite: str
    scores: tuple[Score, ...]
    folder: Path
    baseline: str | None = None
    baseline_scores: tuple[Score, ...] = ()
    gates: tuple[GateResult, ...] = ()
    notes: tuple[str, ...] = ()
    train_length: int | None = None

    def facts(self) -> dict[str, str]:
        shown = [score for score in self.scores if not score.tags.get("detail")]
        values = {
            f"{score.metric} {score.tags.get('task', '')} @{score.length}".replace("  ", " "): (
                f"{score.value:.4g}{_interval(score)}" + self._against_baseline(score)
            )
            for score in shown
        }
        compared = f", baseline {self.baseline}" if self.baseline else ""
        failed = [gate.detail for gate in self.gates if not gate.holds]
        return {
            "model": f"{self.model}{compared}, suite {self.suite}, in {self.folder}",
            "failed gates": "; ".join(failed),
            **values,
            "notes": "; ".join(self.notes),
        }

    def _against_baseline(self, score: Score) -> str:
        baseline = matching_score(score, self.baseline_scores)
        if baseline is None:
            return ""
        ratio = f", ratio {score.value / baseline.value:.3f}" if baseline.value else ""
        return f", baseline {baseline.value:.4g}{ratio}"

    def to_json(self) -> dict[str, Any]:
        """Stable keys; `vs` is the baseline."""
        scores = [asdict(score) for score in self.scores]
        record: dict[str, Any] = {"model": self.model, "suite": self.suite, "scores": scores}
        if self.baseline is not None:
            baseline_scores = [asdict(score) for score in self.baseline_scores]
            record["vs"] = {"model": self.baseline, "scores": baseline_scores}
        gates = [gate.to_json() for gate in self.gates]
        return record | {"gates": gates, "notes": list(self.notes)}


def stored_scores(scores: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The scores of a record under the names of this version.

    Before 0.2, `passkey_mean` was the mean over the whole grid, and had no context.
    """
    return [
        {**score, "metric": "passkey_grid_mean"}
        if score["metric"] == "passkey_mean" and "context" not in score["tags"]
        else score
        for score in scores
    ]


def without_repeated_means(
    scores: Sequence[T], get: Callable[[Any, str], Any] = operator.getitem
) -> list[T]:
    """The scores to show: where no length is beyond the context, both means of passkeys are one.

    get: reads a field of a score.
    """
    inside = {get(score, "length") for score in scores if get(score, "metric") == "passkey_mean"}
    return [
        score
        for score in scores
        if get(score, "metric") != "passkey_grid_mean" or get(score, "length") not in inside
    ]
