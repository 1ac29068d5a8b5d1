"""`farspan compare`: one table of results, with differences on the same samples."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from farspan.cli import app
from farspan.errors import CorruptError, FarspanError
from farspan.evals.engine import Generated
from farspan.evals.needle import Needle
from farspan.evals.nonliteral import NonLiteral
from farspan.evals.pairs import PairedDifference, paired_differences
from farspan.evals.passkey import Passkey
from farspan.evals.perplexity import Perplexity, Text
from farspan.evals.results import EvalResult
from farspan.evals.ruler import Ruler
from farspan.evals.scores import Score, bootstrap, matching_score
from farspan.loading import load
from farspan.report import comparison
from farspan.report.comparison import ComparedScore
from farspan.workflows.compare import compare
from farspan.workflows.evaluate import _write, evaluate


def needles(hits: list[int], length: int = 256, tasks=("single", "multi-key")) -> list[dict]:
    return [
        {
            "eval": "needle",
            "task": task,
            "length": length,
            "haystack": "filler",
            "id": number,
            "question": "The magic number is:",
            "answers": [str(1000 + number)],
            "prediction": "",
            "score": float(hit),
        }
        for task in tasks
        for number, hit in enumerate(hits)
    ]


def passkeys(hits: list[int]) -> list[dict]:
    sample = {"eval": "passkey", "task": "passkey", "length": 256, "depth": 0.5, "said": ""}
    return [{**sample, "key": 11 * number, "hit": bool(hit)} for number, hit in enumerate(hits)]


SUITES = {"needle": Needle, "nonliteral": NonLiteral, "passkey": Passkey}


def results(folder, samples: list[dict], model: str = "model", baseline: list[dict] | None = None):
    """A results folder as `farspan eval` writes it."""
    (folder / "cells").mkdir(parents=True)
    measured = {model: [samples]} | ({"base": [baseline]} if baseline else {})
    scores = {
        name: tuple(SUITES[group[0]["eval"]]((256,)).score(group))
        for name, (group,) in measured.items()
    }
    result = EvalResult(
        model,
        samples[0]["eval"],
        scores[model],
        folder,
        "base" if baseline else None,
        scores.get("base", ()),
    )
    _write(result, measured, {"seed": 0})
    return folder


@pytest.fixture
def runs(tmp_path):
    first = results(tmp_path / "rope", needles([1, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
    second = results(tmp_path / "yarn", needles([1, 1, 1, 1, 1, 1, 1, 1, 1, 0]))
    return [first, second]


def test_differences_are_those_of_the_same_samples(runs, tmp_path):
    result = compare(runs, tmp_path / "table.md")
    (change,) = (
        score.difference
        for score in result.scores
        if (score.run, score.task, score.metric) == ("yarn", "single", "recall")
    )
    assert change.value == pytest.approx(0.8)
    assert 0.3 < change.low < 0.4 < change.value < change.high == 1
    assert change.pairs == 10
    assert change.clear
    average = [
        s for s in result.scores if (s.run, s.task, s.metric) == ("yarn", "average", "recall")
    ]
    assert average[0].difference.value == pytest.approx(0.8)
    assert average[0].difference.low > change.low
    assert not any(score.difference for score in result.scores if score.run == "rope")


def test_the_table_has_runs_by_lengths(runs, tmp_path):
    longer = needles([1] * 5) + needles([0] * 5, 512)
    result = compare([*runs, results(tmp_path / "none", longer)], tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "| measure | run | 256 | 512 |"
    single = lines.index(next(line for line in lines if "needle single recall" in line))
    assert [line.split(" | ")[1] for line in lines[single : single + 5]] == [
        "rope",
        "yarn",
        "Δ yarn",
        "none",
        "Δ none",
    ]
    assert "+0.800 [" in lines[single + 2]
    assert lines[single + 2].count("*") == 1
    assert "Δ: the difference to rope on the same samples" in result.notes[0]


def test_fewer_shared_samples_are_noted(runs, tmp_path):
    other = results(tmp_path / "other", needles([1] * 12))
    notes = compare([runs[0], other], tmp_path / "table.md").notes
    assert "other shares 10 of 12 samples of single at 256 tokens with rope." in notes
    keys = results(tmp_path / "keys", passkeys([1, 0]))
    notes = compare([runs[0], keys], tmp_path / "table.md").notes
    assert "keys has no samples to pair with rope, so it has no differences." in notes


@pytest.mark.parametrize(
    ("change", "pairs"),
    [
        ({"depths": [0.5, 0.2]}, 0),
        ({"form": "short"}, 0),
        ({"haystack": "essays 5678"}, 0),
        ({"haystack": "filler"}, 0),
        ({"question": "What is it?"}, 0),
        ({"haystack": "copy 1234"}, 3),  # the same text
        ({"depths": [0.7, 0.2]}, 3),  # in the order of an earlier version
    ],
)
def test_samples_of_other_prompts_are_no_pairs(change, pairs):
    sample = {"depths": [0.2, 0.7], "form": "published", "haystack": "essays 1234"}
    own = [{**row, **sample} for row in needles([1, 0, 1], tasks=("vt",))]
    changes = paired_differences(own, [{**row, **change} for row in own])
    assert sum(difference.pairs for difference in changes.values()) == pairs
    bare = [{name: row[name] for name in row.keys() - sample.keys()} for row in own]
    assert paired_differences(bare, bare)["needle", "vt", 256].pairs == 3, "of earlier versions"


@pytest.mark.parametrize(
    ("suite", "settings", "pairs"),
    [
        (Needle, {"samples": 5}, 1),  # only the first needle is where it was
        (Needle, {"haystack": "python-docs"}, 0),
        (NonLiteral, {"samples": 3}, 1),
        (Ruler, {"samples": 5}, 5),  # its depths do not depend on their number
    ],
)
def test_samples_of_other_settings_are_paired_if_their_prompts_are_equal(
    suite, settings, pairs, monkeypatch
):
    monkeypatch.setattr(
        f"{suite.__module__}.generate_texts",
        lambda model, tokenizer, rows, *_: [Generated("", len(row)) for row in rows],
    )
    tokenizer = load("nope-twin").tokenizer
    tasks = {Needle: {"tasks": ("single",)}, Ruler: {"tasks": ("niah_single_1",)}}.get(suite, {})
    rows, samples = [], []
    for changed in ({}, settings):
        evaluation = suite((600,), **{**tasks, "samples": 10, **changed})
        cell = evaluation.cells()[-1]
        samples.append(evaluation.run(cell, None, tokenizer))
        rows.append(evaluation.prompts(cell, tokenizer)[1])
    assert sum(map(list.__eq__, *rows)) == pairs
    changes = paired_differences(*samples)
    assert sum(difference.pairs for difference in changes.values()) == pairs


def test_measures_without_a_pair_are_noted(runs, tmp_path):
    """Of one task the haystack is another one; the other task and an effective length are not."""
    moved = needles([1] * 10, tasks=("single",))
    for row in moved:
        row["haystack"] = "essays 1234"
    other = results(tmp_path / "other", [*moved, *needles([1] * 10, tasks=("multi-key",))])
    result = compare([runs[0], other], tmp_path / "table.md")
    assert result.notes[1:] == (
        "other and rope have no sample in common of needle single recall at 256 tokens: measure "
        "both with the same --seed, --limit and --data.",
    )
    assert [s.task for s in result.scores if s.difference] == ["multi-key"]
    assert len(compare(runs, tmp_path / "table.md").notes) == 1


def nonliteral(**hits: int) -> list[dict]:
    """Of ten prompts of each task at two lengths."""
    rows = [
        row
        for task, count in hits.items()
        for length in (256, 512)
        for row in needles([1] * count + [0] * (10 - count), length, (task,))
    ]
    return [{**row, "eval": "nonliteral"} for row in rows]


@pytest.mark.parametrize("reference", [{"place": 8, "work": 3, "animal": 9}, {"place": 8}])
def test_differences_are_to_scores_that_the_reference_has(reference, tmp_path):
    """An average is over what a model solves, and an unsolved task says nothing."""
    first = results(tmp_path / "a", nonliteral(**reference))
    second = results(tmp_path / "b", nonliteral(place=10, work=9, animal=2))
    result = compare([first, second], tmp_path / "t.md")
    changes = {
        (s.task, s.length): s.difference and s.difference.value
        for s in result.scores
        if (s.run, s.metric) == ("b", "recall")
    }
    assert changes == {
        **{("place", length): pytest.approx(0.2) for length in (256, 512)},
        **{("work", length): None for length in (256, 512)},
        **{("average", length): None for length in (256, 512)},
        ("animal", 256): pytest.approx(-0.7) if "animal" in reference else None,
    }
    assert len(result.notes) == 1, "nothing is amiss with the samples"


@pytest.mark.parametrize("task_names", [True, False])
def test_averages_are_compared_if_they_are_of_the_same_tasks(task_names, runs, tmp_path):
    """Earlier versions stored only how many tasks there are."""
    more = results(tmp_path / "more", needles([1] * 10, tasks=("single", "multi-key", "variables")))
    for folder in () if task_names else (*runs, more):
        record = json.loads((folder / "record.json").read_text())
        for score in record["scores"]:
            score["tags"].pop("task_names", None)
        (folder / "record.json").write_text(json.dumps(record))
    for folders, differ in (([*runs, more], {"yarn"}), ([more, *runs], set())):
        scores = compare(folders, tmp_path / "table.md").scores
        assert {s.run for s in scores if s.task == "average" and s.difference} == differ
        others = {folder.name for folder in folders[1:]}
        assert {s.run for s in scores if s.task == "single" and s.difference} == others


def test_a_baseline_is_a_run_of_its_own(tmp_path):
    folder = results(tmp_path / "out", passkeys([1, 1, 1]), baseline=passkeys([1, 0, 1]))
    result = compare([folder], tmp_path / "table.csv")
    change = {score.run: score.difference for score in result.scores}
    assert change["base"] is None
    assert change["model"].value == pytest.approx(1 / 3)
    assert result.reference == "base"
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["base", "model"]
    assert float(rows[1]["difference"]) == pytest.approx(1 / 3)


def test_runs_of_different_models_have_their_names(tmp_path):
    first = results(tmp_path / "a", passkeys([1, 0, 1]), "no/twin")
    second = results(tmp_path / "b", passkeys([0, 0, 1]), "no/other", baseline=passkeys([1, 1, 0]))
    result = compare([first, second], tmp_path / "table.md")
    change = {score.run: score.difference for score in result.scores}
    assert [*change] == ["no/twin", "no/other", "base"]
    assert change["no/other"].value == pytest.approx(-1 / 3)
    assert change["base"].value == 0
    again = results(tmp_path / "c", passkeys([0, 0, 1]), "no/twin")
    assert compare([first, again], tmp_path / "table.md").reference == "a", "one model twice"


def recall_changes(result) -> dict[tuple[str, int], tuple[float, int] | None]:
    """By run and length: the difference in recall, and the pairs behind it."""
    return {
        (s.run, s.length): s.difference and (s.difference.value, s.difference.pairs)
        for s in result.scores
        if s.metric == "recall"
    }


def single(share: float, *lengths: int) -> list[dict]:
    return [row for n in lengths or (256,) for row in needles([share] * 10, n, ("single",))]


def test_baselines_of_one_name_are_paired_with_their_own_samples(tmp_path):
    first = results(tmp_path / "a", single(1), baseline=single(1))
    second = results(tmp_path / "b", single(1), baseline=single(0))
    assert recall_changes(compare([first, second], tmp_path / "t.md")) == {
        ("a", 256): None,
        ("b", 256): (0, 10),
        ("base", 256): (0, 10),
        ("base (baseline of b)", 256): (-1, 10),
    }


def test_a_baseline_of_two_runs_keeps_the_lengths_of_both(tmp_path):
    first = results(tmp_path / "a", single(1, 256, 512), baseline=single(0, 256, 512))
    second = results(tmp_path / "b", single(1, 512), baseline=single(0, 512))
    changes = recall_changes(compare([first, second], tmp_path / "t.md"))
    assert (changes["base", 256], changes["base", 512]) == ((-1, 10), (-1, 10))


def test_a_folder_with_the_name_of_a_baseline_is_another_run(tmp_path):
    first = results(tmp_path / "base", single(1), "base")
    second = results(tmp_path / "b", single(1), baseline=single(0))
    changes = recall_changes(compare([first, second], tmp_path / "t.md"))
    assert changes["b", 256] == (0, 10)
    assert changes["base (baseline of b)", 256] == (-1, 10)


@pytest.mark.parametrize(("name", "largest"), [("needle", 1.0), ("ruler", 100.0)])
def test_differences_of_shares_end_at_the_largest_one(name, largest):
    own, other = (
        [{**sample, "eval": name} for sample in needles(hits, tasks=("vt",))]
        for hits in ([1, 1, 1, 0, 1], [0, 0, 0, 0, 1])
    )
    forth, back = paired_differences(own, other), paired_differences(other, own)
    assert forth[name, "vt", 256].high == largest
    assert back[name, "vt", 256].low == -largest
    assert forth[name, "vt", 256].low > -largest


@pytest.mark.parametrize("n", range(1, 11))
def test_few_pairs_are_no_clear_difference(n):
    """All wrong against all right: clear from five pairs on, where a coin does so in 3% or less."""
    own, other = needles([0] * n, tasks=("vt",)), needles([1] * n, tasks=("vt",))
    difference = paired_differences(own, other)["needle", "vt", 256]
    assert (difference.value, difference.low) == (-1, -1)
    assert difference.clear == (n >= 5)
    same = paired_differences(own, own)["needle", "vt", 256]
    assert same.low == pytest.approx(-same.high)
    assert same.high > 0.15


def test_intervals_are_those_of_agresti_and_min():
    """By their formula: 20 and 6 of 100 pairs differ. t has 99 degrees."""
    own = [1.0] * 20 + [0.0] * 6 + [1.0] * 74
    other = [0.0] * 20 + [1.0] * 6 + [1.0] * 74
    first, second = (needles(scores, tasks=("vt",)) for scores in (own, other))
    difference = paired_differences(first, second)["needle", "vt", 256]
    more, less, n = 20.5 / 102, 6.5 / 102, 102
    deviation = ((more + less - (more - less) ** 2) / n) ** 0.5
    assert difference.value == pytest.approx(0.14)
    assert difference.low == pytest.approx(more - less - 1.984217 * deviation)
    assert difference.high == pytest.approx(more - less + 1.984217 * deviation)


def test_differences_of_longbench_are_in_percent():
    own, other = (
        [{**sample, "eval": "longbench"} for sample in needles(scores, tasks=("trec",))]
        for scores in ([80, 60, 100, 90] * 3, [10, 30, 20, 10] * 3)
    )
    difference = paired_differences(own, other)["longbench", "trec", 256]
    assert 20 < difference.low < difference.value == 65 < difference.high < 100


def test_losses_are_weighted_by_their_tokens():
    window = {"eval": "perplexity", "task": "t", "length": 64, "document": "d", "start": 0}
    first, second = {**window, "end": 64, "scored": 10}, {**window, "end": 94, "scored": 30}
    own = [{**first, "nll": 20.0}, {**second, "nll": 30.0}]
    other = [{**first, "nll": 10.0}, {**second, "nll": 30.0}]
    assert paired_differences(own, other)["perplexity", "t", 64].value == pytest.approx(0.25)


@pytest.mark.parametrize("mode", ["same", "yarn"])
def test_the_difference_of_losses_is_that_of_the_reported_ones(mode, tmp_path):
    """In the mode yarn windows have equal weight, however many tokens they score."""
    text = Text("t", ("d",), (torch.zeros(256, dtype=torch.int32),), "")
    window = {"eval": "perplexity", "task": "t", "length": 128, "document": "d", "start": 0}
    first, second = {**window, "end": 127, "scored": 127}, {**window, "end": 191, "scored": 64}
    own = [{**first, "nll": 254.0}, {**second, "nll": 64.0}]
    other = [{**first, "nll": 127.0}, {**second, "nll": 64.0}]
    evaluation = Perplexity((text,), (128,), mode, 64)
    scores = [tuple(evaluation.score(samples)) for samples in (own, other)]
    result = EvalResult("model", "perplexity", scores[0], tmp_path / "out", "base", scores[1])
    _write(result, {"model": [own], "base": [other]}, {"mode": mode})
    (change,) = (s.difference for s in compare(result.folder, tmp_path / "t.md").scores[1:])
    losses = [score.tags["nll"] for (score,) in scores]
    assert change.value == pytest.approx(losses[0] - losses[1])


@pytest.mark.parametrize(
    ("hashes", "pairs"),
    [(["a", "a"], 2), (["a", "b"], None), ([None, "b"], 2), ([None, None], 2)],
)
def test_windows_of_other_tokens_are_no_pairs(hashes, pairs, tmp_path):
    """Another tokenizer can end a block at the same number. Older records have no hash."""
    window = {"eval": "perplexity", "task": "t", "length": 64, "document": "d", "scored": 64}
    samples = [{**window, "end": end, "nll": 100.0 + end} for end in (64, 128)]
    text = Text("t", ("d",), (torch.zeros(128, dtype=torch.int32),), "")
    scores = tuple(Perplexity((text,), (64,), stride=32).score(samples))
    folders = []
    for number, sha256 in enumerate(hashes):
        folders.append(tmp_path / str(number))
        result = EvalResult(f"m{number}", "perplexity", scores, folders[-1])
        settings = {"texts": [{"t": sha256}]} if sha256 else {}
        _write(result, {f"m{number}": [samples]}, settings)
    change = compare(folders, tmp_path / "t.md").scores[1].difference
    assert (change and change.pairs) == pairs


@pytest.mark.long
def test_a_record_has_the_hashes_of_its_texts(tmp_path):
    settings = {"lengths": 64, "windows": 1, "data": str(Path(__file__))}
    evaluate("nope-twin", "perplexity", tmp_path / "out", baseline="rope-twin", **settings)
    first, second = json.loads((tmp_path / "out" / "record.json").read_text())["settings"]["texts"]
    assert first == second
    assert [*first] == ["test_compare"]
    (change,) = (s.difference for s in compare(tmp_path / "out", tmp_path / "t.md").scores[1:])
    assert change.pairs == 1


def test_one_window_has_no_interval_and_no_star():
    window = {"eval": "perplexity", "task": "t", "length": 64, "document": "d", "end": 64}
    own, other = ([{**window, "scored": 10, "nll": nll}] for nll in (20.0, 10.0))
    difference = paired_differences(own, other)["perplexity", "t", 64]
    assert (difference.low, difference.value, difference.high) == (1, 1, 1)
    assert not difference.clear
    score = ComparedScore("run", "perplexity", "t", "ppl", 64, 20.0, 20.0, 20.0, 1, difference)
    assert comparison._change(score) == "+1.000"
    assert comparison._value(score) == "20.00"


@pytest.mark.parametrize("documents", [7, 8])
def test_intervals_of_losses_are_over_documents_if_there_are_eight(documents):
    """With fewer they are over windows, as those of perplexity."""
    windows = [
        {"eval": "perplexity", "task": "t", "length": 64, "document": f"{number}", "end": end}
        for number in range(documents)
        for end in (64, 128, 192)
    ]
    own = [{**window, "scored": 10, "nll": float(window["document"])} for window in windows]
    other = [{**window, "scored": 10, "nll": 0.0} for window in windows]
    values = [sample["nll"] / 10 for sample in own]
    groups = [sample["document"] for sample in own] if documents == 8 else None
    difference = paired_differences(own, other)["perplexity", "t", 64]
    _, low, high = bootstrap(values, groups=groups)
    assert (difference.low, difference.high) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("low", "high", "clear"),
    [(0.1, 0.3, True), (-0.3, -0.1, True), (0, 0.2, False), (-1, 0, False)],
)
def test_a_difference_is_clear_if_its_interval_excludes_zero(low, high, clear):
    assert PairedDifference((low + high) / 2, low, high, 9).clear == clear


@pytest.mark.parametrize(
    "change",
    [
        {"scores": None},
        {"scores": [{"metric": "ppl"}]},
        {"vs": 5},
        {"settings": 5},
        {"model": ["a"]},
    ],
)
def test_a_damaged_record_is_refused_by_name(runs, tmp_path, change):
    folder = tmp_path / "damaged"
    results(folder, needles([1, 0]), "other")
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**record, **change}))
    for folders in ([*runs, folder], [folder]):
        with pytest.raises(CorruptError, match=f"the record in {folder} is invalid"):
            compare(folders, tmp_path / "table.md")
    assert not (tmp_path / "table.md").exists()


def test_damaged_samples_are_refused(runs, tmp_path):
    file = runs[1] / "samples" / "needle.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    del row["score"]
    file.write_text(json.dumps(row))
    with pytest.raises(CorruptError, match=f"{runs[1]}.* is invalid"):
        compare(runs, tmp_path / "table.md")


def test_the_command_prints_and_writes(runs, tmp_path):
    arguments = ["compare", *map(str, runs), "-o", str(tmp_path / "table.json")]
    printed = CliRunner().invoke(app, arguments).output
    assert "Δ yarn" in printed
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["reference"] == "rope"
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output) == content


def test_other_folders_and_names_are_refused(runs, tmp_path):
    with pytest.raises(FarspanError, match="is not the name of a table; end it in one of .md"):
        compare(runs, tmp_path / "table.html")
    with pytest.raises(FarspanError, match="was not found"):
        compare([tmp_path / "absent"], tmp_path / "table.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FarspanError, match=r"has no record.json; choose folders .* farspan eval$"):
        compare([tmp_path / "empty"], tmp_path / "table.md")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "record.json").write_text('{"command": "lab run"}')
    with pytest.raises(FarspanError, match="is a run of `farspan lab run`"):
        compare([tmp_path / "lab"], tmp_path / "table.md")
    (runs[0] / "samples" / "needle.jsonl").write_text('{"eval": 1}\n')
    with pytest.raises(CorruptError, match="line 1 is not a sample"):
        compare(runs, tmp_path / "table.md")
    assert not (tmp_path / "table.md").exists()


@pytest.mark.parametrize("name", ["needle", "ruler", "longbench", "nonliteral"])
def test_differences_have_the_unit_of_the_scores(name):
    """A sample's score is that of its evaluation, but for RULER's, which is from 0 to 100."""
    own, other = (
        [{**sample, "eval": name} for sample in needles(hits, tasks=("vt",))]
        for hits in ([1, 1, 0, 1], [0, 1, 0, 0])
    )
    difference = paired_differences(own, other)[name, "vt", 256].value
    assert difference == {"ruler": 50.0}.get(name, 0.5)
    if name in ("needle", "ruler"):
        scored = {"needle": Needle((256,)), "ruler": Ruler((256,), ("vt",))}[name]
        assert difference == scored.score(own)[0].value - scored.score(other)[0].value


def test_the_ratio_to_a_baseline_is_that_of_the_same_solved_tasks():
    def score(tags):
        named = {"task": "average", **tags}
        return Score("nonliteral", "recall", 256, 0.5, 0.4, 0.6, 10, named)

    one, both = score({"task_names": ["place"]}), score({"task_names": ["place", "work"]})
    assert matching_score(both, [one, both]) is both
    assert matching_score(both, [one]) is None
    assert matching_score(both, [score({**both.tags, "unsolved": True})]) is None
