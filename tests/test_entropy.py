"""Entropy is exact: every implementation equals float64 on every kind of call, and never below 0.

The bound allows 1e-5 nats plus the rounding of the scores: four float32 steps of Σ|q·k|, the sum of
the magnitudes in one score.
"""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

import tritonlike
from families import FAMILIES, Family, tokens
from farspan import attention
from farspan.attention import entropy as entropy_module
from farspan.attention import seam
from farspan.attention.entropy import (
    EntropyByPosition,
    chunked_entropy,
    entropy,
    reference_entropy,
)
from farspan.attention.probe import probe
from farspan.attention.scores import Entropy, Scores
from farspan.model.positions import AlibiBias, PlacedBias, T5Bias

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def bound(scores: Scores) -> float:
    group = scores.q.shape[1] // scores.k.shape[1]
    keys = scores.k.abs().double().repeat_interleave(group, 1)
    magnitude = (scores.q.abs().double() @ keys.transpose(-1, -2)).max().item()
    scale = torch.as_tensor(scores.scaling).max().item()
    return 1e-5 + 4 * torch.finfo(torch.float32).eps * (magnitude * scale)


def check(measured: Entropy, exact: Entropy, limit: float) -> None:
    assert measured.nats.min() >= -1e-6
    for field in ("nats", "lse"):
        actual, expected = getattr(measured, field).double(), getattr(exact, field)
        assert torch.equal(torch.isneginf(actual), torch.isneginf(expected))
        assert (actual - expected).nan_to_num(0, 0, 0).abs().max() <= limit, field


TERMS = ("causal", "window", "padding", "additive", "alibi", "t5")
TERMS += ("position_bias", "softcap", "sinks")


@st.composite
def calls(draw) -> dict:
    """Calls of any shape: grouped heads, cached keys, sharp or flat rows, bias, mask, window."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3)]))
    queries = draw(st.integers(1, 40))
    return {
        "shape": (
            draw(st.integers(1, 2)),
            kv_heads * group,
            kv_heads,
            queries,
            queries + draw(st.integers(0, 30)),
        ),
        "width": draw(st.sampled_from([16, 32, 64])),
        "sharpness": draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 12.0])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "term": draw(st.sampled_from(TERMS)),
        "per_head": draw(st.booleans()),
        "every": draw(st.sampled_from([1, 1, 3])),
        "budget": draw(st.sampled_from([1, 300, 1 << 22])),
        "seed": draw(st.integers(0, 1000)),
    }


def build(call: dict, device: str) -> Scores:
    torch.manual_seed(call["seed"])
    batch, heads, kv_heads, queries, keys = call["shape"]
    # Transposed from [B, length, H, D], the layout of projections.
    q = (torch.randn(batch, queries, heads, call["width"]) * call["sharpness"]).transpose(1, 2)
    k = torch.randn(batch, keys, kv_heads, call["width"]).transpose(1, 2)
    options: dict = {}
    rows, columns = torch.arange(queries) + keys - queries, torch.arange(keys)
    visible = (columns <= rows[:, None])[None, None]
    if call["term"] == "window":
        options["mask"] = visible & (columns > rows[:, None] - 5)
    elif call["term"] == "padding":
        options["mask"] = visible & (columns >= 2)  # the first queries may see nothing
    elif call["term"] == "additive":
        options["mask"] = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    elif call["term"] in ("alibi", "t5"):
        torch.manual_seed(0)
        rule = AlibiBias(heads) if call["term"] == "alibi" else T5Bias(heads, 32, 128)
        options["bias"] = PlacedBias(
            rule.to(device).requires_grad_(False)(keys), heads, rows.to(device), columns.to(device)
        )
    elif call["term"] == "position_bias":
        options["position_bias"] = torch.randn(1, heads, queries, keys).to(device)
    elif call["term"] == "softcap":
        options["softcap"] = 20.0
    elif call["term"] == "sinks":
        options["sinks"] = torch.randn(heads).to(device)
    if "mask" in options:
        options["mask"] = options["mask"].expand(batch, 1, -1, -1).to(device)
    scaling = torch.linspace(0.5, 2, heads, device=device) if call["per_head"] else 1.0
    q, k = (x.to(device, call["dtype"]) for x in (q, k))
    return Scores(q, k, scaling * call["width"] ** -0.5, **options)


@pytest.mark.parametrize("budget", [1, 900, 1 << 22])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("cached", [7, 0])
def test_a_window_without_a_mask_equals_its_mask(budget: int, every: int, cached: int):
    """Chunks leave out keys before the window; a bias is cut to the same keys."""
    torch.manual_seed(0)
    keys = 50 + cached
    q, k, bias = torch.randn(2, 4, 50, 16), torch.randn(2, 2, keys, 16), torch.randn(1, 4, 50, keys)
    distance = torch.arange(50)[:, None] + cached - torch.arange(keys)
    mask = ((distance >= 0) & (distance < 6)).expand(2, 1, -1, -1)
    exact = reference_entropy(Scores(q, k, 0.25, mask, position_bias=bias), every=every)
    scores = Scores(q, k, 0.25, position_bias=bias, window=6)
    check(chunked_entropy(scores, every=every, budget=budget), exact, 1e-5)


def test_chunks_of_a_window_are_as_large_as_memory_allows(monkeypatch):
    """Rows that see 64 keys need few chunks, also in a long text."""
    sizes, rows = [], Scores.rows

    def counted(self, *args):
        scores = rows(self, *args)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(Scores, "rows", counted)
    q, k = torch.randn(1, 2, 4096, 8), torch.randn(1, 2, 4096, 8)
    chunked_entropy(Scores(q, k, 0.3, window=64), budget=1 << 18)
    assert len(sizes) <= 13  # 128 in chunks for rows that see every key
    assert max(sizes) <= 1 << 18


def test_a_chunk_has_a_row_even_if_memory_allows_none():
    scores = Scores(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4), 1.0)
    for budget, rows in ((1, 1), (8, 1), (16, 2)):
        assert entropy_module._rows_within(scores, 1, budget) == rows


@pytest.mark.parametrize("supported", [False, True])
def test_kernels_compute_the_calls_that_they_support(supported: bool, monkeypatch):
    kernels = SimpleNamespace(supported=lambda scores, v: supported)
    monkeypatch.setattr(attention, "kernels", kernels, raising=False)
    scores = SimpleNamespace(q=SimpleNamespace(is_cuda=True), plain=True)
    assert entropy_module.supported_kernels(scores) is (kernels if supported else None)


def test_entropy_includes_position_bias_of_transformers():
    """Inkling passes its relative logits as `position_bias`; probe calls such layers unknown."""
    from transformers.models.inkling.configuration_inkling import InklingTextConfig

    shape = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = InklingTextConfig(
        **shape,
        **{f"swa_{name}": value for name, value in shape.items()},
        **dict(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            layer_types=["hybrid"] * 2,
            d_rel=4,
            rel_extent=32,
        ),
        **dict(
            mlp_layer_types=["dense"] * 2,
            intermediate_size=48,
            sliding_window_size=32,
            max_position_embeddings=64,
        ),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name:
                parameter.copy_(torch.randn_like(parameter) / 2)
    assert [layer.position for layer in probe(model)] == ["unknown", "unknown"]
    calls: list[seam.Call] = []
    with seam.observing(model, calls.append), torch.no_grad():
        model(input_ids=torch.randint(3, 64, (1, 24)), use_cache=False)
    call, bias = calls[0], calls[0].options["position_bias"]
    assert not Scores.from_call(call).plain
    scores = call.q @ call.k.repeat_interleave(2, 1).mT * call.scaling + bias
    future = torch.ones(24, 24, dtype=torch.bool).triu(1)
    weights = scores.double().masked_fill(future, -torch.inf).softmax(-1)
    expected = -torch.special.xlogy(weights, weights).sum(-1)
    assert (reference_entropy(Scores.from_call(call)).nats - expected).abs().max() < 1e-5
    assert (
        chunked_entropy(Scores.from_call(call), every=3).nats - expected[..., ::3]
    ).abs().max() < 1e-5


@pytest.mark.parametrize("queries", [1, 2, 3])
def test_several_queries_without_a_mask_see_no_empty_places_of_a_cache(queries):
    """They are causal from the first key; one query sees all keys."""
    calls: list[seam.Call] = []
    model = FAMILIES[0].build()
    with seam.observing(model, calls.append), torch.no_grad():
        model(input_ids=torch.arange(queries)[None], use_cache=False)
    call = calls[0]
    assert call.mask is None
    longer = replace(call, k=torch.cat((call.k, call.k), 2))
    expected = 2 if queries == 1 else queries
    assert Scores.from_call(longer).k.shape[2] == expected


def test_entropy_is_exact_under_autocast():
    """Cells of a study run in bf16 autocast on a GPU, where products of float32 would be bf16."""
    torch.manual_seed(0)
    q, k = (3 * torch.randn(1, heads, 96, 32).bfloat16() for heads in (4, 2))
    scores = Scores(q, k, 0.2, window=64)
    with torch.autocast("cpu", torch.bfloat16):
        check(chunked_entropy(scores), reference_entropy(scores), 1e-5)


@pytest.mark.parametrize("option", ["older", "newer"])
def test_entropy_keeps_tf32_set_by_either_torch_option(option: str):
    """In a fork, since torch does not allow both options in one process."""

    def check_option() -> None:
        torch.set_num_threads(1)  # a fork has no thread pool
        if option == "older":
            torch.set_float32_matmul_precision("high")
        else:
            torch.backends.fp32_precision = "tf32"
        before = torch.backends.cuda.matmul.fp32_precision
        chunked_entropy(Scores(torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16), 0.25))
        assert torch.backends.cuda.matmul.fp32_precision == before == "tf32"

    child = multiprocessing.get_context("fork").Process(target=check_option)
    child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_and_boolean_masks_are_equivalent(dtype: torch.dtype):
    """Also in float16, whose minimum is only −65,504. Queries 0 to 2 see no key."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    visible = torch.ones(12, 12, dtype=torch.bool).tril() & (torch.arange(12) >= 3)
    additive = torch.zeros(12, 12, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    expected, measured = (
        chunked_entropy(Scores(q, k, 0.25, mask=mask[None, None])) for mask in (visible, additive)
    )
    assert torch.equal(measured.lse, expected.lse)
    assert torch.equal(torch.isneginf(measured.lse[0, 0]), torch.arange(12) < 3)
    assert torch.allclose(measured.nats, expected.nats, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_entropy_is_exact(device: str, call: dict):
    scores, every = build(call, device), call["every"]
    exact = reference_entropy(scores, every=every)
    limit = bound(scores)
    check(entropy(scores, every=every), exact, limit)
    check(chunked_entropy(scores, every=every, budget=call["budget"]), exact, limit)


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_kernel_source_is_exact_without_a_gpu(call: dict):
    scores, every = build({**call, "term": "causal"}, "cpu"), call["every"]
    exact = reference_entropy(scores, every=every)
    v = torch.randn_like(scores.k)
    with tritonlike.installed() as kernels:
        for tiles in (kernels.Tiles(16, 16, 4, 2), kernels.Tiles(16, 32, 4, 2)):
            check(kernels.entropy(scores, every=every, tiles=tiles), exact, bound(scores))
        output, fused = kernels.attention(scores, v, tiles=kernels.Tiles(32, 16, 4, 2))
    check(fused, reference_entropy(scores), bound(scores))
    p = reference_rows(scores)
    expected = p @ v.double().repeat_interleave(p.shape[1] // v.shape[1], 1)
    limit = 2e-2 if call["dtype"] == torch.bfloat16 else 1e-4
    assert (output.double() - expected).abs().max() < limit


def reference_rows(scores: Scores) -> torch.Tensor:
    return scores.rows(0, scores.q.shape[2], 1, torch.float64).softmax(-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128])
def test_fused_attention_equals_sdpa_on_gpu(dtype, width: int):
    from farspan.attention import kernels

    q, k, v = (torch.randn(2, heads, 777, width, device="cuda", dtype=dtype) for heads in (8, 2, 2))
    scores = Scores(q, k, width**-0.5)
    output, measured = kernels.attention(scores, v)
    check(measured, reference_entropy(scores), bound(scores))
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert (output - sdpa).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_uniform_attention_over_n_keys_has_entropy_ln_n(device: str):
    q, k = torch.zeros(1, 2, 300, 32, device=device), torch.randn(1, 2, 300, 32, device=device)
    measured = entropy(Scores(q, k, 0.2))
    n = torch.arange(1, 301, device=device).double()
    assert (measured.nats.double() - n.log()).abs().max() < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_lose_no_precision(device: str):
    """One key of each row is 90 nats above the others (H is 0), or two are (H is ln 2)."""
    keys = torch.eye(64, device=device)[None, None]
    q = keys * 90.0
    assert entropy(Scores(q, keys, 1.0)).nats.abs().max() < 1e-6
    doubled = Scores(torch.cat((q, q), 2), torch.cat((keys, keys), 2), 1.0)
    assert (entropy(doubled).nats[0, 0, 64:] - math.log(2)).abs().max() < 1e-6


def test_entropy_from_attention_over_keys_would_be_inexact():
    """lse − λ·q·Attn(q, k, v:=k) needs no new kernel, but in bf16 it is 100 times the bound off."""
    torch.manual_seed(0)
    q, k = (4 * torch.randn(1, 2, 256, 64)).bfloat16(), torch.randn(1, 2, 256, 64).bfloat16()
    scores = Scores(q, k, 0.125)
    exact = reference_entropy(scores)
    mean_key = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    shortcut = exact.lse - 0.125 * (q.double() * mean_key.double()).sum(-1)
    assert (shortcut - exact.nats).abs().max() > 1e-2
    assert (entropy(scores).nats - exact.nats).abs().max() < 1e-4


def test_out_of_memory_halves_the_chunk_with_equal_results(monkeypatch, caplog):
    scores = Scores(torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16), 0.25)
    full = chunked_entropy(scores)
    compute = entropy_module._entropy_and_lse

    def run_out_of_memory(s):
        if s.shape[2] > 10:
            raise torch.OutOfMemoryError
        return compute(s)

    monkeypatch.setattr(entropy_module, "_entropy_and_lse", run_out_of_memory)
    chunked = chunked_entropy(scores)
    assert torch.allclose(chunked.nats, full.nats, atol=1e-6)
    assert "continuing with" in caplog.text


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_entropy_by_position_equals_the_mean_of_observed_calls(family: Family):
    model = family.build()
    calls: list[seam.Call] = []
    full, binned = EntropyByPosition(24), EntropyByPosition(24, bins=4)
    with (
        seam.observing(model, full),
        seam.observing(model, binned),
        seam.observing(model, calls.append),
    ):
        model(tokens(), use_cache=False)
        model(tokens(seed=7), use_cache=False)
    layers = sorted({call.layer for call in calls})
    assert full.layers == binned.layers == layers
    for layer in layers:
        nats = [
            reference_entropy(Scores.from_call(call)).nats for call in calls if call.layer == layer
        ]
        exact = torch.cat(nats).mean(0)
        assert (full.entropy[layer] - exact).abs().max() < 2e-5
        assert (binned.entropy[layer] - exact.unflatten(1, (4, 6)).mean(-1)).abs().max() < 2e-5


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize(
    "name", ["farspan-none", "farspan-alibi", "llama", "mistral", "gpt-oss", "kimi-linear"]
)
@torch.no_grad()
def test_fused_backend_equals_observing(name: str, with_kernels: bool, monkeypatch):
    model = next(family for family in FAMILIES if family.name == name).build()
    expected = model(tokens(), use_cache=False).logits
    observed, fused = EntropyByPosition(24), EntropyByPosition(24)
    with seam.observing(model, observed):
        model(tokens(), use_cache=False)
    used = []
    with tritonlike.installed() as kernels, seam.using(model, fused.fused_backend(model)):
        if with_kernels:  # as on CUDA, where the kernels compute plain causal calls

            def supported_kernels(scores: Scores, v: torch.Tensor | None = None):
                supported = v is not None and scores.plain and v.shape[-1] == scores.q.shape[-1]
                used.append(supported)
                return kernels if supported else None

            monkeypatch.setattr(entropy_module, "supported_kernels", supported_kernels)
            monkeypatch.setattr(kernels, "SMALL", kernels.Tiles(16, 16, 4, 2))
        logits = model(tokens(), use_cache=False).logits
    assert (logits - expected).abs().max() < 1e-5
    assert fused.layers == observed.layers
    for layer in fused.layers:
        assert (fused.entropy[layer] - observed.entropy[layer]).abs().max() < 2e-5
    if with_kernels and name in ("farspan-none", "llama"):
        assert all(used)


@torch.no_grad()
def test_entropy_by_position_ignores_padding():
    model = FAMILIES[0].build()
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :6] = 0
    unpadded, padded = EntropyByPosition(24), EntropyByPosition(24)
    with seam.observing(model, padded):
        model(tokens(), attention_mask=mask, use_cache=False)
    with seam.observing(model, unpadded):
        model(tokens()[1:], use_cache=False)
    assert torch.allclose(padded.entropy[0][:, :6], unpadded.entropy[0][:, :6], atol=1e-5)
    short = EntropyByPosition(18)
    with seam.observing(model, short):
        model(tokens()[:1, 6:], use_cache=False)
    # Without position encodings, padding does not change the entropy of the tokens after it.
    mean = (unpadded.entropy[0][:, 6:] + short.entropy[0]) / 2
    assert torch.allclose(padded.entropy[0][:, 6:], mean, atol=1e-5)


@pytest.mark.parametrize("rows", [(0, 1), (0,)], ids=["beside a longer text", "alone"])
@torch.no_grad()
def test_entropy_by_position_ignores_padding_after_a_text(rows):
    model, ids = FAMILIES[0].build(), tokens()[list(rows)]
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    padded, separate = EntropyByPosition(24), EntropyByPosition(24)
    with seam.observing(model, padded):
        model(ids, attention_mask=mask, use_cache=False)
    with seam.observing(model, separate):
        for row, length in zip(rows, (15, 24), strict=False):
            model(tokens()[row : row + 1, :length], use_cache=False)
    for layer, expected in separate.entropy.items():
        assert torch.allclose(padded.entropy[layer], expected, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("bins", [None, 4])
def test_queries_beyond_the_length_are_not_counted(bins: int | None):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8)
    short, whole = EntropyByPosition(16, bins=bins), EntropyByPosition(16, bins=bins)
    for profile, length in ((short, 24), (whole, 16)):
        first = q[:, :, :length], k[:, :, :length]
        profile(seam.Call(0, torch.nn.Identity(), *first, first[1], None, 0.35, {}))
    assert short.entropy[0].shape == (2, bins or 16)
    assert torch.allclose(short.entropy[0], whole.entropy[0], atol=1e-6)


def test_a_layer_may_have_one_head():
    profile = EntropyByPosition(4)
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    profile(seam.Call(0, torch.nn.Identity(), q, k, k, None, 0.35, {}))
    exact = reference_entropy(Scores(q, k, 0.35)).nats[0]
    assert torch.allclose(profile.entropy[0], exact, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("cached", [0, 3])
@pytest.mark.parametrize("rows", [(0, 1, 1), (2, 9, 1), (2, 9, 3), (5, 10, 2)])
def test_scores_are_of_the_keys_that_their_rows_see_and_no_more(rows, cached, window):
    keys = 10 + cached
    scores = Scores(torch.randn(1, 2, 10, 4), torch.randn(1, 1, keys, 4), 0.5, window=window)
    distance = torch.arange(10)[slice(*rows), None] + cached - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys))
    places = seen.any(0).nonzero()
    between = int(places.max() - places.min()) + 1  # a step may skip some
    assert scores.rows(*rows, torch.float32).shape == (1, 2, len(distance), between)


@pytest.mark.parametrize("term", ["softcap", "sinks"])
def test_scores_are_those_of_the_family_with_a_soft_cap_or_sinks(term: str):
    """Gemma 2 caps scores at ±cap·tanh(score / cap), gpt-oss adds a score for each head."""
    torch.manual_seed(0)
    q, k = 3 * torch.randn(2, 4, 6, 8).double(), 3 * torch.randn(2, 2, 6, 8).double()
    causal = torch.full((6, 6), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    module = torch.nn.Module().eval()
    module.num_key_value_groups, module.sinks = 2, torch.randn(4).double()
    option = {"softcap": 5.0} if term == "softcap" else {"sinks": module.sinks}
    family = modeling_gemma2 if term == "softcap" else modeling_gpt_oss
    options = option if term == "softcap" else {}
    values = torch.eye(6, dtype=q.dtype).expand(2, 2, -1, -1)  # the output is the weights
    added = torch.randn(2, 1, 6, 6).double().tril()
    additive = causal + added
    for mask, own_mask in ((causal.expand(2, 1, 6, 6), None), (additive, additive)):
        output, _ = family.eager_attention_forward(
            module, q, k, values, mask, scaling=0.3, **options
        )
        scores = Scores(q, k, 0.3, own_mask, **option)
        rows = scores.rows(0, 6, 1, q.dtype)
        assert torch.allclose(rows.softmax(-1)[..., :6], output.transpose(1, 2), atol=1e-7)
        assert not scores.plain
    assert Scores(q, k, 0.3).plain


@pytest.mark.parametrize("term", ["bias", "position_bias"])
def test_biases_are_added_to_the_scores(term: str):
    """ALiBi's −2^(−8h/H)·distance, by either argument; two keys were cached."""
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8)
    distance = torch.arange(2, 5)[:, None] - torch.arange(5)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    expected = -slopes[:, None, None] * distance
    bias = PlacedBias(AlibiBias(4)(5), 4, torch.arange(2, 5), torch.arange(5))
    added = Scores(q, k, 0.3, **{term: bias if term == "bias" else expected[None]})
    change = (added.rows(0, 3, 1, q.dtype) - Scores(q, k, 0.3).rows(0, 3, 1, q.dtype))[0]
    assert torch.allclose(change, expected.masked_fill(distance < 0, 0.0), atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_generated_tokens_count_at_their_positions(cache: str | None):
    model = FAMILIES[0].build()
    generated, full = EntropyByPosition(32), EntropyByPosition(32)
    options = {"cache_implementation": cache} if cache else {}
    with seam.observing(model, generated):
        ids = model.generate(tokens(20), max_new_tokens=6, do_sample=False, **options)
    with seam.observing(model, full):
        model(ids[:, :-1], use_cache=False)  # the last token is never an input
    for layer in full.layers:
        assert torch.allclose(
            generated.entropy[layer], full.entropy[layer], atol=1e-5, equal_nan=True
        )
        assert torch.isfinite(full.entropy[layer]).sum(1).tolist() == [25] * 4


def test_memory_grows_with_length_and_not_with_its_square():
    """Peak memory at 1K and 8K tokens, with a budget of all scores at 1K."""
    peaks = {}
    for length in (1024, 8192):
        scores = Scores(torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16), 0.25)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            chunked_entropy(scores, budget=1 << 20)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        peaks[length] = peak
    assert peaks[8192] < 8 * peaks[1024]
    assert peaks[8192] < 4 * 8192 * 8192 / 10, "a tenth of one materialized float32 matrix"
