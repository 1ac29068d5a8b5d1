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
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from shapes import SHAPE, SMALL, SMOLLM2
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from farspan.attention.layout import LayerLayout, Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.probe import Layer, probe
from farspan.methods.distill import DistillModule, make_teacher
from farspan.methods.swan import distillation_flops
from farspan.methods.swan_config import SwanConfig
from farspan.methods.swan_layout import even_layers
from farspan.model.compile import compiled_layers
from farspan.train.loop import peak_flops

SHAPES = {"tiny": SMALL, "135M": SMOLLM2, "1.1B": SHAPE}  # TinyLlama has the shape of Wang 2024


@dataclass(eq=False)
class Distillation:
    """A model in the default layout of `swan`, and the base that teaches."""

    model: PreTrainedModel
    teacher: PreTrainedModel
    base: list[Layer]  # the layers before the conversion

    @classmethod
    def build(cls, shape: dict, window: int, device: str) -> Distillation:
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**shape))
        teacher, base = make_teacher(model), probe(model)
        count = round(len(base) * SwanConfig().global_share)
        global_layers = even_layers([layer.index for layer in base], count)
        windowed, whole = LayerLayout(True, window), LayerLayout(False)
        layout = {
            layer.index: whole if layer.index in global_layers else windowed for layer in base
        }
        set_layout(model, Layout(layout))
        return cls(model, teacher, base)

    def __post_init__(self):
        self.layers = probe(self.model)
        self.loss = DistillModule(self.model, self.teacher, answers=0.0)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-4, fused=self.model.device.type == "cuda"
        )

    def flops(self, length: int) -> float:
        """Of one token."""
        return distillation_flops(self.model, self.layers, self.base, length)

    def step(self, micro_batches: Sequence[Tensor]) -> None:
        for ids in micro_batches:
            (self.loss(ids) / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(name: str, args: argparse.Namespace, compile_layers: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distillation = Distillation.build(SHAPES[name], args.window, device)
    model, teacher = distillation.model, distillation.teacher
    rows = (args.micro_batch, args.length)
    ids = torch.randint(model.config.vocab_size, rows, device=device)
    flops = distillation.flops(args.length)
    times = []
    with compiled_layers(model, teacher) if compile_layers else nullcontext():
        for _ in range(args.steps + 2):  # two to warm up
            synchronize(device)
            start = time.perf_counter()
            distillation.step([ids] * args.micro_batches)
            synchronize(device)
            times.append(time.perf_counter() - start)
        if args.profile:
            write_profile(args.profile, lambda: distillation.loss(ids).backward())
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
