"""Which layers do positions reach? Found by running the model, not by believing its config.

The model runs twice over the same tokens, with position ids forwards and then backwards; in the second run
every attention module is handed the hidden states of the first. If a layer's keys still move, positions enter
in that layer. If they do not, but the embeddings moved, positions enter there. No family needs to be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.attention import seam

TOKENS = 4
MOVED = 1e-4  # relative change of keys that counts; rounding in bf16 cancels, for both runs round alike


@dataclass(frozen=True)
class Layer:
    """What one attention layer was seen to do."""

    index: int
    module: nn.Module = field(repr=False)
    position: str  # none | rope | alibi | t5 | learned | sinusoidal | unknown
    window: int | None  # keys it sees at most; None is all
    heads: int
    kv_heads: int
    head_dim: int
    base_scale: float


def probe(model: PreTrainedModel) -> list[Layer]:
    """Every attention layer of a model on the attention interface, in order.

    >>> [layer.position for layer in probe(smollm3)]
    ['rope', 'rope', 'rope', 'none', …]
    """
    indices = {call.module: call.layer for call in seam.attention_calls(model)}
    modules = list(indices)
    placed = "position_ids" in signature(model.forward).parameters
    ids = torch.arange(TOKENS, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    positions = torch.arange(TOKENS, device=model.device)[None]
    with _tables_used(model) as tables:
        first, inputs, start = _run(model, modules, ids, positions, replay=None)
    second, _, moved_start = _run(model, modules, ids, positions.flip(1), replay=inputs)
    absolute = None
    if _moved(start, moved_start):
        absolute = "learned" if tables - {model.get_input_embeddings()} else "sinusoidal"
    return [
        Layer(
            index=indices[call.module],
            module=call.module,
            position=absolute or _kind(call, other, placed),
            window=_window(call),
            heads=call.q.shape[1],
            kv_heads=call.k.shape[1],
            head_dim=call.q.shape[-1],
            base_scale=float(call.scaling),
        )
        for call, other in zip(first, second, strict=True)
    ]


def _run(
    model: PreTrainedModel,
    modules: list[nn.Module],
    ids: Tensor,
    positions: Tensor,
    replay: dict[nn.Module, Tensor] | None,
) -> tuple[list[seam.Call], dict[nn.Module, Tensor], Tensor]:
    """The first call of each attention module in one forward pass, the hidden states that went in, or would have,
    and those that went into the first decoder layer."""
    calls: dict[nn.Module, seam.Call] = {}
    inputs: dict[nn.Module, Tensor] = {}
    start: list[Tensor] = []

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        inputs[module] = _hidden(args, kwargs)
        if replay is None:
            return None
        hidden = replay[module]
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def at_start(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        start.append(_hidden(args, kwargs))

    def see(call: seam.Call) -> None:
        calls.setdefault(call.module, call)

    with seam.evaluating(model), seam.observing(model, see):
        hooks = [_first_layer(model, modules[0]).register_forward_pre_hook(at_start, with_kwargs=True)]
        hooks += [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
        try:
            # An all-ones mask: without one, position ids that jump would be read as packed documents.
            model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    return [calls[module] for module in modules], inputs, start[0]


def _hidden(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _first_layer(model: PreTrainedModel, attention: nn.Module) -> nn.Module:
    """The first of the layers that this attention module is in one of: what the embeddings go into."""
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and any(attention in layer.modules() for layer in layers):
            return layers[0]
    return attention


def _kind(call: seam.Call, other: seam.Call, placed: bool) -> str:
    pairs = ((call.q, other.q), (call.k, other.k))
    if not all(torch.isfinite(tensor).all() and tensor.any() for pair in pairs for tensor in pair):
        return "unknown"  # nothing can be seen in what is not finite, or all zero
    if any(_moved(*pair) for pair in pairs):
        return "rope"
    if call.options.get("position_bias") is not None:
        return "unknown"  # what a family of transformers adds to scores; it may depend on more than distance
    bias = call.options.get("bias")
    if bias is None:
        return "none" if placed else "unknown"  # a model that takes no position ids hides where it gets them
    distance = bias.tensor()[0, :, -1]  # [H, K] as the last query sees it
    steps = distance.diff(dim=-1)
    linear = torch.allclose(steps, steps[:, :1].expand_as(steps)) and bool(steps.abs().max() > 0)
    return "alibi" if linear else "t5"


def _moved(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() > MOVED * one.abs().max())


def _window(call: seam.Call) -> int | None:
    window = call.options.get("sliding_window")
    if window is not None:
        return int(window)
    config = call.module.config
    spans = getattr(config, "layer_types", None)
    if not spans:
        return getattr(config, "sliding_window", None)
    if spans[call.layer] == "chunked_attention":
        return getattr(config, "attention_chunk_size", None)
    return getattr(config, "sliding_window", None) if spans[call.layer] == "sliding_attention" else None


@contextmanager
def _tables_used(model: PreTrainedModel) -> Iterator[set[nn.Module]]:
    """The embedding tables that a forward pass looks into."""
    used: set[nn.Module] = set()
    hooks = [
        module.register_forward_hook(lambda module, args, output: used.add(module))
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()
