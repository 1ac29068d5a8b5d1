"""Which layers look far: the costs of a window and of no rotation, and the chosen layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from families import SHAPE, VOCABULARY, tokens
from farspan.attention.probe import probe
from farspan.errors import FarspanError
from farspan.methods import layer_costs
from farspan.methods.distill import make_teacher
from farspan.methods.job import FitJob
from farspan.methods.layer_costs import LayerCost, choose_layers, measure_layers
from farspan.methods.swan import swan
from farspan.methods.swan_layout import even_layers
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import token_losses
from swan_models import (
    BY_NAME,
    EVEN,
    LENGTH,
    QUICK,
    SETTINGS,
    TARGET,
    WINDOW,
    assert_unchanged,
    job_for,
    plain_kl,
    snapshot,
)


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


def test_a_model_without_positions_is_measured_without_them():
    """Although its windows gain rotation: the cost of the window is to be known, not of that."""
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    ids, _ = layer_costs.rows_with_repeats(job.search[:1], job.seed, WINDOW)
    for cost in measured(model, job):
        positions = ["none"] * 4
        positions[cost.layer] += f"/{WINDOW}"
        kl, _ = native_costs(model, positions, ids)
        assert cost.window_kl == pytest.approx(kl.mean().item(), abs=1e-6)
        assert cost.window_kl > 1e-5
        assert cost.rotation_kl == 0


@torch.no_grad()
def native_costs(model, positions: list[str], ids: torch.Tensor):
    """KL and loss of a model of ours with the same weights and these positions."""
    native = FarspanForCausalLM(FarspanConfig(**{**SHAPE, "position": positions})).eval()
    native.load_state_dict(model.state_dict())
    return plain_kl(native, model, ids)[:, :-1], token_losses(native, ids)


def test_the_retrieval_loss_is_measured_one_row_at_a_time(monkeypatch):
    """All rows of a long train length do not fit in memory, and one does if it was trained on."""
    model, rows = BY_NAME["llama"].build(), []
    job = job_for(model, choose=tokens(TARGET, batch=3))
    ids, known = layer_costs.rows_with_repeats(job.choose[:, :LENGTH], job.seed, LENGTH // 4)
    expected = token_losses(model, ids)[known[:, 1:]].mean().item()

    def watched(model, ids):
        rows.append(len(ids))
        return token_losses(model, ids)

    monkeypatch.setattr(layer_costs, "token_losses", watched)
    assert layer_costs.retrieval_loss(model, job) == pytest.approx(expected, abs=1e-5)
    assert rows == [1, 1, 1]


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

    monkeypatch.setattr("farspan.attention.layout_change._check_observed", refuse)
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
