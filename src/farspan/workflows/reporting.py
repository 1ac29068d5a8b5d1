"""`farspan report`: the records of runs as one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farspan.attention.patch import Patch
from farspan.errors import CorruptError, FarspanError
from farspan.evals.jsonlines import read_rows
from farspan.files import read_json, write_text
from farspan.loading import is_patch
from farspan.report.page import SECTIONS, Run, page
from farspan.train.loop import METRICS
from farspan.workflows.diagnosing import model_names


def report(
    folders: Sequence[str | Path], out: str | Path = "report.html", *, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Write one HTML page of the runs in folders, those of `diagnose`, `extend`, `eval`, `reproduce`, `lab run` and
    `pretrain` with figures. It needs no network to be looked at."""
    out = Path(out)
    if out.is_dir():
        raise FarspanError(f"{out} is a folder; name a file, as {out / 'report.html'}")
    if out.suffix not in (".html", ".htm"):
        raise FarspanError(f"a report is a page, and {out} is not named as one; end it in .html")
    runs = [_run(Path(folder), name) for folder, name in zip(folders, _names(folders), strict=True)]
    script = _plotly()
    for run, folder in zip(runs, folders, strict=True):
        _check(run, folder)
        if run.record["command"] not in SECTIONS:
            say(f"{folder} is a run of {run.record['command']}, which has no figures; it is only named")
    write_text(out, page(runs, script).encode("utf-8", "replace").decode("utf-8"))  # a name may be no text
    return out


def _check(run: Run, folder: str | Path) -> None:
    """Tell which of many records it is that cannot be drawn."""
    try:
        page([run], "")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise CorruptError(
            f"the record in {folder} is not as farspan writes it ({type(error).__name__}: {error}); make it again with "
            "this version"
        ) from None


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The folders' own names, or as much of their paths as tells all of them apart."""
    short = [Path(folder).resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else model_names(folders)


def _run(folder: Path, name: str) -> Run:
    if not folder.exists():
        raise FarspanError(f"{folder} does not exist; give the folder of a run")
    if (folder / "record.json").exists():
        record = read_json(folder / "record.json")
        if not isinstance(record.get("command"), str):
            raise CorruptError(f"{folder / 'record.json'} names no command; it is no record of farspan")
    elif (folder / "results.json").exists():
        record = {"command": "reproduce", **read_json(folder / "results.json")}
    elif (folder / METRICS).exists():  # a training that goes on
        record = {"command": "pretrain"}
    else:
        raise FarspanError(
            f"{folder} holds no record.json; give folders that diagnose, extend, eval, reproduce, lab run or pretrain "
            "have made"
        )
    scales: dict[int, list[float]] = {}
    if is_patch(folder):
        about = read_json(folder / "patch.json")
        record = {**record, "method": about.get("method")}
        scales = _scales(folder) if about.get("scales") else {}
    return Run(name, record, scales, _metrics(folder))


def _scales(folder: Path) -> dict[int, list[float]]:
    """λ̂ of each head at the target of a patch, by layer."""
    import torch

    patch = Patch.load(folder)
    if patch.scales is None:
        return {}
    values = patch.scales.at(torch.tensor(patch.target))
    return {layer: row.tolist() for layer, row in zip(patch.scales.layers, values, strict=True)}


def _metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / METRICS
    return [row for _, row in read_rows(file)] if file.exists() else []


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise FarspanError("a report needs plotly, which is not installed; pip install 'farspan[report]'") from None
    return str(get_plotlyjs())
