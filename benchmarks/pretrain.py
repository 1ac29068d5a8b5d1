"""Pretraining speed on one GPU: what position encodings cost, at four sizes.

    python benchmarks/pretrain.py                          # the table of docs/performance.md
    python benchmarks/pretrain.py --sizes 29M --positions none --optimizers muon,torch-muon --ways recorded,plain

A step is a real one: forward, backward, clipping, optimizer, on random tokens, by the code that `farspan pretrain`
runs. The variants of one size stay in memory together and take turns, so that ratios share clocks and temperature (of
1.1B two at a time, the first always one of them);
times are medians over rounds, between synchronisations of the device. MFU counts 6 FLOP for each weight of a matrix
product and causal attention, against the data sheet's 989 TFLOP/s. Memory is that of the variant alone: its weights,
gradients and optimizer state, and the highest of what a step adds.
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

from farspan.train.corpus import Data
from farspan.train.loop import peak_flops
from farspan.train.optim import Optimization, StackedMuon, with_rates
from farspan.train.pretrain import Pretraining, Shape, Training, build, pretraining
from farspan.train.steps import WARM, RecordedSteps, Steps

# name -> shape, vocabulary, length, rows of a step, rows at once
SIZES = {
    "twin": (dict(layers=6, width=256, heads=8, ff=704), 4096, 512, 256, 256),
    "10M": (dict(layers=6, width=320, heads=5, ff=864), 8192, 512, 256, 256),
    "29M": (dict(layers=8, width=512, heads=8, ff=1344), 8192, 512, 256, 256),
    "124M": (dict(layers=12, width=768, heads=12, ff=2048), 50_304, 1024, 128, 64),
    "1.1B": (dict(layers=22, width=2048, heads=32, kv_heads=4, ff=5632, tied=False), 32_000, 2048, 32, 8),
}
TOGETHER = {"1.1B": 2}  # variants that memory holds at once


class Variant(NamedTuple):
    position: str
    optimizer: str
    way: str


def prepare(size: str, variant: Variant, micro: int) -> Steps:
    shape, vocabulary, length, batch, usual = SIZES[size]
    micro = micro or usual
    recipe = Pretraining(
        Data({}, vocabulary=vocabulary, passkey=0.0),
        Shape(position=tuple(variant.position.split("+")), **shape),
        Training(length=length, batch=batch, micro_batch=micro),
        Optimization(optimizer="adamw" if variant.optimizer == "adamw" else "muon"),
    )
    model = build(recipe, recipe.config()).cuda()
    rows = torch.randint(vocabulary, (batch, length + 1))  # made beforehand: what is timed is the device
    mixture = SimpleNamespace(rows=lambda start, count: rows[start % batch : start % batch + count])
    work = pretraining(recipe, model, SimpleNamespace(mixture=mixture, tokenizer=None))
    if variant.optimizer == "torch-muon":
        work.optimizers = with_rates([torchs_own(each) for each in work.optimizers])
    return (RecordedSteps if variant.way == "recorded" else Steps)(work, clip=1.0)


def torchs_own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if not isinstance(optimizer, StackedMuon):
        return optimizer
    group = optimizer.param_groups[0]
    return Muon(group["params"], lr=float(group["lr"]), weight_decay=group["weight_decay"])


def one_step(steps: Steps, number: int) -> float:
    loss, norm = steps.gradients(steps.work.batches(number))
    value, _ = torch.stack((loss, norm)).tolist()  # as the loop does, before it dares to update
    steps.update()
    return value


def timed(steps: Steps, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(count):
        one_step(steps, number)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def measure(size: str, variants: list[Variant], rounds: int, seconds: float, micro: int) -> list[dict]:
    first, *others = variants
    beside = TOGETHER.get(size, len(variants)) - 1
    groups = [[first, *others[start : start + beside]] for start in range(0, max(1, len(others)), max(1, beside))]
    rows: list[dict] = []
    for group in groups:
        found = together(size, group, rounds, seconds, micro)
        rows += found if not rows else found[1:]
    return rows


def together(size: str, variants: list[Variant], rounds: int, seconds: float, micro: int) -> list[dict]:
    """Variants that take turns; each one's speed also as a share of the first one's, in this very run."""
    running, peaks, started = {}, {}, {}
    for variant in variants:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        begin = time.perf_counter()
        running[variant] = prepare(size, variant, micro)
        once = timed(running[variant], WARM + 1) and timed(running[variant], 2)
        started[variant] = time.perf_counter() - begin
        peaks[variant] = torch.cuda.max_memory_reserved() - before
    count = max(2, round(seconds / once))
    times: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else variants[::-1]:
            times[variant].append(timed(running[variant], count))
    rows = []
    base = statistics.median(times[variants[0]])
    for variant, steps in running.items():
        median = statistics.median(times[variant])
        rows.append(
            {
                "size": size,
                "parameters": sum(parameter.numel() for parameter in steps.work.trained.values()),
                **variant._asdict(),
                "tokens_per_second": steps.work.tokens / median,
                "ratio": base / median,
                "mfu": steps.work.tokens / median * steps.work.flops / (peak_flops() or float("nan")),
                "peak_gib": peaks[variant] / 2**30,
                "spread": (max(times[variant]) - min(times[variant])) / median,
                "seconds_to_start": started[variant],
            }
        )
    return rows


def show(rows: list[dict]) -> None:
    for row in rows:
        print(
            f"{row['size']:>5} {row['position']:>10} {row['optimizer']:>10} {row['way']:>9} "
            f"{row['tokens_per_second']:>11,.0f} {row['ratio']:>6.3f} {row['mfu']:>6.1%} {row['peak_gib']:>6.1f} "
            f"{row['spread']:>6.1%} {row['seconds_to_start']:>6.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10M,29M,124M,1.1B")
    parser.add_argument("--positions", default="none,rope,alibi,t5", help="a pattern is written rope/128+none")
    parser.add_argument("--optimizers", default="", help="muon, torch-muon, adamw; default muon, and adamw for 1.1B")
    parser.add_argument("--ways", default="recorded", help="recorded, plain")
    parser.add_argument("--micro-batch", type=int, default=0, help="rows at once, instead of the size's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one variant in one round")
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
            facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": table}
            options.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
