"""All drawing. A figure takes what was measured and knows nothing of how."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from farspan.files import write_bytes

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
    """The figure as PNG and as SVG, each whole or not at all: other processes may be writing it too."""
    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=150)
        write_bytes(stem.with_suffix(f".{kind}"), buffer.getvalue())


def diagnosis_figures(found: Sequence[Any]) -> dict[str, Figure]:
    """Every figure that these diagnoses have the data for, by file name."""
    figures = {"loss_and_entropy": loss_and_entropy(found), "entropy_of_heads": entropy_of_heads(found)}
    for number, diagnosis in enumerate(found, 1):
        which = f"_{number}" if len(found) > 1 else ""
        if diagnosis.uniform is None:  # a sweep has too many
            figures[f"heads_by_layer{which}"] = heads_by_layer(diagnosis)
        if diagnosis.scales is not None and np.ptp(_scales_at_the_end(diagnosis)) > 0:
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
        _leave_out(panels, len(curves.heads), columns)
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
        for axes, layer, row in zip(panels, scales.layers, _scales_at_the_end(diagnosis), strict=False):
            entropy = curves.heads[layer][:, last].mean(1)
            r = np.corrcoef(entropy, row)[0, 1] if np.ptp(row) > 0 else np.nan
            axes.scatter(entropy, row, s=18, color=COLOURS[0], alpha=0.85, lw=0)
            axes.set_title(f"layer {layer}   r = {r:.2f}", loc="left", fontsize=9)
        _leave_out(panels, len(scales.layers), columns)
        figure.supxlabel("entropy at the end (nats)", fontsize=10)
        figure.supylabel("scale λ̂", fontsize=10)
        figure.suptitle(diagnosis.label, fontsize=11)
    return figure


def _scales_at_the_end(diagnosis: Any) -> np.ndarray:
    """λ̂ of each head [layers, heads] where the curves end: some grow with the number of visible keys."""
    scales = diagnosis.scales
    return scales.at(scales.base.new_tensor(diagnosis.curves.length)).detach().numpy()


def loss_curves(curves: dict[str, np.ndarray], train_length: int, title: str) -> Figure:
    """Loss by position of models, or of one as it was and as it became, smoothed over an eighth of its length."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for (name, curve), look in zip(curves.items(), _looks([COLOURS[1], COLOURS[0], *COLOURS[2:]]), strict=False):
            axes.plot(np.arange(1, len(curve) + 1), smoothed(curve, train_length // 8), lw=1.8, label=name, **look)
        _mark_training(axes, {train_length})
        _positions(axes, len(curve) + 1)
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("loss (nats)")
        beside = len(curves) > 4
        axes.legend(loc="upper left", bbox_to_anchor=(1.0 if beside else 0.0, 1.0))
        axes.set_title(title, loc="left")
    return figure


def smoothed(curve: np.ndarray, width: int) -> np.ndarray:
    """The mean over so many positions around each, of fewer at the ends."""
    ones = np.ones(max(1, width))
    return np.convolve(curve, ones, "same") / np.convolve(np.ones_like(curve), ones, "same")


def losses_of_methods(cells: Sequence[dict[str, Any]]) -> Figure:
    """A study: loss by position under each method, one row a model, one column a target; seeds averaged. (Paper A,
    Figures 2 and 4)"""
    shown = without_variants(cells)
    models = list(dict.fromkeys(cell["model"] for cell in shown))
    factors = sorted({cell["factor"] for cell in shown} - {1}) or [1]
    names = list(dict.fromkeys(cell["method"] for cell in shown))
    looks = dict(zip(names, cycle([{"color": INK, "ls": "-"}, *_looks(COLOURS)]), strict=False))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(factors) + 0.6, 2.7 * len(models) + 0.6), layout="constrained")
        alike = len({cell["train_length"] for cell in shown}) == 1
        grid = figure.subplots(len(models), len(factors), sharex="all" if alike else "row", sharey="row", squeeze=False)
        for panels, model in zip(grid, models, strict=True):
            first = next(cell for cell in shown if cell["model"] == model)
            length, ends = first["train_length"], first["positions"]
            for axes, factor in zip(panels, factors, strict=True):
                for name in names:
                    group = [
                        c for c in shown if (c["model"], c["method"]) == (model, name) and c["factor"] in (1, factor)
                    ]
                    if group:
                        loss = np.mean([next(iter(cell["loss"].values())) for cell in group], axis=0)
                        smooth = np.convolve(np.pad(loss, 2, mode="edge"), np.ones(5) / 5, "valid")
                        axes.plot(group[0]["positions"], smooth, lw=1.5, **looks[name])
                _mark_training(axes, {length}, label=factor == factors[0])
                axes.axvspan(length, factor * length, color=FAINT, alpha=0.15, lw=0)
                axes.set_title(f"{model}, to {factor}×" if factor > 1 else model, loc="left")
                _positions(axes, round(ends[-1] + ends[0]))  # middles of bins
            panels[0].set_ylabel("loss (nats)")
        for axes in grid[-1]:
            axes.set_xlabel("position (tokens)")
        lines = [mpl.lines.Line2D([], [], lw=1.8, **look) for look in looks.values()]
        told = ["as trained" if name == "none" else name for name in names]
        columns = 1 if any(":" in name for name in names) else len(names)  # names of variants are long
        figure.legend(lines, told, loc="outside upper left", ncols=columns, fontsize=9)
    return figure


def without_variants(cells: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Cells of a study without variants of a method, which differ little and are left to the tables; all, where
    nothing but variants was fitted."""
    plain = [cell for cell in cells if ":" not in cell["method"]]
    return plain if any(cell["method"] != "none" for cell in plain) else cells


def best_scales(grids: Sequence[dict[str, Any]]) -> Figure:
    """The best λ̂ at each position and the fit 1 + slope · ln s, s in training lengths. (Paper A, Figure 7)"""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for number, grid in enumerate(grids):
            positions, colour = np.array(grid["positions"]), COLOURS[number % len(COLOURS)]
            times = 8 * positions / (positions[-1] + positions[0])  # middles of bins, which span eight lengths
            beyond = times >= 1
            label = f"{grid['model']}, {grid['checkpoint']}: 1 + {grid['slope']:.3f}·ln s, R² {grid['r2']:.3f}"
            axes.plot(times, grid["best"], "o", ms=3.5, color=colour, alpha=0.7, mew=0)
            axes.plot(times[beyond], 1 + grid["slope"] * np.log(times[beyond]), color=colour, lw=1.8, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.25, 8.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
        axes.axvline(1, color=INK, lw=0.8, ls="--", zorder=0)
        axes.set_xlabel("position, in training lengths")
        axes.set_ylabel("best λ̂")
        axes.legend(loc="upper left", fontsize=9, frameon=True, edgecolor="none", framealpha=1)  # over the dashed line
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


def evaluation_figures(found: Any) -> dict[str, Figure]:
    """Every figure that an evaluation has the scores for, by file name."""
    named = {found.model: found.scores, **({found.base: found.base_scores} if found.base else {})}
    short = {name: "/".join(Path(name).parts[-2:]) for name in named}
    if len(set(short.values())) < len(short):
        short = {name: name for name in named}
    models = {short[name]: scores for name, scores in named.items()}
    figures = {}
    if any(score.metric == "ppl" for score in found.scores):
        figures["perplexity"] = perplexity_by_length(models, found.train_length)
    if any(score.metric == "passkey_at_depth" for score in found.scores):
        figures["passkey"] = passkey_heatmap(models, found.train_length)
    return figures


def perplexity_by_length(models: dict[str, Sequence[Any]], train_length: int | None) -> Figure:
    """Perplexity at every length with its interval and, where it was measured, loss by position beside it."""
    curves = any(score.metric == "loss" for scores in models.values() for score in scores)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5 if curves else 5.5, 3.9), layout="constrained")
        panels = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
        for metric, axes in zip(("ppl", "loss"), panels, strict=False):
            longest = 0
            for (model, scores), colour in zip(models.items(), COLOURS, strict=False):
                for task, style in zip(_tasks(scores, metric), ("-", "--", ":", "-.") * len(scores), strict=False):
                    mine = [score for score in scores if score.metric == metric and score.tags["task"] == task]
                    x, values, low, high = zip(*((s.length, s.value, s.low, s.high) for s in mine), strict=True)
                    mark = "o" if metric == "ppl" else ""
                    axes.plot(x, values, color=colour, ls=style, marker=mark, lw=1.8, ms=5, label=f"{model}, {task}")
                    axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
                    if metric == "ppl":  # a band of one length has no width
                        axes.vlines(x, low, high, color=colour, lw=3, alpha=0.35)
                    longest = max(longest, *x)
            _positions(axes, longest)
            if train_length and train_length < longest:
                _mark_training(axes, {train_length})
        panels[0].set_xlim(0, longest * 1.04)
        low, high = panels[0].get_ylim()
        if not 0 < low < high < 5 * low:  # where few ticks of a logarithmic axis, or none, would be in sight
            panels[0].set_yscale("log")
            panels[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            panels[0].yaxis.set_minor_formatter(FuncFormatter(_few))
        panels[0].set_xlabel("length of the window (tokens)")
        panels[0].set_ylabel("perplexity")
        if curves:
            panels[1].set_xlabel("position (tokens)")
            panels[1].set_ylabel("loss (nats a token)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", fontsize=9, ncols=2)
    return figure


def passkey_heatmap(models: dict[str, Sequence[Any]], train_length: int | None) -> Figure:
    """The share of keys told by length and depth, one panel a model. (Paper A, Figures 6, 8 and 9)"""
    with mpl.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        columns = 1 if len(models) <= 2 else 3
        rows = -(-len(models) // columns)
        width, height = (7.5, 2.9) if columns == 1 else (4.2, 2.6)
        figure = Figure(figsize=(width * columns, 0.9 + height * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
        _leave_out(panels.ravel(), len(models), columns)
        for axes, (model, scores) in zip(panels.flat, models.items(), strict=False):
            mine = [score for score in scores if score.metric == "passkey_at_depth"]
            lengths = sorted({score.length for score in mine})
            depths = sorted({score.tags["depth"] for score in mine})
            shares = np.full((len(depths), len(lengths)), np.nan)
            for score in mine:
                shares[depths.index(score.tags["depth"]), lengths.index(score.length)] = score.value
            image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            for (row, column), share in np.ndenumerate(shares):
                ink = "white" if share < 0.6 else INK
                axes.text(column, row, f"{share:.1f}", ha="center", va="center", fontsize=8, color=ink)
            axes.set_xticks(
                range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45 * (len(lengths) > 8)
            )
            axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
            axes.set_xticks(np.arange(0.5, len(lengths) - 1), minor=True)
            axes.set_yticks(np.arange(0.5, len(depths) - 1), minor=True)
            axes.grid(which="minor", color="white", lw=1.2)
            axes.tick_params(which="both", length=0)
            seen = {"yes": "trained on passkey documents", "no": "never trained on passkey documents"}
            told = seen.get(mine[0].tags["trained_on_passkeys"], "trained on passkey documents: unknown")
            title = f"{model}  ({told})" if columns == 1 else f"{model}\n{told}"
            axes.set_title(title, loc="left", fontsize=10)
            inside = sum(length <= (train_length or 0) for length in lengths)
            line = 0 < inside < len(lengths)
            if line:
                axes.axvline(inside - 0.5, color="white", lw=3)
                axes.axvline(inside - 0.5, color=INK, lw=1, ls="--")
        figure.supylabel("depth of the key", fontsize=10)
        figure.supxlabel(
            f"length (tokens); trained on {train_length:,} up to the line" if line else "length (tokens)", fontsize=10
        )
        figure.colorbar(image, ax=panels, label="keys told", fraction=0.03, pad=0.02, aspect=30)
    return figure


def _tasks(scores: Sequence[Any], metric: str) -> list[str]:
    return list(dict.fromkeys(score.tags["task"] for score in scores if score.metric == metric))


def _few(value: float, _: Any) -> str:
    """Of the minor ticks of a logarithmic axis, those at 2 and 5 bear a number."""
    return f"{value:g}" if str(f"{value:e}")[0] in "25" else ""


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
    looks = {name: ((*COLOURS, INK)[i % 7], ("-", "--", "-.")[i % 3]) for i, name in enumerate(names)}
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
        title = "dotted: the longest length of training"
        figure.legend(handles, names, loc="outside upper left", ncols=len(names), fontsize=9, title=title)
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


def _colours(found: Sequence[Any]) -> list[Any]:
    """A sweep of scales runs through a colour map; models get colours of their own."""
    if len(found) > 1 and all(diagnosis.uniform is not None for diagnosis in found):
        return [mpl.colormaps["viridis"](0.9 * i / (len(found) - 1)) for i in range(len(found))]
    return [COLOURS[i % len(COLOURS)] for i in range(len(found))]


def _looks(colours: Sequence[str]) -> list[dict[str, Any]]:
    """As many lines as can be told apart."""
    return [{"color": colour, "ls": dashes} for dashes in ("-", "--", ":") for colour in colours]


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


def _leave_out(panels: np.ndarray, used: int, columns: int) -> None:
    """Blank the last panels of a grid; those that then end their columns bear the numbers of the axis."""
    for axes in panels[used:]:
        axes.set_axis_off()
    for axes in panels[max(0, used - columns) : used]:
        axes.tick_params(labelbottom=True)


def _positions(axes: Any, length: int) -> None:
    """Positions from 0, with at most eight ticks at multiples of a power of two."""
    step = 2 ** int(np.ceil(np.log2(length / 8)))
    axes.set_xlim(0, length)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}"))
