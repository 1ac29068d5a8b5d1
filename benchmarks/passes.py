"""Do the quarters of a fleet's step go through the network apart, or some of them together?

    python benchmarks/passes.py            # every fleet of lab-grid without encoding
    python benchmarks/passes.py --tasks pcfg,polynomial,copy        # the fleets that have these
    python benchmarks/passes.py --small    # to try the script without a GPU

A pass costs a GPU some time however small it is, and padding costs time too. `apart` is one pass for each quarter of
the lengths, `whole` a single one as wide as the longest rows, `chosen` what `farspan.lab.fleet_training.shared_widths` makes of it.
All three take turns in one process, with the examples, networks and optimizer of `farspan lab run lab-grid`.
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
from farspan.lab.fleet import Fleet, Rows
from farspan.lab.fleet_training import FleetPlan, FleetTrainer, GraphedFleetTrainer
from farspan.lab.study import fleet_plan, group_fleets, list_cells, make_fleet, make_task_data
from farspan.lab.tokenizer import WordTokenizer
from farspan.train.steps import on_stream
from farspan.workflows.lab import read_study

TINY = [
    "sizes.small.width=16",
    "sizes.small.ff=32",
    "sizes.small.layers=1",
    "train_examples=200",
    "test_examples=20",
]
WAYS = {"apart": 0.0, "whole": 1e18, "chosen": fleet_training.PASS}

Step = Callable[[], Tensor]


def prepared(
    fleet: Fleet, data: list[Rows], plan: FleetPlan, cost: float
) -> tuple[Step, list[int]]:
    """A step of the fleet that is replayed on a GPU, and the widths of its passes."""
    fleet_training.PASS, parts = cost, plan.batch // plan.buckets
    own = FleetTrainer(fleet, data, plan)
    if fleet.device.type != "cuda":  # which has no use for padding; here it is tried all the same
        own.buckets = fleet_training._buckets(
            data, plan.buckets, fleet.device, cost / fleet.weights.numel() / parts
        )
    step: Step = own
    if fleet.device.type == "cuda":
        step = recorded = GraphedFleetTrainer(own)
        with on_stream(recorded.aside):
            own.compile()
    own.state.rates.fill_(1e-4)
    own.chance.uniform_()
    return step, sorted({bucket.rows.ids.shape[1] for bucket in own.buckets})


def timed(step: Step, count: int, device: str) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def measure(
    fleet: Fleet, data: list[Rows], plan: FleetPlan, options: argparse.Namespace
) -> dict[str, dict]:
    device = fleet.device.type
    steps = {way: prepared(fleet, data, plan, cost) for way, cost in WAYS.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for step, _ in steps.values():
        timed(step, 5, device)
    for number in range(options.rounds):
        for way in list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]:
            times[way].append(timed(steps[way][0], options.steps, device))
    return {
        way: {"widths": steps[way][1], "milliseconds": 1e3 * statistics.median(times[way])}
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoding", default="none")
    parser.add_argument("--tasks", default="", help="only fleets that have one of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of one way in one round")
    parser.add_argument(
        "--small", action="store_true", help="tiny models, to try the script without a GPU"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.disable(logging.WARNING)  # of tasks that have few examples
    study, words = (
        read_study("lab-grid", ["train_examples=4000", *(TINY if options.small else ())]),
        WordTokenizer(),
    )
    cells = [cell for cell in list_cells(study) if cell.encoding == options.encoding]
    print("models  ms a step apart   whole  chosen  apart ÷ chosen  widths of its passes, tasks")
    table = []
    wanted = set(filter(None, options.tasks.split(","))) or set(study.tasks)
    for group in group_fleets(study, cells, words, study.fleet):
        if not wanted & {cell.task for cell in group}:
            continue
        found = {
            task: make_task_data(study, task, "none", words)
            for task in {cell.task for cell in group}
        }
        own = [found[cell.task] for cell in group]
        fleet = make_fleet(study, group, own, words, device)
        fleet.network.train()
        told = measure(fleet, [each.train for each in own], fleet_plan(study, group[0]), options)
        apart, whole, chosen = (told[way]["milliseconds"] for way in WAYS)
        widths = ", ".join(map(str, told["chosen"]["widths"]))
        print(
            f"{len(group):>6}  {apart:>15.2f}  {whole:>6.2f}  {chosen:>6.2f}  {apart / chosen:>14.2f}  {widths}: "
            f"{', '.join(sorted(found))}",
            flush=True,
        )
        table.append({"models": len(group), "tasks": sorted(found), **told})
        del fleet
        gc.collect()
    if options.json:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "device": name, "rows": table}, indent=1)
        )


if __name__ == "__main__":
    main()
