"""The names that options take, for completion, and examples of every command for its help.

They are written out, because the registries import torch; `tests/test_cli.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

BUNDLED = ("nope-twin", "rope-twin", "swan-twin")
METHODS = (
    *("uniform", "headscale", "headlog", "piecewise", "logn", "llama4", "ssmax"),
    *("pi", "ntk", "dynamic-ntk", "yarn", "drope", "swan", "continue", "auto"),
)
PRESETS = ("quick", "full")
SUITES = (
    *("quick", "paper", "perplexity", "passkey", "needle", "nonliteral", "ruler", "longbench"),
    "commonsense",
)
FORMATS = ("live", "folded", "stock", "peft", "gguf")
DTYPES = ("float32", "bfloat16", "float16")

EXAMPLES: dict[str, tuple[str, ...]] = {
    "inspect": ("farspan inspect nope-twin", "farspan inspect path/to/config --json"),
    "diagnose": (
        "farspan diagnose nope-twin rope-twin --lengths 256:1024 -o diagnosis",
        "farspan diagnose nope-twin --scales 1:1.4:0.1",
    ),
    "extend": (
        "farspan extend nope-twin --to 1024",
        "farspan extend MODEL --to 16k --method yarn+headscale --data books/",
        "farspan extend MODEL --to 16k --preset full --dry-run",
    ),
    "eval": (
        "farspan eval nope-1k --baseline nope-twin --lengths 512:2048 -o results",
        "farspan eval MODEL --suite ruler --lengths 4k:32k --limit 50 -o ruler",
        "farspan eval http://localhost:8000/v1 --tokenizer MODEL --suite needle -o served",
    ),
    "export": ("farspan export nope-1k --format stock --dtype bfloat16 -o nope-1k-stock",),
    "check": ("farspan check nope-1k --engine http://localhost:8000/v1",),
    "generate": ('farspan generate nope-1k --prompt "The history of" --max-new-tokens 32',),
    "pretrain": ("farspan pretrain twin-nope data.folder=path/to/data --dry-run",),
    "reproduce": ("farspan reproduce extend-small folder=path/to/data",),
    "compare": ("farspan compare results-a results-b -o compare.md",),
    "report": ("farspan report diagnosis nope-1k results -o report.html",),
    "demo": ("farspan demo",),
}


def epilog(command: str) -> str:
    """The examples of a command, each in a line of its own."""
    return "\n\n".join(["[dim]Examples[/]", *EXAMPLES[command]])


def complete(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """A function that completes one of the choices."""

    def completed(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return completed


def complete_method(incomplete: str) -> list[str]:
    """The last of several methods that are joined with +."""
    before, plus, last = incomplete.rpartition("+")
    return [f"{before}{plus}{method}" for method in complete(METHODS)(last)]


def complete_model(incomplete: str) -> list[str]:
    """A bundled model, folder or .gguf file."""
    folder, _, name = incomplete.rpartition("/")
    beside = Path(folder or "/") if "/" in incomplete else Path()
    paths = [path for path in beside.glob(f"{name}*") if path.is_dir() or path.suffix == ".gguf"]
    return [*complete(BUNDLED)(incomplete), *sorted(map(str, paths))]
