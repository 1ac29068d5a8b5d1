"""How far apart two models attend: the true Jensen–Shannon divergence, over all pairs of heads, in pieces that fit."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from families import FAMILIES
from farspan.bundled import BUNDLED_MODELS
from farspan.cli.lab import show_comparison
from farspan.errors import FarspanError
from farspan.lab.distance import (
    Distance,
    ablation,
    attention,
    distances,
    jsd,
    legacy,
    mass_by_distance,
    weights,
)
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import token_losses
from farspan.workflows import attention_analysis
from farspan.workflows.attention_analysis import compare_attention, theorems

HEADS = 4


def model(position: str = "none", seed: int = 0, **changes) -> FarspanForCausalLM:
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
    )
    config = FarspanConfig(
        **shape | changes, position=position, max_position_embeddings=32, initializer_range=0.3
    )
    return FarspanForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0))


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(0.1, 30))
@example(4458, 2, 27.75)
@settings(max_examples=60, deadline=None)
def test_jsd_is_scipys_and_bounded(seed, keys, sharpness):
    draw = np.random.default_rng(seed)
    p, q = torch.from_numpy(draw.normal(size=(2, 5, keys)) * sharpness).softmax(-1)
    found = jsd(p, q)
    with np.errstate(
        invalid="ignore"
    ):  # of rows that are alike SciPy may take the root of a rounding error below 0
        wanted = [
            jensenshannon(one, other) ** 2 for one, other in zip(p.numpy(), q.numpy(), strict=True)
        ]
    assert np.allclose(found, np.nan_to_num(wanted), atol=1e-9)
    assert (found <= math.log(2) + 1e-12).all()
    assert (jsd(p, p) == 0).all()
    assert torch.allclose(found, jsd(q, p))


def test_jsd_is_ln_2_where_nothing_is_shared():
    assert float(jsd(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))) == pytest.approx(
        math.log(2)
    )


def test_the_legacy_rule_is_what_its_formula_says_and_exceeds_ln_2():
    p, q = (
        torch.randn(2, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 6
    ).softmax(-1)
    m = (p + q) / 2
    wanted = ((m * (m / p).log()).sum(-1) + (m * (m / q).log()).sum(-1)) / 2
    assert torch.allclose(legacy(p, q), wanted)
    assert legacy(p, q).max() > math.log(2)
    assert torch.allclose(legacy(p, p), torch.zeros(6, dtype=torch.float64), atol=1e-12)


def test_the_legacy_rule_looks_at_66_of_144_pairs():
    pairs = np.full((1, 12, 12), 9.0)
    seen = 0
    for i in range(12):
        for j in range(12):
            pairs[0, i, j] = 1.0
            seen += Distance(pairs, "legacy").nearest[0] == 1.0
            pairs[0, i, j] = 9.0
    assert seen == 66


def test_every_pair_of_heads_over_every_position(ids):
    one, other = model("none", 0), model("t5", 1)
    found = distances([one, other], [ids])[0, 1]
    for layer, (p, q) in enumerate(zip(attention(one, ids), attention(other, ids), strict=True)):
        p, q = weights(p, 0, 24).double(), weights(q, 0, 24).double()
        assert torch.allclose(p.sum(-1), torch.ones(()).double())
        for i in range(HEADS):
            for j in range(HEADS):
                assert found.pairs[layer, i, j] == pytest.approx(
                    float(jsd(p[:, i], q[:, j]).mean()), abs=1e-6
                )
    assert np.allclose(found.nearest, found.pairs.min((1, 2)))
    assert (found.nearest <= found.matched).all()
    assert (found.matched <= found.pairs.mean((1, 2))).all()


@pytest.mark.parametrize("rule", ["jsd", "legacy"])
def test_pieces_and_batches_give_the_same(ids, rule):
    both = [model("alibi", 0), model("rope", 1)]
    whole = distances(both, [ids], rule=rule)[0, 1]
    pieces = distances(both, [ids[:1], ids[1:]], rule=rule, budget=1)[0, 1]
    assert np.allclose(whole.pairs, pieces.pairs, atol=1e-6)


def test_a_model_whose_heads_were_shuffled_is_matched_with_itself(ids):
    one = model("none")
    other, order = copy.deepcopy(one), torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for layer in other.model.layers:
            attend = layer.self_attn
            for proj in (attend.q_proj, attend.k_proj, attend.v_proj):
                proj.weight.copy_(proj.weight.unflatten(0, (HEADS, -1))[order].flatten(0, 1))
            attend.o_proj.weight.copy_(
                attend.o_proj.weight.unflatten(1, (HEADS, -1))[:, order].flatten(1)
            )
    found = distances([one, other], [ids])[0, 1]
    assert found.matched.max() < 1e-6
    assert found.pairs.mean() > 1e-3


def test_three_models_are_three_pairs(ids):
    assert set(distances([model(seed=seed) for seed in range(3)], [ids])) == {
        (0, 1),
        (0, 2),
        (1, 2),
    }


def test_mass_of_a_model_that_attends_to_all_alike(ids):
    flat = model("none")
    with torch.no_grad():
        for layer in flat.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    mass = mass_by_distance(flat, [ids, ids[:, :10]])
    rows = [1 / np.arange(1, 25)] * 2 + [1 / np.arange(1, 11)] * 2
    for back in range(24):
        seen = np.concatenate([row[back:] for row in rows])  # queries that can look back so far
        assert np.allclose(mass[:, :, back], seen.mean(), atol=1e-6)


def test_mass_of_all_distances_is_one_in_pieces_too(ids):
    mass = mass_by_distance(model("rope"), [ids], budget=1)
    queries = np.arange(24, 0, -1)
    assert np.allclose((mass * queries).sum(-1), 24, atol=1e-4)


def test_a_head_without_a_voice_is_a_head_whose_output_is_not_projected(ids):
    one = model("t5")
    found = ablation(one, [ids])
    assert found.shape == (2, HEADS)
    whole = float(token_losses(one, ids).mean())
    for layer, head in ((0, 1), (1, 3)):
        without = copy.deepcopy(one)
        with torch.no_grad():
            without.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (HEADS, -1))[
                :, head
            ] = 0
        assert found[layer, head] == pytest.approx(
            float(token_losses(without, ids).mean()) - whole, abs=1e-6
        )
    assert np.abs(found).max() > 1e-3


def test_other_families_are_looked_at_as_well():
    llama = next(family for family in FAMILIES if family.name == "llama").build().eval()
    ids = torch.arange(12)[None]
    assert distances([llama, copy.deepcopy(llama)], [ids])[0, 1].matched.max() < 1e-6
    assert np.isfinite(ablation(llama, [ids], layers=1)).all()


def test_one_head_has_no_legacy_pair(ids):
    with pytest.raises(FarspanError, match="a model here has one head"):
        distances([model(num_attention_heads=1)] * 2, [ids], rule="legacy")


def test_models_of_other_depths_are_refused(ids):
    with pytest.raises(FarspanError, match="models of 2 and 3 attention layers"):
        distances([model(), model(num_hidden_layers=3)], [ids])


def test_models_in_folders_of_one_name_are_all_told(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model").symlink_to(BUNDLED_MODELS / "nope-twin")
    sources = [str(tmp_path / folder / "model") for folder in ("a", "b")]
    found = compare_attention(sources, length=8, windows=1, out=tmp_path / "out")
    show_comparison(found, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert list(said["loss_without_head"]) == ["a/model", "b/model"]
    assert said["distances"][0]["models"] == ["a/model", "b/model"]
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert [each["model"] for each in record["heads"]] == ["a/model", "b/model"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"lengths": "2:20"},
            "--lengths 2:20 is of examples of a task; give --task too, or --length for text",
        ),
        ({"task": "copy", "length": 99}, "--length 99 is of text, and --task copy reads none"),
        (
            {"task": "copy", "data": "nofile"},
            "--data nofile is of text, and --task copy reads none",
        ),
        ({"task": "cpy"}, "'cpy'.*did you mean copy"),
    ],
)
def test_what_is_of_no_use_is_refused_before_a_model_is_loaded(monkeypatch, given, sentence):
    for loads in ("load", "load_for_text"):
        monkeypatch.setattr(
            attention_analysis, loads, lambda *asked, **options: pytest.fail("a model is loaded")
        )
    with pytest.raises(FarspanError, match=sentence):
        compare_attention(["nope-twin", "rope-twin"], **given)


def test_models_whose_positions_are_read_are_all_looked_at_first(monkeypatch):
    monkeypatch.setattr(
        attention_analysis,
        "load_with_tokenizer",
        lambda *asked, **options: pytest.fail("a model is loaded"),
    )
    with pytest.raises(FarspanError, match="'typo' is neither a folder nor a hub id"):
        theorems(["nope-twin", "typo"], length=16)
