"""The search for one scale per head: its loss, its steps, its end and what it reads."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import farspan
from families import VOCABULARY
from farspan.attention import seam
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.methods import auto
from farspan.methods import headscale as headscale_module
from farspan.methods import tuning as tuning_module
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.fit import make_fit_job
from farspan.methods.headscale import headlog, headscale
from farspan.methods.job import default_micro_batch, loss_by_position, scaled_loss
from farspan.methods.search_config import PASSKEYS, SearchConfig
from farspan.methods.tuning import TuningConfig
from farspan.methods.uniform import uniform
from farspan.model.loss import mean_loss, token_losses
from farspan.train.loop import PlateauRule, TrainResult
from farspan.train.steps import EagerSteps
from fit_jobs import BY_NAME, FOUR, QUICK, TARGET, job_for, job_without_model


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


def test_searches_start_from_one_scale_for_each_layer():
    """One step with a learning rate of almost 0 ends where the search started."""
    model = BY_NAME["qwen3"].build()
    job = job_for(model)
    init = tuple(1 + 0.1 * layer for layer in range(len(job.layers)))
    rows = torch.tensor(init)[:, None].expand(-1, job.heads)
    still = replace(QUICK, steps=1, lr=(1e-9,), init=init)
    assert torch.allclose(headscale(model, job, still).scales.base, rows, atol=1e-6)
    growing = headlog(model, job, still).scales
    assert torch.allclose(growing.base, torch.ones_like(rows), atol=1e-6)
    assert torch.allclose(growing.at(torch.tensor([float(TARGET)]))[..., 0], rows, atol=1e-6)
    for method in (headscale, headlog):
        with pytest.raises(FarspanError, match="search.init has 1 scales, and 4 layers are scaled"):
            method(model, job, replace(still, init=(1.1,)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": -0.5}, "search.init is -0.5; choose 0 or more"),
        ({"init": (1.1, 0.0)}, r"search.init is \[1.1, 0.0\]; choose one scale above 0"),
        ({"init": ()}, "choose one scale above 0 for each scaled layer"),
        ({"warmup": -1}, "search.warmup is -1; choose 0 or more"),
    ],
)
def test_impossible_starts_are_refused(settings, message):
    with pytest.raises(FarspanError, match=message):
        SearchConfig(**settings)


def test_the_choose_split_selects_the_learning_rate(monkeypatch):
    """Each search lowers the loss of what it reads; other text decides between them."""
    job = job_without_model()
    job = replace(job, choose=job.search + 1)
    best = {int(job.search[0, 0]): 0.1, int(job.choose[0, 0]): 0.05}

    def search(model, job, search, plan, method, start, lr):
        return job.uniform(lr)

    def loss(model, windows, scales):
        return abs(float(scales.base[0, 0]) - best[int(windows[0, 0])])

    monkeypatch.setattr(headscale_module, "optimize_scales", search)
    monkeypatch.setattr(headscale_module, "scaled_loss", loss)
    patch = headscale(None, job, replace(QUICK, lr=(0.1, 0.05)))
    assert float(patch.scales.base[0, 0]) == pytest.approx(0.05)


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


def test_bf16_gradients_at_the_limit_are_not_accurate(monkeypatch):
    """The limit is a cosine that accurate gradients exceed."""
    model = BY_NAME["farspan-none"].build().float()
    job = job_for(model)
    scaled = headscale_module.ScaledModel(model, job.uniform(1.2))
    seam.install(model, scaled.scales)
    for cosine, accurate in ((0.99, False), (0.991, True)):
        limit = torch.tensor(cosine, dtype=torch.float64)
        monkeypatch.setattr(torch, "cosine_similarity", lambda *_, dim, limit=limit: limit)
        with seam.frozen(model):
            assert scaled.bf16_is_accurate(job.search[:1]) is accurate


class ClaimedGpu(str):
    """A name of the CPU that says it is a GPU."""

    type = "cuda"


@pytest.mark.parametrize(
    ("device", "dtype", "used"),
    [
        (ClaimedGpu("cpu"), torch.float32, True),
        (ClaimedGpu("cpu"), torch.bfloat16, False),  # its products are rounded already
        (torch.device("cpu"), torch.float32, False),
    ],
)
def test_float32_models_on_a_gpu_use_bf16_products(device, dtype, used, monkeypatch):
    """Where these give the gradient of float32."""
    model, seen = BY_NAME["farspan-none"].build(dtype=dtype), []
    job = job_for(model)
    monkeypatch.setattr(type(model), "device", device)
    monkeypatch.setattr(headscale_module.ScaledModel, "bf16_is_accurate", lambda *_: True)

    def train(task, plan, folder, on_step):
        seen.append(task.module.use_bf16)
        return TrainResult([], 0, [])

    monkeypatch.setattr(headscale_module, "train", train)
    headscale(model, job, QUICK)
    assert seen == [used]


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


def test_two_processes_judge_the_plateau_by_the_mean_over_all_windows(monkeypatch):
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    scaled = headscale_module.ScaledModel(model, job.uniform(1.0))
    windows, totals = job.search[:3, :TARGET], []
    of_one = scaled.validation_loss(windows)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.add_(sum(totals)))
    for index in (1, 0):  # the sum is of what the processes so far computed
        state = SimpleNamespace(num_processes=2, process_index=index)
        monkeypatch.setattr(headscale_module, "processes", lambda state=state: state)
        loss = scaled.validation_loss(windows)
        totals.append(loss * len(windows))
    assert loss == pytest.approx(of_one, abs=1e-9)


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


@pytest.mark.long
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
    steps = []
    again = replace(killed, progress=lambda *_: lambda count=1, note="": steps.append(count))
    resumed = headlog(model, again, search)
    assert sum(steps) == details_of(job)["steps"], "of both runs"
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
    assert [SearchConfig(steps=n).resolve(True).warmup for n in (9, 20, 300)] == [0, 2, 20]
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
        job = make_fit_job(model, probe(model), 16, 8, ids, ids)
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


@pytest.mark.parametrize("name", ["farspan-none", "llama"])
def test_gradients_of_scales_do_not_vanish_in_float16(name):
    """In a step of 8 windows of 18K tokens, as in Wang 2024, each token counts 7e-6."""
    ids = torch.randint(VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(3))
    share, losses, gradients = ids.numel() / (8 * 18 * 1024), [], []
    for dtype in (torch.float32, torch.float16):
        model = BY_NAME[name].build(dtype=dtype)
        scaled = headscale_module.ScaledModel(model, job_for(model).uniform(1.2))
        seam.install(model, scaled.scales)
        with seam.frozen(model):
            loss = scaled(ids)
            (loss * share).backward()
        losses.append(loss.item())
        gradients.append(scaled.base.grad)
    assert losses[1] == pytest.approx(losses[0], abs=1e-2)
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error < 0.02


@pytest.mark.parametrize(
    ("batch", "length", "rows"),
    [(8, 2304, 8), (8, 18_432, 1), (8, 9000, 2), (6, 9000, 3), (2, 50_000, 1)],
)
def test_long_windows_are_read_in_small_micro_batches(batch, length, rows):
    assert default_micro_batch(batch, length) == rows


@pytest.mark.parametrize(("micro_batch", "rows"), [(0, 4), (1, 1), (2, 2)])
@pytest.mark.parametrize("trained", ["scales", "weights"])
def test_as_many_windows_are_read_at_once_as_set_or_as_fit(trained, micro_batch, rows):
    model = BY_NAME["farspan-none"].build()
    job, size = job_for(model), dict(steps=1, batch=4, micro_batch=micro_batch)
    seen = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(inputs[0].shape))
    )
    if trained == "scales":
        headscale(model, job, replace(QUICK, **size))
    else:
        tuning_module.tune_weights(model, job, "pi", TuningConfig(**size))
    windows = [count for count, length in seen if length > TARGET]
    assert windows == [rows] * (4 // rows)


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


def test_passkeys_inside_the_train_length_are_asked_for_at_even_depths(monkeypatch):
    depths = []

    class Documents:
        shortest = 8

        def __init__(self, tokenizer, begin):
            pass

        def document(self, length, depth, key):
            depths.append(depth)
            return [1] * length

        def answer(self, key):
            return [1, 1]

    monkeypatch.setattr(headscale_module, "PasskeyDocuments", Documents)
    model = BY_NAME["farspan-none"].build()
    headscale_module.retrieves_passkeys(model, replace(job_for(model), tokenizer=object()))
    assert depths == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.long
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
        (PLATEAU, True, PASSKEYS),
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
    headscale(model, job, replace(search, max_steps=2, tail=0.5))
    assert [options["passkeys"] for options in asked] == [share]
    weight = 0.125 if share else 0.0
    described = [details_of(job)[name] for name in ("passkeys", "answers", "tail")]
    assert described == [share, weight, 0.5]


def test_answers_of_passkeys_and_the_tail_count_in_the_loss_of_a_search(monkeypatch):
    model = BY_NAME["farspan-none"].build()
    seen = []

    def mark_the_last_token(row, number):
        return row, torch.arange(len(row)) == len(row) - 1

    def record(model, ids, *, answers, answer_weight, tail_weight, **_):
        weights = answer_weight, tail_weight
        seen.append(((answers > 0).sum(1).tolist(), answers[:, -1].tolist(), *weights))
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
    assert [options["min_distance"] for options in asked] == [2, 2], "a quarter of the train length"


@pytest.mark.parametrize(("init", "starts"), [(0.0, [0.0, 1.3]), (1.1, [1.1, 1.1])])
def test_searches_of_auto_start_from_the_best_uniform_scale(init, starts, monkeypatch):
    """With the steps of Wang 2024, unless a start is set."""
    model, seen = BY_NAME["farspan-none"].build(), []
    job = job_for(model)

    def fit(model, job, config, names):
        seen.append(config.search.init)
        return job.patch(names[0], scales=job.uniform(1.3))

    monkeypatch.setattr(auto, "candidate_methods", lambda *_: ["uniform", "headscale"])
    monkeypatch.setattr(auto, "_fit_in_turn", fit)
    search = SearchConfig(steps=2, init=init)
    auto.fit_best(model, probe(model), job, ExtendConfig(search=search))
    assert seen == pytest.approx(starts)


@pytest.mark.manual
def test_the_quick_search_extends_nope_twin_in_minutes_and_keeps_its_passkeys(tmp_path):
    """On two CPU cores without settings; judged on text and keys that the search never read."""
    start = time.perf_counter()
    farspan.extend("nope-twin", 1024, tmp_path / "patch", "headlog")
    assert time.perf_counter() - start < 120
    options = {"lengths": "512,1024", "baseline": "nope-twin", "preset": "full"}
    text = farspan.evaluate(tmp_path / "patch", "perplexity", tmp_path / "text", **options)
    loss = {
        (name, score.length): math.log(score.value)
        for name, scores in (("patch", text.scores), ("base", text.baseline_scores))
        for score in scores
        if score.metric == "ppl"
    }
    assert loss["patch", 512] - loss["base", 512] < 0.05
    assert loss["patch", 1024] - loss["patch", 512] < 0.1
    keys = farspan.evaluate(tmp_path / "patch", "passkey", tmp_path / "keys", **options)
    retrieved = {score.length: score.value for score in keys.scores if score.metric == "passkey"}
    assert min(retrieved.values()) >= 0.9
