"""`farspan demo`: diagnose and extend a bundled model in minutes, on the Python documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farspan.diagnosis.result import Diagnosis
from farspan.methods.headscale import SearchConfig
from farspan.methods.registry import ExtendConfig
from farspan.progress import Progress
from farspan.report import figures, style
from farspan.workflows.diagnose import diagnose
from farspan.workflows.extend import ExtendResult, extend

MODEL, TARGET, LENGTHS = "nope-twin", 1024, (256, 512, 1024, 2048)
REDUCED: dict[str, Any] = dict(search_windows=64, choose_windows=2, report_windows=8, passkeys=1)


def diagnose_model(progress: Progress) -> Diagnosis:
    return diagnose(MODEL, lengths=LENGTHS, windows=6, progress=progress)[0]


def extend_uniform(folder: Path, progress: Progress) -> ExtendResult:
    recipe = ExtendConfig(**REDUCED)
    return extend(MODEL, TARGET, folder / "uniform", "uniform", recipe=recipe, progress=progress)


def extend_headscale(folder: Path, uniform: ExtendResult, progress: Progress) -> ExtendResult:
    """A fortieth of Wang 2024's search: 20 steps of 2 windows instead of 200 of 8.

    It starts from the uniform scale.
    """
    assert uniform.patch.scales is not None
    init = float(uniform.patch.scales.base[0, 0])
    search = SearchConfig(steps=20, batch=2, micro_batch=2, lr=(0.1,), warmup=4, init=init)
    recipe = ExtendConfig(search=search, **REDUCED)
    return extend(
        MODEL, TARGET, folder / "headscale", "headscale", recipe=recipe, progress=progress
    )


def draw_figure(folder: Path, results: dict[str, ExtendResult]) -> Path:
    """Draw the loss before and after each extension; returns the path of the PNG file."""
    first = next(iter(results.values()))
    curves = {"as trained": first.curves["before"]}
    curves |= {name: result.curves["after"] for name, result in results.items()}
    title = f"{MODEL} to {TARGET} tokens"
    style.save(figures.loss_curves(curves, first.patch.train_length, title), folder / "demo")
    return folder / "demo.png"


def unused_folder(path: Path) -> Path:
    """The path, or the first numbered variant of it that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
