"""A laboratory study: which models are trained on what, and what they then know.

A study is a grid of cells, and a cell is one model: a task, an encoding, a size, a scratchpad, a learning rate and a
seed. It is judged by exact match, length by length, inside the range that it was trained on and beyond.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from farspan.cells import key_of
from farspan.errors import FarspanError, nearest
from farspan.lab.fleet import Fleet, Rows, tells, wide
from farspan.lab.lesson import Plan
from farspan.lab.scratchpad import parse_parts
from farspan.lab.tasks import Example, Range, draw, find_task, splits
from farspan.lab.words import Words
from farspan.model.config import FarspanConfig
from farspan.model.transformer import FarspanForCausalLM, zero_outputs

# The laboratory's names -> position of the network, and the share of each head that turns.
ENCODINGS: dict[str, tuple[str, float]] = {
    "none": ("none", 1.0),
    "t5": ("t5", 1.0),
    "alibi": ("alibi", 1.0),
    "rotary": ("rope", 1.0),
    "rotary-quarter": ("rope", 0.25),  # what paper B's code trained as rotary
    "sinusoidal": ("sinusoidal", 1.0),  # what paper B calls APE
    "learned": ("learned", 1.0),  # rows beyond the training length are untrained
}
SIGHT = 256  # examples by which the length of a task's rows is judged
NEAR = 1.9  # rows that are so many times longer train in another fleet, for all are padded to the longest
FORMAT = 4  # of a cell's result
LONGEST = 10_000


@dataclass(frozen=True)
class Shape:
    """A network, but for its encoding."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    ff: int = 1024
    mlp: str = "relu"
    dropout: float = 0.0
    base_scale: float = 0.0  # multiplies q·k; 0: 1/√(width of a head)
    zero_outputs: bool = True  # what a layer adds to the stream starts at zero
    rate: float = 1.0  # multiplies the study's learning rates

    def check(self, size: str) -> None:
        """Refuse a network that cannot be built or trained."""
        for name in ("layers", "width", "heads", "ff"):
            if getattr(self, name) < 1:
                raise FarspanError(f"sizes.{size}.{name} is {getattr(self, name)}; give 1 or more")
        if self.width % self.heads:
            raise FarspanError(f"sizes.{size} has a width of {self.width}, which {self.heads} heads do not divide")
        if not 0 <= self.dropout < 1:
            raise FarspanError(f"sizes.{size}.dropout is {self.dropout:g}; give a share from 0 to below 1")
        if not (0 <= self.base_scale < math.inf and 0 < self.rate < math.inf):
            raise FarspanError(
                f"sizes.{size} has base_scale {self.base_scale:g} and rate {self.rate:g}; give a rate above 0, and a "
                "scale above 0, or 0 for 1/√(width of a head)"
            )


@dataclass(frozen=True)
class Study:
    """A recipe of `farspan lab run`."""

    tasks: tuple[str, ...]
    encodings: tuple[str, ...] = ("none", "t5", "alibi", "rotary", "sinusoidal")
    seeds: tuple[int, ...] = (0, 1, 2)  # of weights and of the order of examples; the examples are the same
    lrs: tuple[float, ...] = (1e-3,)  # of several, the held-out examples choose one for a task and encoding
    scratchpads: tuple[str, ...] = ("none",)
    scales: tuple[float, ...] = ()  # λ̂ on all scores, to be tried on trained models beyond their range
    train_examples: int = 100_000
    test_examples: int = 2_000  # in range, and as many beyond
    data_seed: int = 0
    train_lengths: dict[str, str] = field(default_factory=dict)  # task -> as 2:20; paper B's unless given
    test_lengths: dict[str, str] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # task -> where it needs other than train.steps
    rates: dict[str, float] = field(default_factory=dict)  # task -> times lrs, where it needs others
    fleet: int = 64  # models at once on a GPU, at most
    processes: int = 1  # that share the work of a CPU, or of one GPU
    save: bool = False  # keep every model, as a folder that farspan loads
    sizes: dict[str, Shape] = field(default_factory=lambda: {"small": Shape()})
    train: Plan = field(default_factory=lambda: Plan(steps=4000))

    def __post_init__(self):
        for name in ("tasks", "encodings", "seeds", "lrs", "scratchpads", "sizes"):
            if not getattr(self, name):
                raise FarspanError(f"{name} is empty, and so is the study; name at least one")
        for name in ("tasks", "encodings", "seeds", "lrs", "scratchpads", "scales"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise FarspanError(f"{name} names something twice: {list(getattr(self, name))}; name each once")
        if min(self.seeds) < 0:
            raise FarspanError(f"seed {min(self.seeds)} is below 0; choose seeds from 0 on")
        if min(self.scales, default=1.0) <= 0:
            raise FarspanError(f"scale {min(self.scales):g} is not above 0; choose scales near 1")
        for name, least in (("train_examples", 1), ("test_examples", 2), ("fleet", 1), ("processes", 1)):
            if getattr(self, name) < least:
                raise FarspanError(f"{name} is {getattr(self, name)}; give {least} or more")
        if not all(0 < lr < math.inf for lr in self.lrs):
            raise FarspanError(f"lrs are {list(self.lrs)}; give learning rates above 0")
        for size, shape in self.sizes.items():
            shape.check(size)
        for encoding in self.encodings:
            if encoding not in ENCODINGS:
                raise FarspanError(f"encoding {encoding!r} is unknown; {nearest(encoding, ENCODINGS)}")
        for (size, shape), encoding in itertools.product(self.sizes.items(), self.encodings):
            try:
                config_of(shape, encoding, Words(), 8, 8)
            except FarspanError as error:
                raise FarspanError(f"sizes.{size} cannot be built with {encoding}: {error}") from None
        for task, scratchpad in itertools.product(self.tasks, self.scratchpads):
            find_task(task)
            parse_parts(scratchpad, task)
        for task, rate in self.rates.items():
            if not 0 < rate < math.inf:
                raise FarspanError(f"rates.{task} is {rate:g}; give a number above 0, by which lrs are multiplied")
        named = (self.tasks, self.train_lengths, self.test_lengths, self.steps, self.rates)
        for task in set().union(*named):  # a misspelt one is found too
            self._check_lengths(task)

    def _check_lengths(self, task: str) -> None:
        own = find_task(task)
        for low, high in self.ranges(task):
            if not any(own.count(length) for length in range(low, high + 1)):
                usual = f"{own.train[0]}:{own.train[1]} and tested on {own.test[0]}:{own.test[1]}"
                raise FarspanError(
                    f"{task} has no example of {low} to {high} {own.counts}; it is usually trained on {usual}"
                )

    def ranges(self, task: str) -> tuple[Range, Range]:
        """The lengths that a task is trained and tested on."""
        own = find_task(task)
        named = (self.train_lengths.get(task), own.train), (self.test_lengths.get(task), own.test)
        return tuple(parse_range(text) if text else usual for text, usual in named)  # type: ignore[return-value]


def parse_range(text: str) -> Range:
    """`2:20` -> (2, 20), both ends included; `7` -> (7, 7)."""
    low, _, high = text.partition(":")
    high = high or low
    if not (low.isdecimal() and high.isdecimal()) or not 1 <= int(low) <= int(high):
        raise FarspanError(f"{text!r} is no range of lengths; write the shortest and the longest, as 2:20")
    if int(high) > LONGEST:
        raise FarspanError(f"length {high} is more than a model of the laboratory reads; ask for at most {LONGEST}")
    return int(low), int(high)


@dataclass(frozen=True)
class Cell:
    """One model of a study."""

    task: str
    encoding: str
    size: str
    scratchpad: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}.{self.encoding}.{self.size}.{self.scratchpad}.lr{self.lr:g}.s{self.seed}"


def cells_of(study: Study) -> list[Cell]:
    """Every cell, those of one network together."""
    return [
        Cell(task, encoding, size, scratchpad, lr * study.sizes[size].rate * study.rates.get(task, 1.0), seed)
        for size, encoding, task, scratchpad, lr, seed in itertools.product(
            study.sizes, study.encodings, study.tasks, study.scratchpads, study.lrs, study.seeds
        )
    ]


def plan_of(study: Study, cell: Cell) -> Plan:
    return replace(study.train, steps=study.steps.get(cell.task, study.train.steps))


def describe(study: Study, cell: Cell) -> dict[str, Any]:
    """All that a cell's result depends on, but for the arithmetic of the device: its products are bf16 on a GPU."""
    train, test = study.ranges(cell.task)
    return {
        "format": FORMAT,
        **asdict(cell),
        "scratchpad": parse_parts(cell.scratchpad, cell.task),
        "shape": asdict(study.sizes[cell.size]),
        "plan": asdict(plan_of(study, cell)),
        "train_lengths": train,
        "test_lengths": test,
        "examples": [study.train_examples, study.test_examples, study.data_seed],
        "scales": study.scales,
        "words": _vocabulary(),
    }


@cache
def _vocabulary() -> str:
    """The words of all tasks, hashed: with them the table that a model begins from changes."""
    return key_of({"words": Words().table})


# Data.


@dataclass(frozen=True, eq=False)
class Material:
    """A task's examples as rows, and the length of each in the task's own terms."""

    train: Rows
    held_out: Rows
    beyond: Rows
    held_out_lengths: np.ndarray
    beyond_lengths: np.ndarray

    @property
    def train_length(self) -> int:
        """In tokens."""
        return int(self.train.stop.max())


def material(study: Study, task: str, scratchpad: str, words: Words) -> Material:
    train, test = study.ranges(task)
    drawn = splits(
        find_task(task),
        study.train_examples,
        study.test_examples,
        study.data_seed,
        train=train,
        test=test,
        scratchpad=scratchpad,
    )
    if len(drawn.held_out) < 2:
        raise FarspanError(
            f"{task} has too few examples of {train[0]} to {train[1]} {find_task(task).counts} to hold some out; "
            "train on more lengths"
        )
    if not drawn.beyond:
        raise FarspanError(
            f"every example of {task} of {test[0]} to {test[1]} {find_task(task).counts} is trained on or held out, "
            "and none is left to test; test on longer ones"
        )
    train_rows, held_out, beyond = (as_rows(part, words) for part in (evenly(drawn.train), *drawn[1:]))
    lengths = [np.array([example.length for example in part]) for part in (drawn.held_out, drawn.beyond)]
    return Material(train_rows, held_out, beyond, *lengths)


def evenly(examples: Sequence[Example]) -> list[Example]:
    """As many of each length as of every other: of the short ones there are few, which come again.

    They are the steps by which the long ones are learnt: models that met sums of two digits once in a thousand times
    never learnt to add eight.
    """
    groups = defaultdict(list)
    for example in examples:
        groups[example.length].append(example)
    most = max(map(len, groups.values()))
    return [example for group in groups.values() for example in itertools.islice(itertools.cycle(group), most)]


def as_rows(examples: Sequence[Example], words: Words) -> Rows:
    """<begin> input <answer> target <end>, padded."""
    prompts, replies = [words.prompt(each) for each in examples], [words.reply(each) for each in examples]
    start = torch.tensor([len(prompt) for prompt in prompts])
    stop = start + torch.tensor([len(reply) for reply in replies])
    ids = np.full((len(examples), int(stop.max())), words.pad, dtype=np.int16)
    for row, prompt, reply in zip(ids, prompts, replies, strict=True):
        row[: len(prompt) + len(reply)] = prompt + reply
    return Rows(torch.from_numpy(ids), start, stop)


def longest_rows(study: Study, task: str, scratchpad: str, words: Words) -> int:
    """How many tokens a row of training has at most, by some examples of the longest length."""
    own, (low, high) = find_task(task), study.ranges(task)[0]
    longest = max((length for length in range(low, high + 1) if own.count(length)), default=high)
    count = int(min(SIGHT, max(1, own.count(longest))))
    some = draw(own, (longest, longest), count, study.data_seed, scratchpad=scratchpad)
    return int(as_rows(some, words).stop.max())


# Models.


def config_of(shape: Shape, encoding: str, words: Words, train_length: int, reach: int) -> FarspanConfig:
    """The network of an encoding. A learned table has rows up to `reach`; those beyond training stay as they began."""
    position, fraction = ENCODINGS[encoding]
    return FarspanConfig(
        vocab_size=len(words),
        hidden_size=shape.width,
        intermediate_size=shape.ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=train_length,
        position_table=reach,
        position=position,
        rotary_fraction=fraction,
        base_scale=shape.base_scale or None,
        mlp=shape.mlp,
        dropout=shape.dropout,
        # Tokens begin as large as sinusoidal positions, which are added to them, and logits begin about as large.
        initializer_range=shape.width**-0.5,
        embedding_scale=shape.width**0.5,
        pad_token_id=words.pad,
        bos_token_id=words.begin,
        eos_token_id=words.end,
    )


def fleet_of(study: Study, cells: Sequence[Cell], found: Sequence[Material], words: Words, device: str) -> Fleet:
    """The untrained models of cells that share a network. A model's weights begin by its seed alone."""
    train = max(each.train_length for each in found)
    reach = max(int(rows.stop.max()) for each in found for rows in (each.train, each.held_out, each.beyond))
    config = config_of(study.sizes[cells[0].size], cells[0].encoding, words, train, wide(reach))
    models = {}
    for cell in cells:
        if cell.seed not in models:
            models[cell.seed] = begun(config, cell.seed, study.sizes[cell.size].zero_outputs)
    return Fleet([models[cell.seed] for cell in cells], device)


def begun(config: FarspanConfig, seed: int, silent: bool) -> FarspanForCausalLM:
    """An untrained model, which begins as T5 does: every matrix by the number of its inputs, and scores as large
    whatever multiplies them. T5 does without 1/√d because its queries begin that much smaller; where they do not,
    attention begins on single tokens and stays there."""
    torch.manual_seed(seed)
    model = FarspanForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("q_proj.weight"):
            parameter.data *= config.head_dim**-0.5 / config.base_scale
        if name.endswith("down_proj.weight"):
            parameter.data *= (config.hidden_size / config.intermediate_size) ** 0.5
    if silent:
        zero_outputs(model)
    return model


def fleets(study: Study, cells: Iterable[Cell], words: Words, most: int) -> list[list[Cell]]:
    """Cells that train together: one network, as many steps, rows of similar length, `most` of them at once. Those that
    take longest come first, so that processes which share them end together.

    A learned table is as long as its task needs, so there tasks train apart; and what dropout drops is drawn for all of
    a fleet, so with dropout every model trains alone.
    """
    cells = list(cells)
    widths = {pair: longest_rows(study, *pair, words) for pair in {(cell.task, cell.scratchpad) for cell in cells}}
    alike = defaultdict(list)
    for cell in cells:
        learned, dropped = cell.encoding == "learned", study.sizes[cell.size].dropout > 0
        apart = cell if dropped else (cell.task, cell.scratchpad) if learned else ()
        alike[cell.size, cell.encoding, plan_of(study, cell), apart].append(cell)
    found: list[list[Cell]] = []
    for group in alike.values():
        group.sort(key=lambda cell: widths[cell.task, cell.scratchpad])
        narrow = 0
        for cell in group:
            width = widths[cell.task, cell.scratchpad]
            if cell is group[0] or len(found[-1]) == most or width > NEAR * narrow:
                found.append([])
                narrow = width
            found[-1].append(cell)

    def toil(fleet: list[Cell]) -> int:  # a step takes a fleet little longer than a model
        longest, shape = fleet[-1], study.sizes[fleet[0].size]
        width = widths[longest.task, longest.scratchpad]
        return plan_of(study, longest).steps * width * shape.layers * shape.width**2

    return sorted(found, key=toil, reverse=True)


# Judging.


def judge(fleet: Fleet, found: Sequence[Material], scales: Sequence[float]) -> list[dict[str, Any]]:
    """Exact match of each model by length: [right, asked] for each length, in range and beyond."""
    inside = tells(fleet, [material.held_out for material in found])
    beyond = tells(fleet, [material.beyond for material in found])
    results: list[dict[str, Any]] = []
    for material, within, outside in zip(found, inside, beyond, strict=True):
        results.append(
            {
                "chosen_by": float(within[::2].mean()),  # half of what was held out chooses, the other half is reported
                "in_range": by_length(within[1::2], material.held_out_lengths[1::2]),
                "beyond": by_length(outside, material.beyond_lengths),
                "scaled": {},
            }
        )
    for scale in scales:
        with fleet.scaled(scale):
            told = tells(fleet, [material.beyond for material in found])
        for result, material, outside in zip(results, found, told, strict=True):
            result["scaled"][f"{scale:g}"] = by_length(outside, material.beyond_lengths)
    return results


def by_length(right: np.ndarray, lengths: np.ndarray) -> dict[str, list[int]]:
    return {
        str(length): [int(right[lengths == length].sum()), int((lengths == length).sum())]
        for length in np.unique(lengths).tolist()
    }
