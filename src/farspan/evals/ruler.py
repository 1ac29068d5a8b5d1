"""RULER (Hsieh et al. 2024): 13 synthetic tasks at any length, for base and for chat models.

Prompts, counts and answer lengths are the published ones. Prompt and answer together have exactly
the given length: the context has as many whole units (sentences, needles, words, documents) as
fit, and one more that is cut. What is asked for is never in the part that is cut.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farspan.errors import CorruptError, FarspanError, first_line, suggest
from farspan.evals import needle
from farspan.evals.needle import draw_distinct, draw_names, encode, generate_texts
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey
from farspan.files import check_unpacked, sha256_of
from farspan.train.metadata import begin_of_text

NAME = "ruler"
METRIC = "string_match"  # from 0 to 100
THRESHOLD = 85.6  # Llama-2-7B at 4K tokens in RULER's paper
ESSAYS = "python-docs"  # in place of Paul Graham's essays, unless --data haystack= has them
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST_SENTENCE = 40  # words; longer ones (tables, code) are split, so that needles fit between
DEPTHS = 40  # evenly from the beginning to the end of the haystack
FULL_WORD_LISTS = 4096  # tokens from which on the words of cwe repeat 30 and 3 times
EXAMPLE_NOISE = 5  # sentences in the example of vt
ZETA_2 = math.pi**2 / 6
LEAST_CODED_WORDS = 74  # from here on the fourth word is more frequent than the fifth
MESSAGE = "The-message-of-the-user"
DATE = "26 Jul 2024"  # the default of templates that show the date; today's would change prompts

ADJECTIVES = f"""{needle.ADJECTIVES} ancient blunt bright broad careful cheerful clumsy cold
common crisp curious deep distant dull early elegant empty famous fierce firm fragile fresh frozen
funny giant grand grateful happy harsh heavy honest humble jealous large late lazy lively lonely
loud lucky modest narrow neat nervous odd patient plain polite proud pure purple rare robust rough
royal rural sharp shiny shy simple sleepy slow smooth sour steady steep strict sturdy subtle sweet
tall tidy tiny vivid warm weary witty young"""
NOUNS = f"""{needle.NOUNS} artist autumn bakery basket beacon blanket bottle bridge butter cabin
camera canyon carpet castle cellar chimney circus citizen copper cottage cousin curtain dancer
diamond doctor dolphin drawer eagle elbow emperor factory farmer feather fiddle fountain galaxy
glacier guitar hammer helmet honey jungle kitchen ladder lawyer lemon letter library lizard magnet
marble mirror monkey mountain museum napkin novel ocean onion oyster palace parrot pencil pepper
piano pirate planet potato puzzle rabbit river rocket sailor scarf shadow shovel spider statue
stomach teacher tiger tractor village violin wagon whistle wizard zebra"""

NIAH = (
    "{start} special magic {what} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
NIAH_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
NIAH_QUESTION = "\nWhat {verb} the special magic {kind} for {keys} mentioned in the provided text?"
NIAH_ANSWER = "The special magic {kind} for {keys} mentioned in the provided text {verb}"
VT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
VT_ANSWER = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {value}, they are:"
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
QA_FILES = {"qa_1": "squad", "qa_2": "hotpotqa"}  # the names that --data takes
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
    depths: tuple[float, ...] = ()  # of each needle: the share of the units before it
    least: int = 0  # units
    most: int = 1 << 40  # units
    written: str = ""  # the answers as a model would write them; default: with commas


@dataclass(frozen=True)
class QaFile:
    """Questions about documents, by the number of the document."""

    documents: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]  # with their answers
    given: tuple[tuple[int, ...], ...]  # of each question: the documents that it comes with
    related: tuple[tuple[int, ...], ...]  # the first to add: others of the same article


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
    batch: int = 8

    def cells(self) -> list[EvalCell]:
        """One cell for each task and length."""
        self._check()
        settings = {"samples": self.samples, "seed": self.seed, "frame": self.frame}
        cells = []
        for length in self.lengths:
            sources = self._sources(length)
            cells += [
                EvalCell(NAME, task, length, {**settings, "haystack": sources[task]})
                for task in self.tasks
            ]
        return cells

    def score_keys(self) -> list[ScoreKey]:
        """Scores at every length; the effective length is that of the average."""
        lengths = sorted({cell.length for cell in self.cells()})
        tasks = [*self.tasks, *[average_task(len(self.tasks))] * (len(self.tasks) > 1)]
        keys = [ScoreKey(NAME, task, METRIC, length) for task in tasks for length in lengths]
        return [*keys, ScoreKey(NAME, tasks[-1], "effective_length", lengths[-1])]

    def run(self, cell: EvalCell, model: Any, tokenizer: Any) -> list[Sample]:
        prompts, rows, answer_tokens = self.prompts(cell, tokenizer)
        predictions = generate_texts(model, tokenizer, rows, answer_tokens, self.batch)
        return [
            {
                "eval": NAME,
                "task": cell.task,
                "length": cell.length,
                "haystack": cell.settings["haystack"],
                "id": number,
                "depths": [round(depth, 4) for depth in prompt.depths],
                "question": prompt.question.strip(),
                "prediction": text,
                "answers": list(prompt.answers),
                "score": string_match(cell.task, text, prompt.answers),
                "tokens": len(row),
                "answer_tokens": answer_tokens,
            }
            for number, (prompt, row, text) in enumerate(
                zip(prompts, rows, predictions, strict=True)
            )
        ]

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
            prompts = [self._prompt(cell, number, variant) for number in range(self.samples)]
            needed, answer_tokens = self._needed(cell.task, prompts, tokenizer)
            if needed <= cell.length:
                break
        else:
            raise FarspanError(
                f"the task {cell.task} of ruler needs {needed} tokens with this tokenizer, but a "
                f"length is {cell.length}; use lengths from {needed} on, or leave the task out by "
                "--tasks"
            )
        begin = self._begin(tokenizer)
        size = cell.length - answer_tokens - len(begin)
        rows, units = [], prompts[0].least + 16
        for prompt in prompts:
            units, row = self._row(prompt, size, tokenizer, units)
            rows.append([*begin, *row])
        return prompts, rows, answer_tokens

    def check_least(self, tokenizer: Any) -> None:
        """Refuse a length that is too short for one of the tasks."""
        for cell in replace(self, lengths=(min(self.lengths),)).cells():
            *_, last = variants(cell.task, cell.length)
            prompts = [self._prompt(cell, number, last) for number in range(self.samples)]
            if self._needed(cell.task, prompts, tokenizer)[0] > cell.length:
                self.prompts(cell, tokenizer)

    def _check(self) -> None:
        if not self.lengths:
            raise FarspanError("the ruler evaluation has no lengths; give at least one")
        for task in self.tasks:
            if task not in TASKS:
                raise FarspanError(f"ruler has no task {task!r}; {suggest(task, TASKS)}")
            if task in QA_FILES and not getattr(self, QA_FILES[task]):
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
        files = {
            task: Path(getattr(self, QA_FILES[task])) for task in self.tasks if task in QA_FILES
        }
        read = {task: f"{file.name} {_digest(file)[:16]}" for task, file in files.items()}
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
                f"the documents for the question {prompt.question.strip()!r} have "
                f"{len(start) + len(filler)} tokens, but {room} are needed; use a larger file or "
                "shorter lengths"
            )
        return units, [*start, *filler, *end]

    # The tasks.

    def _rng(self, task: str, number: int, stream: int = 0) -> np.random.Generator:
        """Stream 0 draws what is asked for, so that this is the same at every length."""
        return np.random.default_rng((self.seed, TASKS.index(task), number, stream))

    def _prompt(self, cell: EvalCell, number: int, variant: tuple[int, ...]) -> RulerPrompt:
        if cell.task in NIAH_TASKS:
            return self._niah(cell, number)
        if cell.task in QA_FILES:
            return self._qa(cell, number)
        if cell.task == "vt":
            return self._vt(number, *variant)
        return self._cwe(number, *variant) if cell.task == "cwe" else self._fwe(cell.length, number)

    def _niah(self, cell: EvalCell, number: int) -> RulerPrompt:
        task, rng = NIAH_TASKS[cell.task], self._rng(cell.task, number)
        kind = "uuid" if task.uuid_values else "number"
        keys = list(islice(_keys(rng, task.uuid_keys), task.keys))
        values = _values(rng, task.uuid_values)
        facts = [(key, next(values)) for key in keys for _ in range(task.values)]
        queried = keys[: task.queries]
        plural = task.queries * task.values > 1
        verb, kinds = ("are", f"{kind}s") if plural else ("is", kind)
        order = rng.permutation(len(facts))
        needles = [_needle(kind, *facts[index]) for index in order]
        depths = draw_depths(rng, len(facts))
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
            depths,
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
            others = (key for key in _keys(rng, task.uuid_keys) if key not in keys)
            drawn = _values(self._rng(cell.task, number, 2), task.uuid_values)
            other_values = (value for value in drawn if value not in values)
            kind = "uuid" if task.uuid_values else "number"
            return [_needle(kind, key, next(other_values)) for key in islice(others, units)]

        return distractors

    def _vt(self, number: int, example_noise: int = 0) -> RulerPrompt:
        """A chain of assignments in order, in noise."""
        rng = self._rng("vt", number)
        names, value, chain = _chain(rng, 5)
        depths = tuple(sorted(draw_depths(rng, len(chain))))
        example = ""
        if example_noise:
            other = self._rng("vt", number, 2)
            shown, number_shown, lines = _chain(other, 3, exclude=value)
            places = tuple(sorted(draw_depths(other, len(lines))))
            context = "\n".join(insert_units([NOISE] * example_noise, lines, places))
            question = VT_QUESTION.format(value=number_shown)
            answer = VT_ANSWER.format(count=len(shown), value=number_shown)
            example = f"{VT}{context}{question} {answer} {' '.join(shown)}\n\n"
        return RulerPrompt(
            example + VT,
            lambda units: "\n".join(insert_units([NOISE] * units, chain, depths)),
            lambda units, size: f"\n{NOISE}" * 4,
            VT_QUESTION.format(value=value),
            VT_ANSWER.format(count=len(names), value=value),
            tuple(names),
            depths,
            written=" ".join(names),
        )

    def _cwe(self, number: int, common: int, uncommon: int, *example: int) -> RulerPrompt:
        """Ten words that repeat more often than the others, in a numbered list.

        example: how often its common and its uncommon words repeat, and the number of the latter.
        """
        words = list(islice(_words(self._rng("cwe", number)), 20))
        answers, shown = words[:10], words[10:]

        def others(stream: int, count: int) -> list[str]:
            """Words that contain none of the common ones, which a prediction could seem to name."""
            drawn = _words(self._rng("cwe", number, stream))
            return list(islice((w for w in drawn if not any(each in w for each in words)), count))

        def context(units: int) -> str:
            listed = answers * common + others(1, units) * uncommon
            self._rng("cwe", number, 3).shuffle(listed)
            return _numbered(listed)

        def filler(units: int, size: int) -> str:
            return " " + _numbered(others(1, units + size)[units:], 10 * common + units * uncommon)

        head = CWE
        if example:
            often, seldom, count = example
            listed = shown * often + others(2, count) * seldom
            self._rng("cwe", number, 4).shuffle(listed)
            head = f"{CWE}{_numbered(listed)}{CWE_QUESTION} {CWE_ANSWER} {_numbered(shown)}\n{CWE}"
        return RulerPrompt(
            head,
            context,
            filler,
            CWE_QUESTION,
            CWE_ANSWER,
            tuple(answers),
            least=1,
            written=_numbered(answers),
        )

    def _fwe(self, length: int, number: int) -> RulerPrompt:
        """Coded words whose frequencies follow a Zipf law; the most frequent one is dots."""
        rng = self._rng("fwe", number)
        count = max(8, (length - ANSWER_TOKENS["fwe"]) // 50)
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
        file = read_qa(task, str(getattr(self, QA_FILES[task])), cell.settings["haystack"])
        if self.samples > len(file.questions):
            raise FarspanError(
                f"{getattr(self, QA_FILES[task])} has {len(file.questions)} questions with answers,"
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


def variants(task: str, length: int) -> list[tuple[int, ...]]:
    """The settings of a task, the published ones first; the first that fits a length is taken.

    Of vt: noise sentences of the example. Of cwe: repeats, then repeats and size of the example.
    """
    if task == "cwe":
        full = [(30, 3, 10, 3, 30)] if length >= FULL_WORD_LISTS else []
        return [*full, (6, 1, 3, 1, 10), (3, 1)]
    return [(EXAMPLE_NOISE,), (0,)] if task == "vt" else [()]


def chat_frame(tokenizer: Any, system: str | None = None) -> tuple[str, str]:
    """The text of a tokenizer's chat template before and after the message of the user.

    Thinking is switched off in templates that can do that.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise FarspanError(
            "the tokenizer has no chat template; leave --apply-chat-template out, or use a chat "
            "model"
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": MESSAGE})
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
            thinking=False,
            date_string=DATE,
        )
    except Exception as error:  # a template can raise anything
        raise FarspanError(
            f"the chat template of the tokenizer failed ({first_line(error)}); leave "
            f"{'--system-instruction' if system else '--apply-chat-template'} out"
        ) from None
    before, message, after = text.partition(MESSAGE)
    if not message:
        raise FarspanError(
            "the chat template of the tokenizer leaves the user's message out; leave "
            "--apply-chat-template out"
        )
    return before, after


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


def insert_units(units: list[str], needles: list[str], depths: Sequence[float]) -> list[str]:
    """Whole units with each needle at its depth."""
    places = [math.floor(depth * len(units)) for depth in depths]
    text = list(units)
    ordered = sorted(zip(places, needles, strict=True), key=lambda pair: pair[0])
    for shift, (place, each) in enumerate(ordered):
        text.insert(place + shift, each)
    return text


def draw_depths(rng: np.random.Generator, count: int) -> tuple[float, ...]:
    return tuple((rng.choice(DEPTHS, count, replace=False) / (DEPTHS - 1)).tolist())


def _needle(kind: str, key: str, value: str) -> str:
    return NIAH_NEEDLE.format(kind=kind, key=key, value=value)


def _uuids(rng: np.random.Generator) -> Iterator[str]:
    while True:
        yield str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _values(rng: np.random.Generator, uuids: bool) -> Iterator[str]:
    """Distinct numbers of seven digits, or UUIDs."""
    if uuids:
        yield from _uuids(rng)
    taken: set[int] = set()
    while True:
        number = int(rng.integers(needle.NUMBERS.start, needle.NUMBERS.stop))
        if number not in taken:
            taken.add(number)
            yield str(number)


def _keys(rng: np.random.Generator, uuids: bool = False) -> Iterator[str]:
    """Distinct pairs of an adjective and a noun (then with a second adjective), or UUIDs."""
    if uuids:
        yield from _uuids(rng)
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    order = rng.permutation(len(adjectives) * len(nouns)).tolist()
    for first in ("", *(f"{adjectives[place]}-" for place in rng.permutation(len(adjectives)))):
        for place in order:
            yield f"{first}{adjectives[place // len(nouns)]}-{nouns[place % len(nouns)]}"


def _words(rng: np.random.Generator) -> Iterator[str]:
    """Distinct words; when all are drawn, compounds."""
    words = [*ADJECTIVES.split(), *NOUNS.split()]
    yield from (words[place] for place in rng.permutation(len(words)))
    yield from (key.replace("-", "") for key in _keys(rng))


def _numbered(words: list[str], start: int = 0) -> str:
    return " ".join(f"{start + place}. {word}" for place, word in enumerate(words, 1))


def _chain(
    rng: np.random.Generator, letters: int, exclude: str = ""
) -> tuple[list[str], str, list[str]]:
    """The variables of a chain with four hops, their value, and the assignments."""
    names = draw_names(rng, 5, letters)
    value = next(each for each in draw_distinct(rng, needle.VALUES, 2) if each != exclude)
    sources = [value, *(f"VAR {name}" for name in names)]
    return names, value, [f"VAR {name} = {of}" for name, of in zip(names, sources, strict=False)]


@lru_cache(maxsize=2)
def _essay(haystack: str, length: int, name: str) -> list[str]:
    """The sentences of a text. Its name, with its hash, tells texts of one path apart."""
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


def _digest(file: Path) -> str:
    if not file.is_file():
        raise FarspanError(f"{str(file)!r} is not a file; check the path")
    check_unpacked(file)
    return sha256_of(file)


@lru_cache(maxsize=2)
def read_qa(task: str, path: str, name: str) -> QaFile:
    """The questions that have answers, and all documents. The name has a hash of the file."""
    try:
        content = json.loads(Path(path).read_bytes())
        rows = list((_squad if task == "qa_1" else _hotpotqa)(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        layout = "SQuAD" if task == "qa_1" else "HotpotQA"
        raise CorruptError(
            f"{path} is not JSON in the layout of {layout} ({type(error).__name__}); use such a "
            "file"
        ) from None
    if not rows:
        raise FarspanError(f"{path} has no question with an answer; use another file")
    documents = {text: None for _, _, given, related in rows for text in (*given, *related)}
    numbers = {text: number for number, text in enumerate(sorted(documents))}
    return QaFile(
        tuple(numbers),
        tuple((question, answers) for question, answers, _, _ in rows),
        tuple(tuple(dict.fromkeys(numbers[text] for text in given)) for _, _, given, _ in rows),
        tuple(tuple(sorted({numbers[text] for text in related})) for _, _, _, related in rows),
    )


QaRow = tuple[str, tuple[str, ...], list[str], list[str]]  # question, answers, given, related


def _squad(content: Any) -> Iterator[QaRow]:
    for article in content["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            others = [text for text in texts if text != paragraph["context"]]
            for each in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in each["answers"]))
                if answers:
                    yield each["question"], answers, [paragraph["context"]], others


def _hotpotqa(content: Any) -> Iterator[QaRow]:
    for each in content:
        given = [f"{title}\n{''.join(sentences)}" for title, sentences in each["context"]]
        yield each["question"], (each["answer"],), given, []
