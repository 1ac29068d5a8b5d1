"""Scratchpads: the steps to an answer, written before it, in five optional parts.

A step shows its input, the computation, its output, the variables after it, and what remains of the
question. The steps are those of Kazemnejad 2023's released code, as its configs run it; docs/lab.md
lists the differences. Each part follows from the question and the earlier parts, so a scratchpad
with any choice of parts can be executed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from farspan.errors import FarspanError
from farspan.lab.tasks import digits

Step = Mapping[str, str]  # letter of a part -> its words

PARTS = {"i": "input", "c": "computation", "o": "output", "v": "variables", "r": "remaining"}
TAGS = {letter: f"<{name}>" for letter, name in PARTS.items()}
STEP = "<step>"


@dataclass(frozen=True)
class Scratchpad:
    """How a task is solved step by step."""

    steps: Callable[[str], Iterator[Step]]  # of a question
    parts: str = "icovr"  # the parts that its steps have
    words: tuple[str, ...] = ()  # words of its steps that occur in no question


def parse_parts(text: str, task: str) -> str:
    """The letters of a setting, in order: `icovr`, `input+output`, `full` (all parts) or `none`.

    >>> parse_parts("output+input", "addition")
    'io'
    """
    if text == "none":
        return ""
    parts = _scratchpad(task).parts
    if text == "full":
        return parts
    letters = _letters(text)
    lacking = [PARTS[letter] for letter in letters if letter not in parts]
    if lacking:
        raise FarspanError(
            f"the scratchpad of {task} has no {lacking[0]} part, which {text!r} names; "
            f"choose from {parts}, or full"
        )
    return letters


def task_format(text: str, task: str) -> str:
    """The setting of a study as one of its tasks writes it: without the parts that the task lacks.

    >>> task_format("icovr", "sorting")
    'icor'
    """
    if text in ("none", "full"):
        parse_parts(text, task)
        return text
    letters, parts = _letters(text), _scratchpad(task).parts
    shared = "".join(letter for letter in letters if letter in parts)
    if not shared:
        parse_parts(text, task)  # raises an error
    return text if shared == letters else shared


def _letters(text: str) -> str:
    by_name = {name: letter for letter, name in PARTS.items()}
    if text and set(text) <= set(PARTS):
        letters = list(text)
    else:
        letters = [by_name.get(name, name) for name in text.split("+")]
    for letter in letters:
        if letter not in PARTS:
            near = difflib.get_close_matches(letter, by_name, 1)
            usage = "write it as icovr or input+output, as full or as none"
            hint = f"did you mean {near[0]}?" if near else usage
            raise FarspanError(f"scratchpad {text!r} has an unknown part {letter!r}; {hint}")
    if len(set(letters)) < len(letters):
        raise FarspanError(f"scratchpad {text!r} names a part twice; name it once")
    return "".join(letter for letter in PARTS if letter in letters)


def write_scratchpad(task: str, question: str, target: str, parts: str) -> str:
    """The steps to the answer, showing these parts (letters), then the target."""
    if not parts:
        return target
    return " ".join((*(_write_step(step, parts) for step in steps(task, question)), target))


def _write_step(step: Step, parts: str) -> str:
    shown = (f"{TAGS[letter]} {step[letter]}".rstrip() for letter in parts)
    return " ".join((STEP, *shown))


def steps(task: str, question: str) -> Iterator[Step]:
    """The steps of a question, with all their parts."""
    return _scratchpad(task).steps(question)


def _scratchpad(task: str) -> Scratchpad:
    if task not in SCRATCHPADS:
        raise FarspanError(f"{task} has no scratchpad; choose one of {', '.join(SCRATCHPADS)}")
    return SCRATCHPADS[task]


def _between(text: str, before: str, after: str) -> str:
    return text.split(before, 1)[1].split(after, 1)[0]


def _addition(question: str) -> Iterator[Step]:
    """From the last digits to the first. A carry that is left gets a step of its own."""
    operands = [text.split() for text in _between(question, "Compute ", " ?").split(" + ")]
    columns, place, carry = max(map(len, operands)), 0, 0
    while place < columns or carry:
        place += 1
        first, second = (int(n[-place]) if place <= len(n) else 0 for n in operands)
        total = first + second + carry
        blank = "0" if place < columns else ""
        yield {
            "i": f"{first} , {second}",
            "c": f"{first} + {second} + carry = {first + second} + {carry} = {total}",
            "o": f"{total % 10}",
            "v": f"carry : {total // 10}",
            "r": " + ".join(" ".join(n[:-place]) or blank for n in operands).strip(),
        }
        carry = total // 10


def _summation(question: str) -> Iterator[Step]:
    numbers, total = _between(question, "( ", " )").split(" + "), 0
    for place, number in enumerate(numbers, 1):
        output = int(number) + total
        yield {
            "i": number,
            "c": f"{number} + sum = {number} + {total} =",
            "o": digits(output),
            "v": f"sum : {digits(output)} = {output % 10}",
            "r": " + ".join(numbers[place:]),
        }
        total = output % 10


def _parity(question: str) -> Iterator[Step]:
    """`**` stands for XOR; 1 is odd."""
    bits, parity = _between(question, " in ", " ?").split(), 0
    for place, bit in enumerate(bits, 1):
        output = int(bit) ^ parity
        yield {
            "i": bit,
            "c": f"{bit} ** par = {bit} ** {parity}",
            "o": f"{output}",
            "v": f"par : {output}",
            "r": " ".join(bits[place:]),
        }
        parity = output


def _polynomial(question: str) -> Iterator[Step]:
    x, words = _between(question, "x = ", " in "), _between(question, "( ", " )").split()
    total = 0
    while words:
        term, words = words[:5], words[5:]  # + 3 x ** 2
        coefficient, power = int(term[0] + term[1]), int(term[4])
        factor = int(x.replace(" ", "")) ** power
        output = coefficient * factor
        after = (total + output) % 10
        yield {
            "i": " ".join(term),
            "c": f"{digits(coefficient)} * {x} ** {power} = "
            f"{digits(coefficient)} * {digits(factor)}",
            "o": digits(output),
            "v": f"sum : {total} + {digits(output)} = {after}",
            "r": " ".join(words),
        }
        total = after


def _sorting(question: str, mark: str) -> Iterator[Step]:
    """Selection sort: the first item takes the place of the minimum, which is the output."""
    items = question.removeprefix("Sort ").removesuffix(" ?").split(mark)
    while items:
        # Symbols sort by name, numbers by value: without leading zeros, fewer digits are less.
        first, least = items[0], min(items, key=lambda item: (len(item), item))
        items[items.index(least)] = first
        del items[0]
        yield {"i": first, "c": MINIMUM, "o": least, "r": mark.join(items)}


def _lego(question: str) -> Iterator[Step]:
    """Along the chain from the clause of 1 to the variable that is asked for."""
    clauses = _between(question, "If ", " . ").split(" , ")
    by_base = {clause.split()[-1]: clause for clause in clauses}
    target, name, value = question.split()[-2], "1", 1
    while name != target:
        base, before, clause = name, value, by_base[name]
        name, _, sign, _ = clause.split()
        value = before if sign == "+" else -before
        clauses.remove(clause)
        yield {
            "i": name,
            "c": f"{sign} {base} = {sign} {_signed(before)}" if base != "1" else "",
            "o": _signed(value),
            "r": " , ".join(clauses),
        }


def _signed(value: int) -> str:
    return "+ 1" if value > 0 else "- 1"


MINIMUM = "The minimum of the unsorted portion"  # the computation only says what is computed
TWO_DIGITS = tuple(map(str, range(10, 20)))  # sums of a column, each a word

SCRATCHPADS: dict[str, Scratchpad] = {
    "addition": Scratchpad(_addition, words=(",", "carry", "=", ":", *TWO_DIGITS)),
    "summation": Scratchpad(_summation, words=("sum", "=", ":")),
    "parity": Scratchpad(_parity, words=("**", "par", "=", ":")),
    "polynomial": Scratchpad(_polynomial, words=("*", "sum", ":")),
    "sorting": Scratchpad(partial(_sorting, mark=" "), "icor", tuple(MINIMUM.split())),
    "sorting-numbers": Scratchpad(partial(_sorting, mark=" , "), "icor", tuple(MINIMUM.split())),
    "lego": Scratchpad(_lego, "icor"),
    "lego-ordered": Scratchpad(_lego, "icor"),
}
VOCABULARY = (
    STEP,
    *TAGS.values(),
    *(word for scratchpad in SCRATCHPADS.values() for word in scratchpad.words),
)
