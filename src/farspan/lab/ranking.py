"""Rank the encodings of a study by how well they generalize to longer inputs.

A model that fails its task within the train lengths says nothing about longer inputs: it counts as
not learned and gets no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from farspan.lab.study import ENCODINGS, LabCell

LEARNED_THRESHOLD = 0.95  # exact match in range from which a model has learned its task

Table = tuple[list[str], list[list[str]]]  # header, rows


def accuracy(counts: Mapping[str, Sequence[int]]) -> float:
    """The fraction of exact matches over all lengths, from [correct, total] by length."""
    correct = sum(correct for correct, _ in counts.values())
    return correct / sum(total for _, total in counts.values())


@dataclass(frozen=True, eq=False)
class LabEntry:
    """The results of a task and an encoding, one per seed, at the best learning rate."""

    task: str
    size: str
    scratchpad: str
    encoding: str
    lr: float
    results: tuple[Mapping[str, Any], ...]

    @cached_property
    def learned(self) -> list[Mapping[str, Any]]:
        """The results of the models that learned their task."""
        return [
            result for result in self.results if accuracy(result["in_range"]) >= LEARNED_THRESHOLD
        ]

    @property
    def diverged(self) -> bool:
        """Whether all models ended with a loss that is not finite."""
        return all(result["loss"][-1] is None for result in self.results)

    @property
    def in_range(self) -> float:
        return float(np.mean([accuracy(result["in_range"]) for result in self.results]))

    @property
    def beyond(self) -> list[float]:
        """Exact match at unseen lengths, of each model that learned its task."""
        return [accuracy(result["beyond"]) for result in self.learned]

    def scaled(self, scale: str) -> list[float]:
        return [accuracy(result["scaled"][scale]) for result in self.learned]

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths, and the exact match of every model [seeds, lengths], in range and beyond."""
        counts = [{**result["in_range"], **result["beyond"]} for result in self.results]
        lengths = sorted(set.intersection(*(set(map(int, count)) for count in counts)))
        return np.array(lengths), np.array(
            [[count[str(n)][0] / count[str(n)][1] for n in lengths] for count in counts]
        )


def group_entries(results: Mapping[LabCell, Mapping[str, Any]]) -> list[LabEntry]:
    """The results of a study by task and encoding, each at its best learning rate."""
    groups: dict[tuple[str, str, str, str], dict[float, list[Mapping[str, Any]]]] = {}
    for cell, result in results.items():
        rates = groups.setdefault((cell.task, cell.size, cell.scratchpad, cell.encoding), {})
        rates.setdefault(cell.lr, []).append(result)
    entries = []
    for key, rates in groups.items():
        scores = {
            lr: float(np.mean([result["chosen_by"] for result in group]))
            for lr, group in rates.items()
        }
        best = max(scores, key=scores.__getitem__)
        entries.append(LabEntry(*key, best, tuple(rates[best])))
    return entries


@dataclass(frozen=True)
class Rank:
    """The mean reciprocal rank of an encoding over tasks."""

    encoding: str
    reciprocal: float  # 1: first in every task
    tasks: int  # that it learned and is ranked in


def rank_encodings(entries: Sequence[LabEntry]) -> list[Rank]:
    """Encodings by the mean reciprocal rank of their exact match beyond the range, best first.

    In each task, the encodings that learned it are ranked. Ties share their mean reciprocal rank.
    """
    by_task: dict[tuple[str, str, str], dict[str, float]] = {}
    for entry in entries:
        if entry.learned:
            scores = by_task.setdefault((entry.task, entry.size, entry.scratchpad), {})
            scores[entry.encoding] = round(float(np.mean(entry.beyond)), 6)
    reciprocals: dict[str, list[float]] = {entry.encoding: [] for entry in entries}
    for scores in by_task.values():
        for encoding, reciprocal in reciprocal_ranks(scores).items():
            reciprocals[encoding].append(reciprocal)
    ranks = [
        Rank(encoding, float(np.mean(values)), len(values))
        for encoding, values in reciprocals.items()
        if values
    ]
    return sorted(ranks, key=lambda rank: -rank.reciprocal)


def reciprocal_ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """{"a": 0.9, "b": 0.5, "c": 0.5} -> {"a": 1, "b": 5/12, "c": 5/12}."""
    ranks = {}
    for name, score in scores.items():
        above = sum(other > score for other in scores.values())
        tied = sum(other == score for other in scores.values())
        ranks[name] = float(np.mean([1 / rank for rank in range(above + 1, above + tied + 1)]))
    return ranks


# Tables.


def ordered_encodings(entries: Sequence[LabEntry]) -> list[str]:
    """The encodings of the entries, in the order of ENCODINGS; others follow."""
    present = dict.fromkeys(entry.encoding for entry in entries)
    return list(dict.fromkeys(name for name in (*ENCODINGS, *present) if name in present))


def accuracy_table(entries: Sequence[LabEntry]) -> Table:
    """Exact match beyond the range, tasks by encodings: the mean over seeds and half their range.

    Only models that learned the task count. In parentheses: how many learned it, if not all did, or
    the exact match in range, if none did.
    """
    encodings = ordered_encodings(entries)
    groups = list(dict.fromkeys((entry.task, entry.size, entry.scratchpad) for entry in entries))
    varies = [len({group[index] for group in groups}) > 1 for index in range(3)]
    columns = [index for index in range(3) if index == 0 or varies[index]]
    header = [("task", "size", "scratchpad")[index] for index in columns] + encodings
    by_key = {
        (entry.task, entry.size, entry.scratchpad, entry.encoding): entry for entry in entries
    }
    rows = [
        [
            *(group[index] for index in columns),
            *(_format_entry(by_key.get((*group, encoding))) for encoding in encodings),
        ]
        for group in groups
    ]
    return header, rows


def _format_entry(entry: LabEntry | None) -> str:
    if entry is None:
        return ""
    if not entry.learned:
        return "diverged" if entry.diverged else f"not learned ({entry.in_range:.2f})"
    text = f"{np.mean(entry.beyond):.3f}"
    if len(entry.beyond) > 1:
        text += f" ± {np.ptp(entry.beyond) / 2:.2f}"
    if len(entry.learned) < len(entry.results):
        text += f" ({len(entry.learned)} of {len(entry.results)})"
    return text


def rank_table(entries: Sequence[LabEntry]) -> Table:
    """Mean reciprocal ranks by size and scratchpad, with the number of ranked tasks."""
    groups: dict[tuple[str, str], list[LabEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.size, entry.scratchpad), []).append(entry)
    encodings = ordered_encodings(entries)
    rows = []
    for (size, scratchpad), group in groups.items():
        ranks = {
            rank.encoding: f"{rank.reciprocal:.3f} ({rank.tasks})" for rank in rank_encodings(group)
        }
        rows.append([size, scratchpad, *(ranks.get(name, "") for name in encodings)])
    return ["size", "scratchpad", *encodings], rows


def scale_table(entries: Sequence[LabEntry]) -> Table:
    """Exact match beyond the range with all attention scores multiplied by λ̂, by encoding.

    The mean is over all models that learned their task.
    """
    encodings = ordered_encodings(entries)
    scales = list(entries[0].results[0]["scaled"])
    rows = []
    for scale in dict.fromkeys(["1", *scales]):
        columns = []
        for encoding in encodings:
            values = [
                value
                for entry in entries
                if entry.encoding == encoding
                for value in (entry.beyond if scale == "1" else entry.scaled(scale))
            ]
            columns.append(f"{np.mean(values):.3f}" if values else "")
        rows.append([scale, *columns])
    return ["λ̂", *encodings], rows


def count_learned(entries: Sequence[LabEntry]) -> tuple[int, int]:
    """The number of models that learned their task, and the number of all models."""
    return sum(len(entry.learned) for entry in entries), sum(
        len(entry.results) for entry in entries
    )
