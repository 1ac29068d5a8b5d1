"""`farspan lab dump`"""

from __future__ import annotations

from typing import Annotated

import typer

from farspan.cli.lab_options import TASKS_HELP, LengthRange, Scratchpad, TrustLabCode


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
