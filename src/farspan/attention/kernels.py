"""Triton kernels for plain causal attention on CUDA: entropy, or output and entropy in one pass.

Both stream over the keys once and keep, for each query row, the running maximum m and the shifted
sums l and t of `entropy.py`, all in base 2. They are fast for two reasons. An exponential is one
hardware instruction, and a score costs six instructions in all. A row's sums stay split into four
lanes, the layout in which the matrix unit hands scores to threads (a thread holds columns 2i and
2i+1 of every eight), so threads do not communicate inside the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from farspan.attention.scores import Entropy, Scores

WIDTHS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LANES = 4
# The score of a masked key. A power of two times any scale is exact, so x is exactly 0 there.
HIDDEN = tl.constexpr(-(2.0**50))


class Tiles(NamedTuple):
    """The shape of a tile, and the warps and pipeline stages that compute it."""

    rows: int
    keys: int
    warps: int
    stages: int


# The fastest in `benchmarks/entropy.py --tune` on an H200, by head width.
ENTROPY_TILES = {64: Tiles(64, 128, 4, 2), 128: Tiles(128, 128, 8, 2)}
ATTENTION_TILES = {64: Tiles(64, 128, 4, 3), 128: Tiles(128, 128, 8, 3)}
SMALL = Tiles(64, 32, 4, 2)  # other widths, and float32, whose tiles take twice the memory


def supported(scores: Scores, v: Tensor | None = None) -> bool:
    """Whether the kernels can compute this call.

    Head widths must be powers of two, rows contiguous and aligned to 16 bytes."""
    q, k = scores.q, scores.k
    streamed = [k] if v is None else [k, v]
    return (
        scores.plain
        and q.shape[-1] in WIDTHS
        and q.dtype in DTYPES
        and q.stride(-1) == 1
        and all(
            x.stride(-1) == 1 and x.shape[-1] == q.shape[-1] and x.data_ptr() % 16 == 0
            for x in streamed
        )
        and all(stride * x.element_size() % 16 == 0 for x in streamed for stride in x.stride()[:-1])
    )


def entropy(scores: Scores, *, every: int = 1, tiles: Tiles | None = None) -> Entropy:
    """Entropy of every `every`-th query, without values and without the L×L matrix."""
    q, k = scores.q, scores.k
    batch, heads, queries, width = q.shape
    rows = (queries + every - 1) // every
    nats = q.new_empty((batch, heads, rows), dtype=torch.float32)
    lse = torch.empty_like(nats)
    tiles = tiles or _tiles(ENTROPY_TILES, q)
    _entropy_kernel[(triton.cdiv(rows, tiles.rows), batch * heads)](
        q,
        _blocks(k, tiles.keys),
        _head_scales(scores),
        nats,
        lse,
        *q.stride()[:3],
        heads,
        heads // k.shape[1],
        rows,
        k.shape[2],
        k.shape[2] - queries,
        every,
        D=width,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        LANES=LANES,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return Entropy(nats, lse)


def attention(scores: Scores, v: Tensor, *, tiles: Tiles | None = None) -> tuple[Tensor, Entropy]:
    """Attention output [B, H, Q, D] and the entropy of every query, in one pass."""
    q, k = scores.q, scores.k
    batch, heads, queries, width = q.shape
    output = torch.empty_like(q)
    nats = q.new_empty((batch, heads, queries), dtype=torch.float32)
    lse = torch.empty_like(nats)
    tiles = tiles or _tiles(ATTENTION_TILES, q)
    _attention_kernel[(triton.cdiv(queries, tiles.rows), batch * heads)](
        q,
        _blocks(k, tiles.keys),
        _blocks(v, tiles.keys),
        _head_scales(scores),
        output,
        nats,
        lse,
        *q.stride()[:3],
        *output.stride()[:3],
        heads,
        heads // k.shape[1],
        queries,
        k.shape[2],
        k.shape[2] - queries,
        D=width,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        LANES=2 * LANES,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return output, Entropy(nats, lse)


def _tiles(table: dict[int, Tiles], q: Tensor) -> Tiles:
    return SMALL if q.dtype == torch.float32 else table.get(q.shape[-1], SMALL)


def _blocks(x: Tensor, keys: int) -> TensorDescriptor:
    """Keys or values [B, KV, K, D] of any strides for the copy engine, `keys` rows at a time.

    Rows beyond the end read as zeros."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, keys, x.shape[-1]])


def _head_scales(scores: Scores) -> Tensor:
    scaling, heads = scores.scaling, scores.q.shape[1]
    if isinstance(scaling, Tensor):
        return scaling.to(scores.q.device, torch.float32).contiguous()
    return torch.full((heads,), scaling, dtype=torch.float32, device=scores.q.device)


@triton.jit
def _exp2(x):
    # One instruction. tl.exp2 spends three more on denormals, which add nothing to a sum ≥ 1.
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _row_pointers(ptr, batch, head, row, stride_b, stride_h, stride_m, D: tl.constexpr):
    """Pointers to rows [ROWS, D] of one head; offsets are 64-bit, for long contexts."""
    start = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return start + row.to(tl.int64)[:, None] * stride_m + tl.arange(0, D)[None, :]


@triton.jit
def _merge(m, l, t):
    """Sum the lanes of a row after shifting them to its maximum: [ROWS, LANES] -> [ROWS]."""
    top = tl.max(m, 1)
    shift = m - top[:, None]
    a = tl.exp2(shift)
    t = tl.sum(a * (t + shift * l), 1)
    l = tl.sum(a * l, 1)
    return top, l, t


@triton.jit
def _entropy_kernel(
    q_ptr,
    k_blocks,
    scale_ptr,
    nats_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    heads,
    group,
    rows,
    keys,
    offset,
    every,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The longest rows first: the short ones fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    key_head = head // group
    row = block * ROWS + tl.arange(0, ROWS)
    last = row * every + offset  # the last key that each row sees
    inside = row < rows
    q_rows = _row_pointers(q_ptr, batch, head, row * every, stride_qb, stride_qh, stride_qm, D)
    q = tl.load(q_rows, mask=inside[:, None], other=0.0)
    scale = tl.load(scale_ptr + head) * 1.4426950408889634  # log2(e): all that follows is in base 2

    m = tl.full([ROWS, LANES], HIDDEN, tl.float32)
    l = tl.zeros([ROWS, LANES], tl.float32)
    t = tl.zeros([ROWS, LANES], tl.float32)
    seen_by_all = (block * ROWS * every + offset + 1) // KEYS * KEYS
    seen_by_any = tl.minimum((block * ROWS + ROWS - 1) * every + offset + 1, keys)
    for start in tl.range(0, seen_by_all, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        m, l, t = _add_tile(s, m, l, t, scale, ROWS, KEYS, LANES)
    for start in tl.range(seen_by_all, seen_by_any, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(start + tl.arange(0, KEYS)[None, :] <= last[:, None], s, HIDDEN)
        m, l, t = _add_tile(s, m, l, t, scale, ROWS, KEYS, LANES)

    m, l, t = _merge(m, l, t)
    mean = t / l
    at = pair.to(tl.int64) * rows + row
    tl.store(nats_ptr + at, (tl.log2(l) - mean) * 0.6931471805599453, mask=inside)
    tl.store(lse_ptr + at, (m + tl.log2(l)) * 0.6931471805599453, mask=inside)


@triton.jit
def _add_tile(
    s,
    m,
    l,
    t,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add a tile of raw scores [ROWS, KEYS] to the sums of each lane."""
    s = s.reshape(ROWS, KEYS // (2 * LANES), LANES, 2)
    top = tl.maximum(m, tl.max(tl.max(s, 1), 2) * scale)
    x = s * scale - top[:, None, :, None]
    p = _exp2(x)
    shift = m - top
    a = _exp2(shift)
    px = p * x
    t = a * (t + shift * l) + _lane_sum(px)
    l = a * l + _lane_sum(p)
    return top, l, t


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, 1), 2)


@triton.jit
def _attention_kernel(
    q_ptr,
    k_blocks,
    v_blocks,
    scale_ptr,
    o_ptr,
    nats_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_ob,
    stride_oh,
    stride_om,
    heads,
    group,
    rows,
    keys,
    offset,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    key_head = head // group
    row = block * ROWS + tl.arange(0, ROWS)
    last = row + offset
    inside = row < rows
    q_rows = _row_pointers(q_ptr, batch, head, row, stride_qb, stride_qh, stride_qm, D)
    q = tl.load(q_rows, mask=inside[:, None], other=0.0)
    scale = tl.load(scale_ptr + head) * 1.4426950408889634

    # The output needs one maximum per row, so m is per row; l and t stay split into lanes.
    m = tl.full([ROWS], HIDDEN, tl.float32)
    l = tl.zeros([ROWS, LANES], tl.float32)
    t = tl.zeros([ROWS, LANES], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    seen_by_all = (block * ROWS + offset + 1) // KEYS * KEYS
    seen_by_any = tl.minimum(block * ROWS + ROWS + offset, keys)
    for start in tl.range(0, seen_by_all, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        v = v_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        m, l, t, o = _attend_tile(s, v, m, l, t, o, scale, ROWS, KEYS, LANES, PRECISION)
    for start in tl.range(seen_by_all, seen_by_any, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        v = v_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(start + tl.arange(0, KEYS)[None, :] <= last[:, None], s, HIDDEN)
        m, l, t, o = _attend_tile(s, v, m, l, t, o, scale, ROWS, KEYS, LANES, PRECISION)

    total = tl.sum(l, 1)
    at = pair.to(tl.int64) * rows + row
    mean = tl.sum(t, 1) / total
    tl.store(nats_ptr + at, (tl.log2(total) - mean) * 0.6931471805599453, mask=inside)
    tl.store(lse_ptr + at, (m + tl.log2(total)) * 0.6931471805599453, mask=inside)
    o_rows = _row_pointers(o_ptr, batch, head, row, stride_ob, stride_oh, stride_om, D)
    o = o / total[:, None]
    tl.store(o_rows, o.to(o_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _attend_tile(
    s,
    v,
    m,
    l,
    t,
    o,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    top = tl.maximum(m, tl.max(tl.max(s.reshape(ROWS, KEYS // LANES, LANES), 1), 1) * scale)
    x = s * scale - top[:, None]
    p = _exp2(x)
    shift = (m - top)[:, None]
    a = _exp2(shift)
    px = p * x
    t = a * (t + shift * l) + tl.sum(px.reshape(ROWS, KEYS // LANES, LANES), 1)
    l = a * l + tl.sum(p.reshape(ROWS, KEYS // LANES, LANES), 1)
    o = tl.dot(p.to(v.dtype), v, o * a, input_precision=PRECISION)
    return top, l, t, o
