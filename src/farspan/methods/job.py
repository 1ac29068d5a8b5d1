"""What every method is given: a target length, text, and the layers to scale; and losses on it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.batching import run_in_batches
from farspan.data.recall import ChangeRow
from farspan.data.windows import prepend
from farspan.errors import FarspanError
from farspan.model.loss import token_losses
from farspan.progress import Progress, Say, ignore, silent
from farspan.train.loop import TrainPlan
from farspan.train.sharding import processes

MICRO_BATCH_TOKENS = 32_768
MAX_TOKEN_LOSS = 20.0  # nats, of the tokens of an answer on average

Name = TypeVar("Name")


@dataclass(frozen=True, eq=False)
class FitJob:
    """A target length and two splits of text: one to search on, one to choose by.

    No method sees the report split.
    """

    target: int
    train_length: int
    search: Tensor  # [windows, a little beyond the target] ids
    choose: Tensor  # [windows, target] ids
    layers: tuple[int, ...]  # whose attention is scaled
    heads: int
    model: str  # fingerprint of the base weights
    has_nope: bool = False  # whether a layer has no positions
    layer_heads: Mapping[int, int] = field(default_factory=dict)  # of each layer; default: heads
    start: Scales | None = None  # of the patch that is extended, from which a search starts
    start_name: str = ""
    name: str = ""
    position: str | None = None
    seed: int = 0
    folder: Path | None = None  # for checkpoints
    tokenizer: Any = None
    begin: tuple[int, ...] = ()  # begin-of-text token in front of every window, if any
    details: dict[str, Any] = field(default_factory=dict)  # what methods add to the record
    progress: Progress = silent
    say: Say = ignore  # what a method chooses, when it does

    def patch(self, method: str, **changes: Any) -> Patch:
        """A patch for this job's model; `changes` are its scales, rope and weights."""
        if changes.get("scales") is not None:
            changes["scales"] = replace(changes["scales"], layer_heads=self.layer_heads)
        return Patch(
            method,
            self.model,
            self.target,
            self.train_length,
            name=self.name,
            position=self.position,
            **changes,
        )

    def uniform(self, value: float) -> Scales:
        return Scales.uniform(value, self.layers, self.heads)

    def batches(
        self,
        batch: int,
        micro_batch: int,
        device: torch.device,
        change_row: ChangeRow | None = None,
        *,
        with_answers: bool = False,
        first: int = 0,
    ) -> Callable[[int], list[Tensor]]:
        """A function from step to this process's micro batches of search windows [B, T].

        Every epoch visits each window once, in a new order. `change_row` is given each window and
        its number in the run.
        with_answers: micro batches are [2, B, T]; behind the tokens, each token of an answer has
            the number of such tokens in its window, and others have 0.
        first: the number of the first window, where others were read before.
        """
        state = processes()
        per_process, rows = split_batch(batch, micro_batch)

        def batches_of_step(step: int) -> list[Tensor]:
            start = first + step * batch + state.process_index * per_process
            numbers = range(start, start + per_process)
            windows = self.search[[self._window_index(number) for number in numbers]]
            answers = torch.zeros_like(windows)
            if change_row is not None:
                texts = windows[:, len(self.begin) :]
                changed = [change_row(*pair) for pair in zip(texts, numbers, strict=True)]
                ids, marks = (torch.stack(part) for part in zip(*changed, strict=True))
                windows = prepend(ids, self.begin)
                answers[:, len(self.begin) :] = marks
            counts = answers * answers.sum(1, keepdim=True)
            batch_ids = torch.stack((windows, counts)) if with_answers else windows
            return list(batch_ids.to(device).split(rows, dim=-2))

        return batches_of_step

    def _window_index(self, number: int) -> int:
        epoch, place = divmod(number, len(self.search))
        return int(_epoch_order(len(self.search), (self.seed << 20) + epoch)[place])

    def with_windows(self, length: int) -> FitJob:
        """The job with its search windows cut into windows of `length` tokens."""
        text, size = self.search[:, len(self.begin) :], length - len(self.begin)
        count = text.shape[1] // size
        if count == 0:
            raise FarspanError(
                f"windows of {length} tokens do not fit in search windows of "
                f"{self.search.shape[1]}; choose {self.search.shape[1]} or fewer"
            )
        rows = text[:, : count * size].reshape(-1, size)
        return replace(self, search=prepend(rows, self.begin))

    @contextmanager
    def checkpoint_dir(self, name: str) -> Iterator[Path]:
        """A folder for a search's checkpoints: in the job's folder, or a temporary one."""
        if self.folder is not None:
            yield self.folder / name
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def shared_batch(batch: int) -> int:
    """The default batch, or the next size that all processes share evenly."""
    return batch + -batch % processes().num_processes


def split_batch(batch: int, micro_batch: int) -> tuple[int, int]:
    """The windows of each process, and of each of its micro batches."""
    count = processes().num_processes
    per_process, rest = divmod(batch, count)
    rows = max(1, min(micro_batch, per_process))
    if rest or per_process % rows:
        raise FarspanError(
            f"a batch of {batch} windows cannot be split into micro batches of {micro_batch} "
            f"for {count} processes; choose a batch that they divide "
            "(search.batch and search.micro_batch of a search, tuning.batch and "
            "tuning.micro_batch where weights are trained)"
        )
    return per_process, rows


def largest_micro_batch(batch: int, limit: int) -> int:
    """The most windows, `limit` at most, that divide a process's share of a batch."""
    share = max(1, batch // processes().num_processes)
    return max(rows for rows in range(1, min(share, limit) + 1) if share % rows == 0)


def default_micro_batch(batch: int, length: int) -> int:
    """The most windows, of MICRO_BATCH_TOKENS at most, that divide a process's share of a batch."""
    return largest_micro_batch(batch, max(1, MICRO_BATCH_TOKENS // length))


def loss_margin(answer_weight: float) -> float:
    """Nats by which the loss of a step may exceed that of others.

    The answers of a batch may be unlikely throughout, and another batch may have none.
    """
    return TrainPlan.margin + MAX_TOKEN_LOSS * answer_weight


@lru_cache(maxsize=2)
def _epoch_order(windows: int, seed: int) -> Tensor:
    return torch.randperm(windows, generator=torch.Generator().manual_seed(seed))


def loss_by_position(model: PreTrainedModel, windows: Tensor, batch: int = 4) -> Tensor:
    """Mean loss over windows [W, T] at each position, [T − 1] float64, on the CPU."""
    total = torch.zeros(windows.shape[1] - 1, dtype=torch.float64)

    def add(start: int, stop: int) -> None:
        total.add_(token_losses(model, windows[start:stop].to(model.device)).double().sum(0).cpu())

    run_in_batches(len(windows), batch, add)
    return total / len(windows)


def scaled_loss(model: PreTrainedModel, windows: Tensor, scales: Scales) -> float:
    """The mean loss over whole windows with these scales, which are removed afterwards."""
    with seam.scaled(model, scales):
        return float(loss_by_position(model, windows).mean())


def lowest_loss(losses: Mapping[Name, float]) -> Name:
    """The name with the lowest loss; NaN counts as the largest."""
    return min(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)


def search_best(
    loss: Callable[[float], float], coarse: Sequence[float], step: float
) -> tuple[float, dict[float, float]]:
    """The value with the lowest loss to within `step`, and every loss that was computed.

    The search refines a coarse grid around its best value. NaN and infinite losses are the worst.
    """
    steps_per_unit = round(1 / step)
    losses: dict[int, float] = {}  # by multiples of the step

    def multiple(value: float) -> int:
        return round(value / step)

    def cached_loss(value: float) -> float:
        number = multiple(value)
        if number not in losses:
            computed = loss(number / steps_per_unit)
            losses[number] = computed if math.isfinite(computed) else math.inf
        return losses[number]

    values = sorted(coarse)
    width = min(after - before for before, after in pairwise(values))
    first, last = multiple(values[0]), multiple(values[-1])
    best = min(values, key=cached_loss)
    while width > step * 1.001:
        width = max(step, width / 4)
        around = [best + width * number for number in range(-3, 4)]
        best = min((value for value in around if first <= multiple(value) <= last), key=cached_loss)
    if cached_loss(best) == math.inf:
        raise FarspanError(
            "no scale gives a finite loss on this text; check the model with `farspan diagnose`"
        )
    by_value = {number / steps_per_unit: value for number, value in losses.items()}
    return multiple(best) / steps_per_unit, by_value


def grid_size(coarse: Sequence[float], step: float) -> int:
    """The most losses that `search_best` computes."""
    width, count = min(after - before for before, after in pairwise(sorted(coarse))), len(coarse)
    while width > step * 1.001:
        width, count = max(step, width / 4), count + 6
    return count
