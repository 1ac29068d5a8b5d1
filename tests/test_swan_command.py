"""`extend --method swan`: the command, sharpening, auto, and the estimate."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import farspan
from families import SHAPE, randomized, tokens
from farspan.attention import model_facts, seam
from farspan.attention.layout import Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.probe import Layer, probe
from farspan.attention.rope import set_rope
from farspan.bundled import resolve_bundled
from farspan.cli import app
from farspan.cli.console import console
from farspan.errors import FarspanError, PreemptedError
from farspan.files import check_manifest
from farspan.methods import auto, layer_costs, rules, swan_config, swan_layout
from farspan.methods import swan as swan_module
from farspan.methods import tuning as tuning_module
from farspan.methods.distill import make_teacher
from farspan.methods.extend_config import ExtendConfig, read_extend_config
from farspan.methods.fit import fit_methods, search_windows
from farspan.methods.registry import METHODS
from farspan.methods.swan import swan
from farspan.methods.swan_config import SwanConfig
from farspan.methods.tuning import TuningConfig
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import token_losses
from farspan.report import style
from farspan.workflows import extend as extend_module
from farspan.workflows.extend import estimate_extension, extend
from fit_jobs import job_without_model
from swan_models import (
    EVEN,
    LENGTH,
    QUICK,
    SETTINGS,
    TARGET,
    WINDOW,
    assert_unchanged,
    build,
    job_for,
    snapshot,
    stop_at,
)
from test_uncommon_families import laguna


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Drawing is slow: `extend` writes an empty file instead of its figure."""
    monkeypatch.setattr(style, "save", lambda figure, stem: stem.touch())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A rotary model of two layers with a tokenizer, and a text."""
    from farspan.data.documents import read_documents
    from farspan.data.tokens import train_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    text = next(iter(read_documents("python-docs"))).text[:30_000]
    (folder / "text.txt").write_text(text)
    shape = {**SHAPE, "vocab_size": 300, "num_hidden_layers": 2}
    torch.manual_seed(0)
    FarspanForCausalLM(FarspanConfig(**shape, position="rope")).save_pretrained(folder / "rope")
    train_tokenizer([text], 300).save_pretrained(folder / "rope")
    return folder


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
FEW = ["choose_windows=1", "report_windows=1", "passkeys=0", "swan.measured_rows=1"]


@pytest.mark.long
def test_swan_extends_a_bundled_model(tmp_path):
    """It lowers the loss beyond the train length, and is recorded as it was run."""
    small = ["swan.tokens=12_288", "tuning.batch=4", "tuning.warmup=3"]
    small += ["tuning.lr=1e-4"]  # for batches of 2,048 tokens
    result = farspan.extend(
        "rope-twin", to=1024, out=tmp_path / "swan", method="swan", overrides=[*FEW, *small]
    )
    assert result.after["loss@1024"] < result.before["loss@1024"] - 0.5
    assert result.after["loss@512"] < result.before["loss@512"] + 0.5
    assert result.proof == pytest.approx(0, abs=1e-4)
    assert result.effect > 0.1
    record = json.loads((tmp_path / "swan" / "record.json").read_text())
    run = dict(length=512, batch=4, micro_batch=4, steps=6, tokens=12_288)
    assert record["distillation"] == run
    assert [cost["layer"] for cost in record["layer_costs"]] == [0, 1, 2, 3, 4, 5]
    entries = list(record["layout"].values())
    assert sorted(entries) == ["rope/128"] * 5 + ["rope:256"]
    assert record["choice"].startswith("layer 4 is global: ")
    patch = json.loads((tmp_path / "swan" / "patch.json").read_text())
    assert (patch["format"], patch["layout"]) == (2, record["layout"])
    assert [path.name for path in tmp_path.iterdir()] == ["swan"], "the search folder is removed"
    loaded = farspan.load(tmp_path / "swan").model
    assert seam.installed_layout(loaded).to_json() == record["layout"]
    windows = [layer.window for layer in probe(loaded)]
    assert windows == [128 if entry == "rope/128" else None for entry in entries]


def test_scales_after_swan_go_to_its_global_layers(tiny, tmp_path):
    overrides = [*FEW, "tuning.steps=2", "tuning.batch=2", "swan.global_share=0.5"]
    result = extend(
        tiny / "rope",
        128,
        tmp_path / "both",
        "swan+uniform",
        data=tiny / "text.txt",
        overrides=overrides,
    )
    patch = result.patch
    assert patch.method == "swan+uniform"
    assert patch.scales.layers == patch.layout.global_layers
    assert len(patch.scales.layers) == 1
    assert patch.weights
    assert result.proof == pytest.approx(0, abs=1e-4)
    loaded = farspan.load(tmp_path / "both").model
    scaled = [state.layer for state in seam.attached_states(loaded) if state.scales is not None]
    assert tuple(scaled) == patch.layout.global_layers
    assert seam.installed_layout(loaded) == patch.layout


@pytest.mark.parametrize(
    ("method", "overrides", "message"),
    [
        ("yarn", ["swan.window=64"], "yarn does not use swan.window=64; .* that does: swan, auto$"),
        ("yarn", ["tuning.rank=4"], "yarn tunes no weights, so it does not use tuning.rank=4"),
        ("uniform", ["swan.tokens=9"], "uniform does not use swan.tokens=9"),
        ("swan", ["search.steps=9"], "swan does not use search.steps=9"),
        ("swan", ["tune=fair"], "swan does not use tune=fair"),
        ("swan+yarn", [], r"swan\+yarn sets rotation twice: .* choose one of them"),
        ("swan+drope", [], r"swan\+drope sets rotation twice"),
        (
            "swan+swan",
            [],
            r"has swan 2 times, and only one of them .*; write swan once",
        ),
        ("continue+continue", [], r"has continue 2 times"),
        ("uniform+swan", [], "scales attention twice or too early"),
        ("swan", ["swan.global_share=0"], "swan.global_share is 0; choose a share"),
        ("swan", ["swan.length=1024"], "swan.length is 1024, more than the train length of 512"),
    ],
)
def test_bad_requests_raise_one_sentence_and_write_nothing(tmp_path, method, overrides, message):
    with pytest.raises(FarspanError, match=message) as caught:
        extend("rope-twin", 1024, tmp_path / "out", method, overrides=overrides)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE |= {"rope_type": "longrope", "original_max_position_embeddings": LENGTH}


@pytest.mark.parametrize(("rope", "way_out"), [(DYNAMIC, "ntk or set .*"), (LONGROPE, "ntk")])
def test_a_rotation_that_follows_the_length_is_refused_before_anything_is_read(rope, way_out):
    """It does so in windows, too, whatever rotation the global layers keep."""
    model = build("llama")
    set_rope(model, rope)
    check = partial(rules.check_compatible, ["swan"], probe(model), model.config, "it")
    kind = rope["rope_type"]
    message = rf"the rotation of it changes with the length .* \({kind}\), also in windows.* use "
    for rotation in swan_config.ROTATIONS:
        with pytest.raises(FarspanError, match=f"{message}{way_out}$"):
            check(ExtendConfig(swan=SwanConfig(rotation=rotation)))
    assert not check(ExtendConfig(swan=SwanConfig(rotation="none", global_share=1)))
    started = []
    job = job_for(model, progress=lambda label, steps: started.append(label))
    for rotation in swan_config.ROTATIONS:
        with pytest.raises(FarspanError, match="changes with the length of the text"):
            swan(model, job, replace(SETTINGS, rotation=rotation), QUICK)
    assert not started


@torch.no_grad()
def test_windowed_layers_see_the_length_by_a_dynamic_rotation_and_not_by_the_default():
    """Why swan refuses it, and that the way out which the refusal names is one."""
    model = build("llama")
    limit = model.config.max_position_embeddings
    ids, inside, apart = tokens(4 * limit, batch=1), [], []
    for rope in ({"rope_type": "default"}, DYNAMIC):
        set_rope(model, {"rope_theta": 10_000.0, **rope})
        inside.append(model(ids[:, :limit], use_cache=False).logits)
        set_layout(model, Layout.parse([f"rope/{WINDOW}"] * 4))
        reach = 4 * WINDOW
        ends = [model(text, use_cache=False).logits[:, -1] for text in (ids, ids[:, -reach:])]
        apart.append((ends[0] - ends[1]).abs().max())
        seam.remove_layout(model)
    assert torch.equal(*inside)
    assert apart[0] < 1e-3
    assert apart[1] > 0.1


def test_micro_batches_that_do_not_divide_the_batch_are_refused_before_anything_is_read():
    """The windows of the search split are counted before they are read."""
    config = ExtendConfig(tuning=TuningConfig(batch=10, micro_batch=4))
    with pytest.raises(FarspanError, match="batch of 10 windows cannot be split .* of 4"):
        search_windows(["swan"], config, 1024, 512)


def test_the_recipe_reaches_the_method(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "farspan.methods.registry.swan",
        lambda model, job, config, tuning: seen.append((config, tuning)),
    )
    overrides = ["swan.window=64", "swan.layers=even", "tuning.rank=4"]
    METHODS["swan"](None, None, read_extend_config(None, overrides))
    assert seen == [(SwanConfig(window=64, layers="even"), TuningConfig(rank=4))]


@pytest.mark.long
def test_an_extension_killed_while_it_distills_resumes(tiny, tmp_path):
    overrides = [*FEW, "tuning.steps=4", "tuning.batch=2", "tuning.save_every=1"]
    overrides += ["swan.global_share=0.5", "swan.facts=0.3"]
    request = (tiny / "rope", 128)
    options = dict(data=tiny / "text.txt", overrides=overrides)
    uninterrupted = extend(*request, tmp_path / "whole", "swan", **options)
    with pytest.raises(KeyboardInterrupt):
        extend(*request, tmp_path / "cut", "swan", progress=stop_at(3), **options)
    assert (tmp_path / ".cut.search").exists()
    resumed = extend(*request, tmp_path / "cut", "swan", **options)
    for name, weight in uninterrupted.patch.weights.items():
        assert torch.equal(weight, resumed.patch.weights[name]), name
    assert not (tmp_path / ".cut.search").exists()


def layer_like(**changes) -> Layer:
    layer = Layer(0, torch.nn.Identity(), "rope", None, 4, 2, 8, 1.0)
    return replace(layer, **changes)


def test_attention_flops_count_the_keys_that_a_window_leaves():
    """4·heads·width for each key that a token sees, itself included, on average over a text."""
    for window in (None, 1, 3, 10, 99):
        seen = [min(place + 1, window or 10) for place in range(10)]
        flops = model_facts._attention_flops(layer_like(window=window), 10)
        assert flops == pytest.approx(4 * 4 * 8 * sum(seen) / 10)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_forward_flops_are_those_that_torch_counts(tied: bool):
    """A table of embeddings is read and not multiplied, unless it is the head too."""
    config = hf.LlamaConfig(**SHAPE, tie_word_embeddings=tied, attn_implementation="eager")
    model = hf.LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(tokens(1, batch=1), use_cache=False)
    flops = model_facts.forward_flops(model, [layer_like()] * 4, 1)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_distilled_token_costs_what_torch_counts_for_both_models():
    """A forward and a backward pass of the model, and a forward pass of its base."""
    config = hf.LlamaConfig(**SHAPE, attn_implementation="eager")
    model, layers = hf.LlamaForCausalLM(config), [layer_like()] * 4
    flops = []
    for base in ([], layers):
        with FlopCounterMode(display=False) as counter:
            model(tokens(1, batch=1), use_cache=False).logits.sum().backward()
            if base:
                with torch.no_grad():
                    model(tokens(1, batch=1), use_cache=False)
        flops.append(counter.get_total_flops())
        counted = swan_module.distillation_flops(model, layers, base, 1)
        assert counted == pytest.approx(flops[-1], rel=0.02)
    assert flops[0] < flops[1]


@pytest.mark.parametrize(("share", "windows"), [(0.5, [8, None, 8, None]), (0.01, [8, 8, 8, None])])
def test_planned_layers_have_windows_except_the_global_ones(share, windows):
    layers = [layer_like(index=index) for index in (0, 2, 3, 7)]
    config = replace(SETTINGS, global_share=share)
    planned = swan_layout.planned_layers(layers, config, LENGTH)
    assert [layer.window for layer in planned] == windows
    assert [replace(layer, window=None) for layer in planned] == layers
    assert swan_layout.planned_layers(planned, config, LENGTH) == planned, "its windows stay"


# Sharpening, auto, the estimate, and continued training.


def test_the_slope_that_retrieves_best_among_those_that_cost_little():
    losses = {0.0: (3.50, 0.9), 0.1: (3.496, 0.4), 0.2: (3.5009, 0.3), 0.3: (3.52, 0.1)}
    assert swan_module.best_slope(losses, 0.005) == 0.2, "0.3 costs too much"
    assert swan_module.best_slope(losses, 0.03) == 0.3
    assert swan_module.best_slope({0.0: (3.5, 0.2), 0.1: (3.5, 0.3)}, 0.005) == 0.0
    assert swan_module.best_slope({0.0: (3.5, 0.2), 0.1: (3.75, 0.1)}, 0.25) == 0.1, "just as much"


def test_sharpening_measures_every_slope_and_scales_by_the_chosen_one(monkeypatch):
    monkeypatch.setattr(swan_module, "SLOPES", (0.0, 0.2))
    monkeypatch.setattr(swan_module, "best_slope", lambda losses, max_loss: max(losses))
    advanced = {}

    def progress(label, total):
        return lambda count, note: advanced.setdefault((label, total), []).append(count)

    model = build("farspan-rope")
    job = job_for(model, progress=progress, choose=tokens(TARGET, batch=1))
    scales = swan_module._sharpen(model, job, (1, 3), 0.0)
    assert advanced == {("sharpen", 2): [1, 1]}
    assert (scales.layers, scales.basis, scales.length) == ((1, 3), "log", LENGTH)
    assert torch.equal(scales.base, torch.ones(2, 4))
    assert torch.equal(scales.slope, torch.full((2, 4), 0.2))
    monkeypatch.setattr(swan_module, "best_slope", lambda losses, max_loss: 0.0)
    assert swan_module._sharpen(model, job, (1, 3), 0.0) is None


def test_sharpening_scales_all_heads_of_layers_with_unequal_ones(monkeypatch):
    monkeypatch.setattr(swan_module, "SLOPES", (0.0, 0.2))
    monkeypatch.setattr(swan_module, "best_slope", lambda losses, max_loss: 0.2)
    model = randomized(laguna)
    scales = swan_module._sharpen(model, job_for(model, choose=tokens(TARGET, batch=1)), (0, 2), 0)
    heads = {layer.index: layer.heads for layer in probe(model)}
    assert (heads[0], heads[2]) == (4, 8)
    assert scales.base.shape == (2, 8)


@pytest.mark.parametrize(("target", "distance"), [(3 * LENGTH, LENGTH), (LENGTH + 8, 20)])
def test_sharpening_repeats_tokens_a_train_length_or_half_the_target_apart(
    target, distance, monkeypatch
):
    distances = []

    def rows_with_repeats(ids, seed, distance):
        distances.append(distance)
        return layer_costs.rows_with_repeats(ids, seed, distance)

    monkeypatch.setattr(swan_module, "SLOPES", (0.0,))
    monkeypatch.setattr(swan_module, "rows_with_repeats", rows_with_repeats)
    model = build("farspan-rope")
    job = job_for(model, target=target, choose=tokens(target, batch=1))
    swan_module._sharpen(model, job, (3,), 0.0)
    assert distances == [distance]
    (measured,) = job.details["sharpening"]
    assert all(number == round(number, 5) for number in measured.values()), "five decimals"


@pytest.mark.long
def test_sharpening_scales_the_global_layers_only_and_is_recorded(monkeypatch):
    model = build("farspan-rope")
    monkeypatch.setattr(swan_module, "best_slope", lambda losses, max_loss: 0.15)
    job = job_for(model)
    patch = swan(model, job, replace(EVEN, sharpen=True), QUICK)
    assert patch.scales.layers == patch.layout.global_layers == (3,)
    assert (patch.scales.basis, patch.scales.length) == ("log", LENGTH)
    assert patch.scales.slope.unique().tolist() == [pytest.approx(0.15)]
    assert patch.scales.base.unique().tolist() == [1.0]
    assert [row["slope"] for row in job.details["sharpening"]] == list(swan_module.SLOPES)
    unscaled = job.details["sharpening"][0]
    patched = replace(patch, scales=None).apply(build("farspan-rope"))
    ids, known = layer_costs.rows_with_repeats(job.choose, job.seed, LENGTH)
    losses = token_losses(patched, ids)
    assert unscaled["retrieval"] == pytest.approx(losses[known[:, 1:]].mean().item(), abs=1e-4)
    assert unscaled["loss"] == pytest.approx(losses[~known[:, 1:]].mean().item(), abs=1e-4)
    assert swan(model, job_for(model), EVEN, QUICK).scales is None


def test_a_scaling_method_replaces_the_sharpening():
    model = build("farspan-rope")
    config = ExtendConfig(swan=EVEN, tuning=QUICK)
    patch, _ = fit_methods(model, probe(model), job_for(model), config, ["swan", "logn"])
    assert patch.method == "swan+logn"
    assert patch.scales.layers == (3,)


def on_gpu(model):
    """Pretend that the model is on a GPU, where auto may train weights."""
    return SimpleNamespace(config=model.config, device=torch.device("cuda"))


def test_auto_tries_swan_far_beyond_the_train_length_on_a_gpu():
    model = build("llama")
    layers, job = probe(model), job_for(model)
    far = replace(job, target=5 * LENGTH)
    candidates = auto.candidate_methods
    assert candidates(["auto"], layers, on_gpu(model), far) == ["ntk", "yarn", "swan"]
    at_the_limit = replace(job, target=4 * LENGTH)
    assert "swan" not in candidates(["auto"], layers, on_gpu(model), at_the_limit)
    assert "swan" not in candidates(["auto"], layers, on_gpu(model), job)
    assert "swan" not in candidates(["auto"], layers, model, far)
    quantized = on_gpu(model)
    quantized.is_quantized = True
    assert candidates(["auto"], layers, quantized, far) == ["ntk", "yarn"]
    assert candidates(["swan"], layers, model, job) == ["swan"]
    gemma = build("gemma3")
    assert "swan" not in candidates(["auto"], probe(gemma), on_gpu(gemma), far)
    set_rope(model, DYNAMIC)
    assert candidates(["auto"], layers, on_gpu(model), far) == ["ntk", "uniform"]


@pytest.mark.parametrize("error", [FarspanError("training diverged"), PreemptedError("stopped")])
def test_auto_goes_on_without_swan_if_that_fails(monkeypatch, error):
    """A run that was stopped ends all the same: it resumes."""

    def fail(*_):
        raise error

    model = build("llama")
    monkeypatch.setattr(auto, "candidate_methods", lambda *_: ["ntk", "swan"])
    monkeypatch.setitem(METHODS, "swan", fail)
    fit = partial(fit_methods, model, probe(model), job_for(model))
    if isinstance(error, PreemptedError):
        with pytest.raises(PreemptedError):
            fit(ExtendConfig(), ["auto"])
        return
    patch, notes = fit(ExtendConfig(), ["auto"])
    assert patch.method == "ntk"
    assert notes[0] == "auto left out swan, which failed: training diverged"


@pytest.mark.parametrize(
    ("text", "count"),
    [("CUDA out of memory", 1), ("CUDA out of memory", 2), ("shapes cannot be multiplied", 1)],
)
def test_auto_goes_on_without_swan_if_memory_is_too_small_for_it(monkeypatch, text, count):
    """Other errors of torch are of the program, and end the command; and so does one process of
    several, for which the others wait."""
    monkeypatch.setattr(auto, "processes", lambda: SimpleNamespace(num_processes=count))
    loss_module = tuning_module.LossModule

    def fail(self, batch):
        raise torch.OutOfMemoryError(text) if "memory" in text else RuntimeError(text)

    monkeypatch.setattr(loss_module, "forward", fail)
    monkeypatch.setattr(auto, "candidate_methods", lambda *_: ["ntk", "swan"])
    model = build("llama")
    before = snapshot(model)
    settings = replace(EVEN, loss="cross-entropy")
    config = ExtendConfig(swan=settings, tuning=QUICK)
    fit = partial(auto.fit_best, model, probe(model), job_for(model), config)
    if "memory" not in text or count > 1:
        with pytest.raises(RuntimeError, match=text):
            fit()
        return
    patch, notes = fit()
    assert patch.method == "ntk"
    assert notes[0].startswith("auto left out swan, which ran out of memory; try ")
    assert_unchanged(model, before)


@pytest.mark.parametrize(("lost", "chosen"), [(auto.MAX_LOST, "swan"), (0.2, "ntk")])
def test_auto_rejects_swan_if_it_loses_retrieval(monkeypatch, lost, chosen):
    model = build("llama")
    layers, job = probe(model), job_for(model)
    monkeypatch.setattr(auto, "candidate_methods", lambda *_: ["ntk", "swan"])
    monkeypatch.setattr(auto, "_lost_retrieval", lambda *_: lost)
    monkeypatch.setattr(
        auto, "_patched_loss", lambda model, patch, windows: float(patch.method != "swan")
    )
    config = ExtendConfig(swan=EVEN, tuning=QUICK)
    patch, notes = fit_methods(model, layers, job, config, ["auto"])
    assert patch.method == chosen
    assert any("auto rejected swan" in note for note in notes) == (chosen != "swan")
    assert bool(job.details) == (chosen == "swan"), "the record is about the chosen method"


def test_lost_retrieval_is_measured_with_the_whole_patch():
    model = build("llama")
    before, job = snapshot(model), job_for(model)
    patch = swan(model, job, EVEN, QUICK)
    expected = layer_costs.retrieval_loss(patch.apply(build("llama")), job)
    lost = auto._lost_retrieval(model, patch, job)
    assert lost == pytest.approx(expected - layer_costs.retrieval_loss(model, job), abs=1e-5)
    assert_unchanged(model, before)


@pytest.mark.long
def test_the_estimate_counts_tokens_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["swan.tokens=8192", "tuning.batch=4", "passkeys=0"]
    estimate = estimate_extension("rope-twin", 1024, "swan", overrides=overrides)
    assert (estimate.methods, estimate.tokens, estimate.steps) == (("swan",), 8192, 4)
    # Six multiplications for each weight and token to learn, and two to teach.
    assert estimate.flops == pytest.approx(8 * 5_868_800 * 8192, rel=0.3)
    assert estimate.seconds > estimate.stages["distill"] > 0
    assert estimate.text["choose"] == 4 * 1024, "of the preset quick"
    assert list(tmp_path.iterdir()) == []
    assert estimate_extension("rope-twin", 1024, "yarn").tokens == 0


@pytest.mark.parametrize(
    ("method", "tokens", "notes"),
    [
        ("swan", 10_000, []),
        ("swan", 25_000, ["the 1,000 tokens of the search text are read 25 times; give more"]),
        ("auto", 5_000, ["auto also tries swan, which trains the weights on 5,000 tokens"]),
        ("auto", 0, []),
    ],
)
def test_what_a_distillation_means_is_said_before_it_starts(method, tokens, notes):
    run = SimpleNamespace(names=[method])
    said = list(extend_module._distillation_notes(run, tokens, 1000))
    assert len(said) == len(notes)
    assert all(text.startswith(note) for text, note in zip(said, notes, strict=True))


@pytest.mark.long
def test_an_estimate_and_a_run_say_how_often_the_text_is_read(tiny, tmp_path):
    overrides = [*FEW, "tuning.steps=2", "tuning.batch=2000", "swan.facts=0"]
    options = dict(data=tiny / "text.txt", overrides=overrides)
    estimate = estimate_extension(tiny / "rope", 128, "swan", **options)
    assert any("of the search text are read" in note for note in estimate.notes)
    said = []
    overrides[1:] = ["tuning.steps=1", "tuning.batch=2", "swan.facts=0"]
    extend(tiny / "rope", 128, tmp_path / "out", "swan", say=said.append, **options)
    assert not any("are read" in text for text in said)
    assert sum("layers at equal distances" in text or "costs retrieval" in text for text in said)


@pytest.mark.long
def test_the_layout_is_said_when_it_is_chosen():
    said, labels = [], []

    def progress(label, steps):
        labels.append((label, len(said)))
        return lambda count=1, note="": None

    model = build("farspan-rope")
    swan(model, job_for(model, say=said.append, progress=progress), EVEN, QUICK)
    choice = "layer 3 is global, 1 of 4 layers at equal distances"
    assert said == [f"{choice}; layout: 3 × rope/8, 1 × none"]
    assert ("distill", 1) in labels, "before the distillation"


@pytest.mark.parametrize(
    ("rate", "shown"), [(0.0, ""), (412.0, ", 412 tokens/s"), (52_400.0, ", 52K tokens/s")]
)
def test_the_speed_of_slow_training_is_not_rounded_to_nothing(rate, shown):
    metrics = SimpleNamespace(loss=1.0, tokens_per_second=rate)
    assert tuning_module._step_note(metrics) == f"loss 1.0000{shown}"


def test_json_has_the_choice_the_cache_and_the_distilled_tokens(monkeypatch):
    details = {"choice": "layer 3 is global", "distillation": {"tokens": 9}, "layer_costs": []}
    result = extend_module.ExtendResult(
        job_without_model().patch("swan"),
        Path("out"),
        *({"loss@64": 1.0}, {"loss@64": 0.5}),
        curves={},
        cache={"before": {"per_token": 8}, "after": {"per_token": 1}},
        proof=0.0,
        effect=1.0,
        notes=("a note",),
        details=details,
    )
    monkeypatch.setattr(extend_module, "extend", lambda *_, **__: result)
    with console.capture() as captured:
        run = CliRunner().invoke(app, ["extend", "rope-twin", "--to", "1k", "--json"])
    assert run.exit_code == 0, run.output
    printed = json.loads(captured.get() or run.stdout)
    assert printed == result.to_dict()
    assert printed["choice"] == details["choice"]
    assert printed["distillation"] == details["distillation"]
    assert (printed["cache_bytes"], printed["notes"]) == (result.cache, ["a note"])
    assert "layer_costs" not in printed


def test_continued_training_changes_weights_only():
    model = build("llama")
    before, job = snapshot(model), job_for(model)
    patch = METHODS["continue"](model, job, ExtendConfig(tuning=QUICK))
    assert_unchanged(model, before)
    assert patch.layout is patch.rope is patch.scales is None
    loss = token_losses(model, job.search).mean()
    assert token_losses(patch.apply(build("llama")), job.search).mean() < loss


def test_a_resumed_run_keeps_the_layout_that_was_chosen(tmp_path, monkeypatch):
    model = build("farspan-rope")
    job = job_for(model, folder=tmp_path)
    first = swan_module._stored_layout(model, make_teacher(model), job, SETTINGS)
    monkeypatch.setattr(swan_layout, "choose_layers", lambda *_: (0,))
    again = job_for(model, folder=tmp_path)
    assert swan_module._stored_layout(model, make_teacher(model), again, SETTINGS) == first
    assert again.details["choice"] == job.details["choice"]
    other = swan_module._stored_layout(model, make_teacher(model), job_for(model), SETTINGS)
    assert other.global_layers == (0,)


def test_the_bundled_conversion_has_the_recipe_of_its_command():
    """And a manifest that lists it."""
    folder = Path(resolve_bundled("swan-twin"))
    card = (folder / "README.md").read_text()
    overrides = re.findall(r"(?:swan\.\w+|passkeys)=\S+", card.partition("## Reproduce")[2])
    assert "swan.answers=0" in overrides
    assert read_extend_config(folder / "recipe.toml") == read_extend_config(None, overrides)
    check_manifest(folder)
    assert "recipe.toml" in (folder / "manifest.json").read_text()
