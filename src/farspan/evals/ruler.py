"""RULER (Hsieh et al. 2024): 13 synthetic tasks at any length, for base and for chat models.

Prompts, counts and answer lengths are the published ones. Prompt and answer together have exactly
the given length: the context has as many whole units (sentences, needles, words, documents) as
fit, and one more that is cut. What is asked for is never in the part that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from farspan.data.tokens import encode
from farspan.errors import FarspanError, suggest
from farspan.evals import needle
from farspan.evals.answers import answer_samples, batch_setting, generate_texts
from farspan.evals.ruler_qa import QA_FILES, qa_digest
from farspan.evals.ruler_tasks import (
    ANSWER_TOKENS,
    ESSAYS,
    NIAH_TASKS,
    PROMPT_FORMATS,
    TASKS,
    RulerPrompt,
    RulerTasks,
    variants,
)
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey
from farspan.train.metadata import begin_of_text

NAME = "ruler"
METRIC = "string_match"  # from 0 to 100
THRESHOLD = 85.6  # Llama-2-7B at 4K tokens in RULER's paper


@dataclass(frozen=True)
class Ruler:
    """Samples of each task at each length; the score is the share of answers in the prediction.

    >>> [cell.task for cell in Ruler((4096,), tasks=("vt", "cwe")).cells()]
    ['vt', 'cwe']
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS[:11]
    samples: int = 20
    haystack: str | Path = ESSAYS  # text as for --data
    squad: str | Path = ""  # JSON as SQuAD's, for qa_1
    hotpotqa: str | Path = ""  # JSON as HotpotQA's, for qa_2
    frame: tuple[str, str] | None = None  # of a chat model: the text around the user's message
    threshold: float = THRESHOLD  # score from which a length counts as effective
    seed: int = 0
    batch: int | None = None  # prompts decoded together; default: one on a CPU, else what fits

    def cells(self) -> list[EvalCell]:
        """One cell for each task and length."""
        self._check()
        settings = {"samples": self.samples, "seed": self.seed, "frame": self.frame}
        settings |= batch_setting(self.batch)
        cells = []
        for length in self.lengths:
            sources = self._sources(length)
            for task in self.tasks:
                format = {"format": PROMPT_FORMATS[task]} if task in PROMPT_FORMATS else {}
                of_task = {**settings, **format, "haystack": sources[task]}
                cells.append(EvalCell(NAME, task, length, of_task))
        return cells

    def score_keys(self) -> list[ScoreKey]:
        """Scores at every length; the effective length is that of the average."""
        lengths = sorted({cell.length for cell in self.cells()})
        tasks = [*self.tasks, *[average_task(len(self.tasks))] * (len(self.tasks) > 1)]
        keys = [ScoreKey(NAME, task, METRIC, length) for task in tasks for length in lengths]
        return [*keys, ScoreKey(NAME, tasks[-1], "effective_length", lengths[-1])]

    def run(self, cell: EvalCell, model: Any, tokenizer: Any) -> list[Sample]:
        prompts, rows, answer_tokens = self.prompts(cell, tokenizer)
        generated = generate_texts(model, tokenizer, rows, answer_tokens, self.batch, self.frame)

        def score(text: str, answers: Sequence[str]) -> float:
            return string_match(cell.task, text, answers)

        texts = [tokenizer.decode(row) for row in rows]
        samples = answer_samples(cell, prompts, texts, generated, answer_tokens, score)
        for sample, prompt in zip(samples, prompts, strict=True):
            sample |= {"form": prompt.form} if prompt.form else {}
        return samples

    def score(self, samples: list[Sample]) -> list[Score]:
        """The score of each task at each length, RULER's average, and its effective length."""
        tasks = len({sample["task"] for sample in samples})
        scores = needle.task_scores(NAME, METRIC, samples, 100, average_task(tasks))
        last = scores[-1].tags["task"] if scores else ""  # the average, if there are several tasks
        means = [score for score in scores if score.tags["task"] == last]
        return [*scores, *needle.effective_lengths(means, self.threshold)]

    def prompts(
        self, cell: EvalCell, tokenizer: Any
    ) -> tuple[list[RulerPrompt], list[list[int]], int]:
        """The parts of each prompt, the equally long prompts, and the tokens left for an answer."""
        for variant in variants(cell.task, cell.length):
            prompts = [self._maker.prompt(cell, number, variant) for number in range(self.samples)]
            needed, answer_tokens = self._needed(cell.task, prompts, tokenizer)
            if needed <= cell.length:
                break
        else:
            raise _too_short({cell.task: needed}, cell.length)
        begin = self._begin(tokenizer)
        size = cell.length - answer_tokens - len(begin)
        first, *others = prompts
        units, row = self._row(first, size, tokenizer, first.least + 16)
        rows = [row, *self._rows(others, size, tokenizer, units)]
        return prompts, [[*begin, *row] for row in rows], answer_tokens

    def check_least(self, tokenizer: Any) -> None:
        """Refuse a length that is too short for a task, or too long for its file of questions."""
        shortest, needed = min(self.lengths), {}
        for cell in replace(self, lengths=(shortest,)).cells():
            *_, last = variants(cell.task, cell.length)
            prompts = [self._maker.prompt(cell, number, last) for number in range(self.samples)]
            needed[cell.task] = self._needed(cell.task, prompts, tokenizer)[0]
        if short := {task: count for task, count in needed.items() if count > shortest}:
            raise _too_short(short, shortest)
        of_questions = tuple(task for task in self.tasks if task in QA_FILES)
        if of_questions:
            for cell in replace(self, lengths=(max(self.lengths),), tasks=of_questions).cells():
                self._check_documents(cell, tokenizer)

    def _check_documents(self, cell: EvalCell, tokenizer: Any) -> None:
        """All samples have all documents of the file; the shortest question needs most of them."""
        prompts = [self._maker.prompt(cell, number, ()) for number in range(self.samples)]
        answer_tokens = self._needed(cell.task, prompts, tokenizer)[1]
        size = cell.length - answer_tokens - len(self._begin(tokenizer))
        self._row(min(prompts, key=lambda each: len(each.question)), size, tokenizer, 16)

    @property
    def _qa_files(self) -> dict[str, str | Path]:
        return {task: getattr(self, name) for task, name in QA_FILES.items()}

    @property
    def _maker(self) -> RulerTasks:
        return RulerTasks(self.seed, self.samples, self.haystack, self._qa_files)

    def _check(self) -> None:
        if not self.lengths:
            raise FarspanError("the ruler evaluation has no lengths; give at least one")
        for task in self.tasks:
            if task not in TASKS:
                raise FarspanError(f"ruler has no task {task!r}; {suggest(task, TASKS)}")
            if task in QA_FILES and not self._qa_files[task]:
                raise FarspanError(
                    f"the task {task} needs a file; add --data {QA_FILES[task]}=PATH"
                )
        if self.samples < 1:
            raise FarspanError(f"the ruler setting samples is {self.samples}; use 1 or more")

    def _sources(self, length: int) -> dict[str, str]:
        """What each task's context is made of, with a hash of what is read from a file."""
        kinds = {task: NIAH_TASKS[task].haystack for task in self.tasks if task in NIAH_TASKS}
        if "essay" in kinds.values():
            essay = needle.haystack_name(self.haystack, length)
            kinds = {task: essay if kind == "essay" else kind for task, kind in kinds.items()}
        files = {task: Path(file) for task, file in self._qa_files.items() if task in self.tasks}
        read = {task: f"{file.name} {qa_digest(file)[:16]}" for task, file in files.items()}
        return {"vt": "noise", "cwe": "words", "fwe": "words", **kinds, **read}

    # From parts to tokens.

    def _begin(self, tokenizer: Any) -> list[int]:
        """A chat template has its own begin-of-text token."""
        return [] if self.frame else begin_of_text(tokenizer)

    def _start(self, prompt: RulerPrompt, tokenizer: Any, units: int) -> list[int]:
        before = self.frame[0] if self.frame else ""
        return encode(tokenizer, before + prompt.head + prompt.context(units))

    def _end(self, prompt: RulerPrompt, tokenizer: Any) -> list[int]:
        between = " " if self.frame is None else self.frame[1]
        return encode(tokenizer, prompt.question + between + prompt.answer_start)

    def _needed(self, task: str, prompts: list[RulerPrompt], tokenizer: Any) -> tuple[int, int]:
        """The tokens of the longest prompt with least context and answer, and of that answer."""
        answers = (f" {prompt.written or ', '.join(prompt.answers)}" for prompt in prompts)
        answer = max(ANSWER_TOKENS[task], *(len(encode(tokenizer, text)) for text in answers))
        needed = max(
            len(self._start(prompt, tokenizer, prompt.least)) + len(self._end(prompt, tokenizer))
            for prompt in prompts
        )
        return len(self._begin(tokenizer)) + needed + answer, answer

    def _rows(
        self, prompts: list[RulerPrompt], size: int, tokenizer: Any, guess: int
    ) -> list[list[int]]:
        """The tokens of each prompt, on all cores where the tokenizer is not written in Python."""

        def row(prompt: RulerPrompt) -> list[int]:
            return self._row(prompt, size, tokenizer, guess)[1]

        if not getattr(tokenizer, "is_fast", False):
            return [row(prompt) for prompt in prompts]
        with ThreadPoolExecutor() as pool:
            return list(pool.map(row, prompts))

    def _row(
        self, prompt: RulerPrompt, size: int, tokenizer: Any, guess: int
    ) -> tuple[int, list[int]]:
        """Exactly `size` tokens, and the number of whole units in them."""
        end = self._end(prompt, tokenizer)
        room = size - len(end)
        start_of = cache(lambda units: self._start(prompt, tokenizer, units))
        units = most_units(
            lambda units: len(start_of(units)), room, prompt.least, prompt.most, guess
        )
        start = start_of(units)
        missing = room - len(start)
        filler = encode(tokenizer, prompt.filler(units, missing))[:missing] if missing else []
        if len(filler) < missing:
            raise FarspanError(
                f"the prompt of the question {prompt.question.rpartition('Question: ')[2]!r} has "
                f"{len(start) + len(filler)} tokens with all documents of its file, but {room} are "
                "needed; use a larger file or shorter lengths"
            )
        return units, [*start, *filler, *end]


def _too_short(needed: Mapping[str, int], length: int) -> FarspanError:
    """needed: the tokens that tasks need which do not fit the length."""
    most, names = max(needed.values()), ", ".join(needed)
    one = len(needed) == 1
    need = f"task {names} of ruler needs" if one else f"tasks {names} of ruler need up to"
    return FarspanError(
        f"the {need} {most} tokens with this tokenizer, but a length is {length}; use lengths from "
        f"{most} on, or leave {'the task' if one else 'them'} out by --tasks"
    )


def average_task(tasks: int) -> str:
    """The name of the average says of how many tasks it is; RULER's own is that of 13."""
    return f"average_of_{tasks}"


def string_match(task: str, prediction: str, answers: Sequence[str]) -> float:
    """RULER's score: the share of answers in the prediction; one of them is enough for a question.

    >>> string_match("vt", "abcde and XYZ", ["ABCDE", "FGHIJ"])
    0.5
    >>> string_match("qa_1", "in Paris.", ["Paris", "Paris, France"])
    1.0
    """
    hits = [answer.lower() in prediction.lower() for answer in answers]
    return float(any(hits)) if task in QA_FILES else sum(hits) / len(hits)


def most_units(count: Callable[[int], int], room: int, least: int, most: int, guess: int) -> int:
    """The largest number of units whose tokens fit, by interpolation; `least` is known to fit.

    >>> most_units(lambda units: 10 + 7 * units, 40, 0, 100, guess=16)
    4
    """
    low, tokens, high = least, count(least), most + 1
    step = guess - low
    while high - low > 1:
        guess = min(low + max(1, step), high - 1)
        reached = count(guess)
        each = max((reached - tokens) / (guess - low), 0.1)
        if reached <= room:
            low, tokens = guess, reached
        else:
            high = guess
        step = int((room - tokens) / each)
    return low
