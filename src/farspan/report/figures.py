"""All drawing. A figure takes what was measured and knows nothing of how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

INK, FAINT = "#222222", "#b8b8b8"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by every eye
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
    """The figure as PNG and as SVG."""
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    figure.savefig(stem.with_suffix(".svg"))


def diagnosis_figures(found: Sequence[Any]) -> dict[str, Figure]:
    """Every figure that these diagnoses have the data for, by file name."""
    figures = {"loss_and_entropy": loss_and_entropy(found), "entropy_of_heads": entropy_of_heads(found)}
    for number, diagnosis in enumerate(found, 1):
        which = f"_{number}" if len(found) > 1 else ""
        if diagnosis.uniform is None:  # a sweep has too many
            figures[f"heads_by_layer{which}"] = heads_by_layer(diagnosis)
        if diagnosis.scales is not None and diagnosis.scales.base.std() > 0:
            figures[f"scale_against_entropy{which}"] = scale_against_entropy(diagnosis)
    return figures


def loss_and_entropy(found: Sequence[Any]) -> Figure:
    """Loss above, entropy below: do they leave their trends together? (Paper A, Figures 1, 2 and 4)"""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 6.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for diagnosis, colour in zip(found, _colours(found), strict=True):
            curves = diagnosis.curves
            for axes, knee, raw, values in (
                (above, diagnosis.loss_knee, curves.loss, diagnosis.smooth_loss),
                (below, diagnosis.entropy_knee, curves.entropy, diagnosis.smooth_entropy),
            ):
                if len(found) <= 2:
                    axes.plot(curves.positions, raw, color=colour, lw=0.5, alpha=0.35)
                axes.plot(curves.positions, values, color=colour, lw=1.8, label=diagnosis.label)
                if knee is not None:
                    height = float(np.interp(knee, curves.positions, values))
                    axes.plot(knee, height, "o", ms=6, mfc="white", mec=colour, mew=1.6, zorder=5)
        longest = found[0].curves
        below.plot(
            longest.positions, np.log(longest.positions), color=FAINT, lw=1.2, ls=":", label="all keys alike: ln n"
        )
        for axes in (above, below):
            _mark_training(axes, {diagnosis.train_length for diagnosis in found})
            _positions(axes, longest.length)
        above.set_ylabel("loss (nats a token)")
        below.set_ylabel("entropy (nats, mean of heads)")
        below.set_xlabel("position (tokens); a ring marks where a curve leaves its trend")
        figure.legend(*above.get_legend_handles_labels(), loc="outside upper left", fontsize=9, ncols=4)
        lines, labels = below.get_legend_handles_labels()
        below.legend(lines[-1:], labels[-1:], loc="lower right", fontsize=9)
    return figure


def entropy_of_heads(found: Sequence[Any]) -> Figure:
    """Every head's entropy, one panel a model, coloured by depth. (Paper A, Figure 3)"""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.2 + 2.4 * len(found)), layout="constrained")
        panels = figure.subplots(len(found), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, diagnosis in zip(panels, found, strict=True):
            curves = diagnosis.curves
            depth = mpl.colormaps["viridis"].resampled(len(curves.heads))
            for order, table in enumerate(curves.heads.values()):
                axes.plot(curves.positions, table.T, color=depth(order), lw=0.7, alpha=0.8)
            axes.plot(curves.positions, np.log(curves.positions), color=FAINT, lw=1.2, ls=":")
            axes.set_title(diagnosis.label, loc="left")
            axes.set_ylabel("entropy (nats)")
            _mark_training(axes, {diagnosis.train_length})
            _positions(axes, curves.length)
        panels[-1].set_xlabel("position (tokens)")
        last = max(len(diagnosis.curves.heads) for diagnosis in found) - 1
        shades = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, last), "viridis")
        ticks = sorted({0, last // 2, last})
        figure.colorbar(shades, ax=list(panels), label="attention layer", ticks=ticks, fraction=0.03, pad=0.02)
    return figure


def heads_by_layer(diagnosis: Any) -> Figure:
    """All heads, a panel for each layer; distracted heads in colour. (Paper A, Figure 10)"""
    curves = diagnosis.curves
    columns = min(4, len(curves.heads))
    rows = -(-len(curves.heads) // columns)
    distracted = set(diagnosis.distracted_heads)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * columns + 0.6, 1.9 * rows + 0.9), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, (layer, table) in zip(panels, curves.heads.items(), strict=False):
            for head, values in enumerate(table):
                hot = (layer, head) in distracted
                axes.plot(curves.positions, values, color=COLOURS[1] if hot else COLOURS[0], lw=0.8, alpha=0.9)
            axes.set_title(f"layer {layer}", loc="left", fontsize=9)
            _mark_training(axes, {diagnosis.train_length}, label=False)
            _positions(axes, curves.length)
        for axes in panels[len(curves.heads) :]:
            axes.set_axis_off()
        figure.supxlabel("position (tokens)", fontsize=10)
        figure.supylabel("entropy (nats)", fontsize=10)
        title = f"{len(distracted)} distracted heads in orange" if distracted else "no head is distracted"
        figure.suptitle(f"{diagnosis.label}: {title}", fontsize=11)
    return figure


def scale_against_entropy(diagnosis: Any) -> Figure:
    """The scale that was found for a head against where its entropy ends, layer by layer. (Paper A, Figure 5)"""
    curves, scales = diagnosis.curves, diagnosis.scales
    last = curves.positions > curves.positions[-1] * 7 / 8
    columns = min(4, len(scales.layers))
    rows = -(-len(scales.layers) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.4 * columns + 0.6, 2.1 * rows + 0.9), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, layer, row in zip(panels, scales.layers, scales.base.detach().numpy(), strict=False):
            entropy = curves.heads[layer][:, last].mean(1)
            r = np.corrcoef(entropy, row)[0, 1] if np.std(row) > 0 else np.nan
            axes.scatter(entropy, row, s=18, color=COLOURS[0], alpha=0.85, lw=0)
            axes.set_title(f"layer {layer}   r = {r:.2f}", loc="left", fontsize=9)
        for axes in panels[len(scales.layers) :]:
            axes.set_axis_off()
        figure.supxlabel("entropy at the end (nats)", fontsize=10)
        figure.supylabel("scale λ̂", fontsize=10)
        figure.suptitle(diagnosis.label, fontsize=11)
    return figure


def loss_curves(curves: dict[str, np.ndarray], train_length: int, title: str) -> Figure:
    """Loss by position of a model as it was and as it became, smoothed over an eighth of its training length."""
    width = max(1, train_length // 8)
    ones = np.ones(width)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for (name, curve), colour in zip(curves.items(), (COLOURS[1], COLOURS[0], *COLOURS[2:]), strict=False):
            smooth = np.convolve(curve, ones, "same") / np.convolve(np.ones_like(curve), ones, "same")
            axes.plot(np.arange(1, len(curve) + 1), smooth, color=colour, lw=1.8, label=name)
        _mark_training(axes, {train_length})
        _positions(axes, len(curve) + 1)
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("loss (nats)")
        axes.legend(loc="upper left", bbox_to_anchor=(0.0, 1.0))
        axes.set_title(title, loc="left")
    return figure


def training(metrics: Sequence[dict[str, Any]], title: str) -> Figure:
    """Training loss by tokens seen, smoothed over raw."""
    tokens = np.array([entry["tokens"] for entry in metrics]) / 1e6
    loss = np.array([entry["loss"] for entry in metrics])
    width = max(1, len(loss) // 50)
    smooth = np.convolve(np.pad(loss, (width // 2, width - 1 - width // 2), "edge"), np.ones(width) / width, "valid")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(tokens, loss, color=COLOURS[0], lw=0.5, alpha=0.35)
        axes.plot(tokens, smooth, color=COLOURS[0], lw=1.8)
        axes.set_xlim(0, tokens[-1])
        low, high = smooth.min(), np.quantile(smooth, 0.98)
        axes.set_ylim(low - 0.1, max(high, low + 0.1) + 0.1)
        axes.set_xlabel("tokens (millions)")
        axes.set_ylabel("training loss (nats)")
        axes.set_title(title, loc="left")
    return figure


def _colours(found: Sequence[Any]) -> list[Any]:
    """A sweep of scales runs through a colour map; models get colours of their own."""
    if len(found) > 1 and all(diagnosis.uniform is not None for diagnosis in found):
        return [mpl.colormaps["viridis"](0.9 * i / (len(found) - 1)) for i in range(len(found))]
    return [COLOURS[i % len(COLOURS)] for i in range(len(found))]


def _mark_training(axes: Any, lengths: set[int], label: bool = True) -> None:
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


def _positions(axes: Any, length: int) -> None:
    """Positions from 0, with at most eight ticks at multiples of a power of two."""
    step = 2 ** int(np.ceil(np.log2(length / 8)))
    axes.set_xlim(0, length)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}"))
