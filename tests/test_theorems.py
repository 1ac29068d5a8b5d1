"""Kazemnejad 2023's theorems: constructed models, order and the causal mask, positions read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.bundled import BUNDLED_MODELS
from farspan.cli.lab_theorems import show_theorems
from farspan.errors import FarspanError
from farspan.lab import theorems as theorems_module
from farspan.lab.theorems import (
    AttentionRule,
    PositionAnalysis,
    _ridge,
    breakpoints,
    construct,
    linear,
    look_back,
    prove,
    read_positions,
)
from farspan.loading import load
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.config import FULL
from farspan.report.lab_figures import theorem_figure
from farspan.workflows.attention_analysis import theorems

N = 4096


def arbitrary_function(values: np.ndarray) -> AttentionRule:
    """The rule with scores values[t − i]: a Fourier series, as wide as the function is long."""
    length = len(values)
    waves = np.fft.rfft(values) / length
    weight = np.full(len(waves), 2.0)
    weight[0] = 1
    if length % 2 == 0:
        weight[-1] = 1
    a, b = weight * waves.real, -weight * waves.imag  # values[d] = Σ a cos(ωd) + b sin(ωd)
    positions = np.arange(1, length + 1)
    angle = 2 * np.pi / length * np.outer(np.arange(len(waves)), positions)
    zeros, identity = np.zeros((len(waves), 2)), np.eye(len(waves))
    query = np.block([[zeros, np.diag(a), np.diag(b)], [zeros, -np.diag(b), np.diag(a)]])
    key = np.block([[zeros, identity, 0 * identity], [zeros, 0 * identity, identity]])
    features = np.concatenate([positions[None] / length, np.cos(angle), np.sin(angle)])
    return AttentionRule("any function", lambda distance: values[distance], features, query, key)


@pytest.mark.long
@pytest.mark.parametrize(
    "rule",
    [
        linear(N, 0.5),
        look_back(N, 1, 20.0),
        look_back(N // 2, 1000, 2.0),
        arbitrary_function(np.random.default_rng(0).normal(size=300)),
    ],
    ids=lambda rule: rule.name,
)
def test_constructed_models_compute_positions_and_score_distances(rule):
    for length in (rule.length, rule.length // 3, 1):
        proof = prove(rule, length)
        assert len(proof.positions) == len(proof.scores) == length
        assert proof.position_error < 1e-6
        expected = rule.expected(np.arange(length))
        # float64 has 16 digits of the largest score, 3.4e8, and sums over 4,096 keys lose two.
        rounding = max(1e-5, 2e-13 * np.abs(expected).max())
        assert proof.score_error < rounding
        assert np.allclose(proof.positions, np.arange(1, length + 1), rtol=0, atol=1e-6)
        assert np.allclose(proof.scores, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("rule", [linear(48, 0.5), look_back(48, 5, 2.0)], ids=["linear", "back"])
def test_positions_are_computed_up_to_the_length_of_the_rule(rule):
    proof = prove(rule)
    assert proof.positions == pytest.approx(np.arange(1, 49), abs=1e-6)
    assert max(proof.position_error, proof.score_error) < 1e-6


def test_constructed_model_is_an_ordinary_model_without_positions():
    model = construct(look_back(64, 3, 20.0))
    assert type(model) is FarspanForCausalLM
    assert model.config.position == ["none", "none"]
    assert all(norm.eps > 0 for norm in model.modules() if isinstance(norm, torch.nn.RMSNorm))


def test_look_back_rule_copies_the_word_at_that_distance():
    steps, model = 37, construct(look_back(2048, 37, 20.0), num_words=50)
    ids = torch.randint(1, 51, (1, 2048))
    ids[0, 0] = 0
    with torch.no_grad():
        attention = model(input_ids=ids, use_cache=False).logits[0, :, 1:]
    expected = torch.nn.functional.one_hot(ids[0, 1:-steps] - 1, 50).double()
    assert (attention[steps + 1 :] - expected).abs().max() < 1e-6


def test_word_and_distance_terms_add_up():
    rule = linear(200, 0.1)
    for match in (0.0, 3.0):
        assert prove(rule, match=match).score_error < 1e-8


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(-50, 50), min_size=2, max_size=40))
def test_any_function_of_distance_can_be_constructed(values):
    assert prove(arbitrary_function(np.array(values)), num_words=2).score_error < 1e-8


def test_breakpoints_of_t_and_its_square_have_closed_forms():
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


@torch.no_grad()
def change_by_order(
    model: FarspanForCausalLM, ids: torch.Tensor, order: torch.Tensor, causal: bool
) -> float:
    """How much the hidden states change when tokens are permuted and the states permuted back.

    It is relative to the largest hidden state.
    """
    visible = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    mask = None if causal else {FULL: visible}
    before, after = (
        model.model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        for tokens in (ids, ids[:, order])
    )
    return float((after - before[:, order]).abs().max() / before.abs().max())


@pytest.mark.parametrize("position", ["none", "rope", "alibi", "t5", "sinusoidal", "learned"])
def test_order_matters_only_through_the_causal_mask_or_an_encoding(position):
    model = tiny(position)
    if position == "t5":  # its initial biases are nearly equal
        torch.nn.init.normal_(model.model.positions["t5"].bias.table.weight)
    ids, order = torch.randint(50, (2, 24)), torch.randperm(24)
    assert change_by_order(model, ids, order, causal=True) > 1e-3
    without_mask = change_by_order(model, ids, order, causal=False)
    assert (without_mask < 1e-12) == (position == "none")


def test_read_positions_finds_constructed_positions():
    model = construct(linear(128, 1.0))
    ids = torch.randint(1, 9, (6, 128))
    ids[:, 0] = 0
    embeddings, first, _ = read_positions(model, ids)
    assert embeddings.r2 < 0.2
    assert 25 < embeddings.error < 35, "the middle is 32 tokens from a position on average"
    assert first.r2 > 0.999
    assert 0 <= first.error < 1


@pytest.mark.long
def test_bundled_model_without_positions_encodes_them_in_its_layers():
    """The bundled models differ in their encoding only. The one without encodes positions in its
    middle layers; the rotary one, whose attention depends on distances, hardly does."""
    from pydoc_data.topics import topics

    text = "\n".join(topics.values())[:40_000]
    best = {}
    for name in ("nope-twin", "rope-twin"):
        model, tokenizer = load(name)
        ids = torch.tensor(tokenizer(text)["input_ids"][: 16 * 128]).view(16, 128)
        readouts = read_positions(model, ids)
        layers = list(range(model.config.num_hidden_layers + 1))
        assert [readout.layer for readout in readouts] == layers
        assert readouts[0].r2 < 0.1
        best[name] = max(readout.r2 for readout in readouts)
    assert best["nope-twin"] > 0.8
    assert best["rope-twin"] < 0.4


@pytest.mark.parametrize("constant", [0.0, 100.0, 3000.0])
def test_constant_coordinates_get_no_weight(constant):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 3, generator=generator, dtype=torch.float64)
    x[:, 1] = constant
    rows = torch.cat([x, torch.ones(1000, 1).double(), (2 * x[:, :1] - x[:, 2:] + 5)], dim=1)
    weights = _ridge(rows.T @ rows, 1e-6)
    assert weights[:3] == pytest.approx(torch.tensor([2.0, 0.0, -1.0]).double(), abs=1e-4)
    assert x @ weights[:3] + weights[3] == pytest.approx(rows[:, -1], abs=1e-4)


def test_positions_are_read_by_least_squares_on_the_first_half(monkeypatch):
    """Without a ridge, in several batches."""
    model = tiny("none")
    ids = torch.randint(16, (12, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    positions = np.tile(np.arange(1, 9), 6)
    monkeypatch.setattr(theorems_module, "RIDGE", 0.0)
    for readout, hidden in zip(read_positions(model, ids), states, strict=True):
        fit, held_out = (
            np.column_stack([half.flatten(0, 1).double(), np.ones(48)]) for half in hidden.split(6)
        )
        weights = np.linalg.lstsq(fit, positions, rcond=None)[0]
        error = np.abs(held_out @ weights - positions).mean()
        assert readout.error == pytest.approx(error, rel=1e-3, abs=1e-6)


def test_each_text_is_read_once(monkeypatch):
    model, ids = tiny("none"), torch.arange(7)[:, None].expand(7, 8)
    read: list[int] = []

    def note(module, args, options):
        read.append(options["input_ids"][:, 0].tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    monkeypatch.setattr(theorems_module, "BATCH", 2)
    read_positions(model, ids)
    assert read == [[0, 1], [2], [3, 4], [5, 6]]


def test_the_middle_is_read_where_hidden_states_are_constant():
    """With one word it is 2 tokens from the positions 1 to 8 on average."""
    embeddings, *_ = read_positions(tiny("none"), torch.zeros(4, 8, dtype=torch.long))
    assert embeddings.r2 == pytest.approx(0, abs=1e-9)
    assert embeddings.error == pytest.approx(2)


def test_read_positions_needs_two_texts():
    with pytest.raises(FarspanError, match="needs at least two texts"):
        read_positions(tiny("none"), torch.zeros(1, 8, dtype=torch.long))


def test_an_analysis_is_shown_by_its_facts():
    analysis = PositionAnalysis([prove(linear(8, 0.5))], {})
    assert repr(analysis).startswith("PositionAnalysis\n")


def test_theorem_figure_shows_computed_scores():
    proofs = [prove(linear(64, 0.5)), prove(look_back(64, 3, 1.0))]
    figure = theorem_figure(proofs)
    assert len(figure.axes) == 3
    points = figure.axes[2].lines[1].get_xydata()
    assert np.allclose(points[:, 1], -((points[:, 0] - 3) ** 2))


def test_models_in_folders_of_equal_names_stay_distinct(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model").symlink_to(BUNDLED_MODELS / "nope-twin")
    folders = [str(tmp_path / name / "model") for name in ("a", "b")]
    analysis = theorems(folders, length=16, windows=2)
    assert list(analysis.readings) == ["a/model", "b/model"]
    show_theorems(analysis, 16)
    printed = capsys.readouterr().out
    assert "a/model: R²" in printed
    assert "b/model: R²" in printed
