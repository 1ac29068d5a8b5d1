"""A few hundred steps on all weights: what the rotary baselines get, and what dropped rotation needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from farspan.errors import FarspanError
from farspan.methods.job import Job
from farspan.train.loop import Moment, Plan, train
from farspan.train.optim import Optimization, optimizers
from farspan.train.sharding import data_parallel
from farspan.train.steps import Work

FAIR, RAW = 200, 1000  # steps, as paper A has them


@dataclass(frozen=True)
class Tuning:
    """How all weights are tuned."""

    steps: int = 0  # 0: as many as `tune` stands for, or 200
    batch: int = 8
    micro_batch: int = 8
    lr: float = 1e-4
    warmup: int = 20
    save_every: int = 100

    def __post_init__(self):
        for name, least in (("steps", 0), ("batch", 1), ("micro_batch", 1), ("save_every", 1)):
            if getattr(self, name) < least:
                raise FarspanError(f"tuning.{name} is {getattr(self, name)}; give {least} or more")


class LossOf(nn.Module):
    """The mean loss of a batch of windows by any causal model; on a GPU its products are in bf16."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def tune(model: PreTrainedModel, job: Job, name: str, tuning: Tuning) -> dict[str, Tensor]:
    """The model's weights after tuning on the search windows, by name; the model itself is left as it was.

    They learn in float32 whatever they are kept in: most steps are too small for bf16 to notice.
    """
    batches = job.batches(tuning.batch, tuning.micro_batch, model.device)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    how = Optimization("adamw", lr=tuning.lr, weight_decay=0.0, warmup=tuning.warmup, schedule="cosine", floor=0.1)
    trained: dict[str, Tensor] = dict(model.named_parameters())
    work = Work(
        data_parallel(LossOf(model)),
        trained,
        optimizers(model, how),
        batches,
        tokens=tuning.batch * (job.search.shape[1] - 1),
    )
    steps = tuning.steps or FAIR
    advance = job.progress(name, steps)

    def listen(moment: Moment) -> None:
        advance(1, f"loss {moment.loss:.4f}")

    try:
        with job.kept(name) as folder:
            train(work, Plan(steps, job.seed, how, tuning.save_every, log_every=1), folder, listen)
        return {name: parameter.detach().to(before[name].dtype).cpu() for name, parameter in trained.items()}
    finally:
        for key, parameter in trained.items():
            parameter.data, parameter.grad = before[key], None


@contextmanager
def weighted_as(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights, for a block."""
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].detach().clone() for name in weights}

    @torch.no_grad()
    def put(values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    put(weights)
    try:
        yield
    finally:
        put(before)
