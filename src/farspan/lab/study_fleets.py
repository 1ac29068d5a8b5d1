"""The fleets of a study: which models train together, how they begin, and how they are scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from farspan.lab.fleet import Fleet, exact_match
from farspan.lab.networks import init_model, network_config
from farspan.lab.rows import padded_width
from farspan.lab.study import LabCell, LabStudy, fleet_plan, longest_row
from farspan.lab.task_data import TaskData, count_by_length
from farspan.model.encodings import encoding_class

MAX_LENGTH_RATIO = 1.9  # between rows of one fleet, which are all padded to the longest
# Encodings whose parameters or tables depend on the lengths of their task.
BY_LENGTH = ("learned", "fire", "randomized")


def make_fleet(
    study: LabStudy,
    cells: Sequence[LabCell],
    data: Sequence[TaskData],
    device: str,
) -> Fleet:
    """The untrained models of cells that share a network, initialized by their seeds."""
    train_length = max(task.train_length for task in data)
    reach = padded_width(max(task.max_length for task in data))
    shape = study.sizes[cells[0].size]
    config = network_config(
        shape, cells[0].encoding, study.tokenizer, train_length, reach, study.custom_encodings
    )
    models = {}
    for cell in cells:
        if cell.seed not in models:
            models[cell.seed] = init_model(config, cell.seed, study.sizes[cell.size].zero_outputs)
    return Fleet([models[cell.seed] for cell in cells], device)


def group_fleets(study: LabStudy, cells: Iterable[LabCell], max_models: int) -> list[list[LabCell]]:
    """Group cells that train together: one network, equal steps, rows of similar length.

    The fleets that take longest come first, so that processes which share them finish together.
    Learned positions have as many rows as their task needs, so there each task trains separately,
    and so it does with other encodings that know the train length, or may know it.
    Dropout masks and random positions are drawn for a whole fleet, so with them every model trains
    separately.
    """
    cells = list(cells)
    widths = {
        pair: longest_row(study, *pair) for pair in {(cell.task, cell.scratchpad) for cell in cells}
    }
    groups = defaultdict(list)
    for cell in cells:
        separate: Any = ()
        if study.sizes[cell.size].dropout > 0 or _is_random(study, cell.encoding):
            separate = cell
        elif cell.encoding in (*BY_LENGTH, *study.custom_encodings):
            separate = (cell.task, cell.scratchpad)
        groups[cell.size, cell.encoding, fleet_plan(study, cell), separate].append(cell)
    fleets: list[list[LabCell]] = []
    for group in groups.values():
        group.sort(key=lambda cell: widths[cell.task, cell.scratchpad])
        narrowest = 0
        for cell in group:
            width = widths[cell.task, cell.scratchpad]
            full = bool(fleets) and len(fleets[-1]) == max_models
            if cell is group[0] or full or width > MAX_LENGTH_RATIO * narrowest:
                fleets.append([])
                narrowest = width
            fleets[-1].append(cell)

    def cost(fleet: list[LabCell]) -> int:  # a fleet's step takes little longer than a model's
        longest, shape = fleet[-1], study.sizes[fleet[0].size]
        width = widths[longest.task, longest.scratchpad]
        return fleet_plan(study, longest).steps * width * shape.layers * shape.width**2

    return sorted(fleets, key=cost, reverse=True)


def _is_random(study: LabStudy, encoding: str) -> bool:
    cls = encoding_class(encoding, study.custom_encodings)
    return cls is not None and cls.random


def evaluate_fleet(
    fleet: Fleet, data: Sequence[TaskData], scales: Sequence[float]
) -> list[dict[str, Any]]:
    """The results of each model: [correct, total] by length, in range and beyond."""
    in_range = exact_match(fleet, [task.held_out for task in data])
    beyond = exact_match(fleet, [task.beyond for task in data])
    results: list[dict[str, Any]] = []
    for task, inside, outside in zip(data, in_range, beyond, strict=True):
        results.append(
            {
                # Half of the held-out examples choose the learning rate, the others are reported.
                "chosen_by": float(inside[::2].mean()),
                "in_range": count_by_length(inside[1::2], task.held_out_lengths[1::2]),
                "beyond": count_by_length(outside, task.beyond_lengths),
                "scaled": {},
            }
        )
    for scale in scales:
        with fleet.scaled(scale):
            scaled = exact_match(fleet, [task.beyond for task in data])
        for result, task, outside in zip(results, data, scaled, strict=True):
            result["scaled"][f"{scale:g}"] = count_by_length(outside, task.beyond_lengths)
    return results
