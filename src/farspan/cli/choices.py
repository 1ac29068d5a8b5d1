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
POSITIONS = (
    *("none", "rope", "alibi", "t5", "kerple", "fire", "cope"),
    *("learned", "sinusoidal", "randomized"),
)
RECIPES = Path(__file__).parent.parent / "assets" / "recipes"

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
    "lab run": (
        "farspan lab run lab-tiny",
        "farspan lab run lab-grid train.steps=500 -o runs/grid --dry-run",
    ),
    "lab dump": (
        "farspan lab dump copy --lengths 2:6 --n 3",
        "farspan lab dump addition --scratchpad full",
    ),
    "lab finetune": ("farspan lab finetune nope-twin copy steps=100 -o copy-twin",),
    "lab distance": (
        "farspan lab distance nope-twin rope-twin",
        "farspan lab distance nope-twin rope-twin --length 256 --windows 2 -o distance",
    ),
    "lab theorems": ("farspan lab theorems", "farspan lab theorems nope-twin --length 256"),
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
    """The last of several methods that are joined with +, if it can follow those before."""
    before, plus, last = incomplete.rpartition("+")
    joined = [f"{before}{plus}{method}" for method in complete(METHODS)(last)]
    return [method for method in joined if _can_be_joined(method)] if plus else joined


def _can_be_joined(method: str) -> bool:
    from farspan.errors import FarspanError
    from farspan.methods.rules import parse_methods  # imports torch: only after a +

    try:
        parse_methods(method)
    except FarspanError:
        return False
    return True


def complete_recipe(kind: str) -> Callable[[str], list[str]]:
    """A function that completes a recipe that comes with farspan, or a .toml file."""

    def completed(incomplete: str) -> list[str]:
        bundled = sorted(path.stem for path in (RECIPES / kind).glob("*.toml"))
        return [*complete(bundled)(incomplete), *_paths(incomplete, (".toml",))]

    return completed


def complete_model(incomplete: str) -> list[str]:
    """A bundled model, folder or .gguf file."""
    return [*complete(BUNDLED)(incomplete), *_paths(incomplete, (".gguf",))]


def _paths(incomplete: str, suffixes: Sequence[str]) -> list[str]:
    """Folders, and files with one of the suffixes."""
    folder, _, name = incomplete.rpartition("/")
    beside = Path(folder or "/") if "/" in incomplete else Path()
    paths = [path for path in beside.glob(f"{name}*") if path.is_dir() or path.suffix in suffixes]
    return sorted(map(str, paths))
