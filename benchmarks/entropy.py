"""Attention entropy on one GPU: our kernels, attention kernels, FlexAttention, materialized scores.

    python benchmarks/entropy.py                       # the table of docs/performance.md
    python benchmarks/entropy.py --head-dim 128
    python benchmarks/entropy.py --tune                # tile shapes for kernels.py

All variants of one length are timed round-robin in one process, so that ratios share clocks and
temperature; times are medians over rounds, by CUDA events. Ratios are to the cuDNN forward pass of
the same length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from farspan.attention import kernels
from farspan.attention.entropy import reference_entropy
from farspan.attention.scores import Scores

MIB = 2**20


def inputs(length: int, heads: int, kv_heads: int, width: int) -> tuple[Scores, Tensor]:
    """Random queries and keys; half of the heads attend sharply to one earlier key."""
    generator = torch.Generator("cuda").manual_seed(length)
    k, v, q = (
        torch.randn(1, count, length, width, device="cuda", generator=generator)
        for count in (kv_heads, kv_heads, heads)
    )
    fractions = torch.rand(length, device="cuda", generator=generator)
    targets = (fractions * torch.arange(1, length + 1, device="cuda")).long()
    target_keys = k.repeat_interleave(heads // kv_heads, 1)[:, ::2][:, :, targets]
    q[:, ::2] = 0.4 * q[:, ::2] + 1.2 * target_keys
    scaling = torch.linspace(1.0, 2.5, heads, device="cuda") * width**-0.5
    return Scores(q.bfloat16(), k.bfloat16(), scaling), v.bfloat16()


def sdpa(backend: SDPBackend, scores: Scores, v: Tensor) -> Callable[[], Tensor]:
    def run():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                scores.q, scores.k, v, is_causal=True, enable_gqa=True
            )

    return run


def flex_twice(scores: Scores, v: Tensor) -> Callable[[], Tensor]:
    """Entropy by two log-sum-exp passes: ln Σ e^s (lse − s) − lse = ln H."""
    length, scale = scores.q.shape[2], scores.scaling
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    narrow = v[..., :16].contiguous()  # only the log-sum-exp is used

    def one_pass(q, k, lse):
        def score(s, b, h, i, j):
            x = s * scale[h]
            return x if lse is None else x + (lse[b, h, i] - x).clamp(min=1e-30).log()

        _, aux = flex_attention(
            q, k, narrow, score, mask, scale=1.0, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return aux.lse

    compiled = torch.compile(one_pass, dynamic=False)

    def run():
        lse = compiled(scores.q, scores.k, None)
        return (compiled(scores.q, scores.k, lse) - lse).exp()

    return run


def materialized(scores: Scores) -> Callable[[], Tensor]:
    """The usual code of papers: probabilities of a head in bf16, then p·log p."""
    heads, length = scores.q.shape[1:3]
    group = heads // scores.k.shape[1]

    def run():
        nats = torch.empty(heads, length, device="cuda")
        hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu_(1)
        for head in range(heads):
            s = (scores.q[0, head] * scores.scaling[head].bfloat16()) @ scores.k[0, head // group].T
            p = s.masked_fill_(hidden, -torch.inf).softmax(-1, dtype=torch.float32).bfloat16()
            nats[head] = -torch.special.xlogy(p, p).sum(-1, dtype=torch.float32)
        return nats

    return run


def variants(scores: Scores, v: Tensor, length: int) -> dict[str, Callable[[], object]]:
    runs: dict[str, Callable[[], object]] = {
        "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, scores, v),
        "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION, scores, v),
        "entropy": lambda: kernels.entropy(scores),
        "entropy of every 16th row": lambda: kernels.entropy(scores, every=16),
        "output + entropy": lambda: kernels.attention(scores, v),
    }
    if length <= 32768:  # both take memory with the square of the length
        if scores.q.shape[-1] == 64:
            runs["FlexAttention, two passes"] = flex_twice(scores, v)
        runs["materialized"] = materialized(scores)
    return runs


def milliseconds(run: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)  # a millisecond for the host to queue the work
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def round_robin(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each run, in a random order every round: each run warms the next."""
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            times[name].append(milliseconds(runs[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def extra_memory(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def accuracy(heads: int, kv_heads: int, width: int) -> dict[str, float]:
    scores, v = inputs(2048, heads, kv_heads, width)
    exact = reference_entropy(scores)
    measured = kernels.entropy(scores)
    _, fused = kernels.attention(scores, v)
    return {
        "entropy": (measured.nats - exact.nats).abs().max().item(),
        "fused": (fused.nats - exact.nats).abs().max().item(),
        "lse": (measured.lse - exact.lse).abs().max().item(),
        "lowest": measured.nats.min().item(),
    }


def tune(heads: int, kv_heads: int, width: int) -> None:
    """Print the fastest tile shapes, relative to cuDNN."""
    for length in (16384, 65536):
        scores, v = inputs(length, heads, kv_heads, width)
        cudnn = sdpa(SDPBackend.CUDNN_ATTENTION, scores, v)
        for name, run in {
            "entropy": lambda tiles, s=scores: kernels.entropy(s, tiles=tiles),
            "attention": lambda tiles, s=scores, v=v: kernels.attention(s, v, tiles=tiles),
        }.items():
            timings = []
            for shape in itertools.product((64, 128), (64, 128, 256), (4, 8), (2, 3, 4)):
                tiles = kernels.Tiles(*shape)
                if tiles.rows == 64 and tiles.warps == 8:
                    continue
                try:
                    times = round_robin(
                        {"cudnn": cudnn, "ours": lambda run=run, tiles=tiles: run(tiles)}, 3
                    )
                except Exception as error:  # a shape that does not fit in shared memory
                    print(name, tiles, type(error).__name__, flush=True)
                    continue
                timings.append((times["ours"] / times["cudnn"], times["ours"], tiles))
            for ratio, time, tiles in sorted(timings)[:6]:
                print(
                    f"{length:7d} d{width} {name:10s} {time:8.3f} ms  {ratio:.3f} x cuDNN  {tiles}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="16384,32768,65536,131072")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    shape = (args.heads, args.kv_heads, args.head_dim)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    about = f"{torch.cuda.get_device_name()}, {versions}, bf16, heads {shape}"
    print(about)
    if args.tune:
        tune(*shape)
        return
    record: dict[str, object] = {"about": about, "accuracy": accuracy(*shape)}
    print(
        "largest errors against float64 at 2,048:",
        {k: f"{x:.1e}" for k, x in record["accuracy"].items()},
    )
    table, memory = {}, {}
    for length in map(int, args.lengths.split(",")):
        scores, v = inputs(length, *shape)
        table[length] = round_robin(
            variants(scores, v, length), args.rounds if length < 100_000 else 7
        )
        memory[length] = extra_memory(lambda s=scores: kernels.entropy(s))
        torch._dynamo.reset()
    for name in next(iter(table.values())):
        cells = [
            f"{times[name]:9.2f} ({times[name] / times['SDPA cuDNN']:5.2f})"
            if name in times
            else " " * 17
            for times in table.values()
        ]
        print(f"{name:28s}", *cells)
    print(f"{'MiB for entropy and lse':28s}", *(f"{mib:9.1f}        " for mib in memory.values()))
    record.update(milliseconds=table, mib=memory)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
