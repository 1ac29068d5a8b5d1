"""The verbs for the terminal: parsing and printing only. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from farspan import __version__
from farspan.errors import FarspanError

if TYPE_CHECKING:
    from farspan.workflows.diagnosing import Diagnosis
    from farspan.workflows.inspection import Inspection

app = typer.Typer(
    name="farspan",
    help="Longer context for causal language models by the sharpness of their attention.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out_console = Console(highlight=False)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, hub id, .gguf or patch folder.")]
Position = Annotated[
    str | None,
    typer.Option(help='Read a llama checkpoint with this encoding: "none" if it was trained without rotation.'),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run a command; a mistake of the user's is one sentence and an exit code, never a traceback."""
    try:
        app()
    except FarspanError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error[/] {_plain(str(error))}")
        sys.exit(error.exit_code)
    except OSError as error:  # a file or folder that the system does not let us have
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error[/] {_plain(str(error))}")
        sys.exit(FarspanError.exit_code)


def _plain(text: str) -> str:
    """Square brackets in a message are not markup."""
    return text.replace("[", "\\[")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out_console.print(f"farspan {__version__}")


@app.command()
def inspect(model: Model, as_json: AsJson = False, position: Position = None, trust_remote_code: Trust = False):
    """Which layers do positions reach, and can scales be folded? Found by running the model."""
    from farspan.workflows.inspection import inspect as look

    found = look(model, position=position, trust_remote_code=trust_remote_code)
    if as_json:
        typer.echo(json.dumps(found.to_json(), ensure_ascii=False, indent=2))
    else:
        show_inspection(found)


@app.command()
def diagnose(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="One or several models or patches.")],
    data: Annotated[str, typer.Option(help="Text: a file, folder, data set, or python-docs.")] = "python-docs",
    lengths: Annotated[str, typer.Option(help="As 512,1024 or 512:4096; the largest is read.")] = "512:4096",
    scales: Annotated[str, typer.Option(help="Uniform scales to compare, as 0.8:1.4:0.1.")] = "",
    windows: Annotated[int, typer.Option(min=1, help="How many windows of text to read at most.")] = 8,
    train_length: Annotated[int | None, typer.Option(min=1, help="Where the config does not tell it.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A new folder for record and figures.")] = None,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
    position: Position = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
):
    """Why does it fail? Loss and attention entropy by position, and where they leave their trends."""
    from farspan.lengths import parse_lengths, parse_range
    from farspan.progress import bars
    from farspan.workflows.diagnosing import diagnose as look

    asked, sweep = parse_lengths(lengths), parse_range(scales) if scales else []
    with bars() as progress:
        found = look(
            models,
            data,
            asked,
            scales=sweep,
            windows=windows,
            train_length=train_length,
            position=position,
            out=out,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if as_json:
        texts = [diagnosis.to_json() for diagnosis in found]
        typer.echo(json.dumps(texts[0] if len(texts) == 1 else texts, ensure_ascii=False))
        return
    show_diagnoses(found, asked)
    if out is not None:
        out_console.print(f"[dim]record and figures in[/] {out}")


@app.command()
def demo():
    """Build small models of the kinds people run today and look at each."""
    from farspan.workflows.demo import build_models
    from farspan.workflows.inspection import inspect as look

    with tempfile.TemporaryDirectory() as folder:
        for what, path in build_models(Path(folder)):
            out_console.rule(f"[bold]{path.name}[/] · {what}", align="left", style="dim")
            show_inspection(look(path))


def show_diagnoses(found: Sequence[Diagnosis], lengths: Sequence[int]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption="loss in nats", caption_justify="left")
    table.add_column("model")
    for length in lengths:
        table.add_column(f"@{length}", justify="right", no_wrap=True)
    for column in ("loss\nknee", "entropy\nknee", "heads\ndistracted", "try\nλ̂"):
        table.add_column(column, justify="right", no_wrap=True)
    for diagnosis in found:
        span = max(1, diagnosis.train_length // 4)
        cells = [f"{diagnosis.curves.loss_at(length, min(span, length)):.3f}" for length in lengths]
        knees = [f"{knee:,}" if knee else "none" for knee in (diagnosis.loss_knee, diagnosis.entropy_knee)]
        distracted = f"{len(diagnosis.distracted_heads)} of {diagnosis.heads}"
        table.add_row(diagnosis.label, *cells, *knees, distracted, f"{diagnosis.suggested_scale:g}")
    out_console.print(table)
    out_console.print()
    for diagnosis in found:
        name = f"[bold]{_plain(diagnosis.label)}[/]  " if len(found) > 1 else ""
        out_console.print(f"{name}{_plain(diagnosis.verdict)}")


def show_inspection(found: Inspection) -> None:
    from rich.table import Table

    from farspan.workflows.inspection import ranges

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    heads = f"{found.heads} query, {found.kv_heads} key/value, width {found.head_dim}"
    facts.add_row("family", f"{found.family}, {_si(found.parameters)} parameters")
    facts.add_row("heads", f"{heads}, base scale {found.base_scale:.4g}")
    facts.add_row("trained on", f"{found.train_length} tokens" if found.train_length else "unknown")
    if found.query_norm:
        facts.add_row("query norm", found.query_norm)
    if found.temperature:
        facts.add_row("temperature", found.temperature)

    layers = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("layers", "positions", "config reads", "window"):
        layers.add_column(column)
    groups: dict[tuple[str, str, int | None], list[int]] = {}
    for layer in found.layers:
        groups.setdefault((layer.position, layer.claimed, layer.window), []).append(layer.index)
    for (kind, claimed, window), indices in groups.items():
        agrees = claimed in (kind, "unknown")
        layers.add_row(
            ranges(indices),
            f"[bold green]{kind}[/]" if kind == "none" else f"[bold]{kind}[/]",
            claimed if agrees else f"[yellow]{claimed}[/]",
            str(window) if window else "all",
        )

    out_console.print(facts)
    out_console.print()
    out_console.print(layers)
    out_console.print()
    fold = found.fold
    verdict = f"[green]yes[/], into {fold.site}" if fold.possible else "[yellow]no[/]"
    out_console.print(f"[dim]per-head scales fold[/]  {verdict}" + (f" ({_plain(fold.why)})" if fold.why else ""))
    for warning in found.warnings:
        out_console.print(f"[yellow]note[/] {_plain(warning)}")
    out_console.print()


def _si(count: int) -> str:
    """1_234_567 -> "1.2M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


if __name__ == "__main__":
    main()
