"""`farspan report`: the records of runs as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from farspan.attention.patch import Patch
from farspan.data.jsonlines import read_rows
from farspan.errors import CorruptError, FarspanError, at_least_one, install_hint
from farspan.files import read_json, write_text
from farspan.loading import is_patch
from farspan.progress import Say, ignore
from farspan.report.page import SECTIONS, Run, page
from farspan.report.samples import compress
from farspan.train.loop import METRICS
from farspan.workflows.diagnose import model_names

WRITERS = "diagnose, extend, eval, reproduce, lab run or pretrain"


def report(
    folders: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    say: Say = ignore,
) -> Path:
    """Write one HTML page about the runs in `folders`; it needs no network to be viewed.

    Runs of `diagnose`, `extend`, `eval`, `reproduce`, `lab run` and `pretrain` have figures.

    >>> farspan.report(["results", "rope-1k"], "runs.html").name
    'runs.html'
    """
    out = Path(out)
    if out.is_dir():
        raise FarspanError(
            f"{out} is a folder; choose a file name, for example {out / 'report.html'}"
        )
    if out.suffix not in (".html", ".htm"):
        raise FarspanError(f"the report is an HTML page; end the file name {out} in .html")
    folders = at_least_one(folders, "the folder of a run")
    runs = read_runs(folders)
    script = _plotly()
    for run, folder in zip(runs, folders, strict=True):
        with naming_record(folder):
            page([run], "")
        if run.record["command"] not in SECTIONS:
            say(f"{folder} is a run of {run.record['command']}, which has no figures; listed only")
    # A folder name may not be valid UTF-8.
    write_text(out, page(name_by_model(runs), script).encode("utf-8", "replace").decode("utf-8"))
    return out


def read_runs(folders: Sequence[str | Path], writers: str = WRITERS) -> list[Run]:
    """The records in folders of runs, under distinct names; writers: the commands to advise."""
    return [
        _read_run(Path(folder), name, writers)
        for folder, name in zip(folders, _names(folders), strict=True)
    ]


def name_by_model(runs: Sequence[Run]) -> list[Run]:
    """The same runs, evaluations under the short names of their models.

    A patch that one of the runs made is named as that run.
    """
    models = [run.record["model"] for run in runs if _is_named_by_model(run)]
    bases = [str(run.record["vs"]["model"]) for run in runs if run.record.get("vs")]
    distinct = list(dict.fromkeys([*models, *bases]))
    patches = {run.name for run in runs if run.record["command"] == "extend"}
    short = {
        model: Path(model).name if Path(model).name in patches else name
        for model, name in zip(distinct, model_names(distinct), strict=True)
    }
    return [_rename(run, short, models) for run in runs]


def _is_named_by_model(run: Run) -> bool:
    return run.record["command"] == "eval" and isinstance(run.record.get("model"), str)


def _rename(run: Run, short: Mapping[str, str], models: Sequence[str]) -> Run:
    """An evaluation under the short name of its model, and of its folder if others have it too."""
    if not _is_named_by_model(run):
        return run
    model = run.record["model"]
    name = short[model] if models.count(model) == 1 else f"{short[model]} ({run.name})"
    record = dict(run.record)
    if baseline := record.get("vs"):
        record["vs"] = {**baseline, "model": short[str(baseline["model"])]}
    samples = [{**row, "model": short.get(row["model"], row["model"])} for row in run.samples]
    return replace(run, name=name, record=record, samples=samples)


INVALID = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)


@contextmanager
def naming_record(folder: str | Path) -> Iterator[None]:
    """In the block, an error of a record that is not as farspan wrote it names its folder."""
    try:
        yield
    except INVALID as error:
        raise CorruptError(
            f"the record in {folder} is invalid ({type(error).__name__}: {error}); "
            "repeat the run with this version of farspan"
        ) from None


def _names(folders: Sequence[str | Path]) -> list[str]:
    """The folders' names, or as much of their paths as makes them distinct."""
    short = [Path(folder).resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else model_names(folders)


def _read_run(folder: Path, name: str, writers: str) -> Run:
    if not folder.exists():
        raise FarspanError(f"{folder} was not found; check the path")
    if (folder / "record.json").exists():
        record = read_json(folder / "record.json")
        if not isinstance(record.get("command"), str):
            raise CorruptError(
                f"{folder / 'record.json'} has no command, so it is not a farspan record; "
                "choose the folder of a run"
            )
    elif (folder / "results.json").exists():
        record = {"command": "reproduce", **read_json(folder / "results.json")}
    elif (folder / METRICS).exists():  # an unfinished training run
        record = {"command": "pretrain"}
    else:
        raise FarspanError(f"{folder} has no record.json; choose folders written by {writers}")
    scales: dict[int, list[float]] = {}
    if is_patch(folder):
        patch_json = read_json(folder / "patch.json")
        record = {**record, "method": patch_json.get("method")}
        scales = _scales(folder) if patch_json.get("scales") else {}
    samples = list(read_samples(folder)) if record["command"] == "eval" else []
    return Run(name, record, scales, _metrics(folder), samples, name)


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """The stored samples of an evaluation, with the model of each."""
    for file in sorted((folder / "samples").glob("*.jsonl")):
        for number, row in read_rows(file):
            if not {"model", "eval", "task", "length"} <= row.keys():
                raise CorruptError(f"{file}, line {number} is not a sample; repeat the run")
            yield row


def _scales(folder: Path) -> dict[int, list[float]]:
    """λ̂ of each head at the target of a patch, by layer."""
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
        raise FarspanError(
            f"farspan report needs plotly, which is not installed; {install_hint('report')}"
        ) from None
    return _packed(get_plotlyjs)


@cache
def _packed(script: Callable[[], str]) -> str:
    return compress(script().encode())
