"""The part of a conversion on long windows, and the loss that weights are trained by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from families import tokens
from farspan.errors import FarspanError
from farspan.methods import long_windows as long_windows_module
from farspan.methods import swan as swan_module
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.fit import search_windows
from farspan.methods.job import loss_by_position
from farspan.methods.long_windows import LongModule, LongPlan
from farspan.methods.swan import swan
from farspan.methods.swan_config import DistillPlan, SwanConfig
from farspan.methods.tuning import LossModule, TuningConfig
from farspan.model import loss as loss_module
from farspan.model.loss import mean_kl, training_loss
from swan_models import (
    BY_NAME,
    EVEN,
    LENGTH,
    QUICK,
    TARGET,
    WINDOW,
    WordTokenizer,
    assert_unchanged,
    build,
    job_for,
    snapshot,
)

# 40 steps of one window of the target and two short ones; six steps of the distillation, as QUICK
# has them.
LONG = replace(EVEN, long=0.5, tokens=2 * 40 * 2 * TARGET, repeats=0.0)


@pytest.fixture
def one_window_a_step(monkeypatch):
    monkeypatch.setattr(long_windows_module, "LONG_TOKENS", TARGET)
    monkeypatch.setattr(long_windows_module, "LEARNING_RATE", 1e-3)


def stop_in_long_windows(step: int):
    def progress(label, steps):
        def advance(count=1, note=""):
            advance.count += count
            if label == "lengthen" and advance.count == step:
                raise KeyboardInterrupt

        advance.count = 0
        return advance

    return progress


@pytest.mark.long
def test_long_windows_teach_the_text_at_the_target(one_window_a_step, monkeypatch):
    model, lengths = build("llama"), []
    before, forward = snapshot(model), LossModule.forward

    def watched(self, ids):
        lengths.append(ids.shape[1])
        return forward(self, ids)

    monkeypatch.setattr(LossModule, "forward", watched)
    job = job_for(model)
    patches = [swan(model, job, replace(LONG, long=share), QUICK) for share in (0.0, 0.5)]
    assert_unchanged(model, before)
    assert lengths == [TARGET] * 40
    assert job.details["long_windows"] == {
        "length": TARGET,
        "batch": 1,
        "micro_batch": 1,
        "short_length": LENGTH,
        "steps": 40,
        "tokens": 40 * 2 * TARGET,
    }
    assert patches[0].layout == patches[1].layout
    losses = [loss_by_position(patch.apply(build("llama")), job.search) for patch in patches]
    assert losses[1].mean() < losses[0].mean() - 0.1
    assert losses[1][LENGTH:].mean() < losses[0][LENGTH:].mean() - 0.1


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 5])
def test_a_run_killed_on_long_windows_resumes_to_the_same_bits(step, one_window_a_step, tmp_path):
    model, tuning = build("farspan-rope"), replace(QUICK, save_every=2)
    settings = replace(LONG, tokens=2 * 8 * 2 * TARGET)
    uninterrupted = swan(model, job_for(model), settings, tuning)
    killed = job_for(model, folder=tmp_path, progress=stop_in_long_windows(step))
    with pytest.raises(KeyboardInterrupt):
        swan(model, killed, settings, tuning)
    torch.manual_seed(99)  # another process
    resumed = swan(model, job_for(model, folder=tmp_path), settings, tuning)
    assert set(resumed.weights) == set(uninterrupted.weights)
    for name, weight in uninterrupted.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 5])
def test_a_conversion_with_little_memory_is_the_same_up_to_rounding(first, monkeypatch, caplog):
    """Windows with answers, short ones and long ones; memory ends in pass `first` or later."""
    monkeypatch.setattr(long_windows_module, "LONG_TOKENS", 2 * TARGET)
    settings = replace(LONG, tokens=2 * 4 * 4 * TARGET, facts=0.5, answers=0.1, short=0.3)
    decode, patches, passes = loss_module.decoder_output, [], []

    def decode_little(model, ids):
        if torch.is_grad_enabled():
            passes.append(ids.shape)
            if len(passes) > first and ids.numel() > TARGET:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(model, ids)

    for decode_ids in (decode, decode_little):
        monkeypatch.setattr(loss_module, "decoder_output", decode_ids)
        model = build("llama")
        job = job_for(model, tokenizer=WordTokenizer(), seed=3)
        patches.append(swan(model, job, settings, replace(QUICK, batch=6, micro_batch=3)))
    assert "micro batches are split into" in caplog.text
    assert {length for _, length in passes} == {WINDOW, LENGTH, TARGET}
    base = dict(build("llama").named_parameters())
    for name, weight in patches[0].weights.items():
        error = (patches[1].weights[name] - weight).norm()
        assert error < 1e-3 * (weight - base[name]).norm(), name


def test_the_tokens_are_those_of_both_parts():
    config = SwanConfig(tokens=30_000_000, long=0.25)
    plan = DistillPlan.make(config, TuningConfig(), 512)
    long = config.long_plan(512, 32_768)
    assert (long.length, long.short_length) == (32_768, 512)
    assert long.tokens == pytest.approx(7_500_000, rel=0.01)
    assert long.long_tokens == long.tokens / 2
    assert plan.tokens + long.tokens == pytest.approx(config.tokens, rel=0.01)
    assert SwanConfig().long_plan(512, 32_768) is None


@pytest.mark.parametrize(
    ("target", "length", "expected"),
    [(4096, 0, (4096, 8)), (131_072, 0, (32_768, 1)), (131_072, 100_000, (100_000, 1))],
)
def test_long_windows_are_as_long_as_the_target_up_to_a_limit(target, length, expected):
    plan = SwanConfig(long=0.5, long_length=length).long_plan(512, target)
    assert (plan.length, plan.batch) == expected


def test_search_windows_are_those_of_the_long_part():
    swan_config = SwanConfig(tokens=32 * 4096, long=0.25)
    config = ExtendConfig(swan=swan_config, tuning=TuningConfig(batch=8, micro_batch=8))
    length, count = search_windows(["swan"], config, 4096, 512)
    assert (length, count) == (4096, 40)  # 24 of distillation, 16 of the one step that is read


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"long": 1.0}, "swan.long is 1; choose a share from 0 to less than 1"),
        ({"long": -0.1}, "swan.long is -0.1; choose a share"),
        ({"long_length": 100}, "without swan.long, swan.long_length=100 would have no effect"),
        ({"long": 0.5, "long_length": 1}, "swan.long_length is 1; choose 2 or more"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(FarspanError, match=message):
        SwanConfig(**settings)


@pytest.mark.parametrize("length", [LENGTH, TARGET + 1])
def test_long_windows_are_between_the_train_length_and_the_target(length):
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(FarspanError, match=f"swan.long_length is {length}; choose more than"):
        swan(model, job_for(model), replace(EVEN, long=0.5, long_length=length), QUICK)
    assert_unchanged(model, before)


def test_a_step_takes_at_least_one_window():
    assert LongPlan.make(1, 70_000, 512) == LongPlan(70_000, 1, 1, 512, 1)
    assert LongPlan.make(10 * 65_536, 4096, 512) == LongPlan(4096, 8, 8, 512, 10)


@pytest.mark.parametrize("length", [4096, 32_768, 33_000, 65_536])
def test_a_step_has_as_many_tokens_in_short_windows_and_as_many_micro_batches(length):
    plan = LongPlan.make(1e7, length, 512)
    long = plan.batch * plan.length
    assert 0.99 * long < plan.short_batch * plan.short_length <= long
    assert plan.short_batch // plan.short_micro_batch == plan.batch // plan.micro_batch


def test_short_windows_go_on_where_the_distillation_ended(monkeypatch):
    """As long as there are others, no window is read twice, and none is changed like another."""
    model, read, numbers = build("llama"), {"distill": [], "lengthen": []}, []

    def train(model, job, name, tuning, training):
        for step in range(training.steps):
            read[name] += training.batches(step)
        return {}

    def count(row, number):
        numbers.append((len(row), number))
        return row, torch.zeros(len(row), dtype=torch.bool)

    monkeypatch.setattr(swan_module, "train_weights", train)
    monkeypatch.setattr(long_windows_module, "train_weights", train)
    monkeypatch.setattr(swan_module, "recall_rows", lambda *_, **__: count)
    monkeypatch.setattr(long_windows_module, "LONG_TOKENS", 2 * TARGET)
    settings = replace(LONG, long=0.5, tokens=2 * 2 * 4 * TARGET)
    text = torch.arange(40 * TARGET).reshape(40, TARGET)  # no token stands twice
    swan(model, job_for(model, search=text), settings, replace(QUICK, steps=8))
    short = [ids for part in read.values() for ids in part if ids.shape[1] == LENGTH]
    windows = torch.cat(short)[:, 0].tolist()
    assert len(windows) == len(set(windows)) == 8 * 4 + 2 * 4
    assert [number for length, number in numbers if length == LENGTH] == [*range(40)]
    assert [number for length, number in numbers if length == TARGET] == [*range(32, 36)]


@pytest.mark.long
def test_the_base_teaches_on_short_windows_beside_the_long_ones():
    """Both kinds count equally in a step."""
    model, teacher = build("llama"), build("farspan-rope")
    plan, seen = LongPlan.make(1, TARGET, LENGTH), []
    job = job_for(model)
    with torch.no_grad():
        module = LongModule(model, teacher, plan.short_length)
        for ids in long_windows_module._batches(job, plan, model.device, None, 0)(0):
            seen.append(tuple(ids.shape))
            short = ids.shape[1] == LENGTH
            expected = mean_kl(model, teacher, ids) if short else training_loss(model, ids)
            assert module(ids) == pytest.approx(expected.item(), rel=1e-5)
            assert abs(mean_kl(model, teacher, ids) - training_loss(model, ids)) > 0.1
    assert seen == [(plan.batch, TARGET), (2 * plan.batch, LENGTH)]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "granite", "phi", "farspan-rope"])
@pytest.mark.parametrize("budget", [1, 700, 1 << 24])
def test_the_training_loss_and_its_gradient_are_those_of_whole_logits(name, budget):
    model, ids = BY_NAME[name].build().double(), tokens(12, batch=2)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    loss = training_loss(model, ids, budget=budget)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters, allow_unused=True), gradients, strict=True
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, atol=1e-12)


def test_no_more_logits_exist_than_the_budget(monkeypatch):
    model, ids, sizes = build("llama"), tokens(12, batch=2), []
    cross_entropy = F.cross_entropy

    def watched(rows, *arguments, **options):
        sizes.append(rows.numel())
        return cross_entropy(rows, *arguments, **options)

    monkeypatch.setattr(F, "cross_entropy", watched)
    budget = 4 * 2 * model.config.vocab_size
    training_loss(model, ids, budget=budget).backward()
    assert max(sizes) == budget
    assert len(sizes) == 6, "three parts of eleven tokens, each computed twice"
