"""`farspan reproduce`: a study by one recipe. Train or find the models, fit every method at every target, and measure
all of them alike on text that nothing was chosen by.

The unit is a cell: one model, method, factor and seed. It is computed once, by whichever process (cells.py); a study
that was stopped goes on with the cells that are missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.cells import WAIT, Cells, check_folder, key_of, sweep
from farspan.data.documents import read_documents
from farspan.data.windows import cut_windows
from farspan.diagnosis.curves import measure
from farspan.diagnosis.knees import Rule, find_knee
from farspan.errors import FarspanError
from farspan.evals.passkey import passkey_share
from farspan.files import read_json, sha256_of, weight_files, write_json, write_text
from farspan.loading import check_source, chosen_device, in_exact_numbers, load_config, load_for_text, load_tokenizer
from farspan.methods.headscale import best_uniform
from farspan.methods.uniform import full_grid
from farspan.progress import Progress, silent
from farspan.recipe import to_toml
from farspan.report.figures import Figure, best_scales, losses_of_methods
from farspan.report.study import line_of, report
from farspan.report.style import save
from farspan.twins import is_twin, located
from farspan.workflows.fitting import (
    BEYOND,
    fit_in_turn,
    job_for,
    suited,
)
from farspan.workflows.inspection import small_model
from farspan.workflows.inspection import train_length as trained_on
from farspan.workflows.pretraining import pretrain, read_recipe
from farspan.workflows.studies import Cell, Grid, Study, cells, grids, in_force, read_study, text_name

FORMAT = 1  # of cells and grids; raised whenever what one computes changes, by its method or by how it is measured
PROMPTS = 16  # at once
BINS_INSIDE = 16  # bins of positions to a training length, in what a cell keeps


def reproduce(
    source: str,
    changes: list[str],
    out: str | Path,
    *,
    device: str | None = None,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Run what is missing of a study; returns the results of all its cells. `out` gets them as results.json, tables.md
    and figures.

    Any number of processes may be given the same study and folder: each trains or measures what nobody is at.
    """
    study, out = read_study(source, changes), Path(out)
    items: list[Cell | Grid] = [*cells(study), *grids(study)]
    device = chosen_device(device)
    check_folder(out, "reproduce")
    texts = Texts(study)
    texts.check()
    for model in study.methods:
        _check_model(texts, model)
    store = Cells(out, say=say)
    write_text(out / "recipe.toml", to_toml(study))
    found: dict[Cell | Grid, dict[str, Any]] = {}

    def work(item: Cell | Grid, folder: Path) -> dict[str, Any]:
        if isinstance(item, Grid):
            result = _grid(texts, item, folder, device, progress)
            say(f"{item.model} {item.checkpoint}: best λ̂ = 1 + {result['slope']:.3f}·ln s, R² {result['r2']:.4f}")
        else:
            result = _run(texts, item, folder, device, progress)
            say(line_of(result))
        return result

    while len(found) < len(items):
        before = len(found)
        for model in study.methods:
            trained = find_model(study, model, store, progress)
            if trained is None:
                continue  # another process is at it
            mine = [(item, item.of(trained)) for item in items if item.model == model and item not in found]
            todo = {key_of(_described(texts, *each)): each for each in mine}
            done = sweep(store, todo, lambda each: work(*each), describe=lambda each: _described(texts, *each))
            found |= {todo[key][0]: result for key, result in done.items()}
        if len(found) == before:
            time.sleep(WAIT)
    return _written(items, found, out)


def so_far(
    source: str, changes: list[str], out: str | Path, say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """The results that the folder of a study holds, and nothing more is measured."""
    study, out = read_study(source, changes), Path(out)
    items: list[Cell | Grid] = [*cells(study), *grids(study)]
    found: dict[Cell | Grid, dict[str, Any]] = {}
    for result in _of_last_run(study, out, say):  # of two, the later one
        kind = Grid if "checkpoint" in result else Cell
        found[kind(**{each.name: result[each.name] for each in fields(kind)})] = result
    if not any(item in found for item in cells(study)):
        raise FarspanError(f"{out} holds no result of this study; run it first, or name its folder with -o")
    return _written(items, found, out)


def _of_last_run(study: Study, out: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The results of this study in a folder, oldest first; those of another format or on other text than the last
    one are left away, for no table could hold both."""
    found = []
    files = sorted(out.glob("cells/*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return []
    store = Cells(out, say=say)
    for file in files:
        result = store.get(file.stem)
        told = read_json(file)["description"] if result is not None else {}
        if result is not None and told.get("settings") == _settings(study):
            found.append(((told.get("format"), told.get("texts")), result))
    return [result for run, result in found if run == found[-1][0]]


def _written(items: list[Cell | Grid], found: dict[Cell | Grid, dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Results in their order, as JSON, tables and figures."""
    measured = [found[item] for item in items if isinstance(item, Cell) and item in found]
    laws = [found[item] for item in items if isinstance(item, Grid) and item in found]
    write_json(out / "results.json", {"cells": measured, "grids": laws})
    write_text(out / "tables.md", report(measured, laws))
    figures: dict[str, Figure] = {"loss": losses_of_methods(measured)} | ({"scales": best_scales(laws)} if laws else {})
    for name, figure in figures.items():
        save(figure, out / name)
    return measured


def _described(texts: Texts, item: Cell | Grid, folder: Path) -> dict[str, Any]:
    """All that a result depends on."""
    known = {"format": FORMAT, "settings": _settings(texts.study), "texts": texts.hashes}
    return {**asdict(item), **known, "weights": texts.weights(folder)}


def _settings(study: Study) -> dict[str, Any]:
    """What a study says of how its cells are measured, as JSON has it."""
    aside = ("methods", "factors", "seeds", "grids", "folder", "runs")  # which cells there are, and where things lie
    return json.loads(json.dumps({name: value for name, value in asdict(study).items() if name not in aside}))


def _check_model(texts: Texts, name: str) -> None:
    """Refuse a model that cannot be had, or that a method or a text does not suit, before anything is trained."""
    study = texts.study
    trained = _trained(study, name)
    try:
        if trained is not None:
            check_source(trained)
        config = load_config(trained) if trained else read_recipe(name).config()
    except FarspanError as error:
        raise type(error)(f"methods.{name} names a model that cannot be had: {error}") from None
    fitted = [method.partition(":")[0] for method in study.methods[name] if method != "none"]
    layers = probe(small_model(config, False)) if fitted else []
    for method in fitted:
        suited(method.split("+"), layers, config, f"{name} (methods.{name})")
    if trained is None:
        return  # its tokenizer is still to be made
    length = trained_on(config)
    if length is None:
        raise FarspanError(f"the config of {name} (methods.{name}) does not tell its training length; add it there")
    texts.check_long_enough(name, load_tokenizer(trained), length)


def _trained(study: Study, name: str) -> Path | None:
    """Where a twin, or a model that was trained before, is found."""
    if is_twin(name):
        return Path(name)
    folder = Path(study.runs) / name / "model"
    return folder if folder.exists() else None


def find_model(study: Study, name: str, store: Cells, progress: Progress) -> Path | None:
    """The trained model of a recipe: a twin, one that was trained before, or one trained now; None while another
    process trains it."""
    if (trained := _trained(study, name)) is not None:
        return trained
    folder = Path(study.runs) / name
    with store.claimed([key_of({"model": name})]) as mine:
        if not mine:
            return None
        if not (folder / "model").exists():
            _train(study, name, folder, progress)
    return folder / "model"


def _train(study: Study, name: str, folder: Path, progress: Progress) -> None:
    changes = [f"data.folder={study.folder}"] if study.folder else []
    advance, seen = progress(f"pretrain {name}", read_recipe(name).train.steps), 0

    def listen(moment) -> None:
        nonlocal seen
        advance(moment.step - seen, f"loss {moment.loss:.3f}")
        seen = moment.step

    pretrain(name, changes, folder, progress=progress, listen=listen)


class Texts:
    """The texts of a study as windows of tokens, each read once, and what one cell finds that others begin from: cells
    that follow each other ask for the same."""

    def __init__(self, study: Study):
        self.study = study
        self.best: dict[tuple[str, int, bool, int], float] = {}  # model, target, constraint, windows -> best λ̂
        self._read: dict[tuple[str, str, int, int], torch.Tensor] = {}
        self._weights: dict[Path, list[str]] = {}

    def windows(self, file: str, model: str, tokenizer: Any, length: int, limit: int) -> torch.Tensor:
        asked = (file, model, length, limit)
        if asked not in self._read:
            self._read = {key: ids for key, ids in self._read.items() if key[1] == model}  # the last model's are done
            self._read[asked] = cut_windows(read_documents(self.study.path(file)), tokenizer, length, limit).ids
        return self._read[asked]

    def weights(self, folder: Path) -> list[str]:
        """What the weights of a model are known by; it is not trained again while a study runs."""
        if folder not in self._weights:
            self._weights[folder] = [sha256_of(file) for file in weight_files(Path(located(folder)))]
        return self._weights[folder]

    def check(self) -> None:
        """Refuse a study whose texts are not there, before anything is trained."""
        for file in self.study.files:
            if not (path := self.study.path(file)).exists():
                raise FarspanError(f"{path} does not exist, and the study reads it; say where it lies with folder=PATH")

    def check_long_enough(self, model: str, tokenizer: Any, length: int) -> None:
        """Refuse a text without one document that is as long as the longest window cut from it."""
        study, target = self.study, length * max(self.study.factors)
        asked = [("report", file, length * study.report_factor) for file in study.report]
        if set(study.methods[model]) != {"none"}:
            asked += [("search", study.search, round(BEYOND * target)), ("choose", study.choose, target)]
        if model in study.grids:
            asked.append(("choose", study.choose, 8 * length))
        for key, file, reach in asked:
            try:
                cut_windows(read_documents(study.path(file)), tokenizer, reach, 1)
            except FarspanError as error:
                raise type(error)(f"{key} names {file}, which does not serve {model}: {error}") from None

    @cached_property
    def hashes(self) -> dict[str, list[str]]:
        """The SHA-256 of the files of every text: a name does not tell what is in it."""
        paths = {name: self.study.path(name) for name in self.study.files}
        files = {name: [path] if path.is_file() else sorted(path.rglob("*")) for name, path in paths.items()}
        return {name: [sha256_of(file) for file in some if file.is_file()] for name, some in files.items()}


def _run(texts: Texts, cell: Cell, folder: Path, device: str, progress: Progress) -> dict[str, Any]:
    model, tokenizer = load_for_text(folder, device=device)
    model = in_exact_numbers(model)
    length = trained_on(model.config) or 0
    found: dict[str, Any] = {**asdict(cell), "train_length": length, "target": length * cell.factor}
    if cell.method != "none":
        patch = _fit(texts, cell, model, tokenizer, length, progress)
        found["patch"] = patch.describe()
        if patch.scales is not None:
            target = torch.tensor([float(patch.target)])
            found["scales"] = patch.scales.at(target)[..., 0].round(decimals=4).tolist()  # [layers, heads], there
    found |= _measured(texts, cell, model, tokenizer, length)
    return found


def _fit(
    texts: Texts,
    cell: Cell,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    progress: Progress,
) -> Patch:
    """The method's patch, live on the model."""
    method, study = cell.method.partition(":")[0], texts.study
    how = in_force(replace(study.extension, seed=cell.seed), cell.method)
    target = length * cell.factor
    search = texts.windows(study.search, cell.model, tokenizer, round(BEYOND * target), how.search_windows)
    choose = texts.windows(study.choose, cell.model, tokenizer, target, how.choose_windows)
    job = job_for(model, target, length, search, choose, name=cell.model, seed=cell.seed, progress=progress)
    if method in ("headscale", "headlog") and not how.search.init:
        asked = (cell.model, target, how.search.constraint, how.choose_windows)
        if asked not in texts.best:
            texts.best[asked] = best_uniform(model, job, how.search)
        how = replace(how, search=replace(how.search, init=texts.best[asked]))
    patch, _ = fit_in_turn(model, job, how, method.split("+"))
    return patch


def _measured(
    texts: Texts, cell: Cell, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int
) -> dict[str, Any]:
    """Loss and entropy by position on every text, each head's entropy before the target, knees, and passkeys at every
    doubling."""
    study = texts.study
    reach = length * study.report_factor
    bins = BINS_INSIDE * study.report_factor
    found: dict[str, Any] = {"loss": {}, "passkey": {}}
    for file in study.report:
        ids = texts.windows(file, cell.model, tokenizer, reach, study.report_windows)
        curves = measure(model, ids, bins=bins)
        found["loss"][text_name(file)] = curves.loss.round(4).tolist()
        if file == study.report[0]:
            found["positions"] = curves.positions.round(1).tolist()
            found["entropy"] = curves.entropy.round(4).tolist()
            target = BINS_INSIDE * min(cell.factor, study.report_factor)
            near = slice(target - BINS_INSIDE // 4, target)
            found["entropy_of_heads"] = {
                str(layer): table[:, near].mean(1).round(4).tolist() for layer, table in curves.heads.items()
            }
            found["loss_knee"] = find_knee(curves.positions, curves.loss, length, Rule(), rising=False)
            found["entropy_knee"] = find_knee(curves.positions, curves.entropy, length, Rule(), rising=True)
    power = 0
    while length * 2**power <= reach:
        mark = length * 2**power
        found["passkey"][str(mark)] = passkey_share(model, tokenizer, mark, keys=study.passkeys, batch=PROMPTS)
        power += 1
    return found


def _grid(texts: Texts, item: Grid, folder: Path, device: str, progress: Progress) -> dict[str, Any]:
    model, tokenizer = load_for_text(folder, device=device)
    model = in_exact_numbers(model)
    study, length = texts.study, trained_on(model.config) or 0
    windows = texts.windows(study.choose, item.model, tokenizer, 8 * length, study.extension.choose_windows)
    job = job_for(model, 8 * length, length, windows, windows, name=item.model, progress=progress)
    grid = full_grid(model, job, windows, study.grid_low, study.grid_high)
    tables = {key: np.asarray(getattr(grid, key)).round(4).tolist() for key in ("values", "loss", "positions", "best")}
    law = {"slope": grid.slope, "interval": list(grid.interval), "r2": grid.r2}
    return {**asdict(item), **law, **tables}
