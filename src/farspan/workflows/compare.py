"""`farspan compare`: several results folders of `farspan eval` in one table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from farspan.errors import FarspanError, at_least_one
from farspan.evals.pairs import (
    LARGEST,
    GroupKey,
    PairedDifference,
    average_difference,
    paired_differences,
)
from farspan.evals.results import without_repeated_means
from farspan.evals.scores import Score, ScoreKey
from farspan.files import write_text
from farspan.record import format_number
from farspan.report import figures
from farspan.report.comparison import (
    LOSS,
    ComparedScore,
    group_label,
    long_rows,
    markdown_table,
    table_rows,
)
from farspan.report.page import Run, baseline_names, scores_by_model
from farspan.summaries import Plotted, draw
from farspan.workflows.report import INVALID, name_by_model, naming_record, read_runs

SUFFIXES = (".md", ".csv", ".json")
PAIRED = ("perplexity", *LARGEST)
UNPAIRED = ("effective_length", "passkey_mean", "passkey_grid_mean", "longppl")


@dataclass(frozen=True, repr=False)
class CompareResult(Plotted):
    """Every score of every run, with differences to the reference."""

    reference: str
    scores: tuple[ComparedScore, ...]
    notes: tuple[str, ...]
    file: Path

    def facts(self) -> dict[str, str]:
        """The values of all runs at each length, by measure."""
        values: dict[str, list[str]] = {}
        for score in self.scores:
            measure = f"{group_label(score.group)} @{score.length:,}"
            values.setdefault(measure, []).append(f"{score.run} {format_number(score.value)}")
        table = {"table": str(self.file), "reference": self.reference}
        shown = {measure: ", ".join(runs) for measure, runs in values.items()}
        return {**table, **shown, "notes": "; ".join(self.notes)}

    def to_json(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "scores": [score.to_json() for score in self.scores],
            "notes": list(self.notes),
        }


@draw.register
def _(result: CompareResult) -> Figure:
    """The perplexity of all runs."""
    runs: dict[str, list[Score]] = {}
    for score in result.scores:
        if score.metric == LOSS:
            values = (score.length, score.value, score.low, score.high, score.n)
            runs.setdefault(score.run, []).append(
                Score(score.eval, score.metric, *values, {"task": score.task})
            )
    if not runs:
        raise FarspanError("these runs have no perplexity to draw; use `farspan report`")
    return figures.perplexity_by_length(runs, None)


def compare(
    folders: str | Path | Sequence[str | Path], out: str | Path = "compare.md"
) -> CompareResult:
    """Write one table of results folders; differences are to the first, on the same samples.

    Those of a single run are to its baseline.
    out: a .md, .csv or .json file; an existing one is replaced.

    >>> farspan.compare(["results"], "table.md").reference  # a folder of farspan.evaluate
    'nope-twin'
    """
    out = Path(out)
    if out.suffix not in SUFFIXES or out.is_dir():
        raise FarspanError(
            f"{out} is not the name of a table; end it in one of {', '.join(SUFFIXES)}"
        )
    folders = at_least_one(folders, "a results folder")
    runs = read_runs(folders, "farspan eval")
    for run, folder in zip(runs, folders, strict=True):
        if run.record["command"] != "eval":
            raise FarspanError(
                f"{folder} is a run of `farspan {run.record['command']}`; compare folders of "
                "`farspan eval`"
            )
    try:
        result = _compare(runs, out)
    except INVALID:
        for run, folder in zip(runs, folders, strict=True):
            with naming_record(folder):
                _compare([run], out)
        with naming_record(" or ".join(map(str, folders))):
            raise
    _write(result)
    return result


def _compare(runs: list[Run], out: Path) -> CompareResult:
    runs = _named(runs)
    samples, baselines = _samples(runs), baseline_names(runs)
    single = len(runs) == 1
    reference = baselines.get(runs[0].name, runs[0].name) if single else runs[0].name
    changes = {
        name: paired_differences(group, samples[reference])
        for name, group in samples.items()
        if name != reference
    }
    measured = scores_by_model(runs)
    twins = {
        _key(score): score for score in measured[reference] if not score["tags"].get("unsolved")
    }
    scores = tuple(
        ComparedScore(
            name,
            score["eval"],
            score["tags"].get("task", score["eval"]),
            score["metric"],
            score["length"],
            score["value"],
            score["low"],
            score["high"],
            score["n"],
            _change(score, twins.get(_key(score)), changes.get(name, {})),
        )
        for name, group in sorted(measured.items(), key=lambda item: item[0] != reference)
        for score in without_repeated_means(group)
        if not score["tags"].get("detail")
    )
    return CompareResult(reference, scores, tuple(_notes(reference, scores, twins)), out)


def _named(runs: list[Run]) -> list[Run]:
    """The runs under the names of their models, where each run has a model of its own."""
    models = [run.record.get("model") for run in runs]
    baselines = {run.record["vs"]["model"] for run in runs if run.record.get("vs")}
    distinct = len(set(models)) == len(models) and baselines.isdisjoint(models)
    return name_by_model(runs) if distinct else runs


def _samples(runs: Sequence[Run]) -> dict[str, list[Mapping[str, Any]]]:
    """By the names in the table; of what several runs measured with one baseline, the first."""
    names = baseline_names(runs)
    samples: dict[str, dict[GroupKey, list[Mapping[str, Any]]]] = {run.name: {} for run in runs}
    parts = [(run.name, _own_samples(run)) for run in runs]
    parts += [(names[run.name], _baseline_samples(run)) for run in runs if run.name in names]
    for name, part in parts:
        groups: dict[GroupKey, list[Mapping[str, Any]]] = {}
        for sample in part:
            key = (sample["eval"], sample["task"], sample["length"])
            groups.setdefault(key, []).append(sample)
        samples[name] = groups | samples.get(name, {})
    return {
        name: [sample for group in groups.values() for sample in group]
        for name, groups in samples.items()
    }


def _own_samples(run: Run) -> list[Mapping[str, Any]]:
    baseline = (run.record.get("vs") or {}).get("model")
    names = {run.record.get("model"), run.name} - {baseline}
    return _with_text(run, 0, [sample for sample in run.samples if sample["model"] in names])


def _baseline_samples(run: Run) -> list[Mapping[str, Any]]:
    baseline = run.record["vs"]["model"]
    return _with_text(run, 1, [sample for sample in run.samples if sample["model"] == baseline])


def _with_text(run: Run, place: int, samples: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Windows of perplexity with their mode, which decides about their weights, and the hash of
    the tokens of their text.

    place: 0 of the model, 1 of the baseline. Records of earlier versions have no hash.
    """
    settings = run.record.get("settings") or {}
    hashes, mode = (settings.get("texts") or [{}, {}])[place], settings.get("mode")
    return [
        {**sample, "mode": mode, "sha256": hashes.get(sample["task"])}
        if sample["eval"] == "perplexity"
        else sample
        for sample in samples
    ]


def _key(score: Mapping[str, Any]) -> ScoreKey:
    task = score["tags"].get("task", score["eval"])
    return ScoreKey(score["eval"], task, score["metric"], score["length"])


def _change(
    score: Mapping[str, Any],
    twin: Mapping[str, Any] | None,
    changes: Mapping[GroupKey, PairedDifference],
) -> PairedDifference | None:
    """The paired difference behind a score; that of an average is of its tasks.

    twin: the same score of the reference.
    """
    evaluation, task, length = score["eval"], score["tags"].get("task", ""), score["length"]
    if twin is None or score["metric"] in UNPAIRED:
        return None
    if not task.startswith("average"):
        return changes.get((evaluation, task, length))
    tasks = _averaged(score, changes)
    if not tasks or tasks != _averaged(twin, changes):
        return None
    return average_difference([changes[evaluation, each, length] for each in tasks])


def _averaged(
    score: Mapping[str, Any], changes: Mapping[GroupKey, PairedDifference]
) -> tuple[str, ...]:
    """The tasks of an average, if each has pairs. Earlier versions stored only their number."""
    tags, of_score = score["tags"], (score["eval"], score["length"])
    paired = sorted(task for name, task, length in changes if (name, length) == of_score)
    tasks = sorted(tags.get("task_names", paired))
    whole = len(tasks) == tags.get("tasks") and {*tasks} <= {*paired}
    return tuple(tasks) if whole else ()


def _notes(
    reference: str, scores: Sequence[ComparedScore], twins: Collection[ScoreKey]
) -> list[str]:
    """twins: the scores of the reference that others can differ from."""
    notes = []
    if any(score.difference for score in scores):
        notes.append(
            f"Δ: the difference to {reference} on the same samples, with its 95% interval; * if "
            "that excludes 0."
        )
    for score in scores:
        pairs = score.difference.pairs if score.difference else score.n
        if score.metric != "ppl" and pairs < score.n:
            notes.append(
                f"{score.run} shares {pairs} of {score.n} samples of {score.task} at "
                f"{score.length:,} tokens with {reference}."
            )
            break
    others = {score.run for score in scores} - {s.run for s in scores if s.difference} - {reference}
    for run in sorted(others):
        notes.append(f"{run} has no samples to pair with {reference}, so it has no differences.")
    return [*notes, *_unpaired_notes(reference, scores, twins)]


def _unpaired_notes(
    reference: str, scores: Sequence[ComparedScore], twins: Collection[ScoreKey]
) -> Iterator[str]:
    """What a run and the reference have both measured, but never on the same prompt or text."""
    unpaired: dict[str, dict[str, list[str]]] = {}
    for score in scores:
        key = ScoreKey(score.eval, score.task, score.metric, score.length)
        missing = score.run != reference and not score.difference and key in twins
        paired = score.eval in PAIRED and score.metric not in UNPAIRED
        if missing and paired and not score.task.startswith("average"):
            groups = unpaired.setdefault(score.run, {})
            groups.setdefault(group_label(score.group), []).append(f"{score.length:,}")
    for run, groups in unpaired.items():
        measures = "; ".join(f"{label} at {', '.join(n)} tokens" for label, n in groups.items())
        yield (
            f"{run} and {reference} have no sample in common of {measures}: measure both with the "
            "same --seed, --limit and --data."
        )


def _write(result: CompareResult) -> None:
    if result.file.suffix == ".json":
        text = json.dumps(result.to_json(), ensure_ascii=False, indent=1) + "\n"
    elif result.file.suffix == ".csv":
        buffer = io.StringIO()
        header, rows = long_rows(result.scores)
        csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
        text = buffer.getvalue()
    else:
        text = markdown_table(*table_rows(result.scores), result.notes)
    write_text(result.file, text)
