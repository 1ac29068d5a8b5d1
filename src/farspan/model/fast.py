"""What makes a model fast on a GPU, ours or another's: compiled decoder layers, and the quickest attention first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

PAYS = 300_000_000  # parameters; compiling takes some ten seconds, in which a smaller model is done


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that a family says must not be split: its decoder layers. They share one compiled graph."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer, and never the whole: that would hand SDPA a mask that exists, and lose flash attention."""
    compile_often()
    for layer in decoder_layers(model):
        layer.compile(dynamic=False)


def compile_often(graphs: int = 64) -> None:
    """One piece of code may be compiled for so many models and shapes; after eight the compiler would go on without
    compiling, and not say so."""
    torch._dynamo.config.recompile_limit = max(graphs, torch._dynamo.config.recompile_limit)


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Compiled layers for a block, where that pays: on a GPU, for a model that is not small."""
    if model.device.type != "cuda" or model.num_parameters() < PAYS:
        yield
        return
    compile_layers(model)
    try:
        yield
    finally:
        for layer in decoder_layers(model):
            layer._compiled_call_impl = None
        torch._dynamo.reset()


def quick_attention() -> AbstractContextManager[None]:
    """cuDNN's attention is the fastest on Hopper; where it cannot run, the next one does."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
