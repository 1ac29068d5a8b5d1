"""`farspan lab finetune`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farspan.cli.console import console, make_table, print_json, print_line, print_saved
from farspan.cli.lab_options import TASKS_HELP, TrustLabCode
from farspan.cli.options import AsJson, Device, Model, out_option

if TYPE_CHECKING:
    from farspan.workflows.lab_finetune import FinetuneResult


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
