"""The tasks of Kazemnejad 2023.

Each task is a pure function of a length and a random generator. An example is text of words with
single spaces between them, and each word is one symbol of its task. Numbers are written digit by
digit. What a length counts differs by task: see `LabTask.length_unit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from string import ascii_lowercase

import numpy as np

from farspan.errors import FarspanError, suggest
from farspan.lab import pcfg, scan
from farspan.lengths import parse_length_range

Range = tuple[int, int]  # both ends included


@dataclass(frozen=True)
class Example:
    input: str
    target: str
    length: int


@dataclass(frozen=True)
class LabTask:
    """A task whose answers can be computed, at any length."""

    name: str
    train: Range  # lengths to train on
    test: Range  # longer lengths to test on
    make: Callable[[int, np.random.Generator], Example]  # an example of exactly that length
    count: Callable[[int], float]  # the number of distinct examples of a length; 0: none
    vocabulary: tuple[str, ...]  # every word that occurs in an input or a target
    length_unit: str  # what its length counts
    group: str = ""  # of GROUPS; "": not in Kazemnejad 2023
    frequency: Callable[[int], int] = lambda length: 1  # of each length in released data, or files

    def ranges(self, train: str = "", test: str = "") -> tuple[Range, Range]:
        """The lengths to train on and to test on, as 2:20; default: those of the task."""
        return (
            parse_length_range(train) if train else self.train,
            parse_length_range(test) if test else self.test,
        )


GROUPS = {  # the groups of tasks that Kazemnejad 2023 ranks encodings in
    "primitive": "copying and reversing",
    "reasoning": "mathematics and reasoning",
    "classical": "classical length generalization",
}

DIGITS = tuple("0123456789")
LIST_SYMBOLS = tuple(f"w{number:02d}" for number in range(1, 101))
SORT_SYMBOLS = LIST_SYMBOLS[:50]  # in sorting order
NEXT = "<next>"  # between two lists
ANSWER = ("The", "answer", "is", ".")


def answer(words: Iterable[str]) -> str:
    """The sentence that states an answer."""
    return " ".join(("The answer is", *words, "."))


def digits(number: int) -> str:
    """A number as text, digit by digit: -12 -> `- 1 2`."""
    return " ".join(str(number))


# Copying and reversing a list. Length: symbols, or numbers.


def _symbols(
    length: int, rng: np.random.Generator, symbols: Sequence[str] = LIST_SYMBOLS
) -> list[str]:
    return [symbols[index] for index in rng.integers(len(symbols), size=length)]


def _copy(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    return Example(f"Copy {' '.join(words)} .", " ".join(words), length)


def _copy_repeat(length: int, rng: np.random.Generator, times: int) -> Example:
    """One symbol repeated: positions are indistinguishable by content, so the model must count."""
    words = _symbols(1, rng) * length
    return Example(f"Copy {' '.join(words)} .", " ".join(words * times), length)


def _copy_replace(length: int, rng: np.random.Generator) -> Example:
    """One symbol repeated, replaced by another one that the question names."""
    before, after = (LIST_SYMBOLS[index] for index in rng.permutation(len(LIST_SYMBOLS))[:2])
    words = " ".join([before] * length)
    return Example(
        f"Replace {before} with {after} in {words} .", " ".join([after] * length), length
    )


def _copy_next(length: int, rng: np.random.Generator) -> Example:
    """Each symbol becomes the next in the alphabet; the last becomes the first."""
    words = _symbols(length, rng)
    following = dict(zip(LIST_SYMBOLS, LIST_SYMBOLS[1:] + LIST_SYMBOLS[:1], strict=True))
    return Example(
        f"Replace {' '.join(words)} .", " ".join(following[word] for word in words), length
    )


def _copy_double(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    return Example(f"Double {' '.join(words)} .", " ".join([*words, NEXT, *words]), length)


def _reverse(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    return Example(f"Reverse {' '.join(words)} .", " ".join(words[::-1]), length)


def _reverse_double(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng)
    target = " ".join([*words[::-1], NEXT, *words[::-1]])
    return Example(f"Reverse {' '.join(words)} .", target, length)


def _reverse_copy(length: int, rng: np.random.Generator) -> Example:
    """Reversed, then copied."""
    words = _symbols(length, rng)
    return Example(f"Reverse {' '.join(words)} .", " ".join([*words[::-1], NEXT, *words]), length)


REVERSE_RANGE = range(10, 100)
SORT_RANGE = range(10, 10_000)


def _numbers(length: int, rng: np.random.Generator, values: range) -> list[int]:
    return rng.integers(values.start, values.stop, size=length).tolist()


def format_list(numbers: Sequence[int]) -> str:
    """[53, 120] -> `5 3 , 1 2 0`."""
    return " , ".join(map(digits, numbers))


def _reverse_numbers(length: int, rng: np.random.Generator) -> Example:
    """The numbers are reversed, their digits are not."""
    numbers = _numbers(length, rng, REVERSE_RANGE)
    return Example(f"Reverse {format_list(numbers)} .", format_list(numbers[::-1]), length)


# Arithmetic. Length: digits of the longer operand; terms; bits.


def _addition(length: int, rng: np.random.Generator) -> Example:
    """One operand has `length` digits, the other as many or fewer; all pairs of sizes as often."""
    pair = int(rng.integers(2 * length - 1))
    sizes = (length, pair + 1) if pair < length else (2 * length - 1 - pair, length)
    first, second = (_number(size, rng) for size in sizes)
    return Example(
        f"Compute {digits(first)} + {digits(second)} ?", answer([digits(first + second)]), length
    )


def _number(size: int, rng: np.random.Generator) -> int:
    """A uniformly random number of exactly `size` digits; 0 has one digit."""
    values = rng.integers(10, size=size)
    if size > 1 and not values[0]:
        values[0] = rng.integers(1, 10)
    return int("".join(map(str, values.tolist())))


def _count_additions(length: int) -> int:
    """The number of pairs whose longer number has `length` digits."""
    shorter = 10 ** (length - 1) if length > 1 else 0
    return 10 ** (2 * length) - shorter**2


def _polynomial(length: int, rng: np.random.Generator) -> Example:
    """Coefficients −3 … 3, powers 0 … 3, x from −2 to 2, modulo 10 as in Python: never negative."""
    x = int(rng.integers(-2, 3))
    pairs = list(
        zip(
            rng.integers(-3, 4, size=length).tolist(),
            rng.integers(4, size=length).tolist(),
            strict=True,
        )
    )
    terms = " ".join(f"{'-' if c < 0 else '+'} {abs(c)} x ** {power}" for c, power in pairs)
    value = sum(c * x**power for c, power in pairs) % 10
    return Example(
        f"Evaluate x = {digits(x)} in ( {terms} ) % 10 ?", answer([digits(value)]), length
    )


def _summation(length: int, rng: np.random.Generator) -> Example:
    numbers = rng.integers(1, 10, size=length).tolist()
    return Example(
        f"Compute ( {' + '.join(map(str, numbers))} ) % 10 ?",
        answer([digits(sum(numbers) % 10)]),
        length,
    )


def _parity(length: int, rng: np.random.Generator) -> Example:
    bits = rng.integers(2, size=length).tolist()
    even = "no" if sum(bits) % 2 else "yes"
    return Example(
        f"Is the number of ones even in {' '.join(map(str, bits))} ?", answer([even]), length
    )


# Sorting. Length: symbols, or numbers.


def _sorting(length: int, rng: np.random.Generator) -> Example:
    words = _symbols(length, rng, SORT_SYMBOLS)
    return Example(f"Sort {' '.join(words)} ?", answer(sorted(words)), length)


def _sorting_numbers(length: int, rng: np.random.Generator) -> Example:
    numbers = _numbers(length, rng, SORT_RANGE)
    return Example(f"Sort {format_list(numbers)} ?", answer([format_list(sorted(numbers))]), length)


# LEGO: a chain of variables, each plus or minus the previous one. Length: clauses.


def _lego(length: int, rng: np.random.Generator, shuffled: bool) -> Example:
    """Asks for a variable in the second half of the chain, whose value needs several steps.

    The middle of an odd chain counts as its first half, so there is no chain of one clause.
    """
    if length > len(ascii_lowercase):
        raise FarspanError(
            f"lego has one letter per clause, so {length} clauses are too many; choose at most 26"
        )
    names = [ascii_lowercase[index] for index in rng.permutation(len(ascii_lowercase))[:length]]
    signs = rng.integers(2, size=length) * 2 - 1
    clauses = [
        f"{name} = {'+' if sign > 0 else '-'} {before}"
        for name, sign, before in zip(names, signs, ("1", *names), strict=False)
    ]
    target = int(rng.integers((length + 1) // 2, length))
    value = int(signs[: target + 1].prod())
    order = rng.permutation(length) if shuffled else range(length)
    chain = " , ".join(clauses[index] for index in order)
    question = f"If {chain} . Then , what is the value of {names[target]} ?"
    return Example(question, answer(["+ 1" if value > 0 else "- 1"]), length)


def _count_legos(length: int, shuffled: bool) -> int:
    """The number of chains: letters, signs, possible targets, and orders of the clauses."""
    if length > len(ascii_lowercase):
        return 0
    chains = math.perm(len(ascii_lowercase), length) * 2**length * (length // 2)
    return chains * math.factorial(length) if shuffled else chains


# Languages. Length: actions of SCAN; functions of PCFG SET.


@cache
def _scan_by_length() -> Mapping[int, tuple[tuple[str, str], ...]]:
    """Every command with its actions, by the number of actions."""
    by_length: dict[int, list[tuple[str, str]]] = {}
    for command in scan.commands():
        actions = scan.actions(command)
        by_length.setdefault(len(actions), []).append((command, " ".join(actions)))
    return {length: tuple(pairs) for length, pairs in sorted(by_length.items())}


def _scan(length: int, rng: np.random.Generator) -> Example:
    pairs = _scan_by_length().get(length)
    if not pairs:
        lengths = ", ".join(map(str, _scan_by_length()))
        raise FarspanError(f"no command of scan has {length} actions; choose one of {lengths}")
    command, actions = pairs[rng.integers(len(pairs))]
    return Example(command, actions, length)


def _count_scan(length: int) -> int:
    return len(_scan_by_length().get(length, ()))


def _pcfg(length: int, rng: np.random.Generator) -> Example:
    text, value = pcfg.expression(length, rng)
    return Example(text, " ".join(value), length)


def _count_pcfg(length: int) -> float:
    return math.inf if 1 <= length <= pcfg.LONGEST_INPUT - pcfg.ARGUMENT[0] else 0


def _powers(base: int) -> Callable[[int], float]:
    return lambda length: base**length


_LIST_LENGTHS: tuple[Range, Range] = (2, 20), (21, 40)
_SHORT_LENGTHS: tuple[Range, Range] = (1, 8), (9, 16)
_COUNT_LISTS = _powers(len(LIST_SYMBOLS))
_COPY_WORDS = ("Copy", *LIST_SYMBOLS, ".")
_REVERSE_WORDS = ("Reverse", *LIST_SYMBOLS, ".")
_ADDITION_WORDS = ("Compute", "+", "?", *DIGITS, *ANSWER)
_POLYNOMIAL_WORDS = (
    *("Evaluate", "x", "=", "in", "(", ")", "+", "-", "**", "%", "10", "?"),
    *DIGITS,
    *ANSWER,
)
_SUMMATION_WORDS = ("Compute", "(", "+", ")", "%", "10", "?", *DIGITS, *ANSWER)
_PARITY_WORDS = (
    *("Is", "the", "number", "of", "ones", "even", "in", "0", "1", "?", "yes", "no"),
    *ANSWER,
)
_LEGO_WORDS = (
    *("If", "=", "+", "-", "1", ",", "Then", "what", "is", "the", "value", "of", "?"),
    *ascii_lowercase,
    *ANSWER,
)

TASKS: dict[str, LabTask] = {
    task.name: task
    for task in (
        *(
            LabTask(name, *_LIST_LENGTHS, make, count, words, "symbols", "primitive")
            for name, make, count, words in (
                ("copy", _copy, _COUNT_LISTS, _COPY_WORDS),
                (
                    "copy-repeat",
                    partial(_copy_repeat, times=1),
                    lambda _: len(LIST_SYMBOLS),
                    _COPY_WORDS,
                ),
                (
                    "copy-repeat-double",
                    partial(_copy_repeat, times=2),
                    lambda _: len(LIST_SYMBOLS),
                    _COPY_WORDS,
                ),
                (
                    "copy-replace",
                    _copy_replace,
                    lambda _: math.perm(len(LIST_SYMBOLS), 2),
                    ("Replace", "with", "in", *LIST_SYMBOLS, "."),
                ),
                ("copy-double", _copy_double, _COUNT_LISTS, ("Double", *LIST_SYMBOLS, NEXT, ".")),
                ("reverse", _reverse, _COUNT_LISTS, _REVERSE_WORDS),
                ("reverse-double", _reverse_double, _COUNT_LISTS, (*_REVERSE_WORDS, NEXT)),
                ("reverse-copy", _reverse_copy, _COUNT_LISTS, (*_REVERSE_WORDS, NEXT)),
            )
        ),
        LabTask(
            "addition",
            *_SHORT_LENGTHS,
            _addition,
            _count_additions,
            _ADDITION_WORDS,
            "digits of the longer operand",
            "reasoning",
            lambda length: 2 * length - 1,  # every pair of operand lengths is equally frequent
        ),
        LabTask(
            "polynomial",
            *_SHORT_LENGTHS,
            _polynomial,
            lambda length: 5 * 28**length,
            _POLYNOMIAL_WORDS,
            "terms",
            "reasoning",
        ),
        LabTask(
            "sorting",
            *_SHORT_LENGTHS,
            _sorting,
            _powers(len(SORT_SYMBOLS)),
            ("Sort", *SORT_SYMBOLS, "?", *ANSWER),
            "symbols",
            "reasoning",
        ),
        LabTask(
            "sorting-numbers",
            *_SHORT_LENGTHS,
            _sorting_numbers,
            _powers(len(SORT_RANGE)),
            ("Sort", *DIGITS, ",", "?", *ANSWER),
            "numbers",
            "reasoning",
        ),
        LabTask(
            "summation",
            *_SHORT_LENGTHS,
            _summation,
            _powers(9),
            _SUMMATION_WORDS,
            "digits",
            "reasoning",
        ),
        LabTask("parity", *_SHORT_LENGTHS, _parity, _powers(2), _PARITY_WORDS, "bits", "reasoning"),
        *(
            LabTask(
                name,
                *_SHORT_LENGTHS,
                partial(_lego, shuffled=shuffled),
                partial(_count_legos, shuffled=shuffled),
                _LEGO_WORDS,
                "clauses",
                "reasoning",
            )
            for name, shuffled in (("lego", True), ("lego-ordered", False))
        ),
        LabTask(
            "scan",
            (1, 25),
            (26, 48),
            _scan,
            _count_scan,
            scan.VOCABULARY,
            "actions",
            "classical",
            _count_scan,
        ),
        LabTask(
            "pcfg",
            (1, 8),
            (9, 35),
            _pcfg,
            _count_pcfg,
            pcfg.VOCABULARY,
            "functions",
            "classical",
            lambda length: pcfg.RELEASED.get(length, 0),
        ),
        LabTask(
            "copy-next",
            *_LIST_LENGTHS,
            _copy_next,
            _COUNT_LISTS,
            ("Replace", *LIST_SYMBOLS, "."),
            "symbols",
        ),
        LabTask(
            "reverse-numbers",
            *_LIST_LENGTHS,
            _reverse_numbers,
            _powers(len(REVERSE_RANGE)),
            ("Reverse", *DIGITS, ",", "."),
            "numbers",
        ),
    )
}


def find_task(name: str, others: Iterable[str] = ()) -> LabTask:
    """The task of that name; the error for an unknown name suggests the nearest one."""
    if name in TASKS:
        return TASKS[name]
    raise FarspanError(f"task {name!r} is unknown; {suggest(name, (*others, *TASKS))}")
