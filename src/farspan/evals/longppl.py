"""LongPPL (Fang et al. 2024): perplexity over the tokens that need a long context.

An evaluator model scores the same tokens at a short and at a long length. A key token is one that
it predicts much better with the long context, and well. The average over all tokens hides them,
because most tokens follow from the last few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farspan.errors import FarspanError
from farspan.evals.scores import Sample

MIN_DIFFERENCE = 2.0  # nats by which the long context raises the log-likelihood (LSD)
MIN_LIKELIHOOD = -2.0  # nats; the log-likelihood with the long context (LCL)


@dataclass(frozen=True)
class Contrast:
    """The evaluator that chooses the key tokens, and the two lengths that it compares."""

    evaluator: str
    short: int
    long: int


@dataclass(frozen=True)
class Evaluator:
    """The model that chooses the key tokens."""

    name: str
    train_length: int | None

    def contrast(self, lengths: Sequence[int]) -> Contrast:
        """The shortest measured length, and the longest one that the evaluator was trained on."""
        if self.train_length is None:
            raise FarspanError(
                f"the config of {self.name} does not give its train length, which longppl needs; "
                "add a --baseline whose config does"
            )
        fitting = sorted(length for length in lengths if length <= self.train_length)
        if len(fitting) < 2:
            longest = max(fitting, default=self.train_length)
            example = ",".join(map(str, sorted({longest // 4, longest, *lengths})))
            raise FarspanError(
                f"longppl compares two lengths up to the train length of {self.name} "
                f"({self.train_length}), but of {', '.join(map(str, lengths))} "
                f"{'only one is' if fitting else 'none is'}; add a shorter length, for example "
                f"--lengths {example}"
            )
        return Contrast(self.name, fitting[0], fitting[-1])


def are_key_tokens(short: Sequence[float], long: Sequence[float]) -> NDArray[np.bool_]:
    """Which tokens are key tokens, by their losses with the short and with the long context.

    >>> are_key_tokens([9.0, 9.0, 3.0], [1.0, 2.5, 1.5]).tolist()
    [True, False, False]
    """
    short_losses, long_losses = np.asarray(short), np.asarray(long)
    return (short_losses - long_losses > MIN_DIFFERENCE) & (-long_losses > MIN_LIKELIHOOD)


def key_windows(
    samples: Sequence[Sample], evaluator_samples: Sequence[Sample], contrast: Contrast
) -> Iterator[Sample]:
    """The windows that score key tokens of the evaluator, each reduced to these tokens."""
    short, long = (
        {
            _block(sample): sample["token_losses"]
            for sample in evaluator_samples
            if "token_losses" in sample and sample["length"] == length
        }
        for length in (contrast.short, contrast.long)
    )
    chosen = {block: are_key_tokens(short[block], long[block]) for block in short if block in long}
    for sample in samples:
        if "token_losses" in sample and (mask := chosen.get(_block(sample))) is not None:
            losses = np.asarray(sample["token_losses"])[mask]
            if len(losses):
                yield {**sample, "scored": len(losses), "nll": float(losses.sum())}


def _block(sample: Sample) -> tuple[str, str, int]:
    """The tokens that a window of the mode same scores; they are the same at every length."""
    return sample["task"], sample["document"], sample["end"]
