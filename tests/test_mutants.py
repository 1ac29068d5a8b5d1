"""The mutation run itself: what it changes, and what it makes of a noticed change."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mutants
from mutants import changed_nodes, mutants_of

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


@pytest.mark.long
def test_tests_that_fail_without_a_change_are_left_out(tmp_path, monkeypatch):
    """They would notice every mutant. It needs `coverage`, which CI has before the long tests."""
    coverage = pytest.importorskip("coverage").CoverageData(str(tmp_path / "coverage"))
    path = str(mutants.SOURCE / "farspan" / "errors.py")
    for name in ("slow", "fails", "quick[b]", "quick[a]", "raises", "slowest"):
        coverage.set_context(f"tests/test_a.py::test_{name}|run")
        coverage.add_lines({path: [1]})
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
    assert reach.tests("errors.py", 1) == passing, "other tests before other parameters"
    assert {test.rpartition("_")[2] for test in reach.failing} == {"fails", "raises"}


@pytest.mark.long
def test_a_mutant_is_killed_by_a_test_that_notices_it(tmp_path):
    """And survives one that does not. The run is a process of its own, without farspan loaded."""
    source = (mutants.SOURCE / "farspan" / "errors.py").read_text()
    program = """if True:
        import pathlib, sys
        import mutants
        mutants.ROOT = pathlib.Path(sys.argv[1])
        mutant = mutants.Mutant("errors.py", 1, "", "", sys.argv[2])
        print(*[mutants.run_mutant(mutant, [name]) for name in ("test_a.py", "test_b.py")])
    """
    for name, body in (("a", "assert not hasattr(errors, 'MUTATED')"), ("b", "errors.MUTATED")):
        text = f"from farspan import errors\n\ndef test_{name}():\n    {body}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-c", program, str(tmp_path), source + "\nMUTATED = True\n"]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["killed", "survived"]
