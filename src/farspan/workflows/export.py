"""`farspan export`: write a patched model in a format that other tools run.

The written files are read back and must give the logits of the live model, on text within the train
length and beyond it. Otherwise nothing is written.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.describe import describe_patch
from farspan.attention.model_facts import config_train_length, max_positions, probe_or_none
from farspan.data.documents import PYTHON_DOCS, read_documents
from farspan.data.tokens import encode
from farspan.deprecation import renamed_arguments
from farspan.diagnosis.curves import check_finite
from farspan.errors import FarspanError, ProofError
from farspan.files import check_absent, new_folder, write_text
from farspan.formats.fold import LogitProof, compare_logits, logits
from farspan.formats.growth import describe_growth
from farspan.formats.layout import describe_config
from farspan.formats.registry import FORMATS, ExportJob
from farspan.loading import find_patch, load, resolve_device
from farspan.model_objects import ModelLike, accepts_model_objects
from farspan.record import write_record
from farspan.summaries import Summarized

TOKENS = 256  # compared within the train length, and as many just beyond it
MAX_TRAIN_LENGTH = 16_384  # above it, no prompt beyond the train length is compared
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, repr=False)
class ExportResult(Summarized):
    """What was written, and how it compares with the live model.

    proofs: "inside" the train length, and "beyond" it where the model and the machine allow that.
    """

    folder: Path
    format: str
    bytes: int
    proofs: dict[str, LogitProof]

    def facts(self) -> dict[str, str]:
        return {
            "folder": str(self.folder),
            "format": f"{self.format}, {self.bytes / 1e6:,.1f} MB",
            **{
                f"proof {region}": f"{proof.tokens:,} tokens, logits within "
                f"{proof.max_abs_logit:.2g} (allowed {proof.tolerance:.2g}), "
                f"same likeliest token at {proof.same_argmax:.1%}"
                for region, proof in self.proofs.items()
            },
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "format": self.format,
            "bytes": self.bytes,
            "proofs": {region: asdict(proof) for region, proof in self.proofs.items()},
        }


@renamed_arguments(source="model")
@accepts_model_objects
def export(
    model: ModelLike,
    out: str | Path,
    format: str,
    *,
    dtype: str = "float32",
    device: str | None = None,
    position: str | None = None,
    trust_remote_code: bool = False,
) -> ExportResult:
    """Write a patched model, or any model, as live, folded, stock, peft or gguf, and prove it.

    model: a patch folder, any other name or path, a model object, or what `load` returns.
    format: live (farspan), folded (scales in the weights), stock (plain transformers), peft
        (adapter) or gguf (llama.cpp).
    out: a new folder.
    dtype: of the written weights. Narrower types than float32 round, and the proof allows for that.
        live keeps the dtype of the base model and peft writes float32, so they accept no other.

    >>> farspan.export("rope-twin", "exported", "stock").proofs["inside"].holds
    True
    """
    _check_options(format, dtype)
    check_absent(Path(out))
    device, patch = resolve_device(device), find_patch(model)
    live, tokenizer = load(
        model,
        dtype=torch.float32,
        device=device,
        position=position,
        trust_remote_code=trust_remote_code,
    )
    job = ExportJob(Path(model), patch, live, tokenizer, DTYPES[dtype], position, trust_remote_code)
    prompts = _prompts(job)
    expected = {region: logits(live, ids, keep=TOKENS) for region, ids in prompts.items()}
    for region, live_logits in expected.items():
        check_finite(live, live_logits, f"{model} on text {region} the train length")
    with new_folder(Path(out)) as new:
        FORMATS[format].write(job, new)
        written = FORMATS[format].read(job, new)
        _check_tokenizer(job, written.tokenizer)
        proofs = {
            region: compare_logits(
                expected[region], written.model, ids, keep=TOKENS, dtype=job.dtype
            )
            for region, ids in prompts.items()
        }
        _check_proofs(proofs, format)
        size = sum(file.stat().st_size for file in new.rglob("*") if file.is_file())
        result = ExportResult(Path(out), format, size, proofs)
        _write_record(new / "record.json", job, result, dtype, device)
        write_text(new / "README.md", _model_card(job, result, written.model.config))
    return result


def _check_options(format: str, dtype: str) -> None:
    if format not in FORMATS:
        raise FarspanError(f"format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise FarspanError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if dtype != "float32" and not FORMATS[format].has_dtype:
        others = ", ".join(name for name, entry in FORMATS.items() if entry.has_dtype)
        raise FarspanError(
            f"--dtype {dtype} is not supported by --format {format}; "
            f"remove --dtype, or choose one of the formats {others}"
        )


def _prompts(job: ExportJob) -> dict[str, Tensor]:
    """Prompts [1, T] whose last tokens are compared: inside the train length, and beyond it."""
    length = job.patch.train_length if job.patch else config_train_length(job.model.config)
    length = length or TOKENS
    # The tokens that are compared must have keys beyond their window.
    layout = job.patch.layout if job.patch else None
    window = max(layout.windows.values(), default=0) if layout else 0
    limit = max_positions(job.model.config, probe_or_none(job.model))
    lengths = {"inside": min(window + TOKENS, length)}
    if length <= MAX_TRAIN_LENGTH and (limit is None or length + TOKENS <= limit):
        lengths["beyond"] = max(length, window) + TOKENS
    ids = _token_ids(job.tokenizer, job.model, max(lengths.values()))
    return {region: ids[:, :tokens].to(job.model.device) for region, tokens in lengths.items()}


def _token_ids(
    tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel, length: int
) -> Tensor:
    """`length` tokens of real text, or of random ids without a tokenizer: [1, length]."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer is None:
        return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    text = next(read_documents(PYTHON_DOCS)).text[: 16 * length]
    encoded = encode(tokenizer, text)
    ids = torch.tensor([encoded[:length]])
    if int(ids.max()) >= vocabulary:
        raise FarspanError(
            "the tokenizer has more tokens than the model; use the model's own tokenizer"
        )
    return ids


def _check_tokenizer(job: ExportJob, written: PreTrainedTokenizerBase | None) -> None:
    if written is None or job.tokenizer is None:
        return
    text = next(read_documents(PYTHON_DOCS)).text[: 16 * TOKENS]
    if written(text)["input_ids"] != job.tokenizer(text)["input_ids"]:
        raise ProofError(
            "the saved tokenizer gives other tokens than before, so nothing was written; "
            "use the model's original tokenizer files"
        )


def _check_proofs(proofs: dict[str, LogitProof], format: str) -> None:
    for region, proof in proofs.items():
        if not proof.holds:
            raise ProofError(
                f"the {format} export differs from the live model by {proof.max_abs_logit:.2g} in "
                f"a logit {region} the train length (allowed {proof.tolerance:.2g}), so nothing "
                "was written; use --format live"
            )


def _write_record(
    path: Path, job: ExportJob, result: ExportResult, dtype: str, device: str
) -> None:
    settings = {"source": job.source, "format": result.format, "device": device}
    if FORMATS[result.format].has_dtype:
        settings["dtype"] = dtype
    if job.position:
        settings["position"] = job.position
    results = {
        "patch": job.patch.portable().describe() if job.patch else None,
        **result.to_json(),
        "folder": result.folder.name,
    }
    # Without the arguments, which name paths on this disk.
    write_record(path, "export", settings, results, arguments=())


def _model_card(job: ExportJob, result: ExportResult, config: PreTrainedConfig) -> str:
    """The README of an export: what it is, what runs it, and the proof."""
    export_format = FORMATS[result.format]
    lines = [
        f"# {Path(job.name).name}, {result.format}",
        "",
        *_describe_model(job),
        "",
        f"Runs in: {export_format.engines}.",
        "",
        *([note, ""] if (note := _describe_stock(job, result, config)) else []),
        "```",
        export_format.usage.format(folder=result.folder.name),
        "```",
        "",
        "## Proof",
        "",
        "The exported files were read back and compared with the live model on text:",
        "",
        "| train length | tokens | max abs Δlogit | allowed | KL, nats | same argmax |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {region} | {proof.tokens} | {proof.max_abs_logit:.2g} | {proof.tolerance:.2g} | "
        f"{proof.kl:.2g} | {proof.same_argmax:.1%} |"
        for region, proof in result.proofs.items()
    ]
    if rounding := max(proof.rounding for proof in result.proofs.values()):
        lines += [
            "",
            "The model magnifies rounding: float32 itself changes these logits by up to "
            f"{rounding:.2g}.",
        ]
    for note in sorted({proof.note for proof in result.proofs.values() if proof.note}):
        lines += ["", f"{note[0].upper()}{note[1:]}."]
    dtype = str(job.dtype).removeprefix("torch.")
    lines += [
        "",
        "## Reproduce",
        "",
        "```",
        f"farspan export {job.source} -o {result.folder.name} --format {result.format}"
        + ("" if dtype == "float32" else f" --dtype {dtype}")
        + (f" --position {job.position}" if job.position else "")
        + (" --trust-remote-code" if job.trust_remote_code else ""),
        "```",
        "",
    ]
    return "\n".join(lines)


def _describe_stock(job: ExportJob, result: ExportResult, config: PreTrainedConfig) -> str:
    """What is special about the config of a stock checkpoint."""
    if result.format != "stock":
        return ""
    if job.growing_scales is not None:
        return describe_growth(config)
    return describe_config(config) if job.has_layout else ""


def _describe_model(job: ExportJob) -> list[str]:
    if job.patch is None:
        return [f"{job.name} as it is, without a patch."]
    patch = job.patch
    lines = [
        f"{job.name}, extended from {patch.train_length:,} to {patch.target:,} tokens with the "
        f"farspan method `{patch.method}`."
    ]
    for part in describe_patch(patch):
        lines += ["", f"{part[0].upper()}{part[1:]}."]
    return lines
