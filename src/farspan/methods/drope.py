"""DroPE: turn a RoPE model into one without position encoding.

Rotation is removed, and the weights are recalibrated at the original length for a budget of
tokens. Any method for models without positions can follow.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from farspan.attention.patch import Patch
from farspan.methods.job import FitJob
from farspan.methods.rope import rope_override
from farspan.methods.tuning import TuningConfig, tune_weights

NO_ROPE = {"rope_type": "none"}
LEARNING_RATE = 1e-3  # all heads must learn other scores: at 1e-4 a 29M model hardly does


def drope(model: PreTrainedModel, job: FitJob, tuning: TuningConfig) -> Patch:
    """Drop RoPE and recalibrate the weights on windows of the train length."""
    short = job.with_windows(job.train_length)
    tuning = replace(tuning, lr=tuning.lr or LEARNING_RATE)
    with rope_override(model, NO_ROPE):
        weights = tune_weights(model, short, "drope", tuning)
    return job.patch("drope", rope=NO_ROPE, weights=weights)
