"""What a study costs, before training: `farspan lab run --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from farspan.lab.networks import network_config
from farspan.lab.study import LabCell, LabStudy, fleet_plan, group_fleets, list_cells, longest_row
from farspan.lab.tokenizer import WordTokenizer
from farspan.loading import resolve_device
from farspan.model import FarspanForCausalLM
from farspan.summaries import ResultList, Summarized
from farspan.train.pretrain import flops_per_token
from farspan.workflows.lab_training import custom_task_data
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
    tokenizer, device = study.tokenizer, resolve_device(device)
    custom_task_data(study)
    on_gpu = torch.device(device).type == "cuda"
    rate = matmul_flops_per_second(on_gpu, device)
    cells = list_cells(study)
    networks: dict[tuple[str, str], list[list[LabCell]]] = {
        (cell.encoding, cell.size): [] for cell in cells
    }
    for fleet in group_fleets(study, cells, tokenizer, study.fleet if on_gpu else 1):
        networks[fleet[0].encoding, fleet[0].size].append(fleet)
    return ResultList(_estimate(study, tokenizer, fleets, rate) for fleets in networks.values())


def _estimate(
    study: LabStudy, tokenizer: WordTokenizer, fleets: list[list[LabCell]], rate: float
) -> LabEstimate:
    first = fleets[0][0]
    tokens, flops = 0, 0.0
    for fleet in fleets:
        longest = max(longest_row(study, cell.task, cell.scratchpad, tokenizer) for cell in fleet)
        shape = study.sizes[first.size]
        config = network_config(
            shape, first.encoding, tokenizer, longest, longest, study.custom_encodings
        )
        plan = fleet_plan(study, fleet[0])
        # Rows of the shortest bucket are about 1/buckets as long as those of the longest.
        per_model = round(plan.steps * plan.batch * longest * (1 + 1 / plan.buckets) / 2)
        tokens += per_model * len(fleet)
        flops += per_model * len(fleet) * flops_per_token(config, longest)
    with torch.device("meta"):
        parameters = FarspanForCausalLM(config).num_parameters()
    return LabEstimate(
        first.encoding,
        first.size,
        sum(map(len, fleets)),
        len(fleets),
        parameters,
        tokens,
        max(map(len, fleets)) * parameters * 20 / GIB,  # weights, two gradients, two moments
        flops / rate,
    )
