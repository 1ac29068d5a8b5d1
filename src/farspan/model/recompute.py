"""Gradients in less memory: a decoder layer keeps only its input, and the backward pass computes
its activations again, for the time of one more forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from farspan.model.compile import decoder_layers, prefer_cudnn

_RECOMPUTES = ContextVar("recomputes", default=False)


@contextmanager
def recomputed_activations(enabled: bool = True) -> Iterator[None]:
    """Let the losses of farspan.model.loss save memory so in this block."""
    token = _RECOMPUTES.set(enabled)
    try:
        yield
    finally:
        _RECOMPUTES.reset(token)


@contextmanager
def recomputed_layers(model: PreTrainedModel) -> Iterator[None]:
    """The layers of a forward pass in this block, if activations are to be computed again.

    They run without torch.compile. Only the instances change, and only in this block: a copy of the
    model must not run the layers of the original.
    """
    if not (_RECOMPUTES.get() and torch.is_grad_enabled()):
        yield
        return
    layers = [(layer, dict(layer.__dict__)) for layer in decoder_layers(model)]
    for layer, _ in layers:
        layer.forward = _recomputing(layer.forward)
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, before in layers:
            del layer.forward
            layer.__dict__.update(before)  # libraries that wrap modules set an own forward


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=kernel_contexts, **kwargs)

    return recompute


def kernel_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a pass and of its repetition for torch's checkpoint.

    The pass runs inside a loss that prefers cuDNN, the repetition in the backward pass after it. By
    another attention kernel it would keep tensors of other shapes, which torch refuses.
    """
    return nullcontext(), prefer_cudnn()
