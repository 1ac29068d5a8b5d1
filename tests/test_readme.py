"""Every command and every Python block of the README runs, or says why it does not."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import farspan
from farspan.cli import app
from farspan.diagnosis.knees import KneeRule
from farspan.methods.extend_config import ExtendConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# The same commands on less text.
LESS = {
    "diagnose": ["--windows", "1"],
    "extend": ["search_windows=1", "choose_windows=1", "report_windows=1", "passkeys=0"],
    "eval": ["--windows", "2"],
}


def shell_lines() -> list[tuple[str, bool]]:
    """The lines of the README's shell blocks, and whether their block is marked as untested."""
    pattern = r"(<!-- untested: [^\n]+ -->\n)?^```(\w*)\n(.*?)^```$"
    return [
        (line.partition("  #")[0].strip(), bool(mark))
        for mark, language, block in re.findall(pattern, README, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if not language
    ]


@pytest.mark.long
def test_every_command_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = []
    for line, untested in shell_lines():
        program, *arguments = shlex.split(line)
        if program == "make":
            assert f"make {arguments[0]}" in (ROOT / ".ci" / "run").read_text()
        elif not untested:
            assert program == "farspan"
            result = CliRunner().invoke(app, [*arguments, *LESS.get(arguments[0], [])])
            assert result.exit_code == 0, (line, result.exception)
            ran.append(arguments[0])
    assert ran == ["inspect", "diagnose", "extend", "eval", "export", "generate"]


@pytest.mark.long
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    small = ExtendConfig(search_windows=1, choose_windows=1, report_windows=1, passkeys=0)
    quick_diagnose = partial(farspan.diagnose, windows=1, rule=KneeRule(noise=0))
    monkeypatch.setattr(farspan, "diagnose", quick_diagnose, raising=False)
    monkeypatch.setattr(farspan, "extend", partial(farspan.extend, recipe=small), raising=False)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert names["model"].config.model_type == "farspan"
    assert names["result"].after["loss@1024"] < names["result"].before["loss@1024"]


@pytest.mark.parametrize("heading", ["Limits", "FAQ", "Citation", "Results", "Install"])
def test_the_readme_has_its_parts(heading: str):
    assert f"\n## {heading}\n" in README
