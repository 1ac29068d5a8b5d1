"""Cut documents into windows of tokens, and record which documents were used or skipped.

A window lies inside one document. Where short documents are joined, they follow one another, each
with an end-of-text token behind it, and windows tile this stream.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan.data.documents import Document
from farspan.data.tokens import WORD_BOUNDARY
from farspan.errors import FarspanError

BATCH = 64  # documents that are tokenized together
CHARACTERS_PER_TOKEN = 6  # a generous guess, doubled where it falls short


@dataclass(frozen=True, eq=False)
class Windows:
    """Token ids [windows, length], and for the record what was used and what was skipped."""

    ids: Tensor
    # document, tokens that were read, start of each window, and how many documents are joined
    used: tuple[dict[str, Any], ...]
    skipped: tuple[dict[str, Any], ...]  # document, its tokens, why

    @property
    def documents(self) -> list[int]:
        """The number of the document of each window; documents take turns."""
        counts = [len(entry["starts"]) for entry in self.used]
        turns = range(max(counts))
        return [number for turn in turns for number, count in enumerate(counts) if turn < count]

    def starting_with(self, tokens: Sequence[int]) -> Windows:
        """These windows with tokens in front of each."""
        return replace(self, ids=prepend(self.ids, tokens))

    def describe(self) -> dict[str, Any]:
        return {
            "windows": len(self.ids),
            "length": self.ids.shape[1],
            "used": list(self.used),
            "skipped": list(self.skipped),
        }


def prepend(rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """Rows [B, T] with the same tokens in front of each."""
    front = torch.tensor(tokens, dtype=rows.dtype, device=rows.device)
    return torch.cat((front.expand(len(rows), -1), rows), 1) if len(front) else rows


def cut_windows(
    documents: Iterable[Document],
    tokenizer: Any,
    length: int,
    limit: int,
    *,
    join_short: bool = False,
    begin: Sequence[int] = (),
) -> Windows:
    """Up to `limit` windows of `length` tokens: the first of every document, then the second, etc.

    begin: tokens in front of every window, which count in its length.
    Documents shorter than a window are joined, or skipped and listed; if nothing is long enough,
    that is an error. Long documents are tokenized only as far as the windows need, so that a few
    windows from many books are fast.
    """
    length -= len(begin)
    reader = _Reader(tokenizer, length, join_short)
    reader.read(documents, limit)
    joined = reader.stream().windows(length)
    turns = 1
    while sum(len(reading.ids) // length for reading in reader.long) + len(joined) < limit:
        if all(reading.complete for reading in reader.long):
            break
        turns *= 2
        _read_tokens(reader.long, tokenizer, turns * length)
    spans = [*map(_Span.of, reader.long), *joined]
    return _cut(spans, reader.skipped(spans), length, limit).starting_with(begin)


def split_windows(
    documents: Iterable[Document],
    tokenizer: Any,
    lengths: Mapping[str, int],
    limits: Mapping[str, int],
    *,
    join_short: str | None = None,
    begin: Sequence[int] = (),
) -> dict[str, Windows]:
    """Windows for several named splits of one corpus; no two splits share a token.

    With at least three documents per split, whole documents are dealt out in turn. Otherwise every
    document is cut into one span per split, as long as the split needs; the splits that need most
    tokens share what is left. Documents that are too short are joined for the split `join_short`.
    """
    lengths = {name: length - len(begin) for name, length in lengths.items()}
    needed = {name: lengths[name] * limits[name] for name in lengths}
    reader = _Reader(tokenizer, max(lengths.values()), join_short is not None)
    reader.read(documents, sum(limits.values()))
    _read_tokens(reader.long, tokenizer, None)
    whole = [*map(_Span.of, reader.long)]
    spans: dict[str, list[_Span]] = {name: [] for name in lengths}
    if join_short is not None:
        spans[join_short] += reader.stream().windows(lengths[join_short])
    skipped = reader.skipped(spans[join_short] if join_short is not None else ())
    if len(whole) >= 3 * len(lengths):
        for number, name in enumerate(lengths):
            spans[name] += whole[number :: len(lengths)]
        return _cut_splits(spans, skipped, lengths, limits, begin)
    for span in whole:
        for name, start, size in _split_document(len(span.ids), lengths, needed):
            spans[name].append(replace(span, ids=span.ids[start : start + size], start=start))
    if not all(spans.values()):
        longest_span = max(sum(spans.values(), whole), key=lambda span: len(span.ids))
        raise FarspanError(
            f"{longest_span.document} has {len(longest_span.ids)} tokens, and windows that share "
            f"none of them take at least {sum(lengths.values())}; "
            "use longer text, or a shorter target"
        )
    return _cut_splits(spans, skipped, lengths, limits, begin)


def _cut_splits(
    spans: Mapping[str, list[_Span]],
    skipped: tuple[dict[str, Any], ...],
    lengths: Mapping[str, int],
    limits: Mapping[str, int],
    begin: Sequence[int],
) -> dict[str, Windows]:
    return {
        name: _cut(spans[name], skipped, lengths[name], limits[name]).starting_with(begin)
        for name in lengths
    }


def _split_document(
    tokens: int, lengths: Mapping[str, int], needed: Mapping[str, int]
) -> list[tuple[str, int, int]]:
    """Name, start and size of every split's span of a document; empty if it cannot hold all."""
    spans, start = [], 0
    for remaining, name in zip(
        range(len(lengths), 0, -1), sorted(lengths, key=needed.__getitem__), strict=True
    ):
        size = min(needed[name], (tokens - start) // remaining)
        if size < lengths[name]:
            return []
        spans.append((name, start, size))
        start += size
    return spans


@dataclass(frozen=True)
class _Span:
    """Consecutive tokens of a document, or of joined ones."""

    document: str
    ids: np.ndarray
    start: int  # of the first token, counted in the first document
    joined: range = range(0)  # the numbers of the short documents that it holds

    @classmethod
    def of(cls, reading: _Reading) -> _Span:
        return cls(reading.name, reading.ids, 0)


class _Reading:
    """A document that is tokenized from its beginning, only as far as needed."""

    def __init__(self, document: Document):
        self.name, self.text = document.name, document.text
        self.ids, self.complete = np.empty(0, dtype=np.int32), False

    def has(self, count: int | None) -> bool:
        """Whether `count` of its tokens are read, or all of them; None means all."""
        return self.complete or (count is not None and len(self.ids) >= count)

    def beginning(self, characters: int) -> str:
        """At least so many characters.

        Tokenizers also split between words, so a prefix that ends there has the same tokens as in
        the whole text.
        """
        boundary = WORD_BOUNDARY.search(self.text, characters)
        return self.text[: boundary.start() + 1] if boundary else self.text


def _read_tokens(readings: Sequence[_Reading], tokenizer: Any, count: int | None) -> None:
    """Read at least `count` tokens of each document, or all if it has fewer; None means all.

    Fast tokenizers encode the documents of a batch in parallel.
    """
    characters = sys.maxsize if count is None else CHARACTERS_PER_TOKEN * count
    while pending := [reading for reading in readings if not reading.has(count)]:
        for start in range(0, len(pending), BATCH):
            batch = pending[start : start + BATCH]
            texts = [reading.beginning(characters) for reading in batch]
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            for reading, text, ids in zip(batch, texts, encoded, strict=True):
                reading.ids = np.asarray(ids, dtype=np.int32)
                reading.complete = len(text) == len(reading.text)
        characters *= 2


class _Stream:
    """Short documents one after another, each with an end-of-text token behind it."""

    def __init__(self, documents: Sequence[_Reading], end: int):
        self._documents = documents
        parts = [np.append(each.ids, end) for each in documents]
        self._ids = np.concatenate([np.empty(0, dtype=np.int32), *parts]).astype(np.int32)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def windows(self, length: int) -> list[_Span]:
        """What does not fill one window goes on in the next one."""
        starts = range(0, len(self._ids) - length + 1, length)
        return [self._window(start, length) for start in starts]

    def _window(self, start: int, length: int) -> _Span:
        places = [start, start + length - 1]
        first, last = np.searchsorted(self._ends, places, side="right").tolist()
        names = dict.fromkeys(self._documents[number].name for number in (first, last))
        begin = int(self._ends[first]) - len(self._documents[first].ids) - 1
        ids = self._ids[start : start + length]
        return _Span(" to ".join(names), ids, start - begin, range(first, last + 1))


class _Reader:
    """Reads documents: long ones have at least `length` tokens, and short ones may be joined."""

    def __init__(self, tokenizer: Any, length: int, join_short: bool):
        if length < 2:
            raise FarspanError(
                f"a length of {length} tokens leaves nothing to predict; use a length of at least 2"
            )
        self.tokenizer, self.length = tokenizer, length
        self.end = tokenizer.eos_token_id if join_short else None
        self.long: list[_Reading] = []
        self.short: list[_Reading] = []
        self._tokens = 0  # of the short documents, joined

    @property
    def count(self) -> int:
        """One window of each long document, and those of the joined ones."""
        return len(self.long) + (0 if self.end is None else self._tokens // self.length)

    def read(self, documents: Iterable[Document], limit: int) -> None:
        """Read until there are `limit` windows, or no more documents."""
        remaining, longest, number = iter(documents), 0, 0
        while batch := list(map(_Reading, islice(remaining, min(BATCH, limit - self.count)))):
            _read_tokens(batch, self.tokenizer, self.length)
            for reading in batch:
                self._add(reading)
            longest = max(longest, *(len(reading.ids) for reading in batch))
            number += len(batch)
        if not self.count:
            raise FarspanError(
                f"no document has {self.length} tokens (the longest of {number} has {longest}); "
                "use longer text, or shorter lengths"
            )

    def _add(self, reading: _Reading) -> None:
        if len(reading.ids) >= self.length:
            self.long.append(reading)
        elif len(reading.ids):  # an empty document has nothing to read or to list
            self.short.append(reading)
            # The last end-of-text token counts: it can be predicted.
            self._tokens += len(reading.ids) + 1

    def stream(self) -> _Stream:
        """The short documents, if they are joined."""
        return _Stream([], 0) if self.end is None else _Stream(self.short, self.end)

    def skipped(self, spans: Iterable[_Span]) -> tuple[dict[str, Any], ...]:
        """The short documents that are in none of these."""
        used = {number for span in spans for number in span.joined}
        why = f"shorter than {self.length} tokens"
        return tuple(
            {"document": each.name, "tokens": len(each.ids), "why": why}
            for number, each in enumerate(self.short)
            if number not in used
        )


def _cut(
    spans: Sequence[_Span], skipped: tuple[dict[str, Any], ...], length: int, limit: int
) -> Windows:
    starts: list[list[int]] = [[] for _ in spans]
    rows: list[np.ndarray] = []
    for turn in range(max(len(span.ids) // length for span in spans)):
        for span, span_starts in zip(spans, starts, strict=True):
            if len(rows) < limit and (turn + 1) * length <= len(span.ids):
                rows.append(span.ids[turn * length : (turn + 1) * length])
                span_starts.append(span.start + turn * length)
    used = tuple(
        {"document": span.document, "tokens": len(span.ids), "starts": span_starts}
        | ({"joined": len(span.joined)} if len(span.joined) > 1 else {})
        for span, span_starts in zip(spans, starts, strict=True)
    )
    return Windows(torch.from_numpy(np.stack(rows).astype(np.int64)), used, skipped)
