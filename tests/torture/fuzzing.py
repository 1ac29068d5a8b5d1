"""Fuzzing: random texts and bytes for the parsers that are ours.

A parser returns a value that keeps its law, or raises a FarspanError. Half of the inputs are valid
ones with a few changes: pure noise ends at the first character.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from farspan.errors import FarspanError
from torture.harness import Category, Workspace
from torture.tally import Tally
from torture.trials import run_trials

QUICK, SLOW = 1000, 100  # inputs of one trial
ALPHABET = "0123456789" * 3 + "kKxX,,::..--++eE@<>==_ \t\n'\"[]{}#\\/abcmnpsuß²٣𝟙\x00\x7f\ud800"


def mutated(rng: random.Random, text: str) -> str:
    """A text with a few characters replaced, removed, doubled or inserted."""
    characters = list(text)
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        place = rng.randrange(len(characters) + 1)
        kind = rng.random()
        if kind < 0.4:
            characters.insert(place, rng.choice(ALPHABET))
        elif kind < 0.7:
            characters[place : place + 1] = rng.choice(ALPHABET)
        elif kind < 0.9:
            del characters[place : place + rng.randrange(1, 4)]
        else:
            characters[place:place] = characters[: rng.randrange(1, 9)] * rng.randrange(1, 9)
    return "".join(characters)


def noise(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randrange(12)))


def drawn(rng: random.Random, seeds: tuple[str, ...]) -> str:
    return mutated(rng, rng.choice(seeds)) if rng.random() < 0.8 else noise(rng)


def fuzz_lengths(rng: random.Random) -> None:
    from farspan.lengths import parse_lengths

    text = drawn(rng, ("512", "16k", "512,1024", "512:4096", "1k:64k,100", "7:7"))
    lengths = parse_lengths(text)
    assert lengths == sorted(set(lengths)), text
    assert all(type(length) is int and length > 0 for length in lengths), text
    assert parse_lengths(",".join(map(str, lengths[:9]))) == lengths[:9], text


def fuzz_length(rng: random.Random) -> None:
    from farspan.lengths import parse_length

    text = drawn(rng, ("2048", "16k", " 9 ", "999999999999"))
    length = parse_length(text)
    assert parse_length(str(length)) == length > 0, text


def fuzz_range(rng: random.Random) -> None:
    from farspan.lengths import MAX_EXAMPLE_LENGTH, parse_length_range

    text = drawn(rng, ("2:20", "7", "1:10000", "11:20"))
    low, high = parse_length_range(text)
    assert 1 <= low <= high <= MAX_EXAMPLE_LENGTH, text


def fuzz_scales(rng: random.Random) -> None:
    from farspan.lengths import parse_scales

    text = drawn(rng, ("0.8:1.4:0.1", "1.2", "1,1.5", "1e-3:2e-3:1e-4", "nan", "inf:1:1"))
    scales = parse_scales(text)
    assert scales, text
    assert all(0 < scale < 1000 for scale in scales), text


def fuzz_gates(rng: random.Random) -> None:
    from farspan.evals.gates import parse_gate

    seeds = ("ppl@512<=1.05x", "pg19:ppl@4k<=20", "passkey@1024>=0.9", "acc > 1e-3", "f1<2.")
    text = drawn(rng, seeds)
    gate = parse_gate(text)
    assert gate.value >= 0, text
    assert gate.text == text, text
    assert gate.length is None or gate.length > 0, text


@cache
def _recipe() -> tuple[Any, tuple[str, ...]]:
    from farspan.methods.search_config import SearchConfig
    from farspan.recipe import to_toml

    recipe = SearchConfig()
    return recipe, tuple(line for line in to_toml(recipe).splitlines() if line)


def fuzz_overrides(rng: random.Random) -> None:
    from farspan.recipe import apply_overrides, from_toml, to_toml

    recipe, lines = _recipe()
    changed = apply_overrides(recipe, [drawn(rng, (*lines, "lr=[0.1, 1]", "init=nan"))])
    assert from_toml(type(recipe), to_toml(changed)) == changed


def fuzz_recipes(rng: random.Random) -> None:
    from farspan.recipe import from_toml, to_toml

    recipe, lines = _recipe()
    chosen = rng.sample(lines, rng.randrange(1, len(lines)))
    changed = from_toml(type(recipe), mutated(rng, "\n".join(chosen)))
    assert from_toml(type(recipe), to_toml(changed)) == changed


@cache
def _cell_text() -> str:
    from farspan.cells import cell_key

    result = {"nll": [1.5, 2.25], "output": "größer", "n": 3, "empty": None}
    content = {"description": {"x": 1}, "sha256": cell_key(result), "result": result}
    return json.dumps(content, ensure_ascii=False)


def fuzz_cells(rng: random.Random) -> None:
    from farspan.cells import Cells

    folder = Path("cells-fuzzed")
    cells = _cells(folder)
    assert isinstance(cells, Cells)
    text = mutated(rng, _cell_text())
    file = folder / "cells" / "key.json"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    result = cells.get("key")
    if result is None:
        for broken in file.parent.glob("*.broken"):
            broken.unlink()
        raise FarspanError("set aside")
    assert result == json.loads(_cell_text())["result"], text


@cache
def _cells(folder: Path) -> Any:
    from farspan.cells import Cells

    return Cells(folder)


def fuzz_claims(rng: random.Random) -> None:
    """Whatever lies among the claims, a cell is claimed or not, and nothing is raised."""
    cells = _cells(Path("claims-fuzzed"))
    folder = Path("claims-fuzzed") / "claims"
    text = mutated(rng, '{"host": "other 4026531836", "pid": 12345}')
    name = "key." + rng.choice(["0", "1", "7", "0~", "x", "²", "999999999", "-1"])
    (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    with cells.claimed(["key"]) as claimed:
        assert claimed in ([], ["key"]), name
    for file in folder.iterdir():
        file.unlink()


@cache
def _gguf_bytes() -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    fields = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"llama.block_count") + struct.pack("<II", 4, 1),
        text(b"list") + struct.pack("<IIQ", 9, 4, 3) + struct.pack("<III", 1, 2, 3),
        text(b"words") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"bc"),
    ]
    tensor = text(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + b"".join(fields) + tensor
    return head + bytes(-len(head) % 32) + bytes(32)


def fuzz_gguf(rng: random.Random) -> None:
    from farspan.gguf_reading import read_header

    content = bytearray(_gguf_bytes())
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        place = rng.randrange(len(content))
        content[place] = rng.choice([0, 1, 4, 8, 9, 127, 255, rng.randrange(256)])
    if rng.random() < 0.2:
        del content[rng.randrange(len(content)) :]
    file = Path("fuzzed.gguf")
    file.write_bytes(content)
    header = read_header(file)
    assert all(len(field.data) <= len(content) for field in header.fields.values())


# Parser -> inputs of the full run, and of a trial: a million in all, most of them where one costs
# microseconds.
PARSERS: dict[str, tuple[Callable[[random.Random], None], int, int]] = {
    "lengths": (fuzz_lengths, 300_000, QUICK),
    "length": (fuzz_length, 200_000, QUICK),
    "range": (fuzz_range, 170_000, QUICK),
    "scales": (fuzz_scales, 180_000, QUICK),
    "gates": (fuzz_gates, 150_000, QUICK),
    "overrides": (fuzz_overrides, 5_000, SLOW),
    "recipes": (fuzz_recipes, 5_000, SLOW),
    "cells": (fuzz_cells, 15_000, SLOW),
    "claims": (fuzz_claims, 5_000, SLOW),
    "gguf": (fuzz_gguf, 10_000, SLOW),
}
SHARES = {"short": 0.001, "bounded": 0.1, "full": 1.0}
BATCH = 25  # trials of one case


def cases(level: str) -> list[str]:
    names = []
    for name, (_, count, size) in PARSERS.items():
        chunks = max(1, round(count * SHARES[level] / size))
        names += [
            f"{name}/{first}-{min(first + BATCH, chunks)}" for first in range(0, chunks, BATCH)
        ]
    return names


def run(case: str, rng: random.Random, workspace: Workspace) -> Tally:
    name, _, numbers = case.partition("/")
    start, stop = map(int, numbers.split("-"))
    (function, _, size), seed = PARSERS[name], rng.random()

    def trial(number: int) -> Tally:
        return _chunk(function, random.Random(f"{seed}/{start + number}"), size)

    with workspace.case(f"fuzzing-{name}-{start}") as folder:
        return run_trials(stop - start, trial, folder, workspace.log(folder), 300)


def _chunk(function: Callable[[random.Random], None], rng: random.Random, size: int) -> Tally:
    tally = Tally()
    for _ in range(size):
        try:
            function(rng)
            tally.survived += 1
        except FarspanError:
            tally.refused += 1
        except Exception as error:
            tally.fail(f"{type(error).__name__}: {str(error)[:200]!r}")
    return tally


FUZZING = Category("fuzzing", cases, run)
