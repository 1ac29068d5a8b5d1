"""The verbs for the terminal: parsing and printing only. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from farspan import __version__
from farspan.errors import FarspanError

if TYPE_CHECKING:
    from farspan.workflows.diagnosing import Diagnosis
    from farspan.workflows.extending import Extended
    from farspan.workflows.inspection import Inspection
    from farspan.workflows.pretraining import Estimate

app = typer.Typer(
    name="farspan",
    help="Longer context for causal language models by the sharpness of their attention.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Of the processes that torchrun starts, one speaks.
speaks = os.environ.get("RANK", "0") == "0"
out_console = Console(highlight=False, quiet=not speaks)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, hub id, twin, .gguf or patch folder.")
]
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
def extend(
    model: Model,
    to: Annotated[str, typer.Option("--to", help="The length to reach, as 2048 or 16k.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A new folder for the patch.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="As search.steps=50.")] = None,
    method: Annotated[str, typer.Option(help="headscale, yarn, …; several joined with +; or auto.")] = "auto",
    data: Annotated[list[str] | None, typer.Option(help="Text; or three, as search=, choose= and report=PATH.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe's name, or a .toml file.")] = None,
    train_length: Annotated[int | None, typer.Option(min=1, help="Where the config does not tell it.")] = None,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
    position: Position = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
):
    """Make the context longer: fit a method, prove on a fresh model that it took effect, show the gain."""
    from farspan.lengths import parse_lengths
    from farspan.progress import bars
    from farspan.workflows.extending import extend as fit
    from farspan.workflows.extending import read_extension

    how, lengths = read_extension(recipe, changes or []), parse_lengths(to)
    if len(lengths) != 1:
        raise FarspanError(f"--to {to} names {len(lengths)} lengths; give one, as --to 2048")
    with bars() as progress:
        found = fit(
            model,
            lengths[0],
            out,
            method,
            data=parse_data(data or []),
            recipe=how,
            train_length=train_length,
            position=position,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if as_json:
        if speaks:
            told = {"patch": found.patch.describe(), "before": found.before, "after": found.after, "folder": str(out)}
            typer.echo(json.dumps(told, ensure_ascii=False))
        return
    show_extension(found)


def parse_data(words: Sequence[str]) -> str | dict[str, str]:
    """--data PATH, or --data NAME=PATH several times."""
    named = dict(word.split("=", 1) for word in words if "=" in word)
    if not words:
        return "python-docs"
    if len(words) == 1 and not named:
        return words[0]
    if len(named) < len(words):
        raise FarspanError(f"--data was given {len(words)} times; give one text, or name each as NAME=PATH")
    return named


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a .toml file.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="As steps=100.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The run's folder; runs/NAME unless given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and stop.")] = False,
    as_json: AsJson = False,
):
    """Train a model by a recipe, or go on where its run was stopped. Under torchrun, on several GPUs."""
    from farspan.progress import bars
    from farspan.workflows import pretraining

    if dry_run:
        show_estimate(recipe, pretraining.estimate(pretraining.read_recipe(recipe, changes or [])), as_json)
        return
    with bars() as progress:
        steps = pretraining.read_recipe(recipe, changes or []).train.steps
        advance = None
        seen = 0

        def listen(moment) -> None:
            nonlocal advance, seen
            advance = advance or progress("train", steps)
            mfu = f", MFU {moment.mfu:.0%}" if moment.mfu else ""
            advance(moment.step - seen, f"loss {moment.loss:.3f}, {_si(round(moment.tokens_per_second))} tokens/s{mfu}")
            seen = moment.step

        done = pretraining.pretrain(recipe, changes or [], out, progress=progress, listen=listen)
    if as_json:
        if speaks:
            typer.echo(json.dumps({"model": str(done.folder), "steps": done.steps, "loss": done.loss}))
        return
    how = "was trained already" if done.already else "trained"
    out_console.print(
        f"{how}: {done.steps:,} steps, loss {done.loss:.3f}; the model is in {done.folder}", soft_wrap=True
    )


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study's name, as extend-small, or a .toml file.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="As folder=path/to/data.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Its folder; runs/STUDY unless given.")] = None,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
):
    """Run a whole study: train or find its models, fit every method, measure all alike. Stopped, it goes on."""
    from farspan.progress import bars
    from farspan.workflows import reproduce as studies

    folder = out or Path("runs") / Path(study).stem
    with bars() as progress:
        results = studies.reproduce(
            study,
            changes or [],
            folder,
            device=device,
            progress=progress,
            say=lambda text: out_console.print(text, soft_wrap=True, markup=False),
        )
    for text in results[0]["loss"]:
        out_console.print(f"\n{text}, loss in nats\n")
        out_console.print(studies.table(results, text), soft_wrap=True, markup=False)


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A patch folder, or any model.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A new folder.")],
    format: Annotated[str, typer.Option(help="live, folded, stock, peft or gguf.")],
    dtype: Annotated[str, typer.Option(help="Of the written weights; narrower ones round.")] = "float32",
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
    as_json: AsJson = False,
):
    """Give the patched model to others: written, read again, and compared with the live one."""
    from farspan.workflows.exporting import export as write

    done = write(source, out, format, dtype=dtype, device=device)
    if as_json:
        typer.echo(json.dumps(done.to_json()))
        return
    for where, proof in done.proofs.items():
        out_console.print(
            f"{where} the training length  max |Δlogit| {proof.max_abs_logit:.2g} (allowed {proof.tolerance:.2g}), "
            f"KL {proof.kl:.2g} nats, same argmax {proof.same_argmax:.1%} of {proof.tokens} tokens",
            soft_wrap=True,
        )
    out_console.print(f"proven: {format}, {done.bytes / 1e6:.1f} MB in {done.folder}", soft_wrap=True)


@app.command()
def generate(
    model: Model,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 text file to go on from.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself, instead of a file.")] = None,
    tokens: Annotated[int, typer.Option(help="How many at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
    position: Position = None,
    trust_remote_code: Trust = False,
):
    """Go on from a prompt, printing as it comes."""
    if (prompt is None) == (prompt_file is None):
        raise FarspanError(
            "a prompt comes from a file or from the command line; give one of --prompt-file and --prompt"
        )
    from farspan.workflows.generating import generate as go_on
    from farspan.workflows.generating import read_prompt

    text = read_prompt(prompt_file) if prompt_file is not None else prompt or ""
    for piece in go_on(
        model,
        text,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        position=position,
        device=device,
        trust_remote_code=trust_remote_code,
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command()
def demo():
    """The main job in minutes on the CPU: a small model fails beyond its training length, and is mended."""
    from farspan.progress import bars
    from farspan.workflows import demo as steps

    folder = steps.free_folder(Path("runs/demo"))
    with bars() as progress:
        out_console.rule("[bold]1 · diagnose[/]  why does nope-twin fail beyond 512 tokens?", align="left", style="dim")
        diagnosis = steps.look(progress)
        show_diagnoses([diagnosis], steps.LENGTHS)
        out_console.print()
        out_console.rule("[bold]2 · extend[/]  one λ̂ for all heads (UniformScale)", align="left", style="dim")
        uniform = steps.by_one_number(folder, progress)
        show_extension(uniform)
        out_console.print()
        out_console.rule(
            "[bold]3 · extend[/]  one λ̂ for every head (HeadScale, reduced to 20 steps of 2 windows)",
            align="left",
            style="dim",
        )
        headscale = steps.by_heads(folder, uniform, progress)
        show_extension(headscale)
    drawn = steps.draw(folder, {"uniform": uniform, "headscale, reduced": headscale})
    out_console.rule(style="dim")
    gained = uniform.before["loss@1024"] - headscale.after["loss@1024"]
    told = f"Loss at 1,024 tokens fell by {gained:.2f} nats; the figure is [bold]{drawn}[/]."
    out_console.print(told, soft_wrap=True)


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


def show_extension(found: Extended) -> None:
    from rich.table import Table

    patch = found.patch
    for note in found.notes:
        out_console.print(f"[yellow]note[/] {_plain(note)}", soft_wrap=True)
    if patch.scales is not None:
        grown = patch.scales.at(torch_tensor([patch.target])).flatten()
        where = f"at {patch.target} keys" if patch.scales.slope is not None else "at any length"
        spread = f"{grown.min():.2f} to {grown.max():.2f}, mean {grown.mean():.2f}"
        out_console.print(f"[dim]λ̂[/] {spread} {where}, {grown.numel()} heads in {len(patch.scales.layers)} layers")
    if patch.rope is not None:
        out_console.print(f"[dim]rope[/] {_plain(', '.join(f'{key} {value}' for key, value in patch.rope.items()))}")
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    lengths = sorted({int(name.partition("@")[2]) for name in found.before})
    for length in lengths:
        table.add_column(f"@{length}", justify="right")
    for kind, digits in (("loss", 3), ("passkey", 2)):
        for when, values in (("before", found.before), ("after", found.after)):
            cells = [values.get(f"{kind}@{length}") for length in lengths]
            if any(cell is not None for cell in cells):
                style = "bold" if when == "after" else ""
                shown = ["" if cell is None else f"{cell:.{digits}f}" for cell in cells]
                table.add_row(f"{kind} {when}", *shown, style=style)
    out_console.print()
    out_console.print(table)
    out_console.print()
    out_console.print(
        f"[dim]reloaded onto a fresh model, the patch moves a logit by up to {found.effect:.2g} and differs from the "
        f"fitted model by {found.proof:.2g}; it is in[/] {found.folder}",
        soft_wrap=True,
    )


def torch_tensor(values: Sequence[float]):
    import torch

    return torch.tensor(values)


def show_estimate(recipe: str, found: Estimate, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.table import Table

    if as_json:
        typer.echo(json.dumps({**asdict(found), "seconds_at_least": found.seconds}))
        return
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("recipe", recipe)
    facts.add_row("parameters", f"{found.parameters:,}")
    text = "text that is not there yet" if found.files_mb is None else f"{found.files_mb:,.0f} MB of files"
    facts.add_row("tokens", f"{found.tokens:,}, from {text}")
    facts.add_row("memory", f"{found.weights_gib:.1f} GiB of weights, gradients and optimizer on each device,")
    facts.add_row("", f"about {found.activations_gib:.1f} GiB of activations for a micro batch")
    facts.add_row(
        "time", f"{_duration(found.seconds)} at least, {found.flops:.2g} FLOP at the {found.rate / 1e12:.3g} TFLOP/s"
    )
    facts.add_row("", "that matrix products reach on this machine, measured now")
    out_console.print(facts)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


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
