"""Tasks and encodings of a recipe's own: they run like built-in ones, or are refused in a sentence.

The examples are those of docs/lab.md.
"""

from __future__ import annotations

import colorsys
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import farspan
from farspan import cli
from farspan.cells import cell_key
from farspan.custom_code import import_code, imported, source_hash
from farspan.errors import CorruptError, FarspanError
from farspan.lab import custom_tasks
from farspan.lab import study as lab_study
from farspan.lab.custom_tasks import CustomTask, SplitTask, load_custom_task
from farspan.lab.examples import draw_examples
from farspan.lab.fleet import Fleet, Rows
from farspan.lab.networks import network_config
from farspan.lab.released import read_examples
from farspan.lab.study import (
    LabStudy,
    describe_cell,
    list_cells,
    make_task_data,
)
from farspan.lab.study_fleets import group_fleets
from farspan.lab.tasks import TASKS
from farspan.lab.tokenizer import WordTokenizer
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.encodings import BUILT_IN
from farspan.workflows import lab as lab_workflow
from farspan.workflows import lab_training
from farspan.workflows.eval_models import model_identity
from farspan.workflows.lab import dump, read_study, run, summarize
from farspan.workflows.lab_estimate import estimate

DOCS = (Path(__file__).parent.parent / "docs" / "lab.md").read_text()
TRUST = {"trust_remote_code": True}
SMALL = """
tasks = {tasks}
encodings = {encodings}
seeds = [0]
lrs = [1e-2]
train_examples = 64
test_examples = 20
save = true
{more}
[sizes.mini]
layers = 1
width = 16
heads = 2
ff = 32
[train]
steps = 3
batch = 8
buckets = 2
"""
EVEN = """
def make(length, rng):
    bits = rng.integers(2, size=length)
    return "How many of " + " ".join(map(str, bits)), f"{bits.sum() % 10}"
"""
FUNCTION = """
[custom_tasks.mine]
file = "mine.py:make"
train_lengths = "4:8"
test_lengths = "11:12"
words = ["How", "many"]
"""
LINES = """
[custom_tasks.mine]
file = "mine.jsonl"
train_lengths = "2:4"
test_lengths = "5:6"
"""


def docs_block(section: str, language: str, number: int = 0) -> str:
    """A fenced block of a section of docs/lab.md."""
    text = re.search(rf"## {section}\n(.*?)(\n## |$)", DOCS, re.DOTALL).group(1)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[number]


def write_recipe(folder: Path, more: str, tasks=("mine",), encodings=("none",)) -> str:
    lists = {"tasks": json.dumps(tasks), "encodings": json.dumps(encodings)}
    (folder / "my.toml").write_text(SMALL.format(**lists, more=more))
    return str(folder / "my.toml")


def write_lines(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parity_rows(limit: int = 60) -> list[dict]:
    """Lists of digits 0 to 2, and whether their sum is odd. No built-in task has these words."""
    return [
        {
            "input": f"flip {' '.join(map(str, digits))}",
            "target": "odd" if sum(digits) % 2 else "even",
            "length": length,
        }
        for length in range(2, 7)
        for digits in itertools.islice(itertools.product(range(3), repeat=length), limit)
    ]


@pytest.fixture
def command(monkeypatch, capfd) -> Callable[..., tuple[int, str]]:
    """Runs `farspan …`: exit code and output."""

    def run_command(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["farspan", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capfd.readouterr()
        code = caught.value.code or 0
        return code, output.out if code == 0 else " ".join(output.err.split())

    return run_command


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(lab_workflow.style, "save", lambda figure, stem: None)


# The examples of the docs.


@pytest.mark.long
def test_the_task_and_the_encoding_of_the_docs_run(tmp_path):
    """A task from a function, one from JSON Lines and an encoding of 30 lines, in one study."""
    (tmp_path / "mine.py").write_text(docs_block("Your own task", "python"))
    write_lines(tmp_path / "flips.jsonl", parity_rows())
    code = docs_block("Your own encoding", "python")
    assert len(code.strip().splitlines()) <= 30
    (tmp_path / "recent.py").write_text(code)
    own_task, own_encoding = (
        docs_block(f"Your own {kind}", "toml") for kind in ("task", "encoding")
    )
    tables = (
        own_task[own_task.index("[custom_tasks") :]
        + (own_encoding[own_encoding.index("[custom_encodings") :])
    )
    recipe = write_recipe(
        tmp_path, tables, ("brackets", "flips", "copy"), ("none", "alibi", "recent")
    )
    messages: list[str] = []
    result = run(recipe, [], tmp_path / "out", **TRUST, say=messages.append)
    assert len(messages) == 9
    assert {entry.task for entry in result.entries} == {"brackets", "flips", "copy"}
    header, rows = result.tables["Exact match at unseen lengths"]
    assert header == ["task", "none", "alibi", "recent"]
    assert len(rows) == 3
    run(recipe, [], tmp_path / "out", **TRUST, say=messages.append)
    assert len(messages) == 9, "all cells were finished"
    again = summarize(str(tmp_path / "out" / "recipe.toml"), [], tmp_path / "out", **TRUST)
    assert len(again.entries) == 9, "the written recipe names the same files"


def test_jsonl_example_of_the_docs_is_read(tmp_path):
    (tmp_path / "flips.jsonl").write_text(docs_block("Your own task", "json"))
    examples = read_examples(tmp_path / "flips.jsonl")
    assert len(examples) >= 2
    assert all(example.length >= 1 for example in examples)


# Tasks.


def test_jsonl_task_trains_saves_and_resumes_by_content(tmp_path):
    rows = parity_rows()
    write_lines(tmp_path / "mine.jsonl", rows)
    recipe, messages = write_recipe(tmp_path, LINES), []
    result = run(recipe, [], tmp_path / "out", say=messages.append)
    assert len(messages) == 1
    counts = result.entries[0].results[0]
    assert set(counts["in_range"]) <= {"2", "3", "4"}
    assert set(counts["beyond"]) == {"5", "6"}
    (folder,) = (tmp_path / "out" / "models").iterdir()
    tokenizer = farspan.load(folder).tokenizer
    assert tokenizer.decode(tokenizer("flip 0 odd")["input_ids"]) == "flip 0 odd"
    write_lines(tmp_path / "mine.jsonl", rows)
    run(recipe, [], tmp_path / "out", say=messages.append)
    assert len(messages) == 1, "the same content is the same cell"
    write_lines(tmp_path / "mine.jsonl", [*rows, {**rows[-1], "input": "flip flip"}])
    run(recipe, [], tmp_path / "out", say=messages.append)
    assert len(messages) == 2, "another file is another cell"


def test_examples_of_a_file_are_those_of_the_file(tmp_path):
    rows = parity_rows()
    write_lines(tmp_path / "mine.jsonl", rows)
    study = read_study(write_recipe(tmp_path, LINES))
    data, tokenizer = make_task_data(study, "mine", "none"), study.tokenizer
    texts = {(row["input"], row["target"]): row["length"] for row in rows}
    for examples in (data.train, data.held_out, data.beyond):
        for ids, start, stop in zip(examples.ids, examples.start, examples.stop, strict=True):
            pair = (
                tokenizer.decode(ids[1 : start - 1].tolist()),
                tokenizer.decode(ids[start : stop - 1].tolist()),
            )
            assert pair in texts
    assert {2, 3, 4} >= set(data.held_out_lengths)
    assert {5, 6} == set(data.beyond_lengths)


def test_function_task_counts_its_distinct_examples(tmp_path):
    (tmp_path / "mine.py").write_text(EVEN)
    study = read_study(write_recipe(tmp_path, FUNCTION), **TRUST)
    task = study.task("mine")
    assert [task.count(length) for length in (1, 4, 8)] == [2, 16, 256]
    assert task.count(12) == np.inf
    drawn = draw_examples(task, (4, 4), 100, seed=0)
    assert len({example.input for example in drawn}) == len(drawn) == 16
    assert drawn == draw_examples(task, (4, 4), 100, seed=0)
    assert study.tokenizer.vocabulary[-2:] == ("How", "many")
    assert study.tokenizer.vocabulary[:-2] == WordTokenizer().vocabulary


def test_keys_of_cells_depend_on_the_function_and_its_words(tmp_path):
    (tmp_path / "mine.py").write_text(EVEN + EVEN.replace("make", "other"))
    keys = set()
    for more in (
        FUNCTION,
        FUNCTION.replace(":make", ":other"),
        FUNCTION.replace('"many"]', '"many", "more"]'),
        FUNCTION.replace("4:8", "4:7"),
    ):
        study = read_study(write_recipe(tmp_path, more), **TRUST)
        keys |= {cell_key(describe_cell(study, cell)) for cell in list_cells(study)}
    assert len(keys) == 4


def test_function_may_have_no_example_of_a_length(tmp_path):
    code = EVEN.replace("bits =", "if length % 2: return None\n    bits =")
    (tmp_path / "mine.py").write_text(code)
    task = read_study(write_recipe(tmp_path, FUNCTION), **TRUST).task("mine")
    assert [task.count(length) for length in (4, 5)] == [16, 0]
    assert {example.length for example in draw_examples(task, (4, 8), 50, 0)} == {4, 6, 8}
    with pytest.raises(FarspanError, match="mine.py:make has no example of 5 units"):
        task.make(5, np.random.default_rng(0))


def test_code_runs_only_when_it_is_trusted(tmp_path, command):
    marker = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n" + EVEN
    (tmp_path / "mine.py").write_text(code)
    recipe = write_recipe(tmp_path, FUNCTION)
    options = ["lab", "run", recipe, "-o", str(tmp_path / "out"), "--json"]
    code_without, message = command(*options)
    assert code_without == 2
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    assert "custom_tasks.mine.file runs Python code" in message
    assert "if you trust it, add --trust-remote-code" in message
    code_with, output = command(*options, "--trust-remote-code")
    assert code_with == 0, output
    assert json.loads(output)["models"] == 1
    assert marker.exists()
    with pytest.raises(FarspanError, match="add --trust-remote-code"):
        read_study(recipe)


def test_files_of_a_base_are_found_beside_it(tmp_path):
    """Also if the recipe that inherits from it lies in another folder, and changes them."""
    for name in ("base", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"{EVEN}\n# {name}\n")
    base = Path(write_recipe(tmp_path / "base", FUNCTION))
    (tmp_path / "other" / "my.toml").write_text('base = "../base/my.toml"\nseeds = [1]')
    recipe = str(tmp_path / "other" / "my.toml")
    files = [
        read_study(recipe, overrides, **TRUST).custom_tasks["mine"].file
        for overrides in ([], ["custom_tasks.mine.file=mine.py:make"])
    ]
    assert files == [f"{base.parent}/mine.py:make", f"{tmp_path}/other/mine.py:make"]


@pytest.mark.long
def test_worker_processes_load_the_same_code(tmp_path):
    (tmp_path / "mine.py").write_text(EVEN)
    (tmp_path / "recent.py").write_text(docs_block("Your own encoding", "python"))
    more = FUNCTION + '[custom_encodings]\nrecent = "recent.py:Recent"\n'
    recipe, messages = write_recipe(tmp_path, more, ("mine",), ("recent",)), []
    run(recipe, ["seeds=[0, 1]", "processes=2"], tmp_path / "out", **TRUST, say=messages.append)
    assert len(messages) == 2


def test_dump_and_distance_read_a_task_of_a_recipe(tmp_path, command):
    write_lines(tmp_path / "mine.jsonl", parity_rows())
    recipe = write_recipe(tmp_path, LINES)
    _, output = command("lab", "dump", f"{recipe}:mine", "--n", "4")
    lines = [json.loads(line) for line in output.splitlines()]
    assert len(lines) == 4
    assert all(line["input"].startswith("flip ") for line in lines)
    run(recipe, ["seeds=[0, 1]"], tmp_path / "out")
    models = [str(folder) for folder in sorted((tmp_path / "out" / "models").iterdir())]
    code, output = command("lab", "distance", *models, "--task", f"{recipe}:mine", "--json")
    assert code == 0, output
    assert json.loads(output)["distances"][0]["nearest"]
    code, message = command("lab", "distance", *models, "--task", "copy")
    assert code == 2
    assert "has a vocabulary of" in message


ROW = {"input": "a b", "target": "b a", "length": 2}
BAD_FILES = {
    "line 1 has no 'length'; write input and target": [{"input": "a", "target": "b"}],
    "line 1 has no 'input'": [{"target": "b", "length": 1}],
    "line 2 has the length '2'; write an integer": [ROW, {**ROW, "length": "2"}],
    "line 1 has the length True; write an integer": [{**ROW, "length": True}],
    "line 1 has the length 0; write an integer above 0": [{**ROW, "length": 0}],
    "line 1 has the target 7; write text": [{**ROW, "target": 7}],
    "line 1 has the input ' '; write text": [{**ROW, "input": " "}],
    "line 2 has the input of an earlier line and another target": [ROW, {**ROW, "target": "c"}],
    r"line 2 has the target 'a \\ud800' with half of a surrogate pair, which is no character": [
        ROW,
        {**ROW, "input": "b", "target": "a \ud800"},
    ],
    "has no examples; write one JSON object a line": [],
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_bad_lines_are_refused_in_a_sentence(tmp_path, message):
    write_lines(tmp_path / "mine.jsonl", BAD_FILES[message])
    with pytest.raises(CorruptError, match=message):
        read_study(write_recipe(tmp_path, LINES))


def test_line_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"input": ')
    with pytest.raises(CorruptError, match="mine.jsonl, line 1 is not JSON"):
        read_study(write_recipe(tmp_path, LINES))


BAD_TASKS = {
    "mine.jsonl has the word '<end>', which marks": (LINES, {"target": "<end>"}),
    "custom_tasks.mine.train_lengths is missing; write": (
        LINES.replace('train_lengths = "2:4"', ""),
        {},
    ),
    "'4:2' is not a range of lengths": (LINES.replace("2:4", "4:2"), {}),
    "mine has no example of 50 to 60 units": (LINES.replace("5:6", "50:60"), {}),
    "which leads out of": (LINES.replace("mine.jsonl", "../mine.jsonl"), {}),
    "other.jsonl does not exist; correct the path": (LINES.replace("mine", "other"), {}),
    "name a .jsonl file, a folder": (LINES.replace("mine.jsonl", "my.toml"), {}),
    "words are for a function; remove them": (LINES + 'words = ["a"]', {}),
    "length_unit is empty": (LINES + 'length_unit = ""', {}),
    "custom_tasks.copy has the name of a built-in task": (
        LINES + LINES.replace(".mine", ".copy"),
        {},
    ),
    "write it with letters, digits, - and _": (LINES + LINES.replace(".mine", '."../x"'), {}),
    "custom_tasks.mine.file is missing": ("[custom_tasks.mine]\n", {}),
    "a recipe has no key custom_tasks.mine.fil": (LINES + "fil = 1", {}),
    "mine has no scratchpad": (LINES, {}, ["scratchpads=['full']"]),
}


@pytest.mark.parametrize("message", BAD_TASKS)
def test_bad_tasks_are_refused_before_training(tmp_path, message):
    more, change, *overrides = BAD_TASKS[message]
    write_lines(tmp_path / "mine.jsonl", [{**row, **change} for row in parity_rows()])
    recipe = write_recipe(tmp_path, more, ("other",) if "other" in more else ("mine",))
    with pytest.raises(FarspanError, match=message.removeprefix("mine.jsonl ")) as caught:
        run(recipe, overrides[0] if overrides else [], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(caught.value)


def test_too_few_examples_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_training, "train_fleet", None)
    recipe = write_recipe(tmp_path, LINES, ("copy", "mine"))
    write_lines(tmp_path / "mine.jsonl", parity_rows(limit=4))
    with pytest.raises(FarspanError, match="mine has too few examples of 2 to 4 units to hold"):
        run(recipe, [], tmp_path / "out")
    with pytest.raises(FarspanError, match="mine has too few examples"):
        estimate(read_study(recipe))
    rows = [row for row in parity_rows() if row["length"] in (4, 5)]
    write_lines(tmp_path / "mine.jsonl", rows)
    with pytest.raises(FarspanError, match="do not fill 64 buckets; add examples"):
        run(recipe, ["train.buckets=64", "train.batch=64"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


BAD_FUNCTIONS = {
    "but its file defines no make": "def other(length, rng): pass",
    "which is no function; name a function": "make = 5",
    r"cannot be imported \(SyntaxError": "def make(",
    r"cannot be imported \(ModuleNotFoundError: No module named 'absent_module'": (
        "import absent_module"
    ),
    r"failed at length 4 \(ZeroDivisionError: .*; fix the function": (
        "def make(length, rng): return 1 / 0"
    ),
    r"failed at length 4 \(SystemExit: bye\); fix the function": (
        "def make(length, rng): raise SystemExit('bye')"
    ),
    r"failed at length 4 \(TypeError": "def make(length): return 'a', 'b'",
    r"returned 'a b' \(str\) at length 4; return the input and the target": (
        "def make(length, rng): return 'a b'"
    ),
    r"returned .* \(tuple\) at length 4": "def make(length, rng): return 'a', 3",
    r"returned .* \(list\) at length 4": "def make(length, rng): return ['a', 'b']",
    r"returned .* \(tuple\) at length 4; return": "def make(length, rng): return '', 'b'",
    "mine has no example of 4 to 8 units": "def make(length, rng): return None",
    "wrote '27', which is not in the vocabulary; add it to custom_tasks.mine.words": (
        "def make(length, rng): return ' '.join(map(str, rng.integers(2, size=length))), '27'"
    ),
    "wrote '<end>', which is not in the vocabulary": (
        "def make(length, rng): return ' '.join(map(str, rng.integers(2, size=length))), '<end>'"
    ),
    "mine has too few examples of 4 to 8 units to hold": (
        "def make(length, rng): return ' '.join('1' * length), '2'"
    ),
    r"mine has only 1\d distinct examples of 4 units, and 1\d are needed; draw fewer": (
        "def make(length, rng): return ' '.join(map(str, rng.integers(2, size=4))), '1'"
    ),
    "gave two examples of length 4 for equal generators; take all randomness": (
        "import random\ndef make(length, rng):\n"
        "    return ' '.join(random.choices('0123', k=length)), '1'"
    ),
    "gave two examples of length 4 for equal generators; .* keep nothing between calls": (
        "calls = []\ndef make(length, rng):\n    calls.append(length)\n"
        "    return ' '.join(map(str, rng.integers(2, size=length))), str(len(calls) % 10)"
    ),
    r"gave the input '. . . .' two targets at length 4; let the input decide the target": (
        "def make(length, rng):\n    bits = rng.integers(2, size=length + 1)\n"
        "    return ' '.join(map(str, bits[1:])), str(bits[0])"
    ),
    "which is empty; write the code there": "",
}


@pytest.mark.parametrize("message", BAD_FUNCTIONS)
def test_bad_functions_are_refused_before_training(tmp_path, message):
    (tmp_path / "mine.py").write_text(BAD_FUNCTIONS[message])
    with pytest.raises(FarspanError, match=message) as caught:
        run(write_recipe(tmp_path, FUNCTION), [], tmp_path / "out", **TRUST)
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["mine.py", "mine.py:", "a b:make", ":make", "mine.py:1x"])
def test_references_that_name_no_code_are_refused(tmp_path, reference):
    (tmp_path / "mine.py").write_text(EVEN)
    with pytest.raises(FarspanError, match="names no Python code|name a .jsonl|does not exist"):
        read_study(write_recipe(tmp_path, FUNCTION.replace("mine.py:make", reference)), **TRUST)


def test_draws_end_when_a_function_repeats_itself(tmp_path):
    """More than a thousand examples count as unlimited; the draw finds out that they are not."""
    (tmp_path / "mine.py").write_text(
        "def make(length, rng):\n    return ' '.join(str(rng.integers(1200))), '1'\n"
    )
    task = read_study(write_recipe(tmp_path, FUNCTION), **TRUST).task("mine")
    assert task.count(4) == np.inf
    with pytest.raises(FarspanError, match="mine has only 1,200 distinct examples of 4 units, and"):
        draw_examples(task, (4, 4), 1500, seed=0)


@pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (200, 200), (1_100, np.inf)])
def test_examples_are_counted_up_to_a_thousand(size, count):
    """The draws end, soon after the last new example or where they are too many to count."""
    calls = itertools.count()

    def make(length, rng):
        assert next(calls) < 10_000
        return (str(rng.integers(size)), "1") if size else None

    assert custom_tasks._count_distinct("mine", make, "mine.py:make", 4) == count


def test_token_ids_must_fit_their_type(tmp_path, monkeypatch):
    assert np.iinfo(np.int16).max == lab_study.MAX_WORDS - 1
    monkeypatch.setattr(lab_study, "MAX_WORDS", 700)
    rows = [{**row, "target": f"word{number}"} for number, row in enumerate(parity_rows())]
    write_lines(tmp_path / "mine.jsonl", rows)
    with pytest.raises(FarspanError, match=r"the tasks have \d+ different words; use at most 700"):
        read_study(write_recipe(tmp_path, LINES))
    monkeypatch.undo()
    words = len(read_study(write_recipe(tmp_path, LINES)).tokenizer)
    monkeypatch.setattr(lab_study, "MAX_WORDS", words)
    assert len(read_study(write_recipe(tmp_path, LINES)).tokenizer) == words, "no more than allowed"


# Released files.


RELEASED = {
    "scan": (
        {"source": "walk after turn right", "target": "I_TURN_RIGHT I_WALK", "category": 2},
        ("walk after turn right", "I_TURN_RIGHT I_WALK", 2),
    ),
    "copy": (
        {"repeat": 3, "src_seq": "x y x", "tgt_seq": "x y x", "cat": 3},
        ("x y x", "x y x", 3),
    ),
    "replace": (
        {"source_char": "6", "target_char": ">", "src_seq": "6 6", "tgt_seq": "> >", "cat": 2},
        ("Replace 6 with > in 6 6", "> >", 2),
    ),
    "addition": (
        {"a": 53, "b": 7, "sum": 60, "cat": "2-by-1"},
        ("Compute 5 3 + 7 ?", "The answer is 6 0 .", 2),
    ),
    "polynomial": (
        {"coeffs": [-2, 3], "degrees": [3, 0], "x": -2, "answer": 19, "cat": 2},
        ("Evaluate x = - 2 in ( - 2 x ** 3 + 3 x ** 0 ) % 10 ?", "The answer is 9 .", 2),
    ),
    "summation": (
        {"values": [8, 1, 4], "answer": 13, "cat": 3},
        ("Compute ( 8 + 1 + 4 ) % 10 ?", "The answer is 3 .", 3),
    ),
    "parity": (
        {"values": [0, 1, 1], "answer": 0, "cat": "3"},
        ("Is the number of ones even in 0 1 1 ?", "The answer is yes .", 3),
    ),
    "sorting": (
        {"token_ids": [2, 0], "src_seq": ["M", "E"], "tgt_seq": ["E", "M"], "cat": 2},
        ("Sort M E ?", "The answer is E M .", 2),
    ),
    "sorting-numbers": (
        {"src_seq": [120, 53], "tgt_seq": [53, 120], "cat": 2},
        ("Sort 1 2 0 , 5 3 ?", "The answer is 5 3 , 1 2 0 .", 2),
    ),
    "lego": (
        {
            "clauses": ["c = + q", "q = -1"],
            "truth_values": [["q", "0"], ["c", "0"]],
            "query": "c",
            "cat": [2, 2],
        },
        ("If c = + q , q = - 1 . Then , what is the value of c ?", "The answer is - 1 .", 2),
    ),
}


@pytest.mark.parametrize("form", RELEASED)
def test_released_forms_become_questions_of_the_tasks(tmp_path, form):
    row, (text, target, length) = RELEASED[form]
    write_lines(tmp_path / "train.jsonl", [row])
    (example,) = read_examples(tmp_path / "train.jsonl")
    assert (example.input, example.target, example.length) == (text, target, length)
    if form in TASKS and form not in ("scan", "copy", "sorting"):
        assert set(f"{text} {target}".split()) <= set(TASKS[form].vocabulary)


def test_sums_of_ones_are_no_parity(tmp_path):
    """Both tasks have the same fields; one number above 1 in the file tells them apart."""
    rows = [{"values": [1, 1], "answer": 2, "cat": 2}, {"values": [9], "answer": 9, "cat": 1}]
    write_lines(tmp_path / "train.jsonl", rows)
    first, _ = read_examples(tmp_path / "train.jsonl")
    assert (first.input, first.target) == ("Compute ( 1 + 1 ) % 10 ?", "The answer is 2 .")


def test_released_row_of_other_types_is_refused(tmp_path):
    write_lines(tmp_path / "train.jsonl", [{"a": "five", "b": 1, "sum": 6, "cat": "1-by-1"}])
    with pytest.raises(CorruptError, match=r"line 1 has the fields a, b, sum, cat with values of"):
        read_examples(tmp_path / "train.jsonl")


def test_folder_of_splits_is_used_as_it_is(tmp_path):
    folder = tmp_path / "scan"
    folder.mkdir()
    rows = [
        {"source": f"walk {'twice ' * n}{word}", "target": "I_WALK " * n, "category": n}
        for n in range(1, 9)
        for word in ("left", "right", "jump", "run")
    ]
    write_lines(folder / "train.jsonl", [row for row in rows if row["category"] <= 5][::2])
    write_lines(folder / "validation.jsonl", [row for row in rows if row["category"] <= 5][:9])
    with pytest.raises(FarspanError, match=r"test.jsonl is missing; add it"):
        load_custom_task("mine", CustomTask(str(folder)))
    write_lines(folder / "test.jsonl", [row for row in rows if row["category"] > 5])
    recipe = write_recipe(tmp_path, '[custom_tasks.mine]\nfile = "scan"')
    study = read_study(recipe)
    task = study.task("mine")
    assert isinstance(task, SplitTask)
    assert study.ranges("mine") == ((1, 5), (6, 8))
    splits = task.take((1, 5), (6, 8), 100, 100, seed=0)
    assert [len(split) for split in splits] == [10, 4, 12], "what is in train is not held out"
    few = [task.take((1, 5), (6, 8), 5, 4, seed).beyond for seed in range(8)]
    assert all(len({example.length for example in beyond}) > 1 for beyond in few), (
        "files are sorted"
    )
    assert len({tuple(beyond) for beyond in few}) == 8
    assert few[0] == task.take((1, 5), (6, 8), 5, 4, seed=0).beyond
    shorter = task.take((2, 3), (7, 7), 3, 2, seed=0)
    assert [len(split) for split in shorter] == [3, 2, 2]
    assert {example.length for example in shorter.train} == {2, 3}
    result = run(recipe, [], tmp_path / "out").entries[0].results[0]
    assert sum(total for _, total in result["beyond"].values()) == 12


@pytest.mark.parametrize("folder", [True, False])
def test_lengths_are_as_frequent_as_in_the_files(tmp_path, folder):
    def rows(word: str, counts: dict[int, int]) -> list[dict]:
        return [
            {"input": " ".join([f"{word}{number}"] * length), "target": "a", "length": length}
            for length, count in counts.items()
            for number in range(count)
        ]

    files = {
        "train": rows("a", {1: 10, 2: 100, 3: 1000}),
        "validation": rows("b", {1: 1, 2: 10, 3: 100}),
        "test": rows("a", {4: 20, 5: 60}),
    }
    if folder:
        (tmp_path / "mine").mkdir()
        for name, lines in files.items():
            write_lines(tmp_path / "mine" / f"{name}.jsonl", lines)
    write_lines(tmp_path / "mine.jsonl", files["train"] + files["test"])
    lengths = 'train_lengths = "1:3"\ntest_lengths = "4:5"'
    file = f'file = "mine{"" if folder else ".jsonl"}"'
    recipe = write_recipe(tmp_path, f"[custom_tasks.mine]\n{file}\n{lengths}")
    size = ["train_examples=2000", "test_examples=2000"]
    study, even = read_study(recipe, ["even_lengths=false", *size]), read_study(recipe, size)

    def counts(rows: Rows) -> dict[int, int]:  # by length: <begin>, words, <answer>
        lengths, totals = np.unique(rows.start - 2, return_counts=True)
        return dict(zip(lengths.tolist(), totals.tolist(), strict=True))

    data = make_task_data(study, "mine", "none")
    trained = {1: 10, 2: 100, 3: 1000} if folder else {1: 9, 2: 90, 3: 900}
    assert counts(data.train) == trained
    assert counts(data.held_out) == {1: 1, 2: 10, 3: 100}
    assert counts(data.beyond) == {4: 20, 5: 60}
    balanced = make_task_data(even, "mine", "none")
    assert len(set(counts(balanced.train).values())) == 1
    assert describe_cell(study, list_cells(study)[0]) != describe_cell(even, list_cells(even)[0])


# Encodings.

TURN = """
import torch
from farspan.model.encodings import Encoding

class Turn(Encoding):
    def rotate(self, q, k, q_positions, k_positions):
        return self.turn(q, q_positions), self.turn(k, k_positions)

    def turn(self, x, positions):
        angle = positions[:, None, :, None].to(x.dtype) * 0.3
        left, right = x.chunk(2, dim=-1)
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
"""


def own_encoding(folder: Path, code: str, name: str) -> str:
    (folder / "mine.py").write_text(code)
    return f'[custom_encodings]\nmine = "mine.py:{name}"\n'


def test_encoding_that_turns_queries_and_keys(tmp_path):
    """Scores depend on distances only; caches, fleets and saved models agree."""
    more = own_encoding(tmp_path, TURN, "Turn")
    recipe = write_recipe(tmp_path, more, ("copy",), ("mine",))
    study = read_study(recipe, **TRUST)
    config = network_config(
        study.sizes["mini"], "mine", WordTokenizer(), 8, 8, study.custom_encodings
    )
    models = [FarspanForCausalLM(config).double().eval() for _ in range(2)]
    for name, parameter in (item for model in models for item in model.named_parameters()):
        parameter.data *= 4 if "proj" in name else 1
    ids = torch.arange(5, 17)[None]
    whole = models[0](ids).logits
    shifted = models[0](ids, position_ids=torch.arange(12)[None] + 7, use_cache=False).logits
    assert (whole - shifted).abs().max() < 1e-9
    turned = models[0](ids, position_ids=torch.arange(12)[None] * 2, use_cache=False).logits
    assert (whole - turned).abs().max() > 1e-3
    cache = models[0](ids[:, :5]).past_key_values
    rest = models[0](ids[:, 5:], past_key_values=cache).logits
    assert (rest - whole[:, 5:]).abs().max() < 1e-9
    kept = models[0].model(ids, positions_to_keep=2, use_cache=False).last_hidden_state
    assert (models[0].lm_head(kept) - whole[:, -2:]).abs().max() < 1e-9
    fleet = Fleet(models).logits(ids.repeat(2, 1, 1))
    assert (fleet[0] - whole).abs().max() < 1e-9
    assert (fleet[1] - models[1](ids).logits).abs().max() < 1e-9


def test_saved_model_carries_its_encoding(tmp_path, command):
    (tmp_path / "recent.py").write_text(docs_block("Your own encoding", "python"))
    more = '[custom_encodings]\nrecent = "recent.py:Recent"\n'
    recipe = write_recipe(tmp_path, more, ("copy",), ("recent",))
    lengths = ['train_lengths.copy="2:4"', 'test_lengths.copy="5:6"']
    run(recipe, lengths, tmp_path / "out", **TRUST)
    (folder,) = (tmp_path / "out" / "models").iterdir()
    (tmp_path / "recent.py").unlink()
    moved = folder.rename(tmp_path / "moved")
    code, message = command("inspect", str(moved), "--trust-remote-code")
    assert code == 0, message
    loaded = farspan.load(moved, **TRUST).model
    names = [name for name, _ in loaded.model.positions.named_parameters()]
    assert names
    assert json.loads((moved / "config.json").read_text())["custom_encodings"] == {
        "recent": "recent.py:Recent"
    }
    with pytest.raises(FarspanError, match="runs Python code .* add --trust-remote-code"):
        farspan.load(moved)


def test_keys_of_cells_depend_on_the_code(tmp_path):
    more = own_encoding(tmp_path, TURN, "Turn")
    recipe = write_recipe(tmp_path, more, ("copy",), ("mine", "none"))

    def describe() -> list[dict]:
        study = read_study(recipe, **TRUST)
        return [describe_cell(study, cell) for cell in list_cells(study)]

    before = describe()
    (tmp_path / "mine.py").write_text(TURN.replace("0.3", "0.2"))
    after = describe()
    assert before[0] != after[0]
    assert before[1] == after[1], "the cell of a built-in encoding"
    assert set(before[0]) - set(before[1]) == {"custom_encoding"}


def test_encodings_that_know_the_length_or_draw_train_separately(tmp_path):
    random = TURN + "\nclass Random(Turn):\n    random = True\n"
    (tmp_path / "mine.py").write_text(random)
    recipe = write_recipe(
        tmp_path,
        '[custom_encodings]\nmine = "mine.py:Turn"\nother = "mine.py:Random"\n',
        ("copy", "reverse"),
        ("mine", "other"),
    )
    study = read_study(recipe, ["seeds=[0, 1]"], **TRUST)
    fleets = group_fleets(study, list_cells(study), 64)
    assert sorted((fleet[0].encoding, len(fleet)) for fleet in fleets) == (
        [("mine", 2)] * 2 + [("other", 1)] * 4
    )
    study = LabStudy(("copy", "reverse"), encodings=("kerple", "fire", "randomized"), seeds=(0, 1))
    fleets = group_fleets(study, list_cells(study), 64)
    sizes = {}
    for fleet in fleets:
        sizes.setdefault(fleet[0].encoding, []).append(len(fleet))
    assert sizes == {"kerple": [4], "fire": [2, 2], "randomized": [1, 1, 1, 1]}


PARAMETER = (
    "    def __init__(self, c):\n        super().__init__(c)\n"
    "        self.w = torch.nn.Parameter(torch.zeros(1))\n"
)
HEAD = "import torch\nfrom farspan.model.encodings import Encoding\nclass Mine(Encoding):\n"
SCORES = HEAD + "    def scores(self, q, k, a, b): "
EMBED = HEAD + "    def embed(self, x, p): "
INIT = (
    "    def __init__(self, c):\n        super().__init__(c)\n"
    "        self.table = torch.nn.Parameter(torch.zeros(2, 2 * c.max_position_embeddings))\n"
)
BAD_ENCODINGS = {
    "its file defines no Mine": "class Other: pass",
    "no class of encodings; let it inherit from farspan.model.encodings": "class Mine: pass",
    "defines no method that farspan calls; define embed, rotate or scores": HEAD
    + "    def score(self, q, k, a, b): return (b - a[:, None]) * 1.0",
    r"failed in a trial run \(TypeError: .*takes 1 positional": HEAD
    + "    def __init__(self): super().__init__(None)\n    embed = None",
    r"failed in a trial run \(RuntimeError": SCORES + "return torch.zeros(3, 5)",
    r"failed in a trial run \(FarspanError: scores of Mine returned None": SCORES + "return None",
    r"\(FarspanError: rotate of Mine returned a Tensor; return queries and keys, two tensors": HEAD
    + "    def rotate(self, q, k, a, b): return q",
    r"failed in a trial run \(ZeroDivisionError": EMBED + "return 1 / 0",
    r"failed in a trial run \(SystemExit: 3": EMBED + "raise SystemExit(3)",
    r"failed in a trial run \(ValueError: boom\)": EMBED
    + "\n        if self.training: raise ValueError('boom')\n        return x",
    r"\(IndexError: .*\) with texts of up to 88 tokens; fix the code": SCORES
    + "return torch.zeros(2, 45)[:, (a[:, None] - b).clamp(min=0)]",
    "gives logits that are not finite in texts of 88 tokens": SCORES
    + "return torch.sqrt(45.0 - (a[:, None] - b))",
    "gives gradients that are not finite": HEAD
    + PARAMETER
    + "    def embed(self, x, p): return x + self.w.sqrt()",
    "lets tokens see later tokens": EMBED + "return x + x.mean(1)[:, None]",
    "gives a text other logits in a batch than by itself": EMBED + "return x - x.mean(0)",
    "gives tokens other logits when more tokens follow, as padding does": SCORES
    + "return (b - a[:, None]) / k.shape[2]",
    "tested again; draw random numbers in training only, and set random = True": EMBED
    + "return x + torch.rand_like(x)",
    "trains on the same texts again; set random = True in the class": EMBED
    + "return torch.nn.functional.dropout(x, 0.1, self.training)",
    r"failed in a trial run \(RuntimeError: vmap": HEAD
    + PARAMETER
    + "    def scores(self, q, k, a, b): return (b - a[:, None]) * self.w.item()",
    "gives other logits in a fleet of models, which may differ in parameters only": HEAD
    + "    def __init__(self, config): super().__init__(config); self.w = torch.randn(16)\n"
    + "    def embed(self, x, p): return x + self.w",
    r"cannot be imported \(NameError": "boom",
    r"cannot be imported \(SystemExit: 3": "raise SystemExit(3)",
}


@pytest.mark.parametrize("message", BAD_ENCODINGS)
def test_bad_encodings_are_refused_before_training(tmp_path, message):
    recipe = write_recipe(
        tmp_path, own_encoding(tmp_path, BAD_ENCODINGS[message], "Mine"), ("copy",), ("mine",)
    )
    with pytest.raises(FarspanError, match=message) as caught:
        run(recipe, [], tmp_path / "out", **TRUST)
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(caught.value)


def test_encoding_that_says_that_it_draws_is_tried(tmp_path):
    """It may draw in training; in a test, nothing may depend on the number of tokens."""
    code = EMBED.replace("    def", "    random = True\n    def")
    code += "return x + (torch.rand_like(x) if self.training else 0.1 * p[..., None])"
    recipe = write_recipe(tmp_path, own_encoding(tmp_path, code, "Mine"), ("copy",), ("mine",))
    assert read_study(recipe, **TRUST)
    (tmp_path / "mine.py").write_text(code.replace("0.1 * p[..., None]", "x.shape[1] / 100"))
    with pytest.raises(FarspanError, match="gives tokens other logits when more tokens follow"):
        read_study(recipe, **TRUST)


@pytest.mark.parametrize("name", BUILT_IN)
def test_encodings_of_the_protocol_pass_the_trial(tmp_path, name):
    more = f'[custom_encodings]\nmine = "farspan.model.encodings:{BUILT_IN[name].__name__}"\n'
    assert read_study(write_recipe(tmp_path, more, ("copy",), ("mine",)), **TRUST)


def test_encoding_is_tried_at_the_lengths_of_each_task(tmp_path):
    """A table twice as long as the train length fits copy, but not a shorter task tested longer."""
    code = SCORES.replace("    def", INIT + "    def")
    code += "return self.table[:, (a[:, None] - b).clamp(min=0)]"
    more = own_encoding(tmp_path, code, "Mine")
    more += "[train_lengths]\nparity = '1:2'\n[test_lengths]\nparity = '20:22'\n"
    read_study(write_recipe(tmp_path, more, ("copy",), ("mine",)), **TRUST)
    with pytest.raises(FarspanError, match="IndexError"):
        read_study(write_recipe(tmp_path, more, ("copy", "parity"), ("mine",)), **TRUST)


def test_encoding_is_not_run_without_trust(tmp_path):
    recipe = write_recipe(tmp_path, own_encoding(tmp_path, TURN, "Turn"), ("copy",), ("mine",))
    with pytest.raises(FarspanError, match="runs Python code .* add --trust-remote-code"):
        read_study(recipe)
    with pytest.raises(FarspanError, match="has the name of a built-in encoding"):
        read_study(recipe, ['custom_encodings={fire = "mine.py:Turn"}'], **TRUST)
    with pytest.raises(FarspanError, match="encoding 'mne' is unknown; did you mean mine"):
        read_study(recipe, ['encodings=["mne"]'], **TRUST)
    with pytest.raises(FarspanError, match="'rope' is unknown; did you mean rotary"):
        read_study(recipe, ['encodings=["rope"]'], **TRUST)


def test_unknown_tasks_of_a_recipe_are_suggested(tmp_path):
    write_lines(tmp_path / "mine.jsonl", parity_rows())
    recipe = write_recipe(tmp_path, LINES)
    with pytest.raises(FarspanError, match="is a recipe; name one of its tasks, as .*:TASK"):
        next(dump(recipe, 1, "", 0))
    with pytest.raises(FarspanError, match="task 'mne' is unknown; did you mean mine"):
        next(dump(f"{recipe}:mne", 1, "", 0))


def test_code_of_an_installed_module():
    """`module:name`, with the hash of the module's file."""
    with pytest.raises(FarspanError, match="add --trust-remote-code"):
        imported("colorsys:rgb_to_hsv", "key")
    with pytest.raises(FarspanError, match="add --trust-remote-code"):
        import_code("colorsys:rgb_to_hsv", "key", trust_remote_code=False)
    function = import_code("colorsys:rgb_to_hsv", "key", trust_remote_code=True)
    assert function(0, 0, 1)[2] == 1
    assert imported("colorsys:rgb_to_hsv", "key") is function
    expected = hashlib.sha256(Path(colorsys.__file__).read_bytes()).hexdigest()
    assert source_hash("colorsys:rgb_to_hsv", "key") == expected


def test_encoding_of_an_installed_module(tmp_path):
    more = '[custom_encodings]\nmine = "farspan.model.encodings:Kerple"\n'
    recipe = write_recipe(tmp_path, more, ("copy",), ("mine",))
    lengths = ['train_lengths.copy="2:4"', 'test_lengths.copy="5:6"']
    run(recipe, lengths, tmp_path / "out", **TRUST)
    (folder,) = (tmp_path / "out" / "models").iterdir()
    assert not list(folder.glob("*.py"))
    with pytest.raises(FarspanError, match="the encoding mine of .* runs Python code"):
        farspan.load(folder)
    assert farspan.load(folder, **TRUST).model.model.positions["mine"].r1.shape == (2,)


def test_imported_code_stays_as_it_was(tmp_path):
    """A file that changes during a run changes nothing; the next trusted call imports it again."""
    file = tmp_path / "code.py"
    file.write_text("value = 1\n")
    reference = f"{file}:value"
    assert import_code(reference, "key", trust_remote_code=True) == 1
    before = source_hash(reference, "key")
    file.write_text("value = 2\n")
    assert imported(reference, "key") == 1
    assert source_hash(reference, "key") == before
    assert import_code(reference, "key", trust_remote_code=True) == 2
    assert source_hash(reference, "key") != before
    file.unlink()
    assert imported(reference, "key") == 2
    with pytest.raises(FarspanError, match="cannot be read .*; correct the path"):
        import_code(reference, "key", trust_remote_code=True)


def test_saving_a_loaded_model_keeps_its_code(tmp_path):
    """The folder has the code that ran, not what the file has become since."""
    more = own_encoding(tmp_path, TURN, "Turn")
    study = read_study(write_recipe(tmp_path, more, ("copy",), ("mine",)), **TRUST)
    config = network_config(
        study.sizes["mini"], "mine", WordTokenizer(), 8, 8, study.custom_encodings
    )
    model = FarspanForCausalLM(config).eval()
    (tmp_path / "mine.py").write_text("raise ValueError")
    model.save_pretrained(tmp_path / "one")
    assert model.config.custom_encodings == study.custom_encodings, "the model itself is unchanged"
    farspan.load(tmp_path / "one", **TRUST).model.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "mine.py").read_text() == TURN
    ids = torch.arange(5, 14)[None]
    assert torch.equal(farspan.load(tmp_path / "two", **TRUST).model(ids).logits, model(ids).logits)


def test_a_model_is_identified_by_the_code_of_its_encodings_and_not_by_its_path(tmp_path):
    tokenizer = farspan.load("nope-twin").tokenizer
    code = (TURN + TURN.replace("class Turn", "class Other"),) * 2
    (tmp_path / "mine.py").write_text(code[0])
    reference = f"{tmp_path / 'mine.py'}:Turn"
    import_code(reference, "key", trust_remote_code=True)
    shape = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = FarspanConfig(**shape, position="mine", custom_encodings={"mine": reference})
    FarspanForCausalLM(config).save_pretrained(tmp_path / "model")

    def identity() -> dict[str, str]:
        return model_identity(farspan.load(folder, **TRUST).model, tokenizer, None)

    folder = tmp_path / "model"
    before = identity()
    folder = folder.rename(tmp_path / "moved")
    assert identity() == before
    settings = json.loads((folder / "config.json").read_text())
    settings["custom_encodings"]["mine"] = "mine.py:Other"
    (folder / "config.json").write_text(json.dumps(settings))
    assert identity() != before
    settings["custom_encodings"]["mine"] = "mine.py:Turn"
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text(code[0].replace("0.3", "0.4"))
    assert identity() != before
