"""The tables of a reproduction study: loss by length, and knees, scales and entropy of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from farspan.diagnosis.curves import mean_before
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
    """Differences in nats with 95% intervals over windows, for every length of the context.

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
        rows.append([*names, *(_difference(losses[context] - before) for context in contexts)])
    return ["model", "method", "for", *contexts], rows


def _difference(values: np.ndarray) -> str:
    """The mean of paired differences, and half of its 95% interval."""
    half = 1.96 * np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return f"{np.mean(values):+.3f} ± {half:.3f}"


def heads_table(cells: Sequence[Cell]) -> Table:
    """λ̂ at the target, knees, mean entropy before the target (Wang 2024, Figures 2 and 4), and the
    rank correlation of entropy and λ̂ over the heads of a layer (Figure 5)."""
    header = [
        "model",
        "method",
        "for",
        "λ̂",
        "loss knee",
        "entropy knee",
        "entropy at target",
        "rank correlation",
    ]
    rows = []
    for names, group in _grouped(cells):
        target = max(group[0]["target"], group[0]["train_length"])
        entropy = [mean_at(cell, cell["entropy"], target) for cell in group]
        tables = [np.array(cell["scales"]) for cell in group if "scales" in cell]
        scales = f"{np.mean(tables):.2f}" if tables else ""
        if tables and np.ptp(tables) > 0:
            scales += f" ({np.min(tables):.2f}–{np.max(tables):.2f})"
        knees = [_knee([cell[key] for cell in group]) for key in ("loss_knee", "entropy_knee")]
        mean_entropy = f"{np.mean(entropy):.2f}{_spread(entropy)}"
        rows.append([*names, scales, *knees, mean_entropy, _rank_correlation(group)])
    return header, rows


def law_table(grids: Sequence[dict[str, Any]]) -> Table:
    """The slopes of Wang 2024, Figure 7."""
    rows = []
    for grid in grids:
        rows.append(
            [
                grid["model"],
                grid["checkpoint"],
                f"{grid['slope']:.3f}",
                "–".join(f"{bound:.3f}" for bound in grid["interval"] or ()) or "one window",
                f"{grid['r2']:.3f}",
            ]
        )
    return ["model", "checkpoint", "slope", "95% interval", "R²"], rows


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
    return f"{np.median([knee for knee in knees if knee is not None]):.0f}"


def _rank_correlation(group: list[Cell]) -> str:
    """Spearman's correlation of λ̂ and entropy within a layer, the mean of layers and seeds.

    Layers whose heads all have the same λ̂ or entropy are left out.
    """
    correlations = []
    for cell in group:
        for row, scales in enumerate(cell.get("scales", [])):
            entropies = cell["entropy_of_heads"][str(cell["patch"]["scales"]["layers"][row])]
            if np.ptp(scales) > 0 and np.ptp(entropies) > 0:
                correlations.append(spearmanr(scales, entropies).statistic)
    return f"{np.mean(correlations):.2f}" if correlations else ""
