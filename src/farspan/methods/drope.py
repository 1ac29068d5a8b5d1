"""DroPE: a rotary model becomes one without positions. Rotation is removed, and the weights are recalibrated at the
original length for a budget of tokens; any method for models without positions can follow."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from farspan.attention.patch import Patch
from farspan.methods.job import Job
from farspan.methods.rope import roped_as
from farspan.methods.tuning import Tuning, tune

NONE = {"rope_type": "none"}


def drope(model: PreTrainedModel, job: Job, tuning: Tuning) -> Patch:
    """Rotation dropped, weights recalibrated on windows of the training length."""
    length = job.train_length
    whole = job.search.shape[1] // length
    short = replace(job, search=job.search[:, : whole * length].reshape(-1, length))
    with roped_as(model, NONE):
        weights = tune(model, short, "drope", tuning)
    return job.patch("drope", rope=NONE, weights=weights)
