"""Records of runs as one HTML page that needs no network: curves that tell their values, grids, tables.

A figure is data for plotly, whose script the page carries once; the rest is a few lines of HTML.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from farspan.report.figures import COLOURS

Record = Mapping[str, Any]
Trace = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """What a run left behind."""

    name: str
    record: Record
    scales: Mapping[int, Sequence[float]] = field(default_factory=dict)  # of a patch at its target, by layer: of heads
    metrics: Sequence[Record] = ()  # of a training, step by step


def page(runs: Sequence[Run], script: str) -> str:
    """The whole page; `script` is plotly's."""
    parts = [_runs(runs)]
    for command, (title, draw) in SECTIONS.items():
        if own := [run for run in runs if run.record["command"] == command]:
            parts += [f"<h2>{title}</h2>", *draw(own)]
    before, after = PAGE.split("{parts}")
    return before.replace("{script}", script) + "\n".join(parts) + after


def _runs(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        made = run.record.get("environment") or {}
        rows.append(
            [
                run.name,
                run.record["command"],
                str(run.record.get("when", "")).replace("T", " ")[:16],
                made.get("device", ""),
                ", ".join(f"{name} {version}" for name, version in (made.get("packages") or {}).items()),
            ]
        )
    return table(["run", "command", "when (UTC)", "on", "with"], rows)


# What each command left.


def _diagnoses(runs: Sequence[Run]) -> Iterator[str]:
    found = [model for run in runs for model in run.record["models"]]
    lengths = {model["train_length"] for model in found if model["train_length"]}
    for key, title, unit in (("loss", "Loss by position", "nats"), ("entropy", "Mean attention entropy", "nats")):
        lines = []
        for number, model in enumerate(found):
            positions, curve = model["positions"], _numbers(model[key])
            if length := model["train_length"]:
                curve = _smooth(curve, max(1, sum(place <= length / 8 for place in positions)))
            lines.append(line(positions, curve.tolist(), model["model"], number))
            if knee := model[f"{key}_knee"]:
                lines.append(point(knee, float(np.interp(knee, positions, curve)), f"{model['model']}: knee", number))
        yield plot(lines, title, "position (tokens)", unit, marks=lengths)
    yield table(["model", "verdict"], [[model["model"], model["verdict"]] for model in found])
    for model in found:
        if length := model["train_length"]:
            grown = {
                int(layer): [curve[-1] - float(np.interp(length, model["positions"], curve)) for curve in heads]
                for layer, heads in model["entropy_by_head"].items()
            }
            title = f"{model['model']}: entropy of heads at the end, less that at {length:,} tokens"
            yield heads_grid(grown, title, "nats", middle=0.0)


def _extensions(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        record = run.record
        before, after, length = record["before"], record["after"], record["settings"]["train_length"]
        lines = []
        for number, (name, curve) in enumerate(record["loss_by_position"].items()):
            smooth = _smooth(_numbers(curve), max(1, length // 8))
            step = max(1, len(smooth) // 1024)
            lines.append(line(range(1, len(smooth) + 1, step), smooth[::step].tolist(), name, 1 - number))
        title = f"{run.name}: loss by position, {record['settings']['method']}"
        yield plot(lines, title, "position (tokens)", "loss (nats)", marks={length})
        yield table(["", "before", "after"], [[key, f"{before[key]:.3f}", f"{after[key]:.3f}"] for key in before])
        if run.scales:
            yield heads_grid(run.scales, f"{run.name}: λ̂ of each head at the target", "λ̂", middle=1.0)


def _evaluations(runs: Sequence[Run]) -> Iterator[str]:
    """All models in one figure, those that runs set beside theirs too."""
    found: dict[str, list[Record]] = {}
    for run in runs:
        found.setdefault(run.name, []).extend(run.record["scores"])
        if base := run.record.get("vs"):
            found[base["model"]] = base["scores"]
    for task in dict.fromkeys(s["tags"]["task"] for scores in found.values() for s in scores if s["metric"] == "ppl"):
        lines = []
        for number, (name, scores) in enumerate(found.items()):
            if own := [s for s in scores if s["metric"] == "ppl" and s["tags"]["task"] == task]:
                above, below = [s["high"] - s["value"] for s in own], [s["value"] - s["low"] for s in own]
                spread = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
                lengths, values = [s["length"] for s in own], [s["value"] for s in own]
                lines.append(line(lengths, values, name, number, mode="lines+markers", error_y=spread))
        ticks = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
        x, y = {"type": "log", "dtick": math.log10(2)}, {"type": "log", "tickvals": ticks, "tickformat": ",d"}
        yield plot(lines, f"Perplexity, {task}", "length (tokens)", "perplexity", xaxis=x, yaxis=y)
    for name, scores in found.items():
        if own := [score for score in scores if score["metric"] == "passkey_at_depth"]:
            yield _passkeys(name, own)
    rows = [_told(name, s) for name, scores in found.items() for s in scores if not s["tags"].get("detail")]
    yield table(["model", "task", "metric", "length", "value", "95% interval", "n"], rows)


def _passkeys(name: str, scores: Sequence[Record]) -> str:
    lengths = sorted({score["length"] for score in scores})
    depths = sorted({score["tags"]["depth"] for score in scores})
    shares = {(score["tags"]["depth"], score["length"]): score["value"] for score in scores}
    values = [[shares.get((depth, length)) for length in lengths] for depth in depths]
    title = f"{name}: passkeys told (passkey documents in training: {scores[0]['tags']['trained_on_passkeys']})"
    across, down = [f"{length:,}" for length in lengths], [f"{depth:.0%}" for depth in depths]
    return grid(values, across, down, title, "length (tokens)", "depth of the key", zmin=0, zmax=1)


def _told(name: str, score: Record) -> list[str]:
    interval = f"{score['low']:,.2f}–{score['high']:,.2f}"
    task, value = score["tags"].get("task", ""), f"{score['value']:,.2f}"
    return [name, task, score["metric"], f"{score['length']:,}", value, interval, f"{score['n']:,}"]


def _laboratory(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield f"<p>{run.record['learnt']} of {run.record['models']} models learnt their task.</p>"
        ranks = [[rank["encoding"], f"{rank['reciprocal']:.3f}", rank["tasks"]] for rank in run.record["ranks"]]
        yield table(["encoding", "mean reciprocal rank", "of tasks"], ranks)
        encodings = list(dict.fromkeys(cell["encoding"] for cell in run.record["cells"]))
        kinds: dict[tuple[str, ...], dict[str, list[Record]]] = {}
        for cell in run.record["cells"]:
            kind = (cell["task"], cell["size"], cell["scratchpad"])
            kinds.setdefault(kind, {}).setdefault(cell["encoding"], []).append(cell)
        for (task, size, scratchpad), trained in kinds.items():
            lines = [
                line(*_accuracy(trained[encoding]), encoding, number, mode="lines+markers")
                for number, encoding in enumerate(encodings)
                if encoding in trained
            ]
            longest = max(int(length) for cells in trained.values() for cell in cells for length in cell["in_range"])
            pad = "" if scratchpad == "none" else f", scratchpad {scratchpad}"
            title, axis = f"{run.name}: {task}, {size}{pad}", {"range": [-0.03, 1.03]}
            yield plot(lines, title, "length", "exact match", marks={longest}, yaxis=axis)


def _accuracy(cells: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Exact match at each length, the mean of the seeds, at the learning rate that the held-out examples chose."""
    rates: dict[float, list[Record]] = {}
    for cell in cells:
        rates.setdefault(cell["lr"], []).append(cell)
    chosen = max(rates.values(), key=lambda own: float(np.mean([cell["chosen_by"] for cell in own])))
    counts = [{**cell["in_range"], **cell["beyond"]} for cell in chosen]
    lengths = sorted(set.intersection(*(set(map(int, each)) for each in counts)))
    return lengths, [float(np.mean([each[str(n)][0] / each[str(n)][1] for each in counts])) for n in lengths]


def _studies(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        models: dict[str, list[Record]] = {}
        for cell in run.record["cells"]:
            models.setdefault(cell["model"], []).append(cell)
        for model, cells in models.items():
            for text in cells[0]["loss"]:
                lines = [
                    line(
                        cell["positions"], cell["loss"][text], f"{cell['method']} {cell['factor']}× s{cell['seed']}", n
                    )
                    for n, cell in enumerate(cells)
                ]
                title, marks = f"{run.name}: {model}, loss on {text}", {cells[0]["train_length"]}
                yield plot(lines, title, "position (tokens)", "loss (nats)", marks=marks, height=560)


def _trainings(runs: Sequence[Run]) -> Iterator[str]:
    lines = []
    for number, run in enumerate(runs):
        steps, losses = [each["step"] for each in run.metrics], [each["loss"] for each in run.metrics]
        lines.append(line(steps, losses, run.name, number))
    yield plot(lines, "Loss in training", "step", "loss (nats)")


SECTIONS = {
    "diagnose": ("Where models fail", _diagnoses),
    "extend": ("What extension changed", _extensions),
    "eval": ("Evaluated", _evaluations),
    "reproduce": ("Studies", _studies),
    "lab run": ("The laboratory", _laboratory),
    "pretrain": ("Training", _trainings),
}


# Pieces.


def line(x: Sequence[float], y: Sequence[float | None], name: str, number: int, **more: Any) -> Trace:
    colour = COLOURS[number % len(COLOURS)]
    dash = ("solid", "dash", "dot", "dashdot")[number // len(COLOURS) % 4]
    look = {"color": colour, "dash": dash, "width": 2}
    told = [value if value is not None and math.isfinite(value) else None for value in y]
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": told, "name": name, "line": look, **more}


def point(x: float, y: float, name: str, number: int) -> Trace:
    marker = {"color": COLOURS[number % len(COLOURS)], "size": 11, "symbol": "x"}
    return {"type": "scatter", "mode": "markers", "x": [x], "y": [y], "name": name, "marker": marker}


def plot(
    traces: Sequence[Trace], title: str, x: str, y: str, *, marks: Iterable[int] = (), height: int = 380, **layout: Any
) -> str:
    """Lines over one axis; a dashed line where each of `marks` is, the length that was trained on."""
    ends = [
        {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dash", "width": 1}}
        for at in marks
    ]
    axes = {
        "xaxis": {"title": {"text": x}, "tickformat": ",d", **layout.pop("xaxis", {})},
        "yaxis": {"title": {"text": y}, **layout.pop("yaxis", {})},
    }
    return _figure(traces, {"title": {"text": title}, "shapes": ends, "height": height, **axes, **layout})


def grid(values: Any, x: Sequence[str], y: Sequence[str], title: str, across: str, down: str, **look: Any) -> str:
    """Numbers in cells that tell themselves."""
    shown = {"texttemplate": "%{z:.2~f}", "colorscale": "Viridis", "xgap": 2, "ygap": 2, **look}
    trace = {"type": "heatmap", "z": values, "x": list(x), "y": list(y), **shown}
    axes = {
        "xaxis": {"title": {"text": across}, "type": "category"},
        "yaxis": {"title": {"text": down}, "type": "category", "autorange": "reversed"},
    }
    return _figure([trace], {"title": {"text": title}, "height": 140 + 30 * len(y), **axes})


def heads_grid(values: Mapping[int, Sequence[float]], title: str, unit: str, middle: float) -> str:
    """A number for each head of each layer, coloured by which side of the middle it is on."""
    table = [list(row) for row in values.values()]
    heads = [str(head) for head in range(max(map(len, table)))]
    look = {"colorscale": "RdBu", "zmid": middle, "colorbar": {"title": {"text": unit}}}
    return grid(table, heads, [str(layer) for layer in values], title, "head", "layer", **look)


def _figure(traces: Sequence[Trace], layout: dict[str, Any]) -> str:
    drawn = json.dumps({"data": traces, "layout": layout}, allow_nan=False).replace("</", "<\\/")
    return f'<figure><script type="application/json">{drawn}</script></figure>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    lines = ("<tr>" + "".join(f"<td>{html.escape(str(each))}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _smooth(curve: np.ndarray, width: int) -> np.ndarray:
    """The mean over so many positions around each."""
    ones = np.ones(width)
    return np.convolve(curve, ones, "same") / np.convolve(np.ones_like(curve), ones, "same")


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>farspan</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1.5em }
h1 { font-weight: 600; letter-spacing: -0.02em } h2 { margin-top: 2.2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25em 1.2em .25em 0; vertical-align: top } th { border-bottom: 1px solid #999 }
td:first-child { white-space: nowrap } tbody tr:nth-child(even) { background: #f7f7f7 } figure { margin: 1.5em 0 }
</style>
<script>{script}</script>
</head>
<body>
<h1>farspan</h1>
{parts}
<script>
for (const figure of document.querySelectorAll("figure")) {
  const { data, layout } = JSON.parse(figure.querySelector("script").textContent)
  for (const axis of [layout.xaxis, layout.yaxis]) {
    Object.assign(axis, { gridcolor: "#eee", zeroline: false, automargin: true })
    axis.title.standoff = 14
  }
  Object.assign(layout.title, { x: 0, xref: "paper", font: { size: 16 } })
  const look = { margin: { t: 50, r: 20, b: 40 }, font: { family: "system-ui, sans-serif" }, showlegend: true }
  Plotly.newPlot(figure, data, { ...look, ...layout }, { responsive: true, displaylogo: false })
}
</script>
</body>
</html>
"""
