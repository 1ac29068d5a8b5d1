"""Rows of text that reward looking far back: spans that stand twice, facts asked for later, and
passkeys.

All are made from any text. The facts have templates, names and values of their own, so that the
passkey and needle evaluations stay unseen. Rows with passkeys are for models that know the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan.data.passkey import PasskeyDocuments, train_key

SPAN_SIZES = (16, 128)  # tokens of a repeated span, at least and below
SPAN_EVERY = 512  # one repeated span for so many tokens of a row
MAX_FACTS, FACT_EVERY = 8, 128  # facts of a row, at most so many and one for so many tokens
MAX_QUESTIONS = 4  # at the end of a row
TILED = 1 / 3  # share of the rows with facts whose text is one span over and over
FACTS = (
    (
        "\nNote for the archive: the {thing} of {name} is {value}.\n",
        "\nQuestion: what is the {thing} of {name}?\nAnswer: {value}",
    ),
    (
        "\n{name} wrote down the {thing}: {value}.\n",
        "\nThe {thing} that {name} wrote down was {value}",
    ),
    ("\n[{thing} / {name} = {value}]\n", "\n[{thing} / {name} = {value}]"),
    (
        "\nPlease keep in mind that {name} has the {thing} {value}.\n",
        "\nAs mentioned before, {name} has the {thing} {value}",
    ),
)
THINGS = (
    *("shelf", "room", "locker", "ticket", "platform", "order number", "street", "code word"),
    *("balance", "favourite colour", "address", "invoice", "seat", "password", "licence plate"),
)
NAMES = (
    *("Ada", "Bruno", "Celia", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas"),
    *("Katya", "Lars", "Mira", "Nikhil", "Olga", "Pablo", "Rosa", "Soren", "Tara", "Yusuf"),
)
WORDS = (
    *("aspen", "birch", "cobalt", "dune", "ember", "fjord", "granite", "heron", "indigo"),
    *("juniper", "kelp", "lagoon", "maple", "nectar", "onyx", "pebble", "quartz", "raven"),
    *("saffron", "thistle", "umber", "violet", "willow", "yarrow", "zephyr"),
)
DIGITS = (2, 3, 4, 6, 8)  # passkeys have five, needles seven

# A window [T] and its number in the run -> the changed window, and the mask of its answers.
ChangeRow = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def recall_rows(
    seed: int,
    *,
    repeats: float,
    min_distance: int,
    spans: Sequence[int] = SPAN_SIZES,
    facts: float = 0.0,
    passkeys: float = 0.0,
    tokenizer: Any = None,
) -> ChangeRow | None:
    """A function that makes a share of the windows reward looking far back, or None.

    It is given each window and its number in the run, which decides what becomes of it.
    """
    if not repeats and not facts and not passkeys:
        return None
    fact_rows = FactRows(tokenizer)
    passkey_rows = PasskeyRows(tokenizer) if passkeys else None

    def change_row(row: Tensor, number: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((seed, 1, number))
        draw = rng.random()
        if draw < facts:
            return fact_rows.row(row, rng)
        no_answers = torch.zeros(len(row), dtype=torch.bool)
        if draw < facts + repeats:
            row, _ = repeat_spans(row, rng, min(min_distance, len(row) // 2), spans)
        elif passkey_rows is not None and draw < facts + repeats + passkeys:
            return passkey_rows.row(row, rng)
        return row, no_answers

    return change_row


def repeat_spans(
    row: Tensor,
    rng: np.random.Generator,
    min_distance: int,
    sizes: Sequence[int] = SPAN_SIZES,
) -> tuple[Tensor, Tensor]:
    """A row [T] in which some spans of `sizes` stand again at least `min_distance` tokens later.

    Returns it with a mask [T] of the tokens that can be known from the first occurrence.
    """
    row, known = row.clone(), torch.zeros(len(row), dtype=torch.bool)
    used = torch.zeros_like(known)  # by spans so far: overwriting one would break its repetition
    for _ in range(max(1, len(row) // SPAN_EVERY)):
        size = int(rng.integers(sizes[0], sizes[1]))
        size = min(size, (len(row) - min_distance) // 2)
        if size < 2:
            break
        second = int(rng.integers(size + min_distance, len(row) - size + 1))
        first = int(rng.integers(0, second - min_distance - size + 1))
        if used[second : second + size].any():
            continue
        row[second : second + size] = row[first : first + size]
        used[first : first + size] = used[second : second + size] = True
        # A token is known once the text before it is: the first one is a surprise.
        known[second + 1 : second + size] = True
    return row, known


class FactRows:
    """Puts facts into rows of text and asks for some of them at the end.

    They differ in a name alone, so that a question has one answer among many. In part of the rows
    a span of the text stands over and over: repetitive text is where keys are hard to pick out.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def row(self, row: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The row [T] with facts in it and questions with their answers at its end, and the mask
        of the answers' tokens."""
        count = int(rng.integers(1, min(MAX_FACTS, max(1, len(row) // FACT_EVERY)) + 1))
        asked = int(rng.integers(1, min(MAX_QUESTIONS, count) + 1))
        fact, question = FACTS[int(rng.integers(len(FACTS)))]
        thing = str(rng.choice(THINGS))
        names = rng.choice(NAMES, size=count, replace=False)
        values = [_value(rng) for _ in names]
        facts, questions, openings = (
            [
                self._encode(template.format(thing=thing, name=name, value=value))
                for name, value in zip(names, values, strict=True)
            ]
            for template in (fact, question, question.partition("{value}")[0].rstrip(" "))
        )
        ending = [token for tokens in questions[:asked] for token in tokens]
        answered = [
            place >= _shared_length(tokens, opening)
            for tokens, opening in zip(questions[:asked], openings, strict=False)
            for place in range(len(tokens))
        ]
        answers = torch.zeros(len(row), dtype=torch.bool)
        room = len(row) - len(ending) - sum(map(len, facts))
        if room < 1:
            return row, answers
        if rng.random() < TILED:
            row = _tile(row, rng)
        cuts = np.sort(rng.integers(0, room + 1, size=count))
        pieces: list[int] = []
        start = 0
        for cut, number in zip(cuts.tolist(), rng.permutation(count), strict=True):
            pieces += [*row[start:cut].tolist(), *facts[number]]
            start = cut
        answers[-len(ending) :] = torch.tensor(answered)
        ids = [*pieces, *row[start:room].tolist(), *ending]
        return torch.tensor(ids, dtype=row.dtype), answers

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class PasskeyRows:
    """Puts a passkey document in front of rows of text, as long as it or shorter.

    No key is ever scored.
    """

    def __init__(self, tokenizer: Any):
        self._documents = PasskeyDocuments(tokenizer)
        end = getattr(tokenizer, "eos_token_id", None)
        self._end = [] if end is None else [end]

    def row(self, row: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The document, an end-of-text token and the rest of the row [T], and the mask of the
        answer's tokens."""
        answers = torch.zeros(len(row), dtype=torch.bool)
        if len(row) < self._documents.shortest:
            return row, answers
        key = train_key(rng)
        shortest, longest = self._documents.shortest, len(row)
        length = round(shortest * (longest / shortest) ** rng.random())  # each doubling as often
        document = [*self._documents.document(length, rng.random(), key), *self._end]
        answers[length - len(self._documents.answer(key)) : length] = True
        start = torch.tensor(document, dtype=row.dtype)[: len(row)]
        return torch.cat((start, row[len(start) :])), answers


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _tile(row: Tensor, rng: np.random.Generator) -> Tensor:
    """One span of the row [T], repeated to its length."""
    size = min(int(rng.integers(*SPAN_SIZES)), len(row))
    start = int(rng.integers(0, len(row) - size + 1))
    return row[start : start + size].repeat(-(-len(row) // size))[: len(row)]


def _value(rng: np.random.Generator) -> str:
    """A number of other than five digits, one or two words, or both."""
    kind = int(rng.integers(3))
    digits = int(rng.choice(DIGITS))
    number = str(int(rng.integers(10 ** (digits - 1), 10**digits)))
    words = " ".join(rng.choice(WORDS, size=int(rng.integers(1, 3))))
    return (number, words, f"{words} {number}")[kind]
