"""`farspan inspect` describes every family, with or without weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import farspan
from families import FAMILIES, SHAPE, Family, tokens
from farspan.attention import probe as probe_module
from farspan.attention import seam
from farspan.attention.model_facts import config_train_length, layer_heads
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import probe
from farspan.cli import app
from farspan.cli.console import console
from farspan.errors import FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.workflows.inspect_summary import describe_other_layers, layers_without_attention

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
def test_every_layer_of_every_family_is_labeled_by_its_behavior(family: Family, tmp_path):
    model = family.build()
    model.save_pretrained(tmp_path / "whole")
    model.config.save_pretrained(tmp_path / "config")
    for source in (model, tmp_path / "whole", tmp_path / "config"):
        inspection = farspan.inspect(source)
        assert tuple(layer.position for layer in inspection.layers) == family.positions
        assert inspection.fold.possible == (family.folds is not None)
        assert inspection.fold.site == family.folds
        assert set(inspection.fold.layers).isdisjoint(family.refused)
        assert inspection.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert inspection.heads == 4
        assert inspection.kv_heads == getattr(model.config, "num_key_value_heads", 4)
        assert inspection.head_dim == seam.attention_calls(model)[0].q.shape[-1]
        assert inspection.family == model.config.model_type
        if family.uniform:
            assert f"folds there, into {family.uniform}" in inspection.fold.why
        assert ("no weights" in " ".join(inspection.warnings)) == (source == tmp_path / "config")


def inspect_family(name: str):
    return farspan.inspect(next(family for family in FAMILIES if family.name == name).build())


def test_layer_types_with_two_head_widths(tmp_path):
    """Gemma 4's config refuses to name one head width where layer types differ."""
    shape = {
        **SHAPE,
        "num_hidden_layers": 6,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 8,
    }
    extra = dict(
        vocab_size_per_layer_input=SHAPE["vocab_size"],
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
    )
    config = hf.Gemma4TextConfig(**shape, **extra)
    config.save_pretrained(tmp_path)
    for source in (hf.Gemma4ForCausalLM(config).eval(), tmp_path):
        inspection = farspan.inspect(source)
        assert [layer.position for layer in inspection.layers] == ["rope"] * 6
        assert inspection.head_dim == 8


def test_config_and_behavior_are_compared():
    assert {layer.claimed for layer in inspect_family("smollm3").layers} == {"rope", "none"}
    assert inspect_family("smollm3").warnings == ()
    assert (
        "layers 3: the config says 'rope', the model behaves as 'none'"
        in inspect_family("cohere2").warnings
    )
    assert {layer.claimed for layer in inspect_family("granitemoehybrid").layers} == {"none"}
    assert {layer.claimed for layer in inspect_family("gpt2").layers} == {"unknown"}


@pytest.mark.long
def test_windows_scales_norms_and_temperatures_are_reported():
    assert [layer.window for layer in inspect_family("farspan-swan").layers] == [8, 8, 8, None]
    assert [layer.window for layer in inspect_family("llama4").layers] == [8, 8, 8, None]
    assert [layer.window for layer in inspect_family("mistral").layers] == [8] * 4
    assert [layer.index for layer in inspect_family("granitemoehybrid").layers] == [1, 3]
    assert inspect_family("granitemoehybrid").base_scale == 0.2
    assert inspect_family("farspan-t5").base_scale == 1.0
    assert inspect_family("gemma3").base_scale == pytest.approx(8**-0.5)
    assert inspect_family("qwen3").query_norm == "q_norm"
    assert inspect_family("llama4").query_norm == "qk_norm"
    assert "ln(1 + ⌊n/8⌋)" in inspect_family("llama4").temperature
    assert "ln(1 + ⌊p/16⌋)" in inspect_family("ministral3").temperature
    assert inspect_family("ministral3").train_length == inspect_family("mistral").train_length, (
        "not the length that its rotation was scaled from"
    )


@pytest.mark.parametrize(
    ("config", "claimed"),
    [
        (hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "alibi"),
        (hf.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=128), "alibi"),
        (
            hf.FalconConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                alibi=True,
            ),
            "alibi",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_model_without_the_attention_interface_is_described_by_its_config(config, claimed: str):
    inspection = farspan.inspect(hf.AutoModelForCausalLM.from_config(config))
    positions = [(layer.position, layer.claimed) for layer in inspection.layers]
    assert positions == [("unknown", claimed)] * 2
    assert not inspection.fold.possible
    assert any("attention interface" in warning for warning in inspection.warnings)


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
        layer_types=["mamba"] * 5 + ["attention"],
        num_hidden_layers=6,
        position_embedding_type="nope",
    ),
    "gpt-oss-20b": hf.GptOssConfig(num_hidden_layers=6),
    "kimi-linear-48b": hf.KimiLinearConfig(num_hidden_layers=9),
    "olmo2-7b": hf.Olmo2Config(num_hidden_layers=4),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "llama-70b" else [])
        for name in BIG_CONFIGS
    ],
)
@pytest.mark.long
def test_real_sizes_are_inspected_from_the_config(name: str, tmp_path):
    config = BIG_CONFIGS[name]
    config.save_pretrained(tmp_path)
    inspection = farspan.inspect(tmp_path)
    assert inspection.heads == config.num_attention_heads
    assert {layer.position for layer in inspection.layers} <= {"none", "rope"}
    assert inspection.fold.site or inspection.fold.why
    if name == "llama-70b":
        assert inspection.parameters > 60e9
        assert len(inspection.layers) == 80
        assert inspection.head_dim == 128
        assert inspection.base_scale == pytest.approx(128**-0.5)


def test_a_note_tells_the_cache_of_latent_attention(tmp_path):
    """DeepSeek V3 stores 512 + 64 numbers a layer where engines keep the latent."""
    hf.DeepseekV3Config(num_hidden_layers=4).save_pretrained(tmp_path)
    notes = farspan.inspect(tmp_path).warnings
    assert any("store 2,304 numbers per token" in note for note in notes)
    hf.LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    assert not any("latent" in note for note in farspan.inspect(tmp_path).warnings)


@torch.no_grad()
def test_position_none_loads_a_llama_checkpoint_without_rotation(tmp_path):
    nope = next(family for family in FAMILIES if family.name == "farspan-none").build()
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, tie_word_embeddings=True))
    llama.load_state_dict(nope.state_dict())
    llama.save_pretrained(tmp_path)  # as the model of Wang 2024 is published
    assert {layer.position for layer in farspan.inspect(tmp_path).layers} == {"rope"}
    assert {layer.position for layer in farspan.inspect(tmp_path, position="none").layers} == {
        "none"
    }
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
@pytest.mark.long
def test_a_config_that_cannot_be_probed_raises_no_other_error(config, tmp_path):
    config.save_pretrained(tmp_path)
    with contextlib.suppress(FarspanError):
        assert {layer.position for layer in farspan.inspect(tmp_path).layers} <= {
            "rope",
            "learned",
            "unknown",
        }


def test_json_has_the_documented_keys(tmp_path):
    FAMILIES[-1].build().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record.keys() >= KEYS
    heads = {"heads", "kv_heads", "head_dim"}
    assert record["layers"][0].keys() == {"index", "position", "claimed", "window", *heads}
    assert record["fold"].keys() >= {"possible", "site", "why"}


def test_the_command_prints_tables(tmp_path):
    swan = ["rope/8", "rope/8", "rope/8", "none"]
    farspan_model = hf.AutoModelForCausalLM.from_config(FarspanConfig(**SHAPE, position=swan))
    farspan_model.save_pretrained(tmp_path)
    with console.capture() as captured:
        result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for text in ("0–2", "rope", "none", "into q_proj", "64 tokens", "rope, window 8", "at 128K"):
        assert text in captured.get()
    assert f"farspan extend {tmp_path} --to 128 --method headlog" in captured.get()


def test_the_cache_is_counted_by_type_of_layer():
    inspection = inspect_family("farspan-swan")
    layer = inspection.layers[0]
    size = 2 * layer.kv_heads * layer.head_dim * 4  # bytes of a token in float32
    assert inspection.dtype == "float32"
    cache = {report.layer_type: report for report in inspection.cache}
    assert cache.keys() == {"rope, window 8", "none"}
    windowed, full = cache["rope, window 8"], cache["none"]
    assert (windowed.layers, windowed.per_token) == (3, 3 * size)
    assert windowed.at == {32_768: 3 * 8 * size, 131_072: 3 * 8 * size}
    assert full.at == {32_768: 32_768 * size, 131_072: 131_072 * size}


def test_rope_scaling_and_the_next_commands_follow_the_config(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    hf.LlamaConfig(**SHAPE, rope_theta=5e5, rope_scaling=scaling).save_pretrained(tmp_path)
    inspection = farspan.inspect(tmp_path)
    assert inspection.rope == "llama3, factor 8, from 16 tokens, base 500,000"
    first, second = inspection.next_commands
    assert first == "farspan diagnose MODEL"
    assert second == "farspan extend MODEL --to 128 --method ntk"
    assert f"which {tmp_path} lacks: MODEL is a folder" in inspection.warnings[-1]
    assert inspect_family("farspan-none").rope is None


def test_the_next_commands_name_the_model_as_a_shell_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = FarspanForCausalLM(FarspanConfig(**SHAPE, position="rope"))
    model.config.save_pretrained("d")
    assert farspan.inspect("d").next_commands[0] == "farspan diagnose MODEL"
    model.save_pretrained("own model")
    commands = farspan.inspect("own model").next_commands
    assert [command.split(" --")[0] for command in commands] == [
        "farspan diagnose 'own model'",
        "farspan extend 'own model'",
    ]
    Patch(
        "test",
        fingerprint(model),
        128,
        64,
        rope={"rope_type": "linear", "factor": 2.0},
        name="own model",
    ).save(tmp_path / "own patch")
    (command,) = farspan.inspect("own patch").next_commands
    assert command == "farspan eval 'own patch' --baseline 'own model' -o results"


def test_the_next_steps_of_a_model_object_are_calls():
    first, second = inspect_family("smollm3").next_commands
    assert first == "farspan.diagnose((model, tokenizer))"
    assert second == 'farspan.extend((model, tokenizer), 128, method="yarn+headscale")'


def test_a_config_without_rotary_layers_has_no_rotation(tmp_path):
    """Its config has the parameters of a rotation all the same."""
    for rotary, described in ((1, "not scaled, base 500,000"), (0, None)):
        layers = [rotary] * SHAPE["num_hidden_layers"]
        hf.SmolLM3Config(**SHAPE, rope_theta=5e5, no_rope_layers=layers).save_pretrained(tmp_path)
        assert farspan.inspect(tmp_path).rope == described


def test_layers_without_attention_are_counted():
    mamba = SimpleNamespace(
        layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_d_state=16
    )
    assert layers_without_attention(mamba, {1}) == {"mamba": 2}
    blocks = SimpleNamespace(layers_block_type=["mlp", "full_attention", "linear_attention"])
    counts = layers_without_attention(blocks, {1})
    assert describe_other_layers(counts) == "1 mlp, 1 linear attention"
    assert layers_without_attention(hf.LlamaConfig(**SHAPE), {0}) == {}


def test_a_layer_without_heads_in_its_config_has_none():
    assert layer_heads(hf.PreTrainedConfig(), 0, None) == (0, 0)
    assert layer_heads(hf.PreTrainedConfig(num_attention_heads=3), 0, None) == (3, 3)


def test_untrained_rows_of_a_position_table_are_reported(tmp_path):
    shape = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    config = FarspanConfig(
        **shape, position="learned", max_position_embeddings=16, position_table=64
    )
    FarspanForCausalLM(config).save_pretrained(tmp_path)
    inspection = farspan.inspect(tmp_path)
    assert inspection.train_length == 16
    assert "its position table has 64 rows; those beyond 16 are untrained" in inspection.warnings
    assert (
        farspan.load(tmp_path).model(torch.zeros(1, 64, dtype=torch.long)).logits.isfinite().all()
    )


def test_inspect_describes_growing_scales_at_the_target():
    (note, *_) = farspan.inspect("swan-twin").warnings
    assert "min 1.520, mean 1.520, max 1.520 at 16,384 keys, growing by the basis `log`" in note
    assert note.partition("; ")[0].endswith("`log` as base·(1 + 0.15·basis) in all heads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_temperature_by_position_is_not_rotation(dtype):
    """Beam scales the queries of its layers without positions by (1 + p/2048)^0.1."""
    if "beam" not in hf.CONFIG_MAPPING:
        pytest.skip("this transformers has no Beam")
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    types = [*["sliding_attention"] * 3, "full_attention"]
    layout = {"layer_types": types, "sliding_window": 16, "n_group": 1, "topk_group": 1}
    config = hf.AutoConfig.for_model("beam", **SHAPE, **experts, **layout)
    for seed in range(5):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        assert [layer.position for layer in probe(model)] == ["rope", "rope", "rope", "none"]


@pytest.mark.parametrize("name", ["max_position_embeddings", "max_seq_len", "seq_length"])
@pytest.mark.parametrize(("limit", "length"), [(-1, None), (0, None), (1, None), (2, 2), (8, 8)])
def test_the_train_length_is_a_limit_of_the_config_above_one(name, limit, length):
    config = hf.PreTrainedConfig(**{name: limit})
    assert config_train_length(config) == length


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_table_of_equal_biases_is_no_slope(value: float):
    """ALiBi falls with the distance; a new table of T5 may be all zeros."""
    model = next(family for family in FAMILIES if family.name == "farspan-t5").build()
    with torch.no_grad():
        for name, table in model.named_parameters():
            if "t5" in name:
                table.fill_(value)
    assert {layer.position for layer in probe(model)} == {"t5"}


def test_a_query_that_only_grows_did_not_turn():
    torch.manual_seed(0)
    q, factors = torch.randn(1, 4, 6, 8), 0.5 + torch.rand(1, 4, 6, 1)
    assert not probe_module._turned(q, q * factors)
    assert probe_module._turned(q, q * factors.expand_as(q).flip(1, 3).cumprod(-1))


def test_a_query_turned_when_it_moved_by_more_than_rounding_can():
    """By more than 4 ε, 1/32 in bf16. The coordinates are whole, and every norm is 32."""
    q, near, far = torch.tensor(
        [[31, 7, 3, 2, 1], [31, 7, 3, 1, 2], [31, 7, 1, 2, 3]], dtype=torch.bfloat16
    )
    assert not probe_module._turned(q, near)
    assert probe_module._turned(q, far)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_queries_that_cannot_show_a_change_leave_the_encoding_unknown(value: float):
    q = torch.full((1, 4, 6, 8), value)
    call = seam.Call(0, torch.nn.Identity(), q, torch.ones_like(q), q, None, 1.0, {})
    assert probe_module._encoding(call, call, call, takes_positions=True) == "unknown"


def test_neighboring_rows_of_a_table_are_positions():
    table = torch.nn.Embedding(6, 4)
    assert probe_module._counts_up(table, table.weight[2:5][None])
    assert not probe_module._counts_up(table, table.weight[[2, 4, 5]][None])
    assert not probe_module._counts_up(table, torch.zeros(1, 3, 8)), "of another width"


def test_the_first_layer_is_that_of_the_list_with_the_attention():
    towers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    model = torch.nn.ModuleDict({"towers": towers, "layers": layers})
    assert probe_module._first_layer(model, layers[1][0]) is layers[0]
    elsewhere = torch.nn.Linear(2, 2)
    assert probe_module._first_layer(model, elsewhere) is elsewhere


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_change_is_one_relative_to_the_largest_value(size):
    states = torch.tensor([1.0, -0.5]) * size
    assert probe_module._changed(states, states * (1 + 2e-4))
    assert not probe_module._changed(states, states * (1 + 5e-5))


@pytest.mark.parametrize("adds", [True, False])
def test_added_rotation_follows_the_place_and_not_the_hidden_states(adds, monkeypatch):
    """Rotation that a layout adds ignores position ids: hidden states in reverse show it."""
    monkeypatch.setattr(seam, "adds_rotation", lambda module: adds)
    torch.manual_seed(0)
    q = torch.randn(1, 4, 6, 8)
    call = seam.Call(0, torch.nn.Identity(), q, q, q, None, 1.0, {})

    def encoding(reversed_queries: torch.Tensor) -> str:
        turned = dataclasses.replace(call, q=reversed_queries)
        return probe_module._encoding(call, call, turned, takes_positions=True)

    assert encoding(q.flip(2)) == "none", "every query moved with its hidden state"
    assert encoding(q) == ("rope" if adds else "none")
