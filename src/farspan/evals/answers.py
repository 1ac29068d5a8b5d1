"""Answers to prompts: greedy continuations by a loaded model or a server, and stored samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from farspan.batching import run_in_batches
from farspan.evals.decoding import end_tokens, generate_tokens
from farspan.evals.engine import Engine, Generated
from farspan.evals.perplexity import rows_per_batch
from farspan.evals.scores import EvalCell, Sample


def generate_texts(
    model: Any,
    tokenizer: Any,
    rows: list[list[int]],
    answer_tokens: int,
    batch: int,
    frame: tuple[str, str] | None = None,
) -> list[Generated]:
    """The greedy continuation of each of some equally long prompts.

    frame: the text of a chat template in the prompts.
    """
    if isinstance(model, Engine):
        return model.generate(rows, answer_tokens, frame)
    end_ids = end_tokens(model, tokenizer)
    predictions: list[str] = []

    def run_batch(start: int, stop: int) -> None:
        prompts = torch.tensor(rows[start:stop])
        generated = generate_tokens(model, prompts, answer_tokens, end_ids=end_ids)
        predictions.extend(tokenizer.decode(ids, skip_special_tokens=True) for ids in generated)

    length = len(rows[0]) + answer_tokens
    run_in_batches(len(rows), rows_per_batch(model, length, batch), run_batch)
    return [Generated(text, len(row)) for text, row in zip(predictions, rows, strict=True)]


class Asked(Protocol):
    """What a prompt asks for."""

    @property
    def depths(self) -> tuple[float, ...]: ...

    @property
    def question(self) -> str: ...

    @property
    def answers(self) -> tuple[str, ...]: ...


def answer_samples(
    cell: EvalCell,
    prompts: Sequence[Asked],
    answers: Sequence[Generated],
    answer_tokens: int,
    score: Callable[[str, Sequence[str]], float],
) -> list[Sample]:
    """The stored samples of a cell: what was asked for, and what a model answered."""
    return [
        {
            "eval": cell.eval,
            "task": cell.task,
            "length": cell.length,
            "haystack": cell.settings["haystack"],
            "id": number,
            "depths": [round(depth, 4) for depth in prompt.depths],
            "question": prompt.question.strip(),
            "prediction": answer.text,
            "answers": list(prompt.answers),
            "score": score(answer.text, prompt.answers),
            "tokens": answer.tokens,
            "answer_tokens": answer_tokens,
        }
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
