"""Reports: records become figures and tables of one page that needs no network."""

from __future__ import annotations

import base64
import gzip
import html
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
from farspan.methods.extend_config import ExtendConfig
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.record import format_number
from farspan.report import page, style
from farspan.report.figures import diagnosis_figures
from farspan.report.study_tables import mean_at
from farspan.workflows import lab as lab_workflow
from farspan.workflows.evaluate import evaluate
from farspan.workflows.extend import extend
from farspan.workflows.report import report

ROOT = Path(__file__).parent.parent
SHAPE = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=400
)


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Path:
    """A training run with three logged steps."""
    folder = tmp_path_factory.mktemp("runs") / "training"
    folder.mkdir()
    (folder / "record.json").write_text('{"command": "pretrain"}')
    steps = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": 5.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


@pytest.fixture(scope="module")
def runs(training) -> Path:
    """A run of every command on a small random model, without image files."""
    folder = training.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", lambda figure, stem: None)
        _run_commands(folder)
    cell = {"model": "small", "factor": 2, "seed": 0, "train_length": 64, "positions": [32, 96]}
    cells = [
        {**cell, "method": "none", "factor": 1, "loss": {"books": [3.5, 8.5], "pg19": [3.5, 9.5]}},
        {**cell, "method": "uniform", "loss": {"books": [3.5, 4.5], "pg19": [3.25, None]}},
        {
            **cell,
            "method": "uniform",
            "seed": 1,
            "loss": {"books": [4.5, 5.5], "pg19": [4.25, 4.0]},
        },
        {**cell, "method": "headscale:init=1", "loss": {"books": [1.0, 1.0], "pg19": [1.0, 1.0]}},
    ]
    grids = [{"model": "small", "checkpoint": "model", "positions": [32, 96], "best": [1.0, 1.25]}]
    (folder / "study").mkdir()
    (folder / "study" / "results.json").write_text(json.dumps({"cells": cells, "grids": grids}))
    return folder


def _run_commands(folder: Path) -> None:
    text = next(iter(read_documents("python-docs"))).text[:30_000]
    tokenizer = train_tokenizer([text], 400)
    (folder / "text.txt").write_text(text)
    torch.manual_seed(0)
    model = folder / "model <b>"  # must be escaped in the page
    FarspanForCausalLM(
        FarspanConfig(**SHAPE, max_position_embeddings=64, position="none")
    ).save_pretrained(model)
    tokenizer.save_pretrained(model)
    few = replace(ExtendConfig(), choose_windows=2, report_windows=2, passkeys=0, fitted=False)
    farspan.diagnose(model, folder / "text.txt", [64, 256], windows=2, out=folder / "diagnosis")
    extend(model, 128, folder / "patch", "logn", data=folder / "text.txt", recipe=few)
    options = {"data": folder / "text.txt", "lengths": (192, 256), "stride": 64, "windows": 2}
    evaluate(folder / "patch", "quick", folder / "scores", baseline=model, **options)
    overrides = ["train.steps=1", "train_examples=200", "test_examples=20", "lrs=[1e-3, 2e-3]"]
    overrides += ['encodings=["none", "alibi"]', "processes=1"]
    lab_workflow.run("lab-tiny", overrides, folder / "lab", device="cpu")


KINDS = ("diagnosis", "patch", "scores", "lab", "training", "study")


@pytest.fixture(scope="module")
def written(runs) -> str:
    return report([runs / kind for kind in KINDS], runs / "report.html").read_text(encoding="utf-8")


def titled(text: str, words: str) -> list[dict]:
    """The charts with these words in their caption."""
    pattern = r'<figcaption>([^<]*).*?<script type="application/json">(.*?)</script>'
    charts = re.findall(pattern, text, re.DOTALL)
    return [json.loads(data) for caption, data in charts if words in html.unescape(caption)]


def split_plotly(text: str) -> tuple[str, str]:
    """The page without plotly's script, and that script."""
    before, packed, after = re.split(r'(?<=<script id="plotly" )(.*?)(?=</script>)', text)
    script = gzip.decompress(base64.b64decode(packed.partition(">")[2])).decode()
    return f"{before}>{after}", script


class PageParser(html.parser.HTMLParser):
    """The open elements and the links of a page."""

    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_complete_and_needs_no_network(written):
    parser = PageParser()
    text, script = split_plotly(written)
    parser.feed(text)
    assert parser.open == []
    assert len(written) < 4e6
    assert "Plotly.newPlot" in text
    assert "plotly.js v" in script, "the script is embedded"
    assert "showSendToCloud: false" in text, "plotly must not offer to upload figures"
    titles = re.findall("<h2>(.*?)</h2>", written)
    assert titles == ["Summary", *(title for title, _ in page.SECTIONS.values()), "Runs"]
    anchors = [f"#{anchor}" for anchor in re.findall('<section id="(.*?)">', written)]
    assert parser.links == anchors, "the contents, and no other links"


def test_names_are_escaped(written):
    names = [
        trace["name"] for figure in titled(written, "Loss by position") for trace in figure["data"]
    ]
    assert any("model &lt;b>" in name.replace("&gt;", ">") for name in names)
    assert "<b>" not in split_plotly(written)[0]
    assert "<" not in "".join(
        re.findall(r'"application/json">(.*?)</script>', split_plotly(written)[0], re.DOTALL)
    )


def test_curves_match_the_records(runs, written):
    model = json.loads((runs / "diagnosis" / "record.json").read_text())["models"][0]
    (entropy,) = titled(written, "Mean attention entropy")
    assert entropy["data"][0]["x"] == model["positions"]
    assert np.corrcoef(entropy["data"][0]["y"], model["entropy"])[0, 1] > 0.99, (
        "smoothed, not shifted"
    )
    assert [mark["x0"] for mark in entropy["layout"]["shapes"]] == [64]
    (growth,) = titled(written, "entropy of heads at the end")
    heads = model["entropy_by_head"]["1"]
    at_train_length = np.interp(64, model["positions"], heads[0])
    assert np.allclose(growth["data"][0]["z"][1][0], heads[0][-1] - at_train_length)


def test_heads_of_several_models_share_their_colors():
    """The same value has the same color beside a model whose heads grow more."""
    record = {"models": []}
    for name, growth in (("calm", 1.0), ("wild", -4.0)):
        model = {"model": name, "verdict": "", "train_length": 64, "positions": [64, 128]}
        curves = {"loss": [3.0, 3.0], "entropy": None, "loss_knee": None}
        record["models"] += [{**model, **curves, "entropy_by_head": {"0": [[2.0, 2.0 + growth]]}}]
    run = SimpleNamespace(name="run", record=record)
    charts = titled("".join(page._diagnoses([run], {})), "entropy of heads at the end")
    assert [chart["data"][0]["z"] for chart in charts] == [[[1.0]], [[-4.0]]]
    assert [(chart["data"][0]["zmin"], chart["data"][0]["zmax"]) for chart in charts] == [
        (-4, 4)
    ] * 2


def test_patch_shows_loss_and_scales(runs, written):
    record = json.loads((runs / "patch" / "record.json").read_text())
    (curves,) = titled(written, "patch: loss by position, logn")
    assert [trace["name"] for trace in curves["data"]] == ["before", "after"]
    for trace in curves["data"]:
        mean = np.convolve(record["loss_by_position"][trace["name"]], np.ones(8) / 8, "same")
        assert np.allclose(trace["y"][8:-8], mean[8:-8])
    assert not titled(written, "λ̂ of each head"), "all heads have one"
    scales = Patch.load(runs / "patch").scales
    at_target = float(scales.at(torch.tensor(128)).flatten()[0])
    assert f"at the target λ̂ is {at_target:.3f} in all 4 heads of 2 layers." in written
    assert abs(at_target - float(scales.base.flatten()[0])) > 0.01, "not as trained"
    number = '<td class="number">'
    assert f"<td>loss@128</td>{number}{record['before']['loss@128']:.3f}</td>" in written


def test_scales_of_heads_are_a_grid():
    run = page.Run("run", {}, {0: [1.0, 1.2], 3: [1.1, 1.0]})
    (grid,) = titled(page._scales(run), "λ̂ of each head")
    assert grid["data"][0]["z"] == [[1.0, 1.2], [1.1, 1.0]]


def test_a_model_has_one_color_in_all_sections(runs, written):
    (loss,), (perplexity,) = (
        titled(written, "Mean attention entropy"),
        titled(written, "Perplexity"),
    )
    (extension,) = titled(written, "patch: loss by position")
    patched, base = (trace["line"]["color"] for trace in perplexity["data"])
    assert patched != base == loss["data"][0]["line"]["color"]
    assert [trace["line"]["color"] for trace in extension["data"]] == [base, patched]


def test_colors_within_a_chart_differ():
    colors = {}
    assert page._color_numbers(["runs/a/model", "twin", "twin"], colors) == [0, 1, 2]
    assert page._color_numbers(["twin", "a/model", "other/a/model"], colors) == [1, 0, 3]


def test_evaluation_shows_its_baseline_and_intervals(runs, written):
    record = json.loads((runs / "scores" / "record.json").read_text())
    (figure,) = titled(written, "Perplexity")
    model, baseline = figure["data"]
    for trace, scores in ((model, record["scores"]), (baseline, record["vs"]["scores"])):
        ppl = [score for score in scores if score["metric"] == "ppl"]
        assert trace["x"] == [score["length"] for score in ppl]
        assert trace["y"] == [score["value"] for score in ppl]
        high = np.add(trace["y"], trace["error_y"]["array"])
        low = np.subtract(trace["y"], trace["error_y"]["arrayminus"])
        assert np.allclose(high, [score["high"] for score in ppl])
        assert np.allclose(low, [score["low"] for score in ppl])
    assert model["name"] == "patch", "a run bears the name of its model"
    assert [mark["x0"] for mark in figure["layout"]["shapes"]] == [64]
    (label,) = figure["layout"]["annotations"]
    assert (label["text"], label["x"]) == ("trained on 64", math.log10(64)), "x is logarithmic"
    grids = titled(written, "passkey accuracy")
    assert len(grids) == 2


def score(
    value: float, length: int, metric: str = "ppl", high: float | None = None, **tags
) -> dict:
    tags = {"task": "text", "trained_on_passkeys": "yes", **tags}
    return {
        "eval": "any",
        "metric": metric,
        "length": length,
        "value": value,
        "low": value,
        "n": 1,
        "tags": tags,
    } | {"high": value if high is None else high}


def write_eval(folder: Path, *scores: dict, **more) -> Path:
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(
        json.dumps({"command": "eval", "model": "one", "scores": scores, **more})
    )
    return folder


def test_passkey_grid_places_every_accuracy(tmp_path):
    accuracies = {(0.0, 256): 0.1, (1.0, 256): 0.2, (0.0, 512): 0.3, (1.0, 512): 0.4}
    scores = [
        score(accuracy, length, "passkey_at_depth", depth=depth)
        for (depth, length), accuracy in accuracies.items()
    ]
    text = report([write_eval(tmp_path / "run", *scores)], tmp_path / "page.html").read_text()
    (grid,) = (figure["data"][0] for figure in titled(text, "passkey accuracy"))
    assert grid["z"] == [[0.1, 0.3], [0.2, 0.4]]
    assert (grid["x"], grid["y"]) == (["256", "512"], ["0%", "100%"])


def test_means_over_the_grid_of_old_records_keep_their_meaning(tmp_path):
    """Until 0.2 `passkey_mean` was over the whole grid; now it is within the context."""
    means = [score(0.5, 512, "passkey_mean", context=512), score(0.5, 1024, "passkey_mean")]
    text = report([write_eval(tmp_path / "run", *means)], tmp_path / "page.html").read_text()
    rows = [cells for cells in re.findall(r"<tr>(.*?)</tr>", text) if "passkey" in cells]
    assert [re.findall(r"passkey_\w+|512|1,024", row) for row in rows] == [
        ["passkey_mean", "512"],
        ["passkey_grid_mean", "1,024"],
    ]


def test_equal_means_of_passkeys_are_shown_once(tmp_path):
    means = [score(0.5, 512, "passkey_mean", context=512), score(0.5, 512, "passkey_grid_mean")]
    text = report([write_eval(tmp_path / "run", *means)], tmp_path / "page.html").read_text()
    assert "<td>any text passkey_mean</td>" in text
    assert "passkey_grid_mean" not in text


def test_baseline_scores_of_several_runs_are_merged_unless_they_differ(tmp_path):
    def base(*scores):
        return {"model": "base", "scores": scores}

    runs = [
        write_eval(tmp_path / "a" / "run", score(9.0, 256), vs=base(score(20.0, 256))),
        write_eval(
            tmp_path / "b" / "run", score(8.0, 512), vs=base(score(20.0, 256), score(30.0, 512))
        ),
        write_eval(
            tmp_path / "c" / "run",
            score(7.0, 512),
            vs=base(score(31.0, 512)),
            notes=["other <tokens>"],
        ),
    ]
    gate = {"gate": "ppl@512<=6", "holds": False, "told": "ppl@512 is 7.00"}
    runs.append(write_eval(tmp_path / "d" / "gated", score(7.0, 512), gates=[gate]))
    text = report(runs, tmp_path / "page.html").read_text()
    (figure,) = titled(text, "Perplexity")
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]} == {
        "one (a/run)": ([256], [9.0]),
        "one (b/run)": ([512], [8.0]),
        "one (c/run)": ([512], [7.0]),
        "one (d/gated)": ([512], [7.0]),
        "base": ([256, 512], [20.0, 30.0]),
        "base (baseline of one (c/run))": ([512], [31.0]),
    }
    assert "<p>one (c/run): other &lt;tokens&gt;</p>" in text
    assert '<li class="wrong"><b>fails</b> one (d/gated): ppl@512 is 7.00</li>' in text


def test_a_line_goes_from_the_shortest_length_to_the_longest(tmp_path):
    """Of a baseline that one run measured at the long lengths and the next at the short ones."""
    parts = {"long": (1024, 2048), "short": (256, 512)}
    runs = [
        write_eval(
            tmp_path / name,
            *(score(9.0, length) for length in lengths),
            vs={"model": "base", "scores": [score(length / 64, length) for length in lengths]},
        )
        for name, lengths in parts.items()
    ]
    text = report(runs, tmp_path / "page.html").read_text()
    (figure,) = titled(text, "Perplexity")
    (base,) = (trace for trace in figure["data"] if trace["name"] == "base")
    assert (base["x"], base["y"]) == ([256, 512, 1024, 2048], [4.0, 8.0, 16.0, 32.0])
    (axes,) = farspan.compare(runs, tmp_path / "table.md").plot().axes
    (line,) = (line for line in axes.lines if str(line.get_label()).startswith("base"))
    assert line.get_xdata().tolist() == [256, 512, 1024, 2048]


def test_axis_has_ticks_and_is_not_stretched_by_intervals(tmp_path):
    near = report(
        [write_eval(tmp_path / "near", score(25.0, 256), score(30.0, 512))], tmp_path / "page.html"
    )
    assert "type" not in titled(near.read_text(), "Perplexity")[0]["layout"]["yaxis"]
    far = report(
        [write_eval(tmp_path / "far", score(25.0, 256), score(300.0, 512, high=3.4e32))],
        tmp_path / "2.html",
    )
    (figure,) = titled(far.read_text(), "Perplexity")
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert max(figure["data"][0]["error_y"]["array"]) <= 9 * 300
    assert '<td class="number">300.0–3.4e+32</td>' in far.read_text()


def test_lab_shows_the_chosen_learning_rate(tmp_path):
    def cell(lr: float, seed: int, chosen_by: float, right: int) -> dict:
        counts = {"in_range": {"2": [4, 4], "10": [right, 4]}, "beyond": {"11": [0, 4]}}
        settings = {
            "task": "copy",
            "encoding": "none",
            "size": "small",
            "scratchpad": "none",
            "lr": lr,
            "seed": seed,
        }
        return {**settings, "chosen_by": chosen_by, **counts}

    cells = [
        cell(1e-3, 0, 0.5, 1),
        cell(1e-3, 1, 0.5, 1),
        cell(2e-3, 0, 0.9, 2),
        cell(2e-3, 1, 0.8, 4),
    ]
    ranks = [{"encoding": "none", "reciprocal": 1.0, "tasks": 1}]
    of_all = [{"encoding": "t5", "reciprocal": 0.5, "tasks": 2}]
    (tmp_path / "lab").mkdir()
    record = {"command": "lab run", "learned": 0, "models": 4, "ranks": ranks, "cells": cells}
    record["ranks_of_all"] = of_all
    (tmp_path / "lab" / "record.json").write_text(json.dumps(record))
    text = report([tmp_path / "lab"], tmp_path / "page.html").read_text()
    (figure,) = titled(text, "lab: copy, small")
    assert figure["data"][0]["x"] == [2, 10, 11]
    assert figure["data"][0]["y"] == [1.0, 0.75, 0.0]
    assert [mark["x0"] for mark in figure["layout"]["shapes"]] == [10]
    assert "0 of 4 models learned their task" in text
    record["learnt"] = record.pop("learned")  # as in records of 0.1
    (tmp_path / "lab" / "record.json").write_text(json.dumps(record))
    assert report([tmp_path / "lab"], tmp_path / "earlier.html").read_text() == text
    numbers = '<td class="number">{:.3f}</td><td class="number">{}</td>'
    assert "<td>learned</td><td>none</td>" + numbers.format(1, 1) in text
    assert "<td>all</td><td>t5</td>" + numbers.format(0.5, 2) in text


def test_study_shows_every_method_and_gaps_for_nan(written):
    (training,) = titled(written, "Training loss")
    assert training["data"][0]["y"] == [5.5, None, 5.25]
    books, other = titled(written, "study: small for 2×")
    assert {trace["name"]: trace["y"] for trace in books["data"]} == {
        "as trained": [3.5, 8.5],
        "uniform": [4.0, 5.0],
    }
    assert {trace["name"]: trace["y"] for trace in other["data"]} == {
        "as trained": [3.5, 9.5],
        "uniform": [3.75, None],
    }
    (scales,) = titled(written, "the best λ̂ by position")
    assert scales["data"][0]["y"] == [1.0, 1.25]


def test_runs_with_the_same_name_get_distinct_names(training, tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "training").mkdir(parents=True)
        for file in ("record.json", "metrics.jsonl"):
            (tmp_path / place / "training" / file).write_text((training / file).read_text())
    out = report(
        [tmp_path / "one" / "training", tmp_path / "two" / "training"], tmp_path / "page.html"
    )
    (figure,) = titled(out.read_text(), "Training loss")
    assert [trace["name"] for trace in figure["data"]] == ["one/training", "two/training"]


def test_study_of_only_variants_shows_them(tmp_path):
    cell = {"model": "small", "factor": 2, "seed": 0, "train_length": 64, "positions": [32, 96]}
    cells = [
        {**cell, "method": f"headscale:search.init={init}", "loss": {"books": [init, 2.0]}}
        for init in (1, 3)
    ]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "results.json").write_text(json.dumps({"cells": cells, "grids": []}))
    text = report([tmp_path / "study"], tmp_path / "page.html").read_text()
    (figure,) = titled(text, "study: small for 2×")
    assert [trace["y"] for trace in figure["data"]] == [[1.0, 2.0], [3.0, 2.0]]


def test_format_number_is_short_and_never_rounds_to_zero():
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
    assert {value: format_number(value) for value in shown} == shown
    assert format_number(1_234_567) == "1,234,567"


def test_growing_scales_are_plotted_at_their_final_value():
    """All heads start at 1 and differ in how λ̂ grows with length."""
    entropy, slope = np.array([[1.0, 2.0, 3.0]]), torch.tensor([[0.1, 0.2, 0.4]])
    curves = SimpleNamespace(
        windowed=frozenset(),
        positions=np.arange(1.0, 129),
        length=128,
        loss=np.ones(128),
        entropy=np.ones(128),
        # Before the last eighth, the heads have other entropies.
        heads={0: np.where(np.arange(128) < 112, 9 - entropy.T, entropy.T)},
    )
    scales = Scales((0,), torch.ones(1, 3), slope, "log", 32)
    diagnosis = SimpleNamespace(
        curves=curves,
        scales=scales,
        label="model",
        train_length=32,
        uniform=None,
        heads=3,
        distracted_heads=[],
        loss_knee=None,
        entropy_knee=None,
        smooth_loss=curves.loss,
        smooth_entropy=curves.entropy,
    )
    (points,) = diagnosis_figures([diagnosis])["scale_against_entropy"].axes[0].collections
    assert np.allclose(
        points.get_offsets(), np.stack((entropy[0], 1 + slope[0].numpy() * math.log(4)), 1)
    )
    level = replace(scales, slope=torch.full((1, 3), 0.2))
    assert "scale_against_entropy" not in diagnosis_figures(
        [SimpleNamespace(**{**vars(diagnosis), "scales": level})]
    )

    # A layer may have fewer heads than the table has columns.
    wider = Scales((0,), torch.ones(1, 5), torch.nn.functional.pad(slope, (0, 2)), "log", 32)
    wide = SimpleNamespace(**{**vars(diagnosis), "scales": wider})
    (panel,) = diagnosis_figures([wide])["scale_against_entropy"].axes
    assert np.allclose(panel.collections[0].get_offsets(), points.get_offsets())


def test_loss_at_a_position_is_the_same_everywhere(capsys):
    """In benchmarks/heldout.py, a study and a diagnosis: the mean over the quarter before it."""
    spec = importlib.util.spec_from_file_location("heldout", ROOT / "benchmarks" / "heldout.py")
    heldout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(heldout)
    curve, positions = np.arange(1.0, 512), np.arange(1, 512)  # the loss equals the position
    passkeys = {str(round(64 * mark)): 0.5 for mark in heldout.MARKS}
    heldout.show(
        {
            "label": "m",
            "train_length": 64,
            "knee": None,
            "positions": positions,
            "loss": {"text": curve},
            "passkey": passkeys,
        }
    )
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("text"))
    curves = Curves(positions, curve, {}, windows=1, length=512, every=1)
    marks = [round(64 * mark) for mark in heldout.MARKS]
    assert printed.split()[1:] == [f"{curves.loss_at(mark, train_length=64):.3f}" for mark in marks]
    cell = {"train_length": 64, "positions": positions}
    assert [mean_at(cell, curve, mark) for mark in marks] == [
        curves.loss_at(mark, train_length=64) for mark in marks
    ]
    assert mean_at(cell, curve, 32) == np.mean(range(17, 33))


def test_missing_and_corrupt_records_raise_one_sentence(training, tmp_path):
    with pytest.raises(
        FarspanError, match="has no record.json; choose folders written by diagnose, extend, eval"
    ):
        report([training.parent], tmp_path / "page.html")
    with pytest.raises(FarspanError, match="nowhere was not found; check the path"):
        report([tmp_path / "nowhere"], tmp_path / "page.html")
    with pytest.raises(
        FarspanError, match="is a folder; choose a file name, for example .*report.html"
    ):
        report([training], tmp_path)
    with pytest.raises(FarspanError, match="end the file name .*record.json in .html"):
        report([training], training / "record.json")
    (tmp_path / "broken").mkdir()
    for content, message in (
        ("{", "is not valid JSON"),
        ('{"when": 1}', "has no command"),
        (
            '{"command": "eval", "scores": [{}]}',
            "record in .*broken is invalid .*: 'metric'.; repeat the run",
        ),
    ):
        (tmp_path / "broken" / "record.json").write_text(content)
        with pytest.raises(CorruptError, match=message):
            report([training, tmp_path / "broken"], tmp_path / "page.html")
    (tmp_path / "broken" / "record.json").write_text('{"command": "pretrain"}')
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with pytest.raises(CorruptError, match="metrics.jsonl, line 2"):
        report([tmp_path / "broken"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_missing_plotly_names_the_package_to_install(training, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(FarspanError, match=r"pip install '.\[report\]' in the clone"):
        report([training], tmp_path / "page.html")


def test_folder_name_that_is_not_utf8_is_accepted(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "record.json").write_text('{"command": "export"}')
    assert "caf?" in report([folder], tmp_path / "page.html").read_text(encoding="utf-8")


def test_lab_length_without_examples_is_a_corrupt_record(tmp_path):
    settings = {
        "task": "copy",
        "encoding": "none",
        "size": "small",
        "scratchpad": "none",
        "lr": 1e-3,
        "chosen_by": 1.0,
    }
    cell = {**settings, "in_range": {"2": [0, 0]}, "beyond": {}}
    record = {"command": "lab run", "learned": 0, "models": 1, "ranks": [], "cells": [cell]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(CorruptError, match="ZeroDivisionError"):
        report([tmp_path], tmp_path / "page.html")


def test_unfinished_training_is_shown(training, tmp_path):
    (tmp_path / "metrics.jsonl").write_text((training / "metrics.jsonl").read_text())
    (figure,) = titled(report([tmp_path], tmp_path / "page.html").read_text(), "Training loss")
    assert figure["data"][0]["x"] == [1, 2, 3]


def test_command_prints_the_page_and_runs_without_figures(training, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "record.json").write_text('{"command": "export"}')
    folders = [str(training), str(tmp_path / "export")]
    result = CliRunner().invoke(app, ["report", *folders, "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "page.html" in result.output
    assert "export is a run of export, which has no figures" in result.output.replace("\n", " ")
    assert (tmp_path / "page.html").stat().st_size > 1e6
