"""Cut documents into windows of tokens, and record which documents were used or skipped.

A window lies inside one document. Where short documents are joined, it may hold several of them,
each with an end-of-text token behind it.
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
    used: tuple[dict[str, Any], ...]  # document, tokens that were read, start of each window
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
    reader = _LongDocuments(tokenizer, length, join_short)
    readings, skipped = reader.read(documents, limit), reader.skipped
    turns = 1
    while sum(len(reading.ids) // length for reading in readings) < limit:
        if all(reading.complete for reading in readings):
            break
        turns *= 2
        _read_tokens(readings, tokenizer, turns * length)
    spans = tuple(_Span(reading.name, reading.ids, 0) for reading in readings)
    return _cut(spans, skipped, length, limit).starting_with(begin)


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
    reader = _LongDocuments(tokenizer, max(lengths.values()), join_short is not None)
    readings, skipped = reader.read(documents, sum(limits.values())), reader.skipped
    _read_tokens(readings, tokenizer, None)
    joined = [_Span(each.name, each.ids, 0) for each in readings if each.joined]
    whole = tuple(_Span(each.name, each.ids, 0) for each in readings if not each.joined)
    spans: dict[str, list[_Span]] = {name: [] for name in lengths}
    if join_short is not None:
        spans[join_short] += joined
    if len(whole) >= 3 * len(lengths):
        for number, name in enumerate(lengths):
            spans[name] += whole[number :: len(lengths)]
        return _cut_splits(spans, skipped, lengths, limits, begin)
    for span in whole:
        for name, start, size in _split_document(len(span.ids), lengths, needed):
            spans[name].append(replace(span, ids=span.ids[start : start + size], start=start))
    if not all(spans.values()):
        longest_span = max(whole or joined, key=lambda span: len(span.ids))
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
        name: _cut(tuple(spans[name]), skipped, lengths[name], limits[name]).starting_with(begin)
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
    """Consecutive tokens of a document."""

    document: str
    ids: np.ndarray
    start: int  # of the first token, counted in the document


class _Reading:
    """A document that is tokenized from its beginning, only as far as needed."""

    def __init__(self, document: Document):
        self.name, self.text = document.name, document.text
        self.ids, self.complete = np.empty(0, dtype=np.int32), False
        self.joined = False  # of several short documents

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


class _LongDocuments:
    """Reads documents of at least `length` tokens; joins shorter ones, or records them."""

    def __init__(self, tokenizer: Any, length: int, join_short: bool):
        if length < 2:
            raise FarspanError(
                f"a length of {length} tokens leaves nothing to predict; use a length of at least 2"
            )
        self.tokenizer, self.length = tokenizer, length
        self.end = tokenizer.eos_token_id if join_short else None
        self.skipped: tuple[dict[str, Any], ...] = ()
        self._waiting: list[_Reading] = []  # short documents, not joined yet

    def read(self, documents: Iterable[Document], limit: int) -> list[_Reading]:
        """One window from each of `limit` documents is enough."""
        readings: list[_Reading] = []
        remaining, count = iter(documents), 0
        while batch := list(map(_Reading, islice(remaining, min(BATCH, limit - len(readings))))):
            _read_tokens(batch, self.tokenizer, self.length)
            count += len(batch)
            for reading in batch:
                if len(reading.ids) >= self.length:
                    readings.append(reading)
                elif len(reading.ids):  # an empty document has nothing to read or to list
                    readings += self._join(reading)
        why = f"shorter than {self.length} tokens"
        self.skipped = tuple(
            {"document": each.name, "tokens": len(each.ids), "why": why} for each in self._waiting
        )
        if not readings:
            longest = max((entry["tokens"] for entry in self.skipped), default=0)
            raise FarspanError(
                f"no document has {self.length} tokens (the longest of {count} has "
                f"{longest}); use longer text, or shorter lengths"
            )
        return readings

    def _join(self, short: _Reading) -> list[_Reading]:
        """The waiting documents and this one as one document, if that is long enough."""
        self._waiting.append(short)
        # The last end-of-text token counts: it can be predicted.
        tokens = sum(len(each.ids) + 1 for each in self._waiting)
        if self.end is None or tokens < self.length:
            return []
        ids = [part for each in self._waiting for part in (each.ids, [self.end])]
        joined = _Reading(Document(f"{self._waiting[0].name} to {short.name}", ""))
        joined.ids, joined.complete = np.concatenate(ids).astype(np.int32), True
        joined.joined = True
        self._waiting = []
        return [joined]


def _cut(
    spans: tuple[_Span, ...], skipped: tuple[dict[str, Any], ...], length: int, limit: int
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
        for span, span_starts in zip(spans, starts, strict=True)
    )
    return Windows(torch.from_numpy(np.stack(rows).astype(np.int64)), used, skipped)
