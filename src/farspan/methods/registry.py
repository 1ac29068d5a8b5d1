"""The methods of `farspan extend`: which there are, which settings each uses, and fitting them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention import seam
from farspan.attention.layout import LENGTH_DEPENDENT
from farspan.attention.layout_change import set_layout
from farspan.attention.model_facts import default_scaled_layers, most_heads
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import Layer, probe
from farspan.checks import check_least
from farspan.device_map import is_placed
from farspan.errors import FarspanError, suggest
from farspan.loading import is_quantized
from farspan.methods.continued import continue_training
from farspan.methods.drope import drope
from farspan.methods.headscale import SearchConfig, headlog, headscale
from farspan.methods.job import FitJob, loss_by_position, lowest_loss
from farspan.methods.layer_costs import retrieval_loss
from farspan.methods.rope import ROPE_SCALINGS, existing_rope_scaling, fit_rope, rope_override
from farspan.methods.schedules import SCHEDULES, fit_schedule
from farspan.methods.swan import DistillPlan, SwanConfig, check_layers, swan
from farspan.methods.tuning import BATCH, FAIR_STEPS, RAW_STEPS, TuningConfig, weights_override
from farspan.methods.uniform import uniform
from farspan.recipe import apply_overrides, load_recipe

TRAINED_METHODS = {"drope", "swan", "continue"}  # that train weights, whatever `tune` is
SWAN_FACTOR = 4  # auto tries swan for targets beyond this multiple of the train length
MAX_LOST = 0.1  # nats a repeated token that auto lets swan lose inside the train length
RECIPE_DIR = Path(__file__).parent.parent / "assets" / "recipes" / "extend"
TUNING_STEPS = {"": None, "fair": FAIR_STEPS, "raw": RAW_STEPS}


@dataclass(frozen=True)
class ExtendConfig:
    """The recipe of `farspan extend`."""

    search: SearchConfig = field(default_factory=SearchConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    swan: SwanConfig = field(default_factory=SwanConfig)
    tune: str = ""  # rotary methods: "fair" or "raw" tunes all weights, 200 or 1000 steps
    fitted: bool = True  # schedules: fit their slope, or take it from their formula
    search_windows: int = 0  # at most; 0: as many as a search reads
    packed: bool = True  # windows tile the documents that are shorter than a search window
    choose_windows: int = 8
    report_windows: int = 8
    passkeys: int = 2  # keys at each of ten depths; 0 measures no passkeys
    seed: int = 0

    def __post_init__(self):
        if self.tune not in TUNING_STEPS:
            raise FarspanError(
                f"tune is {self.tune!r}; choose fair (200 steps) or raw (1000 steps), or remove it"
            )
        check_least(self, 0, "search_windows", "passkeys")
        check_least(self, 1, "choose_windows", "report_windows")
        if not 0 <= self.seed < 2**20:
            raise FarspanError(f"seed is {self.seed}; choose it from 0 to {2**20 - 1}")


def read_extend_config(
    recipe: str | Path | ExtendConfig | None = None, overrides: Sequence[str] = ()
) -> ExtendConfig:
    """A recipe by name, file or object, with `key=value` overrides.

    >>> read_extend_config(overrides=["search.steps=50"]).search.steps
    50
    """
    if isinstance(recipe, ExtendConfig):
        return apply_overrides(recipe, list(overrides)) if overrides else recipe
    return load_recipe(
        ExtendConfig, str(recipe or "default"), list(overrides), recipe_dir=RECIPE_DIR
    )


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


def parse_methods(method: str) -> list[str]:
    """`yarn+headscale` -> ["yarn", "headscale"], checked."""
    names = method.split("+")
    if "auto" in names and len(names) > 1:
        raise FarspanError(
            f"{method} combines auto with other methods; use auto alone, or name the methods"
        )
    for name in names:
        if name not in METHODS and name != "auto":
            raise FarspanError(f"method {name!r} is unknown; {suggest(name, [*METHODS, 'auto'])}")
    check_combination(method)
    return names


def check_combination(method: str) -> None:
    """Refuse known methods that cannot follow each other."""
    names = method.split("+")
    repeated = next((name for name in names if names.count(name) > 1), "")
    if repeated:
        raise FarspanError(
            f"{method} has {repeated} {names.count(repeated)} times, and only one of them would "
            f"take effect; write {repeated} once"
        )
    rotary = [name for name in names if name in ROPE_METHODS]
    if len(rotary) > 1:
        raise FarspanError(
            f"{method} sets rotation {len(rotary)} times, and only {rotary[-1]} would take effect; "
            f"choose one of {', '.join(rotary)}"
        )
    if "swan" in names and rotary:
        raise FarspanError(
            f"{method} sets rotation twice: swan itself sets the rotation and the window of every "
            f"layer, so {rotary[0]} gains nothing; choose one of them"
        )
    scaling = [name for name in names if name in SCALE_METHODS]
    if len(scaling) > 1 or (scaling and names[-1] not in SCALE_METHODS):
        raise FarspanError(
            f"{method} scales attention twice or too early; write the rotary method first, then "
            "one that scales"
        )


def check_start(source: str | Path, patch: Patch, names: Sequence[str]) -> None:
    """Refuse methods that cannot be fitted on a model with this patch."""
    other = next((name for name in names if name not in {*SCALE_METHODS, "auto"}), None)
    if other is not None:
        raise FarspanError(
            f"{source} is a patch, and only scales can be fitted on one, not {other}; use "
            "headscale or headlog, or extend its base model (methods can be joined with +)"
        )
    if patch.scales is not None and not SEARCHES & set(names):
        raise FarspanError(
            f"{source} is a patch with scales, which {'+'.join(names)} would replace; use "
            "headscale or headlog, which start from them, or extend its base model"
        )


def check_unused_settings(
    names: Sequence[str], config: ExtendConfig, default: ExtendConfig | None = None
) -> None:
    """Refuse a setting that differs from the default and that none of the methods uses."""
    method = "+".join(names)
    for key, value in _changed_settings(config, default or ExtendConfig()):
        part = key.partition(".")[0]
        setting = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        users = methods_using(key, names)
        if not users:
            others = ", ".join(methods_using(key, [*METHOD_SETTINGS]))
            raise FarspanError(
                f"{method} does not use {setting}; remove it, or choose a method that does: "
                f"{others}"
            )
        if part == "tuning" and not config.tune and not TRAINED_METHODS & set(users):
            raise FarspanError(
                f"{method} tunes no weights, so it does not use {setting}; add tune=fair, or "
                "remove it"
            )


def check_trains_no_weights(
    names: Sequence[str], config: ExtendConfig, problem: str, way_out: str
) -> None:
    """Refuse methods that update weights, because of a problem with these."""
    trained = TRAINED_METHODS & set(names)
    if trained or config.tune:
        method = min(trained) if trained else f"tune={config.tune}"
        raise FarspanError(
            f"{method} trains weights, which {problem}; {way_out}, or choose a method that trains "
            "none, as headscale or yarn"
        )


def methods_using(key: str, names: Sequence[str]) -> list[str]:
    """Those of the methods that use a setting."""
    part = key.partition(".")[0]
    users = [name for name in names if part in METHOD_SETTINGS[name]]
    return [name for name in users if name in SETTING_USERS.get(key, users)]


def _changed_settings(config: ExtendConfig, default: ExtendConfig) -> Iterator[tuple[str, Any]]:
    """The method-specific settings that differ from the default, by dotted key."""
    values, defaults = asdict(config), asdict(default)
    for part in ("tune", "fitted"):
        if values[part] != defaults[part]:
            yield part, values[part]
    for part in ("search", "tuning", "swan"):
        for key, value in values[part].items():
            if value != defaults[part][key]:
                yield f"{part}.{key}", value


def check_compatible(
    names: list[str],
    layers: Sequence[Layer],
    config: PreTrainedConfig,
    source: str,
    extend: ExtendConfig,
) -> tuple[str, ...]:
    """Refuse methods that do not apply to this model; return notes about unusual choices."""
    positions = {layer.position for layer in layers}
    replacing = set(names) & set(ROPE_SCALINGS) - {"ntk"}
    if (scaling := existing_rope_scaling(config)) is not None and replacing:
        raise FarspanError(
            f"the rotation of {source} is already scaled ({scaling}), and {min(replacing)} would "
            "replace that; use ntk, which keeps it"
        )
    for name in names:
        if name in ROPE_METHODS and "rope" not in positions:
            raise FarspanError(
                f"{name} changes rotation, and {source} has no rotary layer (positions: "
                f"{', '.join(sorted(positions))}); use uniform, headscale or headlog"
            )
    if "swan" in names:
        check_layers(layers, source, extend.swan, scaling)
    scales_only = set(names) <= set(SCALE_METHODS)
    if scales_only and "rope" in positions and "none" not in positions:
        rotary = "yarn" if scaling is None else "ntk"
        return (
            f"all layers of this model are rotary, and scales alone gain little there; try {rotary}"
            f" or {rotary}+headscale",
        )
    return ()


def unused_settings(
    names: Sequence[str],
    layers: Sequence[Layer],
    model: PreTrainedModel,
    job: FitJob,
    extend: ExtendConfig,
    default: ExtendConfig,
) -> Iterator[str]:
    """Notes on settings that auto, which accepts every setting, does not use on this model."""
    if list(names) != ["auto"]:
        return
    candidates = candidate_methods(names, layers, model, job)
    used = [name for candidate in candidates for name in candidate.split("+")]
    for key, _ in _changed_settings(extend, default):
        if not methods_using(key, used):
            choices = ", ".join(candidates)
            yield f"{key} was not used: on this model auto chooses among {choices}"


def candidate_methods(
    names: Sequence[str], layers: Sequence[Layer], model: PreTrainedModel, job: FitJob
) -> list[str]:
    """The methods themselves, or those among which auto chooses."""
    if list(names) != ["auto"]:
        return list(names)
    if job.start_name:  # a patch
        constant = job.start is None or job.start.constant
        # headlog first: it refuses some scales, which should not take a search to learn.
        return ["headlog", "headscale"] if constant else ["headlog"]
    rotary = [layer for layer in layers if layer.position == "rope"]
    scaling = existing_rope_scaling(model.config)
    scaled = scaling is not None
    candidates = ["uniform", "headscale", "headlog"]
    if len(rotary) == len(layers):
        candidates = ["ntk", "uniform"] if scaled else ["ntk", "yarn"]
    elif "+" in (first := recommended_method(layers, scaled) or ""):  # SmolLM3
        candidates = [first.partition("+")[0], "headlog", first]
    far = job.target > SWAN_FACTOR * job.train_length
    # elsewhere training takes hours, or weights do not fit or are no numbers
    on_gpu = model.device.type == "cuda" and not is_placed(model) and not is_quantized(model)
    plain = all(layer.position in ("rope", "none") and not layer.window for layer in layers)
    plain = plain and scaling not in LENGTH_DEPENDENT
    return [*candidates, "swan"] if far and on_gpu and plain else candidates


def recommended_method(layers: Sequence[Any], scaled: bool) -> str | None:
    """The method to try first, as the table of docs/extend.md has it; None if there is none.

    layers: anything with a position and a window.
    scaled: whether the config scales the rotation already.
    """
    positions = {layer.position for layer in layers}
    if not positions or not positions <= {"rope", "none"}:
        return None
    rescaling = "ntk" if scaled else "yarn"
    if positions == {"rope"}:
        return rescaling
    if positions == {"none"}:
        return "headscale"
    windowed = all(layer.window for layer in layers if layer.position == "rope")
    return "headlog" if windowed else f"{rescaling}+headscale"


def search_windows(
    names: Sequence[str], config: ExtendConfig, to: int, train_length: int
) -> tuple[int, int]:
    """The length and the number of the search windows that these methods use.

    Only a search for scales reads beyond the target. Distillation alone reads short windows.
    """
    length = round(config.search.beyond * to) if SEARCHES & set(names) else to
    count = config.search_windows or _windows_read(names, config)
    if "swan" not in names:
        return length, count
    plan = DistillPlan.make(config.swan, config.tuning, train_length)
    long = config.swan.long_plan(train_length, to)
    tokens = plan.tokens + (long.tokens if long else 0)
    if list(names) == ["swan"]:
        length = long.length if long else plan.length
    return length, config.search_windows or max(count, math.ceil(tokens / length))


def _windows_read(names: Sequence[str], config: ExtendConfig) -> int:
    """The most windows that one of the methods reads: no window twice, if the text has them."""
    counts = [1]
    if SEARCHES & set(names):
        counts.append(config.search.most_windows)
    if config.tune or {"drope", "continue"} & set(names):
        steps = config.tuning.steps or TUNING_STEPS[config.tune] or FAIR_STEPS
        counts.append(steps * (config.tuning.batch or BATCH))
    return max(counts)


def make_fit_job(
    model: PreTrainedModel,
    layers: Sequence[Layer],
    to: int,
    train_length: int,
    search: Tensor,
    choose: Tensor,
    **settings: Any,
) -> FitJob:
    """The job of extending this model, whose probed layers are `layers`."""
    return FitJob(
        to,
        train_length,
        search,
        choose,
        default_scaled_layers(layers),
        most_heads(layers),
        fingerprint(model),
        has_nope(layers),
        **settings,
    )


def start_from(patch: Patch, job: FitJob, source: str) -> FitJob:
    """The job of extending a patched model, to which all of the patch but its scales is applied.

    A search starts from these scales."""
    name = f"{source} ({patch.method} for {patch.target} tokens)"
    if patch.scales is not None:
        job = replace(job, layers=patch.scales.layers)
    elif patch.layout is not None:
        job = replace(job, layers=patch.layout.global_layers)
    return replace(job, model=patch.model, start=patch.scales, start_name=name)


def joint_settings(names: Sequence[str], config: ExtendConfig) -> ExtendConfig:
    """The settings of methods that are fitted one after the other."""
    if set(names) & set(SCALE_METHODS):  # it sharpens the global layers instead of swan
        return replace(config, swan=replace(config.swan, sharpen=False))
    return config


def fit_methods(
    model: PreTrainedModel,
    layers: Sequence[Layer],
    job: FitJob,
    config: ExtendConfig,
    names: list[str],
    start: Patch | None = None,
) -> tuple[Patch, tuple[str, ...]]:
    """Fit one method after the other, each on the model that those before it patched.

    start: what the model is patched with already, without its scales.
    The model ends up patched. Returns the combined patch, and notes.
    """
    if names == ["auto"]:
        best, notes = _fit_best(model, layers, job, config)
        return _apply_after(model, start, best), notes
    config = joint_settings(names, config)
    combined = start
    for name in names:
        part = METHODS[name](model, job, config)
        combined = _apply_after(model, combined, part)
        if part.layout is not None or part.rope:  # layers that lost their rotation get scales too
            probed = probe(model)
            scaled = part.layout.global_layers if part.layout else default_scaled_layers(probed)
            job = replace(job, layers=scaled, has_nope=has_nope(probed))
    assert combined is not None
    return combined, ()


def _apply_after(model: PreTrainedModel, earlier: Patch | None, part: Patch) -> Patch:
    """Apply a patch to the model that an earlier one patched; returns both as one."""
    if earlier is None:
        part.apply(model)
        return part
    # It was fitted on a model whose weights are no longer those of the base.
    replace(part, model=fingerprint(model)).apply(model)
    return earlier.then(part)


def has_nope(layers: Sequence[Layer]) -> bool:
    return any(layer.position == "none" for layer in layers)


def _fit_best(
    model: PreTrainedModel, layers: Sequence[Layer], job: FitJob, config: ExtendConfig
) -> tuple[Patch, tuple[str, ...]]:
    """Of the candidates, the method with the lowest loss on the choose split, not yet applied."""
    patches: dict[str, Patch] = {}
    details: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for name in candidate_methods(["auto"], layers, model, job):
        details[name] = {}
        own_job = replace(job, details=details[name])
        try:
            patches[name] = _fit_in_turn(model, own_job, config, name.split("+"))
        except FarspanError as error:
            if name != "swan" or error.exit_code != FarspanError.exit_code:
                raise
            notes.append(f"auto left out swan, which failed: {error}")
        if name == "uniform" and config.search.steps and not config.search.init:
            # The searches of Wang 2024 start from it.
            scales = patches[name].scales
            assert scales is not None
            value = float(scales.base[0, 0])
            start = max(1.0, value) if config.search.constraint else value
            config = replace(config, search=replace(config.search, init=start))
    if "swan" in patches and (lost := _lost_retrieval(model, patches["swan"], job)) > MAX_LOST:
        notes.append(
            f"auto rejected swan: inside the train length its loss on repeated tokens is "
            f"{lost:.3f} nats higher than that of the base, more than {MAX_LOST}; try more "
            "swan.tokens"
        )
        del patches["swan"]
    advance, losses = job.progress("compare", len(patches)), {}
    for name, patch in patches.items():
        losses[name] = _patched_loss(model, patch, job.choose)
        advance(1, f"{name}: loss {losses[name]:.4f}")
    best = lowest_loss(losses)
    others = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != best)
    job.details.update(details[best])
    compared = (
        f", against {others}" if others else ", the only method that starts from growing scales"
    )
    notes.append(f"auto chose {best}: loss {losses[best]:.4f} on the choose split{compared}")
    return patches[best], tuple(notes)


def _fit_in_turn(
    model: PreTrainedModel, job: FitJob, config: ExtendConfig, names: Sequence[str]
) -> Patch:
    """Fit each method on the model that those before it patched; the model is left as it was."""
    patch = METHODS[names[0]](model, job, config)
    for name in names[1:]:
        with _patched(model, patch):
            part = METHODS[name](model, job, config)
        patch = patch.then(part)
    return patch


def _patched_loss(model: PreTrainedModel, patch: Patch, windows: Tensor) -> float:
    """The loss with a patch; the model is left as it was."""
    with _patched(model, patch):
        return float(loss_by_position(model, windows).mean())


def _lost_retrieval(model: PreTrainedModel, patch: Patch, job: FitJob) -> float:
    """How much worse the patched model predicts what stands twice inside the train length."""
    before = retrieval_loss(model, job)
    with _patched(model, patch):
        return retrieval_loss(model, job) - before


@contextmanager
def _patched(model: PreTrainedModel, patch: Patch) -> Iterator[None]:
    """Run a block with all parts of a patch."""
    with ExitStack() as stack:
        if patch.rope is not None:
            stack.enter_context(rope_override(model, dict(patch.rope)))
        if patch.layout is not None:
            set_layout(model, patch.layout)
            stack.callback(seam.remove_layout, model)
        stack.enter_context(seam.scaled(model, patch.scales))
        stack.enter_context(weights_override(model, patch.weights or {}))
        yield
