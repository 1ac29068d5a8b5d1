"""Paper B's theorems as models: positions are found, distances are scored, and order is what the mask tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.bundled import BUNDLED_MODELS
from farspan.cli.lab import show_theorems
from farspan.errors import FarspanError
from farspan.lab.theorems import (
    _ridge,
    arbitrary_function,
    breakpoints,
    construct,
    linear,
    look_back,
    moved_by_order,
    prove,
    read_positions,
)
from farspan.loading import load
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.report.lab_figures import draw_theorem
from farspan.workflows.attention_analysis import theorems

N = 4096


@pytest.mark.parametrize(
    "rule",
    [
        linear(N, 0.5),
        look_back(N, 1, 20.0),
        look_back(N, 1000, 2.0),
        arbitrary_function(np.random.default_rng(0).normal(size=300)),
    ],
    ids=lambda rule: rule.name,
)
def test_positions_are_found_and_distances_scored_at_every_length(rule):
    for length in (rule.length, rule.length // 3, 1):
        proof = prove(rule, length)
        assert len(proof.positions) == len(proof.scores) == length
        assert proof.position_error < 1e-6
        assert proof.score_error < 1e-5
        assert np.allclose(proof.positions, np.arange(1, length + 1), rtol=0, atol=1e-6)
        assert np.allclose(proof.scores, rule.wanted(np.arange(length)), rtol=0, atol=1e-5)


def test_a_construction_is_an_ordinary_model_without_positions():
    model = construct(look_back(64, 3, 20.0))
    assert type(model) is FarspanForCausalLM
    assert model.config.position == ["none", "none"]
    assert all(norm.eps > 0 for norm in model.modules() if isinstance(norm, torch.nn.RMSNorm))


def test_a_head_that_looks_back_copies_the_word_that_stands_there():
    steps, model = 37, construct(look_back(N, 37, 20.0), words=50)
    ids = torch.randint(1, 51, (1, N))
    ids[0, 0] = 0
    with torch.no_grad():
        shares = model(input_ids=ids, use_cache=False).logits[0, :, 1:]
    wanted = torch.nn.functional.one_hot(ids[0, 1:-steps] - 1, 50).double()
    assert (shares[steps + 1 :] - wanted).abs().max() < 1e-6


def test_words_and_distance_add_up():
    rule = linear(200, 0.1)
    for match in (0.0, 3.0):
        assert prove(rule, match=match).score_error < 1e-8


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(-50, 50), min_size=2, max_size=40))
def test_any_function_of_distance_can_be_scored(values):
    assert prove(arbitrary_function(np.array(values)), words=2).score_error < 1e-8


def test_knees_have_the_closed_forms_of_t_and_its_square():
    t, k = np.arange(1.0, 201), np.arange(1.0, 200)
    assert np.allclose(breakpoints(t[None])[0], 2 * k)
    assert np.allclose(breakpoints(t[None] ** 2)[0], 6 * k**2)


def tiny(position: str) -> FarspanForCausalLM:
    config = FarspanConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        position=position,
    )
    return FarspanForCausalLM(config).double().eval()


@pytest.mark.parametrize("position", ["none", "rope", "alibi", "t5", "sinusoidal", "learned"])
def test_order_is_told_by_the_mask_or_by_an_encoding_and_by_nothing_else(position):
    model = tiny(position)
    if position == "t5":  # its biases begin at nearly the same value
        torch.nn.init.normal_(model.model.positions["t5"].bias.table.weight)
    ids, order = torch.randint(50, (2, 24)), torch.randperm(24)
    assert moved_by_order(model, ids, order, causal=True) > 1e-3
    without_mask = moved_by_order(model, ids, order, causal=False)
    assert (without_mask < 1e-12) == (position == "none")


def test_positions_that_were_written_are_read():
    model = construct(linear(128, 1.0))
    ids = torch.randint(1, 9, (6, 128))
    ids[:, 0] = 0
    embeddings, first, _ = read_positions(model, ids)
    assert embeddings.r2 < 0.2
    assert first.r2 > 0.999
    assert first.error < 1


def test_a_trained_model_without_positions_has_found_them():
    """The twins differ in nothing but their encoding. The one without carries the position in its middle layers; the
    rotary one, whose attention is told distances, hardly does."""
    from pydoc_data.topics import topics

    best = {}
    for name in ("nope-twin", "rope-twin"):
        model, tokenizer = load(name)
        ids = torch.tensor(tokenizer("\n".join(topics.values()))["input_ids"][: 32 * 128]).view(
            32, 128
        )
        readings = read_positions(model, ids)
        assert [reading.layer for reading in readings] == list(
            range(model.config.num_hidden_layers + 1)
        )
        assert readings[0].r2 < 0.1
        best[name] = max(reading.r2 for reading in readings)
    assert best["nope-twin"] > 0.8
    assert best["rope-twin"] < 0.4


@pytest.mark.parametrize("still", [0.0, 100.0, 3000.0])
def test_a_coordinate_that_never_moves_has_no_weight(still):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 3, generator=generator, dtype=torch.float64)
    x[:, 1] = still
    rows = torch.cat([x, torch.ones(1000, 1).double(), (2 * x[:, :1] - x[:, 2:] + 5)], dim=1)
    weights = _ridge(rows.T @ rows, 1e-6)
    assert weights[:3] == pytest.approx(torch.tensor([2.0, 0.0, -1.0]).double(), abs=1e-4)
    assert x @ weights[:3] + weights[3] == pytest.approx(rows[:, -1], abs=1e-4)


def test_reading_needs_two_texts():
    with pytest.raises(FarspanError, match="takes two texts"):
        read_positions(tiny("none"), torch.zeros(1, 8, dtype=torch.long))


def test_the_theorem_is_drawn():
    proofs = [prove(linear(64, 0.5)), prove(look_back(64, 3, 1.0))]
    figure = draw_theorem(proofs)
    assert len(figure.axes) == 3
    found = figure.axes[2].lines[1].get_xydata()
    assert np.allclose(found[:, 1], -((found[:, 0] - 3) ** 2))


def test_models_in_folders_of_one_name_are_all_read(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model").symlink_to(BUNDLED_MODELS / "nope-twin")
    found = theorems(
        [str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model")], length=16, windows=2
    )
    assert list(found.readings) == ["a/model", "b/model"]
    show_theorems(found, 16)
    said = capsys.readouterr().out
    assert "a/model: R²" in said
    assert "b/model: R²" in said
