"""The attention seam never changes what a model computes, and says so where it would."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext

import pytest
import torch
import transformers as hf
from transformers.models.llama.modeling_llama import LlamaAttention
from typer.testing import CliRunner

import farspan
from families import FAMILIES, LATENT, SHAPE, SPARSE, randomized, tokens
from farspan.attention import call as seam_call
from farspan.attention import guard, seam
from farspan.attention.backends import mask_of_selected_keys
from farspan.attention.scales import Scales
from farspan.cli import app
from farspan.errors import FarspanError

LENGTH = 24
every_sparse_family = pytest.mark.parametrize("name", SPARSE)


@pytest.fixture(autouse=True)
def _nothing_compared(monkeypatch):
    monkeypatch.setattr(guard, "_differences", {})


class WindowByName(LlamaAttention):
    """Attention that sees four keys, but only under the names that it knows."""

    def forward(self, hidden_states, *args, attention_mask=None, **kwargs):
        length = hidden_states.shape[1]
        if self.config._attn_implementation in ("eager", "sdpa") and length > 1:
            band = torch.ones(length, length, dtype=torch.bool).tril().triu(-3)
            attention_mask = band[None, None].expand(len(hidden_states), -1, -1, -1)
        return super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)


class LlamaWithWindowByName(hf.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = WindowByName(config, index)


def llama() -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).eval()


@torch.no_grad()
def cached_logits(model: hf.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    output = model(ids[:, :-3], use_cache=True)
    parts = [output.logits]
    for index in range(ids.shape[1] - 3, ids.shape[1]):
        past = output.past_key_values
        output = model(ids[:, index : index + 1], past_key_values=past, use_cache=True)
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


@every_sparse_family
@torch.no_grad()
def test_sparse_families_are_exact_under_the_seam(name: str):
    model, ids = randomized(SPARSE[name]), tokens(LENGTH)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    plain = model(ids).logits, model(ids, attention_mask=padding).logits, cached_logits(model, ids)
    heads = model.config.get_text_config().num_attention_heads
    seam.install(model, Scales.uniform(1.0, range(4), heads))
    routed = model(ids).logits, model(ids, attention_mask=padding).logits, cached_logits(model, ids)
    for before, after in zip(plain, routed, strict=True):
        assert torch.equal(before, after)
    seam.install(model, Scales.uniform(1.5, range(4), heads))
    assert not torch.allclose(model(ids).logits, plain[0])


@pytest.mark.parametrize("tail", [True, False])
@torch.no_grad()
def test_queries_that_select_nothing_stay_as_they_are(tail: bool):
    """SDPA gives them 0 by a mask of booleans, which GLM 5 Next makes for this name alone.

    Without the tail, the first queries of a text have no whole group of 4 keys to select.
    """
    latent = {key: value for key, value in LATENT.items() if key != "qk_rope_head_dim"}
    types = {"layer_types": ["indexed_attention"] * 4, "mlp_layer_types": ["dense"] * 4}
    groups = {"index_topk": 8, "index_kpool": 4, "index_kpool_always_select_tail": tail}
    settings = {**latent, **groups, **types, "q_lora_rank": 12}
    model = randomized(lambda: hf.Glm5NextTextModel(hf.Glm5NextTextConfig(**settings)))
    ids = tokens(LENGTH)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    plain = model(ids)[0], model(ids, attention_mask=padding)[0]
    seam.install(model, Scales.uniform(1.0, range(4), 4))
    for before, options in zip(plain, ({}, {"attention_mask": padding}), strict=True):
        assert torch.equal(before, model(ids, **options)[0])
    seam.install(model, Scales.uniform(1.5, range(4), 4))
    assert not torch.allclose(model(ids)[0], plain[0])


@every_sparse_family
@torch.no_grad()
def test_observers_and_scales_see_the_selected_keys_only(name: str):
    model, calls = randomized(SPARSE[name]), []
    with seam.observing(model, calls.append):
        model(tokens(LENGTH))
    selected = 8 if name == "minimax_m3_vl" else 4
    for call in calls[:3]:
        shown = call.mask if call.mask.dtype == torch.bool else call.mask == 0
        assert int(shown.sum(-1).max()) == selected
        assert torch.equal(shown, shown.tril())


@pytest.mark.parametrize("positions", [None, torch.tensor([[1, 2, 5]]), torch.tensor([[0], [6]])])
def test_selected_blocks_end_at_the_position_of_the_query(positions):
    """Without position ids, the queries are the last of the keys."""
    module = randomized(SPARSE["minimax_m3_vl"]).model.layers[0].self_attn
    queries = 3 if positions is None else positions.shape[1]
    blocks = torch.tensor([0, 1]).expand(2, 2, queries, -1)  # both blocks of 4 keys
    q, k = torch.zeros(2, 4, queries, 8), torch.zeros(2, 2, 8, 8)
    options = {"block_indices": blocks, "position_ids": positions}
    mask = mask_of_selected_keys(module, q, k, None, options)
    last = torch.tensor([[5, 6, 7]]) if positions is None else positions
    expected = torch.arange(8) <= last[:, None, :, None]
    assert torch.equal(mask == 0, expected.expand(2, 4, -1, -1))


@every_sparse_family
def test_a_dropped_selection_is_refused(name: str, monkeypatch):
    def drop(module, query, key, mask, kwargs):
        kwargs.pop("block_indices", None)
        return mask

    monkeypatch.setattr(seam_call, "mask_of_selected_keys", drop)
    model = randomized(SPARSE[name])
    config = model.config.get_text_config()  # as real models have it: no few tokens show it
    for key, value in {
        "index_topk": 2048,
        "index_topk_blocks": 16,
        "index_block_size": 128,
    }.items():
        if hasattr(config, key):
            setattr(config, key, value)
    with pytest.raises(FarspanError, match="would change what"):
        seam.install(model)
    assert not seam.installed(model)


def test_growing_scales_are_refused_where_heads_select_their_own_keys():
    model = randomized(SPARSE["minimax_m3_vl"])
    table = torch.full((1, 4), 0.1)
    seam.install(model, Scales((0,), 1 + table, table, "log", 64))
    with pytest.raises(FarspanError, match="for each head"):
        model(tokens(LENGTH))


def test_attention_that_tests_its_name_is_refused_and_inspected_by_its_config():
    model = LlamaWithWindowByName(hf.LlamaConfig(**SHAPE)).eval()
    before = model(tokens()).logits
    for use in (lambda: seam.install(model), lambda: seam.observing(model, print).__enter__()):
        with pytest.raises(FarspanError, match="would change what LlamaWithWindowByName computes"):
            use()
    assert torch.equal(model(tokens()).logits, before)
    inspection = farspan.inspect(model, check=True)
    assert {layer.position for layer in inspection.layers} == {"unknown"}
    assert inspection.seam_check.uncached > 1e-2
    assert "would change what" in inspection.warnings[0]
    assert "the attention seam changes the logits of this model" in inspection.warnings[-1]


def test_each_config_is_compared_once(monkeypatch):
    built = []
    build = guard._small_random_model
    monkeypatch.setattr(
        guard, "_small_random_model", lambda model: built.append(model) or build(model)
    )
    state = torch.get_rng_state()
    for _ in range(2):
        seam.install(llama())
    wider = hf.LlamaConfig(**{**SHAPE, "vocab_size": 256, "intermediate_size": 96})
    seam.install(hf.LlamaForCausalLM(wider))
    assert len(built) == 1, "a width makes no difference"
    seam.install(hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, attention_bias=True)))
    seam.install(LlamaWithoutChange(hf.LlamaConfig(**SHAPE)))
    assert len(built) == 3

    torch.set_rng_state(state)
    guard._differences.clear()
    model = llama()
    state = torch.get_rng_state()
    seam.install(model)
    assert torch.equal(torch.get_rng_state(), state)


class LlamaWithoutChange(hf.LlamaForCausalLM):
    pass


def test_windows_of_real_sizes_are_short_in_the_small_model():
    config = hf.Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 26}, sliding_window=512)
    small = guard._small_random_model(hf.Gemma3ForCausalLM(config))
    assert small.config.sliding_window < guard.TOKENS
    assert set(small.config.layer_types) == {"sliding_attention", "full_attention"}
    assert len(small.model.layers) == len(small.config.layer_types) == 6


def test_a_model_without_a_small_one_is_compared_itself(monkeypatch):
    def fail(model):
        raise ValueError

    monkeypatch.setattr(guard, "_small_random_model", fail)
    seam.install(llama().bfloat16())
    with pytest.raises(FarspanError, match="would change what"):
        seam.install(LlamaWithWindowByName(hf.LlamaConfig(**SHAPE)).train())


@pytest.mark.parametrize(("steps", "refused"), [(2, False), (4, True)])
def test_bf16_may_differ_by_two_rounding_steps_and_not_by_four(steps, refused, monkeypatch):
    change = steps * torch.finfo(torch.bfloat16).eps
    monkeypatch.setattr(guard, "_small_random_model", None)  # none can be built
    monkeypatch.setattr(guard, "difference", lambda *_: {"uncached": change, "cached": 0.0})
    with pytest.raises(FarspanError, match="would change") if refused else nullcontext():
        guard.check_unchanged(llama().bfloat16(), seam.nothing_attached)


@contextmanager
def doubled_logits(model: hf.PreTrainedModel):
    model.lm_head.weight.data.mul_(2)
    yield
    model.lm_head.weight.data.div_(2)


@pytest.mark.parametrize("length", [2, 3, 8])
def test_a_short_text_is_read_with_a_cache_too(length: int):
    changes = guard.difference(llama(), tokens(length), doubled_logits)
    assert changes == pytest.approx({"uncached": 1, "cached": 1})


def test_a_small_model_has_no_more_parameters_than_the_limit(monkeypatch):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}))
    size = guard._small_random_model(model).num_parameters()
    monkeypatch.setattr(guard, "MAX_PARAMETERS", size)
    assert guard._small_random_model(model).num_parameters() == size
    monkeypatch.setattr(guard, "MAX_PARAMETERS", size - 1)
    with pytest.raises(ValueError, match=f"{size:,} parameters"):
        guard._small_random_model(model)


def test_a_small_model_of_more_than_100_million_parameters_is_not_built():
    """It would take 0.6 GB of memory, to compare a few tokens."""
    config = hf.LlamaConfig(head_dim=768, num_attention_heads=4, num_key_value_heads=4)
    config.num_hidden_layers, config.hidden_size = 4, 3072
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"^15\d,\d+,\d+ parameters of a short config"):
        guard._small_random_model(model)


def test_spread_matrices_keep_the_variance_of_their_inputs_and_vectors_stay():
    model = llama()
    vectors = {name: part.clone() for name, part in model.named_parameters() if part.ndim == 1}
    guard.spread_weights(model)
    for name, part in model.named_parameters():
        if name in vectors:
            assert torch.equal(part, vectors[name])
        else:
            assert float(part.var() * part.shape[-1]) == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(("limit", "read"), [(-1, None), (0, None), (1, None), (2, 2), (5, 5)])
def test_no_more_tokens_are_compared_than_the_config_allows(limit: int, read: int | None):
    """0, 1 and −1 stand for no limit."""
    model = llama()
    model.config.max_position_embeddings = limit
    assert guard._ids(model).shape == (1, read or guard.TOKENS)


@pytest.mark.parametrize("name", ["mistral", "gpt2", "granitemoehybrid"])
def test_check_compares_the_model_itself(name: str, tmp_path):
    family = next(family for family in FAMILIES if family.name == name)
    family.build().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--check", "--json"])
    assert result.exit_code == 0, result.stderr
    check = json.loads(result.stdout)["seam_check"]
    assert check == {"tokens": 64, "uncached": 0.0, "cached": 0.0, "limit": 1e-4}


def test_check_is_refused_where_it_cannot_compare(tmp_path):
    hf.LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    for model, reason in ((tmp_path, "has no weights"), ("swan-twin", "has a patch")):
        with pytest.raises(FarspanError, match=reason):
            farspan.inspect(model, check=True)
