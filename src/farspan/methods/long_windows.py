"""The last part of a conversion: windows that are far longer than the train length.

There the base predicts badly and cannot teach, so the changed model learns from the text itself: to
use what stands beyond the train length, which no window of the distillation showed. The base goes
on teaching on short windows in the same steps, because text alone pulls the model away from what it
predicts near by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.data.recall import ChangeRow
from farspan.errors import FarspanError
from farspan.methods.distill import DistillModule
from farspan.methods.job import FitJob, default_micro_batch, shared_batch
from farspan.methods.tuning import LossModule, TuningConfig, WeightTraining, train_weights
from farspan.train.optim import OptimizerConfig

LONG_TOKENS = 32_768  # of a step, and as many in short windows
LEARNING_RATE, WARMUP = 1e-4, 10


@dataclass(frozen=True)
class LongPlan:
    """The size of the training on long windows, and on short ones beside them."""

    length: int  # tokens of a long window
    batch: int  # long windows of a step
    micro_batch: int
    short_length: int
    steps: int

    @classmethod
    def make(cls, tokens: float, length: int, short_length: int) -> LongPlan:
        batch = shared_batch(max(1, LONG_TOKENS // length))
        step = cls(length, batch, default_micro_batch(batch, length), short_length, steps=1)
        return replace(step, steps=max(1, round(tokens / step.tokens)))

    @property
    def short_micro_batch(self) -> int:
        return self.micro_batch * self.length // self.short_length

    @property
    def short_batch(self) -> int:
        return self.batch // self.micro_batch * self.short_micro_batch

    @property
    def long_tokens(self) -> int:
        return self.steps * self.batch * self.length

    @property
    def tokens(self) -> int:
        return self.long_tokens + self.steps * self.short_batch * self.short_length


def check_long_length(length: int, train_length: int, target: int) -> None:
    if not train_length < length <= target:
        raise FarspanError(
            f"swan.long_length is {length}; choose more than the train length of {train_length}, "
            f"on which the base teaches, and at most the target of {target}"
        )


class LongModule(LossModule):
    """The loss of long windows on the text, and that of windows of `short_length` by the base."""

    def __init__(self, model: PreTrainedModel, teacher: PreTrainedModel, short_length: int):
        super().__init__(model)
        self.short_length = short_length
        self._distill = (DistillModule(model, teacher, 0.0),)  # its model is registered already

    def forward(self, ids: Tensor) -> Tensor:
        return self._distill[0](ids) if ids.shape[1] == self.short_length else super().forward(ids)


def train_on_long_windows(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    job: FitJob,
    plan: LongPlan,
    tuning: TuningConfig,
    change_row: ChangeRow | None,
    flops: float,
    read: int,
) -> dict[str, Tensor]:
    """The model's weights after training on the next token of long windows.

    flops: of a token, on average over both kinds of windows.
    read: the number of short windows that the distillation has read.
    """
    training = WeightTraining(
        LongModule(model, teacher, plan.short_length),
        _batches(job, plan, model.device, change_row, read),
        tokens=plan.tokens // plan.steps,
        steps=plan.steps,
        optimization=OptimizerConfig(
            "adamw",
            lr=LEARNING_RATE,
            weight_decay=0.0,
            warmup=min(WARMUP, plan.steps),
            schedule="linear",
            decay=1.0,
        ),
        flops=flops,
    )
    return train_weights(model, job, "lengthen", tuning, training)


def _batches(
    job: FitJob, plan: LongPlan, device: torch.device, change_row: ChangeRow | None, read: int
) -> Callable[[int], list[Tensor]]:
    """Micro batches of long and short windows in turn, as many of each, so both count equally."""
    long = job.with_windows(plan.length).batches(
        plan.batch, plan.micro_batch, device, change_row, first=read
    )
    short = job.with_windows(plan.short_length).batches(
        plan.short_batch, plan.short_micro_batch, device, change_row, first=read
    )
    return lambda step: [ids for pair in zip(long(step), short(step), strict=True) for ids in pair]
