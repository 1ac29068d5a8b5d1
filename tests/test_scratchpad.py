"""Scratchpads: every setting can be read back and executed, and what they say leads to the answer."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from farspan.errors import FarspanError
from farspan.lab.scratchpad import (
    MACHINES,
    PARTS,
    parse,
    parse_parts,
    run,
    settings,
    steps,
    write_scratchpad,
)
from farspan.lab.tasks import TASKS, draw_examples
from farspan.lab.tokenizer import WordTokenizer

WORDS = WordTokenizer()
WITHOUT_VARIABLES = {"sorting", "sorting-numbers", "lego", "lego-ordered"}


@pytest.mark.parametrize("name", MACHINES)
def test_every_setting_is_read_back_and_executed_to_the_answer(name):
    task = TASKS[name]
    every = ["".join(some) for size in range(6) for some in combinations(PARTS, size)]
    possible = [each for each in every if not ("v" in each and name in WITHOUT_VARIABLES)]
    assert sorted(settings(name)) == sorted(possible)
    assert len(possible) == (16 if name in WITHOUT_VARIABLES else 32)
    for number, parts in enumerate(possible):
        plain = draw_examples(task, (task.train[0], task.test[1]), 40, seed=number)
        padded = draw_examples(
            task, (task.train[0], task.test[1]), 40, seed=number, scratchpad=parts or "none"
        )
        for before, example in zip(plain, padded, strict=True):
            assert before.input == example.input
            shown, answer = parse(example.target)
            assert answer == before.target
            assert all("".join(step) == parts for step in shown)
            assert WORDS.decode(WORDS.encode(example.target)) == example.target
            if parts:
                assert run(name, example.input, example.target) == before.target


def test_what_is_shown_is_believed_even_if_it_is_nothing():
    """Where the output of a step is blank it is not worked out: a sum has no digits then, a list no next word."""
    blank = " ".join(4 * ["<step> <output>"]) + " The answer is 1 ."
    (example,) = draw_examples(TASKS["addition"], (4, 4), 1, seed=0)
    assert run("addition", example.input, blank) == "The answer is ."
    (example,) = draw_examples(TASKS["sorting"], (4, 4), 1, seed=0)
    with pytest.raises(FarspanError, match="step 1 of this sorting scratchpad cannot be executed"):
        run("sorting", example.input, blank)


def test_the_steps_of_an_addition():
    text = write_scratchpad("addition", "Compute 5 3 + 7 ?", "The answer is 6 0 .", "icovr")
    assert text == (
        "<step> <input> 3 + 7 <computation> 3 + 7 + 0 = 1 0 <output> 0 <variables> carry = 1 <remaining> 5 + "
        "<step> <input> 5 + 0 <computation> 5 + 0 + 1 = 6 <output> 6 <variables> carry = 0 <remaining> + "
        "The answer is 6 0 ."
    )


@pytest.mark.parametrize("name", ["addition", "summation", "polynomial"])
def test_computations_hold_in_python(name):
    task = TASKS[name]
    for example in draw_examples(task, (1, 16), 300, seed=2):
        for step in steps(name, example.input):
            left, right = re.sub(r"(?<=\d) (?=\d)", "", " ".join(step["c"])).split(" = ")
            assert eval(left) == eval(right)


def test_sorting_takes_the_least_of_what_remains():
    for example in draw_examples(TASKS["sorting"], (1, 16), 200, seed=2):
        remaining = tuple(example.input.split()[1:-1])
        for step in steps("sorting", example.input):
            assert step["i"] == remaining
            assert step["o"] == (min(remaining),)
            assert sorted((*step["r"], *step["o"])) == sorted(remaining)
            remaining = step["r"]
        assert not remaining


def test_lego_goes_along_the_chain_to_what_is_asked_for():
    for example in draw_examples(TASKS["lego"], (1, 16), 200, seed=2):
        told = example.input.removeprefix("If ").partition(" . ")[0].split(" , ")
        base, value = "1", 1
        for step in steps("lego", example.input):
            clause = " ".join(step["i"])
            name, sign = step["i"][0], int(step["i"][2] + "1")
            told.remove(clause)
            assert step["i"][3] == base
            assert " , ".join(told) == " ".join(step["r"])
            base, value = name, value * sign
            assert " ".join(step["o"]) == f"{name} = {value:+d}".replace("1", " 1")
        assert base == example.input.split()[-2]


READ = {  # where the next word depends on a digit that is shown
    ("addition", "i"): r"<input> (\d)",
    ("addition", "c"): r"(\d)(?= <step>| The)",
    ("addition", "o"): r"<output> (\d)",
    ("addition", "v"): r"carry = (\d)",
    ("addition", "r"): r"(\d)(?= \+| <step>)",
    ("summation", "i"): r"<input> (\d)",
    ("summation", "c"): r"(\d)(?= The)",
    ("summation", "o"): r"(\d)(?= The)",
    ("summation", "v"): r"(\d)(?= <step> <variables> sum = \d The)",
    ("summation", "r"): r"<remaining> (\d)",
}


@pytest.mark.parametrize(("name", "part"), READ)
def test_a_wrong_digit_in_a_scratchpad_leads_to_a_wrong_answer(name, part):
    """What is executed is the text, whichever part it shows."""
    rng = np.random.default_rng(0)
    for example in draw_examples(TASKS[name], (2, 8), 100, seed=4, scratchpad=part):
        text = example.target
        place = int(rng.choice([found.start(1) for found in re.finditer(READ[name, part], text)]))
        wrong = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        answer = parse(text)[1]
        assert run(name, example.input, text) == answer
        assert run(name, example.input, wrong) != answer


@pytest.mark.parametrize(
    ("text", "task", "parts"),
    [
        ("icovr", "addition", "icovr"),
        ("rvoci", "addition", "icovr"),
        ("full", "addition", "icovr"),
        ("full", "sorting", "icor"),
        ("none", "copy", ""),
        ("output+input", "lego", "io"),
        ("remaining", "parity", "r"),
    ],
)
def test_settings_are_spelled_in_letters_or_names(text, task, parts):
    assert parse_parts(text, task) == parts


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: parse_parts("full", "copy"),
            "copy has no scratchpad; those that have one are addition",
        ),
        (lambda: parse_parts("iv", "sorting"), "the scratchpad of sorting has no variables part"),
        (lambda: parse_parts("input+outptu", "addition"), "did you mean output"),
        (lambda: parse_parts("", "addition"), "names the part ''"),
        (lambda: parse_parts("ii", "addition"), "names a part twice"),
        (
            lambda: draw_examples(TASKS["scan"], (1, 5), 1, 0, scratchpad="i"),
            "scan has no scratchpad",
        ),
        (lambda: parse("3 + 7 <step> The answer is 1 0 ."), "'3' stands outside every part"),
        (
            lambda: run("addition", "Compute 1 + 1 ?", "The answer is 2 ."),
            "without steps cannot be executed",
        ),
        (
            lambda: run(
                "addition", "Compute 1 + 1 ?", "<step> <input> 1 <output> 2 The answer is 2 ."
            ),
            "step 1 of this addition scratchpad cannot be executed",
        ),
        (
            lambda: run(
                "addition", "Compute 1 + 1 ?", "<step> <variables> carry The answer is 2 ."
            ),
            "step 1 of this addition scratchpad cannot be executed",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    with pytest.raises(FarspanError, match=re.escape(message)):
        call()
