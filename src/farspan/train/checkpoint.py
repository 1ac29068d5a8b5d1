"""Checkpoints of a run: written atomically, verified by checksums, found again after a kill.

    checkpoints/step-0000500/   model.safetensors  optimizer.safetensors  state.json  manifest.json

The folder appears under its name in one rename, after everything in it is written and flushed. An
older checkpoint is removed only after that. `manifest.json` has the SHA-256 of every file, so that
a checkpoint that was damaged later is skipped for the one before.
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
from farspan.files import (
    check_manifest,
    check_safetensors,
    new_folder,
    read_json,
    read_tensors,
    write_json,
    write_manifest,
)
from farspan.train.sharding import full_tensor, shard_like

log = logging.getLogger(__name__)
KEEP_LAST = 2  # the latest checkpoint, and one to fall back on


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]  # state.json: the step and what else the loop needs to resume

    @property
    def step(self) -> int:
        return int(self.state["step"])


def checkpoint_root(run: Path) -> Path:
    return run / "checkpoints"


def checkpoint_name(step: int) -> str:
    return f"step-{step:07d}"


def collect(
    parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> dict[str, dict[str, Tensor]]:
    """File name -> whole tensors on the CPU. Every process must call this: it gathers shards."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = {
        f"{names[id(parameter)]}/{key}": full_tensor(value)
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    model = {name: full_tensor(parameter.detach()) for name, parameter in parameters.items()}
    return {"model": _on_cpu(model), "optimizer": _on_cpu(state)}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def save(
    run: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: Sequence[int] = (),
    write_extras: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write the checkpoint of state["step"], then remove old ones except the steps in `keep`.

    write_extras: adds files to the folder, such as a config.
    """
    from safetensors.torch import save_file

    folder = checkpoint_root(run) / checkpoint_name(state["step"])
    try:
        with new_folder(folder) as new:
            for name, table in tensors.items():
                file = new / f"{name}.safetensors"
                save_file(dict(table), file, metadata={"format": "pt"})
                check_safetensors(file)  # a short write is not always an error
            write_extras(new)
            write_json(new / "state.json", state)
            write_manifest(new)
    except OSError as error:
        raise FarspanError(
            f"{folder} cannot be written ({error.strerror or error}); free some space or repair "
            "the disk, then rerun the same command to resume from the last checkpoint in "
            f"{checkpoint_root(run)}"
        ) from error
    _remove_old(run, keep)
    return folder


def latest(run: Path) -> Checkpoint | None:
    """The latest intact checkpoint of a run, if any; damaged ones are set aside with a warning."""
    _remove_leftovers(run)
    folders = sorted(checkpoint_root(run).glob("step-*"), reverse=True)
    for folder in folders:
        try:
            check_manifest(folder)
            return Checkpoint(folder, read_json(folder / "state.json"))
        except FarspanError as error:
            broken = _unused_name(folder.with_name(f"broken-{folder.name}"))
            log.warning("%s; it is set aside as %s", str(error).partition(";")[0], broken.name)
            os.replace(folder, broken)
    count = len(list(checkpoint_root(run).glob("broken-*")))
    if count:
        raise CorruptError(
            f"none of the {count} checkpoints in {checkpoint_root(run)} is intact; choose another "
            "folder, or remove that one to start again"
        )
    return None


def restore(
    checkpoint: Checkpoint, parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> None:
    """Load the tensors of a checkpoint into parameters and optimizers, bit for bit."""
    model = read_tensors(checkpoint.folder / "model.safetensors")
    copy_tensors(model, parameters, checkpoint.folder)
    names = {id(parameter): name for name, parameter in parameters.items()}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_tensors(checkpoint.folder / "optimizer.safetensors").items():
        name, _, part = key.rpartition("/")
        states.setdefault(name, {})[part] = tensor
    for optimizer in optimizers:
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        sharded = {
            number: {
                part: shard_like(tensor.to(parameter.device), parameter) if tensor.ndim else tensor
                for part, tensor in states[names[id(parameter)]].items()
            }
            for number, parameter in enumerate(updated)
            if names[id(parameter)] in states
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": sharded})


@torch.no_grad()
def copy_tensors(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], folder: Path
) -> None:
    """Copy tensors into parameters of the same names.

    Names and shapes are checked first, so that tensors of another model change nothing.
    """
    for name, parameter in parameters.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            stored = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise FarspanError(
                f"{folder} is of another model: {name} {stored} there and has shape "
                f"{list(parameter.shape)} here; choose another folder"
            )
    for name, parameter in parameters.items():
        parameter.copy_(shard_like(tensors[name].to(parameter.device), parameter))


def _remove_old(run: Path, keep: Sequence[int]) -> None:
    kept = {checkpoint_name(step) for step in keep}
    for folder in sorted(checkpoint_root(run).glob("step-*"))[:-KEEP_LAST]:
        if folder.name not in kept:
            # Rename first: a partly removed checkpoint must not have the name of an intact one.
            removed = _unused_name(folder.with_name(f".old-{folder.name}"))
            os.rename(folder, removed)
            shutil.rmtree(removed, ignore_errors=True)


def _remove_leftovers(run: Path) -> None:
    """Remove what a killed process left partly written or partly removed."""
    for leftover in checkpoint_root(run).glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _unused_name(path: Path) -> Path:
    number = 0
    while (unused := path.with_name(f"{path.name}.{number}" if number else path.name)).exists():
        number += 1
    return unused
