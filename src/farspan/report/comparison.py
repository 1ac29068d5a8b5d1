"""One table of several results folders: a row for each run, a column for each length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farspan.evals.pairs import PairedDifference
from farspan.record import format_number

LOSS = "ppl"  # its differences are those of the loss, in nats


@dataclass(frozen=True)
class ComparedScore:
    """A score of one run, and its paired difference to the reference."""

    run: str
    eval: str
    task: str
    metric: str
    length: int
    value: float
    low: float
    high: float
    n: int
    difference: PairedDifference | None = None

    @property
    def group(self) -> tuple[str, str, str]:
        return self.eval, self.task, self.metric

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Row = list[str]


def table_rows(scores: Sequence[ComparedScore]) -> tuple[Row, list[Row]]:
    """The header and the rows: of each measure the runs, each followed by its differences."""
    lengths = sorted({score.length for score in scores})
    header = ["measure", "run", *(f"{length:,}" for length in lengths)]
    rows = []
    for group in dict.fromkeys(score.group for score in scores):
        label = group_label(group)
        for run in dict.fromkeys(score.run for score in scores):
            own = {s.length: s for s in scores if (s.run, s.group) == (run, group)}
            if own:
                cells = [_value(own[length]) if length in own else "" for length in lengths]
                rows.append([label, run, *cells])
                label = ""
                changes = [_change(own[n]) if n in own else "" for n in lengths]
                if any(changes):
                    rows.append(["", f"Δ {run}" + ", nats" * (group[2] == LOSS), *changes])
    return header, rows


def group_label(group: tuple[str, str, str]) -> str:
    """The evaluation, the task and the metric, each once.

    >>> group_label(("passkey", "passkey", "passkey_mean"))
    'passkey_mean'
    """
    parts = dict.fromkeys(group)
    return " ".join(part for part in parts if not group[2].startswith(f"{part}_"))


def _value(score: ComparedScore) -> str:
    interval = f" [{format_number(score.low)}–{format_number(score.high)}]"
    return format_number(score.value) + interval * (score.low < score.high)


def _change(score: ComparedScore) -> str:
    """With a star if the interval excludes zero."""
    change = score.difference
    if change is None:
        return ""
    low, high = (_signed(value) for value in (change.low, change.high))
    interval = f" [{low}, {high}]" * (change.low < change.high)
    return _signed(change.value) + interval + "*" * change.clear


def _signed(value: float) -> str:
    """With three decimals: differences of losses are small, and an end near 0 should read so."""
    text = f"{abs(value):.3f}" if abs(value) < 10 else format_number(abs(value))
    return f"{'−' if value < 0 else '+'}{text}" if value else "0"


def markdown_table(header: Row, rows: Sequence[Row], notes: Sequence[str]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    lines = [line(header), f"|{'---|' * len(header)}", *map(line, rows), "", *notes]
    return "\n".join(lines) + "\n"


def long_rows(scores: Sequence[ComparedScore]) -> tuple[Row, list[list[Any]]]:
    """One row for each score, for a .csv file."""
    plain = ["run", "eval", "task", "metric", "length", "value", "low", "high", "n"]
    rows = []
    for score in scores:
        change: Mapping[str, Any] = asdict(score.difference) if score.difference else {}
        fields = [getattr(score, name) for name in plain]
        rows.append(
            [*fields, *(change.get(name, "") for name in ("value", "low", "high", "pairs"))]
        )
    return [*plain, "difference", "difference_low", "difference_high", "pairs"], rows
