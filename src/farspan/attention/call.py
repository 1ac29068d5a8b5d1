"""One attention call on the seam: what is attached to its module, and what is done with it.

State is a plain object in the `__dict__` of each attention module. It is no parameter and no
buffer, so nothing leaks into a saved checkpoint. A compiled layer reads the same attribute in every
layer; indexing a table would compile one graph per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from farspan.attention.backends import (
    Backend,
    Mask,
    check_not_packed,
    is_flash,
    mask_of_selected_keys,
    own_attention,
    query_places,
    tensor_mask,
    visible_keys,
    windowed,
)
from farspan.attention.layout import LayerLayout, rotate_by_slot
from farspan.attention.scales import Scales
from farspan.errors import FarspanError

STATE_KEY = "_farspan_seam"


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call as it reaches the backend and as an observer sees it."""

    layer: int
    module: nn.Module
    q: Tensor  # [B, H, Q, D], already scaled
    k: Tensor  # [B, KV, K, D], after rotation, with the cached keys
    v: Tensor
    mask: Tensor | None  # boolean or additive; None is causal, within `sliding_window` if given
    scaling: float  # multiplies q·k
    options: dict[str, Any]  # all other arguments: bias, sliding_window, s_aux, softcap, …


Observer = Callable[[Call], None]


@dataclass
class SeamState:
    """What is attached to one attention module."""

    layer: int
    scales: Scales | None = None  # one row
    backend: Backend | None = None  # replaces the model's own
    observers: tuple[Observer, ...] = ()
    layout: LayerLayout | None = None
    fixes_dimensions: bool = False  # some dimensions would turn without the layout
    adds_rotation: bool = False  # the layout rotates, and the layer itself does not
    rotation_hook: RemovableHandle | None = None  # the layer rotates more than the layout does

    @property
    def in_use(self) -> bool:
        return any((self.scales, self.observers, self.backend, self.layout))


def seam_attention(module: nn.Module, query, key, value, attention_mask, **kwargs):
    """The registered function: apply the layout, scale queries, notify observers, call the model's
    own backend."""
    attention_mask = mask_of_selected_keys(module, query, key, attention_mask, kwargs)
    state = module.__dict__.get(STATE_KEY)
    if state is None:
        return own_attention(module, query, key, value, attention_mask, **kwargs)
    if state.layout is not None:
        if (window := state.layout.window) is not None:
            key, value, attention_mask = windowed(
                module, key, value, attention_mask, query.shape[2], window
            )
            kwargs["sliding_window"] = window
        if state.adds_rotation:
            places = query_places(module, query, key, attention_mask)
            query, key = rotate_by_slot(query, key, places)
    if state.scales is not None:
        flash = is_flash(module)
        if flash and attention_mask is None and not state.scales.constant:
            check_not_packed(kwargs)
        query = scale_queries(
            query, key, attention_mask, state.scales, kwargs.get("sliding_window"), flash=flash
        )
    if state.observers:
        _notify_observers(state, module, query, key, value, attention_mask, kwargs)
    return (state.backend or own_attention)(module, query, key, value, attention_mask, **kwargs)


def scale_queries(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    scales: Scales,
    window: int | None = None,
    *,
    flash: bool = False,
) -> Tensor:
    """λ̂(n)·q for one layer's scales, multiplied in float32 and rounded once."""
    scales = scales.to(q.device)
    if scales.constant:
        scale = scales.base[0][:, None]  # [H, 1]
    elif mask is not None and len(mask.shape) == 4 and mask.shape[1] > 1:
        raise FarspanError(
            "growing scales need one number of visible keys for all heads, and this model selects "
            "keys for each head; use constant scales (headscale)"
        )
    else:
        counts = visible_keys(q, k, mask, window, flash=flash)
        scale = scales.at(counts)[0].transpose(0, 1)  # [B or 1, H, Q]
    return (q * scale[..., None]).to(q.dtype)


@torch.compiler.disable
def _notify_observers(state: SeamState, module, query, key, value, mask, kwargs) -> None:
    # Inside a backward pass gradient checkpointing repeats a call that was already observed.
    if torch._C._current_graph_task_id() != -1:
        return
    call = as_call(state.layer, module, query, key, value, mask, kwargs)
    with torch.no_grad():
        for observer in state.observers:
            observer(call)


def as_call(
    layer: int,
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    kwargs: dict[str, Any],
) -> Call:
    """The arguments of an attention function as a Call."""
    options = dict(kwargs)
    scaling = options.pop("scaling", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = tensor_mask(module, query, key, mask, options.get("sliding_window"))
    return Call(layer, module, query.detach(), key.detach(), value.detach(), mask, scaling, options)
