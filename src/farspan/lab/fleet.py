"""A fleet: many models of one network, stacked and stepped together.

A GPU computes a step of a small model faster than Python can launch its kernels. With the weights of M models in one
table [M, P], a kernel works for all of them: `torch.func.vmap` runs the network over the rows of the table, and the
optimizer is a few lines over the whole of it. The models share nothing but their shape: each has its own data, seed and
learning rate, and gets the gradient that it would get alone.
"""

from __future__ import annotations

import copy
import itertools
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
from farspan.memory import in_pieces
from farspan.model.config import SLIDING
from farspan.model.positions import PlacedBias
from farspan.model.transformer import FarspanForCausalLM, FarspanModel

MULTIPLE = 8  # widths are multiples of it: matrix units want that
LOGITS = 1 << 26  # held at once where models are asked

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


def joined(parts: Sequence[Rows], dim: int) -> Rows:
    """Rows of one width, one after the other."""
    return Rows(*(torch.cat([getattr(rows, name) for rows in parts], dim) for name in ("ids", "start", "stop")))


def wide(longest: int) -> int:
    """The width of rows: its inputs, all tokens but the last, fill whole tiles."""
    return -(-(longest - 1) // MULTIPLE) * MULTIPLE + 1


class Fleet:
    """M models of one network as a table of weights [M, P].

    >>> fleet = Fleet([FarspanForCausalLM(config) for _ in range(8)], "cuda")
    >>> fleet.logits(ids)  # [8, B, T] -> [8, B, T, V]
    """

    def __init__(self, models: Sequence[FarspanForCausalLM], device: str | torch.device = "cpu"):
        config = models[0].config
        if SLIDING in config.layer_types or config.num_key_value_heads != config.num_attention_heads:
            raise FarspanError(
                "layers of a fleet see all that came before, with keys for every head; train models with windows or "
                "shared keys by `farspan pretrain`"
            )
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
