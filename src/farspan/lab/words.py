"""The laboratory's tokenizer: one id for each word, one vocabulary for all tasks.

A word is what a task treats as one symbol, so no symbol is ever split. All tasks share one table: models of different
tasks have the same shape and can be trained side by side.
"""

from __future__ import annotations

from collections.abc import Iterable

from farspan.errors import FarspanError
from farspan.lab import scratchpad
from farspan.lab.tasks import TASKS, Example

MARKS = ("<pad>", "<begin>", "<answer>", "<end>")


class Words:
    """Text of words with single spaces into ids and back.

    >>> words = Words()
    >>> words.decode(words.encode("The answer is 6 0 ."))
    'The answer is 6 0 .'
    """

    pad, begin, answer, end = range(4)

    def __init__(self) -> None:
        told = (word for task in TASKS.values() for word in task.vocabulary)
        self.table: tuple[str, ...] = tuple(dict.fromkeys((*MARKS, *scratchpad.VOCABULARY, *told)))
        self._ids = {word: index for index, word in enumerate(self.table)}

    def __len__(self) -> int:
        return len(self.table)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[word] for word in text.split()]
        except KeyError as error:
            raise FarspanError(
                f"{error.args[0]!r} is no word of any task; put spaces between words and between digits"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The words of these ids; marks are left out."""
        return " ".join(self.table[index] for index in ids if index >= len(MARKS))

    def prompt(self, example: Example) -> list[int]:
        """<begin> input <answer>: what a model is given."""
        return [self.begin, *self.encode(example.input), self.answer]

    def reply(self, example: Example) -> list[int]:
        """target <end>: what a model is trained, and expected, to say."""
        return [*self.encode(example.target), self.end]
