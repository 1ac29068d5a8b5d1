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

    @property
    def joined(self) -> int:
        """How many windows hold joined documents."""
        return sum(len(entry["starts"]) for entry in self.used if "joined" in entry)

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
    long_first: bool = False,
    begin: Sequence[int] = (),
) -> Windows:
    """Up to `limit` windows of `length` tokens: the first of every document, then the second, etc.

    begin: tokens in front of every window, which count in its length.
    long_first: joined documents only add what long ones lack.
    Documents shorter than a window are joined, or skipped and listed; if nothing is long enough,
    that is an error. Long documents are tokenized only as far as the windows need, so that a few
    windows from many books are fast.
    """
    length -= len(begin)
    reader = _Reader(tokenizer, length, join_short)
    reader.read(documents, limit, long_first)
    stream = reader.stream()
    joined = 0 if long_first else len(stream) // length
    turns = 1
    while _count_windows(reader.long, length) + joined < limit:
        if all(reading.complete for reading in reader.long):
            break
        turns *= 2
        _read_tokens(reader.long, tokenizer, turns * length)
    taken = _count_windows(reader.long, length) if long_first else len(reader.long)
    spans = [*map(_Span.of, reader.long)]
    spans += stream.windows(0, min(len(stream), (limit - taken) * length), length)
    return _cut(spans, reader.skipped(spans, length), length, limit).starting_with(begin)


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
    tokens share what is left. Documents that are too short for that are joined: the split
    `join_short` gets them beside long ones, the other splits where long ones are too few.
    """
    lengths = {name: length - len(begin) for name, length in lengths.items()}
    needed = {name: lengths[name] * limits[name] for name in lengths}
    least = max(lengths.values())
    reader = _Reader(tokenizer, least, join_short is not None)
    reader.read(documents, sum(limits.values()))
    _read_tokens(reader.long, tokenizer, None)
    spans: dict[str, list[_Span]] = {name: [] for name in lengths}
    if len(reader.long) >= 3 * len(lengths):
        for number, name in enumerate(lengths):
            spans[name] += map(_Span.of, reader.long[number :: len(lengths)])
    else:
        least = sum(lengths.values())
        for reading in reader.long:
            if not (parts := _split_document(len(reading.ids), lengths, needed)):
                reader.short.append(reading)
            for name, start, size in parts:
                ids = reading.ids[start : start + size]
                spans[name].append(_Span(reading.name, ids, start))
    if join_short is not None:
        _add_joined(spans, reader.stream(), lengths, limits, join_short)
    if not all(spans.values()):
        raise FarspanError(
            f"{reader.describe_short()}, and windows that share none of them take at least "
            f"{least}; use longer text, or a shorter target"
        )
    skipped = reader.skipped([span for each in spans.values() for span in each], least)
    return {
        name: _cut(spans[name], skipped, lengths[name], limits[name]).starting_with(begin)
        for name in lengths
    }


def _add_joined(
    spans: Mapping[str, list[_Span]],
    stream: _Stream,
    lengths: Mapping[str, int],
    limits: Mapping[str, int],
    join_short: str,
) -> None:
    """Share the joined documents among the splits that lack windows."""
    taken = {name: _count_windows(spans[name], lengths[name]) for name in spans}
    taken[join_short] = len(spans[join_short])  # one window of each long document is enough
    lacking = {name: lengths[name] for name in spans if taken[name] < limits[name]}
    needed = {name: (limits[name] - taken[name]) * lengths[name] for name in lacking}
    parts = _split_document(len(stream), lacking, needed)
    if not parts and join_short in lacking:
        parts = [(join_short, 0, len(stream))]
    for name, start, size in parts:
        spans[name].extend(stream.windows(start, size, lengths[name]))


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


def _count_windows(spans: Iterable[_Span | _Reading], length: int) -> int:
    return sum(len(span.ids) // length for span in spans)


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

    def __len__(self) -> int:
        return len(self._ids)

    def windows(self, start: int, size: int, length: int) -> list[_Span]:
        """The windows of a part; what does not fill one goes on in the next one."""
        starts = range(start, start + size - length + 1, length)
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
    def _joined(self) -> int:
        """The windows of joined documents."""
        return 0 if self.end is None else self._tokens // self.length

    def read(self, documents: Iterable[Document], limit: int, long_first: bool = False) -> None:
        """Read until there are `limit` windows, of each long document one, or no more documents.

        long_first: until there are so many long documents.
        """
        remaining, longest, number = iter(documents), 0, 0
        while True:
            windows = len(self.long) + (0 if long_first else self._joined)
            batch = [*map(_Reading, islice(remaining, min(BATCH, limit - windows)))]
            if not batch:
                break
            _read_tokens(batch, self.tokenizer, self.length)
            for reading in batch:
                self._add(reading)
            longest = max(longest, *(len(reading.ids) for reading in batch))
            number += len(batch)
        if not self.long and not self._joined:
            joined = "" if self.end is None else f", and joined they have {self._tokens}"
            raise FarspanError(
                f"no document has {self.length} tokens (the longest of {number} has "
                f"{longest}{joined}); use longer text, or shorter lengths"
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

    def describe_short(self) -> str:
        """The tokens of the short documents, for errors."""
        if self.end is not None and len(self.short) > 1:
            return f"{len(self.short)} documents have {len(self.stream())} tokens when joined"
        longest = max(self.short, key=lambda each: len(each.ids))
        return f"{longest.name} has {len(longest.ids)} tokens"

    def skipped(self, spans: Iterable[_Span], length: int) -> tuple[dict[str, Any], ...]:
        """The short documents that are in none of these."""
        used = {number for span in spans for number in span.joined}
        why = f"shorter than {length} tokens"
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
