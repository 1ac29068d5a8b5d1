"""Progress of long commands: bars on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import functools
import html
import inspect
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

Progress = Callable[[str, int], Callable[..., None]]
Say = Callable[[str], None]
P = ParamSpec("P")
T = TypeVar("T")

LOG_INTERVAL = 30.0  # seconds between two lines where there is no terminal
NOTEBOOK_INTERVAL = 0.2  # seconds between two updates of the bars in a notebook
NOTEBOOK_WIDTH = 110  # characters
TIMED = 1.0  # seconds of steps from which a pace is known
SAID_FROM = 5.0  # seconds; shorter work is not worth a sentence
LEFT = " left"  # the end of a note that says the remaining time
RESUMED = "resumed"  # the note of steps that an earlier run took, at no time in this one

_displays: list[_Display] = []  # open now


class _Default(Generic[P, T]):
    """A function that signatures show by its name, without its address in memory."""

    def __init__(self, function: Callable[P, T]):
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **options: P.kwargs) -> T:
        return self.function(*args, **options)

    def __repr__(self) -> str:
        return self.function.__name__


@_Default
def ignore(*arguments: Any, **options: Any) -> None:
    """Do nothing: the default of a callback."""


@_Default
def silent(label: str, steps: int) -> Callable[..., None]:
    """Show no progress."""
    return ignore


@_Default
def automatic(label: str, steps: int) -> Callable[..., None]:
    """The default of Python functions: bars on a terminal or in a notebook, else nothing.

    `shows_progress` replaces it while a function runs. Where nothing replaces it, it is silent.
    """
    return silent(label, steps)


def shows_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function whose `progress` is `automatic` show bars while it runs.

    Its notes (`say`) are then printed above the bars.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def shown(*args: P.args, **options: P.kwargs) -> T:
        if options.get("progress", automatic) is not automatic or not _somebody_watches():
            return function(*args, **options)
        with _display() as display:
            shown_options: dict[str, Any] = {**options, "progress": display.bar}
            if "say" in parameters:
                shown_options.setdefault("say", display.say)
            return function(*args, **shown_options)

    return shown


def _somebody_watches() -> bool:
    """Whether there is a terminal or notebook, on which no other function shows its bars yet."""
    return not _displays and (in_notebook() or _make_console().is_terminal)


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    from rich.console import Console

    return Console().is_jupyter


@contextmanager
def bars() -> Iterator[Progress]:
    """Inside the block, bar(label, steps) opens a bar and returns advance(count=1, note="").

    With 0 steps the total is unknown, and only the note shows the progress.
    """
    with _display() as display:
        yield display.bar


def _make_console() -> Any:
    from rich.console import Console

    return Console(stderr=True, force_jupyter=False)


@contextmanager
def _display() -> Iterator[_Display]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = _make_console()
    columns = (
        TextColumn("{task.description}", markup=False),  # a label may have brackets
        BarColumn(),
        MofNCompleteColumn(),
        _remaining_column(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    on_terminal = console.is_terminal and not in_notebook()
    with Progress(*columns, console=console, transient=True, disable=not on_terminal) as progress:
        display = _NotebookDisplay(progress) if in_notebook() else _Display(progress)
        _displays.append(display)
        try:
            yield display
        finally:
            _displays.remove(display)
            display.close()


def _remaining_column() -> Any:
    """The remaining time by the speed of a bar, unless its note says it."""
    from rich.progress import TimeRemainingColumn
    from rich.text import Text

    class Remaining(TimeRemainingColumn):
        def render(self, task: Any) -> Text:
            return Text() if task.fields["note"].endswith(LEFT) else super().render(task)

    return Remaining()


class _Display:
    """The bars of a command, on a terminal; elsewhere a line now and then."""

    def __init__(self, progress: Any):
        self.progress = progress
        self.logs = not progress.console.is_terminal

    def bar(self, label: str, steps: int) -> Callable[..., None]:
        progress = self.progress
        self._finish_unknown()
        task = progress.add_task(label, total=steps or None, note="")
        last_line = time.monotonic()

        def advance(count: float = 1, note: str = "") -> None:
            nonlocal last_line
            progress.update(task, advance=count, note=note)
            bar = progress.tasks[task]
            if bar.total is not None and bar.completed > bar.total:  # it was taken for finished
                progress.update(task, total=bar.completed)
            self.refresh()
            if self.logs and note and time.monotonic() - last_line > LOG_INTERVAL:
                last_line = time.monotonic()
                done = progress.tasks[task].completed
                self.say(f"{label} {done:.0f}/{steps or '?'}  {note}")

        return advance

    def _finish_unknown(self) -> None:
        """Bars of unknown length end, at the latest, when the next one begins."""
        for task in self.progress.tasks:
            if task.total is None and task.completed:
                self.progress.update(task.id, total=task.completed)

    def say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def refresh(self) -> None:
        """A terminal refreshes by itself."""

    def close(self) -> None:
        """A terminal removes its bars by itself."""


class _NotebookDisplay(_Display):
    """The bars of a command, in one output of a cell. ipywidgets are not needed."""

    def __init__(self, progress: Any):
        super().__init__(progress)
        self.logs = False
        self.notes: list[str] = []
        self.output: Any = None  # from the first bar or note on
        self.started = self.updated = time.monotonic()

    def _show(self, text: str) -> None:
        from IPython.display import HTML, display

        page = HTML(f"<pre>{html.escape(text)}</pre>")
        if self.output is None:
            self.output = display(page, display_id=True)
        else:
            self.output.update(page)

    def _show_bars(self) -> None:
        from rich.console import Console

        text = io.StringIO()
        console = Console(width=NOTEBOOK_WIDTH, file=text, force_jupyter=False, color_system=None)
        console.print(self.progress.get_renderable())
        self._show("\n".join([*self.notes, text.getvalue().rstrip()]))
        self.updated = time.monotonic()

    def say(self, text: str) -> None:
        self.notes.append(text)
        self._show_bars()

    def refresh(self) -> None:
        if self.output is None or time.monotonic() - self.updated > NOTEBOOK_INTERVAL:
            self._show_bars()

    def close(self) -> None:
        """Leave the notes and the time that it took."""
        if self.output is not None:
            taken = f"took {format_duration(time.monotonic() - self.started)}"
            self._show("\n".join([*self.notes, taken]))


@dataclass(frozen=True)
class Stage:
    """A part of a command: the beginning of its bars' labels, and its expected cost."""

    name: str
    seconds: float
    steps: int = 0  # of its bar, where the bar itself does not know


def with_total(
    progress: Progress,
    stages: Sequence[Stage],
    say: Say | None = None,
    processes: int = 1,
) -> Progress:
    """Progress with one more bar, which shows the remaining time of all stages together.

    What a stage saves, such as a search that ends early, counts as done when the next one begins.
    say: the costs of the stages have any unit, and their pace is measured from the end of the first
        step on, which may compile kernels; called once with the total time.
    processes: that share the stages.
    """
    advance = progress("total", 100) if len(stages) > 1 else silent("total", 100)
    kind = _Total if say is None else functools.partial(_TimedTotal, say=say, processes=processes)
    return kind(advance, progress, stages).bar


def by_step(advance: Callable[..., None]) -> Callable[[int, str], None]:
    """Advance a bar to each step of a run that reports all of them, resumed or not."""
    done = 0

    def advance_to(step: int, note: str) -> None:
        nonlocal done
        if step > done + 1:
            advance(step - 1 - done, RESUMED)
        advance(1, note)
        done = step

    return advance_to


class _Total:
    def __init__(self, advance: Callable[..., None], progress: Progress, stages: Sequence[Stage]):
        self.advance, self.progress, self.stages = advance, progress, stages
        self.expected = sum(stage.seconds for stage in stages) or 1.0
        self.done = 0.0  # seconds of the estimate
        self.worked = 0.0  # those that took time
        self.started = time.monotonic()
        self.stage = 0  # the next one
        advance(0, self._left(self.expected))

    def bar(self, label: str, steps: int) -> Callable[..., None]:
        advance = self.progress(label, steps)
        later = range(self.stage, len(self.stages))
        number = next((n for n in later if label.startswith(self.stages[n].name)), None)
        if number is None:
            return advance
        self.stage, stage = number + 1, self.stages[number]
        begin = sum(each.seconds for each in self.stages[:number])
        share = stage.seconds / max(1, steps or stage.steps)
        self._move(begin)

        def advance_both(count: float = 1, note: str = "") -> None:
            advance(count, note)
            before = self.done
            end = min(before + count * share, begin + stage.seconds)
            if note != RESUMED:
                self.worked += max(0.0, end - before)
            self._move(end)

        return advance_both

    def _move(self, done: float) -> None:
        step = max(0.0, done - self.done)
        self.done += step
        self.advance(100 * step / self.expected, self._left(self.expected - self.done))

    def _left(self, cost: float) -> str:
        pace = (time.monotonic() - self.started) / self.worked if self.worked else 1.0
        return f"about {format_duration(pace * cost)}{LEFT}"


class _TimedTotal(_Total):
    """The total of stages whose pace is known when steps after the first one were timed."""

    def __init__(self, *arguments: Any, say: Say, processes: int):
        self.say: Say | None = say
        self.processes = processes
        self.first: tuple[float, float] | None = None  # when the first step ended, and its cost
        super().__init__(*arguments)

    def _left(self, cost: float) -> str:
        now = time.monotonic()
        if self.first is None and self.worked:
            self.first = now, self.worked
        if self.first is None or now - self.first[0] < TIMED or self.worked <= self.first[1]:
            return ""
        pace = (now - self.first[0]) / (self.worked - self.first[1]) / self.processes
        if self.say is not None:
            say, self.say = self.say, None
            if (total := now - self.started + pace * cost) >= SAID_FROM:
                say(f"about {format_duration(total)} in all, by the first steps")
        return f"about {format_duration(pace * cost)}{LEFT}"


def format_duration(seconds: float) -> str:
    """9000 -> "2.5 hours"; 1.2 -> "1 second"."""
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return "1 second" if round(seconds) == 1 else f"{seconds:.0f} seconds"
