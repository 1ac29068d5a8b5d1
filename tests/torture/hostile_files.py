"""The malicious fixtures: functions that write a file of a stranger and return a command to try."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECRET = "the secret of another user"
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
ESCAPES = "a\x1b]0;title\x07\x1b[2Jb\x9b"
CODE = "open('ran', 'w').close()\nclass T: pass\nT.from_pretrained = T\ndef make(*a, **k): pass\n"


@dataclass(frozen=True)
class Setting:
    folder: Path  # where the fixture is, and the command runs
    inputs: Path
    outside: Path  # nothing may be read there

    def copy(self, name: str, new: str = "model") -> Path:
        source, target = self.inputs / name, self.folder / new
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        return target


Fixture = Callable[[Setting], list[str]]
INSPECT = ["inspect", "model"]
GENERATE = ["generate", "model", "--prompt", "some text", "--max-new-tokens", "2"]
EXPORT = ["export", "model", "--format", "stock", "-o", "written"]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Weights.


def header(text: bytes, length: int | None = None, rest: int = 64) -> Fixture:
    """A safetensors file with this header."""

    def write(setting: Setting) -> list[str]:
        size = len(text) if length is None else length
        file = setting.copy("llama") / "model.safetensors"
        file.write_bytes(struct.pack("<Q", size) + text + bytes(rest))
        return GENERATE

    return write


def entry(**changes: Any) -> bytes:
    return json.dumps(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}
    ).encode()


def index(value: Any) -> Fixture:
    def write(setting: Setting) -> list[str]:
        file = setting.copy("shards") / "model.safetensors.index.json"
        text = json.dumps(value).replace("OUTSIDE", str(setting.outside))
        file.write_text(text)
        (setting.folder / "model" / "evil.bin").write_bytes(pickle.dumps(Evil()))
        return GENERATE

    return write


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def pickle_beside(setting: Setting) -> list[str]:
    folder = setting.copy("llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    return GENERATE


# Links, devices and pipes.


def link(name: str, target: str, command: list[str] = EXPORT) -> Fixture:
    def write(setting: Setting) -> list[str]:
        file = setting.copy("llama") / name
        file.unlink(missing_ok=True)
        file.symlink_to(target.replace("OUTSIDE", str(setting.outside)))
        return command

    return write


def pipe(name: str) -> Fixture:
    def write(setting: Setting) -> list[str]:
        file = setting.copy("llama") / name
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        return GENERATE

    return write


# Configs, tokenizers and templates.


def config(command: list[str] = GENERATE, model: str = "llama", **changes: Any) -> Fixture:
    def write(setting: Setting) -> list[str]:
        folder = setting.copy(model)
        text = json.loads(json.dumps(changes).replace("OUTSIDE", str(setting.outside)))
        edit(folder / "config.json", **text)
        (folder / "evil.py").write_text(CODE)
        return command

    return write


def tokenizer(**changes: Any) -> Fixture:
    def write(setting: Setting) -> list[str]:
        folder = setting.copy("llama")
        text = json.loads(json.dumps(changes).replace("OUTSIDE", str(setting.outside)))
        edit(folder / "tokenizer_config.json", **text)
        (folder / "evil.py").write_text(CODE)
        return GENERATE

    return write


def tokenizer_json(change: Callable[[dict], None]) -> Fixture:
    def write(setting: Setting) -> list[str]:
        file = setting.copy("llama") / "tokenizer.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return GENERATE

    return write


def slow_pattern(content: dict) -> None:
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }


def template(text: str) -> Fixture:
    def write(setting: Setting) -> list[str]:
        (setting.copy("llama") / "chat_template.jinja").write_text(text)
        suite = ["--suite", "ruler", "--tasks", "niah_single_1", "--limit", "1"]
        return ["eval", "model", *suite, "--apply-chat-template", "--lengths", "512", "-o", "out"]

    return write


def file_text(name: str, text: str | bytes, command: list[str] = GENERATE) -> Fixture:
    def write(setting: Setting) -> list[str]:
        content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        (setting.copy("llama") / name).write_bytes(content)
        return command

    return write


# GGUF.


def gguf_value(kind: int, value: bytes, key: bytes = b"llama.block_count") -> Fixture:
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<I", kind)
    return gguf_file(head + value + bytes(40))


def gguf_file(content: bytes) -> Fixture:
    def write(setting: Setting) -> list[str]:
        (setting.folder / "model.gguf").write_bytes(content)
        return ["inspect", "model.gguf"]

    return write


def gguf_tensor(dimensions: tuple[int, ...], kind: int, offset: int) -> Fixture:
    name = b"token_embd.weight"
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    info = struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", kind, offset)
    return gguf_file(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info + bytes(64))


def gguf_replaced(old: bytes, new: bytes) -> Fixture:
    def write(setting: Setting) -> list[str]:
        content = (setting.inputs / "llama.gguf").read_bytes()
        (setting.folder / "model.gguf").write_bytes(content.replace(old, new))
        return ["generate", "model.gguf", "--prompt", "text", "--max-new-tokens", "2"]

    return write


# Patches, records and recipes.


def patch(**changes: Any) -> Fixture:
    def write(setting: Setting) -> list[str]:
        folder = setting.copy("patch")
        text = json.dumps(changes).replace("OUTSIDE", str(setting.outside))
        edit(folder / "patch.json", **json.loads(text))
        return GENERATE

    return write


def patch_model(**changes: Any) -> Fixture:
    def write(setting: Setting) -> list[str]:
        file = setting.copy("patch") / "patch.json"
        text = json.loads(json.dumps(changes).replace("OUTSIDE", str(setting.outside)))
        edit(file, model={**json.loads(file.read_text())["model"], **text})
        return GENERATE

    return write


def record(name: str = "run", **changes: Any) -> Fixture:
    def write(setting: Setting) -> list[str]:
        folder = setting.folder / name
        shutil.copytree(setting.inputs / "evaluated", folder)
        edit(folder / "record.json", **changes)
        return ["report", name, "-o", "written/page.html"]

    return write


def record_text(text: str) -> Fixture:
    def write(setting: Setting) -> list[str]:
        shutil.copytree(setting.inputs / "evaluated", setting.folder / "run")
        (setting.folder / "run" / "record.json").write_text(text)
        return ["report", "run", "-o", "written/page.html"]

    return write


def recipe(text: str | bytes, command: str = "lab run") -> Fixture:
    def write(setting: Setting) -> list[str]:
        content = text.encode() if isinstance(text, str) else text
        (setting.folder / "evil.toml").write_bytes(content)
        (setting.folder / "evil.py").write_text(CODE)
        return [*command.split(), "evil.toml", "-o", "out"]

    return write


# Text.


def text_file(name: str, content: bytes | Callable[[], bytes]) -> Fixture:
    def write(setting: Setting) -> list[str]:
        value = content if isinstance(content, bytes) else content()
        (setting.folder / name).write_bytes(value)
        return ["diagnose", "in/nope", "--data", name, "--windows", "1"]

    return write


def folder_of_links(setting: Setting) -> list[str]:
    folder = setting.folder / "texts"
    folder.mkdir()
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "again").symlink_to(".")
    os.mkfifo(folder / "pipe.txt")
    return ["diagnose", "in/nope", "--data", "texts", "--windows", "1"]


def named(name: str, source: str = "llama") -> Fixture:
    def write(setting: Setting) -> list[str]:
        setting.copy(source, name)
        return ["inspect", name]

    return write


DEEP = "[" * 100_000
BIG = 1 << 40
FIXTURES: dict[str, Fixture] = {
    "header-endless": header(b"{}", 2**63),
    "header-longer-than-file": header(b"{}", 1000),
    "header-of-200-MB": header(b"{}", 200_000_000),
    "header-no-json": header(b"not json"),
    "header-deep": header(b'{"a":' + b"[" * 100_000),
    "header-negative-offsets": header(entry(data_offsets=[-8, 0])),
    "header-reversed-offsets": header(entry(data_offsets=[8, 0])),
    "header-endless-shape": header(entry(shape=[2**62, 4])),
    "header-unknown-type": header(entry(dtype="F13")),
    "header-text-shape": header(entry(shape=["2"])),
    "header-fractional": header(entry(data_offsets=[0, 8.5])),
    "header-list": header(b"[1, 2]"),
    "header-traversal-name": header(entry().replace(b'"a"', b'"../../a"'), rest=8),
    "empty-weights": file_text("model.safetensors", b""),
    "index-traversal": index({"weight_map": {"a": "../in/nope/model.safetensors"}}),
    "index-absolute": index({"weight_map": {"a": "OUTSIDE/secret.json"}}),
    "index-numbers": index({"weight_map": {"a": 3}}),
    "index-list": index({"weight_map": ["a"]}),
    "index-control": index({"weight_map": {"a": f"{ESCAPES}.safetensors"}}),
    "index-null": index({"weight_map": {"a": "a\0b.safetensors"}}),
    "pickle-index": index({"weight_map": {"a": "evil.bin"}}),
    "pickle-weights": pickle_beside,
    "config-link": link("config.json", "OUTSIDE/secret.json"),
    "template-link": link("chat_template.jinja", "OUTSIDE/secret.txt"),
    "tokenizer-link": link("tokenizer.json", "OUTSIDE/secret.json"),
    "tokenizer-config-link": link("tokenizer_config.json", "OUTSIDE/secret.json"),
    "generation-link": link("generation_config.json", "OUTSIDE/secret.json"),
    "special-tokens-link": link("special_tokens_map.json", "OUTSIDE/secret.json"),
    "added-tokens-link": link("added_tokens.json", "OUTSIDE/secret.json"),
    "template-up-link": link("chat_template.jinja", "../../../../../../etc/passwd"),
    "link-loop": link("config.json", "config.json"),
    "device-tokenizer": link("tokenizer.json", "/dev/zero"),
    "device-template": link("chat_template.jinja", "/dev/zero"),
    "pipe-tokenizer": pipe("tokenizer.json"),
    "pipe-generation": pipe("generation_config.json"),
    "pipe-weights": pipe("model.safetensors"),
    "auto-map-config": config(auto_map={"AutoConfig": "evil.T"}),
    "auto-map-model": config(auto_map={"AutoModelForCausalLM": "evil.T"}),
    "auto-map-hub": config(auto_map={"AutoConfig": "nobody/nothing--evil.T"}),
    "custom-encoding": config(model="nope", position="custom", custom_encoding="evil.py:make"),
    "config-type-path": config(model_type="../../evil"),
    "config-type-list": config(model_type=["llama"]),
    "config-dtype": config(dtype="os.system"),
    "config-quantized": config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "config-endless-layers": config(INSPECT, num_hidden_layers=10**9),
    "config-endless-width": config(INSPECT, hidden_size=BIG, vocab_size=BIG),
    "config-endless-vocabulary": config(INSPECT, vocab_size=1 << 50),
    "config-zero-heads": config(num_attention_heads=0),
    "config-negative": config(hidden_size=-32),
    "config-text-numbers": config(hidden_size="32", num_hidden_layers="two"),
    "config-rope": config(rope_parameters={"rope_type": "yarn", "factor": 1e400}),
    "config-rope-list": config(rope_parameters=[1]),
    "config-attention": config(_attn_implementation="evil/kernel"),
    "config-path": config(_name_or_path="OUTSIDE", architectures=["../evil"]),
    "config-deep": file_text("config.json", DEEP),
    "tokenizer-auto-map": tokenizer(auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}),
    "tokenizer-class": tokenizer(tokenizer_class="os.system"),
    "tokenizer-file": tokenizer(tokenizer_file="OUTSIDE/secret.json", vocab_file="OUTSIDE/secret"),
    "tokenizer-endless-length": tokenizer(model_max_length=10**40),
    "tokenizer-tokens": tokenizer(eos_token={"a": 1}, bos_token=["x"], pad_token=7),
    "tokenizer-slow-pattern": tokenizer_json(slow_pattern),
    "tokenizer-no-model": tokenizer_json(lambda content: content.pop("model")),
    "tokenizer-negative-ids": tokenizer_json(
        lambda content: content["model"]["vocab"].update(x=-1)
    ),
    "tokenizer-deep": file_text("tokenizer.json", DEEP),
    "generation-deep": file_text("generation_config.json", DEEP),
    "generation-types": file_text("generation_config.json", '{"max_length": "x", "top_k": []}'),
    "template-classes": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template-include": template("{% include '/etc/passwd' %}"),
    "template-syntax": template("{% for %}{{{{"),
    "template-memory": template("{{ 'a' * 10**11 }}"),
    "gguf-endless-array": gguf_value(9, struct.pack("<IQ", 4, 1 << 60)),
    "gguf-nested-arrays": gguf_value(9, struct.pack("<IQ", 9, 1 << 40)),
    "gguf-endless-text": gguf_value(8, struct.pack("<Q", 1 << 63)),
    "gguf-unknown-kind": gguf_value(99, b""),
    "gguf-key-path": gguf_value(4, b"\1\0\0\0", b"../../../x\x1b[2J"),
    "gguf-endless-tensor": gguf_tensor((1 << 60, 1 << 60), 0, 0),
    "gguf-tensor-outside": gguf_tensor((2, 2), 0, 1 << 62),
    "gguf-tensor-kind": gguf_tensor((2, 2), 200, 0),
    "gguf-many-dimensions": gguf_tensor((1,) * 64, 0, 0),
    "gguf-architecture": gguf_replaced(b"llama", b"evil!"),
    "gguf-no-fields": gguf_file(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60)),
    "patch-outside": patch(sha256={"OUTSIDE/secret.json": "0" * 64}),
    "patch-traversal": patch(sha256={"../../secret.json": "0" * 64}),
    "patch-base-outside": patch_model(name="OUTSIDE"),
    "patch-base-control": patch_model(name=f"{ESCAPES}/x"),
    "patch-rope": patch(rope={"rope_type": "linear", "factor": 1e400}),
    "patch-layout": patch(layout={"layers": {"0": "rope/-1"}}),
    "patch-target": patch(target=10**30, train_length=10**29),
    "patch-types": patch(scales=[1], model=3),
    "html-record": record(command=f"eval {SCRIPT}"),
    "html-settings": record(settings={"model": SCRIPT, SCRIPT: SCRIPT}),
    "html-name": record(f"run {SCRIPT.replace('/', '')}", arguments=[SCRIPT]),
    "control-name": record(f"run {ESCAPES}"),
    "record-types": record(scores=7, settings=[1], environment="x"),
    "record-scores": record(scores=[{"metric": SCRIPT, "value": 10**400}]),
    "record-deep": record_text(DEEP),
    "record-endless-integer": record_text('{"command": ' + "9" * 5000 + "}"),
    "recipe-code-task": recipe('tasks=["x"]\n[custom_tasks.x]\nfile="evil.py:make"\n'),
    "recipe-code-encoding": recipe('[custom_encodings]\nx = "evil.py:T"\n'),
    "recipe-itself": recipe('base = "evil.toml"\n'),
    "recipe-deep": recipe("a = " + DEEP),
    "recipe-latin": recipe(b'title = "caf\xe9"\n', "pretrain"),
    "recipe-endless": recipe("[train]\nsteps = " + "9" * 5000 + "\n", "pretrain"),
    "recipe-huge-model": recipe("[model]\nlayers = 1000000000\nwidth = 3\n", "pretrain"),
    "gz-bomb": text_file("a.jsonl.gz", lambda: gzip.compress(bytes(600_000_000), 1)),
    "xz-bomb": text_file("a.jsonl.xz", lambda: lzma.compress(bytes(600_000_000), preset=0)),
    "jsonl-latin": text_file("a.jsonl", b'{"text": "caf\xe9"}\n'),
    "jsonl-half-character": text_file("a.jsonl", b'{"text": "\\ud800"}\n'),
    "jsonl-deep": text_file("a.jsonl", b'{"text": ' + b"[" * 100_000),
    "text-latin": text_file("a.txt", b"caf\xe9 " * 1000),
    "text-zeros": text_file("a.txt", bytes(10_000)),
    "text-archive": text_file("a.tar.gz", gzip.compress(b"x")),
    "text-links": folder_of_links,
    "name-control": named(f"model {ESCAPES}"),
    "name-html": named(f"model {SCRIPT.replace('/', '')}"),
    "name-option": named("--trust-remote-code"),
    "name-not-utf8": named(os.fsdecode(b"caf\xe9")),
}
