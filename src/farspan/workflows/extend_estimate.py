"""What an extension costs: the time of one window is measured, and multiplied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.model_facts import forward_flops
from farspan.attention.probe import Layer
from farspan.lengths import doublings
from farspan.methods.headscale import VALIDATED, ScaledModel
from farspan.methods.job import FitJob, grid_size, loss_by_position
from farspan.methods.registry import SCALE_METHODS, TUNING_STEPS, ExtendConfig
from farspan.methods.rope import FACTORS, ROPE_SCALINGS
from farspan.methods.schedules import SCHEDULES
from farspan.methods.swan import SLOPES, DistillPlan, distillation_flops, planned_layers
from farspan.methods.tuning import BATCH, FAIR_STEPS
from farspan.methods.uniform import COARSE, STEP
from farspan.progress import Stage, format_duration

MEASURED = 5e9  # parameters × tokens of the measured window, at most: seconds on a CPU
MEASURING = 0.5  # seconds
LENGTHS = (64, 256)  # of the measured window, at least and at most
PASSKEY_DEPTHS = 10


@dataclass(frozen=True)
class Speed:
    """Seconds of a pass over one window, from a pass that was measured."""

    model: PreTrainedModel
    layers: Sequence[Layer]
    seconds: float  # of a forward pass
    length: int  # of the measured window
    backward: float  # a pass with the gradient of scales, in forward passes; 0: not needed

    @classmethod
    def measure(
        cls,
        model: PreTrainedModel,
        layers: Sequence[Layer],
        job: FitJob,
        candidates: Sequence[str],
    ) -> Speed:
        """Run a window that is short enough to take a second or two."""
        low, high = LENGTHS
        wanted = min(high, max(low, int(MEASURED / model.num_parameters())))
        ids = job.search[:1, :wanted].to(model.device)
        forward = _seconds(model.device, lambda: loss_by_position(model, ids))
        searches = any("headscale" in name or "headlog" in name for name in candidates)
        backward = _seconds_of_gradient(model, job, ids) if searches else 0.0
        return cls(model, layers, forward, ids.shape[1], backward / forward)

    def forward(self, length: int) -> float:
        """By FLOPs, where the measured window is shorter."""
        flops = [n * forward_flops(self.model, self.layers, n) for n in (length, self.length)]
        return self.seconds * flops[0] / flops[1]


def _seconds_of_gradient(model: PreTrainedModel, job: FitJob, ids: Tensor) -> float:
    """Of a pass with the gradient of scales, as a search takes it."""
    scaled = ScaledModel(model, job.uniform(1.0))
    seam.install(model, scaled.scales)
    try:
        with seam.frozen(model):
            return _seconds(
                model.device, lambda: torch.autograd.grad(scaled(ids), [*scaled.parameters()])
            )
    finally:
        seam.remove_scales(model)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of the fastest of several runs: the first one also prepares kernels, and others may have to
    share their cores."""
    durations: list[float] = []
    while len(durations) < 2 or (sum(durations) < MEASURING and len(durations) < 10):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return min(durations)


def extension_stages(
    speed: Speed, job: FitJob, config: ExtendConfig, candidates: Sequence[str], is_auto: bool
) -> list[Stage]:
    """The stages of an extension with their time, in order. A search may end earlier."""
    choose = config.choose_windows * speed.forward(job.target)
    measure = config.report_windows * speed.forward(job.target)
    lengths = doublings(job.train_length, job.target) if config.passkeys else []
    for length in lengths:  # prompts share their beginning
        measure += config.passkeys * PASSKEY_DEPTHS * speed.forward(length) / 2
    stages = [Stage("measure before", measure)]
    for name in (part for candidate in candidates for part in candidate.split("+")):
        stages += _method_stages(name, speed, job, config, choose)
    if is_auto:
        stages.append(Stage("compare", len(candidates) * choose))
    return [
        *stages,
        Stage("measure after", measure),
        Stage("verify", 3 * speed.forward(job.target)),
    ]


@dataclass(frozen=True)
class DistillCost:
    """The size of a distillation run and its matrix products."""

    tokens: int
    steps: int
    length: int
    flops: float


def distillation_cost(
    model: PreTrainedModel, layers: Sequence[Layer], job: FitJob, config: ExtendConfig
) -> DistillCost:
    plan = DistillPlan.make(config.swan, config.tuning, job.train_length)
    converted = planned_layers(layers, config.swan, job.train_length)
    flops = plan.tokens * distillation_flops(model, converted, layers, plan.length)
    return DistillCost(plan.tokens, plan.steps, plan.length, flops)


def _method_stages(
    name: str, speed: Speed, job: FitJob, config: ExtendConfig, choose: float
) -> Iterator[Stage]:
    search_window = speed.forward(job.search.shape[1])
    if name == "uniform":
        values = grid_size(COARSE, STEP)
        yield Stage(name, values * choose, values)
    elif name in SCHEDULES:
        values = grid_size(SCHEDULES[name].coarse, SCHEDULES[name].step) if config.fitted else 0
        yield Stage(name, values * choose, values)
    elif name in SCALE_METHODS:
        plan = config.search.resolve(job.has_nope)
        step = plan.batch * speed.backward * search_window
        if plan.plateau is not None:
            rows = min(VALIDATED, config.choose_windows)
            step += rows * speed.forward(job.target) / plan.plateau.every
        for _ in plan.lr:
            yield Stage(f"{name} lr", plan.steps * step, plan.steps)
    elif name == "swan":
        distilling = distillation_cost(speed.model, speed.layers, job, config)
        rate = forward_flops(speed.model, speed.layers, speed.length) * speed.length / speed.seconds
        passes = config.swan.measured_rows * speed.forward(distilling.length)
        yield Stage("measure layers", 2 * len(speed.layers) * passes)
        yield Stage("distill", distilling.flops / rate, distilling.steps)
        if config.swan.sharpen:
            yield Stage("sharpen", len(SLOPES) * choose)
    elif name in ROPE_SCALINGS and not config.tune:
        yield Stage(name, len(FACTORS) * choose, len(FACTORS))
    else:  # all weights are trained
        steps = config.tuning.steps or TUNING_STEPS[config.tune] or FAIR_STEPS
        batch = config.tuning.batch or BATCH
        yield Stage(name, steps * batch * 3 * search_window, steps)


@dataclass(frozen=True)
class ExtendEstimate:
    """The cost of an extension; keys of --json. Without distillation, tokens is 0."""

    methods: tuple[str, ...]  # more than one if auto chooses among them
    text: dict[str, int]  # tokens of each split
    notes: tuple[str, ...]
    preset: str | None  # None: a recipe
    stages: dict[str, float]  # seconds, at most: a search may end earlier
    full_seconds: float  # of the preset full
    tokens: int = 0  # of distillation
    steps: int = 0
    flops: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def sentence(self) -> str:
        """`at most about 2.5 minutes (preset quick; full: about 14 minutes)`."""
        parts = [f"preset {self.preset}" if self.preset else "", ""]
        if self.preset == "quick":
            parts[1] = f"full: at most about {format_duration(self.full_seconds)}"
        shown = "; ".join(filter(None, parts))
        time = f"at most about {format_duration(self.seconds)}"
        return f"{time} ({shown})" if shown else time
