"""What a cell of a study is: a model, extended by a method, and measured on every text."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.layout import length_dependent_rotation
from farspan.attention.model_facts import config_train_length
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.rope import reset_dynamic_rope
from farspan.begin_of_text import load_with_begin_of_text
from farspan.diagnosis.curves import Curves, join_curves, measure_curves
from farspan.diagnosis.knees import KneeRule, find_knee
from farspan.evals.passkey import passkey_accuracy
from farspan.lengths import doublings
from farspan.loading import upcast_small_model
from farspan.methods.fit import fit_methods, make_fit_job, search_windows
from farspan.methods.headscale import best_uniform
from farspan.methods.uniform import full_grid
from farspan.model.compile import prefer_cudnn
from farspan.model.loss import losses_by_context
from farspan.progress import Progress
from farspan.train.metadata import begin_of_text
from farspan.workflows.eval_models import passkeys_in_training, searched_on_passkeys
from farspan.workflows.reproduce_benchmarks import benchmark_scores
from farspan.workflows.reproduce_study import GridCell, StudyCell, method_config, text_name
from farspan.workflows.reproduce_texts import StudyTexts

PROMPT_BATCH = 16
BINS_PER_TRAIN_LENGTH = 16  # of positions, in the curves that a cell stores

Result = dict[str, Any]


def measure_cell(
    texts: StudyTexts, cell: StudyCell, folder: Path, device: str, progress: Progress
) -> Result:
    model, tokenizer, _ = load_with_begin_of_text(folder, device=device)
    model = upcast_small_model(model)
    length = config_train_length(model.config) or 0
    result: Result = {**asdict(cell), "train_length": length, "target": length * cell.factor}
    result["seconds"] = seconds = {}
    if cell.method != "none":
        patch, details = _fit(texts, cell, model, tokenizer, length, progress)
        result["patch"] = patch.describe()
        seconds["fit"] = details["seconds"]
        if "searches" in details:  # their steps, and why they ended
            result["searches"] = details["searches"]
        if patch.scales is not None:
            target = torch.tensor([float(patch.target)])
            scales = patch.scales.at(target)[..., 0]  # [layers, heads] at the target
            result["scales"] = scales.round(decimals=4).tolist()
    started = perf_counter()
    # Long windows take minutes in float32 on a GPU, and bf16 products are what users run there.
    with (
        prefer_cudnn(),
        torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"),
    ):
        result |= _measure(texts, cell, model, tokenizer, length)
        if texts.study.has_benchmarks:
            result["scores"] = benchmark_scores(
                texts.study.benchmarks,
                texts.study.path,
                model,
                tokenizer,
                result["target"],
                keys=texts.study.passkeys,
                trained="yes" if searched_on_passkeys(result) else passkeys_in_training(folder),
            )
    seconds["measure"] = round(perf_counter() - started, 2)
    return result


def measure_grid(
    texts: StudyTexts, cell: GridCell, folder: Path, device: str, progress: Progress
) -> Result:
    model, tokenizer, begin = load_with_begin_of_text(folder, device=device)
    model = upcast_small_model(model)
    study, length = texts.study, config_train_length(model.config) or 0
    windows = texts.windows(
        study.choose, cell.model, tokenizer, 8 * length, study.extension.choose_windows
    ).ids
    settings: dict[str, Any] = {"name": cell.model, "begin": begin.ids, "progress": progress}
    job = make_fit_job(model, probe(model), 8 * length, length, windows, windows, **settings)
    grid = full_grid(model, job, windows, study.grid_low, study.grid_high, bins=64)
    tables = {
        key: np.asarray(getattr(grid, key)).round(4).tolist()
        for key in ("values", "loss", "positions", "best")
    }
    tables["loss"] = [  # JSON has no NaN
        [value if np.isfinite(value) else None for value in row] for row in tables["loss"]
    ]
    interval = None if grid.interval is None else list(grid.interval)
    trend = {"slope": grid.slope, "interval": interval, "r2": grid.r2}
    return {**asdict(cell), **trend, **tables}


def _fit(
    texts: StudyTexts,
    cell: StudyCell,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    progress: Progress,
) -> tuple[Patch, dict[str, Any]]:
    """Fit the method of a cell, and leave its patch applied to the model.

    Returns the patch and the details of the fit, with its seconds in this process. Those of the
    best uniform λ̂, which cells share, count in each of them.
    """
    method, study = cell.method.partition(":")[0], texts.study
    extension = replace(study.extension_for(cell.factor), seed=cell.seed)
    config = method_config(extension, cell.method)
    target = length * cell.factor
    windows = search_windows(method.split("+"), config, target, length)
    search = texts.search_windows(cell.model, tokenizer, *windows, length, cell.seed)
    choose = texts.windows(study.choose, cell.model, tokenizer, target, config.choose_windows).ids
    layers = probe(model)
    settings: dict[str, Any] = {"name": cell.model, "seed": cell.seed, "progress": progress}
    settings |= {"tokenizer": tokenizer, "begin": tuple(begin_of_text(tokenizer))}
    job = make_fit_job(model, layers, target, length, search, choose, **settings)
    starts_from_uniform, shared = config.search.steps and not config.search.init, 0.0
    if method in ("headscale", "headlog") and starts_from_uniform:
        key = (cell.model, target, config.search.constraint, config.choose_windows)
        if key not in texts.uniform_scales:
            started = perf_counter()
            best = best_uniform(model, job, config.search)
            texts.uniform_scales[key] = best, perf_counter() - started
        best, shared = texts.uniform_scales[key]
        config = replace(config, search=replace(config.search, init=best))
    started = perf_counter()
    patch, _ = fit_methods(model, layers, job, config, method.split("+"))
    job.details["seconds"] = round(shared + perf_counter() - started, 2)
    return patch, job.details


def _measure(
    texts: StudyTexts,
    cell: StudyCell,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
) -> Result:
    """Measure losses, entropies, knees and passkey retrieval.

    Loss is measured by position on every text, entropy by position on the first one. Passkeys are
    retrieved at every doubling of the train length.
    """
    study = texts.study
    longest = length * study.report_factor
    result: Result = {"loss": {}, "passkey": {}}
    for file in study.report:
        windows = texts.windows(file, cell.model, tokenizer, longest, study.report_windows)
        ids = windows.ids
        curves = _curves(model, ids, length, entropy=file == study.report[0])
        result["loss"][text_name(file)] = curves.loss.round(4).tolist()
        if study.same_tokens:
            reset_dynamic_rope(model)
            contexts, begin = doublings(length, longest), len(begin_of_text(tokenizer))
            losses = losses_by_context(model, ids, contexts, study.same_tokens, begin)
            result.setdefault("same_tokens", {})[text_name(file)] = {
                str(context): np.round(values, 5).tolist() for context, values in losses.items()
            }
            result.setdefault("documents", {})[text_name(file)] = windows.documents
        if file == study.report[0]:
            result |= _entropy_and_knees(curves, length, min(cell.factor, study.report_factor))
    prompt_length = length
    while prompt_length <= longest:
        result["passkey"][str(prompt_length)] = passkey_accuracy(
            model, tokenizer, prompt_length, keys=study.passkeys, batch=PROMPT_BATCH
        )
        prompt_length *= 2
    return result


def _curves(model: PreTrainedModel, ids: torch.Tensor, length: int, entropy: bool) -> Curves:
    """Loss and, if asked for, entropy by position, in bins of a sixteenth of the train length.

    Where rotation depends on the length of the text, a position is measured in the shortest text
    of L, 2L, 4L, … tokens that has it, as users run it. Otherwise one pass over the windows gives
    the same.
    """
    longest = ids.shape[1]
    marks = doublings(length, longest) if length_dependent_rotation(model) else [longest]
    pieces, measured = [], 0
    for mark in marks:
        reset_dynamic_rope(model)
        bins = BINS_PER_TRAIN_LENGTH * mark // length
        curves = measure_curves(model, ids[:, :mark], bins=bins, entropy=entropy)
        pieces.append(curves.since(measured))
        measured = mark
    return join_curves(pieces)


def _entropy_and_knees(curves: Curves, length: int, factor: int) -> Result:
    """Entropy by position, each head's entropy before the target, and the knees of both curves."""
    target = BINS_PER_TRAIN_LENGTH * factor
    before_target = slice(target - BINS_PER_TRAIN_LENGTH // 4, target)
    return {
        "positions": curves.positions.round(1).tolist(),
        "entropy": curves.entropy.round(4).tolist(),
        "entropy_of_heads": {
            str(layer): table[:, before_target].mean(1).round(4).tolist()
            for layer, table in curves.heads.items()
        },
        "loss_knee": find_knee(curves.positions, curves.loss, length, KneeRule(), rising=False),
        "entropy_knee": find_knee(
            curves.positions, curves.entropy, length, KneeRule(), rising=True
        ),
    }
