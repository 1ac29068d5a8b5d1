"""A study runs each cell once, measures all cells the same way, and resumes when interrupted."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import AutoTokenizer

from farspan import cli
from farspan.attention.rope import reset_dynamic_rope, set_rope
from farspan.bundled import BUNDLED_MODELS
from farspan.cells import Cells
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.diagnosis.curves import Curves, measure_curves
from farspan.errors import FarspanError
from farspan.evals import passkey
from farspan.intervals import mean_bound
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.search_config import FULL, SearchConfig
from farspan.methods.tuning import TuningConfig
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.report.figures import best_scales, method_losses
from farspan.report.study_tables import (
    benchmark_table,
    heads_table,
    law_table,
    loss_table,
    mean_at,
    paired_table,
    study_report,
)
from farspan.report.style import save
from farspan.train.metadata import write_training_metadata
from farspan.workflows import extend_estimate, reproduce_benchmarks, reproduce_cells, timing
from farspan.workflows import reproduce as reproduce_workflow
from farspan.workflows.reproduce import (
    _describe,
    _result_line,
    _search_defaults,
    _settings,
    reproduce,
    summarize,
)
from farspan.workflows.reproduce_estimate import model_stages
from farspan.workflows.reproduce_study import (
    ReproduceStudy,
    StudyCell,
    list_cells,
    list_grids,
    read_study,
)
from farspan.workflows.reproduce_texts import StudyTexts


@pytest.mark.parametrize("name", ["extend-small", "extend-hybrids"])
def test_bundled_studies_parse(name):
    study = read_study(name)
    cells = list_cells(study)
    assert len(set(cells)) == len(cells)
    assert {cell.model for cell in cells} == set(study.methods)
    for cell in cells:
        assert cell.seed == 0 or "head" in cell.method or "tune=" in cell.method


def test_ntk_rows_come_in_both_kinds():
    """Wang 2024 measured the dynamic one; the static one is what most users set."""
    for methods in (read_study(name).methods for name in ("extend-small", "extend-hybrids")):
        for names in methods.values():
            assert ("ntk" in names) == ("dynamic-ntk" in names)
    assert "dynamic-ntk" in read_study("extend-small").methods["small-rope"]


def test_unknown_method_gets_a_suggestion():
    with pytest.raises(
        FarspanError, match="methods.small-nope names 'headscal', .* did you mean headscale"
    ):
        list_cells(ReproduceStudy({"small-nope": ("headscal",)}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(methods={"nope-twin": ("none", "none")}),
            r"methods.nope-twin has duplicate entries: \['none', 'none'\]; ",
        ),
        (dict(factors=(2, 4, 2)), r"factors has duplicate entries: \[2, 4, 2\]; name each"),
        (dict(seeds=(0, 0)), "seeds has duplicate entries"),
        (dict(grids=("nope-twin", "nope-twin")), "grids has duplicate entries"),
        (dict(report=("a.txt", "a.txt")), "report has duplicate entries"),
        (
            dict(grids=("rope-twin",)),
            r"grids names 'rope-twin', which is not under \[methods\] \(nope-twin\); add it",
        ),
        (dict(methods={}), "methods is empty; name at least one"),
        (dict(seeds=()), "seeds is empty"),
        (
            dict(search="a.txt", report=("x/../a.txt",)),
            r"not share text, but a.txt and x/\.\./a.txt do; use each",
        ),
        (
            dict(methods={"nope-twin": ()}),
            "methods.nope-twin is empty; name at least one method, or none",
        ),
        (dict(report_windows=0), "report_windows is 0; choose 1 or more"),
        (dict(report_factor=0), "report_factor is 0; choose 1 or more"),
        (dict(passkeys=0), "passkeys is 0; choose 1 or more"),
        (dict(factors=(2, 0)), "factors names 0, .*; choose 2 or more"),
        (dict(factors=(-2,)), "factors names -2, "),
        (dict(factors=(1, 2)), "factors names 1, .*; choose 2 or more"),
        (
            dict(factors=(2, 4), report_factor=2),
            "report_factor is 2 and factors names 4, so that target would not be",
        ),
        (dict(seeds=(0, -1)), "seeds names -1; choose seeds from 0 to"),
        (
            dict(grid_low=3.0, grids=("nope-twin",)),
            r"grid_low is 3 and grid_high 2\.6; choose 0\.01 <= grid_low <= grid_high",
        ),
        (
            dict(grid_low=0.0, grids=("nope-twin",)),
            r"grid_low is 0 and grid_high 2\.6; choose 0\.01 <= grid_low",
        ),
        (dict(search="a.txt", choose="a.txt"), "not share text, but a.txt and a.txt do"),
        (
            dict(report=("a/books.txt", "b/books.jsonl")),
            r"report has texts with equal names \(books, books\), .*; rename a file",
        ),
        (dict(beyond={"3": 1.0}), "beyond names 3, .*; choose from the factors 2, 4, 8"),
        (dict(beyond={"8": 0.5}), "search.beyond is 0.5; choose a factor from 1 to 2"),
    ],
)
def test_refuses_a_study_that_could_not_finish(settings, message):
    """It would wait forever for a second result of one cell, or measure nothing."""
    with pytest.raises(FarspanError, match=message):
        ReproduceStudy(**{"methods": {"nope-twin": ("none", "uniform")}, **settings})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("pi+ntk", r"pi\+ntk sets rotation 2 times"),
        ("headscale:tune=fair", "headscale does not use tune=fair"),
        ("yarn:search.steps=3", "yarn does not use search.steps=3"),
        ("none+uniform", "names 'none.uniform', but none is the model as trained; remove"),
        ("none:seed=1", "names 'none:seed=1', but none is the model as trained"),
    ],
)
def test_refuses_a_method_that_ignores_a_part_of_its_name(method, message):
    with pytest.raises(FarspanError, match=message):
        list_cells(ReproduceStudy({"small-rope": (method,)}))


def test_study_settings_may_be_used_by_some_methods_only():
    config = ExtendConfig(
        search=SearchConfig(steps=3), tuning=TuningConfig(steps=3), tune="fair", fitted=False
    )
    study = ReproduceStudy(
        {"m": ("uniform", "headscale", "logn", "yarn:tuning.lr=0.5", "drope")},
        extension=config,
        factors=(2,),
    )
    assert [cell.method for cell in list_cells(study)] == [
        "uniform",
        *["headscale"] * 3,
        "logn",
        *["yarn:tuning.lr=0.5"] * 3,
        *["drope"] * 3,
    ]


@pytest.mark.parametrize(
    ("tune", "method", "seeds"),
    [
        ("", "yarn", 1),
        ("fair", "yarn", 3),
        ("fair", "yarn:tune=", 1),
        ("", "yarn:tune=raw", 3),
        ("fair", "uniform", 1),
        ("fair", "yarn+uniform", 3),
        ("", "yarn+headscale", 3),
        ("", "drope", 3),
    ],
)
def test_random_methods_run_with_every_seed(tune, method, seeds):
    """Whether a method is random depends on its settings: the study's and its variant's."""
    study = ReproduceStudy({"m": (method,)}, extension=ExtendConfig(tune=tune), factors=(2,))
    assert [cell.seed for cell in list_cells(study)] == list(range(seeds))


NONE_ONLY = ['methods.nope-twin=["none"]', "grids=[]"]


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A model of two layers with train length 32, and the texts of a study."""
    folder = tmp_path_factory.mktemp("template")
    text = next(iter(read_documents("python-docs"))).text
    tokenizer = train_tokenizer([text[:20_000]], 300)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=300,
    )
    torch.manual_seed(0)
    FarspanForCausalLM(FarspanConfig(**shape, max_position_embeddings=32)).save_pretrained(
        folder / "model"
    )
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for number, name in enumerate(("books_train_a", "books_train_b", "books_val", "pg19_test_a")):
        part = text[number * 20_000 : (number + 1) * 20_000]
        (folder / "data" / f"{name}.jsonl").write_text(json.dumps({"text": part}) + "\n")
    _write_study(folder)
    return folder


def _write_study(folder: Path) -> None:
    (folder / "study.toml").write_text(
        f'folder = "{folder}/data"\n'
        'search = "books_train_a.jsonl"\nchoose = "books_train_b.jsonl"\n'
        'report = ["books_val.jsonl", "pg19_test_a.jsonl"]\n'
        "factors = [2]\nseeds = [0, 1]\nreport_windows = 2\nreport_factor = 2\n"
        'grids = ["nope-twin"]\ngrid_low = 1.0\ngrid_high = 1.02\n'
        '[methods]\nnope-twin = ["none", "uniform", "headscale:search.init=1.2"]\n'
        "[extension]\nsearch_windows = 8\nchoose_windows = 2\n"
        "[extension.search]\nsteps = 2\nbatch = 2\nlr = [0.1]\nwarmup = 1\n"
    )


def _use_tiny_model(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(reproduce_workflow, "find_or_train_model", lambda *args: folder / "model")
    patch.setattr(reproduce_workflow, "model_stages", lambda *args: iter(()))
    patch.setattr(
        reproduce_cells, "passkey_accuracy", lambda model, tokenizer, length, **options: 0.5
    )


class FinishedStudy(NamedTuple):
    out: Path
    results: list[dict]
    messages: list[str]


@pytest.fixture(scope="module")
def finished_once(template) -> FinishedStudy:
    """The whole study, run once and drawn."""
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        _use_tiny_model(patch, template)
        out = template / "out"
        results = reproduce(str(template / "study.toml"), out=out, say=messages.append)
    return FinishedStudy(out, results, messages)


@pytest.fixture
def tiny(tmp_path, monkeypatch, template) -> Path:
    """A copy of the template. Figures are not drawn, which takes most of a small study's time."""
    for name in ("model", "data"):
        shutil.copytree(template / name, tmp_path / name)
    _write_study(tmp_path)
    _use_tiny_model(monkeypatch, tmp_path)
    monkeypatch.setattr(reproduce_workflow, "save", lambda figure, path: None)
    return tmp_path


@pytest.fixture
def finished(tiny, finished_once) -> FinishedStudy:
    """The finished study, copied to the folder `out` of a tiny study."""
    shutil.copytree(finished_once.out, tiny / "out")
    return finished_once._replace(out=tiny / "out")


def test_a_study_says_its_time_before_anything_is_measured(tiny, finished, monkeypatch):
    """Finished cells take none."""
    monkeypatch.setattr(reproduce_workflow, "SAID_FROM", 0.0)
    monkeypatch.setattr(reproduce_workflow, "model_stages", model_stages)
    monkeypatch.setattr(reproduce_workflow, "_trained_model", lambda *args: tiny / "model")

    def announced(out: Path, seconds: float) -> str:
        monkeypatch.setattr(timing, "fastest_run", lambda device, work: seconds)
        monkeypatch.setattr(extend_estimate, "fastest_run", lambda device, work: 3 * seconds)

        def first(text: str) -> None:
            raise StopStudyError(text)

        with pytest.raises(StopStudyError) as said:
            reproduce(str(tiny / "study.toml"), [], out, say=first)
        assert not (tiny / "new").exists()
        return str(said.value)

    slow, fast = announced(tiny / "new", 20.0), announced(tiny / "new", 10.0)
    assert slow.startswith("5 of 5 cells to measure: at most about ")
    assert slow != fast
    _delete_uniform_cell(finished.out)
    assert announced(finished.out, 10.0).startswith("1 of 5 cells to measure: at most about ")


def test_a_dry_run_lists_what_is_missing_and_writes_nothing(tiny, finished, monkeypatch, capsys):
    monkeypatch.setattr(reproduce_workflow, "model_stages", model_stages)
    monkeypatch.setattr(reproduce_workflow, "_trained_model", lambda *args: tiny / "model")
    monkeypatch.setattr(timing, "fastest_run", lambda device, work: 10.0)
    monkeypatch.setattr(extend_estimate, "fastest_run", lambda device, work: 30.0)

    def dry_run(out: Path, *options: str) -> str:
        arguments = ["reproduce", str(tiny / "study.toml"), "-o", str(out), "--dry-run", *options]
        monkeypatch.setattr(sys, "argv", ["farspan", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code
        return capsys.readouterr().out

    (new,) = json.loads(dry_run(tiny / "new", "--json"))
    assert not (tiny / "new").exists()
    assert (new["model"], new["trained"]) == ("nope-twin", True)
    assert (new["cells"], new["missing"]) == (5, 5)
    _delete_uniform_cell(finished.out)
    before = sorted(finished.out.rglob("*"))
    (rest,) = json.loads(dry_run(finished.out, "--json"))
    assert (rest["cells"], rest["missing"]) == (5, 1)
    assert 0 < rest["seconds"] < new["seconds"]
    assert sorted(finished.out.rglob("*")) == before
    table = dry_run(finished.out)
    assert re.search(r"nope-twin\W+yes\W+5\W+1\W", table)
    assert "in total" in table
    assert "benchmarks" not in table
    with_benchmarks = dry_run(tiny / "new", "benchmarks.passkey_lengths=2")
    assert "one timed window, without the benchmarks" in " ".join(with_benchmarks.split())
    (finished.out / "record.json").write_text('{"command": "eval"}')
    with pytest.raises(FarspanError, match="holds the results of `farspan eval`"):
        reproduce_workflow.estimate_study(str(tiny / "study.toml"), [], finished.out)


def test_results_as_json_are_those_of_python(tiny, finished, monkeypatch, capsys):
    study = str(tiny / "study.toml")
    arguments = ["reproduce", study, "-o", str(finished.out), "--report-only", "--json"]
    monkeypatch.setattr(sys, "argv", ["farspan", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"results": json.loads(json.dumps(list(summarize(study, [], finished.out))))}


class StopStudyError(Exception):
    """Raised to look no further."""


def test_every_cell_of_a_study_has_its_share_of_the_total(tiny, monkeypatch):
    monkeypatch.setattr(timing, "fastest_run", lambda device, work: 1.0)
    monkeypatch.setattr(extend_estimate, "fastest_run", lambda device, work: 3.0)
    study = read_study(str(tiny / "study.toml"))
    (name,) = study.methods
    cells = [*list_cells(study), *list_grids(study)]
    trained = tiny / "model"
    seconds = {s.name: s.seconds for s in model_stages(study, name, trained, cells, "cpu")}
    assert list(seconds) == [cell.label for cell in cells]
    plain = seconds[f"{name} none ×1 s0"]
    assert all(each > plain > 0 for label, each in seconds.items() if "×2" in label)
    more = replace(study, report_windows=2 * study.report_windows, passkeys=2 * study.passkeys)
    twice = {s.name: s.seconds for s in model_stages(more, name, trained, cells, "cpu")}
    assert twice[f"{name} none ×1 s0"] == pytest.approx(2 * plain)
    assert not list(model_stages(study, name, trained, [], "cpu"))


def _delete_uniform_cell(out: Path) -> None:
    cells = [file for file in out.glob("cells/*.json") if '"method": "uniform"' in file.read_text()]
    cells[0].unlink()


def test_study_measures_every_cell_once_and_resumes(tiny, finished):
    study, (out, results, messages) = str(tiny / "study.toml"), finished
    assert [(result["method"], result["seed"]) for result in results] == [
        ("none", 0),
        ("uniform", 0),
        ("headscale:search.init=1.2", 0),
        ("headscale:search.init=1.2", 1),
    ]
    assert len(messages) == 5, "four cells and a grid"
    assert set(results[0]["loss"]) == {"books_val", "pg19_test_a"}
    assert (
        len(results[0]["entropy"])
        == len(results[0]["positions"])
        == len(results[0]["loss"]["books_val"])
    )
    assert results[2]["scales"] != results[3]["scales"], "the seed changes the search"
    assert [search["steps"] for search in results[2]["searches"]] == [2]
    assert "searches" not in results[1]
    (grid,) = json.loads((out / "results.json").read_text())["grids"]
    assert len(grid["values"]) == 3
    _delete_uniform_cell(out)
    new_messages: list[str] = []
    again = reproduce(study, [], out, say=new_messages.append)
    assert len(new_messages) == 1
    # The cell is measured again to the same values, in other seconds; the others stay as they were.
    assert [i for i in range(4) if again[i] != results[i]] in ([1], [])
    assert [{**cell, "seconds": None} for cell in again] == [
        {**cell, "seconds": None} for cell in results
    ]
    _, rows = loss_table(again, "books_val")
    assert [row[1] for row in rows] == ["none", "uniform", "headscale:search.init=1.2"]
    assert ["±" in row[3] for row in rows] == [False, False, True], (
        "seeds are averaged, with their spread"
    )


def test_a_damaged_cell_is_reported(tiny, finished, monkeypatch):
    """Also where the estimate before the run is the first to read it."""
    monkeypatch.setattr(reproduce_workflow, "_trained_model", lambda *args: tiny / "model")
    (uniform,) = [f for f in finished.out.glob("cells/*.json") if '"uniform"' in f.read_text()]
    uniform.write_text("{}")
    messages: list[str] = []
    reproduce(str(tiny / "study.toml"), [], finished.out, say=messages.append)
    assert f"{uniform} is incomplete; it is set aside as {uniform.stem}" in messages[0]


@pytest.mark.parametrize(("factor", "middle"), [(1, 56.5), (2, 120.5), (4, 248.5)])
def test_entropy_of_heads_is_that_of_the_last_quarter_before_the_target(factor, middle):
    """Of the train length, 64 tokens here; each head's entropy is a multiple of the position."""
    positions = np.arange(2.5, 256, 4)
    heads = {3: np.stack((positions, 2 * positions)), 5: np.stack((3 * positions, 4 * positions))}
    curves = Curves(positions, np.ones(64), heads, windows=1, length=256, every=1)
    result = reproduce_cells._entropy_and_knees(curves, 64, factor)
    assert result["entropy_of_heads"] == {
        "3": [middle, 2 * middle],
        "5": [3 * middle, 4 * middle],
    }


def test_positions_of_length_dependent_rotation_are_measured_in_texts_that_long():
    """Dynamic NTK rotates a text of L tokens as trained, and one of 4 L tokens otherwise."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    config = FarspanConfig(**shape, position="rope", max_position_embeddings=32)
    model = FarspanForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # attention that depends on angles
    ids = torch.randint(64, (2, 128))
    static = reproduce_cells._curves(model, ids, 32, entropy=True)
    set_rope(model, {"rope_type": "dynamic", "factor": 2.0})
    dynamic = reproduce_cells._curves(model, ids, 32, entropy=True)
    assert np.array_equal(dynamic.positions, static.positions)
    assert np.allclose(dynamic.loss[:15], static.loss[:15]), "as trained"
    for measured, (start, stop) in {64: (16, 32), 128: (32, 64)}.items():
        reset_dynamic_rope(model)
        curves = measure_curves(model, ids[:, :measured], bins=measured // 2)
        assert np.array_equal(dynamic.loss[start:stop], curves.loss[start:stop])
        assert np.array_equal(dynamic.heads[1][:, start:stop], curves.heads[1][:, start:stop])
        assert not np.allclose(curves.loss[start:stop], static.loss[start:stop])
        assert not np.allclose(curves.loss[:16], static.loss[:16]), "what one pass would give"
    reset_dynamic_rope(model)
    losses = reproduce_cells._curves(model, ids, 32, entropy=False)
    assert np.allclose(losses.loss, dynamic.loss, atol=1e-5)
    assert losses.heads == {}


def test_entropy_is_measured_on_the_first_text_only(tiny, tmp_path, monkeypatch):
    """No table or figure shows that of the others, and it takes longer than the loss."""
    asked = []

    def record(model, ids, **options):
        asked.append(options["entropy"])
        return measure_curves(model, ids, **options)

    monkeypatch.setattr(reproduce_cells, "measure_curves", record)
    (cell,) = reproduce(str(tiny / "study.toml"), [*NONE_ONLY, "grids=[]"], tmp_path / "out")
    assert asked == [True, False]
    assert list(cell["loss"]) == ["books_val", "pg19_test_a"]


def test_a_cell_stores_the_entropy_of_its_heads_before_its_own_target(finished_once):
    for cell in finished_once.results:
        heads = np.mean(list(cell["entropy_of_heads"].values()))
        assert heads == pytest.approx(mean_at(cell, cell["entropy"], cell["target"]), abs=1e-3)
        others = [mean_at(cell, cell["entropy"], mark) for mark in (16, 32, 64)]
        assert np.diff(others).min() > 0.1, "entropy depends on where it is taken"


def test_a_cell_says_how_long_its_fit_and_its_measurement_took(tiny, monkeypatch):
    """The fit without reading text. Cells of earlier releases, without seconds, have no column."""
    clock = [0.0]
    fit, curves, search = (
        reproduce_cells.fit_methods,
        reproduce_cells._curves,
        StudyTexts.search_windows,
    )

    def after(seconds: float, function):
        def call(*arguments, **options):
            clock[0] += seconds
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(reproduce_cells, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(reproduce_cells, "fit_methods", after(7.0, fit))
    monkeypatch.setattr(reproduce_cells, "_curves", after(20.0, curves))
    monkeypatch.setattr(StudyTexts, "search_windows", after(300.0, search))
    settings = ['methods={nope-twin=["none", "logn"]}', "grids=[]", "factors=[2]"]
    results = reproduce(str(tiny / "study.toml"), settings, tiny / "out")
    texts = len(results[0]["loss"])
    measured = {"measure": 20.0 * texts}
    assert [cell["seconds"] for cell in results] == [measured, {"fit": 7.0, **measured}]
    header, rows = heads_table(results)
    assert header[-1] == "seconds to fit"
    assert [row[-1] for row in rows] == ["", "7"]
    earlier = [{key: cell[key] for key in cell if key != "seconds"} for cell in results]
    assert heads_table(earlier) == (header[:-1], [row[:-1] for row in rows])


def test_scales_of_layers_with_unequal_heads_are_those_of_their_heads():
    """The table is as wide as the widest layer; layer 1 has two heads of its own."""
    cell = {
        "model": "m",
        "method": "headscale",
        "factor": 2,
        "train_length": 32,
        "target": 64,
        "positions": [32.0, 64.0],
        "entropy": [1.0, 2.0],
        "loss_knee": 1234.5,
        "entropy_knee": None,
        "scales": [[1.1, 1.2, 1.3, 1.4], [1.2, 1.4, 9.0, 9.0]],
        "patch": {"scales": {"layers": [0, 1]}},
        "entropy_of_heads": {"0": [4.0, 3.0, 2.0, 1.0], "1": [2.0, 1.0]},
    }
    header, (row,) = heads_table([cell])
    values = dict(zip(header, row, strict=True))
    assert values["λ̂"] == "1.27 (1.10–1.40)"
    assert values["rank correlation"] == "−1.00"
    assert (values["loss knee"], values["entropy knee"]) == ("1,234", "none")


def test_the_start_that_cells_share_counts_in_the_time_of_each(tiny, monkeypatch):
    clock = [0.0]

    def take(seconds: float, value):
        clock[0] += seconds
        return value

    monkeypatch.setattr(reproduce_cells, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(reproduce_cells, "best_uniform", lambda *_: take(5.0, 1.1))
    fit = reproduce_cells.fit_methods
    monkeypatch.setattr(reproduce_cells, "fit_methods", lambda *given: take(7.0, fit(*given)))
    search = ["extension.search.steps=1", "extension.search.batch=1"]
    settings = ['methods={nope-twin=["headscale"]}', "grids=[]", "factors=[2]", "seeds=[0,1]"]
    results = reproduce(str(tiny / "study.toml"), [*settings, *search], tiny / "shared")
    assert [cell["seconds"]["fit"] for cell in results] == [12.0, 12.0]


def test_searches_of_a_study_start_from_the_best_uniform_scale(tiny):
    """One step with a learning rate of almost 0 ends where the search started."""
    search = ["extension.search.steps=1", "extension.search.lr=[1e-9]"]
    methods = 'methods.nope-twin=["uniform", "headscale:search.constraint=false"]'
    overrides = [methods, "grids=[]", "seeds=[0]", *search]
    best, searched = reproduce(str(tiny / "study.toml"), overrides, tiny / "out")
    assert best["scales"][0][0] != 1
    assert searched["scales"] == best["scales"]


def test_best_scales_are_stored_and_drawn_by_position_in_train_lengths(finished_once):
    (grid,) = json.loads((finished_once.out / "results.json").read_text())["grids"]
    assert grid["positions"] == [2 + 4 * number for number in range(64)], "8 × 32 tokens in 64 bins"
    (axes,) = best_scales([grid | {"slope": 0.5}]).axes
    dots, law = axes.lines[:2]
    assert dots.get_xdata() == pytest.approx(np.array(grid["positions"]) / 32)
    assert dots.get_ydata() == pytest.approx(grid["best"])
    assert law.get_ydata() == pytest.approx(1 + 0.5 * np.log(np.array(law.get_xdata())))
    assert (min(law.get_xdata()), max(law.get_xdata())) == pytest.approx((34 / 32, 254 / 32))


def test_best_scales_on_the_edge_of_the_grid_are_noted():
    """Eight positions of 8 train lengths; the first, within the train length, has no part."""
    grid = {
        "model": "m",
        "checkpoint": "model",
        "slope": 0.3,
        "interval": None,
        "r2": 0.5,
        "values": [0.8, 0.9, 1.0],
        "positions": [16.0 + 32 * number for number in range(8)],
        "best": [0.8, *[0.9] * 7],
    }
    inside = law_table([grid])
    assert inside[0][-1] == "R²"
    clipped = {**grid, "best": [0.8, 0.9, 0.9, *[1.0] * 5], "r2": None}
    header, rows = law_table([grid, clipped])
    assert [row[-2:] for row in rows] == [["0.500", ""], ["none", "5 of 7"]]
    assert header[-1] == "on the edge of the grid"
    line = _result_line(clipped)
    assert line.endswith("ln s; 5 of 7 are on the edge of the grid: widen grid_low or grid_high")
    assert _result_line(grid).endswith("R² 0.5000")
    assert "R²" not in best_scales([clipped]).axes[0].get_legend().get_texts()[0].get_text()


def test_settings_that_came_later_leave_the_keys_of_cells_alone():
    """Results of earlier versions are found again where a later setting has its default."""
    study = ReproduceStudy({"nope-twin": ("none",)})
    later = {"max_steps", "min_gain", "quick", "passkeys", "answers", "tail"}
    settings = _settings(study, 2)
    assert not later & settings["extension"]["search"].keys()
    assert not {"long", "long_length"} & settings["extension"]["swan"].keys()
    assert "beyond" not in settings
    search = replace(study.extension.search, min_gain=0.01)
    changed = replace(study, extension=replace(study.extension, search=search))
    assert _settings(changed, 2)["extension"]["search"]["min_gain"] == 0.01
    swan = replace(study.extension.swan, long=0.5)
    changed = replace(study, extension=replace(study.extension, swan=swan))
    assert _settings(changed, 2)["extension"]["swan"]["long"] == 0.5


def test_factors_need_no_other_change_to_a_bundled_study(tmp_path):
    """The study names a share for 8 times, which is used if that is measured."""
    assert read_study("extend-small", ["factors=[4]"]).beyond == {}
    assert read_study("extend-small", ["factors=[8]"]).beyond == {"8": 1.125}
    assert read_study("extend-small", ["factors=[4]", "beyond.4=1.5"]).beyond == {"4": 1.5}
    (tmp_path / "my.toml").write_text('base = "extend-small"\nfactors = [2]\n')
    assert read_study(str(tmp_path / "my.toml")).beyond == {}
    (tmp_path / "own.toml").write_text('base = "my.toml"\n[beyond]\n4 = 1.5\n')
    assert read_study(str(tmp_path / "own.toml"), ["factors=[4]"]).beyond == {"4": 1.5}
    with pytest.raises(FarspanError, match="beyond names 4, which is no target"):
        read_study(str(tmp_path / "own.toml"))
    for written in ("beyond.8=1.125", 'beyond."8"=1.5', "beyond={8=1.125}"):
        with pytest.raises(FarspanError, match="beyond names 8, which is no target"):
            read_study("extend-small", ["factors=[4]", written])


def test_search_windows_reach_beyond_the_target_by_factor(tiny, monkeypatch):
    """Wang 2024 searches on 18K for 16K, and up to the target elsewhere."""
    study = read_study("extend-small")
    assert [study.extension_for(factor).search.beyond for factor in (2, 4, 8)] == [1, 1, 1.125]
    lengths: dict[int, int] = {}
    fit = reproduce_cells.fit_methods

    def watched(model, layers, job, *arguments):
        lengths[job.target] = job.search.shape[1]
        return fit(model, layers, job, *arguments)

    monkeypatch.setattr(reproduce_cells, "fit_methods", watched)
    overrides = ['methods.nope-twin=["headscale:search.init=1.2"]', "grids=[]", "seeds=[0]"]
    overrides += ["factors=[2, 4]", "report_factor=4", "extension.search.beyond=1.0"]
    overrides += ['beyond={"4"=1.25}']
    reproduce(str(tiny / "study.toml"), overrides, tiny / "out")
    assert lengths == {64: 64, 128: 160}


def test_a_factor_changes_the_key_of_its_own_cells_only():
    study = ReproduceStudy({"nope-twin": ("none",)})
    changed = replace(study, beyond={"4": 1.0})
    assert _settings(changed, 2) == _settings(study, 2)
    assert _settings(changed, 4) != _settings(study, 4)


def test_cells_of_default_searches_depend_on_the_defaults(monkeypatch):
    """They change between versions; what Wang 2024 and other methods set does not."""
    study = ReproduceStudy({"nope-twin": ("none",)})
    for method in ("none", "yarn", "swan", "headscale:search.steps=200"):
        assert _search_defaults(study, method) == {}, method
    kept = _search_defaults(study, "headscale:search.steps=9,search.passkeys=0.25")
    assert (kept["answers"], kept["passkey_lengths"]) == (0.3, "log-uniform")
    assert "passkey_lengths" not in _search_defaults(study, "headlog:search.passkeys=0")
    for method in ("headscale", "yarn+headlog", "headlog:search.lr=[0.1]"):
        before = _search_defaults(study, method)
        with monkeypatch.context() as changed:
            changed.setattr("farspan.methods.search_config.PASSKEYS", 0.125)
            changed.setattr("farspan.methods.search_config.FULL", FULL._replace(answers=0.7))
            after = before | {"passkeys": 0.125, "answers": 0.7}
            assert _search_defaults(study, method) == after, method
    texts = SimpleNamespace(
        study=study,
        hashes={},
        benchmark_sources=(),
        begin_of_text=lambda folder: (),
        weight_hashes=lambda folder: [],
    )
    cells = [StudyCell("nope-twin", method, 2, 0) for method in ("yarn", "headlog")]
    rotary, searched = (_describe(texts, cell, Path("nope-twin")) for cell in cells)
    assert "search" not in rotary
    assert searched["search"] == _search_defaults(study, "headlog")


def test_changed_settings_are_measured_again(tiny, finished):
    """Of both kinds: a cell and a grid."""
    messages: list[str] = []
    overrides = ["report_windows=3", 'methods.nope-twin=["none"]']
    (result,) = reproduce(str(tiny / "study.toml"), overrides, finished.out, say=messages.append)
    assert len(messages) == 2
    assert result["loss"] != finished.results[0]["loss"]


def test_replaced_model_is_measured_again(tiny):
    study, out = str(tiny / "study.toml"), tiny / "out"
    first = reproduce(study, NONE_ONLY, out)
    torch.manual_seed(1)
    model = FarspanForCausalLM.from_pretrained(tiny / "model")
    FarspanForCausalLM(model.config).save_pretrained(tiny / "model")
    assert reproduce(study, NONE_ONLY, out)[0]["loss"] != first[0]["loss"]


def test_summarize_reports_finished_cells(tiny, finished_once):
    study, out = str(tiny / "study.toml"), tiny / "out"
    with pytest.raises(FarspanError, match=r"out holds no results of this study; run it first"):
        summarize(study, [], out)
    shutil.copytree(finished_once.out, out)
    results = finished_once.results
    written = {path: path.read_bytes() for path in (out / "results.json", out / "tables.md")}
    assert {path.name for path in out.glob("*.png")} == {"loss.png", "scales.png"}
    assert summarize(study, [], out) == results
    assert written == {path: path.read_bytes() for path in written}
    _delete_uniform_cell(out)
    remaining = [result for result in results if result["method"] != "uniform"]
    assert summarize(study, [], out) == remaining
    reproduce(study, ["report_windows=3", *NONE_ONLY], out)
    assert summarize(study, [], out) == remaining, "other settings are another study"


def test_changed_text_of_the_same_name_is_measured_again(tiny):
    study, out = str(tiny / "study.toml"), tiny / "out"
    messages: list[str] = []
    (first,) = reproduce(study, NONE_ONLY, out, say=messages.append)
    file = tiny / "data" / "books_val.jsonl"
    text = file.read_text()
    file.write_text(json.dumps({"text": json.loads(text)["text"][::-1]}) + "\n")
    (second,) = reproduce(study, NONE_ONLY, out, say=messages.append)
    assert second["loss"]["books_val"] != first["loss"]["books_val"]
    assert second["loss"]["pg19_test_a"] == first["loss"]["pg19_test_a"]
    file.write_text(text)
    assert reproduce(study, NONE_ONLY, out, say=messages.append) == [first]
    assert len(messages) == 2, "the result on the restored text is reused"


def test_cells_of_another_format_are_measured_again(tiny, finished, monkeypatch):
    study = str(tiny / "study.toml")
    overrides = ['methods.nope-twin=["none", "uniform"]', "grids=[]"]
    results = summarize(study, overrides, finished.out)
    assert [result["method"] for result in results] == ["none", "uniform"]
    monkeypatch.setattr(reproduce_workflow, "FORMAT", 99)
    messages: list[str] = []
    reproduce(study, NONE_ONLY, finished.out, say=messages.append)
    assert len(messages) == 1
    results = summarize(study, overrides, finished.out)
    assert [result["method"] for result in results] == ["none"], "no table mixes two formats"


def test_text_outside_the_folder_is_named_by_its_file(tiny):
    (tiny / "data" / "books_val.jsonl").rename(tiny / "books_val.jsonl")
    overrides = [*NONE_ONLY, 'report=["../books_val.jsonl", "pg19_test_a.jsonl"]']
    (result,) = reproduce(str(tiny / "study.toml"), overrides, tiny / "out")
    assert set(result["loss"]) == {"books_val", "pg19_test_a"}


def test_study_of_variants_only_is_drawn(tiny, monkeypatch):
    monkeypatch.setattr(reproduce_workflow, "save", save)
    overrides = ['methods.nope-twin=["headscale:search.init=1.2"]', "grids=[]", "seeds=[0]"]
    reproduce(str(tiny / "study.toml"), overrides, tiny / "out")
    assert (tiny / "out" / "loss.png").exists()


def test_same_tokens_are_scored_with_every_context(tiny):
    """The last tokens of each window: with the longest context, as in the curve of the loss."""
    swan = "swan:swan.layers=even,swan.sharpen=false,swan.tokens=64,tuning.batch=1"
    overrides = [f'methods.nope-twin=["none", "{swan}"]', "grids=[]", "same_tokens=16"]
    base, converted = reproduce(str(tiny / "study.toml"), [*overrides, "seeds=[0]"], tiny / "out")
    length = base["train_length"]
    for result in (base, converted):
        losses = result["same_tokens"]["books_val"]
        assert list(map(int, losses)) == [length, 2 * length]
        assert np.mean(losses[str(2 * length)]) == pytest.approx(
            np.mean(result["loss"]["books_val"][-1]), rel=0.2
        )
    assert converted["patch"]["layout"]
    assert len(base["documents"]["books_val"]) == len(losses[str(length)])
    assert base["same_tokens"] != converted["same_tokens"]
    assert "on the same tokens" in (tiny / "out" / "tables.md").read_text()


@pytest.mark.parametrize("n", [2, 5, 40])
def test_the_bound_of_a_mean_is_that_of_scipy(n):
    values = np.random.default_rng(n).normal(0.1, 1.0, n)
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert mean_bound(values) == pytest.approx((high - low) / 2)
    assert mean_bound(np.repeat(values, 3), np.repeat(range(n), 3)) == pytest.approx(
        (high - low) / 2
    ), "copies of a document add nothing"


def test_paired_differences_have_intervals_over_documents_or_windows():
    base, patched = make_result("a", "none", 512), make_result("a", "swan", 512)
    base["same_tokens"] = {"text": {"512": [3.0, 4.0, 5.0], "1024": [4.0, 5.0, 7.0]}}
    patched["same_tokens"] = {"text": {"512": [3.1, 4.1, 5.1], "1024": [3.0, 4.1, 5.2]}}
    header, rows = paired_table([base, patched], "text")
    assert header[3:] == ["512", "1024"]
    assert rows[0][3] == "+0.000 ± 0.000"
    assert rows[1][3] == "+0.100 ± 0.000"
    assert rows[1][4] == "+0.100 ± 0.248"  # 4.303 · 0.1 / √3
    for documents, shown in ([0, 1, 2], "± 0.248"), ([0, 0, 1], "± 0.847"), ([0, 0, 0], ""):
        patched["documents"] = {"text": documents}
        assert paired_table([base, patched], "text")[1][1][4] == f"+0.100 {shown}".strip()
    del patched["documents"]
    assert paired_table([patched], "text")[1] == [], "without the model as trained"
    for cell in (base, patched):
        cell["same_tokens"]["text"] = {"512": cell["same_tokens"]["text"]["512"][:1]}
    assert paired_table([base, patched], "text")[1][1][3] == "+0.100", "one window has no interval"


def test_study_needs_only_the_files_that_it_reads(tiny, monkeypatch):
    """It does not need the files that model recipes look for in the data folder."""
    data = tiny / "data"
    names = {"books_train_a": "find", "books_train_b": "pick", "books_val": "test"}
    for old, new in names.items():
        (data / f"{old}.jsonl").rename(data / f"{new}.jsonl")
    (data / "pg19_test_a.jsonl").unlink()
    texts = ["search=find.jsonl", "choose=pick.jsonl", 'report=["test.jsonl"]']
    (result,) = reproduce(str(tiny / "study.toml"), [*texts, *NONE_ONLY], tiny / "out")
    assert set(result["loss"]) == {"test"}
    monkeypatch.setenv("FARSPAN_DATA", str(data))
    overrides = [*texts, *NONE_ONLY, "folder="]
    assert reproduce(str(tiny / "study.toml"), overrides, tiny / "out") == [result]


@pytest.mark.parametrize("command", [reproduce, summarize])
def test_old_keywords_work_with_a_warning(tmp_path, command):
    names = dict(source="extend-small", changes=["seeds=[]"])
    with (
        pytest.raises(FarspanError, match="seeds is empty"),
        pytest.warns(DeprecationWarning, match="is now") as warnings,
    ):
        command(**names, out=tmp_path)
    assert [str(warning.message).partition(";")[0] for warning in warnings] == [
        "source= is now study=",
        "changes= is now overrides=",
    ]


def test_summarize_ignores_cells_of_other_commands(tiny):
    Cells(tiny / "out").put("0" * 32, {}, {"task": "copy", "encoding": "none"})
    with pytest.raises(FarspanError, match=r"out holds no results of this study"):
        summarize(str(tiny / "study.toml"), [], tiny / "out")


def test_refuses_missing_texts_before_writing(tiny):
    (tiny / "data" / "books_val.jsonl").unlink()
    with pytest.raises(FarspanError, match=r"books_val.jsonl, .* was not found; .* folder=PATH"):
        reproduce(str(tiny / "study.toml"), [], tiny / "out")
    assert not (tiny / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ['methods.nope-twin=["none", "yarn"]'],
            r"yarn changes rotation, and nope-twin \(methods\.nope-twin\) has no rotary layer",
        ),
        (
            ['methods.small-nope=["yarn+headscale"]'],
            r"yarn changes rotation, and small-nope \(methods\.small-nope\) has no rotary layer",
        ),
        (
            ['methods.foo=["none"]'],
            r"the model foo \(methods\.foo\) is not available: recipe 'foo' was not found",
        ),
        (
            ['methods.foo-twin=["none"]'],
            r"the model foo-twin \(methods\.foo-twin\) is not available: recipe 'foo-twin' was not",
        ),
        (
            ["search=short.jsonl"],
            r"search names short.jsonl, which cannot be used for nope-twin: no document has 1024",
        ),
    ],
)
def test_refuses_an_impossible_study_before_writing(tiny, monkeypatch, overrides, message):
    monkeypatch.setattr(
        reproduce_workflow, "find_or_train_model", lambda *args: pytest.fail("a model is trained")
    )
    (tiny / "data" / "short.jsonl").write_text('{"text": "too short"}\n')
    with pytest.raises(FarspanError, match=message):
        reproduce(str(tiny / "study.toml"), [f"runs={tiny}/runs", *overrides], tiny / "out")
    assert not (tiny / "out").exists()


def make_result(model: str, method: str, length: int) -> dict:
    """The result of a cell, measured at twice the train length."""
    positions = [length * quarter / 4 for quarter in range(1, 9)]
    return {
        "model": model,
        "method": method,
        "factor": 1 if method == "none" else 2,
        "seed": 0,
        "train_length": length,
        "target": 2 * length,
        "positions": positions,
        "loss": {"text": [position / 1000 for position in positions]},
        "entropy": [1.0] * 8,
        "passkey": {str(length): 1.0, str(2 * length): 0.5},
        "loss_knee": None,
        "entropy_knee": None,
    }


def test_each_train_length_has_its_own_table_and_axis():
    lengths = {"a": 512, "b": 1024, "c": 512}
    results = [make_result(model, "none", length) for model, length in lengths.items()]
    text = study_report(results, [])
    assert text.count("## Loss on text, in nats, trained on") == 2
    for length, rows in ((512, ("a", "c")), (1024, ("b",))):
        (table,) = (
            part
            for part in text.split("## ")
            if part.startswith(f"Loss on text, in nats, trained on {length} ")
        )
        assert (
            f"| {length // 2} | {length} | {2 * length} | passkey {length}/{2 * length} |" in table
        )
        for model in rows:
            losses = " | ".join(f"{length / part:.2f}" for part in (2000, 1000, 500))
            assert f"| {model} | none |  | {losses} |" in table
        assert table.count("| none |") == len(rows)
    assert "## Loss on text, in nats\n" in study_report(results[:1] + results[2:], []), (
        "a single train length is not in the title"
    )
    figure = method_losses(results)
    assert [axes.get_xlim()[1] for axes in figure.axes] == [1152, 2304, 1152]
    assert all(axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes)


@pytest.mark.parametrize(
    ("methods", "drawn"),
    [
        (("none", "uniform", "uniform:seed=1"), ["as trained", "uniform"]),
        (("none", "uniform:seed=1"), ["as trained", "uniform:seed=1"]),
        (("uniform:seed=1", "uniform:seed=2"), ["uniform:seed=1", "uniform:seed=2"]),
    ],
)
def test_variants_are_drawn_only_without_their_plain_method(methods, drawn):
    figure = method_losses([make_result("a", method, 512) for method in methods])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == drawn
    assert len([line for line in figure.axes[0].lines if len(line.get_xdata()) == 8]) == len(drawn)


@pytest.mark.parametrize("count", [3, 9])
def test_losses_are_drawn_as_means_over_up_to_five_positions(count):
    loss = np.arange(count, dtype=float) ** 2
    cell = make_result("a", "none", 512)
    cell |= {"positions": [*range(1, count + 1)], "loss": {"text": loss.tolist()}}
    drawn = method_losses([cell]).axes[0].lines[0].get_ydata()
    if count == 9:
        assert drawn[:3] == pytest.approx([loss[:3].mean(), loss[:4].mean(), loss[:5].mean()])
        assert drawn[-1] == pytest.approx(loss[-3:].mean())
    else:
        assert drawn[1] == pytest.approx(loss.mean())


def test_scales_and_entropies_are_correlated_within_a_layer():
    """Only the second of two layers is scaled; its heads' λ̂ fall as their entropy rises."""
    curves = {
        "train_length": 4,
        "positions": [2, 4, 6, 8],
        "loss": {"text": [1.0, 1.0, 2.0, 3.0]},
        "entropy": [0.5, 1.0, 1.5, 2.0],
        "passkey": {"4": 1.0, "8": 0.25},
        "loss_knee": 6,
        "entropy_knee": None,
    }
    cell = curves | {
        "model": "m",
        "method": "headscale",
        "factor": 2,
        "seed": 0,
        "target": 8,
        "scales": [[1.5, 1.2, 1.1]],
        "patch": {"scales": {"layers": [1]}},
        "entropy_of_heads": {"0": [1.0, 2.0, 3.0], "1": [0.5, 0.7, 2.5]},
    }
    text = study_report([cell], [])
    assert "| m | headscale | 2× | 1.00 | 1.00 | 3.00 | 1.00/.25 |" in text
    assert "| m | headscale | 2× | 1.27 (1.10–1.50) | 6 | none | 2.00 | −1.00 |" in text


@pytest.mark.long
def test_processes_share_a_study(tiny):
    """Each cell is measured by one of two processes, and both return all results."""
    study, out = str(tiny / "study.toml"), tiny / "out"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.starmap(_run_study, [(study, out)] * 2, chunksize=1)
    assert first[1] == second[1]
    assert len(first[0]) + len(second[0]) == 5


def _run_study(study: str, out: Path) -> tuple[list[str], list[dict]]:
    torch.set_num_threads(1)
    messages: list[str] = []
    return messages, reproduce(study, [], out, say=messages.append)


# Benchmarks.

ITEMS = {
    "arc_challenge/test": {"query": "Question: What?\nAnswer:", "choices": ["a", "b"], "gold": 0},
    "arc_easy/test": {"query": "Question: What?\nAnswer:", "choices": ["a", "b"], "gold": 0},
    "boolq/val": {"passage": "A stone is old.", "question": "is a stone old", "answer": True},
    "hellaswag/val": {
        "activity_label": "Stones",
        "ctx_a": "A stone",
        "ctx_b": "it",
        "endings": ["falls", "sings", "reads", "eats"],
        "label": "0",
    },
    "openbookqa/test": {"query": "A stone is", "choices": ["a", "b"], "gold": 1},
    "piqa/val": {"goal": "Clean a stone", "sol1": "with water", "sol2": "with fire", "label": 0},
    "winogrande/val": {
        "sentence": "The stone broke the glass because the _ was hard.",
        "option1": "stone",
        "option2": "glass",
        "answer": "1",
    },
}
BENCHMARKS = [
    "benchmarks.passkey_lengths=3",
    "benchmarks.longbench=bench/longbench.jsonl",
    "benchmarks.beams=2",
    "benchmarks.commonsense=bench",
    'methods.nope-twin=["none", "uniform"]',
    "grids=[]",
    "passkeys=1",
]


@pytest.fixture
def bench(tiny) -> Path:
    """A study of a model with train length 128, and one item of every benchmark task."""
    torch.manual_seed(0)
    config = FarspanForCausalLM.from_pretrained(tiny / "model").config
    config.max_position_embeddings = 128
    FarspanForCausalLM(config).save_pretrained(tiny / "model")
    write_training_metadata(tiny / "model", passkey_documents=False)
    folder = tiny / "data" / "bench"
    for name, item in ITEMS.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / f"{name}.jsonl").write_text(json.dumps(item) + "\n")
    prompts = [
        {"dataset": task, "context": "A stone.", "input": "What?", "answers": ["stone"]}
        for task in ("hotpotqa", "trec")
    ]
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (folder / "longbench.jsonl").write_text(lines)
    return tiny


def test_passkeys_of_a_study_are_averaged_within_the_context(monkeypatch):
    """As in Figure 6 of Wang 2024; the grid goes on to twice the context."""

    def run(self, cell, *_):
        hit = cell.length <= 256
        return [passkey._sample(cell, key, "", hit) for key in range(cell.settings["keys"])]

    monkeypatch.setattr(passkey.Passkey, "run", run)
    monkeypatch.setattr(reproduce_benchmarks, "PrefixCache", lambda model: None)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")
    benchmarks = reproduce_benchmarks.StudyBenchmarks(passkey_lengths=4)
    scores = reproduce_benchmarks.benchmark_scores(
        benchmarks, Path, None, tokenizer, 256, keys=1, trained="no"
    )
    means = {s["metric"]: (s["length"], s["value"]) for s in scores if "mean" in s["metric"]}
    assert means == {"passkey_mean": (256, 1.0), "passkey_grid_mean": (512, 0.5)}


@pytest.mark.long
def test_benchmarks_are_columns_that_resume(bench, monkeypatch):
    """Every row is measured in its own context; other data or settings are measured again."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(reproduce_workflow, "save", lambda figure, path: drawn.append(path.name))
    study, out, drawn = str(bench / "study.toml"), bench / "out", []
    results = reproduce(study, BENCHMARKS, out)
    for result, context in zip(results, (128, 256), strict=True):
        scores = [score for score in result["scores"] if score["eval"] != "passkey"]
        assert {score["length"] for score in scores} == {context}
        assert {score["eval"] for score in scores} == {"longbench", "commonsense"}
        lengths = [s["length"] for s in result["scores"] if s["metric"] == "passkey"]
        assert len(lengths) == 3
        assert max(lengths) == 2 * context
        beams = {score["tags"]["beams"] for score in scores if score["eval"] == "longbench"}
        assert beams == {2}
        passkeys = [score for score in result["scores"] if score["eval"] == "passkey"]
        assert {score["tags"]["trained_on_passkeys"] for score in passkeys} == {"no"}
    assert drawn == ["loss", "passkeys"]
    text = (out / "tables.md").read_text()
    assert "| perplexity, pg19_test_a | passkeys | LongBench | commonsense |" in text
    (average,) = (
        s["value"]
        for s in results[1]["scores"]
        if (s["eval"], s["metric"]) == ("commonsense", "average")
    )
    header, rows = benchmark_table(results)
    assert header[-3:] == ["passkeys", "LongBench", "commonsense"]
    assert rows[1][1:3] == ["uniform", "2×"]
    assert rows[1][-1] == f"{100 * average:.1f}"
    assert " | ".join(rows[1]) in text
    by_task = text.partition("## LongBench by task")[2].partition("## Scales")[0]
    assert "| hotpotqa | trec | average |" in by_task
    assert f"| {' | '.join(name.partition('/')[0] for name in ITEMS)} | average |" in by_task
    messages: list[str] = []
    assert reproduce(study, BENCHMARKS, out, say=messages.append) == results
    assert not messages, "nothing is measured twice"
    file = bench / "data" / "bench" / "piqa" / "val.jsonl"
    file.write_text(json.dumps(ITEMS["piqa/val"] | {"label": 1}) + "\n")
    reproduce(study, [*BENCHMARKS, 'methods.nope-twin=["none"]'], out, say=messages.append)
    assert len(messages) == 1, "other items"


def test_studies_without_benchmarks_keep_their_cells(tiny, finished):
    """The settings of benchmarks are not part of a cell that has none."""
    cells = [json.loads(file.read_text()) for file in finished.out.glob("cells/*.json")]
    assert not any("benchmarks" in cell["description"]["settings"] for cell in cells)
    assert "Benchmarks" not in (finished.out / "tables.md").read_text()


def test_benchmarks_that_cannot_run_are_refused_before_training(bench, monkeypatch):
    monkeypatch.setattr(
        reproduce_workflow, "find_or_train_model", lambda *args: pytest.fail("a model is trained")
    )
    study, out = str(bench / "study.toml"), bench / "out"
    with pytest.raises(FarspanError, match=r"missing.jsonl was not found; give LongBench's"):
        reproduce(study, [*NONE_ONLY, "benchmarks.longbench=missing.jsonl"], out)
    monkeypatch.setattr(importlib.metadata, "version", raise_missing_package)
    with pytest.raises(FarspanError, match=r"commonsense.* pip install '.\[harness\]' in the"):
        reproduce(study, [*NONE_ONLY, "benchmarks.commonsense=bench"], out)
    with pytest.raises(FarspanError, match="benchmarks.beams is 0; choose 1 or more"):
        reproduce(study, ["benchmarks.beams=0"], out)
    assert not out.exists()


def raise_missing_package(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)
