"""The table of costs, tiny and on a CPU: its rows, its floors, and the rows that have no time."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
OPTIONS = ["--shape", "tiny", "--micro-batch", "128", "--own-length", "128", "--rounds", "1"]
PEAK = 1e12
HEAD = 64 * 4096  # weights of the tiny shape's head


@pytest.fixture
def run_costs(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    costs = importlib.import_module("costs")
    monkeypatch.setattr(costs, "peak_flops", lambda: PEAK)

    def run(*options: str, failing: str = "") -> tuple[list[dict], list[list[str]]]:
        if failing:
            monkeypatch.setattr(costs.WORKS[failing][0], "run", out_of_memory)
        out = tmp_path / "costs.json"
        monkeypatch.setattr(sys, "argv", ["costs.py", *OPTIONS, *options, "--out", str(out)])
        costs.main()
        table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
        cells = [[cell.strip() for cell in line] for line in table]
        return json.loads(out.read_text())["rows"], cells

    return run


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.long
def test_costs_of_all_work(run_costs):
    rows, table = run_costs("--lengths", "256")
    flops = {(row["work"], row["length"]): row["flops"] / row["tokens"] for row in rows}
    names = ("diagnose", "perplexity", "passkeys", "pretrain", "headscale", "conversion")
    assert list(flops) == [(name, length) for name in names for length in (128, 256)]
    for length in (128, 256):
        forward = flops["diagnose", length]
        assert flops["pretrain", length] == pytest.approx(3 * forward)
        assert flops["conversion", length] == pytest.approx(4 * forward)  # windows of 512
        assert 2 * forward < flops["headscale", length] < 3 * forward
        # half the tokens of a window have logits; those of passkeys are not counted
        assert flops["perplexity", length] == pytest.approx(forward - HEAD)
        assert flops["passkeys", length] == pytest.approx(forward - 2 * HEAD)
    first = rows[0]
    assert table[0][:3] == ["**diagnose**", "128", "128"]
    assert float(table[0][6].removesuffix(" ms")) == round(1e3 * first["flops"] / PEAK, 1)
    assert float(table[0][7]) == round(first["seconds"] * PEAK / first["flops"], 2)
    growth = rows[1]["seconds"] / 256 / (first["seconds"] / 128)
    assert [table[0][4], table[1][4]] == ["1.00", f"{growth:.2f}"]


@pytest.mark.long
def test_shared_text_of_passkeys_counts_once(run_costs):
    """Of 1,024 tokens at depths 0, 0.5 and 1: the last two share 512 tokens."""
    rows, _ = run_costs("--only", "diagnose,passkeys", "--own-length", "1024", "--lengths", "512")
    costs = {(row["work"], row["length"]): row for row in rows}
    half, whole = (costs["diagnose", length]["flops"] - 2 * length * HEAD for length in (512, 1024))
    assert costs["passkeys", 1024]["tokens"] == 3 * 1024 - 512
    assert costs["passkeys", 1024]["flops"] == pytest.approx(3 * whole - half)


def test_rows_without_memory_or_time(run_costs):
    options = ["--only", "diagnose,perplexity", "--lengths", "256", "--seconds", "0"]
    rows, table = run_costs(*options, failing="diagnose")
    notes = [row.get("note") for row in rows]
    assert notes == ["out of memory", "no time left", None, "no time left"]
    assert table[0] == ["**diagnose**", "128", "", "out of memory", "", "", "", ""]
