"""What an extension costs: the time of one window is measured, and multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.probe import Layer
from farspan.lengths import doublings
from farspan.methods.extend_config import TUNING_STEPS, ExtendConfig
from farspan.methods.fit import joint_settings
from farspan.methods.headscale import VALIDATED, ScaledModel
from farspan.methods.job import FitJob, grid_size
from farspan.methods.registry import SCALE_METHODS
from farspan.methods.rope import FACTORS, ROPE_SCALINGS
from farspan.methods.schedules import SCHEDULES
from farspan.methods.swan import SLOPES, distillation_flops, long_flops
from farspan.methods.swan_config import DistillPlan
from farspan.methods.swan_layout import measures_layers, planned_layers
from farspan.methods.tuning import BATCH, FAIR_STEPS
from farspan.methods.uniform import COARSE, STEP
from farspan.progress import Stage, format_duration
from farspan.summaries import Summarized
from farspan.workflows.timing import ForwardSpeed, fastest_run, measured_part

PASSKEY_DEPTHS = 10


@dataclass(frozen=True)
class Speed:
    """The time of passes over one window."""

    forward: ForwardSpeed
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
        forward = ForwardSpeed.measure(model, layers, job.search[:1])
        searches = any("headscale" in name or "headlog" in name for name in candidates)
        backward = _seconds_of_gradient(model, job) if searches else 0.0
        return cls(forward, backward / forward.seconds)

    def of_passkeys(self, keys: int, lengths: Sequence[int]) -> float:
        """The seconds of measuring passkeys, whose prompts share their beginning."""
        return sum(keys * PASSKEY_DEPTHS * self.forward.of(length) / 2 for length in lengths)


def _seconds_of_gradient(model: PreTrainedModel, job: FitJob) -> float:
    """Of a pass with the gradient of scales, as a search takes it."""
    scaled, ids = ScaledModel(model, job.uniform(1.0)), measured_part(model, job.search[:1])
    with seam.scaled(model, scaled.scales), seam.frozen(model):
        return fastest_run(
            model.device, lambda: torch.autograd.grad(scaled(ids), [*scaled.parameters()])
        )


def extension_stages(
    speed: Speed, job: FitJob, config: ExtendConfig, candidates: Sequence[str], is_auto: bool
) -> list[Stage]:
    """The stages of an extension with their time, in order. A search may end earlier."""
    choose = config.choose_windows * speed.forward.of(job.target)
    measure = config.report_windows * speed.forward.of(job.target)
    measure += speed.of_passkeys(config.passkeys, doublings(job.train_length, job.target))
    stages = [Stage("measure before", measure)]
    for candidate in candidates:
        stages += candidate_stages(candidate, speed, job, config, choose)
    if is_auto:
        stages.append(Stage("compare", len(candidates) * choose))
    return [
        *stages,
        Stage("measure after", measure),
        Stage("verify", 3 * speed.forward.of(job.target)),
    ]


@dataclass(frozen=True)
class DistillCost:
    """The size of a conversion's training and its matrix products."""

    tokens: int
    steps: int
    flops: float
    long_steps: int = 0
    long_flops: float = 0.0


def distillation_cost(
    model: PreTrainedModel, layers: Sequence[Layer], job: FitJob, config: ExtendConfig
) -> DistillCost:
    plan = DistillPlan.make(config.swan, config.tuning, job.train_length)
    converted = planned_layers(layers, config.swan, job.train_length)
    flops = plan.tokens * distillation_flops(model, converted, layers, plan.length)
    long = config.swan.long_plan(job.train_length, job.target)
    if long is None:
        return DistillCost(plan.tokens, plan.steps, flops)
    more = long_flops(model, converted, layers, long)
    return DistillCost(plan.tokens + long.tokens, plan.steps, flops, long.steps, more)


def candidate_stages(
    candidate: str, speed: Speed, job: FitJob, config: ExtendConfig, choose: float
) -> Iterator[Stage]:
    """The stages of fitting a method, or several joined with +."""
    names = candidate.split("+")
    for name in names:
        yield from method_stages(name, speed, job, joint_settings(names, config), choose)


def method_stages(
    name: str, speed: Speed, job: FitJob, config: ExtendConfig, choose: float
) -> Iterator[Stage]:
    """The stages of fitting a method; choose: seconds of reading the choose split once."""
    search_window = speed.forward.of(job.search.shape[1])
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
            step += rows * speed.forward.of(job.target) / plan.plateau.every
        for _ in plan.lr:
            yield Stage(f"{name} lr", plan.steps * step, plan.steps)
    elif name == "swan":
        model, layers = speed.forward.model, speed.forward.layers
        distilling = distillation_cost(model, layers, job, config)
        length = config.swan.length_for(job.train_length)
        passes = config.swan.measured_rows * speed.forward.of(length)
        if measures_layers(layers, config.swan):
            yield Stage("measure layers", 2 * len(layers) * passes)
        yield Stage("distill", distilling.flops / speed.forward.rate, distilling.steps)
        if distilling.long_steps:
            seconds = distilling.long_flops / speed.forward.rate
            yield Stage("lengthen", seconds, distilling.long_steps)
        if config.swan.sharpen:
            yield Stage("sharpen", len(SLOPES) * choose)
    elif name in ROPE_SCALINGS and not config.tune:
        yield Stage(name, len(FACTORS) * choose, len(FACTORS))
    else:  # all weights are trained
        of_tune = TUNING_STEPS[config.tune] if name in ROPE_SCALINGS else None
        steps = config.tuning.steps or of_tune or FAIR_STEPS
        batch = config.tuning.batch or BATCH
        windows = {"drope": job.train_length, "continue": config.tuning.length or job.target}
        window = speed.forward.of(windows.get(name, job.search.shape[1]))
        yield Stage(name, steps * batch * 3 * window, steps)


def training_changes(candidates: Sequence[str], config: ExtendConfig, on_gpu: bool) -> list[str]:
    """What shortens the training of weights of these methods; empty if they train none."""
    names = {name for candidate in candidates for name in candidate.split("+")}
    changes = ["fewer swan.tokens"] if "swan" in names else []
    if {"drope", "continue"} & names or (config.tune and ROPE_SCALINGS.keys() & names):
        changes.append("fewer tuning.steps")
    return [*changes, "a GPU"] if changes and not on_gpu else changes


@dataclass(frozen=True, repr=False)
class ExtendEstimate(Summarized):
    """The cost of an extension; keys of --json. Without distillation, tokens is 0."""

    methods: tuple[str, ...]  # in order, or those among which auto chooses
    text: dict[str, int]  # tokens of each split
    notes: tuple[str, ...]
    preset: str | None  # None: a recipe
    stages: dict[str, float]  # seconds, at most: a search may end earlier
    full_seconds: float  # of the preset full
    tokens: int = 0  # of distillation
    steps: int = 0
    flops: float = 0.0
    is_auto: bool = False
    shortened_by: tuple[str, ...] = ()  # what shortens a training of weights, as no preset does

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def sentence(self) -> str:
        """`at most about 2.5 minutes (preset quick; full: about 14 minutes)`."""
        parts = [f"preset {self.preset}" if self.preset else ""]
        if self.preset == "quick" and self.full_seconds > 1.2 * self.seconds:
            parts.append(f"full: at most about {format_duration(self.full_seconds)}")
        if self.preset == "quick" and self.shortened_by:
            changes = " or ".join(self.shortened_by)
            parts.append(f"a preset does not shorten the training of weights, {changes} does")
        shown = "; ".join(filter(None, parts))
        seconds = f"at most about {format_duration(self.seconds)}"
        return f"{seconds} ({shown})" if shown else seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}
