"""Rows of text that reward looking far back: spans that stand twice, facts asked for later, and
passkeys.

All are made from any text. The facts have templates, names and values of their own, so that the
passkey and needle evaluations stay unseen. Rows with passkeys are for models that know the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from farspan.data.passkey import PasskeyDocuments, train_key
from farspan.data.tokens import encode, shared_length

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

# Of one name with several values: a statement of each, and the question for all, in their order.
LISTS = (
    (
        "\nNote for the archive: one {thing} of {name} is {value}.\n",
        "\nQuestion: what is every {thing} of {name}?\nAnswer: {values}",
    ),
    (
        "\n{name} wrote down another {thing}: {value}.\n",
        "\nEach {thing} that {name} wrote down: {values}",
    ),
    ("\n[{thing} / {name} += {value}]\n", "\n[every {thing} / {name} = {values}]"),
)
# Of several names with a value each, asked for together.
TOGETHER = (
    (
        "\nNote for the archive: the {thing} of {name} is {value}.\n",
        "\nQuestion: what is the {thing} of each of {names}?\nAnswer: {values}",
    ),
    ("\n[{thing} / {name} = {value}]\n", "\n[{thing} / {names} = {values}]"),
)
# Of names that take over a value from one another: its first owner, the next one, and the question
# for all of them, in their order.
CHAINS = (
    (
        "\nNote for the archive: the {thing} of {name} is {value}.\n",
        "\nNote for the archive: {name} took over the {thing} of {source}.\n",
        "\nQuestion: who had the {thing} {value}?\nAnswer: {names}",
    ),
    (
        "\n[{thing} / {name} = {value}]\n",
        "\n[{thing} / {name} = {thing} / {source}]\n",
        "\n[{thing} {value} / {names}]",
    ),
)
MOST_ANSWERS = 4  # of one question

# A window [T] and its number in the run -> the changed window, and the mask of its answers.
ChangeRow = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def recall_rows(
    seed: int,
    *,
    repeats: float,
    min_distance: int,
    spans: Sequence[int] = SPAN_SIZES,
    facts: float = 0.0,
    several: float = 0.0,
    passkeys: float = 0.0,
    tokenizer: Any = None,
) -> ChangeRow | None:
    """A function that makes a share of the windows reward looking far back, or None.

    It is given each window and its number in the run, which decides what becomes of it.
    several: share of the windows with facts whose question has several answers.
    """
    if not repeats and not facts and not passkeys:
        return None
    fact_rows = FactRows(tokenizer, several)
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
    several: share of the rows that have one question with several answers: all values of a name,
        the values of several names, or all names of a value.
    """

    def __init__(self, tokenizer: Any, several: float = 0.0):
        self._tokenizer, self._several = tokenizer, several

    def row(self, row: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The row [T] with facts in it and questions with their answers at its end, and the mask
        of the answers' tokens."""
        count = int(rng.integers(1, min(MAX_FACTS, max(1, len(row) // FACT_EVERY)) + 1))
        if self._several and count > 1 and rng.random() < self._several:
            kind = SEVERAL_ANSWERS[int(rng.integers(len(SEVERAL_ANSWERS)))]
        else:
            kind = one_value_each
        stated = kind(count, rng)
        facts = [encode(self._tokenizer, fact) for fact in stated.facts]
        ending: list[int] = []
        answered: list[bool] = []
        for question, opening in stated.questions:
            tokens = encode(self._tokenizer, question)
            start = shared_length(tokens, encode(self._tokenizer, opening))
            ending += tokens
            answered += [place >= start for place in range(len(tokens))]
        answers = torch.zeros(len(row), dtype=torch.bool)
        room = len(row) - len(ending) - sum(map(len, facts))
        if room < 1:
            return row, answers
        if rng.random() < TILED:
            row = _tile(row, rng)
        cuts = np.sort(rng.integers(0, room + 1, size=count))
        order = range(count) if stated.in_order else rng.permutation(count)
        pieces: list[int] = []
        start = 0
        for cut, number in zip(cuts.tolist(), order, strict=True):
            pieces += [*row[start:cut].tolist(), *facts[number]]
            start = cut
        answers[-len(ending) :] = torch.tensor(answered)
        ids = [*pieces, *row[start:room].tolist(), *ending]
        return torch.tensor(ids, dtype=row.dtype), answers


class StatedFacts(NamedTuple):
    """The facts of a row, and each question with its answer and without."""

    facts: list[str]
    questions: list[tuple[str, str]]
    in_order: bool = False  # whether the facts must stand in this order


def one_value_each(count: int, rng: np.random.Generator) -> StatedFacts:
    """Facts of different names, and questions for some of them."""
    asked = int(rng.integers(1, min(MAX_QUESTIONS, count) + 1))
    fact, question = FACTS[int(rng.integers(len(FACTS)))]
    thing = str(rng.choice(THINGS))
    names = rng.choice(NAMES, size=count, replace=False)
    pairs = [{"thing": thing, "name": name, "value": _value(rng)} for name in names]
    return StatedFacts(
        [fact.format(**pair) for pair in pairs],
        [_question(question, "value", **pair) for pair in pairs[:asked]],
    )


def values_of_a_name(count: int, rng: np.random.Generator) -> StatedFacts:
    """Two or more facts of one name among those of others, and the question for all its values."""
    size = int(rng.integers(2, min(MOST_ANSWERS, count) + 1))
    fact, question = LISTS[int(rng.integers(len(LISTS)))]
    thing = str(rng.choice(THINGS))
    asked, *others = rng.choice(NAMES, size=1 + count - size, replace=False)
    pairs = [{"thing": thing, "name": name} for name in rng.permutation([asked] * size + others)]
    values = _distinct_values(count, rng)
    own = [value for pair, value in zip(pairs, values, strict=True) if pair["name"] == asked]
    return StatedFacts(
        [fact.format(**pair, value=value) for pair, value in zip(pairs, values, strict=True)],
        [_question(question, "values", thing=thing, name=asked, values=", ".join(own))],
        in_order=True,
    )


def values_of_names(count: int, rng: np.random.Generator) -> StatedFacts:
    """Facts of different names, and one question for some of them, in any order."""
    size = int(rng.integers(2, min(MOST_ANSWERS, count) + 1))
    fact, question = TOGETHER[int(rng.integers(len(TOGETHER)))]
    thing = str(rng.choice(THINGS))
    names = rng.choice(NAMES, size=count, replace=False)
    values = _distinct_values(count, rng)
    asked = {"names": ", ".join(names[:size]), "values": ", ".join(values[:size])}
    return StatedFacts(
        [
            fact.format(thing=thing, name=name, value=value)
            for name, value in zip(names, values, strict=True)
        ],
        [_question(question, "values", thing=thing, **asked)],
    )


def names_of_a_value(count: int, rng: np.random.Generator) -> StatedFacts:
    """A value that two or more names take over one after the other, among names with values of
    their own, and the question for all its names."""
    size = int(rng.integers(2, min(MOST_ANSWERS, count) + 1))
    first, later, question = CHAINS[int(rng.integers(len(CHAINS)))]
    thing = str(rng.choice(THINGS))
    names = [str(name) for name in rng.choice(NAMES, size=count, replace=False)]
    chain = names[:size]
    value, *others = _distinct_values(1 + count - size, rng)
    links = [first.format(thing=thing, name=chain[0], value=value)] + [
        later.format(thing=thing, name=name, source=source) for source, name in pairwise(chain)
    ]
    facts = [
        first.format(thing=thing, name=name, value=other)
        for name, other in zip(names[size:], others, strict=True)
    ]
    for place, link in zip(
        np.sort(rng.choice(count, size=size, replace=False)), links, strict=True
    ):
        facts.insert(place, link)
    return StatedFacts(
        facts,
        [_question(question, "names", thing=thing, value=value, names=", ".join(chain))],
        in_order=True,
    )


SEVERAL_ANSWERS = (values_of_a_name, values_of_names, names_of_a_value)


def _question(template: str, answer: str, **fields: str) -> tuple[str, str]:
    """A question with its answer, and up to it."""
    opening = template.partition(f"{{{answer}}}")[0].rstrip(" ")
    return template.format(**fields), opening.format(**fields)


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


def _tile(row: Tensor, rng: np.random.Generator) -> Tensor:
    """One span of the row [T], repeated to its length."""
    size = min(int(rng.integers(*SPAN_SIZES)), len(row))
    start = int(rng.integers(0, len(row) - size + 1))
    return row[start : start + size].repeat(-(-len(row) // size))[: len(row)]


def _distinct_values(count: int, rng: np.random.Generator) -> list[str]:
    values: dict[str, None] = {}
    while len(values) < count:
        values[_value(rng)] = None
    return list(values)


def _value(rng: np.random.Generator) -> str:
    """A number of other than five digits, one or two words, or both."""
    kind = int(rng.integers(3))
    digits = int(rng.choice(DIGITS))
    number = str(int(rng.integers(10 ** (digits - 1), 10**digits)))
    words = " ".join(rng.choice(WORDS, size=int(rng.integers(1, 3))))
    return (number, words, f"{words} {number}")[kind]
