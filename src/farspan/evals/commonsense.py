"""Commonsense by lm-evaluation-harness, on a model that is already loaded, from its data sets or from files.

The harness stays the authority: its own task definitions say how an item is asked and scored, and only the place of
the data is overridden. What it cuts from the left of an item that is too long, it cuts without a word; here that is
counted.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import json
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.attention.patch import forget_lengths
from farspan.errors import CorruptError, FarspanError, first_line, nearest
from farspan.evals.jsonlines import read_rows
from farspan.evals.perplexity import rows_at_once
from farspan.evals.scores import Cell, Place, Sample, Score, average, wilson
from farspan.files import check_unpacked, sha256_of, write_text
from farspan.hub import refusal
from farspan.memory import out_of_memory

NAME = "commonsense"
INSTALL = "pip install 'farspan[harness]'"
LETTERS = "ABCDEFGH"


@dataclass(frozen=True)
class Task:
    definition: str  # the harness's, among its tasks
    split: str
    items: int  # in the official split
    fields: tuple[str, ...]  # that the definition reads
    metrics: tuple[str, ...] = ("acc", "acc_norm")  # that the definition gives


TASKS: Mapping[str, Task] = {
    "arc_challenge": Task("arc/arc_challenge.yaml", "test", 1172, ("question", "choices", "answerKey")),
    "arc_easy": Task("arc/arc_easy.yaml", "test", 2376, ("question", "choices", "answerKey")),
    "boolq": Task("super_glue/boolq/default.yaml", "validation", 3270, ("passage", "question", "label"), ("acc",)),
    "hellaswag": Task(
        "hellaswag/hellaswag.yaml", "validation", 10042, ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    ),
    "openbookqa": Task("openbookqa/openbookqa.yaml", "test", 500, ("question_stem", "choices", "answerKey")),
    "piqa": Task("piqa/piqa.yaml", "validation", 1838, ("goal", "sol1", "sol2", "label")),
    "winogrande": Task(
        "winogrande/default.yaml", "validation", 1267, ("sentence", "option1", "option2", "answer"), ("acc",)
    ),
}
ENDINGS = {"test": ("test",), "validation": ("validation", "val")}  # of a split's file


@dataclass(frozen=True)
class Commonsense:
    """The first `limit` items of each task, or all, in a context of `length` tokens.

    >>> [cell.task for cell in Commonsense("bench", 2048, tasks=("piqa",), limit=200).cells()]
    ['piqa']
    """

    data: str | Path  # a folder with TASK/test.jsonl or TASK/val.jsonl; empty: the hub
    length: int
    tasks: tuple[str, ...] = tuple(TASKS)
    limit: int | None = None
    batch: int = 16

    def cells(self) -> list[Cell]:
        """A cell is a task."""
        version = _version()
        self._check()
        return [
            Cell(NAME, task, self.length, {"limit": self.limit, "harness": version, **self._source(task)})
            for task in self.tasks
        ]

    def places(self) -> list[Place]:
        cells = sorted(self.cells(), key=lambda cell: list(TASKS).index(cell.task))
        found = [Place(NAME, cell.task, metric, cell.length) for cell in cells for metric in TASKS[cell.task].metrics]
        return found + [Place(NAME, "average", "average", self.length)] * (len(cells) > 1)

    def run(self, cell: Cell, model: Any, tokenizer: Any) -> list[Sample]:
        batch = rows_at_once(model, cell.length, self.batch)
        while True:
            try:
                return self._run(cell, model, tokenizer, batch)
            except RuntimeError as error:
                if not out_of_memory(error) or batch == 1:
                    raise
                batch //= 2

    def score(self, samples: list[Sample]) -> list[Score]:
        """acc, and acc_norm where the harness has it, of each task; the average takes acc_norm, or acc without it."""
        groups = {task: [sample for sample in samples if sample["task"] == task] for task in TASKS}
        groups = {task: group for task, group in groups.items() if group}
        scores, counted = [], {}
        for task, group in groups.items():
            for metric in ("acc", "acc_norm"):
                if metric in group[0]:
                    counted[task] = share = wilson(sum(sample[metric] for sample in group), len(group))
                    tags = {"task": task, **_declared(group)}
                    scores.append(Score(NAME, metric, group[0]["length"], *share, len(group), tags))
        if len(groups) > 1:
            tags = {"task": "average", "tasks": len(groups), **_declared(samples)}
            mean = average(list(counted.values()))
            scores.append(Score(NAME, "average", samples[0]["length"], *mean, len(samples), tags))
        return scores

    def _check(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise FarspanError(f"a limit of {self.limit} items leaves none; ask for 1 or more")
        for task in self.tasks:
            if task not in TASKS:
                raise FarspanError(f"commonsense has no task {task!r}; {nearest(task, TASKS)}")

    def _file(self, task: str) -> Path:
        check_unpacked(Path(self.data))
        folder = Path(self.data) / task
        found = [folder / f"{name}.jsonl" for name in ENDINGS[TASKS[task].split]]
        for file in found:
            if file.is_file():
                return file
        raise FarspanError(f"{found[-1]} does not exist; give a folder that holds it, or choose other tasks")

    def _source(self, task: str) -> dict[str, Any]:
        """What the items are: by whose word, and how many of them."""
        facts, file = TASKS[task], self._file(task) if self.data else None
        count = facts.items if file is None else sum(1 for _ in read_rows(file))
        few = f"first {self.limit} of the " if self.limit is not None and self.limit < count else ""
        if file is None:
            return {"data": f"{few}{facts.split} split"}
        whole = f"{facts.split} split" if count == facts.items else f"{count} items of {file.parent.name}/{file.name}"
        return {"data": few + whole, "sha256": sha256_of(file)}

    def _run(self, cell: Cell, model: Any, tokenizer: Any, batch: int) -> list[Sample]:
        with tempfile.TemporaryDirectory() as folder, _without_chatter():
            task = self._task(cell.task, Path(folder))
            forget_lengths(model)
            harness = _harness(model, copy.deepcopy(tokenizer), cell.length, batch)  # it may add a token for padding
            found = _evaluate(harness, task, self.limit)
        tokens = iter(harness.tokens)
        samples = []
        for item in found:
            sizes = [next(tokens) for _ in item["arguments"]]
            told = [float(likelihood) for likelihood, _ in item["filtered_resps"]]
            if not all(map(math.isfinite, told)):
                raise FarspanError(
                    f"the log-likelihoods of item {item['doc_id']} of {cell.task} are {told}: the model's numbers "
                    "overflow; load it in a wider precision"
                )
            contexts = [context for context, _ in item["arguments"]]
            samples.append(
                {
                    "eval": NAME,
                    "task": cell.task,
                    "length": cell.length,
                    "data": cell.settings["data"],
                    "id": item["doc_id"],
                    "prompt": contexts if len(set(contexts)) > 1 else contexts[0],
                    "choices": [continuation for _, continuation in item["arguments"]],
                    "loglikelihoods": told,
                    "choice": told.index(max(told)),
                    **{metric: float(item[metric]) for metric in ("acc", "acc_norm") if metric in item},
                    "tokens": max(sizes),
                    "cut": max(0, *(size - cell.length - 1 for size in sizes)),  # the last token is only predicted
                }
            )
        return samples

    def _task(self, name: str, folder: Path) -> Any:
        """The harness's task; with files, its definition included and its data set replaced."""
        import lm_eval
        from lm_eval.tasks import TaskManager

        definition = Path(lm_eval.__file__).parent / "tasks" / TASKS[name].definition
        if not self.data:
            _check_fetched(_data_set(definition))
        config: dict[str, Any] = {"include": str(definition), "task": name}
        if self.data:
            split = TASKS[name].split
            rows = [json.dumps(row) for row in official_rows(name, self._file(name))]
            write_text(folder / "items.jsonl", "\n".join(rows))
            config |= {
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {
                    "data_files": {split: str(folder / "items.jsonl")},
                    "cache_dir": str(folder / "cache"),
                },
                **{f"{other}_split": None for other in ("training", "validation", "test")},
                f"{split}_split": split,
            }
        (folder / "tasks").mkdir()
        write_text(folder / "tasks" / f"{name}.yaml", json.dumps(config))  # JSON is YAML
        try:
            return TaskManager(include_path=str(folder / "tasks"), include_defaults=False).load([name])
        except Exception as error:  # whatever the hub or the harness has to say
            raise FarspanError(
                f"lm-evaluation-harness cannot load {name} ({type(error).__name__}: {first_line(error)}); "
                "give its items as files, or check the network"
            ) from error


def _data_set(definition: Path) -> str:
    """The data set that a definition of the harness reads, or the one that it includes."""
    named = dict(re.findall(r"^(dataset_path|include): *(\S+)", definition.read_text(encoding="utf-8"), re.MULTILINE))
    return named["dataset_path"] if "dataset_path" in named else _data_set(definition.parent / named["include"])


def _check_fetched(name: str) -> None:
    """Refuse a data set that was never fetched and cannot be."""
    import datasets

    fetched = (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).exists()
    if not fetched and (why := refusal(name, "dataset")) is not None:
        raise FarspanError(
            f"the hub does not give the data set {name} ({why}); give the items as files with "
            "--data commonsense=FOLDER, or check the network"
        )


def _declared(samples: list[Sample]) -> dict[str, Any]:
    return {
        "data": ", ".join(sorted({sample["data"] for sample in samples})),
        "truncated": sum(sample["cut"] > 0 for sample in samples),
        "cut": sum(sample["cut"] for sample in samples),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise FarspanError(f"commonsense needs lm-evaluation-harness; install it with {INSTALL}") from None


def _harness(model: Any, tokenizer: Any, length: int, batch: int) -> Any:
    """The harness's model around ours, that remembers how many tokens each request has."""
    from lm_eval.models.huggingface import HFLM

    class Counting(HFLM):
        tokens: tuple[int, ...] = ()

        def _loglikelihood_tokens(self, requests, *args, **kwargs):
            longest = max(len(continuation) for _, _, continuation in requests)
            if longest > length:
                raise FarspanError(
                    f"an answer has {longest} tokens, and the context is {length}; ask for a longer context"
                )
            self.tokens = tuple(len(context) + len(continuation) for _, context, continuation in requests)
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

    return Counting(pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=batch)


def _evaluate(harness: Any, task: Any, limit: int | None) -> list[dict[str, Any]]:
    """The harness's record of every item, in order."""
    from lm_eval.evaluator import evaluate

    found = evaluate(harness, task, limit=limit, bootstrap_iters=0, log_samples=True)
    ((_, items),) = found["samples"].items()
    return sorted(items, key=lambda item: item["doc_id"])


@contextlib.contextmanager
def _without_chatter():
    """Neither the bars of the harness and of its data sets, nor its warnings; what matters is counted."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


# Items in files come as the data sets have them, or as AI2's evaluation does, with question and answers ready to use.


def official_rows(task: str, file: Path) -> list[dict[str, Any]]:
    """The items of a file, as the harness's definition reads them."""
    rows = []
    for number, row in read_rows(file):
        try:
            item = _official(task, row)
            missing = [field for field in TASKS[task].fields if field not in item]
            if missing:
                raise KeyError(missing[0])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"{file}, line {number} is no item of {task} ({type(error).__name__}: {error}); "
                f"it needs {', '.join(TASKS[task].fields)}"
            ) from None
        rows.append({field: item[field] for field in TASKS[task].fields})
    if not rows:
        raise FarspanError(f"{file} holds no items; give one with some")
    return rows


def _official(task: str, row: dict[str, Any]) -> dict[str, Any]:
    if task == "boolq" and "label" not in row:
        return {**row, "label": int(row["answer"])}
    if "query" in row:  # "Question: …\nAnswer:", texts of the answers, and the number of the right one
        question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        labels = list(LETTERS[: len(row["choices"])])
        return {
            "question_stem" if task == "openbookqa" else "question": question,
            "choices": {"text": row["choices"], "label": labels},
            "answerKey": labels[row["gold"]],
        }
    return row
