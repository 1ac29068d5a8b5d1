"""`farspan export`: a patched model in a form that others run, written, read again and compared before it is yours.

What is written is loaded by its own reader and must give the logits of the live model, on text inside the training
length and beyond it. Otherwise nothing appears.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention import seam
from farspan.attention.patch import Patch, set_rope
from farspan.data.documents import PYTHON_DOCS, read_documents
from farspan.diagnosis.curves import check_finite
from farspan.errors import FarspanError, ProofError
from farspan.files import check_free, new_folder, write_text
from farspan.formats.fold import Proof, fold, logits, prove
from farspan.formats.gguf import FILE, read_gguf, write_gguf
from farspan.formats.live import save_model, write_live
from farspan.formats.peft import read_peft, write_peft
from farspan.formats.stock import to_stock
from farspan.loading import Loaded, chosen_device, load, load_base, patch_in
from farspan.model import FarspanForCausalLM
from farspan.record import write_record
from farspan.workflows.inspection import longest, patch_parts
from farspan.workflows.inspection import train_length as trained_on

TOKENS = 256  # compared inside the training length, and as many right after it
LONGEST = 16_384  # a training length beyond which no prompt is tried
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Job:
    """A model to be exported: live, in float32, with what it is made of."""

    source: Path
    patch: Patch | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype  # of the weights that are written
    position: str | None = None
    trust_remote_code: bool = False

    def folded(self) -> PreTrainedModel:
        """The model off the seam, with its scales in its weights."""
        seam.uninstall(self.model)
        if self.patch is not None and self.patch.rope is not None:
            set_rope(self.model, self.patch.rope)  # again: a dynamic type remembers the longest prompt it has seen
        if self.patch is not None and self.patch.scales is not None:
            fold(self.model, self.patch.scales)
        return self.model


@dataclass(frozen=True)
class Format:
    write: Callable[[Job, Path], None]
    read: Callable[[Job, Path], Loaded]
    engines: str  # that run it
    how: str  # to load it
    typed: bool = True  # are its weights written in the dtype that is asked for?


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with the live model."""

    folder: Path
    format: str
    bytes: int
    proofs: dict[str, Proof]  # inside the training length, and beyond it where the model and the machine allow that

    def to_json(self) -> dict[str, Any]:
        proofs = {where: asdict(proof) for where, proof in self.proofs.items()}
        return {"folder": str(self.folder), "format": self.format, "bytes": self.bytes, "proofs": proofs}


def export(
    source: str | Path,
    out: str | Path,
    format: str,
    *,
    dtype: str = "float32",
    device: str | None = None,
    position: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the patched model, or any model, as live, folded, stock, peft or gguf, and prove it.

    dtype: of the written weights. Folding into narrower ones than float32 rounds, and the proof allows for that. live
    keeps the base model's own and peft writes float32, so they are asked for no other.

    >>> farspan.export("runs/extended", "exported", "stock").proofs["inside"].max_abs_logit
    """
    if format not in FORMATS:
        raise FarspanError(f"format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise FarspanError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if dtype != "float32" and not FORMATS[format].typed:
        others = ", ".join(name for name, form in FORMATS.items() if form.typed)
        raise FarspanError(
            f"the format {format} has no use for --dtype {dtype}; leave it away, or choose a format that has: {others}"
        )
    check_free(Path(out))
    device, patch = chosen_device(device), patch_in(source)
    model, tokenizer = load(
        source, dtype=torch.float32, device=device, position=position, trust_remote_code=trust_remote_code
    )
    job = Job(Path(source), patch, model, tokenizer, DTYPES[dtype], position, trust_remote_code)
    samples = _samples(job)
    expected = {where: logits(model, ids, keep=TOKENS) for where, ids in samples.items()}
    for where, found in expected.items():
        check_finite(model, found, f"{source} on text {where} the training length")
    with new_folder(Path(out)) as new:
        FORMATS[format].write(job, new)
        again = FORMATS[format].read(job, new)
        _check_tokenizer(job, again.tokenizer)
        proofs = {
            where: prove(expected[where], again.model, ids, keep=TOKENS, dtype=job.dtype)
            for where, ids in samples.items()
        }
        _check(proofs, format)
        size = sum(file.stat().st_size for file in new.rglob("*") if file.is_file())
        done = Exported(Path(out), format, size, proofs)
        settings = {"source": Path(source).name, "format": format, "device": device}
        if FORMATS[format].typed:
            settings["dtype"] = dtype
        results = {
            "patch": patch.for_others().describe() if patch else None,
            **done.to_json(),
            "folder": Path(out).name,
        }
        write_record(new / "record.json", "export", settings, results, arguments=())  # they name places on this disk
        write_text(new / "README.md", _card(job, done))
    return done


def _live(job: Job, folder: Path) -> None:
    if job.patch is None:
        raise FarspanError(f"{job.source} holds no patch to keep live; it is a model already, so use --format stock")
    # Loaded once more, for the live model's own weights may be tuned ones, and in the precision it was kept in.
    base, tokenizer = load_base(
        job.source, job.patch, dtype="auto", position=job.position, trust_remote_code=job.trust_remote_code
    )
    write_live(base, job.patch.for_others(), tokenizer, folder)


def _folded(job: Job, folder: Path) -> None:
    _refuse_stopped(job)
    save_model(job.folded().to(job.dtype), job.tokenizer, folder)


def _stock_model(job: Job) -> PreTrainedModel:
    _refuse_stopped(job)
    model = job.folded()
    stock = to_stock(model)[0] if isinstance(model, FarspanForCausalLM) else model
    config = stock.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    # Engines serve no more than this; dynamic types compute with it, and a learned table has as many rows.
    if job.patch and rope and rope.get("rope_type") not in ("dynamic", "longrope"):
        config.max_position_embeddings = max(config.max_position_embeddings, job.patch.target)
    return stock.to(job.dtype)


def _refuse_stopped(job: Job) -> None:
    """Our config can say that rotation is gone; those of other families cannot, and would rotate again."""
    rope = (job.patch.rope if job.patch else None) or {}
    if rope.get("rope_type") == "none" and not isinstance(job.model, FarspanForCausalLM):
        raise FarspanError(
            f"the patch removes rotation, and no {job.model.config.model_type} checkpoint can say that; "
            "use --format live"
        )


def _stock(job: Job, folder: Path) -> None:
    save_model(_stock_model(job), job.tokenizer, folder)


def _peft(job: Job, folder: Path) -> None:
    if job.patch is None:
        raise FarspanError(f"{job.source} holds no patch, so there are no scales for an adapter; use --format stock")
    write_peft(seam.uninstall(job.model), job.patch.for_others(), folder)


def _gguf(job: Job, folder: Path) -> None:
    write_gguf(_stock_model(job), job.tokenizer, folder / FILE, name=_origin(job))


def _load(job: Job, folder: Path) -> Loaded:
    return load(folder, dtype=torch.float32, device=job.model.device, trust_remote_code=job.trust_remote_code)


FORMATS = {
    "live": Format(
        _live,
        _load,
        "farspan alone: stock transformers refuses it, for it would run the base model without the patch",
        'farspan.load("{folder}")',
        typed=False,
    ),
    "folded": Format(
        _folded,
        _load,
        "what runs the base model: farspan for its own architecture, stock engines for a stock one",
        'farspan.load("{folder}")',
    ),
    "stock": Format(
        _stock,
        _load,
        "transformers without farspan, and engines that load its checkpoints (vLLM, SGLang, TGI)",
        'transformers.AutoModelForCausalLM.from_pretrained("{folder}")',
    ),
    "peft": Format(
        _peft,
        lambda job, folder: Loaded(read_peft(job.model, folder), None),
        "peft, beside the base model or its stock export, merged or not",
        'peft.PeftModel.from_pretrained(base, "{folder}")',
        typed=False,
    ),
    "gguf": Format(
        _gguf,
        lambda job, folder: Loaded(read_gguf(folder / FILE, job.tokenizer).to(job.model.device), None),
        "llama.cpp and what is built on it (Ollama, LM Studio)",
        "llama-cli -m {folder}/" + FILE + " -ctk f32 -ctv f32",
    ),
}


def _samples(job: Job) -> dict[str, Tensor]:
    """Prompts [1, T] of which the last tokens are compared: one inside the training length, one beyond it."""
    length = (job.patch.train_length if job.patch else trained_on(job.model.config)) or TOKENS
    limit = longest(job.model)
    lengths = {"inside": min(TOKENS, length)}
    if length <= LONGEST and (limit is None or length + TOKENS <= limit):
        lengths["beyond"] = length + TOKENS
    ids = _ids(job.tokenizer, job.model, max(lengths.values()))
    return {where: ids[:, :tokens].to(job.model.device) for where, tokens in lengths.items()}


def _ids(tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel, length: int) -> Tensor:
    """So many tokens of real text; of random ones where no tokenizer tells what is real."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer is None:
        return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    text = next(read_documents(PYTHON_DOCS)).text[: 16 * length]
    ids = torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:length]])
    if int(ids.max()) >= vocabulary:
        raise FarspanError("the tokenizer knows more tokens than the model; give the model its own tokenizer")
    return ids


def _check_tokenizer(job: Job, again: PreTrainedTokenizerBase | None) -> None:
    if again is None or job.tokenizer is None:
        return
    text = next(read_documents(PYTHON_DOCS)).text[: 16 * TOKENS]
    if again(text)["input_ids"] != job.tokenizer(text)["input_ids"]:
        raise ProofError("the tokenizer does not read text as before once it is saved; nothing was written")


def _check(proofs: dict[str, Proof], format: str) -> None:
    for where, proof in proofs.items():
        if not proof.holds:
            raise ProofError(
                f"the {format} export differs from the live model by {proof.max_abs_logit:.2g} in a logit {where} the "
                f"training length (allowed {proof.tolerance:.2g}), so nothing was written; use --format live"
            )


def _origin(job: Job) -> str:
    return (job.patch.for_others().name if job.patch else "") or job.source.name


def _card(job: Job, done: Exported) -> str:
    """The README of what was written: what it is, who can run it, and the proof."""
    form = FORMATS[done.format]
    lines = [f"# {Path(_origin(job)).name}, {done.format}", "", *_contents(job), ""]
    lines += [f"Runs in: {form.engines}.", "", "```", form.how.format(folder=done.folder.name), "```", ""]
    lines += ["## Proof", "", "Read again after it was written, against the live model, on text:", ""]
    lines += [
        "| training length | tokens | max abs Δlogit | allowed | KL, nats | same argmax |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {where} | {proof.tokens} | {proof.max_abs_logit:.2g} | {proof.tolerance:.2g} | {proof.kl:.2g} | "
        f"{proof.same_argmax:.1%} |"
        for where, proof in done.proofs.items()
    ]
    if rounding := max(proof.rounding for proof in done.proofs.values()):
        lines += ["", f"The model magnifies rounding: float32 itself moves these logits by up to {rounding:.2g}."]
    lines += [
        "",
        "## Again",
        "",
        "```",
        f"farspan export {job.source.name} -o {done.folder.name} --format {done.format}{_dtype_option(job)}",
        "```",
        "",
    ]
    return "\n".join(lines)


def _dtype_option(job: Job) -> str:
    return "" if job.dtype == torch.float32 else f" --dtype {str(job.dtype).removeprefix('torch.')}"


def _contents(job: Job) -> list[str]:
    if job.patch is None:
        return [f"{_origin(job)} as it is, without a patch."]
    patch = job.patch
    lines = [
        f"{_origin(job)}, extended from {patch.train_length:,} to {patch.target:,} tokens by the method "
        f"`{patch.method}` of farspan."
    ]
    for part in patch_parts(patch):
        lines += ["", f"{part[0].upper()}{part[1:]}."]
    return lines
