"""The console that every command prints to, and how numbers, notes and tables look on it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

# torchrun starts several processes; only the first one prints.
IS_MAIN_PROCESS = os.environ.get("RANK", "0") == "0"

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class PlainConsole(Console):
    """A console that shows control characters of names and values instead of obeying them."""

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **options):
            if not segment.control and CONTROL.search(segment.text):
                text = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", segment.text)
                segment = Segment(text, segment.style)
            yield segment


console = PlainConsole(highlight=False, quiet=not IS_MAIN_PROCESS)
_errors = PlainConsole(stderr=True, highlight=False, soft_wrap=True)


def print_line(text: str) -> None:
    """One line of markup, never wrapped, so that a path in it can be copied."""
    console.print(text, soft_wrap=True)


def print_text(text: str) -> None:
    """Text without markup, never wrapped."""
    console.print(text, soft_wrap=True, markup=False)


def print_json(value: Any, indent: int | None = None) -> None:
    if IS_MAIN_PROCESS:
        typer.echo(json.dumps(value, ensure_ascii=False, indent=indent))


def print_saved(content: str, path: str | Path) -> None:
    """Where a command wrote its results: `record and figures in runs/x`."""
    print_line(f"[dim]{content} in[/] {escape(str(path))}")


def print_notes(notes: Iterable[str]) -> None:
    """The notes of a result, on stdout with the rest of it."""
    for text in notes:
        print_line(f"[yellow]note[/] {escape(text)}")


def note(text: str) -> None:
    """A note on stderr, while a command runs."""
    if IS_MAIN_PROCESS:
        _errors.print(f"[yellow]note[/] {escape(text)}")


def print_error(text: str) -> None:
    _errors.print(f"[bold red]error[/] {escape(text)}")


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


NOTE_HANDLER = _NoteHandler()  # shows the library's warnings as notes


def make_table(*columns: str, padding: int = 2, caption: str | None = None) -> Table:
    """A table without lines; `padding` is the space between two columns."""
    return Table(
        *columns,
        box=None,
        padding=(0, padding, 0, 0),
        pad_edge=False,
        header_style="dim",
        caption=caption,
        caption_justify="left",
    )


def make_facts() -> Table:
    """Two columns, name and value, without a header."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    return facts


def required_width(table: Table) -> int:
    """The width at which no word and no number of a table is broken."""
    return console.measure(table, options=console.options.update(width=10_000)).minimum


def format_count(count: int) -> str:
    """1_234_567 -> "1.2M"; 999_999 -> "1.0M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.99995 * size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_file_size(size: int) -> str:
    """23_700_000 -> "23.7 MB"; 6_400 -> "6.4 KB"."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} KB"


def format_memory(gib: float) -> str:
    """0.05 -> "51.2 MiB"."""
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"
