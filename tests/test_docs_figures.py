"""Figures of the documentation: each is drawn from records, or it says why not."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def drawing():
    path = ROOT / "benchmarks" / "draw_figures.py"
    spec = importlib.util.spec_from_file_location("draw_figures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_is_drawn_by_the_command_or_says_what_draws_it(drawing):
    files = {path.name for path in (DOCS / "figures").iterdir()}
    assert files == drawing.FIGURES.keys() | drawing.WITHOUT_RECORDS.keys()
    assert not drawing.FIGURES.keys() & drawing.WITHOUT_RECORDS.keys()


def test_pages_show_every_figure_and_name_every_record():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    for folder in ("figures", "records"):
        named = set(re.findall(rf"{folder}/([\w.-]+\.\w+)", text))
        assert named == {path.name for path in (DOCS / folder).iterdir() if path.is_file()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_figure_of_the_readme_has_the_recorded_values(drawing, scheme):
    left, right = drawing.hero(scheme).axes
    cells = drawing.swan_cells().values()
    for line, curve, cell in zip(right.lines, left.lines, cells, strict=False):
        assert line.get_xdata().tolist() == [int(length) for length in cell["passkey"]]
        assert line.get_ydata().tolist() == list(cell["passkey"].values())
        last = np.array(cell["loss"]["books_val"])[np.array(cell["positions"]) > 2**14.75]
        assert curve.get_ydata()[-1] == pytest.approx(last.mean())


def test_a_contributed_run_becomes_a_page(drawing, tmp_path):
    cell = {"model": "mine", "factor": 2, "seed": 0, "train_length": 64, "target": 128}
    cell |= {"positions": [32, 96], "loss": {"books": [3.5, 8.5]}, "entropy": [1.0, 2.0]}
    cell |= {"passkey": {"64": 1.0}, "loss_knee": None, "entropy_knee": 70.0}
    results = tmp_path / "my-run" / "results.json"
    results.parent.mkdir()
    cells = [{**cell, "method": "none", "factor": 1}, {**cell, "method": "yarn"}]
    results.write_text(json.dumps({"cells": cells, "grids": []}))
    text = drawing.write_run(results, tmp_path).read_text()
    assert text.startswith("# my-run\n\n![loss by position](my-run-loss.png)\n\n## Loss on books")
    assert "| mine | yarn | 2× |" in text
    assert (tmp_path / "my-run-loss.png").stat().st_size > 1000
