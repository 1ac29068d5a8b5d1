"""`farspan inspect`: which layers have positions, by behavior and by config, and what folds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from farspan.attention import guard, seam
from farspan.attention.building import (
    MAX_LAYERS,
    REPEATS,
    count_parameters,
    new_model,
    repeated_layers,
    small_model,
)
from farspan.attention.describe import describe_patch, describe_temperatures, format_ranges
from farspan.attention.model_facts import (
    claimed_position,
    config_train_length,
    default_scaled_layers,
    layer_heads,
    most_heads,
)
from farspan.attention.patch import Patch, applied_patch
from farspan.attention.probe import Layer, probe
from farspan.attention.scales import Scales
from farspan.attention.small_config import head_counts, head_dim
from farspan.checkpoints import quiet
from farspan.deprecation import renamed_arguments
from farspan.device_map import outside_memory
from farspan.diagnosis.curves import check_finite
from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import weight_files
from farspan.formats.fold import Site, find_sites, logits, random_tokens
from farspan.gguf_loading import load_gguf_config
from farspan.loading import base_source, find_patch, is_patch, load, load_config
from farspan.methods.rope import existing_rope_scaling
from farspan.model_objects import ModelLike
from farspan.progress import Progress, automatic, shows_progress
from farspan.summaries import Summarized
from farspan.workflows.inspect_summary import (
    CacheReport,
    cache_reports,
    describe_other_layers,
    describe_rope_scaling,
    latent_numbers,
    layers_without_attention,
    next_calls,
    next_commands,
    stored_dtype,
)

STEPS = 4  # of the progress: load, probe, measure temperatures, fold
CHECKED_TOKENS = 256
CHECKED_DECODED = 8  # of them read one at a time from a cache
FULL_SIZE_LIMIT = 300_000_000  # parameters of a model that is built whole if no small one can be


@dataclass(frozen=True)
class LayerReport:
    """One attention layer: its position encoding by behavior and by config."""

    index: int
    position: str  # none | rope | alibi | t5 | learned | sinusoidal | unknown
    claimed: str  # the same values; unknown where the config does not say
    window: int | None
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class FoldReport:
    """Whether per-head scales fold into the weights of the layers that get scales by default."""

    possible: bool
    site: str | None  # the submodule that takes them
    why: str | None  # the obstacle, and on which layers
    layers: tuple[int, ...]  # every layer that folds


@dataclass(frozen=True)
class SeamCheck:
    """The largest change of a logit by the attention seam, of the largest logit."""

    tokens: int
    uncached: float
    cached: float  # the last tokens are read one at a time from a cache
    limit: float  # what rounding explains


@dataclass(frozen=True, repr=False)
class Inspection(Summarized):
    """The result of `farspan inspect`; `to_json` has stable keys."""

    model: str
    family: str
    parameters: int
    train_length: int | None
    heads: int  # by the config; layers may have others
    kv_heads: int
    head_dim: int  # of the first attention layer
    base_scale: float
    temperature: str | None  # a factor of its queries that grows with the position
    query_norm: str | None
    layers: tuple[LayerReport, ...]
    fold: FoldReport
    warnings: tuple[str, ...]
    dtype: str = ""  # of the checkpoint, in which the cache is counted
    rope: str | None = None  # the scaling and the base of its rotation, by the config
    cache: tuple[CacheReport, ...] = ()  # by type of layer
    next_commands: tuple[str, ...] = ()
    patch: dict[str, Any] | None = None  # what a patch folder adds to its base model
    seam_check: SeamCheck | None = None  # with `check`
    other_layers: dict[str, int] = field(default_factory=dict)  # without attention, by kind

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def facts(self) -> dict[str, str]:
        layers: dict[str, list[int]] = {}
        for layer in self.layers:
            window = f", window {layer.window:,}" if layer.window else ""
            layers.setdefault(f"{layer.position}{window}", []).append(layer.index)
        cache = sum(report.per_token for report in self.cache)
        return {
            "model": f"{self.model} ({self.family}, {self.parameters:,} parameters)",
            "train length": f"{self.train_length:,} tokens" if self.train_length else "unknown",
            "layers": "; ".join(f"{kind} in {format_ranges(at)}" for kind, at in layers.items()),
            "without attention": describe_other_layers(self.other_layers),
            "rotation": self.rope or "",
            "temperature": self.temperature or "",
            "scales fold": f"into {self.fold.site}" if self.fold.possible else "no",
            "KV cache": f"{cache:,} bytes per token in {self.dtype}" if cache else "",
            "notes": "; ".join(self.warnings),
            "next": "; ".join(self.next_commands),
        }


@renamed_arguments(source="model")
@shows_progress
def inspect(
    model: ModelLike,
    *,
    position: str | None = None,
    check: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
) -> Inspection:
    """Inspect a model by running it on a few tokens.

    model: a name or path, a model object, or what `load` returns.

    A folder with only a config, and a .gguf file, are inspected on a small random model with the
    same layers.
    check: compare the logits of the model with and without the attention seam.

    >>> farspan.inspect("nope-twin").layers[0].position
    'none'
    """
    advance = progress("inspect", STEPS)
    if isinstance(model, tuple):  # what `load` returns
        model = model[0]
    if isinstance(model, PreTrainedModel):
        if position is not None:
            raise FarspanError(
                f"position {position!r} is for checkpoints, and a model object is loaded already; "
                "remove it, or give the path"
            )
        return _inspect_object(model, check, advance)
    folder, name = Path(model), str(model)
    advance(0, "load the model")
    if folder.suffix == ".gguf" and not folder.is_dir() and not check:
        why = "only its header was read"
        return _inspect_config(load_gguf_config(folder), name, False, advance, why)
    if folder.is_dir() and not is_patch(folder):
        config = load_config(folder, position=position, trust_remote_code=trust_remote_code)
        if not weight_files(folder):
            if check:
                raise FarspanError(
                    f"--check runs the model itself, and {name} has no weights; leave --check out, "
                    "or give a folder with weights"
                )
            inspection = _inspect_config(config, name, trust_remote_code, advance)
            return _without_weights(inspection, config)
    loaded = load(model, position=position, trust_remote_code=trust_remote_code).model
    advance(1, "probe the layers")
    _check_weights(loaded, name)
    inspection, patch = _inspect_model(loaded, name, advance), find_patch(model)
    inspection = _with_check(inspection, loaded, check)
    if patch is None:
        return inspection
    base = shlex.quote(base_source(folder, patch))
    command = f"farspan eval {shlex.quote(name)} --baseline {base} -o results"
    return _with_patch(inspection, patch, command)


def _inspect_object(
    model: PreTrainedModel, check: bool, advance: Callable[..., None]
) -> Inspection:
    if outside := outside_memory(model):
        raise FarspanError(
            f"inspect tries scales out on the weights, and a device map keeps {len(outside)} "
            f"of this {type(model).__name__} outside memory; load it without a device map"
        )
    advance(1, "probe the layers")
    inspection = _inspect_model(model, type(model).__name__, advance)
    scaled = existing_rope_scaling(model.config.get_text_config()) is not None
    calls = next_calls(inspection.layers, inspection.train_length, scaled)
    calls = calls if inspection.next_commands else ()  # it could not be probed
    inspection = _with_check(replace(inspection, next_commands=calls), model, check)
    if (applied := applied_patch(model)) is None:
        return inspection
    base = base_source(Path(applied.folder), applied.patch)
    call = f"farspan.evaluate((model, tokenizer), baseline={base!r})"
    return _with_patch(inspection, applied.patch, call)


def _without_weights(inspection: Inspection, config: PreTrainedConfig) -> Inspection:
    """The inspection of a config, which the next commands cannot run."""
    if not inspection.next_commands:
        return inspection
    scaled = existing_rope_scaling(config.get_text_config()) is not None
    commands = next_commands("MODEL", inspection.layers, inspection.train_length, scaled)
    note = (
        f"the next commands need weights, which {inspection.model} lacks: MODEL is a folder that "
        "has them"
    )
    return replace(inspection, next_commands=commands, warnings=(*inspection.warnings, note))


def _with_patch(inspection: Inspection, patch: Patch, command: str) -> Inspection:
    """The inspection of a patched model with what the patch changes, and the next command."""
    parts = "; ".join(describe_patch(patch))
    note = f"patched by {patch.method} for {patch.target:,} tokens: {parts}"
    return replace(
        inspection,
        patch=patch.portable().describe(),
        warnings=(note, *inspection.warnings),
        next_commands=(command,),
    )


def _with_check(inspection: Inspection, model: PreTrainedModel, check: bool) -> Inspection:
    """The inspection with the difference that the seam makes to this model, if asked for."""
    if not check:
        return inspection
    if seam.installed(model):
        raise FarspanError(
            f"--check compares a model with and without the attention seam, and {inspection.model} "
            "has a patch there; give its base model"
        )
    tokens = random_tokens(model, CHECKED_TOKENS)
    with seam.eval_mode(model):
        changes = guard.difference(model, tokens, seam.nothing_attached, CHECKED_DECODED)
    result = SeamCheck(tokens.shape[1], **changes, limit=guard.max_difference(model))
    if max(changes.values()) <= result.limit:
        return replace(inspection, seam_check=result)
    warning = (
        f"the attention seam changes the logits of this model by {max(changes.values()):.2g} of "
        "the largest; evaluate it as it is, without scales and entropies"
    )
    return replace(inspection, seam_check=result, warnings=(*inspection.warnings, warning))


def _check_weights(model: PreTrainedModel, name: str) -> None:
    """Refuse damaged weights: such a model shows nothing of its architecture."""
    try:
        check_finite(model, logits(model, random_tokens(model)), name)
    except CorruptError:
        raise
    except Exception:  # overflow, or a family that needs more inputs, which the probe will report
        return


def _inspect_config(
    config: PreTrainedConfig,
    name: str,
    trust_remote_code: bool,
    advance: Callable[..., None],
    why: str = "no weights",
) -> Inspection:
    _check_heads(config)
    note = f"{why}: probed on a small random model with the same layers"
    try:
        with quiet():
            advance(0, "build a small model with the same layers")
            parameters = count_parameters(config, trust_remote_code)
            try:
                small = small_model(config, trust_remote_code)
                advance(1, "probe the layers")
                return _inspect_model(small, name, advance, config, parameters, [note])
            except Exception:  # a family whose sizes depend on each other
                if parameters > FULL_SIZE_LIMIT:
                    raise
                full = new_model(config, trust_remote_code).eval()
                return _inspect_model(full, name, advance, config, parameters, [note])
    except FarspanError:
        raise
    except Exception as error:
        raise FarspanError(
            f"no {config.model_type} model could be built and run from the config of {name} "
            f"({type(error).__name__}: {first_line(error)}); give the folder with its weights"
        ) from error


def _inspect_model(
    model: PreTrainedModel,
    name: str,
    advance: Callable[..., None],
    config: PreTrainedConfig | None = None,
    parameters: int | None = None,
    notes: Sequence[str] = (),
) -> Inspection:
    """`config` and `parameters` are those of the full model if `model` is a small stand-in."""
    stands_in, config = config is not None, _check_heads(config or model.config)
    from_config = _describe_config(config, model, name, parameters, notes)
    warnings = list(from_config.warnings)
    try:
        layers = probe(model)
    except FarspanError as error:  # off the attention interface: only the config is left
        return replace(from_config, warnings=(*warnings, str(error)))
    reports = tuple(_layer_report(layer, config, stands_in) for layer in layers)
    by_index = {report.index: report for report in reports}
    repeated = repeated_layers(config) if stands_in else {}
    if repeated.keys() - by_index.keys():
        reports += tuple(
            replace(by_index[other], index=index, claimed=claimed_position(config, index))
            for index, other in repeated.items()
            if other in by_index and index not in by_index
        )
        warnings.append(
            f"layers {MAX_LAYERS}–{config.num_hidden_layers - 1} were not run: each is described "
            f"by a layer of its kind, a multiple of {REPEATS} before it"
        )
    advance(1, "measure temperatures")
    temperature, notes = describe_temperatures(model, layers, from_config.train_length)
    advance(1, "fold scales")
    scaled = existing_rope_scaling(config) is not None
    return replace(
        from_config,
        cache=cache_reports(reports, stored_dtype(config, model)),
        next_commands=next_commands(name, reports, from_config.train_length, scaled),
        head_dim=layers[0].head_dim,
        base_scale=layers[0].base_scale,
        temperature=temperature,
        query_norm=_query_norm(layers),
        layers=reports,
        rope=from_config.rope if any(r.position in ("rope", "unknown") for r in reports) else None,
        other_layers=layers_without_attention(config, {report.index for report in reports}),
        fold=_fold_report(model, layers),
        warnings=(*warnings, *notes, *_disagreements(reports)),
    )


def _describe_config(
    config: PreTrainedConfig,
    model: PreTrainedModel,
    name: str,
    parameters: int | None,
    notes: Sequence[str],
) -> Inspection:
    """What a config says of a model that is not probed yet."""
    heads, kv_heads = head_counts(config)
    return Inspection(
        model=name,
        family=config.model_type,
        parameters=parameters or model.num_parameters(),
        train_length=config_train_length(config),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim(config),
        base_scale=head_dim(config) ** -0.5,
        temperature=None,
        query_norm=None,
        layers=tuple(
            LayerReport(
                index,
                "unknown",
                claimed_position(config, index),
                None,
                *layer_heads(config, index, None),
                head_dim(config),
            )
            for index in range(config.num_hidden_layers)
        ),
        fold=FoldReport(False, None, "the model does not support the attention seam", ()),
        warnings=(*notes, *_config_warnings(config)),
        dtype=str(stored_dtype(config, model)).removeprefix("torch."),
        rope=describe_rope_scaling(config),
    )


def _check_heads(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text config of a model with attention heads."""
    text = config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        raise FarspanError(
            f"a {text.model_type} model has no attention heads, so there is nothing to inspect; "
            "give a transformer"
        )
    return text


def _layer_report(layer: Layer, config: PreTrainedConfig, stands_in: bool) -> LayerReport:
    """A small stand-in has other numbers of heads than its config."""
    heads = (layer.heads, layer.kv_heads)
    if stands_in:
        heads = layer_heads(config, layer.index, layer.window)
    claimed = claimed_position(config, layer.index)
    return LayerReport(layer.index, layer.position, claimed, layer.window, *heads, layer.head_dim)


def _config_warnings(config: PreTrainedConfig) -> list[str]:
    warnings = []
    length, table = config_train_length(config), getattr(config, "position_table", None)
    if "learned" in getattr(config, "position", ()) and table and length and table > length:
        warnings.append(f"its position table has {table} rows; those beyond {length} are untrained")
    if numbers := latent_numbers(config):
        warnings.append(
            "transformers stores the keys and values of every head; engines that keep the latent "
            f"vectors instead store {numbers:,} numbers per token"
        )
    return warnings


def _fold_report(model: PreTrainedModel, layers: list[Layer]) -> FoldReport:
    """Try different scales on every head; where that fails, try one scale for the layer."""
    indices = tuple(layer.index for layer in layers)
    heads = most_heads(layers)
    distinct = Scales(indices, torch.linspace(1.1, 1.9, heads).repeat(len(layers), 1))
    sites = find_sites(model, distinct)
    reasons: dict[str, list[int]] = {}
    for index, site in sites.items():
        if isinstance(site, str):
            reasons.setdefault(site, []).append(index)
    why = [f"layers {format_ranges(where)}: {reason}" for reason, where in reasons.items()]
    if reasons:
        refused = tuple(index for where in reasons.values() for index in where)
        uniform = find_sites(model, Scales.uniform(1.5, refused, heads)).values()
        if names := sorted({site.name for site in uniform if isinstance(site, Site)}):
            why.append(f"one scale for a whole layer folds there, into {', '.join(names)}")
    folding = tuple(index for index, site in sites.items() if isinstance(site, Site))
    names = sorted({site.name for index, site in sites.items() if isinstance(site, Site)})
    return FoldReport(
        possible=set(default_scaled_layers(layers)) <= set(folding),
        site=", ".join(names) or None,
        why="; ".join(why) or None,
        layers=folding,
    )


def _disagreements(reports: Sequence[LayerReport]) -> list[str]:
    wrong: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        if report.claimed not in ("unknown", report.position):
            wrong.setdefault((report.claimed, report.position), []).append(report.index)
    return [
        f"layers {format_ranges(where)}: the config says {claimed!r}, the model behaves as "
        f"{position!r}"
        for (claimed, position), where in wrong.items()
    ]


def _query_norm(layers: Sequence[Layer]) -> str | None:
    children = {name for layer in layers for name, _ in layer.module.named_children()}
    names = [name for name in children if "norm" in name and name.startswith("q")]
    return ", ".join(sorted(names)) or None
