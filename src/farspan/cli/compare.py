"""`farspan compare`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from farspan.cli.console import console, make_table, print_json, print_notes, print_saved
from farspan.cli.options import AsJson, out_option


def compare_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Results folders of farspan eval.")
    ],
    out: Annotated[
        Path, out_option("The table: a .md, .csv or .json file; an existing one is replaced.")
    ] = Path("compare.md"),
    as_json: AsJson = False,
) -> None:
    """Compare results of farspan eval: runs by lengths, with paired differences to the first.

    A single run is compared with its baseline. Runs are named by their models where these differ.
    """
    from farspan.report.comparison import table_rows
    from farspan.workflows.compare import compare

    result = compare(folders, out)
    if as_json:
        print_json(result.to_json())
        return
    header, rows = table_rows(result.scores)
    table = make_table(padding=2)
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if number < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row), style="dim" if row[1].startswith("Δ") else "")
    console.print(table)
    console.print()
    print_notes(result.notes)
    print_saved("table", result.file)
