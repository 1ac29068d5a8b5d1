"""A study trains each of its models once, judges it by exact match at every length, and ranks those that learnt."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

import farspan
from farspan import cli
from farspan.cells import key_of
from farspan.errors import FarspanError
from farspan.lab import study as studying
from farspan.lab.fleet import Fleet
from farspan.lab.ranking import (
    accuracy_table,
    entries,
    learnt_of,
    rank_table,
    ranks,
    reciprocal_ranks,
    scale_table,
)
from farspan.lab.study import (
    Cell,
    Shape,
    Study,
    as_rows,
    begun,
    cells_of,
    config_of,
    describe,
    fleets,
    material,
    parse_range,
    plan_of,
)
from farspan.lab.tasks import draw, find_task
from farspan.lab.words import Words
from farspan.workflows import laboratory
from farspan.workflows.explaining import compare, theorems
from farspan.workflows.laboratory import SHELF, as_tokenizer, dump, estimate, line_of, read_study, run, so_far

RECIPES = sorted(path.stem for path in SHELF.glob("*.toml"))
SMALL = """
tasks = ["copy", "reverse"]
encodings = ["none", "learned"]
seeds = [0, 1]
lrs = [1e-2]
scales = [1.3]
train_examples = 64
test_examples = 40
save = true
[train_lengths]
copy = "2:4"
reverse = "2:4"
[test_lengths]
copy = "5:6"
reverse = "5:6"
[sizes.mini]
layers = 1
width = 16
heads = 2
ff = 32
[train]
steps = 4
batch = 8
buckets = 2
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A small study, run once."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "small.toml").write_text(SMALL)
    run(str(folder / "small.toml"), [], folder / "out")
    return folder


def test_a_study_trains_every_cell_once_and_goes_on(done):
    said: list[str] = []
    source, out = str(done / "small.toml"), done / "out"
    found = run(source, [], out, say=said.append)
    assert not said, "all was there"
    assert found.learnt[1] == 8
    files = sorted((out / "cells").glob("*.json"))
    assert len(files) == 8
    before = json.loads(files[3].read_text())
    files[3].unlink()
    run(source, [], out, say=said.append)
    assert len(said) == 1
    after = json.loads(files[3].read_text())
    assert {**before["result"], "seconds": 0} == {**after["result"], "seconds": 0}, "the same seed makes the same model"
    assert len(run(source, ["seeds=[0, 1, 2]"], out, say=said.append).entries[0].results) == 3
    assert len(said) == 1 + 4, "a wider study trains what is new"


def test_a_finished_study_that_is_to_keep_its_models_trains_those_that_are_missing(done, tmp_path):
    source, said = str(done / "small.toml"), []
    few = ['tasks=["copy"]', 'encodings=["none"]']
    before = run(source, [*few, "save=false"], tmp_path)
    assert not (tmp_path / "models").exists()
    files = {file.name for file in (tmp_path / "cells").iterdir()}
    after = run(source, few, tmp_path, say=said.append)
    assert len(said) == len(list((tmp_path / "models").iterdir())) == 2
    assert {file.name for file in (tmp_path / "cells").iterdir()} == files, "the cells are the same"
    assert not list((tmp_path / "claims").iterdir())
    for one, other in zip(before.entries[0].results, after.entries[0].results, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    shutil.rmtree(next((tmp_path / "models").glob("copy.none.*.s1-*")))
    run(source, [*few, "processes=2"], tmp_path, say=said.append)
    assert [line.split()[0].rpartition(".")[2] for line in said[2:]] == ["s1"], "only what is missing"
    assert len(list((tmp_path / "models").iterdir())) == 2
    run(source, few, tmp_path, say=said.append)
    run(source, [*few, "save=false"], tmp_path, say=said.append)
    assert len(said) == 3


def test_what_a_study_leaves_behind(done):
    out = done / "out"
    run(str(done / "small.toml"), [], out)
    record = json.loads((out / "record.json").read_text())
    assert record["models"] == 8
    assert {cell["encoding"] for cell in record["cells"]} == {"none", "learned"}
    cell = record["cells"][0]
    assert set(cell["in_range"]) <= {"2", "3", "4"}
    assert set(cell["beyond"]) == set(cell["scaled"]["1.3"]) == {"5", "6"}
    assert sum(asked for _, asked in cell["beyond"].values()) == 40
    assert len(cell["loss"]) == 4
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    assert read_study(str(out / "recipe.toml")) == read_study(str(done / "small.toml"))
    assert "learnt their task" in (out / "tables.md").read_text()


def test_a_study_shows_what_is_finished(done, tmp_path):
    source, out = str(done / "small.toml"), tmp_path / "out"
    with pytest.raises(FarspanError, match="out holds no result of this study; run it first"):
        so_far(source, [], out)
    assert not out.exists()
    (out / "cells").mkdir(parents=True)
    for file in sorted((done / "out" / "cells").glob("*.json"))[:5]:
        (out / "cells" / file.name).write_bytes(file.read_bytes())
    assert so_far(source, [], out).learnt[1] <= 5
    assert 0 < (whole := len(json.loads((out / "record.json").read_text())["cells"])) <= 5
    said: list[str] = []
    files = [
        out / "cells" / f"{key_of(describe(read_study(source), cell))}.json" for cell in cells_of(read_study(source))
    ]
    next(file for file in files if file.exists()).write_text("{")
    so_far(source, [], out, said.append)
    assert len(said) == 1
    assert "is set aside as" in said[0]
    assert len(json.loads((out / "record.json").read_text())["cells"]) == whole - 1


def test_a_saved_model_is_a_model_like_any_other(done):
    folder = next((done / "out" / "models").glob("copy.none.*"))
    model, tokenizer = farspan.load(folder)
    words, example = Words(), draw(find_task("copy"), (3, 3), 1, 0)[0]
    text = f"<begin> {example.input} <answer> {example.target} <end>"
    assert tokenizer(text)["input_ids"] == words.prompt(example) + words.reply(example)
    assert tokenizer.decode(words.encode(example.target)) == example.target
    assert farspan.inspect(folder).train_length == model.config.max_position_embeddings
    text_file = done / "text.txt"
    text_file.write_text(" ".join(json.loads(line)["input"] for line in dump("copy", 400, "2:20", 0)))
    found = farspan.extend(str(folder), 24, done / "patch", "uniform", data=str(text_file))
    assert found.patch.scales is not None
    assert farspan.load(done / "patch").model.config.model_type == "farspan"


def test_models_of_a_study_can_be_compared(done, tmp_path):
    folders = [str(path) for path in sorted((done / "out" / "models").iterdir()) if path.name.startswith("copy")][:2]
    found = compare(folders, task="copy", lengths="2:4", windows=9, out=tmp_path / "apart")
    assert found.pairs[0, 1].pairs.shape == (1, 2, 2)
    assert found.mass[0].shape[:2] == found.ablations[0].shape == (1, 2)
    record = json.loads((tmp_path / "apart" / "record.json").read_text())
    assert record["settings"].items() >= {"task": "copy", "lengths": "2:4", "windows": 9, "rule": "jsd"}.items()
    assert record["distances"][0]["nearest"] == found.pairs[0, 1].nearest.round(5).tolist()
    assert {path.name for path in (tmp_path / "apart").glob("*.png")} == {"distance.png", "heads.png"}
    with pytest.raises(FarspanError, match="different vocabularies"):
        compare([folders[0], "nope-twin"])
    with pytest.raises(FarspanError, match="'jsb' is unknown"):
        compare(folders, rule="jsb")


def test_a_fleet_trains_models_as_they_are_trained_one_by_one(done, monkeypatch, tmp_path):
    """What a GPU does together and a CPU in turn is the same study."""
    alone = run(str(done / "small.toml"), ["save=false"], done / "out")
    together = fleets
    monkeypatch.setattr(laboratory, "fleets", lambda study, cells, words, most: together(study, cells, words, 64))
    sizes = []
    making = laboratory.fleet_of
    monkeypatch.setattr(laboratory, "fleet_of", lambda *given: sizes.append(len(given[1])) or making(*given))
    stacked = run(str(done / "small.toml"), ["save=false"], tmp_path)
    assert sizes == [4, 2, 2], "learned tables are as long as their task needs"
    for one, other in zip(alone.entries, stacked.entries, strict=True):
        for left, right in zip(one.results, other.results, strict=True):
            assert np.allclose(left["loss"], right["loss"], atol=1e-3)


def test_another_process_trains_the_same_models(done, tmp_path, monkeypatch):
    alone = run(str(done / "small.toml"), ["save=false"], done / "out")
    study = read_study(str(done / "small.toml"), ["save=false"])
    helper = get_context("spawn").Process(target=laboratory._help, args=(study, tmp_path, "cpu"))
    helper.start()
    helper.join()
    monkeypatch.setattr(laboratory, "train", None)  # there is nothing left to train
    shared = run(str(done / "small.toml"), ["save=false", "processes=2"], tmp_path)
    for one, other in zip(alone.entries, shared.entries, strict=True):
        for left, right in zip(one.results, other.results, strict=True):
            assert np.allclose(left["loss"], right["loss"], atol=1e-5)
            assert left["beyond"] == right["beyond"]


def test_fleets_hold_one_network_and_rows_of_similar_length():
    study = Study(tasks=("copy", "parity", "scan", "pcfg"), steps={"scan": 9})
    lineup = fleets(study, cells_of(study), Words(), 5)
    assert sorted(cell.name for fleet in lineup for cell in fleet) == sorted(cell.name for cell in cells_of(study))
    for fleet in lineup:
        assert len(fleet) <= 5
        assert len({(cell.encoding, cell.size, plan_of(study, cell)) for cell in fleet}) == 1
    assert all(len({cell.task for cell in fleet}) == 1 for fleet in lineup if fleet[0].task == "scan")
    assert not any({"parity", "pcfg"} <= {cell.task for cell in fleet} for fleet in lineup), "pcfg is much longer"


def test_fleets_that_take_longest_come_first():
    sizes = {"small": Shape(), "large": Shape(width=512)}
    study = Study(tasks=("parity", "copy", "pcfg"), steps={"parity": 25_000}, encodings=("none",), sizes=sizes)
    order = [(cell.size, cell.task) for cell, *_ in fleets(study, cells_of(study), Words(), 3)]
    assert order == [(size, task) for size in ("large", "small") for task in ("parity", "pcfg", "copy")]


def test_with_dropout_every_model_trains_alone():
    study = Study(tasks=("copy", "reverse"), sizes={"dry": Shape(), "wet": Shape(dropout=0.1)})
    lineup = fleets(study, cells_of(study), Words(), 5)
    assert all(len(fleet) == 1 for fleet in lineup if fleet[0].size == "wet")
    assert any(len(fleet) > 1 for fleet in lineup if fleet[0].size == "dry")


def test_a_task_and_a_size_multiply_the_learning_rates():
    sizes = {"small": Shape(), "large": Shape(rate=0.5)}
    study = Study(tasks=("copy", "parity"), lrs=(1e-3, 2e-3), rates={"parity": 0.25}, sizes=sizes)
    rates = {(cell.task, cell.size): set() for cell in cells_of(study)}
    for cell in cells_of(study):
        rates[cell.task, cell.size].add(cell.lr)
    assert rates == {
        ("copy", "small"): {1e-3, 2e-3},
        ("copy", "large"): {5e-4, 1e-3},
        ("parity", "small"): {2.5e-4, 5e-4},
        ("parity", "large"): {1.25e-4, 2.5e-4},
    }


def test_a_row_is_the_prompt_and_the_answer():
    words, task = Words(), find_task("addition")
    examples = draw(task, (1, 4), 20, 0)
    rows = as_rows(examples, words)
    for example, ids, start, stop in zip(examples, rows.ids, rows.start, rows.stop, strict=True):
        assert words.decode(ids[:start].tolist()) == example.input
        assert words.decode(ids[start:stop].tolist()) == example.target
        assert ids[stop - 1] == words.end
        assert (ids[stop:] == words.pad).all()


def test_held_out_examples_are_not_trained_on():
    study = replace(read_study("lab-tiny"), train_examples=500, test_examples=100)
    found = material(study, "copy", "none", Words())
    seen = {tuple(row[:stop].tolist()) for row, stop in zip(found.train.ids, found.train.stop, strict=True)}
    for rows in (found.held_out, found.beyond):
        assert not seen & {tuple(row[:stop].tolist()) for row, stop in zip(rows.ids, rows.stop, strict=True)}
    assert found.held_out_lengths.max() < found.beyond_lengths.min()


def test_every_length_is_trained_on_as_often():
    found = material(replace(read_study("lab-tiny"), train_examples=500), "parity", "none", Words())
    lengths, counts = torch.unique(found.train.start, return_counts=True)
    assert len(lengths) == 8
    assert set(counts.tolist()) == {int(2**8 * 0.9) + 1}, "as many as the longest has; the shortest come again"
    assert len({tuple(row.tolist()) for row in found.train.ids[found.train.start == lengths[0]]}) == 2


@pytest.mark.parametrize("encoding", ["none", "t5"])
def test_scores_begin_as_large_without_a_root_of_d(encoding):
    words, ids = Words(), torch.arange(12)[None]
    usual, unscaled = (
        begun(config_of(Shape(2, 32, 2, 64, base_scale=scale), encoding, words, 12, 12), 0, False).eval()
        for scale in (0.0, 1.0)
    )
    with torch.no_grad():
        assert torch.equal(usual(ids).logits, unscaled(ids).logits), "1/√16 is exact wherever it is multiplied"


def test_the_papers_network_begins_as_t5_does():
    """Deviations of N(0, 1/inputs), and of queries that times 1/√(width of a head)."""
    ((_, shape),) = read_study("lab-paper", ["sizes.base.layers=1"]).sizes.items()
    model = begun(config_of(shape, "none", Words(), 8, 8), 0, shape.zero_outputs)
    wanted = {
        "q": (768 * 64) ** -0.5,
        "k": 768**-0.5,
        "v": 768**-0.5,
        "o": 768**-0.5,
        "up": 768**-0.5,
        "down": 3072**-0.5,
    }
    found = {
        name.split(".")[-2]: float(weight.data.std()) for name, weight in model.named_parameters() if "_proj" in name
    }
    assert found == pytest.approx({f"{name}_proj": deviation for name, deviation in wanted.items()}, rel=0.02)


def test_theorems_are_proven_and_positions_read(tmp_path):
    found = theorems(["nope-twin"], length=64, windows=4, out=tmp_path / "positions")
    assert all(proof.position_error < 1e-6 and proof.score_error < 1e-6 for proof in found.proofs)
    readings = found.readings["nope-twin"]
    assert max(each.r2 for each in readings[1:]) > 0.5 > readings[0].r2, "its layers find what its embeddings lack"
    record = json.loads((tmp_path / "positions" / "record.json").read_text())
    assert len(record["readings"]["nope-twin"]) == len(readings)
    assert (tmp_path / "positions" / "theorems.png").exists()


# Ranks.


def result(in_range: float, beyond: float, chosen_by: float = 1.0) -> dict:
    counts = {"3": [round(1000 * beyond), 1000]}
    inside = {"2": [round(1000 * in_range), 1000]}
    scaled = {"1.2": {"3": [500, 1000]}}
    return {"in_range": inside, "beyond": counts, "chosen_by": chosen_by, "scaled": scaled, "loss": [1.0, 0.1]}


def cell(task: str, encoding: str, seed: int = 0, lr: float = 1e-3) -> Cell:
    return Cell(task, encoding, "small", "none", lr, seed)


def test_models_that_did_not_learn_have_no_rank_and_are_counted():
    found = entries(
        {
            cell("copy", "none"): result(1.0, 0.5),
            cell("copy", "none", 1): result(0.94, 1.0),
            cell("copy", "t5"): result(0.95, 0.4),
            cell("copy", "alibi"): result(0.5, 0.9),
            cell("scan", "none"): result(1.0, 0.1),
            cell("scan", "t5"): result(1.0, 0.2),
        }
    )
    assert learnt_of(found) == (4, 6)
    assert [(rank.encoding, rank.reciprocal, rank.tasks) for rank in ranks(found)] == [
        ("none", 0.75, 2),
        ("t5", 0.75, 2),
    ]
    head, rows = accuracy_table(found)
    assert head == ["task", "none", "t5", "alibi"]
    assert rows[0] == ["copy", "0.500 (1 of 2)", "0.400", "not learnt (0.50)"]
    assert rank_table(found)[1] == [["small", "none", "0.750 (2)", "0.750 (2)", ""]]
    assert scale_table(found)[1] == [["1", "0.300", "0.300", ""], ["1.2", "0.500", "0.500", ""]]


def test_encodings_keep_their_order_whichever_is_finished_first():
    some = {cell("copy", "alibi"): result(1.0, 0.5), cell("scan", "none"): result(1.0, 0.4)}
    for table in (accuracy_table, rank_table, scale_table):
        assert table(entries(some))[0][-2:] == ["none", "alibi"]


def test_a_model_that_diverged_is_said_to_have(tmp_path):
    lost = result(0.0, 0.0) | {"loss": [2.0, None]}
    ((task, *told),) = accuracy_table(entries({cell("copy", "none"): lost, cell("copy", "t5"): result(0.1, 0.0)}))[1]
    assert (task, told) == ("copy", ["diverged", "not learnt (0.10)"])
    assert "diverged" in line_of(cell("copy", "none"), lost | {"seconds": 1.0})


def test_those_that_are_level_share_their_places():
    assert reciprocal_ranks({"a": 0.9, "b": 0.5, "c": 0.5}) == pytest.approx({"a": 1, "b": 5 / 12, "c": 5 / 12})
    level = reciprocal_ranks(dict.fromkeys("abcde", 0.0))
    assert level == pytest.approx(dict.fromkeys("abcde", sum(1 / n for n in range(1, 6)) / 5))


def test_the_held_out_half_chooses_the_learning_rate():
    found = entries(
        {
            cell("copy", "none", lr=1e-3): result(0.99, 0.9, chosen_by=0.97),
            cell("copy", "none", lr=1e-2): result(0.98, 0.1, chosen_by=0.99),
        }
    )
    assert [(entry.lr, entry.beyond) for entry in found] == [(1e-2, [0.1])]


def test_a_curve_goes_through_both_ranges():
    (entry,) = entries({cell("copy", "none"): result(1.0, 0.5), cell("copy", "none", 1): result(1.0, 0.7)})
    lengths, shares = entry.curve()
    assert lengths.tolist() == [2, 3]
    assert shares.tolist() == [[1.0, 0.5], [1.0, 0.7]]


def test_a_cell_is_told_by_all_it_depends_on():
    study = read_study("lab-tiny")
    first = cells_of(study)[0]
    for change in ("train.steps=7", "scales=[1.1]", "data_seed=3", 'test_lengths.copy="9:10"', "sizes.tiny.width=32"):
        other = read_study("lab-tiny", [change])
        assert describe(other, first) != describe(study, first), change
    assert describe(read_study("lab-tiny", ["save=true", "fleet=3"]), first) == describe(study, first)


# Recipes and commands.


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_read(name):
    study = read_study(name)
    assert len({cell.name for cell in cells_of(study)}) == len(cells_of(study))


def test_the_recipes_that_were_promised():
    assert {"lab-tiny", "lab-quick", "lab-grid", "lab-scratchpad", "lab-scale", "lab-paper"} == set(RECIPES)
    grid, pads, scale, paper = (read_study(f"lab-{name}") for name in ("grid", "scratchpad", "scale", "paper"))
    assert set(grid.encodings) == {"none", "t5", "alibi", "rotary", "sinusoidal"}
    assert len(grid.seeds) == 3
    assert len(pads.scratchpads) >= 8
    assert len(pads.encodings) == 5
    assert len(pads.tasks) >= 2
    assert len(scale.tasks) >= 2
    assert len(scale.sizes) == 3
    (shape,) = paper.sizes.values()
    assert (shape.layers, shape.heads, shape.width, shape.ff, shape.mlp) == (12, 12, 768, 3072, "relu")
    assert (shape.dropout, shape.base_scale) == (0.1, 1.0)
    assert (paper.train.steps, paper.train.batch, paper.lrs, paper.train.weight_decay) == (40_000, 64, (3e-5,), 0.05)
    assert paper.steps["pcfg"] == 100_000
    assert paper.train.rate(2399) == 1.0
    assert paper.train.rate(21_200) == pytest.approx(0.5)


def test_an_estimate_counts_parameters_models_and_tokens():
    found = estimate(read_study("lab-paper", ['tasks=["copy"]']))
    paper = {each.encoding: each for each in found}
    assert 85_000_000 < paper["none"].parameters < 110_000_000
    assert paper["none"].models == 3
    assert paper["none"].tokens > 3 * 40_000 * 64 * 10
    assert paper["t5"].parameters == paper["none"].parameters + 32 * 12, "one table for all layers"


def spawned_by(pid: int) -> list[int]:
    """The processes that multiprocessing started for another, read from the system."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that has just ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_helpers_end_with_the_process_that_was_killed(tmp_path):
    arguments = ["lab", "run", "lab-tiny", "train.steps=100000", "train_examples=200", "-o", str(tmp_path / "out")]
    first = subprocess.Popen([sys.executable, "-m", "farspan", *arguments], stdout=subprocess.DEVNULL)
    for _ in range(1200):
        time.sleep(0.1)
        if len(list((tmp_path / "out" / "claims").glob("[0-9a-f]*"))) == 2:  # both are at work
            break
    (helper,) = spawned_by(first.pid)
    first.kill()
    first.wait()
    for _ in range(100):
        if not Path(f"/proc/{helper}").exists():
            return
        time.sleep(0.1)
    os.kill(helper, signal.SIGKILL)
    pytest.fail("the helper trained on")


def refusal(capsys, monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["farspan", "lab", *arguments])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "lab-tinny"], "the nearest is lab-tiny"),
        (["run", "lab-tiny", 'tasks=["coppy"]'], "'coppy' is unknown; the nearest is copy"),
        (["run", "lab-tiny", 'encodings=["rotery"]'], "'rotery' is unknown; the nearest is rotary"),
        (["run", "lab-tiny", 'train_lengths.copy="8:2"'], "'8:2' is no range of lengths"),
        (["run", "lab-tiny", 'train_lengths.copi="2:8"'], "'copi' is unknown; the nearest is copy"),
        (["run", "lab-tiny", "rates.copi=0.5"], "'copi' is unknown; the nearest is copy"),
        (["run", "lab-tiny", "rates.copy=0.0"], "rates.copy is 0; give a number above 0"),
        (["run", "lab-tiny", 'test_lengths.scan="60:70"'], "scan has no example of 60 to 70 actions"),
        (["run", "lab-tiny", 'scratchpads=["full"]'], "copy"),
        (["run", "lab-tiny", 'tasks=["sorting"]', 'scratchpads=["v"]'], "has no variables part"),
        (["run", "lab-tiny", "seeds=[]"], "seeds is empty"),
        (["run", "lab-tiny", "seeds=[0, 0]"], "seeds names something twice"),
        (["run", "lab-tiny", "seeds=[-1]"], "seed -1 is below 0"),
        (["run", "lab-tiny", "scales=[-1.0]"], "scale -1 is not above 0"),
        (["run", "lab-tiny", "fleet=0"], "fleet is 0; give 1 or more"),
        (["run", "lab-tiny", "--device", "cuba"], "device 'cuba' cannot be used (torch knows no such device)"),
        (["run", "lab-tiny", "--dry-run", "--device", "cuba"], "device 'cuba' cannot be used"),
        (["run", "lab-tiny", "-o", str(Path(__file__).parent)], "tests exists already and is no results folder"),
        (["run", "lab-tiny", "train.buckets=3"], "a batch of 64 examples"),
        (["run", "lab-tiny", "train.warmup=2"], "warmup is 2; give a share from 0 to 1"),
        (["run", "lab-tiny", "train.beta2=1"], "beta2 is 1; give a share"),
        (["run", "lab-tiny", "train.clip=-1"], "clip is -1; give 0 or more"),
        (["run", "lab-tiny", "train.matrix_rate=0"], "matrix_rate is 0; give a number above 0"),
        (["run", "lab-tiny", "train.weight_decay=-1"], "weight_decay is -1; give 0 or more"),
        (["run", "lab-tiny", "lrs=[0.0]"], "lrs are [0.0]; give learning rates above 0"),
        (["run", "lab-tiny", "sizes.tiny.dropout=1.5"], "sizes.tiny.dropout is 1.5; give a share"),
        (["run", "lab-tiny", "sizes.tiny.heads=3"], "a width of 64, which 3 heads do not divide"),
        (["run", "lab-tiny", "sizes.tiny.base_scale=-1.0"], "base_scale -1 and rate 1"),
        (["run", "lab-tiny", "test_examples=1"], "test_examples is 1; give 2 or more"),
        (["dump", "copy", "--lengths", "2-20"], "'2-20' is no range of lengths"),
        (["dump", "copy", "--lengths", "1:1000000000"], "length 1000000000 is more than a model"),
        (["dump", "addition", "--scratchpad", ""], "scratchpad"),
        (["distance", "nope-twin", "rope-twin", "--task", "copy"], "nope-twin has 4096 tokens and the tasks have"),
        (["dump", "copy", "--n", "0"], "0 examples"),
        (["dump", "lego", "--lengths", "30:40"], "30"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(capsys, monkeypatch, *arguments)
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    ("encodings", "shape", "sentence"),
    [
        (["none", "sinusoidal"], Shape(width=33, heads=3), "cannot be built with sinusoidal: .*hidden_size is 33"),
        (["rotary"], Shape(width=33, heads=3), "sizes.odd cannot be built with rotary: rotation turns pairs"),
        (["none"], Shape(mlp="gelu"), "sizes.odd cannot be built with none: mlp 'gelu' is unknown"),
    ],
)
def test_a_network_that_cannot_be_built_is_known_from_the_recipe(encodings, shape, sentence):
    with pytest.raises(FarspanError, match=sentence):
        Study(("copy",), tuple(encodings), sizes={"odd": shape})


def test_cells_of_another_vocabulary_are_others(monkeypatch):
    study = Study(("copy",))
    before = describe(study, cells_of(study)[0])
    monkeypatch.setattr(studying, "_vocabulary", lambda: "other")
    assert key_of(describe(study, cells_of(study)[0])) != key_of(before)


def test_a_test_range_inside_the_training_range_is_warned_of(caplog, tmp_path):
    study = replace(read_study("lab-tiny", ['test_lengths.copy="4:6"']), train_examples=100, test_examples=20)
    material(study, "copy", "none", Words())
    assert "not all longer" in caplog.text
    results = {cell("copy", "none"): result(1.0, 0.5)}
    (title, *_) = laboratory._told(study, results, tmp_path).tables
    assert title == "Exact match at unseen lengths (of copy also at lengths that were trained on)"
    assert title in (tmp_path / "tables.md").read_text()


def test_dump_prints_json_lines(capsys, monkeypatch):
    asked = ["addition", "--n", "5", "--lengths", "2:3", "--seed", "1"]
    monkeypatch.setattr("sys.argv", ["farspan", "lab", "dump", *asked])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 5
    for line in lines:
        assert set(line) == {"input", "target", "length"}
        first, second = line["input"].removeprefix("Compute ").removesuffix(" ?").replace(" ", "").split("+")
        assert line["target"].replace(" ", "") == f"Theansweris{int(first) + int(second)}."
        assert max(len(first), len(second)) == line["length"]
        assert 2 <= line["length"] <= 3


def test_a_range_has_both_its_ends():
    assert parse_range("2:20") == (2, 20)
    assert parse_range("7") == (7, 7)


def test_a_word_that_no_task_has_becomes_padding():
    assert as_tokenizer(Words())("nonsense Copy")["input_ids"] == [Words.pad, Words().encode("Copy")[0]]


@pytest.mark.long
def test_lab_tiny_learns_its_task(tmp_path):
    found = run("lab-tiny", [], tmp_path)
    assert found.learnt[0] == found.learnt[1] == 3


def test_saved_weights_are_those_that_were_judged(done):
    """A model that is loaded answers as the cell says."""
    study = read_study(str(done / "small.toml"))
    record = json.loads((done / "out" / "record.json").read_text())
    entry = next(each for each in record["cells"] if each["task"] == "reverse" and each["encoding"] == "none")
    name = Cell(*(entry[key] for key in ("task", "encoding", "size", "scratchpad", "lr", "seed"))).name
    model, _ = farspan.load(next((done / "out" / "models").glob(f"{name}-*")))
    from farspan.lab.study import judge

    found = material(study, "reverse", "none", Words())
    with torch.no_grad():
        (again,) = judge(Fleet([model]), [found], study.scales)
    assert again["beyond"] == entry["beyond"]
    assert again["scaled"] == entry["scaled"]
