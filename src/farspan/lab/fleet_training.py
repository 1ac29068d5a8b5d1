"""Train a fleet: each model on its own rows, at its own learning rate, all in one step.

Every step does the same work, so it is compiled layer by layer and replayed from a CUDA graph. What
changes from step to step is written in place beforehand.
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

from farspan.batching import out_of_memory
from farspan.errors import FarspanError, first_line
from farspan.lab.fleet import Fleet, MatrixBlock, map_models
from farspan.lab.rows import Rows, concat_rows, padded_width
from farspan.model.compile import raise_recompile_limit
from farspan.train.optim import OPTIMIZERS, OptimizerConfig, learning_rate, orthogonalize
from farspan.train.steps import WARMUP_STEPS, on_stream

log = logging.getLogger(__name__)

BLOCK = 256  # steps whose rows are drawn at once
EARLY = (1, 4, 16)  # steps that are shown, too, so that their time is known soon
COMPILE_MIN_STEPS = 500  # compiling takes about ten seconds and pays off from here
PASS_COST = 5e10  # parameters × tokens a GPU processes in the fixed time of one more pass
MAX_GRAPHS = 256  # compiled in one process: one per row width and number of models
EPSILON = 1e-8
MOMENTUM = 0.95  # of Muon
NEWTON_SCHULZ = {  # torch's defaults for Muon
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
}


@dataclass(frozen=True)
class FleetPlan:
    """How the models of a fleet are trained; each has its own learning rate."""

    steps: int
    batch: int = 64  # examples per step
    buckets: int = 4  # by length, of equally many examples; every step draws equally from each
    optimizer: str = "muon"  # Muon for the layers' matrices and AdamW for the rest, or adamw
    matrix_rate: float = 7.0  # Muon's learning rate, as a multiple of the model's
    weight_decay: float = 0.0  # of matrices, times their learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # maximum gradient norm of each model; 0: no clipping
    warmup: float = 0.06  # fraction of the steps over which the learning rate rises from 0
    decay: float = 0.94  # fraction of the steps, at the end, over which it falls to 0

    def __post_init__(self):
        for name in ("steps", "batch", "buckets"):
            if getattr(self, name) < 1:
                raise FarspanError(f"train.{name} is {getattr(self, name)}; set it to 1 or more")
        if self.optimizer not in OPTIMIZERS:
            raise FarspanError(
                f"optimizer {self.optimizer!r} is unknown; choose {' or '.join(OPTIMIZERS)}"
            )
        fractions = {name: getattr(self, name) for name in ("warmup", "decay", "beta1", "beta2")}
        for name, value in fractions.items():
            if not (0 <= value <= 1 if name in ("warmup", "decay") else 0 <= value < 1):
                raise FarspanError(f"{name} is {value:g}; set it to a fraction from 0 to 1")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise FarspanError(f"{name} is {getattr(self, name):g}; set it to 0 or more")
        if not 0 < self.matrix_rate < math.inf:
            raise FarspanError(f"matrix_rate is {self.matrix_rate:g}; set it above 0")
        if self.batch % self.buckets:
            raise FarspanError(
                f"a batch of {self.batch} examples cannot be drawn equally from {self.buckets} "
                f"buckets; choose a multiple of {self.buckets}"
            )

    def lr_factor(self, step: int) -> float:
        """What every learning rate is multiplied by at a 0-based step."""
        warmup = round(self.warmup * self.steps)
        schedule = OptimizerConfig(schedule="linear", warmup=warmup, decay=self.decay)
        return learning_rate(step, self.steps, schedule)


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Rows of similar length from every model's data, concatenated."""

    rows: Rows
    first: Tensor  # [M] the index of each model's first row
    count: Tensor  # [M] the number of each model's rows

    def take(self, draws: Tensor) -> Rows:
        """The rows that draws [M, B] in [0, 1) select from each model's own: ids [M, B, T]."""
        count = self.count[:, None]
        rows = self.first[:, None] + (draws * count).long().minimum(count - 1)
        return Rows(self.rows.ids[rows], self.rows.start[rows], self.rows.stop[rows])


def _make_buckets(
    data: Sequence[Rows], parts: int, device: torch.device, pass_cost: float = 0.0
) -> list[_Bucket]:
    """Split every model's data by length into `parts` buckets of equally many rows.

    Adjacent buckets are padded to one width where that is cheaper; `pass_cost` is the fixed time of
    a pass, in tokens per row.
    """
    distinct = list({id(rows): rows for rows in data}.values())  # models of one task share rows
    index = {id(rows): number for number, rows in enumerate(distinct)}
    owners = [index[id(rows)] for rows in data]
    if min(map(len, distinct)) < parts:
        raise FarspanError(
            f"{min(map(len, distinct))} examples do not fill {parts} buckets; draw more examples "
            "or set fewer buckets"
        )
    pieces = [rows.by_length().tensor_split(parts) for rows in distinct]

    def longest(part: int) -> int:
        pairs = zip(distinct, pieces, strict=True)
        return max(int(rows.stop[piece[part]].max()) for rows, piece in pairs)

    widths = [padded_width(longest(part)) for part in range(parts)]
    buckets = []
    for part, width in enumerate(shared_widths(widths, pass_cost)):
        taken = [
            rows.take(piece[part], width) for rows, piece in zip(distinct, pieces, strict=True)
        ]
        count = torch.tensor([len(rows) for rows in taken])
        first = count.cumsum(0) - count
        rows = concat_rows(taken, 0).to(device)
        buckets.append(_Bucket(rows, first[owners].to(device), count[owners].to(device)))
    return buckets


def shared_widths(widths: Sequence[int], pass_cost: float) -> list[int]:
    """Raise some of the ascending widths to later ones, to minimize the total cost.

    The cost is the sum of the widths plus `pass_cost` for each distinct width.

    >>> shared_widths([25, 33, 41, 153], 30)
    [41, 41, 41, 153]
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # cost and widths of each prefix
    for stop, width in enumerate(widths, 1):
        options = [
            (cost + pass_cost + width * (stop - start), chosen + [width] * (stop - start))
            for start, (cost, chosen) in enumerate(best)
        ]
        best.append(min(options))
    return best[-1][1]


def draw_uniform(seeds: Sequence[int], block: int, batch: int) -> Tensor:
    """[BLOCK, M, batch] in [0, 1): the rows of each model in a block of steps, by its own seed."""
    drawn = [
        np.random.default_rng((seed, block)).random((BLOCK, batch), dtype=np.float32)
        for seed in seeds
    ]
    return torch.from_numpy(np.stack(drawn, axis=1))


@dataclass(frozen=True, eq=False)
class _State:
    """The optimizer state of the whole table."""

    weights: Tensor  # [M, P]
    first: Tensor  # [M, P] mean gradient
    second: Tensor  # [M, A] mean squared gradient, of the columns that AdamW updates
    rates: Tensor  # [M] learning rates, set before each step
    count: Tensor  # [] steps done
    matrices: Sequence[MatrixBlock]


def _update(state: _State, gradient: Tensor, plan: FleetPlan) -> None:
    """AdamW, or Muon for the matrices and AdamW for the rest; clips each model's gradient norm."""
    if plan.clip:
        norm = gradient.norm(dim=1, keepdim=True)
        gradient = gradient * (plan.clip / (norm + 1e-6)).clamp(max=1)
    state.count.add_(1)
    rates, columns = state.rates[:, None], state.second.shape[1]
    matrix_rates = rates * plan.matrix_rate if plan.optimizer == "muon" else rates
    state.weights[:, state.matrices[0][0] :].mul_(1 - plan.weight_decay * matrix_rates)

    grad, mean, square = gradient[:, :columns], state.first[:, :columns], state.second
    mean.lerp_(grad, 1 - plan.beta1)
    square.mul_(plan.beta2).addcmul_(grad, grad, value=1 - plan.beta2)
    spread = (square / (1 - plan.beta2**state.count)).sqrt() + EPSILON
    state.weights[:, :columns].sub_(rates * mean / (1 - plan.beta1**state.count) / spread)
    if plan.optimizer == "muon":
        for start, stop, shape in state.matrices:
            grad, mean = gradient[:, start:stop], state.first[:, start:stop]
            mean.lerp_(grad, 1 - MOMENTUM)
            nesterov = grad.lerp(mean, MOMENTUM).unflatten(1, (-1, *shape))  # [M, matrices, …]
            direction = orthogonalize(nesterov.flatten(0, 1), NEWTON_SCHULZ)
            direction = direction.to(nesterov.dtype).reshape(grad.shape)
            step = matrix_rates * max(1, shape[0] / shape[1]) ** 0.5 * direction
            state.weights[:, start:stop].sub_(step)


class FleetTrainer:
    """One training step of a fleet: gradient, clipping, update.

    What changes from step to step, `draws` and the state's learning rates, is written in place
    before the call, so that a GPU can replay the rest.
    """

    def __init__(self, fleet: Fleet, data: Sequence[Rows], plan: FleetPlan):
        self.fleet, self.plan = fleet, plan
        rows = plan.batch // plan.buckets
        on_gpu = fleet.device.type == "cuda"
        pass_cost = PASS_COST / fleet.weights.numel() / rows if on_gpu else 0.0
        self.buckets = _make_buckets(data, plan.buckets, fleet.device, pass_cost)
        self.draws = torch.zeros(len(fleet), plan.batch, device=fleet.device)
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
        """The mean loss of each model's answers in its batch, [M], and its gradient, [M, P]."""
        parts = self.draws.chunk(self.plan.buckets, dim=1)
        batches = [bucket.take(draws) for bucket, draws in zip(self.buckets, parts, strict=True)]
        # Batches of one width go through the network together.
        batches = [
            concat_rows(list(group), 1)
            for _, group in itertools.groupby(batches, key=lambda rows: rows.ids.shape[-1])
        ]
        tokens = torch.stack([rows.answer_mask.sum((1, 2)) for rows in batches]).sum(0)
        gradient, losses = torch.zeros_like(self.fleet.weights), torch.zeros_like(self.state.rates)
        for rows in batches:
            with _bf16_on_gpu(self.fleet.device):
                mean = self.fleet.losses(rows) / tokens
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
        """Compile the layer and the update; if that fails, warn and stay uncompiled."""
        self.fleet.layer, self.update = _compiled()
        raise_recompile_limit(MAX_GRAPHS)
        before = self.fleet.weights.detach().clone()
        self.state.rates.zero_()
        try:
            self()
        except Exception as error:  # compilers raise many kinds of errors
            if out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            log.warning("compiling failed, so the fleet trains uncompiled: %s", reason)
            self.fleet.layer, self.update = map_models, _update
        with torch.no_grad():
            self.fleet.weights.copy_(before)
        for moment in (self.state.first, self.state.second, self.state.count):
            moment.zero_()


@functools.cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Compiled functions shared by all fleets of a process, for reuse where shapes allow.

    Each row width is compiled by itself: torch 2.11 cannot batch a product of dynamic size.
    """
    return torch.compile(map_models, dynamic=False), torch.compile(_update, dynamic=False)


@contextmanager
def _bf16_on_gpu(device: torch.device) -> Iterator[None]:
    """Autocast to bf16 on a GPU; a CPU only emulates bf16."""
    with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
        yield


class GraphedFleetTrainer:
    """A training step that is replayed from a CUDA graph after warm-up."""

    def __init__(self, step: Callable[[], Tensor]):
        self.step, self.steps_done = step, 0
        self.stream = torch.cuda.Stream()  # graphs must be warmed up on a stream of their own
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        self.steps_done += 1
        if self.steps_done <= WARMUP_STEPS:
            with on_stream(self.stream):
                return self.step()
        if self.steps_done == WARMUP_STEPS + 1:
            self._record()
        if self.graph is None:
            return self.step()
        self.graph.replay()
        return self.losses

    def _record(self) -> None:
        gc.collect()  # tensors of failed steps would be captured too
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.losses = self.step()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            reason = first_line(error)
            log.warning("recording a CUDA graph failed, so the fleet trains without: %s", reason)
            return
        self.graph = graph


FleetCallback = Callable[[int, float], None]  # steps done, mean loss of models not diverged


def train_fleet(
    fleet: Fleet,
    data: Sequence[Rows],
    plan: FleetPlan,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    on_step: FleetCallback = lambda step, loss: None,
) -> np.ndarray:
    """Train each model of the fleet on its own rows, at its own learning rate, in its seed's order.

    Returns the losses [records, M] in nats, recorded at least a hundred times during the run and at
    the last step. A model whose loss is not finite has diverged, which does not affect the others.
    """
    fleet.network.train()
    torch.manual_seed(seeds[0])  # affects dropout only
    trainer = FleetTrainer(fleet, data, plan)
    step: Callable[[], Tensor] = trainer
    if fleet.device.type == "cuda":
        step = graphed = GraphedFleetTrainer(trainer)
        if plan.steps >= COMPILE_MIN_STEPS:
            with on_stream(graphed.stream):
                trainer.compile()
    base_rates = torch.tensor(rates).to(trainer.state.rates)
    interval, history = max(1, plan.steps // 100), []
    for number in range(plan.steps):
        if number % BLOCK == 0:
            block = draw_uniform(seeds, number // BLOCK, plan.batch).to(fleet.device)
        trainer.draws.copy_(block[number % BLOCK])
        torch.mul(base_rates, plan.lr_factor(number), out=trainer.state.rates)
        losses = step()
        recorded = (number + 1) % interval == 0 or number + 1 == plan.steps
        if recorded or number + 1 in EARLY:
            values = losses.float().cpu().numpy()
            history += [values] * recorded
            finite = values[np.isfinite(values)]
            on_step(number + 1, float(finite.mean()) if len(finite) else math.nan)
    fleet.layer = map_models
    return np.stack(history)
