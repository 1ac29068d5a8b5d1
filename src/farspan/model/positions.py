"""Every way a model can be told where a token stands, behind one interface of three no-ops.

A position encoding may change the embeddings (learned, sinusoidal), turn queries and keys (rope), or add a
bias to the scores (alibi, t5). `NoPE` does none of these, and that is the point.
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

PER_LAYER = ("none", "rope", "alibi", "t5")
MODEL_WIDE = ("learned", "sinusoidal")

Angles = tuple[Tensor, Tensor]


class Position(nn.Module):
    """One encoding, shared by all layers that use it."""

    bias: Bias | None

    def __init__(self):
        super().__init__()
        self.bias = None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, Q, d] with positions [B, Q] written into it."""
        return x

    def angles(self, x: Tensor, positions: Tensor) -> Angles | None:
        """What `rotate` needs, computed once a forward pass for all layers."""
        return None


class NoPE(Position):
    """No position encoding: order reaches the model through the causal mask alone."""


class Rope(Position):
    """Rotary encoding in every form that Hugging Face's `rope_parameters` can name (PI, NTK, YaRN, …)."""

    def __init__(self, config):
        super().__init__()
        # GPT-NeoX's is the one that honours a rotary fraction; the frequencies are the same everywhere.
        self.rotary_emb = GPTNeoXRotaryEmbedding(config)

    def angles(self, x: Tensor, positions: Tensor) -> Angles:
        return self.rotary_emb(x, positions)


def rotate(q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Turn the first dimensions of q and k [B, H, Q, D] by angles [B, Q, R]; the other D − R pass unturned. Queries
    may be fewer than keys: those of the last positions."""
    cos, sin = (part.unsqueeze(1) for part in angles)
    last = slice(k.shape[2] - q.shape[2], None)
    return _turn(q, cos[:, :, last], sin[:, :, last]), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-right, left), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Learned(Position):
    """One trained vector a position. Rows beyond the training length exist only if the table was made longer,
    and then they are untrained."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(length, width)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class Sinusoidal(Position):
    """Fixed waves of geometric wavelengths: sine in the first half of the width, cosine in the second."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32)
        phase = positions[..., None].float() * torch.exp(-math.log(10_000.0) * steps / half)
        return x + torch.cat((phase.sin(), phase.cos()), dim=-1).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Slopes:
    """−slope · distance for each head, in closed form."""

    values: Tensor  # [H]

    def __call__(self, head: Tensor, distance: Tensor) -> Tensor:
        return -self.values[head] * distance


@dataclass(frozen=True, eq=False)
class Table:
    """A number for each head and distance."""

    values: Tensor  # [H, reach]

    def __call__(self, head: Tensor, distance: Tensor) -> Tensor:
        return self.values[head, distance]

    def square(self, length: int) -> Tensor:
        """values[h, i − j] at [h, i, j] for j ≤ i, [H, T, T]. Rows are shifted and nothing is gathered, so that its
        gradient is a sum over rows."""
        rows = self.values[:, None, :length].flip(-1).expand(-1, length, -1)
        return F.pad(rows, (1, 0)).view(-1, length + 1, length)[:, 1:]


class Bias(nn.Module):
    """What each head adds to the score of a query and a key, as a function of the distance between the two."""

    heads: int

    def forward(self, reach: int) -> Slopes | Table:
        """The function, for distances below `reach`."""
        raise NotImplementedError


class AlibiBias(Bias):
    """−slope · distance, with the slopes of a geometric series (Press et al.)."""

    slopes: Tensor

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)), persistent=False)

    def forward(self, reach: int) -> Slopes:
        return Slopes(self.slopes)


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n a power of two; other counts fill up with every second slope of 2n."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return slopes + between


class T5Bias(Bias):
    """A learned number for each head and each bucket of distance: exact when near, logarithmic when far."""

    def __init__(self, heads: int, buckets: int, max_distance: int):
        super().__init__()
        self.heads, self.buckets, self.max_distance = heads, buckets, max_distance
        self.table = nn.Embedding(buckets, heads)

    def forward(self, reach: int) -> Table:
        return Table(self.table(self.bucket(torch.arange(reach, device=self.table.weight.device))).T)

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
    """A bias together with the cache slots that this call's queries and keys stand in. Slots and not position ids: left
    padding shifts both, and so changes nothing."""

    at: Slopes | Table
    heads: int
    query_index: Tensor  # [Q]
    key_index: Tensor  # [K]
    blocks: Any = None  # FlexAttention's map of the causal triangle, made once for all layers

    def tensor(self, rows: slice = slice(None)) -> Tensor:
        """The bias of the given query rows, [1, H, rows, K]; a key that comes after counts as distance 0."""
        distance = (self.query_index[rows][:, None] - self.key_index).clamp(min=0)
        head = torch.arange(self.heads, device=distance.device)
        return self.at(head[:, None, None], distance)[None]

    def score_mod(self, length: int) -> Callable[..., Tensor]:
        """The same for FlexAttention, where queries and keys stand in the same slots.

        FlexAttention adds the gradient of every score to what it was made of, one at a time. Where a table learns, a
        square spreads them over as many places; adding to the table itself made a step fourteen times slower.
        """
        at = self.at
        if isinstance(at, Table) and at.values.requires_grad:
            square = at.square(length)
            return lambda score, batch, head, row, column: score + square[head, row, column]
        return lambda score, batch, head, row, column: score + at(head, (row - column).clamp(min=0))


def build(kind: str, config) -> Position:
    """The encoding of that name for a farspan config."""
    if kind == "rope":
        return Rope(config)
    if kind == "alibi":
        return Alibi(config.num_attention_heads)
    if kind == "t5":
        return T5(config.num_attention_heads, config.t5_buckets, config.t5_max_distance)
    if kind == "learned":
        return Learned(config.position_table, config.hidden_size)
    return Sinusoidal() if kind == "sinusoidal" else NoPE()
