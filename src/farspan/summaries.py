"""Results in Python: a short repr, an HTML table for notebooks, `to_dict()` and `plot()`."""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from farspan.errors import FarspanError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_WIDTH = 100  # characters of a line of a repr
MAX_LINES = 12  # of a repr
FEW = 4  # items of a list that are written out


class Summarized:
    """A result with a short repr, an HTML table and `to_dict()`.

    A dataclass that inherits from it is declared with repr=False.
    """

    def facts(self) -> dict[str, str]:
        """The lines of the repr and the rows of the table."""
        return {each.name: shorten(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]

    def __repr__(self) -> str:
        shown = [f"{name}: {value}" for name, value in self.facts().items() if value]
        if len(shown) > MAX_LINES:
            rest = len(shown) - MAX_LINES + 1
            shown = [*shown[: MAX_LINES - 1], f"and {rest} more: see to_dict()"]
        wrapped = [line for fact in shown for line in _wrap(fact)]
        lines = wrapped if len(wrapped) <= MAX_LINES else [f"  {fact}" for fact in shown]
        return "\n".join(_cut(line, MAX_WIDTH) for line in (type(self).__name__, *lines))

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.facts().items()
            if value
        )
        title = html.escape(type(self).__name__)
        return f"<table><caption>{title}</caption>{rows}</table>"

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it: what `--json` prints, where the command has that option."""
        if hasattr(self, "to_json"):
            return plain(self.to_json())
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]


class Plotted(Summarized):
    """A result that can be drawn."""

    def plot(self) -> Figure:
        """The figure of this result, as matplotlib's Figure; a notebook shows it."""
        figure: Any = draw(self)
        figure._repr_png_ = lambda: _png(figure)  # matplotlib shows only figures of pyplot there
        return figure

    def _repr_html_(self) -> str:
        """The table, and the figure below it."""
        try:
            picture = base64.b64encode(_png(self.plot())).decode()
        except FarspanError:  # there is nothing to draw
            return super()._repr_html_()
        name = type(self).__name__
        image = f"<img alt='figure of {name}' src='data:image/png;base64,{picture}'>"
        return super()._repr_html_() + image


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


class ResultList(list[Any], Plotted):
    """Several results of one kind, with the methods of one."""

    __repr__ = Summarized.__repr__

    def facts(self) -> dict[str, str]:
        return {str(number): shorten(each) for number, each in enumerate(self)}

    def to_dict(self) -> dict[str, Any]:
        return {"results": plain(list(self))}


@singledispatch
def draw(result: Any) -> Figure:
    """The figure of a result. The module that has the figure registers it here."""
    raise FarspanError(f"a {type(result).__name__} has no figure; use to_dict()")


def shorten(value: Any) -> str:
    """A value in one line: "" for None, the number of items of a long list."""
    if value is None or (isinstance(value, str | tuple) and not value):
        return ""
    if isinstance(value, Summarized):
        facts = "; ".join(f"{name}: {text}" for name, text in value.facts().items() if text)
        return f"{type(value).__name__} {facts}".strip()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        parts = [f"{key} {shorten(each)}" for key, each in value.items()]
        return ", ".join(parts) if 0 < len(parts) <= FEW else f"{len(parts)} items"
    if isinstance(value, list | tuple):
        parts = [shorten(each) for each in value]
        return ", ".join(parts) if 0 < len(parts) <= FEW else f"{len(parts)} items"
    if hasattr(value, "shape"):
        return f"array {list(value.shape)}"
    return " ".join(str(value).split())


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Summarized):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):  # an array, a tensor, a number of either
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _wrap(fact: str) -> list[str]:
    """A fact in lines of the width of a repr."""
    return textwrap.wrap(
        fact, MAX_WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"
