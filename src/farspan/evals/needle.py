"""Needle in a haystack, after RULER: facts hidden in irrelevant text and asked for at its end.

Made for base models: the question is an unfinished sentence that the answer completes, and
everything but the haystack is short enough for 256 tokens. Prompt and answer together have exactly
the given length. The same facts are at the same relative depths at every length.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from farspan.data.documents import read_documents
from farspan.data.passkey import FILLER
from farspan.data.tokens import encode
from farspan.errors import FarspanError, suggest
from farspan.evals.answers import answer_samples, batch_setting, generate_texts
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey, average, wilson
from farspan.train.metadata import begin_of_text

NAME = "needle"
TASKS = ("single", "multi-key", "multi-value", "multi-query", "variables")
MIN_LENGTH = 256  # tokens
CHARACTERS_PER_TOKEN = 32  # read from a haystack, far more than needed so that samples differ
NUMBERS = range(1_000_000, 10_000_000)
VALUES = range(10_000, 100_000)
KEYS = 4  # hidden by multi-key, which asks for one of them
KEY_VALUES = 4  # of the single key of multi-value
QUERIES = 4  # keys of multi-query, which asks for all of them
HOPS = 4  # from the first variable to the last
THRESHOLD = 0.85  # recall from which a length counts as effective
INTROS = {"variables": "Keep track of the variables in this text.\n"}
INTRO = "Remember the magic numbers in this text.\n"
ADJECTIVES = (
    "amber bitter brave calm clever crimson dusty eager faint gentle golden hollow icy jolly keen "
    "little mellow noble pale quiet rapid silent tender wild"
)
NOUNS = (
    "anchor barrel candle desert engine falcon garden harbor island jacket kettle lantern meadow "
    "needle orchard pillow quarry ribbon saddle temple umbrella valley window yard"
)


@dataclass(frozen=True)
class NeedleSample:
    """The needles, the question and the expected answers of one prompt."""

    needles: tuple[str, ...]
    depths: tuple[float, ...]  # of each needle: the share of the haystack before it
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Needle:
    """Samples of each task at each length; recall is the share of answers in the prediction.

    >>> [cell.task for cell in Needle((256,), tasks=("single", "variables")).cells()]
    ['single', 'variables']
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    samples: int = 20
    haystack: str | Path = ""  # text as for --data; empty: the filler of passkey documents
    seed: int = 0
    batch: int | None = None  # prompts decoded together; default: one on a CPU, else what fits

    def cells(self) -> list[EvalCell]:
        """One cell for each task and length."""
        self._check()
        settings = {
            "samples": self.samples,
            "keys": KEYS,
            "values": KEY_VALUES,
            "queries": QUERIES,
            "hops": HOPS,
            "chains": 1,  # of variables
            "seed": self.seed,
            **batch_setting(self.batch),
        }
        haystacks = {length: self.haystack_name(length) for length in self.lengths}
        return [
            EvalCell(NAME, task, length, settings | {"haystack": haystack})
            for length, haystack in haystacks.items()
            for task in self.tasks
        ]

    def score_keys(self) -> list[ScoreKey]:
        """Recall at every length; the effective length belongs to the longest one."""
        return recall_keys(NAME, self.tasks, sorted({cell.length for cell in self.cells()}))

    def run(self, cell: EvalCell, model: Any, tokenizer: Any) -> list[Sample]:
        samples, rows, answer_tokens = self.prompts(cell, tokenizer)
        answers = generate_texts(model, tokenizer, rows, answer_tokens, self.batch)
        texts = [tokenizer.decode(row) for row in rows]
        return answer_samples(cell, samples, texts, answers, answer_tokens, recall)

    def prompts(
        self, cell: EvalCell, tokenizer: Any
    ) -> tuple[list[NeedleSample], list[list[int]], int]:
        """The samples of a cell, their equally long prompts, and the tokens left for an answer."""
        samples = [self._make_sample(cell.task, number) for number in range(self.samples)]
        answer_tokens = 2 * max(
            len(encode(tokenizer, " " + ", ".join(sample.answers))) for sample in samples
        )
        intro = INTROS.get(cell.task, INTRO)
        return samples, self.rows(cell, tokenizer, samples, intro, answer_tokens), answer_tokens

    def rows(
        self,
        cell: EvalCell,
        tokenizer: Any,
        samples: Sequence[NeedleSample],
        intro: str,
        answer_tokens: int,
    ) -> list[list[int]]:
        """Prompts of one length: an introduction, the needles in their haystack, the question."""
        first = [*begin_of_text(tokenizer), *encode(tokenizer, intro)]
        sentences = [encode(tokenizer, sentence) for sentence in self._sentences(cell.length)]
        rows = []
        for number, sample in enumerate(samples):
            question = encode(tokenizer, sample.question)
            needles = [encode(tokenizer, needle) for needle in sample.needles]
            fixed = answer_tokens + len(first) + len(question) + sum(map(len, needles))
            if fixed > cell.length:
                raise FarspanError(
                    f"a length of {cell.length} is too short for {cell.task}, which needs {fixed} "
                    "tokens without any haystack; use longer lengths"
                )
            hay, ends = self._hay(sentences, cell.length - fixed, number)
            rows.append([*first, *insert_needles(hay, ends, needles, sample.depths), *question])
        return rows

    def score(self, samples: list[Sample]) -> list[Score]:
        """Recall for each task and length, its average over tasks, and effective lengths."""
        scores = task_scores(NAME, "recall", samples)
        return [*scores, *effective_lengths(scores, THRESHOLD)]

    def _check(self) -> None:
        if not self.lengths:
            raise FarspanError("the needle evaluation has no lengths; give at least one")
        if min(self.lengths) < MIN_LENGTH:
            raise FarspanError(
                f"needle prompts need {MIN_LENGTH} tokens, but the shortest length is "
                f"{min(self.lengths)}; use longer lengths"
            )
        for task in self.tasks:
            if task not in TASKS:
                raise FarspanError(f"needle has no task {task!r}; {suggest(task, TASKS)}")
        for name in ("samples", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise FarspanError(f"the needle setting {name} is {value}; use 1 or more")

    # The haystack.

    def haystack_name(self, length: int) -> str:
        return haystack_name(self.haystack, length) if self.haystack else "filler"

    def _sentences(self, length: int) -> list[str]:
        """The sentences of the haystack, each with a leading space."""
        if not self.haystack:
            return re.findall(r" [^.]+\.", FILLER)
        return [f" {sentence}" for sentence in haystack_sentences(self.haystack, length)]

    def _hay(
        self, sentences: list[list[int]], size: int, number: int
    ) -> tuple[list[int], list[int]]:
        """`size` tokens of haystack and the positions of sentence ends in them.

        Every sample of a haystack text starts at another sentence.
        """
        start = 0
        if self.haystack:
            total = sum(map(len, sentences))
            if total < max(size, 1):
                raise FarspanError(
                    f"the haystack {self.haystack} has {total} tokens, but {size} are needed; "
                    "use longer text, or remove --data to use the filler"
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

    # The samples.

    def _make_sample(self, task: str, number: int) -> NeedleSample:
        rng = np.random.default_rng((self.seed, TASKS.index(task), number))
        if task == "variables":
            return _variables(rng)
        keys = {"multi-key": KEYS, "multi-query": QUERIES}.get(task, 1)
        values = KEY_VALUES if task == "multi-value" else 1
        numbers = iter(draw_distinct(rng, NUMBERS, keys * values))
        facts = {key: [next(numbers) for _ in range(values)] for key in _draw_keys(rng, keys)}
        queried = list(facts) if task == "multi-query" else list(facts)[:1]
        # Over the samples the first needle moves evenly from start to end; the others are random.
        depths = (number / max(1, self.samples - 1), *rng.random(keys * values - 1).tolist())
        plural = len(queried) * values > 1
        names, verb = _enumerate(queried), "are" if plural else "is"
        return NeedleSample(
            tuple(
                f" The magic number of {key} is: {value}."
                for key, values in facts.items()
                for value in values
            ),
            depths,
            f"\nThe magic number{'s' * plural} of {names} {verb}:",
            tuple(value for key in queried for value in facts[key]),
        )


def _variables(rng: np.random.Generator) -> NeedleSample:
    """A chain of assignments in order. The question asks for all of its variables."""
    names = draw_names(rng, HOPS + 1)
    (value,) = draw_distinct(rng, VALUES, 1)
    sources = [value, *(f"VAR {name}" for name in names)]
    needles = [f" VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    depths = sorted(rng.random(len(names)).tolist())
    question = f"\nThe {len(names)} variables that hold {value} are: VAR"
    return NeedleSample(tuple(needles), tuple(depths), question, tuple(names))


def haystack_text(haystack: str | Path, length: int) -> str:
    """The first words of a text, enough for samples of this length that differ."""
    pieces, characters = [], 0
    for document in read_documents(haystack):
        pieces.append(document.text)
        characters += len(document.text)
        if characters >= CHARACTERS_PER_TOKEN * length:
            break
    return " ".join(" ".join(pieces).split())[: CHARACTERS_PER_TOKEN * length]


def haystack_sentences(haystack: str | Path, length: int) -> list[str]:
    text = haystack_text(haystack, length)
    return [sentence for sentence in re.split(r"(?<=[.!?]) ", text) if sentence]


def haystack_name(haystack: str | Path, length: int) -> str:
    """The file's name and a hash of the part that is read."""
    digest = hashlib.sha256(haystack_text(haystack, length).encode()).hexdigest()
    return f"{Path(haystack).name} {digest[:16]}"


def recall(prediction: str, answers: Sequence[str]) -> float:
    """The share of answers in the prediction."""
    return sum(answer in prediction for answer in answers) / len(answers)


def insert_needles(
    hay: list[int], ends: list[int], needles: list[list[int]], depths: Sequence[float]
) -> list[int]:
    """The haystack with each needle after the last sentence that ends at or before its depth."""
    positions = [ends[bisect_right(ends, depth * len(hay)) - 1] for depth in depths]
    tokens: list[int] = []
    start = 0
    for position, needle in sorted(zip(positions, needles, strict=True), key=lambda pair: pair[0]):
        tokens += [*hay[start:position], *needle]
        start = position
    return [*tokens, *hay[start:]]


def task_scores(
    name: str, metric: str, samples: list[Sample], scale: float = 1, average_task: str = "average"
) -> list[Score]:
    """The mean score of each task at each length, and the average over tasks."""
    groups: dict[str, dict[int, list[float]]] = {}
    haystacks: dict[str, str] = {}
    for sample in samples:
        lengths = groups.setdefault(sample["task"], {})
        lengths.setdefault(sample["length"], []).append(sample["score"])
        file = sample["haystack"].rpartition(" ")[0]  # without the hash of its text
        haystacks.setdefault(sample["task"], file or sample["haystack"])
    scores: list[Score] = []
    for task, lengths in groups.items():
        tags: dict[str, Any] = {"task": task, "haystack": haystacks[task]}
        for length, values in sorted(lengths.items()):
            value, low, high = (scale * bound for bound in wilson(sum(values), len(values)))
            scores.append(Score(name, metric, length, value, low, high, len(values), dict(tags)))
    if len(groups) > 1:
        tags = {"task": average_task, "tasks": len(groups), "task_names": [*groups]}
        if len(names := set(haystacks.values())) == 1:
            tags["haystack"] = names.pop()
        common = set.intersection(*(set(lengths) for lengths in groups.values()))
        for length in sorted(common):
            parts = [
                score for score in scores if score.length == length and score.tags["task"] in groups
            ]
            mean = average([(score.value, score.low, score.high) for score in parts])
            count = sum(score.n for score in parts)
            scores.append(Score(name, metric, length, *mean, count, dict(tags)))
    return scores


def recall_keys(name: str, tasks: Sequence[str], lengths: Sequence[int]) -> list[ScoreKey]:
    """Recall of each task and of their average at every length, then their effective lengths."""
    tasks = [*tasks, *["average"] * (len(tasks) > 1)]
    recall = [ScoreKey(name, task, "recall", length) for task in tasks for length in lengths]
    return recall + [ScoreKey(name, task, "effective_length", lengths[-1]) for task in tasks]


def effective_lengths(means: list[Score], threshold: float) -> list[Score]:
    """That of each task; the interval is that of the lower and the upper bounds of the means."""
    scores = []
    for task in dict.fromkeys(score.tags["task"] for score in means):
        group = [score for score in means if score.tags["task"] == task]
        value, low, high = (
            effective_length({score.length: getattr(score, bound) for score in group}, threshold)
            for bound in ("value", "low", "high")
        )
        last, count = group[-1], sum(score.n for score in group)
        tags = {**last.tags, "threshold": threshold}
        scores.append(
            Score(last.eval, "effective_length", last.length, value, low, high, count, tags)
        )
    return scores


def effective_length(scores: Mapping[int, float], threshold: float) -> int:
    """The longest length up to which every score reaches the threshold; 0 if none does.

    >>> effective_length({512: 1.0, 1024: 0.9, 2048: 0.3, 4096: 0.9}, 0.85)
    1024
    """
    longest = 0
    for length in sorted(scores):
        if scores[length] < threshold:
            break
        longest = length
    return longest


def draw_distinct(rng: np.random.Generator, numbers: range, count: int) -> list[str]:
    return [str(numbers[index]) for index in rng.choice(len(numbers), count, replace=False)]


def _draw_keys(rng: np.random.Generator, count: int) -> list[str]:
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
    return [pairs[index] for index in rng.choice(len(pairs), count, replace=False)]


def draw_names(rng: np.random.Generator, count: int, letters: int = 5) -> list[str]:
    """Distinct names of capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(chr(ord("A") + letter) for letter in rng.integers(0, 26, letters))] = None
    return list(names)


def _enumerate(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
