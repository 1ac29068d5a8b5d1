"""The lab's tokenizer: one id per word, one vocabulary for all tasks.

A word is one symbol of a task, so no symbol is ever split. All tasks share one vocabulary, so that
models of different tasks have the same shape and can be trained in one fleet.
"""

from __future__ import annotations

from collections.abc import Iterable

from farspan.errors import FarspanError
from farspan.lab import scratchpad
from farspan.lab.tasks import TASKS, Example

SPECIAL_TOKENS = ("<pad>", "<begin>", "<answer>", "<end>")


class WordTokenizer:
    """Encodes text of words separated by single spaces, and decodes ids.

    >>> tokenizer = WordTokenizer()
    >>> tokenizer.decode(tokenizer.encode("The answer is 6 0 ."))
    'The answer is 6 0 .'
    """

    pad, begin, answer, end = range(4)

    def __init__(self, more: Iterable[str] = ()) -> None:
        """`more` words follow those of the built-in tasks."""
        words = (word for task in TASKS.values() for word in task.vocabulary)
        self.vocabulary: tuple[str, ...] = tuple(
            dict.fromkeys((*SPECIAL_TOKENS, *scratchpad.VOCABULARY, *words, *more))
        )
        self._ids = {word: index for index, word in enumerate(self.vocabulary)}

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[word] for word in text.split()]
        except KeyError as error:
            raise FarspanError(
                f"{error.args[0]!r} is not in the vocabulary of any task; put spaces between words "
                "and between digits"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The words of these ids, without special tokens."""
        return " ".join(self.vocabulary[index] for index in ids if index >= len(SPECIAL_TOKENS))

    def prompt(self, example: Example) -> list[int]:
        """<begin> input <answer>: the tokens before the answer."""
        return [self.begin, *self.encode(example.input), self.answer]

    def target(self, example: Example) -> list[int]:
        """target <end>: the answer that a model is trained to give."""
        return [*self.encode(example.target), self.end]
