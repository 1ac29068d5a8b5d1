"""Training of a model's weights for a few hundred steps, all of them or a low-rank change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.checks import check_least
from farspan.errors import FarspanError
from farspan.methods.job import FitJob, default_micro_batch, shared_batch
from farspan.model.compile import compiled_layers, prefer_cudnn
from farspan.model.loss import BUDGET, GPU_BUDGET, training_loss
from farspan.progress import by_step
from farspan.train.loop import StepMetrics, TrainPlan, train
from farspan.train.optim import OptimizerConfig, make_optimizers
from farspan.train.sharding import data_parallel
from farspan.train.steps import TrainingTask

FAIR_STEPS, RAW_STEPS = 200, 1000  # as in Wang 2024
BATCH, LEARNING_RATE = 8, 1e-4


@dataclass(frozen=True)
class TuningConfig:
    """Settings for training weights; 0 is the default of the method."""

    steps: int = 0  # 0: the steps of `tune`, or 200; swan: from swan.tokens
    batch: int = 0  # windows; 0: 8; swan: 65,536 tokens
    micro_batch: int = 0  # windows; 0: 32,768 tokens
    lr: float = 0.0  # 0: 1e-4; swan and drope: 1e-3
    warmup: int = 20
    save_every: int = 100
    rank: int = 0  # train a change of this rank in every linear layer; 0: all weights
    length: int = 0  # continue: of its windows; 0: the target

    def __post_init__(self):
        settings = ("steps", "batch", "micro_batch", "lr", "warmup", "rank", "length")
        check_least(self, 0, *settings, part="tuning.")
        check_least(self, 1, "save_every", part="tuning.")
        if self.length == 1:
            raise FarspanError(
                "tuning.length is 1, and one token predicts nothing; choose 2 or more, or 0 for "
                "the target"
            )


class LossModule(nn.Module):
    """The mean loss of a batch of windows under any causal model; on a GPU in bf16 autocast."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        budget = GPU_BUDGET if ids.is_cuda else BUDGET
        autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda)
        with prefer_cudnn(), autocast:
            return training_loss(self.model, ids, budget=budget)


def tune_weights(
    model: PreTrainedModel, job: FitJob, name: str, tuning: TuningConfig
) -> dict[str, Tensor]:
    """The model's weights after training on the next token of the search windows."""
    steps, batch = tuning.steps or FAIR_STEPS, tuning.batch or shared_batch(BATCH)
    micro_batch = tuning.micro_batch or default_micro_batch(batch, job.search.shape[1])
    plan = WeightTraining(
        LossModule(model),
        job.batches(batch, micro_batch, model.device),
        tokens=batch * (job.search.shape[1] - 1),
        steps=steps,
        optimization=OptimizerConfig(
            "adamw",
            lr=tuning.lr or LEARNING_RATE,
            weight_decay=0.0,
            warmup=min(tuning.warmup, steps),
            schedule="cosine",
            floor=0.1,
        ),
    )
    with compiled_layers(model):
        return train_weights(model, job, name, tuning, plan)


@dataclass(frozen=True, eq=False)
class WeightTraining:
    """What weights are trained on: a module with the model inside, and its batches by step."""

    loss: nn.Module  # micro batch -> mean loss
    batches: Callable[[int], Sequence[Tensor]]
    tokens: int  # of a step
    steps: int
    optimization: OptimizerConfig
    flops: float = 0.0  # of a token
    margin: float = TrainPlan.margin


def train_weights(
    model: PreTrainedModel, job: FitJob, name: str, tuning: TuningConfig, training: WeightTraining
) -> dict[str, Tensor]:
    """The model's weights after training; the model itself is restored.

    Training runs in float32 whatever the model's dtype: most updates are too small for bf16. Of a
    low-rank change only the factors are float32.
    """
    # Training works on copies, so these stay the weights before it.
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with _trainable(model, tuning.rank, job.seed) as trained:
        task = TrainingTask(
            data_parallel(training.loss, model),
            trained,
            make_optimizers(model, training.optimization),
            training.batches,
            tokens=training.tokens,
            flops=training.flops,
            can_retry=True,
        )
        plan = TrainPlan(
            training.steps,
            job.seed,
            training.optimization,
            tuning.save_every,
            log_every=1,
            margin=training.margin,
        )
        advance_to = by_step(job.progress(name, training.steps))

        def on_step(metrics: StepMetrics) -> None:
            advance_to(metrics.step, _step_note(metrics))

        try:
            with job.checkpoint_dir(name) as folder:
                train(task, plan, folder, on_step)
            return _changed_weights(model, before)
        finally:
            for parameter in trained.values():
                parameter.grad = None


def _step_note(metrics: StepMetrics) -> str:
    rate = metrics.tokens_per_second
    speed = f"{rate / 1e3:.0f}K" if rate >= 10_000 else f"{rate:,.0f}"
    return f"loss {metrics.loss:.4f}" + f", {speed} tokens/s" * (rate > 0)


@contextmanager
def _trainable(model: PreTrainedModel, rank: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """The parameters to train, by name; at the end of the block the model is as it was."""
    if rank:
        with low_rank_changes(model, rank, seed) as factors:
            yield factors
        return
    before = {parameter: parameter.data for parameter in model.parameters()}
    for parameter, data in before.items():
        # The optimizer works in place: float32 weights need a copy too.
        parameter.data = data.to(torch.float32, copy=True)
    try:
        yield dict(model.named_parameters())
    finally:
        for parameter, data in before.items():
            parameter.data = data


class LowRankChange(nn.Module):
    """W + B·A, as LoRA has it: A is random, B starts at zero, and the factor is 1 (alpha = r)."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        rows, columns = weight.shape
        a = nn.init.kaiming_uniform_(torch.empty(rank, columns), a=5**0.5, generator=generator)
        self.a = nn.Parameter(a.to(weight.device))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.b @ self.a).to(weight.dtype)


@contextmanager
def low_rank_changes(model: PreTrainedModel, rank: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Freeze the model and give every matrix of its layers a trainable change of a rank."""
    generator = torch.Generator().manual_seed(seed)  # a run that starts again starts the same
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    linears = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module not in tables
    ]
    if not linears:
        raise FarspanError(
            f"{type(model).__name__} has no linear layers that a low-rank change fits; "
            "remove tuning.rank"
        )
    with seam.frozen(model):
        kinds: list[Any] = [type(linear) for linear in linears]
        for linear, kind in zip(linears, kinds, strict=True):
            change = LowRankChange(linear.weight, rank, generator)
            linear.register_parameter("base_weight", linear._parameters.pop("weight"))
            linear.weight_change = change
            linear.__class__ = _changed_class(kind)
        factors = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name.endswith((".weight_change.a", ".weight_change.b"))
        }
        try:
            yield factors
        finally:
            for linear, kind in zip(linears, kinds, strict=True):
                linear.__class__ = kind
                linear.register_parameter("weight", linear._parameters.pop("base_weight"))
                del linear.weight_change


@cache
def _changed_class(kind: Any) -> Any:
    """A class of linear layers whose weight is its base and a change of it.

    torch's parametrization makes one class for each module. torch.compile then compiles every
    layer of a model by itself, where layers of one class share a graph.
    """

    def weight(linear: Any) -> Tensor:
        return linear.weight_change(linear.base_weight)

    return type(f"Changed{kind.__name__}", (kind,), {"weight": property(weight)})


def _changed_weights(model: PreTrainedModel, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that training changed, by their names in the model, on the CPU."""
    weights = {}
    for name, original in before.items():
        module, _, attribute = name.rpartition(".")
        value = getattr(model.get_submodule(module), attribute).detach().to(original.dtype)
        if not torch.equal(value, original):
            weights[name] = value.cpu()
    return weights


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
