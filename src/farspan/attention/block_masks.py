"""FlexAttention's block masks: what their queries see, and the same masks within a window.

A block mask is a function of query and key with the blocks in which it is not empty. Rows of it are
evaluated a few at a time, so memory grows with the number of keys alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from farspan.attention.layout import query_slots

MAX_ELEMENTS = 2**24  # of the rows that are evaluated at once

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class SeenKeys(NamedTuple):
    """What each query of a block mask sees."""

    counts: Tensor  # of keys, [B, H or 1, Q]
    slots: Tensor  # the last of them, [B, H or 1, Q]; −1 if there is none


@torch.compiler.disable
def seen_keys(mask: BlockMask) -> SeenKeys:
    """All layers receive the same mask, so the result is kept with it."""
    kept = mask.__dict__.get("_farspan_seen_keys")
    if kept is None:
        batch, heads, queries, keys = mask.shape
        step = max(1, MAX_ELEMENTS // (batch * heads * keys))
        parts = [
            create_mask(
                _shifted(mask.mask_mod, queries=start),
                batch,
                heads,
                min(step, queries - start),
                keys,
                device=mask.kv_num_blocks.device,
            )
            for start in range(0, queries, step)
        ]
        counts = torch.cat([part.sum(-1) for part in parts], dim=-1)
        kept = SeenKeys(counts, torch.cat([query_slots(part) for part in parts], dim=-1))
        mask.__dict__["_farspan_seen_keys"] = kept
    return kept


@torch.compiler.disable
def within_window(mask: BlockMask, keys: int, window: int) -> BlockMask:
    """The mask of the last `keys` keys in which a query sees its last `window` keys only."""
    kept = mask.__dict__.setdefault("_farspan_windows", {})
    if (keys, window) not in kept:
        batch, heads, queries, all_keys = mask.shape
        first = all_keys - keys  # a windowed cache holds the last keys only
        own = seen_keys(mask).slots - first
        visible = _shifted(mask.mask_mod, keys=first)

        def mask_function(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            near = key > own[row, head % heads, query] - window
            return visible(row, head, query, key) & near

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "_compile flag", DeprecationWarning)
            kept[keys, window] = create_block_mask(
                mask_function,
                batch,
                heads,
                queries,
                keys,
                device=mask.kv_num_blocks.device,
                _compile=True,  # as transformers does: without it, all scores take memory
            )
    return kept[keys, window]


def as_tensor(mask: BlockMask) -> Tensor:
    """The mask as booleans, [B, H or 1, Q, K]."""
    return create_mask(mask.mask_mod, *mask.shape, device=mask.kv_num_blocks.device)


def _shifted(function: MaskFunction, queries: int = 0, keys: int = 0) -> MaskFunction:
    """The function for queries and keys that are counted from these."""
    return lambda row, head, query, key: function(row, head, query + queries, key + keys)
