"""Tuning of all weights for a few hundred steps, for the RoPE baselines and for DroPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from farspan.errors import FarspanError
from farspan.methods.job import FitJob
from farspan.train.loop import StepMetrics, TrainPlan, train
from farspan.train.optim import OptimizerConfig, make_optimizers
from farspan.train.sharding import data_parallel
from farspan.train.steps import TrainingTask

FAIR_STEPS, RAW_STEPS = 200, 1000  # as in Wang 2024


@dataclass(frozen=True)
class TuningConfig:
    """Settings for tuning all weights."""

    steps: int = 0  # 0: the steps of `tune`, or 200
    batch: int = 8
    micro_batch: int = 8
    lr: float = 1e-4
    warmup: int = 20
    save_every: int = 100

    def __post_init__(self):
        for name, minimum in (("steps", 0), ("batch", 1), ("micro_batch", 1), ("save_every", 1)):
            if getattr(self, name) < minimum:
                raise FarspanError(
                    f"tuning.{name} is {getattr(self, name)}; choose {minimum} or more"
                )


class LossModule(nn.Module):
    """The mean loss of a batch of windows under any causal model; on a GPU in bf16 autocast."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def tune_weights(
    model: PreTrainedModel, job: FitJob, name: str, tuning: TuningConfig
) -> dict[str, Tensor]:
    """The model's weights after tuning on the search windows; the model itself is restored.

    Training runs in float32 whatever the model's dtype: most updates are too small for bf16.
    """
    batches = job.batches(tuning.batch, tuning.micro_batch, model.device)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    config = OptimizerConfig(
        "adamw", lr=tuning.lr, weight_decay=0.0, warmup=tuning.warmup, schedule="cosine", floor=0.1
    )
    trained: dict[str, Tensor] = dict(model.named_parameters())
    task = TrainingTask(
        data_parallel(LossModule(model)),
        trained,
        make_optimizers(model, config),
        batches,
        tokens=tuning.batch * (job.search.shape[1] - 1),
    )
    steps = tuning.steps or FAIR_STEPS
    plan = TrainPlan(steps, job.seed, config, tuning.save_every, log_every=1)
    advance = job.progress(name, steps)

    def on_step(metrics: StepMetrics) -> None:
        advance(1, f"loss {metrics.loss:.4f}")

    try:
        with job.checkpoint_dir(name) as folder:
            train(task, plan, folder, on_step)
        return {
            name: parameter.detach().to(before[name].dtype).cpu()
            for name, parameter in trained.items()
        }
    finally:
        for key, parameter in trained.items():
            parameter.data, parameter.grad = before[key], None


@contextmanager
def weights_override(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a block with other weights."""
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].detach().clone() for name in weights}

    @torch.no_grad()
    def assign(values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    assign(weights)
    try:
        yield
    finally:
        assign(before)
