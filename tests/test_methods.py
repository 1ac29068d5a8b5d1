"""Methods of `extend` on a model: uniform scales, schedules, rotary methods, tuned weights."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from families import SHAPE, VOCABULARY
from farspan.attention import seam
from farspan.attention.patch import fingerprint
from farspan.attention.probe import probe
from farspan.attention.rope import set_rope
from farspan.errors import FarspanError
from farspan.methods import auto, rules
from farspan.methods import job as job_module
from farspan.methods import rope as rope_module
from farspan.methods import tuning as tuning_module
from farspan.methods import uniform as uniform_module
from farspan.methods.continued import continue_training
from farspan.methods.drope import drope
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.headscale import headscale
from farspan.methods.job import (
    loss_by_position,
    lowest_loss,
    scaled_loss,
    search_best,
    shared_batch,
)
from farspan.methods.rope import ROPE_SCALINGS, fit_rope, rope_override
from farspan.methods.rope import _rope_parameters as rope_parameters
from farspan.methods.schedules import SCHEDULES, fit_schedule
from farspan.methods.search_config import SearchConfig
from farspan.methods.tuning import TuningConfig
from farspan.methods.uniform import fit_log, full_grid, slope_interval, uniform
from farspan.train.optim import learning_rate
from fit_jobs import BY_NAME, FOUR, LENGTH, QUICK, TARGET, job_for, job_without_model


def test_search_best_finds_the_minimum_to_its_step():
    for best in (0.8, 1.0, 1.234, 2.17, 3.0):
        minimum, losses = search_best(
            lambda value, best=best: (value - best) ** 2, np.arange(0.8, 3.01, 0.2), 0.01
        )
        assert minimum == pytest.approx(round(best, 2), abs=0.0051)
        assert len(losses) < 40
        assert all(abs(value * 100 - round(value * 100)) < 1e-6 for value in losses)
        assert min(losses, key=losses.get) == minimum
    for slope, end in ((1, 1.0), (-1, 2.0)):
        minimum, _ = search_best(lambda value, slope=slope: slope * value, (1.0, 2.0), 0.25)
        assert minimum == end, "the ends of the grid count"
    with pytest.raises(FarspanError, match="no scale gives a finite loss"):
        search_best(lambda value: math.nan, (1.0, 2.0), 0.1)


@pytest.mark.parametrize(
    ("best", "chosen"), [(0.5, 0.8), (0.8, 0.8), (1.37, 1.37), (3.0, 3.0), (3.6, 3.0)]
)
def test_uniform_searches_the_documented_grid(best, chosen, monkeypatch):
    """And promises no number of losses, which it does not know beforehand."""

    def loss(model, windows, scales):
        return abs(float(scales.base[0, 0]) - best)

    totals = []

    def progress(label, total):
        totals.append(total)
        return lambda count, note: None

    monkeypatch.setattr(uniform_module, "scaled_loss", loss)
    patch = uniform(None, job_without_model(progress=progress))
    assert float(patch.scales.base[0, 0]) == pytest.approx(chosen)
    assert totals == [0]


@pytest.mark.parametrize("name", FOUR)
def test_uniform_finds_the_best_scale(name):
    model = BY_NAME[name].build()
    job = job_for(model)
    best = scaled_loss(model, job.choose, uniform(model, job).scales)
    for other in (0.8, 1.0, 1.2, 1.6, 2.0, 3.0):
        assert best <= scaled_loss(model, job.choose, job.uniform(other)) + 1e-6
    assert not seam.installed(model)


def test_tuning_has_the_documented_learning_rate_and_no_weight_decay(monkeypatch):
    """The rate falls to a tenth, as in searches. A weight without a gradient stays as it is."""
    monkeypatch.setattr(tuning_module, "train_weights", lambda *arguments: arguments[-1])
    model = BY_NAME["llama"].build()
    before = {name: part.detach().clone() for name, part in model.named_parameters()}
    training = tuning_module.tune_weights(model, job_without_model(), "pi", TuningConfig())
    assert training.optimization.lr == 1e-4
    assert learning_rate(100, 100, training.optimization) == pytest.approx(0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in tuning_module.make_optimizers(model, training.optimization):
        optimizer.step()
    assert all(torch.equal(part, before[name]) for name, part in model.named_parameters())


@pytest.mark.parametrize(("rate", "used"), [(0.0, 1e-3), (5e-4, 5e-4)])
def test_drope_recalibrates_with_its_own_learning_rate(rate, used, monkeypatch):
    """Ten times that of tuning, where nothing else is set."""
    rates = []

    def record(model, job, name, tuning) -> dict:
        rates.append(tuning.lr)
        return {}

    monkeypatch.setattr("farspan.methods.drope.tune_weights", record)
    model = BY_NAME["llama"].build()
    drope(model, job_for(model), TuningConfig(lr=rate))
    assert rates == [used]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_match_their_formulas(name):
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    patch = fit_schedule(model, job, name, fitted=False)
    n = torch.tensor([2.0, LENGTH, LENGTH + 1, 2 * LENGTH, TARGET])
    values = patch.scales.at(n)[0, 0]
    formulas = {
        "logn": [max(1.0, math.log(x) / math.log(LENGTH)) for x in n.tolist()],
        "llama4": [1 + 0.1 * math.log(1 + x // LENGTH) for x in n.tolist()],
        "ssmax": [math.log(x) / math.log(LENGTH) for x in n.tolist()],
    }
    assert set(formulas) == {name for name in SCHEDULES if SCHEDULES[name].default_slope}
    if name in formulas:
        assert values.tolist() == pytest.approx(formulas[name], abs=1e-5)
    else:
        assert values[:2].tolist() == [1.0, 1.0]
    fitted = fit_schedule(model, job, name, fitted=True)
    assert (
        scaled_loss(model, job.choose, fitted.scales)
        <= scaled_loss(model, job.choose, patch.scales) + 1e-6
    )


@pytest.mark.parametrize(
    ("name", "basis_at_target", "slope"),
    [
        ("piecewise", 1.0, 0.37),
        ("logn", math.log(TARGET / LENGTH), 0.335),
        ("llama4", math.log(1 + TARGET // LENGTH), 0.335),
        ("ssmax", math.log(TARGET / LENGTH), 0.335),
    ],
)
def test_slopes_are_fitted_to_half_a_hundredth_or_a_hundredth(
    name, basis_at_target, slope, monkeypatch
):
    """A hundredth for λ̂ beyond the train length itself, half of it for slopes of a logarithm."""

    def loss(model, windows, scales) -> float:
        return float(scales.at(torch.tensor([float(TARGET)])).mean() - lowest) ** 2

    lowest = 1 + slope * basis_at_target
    monkeypatch.setattr("farspan.methods.schedules.scaled_loss", loss)
    patch = fit_schedule(None, job_without_model(), name, fitted=True)
    assert patch.scales.slope.unique().tolist() == pytest.approx([slope], abs=1e-6)


@pytest.mark.parametrize("name", ["farspan-rope", "llama", "qwen3", "smollm3"])
@pytest.mark.parametrize("method", ROPE_SCALINGS)
def test_rope_methods_restore_the_model_and_give_a_working_patch(name, method):
    family = BY_NAME[name]
    model = family.build()
    ids = torch.randint(VOCABULARY, (1, TARGET))
    before = model(ids).logits.detach()
    patch = fit_rope(model, job_for(model), method, None)
    assert torch.equal(model(ids).logits, before)
    patched = patch.apply(model)
    if method != "dynamic-ntk":  # which starts at the config's length, far beyond these tokens
        assert not torch.equal(patched(ids).logits, before)
    kinds = {"pi": "linear", "ntk": "default", "dynamic-ntk": "dynamic", "yarn": "yarn"}
    assert patch.rope["rope_type"] == kinds[method]


@pytest.mark.parametrize("multiple", [1, 1.25, 1.5, 2, 3])
def test_every_documented_factor_can_be_chosen(multiple, monkeypatch):
    best, tried = multiple * TARGET / LENGTH, []

    def override(model, rope):
        tried.append(rope["factor"])
        return contextlib.nullcontext()

    monkeypatch.setattr(
        rope_module, "_rope_parameters", lambda *arguments: {"factor": arguments[-1]}
    )
    monkeypatch.setattr(rope_module, "rope_override", override)
    monkeypatch.setattr(
        rope_module, "loss_by_position", lambda *_: torch.tensor(abs(tried[-1] - best))
    )
    assert fit_rope(None, job_without_model(), "yarn", None).rope["factor"] == best


@pytest.mark.parametrize("method", ["pi", "yarn", "dynamic-ntk"])
def test_factor_always_reaches_the_target(method, monkeypatch):
    model = BY_NAME["farspan-rope"].build()

    def rising_loss(model, ids):
        return torch.tensor(model.config.rope_parameters["factor"])

    monkeypatch.setattr("farspan.methods.rope.loss_by_position", rising_loss)
    smallest = 1 if method == "dynamic-ntk" else TARGET / LENGTH
    assert fit_rope(model, job_for(model), method, None).rope["factor"] == smallest


@pytest.mark.parametrize("name", ["farspan-rope", "llama"])
@pytest.mark.parametrize("target", [128, 256])
def test_dynamic_ntk_rotates_a_text_as_ntk_for_its_length_does(name, target):
    """Its smallest factor; inside the train length it rotates as before."""
    model = BY_NAME[name].build()
    length = model.config.max_position_embeddings
    job = job_for(model, train_length=length, target=target)
    before = rotary_of(model).inv_freq.clone()
    with rope_override(model, rope_parameters(model, job, "ntk", target / length)):
        static = rotary_of(model).inv_freq.clone()
    with rope_override(model, rope_parameters(model, job, "dynamic-ntk", 1.0)):
        model(torch.zeros(1, length, dtype=torch.long))
        inside = rotary_of(model).inv_freq.clone()
        model(torch.zeros(1, target, dtype=torch.long))
        dynamic = rotary_of(model).inv_freq.clone()
    assert torch.allclose(inside, before)
    assert torch.allclose(dynamic, static)
    assert not torch.allclose(dynamic, before)


def rotary_of(model) -> torch.nn.Module:
    (rotary,) = (module for module in model.modules() if hasattr(module, "attention_scaling"))
    return rotary


@pytest.mark.parametrize("name", ["farspan-rope", "llama", "smollm3"])
def test_ntk_stretches_the_base_by_the_published_exponent(name):
    """θ·s^(d/(d−2)): the lowest frequency is divided by s, and the highest is kept."""
    model = BY_NAME[name].build()
    before = rotary_of(model).inv_freq.clone()
    rope = rope_parameters(model, job_for(model), "ntk", 4.0)
    theta = model.config.rope_parameters["rope_theta"]
    assert rope["rope_theta"] == pytest.approx(theta * 4 ** (8 / 6)), "heads have 8 dimensions"
    with rope_override(model, rope):
        after = rotary_of(model).inv_freq
        assert after[-1].item() == pytest.approx(before[-1].item() / 4, rel=1e-5)
        assert after[0].item() == before[0].item() == 1
        assert (after[1:] < before[1:]).all()


def test_ntk_stretches_the_slower_of_two_frequencies():
    """Of four dimensions: θ·s^(4/2)."""
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "head_dim": 4}))
    rope = rope_parameters(model, job_for(model), "ntk", 3.0)
    assert rope["rope_theta"] == pytest.approx(9 * 10_000.0)
    with rope_override(model, rope):
        assert rotary_of(model).inv_freq.tolist() == pytest.approx([1.0, 0.01 / 3])


def test_ntk_is_refused_where_a_head_rotates_two_dimensions():
    model = BY_NAME["gpt-neox"].build()
    with pytest.raises(FarspanError, match="heads that rotate 2 dimensions do not depend on it"):
        fit_rope(model, job_for(model), "ntk", None)


@pytest.mark.parametrize(("factor", "temperature"), [(2.0, 1.0693147), (16.0, 1.2772589)])
@pytest.mark.parametrize("name", ["farspan-rope", "llama"])
def test_yarn_multiplies_queries_and_keys_by_the_published_temperature(name, factor, temperature):
    """0.1·ln s + 1, on both, so that scores get its square."""
    model = BY_NAME[name].build()
    with rope_override(model, rope_parameters(model, job_for(model), "yarn", factor)):
        cos, sin = rotary_of(model)(torch.zeros(1, 3, 8), torch.tensor([[0, 5, 50]]))
    lengths = (cos**2 + sin**2).sqrt()
    assert torch.allclose(lengths, torch.full_like(lengths, temperature), atol=1e-6)


def test_yarn_stretches_frequencies_by_how_often_they_turn():
    """Those that turn more than 32 times in L stay, those below once are divided by s, and those
    between are blended (Peng 2023)."""
    length, factor, theta = 4096, 8.0, 10_000.0
    job = replace(job_without_model(), train_length=length)
    rope = {"rope_theta": theta} | ROPE_SCALINGS["yarn"](job, factor, theta, 128)
    config = LlamaConfig(head_dim=128, max_position_embeddings=length, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
    original = theta ** -(torch.arange(0, 128, 2) / 128)
    turns, ratio = length * original / (2 * math.pi), frequencies / original
    assert torch.allclose(ratio[turns > 40], torch.tensor(1.0))
    assert torch.allclose(ratio[turns < 0.8], torch.tensor(1 / factor))
    blended = ratio[(turns > 1.3) & (turns < 26)]
    assert ((blended > 1 / factor + 0.01) & (blended < 0.99)).all()
    assert len(blended) > 10


STRETCHED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
}


@pytest.mark.parametrize("existing", [None, *STRETCHED])
def test_factor_of_one_changes_nothing_and_existing_scaling_is_kept(existing):
    model = BY_NAME["llama"].build()
    if existing is not None:
        set_rope(model, STRETCHED[existing])
    config, layers, ids = model.config, probe(model), torch.randint(VOCABULARY, (1, 64))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        for method in ROPE_SCALINGS if existing is None else ("ntk",):
            with rope_override(model, rope_parameters(model, job_for(model), method, 1.0)):
                assert torch.allclose(model(ids, use_cache=False).logits, before, atol=1e-6), method
    candidates = auto.candidate_methods(["auto"], layers, model, job_for(model))
    if existing is None:
        assert candidates == ["ntk", "yarn"]
        return
    assert candidates == ["ntk", "uniform"]
    assert not rules.check_compatible(["ntk"], layers, config, "m", ExtendConfig())
    for method in ("pi", "yarn", "dynamic-ntk"):
        message = f"the rotation of m is already scaled .{existing}., and {method} would replace"
        with pytest.raises(FarspanError, match=message):
            rules.check_compatible([method, "headscale"], layers, config, "m", ExtendConfig())


def test_rope_methods_refuse_models_that_rotate_only_in_sliding_windows():
    model = BY_NAME["llama"].build()
    model.config.rope_parameters = {
        "sliding_attention": dict(model.config.rope_parameters),
        "full_attention": None,
    }
    with pytest.raises(
        FarspanError, match="only sliding-window layers of LlamaForCausalLM use RoPE, so yarn would"
    ):
        rope_parameters(model, job_for(model), "yarn", 2.0)


def test_tuning_lowers_the_loss_and_the_patch_holds_the_weights():
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    plain = fit_rope(model, job, "pi", None)
    tuned = fit_rope(
        model, job, "pi", TuningConfig(steps=20, batch=2, micro_batch=2, lr=1e-2, warmup=2)
    )
    assert fingerprint(model) == job.model
    assert tuned.rope["factor"] == TARGET / LENGTH
    losses = []
    for patch in (plain, tuned):
        patched = patch.apply(BY_NAME["farspan-rope"].build())
        losses.append(float(loss_by_position(patched, job.search).mean()))
    assert losses[1] < losses[0]


def test_weights_are_tuned_on_windows_that_the_factor_reaches(monkeypatch):
    """Windows of a search for scales, which may follow, are longer than the target."""
    model, lengths = BY_NAME["farspan-rope"].build(), set()
    forward = tuning_module.LossModule.forward

    def watched(self, ids):
        lengths.add(ids.shape[1])
        return forward(self, ids)

    monkeypatch.setattr(tuning_module.LossModule, "forward", watched)
    job = job_for(model)
    assert job.search.shape[1] > TARGET
    fit_rope(model, job, "yarn", TuningConfig(steps=1, batch=2))
    assert lengths == {TARGET}


@pytest.mark.parametrize(("steps", "warmup"), [(5, 5), (20, 20), (50, 20), (0, 20)])
def test_the_learning_rate_is_reached_however_few_the_steps(steps, warmup, monkeypatch):
    plans = []
    monkeypatch.setattr(tuning_module, "train_weights", lambda *parts: plans.append(parts[-1]))
    model = BY_NAME["farspan-rope"].build()
    tuning_module.tune_weights(model, job_for(model), "drope", TuningConfig(steps=steps))
    assert plans[0].optimization.warmup == warmup


@pytest.mark.parametrize(("processes", "batch"), [(1, 8), (4, 8), (6, 12), (9, 9)])
def test_processes_share_a_default_batch_evenly(processes, batch, monkeypatch):
    state = SimpleNamespace(num_processes=processes, process_index=0)
    monkeypatch.setattr(job_module, "processes", lambda: state)
    assert shared_batch(8) == batch
    assert SearchConfig().resolve(True).batch == batch
    rows = job_without_model().batches(batch, 1, torch.device("cpu"))(0)
    assert len(rows) == batch // processes


def test_a_batch_that_processes_cannot_share_names_its_settings(monkeypatch):
    state = SimpleNamespace(num_processes=3, process_index=0)
    monkeypatch.setattr(job_module, "processes", lambda: state)
    with pytest.raises(FarspanError, match=r"8 windows .* for 3 processes; .* \(search.batch and"):
        job_without_model().batches(8, 1, torch.device("cpu"))


def test_drope_removes_positions_and_combines_with_scales():
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    dropped = drope(model, job, TuningConfig(steps=4, batch=2, micro_batch=2, lr=1e-3, warmup=1))
    patched = dropped.apply(BY_NAME["farspan-rope"].build())
    ids = torch.randint(VOCABULARY, (1, 12))
    positions = torch.arange(12)[None]
    with torch.no_grad():
        moved = patched(ids, position_ids=positions + 100, use_cache=False).logits
        assert torch.allclose(
            patched(ids, position_ids=positions, use_cache=False).logits, moved, atol=1e-5
        )
    combined = dropped.then(headscale(patched, job, QUICK))
    assert combined.method == "drope+headscale"
    assert combined.apply(BY_NAME["farspan-rope"].build())


def test_recovers_the_law_of_the_best_scale():
    positions = np.arange(64, 4096, 64.0)
    best = 1 + 0.35 * np.log(np.maximum(positions / 512, 1))
    assert fit_log(positions, best, 512) == pytest.approx((0.35, 1.0))
    for equal in (1.2, 2.6):  # as if the grid ended there; their mean has a rounding error
        assert fit_log(positions, np.full(len(positions), equal), 512)[1] is None
    model = BY_NAME["farspan-none"].build()
    grid = full_grid(model, job_for(model), torch.randint(VOCABULARY, (2, 64)), 0.95, 1.05, bins=8)
    assert grid.loss.shape == (11, 8)
    assert set(grid.best) <= set(grid.values)
    assert not seam.installed(model)


def test_the_best_scale_by_position_is_the_one_with_the_lowest_loss_there(monkeypatch):
    """A loss that is lowest at 1 + 0.4·ln(i / L), measured over 8 train lengths."""
    model = BY_NAME["farspan-none"].build()
    advanced, installed, length, overflow = {}, [], 8 * LENGTH, math.inf

    def progress(label, total):
        return lambda count, note: advanced.setdefault((label, total), []).append(count)

    job = job_for(model, progress=progress)

    def law(positions: np.ndarray) -> np.ndarray:
        return 1 + 0.4 * np.log(np.maximum(positions / LENGTH, 1))

    def loss(model, windows):
        if installed[-1] > overflow:
            return torch.full((length - 1,), math.nan)
        return torch.from_numpy((installed[-1] - law(np.arange(1.0, length))) ** 2)

    monkeypatch.setattr(
        seam, "install", lambda model, scales: installed.append(float(scales.base[0, 0]))
    )
    monkeypatch.setattr("farspan.methods.uniform.loss_by_position", loss)
    grid = full_grid(model, job, torch.zeros(1, length), 0.9, 2.0, bins=32)
    assert grid.values.tolist() == [number / 100 for number in range(90, 201)]
    assert advanced == {("grid", 111): [1] * 111}
    assert grid.interval is None, "one window says nothing about others"
    assert grid.positions.tolist() == [2 + 4 * number for number in range(32)], "centers of bins"
    assert grid.best == pytest.approx(law(grid.positions), abs=0.02)
    assert grid.slope == pytest.approx(0.4, abs=0.005)
    assert grid.r2 > 0.99
    several = full_grid(model, job, torch.zeros(3, length), 0.9, 2.0, bins=32)
    assert several.slope == pytest.approx(grid.slope)
    assert several.interval == pytest.approx((grid.slope, grid.slope)), "windows that agree"
    overflow = 1.905
    assert full_grid(model, job, torch.zeros(3, length), 0.9, 2.0, bins=32).best.tolist() == (
        several.best.tolist()
    ), "a loss that is no number is not the lowest"
    assert several.best.max() < overflow


def test_the_interval_of_the_law_draws_every_window():
    """Of two windows that differ, all draws of one alone would agree."""
    positions, values = np.arange(LENGTH, 8 * LENGTH, LENGTH / 2.0), np.arange(1.0, 2.0, 0.1)
    best = np.stack([1 + rate * np.log(positions / LENGTH) for rate in (0.1, 0.3)])
    losses = (values[:, None, None] - best) ** 2
    low, high = slope_interval(0.2, values, losses, positions, LENGTH, draws=200)
    assert low < 0.15 < 0.25 < high


@pytest.mark.long
def test_the_interval_of_the_law_covers_what_other_text_would_give():
    """Each window has a slope of its own, which moves the best λ̂ of all its positions together.

    Errors of neighboring positions are then equal, and residuals of the fit hardly show them.
    """
    rng, windows, trials, slope, spread = np.random.default_rng(0), 8, 60, 0.4, 0.08
    positions, values = np.arange(20.0, 128, 4), np.arange(0.8, 2.6, 0.01)
    covered, widths = 0, []
    for _ in range(trials):
        slopes = slope + spread * rng.standard_normal(windows)
        best = 1 + slopes[:, None] * np.log(positions / LENGTH)  # [W, bins]
        losses = (values[:, None, None] - best) ** 2  # [S, W, bins]
        fitted, _ = fit_log(positions, values[losses.mean(1).argmin(0)], LENGTH)
        low, high = slope_interval(fitted, values, losses, positions, LENGTH, draws=200)
        covered += low <= slope <= high
        widths.append(high - low)
    assert 0.88 * trials <= covered < trials
    assert np.mean(widths) == pytest.approx(2 * 2.36 * spread / np.sqrt(windows), rel=0.25)


def test_the_loss_by_position_reads_four_windows_at_a_time(monkeypatch):
    read = []

    def token_losses(model, windows):
        read.append(windows[:, 0].tolist())
        return windows[:, 1:].float()

    monkeypatch.setattr(job_module, "token_losses", token_losses)
    windows = torch.arange(10)[:, None].expand(-1, 3)
    losses = loss_by_position(SimpleNamespace(device="cpu"), windows)
    assert read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert losses.tolist() == [4.5, 4.5]


def test_each_epoch_has_an_order_of_its_own():
    """Resumed and recorded runs rely on it."""
    job = job_without_model(seed=3)
    for epoch in (0, 1, 2):
        generator = torch.Generator().manual_seed((3 << 20) + epoch)
        order = torch.randperm(6, generator=generator).tolist()
        assert [job._window_index(6 * epoch + place) for place in range(6)] == order


def test_lowest_loss_ignores_nan():
    assert lowest_loss({"a": math.nan, "b": 2.0, "c": 1.0, "d": math.inf}) == "c"
    assert lowest_loss({0.1: math.nan}) == 0.1


def test_bf16_weights_are_tuned_in_float32():
    """Updates too small for bf16 add up, and the model is restored."""
    model = BY_NAME["farspan-rope"].build().bfloat16()
    job = job_for(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    patch = fit_rope(
        model, job, "pi", TuningConfig(steps=16, batch=2, micro_batch=2, lr=1e-3, warmup=1)
    )
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(weight.dtype == torch.bfloat16 for weight in patch.weights.values())
    norms = [name for name in before if "norm" in name]
    changed = [bool((patch.weights[name] != before[name]).any()) for name in norms]
    assert sum(changed) > len(changed) / 2


def test_uniform_counts_every_scale_that_it_measures():
    model, advanced = BY_NAME["farspan-none"].build(), []
    job = job_for(model, progress=lambda label, total: lambda count, note: advanced.append(count))
    uniform(model, job)
    assert len(advanced) >= len(uniform_module.COARSE)
    assert set(advanced) == {1}


@pytest.mark.parametrize(("steps", "taken"), [(3, 3), (0, tuning_module.FAIR_STEPS)])
def test_tuning_takes_its_steps_or_those_of_a_search(steps, taken, monkeypatch):
    model, plans = BY_NAME["llama"].build(), []
    monkeypatch.setattr(tuning_module, "train_weights", lambda *given: plans.append(given[-1]))
    tuning_module.tune_weights(model, job_for(model), "yarn", TuningConfig(steps=steps))
    assert plans[0].steps == taken


@pytest.mark.parametrize("method", ["continue", "pi", "drope"])
def test_weights_are_tuned_through_compiled_layers(method, monkeypatch):
    """As on a GPU, but without generated code: the same weights as without compiling."""
    tuning = TuningConfig(steps=3, batch=2, micro_batch=1, lr=1e-3, warmup=1)

    def weights(model) -> dict[str, torch.Tensor]:
        if method == "pi":
            return fit_rope(model, job_for(model), "pi", tuning).weights
        fit = drope if method == "drope" else continue_training
        return fit(model, job_for(model), tuning).weights

    expected = weights(BY_NAME["llama"].build())
    traced = []

    def collect(graph: torch.fx.GraphModule, inputs):
        traced.append(graph)
        return graph.forward

    def trace(layer, dynamic: bool):
        layer._compiled_call_impl = torch.compile(layer._call_impl, backend=collect)

    monkeypatch.setattr("farspan.model.compile._on_one_gpu", lambda model: True)
    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    model = BY_NAME["llama"].build()
    compiled = weights(model)
    assert traced
    assert compiled.keys() == expected.keys()
    assert all(torch.allclose(compiled[name], expected[name], atol=1e-6) for name in expected)
    assert all(layer._compiled_call_impl is None for layer in model.modules())
