"""`farspan lab run` and `lab dump`: a study of position encodings from its recipe to tables and figures, and its
examples for other trainers.

The models of a study are cells of its folder: any number of processes may work on one study, and a study that was
stopped goes on. Models that share a network train together as a fleet on a GPU, and one after the other on a CPU.
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
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from farspan.cells import WAIT, Cells, check_folder, key_of
from farspan.errors import FarspanError
from farspan.files import new_folder, write_text
from farspan.lab.lesson import train
from farspan.lab.ranking import (
    Entry,
    Rank,
    Table,
    accuracy_table,
    entries,
    learnt_of,
    rank_table,
    ranks,
    scale_table,
    share,
)
from farspan.lab.study import (
    Cell,
    Material,
    Study,
    cells_of,
    config_of,
    describe,
    fleet_of,
    fleets,
    judge,
    longest_rows,
    material,
    parse_range,
    plan_of,
)
from farspan.lab.tasks import draw, find_task
from farspan.lab.words import Words
from farspan.loading import chosen_device, quiet
from farspan.memory import in_pieces
from farspan.model import FarspanForCausalLM
from farspan.progress import Progress, silent
from farspan.recipe import load_recipe, to_toml
from farspan.record import environment, write_record
from farspan.report import laboratory as figures
from farspan.report import style
from farspan.report.study import markdown
from farspan.signals import end_with_parent
from farspan.train.pretrain import flops_per_token
from farspan.workflows.pretraining import matrix_rate

SHELF = Path(__file__).parent.parent / "assets" / "recipes" / "lab"
GIB = 2**30
PARTING = 5.0  # seconds for a helper to see that all is done
Say = Callable[[str], None]


def read_study(source: str, changes: Sequence[str] = ()) -> Study:
    """A recipe by name or file, with `key=value` changes.

    >>> read_study("lab-tiny", ["train.steps=100"]).train.steps
    100
    """
    return load_recipe(Study, source, changes, shelf=SHELF)


@dataclass(frozen=True, eq=False)
class Finished:
    """A study, and what its cells tell."""

    entries: list[Entry]
    ranks: list[Rank]
    learnt: tuple[int, int]  # models that learnt their task, of all
    tables: dict[str, Table]  # by title
    folder: Path


def run(
    source: str,
    changes: Sequence[str],
    out: str | Path,
    *,
    device: str | None = None,
    progress: Progress = silent,
    say: Say = lambda text: None,
) -> Finished:
    """Train and judge what is missing of a study, wait for what other processes are at, and tell all of it.

    >>> run("lab-tiny", [], "runs/lab-tiny").ranks[0].encoding
    """
    study, out = read_study(source, changes), Path(out)
    device = chosen_device(device)
    check_folder(out, "lab run")
    keys = {cell: key_of(describe(study, cell)) for cell in cells_of(study)}
    bench = _Bench(study, Words(), device, _results(study, keys, out, say), out, progress, say)
    write_text(out / "recipe.toml", to_toml(study))
    with _helped(min(study.processes, len(bench.lineup(keys))) - 1, study, out, device):
        bench.finish(keys)
    results = {cell: bench.cells.get(key) or {} for cell, key in keys.items()}
    return _told(study, results, out, device)


def so_far(source: str, changes: Sequence[str], out: str | Path, say: Say = lambda text: None) -> Finished:
    """The same of what is finished; nothing is trained."""
    study, out = read_study(source, changes), Path(out)
    results = {}
    if (out / "cells").is_dir():  # which asking for cells would make
        store = Cells(out, say=say)
        found = {cell: store.get(key_of(describe(study, cell))) for cell in cells_of(study)}
        results = {cell: result for cell, result in found.items() if result is not None}
    if not results:
        raise FarspanError(f"{out} holds no result of this study; run it first, or name its folder with -o")
    return _told(study, results, out)


@contextmanager
def _helped(count: int, study: Study, out: Path, device: str) -> Iterator[None]:
    """With so many more processes at the study's cells, each on one core: small models gain nothing from two."""
    if count < 1:
        yield
        return
    # Not by fork: torch's threads would not live on in the copy.
    helpers = [get_context("spawn").Process(target=_help, args=(study, out, device), daemon=True) for _ in range(count)]
    threads = torch.get_num_threads()
    try:
        for helper in helpers:
            helper.start()
        torch.set_num_threads(1)
        yield
        for helper in helpers:
            helper.join(PARTING)  # a process that is ended from outside leaves semaphores behind, of which Python warns
    finally:
        torch.set_num_threads(threads)
        for helper in helpers:
            if helper.pid is not None:  # one that could not be started has told why
                helper.terminate()  # the study is finished, or stopped
                helper.join()


def _help(study: Study, out: Path, device: str) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    keys = {cell: key_of(describe(study, cell)) for cell in cells_of(study)}
    bench = _Bench(study, Words(), device, _results(study, keys, out), out, silent, lambda text: None)
    bench.finish(keys)


class _Kept(Cells):
    """Results that count as finished only where the model stands in its folder too. Whether models are kept is no part
    of a cell's name, for no result depends on it; a study finished without them trains again what it must keep."""

    def __init__(self, out: Path, models: Mapping[str, Path], say: Say):
        super().__init__(out, say=say)
        self._models = models

    def get(self, key: str) -> dict[str, Any] | None:
        return super().get(key) if self._models[key].exists() else None


def _results(study: Study, keys: Mapping[Cell, str], out: Path, say: Say = lambda text: None) -> Cells:
    if not study.save:
        return Cells(out, say=say)
    return _Kept(out, {key: model_folder(out, cell, key) for cell, key in keys.items()}, say)


def model_folder(out: Path, cell: Cell, key: str) -> Path:
    """Where a cell's model is kept."""
    return out / "models" / f"{cell.name}-{key[:8]}"


@dataclass(frozen=True, eq=False)
class _Bench:
    """Where fleets are trained and judged."""

    study: Study
    words: Words
    device: str
    cells: Cells
    out: Path
    progress: Progress
    say: Say
    drawn: dict[tuple[str, str], Material] = field(default_factory=dict)  # by task and scratchpad, so far

    def material(self, cell: Cell) -> Material:
        """The examples of a cell's task, drawn once."""
        which = cell.task, cell.scratchpad
        if which not in self.drawn:
            self.drawn[which] = material(self.study, *which, self.words)
        return self.drawn[which]

    def lineup(self, keys: dict[Cell, str]) -> list[list[Cell]]:
        """The fleets that are missing."""
        missing = [cell for cell, key in keys.items() if self.cells.get(key) is None]
        on_gpu = torch.device(self.device).type == "cuda"
        return fleets(self.study, missing, self.words, self.study.fleet if on_gpu else 1)

    def finish(self, keys: dict[Cell, str]) -> None:
        """Train what is missing and nobody else is at, and wait for the rest."""
        lineup = self.lineup(keys)
        waiting = {cell: keys[cell] for fleet in lineup for cell in fleet}
        while waiting:
            for fleet in lineup:
                with self.cells.claimed([waiting[cell] for cell in fleet if cell in waiting]) as mine:
                    self.work({keys[cell]: cell for cell in fleet if keys[cell] in mine})
                self._hear(waiting)
            if waiting:
                time.sleep(WAIT)  # another process is at them

    def _hear(self, waiting: dict[Cell, str]) -> None:
        """Tell of the cells that were finished since, here or elsewhere, and wait for them no more."""
        for cell, key in list(waiting.items()):
            if (result := self.cells.get(key)) is not None:
                del waiting[cell]
                self.say(line_of(cell, result))

    def work(self, todo: dict[str, Cell]) -> None:
        """Train cells of one network, all at once or, where memory is short, in smaller fleets."""
        keys = list(todo)
        in_pieces(len(keys), len(keys), lambda start, stop: self._train({key: todo[key] for key in keys[start:stop]}))

    def _train(self, todo: dict[str, Cell]) -> None:
        begun, cells = time.perf_counter(), list(todo.values())
        found = [self.material(cell) for cell in cells]
        fleet = fleet_of(self.study, cells, found, self.words, self.device)
        plan = plan_of(self.study, cells[0])
        label = cells[0].name if len(cells) == 1 else f"{cells[0].encoding} ×{len(cells)}"
        advance, seen = self.progress(label, plan.steps), 0

        def listen(step: int, loss: float) -> None:
            nonlocal seen
            advance(step - seen, f"loss {loss:.3f}")
            seen = step

        losses = train(
            fleet,
            [each.train for each in found],
            plan,
            rates=[cell.lr for cell in cells],
            seeds=[cell.seed for cell in cells],
            listen=listen,
        )
        trained = time.perf_counter() - begun
        results = judge(fleet, found, self.study.scales)
        for index, (key, cell) in enumerate(todo.items()):
            result = results[index] | {
                "loss": [round(loss, 5) if math.isfinite(loss) else None for loss in losses[:, index].tolist()],
                "parameters": fleet.weights.shape[1],
                "fleet": len(fleet),
                "seconds": round(trained / len(fleet), 2),  # of training, a model
                "device": environment(self.device)["device"],
            }
            if self.study.save:
                model = fleet.model(index)
                model.config.max_position_embeddings = found[index].train_length  # and not the whole fleet's
                save(model, self.words, model_folder(self.out, cell, key))
            self.cells.put(key, describe(self.study, cell), result)


def line_of(cell: Cell, result: dict[str, Any]) -> str:
    """One model in one line."""
    told = f"in range {share(result['in_range']):.3f}  beyond {share(result['beyond']):.3f}"
    told = "diverged" if result["loss"][-1] is None else told
    return f"{cell.name:48} {told}  {result['seconds']:.1f} s"


def save(model: FarspanForCausalLM, words: Words, folder: Path) -> None:
    """A laboratory model as a folder that farspan and transformers load, its words as a tokenizer."""
    if folder.exists():  # of a run that was stopped before it could say so; the same seed made the same model
        return
    with new_folder(folder) as staging, quiet():
        model.save_pretrained(staging)
        as_tokenizer(words).save_pretrained(staging)


def as_tokenizer(words: Words) -> PreTrainedTokenizerFast:
    """One id a word. A word that no task has becomes padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    ids = {word: index for index, word in enumerate(words.table)}
    pad, begin, _, end = (words.table[index] for index in (words.pad, words.begin, words.answer, words.end))
    tokenizer = Tokenizer(WordLevel(ids, unk_token=pad))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=pad, bos_token=begin, eos_token=end
    )


def _told(study: Study, results: dict[Cell, dict[str, Any]], out: Path, device: str | None = None) -> Finished:
    """Tables, figure and record of a finished study."""
    found = entries(results)
    untrained = " (of learned positions, the rows for them are untrained)" if "learned" in study.encodings else ""
    seen = [task for task in study.tasks if study.ranges(task)[1][0] <= study.ranges(task)[0][1]]
    overlap = f" (of {', '.join(seen)} also at lengths that were trained on)" if seen else ""
    learnt, placed = learnt_of(found), ranks(found)
    tables = {f"Exact match at unseen lengths{untrained}{overlap}": accuracy_table(found)}
    if placed:
        tables["Mean reciprocal rank (tasks)"] = rank_table(found)
    if study.scales:
        tables["Exact match at unseen lengths, scores times λ̂"] = scale_table(found)
    text = "\n\n".join(f"## {title}\n\n{markdown(*table)}" for title, table in tables.items())
    write_text(out / "tables.md", f"{learnt[0]} of {learnt[1]} models learnt their task.\n\n{text}\n")
    style.save(figures.accuracy_by_length(_panels(study, found)), out / "accuracy")
    write_record(
        out / "record.json",
        "lab run",
        {"study": asdict(study), "device": device},
        {
            "learnt": learnt[0],
            "models": learnt[1],
            "ranks": [asdict(rank) for rank in placed],
            "cells": [{**asdict(cell), **result} for cell, result in results.items()],
        },
    )
    return Finished(found, placed, learnt, tables, out)


def _panels(study: Study, found: Sequence[Entry]) -> list[figures.Panel]:
    """What the figure shows: for each task, size and scratchpad every encoding's curves."""
    panels: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in found:
        panels.setdefault((entry.task, entry.size, entry.scratchpad), []).append(entry)
    shown = []
    for (task, size, scratchpad), own in panels.items():
        more = [size] * (len(study.sizes) > 1) + [scratchpad] * (len(study.scratchpads) > 1)
        title = ", ".join([task, *more]) + ("" if any(entry.learnt for entry in own) else " (not learnt)")
        curves = {entry.encoding: entry.curve() for entry in own}
        shown.append(figures.Panel(title, study.ranges(task)[0][1], find_task(task).counts, curves))
    return shown


# What a study would take.


@dataclass(frozen=True)
class Estimate:
    """One network of a study, before anything is trained."""

    encoding: str
    size: str
    models: int
    fleets: int
    parameters: int  # of a model
    tokens: int  # of all models, padding too
    weights_gib: float  # of the largest fleet: weights, gradients and the optimizer's state
    seconds: float  # if nothing but matrix products took time


def estimate(study: Study, device: str | None = None) -> list[Estimate]:
    """What a study's networks ask for."""
    words, device = Words(), chosen_device(device)
    on_gpu = torch.device(device).type == "cuda"
    rate, lineup = matrix_rate(on_gpu, device), fleets(study, cells_of(study), words, study.fleet if on_gpu else 1)
    found: dict[tuple[str, str], list[list[Cell]]] = {(cell.encoding, cell.size): [] for cell in cells_of(study)}
    for fleet in lineup:
        found[fleet[0].encoding, fleet[0].size].append(fleet)
    return [_estimate(study, words, own, rate) for own in found.values()]


def _estimate(study: Study, words: Words, lineup: list[list[Cell]], rate: float) -> Estimate:
    first = lineup[0][0]
    tokens, flops = 0, 0.0
    for fleet in lineup:
        longest = max(longest_rows(study, cell.task, cell.scratchpad, words) for cell in fleet)
        config = config_of(study.sizes[first.size], first.encoding, words, longest, longest)
        plan = plan_of(study, fleet[0])
        seen = round(plan.steps * plan.batch * longest * (1 + 1 / plan.buckets) / 2) * len(fleet)
        tokens += seen
        flops += seen * flops_per_token(config, longest)
    with torch.device("meta"):
        parameters = FarspanForCausalLM(config).num_parameters()
    return Estimate(
        first.encoding,
        first.size,
        sum(map(len, lineup)),
        len(lineup),
        parameters,
        tokens,
        max(map(len, lineup)) * parameters * 20 / GIB,  # weights, two gradients, two moments
        flops / rate,
    )


def dump(task: str, n: int, lengths: str, seed: int, scratchpad: str | None = None) -> Iterator[str]:
    """Examples of a task as JSON Lines: input, target, length.

    >>> next(dump("copy", 1, "2:2", 0))
    """
    own = find_task(task)
    for example in draw(own, parse_range(lengths) if lengths else own.train, n, seed, scratchpad=scratchpad):
        yield json.dumps(asdict(example), ensure_ascii=False)
