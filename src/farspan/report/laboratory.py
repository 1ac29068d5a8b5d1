"""Paper B's figures: exact match by length, how alike models attend, what heads do, theorems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from farspan.report.style import COLOURS, FAINT, INK, STYLE


@dataclass(frozen=True, eq=False)
class Panel:
    """A task of the laboratory: each encoding's exact match by length, a row a seed."""

    title: str
    trained: int  # the longest length of training
    counts: str  # what a length counts
    curves: dict[str, tuple[np.ndarray, np.ndarray]]  # encoding -> lengths, shares [seeds, lengths]


def accuracy_by_length(panels: Sequence[Panel]) -> Figure:
    """Exact match by length, one panel a task, one colour an encoding; a band spans the seeds. (Paper B, Figure 2)"""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    looks = {name: (COLOURS[i % len(COLOURS)], ("-", "--", "-.")[i % 3]) for i, name in enumerate(names)}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * columns + 0.8, 2.3 * rows + 0.9), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes, panel in zip(grid.ravel(), panels, strict=False):
            for name, (lengths, shares) in panel.curves.items():
                colour, dashes = looks[name]
                axes.fill_between(lengths, shares.min(0), shares.max(0), color=colour, alpha=0.15, lw=0)
                axes.plot(lengths, shares.mean(0), color=colour, ls=dashes, lw=1.7, label=name)
            axes.axvline(panel.trained + 0.5, color=INK, lw=0.8, ls=":", zorder=0)
            axes.set_title(panel.title, loc="left")
            axes.set_xlabel(panel.counts, fontsize=9)
            axes.set_ylim(-0.03, 1.03)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for axes in grid.ravel()[len(panels) :]:
            axes.set_axis_off()
        figure.supylabel("exact match", fontsize=10)
        handles = [mpl.lines.Line2D([], [], color=colour, ls=dashes, lw=1.7) for colour, dashes in looks.values()]
        seeds = max(len(shares) for panel in panels for _, shares in panel.curves.values())
        title = "dotted: the longest length of training" + f"; bands: the range of {seeds} seeds" * (seeds > 1)
        place = {"loc": "outside upper left", "ncols": len(names), "alignment": "left"}
        figure.legend(handles, names, title=title, fontsize=9, title_fontsize=9, **place)
    return figure


def attention_distance(found: Any) -> Figure:
    """The distance between every two models, layer by layer: of their nearest heads, and of heads matched one to one.
    (Paper B, Figure 4)"""
    labels = [f"{found.models[one]} · {found.models[other]}" for one, other in found.pairs]
    tables = {
        "nearest pair of heads": np.array([distance.nearest for distance in found.pairs.values()]),
        "heads matched one to one": np.array([distance.matched for distance in found.pairs.values()]),
    }
    layers = len(next(iter(tables.values()))[0])
    width, height = max(3.4, 0.55 * layers + 0.8), 0.34 * len(labels) + 1.5
    with mpl.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(2 * width + 1.6, height), layout="constrained")
        most = max(table.max() for table in tables.values())  # one scale: a colour is the same number in both
        for axes, (title, table) in zip(figure.subplots(1, 2, sharey=True), tables.items(), strict=True):
            axes.imshow(table, cmap="viridis", vmin=0, vmax=most, aspect="auto")
            for (row, column), value in np.ndenumerate(table):
                ink = "white" if value < 0.6 * most else INK
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
            axes.set_title(title, loc="left")
            axes.set_xticks(range(layers))
            axes.set_yticks(range(len(labels)), labels, fontsize=9)
            axes.tick_params(length=0)
            axes.set_xlabel("layer")
        figure.suptitle(f"attention distance in nats, {found.tokens:,} tokens", x=0.01, ha="left", fontsize=10)
    return figure


def what_heads_do(found: Any) -> Figure:
    """Attention by distance of every head in the first four layers, a row a model; the more the loss rises without a
    head, the darker its line."""
    shown = min(4, *(len(worth) for worth in found.ablations)) if len(found.ablations) > 1 else len(found.ablations[0])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * shown + 1.0, 2.1 * len(found.models) + 0.8), layout="constrained")
        grid = figure.subplots(len(found.models), shown, sharex=True, sharey=True, squeeze=False)
        for row, (name, mass, worth) in enumerate(zip(found.models, found.mass, found.ablations, strict=True)):
            heaviest = max(float(worth.max()), 1e-9)
            for layer, axes in enumerate(grid[row]):
                for head in np.argsort(worth[layer]):
                    shade = mpl.colormaps["viridis_r"](0.1 + 0.9 * (max(0.0, worth[layer, head]) / heaviest) ** 0.5)
                    axes.plot(*_in_doublings(mass[layer, head]), color=shade, lw=1.4)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_ylim(1e-4, 1.2)
                axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
                axes.set_title(f"{name}, layer {layer}" if layer == 0 else f"layer {layer}", loc="left", fontsize=9)
            grid[row][0].annotate(
                f"darkest: +{heaviest:.2g} nats",
                (0.04, 0.05),
                xycoords="axes fraction",
                fontsize=8,
                color=INK,
            )
        figure.supxlabel("tokens back (1: the token itself)", fontsize=10)
        figure.supylabel("attention a token", fontsize=10)
    return figure


def _in_doublings(mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean mass over stretches of distance that double: 1, 2, 3–4, 5–8, …"""
    edges = np.unique([0, *(2**power for power in range(int(np.log2(len(mass))) + 1)), len(mass)])
    means = [mass[start:stop].mean() for start, stop in pairwise(edges)]
    return edges[1:], np.maximum(means, 1e-12)


def draw_theorem(proofs: Sequence[Any]) -> Figure:
    """Positions as the first layer of a written-down model found them; then, for each rule, the last token's scores by
    distance in the second layer, over what was wanted. (Paper B, Theorems 1 and 2)"""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * (1 + len(proofs)), 3.0), layout="constrained")
        first, *others = figure.subplots(1, 1 + len(proofs))
        found = proofs[0]
        place = np.arange(1, len(found.positions) + 1)
        _over(first, place, found.positions, place)
        first.set_title(f"position found\n(off by {found.position_error:.0e})", loc="left")
        first.set_xlabel("position (tokens)")
        for axes, proof in zip(others, proofs, strict=True):
            _over(axes, np.arange(len(proof.scores)), proof.scores, proof.wanted)
            axes.set_title(f"{proof.rule}\n(off by {proof.score_error:.0e})", loc="left")
            axes.set_xlabel("distance (tokens)")
        others[0].set_ylabel("score q·k")
    return figure


def _over(axes: Any, x: np.ndarray, found: np.ndarray, wanted: np.ndarray) -> None:
    """What was wanted as a line, and what was found as some two dozen dots on it."""
    some = np.unique(np.linspace(0, len(x) - 1, 24).round().astype(int))
    axes.plot(x, wanted, color=FAINT, lw=1.6)
    axes.plot(x[some], found[some], "o", ms=3.5, color=COLOURS[0])
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
