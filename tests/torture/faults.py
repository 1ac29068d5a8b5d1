"""I/O faults: full, failing and read-only disks, stale locks, and clocks that jump.

A fault is injected into one operation of a command. The command ends with its result, or with one
sentence; then it runs again without a fault, and its files must equal those of an undisturbed run.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

from torture.children import Ended, farspan_main, run_function
from torture.events import watch
from torture.harness import Category, Workspace
from torture.kills import finish, is_complete
from torture.subjects import COMMANDS, differences, snapshot
from torture.tally import Tally

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT)
NO_CALLS = ("shutil.rmtree", "tempfile.mkdtemp", "tempfile.mkstemp")  # events of Python only
ATOMIC = ("extend", "export", "report", "diagnose")  # their output appears complete or not at all
DAY = 86_400.0


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def fail_change(rng: random.Random, folder: Path, events: int, _reads: int) -> None:
    """One change to a file fails."""
    number, error = rng.randint(1, events), rng.choice(ERRORS)

    def fail(count: int, event: str, path: str) -> None:
        if count == number and event not in NO_CALLS:
            raise _error(error, path)

    watch(folder, fail)


def become_read_only(rng: random.Random, folder: Path, events: int, _reads: int) -> None:
    """From one change on, all of them fail."""
    number, error = rng.randint(1, events), rng.choice((errno.EROFS, errno.EACCES, errno.ENOSPC))

    def fail(count: int, event: str, path: str) -> None:
        if count >= number and event not in NO_CALLS:
            raise _error(error, path)

    watch(folder, fail)


def fail_read(rng: random.Random, folder: Path, _events: int, reads: int) -> None:
    """A file cannot be opened to read."""
    number, error = rng.randint(1, max(1, reads)), rng.choice((errno.EIO, errno.EACCES))

    def fail(count: int, event: str, path: str) -> None:
        if count == number:
            raise _error(error, path)

    watch(folder, fail, reads=True)


def fail_fsync(rng: random.Random, _folder: Path, events: int, _reads: int) -> None:
    """A file cannot be flushed to the disk."""
    number, error = rng.randint(1, max(1, events // 6)), rng.choice((errno.EIO, errno.ENOSPC))
    original, count = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise OSError(error, os.strerror(error))
        original(handle)

    os.fsync = fsync


def write_short(rng: random.Random, _folder: Path, _events: int, _reads: int) -> None:
    """A write ends before its last byte, in Python and in libraries, as on a full disk."""
    size = int(10 ** rng.uniform(3, 5))  # the log of the command is a file, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def jump_clock(rng: random.Random, _folder: Path, _events: int, _reads: int) -> None:
    """The clock of the machine jumps back and forth by up to a day."""
    original = time.time
    time.time = lambda: original() + rng.uniform(-DAY, DAY)


FAULTS: dict[str, Callable[[random.Random, Path, int, int], None]] = {
    "change": fail_change,
    "read-only": become_read_only,
    "read": fail_read,
    "fsync": fail_fsync,
    "short": write_short,
    "clock": jump_clock,
    "stale": lambda rng, folder, events, reads: None,  # files that are there before
}
CASES = {"short": 1, "bounded": 2, "full": 6}  # of each command and fault
SHORT = ("export-gguf/change", "eval/stale", "pretrain/short")


def cases(level: str) -> list[str]:
    if level == "short":
        return [f"{name}/0" for name in SHORT]
    return [
        f"{command}/{fault}/{number}"
        for number in range(CASES[level])
        for command in COMMANDS
        for fault in FAULTS
    ]


def run(case: str, rng: random.Random, workspace: Workspace) -> Tally:
    name, fault, _ = case.split("/")
    undisturbed, tally = workspace.undisturbed[name], Tally()
    with workspace.case(f"faults-{case}") as folder:
        log = workspace.log(folder)
        if fault == "stale":
            leave_stale_files(rng, folder, undisturbed.files)

        def prepare() -> None:
            FAULTS[fault](rng, folder, undisturbed.events, undisturbed.reads)

        ended = run_function(farspan_main(COMMANDS[name], prepare), folder, log)
        if problem := _problem(name, ended, folder, undisturbed.files):
            tally.fail(problem)
        elif ended.code == 0 and not differences(undisturbed.files, snapshot(folder)):
            tally.survived += 1
        elif again := finish(name, folder, log, workspace):
            tally.fail(f"after {ended.describe()}, the command again: {again}")
        else:
            tally.refused += 1
    return tally


def _problem(name: str, ended: Ended, folder: Path, expected: dict[str, str]) -> str:
    """What is wrong after a fault, or nothing."""
    if ended.traceback:
        return f"a traceback, {ended.describe()}"
    changed = differences(expected, snapshot(folder))
    if ended.code == 0:  # what could not be removed goes with the next command
        return "; ".join(change for change in changed if not change.endswith("left over"))
    if ended.code not in (2, 3, 4, 75) or not ended.errors.strip() or ended.timed_out:
        return ended.describe()
    half = [change for change in changed if change.startswith(("out", ".out"))]
    absent = not any((folder / path).exists() for path in ("out", "out.html"))
    if name.startswith(ATOMIC) and not absent and half and not is_complete(ended):
        return f"half-written after {ended.describe()}: {half[:3]}"
    return ""


def leave_stale_files(rng: random.Random, folder: Path, files: dict[str, str]) -> None:
    """What killed processes and dead machines leave: staging folders, files, claims, locks."""
    cells = [Path(path).stem for path in files if path.startswith("out/cells/")]
    if "out.html" in files:
        (folder / ".out.html.abcd1234").write_text("x")
    elif "cache" in files:
        (folder / "cache").mkdir()
        (folder / "cache" / "lock").touch()
    elif not cells:
        (folder / ".out.abcd1234").mkdir()
        (folder / ".out.abcd1234" / "half").write_text("x")
    if not cells:
        return
    claims = folder / "out" / "claims"
    claims.mkdir(parents=True)
    (folder / "out" / "cells").mkdir()
    for key in cells:
        owner = {"host": rng.choice(["elsewhere 1", "gone 2"]), "pid": os.getpid()}
        claim = claims / f"{key}.{rng.randrange(3)}"
        claim.write_text(rng.choice([json.dumps(owner), "", "{"]))
        os.utime(claim, (0, 0))


IO_FAULTS = Category("faults", cases, run, tuple(COMMANDS))
