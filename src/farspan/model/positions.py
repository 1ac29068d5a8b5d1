"""Position encodings behind one interface.

A position encoding changes the embeddings (learned, sinusoidal), rotates queries and keys (rope),
or adds a bias to the scores (alibi, t5). `NoPE` does none of these. These encodings are built for
speed: angles are computed once for all layers, and biases are functions of the distance.
`encodings.py` has the open protocol, which asks for less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

PER_LAYER = ("none", "rope", "alibi", "t5", "kerple", "fire", "cope")
MODEL_WIDE = ("learned", "sinusoidal", "randomized")

Angles = tuple[Tensor, Tensor]


class Position(nn.Module):
    """One encoding, shared by all layers that use it; by default it does nothing."""

    bias: Bias | None

    def __init__(self):
        super().__init__()
        self.bias = None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """The embeddings x [B, Q, d] with positions [B, Q] added."""
        return x

    def angles(self, x: Tensor, positions: Tensor) -> Angles | None:
        """Cosine and sine for `rotate`, computed once per forward pass for all layers."""
        return None


class NoPE(Position):
    """No position encoding: the model sees order only through the causal mask."""


class Rope(Position):
    """Rotary encoding of any type in Hugging Face's `rope_parameters` (PI, NTK, YaRN, …)."""

    def __init__(self, config):
        super().__init__()
        # GPT-NeoX's class supports a rotary fraction; its frequencies are those of all families.
        self.rotary_emb = GPTNeoXRotaryEmbedding(config)

    def angles(self, x: Tensor, positions: Tensor) -> Angles:
        return self.rotary_emb(x, positions)


def rotate(q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of q and k [B, H, Q, D] by angles [B, Q, R].

    With fewer queries than keys, the queries are those of the last positions."""
    cos, sin = (part.unsqueeze(1) for part in angles)
    last = slice(k.shape[2] - q.shape[2], None)
    return _rotate_one(q, cos[:, :, last], sin[:, :, last]), _rotate_one(k, cos, sin)


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-right, left), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class Learned(Position):
    """One learned vector per position; rows beyond the train length are untrained."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(length, width)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class Sinusoidal(Position):
    """Fixed waves of geometric wavelengths: sines in the first half of the width, then cosines."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32)
        phase = positions[..., None].float() * torch.exp(-math.log(10_000.0) * steps / half)
        return x + torch.cat((phase.sin(), phase.cos()), dim=-1).to(x.dtype)


@dataclass(frozen=True, eq=False)
class LinearBias:
    """−slope · distance for each head."""

    slopes: Tensor  # [H]

    def __call__(self, head: Tensor, distance: Tensor) -> Tensor:
        return -self.slopes[head] * distance


@dataclass(frozen=True, eq=False)
class TableBias:
    """A table of biases by head and distance."""

    values: Tensor  # [H, length]

    def __call__(self, head: Tensor, distance: Tensor) -> Tensor:
        return self.values[head, distance]

    def toeplitz(self, length: int) -> Tensor:
        """values[h, i − j] at [h, i, j] for j ≤ i, [H, T, T].

        It shifts rows instead of gathering, so the gradient is a sum over rows."""
        rows = self.values[:, None, :length].flip(-1).expand(-1, length, -1)
        return F.pad(rows, (1, 0)).view(-1, length + 1, length)[:, 1:]


class Bias(nn.Module):
    """The score bias of each head as a function of the distance from query to key."""

    heads: int

    def forward(self, length: int) -> LinearBias | TableBias:
        """The function, for distances below `length`."""
        raise NotImplementedError


class AlibiBias(Bias):
    """−slope · distance, with slopes in a geometric series (Press et al. 2022)."""

    slopes: Tensor

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

    def forward(self, length: int) -> LinearBias:
        return LinearBias(self.slopes)


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n a power of two; other counts add every second slope of 2n."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return slopes + between


class T5Bias(Bias):
    """A learned bias per head and distance bucket; buckets are exact near and logarithmic far."""

    def __init__(self, heads: int, buckets: int, max_distance: int):
        super().__init__()
        self.heads, self.buckets, self.max_distance = heads, buckets, max_distance
        self.table = nn.Embedding(buckets, heads)

    def forward(self, length: int) -> TableBias:
        distance = torch.arange(length, device=self.table.weight.device)
        return TableBias(self.table(self.bucket(distance)).T)

    def bucket(self, distance: Tensor) -> Tensor:
        exact = self.buckets // 2
        distance = distance.clamp(min=0)
        ratio = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        far = exact + (ratio * (self.buckets - exact)).long()
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))


class Alibi(Position):
    def __init__(self, heads: int):
        super().__init__()
        self.bias = AlibiBias(heads)


class T5(Position):
    def __init__(self, heads: int, buckets: int, max_distance: int):
        super().__init__()
        self.bias = T5Bias(heads, buckets, max_distance)


@dataclass(frozen=True, eq=False)
class PlacedBias:
    """A bias with the cache slots of one call's queries and keys.

    Slots, not position ids: left padding shifts queries and keys alike and changes no distance."""

    function: LinearBias | TableBias
    heads: int
    query_index: Tensor  # [Q]
    key_index: Tensor  # [K]
    blocks: Any = None  # FlexAttention's causal block mask, made once for all layers

    def tensor(self, rows: slice = slice(None)) -> Tensor:
        """The bias of these query rows, [1, H, rows, K]; a future key counts as distance 0."""
        distance = (self.query_index[rows][:, None] - self.key_index).clamp(min=0)
        head = torch.arange(self.heads, device=distance.device)
        return self.function(head[:, None, None], distance)[None]

    def score_mod(self, length: int) -> Callable[..., Tensor]:
        """The same for FlexAttention, for queries and keys in the same slots.

        FlexAttention accumulates the gradient of every score into its source, one at a time. For a
        trainable table, a Toeplitz matrix spreads them out; without it a step is 14 times slower.
        """
        function = self.function
        if isinstance(function, TableBias) and function.values.requires_grad:
            matrix = function.toeplitz(length)
            return lambda score, batch, head, row, column: score + matrix[head, row, column]
        return lambda score, batch, head, row, column: (
            score + function(head, (row - column).clamp(min=0))
        )
