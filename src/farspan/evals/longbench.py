"""LongBench: the 16 English and code tasks by their official prompts, metrics and truncation, all of it declared.

A prompt that is too long is cut in the middle, half from its head and half from its tail, and every sample tells how
many tokens were cut. Official data (JSON Lines with `context` and `input`) is put into the official prompts;
MiniLongBench's (`prompt` and `gold`) comes in prompts of its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from farspan.errors import CorruptError, FarspanError, nearest
from farspan.evals import metrics
from farspan.evals.decoding import continuations, end_tokens
from farspan.evals.jsonlines import read_rows
from farspan.evals.perplexity import rows_at_once
from farspan.evals.scores import Cell, Place, Sample, Score, average, bootstrap
from farspan.files import check_unpacked, sha256_of
from farspan.memory import in_pieces

NAME = "longbench"
FACTS = Path(__file__).parent.parent / "assets" / "longbench.toml"
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")  # left out, as in paper A
TOGETHER = 1 << 15  # tokens of the prompts that are decoded at once
SHORTEST = 64  # tokens, below which nothing of a prompt is left


@dataclass(frozen=True)
class Task:
    """What is laid down for one task; assets/longbench.toml tells what each field means."""

    kind: str
    metric: str
    prompt: str
    answer_tokens: int
    full: int
    mini: int
    first_line: bool = False
    stop_at_line: bool = False


@cache
def tasks() -> Mapping[str, Task]:
    """The 16 tasks, in the order of paper A's Table 3."""
    return {name: Task(**facts) for name, facts in tomllib.loads(FACTS.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Collection:
    """The prompts of one task, and the name under which their score may be told."""

    name: str
    file: Path
    prompts: tuple[Prompt, ...]

    def first(self, limit: int | None) -> Collection:
        if limit is None or limit >= len(self.prompts):
            return self
        return Collection(f"first {limit} of {self.name}", self.file, self.prompts[:limit])


@dataclass(frozen=True)
class LongBench:
    """The prompts in a JSON Lines file, or in the .jsonl files of a folder, at some context lengths; of each task the
    first `limit`, or all.

    >>> LongBench("bench/longbench/minilongbench_en.jsonl", (2048, 4096)).cells()[0].task
    'narrativeqa'
    """

    data: str | Path
    lengths: tuple[int, ...]
    beams: int = 1  # paper A: 5
    limit: int | None = None

    @cached_property
    def collections(self) -> Mapping[str, Collection]:
        return {task: found.first(self.limit) for task, found in read_collections(Path(self.data)).items()}

    def cells(self) -> list[Cell]:
        """A cell is a task at a length."""
        if self.limit is not None and self.limit < 1:
            raise FarspanError(f"a limit of {self.limit} prompts leaves none; ask for 1 or more")
        if min(self.lengths) < SHORTEST:
            raise FarspanError(
                f"a context of {min(self.lengths)} tokens leaves nothing of LongBench's prompts; "
                f"ask for {SHORTEST} or more"
            )
        hashes = {file: sha256_of(file) for file in {found.file for found in self.collections.values()}}
        return [
            Cell(NAME, task, length, {"beams": self.beams, "data": found.name, "sha256": hashes[found.file]})
            for length in self.lengths
            for task, found in self.collections.items()
        ]

    def places(self) -> list[Place]:
        """Each task by its own metric, and the average over tasks, at every length."""
        found = []
        for length in sorted({cell.length for cell in self.cells()}):
            found += [Place(NAME, task, tasks()[task].metric, length) for task in self.collections]
            found.append(Place(NAME, "average", "average", length))
        return found

    def run(self, cell: Cell, model: Any, tokenizer: Any) -> list[Sample]:
        task, found = tasks()[cell.task], self.collections[cell.task]
        room = min(task.answer_tokens, cell.length // 2)
        ends = end_tokens(model, tokenizer)
        if task.stop_at_line:
            ends = [*ends, tokenizer("\n", add_special_tokens=False)["input_ids"][-1]]
        least = int(task.stop_at_line)
        asked = [
            shortened(tokenizer(prompt.text, verbose=False)["input_ids"], cell.length - room)
            for prompt in found.prompts
        ]
        told = by_length(
            [ids for ids, _ in asked],
            rows_at_once(model, cell.length, max(1, TOGETHER // (cell.length * self.beams))),
            lambda rows: continuations(model, rows, room, ends=ends, beams=self.beams, least=least),
        )
        samples = []
        for prompt, (ids, cut), said in zip(found.prompts, asked, told, strict=True):
            text = tokenizer.decode(said, skip_special_tokens=True)
            samples.append(
                {
                    "eval": NAME,
                    "task": cell.task,
                    "length": cell.length,
                    "data": found.name,
                    "beams": self.beams,
                    "id": prompt.id,
                    "prediction": text,
                    "answers": list(prompt.answers),
                    "score": score_of(cell.task, text, prompt),
                    "tokens": len(ids),
                    "cut": cut,
                    "answer_tokens": room,
                }
            )
        return samples

    def score(self, samples: list[Sample]) -> list[Score]:
        """A score of 0 to 100 for each task and length, and their average for each length."""
        scores = []
        for length in sorted({sample["length"] for sample in samples}):
            here = [sample for sample in samples if sample["length"] == length]
            groups = {task: [sample for sample in here if sample["task"] == task] for task in tasks()}
            groups = {task: group for task, group in groups.items() if group}
            means = {
                task: bootstrap([sample["score"] for sample in group], within=(0, 100))
                for task, group in groups.items()
            }
            for task, group in groups.items():
                tags = {"task": task, "kind": tasks()[task].kind, **_declared(group)}
                scores.append(Score(NAME, tasks()[task].metric, length, *means[task], len(group), tags))
            tags = {"task": "average", "tasks": len(groups), **_declared(here)}
            scores.append(Score(NAME, "average", length, *average(list(means.values())), len(here), tags))
        return scores


def _declared(samples: list[Sample]) -> dict[str, Any]:
    """What a score must tell besides its value: which prompts, and what was cut from them."""
    return {
        "data": ", ".join(sorted({sample["data"] for sample in samples})),
        "beams": samples[0]["beams"],
        "truncated": sum(sample["cut"] > 0 for sample in samples),
        "tokens": sum(sample["tokens"] for sample in samples),
        "cut": sum(sample["cut"] for sample in samples),
    }


def shortened(ids: list[int], room: int) -> tuple[list[int], int]:
    """The first and the last half of `room` tokens of a prompt that has more, and how many were cut."""
    if len(ids) <= room:
        return ids, 0
    half = room // 2
    return [*ids[:half], *ids[-half:]], len(ids) - 2 * half


def by_length(rows: Sequence[list[int]], size: int, say: Callable[[torch.Tensor], list[list[int]]]) -> list[list[int]]:
    """What `say` gives for each row, asked for at most `size` rows of one length at once, so that none is padded.

    Most prompts were cut to one length.
    """
    alike: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        alike.setdefault(len(row), []).append(number)
    said: dict[int, list[int]] = {}
    for numbers in alike.values():

        def some(start: int, stop: int, numbers: list[int] = numbers) -> None:
            here = numbers[start:stop]
            said.update(zip(here, say(torch.tensor([rows[number] for number in here])), strict=True))

        in_pieces(len(numbers), size, some)
    return [said[number] for number in range(len(rows))]


def score_of(task: str, said: str, prompt: Prompt) -> float:
    """0 to 100: the best match with any of the answers."""
    facts = tasks()[task]
    if facts.first_line:
        said = said.lstrip("\n").partition("\n")[0]
    metric = getattr(metrics, facts.metric)
    more = (prompt.classes,) if facts.metric == "class_match" else ()
    return 100 * max(metric(said, answer, *more) for answer in prompt.answers)


# Reading.


def read_collections(data: Path) -> dict[str, Collection]:
    """The prompts of every task that a file or folder holds, in the order of Table 3."""
    if not data.exists():
        raise FarspanError(f"{data} does not exist; give LongBench's .jsonl file, or the folder that holds them")
    check_unpacked(data)
    files = sorted(data.glob("*.jsonl")) if data.is_dir() else [data]
    found: dict[str, Collection] = {}
    for file in files:
        for task, collection in _of_file(file).items():
            if task in found:
                raise FarspanError(
                    f"{task} is in {found[task].file.name} and in {file.name}, and the two are not to be mixed; "
                    "give one of the files"
                )
            found[task] = collection
    if not found:
        raise FarspanError(f"{data} holds no prompt of LongBench's English and code tasks; give its .jsonl files")
    return {task: found[task] for task in tasks() if task in found}


def _of_file(file: Path) -> dict[str, Collection]:
    prompts: dict[str, list[Prompt]] = {}
    mini = False
    for number, row in read_rows(file):
        try:
            if row["dataset"] in CHINESE:
                continue
            mini = "prompt" in row
            prompt = _prepared(row) if mini else _official(row, number)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"{file}, line {number} is no prompt of LongBench ({type(error).__name__}: {error}); "
                "it needs dataset, context, input and answers, or dataset, prompt and gold"
            ) from None
        prompts.setdefault(row["dataset"], []).append(prompt)
    return {
        task: Collection(_name(tasks()[task], mini, len(group), file), file, tuple(group))
        for task, group in prompts.items()
    }


def _official(row: Mapping[str, Any], number: int) -> Prompt:
    text = _task(row).prompt.format(context=row["context"], input=row["input"])
    return Prompt(str(row.get("_id", number)), text, _answers(row["answers"]), tuple(row.get("all_classes") or ()))


def _prepared(row: Mapping[str, Any]) -> Prompt:
    _task(row)
    gold = row["gold"] if isinstance(row["gold"], dict) else {"answers": row["gold"]}
    name = f"{row['dataset']}-{row['idx']}"
    return Prompt(name, row["prompt"], _answers(gold["answers"]), tuple(gold.get("all_classes") or ()))


def _answers(given: list[str]) -> tuple[str, ...]:
    if not given or not all(isinstance(answer, str) for answer in given):
        raise TypeError("answers are no list of strings")
    return tuple(given)


def _task(row: Mapping[str, Any]) -> Task:
    name = row["dataset"]
    if name not in tasks():
        raise FarspanError(f"{name!r} is no English or code task of LongBench; {nearest(str(name), tasks())}")
    return tasks()[name]


def _name(task: Task, mini: bool, count: int, file: Path) -> str:
    """LongBench or MiniLongBench, where all of a task's prompts are there; else what it is."""
    whole, name = (task.mini, "MiniLongBench") if mini else (task.full, "LongBench")
    return name if count == whole else f"{count} prompts of {file.name}"
