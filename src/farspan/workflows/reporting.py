"""`farspan report`: the records of runs as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farspan.attention.patch import Patch
from farspan.errors import CorruptError, FarspanError
from farspan.evals.jsonlines import read_rows
from farspan.files import read_json, write_text
from farspan.loading import is_patch
from farspan.report.page import Run, page
from farspan.train.loop import METRICS


def report(folders: Sequence[str | Path], out: str | Path = "report.html") -> Path:
    """Write one HTML page of the runs in folders, those of `diagnose`, `extend`, `eval`, `reproduce`, `lab run` and
    `pretrain` with figures. It needs no network to be looked at."""
    runs = [_run(Path(folder), name) for folder, name in zip(folders, _names(folders), strict=True)]
    try:
        text = page(runs, _plotly())
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CorruptError(
            f"a record among {', '.join(map(str, folders))} is not as farspan writes it ({type(error).__name__}: "
            f"{error}); make it again with this version"
        ) from None
    write_text(Path(out), text)
    return Path(out)


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The folders' own names; those that two have with the folder around them."""
    paths = [Path(folder).resolve() for folder in folders]
    names = [path.name for path in paths]
    return [
        name if names.count(name) == 1 else f"{path.parent.name}/{name}"
        for path, name in zip(paths, names, strict=True)
    ]


def _run(folder: Path, name: str) -> Run:
    study = folder / "results.json"
    if not (folder / "record.json").exists() and study.exists():
        return Run(name, {"command": "reproduce", **read_json(study)})
    if not (folder / "record.json").exists():
        raise FarspanError(
            f"{folder} holds no record.json; give folders that diagnose, extend, eval, reproduce, lab run or pretrain "
            "have made"
        )
    record = read_json(folder / "record.json")
    if not isinstance(record.get("command"), str):
        raise CorruptError(f"{folder / 'record.json'} names no command; it is no record of farspan")
    return Run(name, record, _scales(folder), _metrics(folder))


def _scales(folder: Path) -> dict[int, list[float]]:
    """λ̂ of each head at the target, where the folder is a patch that has some."""
    import torch

    if not is_patch(folder):
        return {}
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
