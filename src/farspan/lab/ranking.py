"""What the results of a study tell: who learnt its task, and which encoding carries furthest.

A model that does not do its task inside the range that it was trained on says nothing about longer inputs: it counts as
not learnt and has no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from farspan.lab.study import ENCODINGS, Cell

LEARNT = 0.95  # exact match in range, from which on a model knows its task

Table = tuple[list[str], list[list[str]]]  # head, rows


def share(counts: Mapping[str, Sequence[int]]) -> float:
    """Of all examples of all lengths, how many were answered exactly."""
    return sum(right for right, _ in counts.values()) / sum(asked for _, asked in counts.values())


@dataclass(frozen=True, eq=False)
class Entry:
    """A task and an encoding, at the learning rate that the held-out examples chose: one result a seed."""

    task: str
    size: str
    scratchpad: str
    encoding: str
    lr: float
    results: tuple[Mapping[str, Any], ...]

    @cached_property
    def learnt(self) -> list[Mapping[str, Any]]:
        return [result for result in self.results if share(result["in_range"]) >= LEARNT]

    @property
    def diverged(self) -> bool:
        """Did all of them end in losses that are no numbers?"""
        return all(result["loss"][-1] is None for result in self.results)

    @property
    def in_range(self) -> float:
        return float(np.mean([share(result["in_range"]) for result in self.results]))

    @property
    def beyond(self) -> list[float]:
        """Exact match at unseen lengths, of each model that learnt its task."""
        return [share(result["beyond"]) for result in self.learnt]

    def scaled(self, scale: str) -> list[float]:
        return [share(result["scaled"][scale]) for result in self.learnt]

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths, and exact match [seeds, lengths], inside the range and beyond, of every model."""
        counts = [{**result["in_range"], **result["beyond"]} for result in self.results]
        lengths = sorted(set.intersection(*(set(map(int, each)) for each in counts)))
        return np.array(lengths), np.array([[each[str(n)][0] / each[str(n)][1] for n in lengths] for each in counts])


def entries(results: Mapping[Cell, Mapping[str, Any]]) -> list[Entry]:
    """The results of a study, each task and encoding at its best learning rate."""
    tried: dict[tuple[str, str, str, str], dict[float, list[Mapping[str, Any]]]] = {}
    for cell, result in results.items():
        rates = tried.setdefault((cell.task, cell.size, cell.scratchpad, cell.encoding), {})
        rates.setdefault(cell.lr, []).append(result)
    return [
        Entry(*key, lr, tuple(rates[lr]))
        for key, rates in tried.items()
        for lr in [max(rates, key=lambda lr: float(np.mean([result["chosen_by"] for result in rates[lr]])))]
    ]


@dataclass(frozen=True)
class Rank:
    """How well an encoding does among the others: its mean reciprocal rank over tasks."""

    encoding: str
    reciprocal: float  # 1: first in every task
    tasks: int  # that it learnt and was ranked in


def ranks(found: Sequence[Entry]) -> list[Rank]:
    """Encodings by mean reciprocal rank of their exact match beyond the range, the best first.

    In each task, those that learnt it are ranked. Those that are level share the mean of their places' reciprocals.
    """
    by_task: dict[tuple[str, str, str], dict[str, float]] = {}
    for entry in found:
        if entry.learnt:
            scores = by_task.setdefault((entry.task, entry.size, entry.scratchpad), {})
            scores[entry.encoding] = round(float(np.mean(entry.beyond)), 6)
    gained: dict[str, list[float]] = {entry.encoding: [] for entry in found}
    for scores in by_task.values():
        for encoding, reciprocal in reciprocal_ranks(scores).items():
            gained[encoding].append(reciprocal)
    placed = [Rank(name, float(np.mean(each)), len(each)) for name, each in gained.items() if each]
    return sorted(placed, key=lambda rank: -rank.reciprocal)


def reciprocal_ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """{"a": 0.9, "b": 0.5, "c": 0.5} -> {"a": 1, "b": 5/12, "c": 5/12}."""
    found = {}
    for name, score in scores.items():
        above = sum(other > score for other in scores.values())
        level = sum(other == score for other in scores.values())
        found[name] = float(np.mean([1 / place for place in range(above + 1, above + level + 1)]))
    return found


# Tables.


def encodings_of(found: Sequence[Entry]) -> list[str]:
    """Those that a study has results of, in an order that does not depend on which of them came first."""
    return sorted({entry.encoding for entry in found}, key=list(ENCODINGS).index)


def accuracy_table(found: Sequence[Entry]) -> Table:
    """Exact match beyond the range, tasks by encodings: the mean of the seeds that learnt it and half their spread; in
    brackets how many learnt it, where not all did, or what they reached in range, where none did."""
    encodings = encodings_of(found)
    rows = list(dict.fromkeys((entry.task, entry.size, entry.scratchpad) for entry in found))
    several = [len({row[place] for row in rows}) > 1 for place in range(3)]
    shown = [place for place in range(3) if place == 0 or several[place]]
    head = [("task", "size", "scratchpad")[place] for place in shown] + encodings
    at = {(entry.task, entry.size, entry.scratchpad, entry.encoding): entry for entry in found}
    return head, [
        [*(row[place] for place in shown), *(_told(at.get((*row, encoding))) for encoding in encodings)] for row in rows
    ]


def _told(entry: Entry | None) -> str:
    if entry is None:
        return ""
    if not entry.learnt:
        return "diverged" if entry.diverged else f"not learnt ({entry.in_range:.2f})"
    spread = f" ± {np.ptp(entry.beyond) / 2:.2f}" if len(entry.beyond) > 1 else ""
    few = f" ({len(entry.learnt)} of {len(entry.results)})" if len(entry.learnt) < len(entry.results) else ""
    return f"{np.mean(entry.beyond):.3f}{spread}{few}"


def rank_table(found: Sequence[Entry]) -> Table:
    """Mean reciprocal ranks, by size and scratchpad, and of how many tasks."""
    parts: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        parts.setdefault((entry.size, entry.scratchpad), []).append(entry)
    encodings = encodings_of(found)
    rows = []
    for (size, scratchpad), some in parts.items():
        told = {rank.encoding: f"{rank.reciprocal:.3f} ({rank.tasks})" for rank in ranks(some)}
        rows.append([size, scratchpad, *(told.get(name, "") for name in encodings)])
    return ["size", "scratchpad", *encodings], rows


def scale_table(found: Sequence[Entry]) -> Table:
    """Exact match beyond the range with every score times λ̂, the mean over all that learnt."""
    encodings = encodings_of(found)
    scales = list(found[0].results[0]["scaled"])
    rows = []
    for scale in dict.fromkeys(["1", *scales]):
        cells = []
        for encoding in encodings:
            own = [entry for entry in found if entry.encoding == encoding]
            told = [value for entry in own for value in (entry.beyond if scale == "1" else entry.scaled(scale))]
            cells.append(f"{np.mean(told):.3f}" if told else "")
        rows.append([scale, *cells])
    return ["λ̂", *encodings], rows


def learnt_of(found: Sequence[Entry]) -> tuple[int, int]:
    """How many models learnt their task, of how many."""
    return sum(len(entry.learnt) for entry in found), sum(len(entry.results) for entry in found)
