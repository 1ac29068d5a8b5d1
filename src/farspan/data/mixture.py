"""A weighted mixture of windows as a pure function of the row number.

Nothing is remembered between rows: to resume takes a number, and any processes can share the rows among them. Rows
come in blocks of 1,000 in which every source has its exact quota; the n-th row of a source is the n-th window of its
epochs, each a fresh shuffle of a fresh tiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from farspan.data.passkey import Passkeys, train_key
from farspan.data.shards import Shards
from farspan.errors import FarspanError

BLOCK = 1_000  # rows in which sources are shuffled
PERIOD = 1_000  # blocks after which quotas repeat: shares are counted in millionths
SOURCES, EPOCHS, TREATMENTS, PASSKEYS = range(1, 5)  # what a generator is for, so that no two are alike

Value = TypeVar("Value")


@dataclass(frozen=True)
class Source:
    name: str
    shards: Shards
    weight: float


@dataclass(frozen=True)
class Origin:
    """Where the text of a row comes from: `start` counts tokens of the source's packed stream."""

    source: str
    epoch: int
    start: int
    passkey: bool


class Mixture:
    """Rows of `length` + 1 tokens: inputs are row[:-1] and targets row[1:].

    Windows tile the packed stream, or, with `inside`, lie each inside one document. The share `passkey_share` of all
    rows, whatever their source, begins with a passkey document.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        length: int,
        seed: int,
        *,
        inside: bool = False,
        passkeys: Passkeys | None = None,
        passkey_share: float = 0.0,
    ):
        _check(sources, length, passkeys, passkey_share)
        self.sources, self.length, self.seed = tuple(sources), length, seed
        self.passkeys, self.passkey_share = passkeys, passkey_share
        self._tilings = [_Tiling(source, length, inside, (seed, number)) for number, source in enumerate(self.sources)]
        weights = [source.weight for source in self.sources]
        self._sources = _Lots(_millionths(weights, [source.name for source in self.sources]), (SOURCES, seed))
        treatments = _millionths([1 - passkey_share, passkey_share])
        self._treatments = _Lots(treatments, (TREATMENTS, seed))

    def row(self, index: int) -> np.ndarray:
        """[length + 1] int64."""
        number, _, start = self._window(index)
        text = self.sources[number].shards.read(start, self.length + 1)
        opening = self._opening(index)
        return np.concatenate([opening, text[: len(text) - len(opening)]])

    def rows(self, start: int, count: int) -> Tensor:
        """[count, length + 1] int64: the rows from `start` on."""
        result = np.empty((count, self.length + 1), np.int64)
        for number in range(count):
            result[number] = self.row(start + number)
        return torch.from_numpy(result)

    def origin(self, index: int) -> Origin:
        number, epoch, start = self._window(index)
        return Origin(self.sources[number].name, epoch, start, self._has_passkey(index))

    def documents(self, index: int) -> np.ndarray:
        """The number, from 0 on, of the document that each token of the row belongs to: [length + 1] int64."""
        number, _, start = self._window(index)
        ends = self.sources[number].shards.ends
        of_text = np.searchsorted(ends, np.arange(start, start + self.length + 1), side="right")
        of_text -= of_text[0]
        opening = len(self._opening(index))
        if not opening:
            return of_text
        return np.concatenate([np.zeros(opening, np.int64), 1 + of_text[: len(of_text) - opening]])

    def _window(self, index: int) -> tuple[int, int, int]:
        """The number of the row's source, the epoch it is in, and the start of its window."""
        number, ordinal = self._sources.draw(index)
        return number, *self._tilings[number].window(ordinal)

    def _has_passkey(self, index: int) -> bool:
        return self._treatments.draw(index)[0] == 1

    def _opening(self, index: int) -> np.ndarray:
        """The passkey document and the end of text that the row begins with, or nothing."""
        if self.passkeys is None or not self._has_passkey(index):
            return np.empty(0, np.int64)
        generator = np.random.default_rng((PASSKEYS, self.seed, index))
        length = int(generator.integers(self.passkeys.shortest, self.length + 1))
        document = self.passkeys.document(length, generator.random(), train_key(generator))
        return np.array([*document, self.sources[0].shards.eos])


class _Tiling:
    """The windows of one source, epoch by epoch: each once, in an order and at a phase of the epoch's own.

    A span is what windows may not leave: a document, or the whole stream. Neighbouring windows of a span share one
    token, the last target of one and the first input of the next, so that every token is a target once.
    """

    def __init__(self, source: Source, length: int, inside: bool, key: tuple[int, int]):
        stream = source.shards.tokens
        ends = source.shards.ends if inside else np.array([stream])
        begins = np.concatenate([[0], ends[:-1]])
        counts = (ends - begins - 1) // length
        if not counts.any():
            longest = int((ends - begins).max())
            what = "in its longest document" if inside else "in all"
            raise FarspanError(
                f"{source.name} has {longest} tokens {what} and a row takes {length + 1}; "
                f"give longer text, or ask for a length of {max(longest - 1, 1)} or less"
            )
        if not inside:  # one window less, where there are two, leaves room for every phase below the length
            counts = np.maximum(ends // length - 1, 1)
        begins, ends, counts = (array[counts > 0] for array in (begins, ends, counts))
        self._begins, self._counts = begins, counts
        self._phases = np.minimum(ends - begins - counts * length, length)  # how many each span can choose from
        self._steps = length * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        self._key = key
        self._epochs: dict[int, np.ndarray] = {}

    def window(self, ordinal: int) -> tuple[int, int]:
        """The epoch of the source's row number `ordinal`, and where its window starts."""
        epoch, place = divmod(ordinal, len(self._steps))
        return epoch, int(_kept(self._epochs, epoch, self._starts)[place])

    def _starts(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng((EPOCHS, *self._key, epoch))
        starts = np.repeat(self._begins + generator.integers(0, self._phases), self._counts) + self._steps
        generator.shuffle(starts)
        return starts


class _Lots:
    """Which of several kinds each row is, by quotas in every block, and how many of its kind came before it."""

    def __init__(self, millionths: list[int], key: tuple[int, int]):
        self._taken = _taken(millionths)
        self._key = key
        self._blocks: dict[int, tuple[list[int], list[int]]] = {}

    def draw(self, index: int) -> tuple[int, int]:
        block, place = divmod(index, BLOCK)
        kinds, ordinals = _kept(self._blocks, block, self._block)
        return kinds[place], ordinals[place]

    def _block(self, block: int) -> tuple[list[int], list[int]]:
        period, place = divmod(block, PERIOD)
        before = period * self._taken[-1] + self._taken[place]
        quotas = self._taken[place + 1] - self._taken[place]
        kinds = np.random.default_rng((*self._key, block)).permutation(np.repeat(np.arange(len(quotas)), quotas))
        ordinals = np.empty(BLOCK, np.int64)
        for kind, quota in enumerate(quotas):
            ordinals[kinds == kind] = before[kind] + np.arange(quota)
        return kinds.tolist(), ordinals.tolist()


def _taken(millionths: list[int]) -> np.ndarray:
    """How many rows each kind has after 0, 1, …, PERIOD blocks: [PERIOD + 1, kinds], never one row off its share.

    Whole rows a block are given; what is left over goes by Balinski and Young's quota method, which never takes back
    what it gave: of the kinds that are behind their share, the one whose next row is due first.
    """
    whole, parts = np.divmod(millionths, PERIOD)
    parts, extras = parts.tolist(), [0] * len(parts)
    slots = sum(parts) // PERIOD  # left over in each block
    total = slots * PERIOD  # parts of it are the shares of what is left over
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
    """Weights as whole millionths of their sum, which add up to a million: the largest remainders are rounded up."""
    exact = np.array(weights) / math.fsum(weights) * BLOCK * PERIOD
    result = np.floor(exact).astype(np.int64)
    left = BLOCK * PERIOD - int(result.sum())
    result[np.argsort(result - exact, kind="stable")[:left]] += 1
    for name, part in zip(names, result, strict=False):
        if part == 0:
            raise FarspanError(f"the weight of {name} is below a millionth of all weights; raise it, or leave it out")
    return result.tolist()


def _kept(cache: dict[int, Value], key: int, make: Callable[[int], Value]) -> Value:
    """make(key), of which the last two are kept. Threads may both make one; none sees another's half."""
    value = cache.get(key)
    if value is None:
        value = make(key)
        for old in list(cache)[:-1]:
            cache.pop(old, None)
        cache[key] = value
    return value


def _check(sources: Sequence[Source], length: int, passkeys: Passkeys | None, passkey_share: float) -> None:
    if not sources:
        raise FarspanError("a mixture needs text; give one source or more")
    if length < 1:
        raise FarspanError(f"a length of {length} tokens leaves nothing to predict; ask for 1 or more")
    for source in sources:
        if not (math.isfinite(source.weight) and source.weight > 0):
            raise FarspanError(f"the weight of {source.name} is {source.weight}; give a number greater than 0")
        if source.shards.fingerprint != sources[0].shards.fingerprint:
            raise FarspanError(
                f"{source.name} and {sources[0].name} were packed with different tokenizers "
                f"({source.shards.fingerprint[:12]} and {sources[0].shards.fingerprint[:12]}); pack them with one"
            )
    if not 0 <= passkey_share <= 1:
        raise FarspanError(f"a passkey share of {passkey_share} is no share of the rows; give a number from 0 to 1")
    if passkey_share and passkeys is None:
        raise FarspanError(f"a passkey share of {passkey_share} needs passkeys; give Passkeys(tokenizer)")
    if passkeys is not None and passkeys.fingerprint != sources[0].shards.fingerprint:
        raise FarspanError(
            f"the passkeys are in the tokens of {passkeys.fingerprint[:12]} and {sources[0].name} was packed with "
            f"{sources[0].shards.fingerprint[:12]}; use one tokenizer for both"
        )
    if passkey_share and passkeys is not None and passkeys.shortest > length:
        raise FarspanError(
            f"a row of {length} tokens has no room for a passkey document, which takes {passkeys.shortest}; "
            "ask for longer rows, or leave passkeys out with data.passkey=0"
        )
