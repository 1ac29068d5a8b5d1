"""`farspan reproduce`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farspan.cli.choices import complete_recipe
from farspan.cli.console import console, make_table, note, print_json, print_saved, print_text
from farspan.cli.options import (
    AsJson,
    Device,
    DryRun,
    ReportOnly,
    out_option,
    overrides_argument,
)
from farspan.progress import format_duration
from farspan.signals import stoppable

if TYPE_CHECKING:
    from farspan.workflows.reproduce_estimate import ModelEstimate


def reproduce_command(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="extend-small, extend-hybrids, best-scales, swan, or a .toml file.",
            autocompletion=complete_recipe("study"),
        ),
    ],
    overrides: Annotated[list[str] | None, overrides_argument("folder=path/to/data")] = None,
    out: Annotated[Path | None, out_option("Results folder.", show_default="runs/STUDY")] = None,
    report_only: ReportOnly = False,
    dry_run: DryRun = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Run a study: train or find its models, fit every method, measure all of them alike.

    Rerun the same command to resume.
    """
    from farspan.progress import bars
    from farspan.recipe import results_folder
    from farspan.workflows.reproduce import estimate_study, reproduce, summarize
    from farspan.workflows.reproduce_study import read_study

    folder = results_folder(study, out)
    if dry_run:
        with bars() as progress:
            models = estimate_study(study, overrides or [], out, device=device, progress=progress)
        show_estimate(models, read_study(study, overrides or []).has_benchmarks, as_json)
        return
    if report_only:
        results = summarize(study, overrides or [], folder, note)
    else:
        say = note if as_json else print_text
        with stoppable(f"finished results are in {folder}"), bars() as progress:
            results = reproduce(
                study, overrides or [], folder, device=device, progress=progress, say=say
            )
    if as_json:
        print_json(results.to_dict())
        return
    print_text((folder / "tables.md").read_text(encoding="utf-8"))
    print_saved("tables, results and figures", folder)


def show_estimate(models: Sequence[ModelEstimate], has_benchmarks: bool, as_json: bool) -> None:
    if as_json:
        print_json([model.to_dict() for model in models])
        return
    benchmarks = ", without the benchmarks" if has_benchmarks else ""
    table = make_table(caption=f"time: at most, from one timed window{benchmarks}")
    for column in ("model", "trained"):
        table.add_column(column)
    for column in ("cells", "to measure", "time"):
        table.add_column(column, justify="right")
    for model in models:
        counts = (str(model.cells), str(model.missing))
        trained = "yes" if model.trained else "to train"
        table.add_row(model.model, trained, *counts, format_duration(model.seconds))
    console.print(table)
    total = sum(model.seconds for model in models)
    console.print(f"at most about {format_duration(total)} in total")
