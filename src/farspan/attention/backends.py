"""The attention backends of transformers, and which keys their masks show.

Each backend takes what a query sees in its own form. Eager attention and SDPA take a mask [B, 1, Q,
K], and SDPA none for plain causal attention. FlashAttention takes the padding [B, K] or nothing,
and a window as an argument; its last query is at the last key. FlexAttention takes a block mask.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farspan.attention import block_masks
from farspan.attention.layout import banded, limit_to_window, query_slots, visible_mask
from farspan.errors import FarspanError

PREFIX = "farspan_seam_"  # of the seam's names of backends

Backend = Callable[..., tuple[Tensor, Tensor | None]]
Mask = Tensor | BlockMask | None


def backend_name(config: Any) -> str:
    """The name of the model's own backend, on the seam or not."""
    return config._attn_implementation.removeprefix(PREFIX)


def supported(name: str) -> bool:
    """Whether the masks of a backend are of a known form.

    A kernel of the hub ("owner/name") is none: transformers would look for the seam there."""
    if "/" in name or name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        return False
    known = (sdpa_mask, eager_mask, flash_attention_mask, flex_attention_mask)
    return ALL_MASK_ATTENTION_FUNCTIONS[name] in known


def is_flash(module: Any) -> bool:
    return ALL_MASK_ATTENTION_FUNCTIONS[backend_name(module.config)] is flash_attention_mask


def takes_tensor_masks(module: Any) -> bool:
    """Whether the backend is eager attention or SDPA."""
    masks = ALL_MASK_ATTENTION_FUNCTIONS[backend_name(module.config)]
    return masks in (sdpa_mask, eager_mask)


def own_attention(module: nn.Module, query, key, value, attention_mask, **kwargs):
    """The model's own attention.

    A call without a mask may still have a window, which the backends of transformers expect in the
    mask, except FlashAttention: it is computed in blocks.
    """
    backend, window = default_backend(module), kwargs.get("sliding_window")
    if is_flash(module):
        return backend(_off_seam(module), query, key, value, attention_mask, **kwargs)
    if attention_mask is None and window is not None and query.shape[2] > window:
        return banded(backend, module, query, key, value, **{**kwargs, "window": window})
    return backend(module, query, key, value, attention_mask, **kwargs)


def default_backend(module: Any) -> Backend:
    """The function that the model would call without the seam."""
    name = backend_name(module.config)
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    for cls in type(module).__mro__:  # by convention in the module of the attention class
        if eager := getattr(sys.modules[cls.__module__], "eager_attention_forward", None):
            return eager
    raise FarspanError(
        f"{type(module).__name__} runs on eager attention, but its Python module defines no "
        'eager_attention_forward; load the model with attn_implementation="sdpa"'
    )


def _off_seam(module: nn.Module) -> nn.Module:
    """The module with the backend's own name in its config, by which FlashAttention loads its
    kernels; a shallow copy, because other calls read the config at the same time."""
    view, config = copy.copy(module), copy.copy(cast(Any, module.config))
    config._attn_implementation_internal = backend_name(config)
    view.config = config
    return view


def mask_of_selected_keys(
    module: nn.Module, query: Tensor, key: Tensor, mask: Mask, kwargs: dict[str, Any]
) -> Mask:
    """The mask with the selection of sparse attention in it.

    Sparse families put their selection into the mask if the implementation is named `eager` or
    `sdpa`; to every other name they hand it over, for a kernel: `indices` of keys [B, Q, top-k]
    (DeepSeek V3.2), or `block_indices` with an indexer that makes the mask (MiniMax M3). GLM 5 Next
    makes a mask for every name: booleans for `sdpa`, numbers for all others.
    """
    if not takes_tensor_masks(module):
        return mask
    if hasattr(module, "build_attention_mask_from_topk") and backend_name(module.config) == "sdpa":
        # Where nothing is selected, SDPA returns 0 for booleans and the mean value for numbers.
        return mask.eq(0) if isinstance(mask, Tensor) and mask.dtype != torch.bool else mask
    if (blocks := kwargs.pop("block_indices", None)) is not None:
        queries, keys = query.shape[2], key.shape[2]
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(keys - queries, keys, device=query.device)[None]
        indexer: Any = module.indexer
        return indexer.build_block_mask(
            blocks, mask, keys, query.dtype, query.device, positions.expand(query.shape[0], -1)
        )
    indices = kwargs.pop("indices", None)
    if indices is None or not isinstance(mask, Tensor):
        return mask
    shape = (*indices.shape[:2], key.shape[2])
    hidden = torch.ones(shape, dtype=torch.bool, device=query.device)
    hidden = hidden.scatter(-1, indices.long(), False)[:, None]
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def windowed(
    module: nn.Module, key: Tensor, value: Tensor, mask: Mask, queries: int, window: int
) -> tuple[Tensor, Tensor, Mask]:
    """Keys, values and mask of a call whose queries see their last `window` keys only.

    FlashAttention has the window as an argument."""
    if isinstance(mask, BlockMask):
        return key, value, block_masks.within_window(mask, key.shape[2], window)
    if is_flash(module):
        return key, value, None if mask is None else mask[:, -key.shape[2] :]
    return limit_to_window(key, value, mask, queries, window)


def query_places(module: nn.Module, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """The place of each query among the keys, broadcastable to [B, 1, Q]."""
    if isinstance(mask, BlockMask):
        return block_masks.seen_keys(mask).slots
    queries, keys = q.shape[2], k.shape[2]
    if is_flash(module):
        last = keys if mask is None else mask.shape[1]
        return torch.arange(last - queries, last, device=q.device)
    if mask is not None:
        return query_slots(mask)
    first = keys - 1 if queries == 1 else 0  # a single query is at the end of the cache
    return torch.arange(first, first + queries, device=q.device)


def visible_keys(
    q: Tensor, k: Tensor, mask: Mask, window: int | None = None, *, flash: bool = False
) -> Tensor:
    """How many keys each query sees, [B or 1, Q], from the mask that the backend receives.

    Position ids would be wrong with padding, sliding caches and packing; the mask is always right.
    """
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(mask, BlockMask):
        return block_masks.seen_keys(mask).counts[:, 0]
    if mask is not None and not flash:
        return visible_mask(mask)[:, 0].sum(dim=-1)
    if mask is not None:
        counts = mask.long().cumsum(1)[:, -queries:]
    else:  # causal; a single query sees the whole cache
        first = keys - queries + 1 if flash or queries == 1 else 1
        counts = torch.arange(first, first + queries, device=q.device)[None]
    return counts if window is None else counts.clamp(max=window)


def check_not_packed(kwargs: dict[str, Any]) -> None:
    """Refuse packed texts on FlashAttention, whose mask does not show where they begin."""
    positions = kwargs.get("position_ids")
    packed = kwargs.get("cu_seq_lens_q") is not None
    if not packed and positions is not None and positions.shape[0] == 1:
        packed = bool((positions.diff(dim=-1) != 1).any())
    if packed:
        raise FarspanError(
            "growing scales need the number of keys that a query sees, and FlashAttention's mask "
            "does not show it for packed texts; run one text per row, or load the model with "
            'attn_implementation="sdpa" or "flex_attention"'
        )


def tensor_mask(
    module: nn.Module, q: Tensor, k: Tensor, mask: Mask, window: int | None
) -> Tensor | None:
    """The mask as observers read it: [B, 1, Q, K], or None for causal attention from the first key
    or of a single query, within the window."""
    if isinstance(mask, BlockMask):
        return block_masks.as_tensor(mask)
    queries, keys = q.shape[2], k.shape[2]
    if not is_flash(module) or (mask is None and queries in (1, keys)):
        return mask
    own = query_places(module, q, k, mask)[:, None]
    slots = torch.arange(keys, device=q.device)
    visible = (slots <= own) & (slots > own - (window or keys))
    if mask is None:
        return visible[None, None]
    padding = nn.functional.pad(mask.bool(), (0, keys - mask.shape[1]))
    return visible & padding[:, None, None]
