"""The loop: the same for pretraining, for tuning, and for the search for scales.

Everything that happens at a step is a pure function of the step's number: its batches, its learning rate, and its
random numbers, for the generator is seeded anew at each. A run is therefore its weights, its optimizer's state and one
number, and goes on bit for bit wherever it was killed.
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
from farspan.files import write_text
from farspan.signals import held
from farspan.train import checkpoint
from farspan.train.optim import Optimization, rate, set_rate
from farspan.train.sharding import processes, whole
from farspan.train.steps import RecordedSteps, Steps, Work

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
LOCK = "lock"  # while a command trains there
DIVERGED = 2.0  # times the running mean of the loss, and a nat


@dataclass(frozen=True)
class Plan:
    steps: int
    seed: int = 0
    optimization: Optimization = field(default_factory=Optimization)
    save_every: int = 500
    keep: tuple[int, ...] = ()  # steps whose checkpoint stays
    log_every: int = 10


@dataclass(frozen=True)
class Moment:
    """What is known of a step when it is done."""

    step: int  # steps done
    loss: float  # nats a token
    lr: float  # AdamW's; Muon's goes up and down with it
    grad_norm: float
    tokens: int  # seen so far
    tokens_per_second: float
    mfu: float | None  # share of the device's peak, where that is known


Listener = Callable[[Moment], None]


def train(work: Work, plan: Plan, run: Path, listen: Listener = lambda moment: None) -> list[dict[str, Any]]:
    """Take the run from where it stands to its last step; returns the metrics of the whole run.

    SIGTERM or Ctrl-C saves and raises PreemptedError. A loss that is no number, or runs away, raises with the layer's
    name, and the run's folder holds the last checkpoint, if there was one.
    """
    with alone(run):
        return _train(work, plan, run, listen)


@contextlib.contextmanager
def alone(run: Path) -> Iterator[None]:
    """One command at a time trains in a folder: another would sweep away what this one is writing."""
    if not processes().is_main_process:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FarspanError(f"another process trains in {run}; wait for it, or choose another folder") from None
    try:
        yield
    finally:
        (run / LOCK).unlink(missing_ok=True)  # while it is held: nobody else can have opened it and be waiting
        lock.release()


def _train(work: Work, plan: Plan, run: Path, listen: Listener) -> list[dict[str, Any]]:
    state = processes()
    with state.main_process_first():  # which sets broken ones aside
        found = checkpoint.newest(run)
    step, calm = 0, math.nan
    if found is not None:
        checkpoint.restore(found, work.trained, work.optimizers)
        step, calm = found.step, found.facts["calm"] if found.facts["calm"] is not None else math.nan
    metrics = _metrics_until(run, step)
    if state.is_main_process:
        write_text(run / METRICS, "".join(json.dumps(entry) + "\n" for entry in metrics))
    clock = _Clock(work)
    steps = (RecordedSteps if work.recorded else Steps)(work, plan.optimization.clip)

    def save() -> None:
        begun = time.perf_counter()
        tensors = checkpoint.collect(work.trained, work.optimizers)
        for name, tensor in tensors["model"].items():
            if not bool(torch.isfinite(tensor).all()):
                raise _diverged(run, step, f"{name} is not finite")
        if state.is_main_process:
            facts = {"step": step, "calm": None if math.isnan(calm) else calm}
            checkpoint.save(run, tensors, facts, keep=plan.keep, beside=work.beside)
        state.wait_for_everyone()
        clock.leave_out(time.perf_counter() - begun)

    with held() as asked:
        batches = work.batches(step) if step < plan.steps else []
        while step < plan.steps:
            multiplier = rate(step, plan.steps, plan.optimization)
            set_rate(work.optimizers, multiplier)
            torch.manual_seed(_seed_of(plan.seed, step, state.process_index))
            loss, norm = steps.gradients(batches)
            done, batches = batches, work.batches(step + 1) if step + 1 < plan.steps else []  # while the device works
            loss_value, norm_value, stop = _read(loss, norm, asked(), state)
            if (what := _trouble(loss_value, norm_value, calm)) is not None:
                raise _diverged(run, step + 1, f"{what}, first seen in {_culprit(work, done)}")
            steps.update()
            step += 1
            calm = loss_value if math.isnan(calm) else 0.98 * calm + 0.02 * loss_value
            if step % plan.log_every == 0 or step == plan.steps:
                moment = clock.moment(step, loss_value, multiplier * plan.optimization.lr, norm_value)
                metrics.append(_entry(moment))
                if state.is_main_process:
                    with (run / METRICS).open("a") as file:
                        file.write(json.dumps(metrics[-1]) + "\n")
                    listen(moment)
            if step % plan.save_every == 0 or step in plan.keep or step == plan.steps or stop:
                save()
            if stop and step < plan.steps:
                raise PreemptedError(
                    f"stopped after step {step} of {plan.steps}, whose state is in {checkpoint.home(run)}; "
                    "give the same command again to go on"
                )
    return metrics


def _read(loss: Tensor, norm: Tensor, asked: bool, state: PartialState) -> tuple[float, float, bool]:
    """The one moment of a step at which the host waits for the device; processes agree on loss and stopping."""
    values = torch.stack((loss.float(), norm.float(), loss.new_tensor(float(asked)).float()))
    if state.num_processes > 1:
        torch.distributed.all_reduce(values)
        values /= state.num_processes
    loss_value, norm_value, stop = values.tolist()
    return loss_value, norm_value, stop > 0


def _trouble(loss: float, norm: float, calm: float) -> str | None:
    """What must not touch the weights: a gradient that is no number, or a loss that ran away."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient's norm is {norm}"
    return f"the loss is {loss:g} and was {calm:.3g} on average" if loss > DIVERGED * calm + 1 else None


def _diverged(run: Path, step: int, what: str) -> FarspanError:
    """The same folder would refuse another learning rate, for it holds another run then."""
    kept = max(checkpoint.home(run).glob("step-*"), default=None)
    state = f"the last good state is in {kept}" if kept else "no state of it is kept, for there was no checkpoint yet"
    return FarspanError(
        f"training diverged at step {step}: {what}; {state}; train again with a lower learning rate and another -o"
    )


def _culprit(work: Work, batches: Sequence[Tensor]) -> str:
    """The first module whose output is no number; else the parameter whose gradient is not, or is largest."""
    bad: list[str] = []

    def looking_at(name: str) -> Callable[..., None]:
        def look(module, inputs, output) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not bad and isinstance(first, Tensor) and not bool(torch.isfinite(whole(first)).all()):
                bad.append(name)

        return look

    hooks = [module.register_forward_hook(looking_at(name)) for name, module in work.module.named_modules() if name]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in batches:
                work.module(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if bad:
        return bad[0].removeprefix("module.")
    sizes = {name: float(whole(p.grad).norm()) for name, p in work.trained.items() if p.grad is not None}
    unreal = [name for name, size in sizes.items() if not math.isfinite(size)]
    return unreal[-1] if unreal else max(sizes, key=sizes.__getitem__)  # backwards, the last layer is the first


def _seed_of(seed: int, step: int, process: int) -> int:
    return (seed << 40) + (process << 32) + step


def _entry(moment: Moment) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    rounded = {"tokens_per_second": round(moment.tokens_per_second), "mfu": moment.mfu and round(moment.mfu, 4)}
    return {**vars(moment), **rounded}


def _metrics_until(run: Path, step: int) -> list[dict[str, Any]]:
    """What was noted up to a step. Later lines are of steps that will be taken again; the last may be cut short."""
    if not (run / METRICS).exists():
        return []
    kept = []
    for line in (run / METRICS).read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if entry["step"] <= step:
            kept.append(entry)
    return kept


class _Clock:
    """Tokens a second between two looks, saves left out."""

    def __init__(self, work: Work):
        self.work, self.peak = work, peak_flops()
        self.step: int | None = None  # nothing before the first look counts: kernels are compiled there
        self.since = 0.0
        self.last = 0.0

    def leave_out(self, seconds: float) -> None:
        self.since += seconds

    def moment(self, step: int, loss: float, lr: float, norm: float) -> Moment:
        now = time.perf_counter()
        if self.step is not None:
            self.last = (step - self.step) * self.work.tokens / (now - self.since)
        self.step, self.since = step, now
        devices = processes().num_processes
        mfu = self.last * self.work.flops / (self.peak * devices) if self.peak and self.last else None
        return Moment(step, loss, lr, norm, step * self.work.tokens, self.last, mfu)


# Dense bf16 matrix products, from the data sheets: FLOP/s
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops() -> float | None:
    """The peak of this device, where its data sheet is known: MFU is a share of it."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), None)
