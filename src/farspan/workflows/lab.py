"""`farspan lab run` and `lab dump`: a study of position encodings, and examples of its tasks.

The models of a study are cells of its folder: any number of processes may work on one study, and a
stopped study resumes. Models that share a network train together as a fleet on a GPU, and one after
the other on a CPU.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from farspan.batching import run_in_batches
from farspan.cells import Cells, cell_key, check_results_folder, repeat_until_done
from farspan.checkpoints import quiet
from farspan.custom_code import import_code, resolve_reference
from farspan.deprecation import renamed_arguments
from farspan.errors import FarspanError
from farspan.files import new_folder, write_text
from farspan.lab.custom_tasks import custom_task_hash, resolve_file
from farspan.lab.fleet import Fleet
from farspan.lab.fleet_training import train_fleet
from farspan.lab.networks import network_config
from farspan.lab.ranking import (
    LabEntry,
    Rank,
    Table,
    accuracy,
    accuracy_table,
    count_learned,
    group_entries,
    rank_encodings,
    rank_table,
    scale_table,
    scratchpad_table,
)
from farspan.lab.study import (
    LabCell,
    LabStudy,
    TaskData,
    describe_cell,
    evaluate_fleet,
    fleet_plan,
    group_fleets,
    list_cells,
    longest_row,
    make_fleet,
    make_task_data,
    parse_length_range,
)
from farspan.lab.tasks import LabTask, draw_examples, find_task
from farspan.lab.tokenizer import WordTokenizer
from farspan.loading import resolve_device
from farspan.model import FarspanForCausalLM
from farspan.progress import Progress, automatic, shows_progress, silent
from farspan.recipe import load_recipe, to_toml
from farspan.record import environment, write_record
from farspan.report import lab_figures, style
from farspan.report.study_tables import markdown
from farspan.signals import end_with_parent
from farspan.summaries import Summarized
from farspan.train.pretrain import flops_per_token
from farspan.workflows.pretrain import matmul_flops_per_second

RECIPE_DIR = Path(__file__).parent.parent / "assets" / "recipes" / "lab"
GIB = 2**30
JOIN_TIMEOUT = 5.0  # seconds for a worker process to notice that the study is finished
Say = Callable[[str], None]


def read_study(
    recipe: str, overrides: Sequence[str] = (), *, trust_remote_code: bool = False
) -> LabStudy:
    """A recipe by name or file, with `key=value` overrides.

    trust_remote_code: run the code of custom tasks and encodings. Their paths are relative to the
        folder of the recipe's file, or to the current folder for a recipe by name.

    >>> read_study("lab-tiny", ["train.steps=100"]).train.steps
    100
    """
    folder = Path(recipe).parent if recipe.endswith(".toml") else Path()

    def resolve_files(document: dict[str, Any]) -> None:
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
class LabResult(Summarized):
    """The results of a study."""

    entries: list[LabEntry]
    ranks: list[Rank]  # over the models that learned their task
    ranks_of_all: list[Rank]  # over all models
    learned: tuple[int, int]  # models that learned their task, and all models
    tables: dict[str, Table]  # by title
    folder: Path


@renamed_arguments(source="recipe", changes="overrides")
@shows_progress
def run(
    recipe: str,
    overrides: Sequence[str],
    out: str | Path,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
    say: Say = lambda text: None,
) -> LabResult:
    """Train and evaluate the missing models of a study, wait for other processes, write results.

    >>> run("lab-tiny", [], "runs/lab-tiny").ranks[0].encoding
    """
    study, out = read_study(recipe, overrides, trust_remote_code=trust_remote_code), Path(out)
    device = resolve_device(device)
    check_results_folder(out, "lab run")
    data = _custom_task_data(study)
    runner = _make_runner(study, out, device, progress, say)
    runner.cached_data.update(data)
    write_text(out / "recipe.toml", to_toml(study))
    with _workers(min(study.processes, len(runner.missing_fleets())) - 1, study, out, device):
        runner.finish()
    results = {cell: runner.cells.get(key) or {} for cell, key in runner.keys.items()}
    return _write_results(study, results, out, device)


def _custom_task_data(study: LabStudy) -> dict[tuple[str, str], TaskData]:
    """The examples of the study's own tasks, so that a bad one is refused before any training."""
    data = {
        (task, scratchpad): make_task_data(study, task, scratchpad, study.tokenizer)
        for task in study.tasks
        if task in study.custom_tasks
        for scratchpad in study.formats(task)
    }
    for (task, _), examples in data.items():
        if len(examples.train) < study.train.buckets:
            raise FarspanError(
                f"{task} has {len(examples.train)} examples to train on, which do not fill "
                f"{study.train.buckets} buckets; add examples, or set train.buckets=1"
            )
    return data


@renamed_arguments(source="recipe", changes="overrides")
def summarize(
    recipe: str,
    overrides: Sequence[str],
    out: str | Path,
    say: Say = lambda text: None,
    *,
    trust_remote_code: bool = False,
) -> LabResult:
    """Write the results of the finished models of a study, without training."""
    study, out = read_study(recipe, overrides, trust_remote_code=trust_remote_code), Path(out)
    results = {}
    if (out / "cells").is_dir():  # Cells would create it
        cells = Cells(out, say=say)
        for cell, key in _cell_keys(study).items():
            if (result := cells.get(key)) is not None:
                results[cell] = result
    if not results:
        raise FarspanError(
            f"{out} holds no results of this study; run it first, or set its folder with --out"
        )
    return _write_results(study, results, out)


def _cell_keys(study: LabStudy) -> dict[LabCell, str]:
    return {cell: cell_key(describe_cell(study, cell)) for cell in list_cells(study)}


# Training.


@contextmanager
def _workers(count: int, study: LabStudy, out: Path, device: str) -> Iterator[None]:
    """Run `count` more processes on the study's cells during the block.

    Every process uses one core: small models gain nothing from two.
    """
    if count < 1:
        yield
        return
    # Not by fork, which does not copy torch's threads.
    workers = [
        get_context("spawn").Process(target=_work_on_study, args=(study, out, device), daemon=True)
        for _ in range(count)
    ]
    threads = torch.get_num_threads()
    try:
        for worker in workers:
            worker.start()
        torch.set_num_threads(1)
        yield
        for worker in workers:
            worker.join(JOIN_TIMEOUT)  # Python warns of semaphores that a terminated process leaks
    finally:
        torch.set_num_threads(threads)
        for worker in workers:
            if worker.pid is not None:  # it was started
                worker.terminate()
                worker.join()


def _work_on_study(study: LabStudy, out: Path, device: str) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    for key, reference in study.custom_code().items():  # the first process has checked the trust
        import_code(reference, key, trust_remote_code=True)
    _make_runner(study, out, device).finish()


class _CellsWithModels(Cells):
    """Cells that count as finished only if their model is saved.

    The setting `save` is not part of a cell's key, because results do not depend on it. So a study
    that was finished without models trains them again.
    """

    def __init__(self, out: Path, models: Mapping[str, Path], say: Say):
        super().__init__(out, say=say)
        self._models = models

    def get(self, key: str) -> dict[str, Any] | None:
        return super().get(key) if self._models[key].exists() else None


def model_folder(out: Path, cell: LabCell, key: str) -> Path:
    """Where a cell's model is saved."""
    return out / "models" / f"{cell.name}-{key[:8]}"


def _make_runner(
    study: LabStudy,
    out: Path,
    device: str,
    progress: Progress = silent,
    say: Say = lambda text: None,
) -> StudyRunner:
    keys = _cell_keys(study)
    cells = Cells(out, say=say)
    if study.save:
        models = {key: model_folder(out, cell, key) for cell, key in keys.items()}
        cells = _CellsWithModels(out, models, say)
    return StudyRunner(study, study.tokenizer, device, keys, cells, out, progress, say)


@dataclass(frozen=True, eq=False)
class StudyRunner:
    """Trains and evaluates the fleets of a study."""

    study: LabStudy
    tokenizer: WordTokenizer
    device: str
    keys: dict[LabCell, str]
    cells: Cells
    out: Path
    progress: Progress
    say: Say
    cached_data: dict[tuple[str, str], TaskData] = field(default_factory=dict)

    def task_data(self, cell: LabCell) -> TaskData:
        """The examples of a cell's task and scratchpad, made once."""
        key = cell.task, cell.scratchpad
        if key not in self.cached_data:
            self.cached_data[key] = make_task_data(self.study, *key, self.tokenizer)
        return self.cached_data[key]

    def missing_fleets(self) -> list[list[LabCell]]:
        """The cells without results, grouped into fleets."""
        missing = [cell for cell, key in self.keys.items() if self.cells.get(key) is None]
        on_gpu = torch.device(self.device).type == "cuda"
        return group_fleets(self.study, missing, self.tokenizer, self.study.fleet if on_gpu else 1)

    def finish(self) -> None:
        """Train the missing cells that no other process has claimed, and wait for the others."""
        fleets = self.missing_fleets()
        waiting = {cell: self.keys[cell] for fleet in fleets for cell in fleet}

        def run_pass() -> int:
            for fleet in fleets:
                missing = {waiting[cell]: cell for cell in fleet if cell in waiting}
                with self.cells.claimed(list(missing)) as claimed:
                    self.train({key: missing[key] for key in claimed})
                self._report_finished(waiting)
            return len(waiting)

        repeat_until_done(run_pass)

    def _report_finished(self, waiting: dict[LabCell, str]) -> None:
        """Report the cells that are finished by now, by any process, and remove them."""
        for cell, key in list(waiting.items()):
            if (result := self.cells.get(key)) is not None:
                del waiting[cell]
                self.say(format_result(cell, result))

    def train(self, todo: dict[str, LabCell]) -> None:
        """Train cells of one network together, or in smaller fleets if memory runs out."""
        keys = list(todo)
        run_in_batches(
            len(keys),
            len(keys),
            lambda start, stop: self._train_fleet({key: todo[key] for key in keys[start:stop]}),
        )

    def _train_fleet(self, todo: dict[str, LabCell]) -> None:
        started, cells = time.perf_counter(), list(todo.values())
        data = [self.task_data(cell) for cell in cells]
        fleet = make_fleet(self.study, cells, data, self.tokenizer, self.device)
        losses = train_fleet(
            fleet,
            [task.train for task in data],
            fleet_plan(self.study, cells[0]),
            rates=[cell.lr for cell in cells],
            seeds=[cell.seed for cell in cells],
            on_step=self._progress_callback(cells),
        )
        seconds = time.perf_counter() - started
        scores = evaluate_fleet(fleet, data, self.study.scales)
        for index, (key, cell) in enumerate(todo.items()):
            if self.study.save:
                model = fleet.model(index)
                model.config.max_position_embeddings = data[index].train_length  # its own task's
                save_model(model, self.tokenizer, model_folder(self.out, cell, key))
            result = scores[index] | self._training_result(fleet, losses[:, index], seconds)
            self.cells.put(key, describe_cell(self.study, cell), result)

    def _progress_callback(self, cells: Sequence[LabCell]) -> Callable[[int, float], None]:
        label = cells[0].name if len(cells) == 1 else f"{cells[0].encoding} ×{len(cells)}"
        advance = self.progress(label, fleet_plan(self.study, cells[0]).steps)
        steps_done = 0

        def on_step(step: int, loss: float) -> None:
            nonlocal steps_done
            advance(step - steps_done, f"loss {loss:.3f}")
            steps_done = step

        return on_step

    def _training_result(self, fleet: Fleet, losses: np.ndarray, seconds: float) -> dict[str, Any]:
        return {
            "loss": [round(loss, 5) if math.isfinite(loss) else None for loss in losses.tolist()],
            "parameters": fleet.weights.shape[1],
            "fleet": len(fleet),
            "seconds": round(seconds / len(fleet), 2),  # of training, per model
            "device": environment(self.device)["device"],
        }


def format_result(cell: LabCell, result: dict[str, Any]) -> str:
    """The result of one model in one line."""
    scores = f"in range {accuracy(result['in_range']):.3f}  beyond {accuracy(result['beyond']):.3f}"
    outcome = "diverged" if result["loss"][-1] is None else scores
    return f"{cell.name:48} {outcome}  {result['seconds']:.1f} s"


def save_model(model: FarspanForCausalLM, tokenizer: WordTokenizer, folder: Path) -> None:
    """Save a model and its tokenizer as a folder that farspan and transformers load."""
    if folder.exists():  # from a run stopped before it stored the result; equal seed, equal model
        return
    with new_folder(folder) as staging, quiet():
        model.save_pretrained(staging)
        to_hf_tokenizer(tokenizer).save_pretrained(staging)


def to_hf_tokenizer(tokenizer: WordTokenizer) -> PreTrainedTokenizerFast:
    """The same vocabulary as a Hugging Face tokenizer. Unknown words become padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    ids = {word: index for index, word in enumerate(tokenizer.vocabulary)}
    pad, begin, end = (
        tokenizer.vocabulary[index] for index in (tokenizer.pad, tokenizer.begin, tokenizer.end)
    )
    words = Tokenizer(WordLevel(ids, unk_token=pad))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=pad, unk_token=pad, bos_token=begin, eos_token=end
    )


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
    style.save(lab_figures.accuracy_by_length(accuracy_panels(study, entries)), out / "accuracy")
    write_record(
        out / "record.json",
        "lab run",
        {"study": asdict(study), "device": device},
        {
            "learnt": learned[0],
            "models": learned[1],
            "ranks": [asdict(rank) for rank in ranks],
            "ranks_of_all": [asdict(rank) for rank in ranks_of_all],
            "cells": [{**asdict(cell), **result} for cell, result in results.items()],
        },
    )
    return LabResult(entries, ranks, ranks_of_all, learned, tables, out)


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


# Dry run.


@dataclass(frozen=True, repr=False)
class LabEstimate(Summarized):
    """The cost of one network of a study, before training."""

    encoding: str
    size: str
    models: int
    fleets: int
    parameters: int  # of one model
    tokens: int  # of all models, with padding
    weights_gib: float  # of the largest fleet: weights, gradients and optimizer state
    seconds: float  # a lower bound: matrix products only


def estimate(study: LabStudy, device: str | None = None) -> list[LabEstimate]:
    """What each network of a study costs to train."""
    tokenizer, device = study.tokenizer, resolve_device(device)
    _custom_task_data(study)
    on_gpu = torch.device(device).type == "cuda"
    rate = matmul_flops_per_second(on_gpu, device)
    cells = list_cells(study)
    networks: dict[tuple[str, str], list[list[LabCell]]] = {
        (cell.encoding, cell.size): [] for cell in cells
    }
    for fleet in group_fleets(study, cells, tokenizer, study.fleet if on_gpu else 1):
        networks[fleet[0].encoding, fleet[0].size].append(fleet)
    return [_estimate(study, tokenizer, fleets, rate) for fleets in networks.values()]


def _estimate(
    study: LabStudy, tokenizer: WordTokenizer, fleets: list[list[LabCell]], rate: float
) -> LabEstimate:
    first = fleets[0][0]
    tokens, flops = 0, 0.0
    for fleet in fleets:
        longest = max(longest_row(study, cell.task, cell.scratchpad, tokenizer) for cell in fleet)
        shape = study.sizes[first.size]
        config = network_config(
            shape, first.encoding, tokenizer, longest, longest, study.custom_encodings
        )
        plan = fleet_plan(study, fleet[0])
        # Rows of the shortest bucket are about 1/buckets as long as those of the longest.
        per_model = round(plan.steps * plan.batch * longest * (1 + 1 / plan.buckets) / 2)
        tokens += per_model * len(fleet)
        flops += per_model * len(fleet) * flops_per_token(config, longest)
    with torch.device("meta"):
        parameters = FarspanForCausalLM(config).num_parameters()
    return LabEstimate(
        first.encoding,
        first.size,
        sum(map(len, fleets)),
        len(fleets),
        parameters,
        tokens,
        max(map(len, fleets)) * parameters * 20 / GIB,  # weights, two gradients, two moments
        flops / rate,
    )


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
    length_range = parse_length_range(lengths) if lengths else lab_task.train
    for example in draw_examples(lab_task, length_range, n, seed, scratchpad=scratchpad):
        yield json.dumps(asdict(example), ensure_ascii=False)
