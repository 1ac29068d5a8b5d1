"""The methods of `farspan extend`: which there are, and which settings each uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from farspan.attention.patch import Patch
from farspan.methods.continued import continue_training
from farspan.methods.drope import drope
from farspan.methods.extend_config import TUNING_STEPS, ExtendConfig
from farspan.methods.headscale import headlog, headscale
from farspan.methods.job import FitJob
from farspan.methods.rope import ROPE_SCALINGS, fit_rope
from farspan.methods.schedules import SCHEDULES, fit_schedule
from farspan.methods.swan import swan
from farspan.methods.tuning import TuningConfig
from farspan.methods.uniform import uniform

TRAINED_METHODS = {"drope", "swan", "continue"}  # that train weights, whatever `tune` is
Fit = Callable[[PreTrainedModel, FitJob, ExtendConfig], Patch]


def _rope_fit(name: str) -> Fit:
    return lambda model, job, config: fit_rope(model, job, name, _rope_tuning(config))


def _rope_tuning(config: ExtendConfig) -> TuningConfig | None:
    """The tuning of a rotary method; tuning.steps overrides the steps that `tune` stands for."""
    steps = TUNING_STEPS[config.tune]
    return None if steps is None else replace(config.tuning, steps=config.tuning.steps or steps)


def _schedule_fit(name: str) -> Fit:
    return lambda model, job, config: fit_schedule(model, job, name, config.fitted)


SCALE_METHODS: dict[str, Fit] = {
    "uniform": lambda model, job, config: uniform(model, job),
    "headscale": lambda model, job, config: headscale(model, job, config.search),
    "headlog": lambda model, job, config: headlog(model, job, config.search),
    **{name: _schedule_fit(name) for name in SCHEDULES},
}
ROPE_METHODS: dict[str, Fit] = {
    **{name: _rope_fit(name) for name in ROPE_SCALINGS},
    "drope": lambda model, job, config: drope(model, job, config.tuning),
}
WEIGHT_METHODS: dict[str, Fit] = {
    "swan": lambda model, job, config: swan(model, job, config.swan, config.tuning),
    "continue": lambda model, job, config: continue_training(model, job, config.tuning),
}
METHODS = {**SCALE_METHODS, **ROPE_METHODS, **WEIGHT_METHODS}
SEARCHES = {"headscale", "headlog", "auto"}  # methods that may search one scale per head

# The parts of ExtendConfig that only some methods use; all use windows, passkeys and seed.
METHOD_SETTINGS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "headscale": ("search",),
    "headlog": ("search",),
    **{name: ("fitted",) if schedule.default_slope else () for name, schedule in SCHEDULES.items()},
    **dict.fromkeys(ROPE_SCALINGS, ("tune", "tuning")),
    "drope": ("tuning",),
    "swan": ("swan", "tuning"),
    "continue": ("tuning",),
    "auto": ("search", "tune", "tuning", "swan"),  # which of them depends on the model
}
# Settings that fewer methods use than their part.
SETTING_USERS = {"search.shared": ("headlog", "auto"), "tuning.length": ("continue",)}


def methods_using(key: str, names: Sequence[str]) -> list[str]:
    """Those of the methods that use a setting."""
    part = key.partition(".")[0]
    users = [name for name in names if part in METHOD_SETTINGS[name]]
    return [name for name in users if name in SETTING_USERS.get(key, users)]
