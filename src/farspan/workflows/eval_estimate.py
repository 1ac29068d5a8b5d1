"""What an evaluation takes: one window is measured, and the cells are counted."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from farspan.evals.engine import Engine
from farspan.evals.scores import EvalCell
from farspan.evals.suites import EvalModel
from farspan.progress import LEFT, format_duration
from farspan.workflows.timing import ForwardSpeed, measured_length

# The settings of a cell that count its texts.
COUNTS = ("count", "curve", "keys", "samples", "limit")
SAID_FROM = 5.0  # seconds; a shorter evaluation is not worth a sentence
SHARED = {"passkey": 0.5}  # prompts share their beginning, on average half of a text


class EvalClock:
    """The expected time of the missing cells of one model, and what is left of it.

    The time of a served model, and of cells without a count of texts, is unknown.
    """

    def __init__(self, model: EvalModel, missing: Mapping[str, EvalCell], preset: str = "full"):
        self.preset = preset
        self.seconds = _cell_seconds(model, missing)
        self.left = sum(self.seconds.values())
        self.unknown = len(missing) - len(self.seconds)
        self.done, self.started = 0.0, time.monotonic()

    @property
    def worth_saying(self) -> bool:
        return self.left >= SAID_FROM or self.unknown > 0

    def sentence(self, cells: int) -> str:
        """`40 of 60 cells to measure, about 3.2 minutes (preset quick)`."""
        count = f"{len(self.seconds) + self.unknown} of {cells} cells to measure"
        if not self.seconds:
            return f"{count}, of unknown time"
        duration = f"about {format_duration(self.left)}"
        more = f" and {self.unknown} more" if self.unknown else ""
        return f"{count}, {duration}{more} (preset {self.preset})"

    def left_after(self, key: str) -> str:
        """`, about 2.1 minutes left`, when a cell is done."""
        seconds = self.seconds.pop(key, 0.0)
        self.done, self.left = self.done + seconds, self.left - seconds
        if not self.done or self.unknown:
            return ""
        pace = (time.monotonic() - self.started) / self.done
        return f", about {format_duration(max(0.0, pace * self.left))}{LEFT}"


def _cell_seconds(model: EvalModel, cells: Mapping[str, EvalCell]) -> dict[str, float]:
    if not cells or isinstance(model.model, Engine):
        return {}
    vocabulary = model.model.get_input_embeddings().num_embeddings
    length = measured_length(model.model)
    ids = torch.arange(min(model.max_positions or length, length))[None] % vocabulary
    speed = ForwardSpeed.measure(model.model, model.layers or (), ids)
    seconds = {}
    for key, cell in cells.items():
        count = next((cell.settings[name] for name in COUNTS if cell.settings.get(name)), None)
        if count is not None:
            count = min(count, cell.settings.get("windows") or count)  # at most so many in all
            seconds[key] = count * speed.of(cell.length) * SHARED.get(cell.eval, 1.0)
    return seconds
