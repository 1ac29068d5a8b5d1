"""`farspan extend`: fit a method, save what it found, prove on a fresh model that it took effect, and show the gain."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import Layer, probe
from farspan.data.documents import read_documents
from farspan.data.windows import Windows, cut_windows, split_windows
from farspan.errors import FarspanError, ProofError
from farspan.evals.passkey import passkey_share
from farspan.files import check_free, new_folder, write_text
from farspan.loading import load
from farspan.memory import out_of_memory
from farspan.methods.drope import drope
from farspan.methods.headscale import Search, headlog, headscale
from farspan.methods.job import Job, Progress, loss_by_position, scaled_loss
from farspan.methods.rope import ROPES, roped, roped_as
from farspan.methods.schedules import SCHEDULES, scheduled
from farspan.methods.tuning import Tuning
from farspan.methods.uniform import uniform
from farspan.model.loss import last_logits
from farspan.recipe import load_recipe, to_toml
from farspan.record import write_record
from farspan.report import figures
from farspan.workflows.inspection import train_length as trained_on

BEYOND = 1.125  # the search reads a little beyond the target, as paper A's 18K for 16K
SHELF = Path(__file__).parent.parent / "assets" / "recipes"
PROVEN = 256  # positions at the end of a window, where every method does something
TUNINGS = {"": None, "fair": 200, "raw": 1000}


@dataclass(frozen=True)
class Extension:
    """The recipe of `farspan extend`: how to search, and on how much text."""

    search: Search = field(default_factory=Search)
    tuning: Tuning = field(default_factory=Tuning)
    tune: str = ""  # rotary methods: "fair" or "raw" tunes all weights for 200 or 1000 steps
    fitted: bool = True  # schedules: with their number fitted, or as their formula has it
    search_windows: int = 256  # at most
    choose_windows: int = 8
    report_windows: int = 8
    passkeys: int = 2  # keys at each of ten depths; 0 leaves passkeys out
    seed: int = 0

    def __post_init__(self):
        if self.tune not in TUNINGS:
            raise FarspanError(f"tune is {self.tune!r}; choose fair (200 steps), raw (1000) or leave it away")


Fit = Callable[[PreTrainedModel, Job, Extension], Patch]


def _rope_fit(name: str) -> Fit:
    def fit(model: PreTrainedModel, job: Job, how: Extension) -> Patch:
        steps = TUNINGS[how.tune]
        return roped(model, job, name, replace(how.tuning, steps=steps) if steps else None)

    return fit


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
    progress: Progress = lambda label, steps: lambda *moved: None,
) -> Extended:
    """Make a model's context longer: fit `method` for `to` tokens, and write the patch to the folder `out`.

    data: one corpus, of which disjoint parts are searched, chosen by and reported on; or these three by name.
    method: one of METHODS, several joined with +, or auto.

    >>> farspan.extend("nope-twin", to=1024, out="nope-1k", method="headscale")
    """
    out, how = Path(out), recipe or Extension()
    names = _method_names(method)
    check_free(out)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def fresh() -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
        return load(source, position=position, device=device, trust_remote_code=trust_remote_code)

    ready = progress("load and read", 2)
    model, tokenizer = fresh()
    ready()
    if tokenizer is None:
        raise FarspanError(f"{source} has no tokenizer, and text must become tokens; add its tokenizer.json")
    length = _checked_length(source, to, train_length or trained_on(model.config))
    layers = probe(model)
    names, notes = _fitting(names, layers, str(source))
    splits = _splits(data, tokenizer, to, how)
    ready()
    work = out.with_name(f".{out.name}.search")
    _claim(work, how, f"{source} to {to} by {method}")
    job = Job(
        target=to,
        train_length=length,
        search=splits["search"].ids,
        choose=splits["choose"].ids,
        layers=scaled_layers(layers),
        heads=layers[0].heads,
        model=fingerprint(model),
        name=str(source),
        position=position,
        seed=how.seed,
        folder=work,
        progress=progress,
    )
    report = splits["report"].ids
    try:
        before = _measured(model, tokenizer, report, job, how)
        patch, why = fit_in_turn(model, job, how, names)
        after = _measured(model, tokenizer, report, job, how)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise FarspanError(
            f"memory does not reach for windows of {splits['search'].ids.shape[1]} tokens; give the same command with "
            f"search.micro_batch=1, or a shorter target than {to}"
        ) from error
    notes = (*notes, *why)
    with new_folder(out) as new:
        patch.write_into(new)
        write_text(new / "recipe.toml", to_toml(how))
        proof, effect = _prove(new, model, fresh()[0], report[:1])
        found = Extended(
            patch,
            out,
            before=before[0],
            after=after[0],
            curves={"before": before[1], "after": after[1]},
            proof=proof,
            effect=effect,
            notes=notes,
        )
        _record(new, found, job, how, method, splits)
    shutil.rmtree(work, ignore_errors=True)
    return found


def read_extension(source: str | None, changes: Sequence[str]) -> Extension:
    """The recipe of an extension, from a file where one is given, with `key=value` changes."""
    return load_recipe(Extension, source or "extend", changes, shelf=SHELF)


def _method_names(method: str) -> list[str]:
    names = ["auto"] if method == "auto" else method.split("+")
    for name in names:
        if name not in METHODS and name != "auto":
            near = difflib.get_close_matches(name, [*METHODS, "auto"], 1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(METHODS)}, or auto"
            raise FarspanError(f"method {name!r} is unknown; {hint}")
    if sum(name in SCALED for name in names) > 1 or (set(names) & set(SCALED) and names[-1] not in SCALED):
        raise FarspanError(
            f"{method} scales attention twice or too early; write what rotates first, then one that scales"
        )
    return names


def _checked_length(source: str | Path, to: int, length: int | None) -> int:
    if length is None:
        raise FarspanError(f"the config of {source} does not tell its training length; give it with --train-length")
    if to <= length:
        raise FarspanError(f"{source} was trained on {length} tokens already; ask for more than that with --to")
    return length


def _fitting(names: list[str], layers: Sequence[Layer], source: str) -> tuple[list[str], tuple[str, ...]]:
    """The methods, if this model has what they work on; what is unusual is said."""
    kinds = {layer.position for layer in layers}
    rotary = "rope" in kinds
    for name in names:
        if name in ROPED and not rotary:
            raise FarspanError(
                f"{name} changes rotation, and {source} has none in any layer (it has {', '.join(sorted(kinds))}); use "
                "uniform, headscale or headlog"
            )
    if rotary and "none" not in kinds and set(names) & set(SCALED) and not set(names) & set(ROPED):
        return names, (
            "every layer of this model rotates, and scales alone do little there; try yarn or yarn+headscale",
        )
    return names, ()


def scaled_layers(layers: Sequence[Layer]) -> tuple[int, ...]:
    """Those without positions, for they are the ones that get distracted; all, where there are none."""
    free = tuple(layer.index for layer in layers if layer.position == "none")
    return free or tuple(layer.index for layer in layers)


def _splits(
    data: str | Path | Mapping[str, str | Path], tokenizer: PreTrainedTokenizerBase, to: int, how: Extension
) -> dict[str, Windows]:
    lengths = {"search": round(BEYOND * to), "choose": to, "report": to}
    limits = {"search": how.search_windows, "choose": how.choose_windows, "report": how.report_windows}
    if isinstance(data, str | Path):
        return split_windows(read_documents(data), tokenizer, lengths, limits)
    missing = sorted(set(lengths) - set(data))
    if missing or len(data) > 3:
        raise FarspanError(
            f"text is named {', '.join(data)}; give one corpus, or three as search=PATH, choose=PATH and report=PATH"
        )
    return {name: cut_windows(read_documents(data[name]), tokenizer, lengths[name], limits[name]) for name in lengths}


def _claim(work: Path, how: Extension, what: str) -> None:
    """A search that was stopped goes on; another's is not touched."""
    mine = f"# {what}\n{to_toml(how)}"
    file = work / "recipe.toml"
    if file.exists() and file.read_text(encoding="utf-8") != mine:
        raise FarspanError(f"{work} holds the unfinished search of another extension; finish that one, or remove it")
    write_text(file, mine)


def fit_in_turn(model: PreTrainedModel, job: Job, how: Extension, names: list[str]) -> tuple[Patch, tuple[str, ...]]:
    """The patch of one method after the other, each fitted on what those before it made; the model ends up patched."""
    if names == ["auto"]:
        return _best(model, job, how)
    whole: Patch | None = None
    for name in names:
        part = METHODS[name](model, job, how)
        part.apply(model) if whole is None else _apply_on_top(part, model)
        whole = part if whole is None else whole.then(part)
    assert whole is not None
    return whole, ()


def _apply_on_top(part: Patch, model: PreTrainedModel) -> None:
    """A later patch was fitted on this very model, whose weights are no longer those of the base."""
    replace(part, model=fingerprint(model)).apply(model)


def _best(model: PreTrainedModel, job: Job, how: Extension) -> tuple[Patch, tuple[str, ...]]:
    """Of the methods that suit the model, the one that the second split likes best."""
    rotary = all(layer.position == "rope" for layer in probe(model))
    candidates = ["ntk", "yarn"] if rotary else ["uniform", "headscale", "headlog"]
    patches = {name: METHODS[name](model, job, how) for name in candidates}
    losses = {}
    for name, patch in patches.items():
        losses[name] = _loss_with(model, patch, job.choose)
    best = min(losses, key=losses.__getitem__)
    others = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != best)
    patches[best].apply(model)
    return patches[best], (f"auto chose {best}: loss {losses[best]:.4f} on the second split, against {others}",)


def _loss_with(model: PreTrainedModel, patch: Patch, windows: Tensor) -> float:
    if patch.scales is not None:
        return scaled_loss(model, windows, patch.scales)
    assert patch.rope is not None
    with roped_as(model, dict(patch.rope)):
        return float(loss_by_position(model, windows).mean())


def _measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: Tensor, job: Job, how: Extension
) -> tuple[dict[str, float], np.ndarray]:
    """Loss at marks and passkeys told, by name; and the whole curve."""
    curve = loss_by_position(model, windows).numpy()
    span = max(1, job.train_length // 4)
    found = {f"loss@{mark}": float(curve[max(0, mark - span) : mark].mean()) for mark in marks(job)}
    if how.passkeys:
        for mark in marks(job):
            if mark >= job.train_length:
                found[f"passkey@{mark}"] = passkey_share(model, tokenizer, mark, keys=how.passkeys, seed=how.seed)
    return found, curve


def marks(job: Job) -> list[int]:
    """Half the training length, that length, and its doublings up to the target."""
    length = job.train_length
    doubled = [length * 2**power for power in range(20) if length * 2**power < job.target]
    return [length // 2, *doubled, job.target]


def _prove(folder: Path, fitted: PreTrainedModel, base: PreTrainedModel, tokens: Tensor) -> tuple[float, float]:
    """Reload the saved patch onto a fresh model: it must do what the fitted one does, and something."""
    without = last_logits(base, tokens, PROVEN)
    reloaded = last_logits(Patch.load(folder).apply(base), tokens, PROVEN)
    meant = last_logits(fitted, tokens, PROVEN)
    difference, effect = float((reloaded - meant).abs().max()), float((reloaded - without).abs().max())
    scale = float(meant.abs().max())
    if difference > 1e-3 * scale:
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
    folder: Path, found: Extended, job: Job, how: Extension, method: str, splits: Mapping[str, Windows]
) -> None:
    figures.save(figures.loss_curves(found.curves, job.train_length, str(job.name)), folder / "before_after")
    write_record(
        folder / "record.json",
        "extend",
        {"model": job.name, "to": job.target, "method": method, "recipe": asdict(how)},
        {
            "before": found.before,
            "after": found.after,
            "proof": {"max_abs_logit": found.proof, "effect": found.effect},
            "notes": list(found.notes),
            "text": {name: windows.describe() for name, windows in splits.items()},
            "loss_by_position": {name: curve.round(4).tolist() for name, curve in found.curves.items()},
        },
    )
