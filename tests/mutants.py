"""Mutation testing: change one operator, number or condition of farspan, and see whether a test
notices.

    make mutants                                                # rerun to resume
    python tests/mutants.py --count 50 --packages attention methods

The first run measures which tests reach which line, and leaves out those that fail without any
change. Every mutant then runs only the tests that reach it, the fastest of each function first, in
a process that is forked from one with torch loaded. A mutant that survives the first 100 runs the
others, too. `.mutants/` keeps the measurement and the verdicts, by the hash of the mutated source:
a mutant is computed again when its module changed. Delete the folder when tests changed.

A mutant is `killed` by a test that fails. One that takes too long is a `timeout`, which is no proof
that a test notices it. It is `unreached` if no test runs, and `excluded` for a reason of the tables
below.
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
FOLDER = ROOT / ".mutants"
FIRST_TESTS = 100  # of those that reach a line; the others are run for survivors only
MAX_TEST_SECONDS = 10  # of one test; slower ones are left out
START_SECONDS, SLOWDOWN = 30, 10  # of a mutant: to start, and times the seconds of its tests
NO_TESTS = 5  # exit status of pytest
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
# Not sampled at all.
MODULES_WITHOUT_MUTANTS = {"attention/kernels.py": "CUDA only"}
# Sampled and not run: each counts in the first percentage of the report and not in the second.
SEEDS = ("manual_seed", "default_rng")
ANY_SEED = f"numbers in the arguments of {' and '.join(SEEDS)} (any random numbers serve)"
CUDA_ONLY = "blocks that run on CUDA only"
BOUNDS_OF_COST = {
    (
        "attention/guard.py",
        "TOKENS",
    ): "cost: a dropped window of SPAN keys shows in more tokens, too",
    (
        "attention/guard.py",
        "DECODED",
    ): "cost: any number of steps with a cache shows a dropped mask",
    ("attention/small_config.py", "MIN_LAYERS"): "cost: more layers repeat the pattern",
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
    statement: range = range(0)  # its lines; those of a compound statement up to its body
    excluded: str = ""  # why it is not run

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


@dataclass(frozen=True)
class _Place:
    """A node that may be changed, and where it stands."""

    parent: ast.AST
    field: str
    index: int | None  # in a field that is a list
    node: ast.AST
    statement: range
    excluded: str

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


class _Places(ast.NodeVisitor):
    """Collects every node that may be changed.

    Flags that only forbid mistakes stay: without them, code that makes none behaves alike.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.places: list[_Place] = []
        self._statement, self._excluded = range(0), ""

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment"):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not _is_text(child) and not _is_guard(child):
                    self._add(node, name, index, child)

    def _add(self, parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
        outer = self._statement, self._excluded
        if isinstance(node, ast.stmt):
            self._statement = _head(node)
        self._excluded = self._excluded or _reason(self.module, parent, field)
        excluded = self._excluded if self._excluded == CUDA_ONLY or _is_number(node) else ""
        self.places.append(_Place(parent, field, index, node, self._statement, excluded))
        self.visit(node)
        self._statement, self._excluded = outer


def _head(statement: ast.stmt) -> range:
    """The lines of a statement; those of a compound statement up to its body."""
    first = min([statement, *getattr(statement, "decorator_list", [])], key=_line).lineno
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or first) + 1
    return range(first, max(end, statement.lineno + 1))


def _line(node: ast.stmt | ast.expr) -> int:
    return node.lineno


def _reason(module: str, parent: ast.AST, field: str) -> str:
    """Why mutants of this field of a node are not run, those of numbers or all; empty if they
    are."""
    if isinstance(parent, ast.Call) and field == "args":
        function = parent.func
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        return ANY_SEED if name in SEEDS else ""
    if isinstance(parent, ast.If) and field == "body" and _is_on_cuda(parent.test):
        return CUDA_ONLY
    if isinstance(parent, ast.Assign) and field == "value":
        name = ast.unparse(parent.targets[0])
        reason = BOUNDS_OF_COST.get((module, name))
        return f"{name} of {module} ({reason})" if reason else ""
    return ""


def _is_on_cuda(test: ast.expr) -> bool:
    """Whether a condition is true on CUDA only: `….is_cuda`, `… == "cuda"`, or one of them `and`
    more."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_on_cuda, test.values))
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.Eq) and ast.unparse(test.comparators[0]) == "'cuda'"
    return isinstance(test, ast.Attribute) and test.attr == "is_cuda"


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_text(node: ast.AST) -> bool:
    """Whether a node only makes a message: its numbers and operators are nobody's law."""
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom)


def _is_guard(node: ast.AST) -> bool:
    """Whether a node is `frozen=True` or `eq=False` of a dataclass, or `strict=True` of zip."""
    return isinstance(node, ast.keyword) and node.arg in ("frozen", "eq", "strict")


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a module."""
    tree = ast.parse(path.read_text())
    module, mutants = str(path.relative_to(SOURCE / "farspan")), []
    places = _Places(module)
    places.visit(tree)
    for place in places.places:
        for new in changed_nodes(place.node):
            place.put(ast.copy_location(new, place.node))
            source = ast.unparse(ast.fix_missing_locations(tree))
            place.put(place.node)
            before, after = _first_line(place.node), _first_line(new)
            line = place.node.lineno
            mutants.append(
                Mutant(module, line, before, after, source, place.statement, place.excluded)
            )
    return mutants


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:100]


def sample_mutants(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """A seeded sample over all modules of the packages."""
    paths = [
        path
        for package in packages
        for path in sorted((SOURCE / "farspan" / package).glob("*.py"))
        if str(path.relative_to(SOURCE / "farspan")) not in MODULES_WITHOUT_MUTANTS
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

    def tests(self, module: str, line: int, statement: Sequence[int] = ()) -> dict[str, float]:
        """With the seconds of each. A line of a statement that is not traced by itself is reached
        with the others."""
        if module not in self._lines:
            path = str(SOURCE / "farspan" / module)
            self._lines[module] = {
                number: sorted({context.rpartition("|")[0] for context in contexts} - {""})
                for number, contexts in self._data.contexts_by_lineno(path).items()
            }
        lines = self._lines[module]
        traced = [number for number in ([line] if line in lines else statement) if number in lines]
        reached = {test for number in traced for test in lines[number]}
        if traced and not reached:  # at import: any test of the module may notice it
            reached = {test for tests in lines.values() for test in tests}
        quick = [
            test
            for test in reached - self.failing
            if self._seconds.get(test, 0.0) <= MAX_TEST_SECONDS
        ]
        return {test: self._seconds.get(test, 0.0) for test in self._varied(quick)}

    def _varied(self, tests: Sequence[str]) -> list[str]:
        """The fastest parameters of each test first, then the second fastest of each, and so on:
        another test notices more than the same one with other parameters."""
        rank: dict[str, int] = defaultdict(int)
        ranked = []
        for seconds, test in sorted((self._seconds.get(test, 0.0), test) for test in tests):
            function = test.partition("[")[0]
            ranked.append((rank[function], seconds, test))
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


def find_verdict(mutant: Mutant, tests: dict[str, float]) -> str:
    """Of the first tests, and of the others if these do not notice it; tests: their seconds."""
    names, verdict = list(tests), "unreached"
    for part in (names[:FIRST_TESTS], names[FIRST_TESTS:]):
        if not part:
            break
        limit = START_SECONDS + SLOWDOWN * sum(tests[name] for name in part)
        outcome = run_mutant(mutant, part, limit)
        if outcome in ("killed", "timeout"):
            return outcome
        if outcome == "survived":
            verdict = outcome
    return verdict


def run_mutant(mutant: Mutant, tests: list[str], limit: float) -> str:
    """`killed`, `survived`, `unreached` or, after `limit` seconds, `timeout`; in a child of this
    process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_tests(mutant, tests)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "survived", NO_TESTS: "unreached"}.get(code, "killed")
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
    # Long tests, too: the options of the project leave them out.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-m", "not manual"]
    os._exit(pytest.main([*options, *tests]))


# The run.


def run_share(mutants: list[tuple[Mutant, dict[str, float]]], results: Path) -> None:
    """Run mutants with their tests one after the other, and append each verdict."""
    sys.path.insert(0, str(ROOT / "tests"))
    for name in WARM:
        importlib.import_module(name)
    for mutant, tests in mutants:
        start = time.monotonic()
        verdict = find_verdict(mutant, tests)
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
    """Counts by package, the mutants that no test noticed, and what is excluded."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        if mutant.excluded:
            counts[mutant.package]["excluded"] += 1
        elif mutant.key in verdicts:
            counts[mutant.package][verdicts[mutant.key]["verdict"]] += 1
    kinds = ("killed", "timeout", "survived", "unreached", "excluded")
    print(f"| package | mutants | {' | '.join(kinds)} | killed of all | of those not excluded |")
    print("|---" * (len(kinds) + 4) + "|")
    for package, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        shares = [
            f"{count['killed'] / max(1, total):.1%}"
            for total in (count.total(), count.total() - count["excluded"])
        ]
        columns = [package, count.total(), *(count[kind] for kind in kinds), *shares]
        print(f"| {' | '.join(map(str, columns))} |")
    for mutant in sorted(mutants, key=lambda each: (each.module, each.line)):
        entry = verdicts.get(mutant.key, {})
        if entry.get("verdict") in ("timeout", "survived", "unreached") and not mutant.excluded:
            print(f"{mutant.module}:{mutant.line}: {mutant.before}  →  {mutant.after}", end="")
            print(f"  ({entry['verdict']}, {entry['tests']} tests)")
    print_exclusions(mutants)


def print_exclusions(mutants: list[Mutant]) -> None:
    reasons = Counter(mutant.excluded for mutant in mutants if mutant.excluded)
    for reason, count in sorted(reasons.items()):
        print(f"excluded: {count} in {reason}")
    for module, reason in MODULES_WITHOUT_MUTANTS.items():
        print(f"not sampled: {module} ({reason})")


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
            (mutant, reach.tests(mutant.module, mutant.line, mutant.statement))
            for mutant in mutants
            if mutant.key not in known and not mutant.excluded
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
