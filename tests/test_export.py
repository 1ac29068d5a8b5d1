"""An export gives the logits of the live model in every format; all else is refused.

A refused or failed export leaves no files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import farspan
from families import FAMILIES, SHAPE, tokens
from farspan import cli
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import FarspanError
from farspan.formats import registry
from farspan.formats.fold import LogitProof, logits
from farspan.formats.stock import to_stock
from farspan.gguf_loading import dequantized_dtype
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.workflows import export as export_workflow
from farspan.workflows.generate import generate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PACKAGES = {"peft": "peft", "gguf": "gguf"}


def available(*formats: str) -> list:
    """Formats as parameters; those whose package is not installed are skipped."""
    missing = {
        name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None
    }
    return [
        pytest.param(name, marks=pytest.mark.skipif(name in missing, reason="not installed"))
        for name in formats
    ]


ALL_FORMATS = available("live", "folded", "stock", "peft", "gguf")


def constant_scales(layers: int = 6, heads: int = 8) -> Scales:
    generator = torch.Generator().manual_seed(3)
    return Scales(tuple(range(layers)), 1 + 0.6 * torch.rand(layers, heads, generator=generator))


def log_scales(layers: int, heads: int) -> Scales:
    return Scales(
        tuple(range(layers)), torch.ones(layers, heads), torch.full((layers, heads), 0.2), "log", 16
    )


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """Patches of the bundled models by name, such as "nope-twin:scales"; each is made once."""
    folder = tmp_path_factory.mktemp("patches")

    @cache
    def make(name: str) -> Path:
        base, method = name.split(":")
        model = farspan.load(base).model
        parts = {
            "scales": {"scales": constant_scales()},
            "yarn": {"rope": YARN},
            "linear": {"rope": {"rope_type": "linear", "factor": 4.0}, "scales": constant_scales()},
        }[method]
        return Patch(method, fingerprint(model), 2048, 512, **parts, name=base).save(
            folder / f"{base}-{method}"
        )

    return make


@pytest.fixture(scope="module")
def exported(patched, tmp_path_factory):
    """Exports by patch and format; each is made once."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def make(name: str, format: str) -> export_workflow.ExportResult:
        return farspan.export(patched(name), folder / f"{name.replace(':', '-')}-{format}", format)

    return make


@pytest.fixture(scope="module")
def live_logits(patched):
    """The logits of a patched model on `sample()`; each is computed once."""

    @cache
    def compute(name: str) -> torch.Tensor:
        return logits(farspan.load(patched(name), dtype=torch.float32).model, sample())

    return compute


@cache
def sample(length: int = 64) -> torch.Tensor:
    tokenizer = farspan.load("nope-twin").tokenizer
    text = next(read_documents("python-docs/score")).text[: 16 * length]
    return torch.tensor([tokenizer(text)["input_ids"][:length]])


def build(name: str) -> PreTrainedModel:
    return next(family for family in FAMILIES if family.name == name).build()


def build_with_vocabulary(name: str, size: int) -> PreTrainedModel:
    """With more embedding rows than a small tokenizer has tokens."""
    model = build(name)
    model.resize_token_embeddings(size)
    model.config.vocab_size = size
    return model


def tiny(name: str, folder: Path, **parts) -> Path:
    """A patch of a tiny random model, saved beside the model."""
    model = build(name)
    model.save_pretrained(folder / "base")
    parts = parts or {"scales": constant_scales(4, 4)}
    return Patch("test", fingerprint(model), 256, 64, **parts, name=str(folder / "base")).save(
        folder / "patch"
    )


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("base", ["nope-twin", "rope-twin"])
@pytest.mark.long
def test_every_format_keeps_per_head_scales(base: str, format: str, exported):
    done = exported(f"{base}:scales", format)
    assert set(done.proofs) == {"inside", "beyond"}
    for proof in done.proofs.values():
        assert proof.holds
        assert proof.tokens == 256
        assert proof.same_argmax > 0.99
        assert proof.kl < 1e-5
    record = json.loads((done.folder / "record.json").read_text())
    assert record["proofs"]["beyond"]["max_abs_logit"] == done.proofs["beyond"].max_abs_logit
    card = (done.folder / "README.md").read_text()
    for part in (base, "512 to 2,048", "`scales`", "max 1.", f"--format {format}"):
        assert part in card
    assert "same argmax" in card
    assert "Runs in" in card


@pytest.mark.long
@pytest.mark.parametrize("format", available("gguf"))
def test_gguf_keeps_yarn_parameters(format: str, exported):
    for proof in exported("rope-twin:yarn", format).proofs.values():
        assert proof.max_abs_logit < 1e-3


@pytest.mark.parametrize("format", ["live", "folded", "stock"])
@pytest.mark.parametrize(
    "parts",
    [
        {
            "weights": {"model.norm.weight": torch.linspace(0.5, 2, 32)},
            "scales": constant_scales(4, 4),
        },
        {"rope": {"rope_type": "none"}, "scales": constant_scales(4, 4)},
        {"rope": {"rope_type": "linear", "factor": 4.0}},
        {"rope": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope": {**YARN, "original_max_position_embeddings": 64}},
    ],
    ids=["tuned", "removed", "linear", "dynamic", "yarn"],
)
def test_export_keeps_tuned_weights_and_every_rope_type(format: str, parts: dict, tmp_path):
    done = farspan.export(tiny("farspan-rope", tmp_path, **parts), tmp_path / "out", format)
    assert all(proof.max_abs_logit < 1e-4 for proof in done.proofs.values())


DYNAMIC = {"rope": {"rope_type": "dynamic", "factor": 4.0}}
TUNED = {"weights": {"model.norm.weight": torch.ones(32)}}


@pytest.mark.parametrize(
    ("format", "parts", "message"),
    [
        ("folded", {"scales": log_scales(4, 4)}, "'log' grow with the context.*--format live"),
        ("stock", {"scales": log_scales(4, 4)}, "'log' grow with the context.*--format live"),
        ("peft", {"scales": log_scales(4, 4)}, "'log' grow with the context.*--format live"),
        ("gguf", {"scales": log_scales(4, 4)}, "'log' grow with the context.*--format live"),
        (
            "peft",
            {"rope": YARN, "scales": constant_scales(4, 4)},
            "holds rope parameters.*--format stock",
        ),
        ("peft", TUNED, "holds tuned weights.*--format stock"),
        ("gguf", DYNAMIC, "rope type 'dynamic' is not supported.*--format stock"),
        (
            "gguf",
            {"rope": {**YARN, "beta_fast": 16.0}},
            "YaRN with beta_fast 32 and the patch has 16.*--format stock",
        ),
        (
            "pickle",
            DYNAMIC,
            "format 'pickle' is unknown; choose one of live, folded, stock, peft, gguf",
        ),
    ],
)
def test_refuses_patches_that_a_format_cannot_hold(
    format: str, parts: dict, message: str, tmp_path
):
    if format in PACKAGES:
        pytest.importorskip(PACKAGES[format])
    with pytest.raises(FarspanError, match=message):
        farspan.export(tiny("farspan-rope", tmp_path, **parts), tmp_path / "out", format)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


def test_live_keeps_a_schedule(tmp_path):
    patch = tiny("farspan-none", tmp_path, scales=log_scales(4, 4))
    assert farspan.export(patch, tmp_path / "out", "live").proofs["beyond"].max_abs_logit == 0


@pytest.mark.long
def test_stock_runs_in_a_process_without_farspan(exported, live_logits, tmp_path):
    done = exported("nope-twin:scales", "stock")
    mixture = build("farspan-swan")  # windowed rotary layers and a NoPE layer
    to_stock(mixture).save_pretrained(tmp_path / "mixture")
    torch.save({"twin": sample(), "mixture": tokens()}, tmp_path / "ids.pt")
    script = f"""
import sys
sys.modules["farspan"] = None  # any import of it now fails
import torch, transformers
folders = {{"twin": {str(done.folder)!r}, "mixture": {str(tmp_path / "mixture")!r}}}
ids = torch.load({str(tmp_path / "ids.pt")!r})
tokenizer = transformers.AutoTokenizer.from_pretrained(folders["twin"])
assert tokenizer(tokenizer.decode(ids["twin"][0]))["input_ids"] == ids["twin"][0].tolist()
logits = {{}}
for name, folder in folders.items():
    with torch.no_grad():
        logits[name] = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids[name]).logits
torch.save(logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-I", "-c", script], check=True)
    stock = torch.load(tmp_path / "logits.pt")
    difference = (stock["twin"] - live_logits("nope-twin:scales")).abs().max()
    assert difference <= done.proofs["inside"].tolerance
    assert (stock["mixture"] - logits(mixture, tokens())).abs().max() < 1e-5


@pytest.mark.long
def test_stock_config_names_the_family_and_the_target_length(exported):
    nope, rope = (
        json.loads((exported(f"{base}:scales", "stock").folder / "config.json").read_text())
        for base in ("nope-twin", "rope-twin")
    )
    assert nope["max_position_embeddings"] == 2048, "engines serve no more than that"
    assert nope["model_type"] == "smollm3"
    assert rope["model_type"] == "llama"


@pytest.mark.long
@torch.no_grad()
def test_peft_loads_the_adapter_on_the_base_and_on_its_stock_export(exported, live_logits):
    peft = pytest.importorskip("peft")
    done = exported("rope-twin:scales", "peft")
    assert {file.name for file in done.folder.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert done.bytes < 50_000
    live = live_logits("rope-twin:scales")
    base = farspan.load("rope-twin", dtype=torch.float32).model
    stock = to_stock(base)
    for target in (base, stock):
        model = peft.PeftModel.from_pretrained(target, done.folder)
        assert model.peft_config["default"].base_model_name_or_path == "rope-twin"
        assert (model(input_ids=sample()).logits - live).abs().max() < 1e-3
        assert (model.merge_and_unload()(input_ids=sample()).logits - live).abs().max() < 1e-3


def test_adapter_holds_ones_for_layers_without_scales(tmp_path):
    pytest.importorskip("peft")
    from farspan.formats.peft import ia3_vectors

    patch = Patch.load(
        tiny("llama", tmp_path, scales=Scales((2,), torch.tensor([[1.1, 1.2, 1.3, 1.4]])))
    )
    vectors = ia3_vectors(farspan.load(tmp_path / "base").model, patch)
    assert len(vectors) == 4
    assert torch.equal(vectors["model.layers.0.self_attn.q_proj"], torch.ones(32, 1))
    assert torch.equal(
        vectors["model.layers.2.self_attn.q_proj"][:, 0], patch.scales.base[0].repeat_interleave(8)
    )


@pytest.mark.long
def test_transformers_refuses_a_live_folder(exported):
    folder = exported("rope-twin:scales", "live").folder
    with pytest.raises(ValueError, match="farspan-patched"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_live_folder_can_be_moved_and_detects_changed_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    done = farspan.export(tiny("llama", tmp_path), tmp_path / "live", "live")
    live = logits(farspan.load(tmp_path / "patch").model, torch.arange(24)[None])
    shutil.rmtree(tmp_path / "base")
    moved = done.folder.rename(tmp_path / "elsewhere")
    assert torch.equal(logits(farspan.load(moved).model, torch.arange(24)[None]), live)
    assert farspan.inspect(moved).family == "llama"
    weights = load_file(moved / "base" / "model.safetensors")
    save_file(
        {**weights, "model.norm.weight": weights["model.norm.weight"] + 1},
        moved / "base" / "model.safetensors",
    )
    with pytest.raises(FarspanError, match="fitted on weights"):
        farspan.load(moved)


def test_llama_loaded_without_rotation_is_exported_without_rotation(tmp_path):
    tiny("llama", tmp_path)
    model = farspan.load(tmp_path / "base", position="none").model
    patch = Patch(
        "test",
        fingerprint(model),
        256,
        64,
        constant_scales(4, 4),
        name=str(tmp_path / "base"),
        position="none",
    )
    patch.save(tmp_path / "nope")
    for format in ("live", "stock"):
        done = farspan.export(tmp_path / "nope", tmp_path / format, format)
        assert {layer.position for layer in farspan.inspect(done.folder).layers} == {"none"}


def test_the_card_of_an_export_has_every_option_of_its_command(tmp_path):
    tiny("llama", tmp_path)
    done = farspan.export(tmp_path / "base", tmp_path / "stock", "stock", position="none")
    assert json.loads((done.folder / "record.json").read_text())["settings"]["position"] == "none"
    card = (done.folder / "README.md").read_text()
    assert "\nfarspan export base -o stock --format stock --position none\n" in card


def test_a_card_names_a_model_without_paths_on_this_disk(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    sources = [".", tmp_path / "model", "owner/name", "nope-twin"]
    names = [registry.ExportJob(Path(s), None, None, None, None).source for s in sources]
    assert names == ["model", "model", "owner/name", "nope-twin"]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        pytest.param("phi3", marks=pytest.mark.long),
        pytest.param("granitemoehybrid", marks=pytest.mark.long),
    ],
)
def test_exports_of_other_families_generate_the_same_tokens(name: str, tmp_path):
    layers = (1, 3) if name == "granitemoehybrid" else tuple(range(4))
    patch = tiny(name, tmp_path, scales=replace(constant_scales(len(layers), 4), layers=layers))
    live = farspan.load(patch).model
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = live.generate(torch.arange(5)[None], **options).tolist()
    for format in ("live", "folded", "stock"):
        done = farspan.export(patch, tmp_path / format, format)
        assert ("beyond" in done.proofs) == (name != "gpt2"), (
            "a learned position table has no rows beyond it"
        )
        written = farspan.load(done.folder).model
        assert type(written) is type(live)
        assert written.generate(torch.arange(5)[None], **options).tolist() == expected


@pytest.mark.parametrize(
    ("name", "format", "parts", "message"),
    [
        ("qwen3", "folded", {}, "layer 0 cannot be folded.*norm.*--format live"),
        ("qwen3", "stock", {}, "layer 0 cannot be folded.*norm.*--format live"),
        ("qwen3", "peft", {}, "layer 0 cannot be an adapter.*norm.*--format live"),
        ("phi3", "peft", {}, "queries, keys and values in one qkv_proj.*--format folded"),
        ("gpt2", "peft", {}, "c_attn, a Conv1D.*--format folded"),
        ("olmo2", "peft", {}, "q_norm.*--format folded"),
        ("mistral", "gguf", {}, "only Llama-shaped models.*mistral.*llama.cpp's own converter"),
        ("llama-bias", "gguf", {}, "has biases.*--format stock"),
        ("llama", "gguf", {}, "contains its tokenizer.*--format stock"),
        (
            "llama",
            "stock",
            {"rope": {"rope_type": "none"}},
            "a llama checkpoint cannot express that; use --format live",
        ),
        ("farspan-swan", "gguf", {}, "sliding windows.*--format stock"),
        ("farspan-alibi", "stock", {}, "no stock family has alibi"),
    ],
)
def test_refuses_families_that_a_format_cannot_hold(name, format, parts, message, tmp_path):
    if format in PACKAGES:
        pytest.importorskip(PACKAGES[format])
    with pytest.raises(FarspanError, match=message):
        farspan.export(tiny(name, tmp_path, **parts), tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_exports_a_model_without_a_patch(tmp_path):
    tiny("farspan-rope", tmp_path)
    assert farspan.export(tmp_path / "base", tmp_path / "stock", "stock").proofs["beyond"].holds
    for format in ("live", "peft"):
        with pytest.raises(FarspanError, match="holds no patch.*--format stock"):
            farspan.export(tmp_path / "base", tmp_path / "out", format)


def test_proof_of_bfloat16_weights_allows_rounding(tmp_path):
    done = farspan.export(tiny("llama", tmp_path), tmp_path / "half", "stock", dtype="bfloat16")
    assert farspan.load(done.folder, dtype="auto").model.dtype == torch.bfloat16
    assert "--format stock --dtype bfloat16\n" in (done.folder / "README.md").read_text()
    assert 1e-5 < done.proofs["inside"].max_abs_logit < done.proofs["inside"].tolerance


@pytest.mark.parametrize("format", ["live", "peft"])
def test_refuses_a_dtype_for_formats_without_one(format: str, tmp_path):
    """It would change only the tolerance of the proof."""
    patch = tiny("llama", tmp_path)
    message = f"--dtype bfloat16 is not supported by --format {format}; .* folded, stock, gguf$"
    with pytest.raises(FarspanError, match=message):
        farspan.export(patch, tmp_path / "out", format, dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def test_record_has_a_dtype_only_for_formats_with_a_choice(tmp_path):
    patch = tiny("llama", tmp_path)
    for format in ("live", "stock"):
        farspan.export(patch, tmp_path / format, format)
        settings = json.loads((tmp_path / format / "record.json").read_text())["settings"]
        assert settings.get("dtype") == (None if format == "live" else "float32")


def test_failed_proof_writes_nothing_and_exits_3(tmp_path, monkeypatch, capsys):
    wrong = LogitProof(tokens=256, max_abs_logit=0.5, kl=0.1, same_argmax=0.5, tolerance=1e-4)
    monkeypatch.setattr(export_workflow, "compare_logits", lambda *args, **options: wrong)
    patch = str(tiny("llama", tmp_path))
    arguments = ["export", patch, "-o", str(tmp_path / "out"), "--format", "folded"]
    code, message = run_and_fail(capsys, monkeypatch, *arguments)
    assert code == 3
    assert "the folded export differs from the live model by 0.5 in a logit" in message
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


@pytest.mark.long
def test_proof_detects_one_wrong_head(patched, tmp_path, monkeypatch):
    """nope-twin magnifies rounding, so its tolerance is large, but 2% of a scale is larger."""
    real_fold = registry.fold

    def wrong_fold(model, scales):
        base = scales.base.clone()
        base[4, 4] *= 1.02
        return real_fold(model, replace(scales, base=base))

    monkeypatch.setattr(registry, "fold", wrong_fold)
    with pytest.raises(FarspanError, match="the folded export differs"):
        farspan.export(patched("nope-twin:scales"), tmp_path / "out", "folded")


@pytest.mark.parametrize("name", ["llama", "smollm3", "granite"])
def test_gguf_round_trips_every_llama_cpp_family(name: str, tmp_path):
    pytest.importorskip("gguf")
    from farspan.formats.gguf import architecture_of, read_gguf, write_gguf

    model = build_with_vocabulary("llama" if name == "llama" else "smollm3", 300)
    if name == "granite":
        model = type(model)(
            type(model.config)(**{**model.config.to_dict(), "no_rope_layers": [0] * 4})
        ).eval()
    assert architecture_of(model) == name
    tokenizer = train_tokenizer(["some text to cut, 12 times"], 270)
    write_gguf(model, tokenizer, tmp_path / "model.gguf")
    read = read_gguf(tmp_path / "model.gguf", tokenizer)
    ids = torch.arange(40)[None]
    assert (logits(read, ids) - logits(model, ids)).abs().max() < 1e-6
    with pytest.raises(FarspanError, match="the tokenizer's ggml.tokens in model.gguf differs"):
        read_gguf(tmp_path / "model.gguf", train_tokenizer(["other words"], 270))


@pytest.mark.long
def test_gguf_metadata_describes_the_model_and_tokenizer(exported):
    gguf = pytest.importorskip("gguf")

    def fields(name: str) -> dict:
        reader = gguf.GGUFReader(exported(name, "gguf").folder / "model.gguf")
        return {key: field.contents() for key, field in reader.fields.items()}

    nope, yarn = fields("nope-twin:scales"), fields("rope-twin:yarn")
    assert nope["general.architecture"] == "granite"
    assert nope["granite.rope.scaling.finetuned"] is False
    assert nope["granite.attention.scale"] == pytest.approx(32**-0.5 * 1024)
    assert nope["tokenizer.ggml.pre"] == "smollm"
    assert nope["tokenizer.ggml.tokens"][0] == "<|endoftext|>"
    assert nope["tokenizer.ggml.add_bos_token"] is False
    assert yarn["general.architecture"] == "llama"
    assert yarn["llama.rope.scaling.type"] == "yarn"
    assert yarn["llama.rope.scaling.factor"] == 4
    assert yarn["llama.rope.scaling.original_context_length"] == 512
    assert yarn["llama.context_length"] == 2048


@pytest.mark.long
def test_loads_a_gguf_file_of_a_rotary_model(exported, tmp_path):
    pytest.importorskip("gguf")
    model = build_with_vocabulary("llama", 300)
    model.save_pretrained(tmp_path / "base")
    train_tokenizer(["some text to cut, 12 times"], 270).save_pretrained(tmp_path / "base")
    parts = {"scales": constant_scales(4, 4), "name": str(tmp_path / "base")}
    patch = Patch("test", fingerprint(model), 256, 64, **parts).save(tmp_path / "patch")
    done = farspan.export(patch, tmp_path / "out", "gguf")
    read = farspan.load(done.folder / "model.gguf").model
    live = farspan.load(patch).model
    ids = torch.arange(200)[None]
    assert (logits(read, ids) - logits(live, ids)).abs().max() < 1e-4
    assert (logits(read, ids) - logits(model, ids)).abs().max() > 1e-3, "the scales have an effect"
    assert read.dtype == dequantized_dtype(None) == dequantized_dtype("cpu") == torch.float32
    assert dequantized_dtype("cuda:0") == torch.bfloat16, (
        "attention in float32 may materialize every score"
    )
    with pytest.raises(FarspanError, match="scales its rotation .yarn.*load the checkpoint"):
        farspan.load(exported("rope-twin:yarn", "gguf").folder / "model.gguf")


@pytest.mark.long
def test_refuses_gguf_files_that_transformers_cannot_load(exported, tmp_path):
    gguf = pytest.importorskip("gguf")
    with pytest.raises(
        FarspanError, match="granite model without rotation, .*; load the checkpoint"
    ) as caught:
        farspan.load(exported("nope-twin:scales", "gguf").folder / "model.gguf")
    assert "config.json" not in str(caught.value)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "nonesuch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        FarspanError, match="nonesuch.*load the checkpoint that it was converted from"
    ) as caught:
        farspan.load(tmp_path / "other.gguf")
    assert "config.json" not in str(caught.value)


def run_and_fail(capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    """The exit code and the message of a command that fails."""
    monkeypatch.setattr("sys.argv", ["farspan", *arguments])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return caught.value.code, message


def test_export_command_prints_the_proof(tmp_path):
    patch = str(tiny("llama", tmp_path))

    def run(out: str, *options: str) -> str:
        arguments = ["export", patch, "-o", str(tmp_path / out), "--format", "folded", *options]
        return CliRunner().invoke(cli.app, arguments).output

    text = run("out")
    assert "beyond the train length" in text
    assert f"in {tmp_path / 'out'}" in text
    assert json.loads(run("other", "--json"))["proofs"]["inside"]["same_argmax"] == 1


def test_export_accepts_source_as_the_old_name_of_model(tmp_path):
    patch = tiny("llama", tmp_path)
    with pytest.warns(DeprecationWarning, match="source= is now model="):
        assert farspan.export(source=patch, out=tmp_path / "out", format="folded").bytes


PROMPT = "The pass key is 4 7 1 2 3. Remember it. What is the pass key? The"


@pytest.mark.long
@torch.no_grad()
def test_generate_streams_the_greedy_continuation(patched):
    folder = patched("rope-twin:scales")
    model, tokenizer = farspan.load(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(
        model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    )
    pieces = list(farspan.generate(folder, PROMPT, max_new_tokens=16))
    assert "".join(pieces) == expected
    assert len(pieces) > 3
    arguments = ["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "16"]
    assert CliRunner().invoke(cli.app, arguments).stdout == expected + "\n"


def test_generate_ignores_the_generation_config_of_the_checkpoint(tmp_path):
    model, tokenizer = farspan.load("rope-twin")
    expected = "".join(farspan.generate("rope-twin", PROMPT, max_new_tokens=16))
    model.generation_config.repetition_penalty = 3.0
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert "".join(farspan.generate(tmp_path / "model", PROMPT, max_new_tokens=16)) == expected


@pytest.mark.long
def test_sampling_depends_only_on_its_seed():
    first, second, other = (
        "".join(farspan.generate("rope-twin", PROMPT, max_new_tokens=8, temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert first == second != other
    sampled = dict(max_new_tokens=8, temperature=1.0)
    late = farspan.generate("rope-twin", PROMPT, seed=1, **sampled)
    torch.manual_seed(7)  # between the call and the first token
    before = torch.random.get_rng_state()
    assert "".join(late) == first
    assert torch.equal(torch.random.get_rng_state(), before), (
        "the caller's random state does not change"
    )


def test_closing_the_stream_stops_generation():
    running = threading.active_count()
    pieces = generate("rope-twin", PROMPT, max_new_tokens=100_000)
    next(pieces)
    assert threading.active_count() == running + 1
    start = time.perf_counter()
    pieces.close()
    assert threading.active_count() == running
    assert time.perf_counter() - start < 20, "100,000 tokens would take minutes"


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("either --prompt-file PATH or --prompt", ["rope-twin"]),
        ("either --prompt-file", ["rope-twin", "--prompt", "a", "--prompt-file", "b"]),
        ("the prompt is empty", ["rope-twin", "--prompt", ""]),
        ("is not UTF-8 text \\(byte 1\\)", ["rope-twin", "--prompt-file", "latin.txt"]),
        ("is not UTF-8 text \\(character 1\\); convert", ["rope-twin", "--prompt", "a\udce9b"]),
        ("nowhere.txt is no", ["rope-twin", "--prompt-file", "nowhere.txt"]),
        ("--max-new-tokens is 0;", ["rope-twin", "--prompt", "a", "--max-new-tokens", "0"]),
        ("temperature is -1;", ["rope-twin", "--prompt", "a", "--temperature", "-1"]),
        ("seed is -1;", ["rope-twin", "--prompt", "a", "--seed", "-1"]),
        ("seed is 9{20};", ["rope-twin", "--prompt", "a", "--seed", "9" * 20]),
        ("has no tokenizer", ["plain", "--prompt", "a"]),
        (
            "position table of learned has 64 rows",
            ["learned", "--prompt", "a b c", "--max-new-tokens", "64"],
        ),
    ],
)
def test_generate_refuses_bad_prompts_and_settings(
    message, arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("aéb".encode("latin-1"))
    if "plain" in arguments:
        FAMILIES[0].build().save_pretrained("plain")
    if "learned" in arguments:
        build("farspan-learned").save_pretrained("learned")
        train_tokenizer(["a b c"], 257).save_pretrained("learned")
    code, printed = run_and_fail(capsys, monkeypatch, "generate", *arguments)
    assert code == 2
    assert re.search(message, printed)


def test_generation_fills_a_position_table_but_for_the_last_token(tmp_path):
    config = FarspanConfig(**{**SHAPE, "vocab_size": 257}, position="learned")
    FarspanForCausalLM(config).save_pretrained(tmp_path)
    train_tokenizer(["a b c"], 257).save_pretrained(tmp_path)
    loaded, tokenizer = farspan.load(tmp_path)
    loaded.generation_config.eos_token_id = tokenizer.eos_token = None
    room = 64 - len(tokenizer("a b c")["input_ids"])
    assert list(generate((loaded, tokenizer), "a b c", max_new_tokens=room + 1))
    with pytest.raises(FarspanError, match="position table of .* has 64 rows"):
        generate((loaded, tokenizer), "a b c", max_new_tokens=room + 2)


def lines() -> list[str]:
    """A thousand lines of real text, and a few that are hard to tokenize."""
    from pydoc_data.topics import topics

    real = [line for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    hard = [
        "½ ²3 ٣٤ 2024年 1,234.5 x²+y³ Ⅷ",
        "naïve — “quotes” …  two  spaces\ttab",
        " 1 22 333",
        "日本語 текст 😀👍🏽",
        "don't WE'LL I'd",
        "a  \n\n b \r\n c",
    ]
    return real[:1000] + hard


@pytest.mark.manual
@pytest.mark.parametrize(
    "name", ["nope-twin:scales", "rope-twin:scales", "rope-twin:yarn", "rope-twin:linear"]
)
@torch.no_grad()
def test_llama_cpp_tokenizes_and_generates_the_same_tokens(name: str, exported, patched, tmp_path):
    """FARSPAN_LLAMA_CPP names a folder in which `npm install node-llama-cpp` was run."""
    pytest.importorskip("gguf")
    home = os.environ.get("FARSPAN_LLAMA_CPP")
    if not home or not shutil.which("node"):
        pytest.skip("needs node, and FARSPAN_LLAMA_CPP set to a folder with node-llama-cpp")
    model, tokenizer = farspan.load(patched(name), dtype=torch.float32)
    ids = sample(8000)[0].tolist()
    prompts = [ids[:100], ids[2000:2400], ids[3000:3700], ids[5000:6500]]
    request, response = tmp_path / "request.json", tmp_path / "response.json"
    request.write_text(json.dumps({"lines": lines(), "prompts": prompts, "count": 32}))
    script = Path(__file__).parent / "llama.mjs"
    model_file = exported(name, "gguf").folder / "model.gguf"
    subprocess.run(
        ["node", str(script), str(model_file), str(request), str(response)], check=True, cwd=home
    )
    answer = json.loads(response.read_text())
    assert answer["tokens"] == [
        tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines()
    ]
    for prompt, greedy in zip(prompts, answer["greedy"], strict=True):
        options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
        assert (
            greedy == model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        )
