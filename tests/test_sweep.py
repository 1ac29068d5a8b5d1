"""A sample of `make families`, and the page that it wrote."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import transformers as hf
from transformers.models.auto import modeling_auto as auto

import families_page
import family_checks
import sweep
from every_family import families, tiny_model
from family_checks import ABSENT, CHECKS, HOLDS, REFUSED, TRACEBACK, Outcome, Subject, run_checks

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
SAMPLE = random.Random(0).sample(sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 2)


def without_config(monkeypatch) -> None:
    """A config of full size takes seconds."""
    kept = {name: check for name, check in CHECKS.items() if name != "config"}
    monkeypatch.setattr(family_checks, "CHECKS", kept)


@pytest.mark.parametrize("family", SAMPLE)
@pytest.mark.long
def test_a_family_holds_or_is_refused_in_a_sentence(family: str, tmp_path, monkeypatch):
    without_config(monkeypatch)
    outcomes = run_checks(Subject(family, tmp_path))
    assert outcomes["build"].state == HOLDS, outcomes["build"].detail
    broken = {name: part.detail for name, part in outcomes.items() if part.state == TRACEBACK}
    assert not broken


@pytest.mark.long
def test_a_check_that_fails_is_a_traceback_and_a_refusal_is_none(tmp_path, monkeypatch):
    def fail(subject):
        raise KeyError("nothing")

    def refuse(subject):
        raise family_checks.FarspanError("no; choose another")

    def lack(subject):
        raise family_checks.AbsentError("no cache")

    checks = {"inspect": fail, "identity": refuse, "cache": lack}
    monkeypatch.setattr(family_checks, "CHECKS", checks)
    outcomes = run_checks(Subject("llama", tmp_path))
    states = {name: part.state for name, part in outcomes.items()}
    assert states == {"build": HOLDS, "inspect": TRACEBACK, "identity": REFUSED, "cache": ABSENT}
    assert outcomes["inspect"].detail.strip().endswith("KeyError: 'nothing'")


def test_a_process_that_dies_or_hangs_is_an_outcome(monkeypatch):
    monkeypatch.setattr(sweep, "SECONDS", 0.5)
    for end, status in ((lambda subject: sweep.os._exit(7), 7), (lambda subject: hang(), -9)):
        monkeypatch.setattr(sweep, "run_checks", end)
        outcome = sweep.measure("llama")["build"]
        assert outcome == Outcome(TRACEBACK, f"the process ended with status {status}")


def hang() -> None:
    while True:
        sweep.time.sleep(1)


def test_known_outcomes_are_not_measured_again(tmp_path, monkeypatch):
    measured = []

    def measure(family):
        measured.append(family)
        return {"build": Outcome(ABSENT, "too large")}

    monkeypatch.setattr(sweep, "FOLDER", tmp_path / "outcomes")
    monkeypatch.setattr(sweep, "measure", measure)
    for fresh in (False, False, True):
        outcomes = sweep.sweep(["llama", "gpt2"], fresh)
        assert outcomes["gpt2"]["build"].detail == "too large"
    assert sweep.sweep(["llama", "opt"], False, known_only=True).keys() == {"llama"}
    assert measured == ["llama", "gpt2", "llama", "gpt2"]


def test_the_page_counts_and_explains():
    held = dict.fromkeys(CHECKS, Outcome(HOLDS))
    held |= {"build": Outcome(HOLDS, "A"), "inspect": Outcome(HOLDS, "rope/8, none")}
    held |= {"fold": Outcome(HOLDS, "scales by layer")}
    refused = held | {"build": Outcome(HOLDS, "BModel")}
    refused |= {"identity": Outcome(REFUSED, "BModel has no attention; choose another")}
    refused |= {"cache": Outcome(ABSENT, "a cache changes its logits")}
    broken = held | {"scale": Outcome(TRACEBACK, "KeyError")}
    outcomes = {"a": held, "b": refused, "c": broken, "d": {"build": Outcome(ABSENT, "needs x")}}
    assert families_page.counts(outcomes) == {
        "families": 4,
        "built": 3,
        "identical under the seam": 2,
        "refused by the seam": 1,
        "with a traceback": 1,
    }
    lines = families_page.page(outcomes, [*outcomes, "e"]).splitlines()
    assert "| e |" in lines
    assert "| a | rope/8, none | yes | yes | yes | yes | yes | by layer | yes |" in lines
    assert "| b | rope/8, none | yes | refused | yes | – | yes | by layer | yes |" in lines
    assert "| c | rope/8, none | yes | yes | **traceback** | yes | yes | by layer | yes |" in lines
    assert "| the class has no attention | b (identity) |" in lines
    assert "| d | needs x |" in lines


@pytest.mark.long
def test_the_page_is_that_of_every_installed_family():
    text = PAGE.read_text()
    counted = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", text, re.MULTILINE))
    assert counted["with a traceback"] == "0"
    if f"transformers {hf.__version__}:" not in text:
        pytest.skip("the page was written with another release of transformers")
    listed = set(re.findall(r"^\| (\S+) \|", text, re.MULTILINE))
    assert set(families()) <= listed
    assert int(counted["families"]) == len(families())
    assert int(counted["identical under the seam"]) + int(counted["refused by the seam"]) == int(
        counted["built"]
    )


@pytest.mark.long
def test_tiny_models_keep_every_kind_of_layer():
    model = tiny_model("afmoe")
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.config.sliding_window == 8
    assert sum(part.numel() for part in model.parameters()) < 10_000_000
