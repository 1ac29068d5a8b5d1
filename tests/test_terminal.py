"""What a person sees says what it knows, and says it once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from farspan import cli, terminal
from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.evals.scores import Score
from farspan.progress import bars
from farspan.terminal import show_evaluation, show_extension, size
from farspan.workflows.evaluating import Evaluated
from farspan.workflows.extending import Extended


@pytest.mark.parametrize(
    ("base", "told"),
    [
        (torch.full((2, 4), 1.11), "λ̂ 1.11 at any length, 8 heads in 2 layers"),
        (torch.tensor([[1.0, 1.2], [1.4, 1.6]]), "λ̂ 1.00 to 1.60, mean 1.30 at any length, 4 heads in 2 layers"),
    ],
)
def test_one_scale_is_told_as_one_number(capsys, base, told):
    patch = Patch("test", "", 1024, 512, Scales((0, 1), base))
    show_extension(Extended(patch, Path("p"), {"loss@512": 3.0}, {"loss@512": 2.9}, {}, 0.0, 1.0, ()))
    assert told in capsys.readouterr().out


def test_names_and_numbers_stay_whole_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "out_console", Console(width=80, highlight=False))
    curves = SimpleNamespace(loss_at=lambda length, span: 9.771)
    diagnosis = SimpleNamespace(
        label="runs/[small]/model λ̂=1.15",
        train_length=512,
        curves=curves,
        loss_knee=742,
        entropy_knee=10976,
        distracted_heads=[(0, 1)],
        heads=48,
        suggested_scale=2.67,
        verdict="Loss leaves its trend.",
    )
    terminal.show_diagnoses([diagnosis], [256, 512, 1024, 2048, 4096, 8192])
    said = capsys.readouterr().out
    assert "…" not in said
    assert "model " in said.splitlines()[1], "names have room"
    assert said.count("9.771") == 6
    rows = said.split("Loss leaves")[0].splitlines()[2:]
    assert "".join(row.split(" 9.771")[0].strip() for row in rows).startswith("runs/[small]/model")


def test_an_absurd_interval_leaves_room_for_names(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "out_console", Console(width=80, highlight=False))
    score = Score("perplexity", "ppl", 1024, 25_145.2, 1.0, 3.4e32, 512, {"task": "proofpile"})
    show_evaluation(Evaluated("nope-twin", "perplexity", (score,), Path("out")))
    said = capsys.readouterr().out
    assert "ppl proofpile" in said
    assert "25,145" in said
    assert "1.00–3.4e+32" in said


@pytest.mark.parametrize("width", [100, 80, 60])
def test_a_narrow_terminal_loses_columns_and_no_names(monkeypatch, capsys, width):
    monkeypatch.setattr(terminal, "out_console", Console(width=width, highlight=False))
    mine, base = (
        tuple(
            Score("perplexity", "ppl", at, value, 20.0, 24.5, 512, {"task": "proofpile-validation"})
            for at in (512, 1024)
        )
        for value in (22.1, 30.1)
    )
    show_evaluation(Evaluated("a", "perplexity", mine, Path("out"), base="b", base_scores=base))
    said = capsys.readouterr().out
    assert "…" not in said
    assert "proofpile-validation" in said
    assert said.count("22.10") == said.count("30.10") == said.count("0.734") == 2
    assert ("skipped" in said) == (width == 100)
    assert "95% interval" in said


def test_a_diagnosis_of_many_lengths_leaves_room_for_names(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "out_console", Console(width=80, highlight=False))
    diagnosis = SimpleNamespace(
        label="a-model-of-mine",
        train_length=512,
        curves=SimpleNamespace(loss_at=lambda length, span: 3.25),
        loss_knee=1000,
        entropy_knee=None,
        distracted_heads=[1],
        heads=8,
        suggested_scale=1.2,
        verdict="It fails.",
    )
    terminal.show_diagnoses([diagnosis], [8 * 2**power for power in range(10)])
    shown = capsys.readouterr().out
    assert "a-model-of" in shown
    assert "@4096" in shown, "the longest is always there"
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_names_with_brackets_are_shown_as_they_are(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with bars() as progress:
        progress("br[/x]", 2)(1, "m[red]y")
    assert "br[/x]" in capsys.readouterr().err


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=b.txt").write_text("text")
    assert cli.parse_data(["a=b.txt"]) == "a=b.txt"
    assert cli.parse_data(["a=c.txt"]) == {"a": "c.txt"}


def test_what_the_system_refuses_is_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cli, "app", lambda: (tmp_path / "file" / "below").mkdir())
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert "below cannot be used (Not a directory); check that path, or choose another" in said


def test_small_files_have_a_size():
    assert size(23_700_000) == "23.7 MB"
    assert size(6_400) == "6.4 KB"


def test_where_no_scale_suggests_itself_there_is_a_dash(capsys):
    found = SimpleNamespace(
        label="rope-twin",
        train_length=512,
        curves=SimpleNamespace(loss_at=lambda length, span: 4.627),
        loss_knee=652,
        entropy_knee=540,
        distracted_heads=[],
        heads=48,
        suggested_scale=None,
        verdict="Loss leaves its trend.",
    )
    terminal.show_diagnoses([found], [1024])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("rope-twin"))
    assert row.split()[-1] == "–"


def test_names_of_compared_models_are_shown_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "out_console", Console(width=120, highlight=False))
    table = np.zeros((1, 2))
    distance = SimpleNamespace(nearest=np.zeros(1), matched=np.zeros(1), rule="jsd")
    models, mass = ["runs/[small]", "nope-twin"], np.zeros((1, 2, 4))
    found = SimpleNamespace(
        models=models, tokens=8, pairs={(0, 1): distance}, mass=[mass, mass], ablations=[table, table]
    )
    terminal.show_comparison(found, as_json=False)
    assert "runs/[small] · nope-twin" in capsys.readouterr().out
