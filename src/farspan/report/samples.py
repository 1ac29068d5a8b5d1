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
PACKED = 5_500_000  # characters of all packed samples: with plotly's script a page is below 8 MB
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
    """For each run with answers a table that is filled when it is opened.

    Runs share the room of the page; a run with too many samples shows as many of each task and
    length.
    """
    all_rows = [
        [row for sample in samples if (row := sample_row(sample)) is not None]
        for samples in runs.values()
    ]
    names = [name for name, rows in zip(runs, all_rows, strict=True) if rows]
    tables = [rows for rows in all_rows if rows]
    shown = [
        spread(rows, room)
        for rows, room in zip(tables, fair_shares([*map(len, tables)], MOST), strict=True)
    ]
    packs = [pack(rows) for rows in shown]
    for number, limit in enumerate(fair_shares([*map(len, packs)], PACKED)):
        while len(packs[number]) > limit and shown[number]:
            count = int(0.98 * len(shown[number]) * limit / len(packs[number]))
            shown[number] = spread(tables[number], count)
            packs[number] = pack(shown[number])
    for name, rows, few, packed in zip(names, tables, shown, packs, strict=True):
        left_out = len(rows) - len(few)
        verb = "is" if left_out == 1 else "are"
        note = f"; {left_out:,} more {verb} in its folder" if left_out else ""
        noun = "sample" if len(few) == 1 else "samples"
        title = html.escape(f"{name}: {len(few):,} {noun}{note}")
        yield (
            f'<details class="samples"><summary>{title}</summary>'
            f'<script type="application/gzip">{packed}</script></details>'
        )


def fair_shares(wanted: Sequence[int], room: int) -> list[int]:
    """What each gets of a room: what it wants, or as much as any other.

    >>> fair_shares([10, 1, 10], 9)
    [4, 1, 4]
    """
    shares = [0] * len(wanted)
    smallest_first = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, number in enumerate(smallest_first):
        shares[number] = min(wanted[number], room // (len(wanted) - place))
        room -= shares[number]
    return shares


def spread(rows: Sequence[list[Any]], count: int) -> list[list[Any]]:
    """`count` rows in their order: as many of each model, task and length, evenly among these."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(tuple(row[:3]), []).append(place)
    chosen: list[int] = []
    shares = fair_shares([*map(len, groups.values())], count)
    for places, share in zip(groups.values(), shares, strict=True):
        middles = ((2 * number + 1) * len(places) // (2 * share) for number in range(share))
        chosen += (places[middle] for middle in middles)
    return [rows[place] for place in sorted(chosen)]


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
