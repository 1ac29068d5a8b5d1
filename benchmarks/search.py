"""The HeadScale search at paper A's size: how fast, in how much memory, and is its gradient right?

    python benchmarks/search.py                 # the table of docs/performance.md
    python benchmarks/search.py --length 4096
    python benchmarks/search.py --profile       # where a step of ours spends its time, on a GPU

A 1.1B model without positions, random weights in bf16, batch 1, gradients to 704 scales alone. `ours` is the step that
`farspan extend` takes: scales on the seam, frozen weights, compiled layers, no L×V logits, no checkpointing. `plain` is
what one would write by hand: transformers' Llama on SDPA with gradient checkpointing, scales as parameters that
multiply the output of each q_proj, the loss from its labels. Both take turns in one process; times are medians between
synchronisations. The gradient is compared with float32 at a shorter length.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from shapes import SHAPE, SMALL
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from farspan.attention import seam
from farspan.attention.scales import Scales
from farspan.methods.headscale import Scaled
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.fast import compile_layers


def ours(shape: dict, device: str, dtype: torch.dtype) -> tuple[Callable[[Tensor], None], nn.Parameter]:
    torch.manual_seed(0)
    with torch.device(device):
        # Rounded first: what is compared in two precisions has to be the same model.
        model = FarspanForCausalLM(FarspanConfig(**shape, position="none")).bfloat16().to(dtype).eval()
    model.requires_grad_(False)
    scaled = Scaled(model, Scales.uniform(1.2, range(shape["num_hidden_layers"]), shape["num_attention_heads"]))
    seam.install(model, scaled.scales)
    if device == "cuda" and dtype == torch.bfloat16:
        compile_layers(model)
    return lambda ids: scaled(ids).backward(), scaled.base


def plain(shape: dict, device: str, dtype: torch.dtype) -> tuple[Callable[[Tensor], None], nn.Parameter]:
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).train()  # checkpointing works in training mode alone
    model.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    heads, width = shape["num_attention_heads"], shape["hidden_size"] // shape["num_attention_heads"]
    scales = nn.Parameter(torch.full((shape["num_hidden_layers"], heads), 1.2, device=device))

    def scaling(row: int):
        return lambda module, inputs, output: output * scales[row].repeat_interleave(width).to(output.dtype)

    for row, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(scaling(row))
    return lambda ids: model(ids, labels=ids, use_cache=False).loss.backward(), scales


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[Tensor], None], ids: Tensor, device: str) -> float:
    synchronise(device)
    start = time.perf_counter()
    step(ids)
    synchronise(device)
    return time.perf_counter() - start


def speed(shape: dict, length: int, rounds: int, device: str) -> list[dict]:
    ids = torch.randint(shape["vocab_size"], (1, length), device=device)
    steps, rows = {}, []
    for name, build in (("ours", ours), ("plain", plain)):
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        steps[name], _ = build(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
        for _ in range(2):
            timed(steps[name], ids, device)
        peak = 0.0
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            timed(steps[name], ids, device)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        rows.append({"name": name, "gib": peak})
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps) if number % 2 == 0 else list(steps)[::-1]:
            times[name].append(timed(steps[name], ids, device))
    for row in rows:
        median = statistics.median(times[row["name"]])
        row |= {"milliseconds": 1e3 * median, "tokens_per_second": length / median}
    return rows


KINDS = {
    "attention": ("cudnn", "flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "compiled": ("triton",),
}


def profiled(shape: dict, length: int) -> dict[str, float]:
    """Milliseconds of one step on the GPU, by what its kernels do."""
    ids = torch.randint(shape["vocab_size"], (1, length), device="cuda")
    step, _ = ours(shape, "cuda", torch.bfloat16)
    for _ in range(3):
        timed(step, ids, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        timed(step, ids, "cuda")
    spent = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in found.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.key.lower()
            kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "rest")
            spent[kind] += event.self_device_time_total / 1e3
    return spent


def gradient_cosine(shape: dict, length: int, device: str) -> float:
    """Of the gradient in bf16 against float32, the same weights and tokens."""
    ids = torch.randint(shape["vocab_size"], (1, length), device=device)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        step, scales = ours(shape, device, dtype)
        step(ids)
        found.append(scales.grad.double().flatten().cpu())
        del step, scales
        gc.collect()
    return float(torch.nn.functional.cosine_similarity(*found, dim=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=18_432)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a few layers, to try the script without a GPU")
    parser.add_argument("--profile", action="store_true", help="where a step spends its time, and nothing else")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if options.small else SHAPE
    if options.profile:
        if device == "cpu":
            parser.error("kernels are profiled on a GPU, and there is none")
        for kind, spent in profiled(shape, options.length).items():
            print(f"{kind:>16} {spent:>7.1f} ms")
        return
    rows = speed(shape, options.length, options.rounds, device)
    print("         ms a step    tokens/s     GiB")
    for row in rows:
        print(f"{row['name']:>6} {row['milliseconds']:>11.1f} {row['tokens_per_second']:>11,.0f} {row['gib']:>7.1f}")
    print(f"ours is {rows[0]['tokens_per_second'] / rows[1]['tokens_per_second']:.2f} times as fast", flush=True)
    gc.collect()
    cosine = gradient_cosine(shape, min(options.length, 4096), device)
    print(f"cosine of the bf16 gradient to float32's: {cosine:.5f}")
    if options.json:
        facts = {"torch": torch.__version__, "length": options.length, "rows": rows, "cosine": cosine}
        options.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
