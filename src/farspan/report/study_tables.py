"""The tables of a reproduction study: loss by length, and knees, scales and entropy of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from farspan.diagnosis.curves import mean_before
from farspan.evals.scores import Score
from farspan.intervals import mean_bound
from farspan.lab.ranking import Table

Cell = dict[str, Any]  # the results of one model, method, factor and seed


def study_report(cells: Sequence[Cell], grids: Sequence[dict[str, Any]]) -> str:
    """All tables of a study as Markdown; one loss table per text and train length."""
    lengths = list(dict.fromkeys(cell["train_length"] for cell in cells))
    parts = []
    for text in cells[0]["loss"]:
        for length in lengths:
            trained = f", trained on {length} tokens" if len(lengths) > 1 else ""
            same_length = [cell for cell in cells if cell["train_length"] == length]
            parts.append((f"Loss on {text}, in nats{trained}", loss_table(same_length, text)))
    for text in cells[0].get("same_tokens", {}):
        title = f"Loss on {text} minus the loss as trained at the train length, on the same tokens"
        parts.append((title, paired_table(cells, text)))
    if any("scores" in cell for cell in cells):
        parts.append(("Benchmarks, in the context of each row", benchmark_table(cells)))
        for name, title in (("longbench", "LongBench"), ("commonsense", "Commonsense")):
            if (by_task := task_table(cells, name))[1]:
                parts.append((f"{title} by task", by_task))
    parts.append(("Scales, knees and entropy", heads_table(cells)))
    if grids:
        parts.append(("The best λ̂ by position: 1 + slope · ln s", law_table(grids)))
    return "\n\n".join(f"## {title}\n\n{markdown(*table)}" for title, table in parts) + "\n"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def loss_table(cells: Sequence[Cell], text: str) -> Table:
    """Loss at doublings of the train length and passkey accuracy: mean of seeds ± half range."""
    first = cells[0]
    header = [
        "model",
        "method",
        "for",
        *map(str, loss_marks(first)),
        "passkey " + "/".join(first["passkey"]),
    ]
    rows = []
    for names, group in _grouped(cells):
        losses = (
            [mean_at(cell, cell["loss"][text], mark) for cell in group]
            for mark in loss_marks(group[0])
        )
        accuracies = np.mean([list(cell["passkey"].values()) for cell in group], axis=0)
        passkeys = "/".join(f"{accuracy:.2f}".removeprefix("0") for accuracy in accuracies)
        columns = (f"{np.mean(values):.2f}{_spread(values)}" for values in losses)
        rows.append([*names, *columns, passkeys])
    return header, rows


def paired_table(cells: Sequence[Cell], text: str) -> Table:
    """Differences in nats with 95% intervals over documents, for every length of the context.

    Cells of earlier releases do not name the document of a window: they have those over windows.

    The loss of the model as trained, with as much context as it was trained on, is subtracted
    window by window. Seeds are averaged first.
    """
    contexts = list(cells[0]["same_tokens"][text])
    base = {
        cell["model"]: np.array(cell["same_tokens"][text][str(cell["train_length"])])
        for cell in cells
        if cell["method"] == "none"
    }
    rows = []
    for names, group in _grouped(cells):
        if (before := base.get(names[0])) is None:
            continue
        losses = {
            context: np.mean([cell["same_tokens"][text][context] for cell in group], axis=0)
            for context in contexts
        }
        documents = group[0].get("documents", {}).get(text)
        differences = (
            paired_difference(losses[context] - before, documents) for context in contexts
        )
        rows.append([*names, *differences])
    return ["model", "method", "for", *contexts], rows


def paired_difference(values: np.ndarray, documents: Sequence[int] | None = None) -> str:
    """The mean of paired differences, and half of its 95% interval, which one value has not."""
    mean = f"{np.mean(values):+.3f}".replace("-", "−")
    bound = mean_bound(values, documents)
    return mean if bound is None else f"{mean} ± {bound:.3f}"


def heads_table(cells: Sequence[Cell]) -> Table:
    """λ̂ at the target, knees, mean entropy before the target (Wang 2024, Figures 2 and 4), and the
    rank correlation of entropy and λ̂ over the heads of a layer (Figure 5); the seconds of fits.

    Earlier cells have no seconds."""
    timed = any("seconds" in cell for cell in cells)
    header = [
        "model",
        "method",
        "for",
        "λ̂",
        "loss knee",
        "entropy knee",
        "entropy at target",
        "rank correlation",
        *["seconds to fit"] * timed,
    ]
    rows = []
    for names, group in _grouped(cells):
        target = max(group[0]["target"], group[0]["train_length"])
        entropy = [mean_at(cell, cell["entropy"], target) for cell in group]
        table = [value for cell in group for row, _ in _heads_by_layer(cell) for value in row]
        scales = f"{np.mean(table):.2f}" if table else ""
        if table and np.ptp(table) > 0:
            scales += f" ({np.min(table):.2f}–{np.max(table):.2f})"
        knees = [_knee([cell[key] for cell in group]) for key in ("loss_knee", "entropy_knee")]
        mean_entropy = f"{np.mean(entropy):.2f}{_spread(entropy)}"
        rows.append(
            [
                *names,
                scales,
                *knees,
                mean_entropy,
                _rank_correlation(group),
                *[_fit_time(group)] * timed,
            ]
        )
    return header, rows


def _fit_time(cells: Sequence[Cell]) -> str:
    times = [cell["seconds"]["fit"] for cell in cells if "fit" in cell.get("seconds", {})]
    return f"{np.mean(times):.3g}" if times else ""


# eval and metric of a score -> its column; numbers are shown in percent, as in Wang 2024
BENCHMARKS = {
    ("passkey", "passkey_mean"): ("passkeys", 100),
    ("longbench", "average"): ("LongBench", 1),
    ("commonsense", "average"): ("commonsense", 100),
}


def benchmark_table(cells: Sequence[Cell]) -> Table:
    """Perplexity at the context of each row and means of its benchmarks (Wang 2024, Table 4)."""
    texts = list(cells[0]["loss"])
    measured = {
        (score["eval"], score["metric"]) for cell in cells for score in cell.get("scores", ())
    }
    columns = {key: column for key, column in BENCHMARKS.items() if key in measured}
    header = ["model", "method", "for", *(f"perplexity, {text}" for text in texts)]
    rows = []
    for names, group in _grouped(cells):
        context = max(group[0]["target"], group[0]["train_length"])
        row = [
            f"{np.exp(np.mean([mean_at(cell, cell['loss'][text], context) for cell in group])):.1f}"
            for text in texts
        ]
        for key, (_, unit) in columns.items():
            values = [unit * score["value"] for score in _scores(group, *key)]
            row.append(f"{np.mean(values):.1f}{_spread(values)}" if values else "")
        rows.append([*names, *row])
    return [*header, *(name for name, _ in columns.values())], rows


def task_table(cells: Sequence[Cell], name: str) -> Table:
    """Each task of LongBench or commonsense and their average (Wang 2024, Tables 3 and 1).

    Commonsense tasks show acc_norm where they have it, and acc elsewhere.
    """
    unit = 100 if name == "commonsense" else 1
    rows: list[list[str]] = []
    tasks: dict[str, list[float]] = {}
    for names, group in _grouped(cells):
        by_task: dict[str, list[float]] = {}
        for cell in group:
            scores = [score for score in cell.get("scores", ()) if score["eval"] == name]
            # acc_norm stands after acc, and replaces it
            values = {score["tags"]["task"]: score["value"] for score in scores}
            for task, value in values.items():
                by_task.setdefault(task, []).append(unit * value)
        if by_task:
            tasks = tasks or by_task
            rows.append([*names, *(f"{np.mean(by_task[task]):.1f}" for task in tasks)])
    return ["model", "method", "for", *tasks], rows


def passkey_scores(cells: Sequence[Cell]) -> dict[str, list[Score]]:
    """The scores of a passkey heatmap for each model and method; of several seeds, the first."""
    heatmaps = {}
    for names, group in _grouped(cells):
        scores = [Score(**score) for score in group[0].get("scores", ())]
        if any(score.metric == "passkey_at_depth" for score in scores):
            heatmaps[" ".join(filter(None, names))] = scores
    return heatmaps


def _scores(group: Sequence[Cell], evaluation: str, metric: str) -> list[Cell]:
    return [
        score
        for cell in group
        for score in cell.get("scores", ())
        if (score["eval"], score["metric"]) == (evaluation, metric)
    ]


def law_table(grids: Sequence[dict[str, Any]]) -> Table:
    """The slopes of Wang 2024, Figure 7; and how many best λ̂ may lie beyond the grid, if any."""
    edges = [at_edge(grid) for grid in grids]
    rows = []
    for grid, edge in zip(grids, edges, strict=True):
        rows.append(
            [
                grid["model"],
                grid["checkpoint"],
                f"{grid['slope']:.3f}",
                "–".join(f"{bound:.3f}" for bound in grid["interval"] or ()) or "one window",
                "none" if grid["r2"] is None else f"{grid['r2']:.3f}",
                *[edge] * any(edges),
            ]
        )
    header = ["model", "checkpoint", "slope", "95% interval", "R²"]
    return [*header, *["on the edge of the grid"] * any(edges)], rows


def at_edge(grid: dict[str, Any]) -> str:
    """How many best λ̂ beyond the train length are the first or the last of the grid: "3 of 56".

    The law is fitted to these positions, and a wider grid may have others."""
    positions, best = np.array(grid["positions"]), np.array(grid["best"])
    beyond = best[8 * positions >= positions[0] + positions[-1]]  # bin centers over 8 train lengths
    count = int(np.isin(beyond, (grid["values"][0], grid["values"][-1])).sum())
    return f"{count} of {len(beyond)}" if count else ""


def summary_line(cell: Cell) -> str:
    """One cell in one line: loss on the first text, and passkey accuracy."""
    loss = next(iter(cell["loss"].values()))
    losses = "  ".join(f"{mean_at(cell, loss, mark):.3f}" for mark in loss_marks(cell))
    passkeys = " ".join(f"{accuracy:.2f}" for accuracy in cell["passkey"].values())
    name = f"{cell['model']:16} {cell['method']:28} ×{cell['factor']} s{cell['seed']}"
    return f"{name}  {losses}   {passkeys}"


def mean_at(cell: Cell, curve: Sequence[float], mark: int) -> float:
    """The mean of a cell's curve over the quarter of the train length before a position."""
    return mean_before(mark, cell["train_length"], cell["positions"], curve)


def loss_marks(cell: Cell) -> list[int]:
    """Half the train length, and its doublings."""
    length, longest = cell["train_length"], round(max(cell["positions"]))
    return [
        length // 2,
        *(length * 2**power for power in range(20) if length * 2**power <= longest + length),
    ]


def _grouped(cells: Sequence[Cell]) -> list[tuple[list[str], list[Cell]]]:
    """Cells that differ only in their seed, with the names of model, method and factor."""
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["model"], cell["method"], cell["factor"]), []).append(cell)
    return [
        ([model, method, f"{factor}×" if factor > 1 else ""], group)
        for (model, method, factor), group in groups.items()
    ]


def _spread(values: list[float]) -> str:
    """Half the range over seeds."""
    return f" ± {np.ptp(values) / 2:.2f}" if len(values) > 1 else ""


def _knee(knees: list[float | None]) -> str:
    """The median knee of the seeds; "none" if at least half of them have none."""
    if sum(knee is None for knee in knees) * 2 >= len(knees):
        return "none"
    return f"{np.median([knee for knee in knees if knee is not None]):,.0f}"


def _rank_correlation(group: list[Cell]) -> str:
    """Spearman's correlation of λ̂ and entropy within a layer, the mean of layers and seeds.

    Layers whose heads all have the same λ̂ or entropy are left out.
    """
    correlations = [
        spearmanr(scales, entropies).statistic
        for cell in group
        for scales, entropies in _heads_by_layer(cell)
        if np.ptp(scales) > 0 and np.ptp(entropies) > 0
    ]
    return f"{np.mean(correlations):.2f}".replace("-", "−") if correlations else ""


def _heads_by_layer(cell: Cell) -> Iterator[tuple[Sequence[float], Sequence[float]]]:
    """λ̂ and entropy of the heads of each scaled layer.

    The table of λ̂ is as wide as the widest layer; a layer with fewer heads uses the first columns.
    """
    if "scales" in cell:
        for layer, row in zip(cell["patch"]["scales"]["layers"], cell["scales"], strict=True):
            entropies = cell["entropy_of_heads"][str(layer)]
            yield row[: len(entropies)], entropies
