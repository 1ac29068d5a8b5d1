"""The summary of a report: claimed and effective length, cost and gates of each model."""

from __future__ import annotations

import math

import pytest

from farspan.report.summary import Effective, effective_by_scores, summaries, summary_cards


def score(metric: str, length: int, value: float, task: str = "text") -> dict:
    return {"eval": "any", "metric": metric, "length": length, "value": value} | {
        "tags": {"task": task}
    }


def perplexities(*values: float) -> list[dict]:
    """At 256, 512, 1024, …"""
    return [score("ppl", 256 << number, value) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "length", "text"),
    [
        ((12.0, 10.0, 10.9, 11.2), 1024, "1,024"),
        ((12.0, 10.0, 11.2, 9.0), 512, "512"),  # a later recovery does not count
        ((12.0, 10.0, 9.0, 9.5), 2048, "≥ 2,048"),
        ((14.0, 10.0, 99.0, 10.0), 512, "512"),
    ],
)
def test_perplexity_may_rise_by_a_tenth_above_that_at_the_train_length(values, length, text):
    (effective,) = effective_by_scores(perplexities(*values), train_length=512)
    assert (effective.length, str(effective)) == (length, text)


def test_every_measure_has_its_own_effective_length():
    scores = [
        *perplexities(10.0, 10.0),
        score("ppl", 256, 5.0, "code"),
        score("ppl", 512, 9.0, "code"),
        score("passkey", 256, 0.9),
        score("passkey", 512, 0.8),
        score("effective_length", 1024, 512.0),
    ]
    assert effective_by_scores(scores, train_length=None) == [
        Effective("any", 512, 1024),
        Effective("perplexity on text", 512, 512),
        Effective("perplexity on code", 256, 512),
        Effective("passkeys", 256, 512),
    ]


def test_a_length_fails_only_if_its_interval_is_below_the_threshold():
    """Four of five keys do not show that fewer than 85% are retrieved."""

    def keys(length: int, hits: int, high: float) -> dict:
        return {**score("passkey", length, hits / 5), "n": 5, "high": high}

    (effective,) = effective_by_scores([keys(512, 4, 0.96), keys(1024, 1, 0.62)], None)
    few = "4 of 5 at 512, too few to tell from 85%"
    assert effective == Effective("passkeys", 512, 1024, few, shown=False)
    (none,) = effective_by_scores([keys(512, 0, 0.43), keys(1024, 4, 0.96)], None)
    assert none == Effective("passkeys", 0, 1024, "0 of 5 at 512")
    record = {"command": "eval", "settings": {}, "scores": [keys(512, 4, 0.96)]}
    assert f"passkeys ≥ 512 ({few})" in summary_cards([("model", record)])
    record["settings"] = {"train_length": 512, "context": 512}
    assert '<div class="bar open"' in summary_cards([("model", record)]), "nothing was shown"
    record["scores"] = [keys(512, 5, 1.0)]
    assert '<div class="bar right"' in summary_cards([("model", record)])


def test_the_gain_is_that_at_the_target():
    settings = {"train_length": 512, "context": 1024}
    scores, base = perplexities(10.0, 10.0, 9.0, 50.0), perplexities(10.0, 10.0, 90.0, 99.0)
    record = {"command": "eval", "settings": settings, "scores": scores}
    record["vs"] = {"model": "base", "scores": base}
    patch, _ = summaries([("patch", record)])
    assert patch.gain == "−90.0% perplexity at 1,024 (90.00 → 9.00)"
    assert "gain at the target" in summary_cards([("patch", record)])
    record["settings"] = {**settings, "context": 512}
    assert summaries([("patch", record)])[0].gain == "", "nothing beyond the train length"


def test_averages_over_tasks_stand_for_their_tasks():
    lengths = {"vt": 256.0, "cwe": 1024.0, "average of 11 tasks": 512.0}
    scores = [score("effective_length", 1024, value, task) for task, value in lengths.items()]
    assert effective_by_scores(scores, None) == [Effective("any", 512, 1024)]
    assert len(effective_by_scores(scores[:2], None)) == 2, "without an average, every task"


def test_the_cost_is_that_of_the_text_that_loses_most():
    def texts(code: float) -> list[dict]:
        return [*perplexities(10.0, 10.0), score("ppl", 512, code, "code")]

    settings = {"train_length": 512, "context": 1024}
    record = {"command": "eval", "settings": settings, "scores": texts(6.0)}
    record["vs"] = {"model": "base", "scores": texts(5.0)}
    patch, _ = summaries([("patch", record)])
    assert patch.cost == "+20.0% perplexity on code at 512 (5.00 → 6.00)"


def test_a_baseline_has_its_own_train_length():
    settings = {"train_length": 256, "context": 512}
    scores = {"scores": perplexities(10.0, 20.0, 20.5)}
    record = {"command": "eval", "settings": settings, **scores, "vs": {"model": "base", **scores}}
    *_, base = summaries([("model", record)])
    assert (base.train_length, base.claimed) == (256, 256), "a record of an earlier version"
    settings["baseline"] = {"train_length": 1024, "context": 4096}
    *_, base = summaries([("model", record)])
    assert (base.train_length, base.claimed) == (1024, 4096)
    assert base.effective == [Effective("perplexity", 1024, 1024)]


def test_runs_of_one_model_are_one_summary():
    base = {"model": "base", "scores": perplexities(10.0, 10.0, 99.0)}
    gates = [{"gate": "a", "holds": True, "told": ""}, {"gate": "b", "holds": False, "told": ""}]
    evaluation = {
        "command": "eval",
        "settings": {"train_length": 512, "context": 1024},
        "scores": perplexities(10.0, 10.5, 10.6),
        "vs": base,
        "gates": gates,
    }
    settings = {"model": "base", "method": "yarn", "train_length": 512, "to": 1024}
    values = {"loss@512": 3.0, "loss@1024": 3.2, "passkey@512": 1.0, "passkey@1024": 0.5}
    extension = {"command": "extend", "settings": settings, "before": values, "after": values}
    model = {"model": "base", "train_length": 512, "loss_knee": 700.2}
    diagnosis = {"command": "diagnose", "models": [model]}
    runs = [("diagnosis", diagnosis), ("patch", extension), ("patch", evaluation)]
    patch, trained = summaries(runs)
    assert (patch.name, patch.about, patch.claimed) == ("patch", "base with yarn", 1024)
    assert patch.effective == [Effective("perplexity", 1024, 1024)], "an evaluation comes first"
    assert patch.cost == "+5.0% perplexity at 512 (10.00 → 10.50)"
    assert patch.gates == gates
    assert (trained.name, trained.claimed) == ("base", 512)
    assert trained.effective == [Effective("perplexity", 512, 1024)]
    assert trained.knee == "loss leaves its trend at 700 tokens"
    assert '<dd class="wrong">1 of 2 hold</dd>' in summary_cards(runs)
    (without,) = summaries([("patch", extension)])
    assert without.effective == [Effective("loss", 512, 1024), Effective("passkeys", 512, 1024)]
    assert math.exp(3.2 - 3.0) > 1.1
    flat = {**extension, "after": {"loss@256": 2.0, "loss@512": 3.15, "loss@1024": 3.2}}
    (costly,) = summaries([("patch", flat)])
    assert costly.effective == [Effective("loss", 1024, 1024)], "by its own loss at 512"
    assert costly.cost == "+0.150 nats at 512"
    assert without.cost == "+0.000 nats at 512"
    assert without.gain == "+0.000 nats at 1,024"


def test_a_card_escapes_names_and_says_what_was_not_measured():
    model = {"model": "<b>", "train_length": None, "loss_knee": None}
    text = summary_cards([("run", {"command": "diagnose", "models": [model]})])
    assert "<h3>&lt;b&gt;</h3>" in text
    assert "unknown" in text
    assert "not measured; farspan eval measures it" in text
    assert summary_cards([("run", {"command": "pretrain"})]) == ""


@pytest.mark.parametrize(
    ("values", "kind", "width"),
    [
        ((10.0, 10.0, 10.0), "right", "100.0%"),
        ((10.0, 10.0, 99.0), "wrong", "50.0%"),
        ((10.0, 10.0), "open", "50.0%"),  # no longer text was measured: nothing failed
    ],
)
def test_the_bar_of_a_card_blames_only_measured_failures(values, kind, width):
    settings = {"train_length": 512, "context": 1024}
    record = {"command": "eval", "settings": settings, "scores": perplexities(*values), "gates": []}
    bar = f'<div class="bar {kind}" aria-hidden="true"><i style="width: {width}">'
    assert bar in summary_cards([("model", record)])
