"""`farspan lab run`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farspan.cli.choices import complete_recipe
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
from farspan.cli.lab_options import TrustLabCode
from farspan.cli.options import (
    AsJson,
    Device,
    DryRun,
    ReportOnly,
    out_option,
    overrides_argument,
)
from farspan.progress import format_duration, ignore
from farspan.signals import stoppable

if TYPE_CHECKING:
    from farspan.workflows.lab import LabResult
    from farspan.workflows.lab_estimate import LabEstimate


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
    from farspan.recipe import results_folder
    from farspan.workflows.lab import read_study, run, summarize
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


def show_tables(tables: Mapping[str, tuple[list[str], list[list[str]]]]) -> None:
    for title, (head, rows) in tables.items():
        table = make_table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(f"\n[bold]{title}[/]\n")
        console.print(table)
