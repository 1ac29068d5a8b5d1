"""Bad input ends in one sentence with the way out and an exit code; nothing is written."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import farspan
from families import FAMILIES
from farspan import cli
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.bundled import BUNDLED_MODELS
from farspan.data.documents import read_documents
from farspan.errors import CorruptError, FarspanError
from farspan.evals.suites import EvalConfig
from farspan.files import write_manifest
from farspan.loading import load_config
from farspan.model import FarspanForCausalLM
from farspan.workflows.attention_analysis import compare_attention

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A checkpoint in one file, one in shards, and a patch; tests damage copies."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = FAMILIES[0].build()
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    patch = Patch(
        "test",
        fingerprint(model),
        128,
        64,
        Scales.uniform(1.2, range(4), 4),
        name=str(folder / "whole"),
    )
    patch.save(folder / "patch")
    return folder


@pytest.fixture
def damaged(checkpoints: Path, tmp_path: Path) -> Path:
    shutil.copytree(checkpoints, tmp_path / "copy")
    return tmp_path / "copy"


def run_refused(capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    """Run a command that must fail: its exit code and stderr."""
    monkeypatch.setattr("sys.argv", ["farspan", *arguments])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return stop.value.code, captured.err


def build_family(name: str):
    return next(family for family in FAMILIES if family.name == name).build()


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def no_config(folder: Path) -> Path:
    (folder / "whole" / "config.json").unlink()
    return folder / "whole"


def pickle_only(folder: Path) -> Path:
    (folder / "whole" / "model.safetensors").unlink()
    (folder / "whole" / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))
    return folder / "whole"


def truncated(folder: Path) -> Path:
    weights = folder / "whole" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder / "whole"


def header_only(folder: Path) -> Path:
    (folder / "whole" / "model.safetensors").write_bytes(b"\xff" * 5)
    return folder / "whole"


def unreadable_header(folder: Path) -> Path:
    (folder / "whole" / "model.safetensors").write_bytes(
        b"\x08" + b"\x00" * 7 + b"not json" + b"\x00" * 64
    )
    return folder / "whole"


def shard_outside_folder(folder: Path) -> Path:
    index = folder / "shards" / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**names, next(iter(names)): "../whole/model.safetensors"})
    return folder / "shards"


def shard_absolute_path(folder: Path) -> Path:
    index = folder / "shards" / "model.safetensors.index.json"
    edit(index, weight_map={"model.norm.weight": str(folder / "whole" / "model.safetensors")})
    return folder / "shards"


def shard_missing(folder: Path) -> Path:
    next((folder / "shards").glob("model-*.safetensors")).unlink()
    return folder / "shards"


def weights_missing(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", num_hidden_layers=5, position="none", layer_types=None)
    return folder / "whole"


def broken_json(folder: Path) -> Path:
    config = folder / "whole" / "config.json"
    config.write_text(config.read_text()[:-3])
    return folder / "whole"


def json_list(folder: Path) -> Path:
    (folder / "whole" / "config.json").write_text("[1, 2]")
    return folder / "whole"


def not_text(folder: Path) -> Path:
    (folder / "whole" / "config.json").write_bytes(b"\xff\xfe\x00{}")
    return folder / "whole"


def unknown_position(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", position=["rotary"] * 4)
    return folder / "whole"


def two_windows(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", position=["rope/8", "rope/16"])
    return folder / "whole"


def unknown_family(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", model_type="no-such-model")
    return folder / "whole"


def remote_code(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", auto_map={"AutoConfig": "evil.Config"})
    (folder / "whole" / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")
    return folder / "whole"


def file_as_model(folder: Path) -> Path:
    return folder / "whole" / "config.json"


def broken_gguf(folder: Path) -> Path:
    pytest.importorskip("gguf")
    (folder / "model.gguf").write_bytes(b"GGUF" + b"\x07" * 60)
    return folder / "model.gguf"


def misspelled_bundled_model(folder: Path) -> Path:
    return Path("nope-twn")


def nonexistent_path(folder: Path) -> Path:
    return folder / "does" / "not" / "exist"


def scales_of_wrong_shape(folder: Path) -> Path:
    return _patch_with_scales(folder, torch.ones(3, 4))


def scales_not_positive(folder: Path) -> Path:
    return _patch_with_scales(folder, -torch.ones(4, 4))


def scales_nan(folder: Path) -> Path:
    return _patch_with_scales(folder, torch.full((4, 4), torch.nan))


def scales_of_other_heads(folder: Path) -> Path:
    return _patch_with_scales(folder, torch.ones(4, 8))


def scales_truncated(folder: Path) -> Path:
    tables = folder / "patch" / "scales.safetensors"
    tables.write_bytes(tables.read_bytes()[:-4])
    return _edit_patch(folder, sha256=None)


def scales_with_a_flipped_bit(folder: Path) -> Path:
    flip_bit(folder / "patch" / "scales.safetensors")
    return folder / "patch"


def scales_checked_outside_the_folder(folder: Path) -> Path:
    return _edit_patch(folder, sha256={"../whole/config.json": "0" * 64})


def weights_with_a_flipped_bit(folder: Path) -> Path:
    write_manifest(folder / "whole")
    flip_bit(folder / "whole" / "model.safetensors")
    return folder / "whole"


def flip_bit(file: Path) -> None:
    """Flip the lowest bit of the last byte but one."""
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def _patch_with_scales(folder: Path, base: torch.Tensor) -> Path:
    from safetensors.torch import save_file

    save_file({"base": base}, folder / "patch" / "scales.safetensors")
    return _edit_patch(folder, sha256=None)  # as in earlier releases


def folder_for_a_file(folder: Path) -> Path:
    (folder / "whole" / "config.json").unlink()
    (folder / "whole" / "config.json").mkdir()
    return folder / "whole"


def truncated_beside_an_index(folder: Path) -> Path:
    (folder / "shards" / "model.safetensors").write_bytes(b"\0" * 20)
    return folder / "shards"


def overlapping_tensors(folder: Path) -> Path:
    header = {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}
    return _with_header(folder, json.dumps(header).encode())


def deep_json(folder: Path) -> Path:
    (folder / "whole" / "config.json").write_text("[" * 100_000)
    return folder / "whole"


def endless_integer(folder: Path) -> Path:
    config = folder / "whole" / "config.json"
    config.write_text('{"model_type": ' + "9" * 5000 + "}")
    return folder / "whole"


def pipe_as_config(folder: Path) -> Path:
    (folder / "whole" / "config.json").unlink()
    os.mkfifo(folder / "whole" / "config.json")
    return folder / "whole"


def device_as_config(folder: Path) -> Path:
    (folder / "whole" / "config.json").unlink()
    (folder / "whole" / "config.json").symlink_to("/dev/zero")
    return folder / "whole"


def template_outside_the_folder(folder: Path) -> Path:
    (folder / "secret").write_text("a file of the user's own")
    (folder / "whole" / "chat_template.jinja").symlink_to("../secret")
    return folder / "whole"


def endless_layers(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", num_hidden_layers=10**9)
    return folder / "whole"


def pipe_as_tokenizer(folder: Path) -> Path:
    os.mkfifo(folder / "whole" / "tokenizer.json")
    return folder / "whole"


def index_of_a_pickle(folder: Path) -> Path:
    index = folder / "shards" / "model.safetensors.index.json"
    (folder / "shards" / "model.bin").write_bytes(pickle.dumps({"w": 1}))
    edit(index, weight_map={"model.norm.weight": "model.bin"})
    return folder / "shards"


def _with_header(folder: Path, text: bytes) -> Path:
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    (folder / "whole" / "model.safetensors").write_bytes(content)
    return folder / "whole"


def deep_header(folder: Path) -> Path:
    return _with_header(folder, b'{"a":' + b"[" * 100_000)


def header_of_wrong_types(folder: Path) -> Path:
    return _with_header(folder, b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8.5]}}')


def header_of_text_offsets(folder: Path) -> Path:
    return _with_header(folder, b'{"a":{"dtype":"F32","shape":[2],"data_offsets":"08"}}')


def patch_of_itself(folder: Path) -> Path:
    text = json.loads((folder / "patch" / "patch.json").read_text())
    edit(folder / "patch" / "patch.json", model={**text["model"], "name": str(folder / "patch")})
    return folder / "patch"


def patch_with_broken_rope(folder: Path) -> Path:
    edit(folder / "patch" / "patch.json", rope=[1])
    return folder / "patch"


def patch_with_unknown_rope(folder: Path) -> Path:
    edit(folder / "patch" / "patch.json", rope={"rope_type": "spiral"})
    return folder / "patch"


def patch_for_another_model(folder: Path) -> Path:
    text = json.loads((folder / "patch" / "patch.json").read_text())
    edit(folder / "patch" / "patch.json", model={**text["model"], "sha256": "0" * 64})
    return folder / "patch"


def patch_without_scales(folder: Path) -> Path:
    (folder / "patch" / "scales.safetensors").unlink()
    return folder / "patch"


def mismatched_shapes(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", intermediate_size=64)
    return folder / "whole"


def layers_missing_in_config(folder: Path) -> Path:
    edit(folder / "whole" / "config.json", num_hidden_layers=2, position="none", layer_types=None)
    return folder / "whole"


def empty_tokenizer(folder: Path) -> Path:
    (folder / "whole" / "tokenizer.json").write_text("")
    return folder / "whole"


def tokenizer_without_content(folder: Path) -> Path:
    (folder / "whole" / "tokenizer.json").write_text("{}")
    return folder / "whole"


def broken_tokenizer_config(folder: Path) -> Path:
    shutil.copy(BUNDLED_MODELS / "nope-twin" / "tokenizer.json", folder / "whole")
    (folder / "whole" / "tokenizer_config.json").write_text('{"a": ')
    return folder / "whole"


def _edit_patch(folder: Path, **changes) -> Path:
    edit(folder / "patch" / "patch.json", **changes)
    return folder / "patch"


def patch_train_length_zero(folder: Path) -> Path:
    return _edit_patch(folder, train_length=0)


def patch_target_negative(folder: Path) -> Path:
    return _edit_patch(folder, target=-3)


def patch_target_fractional(folder: Path) -> Path:
    return _edit_patch(folder, target=640.7)


def patch_rope_factor_zero(folder: Path) -> Path:
    return _edit_patch(folder, rope={"rope_type": "linear", "factor": 0})


def patch_unknown_basis(folder: Path) -> Path:
    text = json.loads((folder / "patch" / "patch.json").read_text())
    return _edit_patch(folder, scales={**text["scales"], "basis": "cubic"})


def scales_of_integers(folder: Path) -> Path:
    return _patch_with_scales(folder, torch.ones(4, 4, dtype=torch.int64))


def test_a_model_of_links_into_the_cache_of_the_hub_is_loaded(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    build_family("llama").save_pretrained(blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert farspan.load(snapshot).model.config.model_type == "llama"
    weights = tmp_path / "weights"
    weights.mkdir()
    shutil.copy(blobs / "config.json", weights)
    (weights / "model.safetensors").symlink_to(blobs / "model.safetensors")
    assert farspan.load(weights).model.config.model_type == "llama"


CASES = [
    (no_config, 2, "has no config.json"),
    (pickle_only, 2, "pickle.*convert it to safetensors"),
    (truncated, 4, "not a complete safetensors file.*should have"),
    (header_only, 4, "it has 5 bytes"),
    (unreadable_header, 4, "its header cannot be read"),
    (shard_outside_folder, 4, "points outside its folder"),
    (shard_absolute_path, 4, "points outside its folder"),
    (shard_missing, 4, "but missing"),
    (weights_missing, 4, "lacks 9 weights that its config requires, first .*layers.4"),
    (broken_json, 4, r"not valid JSON: .* at line \d+, column \d+"),
    (json_list, 4, "a JSON list where an object is needed"),
    (not_text, 4, "not UTF-8 text"),
    (unknown_position, 2, "in the config of .*, position 'rotary' is unknown"),
    (two_windows, 2, r"window sizes \[8, 16\]"),
    (unknown_family, 2, "transformers cannot load .*no-such-model"),
    (remote_code, 2, "wants to run Python code.*--trust-remote-code"),
    (file_as_model, 2, "is a file; give the folder"),
    (nonexistent_path, 2, "neither a folder nor a hub id"),
    (broken_gguf, 4, "is damaged or no GGUF file"),
    (misspelled_bundled_model, 2, "did you mean the bundled model nope-twin"),
    (scales_of_wrong_shape, 4, r"/patch is not a complete patch .*shape \[3, 4\] for 4 layers"),
    (scales_not_positive, 4, "/patch is not a complete patch .*falls to -1"),
    (scales_nan, 4, "/patch is not a complete patch .*NaN or infinity"),
    (scales_of_other_heads, 4, "/patch is not a complete patch .*8 heads, but layer 0 has 4"),
    (scales_of_integers, 4, "/patch is not a complete patch .*is torch.int64"),
    (patch_unknown_basis, 4, "/patch is not a complete patch .*'cubic' is unknown"),
    (patch_train_length_zero, 4, "/patch is not a complete patch .*train_length is 0"),
    (patch_target_negative, 4, "/patch is not a complete patch .*target is -3"),
    (patch_target_fractional, 4, "/patch is not a complete patch .*target is 640.7"),
    (patch_rope_factor_zero, 4, "/patch is not a complete patch .*factor is 0"),
    (
        scales_with_a_flipped_bit,
        4,
        "does not match patch/patch.json; fit or copy",
    ),
    (scales_checked_outside_the_folder, 4, "points outside its folder"),
    (weights_with_a_flipped_bit, 4, "model.safetensors does not match whole/manifest.json; copy"),
    (patch_without_scales, 4, "scales.safetensors does not match patch/patch.json"),
    (mismatched_shapes, 4, r"mlp.down_proj.weight with \[32, 48\] instead of \[32, 64\]"),
    (
        layers_missing_in_config,
        4,
        "18 weights of layers that its config does not have, "
        "first 'model.layers.2.input_layernorm.weight'",
    ),
    (scales_truncated, 4, "not a complete safetensors file"),
    (folder_for_a_file, 4, "cannot be read"),
    (truncated_beside_an_index, 4, "not a complete safetensors file"),
    (overlapping_tensors, 4, "not a complete safetensors file"),
    (deep_json, 4, "cannot be read"),
    (endless_integer, 4, "cannot be read .*4300 digits"),
    (pipe_as_config, 4, "cannot be read .*no regular file"),
    (device_as_config, 4, "cannot be read .*no regular file"),
    (template_outside_the_folder, 4, "is a link that leads out of its folder"),
    (endless_layers, 4, "claims 1000000000 layers"),
    (pipe_as_tokenizer, 4, "cannot be read .*no regular file"),
    (index_of_a_pickle, 4, "names 'model.bin', which is no safetensors file and is not opened"),
    (deep_header, 4, "its header cannot be read"),
    (header_of_wrong_types, 4, "its header cannot be read"),
    (header_of_text_offsets, 4, "its header cannot be read"),
    (patch_of_itself, 2, "load the base model"),
    (patch_with_broken_rope, 4, "not a complete patch"),
    (patch_with_unknown_rope, 4, "/patch is not a complete patch .*'spiral' is unknown"),
    (
        patch_for_another_model,
        2,
        "patch in .*/patch was made for another model than .*/whole .*000000000000",
    ),
    (empty_tokenizer, 4, "tokenizer.json is not valid JSON"),
    (tokenizer_without_content, 4, "tokenizer.json is not a valid tokenizer"),
    (broken_tokenizer_config, 4, "tokenizer_config.json is not valid JSON"),
]


@pytest.mark.parametrize(
    ("damage", "code", "message"), CASES, ids=lambda value: getattr(value, "__name__", None)
)
def test_damaged_model_is_refused_in_one_sentence(
    damage, code: int, message: str, damaged: Path, capsys, monkeypatch
):
    model = damage(damaged)
    before = sorted(path for path in damaged.rglob("*"))
    status, error = run_refused(capsys, monkeypatch, "inspect", str(model))
    assert status == code, error
    assert error.startswith("error ")
    assert error.count("\n") == 1, "one sentence on one line"
    assert re.search(message, error), error
    assert sorted(path for path in damaged.rglob("*")) == before, "nothing written"


def test_usage_error_exits_2(capsys, monkeypatch):
    status, error = run_refused(capsys, monkeypatch, "inspect")
    assert status == 2
    assert "MODEL" in error
    status, _ = run_refused(capsys, monkeypatch, "inspekt", "x")
    assert status == 2


@pytest.mark.parametrize(
    ("family", "position", "message"),
    [
        ("llama", "rotray", "'rotray' is unknown"),
        ("llama-bias", "none", "has biases"),
        ("mistral", "none", "this one is 'mistral'"),
        (
            "farspan-none",
            "none",
            "farspan's own architecture, whose config sets the position encoding",
        ),
    ],
)
def test_refuses_impossible_position(
    family: str, position: str, message: str, tmp_path, capsys, monkeypatch
):
    build_family(family).save_pretrained(tmp_path)
    status, error = run_refused(
        capsys, monkeypatch, "inspect", str(tmp_path), "--position", position
    )
    assert status == 2
    assert message in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": "none"}, "position 'none' is for checkpoints in safetensors"),
        ({"attn_implementation": "eager"}, "attn_implementation 'eager' is for checkpoints in"),
    ],
)
def test_refuses_options_that_cannot_be_followed(options, message):
    model = build_family("llama")
    with pytest.raises(FarspanError, match=f"{message}.* a model object is loaded already"):
        farspan.load(model, **options)
    with pytest.raises(FarspanError, match=rf"{message}.* model\.gguf is a \.gguf file"):
        farspan.load("model.gguf", **options)


def test_inspect_refuses_a_position_for_a_model_object():
    with pytest.raises(FarspanError, match="position 'none' is for checkpoints, and a model obj"):
        farspan.inspect(build_family("llama"), position="none")


@pytest.mark.parametrize(
    "function",
    [farspan.diagnose, farspan.compare, farspan.report, compare_attention],
    ids=["diagnose", "compare", "report", "lab distance"],
)
def test_refuses_an_empty_list(function):
    with pytest.raises(FarspanError, match="the list is empty; give at least "):
        function([])


def test_unreachable_hub_is_one_sentence(capsys, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    status, error = run_refused(capsys, monkeypatch, "inspect", "no-such-owner/no-such-model")
    assert status == 2
    assert "is no local folder and could not be fetched from the hub (ConnectionError)" in error


@pytest.mark.parametrize("name", ["./nope", ".hidden/x", "x--y/z", "modèle/x", "../a", "a/b/c"])
@pytest.mark.parametrize(
    "command", [["inspect", "NAME"], ["diagnose", "nope-twin", "--data", "NAME"]]
)
def test_invalid_hub_id_is_never_requested(name: str, command: list[str], capsys, monkeypatch):
    status, error = run_refused(
        capsys, monkeypatch, *(name if word == "NAME" else word for word in command)
    )
    assert status == 2
    assert error.startswith(f"error '{name}' is n")
    assert "check the path" in error


@pytest.mark.long
def test_unreachable_dataset_is_one_sentence(monkeypatch):
    pytest.importorskip("datasets")

    def unreachable(*args, **kwargs):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    with pytest.raises(
        FarspanError, match=r"no data set could be loaded from the hub \(ConnectionError\)"
    ):
        read_documents("no-such-owner/no-such-data")


def test_refuses_dataset_without_text_column(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *args, **options: None)

    def load(name, *, split, streaming):
        assert streaming, "rows come one by one, without a download of the whole data set"
        return [{"content": "x"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        FarspanError, match=r'owner/name has no column "text" \(it has \[.content.\]\)'
    ):
        list(read_documents("owner/name"))


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        ("extend nope-twin --to 1024 -o NEW", "extend.extend"),
        ("eval nope-twin -o NEW", "evaluate.evaluate"),
        ("pretrain twin-nope -o NEW", "pretrain.pretrain"),
        ("reproduce extend-small -o NEW", "reproduce.reproduce"),
        ("lab run lab-tiny -o NEW", "lab.run"),
    ],
)
def test_interrupted_command_says_how_to_resume(command, verb, tmp_path, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"farspan.workflows.{verb}", interrupted)
    words = command.replace("NEW", str(tmp_path / "new")).split()
    status, error = run_refused(capsys, monkeypatch, *words)
    assert status == 75
    assert error.startswith("error stopped by Ctrl-C; ")
    assert error.endswith("rerun the same command to resume\n")


def test_parent_folder_of_a_checkpoint_suggests_it(damaged: Path, capsys, monkeypatch):
    (damaged / "around").mkdir()
    (damaged / "whole").rename(damaged / "around" / "model")
    status, error = run_refused(capsys, monkeypatch, "inspect", str(damaged / "around"))
    assert status == 2
    assert (
        error
        == f"error {damaged / 'around'} has no config.json; give {damaged / 'around' / 'model'}\n"
    )


def test_remote_code_is_off_by_default(damaged: Path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *a, **options: calls.append(options)
    )
    (damaged / "whole" / "tokenizer.json").write_text("{}")
    farspan.load(damaged / "whole")
    assert [options["trust_remote_code"] for options in calls] == [False]


WRONG_TYPES = [
    {"num_hidden_layers": "x"},
    {"position": None},
    {"num_attention_heads": 0},
    {"rope_parameters": [1]},
    {"sliding_window": "x", "layer_types": ["sliding_attention"] * 4},
    {"dtype": "x"},
    {"model_type": [1]},
    {"auto_map": None, "vocab_size": -1},
    {"rms_norm_eps": "x"},
    {"rms_norm_eps": None},
    {"base_scale": "x"},
    {"base_scale": [1, 2]},
    {"eos_token_id": "x"},
    {"eos_token_id": {"a": 1}},
    {"max_position_embeddings": "x"},
    {"max_position_embeddings": 0},
    {"max_position_embeddings": -1},
]


@pytest.mark.parametrize("changes", WRONG_TYPES, ids=str)
def test_config_of_wrong_types_is_refused_in_one_sentence(
    changes: dict, damaged: Path, capsys, monkeypatch
):
    edit(damaged / "whole" / "config.json", **changes)
    status, error = run_refused(capsys, monkeypatch, "inspect", str(damaged / "whole"))
    assert status in (2, 4)
    assert error.count("\n") == 1


def test_patch_folder_loads_as_a_model(checkpoints: Path):
    inspection = farspan.inspect(checkpoints / "patch")
    assert inspection.patch["method"] == "test"
    assert inspection.patch["scales"]["mean"] == pytest.approx(1.2)
    assert (
        "patched by test for 128 tokens: attention scales of 4 layers: min 1.200"
        in inspection.warnings[0]
    )
    assert farspan.inspect(checkpoints / "whole").to_json()["patch"] is None
    assert {layer.position for layer in inspection.layers} == {"none"}
    from farspan.attention import seam

    assert seam.installed(farspan.load(checkpoints / "patch").model)


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99"])
@pytest.mark.parametrize(("has_gpu", "advice"), [(True, "cpu, or cuda:0"), (False, "cpu")])
def test_refuses_unavailable_device(monkeypatch, device, has_gpu, advice):
    """A GPU is advised where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(FarspanError, match=f"device '{device}' .*; choose {advice}$"):
        farspan.load("nope-twin", device=device)


@pytest.mark.parametrize("device", ["cuba", "meta"])
def test_an_evaluation_refuses_a_misspelled_device(device, tmp_path):
    with pytest.raises(FarspanError, match=f"device '{device}' cannot .*; choose cpu"):
        farspan.evaluate("nope-twin", "perplexity", tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


def test_an_extension_refuses_a_misspelled_device(tmp_path):
    with pytest.raises(FarspanError, match="device 'cuba' cannot .*; choose cpu"):
        farspan.extend("nope-twin", to=1024, out=tmp_path / "out", device="cuba")


@pytest.mark.parametrize(
    ("suite", "tasks", "message"),
    [
        ("needle", "single,multikey", "needle has no task 'multikey'; did you mean multi-key"),
        ("ruler", ["vt", "cwee"], "ruler has no task 'cwee'; did you mean cwe"),
        ("commonsense", "piqaa", "commonsense has no task 'piqaa'; did you mean piqa"),
    ],
)
def test_an_unknown_task_is_refused_before_the_model_is_loaded(suite, tasks, message, monkeypatch):
    monkeypatch.setattr("farspan.workflows.evaluate.load_eval_model", None)
    with pytest.raises(FarspanError, match=message):
        farspan.evaluate("nope-twin", suite, tasks=tasks, lengths=["1k"])


def test_tasks_may_be_text_as_on_the_command_line():
    assert EvalConfig(tasks="vt, cwe,").tasks == EvalConfig(tasks=["vt", "cwe"]).tasks
    assert EvalConfig(tasks="").tasks == ()


@pytest.fixture(scope="module")
def infinite_model(tmp_path_factory) -> Path:
    """The bundled NoPE model with an infinite weight."""
    folder = tmp_path_factory.mktemp("infinite") / "model"
    model, tokenizer = farspan.load("nope-twin")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.fill_(torch.inf)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("diagnose", "--lengths 700 --windows 1"),
        ("lab theorems", "--length 16 --windows 2"),
        ("lab distance", "--length 16 --windows 1"),
        ("lab distance nope-twin", "--length 16 --windows 1"),
    ],
)
@pytest.mark.parametrize("with_out", [True, False])
def test_nonfinite_loss_names_the_weight(
    before: str, after: str, with_out: bool, infinite_model: Path, tmp_path, capsys, monkeypatch
):
    out = ["-o", str(tmp_path / "out")] if with_out else []
    status, error = run_refused(
        capsys, monkeypatch, *before.split(), str(infinite_model), *after.split(), *out
    )
    assert status == 4
    assert "loss" in error
    assert (
        "is nan at position 1 because model.layers.2.mlp.up_proj.weight holds NaN or infinity"
        in error
    )
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing written"


@pytest.mark.parametrize(
    "command", ["inspect", "generate", "generate --temperature 1", "export --format stock"]
)
def test_nonfinite_logits_name_the_weight(
    command: str, infinite_model: Path, tmp_path, capsys, monkeypatch
):
    verb, *options = command.split()
    arguments = {
        "inspect": [],
        "generate": ["--prompt", "hi"],
        "export": ["-o", str(tmp_path / "out")],
    }[verb]
    status, error = run_refused(
        capsys, monkeypatch, verb, str(infinite_model), *options, *arguments
    )
    assert status == 4
    assert "are not finite because model.layers.2.mlp.up_proj.weight holds NaN or infinity" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing written"


def test_refuses_temperature_too_small_to_divide_by(capsys, monkeypatch):
    status, error = run_refused(
        capsys, monkeypatch, *["generate", "nope-twin", "--prompt", "hi", "--temperature", "1e-320"]
    )
    assert status == 2
    assert "is too small to divide by" in error
    assert list(farspan.generate("nope-twin", "hi", max_new_tokens=2, temperature=1e-6))


@pytest.mark.parametrize("name", ["llama", "farspan-rope", "gpt2", "gemma3", "kimi-linear"])
def test_harmless_extra_tensors_are_ignored(name: str, tmp_path):
    from safetensors.torch import load_file, save_file

    build_family(name).save_pretrained(tmp_path)
    weights, extra = tmp_path / "model.safetensors", torch.ones(4)
    tensors = load_file(weights)
    tensors |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": extra,
        "vision_tower.layers.40.norm.weight": extra.clone(),
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    assert farspan.load(tmp_path).model is not None


@pytest.mark.parametrize("base_only", [False, True])
def test_refuses_layers_missing_from_the_config_under_any_prefix(base_only: bool, tmp_path):
    model = build_family("gpt2")
    (model.transformer if base_only else model).save_pretrained(tmp_path)
    farspan.load(tmp_path)
    edit(tmp_path / "config.json", n_layer=3)
    with pytest.raises(
        CorruptError,
        match=r"11 weights of layers that its config does not have, first '(transformer\.)?h\.3\.",
    ):
        farspan.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "pretrain twin-nope model.kv_heads=-1 --dry-run",
            "model.kv_heads is -1, which does not divide model.heads",
        ),
        (
            "lab run lab-tiny sizes.tiny.heads=0 --dry-run",
            "sizes.tiny.heads is 0; set it to 1 or more",
        ),
        ("lab run lab-tiny sizes.tiny.heads=0", "sizes.tiny.heads is 0; set it to 1 or more"),
        ("lab run lab-tiny sizes.tiny.width=-4", "sizes.tiny.width is -4; set it to 1 or more"),
        ("lab run lab-tiny sizes.tiny.layers=0", "sizes.tiny.layers is 0; set it to 1 or more"),
    ],
)
def test_refuses_impossible_shape_in_a_recipe(
    arguments: str, message: str, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    status, error = run_refused(capsys, monkeypatch, *arguments.split())
    assert status == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "extend nope-twin --to 1024 -o PATH --dry-run",
        "pretrain twin-nope -o PATH --dry-run",
        "lab run lab-tiny -o PATH --dry-run",
        "reproduce best-scales -o PATH --dry-run",
    ],
)
def test_a_dry_run_refuses_an_output_that_the_run_would(tmp_path, capsys, monkeypatch, command):
    (tmp_path / "taken").write_text("mine")
    arguments = command.replace("PATH", str(tmp_path)).split()
    status, error = run_refused(capsys, monkeypatch, *arguments)
    assert status == 2
    assert f"{tmp_path} " in error
    assert "choose another" in error


@pytest.mark.parametrize(
    "run",
    [
        lambda: farspan.diagnose("nope-twin", "typo.txt"),
        lambda: farspan.extend("nope-twin", 1024, data="typo.txt"),
        lambda: farspan.extend("nope-twin", 1024, data={"search": "python-docs/search"}),
        lambda: farspan.evaluate("nope-twin", data="typo.txt"),
        lambda: farspan.check("nope-twin", "nope-twin", data="typo.txt"),
    ],
)
def test_a_text_that_is_not_there_is_refused_before_a_model_is_loaded(monkeypatch, run):
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", lambda *args, **options: pytest.fail("it loads")
    )
    with pytest.raises(FarspanError, match=r"'typo.txt' is not a file|the texts are named search"):
        run()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), r"\(out of memory\); shorten the prompt"),
        (IndexError("index out of range"), r"\(IndexError: index out of range\)"),
    ],
)
def test_a_continuation_that_fails_is_one_sentence(monkeypatch, error, reason):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(FarspanForCausalLM, "generate", fail)
    with pytest.raises(FarspanError, match=f"nope-twin cannot continue a prompt of .* {reason}"):
        list(farspan.generate("nope-twin", "The sky is"))


def test_a_patch_where_a_model_is_needed_is_named_as_such():
    with pytest.raises(FarspanError, match=r"swan-twin is a patch, not a model; give its base"):
        load_config("swan-twin")
