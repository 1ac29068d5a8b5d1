"""Scratchpads: with every choice of parts they can be executed, and lead to the answer."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from farspan.errors import FarspanError
from farspan.lab.examples import draw_examples
from farspan.lab.scratchpad import SCRATCHPADS, parse_parts, steps, task_format, write_scratchpad
from farspan.lab.tasks import TASKS
from farspan.lab.tokenizer import WordTokenizer

TOKENIZER = WordTokenizer()
PARTS = "icovr"
NAMES = ("input", "computation", "output", "variables", "remaining")
WITHOUT_VARIABLES = {"sorting", "sorting-numbers", "lego", "lego-ordered"}


def number(words: str) -> int:
    return int(words.replace(" ", ""))


# Readers of scratchpads. They know the question, take from a step what it shows, and compute the
# rest with numbers, lists and dicts of their own. `done` says that the answer is known.


class AdditionReader:
    def __init__(self, question: str):
        operands = re.fullmatch(r"Compute ([\d ]+) \+ ([\d ]+) \?", question).groups()
        self.rest = [list(map(int, text.split())) for text in operands]
        self.carry, self.digits = 0, []

    @property
    def done(self) -> bool:
        return not any(self.rest) and self.carry == 0

    def read(self, step: dict[str, str]) -> None:
        pair = [operand.pop() if operand else 0 for operand in self.rest]
        if "i" in step:
            pair = [int(word) for word in step["i"].split(" , ")]
        total = int(step["c"].split()[-1]) if "c" in step else sum(pair) + self.carry
        self.digits.append(step["o"] if "o" in step else str(total % 10))
        self.carry = int(step["v"].removeprefix("carry : ")) if "v" in step else total // 10
        if "r" in step:
            texts = step["r"].split("+")
            self.rest = [list(map(int, text.split())) for text in texts]

    def answer(self) -> str:
        return " ".join(self.digits[::-1])


class SummationReader:
    def __init__(self, question: str):
        self.rest = re.findall(r"\d", question.removesuffix("% 10 ?"))
        self.total = 0

    @property
    def done(self) -> bool:
        return not self.rest

    def read(self, step: dict[str, str]) -> None:
        digit = self.rest.pop(0)
        total = int(step.get("i", digit)) + self.total
        if "c" in step:
            total = eval(step["c"].split(" = ")[1].removesuffix("="))
        if "o" in step:
            total = number(step["o"])
        self.total = int(step["v"].split()[-1]) if "v" in step else total % 10
        if "r" in step:
            self.rest = step["r"].split(" + ") if step["r"] else []

    def answer(self) -> str:
        return str(self.total)


class ParityReader:
    def __init__(self, question: str):
        self.rest, self.odd = re.findall(r"[01]", question), False

    @property
    def done(self) -> bool:
        return not self.rest

    def read(self, step: dict[str, str]) -> None:
        one = step.get("i", self.rest.pop(0)) == "1"
        odd = one is not self.odd
        if "c" in step:
            odd = len(set(step["c"].split(" = ")[1].split(" ** "))) == 2
        if "o" in step:
            odd = step["o"] == "1"
        self.odd = step["v"] == "par : 1" if "v" in step else odd
        if "r" in step:
            self.rest = step["r"].split()

    def answer(self) -> str:
        return "no" if self.odd else "yes"


class PolynomialReader:
    def __init__(self, question: str):
        x, terms = re.fullmatch(r"Evaluate x = (.+) in \( (.+) \) % 10 \?", question).groups()
        self.x, self.rest, self.total = number(x), self.terms(terms), 0

    @staticmethod
    def terms(text: str) -> list[tuple[str, str]]:
        return re.findall(r"([+-] \d) x \*\* (\d)", text)

    @property
    def done(self) -> bool:
        return not self.rest

    def read(self, step: dict[str, str]) -> None:
        term = self.rest.pop(0)
        ((coefficient, power),) = self.terms(step["i"]) if "i" in step else [term]
        value = number(coefficient) * self.x ** int(power)
        if "c" in step:
            left, right = step["c"].split(" = ")[1].split(" * ")
            value = number(left) * number(right)
        if "o" in step:
            value = number(step["o"])
        self.total = (self.total + value) % 10
        if "v" in step:
            self.total = int(step["v"].split()[-1])
        if "r" in step:
            self.rest = self.terms(step["r"])

    def answer(self) -> str:
        return str(self.total)


class SortingReader:
    mark = " "

    def __init__(self, question: str):
        self.rest, self.sorted = question.split(" ", 1)[1].removesuffix(" ?").split(self.mark), []

    @property
    def done(self) -> bool:
        return not self.rest

    @staticmethod
    def key(item: str) -> int:
        return int(re.sub(r"\D", "", item))

    def read(self, step: dict[str, str]) -> None:
        front = step.get("i", self.rest[0])
        output = step.get("o", sorted(self.rest, key=self.key)[0])
        place = self.rest.index(output)
        self.rest = [*self.rest[:place], front, *self.rest[place + 1 :]][1:]
        self.sorted.append(output)
        if "r" in step:
            self.rest = step["r"].split(self.mark) if step["r"] else []

    def answer(self) -> str:
        return self.mark.join(self.sorted)


class NumberSortingReader(SortingReader):
    mark = " , "


class LegoReader:
    def __init__(self, question: str):
        chain, self.target = re.fullmatch(r"If (.+) \. Then .* of (.) \?", question).groups()
        self.rest, self.name, self.value = self.clauses(chain), "1", "+"

    @staticmethod
    def clauses(text: str) -> dict[str, tuple[str, str]]:
        """By the variable of their right side: that of the left, and the sign."""
        return {base: (name, sign) for name, sign, base in re.findall(r"(\w) = (.) (\w)", text)}

    @property
    def done(self) -> bool:
        return self.name == self.target

    def read(self, step: dict[str, str]) -> None:
        name, sign = self.rest.pop(self.name)
        value = "+" if sign == self.value else "-"
        if step.get("c"):
            value = "+-"[step["c"].split(" = ")[1].count("-") % 2]
        if "o" in step:
            value = step["o"][0]
        self.name, self.value = step.get("i", name), value
        if "r" in step:
            self.rest = self.clauses(step["r"])

    def answer(self) -> str:
        return f"{self.value} 1"


READERS = {
    "addition": AdditionReader,
    "summation": SummationReader,
    "parity": ParityReader,
    "polynomial": PolynomialReader,
    "sorting": SortingReader,
    "sorting-numbers": NumberSortingReader,
    "lego": LegoReader,
    "lego-ordered": LegoReader,
}


def parse(text: str) -> tuple[list[dict[str, str]], str]:
    """The parts that each step of a text shows, and the sentence after the steps."""
    pad, answer = re.fullmatch(r"(.*?) ?(The answer is .*)", text).groups()
    shown = []
    for step in pad.split("<step>")[1:]:
        parts = re.findall(r"<(\w+)>([^<]*)", step)
        shown.append({PARTS[NAMES.index(name)]: words.strip() for name, words in parts})
    return shown, answer


def execute(task: str, question: str, text: str) -> str:
    """The answer that the steps of a text lead to, whatever answer the text itself states."""
    reader = READERS[task](question)
    for shown in parse(text)[0]:
        if reader.done:
            return "too many steps"
        reader.read(shown)
    return f"The answer is {reader.answer()} ." if reader.done else "too few steps"


@pytest.mark.parametrize("name", SCRATCHPADS)
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
            assert {"".join(step) for step in shown} == {parts}
            assert TOKENIZER.decode(TOKENIZER.encode(example.target)) == example.target
            assert execute(name, example.input, example.target) == before.target


def test_execution_uses_the_text_even_if_it_is_empty():
    """A blank output is not computed: a sum then has no digits, and a list no next word."""
    blank = " ".join(4 * ["<step> <output>"]) + " The answer is 1 ."
    (example,) = draw_examples(TASKS["addition"], (4, 4), 1, seed=3)
    assert execute("addition", example.input, blank).split() == ["The", "answer", "is", "."]
    (example,) = draw_examples(TASKS["sorting"], (4, 4), 1, seed=0)
    with pytest.raises(ValueError, match="not in list"):
        execute("sorting", example.input, blank)


WRITTEN = {  # question, answer, and steps in the order of PARTS, as the released code writes them
    "addition": (
        "Compute 9 5 3 + 4 7 ?",
        "1 0 0 0",
        ("3 , 7", "3 + 7 + carry = 10 + 0 = 10", "0", "carry : 1", "9 5 + 4"),
        ("5 , 4", "5 + 4 + carry = 9 + 1 = 10", "0", "carry : 1", "9 + 0"),
        ("9 , 0", "9 + 0 + carry = 9 + 1 = 10", "0", "carry : 1", "+"),
        ("0 , 0", "0 + 0 + carry = 0 + 1 = 1", "1", "carry : 0", "+"),
    ),
    "summation": (
        "Compute ( 5 + 7 + 9 ) % 10 ?",
        "1",
        ("5", "5 + sum = 5 + 0 =", "5", "sum : 5 = 5", "7 + 9"),
        ("7", "7 + sum = 7 + 5 =", "1 2", "sum : 1 2 = 2", "9"),
        ("9", "9 + sum = 9 + 2 =", "1 1", "sum : 1 1 = 1", ""),
    ),
    "parity": (
        "Is the number of ones even in 1 0 1 ?",
        "yes",
        ("1", "1 ** par = 1 ** 0", "1", "par : 1", "0 1"),
        ("0", "0 ** par = 0 ** 1", "1", "par : 1", "1"),
        ("1", "1 ** par = 1 ** 1", "0", "par : 0", ""),
    ),
    "polynomial": (
        "Evaluate x = - 2 in ( + 3 x ** 1 - 2 x ** 3 ) % 10 ?",
        "0",
        (
            "+ 3 x ** 1",
            "3 * - 2 ** 1 = 3 * - 2",
            "- 6",
            "sum : 0 + - 6 = 4",
            "- 2 x ** 3",
        ),
        ("- 2 x ** 3", "- 2 * - 2 ** 3 = - 2 * - 8", "1 6", "sum : 4 + 1 6 = 0", ""),
    ),
    "sorting": (
        "Sort w24 w06 ?",
        "w06 w24",
        ("w24", "The minimum of the unsorted portion", "w06", None, "w24"),
        ("w24", "The minimum of the unsorted portion", "w24", None, ""),
    ),
    "sorting-numbers": (
        "Sort 1 2 0 , 5 3 ?",
        "5 3 , 1 2 0",
        ("1 2 0", "The minimum of the unsorted portion", "5 3", None, "1 2 0"),
        ("1 2 0", "The minimum of the unsorted portion", "1 2 0", None, ""),
    ),
    "lego": (
        "If u = - b , b = - 1 , z = + u . Then , what is the value of u ?",
        "+ 1",
        ("b", "", "- 1", None, "u = - b , z = + u"),
        ("u", "- b = - - 1", "+ 1", None, "z = + u"),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_steps_by_hand(name):
    question, answer, *expected = WRITTEN[name]
    words = f"The answer is {answer} ."
    tags = [f"<{name}>" for name in NAMES]
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


QUESTIONS = {
    "addition": "Compute {} ?",
    "summation": "Compute ( {} ) % 10 ?",
    "parity": "Is the number of ones even in {} ?",
    "polynomial": "Evaluate {} ) % 10 ?",
    "sorting": "Sort {} ?",
    "lego": "If {} . Then , what is the value of u ?",
}


def test_the_page_shows_first_steps():
    page = (Path(__file__).parent.parent / "docs" / "lab.md").read_text()
    header = "| task | question | input | computation | output | variables | remaining |\n"
    table = page.split(header)[1].split("\n\n")[0]
    names = []
    for row in table.splitlines()[1:]:
        name, question, *shown = row.replace("`", "").replace("nothing", "").split("|")[1:-1]
        names.append(name.strip())
        text = QUESTIONS[names[-1]].format(question.strip().replace(" in +", " in ( +"))
        first = next(steps(names[-1], text))
        assert [first.get(letter, "") for letter in PARTS] == [words.strip() for words in shown]
    assert names == list(QUESTIONS)


RESULTS = {  # the value of a computation and the variable before -> output, variable after
    "addition": lambda value, _: (value % 10, value // 10),
    "summation": lambda value, _: (value, value % 10),
    "parity": lambda value, _: (value, value),
    "polynomial": lambda value, total: (value, (total + value) % 10),
}


@pytest.mark.parametrize("name", RESULTS)
def test_computations_and_variables_are_correct_python(name):
    for example in draw_examples(TASKS[name], (1, 16), 300, seed=2):
        variable = {"addition": "carry", "parity": "par"}.get(name, "sum")
        before = 0
        for step in steps(name, example.input):
            computation = step["c"].replace("**", "^" if name == "parity" else "**")
            sides = map(to_python, computation.removesuffix(" =").split(" = "))
            (value,) = {eval(side, {variable: before}) for side in sides}  # all sides are equal
            output, after = RESULTS[name](value, before)
            assert number(step["o"]) == output
            assert step["v"].startswith(f"{variable} : ")
            assert step["v"].endswith(f" {after}")
            sides = step["v"].partition(" : ")[2].split(" = ")
            assert {eval(to_python(side)) % 10 for side in sides} == {after}
            before = after


def to_python(words: str) -> str:
    """Digits joined to numbers; a power binds more tightly than its sign."""
    joined = re.sub(r"(?<=\d) (?=\d)", "", words)
    return re.sub(r"(- \d+) \*\*", r"(\1) **", joined)


@pytest.mark.parametrize(("name", "mark"), [("sorting", " "), ("sorting-numbers", " , ")])
def test_sorting_is_selection_sort(name, mark):
    """As in the released code: the first item takes the place of the minimum."""
    key = {"sorting": str, "sorting-numbers": lambda text: int(text.replace(" ", ""))}[name]
    for example in draw_examples(TASKS[name], (1, 16), 200, seed=2):
        values = " ".join(example.input.split()[1:-1]).split(mark)
        for start, step in enumerate(steps(name, example.input)):
            least = min(range(start, len(values)), key=lambda index: key(values[index]))
            assert step["i"] == values[start]
            values[start], values[least] = values[least], values[start]
            assert step["o"] == values[start]
            assert step["r"] == mark.join(values[start + 1 :])
        assert start == len(values) - 1
        assert f"The answer is {mark.join(values)} ." == example.target


def test_lego_follows_the_chain_to_the_target():
    for example in draw_examples(TASKS["lego"], (1, 16), 200, seed=2):
        clauses = example.input.removeprefix("If ").partition(" . ")[0].split(" , ")
        base, value = "1", 1
        for step in steps("lego", example.input):
            (clause,) = (clause for clause in clauses if clause.startswith(step["i"]))
            _, _, sign, right = clause.split()
            assert right == base
            shown = f"{sign} {base} = {sign} {value:+d}".replace("1", " 1")
            assert step["c"] == ("" if base == "1" else shown)
            clauses.remove(clause)
            assert step["r"] == " , ".join(clauses)
            base, value = step["i"], value * int(sign + "1")
            assert step["o"] == f"{value:+d}".replace("1", " 1")
        assert base == example.input.split()[-2]


DIGITS = {  # digits shown in a part that later words depend on
    ("addition", "i"): r"<input> (\d)",
    ("addition", "c"): r"(\d)(?= <step>| The)",
    ("addition", "o"): r"<output> (\d)",
    ("addition", "v"): r"carry : (\d)",
    ("addition", "r"): r"(\d)(?= \+| <step>)",
    ("summation", "i"): r"<input> (\d)",
    ("summation", "c"): r"(\d)(?= = The)",
    ("summation", "o"): r"(\d)(?= The)",
    ("summation", "v"): r"(\d)(?= The)",
    ("summation", "r"): r"<remaining> (\d)",
    ("polynomial", "o"): r"(\d)(?= The)",
    ("polynomial", "v"): r"(\d)(?= The)",
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
