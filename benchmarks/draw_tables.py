"""Write the tables of the documentation that have records in docs/records: `make figures`.

A table stands between `<!-- table: NAME SOURCE… -->` and `<!-- end -->`. NAME is one of TABLES. A
source is a file of docs/records, or FILE#GROUP for the lines of a file that have this `group`;
after the source of `heldout` comes the label of a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from draw_figures import DOCS, lab_entries, records, ruler_scores
from heldout import marks, scores

from farspan.diagnosis.curves import mean_before
from farspan.files import write_text
from farspan.lab.ranking import Table, accuracy_table, rank_table
from farspan.report.elements import short_length
from farspan.report.study_tables import (
    heads_table,
    law_table,
    loss_marks,
    loss_table,
    markdown,
    mean_at,
    paired_difference,
)

BLOCK = re.compile(r"^( *)<!-- table: (.+?) -->\n.*?^ *<!-- end -->$", re.DOTALL | re.MULTILINE)
Record = dict[str, Any]


def select(source: str) -> list[Record]:
    """The lines of a file, FILE, or those of one group, FILE#GROUP; cells of a study like other
    conversions, with the windows of all their texts, or of some: FILE@TEXT+TEXT."""
    source, _, texts = source.partition("@")
    file, _, group = source.partition("#")
    lines = [line for line in records(file) if not group or line.get("group") == group]
    if not lines:
        sys.exit(f"no line of docs/records/{file}.jsonl has the group {group!r}")
    if any("label" not in line for line in lines):
        sys.exit(f"a line of docs/records/{file}.jsonl has no label, the name of its row; add one")
    if "same_tokens" in lines[0]:
        base = find_base(lines, source) or find_base(records(file), file)
        return like_conversions(lines, base, source, texts.split("+") if texts else [])
    return lines


def find_base(cells: Sequence[Record], source: str) -> Record | None:
    """The cell as trained, with which others are compared; a group may have that of its file."""
    bases = [cell for cell in cells if cell["method"] == "none"]
    if len(bases) > 1:
        sys.exit(
            f"{source} has {len(bases)} cells with the method none, the base of the others; give "
            "each training its own file or group"
        )
    return bases[0] if bases else None


def like_conversions(
    cells: Sequence[Record], base: Record | None, source: str, texts: Sequence[str]
) -> list[Record]:
    """Cells of a study, whose base is another cell and whose windows stand by text."""
    if base is None:
        sys.exit(f"{source} has no cell with the method none, the base of the others; add it")
    by_text = cells[0]["same_tokens"]
    texts = texts or list(by_text)
    if unknown := set(texts) - set(by_text):
        sys.exit(f"{source} has no text {min(unknown)}; choose from {', '.join(by_text)}")
    windows = [
        {
            context: [loss for text in texts for loss in cell["same_tokens"][text][context]]
            for context in by_text[texts[0]]
        }
        for cell in (base, *cells)
    ]
    # Cells of earlier releases do not name the document of a window.
    documents = [
        [f"{text} {number}" for text in texts for number in cell["documents"][text]]
        if "documents" in cell
        else None
        for cell in cells
    ]
    length = str(base["train_length"])
    of_base, *others = windows
    return [
        {
            "label": cell["label"],
            "method": cell["method"],
            "losses": {"base": {length: of_base[length]}, "patch": own},
            "documents": own_documents,
            "passkeys": {"patch": cell["passkey"]},
        }
        for cell, own, own_documents in zip(cells, others, documents, strict=True)
    ]


def row_name(record: Record, name: str) -> str:
    """The label of a record, with the name of the variant if the record has several."""
    if name == "base":
        return "base"
    names = {*record.get("losses", ()), *record.get("passkeys", ())} - {"base", "n"}
    return record["label"] if name == "patch" or len(names) == 1 else f"{record['label']}, {name}"


def losses(*sources: str) -> Table:
    """The loss of the same tokens minus that of the base, window by window, by context.

    The base has the same context, or the longest one that it was measured with.
    """
    rows: list[tuple[str, int, dict[int, str]]] = []
    for record in (line for source in sources for line in select(source) if "losses" in line):
        base = by_length(record["losses"]["base"])
        for name, contexts in record["losses"].items():
            differences = {
                context: np.subtract(values, base[min(context, max(base))])
                for context, values in by_length(contexts).items()
            }
            if name != "base":
                documents = record.get("documents")
                columns = {
                    context: paired_difference(values, documents) if values.any() else "0"
                    for context, values in differences.items()
                }
                windows = len(next(iter(differences.values())))
                rows.append((row_name(record, name), windows, columns))
    return lengths_table(["loss minus base", "windows"], rows)


def paired(source: str, method: str) -> Table:
    """The loss of the same tokens minus that of the cell with `method`, at the same context."""
    cells = {record["method"]: record for record in select(source)}
    reference = by_length(cells.pop(method)["losses"]["patch"])
    del cells["none"]
    rows = []
    for cell in cells.values():
        columns = {
            context: paired_difference(np.subtract(values, reference[context]), cell["documents"])
            for context, values in by_length(cell["losses"]["patch"]).items()
        }
        rows.append((cell["label"], len(reference[max(reference)]), columns))
    return lengths_table([f"loss minus `{method}`", "windows"], rows)


def passkeys(*sources: str) -> Table:
    """The share of passkeys that each conversion retrieves, by length."""
    rows: list[tuple[str, int | str, dict[int, str]]] = []
    for record in (line for source in sources for line in select(source) if "passkeys" in line):
        shares = record["passkeys"]
        for name in (name for name in shares if name != "n"):
            columns = {length: f"{100 * x:g}%" for length, x in by_length(shares[name]).items()}
            row = row_name(record, name), shares.get("n", ""), columns
            if name != "base" or row not in rows:  # one base of several conversions
                rows.append(row)
    return lengths_table(["passkeys", "keys"], rows)


def by_length(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(length): value for length, value in values.items()}


def lengths_table(
    header: list[str], rows: Sequence[tuple[str, int | str, Mapping[int, str]]]
) -> Table:
    """A row for each label, with a count if any row has one, and a column for each length."""
    lengths = sorted({length for *_, columns in rows for length in columns})
    counts = any(count for _, count, _ in rows)
    return [*header[: 1 + counts], *map(short_length, lengths)], [
        [label, *[str(count)] * counts, *(columns.get(length, "") for length in lengths)]
        for label, count, columns in rows
    ]


def needles(source: str) -> Table:
    """Of 50 needles in books, the share that base and conversions answer."""
    tasks = {"single, books": "single needle", "multi-key, books": "one of four needles"}
    rows = {
        f"{'base' if name == 'base' else record['label']}, {title}": (
            "",
            {length: f"{100 * x:g}%" for length, x in by_length(shares[task]).items()},
        )
        for task, title in tasks.items()
        for record in select(source)
        for name, shares in record.get("needles_of_50", {}).items()
    }
    rows_by_name = [(name, *row) for name, row in rows.items()]  # the base stands in every record
    return lengths_table(["needles"], rows_by_name)


def global_layers(source: str) -> Table:
    """Conversions of SmolLM2 by their global layers and scales."""
    base, *lines = select(source)
    (base_losses,) = base["loss_of_last_512_tokens"].values()
    rows = []
    for line in lines:
        contexts = line["loss_of_last_512_tokens"].values()
        rows.append(
            [
                ", ".join(map(str, line["layers"])),
                f"{line['max_period']:,}",
                line["label"],
                *(paired_difference(np.subtract(values, base_losses)) for values in contexts),
                slashes(line["repeated"].values()),
                slashes(line.get("passkey_20", {}).values()),
            ]
        )
    names = [*map(short_length, by_length(lines[0]["loss_of_last_512_tokens"]))]
    header = ["global layers", "periods to", "scales", *names, f"repeated {'/'.join(names)}"]
    return [*header, f"passkeys {'/'.join(names[:2])}"], rows


def ruler(source: str) -> Table:
    """RULER's average at every length that all tasks have, with its 95% interval."""
    rows = []
    for line in select(source):
        means = [score for score in ruler_scores(line) if score.tags["task"] == "average"]
        columns = {x.length: f"{x.value:.1f} ({x.low:.0f}–{x.high:.0f})" for x in means}
        rows.append((line["label"], "", columns))
    return lengths_table(["average of 11 tasks"], rows)


def ruler_tasks(source: str) -> Table:
    """The score of every task by length: those of the lines, in their order, with slashes."""
    lines = [
        {(score.tags["task"], score.length): f"{score.value:.0f}" for score in ruler_scores(line)}
        for line in select(source)
    ]
    tasks = [task for task in dict.fromkeys(task for task, _ in lines[-1]) if task != "average"]
    lengths = sorted({length for line in lines for _, length in line})
    rows = [
        (f"`{t}`", "", {x: " / ".join(line.get((t, x), "–") for line in lines) for x in lengths})
        for t in tasks
    ]
    return lengths_table(["task"], rows)


def slashes(values: Iterable[float]) -> str:
    return "/".join(f"{value:.2f}".removeprefix("0") for value in values)


def rotation_variants(source: str) -> Table:
    """Conversions of SmolLM2 by the rotation of their global layers."""
    rows = []
    for line in select(source):
        tuned = dict(line["results"]["tuned"])
        keys = tuned.pop("passkey")
        repeated = slashes(result["rep"] for result in tuned.values())
        kl = f"{tuned['2048']['kl']:.3f}"
        rows.append([line["label"], f"{line['length']:,}", kl, repeated, slashes(keys.values())])
    header = ["global layers", "windows", "KL 2K", "repeated 2K/8K/32K", "passkeys 2K/8K/32K"]
    return header, rows


def twin_layers(source: str) -> Table:
    """Conversions of rope-twin by their global layers and their text."""
    rows = []
    for line in select(source):
        steps = line.get("kl", ["loss "])  # of each logged step: `loss 0.0890, 691K tokens/s`
        kl = steps[-1].split(",")[0].removeprefix("loss ")
        books = (f"{line['books_val'][length]:.2f}" for length in ("512", "2048", "16384"))
        rows.append([line["label"], kl, *books, slashes(line["passkey"].values())])
    return ["variant", "KL", "512", "2K", "16K", "passkeys 512/1K/2K/4K/8K/16K"], rows


def twin_rotation(source: str) -> Table:
    """Conversions of rope-twin by the rotation of their global layers, and the base."""
    lines = select(source)
    measured = [("base", lines[0]["before"]), *((line["label"], line["after"]) for line in lines)]
    rows = [
        [
            label,
            "/".join(f"{scores[f'loss@{length}']:.2f}" for length in (512, 2048, 16384)),
            slashes(score for name, score in scores.items() if name.startswith("passkey")),
        ]
        for label, scores in measured
    ]
    return ["rotation", "loss 512/2K/16K", "passkeys 512/1K/2K/4K/8K/16K"], rows


def heldout(source: str, label: str) -> Table:
    """A model of `heldout.py`: the loss on each text before a position, and its passkeys."""
    (result,) = (line for line in select(source) if line["label"] == label)
    rows = [
        [name, *(f"{score:.2f}" if name == "passkey" else f"{score:.3f}" for score in row)]
        for name, row in scores(result).items()
    ]
    return [label, *map(str, marks(result["train_length"]))], rows


def pretrained_losses(source: str) -> Table:
    """Models as trained: the loss on books by length, their knee and passkeys."""
    rows = []
    for line in select(source):
        knee = "none" if line["knee"] is None else f"{line['knee']:.0%}"
        losses = (f"{loss:.2f}" for loss in line["loss"]["books_val"].values())
        rows.append([line["label"], *losses, knee, slashes(line["passkeys"].values())])
    first = select(source)[0]
    lengths = "/".join(first["passkeys"])
    return ["books_val", *first["loss"]["books_val"], "knee", f"passkeys at {lengths}"], rows


def pretrained_texts(source: str) -> Table:
    """Models as trained: the loss on the other texts, by length with slashes."""
    lines, (_, *texts) = select(source), select(source)[0]["loss"]
    rows = [
        [line["model"], *(" / ".join(f"{x:.2f}" for x in line["loss"][t].values()) for t in texts)]
        for line in lines
    ]
    lengths = " / ".join(lines[0]["loss"][texts[0]])
    return [f"loss at {lengths}", *texts], rows


def labeled_cells(source: str) -> list[Record]:
    """Cells of a study whose methods are named by their labels."""
    return [{**cell, "method": cell["label"]} for cell in select(source)]


def study_losses(source: str, text: str) -> Table:
    """Loss of the cells of a study by length, bold at the target of a row; passkeys once."""
    cells = labeled_cells(source)
    header, rows = loss_table(cells, text)
    marks_by_factor = {
        f"{mark // cells[0]['train_length']}×": index
        for index, mark in enumerate(loss_marks(cells[0]), start=3)
    }
    for row in rows:
        if row[2]:
            column = marks_by_factor[row[2]]
            row[column] = f"**{row[column]}**"
    end = None if text == next(iter(cells[0]["loss"])) else -1
    return [text, "target", *header[3:end]], [row[1:end] for row in rows]


def study_heads(source: str) -> Table:
    """Scales, knees and entropies of the cells of a study."""
    header, rows = heads_table(labeled_cells(source))
    return ["", "target", *header[3:]], [row[1:] for row in rows]


def best_scale_law(source: str) -> Table:
    header, rows = law_table(select(source))
    return header[1:], [row[1:] for row in rows]


# Model, method and factor -> perplexities on pg19 at L, 2L, 4L and 8L in Table 2 of Wang 2024
WANG_2024 = {
    ("small-nope", "none", 1): "14.6 / 327 / >10³ / >10³",
    ("small-nope", "uniform", 4): "19.0 / 20.2 / 45.3 / 224",
    ("small-nope", "headscale", 2): "14.8 / 15.3 / 405 / >10³",
    ("small-nope", "headscale", 4): "15.7 / 15.3 / 21.1 / 722",
    ("small-nope", "headscale", 8): "18.3 / 19.0 / 18.8 / 30.4",
    ("small-rope", "none", 1): "14.5 / 491 / 489 / 600",
    ("small-rope", "dynamic-ntk", 8): "14.5 / 14.9 / 22.8 / 80.4",
    ("small-rope", "yarn", 8): "14.5 / 14.5 / 15.0 / 17.1",
    ("small-rope", "pi:tune=fair", 8): "18.7 / 18.4 / 18.3 / 18.2",
    ("small-rope", "yarn:tune=fair", 8): "15.9 / 15.6 / 15.4 / 15.5",
}


def paper_perplexities(source: str, text: str) -> Table:
    """Perplexities at L, 2L, 4L and 8L beside those of Wang 2024."""
    cells, rows = select(source), []
    for key, theirs in WANG_2024.items():
        group = [cell for cell in cells if (cell["model"], cell["method"], cell["factor"]) == key]
        ours = (
            np.exp(np.mean([mean_at(cell, cell["loss"][text], mark) for cell in group]))
            for mark in loss_marks(group[0])[1:]
        )
        label, factor = group[0]["label"], group[0]["factor"]
        name = label if factor == 1 else f"{label}, for {factor}×"
        rows.append([name, " / ".join(f"{value:.0f}" for value in ours), theirs])
    return ["method", "farspan", "Wang 2024"], rows


def shorter_searches(study: str, variants: str) -> Table:
    """The loss of variants of a search minus that of the search of Wang 2024, mean of its seeds.

    Over all positions to the target, and before the target.
    """
    references, rows = select(study), []
    for cell in select(variants):
        key = cell["method"].partition(":")[0], cell["factor"]
        group = [each for each in references if (each["method"], each["factor"]) == key]
        differences = [
            measure(cell, text) - np.mean([measure(each, text) for each in group])
            for measure in (mean_to_target, loss_at_target)
            for text in cell["loss"]
        ]
        columns = (paired_difference(np.array([value])) for value in differences)
        rows.append([cell["label"], f"{cell['factor']}×", *columns])
    texts = list(references[0]["loss"])
    names = [f"{where}, {text}" for where in ("all", "at") for text in texts]
    return ["search", "target", *names], rows


def search_variants(source: str) -> Table:
    """Losses of searches over all positions to the target and before it, and passkeys."""
    texts, rows = ("books_val", "pg19_test_a"), []
    for line in select(source):
        losses = [f"{line[text][place]:.3f}" for place in (0, 2) for text in texts]
        shares = "/".join(f"{share:.2f}".removeprefix("0") for share in line["passkey"].values())
        seed = f", seed {line['seed']}" if line["seed"] else ""
        rows.append([line["method"], line["label"] + seed, *losses, shares])
    names = [f"{where}, {text}" for where in ("all", "at") for text in texts]
    lengths = "/".join(select(source)[0]["passkey"])
    return ["method", "search", *names, f"passkeys {lengths}"], rows


def mean_to_target(cell: Record, text: str) -> float:
    inside = np.array(cell["positions"]) <= cell["target"]
    return float(np.array(cell["loss"][text])[inside].mean())


def loss_at_target(cell: Record, text: str) -> float:
    return mean_at(cell, cell["loss"][text], cell["target"])


def diagnosed(*sources: str) -> Table:
    """Where the curves of diagnosed models leave their trends, and their mean entropies."""
    lines = [line for source in sources for line in select(source)]
    length, longest = lines[0]["train_length"], lines[0]["length"]
    rows = []
    for line in lines:
        entropies = (
            f"{mean_before(mark, length, line['positions'], line['entropy']):.2f}"
            for mark in (length, longest)
        )
        knees = [line[key] for key in ("loss_knee", "entropy_knee")]
        knees = [f"{knee:,}" if knee else "none" for knee in knees]
        rows.append([line["label"], *knees, str(len(line["distracted_heads"])), *entropies])
    header = ["model", "loss knee", "entropy knee", "distracted heads"]
    return [*header, f"entropy at {length:,}", f"entropy at {longest:,}"], rows


def lab_accuracy(*sources: str) -> Table:
    """Exact match beyond the train lengths, tasks by encodings."""
    header, rows = accuracy_table(lab_entries(*sources))
    return header, [bold_best(row) for row in rows]


def lab_ranks(*sources: str) -> Table:
    header, rows = rank_table(lab_entries(*sources))
    return header[2:], [bold_best(row[2:]) for row in rows]  # one size, no scratchpads


def bold_best(row: list[str]) -> list[str]:
    """The largest first number of a row's columns in bold; all that are equal to it."""
    numbers = [re.match(r"\d\.\d+", column) for column in row]
    best = max((match[0] for match in numbers if match), default="")
    return [
        f"**{best}**{column[match.end() :]}" if match and match[0] == best else column
        for column, match in zip(row, numbers, strict=True)
    ]


TABLES = {
    table.__name__.replace("_", "-"): table
    for table in (
        losses,
        paired,
        passkeys,
        needles,
        ruler,
        ruler_tasks,
        global_layers,
        rotation_variants,
        twin_layers,
        twin_rotation,
        heldout,
        pretrained_losses,
        pretrained_texts,
        study_losses,
        study_heads,
        best_scale_law,
        paper_perplexities,
        shorter_searches,
        search_variants,
        diagnosed,
        lab_accuracy,
        lab_ranks,
    )
}


def with_tables(page: str) -> str:
    """A page with the table of every block drawn from the records, indented like its marks."""

    def block(match: re.Match[str]) -> str:
        indent, command = match.groups()
        name, *sources = command.split()
        if name not in TABLES:
            sys.exit(f"there is no table {name!r}; choose among {', '.join(TABLES)}")
        table = markdown(*TABLES[name](*sources))
        lines = [f"<!-- table: {command} -->", "", *table.splitlines(), "", "<!-- end -->"]
        return "\n".join(indent + line if line else "" for line in lines)

    return BLOCK.sub(block, page)


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (drawn := with_tables(text)) != text:
            write_text(page, drawn)
            print(page)


if __name__ == "__main__":
    main()
