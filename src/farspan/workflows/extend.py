"""`farspan extend`: fit a method, save the patch, prove it on a fresh model, report the gain."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention import seam
from farspan.attention.model_facts import cache_bytes
from farspan.attention.patch import Patch
from farspan.attention.probe import Layer, probe
from farspan.attention.rope import reset_dynamic_rope
from farspan.batching import out_of_memory
from farspan.deprecation import renamed_arguments
from farspan.device_map import DeviceMap
from farspan.diagnosis.curves import check_losses, mean_before
from farspan.errors import FarspanError, ProofError
from farspan.evals.passkey import passkey_accuracy, scored_documents
from farspan.files import check_absent, file_name, new_folder, write_text
from farspan.lengths import doublings, parse_length
from farspan.loading import LoadOptions
from farspan.methods.auto import candidate_methods
from farspan.methods.extend_config import ExtendConfig, read_extend_config
from farspan.methods.fit import fit_methods
from farspan.methods.job import FitJob, loss_by_position
from farspan.methods.registry import TRAINED_METHODS, methods_using
from farspan.model.loss import last_logits_cpu
from farspan.model_objects import ModelLike, accepts_model_objects
from farspan.progress import Progress, Say, Stage, automatic, ignore, shows_progress, with_total
from farspan.recipe import to_toml
from farspan.record import write_record
from farspan.summaries import Plotted, draw
from farspan.train.sharding import processes
from farspan.workflows.extend_estimate import (
    ExtendEstimate,
    Speed,
    distillation_cost,
    extension_stages,
    training_changes,
)
from farspan.workflows.extend_prepare import (
    Data,
    ExtendRun,
    FitOptions,
    Prepared,
    make_run,
    prepare,
)
from farspan.workflows.search_folder import CLAIM, check_output, search_folder, search_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_TEXT = "python-docs/search"  # `farspan eval` scores the rest of it
MANY_EPOCHS = 10  # of distillation, beyond which more text is advised
SWAN_DETAILS = ("choice", "distillation", "long_windows")  # of the record, in --json
PROOF_POSITIONS = 256  # at the end of a window, where every method has an effect


@dataclass(frozen=True, eq=False, repr=False)
class ExtendResult(Plotted):
    """The patch, and what it gains and costs."""

    patch: Patch
    folder: Path
    before: dict[str, float]  # loss and passkey accuracy, as "loss@1024"
    after: dict[str, float]
    curves: dict[str, np.ndarray]  # loss by position, "before" and "after"
    cache: dict[str, dict[str, int]]  # bytes of keys and values, "before" and "after"
    proof: float  # largest logit difference between the fitted and the reloaded model
    effect: float  # largest logit difference between the patched model and its base
    notes: tuple[str, ...]
    details: dict[str, Any] = field(default_factory=dict)  # what the methods measured and chose

    def facts(self) -> dict[str, str]:
        changes = {
            name: f"{self.before[name]:.3f} before, {self.after[name]:.3f} after"
            for name in self.after
        }
        base = self.patch.label or self.patch.name
        return {
            "patch": f"{self.patch.method} for {self.patch.target:,} tokens, in {self.folder}",
            "model": f"{base}, trained on {self.patch.train_length:,} tokens",
            **changes,
            "notes": "; ".join(self.notes),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "patch": self.patch.describe(),
            "before": self.before,
            "after": self.after,
            "folder": str(self.folder),
            "cache_bytes": self.cache,
            "notes": list(self.notes),
            **{key: self.details[key] for key in SWAN_DETAILS if key in self.details},
        }


@draw.register(ExtendResult)
def _(result: ExtendResult) -> Figure:
    from farspan.report import figures  # matplotlib takes a second to import

    title = result.patch.label or result.patch.name
    return figures.loss_curves(result.curves, result.patch.train_length, title)


@renamed_arguments(source="model")
@accepts_model_objects
@shows_progress
def extend(
    model: ModelLike,
    to: int | str,
    out: str | Path | None = None,
    method: str = "auto",
    *,
    preset: str | None = None,
    data: Data = DEFAULT_TEXT,
    recipe: ExtendConfig | str | Path | None = None,
    overrides: Sequence[str] = (),
    train_length: int | None = None,
    position: str | None = None,
    bos: str = "auto",
    device: str | None = None,
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
    say: Say = ignore,
) -> ExtendResult:
    """Extend a model to `to` tokens: fit `method` and write the patch to the new folder `out`.

    model: a name or path, a model object, or what `load` returns.
    to: the target length, as 2048 or "16k".
    out: default: the name of the model and the target, as nope-twin-1024.
    method: uniform, headscale, headlog, piecewise, logn, llama4, ssmax (attention scales); pi, ntk,
        dynamic-ntk, yarn, drope (RoPE); swan, continue (weights); two joined with +; or auto.
    preset: quick (minutes for a small model on a CPU) or full; default: quick on a CPU.
    data: one corpus, which is split to search on, choose by and report on; or these three by name.
    recipe, overrides: the settings, as a name, .toml file or ExtendConfig, and as "key=value".
    bos: yes, no or auto: whether texts begin with a begin-of-text token; the patch remembers it.
    device_map: as in transformers, for a model that one device does not hold.

    >>> result = farspan.extend("rope-twin", to="1k", out="rope-1k", method="yarn")
    >>> result.after["loss@1024"] < result.before["loss@1024"]
    True
    """
    loading = LoadOptions(
        position=position, device=device, device_map=device_map, trust_remote_code=trust_remote_code
    )
    options = FitOptions(method=method, preset=preset, recipe=recipe, overrides=overrides)
    run = make_run(model, options, loading, bos=bos, progress=progress, say=say)
    to = parse_length(to)
    check_output(out := Path(out or f"{file_name(str(model))}-{to}"))
    prepared = prepare(run, data, to, train_length, out)
    job = prepared.job
    with search_folder(search_path(out), _search_claim(job, run)), _explained_memory(job, run):
        return _fit_and_save(prepared, out)


@accepts_model_objects
@shows_progress
def estimate_extension(
    model: ModelLike,
    to: int | str,
    method: str = "auto",
    *,
    preset: str | None = None,
    data: Data = DEFAULT_TEXT,
    recipe: ExtendConfig | str | Path | None = None,
    overrides: Sequence[str] = (),
    train_length: int | None = None,
    position: str | None = None,
    bos: str = "auto",
    device: str | None = None,
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
) -> ExtendEstimate:
    """Check the arguments of `extend` and estimate its cost, without fitting or writing anything.

    >>> farspan.workflows.extend.estimate_extension("rope-twin", 16_384, "swan").tokens
    31981568
    """
    loading = LoadOptions(
        position=position, device=device, device_map=device_map, trust_remote_code=trust_remote_code
    )
    options = FitOptions(method=method, preset=preset, recipe=recipe, overrides=overrides)
    run = make_run(model, options, loading, bos=bos, progress=progress, say=ignore)
    prepared = prepare(run, data, parse_length(to), train_length, Path("unused"))
    return _estimate(prepared)[0]


def _fit_and_save(prepared: Prepared, out: Path) -> ExtendResult:
    check_absent(out)  # another process may have written it before this one got the lock
    prepared = _announce(prepared)
    result = _fit(prepared, out)
    if processes().is_main_process:
        result = _save(result, prepared)
    processes().wait_for_everyone()
    return result


def _announce(prepared: Prepared) -> Prepared:
    """Say what the extension will take; its progress then shows the remaining time of it all."""
    estimate, stages = _estimate(prepared)
    run = prepared.run
    run.say(f"{', '.join(estimate.methods)}: {estimate.sentence}")
    for text in _distillation_notes(run, estimate.tokens, estimate.text["search"]):
        run.say(text)
    progress = with_total(run.progress, stages)
    job, run = replace(prepared.job, progress=progress), replace(run, progress=progress)
    return replace(prepared, run=run, job=job)


def _distillation_notes(run: ExtendRun, tokens: int, text: int) -> Iterator[str]:
    """What a distillation on so many tokens means, with so many tokens of search text."""
    if tokens and run.names == ["auto"]:
        yield f"auto also tries swan, which trains the weights on {tokens:,} tokens"
    if tokens > MANY_EPOCHS * text:
        yield (
            f"the {text:,} tokens of the search text are read {tokens / text:.0f} times; give more "
            "with --data search=PATH, or choose fewer swan.tokens"
        )


def _estimate(prepared: Prepared) -> tuple[ExtendEstimate, list[Stage]]:
    run, model, job = prepared.run, prepared.model, prepared.job
    candidates = candidate_methods(run.names, prepared.layers, model, job)
    speed = Speed.measure(model, prepared.layers, job, candidates)
    is_auto = run.names == ["auto"]
    stages = extension_stages(speed, job, run.config, candidates, is_auto)
    full = read_extend_config(overrides=run.overrides)
    stages_of_full = extension_stages(speed, job, full, candidates, is_auto)
    text = {name: windows.ids.numel() for name, windows in prepared.splits.items()}
    seconds: dict[str, float] = {}
    for stage in stages:
        seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
    distilled: dict[str, Any] = {}
    if "swan" in candidates:
        cost = distillation_cost(model, prepared.layers, job, run.config)
        distilled = {
            "tokens": cost.tokens,
            "steps": cost.steps + cost.long_steps,
            "flops": cost.flops + cost.long_flops,
        }
    more_notes = _distillation_notes(run, distilled.get("tokens", 0), text["search"])
    estimate = ExtendEstimate(
        tuple(candidates),
        text,
        (*prepared.notes, *more_notes),
        run.preset,
        seconds,
        sum(stage.seconds for stage in stages_of_full),
        **distilled,
        is_auto=is_auto,
        shortened_by=tuple(training_changes(candidates, run.config, model.device.type == "cuda")),
    )
    return estimate, stages


@contextmanager
def _explained_memory(job: FitJob, run: ExtendRun) -> Iterator[None]:
    """Say which settings save memory if it runs out."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise FarspanError(
            f"out of memory on windows of {job.search.shape[1]} tokens; rerun with "
            f"{_smaller_batches(run.names, run.config)}a shorter target than {job.target}"
        ) from error


def _search_claim(job: FitJob, run: ExtendRun) -> str:
    """Everything that the result of a search depends on, as text."""
    config, method = run.config, run.method
    no_effect: dict[str, Any] = {"micro_batch": 1, "save_every": 1}
    search, tuning = replace(config.search, **no_effect), replace(config.tuning, **no_effect)
    recipe = to_toml(replace(config, search=search, tuning=tuning))
    text = hashlib.sha256(job.search.numpy().tobytes() + job.choose.numpy().tobytes()).hexdigest()
    lengths = f"{method} to {job.target} from {job.train_length}"
    patch = "" if run.start is None else f", patch {run.start.fingerprint}"
    defaults = search.resolve(job.has_nope)  # of this version, for what the recipe leaves open
    return f"# {lengths}, weights {job.model}{patch}, text {text}\n# {defaults}\n{recipe}"


def _smaller_batches(names: Sequence[str], config: ExtendConfig) -> str:
    """The settings that save memory, of those that the methods use; one process tried them."""
    if processes().num_processes == 1:
        return ""
    tunes = config.tune or TRAINED_METHODS & set(names)
    sizes = {
        "search": config.search.micro_batch or math.inf,
        "tuning": (config.tuning.micro_batch or math.inf) if tunes else 1,
    }
    return "".join(
        f"{part}.micro_batch=1, or "
        for part, size in sizes.items()
        if size > 1 and methods_using(part, names)
    )


def _fit(prepared: Prepared, out: Path) -> ExtendResult:
    """Measure, fit, measure again. The model ends up patched; the proof is still missing."""
    run, model, job = prepared.run, prepared.model, prepared.job
    report = prepared.splits["report"].ids
    with seam.scaled(model, job.start):
        before, base_curve = _measure(model, prepared.tokenizer, report, job, run.config, "before")
        check_losses(model, torch.from_numpy(base_curve), job.name)
    start = run.start and replace(run.start, scales=None)
    patch, notes = fit_methods(model, prepared.layers, job, run.config, run.names, start)
    after, curve = _measure(model, prepared.tokenizer, report, job, run.config, "after")
    if not np.isfinite(curve).all():
        raise FarspanError(
            f"{job.name} extended by {patch.method} has losses that are not finite; choose another "
            "method, or a smaller learning rate"
        )
    patch = replace(patch, begin_of_text=prepared.begin.remembered)
    return ExtendResult(
        _with_absolute_base(patch, run.source),
        out,
        before,
        after,
        {"before": base_curve, "after": curve},
        _cache_sizes(model, prepared.layers, job.target),
        proof=math.nan,
        effect=math.nan,
        notes=(*prepared.notes, *notes, *_warnings(before, after, job.target)),
        details=job.details,
    )


def _cache_sizes(
    model: PreTrainedModel, layers: Sequence[Layer], target: int
) -> dict[str, dict[str, int]]:
    """The bytes of keys and values at the target, and of each further token."""
    size = model.dtype.itemsize
    sizes = {}
    for name, measured in (("before", layers), ("after", probe(model))):
        at_target = cache_bytes(measured, target, size)
        further = cache_bytes(measured, target + 1, size) - at_target
        sizes[name] = {"at_target": at_target, "per_token": further}
    return sizes


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: Tensor,
    job: FitJob,
    config: ExtendConfig,
    when: str,
) -> tuple[dict[str, float], np.ndarray]:
    """Loss and passkey accuracy at the reported lengths, and the loss by position."""
    reset_dynamic_rope(model)
    lengths = reported_lengths(job)
    shortest = job.target + 1
    if config.passkeys:
        shortest = max(scored_documents(tokenizer).shortest, job.train_length)
    read = [length for length in lengths if length >= shortest]
    advance = job.progress(f"measure {when}", 1 + len(read))
    curve = loss_by_position(model, windows).numpy()
    advance(1, f"loss {curve.mean():.4f}")
    positions = np.arange(1, len(curve) + 1)
    values = {f"loss@{n}": mean_before(n, job.train_length, positions, curve) for n in lengths}
    for length in read:
        reset_dynamic_rope(model)
        values[f"passkey@{length}"] = passkey_accuracy(
            model, tokenizer, length, keys=config.passkeys, seed=config.seed
        )
        advance(1, f"passkeys at {length}: {values[f'passkey@{length}']:.2f}")
    return values, curve


def reported_lengths(job: FitJob) -> list[int]:
    """Half the train length, the train length, and its doublings up to the target."""
    return [job.train_length // 2, *doublings(job.train_length, job.target)]


def _warnings(before: Mapping[str, float], after: Mapping[str, float], to: int) -> Iterator[str]:
    base, patched = before[f"loss@{to}"], after[f"loss@{to}"]
    if round(patched, 3) > round(base, 3):
        yield (
            f"the patch makes the loss at {to} tokens worse ({base:.3f} before, {patched:.3f} "
            "after); choose another method, or other settings"
        )


def _with_absolute_base(patch: Patch, source: str | Path) -> Patch:
    """The patch with the absolute path of a local base model, so that it loads from any folder.

    A bundled model or a hub id keeps its name.
    """
    path = str(Path(source).absolute()) if Path(source).exists() else patch.name
    return patch if path == patch.name else replace(patch, name=path, label=patch.name)


def _save(result: ExtendResult, prepared: Prepared) -> ExtendResult:
    """Write the patch folder, which appears only after the proof holds."""
    run, fitted = prepared.run, prepared.model
    run.progress("verify", 1)
    with new_folder(result.folder) as folder:
        result.patch.write_into(folder)
        write_text(folder / "recipe.toml", to_toml(run.config))
        proof, effect = _prove(folder, fitted, run.load()[0], prepared.splits["report"].ids[:1])
        result = replace(result, proof=proof, effect=effect)
        _write_record(folder, result, prepared)
        # From here on the search belongs to nobody: a kill before it is removed leaves no claim.
        (search_path(result.folder) / CLAIM).unlink(missing_ok=True)
    return result


def _prove(
    folder: Path, fitted: PreTrainedModel, base: PreTrainedModel, tokens: Tensor
) -> tuple[float, float]:
    """Reload the patch onto a fresh model: it must equal the fitted model, and have an effect."""
    base_logits = last_logits_cpu(base, tokens, PROOF_POSITIONS)
    reloaded = last_logits_cpu(Patch.load(folder).apply(base), tokens, PROOF_POSITIONS)
    reset_dynamic_rope(fitted)
    expected = last_logits_cpu(fitted, tokens, PROOF_POSITIONS)
    difference = float((reloaded - expected).abs().max())
    effect = float((reloaded - base_logits).abs().max())
    largest = float(expected.abs().max())
    if not difference <= 1e-3 * largest:  # also true for NaN
        raise ProofError(
            f"the reloaded patch differs from the fitted model by {difference:.2g} in a logit (the "
            f"largest is {largest:.2g}); nothing was written"
        )
    if effect == 0 and not _is_identity(Patch.load(folder)):
        raise ProofError(
            "the reloaded patch changes no logit of a fresh model; nothing was written"
        )
    return difference, effect


def _is_identity(patch: Patch) -> bool:
    scales = patch.scales
    no_scales = scales is None or (
        bool((scales.base == 1).all()) and (scales.slope is None or not bool(scales.slope.any()))
    )
    return no_scales and patch.rope is None and patch.layout is None and not patch.weights


def _write_record(folder: Path, result: ExtendResult, prepared: Prepared) -> None:
    from farspan.report import figures, style

    run, job, curves = prepared.run, prepared.job, result.curves
    style.save(
        figures.loss_curves(curves, job.train_length, str(job.name)), folder / "before_after"
    )
    if costs := result.details.get("layer_costs"):
        global_layers = result.patch.layout.global_layers if result.patch.layout else ()
        style.save(figures.layer_costs(costs, global_layers), folder / "layer_costs")
    write_record(
        folder / "record.json",
        "extend",
        {
            "model": job.name,
            "to": job.target,
            "method": run.method,
            "preset": run.preset,
            "train_length": job.train_length,
            "position": job.position,
            "device": prepared.model.device.type,
            "begin_of_text": prepared.begin.to_json(),
            "recipe": asdict(run.config),
            **({} if run.start is None else {"start": run.start.describe()}),
        },
        {
            "before": result.before,
            "after": result.after,
            "proof": {"max_abs_logit": result.proof, "effect": result.effect},
            "notes": list(result.notes),
            "cache_bytes": result.cache,
            **result.details,
            "search_text": dict(prepared.search_text),
            "text": {name: windows.describe() for name, windows in prepared.splits.items()},
            "loss_by_position": {name: curve.round(4).tolist() for name, curve in curves.items()},
        },
    )
