"""`farspan lab run` and `lab dump`: a study of position encodings, and examples of its tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from farspan.cells import Cells, check_results_folder
from farspan.custom_code import import_code, resolve_reference
from farspan.deprecation import renamed_arguments
from farspan.errors import FarspanError
from farspan.files import write_text
from farspan.lab.custom_tasks import custom_task_hash, resolve_file
from farspan.lab.examples import draw_examples
from farspan.lab.ranking import (
    LabEntry,
    Rank,
    Table,
    accuracy_table,
    count_learned,
    group_entries,
    rank_encodings,
    rank_table,
    scale_table,
    scratchpad_table,
)
from farspan.lab.study import LabCell, LabStudy
from farspan.lab.tasks import LabTask, find_task
from farspan.lab.tokenizer import WordTokenizer
from farspan.loading import resolve_device
from farspan.progress import Progress, Say, automatic, ignore, shows_progress
from farspan.recipe import load_recipe, results_folder, to_toml
from farspan.record import write_record
from farspan.report import lab_figures, style
from farspan.report.study_tables import markdown
from farspan.summaries import Plotted, draw, shorten
from farspan.workflows.lab_estimate import announce
from farspan.workflows.lab_training import (
    cell_keys,
    custom_task_data,
    make_runner,
    worker_processes,
)

RECIPE_DIR = Path(__file__).parent.parent / "assets" / "recipes" / "lab"


def read_study(
    recipe: str, overrides: Sequence[str] = (), *, trust_remote_code: bool = False
) -> LabStudy:
    """A recipe by name or file, with `key=value` overrides.

    trust_remote_code: run the code of custom tasks and encodings. Their paths are relative to the
        folder of the file that names them; those of overrides to the folder of the recipe's file,
        or to the current folder for a recipe by name.

    >>> read_study("lab-tiny", ["train.steps=100"]).train.steps
    100
    """

    def resolve_files(document: dict[str, Any], folder: Path) -> None:
        trusted = {"trust_remote_code": trust_remote_code}
        for name, task in _table(document, "custom_tasks").items():
            if isinstance(task, dict) and isinstance(file := task.get("file"), str):
                task["file"] = resolve_file(file, folder, f"custom_tasks.{name}.file", **trusted)
        encodings = _table(document, "custom_encodings")
        for name, reference in encodings.items():
            if isinstance(reference, str):
                key = f"custom_encodings.{name}"
                encodings[name] = resolve_reference(reference, folder, key)
                import_code(encodings[name], key, **trusted)

    return load_recipe(LabStudy, recipe, overrides, recipe_dir=RECIPE_DIR, prepare=resolve_files)


def _table(document: dict[str, Any], key: str) -> dict[str, Any]:
    """A table of a recipe that is not checked yet."""
    table = document.get(key)
    return table if isinstance(table, dict) else {}


@dataclass(frozen=True, eq=False, repr=False)
class LabResult(Plotted):
    """The results of a study."""

    entries: list[LabEntry]
    ranks: list[Rank]  # over the models that learned their task
    ranks_of_all: list[Rank]  # over all models
    learned: tuple[int, int]  # models that learned their task, and all models
    tables: dict[str, Table]  # by title
    folder: Path
    panels: tuple[lab_figures.Panel, ...]  # of the figure

    def facts(self) -> dict[str, str]:
        learned, models = self.learned
        return {
            "models": f"{learned} of {models} learned their task, in {self.folder}",
            "mean reciprocal rank": _name_ranks(self.ranks),
            "over all models": _name_ranks(self.ranks_of_all),
            "tables": "; ".join(self.tables),
        }

    def to_json(self) -> dict[str, Any]:
        learned, models = self.learned
        return {
            "learned": learned,
            "models": models,
            "mean_reciprocal_rank": {rank.encoding: rank.reciprocal for rank in self.ranks},
            "mean_reciprocal_rank_of_all": {
                rank.encoding: rank.reciprocal for rank in self.ranks_of_all
            },
            "folder": str(self.folder),
        }


def _name_ranks(ranks: Sequence[Rank]) -> str:
    return ", ".join(f"{rank.encoding} {shorten(rank.reciprocal)}" for rank in ranks)


@draw.register
def _(result: LabResult) -> Figure:
    return lab_figures.accuracy_by_length(result.panels)


@renamed_arguments(source="recipe", changes="overrides")
@shows_progress
def run(
    recipe: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
    say: Say = ignore,
) -> LabResult:
    """Train and evaluate the missing models of a study, wait for other processes, write results.

    recipe: lab-tiny, lab-quick, lab-grid, lab-attention, lab-hard, lab-scale, lab-scratchpad,
        lab-encodings, lab-paper, or a .toml file; overrides: its settings, as "key=value".
    out: default: runs/RECIPE.

    >>> changes = ['encodings=["none"]', "train.steps=20", "test_examples=20"]
    >>> farspan.lab("lab-tiny", changes, "runs/lab-tiny").learned  # of all, too soon
    (0, 1)
    """
    study = read_study(recipe, overrides, trust_remote_code=trust_remote_code)
    out = results_folder(recipe, out)
    device = resolve_device(device)
    check_results_folder(out, "lab run")
    data = custom_task_data(study)
    runner = make_runner(study, out, device, progress, say)
    runner.cached_data.update(data)
    write_text(out / "recipe.toml", to_toml(study))
    runner = announce(runner)
    with worker_processes(runner.workers - 1, study, out, device):
        runner.finish()
    results = {cell: runner.cells.get(key) or {} for cell, key in runner.keys.items()}
    return _write_results(study, results, out, device)


@renamed_arguments(source="recipe", changes="overrides")
def summarize(
    recipe: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    say: Say = ignore,
    *,
    trust_remote_code: bool = False,
) -> LabResult:
    """Write the results of the finished models of a study, without training."""
    study = read_study(recipe, overrides, trust_remote_code=trust_remote_code)
    out = results_folder(recipe, out)
    results = {}
    if (out / "cells").is_dir():  # Cells would create it
        cells = Cells(out, say=say)
        for cell, key in cell_keys(study).items():
            if (result := cells.get(key)) is not None:
                results[cell] = result
    if not results:
        raise FarspanError(
            f"{out} holds no results of this study; run it first, or set its folder with --out"
        )
    return _write_results(study, results, out)


# Results.


def _write_results(
    study: LabStudy, results: dict[LabCell, dict[str, Any]], out: Path, device: str | None = None
) -> LabResult:
    """Write the tables, the figure and the record of a study."""
    entries = group_entries(results)
    learned, ranks = count_learned(entries), rank_encodings(entries)
    ranks_of_all = rank_encodings(entries, learned_only=False)
    tables = _make_tables(study, entries)
    text = "\n\n".join(f"## {title}\n\n{markdown(*table)}" for title, table in tables.items())
    summary = f"{learned[0]} of {learned[1]} models learned their task."
    write_text(out / "tables.md", f"{summary}\n\n{text}\n")
    panels = tuple(accuracy_panels(study, entries))
    style.save(lab_figures.accuracy_by_length(panels), out / "accuracy")
    write_record(
        out / "record.json",
        "lab run",
        {"study": asdict(study), "device": device},
        {
            "learned": learned[0],
            "models": learned[1],
            "ranks": [asdict(rank) for rank in ranks],
            "ranks_of_all": [asdict(rank) for rank in ranks_of_all],
            "cells": [{**asdict(cell), **result} for cell, result in results.items()],
        },
    )
    return LabResult(entries, ranks, ranks_of_all, learned, tables, out, panels)


def _make_tables(study: LabStudy, entries: Sequence[LabEntry]) -> dict[str, Table]:
    """The tables of a study, by title."""
    title = "Exact match at unseen lengths"
    if "learned" in study.encodings:
        title += " (learned positions are untrained there)"
    ranges = {task: study.ranges(task) for task in study.tasks}
    overlapping = [task for task, (train, test) in ranges.items() if test[0] <= train[1]]
    if overlapping:
        title += f" (for {', '.join(overlapping)} also at train lengths)"
    tables = {title: accuracy_table(entries)}
    tables["Mean reciprocal rank (tasks)"] = rank_table(entries)
    if len({entry.scratchpad for entry in entries}) > 1:
        tables["Mean reciprocal rank of scratchpads"] = scratchpad_table(entries)
    if study.scales:
        tables["Exact match at unseen lengths, scores times λ̂"] = scale_table(entries)
    return tables


def accuracy_panels(study: LabStudy, entries: Sequence[LabEntry]) -> list[lab_figures.Panel]:
    """One panel for each task, size and scratchpad, with the curves of all encodings."""
    groups: dict[tuple[str, str, str], list[LabEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.task, entry.size, entry.scratchpad), []).append(entry)
    panels = []
    for (task, size, scratchpad), group in groups.items():
        names = [task]
        names += [size] if len(study.sizes) > 1 else []
        names += [scratchpad] if len(study.scratchpads) > 1 else []
        failed = "" if any(entry.learned for entry in group) else " (not learned)"
        panels.append(
            lab_figures.Panel(
                title=", ".join(names) + failed,
                train_length=study.ranges(task)[0][1],
                length_unit=study.task(task).length_unit,
                curves={entry.encoding: entry.curve() for entry in group},
            )
        )
    return panels


# Examples.


class ResolvedTask(NamedTuple):
    """A task with the tokenizer of its recipe."""

    task: LabTask
    tokenizer: WordTokenizer
    sha256: str = ""  # of a recipe's own task


def resolve_task(task: str, trust_remote_code: bool = False) -> ResolvedTask:
    """A built-in task, or one that a recipe defines: RECIPE.toml:TASK."""
    recipe, _, name = task.rpartition(":")
    if name.endswith(".toml"):
        raise FarspanError(f"{task} is a recipe; name one of its tasks, as {task}:TASK")
    if not recipe.endswith(".toml"):
        return ResolvedTask(find_task(task), WordTokenizer())
    study = read_study(recipe, trust_remote_code=trust_remote_code)
    own = study.custom_tasks.get(name)
    version = custom_task_hash(name, own) if own else ""
    return ResolvedTask(study.task(name), study.tokenizer, version)


def dump(
    task: str,
    n: int,
    lengths: str,
    seed: int,
    scratchpad: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Iterator[str]:
    """Examples of a task as JSON Lines: input, target, length.

    task: a built-in task, or RECIPE.toml:TASK for a task of a recipe's own.

    >>> next(dump("copy", 1, "2:2", 0))
    """
    lab_task = resolve_task(task, trust_remote_code).task
    length_range, _ = lab_task.ranges(lengths)
    for example in draw_examples(lab_task, length_range, n, seed, scratchpad=scratchpad):
        yield json.dumps(asdict(example), ensure_ascii=False)
