"""What a study costs, before training: what `lab run` says first, and `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from farspan.lab.networks import network_config
from farspan.lab.study import LabCell, LabStudy, fleet_plan, list_cells, longest_row
from farspan.lab.study_fleets import group_fleets
from farspan.loading import resolve_device
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.progress import SAID_FROM, Stage, format_duration, with_total
from farspan.summaries import ResultList, Summarized
from farspan.train.pretrain import flops_per_token
from farspan.workflows.lab_training import StudyRunner, custom_task_data, fleet_label
from farspan.workflows.pretrain import matmul_flops_per_second

GIB = 2**30


@dataclass(frozen=True, repr=False)
class LabEstimate(Summarized):
    """The cost of one network of a study, before training."""

    encoding: str
    size: str
    models: int
    fleets: int
    parameters: int  # of one model
    tokens: int  # of all models, with padding
    weights_gib: float  # of the largest fleet: weights, gradients and optimizer state
    seconds: float  # a lower bound: matrix products only


def estimate(study: LabStudy, device: str | None = None) -> ResultList:
    """What each network of a study costs to train."""
    device = resolve_device(device)
    custom_task_data(study)
    on_gpu = torch.device(device).type == "cuda"
    rate = matmul_flops_per_second(on_gpu, device)
    cells = list_cells(study)
    networks: dict[tuple[str, str], list[list[LabCell]]] = {
        (cell.encoding, cell.size): [] for cell in cells
    }
    for fleet in group_fleets(study, cells, study.fleet if on_gpu else 1):
        networks[fleet[0].encoding, fleet[0].size].append(fleet)
    return ResultList(_estimate(study, fleets, rate) for fleets in networks.values())


def _estimate(study: LabStudy, fleets: list[list[LabCell]], rate: float) -> LabEstimate:
    first = fleets[0][0]
    costs = [_fleet_cost(study, fleet) for fleet in fleets]
    with torch.device("meta"):
        parameters = FarspanForCausalLM(costs[-1].config).num_parameters()
    return LabEstimate(
        first.encoding,
        first.size,
        sum(map(len, fleets)),
        len(fleets),
        parameters,
        sum(cost.tokens for cost in costs),
        max(map(len, fleets)) * parameters * 20 / GIB,  # weights, two gradients, two moments
        sum(cost.flops for cost in costs) / rate,
    )


class _FleetCost(NamedTuple):
    """What all models of a fleet take, by their longest rows."""

    config: FarspanConfig
    tokens: int
    flops: float


def _fleet_cost(study: LabStudy, fleet: Sequence[LabCell]) -> _FleetCost:
    longest = max(longest_row(study, cell.task, cell.scratchpad) for cell in fleet)
    shape, encoding = study.sizes[fleet[0].size], fleet[0].encoding
    config = network_config(
        shape, encoding, study.tokenizer, longest, longest, study.custom_encodings
    )
    plan = fleet_plan(study, fleet[0])
    # Rows of the shortest bucket are about 1/buckets as long as those of the longest.
    per_model = round(plan.steps * plan.batch * longest * (1 + 1 / plan.buckets) / 2)
    tokens = per_model * len(fleet)
    return _FleetCost(config, tokens, tokens * flops_per_token(config, longest))


def announce(runner: StudyRunner) -> StudyRunner:
    """Say what the missing models take at least; when steps were timed, their total is said."""
    fleets = runner.missing_fleets()
    if not fleets:
        return runner
    costs = [_fleet_cost(runner.study, fleet).flops for fleet in fleets]
    on_gpu = torch.device(runner.device).type == "cuda"
    seconds = sum(costs) / matmul_flops_per_second(on_gpu, runner.device)
    if seconds >= SAID_FROM:
        models = sum(map(len, fleets))
        runner.say(
            f"{models} models to train, at least {format_duration(seconds)} for matrix products"
        )
    steps = [fleet_plan(runner.study, fleet[0]).steps for fleet in fleets]
    stages = list(map(Stage, map(fleet_label, fleets), costs, steps))
    return replace(runner, progress=with_total(runner.progress, stages, runner.say, runner.workers))
