"""What a long command says while it works: a bar on stderr, with time left. Silent where nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bars() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Inside the block, bar(label, steps) opens a bar and returns what moves it by one step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def bar(label: str, steps: int) -> Callable[[], None]:
            task = progress.add_task(label, total=steps)
            return lambda: progress.advance(task)

        yield bar
