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

from farspan.record import brief
from farspan.report.figures import smoothed, without_variants
from farspan.report.style import COLOURS

Record = Mapping[str, Any]
Trace = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """What a run left behind; no two runs have one name."""

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
                run.record.get("model") or (run.record.get("settings") or {}).get("model") or "",
                str(run.record.get("when", "")).replace("T", " ")[:16],
                made.get("device", ""),
                ", ".join(f"{name} {version}" for name, version in (made.get("packages") or {}).items()),
            ]
        )
    return table(["run", "command", "model", "when (UTC)", "on", "with"], rows)


def _notes(run: Run) -> Iterator[str]:
    """What a run said besides its numbers."""
    for note in run.record.get("notes") or ():
        yield f"<p>{html.escape(run.name)}: {html.escape(str(note))}</p>"


# What each command left.


def _diagnoses(runs: Sequence[Run]) -> Iterator[str]:
    found = [model for run in runs for model in run.record["models"]]
    if len(runs) > 1:  # one model may have been read in several
        found = [{**model, "model": f"{run.name}: {model['model']}"} for run in runs for model in run.record["models"]]
    lengths = {model["train_length"] for model in found if model["train_length"]}
    for key, title in (("loss", "Loss by position"), ("entropy", "Mean attention entropy")):
        lines = []
        for number, model in enumerate(found):
            positions, curve = model["positions"], _numbers(model[key])
            if length := model["train_length"]:
                curve = smoothed(curve, sum(place <= length / 8 for place in positions))
            lines.append(line(positions, curve.tolist(), model["model"], number))
            if knee := model[f"{key}_knee"]:
                lines.append(point(knee, float(np.interp(knee, positions, curve)), f"{model['model']}: knee", number))
        yield plot(lines, title, "position (tokens)", "nats", marks=lengths)
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
            smooth = smoothed(_numbers(curve), length // 8)
            step = max(1, len(smooth) // 1024)
            lines.append(line(range(1, len(smooth) + 1, step), smooth[::step].tolist(), name, 1 - number))
        title = f"{run.name}: loss by position, {record.get('method') or record['settings']['method']}"
        yield plot(lines, title, "position (tokens)", "loss (nats)", marks={length})
        yield from _notes(run)
        yield table(["", "before", "after"], [[key, f"{before[key]:.3f}", f"{after[key]:.3f}"] for key in before])
        if run.scales:
            yield heads_grid(run.scales, f"{run.name}: λ̂ of each head at the target", "λ̂")


def _evaluations(runs: Sequence[Run]) -> Iterator[str]:
    """All models in one figure, those that runs set beside theirs too."""
    found = _measured(runs)
    for task in dict.fromkeys(s["tags"]["task"] for scores in found.values() for s in scores if s["metric"] == "ppl"):
        lines, seen = [], []
        for number, (name, scores) in enumerate(found.items()):
            if own := [s for s in scores if s["metric"] == "ppl" and s["tags"]["task"] == task]:
                values = [s["value"] for s in own]
                seen += values
                # An interval of few windows may end anywhere; what leaves the figure anyway need not stretch it.
                above = [min(s["high"], 10 * s["value"]) - s["value"] for s in own]
                spread = {"type": "data", "symmetric": False, "array": above}
                spread["arrayminus"] = [s["value"] - s["low"] for s in own]
                lengths = [s["length"] for s in own]
                lines.append(line(lengths, values, name, number, mode="lines+markers", error_y=spread))
        x, y = {"type": "log", "dtick": math.log10(2)}, {}
        if max(seen) > 5 * min(seen):  # else few ticks of a logarithmic axis, or none, would be in sight
            ticks = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
            y = {"type": "log", "tickvals": ticks, "tickformat": ",d"}
        yield plot(lines, f"Perplexity, {task}", "length (tokens)", "perplexity", xaxis=x, yaxis=y)
    for name, scores in found.items():
        if own := [score for score in scores if score["metric"] == "passkey_at_depth"]:
            yield _passkeys(name, own)
    for run in runs:
        yield from _notes(run)
        for gate in run.record.get("gates") or ():
            yield f"<p>{html.escape(run.name)}: {html.escape(str(gate['told']))}</p>"
    rows = [_row(name, s) for name, scores in found.items() for s in scores if not s["tags"].get("detail")]
    yield table(["run", "eval", "task", "metric", "length", "value", "95% interval", "n", "data"], rows)


def _measured(runs: Sequence[Run]) -> dict[str, list[Record]]:
    """The scores of each run, and of the models that they were set beside: what two runs measured of one is joined,
    unless they disagree."""
    found = {run.name: list(run.record["scores"]) for run in runs}
    for run in runs:
        if base := run.record.get("vs"):
            name = base["model"]
            known = {_place(score): score["value"] for score in found.get(name, ())}
            if any(known.get(_place(score), score["value"]) != score["value"] for score in base["scores"]):
                name, known = f"{name} (beside {run.name})", {}
            found.setdefault(name, []).extend(score for score in base["scores"] if _place(score) not in known)
    return found


def _place(score: Record) -> tuple[Any, ...]:
    """What a score is a score of."""
    tags = score["tags"]
    return score["eval"], tags.get("task"), score["metric"], score["length"], tags.get("depth"), tags.get("data")


def _passkeys(name: str, scores: Sequence[Record]) -> str:
    lengths = sorted({score["length"] for score in scores})
    depths = sorted({score["tags"]["depth"] for score in scores})
    shares = {(score["tags"]["depth"], score["length"]): score["value"] for score in scores}
    values = [[shares.get((depth, length)) for length in lengths] for depth in depths]
    title = f"{name}: passkeys told (passkey documents in training: {scores[0]['tags']['trained_on_passkeys']})"
    across, down = [f"{length:,}" for length in lengths], [f"{depth:.0%}" for depth in depths]
    return grid(values, across, down, title, "length (tokens)", "depth of the key", zmin=0, zmax=1)


def _row(name: str, score: Record) -> list[str]:
    tags, interval = score["tags"], f"{brief(score['low'])}–{brief(score['high'])}"
    what = [score["eval"], tags.get("task", ""), score["metric"], f"{score['length']:,}"]
    return [name, *what, brief(score["value"]), interval, f"{score['n']:,}", tags.get("data", "")]


def _laboratory(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield f"<p>{int(run.record['learnt'])} of {int(run.record['models'])} models learnt their task.</p>"
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
    """For each model, target and text the loss under every method, the mean of its seeds."""
    for run in runs:
        found: dict[tuple[str, int], dict[str, list[Record]]] = {}
        for cell in without_variants(run.record["cells"]):
            found.setdefault((cell["model"], cell["factor"]), {}).setdefault(cell["method"], []).append(cell)
        for (model, factor), fitted in found.items():
            if factor > 1:
                for text in next(iter(fitted.values()))[0]["loss"]:
                    title = f"{run.name}: {model} for {factor}×, loss on {text}"
                    yield _methods({**found.get((model, 1), {}), **fitted}, text, title)
        if grids := run.record.get("grids"):
            lines = [
                line(grid["positions"], grid["best"], f"{grid['model']}, {grid['checkpoint']}", number, mode="markers")
                for number, grid in enumerate(grids)
            ]
            yield plot(lines, f"{run.name}: the best λ̂ by position", "position (tokens)", "λ̂", xaxis={"type": "log"})


def _methods(seeds: Mapping[str, Sequence[Record]], text: str, title: str) -> str:
    lines = []
    for number, (method, cells) in enumerate(seeds.items()):
        mean = np.mean([_numbers(cell["loss"][text]) for cell in cells], axis=0)
        lines.append(line(cells[0]["positions"], mean.tolist(), method, number))
    return plot(lines, title, "position (tokens)", "loss (nats)", marks={cells[0]["train_length"]})


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
    finite = [value if value is not None and math.isfinite(value) else None for value in y]
    named = html.escape(name, quote=False)  # plotly takes tags for its own
    return {"type": "scatter", "mode": "lines", "x": list(x), "y": finite, "name": named, "line": look, **more}


def point(x: float, y: float, name: str, number: int) -> Trace:
    marker = {"color": COLOURS[number % len(COLOURS)], "size": 11, "symbol": "x"}
    named = html.escape(name, quote=False)
    return {"type": "scatter", "mode": "markers", "x": [x], "y": [y], "name": named, "marker": marker}


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
    return _figure(traces, title, {"shapes": ends, "height": height, **axes, **layout})


def grid(values: Any, x: Sequence[str], y: Sequence[str], title: str, across: str, down: str, **look: Any) -> str:
    """Numbers in cells that tell themselves."""
    shown = {"texttemplate": "%{z:.2~f}", "colorscale": "Viridis", "xgap": 2, "ygap": 2, **look}
    trace = {"type": "heatmap", "z": values, "x": list(x), "y": list(y), **shown}
    axes = {
        "xaxis": {"title": {"text": across}, "type": "category"},
        "yaxis": {"title": {"text": down}, "type": "category", "autorange": "reversed"},
    }
    return _figure([trace], title, {"height": 140 + 30 * len(y), **axes})


def heads_grid(values: Mapping[int, Sequence[float]], title: str, unit: str, middle: float | None = None) -> str:
    """A number for each head of each layer; with a middle, coloured by the side of it that the number is on."""
    table = [list(row) for row in values.values()]
    heads = [str(head) for head in range(max(map(len, table)))]
    look: dict[str, Any] = {"colorscale": "YlOrRd", "reversescale": True}
    if middle is not None:
        look = {"colorscale": "RdBu", "zmid": middle}
    bar = {"title": {"text": unit}}
    return grid(table, heads, [str(layer) for layer in values], title, "head", "layer", colorbar=bar, **look)


def _figure(traces: Sequence[Trace], title: str, layout: dict[str, Any]) -> str:
    layout = {"title": {"text": html.escape(title, quote=False)}, **layout}
    drawn = json.dumps({"data": traces, "layout": layout}, allow_nan=False).replace("<", "\\u003c")
    return f'<figure><script type="application/json">{drawn}</script></figure>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    lines = ("<tr>" + "".join(f"<td>{html.escape(str(each))}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


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
  Plotly.newPlot(figure, data, { ...look, ...layout }, { responsive: true, displaylogo: false, showSendToCloud: false })
}
</script>
</body>
</html>
"""
