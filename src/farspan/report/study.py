"""What a study found, as tables: loss by length, and beside it what paper A's figures tell of heads and scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

Cell = dict[str, Any]  # one model, method, factor and seed, measured
Table = tuple[list[str], list[list[str]]]  # head, rows


def report(cells: Sequence[Cell], grids: Sequence[dict[str, Any]]) -> str:
    """All tables of a study, as Markdown; of losses, one for each training length that models have."""
    lengths = list(dict.fromkeys(cell["train_length"] for cell in cells))
    parts = []
    for text in cells[0]["loss"]:
        for length in lengths:
            trained = f", trained on {length} tokens" if len(lengths) > 1 else ""
            alike = [cell for cell in cells if cell["train_length"] == length]
            parts.append((f"Loss on {text}, in nats{trained}", losses(alike, text)))
    parts.append(("Scales, knees and entropy", heads(cells)))
    if grids:
        parts.append(("The best λ̂ by position: 1 + slope · ln s", laws(grids)))
    return "\n\n".join(f"## {title}\n\n{markdown(*table)}" for title, table in parts) + "\n"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def losses(cells: Sequence[Cell], text: str) -> Table:
    """Loss at the doublings of the training length, which all cells have in common, and passkeys; seeds averaged, with
    half their range."""
    first = cells[0]
    head = ["model", "method", "for", *map(str, marks_of(first)), "passkey " + "/".join(first["passkey"])]
    rows = []
    for name, group in _grouped(cells):
        at_marks = ([at(cell, cell["loss"][text], mark) for cell in group] for mark in marks_of(group[0]))
        shares = np.mean([list(cell["passkey"].values()) for cell in group], axis=0)
        keys = "/".join(f"{share:.2f}".removeprefix("0") for share in shares)
        rows.append([*name, *(f"{np.mean(values):.2f}{_spread(values)}" for values in at_marks), keys])
    return head, rows


def heads(cells: Sequence[Cell]) -> Table:
    """λ̂ at the target, where loss and entropy leave their trends, mean entropy before the target (paper A, Figures 2
    and 4), and how the entropies of a layer's heads and their λ̂ rank alike (Figure 5)."""
    rows = []
    for name, group in _grouped(cells):
        target = max(group[0]["target"], group[0]["train_length"])
        entropy = [at(cell, cell["entropy"], target) for cell in group]
        tables = [np.array(cell["scales"]) for cell in group if "scales" in cell]
        scales = f"{np.mean(tables):.2f}" if tables else ""
        if tables and np.ptp(tables) > 0:
            scales += f" ({np.min(tables):.2f}–{np.max(tables):.2f})"
        knees = [_knee([cell[knee] for cell in group]) for knee in ("loss_knee", "entropy_knee")]
        rows.append([*name, scales, *knees, f"{np.mean(entropy):.2f}{_spread(entropy)}", _alike(group)])
    return ["model", "method", "for", "λ̂", "loss knee", "entropy knee", "entropy at target", "rank correlation"], rows


def laws(grids: Sequence[dict[str, Any]]) -> Table:
    """The slopes of paper A's Figure 7."""
    rows = []
    for grid in grids:
        low, high = grid["interval"]
        rows.append(
            [grid["model"], grid["checkpoint"], f"{grid['slope']:.3f}", f"{low:.3f}–{high:.3f}", f"{grid['r2']:.3f}"]
        )
    return ["model", "checkpoint", "slope", "95% interval", "R²"], rows


def line_of(cell: Cell) -> str:
    """One cell in one line: loss on the first text, passkeys."""
    loss = next(iter(cell["loss"].values()))
    at_marks = "  ".join(f"{at(cell, loss, mark):.3f}" for mark in marks_of(cell))
    keys = " ".join(f"{share:.2f}" for share in cell["passkey"].values())
    return f"{cell['model']:16} {cell['method']:28} ×{cell['factor']} s{cell['seed']}  {at_marks}   {keys}"


def at(cell: Cell, curve: Sequence[float], mark: int) -> float:
    """The mean of a curve of a cell over the quarter of the training length before a position."""
    return quarter_before(mark, cell["train_length"], cell["positions"], curve)


def quarter_before(mark: int, train_length: int, positions: Sequence[float], curve: Sequence[float]) -> float:
    """The mean of a curve over the quarter of the training length that ends with a position, which is the number of
    tokens that the model has seen there.

    >>> quarter_before(8, 16, [5, 6, 7, 8], [1.0, 2.0, 3.0, 6.0])
    3.0
    """
    places, span = np.array(positions), max(1, train_length // 4)
    near = (places > mark - span) & (places <= mark)
    return float(np.array(curve)[near].mean())


def marks_of(cell: Cell) -> list[int]:
    """Half the training length, and its doublings."""
    length, reach = cell["train_length"], round(max(cell["positions"]))
    return [length // 2, *(length * 2**power for power in range(20) if length * 2**power <= reach + length)]


def _grouped(cells: Sequence[Cell]) -> list[tuple[list[str], list[Cell]]]:
    """Cells that differ in their seed alone, under model, method and factor."""
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["model"], cell["method"], cell["factor"]), []).append(cell)
    return [([model, method, f"{f}×" if f > 1 else ""], group) for (model, method, f), group in groups.items()]


def _spread(values: list[float]) -> str:
    """Half the range over seeds."""
    return f" ± {np.ptp(values) / 2:.2f}" if len(values) > 1 else ""


def _knee(found: list[float | None]) -> str:
    """The middle of the seeds' knees; none where most have none."""
    if sum(knee is None for knee in found) * 2 >= len(found):
        return "none"
    return f"{np.median([knee for knee in found if knee is not None]):.0f}"


def _alike(group: list[Cell]) -> str:
    """Spearman's correlation of λ̂ and entropy within a layer, the mean of layers and seeds; of scales that differ."""
    found = []
    for cell in group:
        for row, scales in enumerate(cell.get("scales", [])):
            entropies = cell["entropy_of_heads"][str(cell["patch"]["scales"]["layers"][row])]
            if np.ptp(scales) > 0 and np.ptp(entropies) > 0:
                found.append(spearmanr(scales, entropies).statistic)
    return f"{np.mean(found):.2f}" if found else ""
