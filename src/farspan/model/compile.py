"""Speed on a GPU for any model family: compiled decoder layers and the fastest SDPA backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from farspan.device_map import is_placed

# Parameters. Compiling takes about ten seconds, in which a smaller model has finished.
MIN_COMPILED_SIZE = 300_000_000


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: the modules that the family declares must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer by itself; a compiled whole model passes SDPA a mask, which rules out
    flash attention."""
    raise_recompile_limit()
    for layer in decoder_layers(model):
        layer.compile(dynamic=False)


def raise_recompile_limit(graphs: int = 64) -> None:
    """Allow this many compiled graphs per function; after eight, torch silently stops compiling."""
    torch._dynamo.config.recompile_limit = max(graphs, torch._dynamo.config.recompile_limit)


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Compile the layers for a block, on one GPU and for a model of MIN_COMPILED_SIZE or more."""
    small = model.num_parameters() < MIN_COMPILED_SIZE
    if model.device.type != "cuda" or small or is_placed(model):
        yield
        return
    compile_layers(model)
    try:
        yield
    finally:
        for layer in decoder_layers(model):
            layer._compiled_call_impl = None
        torch._dynamo.reset()


def prefer_cudnn() -> AbstractContextManager[None]:
    """Use cuDNN's attention, the fastest on Hopper, and the next backend where it cannot run."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)
