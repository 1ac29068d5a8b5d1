"""Run the cases of categories in several processes, keep what happened, print the table."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torture import subjects
from torture.children import farspan_main, run_function
from torture.events import watch
from torture.tally import Tally, table

ROOT = Path(__file__).parent.parent.parent
LEVELS = ("short", "bounded", "full")  # the test, `make torture`, `make torture-full`


@dataclass(frozen=True)
class Category:
    """cases: the names of its cases at a level; run: one case."""

    name: str
    cases: Callable[[str], list[str]]
    run: Callable[[str, random.Random, Workspace], Tally]
    commands: tuple[str, ...] = ()  # those whose undisturbed results it compares with


@dataclass(frozen=True)
class Undisturbed:
    """A run of a command that nothing disturbs."""

    files: dict[str, str]  # path -> hash
    events: int  # changes to files
    reads: int  # files opened to read
    seconds: float


class Workspace:
    """The inputs of all cases, the results of undisturbed commands, and a folder for each case."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.inputs = folder / "inputs"
        self.undisturbed: dict[str, Undisturbed] = {}

    def prepare(self, commands: Sequence[str]) -> None:
        """Build the inputs, and run commands here: later forks start with what these loaded."""
        shutil.rmtree(self.folder, ignore_errors=True)
        subjects.build(self.inputs)
        for name in ["eval", *(name for name in commands if name != "eval")]:
            with self.case(f"undisturbed-{name}") as folder:
                run_here(subjects.COMMANDS[name], folder)
                files = subjects.snapshot(folder)
                if name in subjects.KEPT:
                    source, target = subjects.KEPT[name]
                    shutil.move(folder / source, self.inputs / target)
            if name in commands:
                self.undisturbed[name] = self._measure(name, files)
        gc.collect()
        gc.freeze()  # a fork copies no page of what it only reads

    def _measure(self, name: str, files: dict[str, str]) -> Undisturbed:
        """Count the file operations of a command in a fork, which must write the same files."""
        counts, result = [0, 0], self.folder / f"{name}.counts"

        def prepare() -> None:
            for reads in (False, True):
                watch(folder, lambda *_, reads=reads: count(reads), reads=reads)

        def count(reads: bool) -> None:
            counts[reads] += 1

        def main() -> None:
            try:
                farspan_main(subjects.COMMANDS[name], prepare)()
            finally:
                result.write_text(json.dumps(counts))

        with self.case(f"measured-{name}") as folder:
            start = time.monotonic()
            ended = run_function(main, folder, self.log(folder))
            seconds = time.monotonic() - start
            if changed := subjects.differences(files, subjects.snapshot(folder)):
                raise RuntimeError(f"{name} differs in a fork ({ended.describe()}): {changed}")
        return Undisturbed(files, *json.loads(result.read_text()), seconds)

    @contextmanager
    def case(self, name: str) -> Iterator[Path]:
        """An empty folder with a link to the inputs; removed afterwards."""
        folder = self.folder / name.replace("/", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "in").symlink_to(self.inputs)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for log in self.folder.glob(f"{folder.name}.log*"):
                log.unlink()

    def log(self, folder: Path) -> Path:
        """Where the output of a case's processes goes: beside its folder."""
        return folder.with_name(f"{folder.name}.log")


def run_here(arguments: Sequence[str], folder: Path) -> None:
    """Run a command in this process and folder; it must succeed."""
    before, argv, stdout = Path.cwd(), sys.argv, sys.stdout
    os.chdir(folder)
    try:
        with open(os.devnull, "w") as sys.stdout:
            farspan_main(arguments)()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"farspan {' '.join(arguments)} ended with {stop.code}") from stop
    finally:
        sys.stdout, sys.argv = stdout, argv
        os.chdir(before)


def run_case(category: Category, case: str, seed: int, workspace: Workspace) -> Tally:
    rng = random.Random(f"{seed}/{category.name}/{case}")
    try:
        return category.run(case, rng, workspace)
    except Exception as error:  # of the harness itself
        tally = Tally()
        tally.fail(f"the harness failed: {type(error).__name__}: {error}")
        return tally


def source_hash() -> str:
    """Outcomes of another farspan are measured again."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "farspan").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Outcomes:
    """The finished cases, in files that a rerun reads."""

    def __init__(self, folder: Path, seed: int, keep: bool = False):
        self.folder, self.seed, self.code, self.keep = folder, seed, source_hash(), keep
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Tally]:
        lines = [line for file in self.folder.glob("*.jsonl") for line in file.open()]
        values = [json.loads(line) for line in lines if line.endswith("\n")]
        return {
            value["case"]: Tally.from_json(value)
            for value in values
            if value["seed"] == str(self.seed) and (self.keep or value["code"] == self.code)
        }

    def write(self, case: str, tally: Tally) -> None:
        with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(tally.to_line(case=case, code=self.code, seed=str(self.seed)))


def run_categories(
    categories: Sequence[Category],
    level: str,
    seed: int,
    jobs: int,
    workspace: Workspace,
    outcomes: Outcomes,
) -> dict[str, Tally]:
    """The tallies of all cases, by category; cases that are known are not run again."""
    known = outcomes.read()
    todo = [
        (category, case)
        for category in categories
        for case in category.cases(level)
        if f"{category.name}/{case}" not in known
    ]
    if todo:
        with subjects.plain_figures():
            needed = {name for category, _ in todo for name in category.commands}
            workspace.prepare([name for name in subjects.COMMANDS if name in needed])
            _run_in_processes(todo, seed, jobs, workspace, outcomes)
    known = outcomes.read()
    tallies = {category.name: Tally() for category in categories}
    for category in categories:
        for case in category.cases(level):
            if (tally := known.get(f"{category.name}/{case}")) is not None:
                tallies[category.name].add(tally)
    return tallies


def _run_in_processes(
    todo: Sequence[tuple[Category, str]],
    seed: int,
    jobs: int,
    workspace: Workspace,
    outcomes: Outcomes,
) -> None:
    workers = []
    for number in range(jobs):
        if (worker := os.fork()) == 0:
            try:
                for category, case in todo[number::jobs]:
                    _run_and_print(category, case, seed, workspace, outcomes)
            finally:
                os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)


def _run_and_print(
    category: Category, case: str, seed: int, workspace: Workspace, outcomes: Outcomes
) -> None:
    start = time.monotonic()
    tally = run_case(category, case, seed, workspace)
    outcomes.write(f"{category.name}/{case}", tally)
    seconds = time.monotonic() - start
    counts = f"{tally.tried} tried, {tally.wrong} wrong"
    print(f"{category.name}/{case}: {counts} ({seconds:.1f} s)", flush=True)
    for failure in tally.failures:
        print(f"  WRONG {failure}\n  {repeat_command(category.name, case, seed)}", flush=True)


def repeat_command(category: str, case: str, seed: int) -> str:
    return f"PYTHONPATH=src:tests python -m torture --seed {seed} --case {category}/{case}"


def print_table(tallies: dict[str, Tally]) -> None:
    print(table([*tallies.items(), ("all", _sum(tallies))]))


def _sum(tallies: dict[str, Tally]) -> Tally:
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    return total
