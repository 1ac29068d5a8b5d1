"""What every method is asked: which model, how far, on what text. And how well a model does, for those that choose."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.memory import in_pieces
from farspan.model.loss import token_losses
from farspan.progress import Progress, silent
from farspan.train.sharding import processes

Name = TypeVar("Name")


@dataclass(frozen=True, eq=False)
class Job:
    """A target length, and text of two splits: one to search on, one to choose by. No method sees the third, on which
    results are reported."""

    target: int
    train_length: int
    search: Tensor  # [windows, a little beyond the target] ids
    choose: Tensor  # [windows, target] ids
    layers: tuple[int, ...]  # whose attention is scaled
    heads: int
    model: str  # fingerprint of the base weights
    name: str = ""
    position: str | None = None
    seed: int = 0
    folder: Path | None = None  # where a search keeps its checkpoints
    progress: Progress = silent

    def patch(self, method: str, **found: Any) -> Patch:
        return Patch(
            method, self.model, self.target, self.train_length, name=self.name, position=self.position, **found
        )

    def uniform(self, value: float) -> Scales:
        return Scales.uniform(value, self.layers, self.heads)

    def batches(self, batch: int, micro_batch: int, device: torch.device) -> Callable[[int], list[Tensor]]:
        """Step -> this process's search windows, each once before any comes again, in a new order every time round."""
        state = processes()
        mine, rest = divmod(batch, state.num_processes)
        rows = max(1, min(micro_batch, mine))
        if rest or mine % rows:
            raise FarspanError(
                f"a batch of {batch} windows cannot be cut into micro batches of {micro_batch} for "
                f"{state.num_processes} processes; choose divisors"
            )

        def of_step(step: int) -> list[Tensor]:
            first = step * batch + state.process_index * mine
            numbers = [self._nth(first + number) for number in range(mine)]
            return list(self.search[numbers].to(device).split(rows))

        return of_step

    def _nth(self, number: int) -> int:
        turn, place = divmod(number, len(self.search))
        order = torch.randperm(len(self.search), generator=torch.Generator().manual_seed((self.seed << 20) + turn))
        return int(order[place])

    @contextmanager
    def kept(self, name: str) -> Iterator[Path]:
        """Where a search keeps its state: in the job's folder, or nowhere for long."""
        if self.folder is not None:
            yield self.folder / name
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def loss_by_position(model: PreTrainedModel, windows: Tensor, batch: int = 4) -> Tensor:
    """Mean loss over windows [W, T] at each position, [T − 1] float64, on the CPU."""
    total = torch.zeros(windows.shape[1] - 1, dtype=torch.float64)

    def some(start: int, stop: int) -> None:
        total.add_(token_losses(model, windows[start:stop].to(model.device)).double().sum(0).cpu())

    in_pieces(len(windows), batch, some)
    return total / len(windows)


def scaled_loss(model: PreTrainedModel, windows: Tensor, scales: Scales) -> float:
    """The mean loss over whole windows, with these scales on the seam, which is free afterwards."""
    seam.install(model, scales)
    try:
        return float(loss_by_position(model, windows).mean())
    finally:
        seam.uninstall(model)


def least(losses: Mapping[Name, float]) -> Name:
    """Whose loss is the least; one that is no number is the largest."""
    return min(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)


def best_of(loss: Callable[[float], float], coarse: Sequence[float], step: float) -> tuple[float, dict[float, float]]:
    """The number with the least loss, to `step`: the best of a coarse grid, then ever finer around it.

    Returns it with every loss that was asked for. Where the loss is infinite or no number, that is worst.
    """
    asked: dict[float, float] = {}

    def ask(value: float) -> float:
        value = round(round(value / step) * step, 6)
        if value not in asked:
            found = loss(value)
            asked[value] = found if math.isfinite(found) else math.inf
        return asked[value]

    values = sorted(coarse)
    width = min(after - before for before, after in pairwise(values))
    best = min(values, key=ask)
    while width > step * 1.001:
        width = max(step, width / 4)
        around = [best + width * number for number in range(-3, 4)]
        best = min((value for value in around if values[0] <= round(value, 6) <= values[-1]), key=ask)
    best = round(round(best / step) * step, 6)
    if asked[best] == math.inf:
        raise FarspanError("no scale gives a finite loss on this text; check the model with `farspan diagnose`")
    return best, asked
