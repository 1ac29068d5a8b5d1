"""Presets, estimates before the work, and advice that ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import farspan
from families import FAMILIES, SHAPE
from farspan.attention.probe import Layer, probe
from farspan.errors import FarspanError
from farspan.evals.scores import EvalCell
from farspan.evals.suites import PRESET_KEYS, PRESET_LIMIT, PRESET_WINDOWS, SUITES, EvalConfig
from farspan.methods.auto import candidate_methods, recommended_method
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.job import grid_size, search_best
from farspan.methods.presets import PRESETS, choose_preset, preset_config
from farspan.methods.registry import METHODS
from farspan.methods.rules import check_compatible
from farspan.methods.swan_config import SwanConfig
from farspan.methods.swan_layout import measures_layers
from farspan.methods.tuning import TuningConfig
from farspan.methods.uniform import COARSE, STEP
from farspan.report import style
from farspan.workflows import eval_estimate, extend_estimate
from farspan.workflows.eval_estimate import EvalClock, pace_and_overhead
from farspan.workflows.evaluate import evaluate
from farspan.workflows.extend import estimate_extension, extend
from farspan.workflows.extend_estimate import (
    Speed,
    extension_stages,
    method_stages,
    training_changes,
)
from farspan.workflows.timing import ForwardSpeed, measured_length
from fit_jobs import QUICK, job_for
from test_extend import FEW, _no_figures, tiny  # noqa: F401

BY_NAME = {family.name: family for family in FAMILIES}


def test_a_cpu_takes_the_quick_preset_and_a_recipe_takes_none():
    assert choose_preset(None, None, "cpu") == "quick"
    assert choose_preset(None, None, "cuda:1") == "full"
    assert choose_preset("full", None, "cpu") == "full"
    assert choose_preset(None, ExtendConfig(), "cpu") is None
    with pytest.raises(FarspanError, match="both give all settings"):
        choose_preset("quick", "default", "cpu")
    with pytest.raises(FarspanError, match="preset 'quik' is unknown; did you mean quick"):
        choose_preset("quik", None, "cpu")
    assert preset_config("full") == preset_config(None) == ExtendConfig()
    quick = preset_config("quick")
    assert quick.search.max_steps < ExtendConfig().search.max_steps
    assert quick.choose_windows < ExtendConfig().choose_windows


@pytest.mark.parametrize(
    ("method", "overrides", "changes"),
    [
        ("swan", ["swan.window=8", "swan.measured_rows=1"], "fewer swan.tokens or a GPU"),
        ("drope", [], "fewer tuning.steps or a GPU"),
        ("continue", [], "fewer tuning.steps or a GPU"),
        ("yarn", ["tune=fair"], "fewer tuning.steps or a GPU"),
        ("yarn", [], ""),
    ],
)
def test_the_expected_time_says_what_shortens_training(tiny, method, overrides, changes):  # noqa: F811
    options = dict(data=tiny / "text.txt", overrides=overrides, device="cpu")
    advice = f"; a preset does not shorten the training of weights, {changes} does)"
    quick = estimate_extension(tiny / "rope", 128, method, preset="quick", **options).sentence
    assert quick.endswith(advice) if changes else "training" not in quick
    full = estimate_extension(tiny / "rope", 128, method, preset="full", **options).sentence
    assert "training" not in full, "only quick promises a shorter time"


def test_on_a_gpu_no_gpu_is_advised():
    assert training_changes(["yarn", "swan"], ExtendConfig(), on_gpu=True) == ["fewer swan.tokens"]


def test_the_preset_is_announced_recorded_and_overruled(tiny, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    said = []
    overrides = ["choose_windows=1", "passkeys=0", "fitted=false"]
    options = dict(data=tiny / "text.txt", overrides=overrides, say=said.append)
    result = extend(tiny / "none", "128", method="logn", **options)
    assert result.folder.name == "none-128"
    (sentence,) = said
    assert re.fullmatch(
        r"logn: at most about .* \(preset quick; full: at most about .*\)", sentence
    )
    record = json.loads((tmp_path / "none-128" / "record.json").read_text())["settings"]
    assert record["preset"] == "quick"
    assert record["recipe"]["report_windows"] == preset_config("quick").report_windows
    assert record["recipe"]["choose_windows"] == 1


def test_stages_count_the_work_of_every_method(monkeypatch):
    """With a second for each forward pass, and three for one with a gradient."""
    monkeypatch.setattr(ForwardSpeed, "of", lambda self, length: 1.0)
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    speed = Speed(ForwardSpeed(model, probe(model), 1.0, 8), 3.0)
    config = replace(FEW, search=replace(QUICK, steps=4, batch=2, lr=(0.1, 0.2)))
    names = ["uniform", "headscale"]
    stages = extension_stages(speed, job, config, names, True)
    assert [(stage.name, stage.seconds) for stage in stages] == [
        ("measure before", 2.0),
        ("uniform", 2.0 * grid_size(COARSE, STEP)),
        ("headscale lr", 4 * 2 * 3.0),
        ("headscale lr", 4 * 2 * 3.0),
        ("compare", 4.0),
        ("measure after", 2.0),
        ("verify", 3.0),
    ]
    for name in METHODS:
        assert extension_stages(speed, job, FEW, [name], False)


@pytest.mark.parametrize(
    ("candidate", "settings", "stages"),
    [
        ("swan", {}, ["measure layers", "distill", "sharpen"]),
        ("swan", {"layers": "even"}, ["distill", "sharpen"]),
        ("swan", {"global_share": 1.0}, ["distill", "sharpen"]),
        ("swan+headlog", {}, ["measure layers", "distill", "headlog lr"]),
    ],
)
def test_a_conversion_is_estimated_by_the_stages_that_run(candidate, settings, stages, monkeypatch):
    monkeypatch.setattr(ForwardSpeed, "of", lambda self, length: 1.0)
    model = BY_NAME["farspan-rope"].build()
    speed = Speed(ForwardSpeed(model, probe(model), 1.0, 8), 3.0)
    config = replace(FEW, search=replace(QUICK, steps=4), swan=SwanConfig(**settings))
    estimated = extension_stages(speed, job_for(model), config, [candidate], False)
    assert [stage.name for stage in estimated[1:-2]] == stages


def test_layers_of_a_model_with_windows_are_not_measured():
    first, *others = probe(BY_NAME["farspan-rope"].build())
    assert measures_layers([first, *others], SwanConfig())
    assert not measures_layers([replace(first, window=8), *others], SwanConfig())


def test_the_steps_of_tune_are_not_those_of_continued_training(monkeypatch):
    monkeypatch.setattr(ForwardSpeed, "of", lambda self, length: 1.0)
    model = BY_NAME["farspan-rope"].build()
    speed = Speed(ForwardSpeed(model, probe(model), 1.0, 8), 3.0)
    config = replace(FEW, tune="raw", tuning=TuningConfig(batch=1))
    stages = extension_stages(speed, job_for(model), config, ["yarn+continue"], False)
    assert [stage.seconds for stage in stages[1:3]] == [3 * 1000, 3 * 200]


@pytest.mark.parametrize(
    ("name", "length", "seconds"),
    [("drope", 0, 8), ("continue", 0, 64), ("continue", 16, 16), ("yarn", 0, 64)],
)
def test_training_of_weights_is_estimated_by_its_own_windows(monkeypatch, name, length, seconds):
    """With a second a token: `drope` trains at the train length, 8, others at the target, 64."""
    monkeypatch.setattr(ForwardSpeed, "of", lambda self, length: length)
    model = BY_NAME["farspan-rope"].build()
    job = replace(job_for(model), train_length=8, target=64, search=torch.zeros(2, 64).long())
    config = replace(FEW, tune="fair", tuning=TuningConfig(steps=5, batch=3, length=length))
    speed = Speed(ForwardSpeed(model, probe(model), 1.0, 8), 3.0)
    (stage,) = method_stages(name, speed, job, config, choose=0)
    assert stage.seconds == 5 * 3 * 3 * seconds


def test_a_uniform_scale_takes_at_most_thirty_losses():
    """Twelve in steps of 0.2, and six each in steps of 0.05, 0.0125 and 0.01."""
    with np.errstate(over="raise"):  # a refinement that gets wider ends
        assert grid_size(np.array(COARSE), STEP) == 12 + 3 * 6


def test_the_size_of_a_grid_bounds_the_losses_of_a_search():
    """And one refinement of six losses less would be too few."""
    counts = []
    for best in (*torch.arange(0.8, 3.0, 0.013).tolist(), 3.0):
        _, losses = search_best(lambda value, best=best: abs(value - best), COARSE, STEP)
        counts.append(len(losses))
    assert grid_size(COARSE, STEP) - 6 < max(counts) <= grid_size(COARSE, STEP)


@pytest.mark.parametrize(
    ("device", "parameters", "length"),
    [
        ("cpu", 5e6, 512),
        ("cpu", 20e6, 250),
        ("cpu", 1e9, 64),
        # A GPU takes as long for 64 tokens as for thousands of them.
        ("cuda", 5e6, 8192),
        ("cuda", 1e9, 2000),
        ("cuda", 70e9, 512),
    ],
)
def test_the_measured_window_fits_model_and_device(device, parameters, length):
    model = SimpleNamespace(device=torch.device(device), num_parameters=lambda: int(parameters))
    assert measured_length(model) == length


def test_a_method_without_a_search_measures_no_gradient(monkeypatch):
    """A large model need not have the memory for one."""

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(extend_estimate, "_seconds_of_gradient", refuse)
    model = BY_NAME["llama"].build()
    assert Speed.measure(model, probe(model), job_for(model), ["yarn"]).backward == 0


def test_the_quick_preset_of_eval_changes_only_what_is_not_set():
    quick = SUITES["perplexity"].complete(EvalConfig(preset="quick"))
    assert (quick.windows, quick.limit) == (PRESET_WINDOWS, None)
    assert SUITES["needle"].complete(EvalConfig(preset="quick")).limit == PRESET_LIMIT
    assert SUITES["needle"].complete(EvalConfig(preset="quick", limit=9)).limit == 9
    assert SUITES["needle"].complete(EvalConfig()).limit is None
    with pytest.raises(FarspanError, match="preset 'fast' is unknown"):
        EvalConfig(preset="fast")


@pytest.mark.parametrize("name", ["windows", "limit", "budget", "stride", "beams", "batch_size"])
@pytest.mark.parametrize("count", [0, -3])
def test_counts_of_eval_below_one_are_refused(name, count):
    """A zero would be replaced by the default."""
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(FarspanError, match=f"^{option} is {count}; use 1 or more"):
        EvalConfig(**{name: count})
    assert getattr(EvalConfig(**{name: 1}), name) == 1


def test_a_negative_seed_of_eval_is_refused():
    with pytest.raises(FarspanError, match="^--seed is -1; use 0 or more"):
        EvalConfig(seed=-1)


def test_the_quick_preset_of_eval_is_the_documented_one():
    page = (Path(__file__).parent.parent / "docs" / "eval.md").read_text()
    (row,) = re.findall(r"^\| `quick` \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    windows, limit, keys = map(int, row)
    assert SUITES["perplexity"].complete(EvalConfig(preset="quick")).windows == windows
    assert SUITES["needle"].complete(EvalConfig(preset="quick")).limit == limit
    assert keys == PRESET_KEYS


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("basline", "baseline"), ("lenghts", "lengths"), ("devicemap", "device_map")],
)
def test_a_wrong_setting_of_evaluate_names_the_setting_or_parameter_that_was_meant(wrong, meant):
    with pytest.raises(TypeError, match=f"no setting '{wrong}'; did you mean {meant}"):
        farspan.evaluate("nope-twin", **{wrong: 1})


def test_the_clock_of_eval_counts_texts_and_adapts(monkeypatch):
    cells = {
        "a": EvalCell("perplexity", "text", 512, {"count": 64, "windows": 8}),
        "b": EvalCell("passkey", "passkey", 512, {"keys": 2}),
        "c": EvalCell("longbench", "qa", 512, {}),
    }
    monkeypatch.setattr(ForwardSpeed, "of", lambda self, length: 1.0)
    tiny_model = BY_NAME["farspan-none"].build()
    model = SimpleNamespace(local=tiny_model, layers=probe(tiny_model), max_positions=None)
    now = [0.0]
    monkeypatch.setattr(eval_estimate.time, "monotonic", lambda: now[0])
    clock = EvalClock(model, cells)
    assert clock.sentence(5) == "3 of 5 cells to measure, about 9 seconds and 1 more (preset full)"
    assert clock.left_after("a") == "", "unknown cells have no time"
    del cells["c"]
    clock = EvalClock(model, cells)
    now[0] = 16.0
    assert clock.left_after("a") == ", about 2 seconds left"


def test_the_clock_of_eval_counts_the_baseline_too(monkeypatch):
    cells = {name: EvalCell("perplexity", "text", 512, {"count": 4}) for name in "ab"}
    monkeypatch.setattr(ForwardSpeed, "of", lambda self, length: 1.0)
    tiny_model = BY_NAME["farspan-none"].build()
    model = SimpleNamespace(local=tiny_model, layers=probe(tiny_model), max_positions=None)
    now = [0.0]
    monkeypatch.setattr(eval_estimate.time, "monotonic", lambda: now[0])
    clock = EvalClock(model, {"a": cells["a"]}, every_cell=cells)
    text = "1 of 2 cells to measure, about 4 seconds, with the baseline at most 12 seconds"
    assert clock.sentence(2) == f"{text} (preset full)"
    now[0] = 8.0
    assert clock.left_after("a") == ", about 16 seconds left"


@pytest.mark.parametrize(("baseline", "both"), [(None, False), ("rope", True)])
def test_eval_says_the_time_of_both_models(tiny, tmp_path, monkeypatch, baseline, both):  # noqa: F811
    monkeypatch.setattr(eval_estimate, "SAID_FROM", 0.0)
    monkeypatch.setattr(style, "save", lambda figure, stem: None)
    said = []
    options = {"data": tiny / "text.txt", "lengths": (64,), "windows": 1, "say": said.append}
    base = baseline and tiny / baseline
    evaluate(tiny / "none", "perplexity", tmp_path / "out", baseline=base, **options)
    assert ["with the baseline at most" in text for text in said] == [both, False][: 1 + both]


def test_the_clock_of_eval_counts_the_tokens_of_answers(monkeypatch):
    monkeypatch.setattr(ForwardSpeed, "of", lambda self, length: 1.0)
    monkeypatch.setattr(eval_estimate, "_decoding_step", lambda model, ids: 0.5)
    tiny_model = BY_NAME["farspan-none"].build()
    model = SimpleNamespace(local=tiny_model, layers=probe(tiny_model), max_positions=None)
    cells = {"a": EvalCell("ruler", "vt", 512, {"samples": 3})}
    assert EvalClock(model, cells).left == 3 * (1.0 + 0.5 * eval_estimate.ANSWERS["ruler"])


def test_time_beyond_the_estimate_is_per_cell_on_a_gpu():
    """RULER at 1,024 tokens, where launches decide, once promised three hours for 77 cells."""
    measured = [(0.1, 4.6), (0.1, 4.4)]
    assert pace_and_overhead(measured, per_cell=True) == pytest.approx((1.0, 4.4))
    assert pace_and_overhead(measured, per_cell=False) == pytest.approx((45.0, 0.0))
    assert pace_and_overhead([(2.0, 1.0)], per_cell=True) == (0.5, 0.0), "faster than expected"


# Advice.


def model_kinds() -> dict[str, tuple[list[Layer], object]]:
    kinds = {}
    names = ("farspan-none", "farspan-rope", "farspan-swan", "smollm3", "gpt2", "farspan-alibi")
    models = {name: BY_NAME[name].build() for name in names if name in BY_NAME}
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    config = LlamaConfig(**SHAPE, rope_scaling=scaled)
    models["llama-3.1"] = LlamaForCausalLM(config).eval()
    for name, model in models.items():
        kinds[name] = (probe(model), model)
    return kinds


def advice(method: str, layers, model) -> list[str]:
    """The methods that a refusal or note of a method names as the way out."""
    try:
        notes = check_compatible(method.split("+"), layers, model.config, "it", ExtendConfig())
    except FarspanError as error:
        notes = (str(error),)
    ways_out = " ".join(note.rpartition(";")[2] for note in notes)
    return [word for word in re.findall(r"[\w+-]+", ways_out) if word.split("+")[0] in METHODS]


def test_who_follows_advice_gets_no_other():
    kinds = model_kinds()
    assert len(kinds) >= 5
    given = 0
    for kind, (layers, model) in kinds.items():
        for method in METHODS:
            for other in advice(method, layers, model):
                given += 1
                assert not advice(other, layers, model), (kind, method, other)
        assert (first := recommended_method(layers, kind == "llama-3.1")) is None or not advice(
            first, layers, model
        )
    assert given > 10


def test_auto_tries_yarn_with_headscale_where_full_rotary_layers_are_the_limit():
    for name, expected in (
        ("smollm3", ["yarn", "headlog", "yarn+headscale"]),
        ("farspan-swan", ["uniform", "headscale", "headlog"]),
        ("farspan-none", ["uniform", "headscale", "headlog"]),
    ):
        model = BY_NAME[name].build()
        assert candidate_methods(["auto"], probe(model), model, job_for(model)) == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_help_says_what_a_preset_changes(preset):
    config = preset_config(preset)
    numbers = (config.search.max_steps, config.choose_windows, 10 * config.passkeys)
    from farspan.cli.extend import Preset

    text = Preset.__metadata__[0].help.partition("full:")
    shown = text[0] if preset == "quick" else text[2]
    assert all(re.search(rf"\b{number}\b", shown) for number in numbers)
