"""The command line: names of options, help, exit codes, and output on terminals of any width."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
import torch
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from farspan import cli
from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.bundled import BUNDLED_MODELS
from farspan.cli import choices
from farspan.cli.console import console, format_count, format_file_size
from farspan.cli.diagnose import show_diagnoses
from farspan.cli.eval import show_evaluation
from farspan.cli.extend import show_extension
from farspan.cli.lab_distance import show_comparison
from farspan.cli.options import RENAMED_OPTIONS, parse_data
from farspan.errors import FarspanError
from farspan.evals.engine import EngineOptions
from farspan.evals.perplexity import METRICS, MODES
from farspan.evals.scores import Score
from farspan.evals.suites import PRESETS as EVAL_PRESETS
from farspan.evals.suites import SUITES, EvalConfig
from farspan.formats.registry import FORMATS
from farspan.lab.distance import MINIMA, Distance
from farspan.lab.tasks import TASKS
from farspan.methods.presets import PRESETS as EXTEND_PRESETS
from farspan.methods.registry import METHODS
from farspan.model.positions import MODEL_WIDE, PER_LAYER
from farspan.progress import bars
from farspan.workflows.evaluate import EvalResult
from farspan.workflows.export import DTYPES
from farspan.workflows.extend import ExtendResult

# The Python function of each command, below farspan.workflows.
FUNCTIONS = {
    "inspect": "inspect.inspect",
    "diagnose": "diagnose.diagnose",
    "extend": "extend.extend",
    "eval": "evaluate.evaluate",
    "export": "export.export",
    "check": "check.check",
    "generate": "generate.generate",
    "pretrain": "pretrain.pretrain",
    "reproduce": "reproduce.reproduce",
    "compare": "compare.compare",
    "report": "report.report",
    "lab run": "lab.run",
    "lab dump": "lab.dump",
    "lab finetune": "lab_finetune.finetune",
    "lab distance": "attention_analysis.compare_attention",
    "lab theorems": "attention_analysis.theorems",
}
ONLY_CLI = {"as_json", "prompt_file", "dry_run", "report_only", "legacy"}  # --legacy is a rule
ONLY_PYTHON = {"progress", "say", "on_step", "rule", "config"}


def commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """Every command by its full name: `eval`, `lab run`."""
    for name, command in typer.main.get_command(cli.app).commands.items():
        for subname, subcommand in getattr(command, "commands", {}).items():
            yield f"{name} {subname}", subcommand
        if not hasattr(command, "commands"):
            yield name, command


def test_options_whose_metavar_is_their_name_are_declared():
    """typer 0.27 would take such a metavar for the name of the option: --LENGTHS."""
    for name, command in commands():
        hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
        for parameter, hint in hints.items():
            for option in getattr(hint, "__metadata__", ()):
                if isinstance(option, OptionInfo) and option.metavar == parameter.upper():
                    declared = [option.default, *(option.param_decls or ())]
                    assert f"--{parameter}" in declared, (name, parameter)


def help_text(command: str) -> str:
    shown = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "500"})
    assert shown.exit_code == 0
    return shown.output


def run_main(monkeypatch, *arguments: str) -> int:
    """The exit code of a command, run in this process."""
    monkeypatch.setattr("sys.argv", ["farspan", *arguments])
    monkeypatch.setenv("COLUMNS", "400")
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def recipe_names(folder: str) -> list[str]:
    recipes = Path(cli.__file__).parent.parent / "assets" / "recipes" / folder
    return [path.stem for path in recipes.glob("*.toml")]


def function_of(command: str):
    module, _, name = FUNCTIONS[command].partition(".")
    return getattr(importlib.import_module(f"farspan.workflows.{module}"), name)


def python_parameters(command: str) -> set[str]:
    """Those of the function behind a command; `**settings` are the fields of EvalConfig."""
    parameters = inspect.signature(function_of(command)).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        names |= {field.name for field in dataclasses.fields(EvalConfig)} - {"engine"}
        names |= {field.name for field in dataclasses.fields(EngineOptions)}
    return names


@pytest.mark.parametrize("command", FUNCTIONS)
def test_cli_options_are_named_as_python_parameters(command):
    options = {param.name for param in dict(commands())[command].params} - {"help"}
    assert options - ONLY_CLI == python_parameters(command) - ONLY_PYTHON


def test_every_command_but_demo_has_a_python_function():
    assert {name for name, _ in commands()} == {*FUNCTIONS, "demo"}


@pytest.mark.parametrize("form", ["separate", "joined"])
@pytest.mark.parametrize(
    ("command", "old", "new"),
    [(command, *names) for command, table in RENAMED_OPTIONS.items() for names in table.items()],
)
def test_renamed_options_still_work_with_a_note(command, old, new, form, monkeypatch, capsys):
    calls = []

    def record(*arguments, **options):
        calls.append((arguments, {**options, "progress": None}))
        raise FarspanError("recorded")

    module = {"eval": "evaluate", "generate": "generate", "reproduce": "reproduce"}
    functions = {"eval": "evaluate", "generate": "generate"}
    target = f"{module.get(command, 'lab')}.{functions.get(command, 'summarize')}"
    monkeypatch.setattr(f"farspan.workflows.{target}", record)
    required = {
        "eval": "nope-twin -o out",
        "generate": "nope-twin --prompt hi",
        "reproduce": "extend-small",
        "lab run": "lab-tiny",
    }
    value = {"--vs": "rope-twin", "--require": "ppl@512<=20", "--so-far": ""}.get(old, "3")
    separator = "=" if form == "joined" and value else " "
    for option in (old, new):
        arguments = f"{command} {required[command]} {option}{separator}{value}".split()
        assert run_main(monkeypatch, *arguments) == 2
    assert len(calls) == 2
    assert calls[0] == calls[1]
    error = "error recorded\n"
    notes = f"note {old} is now {new}; the old name works until 0.3\n"
    assert capsys.readouterr().err == notes + error + error


def test_old_names_are_not_in_the_help():
    for command, table in RENAMED_OPTIONS.items():
        text = help_text(command)
        assert all(new in text for new in table.values())
        assert not any(re.search(rf"{old}\b", text) for old in table)


def test_values_and_positional_arguments_are_not_renamed(monkeypatch, capsys):
    prompts = []
    monkeypatch.setattr(
        "farspan.workflows.generate.generate",
        lambda model, prompt, **options: prompts.append((model, prompt)) or [],
    )
    run_main(monkeypatch, "generate", "nope-twin", "--prompt", "--tokens")
    run_main(monkeypatch, "generate", "--prompt", "x", "--", "--tokens")
    assert prompts == [("nope-twin", "--tokens"), ("--tokens", "x")]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("eval", [*SUITES, *MODES, *METRICS]),
        ("extend", [*METHODS, "auto"]),
        ("export", [*FORMATS, *DTYPES]),
        ("pretrain", recipe_names("pretrain")),
        ("reproduce", recipe_names("study")),
        ("lab run", recipe_names("lab")),
        ("lab dump", TASKS),
        ("lab finetune", TASKS),
        ("lab distance", [*TASKS, *MINIMA]),
    ],
)
def test_help_lists_every_choice(command, choices):
    words = set(re.findall(r"[\w-]+", help_text(command)))
    assert set(choices) <= words


def test_completion_knows_every_name():
    assert set(choices.METHODS) == {*METHODS, "auto"}
    assert set(choices.PRESETS) == set(EXTEND_PRESETS) == set(EVAL_PRESETS)
    assert set(choices.SUITES) == set(SUITES)
    assert set(choices.FORMATS) == set(FORMATS)
    assert set(choices.DTYPES) == set(DTYPES)
    assert set(choices.POSITIONS) == {*PER_LAYER, *MODEL_WIDE}
    assert set(choices.BUNDLED) == {path.name for path in BUNDLED_MODELS.iterdir()}


def test_completion_completes_names_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nope-1k").mkdir()
    (tmp_path / "notes.txt").touch()
    assert choices.complete_model("no") == ["nope-twin", "nope-1k"]
    assert choices.complete_model(f"{tmp_path}/nope") == [f"{tmp_path}/nope-1k"]
    assert choices.complete_method("yarn+heads") == ["yarn+headscale"]
    after_yarn = choices.complete_method("yarn+")
    assert {"yarn+uniform", "yarn+headlog", "yarn+continue"} <= set(after_yarn)
    assert not {"yarn+yarn", "yarn+pi", "yarn+swan", "yarn+auto"} & set(after_yarn)
    assert choices.complete(choices.SUITES)("pa") == ["paper", "passkey"]


def test_completion_knows_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swan-mine.toml").touch()
    assert choices.complete_recipe("pretrain")("twin") == ["twin-nope", "twin-rope"]
    assert choices.complete_recipe("study")("swan") == ["swan", "swan-mine.toml"]
    assert choices.complete_recipe("lab")("lab-g") == ["lab-grid"]
    by_name = dict(commands())
    for name in ("pretrain", "reproduce", "lab run"):
        (recipe,) = (each for each in by_name[name].params if each.name in ("recipe", "study"))
        assert recipe._custom_shell_complete is not None, name


def test_help_lists_position_encodings():
    assert set(choices.POSITIONS) <= set(re.findall(r"[\w-]+", help_text("eval")))


def test_the_help_of_every_command_has_examples_that_parse():
    by_name = dict(commands())
    assert set(choices.EXAMPLES) == set(by_name)
    for name, examples in choices.EXAMPLES.items():
        text = help_text(name)
        for example in examples:
            assert example in text
            words = name.split()
            program, *arguments = shlex.split(example)
            assert (program, arguments[: len(words)]) == ("farspan", words)
            arguments = arguments[len(words) :]
            by_name[name].make_context(name, arguments)


def test_the_list_of_commands_has_a_line_of_text_for_each():
    """A line that ends in the docstring would end on the screen, too."""
    for name, command in commands():
        assert "\n" not in command.help.partition("\n\n")[0], name


def test_help_imports_nothing_heavy():
    script = (
        "import sys, typer\n"
        "from farspan import cli\n"
        "typer.main.get_command(cli.app).main(['--help'], standalone_mode=False)\n"
        "print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "inspect" in process.stdout
    assert process.stdout.splitlines()[-1] == "set()"


def test_module_can_be_run():
    process = subprocess.run(
        [sys.executable, "-m", "farspan", "--version"], capture_output=True, text=True
    )
    assert process.stdout.startswith("farspan 0.")


def test_system_error_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cli, "app", lambda: (tmp_path / "file" / "below").mkdir())
    assert run_main(monkeypatch) == 2
    message = capsys.readouterr().err
    assert "below cannot be used (Not a directory); check the path, or choose another" in message


def test_data_with_an_equals_sign_can_be_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=b.txt").write_text("text")
    assert parse_data(["a=b.txt"]) == "a=b.txt"
    assert parse_data(["a=c.txt"]) == {"a": "c.txt"}
    with pytest.raises(FarspanError, match=r"--data =c.txt has no name; write it as NAME=PATH"):
        parse_data(["=c.txt"])


@pytest.fixture
def set_width(monkeypatch):
    """Sets the width of the terminal."""

    def set_width(width: int) -> None:
        monkeypatch.setattr(console, "_width", width)

    return set_width


SAME_CACHE = {key: {"at_target": 4096, "per_token": 4} for key in ("before", "after")}


@pytest.mark.parametrize(
    ("base", "line"),
    [
        (torch.full((2, 4), 1.11), "λ̂ 1.11 at any length, 8 heads in 2 layers"),
        (
            torch.tensor([[1.0, 1.2], [1.4, 1.6]]),
            "λ̂ 1.00 to 1.60, mean 1.30 at any length, 4 heads in 2 layers",
        ),
    ],
)
def test_uniform_scale_is_shown_as_one_number(capsys, base, line):
    patch = Patch("test", "", 1024, 512, Scales((0, 1), base))
    show_extension(
        ExtendResult(
            patch, Path("p"), {"loss@512": 3.0}, {"loss@512": 2.9}, {}, SAME_CACHE, 0.0, 1.0, ()
        )
    )
    assert line in capsys.readouterr().out


def make_diagnosis(label: str, **fields) -> SimpleNamespace:
    values = dict(
        label=label,
        train_length=512,
        curves=SimpleNamespace(loss_at=lambda length, train_length: 9.771),
        loss_knee=742,
        entropy_knee=10976,
        distracted_heads=[(0, 1)],
        heads=48,
        suggested_scale=2.67,
        verdict="Loss leaves its trend.",
    )
    return SimpleNamespace(**(values | fields))


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.0K"), (999_949, "999.9K"), (999_950, "1.0M"), (2.5e9, "2.5B")],
)
def test_counts_have_at_most_three_digits_before_the_point(count, text):
    assert format_count(count) == text


def test_diagnosis_keeps_names_and_numbers_whole_on_80_columns(set_width, capsys):
    set_width(80)
    diagnosis = make_diagnosis("runs/[small]/model λ̂=1.15")
    show_diagnoses([diagnosis], [256, 512, 1024, 2048, 4096, 8192])
    output = capsys.readouterr().out
    assert "…" not in output
    assert "model " in output.splitlines()[1], "names have room"
    assert output.count("9.771") == 6
    rows = output.split("Loss leaves")[0].splitlines()[2:]
    assert "".join(row.split(" 9.771")[0].strip() for row in rows).startswith("runs/[small]/model")


def test_diagnosis_of_many_lengths_keeps_names_and_the_longest_length(set_width, capsys):
    set_width(80)
    show_diagnoses([make_diagnosis("a-model-of-mine")], [8 * 2**power for power in range(10)])
    output = capsys.readouterr().out
    assert "a-model-of" in output
    assert "@4096" in output
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_missing_scale_suggestion_is_a_dash(capsys):
    show_diagnoses([make_diagnosis("rope-twin", suggested_scale=None)], [1024])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("rope-twin"))
    assert row.split()[-1] == "–"


def test_evaluation_with_a_huge_interval_keeps_names(set_width, capsys):
    set_width(80)
    score = Score("perplexity", "ppl", 1024, 25_145.2, 1.0, 3.4e32, 512, {"task": "proofpile"})
    show_evaluation(EvalResult("nope-twin", "perplexity", (score,), Path("out")))
    output = capsys.readouterr().out
    assert "ppl proofpile" in output
    assert "25,145" in output
    assert "1.00–3.4e+32" in output


@pytest.mark.parametrize("width", [100, 80, 60])
def test_narrow_terminal_drops_columns_and_keeps_names(set_width, capsys, width):
    set_width(width)
    scores, baseline_scores = (
        tuple(
            Score(
                "perplexity",
                "ppl",
                length,
                value,
                20.0,
                24.5,
                512,
                {"task": "proofpile-validation"},
            )
            for length in (512, 1024)
        )
        for value in (22.1, 30.1)
    )
    show_evaluation(
        EvalResult(
            "a",
            "perplexity",
            scores,
            Path("out"),
            baseline="b",
            baseline_scores=baseline_scores,
        )
    )
    output = capsys.readouterr().out
    assert "…" not in output
    assert "proofpile-validation" in output
    assert output.count("22.10") == output.count("30.10") == output.count("0.734") == 2
    assert ("skipped" in output) == (width == 100)
    assert "95% CI" in output


def test_compared_models_keep_brackets_in_their_names(set_width, capsys):
    set_width(120)
    ablation, mass = np.zeros((1, 2)), np.zeros((1, 2, 4))
    distance = Distance(np.zeros((1, 1, 2, 2)), np.ones(1))
    comparison = SimpleNamespace(
        models=["runs/[small]", "nope-twin"],
        tokens=8,
        pairs={(0, 1): distance},
        mass=[mass, mass],
        ablations=[ablation, ablation],
    )
    show_comparison(comparison, as_json=False)
    assert "runs/[small] · nope-twin" in capsys.readouterr().out


def test_progress_keeps_brackets_in_labels(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with bars() as progress:
        progress("br[/x]", 2)(1, "m[red]y")
    assert "br[/x]" in capsys.readouterr().err


def test_file_sizes_have_a_fitting_unit():
    assert format_file_size(23_700_000) == "23.7 MB"
    assert format_file_size(6_400) == "6.4 KB"
