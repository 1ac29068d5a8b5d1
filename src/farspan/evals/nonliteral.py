"""Retrieval that words do not give away: the question shares no content word with the needle.

After NoLiMa (Modarressi et al. 2025), with texts of our own. A sentence says what somebody did
("Mara climbed the Eiffel Tower"), and the question asks for it by a fact about the world ("The
name of the person who went to France is"). Other sentences name other people with other facts. A
model that does not know such facts cannot answer at any length, so a score is reported only if the
model solves the task at a short length, which is always measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from farspan.data.tokens import encode
from farspan.errors import FarspanError
from farspan.evals.answers import answer_samples, batch_setting, generate_texts
from farspan.evals.needle import (
    THRESHOLD,
    Needle,
    NeedleSample,
    effective_lengths,
    recall_keys,
    task_scores,
)
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey

NAME = "nonliteral"
SHORT = 256  # tokens at which a model must solve the task
SOLVED = 0.7  # recall there; a guess among the people named has one in four
PEOPLE = 4  # named in a text
INTRO = "Remember what these people did.\n"
NAMES = [
    "Mara",
    "Tobin",
    "Elsa",
    "Ruben",
    "Nadia",
    "Felix",
    "Greta",
    "Oscar",
    "Lena",
    "Victor",
    "Clara",
    "Simon",
    "Paula",
    "Edgar",
    "Irene",
    "Hugo",
    "Marta",
    "Leon",
    "Nora",
    "Walter",
    "Judith",
    "Conrad",
    "Silvia",
    "Bruno",
]

# By task: what the question says, and for each kind of answer what a needle may say.
FACTS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "place": (
        "The name of the person who went to {kind} is",
        {
            "France": ("{name} climbed the Eiffel Tower", "{name} slept in a hotel in Paris"),
            "Italy": ("{name} drew the ruins of Rome", "{name} rowed through Venice"),
            "Egypt": ("{name} rode along the Nile", "{name} stood before the Sphinx near Cairo"),
            "Japan": ("{name} took a train from Tokyo to Kyoto", "{name} walked around Mount Fuji"),
            "England": ("{name} waited at Big Ben in London", "{name} rented a room in Oxford"),
            "Germany": ("{name} saw the old wall in Berlin", "{name} danced all night in Munich"),
            "Russia": ("{name} crossed Red Square in Moscow", "{name} looked at the Kremlin"),
            "Greece": ("{name} sat on the Acropolis in Athens", "{name} sailed from Crete"),
            "China": ("{name} stayed in Beijing for a week", "{name} worked in Shanghai"),
            "Australia": ("{name} sang at the opera of Sydney", "{name} surfed near Melbourne"),
        },
    ),
    "work": (
        "The name of the person who works as a {kind} is",
        {
            "doctor": ("{name} treats patients in a hospital", "{name} gives medicine to the sick"),
            "teacher": ("{name} explains fractions to pupils", "{name} marks homework at school"),
            "farmer": ("{name} milks cows every morning", "{name} harvests wheat in the fields"),
            "pilot": ("{name} lands airplanes at the airport", "{name} sits in a cockpit all day"),
            "baker": ("{name} takes fresh bread from the oven", "{name} kneads dough before dawn"),
            "soldier": ("{name} serves in the army", "{name} marches with a rifle"),
            "judge": ("{name} sentences criminals in court", "{name} decides trials"),
            "sailor": ("{name} ties ropes on the deck of a ship", "{name} crosses oceans by boat"),
        },
    ),
    "animal": (
        "The name of the person who keeps a {kind} is",
        {
            "dog": ("{name} walks a poodle on a leash", "{name} feeds a puppy that barks"),
            "cat": ("{name} strokes a kitten that purrs", "{name} hears meowing at breakfast"),
            "horse": ("{name} saddles a pony in the stable", "{name} brushes a mare and her foal"),
            "bird": ("{name} taught a parrot to talk", "{name} lets a canary out of its cage"),
            "fish": ("{name} cleans the aquarium of a carp", "{name} has a trout in the pond"),
            "cow": ("{name} milks a heifer in the barn", "{name} raises a calf"),
        },
    ),
}
TASKS = tuple(FACTS)


@dataclass(frozen=True)
class NonLiteral:
    """Samples of each task at each length, and at a short one that decides what is reported.

    >>> [cell.length for cell in NonLiteral((1024,)).cells()]
    [256, 256, 256, 1024, 1024, 1024]
    """

    lengths: tuple[int, ...]
    samples: int = 20
    haystack: str | Path = ""  # text as for --data; empty: the filler of passkey documents
    seed: int = 0
    batch: int | None = None  # prompts decoded together; default: one on a CPU, else what fits

    def cells(self) -> list[EvalCell]:
        """One cell for each task and length, the short one first."""
        if self.samples < 1 or min(self.lengths) < SHORT:
            raise FarspanError(
                f"the nonliteral evaluation of {self.samples} samples at {min(self.lengths)} "
                f"tokens is too small; use 1 sample and {SHORT} tokens or more"
            )
        settings = {"samples": self.samples, "seed": self.seed, **batch_setting(self.batch)}
        lengths = sorted({SHORT, *self.lengths})
        haystacks = {length: self._needle.haystack_name(length) for length in lengths}
        return [
            EvalCell(NAME, task, length, settings | {"haystack": haystack})
            for length, haystack in haystacks.items()
            for task in TASKS
        ]

    def score_keys(self) -> list[ScoreKey]:
        """Of all tasks, as if they were solved at the short length."""
        return recall_keys(NAME, TASKS, sorted({SHORT, *self.lengths}))

    def run(self, cell: EvalCell, model: Any, tokenizer: Any) -> list[Sample]:
        samples, rows, answer_tokens = self.prompts(cell, tokenizer)
        answers = generate_texts(model, tokenizer, rows, answer_tokens, self.batch)
        texts = [tokenizer.decode(row) for row in rows]
        return answer_samples(cell, samples, texts, answers, answer_tokens, first_name)

    def score(self, samples: list[Sample]) -> list[Score]:
        """The tasks that are solved at the short length; of the others only that length."""
        solved = self.solved(samples)
        kept = [each for each in samples if each["task"] in solved or each["length"] == SHORT]
        scores = task_scores(NAME, "recall", [each for each in kept if each["task"] in solved])
        unsolved = task_scores(
            NAME, "recall", [each for each in kept if each["task"] not in solved]
        )
        unsolved = [score for score in unsolved if score.tags["task"] != "average"]
        marked = [replace(each, tags={**each.tags, "unsolved": True}) for each in unsolved]
        return [*marked, *scores, *effective_lengths(scores, THRESHOLD)]

    def solved(self, samples: Sequence[Sample]) -> set[str]:
        """The tasks with enough right answers at the short length."""
        short: dict[str, list[float]] = {}
        for sample in samples:
            if sample["length"] == SHORT:
                short.setdefault(sample["task"], []).append(sample["score"])
        return {task for task, scores in short.items() if sum(scores) >= SOLVED * len(scores)}

    def notes(self, samples: Sequence[Sample]) -> list[str]:
        """What is not reported, and why."""
        solved = self.solved(samples)
        return [
            f"{task} is not solved at {SHORT} tokens (recall below {SOLVED}), so longer texts say "
            "nothing about retrieval, and its other lengths are left out"
            for task in dict.fromkeys(sample["task"] for sample in samples)
            if task not in solved
        ]

    def prompts(
        self, cell: EvalCell, tokenizer: Any
    ) -> tuple[list[NeedleSample], list[list[int]], int]:
        """The samples of a cell, their equally long prompts, and the tokens left for an answer."""
        samples = [self.make_sample(cell.task, number) for number in range(self.samples)]
        answer_tokens = 2 * max(len(encode(tokenizer, f" {name}")) for name in NAMES)
        rows = self._needle.rows(cell, tokenizer, samples, INTRO, answer_tokens)
        return samples, rows, answer_tokens

    @cached_property
    def _needle(self) -> Needle:
        """Its haystack."""
        return Needle(self.lengths, haystack=self.haystack, samples=self.samples, seed=self.seed)

    def make_sample(self, task: str, number: int) -> NeedleSample:
        """One person is asked for, by a fact; the others have facts of other kinds."""
        rng = np.random.default_rng((self.seed, TASKS.index(task), number))
        question, kinds = FACTS[task]
        chosen = rng.choice(len(kinds), PEOPLE, replace=False)
        names = [NAMES[place] for place in rng.choice(len(NAMES), PEOPLE, replace=False)]
        needles = []
        for place, name in zip(chosen, names, strict=True):
            phrases = kinds[list(kinds)[place]]
            needles.append(f" {phrases[rng.integers(len(phrases))].format(name=name)}.")
        depths = (number / max(1, self.samples - 1), *rng.random(PEOPLE - 1).tolist())
        asked = question.format(kind=list(kinds)[chosen[0]])
        return NeedleSample(tuple(needles), depths, f"\n{asked}", (names[0],))


def first_name(prediction: str, answers: Sequence[str]) -> float:
    """1 if the first of the names in a prediction is the answer.

    >>> first_name(" Mara, not Felix.", ["Mara"]), first_name(" Felix or Mara", ["Mara"])
    (1.0, 0.0)
    """
    named = [word for word in re.findall(r"\w+", prediction) if word in NAMES]
    return float(named[:1] == list(answers))
