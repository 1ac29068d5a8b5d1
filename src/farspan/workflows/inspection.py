"""What a model is, as it behaves: which layers positions reach, what its config claims, what can be folded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from farspan.attention.patch import Patch
from farspan.attention.probe import Layer, probe
from farspan.attention.scales import Scales
from farspan.diagnosis.curves import check_finite
from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import weight_files
from farspan.formats.fold import Site, find_sites, logits, random_tokens
from farspan.loading import is_patch, load, load_config, needed_attention, patch_in

BUILDABLE = 300_000_000  # parameters of a model that is built whole when it cannot be built small


@dataclass(frozen=True)
class LayerReport:
    """One attention layer: where positions reach it, by behaviour and by the config's word."""

    index: int
    position: str  # none | rope | alibi | t5 | learned | sinusoidal | unknown
    claimed: str  # the same words; unknown where the config does not say
    window: int | None


@dataclass(frozen=True)
class FoldReport:
    """Whether per-head scales can become weights on the layers that scales go to (NoPE layers, if there are any)."""

    possible: bool
    site: str | None  # the submodule that holds them
    why: str | None  # what stands against it, on which layers
    layers: tuple[int, ...]  # every layer that folds


@dataclass(frozen=True)
class Inspection:
    """The answer of `farspan inspect`; `to_json` has its stable keys."""

    model: str
    family: str
    parameters: int
    train_length: int | None
    heads: int
    kv_heads: int
    head_dim: int
    base_scale: float
    temperature: str | None  # a schedule built into the model
    query_norm: str | None
    layers: tuple[LayerReport, ...]
    fold: FoldReport
    warnings: tuple[str, ...]
    patch: dict[str, Any] | None = None  # what a patch folder adds to its base model

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(
    source: str | Path | PreTrainedModel, *, position: str | None = None, trust_remote_code: bool = False
) -> Inspection:
    """Look at a model by running it on a few tokens. A config without weights is probed on a small random model.

    >>> farspan.inspect("path/to/checkpoint").fold.possible
    True
    """
    if isinstance(source, PreTrainedModel):
        return _inspect_model(source, type(source).__name__)
    folder = Path(source)
    if folder.is_dir() and not is_patch(folder):
        config = load_config(folder, position=position, trust_remote_code=trust_remote_code)
        if not weight_files(folder):
            return _inspect_config(config, str(source), trust_remote_code)
    model, _ = load(source, position=position, trust_remote_code=trust_remote_code)
    _check_weights(model, str(source))
    found, patch = _inspect_model(model, str(source)), patch_in(source)
    if patch is None:
        return found
    note = f"patched by {patch.method} for {patch.target:,} tokens: {'; '.join(patch_parts(patch))}"
    return replace(found, patch=patch.for_others().describe(), warnings=(note, *found.warnings))


def _check_weights(model: PreTrainedModel, name: str) -> None:
    """Refuse damaged weights, for what is seen of such a model is none of its nature."""
    try:
        check_finite(model, logits(model, random_tokens(model)), name)
    except CorruptError:
        raise
    except Exception:  # numbers that outgrow their type, or a family that needs more to run, as the probe will tell
        return


def patch_parts(patch: Patch) -> list[str]:
    """What a patch changes, in words."""
    parts = []
    if patch.scales is not None:
        parts.append(f"attention scales of {len(patch.scales.layers)} layers: {_statistics(patch.scales)}")
    if patch.rope is not None:
        parts.append(f"rope parameters: {rope_in_words(patch.rope)}")
    if patch.weights is not None:
        parts.append(f"tuned weights: {len(patch.weights)} tensors")
    return parts


def rope_in_words(rope: Mapping[str, Any]) -> str:
    """Rope parameters as people read them; patch.json has all digits."""
    told = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in rope.items()}
    return ", ".join(f"{key} {value}" for key, value in told.items())


def _statistics(scales: Scales) -> str:
    base = scales.base.detach()
    spread = f"least {base.min():.3f}, mean {base.mean():.3f}, largest {base.max():.3f}"
    return spread if scales.constant else f"{spread}, growing by the basis `{scales.basis}`"


def _inspect_config(config: PreTrainedConfig, name: str, trust_remote_code: bool) -> Inspection:
    note = "no weights: probed on a small random model with the same layers"
    try:
        with torch.device("meta"):
            parameters = _count(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
        try:
            small = small_model(config, trust_remote_code)
            return _inspect_model(small, name, config, parameters, [note])
        except Exception:  # a family whose sizes depend on each other in ways of its own
            if parameters > BUILDABLE:
                raise
            whole = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).eval()
            return _inspect_model(whole, name, config, parameters, [note])
    except FarspanError:
        raise
    except Exception as error:
        raise FarspanError(
            f"no {config.model_type} could be built and run from {name} alone ({type(error).__name__}: "
            f"{first_line(error)}); give the folder with its weights"
        ) from error


def _inspect_model(
    model: PreTrainedModel,
    name: str,
    config: PreTrainedConfig | None = None,
    parameters: int | None = None,
    notes: Sequence[str] = (),
) -> Inspection:
    """`config` and `parameters` are those of the model that is meant, where `model` stands in for it."""
    config = (config or model.config).get_text_config()
    if not (heads := getattr(config, "num_attention_heads", None)):
        raise FarspanError(f"a {config.model_type} has no attention heads, so there is nothing to inspect")
    head_dim = _head_dim(config)
    temperature = built_in_temperature(config)
    warnings = list(notes)
    if temperature:
        warnings.append(f"the model already scales its attention ({temperature}); farspan's scales multiply with that")
    length, table = train_length(config), getattr(config, "position_table", None)
    if "learned" in getattr(config, "position", ()) and table and length and table > length:
        warnings.append(f"its position table has {table} rows, and those beyond {length} are untrained")
    from_config = Inspection(
        model=name,
        family=config.model_type,
        parameters=parameters or _count(model),
        train_length=length,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        base_scale=head_dim**-0.5,
        temperature=temperature,
        query_norm=None,
        layers=tuple(
            LayerReport(index, "unknown", claimed_position(config, index), None)
            for index in range(config.num_hidden_layers)
        ),
        fold=FoldReport(False, None, "the fold is tried out at the seam, and this model cannot be put on it", ()),
        warnings=tuple(warnings),
    )
    try:
        layers = probe(model)
    except FarspanError as error:  # off the interface: what the config says must do
        return replace(from_config, warnings=(*warnings, str(error)))
    reports = tuple(
        LayerReport(layer.index, layer.position, claimed_position(config, layer.index), layer.window)
        for layer in layers
    )
    return replace(
        from_config,
        head_dim=layers[0].head_dim,
        base_scale=layers[0].base_scale,
        query_norm=_query_norm(layers),
        layers=reports,
        fold=_fold(model, layers),
        warnings=(*warnings, *_disagreements(reports)),
    )


def claimed_position(config: PreTrainedConfig, layer: int) -> str:
    """What the config says of a layer; it may be silent, and it may be wrong.

    In `no_rope_layers` a 1 means that rotation is on.
    """
    if isinstance(own := getattr(config, "position", None), list):
        removed = own[layer] == "rope" and config.rope_parameters["rope_type"] == "none"
        return "none" if removed else own[layer]
    if flags := getattr(config, "no_rope_layers", None):
        return "rope" if flags[layer] else "none"
    if (kind := getattr(config, "position_embedding_type", None)) is not None:
        return {"rope": "rope", "nope": "none", "none": "none", "alibi": "alibi", "absolute": "learned"}.get(
            kind, "unknown"
        )
    attention = getattr(config, "attn_config", None)
    if getattr(config, "alibi", False) or getattr(attention, "alibi", False) or config.model_type == "bloom":
        return "alibi"
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "unknown"
    if rope.get("rope_type") == "none":
        return "none"
    spans = getattr(config, "layer_types", None) or []
    nested = rope.get(spans[layer], rope) if layer < len(spans) else rope
    return "none" if nested is None else "rope"


def built_in_temperature(config: PreTrainedConfig) -> str | None:
    """A scale that grows with position and was trained in: Llama 4's on its NoPE layers, Ministral 3's on all."""
    if getattr(config, "attn_temperature_tuning", False):
        return f"1 + {config.attn_scale:g}·ln(1 + ⌊n/{config.floor_scale:g}⌋) on layers without positions"
    rope = getattr(config, "rope_parameters", None) or {}
    if beta := rope.get("llama_4_scaling_beta"):
        return f"1 + {beta:g}·ln(1 + ⌊p/{rope['original_max_position_embeddings']}⌋)"
    return None


def train_length(config: PreTrainedConfig) -> int | None:
    """The length the model was trained on, as far as its config tells: what it says of positions as a whole, for the
    length that a rope was stretched from (Llama 3.1's 8,192 of 131,072) was trained beyond."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def longest(model: PreTrainedModel) -> int | None:
    """How many positions a model can be asked about: the rows of a learned table; None where nothing ends."""
    try:
        learned = any(layer.position == "learned" for layer in probe(model))
    except FarspanError:  # off the attention interface, so it cannot be asked
        return None
    config = model.config.get_text_config()
    return (getattr(config, "position_table", None) or config.max_position_embeddings) if learned else None


def scaled_by_default(layers: Sequence[Layer]) -> tuple[int, ...]:
    """The layers that scales go to: those without positions, for they get distracted; all, where there are none."""
    without = tuple(layer.index for layer in layers if layer.position == "none")
    return without or tuple(layer.index for layer in layers)


def _fold(model: PreTrainedModel, layers: list[Layer]) -> FoldReport:
    """Try distinct scales on every head; where they fail, ask whether one scale a layer would do."""
    indices = tuple(layer.index for layer in layers)
    heads = layers[0].heads
    distinct = Scales(indices, torch.linspace(1.1, 1.9, heads).repeat(len(layers), 1))
    sites = find_sites(model, distinct)
    reasons: dict[str, list[int]] = {}
    for index, site in sites.items():
        if isinstance(site, str):
            reasons.setdefault(site, []).append(index)
    why = [f"layers {ranges(where)}: {reason}" for reason, where in reasons.items()]
    if reasons:
        refused = tuple(index for where in reasons.values() for index in where)
        uniform = find_sites(model, Scales.uniform(1.5, refused, heads)).values()
        if names := sorted({site.name for site in uniform if isinstance(site, Site)}):
            why.append(f"one scale for a whole layer folds there, into {', '.join(names)}")
    folding = tuple(index for index, site in sites.items() if isinstance(site, Site))
    targets = scaled_by_default(layers)
    names = sorted({site.name for index, site in sites.items() if isinstance(site, Site)})
    return FoldReport(
        possible=set(targets) <= set(folding),
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
        f"layers {ranges(where)}: the config reads as {claimed!r}, and the model behaves as {position!r}"
        for (claimed, position), where in wrong.items()
    ]


def _query_norm(layers: Sequence[Layer]) -> str | None:
    names = {
        name for layer in layers for name, _ in layer.module.named_children() if "norm" in name and name.startswith("q")
    }
    return ", ".join(sorted(names)) or None


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _head_dim(config: PreTrainedConfig) -> int:
    """As the config has it. Where kinds of layers have heads of other widths, a share of the hidden size stands for all
    until the model is run."""
    own = None
    with suppress(RuntimeError):  # transformers refuses to name one of several
        own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _count(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small_model(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """A random model with every layer of the config, thin where thinness changes no pattern. Heads keep their
    width: much depends on it."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = _head_dim(text)
    group = heads // kv_heads
    few = 2 if group < 4 else 1
    width = few * group * head_dim
    thin = {
        "vocab_size": 64,
        "num_attention_heads": few * group,
        "num_key_value_heads": few,
        "hidden_size": width,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "moe_intermediate_size": 32,
        "shared_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts": 2,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "mamba_n_heads": 2 * few * group,
        "mamba_d_head": head_dim,
        "mamba_num_heads": 2 * few * group,
        "mamba_head_dim": head_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_num_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for key, value in thin.items():
        if getattr(text, key, None) is not None:
            setattr(text, key, value)
    return AutoModelForCausalLM.from_config(
        small, trust_remote_code=trust_remote_code, attn_implementation=needed_attention(config)
    ).eval()
