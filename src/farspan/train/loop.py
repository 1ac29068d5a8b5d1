"""The training loop of pretraining, tuning and the search for scales.

Everything that happens at a step is a function of the step's number: its batches, its learning
rate, and its random numbers, since the generator is seeded again at every step. The state of a run
is therefore its weights, its optimizer state and one number, and a killed run resumes bit for bit.
A run that stops at a plateau also keeps its validation losses, which decide its last step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from torch import Tensor

from farspan.errors import FarspanError, PreemptedError
from farspan.files import naming, read_text, write_text
from farspan.progress import ignore
from farspan.signals import delay_signals
from farspan.train import checkpoint
from farspan.train.optim import OptimizerConfig, learning_rate, set_learning_rate
from farspan.train.sharding import full_tensor, processes
from farspan.train.steps import EagerSteps, GraphedSteps, TrainingTask

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
LOCK = "lock"  # exists while a command trains in the folder
DIVERGED = 2.0  # a loss above this many times its running mean, plus a margin, has diverged


@dataclass(frozen=True)
class PlateauRule:
    """When a run is done: its validation loss no longer falls. Then its learning rate falls to the
    floor of the schedule, and it ends.

    >>> PlateauRule(min_gain=0.01, patience=2).plateau([3.0, 2.5, 2.495, 2.494])
    4
    """

    every: int = 5  # steps between two validations
    min_gain: float = 0.02  # nats; a smaller improvement is none: a full learning rate is noisy
    patience: int = 2  # validations in a row without an improvement
    cooldown: int = 10  # steps after the plateau

    def plateau(self, losses: Sequence[float]) -> int | None:
        """The number of validations after which the plateau is seen; None if it is not."""
        best, since = math.inf, 0
        for number, loss in enumerate(losses, 1):
            best, since = (loss, 0) if loss < best - self.min_gain else (best, since + 1)
            if since == self.patience:
                return number
        return None

    def last_step(self, losses: Sequence[float], limit: int) -> int:
        """The step after which a run with these validation losses ends."""
        seen = self.plateau(losses)
        return limit if seen is None else min(limit, seen * self.every + self.cooldown)

    def cooling(self, step: int, last: int, floor: float) -> float:
        """The multiplier of the learning rate at a step, counted from 0."""
        return floor + (1 - floor) * min(1.0, (last - step) / (self.cooldown + 1))


@dataclass(frozen=True)
class TrainPlan:
    steps: int  # at most, with a plateau rule
    seed: int = 0
    optimization: OptimizerConfig = field(default_factory=OptimizerConfig)
    save_every: int = 500
    keep: tuple[int, ...] = ()  # steps whose checkpoints are never removed
    log_every: int = 10
    plateau: PlateauRule | None = None
    margin: float = 1.0  # nats by which the loss of a step may exceed the mean of others


@dataclass(frozen=True)
class StepMetrics:
    """The metrics after a step; the fields are the keys of a line of metrics.jsonl."""

    step: int  # steps done
    loss: float  # nats per token
    lr: float  # of AdamW; Muon's follows the same schedule
    grad_norm: float
    tokens: int  # seen since the start of the run
    tokens_per_second: float
    mfu: float | None  # share of the device's peak FLOP/s; None if the peak is unknown


StepCallback = Callable[[StepMetrics], None]


@dataclass(frozen=True, eq=False)
class TrainResult:
    metrics: list[dict[str, Any]]  # lines of metrics.jsonl
    steps: int  # done
    validations: list[float]  # the losses that a plateau rule saw


def train(
    task: TrainingTask, plan: TrainPlan, run: Path, on_step: StepCallback = ignore
) -> TrainResult:
    """Start or resume the run in the folder `run`, and train to the last step.

    SIGTERM or Ctrl-C saves a checkpoint and raises PreemptedError. A loss that is not finite or
    diverges raises an error that names the layer; the last checkpoint stays in the folder.
    """
    with lock_run(run):
        return _Loop(task, plan, run, on_step).train()


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Let only one command train in a folder: another would remove what this one is writing."""
    if not processes().is_main_process:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FarspanError(
            f"another process is training in {run}; wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        # Remove it while it is held: no other process can have opened it and be waiting.
        (run / LOCK).unlink(missing_ok=True)
        lock.release()


class _Loop:
    """A run at some step, from its latest checkpoint on."""

    def __init__(self, task: TrainingTask, plan: TrainPlan, run: Path, on_step: StepCallback):
        self.task, self.plan, self.run, self.on_step = task, plan, run, on_step
        self.state = processes()
        self.step, self.mean_loss = 0, math.nan
        self.validations: list[float] = []
        self._resume()
        self.metrics = _metrics_until(run, self.step)
        if self.state.is_main_process:
            write_text(run / METRICS, "".join(json.dumps(entry) + "\n" for entry in self.metrics))
        self.throughput = _Throughput(task)
        self.steps = (GraphedSteps if task.graphed else EagerSteps)(task, plan.optimization.clip)

    @property
    def last_step(self) -> int:
        rule, limit = self.plan.plateau, self.plan.steps
        return limit if rule is None else rule.last_step(self.validations, limit)

    def train(self) -> TrainResult:
        task, plan = self.task, self.plan
        with delay_signals() as stop_requested:
            batches = task.batches(self.step) if self.step < self.last_step else []
            while self.step < self.last_step:
                batches, stop = self._take_step(batches, stop_requested)
                self._validate()
                if (
                    self.step % plan.save_every == 0
                    or self.step in plan.keep
                    or self.step == self.last_step
                    or stop
                ):
                    self._save()
                if stop and self.step < self.last_step:
                    raise PreemptedError(
                        f"stopped after step {self.step} of {plan.steps}, which is saved in "
                        f"{checkpoint.checkpoint_root(self.run)}; rerun the same command to resume"
                    )
        return TrainResult(self.metrics, self.step, self.validations)

    def _validate(self) -> None:
        """Let the plateau rule see the validation loss, until it has seen the plateau."""
        rule = self.plan.plateau
        if rule and self.step % rule.every == 0 and rule.plateau(self.validations) is None:
            self.validations.append(self.task.validate())

    def _resume(self) -> None:
        with self.state.main_process_first():  # the main process sets damaged checkpoints aside
            latest = checkpoint.latest(self.run)
        if latest is not None:
            checkpoint.restore(latest, self.task.parameters, self.task.optimizers)
            self.step = latest.step
            self.validations = latest.state.get("validations", [])
            if latest.state["calm"] is not None:  # the key of mean_loss in state.json
                self.mean_loss = latest.state["calm"]

    def _take_step(
        self, batches: Sequence[Tensor], stop_requested: Callable[[], bool]
    ) -> tuple[Sequence[Tensor], bool]:
        """Train on the batches; returns those of the next step, and whether to stop."""
        task, plan = self.task, self.plan
        multiplier = learning_rate(self.step, plan.steps, plan.optimization)
        if plan.plateau is not None:
            multiplier *= plan.plateau.cooling(self.step, self.last_step, plan.optimization.floor)
        set_learning_rate(task.optimizers, multiplier)
        torch.manual_seed(_step_seed(plan.seed, self.step, self.state.process_index))
        loss, norm = self.steps.gradients(batches)
        # Prepare the next batches while the device computes.
        next_batches = task.batches(self.step + 1) if self.step + 1 < self.last_step else []
        loss_value, norm_value, stop = _read(loss, norm, stop_requested(), self.state)
        problem = _divergence(loss_value, norm_value, self.mean_loss, plan.margin)
        if problem is not None:
            where = _first_bad_module(task, batches)
            raise _diverged(self.run, self.step + 1, f"{problem}, first seen in {where}")
        self.steps.update()
        self.step += 1
        self.mean_loss = (
            loss_value if math.isnan(self.mean_loss) else 0.98 * self.mean_loss + 0.02 * loss_value
        )
        if self.step % plan.log_every == 0 or self.step == plan.steps:
            self._log(loss_value, multiplier * plan.optimization.lr, norm_value)
        return next_batches, stop

    def _log(self, loss: float, lr: float, norm: float) -> None:
        metrics = self.throughput.metrics(self.step, loss, lr, norm)
        self.metrics.append(_entry(metrics))
        if self.state.is_main_process:
            with naming(self.run / METRICS), (self.run / METRICS).open("a") as file:
                file.write(json.dumps(self.metrics[-1]) + "\n")
            self.on_step(metrics)

    def _save(self) -> None:
        start = time.perf_counter()
        tensors = checkpoint.collect(self.task.parameters, self.task.optimizers)
        for name, tensor in tensors["model"].items():
            if not bool(torch.isfinite(tensor).all()):
                raise _diverged(self.run, self.step, f"{name} is not finite")
        if self.state.is_main_process:
            mean_loss = None if math.isnan(self.mean_loss) else self.mean_loss
            state: dict[str, Any] = {"step": self.step, "calm": mean_loss}
            if self.plan.plateau is not None:
                state["validations"] = self.validations
            checkpoint.save(
                self.run,
                tensors,
                state,
                keep=self.plan.keep,
                write_extras=self.task.write_extras,
            )
        self.state.wait_for_everyone()
        self.throughput.exclude(time.perf_counter() - start)


def _read(
    loss: Tensor, norm: Tensor, stop_requested: bool, state: PartialState
) -> tuple[float, float, bool]:
    """The values of loss and norm, and whether to stop; all processes get the same.

    This is the only point of a step where the host waits for the device.
    """
    values = torch.stack(
        (loss.float(), norm.float(), loss.new_tensor(float(stop_requested)).float())
    )
    if state.num_processes > 1:
        torch.distributed.all_reduce(values)
        values /= state.num_processes
    loss_value, norm_value, stop = values.tolist()
    return loss_value, norm_value, stop > 0


def _divergence(loss: float, norm: float, mean_loss: float, margin: float) -> str | None:
    """Why this gradient must not update the weights; None if it may."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    if loss > DIVERGED * mean_loss + margin:
        return f"the loss is {loss:g} and was {mean_loss:.3g} on average"
    return None


def _diverged(run: Path, step: int, reason: str) -> FarspanError:
    """The error of a diverged run; a lower learning rate is another run and needs a new folder."""
    last = max(checkpoint.checkpoint_root(run).glob("step-*"), default=None)
    state = f"the last good state is in {last}" if last else "there was no checkpoint yet"
    return FarspanError(
        f"training diverged at step {step}: {reason}; {state}; train again with a lower learning "
        "rate and another -o"
    )


def _first_bad_module(task: TrainingTask, batches: Sequence[Tensor]) -> str:
    """The first module whose output is not finite; else the parameter whose gradient is not finite,
    or is the largest."""
    bad: list[str] = []

    def check_output_of(name: str) -> Callable[..., None]:
        def check(module, inputs, output) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if (
                not bad
                and isinstance(first, Tensor)
                and not bool(torch.isfinite(full_tensor(first)).all())
            ):
                bad.append(name)

        return check

    hooks = [
        module.register_forward_hook(check_output_of(name))
        for name, module in task.module.named_modules()
        if name
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in batches:
                task.module(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if bad:
        return bad[0].removeprefix("module.")
    norms = {
        name: float(full_tensor(parameter.grad).norm())
        for name, parameter in task.parameters.items()
        if parameter.grad is not None
    }
    not_finite = [name for name, norm in norms.items() if not math.isfinite(norm)]
    # The backward pass goes from the last layer to the first.
    return not_finite[-1] if not_finite else max(norms, key=norms.__getitem__)


def _step_seed(seed: int, step: int, process: int) -> int:
    return (seed << 40) + (process << 32) + step


def _entry(metrics: StepMetrics) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    rounded = {
        "tokens_per_second": round(metrics.tokens_per_second),
        "mfu": metrics.mfu and round(metrics.mfu, 4),
    }
    return {**vars(metrics), **rounded}


def _metrics_until(run: Path, step: int) -> list[dict[str, Any]]:
    """The logged metrics up to a step. Later steps will be repeated; the last line may be cut."""
    if not (run / METRICS).exists():
        return []
    entries = []
    for line in read_text(run / METRICS).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if entry["step"] <= step:
            entries.append(entry)
    return entries


class _Throughput:
    """Tokens per second between two logged steps, without the time of saving."""

    def __init__(self, task: TrainingTask):
        self.task, self.peak = task, peak_flops()
        self.step: int | None = None  # the first interval does not count: it compiles kernels
        self.since = 0.0
        self.tokens_per_second = 0.0

    def exclude(self, seconds: float) -> None:
        self.since += seconds

    def metrics(self, step: int, loss: float, lr: float, norm: float) -> StepMetrics:
        now = time.perf_counter()
        if self.step is not None:
            self.tokens_per_second = (step - self.step) * self.task.tokens / (now - self.since)
        self.step, self.since = step, now
        devices = processes().num_processes
        mfu = (
            self.tokens_per_second * self.task.flops / (self.peak * devices)
            if self.peak and self.tokens_per_second
            else None
        )
        tokens = step * self.task.tokens
        return StepMetrics(step, loss, lr, norm, tokens, self.tokens_per_second, mfu)


# FLOP/s of dense bf16 matrix products, from the data sheets.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops() -> float | None:
    """The peak FLOP/s of this device for the MFU; None if its data sheet is not listed."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), None)
