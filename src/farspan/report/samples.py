"""Samples that a person can read: a table of prompts and answers, packed into the page.

The rows are compressed, and the page unpacks those of a run when its table is opened.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST = 10_000  # of a page; the rest stays in samples/*.jsonl
PACKED = 1_900_000  # characters of all packed samples: with plotly's script a page is below 4 MB
LONGEST_TEXT = 240  # characters of an answer, a question and the text around a needle
COLUMNS = (
    "model",
    "task",
    "length",
    "depth",
    "score",  # from 0 to 1
    "question",
    "around",
    "answer",
    "expected",
)

Sample = Mapping[str, Any]


def samples_table(runs: Mapping[str, Sequence[Sample]]) -> Iterator[str]:
    """For each run with answers a table that is filled when it is opened."""
    room, characters = MOST, PACKED
    for name, samples in runs.items():
        rows = [row for sample in samples if (row := sample_row(sample)) is not None]
        if not rows:
            continue
        shown = rows[:room]
        while len(packed := pack(shown)) > characters and shown:
            # empty tables take room too, so that none may be left for the next ones
            shown = shown[: int(0.98 * len(shown) * max(0, characters) / len(packed))]
        room, characters = room - len(shown), characters - len(packed)
        left_out = len(rows) - len(shown)
        note = f"; {left_out:,} more are in its folder" if left_out else ""
        title = html.escape(f"{name}: {len(shown):,} samples{note}")
        yield (
            f'<details class="samples"><summary>{title}</summary>'
            f'<script type="application/gzip">{packed}</script></details>'
        )


def sample_row(sample: Sample) -> list[Any] | None:
    """The columns of a sample with an answer; None for others, such as windows of perplexity."""
    if "hit" in sample:
        return [
            sample["model"],
            sample["task"],
            sample["length"],
            sample["depth"],
            float(sample["hit"]),
            "What is the pass key?",
            f"… The pass key is {sample['key']}. Remember it. …",
            _cut(sample["said"]),
            str(sample["key"]),
        ]
    if "prediction" not in sample:
        return None
    scale = 100 if sample["eval"] == "longbench" else 1
    return [
        sample["model"],
        sample["task"],
        sample["length"],
        next(iter(sample.get("depths") or ()), None),
        round(sample["score"] / scale, 4),
        _cut(sample.get("question", "")),
        _cut(sample.get("around", "")),
        _cut(sample["prediction"]),
        _cut(", ".join(sample["answers"])),
    ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…"


def pack(rows: Sequence[Sequence[Any]]) -> str:
    """Columns, since equal things compress well beside each other; gzip, which browsers read."""
    columns = {name: [row[number] for row in rows] for number, name in enumerate(COLUMNS)}
    content = json.dumps(columns, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )
    return compress(content)


def compress(content: bytes) -> str:
    """Text that `unpack` of report.html decompresses."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")
