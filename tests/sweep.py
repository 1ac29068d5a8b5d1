"""Check every causal family of the installed transformers, and write docs/families.md.

    make families                                  # rerun to resume
    python tests/sweep.py gemma3n_text laguna      # only these, without writing the page

Each family runs in a process of its own, with a limit on time and memory, that is forked from one
with torch loaded. `.families/` keeps the outcomes; --fresh, or another transformers, measures them
again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from every_family import families
from families_page import write_page
from family_checks import HOLDS, TRACEBACK, Outcome, Subject, run_checks

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".families"
SECONDS, MEMORY = 300, 20 << 30  # of one family

Outcomes = dict[str, Outcome]


def measure(family: str) -> Outcomes:
    """The outcomes of a family, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes.json"
        if (child := os.fork()) == 0:
            _run_child(family, Path(folder), report)
        status = _wait(child)
        if report.exists():
            return {name: Outcome(**values) for name, values in json.loads(report.read_text())}
    return {"build": Outcome(TRACEBACK, f"the process ended with status {status}")}


def _run_child(family: str, folder: Path, report: Path) -> None:
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        outcomes = run_checks(Subject(family, folder))
        lines = [(name, asdict(outcome)) for name, outcome in outcomes.items()]
        temporary = report.with_suffix(".part")
        temporary.write_text(json.dumps(lines))
        temporary.rename(report)
        status = 0
    finally:
        os._exit(status)


def _wait(child: int) -> int:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sweep(names: list[str], fresh: bool, known_only: bool = False) -> dict[str, Outcomes]:
    """The outcomes of these families; those that are known are not measured again."""
    FOLDER.mkdir(exist_ok=True)
    current, outcomes = transformers.__version__, {}
    for number, name in enumerate(names, 1):
        file = FOLDER / f"{name}.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        if stored.get("transformers") == current and not fresh:
            outcomes[name] = {key: Outcome(**values) for key, values in stored["outcomes"].items()}
        elif not known_only:
            start = time.monotonic()
            outcomes[name] = measure(name)
            content = {key: asdict(value) for key, value in outcomes[name].items()}
            file.write_text(json.dumps({"transformers": current, "outcomes": content}, indent=1))
            seconds = time.monotonic() - start
            print(f"{number}/{len(names)} {name} ({seconds:.0f} s): {_line(outcomes[name])}")
            sys.stdout.flush()
    return outcomes


def _line(outcomes: Outcomes) -> str:
    if outcomes["build"].state != HOLDS:
        return f"{outcomes['build'].state}: {outcomes['build'].detail}"
    return (
        ", ".join(
            f"{name} {value.state}" for name, value in outcomes.items() if value.state != HOLDS
        )
        or "all checks hold"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="default: every one")
    parser.add_argument("--fresh", action="store_true", help="measure again what is known")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    arguments = parser.parse_args()
    chosen = arguments.families
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = chosen or list(families())
    outcomes = sweep(names, arguments.fresh or bool(chosen), known_only=arguments.page)
    for name, parts in outcomes.items() if chosen else ():
        for check, outcome in parts.items():
            lines = outcome.detail.strip().splitlines() or [""]
            print(name, check, outcome.state, lines[-1])
    if not chosen:
        write_page(ROOT / "docs" / "families.md", outcomes, names)
    if any(part.state == TRACEBACK for parts in outcomes.values() for part in parts.values()):
        sys.exit("a family ended in a traceback; see .families/")


if __name__ == "__main__":
    main()
