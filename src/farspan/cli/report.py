"""`farspan report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from farspan.cli.console import note, print_line
from farspan.cli.options import out_option


def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR",
            help="Folders of runs: diagnose, extend, eval, pretrain, reproduce or lab run.",
        ),
    ],
    out: Annotated[Path, out_option("The .html file; an existing one is replaced.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page of figures and tables from several runs; it works without a network."""
    from farspan.workflows.report import report

    page = report(folders, out, say=note)
    print_line(f"[dim]report written to[/] {escape(str(page))}")
