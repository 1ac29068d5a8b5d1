"""A fleet: many models of one network, stacked and trained together.

A GPU finishes a step of a small model faster than Python can launch its kernels. With the weights
of M models in one table [M, P], one kernel serves all of them: `torch.func.vmap` runs the network
over the rows of the table, and the optimizer updates the whole table in a few lines. The models
share only their shape: each has its own data, seed and learning rate, and gets the same gradient
as when it is trained by itself.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from farspan.attention import seam
from farspan.attention.scales import Scales
from farspan.batching import run_in_batches
from farspan.errors import FarspanError
from farspan.lab.rows import Rows, padded_width, stack_rows
from farspan.model.config import SLIDING
from farspan.model.encodings import Encoding, PlacedEncoding
from farspan.model.positions import PlacedBias
from farspan.model.transformer import FarspanForCausalLM, FarspanModel

MAX_LOGITS = 1 << 26  # in memory at once during evaluation

NamedTensors = dict[str, Tensor]
MatrixBlock = tuple[int, int, tuple[int, ...]]  # columns of the table, and the shape of a matrix


class Fleet:
    """M models of one network as a table of weights [M, P].

    >>> fleet = Fleet([FarspanForCausalLM(config) for _ in range(8)], "cuda")
    >>> fleet.logits(ids)  # [8, B, T] -> [8, B, T, V]
    """

    def __init__(self, models: Sequence[FarspanForCausalLM], device: str | torch.device = "cpu"):
        config = models[0].config
        if (
            SLIDING in config.layer_types
            or config.num_key_value_heads != config.num_attention_heads
        ):
            raise FarspanError(
                "a fleet supports only full attention with one key per head; train models with "
                "sliding windows or shared keys by `farspan pretrain`"
            )
        self.network = network = seam.install(copy.deepcopy(models[0])).to(device)
        self.device = network.device
        tables = {
            f"{name}.weight"
            for name, module in network.named_modules()
            if isinstance(module, nn.Embedding)
        }
        named = dict(network.named_parameters())
        matrices = {
            name: tuple(p.shape)
            for name, p in named.items()
            if p.ndim == 2 and name not in tables and not name.startswith("model.positions.")
        }
        # Embeddings and vectors come first, then the matrices, grouped by shape.
        self.names = sorted(named, key=lambda name: matrices.get(name, ()))
        self.shapes = [named[name].shape for name in self.names]
        self.sizes = [named[name].numel() for name in self.names]
        self.matrices = _matrix_blocks([matrices.get(name) for name in self.names], self.sizes)
        rows = [self.flatten(dict(model.named_parameters())) for model in models]
        self.weights = torch.stack(rows).to(device).requires_grad_()
        # On a CPU batched products are slower than plain ones for a single model.
        self.single = len(models) == 1 and self.device.type == "cpu"
        self.layer: Callable[..., Tensor] = map_models  # or its compiled form
        self._embedding, self._head = _Embedding(network.model), _Head(network)
        # All layers have one structure: the first is called with the weights of each.
        self._layer = network.model.layers[0]
        positions: Any = network.model.positions
        self._encoded = {  # once, because a compiled function is compiled for each module
            kind: _EncodedLayer(self._layer, position)
            for kind, position in positions.items()
            if isinstance(position, Encoding)
        }

    def __len__(self) -> int:
        return len(self.weights)

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """A model's parameters, or their gradients, as a row of the table."""
        return torch.cat([named[name].detach().flatten() for name in self.names])

    def model(self, index: int) -> FarspanForCausalLM:
        """A copy of one model of the fleet, on the CPU."""
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
            name: part.reshape(len(part), *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }
        if self.single:
            weights = {name: weight[0] for name, weight in named.items()}
            output = functional_call(self.network, weights, (ids[0],), {"use_cache": False})
            return output.logits[None]
        embedding, layers, head = _by_module(named)
        with seam.using(self.network, plain_attention):
            x, biases = map_models(self._embedding, embedding, ids)
            slots = torch.arange(ids.shape[2], device=ids.device)[None]
            positions: Any = self.network.model.positions
            angles = {kind: positions[kind].angles(x, slots) for kind in positions}
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))  # as the network itself does
            for weights, kind in zip(layers, self.network.config.position, strict=True):
                keywords: dict[str, Any] = {}
                if kind in self._encoded:
                    weights = _encoded_weights(weights, embedding, kind)
                    x = self.layer(self._encoded[kind], weights, x)
                    continue
                if kind in biases:
                    keywords["bias"] = biases[kind]
                if angles[kind] is not None:  # equal for all models, but vmap takes one per model
                    keywords["angles"] = tuple(
                        part.expand(len(self), *part.shape) for part in angles[kind]
                    )
                x = self.layer(self._layer, weights, x, keywords)
            return map_models(self._head, head, x)

    def losses(self, rows: Rows) -> Tensor:
        """The summed loss of each model's answers, [M] in nats, for rows of shape [M, B, T]."""
        ids = rows.ids.long()
        logits = self.logits(ids[..., :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 2), ids[..., 1:].flatten(), reduction="none")
        return (losses.view(rows.answer_mask.shape) * rows.answer_mask).sum((1, 2))

    @contextmanager
    def scaled(self, value: float) -> Iterator[None]:
        """Multiply all attention scores by λ̂ in this block."""
        config = self.network.config
        seam.install(
            self.network,
            Scales.uniform(value, range(config.num_hidden_layers), config.num_attention_heads),
        )
        try:
            yield
        finally:
            seam.install(self.network)


def _matrix_blocks(
    shapes: Sequence[tuple[int, ...] | None], sizes: Sequence[int]
) -> list[MatrixBlock]:
    """Where the matrices of each shape are in a row of the table; None marks non-matrices."""
    blocks, start = [], 0
    for shape, run in itertools.groupby(zip(shapes, sizes, strict=True), key=lambda pair: pair[0]):
        stop = start + sum(size for _, size in run)
        if shape is not None:
            blocks.append((start, stop, shape))
        start = stop
    return blocks


class _Embedding(nn.Module):
    """What runs before the layers: token embeddings, position embeddings and attention biases."""

    def __init__(self, model: FarspanModel):
        super().__init__()
        self.embed_tokens, self.positions, self.dropout = (
            model.embed_tokens,
            model.positions,
            model.dropout,
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, NamedTensors]:
        slots = torch.arange(ids.shape[1], device=ids.device)
        x, biases = self.embed_tokens(ids), {}
        positions: Any = self.positions  # mypy knows no element types of a ModuleDict
        for kind, position in positions.items():
            x = position.embed(x, slots[None])
            if (rule := position.bias) is not None:
                biases[kind] = PlacedBias(rule(len(slots)), rule.heads, slots, slots).tensor()
        return self.dropout(x), biases


class _EncodedLayer(nn.Module):
    """A layer with an encoding of the open protocol, which works on its queries and keys."""

    def __init__(self, layer: nn.Module, encoding: Encoding):
        super().__init__()
        self.layer, self.encoding = layer, encoding

    def forward(self, x: Tensor) -> Tensor:
        slots = torch.arange(x.shape[1], device=x.device)
        bias = PlacedEncoding(self.encoding, slots, slots) if self.encoding.adds_scores else None
        return self.layer(x, rotation=(self.encoding, slots[None]), bias=bias)


def _encoded_weights(layer: NamedTensors, embedding: NamedTensors, kind: str) -> NamedTensors:
    prefix = f"positions.{kind}."
    return {f"layer.{name}": weight for name, weight in layer.items()} | {
        f"encoding.{name.removeprefix(prefix)}": weight
        for name, weight in embedding.items()
        if name.startswith(prefix)
    }


class _Head(nn.Module):
    """What runs after the layers: the final norm and the LM head."""

    def __init__(self, model: FarspanForCausalLM):
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def _by_module(named: NamedTensors) -> tuple[NamedTensors, list[NamedTensors], NamedTensors]:
    """The parameters before, in and after the layers, by their names inside those modules."""
    embedding: NamedTensors = {}
    layers: dict[str, NamedTensors] = {}
    # The LM head is tied to the embeddings unless it has weights of its own.
    head = {"lm_head.weight": named["model.embed_tokens.weight"]}
    for name, weight in named.items():
        first, _, rest = name.removeprefix("model.").partition(".")
        if first == "layers":
            number, _, rest = rest.partition(".")
            layers.setdefault(number, {})[rest] = weight
        else:
            (head if first in ("norm", "lm_head") else embedding)[f"{first}.{rest}"] = weight
    return embedding, list(layers.values()), head


def map_models(
    module: nn.Module, weights: NamedTensors, x: Tensor, keywords: dict[str, Any] | None = None
) -> Any:
    """Call the module for each model, with that model's weights, input and keyword arguments."""

    def call(weights: NamedTensors, x: Tensor, keywords: dict[str, Any]) -> Any:
        return functional_call(module, weights, (x,), keywords)

    return vmap(call, randomness="different")(weights, x, keywords or {})


def plain_attention(
    module, query, key, value, attention_mask, *, scaling, bias=None, dropout=0.0, **options
):
    """softmax(scaling · q·k + bias) v with a causal mask, in operations that vmap can batch."""
    scores = (query * scaling) @ key.mT
    if bias is not None:
        scores = scores + (bias.tensor() if isinstance(bias, PlacedEncoding) else bias)
    *_, queries, keys = scores.shape
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        value.dtype
    )
    return (F.dropout(weights, dropout) @ value).transpose(1, 2), None


@torch.no_grad()
def exact_match(fleet: Fleet, data: Sequence[Rows]) -> list[np.ndarray]:
    """For each model, whether greedy decoding gives the whole answer of each row: bool [N] each.

    Every token of the answer must have the highest probability given the correct tokens before it.
    This is equivalent to greedy decoding, which fails at the first token that has not.
    """
    fleet.network.eval()
    orders = [rows.by_length() for rows in data]
    correct = [np.zeros(len(rows), dtype=bool) for rows in data]

    def evaluate(start: int, stop: int) -> None:
        picked = [order[torch.arange(start, stop).clamp(max=len(order) - 1)] for order in orders]
        longest = max(int(rows.stop[pick].max()) for rows, pick in zip(data, picked, strict=True))
        width = padded_width(longest)
        batch = stack_rows(
            [rows.take(pick, width) for rows, pick in zip(data, picked, strict=True)]
        )
        batch = batch.to(fleet.device)
        predictions = fleet.logits(batch.ids[..., :-1].long()).argmax(-1)
        matches = ((predictions == batch.ids[..., 1:]) | ~batch.answer_mask).all(-1).cpu().numpy()
        for results, pick, match in zip(correct, picked, matches, strict=True):
            results[pick.numpy()] = match

    widest = max(int(rows.stop.max()) for rows in data)
    logits_per_row = len(fleet) * widest * fleet.network.config.vocab_size
    run_in_batches(max(map(len, data)), max(1, MAX_LOGITS // logits_per_row), evaluate)
    return correct
