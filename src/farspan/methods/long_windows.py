"""The last part of a conversion: windows that are far longer than the train length.

There the base predicts badly and cannot teach, so the changed model learns from the text itself: to
use what stands beyond the train length, which no window of the distillation showed. The learning
rate is low, because the text pulls the model towards itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention.model_facts import forward_flops
from farspan.attention.probe import probe
from farspan.data.recall import ChangeRow
from farspan.errors import FarspanError
from farspan.methods.job import FitJob, largest_micro_batch, shared_batch
from farspan.methods.tuning import LossModule, TuningConfig, WeightTraining, train_weights
from farspan.train.optim import OptimizerConfig

BATCH_TOKENS = 65_536
LEARNING_RATE, WARMUP = 1e-4, 10


@dataclass(frozen=True)
class LongPlan:
    """The size of the training on long windows."""

    length: int  # tokens of a window
    batch: int  # windows of a step
    steps: int

    @classmethod
    def make(cls, tokens: float, length: int) -> LongPlan:
        batch = shared_batch(max(1, BATCH_TOKENS // length))
        return cls(length, batch, max(1, round(tokens / (batch * length))))

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.length


def check_long_length(length: int, train_length: int, target: int) -> None:
    if not train_length < length <= target:
        raise FarspanError(
            f"swan.long_length is {length}; choose more than the train length of {train_length}, "
            f"on which the base teaches, and at most the target of {target}"
        )


def train_on_long_windows(
    model: PreTrainedModel,
    job: FitJob,
    plan: LongPlan,
    tuning: TuningConfig,
    change_row: ChangeRow | None,
) -> dict[str, Tensor]:
    """The model's weights after training on the next token of long windows."""
    job = job.with_windows(plan.length)
    micro_batch = largest_micro_batch(plan.batch, plan.length)
    training = WeightTraining(
        LossModule(model),
        job.batches(plan.batch, micro_batch, model.device, change_row),
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
        flops=3 * forward_flops(model, probe(model), plan.length),
    )
    return train_weights(model, job, "lengthen", tuning, training)
