"""Tasks of the user's own: a function of a length and a generator, or examples in JSON Lines.

A recipe describes one in `[custom_tasks.NAME]`. It becomes a `LabTask` like the built-in ones.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from farspan.custom_code import (
    import_code,
    imported,
    resolve_inside,
    resolve_reference,
    source_hash,
)
from farspan.errors import FarspanError, first_line
from farspan.files import sha256_of
from farspan.lab.examples import Splits, length_weights, make_splits
from farspan.lab.released import read_examples
from farspan.lab.tasks import Example, LabTask, Range
from farspan.lab.tokenizer import SPECIAL_TOKENS, WordTokenizer
from farspan.lengths import parse_length_range

SPLITS = ("train", "validation", "test")  # of a folder, as NAME.jsonl
MANY = 1000  # distinct examples of a length from which on they count as unlimited
DRAWN_TWICE = 20  # distinct examples of a length that are drawn again


@dataclass(frozen=True)
class CustomTask:
    """A task in a recipe."""

    file: str  # mine.py:make, mine.jsonl, or a folder of train, validation and test .jsonl
    train_lengths: str = ""  # as 2:20; a folder has its own
    test_lengths: str = ""
    length_unit: str = "units"  # what a length counts
    words: tuple[str, ...] = ()  # of a function's examples that no built-in task has


@dataclass(frozen=True)
class SplitTask(LabTask):
    """A task whose examples are already split."""

    splits: Splits = field(kw_only=True)

    def take(self, train: Range, test: Range, train_n: int, test_n: int, seed: int) -> Splits:
        """Examples of these lengths in each split, in random order: files may be sorted."""

        def select(examples: list[Example], lengths: Range, count: int) -> list[Example]:
            low, high = lengths
            inside = [example for example in examples if low <= example.length <= high]
            order = np.random.default_rng((seed, zlib.crc32(self.name.encode())))
            return [inside[index] for index in order.permutation(len(inside))[:count]]

        return Splits(
            select(self.splits.train, train, train_n),
            select(self.splits.held_out, train, test_n),
            select(self.splits.beyond, test, test_n),
        )


def split_examples(
    task: LabTask,
    train_n: int,
    test_n: int,
    seed: int,
    *,
    train: Range,
    test: Range,
    **options: Any,
) -> Splits:
    """The splits of a task: its own, or drawn ones. `options` are those of `make_splits`."""
    if isinstance(task, SplitTask):
        return task.take(train, test, train_n, test_n, seed)
    return make_splits(task, train_n, test_n, seed, train=train, test=test, **options)


def train_weights(task: LabTask, examples: Iterable[Example], even: bool) -> dict[int, int]:
    """How often each length is trained on, relative to the others."""
    counts = Counter(example.length for example in examples)
    if isinstance(task, SplitTask) and not even:
        return dict(counts)
    return length_weights(task, counts, even)


def resolve_file(file: str, folder: Path, key: str, *, trust_remote_code: bool) -> str:
    """The file of a custom task with an absolute path; code is imported, if it is trusted."""
    if not is_code(file):
        return str(resolve_inside(file, folder, key))
    reference = resolve_reference(file, folder, key)
    import_code(reference, key, trust_remote_code=trust_remote_code)
    return reference


def is_code(file: str) -> bool:
    """Whether a custom task's file is a reference to code; otherwise it is a path of data."""
    return file.rpartition(":")[2].isidentifier() and ":" in file


def custom_task_hash(name: str, task: CustomTask) -> str:
    """A hash of the code and the function's name, or of the data of a task."""
    if is_code(task.file):
        hashes = [source_hash(task.file, _key(name)), task.file.rpartition(":")[2]]
    else:
        files = _data_files(name, task)
        hashes = [_file_hash(file, *_version(file)) for file in files]
        hashes += ["shuffled"] * (len(files) > 1)  # earlier versions took the first examples
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def load_custom_task(name: str, task: CustomTask) -> LabTask:
    """The task of this name; its file is read again when it has changed."""
    if is_code(task.file):
        return _load(name, task, source_hash(task.file, _key(name)))
    return _load(name, task, tuple(map(_version, _data_files(name, task))))


@functools.lru_cache(maxsize=64)
def _load(name: str, task: CustomTask, version: object) -> LabTask:
    del version  # a part of the cache's key
    if not task.length_unit.strip():
        raise FarspanError(f"custom_tasks.{name}.length_unit is empty; name what a length counts")
    _check_words(name, task.words)
    if is_code(task.file):
        return _function_task(name, task)
    files = _data_files(name, task)
    if task.words:
        raise FarspanError(
            f"custom_tasks.{name}.words are for a function; remove them, because the words of "
            f"{task.file} are known"
        )
    return _file_task(name, task, files[0]) if len(files) == 1 else _split_task(name, task, files)


def _key(name: str) -> str:
    return f"custom_tasks.{name}.file"


def _ranges(name: str, task: CustomTask) -> tuple[Range, Range]:
    for key, text in (("train_lengths", task.train_lengths), ("test_lengths", task.test_lengths)):
        if not text:
            raise FarspanError(
                f"custom_tasks.{name}.{key} is missing; write the shortest and the longest, as 2:20"
            )
    return parse_length_range(task.train_lengths), parse_length_range(task.test_lengths)


def _check_words(name: str, words: Iterable[str]) -> None:
    for word in words:
        if word in SPECIAL_TOKENS:
            raise FarspanError(
                f"custom_tasks.{name} has the word {word!r}, which marks the parts of an example; "
                "choose another word"
            )
        if len(word.split()) != 1 or word != word.strip():
            raise FarspanError(
                f"custom_tasks.{name}.words has {word!r}, which is not one word; remove its spaces"
            )


# Functions.


def _function_task(name: str, task: CustomTask) -> LabTask:
    function = imported(task.file, _key(name))
    if not callable(function):
        raise FarspanError(
            f"{_key(name)} is {task.file!r}, which is no function; name a function of a length and "
            "a generator"
        )
    known = frozenset((*WordTokenizer().vocabulary, *task.words)) - set(SPECIAL_TOKENS)

    def make(length: int, rng: np.random.Generator) -> Example:
        example = _call(function, task.file, length, rng)
        if example is None:
            raise FarspanError(
                f"{task.file} has no example of {length} {task.length_unit}; choose other lengths"
            )
        unknown = {*example.input.split(), *example.target.split()} - known
        if unknown:
            raise FarspanError(
                f"{task.file} wrote {min(unknown)!r}, which is not in the vocabulary; add it to "
                f"custom_tasks.{name}.words, or put spaces between words and between digits"
            )
        return example

    @functools.cache
    def count(length: int) -> float:
        return _count_distinct(name, function, task.file, length)

    return LabTask(name, *_ranges(name, task), make, count, task.words, task.length_unit)


def _call(
    function: Callable[..., object], reference: str, length: int, rng: np.random.Generator
) -> Example | None:
    try:
        result = function(length, rng)
    except (Exception, SystemExit) as error:  # whatever the code raises
        raise FarspanError(
            f"{reference} failed at length {length} ({type(error).__name__}: {first_line(error)}); "
            "fix the function"
        ) from error
    if result is None:
        return None
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not all(isinstance(part, str) and part.split() for part in result):  # type: ignore[attr-defined]
        raise FarspanError(
            f"{reference} returned {str(result)[:60]!r} ({type(result).__name__}) at length "
            f"{length}; return the input and the target, two strings of words, or None if no "
            "example has that length"
        )
    text, target = (" ".join(part.split()) for part in result)  # type: ignore[attr-defined]
    return Example(text, target, length)


def _count_distinct(
    name: str, function: Callable[..., object], reference: str, length: int
) -> float:
    """The number of distinct examples of a length, by drawing until no new ones appear.

    The first of them are drawn twice, to see whether the generator alone decides them.
    """
    rng = np.random.default_rng((zlib.crc32(name.encode()), length))
    targets: dict[str, str] = {}
    repeats = 0
    while len(targets) < MANY and repeats <= 100 + 20 * len(targets):
        same_rng = copy.deepcopy(rng) if len(targets) < DRAWN_TWICE else None
        example = _call(function, reference, length, rng)
        if same_rng is not None and _call(function, reference, length, same_rng) != example:
            raise FarspanError(
                f"{reference} gave two examples of length {length} for equal generators; take all "
                "randomness from the generator, and keep nothing between calls"
            )
        if example is None:
            return 0
        repeats = repeats + 1 if example.input in targets else 0
        if targets.setdefault(example.input, example.target) != example.target:
            raise FarspanError(
                f"{reference} gave the input {example.input[:60]!r} two targets at length "
                f"{length}; let the input decide the target"
            )
    return math.inf if len(targets) >= MANY else len(targets)


# Files.


def _data_files(name: str, task: CustomTask) -> list[Path]:
    path = Path(task.file)
    files = [path / f"{split}.jsonl" for split in SPLITS] if path.is_dir() else [path]
    for file in files:
        if file.suffix != ".jsonl":
            raise FarspanError(
                f"{_key(name)} is {task.file!r}; name a .jsonl file, a folder of train.jsonl, "
                "validation.jsonl and test.jsonl, or a function as file.py:name"
            )
        if not file.is_file():
            raise FarspanError(f"{_key(name)} is {task.file!r}, but {file} is missing; add it")
    return files


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=64)
def _file_hash(file: Path, modified: int, size: int) -> str:
    del modified, size  # parts of the cache's key
    return sha256_of(file)


def _file_task(name: str, task: CustomTask, file: Path) -> LabTask:
    return _pool_task(name, task, _ranges(name, task), read_examples(file))


def _pool_task(
    name: str, task: CustomTask, ranges: tuple[Range, Range], examples: list[Example]
) -> LabTask:
    """A task whose examples are drawn from these."""
    by_length: dict[int, list[Example]] = {}
    for example in examples:
        by_length.setdefault(example.length, []).append(example)
    words = {word for example in examples for word in f"{example.input} {example.target}".split()}
    _check_words(name, sorted(words))

    def make(length: int, rng: np.random.Generator) -> Example:
        pool = by_length.get(length)
        if not pool:
            raise FarspanError(
                f"{task.file} has no example of {length} {task.length_unit}; choose other lengths"
            )
        return pool[rng.integers(len(pool))]

    def count(length: int) -> int:
        return len(by_length.get(length, ()))

    vocabulary = tuple(sorted(words))
    return LabTask(name, *ranges, make, count, vocabulary, task.length_unit, frequency=count)


def _split_task(name: str, task: CustomTask, files: list[Path]) -> SplitTask:
    """The splits of a folder, without the examples of an earlier split."""
    seen: set[str] = set()
    splits = []
    for file in files:
        examples = [example for example in read_examples(file) if example.input not in seen]
        if not examples:
            raise FarspanError(f"every example of {file} is in another split; add others")
        seen |= {example.input for example in examples}
        splits.append(examples)
    lengths = [[example.length for example in examples] for examples in splits]
    inside, beyond = [*lengths[0], *lengths[1]], lengths[2]
    train = parse_length_range(task.train_lengths or f"{min(inside)}:{max(inside)}")
    test = parse_length_range(task.test_lengths or f"{min(beyond)}:{max(beyond)}")
    pool = [example for examples in splits for example in examples]
    base = _pool_task(name, task, (train, test), pool)
    return SplitTask(**vars(base), splits=Splits(*splits))


def check_name(kind: str, name: str, built_in: Iterable[str]) -> None:
    """Refuse a name that is taken, or that cannot be part of a file name."""
    if name in built_in:
        raise FarspanError(
            f"custom_{kind}s.{name} has the name of a built-in {kind}; choose another name"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise FarspanError(
            f"custom_{kind}s has the name {name!r}; write it with letters, digits, - and _"
        )
