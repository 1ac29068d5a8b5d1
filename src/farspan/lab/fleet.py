"""A fleet: many models of one network, stacked and stepped together.

A GPU computes a step of a small model faster than Python can launch its kernels. With the weights of M models in one
table [M, P], a kernel works for all of them: `torch.func.vmap` runs the network over the rows of the table, and the
optimizer is a few lines over the whole of it. The models share nothing but their shape: each has its own data, seed and
learning rate, and gets the gradient that it would get alone.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from farspan.attention import seam
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.loading import first_line
from farspan.memory import in_pieces, out_of_memory
from farspan.model.fast import compile_often
from farspan.model.positions import PlacedBias
from farspan.model.transformer import FarspanForCausalLM, FarspanModel
from farspan.train.optim import OPTIMIZERS, Optimization, orthogonalise, rate
from farspan.train.steps import WARM, on_stream

log = logging.getLogger(__name__)

BLOCK = 256  # steps whose rows are drawn at once
MULTIPLE = 8  # widths are multiples of it: matrix units want that
LOGITS = 1 << 26  # held at once where models are asked
COMPILING_PAYS = 500  # steps; it takes some ten seconds
GRAPHS = 256  # compiled for all fleets of a process, at most: rows of some lengths times numbers of models
EPSILON = 1e-8
MOMENTUM = 0.95  # of Muon
NEWTON_SCHULZ = {"ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5}  # as torch's Muon has them

Named = dict[str, Tensor]
Block = tuple[int, int, tuple[int, ...]]  # columns of the table, and the shape of the matrices in them


@dataclass(frozen=True, eq=False)
class Rows:
    """Examples as tokens, padded on the right; the answer is what is learnt and asked for."""

    ids: Tensor  # [N, T] integers
    start: Tensor  # [N] the answer's first token
    stop: Tensor  # [N] the end of the answer, and of the row

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor, width: int) -> Rows:
        """Some of the rows, cut or padded to a width."""
        return Rows(F.pad(self.ids[rows], (0, width - self.ids.shape[1])), self.start[rows], self.stop[rows])

    def by_length(self) -> Tensor:
        """Row numbers, the shortest row first."""
        return torch.argsort(self.stop, stable=True)

    def to(self, device: torch.device) -> Rows:
        return Rows(self.ids.to(device), self.start.to(device), self.stop.to(device))

    @property
    def asked(self) -> Tensor:
        """Which tokens, from the second on, belong to an answer: bool, of the shape of ids[..., 1:]."""
        place = torch.arange(1, self.ids.shape[-1], device=self.ids.device)
        return (place >= self.start[..., None]) & (place < self.stop[..., None])


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
        if min(self.steps, self.batch, self.buckets) < 1:
            raise FarspanError(
                f"{self.steps} steps of {self.batch} examples in {self.buckets} buckets train nothing; "
                "choose each at least 1"
            )
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


class Fleet:
    """M models of one network as a table of weights [M, P].

    >>> fleet = Fleet([FarspanForCausalLM(config) for _ in range(8)], "cuda")
    >>> fleet.logits(ids)  # [8, B, T] -> [8, B, T, V]
    """

    def __init__(self, models: Sequence[FarspanForCausalLM], device: str | torch.device = "cpu"):
        self.network = network = seam.install(copy.deepcopy(models[0])).to(device)
        self.device = network.device
        tables = {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, nn.Embedding)}
        named = dict(network.named_parameters())
        matrices = {name: tuple(p.shape) for name, p in named.items() if p.ndim == 2 and name not in tables}
        # Tables and vectors come first, then the matrices, those of one shape side by side.
        self.names = sorted(named, key=lambda name: matrices.get(name, ()))
        self.shapes = [named[name].shape for name in self.names]
        self.sizes = [named[name].numel() for name in self.names]
        self.matrices = _blocks([matrices.get(name) for name in self.names], self.sizes)
        self.weights = torch.stack([self.flat(dict(model.named_parameters())) for model in models]).to(device)
        self.weights.requires_grad_()
        self.alone = len(models) == 1 and self.device.type == "cpu"  # there batched products do not pay
        self.layer: Callable[..., Tensor] = over_models  # or the same, compiled
        self._front, self._back = _Front(network.model), _Back(network)

    def __len__(self) -> int:
        return len(self.weights)

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """A model's parameters, or their gradients, as a row of the table."""
        return torch.cat([named[name].detach().flatten() for name in self.names])

    def model(self, index: int) -> FarspanForCausalLM:
        """One model of the fleet, for itself, on the CPU."""
        model = seam.uninstall(copy.deepcopy(self.network)).cpu().eval()
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in zip(self.names, self.weights[index].split(self.sizes), strict=True):
                named[name].copy_(values.view_as(named[name]))
        return model

    def logits(self, ids: Tensor) -> Tensor:
        """[M, B, T] -> [M, B, T, V], each model on its own tokens."""
        parts = self.weights.split(self.sizes, dim=1)
        named = {
            name: part.unflatten(1, shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }
        if self.alone:
            own = {name: weight[0] for name, weight in named.items()}
            return functional_call(self.network, own, (ids[0],), {"use_cache": False}).logits[None]
        front, layers, back = _by_module(named)
        with seam.using(self.network, attend_plainly):
            x, biases = over_models(self._front, front, ids)
            slots = torch.arange(ids.shape[2], device=ids.device)[None]
            positions: Any = self.network.model.positions
            angles = {kind: positions[kind].angles(x, slots) for kind in positions}
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))  # as the network itself does
            for weights, kind in zip(layers, self.network.config.position, strict=True):
                told: dict[str, Any] = {}
                if kind in biases:
                    told["bias"] = biases[kind]
                if angles[kind] is not None:  # the same for all models, and vmap takes a row a model
                    told["angles"] = tuple(part.expand(len(self), *part.shape) for part in angles[kind])
                # All layers are alike: the first one stands for each, with that one's weights.
                x = self.layer(self.network.model.layers[0], weights, x, told)
            return over_models(self._back, back, x)

    def losses(self, rows: Rows) -> Tensor:
        """The summed loss of each model's answers, [M] nats, for rows of shape [M, B, T]."""
        ids = rows.ids.long()
        logits = self.logits(ids[..., :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = F.cross_entropy(logits.flatten(0, 2), ids[..., 1:].flatten(), reduction="none")
        return (each.view(rows.asked.shape) * rows.asked).sum((1, 2))

    @contextmanager
    def scaled(self, value: float) -> Iterator[None]:
        """All attention scores times λ̂ in this block."""
        config = self.network.config
        seam.install(self.network, Scales.uniform(value, range(config.num_hidden_layers), config.num_attention_heads))
        try:
            yield
        finally:
            seam.install(self.network)


def _blocks(shapes: Sequence[tuple[int, ...] | None], sizes: Sequence[int]) -> list[Block]:
    """Where the matrices of each shape lie in a row of the table; None is of what is no matrix."""
    found, start = [], 0
    for shape, run in itertools.groupby(zip(shapes, sizes, strict=True), key=lambda pair: pair[0]):
        stop = start + sum(size for _, size in run)
        if shape is not None:
            found.append((start, stop, shape))
        start = stop
    return found


class _Front(nn.Module):
    """What comes before the layers: embeddings, and what positions add to them and to the scores."""

    def __init__(self, model: FarspanModel):
        super().__init__()
        self.embed_tokens, self.positions, self.dropout = model.embed_tokens, model.positions, model.dropout

    def forward(self, ids: Tensor) -> tuple[Tensor, Named]:
        slots = torch.arange(ids.shape[1], device=ids.device)
        x, biases = self.embed_tokens(ids), {}
        positions: Any = self.positions  # a ModuleDict forgets what it holds
        for kind, position in positions.items():
            x = position.embed(x, slots[None])
            if (rule := position.bias) is not None:
                biases[kind] = PlacedBias(rule(len(slots)), rule.heads, slots, slots).tensor()
        return self.dropout(x), biases


class _Back(nn.Module):
    """What comes after the layers."""

    def __init__(self, model: FarspanForCausalLM):
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def _by_module(named: Named) -> tuple[Named, list[Named], Named]:
    """The parameters before, in and after the layers, by the names that they have there."""
    front: Named = {}
    layers: dict[str, Named] = {}
    back = {"lm_head.weight": named["model.embed_tokens.weight"]}  # tied, unless it has weights of its own
    for name, weight in named.items():
        first, _, rest = name.removeprefix("model.").partition(".")
        if first == "layers":
            number, _, rest = rest.partition(".")
            layers.setdefault(number, {})[rest] = weight
        else:
            (back if first in ("norm", "lm_head") else front)[f"{first}.{rest}"] = weight
    return front, list(layers.values()), back


def over_models(module: nn.Module, weights: Named, x: Tensor, told: dict[str, Any] | None = None) -> Any:
    """The module, for each model with its own weights, input and keywords."""

    def one(weights: Named, x: Tensor, told: dict[str, Any]) -> Any:
        return functional_call(module, weights, (x,), told)

    return vmap(one, randomness="different")(weights, x, told or {})


def attend_plainly(module, query, key, value, attention_mask, *, scaling, bias=None, dropout=0.0, **options):
    """softmax(scaling · q·k + bias) v over the keys up to each query, as products that can be stacked."""
    scores = (query * scaling) @ key.mT
    if bias is not None:
        scores = scores + bias
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2), None


# Training.


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


def _buckets(data: Sequence[Rows], parts: int, device: torch.device) -> list[_Bucket]:
    """Every model's data in so many parts of equally many rows, from the shortest to the longest."""
    distinct = list({id(rows): rows for rows in data}.values())  # models of one task share their rows
    where = [next(number for number, rows in enumerate(distinct) if rows is each) for each in data]
    if min(map(len, distinct)) < parts:
        raise FarspanError(
            f"{min(map(len, distinct))} examples do not fill {parts} buckets; draw more, or ask for fewer"
        )
    pieces = [rows.by_length().tensor_split(parts) for rows in distinct]
    found = []
    for part in range(parts):
        longest = max(int(rows.stop[piece[part]].max()) for rows, piece in zip(distinct, pieces, strict=True))
        width = wide(longest)
        taken = [rows.take(piece[part], width) for rows, piece in zip(distinct, pieces, strict=True)]
        joined = Rows(*(torch.cat([getattr(rows, name) for rows in taken]) for name in ("ids", "start", "stop")))
        count = torch.tensor([len(rows) for rows in taken])
        first = count.cumsum(0) - count
        found.append(_Bucket(joined.to(device), first[where].to(device), count[where].to(device)))
    return found


def wide(longest: int) -> int:
    """The width of rows: its inputs, all tokens but the last, fill whole tiles."""
    return -(-(longest - 1) // MULTIPLE) * MULTIPLE + 1


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
        self.buckets = _buckets(data, plan.buckets, fleet.device)
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

    Returns the loss [looks, M] in nats at a hundred moments of the run; one that is no number tells of a model that
    diverged, which harms no other.
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
        if (number + 1) % look == 0:
            seen.append(losses.float().cpu().numpy())
            well = seen[-1][np.isfinite(seen[-1])]
            listen(number + 1, float(well.mean()) if len(well) else math.nan)
    fleet.layer = over_models
    return np.stack(seen)


# Asking.


@torch.no_grad()
def tells(fleet: Fleet, data: Sequence[Rows]) -> list[np.ndarray]:
    """For each model, of each of its rows: would greedy decoding give the whole answer? bool [N] each.

    Given the right tokens before it, every token of the answer must be the likeliest. That is what greedy decoding
    gives as well: it goes astray at the first one that is not.
    """
    fleet.network.eval()
    orders = [rows.by_length() for rows in data]
    found = [np.zeros(len(rows), dtype=bool) for rows in data]

    def some(start: int, stop: int) -> None:
        picked = [order[torch.arange(start, stop).clamp(max=len(order) - 1)] for order in orders]
        longest = max(int(rows.stop[some].max()) for rows, some in zip(data, picked, strict=True))
        taken = [rows.take(some, wide(longest)) for rows, some in zip(data, picked, strict=True)]
        batch = Rows(*(torch.stack([getattr(rows, name) for rows in taken]) for name in ("ids", "start", "stop")))
        batch = batch.to(fleet.device)
        likeliest = fleet.logits(batch.ids[..., :-1].long()).argmax(-1)
        right = ((likeliest == batch.ids[..., 1:]) | ~batch.asked).all(-1).cpu().numpy()
        for own, rows, said in zip(found, picked, right, strict=True):
            own[rows.numpy()] = said

    widest = max(int(rows.stop.max()) for rows in data)
    held = len(fleet) * widest * fleet.network.config.vocab_size
    in_pieces(max(map(len, data)), max(1, LOGITS // held), some)
    return found
