"""The tasks of RULER: what is hidden in a prompt, what is asked for, and what stands around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from farspan.errors import FarspanError
from farspan.evals import needle
from farspan.evals.needle import draw_names
from farspan.evals.ruler_qa import QA_FILES, read_qa
from farspan.evals.ruler_words import (
    draw_chain,
    draw_depths,
    draw_keys,
    draw_places,
    draw_values,
    draw_words,
    numbered,
)
from farspan.evals.scores import EvalCell

ESSAYS = "python-docs"  # in place of Paul Graham's essays, unless --data haystack= has them
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST_SENTENCE = 40  # words; longer ones (tables, code) are split, so that needles fit between
FULL_WORD_LISTS = 4096  # tokens from which on the words of cwe repeat 30 and 3 times
EXAMPLE_NOISE = 10  # sentences in the example of vt: RULER adds 5 up to 500 tokens
ZETA_2 = math.pi**2 / 6
LEAST_CODED_WORDS = 74  # from here on the fourth word is more frequent than the fifth

NIAH = (
    "{start} special magic {what} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
NIAH_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
NIAH_QUESTION = "\nWhat {verb} the special magic {kind} for {keys} mentioned in the provided text?"
NIAH_ANSWER = "The special magic {kind} for {keys} mentioned in the provided text {verb}"
VT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = (  # behind the line break that ends a noise sentence
    "\n\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
VT_ANSWER = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assgined the value {value}, they are:"  # RULER's spelling
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_ANSWER = "Answer: The top 10 words that appear most often in the list are:"
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. "
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
FWE_ANSWER = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
QA_ONLY = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
QA = QA_ONLY + "The following are given documents.\n\n"


class NiahTask(NamedTuple):
    """A task of needles, by RULER's table of settings."""

    haystack: str  # noise (one sentence, repeated), essay, or needle (others of the same kind)
    keys: int = 1  # hidden
    values: int = 1  # of each key
    queries: int = 1  # keys asked for
    uuid_keys: bool = False  # else words
    uuid_values: bool = False  # else numbers of seven digits


NIAH_TASKS = {
    "niah_single_1": NiahTask("noise"),
    "niah_single_2": NiahTask("essay"),
    "niah_single_3": NiahTask("essay", uuid_values=True),
    "niah_multikey_1": NiahTask("essay", keys=4),
    "niah_multikey_2": NiahTask("needle"),
    "niah_multikey_3": NiahTask("needle", uuid_keys=True, uuid_values=True),
    "niah_multivalue": NiahTask("essay", values=4),
    "niah_multiquery": NiahTask("essay", keys=4, queries=4),
}
# Raised with every change of a task's prompts, so that the cells of the others stay valid. Of
# several needles in an essay, samples of the first format have the depths in another order.
PROMPT_FORMATS = {
    **dict.fromkeys(NIAH_TASKS.keys() - {"niah_single_2", "niah_single_3"}, 2),
    **dict.fromkeys(("vt", "cwe", "fwe"), 2),
}
# Tokens for the answer, as published; more if a tokenizer needs more for the expected answer.
ANSWER_TOKENS = {
    **dict.fromkeys(NIAH_TASKS, 128),
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    **dict.fromkeys(QA_FILES, 32),
}
TASKS = tuple(ANSWER_TOKENS)


@dataclass(frozen=True, eq=False)
class RulerPrompt:
    """The parts of one prompt: head, context, filler, question and the start of the answer."""

    head: str
    context: Callable[[int], str]  # with so many units of haystack
    filler: Callable[[int, int], str]  # continues so many units by at least so many tokens
    question: str
    answer_start: str
    answers: tuple[str, ...]
    # Of each needle, what is asked for first: the share of the units before it.
    depths: tuple[float, ...] = ()
    least: int = 0  # units
    most: int = 1 << 40  # units
    written: str = ""  # the answers as a model would write them; default: with commas
    form: str = ""  # of vt and cwe: published, or short (no solved example, fewer repeats)


@dataclass(frozen=True)
class RulerTasks:
    """Makes the prompts of every task from a seed."""

    seed: int
    samples: int  # of each task
    haystack: str | Path
    qa_files: Mapping[str, str | Path]  # by task

    def prompt(self, cell: EvalCell, number: int, variant: tuple[int, ...]) -> RulerPrompt:
        if cell.task in NIAH_TASKS:
            return self._niah(cell, number)
        if cell.task in QA_FILES:
            return self._qa(cell, number)
        if cell.task == "vt":
            return self._vt(number, *variant)
        return self._cwe(number, *variant) if cell.task == "cwe" else self._fwe(cell.length, number)

    def _rng(self, task: str, number: int, stream: int = 0) -> np.random.Generator:
        """Stream 0 draws what is asked for, so that this is the same at every length."""
        return np.random.default_rng((self.seed, TASKS.index(task), number, stream))

    def _niah(self, cell: EvalCell, number: int) -> RulerPrompt:
        task, rng = NIAH_TASKS[cell.task], self._rng(cell.task, number)
        kind = "uuid" if task.uuid_values else "number"
        keys = list(islice(draw_keys(rng, task.uuid_keys), task.keys))
        values = draw_values(rng, task.uuid_values)
        facts = [(key, next(values)) for key in keys for _ in range(task.values)]
        queried = keys[: task.queries]
        plural = (task.queries, task.values) != (1, 1)
        verb, kinds = ("are", f"{kind}s") if plural else ("is", kind)
        order = rng.permutation(len(facts))
        needles = [_needle(kind, *facts[index]) for index in order]
        draw = draw_depths if task.haystack == "essay" else draw_places
        depths = draw(rng, len(facts))
        hay = self._hay(cell, number, keys, {value for _, value in facts})
        separator = " " if task.haystack == "essay" else "\n"
        names = queried[0] if len(queried) == 1 else f"{', '.join(queried[:-1])}, and {queried[-1]}"
        start, what = ("Some", f"{kinds} are") if plural else ("A", f"{kind} is")
        return RulerPrompt(
            NIAH.format(start=start, what=what, kind=kinds),
            lambda units: separator.join(insert_units(hay(units), needles, depths)),
            lambda units, size: separator + separator.join(hay(units + 4)[units:]),
            NIAH_QUESTION.format(verb="are all" if plural else "is", kind=kinds, keys=names),
            NIAH_ANSWER.format(kind=kinds, keys=names, verb=verb),
            tuple(value for key, value in facts if key in queried),
            tuple(depths[place] for place in np.argsort(order)),  # of each fact
        )

    def _hay(
        self, cell: EvalCell, number: int, keys: list[str], values: set[str]
    ) -> Callable[[int], list[str]]:
        """The first units of a haystack: noise, sentences, or needles that are not asked for."""
        task = NIAH_TASKS[cell.task]
        if task.haystack == "noise":
            return lambda units: [NOISE] * units
        if task.haystack == "essay":
            sentences = _essay(str(self.haystack), cell.length, cell.settings["haystack"])
            first = int(self._rng(cell.task, number, 1).integers(len(sentences)))
            return lambda units: list(islice(cycle(sentences), first, first + units))

        def distractors(units: int) -> list[str]:
            rng = self._rng(cell.task, number, 1)
            others = (key for key in draw_keys(rng, task.uuid_keys) if key not in keys)
            drawn = draw_values(self._rng(cell.task, number, 2), task.uuid_values)
            other_values = (value for value in drawn if value not in values)
            kind = "uuid" if task.uuid_values else "number"
            return [_needle(kind, key, next(other_values)) for key in islice(others, units)]

        return distractors

    def _vt(self, number: int, example_noise: int) -> RulerPrompt:
        """A chain of assignments in order, in noise."""
        rng = self._rng("vt", number)
        names, value, chain = draw_chain(rng, 5)
        depths = draw_places(rng, len(chain))
        example = ""
        if example_noise:
            other = self._rng("vt", number, 2)
            shown, number_shown, lines = draw_chain(other, 3, exclude=value)
            context = chain_in_noise(example_noise, lines, draw_places(other, len(lines)))
            question = VT_QUESTION.format(value=number_shown)
            answer = VT_ANSWER.format(count=len(shown), value=number_shown)
            example = f"{VT}{context}{question} {answer}  {' '.join(shown)}\n\n\n\n"
        return RulerPrompt(
            example + VT,
            lambda units: chain_in_noise(units, chain, depths),
            lambda units, size: f"\n {NOISE}" * 4,
            VT_QUESTION.format(value=value),
            VT_ANSWER.format(count=len(names), value=value),
            tuple(names),
            depths,
            least=len(chain),
            written=" ".join(names),
            form="published" if example_noise else "short",
        )

    def _cwe(self, number: int, common: int, uncommon: int, *example: int) -> RulerPrompt:
        """Ten words that repeat more often than the others, in a numbered list.

        example: the repetitions of its common and its uncommon words, and the number of the latter.
        """
        words = list(islice(draw_words(self._rng("cwe", number)), 20))
        answers, shown = words[:10], words[10:]

        def others(stream: int, count: int) -> list[str]:
            """Words that contain none of the common ones, which a prediction could seem to name."""
            drawn = draw_words(self._rng("cwe", number, stream))
            return list(islice((w for w in drawn if not any(each in w for each in words)), count))

        def context(units: int) -> str:
            listed = answers * common + others(1, units) * uncommon
            self._rng("cwe", number, 3).shuffle(listed)
            return numbered(listed)

        def filler(units: int, size: int) -> str:
            return " " + numbered(others(1, units + size)[units:], 10 * common + units * uncommon)

        head = CWE
        if example:
            often, seldom, count = example
            listed = shown * often + others(2, count) * seldom
            self._rng("cwe", number, 4).shuffle(listed)
            head = f"{CWE}{numbered(listed)}{CWE_QUESTION} {CWE_ANSWER} {numbered(shown)}\n{CWE}"
        return RulerPrompt(
            head,
            context,
            filler,
            CWE_QUESTION,
            CWE_ANSWER,
            tuple(answers),
            least=1,
            written=numbered(answers),
            form="published" if example else "short",
        )

    def _fwe(self, length: int, number: int) -> RulerPrompt:
        """Coded words whose frequencies follow a Zipf law; the most frequent one is dots."""
        rng = self._rng("fwe", number)
        count = max(8, length // 50)
        words = ["...", *(name.lower() for name in draw_names(rng, count - 1, 6))]

        def context(units: int) -> str:
            counts = [int(units / (rank**2 * ZETA_2)) for rank in range(1, count + 1)]
            text = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
            self._rng("fwe", number, 1).shuffle(text)
            return " ".join(text)

        return RulerPrompt(
            FWE,
            context,
            lambda units, size: " ..." * size,
            FWE_QUESTION,
            FWE_ANSWER,
            tuple(words[1:4]),
            least=LEAST_CODED_WORDS,
        )

    def _qa(self, cell: EvalCell, number: int) -> RulerPrompt:
        """A question about some of many documents."""
        task = cell.task
        file = read_qa(task, str(self.qa_files[task]), cell.settings["haystack"])
        if self.samples > len(file.questions):
            raise FarspanError(
                f"{self.qa_files[task]} has {len(file.questions)} questions with answers,"
                f" but {self.samples} are needed; use --limit {len(file.questions)}"
            )
        order = np.random.default_rng((self.seed, TASKS.index(task))).permutation(
            len(file.questions)
        )
        index = int(order[number])
        question, answers = file.questions[index]
        given, related = file.given[index], file.related[index]
        rng = self._rng(task, number, 1)
        near = [related[place] for place in rng.permutation(len(related))]
        taken = {*given, *related}
        far = [int(place) for place in rng.permutation(len(file.documents)) if place not in taken]
        others = [*near, *far]

        def documents(numbers: list[int], first: int) -> str:
            return "\n\n".join(
                f"Document {first + place}:\n{file.documents[each]}"
                for place, each in enumerate(numbers)
            )

        def context(units: int) -> str:
            chosen = [*given, *others[:units]]
            self._rng(task, number, 2).shuffle(chosen)
            return documents(chosen, 1)

        return RulerPrompt(
            QA,
            context,
            lambda units, size: (
                "\n\n" * (units < len(others))
                + documents(others[units : units + 4], len(given) + units + 1)
            ),
            f"\n\n{QA_ONLY}Question: {question}",
            "Answer:",
            answers,
            most=len(others),
            written=max(answers, key=len),
        )


def variants(task: str, length: int) -> list[tuple[int, ...]]:
    """The settings of a task, the published ones first; the first that fits a length is taken.

    Of vt: noise sentences of the example. Of cwe: repeats, then repeats and size of the example.
    """
    if task == "cwe":
        full = [(30, 3, 10, 3, 30)] if length >= FULL_WORD_LISTS else []
        return [*full, (6, 1, 3, 1, 10), (3, 1)]
    return [(EXAMPLE_NOISE,), (0,)] if task == "vt" else [()]


def chain_in_noise(units: int, chain: Sequence[str], depths: Sequence[float]) -> str:
    """Noise sentences, each on a line; each assignment shares the line of another one.

    The spaces are RULER's, which joins sentences that end with a line break by a space.
    """
    lines = [NOISE] * units
    for number, (assignment, depth) in enumerate(zip(chain, depths, strict=True)):
        lines[int(depth * (units - len(chain) + 1)) + number] = f"{assignment} {NOISE}"
    return "\n ".join(lines)


def insert_units(units: list[str], needles: list[str], depths: Sequence[float]) -> list[str]:
    """Whole units with each needle at its depth."""
    places = [math.floor(depth * len(units)) for depth in depths]
    text = list(units)
    ordered = sorted(zip(places, needles, strict=True), key=lambda pair: pair[0])
    for shift, (place, each) in enumerate(ordered):
        text.insert(place + shift, each)
    return text


def _needle(kind: str, key: str, value: str) -> str:
    return NIAH_NEEDLE.format(kind=kind, key=key, value=value)


@lru_cache(maxsize=2)
def _essay(haystack: str, length: int, name: str) -> list[str]:
    """The sentences of a text. The hash in its name separates texts of one path."""
    sentences = []
    for sentence in needle.haystack_sentences(haystack, length):
        words = sentence.split(" ")
        sentences += [
            " ".join(words[start : start + LONGEST_SENTENCE])
            for start in range(0, len(words), LONGEST_SENTENCE)
        ]
    if not sentences:
        raise FarspanError(f"the haystack {haystack} has no text; use another file")
    return sentences
