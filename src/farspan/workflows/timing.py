"""The time of a forward pass: one short window is measured, and longer ones follow by FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention.model_facts import forward_flops
from farspan.attention.probe import Layer
from farspan.methods.job import loss_by_position

MEASURING = 0.5  # seconds
# Parameters × tokens of the measured window at most, and its least and greatest length. On a CPU
# this takes a second. On a GPU a shorter window would measure the launch of kernels alone.
MEASURED = {"cpu": (5e9, 64, 512), "cuda": (2e12, 512, 8192)}


@dataclass(frozen=True)
class ForwardSpeed:
    """Seconds of a forward pass over one window, from a pass that was measured."""

    model: PreTrainedModel
    layers: Sequence[Layer]
    seconds: float
    length: int  # of the measured window

    @classmethod
    def measure(cls, model: PreTrainedModel, layers: Sequence[Layer], ids: Tensor) -> ForwardSpeed:
        """On the beginning of ids [1, T]."""
        ids = measured_part(model, ids)
        seconds = fastest_run(model.device, lambda: loss_by_position(model, ids))
        return cls(model, layers, seconds, ids.shape[1])

    def of(self, length: int) -> float:
        return self.seconds * self._flops(length) / self._flops(self.length)

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self._flops(self.length) / self.seconds

    def _flops(self, length: int) -> float:
        return length * forward_flops(self.model, self.layers, length)


def measured_part(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return ids[:, : measured_length(model)].to(model.device)


def measured_length(model: PreTrainedModel) -> int:
    """The tokens of a window that takes a second or less."""
    work, shortest, longest = MEASURED.get(model.device.type, MEASURED["cpu"])
    return min(longest, max(shortest, int(work / model.num_parameters())))


def fastest_run(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds: the first run also prepares kernels, and others may have to share their cores."""
    durations: list[float] = []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # some encodings draw positions
        while len(durations) < 2 or (sum(durations) < MEASURING and len(durations) < 10):
            start = time.perf_counter()
            work()
            if devices:
                torch.cuda.synchronize(device)
            durations.append(time.perf_counter() - start)
    return min(durations)
