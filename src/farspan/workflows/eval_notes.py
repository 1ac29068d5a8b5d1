"""The notes of `farspan eval`: what was not measured, and what to know when reading the scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from farspan.begin_of_text import BeginOfText
from farspan.evals.nonliteral import NonLiteral
from farspan.evals.perplexity import LONGPPL, Perplexity
from farspan.evals.scores import Eval, Sample, Score
from farspan.evals.suites import EvalModel, EvalPlan

EXACT = ("needle", "nonliteral", "ruler")  # evaluations of exact lengths


def measurement_notes(
    model: EvalModel,
    plan: EvalPlan,
    evaluations: Sequence[Eval],
    samples: Sequence[Sequence[Sample]],
) -> Iterator[str]:
    """On the measurement of one model."""
    if not plan.lengths_requested:
        yield from _left_out(model, plan, evaluations)
    if model.engine:
        yield from _token_notes(samples)
        yield from _empty_notes(samples)
    if (size := plan.config.batch_size or 1) > 1:
        yield (
            f"{size} prompts were answered at a time, so rounding can make answers differ from "
            "those of one at a time"
        )
    for evaluation, group in zip(evaluations, samples, strict=True):
        if isinstance(evaluation, NonLiteral):
            yield from evaluation.notes(group)


def _left_out(model: EvalModel, plan: EvalPlan, evaluations: Sequence[Eval]) -> Iterator[str]:
    """What was left out without a request."""
    if model.max_positions is not None:
        yield f"its position table has {model.max_positions} rows; no longer input was measured"
        return
    wanted = max(2 * (model.train_length or 0), model.extended_length or 0)
    for evaluation in evaluations:
        if isinstance(evaluation, Perplexity):
            longest = min(text.longest for text in evaluation.texts)
            if longest < wanted:
                yield (
                    f"the longest document has {longest} tokens, so perplexity stops there; give "
                    "longer text for more"
                )


def _token_notes(samples: Sequence[Sequence[Sample]]) -> Iterator[str]:
    """Prompts as text may have other numbers of tokens for a server."""
    exact = [each for group in samples for each in group if each["eval"] in EXACT]
    changes = [each["tokens"] + each["answer_tokens"] - each["length"] for each in exact]
    if any(changes):
        yield (
            f"the server takes prompts as text, and counts {min(changes):+d} to "
            f"{max(changes):+d} tokens of difference to the exact lengths"
        )


def _empty_notes(samples: Sequence[Sequence[Sample]]) -> Iterator[str]:
    """A server can answer with no text, which scores nothing."""
    answers = [each.get("prediction", each.get("said")) for group in samples for each in group]
    texts = [answer for answer in answers if isinstance(answer, str)]
    if empty := sum(not text.strip() for text in texts):
        yield (
            f"{empty} of {len(texts)} answers are empty; a model that thinks first may have used "
            "up the tokens of its answer"
        )


def missing_longppl(
    evaluator: str, evaluations: Sequence[Eval], scores: Sequence[Score]
) -> Iterator[str]:
    """A note for each text without key tokens."""
    keys = {key: None for each in evaluations for key in each.score_keys()}
    for score in scores:
        keys.pop(score.key, None)
    for task in dict.fromkeys(key.task for key in keys if key.metric == LONGPPL):
        yield (
            f"{task} has no key token of {evaluator}, so there is no longppl of it; use longer "
            "text or a shorter shortest length"
        )


def begin_notes(begins: Mapping[str, BeginOfText]) -> Iterator[str]:
    """How the texts of each model begin, and why."""
    if len({begin.notes for begin in begins.values()}) == 1:
        yield from next(iter(begins.values())).notes
        return
    for name, begin in begins.items():
        yield from (f"{name}: {note}" for note in begin.notes)
