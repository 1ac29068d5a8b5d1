"""The tasks of the laboratory: right answers, whole languages, examples that are distinct and apart."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.errors import FarspanError
from farspan.lab import pcfg, scan
from farspan.lab.tasks import (
    TASKS,
    Example,
    LabTask,
    _balanced,
    draw_examples,
    find_task,
    make_splits,
)
from farspan.lab.tokenizer import MARKS, WordTokenizer

DATA = Path(os.environ.get("FARSPAN_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
WORDS = WordTokenizer()


def examples(task: LabTask, n: int = 10_000) -> list[Example]:
    """Of all lengths that the task is trained and tested on."""
    lengths = [length for length in range(task.train[0], task.test[1] + 1) if task.count(length)]
    rng = np.random.default_rng(7)
    return [task.make(lengths[index], rng) for index in rng.integers(len(lengths), size=n)]


# Checkers that know nothing of how examples are made: they read the question, and let Python answer it.


def told(target: str) -> str:
    return re.fullmatch(r"The answer is (.*) \.", target)[1]


def python(text: str) -> str:
    """Digits joined to numbers, and a sign for what maths leaves out."""
    joined = re.sub(r"(?<=\d) (?=\d)", "", text)
    return re.sub(r"(\d) x", r"\1 * x", joined)


def body(example: Example) -> list[str]:
    return example.input.split()[1:-1]


def numbers(text: str) -> list[int]:
    return [int(each.replace(" ", "")) for each in text.split(" , ")]


def place(symbol: str) -> int:
    return int(symbol.removeprefix("w"))


def check_polynomial(example: Example) -> tuple[bool, int]:
    x, expression = re.fullmatch(r"Evaluate x = (.*) in (.*) \?", python(example.input)).groups()
    return eval(expression, {"x": int(x.replace(" ", ""))}) == int(
        told(example.target)
    ), expression.count("**")


def check_summation(example: Example) -> tuple[bool, int]:
    expression = " ".join(body(example))
    return eval(expression) == int(told(example.target)), expression.count("+") + 1


def check_addition(example: Example) -> tuple[bool, int]:
    expression = python(" ".join(body(example)))
    total = int(told(example.target).replace(" ", ""))
    return eval(expression) == total, max(map(len, expression.split(" + ")))


def check_parity(example: Example) -> tuple[bool, int]:
    bits = re.fullmatch(r"Is the number of ones even in ([01 ]*) \?", example.input)[1].split()
    return (bits.count("1") % 2 == 0) == (told(example.target) == "yes"), len(bits)


def check_lego(example: Example) -> tuple[bool, int]:
    """Clauses are tried in any order until nothing new comes out."""
    clauses, asked = re.fullmatch(
        r"If (.*) \. Then , what is the value of (.) \?", example.input
    ).groups()
    parsed = [re.fullmatch(r"(.) = ([+-]) (.)", clause).groups() for clause in clauses.split(" , ")]
    known = {"1": 1}
    for _ in parsed:
        known |= {
            name: known[base] * int(sign + "1") for name, sign, base in parsed if base in known
        }
    assert len(known) == len(parsed) + 1
    return known[asked] == int(told(example.target).replace(" ", "")), len(parsed)


def check_scan(example: Example) -> tuple[bool, int]:
    """Phrase by phrase, by the words that are in it, instead of by recursion."""
    turn = {"left": "I_TURN_LEFT", "right": "I_TURN_RIGHT"}

    parts = re.split(r" (and|after) ", example.input)
    ordered = parts[::-2] if "after" in parts else parts[::2]
    found: list[str] = []
    for part in ordered:
        words = part.split()
        count = {"twice": 2, "thrice": 3}.get(words[-1], 1)
        words = words[:-1] if count > 1 else words
        verb = [] if words[0] == "turn" else [f"I_{words[0].upper()}"]
        side = [turn[words[-1]]] if words[-1] in turn else []
        if "around" in words:
            once = [*side, *verb] * 4
        elif "opposite" in words:
            once = [*side, *side, *verb]
        else:
            once = [*side, *verb]
        found += once * count
    return found == example.target.split(), len(found)


def check_pcfg(example: Example) -> tuple[bool, int]:
    """From right to left with a stack, instead of from left to right with recursion."""
    operations = {
        "copy": lambda x: x,
        "reverse": lambda x: [*reversed(x)],
        "shift": lambda x: [*x[1:], x[0]],
        "swap_first_last": lambda x: [x[-1], *x[1:-1], x[0]],
        "repeat": lambda x: x * 2,
        "echo": lambda x: [*x, x[-1]],
        "append": lambda x, y: [*x, *y],
        "prepend": lambda x, y: [*y, *x],
        "remove_first": lambda x, y: y,
        "remove_second": lambda x, y: x,
    }
    stack: list[list[str]] = []
    functions = 0
    open_string = False
    for word in reversed(example.input.split()):
        operation = operations.get(word)
        if operation:
            functions += 1
            arguments = [stack.pop() for _ in range(operation.__code__.co_argcount)]
            stack.append(operation(*arguments))
        elif word != ",":
            stack.append([word, *stack.pop()] if open_string else [word])
        open_string = operation is None and word != ","
    return stack == [example.target.split()], functions


CHECKS = {
    "copy": lambda e: (e.target.split() == body(e), len(body(e))),
    "copy-repeat": lambda e: (e.target.split() == body(e) and len(set(body(e))) == 1, len(body(e))),
    "copy-replace": lambda e: (
        [place(w) for w in e.target.split()] == [place(w) % 50 + 1 for w in body(e)],
        len(body(e)),
    ),
    "copy-double": lambda e: (e.target.split() == body(e) * 2, len(body(e))),
    "reverse": lambda e: (e.target.split()[::-1] == body(e), len(body(e))),
    "reverse-numbers": lambda e: (
        numbers(e.target)[::-1] == numbers(" ".join(body(e))),
        len(numbers(e.target)),
    ),
    "addition": check_addition,
    "polynomial": check_polynomial,
    "sorting": lambda e: (told(e.target).split() == sorted(body(e), key=place), len(body(e))),
    "sorting-numbers": lambda e: (
        numbers(told(e.target)) == sorted(numbers(" ".join(body(e)))),
        len(numbers(told(e.target))),
    ),
    "summation": check_summation,
    "parity": check_parity,
    "lego": check_lego,
    "lego-ordered": check_lego,
    "scan": check_scan,
    "pcfg": check_pcfg,
}


@pytest.mark.parametrize("name", TASKS)
def test_every_target_is_right_of_its_length_and_made_of_words_that_are_known(name):
    task, seen = TASKS[name], set()
    for example in examples(task):
        right, length = CHECKS[name](example)
        assert right, example
        assert length == example.length
        for text in (example.input, example.target):
            assert WORDS.decode(WORDS.encode(text)) == text
            seen |= set(text.split())
    assert seen == set(
        task.vocabulary
    )  # nothing is missing, and nothing is there that no example needs


def test_one_vocabulary_serves_all_tasks():
    assert len(WORDS) == len(set(WORDS.table)) < 1024
    assert WORDS.table[: len(MARKS)] == MARKS
    assert [WORDS.table[mark] for mark in (WORDS.pad, WORDS.begin, WORDS.answer, WORDS.end)] == [
        *MARKS
    ]
    example = Example("Copy w07 .", "w07", 1)
    assert WORDS.decode(WORDS.prompt(example) + WORDS.reply(example)) == "Copy w07 . w07"
    assert WORDS.prompt(example)[0] == WORDS.begin
    assert WORDS.reply(example)[-1] == WORDS.end
    with pytest.raises(FarspanError, match="'zebra' is no word"):
        WORDS.encode("Copy zebra .")


@pytest.mark.parametrize("name", TASKS)
def test_an_example_is_a_function_of_length_and_generator(name):
    task = TASKS[name]
    one, other = (task.make(task.train[1], np.random.default_rng(3)) for _ in range(2))
    assert one == other
    assert one.length == task.train[1]


SMALL = [
    ("parity", 3),
    ("summation", 2),
    ("addition", 1),
    ("polynomial", 1),
    ("copy-repeat", 9),
    ("copy", 1),
]
SMALL += [("lego", 1), ("lego-ordered", 2), ("scan", 2), ("reverse-numbers", 1)]


@pytest.mark.parametrize(("name", "length"), SMALL)
def test_the_number_of_distinct_examples_is_known(name, length):
    task, rng = TASKS[name], np.random.default_rng(0)
    count = task.count(length)
    seen = {task.make(length, rng).input for _ in range(int(count * (np.log(count) + 8)))}
    assert len(seen) == count


def test_draws_are_distinct_balanced_and_repeatable():
    task = TASKS["addition"]
    drawn = draw_examples(task, (3, 6), 402, seed=5)
    assert drawn == draw_examples(task, (3, 6), 402, seed=5)
    assert drawn != draw_examples(task, (3, 6), 402, seed=6)
    assert len({example.input for example in drawn}) == 402
    assert sorted(Counter(example.length for example in drawn).values()) == [100, 100, 101, 101]
    others = draw_examples(task, (3, 6), 402, seed=5, apart_from=drawn)
    assert not {example.input for example in others} & {example.input for example in drawn}


def test_a_small_space_is_drawn_whole_and_said_to_be_small(caplog):
    drawn = draw_examples(TASKS["parity"], (1, 3), 1000, seed=0)
    assert len({example.input for example in drawn}) == len(drawn) == 2 + 4 + 8
    assert "parity has 14 distinct examples" in caplog.text
    rest = draw_examples(TASKS["parity"], (1, 3), 1000, seed=0, apart_from=drawn[:5])
    assert {example.input for example in rest} == {example.input for example in drawn[5:]}


@given(st.integers(1, 500), st.dictionaries(st.integers(1, 30), st.integers(0, 60), min_size=1))
def test_examples_are_dealt_out_evenly(n, room):
    quotas = _balanced(n, room)
    assert sum(quotas.values()) == min(n, sum(room.values()))
    most = max(quotas.values())
    assert all(quota <= room[length] for length, quota in quotas.items())
    assert all(quota >= most - 1 or quota == room[length] for length, quota in quotas.items())


@pytest.mark.parametrize("name", TASKS)
def test_splits_have_nothing_in_common(name):
    task = TASKS[name]
    made = make_splits(task, 600, 60, seed=1)
    inputs = [{example.input for example in part} for part in made]
    assert all(len(each) == len(part) > 0 for each, part in zip(inputs, made, strict=True))
    assert len(set.union(*inputs)) == sum(map(len, inputs))
    for part, (low, high) in zip(made, (task.train, task.train, task.test), strict=True):
        assert all(low <= example.length <= high for example in part)
    held = Counter(example.length for example in made.held_out)
    assert all(count <= 0.1 * task.count(length) for length, count in held.items())


def test_lengths_may_have_more_examples_than_a_float_can_count():
    made = make_splits(TASKS["copy"], 4, 2, seed=0, train=(299, 300), test=(301, 302))
    assert [len(part) for part in made] == [4, 2, 2]


def test_a_test_inside_the_training_range_is_warned_of(caplog):
    made = make_splits(TASKS["copy"], 50, 50, seed=0, train=(2, 8), test=(5, 12))
    assert "are not all longer" in caplog.text
    assert not {example.input for example in made.train} & {
        example.input for example in made.beyond
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_task("adition"), "task 'adition' is unknown; did you mean addition"),
        (lambda: find_task("?"), "choose one of copy, copy-repeat"),
        (lambda: draw_examples(TASKS["copy"], (5, 2), 1, 0), "lengths 5:2 are no range"),
        (lambda: draw_examples(TASKS["copy"], (0, 2), 1, 0), "lengths 0:2 are no range"),
        (
            lambda: draw_examples(TASKS["lego"], (27, 30), 1, 0),
            "lego has no example of 27 to 30 clauses",
        ),
        (
            lambda: draw_examples(TASKS["scan"], (23, 23), 1, 0),
            "scan has no example of 23 to 23 actions",
        ),
        (lambda: draw_examples(TASKS["copy"], (1, 2), 0, 0), "ask for at least 1"),
        (lambda: draw_examples(TASKS["copy"], (1, 2), 1, -1), "a seed from 0 on"),
        (lambda: TASKS["lego"].make(27, np.random.default_rng(0)), "26 at most, and 27"),
        (
            lambda: TASKS["scan"].make(23, np.random.default_rng(0)),
            "no command of scan has 23 actions",
        ),
        (lambda: pcfg.expression(70, np.random.default_rng(0)), "no room in 71 words"),
        (lambda: pcfg.evaluate("copy A1 , B1"), "',' is left over"),
        (lambda: pcfg.evaluate("append A1 B1"), "a string is missing"),
        (lambda: pcfg.evaluate("append A1 ,"), "a string is missing"),
        (lambda: pcfg.evaluate(""), "a string is missing"),
        (lambda: WORDS.encode("Compute 12 + 3 ?"), "put spaces between words and between digits"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(call, message):
    with pytest.raises(FarspanError, match=re.escape(message)):
        call()


def test_scan_by_number_of_actions_is_cut_as_in_the_papers():
    """SCAN's authors: at most 22 actions, 16,990 and 3,920. Paper B: at most 25, of which nine tenths train."""
    count = TASKS["scan"].count
    assert sum(map(count, range(1, 23))) == 16_990
    assert sum(map(count, range(23, 49))) == 3_920
    assert sum(map(count, range(1, 26))) == 17_774 == 15_997 + 1_777
    assert sum(map(count, range(26, 49))) == 3_136
    assert not any(map(count, range(49, 200)))


def test_expressions_of_pcfg_are_of_the_released_size():
    rng = np.random.default_rng(0)
    for functions in (
        *range(1, 36),
        44,
        57,
        69,
    ):  # beyond 35 an input has little room for binary functions
        for _ in range(10 if functions < 36 else 2):
            text, value = pcfg.expression(functions, rng)
            words = text.split()
            assert sum(word in pcfg.UNARY or word in pcfg.BINARY for word in words) == functions
            assert len(words) <= 71
            assert 2 <= len(value) <= 128


@pytest.fixture(scope="module")
def bench():
    """The files of SCAN and PCFG SET, by name."""
    archive = DATA / "bench.tar.xz"
    if not archive.exists():
        pytest.skip(f"needs {archive.name}")
    with tarfile.open(archive) as file:
        return {
            member.name: file.extractfile(member).read().decode()
            for member in file
            if member.name == "bench/scan/tasks.txt"
            or re.fullmatch(r"bench/pcfg_set/.*\.jsonl", member.name)
        }


def test_scan_is_complete(bench):
    released = [
        line.removeprefix("IN: ").split(" OUT: ")
        for line in bench["bench/scan/tasks.txt"].splitlines()
    ]
    ours = {command: " ".join(scan.actions(command)) for command in scan.commands()}
    assert len(ours) == len(list(scan.commands())) == len(released) == 20_910
    assert ours == dict(released)


def test_pcfg_is_understood(bench):
    pairs = [
        json.loads(line)
        for name, text in bench.items()
        if "pcfg" in name
        for line in text.splitlines()
    ]
    assert len(pairs) == 4_860 + 9_721 + 11_333 + 10_175 + 79_077
    wrong = [pair for pair in pairs if " ".join(pcfg.evaluate(pair["src"])) != pair["tgt"]]
    assert not wrong
