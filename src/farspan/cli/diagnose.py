"""`farspan diagnose`"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from farspan.cli.console import console, make_table, note, print_json, print_saved, required_width
from farspan.cli.options import (
    AsJson,
    Bos,
    Device,
    DeviceMap,
    Models,
    OutFolder,
    Position,
    Text,
    TrainLength,
    TrustRemoteCode,
)

if TYPE_CHECKING:
    from farspan.diagnosis.result import Diagnosis

MIN_LABEL_WIDTH = 10  # characters of a model's name that stay on one line


Lengths = Annotated[
    str,
    typer.Option(
        "--lengths",
        metavar="LENGTHS",
        help="Positions to report, e.g. 512,1024 or 512:4096 (doublings); windows of the largest "
        "are read.",
        show_default="half, once and twice the train length",
    ),
]
ScaleRange = Annotated[
    str,
    typer.Option(
        "--scales",
        metavar="SCALES",
        help="Uniform attention scales to compare, e.g. 0.8:1.4:0.1 or 1,1.2.",
        show_default="the model as it is",
    ),
]


def diagnose_command(
    models: Models,
    data: Text = "python-docs",
    lengths: Lengths = "",
    scales: ScaleRange = "",
    windows: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of text windows to read.")
    ] = 8,
    out: OutFolder = None,
    device: Device = None,
    as_json: AsJson = False,
    train_length: TrainLength = None,
    position: Position = None,
    bos: Bos = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show where and why a model fails at long contexts.

    Reports loss and attention entropy by position, and the positions where they leave their trend.
    """
    from farspan.lengths import parse_lengths, parse_scales
    from farspan.progress import bars
    from farspan.workflows.diagnose import default_lengths, diagnose

    reported = (
        parse_lengths(lengths)
        if lengths
        else default_lengths(models, train_length, trust_remote_code)
    )
    with bars() as progress:
        diagnoses = diagnose(
            models,
            data,
            reported,
            scales=parse_scales(scales) if scales else [],
            windows=windows,
            train_length=train_length,
            position=position,
            bos=bos,
            out=out,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            progress=progress,
            say=note,
        )
    if as_json:
        records = [diagnosis.to_json() for diagnosis in diagnoses]
        print_json(records[0] if len(records) == 1 else records)
        return
    show_diagnoses(diagnoses, reported)
    if out is not None:
        print_saved("record and figures", out)


def show_diagnoses(diagnoses: Sequence[Diagnosis], lengths: Sequence[int]) -> None:
    """One row per model. Of many lengths a narrow terminal shows every other one, the last
    included; the record has them all."""
    table = _table(diagnoses, lengths)
    while _min_width(table, diagnoses) > console.width and len(lengths) > 2:
        lengths = lengths[::-2][::-1]
        table = _table(diagnoses, lengths)
    console.print(table)
    console.print()
    for diagnosis in diagnoses:
        label = f"[bold]{escape(diagnosis.label)}[/]  " if len(diagnoses) > 1 else ""
        console.print(f"{label}{escape(diagnosis.verdict)}")


def _min_width(table: Table, diagnoses: Sequence[Diagnosis]) -> int:
    """The width with whole numbers, and names folded to no less than MIN_LABEL_WIDTH."""
    longest = max(len(word) for diagnosis in diagnoses for word in diagnosis.label.split())
    return required_width(table) - max(0, longest - MIN_LABEL_WIDTH)


def _table(diagnoses: Sequence[Diagnosis], lengths: Sequence[int]) -> Table:
    table = make_table(caption="loss in nats")
    shortest = min(len(diagnosis.label) for diagnosis in diagnoses)
    table.add_column("model", overflow="fold", min_width=min(MIN_LABEL_WIDTH, shortest))
    for length in lengths:
        table.add_column(f"@{length}", justify="right", no_wrap=True)
    for column in ("loss\nknee", "entropy\nknee", "distracted\nheads", "scale\nto try"):
        table.add_column(column, justify="right", no_wrap=True)
    for diagnosis in diagnoses:
        curves, train_length = diagnosis.curves, diagnosis.train_length
        losses = [f"{curves.loss_at(n, train_length=train_length):.3f}" for n in lengths]
        knees = [
            f"{knee:,}" if knee else "none"
            for knee in (diagnosis.loss_knee, diagnosis.entropy_knee)
        ]
        distracted = f"{len(diagnosis.distracted_heads)} of {diagnosis.heads}"
        if not diagnosis.heads:  # entropy was not measured
            knees[1] = distracted = "–"
        scale = "–" if diagnosis.suggested_scale is None else f"{diagnosis.suggested_scale:g}"
        table.add_row(escape(diagnosis.label), *losses, *knees, distracted, scale)
    if console.measure(table).maximum >= console.width:
        table.padding = (0, 1, 0, 0)  # more room for names
    return table
