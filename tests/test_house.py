"""The house keeps its plan: imports point down, verbs stay callable, the door opens quickly."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import farspan
from families import FAMILIES
from farspan.diagnosis.knees import Rule
from farspan.workflows.fitting import Extension

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "farspan"


def floors() -> list[set[str]]:
    """The floors of docs/design.md, top first: the fenced block that begins with `cli`."""
    text = (ROOT / "docs" / "design.md").read_text()
    block = re.search(r"```\n(cli\n.*?)```", text, re.DOTALL).group(1)
    return [{name.strip() for name in line.split("  ")[0].split("|")} for line in block.strip().splitlines()]


def wing(module: str) -> str | None:
    """`farspan.model.config` -> `model`; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imports(path: Path) -> set[str]:
    """The wings that a file imports anywhere in it, lazily or for its types."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            deeper = {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "farspan" else set()
            names |= deeper or {node.module}
    return {wing(name) for name in names if name.startswith("farspan.")} - {None, "__version__"}


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem[:2] != "__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path):
    level = {name: number for number, floor in enumerate(floors()) for name in floor}
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in level, f"{own} has no floor in docs/design.md"
    for other in imports(path) - {own}:
        assert level[other] > level[own], f"{own} imports {other}, which is not below it"


def test_attention_knows_no_architecture():
    assert all("model" not in imports(path) for path in (SOURCE / "attention").glob("*.py"))


def test_each_verb_can_be_called_twice_after_every_submodule_was_imported(tmp_path):
    FAMILIES[0].build().save_pretrained(tmp_path)
    skipped = {"farspan.__main__", "farspan.attention.kernels"}  # a command, and what needs Triton
    for module in pkgutil.walk_packages(farspan.__path__, "farspan."):
        if module.name not in skipped:
            importlib.import_module(module.name)
    for _ in range(2):
        assert farspan.inspect(tmp_path).family == "farspan"
        assert farspan.load(tmp_path).model.config.model_type == "farspan"
    verbs = {"diagnose", "evaluate", "export", "extend", "generate", "inspect", "load"}
    assert set(farspan.__all__) == {"FarspanError", "Patch", *verbs} <= set(dir(farspan))
    assert issubclass(farspan.FarspanError, Exception)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = farspan.nonsense


def test_help_answers_quickly():
    """Under 0.6 s of a processor's time, whatever else the machine is doing; the best of five."""
    times = []
    for _ in range(5):
        before = os.times()
        result = subprocess.run([sys.executable, "-m", "farspan", "--help"], capture_output=True, text=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert result.returncode == 0
        assert "inspect" in result.stdout
    assert min(times) < 0.6


def test_importing_farspan_imports_nothing_heavy():
    script = "import sys, farspan.cli; print(*(m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == ""


def test_the_changelog_knows_this_version():
    assert f"## {farspan.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_names_commands_that_exist():
    from farspan.cli import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        shell = "".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
        assert set(re.findall(r"^(?:\$ )?farspan ([a-z]+)", shell, re.MULTILINE)) <= commands, page
        assert set(re.findall(r"^make ([a-z]+)", shell, re.MULTILINE)) <= targets, page
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_python_runs(tmp_path, monkeypatch):
    """Every Python block of the README, in order; what takes minutes is given less text."""
    few = Extension(search_windows=1, choose_windows=1, report_windows=1, passkeys=0)
    monkeypatch.setattr(farspan, "diagnose", partial(farspan.diagnose, windows=1, rule=Rule(noise=0)), raising=False)
    monkeypatch.setattr(farspan, "extend", partial(farspan.extend, recipe=few), raising=False)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert names["proof"].holds
    assert names["model"].config.sliding_window == 128
