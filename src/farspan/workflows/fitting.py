"""Which methods there are, what of a recipe each uses, and fitting them in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import Layer, probe
from farspan.errors import FarspanError, nearest
from farspan.methods.drope import drope
from farspan.methods.headscale import Search, headlog, headscale
from farspan.methods.job import Job, least, loss_by_position, scaled_loss
from farspan.methods.rope import ROPES, roped, roped_as, stretched
from farspan.methods.schedules import SCHEDULES, scheduled
from farspan.methods.tuning import FAIR, RAW, Tuning, weighted_as
from farspan.methods.uniform import uniform
from farspan.recipe import load_recipe
from farspan.workflows.inspection import scaled_by_default

BEYOND = 1.125  # the search reads a little beyond the target, as paper A's 18K for 16K
SHELF = Path(__file__).parent.parent / "assets" / "recipes" / "extend"
TUNINGS = {"": None, "fair": FAIR, "raw": RAW}  # steps


@dataclass(frozen=True)
class Extension:
    """The recipe of `farspan extend`: how to search, and on how much text."""

    search: Search = field(default_factory=Search)
    tuning: Tuning = field(default_factory=Tuning)
    tune: str = ""  # rotary methods: "fair" or "raw" tunes all weights for 200 or 1000 steps, or for tuning.steps
    fitted: bool = True  # schedules: with their number fitted, or as their formula has it
    search_windows: int = 256  # at most
    choose_windows: int = 8
    report_windows: int = 8
    passkeys: int = 2  # keys at each of ten depths; 0 leaves passkeys out
    seed: int = 0

    def __post_init__(self):
        if self.tune not in TUNINGS:
            raise FarspanError(f"tune is {self.tune!r}; choose fair (200 steps), raw (1000) or leave it away")
        for name in ("search_windows", "choose_windows", "report_windows"):
            if getattr(self, name) < 1:
                raise FarspanError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.passkeys < 0:
            raise FarspanError(f"passkeys is {self.passkeys}; give 0 or more")
        if not 0 <= self.seed < 2**20:
            raise FarspanError(f"seed is {self.seed}; choose it from 0 to {2**20 - 1}")


def read_extension(source: str | None, changes: Sequence[str]) -> Extension:
    """The recipe of an extension, from a file where one is given, with `key=value` changes."""
    return load_recipe(Extension, source or "default", changes, shelf=SHELF)


Fit = Callable[[PreTrainedModel, Job, Extension], Patch]


def _rope_fit(name: str) -> Fit:
    return lambda model, job, how: roped(model, job, name, _tuning(how))


def _tuning(how: Extension) -> Tuning | None:
    """How a rotary method is tuned, if it is: for the steps that `tune` stands for, unless tuning.steps says others."""
    steps = TUNINGS[how.tune]
    return None if steps is None else replace(how.tuning, steps=how.tuning.steps or steps)


def _schedule_fit(name: str) -> Fit:
    return lambda model, job, how: scheduled(model, job, name, how.fitted)


SCALED: dict[str, Fit] = {
    "uniform": lambda model, job, how: uniform(model, job),
    "headscale": lambda model, job, how: headscale(model, job, how.search),
    "headlog": lambda model, job, how: headlog(model, job, how.search),
    **{name: _schedule_fit(name) for name in SCHEDULES},
}
ROPED: dict[str, Fit] = {
    **{name: _rope_fit(name) for name in ROPES},
    "drope": lambda model, job, how: drope(model, job, how.tuning),
}
METHODS = {**SCALED, **ROPED}


# What of a recipe only some methods use, and which; windows, passkeys and seed serve all.
USES: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "headscale": ("search",),
    "headlog": ("search",),
    **dict.fromkeys(SCHEDULES, ("fitted",)),
    "piecewise": (),  # no formula gives its number, so that is always fitted
    **dict.fromkeys(ROPES, ("tune", "tuning")),
    "drope": ("tuning",),
    "auto": ("search", "tune", "tuning"),  # which of them, the model tells
}


def method_names(method: str) -> list[str]:
    names = method.split("+")
    if "auto" in names and len(names) > 1:
        raise FarspanError(f"{method}: auto chooses by itself; give it alone, or name the methods to combine")
    for name in names:
        if name not in METHODS and name != "auto":
            raise FarspanError(f"method {name!r} is unknown; {nearest(name, [*METHODS, 'auto'])}")
    check_combination(method)
    return names


def check_combination(method: str) -> None:
    """Refuse known methods that cannot follow each other."""
    names = method.split("+")
    turning = [name for name in names if name in ROPED]
    if len(turning) > 1:
        raise FarspanError(
            f"{method} sets rotation {len(turning)} times, and only {turning[-1]} would be left of it; choose one of "
            f"{', '.join(dict.fromkeys(turning))}"
        )
    if sum(name in SCALED for name in names) > 1 or (set(names) & set(SCALED) and names[-1] not in SCALED):
        raise FarspanError(
            f"{method} scales attention twice or too early; write what rotates first, then one that scales"
        )


def check_used(names: Sequence[str], how: Extension, usual: Extension | None = None) -> None:
    """Refuse a setting that would change nothing: one that is not as usual, and that none of the methods uses."""
    for key, value in _unusual(how, usual or Extension()):
        part, method = key.partition(".")[0], "+".join(names)
        setting = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        users = users_of(key, names)
        if not users:
            others = ", ".join(name for name, parts in USES.items() if part in parts)
            raise FarspanError(
                f"{method} has no use for {setting}; leave it away, or choose a method that has: {others}"
            )
        if part == "tuning" and not how.tune and "drope" not in users:
            raise FarspanError(
                f"{method} tunes nothing, so it has no use for {setting}; add tune=fair, or leave it away"
            )


def users_of(key: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if key.partition(".")[0] in USES[name]]


def _unusual(how: Extension, usual: Extension) -> Iterator[tuple[str, Any]]:
    """What differs, of the settings that only some methods use, by dotted key."""
    mine, theirs = asdict(how), asdict(usual)
    for part in ("tune", "fitted"):
        if mine[part] != theirs[part]:
            yield part, mine[part]
    for part in ("search", "tuning"):
        for key, value in mine[part].items():
            if value != theirs[part][key]:
                yield f"{part}.{key}", value


def suited(names: list[str], layers: Sequence[Layer], config: PreTrainedConfig, source: str) -> tuple[str, ...]:
    """Refuse methods for which this model has not what they work on; what is unusual is said."""
    kinds = {layer.position for layer in layers}
    rotary = "rope" in kinds
    if (kind := stretched(config)) is not None and (replacing := set(names) & set(ROPES) - {"ntk"}):
        raise FarspanError(
            f"the rotation of {source} is stretched already ({kind}), and {min(replacing)} would take the place of "
            "that; use ntk, uniform or headscale"
        )
    for name in names:
        if name in ROPED and not rotary:
            raise FarspanError(
                f"{name} changes rotation, and no layer of {source} rotates (positions: {', '.join(sorted(kinds))}); "
                "use uniform, headscale or headlog"
            )
    if rotary and "none" not in kinds and set(names) & set(SCALED) and not set(names) & set(ROPED):
        return ("all layers of this model rotate, and scales alone do little there; try yarn or yarn+headscale",)
    return ()


def idle(names: Sequence[str], layers: Sequence[Layer], config: PreTrainedConfig, how: Extension) -> Iterator[str]:
    """What auto, which may be given every setting, does not use on this model."""
    candidates = _candidates(layers, config)
    for key, _ in _unusual(how, Extension()) if list(names) == ["auto"] else ():
        if not users_of(key, candidates):
            yield f"{key} did nothing: here auto chooses of {', '.join(candidates)}"


def _candidates(layers: Sequence[Layer], config: PreTrainedConfig) -> list[str]:
    """Of which methods auto chooses."""
    if not all(layer.position == "rope" for layer in layers):
        return ["uniform", "headscale", "headlog"]
    return ["ntk", "yarn"] if stretched(config) is None else ["ntk", "uniform"]


def job_for(model: PreTrainedModel, to: int, length: int, search: Tensor, choose: Tensor, **more: Any) -> Job:
    """The job of extending this model, the layers that would be scaled found by running it."""
    layers = probe(model)
    return Job(to, length, search, choose, scaled_by_default(layers), layers[0].heads, fingerprint(model), **more)


def fit_in_turn(model: PreTrainedModel, job: Job, how: Extension, names: list[str]) -> tuple[Patch, tuple[str, ...]]:
    """The patch of one method after the other, each fitted on what those before it made; the model ends up patched."""
    if names == ["auto"]:
        return _best(model, job, how)
    whole: Patch | None = None
    for name in names:
        part = METHODS[name](model, job, how)
        part.apply(model) if whole is None else _apply_on_top(part, model)
        whole = part if whole is None else whole.then(part)
        job = replace(job, layers=scaled_by_default(probe(model)))  # dropped rotation leaves more of them free
    assert whole is not None
    return whole, ()


def _apply_on_top(part: Patch, model: PreTrainedModel) -> None:
    """A later patch was fitted on this very model, whose weights are no longer those of the base."""
    replace(part, model=fingerprint(model)).apply(model)


def _best(model: PreTrainedModel, job: Job, how: Extension) -> tuple[Patch, tuple[str, ...]]:
    """Of the methods that suit the model, the one that the second split likes best."""
    patches: dict[str, Patch] = {}
    for name in _candidates(probe(model), model.config):
        patches[name] = METHODS[name](model, job, how)
        if name == "uniform" and not how.search.init:  # where the others start, and need not look for again
            found = patches[name].scales
            assert found is not None
            start = float(found.base[0, 0])
            how = replace(how, search=replace(how.search, init=max(1.0, start) if how.search.constraint else start))
    losses = {name: _loss_with(model, patch, job.choose) for name, patch in patches.items()}
    best = least(losses)
    others = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != best)
    patches[best].apply(model)
    return patches[best], (f"auto chose {best}: loss {losses[best]:.4f} on the second split, against {others}",)


def _loss_with(model: PreTrainedModel, patch: Patch, windows: Tensor) -> float:
    """Of the patch as it would be applied, on a model that is left as it was."""
    if patch.scales is not None:
        return scaled_loss(model, windows, patch.scales)
    assert patch.rope is not None
    with roped_as(model, dict(patch.rope)), weighted_as(model, patch.weights or {}):
        return float(loss_by_position(model, windows).mean())
