"""SWAN: the KL between two models, the choice of global layers, and the distilled patch."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import farspan
from families import FAMILIES, SHAPE, VOCABULARY, Family, tokens
from farspan.attention import model_facts, seam
from farspan.attention.layout import LayerLayout, Layout
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import Layer, probe
from farspan.errors import FarspanError
from farspan.methods import layer_costs, registry
from farspan.methods import swan as swan_module
from farspan.methods import tuning as tuning_module
from farspan.methods.distill import DistillModule, cast_weights, make_teacher
from farspan.methods.job import FitJob
from farspan.methods.layer_costs import LayerCost, choose_layers, measure_layers
from farspan.methods.registry import METHODS, read_extend_config
from farspan.methods.swan import DistillPlan, SwanConfig, check_layers, even_layers, swan
from farspan.methods.tuning import TuningConfig, low_rank_changes
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import mean_kl, token_kl, token_losses
from farspan.report import style
from farspan.workflows.extend import estimate_extension, extend

LENGTH, WINDOW, TARGET = 32, 8, 64
ROPE = ("rope",) * 4
MORE_FAMILIES = [
    Family(
        "llama-tied",
        lambda: hf.LlamaConfig(**SHAPE, tie_word_embeddings=True),
        ROPE,
        None,
    ),
    Family(  # logits divided by a constant
        "granite", lambda: hf.GraniteConfig(**SHAPE, logits_scaling=3.0), ROPE, None
    ),
    Family("phi", lambda: hf.PhiConfig(**SHAPE), ROPE, None),  # a head with a bias
    Family(
        "mixtral",
        lambda: hf.MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
        ROPE,
        None,
    ),
]
BY_NAME = {family.name: family for family in (*FAMILIES, *MORE_FAMILIES)}
SETTINGS = SwanConfig(window=WINDOW, rotation="none", measured_rows=1, facts=0, sharpen=False)
EVEN = replace(SETTINGS, layers="even")
QUICK = TuningConfig(steps=6, batch=4, micro_batch=2, lr=1e-3, warmup=1)


class WordTokenizer:
    """Every word is a token."""

    def __call__(self, text: str, **_options) -> dict[str, list[int]]:
        return {"input_ids": [3 + zlib.crc32(word.encode()) % 100 for word in text.split()]}


def build(name: str, dtype: torch.dtype = torch.float32):
    """A tiny model whose output depends on far keys and on rotation, as a trained one's does."""
    model = BY_NAME[name].build()
    with torch.no_grad():
        model.model.norm.weight.add_(10)
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "q_norm"):
                layer.self_attn.q_norm.weight.add_(5)
            else:
                layer.self_attn.q_proj.weight.mul_(6)
    return model.to(dtype)


def job_for(model, **changes) -> FitJob:
    layers = probe(model)
    ids = tokens(TARGET, batch=8)
    job = FitJob(
        TARGET,
        LENGTH,
        search=ids,
        choose=ids[:2],
        layers=tuple(layer.index for layer in layers),
        heads=layers[0].heads,
        model=fingerprint(model),
    )
    return replace(job, **changes)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    by_weight = torch.autograd.grad(loss, weights, materialize_grads=True)
    return dict(zip(names, by_weight, strict=True))


# The KL between two models.

HEADS = {  # by what is special about the head
    "farspan-rope": "tied",
    "llama": "untied",
    "gemma2": "tied, soft cap",
    "cohere2": "tied, logit scale",
    "granite": "untied, logits divided",
    "phi": "untied, bias",
    "gpt2": "tied, decoder with another name",
    "mixtral": "untied, experts",
}


def student_and_teacher(name: str):
    """Two different models of a family, in float64 unless it has experts, which lack it."""
    dtype = torch.float32 if "experts" in HEADS[name] else torch.float64
    teacher = BY_NAME[name].build(seed=1, dtype=dtype)
    return BY_NAME[name].build(dtype=dtype), teacher.requires_grad_(False)


def plain_kl(student, teacher, ids: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) at each position, [B, T], from whole logits."""
    log_q, log_p = (
        model(ids, use_cache=False).logits.log_softmax(-1) for model in (student, teacher)
    )
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("name", HEADS)
def test_mean_kl_and_its_gradients_equal_the_plain_computation(name):
    """For all weights, with logits of a few rows at a time."""
    student, teacher = student_and_teacher(name)
    tolerance = 1e-4 if student.dtype == torch.float32 else 1e-6
    ids = tokens(25)
    expected = plain_kl(student, teacher, ids).mean()
    assert expected > 1e-5
    expected_gradients = gradients(student, expected)
    for rows in (4, 25):
        kl = mean_kl(student, teacher, ids, budget=rows * len(ids) * VOCABULARY)
        assert kl.item() == pytest.approx(expected.item(), rel=tolerance)
        # A factor after the KL reaches every weight.
        for weight, gradient in gradients(student, 3 * kl).items():
            reference = 3 * expected_gradients[weight]
            assert reference.any() == gradient.any(), weight
            error = (gradient - reference).norm() / reference.norm().clamp(min=1e-12)
            assert error < tolerance, (weight, rows)
    assert all(weight.grad is None for weight in teacher.parameters())


def test_mean_kl_adds_the_mean_cross_entropy_of_the_answers():
    """Of the tokens that the mask marks; the first token of a window is predicted by nothing."""
    student, teacher = student_and_teacher("llama")
    ids = tokens(25)
    answers = torch.zeros_like(ids)
    answers[0, 7:9] = answers[-1, [0, 24]] = 1
    marked = answers[:, 1:].bool()
    asked = F.cross_entropy(student(ids).logits[:, :-1][marked], ids[:, 1:][marked])
    expected = plain_kl(student, teacher, ids).mean() + 0.5 * asked
    expected_gradients = gradients(student, expected)
    for rows in (4, 25):
        budget = rows * len(ids) * VOCABULARY
        loss = mean_kl(student, teacher, ids, answers=answers, answer_weight=0.5, budget=budget)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for weight, gradient in gradients(student, loss).items():
            assert torch.allclose(gradient, expected_gradients[weight], atol=1e-7), (weight, rows)
    without = mean_kl(student, teacher, ids, answers=torch.zeros_like(ids), answer_weight=0.5)
    assert without.item() == pytest.approx(mean_kl(student, teacher, ids).item(), rel=1e-6)


def test_mean_kl_computes_logits_in_chunks():
    student, teacher = student_and_teacher("llama")
    rows: dict[str, list[int]] = {"student": [], "teacher": []}
    for key, model in (("student", student), ("teacher", teacher)):
        model.lm_head.register_forward_hook(
            lambda module, inputs, output, key=key: rows[key].append(output.shape[1])
        )
    mean_kl(student, teacher, tokens(25), budget=10 * VOCABULARY)
    assert rows == {"student": [5] * 5, "teacher": [5] * 5}


def test_mean_kl_gives_frozen_weights_no_gradient():
    student, teacher = student_and_teacher("llama")
    student.lm_head.requires_grad_(False)
    mean_kl(student, teacher, tokens(12)).backward()
    assert student.lm_head.weight.grad is None
    assert student.model.norm.weight.grad.any()


def test_mean_kl_allows_weights_that_make_no_logits():
    student, teacher = student_and_teacher("llama")
    student.value_head = torch.nn.Linear(32, 1)
    mean_kl(student, teacher, tokens(12)).backward()
    assert not student.value_head.weight.grad.any()
    assert student.lm_head.weight.grad.any()


@pytest.mark.parametrize("name", HEADS)
def test_token_kl_equals_the_plain_computation(name):
    student, teacher = student_and_teacher(name)
    ids = tokens(25)
    for rows in (4, 25):
        kl, losses = token_kl(student, teacher, ids, budget=2 * rows * len(ids) * VOCABULARY)
        assert torch.allclose(
            kl.double(), plain_kl(student, teacher, ids)[:, :-1].double(), atol=1e-5
        )
        assert torch.allclose(losses.double(), token_losses(student, ids).double(), atol=1e-5)
        assert not kl.requires_grad


# The teacher.


def test_the_teacher_is_a_frozen_copy_that_does_not_follow_the_model():
    model = BY_NAME["llama"].build().train()
    model.requires_grad_(True)
    ids = tokens(12)
    teacher = make_teacher(model)
    expected = teacher(ids).logits
    assert not any(weight.requires_grad for weight in teacher.parameters())
    assert not teacher.training
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert torch.equal(teacher(ids).logits, expected)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    module = DistillModule(model, teacher, answers=0.0)
    assert {id(weight) for weight in module.parameters()} == set(map(id, model.parameters()))


def test_a_teacher_in_bf16_keeps_its_rotation_in_float32():
    """In bf16 the angles at position 2,000 would be wrong by up to a turn."""
    model = BY_NAME["llama"].build()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cast_weights(model, torch.bfloat16)
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())


# Which layers look far.


def bag_of_words(layer: int, position: str = "rope") -> FarspanForCausalLM:
    """A model that expects the words that it has seen. Only one layer attends, evenly to all keys;
    the others add nothing."""
    shape = {**SHAPE, "num_key_value_heads": 4, "position": position}
    torch.manual_seed(0)
    model = FarspanForCausalLM(FarspanConfig(**shape)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(F.normalize(torch.randn(VOCABULARY, 32), dim=-1) * 8)
        for index, block in enumerate(model.model.layers):
            block.mlp.down_proj.weight.zero_()
            attention = block.self_attn
            attention.q_proj.weight.mul_(1e-3)
            attention.o_proj.weight.copy_(torch.eye(32) * (100.0 if index == layer else 0.0))
            attention.v_proj.weight.copy_(torch.eye(32))
    return model


def measured(model, job: FitJob, rows: int = 1) -> list[LayerCost]:
    layers = probe(model)
    rotary = [layer.index for layer in layers if layer.position == "rope"]
    indices = [layer.index for layer in layers]
    return measure_layers(model, make_teacher(model), job, indices, rotary, WINDOW, rows)


@pytest.mark.parametrize(("position", "layer"), [("rope", 2), ("none", 0)])
def test_the_layer_that_retrieves_is_chosen(position, layer):
    model = bag_of_words(layer, position)
    costs = measured(model, job_for(model), rows=4)
    assert choose_layers(costs, 1, spacing=2) == (layer,)
    assert costs[layer].window_retrieval > 0.1
    assert costs[layer].window_kl > 0.1
    for cost in costs:
        if cost.layer != layer:
            assert cost.window_retrieval == pytest.approx(0, abs=1e-5)
            assert cost.window_kl == pytest.approx(0, abs=1e-5)


def test_swan_makes_the_layer_that_retrieves_global():
    model = bag_of_words(1)
    job = job_for(model)
    settings = replace(SETTINGS, measured_rows=4)
    layout = swan(model, job, settings, replace(QUICK, steps=1)).layout
    assert layout.to_json() == {"0": "rope/8", "1": "none", "2": "rope/8", "3": "rope/8"}
    assert job.details["layout"] == layout.to_json()
    dearest = max(job.details["layer_costs"], key=lambda cost: cost["window_retrieval"])
    assert dearest["layer"] == 1
    choice = job.details["choice"]
    assert choice.startswith("layer 1 is global: of layers 2 or more apart, a window of 8 keys")
    assert f"up to {dearest['window_retrieval']:.3f} nats" in choice


def test_costs_are_those_of_models_built_with_the_changed_layer():
    family = BY_NAME["farspan-hybrid"]  # rope, rope, rope, none
    model = family.build()
    job = job_for(model)
    costs = measured(model, job, rows=3)
    ids, known = layer_costs.rows_with_repeats(job.search[:3], job.seed, WINDOW)
    base = token_losses(model, ids)
    for cost in costs:
        positions = list(family.positions)
        positions[cost.layer] += f"/{WINDOW}"
        kl, loss = native_costs(model, positions, ids)
        assert cost.window_kl == pytest.approx(kl.mean().item(), abs=1e-5)
        gained = (loss - base)[known[:, 1:]].mean().item()
        assert cost.window_retrieval == pytest.approx(gained, abs=1e-5)
        positions[cost.layer] = "none"
        kl, loss = native_costs(model, positions, ids)
        assert cost.rotation_kl == pytest.approx(kl.mean().item(), abs=1e-5)
        gained = (loss - base)[known[:, 1:]].mean().item()
        assert cost.rotation_retrieval == pytest.approx(gained, abs=1e-5)
    assert min(cost.window_kl for cost in costs) > 1e-4
    assert costs[3].rotation_kl == 0


@torch.no_grad()
def native_costs(model, positions: list[str], ids: torch.Tensor):
    """KL and loss of a model of ours with the same weights and these positions."""
    native = FarspanForCausalLM(FarspanConfig(**{**SHAPE, "position": positions})).eval()
    native.load_state_dict(model.state_dict())
    return plain_kl(native, model, ids)[:, :-1], token_losses(native, ids)


def costs_of(*retrieval: float, kl: tuple[float, ...] | None = None) -> list[LayerCost]:
    divergences = kl or (0.0,) * len(retrieval)
    return [
        LayerCost(layer, divergence, cost, 0.0, 0.0)
        for layer, (cost, divergence) in enumerate(zip(retrieval, divergences, strict=True))
    ]


@pytest.mark.parametrize(
    ("retrieval", "count", "spacing", "chosen"),
    [
        ((1, 5, 4, 3, 2, 0), 2, 1, (1, 2)),
        ((1, 5, 4, 3, 2, 0), 2, 2, (1, 3)),
        ((1, 5, 4, 3, 2, 0), 2, 3, (1, 4)),
        ((1, 5, 4, 3, 2, 0), 3, 3, (1, 2, 4)),  # a third that is 3 apart does not exist
        ((1, 5, 4, 3, 2, 0), 5, 2, (1, 2, 3, 4, 5)),  # 1, 3 and 5 first
        ((1, 5, 4, 3, 2, 0), 6, 9, (0, 1, 2, 3, 4, 5)),
        ((-1.0, -3.0, -0.5), 1, 2, (2,)),
    ],
)
def test_chosen_layers_are_the_dearest_at_least_spacing_apart(retrieval, count, spacing, chosen):
    assert choose_layers(costs_of(*retrieval), count, spacing) == chosen


def test_costs_are_recorded_with_five_decimals():
    (row,) = layer_costs.as_table([LayerCost(3, 1 / 3, 2 / 3, 0.0, 1e-7)])
    assert [*row.values()] == [3, 0.33333, 0.66667, 0.0, 0.0]


def test_kl_decides_between_layers_of_equal_retrieval():
    costs = costs_of(1, 1, 1, 0, kl=(0.1, 0.1, 0.3, 0.9))
    assert choose_layers(costs, 1, 2) == (2,)


def test_chosen_layers_use_the_indices_of_a_model_with_other_layers_between():
    costs = [replace(cost, layer=4 * cost.layer + 1) for cost in costs_of(1, 3, 2)]
    assert choose_layers(costs, 2, 4) == (5, 9)


@pytest.mark.parametrize("name", ["llama", "farspan-none"])
def test_measuring_leaves_the_model_as_it_was(name):
    model = BY_NAME[name].build()
    job = job_for(model)
    before = snapshot(model)
    measured(model, job)
    assert_unchanged(model, before)


def test_a_refused_layout_leaves_the_model_as_it_was(monkeypatch):
    model = BY_NAME["llama"].build()
    job = job_for(model)
    before = snapshot(model)

    def refuse(model, layer, entry):
        raise FarspanError("no layout for this model")

    monkeypatch.setattr("farspan.attention.patch._check_observed", refuse)
    for settings in (SETTINGS, EVEN):
        with pytest.raises(FarspanError, match="no layout for this model"):
            swan(model, job, settings, QUICK)
        assert_unchanged(model, before)


def test_even_layers_are_at_equal_distances_and_include_the_last():
    assert even_layers(range(8), 2) == (3, 7)
    assert even_layers(range(8), 1) == (7,)
    assert even_layers(range(8), 8) == tuple(range(8))
    assert even_layers((1, 3, 5, 7), 2) == (3, 7)
    for layers in range(1, 40):
        for count in range(1, layers + 1):
            chosen = even_layers(range(layers), count)
            assert len(set(chosen)) == count
            assert chosen[-1] == layers - 1
            gaps = [after - before for before, after in pairwise(chosen)]
            assert not gaps or max(gaps) - min(gaps) <= 1


# The method.


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(tokens(LENGTH), use_cache=False).logits


def snapshot(model) -> dict:
    """Everything that a method must restore."""
    return {
        "logits": logits_of(model),
        "weights": {name: weight.detach().clone() for name, weight in model.named_parameters()},
        "trainable": [weight.requires_grad for weight in model.parameters()],
        "training": model.training,
        "config": model.config.to_dict(),
        "modules": [type(module) for module in model.modules()],
    }


def assert_unchanged(model, before: dict) -> None:
    after = snapshot(model)
    for name, weight in before["weights"].items():
        assert weight.dtype == after["weights"][name].dtype
        assert torch.equal(weight, after["weights"][name]), name
    assert torch.equal(before["logits"], after["logits"])
    assert all(before[key] == after[key] for key in ("trainable", "training", "config", "modules"))
    assert not seam.installed(model)
    assert not seam.attached_states(model)
    assert all(weight.grad is None for weight in model.parameters())
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


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
    assert set(layers.values()) == ({WINDOWED, GLOBAL} if complete else {GLOBAL})
    patched = patch.apply(build(name))
    assert torch.allclose(logits_of(patched), fitted_logits[0], atol=1e-4)
    for layer in probe(patched):
        unchanged = LayerLayout(own[layer.index].position == "rope", own[layer.index].window)
        expected = layers.get(layer.index, unchanged)
        assert LayerLayout(layer.position == "rope", layer.window) == expected
    untrained = kl_from_base(replace(patch, weights=None), name, job.search)
    assert untrained > 0.05
    assert kl_from_base(patch, name, job.search) < 0.99 * untrained


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
    for loss in swan_module.LOSSES:
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
    assert plan.micro_batch * plan.length <= swan_module.MICRO_BATCH_TOKENS
    if batch:
        assert plan.batch == batch
    else:
        assert 0.5 < plan.batch * plan.length / swan_module.BATCH_TOKENS <= 1
        assert plan.micro_batch == swan_module.MICRO_BATCH_TOKENS // plan.length, "not less"
    assert plan.tokens == pytest.approx(SwanConfig().tokens, rel=0.01)


def test_settings_of_a_run_override_its_defaults():
    settings = SwanConfig(length=100, tokens=10_000)
    plan = DistillPlan.make(settings, TuningConfig(batch=10, micro_batch=5), 512)
    assert plan == DistillPlan(100, 10, 5, 10)
    assert DistillPlan.make(settings, TuningConfig(batch=10, steps=3), 512).steps == 3
    assert DistillPlan.make(replace(settings, tokens=1), TuningConfig(), 512).steps == 1


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


def test_facts_need_a_tokenizer():
    model = BY_NAME["llama"].build()
    before = snapshot(model)
    with pytest.raises(FarspanError, match="swan.facts needs a tokenizer"):
        swan(model, job_for(model), replace(EVEN, facts=0.5), QUICK)
    assert_unchanged(model, before)


def test_a_share_of_the_micro_batches_is_cut_into_short_windows():
    """With every token in its place, but for the rest of a window that is too short."""
    whole = [torch.arange(72).reshape(2, 36) + 100 * number for number in range(4)]

    def cut(share: float, seed: int = 0) -> list[list[torch.Tensor]]:
        batches = swan_module._with_short_windows(lambda step: whole, seed, share, 16)
        return [batches(step) for step in range(100)]

    for ids, expected in zip(cut(1.0)[0], whole, strict=True):
        assert torch.equal(ids.reshape(2, 2, 16).flatten(1), expected[:, :32])
    assert all(ids is expected for ids, expected in zip(cut(0.0)[0], whole, strict=True))
    pairs = [torch.stack((ids, ids + 1)) for ids in whole]  # tokens, and the mask of answers
    (ids, marks), *_ = swan_module._with_short_windows(lambda step: pairs, 0, 1.0, 16)(0)
    assert torch.equal(ids, cut(1.0)[0][0])
    assert torch.equal(marks, ids + 1)
    first, again, other = (
        [len(ids) > 2 for step in cut(0.25, seed) for ids in step] for seed in (0, 0, 1)
    )
    assert sum(first) == pytest.approx(100, abs=30)
    assert first == again, "a resumed run cuts the same ones"
    assert first != other


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
    job = job_for(model, tokenizer=WordTokenizer())
    swan(model, replace(job, begin=(1,)), replace(EVEN, facts=0.5, answers=0.1), QUICK)
    for ids, answers in batches:
        assert ids.shape == answers.shape
        assert (ids[:, 0] == 1).all()
        assert (answers.sum(1) == 3).all()
        assert answers[:, -3:].all()
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


# Killed and resumed.


def stop_at(step: int):
    """A progress that kills the run in a step of the distillation, before the step is saved."""

    def progress(label, steps):
        def advance(count=1, note=""):
            advance.count += count
            if label == "distill" and advance.count == step:
                raise KeyboardInterrupt

        advance.count = 0
        return advance

    return progress


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
    resumed = swan(model, job_for(model, folder=tmp_path, **options), config, tuning)
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


# The command.


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
    planned = swan_module.planned_layers(layers, config, LENGTH)
    assert [layer.window for layer in planned] == windows
    assert [replace(layer, window=None) for layer in planned] == layers
    assert swan_module.planned_layers(planned, config, LENGTH) == planned, "its windows stay"


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
    config = registry.ExtendConfig(swan=EVEN, tuning=QUICK)
    patch, _ = registry.fit_methods(model, probe(model), job_for(model), config, ["swan", "logn"])
    assert patch.method == "swan+logn"
    assert patch.scales.layers == (3,)


def on_gpu(model):
    """Pretend that the model is on a GPU, where auto may train weights."""
    return SimpleNamespace(config=model.config, device=torch.device("cuda"))


def test_auto_tries_swan_far_beyond_the_train_length_on_a_gpu():
    model = build("llama")
    layers, job = probe(model), job_for(model)
    far = replace(job, target=5 * LENGTH)
    candidates = registry.candidate_methods
    assert candidates(["auto"], layers, on_gpu(model), far) == ["ntk", "yarn", "swan"]
    assert "swan" not in candidates(["auto"], layers, on_gpu(model), job)
    assert "swan" not in candidates(["auto"], layers, model, far)
    assert candidates(["swan"], layers, model, job) == ["swan"]
    gemma = build("gemma3")
    assert "swan" not in candidates(["auto"], probe(gemma), on_gpu(gemma), far)


@pytest.mark.parametrize(("lost", "chosen"), [(registry.MAX_LOST, "swan"), (0.2, "ntk")])
def test_auto_rejects_swan_if_it_loses_retrieval(monkeypatch, lost, chosen):
    model = build("llama")
    layers, job = probe(model), job_for(model)
    monkeypatch.setattr(registry, "candidate_methods", lambda *_: ["ntk", "swan"])
    monkeypatch.setattr(registry, "_lost_retrieval", lambda *_: lost)
    monkeypatch.setattr(
        registry, "_patched_loss", lambda model, patch, windows: float(patch.method != "swan")
    )
    config = registry.ExtendConfig(swan=EVEN, tuning=QUICK)
    patch, notes = registry.fit_methods(model, layers, job, config, ["auto"])
    assert patch.method == chosen
    assert any("auto rejected swan" in note for note in notes) == (chosen != "swan")
    assert bool(job.details) == (chosen == "swan"), "the record is about the chosen method"


def test_lost_retrieval_is_measured_with_the_whole_patch():
    model = build("llama")
    before, job = snapshot(model), job_for(model)
    patch = swan(model, job, EVEN, QUICK)
    expected = layer_costs.retrieval_loss(patch.apply(build("llama")), job)
    lost = registry._lost_retrieval(model, patch, job)
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


def test_continued_training_changes_weights_only():
    model = build("llama")
    before, job = snapshot(model), job_for(model)
    patch = METHODS["continue"](model, job, registry.ExtendConfig(tuning=QUICK))
    assert_unchanged(model, before)
    assert patch.layout is patch.rope is patch.scales is None
    loss = token_losses(model, job.search).mean()
    assert token_losses(patch.apply(build("llama")), job.search).mean() < loss


def test_a_resumed_run_keeps_the_layout_that_was_chosen(tmp_path, monkeypatch):
    model = build("farspan-rope")
    job = job_for(model, folder=tmp_path)
    first = swan_module._stored_layout(model, make_teacher(model), job, SETTINGS)
    monkeypatch.setattr(swan_module, "choose_layers", lambda *_: (0,))
    again = job_for(model, folder=tmp_path)
    assert swan_module._stored_layout(model, make_teacher(model), again, SETTINGS) == first
    assert again.details["choice"] == job.details["choice"]
    other = swan_module._stored_layout(model, make_teacher(model), job_for(model), SETTINGS)
    assert other.global_layers == (0,)
