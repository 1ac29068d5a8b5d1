"""Throughput of fleets: many small models trained together, compared with one after the other.

    python benchmarks/fleet.py                     # the table of docs/performance.md
    python benchmarks/fleet.py --positions none,t5,alibi,rope
    python benchmarks/fleet.py --small             # tries the script without a GPU

Models of 10M parameters train on rows of 64 random tokens; the second half of each row is the
answer. A step is complete: forward, backward, clipping and AdamW, bf16 under autocast. `fleet` is
what `farspan lab run` does: one table of weights, compiled layers, a step replayed from a CUDA
graph. `eager` and `compiled` train the models one after the other with torch's fused AdamW by calls
of transformers on the same network, the second with compiled layers; `recorded` adds CUDA graphs.
All take turns in one process; times are medians between synchronizations of the device.
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
from torch import Tensor, nn
from torch.nn import functional as F

from farspan.lab.fleet import Fleet
from farspan.lab.fleet_training import FleetPlan, FleetTrainer, GraphedFleetTrainer
from farspan.lab.rows import Rows
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.compile import compile_layers, prefer_cudnn
from farspan.train.optim import OptimizerConfig, make_optimizers
from farspan.train.steps import EagerSteps, GraphedSteps, TrainingTask, on_stream

LARGE = dict(
    vocab_size=704,
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=6,
)
SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
RATE = 1e-3

Step = Callable[[], None]  # one training step of every model


def build(shape: dict, position: str, device: str) -> FarspanForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        return FarspanForCausalLM(FarspanConfig(**shape, position=position, mlp="relu"))


def rows(shape: dict, count: int, length: int) -> Rows:
    ids = torch.randint(1, shape["vocab_size"], (count, length + 1), dtype=torch.int16)
    return Rows(ids, torch.full((count,), length // 2), torch.full((count,), length + 1))


def fleet(shape: dict, position: str, models: int, data: Rows, batch: int, device: str) -> Step:
    stack = Fleet([build(shape, position, "cpu")] * models, device)
    stack.network.train()
    plan = FleetPlan(steps=1000, batch=batch, buckets=1, optimizer="adamw")
    trainer = FleetTrainer(stack, [data] * models, plan)
    step: Callable[[], Tensor] = trainer
    if device == "cuda":
        step = graphed = GraphedFleetTrainer(trainer)
        with on_stream(graphed.stream):
            trainer.compile()
    trainer.state.rates.fill_(RATE)

    def run() -> None:
        trainer.draws.uniform_()
        step()

    return run


class AnswerLoss(nn.Module):
    """The mean loss of a model on the second halves of rows."""

    def __init__(self, model: FarspanForCausalLM, device: str):
        super().__init__()
        self.model, self.device = model, device

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        answer = slice(ids.shape[1] // 2 - 1, None)
        return F.cross_entropy(
            logits[:, answer].float().flatten(0, 1), ids[:, 1:][:, answer].flatten()
        )


def one_by_one(
    mode: str, shape: dict, position: str, models: int, data: Rows, batch: int, device: str
) -> Step:
    """`models` models, one after the other; the time per model does not depend on their number."""
    steps, ids = [], data.ids.long().to(device)
    steps_class = GraphedSteps if mode == "recorded" and device == "cuda" else EagerSteps
    for _ in range(models):
        model = build(shape, position, device).train()
        if mode != "eager" and device == "cuda":
            compile_layers(model)
        optimizers = make_optimizers(model, OptimizerConfig(optimizer="adamw", lr=RATE))
        parameters = dict(model.named_parameters())
        loss = AnswerLoss(model, device)
        task = TrainingTask(loss, parameters, optimizers, batches=lambda step: [])
        steps.append(steps_class(task, 1.0))

    def run() -> None:
        for step in steps:
            with prefer_cudnn():
                step.gradients([ids[torch.randint(len(ids), (batch,), device=device)]])
                step.update()

    return run


def timed(step: Step, count: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def measure(options: argparse.Namespace, shape: dict, position: str, device: str) -> list[dict]:
    data = rows(shape, 4096, options.length)
    single = min(options.single, options.models)
    steps: dict[str, Step] = {
        "fleet": fleet(shape, position, options.models, data, options.batch, device)
    }
    for mode in options.ways.split(","):
        steps[mode] = one_by_one(mode, shape, position, single, data, options.batch, device)
    counts, start_times = {}, {}
    for name, step in steps.items():
        start = time.perf_counter()
        timed(step, 6, device)
        counts[name] = max(2, round(options.seconds / timed(step, 2, device)))
        start_times[name] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds):
        for name in list(steps) if number % 2 == 0 else list(steps)[::-1]:
            times[name].append(timed(steps[name], counts[name], device))
    results = []
    for name in steps:
        median = statistics.median(times[name])
        models = options.models if name == "fleet" else single
        results.append(
            {
                "position": position,
                "way": name,
                "models": models,
                "milliseconds_a_model": 1e3 * median / models,
                "tokens_per_second": models * options.batch * options.length / median,
                "spread": (max(times[name]) - min(times[name])) / median,
                "seconds_to_start": start_times[name],
            }
        )
    for row in results:
        row["fleet_is_faster"] = results[0]["tokens_per_second"] / row["tokens_per_second"]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=32, help="in the fleet")
    parser.add_argument("--single", type=int, default=4, help="models trained one after the other")
    parser.add_argument("--positions", default="none")
    parser.add_argument(
        "--ways", default="eager,compiled,recorded", help="what the fleet is compared with"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one way in one round")
    parser.add_argument(
        "--small", action="store_true", help="tiny models, to try the script without a GPU"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if options.small else LARGE
    parameters = build(shape, "none", "cpu").num_parameters()
    print(f"{parameters:,} parameters, {options.batch} × {options.length} tokens")
    print("  position       way  models    ms/model    tokens/s  fleet is faster  spread   start")
    table = []
    for position in options.positions.split(","):
        gc.collect()
        torch._dynamo.reset()
        results = measure(options, shape, position, device)
        for row in results:
            print(
                f"{row['position']:>10} {row['way']:>9} {row['models']:>7} "
                f"{row['milliseconds_a_model']:>11.2f} {row['tokens_per_second']:>11,.0f} "
                f"{row['fleet_is_faster']:>14.2f} × {row['spread']:>7.1%} "
                f"{row['seconds_to_start']:>6.1f}s",
                flush=True,
            )
        table += results
        if options.json:
            name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
            options.json.write_text(
                json.dumps({"torch": torch.__version__, "device": name, "rows": table}, indent=1)
            )


if __name__ == "__main__":
    main()
