"""Memory: what large inputs take at most, above what a process has before it reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from torture.children import farspan_main, run_function
from torture.harness import Category, Workspace
from torture.tally import Tally

MIB = 1 << 20
TEXT_SIZES = {"text-100-MB": 100, "text-5-GB": 5000}
RECORD_SIZES = {"record-20-MB": 20, "record-500-MB": 500}
# The shape of Llama 3.1 405B.
CONFIG = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=16_384,
    intermediate_size=53_248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=131_072,
)


def large_config(folder: Path, inputs: Path) -> list[str]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    return ["inspect", "model"]


def large_text(megabytes: int) -> Callable[[Path, Path], list[str]]:
    def write(folder: Path, inputs: Path) -> list[str]:
        line = json.dumps({"text": (inputs / "text.txt").read_text()}).encode() + b"\n"
        with (folder / "text.jsonl").open("wb") as file:
            for _ in range(megabytes * 10**6 // len(line) + 1):
                file.write(line)
        return ["diagnose", "in/nope", "--data", "text.jsonl", "--windows", "2"]

    return write


def large_record(megabytes: int) -> Callable[[Path, Path], list[str]]:
    def write(folder: Path, inputs: Path) -> list[str]:
        (folder / "run").mkdir()
        record = json.loads((inputs / "evaluated" / "record.json").read_text())
        text = json.dumps({**record, "filler": ["x" * 1000]})
        filler = '"' + "x" * 1000 + '", '
        text = text.replace('["' + "x" * 1000, "[" + filler * (megabytes * 1000) + '"x')
        (folder / "run" / "record.json").write_text(text)
        return ["report", "run", "-o", "page.html"]

    return write


# Fixture -> how it is written, and the MiB that a command may take for it.
FIXTURES: dict[str, tuple[Callable[[Path, Path], list[str]], int]] = {
    "config-405B": (large_config, 2000),
    **{name: (large_text(size), 500) for name, size in TEXT_SIZES.items()},
    **{name: (large_record(size), 100 + 8 * size) for name, size in RECORD_SIZES.items()},
}
FULL = ("text-5-GB", "record-500-MB")


def cases(level: str) -> list[str]:
    if level == "short":
        return []
    return [name for name in FIXTURES if level == "full" or name not in FULL]


def run(case: str, rng: random.Random, workspace: Workspace) -> Tally:
    write, bound = FIXTURES[case]
    tally = Tally()
    with workspace.case(f"memory-{case}") as folder:
        arguments, result = write(folder, workspace.inputs), folder / "peak"
        main = farspan_main(arguments)

        def measured() -> None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = resident("VmRSS")
            try:
                main()
            finally:
                result.write_text(str(resident("VmHWM") - before))

        ended = run_function(measured, folder, workspace.log(folder), 900)
        peak = int(result.read_text()) // MIB if result.exists() else -1
        if ended.code or ended.traceback or not 0 <= peak <= bound:
            tally.fail(f"{peak} MiB, at most {bound} are allowed; {ended.describe()}")
        else:
            tally.survived += 1
            print(f"memory/{case}: {peak} MiB of {bound}", flush=True)
    return tally


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


MEMORY_BOUNDS = Category("memory", cases, run)
