"""The main job in minutes, on the model that ships with farspan and on text that ships with Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farspan.methods.headscale import Search
from farspan.progress import Progress
from farspan.report import figures, style
from farspan.workflows.diagnosing import Diagnosis, diagnose
from farspan.workflows.extending import Extended, extend
from farspan.workflows.fitting import Extension

MODEL, TARGET, LENGTHS = "nope-twin", 1024, (256, 512, 1024, 2048)
FEW: dict[str, Any] = dict(search_windows=64, choose_windows=2, report_windows=8, passkeys=1)


def look(progress: Progress) -> Diagnosis:
    """Where does it fail?"""
    return diagnose(MODEL, lengths=LENGTHS, windows=6, progress=progress)[0]


def by_one_number(folder: Path, progress: Progress) -> Extended:
    return extend(MODEL, TARGET, folder / "uniform", "uniform", recipe=Extension(**FEW), progress=progress)


def by_heads(folder: Path, uniform: Extended, progress: Progress) -> Extended:
    """A fortieth of the paper's search: 20 steps of 2 windows instead of 200 of 8, from the uniform scale."""
    assert uniform.patch.scales is not None
    start = float(uniform.patch.scales.base[0, 0])
    search = Search(steps=20, batch=2, micro_batch=2, lr=(0.1,), warmup=4, init=start)
    recipe = Extension(search=search, **FEW)
    return extend(MODEL, TARGET, folder / "headscale", "headscale", recipe=recipe, progress=progress)


def draw(folder: Path, found: dict[str, Extended]) -> Path:
    first = next(iter(found.values()))
    curves = {"as trained": first.curves["before"], **{name: each.curves["after"] for name, each in found.items()}}
    style.save(figures.loss_curves(curves, first.patch.train_length, f"{MODEL} to {TARGET} tokens"), folder / "demo")
    return folder / "demo.png"


def free_folder(path: Path) -> Path:
    """The path, or the first numbered one beside it that is not taken."""
    number = 1
    while (free := path.with_name(f"{path.name}-{number}") if number > 1 else path).exists():
        number += 1
    return free
