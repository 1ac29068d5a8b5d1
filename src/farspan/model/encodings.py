"""The open protocol of position encodings, encodings written with it, and all of them by name.

An encoding of the protocol is a class with three methods, each of them optional: `embed`, `rotate`
and `scores`. FIRE, KERPLE, contextual positions and randomized positions are such classes, and so
are the encodings that users bring in a file of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farspan.custom_code import imported
from farspan.errors import FarspanError
from farspan.model.positions import (
    T5,
    Alibi,
    Learned,
    NoPE,
    Position,
    Rope,
    Sinusoidal,
)


class Encoding(Position):
    """The protocol. A subclass takes the model's config and defines any of the three methods.

    B texts, H heads, Q queries, K keys, D dimensions of a head. One instance serves all layers. Its
    parameters are trained; they and its persistent buffers are saved with the model.
    """

    # Whether it draws random numbers. Then models train one at a time and run without a cache.
    random = False

    def __init__(self, config):
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """The embeddings x [B, Q, width] with what the encoding adds at positions [B or 1, Q]."""
        return x

    def rotate(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and new keys [B, heads, tokens, D] as attention shall see them.

        The positions are [B or 1, tokens] of each."""
        return q, k

    def scores(
        self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor
    ) -> Tensor | None:
        """What is added to the scores q·k: broadcastable to [B, H, Q, K].

        q [B, H, Q, D] is multiplied by the scale of the scores; k is [B, H, K, D]. The positions
        are [Q] and [K]. Later keys are masked afterwards, so their scores may be any finite
        number."""
        return None

    @property
    def adds_scores(self) -> bool:
        return type(self).scores is not Encoding.scores


def adds_scores(kind: str, custom: Mapping[str, str]) -> bool:
    """Whether an encoding adds to the scores, by its class alone."""
    if kind in ("alibi", "t5"):
        return True
    cls = encoding_class(kind, custom)
    return cls is not None and cls.scores is not Encoding.scores


def rotate_by(encoding: Encoding, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys as an encoding rotates them, at the positions of the keys."""
    rotated: Any = encoding.rotate(q, k, positions[:, -q.shape[2] :], positions)
    if not isinstance(rotated, tuple | list) or len(rotated) != 2:
        raise FarspanError(
            f"rotate of {type(encoding).__name__} returned a {type(rotated).__name__}; return "
            "queries and keys, two tensors"
        )
    return rotated[0], rotated[1]


@dataclass(frozen=True, eq=False)
class PlacedEncoding:
    """An encoding's term of the scores with the cache slots of one call's queries and keys."""

    encoding: Encoding
    query_index: Tensor  # [Q]
    key_index: Tensor  # [K]
    q: Tensor | None = None  # [B, H, Q, D], times the scale of the scores; set by the layer
    k: Tensor | None = None  # [B, KV, K, D]
    function: None = None  # it is no function of the distance alone
    blocks: None = None

    def bind(self, q: Tensor, k: Tensor) -> PlacedEncoding:
        """The same for the queries and keys of one layer."""
        return replace(self, q=q, k=k)

    def tensor(self, rows: slice = slice(None)) -> Tensor:
        """The term of these query rows, [B or 1, H, rows, K]."""
        assert self.q is not None
        assert self.k is not None
        q, k = self.q[:, :, rows], self.k
        if k.shape[1] != q.shape[1]:  # heads that share a key
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        term = self.encoding.scores(q, k, self.query_index[rows], self.key_index)
        shape = (q.shape[1], q.shape[2], k.shape[2])
        if not isinstance(term, Tensor):
            raise FarspanError(
                f"scores of {type(self.encoding).__name__} returned {term!r}; return a tensor of "
                f"shape {shape}, or leave the method out"
            )
        term = term.view((1,) * (4 - term.ndim) + term.shape)
        return term.expand(-1, *shape)


class Kerple(Encoding):
    """−r1·ln(1 + r2·distance) with r1, r2 > 0 learned per head: the log kernel of Chi 2022."""

    MIN = 1e-2  # both stay at least this large, as in the code of Chi 2022

    def __init__(self, config):
        super().__init__(config)
        heads = config.num_attention_heads
        self.r1 = nn.Parameter(2 * torch.rand(heads))
        self.r2 = nn.Parameter(torch.rand(heads))

    def scores(self, q, k, q_positions, k_positions):
        distance = (q_positions[:, None] - k_positions).clamp(min=0)
        r1, r2 = (r.clamp(min=self.MIN)[:, None, None] for r in (self.r1, self.r2))
        return -r1 * torch.log1p(r2 * distance)


class Fire(Encoding):
    """MLP(ψ(i − j) / ψ(max(L, i))) with ψ(x) = ln(c·x + 1), of query i and key j (Li 2023).

    c, L and the MLP of one hidden layer are learned. The threshold L keeps short texts from being
    stretched. It starts at a quarter of the train length, as in Li 2023 (512 of 2,048).
    """

    HIDDEN = 32
    TINY = 1e-6

    def __init__(self, config):
        super().__init__(config)
        self.mlp = nn.Sequential(
            nn.Linear(1, self.HIDDEN), nn.ReLU(), nn.Linear(self.HIDDEN, config.num_attention_heads)
        )
        self.c = nn.Parameter(torch.tensor(0.1))
        # L is learned as a multiple of its start, so that it moves as fast as other parameters.
        self.register_buffer("start", torch.tensor(config.max_position_embeddings / 4))
        self.multiple = nn.Parameter(torch.tensor(1.0))

    def scores(self, q, k, q_positions, k_positions):
        start: Any = self.start  # mypy takes a buffer for a module
        distance = (q_positions[:, None] - k_positions).clamp(min=0).to(start.dtype)
        furthest = q_positions.to(start.dtype).maximum((self.multiple * start).abs())
        ratio = self._compress(distance) / (self._compress(furthest)[:, None] + self.TINY)
        with torch.autocast(q.device.type, enabled=False):  # bf16 would merge neighbors
            return self.mlp(ratio[..., None]).movedim(-1, 0)

    def _compress(self, distance: Tensor) -> Tensor:
        return torch.log1p((self.c * distance).abs())


class Cope(Encoding):
    """Contextual positions (Golovneva 2024): key j of query i is at p = Σ σ(q·k) over keys j … i.

    The term is q·e[p], interpolated between learned vectors of whole positions up to a maximum. One
    table serves all layers and heads.
    """

    POSITIONS = 64

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(self.POSITIONS, config.head_dim))

    def scores(self, q, k, q_positions, k_positions):
        scores = q @ k.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # gates add up
        gates = scores.sigmoid().masked_fill(k_positions > q_positions[:, None], 0)
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.POSITIONS - 1)
        below = position.floor()
        products = (q @ self.table.T).to(scores.dtype)  # [B, H, Q, positions]
        low = products.gather(-1, below.long())
        high = products.gather(-1, position.ceil().long())
        return low.lerp(high, position - below)


class Randomized(Encoding):
    """Sinusoidal positions at n of N places, drawn anew for every training batch (Ruoss 2023).

    A model that has seen places from the whole range during training meets no new one in a longer
    text. Texts are evaluated at a fixed draw of places, one for each row of `position_table`: where
    a token is depends neither on padding nor on later tokens, so teacher forcing and greedy
    decoding agree. A longer text has a draw of its own, by its number of tokens.
    """

    PLACES = 2048
    random = True

    def __init__(self, config):
        super().__init__(config)
        self.waves, self.table = Sinusoidal(), config.position_table
        self.places = max(self.PLACES, 4 * self.table)

    def embed(self, x, positions):
        count = x.shape[1]
        if count > self.places:
            raise FarspanError(
                f"randomized positions have {self.places:,} places, and the text has {count:,} "
                "tokens; shorten it, or train with a larger position_table"
            )
        if self.training:
            drawn = torch.rand(self.places, device=x.device).topk(count).indices.sort().values
        else:
            fixed = _fixed_places(max(count, self.table), self.places)
            drawn = torch.from_numpy(fixed).to(x.device)
        return self.waves.embed(x, drawn[positions])


@functools.lru_cache(maxsize=256)
def _fixed_places(count: int, places: int) -> np.ndarray:
    return np.sort(np.random.default_rng(count).choice(places, count, replace=False))


BUILT_IN: dict[str, type[Encoding]] = {
    "kerple": Kerple,
    "fire": Fire,
    "cope": Cope,
    "randomized": Randomized,
}


def encoding_class(kind: str, custom: Mapping[str, str]) -> type[Encoding] | None:
    """The class of an encoding of the protocol; None for the encodings of `positions.py`."""
    if kind not in custom:
        return BUILT_IN.get(kind)
    key = f"the encoding {kind}"
    cls = imported(custom[kind], key)
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise FarspanError(
            f"{key} is {custom[kind]!r}, which is no class of encodings; let it inherit from "
            "farspan.model.encodings.Encoding"
        )
    return cls


def build_position(kind: str, config) -> Position:
    """Build the position encoding of this name for a farspan config."""
    if (cls := encoding_class(kind, config.custom_encodings)) is not None:
        encoding = cls(config)
        for module in encoding.modules():  # transformers would initialize them by its own rules
            module._is_hf_initialized = True  # type: ignore[assignment]
        return encoding
    if kind == "rope":
        return Rope(config)
    if kind == "alibi":
        return Alibi(config.num_attention_heads)
    if kind == "t5":
        return T5(config.num_attention_heads, config.t5_buckets, config.t5_max_distance)
    if kind == "learned":
        return Learned(config.position_table, config.hidden_size)
    return Sinusoidal() if kind == "sinusoidal" else NoPE()
