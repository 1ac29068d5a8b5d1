"""Being asked to stop, by SIGTERM or Ctrl-C: a command ends with a sentence on how to go on, and exit code 75."""

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


class _Asked(BaseException):
    """Asked to stop. No Exception, for those are caught by libraries that go on without what they tried."""


@contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """A command that may be stopped anywhere; `kept` tells what stays of it."""

    def stop(number: int, frame: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 1.0)  # asked again: what is raised where C calls Python can get lost
        raise _Asked

    def ignored(lost: Any) -> None:  # as in a __del__: nobody needs to know, for it is asked again
        if lost.exc_type is not _Asked:
            told(lost)

    told, sys.unraisablehook = sys.unraisablehook, ignored
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    except (_Asked, KeyboardInterrupt) as asked:
        by = "Ctrl-C" if isinstance(asked, KeyboardInterrupt) else "SIGTERM"
        raise PreemptedError(f"stopped by {by}; {kept}, so give the same command again to go on") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = told


@contextmanager
def held() -> Iterator[Callable[[], bool]]:
    """Hold SIGTERM and a first Ctrl-C back, for a loop that asks when it can stop; a second Ctrl-C ends it at once.
    What the caller ignores stays ignored, and outside the main thread signals are the caller's affair."""
    caught: list[int] = []
    found: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in found.items() if handler != signal.SIG_IGN}

    def hold(number: int, frame: Any) -> None:
        caught.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    try:
        for number in before:
            signal.signal(number, hold)
    except ValueError:
        yield lambda: False
        return
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """For a helper: Ctrl-C is heard by its parent too, which ends it in order; and a parent that was killed cannot."""

    def wait() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()
