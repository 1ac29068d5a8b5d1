"""`farspan reproduce`: run a whole study from one recipe.

It trains or finds the models, fits every method at every target, and measures all of them the same
way on held-out text. The unit of work is a cell: one model, method, factor and seed. Each cell is
computed once, by any process (cells.py). A study that was interrupted resumes with its missing
cells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from farspan.attention.building import small_model
from farspan.attention.model_facts import config_train_length
from farspan.attention.probe import probe
from farspan.bundled import is_bundled
from farspan.cells import (
    Cells,
    cell_key,
    check_results_folder,
    compute_unclaimed,
    repeat_until_done,
)
from farspan.deprecation import renamed_arguments
from farspan.errors import FarspanError
from farspan.files import read_json, write_json, write_text
from farspan.loading import check_source, load_config, load_tokenizer, resolve_device
from farspan.methods.rules import check_compatible
from farspan.methods.search_config import SearchConfig
from farspan.methods.swan_config import SwanConfig
from farspan.progress import (
    SAID_FROM,
    Progress,
    Say,
    automatic,
    format_duration,
    ignore,
    shows_progress,
    with_total,
)
from farspan.recipe import results_folder, to_toml
from farspan.report.figures import Figure, best_scales, method_losses, passkey_heatmap
from farspan.report.study_tables import at_edge, passkey_scores, study_report, summary_line
from farspan.report.style import save
from farspan.summaries import ResultList, draw
from farspan.workflows.pretrain import pretrain, read_recipe
from farspan.workflows.reproduce_cells import Result, measure_cell, measure_grid
from farspan.workflows.reproduce_estimate import ModelEstimate, model_stages
from farspan.workflows.reproduce_study import (
    GridCell,
    ReproduceStudy,
    StudyCell,
    list_cells,
    list_grids,
    method_config,
    method_names,
    read_study,
)
from farspan.workflows.reproduce_texts import StudyTexts

FORMAT = 4  # of a cell's result; raise it with every change to what a cell computes or measures

AnyCell = StudyCell | GridCell


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
    say: Say = ignore,
) -> StudyResults:
    """Run the missing cells of a study and return the results of all its cells.

    study: extend-small, best-scales, extend-hybrids, swan, or a .toml file.
    overrides: its settings, as "key=value".
    out: receives results.json, tables.md and figures; default: runs/STUDY. Several processes can
        run the same study in the same folder: each takes cells that nobody has claimed.

    >>> texts = ["folder=texts", "search=a.txt", "choose=b.txt", 'report=["c.txt"]']
    >>> models = ['methods={nope-twin=["none"]}', "grids=[]", "factors=[2]"]
    >>> size = ["report_factor=2", "report_windows=1", "passkeys=1"]
    >>> farspan.reproduce("extend-small", [*texts, *models, *size], "runs/small")[0]["method"]
    'none'
    """
    recipe, out = read_study(study, overrides), results_folder(study, out)
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
            result = measure_grid(texts, cell, folder, device, progress)
        else:
            result = measure_cell(texts, cell, folder, device, progress)
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
    models = _estimate_models(texts, cells, out, device, progress, say)
    if (seconds := sum(model.seconds for model in models)) >= SAID_FROM:
        missing = sum(model.missing for model in models)
        untrained = sum(not model.trained for model in models)
        training = f", {untrained} model{'s' * (untrained > 1)} to train" if untrained else ""
        benchmarks = " without the benchmarks" if texts.study.has_benchmarks else ""
        say(
            f"{missing} of {len(cells)} cells to measure{training}: at most about "
            f"{format_duration(seconds)}{benchmarks}"
        )
    return with_total(progress, [stage for model in models for stage in model.stages])


def _estimate_models(
    texts: StudyTexts,
    cells: Sequence[AnyCell],
    out: Path,
    device: str,
    progress: Progress,
    say: Say = ignore,
) -> list[ModelEstimate]:
    study = texts.study
    store = Cells(out, say=say) if (out / "cells").is_dir() else None  # it would make the folder
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
    recipe, out = read_study(study, overrides), results_folder(study, out)
    check_results_folder(out, "reproduce")
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
    say: Say = ignore,
) -> StudyResults:
    """Rewrite the report from the finished cells of a study and return their results."""
    recipe, out = read_study(study, overrides), results_folder(study, out)
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
        r2, edge = result["r2"], at_edge(result)
        return (
            f"{result['model']} {result['checkpoint']}: best λ̂ = 1 + {result['slope']:.3f}·ln s"
            + ("" if r2 is None else f", R² {r2:.4f}")
            + (f"; {edge} are on the edge of the grid: widen grid_low or grid_high" if edge else "")
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
    if not {"headscale", "headlog"} & {*method_names(method)}:
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
    if not study.has_benchmarks:
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
        names, settings = method_names(method), method_config(study.extension, method)
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
