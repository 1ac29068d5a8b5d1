"""What an evaluation takes: one window is measured, and the cells are counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.evals.scores import EvalCell
from farspan.evals.suites import EvalModel
from farspan.progress import LEFT, SAID_FROM, format_duration
from farspan.workflows.timing import ForwardSpeed, fastest_run, measured_length

# The settings of a cell that count its texts.
COUNTS = ("count", "curve", "keys", "samples", "limit")
SHARED = {"passkey": 0.5}  # prompts share their beginning, on average half of a text
ANSWERS = {"needle": 24, "nonliteral": 8, "ruler": 96, "longbench": 64}  # tokens, roughly


class EvalClock:
    """The expected time of the missing cells of one model, and what is left of it.

    every_cell: those of a baseline that is measured next, as if it were as fast and had none yet.

    The time of a served model, and of cells without a count of texts, is unknown.
    """

    def __init__(
        self,
        model: EvalModel,
        missing: Mapping[str, EvalCell],
        preset: str = "full",
        every_cell: Mapping[str, EvalCell] | None = None,
    ):
        self.preset = preset
        seconds = _cell_seconds(model, {**missing, **(every_cell or {})})
        self.seconds = {key: seconds[key] for key in missing if key in seconds}
        self.of_baseline = [seconds[key] for key in every_cell or () if key in seconds]
        self.unknown = len(missing) - len(self.seconds)
        self.measured: list[tuple[float, float]] = []  # of finished cells: expected and real
        self.per_cell = model.local is not None and model.local.device.type == "cuda"
        self.last = time.monotonic()

    @property
    def left(self) -> float:
        return sum(self.seconds.values())

    @property
    def worth_saying(self) -> bool:
        return self.left >= SAID_FROM or self.unknown > 0

    def sentence(self, cells: int) -> str:
        """`40 of 60 cells to measure, about 3.2 minutes (preset quick)`."""
        count = f"{len(self.seconds) + self.unknown} of {cells} cells to measure"
        if not self.seconds:
            return f"{count}, of unknown time"
        duration = f"about {format_duration(self.left)}"
        if self.of_baseline:
            both = format_duration(self.left + sum(self.of_baseline))
            duration += f", with the baseline at most {both}"
        more = f" and {self.unknown} more" if self.unknown else ""
        return f"{count}, {duration}{more} (preset {self.preset})"

    def left_after(self, key: str) -> str:
        """`, about 2.1 minutes left`, when a cell is done."""
        now, expected = time.monotonic(), self.seconds.pop(key, None)
        if expected is not None:
            self.measured.append((expected, now - self.last))
        self.last = now
        if not self.measured or self.unknown:
            return ""
        pace, overhead = pace_and_overhead(self.measured, self.per_cell)
        cells = len(self.seconds) + len(self.of_baseline)
        left = pace * (self.left + sum(self.of_baseline)) + overhead * cells
        return f", about {format_duration(left)}{LEFT}"


def pace_and_overhead(
    measured: Sequence[tuple[float, float]], per_cell: bool
) -> tuple[float, float]:
    """Of finished cells: real seconds for each expected one, and the overhead of a cell in seconds.

    per_cell: whether cells that take longer than expected do so by a constant. On a GPU short cells
        wait for the launch of kernels, and long ones for arithmetic; a busy CPU slows down both.
    """
    expected, real = (sum(values) for values in zip(*measured, strict=True))
    if per_cell and real > expected:
        return 1.0, (real - expected) / len(measured)
    return real / expected, 0.0


def _cell_seconds(model: EvalModel, cells: Mapping[str, EvalCell]) -> dict[str, float]:
    local = model.local
    if not cells or local is None:
        return {}
    vocabulary = local.get_input_embeddings().num_embeddings
    length = measured_length(local)
    ids = torch.arange(min(model.max_positions or length, length))[None] % vocabulary
    speed = ForwardSpeed.measure(local, model.layers or (), ids)
    has_answers = any(cell.eval in ANSWERS for cell in cells.values())
    step = _decoding_step(local, ids) if has_answers else 0.0
    together = local.device.type == "cuda"  # the prompts of a cell are decoded
    seconds = {}
    for key, cell in cells.items():
        count = next((cell.settings[name] for name in COUNTS if cell.settings.get(name)), None)
        if count is not None:
            count = min(count, cell.settings.get("windows") or count)  # at most so many in all
            steps = ANSWERS.get(cell.eval, 0) * (1 if together else count)
            prompts = count * speed.of(cell.length) * SHARED.get(cell.eval, 1.0)
            seconds[key] = prompts + steps * step
    return seconds


@torch.no_grad()
def _decoding_step(model: PreTrainedModel, ids: Tensor) -> float:
    token = ids[:, :1].to(model.device)
    return fastest_run(token.device, lambda: model(input_ids=token, use_cache=False))
