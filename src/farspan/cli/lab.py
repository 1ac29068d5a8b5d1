"""`farspan lab`: its commands, each in a file of its own."""

from __future__ import annotations

import typer

from farspan.cli.choices import epilog
from farspan.cli.lab_distance import distance_command
from farspan.cli.lab_dump import dump_command
from farspan.cli.lab_finetune import finetune_command
from farspan.cli.lab_run import run_command
from farspan.cli.lab_theorems import theorems_command
from farspan.cli.options import Command

app = typer.Typer(
    help="Length generalization by position encoding: small models, trained on synthetic tasks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("run", cls=Command, epilog=epilog("lab run"))(run_command)
app.command("dump", cls=Command, epilog=epilog("lab dump"))(dump_command)
app.command("finetune", cls=Command, epilog=epilog("lab finetune"))(finetune_command)
app.command("distance", cls=Command, epilog=epilog("lab distance"))(distance_command)
app.command("theorems", cls=Command, epilog=epilog("lab theorems"))(theorems_command)
