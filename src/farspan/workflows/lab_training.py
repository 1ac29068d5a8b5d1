"""Trains the models of a study.

The models are cells of the study's folder: any number of processes may work on one study, and a
stopped study resumes. Models that share a network train together as a fleet on a GPU, and one after
the other on a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from farspan.batching import run_in_batches
from farspan.cells import Cells, cell_key, repeat_until_done
from farspan.checkpoints import quiet
from farspan.custom_code import import_code
from farspan.errors import FarspanError
from farspan.files import new_folder
from farspan.lab.fleet import Fleet
from farspan.lab.fleet_training import train_fleet
from farspan.lab.ranking import accuracy
from farspan.lab.study import (
    LabCell,
    LabStudy,
    describe_cell,
    fleet_plan,
    list_cells,
    make_task_data,
)
from farspan.lab.study_fleets import evaluate_fleet, group_fleets, make_fleet
from farspan.lab.task_data import TaskData
from farspan.lab.tokenizer import WordTokenizer
from farspan.model import FarspanForCausalLM
from farspan.progress import Progress, Say, ignore, silent
from farspan.record import environment
from farspan.signals import end_with_parent

JOIN_TIMEOUT = 5.0  # seconds for a worker process to notice that the study is finished


def cell_keys(study: LabStudy) -> dict[LabCell, str]:
    return {cell: cell_key(describe_cell(study, cell)) for cell in list_cells(study)}


def custom_task_data(study: LabStudy) -> dict[tuple[str, str], TaskData]:
    """The examples of the study's own tasks, so that a bad one is refused before any training."""
    data = {
        (task, scratchpad): make_task_data(study, task, scratchpad)
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


@contextmanager
def worker_processes(count: int, study: LabStudy, out: Path, device: str) -> Iterator[None]:
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
    make_runner(study, out, device).finish()


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


def make_runner(
    study: LabStudy,
    out: Path,
    device: str,
    progress: Progress = silent,
    say: Say = ignore,
) -> StudyRunner:
    keys = cell_keys(study)
    cells = Cells(out, say=say)
    if study.save:
        models = {key: model_folder(out, cell, key) for cell, key in keys.items()}
        cells = _CellsWithModels(out, models, say)
    return StudyRunner(study, device, keys, cells, out, progress, say)


@dataclass(frozen=True, eq=False)
class StudyRunner:
    """Trains and evaluates the fleets of a study."""

    study: LabStudy
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
            self.cached_data[key] = make_task_data(self.study, *key)
        return self.cached_data[key]

    def missing_fleets(self) -> list[list[LabCell]]:
        """The cells without results, grouped into fleets."""
        missing = [cell for cell, key in self.keys.items() if self.cells.get(key) is None]
        on_gpu = torch.device(self.device).type == "cuda"
        return group_fleets(self.study, missing, self.study.fleet if on_gpu else 1)

    @property
    def workers(self) -> int:
        """The processes that train."""
        return min(self.study.processes, len(self.missing_fleets()))

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
        fleet = make_fleet(self.study, cells, data, self.device)
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
                save_model(model, self.study.tokenizer, model_folder(self.out, cell, key))
            result = scores[index] | self._training_result(fleet, losses[:, index], seconds)
            self.cells.put(key, describe_cell(self.study, cell), result)

    def _progress_callback(self, cells: Sequence[LabCell]) -> Callable[[int, float], None]:
        advance = self.progress(fleet_label(cells), fleet_plan(self.study, cells[0]).steps)
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


def fleet_label(cells: Sequence[LabCell]) -> str:
    return cells[0].name if len(cells) == 1 else f"{cells[0].encoding} ×{len(cells)}"


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
