"""The mutation run itself: what it changes, and what it makes of a noticed change."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import mutants
from mutants import Mutant, changed_nodes, mutants_of

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", "a <= b"),
        ("a == b", "a != b"),
        ("a in b", "a not in b"),
        ("a + b", "a - b"),
        ("a ** b", "a * b"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("-a", "a"),
        ("b if a else c", "b if not a else c"),
        ("True", "False"),
        ("0", "1"),
        ("1", "2"),
        ("0.5", "1.0"),
        ("a", None),
        ("'text'", None),
    ],
)
def test_a_change_is_one_operator_number_or_condition(before, after):
    node = ast.parse(before, mode="eval").body
    changed = [ast.unparse(ast.fix_missing_locations(new)) for new in changed_nodes(node)]
    assert changed == ([after] if after else [])


def test_every_mutant_of_a_module_differs_from_it_in_one_place():
    path = mutants.SOURCE / "farspan" / "lengths.py"
    original = ast.unparse(ast.parse(path.read_text())).splitlines()
    made = mutants_of(path)
    assert len(made) > 10
    for mutant in made:
        lines = mutant.source.splitlines()
        different = [pair for pair in zip(original, lines, strict=True) if pair[0] != pair[1]]
        assert len(different) == 1, mutant
    assert len({mutant.key for mutant in made}) == len(made)


def test_messages_and_annotations_stay_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "SOURCE", tmp_path)
    (tmp_path / "farspan").mkdir()
    path = tmp_path / "farspan" / "one.py"
    path.write_text("def f(a: 1 + 1) -> 3:\n    raise ValueError(f'{a + 1} is not 5')\n")
    assert mutants_of(path) == []


def test_flags_that_only_forbid_mistakes_stay_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "SOURCE", tmp_path)
    (tmp_path / "farspan").mkdir()
    path = tmp_path / "farspan" / "one.py"
    path.write_text("pairs = sorted(zip(a, b, strict=True), reverse=True)\n")
    assert [mutant.before for mutant in mutants_of(path)] == ["True"]
    assert "strict=True), reverse=False" in mutants_of(path)[0].source


@pytest.fixture
def mutants_of_text(tmp_path, monkeypatch):
    """A function of source code: the mutants of a module `lab/one.py` that consists of it."""
    monkeypatch.setattr(mutants, "SOURCE", tmp_path)
    path = tmp_path / "farspan" / "lab" / "one.py"
    path.parent.mkdir(parents=True)

    def make(source: str) -> list[Mutant]:
        path.write_text(source)
        return mutants_of(path)

    return make


@pytest.mark.parametrize(
    ("source", "excluded", "run"),
    [
        ("rng = np.random.default_rng((seed + 1, 2))", ["1", "2"], ["seed + 1"]),
        ("torch.manual_seed(0)\nf(3)", ["0"], ["3"]),
        ("if x.is_cuda:\n    y = 2 * z\nelse:\n    y = 3", ["2 * z", "2"], ["if x.is_cuda:", "3"]),
        ("if d.type == 'cuda' and a:\n    y = 2", ["2"], ["d.type == 'cuda' and a"]),
        ("if d.type != 'cuda':\n    y = 2", [], ["d.type != 'cuda'", "2"]),
        ("if not x.is_cuda:\n    y = 2", [], ["if not x.is_cuda:", "not x.is_cuda", "2"]),
        ("if x.is_cuda or a:\n    y = 2", [], ["if x.is_cuda or a:", "x.is_cuda or a", "2"]),
        ("ROWS = 3 * SPAN", ["3"], ["3 * SPAN"]),
        ("COLUMNS = 3", [], ["3"]),
    ],
)
def test_few_mutants_are_excluded_for_a_reason(source, excluded, run, mutants_of_text, monkeypatch):
    monkeypatch.setattr(mutants, "BOUNDS_OF_COST", {("lab/one.py", "ROWS"): "cost: memory"})
    made = mutants_of_text(source)
    assert {mutant.before for mutant in made if mutant.excluded} == set(excluded)
    assert set(run) <= {mutant.before for mutant in made if not mutant.excluded}


def test_every_excluded_number_exists():
    for module, name in mutants.BOUNDS_OF_COST:
        places = mutants._Places(module)
        places.visit(ast.parse((mutants.SOURCE / "farspan" / module).read_text()))
        assert any(place.excluded.startswith(f"{name} of {module}") for place in places.places)
    for module in mutants.MODULES_WITHOUT_MUTANTS:
        assert (mutants.SOURCE / "farspan" / module).exists()


def test_a_mutant_has_the_lines_of_its_statement(mutants_of_text):
    """Those of a compound statement end before its body."""
    source = """
        @cache(
            4
        )
        def f(
            a=5,
        ):
            b = [
                6,
            ]
            if (
                7
            ): c = 8
    """
    lines = {mutant.before: mutant.statement for mutant in mutants_of_text(dedent(source))}
    assert lines["4"] == lines["5"] == range(2, 8)
    assert lines["6"] == range(8, 11)
    assert lines["7"] == range(11, 13)
    assert lines["8"] == range(13, 14)


def made_mutant(key: str, excluded: str = "") -> Mutant:
    return Mutant("lab/one.py", 1, "0", "1", key, excluded=excluded)


def test_timeouts_and_excluded_mutants_are_counted_apart(capsys):
    """A timeout is no proof that a test notices the mutant."""
    kinds = {"killed": 3, "timeout": 1, "survived": 1, "unreached": 1}
    made = {
        made_mutant(f"{kind}{number}"): {"verdict": kind, "tests": 7}
        for kind, count in kinds.items()
        for number in range(count)
    }
    excluded = [made_mutant(f"excluded{number}", "cost") for number in range(2)]
    verdicts = {mutant.key: entry for mutant, entry in made.items()}
    mutants.print_table([*made, *excluded], verdicts)
    table, listed = capsys.readouterr().out.split("| all |")
    assert "| lab | 8 | 3 | 1 | 1 | 1 | 2 | 37.5% | 50.0% |" in table
    for kind in kinds:
        assert (f"lab/one.py:1: 0  →  1  ({kind}, 7 tests)" in listed) == (kind != "killed")
    assert "excluded: 2 in cost" in listed
    assert "not sampled: attention/kernels.py (CUDA only)" in listed


def test_survivors_of_the_first_tests_run_the_others_in_a_time_of_their_own(monkeypatch):
    tests = {f"test_{number}": 0.5 for number in range(mutants.FIRST_TESTS + 20)}
    runs = []

    def run_mutant(mutant, names, limit):
        runs.append((len(names), limit))
        return outcomes[len(runs) - 1]

    monkeypatch.setattr(mutants, "run_mutant", run_mutant)
    for outcomes, verdict in (
        (["killed"], "killed"),
        (["timeout"], "timeout"),
        (["survived", "killed"], "killed"),
        (["survived", "survived"], "survived"),
        (["survived", "unreached"], "survived"),
        (["unreached", "unreached"], "unreached"),
    ):
        runs.clear()
        assert mutants.find_verdict(made_mutant(""), tests) == verdict
        assert runs == [(100, 30 + 10 * 50.0), (20, 30 + 10 * 10.0)][: len(outcomes)]
    runs.clear()
    assert mutants.find_verdict(made_mutant(""), {}) == "unreached"
    assert runs == []


@pytest.mark.long
def test_tests_that_fail_without_a_change_are_left_out(tmp_path, monkeypatch):
    """They would notice every mutant. It needs `coverage`, which CI has before the long tests."""
    coverage = pytest.importorskip("coverage").CoverageData(str(tmp_path / "coverage"))
    path = str(mutants.SOURCE / "farspan" / "errors.py")
    for name in ("slow", "fails", "quick[b]", "quick[a]", "raises", "slowest"):
        coverage.set_context(f"tests/test_a.py::test_{name}|run")
        coverage.add_lines({path: [1]})
    coverage.set_context("tests/test_a.py::test_either[a|b]|run")
    coverage.add_lines({path: [4]})
    coverage.set_context("")
    coverage.add_lines({path: [7]})
    coverage.write()
    cases = {
        "slow": (3, ""),
        "slowest": (11, ""),
        "fails": (1, "<failure/>"),
        "quick[b]": (2, ""),
        "quick[a]": (1, ""),
        "raises": (1, "<error/>"),
    }
    lines = [
        f'<testcase classname="tests.test_a" name="test_{name}" time="{time}">{child}</testcase>'
        for name, (time, child) in cases.items()
    ]
    (tmp_path / "times.xml").write_text(f"<testsuites>{''.join(lines)}</testsuites>")
    monkeypatch.setattr(mutants, "COVERAGE", tmp_path / "coverage")
    monkeypatch.setattr(mutants, "JUNIT", tmp_path / "times.xml")
    reach = mutants.Reach()
    passing = [f"tests/test_a.py::test_{name}" for name in ("quick[a]", "slow", "quick[b]")]
    reached = reach.tests("errors.py", 1)
    assert list(reached) == passing, "other tests before other parameters"
    assert list(reached.values()) == [1, 3, 2], "seconds"
    either = "tests/test_a.py::test_either[a|b]"
    assert list(reach.tests("errors.py", 5, range(3, 7))) == [either], "with its statement"
    assert reach.tests("errors.py", 5, range(5, 7)) == {}
    assert set(reach.tests("errors.py", 7, range(1, 8))) == {*passing, either}, "at import"
    assert {test.rpartition("_")[2] for test in reach.failing} == {"fails", "raises"}


@pytest.mark.long
def test_a_mutant_is_killed_by_a_test_that_notices_it(tmp_path):
    """And survives one that does not, long or not. The run is a process of its own, without farspan
    loaded, and the options of the project leave long tests out."""
    source = (mutants.SOURCE / "farspan" / "errors.py").read_text()
    program = """if True:
        import pathlib, sys
        import mutants
        mutants.ROOT = pathlib.Path(sys.argv[1])
        mutant = mutants.Mutant("errors.py", 1, "", "", sys.argv[2])
        for name in ("notices", "does_not", "long", "manual", "sleeps"):
            limit = 3 if name == "sleeps" else 60
            print(mutants.run_mutant(mutant, [f"test_a.py::test_{name}"], limit))
    """
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -m 'not long and not manual'\nmarkers =\n  long\n  manual\n"
    )
    (tmp_path / "test_a.py").write_text(
        dedent("""
        import time

        import pytest
        from farspan import errors

        def test_notices():
            assert not hasattr(errors, "MUTATED")

        def test_does_not():
            assert errors.MUTATED

        @pytest.mark.long
        def test_long():
            assert errors.MUTATED

        @pytest.mark.manual
        def test_manual():
            assert errors.MUTATED

        def test_sleeps():
            time.sleep(60)
        """)
    )
    command = [sys.executable, "-c", program, str(tmp_path), source + "\nMUTATED = True\n"]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["killed", "survived", "survived", "unreached", "timeout"]
