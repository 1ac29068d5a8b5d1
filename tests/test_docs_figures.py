"""Figures and tables of the documentation: drawn from records, or listed with the reason."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import chromium

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def benchmark(name: str):
    """A script of benchmarks/, which imports its neighbors."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def drawing():
    return benchmark("draw_figures")


@pytest.fixture(scope="module")
def tables():
    return benchmark("draw_tables")


def test_every_figure_is_drawn_by_the_command(drawing):
    files = {path.name for path in (DOCS / "figures").iterdir()}
    assert files == drawing.FIGURES.keys() | drawing.SCREENSHOTS.keys()
    assert not drawing.FIGURES.keys() & drawing.SCREENSHOTS.keys()


@pytest.mark.skipif(chromium() is None, reason="no chromium")
@pytest.mark.long
@pytest.mark.parametrize("name", ["report.png"])
def test_the_picture_of_the_report_shows_its_records(drawing, name):
    runs, size = drawing.SCREENSHOTS[name]
    with Image.open(io.BytesIO(drawing.screenshot(runs, size))) as picture:
        assert picture.size == size
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, "it is not blank"


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


def test_the_tables_of_every_page_are_those_of_the_records(tables):
    blocks = [
        (page, match)
        for page in DOCS.rglob("*.md")
        for match in tables.BLOCK.finditer(page.read_text())
    ]
    for page, match in blocks:
        block = match[0]
        assert tables.with_tables(block) == block, f"{page}: run `make figures`"
    assert {match[2].split()[0] for _, match in blocks} == tables.TABLES.keys()


LINE = {
    "label": "mine",
    "group": "64k",
    "losses": {"base": {"8": [1.0, 2.0]}, "patch": {"8": [1.0, 2.0], "16": [1.0, 3.0]}},
    "passkeys": {"n": 20, "base": {"8": 1.0}, "patch": {"8": 0.95, "16": 0.5}},
}


def test_a_new_line_is_a_new_row(tables, monkeypatch):
    lines = [LINE, {**LINE, "label": "other", "group": "32k"}]
    monkeypatch.setattr(tables, "records", lambda _: lines)
    page = "<!-- table: losses runs#64k -->\n<!-- end -->\n\n  <!-- table: passkeys runs -->\nold\n"
    text = tables.with_tables(page + "  <!-- end -->\n")
    assert "| loss minus base | windows | 8 | 16 |\n" in text
    assert text.count("| mine | 2 | 0 | +0.500 ± 6.353 |\n") == 1  # t(1) · √½ / √2
    assert text.count("other") == 1
    assert "\n  | base | 20 | 100% |  |\n  | mine | 20 | 95% | 50% |\n  | other | 20 |" in text
    assert "old" not in text
    assert tables.with_tables(text) == text


def test_cells_are_compared_on_the_texts_of_the_mark(tables, monkeypatch):
    """With bounds over documents where the cells name them: two windows of one have no bound."""
    cell = {"passkey": {}, "train_length": 8, "documents": {"books": [0, 0, 1, 1], "math": [7, 7]}}
    base = {"books": {"8": [1.0, 1.0, 2.0, 2.0]}, "math": {"8": [5.0, 5.0]}}
    own = {"books": {"8": [1.5, 2.5, 2.5, 3.5]}, "math": {"8": [5.0, 7.0]}}
    lines = [
        {**cell, "label": "trained", "method": "none", "same_tokens": base},
        {**cell, "label": "mine", "method": "swan", "same_tokens": own},
    ]
    monkeypatch.setattr(tables, "records", lambda _: lines)

    def row(source: str) -> str:
        text = tables.with_tables(f"<!-- table: losses {source} -->\n<!-- end -->\n")
        return next(line for line in text.splitlines() if "mine" in line)

    assert row("run@books") == "| mine | 4 | +1.000 ± 0.000 |", "both books lose 1 on average"
    assert row("run@math") == "| mine | 2 | +1.000 |"
    assert row("run").startswith("| mine | 6 | +1.000 ±")
    assert row("run@books+math") == row("run")
    for each in lines:  # of earlier releases
        del each["documents"]
    assert row("run@books") == "| mine | 4 | +1.000 ± 0.919 |"  # t(3) · √⅓ / 2
    with pytest.raises(SystemExit, match="run has no text code; choose from books, math"):
        row("run@code")


def test_cells_are_paired_with_the_cell_of_a_method_at_the_same_context(tables, monkeypatch):
    shared = {"train_length": 8, "passkey": {}, "documents": {"a": [0, 0, 1]}}
    losses = {"none": (3.0, 3.0, 3.0), "swan": (2.0, 3.0, 4.0), "swan:x": (2.5, 3.5, 4.25)}
    lines = [
        {**shared, "label": f"row {method}", "method": method}
        | {"same_tokens": {"a": {"8": values, "16": [2 * value for value in values]}}}
        for method, values in losses.items()
    ]
    monkeypatch.setattr(tables, "records", lambda _: lines)
    header, rows = tables.paired("runs", "swan")
    assert header == ["loss minus `swan`", "windows", "8", "16"]
    ((name, windows, near, far),) = rows
    assert (name, windows) == ("row swan:x", "3")
    assert near.startswith("+0.417 ± ")  # (0.5 + 0.5 + 0.25) / 3
    assert far.startswith("+0.833 ± ")


def test_variants_of_a_line_are_rows_by_name(tables, monkeypatch):
    shares = {"n": 10, "patch": {"8": 1.0}, "slope 0.1": {"8": 0.5}}
    monkeypatch.setattr(tables, "records", lambda _: [{**LINE, "passkeys": shares}])
    assert tables.passkeys("runs")[1] == [["mine", "10", "100%"], ["mine, slope 0.1", "10", "50%"]]


def test_scores_of_ruler_are_averaged_where_all_tasks_are(tables, monkeypatch):
    """A mean of tasks, with bounds from the Wilson intervals 0.095 to 0.905 and 0.342 to 1."""
    scores = {"vt": {"8": [0.0, 1.0]}, "cwe": {"8": [1.0, 1.0], "16": [0.25, 0.25]}}
    lines = [{"label": "base", "scores": {"vt": {"8": [1.0]}, "cwe": {"8": [0.0]}}}]
    lines += [{"label": "mine", "scores": scores}]
    monkeypatch.setattr(tables, "records", lambda _: lines)
    header, (_, row) = tables.ruler("runs")
    assert header == ["average of 11 tasks", "8"]
    assert row[0] == "mine"
    assert row[1].startswith("75.0 (")
    low, high = map(float, row[1][6:-1].split("–"))
    assert 9 < low < 75 < high < 100
    assert tables.ruler_tasks("runs") == (
        ["task", "8", "16"],
        [["`vt`", "100 / 50", "– / –"], ["`cwe`", "0 / 100", "– / 25"]],
    )


def test_losses_of_a_study_are_bold_at_the_target_with_passkeys_beside_the_first_text(
    tables, monkeypatch
):
    cell = {"label": "mine", "model": "m", "method": "x", "seed": 0, "train_length": 4}
    cell |= {"factor": 2, "target": 8, "positions": [2.0, 4.0, 6.0, 8.0]}
    cell |= {"loss": {"a": [4.0, 3.0, 2.0, 1.0], "b": [8.0, 7.0, 6.0, 5.0]}}
    cell |= {"passkey": {"4": 1.0, "8": 0.5}}
    monkeypatch.setattr(tables, "records", lambda _: [cell])
    header, rows = tables.study_losses("runs", "a")
    assert header == ["a", "target", "2", "4", "8", "passkey 4/8"]
    assert rows == [["mine", "2×", "4.00", "3.00", "**1.00**", "1.00/.50"]]
    assert tables.study_losses("runs", "b")[1] == [["mine", "2×", "8.00", "7.00", "**5.00**"]]


def test_searches_are_compared_with_the_mean_of_seeds_of_their_own_method_and_factor(
    tables, monkeypatch
):
    def cell(method: str, factor: int, losses: list[float], group: str) -> dict:
        shared = {"label": method, "model": "m", "train_length": 4, "seed": 0, "group": group}
        curve = {"positions": [2.0, 4.0, 6.0, 8.0], "loss": {"a": losses}}
        return {**shared, **curve, "method": method, "factor": factor, "target": 4 * factor}

    cells = [
        cell("headscale", 2, [1.0, 1.0, 1.0, 1.0], "study"),
        cell("headscale", 2, [1.0, 1.0, 1.0, 3.0], "study"),
        cell("headscale", 1, [9.0, 9.0, 9.0, 9.0], "study"),
        cell("headlog", 2, [9.0, 9.0, 9.0, 9.0], "study"),
        cell("headscale:search.steps=50", 2, [1.0, 1.0, 2.0, 1.0], "short"),
    ]
    monkeypatch.setattr(tables, "records", lambda _: cells)
    header, rows = tables.shorter_searches("runs#study", "runs#short")
    assert header == ["search", "target", "all, a", "at, a"]
    assert rows == [["headscale:search.steps=50", "2×", "+0.000", "−1.000"]]


def test_perplexities_beside_the_paper_are_those_of_one_model(tables, monkeypatch):
    def cell(model: str, loss: float) -> dict:
        shared = {"label": "uniform", "method": "uniform", "factor": 4, "train_length": 4}
        return {**shared, "model": model, "positions": [2.0, 3.4], "loss": {"a": [loss, loss]}}

    cells = [cell("small-nope", 0.0), cell("small-rope", 5.0)]
    monkeypatch.setattr(tables, "records", lambda _: cells)
    monkeypatch.setattr(tables, "WANG_2024", {("small-nope", "uniform", 4): "19.0"})
    _, rows = tables.paper_perplexities("runs", "a")
    assert rows == [["uniform, for 4×", "1", "19.0"]]


@pytest.mark.parametrize(
    ("command", "error"),
    [("loses runs", "no table 'loses'"), ("losses swan-smollm2#65k", "has the group '65k'")],
)
def test_a_mark_without_table_or_records_is_an_error(tables, command, error):
    with pytest.raises(SystemExit, match=error):
        tables.with_tables(f"<!-- table: {command} -->\n<!-- end -->")


def test_lines_without_label_or_base_are_errors(tables, monkeypatch):
    cells = [{"same_tokens": {}, "passkey": {}, "method": "swan", "train_length": 8}]
    monkeypatch.setattr(tables, "records", lambda _: cells)
    with pytest.raises(SystemExit, match="runs.jsonl has no label"):
        tables.losses("runs")
    cells[0]["label"] = "mine"
    with pytest.raises(SystemExit, match="runs has no cell with the method none"):
        tables.losses("runs")
    cells *= 2
    cells = [{**cell, "method": "none"} for cell in cells]
    monkeypatch.setattr(tables, "records", lambda _: cells)
    with pytest.raises(SystemExit, match="runs has 2 cells with the method none"):
        tables.losses("runs")


def test_a_group_without_a_base_is_compared_with_that_of_its_file(tables, monkeypatch):
    cell = {"passkey": {}, "train_length": 8}
    lines = [
        {**cell, "label": name, "group": group, "method": method, "same_tokens": {"a": losses}}
        for name, group, method, losses in (
            ("trained", "base", "none", {"8": [1.0], "16": [9.0]}),
            ("mine", "own", "swan", {"8": [1.5], "16": [3.0]}),
        )
    ]
    monkeypatch.setattr(tables, "records", lambda _: lines)
    header, rows = tables.losses("runs#own")
    assert header == ["loss minus base", "windows", "8", "16"]
    assert rows == [["mine", "1", "+0.500", "+2.000"]]
    assert [row[0] for row in tables.losses("runs")[1]] == ["trained", "mine"]


def lab_line(task, encoding, right):
    counts = {"in_range": {"2": [10, 10]}, "beyond": {"4": [right, 10]}}
    line = {"task": task, "encoding": encoding, "lr": 1e-3, "seed": 0, "loss": 0.1, "chosen_by": 1}
    return {**line, **counts}


def test_a_table_of_the_lab_joins_studies(tables, monkeypatch):
    """Encodings of a second study are more columns."""
    files = {
        "grid": [lab_line("copy", "none", 9), lab_line("copy", "rotary", 1)],
        "later": [lab_line("copy", "fire", 5)],
    }
    monkeypatch.setitem(tables.lab_entries.__globals__, "records", files.__getitem__)
    header, rows = tables.lab_accuracy("grid", "later")
    assert header == ["task", "none", "rotary", "fire"]
    assert rows == [["copy", "**0.900**", "0.100", "0.500"]]
    header, (*_, all_models) = tables.lab_ranks("grid", "later")
    assert header == ["tasks", "models", "none", "rotary", "fire"]
    assert all_models == ["primitive", "all", "**1.000** (1)", "0.333 (1)", "0.500 (1)"]


def test_tables_by_hand_are_listed(tables):
    """Pages of results that have a table outside of the marks."""
    pages = {
        page.name
        for page in (DOCS / "results").glob("*.md")
        if re.search(r"^ *\|", tables.BLOCK.sub("", page.read_text()), re.MULTILINE)
    }
    listed = (DOCS / "records" / "README.md").read_text().split("## Tables by hand")[1]
    assert set(re.findall(r"results/([\w.-]+)\)", listed)) == pages


def test_the_mean_entropy_of_headscale_is_that_of_the_records(drawing):
    page = (DOCS / "results" / "extending.md").read_text()
    text = " ".join(page.split("**HeadScale has a higher mean entropy")[1].split("\n- ")[0].split())
    cells = [
        cell for cell in drawing.records("extend-small", "study") if cell.get("seed") is not None
    ]
    means, shares, ends = [], [], []
    for factor in (2, 4, 8):
        curves = {
            method: np.mean([c["entropy"] for c in cells if _is_cell(c, method, factor)], 0)
            for method in ("headscale", "uniform")
        }
        (positions, *_) = [
            np.array(c["positions"]) for c in cells if _is_cell(c, "uniform", factor)
        ]
        target = 512 * factor
        difference = curves["headscale"] - curves["uniform"]
        means.append(f"{difference[positions <= target].mean():.2f}")
        shares.append(f"{(difference[positions <= target] > 0).mean():.0%}")
        last = (positions <= target) & (positions > target - 128)
        ends.append(f"{-difference[last].mean():.2f}")
    for values in (means, shares, ends):
        assert "{}, {} and {}".format(*values) in text


def _is_cell(cell: dict, method: str, factor: int) -> bool:
    return (cell["model"], cell["method"], cell["factor"]) == ("small-nope", method, factor)


def test_records_that_were_copied_agree_with_their_tables(drawing, tables):
    """Of passkeys the means over depths, of distances those over layers, before rounding."""
    compared = (DOCS / "results" / "compared.md").read_text()
    for line in drawing.records("passkeys-small"):
        means = [sum(counts) / (10 * line["keys"]) for counts in line["retrieved"].values()]
        row = "/".join(f"{mean:.2f}".removeprefix("0") for mean in means)
        assert f"| {row} | {line['trained_on_passkeys']} |" in compared, line["label"]
    heads = (DOCS / "results" / "heads.md").read_text()
    pairs = [line for line in drawing.records("distance-small") if line["models"][0] == "NoPE"]
    for kind, name in (("nearest", "nearest pair"), ("matched", "heads matched")):
        (row,) = re.findall(rf"^\| {name}.*", heads, re.MULTILINE)
        shown = [float(number) for number in re.findall(r"0\.\d+", row)]
        means = [np.mean(line[kind]) for line in pairs]
        assert means == pytest.approx(shown, abs=0.0055)
