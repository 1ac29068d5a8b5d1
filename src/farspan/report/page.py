"""Records of runs as one HTML page that needs no network: summary, interactive charts and tables.

Plotly's script is in the page once, compressed; the rest is plain HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from farspan.evals.results import stored_scores, without_repeated_means
from farspan.lengths import doublings
from farspan.record import format_number
from farspan.report.comparison import group_label
from farspan.report.elements import (
    Trace,
    grid,
    heads_grid,
    length_axis,
    line,
    log_axis,
    plot,
    position_axis,
    ring,
    side_by_side,
    table,
)
from farspan.report.figures import running_mean, without_variants
from farspan.report.samples import samples_table
from farspan.report.summary import gate_list, summary_cards

PAGE = Path(__file__).parent.parent / "assets" / "report.html"

Record = Mapping[str, Any]
Colors = dict[str, int]  # model -> the number of its color, the same in every section


@dataclass(frozen=True, eq=False)
class Run:
    """The record of one run; names are distinct, and those of the model where there is one."""

    name: str
    record: Record
    scales: Mapping[int, Sequence[float]] = field(
        default_factory=dict
    )  # of a patch at its target: layer -> λ̂ per head
    metrics: Sequence[Record] = ()  # of a training run, step by step
    samples: Sequence[Record] = ()  # of an evaluation: prompts with their answers
    folder: str = ""


def page(runs: Sequence[Run], packed_script: str) -> str:
    """The whole page; the script is plotly's, packed by `samples.compress`."""
    parts: list[str] = []
    contents: list[tuple[str, str]] = []
    if cards := summary_cards([(run.name, run.record) for run in runs]):
        parts.append(_section("Summary", [cards], contents))
    colors: Colors = {}
    for command, (title, draw) in SECTIONS.items():
        if of_command := [run for run in runs if run.record["command"] == command]:
            parts.append(_section(title, draw(of_command, colors), contents))
    parts.append(_section("Runs", [_runs_table(runs)], contents))
    links = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in contents)
    nav = f'<nav aria-label="Contents"><ul>{links}</ul></nav>'
    before, after = PAGE.read_text(encoding="utf-8").split("{parts}")
    after = after.replace("{plotly}", packed_script)
    return before + "\n".join([nav, "<main>", *parts, "</main>"]) + after


def _section(title: str, content: Iterable[str], contents: list[tuple[str, str]]) -> str:
    """A part of the page under a heading, which is added to the contents."""
    anchor = title.lower().replace(" ", "-")
    contents.append((anchor, title))
    return f'<section id="{anchor}"><h2>{title}</h2>\n' + "\n".join(content) + "</section>"


def _runs_table(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        environment = run.record.get("environment") or {}
        packages = environment.get("packages") or {}
        rows.append(
            [
                run.name,
                run.record["command"],
                run.folder,
                str(run.record.get("when", "")).replace("T", " ")[:16],
                environment.get("device", ""),
                ", ".join(f"{name} {version}" for name, version in packages.items()),
            ]
        )
    return table(["run", "command", "folder", "date (UTC)", "device", "packages"], rows, "Runs")


def _notes(run: Run) -> Iterator[str]:
    """The notes of a run, each as a paragraph."""
    for note in run.record.get("notes") or ():
        yield f"<p>{html.escape(run.name)}: {html.escape(str(note))}</p>"


def _color_numbers(names: Iterable[str], colors: Colors) -> list[int]:
    """The color of each model of a chart, which it has in other sections too."""
    numbers: list[int] = []
    for name in names:
        key = "/".join(name.split("/")[-2:])
        if colors.get(key) in numbers:  # another model, or another run of this one
            key = f"{name} ({len(numbers)})"
        numbers.append(colors.setdefault(key, len(colors)))
    return numbers


# Sections: one for each command.


def _diagnoses(runs: Sequence[Run], colors: Colors) -> Iterator[str]:
    models = [model for run in runs for model in run.record["models"]]
    numbers = _color_numbers([model["model"] for model in models], colors)
    if len(runs) > 1:  # several runs may have diagnosed the same model
        models = [
            {**model, "model": f"{run.name}: {model['model']}"}
            for run in runs
            for model in run.record["models"]
        ]
    lengths = {model["train_length"] for model in models if model["train_length"]}
    rows = [[model["model"], model["verdict"]] for model in models]
    yield table(["model", "verdict"], rows, "Verdicts")
    for key, title, y in (
        ("loss", "Loss by position", "loss (nats per token)"),
        ("entropy", "Mean attention entropy", "entropy (nats)"),
    ):
        measured = [
            (n, model) for n, model in zip(numbers, models, strict=True) if model[key] is not None
        ]
        lines = [trace for n, model in measured for trace in _curve(model, key, n)]
        if lines:
            note = "a ring marks the knee, where a curve leaves its trend"
            axis = position_axis(max(model["positions"][-1] for _, model in measured))
            yield plot(lines, title, "position (tokens)", y, marks=lengths, note=note, xaxis=axis)
    growths = {}
    for model in models:
        length = model["train_length"]
        if length and model["entropy_by_head"]:
            title = f"{model['model']}: entropy of heads at the end minus at {length:,} tokens"
            growths[title] = {
                int(layer): [
                    curve[-1] - float(np.interp(length, model["positions"], curve))
                    for curve in heads
                ]
                for layer, heads in model["entropy_by_head"].items()
            }
    every = [abs(value) for growth in growths.values() for row in growth.values() for value in row]
    most = max(every, default=0.0)  # one color for one value, in every grid
    yield side_by_side(
        heads_grid(growth, title, "nats", middle=0.0, most=most)
        for title, growth in growths.items()
    )


def _curve(model: Record, key: str, number: int) -> Iterator[Trace]:
    """The smoothed loss or entropy of a diagnosed model, and its knee."""
    positions, curve = model["positions"], _to_floats(model[key])
    if length := model["train_length"]:
        curve = running_mean(curve, sum(position <= length / 8 for position in positions))
    yield line(positions, curve.tolist(), model["model"], number)
    if knee := model[f"{key}_knee"]:
        height = float(np.interp(knee, positions, curve))
        yield ring(knee, height, f"{model['model']}: knee", number)


def _extensions(runs: Sequence[Run], colors: Colors) -> Iterator[str]:
    for run in runs:
        record = run.record
        before, after = record["before"], record["after"]
        length = record["settings"]["train_length"]
        lines = []
        base = record["settings"].get("model") or f"base of {run.name}"
        numbers = _color_numbers([base, run.name], colors)
        curves = record["loss_by_position"].items()
        for number, (name, curve) in zip(numbers, curves, strict=True):
            smooth = running_mean(_to_floats(curve), length // 8)
            step = max(1, len(smooth) // 1024)
            positions = range(1, len(smooth) + 1, step)
            lines.append(line(positions, smooth[::step].tolist(), name, number))
        method = record.get("method") or record["settings"]["method"]
        title = f"{run.name}: loss by position, {method}"
        x, y, axis = "position (tokens)", "loss (nats per token)", position_axis(len(smooth))
        yield plot(lines, title, x, y, marks={length}, xaxis=axis)
        yield from _notes(run)
        yield table(
            ["measure", "before", "after"],
            [[key, f"{before[key]:.3f}", f"{after[key]:.3f}"] for key in before],
            f"{run.name}: before and after",
        )
        if run.scales:
            yield _scales(run)


def _scales(run: Run) -> str:
    """λ̂ of each head, or a sentence if all heads have the same one."""
    values = [value for row in run.scales.values() for value in row]
    if max(values) - min(values) > 5e-4:  # else no digit on the page tells two heads apart
        return heads_grid(run.scales, f"{run.name}: λ̂ of each head at the target", "")
    text = f"λ̂ is {values[0]:.3f} in all {len(values)} heads of {len(run.scales)} layers"
    return f"<p>{html.escape(run.name)}: at the target {text}.</p>"


def _evaluations(runs: Sequence[Run], colors: Colors) -> Iterator[str]:
    """All models in one figure, baselines included."""
    models = scores_by_model(runs)
    numbers = dict(zip(models, _color_numbers(models, colors), strict=True))
    perplexities = [
        score for scores in models.values() for score in scores if score["metric"] == "ppl"
    ]
    settings = [run.record.get("settings") or {} for run in runs]
    lengths = {int(each["train_length"]) for each in settings if each.get("train_length")}
    yield gate_list([(run.name, gate) for run in runs for gate in run.record.get("gates") or ()])
    for run in runs:
        yield from _notes(run)
    for task in dict.fromkeys(score["tags"]["task"] for score in perplexities):
        yield _perplexity(models, task, lengths, numbers)
    yield side_by_side(
        _passkeys(name, at_depth, lengths)
        for name, scores in models.items()
        if (at_depth := [score for score in scores if score["metric"] == "passkey_at_depth"])
    )
    rows = [
        _row(name, score)
        for name, scores in models.items()
        for score in without_repeated_means(scores)
        if not score["tags"].get("detail")
    ]
    header = ["measure", "model", "length", "value", "95% interval", "n"]
    yield table(header, rows, "Scores")
    yield from samples_table({run.name: run.samples for run in runs})


def _perplexity(
    models: Mapping[str, Sequence[Record]], task: str, marks: set[int], numbers: Mapping[str, int]
) -> str:
    lines, plotted, measured = [], [], set()
    for name, scores in models.items():
        of_task = [s for s in scores if s["metric"] == "ppl" and s["tags"]["task"] == task]
        of_task.sort(key=lambda score: score["length"])  # runs may share a baseline
        if of_task:
            values = [score["value"] for score in of_task]
            plotted += values
            # An interval from few windows can be huge; beyond the figure it need not stretch it.
            above = [min(s["high"], 10 * s["value"]) - s["value"] for s in of_task]
            spread = {"type": "data", "symmetric": False, "array": above}
            spread["arrayminus"] = [score["value"] - score["low"] for score in of_task]
            lengths = [score["length"] for score in of_task]
            measured |= {*lengths}
            drawn = {"mode": "lines+markers", "error_y": spread}
            lines.append(line(lengths, values, name, numbers[name], **drawn))
    axes: dict[str, Any] = {"xaxis": length_axis(measured), "yaxis": log_axis(plotted)}
    note = "bars: 95% intervals"
    title, x = f"Perplexity, {task}", "length (tokens)"
    return plot(lines, title, x, "perplexity", marks=marks, note=note, **axes)


def scores_by_model(runs: Sequence[Run]) -> dict[str, list[Record]]:
    """The scores of each run and of each baseline.

    Runs with the same baseline share one entry for it, unless their scores differ.
    """
    return _with_baselines(runs)[0]


def baseline_names(runs: Sequence[Run]) -> dict[str, str]:
    """By run: the name that `scores_by_model` gives its baseline."""
    return _with_baselines(runs)[1]


def _with_baselines(runs: Sequence[Run]) -> tuple[dict[str, list[Record]], dict[str, str]]:
    models = {run.name: stored_scores(run.record["scores"]) for run in runs}
    names: dict[str, str] = {}
    for run in runs:
        if baseline := run.record.get("vs"):
            name, scores = baseline["model"], stored_scores(baseline["scores"])
            known = {_score_key(score): score["value"] for score in models.get(name, ())}
            if any(
                known.get(_score_key(score), score["value"]) != score["value"] for score in scores
            ):
                name, known = f"{name} (baseline of {run.name})", {}
            names[run.name] = name
            models.setdefault(name, []).extend(
                score for score in scores if _score_key(score) not in known
            )
    return models, names


def _score_key(score: Record) -> tuple[Any, ...]:
    tags = score["tags"]
    return (
        score["eval"],
        tags.get("task"),
        score["metric"],
        score["length"],
        tags.get("depth"),
        tags.get("data"),
    )


def _passkeys(name: str, scores: Sequence[Record], train_lengths: set[int]) -> str:
    lengths = sorted({score["length"] for score in scores})
    depths = sorted({score["tags"]["depth"] for score in scores})
    accuracies = {(score["tags"]["depth"], score["length"]): score["value"] for score in scores}
    values = [[accuracies.get((depth, length)) for length in lengths] for depth in depths]
    trained = scores[0]["tags"]["trained_on_passkeys"]
    title = f"{name}: passkey accuracy"
    across, down = [f"{length:,}" for length in lengths], [f"{depth:.0%}" for depth in depths]
    note = f"passkey documents in training: {trained}"
    inside = 0
    if len(train_lengths) == 1:
        (train_length,) = train_lengths
        inside = sum(length <= train_length for length in lengths)
        note += f"; left of the line: within the train length, {train_length:,}"
    options: dict[str, Any] = {"zmin": 0, "zmax": 1, "inside": inside, "note": note}
    return grid(values, across, down, title, "length (tokens)", "depth of the key", **options)


def _row(name: str, score: Record) -> list[str]:
    tags = score["tags"]
    measure = group_label((score["eval"], tags.get("task", ""), score["metric"]))
    data = tags.get("data")
    return [
        f"{measure} ({data})" if data else measure,
        name,
        f"{score['length']:,}",
        format_number(score["value"]),
        f"{format_number(score['low'])}–{format_number(score['high'])}"
        if score["low"] < score["high"]
        else "",
        f"{score['n']:,}",
    ]


def _lab(runs: Sequence[Run], colors: Colors) -> Iterator[str]:
    for run in runs:
        key = "learned" if "learned" in run.record else "learnt"  # in earlier records
        learned, count = int(run.record[key]), int(run.record["models"])
        yield f"<p>{learned} of {count} models learned their task.</p>"
        ranks = [
            [models, rank["encoding"], f"{rank['reciprocal']:.3f}", rank["tasks"]]
            for models, key in (("learned", "ranks"), ("all", "ranks_of_all"))
            for rank in run.record.get(key) or ()  # earlier records rank only those that learned
        ]
        header = ["models", "encoding", "mean reciprocal rank", "tasks"]
        yield table(header, ranks, f"{run.name}: ranks")
        encodings = list(dict.fromkeys(cell["encoding"] for cell in run.record["cells"]))
        kinds: dict[tuple[str, ...], dict[str, list[Record]]] = {}
        for cell in run.record["cells"]:
            kind = (cell["task"], cell["size"], cell["scratchpad"])
            kinds.setdefault(kind, {}).setdefault(cell["encoding"], []).append(cell)
        charts = []
        for (task, size, scratchpad), trained in kinds.items():
            lines = [
                line(*_accuracy(trained[encoding]), encoding, number, mode="lines+markers")
                for number, encoding in enumerate(encodings)
                if encoding in trained
            ]
            longest = max(
                int(length)
                for cells in trained.values()
                for cell in cells
                for length in cell["in_range"]
            )
            pad = "" if scratchpad == "none" else f", scratchpad {scratchpad}"
            title = f"{run.name}: {task}, {size}{pad}"
            axis = {"range": [-0.03, 1.15], "dtick": 0.2}  # with room for the label of the mark
            options: dict[str, Any] = {"marks": {longest}, "marked": "trained up to"}
            charts.append(plot(lines, title, "length", "exact match", yaxis=axis, **options))
        yield side_by_side(charts)


def _accuracy(cells: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Mean exact match of the seeds at each length, for the learning rate that validation chose."""
    rates: dict[float, list[Record]] = {}
    for cell in cells:
        rates.setdefault(cell["lr"], []).append(cell)
    chosen = max(
        rates.values(), key=lambda seeds: float(np.mean([cell["chosen_by"] for cell in seeds]))
    )
    counts = [{**cell["in_range"], **cell["beyond"]} for cell in chosen]
    lengths = sorted(set.intersection(*(set(map(int, by_length)) for by_length in counts)))
    return lengths, [
        float(np.mean([by_length[str(n)][0] / by_length[str(n)][1] for by_length in counts]))
        for n in lengths
    ]


def _studies(runs: Sequence[Run], colors: Colors) -> Iterator[str]:
    """The mean loss of the seeds under every method, for each model, target and text."""
    for run in runs:
        groups: dict[tuple[str, int], dict[str, list[Record]]] = {}
        for cell in without_variants(run.record["cells"]):
            methods = groups.setdefault((cell["model"], cell["factor"]), {})
            methods.setdefault(cell["method"], []).append(cell)
        for (model, factor), methods in groups.items():
            if factor > 1:
                for text in next(iter(methods.values()))[0]["loss"]:
                    title = f"{run.name}: {model} for {factor}×, loss on {text}"
                    yield _method_losses({**groups.get((model, 1), {}), **methods}, text, title)
        if grids := run.record.get("grids"):
            lines = [
                line(
                    grid["positions"],
                    grid["best"],
                    f"{grid['model']}, {grid['checkpoint']}",
                    number,
                    mode="markers",
                )
                for number, grid in enumerate(grids)
            ]
            title = f"{run.name}: the best λ̂ by position"
            ticks = doublings(64, max(grid["positions"][-1] for grid in grids))[:-1]
            yield plot(lines, title, "position (tokens)", "λ̂", xaxis=length_axis(ticks))


def _method_losses(methods: Mapping[str, Sequence[Record]], text: str, title: str) -> str:
    lines = []
    for number, (method, cells) in enumerate(methods.items()):
        mean = np.mean([_to_floats(cell["loss"][text]) for cell in cells], axis=0)
        name = "as trained" if method == "none" else method
        lines.append(line(cells[0]["positions"], mean.tolist(), name, number))
    positions, length = cells[0]["positions"], cells[0]["train_length"]
    x, y, axis = "position (tokens)", "loss (nats per token)", position_axis(positions[-1])
    return plot(lines, title, x, y, marks={length}, xaxis=axis)


def _trainings(runs: Sequence[Run], colors: Colors) -> Iterator[str]:
    lines = []
    for number, run in enumerate(runs):
        steps = [entry["step"] for entry in run.metrics]
        losses = [entry["loss"] for entry in run.metrics]
        lines.append(line(steps, losses, run.name, number))
    yield plot(lines, "Training loss", "step", "loss (nats per token)")


SECTIONS = {
    "diagnose": ("Diagnosis", _diagnoses),
    "extend": ("Extension", _extensions),
    "eval": ("Evaluation", _evaluations),
    "reproduce": ("Reproduction studies", _studies),
    "lab run": ("Lab", _lab),
    "pretrain": ("Training", _trainings),
}


def _to_floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
