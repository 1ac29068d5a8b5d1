"""Loss and retrieval by length of one model: as trained, under YaRN, and converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from farspan.report.figures import Cell
from farspan.report.style import STYLE

# Text, lines of the frame, and the three curves: on a light and on a dark page.
PALETTES = {
    "light": ("#1f2328", "#d1d9e0", ("#59636e", "#0072b2", "#d55e00")),
    "dark": ("#e6edf3", "#3d444d", ("#9198a1", "#4aa8e0", "#ff8640")),
}

NO_GROUND = {"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"}


def loss_and_retrieval(cells: Mapping[str, Cell], text: str, scheme: str) -> Figure:
    """One curve for each label; the background is transparent."""
    ink, frame, colors = PALETTES[scheme]
    colored = {"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    frames = {"axes.edgecolor": frame, "grid.color": frame, "svg.fonttype": "path"}
    with mpl.rc_context({**STYLE, **colored, **frames, **NO_GROUND}):
        figure = Figure(figsize=(9.6, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        for (label, cell), color in zip(cells.items(), colors, strict=True):
            loss = cell["loss"][text]
            left.plot(*octave_means(cell["positions"], loss), color=color, lw=2, label=label)
            lengths = [int(length) for length in cell["passkey"]]
            shares = list(cell["passkey"].values())
            right.plot(lengths, shares, color=color, lw=2, marker="o", ms=4.5, clip_on=False)
        trained = next(iter(cells.values()))["train_length"]
        for axes, first in ((left, 6), (right, 9)):
            _style_axes(axes, first)
            axes.axvline(trained, color=ink, lw=0.8, ls="--", zorder=0)
        left.annotate(
            f"trained on {trained:,}",
            (trained, 0.94),
            xycoords=("data", "axes fraction"),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            color=ink,
        )
        left.set_title("loss (nats per token)", loc="left", fontweight="normal")
        left.set_xlabel("position (tokens)")
        right.set_title("passkeys retrieved", loc="left", fontweight="normal")
        right.set_xlabel("length (tokens)")
        right.set_ylim(0, 1)
        right.yaxis.set_major_formatter(PercentFormatter(1))
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=11)
    return figure


def octave_means(
    positions: Sequence[float], values: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Means over halves of a doubling, for a logarithmic axis.

    >>> octave_means([2, 4, 4, 8], [1.0, 2.0, 4.0, 5.0])[1].tolist()
    [1.0, 3.0, 5.0]
    """
    halves = np.round(2 * np.log2(positions)) / 2
    places = np.unique(halves)
    means = [np.mean(np.asarray(values)[halves == place]) for place in places]
    return 2**places, np.array(means)


def _style_axes(axes: Axes, first: int) -> None:
    """A logarithmic axis of lengths from a power of two on, and light horizontal lines."""
    axes.set_xscale("log", base=2)
    axes.set_axisbelow(True)
    axes.grid(axis="y", lw=0.6)
    axes.tick_params(length=0, pad=6)
    axes.set_xlim(2 ** (first - 0.25), 2**15.1)
    axes.set_xticks([2**power for power in range(first, 16)])
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}")
    )
