"""A lab study: which models are trained on which tasks.

A study is a grid of cells, and a cell is one model: a task, an encoding, a size, a scratchpad, a
learning rate and a seed. It is evaluated by exact match, length by length, within the train lengths
and beyond.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from farspan.cells import cell_key
from farspan.custom_code import source_hash
from farspan.errors import FarspanError, suggest
from farspan.lab.custom_tasks import (
    CustomTask,
    check_name,
    custom_task_hash,
    is_code,
    load_custom_task,
)
from farspan.lab.encoding_trial import try_encoding
from farspan.lab.examples import check_lengths
from farspan.lab.fleet_training import FleetPlan
from farspan.lab.networks import ENCODINGS, OTHER_NAMES, NetworkShape, network_config
from farspan.lab.rows import padded_width
from farspan.lab.scratchpad import parse_parts, task_format
from farspan.lab.task_data import TaskData, encode_examples, estimate_longest_row
from farspan.lab.tasks import TASKS, LabTask, Range, find_task
from farspan.lab.tokenizer import WordTokenizer
from farspan.model.encodings import encoding_class
from farspan.model.positions import MODEL_WIDE, PER_LAYER

RESULT_FORMAT = 6  # version of a cell's result
MAX_WORDS = 2**15  # token ids are 16-bit integers


@dataclass(frozen=True)
class LabStudy:
    """A recipe of `farspan lab run`."""

    tasks: tuple[str, ...]
    encodings: tuple[str, ...] = ("none", "t5", "alibi", "rotary", "sinusoidal")
    seeds: tuple[int, ...] = (0, 1, 2)  # of weights and of the order of examples, not of examples
    lrs: tuple[float, ...] = (1e-3,)  # held-out examples choose one for each task and encoding
    scratchpads: tuple[str, ...] = ("none",)
    scales: tuple[float, ...] = ()  # λ̂ of all attention scores, evaluated beyond the range
    train_examples: int = 100_000
    test_examples: int = 2_000  # in range, and as many beyond
    data_seed: int = 0
    even_lengths: bool = True  # or as frequent as in the released data, or in the files of a task
    # By task, where it differs from the task's own range; as 2:20.
    train_lengths: dict[str, str] = field(default_factory=dict)
    test_lengths: dict[str, str] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # by task, where it is not train.steps
    rates: dict[str, float] = field(default_factory=dict)  # by task, multiplies lrs
    fleet: int = 64  # maximum number of models trained together on a GPU
    processes: int = 1  # that share the work of a CPU, or of one GPU
    save: bool = False  # save every model as a folder that farspan loads
    custom_tasks: dict[str, CustomTask] = field(default_factory=dict)
    custom_encodings: dict[str, str] = field(default_factory=dict)  # name -> mine.py:Class
    sizes: dict[str, NetworkShape] = field(default_factory=lambda: {"small": NetworkShape()})
    train: FleetPlan = field(default_factory=lambda: FleetPlan(steps=4000))

    def __post_init__(self):
        self._check_lists()
        self._check_numbers()
        for name in self.custom_tasks:
            check_name("task", name, TASKS)
        for name in self.custom_encodings:
            check_name("encoding", name, (*ENCODINGS, *PER_LAYER, *MODEL_WIDE))
        self._check_tasks()
        self._check_networks()

    def _check_lists(self) -> None:
        for name in ("tasks", "encodings", "seeds", "lrs", "scratchpads", "sizes"):
            if not getattr(self, name):
                raise FarspanError(f"{name} is empty, so the study has no models; add at least one")
        for name in ("tasks", "encodings", "seeds", "lrs", "scratchpads", "scales"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise FarspanError(f"{name} has duplicates: {list(values)}; list each value once")

    def _check_numbers(self) -> None:
        for seed in self.seeds:
            if not 0 <= seed < 2**63:
                raise FarspanError(f"seeds names {seed}; choose seeds from 0 to {2**63 - 1}")
        if min(self.scales, default=1.0) <= 0:
            raise FarspanError(f"scale {min(self.scales):g} is not above 0; choose scales near 1")
        minima = {"train_examples": 1, "test_examples": 2, "fleet": 1, "processes": 1}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise FarspanError(f"{name} is {getattr(self, name)}; set it to {minimum} or more")
        if not all(0 < lr < math.inf for lr in self.lrs):
            raise FarspanError(f"lrs are {list(self.lrs)}; choose learning rates above 0")

    def _check_networks(self) -> None:
        for size, shape in self.sizes.items():
            shape.check(size)
        known = (*ENCODINGS, *self.custom_encodings)
        for encoding in self.encodings:
            if encoding not in known:
                meant = OTHER_NAMES.get(encoding.lower(), encoding)
                raise FarspanError(f"encoding {encoding!r} is unknown; {suggest(meant, known)}")
        for (size, shape), encoding in itertools.product(self.sizes.items(), self.encodings):
            try:
                network_config(shape, encoding, WordTokenizer(), 8, 8, self.custom_encodings)
            except FarspanError as error:
                raise FarspanError(
                    f"sizes.{size} cannot be built with {encoding}: {error}"
                ) from None
            if encoding in self.custom_encodings:
                self._try_encoding(encoding, shape)

    def _try_encoding(self, encoding: str, shape: NetworkShape) -> None:
        """Run an encoding of the study's own on its longest rows, and on the least trained ones."""
        reference = self.custom_encodings[encoding]
        encoding_class(encoding, self.custom_encodings)
        version = source_hash(reference, f"custom_encodings.{encoding}")
        lengths = [
            _row_lengths(self, task, scratchpad)
            for task in self.tasks
            for scratchpad in self.formats(task)
        ]
        longest = max(lengths, key=lambda pair: pair[1])
        least_trained = max(lengths, key=lambda pair: pair[1] / pair[0])
        for pair in {longest, least_trained}:
            try_encoding(encoding, reference, shape, version, pair)

    def _check_tasks(self) -> None:
        for task in self.tasks:
            self.task(task)
            self.formats(task)
        for scratchpad in self.scratchpads:
            if all(task_format(scratchpad, task) != scratchpad for task in self.tasks):
                parse_parts(scratchpad, self.tasks[0])  # raises an error
        if len(self.tokenizer) > MAX_WORDS:
            raise FarspanError(
                f"the tasks have {len(self.tokenizer):,} different words; use at most {MAX_WORDS:,}"
            )
        for task, rate in self.rates.items():
            if not 0 < rate < math.inf:
                raise FarspanError(
                    f"rates.{task} is {rate:g}, which multiplies lrs; set it to a number above 0"
                )
        by_task = (self.train_lengths, self.test_lengths, self.steps, self.rates)
        for name in set(self.tasks).union(*by_task):  # an unknown task in any of them is an error
            check_lengths(self.task(name), self.ranges(name), self.even_lengths)

    def task(self, name: str) -> LabTask:
        """The task of that name, built-in or the recipe's own."""
        if name in self.custom_tasks:
            return load_custom_task(name, self.custom_tasks[name])
        return find_task(name, self.custom_tasks)

    def custom_code(self) -> dict[str, str]:
        """The Python code that the recipe names, by key."""
        tasks = {
            f"custom_tasks.{name}.file": task.file
            for name, task in self.custom_tasks.items()
            if is_code(task.file)
        }
        encodings = {f"custom_encodings.{name}": ref for name, ref in self.custom_encodings.items()}
        return tasks | encodings

    @cached_property
    def tokenizer(self) -> WordTokenizer:
        """One vocabulary for all tasks of the study: words of its own tasks come last."""
        own = [self.task(name) for name in self.tasks if name in self.custom_tasks]
        return WordTokenizer(word for task in own for word in task.vocabulary)

    def formats(self, task: str) -> list[str]:
        """The scratchpads of a task, each once, without the parts that the task lacks."""
        formats: dict[str, str] = {}
        for scratchpad in self.scratchpads:
            name = task_format(scratchpad, task)
            formats.setdefault(parse_parts(name, task), name)
        return list(formats.values())

    def ranges(self, task: str) -> tuple[Range, Range]:
        """The lengths that a task is trained on and tested on."""
        train, test = self.train_lengths.get(task, ""), self.test_lengths.get(task, "")
        return self.task(task).ranges(train, test)


@dataclass(frozen=True)
class LabCell:
    """One model of a study."""

    task: str
    encoding: str
    size: str
    scratchpad: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return (
            f"{self.task}.{self.encoding}.{self.size}.{self.scratchpad}.lr{self.lr:g}.s{self.seed}"
        )


def list_cells(study: LabStudy) -> list[LabCell]:
    """Every cell of a study, grouped by network."""
    return [
        LabCell(
            task,
            encoding,
            size,
            scratchpad,
            lr * study.sizes[size].rate * study.rates.get(task, 1.0),
            seed,
        )
        for size, encoding, task in itertools.product(study.sizes, study.encodings, study.tasks)
        for scratchpad, lr, seed in itertools.product(study.formats(task), study.lrs, study.seeds)
    ]


def fleet_plan(study: LabStudy, cell: LabCell) -> FleetPlan:
    return replace(study.train, steps=study.steps.get(cell.task, study.train.steps))


def describe_cell(study: LabStudy, cell: LabCell) -> dict[str, Any]:
    """All that a cell's result depends on, except the precision of the device (bf16 on a GPU)."""
    train, test = study.ranges(cell.task)
    custom: dict[str, Any] = {}
    if cell.task in study.custom_tasks:
        task = study.custom_tasks[cell.task]
        custom["custom_task"] = [custom_task_hash(cell.task, task), task.words]
        if not (study.even_lengths or is_code(task.file)):  # earlier versions counted nothing
            custom["lengths"] = "as in the files"
    if cell.encoding in study.custom_encodings:
        reference = study.custom_encodings[cell.encoding]
        key = f"custom_encodings.{cell.encoding}"
        custom["custom_encoding"] = [source_hash(reference, key), reference.rpartition(":")[2]]
    if cell.encoding == "randomized":  # in earlier versions they depended on the padding
        custom["test_places"] = "fixed"
    return {
        "format": RESULT_FORMAT,
        **asdict(cell),
        "scratchpad": parse_parts(cell.scratchpad, cell.task),
        "shape": asdict(study.sizes[cell.size]),
        "plan": asdict(fleet_plan(study, cell)),
        "train_lengths": train,
        "test_lengths": test,
        "even_lengths": study.even_lengths,
        "examples": [study.train_examples, study.test_examples, study.data_seed],
        "scales": study.scales,
        "words": _vocabulary_hash(study.tokenizer.vocabulary),
        **custom,
    }


@cache
def _vocabulary_hash(vocabulary: tuple[str, ...]) -> str:
    """A hash of the vocabulary: the initial embeddings depend on its size and order."""
    return cell_key({"words": vocabulary})


def make_task_data(study: LabStudy, name: str, scratchpad: str) -> TaskData:
    return TaskData.make(
        study.task(name),
        study.ranges(name),
        lambda examples: encode_examples(examples, study.tokenizer),
        train_examples=study.train_examples,
        test_examples=study.test_examples,
        seed=study.data_seed,
        scratchpad=scratchpad,
        even_lengths=study.even_lengths,
        held_out_least=2,  # half of them choose the learning rate
    )


def longest_row(study: LabStudy, task: str, scratchpad: str, lengths: Range | None = None) -> int:
    """The longest row of these lengths in tokens, estimated; default: those to train on."""
    if lengths is None:
        lengths, _ = study.ranges(task)
    return estimate_longest_row(
        study.task(task), lengths, study.data_seed, scratchpad, study.tokenizer
    )


def _row_lengths(study: LabStudy, name: str, scratchpad: str) -> tuple[int, int]:
    """The longest training row and the padded width of all rows of a task in tokens, estimated."""
    train, test = (longest_row(study, name, scratchpad, lengths) for lengths in study.ranges(name))
    return train, padded_width(max(train, test))
