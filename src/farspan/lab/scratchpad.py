"""Scratchpads: the steps to an answer, written before it, in five parts that can each be left out.

A step shows its input, the computation, its output, the variables after it, and what of the question remains. One
machine for each task makes the steps, and the same machine reads them: what a text shows is taken from the text,
what it leaves out is computed. So every scratchpad can be executed, and a wrong word that later steps build on leads
to a wrong answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from farspan.errors import FarspanError

Words = tuple[str, ...]
Step = Mapping[str, Words]  # letter of a part -> its words

PARTS = {"i": "input", "c": "computation", "o": "output", "v": "variables", "r": "remaining"}
TAGS = {letter: f"<{name}>" for letter, name in PARTS.items()}
STEP = "<step>"


@dataclass(frozen=True)
class Machine:
    """How a task is done step by step, in words."""

    begin: Callable[[Words], tuple[Words, Words]]  # question -> what remains, variables
    done: Callable[[Words, Words], bool]  # what remains, variables -> is the answer known?
    take: Callable[[Words, Words], Words]  # what remains, variables -> input of the step
    compute: Callable[[Words, Words], Words]  # input, variables -> computation
    conclude: Callable[[Words], Words]  # computation -> output
    update: Callable[[Words, Words, Words], Words]  # variables, computation, output -> variables
    rest: Callable[[Words, Words, Words], Words]  # what remains, input, output -> what remains
    answer: Callable[[list[Words], Words], Words]  # outputs, variables -> answer
    parts: str = "icovr"  # those that it has
    words: Words = ()  # those of its steps that are in no question


def parse_parts(text: str, task: str) -> str:
    """The letters of a setting, in their order: `icovr`, `input+output`, `full` (all that the task has) or `none`.

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
            f"the scratchpad of {task} has no {lacking[0]} part, and {text!r} asks for one; "
            f"choose from {machine.parts}, or full"
        )
    return letters


def _letters(text: str) -> str:
    by_name = {name: letter for letter, name in PARTS.items()}
    found = list(text) if text and set(text) <= set(PARTS) else [by_name.get(name, name) for name in text.split("+")]
    for each in found:
        if each not in PARTS:
            near = difflib.get_close_matches(each, by_name, 1)
            hint = f"the nearest is {near[0]}" if near else "write it as icovr or input+output, as full or as none"
            raise FarspanError(f"scratchpad {text!r} names the part {each!r}, which is unknown; {hint}")
    if len(set(found)) < len(found):
        raise FarspanError(f"scratchpad {text!r} names a part twice; name each once")
    return "".join(letter for letter in PARTS if letter in found)


def settings(task: str) -> list[str]:
    """Every setting of a task, from "" (the answer alone) to all its parts: 32, or 16 without variables."""
    found = [""]
    for letter in _machine(task).parts:
        found += [each + letter for each in found]
    return sorted(found, key=lambda each: (len(each), each))


def spell(task: str, question: str, target: str, parts: str) -> str:
    """The steps to the answer, showing these parts (letters), and then the target; without parts, the target alone."""
    if not parts:
        return target
    return " ".join((*(_spell_step(step, parts) for step in steps(task, question)), target))


def _spell_step(step: Step, parts: str) -> str:
    return " ".join((STEP, *(" ".join((TAGS[letter], *step[letter])) for letter in parts)))


def steps(task: str, question: str) -> Iterator[Step]:
    """The steps of a question, all parts of each."""
    machine = _machine(task)
    remaining, variables = machine.begin(tuple(question.split()))
    while not machine.done(remaining, variables):
        step = _execute(machine, {}, remaining, variables)
        remaining, variables = step["r"], step["v"]
        yield step


def _execute(machine: Machine, shown: Step, remaining: Words, variables: Words) -> Step:
    """One step: what is shown is believed, what is not is computed."""
    taken = shown["i"] if "i" in shown else machine.take(remaining, variables)
    computation = shown["c"] if "c" in shown else machine.compute(taken, variables)
    output = shown["o"] if "o" in shown else machine.conclude(computation)
    after = shown["v"] if "v" in shown else machine.update(variables, computation, output)
    left = shown["r"] if "r" in shown else machine.rest(remaining, taken, output)
    return {"i": taken, "c": computation, "o": output, "v": after, "r": left}


def parse(text: str) -> tuple[list[Step], str]:
    """The steps that a text shows, and the sentence after them.

    >>> parse("<step> <input> 3 + 7 <output> 0 The answer is 1 0 .")
    ([{'i': ('3', '+', '7'), 'o': ('0',)}], 'The answer is 1 0 .')
    """
    words = text.split()
    end = words.index("The") if "The" in words else len(words)
    letters = {tag: letter for letter, tag in TAGS.items()}
    found: list[dict[str, list[str]]] = []
    part = None
    for word in words[:end]:
        if word == STEP:
            found.append({})
            part = None
        elif word in letters and found:
            part = found[-1].setdefault(letters[word], [])
        elif part is not None:
            part.append(word)
        else:
            raise FarspanError(f"{word!r} stands outside every part of a step; a scratchpad begins with {STEP}")
    return [{letter: tuple(each) for letter, each in step.items()} for step in found], " ".join(words[end:])


def run(task: str, question: str, text: str) -> str:
    """The answer that the steps of a text lead to, as a sentence, whatever answer the text itself tells."""
    machine = _machine(task)
    shown, _ = parse(text)
    if not shown:
        raise FarspanError("a text without steps cannot be executed; ask for at least one part")
    remaining, variables = machine.begin(tuple(question.split()))
    outputs = []
    try:
        for each in shown:
            step = _execute(machine, each, remaining, variables)
            remaining, variables = step["r"], step["v"]
            outputs.append(step["o"])
        answer = machine.answer(outputs, variables)
    except (ValueError, IndexError, StopIteration):
        number = min(len(outputs) + 1, len(shown))  # an answer that cannot be read is the last step's
        raise FarspanError(f"step {number} of this {task} scratchpad cannot be executed: {dict(each)}") from None
    return " ".join(("The answer is", *answer, "."))


def _machine(task: str) -> Machine:
    if task not in MACHINES:
        raise FarspanError(f"{task} has no scratchpad; those that have one are {', '.join(MACHINES)}")
    return MACHINES[task]


def _split(words: Words, mark: str) -> list[Words]:
    """The stretches between marks: none for no words."""
    found: list[list[str]] = [[]] if words else []
    for word in words:
        if word == mark:
            found.append([])
        else:
            found[-1].append(word)
    return [tuple(each) for each in found]


def _join(items: list[Words], mark: str) -> Words:
    return tuple(word for number, item in enumerate(items) for word in ((mark, *item) if number and mark else item))


def _between(words: Words, first: str, last: str) -> Words:
    start = words.index(first) + 1
    return words[start : words.index(last, start)]


def _after(words: Words, mark: str) -> Words:
    """What follows the last such mark."""
    return words[len(words) - words[::-1].index(mark) :]


def _number(words: Words) -> int:
    return int("".join(words))


def _digits(number: int) -> Words:
    return tuple(str(number))


# Addition, from the last digits to the first; the variable is what is carried.


def _last_digits(remaining: Words, variables: Words) -> Words:
    first, second = _split(remaining, "+")
    return (*(first[-1:] or ("0",)), "+", *(second[-1:] or ("0",)))


def _add_digits(taken: Words, variables: Words) -> Words:
    (first,), (second,) = _split(taken, "+")
    carry = _after(variables, "=")
    return (first, "+", second, "+", *carry, "=", *_digits(int(first) + int(second) + _number(carry)))


def _without_last_digits(remaining: Words, taken: Words, output: Words) -> Words:
    first, second = _split(remaining, "+")
    return (*first[:-1], "+", *second[:-1])


def _written_sum(outputs: list[Words], variables: Words) -> Words:
    carry = _after(variables, "=")
    return (*(carry if carry != ("0",) else ()), *_join(outputs[::-1], ""))


ADDITION = Machine(
    begin=lambda question: (question[1:-1], ("carry", "=", "0")),
    done=lambda remaining, variables: remaining == ("+",),
    take=_last_digits,
    compute=_add_digits,
    conclude=lambda computation: computation[-1:],
    update=lambda variables, computation, output: ("carry", "=", *(_after(computation, "=")[:-1] or ("0",))),
    rest=_without_last_digits,
    answer=_written_sum,
    words=("carry", "="),
)


# Summation, a digit at a time; the variable is the sum so far, which is also each step's output.

SUMMATION = Machine(
    begin=lambda question: (_between(question, "(", ")"), ("sum", "=", "0")),
    done=lambda remaining, variables: not remaining,
    take=lambda remaining, variables: remaining[:1],
    compute=lambda taken, variables: (
        *("(", *_after(variables, "="), "+", *taken, ")", "%", "10", "="),
        *_digits((_number(_after(variables, "=")) + _number(taken)) % 10),
    ),
    conclude=lambda computation: _after(computation, "="),
    update=lambda variables, computation, output: ("sum", "=", *output),
    rest=lambda remaining, taken, output: remaining[2:],
    answer=lambda outputs, variables: outputs[-1],
    words=("sum", "="),
)


# Parity, a bit at a time; the variable is the parity so far.

PARITY = Machine(
    begin=lambda question: (_between(question, "in", "?"), ("parity", "=", "even")),
    done=lambda remaining, variables: not remaining,
    take=lambda remaining, variables: remaining[:1],
    compute=lambda taken, variables: (
        *(variables[-1], "+", *taken, "="),
        "even" if (variables[-1] == "even") == (taken == ("0",)) else "odd",
    ),
    conclude=lambda computation: computation[-1:],
    update=lambda variables, computation, output: ("parity", "=", *output),
    rest=lambda remaining, taken, output: remaining[1:],
    answer=lambda outputs, variables: ("yes" if outputs[-1] == ("even",) else "no",),
    words=("parity", "=", "+", "odd"),
)


# Polynomials, a term at a time; the variables are x and the sum of the terms so far, modulo 10.


def _evaluate_term(taken: Words, variables: Words) -> Words:
    sign, coefficient, _x, _power, power = taken
    x = _split(variables, ",")[0][2:]
    value = int(f"{sign}{coefficient}") * _number(x) ** int(power)
    return (sign, coefficient, "*", "(", *x, ")", "**", power, "=", *_digits(value))


def _add_term(variables: Words, computation: Words, output: Words) -> Words:
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
    conclude=lambda computation: _after(computation, "="),
    update=_add_term,
    rest=lambda remaining, taken, output: remaining[5:],
    answer=lambda outputs, variables: _after(variables, "="),
    words=("*", "sum", ","),
)


# Sorting: the least of what remains, found by the least so far at each place; there are no variables.


def _in_order(item: Words) -> tuple[int, Words]:
    """Symbols, of one word, by name; numbers by value: they have no leading zeros, so fewer digits are less."""
    return len(item), item


def _sorting(mark: str) -> Machine:
    def items(words: Words) -> list[Words]:
        return _split(words, mark) if mark else [(word,) for word in words]

    def least_so_far(taken: Words, variables: Words) -> Words:
        found = items(taken)
        return _join([min(found[: number + 1], key=_in_order) for number in range(len(found))], mark)

    def without(remaining: Words, taken: Words, output: Words) -> Words:
        found = items(remaining)
        found.remove(output)
        return _join(found, mark)

    return Machine(
        begin=lambda question: (question[1:-1], ()),
        done=lambda remaining, variables: not remaining,
        take=lambda remaining, variables: remaining,
        compute=least_so_far,
        conclude=lambda computation: items(computation)[-1],
        update=lambda variables, computation, output: (),
        rest=without,
        answer=lambda outputs, variables: _join(outputs, mark),
        parts="icor",
    )


# LEGO: the clause that builds on what is known, up to the variable that is asked for. What a step found is its output,
# so there is no variables part; the machine itself remembers the variable that is asked for, and the last one found.


def _next_clause(remaining: Words, known: Words) -> Words:
    base = known[1] if len(known) > 1 else "1"
    return next(clause for clause in _split(remaining, ",") if clause[-1] == base)


def _resolve(taken: Words, known: Words) -> Words:
    name, equals, sign, _base = taken
    before = known[2] if len(known) > 1 else "+"
    return (name, equals, sign, "(", before, "1", ")", "=", "+" if sign == before else "-", "1")


def _without_clause(remaining: Words, taken: Words, output: Words) -> Words:
    clauses = _split(remaining, ",")
    clauses.remove(taken)
    return _join(clauses, ",")


LEGO = Machine(
    begin=lambda question: (_between(question, "If", "."), (question[-2],)),
    done=lambda remaining, known: len(known) > 1 and known[0] == known[1],
    take=_next_clause,
    compute=_resolve,
    conclude=lambda computation: (computation[0], *computation[-3:]),
    update=lambda known, computation, output: (known[0], output[0], output[2]),
    rest=_without_clause,
    answer=lambda outputs, known: outputs[-1][-2:],
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
VOCABULARY: Words = (STEP, *TAGS.values(), *(word for machine in MACHINES.values() for word in machine.words))
