"""A sample of every category of `make torture`, and that the harness sees what is wrong."""

from __future__ import annotations

import gc
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farspan.errors import FarspanError
from torture import corruption, fuzzing, subjects
from torture.categories import CATEGORIES
from torture.harness import Outcomes, Workspace, repeat_command, run_case
from torture.tally import Tally, table
from torture.trials import run_trials


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no other
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


@pytest.mark.long
def test_a_sample_of_every_category_goes_right(one_thread, tmp_path):
    """One test, since all categories share what is built first."""
    workspace, tried = Workspace(tmp_path / "work"), {}
    with subjects.plain_figures():
        workspace.prepare(["eval", "pretrain", "export-gguf"])
        for name, category in CATEGORIES.items():
            total = Tally()
            for case in category.cases("short"):
                tally = run_case(category, case, 0, workspace)
                assert not tally.wrong, (tally.failures, repeat_command(name, case, 0))
                total.add(tally)
            tried[name] = total.tried
        # Foreign text has no checksum: if it needed one, the harness would say so.
        foreign = corruption.READERS["texts"]
        corruption.READERS["strict"] = replace(foreign, checked=corruption.everything)
        try:
            tally = run_case(CATEGORIES["corruption"], "strict/0-8", 0, workspace)
        finally:
            del corruption.READERS["strict"]
    assert tally.wrong
    assert "was not noticed" in tally.failures[0]
    assert tried["kills"] >= 2
    assert tried["faults"] >= 3
    assert tried["fuzzing"] >= 100 * len(fuzzing.PARSERS)
    assert all(tried[name] for name in tried if name != "memory")


def test_a_crash_and_an_error_of_another_class_are_wrong(tmp_path):
    def trial(number: int) -> Tally:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            raise ValueError("no FarspanError")
        if number == 3:
            raise FarspanError("refused")
        return Tally(survived=1)

    tally = run_trials(5, trial, tmp_path, tmp_path / "log")
    assert (tally.survived, tally.refused, tally.wrong) == (2, 1, 2)
    assert "trial 1: the process ended" in tally.failures[0]
    assert "trial 2: ValueError: no FarspanError" in tally.failures[1]


def test_differences_name_what_is_missing_left_over_or_changed(tmp_path):
    def files(**contents: str) -> dict[str, str]:
        for file in tmp_path.iterdir():
            file.unlink()
        for name, text in contents.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        return subjects.snapshot(tmp_path)

    expected = files(a_json='{"x": 1, "seconds": 2}', b_txt="b", c_txt="c")
    assert files(a_json='{"seconds": 3, "x": 1}', b_txt="b", c_txt="c") == expected
    actual = files(a_json='{"x": 2}', b_txt="b", d_txt="d")
    assert subjects.differences(expected, actual) == [
        "c.txt is missing",
        "d.txt is left over",
        "a.json differs",
    ]


def test_every_damage_changes_the_file():
    rng = random.Random(0)
    for action in ("truncate", "zero", "append", "flip"):
        for _ in range(50):
            content = rng.randbytes(rng.randrange(1, 200))
            changed = corruption.damaged_bytes(rng, content, action)
            # Zeros and pairs of flips can meet what was there.
            assert changed != content or action in ("zero", "flip")


def test_outcomes_are_kept_for_the_same_code_and_seed(tmp_path, monkeypatch):
    first = Outcomes(tmp_path, 0)
    first.write("kills/eval/0", Tally(survived=2))
    assert Outcomes(tmp_path, 0).read() == {"kills/eval/0": Tally(survived=2)}
    assert not Outcomes(tmp_path, 1).read()
    monkeypatch.setattr("torture.harness.source_hash", lambda: "other")
    assert not Outcomes(tmp_path, 0).read()
    assert Outcomes(tmp_path, 0, keep=True).read()


def test_the_table_has_a_row_for_each_category():
    text = table([("kills", Tally(1000, 20, 3))])
    assert text.splitlines()[-1] == "| kills | 1,023 | 1,000 | 20 | 3 |"


def test_the_harness_is_not_in_the_wheel():
    assert not list((Path(__file__).parent.parent / "src").rglob("*torture*"))
