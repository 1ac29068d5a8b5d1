"""Scratchpads: with every choice of parts they can be executed, and lead to the answer."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from farspan.errors import FarspanError
from farspan.lab.examples import draw_examples
from farspan.lab.scratchpad import (
    MACHINES,
    PARTS,
    STEP,
    TAGS,
    Machine,
    Step,
    Tokens,
    parse_parts,
    steps,
    task_format,
    write_scratchpad,
)
from farspan.lab.tasks import TASKS
from farspan.lab.tokenizer import WordTokenizer

TOKENIZER = WordTokenizer()
WITHOUT_VARIABLES = {"sorting", "sorting-numbers", "lego", "lego-ordered"}


# A reader of scratchpads: it takes from the text what the text shows, and computes the rest.

ANSWERS = {  # outputs and variables after the last step -> words of the answer
    "addition": lambda outputs, variables: (
        *(variables[2:] if variables[2:] != ("0",) else ()),
        *(word for output in reversed(outputs) for word in output),
    ),
    "summation": lambda outputs, variables: outputs[-1],
    "parity": lambda outputs, variables: ("yes" if outputs[-1] == ("even",) else "no",),
    "polynomial": lambda outputs, variables: variables[-1:],
    "sorting": lambda outputs, variables: [word for output in outputs for word in output],
    "sorting-numbers": lambda outputs, variables: " , ".join(map(" ".join, outputs)).split(),
    "lego": lambda outputs, variables: outputs[-1][-2:],
    "lego-ordered": lambda outputs, variables: outputs[-1][-2:],
}


def parse(text: str) -> tuple[list[Step], str]:
    """The parts that each step of a text shows, and the sentence after the steps."""
    words = text.split()
    end = words.index("The")
    letters = {tag: letter for letter, tag in TAGS.items()}
    shown: list[dict[str, list[str]]] = []
    for word in words[:end]:
        if word == STEP:
            shown.append({})
        elif word in letters:
            part = shown[-1].setdefault(letters[word], [])
        else:
            part.append(word)
    parsed = [{letter: tuple(part) for letter, part in step.items()} for step in shown]
    return parsed, " ".join(words[end:])


def execute_step(
    machine: Machine, shown: Step, remaining: Tokens, variables: Tokens
) -> tuple[Tokens, Tokens, Tokens]:
    """The output of a step, and what remains and the variables after it."""
    taken = shown["i"] if "i" in shown else machine.take(remaining, variables)
    computation = shown["c"] if "c" in shown else machine.compute(taken, variables)
    output = shown["o"] if "o" in shown else machine.conclude(computation, remaining)
    after = shown["v"] if "v" in shown else machine.update(variables, computation, output)
    rest = shown["r"] if "r" in shown else machine.rest(remaining, taken, output)
    return output, rest, after


def execute(task: str, question: str, text: str) -> str:
    """The answer that the steps of a text lead to, whatever answer the text itself states."""
    machine, outputs = MACHINES[task], []
    remaining, variables = machine.begin(tuple(question.split()))
    for shown in parse(text)[0]:
        output, remaining, variables = execute_step(machine, shown, remaining, variables)
        outputs.append(output)
    return " ".join(("The answer is", *ANSWERS[task](outputs, variables), "."))


@pytest.mark.parametrize("name", MACHINES)
def test_executing_a_scratchpad_gives_the_answer(name):
    task = TASKS[name]
    settings = ["".join(parts) for size in range(1, 6) for parts in combinations(PARTS, size)]
    possible = [parts for parts in settings if not ("v" in parts and name in WITHOUT_VARIABLES)]
    assert len(possible) == (15 if name in WITHOUT_VARIABLES else 31)
    for parts in set(settings) - set(possible):
        with pytest.raises(FarspanError, match="has no variables part"):
            parse_parts(parts, name)
    lengths = task.train[0], task.test[1]
    for number, parts in enumerate(["none", *possible]):
        plain = draw_examples(task, lengths, 16, seed=number)
        padded = draw_examples(task, lengths, 16, seed=number, scratchpad=parts)
        for before, example in zip(plain, padded, strict=True):
            assert before.input == example.input
            if parts == "none":
                assert before == example
                continue
            shown, answer = parse(example.target)
            assert answer == before.target
            assert all("".join(step) == parts for step in shown)
            assert TOKENIZER.decode(TOKENIZER.encode(example.target)) == example.target
            assert execute(name, example.input, example.target) == before.target


def test_execution_uses_the_text_even_if_it_is_empty():
    """A blank output is not computed: a sum then has no digits, and a list no next word."""
    blank = " ".join(4 * ["<step> <output>"]) + " The answer is 1 ."
    (example,) = draw_examples(TASKS["addition"], (4, 4), 1, seed=0)
    assert execute("addition", example.input, blank) == "The answer is ."
    (example,) = draw_examples(TASKS["sorting"], (4, 4), 1, seed=0)
    with pytest.raises(ValueError, match="not in list"):
        execute("sorting", example.input, blank)


WRITTEN = {  # question, answer, and steps in the order of PARTS
    "addition": (
        "Compute 5 3 + 7 ?",
        "6 0",
        ("3 + 7", "3 + 7 + 0 = 1 0", "0", "carry = 1", "5 +"),
        ("5 + 0", "5 + 0 + 1 = 6", "6", "carry = 0", "+"),
    ),
    "summation": (
        "Compute ( 5 + 7 ) % 10 ?",
        "2",
        ("5", "( 0 + 5 ) % 10 = 5", "5", "sum = 5", "7"),
        ("7", "( 5 + 7 ) % 10 = 2", "2", "sum = 2", ""),
    ),
    "parity": (
        "Is the number of ones even in 1 0 1 ?",
        "yes",
        ("1", "even + 1 = odd", "odd", "parity = odd", "0 1"),
        ("0", "odd + 0 = odd", "odd", "parity = odd", "1"),
        ("1", "odd + 1 = even", "even", "parity = even", ""),
    ),
    "polynomial": (
        "Evaluate x = - 2 in ( + 3 x ** 1 - 2 x ** 3 ) % 10 ?",
        "0",
        *(
            (
                "+ 3 x ** 1",
                "+ 3 * ( - 2 ) ** 1 = - 6",
                "- 6",
                "x = - 2 , sum = 4",
                "- 2 x ** 3",
            ),
            ("- 2 x ** 3", "- 2 * ( - 2 ) ** 3 = 1 6", "1 6", "x = - 2 , sum = 0", ""),
        ),
    ),
    "sorting": (
        "Sort w24 w06 ?",
        "w06 w24",
        ("w24", "minimum", "w06", None, "w24"),
        ("w24", "minimum", "w24", None, ""),
    ),
    "sorting-numbers": (
        "Sort 1 2 0 , 5 3 ?",
        "5 3 , 1 2 0",
        ("1 2 0", "minimum", "5 3", None, "1 2 0"),
        ("1 2 0", "minimum", "1 2 0", None, ""),
    ),
    "lego": (
        "If u = - b , b = - 1 . Then , what is the value of u ?",
        "+ 1",
        ("b = - 1", "b = - ( + 1 ) = - 1", "b = - 1", None, "u = - b"),
        ("u = - b", "u = - ( - 1 ) = + 1", "u = + 1", None, ""),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_steps_by_hand(name):
    question, answer, *expected = WRITTEN[name]
    words = f"The answer is {answer} ."
    tags = ("<input>", "<computation>", "<output>", "<variables>", "<remaining>")
    written = [
        word
        for step in expected
        for word in (
            "<step>",
            *(f"{t} {w}" for t, w in zip(tags, step, strict=True) if w is not None),
        )
    ]
    text = write_scratchpad(name, question, words, parse_parts("full", name))
    assert text.split() == " ".join((*written, words)).split()


@pytest.mark.parametrize("name", ["addition", "summation", "polynomial"])
def test_computations_are_correct_python(name):
    task = TASKS[name]
    for example in draw_examples(task, (1, 16), 300, seed=2):
        for step in steps(name, example.input):
            left, right = re.sub(r"(?<=\d) (?=\d)", "", " ".join(step["c"])).split(" = ")
            assert eval(left) == eval(right)


@pytest.mark.parametrize(("name", "mark"), [("sorting", " "), ("sorting-numbers", " , ")])
def test_sorting_is_selection_sort(name, mark):
    """As in the released code: the first item takes the place of the minimum."""
    key = {"sorting": str, "sorting-numbers": lambda text: int(text.replace(" ", ""))}[name]
    for example in draw_examples(TASKS[name], (1, 16), 200, seed=2):
        values = " ".join(example.input.split()[1:-1]).split(mark)
        for start, step in enumerate(steps(name, example.input)):
            least = min(range(start, len(values)), key=lambda index: key(values[index]))
            assert step["i"] == tuple(values[start].split())
            assert step["c"] == ("minimum",)
            values[start], values[least] = values[least], values[start]
            assert step["o"] == tuple(values[start].split())
            assert " ".join(step["r"]) == mark.join(values[start + 1 :])
        assert start == len(values) - 1
        assert f"The answer is {mark.join(values)} ." == example.target


def test_lego_follows_the_chain_to_the_target():
    for example in draw_examples(TASKS["lego"], (1, 16), 200, seed=2):
        clauses = example.input.removeprefix("If ").partition(" . ")[0].split(" , ")
        base, value = "1", 1
        for step in steps("lego", example.input):
            clause = " ".join(step["i"])
            name, sign = step["i"][0], int(step["i"][2] + "1")
            clauses.remove(clause)
            assert step["i"][3] == base
            assert " , ".join(clauses) == " ".join(step["r"])
            base, value = name, value * sign
            assert " ".join(step["o"]) == f"{name} = {value:+d}".replace("1", " 1")
        assert base == example.input.split()[-2]


DIGITS = {  # digits shown in a part that later words depend on
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


@pytest.mark.parametrize(("name", "part"), DIGITS)
def test_wrong_digits_lead_to_wrong_answers(name, part):
    rng = np.random.default_rng(0)
    for example in draw_examples(TASKS[name], (2, 8), 100, seed=4, scratchpad=part):
        text = example.target
        matches = [match.start(1) for match in re.finditer(DIGITS[name, part], text)]
        index = int(rng.choice(matches))
        wrong = f"{text[:index]}{(int(text[index]) + 1) % 10}{text[index + 1 :]}"
        answer = parse(text)[1]
        assert execute(name, example.input, text) == answer
        assert execute(name, example.input, wrong) != answer


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
def test_settings_are_letters_or_names(text, task, parts):
    assert parse_parts(text, task) == parts


@pytest.mark.parametrize(
    ("text", "task", "written"),
    [
        ("icovr", "addition", "icovr"),
        ("icovr", "sorting", "icor"),
        ("input+variables", "lego", "i"),
        ("full", "sorting", "full"),
        ("none", "copy", "none"),
    ],
)
def test_tasks_leave_out_the_parts_that_they_lack(text, task, written):
    assert task_format(text, task) == written


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: parse_parts("full", "copy"),
            "copy has no scratchpad; choose one of addition",
        ),
        (lambda: task_format("v", "sorting"), "the scratchpad of sorting has no variables part"),
        (lambda: task_format("i", "copy"), "copy has no scratchpad"),
        (lambda: parse_parts("iv", "sorting"), "the scratchpad of sorting has no variables part"),
        (lambda: parse_parts("input+outptu", "addition"), "did you mean output"),
        (lambda: parse_parts("", "addition"), "has an unknown part ''"),
        (lambda: parse_parts("ii", "addition"), "names a part twice"),
        (
            lambda: draw_examples(TASKS["scan"], (1, 5), 1, 0, scratchpad="i"),
            "scan has no scratchpad",
        ),
    ],
)
def test_invalid_settings_are_refused(call, message):
    with pytest.raises(FarspanError, match=re.escape(message)):
        call()
