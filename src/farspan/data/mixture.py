"""A weighted mixture of text sources, as a pure function of the row number.

No state is kept between rows: a row number is enough to resume, and processes can share the rows in
any way. Rows come in blocks of 1,000, in which every source has its exact quota. The n-th row of a
source is the n-th window of its epochs; every epoch tiles the text anew and shuffles the windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from farspan.data.passkey import PasskeyDocuments, train_key
from farspan.data.shards import Shards
from farspan.errors import FarspanError

BLOCK = 1_000  # rows in which sources are shuffled
PERIOD = 1_000  # blocks after which quotas repeat: shares are counted in millionths
# The first part of every random seed, so that no two uses draw the same numbers.
SOURCES, EPOCHS, PASSKEY_ROWS, PASSKEYS = range(1, 5)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Source:
    name: str
    shards: Shards
    weight: float


class Mixture:
    """Rows of `length` + 1 tokens: the inputs are row[:-1] and the targets row[1:].

    inside: every window lies inside one document; otherwise windows tile the packed stream.
    passkey_share: the share of rows, of any source, that begin with a passkey document.
    passkey_length: of the longest passkey document; 0: the length of a row.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        length: int,
        seed: int,
        *,
        inside: bool = False,
        passkeys: PasskeyDocuments | None = None,
        passkey_share: float = 0.0,
        passkey_length: int = 0,
    ):
        _check_sources(sources, length)
        passkey_length = min(passkey_length or length, length)
        _check_passkeys(sources[0], passkey_length, passkeys, passkey_share)
        self.sources, self.length, self.seed = tuple(sources), length, seed
        self.passkeys, self.passkey_share = passkeys, passkey_share
        self.passkey_length = passkey_length
        self._tilings = [
            _Tiling(source, length, inside, (seed, number))
            for number, source in enumerate(self.sources)
        ]
        weights = [source.weight for source in self.sources]
        names = [source.name for source in self.sources]
        self._source_of_row = _QuotaSampler(_millionths(weights, names), (SOURCES, seed))
        shares = _millionths([1 - passkey_share, passkey_share])
        self._has_passkey = _QuotaSampler(shares, (PASSKEY_ROWS, seed))

    def row(self, index: int) -> np.ndarray:
        """[length + 1] int64."""
        number, ordinal = self._source_of_row.draw(index)
        start = self._tilings[number].start(ordinal)
        text = self.sources[number].shards.read(start, self.length + 1)
        prefix = self._passkey_prefix(index)
        return np.concatenate([prefix, text[: len(text) - len(prefix)]])

    def rows(self, start: int, count: int) -> Tensor:
        """`count` rows from number `start` on: [count, length + 1] int64."""
        rows = np.empty((count, self.length + 1), np.int64)
        for number in range(count):
            rows[number] = self.row(start + number)
        return torch.from_numpy(rows)

    def rows_before_repetition(self, count: int) -> int:
        """How many of the first `count` rows precede the first one of a second epoch."""
        for index in range(count):
            number, ordinal = self._source_of_row.draw(index)
            if ordinal >= self._tilings[number].windows:
                return index
        return count

    def _passkey_prefix(self, index: int) -> np.ndarray:
        """The row's passkey document and an end-of-text token; empty for a row without one."""
        if self.passkeys is None or self._has_passkey.draw(index)[0] == 0:
            return np.empty(0, np.int64)
        generator = np.random.default_rng((PASSKEYS, self.seed, index))
        length = int(generator.integers(self.passkeys.shortest, self.passkey_length + 1))
        document = self.passkeys.document(length, generator.random(), train_key(generator))
        return np.array([*document, self.sources[0].shards.eos])


class _Tiling:
    """The windows of one source: every epoch has all of them once, in a new order and phase.

    Windows stay inside a span: a document, or the whole stream. Neighboring windows of a span share
    one token, the last target of one and the first input of the next, so that every token is a
    target once.
    """

    def __init__(self, source: Source, length: int, inside: bool, key: tuple[int, int]):
        ends = source.shards.ends if inside else np.array([source.shards.tokens])
        begins = np.concatenate([[0], ends[:-1]])
        counts = (ends - begins - 1) // length
        if not counts.any():
            longest = int((ends - begins).max())
            where = "in its longest document" if inside else "in total"
            raise FarspanError(
                f"{source.name} has {longest} tokens {where} and a row takes {length + 1}; "
                f"use longer text, or a length of at most {max(longest - 1, 1)}"
            )
        if not inside:  # one window less, if there are two, leaves room for every phase
            counts = np.maximum(ends // length - 1, 1)
        begins, ends, counts = (array[counts > 0] for array in (begins, ends, counts))
        self._begins, self._counts = begins, counts
        self._phases = np.minimum(ends - begins - counts * length, length)  # choices of each span
        self._steps = length * (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        )
        self._key = key
        self._epochs: dict[int, np.ndarray] = {}

    @property
    def windows(self) -> int:
        """The number of windows of an epoch."""
        return len(self._steps)

    def start(self, ordinal: int) -> int:
        """The start of the window of the source's row number `ordinal`."""
        epoch, index = divmod(ordinal, self.windows)
        return int(_cached(self._epochs, epoch, self._shuffled_starts)[index])

    def _shuffled_starts(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng((EPOCHS, *self._key, epoch))
        first = self._begins + generator.integers(0, self._phases)
        starts = np.repeat(first, self._counts) + self._steps
        generator.shuffle(starts)
        return starts


class _QuotaSampler:
    """Assigns a kind to every row, by quotas per block."""

    def __init__(self, millionths: list[int], key: tuple[int, int]):
        self._cumulative = _cumulative_quotas(millionths)
        self._key = key
        self._blocks: dict[int, tuple[list[int], list[int]]] = {}

    def draw(self, index: int) -> tuple[int, int]:
        """The kind of a row, and how many rows of its kind come before it."""
        block, offset = divmod(index, BLOCK)
        kinds, ordinals = _cached(self._blocks, block, self._draw_block)
        return kinds[offset], ordinals[offset]

    def _draw_block(self, block: int) -> tuple[list[int], list[int]]:
        period, offset = divmod(block, PERIOD)
        before = period * self._cumulative[-1] + self._cumulative[offset]
        quotas = self._cumulative[offset + 1] - self._cumulative[offset]
        kinds = np.random.default_rng((*self._key, block)).permutation(
            np.repeat(np.arange(len(quotas)), quotas)
        )
        ordinals = np.empty(BLOCK, np.int64)
        for kind, quota in enumerate(quotas):
            ordinals[kinds == kind] = before[kind] + np.arange(quota)
        return kinds.tolist(), ordinals.tolist()


def _cumulative_quotas(millionths: list[int]) -> np.ndarray:
    """Rows of each kind after 0, 1, …, PERIOD blocks, always within one row of the exact share.

    Every kind gets its whole rows per block. The remaining rows follow Balinski and Young's quota
    method, which never takes a row back: of the kinds below their share, the one whose next row is
    due first gets it. Shape: [PERIOD + 1, kinds].
    """
    whole, parts = np.divmod(millionths, PERIOD)
    parts, extras = parts.tolist(), [0] * len(parts)
    slots = sum(parts) // PERIOD  # remaining rows in each block
    total = slots * PERIOD  # parts of it are the shares of the remaining rows
    table = [list(extras)]
    for slot in range(1, total + 1):
        behind = [kind for kind, part in enumerate(parts) if extras[kind] * total < part * slot]
        extras[min(behind, key=lambda kind: (extras[kind] + 1) / parts[kind])] += 1
        if slot % slots == 0:
            table.append(list(extras))
    if not slots:
        table *= PERIOD + 1
    return np.array(table) + np.arange(PERIOD + 1)[:, None] * whole


def _millionths(weights: list[float], names: Sequence[str] = ()) -> list[int]:
    """Weights as whole millionths of their sum; the largest remainders are rounded up."""
    exact = np.array(weights) / math.fsum(weights) * BLOCK * PERIOD
    parts = np.floor(exact).astype(np.int64)
    remaining = BLOCK * PERIOD - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[:remaining]] += 1
    for name, part in zip(names, parts, strict=False):
        if part == 0:
            raise FarspanError(
                f"the weight of {name} is below a millionth of all weights; "
                "raise it, or remove the source"
            )
    return parts.tolist()


def _cached(cache: dict[int, Value], key: int, make: Callable[[int], Value]) -> Value:
    """make(key), with the last two values cached. Threads may repeat work but see whole values."""
    value = cache.get(key)
    if value is None:
        value = make(key)
        for old in list(cache)[:-1]:
            cache.pop(old, None)
        cache[key] = value
    return value


def _check_sources(sources: Sequence[Source], length: int) -> None:
    if not sources:
        raise FarspanError("a mixture needs text; give at least one source")
    if length < 1:
        raise FarspanError(
            f"a length of {length} tokens leaves nothing to predict; use a length of at least 1"
        )
    for source in sources:
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise FarspanError(
                f"the weight of {source.name} is {source.weight}; use a number greater than 0"
            )
        if source.shards.fingerprint != sources[0].shards.fingerprint:
            raise FarspanError(
                f"{source.name} and {sources[0].name} were packed with different tokenizers "
                f"({source.shards.fingerprint[:12]} and {sources[0].shards.fingerprint[:12]}); "
                "pack them with the same one"
            )


def _check_passkeys(
    source: Source, length: int, passkeys: PasskeyDocuments | None, passkey_share: float
) -> None:
    if not 0 <= passkey_share <= 1:
        raise FarspanError(
            f"a passkey share of {passkey_share} is out of range; use a number from 0 to 1"
        )
    if passkey_share and passkeys is None:
        raise FarspanError(
            f"a passkey share of {passkey_share} needs passkeys; give PasskeyDocuments(tokenizer)"
        )
    if passkeys is not None and passkeys.fingerprint != source.shards.fingerprint:
        raise FarspanError(
            f"the passkeys use the tokenizer {passkeys.fingerprint[:12]} and {source.name} was "
            f"packed with {source.shards.fingerprint[:12]}; use one tokenizer for both"
        )
    if passkey_share and passkeys is not None and passkeys.shortest > length:
        raise FarspanError(
            f"a row of {length} tokens has no room for a passkey document, which takes "
            f"{passkeys.shortest}; use longer rows, or disable passkeys with data.passkey=0"
        )
