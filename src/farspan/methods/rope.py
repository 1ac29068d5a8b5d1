"""The RoPE baselines of Wang 2024: PI, NTK, dynamic NTK and YaRN, zero-shot or tuned."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention.patch import Patch
from farspan.attention.rope import set_rope
from farspan.errors import FarspanError
from farspan.methods.job import FitJob, loss_by_position, lowest_loss
from farspan.methods.tuning import TuningConfig, tune_weights

Rope = dict[str, Any]


def _pi(job: FitJob, factor: float, theta: float, width: int) -> Rope:
    return {"rope_type": "linear", "factor": factor}


def _ntk(job: FitJob, factor: float, theta: float, width: int) -> Rope:
    if width <= 2:  # the one frequency of such a head does not depend on the base
        raise FarspanError(
            f"ntk changes the base of rotation, and heads that rotate {width} dimensions do not "
            "depend on it; use pi, or swan"
        )
    return {"rope_theta": theta * factor ** (width / (width - 2))}


def _dynamic_ntk(job: FitJob, factor: float, theta: float, width: int) -> Rope:
    return {
        "rope_type": "dynamic",
        "factor": factor,
        "original_max_position_embeddings": job.train_length,
    }


def _yarn(job: FitJob, factor: float, theta: float, width: int) -> Rope:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": job.train_length,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 0.1 * math.log(factor) + 1,
    }


# method -> the rope parameters that extend positions by a factor
ROPE_SCALINGS: dict[str, Callable[[FitJob, float, float, int], Rope]] = {
    "pi": _pi,
    "ntk": _ntk,
    "dynamic-ntk": _dynamic_ntk,
    "yarn": _yarn,
}
# Multiples of the factor that reaches the target. Smaller ones can have a lower mean loss, but they
# fail before the target.
FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)


def _reaching_factor(method: str, job: FitJob) -> float:
    """The smallest factor that reaches the target.

    Dynamic NTK grows with the text: with a factor of 1 it is, at any length, NTK for that length.
    """
    return 1.0 if method == "dynamic-ntk" else job.target / job.train_length


def fit_rope(
    model: PreTrainedModel, job: FitJob, method: str, tuning: TuningConfig | None
) -> Patch:
    """The method's rope parameters, with the factor of the lowest loss on the choose split.

    With `tuning`, as in Wang 2024: the smallest factor that reaches the target, and weights tuned
    with it. The windows end at the target: rotation is not scaled for more.
    """
    smallest = _reaching_factor(method, job)
    if tuning is not None:
        rope = _rope_parameters(model, job, method, smallest)
        with rope_override(model, rope):
            windows = job.with_windows(job.target)
            weights = tune_weights(model, windows, f"{method}-{tuning.steps}", tuning)
        return job.patch(f"{method}-tuned", rope=rope, weights=weights)
    advance = job.progress(method, 0)
    losses = {}
    for multiple in FACTORS:
        factor = multiple * smallest
        with rope_override(model, _rope_parameters(model, job, method, factor)):
            losses[factor] = float(loss_by_position(model, job.choose).mean())
        advance(1, f"×{factor:g}: loss {losses[factor]:.4f}")
    return job.patch(method, rope=_rope_parameters(model, job, method, lowest_loss(losses)))


def _rope_parameters(model: PreTrainedModel, job: FitJob, method: str, factor: float) -> Rope:
    """The model's rope parameters updated by a method; a factor of 1 changes no angle."""
    current = _full_attention_rope(model.config.get_text_config().rope_parameters)
    if "rope_theta" not in current:
        raise FarspanError(
            f"only sliding-window layers of {type(model).__name__} use RoPE, so {method} would not "
            "extend its context; use uniform or headscale"
        )
    theta = float(current["rope_theta"])
    return {**current, **ROPE_SCALINGS[method](job, factor, theta, _rotary_width(model))}


def existing_rope_scaling(config: PreTrainedConfig) -> str | None:
    """The RoPE scaling that a model already has, such as `llama3` or `yarn`.

    NTK can raise the base frequency under any of them; the other methods would replace it.
    """
    rope = _full_attention_rope(getattr(config.get_text_config(), "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    return None if kind in ("default", "none") else kind


def _rotary_width(model: PreTrainedModel) -> int:
    """How many dimensions of a head RoPE rotates in layers with full attention."""
    buffers = dict(model.named_buffers())
    names = [name for name in buffers if name.endswith("inv_freq") and "original" not in name]
    full = (name for name in names if name.endswith("full_attention_inv_freq"))
    return 2 * len(buffers[next(full, names[0])])


def _full_attention_rope(rope: dict[str, Any]) -> dict[str, Any]:
    return rope.get("full_attention") or rope


@contextmanager
def rope_override(model: PreTrainedModel, rope: Rope) -> Iterator[None]:
    """Run a block with other rope parameters."""
    before = copy.deepcopy(model.config.get_text_config().rope_parameters)
    set_rope(model, rope)
    try:
        yield
    finally:
        set_rope(model, _full_attention_rope(before))
        model.config.get_text_config().rope_parameters = before
