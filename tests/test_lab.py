"""Lab studies: training, evaluation by exact match at every length, ranking, recipes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

import farspan
from farspan import cli, progress
from farspan.cells import cell_key
from farspan.errors import FarspanError
from farspan.lab import study as lab_study
from farspan.lab import study_fleets
from farspan.lab.distance import BINS, attended_distance
from farspan.lab.examples import draw_examples
from farspan.lab.fleet import Fleet
from farspan.lab.networks import ENCODINGS, NetworkShape, init_model, network_config
from farspan.lab.ranking import (
    accuracy_table,
    count_learned,
    group_entries,
    rank_encodings,
    rank_scratchpads,
    rank_table,
    reciprocal_ranks,
    scale_table,
    scratchpad_table,
    task_group,
)
from farspan.lab.scratchpad import SCRATCHPADS, parse_parts
from farspan.lab.study import (
    LabCell,
    LabStudy,
    describe_cell,
    fleet_plan,
    list_cells,
    make_task_data,
)
from farspan.lab.study_fleets import evaluate_fleet, group_fleets
from farspan.lab.task_data import TaskData, count_by_length, encode_examples
from farspan.lab.tasks import TASKS, find_task
from farspan.lab.tokenizer import WordTokenizer
from farspan.lengths import parse_length_range
from farspan.model.encodings import BUILT_IN
from farspan.workflows import lab as lab_workflow
from farspan.workflows import lab_estimate, lab_training
from farspan.workflows.attention_analysis import compare_attention, theorems
from farspan.workflows.lab import RECIPE_DIR, LabResult, dump, read_study, run, summarize
from farspan.workflows.lab_estimate import estimate
from farspan.workflows.lab_training import format_result, to_hf_tokenizer
from lab_data import hash_of_data

RECIPES = sorted(path.stem for path in RECIPE_DIR.glob("*.toml"))
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
def finished(tmp_path_factory) -> Path:
    """The folder of a small study, run once: small.toml is its recipe, out its results."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "small.toml").write_text(SMALL)
    run(str(folder / "small.toml"), [], folder / "out")
    return folder


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes longer than training the small study."""
    monkeypatch.setattr(lab_workflow.style, "save", lambda figure, stem: None)


@pytest.mark.long
def test_a_study_says_its_least_time_and_then_what_its_steps_show(
    tmp_path, no_figures, monkeypatch
):
    """The clock runs a second at every look."""
    monkeypatch.setattr(lab_estimate, "matmul_flops_per_second", lambda *args: 1e6)
    seconds = itertools.count()
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    (tmp_path / "small.toml").write_text(SMALL)
    messages: list[str] = []
    run(str(tmp_path / "small.toml"), [], tmp_path / "out", say=messages.append)
    assert re.fullmatch(r"8 models to train, at least .* for matrix products", messages[0])
    assert re.fullmatch(r"about .* in all, by the first steps", messages[1])
    assert len(messages) == 2 + 8, "each once"
    messages.clear()
    run(str(tmp_path / "small.toml"), [], tmp_path / "out", say=messages.append)
    assert not messages


def test_run_trains_every_cell_once_and_resumes(finished, no_figures):
    messages: list[str] = []
    recipe, out = str(finished / "small.toml"), finished / "out"
    study = run(recipe, [], out, say=messages.append)
    assert not messages, "all cells were finished"
    assert study.learned[1] == 8
    files = sorted((out / "cells").glob("*.json"))
    assert len(files) == 8
    before = json.loads(files[3].read_text())
    files[3].unlink()
    run(recipe, [], out, say=messages.append)
    assert len(messages) == 1
    after = json.loads(files[3].read_text())
    assert {**before["result"], "seconds": 0} == {**after["result"], "seconds": 0}, (
        "the same seed makes the same model"
    )
    wider = run(recipe, ["seeds=[0, 1, 2]"], out, say=messages.append)
    assert len(wider.entries[0].results) == 3
    assert len(messages) == 1 + 4, "a wider study trains its new cells only"


def test_run_with_save_trains_models_that_are_not_saved_yet(finished, tmp_path, no_figures):
    recipe, messages = str(finished / "small.toml"), []
    subset = ['tasks=["copy"]', 'encodings=["none"]']
    before = run(recipe, [*subset, "save=false"], tmp_path)
    assert not (tmp_path / "models").exists()
    files = {file.name for file in (tmp_path / "cells").iterdir()}
    after = run(recipe, subset, tmp_path, say=messages.append)
    assert len(messages) == len(list((tmp_path / "models").iterdir())) == 2
    assert {file.name for file in (tmp_path / "cells").iterdir()} == files, "the cells are the same"
    assert not list((tmp_path / "claims").iterdir())
    for one, other in zip(before.entries[0].results, after.entries[0].results, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    shutil.rmtree(next((tmp_path / "models").glob("copy.none.*.s1-*")))
    run(recipe, [*subset, "processes=2"], tmp_path, say=messages.append)
    assert [line.split()[0].rpartition(".")[2] for line in messages[2:]] == ["s1"], (
        "only the missing model is trained"
    )
    assert len(list((tmp_path / "models").iterdir())) == 2
    run(recipe, subset, tmp_path, say=messages.append)
    run(recipe, [*subset, "save=false"], tmp_path, say=messages.append)
    assert len(messages) == 3


def test_run_writes_record_tables_figure_and_recipe(finished):
    out = finished / "out"
    learned, _ = run(str(finished / "small.toml"), [], out).learned
    record = json.loads((out / "record.json").read_text())
    assert (record["learned"], record["models"]) == (learned, 8)
    assert {cell["encoding"] for cell in record["cells"]} == {"none", "learned"}
    cell = record["cells"][0]
    assert set(cell["in_range"]) <= {"2", "3", "4"}
    assert set(cell["beyond"]) == set(cell["scaled"]["1.3"]) == {"5", "6"}
    assert sum(total for _, total in cell["beyond"].values()) == 40
    assert len(cell["loss"]) == 4
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    assert read_study(str(out / "recipe.toml")) == read_study(str(finished / "small.toml"))
    assert "learned their task" in (out / "tables.md").read_text()


def test_summarize_reports_finished_cells_only(finished, tmp_path, no_figures):
    recipe, out = str(finished / "small.toml"), tmp_path / "out"
    with pytest.raises(FarspanError, match="out holds no results of this study; run it first"):
        summarize(recipe, [], out)
    assert not out.exists()
    (out / "cells").mkdir(parents=True)
    for file in sorted((finished / "out" / "cells").glob("*.json"))[:5]:
        (out / "cells" / file.name).write_bytes(file.read_bytes())
    assert summarize(recipe, [], out).learned[1] <= 5
    assert 0 < (count := len(json.loads((out / "record.json").read_text())["cells"])) <= 5
    messages: list[str] = []
    files = [
        out / "cells" / f"{cell_key(describe_cell(read_study(recipe), cell))}.json"
        for cell in list_cells(read_study(recipe))
    ]
    next(file for file in files if file.exists()).write_text("{")
    summarize(recipe, [], out, messages.append)
    assert len(messages) == 1
    assert ".broken" in messages[0]
    assert len(json.loads((out / "record.json").read_text())["cells"]) == count - 1


def test_saved_models_load_inspect_and_extend(finished):
    folder = next((finished / "out" / "models").glob("copy.none.*"))
    model, hf_tokenizer = farspan.load(folder)
    tokenizer, example = WordTokenizer(), draw_examples(find_task("copy"), (3, 3), 1, 0)[0]
    text = f"<begin> {example.input} <answer> {example.target} <end>"
    assert hf_tokenizer(text)["input_ids"] == tokenizer.prompt(example) + tokenizer.target(example)
    assert hf_tokenizer.decode(tokenizer.encode(example.target)) == example.target
    assert farspan.inspect(folder).train_length == model.config.max_position_embeddings
    text_file = finished / "text.txt"
    text_file.write_text(
        " ".join(json.loads(line)["input"] for line in dump("copy", 400, "2:20", 0))
    )
    extended = farspan.extend(str(folder), 24, finished / "patch", "uniform", data=str(text_file))
    assert extended.patch.scales is not None
    assert farspan.load(finished / "patch").model.config.model_type == "farspan"


@pytest.mark.long
def test_compare_attention_of_saved_models(finished, tmp_path):
    folders = sorted(str(path) for path in (finished / "out" / "models").glob("copy*"))[:2]
    comparison = compare_attention(
        folders, task="copy", lengths="2:4", windows=9, out=tmp_path / "apart"
    )
    assert comparison.pairs[0, 1].pairs.shape == (1, 2, 2)
    assert comparison.mass[0].shape[:2] == comparison.ablations[0].shape == (1, 2)
    record = json.loads((tmp_path / "apart" / "record.json").read_text())
    assert (
        record["settings"].items()
        >= {"task": "copy", "lengths": "2:4", "windows": 9, "rule": "jsd"}.items()
    )
    assert record["distances"][0]["nearest"] == comparison.pairs[0, 1].nearest.round(5).tolist()
    assert {path.name for path in (tmp_path / "apart").glob("*.png")} == {
        "distance.png",
        "heads.png",
        "attended.png",
    }
    assert comparison.attended[0].shape == (1, 2, BINS)
    assert record["heads"][0]["attended_distance"] == comparison.attended[0].round(6).tolist()
    of_mean = compare_attention(folders, task="copy", lengths="2:4", windows=9, minimum="mean")
    assert (of_mean.pairs[0, 1].nearest >= comparison.pairs[0, 1].nearest).all()
    with pytest.raises(FarspanError, match="different vocabularies"):
        compare_attention([folders[0], "nope-twin"])
    with pytest.raises(FarspanError, match="'jsb' is unknown"):
        compare_attention(folders, rule="jsb")


@pytest.mark.long
def test_compare_attention_with_one_model(finished, capsys, monkeypatch):
    folders = sorted(str(path) for path in (finished / "out" / "models").glob("copy*"))[:3]
    options = {"task": "copy", "lengths": "2:3", "windows": 2}
    comparison = compare_attention(folders, to=folders[1], **options)
    assert list(comparison.pairs) == [(0, 1), (1, 2)]
    added = compare_attention(folders[:2], to=folders[2], **options)
    assert list(added.pairs) == [(0, 2), (1, 2)]
    assert (added.pairs[1, 2].pairs == comparison.pairs[1, 2].pairs).all()
    arguments = [*folders[:2], "--to", folders[2], "--task", "copy", "--lengths", "2:3"]
    monkeypatch.setattr("sys.argv", ["farspan", "lab", "distance", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main()
    assert "mean" in capsys.readouterr().out


def test_compare_attention_reads_scratchpads(finished):
    folder = str(next((finished / "out" / "models").glob("copy.none*")))
    options = {"task": "addition", "lengths": "2:2", "windows": 3}
    plain, full = (
        compare_attention([folder], scratchpad=scratchpad, **options)
        for scratchpad in (None, "full")
    )
    rows = [
        encode_examples(
            draw_examples(find_task("addition"), (2, 2), 3, 0, scratchpad=scratchpad),
            WordTokenizer(),
        )
        for scratchpad in (None, "full")
    ]
    assert [plain.tokens, full.tokens] == [int(part.stop.sum()) for part in rows]
    model = farspan.load(folder).model
    ids = [row[:stop].long()[None] for row, stop in zip(rows[1].ids, rows[1].stop, strict=True)]
    (the,) = WordTokenizer().encode("The")  # answers begin with it, and no step has it
    starts = [(row[0] == the).nonzero()[-1] for row in ids]
    assert np.allclose(full.attended[0], attended_distance(model, ids, starts)), (
        "only queries of the answer count, without the steps"
    )
    assert not np.allclose(
        full.attended[0], attended_distance(model, ids, [start[None] for start in rows[1].start])
    )


def test_fleets_train_the_same_models_as_single_runs(finished, monkeypatch, tmp_path, no_figures):
    """A GPU trains fleets, a CPU one model after the other: the results agree."""
    single = run(str(finished / "small.toml"), ["save=false"], finished / "out")
    monkeypatch.setattr(
        lab_training,
        "group_fleets",
        lambda study, cells, max_models: group_fleets(study, cells, 64),
    )
    sizes = []
    make_fleet = lab_training.make_fleet

    def counting_make_fleet(study, cells, *arguments):
        sizes.append(len(cells))
        return make_fleet(study, cells, *arguments)

    monkeypatch.setattr(lab_training, "make_fleet", counting_make_fleet)
    stacked = run(str(finished / "small.toml"), ["save=false"], tmp_path)
    assert sizes == [4, 2, 2], "learned positions have as many rows as their task needs"
    for one, other in zip(single.entries, stacked.entries, strict=True):
        for left, right in zip(one.results, other.results, strict=True):
            assert np.allclose(left["loss"], right["loss"], atol=1e-3)


def assert_equal_results(one: LabResult, other: LabResult) -> None:
    for left_entry, right_entry in zip(one.entries, other.entries, strict=True):
        for left, right in zip(left_entry.results, right_entry.results, strict=True):
            assert np.allclose(left["loss"], right["loss"], atol=1e-5)
            assert left["beyond"] == right["beyond"]


def test_workers_train_the_same_models(finished, tmp_path, monkeypatch, no_figures):
    single = run(str(finished / "small.toml"), ["save=false"], finished / "out")
    study = read_study(str(finished / "small.toml"), ["save=false"])
    monkeypatch.setattr(lab_training, "end_with_parent", lambda: None)  # this is no worker process
    lab_training._work_on_study(study, tmp_path, "cpu")
    monkeypatch.setattr(lab_training, "train_fleet", None)  # nothing is left to train
    shared = run(str(finished / "small.toml"), ["save=false", "processes=2"], tmp_path)
    assert_equal_results(single, shared)


@pytest.mark.long
def test_worker_processes_train_the_same_models(finished, tmp_path):
    single = run(str(finished / "small.toml"), ["save=false"], finished / "out")
    shared = run(str(finished / "small.toml"), ["save=false", "processes=3"], tmp_path)
    assert_equal_results(single, shared)


def test_fleets_hold_one_network_and_rows_of_similar_length():
    study = LabStudy(tasks=("copy", "parity", "scan", "pcfg"), steps={"scan": 9})
    fleets = group_fleets(study, list_cells(study), 5)
    assert sorted(cell.name for fleet in fleets for cell in fleet) == sorted(
        cell.name for cell in list_cells(study)
    )
    for fleet in fleets:
        assert len(fleet) <= 5
        assert len({(cell.encoding, cell.size, fleet_plan(study, cell)) for cell in fleet}) == 1
    assert all(
        len({cell.task for cell in fleet}) == 1 for fleet in fleets if fleet[0].task == "scan"
    )
    assert not any({"parity", "pcfg"} <= {cell.task for cell in fleet} for fleet in fleets), (
        "pcfg is much longer"
    )


@pytest.mark.parametrize("large", [{"width": 512}, {"layers": 24}])
def test_longest_running_fleets_come_first(large):
    sizes = {"small": NetworkShape(), "large": NetworkShape(**large)}
    study = LabStudy(
        tasks=("parity", "copy", "pcfg"), steps={"parity": 25_000}, encodings=("none",), sizes=sizes
    )
    order = [(cell.size, cell.task) for cell, *_ in group_fleets(study, list_cells(study), 3)]
    assert order == [
        (size, task) for size in ("large", "small") for task in ("parity", "pcfg", "copy")
    ]


def test_with_dropout_every_fleet_has_one_model():
    sizes = {"without": NetworkShape(), "with": NetworkShape(dropout=0.1)}
    study = LabStudy(tasks=("copy", "reverse"), sizes=sizes)
    fleets = group_fleets(study, list_cells(study), 5)
    assert all(len(fleet) == 1 for fleet in fleets if fleet[0].size == "with")
    assert any(len(fleet) > 1 for fleet in fleets if fleet[0].size == "without")


def test_tasks_and_sizes_multiply_learning_rates():
    sizes = {"small": NetworkShape(), "large": NetworkShape(rate=0.5)}
    study = LabStudy(
        tasks=("copy", "parity"), lrs=(1e-3, 2e-3), rates={"parity": 0.25}, sizes=sizes
    )
    rates = {(cell.task, cell.size): set() for cell in list_cells(study)}
    for cell in list_cells(study):
        rates[cell.task, cell.size].add(cell.lr)
    assert rates == {
        ("copy", "small"): {1e-3, 2e-3},
        ("copy", "large"): {5e-4, 1e-3},
        ("parity", "small"): {2.5e-4, 5e-4},
        ("parity", "large"): {1.25e-4, 2.5e-4},
    }


def test_rows_are_prompt_then_target_then_padding():
    tokenizer, task = WordTokenizer(), find_task("addition")
    examples = draw_examples(task, (1, 4), 20, 0)
    rows = encode_examples(examples, tokenizer)
    for example, ids, start, stop in zip(examples, rows.ids, rows.start, rows.stop, strict=True):
        assert tokenizer.decode(ids[:start].tolist()) == example.input
        assert tokenizer.decode(ids[start:stop].tolist()) == example.target
        assert ids[stop - 1] == tokenizer.end
        assert (ids[stop:] == tokenizer.pad).all()


@pytest.mark.parametrize(
    ("task", "scratchpad", "even", "sha256"),
    [
        ("copy", "none", True, "06583e0100d3ac43"),
        ("addition", "full", False, "5f247aa93d215b08"),
        ("scan", "none", False, "f307f90ace300fb9"),
    ],
)
def test_the_data_of_a_study_keep_every_bit(task, scratchpad, even, sha256):
    study = LabStudy((task,), train_examples=300, test_examples=40, even_lengths=even)
    data = make_task_data(study, task, scratchpad)
    assert hash_of_data(data) == sha256


def test_train_and_test_rows_are_disjoint():
    study = replace(read_study("lab-tiny"), train_examples=500, test_examples=100)
    data = make_task_data(study, "copy", "none")
    trained = {
        tuple(row[:stop].tolist())
        for row, stop in zip(data.train.ids, data.train.stop, strict=True)
    }
    for rows in (data.held_out, data.beyond):
        assert not trained & {
            tuple(row[:stop].tolist()) for row, stop in zip(rows.ids, rows.stop, strict=True)
        }
    assert data.held_out_lengths.max() < data.beyond_lengths.min()


def test_training_rows_are_balanced_by_length():
    study = replace(read_study("lab-tiny"), train_examples=500)
    train = make_task_data(study, "parity", "none").train
    lengths, counts = torch.unique(train.start, return_counts=True)
    assert len(lengths) == 8
    assert set(counts.tolist()) == {int(2**8 * 0.9) + 1}, (
        "as many as the longest length has; short rows are repeated"
    )
    assert len({tuple(row.tolist()) for row in train.ids[train.start == lengths[0]]}) == 2


def test_training_rows_are_as_frequent_as_in_the_released_data():
    study = replace(read_study("lab-tiny"), train_examples=640, even_lengths=False)
    train = make_task_data(study, "addition", "none").train
    tokenizer, counts = WordTokenizer(), Counter()
    for ids, start in zip(train.ids, train.start, strict=True):
        operands = tokenizer.decode(ids[:start].tolist())[len("Compute ") : -2].split(" + ")
        counts[max(len(operand.split()) for operand in operands)] += 1
    total = sum(counts.values())
    for length in range(1, 9):
        assert counts[length] / total == pytest.approx((2 * length - 1) / 64, abs=0.01)


@pytest.mark.parametrize("encoding", ["none", "t5"])
def test_initial_logits_do_not_depend_on_base_scale(encoding):
    tokenizer, ids = WordTokenizer(), torch.arange(12)[None]
    default, unscaled = (
        init_model(
            network_config(
                NetworkShape(2, 32, 2, 64, base_scale=scale), encoding, tokenizer, 12, 12
            ),
            0,
            False,
        ).eval()
        for scale in (0.0, 1.0)
    )
    with torch.no_grad():
        assert torch.equal(default(ids).logits, unscaled(ids).logits), (
            "a factor of 1/√16 is exact in floating point"
        )


def test_paper_network_is_initialized_like_t5():
    """Standard deviations of 1/√inputs; those of queries are also divided by √(head width)."""
    ((_, shape),) = read_study("lab-paper", ["sizes.base.layers=1"]).sizes.items()
    model = init_model(network_config(shape, "none", WordTokenizer(), 8, 8), 0, shape.zero_outputs)
    expected = {
        "q_proj": (768 * 64) ** -0.5,
        "k_proj": 768**-0.5,
        "v_proj": 768**-0.5,
        "o_proj": 768**-0.5,
        "up_proj": 768**-0.5,
        "down_proj": 3072**-0.5,
    }
    deviations = {
        name.split(".")[-2]: float(weight.data.std())
        for name, weight in model.named_parameters()
        if "_proj" in name
    }
    assert deviations == pytest.approx(expected, rel=0.02)


def test_embeddings_are_as_large_as_the_positions_added_to_them():
    """Their deviation is 1; sinusoids are at most 1. Only one encoding rotates a part of a head."""
    for encoding in ENCODINGS:
        config = network_config(NetworkShape(1, 64, 4, 8), encoding, WordTokenizer(), 8, 16)
        assert config.initializer_range == 1 / 8
        assert config.initializer_range * config.embedding_scale == 1
        assert config.rotary_fraction == (0.25 if encoding == "rotary-quarter" else 1)


def test_right_answers_are_counted_by_their_length():
    correct = np.array([True, False, True, True])
    counts = count_by_length(correct, np.array([5, 5, 3, 5]))
    assert counts == {"3": [1, 1], "5": [2, 3]}


def test_every_other_held_out_example_chooses_the_learning_rate(monkeypatch):
    """The others are the reported ones; examples beyond the train lengths choose nothing."""
    inside = np.array([True, False, True, False, False, True, True, False])
    answers = {"held out": [inside], "beyond": [np.array([True, False])]}
    monkeypatch.setattr(study_fleets, "exact_match", lambda fleet, rows: answers[rows[0]])
    lengths = (np.arange(8) // 4, np.array([9, 9]))
    data = TaskData("train", "held out", "beyond", *lengths)
    (result,) = evaluate_fleet(None, [data], [])
    assert result == {
        "chosen_by": 3 / 4,
        "in_range": {"0": [0, 2], "1": [1, 2]},
        "beyond": {"9": [1, 2]},
        "scaled": {},
    }


def test_two_held_out_examples_are_enough():
    """One chooses the learning rate, the other one is scored."""
    study = replace(read_study("lab-tiny"), train_examples=20, test_examples=2)
    assert len(make_task_data(study, "copy", "none").held_out) == 2


@pytest.mark.long
def test_theorems_writes_proofs_and_readings(tmp_path):
    analysis = theorems(["nope-twin"], length=64, windows=4, out=tmp_path / "positions")
    for proof in analysis.proofs:
        assert proof.position_error < 1e-6
        assert proof.score_error < 1e-6
    readouts = analysis.readings["nope-twin"]
    assert max(readout.r2 for readout in readouts[1:]) > 0.5 > readouts[0].r2, (
        "layers know positions, embeddings do not"
    )
    record = json.loads((tmp_path / "positions" / "record.json").read_text())
    assert len(record["readings"]["nope-twin"]) == len(readouts)
    assert (tmp_path / "positions" / "theorems.png").exists()


def test_theorems_take_the_name_of_a_folder(tmp_path):
    theorems(length=16, out=str(tmp_path / "proofs"))
    assert (tmp_path / "proofs" / "record.json").exists()


def test_theorems_as_json_have_errors_and_readings(monkeypatch, capsys):
    """Without a model, the theorems alone: positions and distances to rounding."""
    monkeypatch.setattr(sys, "argv", ["farspan", "lab", "theorems", "--length", "16", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["readings"] == {}
    assert len(printed["proofs"]) > 1
    for proof in printed["proofs"]:
        assert proof.keys() == {"rule", "position_error", "score_error"}
        assert max(proof["position_error"], proof["score_error"]) < 1e-6


# Ranks.


def result(in_range: float, beyond: float, chosen_by: float = 1.0) -> dict:
    return {
        "in_range": {"2": [round(1000 * in_range), 1000]},
        "beyond": {"3": [round(1000 * beyond), 1000]},
        "chosen_by": chosen_by,
        "scaled": {"1.2": {"3": [500, 1000]}},
        "loss": [1.0, 0.1],
    }


def cell(
    task: str, encoding: str, seed: int = 0, lr: float = 1e-3, scratchpad: str = "none"
) -> LabCell:
    return LabCell(task, encoding, "small", scratchpad, lr, seed)


def test_models_that_did_not_learn_have_no_rank():
    entries = group_entries(
        {
            cell("copy", "none"): result(1.0, 0.5),
            cell("copy", "none", 1): result(0.94, 1.0),
            cell("copy", "t5"): result(0.95, 0.4),
            cell("copy", "alibi"): result(0.5, 0.9),
            cell("scan", "none"): result(1.0, 0.1),
            cell("scan", "t5"): result(1.0, 0.2),
        }
    )
    assert count_learned(entries) == (4, 6)
    assert [(rank.encoding, rank.reciprocal, rank.tasks) for rank in rank_encodings(entries)] == [
        ("none", 0.75, 2),
        ("t5", 0.75, 2),
    ]
    header, rows = accuracy_table(entries)
    assert header == ["task", "none", "t5", "alibi"]
    assert rows[0] == ["copy", "0.500 (1 of 2)", "0.400", "not learned (0.50)"]
    assert rank_table(entries) == (
        ["size", "scratchpad", "tasks", "models", "none", "t5", "alibi"],
        [
            ["small", "none", "primitive", "learned", "1.000 (1)", "0.500 (1)", ""],
            ["small", "none", "primitive", "all", "0.500 (1)", "0.333 (1)", "1.000 (1)"],
            ["small", "none", "primitive", "all, by seed", "0.750 (1)", "0.333 (1)", "1.000 (1)"],
            ["small", "none", "classical", "learned", "0.500 (1)", "1.000 (1)", ""],
            ["small", "none", "classical", "all", "0.500 (1)", "1.000 (1)", ""],
            ["small", "none", "classical", "all, by seed", "0.500 (1)", "1.000 (1)", ""],
            ["small", "none", "all", "learned", "0.750 (2)", "0.750 (2)", ""],
            ["small", "none", "all", "all", "0.500 (2)", "0.667 (2)", "1.000 (1)"],
            ["small", "none", "all", "all, by seed", "0.667 (2)", "0.667 (2)", "1.000 (1)"],
        ],
    )
    assert scale_table(entries)[1] == [["1", "0.300", "0.300", ""], ["1.2", "0.500", "0.500", ""]]


def test_tasks_are_grouped_as_in_the_paper():
    groups = {"copy": "primitive", "lego": "reasoning", "pcfg": "classical", "copy-next": "own"}
    assert {task: task_group(task) for task in groups} == groups
    assert task_group("a-task-of-a-user") == "own"


def test_ranks_of_the_recorded_grid_equal_an_independent_computation():
    """SciPy ranks the recorded models; ties of three decimals do not occur in the means."""
    lines = (Path(__file__).parent.parent / "docs" / "records" / "lab-grid.jsonl").read_text()
    records = [json.loads(line) for line in lines.splitlines()]
    entries = group_entries(
        {cell(record["task"], record["encoding"], record["seed"]): record for record in records}
    )

    def exact_match(counts: dict) -> float:
        return sum(correct for correct, _ in counts.values()) / sum(n for _, n in counts.values())

    encodings = list(dict.fromkeys(record["encoding"] for record in records))
    for learned_only in (True, False):
        ranks: dict[str, list[float]] = {encoding: [] for encoding in encodings}
        for task in dict.fromkeys(record["task"] for record in records):
            scores: dict[str, list[float]] = {}
            for record in records:
                learned = exact_match(record["in_range"]) >= 0.95
                if record["task"] == task and (learned or not learned_only):
                    scores.setdefault(record["encoding"], []).append(exact_match(record["beyond"]))
            means = [-np.mean(values).round(6) for values in scores.values()]
            low, high = (rankdata(means, method).astype(int) for method in ("min", "max"))
            for encoding, first, last in zip(scores, low, high, strict=True):
                ranks[encoding].append(np.mean([1 / rank for rank in range(first, last + 1)]))
        expected = {encoding: np.mean(values) for encoding, values in ranks.items()}
        ours = rank_encodings(entries, learned_only=learned_only)
        assert {rank.encoding: rank.reciprocal for rank in ours} == pytest.approx(expected)
        best_first = sorted(expected.values(), reverse=True)
        assert [rank.reciprocal for rank in ours] == pytest.approx(best_first)


def test_scratchpads_are_ranked_within_each_task_and_encoding():
    entries = group_entries(
        {
            cell("addition", "none", scratchpad="none"): result(0.9, 0.9),
            cell("addition", "none", scratchpad="full"): result(1.0, 0.3),
            cell("addition", "none", scratchpad="co"): result(1.0, 0.5),
            cell("addition", "t5", scratchpad="none"): result(1.0, 0.1),
            cell("addition", "t5", scratchpad="full"): result(1.0, 0.4),
            cell("sorting", "t5", scratchpad="full"): result(1.0, 0.4),
        }
    )
    assert rank_scratchpads(entries) == {
        "addition": {"full": 0.75, "co": 1.0, "none": 0.5},
        "sorting": {"full": 1.0},
    }
    assert rank_scratchpads(entries, learned_only=False)["addition"] == pytest.approx(
        {"none": 0.75, "co": 0.5, "full": (1 / 3 + 1) / 2}
    )
    assert scratchpad_table(entries) == (
        ["task", "encoding", "models", "none", "full", "co"],
        [
            ["addition", "all", "learned", "0.500", "0.750", "1.000"],
            ["addition", "all", "all", "0.750", "0.667", "0.500"],
            ["sorting", "all", "learned", "", "1.000", ""],
            ["sorting", "all", "all", "", "1.000", ""],
            ["all", "none", "learned", "", "0.500", "1.000"],
            ["all", "none", "all", "1.000", "0.333", "0.500"],
            ["all", "t5", "learned", "0.500", "1.000", ""],
            ["all", "t5", "all", "0.500", "1.000", ""],
            ["all", "all", "learned", "0.500", "0.875", "1.000"],
            ["all", "all", "all", "0.750", "0.833", "0.500"],
        ],
    )
    one = [entry for entry in entries if entry.encoding == "t5"]
    groups = [row[:2] for row in scratchpad_table(one)[1][::2]]
    assert groups == [["addition", "all"], ["sorting", "all"], ["all", "all"]], "none comes twice"


def test_table_columns_do_not_depend_on_result_order():
    results = {cell("copy", "alibi"): result(1.0, 0.5), cell("scan", "none"): result(1.0, 0.4)}
    for table in (accuracy_table, rank_table, scale_table):
        assert table(group_entries(results))[0][-2:] == ["none", "alibi"]


def test_tables_have_a_column_for_what_differs():
    sizes = {
        replace(cell("copy", "none"), size=size): result(1.0, 0.5) for size in ("big", "small")
    }
    assert accuracy_table(group_entries(sizes))[0] == ["task", "size", "none"]
    formats = {cell("parity", "none", scratchpad=pad): result(1.0, 0.5) for pad in ("none", "full")}
    assert accuracy_table(group_entries(formats))[0] == ["task", "scratchpad", "none"]
    assert accuracy_table(group_entries(sizes | formats))[0][:3] == ["task", "size", "scratchpad"]


def test_seeds_are_ranked_by_themselves_if_there_are_several():
    one = {cell("copy", "none"): result(1.0, 0.5)}
    for results, models in (
        (one, ["learned", "all"]),
        (one | {cell("copy", "none", 1): result(1.0, 0.5)}, ["learned", "all", "all, by seed"]),
    ):
        assert [row[3] for row in rank_table(group_entries(results))[1]] == models


def test_diverged_models_are_reported():
    diverged = result(0.0, 0.0) | {"loss": [2.0, 1.5, None]}
    entries = group_entries({cell("copy", "none"): diverged, cell("copy", "t5"): result(0.1, 0.0)})
    assert accuracy_table(entries)[1] == [["copy", "diverged", "not learned (0.10)"]]
    assert "diverged" in format_result(cell("copy", "none"), diverged | {"seconds": 1.0})


def test_ties_share_their_mean_reciprocal_rank():
    assert reciprocal_ranks({"a": 0.9, "b": 0.5, "c": 0.5}) == pytest.approx(
        {"a": 1, "b": 5 / 12, "c": 5 / 12}
    )
    tied = reciprocal_ranks(dict.fromkeys("abcde", 0.0))
    assert tied == pytest.approx(dict.fromkeys("abcde", sum(1 / n for n in range(1, 6)) / 5))


def test_held_out_half_chooses_the_learning_rate():
    entries = group_entries(
        {
            cell("copy", "none", lr=1e-3): result(0.99, 0.9, chosen_by=0.97),
            cell("copy", "none", lr=1e-2): result(0.98, 0.1, chosen_by=0.99),
        }
    )
    assert [(entry.lr, entry.beyond) for entry in entries] == [(1e-2, [0.1])]


def test_curves_cover_train_and_test_lengths():
    (entry,) = group_entries(
        {cell("copy", "none"): result(1.0, 0.5), cell("copy", "none", 1): result(1.0, 0.7)}
    )
    lengths, scores = entry.curve()
    assert lengths.tolist() == [2, 3]
    assert scores.tolist() == [[1.0, 0.5], [1.0, 0.7]]


def test_cell_description_has_all_that_results_depend_on():
    study = read_study("lab-tiny")
    first = list_cells(study)[0]
    for override in (
        "train.steps=7",
        "scales=[1.1]",
        "data_seed=3",
        "even_lengths=false",
        'test_lengths.copy="9:10"',
        "sizes.tiny.width=32",
    ):
        other = read_study("lab-tiny", [override])
        assert describe_cell(other, first) != describe_cell(study, first), override
    assert describe_cell(read_study("lab-tiny", ["save=true", "fleet=3"]), first) == describe_cell(
        study, first
    )


# Recipes and commands.


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_distinct_cells(name):
    study = read_study(name)
    assert len({cell.name for cell in list_cells(study)}) == len(list_cells(study))


def test_recipes_match_the_paper():
    names = ["tiny", "quick", "grid", "attention", "hard", "scratchpad", "scale", "paper"]
    names.append("encodings")
    assert {f"lab-{name}" for name in names} == set(RECIPES)
    grid, pads, scale, paper = (
        read_study(f"lab-{name}") for name in ("grid", "scratchpad", "scale", "paper")
    )
    assert set(grid.encodings) == {"none", "t5", "alibi", "rotary", "sinusoidal"}
    assert len(grid.seeds) == 3
    later = read_study("lab-encodings")
    assert set(later.encodings) == set(BUILT_IN)
    assert replace(later, encodings=grid.encodings) == grid
    released = {name for name, task in TASKS.items() if task.group}
    assert set(grid.tasks) == set(paper.tasks) == released
    assert not paper.even_lengths
    assert grid.even_lengths
    assert set(pads.tasks) == set(SCRATCHPADS)
    assert (len(pads.encodings), len(pads.seeds)) == (5, 3)
    for task in pads.tasks:  # all parts, computation and output, and all but one part
        parts = SCRATCHPADS[task].parts
        without_one = {parts.replace(part, "") for part in parts}
        written = {parse_parts(name, task) for name in pads.formats(task)}
        assert written == {"", parts, "co"} | without_one
    assert len(scale.tasks) >= 2
    assert len(scale.sizes) == 3
    (shape,) = paper.sizes.values()
    assert (shape.layers, shape.heads, shape.width, shape.ff, shape.mlp) == (
        12,
        12,
        768,
        3072,
        "relu",
    )
    assert (shape.dropout, shape.base_scale) == (0.1, 1.0)
    assert (paper.train.steps, paper.train.batch, paper.lrs, paper.train.weight_decay) == (
        40_000,
        64,
        (3e-5,),
        0.05,
    )
    assert paper.steps["pcfg"] == 100_000
    assert paper.train.lr_factor(2399) == 1.0
    assert paper.train.lr_factor(21_200) == pytest.approx(0.5)


def test_studies_write_each_format_of_a_task_once():
    study = LabStudy(("sorting", "addition"), scratchpads=("full", "icovr", "icor", "iv", "none"))
    assert study.formats("sorting") == ["full", "i", "none"]
    assert study.formats("addition") == ["full", "icor", "iv", "none"]
    assert len(list_cells(study)) == (3 + 4) * 5 * 3


def test_estimate_counts_parameters_models_and_tokens():
    estimates = estimate(read_study("lab-paper", ['tasks=["copy"]']))
    by_encoding = {network.encoding: network for network in estimates}
    none, t5 = by_encoding["none"], by_encoding["t5"]
    assert 85_000_000 < none.parameters < 110_000_000
    assert none.models == 3
    assert none.tokens > 3 * 40_000 * 64 * 10
    assert t5.parameters == none.parameters + 32 * 12, "all layers share one table"


# Worker processes.

PARENT_AND_WORKER = """
import os, pathlib, sys, time
from multiprocessing import get_context
from farspan.signals import end_with_parent

def work(file):
    end_with_parent()
    pathlib.Path(file).write_text(str(os.getpid()))
    time.sleep(60)

if __name__ == "__main__":
    get_context("spawn").Process(target=work, args=(sys.argv[1],)).start()
    time.sleep(60)
"""


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(value)


def assert_ends(pid: int) -> None:
    if not wait_for(lambda: not Path(f"/proc/{pid}").exists(), 10):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the worker kept running")


@pytest.mark.long
def test_workers_end_when_their_parent_is_killed(tmp_path, monkeypatch):
    script, file = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(PARENT_AND_WORKER)
    parent = subprocess.Popen([sys.executable, str(script), str(file)])
    assert wait_for(lambda: file.exists() and file.read_text(), 60)
    parent.kill()
    parent.wait()
    assert_ends(int(file.read_text()))

    calls = []
    monkeypatch.setattr(lab_training, "end_with_parent", lambda: calls.append("end_with_parent"))
    monkeypatch.setattr(lab_training, "make_runner", lambda *study: calls.append("train") or Mock())
    lab_training._work_on_study(read_study("lab-tiny"), tmp_path, "cpu")
    assert calls == ["end_with_parent", "train"], "a worker of a study watches its parent first"


def spawned_by(pid: int) -> list[int]:
    """The processes that multiprocessing started for another, read from /proc."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has just ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                children.append(int(folder.name))
    return children


@pytest.mark.long
def test_workers_of_a_killed_run_end(tmp_path):
    options = ["train.steps=100000", "train_examples=200", "-o", str(tmp_path / "out")]
    parent = subprocess.Popen(
        [sys.executable, "-m", "farspan", "lab", "run", "lab-tiny", *options],
        stdout=subprocess.DEVNULL,
    )
    claims = tmp_path / "out" / "claims"
    try:
        both = wait_for(lambda: len(list(claims.glob("[0-9a-f]*"))) == 2, 240)
        assert both, "both processes train"
        (worker,) = spawned_by(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    assert_ends(worker)


# Invalid usage.


def error_of(capsys, monkeypatch, *arguments: str) -> str:
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
    ("arguments", "message"),
    [
        (["run", "lab-tinny"], "did you mean lab-tiny"),
        (["run", "lab-tiny", 'tasks=["coppy"]'], "'coppy' is unknown; did you mean copy"),
        (["run", "lab-tiny", 'encodings=["rotery"]'], "'rotery' is unknown; did you mean rotary"),
        (["run", "lab-tiny", 'train_lengths.copy="8:2"'], "'8:2' is not a range of lengths"),
        (["run", "lab-tiny", 'train_lengths.copi="2:8"'], "'copi' is unknown; did you mean copy"),
        (["run", "lab-tiny", "rates.copi=0.5"], "'copi' is unknown; did you mean copy"),
        (
            ["run", "lab-tiny", "rates.copy=0.0"],
            "rates.copy is 0, which multiplies lrs; set it to a number above 0",
        ),
        (
            ["run", "lab-tiny", 'test_lengths.scan="60:70"'],
            "scan has no example of 60 to 70 actions",
        ),
        (
            ["run", "lab-tiny", 'test_lengths.pcfg="33:34"', "even_lengths=false"],
            "the released data of pcfg have no example of 33 to 34 functions",
        ),
        (["run", "lab-tiny", 'scratchpads=["full"]'], "copy"),
        (["run", "lab-tiny", 'tasks=["sorting"]', 'scratchpads=["v"]'], "has no variables part"),
        (["run", "lab-tiny", 'tasks=["sorting"]', 'scratchpads=["iv"]'], "has no variables part"),
        (["run", "lab-tiny", "seeds=[]"], "seeds is empty"),
        (["run", "lab-tiny", "seeds=[0, 0]"], "seeds has duplicates: [0, 0]"),
        (["run", "lab-tiny", "seeds=[-1]"], "seeds names -1; choose seeds from 0 to"),
        (["run", "lab-tiny", f"seeds=[{2**63}]"], f"choose seeds from 0 to {2**63 - 1}"),
        (["run", "lab-tiny", "scales=[-1.0]"], "scale -1 is not above 0"),
        (["run", "lab-tiny", "fleet=0"], "fleet is 0; set it to 1 or more"),
        (
            ["run", "lab-tiny", "--device", "cuba"],
            "device 'cuba' cannot be used (unknown to torch)",
        ),
        (["run", "lab-tiny", "--dry-run", "--device", "cuba"], "device 'cuba' cannot be used"),
        (
            ["run", "lab-tiny", "-o", str(Path(__file__).parent)],
            "tests exists and is not a results folder",
        ),
        (["run", "lab-tiny", "train.buckets=3"], "a batch of 64 examples"),
        (["run", "lab-tiny", "train.warmup=2"], "warmup is 2; set it to a fraction from 0 to 1"),
        (["run", "lab-tiny", "train.beta2=1"], "beta2 is 1; set it to a fraction"),
        (["run", "lab-tiny", "train.clip=-1"], "clip is -1; set it to 0 or more"),
        (["run", "lab-tiny", "train.matrix_rate=0"], "matrix_rate is 0; set it above 0"),
        (["run", "lab-tiny", "train.weight_decay=-1"], "weight_decay is -1; set it to 0 or more"),
        (["run", "lab-tiny", "lrs=[0.0]"], "lrs are [0.0]; choose learning rates above 0"),
        (
            ["run", "lab-tiny", "sizes.tiny.dropout=1.5"],
            "sizes.tiny.dropout is 1.5; set it to a fraction",
        ),
        (["run", "lab-tiny", "sizes.tiny.heads=3"], "width 64, which 3 heads do not divide"),
        (["run", "lab-tiny", "sizes.tiny.base_scale=-1.0"], "base_scale -1 and rate 1"),
        (["run", "lab-tiny", "test_examples=1"], "test_examples is 1; set it to 2 or more"),
        (["dump", "copy", "--lengths", "2-20"], "'2-20' is not a range of lengths"),
        (
            ["dump", "copy", "--lengths", "1:1000000000"],
            "length 1000000000 is too long for the lab; choose at most 10000",
        ),
        (["dump", "addition", "--scratchpad", ""], "scratchpad"),
        (
            ["distance", "nope-twin", "rope-twin", "--task", "copy"],
            "nope-twin has a vocabulary of 4096 tokens, but the tasks have",
        ),
        (["dump", "copy", "--n", "0"], "0 examples"),
        (["dump", "lego", "--lengths", "30:40"], "30"),
    ],
)
def test_invalid_usage_is_one_sentence(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, monkeypatch, *arguments)
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    ("encodings", "shape", "message"),
    [
        (
            ["none", "sinusoidal"],
            NetworkShape(width=33, heads=3),
            "cannot be built with sinusoidal: .*hidden_size is 33",
        ),
        (
            ["rotary"],
            NetworkShape(width=33, heads=3),
            "sizes.odd cannot be built with rotary: rotation needs pairs",
        ),
        (
            ["none"],
            NetworkShape(mlp="gelu"),
            "sizes.odd cannot be built with none: mlp 'gelu' is unknown",
        ),
    ],
)
def test_study_refuses_networks_that_cannot_be_built(encodings, shape, message):
    with pytest.raises(FarspanError, match=message):
        LabStudy(("copy",), tuple(encodings), sizes={"odd": shape})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scales": (0.0,)}, "scale 0 is not above 0"),
        ({"sizes": {"tiny": NetworkShape(rate=0.0)}}, "rate 0; set rate above 0"),
    ],
)
def test_study_refuses_scales_and_rates_of_0(settings, message):
    with pytest.raises(FarspanError, match=message):
        replace(read_study("lab-tiny"), **settings)


def test_cell_keys_depend_on_the_vocabulary(monkeypatch):
    study = LabStudy(("copy",))
    before = describe_cell(study, list_cells(study)[0])
    monkeypatch.setattr(lab_study, "_vocabulary_hash", lambda words: "other")
    assert cell_key(describe_cell(study, list_cells(study)[0])) != cell_key(before)


def test_overlapping_test_lengths_are_warned_of(caplog, tmp_path, no_figures):
    study = replace(
        read_study("lab-tiny", ['test_lengths.copy="4:6"']), train_examples=100, test_examples=20
    )
    make_task_data(study, "copy", "none")
    assert "not all longer" in caplog.text
    results = {cell("copy", "none"): result(1.0, 0.5)}
    (title, *_) = lab_workflow._write_results(study, results, tmp_path).tables
    assert title == "Exact match at unseen lengths (for copy also at train lengths)"
    assert title in (tmp_path / "tables.md").read_text()


def test_dump_prints_json_lines(capsys, monkeypatch):
    arguments = ["addition", "--n", "5", "--lengths", "2:3", "--seed", "1"]
    monkeypatch.setattr("sys.argv", ["farspan", "lab", "dump", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 5
    for line in lines:
        assert set(line) == {"input", "target", "length"}
        first, second = (
            line["input"].removeprefix("Compute ").removesuffix(" ?").replace(" ", "").split("+")
        )
        assert line["target"].replace(" ", "") == f"Theansweris{int(first) + int(second)}."
        assert max(len(first), len(second)) == line["length"]
        assert 2 <= line["length"] <= 3


def test_length_ranges_include_both_ends():
    assert parse_length_range("2:20") == (2, 20)
    assert parse_length_range("7") == (7, 7)


def test_unknown_words_become_padding():
    assert to_hf_tokenizer(WordTokenizer())("nonsense Copy")["input_ids"] == [
        WordTokenizer.pad,
        WordTokenizer().encode("Copy")[0],
    ]


@pytest.mark.long
def test_lab_tiny_learns_its_task(tmp_path):
    """One encoding of its three, which each take 40 seconds of two cores."""
    study = run("lab-tiny", ['encodings=["none"]'], tmp_path)
    assert study.learned[0] == study.learned[1] == 1
    assert study.plot().axes[0].get_title(loc="left") == "copy"


def test_saved_weights_reproduce_the_recorded_scores(finished):
    study = read_study(str(finished / "small.toml"))
    record = json.loads((finished / "out" / "record.json").read_text())
    recorded = next(
        cell for cell in record["cells"] if cell["task"] == "reverse" and cell["encoding"] == "none"
    )
    keys = ("task", "encoding", "size", "scratchpad", "lr", "seed")
    name = LabCell(*(recorded[key] for key in keys)).name
    model, _ = farspan.load(next((finished / "out" / "models").glob(f"{name}-*")))
    data = make_task_data(study, "reverse", "none")
    with torch.no_grad():
        (scores,) = evaluate_fleet(Fleet([model]), [data], study.scales)
    assert scores["beyond"] == recorded["beyond"]
    assert scores["scaled"] == recorded["scaled"]
