"""What is exported is the live model, wherever it runs; what cannot be is refused, and what is not vanishes."""

from __future__ import annotations

import importlib.util
import json
import os
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
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import farspan
from families import FAMILIES
from farspan import cli
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.data.documents import read_documents
from farspan.errors import FarspanError
from farspan.formats.fold import Proof, logits
from farspan.formats.stock import to_stock
from farspan.loading import unpacked_dtype
from farspan.workflows import exporting
from farspan.workflows.generating import generate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
NEEDS = {"peft": "peft", "gguf": "gguf"}


def needing(*formats: str) -> list:
    """Formats as parameters; those whose package is missing are skipped."""
    missing = {name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None}
    return [pytest.param(name, marks=pytest.mark.skipif(name in missing, reason="not installed")) for name in formats]


EVERY = needing("live", "folded", "stock", "peft", "gguf")


def constant(layers: int = 6, heads: int = 8) -> Scales:
    generator = torch.Generator().manual_seed(3)
    return Scales(tuple(range(layers)), 1 + 0.6 * torch.rand(layers, heads, generator=generator))


def schedule(layers: int, heads: int) -> Scales:
    return Scales(tuple(range(layers)), torch.ones(layers, heads), torch.full((layers, heads), 0.2), "log", 16)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """Patches of the twins by name; made when first asked for."""
    folder = tmp_path_factory.mktemp("patches")

    @cache
    def make(name: str) -> Path:
        twin, what = name.split(":")
        model = farspan.load(twin).model
        parts = {
            "scales": {"scales": constant()},
            "yarn": {"rope": YARN},
            "linear": {"rope": {"rope_type": "linear", "factor": 4.0}, "scales": constant()},
        }[what]
        return Patch(what, fingerprint(model), 2048, 512, **parts, name=twin).save(folder / f"{twin}-{what}")

    return make


@pytest.fixture(scope="module")
def exported(patched, tmp_path_factory):
    """Exports by patch and format, each made once."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def make(name: str, format: str) -> exporting.Exported:
        return farspan.export(patched(name), folder / f"{name.replace(':', '-')}-{format}", format)

    return make


def sample(length: int = 64) -> torch.Tensor:
    tokenizer = farspan.load("nope-twin").tokenizer
    return torch.tensor([tokenizer(next(read_documents("python-docs/score")).text)["input_ids"][:length]])


def tiny(name: str, folder: Path, **parts) -> Path:
    """A patch of a tiny foreign model, with the model beside it."""
    model = next(family for family in FAMILIES if family.name == name).build()
    model.save_pretrained(folder / "base")
    parts = parts or {"scales": constant(4, 4)}
    return Patch("test", fingerprint(model), 256, 64, **parts, name=str(folder / "base")).save(folder / "patch")


@pytest.mark.parametrize("format", EVERY)
@pytest.mark.parametrize("twin", ["nope-twin", "rope-twin"])
def test_per_head_scales_in_every_format(twin: str, format: str, exported):
    done = exported(f"{twin}:scales", format)
    assert set(done.proofs) == {"inside", "beyond"}
    for proof in done.proofs.values():
        assert proof.holds
        assert proof.tokens == 256
        assert proof.same_argmax > 0.99
        assert proof.kl < 1e-5
    record = json.loads((done.folder / "record.json").read_text())
    assert record["proofs"]["beyond"]["max_abs_logit"] == done.proofs["beyond"].max_abs_logit
    card = (done.folder / "README.md").read_text()
    for part in (twin, "512 to 2,048", "`scales`", "largest 1.", f"--format {format}", "same argmax", "Runs in"):
        assert part in card


@pytest.mark.parametrize("format", needing("live", "stock", "gguf"))
def test_rope_parameters_travel(format: str, exported):
    for proof in exported("rope-twin:yarn", format).proofs.values():
        assert proof.max_abs_logit < 1e-3


@pytest.mark.parametrize("format", ["live", "folded", "stock"])
@pytest.mark.parametrize(
    "parts",
    [
        {"weights": {"model.norm.weight": torch.linspace(0.5, 2, 32)}, "scales": constant(4, 4)},
        {"rope": {"rope_type": "none"}, "scales": constant(4, 4)},
        {"rope": {"rope_type": "linear", "factor": 4.0}},
        {"rope": {"rope_type": "dynamic", "factor": 4.0}},
    ],
    ids=["tuned", "stopped", "linear", "dynamic"],
)
def test_tuned_weights_and_all_kinds_of_rotation_travel(format: str, parts: dict, tmp_path):
    done = farspan.export(tiny("farspan-rope", tmp_path, **parts), tmp_path / "out", format)
    assert all(proof.max_abs_logit < 1e-4 for proof in done.proofs.values())


DYNAMIC = {"rope": {"rope_type": "dynamic", "factor": 4.0}}
TUNED = {"weights": {"model.norm.weight": torch.ones(32)}}


@pytest.mark.parametrize(
    ("format", "parts", "message"),
    [
        ("folded", {"scales": schedule(4, 4)}, "'log' grow with the context.*--format live"),
        ("stock", {"scales": schedule(4, 4)}, "'log' grow with the context.*--format live"),
        ("peft", {"scales": schedule(4, 4)}, "'log' grow with the context.*--format live"),
        ("gguf", {"scales": schedule(4, 4)}, "'log' grow with the context.*--format live"),
        ("peft", {"rope": YARN, "scales": constant(4, 4)}, "holds rope parameters.*--format stock"),
        ("peft", TUNED, "holds tuned weights.*--format stock"),
        ("gguf", DYNAMIC, "rope type 'dynamic'.*--format stock"),
        ("gguf", {"rope": {**YARN, "beta_fast": 16.0}}, "YaRN with beta_fast 32 and the patch has 16.*--format stock"),
        ("pickle", DYNAMIC, "format 'pickle' is unknown; choose one of live, folded, stock, peft, gguf"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(format: str, parts: dict, message: str, tmp_path):
    if format in NEEDS:
        pytest.importorskip(NEEDS[format])
    with pytest.raises(FarspanError, match=message):
        farspan.export(tiny("farspan-rope", tmp_path, **parts), tmp_path / "out", format)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


def test_a_schedule_stays_live(tmp_path):
    patch = tiny("farspan-none", tmp_path, scales=schedule(4, 4))
    assert farspan.export(patch, tmp_path / "out", "live").proofs["beyond"].max_abs_logit == 0


def test_stock_runs_in_a_process_without_farspan(exported, patched, tmp_path):
    done = exported("nope-twin:scales", "stock")
    torch.save(sample(), tmp_path / "ids.pt")
    script = f"""
import sys
sys.modules["farspan"] = None  # any import of it now fails
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(done.folder)!r})
tokenizer = transformers.AutoTokenizer.from_pretrained({str(done.folder)!r})
ids = torch.load({str(tmp_path / "ids.pt")!r})
assert tokenizer(tokenizer.decode(ids[0]))["input_ids"] == ids[0].tolist()
with torch.no_grad():
    torch.save(model(ids).logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-I", "-c", script], check=True)
    live = logits(farspan.load(patched("nope-twin:scales"), dtype=torch.float32).model, sample())
    assert (torch.load(tmp_path / "logits.pt") - live).abs().max() <= done.proofs["inside"].tolerance
    config = json.loads((done.folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048, "engines serve no more than that"
    assert config["model_type"] == "smollm3"
    assert (
        json.loads((exported("rope-twin:scales", "stock").folder / "config.json").read_text())["model_type"] == "llama"
    )


@torch.no_grad()
def test_stock_peft_loads_the_adapter_on_the_base_and_on_its_stock_export(exported, patched):
    peft = pytest.importorskip("peft")
    done = exported("rope-twin:scales", "peft")
    assert {file.name for file in done.folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert done.bytes < 50_000
    live = logits(farspan.load(patched("rope-twin:scales"), dtype=torch.float32).model, sample())
    stock, _ = to_stock(farspan.load("rope-twin", dtype=torch.float32).model)
    for base in (farspan.load("rope-twin", dtype=torch.float32).model, stock):
        model = peft.PeftModel.from_pretrained(base, done.folder)
        assert model.peft_config["default"].base_model_name_or_path == "rope-twin"
        assert (model(input_ids=sample()).logits - live).abs().max() < 1e-3
        assert (model.merge_and_unload()(input_ids=sample()).logits - live).abs().max() < 1e-3


def test_layers_without_scales_get_ones(tmp_path):
    pytest.importorskip("peft")
    from farspan.formats.peft import ia3_vectors

    patch = Patch.load(tiny("llama", tmp_path, scales=Scales((2,), torch.tensor([[1.1, 1.2, 1.3, 1.4]]))))
    vectors = ia3_vectors(farspan.load(tmp_path / "base").model, patch)
    assert len(vectors) == 4
    assert torch.equal(vectors["model.layers.0.self_attn.q_proj"], torch.ones(32, 1))
    assert torch.equal(vectors["model.layers.2.self_attn.q_proj"][:, 0], patch.scales.base[0].repeat_interleave(8))


def test_stock_transformers_refuses_a_live_folder(exported):
    folder = exported("rope-twin:scales", "live").folder
    with pytest.raises(ValueError, match="farspan-patched"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_live_folder_can_be_moved_and_knows_its_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    done = farspan.export(tiny("llama", tmp_path), tmp_path / "live", "live")
    live = logits(farspan.load(tmp_path / "patch").model, torch.arange(24)[None])
    shutil.rmtree(tmp_path / "base")
    moved = done.folder.rename(tmp_path / "elsewhere")
    assert torch.equal(logits(farspan.load(moved).model, torch.arange(24)[None]), live)
    assert farspan.inspect(moved).family == "llama"
    weights = load_file(moved / "base" / "model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] + 1}, moved / "base" / "model.safetensors")
    with pytest.raises(FarspanError, match="fitted on weights"):
        farspan.load(moved)


def test_a_llama_read_without_rotation_stays_so_when_it_goes_live(tmp_path):
    tiny("llama", tmp_path)
    model = farspan.load(tmp_path / "base", position="none").model
    patch = Patch("test", fingerprint(model), 256, 64, constant(4, 4), name=str(tmp_path / "base"), position="none")
    patch.save(tmp_path / "nope")
    for format in ("live", "stock"):
        done = farspan.export(tmp_path / "nope", tmp_path / format, format)
        assert {layer.position for layer in farspan.inspect(done.folder).layers} == {"none"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "granitemoehybrid"])
@pytest.mark.parametrize("format", ["live", "folded", "stock"])
def test_foreign_families(name: str, format: str, tmp_path):
    model = next(family for family in FAMILIES if family.name == name).build()
    layers = (1, 3) if name == "granitemoehybrid" else tuple(range(4))
    patch = tiny(name, tmp_path, scales=replace(constant(len(layers), 4), layers=layers))
    done = farspan.export(patch, tmp_path / "out", format)
    assert ("beyond" in done.proofs) == (name != "gpt2"), "a learned table ends where it ends"
    again = farspan.load(done.folder).model
    assert type(again) is type(model)
    assert farspan.load(patch).model.generate(torch.arange(5)[None], max_new_tokens=8, do_sample=False).tolist() == (
        again.generate(torch.arange(5)[None], max_new_tokens=8, do_sample=False).tolist()
    )


@pytest.mark.parametrize(
    ("name", "format", "parts", "message"),
    [
        ("qwen3", "folded", {}, "layer 0 cannot be folded.*norm.*--format live"),
        ("qwen3", "stock", {}, "layer 0 cannot be folded.*norm.*--format live"),
        ("qwen3", "peft", {}, "layer 0 fit no adapter.*norm.*--format live"),
        ("phi3", "peft", {}, "queries, keys and values in one qkv_proj.*--format folded"),
        ("gpt2", "peft", {}, "c_attn, a Conv1D.*--format folded"),
        ("olmo2", "peft", {}, "q_norm.*--format folded"),
        ("mistral", "gguf", {}, "Llama-shaped models.*mistral.*llama.cpp's own converter"),
        ("llama-bias", "gguf", {}, "has biases.*--format stock"),
        ("llama", "gguf", {}, "carries its tokenizer.*--format stock"),
        ("llama", "stock", {"rope": {"rope_type": "none"}}, "no llama checkpoint can say that; use --format live"),
        ("farspan-swan", "gguf", {}, "sliding windows.*--format stock"),
        ("farspan-alibi", "stock", {}, "no stock family has alibi"),
    ],
)
def test_families_that_do_not_fit_a_format_are_refused(name, format, parts, message, tmp_path):
    if format in NEEDS:
        pytest.importorskip(NEEDS[format])
    with pytest.raises(FarspanError, match=message):
        farspan.export(tiny(name, tmp_path, **parts), tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_patch_is_exported_as_it_is(tmp_path):
    tiny("farspan-rope", tmp_path)
    assert farspan.export(tmp_path / "base", tmp_path / "stock", "stock").proofs["beyond"].holds
    for format in ("live", "peft"):
        with pytest.raises(FarspanError, match="holds no patch.*--format stock"):
            farspan.export(tmp_path / "base", tmp_path / "out", format)


def test_narrower_weights_are_proven_as_such(tmp_path):
    done = farspan.export(tiny("llama", tmp_path), tmp_path / "half", "stock", dtype="bfloat16")
    assert farspan.load(done.folder, dtype="auto").model.dtype == torch.bfloat16
    assert "--format stock --dtype bfloat16\n" in (done.folder / "README.md").read_text()
    assert 1e-5 < done.proofs["inside"].max_abs_logit < done.proofs["inside"].tolerance


@pytest.mark.parametrize("format", ["live", "peft"])
def test_a_dtype_that_no_weight_is_written_in_is_refused(format: str, tmp_path):
    """It would change nothing but what the proof allows."""
    source = tiny("llama", tmp_path)
    message = f"the format {format} has no use for --dtype bfloat16; .*: folded, stock, gguf$"
    with pytest.raises(FarspanError, match=message):
        farspan.export(source, tmp_path / "out", format, dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_record_tells_a_dtype_where_there_was_a_choice(tmp_path):
    source = tiny("llama", tmp_path)
    for format in ("live", "stock"):
        farspan.export(source, tmp_path / format, format)
        settings = json.loads((tmp_path / format / "record.json").read_text())["settings"]
        assert settings.get("dtype") == (None if format == "live" else "float32")


def test_a_mismatch_leaves_nothing_and_exits_3(tmp_path, monkeypatch, capsys):
    wrong = Proof(tokens=256, max_abs_logit=0.5, kl=0.1, same_argmax=0.5, tolerance=1e-4)
    monkeypatch.setattr(exporting, "prove", lambda *args, **options: wrong)
    tiny("llama", tmp_path)
    code, said = refusal(
        capsys, monkeypatch, "export", str(tmp_path / "patch"), "-o", str(tmp_path / "out"), "--format", "folded"
    )
    assert code == 3
    assert "the folded export differs from the live model by 0.5 in a logit" in said
    assert {path.name for path in tmp_path.iterdir()} == {"base", "patch"}


def test_one_wrong_head_is_seen(patched, tmp_path, monkeypatch):
    """The NoPE twin magnifies rounding, so it is allowed much; one scale that is 2% off is still more."""
    real = exporting.fold

    def careless(model, scales):
        base = scales.base.clone()
        base[4, 4] *= 1.02
        return real(model, replace(scales, base=base))

    monkeypatch.setattr(exporting, "fold", careless)
    with pytest.raises(FarspanError, match="the folded export differs"):
        farspan.export(patched("nope-twin:scales"), tmp_path / "out", "folded")


@pytest.mark.parametrize("name", ["llama", "smollm3", "granite"])
def test_each_family_of_llama_cpp_reads_back_as_it_was(name: str, tmp_path):
    pytest.importorskip("gguf")
    from farspan.data.tokens import train_tokenizer
    from farspan.formats.gguf import architecture_of, read_gguf, write_gguf

    model = next(family for family in FAMILIES if family.name == ("llama" if name == "llama" else "smollm3")).build()
    model.config.vocab_size = model.resize_token_embeddings(300).num_embeddings  # more rows than tokens
    if name == "granite":
        model = type(model)(type(model.config)(**{**model.config.to_dict(), "no_rope_layers": [0] * 4})).eval()
    assert architecture_of(model) == name
    tokenizer = train_tokenizer(["some text to cut, 12 times"], 270)
    write_gguf(model, tokenizer, tmp_path / "model.gguf")
    again = read_gguf(tmp_path / "model.gguf", tokenizer)
    ids = torch.arange(40)[None]
    assert (logits(again, ids) - logits(model, ids)).abs().max() < 1e-6
    with pytest.raises(FarspanError, match="the tokenizer's ggml.tokens reads otherwise"):
        read_gguf(tmp_path / "model.gguf", train_tokenizer(["other words"], 270))


def test_a_gguf_file_says_what_it_is(exported):
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


def test_transformers_reads_a_rotary_gguf_file(exported, patched):
    pytest.importorskip("gguf")
    live = logits(farspan.load(patched("rope-twin:scales"), dtype=torch.float32).model, sample())
    read = farspan.load(exported("rope-twin:scales", "gguf").folder / "model.gguf").model
    assert (logits(read, sample()) - live).abs().max() < 1e-3
    assert read.dtype == unpacked_dtype(None) == unpacked_dtype("cpu") == torch.float32
    assert unpacked_dtype("cuda:0") == torch.bfloat16, "where attention in float32 may write out every score"
    with pytest.raises(FarspanError, match="scales its rotation .yarn.*load the checkpoint"):
        farspan.load(exported("rope-twin:yarn", "gguf").folder / "model.gguf")


def test_a_gguf_file_that_transformers_cannot_read_is_told_by_its_cause(exported, tmp_path):
    gguf = pytest.importorskip("gguf")
    with pytest.raises(
        FarspanError, match="granite without rotation, which llama.cpp reads.*load the checkpoint"
    ) as told:
        farspan.load(exported("nope-twin:scales", "gguf").folder / "model.gguf")
    assert "config.json" not in str(told.value)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "nonesuch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FarspanError, match="nonesuch.*load the checkpoint that it was made from") as told:
        farspan.load(tmp_path / "other.gguf")
    assert "config.json" not in str(told.value)


def refusal(capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["farspan", *arguments])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return stop.value.code, captured.err


def test_the_command_prints_the_proof(tmp_path):
    tiny("llama", tmp_path)
    arguments = ["export", str(tmp_path / "patch"), "-o", str(tmp_path / "out"), "--format", "folded"]
    said = CliRunner().invoke(cli.app, arguments).output
    assert "beyond the training length" in said
    assert f"in {tmp_path / 'out'}" in said
    text = CliRunner().invoke(cli.app, [*arguments[:3], str(tmp_path / "more"), *arguments[4:], "--json"]).output
    assert json.loads(text)["proofs"]["inside"]["same_argmax"] == 1


PROMPT = "The pass key is 4 7 1 2 3. Remember it. What is the pass key? The"


@torch.no_grad()
def test_generate_streams_what_the_model_generates(patched):
    folder = patched("rope-twin:scales")
    model, tokenizer = farspan.load(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :])
    pieces = list(farspan.generate(folder, PROMPT, tokens=24))
    assert "".join(pieces) == expected
    assert len(pieces) > 3
    said = CliRunner().invoke(cli.app, ["generate", str(folder), "--prompt", PROMPT, "--tokens", "24"])
    assert said.stdout == expected + "\n"


def test_generate_is_greedy_whatever_the_checkpoint_says(tmp_path):
    model, tokenizer = farspan.load("rope-twin")
    expected = "".join(farspan.generate("rope-twin", PROMPT, tokens=24))
    model.generation_config.repetition_penalty = 3.0
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert "".join(farspan.generate(tmp_path / "model", PROMPT, tokens=24)) == expected


def test_sampling_follows_its_seed(patched):
    once, again, other = (
        "".join(farspan.generate("rope-twin", PROMPT, tokens=16, temperature=1.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert once == again != other
    sampled = dict(tokens=16, temperature=1.0)
    late = farspan.generate("rope-twin", PROMPT, seed=1, **sampled)
    torch.manual_seed(7)  # whatever happens between asking and listening
    before = torch.random.get_rng_state()
    assert "".join(late) == once
    assert torch.equal(torch.random.get_rng_state(), before), "and the caller's own numbers go on as they would have"


def test_nobody_listening_stops_the_model():
    running = threading.active_count()
    pieces = generate("rope-twin", PROMPT, tokens=100_000)
    next(pieces)
    assert threading.active_count() == running + 1
    begun = time.perf_counter()
    pieces.close()
    assert threading.active_count() == running
    assert time.perf_counter() - begun < 20, "100,000 tokens would take minutes"


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("one of --prompt-file and --prompt", ["rope-twin"]),
        ("one of --prompt-file and --prompt", ["rope-twin", "--prompt", "a", "--prompt-file", "b"]),
        ("the prompt is empty", ["rope-twin", "--prompt", ""]),
        ("is not UTF-8 text \\(byte 1\\)", ["rope-twin", "--prompt-file", "latin.txt"]),
        ("nowhere.txt is no file", ["rope-twin", "--prompt-file", "nowhere.txt"]),
        ("0 tokens are none", ["rope-twin", "--prompt", "a", "--tokens", "0"]),
        ("temperature of -1", ["rope-twin", "--prompt", "a", "--temperature", "-1"]),
        ("a seed of -1 is out of range", ["rope-twin", "--prompt", "a", "--seed", "-1"]),
        ("a seed of 9{20} is out of range", ["rope-twin", "--prompt", "a", "--seed", "9" * 20]),
        ("has no tokenizer", ["plain", "--prompt", "a"]),
        ("position table of learned ends at 64", ["learned", "--prompt", "a b c", "--tokens", "64"]),
    ],
)
def test_bad_prompts_are_sentences(message, arguments, tmp_path, monkeypatch, capsys):
    import re

    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("é".encode("latin-1").join([b"a", b"b"]))
    FAMILIES[0].build().save_pretrained("plain")
    if "learned" in arguments:
        from farspan.data.tokens import train_tokenizer

        next(family for family in FAMILIES if family.name == "farspan-learned").build().save_pretrained("learned")
        train_tokenizer(["a b c"], 257).save_pretrained("learned")
    code, said = refusal(capsys, monkeypatch, "generate", *arguments)
    assert code == 2
    assert re.search(message, said)


def lines() -> list[str]:
    """A thousand lines of real text, and some that are hard to cut."""
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["nope-twin:scales", "rope-twin:scales", "rope-twin:yarn", "rope-twin:linear"])
@torch.no_grad()
def test_llama_cpp_gives_the_same_tokens(name: str, exported, patched, tmp_path):
    """FARSPAN_LLAMA_CPP names a folder in which `npm install node-llama-cpp` was done."""
    pytest.importorskip("gguf")
    home = os.environ.get("FARSPAN_LLAMA_CPP")
    if not home or not shutil.which("node"):
        pytest.skip("no llama.cpp: FARSPAN_LLAMA_CPP names no folder with node-llama-cpp, or there is no node")
    model, tokenizer = farspan.load(patched(name), dtype=torch.float32)
    ids = sample(8000)[0].tolist()
    prompts = [ids[:100], ids[2000:2400], ids[3000:3700], ids[5000:6500]]
    (tmp_path / "asked.json").write_text(json.dumps({"lines": lines(), "prompts": prompts, "count": 32}))
    command = ["node", str(Path(__file__).parent / "llama.mjs"), str(exported(name, "gguf").folder / "model.gguf")]
    subprocess.run([*command, str(tmp_path / "asked.json"), str(tmp_path / "answer.json")], check=True, cwd=home)
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["tokens"] == [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines()]
    for prompt, found in zip(prompts, answer["greedy"], strict=True):
        options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
        assert found == model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
