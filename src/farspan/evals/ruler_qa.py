"""Questions about documents, from files in the layouts of SQuAD and HotpotQA."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from farspan.errors import CorruptError, FarspanError
from farspan.files import check_unpacked, sha256_of

QA_FILES = {"qa_1": "squad", "qa_2": "hotpotqa"}  # the names that --data takes


@dataclass(frozen=True)
class QaFile:
    """Questions about documents, by the number of the document."""

    documents: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]  # with their answers
    given: tuple[tuple[int, ...], ...]  # of each question: the documents that it comes with
    related: tuple[tuple[int, ...], ...]  # the first to add: others of the same article


def qa_digest(file: Path) -> str:
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
        texts = [_text(paragraph["context"]) for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            others = [text for text in texts if text != paragraph["context"]]
            for each in paragraph["qas"]:
                answers = _answers(answer["text"] for answer in each["answers"])
                if answers:
                    yield _text(each["question"]), answers, [paragraph["context"]], others


def _hotpotqa(content: Any) -> Iterator[QaRow]:
    for each in content:
        given = [f"{title}\n{''.join(sentences)}" for title, sentences in each["context"]]
        if answers := _answers([each["answer"]]):
            yield _text(each["question"]), answers, given, []


def _answers(answers: Iterable[Any]) -> tuple[str, ...]:
    """Each once; an empty one would be in every prediction."""
    return tuple(dict.fromkeys(answer for answer in answers if _text(answer).strip()))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value
