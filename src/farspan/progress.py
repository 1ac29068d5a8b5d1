"""Progress of long commands: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int], Callable[..., None]]
LOG_INTERVAL = 30.0  # seconds between two lines where there is no terminal


def silent(label: str, steps: int) -> Callable[..., None]:
    """Show no progress."""
    return lambda *advance_arguments: None


@contextmanager
def bars() -> Iterator[Progress]:
    """Inside the block, bar(label, steps) opens a bar and returns advance(count=1, note="").

    With 0 steps the total is unknown, and only the note shows the progress.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    label_column = TextColumn("{task.description}", markup=False)  # a label may have brackets
    note_column = TextColumn("{task.fields[note]}", style="dim", markup=False)
    columns = (
        label_column,
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        note_column,
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def bar(label: str, steps: int) -> Callable[..., None]:
            task = progress.add_task(label, total=steps or None, note="")
            last_line = time.monotonic()

            def advance(count: int = 1, note: str = "") -> None:
                nonlocal last_line
                progress.update(task, advance=count, note=note)
                if note and not console.is_terminal and time.monotonic() - last_line > LOG_INTERVAL:
                    last_line = time.monotonic()
                    done = progress.tasks[task].completed
                    console.print(
                        f"{label} {done:.0f}/{steps or '?'}  {note}", highlight=False, markup=False
                    )

            return advance

        yield bar
