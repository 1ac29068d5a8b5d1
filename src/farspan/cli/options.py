"""Options that several commands share, and the old names of options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from farspan.cli.choices import POSITIONS, complete, complete_model
from farspan.cli.console import note
from farspan.deprecation import REMOVED_IN
from farspan.errors import FarspanError

# By command: old name of an option -> its name now. Old names are not in the help.
RENAMED_OPTIONS = {
    "eval": {
        "--vs": "--baseline",
        "--require": "--gate",
        "--items": "--limit",
        "--sample-windows": "--windows",
    },
    "generate": {"--tokens": "--max-new-tokens"},
    "reproduce": {"--so-far": "--report-only"},
    "lab run": {"--so-far": "--report-only"},
}

MODEL_KINDS = (
    "patch folder, checkpoint folder, Hub id, .gguf file or bundled model (nope-twin, rope-twin, "
    "swan-twin)"
)
TEXT_KINDS = (
    "File (plain text, .jsonl or .parquet), folder of such files, Hub data set, or python-docs"
)
LOADING = "Model loading"  # a panel of the help

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=f"Model: {MODEL_KINDS}.", autocompletion=complete_model),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help=f"One or more models: {MODEL_KINDS}.",
        autocompletion=complete_model,
    ),
]
Text = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help=f"{TEXT_KINDS} (the language reference of Python).",
    ),
]


def out_option(help: str, **settings: Any) -> Any:
    """-o, --out: where a command writes."""
    return typer.Option("-o", "--out", metavar="PATH", help=help, **settings)


OutFolder = Annotated[
    Path | None, out_option("New folder for the record and figures.", show_default="print only")
]
TrainLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Length the model was trained on, in tokens.",
        show_default="from the config",
        rich_help_panel=LOADING,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda or cuda:N.",
        show_default="cuda if there is a GPU, else cpu",
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="For models that one device does not hold, as in transformers: auto, balanced, "
        "balanced_low_0 or sequential.",
        show_default="one device",
        rich_help_panel=LOADING,
    ),
]
Position = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Position encoding of a llama checkpoint, if it was trained with another than its "
        f"config says: {', '.join(POSITIONS[:-1])} or {POSITIONS[-1]}.",
        show_default="from the config",
        autocompletion=complete(POSITIONS),
        rich_help_panel=LOADING,
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Begin-of-text token in front of every text: yes, no, or auto (by the tokenizer or "
        ".gguf file; where they do not say, by the loss with and without it).",
        rich_help_panel=LOADING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that comes with a checkpoint.",
        rich_help_panel=LOADING,
    ),
]
ReportOnly = Annotated[
    bool,
    typer.Option("--report-only", help="Report the finished cells of the study; run nothing."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything, show what the run would cost, and exit."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def overrides_argument(example: str) -> Any:
    """KEY=VALUE arguments that change a recipe."""
    return typer.Argument(
        metavar="KEY=VALUE", help=f"Changes to the recipe, e.g. {example}.", show_default=False
    )


def parse_data(values: Sequence[str]) -> str | dict[str, str]:
    """`--data PATH` once, or `--data NAME=PATH` any number of times."""
    named = dict(value.split("=", 1) for value in values if "=" in value)
    if len(values) == 1 and (not named or Path(values[0]).exists()):
        return values[0]
    names = [value.partition("=")[0] for value in values if "=" in value]
    if "" in names:
        raise FarspanError(f"--data ={named['']} has no name; write it as NAME=PATH")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise FarspanError(
            f"--data {repeated[0]}= was given {names.count(repeated[0])} times; give each name once"
        )
    if len(named) < len(values):
        raise FarspanError(
            f"--data was given {len(values)} times; give one text, or name each one: NAME=PATH"
        )
    return named


class Command(TyperCommand):
    """A command that accepts the old names of its options, with a note."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        renamed = RENAMED_OPTIONS.get(_command_name(ctx), {})
        return super().parse_args(ctx, self._with_new_names(args, renamed))

    def _with_new_names(self, args: Sequence[str], renamed: dict[str, str]) -> list[str]:
        options = [param for param in self.params if param.param_type_name == "option"]
        with_value = {
            name
            for option in options
            if not getattr(option, "is_flag", False)
            for name in option.opts
        }
        current: list[str] = []
        noted: set[str] = set()
        remaining = iter(args)
        for argument in remaining:
            if argument == "--":  # only positional arguments follow
                current += [argument, *remaining]
                break
            name, equals, value = argument.partition("=")
            option_name = renamed.get(name, name)
            if option_name != name and name not in noted:
                note(f"{name} is now {option_name}; the old name works until {REMOVED_IN}")
                noted.add(name)
            current.append(f"{option_name}{equals}{value}")
            if option_name in with_value and not equals:
                current += islice(remaining, 1)  # its value, whatever it looks like
        return current


def _command_name(ctx: Any) -> str:
    """`eval`, `lab run`: the names after `farspan`."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    return " ".join(names)
