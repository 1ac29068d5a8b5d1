"""Kazemnejad 2023's figures: exact match by length, attention distance, heads, theorems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from farspan.lab.distance import AttentionComparison
from farspan.lab.theorems import PositionAnalysis, TheoremProof
from farspan.report.style import (
    COLORS,
    GRAY,
    INK,
    STYLE,
    hide_unused_panels,
    number_cells,
)
from farspan.summaries import draw


@dataclass(frozen=True, eq=False)
class Panel:
    """The exact match of each encoding on one task, by length and seed."""

    title: str
    train_length: int  # the longest
    length_unit: str
    curves: dict[str, tuple[np.ndarray, np.ndarray]]  # encoding -> lengths, scores [seeds, lengths]


def accuracy_by_length(panels: Sequence[Panel]) -> Figure:
    """Exact match by length, one panel per task, one color per encoding; bands span the seeds.

    (Kazemnejad 2023, Figure 2)
    """
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    styles: dict[str, dict[str, Any]] = {
        name: {"color": COLORS[i % len(COLORS)], "ls": ("-", "--", "-.")[i % 3], "lw": 1.7}
        for i, name in enumerate(names)
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * columns + 0.8, 2.3 * rows + 0.9), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes, panel in zip(grid.ravel(), panels, strict=False):
            _draw_panel(axes, panel, styles)
        hide_unused_panels(grid.ravel(), len(panels), columns)
        figure.supylabel("exact match", fontsize=10)
        handles = [mpl.lines.Line2D([], [], **styles[name]) for name in names]
        seeds = max(len(scores) for panel in panels for _, scores in panel.curves.values())
        title = "dotted: the longest train length"
        title += f"; bands: the range of {seeds} seeds" * (seeds > 1)
        layout = {"loc": "outside upper left", "ncols": min(8, len(names)), "alignment": "left"}
        figure.legend(handles, names, title=title, fontsize=9, title_fontsize=9, **layout)
    return figure


def _draw_panel(axes: Axes, panel: Panel, styles: dict[str, dict[str, Any]]) -> None:
    for name, (lengths, scores) in panel.curves.items():
        color = styles[name]["color"]
        axes.fill_between(lengths, scores.min(0), scores.max(0), color=color, alpha=0.15, lw=0)
        axes.plot(lengths, scores.mean(0), label=name, **styles[name])
    axes.axvline(panel.train_length + 0.5, color=INK, lw=0.8, ls=":", zorder=0)
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.length_unit, fontsize=9)
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


@draw.register
def _(comparison: AttentionComparison) -> Figure:
    """The distances; of a single model, its heads."""
    return attention_distance(comparison) if comparison.pairs else attention_heads(comparison)


def attention_distance(comparison: AttentionComparison) -> Figure:
    """The distance between every two models by layer: of the nearest heads, and of matched heads.

    (Kazemnejad 2023, Figure 4)
    """
    names, distances = comparison.models, comparison.pairs.values()
    labels = [f"{names[one]} · {names[other]}" for one, other in comparison.pairs]
    tables = {
        "nearest pair of heads": np.array([distance.nearest for distance in distances]),
        "heads matched one to one": np.array([distance.matched for distance in distances]),
    }
    layers = len(next(iter(tables.values()))[0])
    width, height = max(3.4, 0.55 * layers + 0.8), 0.34 * len(labels) + 1.5
    with mpl.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(2 * width + 1.6, height), layout="constrained")
        most = max(table.max() for table in tables.values())  # one color scale for both tables
        grid = figure.subplots(1, 2, sharey=True)
        for axes, (title, table) in zip(grid, tables.items(), strict=True):
            axes.imshow(table, cmap="viridis", vmin=0, vmax=most, aspect="auto")
            number_cells(axes, table, most, digits=2)
            axes.set_title(title, loc="left")
            axes.set_xticks(range(layers))
            axes.set_yticks(range(len(labels)), labels, fontsize=9)
            axes.tick_params(length=0)
            axes.set_xlabel("layer")
        title = f"attention distance in nats, {comparison.tokens:,} tokens"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def attention_heads(comparison: AttentionComparison) -> Figure:
    """Attention mass by distance of every head in the first layers, one row per model.

    A head's line is darker the more the loss rises without it.
    """
    models, ablations = comparison.models, comparison.ablations
    layers = min(4, *map(len, ablations)) if len(ablations) > 1 else len(ablations[0])
    with mpl.rc_context(STYLE):
        size = (2.6 * layers + 1.0, 2.1 * len(models) + 0.8)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(models), layers, sharex=True, sharey=True, squeeze=False)
        rows = zip(grid, models, comparison.mass, ablations, strict=True)
        for row, name, mass, increases in rows:
            largest = max(float(increases.max()), 1e-9)
            for layer, axes in enumerate(row):
                _draw_heads(axes, mass[layer], increases[layer] / largest)
                title = f"{name}, layer {layer}" if layer == 0 else f"layer {layer}"
                axes.set_title(title, loc="left", fontsize=9)
            text = f"darkest: +{largest:.2g} nats"
            row[0].annotate(text, (0.04, 0.05), xycoords="axes fraction", fontsize=8, color=INK)
        figure.supxlabel("tokens back (1: the token itself)", fontsize=10)
        figure.supylabel("attention per token", fontsize=10)
    return figure


def attended_distance(comparison: AttentionComparison) -> Figure:
    """How far back the most attended token is, relative to the tokens before, by model.

    The fractions are averaged over layers and heads. (Kazemnejad 2023, Figure 5)
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for number, (name, fractions) in enumerate(
            zip(comparison.models, comparison.attended, strict=True)
        ):
            mean = fractions.mean((0, 1))
            edges = np.linspace(0, 1, len(mean) + 1)
            line: dict[str, Any] = {
                "color": COLORS[number % len(COLORS)],
                "ls": ("-", "--", "-.")[number % 3],
            }
            axes.stairs(mean, edges, lw=1.6, label=name, **line)
        axes.set_xlabel("distance of the most attended token / tokens up to the query", fontsize=9)
        axes.set_ylabel("fraction of queries", fontsize=9)
        axes.legend(fontsize=8)
    return figure


def _draw_heads(axes: Axes, mass: np.ndarray, importance: np.ndarray) -> None:
    """The attention mass [heads, distances] of one layer, the most important head on top."""
    for head in np.argsort(importance):
        shade = mpl.colormaps["viridis_r"](0.1 + 0.9 * max(0.0, importance[head]) ** 0.5)
        axes.plot(*_mean_by_doubling(mass[head]), color=shade, lw=1.4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 1.2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _mean_by_doubling(mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean mass over ranges of distance that double: 1, 2, 3–4, 5–8, …"""
    edges = np.unique([0, *(2**power for power in range(int(np.log2(len(mass))) + 1)), len(mass)])
    means = [mass[start:stop].mean() for start, stop in pairwise(edges)]
    return edges[1:], np.maximum(means, 1e-12)


@draw.register
def _(analysis: PositionAnalysis) -> Figure:
    return theorem_figure(analysis.proofs)


def theorem_figure(proofs: Sequence[TheoremProof]) -> Figure:
    """Computed and expected positions and scores of the constructed models.

    First the positions that the first layer computes; then, for each rule, the last token's scores
    by distance in the second layer. (Kazemnejad 2023, Theorems 1 and 2)
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * (1 + len(proofs)), 3.0), layout="constrained")
        first, *others = figure.subplots(1, 1 + len(proofs))
        positions = np.arange(1, len(proofs[0].positions) + 1)
        _draw_check(first, positions, proofs[0].positions, positions)
        first.set_title(f"computed position\n(error {proofs[0].position_error:.0e})", loc="left")
        first.set_xlabel("position (tokens)")
        for axes, proof in zip(others, proofs, strict=True):
            _draw_check(axes, np.arange(len(proof.scores)), proof.scores, proof.expected)
            axes.set_title(f"{proof.rule}\n(error {proof.score_error:.0e})", loc="left")
            axes.set_xlabel("distance (tokens)")
        others[0].set_ylabel("score q·k")
    return figure


def _draw_check(axes: Axes, x: np.ndarray, computed: np.ndarray, expected: np.ndarray) -> None:
    """Expected values as a line, and about two dozen computed ones as dots."""
    points = np.unique(np.linspace(0, len(x) - 1, 24).round().astype(int))
    axes.plot(x, expected, color=GRAY, lw=1.6)
    axes.plot(x[points], computed[points], "o", ms=3.5, color=COLORS[0])
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
