"""The figures of Wang 2024, and those of training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from farspan.diagnosis.result import Diagnoses, Diagnosis
from farspan.errors import FarspanError
from farspan.evals.results import EvalResult
from farspan.evals.scores import Score
from farspan.report.style import (
    COLORS,
    GRAY,
    INK,
    STYLE,
    hide_unused_panels,
    line_styles,
    mark_train_length,
    minor_tick_label,
    number_cells,
    set_position_axis,
)
from farspan.summaries import draw

BOUND = "upper bound: ln n"
Cell = dict[str, Any]  # the results of one model, method, factor and seed of a study


def diagnosis_figures(diagnoses: Sequence[Diagnosis]) -> dict[str, Figure]:
    """Every figure that these diagnoses have the data for, by file name."""
    figures = {"loss_and_entropy": loss_and_entropy(diagnoses)}
    if with_entropy := [diagnosis for diagnosis in diagnoses if diagnosis.heads]:
        figures["entropy_of_heads"] = entropy_of_heads(with_entropy)
    for number, diagnosis in enumerate(diagnoses, 1):
        suffix = f"_{number}" if len(diagnoses) > 1 else ""
        if diagnosis.uniform is None and diagnosis.heads:  # a sweep would have too many
            figures[f"heads_by_layer{suffix}"] = heads_by_layer(diagnosis)
        if diagnosis.scales is not None and np.ptp(_scales_at_end(diagnosis)) > 0:
            figures[f"scale_against_entropy{suffix}"] = scale_against_entropy(diagnosis)
    return figures


@draw.register
def _(diagnosis: Diagnosis) -> Figure:
    return loss_and_entropy([diagnosis])


@draw.register
def _(diagnoses: Diagnoses) -> Figure:
    return loss_and_entropy(diagnoses)


def loss_and_entropy(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Loss above entropy by position, with their knees. (Wang 2024, Figures 1, 2 and 4)"""
    with mpl.rc_context(STYLE):
        panels = 2 if any(diagnosis.heads for diagnosis in diagnoses) else 1
        figure = Figure(figsize=(7.5, 3.1 * panels), layout="constrained")
        above, *below = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
        for diagnosis, color in zip(diagnoses, _model_colors(diagnoses), strict=True):
            curves = diagnosis.curves
            drawn = [(above, diagnosis.loss_knee, curves.loss, diagnosis.smooth_loss)]
            if diagnosis.heads:
                drawn.append(
                    (below[0], diagnosis.entropy_knee, curves.entropy, diagnosis.smooth_entropy)
                )
            for axes, knee, raw, values in drawn:
                if len(diagnoses) <= 2:
                    axes.plot(curves.positions, raw, color=color, lw=0.5, alpha=0.35)
                axes.plot(curves.positions, values, color=color, lw=1.8, label=diagnosis.label)
                if knee is not None:
                    height = float(np.interp(knee, curves.positions, values))
                    axes.plot(knee, height, "o", ms=6, mfc="white", mec=color, mew=1.6, zorder=5)
        first = diagnoses[0].curves
        for axes in below:
            (bound,) = _draw_bound(axes, first.positions)
            windowed = any(diagnosis.curves.windowed for diagnosis in diagnoses)
            mean = "mean of heads" + " without a window" * windowed
            axes.set_ylabel(f"entropy (nats, {mean})")
            axes.legend([bound], [BOUND], loc="lower right", fontsize=9)
        for axes in (above, *below):
            mark_train_length(axes, {diagnosis.train_length for diagnosis in diagnoses})
            set_position_axis(axes, first.length)
        above.set_ylabel("loss (nats per token)")
        (above, *below)[-1].set_xlabel("position (tokens); a ring marks the knee")
        figure.legend(
            *above.get_legend_handles_labels(), loc="outside upper left", fontsize=9, ncols=4
        )
    return figure


def _draw_bound(axes: Axes, positions: np.ndarray) -> list[Any]:
    """ln n, the entropy of uniform attention to n keys, which no head exceeds."""
    return axes.plot(positions, np.log(positions), color=INK, lw=1.0, ls="--", zorder=3)


def entropy_of_heads(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Every head's entropy, one panel per model, colored by depth. (Wang 2024, Figure 3)"""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.2 + 2.4 * len(diagnoses)), layout="constrained")
        panels = figure.subplots(len(diagnoses), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, diagnosis in zip(panels, diagnoses, strict=True):
            curves = diagnosis.curves
            depth_color = mpl.colormaps["viridis"].resampled(len(curves.heads))
            for order, table in enumerate(curves.heads.values()):
                axes.plot(curves.positions, table.T, color=depth_color(order), lw=0.7, alpha=0.8)
            (bound,) = _draw_bound(axes, curves.positions)
            axes.set_title(diagnosis.label, loc="left")
            axes.set_ylabel("entropy (nats)")
            mark_train_length(axes, {diagnosis.train_length})
            set_position_axis(axes, curves.length)
        panels[-1].set_xlabel("position (tokens)")
        figure.legend([bound], [BOUND], loc="outside upper right", fontsize=9)
        last = max(len(diagnosis.curves.heads) for diagnosis in diagnoses) - 1
        shades = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, last), "viridis")
        ticks = sorted({0, last // 2, last})
        figure.colorbar(
            shades, ax=list(panels), label="attention layer", ticks=ticks, fraction=0.03, pad=0.02
        )
    return figure


def heads_by_layer(diagnosis: Diagnosis) -> Figure:
    """All heads and the bound ln n, one panel per layer; distracted heads in orange.

    (Wang 2024, Figure 10)
    """
    curves = diagnosis.curves
    columns = min(4, len(curves.heads))
    rows = -(-len(curves.heads) // columns)
    distracted = set(diagnosis.distracted_heads)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * columns + 0.6, 1.9 * rows + 0.9), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, (layer, table) in zip(panels, curves.heads.items(), strict=False):
            for head, values in enumerate(table):
                color = COLORS[1] if (layer, head) in distracted else COLORS[0]
                axes.plot(curves.positions, values, color=color, lw=0.8, alpha=0.9)
            (bound,) = _draw_bound(axes, curves.positions)
            axes.set_title(f"layer {layer}", loc="left", fontsize=9)
            mark_train_length(axes, {diagnosis.train_length}, label=False)
            set_position_axis(axes, curves.length, ticks=4)
        hide_unused_panels(panels, len(curves.heads), columns)
        figure.supxlabel("position (tokens)", fontsize=10)
        figure.supylabel("entropy (nats)", fontsize=10)
        title = "no head is distracted"
        if distracted:
            title = f"{len(distracted)} distracted heads in orange"
        figure.suptitle(f"{diagnosis.label}: {title}", fontsize=11)
        figure.legend([bound], [BOUND], loc="outside lower right", fontsize=9)
    return figure


def scale_against_entropy(diagnosis: Diagnosis) -> Figure:
    """λ̂ of a head against its entropy at the end, layer by layer. (Wang 2024, Figure 5)"""
    curves, scales = diagnosis.curves, diagnosis.scales
    assert scales is not None
    last = curves.positions > curves.positions[-1] * 7 / 8
    columns = min(4, len(scales.layers))
    rows = -(-len(scales.layers) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.4 * columns + 0.6, 2.1 * rows + 0.9), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        values = _scales_at_end(diagnosis)
        for axes, layer, row in zip(panels, scales.layers, values, strict=False):
            entropy = curves.heads[layer][:, last].mean(1)
            row = row[: len(entropy)]  # the table is as wide as the widest layer
            r = np.corrcoef(entropy, row)[0, 1] if np.ptp(row) > 0 else np.nan
            axes.scatter(entropy, row, s=18, color=COLORS[0], alpha=0.85, lw=0)
            axes.set_title(f"layer {layer}   r = {r:.2f}", loc="left", fontsize=9)
        hide_unused_panels(panels, len(scales.layers), columns)
        figure.supxlabel("entropy at the end (nats)", fontsize=10)
        figure.supylabel("scale λ̂", fontsize=10)
        figure.suptitle(diagnosis.label, fontsize=11)
    return figure


def _scales_at_end(diagnosis: Diagnosis) -> np.ndarray:
    """λ̂ of each head [layers, heads] where the curves end: it may grow with the visible keys."""
    scales = diagnosis.scales
    assert scales is not None
    return scales.at(scales.base.new_tensor(diagnosis.curves.length)).detach().numpy()


def _model_colors(diagnoses: Sequence[Diagnosis]) -> list[Any]:
    """A color map for a sweep of scales, distinct colors for models."""
    count = len(diagnoses)
    if count > 1 and all(diagnosis.uniform is not None for diagnosis in diagnoses):
        return [mpl.colormaps["viridis"](0.9 * i / (count - 1)) for i in range(count)]
    return [COLORS[i % len(COLORS)] for i in range(count)]


def loss_curves(
    curves: Mapping[str, np.ndarray], train_length: int, title: str, *, smoothing: int = 0
) -> Figure:
    """Loss by position under each name, smoothed over so many tokens (0: an eighth of the train
    length)."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        styles = line_styles([COLORS[1], COLORS[0], *COLORS[2:]])
        for (name, curve), line_style in zip(curves.items(), styles, strict=False):
            positions = np.arange(1, len(curve) + 1)
            smooth = running_mean(curve, smoothing or train_length // 8)
            axes.plot(positions, smooth, lw=1.8, label=name, **line_style)
        mark_train_length(axes, {train_length})
        set_position_axis(axes, len(curve) + 1)
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("loss (nats)")
        outside = len(curves) > 4  # a long legend goes beside the figure
        if outside:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        else:
            axes.legend(loc="best")
        axes.set_title(title, loc="left")
    return figure


def layer_costs(costs: Sequence[Mapping[str, float]], global_layers: Sequence[int]) -> Figure:
    """What a window, and dropped rotation, costs in each layer; the chosen layers are marked."""
    panels = (("retrieval", "repeated tokens (nats)"), ("kl", "KL of the output (nats)"))
    layers = [int(cost["layer"]) for cost in costs]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(5.4, 0.28 * len(layers) + 2), 4.6), layout="constrained")
        for axes, (measure, label) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
            for layer in global_layers:
                axes.axvspan(layer - 0.5, layer + 0.5, color=GRAY, alpha=0.35, lw=0, zorder=0)
            for change, offset, color in (
                ("window", -0.2, COLORS[0]),
                ("rotation", 0.2, COLORS[1]),
            ):
                heights = [cost[f"{change}_{measure}"] for cost in costs]
                places = [layer + offset for layer in layers]
                name = "a window" if change == "window" else "no rotation"
                axes.bar(places, heights, width=0.4, color=color, label=name)
            axes.axhline(0, color=INK, lw=0.8)
            axes.set_ylabel(label)
        axes.set_xlabel("layer")
        axes.set_xticks(layers)
        figure.axes[0].legend(loc="upper left")
        figure.axes[0].set_title("cost of changing one layer; gray: chosen as global", loc="left")
    return figure


def running_mean(curve: np.ndarray, width: int) -> np.ndarray:
    """The mean over `width` positions around each position, over fewer at the ends."""
    ones = np.ones(max(1, min(width, len(curve))))
    return np.convolve(curve, ones, "same") / np.convolve(np.ones_like(curve), ones, "same")


def method_losses(cells: Sequence[Cell]) -> Figure:
    """Loss by position under each method of a study, averaged over seeds.

    One row per model, one column per target. (Wang 2024, Figures 2 and 4)
    """
    shown = without_variants(cells)
    models = list(dict.fromkeys(cell["model"] for cell in shown))
    factors = sorted({cell["factor"] for cell in shown} - {1}) or [1]
    methods = list(dict.fromkeys(cell["method"] for cell in shown))
    styles = dict(
        zip(methods, cycle([{"color": INK, "ls": "-"}, *line_styles(COLORS)]), strict=False)
    )
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(3.4 * len(factors) + 0.6, 2.7 * len(models) + 0.6), layout="constrained"
        )
        same_length = len({cell["train_length"] for cell in shown}) == 1
        grid = figure.subplots(
            len(models),
            len(factors),
            sharex="all" if same_length else "row",
            sharey="row",
            squeeze=False,
        )
        for panels, model in zip(grid, models, strict=True):
            of_model = [cell for cell in shown if cell["model"] == model]
            for axes, factor in zip(panels, factors, strict=True):
                _plot_methods(axes, of_model, factor, styles)
                length = of_model[0]["train_length"]
                mark_train_length(axes, {length}, label=factor == factors[0])
            panels[0].set_ylabel("loss (nats)")
        for axes in grid[-1]:
            axes.set_xlabel("position (tokens)")
        lines = [mpl.lines.Line2D([], [], lw=1.8, **line_style) for line_style in styles.values()]
        labels = ["as trained" if method == "none" else method for method in methods]
        # Names of variants are long: one per row.
        columns = 1 if any(":" in method for method in methods) else len(methods)
        figure.legend(lines, labels, loc="outside upper left", ncols=columns, fontsize=9)
    return figure


def _plot_methods(
    axes: Axes, cells: Sequence[Cell], factor: int, styles: Mapping[str, dict[str, Any]]
) -> None:
    """The loss of one model under each method, for one factor and without extension."""
    for method, line_style in styles.items():
        group = [
            cell for cell in cells if cell["method"] == method and cell["factor"] in (1, factor)
        ]
        if group:
            loss = np.mean([next(iter(cell["loss"].values())) for cell in group], axis=0)
            axes.plot(group[0]["positions"], running_mean(loss, 5), lw=1.5, **line_style)
    model, length, positions = (cells[0][key] for key in ("model", "train_length", "positions"))
    axes.axvspan(length, factor * length, color=GRAY, alpha=0.15, lw=0)
    axes.set_title(f"{model}, to {factor}×" if factor > 1 else model, loc="left")
    set_position_axis(axes, round(positions[-1] + positions[0]))  # these are bin centers


def without_variants(cells: Sequence[Cell]) -> Sequence[Cell]:
    """Cells without variants of a method, which differ too little for a figure.

    All cells, if only variants were fitted.
    """
    plain = [cell for cell in cells if ":" not in cell["method"]]
    return plain if any(cell["method"] != "none" for cell in plain) else cells


def best_scales(grids: Sequence[dict[str, Any]]) -> Figure:
    """The best λ̂ by position and the fit 1 + slope · ln s, s in train lengths.

    (Wang 2024, Figure 7)
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for number, grid in enumerate(grids):
            positions, color = np.array(grid["positions"]), COLORS[number % len(COLORS)]
            # Positions are bin centers over eight train lengths.
            s = 8 * positions / (positions[-1] + positions[0])
            beyond = s >= 1
            fit = f"1 + {grid['slope']:.3f}·ln s"
            fit += "" if grid["r2"] is None else f", R² {grid['r2']:.3f}"
            label = f"{grid['model']}, {grid['checkpoint']}: {fit}"
            axes.plot(s, grid["best"], "o", ms=3.5, color=color, alpha=0.7, mew=0)
            law = 1 + grid["slope"] * np.log(s[beyond])
            axes.plot(s[beyond], law, color=color, lw=1.8, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.25, 8.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
        axes.axvline(1, color=INK, lw=0.8, ls="--", zorder=0)
        axes.set_xlabel("position, in train lengths")
        axes.set_ylabel("best λ̂")
        # The opaque frame covers the dashed line.
        axes.legend(loc="upper left", fontsize=9, frameon=True, edgecolor="none", framealpha=1)
    return figure


def training_loss(metrics: Sequence[dict[str, Any]], title: str) -> Figure:
    """Training loss by tokens seen, raw and smoothed."""
    tokens = np.array([entry["tokens"] for entry in metrics]) / 1e6
    loss = np.array([entry["loss"] for entry in metrics])
    smooth = running_mean(loss, len(loss) // 50)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(tokens, loss, color=COLORS[0], lw=0.5, alpha=0.35)
        axes.plot(tokens, smooth, color=COLORS[0], lw=1.8)
        axes.set_xlim(0, tokens[-1])
        low, high = smooth.min(), np.quantile(smooth, 0.98)
        axes.set_ylim(low - 0.1, max(high, low + 0.1) + 0.1)
        axes.set_xlabel("tokens (millions)")
        axes.set_ylabel("training loss (nats)")
        axes.set_title(title, loc="left")
    return figure


def evaluation_figures(result: EvalResult) -> dict[str, Figure]:
    """Every figure that an evaluation has the scores for, by file name."""
    scores = {result.model: result.scores}
    if result.baseline:
        scores[result.baseline] = result.baseline_scores
    short = {name: "/".join(Path(name).parts[-2:]) for name in scores}
    if len(set(short.values())) < len(short):
        short = {name: name for name in scores}
    models = {short[name]: of_model for name, of_model in scores.items()}
    metrics = {score.metric for score in result.scores}
    figures = {}
    if "ppl" in metrics:
        figures["perplexity"] = perplexity_by_length(models, result.train_length)
    if "passkey_at_depth" in metrics:
        figures["passkey"] = passkey_heatmap(models, result.train_length)
    return figures


@draw.register
def _(result: EvalResult) -> Figure:
    for figure in evaluation_figures(result).values():
        return figure
    raise FarspanError(
        f"suite {result.suite} has no figure; suites with perplexity or passkeys have one"
    )


def perplexity_by_length(models: Mapping[str, Sequence[Score]], train_length: int | None) -> Figure:
    """Perplexity by length with its interval, and loss by position where it was measured."""
    has_loss = any(score.metric == "loss" for scores in models.values() for score in scores)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5 if has_loss else 5.5, 3.9), layout="constrained")
        panels = figure.subplots(1, 2 if has_loss else 1, squeeze=False)[0]
        for metric, axes in zip(("ppl", "loss"), panels, strict=False):
            longest = _plot_scores(axes, models, metric)
            set_position_axis(axes, longest)
            if train_length and train_length < longest:
                mark_train_length(axes, {train_length})
        panels[0].set_xlim(0, longest * 1.04)
        low, high = panels[0].get_ylim()
        if not 0 < low < high < 5 * low:  # over a narrower range, a log axis shows too few ticks
            panels[0].set_yscale("log")
            panels[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            panels[0].yaxis.set_minor_formatter(FuncFormatter(minor_tick_label))
        panels[0].set_xlabel("window length (tokens)")
        panels[0].set_ylabel("perplexity")
        if has_loss:
            panels[1].set_xlabel("position (tokens)")
            panels[1].set_ylabel("loss (nats per token)")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper left", fontsize=9, ncols=2
        )
    return figure


def _plot_scores(axes: Axes, models: Mapping[str, Sequence[Score]], metric: str) -> int:
    """One line per model and task with its interval; returns the longest length."""
    longest = 0
    for (model, scores), color in zip(models.items(), cycle(COLORS), strict=False):
        of_metric = [score for score in scores if score.metric == metric]
        tasks = dict.fromkeys(score.tags["task"] for score in of_metric)
        for task, dashes in zip(tasks, ("-", "--", ":", "-.") * len(scores), strict=False):
            of_task = [score for score in of_metric if score.tags["task"] == task]
            of_task.sort(key=lambda score: score.length)  # runs may share a baseline
            x, values, low, high = zip(
                *((score.length, score.value, score.low, score.high) for score in of_task),
                strict=True,
            )
            marker = "o" if metric == "ppl" else ""
            axes.plot(
                x,
                values,
                color=color,
                ls=dashes,
                marker=marker,
                lw=1.8,
                ms=5,
                label=f"{model}, {task}",
            )
            axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
            if metric == "ppl":  # a band over a single length would have no width
                axes.vlines(x, low, high, color=color, lw=3, alpha=0.35)
            longest = max(longest, *x)
    return longest


def passkey_heatmap(models: Mapping[str, Sequence[Score]], train_length: int | None) -> Figure:
    """Passkey accuracy by length and depth, one panel per model. (Wang 2024, Figures 6, 8, 9)"""
    with mpl.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        columns = 1 if len(models) <= 2 else 3
        rows = -(-len(models) // columns)
        width, height = (7.5, 2.9) if columns == 1 else (4.2, 2.6)
        figure = Figure(figsize=(width * columns, 0.9 + height * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
        hide_unused_panels(panels.ravel(), len(models), columns)
        for axes, (model, scores) in zip(panels.flat, models.items(), strict=False):
            at_depth = [score for score in scores if score.metric == "passkey_at_depth"]
            lengths = sorted({score.length for score in at_depth})
            image = _draw_heatmap(axes, at_depth, lengths)
            training = {
                "yes": "trained on passkey documents",
                "no": "never trained on passkey documents",
            }.get(at_depth[0].tags["trained_on_passkeys"], "trained on passkey documents: unknown")
            title = f"{model}  ({training})" if columns == 1 else f"{model}\n{training}"
            axes.set_title(title, loc="left", fontsize=10)
            inside = sum(length <= (train_length or 0) for length in lengths)
            has_line = 0 < inside < len(lengths)
            if has_line:
                axes.axvline(inside - 0.5, color="white", lw=3)
                axes.axvline(inside - 0.5, color=INK, lw=1, ls="--")
        figure.supylabel("depth of the key", fontsize=10)
        label = "length (tokens)"
        if has_line:
            label += f"; trained on {train_length:,} up to the line"
        figure.supxlabel(label, fontsize=10)
        figure.colorbar(image, ax=panels, label="accuracy", fraction=0.03, pad=0.02, aspect=30)
    return figure


def _draw_heatmap(axes: Axes, scores: Sequence[Score], lengths: Sequence[int]) -> Any:
    """The accuracies of one model as an image with a number in each cell."""
    depths = sorted({score.tags["depth"] for score in scores})
    accuracies = np.full((len(depths), len(lengths)), np.nan)
    for score in scores:
        row, column = depths.index(score.tags["depth"]), lengths.index(score.length)
        accuracies[row, column] = score.value
    image = axes.imshow(accuracies, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    number_cells(axes, accuracies, most=1, digits=1)
    axes.set_xticks(
        range(len(lengths)),
        [f"{length:,}" for length in lengths],
        rotation=45 * (len(lengths) > 8),
    )
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xticks(np.arange(0.5, len(lengths) - 1), minor=True)
    axes.set_yticks(np.arange(0.5, len(depths) - 1), minor=True)
    axes.grid(which="minor", color="white", lw=1.2)
    axes.tick_params(which="both", length=0)
    return image
