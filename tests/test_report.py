"""A report: every record becomes figures and tables of one page, which asks no network for anything."""

from __future__ import annotations

import html.parser
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import farspan
from farspan.attention.patch import Patch
from farspan.cli import app
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.report import page
from farspan.workflows import laboratory
from farspan.workflows.evaluating import evaluate
from farspan.workflows.extending import Extension, extend
from farspan.workflows.reporting import report

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
    few = replace(Extension(), choose_windows=2, report_windows=2, passkeys=0)
    farspan.diagnose(model, folder / "text.txt", [64, 256], windows=2, out=folder / "diagnosis")
    extend(model, 128, folder / "patch", "uniform", data=folder / "text.txt", recipe=few)
    options = {"data": folder / "text.txt", "lengths": (192, 256), "stride": 64, "windows": 2}
    evaluate(folder / "patch", "quick", folder / "scores", vs=model, **options)
    changes = ["train.steps=3", "train_examples=200", "test_examples=20", "lrs=[1e-3, 2e-3]"]
    laboratory.run("lab-tiny", changes, folder / "lab", device="cpu")
    (folder / "training").mkdir()
    (folder / "training" / "record.json").write_text('{"command": "pretrain"}')
    steps = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": 5.25}]
    (folder / "training" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    cell = {"model": "small", "method": "uniform", "factor": 2, "seed": 0, "train_length": 64, "positions": [32, 96]}
    (folder / "study").mkdir()
    cells = [{**cell, "loss": {"books": [3.5, 4.5], "pg19": [3.25, None]}}]
    (folder / "study" / "results.json").write_text(json.dumps({"cells": cells, "grids": []}))
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
    titles = re.findall("<h2>(.*?)</h2>", written)
    assert titles == [title for title, _ in page.SECTIONS.values()]


def test_names_are_text_and_not_markup(written):
    drawn = [trace["name"] for figure in titled(written, "Loss by position") for trace in figure["data"]]
    assert any("model <b>" in name for name in drawn), "in JSON it is as it was"
    assert "<b>" not in re.sub(r'<script type="application/json">.*?</script>', "", own_part(written))


def test_curves_are_those_of_the_records(runs, written):
    model = json.loads((runs / "diagnosis" / "record.json").read_text())["models"][0]
    (entropy,) = titled(written, "Mean attention entropy")
    assert entropy["data"][0]["x"] == model["positions"]
    assert np.allclose(np.mean(entropy["data"][0]["y"]), np.mean(model["entropy"]), rtol=0.05), "smoothed, not moved"
    assert [mark["x0"] for mark in entropy["layout"]["shapes"]] == [64]
    (grown,) = titled(written, "entropy of heads at the end")
    heads = model["entropy_by_head"]["1"]
    at_the_length = np.interp(64, model["positions"], heads[0])
    assert np.allclose(grown["data"][0]["z"][1][0], heads[0][-1] - at_the_length)


def test_a_patch_shows_what_it_changed(runs, written):
    record = json.loads((runs / "patch" / "record.json").read_text())
    (curves,) = titled(written, "patch: loss by position, uniform")
    assert [trace["name"] for trace in curves["data"]] == ["before", "after"]
    assert np.allclose(np.mean(curves["data"][0]["y"]), np.mean(record["loss_by_position"]["before"]), rtol=0.05)
    (scales,) = titled(written, "λ̂ of each head")
    assert np.allclose(scales["data"][0]["z"], Patch.load(runs / "patch").scales.base)
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
    told = [score["value"] for score in record["scores"] if score["metric"] == "passkey_at_depth"]
    assert sorted(np.ravel(grids[0]["data"][0]["z"])) == sorted(told)


def test_the_laboratory_shows_the_rate_that_was_chosen(runs, written):
    cells = json.loads((runs / "lab" / "record.json").read_text())["cells"]
    assert len({cell["lr"] for cell in cells}) == 2
    (figure,) = titled(written, "lab: ")
    assert [trace["name"] for trace in figure["data"]] == list(dict.fromkeys(cell["encoding"] for cell in cells))
    for trace in figure["data"]:
        own = [cell for cell in cells if cell["encoding"] == trace["name"]]
        best = max(own, key=lambda cell: cell["chosen_by"])
        counts = {**best["in_range"], **best["beyond"]}
        assert trace["y"] == [counts[str(length)][0] / counts[str(length)][1] for length in trace["x"]]


def test_what_is_no_number_is_a_gap(written):
    (training,) = titled(written, "Loss in training")
    assert training["data"][0]["y"] == [5.5, None, 5.25]
    books, other = titled(written, "study: small")
    assert books["data"][0]["y"] == [3.5, 4.5]
    assert other["data"][0]["y"] == [3.25, None]


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "training").mkdir(parents=True)
        for file in ("record.json", "metrics.jsonl"):
            (tmp_path / place / "training" / file).write_text((runs / "training" / file).read_text())
    out = report([tmp_path / "one" / "training", tmp_path / "two" / "training"], tmp_path / "page.html")
    (figure,) = titled(out.read_text(), "Loss in training")
    assert [trace["name"] for trace in figure["data"]] == ["one/training", "two/training"]


def test_a_folder_without_a_record_and_a_broken_one_are_sentences(runs, tmp_path):
    with pytest.raises(FarspanError, match="holds no record.json; give folders that diagnose, extend, eval"):
        report([runs], tmp_path / "page.html")
    (tmp_path / "broken").mkdir()
    for content, message in (
        ("{", "is not valid JSON"),
        ('{"when": 1}', "names no command"),
        ('{"command": "eval", "scores": [{}]}', "is not as farspan writes it .KeyError: 'metric'.; make it again"),
    ):
        (tmp_path / "broken" / "record.json").write_text(content)
        with pytest.raises(CorruptError, match=message):
            report([tmp_path / "broken"], tmp_path / "page.html")
    (tmp_path / "broken" / "record.json").write_text('{"command": "pretrain"}')
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with pytest.raises(CorruptError, match="metrics.jsonl, line 2"):
        report([tmp_path / "broken"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_without_plotly_the_way_out_is_told(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(FarspanError, match=r"pip install 'farspan\[report\]'"):
        report([runs / "training"], tmp_path / "page.html")


def test_the_command_tells_where_the_page_is(runs, tmp_path):
    done = CliRunner().invoke(app, ["report", str(runs / "training"), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "page.html" in done.output
    assert (tmp_path / "page.html").stat().st_size > 1e6
