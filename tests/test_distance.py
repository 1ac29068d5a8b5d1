"""Attention distance: Jensen–Shannon divergence over all pairs of heads, mass, ablation."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from families import FAMILIES
from farspan.bundled import BUNDLED_MODELS
from farspan.cli.lab_distance import show_comparison
from farspan.errors import FarspanError
from farspan.lab import distance as distance_module
from farspan.lab.distance import (
    BINS,
    Distance,
    ablation,
    attended_distance,
    attention_scores,
    attention_weights,
    distances,
    jsd,
    legacy,
    mass_by_distance,
)
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import token_losses
from farspan.workflows import attention_analysis
from farspan.workflows.attention_analysis import compare_attention, theorems

pytestmark = pytest.mark.usefixtures("without_figures")

HEADS = 4


def model(position: str = "none", seed: int = 0, **overrides) -> FarspanForCausalLM:
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
    )
    config = FarspanConfig(
        **shape | overrides, position=position, max_position_embeddings=32, initializer_range=0.3
    )
    return FarspanForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0))


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(0.1, 30))
@example(4458, 2, 27.75)
@settings(max_examples=60, deadline=None)
def test_jsd_equals_scipy_and_is_bounded(seed, keys, sharpness):
    rng = np.random.default_rng(seed)
    p, q = torch.from_numpy(rng.normal(size=(2, 5, keys)) * sharpness).softmax(-1)
    divergence = jsd(p, q)
    with np.errstate(invalid="ignore"):  # of equal rows SciPy may take the root of a negative error
        expected = [
            jensenshannon(one, other) ** 2 for one, other in zip(p.numpy(), q.numpy(), strict=True)
        ]
    assert np.allclose(divergence, np.nan_to_num(expected), atol=1e-9)
    assert (divergence <= math.log(2) + 1e-12).all()
    assert (jsd(p, p) == 0).all()
    assert torch.allclose(divergence, jsd(q, p))


def test_jsd_of_disjoint_attention_is_ln_2():
    assert float(jsd(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))) == pytest.approx(
        math.log(2)
    )


def test_legacy_rule_equals_its_formula_and_exceeds_ln_2():
    p, q = (
        torch.randn(2, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 6
    ).softmax(-1)
    m = (p + q) / 2
    expected = ((m * (m / p).log()).sum(-1) + (m * (m / q).log()).sum(-1)) / 2
    assert torch.allclose(legacy(p, q), expected)
    assert legacy(p, q).max() > math.log(2)
    assert torch.allclose(legacy(p, p), torch.zeros(6, dtype=torch.float64), atol=1e-12)


def test_legacy_rule_uses_66_of_144_pairs():
    pairs = np.full((1, 12, 12), 9.0)
    used = 0
    for i in range(12):
        for j in range(12):
            pairs[0, i, j] = 1.0
            used += Distance(pairs[None], np.ones(1), "legacy").nearest[0] == 1.0
            pairs[0, i, j] = 9.0
    assert used == 66


def test_distances_cover_every_pair_of_heads_and_position(ids):
    one, other = model("none", 0), model("t5", 1)
    distance = distances([one, other], [ids])[0, 1]
    scores = zip(attention_scores(one, ids), attention_scores(other, ids), strict=True)
    for layer, (p, q) in enumerate(scores):
        p, q = attention_weights(p, 0, 24).double(), attention_weights(q, 0, 24).double()
        assert torch.allclose(p.sum(-1), torch.ones(()).double())
        for i in range(HEADS):
            for j in range(HEADS):
                assert distance.pairs[layer, i, j] == pytest.approx(
                    float(jsd(p[:, i], q[:, j]).mean()), abs=1e-6
                )
    of_mean = replace(distance, minimum="mean").nearest
    assert np.allclose(of_mean, distance.pairs.min((1, 2)))
    assert (of_mean <= distance.matched).all()
    assert (distance.matched <= distance.pairs.mean((1, 2))).all()


@pytest.mark.parametrize("rule", ["jsd", "legacy"])
def test_nearest_heads_are_those_of_each_sample(rule):
    """Each sample's smallest distance first, then their mean: the released notebook's order."""
    one, other = model("none", 0), model("alibi", 1)
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(32, (3, 9), generator=generator), torch.arange(20)[None]]
    distance = distances([one, other], batches, rule=rule)[0, 1]
    assert distance.minimum == "sample"
    expected, compare = np.zeros((4, 2)), {"jsd": jsd, "legacy": legacy}[rule]
    sums = np.zeros((2, HEADS, HEADS))
    samples = [row[None] for ids in batches for row in ids]
    for number, ids in enumerate(samples):
        scores = zip(attention_scores(one, ids), attention_scores(other, ids), strict=True)
        for layer, (p, q) in enumerate(scores):
            p, q = (attention_weights(part, 0, ids.shape[1])[0].double() for part in (p, q))
            table = compare(p[:, None], q[None]).sum(-1).numpy()
            sums[layer] += table
            expected[number, layer] = min(
                table[i, j] / ids.shape[1]
                for i in range(HEADS)
                for j in range(HEADS)
                if rule == "jsd" or i < j
            )
    assert np.allclose(distance.nearest, expected.mean(0), atol=1e-5)
    assert np.allclose(distance.pairs, sums / (3 * 9 + 20), atol=1e-5)
    assert (distance.nearest < replace(distance, minimum="mean").nearest - 1e-4).all(), (
        "the samples have different nearest heads"
    )


@pytest.mark.parametrize("rule", ["jsd", "legacy"])
def test_distances_do_not_depend_on_budget_or_batches(ids, rule, monkeypatch):
    both = [model("alibi", 0), model("rope", 1)]
    together = distances(both, [ids], rule=rule)[0, 1]
    monkeypatch.setattr(distance_module, "BUDGET", 1)
    row_by_row = distances(both, [ids[:1], ids[1:]], rule=rule)[0, 1]
    assert np.allclose(together.pairs, row_by_row.pairs, atol=1e-6)
    assert np.allclose(together.nearest, row_by_row.nearest, atol=1e-6)


@pytest.mark.parametrize("starts", [None, [torch.tensor([4, 20]), torch.tensor([0])]])
def test_attended_distance_counts_the_most_attended_token_of_each_query(ids, starts, monkeypatch):
    original, batches = model("rope", 2), [ids, ids[:1, :10]]
    fractions = attended_distance(original, batches, starts)
    monkeypatch.setattr(distance_module, "BUDGET", 1)
    again = attended_distance(original, batches, starts)
    assert np.array_equal(fractions, again)
    counts = np.zeros((2, HEADS, BINS))
    for number, batch in enumerate(batches):
        for layer, scores in enumerate(attention_scores(original, batch)):
            weights = attention_weights(scores, 0, batch.shape[1]).numpy()
            for row in range(len(batch)):
                for query in range(int(starts[number][row]) if starts else 0, batch.shape[1]):
                    for head in range(HEADS):
                        key = int(np.argmax(weights[row, head, query, : query + 1]))
                        relative = Fraction(query - key, query + 1)
                        counts[layer, head, math.floor(relative * BINS)] += 1
    assert np.allclose(fractions, counts / counts.sum(-1, keepdims=True))
    assert (fractions > 0).sum() > 2 * HEADS, "heads attend to more than one distance"


@pytest.mark.parametrize("measure", [attended_distance, mass_by_distance])
def test_no_more_weights_are_computed_at_once_than_allowed(measure, ids, monkeypatch):
    sizes: list[int] = []

    def counting(scores, first, last):
        weights = attention_weights(scores, first, last)
        sizes.append(weights.numel())
        return weights

    monkeypatch.setattr(distance_module, "attention_weights", counting)
    queries = ids.shape[1]
    budget = 3 * len(ids) * HEADS * queries
    monkeypatch.setattr(distance_module, "BUDGET", budget)
    measure(model("rope", 2), [ids])
    assert max(sizes) <= budget
    assert len(sizes) == 2 * -(-queries // 3), "three rows at a time in each of two layers"


def test_matching_undoes_a_permutation_of_heads(ids):
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
    distance = distances([one, other], [ids])[0, 1]
    assert distance.matched.max() < 1e-6
    assert distance.pairs.mean() > 1e-3


def test_three_models_give_three_pairs(ids):
    assert set(distances([model(seed=seed) for seed in range(3)], [ids])) == {
        (0, 1),
        (0, 2),
        (1, 2),
    }


def test_mass_of_uniform_attention(ids):
    uniform = model("none")
    with torch.no_grad():
        for layer in uniform.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    mass = mass_by_distance(uniform, [ids, ids[:, :10]])
    rows = [1 / np.arange(1, 25)] * 2 + [1 / np.arange(1, 11)] * 2
    for back in range(24):
        queries = np.concatenate([row[back:] for row in rows])  # those with a key at this distance
        assert np.allclose(mass[:, :, back], queries.mean(), atol=1e-6)


def test_mass_over_all_distances_sums_to_one(ids, monkeypatch):
    monkeypatch.setattr(distance_module, "BUDGET", 1)
    mass = mass_by_distance(model("rope"), [ids])
    queries = np.arange(24, 0, -1)
    assert np.allclose((mass * queries).sum(-1), 24, atol=1e-4)


def test_ablation_equals_zeroed_output_projection(ids):
    original = model("t5")
    increases = ablation(original, [ids])
    assert increases.shape == (2, HEADS)
    baseline = float(token_losses(original, ids).mean())
    for layer, head in ((0, 1), (1, 3)):
        ablated = copy.deepcopy(original)
        with torch.no_grad():
            projection = ablated.model.layers[layer].self_attn.o_proj.weight
            projection.unflatten(1, (HEADS, -1))[:, head] = 0
        increase = float(token_losses(ablated, ids).mean()) - baseline
        assert increases[layer, head] == pytest.approx(increase, abs=1e-6)
    assert np.abs(increases).max() > 1e-3


def test_distances_and_ablation_of_other_families():
    llama = next(family for family in FAMILIES if family.name == "llama").build().eval()
    ids = torch.arange(12)[None]
    assert distances([llama, copy.deepcopy(llama)], [ids])[0, 1].matched.max() < 1e-6
    assert np.isfinite(ablation(llama, [ids])).all()


def test_legacy_rule_refuses_single_heads(ids):
    with pytest.raises(FarspanError, match="one of the models has a single head"):
        distances([model(num_attention_heads=1)] * 2, [ids], rule="legacy")


def test_distances_refuse_models_of_different_depths(ids):
    with pytest.raises(FarspanError, match="models of 2 and 3 attention layers"):
        distances([model(), model(num_hidden_layers=3)], [ids])


def test_models_in_folders_of_equal_names_stay_distinct(tmp_path, capsys):
    folders = [tmp_path / name / "model" for name in ("a", "b")]
    for folder in folders:
        model(vocab_size=4096).save_pretrained(folder)
        for file in (BUNDLED_MODELS / "nope-twin").glob("tokenizer*"):
            shutil.copy(file, folder)
    comparison = compare_attention(
        list(map(str, folders)), length=8, windows=1, out=str(tmp_path / "out")
    )
    show_comparison(comparison, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["loss_without_head"]) == ["a/model", "b/model"]
    assert printed["distances"][0]["models"] == ["a/model", "b/model"]
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert [heads["model"] for heads in record["heads"]] == ["a/model", "b/model"]


@pytest.fixture
def no_loading(monkeypatch):
    for name in ("load", "load_with_begin_of_text"):
        monkeypatch.setattr(
            attention_analysis, name, lambda *args, **options: pytest.fail("a model is loaded")
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scratchpad": "full"}, "--scratchpad full applies to examples of a task; add --task"),
        ({"minimum": "men"}, "minimum 'men' is unknown; choose sample or mean"),
        ({"lengths": "2:20"}, "--lengths 2:20 applies to examples of a task; add --task"),
        (
            {"task": "copy", "length": 99},
            "--length 99 applies to text, but --task copy reads examples; remove --length",
        ),
        (
            {"task": "copy", "data": "nofile"},
            "--data nofile applies to text, but --task copy reads examples; remove --data",
        ),
        ({"task": "cpy"}, "'cpy'.*did you mean copy"),
    ],
)
def test_unused_options_are_refused_before_loading(no_loading, options, message):
    with pytest.raises(FarspanError, match=message):
        compare_attention(["nope-twin", "rope-twin"], **options)


@pytest.mark.parametrize("function", [theorems, compare_attention])
def test_all_models_and_the_text_are_checked_before_loading(no_loading, function):
    with pytest.raises(FarspanError, match="'typo' is neither a folder nor a hub id"):
        function(["nope-twin", "typo"], length=16)
    with pytest.raises(FarspanError, match="'typo.txt' is not a file, folder or data set"):
        function(["nope-twin", "rope-twin"], "typo.txt", length=16)
