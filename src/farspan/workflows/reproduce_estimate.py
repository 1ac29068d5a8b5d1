"""What a study costs: a short window of each model is measured, and multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from farspan.attention.model_facts import config_train_length
from farspan.attention.probe import probe
from farspan.lengths import doublings
from farspan.loading import load, upcast_small_model
from farspan.methods.fit import make_fit_job, search_windows
from farspan.methods.job import FitJob
from farspan.methods.uniform import STEP
from farspan.model import FarspanForCausalLM
from farspan.progress import Stage
from farspan.workflows.extend_estimate import Speed, candidate_stages
from farspan.workflows.pretrain import read_recipe
from farspan.workflows.reproduce_study import GridCell, ReproduceStudy, StudyCell, method_config


@dataclass(frozen=True)
class ModelEstimate:
    """What is missing of a model in a study, and what it takes at most, without benchmarks."""

    model: str
    trained: bool
    cells: int  # with those that are measured already
    stages: tuple[Stage, ...]  # the training, and each missing cell

    @property
    def missing(self) -> int:
        return len(self.stages) - (not self.trained)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """What `--dry-run --json` prints."""
        names = ("model", "trained", "cells", "missing", "seconds")
        return {name: getattr(self, name) for name in names}


def model_stages(
    study: ReproduceStudy,
    name: str,
    trained: Path | None,
    cells: Sequence[StudyCell | GridCell],
    device: str,
) -> Iterator[Stage]:
    """The stages of these cells of a model, and of its training if it is not trained yet."""
    if not cells:
        return
    model = _model(name, trained, device)
    length = config_train_length(model.config) or 0
    methods = [_method(cell) for cell in cells if isinstance(cell, StudyCell)]
    layers, ids = probe(model), _ids(model, length)
    job = make_fit_job(model, layers, length, length, ids, ids)
    speed = Speed.measure(model, layers, job, methods)
    if trained is None:
        train = read_recipe(name).train
        rows = 3 * speed.forward.of(train.length)  # forward and backward
        yield Stage(f"pretrain {name}", train.steps * train.batch * rows, train.steps)
    for cell in cells:
        seconds = (
            _grid_seconds(study, speed, length)
            if isinstance(cell, GridCell)
            else sum(_cell_seconds(study, cell, speed, job))
        )
        yield Stage(cell.label, seconds, 1)


def _model(name: str, trained: Path | None, device: str) -> PreTrainedModel:
    """A trained model, or one of the same shape."""
    if trained is not None:
        return upcast_small_model(load(trained, device=device).model)
    return FarspanForCausalLM(read_recipe(name).config()).to(device).eval()


def _method(cell: StudyCell) -> str:
    return cell.method.partition(":")[0]


def _ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    return torch.arange(length)[None] % model.get_input_embeddings().num_embeddings


def _cell_seconds(
    study: ReproduceStudy, cell: StudyCell, speed: Speed, job: FitJob
) -> Iterator[float]:
    length, longest = job.train_length, job.train_length * study.report_factor
    yield len(study.report) * study.report_windows * speed.forward.of(longest)
    yield speed.of_passkeys(study.passkeys, doublings(length, longest))
    if cell.method == "none":
        return
    target, method = length * cell.factor, _method(cell)
    config = method_config(study.extension_for(cell.factor), cell.method)
    window, _ = search_windows(method.split("+"), config, target, length)
    job = replace(job, target=target, search=_ids(speed.forward.model, window))
    choose = config.choose_windows * speed.forward.of(target)
    for stage in candidate_stages(method, speed, job, config, choose):
        yield stage.seconds


def _grid_seconds(study: ReproduceStudy, speed: Speed, length: int) -> float:
    scales = round((study.grid_high - study.grid_low) / STEP) + 1
    return scales * study.extension.choose_windows * speed.forward.of(8 * length)
