"""Rank the encodings of a study by how well they generalize to longer inputs.

A model that fails its task within the train lengths says little about longer inputs. So encodings
are ranked twice: over the models that learned their task, and over all models, as Kazemnejad 2023
ranks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from farspan.lab.networks import ENCODINGS
from farspan.lab.study import LabCell
from farspan.lab.tasks import GROUPS, TASKS

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
    seeds: tuple[int, ...]  # of the results

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

    def scores(self, learned_only: bool) -> dict[int, float]:
        """Exact match at unseen lengths by seed, of all models or of those that learned."""
        return {
            seed: accuracy(result["beyond"])
            for seed, result in zip(self.seeds, self.results, strict=True)
            if not learned_only or accuracy(result["in_range"]) >= LEARNED_THRESHOLD
        }

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
    groups: dict[tuple[str, str, str, str], dict[float, dict[int, Mapping[str, Any]]]] = {}
    for cell, result in results.items():
        rates = groups.setdefault((cell.task, cell.size, cell.scratchpad, cell.encoding), {})
        rates.setdefault(cell.lr, {})[cell.seed] = result
    entries = []
    for key, rates in groups.items():
        scores = {
            lr: float(np.mean([result["chosen_by"] for result in group.values()]))
            for lr, group in rates.items()
        }
        best = max(scores, key=scores.__getitem__)
        entries.append(LabEntry(*key, best, tuple(rates[best].values()), tuple(rates[best])))
    return entries


@dataclass(frozen=True)
class Rank:
    """The mean reciprocal rank of an encoding over tasks."""

    encoding: str
    reciprocal: float  # 1: first in every task
    tasks: int  # that it is ranked in


def rank_encodings(
    entries: Sequence[LabEntry], *, learned_only: bool = True, by_seed: bool = False
) -> list[Rank]:
    """Encodings by the mean reciprocal rank of their exact match beyond the range, best first.

    In each task, encodings are ranked by the mean over seeds, or seed by seed. With `learned_only`,
    only models that learned their task count. Ties share their mean reciprocal rank.
    """
    contests: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for entry in entries:
        for seed, score in _scores(entry, learned_only, by_seed).items():
            key = entry.task, entry.size, entry.scratchpad, seed
            contests.setdefault(key, {})[entry.encoding] = score
    reciprocals: dict[str, dict[tuple[str, str, str, int], float]] = {
        entry.encoding: {} for entry in entries
    }
    for key, scores in contests.items():
        for encoding, reciprocal in reciprocal_ranks(scores).items():
            reciprocals[encoding][key] = reciprocal
    ranks = [
        Rank(encoding, float(np.mean(list(values.values()))), len({key[:3] for key in values}))
        for encoding, values in reciprocals.items()
        if values
    ]
    return sorted(ranks, key=lambda rank: -rank.reciprocal)


def _scores(entry: LabEntry, learned_only: bool, by_seed: bool) -> dict[int, float]:
    """What an entry is ranked by: one score for each seed, or their mean as seed -1."""
    scores = entry.scores(learned_only)
    if not by_seed and scores:
        scores = {-1: float(np.mean(list(scores.values())))}
    return {seed: round(score, 6) for seed, score in scores.items()}


def rank_scratchpads(
    entries: Sequence[LabEntry], *, learned_only: bool = True
) -> dict[str, dict[str, float]]:
    """Of each task, the mean reciprocal rank of its scratchpads over encodings and sizes."""
    contests: dict[tuple[str, str, str], dict[str, float]] = {}
    for entry in entries:
        for score in _scores(entry, learned_only, by_seed=False).values():
            contest = contests.setdefault((entry.task, entry.size, entry.encoding), {})
            contest[entry.scratchpad] = score
    values: dict[str, dict[str, list[float]]] = {}
    for (task, _, _), scores in contests.items():
        for scratchpad, reciprocal in reciprocal_ranks(scores).items():
            values.setdefault(task, {}).setdefault(scratchpad, []).append(reciprocal)
    return {
        task: {scratchpad: float(np.mean(ranks)) for scratchpad, ranks in by_format.items()}
        for task, by_format in values.items()
    }


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


RANKINGS = {  # which models are ranked -> options of rank_encodings
    "learned": {"learned_only": True},
    "all": {"learned_only": False},
    "all, by seed": {"learned_only": False, "by_seed": True},  # as Kazemnejad 2023 ranks
}


def task_group(task: str) -> str:
    """The group of tasks in Kazemnejad 2023; `own` for tasks that it does not have."""
    return (TASKS[task].group if task in TASKS else "") or "own"


def rank_table(entries: Sequence[LabEntry]) -> Table:
    """Mean reciprocal ranks by size, scratchpad and group of tasks, with the number of tasks.

    Each is given over the models that learned their task and over all models.
    """
    encodings = ordered_encodings(entries)
    several_seeds = any(len(entry.seeds) > 1 for entry in entries)
    rows = []
    for size, scratchpad in dict.fromkeys((entry.size, entry.scratchpad) for entry in entries):
        same = [entry for entry in entries if (entry.size, entry.scratchpad) == (size, scratchpad)]
        present = {task_group(entry.task) for entry in same}
        groups = [group for group in (*GROUPS, "own") if group in present]
        for group in (*groups, "all") if len(groups) > 1 else groups:
            members = [entry for entry in same if group in (task_group(entry.task), "all")]
            for name, options in RANKINGS.items():
                if "by_seed" in options and not several_seeds:
                    continue
                ranks = {
                    rank.encoding: f"{rank.reciprocal:.3f} ({rank.tasks})"
                    for rank in rank_encodings(members, **options)
                }
                if ranks:
                    columns = (ranks.get(encoding, "") for encoding in encodings)
                    rows.append([size, scratchpad, group, name, *columns])
    return ["size", "scratchpad", "tasks", "models", *encodings], rows


def scratchpad_table(entries: Sequence[LabEntry]) -> Table:
    """Mean reciprocal ranks of scratchpads, over models that learned their task and over all.

    By task, then by encoding over all tasks, then over all of both.
    """
    formats = list(dict.fromkeys(entry.scratchpad for entry in entries))
    groups = [(task, "all") for task in dict.fromkeys(entry.task for entry in entries)]
    if len(groups) > 1:
        encodings = ordered_encodings(entries)
        groups += [("all", encoding) for encoding in encodings if len(encodings) > 1]
        groups.append(("all", "all"))
    rows = []
    for task, encoding in groups:
        members = [
            entry
            for entry in entries
            if task in (entry.task, "all") and encoding in (entry.encoding, "all")
        ]
        for name, learned_only in (("learned", True), ("all", False)):
            if means := _mean_over_tasks(rank_scratchpads(members, learned_only=learned_only)):
                columns = (f"{means[each]:.3f}" if each in means else "" for each in formats)
                rows.append([task, encoding, name, *columns])
    return ["task", "encoding", "models", *formats], rows


def _mean_over_tasks(by_task: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each scratchpad over the tasks that rank it."""
    formats = dict.fromkeys(name for ranks in by_task.values() for name in ranks)
    return {
        name: float(np.mean([ranks[name] for ranks in by_task.values() if name in ranks]))
        for name in formats
    }


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
