"""What a long command says while it works: a bar on a terminal, with time left; now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int], Callable[..., None]]
EVERY = 30.0  # seconds between two lines where no terminal is


def silent(label: str, steps: int) -> Callable[..., None]:
    """A bar that nobody sees."""
    return lambda *moved: None


@contextmanager
def bars() -> Iterator[Progress]:
    """Inside the block, bar(label, steps) opens a bar and returns what moves it: advance(count=1, note="").

    With no steps the end is unknown, and only the note tells how far it is.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    name = TextColumn("{task.description}", markup=False)  # it may hold square brackets
    note = TextColumn("{task.fields[note]}", style="dim", markup=False)
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def bar(label: str, steps: int) -> Callable[..., None]:
            task = progress.add_task(label, total=steps or None, note="")
            said = time.monotonic()

            def advance(count: int = 1, note: str = "") -> None:
                nonlocal said
                progress.update(task, advance=count, note=note)
                if note and not console.is_terminal and time.monotonic() - said > EVERY:
                    said = time.monotonic()
                    done = progress.tasks[task].completed
                    console.print(f"{label} {done:.0f}/{steps or '?'}  {note}", highlight=False, markup=False)

            return advance

        yield bar
