"""Draw the figures of the documentation from the records in docs/records: `make figures`.

A folder in docs/records with the results.json of a study becomes a page of docs/results/runs. This
needs no GPU and takes seconds.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image
from readme_figure import loss_and_retrieval

from farspan.attention.scales import Scales
from farspan.diagnosis.curves import Curves
from farspan.diagnosis.knees import KneeRule, smooth
from farspan.diagnosis.result import Diagnosis
from farspan.evals.needle import task_scores
from farspan.evals.scores import Score, wilson
from farspan.files import read_json, write_bytes, write_text
from farspan.lab.ranking import LabEntry, group_entries
from farspan.lab.study import LabCell
from farspan.report.figures import (
    best_scales,
    entropy_of_heads,
    heads_by_layer,
    loss_and_entropy,
    method_losses,
    passkey_heatmap,
    scale_against_entropy,
)
from farspan.report.lab_figures import accuracy_by_length, attention_distance, attention_heads
from farspan.report.study_tables import study_report
from farspan.report.style import COLORS, INK, STYLE, line_styles
from farspan.workflows.lab import accuracy_panels, read_study
from farspan.workflows.report import report

ROOT = Path(__file__).parent.parent
DOCS, RECORDS = ROOT / "docs", ROOT / "docs" / "records"
CONVERTED = "swan:swan.facts=0.25,swan.rotation=none,swan.global_share=0.125"


def records(name: str, group: str = "") -> list[dict[str, Any]]:
    """The lines of a file of docs/records, or those of one group."""
    text = (DOCS / "records" / f"{name}.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if not group or line.get("group") == group]


def swan_cells() -> dict[str, dict[str, Any]]:
    """The model as trained, under YaRN, and converted, with one global layer of eight."""
    cells = {cell["method"]: cell for cell in records("swan-small")}
    return {method: cells[method] for method in ("none", "yarn", CONVERTED)}


def hero(scheme: str) -> Figure:
    labels = ("as trained", "YaRN", "converted by swan")
    cells = dict(zip(labels, swan_cells().values(), strict=True))
    return loss_and_retrieval(cells, "books_val", scheme)


def swan_small() -> Figure:
    """The third training, whose conversion read passkey documents, beside tuned YaRN."""
    first_seed = [cell for cell in records("swan-small-passkeys") if cell["seed"] == 0]
    cells = {cell["method"].split(":")[0]: cell for cell in first_seed}
    labels = {"none": "as trained", "yarn": "YaRN, tuned", "swan+headlog": "swan+headlog"}
    figure = loss_and_retrieval(
        {label: cells[method] for method, label in labels.items()}, "books_val", "light"
    )
    figure.set_facecolor("white")  # for dark pages
    return figure


def pretrained_small() -> Figure:
    """Loss on books and passkeys by length, of every encoding as trained."""
    lines = records("pretrained-small")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for line, style in zip(lines, line_styles(COLORS), strict=False):
            for axes, values in ((left, line["loss"]["books_val"]), (right, line["passkeys"])):
                lengths = list(map(int, values))
                axes.plot(lengths, values.values(), lw=1.6, marker="o", ms=3.5, **style)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("length (tokens)")
            axes.set_xticks([256, 512, 1024, 2048, 4096], ["256", "512", "1K", "2K", "4K"])
            axes.axvline(lines[0]["train_length"], color=INK, lw=0.8, ls="--", zorder=0)
        left.set_ylim(3.2, 7.2)
        left.set_title("loss on books (nats)", loc="left")
        right.set_title("passkeys retrieved", loc="left")
        right.yaxis.set_major_formatter(PercentFormatter(1))
        names = [line["model"].removeprefix("small-") for line in lines]
        figure.legend(left.lines[: len(lines)], names, loc="outside right center", fontsize=9)
    return figure


def passkeys_small() -> Figure:
    """Passkeys by length and depth of 29M models."""
    lines = records("passkeys-small")
    models = {line["label"]: passkeys_at_depths(line) for line in lines}
    return passkey_heatmap(models, lines[0]["train_length"])


def passkeys_at_depths(line: dict[str, Any]) -> list[Score]:
    """A score for each cell: the keys retrieved, at evenly spaced depths, as a share."""
    return [
        Score(
            "passkey",
            "passkey_at_depth",
            int(length),
            count / line["keys"],
            *wilson(count, line["keys"])[1:],
            line["keys"],
            {"depth": depth, "trained_on_passkeys": line["trained_on_passkeys"]},
        )
        for length, counts in line["retrieved"].items()
        for depth, count in zip(np.linspace(0, 1, len(counts)).tolist(), counts, strict=True)
    ]


def distance_small() -> Figure:
    """The distance of attention between every two encodings."""
    lines = records("distance-small")
    models = list(dict.fromkeys(model for line in lines for model in line["models"]))
    pairs = {tuple(map(models.index, line["models"])): SimpleNamespace(**line) for line in lines}
    tokens = lines[0]["tokens"]
    return attention_distance(SimpleNamespace(models=models, pairs=pairs, tokens=tokens))


def heads_bundled() -> Figure:
    """Attention mass by distance of heads of the bundled models.

    The record has means over distances that double, which stand for every distance.
    """
    lines = records("heads-bundled")
    comparison = SimpleNamespace(
        models=[line["model"] for line in lines],
        mass=[np.repeat(line["mass"], np.diff([0, *line["distances"]]), axis=-1) for line in lines],
        ablations=[np.array(line["increases"]) for line in lines],
    )
    return attention_heads(comparison)


def diagnoses(group: str) -> list[Diagnosis]:
    """A part of the diagnoses of 29M models: `models`, `nope-scales` or `rope-scales`."""
    return [diagnosis_of(record) for record in records("diagnoses-small", group)]


def diagnosis_of(record: dict[str, Any]) -> Diagnosis:
    """A diagnosis for figures; where heads were not kept, their mean stands for them."""
    positions, loss = np.array(record["positions"]), np.array(record["loss"])
    tables = record.get("entropy_by_head", {"0": [record["entropy"]]})
    heads = {int(layer): np.array(table) for layer, table in tables.items()}
    curves = Curves(positions, loss, heads, record["windows"], record["length"], every=1)
    width = KneeRule().smoothing * record["train_length"]
    scales = None
    if "scales" in record:  # of every layer
        scales = Scales(tuple(heads), torch.tensor(record["scales"]))
    return Diagnosis(
        label=record["label"],
        train_length=record["train_length"],
        curves=curves,
        loss_knee=record["loss_knee"],
        entropy_knee=record["entropy_knee"],
        coincide=None,
        distracted_heads=[(layer, head) for layer, head in record["distracted_heads"]],
        heads=sum(map(len, heads.values())),
        suggested_scale=None,
        verdict=record["verdict"],
        smooth_loss=smooth(positions, loss, width),
        smooth_entropy=smooth(positions, curves.entropy, width),
        scales=scales,
        uniform=record.get("uniform"),
    )


def with_heads() -> dict[str, Diagnosis]:
    """The diagnoses whose heads were kept, by label."""
    kept = [record for record in records("diagnoses-small") if "entropy_by_head" in record]
    return {record["label"]: diagnosis_of(record) for record in kept}


def lab_entries(*sources: str) -> list[LabEntry]:
    """The models of some studies, as one; of their losses, the last one is kept."""
    lines = [each for source in sources for each in records(source)]
    return group_entries(
        {
            LabCell(
                each["task"],
                each["encoding"],
                "small",
                each.get("scratchpad", "none"),
                each["lr"],
                each["seed"],
            ): {**each, "loss": [each["loss"]]}
            for each in lines
        }
    )


def lab_grid() -> Figure:
    return accuracy_by_length(accuracy_panels(read_study("lab-grid", []), lab_entries("lab-grid")))


def ruler_scores(line: dict[str, Any]) -> list[Score]:
    """The scores of a run of RULER from those of its samples."""
    samples = [
        {"task": task, "length": int(length), "score": score, "haystack": ""}
        for task, lengths in line["scores"].items()
        for length, scores in lengths.items()
        for score in scores
    ]
    return task_scores("ruler", "string_match", samples, 100)


def ruler_smollm2() -> Figure:
    """RULER's average by length: the base, its conversions, and YaRN."""
    names = ["base", "converted, one answer a fact", "converted, several answers", "YaRN"]
    colors = dict(zip(names, (INK, COLORS[5], COLORS[0], COLORS[1]), strict=True))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, group in zip(panels, ("completion", "chat"), strict=True):
            for name, line in zip(names, records("ruler-smollm2", group), strict=False):
                means = [x for x in ruler_scores(line) if x.tags["task"] == "average"]
                lengths = [score.length for score in means]
                band = [score.low for score in means], [score.high for score in means]
                axes.fill_between(lengths, *band, color=colors[name], alpha=0.15, lw=0)
                values = [score.value for score in means]
                axes.plot(lengths, values, color=colors[name], lw=1.6, marker="o", ms=3.5)
            axes.set_xscale("log", base=2)
            axes.set_xlabel("length (tokens)")
            axes.set_xticks([2**k for k in range(10, 17)], [f"{2**k}K" for k in range(7)])
            axes.axvline(8192, color=INK, lw=0.8, ls="--", zorder=0)
            axes.set_title(f"as {group}", loc="left")
        panels[0].set_ylim(-2, 64)
        panels[0].set_ylabel("RULER, average of 11 tasks")
        handles = [mpl.lines.Line2D([], [], color=color, lw=1.6) for color in colors.values()]
        figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9)
    return figure


FIGURES = {
    "hero-light.svg": partial(hero, "light"),
    "hero-dark.svg": partial(hero, "dark"),
    "swan-small.png": swan_small,
    "ruler-smollm2.png": ruler_smollm2,
    "extend-small-loss.png": lambda: method_losses(records("extend-small", "study")),
    "extend-small-scales.png": lambda: best_scales(records("extend-small", "grids")),
    "small-entropy.png": lambda: loss_and_entropy(diagnoses("models")),
    "small-entropy-nope-scales.png": lambda: loss_and_entropy(diagnoses("nope-scales")),
    "small-entropy-rope-scales.png": lambda: loss_and_entropy(diagnoses("rope-scales")),
    "small-entropy-heads.png": lambda: entropy_of_heads([*with_heads().values()]),
    "small-entropy-layers.png": lambda: heads_by_layer(with_heads()["NoPE, headscale for 4×"]),
    "small-scale-entropy.png": lambda: scale_against_entropy(
        with_heads()["NoPE, headscale for 4×"]
    ),
    "small-loss.png": pretrained_small,
    "small-passkey.png": passkeys_small,
    "small-distance.png": distance_small,
    "bundled-heads.png": heads_bundled,
    "lab-grid.png": lab_grid,
}
# Pictures of pages, drawn where there is a browser: the top of each, of this size.
SCREENSHOTS = {"report.png": (RECORDS / "report", (1000, 1010))}


def screenshot(runs: Path, size: tuple[int, int]) -> bytes | None:
    """The report of the runs in a folder, in light colors; None without a browser."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import Browser, chromium

    if (program := chromium()) is None:
        return None
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        page = report(sorted(runs.iterdir()), Path(folder) / "report.html")
        browser.open(page, size[0])
        browser.screenshot(Path(folder) / "page.png")
        with Image.open(Path(folder) / "page.png") as whole:
            return png_file(whole.crop((0, 0, *size)))


def png_file(image: Image.Image) -> bytes:
    file = io.BytesIO()  # with few colors it has a third of the size
    image.convert("RGB").quantize(256).save(file, "png", optimize=True)
    return file.getvalue()


def file_of(figure: Figure, extension: str) -> bytes:
    """One figure as a file; it has the same bytes whenever the same versions draw it."""
    file = io.BytesIO()
    if extension == "svg":
        with mpl.rc_context({"svg.hashsalt": "farspan", "svg.fonttype": "path"}):
            figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()
    figure.savefig(file, format="png", dpi=150)
    return png_file(Image.open(file))


def write_run(results: Path, pages: Path) -> Path:
    """The page of a contributed run: its figures and tables."""
    name, study = results.parent.name, read_json(results)
    cells, grids = study["cells"], study["grids"]
    figures = {"loss": method_losses(cells)} | ({"scales": best_scales(grids)} if grids else {})
    parts = [f"# {name}"]
    for kind, figure in figures.items():
        write_bytes(pages / f"{name}-{kind}.png", file_of(figure, "png"))
        parts.append(f"![{kind} by position]({name}-{kind}.png)")
    page = pages / f"{name}.md"
    write_text(page, "\n\n".join([*parts, study_report(cells, grids)]))
    return page


def main() -> None:
    for name, make in FIGURES.items():
        write_bytes(DOCS / "figures" / name, file_of(make(), Path(name).suffix[1:]))
        print(DOCS / "figures" / name)
    for name, page in SCREENSHOTS.items():
        if (picture := screenshot(*page)) is None:
            print(f"{name} stays as it is: there is no chromium")
        else:
            write_bytes(DOCS / "figures" / name, picture)
            print(DOCS / "figures" / name)
    pages = DOCS / "results" / "runs"
    for results in sorted((DOCS / "records").glob("*/results.json")):
        pages.mkdir(exist_ok=True)
        print(write_run(results, pages))


if __name__ == "__main__":
    main()
