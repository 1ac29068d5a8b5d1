"""How all figures look, and what they have in common."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from farspan.files import write_bytes

INK, FAINT = "#222222", "#b8b8b8"
# Told apart by every eye (Okabe and Ito's), and two dark ones for figures of many lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#8c510a")
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
    """The figure as PNG and as SVG, each whole or not at all: other processes may be writing it too."""
    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box stands in the figure itself
            figure.savefig(buffer, format=kind, dpi=150)
        write_bytes(stem.with_suffix(f".{kind}"), buffer.getvalue())


def looks(colours: Sequence[str]) -> list[dict[str, Any]]:
    """As many lines as can be told apart."""
    return [{"color": colour, "ls": dashes} for dashes in ("-", "--", ":") for colour in colours]


def mark_training(axes: Any, lengths: set[int], label: bool = True) -> None:
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


def leave_out(panels: np.ndarray, used: int, columns: int) -> None:
    """Blank the last panels of a grid; those that then end their columns bear the numbers of the axis."""
    for axes in panels[used:]:
        axes.set_axis_off()
    for axes in panels[max(0, used - columns) : used]:
        axes.tick_params(labelbottom=True)


def positions(axes: Any, length: int) -> None:
    """Positions from 0, with at most eight ticks at multiples of a power of two."""
    step = 2 ** int(np.ceil(np.log2(length / 8)))
    axes.set_xlim(0, length)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}"))


def few(value: float, _: Any) -> str:
    """Of the minor ticks of a logarithmic axis, those at 2 and 5 bear a number."""
    return f"{value:g}" if str(f"{value:e}")[0] in "25" else ""
