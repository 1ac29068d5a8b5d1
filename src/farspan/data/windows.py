"""Windows of tokens that each lie inside one document, and an account of what was used and what was not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farspan.data.documents import Document
from farspan.errors import FarspanError


@dataclass(frozen=True, eq=False)
class Windows:
    """ids [windows, length] with, for the record, where each came from and what was left out."""

    ids: Tensor
    used: tuple[dict[str, Any], ...]  # document, its tokens, the start of each window taken from it
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

    Documents shorter than a window are skipped, named and counted; if none is long enough, that is an error.
    """
    if length < 2:
        raise FarspanError(f"a length of {length} tokens leaves nothing to predict; ask for 2 or more")
    long: list[tuple[str, list[int]]] = []
    skipped: list[dict[str, Any]] = []
    for document in documents:
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length:
            long.append((document.name, ids))
        else:
            skipped.append({"document": document.name, "tokens": len(ids), "why": f"shorter than {length} tokens"})
        if len(long) >= limit:
            break  # one window of each is all that will be taken
    if not long:
        longest = max((entry["tokens"] for entry in skipped), default=0)
        raise FarspanError(
            f"none of the {len(skipped)} documents has {length} tokens (the longest has {longest}); "
            "give longer text, or ask for shorter lengths"
        )
    starts: dict[int, list[int]] = {number: [] for number in range(len(long))}
    rows: list[list[int]] = []
    for turn in range(max(len(ids) // length for _, ids in long)):
        for number, (_, ids) in enumerate(long):
            if len(rows) < limit and (turn + 1) * length <= len(ids):
                rows.append(ids[turn * length : (turn + 1) * length])
                starts[number].append(turn * length)
    used = tuple(
        {"document": name, "tokens": len(ids), "starts": starts[number]} for number, (name, ids) in enumerate(long)
    )
    return Windows(torch.tensor(rows), used, tuple(skipped))
