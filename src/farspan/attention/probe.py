"""The position encoding of each layer, found by running the model instead of trusting its config.

The model runs twice over the same tokens, with position ids in forward and then in reverse order.
In the second run every attention module receives the hidden states of the first. If the keys of a
layer or the directions of its queries still change, its position encoding is rotary. Queries that
only grow have a temperature (`temperature.py`), which is no position encoding. If the input of the
first layer changes, positions are added to the embeddings. This works for any model family.

What the seam adds is observed too. Rotation that a layout adds goes by the order of the keys, so
these layers receive their hidden states in reverse order. A window that a layout sets is observed
by one attention call that is one key longer than the window.
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
from farspan.attention.call import seam_attention

TOKENS = 4
# The relative change that counts. Rounding in bf16 cancels, for both runs round alike.
MIN_CHANGE = 1e-4


@dataclass(frozen=True)
class Layer:
    """The measured properties of one attention layer."""

    index: int
    module: nn.Module = field(repr=False)
    position: str  # none | rope | alibi | t5 | learned | sinusoidal | unknown
    window: int | None  # sliding window in keys; None is full attention
    heads: int
    kv_heads: int
    head_dim: int
    base_scale: float


def probe(model: PreTrainedModel) -> list[Layer]:
    """The attention layers of a model on transformers' attention interface, in order.

    >>> [layer.position for layer in probe(smollm3)]
    ['rope', 'rope', 'rope', 'none', …]
    """
    takes_positions = "position_ids" in signature(model.forward).parameters
    with seam.attached(model):  # once for all runs
        indices = {call.module: call.layer for call in seam.attention_calls(model)}
        modules = list(indices)
        embeddings = model.get_input_embeddings()
        ids = torch.arange(TOKENS, device=model.device)[None] % embeddings.num_embeddings
        positions = torch.arange(TOKENS, device=model.device)[None]
        with _tables_used(model) as tables:
            first, inputs, start = _run(model, modules, ids, positions, replay=None)
        second, _, reversed_start = _run(model, modules, ids, positions.flip(1), replay=inputs)
        third = second
        if any(map(seam.adds_rotation, modules)):
            turned = {module: states.flip(1) for module, states in inputs.items()}
            third, _, _ = _run(model, modules, ids, positions, replay=turned)
    absolute = None
    tables = {table: rows for table, rows in tables.items() if table is not embeddings}
    if _changed(start, reversed_start):
        absolute = "learned" if tables else "sinusoidal"
    elif not takes_positions and any(_counts_up(*entry) for entry in tables.items()):
        absolute = "learned"  # by a position that the model counts itself
    return [
        Layer(
            index=indices[call.module],
            module=call.module,
            position=absolute or _encoding(call, other, turned_call, takes_positions),
            window=_window(call),
            heads=call.q.shape[1],
            kv_heads=call.k.shape[1],
            head_dim=call.q.shape[-1],
            base_scale=float(call.scaling),
        )
        for call, other, turned_call in zip(first, second, third, strict=True)
    ]


def turning_dimensions(model: PreTrainedModel, span: int) -> dict[int, int]:
    """How many dimensions of the keys of each layer turn within `span` tokens."""
    with seam.attached(model):
        indices = {call.module: call.layer for call in seam.attention_calls(model)}
        ids = torch.arange(TOKENS, device=model.device)[None]
        positions = ids * max(1, span // TOKENS)
        ids = ids % model.get_input_embeddings().num_embeddings
        options = dict(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        modules = list(indices)
        first, inputs = run_replayed(model, modules, None, **options, position_ids=positions)
        second, _ = run_replayed(model, modules, inputs, **options, position_ids=positions.flip(1))
    counts = {}
    for call, other in zip(first, second, strict=True):
        change = (call.k - other.k).abs().amax((0, 1, 2))
        counts[indices[call.module]] = int((change > MIN_CHANGE * call.k.abs().max()).sum())
    return counts


def _run(
    model: PreTrainedModel,
    modules: list[nn.Module],
    ids: Tensor,
    positions: Tensor,
    replay: dict[nn.Module, Tensor] | None,
) -> tuple[list[seam.Call], dict[nn.Module, Tensor], Tensor]:
    """`run_replayed` at these positions, and the input of the first decoder layer."""
    start: list[Tensor] = []

    def record_start(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        start.append(_hidden_states(args, kwargs))

    hook = _first_layer(model, modules[0]).register_forward_pre_hook(record_start, with_kwargs=True)
    try:
        # Without a mask, position ids that jump would be read as packed documents.
        calls, inputs = run_replayed(
            model,
            modules,
            replay,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            use_cache=False,
        )
    finally:
        hook.remove()
    return calls, inputs, start[-1]


def run_replayed(
    model: PreTrainedModel,
    modules: list[nn.Module],
    replay: dict[nn.Module, Tensor] | None,
    **arguments: Any,
) -> tuple[list[seam.Call], dict[nn.Module, Tensor]]:
    """One forward pass in which attention modules receive the hidden states of `replay`: the first
    call of each module, and the hidden states that it received before any replay."""
    calls: dict[nn.Module, seam.Call] = {}
    inputs: dict[nn.Module, Tensor] = {}

    def record_input(module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        inputs[module] = _hidden_states(args, kwargs)
        if replay is None:
            return None
        hidden = replay[module]
        return (
            ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        )

    def record_call(call: seam.Call) -> None:
        calls.setdefault(call.module, call)

    with seam.eval_mode(model), seam.observing(model, record_call):
        hooks = [
            module.register_forward_pre_hook(record_input, with_kwargs=True) for module in modules
        ]
        try:
            model(**arguments)
        finally:
            for hook in hooks:
                hook.remove()
    return [calls[module] for module in modules], inputs


def _hidden_states(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _first_layer(model: PreTrainedModel, attention: nn.Module) -> nn.Module:
    """The first decoder layer: the first entry of the list that holds this attention module."""
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and any(
            attention in layer.modules() for layer in layers
        ):
            return layers[0]
    return attention


def _encoding(call: seam.Call, other: seam.Call, turned: seam.Call, takes_positions: bool) -> str:
    """The position encoding of a layer from its calls in the three runs."""
    pairs = ((call.q, other.q), (call.k, other.k))
    if not all(torch.isfinite(tensor).all() and tensor.any() for pair in pairs for tensor in pair):
        return "unknown"  # NaN, infinity or all zeros show no change
    if _changed(call.k, other.k) or _turned(call.q, other.q):
        return "rope"
    if seam.adds_rotation(call.module) and _changed(call.q, turned.q.flip(2)):
        return "rope"
    if call.options.get("position_bias") is not None:
        return "unknown"  # added to the scores; it may depend on more than distance
    bias = call.options.get("bias")
    if bias is None:
        # A model that takes no position ids may still compute positions itself.
        return "none" if takes_positions else "unknown"
    if bias.function is None:
        return "unknown"  # it depends on more than distance
    distance = bias.tensor()[0, :, -1]  # [H, K] for the last query
    steps = distance.diff()
    linear = torch.allclose(steps, steps[:, :1].expand_as(steps)) and bool(steps.abs().max() > 0)
    return "alibi" if linear else "t5"


def _changed(first: Tensor, second: Tensor) -> bool:
    return bool((first - second).abs().max() > MIN_CHANGE * first.abs().max())


def _turned(first: Tensor, second: Tensor) -> bool:
    """Whether a query has another direction. A temperature rounds the queries of two runs
    differently, so what rounding can do does not count."""
    units = [nn.functional.normalize(queries.float(), dim=-1) for queries in (first, second)]
    change = float((units[0] - units[1]).abs().max())
    return change > max(MIN_CHANGE, 4 * torch.finfo(first.dtype).eps)


def _window(call: seam.Call) -> int | None:
    if (window := seam.window_of(call.module)) is not None:
        return window if _hides_beyond(call, window) else None
    if (window := call.options.get("sliding_window")) is not None:
        return int(window)
    config = call.module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[call.layer] == "chunked_attention":
        return getattr(config, "attention_chunk_size", None)
    if layer_types and layer_types[call.layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


@torch.no_grad()
def _hides_beyond(call: seam.Call, window: int) -> bool:
    """Whether the first key is visible to the last query in its window and to none after it.

    All keys are equal, and only the first has a value: an output that is not zero saw it."""
    tokens = window + 1
    parts = (call.q, call.k, call.v)
    q, k, v = (part[:1, :, :1].expand(-1, -1, tokens, -1) for part in parts)
    v = torch.zeros_like(v)
    v[:, :, 0] = 1
    mask = None
    if call.mask is not None:  # eager attention has its causal order from the mask
        mask = torch.full((1, 1, tokens, tokens), torch.finfo(q.dtype).min, device=q.device)
        mask = mask.to(q.dtype).triu(1)
    with torch.compiler.set_stance("force_eager"):
        output, _ = seam_attention(call.module, q, k, v, mask, scaling=call.scaling)
    return bool(output[:, window - 1].any()) and not bool(output[:, window].any())


def _counts_up(table: nn.Embedding, rows: Tensor) -> bool:
    """Whether an embedding returned neighboring rows of its table."""
    weight = table.weight
    if rows.shape[-1] != table.embedding_dim:
        return False
    rows = rows.reshape(-1, rows.shape[-1])
    starts = (weight == rows[0]).all(1).nonzero().flatten()
    return any(torch.equal(weight[start : start + len(rows)], rows) for start in starts)


@contextmanager
def _tables_used(model: PreTrainedModel) -> Iterator[dict[nn.Embedding, Tensor]]:
    """The embedding tables that the forward passes of this block use, with the rows that they
    return first."""
    used: dict[nn.Embedding, Tensor] = {}

    def record(module: nn.Embedding, args: tuple, output: Tensor) -> None:
        used.setdefault(module, output)

    hooks = [
        module.register_forward_hook(record)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()
