"""Many at once: processes that share a results folder or an output, with kills and other hosts."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from farspan import cells as cells_module
from farspan.cells import Cells, cell_key, finish
from torture.children import farspan_main, start, wait
from torture.harness import Category, Workspace
from torture.kills import is_complete
from torture.subjects import COMMANDS, differences, snapshot
from torture.tally import Tally

PROCESSES, CELLS = 8, 40
STALE = 1.5  # seconds, of cells on other hosts
ROUNDS = {"short": 1, "bounded": 4, "full": 25}
# Two processes of one command on one output, and which of them may be refused.
SHARED = ("eval", "lab", "reproduce")
REFUSED = ("pretrain", "extend-headscale", "extend-uniform", "export-folded", "diagnose")


def square(number: int) -> dict:
    time.sleep(0.002 * (number % 5))
    return {"square": number * number}


def todo(rng: random.Random) -> dict[str, int]:
    numbers = rng.sample(range(CELLS), CELLS)
    return {cell_key({"number": number}): number for number in numbers}


def work_on_cells(seed: float, log: Path, host: str, skew: float) -> Callable[[], None]:
    """A process that computes cells of `results`, on a machine with its own name and clock."""

    def main() -> None:
        rng, clock = random.Random(seed), time.time
        cells_module._host = lambda: host
        cells_module.STALE, cells_module.WAIT = STALE, 0.01
        time.time = lambda: clock() + skew

        def work(number: int) -> dict:
            with log.open("a") as file:
                file.write(f"{number}\n")
            return square(number)

        finish(Cells(Path("results")), todo(rng), work)

    return main


def run_cells(hosts: int, rng: random.Random, folder: Path, log: Path) -> str:
    """Eight processes on one folder, some killed and replaced; what went wrong, or nothing."""
    (folder / "logs").mkdir()
    names = [f"host-{number}" for number in range(hosts)]
    skews = {name: rng.uniform(-86_400, 86_400) for name in names}
    running: dict[int, Path] = {}
    kills = started = finished = 0
    deadline = time.monotonic() + 100
    while finished < PROCESSES:
        while len(running) < PROCESSES - finished:
            started += 1
            host = rng.choice(names)
            own = folder / "logs" / f"{started}"
            main = work_on_cells(rng.random(), own, host, skews[host])
            output = log.with_suffix(f".log.{started}")
            running[start(main, folder, output)] = output
        time.sleep(rng.uniform(0.01, 0.05))
        if kills < 12 and rng.random() < 0.5:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(list(running)), signal.SIGKILL)
                kills += 1
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                output = running.pop(child)
                code = os.waitstatus_to_exitcode(status)
                finished += code == 0
                if code not in (0, -signal.SIGKILL):
                    return f"exit {code}: {Path(f'{output}.err').read_text()[-500:]}"
        if time.monotonic() > deadline:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return "the processes did not finish"
    return _cells_problem(folder, kills)


def _cells_problem(folder: Path, kills: int) -> str:
    expected = {key: {"square": number * number} for key, number in todo(random.Random(0)).items()}
    with patch.object(cells_module, "STALE", 0):  # claims of killed processes of other hosts go
        cells = Cells(folder / "results")
    if {key: cells.get(key) for key in expected} != expected:
        return "a result is wrong or missing"
    lines = [line for file in (folder / "logs").iterdir() for line in file.read_text().split()]
    if len(lines) - CELLS > kills:
        return f"{len(lines) - CELLS} cells were computed twice, with {kills} kills"
    left = [path.name for path in (folder / "results" / "claims").iterdir()]
    return f"claims are left: {left}" if left else ""


def run_command_twice(name: str, rng: random.Random, folder: Path, workspace: Workspace) -> str:
    """Two processes of a command, the second a moment later; one may be refused."""
    undisturbed, log = workspace.undisturbed[name], workspace.log(folder)
    logs = [log.with_suffix(f".log.{number}") for number in range(2)]
    children = [start(farspan_main(COMMANDS[name]), folder, logs[0])]
    time.sleep(rng.uniform(0, undisturbed.seconds))
    children.append(start(farspan_main(COMMANDS[name]), folder, logs[1]))
    ended = [wait(child, own) for child, own in zip(children, logs, strict=True)]
    for one in ended:
        if one.traceback or one.code not in ((0,) if name in SHARED else (0, 2)):
            return one.describe()
    if all(one.code and not is_complete(one) for one in ended):
        return "both were refused: " + "; ".join(one.describe() for one in ended)
    return "; ".join(differences(undisturbed.files, snapshot(folder))[:4])


def cases(level: str) -> list[str]:
    rounds = range(ROUNDS[level])
    cells = [f"cells-{hosts}-hosts/{number}" for hosts in (1, 2) for number in rounds]
    if level == "short":
        return cells
    return cells + [
        f"{name}/{number}" for number in range(ROUNDS[level] // 2) for name in (*SHARED, *REFUSED)
    ]


def run(case: str, rng: random.Random, workspace: Workspace) -> Tally:
    name, tally = case.partition("/")[0], Tally()
    with workspace.case(f"many-{case}") as folder:
        if name.startswith("cells-"):
            problem = run_cells(int(name.split("-")[1]), rng, folder, workspace.log(folder))
        else:
            problem = run_command_twice(name, rng, folder, workspace)
    if problem:
        tally.fail(problem)
    else:
        tally.survived += 1
    return tally


MANY = Category("many", cases, run, (*SHARED, *REFUSED))
