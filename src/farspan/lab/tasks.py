"""The tasks of paper B, each a pure function of a length and a random generator, and how examples are drawn from them.

An example is text of words with single spaces between them, and each word is one symbol of its task. Numbers are
written digit by digit, for digits are what those tasks are about. What a length counts is said at each task.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

from farspan.errors import FarspanError, nearest
from farspan.lab import pcfg, scan
from farspan.lab.scratchpad import parse_parts, spell

log = logging.getLogger(__name__)

Range = tuple[int, int]  # both ends included


@dataclass(frozen=True)
class Example:
    input: str
    target: str
    length: int


@dataclass(frozen=True)
class Task:
    """A kind of question whose answer can be computed, at any length."""

    name: str
    train: Range  # lengths to train on
    test: Range  # lengths beyond
    make: Callable[[int, np.random.Generator], Example]  # an example of exactly that length
    count: Callable[[int], float]  # how many distinct examples a length has; 0: none
    vocabulary: tuple[str, ...]  # every word that an input or a target can hold
    counts: str  # what its length counts


DIGITS = tuple("0123456789")
SYMBOLS = tuple(f"w{number:02d}" for number in range(1, 51))  # in their order, for sorting
ANSWER = ("The", "answer", "is", ".")


def answer(words: Iterable[str]) -> str:
    """The sentence that tells an answer."""
    return " ".join(("The answer is", *words, "."))


def digits(number: int) -> str:
    """A number as text, digit by digit: -12 -> `- 1 2`."""
    return " ".join(str(number))


# Copying and reversing: a list of symbols, or of numbers, and what becomes of it. Length: symbols, or numbers.


def _symbols(length: int, rng: np.random.Generator) -> list[str]:
    return [SYMBOLS[index] for index in rng.integers(len(SYMBOLS), size=length)]


def _copy(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    return Example(f"Copy {' '.join(words)} .", " ".join(words), length)


def _copy_repeat(length: int, rng: np.random.Generator) -> Example:
    """One symbol again and again: nothing tells the places apart, so the model has to count."""
    words = _symbols(1, rng) * length
    return Example(f"Copy {' '.join(words)} .", " ".join(words), length)


def _copy_replace(length: int, rng: np.random.Generator) -> Example:
    """Each symbol becomes the one after it in the alphabet; the last becomes the first."""
    words = _symbols(length, rng)
    partners = dict(zip(SYMBOLS, SYMBOLS[1:] + SYMBOLS[:1], strict=True))
    return Example(f"Replace {' '.join(words)} .", " ".join(partners[word] for word in words), length)


def _copy_double(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    return Example(f"Double {' '.join(words)} .", " ".join(words + words), length)


def _reverse(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    return Example(f"Reverse {' '.join(words)} .", " ".join(words[::-1]), length)


TO_REVERSE = range(10, 100)
TO_SORT = range(10, 10_000)


def _numbers(length: int, rng: np.random.Generator, among: range) -> list[int]:
    return rng.integers(among.start, among.stop, size=length).tolist()


def listed(numbers: Sequence[int]) -> str:
    """[53, 120] -> `5 3 , 1 2 0`."""
    return " , ".join(map(digits, numbers))


def _reverse_numbers(length: int, rng: np.random.Generator) -> Example:
    """The order of the numbers turns, that of their digits does not."""
    numbers = _numbers(length, rng, TO_REVERSE)
    return Example(f"Reverse {listed(numbers)} .", listed(numbers[::-1]), length)


# Arithmetic. Length: digits of the longer operand; terms; bits.


def _addition(length: int, rng: np.random.Generator) -> Example:
    """One operand has all the digits, the other as many or fewer; which comes first is up to chance."""
    pair = _number(length, rng), _number(int(rng.integers(1, length + 1)), rng)
    first, second = pair if rng.integers(2) else pair[::-1]
    return Example(f"Compute {digits(first)} + {digits(second)} ?", answer([digits(first + second)]), length)


def _number(size: int, rng: np.random.Generator) -> int:
    """A number of exactly so many digits, all equally likely; 0 has one."""
    written = rng.integers(10, size=size)
    if size > 1 and not written[0]:
        written[0] = rng.integers(1, 10)
    return int("".join(map(str, written.tolist())))


def _additions(length: int) -> int:
    """Pairs of numbers the longer of which has so many digits."""
    shorter = 10 ** (length - 1) if length > 1 else 0
    return 10 ** (2 * length) - shorter**2


def _polynomial(length: int, rng: np.random.Generator) -> Example:
    """Coefficients −3 … 3, powers 0 … 3, x from −2 to 2, modulo 10 as Python has it: never negative."""
    x = int(rng.integers(-2, 3))
    pairs = list(zip(rng.integers(-3, 4, size=length).tolist(), rng.integers(4, size=length).tolist(), strict=True))
    terms = " ".join(f"{'-' if c < 0 else '+'} {abs(c)} x ** {power}" for c, power in pairs)
    value = sum(c * x**power for c, power in pairs) % 10
    return Example(f"Evaluate x = {digits(x)} in ( {terms} ) % 10 ?", answer([digits(value)]), length)


def _summation(length: int, rng: np.random.Generator) -> Example:
    numbers = rng.integers(1, 10, size=length).tolist()
    return Example(f"Compute ( {' + '.join(map(str, numbers))} ) % 10 ?", answer([digits(sum(numbers) % 10)]), length)


def _parity(length: int, rng: np.random.Generator) -> Example:
    bits = rng.integers(2, size=length).tolist()
    even = "no" if sum(bits) % 2 else "yes"
    return Example(f"Is the number of ones even in {' '.join(map(str, bits))} ?", answer([even]), length)


# Sorting. Length: symbols, or numbers.


def _sorting(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    return Example(f"Sort {' '.join(words)} ?", answer(sorted(words)), length)


def _sorting_numbers(length: int, rng: np.random.Generator) -> Example:
    numbers = _numbers(length, rng, TO_SORT)
    return Example(f"Sort {listed(numbers)} ?", answer([listed(sorted(numbers))]), length)


# LEGO: a chain of variables, each plus or minus the one before it. Length: clauses.


def _lego(length: int, rng: np.random.Generator, shuffled: bool) -> Example:
    """The value of a variable in the chain's second half, so that it cannot be read off the chain's beginning."""
    if length > len(ascii_lowercase):
        raise FarspanError(f"lego has a letter for each clause, 26 at most, and {length} were asked for")
    names = [ascii_lowercase[index] for index in rng.permutation(len(ascii_lowercase))[:length]]
    signs = rng.integers(2, size=length) * 2 - 1
    clauses = [
        f"{name} = {'+' if sign > 0 else '-'} {before}"
        for name, sign, before in zip(names, signs, ("1", *names), strict=False)
    ]
    asked = int(rng.integers(length // 2, length))
    value = int(signs[: asked + 1].prod())
    order = rng.permutation(length) if shuffled else range(length)
    told = " , ".join(clauses[index] for index in order)
    question = f"If {told} . Then , what is the value of {names[asked]} ?"
    return Example(question, answer(["+ 1" if value > 0 else "- 1"]), length)


def _legos(length: int, shuffled: bool) -> int:
    """Chains: their letters and signs, the variables that can be asked for, and the orders they can be told in."""
    if length > len(ascii_lowercase):
        return 0
    chains = math.perm(len(ascii_lowercase), length) * 2**length * (length - length // 2)
    return chains * math.factorial(length) if shuffled else chains


# Languages. Length: actions of SCAN; functions of PCFG SET.


@cache
def _scan_by_length() -> Mapping[int, tuple[tuple[str, str], ...]]:
    """Every command with its actions, by the number of actions."""
    found: dict[int, list[tuple[str, str]]] = {}
    for command in scan.commands():
        actions = scan.actions(command)
        found.setdefault(len(actions), []).append((command, " ".join(actions)))
    return {length: tuple(pairs) for length, pairs in sorted(found.items())}


def _scan(length: int, rng: np.random.Generator) -> Example:
    pairs = _scan_by_length().get(length)
    if not pairs:
        known = ", ".join(map(str, _scan_by_length()))
        raise FarspanError(f"no command of scan has {length} actions; there are commands with {known}")
    command, actions = pairs[rng.integers(len(pairs))]
    return Example(command, actions, length)


def _scans(length: int) -> int:
    return len(_scan_by_length().get(length, ()))


def _pcfg(length: int, rng: np.random.Generator) -> Example:
    text, value = pcfg.expression(length, rng)
    return Example(text, " ".join(value), length)


def _pcfgs(length: int) -> float:
    return math.inf if 1 <= length <= pcfg.LONGEST_INPUT - pcfg.ARGUMENT[0] else 0


def _powers(base: int) -> Callable[[int], float]:
    return lambda length: base**length


_LISTS: tuple[Range, Range] = (2, 20), (21, 40)
_SHORT: tuple[Range, Range] = (1, 8), (9, 16)
_LISTED = _powers(len(SYMBOLS))
_ADDED = ("Compute", "+", "?", *DIGITS, *ANSWER)
_EVALUATED = ("Evaluate", "x", "=", "in", "(", ")", "+", "-", "**", "%", "10", "?", *DIGITS, *ANSWER)
_SUMMED = ("Compute", "(", "+", ")", "%", "10", "?", *DIGITS, *ANSWER)
_COUNTED = ("Is", "the", "number", "of", "ones", "even", "in", "0", "1", "?", "yes", "no", *ANSWER)
_CHAINED = ("If", "=", "+", "-", "1", ",", "Then", "what", "is", "the", "value", "of", "?", *ascii_lowercase, *ANSWER)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("copy", *_LISTS, _copy, _LISTED, ("Copy", *SYMBOLS, "."), "symbols"),
        Task("copy-repeat", *_LISTS, _copy_repeat, lambda _: len(SYMBOLS), ("Copy", *SYMBOLS, "."), "symbols"),
        Task("copy-replace", *_LISTS, _copy_replace, _LISTED, ("Replace", *SYMBOLS, "."), "symbols"),
        Task("copy-double", *_LISTS, _copy_double, _LISTED, ("Double", *SYMBOLS, "."), "symbols"),
        Task("reverse", *_LISTS, _reverse, _LISTED, ("Reverse", *SYMBOLS, "."), "symbols"),
        Task(
            "reverse-numbers",
            *_LISTS,
            _reverse_numbers,
            _powers(len(TO_REVERSE)),
            ("Reverse", *DIGITS, ",", "."),
            "numbers",
        ),
        Task("addition", *_SHORT, _addition, _additions, _ADDED, "digits of the longer operand"),
        Task("polynomial", *_SHORT, _polynomial, lambda length: 5 * 28**length, _EVALUATED, "terms"),
        Task("sorting", *_SHORT, _sorting, _LISTED, ("Sort", *SYMBOLS, "?", *ANSWER), "symbols"),
        Task(
            "sorting-numbers",
            *_SHORT,
            _sorting_numbers,
            _powers(len(TO_SORT)),
            ("Sort", *DIGITS, ",", "?", *ANSWER),
            "numbers",
        ),
        Task("summation", *_SHORT, _summation, _powers(9), _SUMMED, "digits"),
        Task("parity", *_SHORT, _parity, _powers(2), _COUNTED, "bits"),
        Task("lego", *_SHORT, partial(_lego, shuffled=True), partial(_legos, shuffled=True), _CHAINED, "clauses"),
        Task(
            "lego-ordered",
            *_SHORT,
            partial(_lego, shuffled=False),
            partial(_legos, shuffled=False),
            _CHAINED,
            "clauses",
        ),
        Task("scan", (1, 25), (26, 48), _scan, _scans, scan.VOCABULARY, "actions"),
        Task("pcfg", (1, 8), (9, 35), _pcfg, _pcfgs, pcfg.VOCABULARY, "functions"),
    )
}


def find_task(name: str) -> Task:
    """The task of that name; one that is unknown is answered with the nearest."""
    if name in TASKS:
        return TASKS[name]
    raise FarspanError(f"task {name!r} is unknown; {nearest(name, TASKS)}")


class Splits(NamedTuple):
    """No input is in two of these, or twice in one."""

    train: list[Example]
    held_out: list[Example]  # of the lengths that are trained on
    beyond: list[Example]  # longer


HELD_OUT = 0.1  # of the distinct examples of a length, at most: the shortest lengths have few, and training needs them


def draw(
    task: Task,
    lengths: Range,
    n: int,
    seed: int,
    *,
    scratchpad: str | None = None,
    apart_from: Iterable[Example] = (),
) -> list[Example]:
    """n distinct examples, as many of each length as of every other, or all that a length has; in random order.

    A function of its arguments alone. Where fewer distinct examples exist, all of them are returned, with a warning.
    `scratchpad` is a setting such as "icovr", "input+output" or "full": then targets begin with the steps.

    >>> draw(TASKS["addition"], (1, 8), 100_000, seed=0)
    """
    apart = {example.input: example.length for example in apart_from}
    taken = Counter(apart.values())
    room = {length: task.count(length) - taken[length] for length in _existing(task, lengths)}
    return _draw(task, room, n, seed, scratchpad, apart)


def splits(
    task: Task,
    train_n: int,
    test_n: int,
    seed: int,
    *,
    train: Range | None = None,
    test: Range | None = None,
    scratchpad: str | None = None,
) -> Splits:
    """`train_n` examples to train on, `test_n` others of the same lengths, and `test_n` of the longer ones.

    Of each length at most a tenth is held out. Parity up to length 8 has 510 distinct examples in all; SCAN up to 25
    actions has 17,774, of which paper B trained on 15,997, nine tenths. (SCAN's authors cut at 22 actions.)
    """
    train, test = train or task.train, test or task.test
    if test[0] <= train[1]:
        log.warning(
            "%s is trained on lengths %d to %d and tested on %d to %d, which are not all longer: such a test does not "
            "show how the task generalises to longer inputs",
            *(task.name, *train, *test),
        )
    # No float holds the number of long examples.
    few = {length: min(task.count(length), 10**15) * HELD_OUT for length in _existing(task, train)}
    held_out = _draw(task, few, test_n, seed, scratchpad, {})
    trained = draw(task, train, train_n, seed, scratchpad=scratchpad, apart_from=held_out)
    beyond = draw(task, test, test_n, seed, scratchpad=scratchpad, apart_from=[*held_out, *trained])
    return Splits(trained, held_out, beyond)


def _existing(task: Task, lengths: Range) -> list[int]:
    """The lengths of a range that the task has examples of."""
    low, high = lengths
    if not 1 <= low <= high:
        raise FarspanError(f"lengths {low}:{high} are no range; write the shortest first, from 1 on, as in 2:20")
    found = [length for length in range(low, high + 1) if task.count(length) > 0]
    if not found:
        raise FarspanError(
            f"{task.name} has no example of {low} to {high} {task.counts}; "
            f"it is trained on {task.train[0]}:{task.train[1]} and tested on {task.test[0]}:{task.test[1]}"
        )
    return found


def _draw(
    task: Task, room: Mapping[int, float], n: int, seed: int, scratchpad: str | None, apart: Container[str]
) -> list[Example]:
    """n distinct examples, balanced over the lengths, and of each length no more than there is room for."""
    if n < 1 or seed < 0:
        raise FarspanError(f"{n} examples by seed {seed} cannot be drawn; ask for at least 1, and for a seed from 0 on")
    parts = "" if scratchpad is None else parse_parts(scratchpad, task.name)
    drawn: list[Example] = []
    for length, quota in _balanced(n, room).items():
        rng = np.random.default_rng((seed, zlib.crc32(task.name.encode()), length))
        drawn += _distinct(task, length, quota, rng, apart)
    if len(drawn) < n:
        log.warning(
            "%s has %d distinct examples of %d to %d %s to give, and %d were asked for",
            *(task.name, len(drawn), min(room), max(room), task.counts, n),
        )
    if parts:
        drawn = [replace(each, target=spell(task.name, each.input, each.target, parts)) for each in drawn]
    order = np.random.default_rng((seed, zlib.crc32(task.name.encode()))).permutation(len(drawn))
    return [drawn[index] for index in order]


def _balanced(n: int, room: Mapping[int, float]) -> dict[int, int]:
    """n dealt out evenly; what a length has no room for goes to those that have."""
    quotas = {}
    for left, (length, size) in zip(
        range(len(room), 0, -1), sorted(room.items(), key=lambda each: each[1]), strict=True
    ):
        quotas[length] = int(min(size, -(-n // left)))
        n -= quotas[length]
    return dict(sorted(quotas.items()))


def _distinct(task: Task, length: int, quota: int, rng: np.random.Generator, apart: Container[str]) -> list[Example]:
    """So many examples of one length, of which there are so many: drawing goes on until they are found."""
    found: dict[str, Example] = {}
    while len(found) < quota:
        example = task.make(length, rng)
        if example.input not in apart:
            found[example.input] = example
    return list(found.values())
