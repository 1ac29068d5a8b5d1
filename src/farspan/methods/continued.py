"""Continued training: the control for every method that trains weights.

Nothing but the weights changes. On windows of the target length it is the common way to extend a
model; on windows of the train length it shows what more training on the same text gives.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from farspan.attention.patch import Patch
from farspan.methods.job import FitJob
from farspan.methods.tuning import TuningConfig, tune_weights


def continue_training(model: PreTrainedModel, job: FitJob, tuning: TuningConfig) -> Patch:
    """Train on the next token of search windows, of `tuning.length` tokens if that is set."""
    job = job.with_windows(tuning.length or job.target)
    return job.patch("continue", weights=tune_weights(model, job, "continue", tuning))
