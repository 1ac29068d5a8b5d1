"""Corruption: flipped bits, truncated, swapped and overwritten files of everything that is read.

What a checksum of ours covers is refused, or read as it was. Foreign files are refused, or loaded
without a crash. A case is one reader and a batch of damages.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.harness import Category, Workspace
from torture.tally import Tally
from torture.trials import run_trials

BATCH = 50


@dataclass(frozen=True)
class Reader:
    """make: copies its files into a folder; read: what farspan reads from it, comparable."""

    make: Callable[[Path, Path], None]  # inputs, folder
    read: Callable[[Path], Any]
    checked: Callable[[Path], bool]  # whether a checksum covers a file
    pure: bool = True  # reading changes no file


def _copy(*names: str) -> Callable[[Path, Path], None]:
    def make(inputs: Path, folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (inputs / name).is_dir():
                shutil.copytree(inputs / name, folder / name, symlinks=True)
            else:
                shutil.copy(inputs / name, folder / name)

    return make


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()


def _model_digest(folder: Path) -> str:
    import farspan

    model, tokenizer = farspan.load(folder)
    weights = [
        (name, hashlib.sha256(weight.float().numpy().tobytes()).hexdigest())
        for name, weight in sorted(model.state_dict().items())
    ]
    ids = tokenizer("some text, 12 times\n")["input_ids"] if tokenizer else None
    config = {**model.config.to_dict(), "_name_or_path": ""}
    return _digest(weights, ids, config)


def read_trained(folder: Path) -> str:
    return _model_digest(folder / "trained" / "model")


def read_llama(folder: Path) -> str:
    return _model_digest(folder / "llama")


def read_shards(folder: Path) -> str:
    return _model_digest(folder / "shards")


def read_gguf(folder: Path) -> str:
    return _model_digest(folder / "llama.gguf")


def read_gguf_header(folder: Path) -> str:
    from farspan.gguf_loading import load_gguf_config

    return _digest(load_gguf_config(folder / "llama.gguf").to_dict())


def read_patch(folder: Path) -> str:
    from farspan.attention.patch import Patch

    patch = Patch.load(folder / "patch")
    return _digest(patch.describe(), patch.scales.base.tolist() if patch.scales else None)


def read_cells(folder: Path) -> list[Any]:
    from farspan.cells import Cells

    names = json.loads((folder / "names.json").read_text())
    return [Cells(folder / "evaluated").get(name) for name in names]


def read_checkpoints(folder: Path) -> str:
    from farspan.train.checkpoint import latest

    checkpoint = latest(folder / "trained")
    files = [
        file.read_bytes() for file in sorted(checkpoint.folder.iterdir()) if file.suffix != ".png"
    ]
    return _digest(checkpoint.step, checkpoint.state, *files)


def read_cache(folder: Path) -> str:
    from farspan.train.corpus import DataConfig, SourceConfig, prepare_data

    data = DataConfig(
        {"docs": SourceConfig("text.txt", 1.0)},
        str(folder),
        str(folder / "cache"),
        vocabulary=300,
        passkey=0.0,
        processes=1,
    )
    prepared = prepare_data(data, 16, 0)
    rows = [prepared.mixture.row(number).tolist() for number in range(4)]
    return _digest(rows, sorted(prepared.tokenizer.get_vocab().items()))


def read_record(folder: Path) -> str:
    from farspan.workflows.report import report

    return _digest(report([folder / "evaluated"], folder / "page.html").read_text())


def read_study(folder: Path) -> str:
    from farspan.workflows.lab import read_study as lab_study
    from farspan.workflows.pretrain import read_recipe
    from farspan.workflows.reproduce_study import read_study as reproduce_study

    return _digest(
        lab_study(str(folder / "lab.toml")),
        read_recipe(str(folder / "pretrain.toml")),
        reproduce_study(str(folder / "study.toml")),
    )


def read_texts(folder: Path) -> str:
    from farspan.data.documents import read_documents

    texts = [read_documents(folder / name) for name in TEXTS]
    return _digest([document.text for documents in texts for document in documents])


TEXTS = ("text.txt", "a.jsonl", "a.jsonl.xz", "a.jsonl.gz")


def make_texts(inputs: Path, folder: Path) -> None:
    (folder / "text.txt").write_text((inputs / "text.txt").read_text()[:2000])
    lines = b"".join(json.dumps({"text": f"line {n}, größer"}).encode() + b"\n" for n in range(20))
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))


def make_cells(inputs: Path, folder: Path) -> None:
    shutil.copytree(inputs / "evaluated", folder / "evaluated")
    names = sorted(file.stem for file in (folder / "evaluated" / "cells").glob("*.json"))
    (folder / "names.json").write_text(json.dumps(names))
    for path in (folder / "evaluated").iterdir():
        if path.name not in ("cells", "claims"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_record(inputs: Path, folder: Path) -> None:
    shutil.copytree(inputs / "evaluated", folder / "evaluated")
    shutil.rmtree(folder / "evaluated" / "cells")


def make_checkpoints(inputs: Path, folder: Path) -> None:
    shutil.copytree(inputs / "trained" / "checkpoints", folder / "trained" / "checkpoints")


def make_cache(inputs: Path, folder: Path) -> None:
    shutil.copy2(inputs / "text.txt", folder / "text.txt")
    read_cache(folder)


def everything(file: Path) -> bool:
    return True


def nothing(file: Path) -> bool:
    return False


READERS: dict[str, Reader] = {
    "trained": Reader(_copy("trained/model"), read_trained, everything),
    "checkpoints": Reader(make_checkpoints, read_checkpoints, everything, pure=False),
    "cells": Reader(make_cells, read_cells, everything, pure=False),
    "cache": Reader(make_cache, read_cache, lambda file: file.name != "text.txt", pure=False),
    "patch": Reader(_copy("patch"), read_patch, lambda file: file.suffix == ".safetensors"),
    "llama": Reader(_copy("llama"), read_llama, nothing),
    "shards": Reader(_copy("shards"), read_shards, nothing),
    "gguf": Reader(_copy("llama.gguf"), read_gguf, nothing),
    "gguf-header": Reader(_copy("llama.gguf"), read_gguf_header, nothing),
    "record": Reader(make_record, read_record, nothing),
    "recipes": Reader(_copy("lab.toml", "pretrain.toml", "study.toml"), read_study, nothing),
    "texts": Reader(make_texts, read_texts, nothing),
}
# Damages in the full run: fewer where reading takes long.
COUNTS = {
    **dict.fromkeys(("checkpoints", "cells", "patch", "texts"), 1600),
    "trained": 800,
    "gguf-header": 800,
    "cache": 500,
    "llama": 500,
    "recipes": 400,
    "shards": 300,
    "gguf": 200,
    "record": 200,
}
SHARES = {"short": 0.003, "bounded": 0.12, "full": 1.0}


def cases(level: str) -> list[str]:
    sizes = {name: max(2, round(SHARES[level] * COUNTS[name])) for name in READERS}
    return [
        f"{name}/{start}-{min(start + BATCH, size)}"
        for name, size in sizes.items()
        for start in range(0, size, BATCH)
    ]


def run(case: str, rng: random.Random, workspace: Workspace) -> Tally:
    name, _, numbers = case.partition("/")
    start, stop = map(int, numbers.split("-"))
    reader, seed = READERS[name], rng.random()
    with workspace.case(f"corruption-{name}-{start}") as folder:
        originals = folder / "originals"
        originals.mkdir()
        (folder / "originals" / "in").symlink_to(workspace.inputs)
        reader.make(workspace.inputs, originals)
        expected = _expected(reader, originals)
        damaged = folder / "damaged"

        def trial(number: int) -> Tally:
            own = random.Random(f"{seed}/{start + number}")
            return _trial(reader, own, originals, damaged, expected)

        return run_trials(stop - start, trial, folder, workspace.log(folder))


def _expected(reader: Reader, originals: Path) -> list[Any]:
    """What may be read: the content, or for checkpoints that of the one before."""
    if reader.read is not read_checkpoints:
        return [reader.read(originals)]
    latest = reader.read(originals)
    (*_, last) = sorted((originals / "trained" / "checkpoints").glob("step-*"))
    last.rename(originals / "aside")
    before = reader.read(originals)
    (originals / "aside").rename(last)
    return [latest, before]


def _trial(
    reader: Reader, rng: random.Random, originals: Path, damaged: Path, expected: list[Any]
) -> Tally:
    if not reader.pure or not damaged.exists():
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(originals, damaged, symlinks=True, copy_function=shutil.copy2)
    file, before, action = damage(rng, damaged)
    tally = Tally()
    try:
        value = reader.read(damaged)
    finally:
        for changed, content in before.items():
            if reader.pure:
                changed.write_bytes(content)
    if reader.read is read_cells:  # a damaged cell is set aside, the others are as they were
        missing = [one is None for one in value]
        known = all(one in (None, other) for one, other in zip(value, expected[0], strict=True))
        if known and any(missing):
            tally.refused += 1
            return tally
    if value in expected or not all(map(reader.checked, before)):
        tally.survived += 1
    else:
        tally.fail(f"{file.relative_to(damaged)}: {action} was not noticed")
    return tally


def damage(rng: random.Random, folder: Path) -> tuple[Path, dict[Path, bytes], str]:
    """Damage a file of a folder: the file, the contents before, and what was done."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in ("in", "names.json")
    )
    file = rng.choice(files)
    content = file.read_bytes()
    before = {file: content}
    action = rng.choice(["flip", "flip", "flip", "truncate", "zero", "append", "swap", "byte"])
    if action == "swap":
        other = rng.choice(files)
        before[other] = other.read_bytes()
        file.write_bytes(before[other])
        other.write_bytes(content)
        return file, before, f"swapped with {other.name}"
    file.write_bytes(damaged_bytes(rng, content, action))
    return file, before, action


def damaged_bytes(rng: random.Random, content: bytes, action: str) -> bytes:
    """Bytes that differ: the same length unless they are truncated or appended to."""
    if action == "append" or not content:
        return content + rng.randbytes(rng.randrange(1, 64))
    if action == "truncate":
        return content[: rng.randrange(len(content))]
    changed, place = bytearray(content), rng.randrange(len(content))
    if action == "flip":
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif action == "zero":
        end = min(len(content), place + rng.randrange(1, 4096))
        changed[place:end] = bytes(end - place)
    else:
        changed[place] = rng.randrange(256)
    return bytes(changed)


CORRUPTION = Category("corruption", cases, run, ("pretrain", "export-gguf"))
