"""Kills: SIGKILL, SIGTERM and SIGINT at random points of every long command, which then resumes.

A point is a file operation or a moment. After up to five kills the command runs to its end: its
files must equal those of a run that nobody disturbed, and nothing else may be left. Cells that were
finished before a kill must not be computed again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from torture.children import Ended, farspan_main, run_function, start, wait
from torture.events import watch
from torture.harness import Category, Workspace
from torture.subjects import COMMANDS, differences, snapshot
from torture.tally import Tally

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STOPPED = (0, 1, 75, 130, 143, -signal.SIGTERM)  # exit codes after SIGTERM or SIGINT
ALREADY = "already exists"
CASES = {"short": 1, "bounded": 6, "full": 28}  # of each command, with up to five kills
SHORT = ("pretrain", "eval")


def cases(level: str) -> list[str]:
    names = SHORT if level == "short" else COMMANDS
    return [f"{name}/{number}" for number in range(CASES[level]) for name in names]


def run(case: str, rng: random.Random, workspace: Workspace) -> Tally:
    name = case.partition("/")[0]
    tally = Tally()
    with workspace.case(f"kills-{case}") as folder:
        log, kept = workspace.log(folder), {}
        for _ in range(rng.randint(2, 5)):
            ended, point = _run_and_kill(name, rng, folder, workspace)
            complete = is_complete(ended)  # the kill before was after its last rename
            problem = "" if complete else _stop_problem(ended)
            if problem := problem or lost_cells(folder, kept):
                tally.fail(f"{point}: {problem}")
                return tally
            kept = finished_cells(folder)
            tally.survived += 1
            if ended.code == 0 or complete:
                break
        problem = finish(name, folder, log, workspace) or lost_cells(folder, kept)
    if problem:
        tally.survived -= 1
        tally.fail(f"{point}, then the command again: {problem}")
    return tally


def _run_and_kill(
    name: str, rng: random.Random, folder: Path, workspace: Workspace
) -> tuple[Ended, str]:
    """Run a command, kill it at a random point, and wait for its end."""
    number, log = rng.choice(SIGNALS), workspace.log(folder)
    undisturbed = workspace.undisturbed[name]
    at_event = rng.random() < 0.7
    event = rng.randint(1, undisturbed.events)
    moment = rng.uniform(0, undisturbed.seconds)
    ready = log.with_suffix(".log.ready")

    def prepare() -> None:
        if at_event:
            watch(folder, lambda count, *_: count == event and os.kill(os.getpid(), number))
        ready.touch()

    child = start(farspan_main(COMMANDS[name], prepare), folder, log)
    point = f"{signal.Signals(number).name} at change {event} of a file"
    if not at_event:
        point = f"{signal.Signals(number).name} after {moment:.2f} s"
        while not ready.exists() and not _has_ended(child):
            time.sleep(0.001)
        time.sleep(moment)
        with suppress(ProcessLookupError):
            os.kill(child, number)
    ended = wait(child, log)
    ready.unlink(missing_ok=True)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return ended, point


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop_problem(ended: Ended) -> str:
    if ended.traceback:
        return f"a traceback, {ended.describe()}"
    expected = (*STOPPED, -signal.SIGKILL) if not ended.timed_out else ()
    return "" if ended.code in expected else ended.describe()


def is_complete(ended: Ended) -> bool:
    """Whether a command refused to write a result that is there already."""
    return ended.code == 2 and ALREADY in ended.errors


def finish(name: str, folder: Path, log: Path, workspace: Workspace) -> str:
    """Run a command to its end; what is wrong with its result, or nothing."""
    ended = run_function(farspan_main(COMMANDS[name]), folder, log)
    if ended.traceback or not (ended.code == 0 or is_complete(ended)):
        return ended.describe()
    return "; ".join(differences(workspace.undisturbed[name].files, snapshot(folder))[:4])


def finished_cells(folder: Path) -> dict[str, tuple[int, int]]:
    files = folder.glob("out/cells/*.json")
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def lost_cells(folder: Path, before: dict[str, tuple[int, int]]) -> str:
    after = finished_cells(folder)
    lost = [name for name, identity in before.items() if after.get(name) != identity]
    return f"finished cells were lost or computed again: {lost}" if lost else ""


KILLS = Category("kills", cases, run, tuple(COMMANDS))
