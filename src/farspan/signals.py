"""SIGTERM and Ctrl-C: a command ends with a sentence on how to resume it, and exit code 75."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any

from farspan.errors import PreemptedError


class _Stop(BaseException):
    """Raised by SIGTERM and Ctrl-C. Not an Exception: libraries catch those and carry on."""


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as an exception, so that nothing half-written stays behind."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    previous = signal.getsignal(signal.SIGTERM)
    if previous != signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Let SIGTERM or Ctrl-C stop the block anywhere; `kept` says what remains on disk."""

    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        # Raise again in a second: an exception raised where C calls Python can get lost.
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        raise _Stop

    def ignore_lost_stop(unraisable: Any) -> None:  # lost in a __del__, say; the timer raises again
        if unraisable.exc_type is not _Stop:
            previous_hook(unraisable)

    previous_hook, sys.unraisablehook = sys.unraisablehook, ignore_lost_stop
    numbers = [signal.SIGTERM, signal.SIGALRM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except (_Stop, KeyboardInterrupt):
        cause = "SIGTERM" if received[:1] == [signal.SIGTERM] else "Ctrl-C"
        raise PreemptedError(
            f"stopped by {cause}; {kept}; rerun the same command to resume"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = previous_hook


@contextmanager
def delay_signals() -> Iterator[Callable[[], bool]]:
    """Delay SIGTERM and a first Ctrl-C; the loop in the block calls the yielded function to see
    whether it should stop. A second Ctrl-C stops it at once.

    Signals that the caller ignores stay ignored. Outside the main thread nothing is delayed, since
    Python sets handlers only there.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    }
    previous = {
        number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN
    }

    def delay(number: int, frame: Any) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, previous[number])

    try:
        for number in previous:
            signal.signal(number, delay)
    except ValueError:
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """For a worker process: ignore Ctrl-C, which the parent handles, and end when the parent dies.

    A killed parent cannot stop its workers, so a thread watches it.
    """

    def wait() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()
