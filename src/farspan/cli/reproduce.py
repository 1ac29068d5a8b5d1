"""`farspan reproduce`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farspan.cli.choices import complete_recipe
from farspan.cli.console import note, print_saved, print_text
from farspan.cli.options import Device, ReportOnly, out_option, overrides_argument
from farspan.signals import stoppable


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
    device: Device = None,
) -> None:
    """Run a study: train or find its models, fit every method, measure all of them alike.

    An interrupted study resumes when the same command is run again.
    """
    from farspan.progress import bars
    from farspan.workflows.reproduce import reproduce, study_folder, summarize

    folder = study_folder(study, out)
    if report_only:
        summarize(study, overrides or [], folder, note)
    else:
        with stoppable(f"finished results are in {folder}"), bars() as progress:
            reproduce(
                study, overrides or [], folder, device=device, progress=progress, say=print_text
            )
    print_text((folder / "tables.md").read_text(encoding="utf-8"))
    print_saved("tables, results and figures", folder)
