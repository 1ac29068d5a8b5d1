"""The cells of `farspan eval`: each is computed once, by one of any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel

from farspan.batching import failure_reason
from farspan.cells import Cells, cell_key, compute_unclaimed, finish
from farspan.errors import FarspanError
from farspan.evals.passkey import Passkey, PrefixCache
from farspan.evals.scores import Eval, EvalCell, Sample
from farspan.evals.suites import EvalModel
from farspan.model.compile import MIN_COMPILED_SIZE, compiled_layers
from farspan.progress import Progress, Say
from farspan.workflows.eval_estimate import EvalClock

FORMAT = 1  # of cells; raised whenever what a cell of any evaluation computes changes
COMPILE_FROM = 1e16  # tokens × parameters of work from which compiling pays on a GPU


def run_cells(
    model: EvalModel,
    evaluations: Sequence[Eval],
    cells: Cells,
    *,
    preset: str,
    baseline_follows: bool,
    progress: Progress,
    say: Say,
) -> list[list[Sample]]:
    """The samples of each evaluation: first the cells that no process has claimed, length by
    length, then those that others compute.

    preset, baseline_follows: for the sentence that says what is measured, and how long that takes.
    """
    shared = {"format": FORMAT, "model": dict(model.identity)}
    by_evaluation = [
        {cell_key({**shared, **asdict(cell)}): (each, cell) for cell in each.cells()}
        for each in evaluations
    ]
    every_cell = {key: item for items in by_evaluation for key, item in items.items()}
    missing = {key: cell for key, (_, cell) in every_cell.items() if cells.get(key) is None}
    every = {key: cell for key, (_, cell) in every_cell.items()}
    clock = EvalClock(model, missing, preset, every if baseline_follows else None)
    if clock.worth_saying:
        say(f"{model.name}: {clock.sentence(len(every_cell))}")
    advance, counted = progress(model.name, len(every_cell)), set()
    # Passkey prompts share a prefix; the cache lives for this run, in which the model is fixed.
    has_passkeys = any(isinstance(each, Passkey) for each in evaluations)
    prefix_cache = PrefixCache(model.local) if has_passkeys and model.local else None

    def on_done(key: str) -> None:
        if key not in counted:
            counted.add(key)
            advance(1, f"{_label(every_cell[key][1])}{clock.left_after(key)}")

    def work(item: tuple[Eval, EvalCell]) -> dict[str, Any]:
        if model.engine:
            model.engine.on_answer = lambda done, total: advance(
                0, f"{_label(item[1])}, {done} of {total} answers"
            )
        return {"samples": _run_cell(model, *item, prefix_cache)}

    def describe(item: tuple[Eval, EvalCell]) -> dict[str, Any]:
        return {**shared, "name": model.name, **asdict(item[1])}

    for group in _groups(every_cell):
        todo = [cell for key, (_, cell) in group.items() if cells.get(key) is None]
        with _maybe_compiled(model.local, todo):
            compute_unclaimed(cells, group, work, describe=describe, on_done=on_done)
    results = finish(cells, every_cell, work, describe=describe, on_done=on_done)
    return [
        [sample for key in items for sample in results[key]["samples"]] for items in by_evaluation
    ]


def _label(cell: EvalCell) -> str:
    return " ".join(dict.fromkeys((cell.eval, cell.task, f"@{cell.length}")))


def _groups(
    cells: dict[str, tuple[Eval, EvalCell]],
) -> Iterator[dict[str, tuple[Eval, EvalCell]]]:
    """Consecutive cells of one evaluation, text and length."""

    def group_of(key: str) -> tuple[str, str, int]:
        cell = cells[key][1]
        return cell.eval, cell.task, cell.length

    for _, keys in groupby(cells, group_of):
        yield {key: cells[key] for key in keys}


def _maybe_compiled(
    model: PreTrainedModel | None, cells: Sequence[EvalCell]
) -> AbstractContextManager[None]:
    """Compiled layers, if enough perplexity windows share a shape."""
    if model is None:
        return nullcontext()
    perplexity = [cell for cell in cells if cell.eval == "perplexity"]
    tokens = sum(cell.length * cell.settings.get("count", 0) for cell in perplexity)
    pays = tokens * model.num_parameters() >= COMPILE_FROM
    return compiled_layers(model, min_size=MIN_COMPILED_SIZE) if pays else nullcontext()


def _run_cell(
    model: EvalModel, evaluation: Eval, cell: EvalCell, prefix_cache: PrefixCache | None
) -> list[Sample]:
    try:
        if isinstance(evaluation, Passkey):
            return evaluation.run(cell, model.model, model.tokenizer, prefix_cache)
        return evaluation.run(cell, model.model, model.tokenizer)
    except (IndexError, RuntimeError) as error:
        raise FarspanError(
            f"{model.name} cannot run {cell.eval} on {cell.length} tokens "
            f"({failure_reason(error)}); choose shorter lengths"
        ) from error
