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
    from farspan.evals.scores import Score
    from farspan.workflows.diagnosing import Diagnosis
    from farspan.workflows.evaluating import Evaluated
    from farspan.workflows.extending import Extended
    from farspan.workflows.inspection import Inspection
    from farspan.workflows.laboratory import Compared
    from farspan.workflows.laboratory import Estimate as LabEstimate
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


@app.command("eval")
def evaluate(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="The results folder; what it holds is not measured again.")],
    suite: Annotated[
        str, typer.Option(help="quick, paper, perplexity, passkey, needle, longbench or commonsense.")
    ] = "quick",
    lengths: Annotated[str, typer.Option(help="As 512,1024 or 512:4096; else what suits the model.")] = "",
    data: Annotated[list[str] | None, typer.Option(help="Text as PATH or NAME=PATH; the suite tells which.")] = None,
    vs: Annotated[str | None, typer.Option("--vs", metavar="BASE", help="A model to set beside it.")] = None,
    require: Annotated[
        list[str] | None, typer.Option(help='A gate, as "ppl@512<=1.05x"; if it is missed, the exit code is 3.')
    ] = None,
    mode: Annotated[str, typer.Option(help="Of perplexity: same tokens at all lengths, paper-a or yarn.")] = "same",
    stride: Annotated[int | None, typer.Option(min=1, help="Of perplexity's windows; 256.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Tokens that perplexity scores at most; 2M.")] = None,
    sample_windows: Annotated[int | None, typer.Option(min=1, help="Perplexity of so many windows alone.")] = None,
    beams: Annotated[int | None, typer.Option(min=1, help="Of LongBench's answers; 1 is greedy.")] = None,
    items: Annotated[
        int | None, typer.Option(min=1, help="So many a task of needle, LongBench and commonsense.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="For keys, needles and subsets.")] = 0,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
    position: Position = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
):
    """How good is it, at which length? Exact numbers that say what they counted. Stopped, it goes on."""
    from farspan.errors import ProofError
    from farspan.lengths import parse_lengths
    from farspan.progress import bars
    from farspan.workflows.evaluating import evaluate as measure

    asked = parse_lengths(lengths) if lengths else []
    with bars() as progress:
        found = measure(
            model,
            suite,
            out,
            lengths=asked,
            data=parse_data(data) if data else None,
            vs=vs,
            require=require or [],
            mode=mode,
            stride=stride,
            budget=budget,
            windows=sample_windows,
            beams=beams,
            items=items,
            seed=seed,
            position=position,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
            say=lambda text: Console(stderr=True, soft_wrap=True).print(f"[yellow]note[/] {_plain(text)}"),
        )
    if as_json:
        if speaks:
            typer.echo(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        show_evaluation(found)
    missed = [verdict.told for verdict in found.verdicts if not verdict.holds]
    if missed and speaks:
        raise ProofError(
            f"{'a gate was' if len(missed) == 1 else f'{len(missed)} gates were'} missed: {'; '.join(missed)}"
        )


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


lab = typer.Typer(
    help="Which position encoding carries over to longer inputs? Small tasks, trained and asked.", no_args_is_help=True
)
app.add_typer(lab, name="lab")


@lab.command("run")
def lab_run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A study's name, as lab-tiny, or a .toml file.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="As train.steps=500.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Its folder; runs/RECIPE unless given.")] = None,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and stop.")] = False,
    as_json: AsJson = False,
):
    """Train a study's models, ask them inside and beyond the lengths they know, rank encodings. Stopped, it goes on."""
    from farspan.progress import bars
    from farspan.workflows import laboratory

    if dry_run:
        show_lab_estimate(laboratory.estimate(laboratory.read_study(recipe, changes or []), device), as_json)
        return
    folder = out or Path("runs") / Path(recipe).stem
    with bars() as progress:
        found = laboratory.run(
            recipe,
            changes or [],
            folder,
            device=device,
            progress=progress,
            say=lambda text: None if as_json else out_console.print(text, soft_wrap=True, markup=False),
        )
    if as_json:
        ranks = {rank.encoding: rank.reciprocal for rank in found.ranks}
        told = {"learnt": found.learnt[0], "models": found.learnt[1], "mean_reciprocal_rank": ranks}
        typer.echo(json.dumps({**told, "folder": str(folder)}))
        return
    for title, table in found.tables.items():
        out_console.print(f"\n[bold]{title}[/]\n")
        out_console.print(table, soft_wrap=True, markup=False)
    out_console.print(
        f"\n{found.learnt[0]} of {found.learnt[1]} models learnt their task; record and figure in {folder}",
        soft_wrap=True,
    )


@lab.command("dump")
def lab_dump(
    task: Annotated[str, typer.Argument(metavar="TASK", help="copy, reverse, addition, scan, … or a variant.")],
    n: Annotated[int, typer.Option("--n", help="How many examples; all are distinct.")] = 10,
    lengths: Annotated[str, typer.Option(help="As 2:20, both included; else those it is trained on.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed gives the same examples.")] = 0,
    scratchpad: Annotated[str | None, typer.Option(help="Steps before the answer: full, or parts, as icovr.")] = None,
):
    """Print examples as JSON Lines (input, target, length) for any other trainer."""
    from farspan.workflows.laboratory import dump

    for line in dump(task, n, lengths, seed, scratchpad):
        typer.echo(line)


@lab.command("distance")
def lab_distance(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Models of one tokenizer and depth.")],
    data: Annotated[str, typer.Option(help="Text: a file, folder, data set, or python-docs.")] = "python-docs",
    task: Annotated[str | None, typer.Option(help="Examples of a task instead, for models of the laboratory.")] = None,
    lengths: Annotated[str, typer.Option(help="Of the task, as 2:20; else those it is trained on.")] = "",
    length: Annotated[int, typer.Option(min=2, help="Of a window of text, in tokens.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="How many windows, or examples.")] = 4,
    legacy: Annotated[bool, typer.Option("--legacy", help="As paper B's code: no JSD, half of the pairs.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A new folder for record and figures.")] = None,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
    as_json: AsJson = False,
):
    """How alike do models attend? The divergence of their heads, layer by layer, and what each head is worth."""
    from farspan.progress import bars
    from farspan.workflows.laboratory import compare

    with bars() as progress:
        found = compare(
            models,
            data,
            out,
            task=task,
            lengths=lengths,
            length=length,
            windows=windows,
            rule="legacy" if legacy else "jsd",
            device=device,
            progress=progress,
        )
    show_comparison(found, as_json)
    if out is not None and not as_json:
        out_console.print(f"[dim]record and figures in[/] {out}")


@lab.command("theorems")
def lab_theorems(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL…]", help="To read positions from.")] = None,
    data: Annotated[str, typer.Option(help="Text: a file, folder, data set, or python-docs.")] = "python-docs",
    length: Annotated[int, typer.Option(min=4, help="Of the texts, in tokens.")] = 512,
    windows: Annotated[int, typer.Option(min=2, help="How many texts: half are fitted to, half are read.")] = 8,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A new folder for record and figure.")] = None,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")] = None,
):
    """How can a model without positions know them? Paper B's theorems as weights, and what models have learnt."""
    from farspan.workflows.laboratory import theorems

    found = theorems(models or [], data, out, length=length, windows=windows, device=device)
    for proof in found.proofs:
        out_console.print(
            f"{proof.rule:>10}: to {length} tokens the first layer finds positions within {proof.position_error:.0e}, "
            f"and the second scores by distance within {proof.score_error:.0e}",
            soft_wrap=True,
        )
    for name, readings in found.readings.items():
        shares = "  ".join(f"{each.r2:.3f}" for each in readings)
        last = readings[-1]
        out_console.print(f"{name}: R² of the position after each layer  {shares}", soft_wrap=True, markup=False)
        out_console.print(f"{'':{len(name)}}  off by {last.error:.0f} tokens at the end", soft_wrap=True, markup=False)
    if out is not None:
        out_console.print(f"[dim]record and figure in[/] {out}")


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


def show_evaluation(found: Evaluated) -> None:
    from rich.table import Table

    from farspan.evals.scores import beside

    against = found.base is not None
    table = Table(box=None, padding=(0, 1 if against else 2, 0, 0), header_style="dim")
    table.add_column("")
    for column in ("length", "model" if against else "value"):
        table.add_column(column, justify="right", no_wrap=True, style="bold" if column != "length" else "")
    for column in ("95% interval", *(("base", "×") if against else ()), "n", "truncated", "skipped"):
        table.add_column(column, justify="right", no_wrap=True, style="dim" if column not in ("base", "×") else "")
    shown = [score for score in found.scores if not score.tags.get("detail")]
    before = None
    for score in shown:
        task = score.tags.get("task", "")
        what = f"{score.eval} {task}" if task == score.metric != score.eval else f"{score.metric} {task}"
        what = score.metric if task in ("", score.eval) else what
        row = ["" if what == before else _plain(what), f"{score.length:,}", _figure(score.value)]
        wide = score.low < score.high  # one window alone, or prompts that all failed, tell of no interval
        row.append(f"{_figure(score.low)}–{_figure(score.high)}" if wide else "")
        if against:
            other = beside(score, found.base_scores)
            row += (
                [_figure(other.value), f"{score.value / other.value:.3f}" if other.value else ""] if other else ["", ""]
            )
        table.add_row(*row, _si(score.n), *(f"{score.tags.get(name, 0):,}" for name in ("truncated", "skipped")))
        before = what
    if against:
        out_console.print(f"{_plain(found.model)} [dim]against[/] {_plain(found.base or '')}\n")
    out_console.print(table)
    out_console.print()
    if data := _tagged(shown, "data"):
        out_console.print(f"[dim]data:[/] {_plain('; '.join(data))}", soft_wrap=True)
    if trained := _tagged(shown, "trained_on_passkeys"):
        told = [*trained, *(f"the base's: {saw}" for saw in _tagged(found.base_scores, "trained_on_passkeys"))]
        out_console.print(f"[dim]passkey documents in training:[/] {', '.join(told)}")
    for note in found.notes:
        out_console.print(f"[yellow]note[/] {_plain(note)}", soft_wrap=True)
    for verdict in found.verdicts:
        mark = "[green]holds[/]" if verdict.holds else "[red]missed[/]"
        out_console.print(f"{mark}  {_plain(verdict.gate)}  [dim]{_plain(verdict.told)}[/]", soft_wrap=True)
    out_console.print(f"[dim]record, samples and figures in[/] {found.folder}", soft_wrap=True)


def _tagged(scores: Sequence[Score], tag: str) -> list[str]:
    """What the scores of single tasks say under a tag, each thing once."""
    return list(dict.fromkeys(s.tags[tag] for s in scores if tag in s.tags and s.tags.get("task") != "average"))


def _figure(value: float) -> str:
    """Three digits that count: 0.92, 22.1, 1,284; of a length, all."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


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


def show_comparison(found: Compared, as_json: bool) -> None:
    from rich.table import Table

    if as_json:
        pairs = [
            {
                "models": [found.models[one], found.models[other]],
                "nearest": each.nearest.tolist(),
                "matched": each.matched.tolist(),
            }
            for (one, other), each in found.pairs.items()
        ]
        heads = dict(zip(found.models, (worth.tolist() for worth in found.ablations), strict=True))
        typer.echo(json.dumps({"tokens": found.tokens, "distances": pairs, "loss_without_head": heads}))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    table.caption = f"nats, by layer: nearest pair of heads, then heads matched one to one; {found.tokens:,} tokens"
    table.add_column("models")
    for layer in range(len(found.mass[0])):
        table.add_column(str(layer), justify="right")
    for (one, other), each in found.pairs.items():
        table.add_row(f"{found.models[one]} · {found.models[other]}", *(f"{value:.3f}" for value in each.nearest))
        table.add_row("", *(f"{value:.3f}" for value in each.matched), style="dim")
    if found.pairs:
        out_console.print(table)
    for name, worth, mass in zip(found.models, found.ablations, found.mass, strict=True):
        layer, head = divmod(int(worth.argmax()), worth.shape[1])
        out_console.print(
            f"{name}: without head {head} of layer {layer} the loss rises most, by {worth.max():.3f} nats; it gives "
            f"{mass[layer, head, 0]:.0%} to the token itself and {mass[layer, head, 1]:.0%} to the one before",
            soft_wrap=True,
            markup=False,
        )


def show_lab_estimate(found: Sequence[LabEstimate], as_json: bool) -> None:
    from dataclasses import asdict

    from rich.table import Table

    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    table.caption = (
        "memory: weights, gradients and optimizer of the largest fleet; time: at least, if nothing but matrix products "
        "took any, at the speed they have on this machine"
    )
    for column in ("encoding", "size", "models", "fleets", "parameters", "tokens", "memory", "time"):
        table.add_column(column, justify="left" if column in ("encoding", "size") else "right")
    for each in found:
        counts = (str(each.models), str(each.fleets), f"{each.parameters:,}", _si(each.tokens))
        table.add_row(each.encoding, each.size, *counts, f"{each.weights_gib:.1f} GiB", _duration(each.seconds))
    out_console.print(table)
    out_console.print(f"{_duration(sum(each.seconds for each in found))} at least in all")


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
