"""Methods and `extend`: gradients, constraints, optimal scales, patches and their proof."""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Ministral3ForCausalLM

import farspan
from families import FAMILIES, VOCABULARY
from farspan.attention import seam
from farspan.attention.patch import Patch, fingerprint, set_rope
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.data.documents import Document
from farspan.data.windows import split_windows
from farspan.errors import CorruptError, FarspanError, ProofError
from farspan.methods import headscale as headscale_module
from farspan.methods import registry
from farspan.methods import rope as rope_module
from farspan.methods import tuning as tuning_module
from farspan.methods import uniform as uniform_module
from farspan.methods.drope import drope
from farspan.methods.headscale import SearchConfig, headlog, headscale
from farspan.methods.job import (
    FitJob,
    largest_micro_batch,
    loss_by_position,
    lowest_loss,
    scaled_loss,
    search_best,
)
from farspan.methods.registry import (
    METHODS,
    ExtendConfig,
    check_unused_settings,
    fit_methods,
    read_extend_config,
)
from farspan.methods.rope import ROPE_SCALINGS, fit_rope, rope_override
from farspan.methods.rope import _rope_parameters as rope_parameters
from farspan.methods.schedules import SCHEDULES, fit_schedule
from farspan.methods.swan import SwanConfig
from farspan.methods.tuning import TuningConfig
from farspan.methods.uniform import fit_log, full_grid, slope_interval, uniform
from farspan.model.loss import mean_loss, token_losses
from farspan.report import style
from farspan.train.loop import PlateauRule
from farspan.train.optim import learning_rate
from farspan.train.steps import EagerSteps
from farspan.workflows import extend as extend_workflow
from farspan.workflows import search_folder
from farspan.workflows.extend import extend
from test_train import in_processes

QUICK = SearchConfig(steps=4, batch=2, micro_batch=2, lr=(0.1,), warmup=1, init=1.2)
LENGTH, TARGET = 16, 40
BY_NAME = {family.name: family for family in FAMILIES}
FOUR = ("farspan-none", "llama", "qwen3", "gpt2")


def job_for(model, **changes) -> FitJob:
    layers = probe(model)
    ids = torch.randint(VOCABULARY, (6, TARGET + 5), generator=torch.Generator().manual_seed(1))
    job = FitJob(
        TARGET,
        LENGTH,
        search=ids,
        choose=ids[:2, :TARGET],
        layers=tuple(layer.index for layer in layers),
        heads=layers[0].heads,
        model=fingerprint(model),
    )
    return replace(job, **changes)


# The loss and its gradient.


@pytest.mark.parametrize(
    "name", ["farspan-none", "farspan-swan", "farspan-t5", "llama", "gemma2", "cohere2", "qwen3"]
)
def test_scale_gradients_match_finite_differences(name):
    """In float64, for constant and growing scales, with logits in chunks of a few rows."""
    model = BY_NAME[name].build().double()
    # Other families compute norms and angles in float32, whose rounding would drown a tiny step.
    ours = name.startswith("farspan")
    step, tolerance = (1e-5, dict(rel=1e-4, abs=1e-9)) if ours else (1e-2, dict(rel=1e-2, abs=1e-5))
    layers = [call.layer for call in seam.attention_calls(model)]
    heads = seam.attention_calls(model)[0].q.shape[1]
    base = torch.full((len(layers), heads), 1.1, dtype=torch.float64).requires_grad_()
    slope = torch.full_like(base, 0.2).detach().requires_grad_()
    ids = torch.randint(VOCABULARY, (2, 24))
    seam.install(model, Scales(tuple(layers), base, slope, "log", 8))
    with seam.frozen(model):
        loss = mean_loss(model, ids, budget=3 * VOCABULARY)
        loss.backward()
    assert loss.item() == pytest.approx(token_losses(model, ids).mean().item(), abs=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())
    for table in (base, slope):
        for place in ((0, 0), (len(layers) - 1, heads - 1)):
            with torch.no_grad():
                table[place] += step
                above = token_losses(model, ids).mean()
                table[place] -= 2 * step
                below = token_losses(model, ids).mean()
                table[place] += step
            assert table.grad[place].item() == pytest.approx(
                ((above - below) / (2 * step)).item(), **tolerance
            )


def test_mean_loss_computes_logits_in_chunks():
    model = BY_NAME["farspan-none"].build()
    ids = torch.randint(VOCABULARY, (2, 40))
    rows = []
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: rows.append(output.shape[1])
    )
    unchunked = mean_loss(model, ids)
    assert rows == [39]
    rows.clear()
    assert mean_loss(model, ids, budget=10 * VOCABULARY).item() == pytest.approx(
        unchunked.item(), abs=1e-6
    )
    hook.remove()
    assert max(rows) == 5
    assert sum(rows) == 39


# Methods.


def test_search_best_finds_the_minimum_to_its_step():
    for best in (0.8, 1.0, 1.234, 2.17, 3.0):
        minimum, losses = search_best(
            lambda value, best=best: (value - best) ** 2, np.arange(0.8, 3.01, 0.2), 0.01
        )
        assert minimum == pytest.approx(round(best, 2), abs=0.0051)
        assert len(losses) < 40
        assert all(abs(value * 100 - round(value * 100)) < 1e-6 for value in losses)
    for slope, end in ((1, 1.0), (-1, 2.0)):
        minimum, _ = search_best(lambda value, slope=slope: slope * value, (1.0, 2.0), 0.25)
        assert minimum == end, "the ends of the grid count"
    with pytest.raises(FarspanError, match="no scale gives a finite loss"):
        search_best(lambda value: math.nan, (1.0, 2.0), 0.1)


def job_without_model(**changes) -> FitJob:
    ids = torch.zeros(6, TARGET + 5, dtype=torch.long)
    job = FitJob(TARGET, LENGTH, search=ids, choose=ids, layers=(0,), heads=4, model="")
    return replace(job, **changes)


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


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", [headscale, headlog])
def test_searches_lower_the_loss_on_the_search_split(name, method):
    model = BY_NAME[name].build()
    job = job_for(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    patch = method(model, job, replace(QUICK, steps=12))
    start = job.uniform(1.2) if method is headscale else None
    reference = (
        scaled_loss(model, job.search, start)
        if start
        else float(loss_by_position(model, job.search).mean())
    )
    assert scaled_loss(model, job.search, patch.scales) < reference
    assert patch.scales.base.std() > 0
    assert patch.method == method.__name__
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("method", [headscale, headlog])
def test_constraint_holds_for_the_parameters_at_every_step(method, monkeypatch):
    model = BY_NAME["farspan-none"].build()
    seen = []
    original = EagerSteps.update

    def update(self) -> None:
        original(self)
        seen.append(
            {name: parameter.detach().clone() for name, parameter in self.task.parameters.items()}
        )
        assert all(parameter.dtype == torch.float32 for parameter in self.task.parameters.values())

    monkeypatch.setattr(EagerSteps, "update", update)
    free = replace(QUICK, steps=10, constraint=False, lr=(0.5,), init=1.0)
    method(model, job_for(model), free)
    assert min(float(step["base"].min()) for step in seen) < 1, "unconstrained, λ̂ goes below 1"
    seen.clear()
    patch = method(model, job_for(model), replace(free, constraint=True))
    assert len(seen) == 10
    assert all(float(step["base"].min()) >= 1 for step in seen)
    assert all(float(step["slope"].min()) >= 0 for step in seen if "slope" in step)
    assert torch.equal(patch.scales.base, seen[-1]["base"])


@pytest.mark.parametrize("method", [headscale, headlog])
def test_unconstrained_scales_stay_positive(method):
    """With steps this large a free search would cross 0, which no patch allows."""
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    scales = method(
        model, job, replace(QUICK, steps=10, constraint=False, lr=(5.0,), init=1.0)
    ).scales
    ends = scales.at(torch.tensor([1.0, job.target]))
    assert 0 < float(ends.min()) < 0.1
    assert float(ends.max()) > 2


def test_searches_start_from_the_best_uniform_scale(monkeypatch):
    """One step with a learning rate of almost 0 ends where the search started."""
    monkeypatch.setattr("farspan.methods.uniform.COARSE", (1.0, 1.05, 1.1))  # a faster search
    model = BY_NAME["qwen3"].build()
    job = job_for(model)
    best = uniform(model, job).scales.base
    assert float(best[0, 0]) > 1.01
    still = replace(QUICK, steps=1, lr=(1e-9,), init=0.0)
    assert torch.allclose(headscale(model, job, still).scales.base, best, atol=1e-6)
    growing = headlog(model, job, still).scales
    assert torch.allclose(growing.base, torch.ones_like(best), atol=1e-6)
    assert torch.allclose(growing.at(torch.tensor([float(TARGET)]))[..., 0], best, atol=1e-6)


@pytest.fixture
def applied_updates(monkeypatch) -> list[dict]:
    """The settings and the gradient norm of every optimizer step, which a test's search fills."""
    updates = []
    original = EagerSteps.update

    def update(self) -> None:
        ((group,),) = [optimizer.param_groups for optimizer in self.task.optimizers]
        gradients = [parameter.grad for parameter in group["params"]]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        settings = {key: group[key] for key in ("lr", "betas", "weight_decay")}
        updates.append({**settings, "norm": norm, "optimizer": self.task.optimizers[0]})
        original(self)

    monkeypatch.setattr(EagerSteps, "update", update)
    return updates


@pytest.mark.parametrize(("method", "peak"), [(headscale, 0.1), (headlog, 0.05)])
def test_searches_warm_up_and_decay_by_half_a_cosine(method, peak, applied_updates):
    """As in Wang 2024: linearly from 0, then down to a tenth of the learning rate."""
    model = BY_NAME["farspan-none"].build()
    method(model, job_for(model), replace(QUICK, steps=20, warmup=4))
    rates = np.array([update["lr"] for update in applied_updates]) / peak
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[8] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), "a quarter of the way"
    assert rates[12] == pytest.approx(0.55), "half of the way"
    assert (np.diff(rates[4:]) < 0).all()
    assert 0.1 < rates[-1] < 0.12


@pytest.mark.parametrize("method", [headscale, headlog])
def test_searches_clip_gradients_to_a_norm_of_1(method, applied_updates, monkeypatch):
    """A loss of a thousandfold size has gradients that are far too large."""
    monkeypatch.setattr(
        headscale_module, "mean_loss", lambda model, ids, **_: 1000 * mean_loss(model, ids)
    )
    model = BY_NAME["farspan-none"].build()
    method(model, job_for(model), QUICK)
    assert [update["norm"] for update in applied_updates] == pytest.approx([1.0] * 4, rel=1e-3)


@pytest.mark.parametrize("method", [headscale, headlog])
def test_searches_use_the_adamw_of_wang_2024(method, applied_updates):
    model = BY_NAME["farspan-none"].build()
    method(model, job_for(model), QUICK)
    for update in applied_updates:
        assert isinstance(update["optimizer"], torch.optim.AdamW)
        assert (update["betas"], update["weight_decay"]) == ((0.9, 0.95), 0.0)


def test_a_step_counts_the_tokens_that_it_predicts(monkeypatch):
    """All of a window but the first."""
    model, job = BY_NAME["farspan-none"].build(), job_without_model()
    scaled = headscale_module.ScaledModel(model, job.uniform(1.0))
    plan = QUICK.resolve(has_nope=True)
    optimizer = headscale_module.OptimizerConfig("adamw", lr=0.1)
    task = headscale_module._search_task(model, scaled, job, QUICK, plan, optimizer, [])
    assert task.tokens == 2 * (TARGET + 4)
    monkeypatch.setattr(tuning_module, "train_weights", lambda *arguments: arguments[-1])
    training = tuning_module.tune_weights(model, job, "pi", TuningConfig(batch=3, micro_batch=1))
    assert training.tokens == 3 * (TARGET + 4)


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


@pytest.mark.parametrize(
    ("best", "constraint", "start"),
    [(0.9, True, 1.0), (0.9, False, 0.9), (1.5, True, 1.5), (1.5, False, 1.5)],
)
def test_the_constraint_holds_for_the_uniform_scale_too(best, constraint, start, monkeypatch):
    patch = SimpleNamespace(scales=Scales.uniform(best, range(2), 3))
    monkeypatch.setattr(headscale_module, "uniform", lambda model, job: patch)
    search = SearchConfig(constraint=constraint)
    assert headscale_module.best_uniform(None, None, search) == pytest.approx(start)


@pytest.mark.parametrize(("factor", "accurate"), [(1.0, True), (300.0, False)])
def test_detects_whether_bf16_gradients_are_accurate(factor, accurate):
    """Attention scores of many thousands turn the bf16 gradient of a scale into noise."""
    model = BY_NAME["farspan-none"].build().float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(factor)
            layer.self_attn.k_proj.weight.mul_(factor)
    job = job_for(model)
    scaled = headscale_module.ScaledModel(model, job.uniform(1.2))
    seam.install(model, scaled.scales)
    with seam.frozen(model):
        assert scaled.bf16_is_accurate(job.search[:1]) is accurate
    assert not scaled.use_bf16


def test_choose_split_selects_the_learning_rate():
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    both = headscale(model, job, replace(QUICK, lr=(0.1, 1e-6)))
    losses = [
        scaled_loss(model, job.choose, headscale(model, job, replace(QUICK, lr=(lr,))).scales)
        for lr in (0.1, 1e-6)
    ]
    assert scaled_loss(model, job.choose, both.scales) == pytest.approx(min(losses), abs=1e-6)


def test_resumed_search_gives_the_same_scales(tmp_path):
    model = BY_NAME["farspan-none"].build()
    uninterrupted = headscale(model, job_for(model), QUICK)

    def stop(label, steps):
        def advance(count=1, note=""):
            raise KeyboardInterrupt

        return advance

    job = job_for(model, folder=tmp_path, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        headscale(model, job, replace(QUICK, save_every=1))
    resumed = headscale(
        model, replace(job, progress=job_for(model).progress), replace(QUICK, save_every=1)
    )
    assert torch.equal(uninterrupted.scales.base, resumed.scales.base)


PLATEAU = SearchConfig(quick=True, batch=2, micro_batch=2, warmup=1, init=1.2, save_every=1)


def details_of(job) -> dict:
    (search,) = job.details["searches"]
    return search


@pytest.mark.parametrize("method", [headscale, headlog])
def test_a_search_cools_down_and_ends_when_the_choose_split_gains_nothing(
    method, applied_updates, monkeypatch
):
    losses = iter([3.0, 2.0, 1.999, 1.998, 1.0])
    monkeypatch.setattr(headscale_module.ScaledModel, "validation_loss", lambda *_: next(losses))
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    method(model, job, PLATEAU)
    rates = [update["lr"] / (0.2 if method is headscale else 0.1) for update in applied_updates]
    assert rates[:20] == pytest.approx([1.0] * 20)
    assert rates[20:] == pytest.approx([0.1 + 0.9 * left / 11 for left in range(10, 0, -1)])
    assert next(losses) == 1.0, "nothing is validated after the plateau"
    search = details_of(job)
    assert (search["steps"], search["choose_losses"]) == (30, [3.0, 2.0, 1.999, 1.998])
    assert search["end"] == (
        "after 30 steps: the loss on the choose split fell by less than 0.02 nats in 10 steps"
    )


def test_the_least_gain_of_a_plateau_is_a_setting(monkeypatch):
    losses = iter([3.0, 2.0, 1.999, 1.998, 1.9975, 1.9971])
    monkeypatch.setattr(headscale_module.ScaledModel, "validation_loss", lambda *_: next(losses))
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    headscale(model, job, replace(PLATEAU, min_gain=0.0009))
    assert details_of(job)["steps"] == 40, "a gain of 0.001 is one now, two of 0.0005 are none"


def test_a_search_that_gains_to_the_end_takes_the_most_steps(applied_updates, monkeypatch):
    losses = iter([3.0, 2.0])
    monkeypatch.setattr(headscale_module.ScaledModel, "validation_loss", lambda *_: next(losses))
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    headscale(model, job, replace(PLATEAU, max_steps=12))
    assert len(applied_updates) == 12
    assert applied_updates[-1]["lr"] == pytest.approx(0.2 * (0.1 + 0.9 / 11)), "it cools down too"
    assert details_of(job)["end"].startswith("after 12 steps, the limit")


def test_the_plateau_is_judged_on_the_choose_split_under_the_scales_of_the_search(monkeypatch):
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    scaled = headscale_module.ScaledModel(model, job.uniform(1.3))
    seam.install(model, scaled.scales)
    loss = scaled.validation_loss(job.choose)
    seam.remove_scales(model)
    assert loss == pytest.approx(scaled_loss(model, job.choose, job.uniform(1.3)), abs=1e-6)
    assert loss != pytest.approx(scaled_loss(model, job.choose, job.uniform(1.0)), abs=1e-6)
    seen = []
    monkeypatch.setattr(
        headscale_module.ScaledModel,
        "validation_loss",
        lambda self, windows: seen.append(windows) or 1.0,
    )
    headscale(model, job, PLATEAU)
    assert seen
    assert all(torch.equal(windows, job.choose) for windows in seen)


@pytest.mark.long
@pytest.mark.parametrize("stopped", [3, 5, 14, 16])
def test_a_search_killed_before_or_after_its_plateau_ends_in_the_same_bits(tmp_path, stopped):
    search = replace(PLATEAU, min_gain=0.05)
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    uninterrupted = headlog(model, job, search)
    assert details_of(job)["steps"] < 40, "it plateaus, so that the law says something"

    def stop(label, steps):
        taken = []

        def advance(count=1, note=""):
            taken.append(count)
            if len(taken) == stopped:
                raise KeyboardInterrupt

        return advance

    killed = job_for(model, folder=tmp_path, progress=stop, details={})
    with pytest.raises(KeyboardInterrupt):
        headlog(model, killed, search)
    again = replace(killed, progress=job.progress)
    resumed = headlog(model, again, search)
    assert torch.equal(uninterrupted.scales.base, resumed.scales.base)
    assert torch.equal(uninterrupted.scales.slope, resumed.scales.slope)
    assert details_of(again) == details_of(job)


def test_a_number_of_steps_is_the_search_of_wang_2024():
    ours, paper = SearchConfig().resolve(True), SearchConfig(steps=200).resolve(True)
    assert (paper.steps, paper.batch, paper.warmup, paper.lr) == (200, 8, 20, (0.1, 0.05))
    assert (paper.repeats, paper.passkeys, paper.plateau) == (0, 0, None)
    assert (ours.steps, ours.plateau) == (200, PlateauRule(min_gain=0.005))
    assert (ours.batch, ours.warmup, ours.lr) == (8, 4, (0.1,))
    quick = SearchConfig(quick=True).resolve(True)
    assert (quick.steps, quick.plateau) == (200, PlateauRule(min_gain=0.02))
    assert (quick.batch, quick.warmup, quick.lr) == (2, 4, (0.2,))
    assert SearchConfig(steps=200, quick=True).resolve(True) == paper
    plan = SearchConfig(batch=3, lr=(0.2,), warmup=0, repeats=0.0).resolve(True)
    assert (plan.batch, plan.lr, plan.warmup) == (3, (0.2,), 0)
    assert plan.repeats == 0


@pytest.mark.parametrize(
    ("settings", "repeats", "passkeys"),
    [
        ({}, 0.5, 0.25),
        ({"repeats": 0.9}, 0.9, 0.1),
        ({"repeats": 1.0}, 1.0, 0.0),
        ({"passkeys": 0.75}, 0.25, 0.75),
        ({"repeats": 0.1, "passkeys": 0.2}, 0.1, 0.2),
    ],
)
def test_a_share_that_is_set_leaves_the_rest_to_the_other(settings, repeats, passkeys):
    plan = SearchConfig(**settings).resolve(True)
    assert (plan.repeats, plan.passkeys) == pytest.approx((repeats, passkeys))


def test_unlikely_answers_are_no_divergence(monkeypatch):
    """A batch without passkeys may follow one whose answers cost 20 nats a token."""
    margins = []
    original = headscale_module.TrainPlan
    monkeypatch.setattr(
        headscale_module,
        "TrainPlan",
        lambda *args, **options: margins.append(options["margin"]) or original(*args, **options),
    )
    model = BY_NAME["farspan-none"].build()
    job = replace(job_for(model), tokenizer=object())
    monkeypatch.setattr(headscale_module, "recall_rows", lambda *_, **__: None)
    for search in (QUICK, replace(QUICK, passkeys=0.5, answers=2.0)):
        headscale(model, job, search)
    assert margins == [1.0, 81.0]


def test_repeated_spans_are_for_models_with_nope_layers():
    assert SearchConfig().resolve(True).repeats > 0
    assert SearchConfig().resolve(False).repeats == 0
    for name, expected in (("farspan-none", True), ("farspan-swan", True), ("llama", False)):
        model = BY_NAME[name].build()
        ids = torch.zeros(1, 8, dtype=torch.long)
        job = registry.make_fit_job(model, probe(model), 16, 8, ids, ids)
        assert job.has_nope is expected, name


@pytest.mark.parametrize("method", [headscale, headlog])
def test_the_default_search_starts_from_the_model_as_trained(method, monkeypatch):
    starts = []
    original = headscale_module.ScaledModel.__init__

    def record(self, model, start, *weights) -> None:
        starts.append(start)
        original(self, model, start, *weights)

    monkeypatch.setattr(headscale_module.ScaledModel, "__init__", record)
    model = BY_NAME["farspan-none"].build()
    method(model, job_for(model), replace(PLATEAU, init=0.0))
    assert float(starts[0].at(torch.tensor([8.0, float(TARGET)])).sub(1).abs().max()) == 0


def test_the_default_search_leaves_scales_alone_that_change_little(monkeypatch):
    """Adam alone moves every scale as far, however small its gradient is."""
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    factors = torch.ones(len(job.layers), job.heads)
    factors[0] = 1e-4

    def moved(search) -> torch.Tensor:
        monkeypatch.setattr(
            headscale_module.ScaledModel,
            "forward",
            lambda self, ids: (factors * self.base).sum() / factors.norm(),
        )
        scales = headscale(model, job, replace(search, constraint=False, init=1.0)).scales
        return (1 - scales.base).abs()

    ours, paper = moved(PLATEAU), moved(replace(QUICK, steps=20))
    assert ours[0].max() < 0.01 * ours[1:].min()
    assert paper[0].max() > 0.5 * paper[1:].min()


def test_a_search_reads_windows_with_repeated_spans(monkeypatch):
    model = BY_NAME["farspan-none"].build()
    job = replace(job_for(model), train_length=8)  # room for repetitions in short windows
    windows = []
    monkeypatch.setattr(
        "farspan.methods.headscale.mean_loss",
        lambda model, ids, **_: windows.append(ids) or mean_loss(model, ids),
    )
    plain = headscale(model, job, QUICK)
    assert all((row == job.search).all(1).any() for ids in windows for row in ids)
    windows.clear()
    searched = headscale(model, job, replace(QUICK, repeats=1.0))
    assert not any((row == job.search).all(1).any() for ids in windows for row in ids)
    assert not torch.equal(plain.scales.base, searched.scales.base)


def test_answers_count_beside_the_mean_of_all_tokens():
    """With the weight that is set, by row; without any, nothing changes."""
    model = BY_NAME["farspan-none"].build().double()
    ids = torch.randint(VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
    marks = torch.zeros_like(ids)
    marks[0, -3:] = marks[1, 5] = marks[1, 0] = 1  # the first token of a row is not predicted
    losses = token_losses(model, ids)
    expected = losses.mean() + 0.7 * (losses[0, -3:].mean() + losses[1, 4]) / 3
    weighted = mean_loss(model, ids, answers=marks, answer_weight=0.7, budget=3 * VOCABULARY)
    assert weighted.item() == pytest.approx(expected.item(), abs=1e-12)
    without = mean_loss(model, ids, answers=0 * marks, answer_weight=0.7)
    assert without.item() == pytest.approx(losses.mean().item(), abs=1e-12)


def test_the_tail_of_a_row_counts_more():
    """The last quarter, by the weight that is set; answers beside it keep theirs."""
    model = BY_NAME["farspan-none"].build().double()
    ids = torch.randint(VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
    marks = torch.zeros_like(ids)
    marks[1, 5] = 1
    losses, weights = token_losses(model, ids), torch.ones(23).double()
    weights[-6:] = 3.0
    expected = (losses * weights).sum() / (3 * weights.sum()) + 0.7 * losses[1, 4] / 3
    weighted = mean_loss(model, ids, answers=marks, answer_weight=0.7, tail_weight=2.0)
    assert weighted.item() == pytest.approx(expected.item(), abs=1e-12)


def test_answers_weigh_more_in_a_full_search_than_in_a_quick_one():
    assert SearchConfig().resolve(True).answers == 0.3
    assert SearchConfig(quick=True).resolve(True).answers == 0.125
    assert SearchConfig(quick=True, answers=0.2).resolve(True).answers == 0.2


def test_answers_count_alike_in_micro_batches_of_any_size():
    """Memory and the number of processes decide how rows are split, and no result."""
    model = BY_NAME["farspan-none"].build().double()
    ids = torch.randint(VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))
    marks = torch.zeros_like(ids)
    marks[0, -3:] = marks[2, 7] = 1
    whole = mean_loss(model, ids, answers=marks, answer_weight=0.7)
    for rows in (1, 2):
        parts = zip(ids.split(rows), marks.split(rows), strict=True)
        losses = [mean_loss(model, a, answers=b, answer_weight=0.7).item() for a, b in parts]
        assert np.mean(losses) == pytest.approx(whole.item(), abs=1e-12)


def test_the_loss_of_a_search_stays_float32_under_autocast():
    model = BY_NAME["farspan-none"].build()
    ids = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = mean_loss(model, ids), token_losses(model, ids).mean()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("batch", "length", "rows"),
    [(8, 2304, 8), (8, 18_432, 1), (8, 9000, 2), (6, 9000, 3), (2, 50_000, 1)],
)
def test_long_windows_are_read_in_small_micro_batches(batch, length, rows):
    assert largest_micro_batch(batch, length) == rows


def test_answers_pull_the_gradient_of_scales():
    model = BY_NAME["farspan-none"].build().double()
    ids = torch.randint(VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    marks = torch.zeros_like(ids)
    marks[0, -2:] = 1
    job = job_for(model)
    scaled = headscale_module.ScaledModel(model, job.uniform(1.2), answers=2.0).double()
    seam.install(model, scaled.scales)
    with seam.frozen(model):
        scaled(torch.stack((ids, marks))).backward()
        place, step = (0, 1), 1e-5

        def total() -> torch.Tensor:
            losses = token_losses(model, ids)
            return losses.mean() + 2.0 * losses[0, -2:].mean()

        with torch.no_grad():
            scaled.base[place] += step
            above = total()
            scaled.base[place] -= 2 * step
            below = total()
    expected = ((above - below) / (2 * step)).item()
    assert scaled.base.grad[place].item() == pytest.approx(expected, rel=1e-3)


def test_passkeys_count_as_retrieved_if_they_are_more_likely_than_not():
    from farspan.loading import load_with_tokenizer
    from farspan.model import FarspanForCausalLM

    model, tokenizer = load_with_tokenizer("nope-twin")
    job = replace(job_for(BY_NAME["farspan-none"].build()), tokenizer=tokenizer, train_length=512)
    assert headscale_module.retrieves_passkeys(model, job)
    random = FarspanForCausalLM(model.config)
    assert not headscale_module.retrieves_passkeys(random.eval(), job)
    assert not headscale_module.retrieves_passkeys(model, replace(job, tokenizer=None))
    assert not headscale_module.retrieves_passkeys(model, replace(job, train_length=40)), "no room"


@pytest.mark.parametrize(
    ("search", "retrieves", "share"),
    [
        (PLATEAU, True, headscale_module.PASSKEYS),
        (PLATEAU, False, 0.0),
        (replace(PLATEAU, passkeys=0.125), False, 0.125),
        (replace(PLATEAU, passkeys=0.0), True, 0.0),
        (QUICK, True, 0.0),  # a number of steps: as in the paper
    ],
)
def test_a_search_says_how_many_windows_have_passkeys(search, retrieves, share, monkeypatch):
    model = BY_NAME["farspan-none"].build()
    job = replace(job_for(model), tokenizer=object(), has_nope=True)
    asked = []
    monkeypatch.setattr(
        headscale_module, "recall_rows", lambda seed, **options: asked.append(options)
    )
    monkeypatch.setattr(headscale_module, "retrieves_passkeys", lambda *_: retrieves)
    headscale(model, job, replace(search, max_steps=2))
    assert [options["passkeys"] for options in asked] == [share]
    assert details_of(job)["passkeys"] == share


def test_answers_of_passkeys_and_the_tail_count_in_the_loss_of_a_search(monkeypatch):
    model = BY_NAME["farspan-none"].build()
    seen = []

    def mark_the_last_token(row, number):
        return row, torch.arange(len(row)) == len(row) - 1

    def record(model, ids, *, answers, answer_weight, tail_weight):
        weights = answer_weight, tail_weight
        seen.append((answers.sum(1).tolist(), answers[:, -1].tolist(), *weights))
        return mean_loss(model, ids)

    monkeypatch.setattr(headscale_module, "recall_rows", lambda *_, **__: mark_the_last_token)
    monkeypatch.setattr(headscale_module, "mean_loss", record)
    job = replace(job_for(model), tokenizer=object())
    headscale(model, job, replace(QUICK, passkeys=0.5, answers=0.7, tail=1.5))
    assert seen == [([1, 1], [1, 1], 1.4, 1.5)] * 4, "of the half of the rows that has passkeys"


def test_all_processes_read_the_same_text(monkeypatch):
    """One that does not retrieve passkeys decides for all."""
    device, agree = torch.device("cpu"), headscale_module.all_processes_agree
    assert [agree(value, device) for value in (True, False)] == [True, False]
    monkeypatch.setattr(headscale_module, "processes", lambda: SimpleNamespace(num_processes=2))

    def reduce_with_false(votes, operation):
        smallest = operation == torch.distributed.ReduceOp.MIN
        votes.copy_(votes.clamp(max=0) if smallest else votes.clamp(min=0))

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce_with_false)
    assert not agree(True, device)


def test_passkeys_need_a_tokenizer():
    model = BY_NAME["farspan-none"].build()
    with pytest.raises(FarspanError, match=r"search\.passkeys needs a tokenizer"):
        headscale(model, job_for(model), replace(QUICK, passkeys=0.5))


def test_a_search_repeats_spans_of_the_length_that_is_set(monkeypatch):
    model = BY_NAME["farspan-none"].build()
    job = replace(job_for(model), train_length=8)
    asked = []
    monkeypatch.setattr(
        "farspan.methods.headscale.recall_rows", lambda seed, **options: asked.append(options)
    )
    headscale(model, job, QUICK)
    headscale(model, job, replace(QUICK, spans=(6, 7)))
    assert [options["spans"] for options in asked] == [(16, 128), (6, 7)]


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
    candidates = registry.candidate_methods(["auto"], layers, model, job_for(model))
    if existing is None:
        assert candidates == ["ntk", "yarn"]
        return
    assert candidates == ["ntk", "uniform"]
    assert not registry.check_compatible(["ntk"], layers, config, "m", ExtendConfig())
    for method in ("pi", "yarn", "dynamic-ntk"):
        message = f"the rotation of m is already scaled .{existing}., and {method} would replace"
        with pytest.raises(FarspanError, match=message):
            registry.check_compatible([method, "headscale"], layers, config, "m", ExtendConfig())


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
    model = BY_NAME["farspan-none"].build()
    grid = full_grid(model, job_for(model), torch.randint(VOCABULARY, (2, 64)), 0.95, 1.05, bins=8)
    assert grid.loss.shape == (11, 8)
    assert set(grid.best) <= set(grid.values)
    assert not seam.installed(model)


def test_the_best_scale_by_position_is_the_one_with_the_lowest_loss_there(monkeypatch):
    """A loss that is lowest at 1 + 0.4·ln(i / L), measured over 8 train lengths."""
    model = BY_NAME["farspan-none"].build()
    advanced, installed, length = {}, [], 8 * LENGTH

    def progress(label, total):
        return lambda count, note: advanced.setdefault((label, total), []).append(count)

    job = job_for(model, progress=progress)

    def law(positions: np.ndarray) -> np.ndarray:
        return 1 + 0.4 * np.log(np.maximum(positions / LENGTH, 1))

    def loss(model, windows):
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


# Text.


class CharacterTokenizer:
    """Every character is a token."""

    def __call__(self, texts, **_options):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_splits_share_no_token():
    lengths, limits = (
        {"search": 9, "choose": 8, "report": 8},
        {"search": 100, "choose": 2, "report": 3},
    )
    one = "".join(chr(1000 + number) for number in range(400))
    splits = split_windows([Document("one", one)], CharacterTokenizer(), lengths, limits)
    ids = [set(windows.ids.flatten().tolist()) for windows in splits.values()]
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]  # noqa: PT018
    counts = {name: len(windows.ids) for name, windows in splits.items()}
    assert counts == {"search": 40, "choose": 2, "report": 3}
    many = [Document(str(number), one[number * 40 : number * 40 + 40]) for number in range(10)]
    splits = split_windows(many, CharacterTokenizer(), lengths, limits)
    used = [{entry["document"] for entry in windows.used} for windows in splits.values()]
    assert not used[0] & used[1] and not used[0] & used[2] and not used[1] & used[2]  # noqa: PT018
    with pytest.raises(FarspanError, match="windows that share none of them take at least 25"):
        split_windows([Document("short", one[:20])], CharacterTokenizer(), lengths, limits)


def test_splits_that_need_more_than_there_is_share_it_evenly():
    names = ("search", "choose", "report")
    lengths, limits = dict.fromkeys(names, 8), dict.fromkeys(names, 100)
    document = Document("one", "".join(map(chr, range(1000, 1096))))
    splits = split_windows([document], CharacterTokenizer(), lengths, limits)
    assert [windows.ids.flatten()[[0, -1]].tolist() for windows in splits.values()] == [
        [1000, 1031],
        [1032, 1063],
        [1064, 1095],
    ]


# The command.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Models of two layers with a tokenizer: without positions, with RoPE, and a hybrid."""
    from farspan.data.documents import read_documents
    from farspan.data.tokens import train_tokenizer
    from farspan.model import FarspanConfig, FarspanForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    text = next(iter(read_documents("python-docs"))).text[:30_000]
    tokenizer = train_tokenizer([text], 300)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=300,
    )
    for name, position in (("none", "none"), ("rope", "rope"), ("hybrid", ["rope", "none"])):
        torch.manual_seed(0)
        config = FarspanConfig(**shape, max_position_embeddings=64, position=position)
        FarspanForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text(text)
    return folder


SAVE = style.save


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Drawing is slow: `extend` writes an empty file instead of its figure."""
    monkeypatch.setattr(style, "save", lambda figure, stem: stem.touch())


FEW = ExtendConfig(choose_windows=2, report_windows=2, passkeys=0)
SEARCHED = replace(FEW, search=QUICK)
TUNED = replace(FEW, tuning=TuningConfig(steps=2, batch=2, micro_batch=2))
CONVERTED = replace(TUNED, swan=SwanConfig(measured_rows=1, window=8))
RECIPES = {
    "headscale": SEARCHED,
    "headlog": SEARCHED,
    "drope": TUNED,
    "continue": TUNED,
    "swan": CONVERTED,
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_a_proven_patch(tiny, tmp_path, method):
    source = tiny / ("none" if method in registry.SCALE_METHODS else "rope")
    recipe = RECIPES.get(method, FEW)
    result = extend(source, 128, tmp_path / "patch", method, data=tiny / "text.txt", recipe=recipe)
    assert result.proof == pytest.approx(0, abs=1e-4)
    assert set(result.before) == {"loss@32", "loss@64", "loss@128"}
    model, _ = farspan.load(tmp_path / "patch")
    assert seam.installed(model) == (method == "swan" or method in registry.SCALE_METHODS)
    patch = json.loads((tmp_path / "patch" / "patch.json").read_text())
    assert (patch["target"], patch["train_length"]) == (128, 64)
    assert patch["model"]["name"] == str(source)
    assert {"scales", "rope", "layout", "weights"} & set(patch)
    files = {path.name for path in (tmp_path / "patch").iterdir()}
    assert {"patch.json", "recipe.toml", "record.json", "before_after"} <= files
    record = json.loads((tmp_path / "patch" / "record.json").read_text())
    assert record["before"] == result.before
    assert [path.name for path in tmp_path.iterdir()] == ["patch"], "the search folder is removed"


def test_writes_the_loss_curves_as_png_and_svg(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "save", SAVE)
    recipe = replace(FEW, fitted=False)
    extend(tiny / "none", 128, tmp_path / "patch", "logn", data=tiny / "text.txt", recipe=recipe)
    for name, start in (("before_after.png", b"\x89PNG"), ("before_after.svg", b"<?xml")):
        assert (tmp_path / "patch" / name).read_bytes().startswith(start)


@pytest.mark.long
def test_methods_combine_and_hybrids_scale_layers_without_positions(tiny, tmp_path):
    patch = extend(
        tiny / "hybrid",
        128,
        tmp_path / "both",
        "yarn+headscale",
        data=tiny / "text.txt",
        recipe=SEARCHED,
    ).patch
    assert patch.method == "yarn+headscale"
    assert patch.scales.layers == (1,)
    assert patch.rope["rope_type"] == "yarn"
    assert seam.installed(farspan.load(tmp_path / "both").model)
    result = extend(
        tiny / "rope",
        128,
        tmp_path / "drope",
        "drope+uniform",
        data=tiny / "text.txt",
        recipe=TUNED,
    )
    assert result.patch.weights
    assert result.proof == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "chosen"), [("none", {"uniform", "headscale", "headlog"}), ("rope", {"ntk", "yarn"})]
)
def test_auto_chooses_and_explains(tiny, tmp_path, kind, chosen):
    result = extend(
        tiny / kind, 128, tmp_path / "auto", "auto", data=tiny / "text.txt", recipe=SEARCHED
    )
    unused = [note for note in result.notes if "was not used" in note]
    assert bool(unused) == (kind == "rope"), "auto searches no scales for a RoPE model"
    assert result.patch.method in chosen
    assert f"auto chose {result.patch.method}: loss" in result.notes[-1]


def test_auto_chooses_by_the_loss_of_the_patched_model():
    """The reported loss includes tuned weights."""
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    tuning = TuningConfig(steps=8, batch=2, micro_batch=2, lr=1e-2, warmup=1)
    config = replace(FEW, tune="fair", tuning=tuning)
    patch, (note,) = fit_methods(model, probe(model), job, config, ["auto"])
    assert patch.weights
    fresh = patch.apply(BY_NAME["farspan-rope"].build())
    assert f": loss {float(loss_by_position(fresh, job.choose).mean()):.4f} on" in note
    assert torch.equal(model.model.norm.weight, patch.weights["model.norm.weight"])
    untuned = BY_NAME["farspan-rope"].build()
    before = {name: parameter.detach().clone() for name, parameter in untuned.named_parameters()}
    registry._patched_loss(untuned, patch, job.choose)
    assert all(
        torch.equal(before[name], parameter) for name, parameter in untuned.named_parameters()
    )


def test_accepts_one_text_per_split(tiny, tmp_path):
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    (tmp_path / "third.txt").write_text((tiny / "text.txt").read_text().swapcase())
    text = {
        "search": tiny / "text.txt",
        "choose": tmp_path / "third.txt",
        "report": tmp_path / "other.txt",
    }
    extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=text, recipe=FEW)
    for name in ("choose", "report"):  # another path to the same file
        same = {**text, name: str(tiny / ".." / tiny.name / "text.txt")}
        with pytest.raises(
            FarspanError, match=f"search=.* and {name}=.* overlap; give three disjoint texts"
        ):
            extend(tiny / "none", 128, tmp_path / "no", "uniform", data=same, recipe=FEW)
    with pytest.raises(FarspanError, match="give one corpus, or three as search=PATH"):
        extend(tiny / "none", 128, tmp_path / "no", "uniform", data={"train": "x"}, recipe=FEW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": 64}, "was already trained on 64 tokens; choose a longer --to"),
        ({"method": "headscal"}, "method 'headscal' is unknown; did you mean headscale"),
        (
            {"method": "yarn"},
            "yarn changes rotation, and .* has no rotary layer .*; use uniform, headscale",
        ),
        ({"method": "headscale+uniform"}, "scales attention twice or too early"),
        ({"method": "uniform+yarn"}, "scales attention twice or too early"),
        ({"method": "auto+headscale"}, "combines auto with other methods"),
        (
            {"method": "pi+ntk"},
            r"pi\+ntk sets rotation 2 times, and only ntk would take effect; choose one of pi, ntk",
        ),
        ({"method": "drope+yarn"}, "only yarn would take effect; choose one of drope, yarn"),
        ({"method": "yarn+ntk+headscale"}, "only ntk would take effect"),
        ({"to": 100_000}, "no document has 112500 tokens"),
    ],
)
def test_bad_requests_raise_one_sentence_and_write_nothing(tiny, tmp_path, changes, message):
    request = {"to": 128, "method": "uniform", **changes}
    with pytest.raises(FarspanError, match=message) as caught:
        extend(tiny / "none", out=tmp_path / "out", data=tiny / "text.txt", recipe=FEW, **request)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "yarn",
            ["tuning.steps=3"],
            r"yarn tunes no weights, so it does not use tuning.steps=3; add tune=fair",
        ),
        (
            "yarn+headscale",
            ["tuning.lr=0.5"],
            r"yarn\+headscale tunes no weights, so .* tuning.lr=0.5; add tune=fair",
        ),
        (
            "headscale",
            ["tune=fair"],
            "headscale does not use tune=fair; remove it, .*: pi, ntk, .*, yarn, auto$",
        ),
        (
            "headscale",
            ["fitted=false"],
            "does not use fitted=false; .* a method that does: logn, llama4, ssmax$",
        ),
        ("piecewise", ["fitted=false"], "piecewise does not use fitted=false"),
        (
            "uniform",
            ["search.lr=[0.1]"],
            r"does not use search.lr=\[0.1\]; .*: headscale, headlog, auto$",
        ),
        ("drope", ["tune=raw"], "drope does not use tune=raw"),
        ("auto", ["fitted=false"], "auto does not use fitted=false"),
        ("auto", ["tuning.steps=3"], "auto tunes no weights"),
    ],
)
def test_unused_settings_are_refused(tmp_path, method, changes, message):
    with pytest.raises(FarspanError, match=message) as caught:
        extend(
            "nope-twin", 1024, tmp_path / "out", method, recipe=read_extend_config(None, changes)
        )
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("yarn", ["tune=raw", "tuning.steps=3"]),
        ("yarn+headscale", ["tune=fair", "search.steps=3"]),
        ("drope+headlog", ["tuning.steps=3", "search.init=1"]),
        ("ssmax", ["fitted=false"]),
        ("auto", ["tune=fair", "tuning.steps=3", "search.steps=3"]),
        ("uniform", ["search_windows=3", "passkeys=0", "seed=1"]),
    ],
)
def test_used_settings_are_accepted(method, changes):
    check_unused_settings(method.split("+"), read_extend_config(None, changes))


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        (["tune=fair"], 200),
        (["tune=raw"], 1000),
        (["tune=fair", "tuning.steps=50"], 50),
        (["tune=raw", "tuning.steps=7"], 7),
        (["tune=raw", "tuning.steps=200"], 200),
    ],
)
def test_tune_sets_the_steps(changes, steps, monkeypatch):
    monkeypatch.setattr(registry, "fit_rope", lambda model, job, method, tuning: tuning.steps)
    assert METHODS["yarn"](None, None, read_extend_config(None, changes)) == steps


def test_refuses_targets_beyond_a_position_table(tiny, tmp_path):
    from farspan.model import FarspanConfig, FarspanForCausalLM

    shape = dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=300,
    )
    config = FarspanConfig(
        **shape, max_position_embeddings=64, position="learned", position_table=128
    )
    FarspanForCausalLM(config).save_pretrained(tmp_path / "learned")
    farspan.load(tiny / "none").tokenizer.save_pretrained(tmp_path / "learned")
    options = dict(out=tmp_path / "out", method="uniform", data=tiny / "text.txt", recipe=FEW)
    with pytest.raises(
        FarspanError, match="has 128 learned positions, and a search for 128 tokens reads 144"
    ):
        extend(tmp_path / "learned", 128, **options)
    assert not (tmp_path / "out").exists()


def test_scales_on_a_rope_model_come_with_a_warning(tiny, tmp_path):
    result = extend(
        tiny / "rope", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
    )
    assert "scales alone gain little there" in result.notes[0]


def test_patch_without_effect_is_not_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Patch, "apply", lambda self, model: model)
    with pytest.raises(
        ProofError, match="changes no logit of a fresh model; nothing was written"
    ) as caught:
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert caught.value.exit_code == 3
    assert not (tmp_path / "patch").exists()


def test_nan_difference_fails_the_proof(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        extend_workflow,
        "last_logits_cpu",
        lambda model, tokens, keep: torch.full((1, 4), torch.nan),
    )
    with pytest.raises(
        ProofError, match="differs from the fitted model by nan in a logit .*; nothing was written"
    ):
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert not (tmp_path / "patch").exists()


def test_infinite_weights_raise_one_sentence(tiny, tmp_path):
    model, tokenizer = farspan.load(tiny / "none")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    recipe = replace(FEW, fitted=False)
    with pytest.raises(
        CorruptError,
        match=r"the loss of .*broken is nan at position 1 because model.norm.weight holds",
    ):
        extend(
            tmp_path / "broken",
            128,
            tmp_path / "patch",
            "logn",
            data=tiny / "text.txt",
            recipe=recipe,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_nonfinite_losses_after_a_method_blame_the_method(tiny, tmp_path, monkeypatch):
    weights = {"model.norm.weight": torch.full((32,), torch.nan)}
    monkeypatch.setitem(
        METHODS, "uniform", lambda model, job, config: job.patch("uniform", weights=weights)
    )
    with pytest.raises(
        FarspanError,
        match=r"none extended by uniform has losses that are not finite; .*smaller learning rate",
    ):
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_suggests_smaller_settings(tiny, tmp_path, monkeypatch):
    def out_of_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(headscale_module, "mean_loss", out_of_memory)
    with pytest.raises(
        FarspanError,
        match=r"out of memory on windows of 144 tokens; .*search.micro_batch=1",
    ):
        extend(
            tiny / "none",
            128,
            tmp_path / "patch",
            "headscale",
            data=tiny / "text.txt",
            recipe=SEARCHED,
        )
    monkeypatch.setattr(extend_workflow, "loss_by_position", out_of_memory)
    for recipe, settings in ((FEW, ""), (replace(FEW, tune="fair"), "tuning.micro_batch=1, or ")):
        with pytest.raises(FarspanError, match=rf"rerun with {settings}a shorter target than 128$"):
            extend(
                tiny / "rope",
                128,
                tmp_path / "patch",
                "yarn",
                data=tiny / "text.txt",
                recipe=recipe,
            )


def test_lowest_loss_ignores_nan():
    assert lowest_loss({"a": math.nan, "b": 2.0, "c": 1.0, "d": math.inf}) == "c"
    assert lowest_loss({0.1: math.nan}) == 0.1


def test_refuses_a_folder_with_another_unfinished_search(tiny, tmp_path):
    work = tmp_path / ".patch.search"
    (work / "headscale" / "checkpoints" / "step-0000050").mkdir(parents=True)
    (work / "claim.toml").write_text("# another")
    with pytest.raises(FarspanError, match="holds the unfinished search of another extension"):
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert (work / "claim.toml").read_text() == "# another"
    shutil.rmtree(work / "headscale")  # a search without a checkpoint is overwritten
    extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert not work.exists()


@pytest.mark.long
def test_checkpoints_without_a_claim_are_not_adopted(tiny, tmp_path, monkeypatch):
    """Another extension's search, which was killed while it removed its folder."""
    options = dict(recipe=replace(FEW, search=QUICK))
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    expected = extend(
        tiny / "none", 128, tmp_path / "a", "headscale", data=tiny / "text.txt", **options
    )
    removed = []

    def killed(folder, ignore_errors=False):
        removed.append(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_folder.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            extend(
                tiny / "none",
                128,
                tmp_path / "b",
                "headscale",
                data=tmp_path / "other.txt",
                **options,
            )
    work = tmp_path / ".b.search"
    assert removed[0].parent == work
    assert list(work.glob("*/checkpoints/step-*")), "the kill left checkpoints"
    shutil.copytree(work, tmp_path / "copy")
    with pytest.raises(FarspanError, match="already exists"):
        extend(tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", **options)
    assert not work.exists(), "the command again removes what belongs to nobody"
    (tmp_path / "copy").rename(work)
    shutil.rmtree(tmp_path / "b")
    result = extend(
        tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", **options
    )
    assert torch.equal(result.patch.scales.base, expected.patch.scales.base)
    assert not work.exists()


def test_a_search_that_cannot_be_removed_does_not_spoil_the_patch(tiny, tmp_path, monkeypatch):
    remove = search_folder._remove

    def fail_at_the_end(folder):
        if (tmp_path / "b").exists():
            raise OSError(5, "Input/output error")
        remove(folder)

    monkeypatch.setattr(search_folder, "_remove", fail_at_the_end)
    recipe = replace(FEW, search=QUICK)
    extend(tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", recipe=recipe)
    assert (tmp_path / "b" / "patch.json").exists()


def test_an_output_that_appears_meanwhile_is_refused_before_the_search(tiny, tmp_path, monkeypatch):
    """Another process wrote it and gave its lock back."""
    prepare = extend_workflow.prepare

    def prepare_late(*arguments):
        prepared = prepare(*arguments)
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "patch.json").touch()
        return prepared

    monkeypatch.setattr(extend_workflow, "prepare", prepare_late)
    monkeypatch.setattr(extend_workflow, "_fit", lambda *arguments: pytest.fail("it searches"))
    with pytest.raises(FarspanError, match="already exists"):
        extend(tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", recipe=FEW)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.long
def test_concurrent_extension_to_the_same_folder_is_refused(tiny, tmp_path):
    options = dict(data=tiny / "text.txt", recipe=replace(FEW, search=QUICK))

    def extend_again(label, steps):
        def advance(count=1, note=""):
            if "headscale" in label:  # the first one is searching
                with pytest.raises(
                    FarspanError,
                    match="another process is training in .*.patch.search; wait for it",
                ):
                    extend(tiny / "none", 128, tmp_path / "patch", "headscale", **options)
                advance.tried += 1

        advance.tried = 0
        tried.append(advance)
        return advance

    tried = []
    extend(tiny / "none", 128, tmp_path / "patch", "headscale", progress=extend_again, **options)
    assert sum(advance.tried for advance in tried) > 0
    assert (tmp_path / "patch" / "patch.json").exists()
    assert not (tmp_path / ".patch.search").exists()


def test_says_what_the_model_itself_scales_at_the_target(tiny, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / "none" / name, tmp_path / name)
    config = BY_NAME["ministral3"].config()
    config.vocab_size = 300
    Ministral3ForCausalLM(config).save_pretrained(tmp_path)
    estimate = extend_workflow.estimate_extension(
        tmp_path, 128, "headscale", data=tiny / "text.txt", recipe=FEW
    )
    factor = 1 + 0.1 * math.log(1 + 127 // 16)
    assert any(f"in layers 0–3: ×{factor:.3g} at 128 tokens" in note for note in estimate.notes)


def test_warns_about_a_patch_that_raises_the_loss(tiny, tmp_path):
    worse = replace(FEW, search=replace(QUICK, steps=1, warmup=0, lr=(1e-9,), init=900.0))
    result = extend(
        tiny / "none", 128, tmp_path / "patch", "headscale", data=tiny / "text.txt", recipe=worse
    )
    assert result.after["loss@128"] > result.before["loss@128"]
    assert any("makes the loss at 128 tokens worse" in note for note in result.notes)
    equal_to_three_digits = {"loss@128": 8.3361}, {"loss@128": 8.3364}
    assert not list(extend_workflow._warnings(*equal_to_three_digits, 128))


def test_dynamic_ntk_refuses_another_train_length(tiny, tmp_path):
    with pytest.raises(
        FarspanError,
        match="dynamic-ntk starts at the .* of .*, 64, whatever --train-length 32",
    ):
        extend(
            tiny / "rope",
            128,
            tmp_path / "no",
            "dynamic-ntk",
            data=tiny / "text.txt",
            train_length=32,
            recipe=FEW,
        )


@pytest.mark.long
def test_extension_resumes_only_with_the_same_text(tiny, tmp_path):
    """An interrupted search ends in the same scales; settings without effect may change."""
    recipe = replace(FEW, search=replace(QUICK, steps=6, save_every=2))
    uninterrupted = extend(
        tiny / "none",
        128,
        tmp_path / "uninterrupted",
        "headscale",
        data=tiny / "text.txt",
        recipe=recipe,
    )

    def stop(label, steps):
        def advance(count=1, note=""):
            advance.count += 1
            if "headscale" in label and advance.count == 4:
                raise KeyboardInterrupt

        advance.count = 0
        return advance

    request = (tiny / "none", 128, tmp_path / "patch", "headscale")
    with pytest.raises(KeyboardInterrupt):
        extend(*request, data=tiny / "text.txt", recipe=recipe, progress=stop)
    assert (tmp_path / ".patch.search").exists()
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    with pytest.raises(FarspanError, match="unfinished search of another"):
        extend(*request, data=tmp_path / "other.txt", recipe=recipe)
    resumed = extend(
        *request,
        data=tiny / "text.txt",
        recipe=replace(recipe, search=replace(recipe.search, save_every=1)),
    )
    assert torch.equal(resumed.patch.scales.base, uninterrupted.patch.scales.base)
    assert not (tmp_path / ".patch.search").exists()


STILL = SearchConfig(steps=1, batch=2, micro_batch=2, lr=(1e-9,), warmup=1)


def extend_patch(tiny, source, out, method="headlog", search=STILL, **options):
    options = {"data": tiny / "text.txt", "recipe": replace(FEW, search=search), **options}
    return extend(source, 192, out, method, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "method"),
    [
        ("uniform", "headscale"),
        ("uniform", "headlog"),
        ("headscale", "headscale"),
        ("headscale", "headlog"),
        ("logn", "headlog"),
        ("headlog", "headlog"),
    ],
)
def test_a_search_on_a_patch_starts_from_its_scales(tiny, tmp_path, first, method):
    """One step with a learning rate of almost 0 ends where it started, in one patch of the base."""
    text = tiny / "text.txt"
    recipe = RECIPES.get(first, FEW)
    before = extend(tiny / "none", 128, tmp_path / "first", first, data=text, recipe=recipe)
    result = extend_patch(tiny, tmp_path / "first", tmp_path / "second", method)
    lengths = torch.tensor([32.0, 128.0, 192.0])
    start, end = before.patch.scales, result.patch.scales
    assert torch.allclose(end.at(lengths), start.at(lengths).clamp(min=1), atol=1e-6)
    assert end.constant == (method == "headscale")
    assert result.patch.method == f"{first}+{method}"
    assert (result.patch.name, result.patch.target) == (str(tiny / "none"), 192)
    assert result.before["loss@128"] == pytest.approx(before.after["loss@128"], abs=0.5)
    assert any("before is" in note and str(tmp_path / "first") in note for note in result.notes)
    record = json.loads((tmp_path / "second" / "record.json").read_text())
    assert record["settings"]["start"]["method"] == first
    assert farspan.load(tmp_path / "second").model is not None


@pytest.mark.long
def test_a_search_on_a_patch_measures_and_keeps_all_of_it(tiny, tmp_path):
    """Layout, weights and scales: `before` is the patched model, and the search changes λ̂ only."""
    text, texts = (tiny / "text.txt").read_text(), tmp_path / "texts"
    texts.mkdir()
    data = {name: texts / f"{name}.txt" for name in ("search", "choose", "report")}
    for number, file in enumerate(data.values()):
        file.write_text(text[number * 10_000 : (number + 1) * 10_000])
    recipe = replace(CONVERTED, swan=replace(CONVERTED.swan, sharpen=False))
    swan = extend(tiny / "rope", 192, tmp_path / "swan", "swan", data=data, recipe=recipe)
    result = extend_patch(tiny, tmp_path / "swan", tmp_path / "out", search=QUICK, data=data)
    assert result.before == swan.after
    assert result.after != result.before
    assert not any("rotary" in note for note in result.notes), "advice for layers without windows"
    assert result.patch.layout == swan.patch.layout
    assert result.patch.scales.layers == swan.patch.layout.global_layers
    assert set(result.patch.weights) == set(swan.patch.weights)
    for name, weight in swan.patch.weights.items():
        assert torch.equal(result.patch.weights[name], weight), name
    again = extend_patch(tiny, tmp_path / "out", tmp_path / "again", data=data)
    assert again.before == result.after, "scales of the patch too"
    assert again.patch.method == "swan+headlog+headlog"


@pytest.mark.parametrize(
    ("first", "method", "search", "options", "message"),
    [
        ("uniform", "yarn", None, {}, "only scales can be fitted on one, not yarn"),
        ("uniform", "auto", None, {}, "only scales can be fitted on one, not auto"),
        ("uniform", "logn", None, {}, "is a patch with scales, which logn would replace"),
        ("logn", "headscale", STILL, {}, "grow with the context, and headscale searches"),
        ("ssmax", "headlog", STILL, {}, r"another formula .* \(basis ln\)"),
        ("uniform", "headlog", QUICK, {}, "search.init=1.2 would have no effect"),
        ("uniform", "headlog", STILL, {"train_length": 32}, "trained on 64 tokens, and --train"),
    ],
)
def test_refuses_what_makes_no_sense_on_a_patch(
    tiny, tmp_path, first, method, search, options, message
):
    text = tiny / "text.txt"
    extend(tiny / "none", 128, tmp_path / "first", first, data=text, recipe=FEW)
    with pytest.raises(FarspanError, match=message):
        extend_patch(
            tiny,
            tmp_path / "first",
            tmp_path / "second",
            method,
            search=search or SearchConfig(),
            **options,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_patch_finds_its_base_from_any_folder(tiny, tmp_path, monkeypatch):
    """The base path looks like a hub id; exports show the relative path."""
    shutil.copytree(tiny / "none", tmp_path / "runs" / "model")
    monkeypatch.chdir(tmp_path)
    extend("runs/model", 128, "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    record = json.loads((tmp_path / "patch" / "record.json").read_text())
    assert record["settings"]["model"] == "runs/model"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert seam.installed(farspan.load("../patch").model)
    assert Patch.load(tmp_path / "patch").name == str(tmp_path / "runs" / "model")
    for format in ("stock", "live"):
        farspan.export("../patch", format, format)
        written = [
            path.read_text() for path in Path(format).iterdir() if path.suffix in (".json", ".md")
        ]
        assert any("runs/model, extended from 64 to 128" in text for text in written)
        assert not any(str(tmp_path / "runs") in text for text in written)


@pytest.mark.parametrize("name", ["nope-twin", "owner/model"])
def test_bundled_models_and_hub_ids_keep_their_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patch = Patch("test", "0" * 64, 128, 64, name=name)
    assert extend_workflow._with_absolute_base(patch, name) is patch


def test_missing_base_is_reported_with_a_way_out(tiny, tmp_path, monkeypatch):
    def unreachable(*_args, **_options):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    shutil.copytree(tiny / "none", tmp_path / "model")
    extend(
        tmp_path / "model", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
    )
    patch = Patch.load(tmp_path / "patch")
    (tmp_path / "model").rename(tmp_path / "moved")
    for number, name in enumerate((patch.name, "runs/model", "model.gguf")):
        folder = replace(patch, name=name).save(tmp_path / str(number))
        with pytest.raises(
            FarspanError, match="the base model of the patch .* was not found"
        ) as caught:
            farspan.load(folder)
        way_out = f"put it into {folder / 'base'}, or set its path in"
        for part in (f"the patch in {folder} ", name, way_out):
            assert part in str(caught.value)
    shutil.copytree(tmp_path / "moved", tmp_path / "0" / "base")
    assert seam.installed(farspan.load(tmp_path / "0").model), "the way out works"


def test_dynamic_ntk_is_reset_between_measurements(tiny, tmp_path):
    """Beyond twice the length, the state kept from longer text would change shorter text."""
    result = extend(
        tiny / "rope", 192, tmp_path / "patch", "dynamic-ntk", data=tiny / "text.txt", recipe=FEW
    )
    assert result.proof == pytest.approx(0, abs=1e-4)


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


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SearchConfig(lr=()),
        lambda: SearchConfig(min_gain=-0.1),
        lambda: SearchConfig(lr=(-1.0,)),
        lambda: SearchConfig(batch=0),
        lambda: SearchConfig(save_every=0),
        lambda: SearchConfig(repeats=1.5),
        lambda: SearchConfig(passkeys=-0.5),
        lambda: SearchConfig(answers=-1.0),
        lambda: SearchConfig(repeats=0.6, passkeys=0.5),
        lambda: SearchConfig(spans=(1, 8)),
        lambda: SearchConfig(spans=(8, 8)),
        lambda: SearchConfig(spans=(8,)),
        lambda: SearchConfig(spans=(2, 4, 8)),
        lambda: TuningConfig(steps=-1),
        lambda: ExtendConfig(passkeys=-1),
        lambda: ExtendConfig(choose_windows=0),
        lambda: ExtendConfig(seed=-1),
        lambda: ExtendConfig(seed=2**20),
    ],
)
def test_invalid_settings_are_refused_by_name(wrong):
    with pytest.raises(
        FarspanError,
        match="(lr|min_gain|batch|save_every|repeats|answers|spans|steps|passkeys|choose_windows|"
        "seed) is",
    ):
        wrong()


def test_seeds_of_twenty_bits_are_accepted():
    assert ExtendConfig(seed=1_048_575).seed == 1_048_575


def test_default_recipe_is_the_default_config():
    assert read_extend_config(None, []) == ExtendConfig()
    assert read_extend_config(None, ["seed=0", "swan.max_loss=0.005"]) == ExtendConfig()
    assert read_extend_config(None, ["search.steps=3", "tune=fair"]).search.steps == 3
    with pytest.raises(FarspanError, match="choose fair"):
        read_extend_config(None, ["tune=much"])


@pytest.mark.long
def test_the_benchmark_compares_whole_searches(tiny, tmp_path, monkeypatch, capsys):
    """On a CPU: the counts of both searches, and ratios that follow from them."""
    script = Path(__file__).parent.parent / "benchmarks" / "search.py"
    options = ["--to", "128", "--data", str(tiny / "text.txt"), "--steps", "12"]
    options += ["--small", "--length", "64", "--rounds", "1", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [str(script), "--model", str(tiny / "none"), *options])
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    results = json.loads((tmp_path / "out.json").read_text())
    reference, default = results["searches"].values()
    assert (reference["steps"], reference["gradients"]) == (12, 12 * 8)
    assert default["gradients"] == 8 * default["steps"]
    assert reference["forwards"] > default["forwards"] > 0
    assert results["ratio"] == default["seconds"] / reference["seconds"]
    assert results["difference"] == pytest.approx(default["loss"] - reference["loss"])
    assert results["within"] == (results["difference"] <= 0.005)
    assert f"in {results['ratio']:.2f} of its time" in capsys.readouterr().out


@pytest.mark.long
def test_uniform_scale_doubles_the_context_of_the_nope_model(tmp_path):
    """A uniform scale of 1.1 lowers the loss at 1,024 tokens by more than 3 nats."""
    model, tokenizer = farspan.load("nope-twin")
    from farspan.data.documents import read_documents

    text = next(iter(read_documents("python-docs/score"))).text
    ids = torch.tensor(tokenizer(text)["input_ids"])[: 2 * 1024].view(2, 1024)
    before = loss_by_position(model, ids)
    seam.install(model, Scales.uniform(1.1, layers=range(6), heads=8))
    after = loss_by_position(model, ids)
    assert after[-128:].mean() < before[-128:].mean() - 3
    assert after[256:511].mean() < before[256:511].mean() + 0.1


@pytest.mark.long
def test_four_processes_give_the_patch_of_one(tiny, tmp_path):
    """Each takes its share of every batch."""
    recipe = replace(FEW, search=replace(QUICK, batch=4))

    def search_scales(rank: int) -> None:
        extend(tiny / "none", 128, tmp_path / "four", "headscale", **options)

    options = dict(data=tiny / "text.txt", recipe=recipe)
    in_processes(4, search_scales, tmp_path)
    extend(tiny / "none", 128, tmp_path / "one", "headscale", **options)
    one, four = (Patch.load(tmp_path / name) for name in ("one", "four"))
    assert (one.scales.base - four.scales.base).abs().max() <= 1e-6
    assert not torch.equal(one.scales.base, torch.ones_like(one.scales.base))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
SHORT_SEARCH = ["search.steps=4", "search.batch=2", "search.lr=[0.1]", "search.init=1.2"]
SHORT_TUNING = ["tuning.steps=4", "tuning.batch=4", "tuning.micro_batch=2", "swan.measured_rows=1"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "method", "settings"),
    [
        pytest.param(
            *("none", "headscale", [*SHORT_SEARCH, "search.warmup=1"]),
            marks=pytest.mark.manual,  # headlog takes the same path, and its plateau
        ),
        ("none", "headlog", ["search.warmup=1"]),
        ("rope", "swan", [*SHORT_TUNING, "tuning.warmup=1", "swan.window=8"]),
    ],
)
def test_torchrun_gives_the_patch_of_one_process(model, method, settings, tiny, tmp_path):
    """Two processes, started as a user would, find what one process finds."""
    overrides = [*settings, "passkeys=0", "choose_windows=2", "report_windows=2"]
    options = ["--to", "128", "--method", method, "--data", str(tiny / "text.txt")]
    command = [*TORCHRUN, "-m", "farspan", "extend", str(tiny / model), *options]
    process = subprocess.run(
        [*command, "-o", str(tmp_path / "two"), *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.count("loss after") == 1
    text = tiny / "text.txt"
    extend(tiny / model, 128, tmp_path / "one", method, data=text, overrides=overrides)
    one, two = (Patch.load(tmp_path / name) for name in ("one", "two"))
    assert one.layout == two.layout
    if method != "swan":
        assert torch.allclose(one.scales.base, two.scales.base, atol=1e-5)
        searches = [
            json.loads((tmp_path / name / "record.json").read_text())["searches"][0]
            for name in ("one", "two")
        ]
        assert searches[0]["end"] == searches[1]["end"]
        losses = [search["choose_losses"] for search in searches]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    else:
        assert len(one.weights) > 10
        for name, weight in one.weights.items():
            assert torch.allclose(weight, two.weights[name], atol=1e-5), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(("init", "starts"), [(0.0, [0.0, 1.3]), (1.1, [1.1, 1.1])])
def test_searches_of_auto_start_from_the_best_uniform_scale(init, starts, monkeypatch):
    """With the steps of Wang 2024, unless a start is set."""
    model, seen = BY_NAME["farspan-none"].build(), []
    job = job_for(model)

    def fit(model, job, config, names):
        seen.append(config.search.init)
        return job.patch(names[0], scales=job.uniform(1.3))

    monkeypatch.setattr(registry, "candidate_methods", lambda *_: ["uniform", "headscale"])
    monkeypatch.setattr(registry, "_fit_in_turn", fit)
    search = SearchConfig(steps=2, init=init)
    registry._fit_best(model, probe(model), job, ExtendConfig(search=search))
    assert seen == pytest.approx(starts)


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
