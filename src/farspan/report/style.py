"""The style of all figures, and helpers that they share."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from farspan.files import write_bytes

INK, GRAY = "#222222", "#b8b8b8"
# Okabe and Ito's colors, distinct for color-blind readers, and two dark ones for many lines.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#8c510a")
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}


def save(figure: Figure, stem: Path) -> None:
    """Write the figure as PNG and SVG, atomically: other processes may write the same files."""
    for extension in ("png", "svg"):
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            # A missing glyph is visible as a box in the figure.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(buffer, format=extension, dpi=150)
        write_bytes(stem.with_suffix(f".{extension}"), buffer.getvalue())


def line_styles(colors: Sequence[str]) -> list[dict[str, Any]]:
    """Distinct combinations of color and dashes."""
    return [{"color": color, "ls": dashes} for dashes in ("-", "--", ":") for color in colors]


def mark_train_length(axes: Axes, lengths: Iterable[int], label: bool = True) -> None:
    for length in lengths:
        axes.axvline(length, color=INK, lw=0.8, ls="--", zorder=0)
        if label:
            axes.annotate(
                f"trained on {length:,}",
                (length, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, -2),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=INK,
            )


def hide_unused_panels(panels: np.ndarray, used: int, columns: int) -> None:
    """Hide the last panels of a grid, and label the x axis of those now at the foot of a column."""
    for axes in panels[used:]:
        axes.set_axis_off()
    for axes in panels[max(0, used - columns) : used]:
        axes.tick_params(labelbottom=True)


def number_cells(axes: Axes, table: np.ndarray, most: float, digits: int) -> None:
    """Write the number of each cell of an image whose colors go from 0 to `most`."""
    for (row, column), value in np.ndenumerate(table):
        ink = "white" if value < 0.6 * most else INK
        text = f"{value:.{digits}f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)


def set_position_axis(axes: Axes, length: int, ticks: int = 8) -> None:
    """An x axis of positions from 0, with at most so many ticks at multiples of a power of two."""
    step = 2 ** int(np.ceil(np.log2(length / ticks)))
    axes.set_xlim(0, length)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}")
    )


def minor_tick_label(value: float, _: Any) -> str:
    """The label of a minor tick on a logarithmic axis: at 2 and 5 only."""
    return f"{value:g}" if str(f"{value:e}")[0] in "25" else ""
