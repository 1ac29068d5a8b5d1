"""Needles in a haystack, in the manner of RULER: facts hidden in irrelevant text, and asked for at its end.

Made for models that only go on with a text: the question is a sentence that breaks off where the answer begins, and
everything but the haystack is short, so that 256 tokens hold it. Prompt and answer together have exactly the length
asked for. At every length the same facts stand at the same relative depths.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farspan.data.documents import read_documents
from farspan.data.passkey import FILLER
from farspan.errors import FarspanError, nearest
from farspan.evals.decoding import continuations, end_tokens
from farspan.evals.perplexity import rows_at_once
from farspan.evals.scores import Cell, Place, Sample, Score, average, wilson
from farspan.memory import in_pieces

NAME = "needle"
TASKS = ("single", "multi-key", "multi-value", "multi-query", "variables")
SHORTEST = 256  # tokens
LETTERS_A_TOKEN = 32  # of a haystack that are read for each token of a length, so that samples differ
NUMBERS = range(1_000_000, 10_000_000)
VALUES = range(10_000, 100_000)
INTROS = {"variables": "Keep track of the variables in this text.\n"}
INTRO = "Remember the magic numbers in this text.\n"
ADJECTIVES = (
    "amber bitter brave calm clever crimson dusty eager faint gentle golden hollow icy jolly keen little mellow noble "
    "pale quiet rapid silent tender wild"
)
NOUNS = (
    "anchor barrel candle desert engine falcon garden harbor island jacket kettle lantern meadow needle orchard pillow "
    "quarry ribbon saddle temple umbrella valley window yard"
)


@dataclass(frozen=True)
class Riddle:
    """What is hidden, how it is asked for, and what has to be told."""

    needles: tuple[str, ...]
    depths: tuple[float, ...]  # of each needle: the share of the haystack before it
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Needle:
    """Some samples of each task at each length; recall is the share of the answers that the model tells.

    >>> [cell.task for cell in Needle((256,), tasks=("single", "variables")).cells()]
    ['single', 'variables']
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    samples: int = 20
    haystack: str | Path = ""  # text as for --data; empty: the filler of passkey documents, over and over
    keys: int = 4  # hidden with multi-key, one of which is asked for
    values: int = 4  # of the one key of multi-value
    queries: int = 4  # keys of multi-query, all asked for
    hops: int = 4  # from the first variable to the last
    chains: int = 1  # of variables, one of which is asked for
    threshold: float = 0.85  # recall that makes a length effective
    seed: int = 0
    batch: int = 8

    def cells(self) -> list[Cell]:
        """A cell is a task at a length."""
        self._check()
        settings = asdict(self)
        for other in ("lengths", "tasks", "threshold", "batch"):
            del settings[other]
        return [
            Cell(NAME, task, length, settings | {"haystack": haystack})
            for length, haystack in ((length, self._haystack_name(length)) for length in self.lengths)
            for task in self.tasks
        ]

    def places(self) -> list[Place]:
        """Recall at every length; the effective length is of all lengths, and told at the longest."""
        lengths = sorted({cell.length for cell in self.cells()})
        tasks = [*self.tasks, *["average"] * (len(self.tasks) > 1)]
        recall = [Place(NAME, task, "recall", length) for task in tasks for length in lengths]
        return recall + [Place(NAME, task, "effective_length", lengths[-1]) for task in tasks]

    def run(self, cell: Cell, model: Any, tokenizer: Any) -> list[Sample]:
        riddles, rows, room = self.prompts(cell, tokenizer)
        ends = end_tokens(model, tokenizer)
        said: list[str] = []

        def some(start: int, stop: int) -> None:
            told = continuations(model, torch.tensor(rows[start:stop]), room, ends=ends)
            said.extend(tokenizer.decode(ids, skip_special_tokens=True) for ids in told)

        in_pieces(len(rows), rows_at_once(model, cell.length, self.batch), some)
        return [
            {
                "eval": NAME,
                "task": cell.task,
                "length": cell.length,
                "haystack": cell.settings["haystack"],
                "id": number,
                "depths": [round(depth, 4) for depth in riddle.depths],
                "question": riddle.question.strip(),
                "prediction": text,
                "answers": list(riddle.answers),
                "score": sum(answer in text for answer in riddle.answers) / len(riddle.answers),
                "tokens": len(row),
                "answer_tokens": room,
            }
            for number, (riddle, row, text) in enumerate(zip(riddles, rows, said, strict=True))
        ]

    def prompts(self, cell: Cell, tokenizer: Any) -> tuple[list[Riddle], list[list[int]], int]:
        """The riddles of a cell, their prompts in tokens, all equally many, and how many are left for an answer."""
        riddles = [self._riddle(cell.task, number) for number in range(self.samples)]
        room = 2 * max(len(_encode(tokenizer, " " + ", ".join(riddle.answers))) for riddle in riddles)
        intro = [*_opening(tokenizer), *_encode(tokenizer, INTROS.get(cell.task, INTRO))]
        sentences = [_encode(tokenizer, sentence) for sentence in self._sentences(cell.length)]
        rows = []
        for number, riddle in enumerate(riddles):
            question = _encode(tokenizer, riddle.question)
            needles = [_encode(tokenizer, needle) for needle in riddle.needles]
            left = cell.length - room - len(intro) - len(question) - sum(map(len, needles))
            if left < 0:
                raise FarspanError(
                    f"{cell.length} tokens have no room for {cell.task}, which takes {cell.length - left} without "
                    "any haystack; ask for longer lengths, or for fewer needles"
                )
            hay, ends = self._hay(sentences, left, number)
            rows.append([*intro, *hidden(hay, ends, needles, riddle.depths), *question])
        return riddles, rows, room

    def score(self, samples: list[Sample]) -> list[Score]:
        """Recall for each task and length, its average over tasks, and the effective length of both."""
        groups: dict[str, dict[int, list[float]]] = {}
        for sample in samples:
            groups.setdefault(sample["task"], {}).setdefault(sample["length"], []).append(sample["score"])
        shared = {"haystack": samples[0]["haystack"].rpartition(" ")[0] or "filler"} if samples else {}
        found: list[Score] = []
        for task, lengths in groups.items():
            found += [
                Score(NAME, "recall", length, *wilson(sum(values), len(values)), len(values), {"task": task, **shared})
                for length, values in sorted(lengths.items())
            ]
        if len(groups) > 1:
            for length in sorted(set.intersection(*(set(lengths) for lengths in groups.values()))):
                here = [score for score in found if score.length == length and score.tags["task"] in groups]
                mean = average([(score.value, score.low, score.high) for score in here])
                tags = {"task": "average", "tasks": len(groups), **shared}
                found.append(Score(NAME, "recall", length, *mean, sum(score.n for score in here), tags))
        return [*found, *self._effective(found)]

    def _effective(self, recalls: list[Score]) -> list[Score]:
        """The interval is that of a model which is as bad, or as good, as recall's intervals allow."""
        scores = []
        for task in dict.fromkeys(score.tags["task"] for score in recalls):
            mine = [score for score in recalls if score.tags["task"] == task]
            value, low, high = (
                effective_length({score.length: getattr(score, bound) for score in mine}, self.threshold)
                for bound in ("value", "low", "high")
            )
            tags = {**mine[-1].tags, "threshold": self.threshold}
            count = sum(score.n for score in mine)
            scores.append(Score(NAME, "effective_length", mine[-1].length, value, low, high, count, tags))
        return scores

    def _check(self) -> None:
        if not self.lengths:
            raise FarspanError("needles are hidden in no length at all; ask for one or more")
        if min(self.lengths) < SHORTEST:
            raise FarspanError(f"needles take {SHORTEST} tokens, and {min(self.lengths)} are asked for; ask for more")
        for task in self.tasks:
            if task not in TASKS:
                raise FarspanError(f"needle has no task {task!r}; {nearest(task, TASKS)}")
        for name in ("samples", "keys", "values", "queries", "hops", "chains", "batch"):
            if getattr(self, name) < 1:
                raise FarspanError(f"needle's {name} are {getattr(self, name)}; ask for 1 or more")

    # The haystack.

    def _text(self, length: int) -> str:
        pieces, letters = [], 0
        for document in read_documents(self.haystack):
            pieces.append(document.text)
            letters += len(document.text)
            if letters >= LETTERS_A_TOKEN * length:
                break
        return " ".join(" ".join(pieces).split())[: LETTERS_A_TOKEN * length]

    def _haystack_name(self, length: int) -> str:
        if not self.haystack:
            return "filler"
        return f"{Path(self.haystack).name} {hashlib.sha256(self._text(length).encode()).hexdigest()[:16]}"

    def _sentences(self, length: int) -> list[str]:
        """Each with the space before it."""
        if not self.haystack:
            return re.findall(r" [^.]+\.", FILLER)
        return [f" {sentence}" for sentence in re.split(r"(?<=[.!?]) ", self._text(length)) if sentence]

    def _hay(self, sentences: list[list[int]], size: int, number: int) -> tuple[list[int], list[int]]:
        """`size` tokens of haystack, for each sample from another sentence on, and where sentences end in them."""
        start = 0
        if self.haystack:
            have = sum(map(len, sentences))
            if have < max(size, 1):
                raise FarspanError(
                    f"the haystack {self.haystack} has {have} tokens, and {size} are needed; "
                    "give longer text, or leave it away"
                )
            start = int(np.random.default_rng((self.seed, number)).integers(len(sentences)))
        hay: list[int] = []
        ends = [0]
        for sentence in cycle([*sentences[start:], *sentences[:start]]):
            hay += sentence
            if len(hay) > size:
                break
            ends.append(len(hay))
        return hay[:size], ends

    # The riddles.

    def _riddle(self, task: str, number: int) -> Riddle:
        rng = np.random.default_rng((self.seed, TASKS.index(task), number))
        if task == "variables":
            return self._variables(rng)
        keys = {"multi-key": self.keys, "multi-query": self.queries}.get(task, 1)
        values = self.values if task == "multi-value" else 1
        numbers = iter(_different(rng, NUMBERS, keys * values))
        facts = {key: [next(numbers) for _ in range(values)] for key in _words(rng, keys)}
        asked = list(facts) if task == "multi-query" else list(facts)[:1]
        # The first is moved evenly through the haystack, from its beginning to its end; the others stand anywhere.
        depths = (number / max(1, self.samples - 1), *rng.random(keys * values - 1).tolist())
        several = len(asked) * values > 1
        return Riddle(
            tuple(f" The magic number of {key} is: {value}." for key, values in facts.items() for value in values),
            depths,
            f"\nThe magic number{'s' * several} of {_listed(asked)} {'are' if several else 'is'}:",
            tuple(value for key in asked for value in facts[key]),
        )

    def _variables(self, rng: np.random.Generator) -> Riddle:
        """Chains of assignments, each in its order; the question is which variables hold the first chain's value."""
        size = self.hops + 1
        names = _names(rng, self.chains * size)
        values = _different(rng, VALUES, self.chains)
        needles: list[str] = []
        depths: list[float] = []
        for chain, value in enumerate(values):
            mine = names[chain * size : (chain + 1) * size]
            sources = [value, *(f"VAR {name}" for name in mine)]
            needles += [f" VAR {name} = {source}." for name, source in zip(mine, sources, strict=False)]
            depths += sorted(rng.random(size).tolist())
        question = f"\nThe {size} variables that hold {values[0]} are: VAR"
        return Riddle(tuple(needles), tuple(depths), question, tuple(names[:size]))


def hidden(hay: list[int], ends: list[int], needles: list[list[int]], depths: Sequence[float]) -> list[int]:
    """The haystack with each needle between two sentences: behind the last that ends at its depth or before."""
    places = [ends[bisect_right(ends, depth * len(hay)) - 1] for depth in depths]
    found: list[int] = []
    start = 0
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        found += [*hay[start:place], *needle]
        start = place
    return [*found, *hay[start:]]


def effective_length(scores: Mapping[int, float], threshold: float) -> int:
    """The longest length at which the score, there and at every shorter one, is at the threshold or above; else 0.

    >>> effective_length({512: 1.0, 1024: 0.9, 2048: 0.3, 4096: 0.9}, 0.85)
    1024
    """
    longest = 0
    for length in sorted(scores):
        if scores[length] < threshold:
            break
        longest = length
    return longest


def _different(rng: np.random.Generator, among: range, count: int) -> list[str]:
    return [str(among[place]) for place in rng.choice(len(among), count, replace=False)]


def _words(rng: np.random.Generator, count: int) -> list[str]:
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
    if count > len(pairs):
        raise FarspanError(f"needle has {len(pairs)} keys, and {count} are asked for; ask for fewer")
    return [pairs[place] for place in rng.choice(len(pairs), count, replace=False)]


def _names(rng: np.random.Generator, count: int) -> list[str]:
    """Different ones, of five capital letters each."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(chr(ord("A") + letter) for letter in rng.integers(0, 26, 5))] = None
    return list(names)


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _opening(tokenizer: Any) -> list[int]:
    """The token that begins every text, where the tokenizer itself puts one."""
    first = tokenizer("", verbose=False)["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
