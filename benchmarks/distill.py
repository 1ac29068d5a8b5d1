"""Speed of self-distillation (`farspan extend --method swan`) on one GPU, at two model shapes.

    python benchmarks/distill.py                              # the table of docs/performance.md
    python benchmarks/distill.py --shapes 135M --micro-batch 16 --profile profile.txt

A step is a real one: the base predicts, the converted model learns by KL, gradients are clipped and
AdamW updates all weights, on random tokens and random weights, by the code of the method. Times are
medians over steps, between synchronizations of the device. The share of the peak counts 6 FLOP per
weight of a matrix product for the model and 2 for its base, and attention inside windows, against
the 989 TFLOP/s of the data sheet.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from shapes import SHAPE, SMALL, SMOLLM2
from transformers import LlamaConfig, LlamaForCausalLM

from farspan.attention.layout import LayerLayout, Layout
from farspan.attention.patch import set_layout
from farspan.attention.probe import probe
from farspan.methods.distill import DistillModule, compiled, make_teacher
from farspan.methods.swan import SwanConfig, distillation_flops, even_layers
from farspan.train.loop import peak_flops

SHAPES = {"tiny": SMALL, "135M": SMOLLM2, "1.1B": SHAPE}  # TinyLlama has the shape of Wang 2024


def measure(name: str, args: argparse.Namespace, compile_layers: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[name])).to(device)
    teacher, base = make_teacher(model), probe(model)
    count = round(len(base) * SwanConfig().global_share)
    global_layers = even_layers([layer.index for layer in base], count)
    windowed, whole = LayerLayout(True, args.window), LayerLayout(False)
    entries = {layer.index: whole if layer.index in global_layers else windowed for layer in base}
    set_layout(model, Layout(entries))
    loss, optimizer = (
        DistillModule(model, teacher),
        torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda"),
    )
    rows = (args.micro_batch, args.length)
    ids = torch.randint(model.config.vocab_size, rows, device=device)
    flops = distillation_flops(model, probe(model), base, args.length)
    times = []
    with compiled(model, teacher) if compile_layers else nullcontext():
        for _ in range(args.steps + 2):  # two to warm up
            synchronize(device)
            start = time.perf_counter()
            for _ in range(args.micro_batches):
                (loss(ids) / args.micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize(device)
            times.append(time.perf_counter() - start)
        if args.profile:
            write_profile(args.profile, lambda: loss(ids).backward())
    speed = args.micro_batches * ids.numel() / statistics.median(times[2:])
    peak = f"{speed * flops / rate:.1%}" if (rate := peak_flops()) else "unknown"
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    layers = "compiled" if compile_layers else "not compiled"
    print(f"| {name} | {layers} | {speed:,.0f} | {peak} | {memory:.1f} GiB |", flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def write_profile(path: Path, run) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities[: 1 + torch.cuda.is_available()]) as profiler:
        run()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    path.write_text(profiler.key_averages().table(sort_by=key, row_limit=40))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="135M,1.1B")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    print("| shape | layers | tokens/s | share of peak | memory |\n|---|---|---|---|---|")
    for name in args.shapes.split(","):
        for compile_layers in (False, True):
            measure(name, args, compile_layers)


if __name__ == "__main__":
    main()
