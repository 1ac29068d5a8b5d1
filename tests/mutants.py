"""Mutation testing: change one operator, number or condition of farspan, and see whether a test
notices.

    make mutants                                                # rerun to resume
    python tests/mutants.py --count 50 --packages attention methods

The first run measures which tests reach which line, and leaves out those that fail without any
change. Every mutant then runs only the tests that reach it, the fastest of each function first, in
a process that is forked from one with torch loaded. `.mutants/` keeps the measurement and the
verdicts, by the hash of the mutated source: a mutant is computed again when its module changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGES = ("attention", "methods", "evals", "lab", "formats", "data")
EXCLUDED = ("attention/kernels.py",)  # CUDA only
FOLDER = ROOT / ".mutants"
MAX_TESTS = 100  # of those that reach a line
MAX_TEST_SECONDS = 10  # of one test; slower ones are left out
MAX_SECONDS = 90  # of one mutant; a mutant that takes longer is killed by a timeout
WARM = ("torch._dynamo", "transformers", "pytest", "hypothesis", "matplotlib.figure")
JUNIT, COVERAGE = FOLDER / "times.xml", FOLDER / "coverage"

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
CONDITIONALS = (ast.If, ast.IfExp, ast.While)
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    module: str  # path below src/farspan
    line: int
    before: str
    after: str
    source: str  # of the whole module

    @property
    def package(self) -> str:
        return self.module.split("/")[0]

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(f"{self.module}\n{self.source}".encode()).hexdigest()[:16]


def changed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that a single change makes of this one."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield _replaced(node, ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield _replaced(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _replaced(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, CONDITIONALS) and not isinstance(node.test, ast.Compare):
        yield _replaced(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _replaced(node, value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield _replaced(node, value=node.value + 1 if node.value in (0, 1) else node.value * 2)


def _replaced(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


class _Changes(ast.NodeVisitor):
    """Collects (parent, field, index, node) of every node that may be changed.

    Flags that only forbid mistakes stay: without them, code that makes none behaves alike.
    """

    def __init__(self) -> None:
        self.places: list[tuple[ast.AST, str, int | None, ast.AST]] = []

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment"):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not _is_text(child) and not _is_guard(child):
                    self.places.append((node, name, index, child))
                    self.visit(child)


def _is_text(node: ast.AST) -> bool:
    """Whether a node only makes a message: its numbers and operators are nobody's law."""
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom)


def _is_guard(node: ast.AST) -> bool:
    """Whether a node is `frozen=True` or `eq=False` of a dataclass, or `strict=True` of zip."""
    return isinstance(node, ast.keyword) and node.arg in ("frozen", "eq", "strict")


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a module."""
    tree = ast.parse(path.read_text())
    changes = _Changes()
    changes.visit(tree)
    module, mutants = str(path.relative_to(SOURCE / "farspan")), []
    for parent, name, index, node in changes.places:
        for new in changed_nodes(node):
            _set(parent, name, index, ast.copy_location(new, node))
            after = ast.unparse(ast.fix_missing_locations(tree))
            _set(parent, name, index, node)
            before, replacement = (_first_line(each) for each in (node, new))
            mutants.append(Mutant(module, node.lineno, before, replacement, after))
    return mutants


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:100]


def _set(parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def sample_mutants(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """A seeded sample over all modules of the packages."""
    paths = [
        path
        for package in packages
        for path in sorted((SOURCE / "farspan" / package).glob("*.py"))
        if str(path.relative_to(SOURCE / "farspan")) not in EXCLUDED
    ]
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


# Which tests reach which line.


def measure_reach(jobs: int) -> None:
    """Run all tests once, long ones too, and keep the lines that each reaches and its time."""
    if JUNIT.exists() and COVERAGE.exists():
        return
    FOLDER.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "--dist", "worksteal"]
    command += ["--continue-on-collection-errors", "-m", "not manual"]
    command += ["--cov=farspan", "--cov-context=test", "--cov-report=", f"--junitxml={JUNIT}"]
    environment = os.environ | {"COVERAGE_FILE": str(COVERAGE), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


class Reach:
    """The tests that reach a line, the fastest of each test function first."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(COVERAGE))
        self._data.read()
        self._lines: dict[str, dict[int, list[str]]] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self.failing: set[str] = set()  # without any change
        for case in ElementTree.parse(JUNIT).getroot().iter("testcase"):
            test = case.get("classname", "").replace(".", "/") + f".py::{case.get('name')}"
            self._seconds[test] += float(case.get("time", 0))
            if {child.tag for child in case} & {"failure", "error"}:
                self.failing.add(test)

    def tests(self, module: str, line: int) -> list[str]:
        if module not in self._lines:
            path = str(SOURCE / "farspan" / module)
            self._lines[module] = {
                number: sorted({context.partition("|")[0] for context in contexts} - {""})
                for number, contexts in self._data.contexts_by_lineno(path).items()
            }
        lines = self._lines[module]
        reached = lines.get(line, [])
        if not reached and line in lines:  # at import: any test of the module may notice it
            reached = sorted({test for tests in lines.values() for test in tests})
        passing = [test for test in reached if test not in self.failing]
        quick = [test for test in passing if self._seconds[test] <= MAX_TEST_SECONDS]
        return self._varied(quick)[:MAX_TESTS]

    def _varied(self, tests: Sequence[str]) -> list[str]:
        """The fastest parameters of each test first, then the second fastest of each, and so on:
        another test notices more than the same one with other parameters."""
        rank: dict[str, int] = defaultdict(int)
        ranked = []
        for test in sorted(tests, key=lambda test: self._seconds[test]):
            function = test.partition("[")[0]
            ranked.append((rank[function], self._seconds[test], test))
            rank[function] += 1
        return [test for _, _, test in sorted(ranked)]


# One mutant.


class _MutatedModule(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from its mutated source."""

    def __init__(self, mutant: Mutant):
        self.path = SOURCE / "farspan" / mutant.module
        parts = Path("farspan", mutant.module).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.source = mutant.source

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        package = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=package
        )

    def get_filename(self, name):
        return str(self.path)

    def get_data(self, path):
        return self.source.encode()


def run_mutant(mutant: Mutant, tests: list[str]) -> str:
    """`killed`, `survived` or `timeout`; in a child of this process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_tests(mutant, tests)
    deadline = time.monotonic() + MAX_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _run_tests(mutant: Mutant, tests: list[str]) -> None:
    import pytest

    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, _MutatedModule(mutant))
    os.chdir(ROOT)
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", *tests]))


# The run.


def run_share(mutants: list[tuple[Mutant, list[str]]], results: Path) -> None:
    """Run mutants with their tests one after the other, and append each verdict."""
    sys.path.insert(0, str(ROOT / "tests"))
    for name in WARM:
        importlib.import_module(name)
    for mutant, tests in mutants:
        start = time.monotonic()
        verdict = run_mutant(mutant, tests) if tests else "unreached"
        entry = {
            "key": mutant.key,
            "module": mutant.module,
            "line": mutant.line,
            "before": mutant.before,
            "after": mutant.after,
            "verdict": verdict,
            "tests": len(tests),
            "seconds": round(time.monotonic() - start, 1),
        }
        with results.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_verdicts(results: Path) -> dict[str, dict]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {entry["key"]: entry for entry in map(json.loads, lines)}


def print_table(mutants: list[Mutant], verdicts: dict[str, dict]) -> None:
    """Counts by package, then the mutants that no test noticed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        if mutant.key in verdicts:
            counts[mutant.package][verdicts[mutant.key]["verdict"]] += 1
    print("| package | mutants | killed | timeout | survived | unreached | noticed |")
    print("|---|---|---|---|---|---|---|")
    rows = [*counts.items(), ("all", sum(counts.values(), Counter()))]
    for package, count in rows:
        noticed = (count["killed"] + count["timeout"]) / max(1, count.total())
        kinds = " | ".join(
            str(count[kind]) for kind in ("killed", "timeout", "survived", "unreached")
        )
        print(f"| {package} | {count.total()} | {kinds} | {noticed:.1%} |")
    for mutant in sorted(mutants, key=lambda each: (each.module, each.line)):
        entry = verdicts.get(mutant.key, {})
        if entry.get("verdict") in ("survived", "unreached"):
            print(f"{mutant.module}:{mutant.line}: {mutant.before}  →  {mutant.after}", end="")
            print(f"  ({entry['verdict']}, {entry['tests']} tests)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=720)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=PACKAGES)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    results = FOLDER / "verdicts.jsonl"
    mutants = sample_mutants(list(args.packages), args.count, args.seed)
    if not args.report_only:
        measure_reach(args.jobs)
        reach, known = Reach(), read_verdicts(results)
        print(f"{len(reach.failing)} tests fail without any change and are left out")
        # Before the forks: in a child, CoverageData erases the file that it reads.
        todo = [
            (mutant, reach.tests(mutant.module, mutant.line))
            for mutant in mutants
            if mutant.key not in known
        ]
        os.environ["OMP_NUM_THREADS"] = "1"
        children = []
        for share in range(args.jobs):
            child = os.fork()
            if child == 0:
                run_share(todo[share :: args.jobs], results)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    print_table(mutants, read_verdicts(results))


if __name__ == "__main__":
    main()
