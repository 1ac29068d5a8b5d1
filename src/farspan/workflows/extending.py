"""`farspan extend`: fit a method, save what it found, prove on a fresh model that it took effect, and show the gain."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch, fingerprint, forget_lengths
from farspan.attention.probe import Layer, probe
from farspan.data.documents import read_documents
from farspan.data.passkey import Passkeys
from farspan.data.windows import Windows, cut_windows, split_windows
from farspan.diagnosis.curves import check_losses
from farspan.errors import FarspanError, ProofError, nearest
from farspan.evals.passkey import passkey_share
from farspan.files import check_free, new_folder, write_text
from farspan.loading import is_patch, load_for_text
from farspan.memory import out_of_memory
from farspan.methods.drope import drope
from farspan.methods.headscale import Search, headlog, headscale
from farspan.methods.job import Job, least, loss_by_position, scaled_loss
from farspan.methods.rope import ROPES, roped, roped_as, stretched
from farspan.methods.schedules import SCHEDULES, scheduled
from farspan.methods.tuning import FAIR, RAW, Tuning, weighted_as
from farspan.methods.uniform import uniform
from farspan.model.loss import last_logits
from farspan.progress import Progress, silent
from farspan.recipe import load_recipe, to_toml
from farspan.record import write_record
from farspan.report import figures
from farspan.train.loop import alone
from farspan.train.sharding import processes
from farspan.workflows.inspection import longest, scaled_by_default
from farspan.workflows.inspection import train_length as trained_on

BEYOND = 1.125  # the search reads a little beyond the target, as paper A's 18K for 16K
SHELF = Path(__file__).parent.parent / "assets" / "recipes" / "extend"
EXACT_BELOW = 300_000_000  # parameters
PROVEN = 256  # positions at the end of a window, where every method does something
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


@dataclass(frozen=True, eq=False)
class Extended:
    """What came of it."""

    patch: Patch
    folder: Path
    before: dict[str, float]  # loss at positions and passkey shares, by name
    after: dict[str, float]
    curves: dict[str, np.ndarray]  # loss by position before and after
    proof: float  # the largest difference of a logit between the model that was fitted and the one reloaded
    effect: float  # … between the patched model and its base
    notes: tuple[str, ...]


def extend(
    source: str | Path,
    to: int,
    out: str | Path,
    method: str = "auto",
    *,
    data: str | Path | Mapping[str, str | Path] = "python-docs",
    recipe: Extension | None = None,
    train_length: int | None = None,
    position: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Extended:
    """Make a model's context longer: fit `method` for `to` tokens, and write the patch to the folder `out`.

    data: one corpus, of which disjoint parts are searched, chosen by and reported on; or these three by name.
    method: one of METHODS, several joined with +, or auto.

    >>> farspan.extend("nope-twin", to=1024, out="nope-1k", method="headscale")
    """
    out, how, state = Path(out), recipe or Extension(), processes()
    names = _method_names(method)
    check_used(names, how)
    check_free(out)
    if is_patch(source):
        raise FarspanError(f"{source} is a patch already; extend its base model, with both methods joined by +")

    def fresh() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        where = device or state.device
        model, tokenizer = load_for_text(source, position=position, device=where, trust_remote_code=trust_remote_code)
        turned = set(names) <= set(ROPED)  # no scale is searched
        return model if turned else in_exact_numbers(model), tokenizer

    ready = progress("load and read", 2)
    model, tokenizer = fresh()
    ready()
    length = _checked_length(source, to, train_length or trained_on(model.config), longest(model))
    if "dynamic-ntk" in names and length != trained_on(model.config):  # transformers' code reads the config alone
        raise FarspanError(
            f"dynamic-ntk begins where the config of {source} has positions end, at {trained_on(model.config)}, "
            f"whatever --train-length {length} says; leave that away, or choose ntk or yarn"
        )
    layers = probe(model)
    notes = (*suited(names, layers, model.config, str(source)), *_idle(names, layers, model.config, how))
    splits = _splits(data, tokenizer, to, how)
    ready()
    job = job_for(
        model,
        to,
        length,
        splits["search"].ids,
        splits["choose"].ids,
        name=str(source),
        position=position,
        seed=how.seed,
        folder=out.with_name(f".{out.name}.search"),
        progress=progress,
    )
    report = splits["report"].ids
    with _searching(job, how, method):
        before = _measured(model, tokenizer, report, job, how)
        check_losses(model, torch.from_numpy(before[1]), str(source))
        patch, why = fit_in_turn(model, job, how, names)
        patch = _located(patch, source)
        after = _measured(model, tokenizer, report, job, how)
        if not np.isfinite(after[1]).all():
            raise FarspanError(
                f"{source} by {patch.method} has losses that are no numbers; choose another method, or a smaller "
                "learning rate"
            )
        found = Extended(
            patch,
            out,
            before=before[0],
            after=after[0],
            curves={"before": before[1], "after": after[1]},
            proof=math.nan,
            effect=math.nan,
            notes=(*notes, *why, *_worse(before[0], after[0], to)),
        )
        if state.is_main_process:
            with new_folder(out) as new:
                patch.write_into(new)
                write_text(new / "recipe.toml", to_toml(how))
                proof, effect = _prove(new, model, fresh()[0], report[:1])
                found = replace(found, proof=proof, effect=effect)
                _record(new, found, job, how, method, splits, model.device.type)
        state.wait_for_everyone()
    return found


def job_for(model: PreTrainedModel, to: int, length: int, search: Tensor, choose: Tensor, **more: Any) -> Job:
    """The job of extending this model, the layers that would be scaled found by running it."""
    layers = probe(model)
    return Job(to, length, search, choose, scaled_by_default(layers), layers[0].heads, fingerprint(model), **more)


def _located(patch: Patch, source: str | Path) -> Patch:
    """The patch with the whole path of a model on this disk, by which it is found from any folder; a twin or a hub id
    is found by its name."""
    place = str(Path(source).absolute()) if Path(source).exists() else patch.name
    return patch if place == patch.name else replace(patch, name=place, label=patch.name)


def in_exact_numbers(model: PreTrainedModel) -> PreTrainedModel:
    """A model that is not large in float32, whatever its checkpoint says: where scores are large, bf16 drowns the
    gradient of a scale, and so small a model has the memory and the time. Not so on a GPU if its heads share keys: SDPA
    has no kernel for these in float32, and would write out all T² scores."""
    exact = model.dtype == torch.float32 or getattr(model, "is_quantized", False)  # what was quantized is left as it is
    config = model.config.get_text_config()
    heads, keys = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    shared = model.device.type == "cuda" and keys not in (None, heads)
    return model if exact or shared or model.num_parameters() >= EXACT_BELOW else model.float()


@contextmanager
def _searching(job: Job, how: Extension, method: str) -> Iterator[None]:
    """A search that was stopped goes on from its folder; another's is not touched; one that is done, or failed before
    there was anything to go on from, leaves nothing behind."""
    folder = job.folder
    assert folder is not None
    may_change: dict[str, Any] = {"micro_batch": 1, "save_every": 1}
    free = replace(how, search=replace(how.search, **may_change), tuning=replace(how.tuning, **may_change))
    text = hashlib.sha256(job.search.numpy().tobytes() + job.choose.numpy().tobytes()).hexdigest()
    mine = f"# {method} to {job.target} from {job.train_length}, weights {job.model}, text {text}\n{to_toml(free)}"
    file = folder / "claim.toml"  # what sets one search apart from another
    first = processes().is_main_process
    with alone(folder):
        begun = list(folder.glob("*/checkpoints/step-*"))
        if begun and file.exists() and file.read_text(encoding="utf-8") != mine:
            raise FarspanError(
                f"{folder} holds the unfinished search of another extension; finish that one, or remove it"
            )
        if first:
            write_text(file, mine)
        try:
            yield
        except BaseException as error:
            if first and not list(folder.glob("*/checkpoints/step-*")):
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise FarspanError(
                    f"memory does not reach for windows of {job.search.shape[1]} tokens; give the same command with "
                    f"{_smaller(method.split('+'), how)}a shorter target than {job.target}"
                ) from error
            raise
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _smaller(names: Sequence[str], how: Extension) -> str:
    """The settings that would need less memory, of those that the methods use."""
    tunes = how.tune or "drope" in names
    sizes = {"search": how.search.micro_batch, "tuning": how.tuning.micro_batch if tunes else 1}
    return "".join(f"{part}.micro_batch=1, or " for part, size in sizes.items() if size > 1 and _users(part, names))


def read_extension(source: str | None, changes: Sequence[str]) -> Extension:
    """The recipe of an extension, from a file where one is given, with `key=value` changes."""
    return load_recipe(Extension, source or "default", changes, shelf=SHELF)


def _method_names(method: str) -> list[str]:
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
        users = _users(key, names)
        if not users:
            others = ", ".join(name for name, parts in USES.items() if part in parts)
            raise FarspanError(
                f"{method} has no use for {setting}; leave it away, or choose a method that has: {others}"
            )
        if part == "tuning" and not how.tune and "drope" not in users:
            raise FarspanError(
                f"{method} tunes nothing, so it has no use for {setting}; add tune=fair, or leave it away"
            )


def _users(key: str, names: Sequence[str]) -> list[str]:
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


def _checked_length(source: str | Path, to: int, length: int | None, rows: int | None) -> int:
    if length is None:
        raise FarspanError(f"the config of {source} does not tell its training length; give it with --train-length")
    if to <= length:
        raise FarspanError(f"{source} was trained on {length} tokens already; ask for more than that with --to")
    if rows is not None and round(BEYOND * to) > rows:
        raise FarspanError(
            f"{source} has {rows} learned positions, and a search for {to} tokens reads {round(BEYOND * to)}; such a "
            "model cannot be asked beyond its table"
        )
    return length


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
                f"{name} changes rotation, and {source} has none in any layer (it has {', '.join(sorted(kinds))}); use "
                "uniform, headscale or headlog"
            )
    if rotary and "none" not in kinds and set(names) & set(SCALED) and not set(names) & set(ROPED):
        return ("all layers of this model rotate, and scales alone do little there; try yarn or yarn+headscale",)
    return ()


def _idle(names: Sequence[str], layers: Sequence[Layer], config: PreTrainedConfig, how: Extension) -> Iterator[str]:
    """What auto, which may be given every setting, does not use on this model."""
    candidates = _candidates(layers, config)
    for key, _ in _unusual(how, Extension()) if list(names) == ["auto"] else ():
        if not _users(key, candidates):
            yield f"{key} did nothing: here auto chooses of {', '.join(candidates)}"


def _splits(
    data: str | Path | Mapping[str, str | Path], tokenizer: PreTrainedTokenizerBase, to: int, how: Extension
) -> dict[str, Windows]:
    lengths = {"search": round(BEYOND * to), "choose": to, "report": to}
    limits = {"search": how.search_windows, "choose": how.choose_windows, "report": how.report_windows}
    if isinstance(data, str | Path):
        return split_windows(read_documents(data), tokenizer, lengths, limits)
    if set(data) != set(lengths):
        raise FarspanError(
            f"text is named {', '.join(data)}; give one corpus, or three as search=PATH, choose=PATH and report=PATH"
        )
    for one, other in combinations(lengths, 2):
        if Path(data[one]).resolve() == Path(data[other]).resolve():
            raise FarspanError(f"{one}={data[one]} and {other}={data[other]} are the same text; give three that differ")
    return {name: cut_windows(read_documents(data[name]), tokenizer, lengths[name], limits[name]) for name in lengths}


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


def _candidates(layers: Sequence[Layer], config: PreTrainedConfig) -> list[str]:
    """Of which methods auto chooses."""
    if not all(layer.position == "rope" for layer in layers):
        return ["uniform", "headscale", "headlog"]
    return ["ntk", "yarn"] if stretched(config) is None else ["ntk", "uniform"]


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


def _measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: Tensor, job: Job, how: Extension
) -> tuple[dict[str, float], np.ndarray]:
    """Loss at marks and passkeys told, by name; and the whole curve."""
    forget_lengths(model)
    curve = loss_by_position(model, windows).numpy()
    span = max(1, job.train_length // 4)
    found = {f"loss@{mark}": float(curve[max(0, mark - span) : mark].mean()) for mark in marks(job)}
    if how.passkeys:
        shortest = Passkeys(tokenizer).shortest
        for mark in marks(job):
            if mark >= max(shortest, job.train_length):
                forget_lengths(model)
                found[f"passkey@{mark}"] = passkey_share(model, tokenizer, mark, keys=how.passkeys, seed=how.seed)
    return found, curve


def _worse(before: Mapping[str, float], after: Mapping[str, float], to: int) -> Iterator[str]:
    """What every user would want to know of a patch before it is used."""
    was, now = before[f"loss@{to}"], after[f"loss@{to}"]
    if now > was:
        yield (
            f"the patch makes the loss at {to} tokens worse ({was:.3f} before, {now:.3f} after); search longer, or "
            "choose another method"
        )


def marks(job: Job) -> list[int]:
    """Half the training length, that length, and its doublings up to the target."""
    length = job.train_length
    doubled = [length * 2**power for power in range(20) if length * 2**power < job.target]
    return [length // 2, *doubled, job.target]


def _prove(folder: Path, fitted: PreTrainedModel, base: PreTrainedModel, tokens: Tensor) -> tuple[float, float]:
    """Reload the saved patch onto a fresh model: it must do what the fitted one does, and something."""
    without = last_logits(base, tokens, PROVEN)
    reloaded = last_logits(Patch.load(folder).apply(base), tokens, PROVEN)
    forget_lengths(fitted)
    meant = last_logits(fitted, tokens, PROVEN)
    difference, effect = float((reloaded - meant).abs().max()), float((reloaded - without).abs().max())
    scale = float(meant.abs().max())
    if not difference <= 1e-3 * scale:  # and not >, which would let through what is no number
        raise ProofError(
            f"the saved patch, reloaded, differs from the fitted model by {difference:.2g} in a logit (the largest is "
            f"{scale:.2g}); nothing was written"
        )
    if effect == 0 and not _is_identity(Patch.load(folder)):
        raise ProofError("the saved patch, reloaded onto a fresh model, changes no logit; nothing was written")
    return difference, effect


def _is_identity(patch: Patch) -> bool:
    scales = patch.scales
    nothing = scales is None or (
        bool((scales.base == 1).all()) and (scales.slope is None or not bool(scales.slope.any()))
    )
    return nothing and patch.rope is None and not patch.weights


def _record(
    folder: Path,
    found: Extended,
    job: Job,
    how: Extension,
    method: str,
    splits: Mapping[str, Windows],
    device: str,
) -> None:
    figures.save(figures.loss_curves(found.curves, job.train_length, str(job.name)), folder / "before_after")
    write_record(
        folder / "record.json",
        "extend",
        {
            "model": job.name,
            "to": job.target,
            "method": method,
            "train_length": job.train_length,
            "position": job.position,
            "device": device,
            "recipe": asdict(how),
        },
        {
            "before": found.before,
            "after": found.after,
            "proof": {"max_abs_logit": found.proof, "effect": found.effect},
            "notes": list(found.notes),
            "text": {name: windows.describe() for name, windows in splits.items()},
            "loss_by_position": {name: curve.round(4).tolist() for name, curve in found.curves.items()},
        },
    )
