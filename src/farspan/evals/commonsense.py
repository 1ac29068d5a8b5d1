"""Commonsense tasks of lm-evaluation-harness, on a loaded model, from its data sets or from files.

The harness's own task definitions build and score the items; only the location of the data is
overridden. The harness silently truncates items that are too long from the left; here that is
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

from farspan.attention.rope import reset_dynamic_rope
from farspan.batching import out_of_memory
from farspan.data.jsonlines import read_rows
from farspan.data.tokens import add_begin_of_text
from farspan.errors import CorruptError, FarspanError, first_line, install_hint, suggest
from farspan.evals.perplexity import rows_per_batch
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey, average, wilson
from farspan.files import check_unpacked, sha256_of, write_text
from farspan.hub import unavailable_reason
from farspan.train.metadata import begin_of_text

NAME = "commonsense"
LETTERS = "ABCDEFGH"
BATCH = 16  # requests per batch on a GPU


@dataclass(frozen=True)
class HarnessTask:
    definition: str  # file below the harness's tasks folder
    split: str
    items: int  # in the official split
    fields: tuple[str, ...]  # read by the definition
    metrics: tuple[str, ...] = ("acc", "acc_norm")  # reported by the definition


TASKS: Mapping[str, HarnessTask] = {
    "arc_challenge": HarnessTask(
        "arc/arc_challenge.yaml", "test", 1172, ("question", "choices", "answerKey")
    ),
    "arc_easy": HarnessTask(
        "arc/arc_easy.yaml", "test", 2376, ("question", "choices", "answerKey")
    ),
    "boolq": HarnessTask(
        "super_glue/boolq/default.yaml",
        "validation",
        3270,
        ("passage", "question", "label"),
        ("acc",),
    ),
    "hellaswag": HarnessTask(
        "hellaswag/hellaswag.yaml",
        "validation",
        10042,
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    ),
    "openbookqa": HarnessTask(
        "openbookqa/openbookqa.yaml", "test", 500, ("question_stem", "choices", "answerKey")
    ),
    "piqa": HarnessTask("piqa/piqa.yaml", "validation", 1838, ("goal", "sol1", "sol2", "label")),
    "winogrande": HarnessTask(
        "winogrande/default.yaml",
        "validation",
        1267,
        ("sentence", "option1", "option2", "answer"),
        ("acc",),
    ),
}
SPLIT_FILES = {"test": ("test",), "validation": ("validation", "val")}


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

    def cells(self) -> list[EvalCell]:
        """One cell for each task."""
        version = _version()
        self._check()
        return [
            EvalCell(
                NAME,
                task,
                self.length,
                {"limit": self.limit, "harness": version, **self._source(task)},
            )
            for task in self.tasks
        ]

    def score_keys(self) -> list[ScoreKey]:
        cells = sorted(self.cells(), key=lambda cell: list(TASKS).index(cell.task))
        keys = [
            ScoreKey(NAME, cell.task, metric, cell.length)
            for cell in cells
            for metric in TASKS[cell.task].metrics
        ]
        return keys + [ScoreKey(NAME, "average", "average", self.length)] * (len(cells) > 1)

    def run(self, cell: EvalCell, model: Any, tokenizer: Any) -> list[Sample]:
        batch = rows_per_batch(model, cell.length, BATCH)
        while True:
            try:
                return self._run(cell, model, tokenizer, batch)
            except RuntimeError as error:
                if not out_of_memory(error) or batch == 1:
                    raise
                batch //= 2

    def score(self, samples: list[Sample]) -> list[Score]:
        """acc and, where it is reported, acc_norm of each task; the average prefers acc_norm."""
        groups = {task: [sample for sample in samples if sample["task"] == task] for task in TASKS}
        groups = {task: group for task, group in groups.items() if group}
        scores, averaged = [], {}
        for task, group in groups.items():
            for metric in ("acc", "acc_norm"):
                if metric in group[0]:
                    hits = sum(sample[metric] for sample in group)
                    averaged[task] = share = wilson(hits, len(group))
                    tags = {"task": task, **_data_tags(group)}
                    scores.append(Score(NAME, metric, group[0]["length"], *share, len(group), tags))
        if len(groups) > 1:
            tags = {"task": "average", "tasks": len(groups), **_data_tags(samples)}
            mean = average(list(averaged.values()))
            scores.append(Score(NAME, "average", samples[0]["length"], *mean, len(samples), tags))
        return scores

    def _check(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise FarspanError(f"the limit is {self.limit} items; use 1 or more")
        for task in self.tasks:
            if task not in TASKS:
                raise FarspanError(f"commonsense has no task {task!r}; {suggest(task, TASKS)}")

    def _file(self, task: str) -> Path:
        check_unpacked(Path(self.data))
        folder = Path(self.data) / task
        candidates = [folder / f"{name}.jsonl" for name in SPLIT_FILES[TASKS[task].split]]
        for file in candidates:
            if file.is_file():
                return file
        raise FarspanError(
            f"{candidates[-1]} was not found; give the folder that contains it, or choose other "
            "tasks"
        )

    def _source(self, task: str) -> dict[str, Any]:
        """The name of the items (split or file, and how many of them) and the file's hash."""
        definition, file = TASKS[task], self._file(task) if self.data else None
        count = definition.items if file is None else sum(1 for _ in read_rows(file))
        limited = self.limit is not None and self.limit < count
        prefix = f"first {self.limit} of the " if limited else ""
        if file is None:
            return {"data": f"{prefix}{definition.split} split"}
        complete = count == definition.items
        name = (
            f"{definition.split} split"
            if complete
            else f"{count} items of {file.parent.name}/{file.name}"
        )
        return {"data": prefix + name, "sha256": sha256_of(file)}

    def _run(self, cell: EvalCell, model: Any, tokenizer: Any, batch: int) -> list[Sample]:
        with tempfile.TemporaryDirectory() as folder, silenced():
            task = self._task(cell.task, Path(folder))
            reset_dynamic_rope(model)
            # a copy, since the harness may add a padding token
            harness_tokenizer = copy.deepcopy(tokenizer)
            add_begin_of_text(harness_tokenizer, bool(begin_of_text(tokenizer)))
            harness = _harness(model, harness_tokenizer, cell.length, batch)
            items = evaluate_task(harness, task, self.limit)
        tokens = iter(harness.tokens)
        samples = []
        for item in items:
            sizes = [next(tokens) for _ in item["arguments"]]
            likelihoods = [float(likelihood) for likelihood, _ in item["filtered_resps"]]
            if not all(map(math.isfinite, likelihoods)):
                raise FarspanError(
                    f"the log-likelihoods of item {item['doc_id']} of {cell.task} are "
                    f"{likelihoods} because the model's activations overflow; load it with a wider "
                    "dtype"
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
                    "loglikelihoods": likelihoods,
                    "choice": likelihoods.index(max(likelihoods)),
                    **{
                        metric: float(item[metric])
                        for metric in ("acc", "acc_norm")
                        if metric in item
                    },
                    "tokens": max(sizes),
                    # the last token is only predicted, so it needs no room
                    "cut": max(0, *(size - cell.length - 1 for size in sizes)),
                }
            )
        return samples

    def _task(self, name: str, folder: Path) -> Any:
        """The harness's task. With files, its definition is included and its data set replaced."""
        import lm_eval
        from lm_eval.tasks import TaskManager

        definition = Path(lm_eval.__file__).parent / "tasks" / TASKS[name].definition
        if not self.data:
            _check_available(_data_set(definition))
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
                **{f"{name}_split": None for name in ("training", "validation", "test")},
                f"{split}_split": split,
            }
        (folder / "tasks").mkdir()
        write_text(folder / "tasks" / f"{name}.yaml", json.dumps(config))  # JSON is YAML
        try:
            return TaskManager(include_path=str(folder / "tasks"), include_defaults=False).load(
                [name]
            )
        except Exception as error:  # the hub and the harness raise many types
            raise FarspanError(
                f"lm-evaluation-harness cannot load {name} ({type(error).__name__}: "
                f"{first_line(error)}); give its items as files, or check the network"
            ) from error


def _data_set(definition: Path) -> str:
    """The data set of a harness definition, which may be set in a definition that it includes."""
    text = definition.read_text(encoding="utf-8")
    fields = dict(re.findall(r"^(dataset_path|include): *(\S+)", text, re.MULTILINE))
    if "dataset_path" in fields:
        return fields["dataset_path"]
    return _data_set(definition.parent / fields["include"])


def _check_available(name: str) -> None:
    """Reject a data set that is neither cached nor available from the hub."""
    import datasets

    cached = (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).exists()
    if not cached and (reason := unavailable_reason(name, "dataset")) is not None:
        raise FarspanError(
            f"the data set {name} is not available from the hub ({reason}); give the items as "
            "files with --data commonsense=FOLDER, or check the network"
        )


def _data_tags(samples: list[Sample]) -> dict[str, Any]:
    return {
        "data": ", ".join(sorted({sample["data"] for sample in samples})),
        "truncated": sum(sample["cut"] > 0 for sample in samples),
        "cut": sum(sample["cut"] for sample in samples),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise FarspanError(
            "commonsense needs lm-evaluation-harness, which is not installed; "
            + install_hint("harness")
        ) from None


def _harness(model: Any, tokenizer: Any, length: int, batch: int) -> Any:
    """Wrap the model for the harness, recording the number of tokens of each request."""
    from lm_eval.models.huggingface import HFLM

    class TokenCountingLM(HFLM):
        tokens: tuple[int, ...] = ()

        def _loglikelihood_tokens(self, requests, *args, **kwargs):
            longest = max(len(continuation) for _, _, continuation in requests)
            if longest > length:
                raise FarspanError(
                    f"an answer has {longest} tokens, but the context has {length}; use a longer "
                    "context"
                )
            self.tokens = tuple(
                len(context) + len(continuation) for _, context, continuation in requests
            )
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

    return TokenCountingLM(
        pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=batch
    )


def evaluate_task(harness: Any, task: Any, limit: int | None) -> list[dict[str, Any]]:
    """The harness's record of every item, in order."""
    from lm_eval.evaluator import evaluate

    results = evaluate(harness, task, limit=limit, bootstrap_iters=0, log_samples=True)
    ((_, items),) = results["samples"].items()
    return sorted(items, key=lambda item: item["doc_id"])


@contextlib.contextmanager
def silenced():
    """Suppress the harness's progress bars and warnings; truncation is counted separately."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


# Files use the layout of the data sets, or that of AI2's evaluation, with finished prompts.


def official_rows(task: str, file: Path) -> list[dict[str, Any]]:
    """The items of a file, in the layout that the harness's definition reads."""
    rows = []
    for number, row in read_rows(file):
        try:
            item = _official(task, row)
            missing = [field for field in TASKS[task].fields if field not in item]
            if missing:
                raise KeyError(missing[0])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(
                f"{file}, line {number} is not an item of {task} ({type(error).__name__}: "
                f"{error}); it needs {', '.join(TASKS[task].fields)}"
            ) from None
        rows.append({field: item[field] for field in TASKS[task].fields})
    if not rows:
        raise FarspanError(f"{file} has no items; give a file with at least one")
    return rows


def _official(task: str, row: dict[str, Any]) -> dict[str, Any]:
    if task == "boolq" and "label" not in row:
        return {**row, "label": int(row["answer"])}
    if "query" in row:  # "Question: …\nAnswer:", the choices, and the index of the right one
        question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        labels = list(LETTERS[: len(row["choices"])])
        return {
            "question_stem" if task == "openbookqa" else "question": question,
            "choices": {"text": row["choices"], "label": labels},
            "answerKey": labels[row["gold"]],
        }
    return row
