"""Passkey documents: a number hidden in a heap of irrelevant text, and asked for at the end.

One task for training and for scoring. The keys divisible by 11 are kept for scoring, so that no score is memory.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from farspan.data.tokens import fingerprint
from farspan.errors import FarspanError

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INFO = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"
KEYS = range(10_000, 100_000)
HELD_OUT = 11
SCORED = KEYS[10::HELD_OUT]  # the keys that are divisible by it


def train_key(rng: np.random.Generator) -> int:
    """A key that is not divisible by HELD_OUT, all equally likely."""
    while True:
        key = int(rng.integers(KEYS.start, KEYS.stop))
        if key % HELD_OUT:
            return key


def held_out_key(rng: np.random.Generator) -> int:
    """A key that no training document has, all equally likely."""
    return SCORED[int(rng.integers(len(SCORED)))]


class Passkeys:
    """Passkey documents in the tokens of one tokenizer, of any length to the token."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._task, self._filler, self._question = map(self._encode, (TASK, FILLER, QUESTION))

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._tokenizer)

    @cached_property
    def shortest(self) -> int:
        """The fewest tokens in which a document can be had, whatever its key."""
        return self.shortest_of(KEYS)

    def shortest_of(self, keys: range) -> int:
        """The same for some keys: of all 90,000 it takes a while where digits do not cost the same everywhere."""
        some = {self._least(key) for key in keys[:: max(1, len(keys) // 227)]}
        return some.pop() if len(some) == 1 else max(map(self._least, keys))

    def prompt(self, length: int, depth: float, key: int) -> list[int]:
        """Exactly `length` tokens that end with the question; of the filler, the share `depth` comes before the key."""
        return self._filled(length, depth, self._info(key), self._question)

    def answer(self, key: int) -> list[int]:
        return self._encode(ANSWER.format(key=key))

    def document(self, length: int, depth: float, key: int) -> list[int]:
        """Exactly `length` tokens: a prompt and its answer."""
        return self._filled(length, depth, self._info(key), self._question + self.answer(key))

    def _filled(self, length: int, depth: float, info: list[int], ending: list[int]) -> list[int]:
        least = len(self._task) + len(info) + len(ending)
        if length < least:
            raise FarspanError(
                f"a passkey text of {length} tokens has no room for its key and its question, which take {least}; "
                f"ask for {least} or more"
            )
        before = round(depth * (length - least))
        return [*self._task, *self._fill(before), *info, *self._fill(length - least - before), *ending]

    def _least(self, key: int) -> int:
        return len(self._task) + len(self._info(key)) + len(self._question) + len(self.answer(key))

    def _info(self, key: int) -> list[int]:
        return self._encode(INFO.format(key=key))

    def _fill(self, count: int) -> list[int]:
        times = -(-count // len(self._filler))
        return (self._filler * times)[:count]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
