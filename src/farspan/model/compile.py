"""Speed on a GPU for any model family: compiled decoder layers and the fastest SDPA backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from farspan.device_map import is_placed

# Parameters. Compiling takes about ten seconds; in those a smaller model has finished a search.
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
def compiled_layers(*models: PreTrainedModel, min_size: int = 0) -> Iterator[None]:
    """Compile layers for a block: those of the models on one GPU with `min_size` parameters."""
    large = [model for model in models if model.num_parameters() >= min_size]
    chosen = [model for model in large if _on_one_gpu(model)]
    for model in chosen:
        compile_layers(model)
    try:
        yield
    finally:
        for model in chosen:
            for layer in decoder_layers(model):
                layer._compiled_call_impl = None
        if chosen:
            torch._dynamo.reset()


def _on_one_gpu(model: PreTrainedModel) -> bool:
    return model.device.type == "cuda" and not is_placed(model)


def prefer_cudnn() -> AbstractContextManager[None]:
    """Use cuDNN's attention, the fastest on Hopper, and the next backend where it cannot run."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)
