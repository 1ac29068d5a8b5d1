"""SWAN: the distilled patch of every family, its settings, and runs that are killed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from families import tokens
from farspan.attention import caches, seam
from farspan.attention.layout import LayerLayout, Layout
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.data import recall
from farspan.data.windows import prepend
from farspan.errors import FarspanError
from farspan.methods import job as job_module
from farspan.methods import swan as swan_module
from farspan.methods import swan_config, swan_layout
from farspan.methods import tuning as tuning_module
from farspan.methods.job import FitJob
from farspan.methods.swan import swan
from farspan.methods.swan_config import DistillPlan, SwanConfig
from farspan.methods.swan_layout import check_layers
from farspan.methods.tuning import TuningConfig, low_rank_changes
from farspan.model.compile import decoder_layers
from farspan.model.loss import mean_kl, token_losses
from swan_models import (
    BY_NAME,
    EVEN,
    LENGTH,
    QUICK,
    SETTINGS,
    TARGET,
    WINDOW,
    WordTokenizer,
    assert_unchanged,
    build,
    job_for,
    logits_of,
    snapshot,
    stop_at,
)


@pytest.fixture
def fitted_logits(monkeypatch) -> list[torch.Tensor]:
    """The logits of the model at the end of its training, before it is restored."""
    logits: list[torch.Tensor] = []
    collect = tuning_module._changed_weights

    def record(model, before):
        logits.append(logits_of(model))
        return collect(model, before)

    monkeypatch.setattr(tuning_module, "_changed_weights", record)
    return logits


@torch.no_grad()
def kl_from_base(patch: Patch, name: str, ids: torch.Tensor) -> float:
    return float(mean_kl(patch.apply(build(name)), build(name), ids))


WINDOWED, GLOBAL = LayerLayout(True, WINDOW), LayerLayout(False)
# The layers that become global, whether the others get a window, and a learning rate.
SWAN_FAMILIES = {
    "farspan-rope": (1, True, 1e-3),
    "llama": (1, True, 1e-3),
    "llama-tied": (1, True, 1e-3),
    "mixtral": (1, True, 1e-3),
    "farspan-none": (1, True, 1e-3),
    "smollm3": (1, True, 1e-3),
    "gemma3": (1, False, 1e-5),
    "gpt-oss": (2, False, 1e-4),
}


SLOWER = ("llama-tied", "smollm3", "gpt-oss", "mixtral", "gemma3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in SLOWER else [])
        for name in SWAN_FAMILIES
    ],
)
def test_swan_lowers_the_kl_and_restores_the_model(name, fitted_logits):
    count, complete, lr = SWAN_FAMILIES[name]
    # Measuring takes a second.
    settings = EVEN if name in ("farspan-rope", "llama-tied", "mixtral") else SETTINGS
    if not complete:  # its windows stay, so settings of windows are refused
        settings = replace(settings, window=0)
    model = build(name)
    job, own = job_for(model), {layer.index: layer for layer in probe(model)}
    before = snapshot(model)
    patch = swan(model, job, settings, replace(QUICK, lr=lr))
    assert_unchanged(model, before)
    layers = patch.layout.layers
    assert len(patch.layout.global_layers) == count
    mixed = {own[index].position for index in layers} == {"rope", "none"}
    windowed = {LayerLayout(False, WINDOW), WINDOWED} if mixed else {WINDOWED}
    assert set(layers.values()) == ({GLOBAL, *windowed} if complete else {GLOBAL})
    patched = patch.apply(build(name))
    assert torch.allclose(logits_of(patched), fitted_logits[0], atol=1e-4)
    for layer in probe(patched):
        unchanged = LayerLayout(own[layer.index].position == "rope", own[layer.index].window)
        expected = layers.get(layer.index, unchanged)
        assert LayerLayout(layer.position == "rope", layer.window) == expected
    untrained = kl_from_base(replace(patch, weights=None), name, job.search)
    assert untrained > 0.05
    assert kl_from_base(patch, name, job.search) < 0.99 * untrained


@pytest.mark.parametrize(
    ("name", "chosen", "layout"),
    [
        ("smollm3", (1,), ["rope/8", "none", "rope/8", "none/8"]),
        ("farspan-hybrid", (3,), ["rope/8", "rope/8", "rope/8", "none"]),
        ("farspan-none", (3,), ["rope/8", "rope/8", "rope/8", "none"]),
    ],
)
def test_windows_add_rotation_only_where_no_layer_rotates(name, chosen, layout, monkeypatch):
    monkeypatch.setattr(swan_layout, "even_layers", lambda *_: chosen)
    model = build(name)
    job = job_for(model)
    result = swan_layout.choose_layout(model, model, job, EVEN)
    assert [*result.to_json().values()] == layout


@pytest.mark.long
def test_a_hybrid_of_recurrent_and_nope_layers_is_converted():
    """Its attention layers have indices with gaps, and only they change."""
    model = BY_NAME["granitemoehybrid"].build()
    before, job = snapshot(model), job_for(model)
    patch = swan(model, job, replace(SETTINGS, rotation="fast"), replace(QUICK, steps=2, lr=1e-4))
    assert_unchanged(model, before)
    assert sorted(map(str, patch.layout.layers.values())) == ["none", f"rope/{WINDOW}"]
    assert set(patch.layout.layers) == {1, 3}
    patch.apply(model)
    ids, mask = tokens(20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False)
    expected = model.generate(ids, **options)
    small = model.generate(ids, past_key_values=caches.make_cache(model), **options)
    assert torch.equal(small, expected)


def test_swan_refuses_models_that_have_its_layout_already():
    for name in ("cohere2", "farspan-swan", "llama4"):
        model = BY_NAME[name].build()
        before = snapshot(model)
        with pytest.raises(FarspanError, match="has this layout already: .*; use uniform"):
            swan(model, job_for(model), SETTINGS, QUICK)
        assert_unchanged(model, before)


def test_swan_trains_bf16_weights_in_float32():
    model = build("llama", torch.bfloat16)
    before = snapshot(model)
    patch = swan(model, job_for(model), EVEN, QUICK)
    assert_unchanged(model, before)
    assert {weight.dtype for weight in patch.weights.values()} == {torch.bfloat16}
    assert patch.layout.global_layers == (3,)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(patch.weights)
    assert patch.apply(build("llama", torch.bfloat16))


@pytest.mark.long
def test_cross_entropy_trains_on_the_text():
    """It lowers the loss on the search text more than the base's predictions do."""
    losses = {}
    for loss in swan_config.LOSSES:
        model = build("llama")
        job = job_for(model)
        patch = swan(model, job, replace(EVEN, loss=loss, repeats=0), QUICK)
        losses[loss] = float(token_losses(patch.apply(model), job.search).mean())
    assert losses["cross-entropy"] < losses["kl"] - 0.05


def test_a_share_of_1_makes_all_layers_global():
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    patch = swan(model, job, replace(SETTINGS, global_share=1.0), QUICK)
    assert patch.layout.to_json() == dict.fromkeys("0123", "none")
    assert "layer_costs" not in job.details
    assert job.details["choice"] == "layers 0, 1, 2, 3 are global, 4 of 4 layers at equal distances"


@pytest.mark.parametrize(("share", "chosen"), [(0.01, (3,)), (0.5, (1, 3)), (0.75, (0, 2, 3))])
def test_the_share_sets_the_number_of_global_layers(share, chosen):
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    settings = replace(EVEN, global_share=share)
    patch = swan(model, job, settings, replace(QUICK, steps=1))
    assert patch.layout.global_layers == chosen
    assert f"global, {len(chosen)} of 4 layers at equal" in job.details["choice"]
    assert job.details["distillation"] == {
        "length": LENGTH,
        "batch": 4,
        "micro_batch": 2,
        "steps": 1,
        "tokens": 4 * LENGTH,
    }


@pytest.mark.parametrize(("period", "expected"), [(0, f"rope:{LENGTH // 2}"), (24, "rope:24")])
def test_global_layers_keep_their_fast_dimensions(period, expected, fitted_logits):
    model = build("llama")
    before = snapshot(model)
    settings = replace(EVEN, rotation="fast", max_period=period)
    patch = swan(model, job_for(model), settings, QUICK)
    assert_unchanged(model, before)
    assert patch.layout.to_json() == {**dict.fromkeys("012", f"rope/{WINDOW}"), "3": expected}
    patched = patch.apply(build("llama"))
    assert torch.allclose(logits_of(patched), fitted_logits[0], atol=1e-4)
    without = replace(patch, layout=Layout({**patch.layout.layers, 3: GLOBAL}))
    difference = logits_of(patched) - logits_of(without.apply(build("llama")))
    assert difference.abs().max() > 1e-3, "some dimensions rotate"


def test_layers_without_rotation_get_none():
    model = build("farspan-none")
    patch = swan(model, job_for(model), replace(EVEN, rotation="fast"), replace(QUICK, steps=1))
    assert str(patch.layout.layers[3]) == "none"
    with pytest.raises(FarspanError, match="no layer of .* rotates, so swan.max_period=24"):
        swan(model, job_for(model), replace(EVEN, rotation="fast", max_period=24), QUICK)
    with pytest.raises(FarspanError, match="swan.rotation=none, swan.max_period=24 would have no"):
        swan(build("llama"), job_for(model), replace(EVEN, max_period=24), QUICK)


# The size of a run.


@pytest.mark.parametrize("train_length", [2, 64, 500, 512, 1000, 1500, 2048, 2049, 8192, 131_072])
@pytest.mark.parametrize("batch", [0, 1, 20, 37])
def test_default_micro_batches_divide_the_batch(train_length, batch):
    plan = DistillPlan.make(SwanConfig(), TuningConfig(batch=batch), train_length)
    assert plan.length == min(8192, train_length)
    assert plan.batch % plan.micro_batch == 0
    assert plan.micro_batch * plan.length <= swan_config.MICRO_BATCH_TOKENS
    if batch:
        assert plan.batch == batch
    else:
        assert 0.5 < plan.batch * plan.length / swan_config.BATCH_TOKENS <= 1
        assert plan.micro_batch == swan_config.MICRO_BATCH_TOKENS // plan.length, "not less"
    assert plan.tokens == pytest.approx(SwanConfig().tokens, rel=0.01)


def test_settings_of_a_run_override_its_defaults():
    settings = SwanConfig(length=100, tokens=10_000)
    plan = DistillPlan.make(settings, TuningConfig(batch=10, micro_batch=5), 512)
    assert plan == DistillPlan(100, 10, 5, 10)
    assert DistillPlan.make(settings, TuningConfig(batch=10, steps=3), 512).steps == 3
    assert DistillPlan.make(replace(settings, tokens=1), TuningConfig(), 512).steps == 1


@pytest.mark.parametrize(
    ("train_length", "micro_batch", "rows"),
    [(8192, 1, 1), (8192, 3, 2), (8192, 16, 8), (2048, 16, 16), (2048, 64, 32), (512, 50, 32)],
)
def test_the_micro_batch_changes_neither_batch_nor_steps(train_length, micro_batch, rows):
    usual = DistillPlan.make(SwanConfig(), TuningConfig(), train_length)
    plan = DistillPlan.make(SwanConfig(), TuningConfig(micro_batch=micro_batch), train_length)
    assert plan == replace(usual, micro_batch=rows)


@pytest.mark.parametrize(("length", "batch"), [(20_000, 3), (30_000, 2), (40_000, 1), (70_000, 1)])
def test_a_batch_of_long_windows_has_no_more_tokens_than_the_default(length, batch):
    """Unless one window has more."""
    plan = DistillPlan.make(SwanConfig(length=length), TuningConfig(), 131_072)
    assert (plan.batch, plan.micro_batch) == (batch, 1)


@pytest.mark.parametrize(("lr", "applied"), [(0.0, 1e-3), (2e-4, 2e-4)])
def test_distillation_has_the_documented_learning_rate(lr, applied, monkeypatch):
    for name in ("probe", "distillation_flops"):
        monkeypatch.setattr(swan_module, name, lambda *arguments: None)
    monkeypatch.setattr(swan_module, "train_weights", lambda *arguments: arguments[-1])
    model, ids = SimpleNamespace(device=torch.device("cpu")), tokens(LENGTH)
    job = FitJob(TARGET, LENGTH, search=ids, choose=ids, layers=(0,), heads=4, model="")
    config, plan = replace(EVEN, loss="cross-entropy", repeats=0), DistillPlan(LENGTH, 2, 2, 6)
    training = swan_module._distill(model, model, job, config, TuningConfig(lr=lr), plan)
    assert training.optimization.lr == applied


def test_defaults_follow_the_train_length():
    config = SwanConfig()
    lengths = (4, 8, 512, 2048, 4096, 131_072)
    assert [config.window_for(length) for length in lengths] == [2, 2, 128, 512, 512, 512]
    assert [config.length_for(length) for length in lengths] == [4, 8, 512, 2048, 4096, 8192]


# Rows that reward looking far back.


def test_shares_of_the_windows_hold_repeats_and_facts():
    model = BY_NAME["llama"].build()
    job = job_for(model, tokenizer=WordTokenizer(), seed=5)
    config = replace(SETTINGS, repeats=0.3, facts=0.2)
    change_row = swan_module._recall_rows(job, config)
    row = torch.arange(1000, 1064)
    kinds = {"same": 0, "repeats": 0, "facts": 0}
    for number in range(400):
        changed, answers = change_row(row, number)
        assert len(changed) == len(row)
        assert torch.equal(changed, change_row(row, number)[0]), "a function of the number"
        with_facts = bool((changed < 1000).any())
        assert answers.any() == with_facts
        kind = "facts" if with_facts else "same" if torch.equal(changed, row) else "repeats"
        kinds[kind] += 1
    assert kinds["facts"] == pytest.approx(80, abs=25)
    assert kinds["repeats"] == pytest.approx(120, abs=30)
    assert swan_module._recall_rows(job, replace(config, repeats=0.0, facts=0.0)) is None


def test_a_share_of_the_facts_has_several_answers(monkeypatch):
    job = job_for(BY_NAME["llama"].build(), tokenizer=WordTokenizer(), seed=5)
    kinds = []

    def counted(count, rng):
        kinds.append(count)
        return recall.one_value_each(count, rng)

    monkeypatch.setattr(recall, "SEVERAL_ANSWERS", (counted,))
    for several, least, most in ((0.0, 0, 0), (0.5, 20, 60), (1.0, 61, 100)):
        kinds.clear()
        config = replace(SETTINGS, facts=1.0, repeats=0.0, several=several)
        change_row = swan_module._recall_rows(job, config)
        for number in range(100):
            change_row(torch.arange(1000, 2024), number)
        assert least <= len(kinds) <= most
        assert 1 not in kinds, "one fact has one answer"


def test_facts_need_a_tokenizer():
    model = BY_NAME["llama"].build()
    before = snapshot(model)
    with pytest.raises(FarspanError, match="swan.facts needs a tokenizer"):
        swan(model, job_for(model), replace(EVEN, facts=0.5), QUICK)
    assert_unchanged(model, before)


def test_a_share_of_the_micro_batches_is_cut_into_short_windows():
    """With every token in its place, but for the first ones of a window that do not fill one."""
    whole = [torch.arange(72).reshape(2, 36) + 100 * number for number in range(4)]

    def cut(share: float, seed: int = 0) -> list[list[torch.Tensor]]:
        batches = swan_module._with_short_windows(lambda step: whole, seed, share, 16, 0)
        return [batches(step) for step in range(100)]

    for ids, expected in zip(cut(1.0)[0], whole, strict=True):
        assert torch.equal(ids.reshape(2, 2, 16).flatten(1), expected[:, -32:]), "with its answers"
    assert all(ids is expected for ids, expected in zip(cut(0.0)[0], whole, strict=True))
    pairs = [torch.stack((ids, ids + 1)) for ids in whole]  # tokens, and the mask of answers
    (ids, marks), *_ = swan_module._with_short_windows(lambda step: pairs, 0, 1.0, 16, 0)(0)
    assert torch.equal(ids, cut(1.0)[0][0])
    assert torch.equal(marks, ids + 1)
    first, again, other = (
        [len(ids) > 2 for step in cut(0.25, seed) for ids in step] for seed in (0, 0, 1)
    )
    assert sum(first) == pytest.approx(100, abs=30)
    assert first == again, "a resumed run cuts the same ones"
    assert first != other


def test_short_windows_begin_as_the_whole_ones_do():
    """Each of them with the begin-of-text token, where no answer stands."""
    text = torch.arange(3, 3 + 2 * 31).reshape(2, 31)
    answers = torch.zeros_like(text)
    answers[:, -3:] = 3
    rows, counts = prepend(text, [1]), prepend(answers, [0])
    whole = torch.stack((rows, counts))
    cut = swan_module._with_short_windows(lambda step: [whole, rows], 0, 1.0, 8, 1)
    both, ids = cut(0)
    assert torch.equal(both[0], ids)
    assert both.shape == (2, 8, 8), "four windows of each"
    assert both[:, :, 0].tolist() == [[1] * 8, [0] * 8]
    assert torch.equal(ids[:, 1:].reshape(2, 28), text[:, 3:]), "the end, which has the answers"
    assert torch.equal(both[1, :, 1:].reshape(2, 28), answers[:, 3:])


def test_short_windows_of_a_model_with_begin_of_text_have_it(monkeypatch):
    seen = []
    model, forward = BY_NAME["llama"].build(), swan_module.DistillModule.forward
    monkeypatch.setattr(
        swan_module.DistillModule,
        "forward",
        lambda self, batch: seen.append((batch, self.begin)) or forward(self, batch),
    )
    job = job_for(model, search=prepend(tokens(TARGET - 1, batch=8), [1]), begin=(1,))
    swan(model, job, replace(EVEN, short=1.0), replace(QUICK, steps=1))
    assert [begin for _, begin in seen] == [1, 1]
    for batch, _ in seen:
        assert batch.shape == (2 * 4, WINDOW)
        assert (batch[:, 0] == 1).all()


@pytest.mark.long
def test_answers_of_facts_reach_the_loss(monkeypatch):
    model, batches = BY_NAME["llama"].build(), []
    monkeypatch.setattr(
        swan_module,
        "recall_rows",
        lambda *args, **options: lambda row, number: (row, torch.arange(len(row)) >= len(row) - 3),
    )
    forward = swan_module.DistillModule.forward
    monkeypatch.setattr(
        swan_module.DistillModule,
        "forward",
        lambda self, batch: batches.append(batch) or forward(self, batch),
    )
    job, config = job_for(model, tokenizer=WordTokenizer()), replace(EVEN, facts=0.5, answers=0.1)
    plan = DistillPlan.make(config, QUICK, job.train_length)
    init = swan_module.DistillModule.__init__
    weights = []
    monkeypatch.setattr(
        swan_module.DistillModule,
        "__init__",
        lambda self, *args: weights.append(args[2:]) or init(self, *args),
    )
    swan(model, replace(job, begin=(1,)), config, QUICK)
    assert weights == [(0.2, plan.length, 1)], "of the half of the windows that has facts"
    for ids, answers in batches:
        assert ids.shape == answers.shape
        assert (ids[:, 0] == 1).all()
        assert ((answers > 0).sum(1) == 3).all()
        assert (answers[:, -3:] == 3).all(), "the answers of the window"
    plain = len(batches)
    for others in ({"facts": 0.5, "answers": 0.0}, {"facts": 0.0}):
        swan(model, job, replace(EVEN, **others), QUICK)
    assert all(batch.ndim == 2 for batch in batches[plain:])
    assert SwanConfig(loss="cross-entropy").answer_weight == 0.0


def test_short_windows_are_as_long_as_the_window(monkeypatch):
    model, lengths = BY_NAME["llama"].build(), set()
    monkeypatch.setattr(
        swan_module.DistillModule,
        "forward",
        lambda self, ids: lengths.add(ids.shape[1]) or self.model(ids).logits.mean(),
    )
    swan(model, job_for(model), replace(EVEN, short=0.5), QUICK)
    assert lengths == {WINDOW, LENGTH}


# Refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_share": 0.0}, "swan.global_share is 0; choose a share above 0 and up to 1"),
        ({"global_share": 1.01}, "swan.global_share is 1.01; choose"),
        ({"global_share": math.nan}, "swan.global_share is nan; choose"),
        ({"layers": "odd"}, "swan.layers is 'odd'; choose measured or even"),
        ({"loss": "mse"}, "swan.loss is 'mse'; choose kl or cross-entropy"),
        ({"repeats": -0.1}, "swan.repeats is -0.1; choose a share from 0 to 1"),
        ({"facts": 1.5}, "swan.facts is 1.5; choose a share from 0 to 1"),
        ({"short": -0.1}, "swan.short is -0.1; choose a share from 0 to 1"),
        ({"several": 2.0}, "swan.several is 2; choose a share from 0 to 1"),
        ({"answers": -1.0}, "swan.answers is -1; choose 0 or more"),
        ({"repeats": 0.6, "facts": 0.5}, "swan.repeats and swan.facts are 1.1 together; choose"),
        ({"facts": 0.8}, "swan.repeats and swan.facts are 1.05 together"),
        ({"spacing": 0}, "swan.spacing is 0; choose 1 or more"),
        ({"measured_rows": 0}, "swan.measured_rows is 0; choose 1 or more"),
        ({"tokens": 0}, "swan.tokens is 0; choose 1 or more"),
        ({"tokens": -5}, "swan.tokens is -5; choose 1 or more"),
        ({"length": -1}, "swan.length is -1; choose 2 or more"),
        ({"length": 1}, "swan.length is 1; choose 2 or more"),
        ({"window": 1}, "swan.window is 1; choose 2 or more"),
        ({"window": -8}, "swan.window is -8; choose 2 or more"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings, message):
    with pytest.raises(FarspanError, match=message):
        SwanConfig(**settings)


@pytest.mark.parametrize("name", ["steps", "batch", "micro_batch", "lr", "warmup", "rank"])
def test_negative_tuning_settings_are_refused_by_name(name):
    with pytest.raises(FarspanError, match=f"tuning.{name} is -1; choose 0 or more"):
        TuningConfig(**{name: -1})


def test_windows_of_one_token_are_refused():
    with pytest.raises(FarspanError, match="tuning.length is 1, and one token predicts nothing"):
        TuningConfig(length=1)


def test_three_processes_share_the_default_batch(monkeypatch):
    monkeypatch.setattr(job_module, "processes", lambda: SimpleNamespace(num_processes=3))
    plan = DistillPlan.make(SwanConfig(), TuningConfig(), 2048)
    assert (plan.batch, plan.micro_batch) == (33, 11)


def test_shares_of_exactly_1_are_accepted():
    assert SwanConfig(repeats=0.5, facts=0.5, global_share=1)
    assert SwanConfig(repeats=0.9, facts=0.1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("farspan-learned", "layer 0 of .* has learned positions; use uniform, headscale"),
        ("farspan-sinusoidal", "layer 0 of .* has sinusoidal positions; use uniform"),
        ("farspan-alibi", "layer 0 of .* has alibi positions; use uniform"),
        ("farspan-t5", "layer 0 of .* has t5 positions; use uniform"),
        ("farspan-mixed", "layer 0 of .* has alibi positions; use uniform"),
        ("gpt2", "layer 0 of GPT2LMHeadModel has learned positions"),
        ("mistral", "every layer of .* sees a window by its config, so none can become global"),
    ],
)
def test_models_without_a_possible_layout_are_refused(name, message):
    model = BY_NAME[name].build()
    with pytest.raises(FarspanError, match=message):
        check_layers(probe(model), type(model).__name__, SwanConfig())
    with pytest.raises(FarspanError, match=message):
        swan(model, job_for(model), SETTINGS, QUICK)
    assert not seam.installed(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"window": LENGTH + 1},
            "swan.window is 33, more than the train length of 32: rotary layers would",
        ),
        (
            {"length": LENGTH + 1},
            "swan.length is 33, more than the train length of 32, where the base predicts badly",
        ),
        (
            {"window": LENGTH},
            "in windows of 32 tokens nothing can stand twice more than 32 tokens apart, .*even",
        ),
        ({"length": 8}, "in windows of 8 tokens nothing can stand twice more than 8 tokens apart"),
    ],
)
def test_lengths_that_cannot_work_are_refused(settings, message):
    model = BY_NAME["llama"].build()
    before = snapshot(model)
    with pytest.raises(FarspanError, match=message):
        swan(model, job_for(model), replace(SETTINGS, **settings), QUICK)
    assert_unchanged(model, before)


def test_a_window_of_the_train_length_works_with_even_layers():
    model = BY_NAME["llama"].build()
    patch = swan(model, job_for(model), replace(EVEN, window=LENGTH), replace(QUICK, steps=1))
    assert patch.layout.windows == dict.fromkeys((0, 1, 2), LENGTH)


def test_a_layout_that_changes_nothing_is_refused():
    model = BY_NAME["farspan-none"].build()
    with pytest.raises(FarspanError, match="no layer of .* has positions, .* choose a smaller"):
        swan(model, job_for(model), replace(SETTINGS, global_share=1.0), QUICK)


# Low rank.


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mixtral", torch.float32),
        ("llama-bias", torch.float32),
        ("llama", torch.bfloat16),
    ],
)
def test_a_low_rank_change_is_of_that_rank_and_in_the_layers_alone(name, dtype, fitted_logits):
    model = build(name, dtype)
    model.model.norm.weight.requires_grad_(False)
    before = snapshot(model)
    patch = swan(model, job_for(model), EVEN, replace(QUICK, rank=4, lr=1e-2))
    assert_unchanged(model, before)
    linears = {
        f"{path}.weight"
        for path, module in model.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, torch.nn.Linear)
    }
    assert set(patch.weights) == linears
    assert len(linears) >= 16
    for weight, value in patch.weights.items():
        assert value.dtype == dtype
        if dtype == torch.float32:  # bf16 rounds the sum
            sizes = torch.linalg.svdvals(value.double() - before["weights"][weight].double())
            assert sizes[3] > 1e-3 * sizes[0]
            assert sizes[4:].max() < 1e-4 * sizes[0], weight
    patched = patch.apply(build(name, dtype))
    assert torch.allclose(logits_of(patched), fitted_logits[0], atol=1e-3)


def test_a_low_rank_change_starts_as_lora_does():
    """A is uniform within 1/√columns, which is what peft and torch's linear layers start with."""
    weight = torch.randn(3, 400)
    change = tuning_module.LowRankChange(weight, 50, torch.Generator().manual_seed(0))
    assert 0.995 < change.a.abs().max() * 20 <= 1
    assert float(change.a.std()) * 20 == pytest.approx(3**-0.5, rel=0.02)
    assert (change.a.shape, change.b.shape) == ((50, 400), (3, 50))
    assert torch.equal(change(weight), weight)
    change.b.data[1, 2] = 1
    expected = weight.clone()
    expected[1] += change.a[2]
    assert torch.allclose(change(weight), expected)


@pytest.mark.long
def test_a_low_rank_change_lowers_the_kl():
    model = build("llama")
    job = job_for(model)
    patch = swan(model, job, EVEN, replace(QUICK, rank=4, lr=1e-2))
    untrained = kl_from_base(replace(patch, weights=None), "llama", job.search)
    assert kl_from_base(patch, "llama", job.search) < 0.9 * untrained


def test_a_low_rank_change_starts_the_same_in_every_process():
    factors = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)  # whatever ran before
        with low_rank_changes(BY_NAME["llama"].build(number), 2, seed) as trained:
            factors.append({name: factor.detach().clone() for name, factor in trained.items()})
    assert all(torch.equal(factor, factors[1][name]) for name, factor in factors[0].items())
    starts = [factor.flatten()[0].item() for factor in factors[0].values() if factor.any()]
    assert len(set(starts)) == len(starts) > 20, "no two matrices share a factor"
    assert not any(
        torch.equal(factor, factors[2][name]) for name, factor in factors[0].items() if factor.any()
    )


@pytest.mark.parametrize("name", ["llama", "farspan-rope"])
def test_compiled_layers_share_their_graphs_under_a_low_rank_change(name):
    """The first layer, whose input has no gradient, has one, and all others have another."""
    model, counter = BY_NAME[name].build(), CompileCounter()
    torch._dynamo.reset()
    with low_rank_changes(model, 2, 0):
        layers = decoder_layers(model)
        for layer in layers:
            layer.compile(backend=counter, dynamic=False)
        model(torch.arange(16)[None], use_cache=False).logits.sum().backward()
    assert counter.frame_count == 2 < len(layers)
    torch._dynamo.reset()


def test_the_modules_of_a_low_rank_change_are_restored_after_an_error():
    model = BY_NAME["llama-bias"].build()
    before, kinds = snapshot(model), [type(module) for module in model.modules()]
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ZeroDivisionError), low_rank_changes(model, 2, 0) as factors:
        next(iter(factors.values())).data += 1
        raise ZeroDivisionError
    assert_unchanged(model, before)
    assert [type(module) for module in model.modules()] == kinds
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    assert all(parameter.requires_grad for parameter in model.parameters())


# Killed and resumed.


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "shares"),
    [(0, {"repeats": 0.0}), (2, {"repeats": 0.4, "facts": 0.4})],
)
def test_a_killed_run_resumes_to_the_same_bits(rank, shares, tmp_path):
    config, tuning = replace(EVEN, **shares), replace(QUICK, save_every=2, rank=rank)
    model = build("llama")
    before = snapshot(model)
    options = dict(tokenizer=WordTokenizer(), train_length=TARGET, seed=3)
    uninterrupted = swan(model, job_for(model, **options), config, tuning)
    killed = job_for(model, folder=tmp_path, progress=stop_at(5), **options)
    with pytest.raises(KeyboardInterrupt):
        swan(model, killed, config, tuning)
    assert_unchanged(model, before)
    checkpoints = sorted(path.name for path in tmp_path.glob("distill/checkpoints/step-*"))
    assert checkpoints[-1] == "step-0000004"
    torch.manual_seed(99)  # another process
    steps = []
    options["progress"] = lambda *_: lambda count=1, note="": steps.append((count, note[:4]))
    resumed = swan(model, job_for(model, folder=tmp_path, **options), config, tuning)
    assert steps == [(4, "resu"), (1, "loss"), (1, "loss")]
    assert resumed.layout == uninterrupted.layout
    assert set(resumed.weights) == set(uninterrupted.weights)
    for name, weight in uninterrupted.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    lines = (tmp_path / "distill" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert_unchanged(model, before)


def test_a_diverging_run_leaves_the_model_as_it_was():
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(FarspanError, match="training diverged at step 2"):
        swan(model, job_for(model), EVEN, replace(QUICK, lr=10.0))
    assert_unchanged(model, before)
