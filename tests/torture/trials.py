"""Many small trials in one forked process, which is replaced if it crashes or hangs."""

from __future__ import annotations

import json
import resource
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from farspan.errors import FarspanError
from torture.children import run_function
from torture.tally import Tally

MEMORY = 12 << 30  # bytes of address space that the trials may use
SECONDS = 60.0  # without a result, after which a process counts as one that hangs


def run_trials(
    count: int, trial: Callable[[int], Tally], folder: Path, log: Path, seconds: float = SECONDS
) -> Tally:
    """The sum of the trials 0 … count - 1."""
    results, total, first = log.with_suffix(".trials"), Tally(), 0
    while first < count:
        results.unlink(missing_ok=True)

        def work(first: int = first) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            with results.open("w", buffering=1) as file:
                for number in range(first, count):
                    file.write(_guarded(trial, number).to_line())

        ended = run_function(work, folder, log, seconds + 0.5 * (count - first))
        for line in results.read_text().splitlines() if results.exists() else ():
            with suppress(json.JSONDecodeError):
                total.add(Tally.from_json(json.loads(line)))
                first += 1
        if first < count:
            total.fail(f"trial {first}: the process ended, {ended.describe()}")
            first += 1
    return total


def _guarded(trial: Callable[[int], Tally], number: int) -> Tally:
    """A trial; an error that is no FarspanError is wrong."""
    tally = Tally()
    try:
        return trial(number)
    except FarspanError:
        tally.refused += 1
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        tally.fail(f"trial {number}: {type(error).__name__}: {str(error)[:200]} ({place})")
    return tally
