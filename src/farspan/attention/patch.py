"""A Patch: what a method found, as data, and the one place where it becomes part of a model.

A patch holds scales, rope parameters, tuned weights, or any of these, for one base model and one target
length. On disk it is a small folder of JSON and safetensors.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from farspan.attention import seam
from farspan.attention.scales import Scales
from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import new_folder, read_json, read_tensors, write_json

FORMAT = 1
POSITIVE = ("factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "partial_rotary_factor")


class OtherModelError(FarspanError):
    """The weights of a model are not those that a patch was fitted on."""


class UnfitError(FarspanError):
    """A patch cannot be put on the model that it was fitted on, so the patch itself is wrong."""


@dataclass(frozen=True, eq=False)
class Patch:
    method: str
    model: str  # fingerprint of the base weights: a patch for another model is refused
    target: int
    train_length: int
    scales: Scales | None = None
    rope: Mapping[str, Any] | None = None  # Hugging Face's form; {"rope_type": "none"} removes rotation
    weights: Mapping[str, Tensor] | None = None  # replacements by name
    name: str = ""  # where the base model was loaded from
    position: str | None = None  # how it was read there, if not as its config says
    label: str = ""  # what the user called it, where the name is a place on this disk alone

    def then(self, later: Patch) -> Patch:
        """Both patches as one, this one first: yarn.then(headscale) is what yarn+headscale fits."""
        if self.model != later.model:
            raise FarspanError(
                f"patch {later.method!r} was fitted on another base model than {self.method!r}; "
                "fit both on the same one"
            )
        return replace(
            self,
            method=f"{self.method}+{later.method}",
            target=later.target,
            scales=_product(self.scales, later.scales),
            rope=later.rope if later.rope is not None else self.rope,
            weights={**(self.weights or {}), **(later.weights or {})} or None,
        )

    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """Make the model the patched one, live: weights replaced, rotation rebuilt, scales on the seam.

        What the patch holds is checked before anything changes. The patch's scales replace the model's.
        """
        found = fingerprint(model)
        if found != self.model:
            raise OtherModelError(
                f"this patch was fitted on weights {self.model[:12]} and the model's are {found[:12]}; "
                f"apply it to its own base model{f' ({self.name})' if self.name else ''}"
            )
        scales = None if self.scales is None else self.scales.check(self.target)
        parameters = dict(model.named_parameters())
        for name, weight in (self.weights or {}).items():
            if name not in parameters or parameters[name].shape != weight.shape:
                raise UnfitError(
                    f"the patch replaces {name!r} {list(weight.shape)}, which this model does not have; "
                    "apply it to its own base model"
                )
        if scales is not None:
            _check_fit(scales, model)
        if self.rope is not None:
            set_rope(model, self.rope)
        with torch.no_grad():
            for name, weight in (self.weights or {}).items():
                parameters[name].copy_(weight)
        if scales is not None:
            seam.install(model, scales)
        return model

    def for_others(self) -> Patch:
        """The same with its base model called as the user called it: where that lies is nobody else's business."""
        return replace(self, name=self.label or self.name, label="")

    def save(self, folder: Path) -> Path:
        """A new folder with patch.json, scales.safetensors and, where weights were tuned, weights.safetensors."""
        with new_folder(Path(folder)) as new:
            self.write_into(new)
        return Path(folder)

    def write_into(self, folder: Path) -> None:
        """Write the files of the patch into a folder that is there, beside others."""
        from safetensors.torch import save_file

        tables = {} if self.scales is None else {"base": self.scales.base, "slope": self.scales.slope}
        for name, tensors in (("scales", tables), ("weights", self.weights or {})):
            held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items() if tensor is not None}
            if held:
                save_file(held, folder / f"{name}.safetensors")
        write_json(folder / "patch.json", self.describe())

    def describe(self) -> dict[str, Any]:
        """The patch as JSON, its tables in summary."""
        description: dict[str, Any] = {
            "format": FORMAT,
            "method": self.method,
            "target": self.target,
            "train_length": self.train_length,
            "model": {"name": self.name, "sha256": self.model, "position": self.position},
        }
        if self.label:
            description["model"]["label"] = self.label
        if self.scales is not None:
            base = self.scales.base.detach()
            description["scales"] = {
                "basis": self.scales.basis,
                "length": self.scales.length,
                "layers": list(self.scales.layers),
                "min": base.min().item(),
                "mean": base.mean().item(),
                "max": base.max().item(),
            }
        if self.rope is not None:
            description["rope"] = dict(self.rope)
        if self.weights is not None:
            description["weights"] = sorted(self.weights)
        return description

    @classmethod
    def load(cls, folder: Path) -> Patch:
        """The patch saved in a folder; damage is named, not guessed around."""
        folder = Path(folder)
        text = read_json(folder / "patch.json")
        if "format" not in text:
            raise not_whole(folder, "its patch.json names no format")
        if text["format"] != FORMAT:
            raise FarspanError(
                f"{folder / 'patch.json'} has format {text['format']!r} and this farspan reads {FORMAT}; "
                "upgrade farspan, or fit the patch again"
            )
        try:
            return cls._read(folder, text)
        except CorruptError:
            raise
        except FarspanError as error:
            raise not_whole(folder, error) from None
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            raise not_whole(folder, f"{type(error).__name__}: {error}") from None

    @classmethod
    def _read(cls, folder: Path, text: Mapping[str, Any]) -> Patch:
        base, target = text["model"], _tokens(text, "target")
        if not isinstance(base.get("position"), str | None):
            raise TypeError(f"position is {base['position']!r}")
        return cls(
            str(text["method"]),
            str(base["sha256"]),
            target,
            _tokens(text, "train_length"),
            _read_scales(folder, text["scales"], target) if text.get("scales") is not None else None,
            _checked_rope(text["rope"]) if "rope" in text else None,
            _read_table(folder, "weights") if "weights" in text else None,
            str(base["name"]),
            base.get("position"),
            str(base.get("label", "")),
        )


def not_whole(folder: Path, why: object) -> CorruptError:
    """That a folder is no patch as it was saved; of another error, its cause and not its way out."""
    return CorruptError(f"{folder} is not a whole patch ({str(why).partition(';')[0]}); fit or copy it again")


def _tokens(text: Mapping[str, Any], key: str) -> int:
    if type(value := text[key]) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, and not a whole number of 1 or more")
    return value


def _read_scales(folder: Path, text: Mapping[str, Any], target: int) -> Scales:
    tables = _read_table(folder, "scales")
    layers = tuple(text["layers"])
    return Scales(layers, tables["base"], tables.get("slope"), text["basis"], text["length"]).check(target)


def _read_table(folder: Path, name: str) -> dict[str, Tensor]:
    if not (file := folder / f"{name}.safetensors").exists():
        raise FarspanError(f"{file.name} is missing")
    return read_tensors(file)


def _check_fit(scales: Scales, model: PreTrainedModel) -> None:
    calls = seam.attention_calls(model)
    try:
        seam.check_fit(scales, calls)
    except FarspanError as error:
        raise UnfitError(str(error)) from None


def _product(first: Scales | None, second: Scales | None) -> Scales | None:
    """λ̂₁·λ̂₂ as one table; two schedules have no product in any one basis."""
    if first is None or second is None:
        return first or second
    if not first.constant and not second.constant:
        raise FarspanError("two schedules cannot be combined in one patch; make one of the two scales constant")
    if first.heads != second.heads:
        raise FarspanError(
            f"scales of {first.heads} and of {second.heads} heads cannot be combined; fit both on the same model"
        )
    constant, other = (first, second) if first.constant else (second, first)
    layers = tuple(sorted({*first.layers, *second.layers}))
    factor, table = _over(constant, constant.base, layers, 1.0), _over(other, other.base, layers, 1.0)
    slope = None if other.slope is None else factor * _over(other, other.slope, layers, 0.0)
    return replace(other, layers=layers, base=factor * table, slope=slope)


def _over(scales: Scales, table: Tensor, layers: tuple[int, ...], missing: float) -> Tensor:
    """The rows of a table laid out over more layers."""
    spread = torch.full((len(layers), scales.heads), missing)
    spread[[layers.index(layer) for layer in scales.layers]] = table.detach()
    return spread


def _checked_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    known = ("none", "default", *ROPE_INIT_FUNCTIONS)
    if rope["rope_type"] not in known:
        raise FarspanError(f"rope_type {rope['rope_type']!r} is unknown; choose one of {', '.join(known)}")
    for key in POSITIVE:
        if (value := rope.get(key)) is not None and not 0 < value < math.inf:
            raise FarspanError(f"the rope parameter {key} is {value!r}; give a number above 0")
    return dict(rope)


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of a model's weights, each rounded to bf16 first: a checkpoint loaded as fp32 and as bf16 is the same
    model. Tied weights count once. The encodings of a farspan config count too, for one checkpoint can be read as
    rotated and as not, and these are two models."""
    digest = hashlib.sha256(repr(getattr(model.config, "position", None)).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        rounded = weight.detach().to(torch.bfloat16).cpu().contiguous()
        digest.update(rounded.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def set_rope(model: PreTrainedModel, rope: Mapping[str, Any]) -> None:
    """Give the model these rope parameters. Changing the config alone would do nothing after loading: the
    angles are computed from buffers, so every rotary module is built again."""
    rotaries = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if any(buffer.endswith("inv_freq") for buffer, _ in child.named_buffers(recurse=False))
    ]
    rope = _checked_rope(rope)
    if not rotaries:
        raise FarspanError(
            f"{type(model).__name__} has no rotary layer, so rope parameters would change nothing; "
            "use a method that scales attention (uniform, headscale)"
        )
    seam.own_config(model)
    config = model.config.get_text_config()
    if rope["rope_type"] == "none":
        config.rope_parameters = {**config.rope_parameters, "rope_type": "none"}
        for _, _, rotary in rotaries:
            _stop(rotary)
        return
    trial = copy.deepcopy(config)
    trial.rope_parameters = _merged(config.rope_parameters, rope)
    own = config.rope_parameters

    def put(parameters: Any, modules: Sequence[Any]) -> None:
        config.rope_parameters = parameters
        for (parent, name, _), rotary in zip(rotaries, modules, strict=True):
            rotary.config = config
            parent.register_module(name, rotary)

    try:
        put(trial.rope_parameters, [type(rotary)(config=trial).to(model.device) for _, _, rotary in rotaries])
        with seam.evaluating(model):
            model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device), use_cache=False)
    except Exception as error:  # a type needs more than it is given, or a family reads more than rotation needs
        put(own, [rotary for _, _, rotary in rotaries])
        raise UnfitError(
            f"{type(model).__name__} does not run with rope parameters {rope} ({type(error).__name__}: "
            f"{first_line(error)}); give what that rope_type needs, or choose another"
        ) from None


def forget_lengths(model: PreTrainedModel) -> None:
    """A dynamic rotation remembers the longest text it has turned, and turns shorter ones like it; not after this."""
    for rotary in model.modules():
        kind = getattr(rotary, "rope_type", None)
        prefixes = {f"{layers}_": each for layers, each in kind.items()} if isinstance(kind, dict) else {"": kind}
        for prefix, each in prefixes.items():
            if each == "dynamic":
                first = getattr(rotary, f"{prefix}original_inv_freq")
                rotary.register_buffer(f"{prefix}inv_freq", first.clone(), persistent=False)
                setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def _merged(own: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The new parameters with the model's own base frequency, which an override must never lose. Where kinds of
    layers have parameters of their own, those that see the whole context get the new ones."""
    if own.get("full_attention"):
        return {**own, "full_attention": _merged(own["full_attention"], rope)}
    kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    return {**kept, **rope}


def _stop(rotary: Any) -> None:
    """Angles of zero turn nothing, bit for bit."""
    for name, buffer in rotary.named_buffers(recurse=False):
        if name.endswith("inv_freq"):
            buffer.zero_()
    # A dynamic type would compute its frequencies anew, and YaRN's factor would still scale what is not turned.
    kinds = rotary.rope_type
    rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    for name in [name for name in vars(rotary) if name.endswith("attention_scaling")]:
        setattr(rotary, name, 1.0)
