"""The command: `python -m torture`, with src and tests on PYTHONPATH."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from torture import subjects
from torture.categories import CATEGORIES
from torture.harness import (
    ROOT,
    Outcomes,
    Workspace,
    print_table,
    repeat_command,
    run_case,
    run_categories,
)

STORE = ROOT / ".torture"


def main() -> None:
    parser = argparse.ArgumentParser(prog="torture", description="Kills, faults, hostile files.")
    parser.add_argument("--full", action="store_true", help="the counts of docs/security.md")
    parser.add_argument("--category", action="append", choices=list(CATEGORIES), default=[])
    parser.add_argument("--case", help="one case again, by its name: CATEGORY/CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fresh", action="store_true", help="run again what is known")
    parser.add_argument("--keep", action="store_true", help="count results of other code too")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments = parser.parse_args()
    level = "full" if arguments.full else "bounded"
    store = STORE / level
    if arguments.fresh:
        for file in store.glob("*.jsonl"):
            file.unlink()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        workspace = Workspace(Path(folder).resolve())
        if arguments.case:
            sys.exit(_repeat(arguments.case, arguments.seed, workspace))
        names = [] if arguments.table else arguments.category or list(CATEGORIES)
        if names:
            subjects.preload()
        categories = [CATEGORIES[name] for name in names or CATEGORIES]
        jobs = 0 if arguments.table else arguments.jobs
        outcomes = Outcomes(store, arguments.seed, arguments.keep)
        tallies = run_categories(categories, level, arguments.seed, jobs, workspace, outcomes)
    print(f"\nseed {arguments.seed}, {time.monotonic() - start:.0f} s")
    print_table(tallies)
    if any(tally.wrong for tally in tallies.values()):
        sys.exit("some cases went wrong; repeat them by the commands above")


def _repeat(name: str, seed: int, workspace: Workspace) -> int:
    category, _, case = name.partition("/")
    subjects.preload()
    with subjects.plain_figures():
        commands = CATEGORIES[category].commands
        own = [command for command in commands if case.startswith(f"{command}/")]
        workspace.prepare(own or commands)
        tally = run_case(CATEGORIES[category], case, seed, workspace)
    print_table({category: tally})
    for failure in tally.failures:
        print(f"WRONG {failure}\n{repeat_command(category, case, seed)}")
    return int(tally.wrong > 0)


if __name__ == "__main__":
    main()
