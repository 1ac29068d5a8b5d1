"""Pretraining speed on one GPU: the cost of position encodings at four model sizes.

    python benchmarks/pretrain.py                          # the table of docs/performance.md
    python benchmarks/pretrain.py --sizes 29M --positions none --optimizers muon,torch-muon \\
        --ways recorded,plain

A step is a real one: forward, backward, clipping and optimizer on random tokens, by the code of
`farspan pretrain`. `recorded` steps replay CUDA graphs, `plain` ones launch every kernel. The
variants of one size stay in memory together and take turns, so that their ratios share clocks and
temperature (at 1.1B two at a time, one of them always the first). Times are medians over rounds,
between synchronizations of the device. MFU counts 6 FLOP per weight of a matrix product and causal
attention, against the 989 TFLOP/s of the data sheet. Memory is that of one variant: its weights,
gradients and optimizer state, and the peak that a step adds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.optim import Muon

from farspan.train.corpus import DataConfig
from farspan.train.loop import peak_flops
from farspan.train.optim import OptimizerConfig, StackedMuon, store_base_rates
from farspan.train.pretrain import (
    ModelShape,
    PretrainConfig,
    TrainConfig,
    build_model,
    make_training_task,
)
from farspan.train.steps import WARMUP_STEPS, EagerSteps, GraphedSteps

# name -> shape, vocabulary, length, rows of a step, rows of a micro batch
SIZES = {
    "twin": (dict(layers=6, width=256, heads=8, ff=704), 4096, 512, 256, 256),
    "10M": (dict(layers=6, width=320, heads=5, ff=864), 8192, 512, 256, 256),
    "29M": (dict(layers=8, width=512, heads=8, ff=1344), 8192, 512, 256, 256),
    "124M": (dict(layers=12, width=768, heads=12, ff=2048), 50_304, 1024, 128, 64),
    "1.1B": (
        dict(layers=22, width=2048, heads=32, kv_heads=4, ff=5632, tied=False),
        32_000,
        2048,
        32,
        8,
    ),
}
MAX_VARIANTS = {"1.1B": 2}  # that fit in memory together


class Variant(NamedTuple):
    position: str
    optimizer: str
    way: str


def prepare(size: str, variant: Variant, micro_batch: int) -> EagerSteps:
    shape, vocabulary, length, batch, default_micro_batch = SIZES[size]
    recipe = PretrainConfig(
        DataConfig({}, vocabulary=vocabulary, passkey=0.0),
        ModelShape(position=tuple(variant.position.split("+")), **shape),
        TrainConfig(length=length, batch=batch, micro_batch=micro_batch or default_micro_batch),
        OptimizerConfig(optimizer="adamw" if variant.optimizer == "adamw" else "muon"),
    )
    model = build_model(recipe, recipe.config()).cuda()
    rows = torch.randint(vocabulary, (batch, length + 1))  # outside the timing
    mixture = SimpleNamespace(rows=lambda start, count: rows[start % batch : start % batch + count])
    task = make_training_task(recipe, model, SimpleNamespace(mixture=mixture, tokenizer=None))
    if variant.optimizer == "torch-muon":
        task.optimizers = store_base_rates(
            [use_torch_muon(optimizer) for optimizer in task.optimizers]
        )
    return (GraphedSteps if variant.way == "recorded" else EagerSteps)(task, clip=1.0)


def use_torch_muon(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if not isinstance(optimizer, StackedMuon):
        return optimizer
    group = optimizer.param_groups[0]
    return Muon(group["params"], lr=float(group["lr"]), weight_decay=group["weight_decay"])


def one_step(steps: EagerSteps, number: int) -> float:
    loss, norm = steps.gradients(steps.task.batches(number))
    value, _ = torch.stack((loss, norm)).tolist()  # the training loop reads them before the update
    steps.update()
    return value


def seconds_per_step(steps: EagerSteps, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(count):
        one_step(steps, number)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def measure(
    size: str, variants: list[Variant], rounds: int, seconds: float, micro_batch: int
) -> list[dict]:
    """The rows of all variants, in groups that fit in memory; the first is in every group."""
    first, *others = variants
    size_of_group = MAX_VARIANTS.get(size, len(variants)) - 1
    groups = [
        [first, *others[start : start + size_of_group]]
        for start in range(0, max(1, len(others)), max(1, size_of_group))
    ]
    rows: list[dict] = []
    for group in groups:
        group_rows = measure_group(size, group, rounds, seconds, micro_batch)
        rows += group_rows if not rows else group_rows[1:]
    return rows


def measure_group(
    size: str, variants: list[Variant], rounds: int, seconds: float, micro_batch: int
) -> list[dict]:
    """Variants that take turns; "ratio" is the speed relative to the first of them."""
    running, peaks, start_seconds = {}, {}, {}
    for variant in variants:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        start = time.perf_counter()
        running[variant] = prepare(size, variant, micro_batch)
        seconds_per_step(running[variant], WARMUP_STEPS + 1)
        step_seconds = seconds_per_step(running[variant], 2)
        start_seconds[variant] = time.perf_counter() - start
        peaks[variant] = torch.cuda.max_memory_reserved() - before
    count = max(2, round(seconds / step_seconds))
    times: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else variants[::-1]:
            times[variant].append(seconds_per_step(running[variant], count))
    rows = []
    base = statistics.median(times[variants[0]])
    for variant, steps in running.items():
        median = statistics.median(times[variant])
        rows.append(
            {
                "size": size,
                "parameters": sum(
                    parameter.numel() for parameter in steps.task.parameters.values()
                ),
                **variant._asdict(),
                "tokens_per_second": steps.task.tokens / median,
                "ratio": base / median,
                "mfu": steps.task.tokens
                / median
                * steps.task.flops
                / (peak_flops() or float("nan")),
                "peak_gib": peaks[variant] / 2**30,
                "spread": (max(times[variant]) - min(times[variant])) / median,
                "seconds_to_start": start_seconds[variant],
            }
        )
    return rows


def show(rows: list[dict]) -> None:
    for row in rows:
        print(
            f"{row['size']:>5} {row['position']:>10} {row['optimizer']:>10} {row['way']:>9} "
            f"{row['tokens_per_second']:>11,.0f} {row['ratio']:>6.3f} {row['mfu']:>6.1%} "
            f"{row['peak_gib']:>6.1f} {row['spread']:>6.1%} {row['seconds_to_start']:>6.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10M,29M,124M,1.1B")
    parser.add_argument(
        "--positions", default="none,rope,alibi,t5", help="a pattern is written rope/128+none"
    )
    parser.add_argument(
        "--optimizers", default="", help="muon, torch-muon, adamw; default: muon, for 1.1B adamw"
    )
    parser.add_argument("--ways", default="recorded", help="recorded, plain")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="rows of a micro batch; default: set by the size"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="per variant and round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(" size   position  optimizer       way    tokens/s  x 1st    MFU    GiB spread  start")
    table = []
    for size in options.sizes.split(","):
        optimizers = options.optimizers or ("adamw" if size == "1.1B" else "muon")
        variants = [
            Variant(position, optimizer, way)
            for position in options.positions.split(",")
            for optimizer in optimizers.split(",")
            for way in options.ways.split(",")
        ]
        rows = measure(size, variants, options.rounds, options.seconds, options.micro_batch)
        show(rows)
        table += rows
        if options.json:
            results = {
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(),
                "rows": table,
            }
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
