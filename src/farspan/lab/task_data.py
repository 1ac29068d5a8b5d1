"""The examples of a task as rows of tokens, to train and test models on."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from farspan.errors import FarspanError
from farspan.lab.custom_tasks import split_examples, train_weights
from farspan.lab.examples import draw_examples, no_examples
from farspan.lab.rows import Rows
from farspan.lab.tasks import Example, LabTask, Range
from farspan.lab.tokenizer import WordTokenizer

LENGTH_SAMPLE = 256  # examples that estimate the longest row of a task


@dataclass(frozen=True, eq=False)
class TaskData:
    """A task's examples as rows, and their lengths in the task's unit."""

    train: Rows
    held_out: Rows
    beyond: Rows
    held_out_lengths: np.ndarray
    beyond_lengths: np.ndarray

    @classmethod
    def make(
        cls,
        task: LabTask,
        ranges: tuple[Range, Range],
        encode: Callable[[Sequence[Example]], Rows],
        *,
        train_examples: int,
        test_examples: int,
        seed: int,
        scratchpad: str,
        even_lengths: bool,
        held_out_least: int = 1,
    ) -> TaskData:
        """Draw and encode the splits of a task.

        Of the train split, every length is repeated as often as its weight asks.
        """
        train, test = ranges
        splits = split_examples(
            task,
            train_examples,
            test_examples,
            seed,
            train=train,
            test=test,
            scratchpad=scratchpad,
            even_lengths=even_lengths,
        )
        if not splits.train:
            raise FarspanError(no_examples(task, train))
        if len(splits.held_out) < held_out_least:
            raise FarspanError(
                f"{task.name} has too few examples of {train[0]} to {train[1]} {task.length_unit} "
                "to hold some out; train on more lengths"
            )
        if not splits.beyond:
            raise FarspanError(
                f"every example of {task.name} of {test[0]} to {test[1]} {task.length_unit} is "
                "trained on or held out, so none is left to test; test on longer ones"
            )
        weights = train_weights(task, splits.train, even_lengths)
        return cls(
            encode(balance_lengths(splits.train, weights)),
            encode(splits.held_out),
            encode(splits.beyond),
            np.array([example.length for example in splits.held_out]),
            np.array([example.length for example in splits.beyond]),
        )

    @property
    def train_length(self) -> int:
        """In tokens."""
        return int(self.train.stop.max())

    @property
    def max_length(self) -> int:
        """The longest row of all splits, in tokens."""
        return max(int(rows.stop.max()) for rows in (self.train, self.held_out, self.beyond))


def balance_lengths(examples: Sequence[Example], weights: Mapping[int, int]) -> list[Example]:
    """Repeat examples so that every length occurs as often as its weight asks.

    There are few short examples, and models learn the long ones through them: models that saw sums
    of two digits once in a thousand examples never learned to add eight digits.
    """
    groups = defaultdict(list)
    for example in examples:
        groups[example.length].append(example)
    most = max(Fraction(len(group), weights[length]) for length, group in groups.items())
    return [
        example
        for length, group in groups.items()
        for example in itertools.islice(itertools.cycle(group), math.floor(most * weights[length]))
    ]


def encode_examples(examples: Sequence[Example], tokenizer: WordTokenizer) -> Rows:
    """<begin> input <answer> target <end>, padded."""
    prompts = [tokenizer.prompt(example) for example in examples]
    targets = [tokenizer.target(example) for example in examples]
    return Rows.pad(prompts, targets, tokenizer.pad, np.int16)


def estimate_longest_row(
    task: LabTask, lengths: Range, seed: int, scratchpad: str, tokenizer: WordTokenizer
) -> int:
    """The longest row in tokens, estimated from examples of the longest length."""
    low, high = lengths
    longest = max((length for length in range(low, high + 1) if task.count(length)), default=high)
    count = int(min(LENGTH_SAMPLE, max(1, task.count(longest))))
    examples = draw_examples(task, (longest, longest), count, seed, scratchpad=scratchpad)
    return int(encode_examples(examples, tokenizer).stop.max())


def count_by_length(correct: np.ndarray, lengths: np.ndarray) -> dict[str, list[int]]:
    return {
        str(length): [int(correct[lengths == length].sum()), int((lengths == length).sum())]
        for length in np.unique(lengths).tolist()
    }
