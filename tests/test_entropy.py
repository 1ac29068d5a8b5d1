"""Entropy is exact: every implementation against float64, on every kind of call, and never below zero.

The bound allows 1e-5 nats, and the rounding of the scores themselves: four float32 steps of Σ|q·k|, the sum of
the magnitudes that make up one score.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import tritonlike
from families import FAMILIES, Family, tokens
from farspan.attention import entropy as entropies
from farspan.attention import seam
from farspan.attention.entropy import EntropyByPosition, Scores, chunked_entropy, entropy, reference_entropy
from farspan.attention.probe import probe
from farspan.model.positions import AlibiBias, PlacedBias, T5Bias

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FIELDS = ("nats", "lse", "sink")


def bound(scores: Scores) -> float:
    group = scores.q.shape[1] // scores.k.shape[1]
    magnitude = scores.q.abs().double() @ scores.k.abs().double().repeat_interleave(group, 1).transpose(-1, -2)
    scale = scores.scaling if not isinstance(scores.scaling, torch.Tensor) else scores.scaling.max().item()
    return 1e-5 + 4 * torch.finfo(torch.float32).eps * (magnitude.max().item() * scale)


def check(found, exact, limit: float) -> None:
    assert found.nats.min() >= -1e-6
    for field in FIELDS:
        here, there = getattr(found, field).double(), getattr(exact, field)
        assert torch.equal(torch.isinf(here), torch.isinf(there))
        assert (here - there).nan_to_num(0, 0, 0).abs().max() <= limit, field
    if found.variance is not None:
        off = (found.variance.double() - exact.variance).abs() / (1 + exact.variance)
        assert off.max() <= 20 * limit, "variance"


@st.composite
def calls(draw) -> dict:
    """Any shape of call: groups of heads, chunks after a cache, sharp and flat rows, biases, masks, windows."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3)]))
    queries = draw(st.integers(1, 40))
    return {
        "shape": (draw(st.integers(1, 2)), kv_heads * group, kv_heads, queries, queries + draw(st.integers(0, 30))),
        "width": draw(st.sampled_from([16, 32, 64])),
        "sharpness": draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 12.0])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "extra": draw(
            st.sampled_from(["causal", "window", "padding", "additive", "alibi", "t5", "added", "softcap", "sinks"])
        ),
        "per_head": draw(st.booleans()),
        "every": draw(st.sampled_from([1, 1, 3])),
        "budget": draw(st.sampled_from([1, 300, 1 << 22])),
        "seed": draw(st.integers(0, 1000)),
    }


def build(call: dict, device: str) -> Scores:
    torch.manual_seed(call["seed"])
    batch, heads, kv_heads, queries, keys = call["shape"]
    # [B, length, H, D] seen from the other side, as projections leave them.
    q = (torch.randn(batch, queries, heads, call["width"]) * call["sharpness"]).transpose(1, 2)
    k = torch.randn(batch, keys, kv_heads, call["width"]).transpose(1, 2)
    options: dict = {}
    rows, columns = torch.arange(queries) + keys - queries, torch.arange(keys)
    visible = (columns <= rows[:, None])[None, None]
    if call["extra"] == "window":
        options["mask"] = visible & (columns > rows[:, None] - 5)
    elif call["extra"] == "padding":
        options["mask"] = visible & (columns >= 2)  # the first queries may see nothing
    elif call["extra"] == "additive":
        options["mask"] = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    elif call["extra"] in ("alibi", "t5"):
        torch.manual_seed(0)
        rule = AlibiBias(heads) if call["extra"] == "alibi" else T5Bias(heads, 32, 128)
        options["bias"] = PlacedBias(
            rule.to(device).requires_grad_(False)(keys), heads, rows.to(device), columns.to(device)
        )
    elif call["extra"] == "added":
        options["added"] = torch.randn(1, heads, queries, keys).to(device)
    elif call["extra"] == "softcap":
        options["softcap"] = 20.0
    elif call["extra"] == "sinks":
        options["sinks"] = torch.randn(heads).to(device)
    if "mask" in options:
        options["mask"] = options["mask"].expand(batch, 1, -1, -1).to(device)
    scaling = torch.linspace(0.5, 2, heads, device=device) if call["per_head"] else 1.0
    q, k = (x.to(device, call["dtype"]) for x in (q, k))
    return Scores(q, k, scaling * call["width"] ** -0.5, **options)


def test_what_transformers_adds_to_scores_by_position_counts():
    """Inkling's relative logits come as `position_bias`: entropy is that of the attention, and no layer is free."""
    from transformers.models.inkling.configuration_inkling import InklingTextConfig

    shape = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = InklingTextConfig(
        **shape,
        **{f"swa_{name}": value for name, value in shape.items()},
        **dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, layer_types=["hybrid"] * 2, d_rel=4, rel_extent=32),
        **dict(mlp_layer_types=["dense"] * 2, intermediate_size=48, sliding_window_size=32, max_position_embeddings=64),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name:
                parameter.copy_(torch.randn_like(parameter) / 2)
    assert [layer.position for layer in probe(model)] == ["unknown", "unknown"]
    seen: list = []
    with seam.observing(model, seen.append), torch.no_grad():
        model(input_ids=torch.randint(3, 64, (1, 24)), use_cache=False)
    call, bias = seen[0], seen[0].options["position_bias"]
    assert not Scores.of(call).plain
    scores = call.q @ call.k.repeat_interleave(2, 1).mT * call.scaling + bias
    weights = scores.double().masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    expected = -torch.special.xlogy(weights, weights).sum(-1)
    assert (reference_entropy(Scores.of(call)).nats - expected).abs().max() < 1e-5
    assert (chunked_entropy(Scores.of(call), every=3).nats - expected[..., ::3]).abs().max() < 1e-5


@pytest.mark.parametrize("setting", ["older", "newer"])
def test_products_are_exact_whichever_way_a_caller_made_them_quick(setting):
    script = f"""
import torch
from farspan.attention.entropy import Scores, chunked_entropy
if {setting!r} == "older":
    torch.set_float32_matmul_precision("high")
else:
    torch.backends.fp32_precision = "tf32"
before = torch.backends.cuda.matmul.fp32_precision
chunked_entropy(Scores(torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16), 0.25))
assert torch.backends.cuda.matmul.fp32_precision == before == "tf32"
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_that_adds_hides_what_a_boolean_one_hides(dtype: torch.dtype):
    """The least number of float16 is not very small; and a query that sees nothing has no entropy to count."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    seen = torch.ones(12, 12, dtype=torch.bool).tril() & (torch.arange(12) >= 3)
    added = torch.zeros(12, 12, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    expected, found = (chunked_entropy(Scores(q, k, 0.25, mask=mask[None, None])) for mask in (seen, added))
    assert torch.equal(found.lse, expected.lse)
    assert torch.equal(torch.isfinite(found.lse[0, 0]), torch.arange(12) >= 3)
    assert torch.allclose(found.nats, expected.nats, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_entropy_is_exact(device: str, call: dict):
    scores = build(call, device)
    exact = reference_entropy(scores, every=call["every"], variance=True)
    limit = bound(scores)
    check(entropy(scores, every=call["every"], variance=True), exact, limit)
    check(chunked_entropy(scores, every=call["every"], variance=True, budget=call["budget"]), exact, limit)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_the_kernels_own_source_is_exact_without_a_gpu(call: dict):
    call = {**call, "extra": "causal"}
    scores = build(call, "cpu")
    exact = reference_entropy(scores, every=call["every"], variance=True)
    v = torch.randn_like(scores.k)
    with tritonlike.installed() as kernels:
        for tiles in (kernels.Tiles(16, 16, 4, 2), kernels.Tiles(16, 32, 4, 2)):
            found = kernels.entropy(scores, every=call["every"], variance=True, tiles=tiles)
            check(found, exact, bound(scores))
        output, fused = kernels.attention(scores, v, variance=True, tiles=kernels.Tiles(32, 16, 4, 2))
    check(fused, reference_entropy(scores, variance=True), bound(scores))
    p = reference_rows(scores)
    wanted = p @ v.double().repeat_interleave(p.shape[1] // v.shape[1], 1)
    assert (output.double() - wanted).abs().max() < (2e-2 if call["dtype"] == torch.bfloat16 else 1e-4)


def reference_rows(scores: Scores) -> torch.Tensor:
    return scores.rows(0, scores.q.shape[2], 1, torch.float64).softmax(-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128])
def test_fused_attention_on_the_device_equals_sdpa(dtype, width: int):
    from farspan.attention import kernels

    q, k, v = (torch.randn(2, heads, 777, width, device="cuda", dtype=dtype) for heads in (8, 2, 2))
    scores = Scores(q, k, width**-0.5)
    output, found = kernels.attention(scores, v)
    check(found, reference_entropy(scores), bound(scores))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (output - sdpa).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_uniform_attention_looks_at_n_keys(device: str):
    scores = Scores(torch.zeros(1, 2, 300, 32, device=device), torch.randn(1, 2, 300, 32, device=device), 0.2)
    found = entropy(scores, variance=True)
    n = torch.arange(1, 301, device=device).double()
    assert (found.nats.double() - n.log()).abs().max() < 1e-6
    assert (found.keys.double() / n - 1).abs().max() < 1e-5
    assert (found.sink.double() - 1 / n).abs().max() < 1e-6
    assert found.variance.abs().max() < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_scores_up_to_ninety_lose_nothing(device: str):
    """One key of each row stands 90 nats above the rest, or two share the top: H is 0, or ln 2."""
    keys = torch.eye(64, device=device)[None, None]
    q = keys * 90.0
    found = entropy(Scores(q, keys, 1.0))
    assert found.nats.abs().max() < 1e-6
    two = torch.cat((keys, keys), 2)
    found = entropy(Scores(torch.cat((q, q), 2), two, 1.0))
    assert (found.nats[0, 0, 64:] - math.log(2)).abs().max() < 1e-6


def test_variance_is_how_entropy_falls_with_sharpness():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 20, 16).double(), torch.randn(1, 2, 20, 16).double()
    step = 1e-5
    above, below = (reference_entropy(Scores(q, k, 0.25 * (1 + sign * step))).nats for sign in (1, -1))
    slope = (above - below) / (2 * step)
    assert (slope + reference_entropy(Scores(q, k, 0.25), variance=True).variance).abs().max() < 1e-6


def test_the_shortcut_by_values_would_be_wrong():
    """lse − λ·q·Attn(q, k, v:=k) needs no new kernel and is off by a hundred times our bound in bf16."""
    torch.manual_seed(0)
    q, k = (4 * torch.randn(1, 2, 256, 64)).bfloat16(), torch.randn(1, 2, 256, 64).bfloat16()
    scores = Scores(q, k, 0.125)
    exact = reference_entropy(scores)
    mean_key = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    shortcut = exact.lse - 0.125 * (q.double() * mean_key.double()).sum(-1)
    assert (shortcut - exact.nats).abs().max() > 1e-2
    assert (entropy(scores).nats - exact.nats).abs().max() < 1e-4


def test_out_of_memory_halves_the_chunk_and_changes_nothing(monkeypatch, caplog):
    scores = Scores(torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16), 0.25)
    whole = chunked_entropy(scores)
    real = entropies._moments

    def small_machine(s):
        if s.shape[2] > 10:
            raise torch.OutOfMemoryError
        return real(s)

    monkeypatch.setattr(entropies, "_moments", small_machine)
    found = chunked_entropy(scores)
    assert torch.allclose(found.nats, whole.nats, atol=1e-6)
    assert "going on with" in caplog.text


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_an_observer_profiles_any_model(family: Family):
    """Against probabilities that are materialised from what the seam shows."""
    model = family.build()
    seen: list[seam.Call] = []
    full, binned = EntropyByPosition(24), EntropyByPosition(24, bins=4)
    with seam.observing(model, full), seam.observing(model, binned), seam.observing(model, seen.append):
        model(tokens(), use_cache=False)
        model(tokens(seed=7), use_cache=False)
    layers = sorted({call.layer for call in seen})
    assert full.layers == binned.layers == layers
    for layer in layers:
        mine = [reference_entropy(Scores.of(call)) for call in seen if call.layer == layer]
        exact = torch.cat([each.nats for each in mine]).mean(0)
        assert (full.entropy[layer] - exact).abs().max() < 2e-5
        assert (binned.entropy[layer] - exact.unflatten(1, (4, 6)).mean(-1)).abs().max() < 2e-5
        sink = torch.cat([each.sink for each in mine]).mean(0)
        assert (full.sink[layer] - sink).abs().max() < 2e-5


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("name", ["farspan-none", "farspan-alibi", "llama", "mistral", "gpt-oss", "kimi-linear"])
@torch.no_grad()
def test_a_fused_backend_computes_the_same_and_profiles_on_the_way(name: str, with_kernels: bool, monkeypatch):
    model = next(family for family in FAMILIES if family.name == name).build()
    expected = model(tokens(), use_cache=False).logits
    watched, fused = EntropyByPosition(24), EntropyByPosition(24)
    with seam.observing(model, watched):
        model(tokens(), use_cache=False)
    used = []
    with tritonlike.installed() as kernels, seam.using(model, fused.fused(model)):
        if with_kernels:  # as on a device, where plain causal calls go to the kernels

            def those(scores: Scores, v: torch.Tensor | None = None):
                fits = v is not None and scores.plain and v.shape[-1] == scores.q.shape[-1]
                used.append(fits)
                return kernels if fits else None

            monkeypatch.setattr(entropies, "kernels_for", those)
            monkeypatch.setattr(kernels, "SMALL", kernels.Tiles(16, 16, 4, 2))
        logits = model(tokens(), use_cache=False).logits
    assert (logits - expected).abs().max() < 1e-5
    assert fused.layers == watched.layers
    for layer in fused.layers:
        assert (fused.entropy[layer] - watched.entropy[layer]).abs().max() < 2e-5
        assert (fused.sink[layer] - watched.sink[layer]).abs().max() < 1e-4
    if with_kernels and name in ("farspan-none", "llama"):
        assert all(used)


@torch.no_grad()
def test_padding_does_not_count():
    model = FAMILIES[0].build()
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :6] = 0
    alone, padded = EntropyByPosition(24), EntropyByPosition(24)
    with seam.observing(model, padded):
        model(tokens(), attention_mask=mask, use_cache=False)
    with seam.observing(model, alone):
        model(tokens()[1:], use_cache=False)
    assert torch.allclose(padded.entropy[0][:, :6], alone.entropy[0][:, :6], atol=1e-5)
    other = EntropyByPosition(18)
    with seam.observing(model, other):
        model(tokens()[:1, 6:], use_cache=False)
    both = (alone.entropy[0][:, 6:] + other.entropy[0]) / 2  # without positions, padding changes nothing
    assert torch.allclose(padded.entropy[0][:, 6:], both, atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_generated_tokens_are_profiled_where_they_stand(cache: str | None):
    model = FAMILIES[0].build()
    generated, whole = EntropyByPosition(32), EntropyByPosition(32)
    options = {"cache_implementation": cache} if cache else {}
    with seam.observing(model, generated):
        ids = model.generate(tokens(20), max_new_tokens=6, do_sample=False, **options)
    with seam.observing(model, whole):
        model(ids[:, :-1], use_cache=False)  # the last token is made and never read
    for layer in whole.layers:
        assert torch.allclose(generated.entropy[layer], whole.entropy[layer], atol=1e-5, equal_nan=True)
        assert torch.isfinite(whole.entropy[layer]).sum(1).tolist() == [25] * 4


def test_memory_grows_with_length_and_not_with_its_square():
    """The most memory ever held while entropies of 2K to 16K tokens are computed."""
    peaks = {}
    for length in (2048, 4096, 8192, 16384):
        scores = Scores(torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16), 0.25)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            entropy(scores)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        peaks[length] = peak
    assert peaks[16384] < 8 * peaks[2048]
    assert peaks[16384] < 4 * 16384 * 16384 / 10, "a tenth of one materialised float32 matrix"
