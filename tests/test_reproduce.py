"""A study runs each of its cells once, measures all alike, and goes on where it was stopped."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch

from farspan.cells import Cells
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import FarspanError
from farspan.methods.headscale import Search
from farspan.methods.tuning import Tuning
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.report.figures import losses_of_methods
from farspan.report.study import losses, report
from farspan.workflows import reproduce as studies
from farspan.workflows.fitting import Extension
from farspan.workflows.reproduce import reproduce, so_far
from farspan.workflows.studies import Study, cells, read_study


@pytest.mark.parametrize("name", ["extend-small", "extend-hybrids"])
def test_the_studies_on_the_shelf_parse(name):
    study = read_study(name, [])
    found = cells(study)
    assert len(set(found)) == len(found)
    assert {cell.model for cell in found} == set(study.methods)
    for cell in found:
        assert cell.seed == 0 or "head" in cell.method or "tune=" in cell.method


def test_a_method_that_does_not_exist_is_named():
    with pytest.raises(FarspanError, match="methods.small-nope names 'headscal', .* the nearest is headscale"):
        cells(Study({"small-nope": ("headscal",)}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            dict(methods={"nope-twin": ("none", "none")}),
            r"methods.nope-twin names something twice: \['none', 'none'\]; ",
        ),
        (dict(factors=(2, 4, 2)), r"factors names something twice: \[2, 4, 2\]; name each once"),
        (dict(seeds=(0, 0)), "seeds names something twice"),
        (dict(grids=("nope-twin", "nope-twin")), "grids names something twice"),
        (dict(report=("a.txt", "a.txt")), "report names something twice"),
        (dict(grids=("rope-twin",)), r"grids names 'rope-twin', which is not under \[methods\] \(nope-twin\); add it"),
        (dict(methods={}), "methods is empty, and so is the study; name at least one"),
        (dict(seeds=()), "seeds is empty"),
        (
            dict(search="a.txt", report=("x/../a.txt",)),
            r"share no text, and a.txt and x/\.\./a.txt do; name each",
        ),
        (dict(methods={"nope-twin": ()}), "methods.nope-twin is empty; name at least one method, or none"),
        (dict(report_windows=0), "report_windows is 0; give 1 or more"),
        (dict(report_factor=0), "report_factor is 0; give 1 or more"),
        (dict(passkeys=0), "passkeys is 0; give 1 or more"),
        (dict(factors=(2, 0)), "factors names 0, .*; give 2 or more"),
        (dict(factors=(-2,)), "factors names -2, "),
        (dict(factors=(1, 2)), "factors names 1, .*; give 2 or more"),
        (dict(factors=(2, 4), report_factor=2), "report_factor is 2 and factors names 4, so a target would not be"),
        (dict(seeds=(0, -1)), "seeds names -1; choose each from 0 to"),
        (dict(grid_low=3.0, grids=("nope-twin",)), r"grid_low is 3 and grid_high 2\.6, and no scale lies between"),
        (dict(grid_low=0.0, grids=("nope-twin",)), "let grid_low be 0.01 or more"),
        (dict(search="a.txt", choose="a.txt"), "share no text, and a.txt and a.txt do"),
        (
            dict(report=("a/books.txt", "b/books.jsonl")),
            "report has texts of one name, books, books, .*; rename a file",
        ),
    ],
)
def test_a_study_whose_cells_could_never_all_be_found_is_refused(wrong, message):
    """It would wait for ever for a second result of one cell, or for a model that nobody asks for."""
    with pytest.raises(FarspanError, match=message):
        Study(**{"methods": {"nope-twin": ("none", "uniform")}, **wrong})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("pi+ntk", r"pi\+ntk sets rotation 2 times"),
        ("headscale:tune=fair", "headscale has no use for tune=fair"),
        ("yarn:search.steps=3", "yarn has no use for search.steps=3"),
        ("none+uniform", "names 'none.uniform', and none is the model as it is; give it alone"),
        ("none:seed=1", "names 'none:seed=1', and none is the model as it is"),
    ],
)
def test_a_method_that_would_not_do_what_its_name_says_is_refused(method, message):
    with pytest.raises(FarspanError, match=message):
        cells(Study({"small-rope": (method,)}))


def test_settings_of_a_study_serve_those_of_its_methods_that_use_them():
    how = Extension(search=Search(steps=3), tuning=Tuning(steps=3), tune="fair", fitted=False)
    study = Study({"m": ("uniform", "headscale", "logn", "yarn:tuning.lr=0.5", "drope")}, extension=how, factors=(2,))
    assert [cell.method for cell in cells(study)] == [
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
def test_what_depends_on_chance_has_every_seed(tune, method, seeds):
    """By the settings in force, be they the study's own or a variant's."""
    study = Study({"m": (method,)}, extension=Extension(tune=tune), factors=(2,))
    assert [cell.seed for cell in cells(study)] == list(range(seeds))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A model of two layers trained on 32 tokens by its config, and the texts that a study reads."""
    text = next(iter(read_documents("python-docs"))).text
    tokenizer = train_tokenizer([text[:20_000]], 300)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=300)
    torch.manual_seed(0)
    FarspanForCausalLM(FarspanConfig(**shape, max_position_embeddings=32)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("books_train_a", "books_train_b", "books_val", "pg19_test_a")):
        part = text[number * 20_000 : (number + 1) * 20_000]
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"text": part}) + "\n")
    monkeypatch.setattr(studies, "find_model", lambda *asked: tmp_path / "model")
    monkeypatch.setattr(studies, "passkey_share", lambda model, tokenizer, length, **options: 0.5)
    (tmp_path / "study.toml").write_text(
        f'folder = "{tmp_path}/data"\nsearch = "books_train_a.jsonl"\nchoose = "books_train_b.jsonl"\n'
        'report = ["books_val.jsonl", "pg19_test_a.jsonl"]\n'
        'factors = [2]\nseeds = [0, 1]\nreport_windows = 2\nreport_factor = 2\ngrids = ["nope-twin"]\n'
        "grid_low = 1.0\ngrid_high = 1.02\n"
        '[methods]\nnope-twin = ["none", "uniform", "headscale:search.init=1.2"]\n'
        "[extension]\nsearch_windows = 8\nchoose_windows = 2\n"
        "[extension.search]\nsteps = 2\nbatch = 2\nlr = [0.1]\nwarmup = 1\n"
    )
    return tmp_path


def test_a_study_measures_every_cell_once_and_goes_on(tiny):
    said: list[str] = []
    source, out = str(tiny / "study.toml"), tiny / "out"
    results = reproduce(source, [], out, say=said.append)
    assert [(found["method"], found["seed"]) for found in results] == [
        ("none", 0),
        ("uniform", 0),
        ("headscale:search.init=1.2", 0),
        ("headscale:search.init=1.2", 1),
    ]
    assert len(said) == 5, "four cells and a grid"
    assert set(results[0]["loss"]) == {"books_val", "pg19_test_a"}
    assert len(results[0]["entropy"]) == len(results[0]["positions"]) == len(results[0]["loss"]["books_val"])
    assert results[2]["scales"] != results[3]["scales"], "seeds search in other orders"
    (grid,) = json.loads((out / "results.json").read_text())["grids"]
    assert len(grid["values"]) == 3
    lost = next(file for file in out.glob("cells/*.json") if '"method": "uniform"' in file.read_text())
    lost.unlink()
    said.clear()
    again = reproduce(source, [], out, say=said.append)
    assert len(said) == 1
    assert again == results
    said.clear()
    more = reproduce(source, ["report_windows=3"], out, say=said.append)
    assert len(said) == 5, "what is measured otherwise is measured anew"
    assert more[0]["loss"] != again[0]["loss"]
    _, rows = losses(again, "books_val")
    assert [row[1] for row in rows] == ["none", "uniform", "headscale:search.init=1.2"]
    assert ["±" in row[3] for row in rows] == [False, False, True], "seeds are averaged, with their spread"


def test_a_model_that_was_replaced_is_measured_anew(tiny):
    source, out = str(tiny / "study.toml"), tiny / "out"
    few = ['methods.nope-twin=["none"]', "grids=[]", "seeds=[0]"]
    first = reproduce(source, few, out)
    torch.manual_seed(1)
    model = FarspanForCausalLM.from_pretrained(tiny / "model")
    FarspanForCausalLM(model.config).save_pretrained(tiny / "model")
    assert reproduce(source, few, out)[0]["loss"] != first[0]["loss"]


def test_a_study_shows_what_is_finished(tiny):
    source, out = str(tiny / "study.toml"), tiny / "out"
    with pytest.raises(FarspanError, match=r"out holds no result of this study; run it first"):
        so_far(source, [], out)
    results = reproduce(source, [], out)
    written = {path: path.read_bytes() for path in (out / "results.json", out / "tables.md")}
    assert {path.name for path in out.glob("*.png")} == {"loss.png", "scales.png"}
    assert so_far(source, [], out) == results
    assert written == {path: path.read_bytes() for path in written}
    next(file for file in out.glob("cells/*.json") if '"method": "uniform"' in file.read_text()).unlink()
    left = [found for found in results if found["method"] != "uniform"]
    assert so_far(source, [], out) == left
    reproduce(source, ["report_windows=3"], out)
    assert so_far(source, [], out) == left, "what was measured otherwise is another study's"


def test_other_text_under_the_same_name_is_measured_anew(tiny):
    """By its content."""
    source, out = str(tiny / "study.toml"), tiny / "out"
    few = ['methods.nope-twin=["none"]', "grids=[]"]
    said: list[str] = []
    (first,) = reproduce(source, few, out, say=said.append)
    file = tiny / "data" / "books_val.jsonl"
    text = file.read_text()
    file.write_text(json.dumps({"text": json.loads(text)["text"][::-1]}) + "\n")
    (second,) = reproduce(source, few, out, say=said.append)
    assert second["loss"]["books_val"] != first["loss"]["books_val"]
    assert second["loss"]["pg19_test_a"] == first["loss"]["pg19_test_a"]
    file.write_text(text)
    assert reproduce(source, few, out, say=said.append) == [first]
    assert len(said) == 2, "what was measured on the text that is back is still there"


def test_what_is_computed_in_another_way_is_measured_anew(tiny, monkeypatch):
    source, out = str(tiny / "study.toml"), tiny / "out"
    few = ['methods.nope-twin=["none", "uniform"]', "grids=[]"]
    assert [found["method"] for found in reproduce(source, few, out)] == ["none", "uniform"]
    monkeypatch.setattr(studies, "FORMAT", 99)
    said: list[str] = []
    reproduce(source, ['methods.nope-twin=["none"]', "grids=[]"], out, say=said.append)
    assert len(said) == 1
    assert [found["method"] for found in so_far(source, few, out)] == ["none"], "no table holds results of two formats"


def test_a_text_outside_the_folder_has_the_name_of_its_file(tiny):
    (tiny / "data" / "books_val.jsonl").rename(tiny / "books_val.jsonl")
    few = ['methods.nope-twin=["none"]', "grids=[]", 'report=["../books_val.jsonl", "pg19_test_a.jsonl"]']
    (found,) = reproduce(str(tiny / "study.toml"), few, tiny / "out")
    assert set(found["loss"]) == {"books_val", "pg19_test_a"}


def test_a_study_of_variants_alone_is_drawn(tiny):
    few = ['methods.nope-twin=["headscale:search.init=1.2"]', "grids=[]", "seeds=[0]"]
    reproduce(str(tiny / "study.toml"), few, tiny / "out")
    assert (tiny / "out" / "loss.png").exists()


def test_a_study_needs_no_file_that_it_does_not_read(tiny, monkeypatch):
    """Nor those by which the recipes of models find their folder."""
    data = tiny / "data"
    names = {"books_train_a": "find", "books_train_b": "pick", "books_val": "tell"}
    for old, new in names.items():
        (data / f"{old}.jsonl").rename(data / f"{new}.jsonl")
    (data / "pg19_test_a.jsonl").unlink()
    own = ["search=find.jsonl", "choose=pick.jsonl", 'report=["tell.jsonl"]', 'methods.nope-twin=["none"]', "grids=[]"]
    (found,) = reproduce(str(tiny / "study.toml"), own, tiny / "out")
    assert set(found["loss"]) == {"tell"}
    monkeypatch.setenv("FARSPAN_DATA", str(data))
    assert reproduce(str(tiny / "study.toml"), [*own, "folder="], tiny / "out") == [found]


def test_results_of_something_else_are_none_of_a_study(tiny):
    Cells(tiny / "out").put("0" * 32, {}, {"task": "copy", "encoding": "none"})
    with pytest.raises(FarspanError, match=r"out holds no result of this study"):
        so_far(str(tiny / "study.toml"), [], tiny / "out")


def test_texts_that_are_missing_are_told_before_anything_is_made(tiny):
    (tiny / "data" / "books_val.jsonl").unlink()
    with pytest.raises(FarspanError, match=r"books_val.jsonl does not exist, .* folder=PATH"):
        reproduce(str(tiny / "study.toml"), [], tiny / "out")
    assert not (tiny / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ['methods.nope-twin=["none", "yarn"]'],
            r"yarn changes rotation, and no layer of nope-twin \(methods\.nope-twin\) rotates",
        ),
        (
            ['methods.small-nope=["yarn+headscale"]'],
            r"yarn changes rotation, and no layer of small-nope \(methods\.small-nope\) rotates",
        ),
        (['methods.foo=["none"]'], "methods.foo names a model that cannot be had: there is no recipe 'foo'; "),
        (
            ['methods.foo-twin=["none"]'],
            "methods.foo-twin names a model that cannot be had: there is no recipe",
        ),
        (
            ["search=short.jsonl"],
            r"search names short.jsonl, which does not serve nope-twin: no document has 1152 tokens",
        ),
    ],
)
def test_what_a_study_could_not_finish_is_told_before_anything_is_made(tiny, monkeypatch, changes, message):
    monkeypatch.setattr(studies, "find_model", lambda *asked: pytest.fail("a model is trained"))
    (tiny / "data" / "short.jsonl").write_text('{"text": "too short"}\n')
    with pytest.raises(FarspanError, match=message):
        reproduce(str(tiny / "study.toml"), [f"runs={tiny}/runs", *changes], tiny / "out")
    assert not (tiny / "out").exists()


def measured(model: str, method: str, length: int) -> dict:
    """A cell of a model trained on so many tokens, and measured on twice as many."""
    positions = [length * part / 4 for part in range(1, 9)]
    return {
        "model": model,
        "method": method,
        "factor": 1 if method == "none" else 2,
        "seed": 0,
        "train_length": length,
        "target": 2 * length,
        "positions": positions,
        "loss": {"text": [place / 1000 for place in positions]},
        "entropy": [1.0] * 8,
        "passkey": {str(length): 1.0, str(2 * length): 0.5},
        "loss_knee": None,
        "entropy_knee": None,
    }


def test_models_of_several_training_lengths_have_tables_and_axes_of_their_own():
    found = [measured(model, "none", length) for model, length in (("a", 512), ("b", 1024), ("c", 512))]
    text = report(found, [])
    assert text.count("## Loss on text, in nats, trained on") == 2
    for length, rows in ((512, ("a", "c")), (1024, ("b",))):
        (table,) = (
            part for part in text.split("## ") if part.startswith(f"Loss on text, in nats, trained on {length} ")
        )
        assert f"| {length // 2} | {length} | {2 * length} | passkey {length}/{2 * length} |" in table
        for model in rows:
            assert f"| {model} | none |  | {length / 2000:.2f} | {length / 1000:.2f} | {length / 500:.2f} |" in table
        assert table.count("| none |") == len(rows)
    assert "## Loss on text, in nats\n" in report(found[:1] + found[2:], []), "of one length nothing need be said"
    figure = losses_of_methods(found)
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
def test_variants_are_drawn_where_nothing_else_was_fitted(methods, drawn):
    figure = losses_of_methods([measured("a", method, 512) for method in methods])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == drawn
    assert len([line for line in figure.axes[0].lines if len(line.get_xdata()) == 8]) == len(drawn)


def test_scales_and_entropies_are_ranked_within_their_own_layer():
    """Of two layers the second alone is scaled; its heads' λ̂ fall as their entropy rises."""
    measured = {
        "train_length": 4,
        "positions": [2, 4, 6, 8],
        "loss": {"text": [1.0, 1.0, 2.0, 3.0]},
        "entropy": [0.5, 1.0, 1.5, 2.0],
        "passkey": {"4": 1.0, "8": 0.25},
        "loss_knee": 6,
        "entropy_knee": None,
    }
    cell = measured | {
        "model": "m",
        "method": "headscale",
        "factor": 2,
        "seed": 0,
        "target": 8,
        "scales": [[1.5, 1.2, 1.1]],
        "patch": {"scales": {"layers": [1]}},
        "entropy_of_heads": {"0": [1.0, 2.0, 3.0], "1": [0.5, 0.7, 2.5]},
    }
    text = report([cell], [])
    assert "| m | headscale | 2× | 1.00 | 1.00 | 3.00 | 1.00/.25 |" in text
    assert "| m | headscale | 2× | 1.27 (1.10–1.50) | 6 | none | 2.00 | -1.00 |" in text


def test_processes_share_a_study(tiny):
    """Two at once: each cell is measured by one of them, and both come to all results."""
    source, out = str(tiny / "study.toml"), tiny / "out"
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        shares = pool.starmap(_reproduced, [(source, out)] * 2, chunksize=1)
    assert shares[0][1] == shares[1][1]
    assert len(shares[0][0]) + len(shares[1][0]) == 5


def _reproduced(source, out):
    torch.set_num_threads(1)
    said: list[str] = []
    return said, reproduce(source, [], out, say=said.append)
