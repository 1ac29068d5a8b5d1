"""Whether the buckets of a fleet's step go through the network separately or merged.

    python benchmarks/passes.py            # every fleet of lab-grid without position encoding
    python benchmarks/passes.py --tasks pcfg,polynomial,copy        # the fleets with these tasks
    python benchmarks/passes.py --small    # tries the script without a GPU

A pass has a fixed cost on a GPU, and padding costs time too. `apart` is one pass per bucket,
`whole` a single pass as wide as the longest rows, `chosen` the widths of
`farspan.lab.fleet_training.shared_widths`. All three take turns in one process, with the examples,
networks and optimizer of `farspan lab run lab-grid`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from farspan.lab import fleet_training
from farspan.lab.fleet import Fleet
from farspan.lab.fleet_training import FleetPlan, FleetTrainer, GraphedFleetTrainer
from farspan.lab.rows import Rows
from farspan.lab.study import fleet_plan, list_cells, make_task_data
from farspan.lab.study_fleets import group_fleets, make_fleet
from farspan.train.steps import on_stream
from farspan.workflows.lab import read_study

TINY = [
    "sizes.small.width=16",
    "sizes.small.ff=32",
    "sizes.small.layers=1",
    "train_examples=200",
    "test_examples=20",
]
MODES = {"apart": 0.0, "whole": 1e18, "chosen": fleet_training.PASS_COST}

Step = Callable[[], Tensor]


def make_step(
    fleet: Fleet, data: list[Rows], plan: FleetPlan, pass_cost: float
) -> tuple[Step, list[int]]:
    """A training step of the fleet, replayed on a GPU, and the widths of its passes."""
    trainer = FleetTrainer(fleet, data, plan)
    tokens = pass_cost / fleet.weights.numel() / (plan.batch // plan.buckets)
    trainer.buckets = fleet_training._make_buckets(data, plan.buckets, fleet.device, tokens)
    step: Step = trainer
    if fleet.device.type == "cuda":
        step = graphed = GraphedFleetTrainer(trainer)
        with on_stream(graphed.stream):
            trainer.compile()
    trainer.state.rates.fill_(1e-4)
    trainer.draws.uniform_()
    return step, sorted({bucket.rows.ids.shape[1] for bucket in trainer.buckets})


def timed(step: Step, count: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def measure(
    fleet: Fleet, data: list[Rows], plan: FleetPlan, options: argparse.Namespace
) -> dict[str, dict]:
    device = fleet.device.type
    steps = {mode: make_step(fleet, data, plan, cost) for mode, cost in MODES.items()}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for step, _ in steps.values():
        timed(step, 5, device)
    for number in range(options.rounds):
        for mode in list(MODES) if number % 2 == 0 else list(MODES)[::-1]:
            times[mode].append(timed(steps[mode][0], options.steps, device))
    return {
        mode: {"widths": steps[mode][1], "milliseconds": 1e3 * statistics.median(times[mode])}
        for mode in MODES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoding", default="none")
    parser.add_argument("--tasks", default="", help="only fleets with one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of one mode in one round")
    parser.add_argument(
        "--small", action="store_true", help="tiny models, to try the script without a GPU"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.disable(logging.WARNING)  # tasks with few examples warn
    overrides = ["train_examples=4000", *(TINY if options.small else ())]
    study = read_study("lab-grid", overrides)
    cells = [cell for cell in list_cells(study) if cell.encoding == options.encoding]
    print("models    ms/step apart   whole  chosen  apart ÷ chosen  widths of its passes, tasks")
    table = []
    tasks = set(filter(None, options.tasks.split(","))) or set(study.tasks)
    for group in group_fleets(study, cells, study.fleet):
        names = sorted({cell.task for cell in group})
        if not tasks & set(names):
            continue
        by_task = {name: make_task_data(study, name, "none") for name in names}
        data = [by_task[cell.task] for cell in group]
        fleet = make_fleet(study, group, data, device)
        fleet.network.train()
        results = measure(
            fleet, [task.train for task in data], fleet_plan(study, group[0]), options
        )
        apart, whole, chosen = (results[mode]["milliseconds"] for mode in MODES)
        widths = ", ".join(map(str, results["chosen"]["widths"]))
        print(
            f"{len(group):>6}  {apart:>15.2f}  {whole:>6.2f}  {chosen:>6.2f}  "
            f"{apart / chosen:>14.2f}  {widths}: {', '.join(names)}",
            flush=True,
        )
        table.append({"models": len(group), "tasks": names, **results})
        del fleet
        gc.collect()
    if options.json:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "device": name, "rows": table}, indent=1)
        )


if __name__ == "__main__":
    main()
