"""A run's state on disk: whole or not there, proven by checksums, found again wherever the run was killed.

    checkpoints/step-0000500/   model.safetensors  optimizer.safetensors  state.json  manifest.json

The folder appears under its name in one rename, when everything in it is written and flushed. An older one goes only
after that. `manifest.json` holds the SHA-256 of every file, so a checkpoint that decayed later is passed over for the
one before.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farspan.errors import CorruptError, FarspanError
from farspan.files import check_safetensors, new_folder, read_json, read_tensors, sha256_of, write_json
from farspan.train.sharding import cut_like, whole

log = logging.getLogger(__name__)
LAST = 2  # checkpoints that stay beside those to keep: the newest, and one to fall back on


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    facts: dict[str, Any]  # state.json: the step, and what else the loop wants to know again

    @property
    def step(self) -> int:
        return int(self.facts["step"])


def home(run: Path) -> Path:
    return run / "checkpoints"


def name_of(step: int) -> str:
    return f"step-{step:07d}"


def collect(trained: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Tensor]]:
    """File name -> tensors, whole and on the CPU. Every process must call this: shards are gathered."""
    names = {id(parameter): name for name, parameter in trained.items()}
    state = {
        f"{names[id(parameter)]}/{key}": whole(value)
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    model = {name: whole(parameter.detach()) for name, parameter in trained.items()}
    return {"model": _on_cpu(model), "optimizer": _on_cpu(state)}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def save(
    run: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    facts: Mapping[str, Any],
    *,
    keep: Sequence[int] = (),
    beside: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write the checkpoint of facts["step"], then let older ones go. `beside` adds files, such as a config."""
    from safetensors.torch import save_file

    folder = home(run) / name_of(facts["step"])
    try:
        with new_folder(folder) as new:
            for name, table in tensors.items():
                save_file(dict(table), new / f"{name}.safetensors", metadata={"format": "pt"})
                check_safetensors(new / f"{name}.safetensors")  # a short write is not always an error
            beside(new)
            write_json(new / "state.json", facts)
            write_manifest(new)
    except OSError as error:
        raise FarspanError(
            f"{folder} cannot be written ({error.strerror or error}); free some space or mend the disk, then give the "
            f"same command again: it goes on from the last checkpoint in {home(run)}"
        ) from error
    _let_go(run, keep)
    return folder


def write_manifest(folder: Path) -> None:
    """manifest.json: the SHA-256 of every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    write_json(folder / "manifest.json", {"sha256": {str(file.relative_to(folder)): sha256_of(file) for file in files}})


def check_manifest(folder: Path) -> None:
    """Refuse a folder whose files are not those that its manifest lists."""
    listed = read_json(folder / "manifest.json").get("sha256")
    if not isinstance(listed, dict):
        raise CorruptError(f"{folder / 'manifest.json'} lists no files; remove {folder}, it is not whole")
    for name, digest in listed.items():
        file = folder / name
        if not file.is_file() or sha256_of(file) != digest:
            raise CorruptError(f"{file} is not what {folder.name}/manifest.json says; remove {folder}, it is not whole")


def newest(run: Path) -> Checkpoint | None:
    """The latest whole checkpoint of a run, if there is one; a broken one is set aside and said."""
    _sweep(run)
    folders = sorted(home(run).glob("step-*"), reverse=True)
    for folder in folders:
        try:
            check_manifest(folder)
            return Checkpoint(folder, read_json(folder / "state.json"))
        except FarspanError as error:
            aside = _free_name(folder.with_name(f"broken-{folder.name}"))
            log.warning("%s; it is set aside as %s", str(error).partition(";")[0], aside.name)
            os.replace(folder, aside)
    broken = len(list(home(run).glob("broken-*")))
    if broken:
        raise CorruptError(
            f"none of the {broken} checkpoints in {home(run)} is whole; choose another folder, or remove that one to "
            "begin again"
        )
    return None


def restore(checkpoint: Checkpoint, trained: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Put a checkpoint's tensors back, bit for bit."""
    model = read_tensors(checkpoint.folder / "model.safetensors")
    fit(model, trained, checkpoint.folder)
    names = {id(parameter): name for name, parameter in trained.items()}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_tensors(checkpoint.folder / "optimizer.safetensors").items():
        name, _, part = key.rpartition("/")
        states.setdefault(name, {})[part] = tensor
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        spread = {
            number: {
                part: cut_like(tensor.to(parameter.device), parameter) if tensor.ndim else tensor
                for part, tensor in states[names[id(parameter)]].items()
            }
            for number, parameter in enumerate(parameters)
            if names[id(parameter)] in states
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": spread})


@torch.no_grad()
def fit(tensors: Mapping[str, Tensor], trained: Mapping[str, Tensor], folder: Path) -> None:
    """Copy tensors into parameters of the same names and shapes; another model's are refused before any is touched."""
    for name, parameter in trained.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            held = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise FarspanError(
                f"{folder} is of another model: {name} {held} there and has shape {list(parameter.shape)} here; "
                "choose another folder"
            )
    for name, parameter in trained.items():
        parameter.copy_(cut_like(tensors[name].to(parameter.device), parameter))


def _let_go(run: Path, keep: Sequence[int]) -> None:
    kept = {name_of(step) for step in keep}
    for folder in sorted(home(run).glob("step-*"))[:-LAST]:
        if folder.name not in kept:
            # Under a hidden name first: half a checkpoint must not bear the name of a whole one.
            gone = _free_name(folder.with_name(f".old-{folder.name}"))
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _sweep(run: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for litter in home(run).glob(".*"):
        shutil.rmtree(litter, ignore_errors=True)


def _free_name(path: Path) -> Path:
    number = 0
    while (free := path.with_name(f"{path.name}.{number}" if number else path.name)).exists():
        number += 1
    return free
