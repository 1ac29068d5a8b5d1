"""The result of `farspan diagnose` for one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from farspan.attention.scales import Scales
from farspan.diagnosis.curves import Curves
from farspan.summaries import Plotted, ResultList, shorten


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Plotted):
    """Curves by position of one model at one scale, and what they show."""

    label: str
    train_length: int
    curves: Curves
    loss_knee: int | None
    entropy_knee: int | None
    coincide: bool | None  # None unless both knees exist
    distracted_heads: list[tuple[int, int]]
    heads: int
    suggested_scale: float | None
    verdict: str
    smooth_loss: np.ndarray
    smooth_entropy: np.ndarray
    scales: Scales | None = None  # of a patch
    uniform: float | None = None  # of a sweep of uniform scales

    def facts(self) -> dict[str, str]:
        def at(knee: int | None) -> str:
            return "none" if knee is None else f"at {knee:,} tokens"

        return {
            "model": self.label,
            "train length": f"{self.train_length:,} tokens",
            "verdict": self.verdict,
            "knees": f"loss {at(self.loss_knee)}, entropy {at(self.entropy_knee)}",
            "distracted heads": f"{len(self.distracted_heads)} of {self.heads}",
            "suggested scale": shorten(self.suggested_scale),
        }

    def to_json(self) -> dict[str, Any]:
        curves = self.curves
        return {
            "model": self.label,
            "train_length": self.train_length,
            "positions": curves.positions.round(1).tolist(),
            "loss": _rounded(curves.loss),
            "entropy": _rounded(curves.entropy) if curves.heads else None,
            "entropy_of_every": curves.every,
            "windowed_layers": sorted(curves.windowed),
            "windows": curves.windows,
            "bound": _rounded(np.log(curves.positions)),
            "entropy_by_head": {
                str(layer): _rounded(table) for layer, table in curves.heads.items()
            },
            "loss_knee": self.loss_knee,
            "entropy_knee": self.entropy_knee,
            "knees_coincide": self.coincide,
            "distracted_heads": [list(pair) for pair in self.distracted_heads],
            "suggested_scale": self.suggested_scale,
            "verdict": self.verdict,
        }


class Diagnoses(ResultList):
    """The diagnoses of several models, or of one at several scales."""

    def facts(self) -> dict[str, str]:
        return {each.label: each.verdict for each in self}


def _rounded(values: np.ndarray) -> list:
    return np.round(values.astype(float), 5).tolist()
