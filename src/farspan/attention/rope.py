"""Rope parameters on a loaded model: set and tried, or restored."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from farspan.attention import seam
from farspan.errors import FarspanError, IncompatiblePatchError, first_line

POSITIVE_ROPE_PARAMETERS = (
    "factor",
    "rope_theta",
    "original_max_position_embeddings",
    "attention_factor",
    "partial_rotary_factor",
)


def set_rope(model: PreTrainedModel, rope: Mapping[str, Any]) -> None:
    """Give the model these rope parameters, or restore it and raise if it does not run with them.

    Rotation is computed from buffers, so changing the config of a loaded model has no effect: every
    rotary module is rebuilt."""
    rotaries = _find_rotaries(model)
    rope = check_rope(rope)
    if not rotaries:
        raise FarspanError(
            f"{type(model).__name__} has no rotary layer, so rope parameters would change nothing; "
            "use a method that scales attention (uniform, headscale)"
        )
    seam.unshare_config(model)
    config = model.config.get_text_config()
    if rope["rope_type"] == "none":
        config.rope_parameters = {**config.rope_parameters, "rope_type": "none"}
        for _, _, rotary in rotaries:
            _disable_rotation(rotary)
        return
    trial = copy.deepcopy(config)
    trial.rope_parameters = _merge_rope(config.rope_parameters, rope)
    before = config.rope_parameters

    def set_modules(parameters: Any, modules: Sequence[Any]) -> None:
        config.rope_parameters = parameters
        for (parent, name, _), rotary in zip(rotaries, modules, strict=True):
            rotary.config = config
            parent.register_module(name, rotary)

    try:
        modules = [type(rotary)(config=trial).to(model.device) for _, _, rotary in rotaries]
        set_modules(trial.rope_parameters, modules)
        with seam.eval_mode(model):
            model(input_ids=seam.two_tokens(model), use_cache=False)
    except Exception as error:  # the type needs more parameters, or the family reads other ones
        set_modules(before, [rotary for _, _, rotary in rotaries])
        raise IncompatiblePatchError(
            f"{type(model).__name__} does not run with rope parameters {rope} "
            f"({type(error).__name__}: {first_line(error)}); "
            "set all parameters that this rope_type needs, or choose another type"
        ) from None


def check_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    known = ("none", "default", *ROPE_INIT_FUNCTIONS)
    if rope["rope_type"] not in known:
        raise FarspanError(
            f"rope_type {rope['rope_type']!r} is unknown; choose one of {', '.join(known)}"
        )
    for key in POSITIVE_ROPE_PARAMETERS:
        if (value := rope.get(key)) is not None and not 0 < value < math.inf:
            raise FarspanError(f"the rope parameter {key} is {value!r}; set a number above 0")
    return dict(rope)


def _find_rotaries(model: PreTrainedModel) -> list[tuple[Any, str, Any]]:
    """Every rotary module with its parent and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if any(buffer.endswith("inv_freq") for buffer, _ in child.named_buffers(recurse=False))
    ]


def reset_dynamic_rope(model: PreTrainedModel) -> None:
    """Reset dynamic rotation, which otherwise keeps the frequencies of the longest input so far."""
    for rotary in model.modules():
        rope_type = getattr(rotary, "rope_type", None)
        types = rope_type if isinstance(rope_type, dict) else {"": rope_type}
        for layer_type, name in types.items():
            if name == "dynamic":
                prefix = f"{layer_type}_" if layer_type else ""
                original = getattr(rotary, f"{prefix}original_inv_freq")
                rotary.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
                setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def _merge_rope(current: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The new parameters with the current base frequency, which an override must never lose.

    Where layer types have separate parameters, only full attention gets the new ones."""
    if current.get("full_attention"):
        return {**current, "full_attention": _merge_rope(current["full_attention"], rope)}
    kept = {key: current[key] for key in ("rope_theta", "partial_rotary_factor") if key in current}
    return {**kept, **rope}


def _disable_rotation(rotary: Any) -> None:
    """Set all frequencies to zero, which rotates nothing, bit for bit."""
    for name, buffer in rotary.named_buffers(recurse=False):
        if name.endswith("inv_freq"):
            buffer.zero_()
    # A dynamic type would recompute its frequencies, and YaRN's factor would still scale q and k.
    types = rotary.rope_type
    rotary.rope_type = dict.fromkeys(types, "default") if isinstance(types, dict) else "default"
    for name in [name for name in vars(rotary) if name.endswith("attention_scaling")]:
        setattr(rotary, name, 1.0)
