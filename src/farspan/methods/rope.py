"""Paper A's baselines for rotary models: PI, NTK, dynamic NTK and YaRN, zero-shot by a small grid, or tuned."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention.patch import Patch, set_rope
from farspan.errors import FarspanError
from farspan.methods.job import Job, least, loss_by_position
from farspan.methods.tuning import Tuning, tune

Rope = dict[str, Any]


def _pi(job: Job, stretch: float, theta: float, width: int) -> Rope:
    return {"rope_type": "linear", "factor": stretch}


def _ntk(job: Job, stretch: float, theta: float, width: int) -> Rope:
    return {"rope_theta": theta * stretch ** (width / (width - 2))}


def _dynamic_ntk(job: Job, stretch: float, theta: float, width: int) -> Rope:
    return {"rope_type": "dynamic", "factor": stretch, "original_max_position_embeddings": job.train_length}


def _yarn(job: Job, stretch: float, theta: float, width: int) -> Rope:
    return {
        "rope_type": "yarn",
        "factor": stretch,
        "original_max_position_embeddings": job.train_length,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 0.1 * math.log(stretch) + 1,
    }


# name -> rope parameters for a stretch of positions
ROPES: dict[str, Callable[[Job, float, float, int], Rope]] = {
    "pi": _pi,
    "ntk": _ntk,
    "dynamic-ntk": _dynamic_ntk,
    "yarn": _yarn,
}
# Times what the target asks for. Less of it has the lower mean loss at times, and fails before the target is reached.
STRETCHES = (1.0, 1.25, 1.5, 2.0, 3.0)


def roped(model: PreTrainedModel, job: Job, method: str, tuning: Tuning | None) -> Patch:
    """The method's rope parameters with the stretch that the second split likes best; or, tuned, with the one that the
    target asks for, as in the paper, and weights that have learnt it."""
    if tuning is not None:
        rope = _rope(model, job, method, job.target / job.train_length)
        with roped_as(model, rope):
            weights = tune(model, job, f"{method}-{tuning.steps}", tuning)
        return job.patch(f"{method}-tuned", rope=rope, weights=weights)
    advance = job.progress(method, 0)
    losses = {}
    for times in STRETCHES:
        stretch = times * job.target / job.train_length
        with roped_as(model, _rope(model, job, method, stretch)):
            losses[stretch] = float(loss_by_position(model, job.choose).mean())
        advance(1, f"×{stretch:g}: loss {losses[stretch]:.4f}")
    return job.patch(method, rope=_rope(model, job, method, least(losses)))


def _rope(model: PreTrainedModel, job: Job, method: str, stretch: float) -> Rope:
    """The model's own parameters with those of the method, which for a stretch of 1 change no angle."""
    own = _global(model.config.get_text_config().rope_parameters)
    if "rope_theta" not in own:
        raise FarspanError(
            f"only layers with windows rotate in {type(model).__name__}, and {method} would change nothing beyond; "
            "use uniform or headscale"
        )
    return {**own, **ROPES[method](job, stretch, float(own["rope_theta"]), _turned(model))}


def stretched(config: PreTrainedConfig) -> str | None:
    """How a model's rotation is stretched already: `llama3`, `yarn` and the like. A base frequency can be raised
    under any of them; the other methods would put themselves in its place."""
    kind = _global(getattr(config.get_text_config(), "rope_parameters", None) or {}).get("rope_type", "default")
    return None if kind in ("default", "none") else kind


def _turned(model: PreTrainedModel) -> int:
    """How many numbers of a head are turned, where the whole context is seen."""
    buffers = dict(model.named_buffers())
    found = [name for name in buffers if name.endswith("inv_freq") and "original" not in name]
    return 2 * len(buffers[next((name for name in found if name.endswith("full_attention_inv_freq")), found[0])])


def _global(rope: dict[str, Any]) -> dict[str, Any]:
    return rope.get("full_attention") or rope


@contextmanager
def roped_as(model: PreTrainedModel, rope: Rope) -> Iterator[None]:
    """The model with other rope parameters, for a block."""
    before = copy.deepcopy(model.config.get_text_config().rope_parameters)
    set_rope(model, rope)
    try:
        yield
    finally:
        set_rope(model, _global(before))
        model.config.get_text_config().rope_parameters = before
