"""Triton kernels for plain causal attention on CUDA: entropy alone, and attention output with its entropy.

Both stream over the keys once and keep, for each query row, the running maximum m and the shifted sums l, t, u of
`entropy.py`, all in base 2. What makes them fast: an exponential is one hardware instruction, and six
instructions are spent on a score in all; and a row's sums stay split into four lanes, which is how the matrix
unit hands scores to threads (a thread holds columns 2i and 2i+1 of every eight), so that no thread talks to
another inside the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from farspan.attention.entropy import Entropy, Scores

WIDTHS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LANES = 4
HIDDEN = tl.constexpr(-(2.0**50))  # a power of two: times any scale it is exact, so that x is exactly 0 there


class Tiles(NamedTuple):
    """Rows and keys of a tile, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# The fastest of `benchmarks/entropy.py --tune` on an H200, by width of a head.
ENTROPY_TILES = {64: Tiles(64, 128, 4, 2), 128: Tiles(128, 128, 8, 2)}
ATTENTION_TILES = {64: Tiles(64, 128, 4, 3), 128: Tiles(128, 128, 8, 3)}
SMALL = Tiles(64, 32, 4, 2)  # any other width, and float32, whose tiles are twice as large


def supported(scores: Scores, v: Tensor | None = None) -> bool:
    """Can the kernels compute this? Widths are powers of two; everything lies row by row, on borders of 16 bytes."""
    q, k = scores.q, scores.k
    streamed = [k] if v is None else [k, v]
    return (
        scores.plain
        and q.shape[-1] in WIDTHS
        and q.dtype in DTYPES
        and q.stride(-1) == 1
        and all(x.stride(-1) == 1 and x.shape[-1] == q.shape[-1] and x.data_ptr() % 16 == 0 for x in streamed)
        and all(stride * x.element_size() % 16 == 0 for x in streamed for stride in x.stride()[:-1])
    )


def entropy(
    scores: Scores, *, every: int = 1, variance: bool = False, sink: bool = True, tiles: Tiles | None = None
) -> Entropy:
    """The entropy of every `every`-th query; nothing of size L×L, and no values, are touched."""
    q, k = scores.q, scores.k
    batch, heads, queries, width = q.shape
    rows = (queries + every - 1) // every
    nats = q.new_empty((batch, heads, rows), dtype=torch.float32)
    lse = torch.empty_like(nats)
    first = torch.empty_like(nats) if sink else nats
    spread = torch.empty_like(nats) if variance else nats
    tiles = tiles or _tiles(ENTROPY_TILES, q)
    _entropy_kernel[(triton.cdiv(rows, tiles.rows), batch * heads)](
        q,
        _blocks(k, tiles.keys),
        _head_scales(scores),
        nats,
        lse,
        first,
        spread,
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
        SINK=sink,
        VARIANCE=variance,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return Entropy(nats, lse, first if sink else None, spread if variance else None)


def attention(
    scores: Scores, v: Tensor, *, variance: bool = False, tiles: Tiles | None = None
) -> tuple[Tensor, Entropy]:
    """Attention output [B, H, Q, D] and the entropy of every query, in one pass."""
    q, k = scores.q, scores.k
    batch, heads, queries, width = q.shape
    output = torch.empty_like(q)
    nats = q.new_empty((batch, heads, queries), dtype=torch.float32)
    lse, first = torch.empty_like(nats), torch.empty_like(nats)
    spread = torch.empty_like(nats) if variance else nats
    tiles = tiles or _tiles(ATTENTION_TILES, q)
    _attention_kernel[(triton.cdiv(queries, tiles.rows), batch * heads)](
        q,
        _blocks(k, tiles.keys),
        _blocks(v, tiles.keys),
        _head_scales(scores),
        output,
        nats,
        lse,
        first,
        spread,
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
        VARIANCE=variance,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return output, Entropy(nats, lse, first, spread if variance else None)


def _tiles(table: dict[int, Tiles], q: Tensor) -> Tiles:
    return SMALL if q.dtype == torch.float32 else table.get(q.shape[-1], SMALL)


def _blocks(x: Tensor, keys: int) -> TensorDescriptor:
    """Keys or values [B, KV, K, D] for the copy engine, whatever their strides, `keys` rows at a time; rows
    beyond the end read as zeros."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, keys, x.shape[-1]])


def _head_scales(scores: Scores) -> Tensor:
    scaling, heads = scores.scaling, scores.q.shape[1]
    if isinstance(scaling, Tensor):
        return scaling.to(scores.q.device, torch.float32).contiguous()
    return torch.full((heads,), scaling, dtype=torch.float32, device=scores.q.device)


@triton.jit
def _exp2(x):
    # One instruction. tl.exp2 spends three more on denormal numbers, which add nothing to a sum that is ≥ 1.
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _merge(m, l, t, u):
    """The sums of a row from those of its lanes, [ROWS, LANES] -> [ROWS]: moved to the row's maximum, then added."""
    top = tl.max(m, 1)
    shift = m - top[:, None]
    a = tl.exp2(shift)
    u = tl.sum(a * (u + shift * (2.0 * t + shift * l)), 1)
    t = tl.sum(a * (t + shift * l), 1)
    l = tl.sum(a * l, 1)
    return top, l, t, u


@triton.jit
def _entropy_kernel(
    q_ptr,
    k_blocks,
    scale_ptr,
    nats_ptr,
    lse_ptr,
    sink_ptr,
    var_ptr,
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
    SINK: tl.constexpr,
    VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first: the shortest fill the gaps
    pair = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    key_head = head // group
    row = block * ROWS + tl.arange(0, ROWS)
    last = row * every + offset  # the last key that each row sees
    inside = row < rows
    q_rows = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_rows += (row * every).to(tl.int64)[:, None] * stride_qm
    q = tl.load(q_rows + tl.arange(0, D)[None, :], mask=inside[:, None], other=0.0)
    scale = tl.load(scale_ptr + head) * 1.4426950408889634  # log2(e): all below is in base 2

    m = tl.full([ROWS, LANES], HIDDEN, tl.float32)
    l = tl.zeros([ROWS, LANES], tl.float32)
    t = tl.zeros([ROWS, LANES], tl.float32)
    u = tl.zeros([ROWS, LANES], tl.float32)
    seen_by_all = (block * ROWS * every + offset + 1) // KEYS * KEYS
    seen_by_any = tl.minimum((block * ROWS + ROWS - 1) * every + offset + 1, keys)
    for start in tl.range(0, seen_by_all, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        m, l, t, u = _add_tile(s, m, l, t, u, scale, ROWS, KEYS, LANES, VARIANCE)
    for start in tl.range(seen_by_all, seen_by_any, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(start + tl.arange(0, KEYS)[None, :] <= last[:, None], s, HIDDEN)
        m, l, t, u = _add_tile(s, m, l, t, u, scale, ROWS, KEYS, LANES, VARIANCE)

    m, l, t, u = _merge(m, l, t, u)
    mean = t / l
    at = pair.to(tl.int64) * rows + row
    tl.store(nats_ptr + at, (tl.log2(l) - mean) * 0.6931471805599453, mask=inside)
    tl.store(lse_ptr + at, (m + tl.log2(l)) * 0.6931471805599453, mask=inside)
    if SINK:
        k = k_blocks.load([batch, key_head, 0, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        first = tl.sum(tl.where(tl.arange(0, KEYS)[None, :] == 0, s, 0.0), 1)
        tl.store(sink_ptr + at, tl.exp2(first * scale - m) / l, mask=inside)
    if VARIANCE:
        tl.store(var_ptr + at, (u / l - mean * mean) * 0.4804530139182014, mask=inside)


@triton.jit
def _add_tile(
    s,
    m,
    l,
    t,
    u,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    VARIANCE: tl.constexpr,
):
    """Add a tile of raw scores [ROWS, KEYS] to the sums of each lane."""
    s = s.reshape(ROWS, KEYS // (2 * LANES), LANES, 2)
    top = tl.maximum(m, tl.max(tl.max(s, 1), 2) * scale)
    x = s * scale - top[:, None, :, None]
    p = _exp2(x)
    shift = m - top
    a = _exp2(shift)
    px = p * x
    if VARIANCE:
        u = a * (u + shift * (2.0 * t + shift * l)) + _lane_sum(px * x)
    t = a * (t + shift * l) + _lane_sum(px)
    l = a * l + _lane_sum(p)
    return top, l, t, u


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
    sink_ptr,
    var_ptr,
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
    VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    key_head = head // group
    row = block * ROWS + tl.arange(0, ROWS)
    last = row + offset
    inside = row < rows
    q_rows = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_rows += row.to(tl.int64)[:, None] * stride_qm
    q = tl.load(q_rows + tl.arange(0, D)[None, :], mask=inside[:, None], other=0.0)
    scale = tl.load(scale_ptr + head) * 1.4426950408889634

    # The output needs one maximum a row, so m is whole here; l and t stay split by lanes until the end.
    m = tl.full([ROWS], HIDDEN, tl.float32)
    l = tl.zeros([ROWS, LANES], tl.float32)
    t = tl.zeros([ROWS, LANES], tl.float32)
    u = tl.zeros([ROWS, LANES], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    seen_by_all = (block * ROWS + offset + 1) // KEYS * KEYS
    seen_by_any = tl.minimum(block * ROWS + ROWS + offset, keys)
    for start in tl.range(0, seen_by_all, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        v = v_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        m, l, t, u, o = _attend_tile(s, v, m, l, t, u, o, scale, ROWS, KEYS, LANES, VARIANCE, PRECISION)
    for start in tl.range(seen_by_all, seen_by_any, KEYS):
        k = k_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        v = v_blocks.load([batch, key_head, start, 0]).reshape(KEYS, D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(start + tl.arange(0, KEYS)[None, :] <= last[:, None], s, HIDDEN)
        m, l, t, u, o = _attend_tile(s, v, m, l, t, u, o, scale, ROWS, KEYS, LANES, VARIANCE, PRECISION)

    total = tl.sum(l, 1)
    at = pair.to(tl.int64) * rows + row
    mean = tl.sum(t, 1) / total
    tl.store(nats_ptr + at, (tl.log2(total) - mean) * 0.6931471805599453, mask=inside)
    tl.store(lse_ptr + at, (m + tl.log2(total)) * 0.6931471805599453, mask=inside)
    k = k_blocks.load([batch, key_head, 0, 0]).reshape(KEYS, D)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    first = tl.sum(tl.where(tl.arange(0, KEYS)[None, :] == 0, s, 0.0), 1)
    tl.store(sink_ptr + at, tl.exp2(first * scale - m) / total, mask=inside)
    if VARIANCE:
        tl.store(var_ptr + at, (tl.sum(u, 1) / total - mean * mean) * 0.4804530139182014, mask=inside)
    o_rows = o_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    o_rows += row.to(tl.int64)[:, None] * stride_om
    o = o / total[:, None]
    tl.store(o_rows + tl.arange(0, D)[None, :], o.to(o_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _attend_tile(
    s,
    v,
    m,
    l,
    t,
    u,
    o,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    top = tl.maximum(m, tl.max(tl.max(s.reshape(ROWS, KEYS // LANES, LANES), 1), 1) * scale)
    x = s * scale - top[:, None]
    p = _exp2(x)
    shift = (m - top)[:, None]
    a = _exp2(shift)
    px = p * x
    if VARIANCE:
        u = a * (u + shift * (2.0 * t + shift * l)) + tl.sum((px * x).reshape(ROWS, KEYS // LANES, LANES), 1)
    t = a * (t + shift * l) + tl.sum(px.reshape(ROWS, KEYS // LANES, LANES), 1)
    l = a * l + tl.sum(p.reshape(ROWS, KEYS // LANES, LANES), 1)
    o = tl.dot(p.to(v.dtype), v, o * a, input_precision=PRECISION)
    return top, l, t, u, o
