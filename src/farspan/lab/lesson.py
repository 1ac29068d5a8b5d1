"""How a fleet learns: each model from its own rows, by its own learning rate, all of them in one step.

A step is the same work again and again, so it is compiled by layers and replayed from a CUDA graph; what changes from
step to step is written in place beforehand.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farspan.errors import FarspanError, first_line
from farspan.lab.fleet import Block, Fleet, Rows, joined, over_models, wide
from farspan.memory import out_of_memory
from farspan.model.fast import compile_often
from farspan.train.optim import OPTIMIZERS, Optimization, orthogonalise, rate
from farspan.train.steps import WARM, on_stream

log = logging.getLogger(__name__)

BLOCK = 256  # steps whose rows are drawn at once
COMPILING_PAYS = 500  # steps; it takes some ten seconds
PASS = 5e10  # parameters × tokens that a GPU works off in the time that one more pass takes, however small
GRAPHS = 256  # compiled for all fleets of a process, at most: rows of some lengths times numbers of models
EPSILON = 1e-8
MOMENTUM = 0.95  # of Muon
NEWTON_SCHULZ = {"ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5}  # as torch's Muon has them


@dataclass(frozen=True)
class Plan:
    """How the models of a fleet learn; their learning rates are their own."""

    steps: int
    batch: int = 64  # examples a step
    buckets: int = 4  # of equally many examples by length; every step takes as many from each
    optimizer: str = "muon"  # for the matrices of the layers, and AdamW for the rest; adamw: for all
    matrix_rate: float = 7.0  # Muon's learning rate, in those of the model
    weight_decay: float = 0.0  # of matrices, times their learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # of each model's gradient norm; 0: none
    warmup: float = 0.06  # share of the steps over which the rate rises from 0
    decay: float = 0.94  # share of the steps, the last ones, over which it falls to 0

    def __post_init__(self):
        for name in ("steps", "batch", "buckets"):
            if getattr(self, name) < 1:
                raise FarspanError(f"train.{name} is {getattr(self, name)}; give 1 or more")
        if self.optimizer not in OPTIMIZERS:
            raise FarspanError(f"optimizer {self.optimizer!r} is unknown; choose {' or '.join(OPTIMIZERS)}")
        shares = {name: getattr(self, name) for name in ("warmup", "decay", "beta1", "beta2")}
        for name, value in shares.items():
            if not (0 <= value <= 1 if name in ("warmup", "decay") else 0 <= value < 1):
                raise FarspanError(f"{name} is {value:g}; give a share from 0 to 1")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise FarspanError(f"{name} is {getattr(self, name):g}; give 0 or more")
        if not 0 < self.matrix_rate < math.inf:
            raise FarspanError(f"matrix_rate is {self.matrix_rate:g}; give a number above 0")
        if self.batch % self.buckets:
            raise FarspanError(
                f"a batch of {self.batch} examples cannot take equally many from {self.buckets} buckets; "
                f"choose a multiple of {self.buckets}"
            )

    def rate(self, step: int) -> float:
        """The multiplier of every learning rate at a step, 0-based."""
        warmup = round(self.warmup * self.steps)
        return rate(step, self.steps, Optimization(schedule="linear", warmup=warmup, decay=self.decay))


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Rows of similar length of every model's data, one after the other."""

    rows: Rows
    first: Tensor  # [M] where each model's rows begin
    count: Tensor  # [M] how many they are

    def take(self, chance: Tensor) -> Rows:
        """The rows at chance [M, B], in [0, 1), of each model's own: ids [M, B, T]."""
        count = self.count[:, None]
        which = self.first[:, None] + (chance * count).long().minimum(count - 1)
        return Rows(self.rows.ids[which], self.rows.start[which], self.rows.stop[which])


def _buckets(data: Sequence[Rows], parts: int, device: torch.device, a_pass: float = 0.0) -> list[_Bucket]:
    """Every model's data in so many parts of equally many rows, from the shortest to the longest. Neighbours are made
    equally wide where that is less to compute, if a pass takes as long as so many tokens of each row."""
    distinct = list({id(rows): rows for rows in data}.values())  # models of one task share their rows
    where = [next(number for number, rows in enumerate(distinct) if rows is each) for each in data]
    if min(map(len, distinct)) < parts:
        raise FarspanError(
            f"{min(map(len, distinct))} examples do not fill {parts} buckets; draw more, or ask for fewer"
        )
    pieces = [rows.by_length().tensor_split(parts) for rows in distinct]
    widths = [
        wide(max(int(rows.stop[piece[part]].max()) for rows, piece in zip(distinct, pieces, strict=True)))
        for part in range(parts)
    ]
    found = []
    for part, width in enumerate(shared(widths, a_pass)):
        taken = [rows.take(piece[part], width) for rows, piece in zip(distinct, pieces, strict=True)]
        count = torch.tensor([len(rows) for rows in taken])
        first = count.cumsum(0) - count
        found.append(_Bucket(joined(taken, 0).to(device), first[where].to(device), count[where].to(device)))
    return found


def shared(widths: Sequence[int], a_pass: float) -> list[int]:
    """Rising widths, some of them raised to later ones, so that the sum is least when each one that is left costs a
    pass.

    >>> shared([25, 33, 41, 153], 30)
    [41, 41, 41, 153]
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # of the first so many: what they cost, and how wide they are
    for stop, width in enumerate(widths, 1):
        options = [
            (cost + a_pass + width * (stop - start), chosen + [width] * (stop - start))
            for start, (cost, chosen) in enumerate(best)
        ]
        best.append(min(options))
    return best[-1][1]


def chances(seeds: Sequence[int], block: int, batch: int) -> Tensor:
    """[BLOCK, M, batch] in [0, 1): which rows each model sees in a block of steps, by its seed alone."""
    drawn = [np.random.default_rng((seed, block)).random((BLOCK, batch), dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.stack(drawn, axis=1))


@dataclass(frozen=True, eq=False)
class _State:
    """The optimizer's, of the whole table."""

    weights: Tensor  # [M, P]
    first: Tensor  # [M, P] mean gradient
    second: Tensor  # [M, A] mean square, of the columns that AdamW has
    rates: Tensor  # [M] set before each step
    count: Tensor  # [] steps taken
    matrices: Sequence[Block]


def _update(state: _State, gradient: Tensor, plan: Plan) -> None:
    """AdamW, or Muon for the matrices and AdamW for the rest, with a rate and a gradient norm for each model."""
    if plan.clip:
        norm = gradient.norm(dim=1, keepdim=True)
        gradient = gradient * (plan.clip / (norm + 1e-6)).clamp(max=1)
    state.count.add_(1)
    rates, columns = state.rates[:, None], state.second.shape[1]
    matrix_rates = rates * plan.matrix_rate if plan.optimizer == "muon" else rates
    state.weights[:, state.matrices[0][0] :].mul_(1 - plan.weight_decay * matrix_rates)

    mine, mean, square = gradient[:, :columns], state.first[:, :columns], state.second
    mean.lerp_(mine, 1 - plan.beta1)
    square.mul_(plan.beta2).addcmul_(mine, mine, value=1 - plan.beta2)
    spread = (square / (1 - plan.beta2**state.count)).sqrt() + EPSILON
    state.weights[:, :columns].sub_(rates * mean / (1 - plan.beta1**state.count) / spread)
    if plan.optimizer == "muon":
        for start, stop, shape in state.matrices:
            mine, mean = gradient[:, start:stop], state.first[:, start:stop]
            mean.lerp_(mine, 1 - MOMENTUM)
            ahead = mine.lerp(mean, MOMENTUM).unflatten(1, (-1, *shape))  # [M, matrices, rows, columns]
            turned = orthogonalise(ahead.flatten(0, 1), NEWTON_SCHULZ).to(ahead.dtype).reshape(mine.shape)
            state.weights[:, start:stop].sub_(matrix_rates * max(1, shape[0] / shape[1]) ** 0.5 * turned)


class Lesson:
    """One step of a fleet, to be taken again and again: gradient, clipping, update. What changes from step to step,
    `chance` and the state's rates, is written in place beforehand, so that a GPU can replay the rest."""

    def __init__(self, fleet: Fleet, data: Sequence[Rows], plan: Plan):
        self.fleet, self.plan = fleet, plan
        rows = plan.batch // plan.buckets
        a_pass = PASS / fleet.weights.numel() / rows if fleet.device.type == "cuda" else 0.0
        self.buckets = _buckets(data, plan.buckets, fleet.device, a_pass)
        self.chance = torch.zeros(len(fleet), plan.batch, device=fleet.device)
        weights = fleet.weights.detach()
        columns = fleet.matrices[0][0] if plan.optimizer == "muon" else weights.shape[1]
        self.state = _State(
            weights,
            torch.zeros_like(weights),
            torch.zeros_like(weights[:, :columns]),
            weights.new_zeros(len(fleet)),
            weights.new_zeros(()),
            fleet.matrices,
        )
        self.update: Callable[..., None] = _update

    def gradient(self) -> tuple[Tensor, Tensor]:
        """Of the mean loss of each model's answers in its batch: losses [M] and gradient [M, P]."""
        parts = self.chance.chunk(self.plan.buckets, dim=1)
        batches = [bucket.take(chance) for bucket, chance in zip(self.buckets, parts, strict=True)]
        # Those of one width go through the network together.
        batches = [joined(list(same), 1) for _, same in itertools.groupby(batches, key=lambda rows: rows.ids.shape[-1])]
        asked = torch.stack([rows.asked.sum((1, 2)) for rows in batches]).sum(0)
        gradient, losses = torch.zeros_like(self.fleet.weights), torch.zeros_like(self.state.rates)
        for rows in batches:
            with _half_precision(self.fleet.device):
                mean = self.fleet.losses(rows) / asked
            (part,) = torch.autograd.grad(mean.sum(), self.fleet.weights)
            gradient += part
            losses += mean.detach()
        return losses, gradient

    def __call__(self) -> Tensor:
        losses, gradient = self.gradient()
        with torch.no_grad():
            self.update(self.state, gradient, self.plan)
        return losses

    def compile(self) -> None:
        """Compile the layer and the update, or say why not and go on without."""
        self.fleet.layer, self.update = _compiled()
        compile_often(GRAPHS)
        before = self.fleet.weights.detach().clone()
        self.state.rates.zero_()
        try:
            self()
        except Exception as error:  # a compiler can fail in more ways than it has classes for
            if out_of_memory(error):
                raise
            name = type(error).__name__
            log.warning("the fleet trains uncompiled, for compiling failed: %s: %s", name, first_line(error))
            self.fleet.layer, self.update = over_models, _update
        with torch.no_grad():
            self.fleet.weights.copy_(before)
        for moment in (self.state.first, self.state.second, self.state.count):
            moment.zero_()


@functools.cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """For all fleets of a process: what was compiled for one serves the next, where shapes and encodings allow.

    Each width of rows by itself: torch 2.11 does not stack a product whose size is left open.
    """
    return torch.compile(over_models, dynamic=False), torch.compile(_update, dynamic=False)


@contextmanager
def _half_precision(device: torch.device) -> Iterator[None]:
    """bf16 products on a GPU. A CPU would only emulate them."""
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        yield


class Recorded:
    """A step replayed from a CUDA graph once it is warm."""

    def __init__(self, step: Callable[[], Tensor]):
        self.step, self.taken = step, 0
        self.aside = torch.cuda.Stream()  # graphs want their warm-up on a stream of its own
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        self.taken += 1
        if self.taken <= WARM:
            with on_stream(self.aside):
                return self.step()
        if self.taken == WARM + 1:
            self._record()
        if self.graph is None:
            return self.step()
        self.graph.replay()
        return self.losses

    def _record(self) -> None:
        gc.collect()  # of steps that failed, what they held binds too
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.aside):
                self.losses = self.step()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            log.warning(
                "the fleet's steps are launched one by one, for they could not be recorded: %s", first_line(error)
            )
            return
        self.graph = graph


Listener = Callable[[int, float], None]  # steps done, mean loss of the models that did not diverge


def train(
    fleet: Fleet,
    data: Sequence[Rows],
    plan: Plan,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    listen: Listener = lambda step, loss: None,
) -> np.ndarray:
    """Train each model of the fleet on its own rows, at its own learning rate and in its seed's order.

    Returns the loss [looks, M] in nats at a hundred moments of the run or more, the last step among them; one that is
    no number tells of a model that diverged, which harms no other.
    """
    fleet.network.train()
    torch.manual_seed(seeds[0])  # of dropout alone
    lesson = Lesson(fleet, data, plan)
    step: Callable[[], Tensor] = lesson
    if fleet.device.type == "cuda":
        step = recorded = Recorded(lesson)
        if plan.steps >= COMPILING_PAYS:
            with on_stream(recorded.aside):
                lesson.compile()
    full = torch.tensor(rates).to(lesson.state.rates)
    look, seen = max(1, plan.steps // 100), []
    for number in range(plan.steps):
        if number % BLOCK == 0:
            block = chances(seeds, number // BLOCK, plan.batch).to(fleet.device)
        lesson.chance.copy_(block[number % BLOCK])
        torch.mul(full, plan.rate(number), out=lesson.state.rates)
        losses = step()
        if (number + 1) % look == 0 or number + 1 == plan.steps:
            seen.append(losses.float().cpu().numpy())
            well = seen[-1][np.isfinite(seen[-1])]
            listen(number + 1, float(well.mean()) if len(well) else math.nan)
    fleet.layer = over_models
    return np.stack(seen)
