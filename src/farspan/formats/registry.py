"""The registry of export formats: how each is written and read back, and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.rope import set_rope
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.files import file_name
from farspan.formats.fold import fold
from farspan.formats.gguf import FILE, read_gguf, write_gguf
from farspan.formats.growth import check_growth, check_no_windows, model_with_growth
from farspan.formats.layout import ConfigLayout, config_with_layout, model_with_config
from farspan.formats.live import save_model, write_live
from farspan.formats.peft import read_peft, write_peft
from farspan.formats.stock import to_stock
from farspan.loading import LoadedModel, load, load_base
from farspan.model import FarspanForCausalLM


@dataclass(frozen=True, eq=False)
class ExportJob:
    """A model to export: live, in float32, with everything it was loaded from."""

    path: Path  # a patch folder or a model, as the user named it
    patch: Patch | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype  # of the weights that are written
    position: str | None = None
    trust_remote_code: bool = False

    @property
    def name(self) -> str:
        """The name of the base model, without paths on this disk."""
        return (self.patch.portable().name if self.patch else "") or self.source

    @property
    def source(self) -> str:
        """The model as the user named it, without paths on this disk."""
        return file_name(self.path) if self.path.exists() else str(self.path)

    @property
    def has_layout(self) -> bool:
        return self.patch is not None and self.patch.layout is not None

    @property
    def growing_scales(self) -> Scales | None:
        scales = self.patch.scales if self.patch is not None else None
        return None if scales is None or scales.constant else scales

    def without_growth(self) -> ExportJob:
        """The job with the bases of growing scales alone, which are constant."""
        assert self.patch is not None
        assert self.patch.scales is not None
        bases = Scales(self.patch.scales.layers, self.patch.scales.base)
        return replace(self, patch=replace(self.patch, scales=bases))

    def fold_scales(self) -> PreTrainedModel:
        """Take the model off the seam, and fold its scales into its weights."""
        seam.uninstall(self.model)
        if self.patch is not None and self.patch.rope is not None:
            # Again, because a dynamic rope type remembers the longest prompt that it has seen.
            set_rope(self.model, self.patch.rope)
        if self.patch is not None and self.patch.scales is not None:
            fold(self.model, self.patch.scales)
        return self.model


@dataclass(frozen=True)
class ExportFormat:
    """An export format; `{folder}` in `usage` stands for the exported folder."""

    write: Callable[[ExportJob, Path], None]
    read: Callable[[ExportJob, Path], LoadedModel]
    engines: str  # that run it
    usage: str  # code or command that loads it
    has_dtype: bool = True  # whether the dtype of its weights can be chosen


def _write_live(job: ExportJob, folder: Path) -> None:
    if job.patch is None:
        raise FarspanError(
            f"{job.path} holds no patch to keep live; it is a model already, so use --format stock"
        )
    # Loaded again in its stored precision, because the live model's weights may be tuned ones.
    base, tokenizer = load_base(
        job.path,
        job.patch,
        dtype="auto",
        position=job.position,
        trust_remote_code=job.trust_remote_code,
    )
    write_live(base, job.patch.portable(), tokenizer, folder)


def _write_folded(job: ExportJob, folder: Path) -> None:
    if job.has_layout and not isinstance(job.model, FarspanForCausalLM):
        raise FarspanError(
            "the patch holds a layout, and only farspan's own architecture has a config for it, "
            f"which a {job.model.config.model_type} model is not; use --format stock or live"
        )
    save_model(_folded_model(job).to(job.dtype), job.tokenizer, folder)


def _write_stock(job: ExportJob, folder: Path) -> None:
    if (growing := job.growing_scales) is None:
        model = _stock_model(job)
    else:
        if job.has_layout:
            check_no_windows(ConfigLayout.observe(job.model))
        check_growth(growing)  # before the work of folding
        model = model_with_growth(_stock_model(job.without_growth()), growing)
    save_model(model, job.tokenizer, folder)


def _write_peft(job: ExportJob, folder: Path) -> None:
    if job.patch is None:
        raise FarspanError(
            f"{job.path} holds no patch, so there are no scales for an adapter; use --format stock"
        )
    write_peft(seam.uninstall(job.model), job.patch.portable(), folder)


def _write_gguf(job: ExportJob, folder: Path) -> None:
    write_gguf(_stock_model(job), job.tokenizer, folder / FILE, name=job.name)


def _folded_model(job: ExportJob) -> PreTrainedModel:
    """The model off the seam: scales in its weights, a layout in its config."""
    if not job.has_layout:
        _refuse_removed_rotation(job)
        return job.fold_scales()
    # Observed on the seam, and refused before the work of folding.
    config = config_with_layout(job.model, ConfigLayout.observe(job.model))
    return model_with_config(job.fold_scales(), config)


def _stock_model(job: ExportJob) -> PreTrainedModel:
    model = _folded_model(job)
    stock = to_stock(model) if isinstance(model, FarspanForCausalLM) else model
    config = stock.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    # Engines serve no more tokens than max_position_embeddings. Dynamic rope types compute with it,
    # and a learned table has as many rows, so those keep theirs.
    if job.patch and rope and rope.get("rope_type") not in ("dynamic", "longrope"):
        config.max_position_embeddings = max(config.max_position_embeddings, job.patch.target)
    return stock.to(job.dtype)


def _refuse_removed_rotation(job: ExportJob) -> None:
    """Only farspan's config can express removed rotation; other families would rotate again."""
    rope = (job.patch.rope if job.patch else None) or {}
    if rope.get("rope_type") == "none" and not isinstance(job.model, FarspanForCausalLM):
        raise FarspanError(
            f"the patch removes rotation, and a {job.model.config.model_type} checkpoint cannot "
            "express that; use --format live"
        )


def _load(job: ExportJob, folder: Path) -> LoadedModel:
    return load(
        folder,
        dtype=torch.float32,
        device=job.model.device,
        trust_remote_code=job.trust_remote_code,
    )


def _read_peft(job: ExportJob, folder: Path) -> LoadedModel:
    return LoadedModel(read_peft(job.model, folder), None)


def _read_gguf(job: ExportJob, folder: Path) -> LoadedModel:
    return LoadedModel(read_gguf(folder / FILE, job.tokenizer).to(job.model.device), None)


FORMATS = {
    "live": ExportFormat(
        _write_live,
        _load,
        "farspan only: stock transformers refuses it, because it would drop the patch",
        'farspan.load("{folder}")',
        has_dtype=False,
    ),
    "folded": ExportFormat(
        _write_folded,
        _load,
        "whatever runs the base model: farspan for its own architecture, stock engines for others",
        'farspan.load("{folder}")',
    ),
    "stock": ExportFormat(
        _write_stock,
        _load,
        "transformers without farspan, and engines that load its checkpoints (vLLM, SGLang, TGI)",
        'transformers.AutoModelForCausalLM.from_pretrained("{folder}")',
    ),
    "peft": ExportFormat(
        _write_peft,
        _read_peft,
        "peft, on the base model or its stock export, merged or not",
        'peft.PeftModel.from_pretrained(base, "{folder}")',
        has_dtype=False,
    ),
    "gguf": ExportFormat(
        _write_gguf,
        _read_gguf,
        "llama.cpp and tools built on it (Ollama, LM Studio)",
        "llama-cli -m {folder}/" + FILE + " -ctk f32 -ctv f32",
    ),
}
