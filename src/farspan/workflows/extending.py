"""`farspan extend`: fit a method, save what it found, prove on a fresh model that it took effect, and show the gain."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch, forget_lengths
from farspan.attention.probe import probe
from farspan.data.documents import read_documents, share_text
from farspan.data.passkey import Passkeys
from farspan.data.windows import Windows, cut_windows, split_windows
from farspan.diagnosis.curves import check_losses
from farspan.errors import FarspanError, ProofError
from farspan.evals.passkey import passkey_share
from farspan.files import check_free, new_folder, write_text
from farspan.lengths import doublings
from farspan.loading import in_exact_numbers, is_patch, load_for_text
from farspan.memory import out_of_memory
from farspan.methods.job import Job, loss_by_position
from farspan.model.loss import last_logits
from farspan.progress import Progress, silent
from farspan.recipe import to_toml
from farspan.record import write_record
from farspan.report import figures, style
from farspan.train.loop import alone
from farspan.train.sharding import processes
from farspan.workflows.fitting import (
    BEYOND,
    ROPED,
    Extension,
    check_used,
    fit_in_turn,
    idle,
    job_for,
    method_names,
    suited,
    users_of,
)
from farspan.workflows.inspection import longest
from farspan.workflows.inspection import train_length as trained_on

DEFAULT_TEXT = "python-docs/search"  # what `farspan eval` scores is the rest of it
PROVEN = 256  # positions at the end of a window, where every method does something


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
    data: str | Path | Mapping[str, str | Path] = DEFAULT_TEXT,
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
    names = method_names(method)
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
    notes = (*suited(names, layers, model.config, str(source)), *idle(names, layers, model.config, how))
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
        found = _fitted(model, tokenizer, report, job, how, names, out)
        found = replace(found, patch=_located(found.patch, source), notes=(*notes, *found.notes))
        if state.is_main_process:
            with new_folder(out) as new:
                found.patch.write_into(new)
                write_text(new / "recipe.toml", to_toml(how))
                proof, effect = _prove(new, model, fresh()[0], report[:1])
                found = replace(found, proof=proof, effect=effect)
                _record(new, found, job, how, method, splits, model.device.type)
        state.wait_for_everyone()
    return found


def _fitted(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    report: Tensor,
    job: Job,
    how: Extension,
    names: list[str],
    out: Path,
) -> Extended:
    """What the methods find, measured before and after; the model ends up patched, and nothing is proven yet."""
    before, curve = _measured(model, tokenizer, report, job, how)
    check_losses(model, torch.from_numpy(curve), job.name)
    patch, why = fit_in_turn(model, job, how, names)
    after, patched = _measured(model, tokenizer, report, job, how)
    if not np.isfinite(patched).all():
        raise FarspanError(
            f"{job.name} by {patch.method} has losses that are no numbers; choose another method, or a smaller "
            "learning rate"
        )
    notes = (*why, *_worse(before, after, job.target))
    curves = {"before": curve, "after": patched}
    return Extended(patch, out, before, after, curves, proof=math.nan, effect=math.nan, notes=notes)


def _located(patch: Patch, source: str | Path) -> Patch:
    """The patch with the whole path of a model on this disk, by which it is found from any folder; a twin or a hub id
    is found by its name."""
    place = str(Path(source).absolute()) if Path(source).exists() else patch.name
    return patch if place == patch.name else replace(patch, name=place, label=patch.name)


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
    return "".join(f"{part}.micro_batch=1, or " for part, size in sizes.items() if size > 1 and users_of(part, names))


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
        if share_text(data[one], data[other]):
            raise FarspanError(f"{one}={data[one]} and {other}={data[other]} share text; give three that do not")
    return {name: cut_windows(read_documents(data[name]), tokenizer, lengths[name], limits[name]) for name in lengths}


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
    return [job.train_length // 2, *doublings(job.train_length, job.target)]


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
    style.save(figures.loss_curves(found.curves, job.train_length, str(job.name)), folder / "before_after")
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
