"""Scratchpads: the steps to an answer, written before it, in five optional parts.

A step shows its input, the computation, its output, the variables after it, and what remains of the
question. One machine per task makes the steps. Each part follows from what a reader of the earlier
ones knows, so that a scratchpad with any choice of parts can be executed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from farspan.errors import FarspanError

Tokens = tuple[str, ...]
Step = Mapping[str, Tokens]  # letter of a part -> its words

PARTS = {"i": "input", "c": "computation", "o": "output", "v": "variables", "r": "remaining"}
TAGS = {letter: f"<{name}>" for letter, name in PARTS.items()}
STEP = "<step>"


@dataclass(frozen=True)
class Machine:
    """How a task is solved step by step, as functions of words."""

    begin: Callable[[Tokens], tuple[Tokens, Tokens]]  # question -> remaining, variables
    done: Callable[[Tokens, Tokens], bool]  # remaining, variables -> is the answer known?
    take: Callable[[Tokens, Tokens], Tokens]  # remaining, variables -> input of the step
    compute: Callable[[Tokens, Tokens], Tokens]  # input, variables -> computation
    conclude: Callable[[Tokens, Tokens], Tokens]  # computation, remaining -> output
    update: Callable[[Tokens, Tokens, Tokens], Tokens]  # variables, computation, output -> updated
    rest: Callable[[Tokens, Tokens, Tokens], Tokens]  # remaining, input, output -> remaining
    parts: str = "icovr"  # the parts that its steps have
    words: Tokens = ()  # words of its steps that occur in no question


def parse_parts(text: str, task: str) -> str:
    """The letters of a setting, in order: `icovr`, `input+output`, `full` (all parts) or `none`.

    >>> parse_parts("output+input", "addition")
    'io'
    """
    if text == "none":
        return ""
    machine = _machine(task)
    if text == "full":
        return machine.parts
    letters = _letters(text)
    lacking = [PARTS[letter] for letter in letters if letter not in machine.parts]
    if lacking:
        raise FarspanError(
            f"the scratchpad of {task} has no {lacking[0]} part, which {text!r} names; "
            f"choose from {machine.parts}, or full"
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
    letters, parts = _letters(text), _machine(task).parts
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
    return " ".join((STEP, *(" ".join((TAGS[letter], *step[letter])) for letter in parts)))


def steps(task: str, question: str) -> Iterator[Step]:
    """The steps of a question, with all their parts."""
    machine = _machine(task)
    remaining, variables = machine.begin(tuple(question.split()))
    while not machine.done(remaining, variables):
        taken = machine.take(remaining, variables)
        computation = machine.compute(taken, variables)
        output = machine.conclude(computation, remaining)
        variables = machine.update(variables, computation, output)
        remaining = machine.rest(remaining, taken, output)
        yield {"i": taken, "c": computation, "o": output, "v": variables, "r": remaining}


def _machine(task: str) -> Machine:
    if task not in MACHINES:
        raise FarspanError(f"{task} has no scratchpad; choose one of {', '.join(MACHINES)}")
    return MACHINES[task]


def _split(words: Tokens, mark: str) -> list[Tokens]:
    """The sequences between marks; an empty list for no words."""
    items: list[list[str]] = [[]] if words else []
    for word in words:
        if word == mark:
            items.append([])
        else:
            items[-1].append(word)
    return [tuple(item) for item in items]


def _join(items: list[Tokens], mark: str) -> Tokens:
    return tuple(
        word
        for number, item in enumerate(items)
        for word in ((mark, *item) if number and mark else item)
    )


def _between(words: Tokens, first: str, last: str) -> Tokens:
    start = words.index(first) + 1
    return words[start : words.index(last, start)]


def _after(words: Tokens, mark: str) -> Tokens:
    """The words after the last mark."""
    return words[len(words) - words[::-1].index(mark) :]


def _number(words: Tokens) -> int:
    return int("".join(words))


def _digits(number: int) -> Tokens:
    return tuple(str(number))


# Addition, from the last digits to the first; the variable is the carry.


def _last_digits(remaining: Tokens, variables: Tokens) -> Tokens:
    first, second = _split(remaining, "+")
    return (*(first[-1:] or ("0",)), "+", *(second[-1:] or ("0",)))


def _add_digits(taken: Tokens, variables: Tokens) -> Tokens:
    (first,), (second,) = _split(taken, "+")
    carry = _after(variables, "=")
    total = _digits(int(first) + int(second) + _number(carry))
    return (first, "+", second, "+", *carry, "=", *total)


def _without_last_digits(remaining: Tokens, taken: Tokens, output: Tokens) -> Tokens:
    first, second = _split(remaining, "+")
    return (*first[:-1], "+", *second[:-1])


ADDITION = Machine(
    begin=lambda question: (question[1:-1], ("carry", "=", "0")),
    done=lambda remaining, variables: remaining == ("+",),
    take=_last_digits,
    compute=_add_digits,
    conclude=lambda computation, remaining: computation[-1:],
    update=lambda variables, computation, output: (
        "carry",
        "=",
        *(_after(computation, "=")[:-1] or ("0",)),
    ),
    rest=_without_last_digits,
    words=("carry", "="),
)


# Summation, a digit at a time; the variable is the running sum, which is also each step's output.

SUMMATION = Machine(
    begin=lambda question: (_between(question, "(", ")"), ("sum", "=", "0")),
    done=lambda remaining, variables: not remaining,
    take=lambda remaining, variables: remaining[:1],
    compute=lambda taken, variables: (
        *("(", *_after(variables, "="), "+", *taken, ")", "%", "10", "="),
        *_digits((_number(_after(variables, "=")) + _number(taken)) % 10),
    ),
    conclude=lambda computation, remaining: _after(computation, "="),
    update=lambda variables, computation, output: ("sum", "=", *output),
    rest=lambda remaining, taken, output: remaining[2:],
    words=("sum", "="),
)


# Parity, a bit at a time; the variable is the running parity.

PARITY = Machine(
    begin=lambda question: (_between(question, "in", "?"), ("parity", "=", "even")),
    done=lambda remaining, variables: not remaining,
    take=lambda remaining, variables: remaining[:1],
    compute=lambda taken, variables: (
        *(variables[-1], "+", *taken, "="),
        "even" if (variables[-1] == "even") == (taken == ("0",)) else "odd",
    ),
    conclude=lambda computation, remaining: computation[-1:],
    update=lambda variables, computation, output: ("parity", "=", *output),
    rest=lambda remaining, taken, output: remaining[1:],
    words=("parity", "=", "+", "odd"),
)


# Polynomials, a term at a time; the variables are x and the running sum of the terms, modulo 10.


def _evaluate_term(taken: Tokens, variables: Tokens) -> Tokens:
    sign, coefficient, _x, _power, power = taken
    x = _split(variables, ",")[0][2:]
    value = int(f"{sign}{coefficient}") * _number(x) ** int(power)
    return (sign, coefficient, "*", "(", *x, ")", "**", power, "=", *_digits(value))


def _add_term(variables: Tokens, computation: Tokens, output: Tokens) -> Tokens:
    x, total = _split(variables, ",")
    return (*x, ",", "sum", "=", *_digits((_number(total[2:]) + _number(output)) % 10))


POLYNOMIAL = Machine(
    begin=lambda question: (
        _between(question, "(", ")"),
        ("x", "=", *_between(question, "=", "in"), ",", "sum", "=", "0"),
    ),
    done=lambda remaining, variables: not remaining,
    take=lambda remaining, variables: remaining[:5],
    compute=_evaluate_term,
    conclude=lambda computation, remaining: _after(computation, "="),
    update=_add_term,
    rest=lambda remaining, taken, output: remaining[5:],
    words=("*", "sum", ","),
)


# Sorting by selection: each step outputs the minimum of what remains and puts the first item in its
# place. A step's input is that first item; its computation only says what is computed.


def _sort_key(item: Tokens) -> tuple[int, Tokens]:
    """Symbols sort by name, numbers by value: without leading zeros, fewer digits are less."""
    return len(item), item


def _sorting(mark: str) -> Machine:
    def items(words: Tokens) -> list[Tokens]:
        return _split(words, mark) if mark else [(word,) for word in words]

    def without_output(remaining: Tokens, taken: Tokens, output: Tokens) -> Tokens:
        values = items(remaining)
        values[values.index(output)] = taken
        return _join(values[1:], mark)

    return Machine(
        begin=lambda question: (question[1:-1], ()),
        done=lambda remaining, variables: not remaining,
        take=lambda remaining, variables: items(remaining)[0],
        compute=lambda taken, variables: ("minimum",),
        conclude=lambda computation, remaining: min(items(remaining), key=_sort_key),
        update=lambda variables, computation, output: (),
        rest=without_output,
        parts="icor",
        words=("minimum",),
    )


# LEGO: each step resolves the clause that uses the last result, up to the target variable. The
# result is the step's output, so there is no variables part. The machine's variables are the
# target, then the name and the sign of the last result, at first those of + 1.


def _next_clause(remaining: Tokens, variables: Tokens) -> Tokens:
    return next(clause for clause in _split(remaining, ",") if clause[-1] == variables[1])


def _resolve(taken: Tokens, variables: Tokens) -> Tokens:
    name, equals, sign, _base = taken
    before = variables[2]
    return (name, equals, sign, "(", before, "1", ")", "=", "+" if sign == before else "-", "1")


def _without_clause(remaining: Tokens, taken: Tokens, output: Tokens) -> Tokens:
    clauses = _split(remaining, ",")
    clauses.remove(taken)
    return _join(clauses, ",")


LEGO = Machine(
    begin=lambda question: (_between(question, "If", "."), (question[-2], "1", "+")),
    done=lambda remaining, variables: variables[0] == variables[1],
    take=_next_clause,
    compute=_resolve,
    conclude=lambda computation, remaining: (computation[0], *computation[-3:]),
    update=lambda variables, computation, output: (variables[0], output[0], output[2]),
    rest=_without_clause,
    parts="icor",
    words=("(", ")"),
)

MACHINES: dict[str, Machine] = {
    "addition": ADDITION,
    "summation": SUMMATION,
    "parity": PARITY,
    "polynomial": POLYNOMIAL,
    "sorting": _sorting(""),
    "sorting-numbers": _sorting(","),
    "lego": LEGO,
    "lego-ordered": LEGO,
}
VOCABULARY: Tokens = (
    STEP,
    *TAGS.values(),
    *(word for machine in MACHINES.values() for word in machine.words),
)
