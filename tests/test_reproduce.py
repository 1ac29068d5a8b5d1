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
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.report.study import losses, report
from farspan.workflows import reproduce as studies
from farspan.workflows.reproduce import Study, cells, read_study, reproduce, so_far


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
    monkeypatch.setattr(studies.Texts, "_path", lambda self, file: tmp_path / "data" / file.removesuffix(".xz"))
    monkeypatch.setattr(studies, "passkey_share", lambda model, tokenizer, length, **options: 0.5)
    (tmp_path / "study.toml").write_text(
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


def test_results_of_something_else_are_none_of_a_study(tiny):
    Cells(tiny / "out").put("0" * 32, {}, {"task": "copy", "encoding": "none"})
    with pytest.raises(FarspanError, match=r"out holds no result of this study"):
        so_far(str(tiny / "study.toml"), [], tiny / "out")


def test_texts_that_are_missing_are_told_before_anything_is_made(tiny):
    (tiny / "data" / "books_val.jsonl").unlink()
    with pytest.raises(FarspanError, match=r"books_val.jsonl does not exist, .* folder=PATH"):
        reproduce(str(tiny / "study.toml"), [], tiny / "out")
    assert not (tiny / "out").exists()


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
