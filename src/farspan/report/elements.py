"""Elements of the HTML page: charts, heatmaps, tables.

A chart is data for plotly. Colors are names of CSS variables, such as `--series-1`, which the page
resolves for a light or a dark screen.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SERIES = 8  # colors of lines in report.html
NUMBER = re.compile(r"[−+-]?\d[\d,.]*(e[+-]?\d+)?%?([–:] ?.*)?|nan|inf")

Trace = dict[str, Any]


def line(
    x: Sequence[float], y: Sequence[float | None], name: str, number: int, **options: Any
) -> Trace:
    dash = ("solid", "dash", "dot", "dashdot")[number // SERIES % 4]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": [value if value is not None and math.isfinite(value) else None for value in y],
        "name": html.escape(name, quote=False),  # plotly interprets tags
        "line": {"color": series_color(number), "dash": dash, "width": 2},
        **options,
    }


def ring(x: float, y: float, name: str, number: int) -> Trace:
    """A mark on a line, without an entry in the legend."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x],
        "y": [y],
        "name": html.escape(name, quote=False),
        "showlegend": False,
        "marker": {
            "size": 10,
            "color": "--back",
            "line": {"color": series_color(number), "width": 2},
        },
    }


def series_color(number: int) -> str:
    return f"--series-{number % SERIES + 1}"


def plot(
    traces: Sequence[Trace],
    title: str,
    x: str,
    y: str,
    *,
    marks: Iterable[int] = (),
    marked: str = "trained on",
    note: str = "",
    **layout: Any,
) -> str:
    """Lines on one pair of axes, with a labeled vertical line at each train length in `marks`."""
    axes = {
        "xaxis": {"title": {"text": x}, "tickformat": ",d", **layout.pop("xaxis", {})},
        "yaxis": {"title": {"text": y}, "hoverformat": ".3~f", **layout.pop("yaxis", {})},
    }
    log = axes["xaxis"].get("type") == "log"
    shapes = [_vertical_line(mark) for mark in sorted(marks)]
    labels = [
        {
            "text": f"{marked} {shape['x0']:,}",
            "x": math.log10(shape["x0"]) if log else shape["x0"],
            "y": 1,
            "yref": "paper",
            "xanchor": "left",
            "yanchor": "top",
            "showarrow": False,
        }
        for shape in shapes
    ]
    marks_layout = {"shapes": shapes, "annotations": labels}
    return _chart(traces, title, {"height": 400, **marks_layout, **axes, **layout}, note)


def _vertical_line(x: float) -> dict[str, Any]:
    line_style = {"color": "--dim", "dash": "dash", "width": 1}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line_style}


def position_axis(longest: float) -> dict[str, Any]:
    """An axis with about four ticks, at multiples of a power of two."""
    return {"tick0": 0, "dtick": 2 ** math.ceil(math.log2(longest / 6))}


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis, or a linear one over a range in which that would have too few ticks."""
    if max(values) <= 5 * min(values):
        return {}
    digits = (1, 2, 5) if max(values) < 100 * min(values) else (1,)
    ticks = [digit * 10**power for power in range(-3, 16) for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}


def length_axis(lengths: Iterable[int]) -> dict[str, Any]:
    """A logarithmic axis with a tick at each measured length."""
    ticks = sorted(set(lengths))
    return {"type": "log", "tickvals": ticks, "ticktext": [short_length(tick) for tick in ticks]}


def short_length(length: int) -> str:
    """`1024` -> `1K`, for the ticks of an axis."""
    return f"{length // 1024:,}K" if length >= 1024 and length % 1024 == 0 else f"{length:,}"


def grid(
    values: Any,
    x: Sequence[str],
    y: Sequence[str],
    title: str,
    across: str,
    down: str,
    *,
    inside: int = 0,
    note: str = "",
    **options: Any,
) -> str:
    """A heatmap with its values written into the cells; a line after the first `inside` columns."""
    trace = {
        "type": "heatmap",
        "z": values,
        "x": list(x),
        "y": list(y),
        "texttemplate": "%{z:.2f}",
        "colorscale": [[0, "--pale"], [1, "--cold"]],
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        **options,
    }
    axes = {
        "xaxis": {"title": {"text": across}, "type": "category"},
        "yaxis": {"title": {"text": down}, "type": "category", "autorange": "reversed"},
    }
    shapes = [_vertical_line(inside - 0.5)] if 0 < inside < len(x) else []
    layout = {"height": 110 + 28 * len(y), "shapes": shapes, "showlegend": False, **axes}
    return _chart([trace], title, layout, note)


def heads_grid(
    values: Mapping[int, Sequence[float]],
    title: str,
    unit: str,
    middle: float | None = None,
    most: float | None = None,
) -> str:
    """A heatmap of layers and heads; with `middle`, its colors diverge from that value.

    most: the distance from `middle` with the full color; default: the largest of the values.
    """
    rows = [list(row) for row in values.values()]
    heads = [str(head) for head in range(max(map(len, rows)))]
    options: dict[str, Any] = {"colorscale": [[0, "--pale"], [1, "--warm"]]}
    if middle is not None:
        colors = [[0, "--cold"], [0.5, "--pale"], [1, "--warm"]]
        options = {"colorscale": colors, "zmid": middle}
        if most:
            options |= {"zmin": middle - most, "zmax": middle + most}
    layers = [str(layer) for layer in values]
    return grid(rows, heads, layers, title, "head", "layer", note=unit, **options)


def side_by_side(charts: Iterable[str]) -> str:
    """Charts in two columns where the screen is wide enough."""
    return f'<div class="columns">{"".join(charts)}</div>'


def _chart(traces: Sequence[Trace], title: str, layout: dict[str, Any], note: str) -> str:
    data = json.dumps({"data": traces, "layout": layout}, allow_nan=False).replace("<", "\\u003c")
    small = f" <small>{html.escape(note)}</small>" if note else ""
    return (
        f"<figure><figcaption>{html.escape(title, quote=False)}{small}</figcaption>"
        f'<div class="chart" style="height: {layout["height"]}px"></div>'
        f'<script type="application/json">{data}</script></figure>'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], label: str) -> str:
    """A table that scrolls sideways on a narrow screen; columns of numbers are right-aligned."""
    body = [[str(value) for value in row] for row in rows]
    kinds = [_column_class(column) for column in zip(*body, strict=True)] or [""] * len(header)

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{kind}>{html.escape(value)}</{tag}>"
            for value, kind in zip(values, kinds, strict=True)
        )

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    name = html.escape(label)
    return (
        f'<div class="table" role="region" aria-label="{name}" tabindex="0"><table>'
        f"<thead><tr>{cells('th', header)}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _column_class(column: Sequence[str]) -> str:
    if any(column) and all(not cell or NUMBER.fullmatch(cell) for cell in column):
        return ' class="number"'
    return ' class="text"' if max(map(len, column)) > 40 else ""
