"""Answers to prompts: greedy continuations by a loaded model or a server, and stored samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from farspan.batching import run_in_batches
from farspan.evals.decoding import end_tokens, generate_tokens
from farspan.evals.engine import Engine, Generated
from farspan.evals.perplexity import rows_per_batch
from farspan.evals.scores import EvalCell, Sample

AROUND = 60  # characters kept before an answer in a prompt; twice as many from its start on
AROUND_ANSWERS = 4
MEMORY_SHARE = 0.75  # of free GPU memory, for prompts that are decoded together
LAYER_TENSORS = 8  # of the size of its hidden layer that a layer holds at once, at most
MOST_ROWS = 64


def generate_texts(
    model: Any,
    tokenizer: Any,
    rows: list[list[int]],
    answer_tokens: int,
    batch: int | None,
    frame: tuple[str, str] | None = None,
) -> list[Generated]:
    """The greedy continuation of each of some equally long prompts.

    batch: prompts decoded together; None: one on a CPU, as many as fit on a GPU.
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
    if batch is None and model.device.type == "cuda":
        batch = rows_in_memory(model, length, free_memory(model.device))
    run_in_batches(len(rows), batch or rows_per_batch(model, length, None), run_batch)
    return [Generated(text, len(row)) for text, row in zip(predictions, rows, strict=True)]


def batch_setting(batch: int | None) -> dict[str, int]:
    """The setting of a cell whose prompts are decoded together, which changes rounding."""
    return {"batch": batch} if batch is not None and batch > 1 else {}


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that are free, or that torch keeps for later use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def rows_in_memory(model: PreTrainedModel, length: int, free: int) -> int:
    """Prompts whose cache, and what a layer computes on them, take most of the free memory.

    Each step of decoding reads all weights and starts every kernel once, for any number of rows.
    """
    config = model.config.get_text_config()
    queries = getattr(config, "num_attention_heads", 0)  # none in Mamba
    heads = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or config.hidden_size // max(1, queries)
    widths = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = max(widths) if isinstance(widths, Sequence) else widths  # Gemma 3n: one for each layer
    numbers = 2 * config.num_hidden_layers * heads * size + LAYER_TENSORS * widest
    row = length * numbers * model.dtype.itemsize
    return min(MOST_ROWS, max(1, int(MEMORY_SHARE * free / row)))


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
    texts: Sequence[str],
    answers: Sequence[Generated],
    answer_tokens: int,
    score: Callable[[str, Sequence[str]], float],
) -> list[Sample]:
    """The stored samples of a cell: what was asked for, and what a model answered.

    texts: the prompts, of which the text around the expected answers is kept.
    """
    return [
        {
            "eval": cell.eval,
            "task": cell.task,
            "length": cell.length,
            "haystack": cell.settings["haystack"],
            "id": number,
            "depths": [round(depth, 4) for depth in prompt.depths],
            "question": prompt.question.strip(),
            "around": text_around(text, prompt.answers),
            "prediction": answer.text,
            "answers": list(prompt.answers),
            "score": score(answer.text, prompt.answers),
            "tokens": answer.tokens,
            "answer_tokens": answer_tokens,
        }
        for number, (prompt, text, answer) in enumerate(zip(prompts, texts, answers, strict=True))
    ]


def text_around(text: str, answers: Sequence[str]) -> str:
    """Where each answer first occurs in a prompt, with the words around it.

    >>> text_around("It was late. The key is 42, they say. Good night.", ["42"])
    'It was late. The key is 42, they say. Good night.'
    """
    spans: list[tuple[int, int]] = []
    for start in sorted({text.find(answer) for answer in answers[:AROUND_ANSWERS]} - {-1}):
        first, last = max(0, start - AROUND), min(len(text), start + 2 * AROUND)
        if spans and first <= spans[-1][1]:
            first, last = spans.pop()[0], last
        spans.append((first, last))
    pieces = [
        "…" * (first > 0) + text[first:last] + "…" * (last < len(text)) for first, last in spans
    ]
    return " ".join(" ".join(pieces).split())
