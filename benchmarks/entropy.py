"""Attention entropy on one GPU: ours against attention kernels, FlexAttention and the materialised way.

    python benchmarks/entropy.py                       # the table of docs/performance.md
    python benchmarks/entropy.py --head-dim 128
    python benchmarks/entropy.py --tune                # every tile shape, to choose the ones in kernels.py

All variants of one length are timed round-robin in one process, so that ratios share clocks and temperature;
times are medians over rounds, by CUDA events. Ratios are to the cuDNN forward pass of the same length.
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
from farspan.attention.entropy import Scores, reference_entropy

MIB = 2**20


def inputs(length: int, heads: int, kv_heads: int, width: int) -> tuple[Scores, Tensor]:
    """Random queries and keys; half of the heads look for one earlier key, so that sharp rows occur."""
    draw = torch.Generator("cuda").manual_seed(length)
    randn = lambda *shape: torch.randn(*shape, device="cuda", generator=draw)  # noqa: E731
    k, v, q = randn(1, kv_heads, length, width), randn(1, kv_heads, length, width), randn(1, heads, length, width)
    wanted = (torch.rand(length, device="cuda", generator=draw) * torch.arange(1, length + 1, device="cuda")).long()
    q[:, ::2] = 0.4 * q[:, ::2] + 1.2 * k.repeat_interleave(heads // kv_heads, 1)[:, ::2][:, :, wanted]
    scaling = torch.linspace(1.0, 2.5, heads, device="cuda") * width**-0.5
    return Scores(q.bfloat16(), k.bfloat16(), scaling), v.bfloat16()


def sdpa(backend: SDPBackend, scores: Scores, v: Tensor) -> Callable[[], Tensor]:
    def run():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(scores.q, scores.k, v, is_causal=True, enable_gqa=True)

    return run


def flex_twice(scores: Scores, v: Tensor) -> Callable[[], Tensor]:
    """Entropy by two log-sum-exp passes: ln Σ e^s (lse − s) − lse = ln H."""
    length, scale = scores.q.shape[2], scores.scaling
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    narrow = v[..., :16].contiguous()  # only the log-sum-exp is wanted

    def one(q, k, lse):
        def score(s, b, h, i, j):
            x = s * scale[h]
            return x if lse is None else x + (lse[b, h, i] - x).clamp(min=1e-30).log()

        found = flex_attention(q, k, narrow, score, mask, scale=1.0, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return found[1].lse

    compiled = torch.compile(one, dynamic=False)

    def run():
        lse = compiled(scores.q, scores.k, None)
        return (compiled(scores.q, scores.k, lse) - lse).exp()

    return run


def materialised(scores: Scores) -> Callable[[], Tensor]:
    """As papers' code does it: probabilities of a head in bf16, then p·log p."""
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
    chosen: dict[str, Callable[[], object]] = {
        "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, scores, v),
        "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION, scores, v),
        "entropy": lambda: kernels.entropy(scores, sink=False),
        "entropy and sink": lambda: kernels.entropy(scores),
        "entropy of every 16th row": lambda: kernels.entropy(scores, every=16, sink=False),
        "output + entropy": lambda: kernels.attention(scores, v),
    }
    if scores.q.shape[-1] == 64 and length <= 32768:  # building its block mask takes memory with the square
        chosen["FlexAttention, two passes"] = flex_twice(scores, v)
    if length <= 32768:
        chosen["materialised"] = materialised(scores)
    return chosen


def milliseconds(run: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)  # a millisecond in which the host queues the work: its time is not the device's
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def round_robin(chosen: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    for run in chosen.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in chosen}
    order = random.Random(0)
    for _ in range(rounds):  # each round in another order: what runs before leaves the chip warmer or cooler
        for name in order.sample(list(chosen), len(chosen)):
            times[name].append(milliseconds(chosen[name]))
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
    exact = reference_entropy(scores, variance=True)
    alone = kernels.entropy(scores, variance=True)
    _, fused = kernels.attention(scores, v)
    off = lambda a, b: (a - b).abs().max().item()  # noqa: E731
    return {
        "entropy": off(alone.nats, exact.nats),
        "fused": off(fused.nats, exact.nats),
        "lse": off(alone.lse, exact.lse),
        "sink": off(alone.sink, exact.sink),
        "variance": off(alone.variance, exact.variance),
        "lowest": alone.nats.min().item(),
    }


def tune(heads: int, kv_heads: int, width: int) -> None:
    """The time of every tile shape that compiles, beside cuDNN's."""
    for length in (16384, 65536):
        scores, v = inputs(length, heads, kv_heads, width)
        cudnn = sdpa(SDPBackend.CUDNN_ATTENTION, scores, v)
        for name, run in {
            "entropy": lambda tiles, s=scores: kernels.entropy(s, sink=False, tiles=tiles),
            "attention": lambda tiles, s=scores, v=v: kernels.attention(s, v, tiles=tiles),
        }.items():
            found = []
            for shape in itertools.product((64, 128), (64, 128, 256), (4, 8), (2, 3, 4)):
                tiles = kernels.Tiles(*shape)
                if tiles.rows == 64 and tiles.warps == 8:
                    continue
                try:
                    times = round_robin({"cudnn": cudnn, "ours": lambda run=run, tiles=tiles: run(tiles)}, 3)
                except Exception as error:  # a shape that does not fit the chip
                    print(name, tiles, type(error).__name__, flush=True)
                    continue
                found.append((times["ours"] / times["cudnn"], times["ours"], tiles))
            for ratio, time, tiles in sorted(found)[:6]:
                print(f"{length:7d} d{width} {name:10s} {time:8.3f} ms  {ratio:.3f} x cuDNN  {tiles}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="16384,32768,65536,131072")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    chosen = parser.parse_args()
    shape = (chosen.heads, chosen.kv_heads, chosen.head_dim)
    about = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16, heads {shape}"
    )
    print(about)
    if chosen.tune:
        tune(*shape)
        return
    record: dict[str, object] = {"about": about, "accuracy": accuracy(*shape)}
    print("largest errors against float64 at 2,048:", {k: f"{x:.1e}" for k, x in record["accuracy"].items()})
    table, memory = {}, {}
    for length in map(int, chosen.lengths.split(",")):
        scores, v = inputs(length, *shape)
        table[length] = round_robin(variants(scores, v, length), chosen.rounds if length < 100_000 else 7)
        memory[length] = extra_memory(lambda s=scores: kernels.entropy(s, sink=False))
        torch._dynamo.reset()
    for name in next(iter(table.values())):
        cells = [
            f"{times[name]:9.2f} ({times[name] / times['SDPA cuDNN']:5.2f})" if name in times else " " * 17
            for times in table.values()
        ]
        print(f"{name:28s}", *cells)
    print(f"{'MiB for entropy and lse':28s}", *(f"{mib:9.1f}        " for mib in memory.values()))
    record.update(milliseconds=table, mib=memory)
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
