"""Exports of patches with a layout: the stock model equals the live one with every cache.

A layout lives at the seam, so a stock checkpoint needs a config that expresses it. What has none is
refused, with the reason and the format that works.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, DynamicCache, SmolLM3ForCausalLM

import farspan
from families import FAMILIES, SHAPE, Family, tokens
from farspan.attention.layout import Layout
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.data.tokens import train_tokenizer
from farspan.errors import FarspanError, ProofError
from farspan.formats import layout as layout_format
from farspan.formats.fold import logits
from farspan.formats.registry import ExportJob
from farspan.methods.swan import swan
from farspan.methods.tuning import TuningConfig
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.workflows import export as export_workflow
from swan_models import EVEN, job_for

LENGTH, WINDOW, TARGET = 40, 5, 1024
SWAN = [f"rope/{WINDOW}", "none", f"rope/{WINDOW}", "none"]
TOLERANCE = 2e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHAPE_WITHOUT_HEAD_DIM = {key: value for key, value in SHAPE.items() if key != "head_dim"}
EXTRA = {
    "llama-theta": lambda: hf.LlamaConfig(
        **SHAPE,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "llama-all-biases": lambda: hf.LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "mistral-global": lambda: hf.MistralConfig(**{**SHAPE, "head_dim": 16}, sliding_window=None),
    "qwen2": lambda: hf.Qwen2Config(**SHAPE_WITHOUT_HEAD_DIM),
    "qwen2-windows": lambda: hf.Qwen2Config(
        **SHAPE_WITHOUT_HEAD_DIM,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "smollm3-theta": lambda: hf.SmolLM3Config(
        **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
    ),
    "smollm3-nope-first": lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[0, 1, 1, 1]),
    "farspan-unscaled": lambda: FarspanConfig(**SHAPE, position="rope", base_scale=1.0),
    "farspan-none-quarter": lambda: FarspanConfig(**SHAPE, position="none", rotary_fraction=0.25),
    "farspan-theta": lambda: FarspanConfig(
        **SHAPE, position=["rope", "none"], rope_parameters={"rope_theta": 300.0}
    ),
}
# Models whose stock form is a SmolLM3, with the layout that each gets.
SMOLLM3 = {
    "llama": SWAN,
    "llama-theta": SWAN,
    "llama-all-biases": SWAN,
    "mistral-global": SWAN,
    "mistral": {"1": "none/8", "3": "none/8"},  # the other layers keep their own window
    "qwen2": SWAN,
    "qwen2-windows": {"0": f"rope/{WINDOW}", "1": "none", "3": "none"},
    "smollm3": {"0": f"rope/{WINDOW}", "1": "none", "2": f"rope/{WINDOW}"},
    "smollm3-theta": ["none", f"rope/{WINDOW}", "none", f"rope/{WINDOW}"],
    "farspan-rope": SWAN,
    "farspan-none": SWAN,
    "farspan-none-quarter": SWAN,
    "farspan-unscaled": SWAN,
    "farspan-hybrid": SWAN,
}
GEMMA = {"gemma3": {"3": "none"}}
EXACT = {**SMOLLM3, **GEMMA}


def build(name: str) -> hf.PreTrainedModel:
    if name in EXTRA:
        return Family(name, EXTRA[name], (), None).build()
    return next(family for family in FAMILIES if family.name == name).build()


def save_patch(folder: Path, name: str, layout, train_length: int = 64, **parts) -> Path:
    """A patch with a layout, saved beside its tiny random base model."""
    model = build(name)
    model.save_pretrained(folder / "base")
    parts = {"layout": Layout.parse(layout), "name": str(folder / "base"), **parts}
    patch = Patch("swan", fingerprint(model), TARGET, train_length, **parts)
    return patch.save(folder / "patch")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A live model and its stock export by name; each is made once."""

    @cache
    def make(name: str) -> tuple[hf.PreTrainedModel, export_workflow.ExportResult]:
        folder = tmp_path_factory.mktemp(name)
        patch = save_patch(folder, name, EXACT[name], **PARTS.get(name, {}))
        return farspan.load(patch).model, farspan.export(patch, folder / "stock", "stock")

    return make


def scales(basis: str | None = None) -> Scales:
    table = 1 + 0.6 * torch.rand(4, 4, generator=torch.Generator().manual_seed(3))
    if basis is None:
        return Scales(tuple(range(4)), table)
    return Scales(tuple(range(4)), table, table / 4, basis, 16)


# Scales and tuned weights travel with the layout.
PARTS = {
    "qwen2": {"scales": scales()},
    "farspan-none": {
        "scales": scales(),
        "weights": {"model.norm.weight": torch.linspace(0.5, 2, 32)},
    },
}


# Stock


QUICK = ("llama", "qwen2", "farspan-none", "gemma3")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in EXACT],
)
@torch.no_grad()
def test_stock_equals_live_with_every_cache(name: str, exported):
    live, done = exported(name)
    assert all(proof.holds for proof in done.proofs.values())
    stock = AutoModelForCausalLM.from_pretrained(done.folder).eval()
    ids = tokens(LENGTH)
    expected = live(ids, use_cache=False).logits
    assert (stock(ids, use_cache=False).logits - expected).abs().max() < TOLERANCE
    for chunk in (7, 1):
        past, parts = DynamicCache(config=stock.config), []
        for start in range(0, LENGTH, chunk):
            piece = ids[:, start : start + chunk]
            parts.append(stock(piece, past_key_values=past, use_cache=True).logits)
        assert (torch.cat(parts, dim=1) - expected).abs().max() < TOLERANCE, chunk
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    continued = live.generate(ids, **options).tolist()
    for cache_options in ({}, {"cache_implementation": "static"}):
        assert stock.generate(ids, **options, **cache_options).tolist() == continued


@pytest.mark.parametrize("name", ["llama", "farspan-none"])
@torch.no_grad()
def test_stock_equals_live_with_left_padding(name: str, exported):
    live, done = exported(name)
    stock = AutoModelForCausalLM.from_pretrained(done.folder).eval()
    ids = torch.cat((torch.zeros(2, 6, dtype=torch.long), tokens(LENGTH)), dim=1)
    mask = (torch.arange(LENGTH + 6) >= 6).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected, padded = (
        model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 6:]
        for model in (live, stock)
    )
    assert (padded - expected).abs().max() < TOLERANCE


@pytest.mark.long
def test_swan_adds_no_rotation_to_a_mixture_of_layers_so_it_has_a_stock_form(tmp_path):
    """A layer without positions gets a window, and the config still has one rope for all layers."""
    model = build("smollm3-nope-first")
    model.save_pretrained(tmp_path / "base")
    job, tuning = job_for(model, name=str(tmp_path / "base")), TuningConfig(steps=1, batch=2)
    patch = swan(model, job, EVEN, tuning)
    entries = ["none/8", "rope/8", "rope/8", "none"]
    assert [*patch.layout.to_json().values()] == entries
    patch.save(tmp_path / "patch")
    done = farspan.export(tmp_path / "patch", tmp_path / "stock", "stock")
    assert all(proof.holds for proof in done.proofs.values())
    stock = AutoModelForCausalLM.from_pretrained(done.folder)
    assert stock.config.no_rope_layers == [0, 1, 1, 0]
    assert stock.config.rope_parameters["rope_theta"] == 2_000_000.0


@pytest.mark.parametrize("name", SMOLLM3)
def test_stock_config_is_spelled_out(name: str, exported):
    live, done = exported(name)
    config = json.loads((done.folder / "config.json").read_text())
    base = live.config
    layers = probe(live)
    assert config["model_type"] == "smollm3"
    assert config["no_rope_layers"] == [int(layer.position == "rope") for layer in layers]
    assert config["layer_types"] == [
        "sliding_attention" if layer.window else "full_attention" for layer in layers
    ]
    assert config["use_sliding_window"] is True
    assert config["sliding_window"] == max(layer.window or 0 for layer in layers)
    assert config["max_position_embeddings"] == TARGET
    assert config["head_dim"] == layers[0].head_dim
    for key in ("rms_norm_eps", "tie_word_embeddings", "vocab_size", "intermediate_size"):
        assert config[key] == getattr(base, key), key
    assert config["hidden_act"] == getattr(base, "hidden_act", "silu")
    assert [config[f"{token}_token_id"] for token in ("pad", "bos", "eos")] == [0, 1, 2]
    rope = dict(base.rope_parameters)
    if rope["rope_type"] == "none":  # rotation that the layout added
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
    assert config["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("name", "attention", "mlp"),
    [("llama", False, False), ("qwen2", True, False), ("llama-all-biases", True, True)],
)
def test_biases_are_kept(name: str, attention: bool, mlp: bool, exported):
    live, done = exported(name)
    stock = AutoModelForCausalLM.from_pretrained(done.folder)
    assert type(stock) is SmolLM3ForCausalLM
    assert (stock.config.attention_bias, stock.config.mlp_bias) == (attention, mlp)
    weights, base = stock.state_dict(), live.state_dict()
    added = {key: value for key, value in weights.items() if key not in base}
    assert len(added) == (4 if name == "qwen2" else 0)
    assert all(key.endswith("o_proj.bias") and not bias.any() for key, bias in added.items())


def test_stock_keeps_the_generation_config(tmp_path):
    """Models that chat stop at more tokens than the config names."""
    patch = save_patch(tmp_path, "llama", SWAN)
    model = farspan.load(tmp_path / "base").model
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path / "base")
    done = farspan.export(patch, tmp_path / "out", "stock")
    stock = AutoModelForCausalLM.from_pretrained(done.folder)
    assert stock.generation_config.eos_token_id == [2, 5]


@pytest.mark.long
def test_stock_runs_in_a_process_without_farspan(exported, tmp_path):
    names = ["qwen2", "farspan-none", "gemma3"]
    folders = {name: str(exported(name)[1].folder) for name in names}
    torch.save(tokens(LENGTH), tmp_path / "ids.pt")
    script = f"""
import sys
sys.modules["farspan"] = None  # any import of it now fails
import torch, transformers
ids = torch.load({str(tmp_path / "ids.pt")!r})
logits = {{}}
for name, folder in {folders!r}.items():
    with torch.no_grad():
        logits[name] = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
torch.save(logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-I", "-c", script], check=True)
    stock = torch.load(tmp_path / "logits.pt")
    for name in names:
        assert (stock[name] - logits(exported(name)[0], tokens(LENGTH))).abs().max() < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen2", "farspan-rope"])
@pytest.mark.parametrize("rope", [YARN, {"rope_type": "none"}, {"rope_type": "dynamic"}], ids=str)
def test_rope_parameters_of_the_patch_are_kept(name: str, rope: dict, tmp_path):
    if rope["rope_type"] == "dynamic":
        rope = {**rope, "factor": 4.0}
    patch = save_patch(tmp_path, name, SWAN, rope=rope)
    done = farspan.export(patch, tmp_path / "out", "stock")
    assert set(done.proofs) == {"inside", "beyond"}
    stock = AutoModelForCausalLM.from_pretrained(done.folder).config
    # The layout adds rotation again where the patch removed it.
    kept = {"rope_type": "default", "rope_theta": 10_000.0} if rope["rope_type"] == "none" else rope
    assert kept.items() <= stock.rope_parameters.items()
    dynamic = rope["rope_type"] == "dynamic"
    assert stock.max_position_embeddings == (64 if dynamic else TARGET)


def test_stock_in_bfloat16_allows_its_rounding(tmp_path):
    patch = save_patch(tmp_path, "qwen2", SWAN)
    done = farspan.export(patch, tmp_path / "half", "stock", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(done.folder, dtype="auto").dtype == torch.bfloat16
    assert 1e-5 < done.proofs["beyond"].max_abs_logit < done.proofs["beyond"].tolerance


# Gemma 3


@torch.no_grad()
def test_gemma_does_not_rotate_at_any_distance(exported):
    """Keys at the start of a text, and queries after 131,072 tokens."""
    live, done = exported("gemma3")
    stock = AutoModelForCausalLM.from_pretrained(done.folder).eval()
    assert type(stock) is hf.Gemma3ForCausalLM
    rope = stock.config.rope_parameters
    assert rope["full_attention"] == {
        "rope_type": "linear",
        "factor": 2.0**60,
        "rope_theta": 1_000_000.0,
    }
    assert rope["sliding_attention"] == live.config.rope_parameters["sliding_attention"]
    ids = tokens(LENGTH)
    half = torch.arange(LENGTH // 2)
    positions = torch.cat((half, 131_072 + half)).expand(2, -1)
    # With a mask, so that the jump is not read as a second text.
    options = {"attention_mask": torch.ones_like(ids), "position_ids": positions}
    expected, far = (model(ids, **options, use_cache=False).logits for model in (live, stock))
    assert torch.equal(far, expected)


def test_a_linear_rope_of_a_gemma_is_replaced(tmp_path):
    """Larger Gemma 3 models have a linear rope with factor 8 in their global layers."""
    patch = save_patch(tmp_path, "gemma3", {"3": "none"}, rope={"rope_type": "linear", "factor": 8})
    done = farspan.export(patch, tmp_path / "out", "stock")
    stock = AutoModelForCausalLM.from_pretrained(done.folder).config
    assert stock.rope_parameters["full_attention"]["factor"] == 2.0**60


# Folded and live


@pytest.mark.parametrize("name", ["farspan-rope", "farspan-none", "farspan-quarter-rope"])
@torch.no_grad()
def test_folded_is_a_farspan_model_without_a_patch(name: str, tmp_path):
    patch = save_patch(tmp_path, name, SWAN, scales=scales())
    done = farspan.export(patch, tmp_path / "out", "folded")
    live, folded = farspan.load(patch).model, farspan.load(done.folder).model
    assert type(folded) is FarspanForCausalLM
    assert folded.config.position == ["rope", "none", "rope", "none"]
    assert folded.config.sliding_window == WINDOW
    assert folded.config.max_position_embeddings == 64, "the train length"
    assert not (done.folder / "patch.json").exists()
    assert (logits(folded, tokens(LENGTH)) - logits(live, tokens(LENGTH))).abs().max() < TOLERANCE


@torch.no_grad()
def test_folded_keeps_score_biases_that_the_layout_does_not_name(tmp_path):
    patch = save_patch(tmp_path, "farspan-mixed", {"2": "none/8", "3": "none"})
    done = farspan.export(patch, tmp_path / "out", "folded")
    config = farspan.load(done.folder).model.config
    assert config.position == ["alibi", "t5", "none", "none"]
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize("name", ["farspan-none", "gemma3"])
def test_live_holds_base_and_layout(name: str, tmp_path):
    layout = EXACT.get(name, SWAN)
    growing = scales("log")
    patch = save_patch(tmp_path, name, layout, scales=growing)
    done = farspan.export(patch, tmp_path / "out", "live")
    assert done.proofs["beyond"].max_abs_logit == 0
    assert "vLLM" not in (done.folder / "README.md").read_text(), "that is about stock"
    moved = farspan.load(done.folder.rename(tmp_path / "moved")).model
    entries = [
        [(layer.position, layer.window) for layer in probe(model)]
        for model in (moved, farspan.load(patch).model)
    ]
    assert entries[0] == entries[1]
    assert ("none", None) in entries[0]


# Proofs and model cards


@pytest.mark.parametrize("change", ["window", "rotation"])
def test_proof_detects_a_config_that_is_almost_right(change: str, tmp_path, monkeypatch):
    real = layout_format.smollm3_config

    def wrong(shared, rope, positions, windows, window):
        if change == "window":
            return real(shared, rope, positions, windows, window + 1)
        return real(shared, rope, ["rope", *positions[1:-1], "rope"], windows, window)

    monkeypatch.setattr(layout_format, "smollm3_config", wrong)
    patch = save_patch(tmp_path, "llama", SWAN)
    with pytest.raises(ProofError, match="the stock export differs from the live model"):
        farspan.export(patch, tmp_path / "out", "stock")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


@pytest.mark.parametrize(
    ("train_length", "window", "lengths"),
    [
        (64, 5, {"inside": 64, "beyond": 320}),
        (600, 100, {"inside": 356, "beyond": 856}),
        (64, 100, {"inside": 64, "beyond": 356}),
        (20_000, 100, {"inside": 356}),  # too long to compare beyond it
    ],
)
def test_compared_tokens_have_keys_beyond_their_window(
    train_length: int, window: int, lengths: dict[str, int], tmp_path
):
    layout = [f"rope/{window}"] * 3 + ["none"]
    folder = save_patch(tmp_path, "llama", layout, train_length)
    patch, model = Patch.load(folder), farspan.load(folder).model
    prompts = export_workflow._prompts(ExportJob(folder, patch, model, None, torch.float32))
    assert {region: ids.shape[1] for region, ids in prompts.items()} == lengths


def test_only_configs_that_express_a_layout_in_a_special_way_are_described():
    describe = layout_format.describe_config
    assert describe(hf.LlamaConfig()) == ""
    assert "`no_rope_layers`" in describe(hf.SmolLM3Config())
    assert "vLLM cannot load this checkpoint." in describe(hf.Gemma3TextConfig())


def test_model_card_says_where_the_layout_is(exported):
    cards = {name: (exported(name)[1].folder / "README.md").read_text() for name in EXACT}
    assert "rope/5 in layers 0, 2, none in layers 1, 3." in cards["llama"]
    assert "The checkpoint is a SmolLM3." in cards["llama"]
    assert "vLLM cannot load this checkpoint." not in cards["llama"]
    assert "vLLM cannot load this checkpoint." in cards["gemma3"]
    assert "SmolLM3" not in cards["gemma3"]


# What is refused


PARTIAL = ["rope/5", "rope/5", "rope/5", "rope:40"]


def test_a_live_export_holds_partial_rotation(tmp_path):
    patch = save_patch(tmp_path, "llama", PARTIAL)
    farspan.export(patch, tmp_path / "live", "live")
    ids = tokens(64)
    with torch.no_grad():
        expected = farspan.load(patch).model(ids).logits
        assert torch.allclose(
            farspan.load(tmp_path / "live").model(ids).logits, expected, atol=1e-5
        )
        without = farspan.load(tmp_path / "base").model(ids).logits
    assert (without - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "format", "layout", "parts", "message"),
    [
        ("llama", "stock", SWAN, {"scales": "log"}, "grow .* and layers see 5 keys.*--format live"),
        (
            "llama",
            "stock",
            ["rope/5", "rope/9", "none", "none"],
            {},
            "windows of 5 and 9 keys, and a config has one sliding_window; use --format live",
        ),
        (
            "mistral",
            "stock",
            {"0": "rope/5"},
            {},
            "windows of 5 and 8 keys, and a config has one sliding_window; use --format live",
        ),
        (
            "farspan-rope",
            "folded",
            ["rope/5", "rope/9", "none", "none"],
            {},
            "windows of 5 and 9 keys, and a config has one sliding_window; use --format live",
        ),
        (
            "smollm3",
            "stock",
            ["rope/5"] * 4,
            {},
            "adds rotation with rope_theta 10,000 to some layers, others .*one rope.*--format live",
        ),
        (
            "farspan-theta",
            "folded",
            ["rope/5"] * 4,
            {},
            "adds rotation with rope_theta 10,000 to some layers, others .*one rope.*--format live",
        ),
        ("farspan-quarter-rope", "stock", SWAN, {}, "rotates 0.25 of each.*--format live"),
        ("farspan-mixed", "stock", {"3": "none"}, {}, "no stock family has alibi.*--format live"),
        ("qwen3", "stock", SWAN, {}, "a qwen3 checkpoint cannot express a layout.*--format live"),
        ("qwen3", "gguf", SWAN, {}, "a qwen3 checkpoint cannot express a layout.*--format live"),
        ("phi3", "stock", SWAN, {}, "a phi3 checkpoint cannot express a layout.*--format live"),
        (
            "gemma3",
            "stock",
            {"0": "rope/5", "3": "none"},
            {},
            "remove the rotation of all its global layers and nothing else.*--format live",
        ),
        (
            "gemma3",
            "stock",
            {"0": "none/8", "3": "none"},
            {},
            "remove the rotation of all its global layers and nothing else.*--format live",
        ),
        ("llama", "folded", SWAN, {}, "only farspan's own architecture.*--format stock or live"),
        ("gemma3", "folded", {"3": "none"}, {}, "only farspan's own.*--format stock or live"),
        ("llama", "peft", SWAN, {"scales": None}, "holds a layout, and an IA3.*--format stock"),
        ("llama", "gguf", SWAN, {}, "smollm3 has neither sliding windows nor.*of 5 keys.*stock"),
        ("qwen2", "gguf", SWAN, {}, "smollm3 has neither sliding windows nor.*of 5 keys.*stock"),
        ("farspan-none", "gguf", SWAN, {}, "smollm3 has neither sliding windows nor.*stock"),
        ("gemma3", "gguf", {"3": "none"}, {}, "this is a gemma3_text; .*llama.cpp's own converter"),
        ("llama", "gguf", ["none", "rope", "rope", "rope"], {}, "these are .0, 1, 1, 1.*stock"),
        ("llama", "stock", PARTIAL, {}, "rotate up to a period of 40 tokens only.*--format live"),
        ("llama", "gguf", PARTIAL, {}, "rotate up to a period of 40 tokens only.*--format live"),
        (
            "gemma3",
            "stock",
            {"3": "rope:40"},
            {},
            "up to a period of 40 tokens only.*--format live",
        ),
        ("farspan-rope", "folded", PARTIAL, {}, "up to a period of 40 tokens only.*--format live"),
    ],
)
def test_refuses_layouts_that_a_format_cannot_hold(name, format, layout, parts, message, tmp_path):
    if format in ("peft", "gguf"):
        pytest.importorskip(format)
    if "scales" in parts:
        parts = {"scales": scales(parts["scales"])}
    patch = save_patch(tmp_path, name, layout, **parts)
    with pytest.raises(FarspanError, match=message):
        farspan.export(patch, tmp_path / "out", format)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


@pytest.mark.parametrize(
    ("layout", "architecture"),
    [(["none"] * 4, "granite"), (["rope", "rope", "rope", "none"], "smollm3")],
    ids=["granite", "smollm3"],
)
def test_gguf_holds_layouts_without_windows_that_llama_cpp_has(layout, architecture, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = build("llama")
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "base")
    train_tokenizer(["some text to cut, 12 times"], 270).save_pretrained(tmp_path / "base")
    parts = {"layout": Layout.parse(layout), "name": str(tmp_path / "base")}
    patch = Patch("swan", fingerprint(model), TARGET, 64, **parts).save(tmp_path / "patch")
    done = farspan.export(patch, tmp_path / "out", "gguf")
    assert all(proof.holds for proof in done.proofs.values())
    fields = gguf.GGUFReader(done.folder / "model.gguf").fields
    assert fields["general.architecture"].contents() == architecture
