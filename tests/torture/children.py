"""Commands and functions in forked processes of a preloaded parent."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 120.0  # seconds, after which a process counts as one that hangs


@dataclass(frozen=True)
class Ended:
    """A process that ended: its exit code, negative for a signal, and what it printed."""

    code: int
    output: str
    errors: str
    timed_out: bool = False

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.errors

    def describe(self) -> str:
        last = (self.errors.strip().splitlines() or [""])[-1]
        return f"exit {self.code}{' (hangs)' if self.timed_out else ''}: {last[:300]}"


def start(function: Callable[[], None], folder: Path, log: Path) -> int:
    """Fork a process that calls a function in a folder; its output goes to LOG.out and LOG.err."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        _set_up(folder, log)
        code = _exit_code(function)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _set_up(folder: Path, log: Path) -> None:
    os.chdir(folder)
    for number, name in ((0, os.devnull), (1, f"{log}.out"), (2, f"{log}.err")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file = os.open(name, flags, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False, encoding="utf-8")
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_code(function: Callable[[], None]) -> int:
    """The exit code of a function that is the main program of a process."""
    try:
        function()
    except SystemExit as stop:
        if isinstance(stop.code, int) or stop.code is None:
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wait(child: int, log: Path, timeout: float = TIMEOUT) -> Ended:
    """Wait for a process of `start`; one that takes too long is killed with its group."""
    deadline, timed_out, delay = time.monotonic() + timeout, False, 0.001
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            timed_out = True
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            done = os.waitpid(child, 0)
            break
        time.sleep(delay)
        delay = min(2 * delay, 0.02)
    output, errors = (
        Path(f"{log}.{name}").read_text(errors="replace") if Path(f"{log}.{name}").exists() else ""
        for name in ("out", "err")
    )
    return Ended(os.waitstatus_to_exitcode(done[1]), output, errors, timed_out)


def run_function(
    function: Callable[[], None], folder: Path, log: Path, timeout: float = TIMEOUT
) -> Ended:
    return wait(start(function, folder, log), log, timeout)


def farspan_main(arguments: Sequence[str], before: Callable[[], None] = lambda: None):
    """A function that runs a command of farspan; `before` is called first, in the process."""

    def main() -> None:
        from farspan import cli

        os.environ["COLUMNS"] = "400"
        sys.argv = ["farspan", *arguments]
        before()
        cli.main()

    return main
