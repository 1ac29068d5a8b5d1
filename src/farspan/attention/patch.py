"""A Patch: the output of a method as data, and its application to a model.

A patch holds scales, rope parameters, a layout, tuned weights, or any combination of these, for one
base model and one target length. On disk it is a small folder of JSON and safetensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.layout import Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.rope import check_rope, set_rope
from farspan.attention.scales import Scales
from farspan.device_map import outside_memory, stored_tensors
from farspan.errors import CorruptError, FarspanError, IncompatiblePatchError, WrongBaseError
from farspan.files import (
    check_checksums,
    check_listed_files,
    new_folder,
    read_json,
    read_tensors,
    sha256_of,
    write_json,
)
from farspan.summaries import Summarized, plain

# A layout needs format 2 and scales that count positions need 3; other patches are written as
# format 1, which older releases read.
FORMAT, LAYOUT_FORMAT, POSITION_FORMAT = 1, 2, 3


APPLIED_KEY = "_farspan_patch"  # in the __dict__ of a patched model


@dataclass(frozen=True, eq=False, repr=False)
class Patch(Summarized):
    """What a method changes in one base model to reach a target length.

    >>> patch = farspan.Patch.load("rope-1k")  # written by farspan.extend
    >>> patch.rope["rope_type"]
    'yarn'
    >>> model = patch.apply(farspan.load("rope-twin").model)
    """

    method: str
    model: str  # fingerprint of the base weights; other models are refused
    target: int
    train_length: int
    scales: Scales | None = None
    # Hugging Face's rope_parameters; {"rope_type": "none"} removes rotation.
    rope: Mapping[str, Any] | None = None
    weights: Mapping[str, Tensor] | None = None  # new weights by parameter name
    layout: Layout | None = None  # which layers rotate, and which see a window
    name: str = ""  # the path or Hub id of the base model
    position: str | None = None  # the position encoding it was loaded with, if not its config's
    label: str = ""  # the user's name for the base model, if `name` is a local path
    # Whether texts begin with a begin-of-text token; None: as the metadata of the base say.
    begin_of_text: bool | None = None

    def then(self, later: Patch) -> Patch:
        """Both patches as one, this one first: yarn.then(headscale) is yarn+headscale."""
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
            layout=later.layout if self.layout is None else self.layout.then(later.layout),
            begin_of_text=self.begin_of_text
            if later.begin_of_text is None
            else later.begin_of_text,
        )

    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """Patch the model in place: replace weights, rebuild rotation, install layout and scales.

        The patch is checked before anything changes. Its scales replace those of the model.
        """
        actual = fingerprint(model)
        if actual != self.model:
            raise WrongBaseError(
                f"this patch was fitted on weights {self.model[:12]}, but the model's are "
                f"{actual[:12]}; apply it to its own base model"
                f"{f' ({self.name})' if self.name else ''}"
            )
        scales = None if self.scales is None else self.scales.check(self.target)
        parameters = dict(model.named_parameters())
        for name, weight in (self.weights or {}).items():
            if name not in parameters or parameters[name].shape != weight.shape:
                raise IncompatiblePatchError(
                    f"the patch replaces {name!r} {list(weight.shape)}, which this model does not "
                    "have; apply it to its own base model"
                )
        if outside := [name for name in outside_memory(model) if name in (self.weights or ())]:
            raise FarspanError(
                f"the patch replaces {len(outside)} weights that the device map keeps outside "
                f"memory, first {outside[0]}; load the model without a device map, or with one "
                "that keeps them in memory"
            )
        if scales is not None:
            _check_scales(scales, model)
        if self.rope is not None:
            set_rope(model, self.rope)
        if self.layout is not None:
            set_layout(model, self.layout)
        with torch.no_grad():
            for name, weight in (self.weights or {}).items():
                parameters[name].copy_(weight)
        if scales is not None:
            seam.install(model, scales)
        _remember(model, self)
        return model

    def portable(self) -> Patch:
        """The patch without local paths: the user's label replaces the path of the base model."""
        return replace(self, name=self.label or self.name, label="")

    def save(self, folder: Path) -> Path:
        """Write a new folder: patch.json, scales.safetensors and weights.safetensors as needed."""
        with new_folder(Path(folder)) as new:
            self.write_into(new)
        return Path(folder)

    def write_into(self, folder: Path) -> None:
        """Write the files of the patch into an existing folder."""
        from safetensors.torch import save_file

        tables = (
            {} if self.scales is None else {"base": self.scales.base, "slope": self.scales.slope}
        )
        checksums: dict[str, str] = {}
        for name, tensors in (("scales", tables), ("weights", self.weights or {})):
            held = {
                key: tensor.detach().cpu().contiguous()
                for key, tensor in tensors.items()
                if tensor is not None
            }
            if held:
                file = folder / f"{name}.safetensors"
                save_file(held, file)
                checksums[file.name] = sha256_of(file)
        write_json(folder / "patch.json", {**self.describe(), "sha256": checksums})

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the patch changes."""
        digest = hashlib.sha256(repr(self.describe()).encode())
        tables = () if self.scales is None else (self.scales.base, self.scales.slope)
        for tensor in (*tables, *(self.weights or {}).values()):
            if tensor is not None:
                exact = tensor.detach().cpu().contiguous().flatten()
                digest.update(exact.view(torch.uint8).numpy())
        return digest.hexdigest()

    def facts(self) -> dict[str, str]:
        parts = {
            "attention scales": self.scales,
            "rope parameters": self.rope,
            "layout": self.layout,
            "weights": self.weights,
        }
        return {
            "method": f"{self.method}, from {self.train_length:,} to {self.target:,} tokens",
            "model": self.label or self.name,
            "changes": ", ".join(name for name, part in parts.items() if part is not None),
        }

    def to_dict(self) -> dict[str, Any]:
        return plain(self.describe())

    def describe(self) -> dict[str, Any]:
        """The patch as JSON, with its tables summarized."""
        description: dict[str, Any] = {
            "format": self._format(),
            "method": self.method,
            "target": self.target,
            "train_length": self.train_length,
            "model": {"name": self.name, "sha256": self.model, "position": self.position},
        }
        if self.label:
            description["model"]["label"] = self.label
        if self.scales is not None:
            base = self.scales.used(self.scales.base.detach())
            description["scales"] = {
                "basis": self.scales.basis,
                "length": self.scales.length,
                "layers": list(self.scales.layers),
                "min": base.min().item(),
                "mean": base.mean().item(),
                "max": base.max().item(),
            }
            if {*self.scales.head_counts} != {self.scales.heads}:
                description["scales"]["heads"] = list(self.scales.head_counts)
        if self.rope is not None:
            description["rope"] = dict(self.rope)
        if self.layout is not None:
            description["layout"] = self.layout.to_json()
        if self.weights is not None:
            description["weights"] = sorted(self.weights)
        if self.begin_of_text is not None:  # older releases ignore it, as they do for any model
            description["begin_of_text"] = self.begin_of_text
        return description

    def _format(self) -> int:
        if self.scales is not None and self.scales.basis == "floor-position":
            return POSITION_FORMAT
        return FORMAT if self.layout is None else LAYOUT_FORMAT

    @classmethod
    def load(cls, folder: Path) -> Patch:
        """Load a saved patch; a damaged folder raises an error that names the damage."""
        folder = Path(folder)
        record = read_json(folder / "patch.json")
        if "format" not in record:
            raise corrupt_patch(folder, "its patch.json names no format")
        if record["format"] not in range(FORMAT, POSITION_FORMAT + 1):
            raise FarspanError(
                f"{folder / 'patch.json'} has format {record['format']!r}, but this farspan reads "
                f"{FORMAT} to {POSITION_FORMAT}; upgrade farspan, or fit the patch again"
            )
        try:
            check_listed_files(folder)
            # Patches of earlier releases have no checksums.
            checksums = record.get("sha256") or {}
            check_checksums(folder, checksums, "patch.json", "fit or copy the patch again")
            return cls._read(folder, record)
        except CorruptError:
            raise
        except FarspanError as error:
            raise corrupt_patch(folder, error) from None
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            raise corrupt_patch(folder, f"{type(error).__name__}: {error}") from None

    @classmethod
    def _read(cls, folder: Path, record: Mapping[str, Any]) -> Patch:
        base, target = record["model"], _positive_int(record, "target")
        if not isinstance(base.get("position"), str | None):
            raise TypeError(f"position is {base['position']!r}")
        if not isinstance(record.get("begin_of_text"), bool | None):
            raise TypeError(f"begin_of_text is {record['begin_of_text']!r}")
        return cls(
            str(record["method"]),
            str(base["sha256"]),
            target,
            _positive_int(record, "train_length"),
            _read_scales(folder, record["scales"], target)
            if record.get("scales") is not None
            else None,
            check_rope(record["rope"]) if "rope" in record else None,
            _read_tensors(folder, "weights") if "weights" in record else None,
            Layout.parse(dict(record["layout"])) if "layout" in record else None,
            str(base["name"]),
            base.get("position"),
            str(base.get("label", "")),
            record.get("begin_of_text"),
        )


@dataclass(frozen=True, eq=False)
class AppliedPatch:
    """The patch of a model object, and the folder that it was loaded from, if any."""

    patch: Patch  # in the memory of a model without weights, which are the model's own
    weights: tuple[str, ...]  # the names of those that it replaced
    folder: str = ""


def _remember(model: PreTrainedModel, patch: Patch) -> None:
    """Note the patch on the model; what an earlier one changed besides scales stays changed."""
    weights, earlier = tuple(patch.weights or ()), model.__dict__.get(APPLIED_KEY)
    patch = replace(patch, weights=None)
    if earlier is not None and earlier.patch.model == patch.model:
        layout = earlier.patch.layout if patch.layout is None else None
        kept = replace(earlier.patch, scales=None, layout=layout)
        if kept.rope is not None or layout is not None:
            patch = kept.then(patch)
    model.__dict__[APPLIED_KEY] = AppliedPatch(patch, weights)


def remember_folder(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Note on a patched model where its patch and its base model come from."""
    applied = model.__dict__[APPLIED_KEY]
    patch = replace(applied.patch, name=base)
    model.__dict__[APPLIED_KEY] = replace(applied, patch=patch, folder=str(folder))


def applied_patch(model: PreTrainedModel) -> AppliedPatch | None:
    """What was applied to a model object, as it is now; None if the model is as it was trained."""
    applied = model.__dict__.get(APPLIED_KEY)
    attached = any(state.scales or state.layout for state in seam.attached_states(model))
    if attached and (applied is None or not _is_attached(model, applied.patch)):
        raise FarspanError(
            f"the attention of this {type(model).__name__} has scales or a layout that no patch "
            "gave it; apply them with Patch.apply, or take them off with "
            "farspan.attention.seam.uninstall"
        )
    if applied is None:
        return None
    patch = applied.patch if attached else replace(applied.patch, scales=None, layout=None)
    if not attached and patch.rope is None and not applied.weights:
        return None
    parameters = dict(model.named_parameters())
    weights = {name: parameters[name].detach() for name in applied.weights}
    return replace(applied, patch=replace(patch, weights=weights or None))


def _is_attached(model: PreTrainedModel, patch: Patch) -> bool:
    """Whether the scales and the layout on the model's attention are those of the patch."""
    rows = {state.layer: state.scales for state in seam.attached_states(model) if state.scales}
    if seam.installed_layout(model) != patch.layout:
        return False
    if patch.scales is None or set(rows) != set(patch.scales.layers):
        return not rows and patch.scales is None
    tables = {
        layer: patch.scales.row(index, rows[layer].heads)
        for index, layer in enumerate(patch.scales.layers)
    }
    return all(rows[layer].equals(table) for layer, table in tables.items())


def corrupt_patch(folder: Path, cause: object) -> CorruptError:
    """The error for a damaged patch folder, with the cause part of another error's message."""
    return CorruptError(
        f"{folder} is not a complete patch ({str(cause).partition(';')[0]}); fit or copy it again"
    )


def _positive_int(record: Mapping[str, Any], key: str) -> int:
    if type(value := record[key]) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, not a whole number of 1 or more")
    return value


def _read_scales(folder: Path, record: Mapping[str, Any], target: int) -> Scales:
    tables = _read_tensors(folder, "scales")
    layers = tuple(record["layers"])
    heads = dict(zip(layers, record["heads"], strict=True)) if "heads" in record else {}
    return Scales(
        layers, tables["base"], tables.get("slope"), record["basis"], record["length"], heads
    ).check(target)


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    if not (file := folder / f"{name}.safetensors").exists():
        raise FarspanError(f"{file.name} is missing")
    return read_tensors(file)


def _check_scales(scales: Scales, model: PreTrainedModel) -> None:
    calls = seam.attention_calls(model)
    try:
        seam.check_scales_fit(scales, calls)
    except FarspanError as error:
        raise IncompatiblePatchError(str(error)) from None


def _product(first: Scales | None, second: Scales | None) -> Scales | None:
    """λ̂₁·λ̂₂ as one table; the product of two schedules has no basis."""
    if first is None or second is None:
        return first or second
    if not first.constant and not second.constant:
        raise FarspanError(
            "two schedules cannot be combined in one patch; make one of the two scales constant"
        )
    if first.heads != second.heads:
        raise FarspanError(
            f"scales of {first.heads} and of {second.heads} heads cannot be combined; "
            "fit both on the same model"
        )
    constant, other = (first, second) if first.constant else (second, first)
    layers = tuple(sorted({*first.layers, *second.layers}))
    factor = _extend_rows(constant, constant.base, layers, 1.0)
    base = factor * _extend_rows(other, other.base, layers, 1.0)
    slope = None if other.slope is None else factor * _extend_rows(other, other.slope, layers, 0.0)
    heads = {**first.layer_heads, **second.layer_heads}
    return replace(other, layers=layers, base=base, slope=slope, layer_heads=heads)


def _extend_rows(scales: Scales, table: Tensor, layers: tuple[int, ...], fill: float) -> Tensor:
    """The table with one row for each of these layers; rows that it lacks are `fill`."""
    extended = torch.full((len(layers), scales.heads), fill)
    extended[[layers.index(layer) for layer in scales.layers]] = table.detach()
    return extended


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of a model's weights, rounded to bf16 so that the dtype of loading does not count.

    Tied weights count once. The position encodings of a farspan config count too: one checkpoint
    can be loaded with and without rotation, and these are two models."""
    digest = hashlib.sha256(repr(getattr(model.config, "position", None)).encode())
    for name, weight in stored_tensors(model, sorted(model.named_parameters())):
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        rounded = weight.detach().to(torch.bfloat16).cpu().contiguous()
        digest.update(rounded.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
