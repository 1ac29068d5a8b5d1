"""LongBench: its 16 English and code tasks with the official prompts, metrics and truncation.

A prompt that is too long loses its middle; half of the room goes to its head, half to its tail, and
every sample records how many tokens were cut. Official data (JSON Lines with `context` and `input`)
is inserted into the official prompts; MiniLongBench (`prompt` and `gold`) brings its own prompts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from farspan.batching import run_in_batches
from farspan.data.jsonlines import read_rows
from farspan.data.tokens import encode
from farspan.errors import CorruptError, FarspanError, suggest
from farspan.evals import metrics
from farspan.evals.answers import batch_setting, text_around
from farspan.evals.decoding import encode_prompt, end_tokens, generate_tokens
from farspan.evals.engine import Engine
from farspan.evals.perplexity import rows_per_batch
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey, average, bootstrap
from farspan.files import check_unpacked, sha256_of

NAME = "longbench"
TASKS_FILE = Path(__file__).parent.parent / "assets" / "longbench.toml"
# left out, as in Wang 2024
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
BATCH_TOKENS = 1 << 15  # of prompts decoded together
MIN_LENGTH = 64  # tokens; below that nothing meaningful is left of a prompt


@dataclass(frozen=True)
class LongBenchTask:
    """The definition of one task; assets/longbench.toml documents the fields."""

    kind: str
    metric: str
    prompt: str
    answer_tokens: int
    full: int
    mini: int
    first_line: bool = False
    stop_at_line: bool = False


@cache
def load_tasks() -> Mapping[str, LongBenchTask]:
    """The 16 tasks, in the order of Table 3 of Wang 2024."""
    return {
        name: LongBenchTask(**fields)
        for name, fields in tomllib.loads(TASKS_FILE.read_text(encoding="utf-8")).items()
    }


@dataclass(frozen=True)
class LongBenchPrompt:
    id: str
    text: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Collection:
    """The prompts of one task, and the name of the data that its score reports."""

    name: str
    file: Path
    prompts: tuple[LongBenchPrompt, ...]

    def first(self, limit: int | None) -> Collection:
        if limit is None or limit >= len(self.prompts):
            return self
        return Collection(f"first {limit} of {self.name}", self.file, self.prompts[:limit])


@dataclass(frozen=True)
class LongBench:
    """The prompts of a JSON Lines file, or of a folder of them, at several context lengths.

    `limit` keeps the first prompts of each task.

    >>> LongBench("bench/longbench/minilongbench_en.jsonl", (2048, 4096)).cells()[0].task
    'narrativeqa'
    """

    data: str | Path
    lengths: tuple[int, ...]
    beams: int = 1  # Wang 2024: 5
    limit: int | None = None
    batch: int | None = None  # prompts decoded together; default: one on a CPU

    @cached_property
    def collections(self) -> Mapping[str, Collection]:
        return {
            task: collection.first(self.limit)
            for task, collection in read_collections(Path(self.data)).items()
        }

    def cells(self) -> list[EvalCell]:
        """One cell for each task and length."""
        if self.limit is not None and self.limit < 1:
            raise FarspanError(f"the limit is {self.limit} prompts; use 1 or more")
        if min(self.lengths) < MIN_LENGTH:
            raise FarspanError(
                f"a context of {min(self.lengths)} tokens is too short for LongBench's prompts; "
                f"use {MIN_LENGTH} or more"
            )
        files = {collection.file for collection in self.collections.values()}
        hashes = {file: sha256_of(file) for file in files}
        return [
            EvalCell(
                NAME,
                task,
                length,
                {
                    "beams": self.beams,
                    "data": collection.name,
                    "sha256": hashes[collection.file],
                    **batch_setting(self.batch),
                },
            )
            for length in self.lengths
            for task, collection in self.collections.items()
        ]

    def score_keys(self) -> list[ScoreKey]:
        """Each task with its metric, and the average over tasks, at every length."""
        keys = []
        for length in sorted({cell.length for cell in self.cells()}):
            keys += [
                ScoreKey(NAME, task, load_tasks()[task].metric, length) for task in self.collections
            ]
            keys.append(ScoreKey(NAME, "average", "average", length))
        return keys

    def run(self, cell: EvalCell, model: Any, tokenizer: Any) -> list[Sample]:
        task, collection = load_tasks()[cell.task], self.collections[cell.task]
        answer_tokens = min(task.answer_tokens, cell.length // 2)
        room = cell.length - answer_tokens
        prompts = [
            truncate_middle(encode_prompt(tokenizer, prompt.text), room)
            for prompt in collection.prompts
        ]
        rows = [ids for ids, _ in prompts]
        if isinstance(model, Engine):
            predictions = self._ask(model, rows, answer_tokens, task.stop_at_line)
        else:
            predictions = self._generate(cell, model, tokenizer, rows, answer_tokens)
        samples = []
        for prompt, (ids, cut), prediction in zip(
            collection.prompts, prompts, predictions, strict=True
        ):
            samples.append(
                {
                    "eval": NAME,
                    "task": cell.task,
                    "length": cell.length,
                    "data": collection.name,
                    "beams": self.beams,
                    "id": prompt.id,
                    "around": text_around(prompt.text, prompt.answers),
                    "prediction": prediction,
                    "answers": list(prompt.answers),
                    "score": score_prediction(cell.task, prediction, prompt),
                    "tokens": len(ids),
                    "cut": cut,
                    "answer_tokens": answer_tokens,
                }
            )
        return samples

    def _ask(
        self, engine: Engine, rows: list[list[int]], answer_tokens: int, stop_at_line: bool
    ) -> list[str]:
        """The greedy answers of a server. Whatever it writes after a line is cut here."""
        texts = [answer.text for answer in engine.generate(rows, answer_tokens)]
        if not stop_at_line:
            return texts
        return [text[:1] + text[1:].partition("\n")[0] for text in texts]

    def _generate(
        self,
        cell: EvalCell,
        model: PreTrainedModel,
        tokenizer: Any,
        rows: list[list[int]],
        answer_tokens: int,
    ) -> list[str]:
        stop_at_line = load_tasks()[cell.task].stop_at_line
        end_ids = end_tokens(model, tokenizer)
        if stop_at_line:
            end_ids = [*end_ids, encode(tokenizer, "\n")[-1]]
        most = max(1, BATCH_TOKENS // (cell.length * self.beams))
        generated = batches_by_length(
            rows,
            self.batch or rows_per_batch(model, cell.length, most),
            lambda rows: generate_tokens(
                model,
                rows,
                answer_tokens,
                end_ids=end_ids,
                beams=self.beams,
                min_new_tokens=int(stop_at_line),
            ),
        )
        return [tokenizer.decode(answer, skip_special_tokens=True) for answer in generated]

    def score(self, samples: list[Sample]) -> list[Score]:
        """A score of 0 to 100 for each task and length, and their average for each length."""
        scores = []
        for length in sorted({sample["length"] for sample in samples}):
            at_length = [sample for sample in samples if sample["length"] == length]
            groups = {
                task: [sample for sample in at_length if sample["task"] == task]
                for task in load_tasks()
            }
            groups = {task: group for task, group in groups.items() if group}
            means = {
                task: bootstrap([sample["score"] for sample in group], within=(0, 100))
                for task, group in groups.items()
            }
            for task, group in groups.items():
                tags = {"task": task, "kind": load_tasks()[task].kind, **_data_tags(group)}
                scores.append(
                    Score(NAME, load_tasks()[task].metric, length, *means[task], len(group), tags)
                )
            tags = {
                "task": "average",
                "tasks": len(groups),
                "task_names": [*groups],
                **_data_tags(at_length),
            }
            mean = average(list(means.values()))
            scores.append(Score(NAME, "average", length, *mean, len(at_length), tags))
        return scores


def _data_tags(samples: list[Sample]) -> dict[str, Any]:
    """The data behind a score, and how much of it was truncated."""
    return {
        "data": ", ".join(sorted({sample["data"] for sample in samples})),
        "beams": samples[0]["beams"],
        "truncated": sum(sample["cut"] > 0 for sample in samples),
        "tokens": sum(sample["tokens"] for sample in samples),
        "cut": sum(sample["cut"] for sample in samples),
    }


def truncate_middle(ids: list[int], room: int) -> tuple[list[int], int]:
    """The prompt without its middle if it exceeds `room` tokens, and how many tokens were cut."""
    if len(ids) <= room:
        return ids, 0
    half = room // 2
    return [*ids[:half], *ids[-half:]], len(ids) - 2 * half


def batches_by_length(
    rows: Sequence[list[int]], size: int, generate: Callable[[torch.Tensor], list[list[int]]]
) -> list[list[int]]:
    """The output of `generate` for each row, in batches of at most `size` rows of one length.

    No row is padded. Most prompts were truncated to one length, so batches are usually full.
    """
    by_length: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(number)
    outputs: dict[int, list[int]] = {}
    for numbers in by_length.values():

        def run_batch(start: int, stop: int, numbers: list[int] = numbers) -> None:
            batch = numbers[start:stop]
            generated = generate(torch.tensor([rows[number] for number in batch]))
            outputs.update(zip(batch, generated, strict=True))

        run_in_batches(len(numbers), size, run_batch)
    return [outputs[number] for number in range(len(rows))]


def score_prediction(task: str, prediction: str, prompt: LongBenchPrompt) -> float:
    """0 to 100: the best match with any of the answers."""
    definition = load_tasks()[task]
    if definition.first_line:
        prediction = prediction.lstrip("\n").partition("\n")[0]
    metric = getattr(metrics, definition.metric)
    extra = (prompt.classes,) if definition.metric == "class_match" else ()
    return 100 * max(metric(prediction, answer, *extra) for answer in prompt.answers)


# Reading.


def read_collections(data: Path) -> dict[str, Collection]:
    """The prompts of every task in a file or folder, in the order of `load_tasks`."""
    if not data.exists():
        raise FarspanError(
            f"{data} was not found; give LongBench's .jsonl file, or the folder that contains it"
        )
    check_unpacked(data)
    files = sorted(data.glob("*.jsonl")) if data.is_dir() else [data]
    collections: dict[str, Collection] = {}
    for file in files:
        for task, collection in _read_file(file).items():
            if task in collections:
                raise FarspanError(
                    f"{task} is in both {collections[task].file.name} and {file.name}; "
                    "give only one of the files"
                )
            collections[task] = collection
    if not collections:
        raise FarspanError(
            f"{data} has no prompts of LongBench's English and code tasks; give its .jsonl files"
        )
    return {task: collections[task] for task in load_tasks() if task in collections}


def _read_file(file: Path) -> dict[str, Collection]:
    prompts: dict[str, list[LongBenchPrompt]] = {}
    mini = False
    for number, row in read_rows(file):
        try:
            if row["dataset"] in CHINESE:
                continue
            mini = "prompt" in row
            prompt = _mini_prompt(row) if mini else _official_prompt(row, number)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"{file}, line {number} is not a LongBench prompt ({type(error).__name__}: "
                f"{error}); it needs dataset, context, input and answers, or dataset, prompt and "
                "gold"
            ) from None
        prompts.setdefault(row["dataset"], []).append(prompt)
    return {
        task: Collection(_data_name(load_tasks()[task], mini, len(group), file), file, tuple(group))
        for task, group in prompts.items()
    }


def _official_prompt(row: Mapping[str, Any], number: int) -> LongBenchPrompt:
    text = _task(row).prompt.format(context=row["context"], input=row["input"])
    return LongBenchPrompt(
        str(row.get("_id", number)),
        text,
        _answers(row["answers"]),
        _texts(row.get("all_classes") or []),
    )


def _mini_prompt(row: Mapping[str, Any]) -> LongBenchPrompt:
    _task(row)
    gold = row["gold"] if isinstance(row["gold"], dict) else {"answers": row["gold"]}
    name, (text,) = f"{row['dataset']}-{row['idx']}", _texts([row["prompt"]])
    classes = _texts(gold.get("all_classes") or [])
    return LongBenchPrompt(name, text, _answers(gold["answers"]), classes)


def _answers(values: Any) -> tuple[str, ...]:
    if not values:
        raise TypeError("there is no answer")
    return _texts(values)


def _texts(values: Any) -> tuple[str, ...]:
    """One text alone would be read as its letters."""
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise TypeError(f"{values!r:.40} is no list of texts")
    return tuple(values)


def _task(row: Mapping[str, Any]) -> LongBenchTask:
    name = row["dataset"]
    if name not in load_tasks():
        raise FarspanError(
            f"{name!r} is not an English or code task of LongBench; "
            f"{suggest(str(name), load_tasks())}"
        )
    return load_tasks()[name]


def _data_name(task: LongBenchTask, mini: bool, count: int, file: Path) -> str:
    """LongBench or MiniLongBench if the task is complete, else the number of prompts."""
    complete, name = (task.mini, "MiniLongBench") if mini else (task.full, "LongBench")
    return name if count == complete else f"{count} prompts of {file.name}"
