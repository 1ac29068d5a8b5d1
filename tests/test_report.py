"""A report: every record becomes figures and tables of one page, which asks no network for anything."""

from __future__ import annotations

import html.parser
import importlib.util
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import farspan
from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.cli import app
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.diagnosis.curves import Curves
from farspan.errors import CorruptError, FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.record import brief
from farspan.report import page
from farspan.report.figures import diagnosis_figures
from farspan.report.study import at
from farspan.workflows import laboratory
from farspan.workflows.evaluating import evaluate
from farspan.workflows.extending import extend
from farspan.workflows.fitting import Extension
from farspan.workflows.reporting import report

ROOT = Path(__file__).parent.parent
SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=400)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """What every command leaves behind, of a small random model."""
    folder = tmp_path_factory.mktemp("runs")
    text = next(iter(read_documents("python-docs"))).text[:30_000]
    tokenizer = train_tokenizer([text], 400)
    (folder / "text.txt").write_text(text)
    torch.manual_seed(0)
    model = folder / "model <b>"  # what a page must not take for its own
    FarspanForCausalLM(FarspanConfig(**SHAPE, max_position_embeddings=64, position="none")).save_pretrained(model)
    tokenizer.save_pretrained(model)
    few = replace(Extension(), choose_windows=2, report_windows=2, passkeys=0, fitted=False)
    farspan.diagnose(model, folder / "text.txt", [64, 256], windows=2, out=folder / "diagnosis")
    extend(model, 128, folder / "patch", "logn", data=folder / "text.txt", recipe=few)
    options = {"data": folder / "text.txt", "lengths": (192, 256), "stride": 64, "windows": 2}
    evaluate(folder / "patch", "quick", folder / "scores", vs=model, **options)
    changes = ["train.steps=3", "train_examples=200", "test_examples=20", "lrs=[1e-3, 2e-3]"]
    laboratory.run("lab-tiny", changes, folder / "lab", device="cpu")
    (folder / "training").mkdir()
    (folder / "training" / "record.json").write_text('{"command": "pretrain"}')
    steps = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": 5.25}]
    (folder / "training" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    cell = {"model": "small", "factor": 2, "seed": 0, "train_length": 64, "positions": [32, 96]}
    cells = [
        {**cell, "method": "none", "factor": 1, "loss": {"books": [3.5, 8.5], "pg19": [3.5, 9.5]}},
        {**cell, "method": "uniform", "loss": {"books": [3.5, 4.5], "pg19": [3.25, None]}},
        {**cell, "method": "uniform", "seed": 1, "loss": {"books": [4.5, 5.5], "pg19": [4.25, 4.0]}},
        {**cell, "method": "headscale:init=1", "loss": {"books": [1.0, 1.0], "pg19": [1.0, 1.0]}},
    ]
    grids = [{"model": "small", "checkpoint": "model", "positions": [32, 96], "best": [1.0, 1.25]}]
    (folder / "study").mkdir()
    (folder / "study" / "results.json").write_text(json.dumps({"cells": cells, "grids": grids}))
    return folder


KINDS = ("diagnosis", "patch", "scores", "lab", "training", "study")


@pytest.fixture(scope="module")
def written(runs) -> str:
    return report([runs / kind for kind in KINDS], runs / "report.html").read_text(encoding="utf-8")


def figures_of(text: str) -> list[dict]:
    return [json.loads(each) for each in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)]


def titled(text: str, words: str) -> list[dict]:
    return [figure for figure in figures_of(text) if words in figure["layout"]["title"]["text"]]


def own_part(text: str) -> str:
    """The page without plotly's script."""
    return text[: text.index("<script>")] + text[text.index("</head>") :]


class Open(html.parser.HTMLParser):
    """Which elements a page leaves open."""

    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_no_network(written):
    parser = Open()
    parser.feed(own_part(written))
    assert parser.open == []
    assert parser.links == []
    assert "Plotly.newPlot" in written
    assert "plotly.js v" in written, "the script itself is in it"
    assert "showSendToCloud: false" in own_part(written), "plotly would offer to upload figures"
    titles = re.findall("<h2>(.*?)</h2>", written)
    assert titles == [title for title, _ in page.SECTIONS.values()]


def test_names_are_text_and_not_markup(written):
    drawn = [trace["name"] for figure in titled(written, "Loss by position") for trace in figure["data"]]
    assert any("model &lt;b>" in name.replace("&gt;", ">") for name in drawn)
    assert "<b>" not in own_part(written)
    assert "<" not in "".join(re.findall(r'"application/json">(.*?)</script>', own_part(written), re.DOTALL))


def test_curves_are_those_of_the_records(runs, written):
    model = json.loads((runs / "diagnosis" / "record.json").read_text())["models"][0]
    (entropy,) = titled(written, "Mean attention entropy")
    assert entropy["data"][0]["x"] == model["positions"]
    assert np.corrcoef(entropy["data"][0]["y"], model["entropy"])[0, 1] > 0.99, "smoothed, not moved"
    assert [mark["x0"] for mark in entropy["layout"]["shapes"]] == [64]
    (grown,) = titled(written, "entropy of heads at the end")
    heads = model["entropy_by_head"]["1"]
    at_the_length = np.interp(64, model["positions"], heads[0])
    assert np.allclose(grown["data"][0]["z"][1][0], heads[0][-1] - at_the_length)


def test_a_patch_shows_what_it_changed(runs, written):
    record = json.loads((runs / "patch" / "record.json").read_text())
    (curves,) = titled(written, "patch: loss by position, logn")
    assert [trace["name"] for trace in curves["data"]] == ["before", "after"]
    for trace in curves["data"]:
        around = np.convolve(record["loss_by_position"][trace["name"]], np.ones(8) / 8, "same")
        assert np.allclose(trace["y"][8:-8], around[8:-8])
    (scales,) = titled(written, "λ̂ of each head")
    chosen = Patch.load(runs / "patch").scales
    assert np.allclose(scales["data"][0]["z"], chosen.at(torch.tensor(128)))
    assert not np.allclose(scales["data"][0]["z"], chosen.base), "at the target, not at the beginning"
    assert f"<td>loss@128</td><td>{record['before']['loss@128']:.3f}</td>" in written


def test_an_evaluation_stands_beside_its_base_with_intervals(runs, written):
    record = json.loads((runs / "scores" / "record.json").read_text())
    (figure,) = titled(written, "Perplexity")
    mine, base = figure["data"]
    for trace, scores in ((mine, record["scores"]), (base, record["vs"]["scores"])):
        own = [score for score in scores if score["metric"] == "ppl"]
        assert trace["x"] == [score["length"] for score in own]
        assert trace["y"] == [score["value"] for score in own]
        assert np.allclose(np.add(trace["y"], trace["error_y"]["array"]), [score["high"] for score in own])
        assert np.allclose(np.subtract(trace["y"], trace["error_y"]["arrayminus"]), [score["low"] for score in own])
    grids = titled(written, "passkeys told (passkey documents in training: ")
    assert len(grids) == 2


def scored(value: float, length: int, metric: str = "ppl", high: float | None = None, **tags) -> dict:
    tags = {"task": "text", "trained_on_passkeys": "yes", **tags}
    return {"eval": "any", "metric": metric, "length": length, "value": value, "low": value, "n": 1, "tags": tags} | {
        "high": value if high is None else high
    }


def evaluated(folder: Path, *scores: dict, **more) -> Path:
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"command": "eval", "model": "one", "scores": scores, **more}))
    return folder


def test_a_passkey_grid_has_every_share_in_its_place(tmp_path):
    shares = {(0.0, 256): 0.1, (1.0, 256): 0.2, (0.0, 512): 0.3, (1.0, 512): 0.4}
    scores = [scored(share, length, "passkey_at_depth", depth=depth) for (depth, length), share in shares.items()]
    text = report([evaluated(tmp_path / "run", *scores)], tmp_path / "page.html").read_text()
    (grid,) = (figure["data"][0] for figure in titled(text, "passkeys told"))
    assert grid["z"] == [[0.1, 0.3], [0.2, 0.4]]
    assert (grid["x"], grid["y"]) == (["256", "512"], ["0%", "100%"])


def test_what_two_runs_measured_of_one_base_is_joined_unless_they_disagree(tmp_path):
    def base(*scores):
        return {"model": "base", "scores": scores}

    runs = [
        evaluated(tmp_path / "a" / "run", scored(9.0, 256), vs=base(scored(20.0, 256))),
        evaluated(tmp_path / "b" / "run", scored(8.0, 512), vs=base(scored(20.0, 256), scored(30.0, 512))),
        evaluated(tmp_path / "c" / "run", scored(7.0, 512), vs=base(scored(31.0, 512)), notes=["other <tokens>"]),
    ]
    told = {"gate": "ppl@512<=6", "holds": False, "told": "ppl@512 is 7.00"}
    runs.append(evaluated(tmp_path / "d" / "gated", scored(7.0, 512), gates=[told]))
    text = report(runs, tmp_path / "page.html").read_text()
    (figure,) = titled(text, "Perplexity")
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]} == {
        "a/run": ([256], [9.0]),
        "b/run": ([512], [8.0]),
        "c/run": ([512], [7.0]),
        "d/gated": ([512], [7.0]),
        "base": ([256, 512], [20.0, 30.0]),
        "base (beside c/run)": ([512], [31.0]),
    }
    assert "<p>c/run: other &lt;tokens&gt;</p>" in text
    assert "<p>d/gated: ppl@512 is 7.00</p>" in text


def test_an_axis_has_numbers_and_no_interval_stretches_it(tmp_path):
    near = report([evaluated(tmp_path / "near", scored(25.0, 256), scored(30.0, 512))], tmp_path / "page.html")
    assert "type" not in titled(near.read_text(), "Perplexity")[0]["layout"]["yaxis"]
    far = report([evaluated(tmp_path / "far", scored(25.0, 256), scored(300.0, 512, high=3.4e32))], tmp_path / "2.html")
    (figure,) = titled(far.read_text(), "Perplexity")
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert max(figure["data"][0]["error_y"]["array"]) <= 9 * 300
    assert "<td>300.0–3.4e+32</td>" in far.read_text()


def test_the_laboratory_shows_the_rate_that_was_chosen(tmp_path):
    def cell(lr: float, seed: int, chosen_by: float, right: int) -> dict:
        counts = {"in_range": {"2": [4, 4], "10": [right, 4]}, "beyond": {"11": [0, 4]}}
        about = {"task": "copy", "encoding": "none", "size": "small", "scratchpad": "none", "lr": lr, "seed": seed}
        return {**about, "chosen_by": chosen_by, **counts}

    cells = [cell(1e-3, 0, 0.5, 1), cell(1e-3, 1, 0.5, 1), cell(2e-3, 0, 0.9, 2), cell(2e-3, 1, 0.8, 4)]
    ranks = [{"encoding": "none", "reciprocal": 1.0, "tasks": 1}]
    (tmp_path / "lab").mkdir()
    record = {"command": "lab run", "learnt": 0, "models": 4, "ranks": ranks, "cells": cells}
    (tmp_path / "lab" / "record.json").write_text(json.dumps(record))
    text = report([tmp_path / "lab"], tmp_path / "page.html").read_text()
    (figure,) = titled(text, "lab: copy, small")
    assert figure["data"][0]["x"] == [2, 10, 11]
    assert figure["data"][0]["y"] == [1.0, 0.75, 0.0]
    assert [mark["x0"] for mark in figure["layout"]["shapes"]] == [10]
    assert "0 of 4 models learnt their task" in text
    assert "<td>none</td><td>1.000</td><td>1</td>" in text


def test_a_study_has_every_method_beside_none_and_what_is_no_number_is_a_gap(written):
    (training,) = titled(written, "Loss in training")
    assert training["data"][0]["y"] == [5.5, None, 5.25]
    books, other = titled(written, "study: small for 2×")
    assert {trace["name"]: trace["y"] for trace in books["data"]} == {"none": [3.5, 8.5], "uniform": [4.0, 5.0]}
    assert {trace["name"]: trace["y"] for trace in other["data"]} == {"none": [3.5, 9.5], "uniform": [3.75, None]}
    (scales,) = titled(written, "the best λ̂ by position")
    assert scales["data"][0]["y"] == [1.0, 1.25]


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "training").mkdir(parents=True)
        for file in ("record.json", "metrics.jsonl"):
            (tmp_path / place / "training" / file).write_text((runs / "training" / file).read_text())
    out = report([tmp_path / "one" / "training", tmp_path / "two" / "training"], tmp_path / "page.html")
    (figure,) = titled(out.read_text(), "Loss in training")
    assert [trace["name"] for trace in figure["data"]] == ["one/training", "two/training"]


def test_a_study_of_variants_alone_shows_them(tmp_path):
    cell = {"model": "small", "factor": 2, "seed": 0, "train_length": 64, "positions": [32, 96]}
    cells = [{**cell, "method": f"headscale:search.init={init}", "loss": {"books": [init, 2.0]}} for init in (1, 3)]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "results.json").write_text(json.dumps({"cells": cells, "grids": []}))
    text = report([tmp_path / "study"], tmp_path / "page.html").read_text()
    (figure,) = titled(text, "study: small for 2×")
    assert [trace["y"] for trace in figure["data"]] == [[1.0, 2.0], [3.0, 2.0]]


def test_numbers_in_tables_are_brief_and_never_nothing_unless_they_are():
    shown = {
        0.0: "0.00",
        0.0042: "0.0042",
        -0.00021: "-0.00021",
        0.005: "0.01",
        0.92: "0.92",
        22.1: "22.10",
        284.34: "284.3",
        1284.4: "1,284",
        3.4e32: "3.4e+32",
        math.nan: "nan",
    }
    assert {value: brief(value) for value in shown} == shown
    assert brief(1_234_567) == "1,234,567"


def test_scales_that_grow_are_set_against_entropy_as_they_are_at_the_end():
    """Of heads that all begin at 1, and differ by how λ̂ grows with the length."""
    entropy, slope = np.array([[1.0, 2.0, 3.0]]), torch.tensor([[0.1, 0.2, 0.4]])
    curves = SimpleNamespace(
        positions=np.arange(1.0, 129),
        length=128,
        loss=np.ones(128),
        entropy=np.ones(128),
        heads={0: entropy.repeat(128, 0).T},
    )
    scales = Scales((0,), torch.ones(1, 3), slope, "log", 32)
    found = SimpleNamespace(
        curves=curves,
        scales=scales,
        label="model",
        train_length=32,
        uniform=None,
        distracted_heads=[],
        loss_knee=None,
        entropy_knee=None,
        smooth_loss=curves.loss,
        smooth_entropy=curves.entropy,
    )
    (points,) = diagnosis_figures([found])["scale_against_entropy"].axes[0].collections
    assert np.allclose(points.get_offsets(), np.stack((entropy[0], 1 + slope[0].numpy() * math.log(4)), 1))
    level = replace(scales, slope=torch.full((1, 3), 0.2))
    assert "scale_against_entropy" not in diagnosis_figures([SimpleNamespace(**{**vars(found), "scales": level})])


def test_the_loss_at_a_position_is_one_thing_wherever_it_is_told(capsys):
    """benchmarks/heldout.py, a study and a diagnosis: the mean over the quarter of a length that ends there."""
    spec = importlib.util.spec_from_file_location("heldout", ROOT / "benchmarks" / "heldout.py")
    heldout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(heldout)
    curve, positions = np.arange(1.0, 512), np.arange(1, 512)  # the loss at a position is its number
    passkeys = {str(round(64 * mark)): 0.5 for mark in heldout.MARKS}
    heldout.show({"model": "m", "train_length": 64, "knee": None, "loss": {"text": curve}, "passkey": passkeys})
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("text"))
    curves = Curves(positions, curve, {}, windows=1, length=512, every=1)
    marks = [round(64 * mark) for mark in heldout.MARKS]
    assert told.split()[1:] == [f"{curves.loss_at(mark, 16):.3f}" for mark in marks]
    cell = {"train_length": 64, "positions": positions}
    assert [at(cell, curve, mark) for mark in marks] == [curves.loss_at(mark, 16) for mark in marks]
    assert at(cell, curve, 32) == np.mean(range(17, 33))


def test_a_folder_without_a_record_and_a_broken_one_are_sentences(runs, tmp_path):
    with pytest.raises(FarspanError, match="holds no record.json; give folders that diagnose, extend, eval"):
        report([runs], tmp_path / "page.html")
    with pytest.raises(FarspanError, match="nowhere does not exist"):
        report([tmp_path / "nowhere"], tmp_path / "page.html")
    with pytest.raises(FarspanError, match="is a folder; name a file, as .*report.html"):
        report([runs / "training"], tmp_path)
    with pytest.raises(FarspanError, match="record.json is not named as one; end it in .html"):
        report([runs / "training"], runs / "training" / "record.json")
    (tmp_path / "broken").mkdir()
    for content, message in (
        ("{", "is not valid JSON"),
        ('{"when": 1}', "names no command"),
        ('{"command": "eval", "scores": [{}]}', "record in .*broken is not as farspan .*: 'metric'.; make it again"),
    ):
        (tmp_path / "broken" / "record.json").write_text(content)
        with pytest.raises(CorruptError, match=message):
            report([runs / "training", tmp_path / "broken"], tmp_path / "page.html")
    (tmp_path / "broken" / "record.json").write_text('{"command": "pretrain"}')
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with pytest.raises(CorruptError, match="metrics.jsonl, line 2"):
        report([tmp_path / "broken"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_without_plotly_the_way_out_is_told(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(FarspanError, match=r"pip install 'farspan\[report\]'"):
        report([runs / "training"], tmp_path / "page.html")


def test_a_name_that_is_no_text_breaks_nothing(runs, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "record.json").write_text('{"command": "export"}')
    assert "caf?" in report([folder], tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_length_that_nothing_was_asked_of_is_a_broken_record(tmp_path):
    about = {"task": "copy", "encoding": "none", "size": "small", "scratchpad": "none", "lr": 1e-3, "chosen_by": 1.0}
    cell = {**about, "in_range": {"2": [0, 0]}, "beyond": {}}
    record = {"command": "lab run", "learnt": 0, "models": 1, "ranks": [], "cells": [cell]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(CorruptError, match="ZeroDivisionError"):
        report([tmp_path], tmp_path / "page.html")


def test_a_training_that_goes_on_is_shown(runs, tmp_path):
    (tmp_path / "metrics.jsonl").write_text((runs / "training" / "metrics.jsonl").read_text())
    (figure,) = titled(report([tmp_path], tmp_path / "page.html").read_text(), "Loss in training")
    assert figure["data"][0]["x"] == [1, 2, 3]


def test_the_command_tells_where_the_page_is_and_what_has_no_figure(runs, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "record.json").write_text('{"command": "export"}')
    folders = [str(runs / "training"), str(tmp_path / "export")]
    done = CliRunner().invoke(app, ["report", *folders, "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "page.html" in done.output
    assert "export is a run of export, which has no figures" in done.output.replace("\n", " ")
    assert (tmp_path / "page.html").stat().st_size > 1e6
