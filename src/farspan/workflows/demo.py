"""`farspan demo`: diagnose and extend a bundled model in minutes, on the Python documentation; then
read 32 times the train length with a model that was converted to SWAN."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farspan.data.documents import read_documents
from farspan.data.windows import cut_windows
from farspan.diagnosis.result import Diagnosis
from farspan.evals.passkey import passkey_accuracy
from farspan.loading import load_with_tokenizer
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.job import loss_by_position
from farspan.methods.search_config import SearchConfig
from farspan.progress import Progress
from farspan.report import figures, style
from farspan.workflows.diagnose import diagnose
from farspan.workflows.extend import ExtendResult, extend

MODEL, TARGET, LENGTHS = "nope-twin", 1024, (256, 512, 1024, 2048)
FAR, FAR_TEXT = 16384, "python-docs/score"  # which no scale was fitted on
FAR_PASSKEYS = 3  # a prompt of FAR tokens takes 17 seconds of one core
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


class FarReading(NamedTuple):
    """What four models do over FAR tokens of one text."""

    losses: dict[str, np.ndarray]  # model -> loss by position
    passkey: float  # share of FAR_PASSKEYS that SWAN retrieves among FAR tokens


def read_far(extended: Path, progress: Progress) -> FarReading:
    """Read 32 times the train length with NoPE, RoPE, extended NoPE and SWAN."""
    models: dict[str, str | Path] = {
        "NoPE (nope-twin)": "nope-twin",
        "NoPE, extended to 1,024": extended,
        "RoPE (rope-twin)": "rope-twin",
        "SWAN (swan-twin)": "swan-twin",
    }
    advance, losses = progress("read 16,384 tokens", len(models) + 1), {}
    for name, source in models.items():
        model, tokenizer = load_with_tokenizer(source, dtype="float32")
        windows = cut_windows(read_documents(FAR_TEXT), tokenizer, FAR, 1).ids
        losses[name] = loss_by_position(model, windows).numpy()
        advance(1, f"{name}: loss {losses[name][-512:].mean():.2f} at the end")
    passkey = passkey_accuracy(model, tokenizer, FAR, depths=FAR_PASSKEYS, batch=1)
    advance(1, f"SWAN: passkeys {passkey:.2f}")
    return FarReading(losses, passkey)


def draw_far_figure(folder: Path, reading: FarReading) -> Path:
    """Draw the four losses by position; returns the path of the PNG file."""
    title = "trained on 512 tokens, reading 16,384"
    figure = figures.loss_curves(reading.losses, 512, title, smoothing=512)
    style.save(figure, folder / "far")
    return folder / "far.png"


def unused_folder(path: Path) -> Path:
    """The path, or the first numbered variant of it that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
