"""Growing scales as stock checkpoints: Llama 4 and Ministral 3 compute what the live model does.

The bases of the heads are in the weights and the growth is in the config. What neither class can
hold is refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, DynamicCache

import farspan
from families import FAMILIES, SHAPE, Family, tokens
from farspan.attention import seam
from farspan.attention.layout import Layout
from farspan.attention.model_facts import default_scaled_layers
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.errors import FarspanError, ProofError
from farspan.formats import growth as growth_module
from farspan.methods.fit import make_fit_job
from farspan.methods.headscale import headlog
from farspan.methods.search_config import SearchConfig
from farspan.model import FarspanConfig

FLOOR, LENGTH, TARGET = 16, 53, 256  # of 53 tokens, those from 16, 32 and 48 on are scaled more
TOLERANCE = 2e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": FLOOR}
HYBRID = ["rope", "none", "rope", "none"]
BIASED = {**SHAPE, "attention_bias": True}
EXTRA = {
    "llama-mlp-bias": lambda: hf.LlamaConfig(**SHAPE, mlp_bias=True),
    "llama-gelu": lambda: hf.LlamaConfig(
        **{**SHAPE, "head_dim": 16},
        rms_norm_eps=1e-3,
        hidden_act="gelu",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "mistral-global": lambda: hf.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: hf.Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "smollm3-bias": lambda: hf.SmolLM3Config(**BIASED),
    "farspan-unscaled": lambda: FarspanConfig(**SHAPE, position=["none", "rope"], base_scale=1.0),
    "farspan-rope-unscaled": lambda: FarspanConfig(**SHAPE, position="rope", base_scale=1.0),
}
LLAMA4 = {
    "farspan-none": {},
    "farspan-hybrid": {},
    "farspan-unscaled": {"rope": YARN},
    "smollm3": {"weights": {"model.norm.weight": torch.linspace(0.5, 2, 32)}},
    "smollm3-bias": {},
    "llama-gelu": {"layout": Layout.parse(HYBRID)},
    "qwen2": {"layout": Layout.parse(HYBRID)},
    "farspan-rope": {"rope": {"rope_type": "none"}},
}
MINISTRAL3 = {
    "llama": {"rope": YARN},
    "llama-gelu": {},
    "mistral-global": {"rope": {"rope_type": "dynamic", "factor": 4.0}},
    "farspan-rope": {},
    "farspan-rope-unscaled": {"rope": {"rope_type": "linear", "factor": 2.0}},
}
EXACT = {f"llama4:{name}": parts for name, parts in LLAMA4.items()} | {
    f"ministral3:{name}": parts for name, parts in MINISTRAL3.items()
}
CLASSES = {"llama4": hf.Llama4ForCausalLM, "ministral3": hf.Ministral3ForCausalLM}
BASES = {"llama4": "floor", "ministral3": "floor-position"}


def build(name: str) -> hf.PreTrainedModel:
    if name in EXTRA:
        return Family(name, EXTRA[name], (), None).build()
    return next(family for family in FAMILIES if family.name == name).build()


def growing(layers, heads: int = 4, basis: str = "floor", rate: float = 0.4) -> Scales:
    base = 0.8 + torch.rand(len(layers), heads, generator=torch.Generator().manual_seed(3))
    return Scales(tuple(layers), base, rate * base, basis, FLOOR)


def save_patch(folder: Path, name: str, scales=growing, **parts) -> Path:
    """A patch with growing scales on the default layers, saved beside its tiny base model."""
    model = build(name)
    model.save_pretrained(folder / "base")
    patch = Patch("headlog", fingerprint(model), TARGET, FLOOR, name=str(folder / "base"), **parts)
    layers = default_scaled_layers(probe(patch.apply(model)))
    return replace(patch, scales=scales(layers)).save(folder / "patch")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A live model and the folder of its stock export by name; each is made once."""

    @cache
    def make(case: str) -> tuple[hf.PreTrainedModel, Path]:
        kind, name = case.split(":")
        folder = tmp_path_factory.mktemp(case.replace(":", "-"))
        patch = save_patch(folder, name, lambda rows: growing(rows, 4, BASES[kind]), **EXACT[case])
        done = farspan.export(patch, folder / "stock", "stock")
        assert set(done.proofs) == {"inside", "beyond"}
        return farspan.load(patch).model, done.folder

    return make


def in_chunks(model: hf.PreTrainedModel, ids: torch.Tensor, size: int) -> torch.Tensor:
    past, parts = DynamicCache(config=model.config), []
    for piece in ids.split(size, dim=1):
        parts.append(model(piece, past_key_values=past, use_cache=True).logits)
    return torch.cat(parts, dim=1)


# Stock equals live


QUICK = ("llama4:farspan-hybrid", "llama4:qwen2", "ministral3:llama")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == QUICK[-1] else pytest.mark.long) for case in EXACT],
)
@torch.no_grad()
def test_stock_equals_live_with_every_cache(case: str, exported):
    live, folder = exported(case)
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(stock) is CLASSES[case.partition(":")[0]]
    ids = tokens(LENGTH)
    dynamic = EXACT[case].get("rope", {}).get("rope_type") == "dynamic"
    expected = live(ids, use_cache=False).logits
    assert (stock(ids, use_cache=False).logits - expected).abs().max() < TOLERANCE
    for size in (7, 1):
        # Dynamic rotation changes as the cache grows, so live and stock are fed alike.
        reference = in_chunks(farspan.load(folder.parent / "patch").model, ids, size)
        assert (in_chunks(stock, ids, size) - reference).abs().max() < TOLERANCE
        assert dynamic or (reference - expected).abs().max() < TOLERANCE
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    continued = live.generate(ids, **options).tolist()
    for cache_options in ({}, {"cache_implementation": "static"}):
        stock = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert stock.generate(ids, **options, **cache_options).tolist() == continued


@pytest.mark.parametrize("case", QUICK)
@torch.no_grad()
def test_growth_and_bases_both_have_an_effect(case: str, exported):
    """Otherwise equality would prove little."""
    live, folder = exported(case)
    expected = live(tokens(LENGTH), use_cache=False).logits
    scales = Patch.load(folder.parent / "patch").scales
    for wrong in (
        Scales(scales.layers, scales.base),
        replace(scales, length=FLOOR + 1),
        replace(
            scales, base=torch.ones_like(scales.base), slope=0.4 * torch.ones_like(scales.base)
        ),
    ):
        seam.install(live, wrong)
        changed = live(tokens(LENGTH), use_cache=False).logits
        assert (changed - expected).abs().max() > 5 * TOLERANCE
    seam.install(live, scales)


@pytest.mark.parametrize("case", ["llama4:farspan-hybrid", "ministral3:llama"])
@torch.no_grad()
def test_padding_in_a_batch(case: str, exported):
    """On the right it changes nothing. On the left, Llama 4 counts it as keys; the live model and
    Ministral 3 do not."""
    live, folder = exported(case)
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    padding, ids = torch.zeros(2, 6, dtype=torch.long), tokens(LENGTH)
    for left in (False, True):
        joined = torch.cat((padding, ids) if left else (ids, padding), dim=1)
        mask = (joined != 0).long()
        options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        expected, padded = (
            model(joined, **options, use_cache=False).logits[mask.bool()] for model in (live, stock)
        )
        counted = left and case.startswith("llama4")
        assert ((padded - expected).abs().max() > 20 * TOLERANCE) == counted


def test_stock_configs_hold_the_growth(exported):
    config = json.loads((exported("llama4:qwen2")[1] / "config.json").read_text())
    assert config["model_type"] == "llama4_text"
    assert config["attn_temperature_tuning"] is True
    assert config["attn_scale"] == pytest.approx(0.4, rel=1e-6)
    assert config["floor_scale"] == FLOOR
    assert config["no_rope_layers"] == [1, 0, 1, 0]
    assert config["layer_types"] == ["full_attention"] * 4
    assert config["moe_layers"] == []
    assert config["use_qk_norm"] is False
    assert config["max_position_embeddings"] == TARGET
    config = json.loads((exported("ministral3:llama")[1] / "config.json").read_text())
    assert config["model_type"] == "ministral3"
    assert config["rope_parameters"]["llama_4_scaling_beta"] == pytest.approx(0.4, rel=1e-6)
    assert config["rope_parameters"].items() >= YARN.items()
    assert config["sliding_window"] is None


@pytest.mark.long
def test_model_card_and_inspect_say_where_the_growth_is(exported):
    _, llama4 = exported("llama4:farspan-none")
    card = (llama4 / "README.md").read_text()
    assert "growing by the basis `floor` as base·(1 + 0.4·basis) in all heads" in card
    assert "`attn_scale` and `floor_scale`" in card
    assert "pad on the right" in card
    (note,) = farspan.inspect(llama4).warnings
    assert "1 + 0.4·ln(1 + ⌊n/16⌋) in layers 0–3" in note
    _, ministral3 = exported("ministral3:llama")
    assert "`llama_4_scaling_beta`" in (ministral3 / "README.md").read_text()
    (note,) = farspan.inspect(ministral3).warnings
    assert "1 + 0.4·ln(1 + ⌊p/16⌋)" in note


def test_no_layer_of_a_llama_4_has_chunks():
    """Engines cut the context of its rotary layers by this number; the longest has 10M tokens."""
    model = build("smollm3")
    layers = default_scaled_layers(probe(model))
    config = growth_module.model_with_growth(model, growing(layers)).config
    assert config.model_type == "llama4_text"
    assert config.attention_chunk_size > 10_000_000


@pytest.mark.parametrize(
    ("config", "title"), [(hf.Llama4TextConfig, "Llama 4"), (hf.Ministral3Config, "Ministral 3")]
)
def test_a_card_names_the_class_and_keys_of_its_config(config, title):
    text = growth_module.describe_growth(config())
    assert text.startswith(f"The checkpoint is a {title}")
    fields = config().to_dict()
    known = {*fields, *fields["rope_parameters"]}
    named = re.findall(r"`(\w+)`", text)
    assert len(named) > 1
    assert set(named) <= known


@pytest.mark.long
def test_stock_runs_in_a_process_without_farspan(exported, tmp_path):
    folders = {case: str(exported(case)[1]) for case in EXACT}
    script = f"""
import sys
sys.modules["farspan"] = None  # any import of it now fails
import torch, transformers
ids = torch.tensor({tokens(LENGTH).tolist()})
logits = {{}}
for name, folder in {folders!r}.items():
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        logits[name] = model(ids, use_cache=False).logits
torch.save(logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-I", "-c", script], check=True)
    stock = torch.load(tmp_path / "logits.pt")
    for case in EXACT:
        with torch.no_grad():
            expected = exported(case)[0](tokens(LENGTH), use_cache=False).logits
        assert (stock[case] - expected).abs().max() < TOLERANCE, case


@pytest.mark.parametrize("change", ["rate", "length", "order"])
def test_proof_detects_an_export_that_is_almost_right(change: str, tmp_path, monkeypatch):
    config = growth_module.Llama4TextConfig

    def wrong(**values):
        values["attn_scale"] *= 1.01 if change == "rate" else 1
        values["floor_scale"] += change == "length"
        return config(**values)

    if change == "order":  # rotation of the wrong pairs
        weights = growth_module._llama4_weights
        monkeypatch.setattr(growth_module, "_llama4_weights", lambda w, _, c: weights(w, [], c))
    else:
        monkeypatch.setattr(growth_module, "Llama4TextConfig", wrong)
    patch = save_patch(tmp_path, "farspan-hybrid")
    with pytest.raises(ProofError, match="the stock export differs from the live model"):
        farspan.export(patch, tmp_path / "out", "stock")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


# What headlog fits


FITTING = {
    "farspan-none": "Llama4ForCausalLM",
    "farspan-hybrid": "Llama4ForCausalLM",
    "smollm3": "Llama4ForCausalLM",
    "farspan-rope": "Ministral3ForCausalLM",
    "llama": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",  # its windows are shorter than L, so nothing grows
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_headlog_shares_becomes_stock_or_is_refused(family: Family, tmp_path):
    model = family.build()
    layers, ids = probe(model), tokens(40, batch=4)
    job = make_fit_job(model, layers, 2 * FLOOR, FLOOR, ids, ids[:, : 2 * FLOOR])
    search = SearchConfig(
        steps=2,
        batch=2,
        micro_batch=2,
        lr=(0.2,),
        warmup=0,
        init=1.3,
        constraint=False,
        shared=True,
    )
    patch = headlog(model, job, search)
    assert patch.scales.base.std() > 0
    model.save_pretrained(tmp_path / "base")
    replace(patch, name=str(tmp_path / "base")).save(tmp_path / "patch")
    if family.name not in FITTING:
        with pytest.raises(FarspanError, match="; .*live"):
            farspan.export(tmp_path / "patch", tmp_path / "out", "stock")
        assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}
        return
    assert patch.scales.constant == (family.name == "mistral")
    done = farspan.export(tmp_path / "patch", tmp_path / "out", "stock")
    assert max(proof.max_abs_logit for proof in done.proofs.values()) < TOLERANCE
    assert done.proofs["beyond"].tokens > 0
    config = json.loads((done.folder / "config.json").read_text())
    assert config["architectures"] == [FITTING[family.name]]


def test_a_shared_search_ends_at_a_plateau_and_refuses_to_start_from_scales():
    model = next(family for family in FAMILIES if family.name == "farspan-none").build()
    ids = tokens(40, batch=4)
    job = make_fit_job(model, probe(model), 2 * FLOOR, FLOOR, ids, ids[:, : 2 * FLOOR])
    scales = headlog(model, job, SearchConfig(shared=True)).scales
    assert scales.base.std() > 0
    assert 0 < job.details["searches"][0]["steps"] < 200
    job = replace(job, start=scales, start_name="patch")
    with pytest.raises(FarspanError, match="shared=true cannot start from the scales of patch"):
        headlog(model, job, SearchConfig(shared=True))


# What is refused


def different_rates(layers) -> Scales:
    scales = growing(layers)
    return replace(scales, slope=scales.slope * torch.linspace(1, 1.00001, 4))


@pytest.mark.parametrize(
    ("name", "scales", "parts", "message"),
    [
        ("farspan-none", different_rates, {}, "different rates, and Llama 4 has one for all"),
        (
            "farspan-none",
            lambda rows: growing(rows, basis="log"),
            {},
            "'log' grow with the context",
        ),
        ("farspan-none", lambda rows: growing(rows, basis="ln"), {}, "'ln' grow with the"),
        (
            "farspan-none",
            lambda rows: growing(rows[:3]),
            {},
            r"all layers without rotation and no others, here \[0, 1, 2, 3\], and .* \[0, 1, 2\]",
        ),
        ("llama", growing, {}, r"no others, here \[\], and the patch scales \[0, 1, 2, 3\]"),
        (
            "farspan-hybrid",
            lambda rows: growing((*rows, 0), basis="floor-position"),
            {},
            "rotates and scales every layer, and of these 4 layers 3 rotate and 2 have scales",
        ),
        (
            "llama",
            lambda rows: growing(rows[1:], basis="floor-position"),
            {},
            "of these 4 layers 4 rotate and 3 have scales",
        ),
        (
            "llama-bias",
            lambda rows: growing(rows, basis="floor-position"),
            {},
            "no biases, which those of this llama model have",
        ),
        (
            "llama-mlp-bias",
            lambda rows: growing(rows, basis="floor-position"),
            {},
            "its MLP has no biases",
        ),
        (
            "llama",
            lambda rows: growing(rows, basis="floor-position"),
            {"rope": {**YARN, "original_max_position_embeddings": 64}},
            "scaled from 64 tokens and the scales grow from 16",
        ),
        (
            "mistral",
            lambda rows: growing(rows, basis="floor-position"),
            {},
            "Ministral 3 .* has no sliding windows of 8 keys",
        ),
        ("farspan-swan", growing, {}, "Llama 4 .* has no sliding windows of 8 keys"),
        ("phi3", growing, {}, "no place for the weights of a phi3 model"),
        ("qwen3", growing, {}, "layer 0 cannot be folded"),
        ("farspan-alibi", growing, {}, "no stock family has alibi"),
    ],
)
def test_refuses_growth_that_no_stock_class_has(name, scales, parts, message, tmp_path):
    patch = save_patch(tmp_path, name, scales, **parts)
    with pytest.raises(FarspanError, match=f"{message}.*; .*--format live"):
        farspan.export(patch, tmp_path / "out", "stock")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


@pytest.mark.parametrize("format", ["folded", "peft", "gguf"])
def test_only_stock_and_live_hold_growth(format: str, tmp_path):
    if format != "folded":
        pytest.importorskip(format)
    with pytest.raises(FarspanError, match="'floor' grow with the context.*--format live"):
        farspan.export(save_patch(tmp_path, "farspan-none"), tmp_path / "out", format)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


@pytest.mark.parametrize("last", ["rope:24", "none"])
def test_a_converted_model_gets_advice_on_its_conversion(tmp_path, last):
    """Sharing the growth of its scales would not help: no class has windows beside it."""
    layout = Layout.parse(["rope/8", "rope/8", "rope/8", last])
    sharpened = Scales((3,), torch.ones(1, 4), torch.full((1, 4), 0.1), "log", FLOOR)
    patch = save_patch(tmp_path, "llama", lambda layers: sharpened, layout=layout)
    with pytest.raises(FarspanError, match=r"swan.rotation=none swan.sharpen=false"):
        farspan.export(patch, tmp_path / "stock", "stock")
    assert not (tmp_path / "stock").exists()
