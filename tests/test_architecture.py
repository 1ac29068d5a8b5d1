"""The structure of the project: imports, names, line lengths, and what the docs promise."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import farspan
from families import FAMILIES

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "farspan"
FILES = sorted(
    path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem[:2] != "__"
)
CODE = sorted(
    path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FORBIDDEN_NAMES = {
    "found",
    "told",
    "tells",
    "mend",
    "begun",
    "how",
    "idle",
    "alone",
    "toil",
    "suited",
}


def short_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layers() -> list[set[str]]:
    """The layers of docs/design.md, top first: the fenced block that begins with `cli`."""
    text = (ROOT / "docs" / "design.md").read_text()
    block = re.search(r"```\n(cli\n.*?)```", text, re.DOTALL).group(1)
    return [{name.strip() for name in line.split("|")} for line in block.strip().splitlines()]


def imported_modules(path: Path) -> set[str]:
    """The farspan modules that a file imports anywhere, lazily or for types."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name for name in submodules if module_path(name)} or {node.module}
    return {name for name in modules if name.startswith("farspan.")}


def module_path(name: str) -> Path | None:
    """`farspan.model.config` -> its file; None if there is no such module."""
    base = SOURCE.joinpath(*name.split(".")[1:])
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.exists()), None)


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_the_design_names_every_public_name():
    text = (ROOT / "docs" / "design.md").read_text()
    entry = re.search(r"__init__\.py +the public names, .*?: (.*?)\n  cli/", text, re.DOTALL)
    assert sorted(re.split(r",\s+", entry[1])) == sorted(farspan.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path):
    level = {name: number for number, layer in enumerate(layers()) for name in layer}
    package = package_of(path)
    assert package in level, f"{package} has no layer in docs/design.md"
    for module in imported_modules(path):
        other = module.split(".")[1]
        if other not in (package, "__version__"):
            assert level[other] > level[package], (
                f"{package} imports {other}, which is not below it"
            )


def test_no_import_circles():
    """Within packages too, lazy imports and imports for types included."""
    graph = {
        path: {module_path(name) for name in imported_modules(path)} - {None, path}
        for path in FILES
    }
    while leaves := {path for path, targets in graph.items() if not targets & graph.keys()}:
        graph = {path: targets for path, targets in graph.items() if path not in leaves}
    in_circles = {
        short_path(path): sorted(short_path(other) for other in targets & graph.keys())
        for path, targets in graph.items()
    }
    assert not in_circles


def test_attention_knows_no_architecture():
    for path in (SOURCE / "attention").glob("*.py"):
        assert not any(name.startswith("farspan.model.") for name in imported_modules(path))


def identifiers(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("path", CODE, ids=short_path)
def test_names_say_what_a_thing_is(path: Path):
    names = {name.strip("_") for name in identifiers(ast.parse(path.read_text()))}
    assert not names & (FORBIDDEN_NAMES | {"res", "obj", "tmp"})


def test_one_class_name_has_one_meaning():
    names = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


@pytest.mark.parametrize("name", ["evaluate", "extend"])
def test_the_main_functions_are_short(name: str):
    tree = ast.parse((SOURCE / "workflows" / f"{name}.py").read_text())
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    assert function.end_lineno - function.lineno + 1 <= 50


def test_bodies_of_functions_have_at_most_60_lines():
    """Signatures apart, which list the options of a command."""
    lengths = {
        f"{short_path(path)}:{node.name}": node.end_lineno - node.body[0].lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert not {name: length for name, length in lengths.items() if length > 60}


@pytest.mark.parametrize("page", PAGES, ids=short_path)
def test_lines_of_pages_have_at_most_100_characters(page: Path):
    """Tables, links alone on a line and terminal output apart."""
    in_block, long = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_block ^= line.startswith("```")
        exempt = in_block or line.lstrip("> ").startswith(("|", "![", "<", "[", "- [arXiv"))
        if len(line) > 100 and not exempt:
            long.append(number)
    assert not long


def test_public_functions_stay_callable_after_every_submodule_was_imported(tmp_path):
    FAMILIES[0].build().save_pretrained(tmp_path)
    skipped = {"farspan.__main__", "farspan.attention.kernels"}  # a command; and Triton
    for module in pkgutil.walk_packages(farspan.__path__, "farspan."):
        if module.name not in skipped:
            importlib.import_module(module.name)
    for _ in range(2):
        assert farspan.inspect(tmp_path).family == "farspan"
        assert farspan.load(tmp_path).model.config.model_type == "farspan"
    functions = {"check", "diagnose", "evaluate", "export", "extend", "generate", "inspect", "load"}
    functions |= {"compare", "lab", "pretrain", "report", "reproduce"}
    assert all(callable(getattr(farspan, name)) for name in functions)
    assert set(farspan.__all__) == {"FarspanError", "Patch", *functions} <= set(dir(farspan))
    assert issubclass(farspan.FarspanError, Exception)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = farspan.nonsense


def test_help_is_quick():
    """At most 1.5 times the processor time of importing what renders it, whatever the machine and
    what else it does; the best of five."""
    ratios = []
    for _ in range(5):
        rendering, _ = _processor_time("-c", "import typer.rich_utils, rich.markdown")
        seconds, text = _processor_time("-m", "farspan", "--help")
        assert "inspect" in text
        ratios.append(seconds / rendering)
        if ratios[-1] < 1.5:
            break
    assert min(ratios) < 1.5


def _processor_time(*arguments: str) -> tuple[float, str]:
    """The seconds of a Python process, and what it prints."""
    before = os.times()
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    after = os.times()
    assert result.returncode == 0
    user, system = after.children_user, after.children_system
    return user + system - before.children_user - before.children_system, result.stdout


def test_importing_the_cli_imports_nothing_heavy():
    heavy = "('torch', 'transformers', 'matplotlib')"
    script = f"import sys, farspan.cli; print(*(m for m in {heavy} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.strip() == ""


def test_the_changelog_has_this_version():
    assert f"## [{farspan.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def shell_blocks(page: Path) -> str:
    """The commands of a page, prompts removed, continued lines joined."""
    blocks = "".join(re.findall(r"```(?:bash|sh|)\n(.*?)```", page.read_text(), re.DOTALL))
    return re.sub(r"^\$ ", "", blocks.replace("\\\n", " "), flags=re.MULTILINE)


def test_the_pages_name_commands_and_files_that_exist():
    from farspan.cli import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        shell = shell_blocks(page)
        assert set(re.findall(r"^farspan ([a-z]+)", shell, re.MULTILINE)) <= commands, page
        assert set(re.findall(r"^make ([a-z]+)", shell, re.MULTILINE)) <= targets, page
        for link in re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
