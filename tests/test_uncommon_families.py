"""Families whose layers share keys, differ in heads, lack a cache, or need more than text."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import farspan
from families import SHAPE, randomized, tokens
from farspan.attention import caches, guard, seam
from farspan.attention.describe import describe_patch
from farspan.attention.layout import Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.model_facts import max_positions
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.cli import app
from farspan.cli.console import console
from farspan.cli.extend import _show_patch
from farspan.errors import CorruptError, FarspanError
from farspan.formats import fold as fold_module
from farspan.formats.fold import compare_logits, find_sites, fold, logits
from farspan.methods.fit import make_fit_job
from farspan.methods.headscale import headlog, headscale
from farspan.methods.search_config import SearchConfig
from farspan.workflows.extend_prepare import _check_reads


def gemma4() -> hf.PreTrainedModel:
    """The last two of four layers read the keys of the first two."""
    values = {**SHAPE, "sliding_window": 8, "global_head_dim": 16}
    values |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    values |= {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
    return hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**values, num_kv_shared_layers=2))


def laguna() -> hf.PreTrainedModel:
    if not hasattr(hf, "LagunaConfig"):
        pytest.skip("this release of transformers lacks Laguna")
    config = hf.LagunaConfig(
        **SHAPE,
        num_attention_heads_per_layer=[4, 8, 8, 4],
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return hf.LagunaForCausalLM(config)


def test_scales_fold_where_layers_share_keys_and_values():
    model = randomized(gemma4)
    indices = tuple(layer.index for layer in probe(model))
    assert indices == (0, 1, 2, 3)
    sites = find_sites(model, Scales.uniform(1.5, indices, 4))
    assert {site.name for site in sites.values()} == {"q_norm"}
    assert fold(model, Scales.uniform(1.5, indices, 4), tokens()).holds


@pytest.mark.parametrize("entries", [{1: "none/3"}, {1: "rope/3", 3: "rope"}], ids=str)
@torch.no_grad()
def test_a_cache_keeps_the_keys_that_other_layers_share(entries: dict[int, str]):
    model, ids = randomized(gemma4), tokens(33)
    set_layout(model, Layout.parse(entries))
    expected, past = model(ids, use_cache=False).logits, caches.make_cache(model)
    parts = [model(part, past_key_values=past, use_cache=True).logits for part in ids.split(8, 1)]
    assert (torch.cat(parts, dim=1) - expected).abs().max() < 1e-4


@torch.no_grad()
def test_layers_with_unequal_heads_have_scales_of_their_own():
    model = randomized(laguna)
    layers = probe(model)
    assert [layer.heads for layer in layers] == [4, 8, 8, 4]
    table = torch.linspace(1.1, 1.9, 32).view(4, 8)
    queries: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for scaled, seen in queries.items():
        copied = copy.deepcopy(model)
        if scaled:
            seam.install(copied, Scales((0,), table[:1]))
        with seam.observing(copied, lambda call, seen=seen: seen.append(call.q)):
            copied(tokens())
    assert torch.allclose(queries[True][0], queries[False][0] * table[0, :4, None, None])
    seam.install(model, Scales((0, 1, 2, 3), table))
    with pytest.raises(FarspanError, match="have 6 heads, but layer 1 has 8"):
        seam.install(model, Scales.uniform(1.5, (0, 1), 6))


@pytest.mark.parametrize(("method", "shared"), [(headscale, False), (headlog, True)])
def test_statistics_of_scales_leave_out_heads_that_a_layer_lacks(method, shared, tmp_path):
    """A table is as wide as its widest layer. A search leaves the rest of it where it starts."""
    model, ids, notes = randomized(laguna), tokens(45, batch=4), []

    def progress(label, steps):
        return lambda count=1, note="": notes.append(note)

    job = make_fit_job(model, probe(model), 40, 16, ids, ids[:, :40], progress=progress)
    settings = dict(steps=2, batch=2, lr=(0.1,), warmup=1, init=(3.0, 1.0, 1.0, 2.0))
    method(model, job, SearchConfig(**settings, shared=shared)).save(tmp_path / "patch")
    patch = Patch.load(tmp_path / "patch")
    at_target = patch.scales.at(torch.tensor([40.0]))[..., 0]
    base, scale = (
        torch.cat([row[:count] for row, count in zip(table, (4, 8, 8, 4), strict=True)])
        for table in (patch.scales.base, at_target)
    )
    assert base.mean() < patch.scales.base.mean() - 0.1
    statistics = patch.describe()["scales"]
    assert statistics["heads"] == [4, 8, 8, 4]
    assert statistics["mean"] == pytest.approx(base.mean().item())
    assert f"mean {scale.mean():.3f}" in describe_patch(patch)[0]
    assert f"λ̂ {base.min():.2f}–{base.max():.2f}, mean {base.mean():.2f}" in notes[-2]
    with console.capture() as captured:
        _show_patch(patch)
    shown = " ".join(captured.get().split())
    assert f"mean {scale.mean():.2f} at" in shown
    assert "24 heads in 4 layers" in shown


def test_heads_of_layers_are_those_that_a_table_has(tmp_path):
    scales = Scales((0, 2), torch.full((2, 8), 1.5), layer_heads={0: 4, 2: 8})
    patch = Patch("test", "0" * 64, 40, 16, scales)
    patch.save(tmp_path / "patch")
    file = tmp_path / "patch" / "patch.json"
    saved = file.read_text()
    for heads in ([4, 9], [0, 8], [4], ["4", 8], 4):
        record = json.loads(saved)
        record["scales"]["heads"] = heads
        file.write_text(json.dumps(record))
        with pytest.raises(CorruptError, match="fit or copy it again"):
            Patch.load(tmp_path / "patch")
    other = Scales((1,), torch.full((1, 8), 1.2), layer_heads={1: 6})
    assert patch.then(replace(patch, scales=other)).scales.head_counts == (4, 6, 8)


def test_inspect_shows_unequal_heads(tmp_path):
    model = randomized(laguna)
    model.save_pretrained(tmp_path / "whole")
    model.config.save_pretrained(tmp_path / "config")
    for source in ("whole", "config"):
        heads = [layer.heads for layer in farspan.inspect(tmp_path / source).layers]
        assert heads == [4, 8, 8, 4]
    with console.capture() as captured:
        assert CliRunner().invoke(app, ["inspect", str(tmp_path / "whole")]).exit_code == 0
    assert "8 query" in captured.get()


@pytest.fixture
def experts() -> hf.PreTrainedModel:
    config = hf.Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    return randomized(lambda: hf.Qwen3MoeForCausalLM(config))


def test_experts_are_proven_in_float64(experts):
    reference = logits(experts, tokens())
    limit = compare_logits(reference, experts, tokens()).tolerance
    proof = compare_logits(reference + 1.5 * limit, experts, tokens())
    assert 0 < proof.rounding < 1e-3
    assert not proof.holds
    assert proof.note is None


def test_a_model_without_float64_gets_a_wider_tolerance(experts, monkeypatch):
    def fail(model, ids, keep):
        raise RuntimeError("this kernel has no float64\nand more")

    monkeypatch.setattr(fold_module, "_float64_logits", fail)
    reference = logits(experts, tokens())
    limit = compare_logits(reference, experts, tokens()).tolerance
    close = compare_logits(reference + 5 * limit, experts, tokens())
    assert close.holds
    assert "cannot run in float64 (this kernel has no float64), so 10 times" in close.note
    assert not compare_logits(reference + 15 * limit, experts, tokens()).holds


def bart() -> hf.PreTrainedModel:
    """A decoder that is deeper than its encoder: transformers' own cache is too short for it."""
    config = hf.BartConfig(
        vocab_size=128,
        d_model=32,
        encoder_layers=1,
        decoder_layers=3,
        decoder_attention_heads=4,
        encoder_attention_heads=4,
        decoder_ffn_dim=32,
        encoder_ffn_dim=32,
        max_position_embeddings=64,
    )
    return hf.BartForCausalLM(config).eval()


def test_positions_that_a_model_counts_itself_are_learned():
    layers = probe(bart())
    assert [layer.position for layer in layers] == ["learned"] * 3


def test_a_model_that_fails_with_a_cache_is_compared_without_one(monkeypatch):
    model = bart()
    changes = guard.difference(model, tokens(), seam.nothing_attached)
    assert changes == {"uncached": 0.0, "cached": 0.0}
    runs = iter([torch.zeros(1), None])
    monkeypatch.setattr(guard, "_cached_logits", lambda *args: next(runs))
    assert guard.difference(model, tokens(), seam.nothing_attached)["cached"] == float("inf")


def test_a_model_that_needs_more_than_text_is_refused_in_a_sentence():
    class NeedsImages(hf.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            raise ValueError("You have to specify pixel_values\nor give images")

    model = NeedsImages(hf.LlamaConfig(**SHAPE)).eval()
    reason = (
        "NeedsImages does not run on text alone \\(ValueError: You have to specify pixel_values"
    )
    with pytest.raises(FarspanError, match=reason):
        seam.install(model)
    assert any("on text alone" in warning for warning in farspan.inspect(model).warnings)


def test_a_hidden_table_of_positions_is_refused_before_a_search():
    config = hf.CTRLConfig(vocab_size=128, n_embd=32, dff=32, n_layer=2, n_head=4, n_positions=64)
    model = hf.CTRLLMHeadModel(config).eval()
    layers = probe(model)
    assert {layer.position for layer in layers} == {"sinusoidal"}
    _check_reads(model, layers, tokens(64, batch=1))
    with pytest.raises(FarspanError, match="cannot read 65 tokens .* table of positions ends"):
        _check_reads(model, layers, tokens(65, batch=1))


@pytest.mark.parametrize("name", ["max_position_embeddings", "max_target_positions"])
def test_a_learned_table_limits_a_model_by_either_name(name: str):
    """Whisper calls the length of its table max_target_positions."""
    learned, rotary = (SimpleNamespace(position=position) for position in ("learned", "rope"))
    config = hf.PreTrainedConfig(**{name: 64})
    assert max_positions(config, [rotary, learned]) == 64
    assert max_positions(config, [rotary]) is None
    assert max_positions(hf.PreTrainedConfig(), [learned]) is None
