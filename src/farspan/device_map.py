"""Models that one device does not hold: Accelerate places their layers on several GPUs, in memory
and on the disk, as the `device_map` of transformers says.

A layer outside a GPU is moved there for each of its passes. Its parameters are on the meta device
in between.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import PreTrainedModel

from farspan.errors import FarspanError

DeviceMap: TypeAlias = str | Mapping[str, str | int | torch.device]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(device_map: DeviceMap | None, device: str | torch.device | None) -> None:
    """Refuse a map that cannot be used, before anything is read."""
    if device_map is None:
        return
    if device is not None:
        raise FarspanError(
            f"the device is {str(device)!r} and the device map {device_map!r}; give one of them"
        )
    if isinstance(device_map, str) and device_map not in STRATEGIES:
        raise FarspanError(
            f"device map {device_map!r} is unknown; choose one of {', '.join(STRATEGIES)}"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise FarspanError(
            "a device map spreads one process over all devices, and torchrun started "
            f"{os.environ['WORLD_SIZE']}; remove torchrun, or the device map"
        )


# That parameters are on the meta device is no news to those who asked for it.
logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)


def placement(device_map: DeviceMap | None) -> dict[str, Any]:
    """The options of `from_pretrained` that place a model.

    Most weights on the disk are read from the checkpoint itself. Those that transformers converts
    while it loads get a folder for the life of this process.
    """
    if device_map is None:
        return {}
    placed = device_map if isinstance(device_map, str) else dict(device_map)
    return {"device_map": placed, "offload_folder": tempfile.mkdtemp(dir=_offload_folder().name)}


@cache
def _offload_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="farspan-offload-", ignore_cleanup_errors=True)


def is_placed(model: PreTrainedModel) -> bool:
    """Whether Accelerate moves layers or their inputs between devices."""
    places = getattr(model, "hf_device_map", None) or {}
    return len(set(places.values())) > 1


def outside_memory(model: PreTrainedModel) -> list[str]:
    """The names of the parameters that Accelerate keeps outside memory."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def check_placed(model: PreTrainedModel, source: object) -> None:
    """Refuse a model without embeddings in memory: texts are sent to the device of those."""
    if model.device.type == "meta":
        raise FarspanError(
            f"the device map leaves no memory for the embeddings of {source}; give a map that "
            "keeps them in memory, or free some"
        )


def stored_tensors(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Any]]:
    """The tensors of a model by name, those outside memory read one at a time."""
    for name, tensor in tensors:
        if not tensor.is_meta:
            yield name, tensor
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        with align_module_device(module, torch.device("cpu")):
            yield name, getattr(module, leaf).to(tensor.dtype)
