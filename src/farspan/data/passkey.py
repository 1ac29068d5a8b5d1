"""Passkey documents: a number hidden in irrelevant text, followed by a question for that number.

Training and scoring use the same task. Keys divisible by 11 are held out for scoring, so that a
score never measures memorization.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from farspan.data.tokens import encode, fingerprint
from farspan.errors import FarspanError

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
INFO = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"
KEYS = range(10_000, 100_000)
HELD_OUT = 11
SCORED = KEYS[10::HELD_OUT]  # the keys that are divisible by HELD_OUT


def train_key(rng: np.random.Generator) -> int:
    """Draw a key that is not divisible by HELD_OUT, uniformly."""
    while True:
        key = int(rng.integers(KEYS.start, KEYS.stop))
        if key % HELD_OUT:
            return key


def held_out_key(rng: np.random.Generator) -> int:
    """Draw a key that no training document contains, uniformly."""
    return SCORED[int(rng.integers(len(SCORED)))]


class PasskeyDocuments:
    """Makes passkey documents of an exact number of tokens under one tokenizer.

    start: tokens before the text, such as a begin-of-text token.
    """

    def __init__(self, tokenizer: Any, start: Sequence[int] = ()):
        self._tokenizer = tokenizer
        task, self._filler, self._question = (
            encode(tokenizer, text) for text in (TASK, FILLER, QUESTION)
        )
        self._task = [*start, *task]

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._tokenizer)

    @cached_property
    def shortest(self) -> int:
        """The smallest length that fits a document with any key."""
        return self.shortest_of(KEYS)

    def shortest_of(self, keys: range) -> int:
        """The smallest length that fits a document with any of these keys.

        All keys are measured only if a sample shows different lengths, because that is slow.
        """
        sampled = {self._min_length(key) for key in keys[:: max(1, len(keys) // 227)]}
        return sampled.pop() if len(sampled) == 1 else max(map(self._min_length, keys))

    def answer(self, key: int) -> list[int]:
        return encode(self._tokenizer, ANSWER.format(key=key))

    def document(self, length: int, depth: float, key: int) -> list[int]:
        """Exactly `length` tokens that end with the question and its answer.

        depth: the share of the filler that comes before the key.
        """
        info, ending = self._info(key), self._question + self.answer(key)
        min_length = len(self._task) + len(info) + len(ending)
        if length < min_length:
            raise FarspanError(
                f"a passkey text of {length} tokens has no room for its key and its question, "
                f"which take {min_length}; use a length of at least {min_length}"
            )
        before = round(depth * (length - min_length))
        return [
            *self._task,
            *self._fill(before),
            *info,
            *self._fill(length - min_length - before),
            *ending,
        ]

    def _min_length(self, key: int) -> int:
        return len(self._task) + len(self._info(key)) + len(self._question) + len(self.answer(key))

    def _info(self, key: int) -> list[int]:
        return encode(self._tokenizer, INFO.format(key=key))

    def _fill(self, count: int) -> list[int]:
        times = -(-count // len(self._filler))
        return (self._filler * times)[:count]
