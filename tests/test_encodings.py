"""Encodings of the open protocol: their papers' formulas, caches, gradients, and what is refused.

The formulas are computed here a second time, in float64 with numpy, one score at a time.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig

import farspan
from farspan.attention import seam
from farspan.attention.probe import probe
from farspan.attention.scores import Scores
from farspan.custom_code import import_code
from farspan.errors import FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.encodings import BUILT_IN, Cope, Encoding, Fire, Kerple, Randomized
from farspan.train.optim import OptimizerConfig, make_optimizers

SHAPE = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
)
SCORING = ("kerple", "fire", "cope")


def config(position: str | list[str], **overrides) -> FarspanConfig:
    return FarspanConfig(**SHAPE | overrides, position=position)


def model(position: str | list[str], seed: int = 0, **overrides) -> FarspanForCausalLM:
    """A float64 model whose encoding matters: no parameter is zero, and scores are large."""
    torch.manual_seed(seed)
    built = FarspanForCausalLM(config(position, **overrides)).double().eval()
    for name, parameter in built.named_parameters():
        if "positions" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "proj" in name:
            parameter.data *= 8
    return built


def tokens(length: int, batch: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randint(3, SHAPE["vocab_size"], (batch, length), generator=draw)


def random_q_k(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return (
        torch.randn(2, 4, queries, 8, generator=draw, dtype=torch.float64),
        torch.randn(2, 4, keys, 8, generator=draw, dtype=torch.float64),
    )


def term(encoding: Encoding, queries: range, keys: range, q=None, k=None) -> np.ndarray:
    if q is None:
        q, k = random_q_k(len(queries), len(keys))
    slots = torch.tensor(list(queries)), torch.tensor(list(keys))
    return encoding.scores(q, k, *slots).detach().numpy()


def perturbed(cls: type[Encoding]) -> Encoding:
    torch.manual_seed(3)
    encoding = cls(config("none")).double()
    for parameter in encoding.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return encoding


# Formulas.


def test_kerple_is_the_log_kernel():
    encoding = perturbed(Kerple)
    encoding.r2.data[0] = -5.0  # held at the minimum
    r1, r2 = encoding.r1.detach().numpy(), encoding.r2.detach().numpy()
    scores = term(encoding, range(7), range(7))
    for head in range(4):
        for i in range(7):
            for j in range(i + 1):
                expected = -max(r1[head], 0.01) * math.log(1 + max(r2[head], 0.01) * (i - j))
                assert scores[head, i, j] == pytest.approx(expected, abs=1e-12)


def test_kerple_starts_in_the_ranges_of_chi_2022():
    torch.manual_seed(0)
    encoding = Kerple(config("none", num_attention_heads=32))
    assert 0 <= encoding.r1.min() < 0.5
    assert 1.5 < encoding.r1.max() <= 2
    assert 0 <= encoding.r2.min() < 0.25
    assert 0.75 < encoding.r2.max() <= 1


@pytest.mark.parametrize("multiple", [1.0, 0.1], ids=["all below L", "beyond L"])
def test_fire_is_an_mlp_of_the_compressed_ratio(multiple):
    encoding = perturbed(Fire)
    encoding.multiple.data.fill_(multiple)
    first, _, second = encoding.mlp
    w1, b1 = first.weight.detach().numpy()[:, 0], first.bias.detach().numpy()
    w2, b2 = second.weight.detach().numpy(), second.bias.detach().numpy()
    c, threshold = abs(float(encoding.c.detach())), multiple * 16 / 4
    scores = term(encoding, range(4), range(4))
    for i in range(4):
        for j in range(i + 1):
            largest = max(threshold, i)
            ratio = math.log(1 + c * (i - j)) / (math.log(1 + c * largest) + 1e-6)
            expected = w2 @ np.maximum(w1 * ratio + b1, 0) + b2
            assert scores[:, i, j] == pytest.approx(expected, abs=1e-12)


def test_fire_of_a_long_text_stays_in_the_range_of_training():
    """Every distance is a fraction of the query's position, from 0 to 1."""
    encoding = perturbed(Fire)
    encoding.multiple.data.fill_(0.01)
    far = term(encoding, range(999, 1000), range(1000))[:, 0]
    near = term(encoding, range(9, 10), range(10))[:, 0]
    assert far[:, 0] == pytest.approx(near[:, 0], abs=1e-4), "ratio 1: the first token"
    assert far[:, -1] == pytest.approx(near[:, -1], abs=1e-12), "ratio 0: the token itself"


def test_fire_tells_neighbors_apart_under_autocast():
    torch.manual_seed(0)
    encoding, (q, k) = Fire(config("none")), random_q_k(1, 400)
    slots = torch.tensor([399]), torch.arange(400)
    exact = encoding.scores(q.float(), k.float(), *slots)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(encoding.scores(q.float(), k.float(), *slots), exact)
    assert len(exact[0, 0].unique()) == 400


def test_cope_counts_gates_and_interpolates():
    encoding = perturbed(Cope)
    q, k = random_q_k(6, 6)
    scores = term(encoding, range(6), range(6), q, k)
    table = encoding.table.detach().numpy()
    for batch, head in np.ndindex(2, 4):
        queries, keys = q[batch, head].numpy(), k[batch, head].numpy()
        for i in range(6):
            for j in range(i + 1):
                gates = [1 / (1 + math.exp(-queries[i] @ keys[t])) for t in range(j, i + 1)]
                position = sum(gates)
                low = math.floor(position)
                weight = position - low
                vector = (1 - weight) * table[low] + weight * table[low + 1]
                assert scores[batch, head, i, j] == pytest.approx(queries[i] @ vector, abs=1e-10)


def test_cope_positions_end_at_the_last_vector():
    encoding = perturbed(Cope)
    q = torch.ones(1, 1, 1, 8, dtype=torch.float64)
    k = torch.full((1, 1, 200, 8), 9.0, dtype=torch.float64)  # every gate is 1
    scores = term(encoding, range(199, 200), range(200), q, k)[0, 0, 0]
    last = float(encoding.table[-1].sum().detach())
    assert scores[:137] == pytest.approx(last, abs=1e-9), "200 to 64 keys back"
    assert scores[137] == pytest.approx(last, abs=1e-9), "63 keys back"
    assert abs(scores[138] - last) > 1e-3


def test_randomized_places_are_sorted_distinct_and_cover_the_range():
    encoding, x = Randomized(config("none")), torch.zeros(1, 40, 32)
    slots = torch.arange(40)[None]
    seen = []
    torch.manual_seed(0)
    for _ in range(60):
        waves = encoding.train().embed(x, slots)
        # The slowest wave is monotone over the range: its angle is the place.
        angle = torch.atan2(waves[0, :, 15], waves[0, :, 31]).double()
        places = angle * 10_000 ** (15 / 16)
        seen.append(places.round().long())
        assert (seen[-1].diff() > 0).all()
    drawn = torch.stack(seen)
    assert drawn.min() >= 0
    assert drawn.max() < 2048
    assert len(drawn.unique()) > 1000, "every batch has its own places"
    assert drawn.double().mean() == pytest.approx(1023.5, abs=40)


def test_randomized_evaluation_has_fixed_places_up_to_the_table():
    encoding = Randomized(config("none", position_table=30)).eval()

    def evaluated(count: int) -> torch.Tensor:
        return encoding.embed(torch.zeros(1, count, 32), torch.arange(count)[None])

    assert torch.equal(evaluated(9), evaluated(30)[:, :9]), "padding, or later tokens"
    assert torch.equal(evaluated(31), evaluated(31))
    assert not torch.equal(evaluated(30), evaluated(31)[:, :30])
    with pytest.raises(FarspanError, match="randomized positions have 2,048 places, and the text"):
        evaluated(2049)


# The model.


@pytest.mark.parametrize("position", SCORING)
def test_a_model_adds_the_term_to_its_scaled_scores(position):
    """One layer by hand: softmax(scale·q·k + term) v."""
    built = model(position, num_hidden_layers=1, num_key_value_heads=2, base_scale=0.4)
    ids, layer = tokens(9), built.model.layers[0]
    with torch.no_grad():
        x = built.model.embed_tokens(ids)
        y = layer.input_layernorm(x)
        heads = [
            F.linear(y, weight).view(1, 9, -1, 8).transpose(1, 2)
            for weight in (
                layer.self_attn.q_proj.weight,
                layer.self_attn.k_proj.weight,
                layer.self_attn.v_proj.weight,
            )
        ]
        q, k, v = heads[0] * 0.4, *(part.repeat_interleave(2, dim=1) for part in heads[1:])
        slots = torch.arange(9)
        scores = q @ k.mT + built.model.positions[position].scores(q, k, slots, slots)
        weights = scores.masked_fill(slots > slots[:, None], -math.inf).softmax(-1)
        x = x + F.linear((weights @ v).transpose(1, 2).flatten(2), layer.self_attn.o_proj.weight)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        expected = built.lm_head(built.model.norm(x))
        assert (built(ids).logits - expected).abs().max() < 1e-10


@pytest.mark.parametrize("position", [*SCORING, *(f"{name}/5" for name in SCORING)])
def test_cached_decoding_and_generation_equal_one_pass(position):
    built, ids = model([position, "none"]), tokens(14)
    whole = built(ids, use_cache=False).logits
    cache, parts = DynamicCache(config=built.config), []
    for start, stop in ((0, 6), (6, 9), (9, 10), (10, 14)):
        parts.append(built(ids[:, start:stop], past_key_values=cache).logits)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-10
    last = built.model(ids, positions_to_keep=3, use_cache=False).last_hidden_state
    assert (built.lm_head(last) - whole[:, -3:]).abs().max() < 1e-10
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    cached = built.generate(ids[:, :4], use_cache=True, **options)
    assert torch.equal(cached, built.generate(ids[:, :4], use_cache=False, **options))


def test_randomized_generation_runs_without_a_cache():
    built, ids = model("randomized"), tokens(5)
    generated = built.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 8)
    for count in (5, 6, 7):
        logits = built(generated[:, :count]).logits
        assert logits[0, -1].argmax() == generated[0, count]
    built.generation_config = GenerationConfig()  # as farspan generate does
    again = built.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(again, generated)
    assert built(ids).past_key_values is None
    with pytest.raises(FarspanError, match="drawn for a whole text.*use_cache=False"):
        built(ids, past_key_values=DynamicCache(config=built.config))


@pytest.mark.parametrize("position", SCORING)
def test_padded_batches_and_static_caches_are_refused(position):
    built, ids = model(position), tokens(6, batch=2)
    mask = torch.ones_like(ids)
    assert torch.equal(
        built(ids, attention_mask=mask).logits.argmax(-1), built(ids).logits.argmax(-1)
    )
    mask[0, 0] = 0
    with pytest.raises(FarspanError, match=f"{position} layers cannot run a padded batch; run"):
        built(ids, attention_mask=mask)
    with pytest.raises(FarspanError, match=f"{position} layers cannot use a static cache; use a"):
        built.generate(ids[:1], max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with pytest.raises(FarspanError, match=f"drop the score bias of {position} layers"):
        FarspanForCausalLM._from_config(config(position), attn_implementation="flex_attention")


def test_packed_texts_are_refused_where_scores_depend_on_more_than_the_keys_between(tmp_path):
    (tmp_path / "own.py").write_text(
        "from farspan.model.encodings import Fire\nclass Own(Fire):\n    pass\n"
    )
    own = f"{tmp_path / 'own.py'}:Own"
    import_code(own, "key", trust_remote_code=True)
    ids, packed = tokens(9), torch.cat((torch.arange(5), torch.arange(4)))[None]
    for position in ("fire", "own"):
        built = model(position, custom_encodings={"own": own})
        with pytest.raises(FarspanError, match=f"{position} layers cannot run packed texts; run"):
            built(ids, position_ids=packed, use_cache=False)
        expected = built(ids, use_cache=False).logits
        in_order = built(ids, position_ids=torch.arange(9)[None], use_cache=False).logits
        assert (in_order - expected).abs().max() < 1e-10


@pytest.mark.parametrize("position", BUILT_IN)
def test_every_parameter_gets_a_gradient_and_a_step(position):
    built = model(position).train()
    ids = tokens(40, batch=2)
    built(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in built.named_parameters() if "positions" in name}
    assert all(grad is not None and grad.abs().max() > 0 for grad in gradients.values())
    muon, *_ = make_optimizers(built, OptimizerConfig("muon"))
    trained_by_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    assert not trained_by_muon & {id(p) for p in built.model.positions.parameters()}


def test_an_encoding_keeps_its_own_initialization():
    """transformers would draw the weights of the MLP anew, with deviation initializer_range."""
    torch.manual_seed(0)
    built = FarspanForCausalLM(config("fire", initializer_range=1e-3))
    first = built.model.positions["fire"].mlp[0]
    assert first.weight.abs().max() > 0.5
    assert first.bias.abs().max() > 0.5


@pytest.mark.parametrize("position", BUILT_IN)
def test_models_load_as_they_were_saved(position, tmp_path):
    built = model(position).float()
    built.save_pretrained(tmp_path)
    loaded = farspan.load(tmp_path).model
    ids = tokens(12)
    assert torch.equal(loaded(ids).logits, built(ids).logits)
    assert loaded.config.position == [position] * 2


@pytest.mark.parametrize("position", SCORING)
def test_the_seam_sees_the_scores_that_the_model_uses(position):
    built, ids, calls = model(position), tokens(9), []
    with seam.observing(built, calls.append), torch.no_grad():
        output = built.model(ids, output_hidden_states=True)
    call = calls[0]
    scores = Scores.from_call(call)
    whole = scores.rows(0, 9, 1, torch.float64).softmax(-1)
    part = scores.rows(3, 9, 2, torch.float64).softmax(-1)
    assert (whole[:, :, 3:9:2, : part.shape[-1]] - part).abs().max() < 1e-12
    attended = (whole @ call.v).transpose(1, 2).flatten(2)
    layer = built.model.layers[0]
    x = output.hidden_states[0] + F.linear(attended, layer.self_attn.o_proj.weight)
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    assert (x - output.hidden_states[1]).abs().max() < 1e-10
    assert [layer.position for layer in probe(built)] == ["unknown"] * 2
