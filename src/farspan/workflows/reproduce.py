"""`farspan reproduce`: run a whole study from one recipe.

It trains or finds the models, fits every method at every target, and measures all of them the same
way on held-out text. The unit of work is a cell: one model, method, factor and seed. Each cell is
computed once, by any process (cells.py). A study that was interrupted resumes with its missing
cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.building import small_model
from farspan.attention.layout import length_dependent_rotation
from farspan.attention.model_facts import config_train_length
from farspan.attention.patch import Patch, reset_dynamic_rope
from farspan.attention.probe import probe
from farspan.begin_of_text import load_with_begin_of_text
from farspan.bundled import is_bundled, resolve_bundled
from farspan.cells import (
    Cells,
    cell_key,
    check_results_folder,
    compute_unclaimed,
    repeat_until_done,
)
from farspan.data.documents import read_documents
from farspan.data.windows import Windows, cut_windows
from farspan.deprecation import renamed_arguments
from farspan.diagnosis.curves import Curves, join_curves, measure_curves
from farspan.diagnosis.knees import KneeRule, find_knee
from farspan.errors import FarspanError
from farspan.evals.passkey import passkey_accuracy
from farspan.files import read_json, sha256_of, weight_files, write_json, write_text
from farspan.lengths import doublings
from farspan.loading import (
    check_source,
    load_config,
    load_tokenizer,
    resolve_device,
    upcast_small_model,
)
from farspan.methods.headscale import SearchConfig, best_uniform
from farspan.methods.registry import (
    check_compatible,
    fit_methods,
    make_fit_job,
    search_windows,
)
from farspan.methods.swan import SwanConfig
from farspan.methods.uniform import full_grid
from farspan.model import FarspanConfig
from farspan.model.compile import prefer_cudnn
from farspan.model.loss import losses_by_context
from farspan.progress import (
    SAID_FROM,
    Progress,
    automatic,
    format_duration,
    shows_progress,
    with_total,
)
from farspan.recipe import to_toml
from farspan.report.figures import Figure, best_scales, method_losses, passkey_heatmap
from farspan.report.study_tables import passkey_scores, study_report, summary_line
from farspan.report.style import save
from farspan.summaries import ResultList, draw
from farspan.train.metadata import begin_of_text, stated_begin_of_text
from farspan.train.search_text import is_mixture, search_text, text_files
from farspan.workflows.eval_models import passkeys_in_training, searched_on_passkeys
from farspan.workflows.pretrain import pretrain, read_recipe
from farspan.workflows.reproduce_benchmarks import StudyBenchmarks, benchmark_scores
from farspan.workflows.reproduce_estimate import ModelEstimate, model_stages
from farspan.workflows.reproduce_study import (
    GridCell,
    ReproduceStudy,
    StudyCell,
    list_cells,
    list_grids,
    method_config,
    read_study,
    text_name,
)

FORMAT = 4  # of a cell's result; raise it with every change to what a cell computes or measures
PROMPT_BATCH = 16
BINS_PER_TRAIN_LENGTH = 16  # of positions, in the curves that a cell stores

AnyCell = StudyCell | GridCell
Result = dict[str, Any]
Say = Callable[[str], None]


class StudyResults(ResultList):
    """The results of the cells of a study."""

    def facts(self) -> dict[str, str]:
        return {str(number): _result_line(result) for number, result in enumerate(self, 1)}


@draw.register
def _(results: StudyResults) -> Figure:
    return method_losses(results)


@renamed_arguments(source="study", changes="overrides")
@shows_progress
def reproduce(
    study: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    device: str | None = None,
    progress: Progress = automatic,
    say: Say = lambda text: None,
) -> StudyResults:
    """Run the missing cells of a study and return the results of all its cells.

    study: extend-small, best-scales, extend-hybrids, swan, or a .toml file.
    overrides: its settings, as "key=value".
    out: receives results.json, tables.md and figures; default: runs/STUDY. Several processes can
        run the same study in the same folder: each takes cells that nobody has claimed.

    >>> texts = ["folder=texts", "search=a.txt", "choose=b.txt", 'report=["c.txt"]']
    >>> models = ['methods={nope-twin=["none"]}', "grids=[]", "factors=[2]", "beyond={}"]
    >>> size = ["report_factor=2", "report_windows=1", "passkeys=1"]
    >>> farspan.reproduce("extend-small", [*texts, *models, *size], "runs/small")[0]["method"]
    'none'
    """
    recipe, out = read_study(study, overrides), study_folder(study, out)
    device = resolve_device(device)
    check_results_folder(out, "reproduce")
    texts, cells = _checked(recipe)
    progress = _announce(texts, cells, out, device, progress, say)
    for model in recipe.methods:
        _check_texts(texts, model)
    store = Cells(out, say=say)
    write_text(out / "recipe.toml", to_toml(recipe))
    results: dict[AnyCell, Result] = {}

    def work(item: tuple[AnyCell, Path]) -> Result:
        cell, folder = item
        advance = progress(cell.label, 1)
        if isinstance(cell, GridCell):
            result = _measure_grid(texts, cell, folder, device, progress)
        else:
            result = _measure_cell(texts, cell, folder, device, progress)
        advance()
        say(_result_line(result))
        return result

    def run_pass() -> int:
        for model in recipe.methods:
            trained = find_or_train_model(recipe, model, store, progress)
            if trained is None:
                continue  # another process is training it
            missing = [cell for cell in cells if cell.model == model and cell not in results]
            items = [(cell, cell.folder(trained)) for cell in missing]
            todo = {cell_key(_describe(texts, *item)): item for item in items}
            finished = compute_unclaimed(
                store, todo, work, describe=lambda item: _describe(texts, *item)
            )
            results.update({todo[key][0]: result for key, result in finished.items()})
        return len(cells) - len(results)

    repeat_until_done(run_pass)
    return _write_report(cells, results, out)


def _announce(
    texts: StudyTexts,
    cells: Sequence[AnyCell],
    out: Path,
    device: str,
    progress: Progress,
    say: Say,
) -> Progress:
    """Say what the missing cells and models take; the progress then shows the time left of all."""
    models = _estimate_models(texts, cells, out, device, progress)
    if (seconds := sum(model.seconds for model in models)) >= SAID_FROM:
        missing, untrained = sum(model.missing for model in models), len(models)
        untrained -= sum(model.trained for model in models)
        training = f", {untrained} model{'s' * (untrained > 1)} to train" if untrained else ""
        benchmarks = (
            "" if texts.study.benchmarks == StudyBenchmarks() else " without the benchmarks"
        )
        say(
            f"{missing} of {len(cells)} cells to measure{training}: at most about "
            f"{format_duration(seconds)}{benchmarks}"
        )
    return with_total(progress, [stage for model in models for stage in model.stages])


def _estimate_models(
    texts: StudyTexts, cells: Sequence[AnyCell], out: Path, device: str, progress: Progress
) -> list[ModelEstimate]:
    study = texts.study
    store = Cells(out) if (out / "cells").is_dir() else None  # it would make the folder
    advance, models = progress("estimate the time", len(study.methods)), []
    for name in study.methods:
        trained, missing = _trained_model(study, name), [c for c in cells if c.model == name]
        count = len(missing)
        if trained is not None and store is not None:
            keys = {c: cell_key(_describe(texts, c, c.folder(trained))) for c in missing}
            missing = [cell for cell, key in keys.items() if store.get(key) is None]
        stages = tuple(model_stages(study, name, trained, missing, device))
        models.append(ModelEstimate(name, trained is not None, count, stages))
        advance()
    return models


@shows_progress
def estimate_study(
    study: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    device: str | None = None,
    progress: Progress = automatic,
) -> list[ModelEstimate]:
    """Check a study as `reproduce` does, and say what is missing of it. Writes nothing."""
    recipe, out = read_study(study, overrides), study_folder(study, out)
    texts, cells = _checked(recipe)
    return _estimate_models(texts, cells, out, resolve_device(device), progress)


def _checked(recipe: ReproduceStudy) -> tuple[StudyTexts, list[AnyCell]]:
    """The texts and the cells of a study whose models and files are there."""
    texts = StudyTexts(recipe)
    texts.check()
    for model in recipe.methods:
        _check_model(texts, model)
    return texts, [*list_cells(recipe), *list_grids(recipe)]


@renamed_arguments(source="study", changes="overrides")
def summarize(
    study: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    say: Say = lambda text: None,
) -> StudyResults:
    """Rewrite the report from the finished cells of a study and return their results."""
    recipe, out = read_study(study, overrides), study_folder(study, out)
    study_cells = list_cells(recipe)
    results: dict[AnyCell, Result] = {}
    for result in _results_of_last_run(recipe, out, say):  # of two for one cell, the later
        kind = GridCell if "checkpoint" in result else StudyCell
        results[kind(**{field.name: result[field.name] for field in fields(kind)})] = result
    if not any(cell in results for cell in study_cells):
        raise FarspanError(
            f"{out} holds no results of this study; run it first, or set its folder with --out"
        )
    return _write_report([*study_cells, *list_grids(recipe)], results, out)


def study_folder(study: str, out: str | Path | None = None) -> Path:
    """The results folder of a study; default: runs/STUDY.

    >>> str(study_folder("extend-small"))
    'runs/extend-small'
    """
    return Path(out) if out is not None else Path("runs") / Path(study).stem


def _results_of_last_run(study: ReproduceStudy, out: Path, say: Say) -> list[Result]:
    """The results of this study in a folder, oldest first.

    Results of another format, or on other texts than the last one, are left out: one table must
    not mix them.
    """
    files = sorted(out.glob("cells/*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return []
    store = Cells(out, say=say)
    results = []
    for file in files:
        result = store.get(file.stem)
        description = read_json(file)["description"] if result is not None else {}
        settings = _settings(study, description.get("factor", 1))
        if result is not None and description.get("settings") == settings:
            results.append(((description.get("format"), description.get("texts")), result))
    return [result for run, result in results if run == results[-1][0]]


def _write_report(
    cells: Sequence[AnyCell], results: Mapping[AnyCell, Result], out: Path
) -> StudyResults:
    """Write the results in the order of the cells, as JSON, tables and figures."""
    measured = [results[cell] for cell in cells if isinstance(cell, StudyCell) and cell in results]
    grids = [results[cell] for cell in cells if isinstance(cell, GridCell) and cell in results]
    write_json(out / "results.json", {"cells": measured, "grids": grids})
    write_text(out / "tables.md", study_report(measured, grids))
    figures: dict[str, Figure] = {"loss": method_losses(measured)}
    if grids:
        figures["scales"] = best_scales(grids)
    if heatmaps := passkey_scores(measured):
        figures["passkeys"] = passkey_heatmap(heatmaps, measured[0]["train_length"])
    for name, figure in figures.items():
        save(figure, out / name)
    return StudyResults(measured)


def _result_line(result: Result) -> str:
    if "checkpoint" in result:  # a grid
        return (
            f"{result['model']} {result['checkpoint']}: "
            f"best λ̂ = 1 + {result['slope']:.3f}·ln s, R² {result['r2']:.4f}"
        )
    return summary_line(result)


def _describe(texts: StudyTexts, cell: AnyCell, folder: Path) -> dict[str, Any]:
    """Everything that the result of a cell depends on."""
    settings = _settings(texts.study, getattr(cell, "factor", 1))
    shared = {"format": FORMAT, "settings": settings, "texts": texts.hashes}
    if texts.benchmark_sources and isinstance(cell, StudyCell):
        shared["benchmarks"] = texts.benchmark_sources
    if isinstance(cell, StudyCell) and (plan := _search_defaults(texts.study, cell.method)):
        shared["search"] = plan
    if begin := texts.begin_of_text(folder):  # else the key is that of earlier versions
        shared["begin of text"] = list(begin)
    return {**asdict(cell), **shared, "weights": texts.weight_hashes(folder)}


def _search_defaults(study: ReproduceStudy, method: str) -> dict[str, Any]:
    """What a search has that is not set: its defaults changed between versions.

    A number of steps without passkeys is the search of Wang 2024, which does not change.
    """
    search = method_config(study.extension, method).search
    if not {"headscale", "headlog"} & {*method.partition(":")[0].split("+")}:
        return {}
    plan = json.loads(json.dumps(asdict(search.resolve(True))))
    if plan["passkeys"]:
        plan["passkey_lengths"] = "log-uniform"
    elif search.steps:
        return {}
    return plan


def _settings(study: ReproduceStudy, factor: int) -> dict[str, Any]:
    """The settings that decide how a cell is measured, as JSON reads them back."""
    study = replace(study, extension=study.extension_for(factor))
    # These decide which cells there are, and where files are.
    excluded = ("methods", "factors", "seeds", "grids", "folder", "runs", "beyond")
    settings = {name: value for name, value in asdict(study).items() if name not in excluded}
    if not study.same_tokens:  # as before there was such a setting
        del settings["same_tokens"]
    if study.benchmarks == StudyBenchmarks():
        del settings["benchmarks"]
    for name in ("max_steps", "min_gain", "quick", "passkeys", "answers", "tail"):
        if getattr(study.extension.search, name) == getattr(SearchConfig, name):
            del settings["extension"]["search"][name]
    for name in ("long", "long_length"):
        if getattr(study.extension.swan, name) == getattr(SwanConfig, name):
            del settings["extension"]["swan"][name]
    if not study.extension.search.micro_batch:  # it changes no result; its default was 8
        settings["extension"]["search"]["micro_batch"] = 8
    return json.loads(json.dumps(settings))


def _check_model(texts: StudyTexts, name: str) -> None:
    """Refuse a model that is not available, or incompatible with a method or a text.

    This runs before anything is trained.
    """
    study = texts.study
    trained = _trained_model(study, name)
    try:
        if trained is not None:
            check_source(trained)
        config = load_config(trained) if trained else read_recipe(name).config()
    except FarspanError as error:
        raise type(error)(f"the model {name} (methods.{name}) is not available: {error}") from None
    fitted = [method for method in study.methods[name] if method != "none"]
    layers = probe(small_model(config, False)) if fitted else []
    for method in fitted:
        names, settings = (
            method.partition(":")[0].split("+"),
            method_config(study.extension, method),
        )
        check_compatible(names, layers, config, f"{name} (methods.{name})", settings)
    if config_train_length(config) is None:
        raise FarspanError(
            f"the config of {name} (methods.{name}) has no train length; add it to the config"
        )


def _check_texts(texts: StudyTexts, name: str) -> None:
    """Refuse texts without a document that is long enough. A mixture is packed, in minutes."""
    if (trained := _trained_model(texts.study, name)) is not None:  # else there is no tokenizer yet
        length = config_train_length(load_config(trained)) or 0
        texts.check_long_enough(name, load_tokenizer(trained), length)


def _trained_model(study: ReproduceStudy, name: str) -> Path | None:
    """A bundled model, or the folder of one that was trained before."""
    if is_bundled(name):
        return Path(name)
    folder = Path(study.runs) / name / "model"
    return folder if folder.exists() else None


def find_or_train_model(
    study: ReproduceStudy, name: str, store: Cells, progress: Progress
) -> Path | None:
    """The trained model of a recipe, trained now if necessary.

    Returns None while another process trains it.
    """
    if (trained := _trained_model(study, name)) is not None:
        return trained
    folder = Path(study.runs) / name
    with store.claimed([cell_key({"model": name})]) as claimed_keys:
        if not claimed_keys:
            return None
        if not (folder / "model").exists():
            _train(study, name, folder, progress)
    return folder / "model"


def _train(study: ReproduceStudy, name: str, folder: Path, progress: Progress) -> None:
    overrides = [f"data.folder={study.folder}"] if study.folder else []
    pretrain(name, overrides, folder, progress=progress)


class StudyTexts:
    """The texts of a study, and intermediate results that consecutive cells share.

    Each text is cut into windows of tokens once per model.
    """

    def __init__(self, study: ReproduceStudy):
        self.study = study
        # (model, target, constraint, windows) -> best λ̂
        self.uniform_scales: dict[tuple[str, int, bool, int], float] = {}
        self._windows: dict[tuple[str | int, ...], Windows] = {}
        self._weight_hashes: dict[Path, list[str]] = {}
        self._begins: dict[Path, tuple[int, ...]] = {}

    def windows(self, file: str, model: str, tokenizer: Any, length: int, limit: int) -> Windows:
        key = (file, model, length, limit)
        if key not in self._windows:
            # Drop the windows of the previous model: its cells are done.
            self._windows = {old: kept for old, kept in self._windows.items() if old[1] == model}
            documents = read_documents(self.study.path(file))
            begin = begin_of_text(tokenizer)
            self._windows[key] = cut_windows(documents, tokenizer, length, limit, begin=begin)
        return self._windows[key]

    def search_windows(
        self, model: str, tokenizer: Any, length: int, limit: int, train_length: int, seed: int
    ) -> torch.Tensor:
        """Windows of the search text; of a mixture, every seed draws others."""
        study, key = self.study, (self.study.search, model, length, limit, seed)
        if key not in self._windows:
            self._windows[key] = search_text(
                study.path(study.search),
                tokenizer,
                length,
                limit,
                train_length,
                seed=seed,
                packed=study.extension.packed,
                folder=study.folder,
                begin=begin_of_text(tokenizer),
            )
        return self._windows[key].ids

    def begin_of_text(self, folder: Path) -> tuple[int, ...]:
        """The token that the texts of a model begin with, if any."""
        if folder not in self._begins:
            tokenizer = load_tokenizer(folder)
            silent = stated_begin_of_text(tokenizer)[0] is None
            if silent and not isinstance(load_config(folder), FarspanConfig):
                self._begins[folder] = load_with_begin_of_text(folder).begin.ids
            else:
                self._begins[folder] = tuple(begin_of_text(tokenizer))
        return self._begins[folder]

    def weight_hashes(self, folder: Path) -> list[str]:
        """The SHA-256 of a model's weight files, which do not change while a study runs."""
        if folder not in self._weight_hashes:
            self._weight_hashes[folder] = [
                sha256_of(file) for file in weight_files(Path(resolve_bundled(folder)))
            ]
        return self._weight_hashes[folder]

    def check(self) -> None:
        """Refuse a study with a missing text, before anything is trained."""
        for file in self.study.files:
            if not (path := self.study.path(file)).exists():
                raise FarspanError(
                    f"{path}, a text of the study, was not found; set its folder with folder=PATH"
                )
            try:
                text_files(path, self.study.folder)
            except FarspanError as error:
                raise type(error)(f"{file} cannot be read: {error}") from None
        _ = self.benchmark_sources

    def check_long_enough(self, model: str, tokenizer: Any, length: int) -> None:
        """Refuse a text that has no document as long as the longest window to cut from it."""
        study, target = self.study, length * max(self.study.factors)
        needed = [("report", file, length * study.report_factor) for file in study.report]
        for method in filter("none".__ne__, study.methods[model]):
            names = method.partition(":")[0].split("+")
            configs = {
                factor: method_config(study.extension_for(factor), method)
                for factor in study.factors
            }
            window = max(
                search_windows(names, config, length * factor, length)[0]
                for factor, config in configs.items()
            )
            needed += [("search", study.search, window), ("choose", study.choose, target)]
        if model in study.grids:
            needed.append(("choose", study.choose, 8 * length))
        for key, file, window in dict.fromkeys(needed):
            try:
                if key == "search":
                    self.search_windows(model, tokenizer, window, 1, length, 0)
                else:
                    cut_windows(read_documents(study.path(file)), tokenizer, window, 1)
            except FarspanError as error:
                raise type(error)(
                    f"{key} names {file}, which cannot be used for {model}: {error}"
                ) from None

    @cached_property
    def benchmark_sources(self) -> list[Any]:
        return self.study.benchmarks.sources(self.study.path)

    @cached_property
    def hashes(self) -> dict[str, list[str]]:
        """The SHA-256 of the files of every text, since a file name does not fix its content."""
        hashes = {}
        for name in self.study.files:
            path = self.study.path(name)
            files = [path] if path.is_file() else sorted(path.rglob("*"))
            if is_mixture(path):
                files += text_files(path, self.study.folder)
            hashes[name] = [sha256_of(file) for file in files if file.is_file()]
        return hashes


def _measure_cell(
    texts: StudyTexts, cell: StudyCell, folder: Path, device: str, progress: Progress
) -> Result:
    model, tokenizer, _ = load_with_begin_of_text(folder, device=device)
    model = upcast_small_model(model)
    length = config_train_length(model.config) or 0
    result: Result = {**asdict(cell), "train_length": length, "target": length * cell.factor}
    if cell.method != "none":
        patch, details = _fit(texts, cell, model, tokenizer, length, progress)
        result["patch"] = patch.describe()
        if "searches" in details:  # their steps, and why they ended
            result["searches"] = details["searches"]
        if patch.scales is not None:
            target = torch.tensor([float(patch.target)])
            scales = patch.scales.at(target)[..., 0]  # [layers, heads] at the target
            result["scales"] = scales.round(decimals=4).tolist()
    # Long windows take minutes in float32 on a GPU, and bf16 products are what users run there.
    with (
        prefer_cudnn(),
        torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"),
    ):
        result |= _measure(texts, cell, model, tokenizer, length)
        if texts.study.benchmarks != StudyBenchmarks():
            result["scores"] = benchmark_scores(
                texts.study.benchmarks,
                texts.study.path,
                model,
                tokenizer,
                result["target"],
                keys=texts.study.passkeys,
                trained="yes" if searched_on_passkeys(result) else passkeys_in_training(folder),
            )
        return result


def _fit(
    texts: StudyTexts,
    cell: StudyCell,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    progress: Progress,
) -> tuple[Patch, dict[str, Any]]:
    """Fit the method of a cell, and leave its patch applied to the model.

    Returns the patch and the details of the fit.
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
    starts_from_uniform = config.search.steps and not config.search.init
    if method in ("headscale", "headlog") and starts_from_uniform:
        key = (cell.model, target, config.search.constraint, config.choose_windows)
        if key not in texts.uniform_scales:
            texts.uniform_scales[key] = best_uniform(model, job, config.search)
        config = replace(config, search=replace(config.search, init=texts.uniform_scales[key]))
    patch, _ = fit_methods(model, layers, job, config, method.split("+"))
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


def _measure_grid(
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
    interval = None if grid.interval is None else list(grid.interval)
    trend = {"slope": grid.slope, "interval": interval, "r2": grid.r2}
    return {**asdict(cell), **trend, **tables}
