"""Options that several commands of the lab share."""

from __future__ import annotations

from typing import Annotated

import typer

TASK_NAMES = (
    "copy, copy-repeat, copy-repeat-double, copy-replace, copy-double, reverse, reverse-double, "
    "reverse-copy, addition, polynomial, sorting, sorting-numbers, summation, parity, lego, "
    "lego-ordered, scan, pcfg, copy-next or reverse-numbers"
)
TASKS_HELP = f"{TASK_NAMES}; or RECIPE.toml:TASK for a task of a recipe's own."
TrustLabCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code of the recipe's own tasks and encodings, and of models.",
    ),
]
LengthRange = Annotated[
    str,
    typer.Option(
        metavar="RANGE",
        help="Shortest and longest example of the task, e.g. 2:20.",
        show_default="the task's train lengths",
    ),
]
Scratchpad = Annotated[
    str | None,
    typer.Option(
        metavar="PARTS",
        help="Steps before the answer: full, none, or parts of a step, e.g. icovr or input+output.",
        show_default="none",
    ),
]
