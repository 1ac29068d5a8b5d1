"""`farspan lab distance`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from farspan.cli.console import console, make_table, note, print_json, print_saved, print_text
from farspan.cli.lab_options import TASKS_HELP, LengthRange, Scratchpad, TrustLabCode
from farspan.cli.options import TEXT_KINDS, AsJson, Bos, Device, Models, OutFolder

if TYPE_CHECKING:
    from farspan.lab.distance import AttentionComparison

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
