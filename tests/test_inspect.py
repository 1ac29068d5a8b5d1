"""`farspan inspect` says what a model does, for every family, with or without weights."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
import torch
import transformers as hf

import farspan
from families import FAMILIES, SHAPE, Family, tokens
from farspan.attention import seam
from farspan.errors import FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
KEYS = {
    "family",
    "parameters",
    "train_length",
    "heads",
    "kv_heads",
    "head_dim",
    "base_scale",
    "layers",
    "fold",
    "warnings",
    "patch",
}


@every_family
def test_every_layer_of_every_family_is_labelled_as_it_behaves(family: Family, tmp_path):
    model = family.build()
    model.save_pretrained(tmp_path / "whole")
    model.config.save_pretrained(tmp_path / "config")
    for source in (model, tmp_path / "whole", tmp_path / "config"):
        found = farspan.inspect(source)
        assert tuple(layer.position for layer in found.layers) == family.positions
        assert found.fold.possible == (family.folds is not None)
        assert found.fold.site == family.folds
        assert set(found.fold.layers).isdisjoint(family.refused)
        assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert found.heads == 4
        assert found.kv_heads == getattr(model.config, "num_key_value_heads", 4)
        assert found.head_dim == seam.attention_calls(model)[0].q.shape[-1]
        assert found.family == model.config.model_type
        if family.uniform:
            assert f"folds there, into {family.uniform}" in found.fold.why
        assert ("no weights" in " ".join(found.warnings)) == (source == tmp_path / "config")


def named(name: str):
    return farspan.inspect(next(family for family in FAMILIES if family.name == name).build())


def test_heads_of_two_widths(tmp_path):
    """Gemma 4's config refuses to name one width where kinds of layers have their own."""
    shape = {**SHAPE, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8}
    extra = dict(vocab_size_per_layer_input=SHAPE["vocab_size"], hidden_size_per_layer_input=8, num_kv_shared_layers=0)
    config = hf.Gemma4TextConfig(**shape, **extra)
    config.save_pretrained(tmp_path)
    for source in (hf.Gemma4ForCausalLM(config).eval(), tmp_path):
        found = farspan.inspect(source)
        assert [layer.position for layer in found.layers] == ["rope"] * 6
        assert found.head_dim == 8


def test_what_config_and_behaviour_say_is_compared():
    assert {layer.claimed for layer in named("smollm3").layers} == {"rope", "none"}
    assert named("smollm3").warnings == ()
    assert "layers 3: the config reads as 'rope', and the model behaves as 'none'" in named("cohere2").warnings
    assert {layer.claimed for layer in named("granitemoehybrid").layers} == {"none"}
    assert {layer.claimed for layer in named("gpt2").layers} == {"unknown"}


def test_windows_scales_norms_and_temperatures_are_found():
    assert [layer.window for layer in named("farspan-swan").layers] == [8, 8, 8, None]
    assert [layer.window for layer in named("llama4").layers] == [8, 8, 8, None]
    assert [layer.window for layer in named("mistral").layers] == [8] * 4
    assert [layer.index for layer in named("granitemoehybrid").layers] == [1, 3]
    assert named("granitemoehybrid").base_scale == 0.2
    assert named("farspan-t5").base_scale == 1.0
    assert named("gemma3").base_scale == pytest.approx(8**-0.5)
    assert named("qwen3").query_norm == "q_norm"
    assert named("llama4").query_norm == "qk_norm"
    assert "ln(1 + ⌊n/8⌋)" in named("llama4").temperature
    assert "ln(1 + ⌊p/16⌋)" in named("ministral3").temperature
    assert named("ministral3").train_length == named("mistral").train_length, "and not what its rope was stretched from"


@pytest.mark.parametrize(
    ("config", "claimed"),
    [
        (hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "alibi"),
        (hf.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=128), "alibi"),
        (
            hf.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
            "alibi",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_model_off_the_interface_is_described_by_its_config(config, claimed: str):
    found = farspan.inspect(hf.AutoModelForCausalLM.from_config(config))
    assert [(layer.position, layer.claimed) for layer in found.layers] == [("unknown", claimed)] * 2
    assert not found.fold.possible
    assert any("attention interface" in warning for warning in found.warnings)


BIG_CONFIGS = {
    "llama-70b": hf.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
    ),
    "smollm3-3b": hf.SmolLM3Config(),
    "llama4-scout": hf.Llama4TextConfig(num_hidden_layers=8),
    "command-a": hf.Cohere2Config(num_hidden_layers=8),
    "gemma3-text": hf.Gemma3TextConfig(num_hidden_layers=12),
    "granite4-hybrid": hf.GraniteMoeHybridConfig(
        layer_types=["mamba"] * 5 + ["attention"], num_hidden_layers=6, position_embedding_type="nope"
    ),
    "gpt-oss-20b": hf.GptOssConfig(num_hidden_layers=6),
    "kimi-linear-48b": hf.KimiLinearConfig(num_hidden_layers=9),
    "olmo2-7b": hf.Olmo2Config(num_hidden_layers=4),
}


@pytest.mark.parametrize("name", BIG_CONFIGS)
def test_real_sizes_are_inspected_from_the_config_alone(name: str, tmp_path):
    config = BIG_CONFIGS[name]
    config.save_pretrained(tmp_path)
    found = farspan.inspect(tmp_path)
    assert found.heads == config.num_attention_heads
    assert {layer.position for layer in found.layers} <= {"none", "rope"}
    assert found.fold.site or found.fold.why
    if name == "llama-70b":
        assert found.parameters > 60e9
        assert len(found.layers) == 80
        assert found.head_dim == 128
        assert found.base_scale == pytest.approx(128**-0.5)


@torch.no_grad()
def test_a_llama_typed_checkpoint_without_rotation_loads_as_what_it_is(tmp_path):
    nope = next(family for family in FAMILIES if family.name == "farspan-none").build()
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, tie_word_embeddings=True))
    llama.load_state_dict(nope.state_dict())
    llama.save_pretrained(tmp_path)  # as paper A's model is published
    assert {layer.position for layer in farspan.inspect(tmp_path).layers} == {"rope"}
    assert {layer.position for layer in farspan.inspect(tmp_path, position="none").layers} == {"none"}
    model, tokenizer = farspan.load(tmp_path, position="none")
    assert torch.equal(model(tokens()).logits, nope(tokens()).logits)
    assert tokenizer is None


@pytest.mark.parametrize(
    "config",
    [
        hf.MambaConfig(num_hidden_layers=2),
        hf.T5Config(),
        hf.DeepseekV3Config(num_hidden_layers=4),
        hf.RecurrentGemmaConfig(num_hidden_layers=3),
        hf.BartConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_config_that_cannot_be_probed_is_never_a_traceback(config, tmp_path):
    config.save_pretrained(tmp_path)
    with contextlib.suppress(FarspanError):
        assert {layer.position for layer in farspan.inspect(tmp_path).layers} <= {"rope", "unknown"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "farspan", *arguments], capture_output=True, text=True)


def test_the_command_prints_valid_json_with_the_documented_keys(tmp_path):
    FAMILIES[-1].build().save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    text = json.loads(result.stdout)
    assert text.keys() >= KEYS
    assert text["layers"][0].keys() == {"index", "position", "claimed", "window"}
    assert text["fold"].keys() >= {"possible", "site", "why"}


def test_the_command_prints_tables_for_people(tmp_path):
    swan = ["rope/8", "rope/8", "rope/8", "none"]
    farspan_model = hf.AutoModelForCausalLM.from_config(FarspanConfig(**SHAPE, position=swan))
    farspan_model.save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for words in ("0–2", "rope", "none", "into q_proj", "64 tokens"):
        assert words in result.stdout


def test_rows_of_a_position_table_beyond_the_training_length_are_said_to_be_untrained(tmp_path):
    shape = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = FarspanConfig(**shape, position="learned", max_position_embeddings=16, position_table=64)
    FarspanForCausalLM(config).save_pretrained(tmp_path)
    found = farspan.inspect(tmp_path)
    assert found.train_length == 16
    assert "its position table has 64 rows, and those beyond 16 are untrained" in found.warnings
    assert farspan.load(tmp_path).model(torch.zeros(1, 64, dtype=torch.long)).logits.isfinite().all()
