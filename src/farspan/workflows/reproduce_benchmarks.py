"""The benchmarks of a study: passkeys by length and depth, LongBench and commonsense tasks.

They are the columns of Tables 1, 3 and 4 and the heatmaps of Wang 2024. Every model is measured in
its own context: the train length, or the length that its method extends it to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.data.passkey import SCORED
from farspan.errors import FarspanError
from farspan.evals.commonsense import Commonsense
from farspan.evals.longbench import MIN_LENGTH, LongBench
from farspan.evals.passkey import Passkey, PrefixCache, grid_lengths, scored_documents
from farspan.evals.scores import Eval


@dataclass(frozen=True)
class StudyBenchmarks:
    """[benchmarks] What is measured besides loss, entropy and passkeys at doublings."""

    passkey_lengths: int = 0  # evenly spaced up to twice the context; 16 in Wang 2024, 0: none
    longbench: str = ""  # its .jsonl file, or the folder that contains it
    beams: int = 5  # of LongBench
    commonsense: str = ""  # the folder of the tasks
    limit: int = 0  # prompts or items of each task; 0: all

    def __post_init__(self):
        for name in ("passkey_lengths", "limit"):
            if getattr(self, name) < 0:
                raise FarspanError(f"benchmarks.{name} is {getattr(self, name)}; choose 0 or more")
        if self.beams < 1:
            raise FarspanError(f"benchmarks.beams is {self.beams}; choose 1 or more")

    def with_data(self, context: int, path: Callable[[str], Path]) -> list[Eval]:
        """The evaluations that read files, which `path` finds."""
        evaluations: list[Eval] = []
        if self.longbench:
            data = path(self.longbench)
            evaluations.append(LongBench(data, (context,), self.beams, self.limit or None))
        if self.commonsense:
            data = path(self.commonsense)
            evaluations.append(Commonsense(data, context, limit=self.limit or None))
        return evaluations

    def sources(self, path: Callable[[str], Path]) -> list[Any]:
        """Everything of their data, and of the harness, that scores depend on.

        Refuses data that cannot be read, and commonsense tasks without the harness.
        """
        evaluations = self.with_data(MIN_LENGTH, path)
        return [[cell.task, dict(cell.settings)] for each in evaluations for cell in each.cells()]


def benchmark_scores(
    benchmarks: StudyBenchmarks,
    path: Callable[[str], Path],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    *,
    keys: int,
    trained: str,
) -> list[dict[str, Any]]:
    """The scores of a model in its context.

    keys: passkeys at each of ten depths. trained: whether the model saw passkey documents.
    """
    scores = []
    if benchmarks.passkey_lengths:
        shortest = scored_documents(tokenizer).shortest_of(SCORED)
        lengths = grid_lengths(2 * context, shortest, benchmarks.passkey_lengths)
        grid = Passkey(lengths, keys=keys, trained=trained, context=context)
        prefix_cache = PrefixCache(model)
        runs = (grid.run(cell, model, tokenizer, prefix_cache) for cell in grid.cells())
        scores += grid.score([sample for samples in runs for sample in samples])
    for evaluation in benchmarks.with_data(context, path):
        runs = (evaluation.run(cell, model, tokenizer) for cell in evaluation.cells())
        scores += evaluation.score([sample for samples in runs for sample in samples])
    return [asdict(score) for score in scores]
