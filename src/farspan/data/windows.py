"""Windows of tokens that each lie inside one document, and an account of what was used and what was not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from farspan.data.documents import Document
from farspan.errors import FarspanError

WORDS_MEET = re.compile(r"\w(?= \w)")
LIKELY = 6  # characters that hold a token


@dataclass(frozen=True, eq=False)
class Windows:
    """ids [windows, length] with, for the record, where each came from and what was left out."""

    ids: Tensor
    used: tuple[dict[str, Any], ...]  # document, how many of its tokens were read, where each of its windows starts
    skipped: tuple[dict[str, Any], ...]  # document, its tokens, why

    def describe(self) -> dict[str, Any]:
        return {
            "windows": len(self.ids),
            "length": self.ids.shape[1],
            "used": list(self.used),
            "skipped": list(self.skipped),
        }


def cut_windows(documents: Iterable[Document], tokenizer: Any, length: int, limit: int) -> Windows:
    """Up to `limit` windows of `length` tokens, the first of every document before the second of any.

    Documents shorter than a window are skipped, named and counted; if none is long enough, that is an error. Of a long
    document no more becomes tokens than the windows take: a few windows of many books do not wait for all of them.
    """
    readings, skipped = _long_enough(documents, tokenizer, length, limit)
    turns = 1
    while sum(len(each.tokens(turns * length)) // length for each in readings) < limit:
        if all(each.whole for each in readings):
            break
        turns *= 2
    return _cut(_Found(tuple((each.name, each.ids, 0) for each in readings), skipped), length, limit)


def split_windows(
    documents: Iterable[Document], tokenizer: Any, lengths: Mapping[str, int], limits: Mapping[str, int]
) -> dict[str, Windows]:
    """Windows for several purposes from one corpus, none of which shares a token with another.

    Whole documents are dealt out in turn where there are enough; else each is cut into one stretch for each purpose, as
    long as its windows, and those that ask for most take what is left.
    """
    longest = max(lengths.values())
    needed = {name: lengths[name] * limits[name] for name in lengths}
    readings, skipped = _long_enough(documents, tokenizer, longest, sum(limits.values()))
    found = _Found(tuple((each.name, each.tokens(None), 0) for each in readings), skipped)
    if len(found.long) >= 3 * len(lengths):
        dealt = {name: replace(found, long=found.long[number :: len(lengths)]) for number, name in enumerate(lengths)}
        return {name: _cut(dealt[name], lengths[name], limits[name]) for name in lengths}
    parts: dict[str, list[tuple[str, list[int], int]]] = {name: [] for name in lengths}
    for document, ids, _ in found.long:
        for name, start, size in _stretches(len(ids), lengths, needed):
            parts[name].append((document, ids[start : start + size], start))
    if not all(parts.values()):
        document, ids, _ = max(found.long, key=lambda entry: len(entry[1]))
        raise FarspanError(
            f"{document} has {len(ids)} tokens, and windows that share none of them take at least "
            f"{sum(lengths.values())}; give longer text, or ask for a shorter target"
        )
    return {name: _cut(replace(found, long=tuple(parts[name])), lengths[name], limits[name]) for name in lengths}


def _stretches(tokens: int, lengths: Mapping[str, int], needed: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Name, start and size of each purpose's stretch of a document; none where it has not room for all."""
    found, start = [], 0
    for left, name in zip(range(len(lengths), 0, -1), sorted(lengths, key=needed.__getitem__), strict=True):
        size = min(needed[name], (tokens - start) // left)
        if size < lengths[name]:
            return []
        found.append((name, start, size))
        start += size
    return found


@dataclass(frozen=True)
class _Found:
    long: tuple[tuple[str, list[int], int], ...]  # name, tokens, and where in the document they begin
    skipped: tuple[dict[str, Any], ...]


class _Reading:
    """A document that becomes tokens from its beginning, no further than asked."""

    def __init__(self, document: Document, tokenizer: Any):
        self.name, self.whole = document.name, False
        self.ids: list[int] = []
        self._text, self._tokenizer = document.text, tokenizer

    def tokens(self, count: int | None) -> list[int]:
        """At least `count` of its tokens, or all; all where none is named."""
        characters = len(self._text) if count is None else LIKELY * count
        while not self.whole and (count is None or len(self.ids) < count):
            # Between two words, where a tokenizer cuts as well: the tokens before it are those of the whole text.
            place = WORDS_MEET.search(self._text, characters)
            text = self._text[: place.start() + 1] if place else self._text
            self.ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            self.whole = place is None
            characters *= 2
        return self.ids


def _long_enough(
    documents: Iterable[Document], tokenizer: Any, length: int, limit: int
) -> tuple[list[_Reading], tuple[dict[str, Any], ...]]:
    """Documents of at least `length` tokens, no more of them than `limit`; and those that are shorter."""
    if length < 2:
        raise FarspanError(f"a length of {length} tokens leaves nothing to predict; ask for 2 or more")
    long: list[_Reading] = []
    skipped: list[dict[str, Any]] = []
    for document in documents:
        reading = _Reading(document, tokenizer)
        ids = reading.tokens(length)
        if len(ids) >= length:
            long.append(reading)
        else:
            skipped.append({"document": document.name, "tokens": len(ids), "why": f"shorter than {length} tokens"})
        if len(long) >= limit:
            break  # one window of each is all that will be taken
    if not long:
        longest = max((entry["tokens"] for entry in skipped), default=0)
        raise FarspanError(
            f"no document has {length} tokens (the longest of {len(skipped)} has {longest}); "
            "give longer text, or ask for shorter lengths"
        )
    return long, tuple(skipped)


def _cut(found: _Found, length: int, limit: int) -> Windows:
    starts: dict[int, list[int]] = {number: [] for number in range(len(found.long))}
    rows: list[list[int]] = []
    for turn in range(max(len(ids) // length for _, ids, _ in found.long)):
        for number, (_, ids, first) in enumerate(found.long):
            if len(rows) < limit and (turn + 1) * length <= len(ids):
                rows.append(ids[turn * length : (turn + 1) * length])
                starts[number].append(first + turn * length)
    used = tuple(
        {"document": name, "tokens": len(ids), "starts": starts[number]}
        for number, (name, ids, _) in enumerate(found.long)
    )
    return Windows(torch.tensor(rows), used, found.skipped)
