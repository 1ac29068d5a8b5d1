"""PCFG SET: ten string functions in prefix notation, with an interpreter and a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from string import ascii_uppercase

import numpy as np

from farspan.errors import FarspanError

Symbols = tuple[str, ...]

UNARY: dict[str, Callable[[Symbols], Symbols]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[::-1],
    "shift": lambda x: x[1:] + x[:1],
    "swap_first_last": lambda x: x[-1:] + x[1:-1] + x[:1] if len(x) > 1 else x,
    "repeat": lambda x: x + x,
    "echo": lambda x: x + x[-1:],
}
BINARY: dict[str, Callable[[Symbols, Symbols], Symbols]] = {
    "append": lambda x, y: x + y,
    "prepend": lambda x, y: y + x,
    "remove_first": lambda x, y: y,
    "remove_second": lambda x, y: x,
}
SYMBOLS = tuple(f"{letter}{number}" for letter in ascii_uppercase for number in range(1, 21))
_UNARY, _BINARY = tuple(UNARY), tuple(BINARY)
VOCABULARY = (*UNARY, *BINARY, ",", *SYMBOLS)
ARGUMENT = (2, 5)  # symbols in one string
LONGEST_INPUT = 71  # words, as in the released data
LONGEST_OUTPUT = 128  # words; 31 of the 115,166 released examples have more
BINARY_SHARE = 0.4  # of functions, as in the released data; less where the input gets too long
# Released examples by the number of functions: up to 8 estimated from the 14,581 of the random
# splits, from 9 on the whole test set of the split by productivity.
# fmt: off
RELEASED = {
    1: 1424, 2: 11835, 3: 17892, 4: 17373, 5: 12221, 6: 9462, 7: 6120, 8: 4683, 9: 3232,
    10: 2296, 11: 1738, 12: 1175, 13: 811, 14: 631, 15: 411, 16: 271, 17: 225, 18: 154,
    19: 103, 20: 68, 21: 67, 22: 46, 23: 34, 24: 18, 25: 28, 26: 5, 27: 6, 28: 5, 29: 2,
    30: 4, 32: 2, 35: 1,
}
# fmt: on
PATIENCE = 5_000  # rejected draws before BINARY_SHARE is halved; 35 functions need about a hundred


def evaluate(text: str) -> Symbols:
    """The value of an expression.

    >>> evaluate("append swap_first_last A1 B2 C3 , echo D4")
    ('C3', 'B2', 'A1', 'D4', 'D4')
    """
    words = iter((*text.split(), ""))
    try:
        value, end = _value(next(words), words)
    except (StopIteration, ValueError):
        raise FarspanError(
            f"{text!r} is not an expression of PCFG SET: a string is missing; write f x or f x , y"
        ) from None
    if end:
        raise FarspanError(
            f"{text!r} is not an expression of PCFG SET: {end!r} is left over; write f x or f x , y"
        )
    return value


def _value(word: str, words: Iterator[str]) -> tuple[Symbols, str]:
    """The value of the expression that begins with `word`, and the word that ended it."""
    if word in UNARY:
        inner, end = _value(next(words), words)
        return UNARY[word](inner), end
    if word in BINARY:
        first, _comma = _value(next(words), words)
        second, end = _value(next(words), words)
        return BINARY[word](first, second), end
    symbols = []
    while word not in (",", ""):
        symbols.append(word)
        word = next(words)
    if not symbols:
        raise ValueError
    return tuple(symbols), word


def expression(functions: int, rng: np.random.Generator) -> tuple[str, Symbols]:
    """A random expression with that many functions, and its value, within the released lengths."""
    if not 1 <= functions <= LONGEST_INPUT - ARGUMENT[0]:
        raise FarspanError(
            f"an expression of {functions} functions does not fit in {LONGEST_INPUT} words; "
            f"choose 1 to {LONGEST_INPUT - ARGUMENT[0]}"
        )
    tries = 0
    while True:
        binary = int(rng.binomial(functions, BINARY_SHARE * 0.5 ** (tries // PATIENCE)))
        tries += 1
        sizes = rng.integers(ARGUMENT[0], ARGUMENT[1] + 1, size=binary + 1).tolist()
        if functions + binary + sum(sizes) > LONGEST_INPUT:
            continue
        text = " ".join(_write(_shape(functions - binary, binary, rng), sizes, rng))
        value = evaluate(text)
        if len(value) <= LONGEST_OUTPUT:
            return text, value


def _shape(unary: int, binary: int, rng: np.random.Generator) -> list[int]:
    """The arities of a random tree in prefix order, all trees equally likely.

    Exactly one rotation of a shuffled sequence is a tree (the cycle lemma): the one that begins
    after the first minimum of the running sum of arity − 1.
    """
    arities = rng.permutation([1] * unary + [2] * binary + [0] * (binary + 1))
    start = int(np.cumsum(arities - 1).argmin()) + 1
    return arities[start:].tolist() + arities[:start].tolist()


def _write(shape: list[int], sizes: list[int], rng: np.random.Generator) -> list[str]:
    """The words of an expression of that shape: random functions, random strings of these sizes."""
    arities, lengths = iter(shape), iter(sizes)
    unary = iter(rng.integers(len(UNARY), size=shape.count(1)).tolist())
    binary = iter(rng.integers(len(BINARY), size=shape.count(2)).tolist())
    symbols = iter(rng.integers(len(SYMBOLS), size=sum(sizes)).tolist())

    def write() -> list[str]:
        arity = next(arities)
        if arity == 1:
            return [_UNARY[next(unary)], *write()]
        if arity == 2:
            return [_BINARY[next(binary)], *write(), ",", *write()]
        return [SYMBOLS[index] for index in islice(symbols, next(lengths))]

    return write()
