"""Every command of the documentation is valid, and is run by a test or says why not.

A fenced block whose commands no test runs has `<!-- untested: REASON -->` on the line before it. A
page on which that holds for all blocks has `<!-- untested page: REASON -->`. The commands of all
other blocks are run here, in the order of the page. Those of the README are run by test_readme.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from farspan.cli import app
from farspan.lab.finetune import FinetuneConfig
from farspan.methods.extend_config import read_extend_config
from farspan.recipe import apply_overrides
from farspan.workflows import lab, pretrain, reproduce_study

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = r"^<!-- untested: ([^\n]+) -->\n"
BLOCK = re.compile(rf"(?:{MARK})?^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PAGE_MARK = re.compile(r"^<!-- untested page: (.+) -->$", re.MULTILINE)
PROGRAM = re.compile(r"(?:\$ |torchrun .* -m )?((?:farspan|make|python (?:benchmarks|tests)/).*)")
RECIPES = {  # command -> what reads its overrides; a recipe that farspan does not have is this one
    "pretrain": (pretrain.read_recipe, "twin-nope", pretrain.RECIPE_DIR),
    "reproduce": (reproduce_study.read_study, "extend-small", reproduce_study.RECIPE_DIR),
    "run": (lab.read_study, "lab-grid", lab.RECIPE_DIR),
}


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of the fenced blocks of a page, and why they are not run: "" if they are."""
    page_mark = PAGE_MARK.search(text)
    for mark, _, language, block in BLOCK.findall(text):
        if language in ("", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if match := PROGRAM.match(line.partition("  #")[0].strip()):
                    yield match[1], mark or (page_mark[1] if page_mark else "")


def inline_commands(text: str) -> list[str]:
    fenced = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`(farspan [a-z][^`]*)`", fenced.replace("\n", " "))


def words(command: str) -> list[str]:
    """The words of a command; a synopsis has its options in brackets."""
    command = re.sub(r"\[(-[^\[\]]*|key=value…)\]", r"\1", command)
    parts = shlex.split(command.partition(" > ")[0])
    return [part for part in parts if part not in ("…", "key=value…")]


@cache
def farspan_command():
    return typer.main.get_command(app)


def check_farspan(arguments: list[str]) -> None:
    """Options exist, and so do the keys of overrides."""
    command, name = farspan_command(), ""
    while hasattr(command, "commands") and arguments:
        name, *arguments = arguments
        command = command.commands[name]
    parser = command.make_parser(command.context_class(command))
    values, rest, _ = parser.parse_args(arguments)
    assert not rest
    overrides = [each for each in values.get("overrides") or () if "…" not in each]
    if name in RECIPES:
        read, recipe, folder = RECIPES[name]
        given = values.get("recipe") or values.get("study") or recipe
        read(given if (folder / f"{given}.toml").exists() else recipe, overrides)
    elif name == "finetune":
        apply_overrides(FinetuneConfig("nope-twin", "copy"), overrides)
    elif overrides:
        read_extend_config(overrides=overrides)


def check_script(path: str, arguments: list[str]) -> None:
    source = (ROOT / path).read_text()
    for option in (each for each in arguments if each.startswith("--")):
        assert f'"{option}"' in source, f"{path} has no option {option}"


def check(command: str) -> None:
    program, *arguments = words(command)
    if program == "farspan":
        check_farspan(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets, f"the Makefile has no target {arguments[0]}"
    else:
        path, *options = arguments
        check_script(path, options)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_commands_are_valid(page: Path):
    text = page.read_text()
    for command in (*(command for command, _ in commands(text)), *inline_commands(text)):
        try:
            check(command)
        except Exception as error:
            pytest.fail(f"{command}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_or_say_why_not(page: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, reason in commands(page.read_text()):
        if not reason:
            program, *arguments = words(command)
            assert program == "farspan", f"{command}: no test runs it, and no mark says why"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, f"{command}: {result.output[-500:]} {result.exception!r}"
        for file in re.findall(r"\w+\.py", reason):
            assert (ROOT / "tests" / file).exists(), reason


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("farspan extend MODEL --too 2048", "No such option: --too"),
        ("farspan extend MODEL --to 2048 search.step=3", "search.step"),
        ("farspan lab run lab-grid stepz=3", "stepz"),
        ("farspan pretrain my.toml stepz=3", "stepz"),
        ("farspan prune MODEL", "prune"),
        ("make figure", "no target figure"),
        ("python benchmarks/fleet.py --size 3", "has no option --size"),
    ],
)
def test_an_invalid_command_is_noticed(command: str, error: str):
    with pytest.raises(Exception, match=error):
        check(command)
