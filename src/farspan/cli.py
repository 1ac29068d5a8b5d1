"""The verbs for the terminal: parsing; terminal.py prints. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan import __version__
from farspan.errors import FarspanError
from farspan.signals import stoppable
from farspan.terminal import (
    NOTES,
    note,
    out_console,
    plain,
    short,
    show_comparison,
    show_diagnoses,
    show_estimate,
    show_evaluation,
    show_extension,
    show_inspection,
    show_lab_estimate,
    show_tables,
    show_theorems,
    size,
    speaks,
)

app = typer.Typer(
    name="farspan",
    help="Longer context for causal language models by the sharpness of their attention.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, hub id, twin, .gguf or patch folder.")
]
Position = Annotated[
    str | None,
    typer.Option(help='Read a llama checkpoint with this encoding: "none" if it was trained without rotation.'),
]
Device = Annotated[str | None, typer.Option(help="As cpu or cuda:0; a GPU where there is one.")]
Text = Annotated[str, typer.Option(help="Text: a file, folder, data set, or python-docs.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run a command; a mistake of the user's is one sentence and an exit code, never a traceback."""
    # What torch says of every norm whose weights stay float32 under autocast, and nobody at a terminal can use.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    logging.getLogger("farspan").addHandler(NOTES)
    try:
        app()
    except FarspanError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error[/] {plain(str(error))}")
        sys.exit(error.exit_code)
    except OSError as error:  # a file or folder that the system does not let us have
        why = f"{error.filename} cannot be used ({error.strerror})" if error.filename else str(error)
        said = f"[bold red]error[/] {plain(why)}; check that path, or choose another"
        Console(stderr=True, highlight=False, soft_wrap=True).print(said)
        sys.exit(FarspanError.exit_code)


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
    data: Text = "python-docs",
    lengths: Annotated[
        str, typer.Option(help="As 512,1024 or 512:4096, the largest is read; else twice the training length.")
    ] = "",
    scales: Annotated[str, typer.Option(help="Uniform scales to compare, as 0.8:1.4:0.1.")] = "",
    windows: Annotated[int, typer.Option(min=1, help="How many windows of text to read at most.")] = 8,
    train_length: Annotated[int | None, typer.Option(min=1, help="Where the config does not tell it.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A new folder for record and figures.")] = None,
    device: Device = None,
    position: Position = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
):
    """Why does it fail? Loss and attention entropy by position, and where they leave their trends."""
    from farspan.lengths import parse_lengths, parse_range
    from farspan.progress import bars
    from farspan.workflows.diagnosing import diagnose as look
    from farspan.workflows.diagnosing import usual_lengths

    usual = usual_lengths(models, train_length, position, trust_remote_code) if not lengths else []
    asked, sweep = usual or parse_lengths(lengths), parse_range(scales) if scales else []
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
        out_console.print(f"[dim]record and figures in[/] {plain(str(out))}", soft_wrap=True)


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
    device: Device = None,
    position: Position = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
):
    """Make the context longer: fit a method, prove on a fresh model that it took effect, show the gain."""
    from farspan.lengths import parse_length
    from farspan.progress import bars
    from farspan.workflows.extending import DEFAULT_TEXT
    from farspan.workflows.extending import extend as fit
    from farspan.workflows.fitting import read_extension

    how, target = read_extension(recipe, changes or []), parse_length(to)
    with stoppable(f"nothing is in {out} yet"), bars() as progress:
        found = fit(
            model,
            target,
            out,
            method,
            data=parse_data(data) if data else DEFAULT_TEXT,
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
    if len(words) == 1 and (not named or Path(words[0]).exists()):
        return words[0]
    names = [word.partition("=")[0] for word in words if "=" in word]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FarspanError(f"--data {twice[0]}= was given {names.count(twice[0])} times; give each name once")
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
    with stoppable("what is prepared and trained is kept"), bars() as progress:
        steps = pretraining.read_recipe(recipe, changes or []).train.steps
        advance = None
        seen = 0

        def listen(moment) -> None:
            nonlocal advance, seen
            advance = advance or progress("train", steps)
            mfu = f", MFU {moment.mfu:.0%}" if moment.mfu else ""
            advance(
                moment.step - seen, f"loss {moment.loss:.3f}, {short(round(moment.tokens_per_second))} tokens/s{mfu}"
            )
            seen = moment.step

        done = pretraining.pretrain(recipe, changes or [], out, progress=progress, listen=listen)
    if as_json:
        if speaks:
            typer.echo(json.dumps({"model": str(done.folder), "steps": done.steps, "loss": done.loss}))
        return
    how = "was trained already" if done.already else "trained"
    out_console.print(
        f"{how}: {done.steps:,} steps, loss {done.loss:.3f}; the model is in {plain(str(done.folder))}", soft_wrap=True
    )


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study's name, as extend-small, or a .toml file.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="As folder=path/to/data.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Its folder; runs/STUDY unless given.")] = None,
    device: Device = None,
    so_far: Annotated[bool, typer.Option("--so-far", help="Show what is finished, and measure nothing.")] = False,
):
    """Run a whole study: train or find its models, fit every method, measure all alike. Stopped, it goes on."""
    from farspan.progress import bars
    from farspan.workflows import reproduce as studies

    folder = out or Path("runs") / Path(study).stem
    if so_far:
        studies.so_far(study, changes or [], folder, note)
    else:
        with stoppable(f"what is finished is in {folder}"), bars() as progress:
            studies.reproduce(
                study,
                changes or [],
                folder,
                device=device,
                progress=progress,
                say=lambda text: out_console.print(text, soft_wrap=True, markup=False),
            )
    out_console.print((folder / "tables.md").read_text(encoding="utf-8"), soft_wrap=True, markup=False)
    out_console.print(f"[dim]tables, results and figures in[/] {plain(str(folder))}", soft_wrap=True)


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
    device: Device = None,
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
    with stoppable(f"what is finished is in {out}"), bars() as progress:
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
            say=note,
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
    device: Device = None,
    position: Position = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
):
    """Give the patched model to others: written, read again, and compared with the live one."""
    from farspan.workflows.exporting import export as write

    done = write(
        source, out, format, dtype=dtype, device=device, position=position, trust_remote_code=trust_remote_code
    )
    if as_json:
        typer.echo(json.dumps(done.to_json()))
        return
    for where, proof in done.proofs.items():
        out_console.print(
            f"{where} the training length  max |Δlogit| {proof.max_abs_logit:.2g} (allowed {proof.tolerance:.2g}), "
            f"KL {proof.kl:.2g} nats, same argmax {proof.same_argmax:.1%} of {proof.tokens} tokens",
            soft_wrap=True,
        )
    out_console.print(f"proven: {format}, {size(done.bytes)} in {plain(str(done.folder))}", soft_wrap=True)


@app.command()
def generate(
    model: Model,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 text file to go on from.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text itself, instead of a file.")] = None,
    tokens: Annotated[int, typer.Option(help="How many at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    device: Device = None,
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
    device: Device = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and stop.")] = False,
    so_far: Annotated[bool, typer.Option("--so-far", help="Show what is finished, and train nothing.")] = False,
    as_json: AsJson = False,
):
    """Train a study's models, ask them inside and beyond the lengths they know, rank encodings. Stopped, it goes on."""
    from farspan.progress import bars
    from farspan.workflows import laboratory

    if dry_run:
        show_lab_estimate(laboratory.estimate(laboratory.read_study(recipe, changes or []), device), as_json)
        return
    folder = out or Path("runs") / Path(recipe).stem
    if so_far:
        found = laboratory.so_far(recipe, changes or [], folder, note)
    else:
        with stoppable(f"what is finished is in {folder}"), bars() as progress:
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
    show_tables(found.tables)
    out_console.print(
        f"\n{found.learnt[0]} of {found.learnt[1]} models learnt their task; record and figure in {plain(str(folder))}",
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
    data: Annotated[str | None, typer.Option(help="Text: a file, folder or data set; python-docs.")] = None,
    task: Annotated[str | None, typer.Option(help="Examples of a task instead, for models of the laboratory.")] = None,
    lengths: Annotated[str, typer.Option(help="Of the task, as 2:20; else those it is trained on.")] = "",
    length: Annotated[int | None, typer.Option(min=2, help="Of a window of text, in tokens; 512.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="How many windows, or examples.")] = 4,
    legacy: Annotated[bool, typer.Option("--legacy", help="As paper B's code: no JSD, half of the pairs.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A new folder for record and figures.")] = None,
    device: Device = None,
    as_json: AsJson = False,
):
    """How alike do models attend? The divergence of their heads, layer by layer, and what each head is worth."""
    from farspan.progress import bars
    from farspan.workflows.explaining import compare

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
        out_console.print(f"[dim]record and figures in[/] {plain(str(out))}", soft_wrap=True)


@lab.command("theorems")
def lab_theorems(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL…]", help="To read positions from.")] = None,
    data: Text = "python-docs",
    length: Annotated[int, typer.Option(min=4, max=16_384, help="Of the texts, in tokens.")] = 512,
    windows: Annotated[int, typer.Option(min=2, help="How many texts: half are fitted to, half are read.")] = 8,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A new folder for record and figure.")] = None,
    device: Device = None,
):
    """How can a model without positions know them? Paper B's theorems as weights, and what models have learnt."""
    from farspan.workflows.explaining import theorems

    found = theorems(models or [], data, out, length=length, windows=windows, device=device)
    show_theorems(found, length)
    if out is not None:
        out_console.print(f"[dim]record and figure in[/] {plain(str(out))}", soft_wrap=True)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs that left a record.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A file; one that exists is replaced.")] = Path(
        "report.html"
    ),
):
    """One HTML page of runs, which needs no network: curves that tell their values, grids, tables."""
    from farspan.workflows.reporting import report as write

    page = write(folders, out, say=note)
    out_console.print(f"[dim]the page is[/] {plain(str(page))}", soft_wrap=True)


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
    before, after = uniform.before, headscale.after
    told = (
        f"Loss at 1,024 tokens fell by {before['loss@1024'] - after['loss@1024']:.2f} nats; passkeys there, which "
        f"sharper attention can miss, went from {before['passkey@1024']:.2f} to {after['passkey@1024']:.2f}. "
        f"The figure is [bold]{drawn}[/]."
    )
    out_console.print(told, soft_wrap=True)


if __name__ == "__main__":
    main()
