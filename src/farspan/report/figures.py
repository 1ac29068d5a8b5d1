"""Paper A's figures, and those of training and evaluation. Each takes what was measured and knows nothing of how."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from farspan.report.style import COLOURS, FAINT, INK, STYLE, few, leave_out, looks, mark_training, positions


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
            mark_training(axes, {diagnosis.train_length for diagnosis in found})
            positions(axes, longest.length)
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
            mark_training(axes, {diagnosis.train_length})
            positions(axes, curves.length)
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
            mark_training(axes, {diagnosis.train_length}, label=False)
            positions(axes, curves.length)
        leave_out(panels, len(curves.heads), columns)
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
        leave_out(panels, len(scales.layers), columns)
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
        for (name, curve), look in zip(curves.items(), looks([COLOURS[1], COLOURS[0], *COLOURS[2:]]), strict=False):
            axes.plot(np.arange(1, len(curve) + 1), smoothed(curve, train_length // 8), lw=1.8, label=name, **look)
        mark_training(axes, {train_length})
        positions(axes, len(curve) + 1)
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
    by_name = dict(zip(names, cycle([{"color": INK, "ls": "-"}, *looks(COLOURS)]), strict=False))
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
                        axes.plot(group[0]["positions"], smooth, lw=1.5, **by_name[name])
                mark_training(axes, {length}, label=factor == factors[0])
                axes.axvspan(length, factor * length, color=FAINT, alpha=0.15, lw=0)
                axes.set_title(f"{model}, to {factor}×" if factor > 1 else model, loc="left")
                positions(axes, round(ends[-1] + ends[0]))  # middles of bins
            panels[0].set_ylabel("loss (nats)")
        for axes in grid[-1]:
            axes.set_xlabel("position (tokens)")
        lines = [mpl.lines.Line2D([], [], lw=1.8, **look) for look in by_name.values()]
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
            positions(axes, longest)
            if train_length and train_length < longest:
                mark_training(axes, {train_length})
        panels[0].set_xlim(0, longest * 1.04)
        low, high = panels[0].get_ylim()
        if not 0 < low < high < 5 * low:  # where few ticks of a logarithmic axis, or none, would be in sight
            panels[0].set_yscale("log")
            panels[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            panels[0].yaxis.set_minor_formatter(FuncFormatter(few))
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
        leave_out(panels.ravel(), len(models), columns)
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


def _colours(found: Sequence[Any]) -> list[Any]:
    """A sweep of scales runs through a colour map; models get colours of their own."""
    if len(found) > 1 and all(diagnosis.uniform is not None for diagnosis in found):
        return [mpl.colormaps["viridis"](0.9 * i / (len(found) - 1)) for i in range(len(found))]
    return [COLOURS[i % len(COLOURS)] for i in range(len(found))]
