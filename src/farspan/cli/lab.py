"""`farspan lab`: run, dump, finetune, distance, theorems"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from farspan.cli.choices import complete_recipe, epilog
from farspan.cli.console import (
    console,
    format_count,
    format_memory,
    make_table,
    note,
    print_json,
    print_line,
    print_saved,
    print_text,
)
from farspan.cli.options import (
    MODEL_KINDS,
    TEXT_KINDS,
    AsJson,
    Bos,
    Command,
    Device,
    DryRun,
    Model,
    Models,
    OutFolder,
    ReportOnly,
    Text,
    out_option,
    overrides_argument,
)
from farspan.progress import format_duration, ignore
from farspan.signals import stoppable

if TYPE_CHECKING:
    from farspan.lab.distance import AttentionComparison
    from farspan.lab.theorems import PositionAnalysis
    from farspan.workflows.lab import LabResult
    from farspan.workflows.lab_estimate import LabEstimate
    from farspan.workflows.lab_finetune import FinetuneResult

TASK_NAMES = (
    "copy, copy-repeat, copy-repeat-double, copy-replace, copy-double, reverse, reverse-double, "
    "reverse-copy, addition, polynomial, sorting, sorting-numbers, summation, parity, lego, "
    "lego-ordered, scan, pcfg, copy-next or reverse-numbers"
)
TASKS_HELP = f"{TASK_NAMES}; or RECIPE.toml:TASK for a task of a recipe's own."
TrustLabCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code of the recipe's own tasks and encodings, and of models.",
    ),
]
TextOrNone = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help=f"{TEXT_KINDS}.",
        show_default="python-docs",
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="TASK",
        help=f"Instead of text, examples of a task, for models of the lab: {TASKS_HELP}",
    ),
]
LengthRange = Annotated[
    str,
    typer.Option(
        metavar="RANGE",
        help="Shortest and longest example of the task, e.g. 2:20.",
        show_default="the task's train lengths",
    ),
]
Scratchpad = Annotated[
    str | None,
    typer.Option(
        metavar="PARTS",
        help="Steps before the answer: full, none, or parts of a step, e.g. icovr or input+output.",
        show_default="none",
    ),
]
Minimum = Annotated[
    str,
    typer.Option(
        "--minimum",
        metavar="WHICH",
        help="Nearest pair of heads: sample (of each window or example, then the mean; as "
        "Kazemnejad 2023) or mean (of the mean over all).",
    ),
]
Legacy = Annotated[
    bool,
    typer.Option(
        "--legacy", help="Compute like the code of Kazemnejad 2023: no JSD, half of the pairs."
    ),
]

app = typer.Typer(
    help="Length generalization by position encoding: small models, trained on synthetic tasks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command("run", cls=Command, epilog=epilog("lab run"))
def run_command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="lab-tiny, lab-quick, lab-grid, lab-attention, lab-hard, lab-scale, "
            "lab-scratchpad, lab-encodings, lab-paper, or a .toml file.",
            autocompletion=complete_recipe("lab"),
        ),
    ],
    overrides: Annotated[list[str] | None, overrides_argument("train.steps=500")] = None,
    out: Annotated[Path | None, out_option("Results folder.", show_default="runs/RECIPE")] = None,
    dry_run: DryRun = False,
    report_only: ReportOnly = False,
    device: Device = None,
    trust_remote_code: TrustLabCode = False,
    as_json: AsJson = False,
) -> None:
    """Train the models of a study, test them at unseen lengths, and rank the position encodings.

    Rerun the same command to resume.
    """
    from farspan.cells import check_results_folder
    from farspan.progress import bars
    from farspan.workflows.lab import read_study, results_folder, run, summarize
    from farspan.workflows.lab_estimate import estimate

    if dry_run:
        if out is not None:
            check_results_folder(out, "lab run")
        study = read_study(recipe, overrides or [], trust_remote_code=trust_remote_code)
        show_estimates(estimate(study, device), as_json)
        return
    folder = results_folder(recipe, out)
    if report_only:
        result = summarize(
            recipe, overrides or [], folder, note, trust_remote_code=trust_remote_code
        )
    else:
        with stoppable(f"finished results are in {folder}"), bars() as progress:
            result = run(
                recipe,
                overrides or [],
                folder,
                device=device,
                trust_remote_code=trust_remote_code,
                progress=progress,
                say=ignore if as_json else print_text,
            )
    show_study(result, folder, as_json)


@app.command("dump", cls=Command, epilog=epilog("lab dump"))
def dump_command(
    task: Annotated[str, typer.Argument(metavar="TASK", help=TASKS_HELP)],
    n: Annotated[int, typer.Option("--n", metavar="N", help="Number of distinct examples.")] = 10,
    lengths: LengthRange = "",
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of the examples.")] = 0,
    scratchpad: Scratchpad = None,
    trust_remote_code: TrustLabCode = False,
) -> None:
    """Print examples of a task as JSON Lines (input, target, length), for use in other trainers."""
    from farspan.workflows.lab import dump

    for line in dump(task, n, lengths, seed, scratchpad, trust_remote_code=trust_remote_code):
        typer.echo(line)


@app.command("finetune", cls=Command, epilog=epilog("lab finetune"))
def finetune_command(
    model: Model,
    task: Annotated[str, typer.Argument(metavar="TASK", help=TASKS_HELP)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings, e.g. steps=2000 lr=3e-5 train_lengths=2:10 test_lengths=11:20.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, out_option("Results folder.", show_default="runs/MODEL-TASK")
    ] = None,
    device: Device = None,
    trust_remote_code: TrustLabCode = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a pretrained model on a task, and test it at unseen lengths.

    Rerun the same command to resume.
    """
    from farspan.progress import bars
    from farspan.workflows.lab_finetune import finetune

    with bars() as progress:
        result = finetune(
            model,
            task,
            overrides or [],
            out,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    show_finetune(result, as_json)


@app.command("distance", cls=Command, epilog=epilog("lab distance"))
def distance_command(
    models: Models,
    data: TextOrNone = None,
    task: TaskOption = None,
    lengths: LengthRange = "",
    scratchpad: Scratchpad = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Tokens per window of text.", show_default="512"),
    ] = None,
    windows: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of windows, or of examples.")
    ] = 4,
    minimum: Minimum = "sample",
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="MODEL",
            help="Only the distances to this model.",
            show_default="between every two models",
        ),
    ] = None,
    legacy: Legacy = False,
    out: OutFolder = None,
    device: Device = None,
    trust_remote_code: TrustLabCode = False,
    as_json: AsJson = False,
    bos: Bos = "auto",
) -> None:
    """Compare the attention of models: distance between their heads, layer by layer.

    Also reports how much the loss of each model rises without each head, and how far back its most
    attended tokens are.
    """
    from farspan.progress import bars
    from farspan.workflows.attention_analysis import compare_attention

    with bars() as progress:
        comparison = compare_attention(
            models,
            data,
            out,
            task=task,
            lengths=lengths,
            scratchpad=scratchpad,
            length=length,
            windows=windows,
            rule="legacy" if legacy else "jsd",
            minimum=minimum,
            to=to,
            bos=bos,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
            say=note,
        )
    show_comparison(comparison, as_json)
    if out is not None and not as_json:
        print_saved("record and figures", out)


@app.command("theorems", cls=Command, epilog=epilog("lab theorems"))
def theorems_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help=f"Models: {MODEL_KINDS}.", show_default="theorems only"
        ),
    ] = None,
    data: Text = "python-docs",
    length: Annotated[
        int, typer.Option(min=4, max=16_384, metavar="N", help="Tokens per window of text.")
    ] = 512,
    windows: Annotated[
        int,
        typer.Option(
            min=2, metavar="N", help="Number of windows; half are fitted on, half are tested on."
        ),
    ] = 8,
    out: OutFolder = None,
    device: Device = None,
    trust_remote_code: TrustLabCode = False,
    bos: Bos = "auto",
    as_json: AsJson = False,
) -> None:
    """Check how a model without position encoding can know positions (theorems of Kazemnejad 2023).

    Verifies weights built by the theorems, and predicts positions from each model's hidden states.
    """
    from farspan.workflows.attention_analysis import theorems

    analysis = theorems(
        models or [],
        data,
        out,
        length=length,
        windows=windows,
        bos=bos,
        device=device,
        trust_remote_code=trust_remote_code,
        say=note,
    )
    show_theorems(analysis, length, as_json)
    if out is not None and not as_json:
        print_saved("record and figure", out)


def show_estimates(estimates: Sequence[LabEstimate], as_json: bool) -> None:
    if as_json:
        print_json([asdict(estimate) for estimate in estimates])
        return
    table = make_table(
        caption="memory: weights, gradients and optimizer of the largest fleet; time: at least, "
        "from the speed of matrix products on this machine"
    )
    columns = ("models", "fleets", "parameters", "tokens", "memory", "time")
    for column in ("encoding", "size"):
        table.add_column(column)
    for column in columns:
        table.add_column(column, justify="right")
    for estimate in estimates:
        table.add_row(
            estimate.encoding,
            estimate.size,
            str(estimate.models),
            str(estimate.fleets),
            f"{estimate.parameters:,}",
            format_count(estimate.tokens),
            format_memory(estimate.weights_gib),
            format_duration(estimate.seconds),
        )
    console.print(table)
    total = sum(estimate.seconds for estimate in estimates)
    console.print(f"at least {format_duration(total)} in total")


def show_study(study: LabResult, folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(study.to_dict())
        return
    learned, models = study.learned
    show_tables(study.tables)
    print_line(f"\n{learned} of {models} models learned their task")
    print_saved("record and figure", folder)


def show_finetune(result: FinetuneResult, as_json: bool) -> None:
    from farspan.lab.ranking import accuracy

    if as_json:
        print_json(result.to_dict())
        return
    table = make_table("length", "exact match", "examples")
    for counts in (result.in_range, result.beyond):
        for length, (correct, total) in counts.items():
            table.add_row(length, f"{correct / total:.3f}", str(total))
    console.print(table)
    in_range, beyond = accuracy(result.in_range), accuracy(result.beyond)
    learned = "learned" if result.learned else "not learned"
    print_line(f"\nexact match {in_range:.3f} in range ({learned}), {beyond:.3f} beyond")
    print_saved("record and figure", result.folder)


def show_tables(tables: Mapping[str, tuple[list[str], list[list[str]]]]) -> None:
    for title, (head, rows) in tables.items():
        table = make_table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(f"\n[bold]{title}[/]\n")
        console.print(table)


def show_comparison(comparison: AttentionComparison, as_json: bool) -> None:
    if as_json:
        print_json(comparison.to_dict())
        return
    if comparison.pairs:
        _print_distances(comparison)
    else:
        note("a distance needs two models; give two or more models to compare them")
    per_model = zip(comparison.models, comparison.ablations, comparison.mass, strict=True)
    for name, ablation, mass in per_model:
        layer, head = divmod(int(ablation.argmax()), ablation.shape[1])
        print_text(
            f"{name}: most important head: layer {layer}, head {head}; without it the loss rises "
            f"by {ablation.max():.3f} nats; it attends {mass[layer, head, 0]:.0%} to the token "
            f"itself and {mass[layer, head, 1]:.0%} to the previous one"
        )


def _print_distances(comparison: AttentionComparison) -> None:
    names = comparison.models
    first_pair = next(iter(comparison.pairs.values()))
    legacy = " (only those with i < j, as Kazemnejad 2023)" if first_pair.rule == "legacy" else ""
    nearest = "of each sample" if first_pair.minimum == "sample" else "of the mean over samples"
    table = make_table(
        caption=f"distance in nats by layer: nearest pair of heads{legacy}, {nearest}; then all "
        f"heads matched one to one; {comparison.tokens:,} tokens"
    )
    table.add_column("models", overflow="fold")
    for layer in range(len(comparison.mass[0])):
        table.add_column(str(layer), justify="right")
    table.add_column("mean", justify="right")
    for (first, second), distance in comparison.pairs.items():
        pair = escape(f"{names[first]} · {names[second]}")
        for label, values, look in (
            (pair, distance.nearest, None),
            ("", distance.matched, "dim"),
        ):
            table.add_row(label, *(f"{each:.3f}" for each in (*values, values.mean())), style=look)
    console.print(table)


def show_theorems(analysis: PositionAnalysis, length: int, as_json: bool = False) -> None:
    if as_json:
        print_json(analysis.to_dict())
        return
    for proof in analysis.proofs:
        print_line(
            f"{proof.rule:>10}: up to {length:,} tokens, the first layer computes positions within "
            f"{proof.position_error:.0e}, and the second scores by distance within "
            f"{proof.score_error:.0e}"
        )
    for name, readouts in analysis.readings.items():
        values = "  ".join(f"{readout.r2:.3f}" for readout in readouts)
        print_text(f"{name}: R² of the position in the embeddings and after each layer  {values}")
        print_text(f"{'':{len(name)}}  mean error after the last: {readouts[-1].error:.0f} tokens")
