"""Models in .gguf files, the format of llama.cpp: their config, weights and tokenizer."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from farspan.checkpoints import MissingModelError, check_report, quiet, readable
from farspan.data.tokens import add_begin_of_text, read_tokenizer, split_of_single_digits
from farspan.errors import CorruptError, FarspanError, first_line
from farspan.gguf_reading import BOS, fast_gguf, read_header, without_vocabulary
from farspan.progress import Progress

USE_CHECKPOINT = "load the checkpoint that it was converted from"
# A factor for each frequency of the rotation, as Llama 3.1 and Phi 3 have them.
FREQUENCY_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
PRE_TOKENIZER = "tokenizer.ggml.pre"
# llama.cpp's names for GPT-2's pre-tokenizer with single digits.
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
LAYER_TENSOR = re.compile(r"blk\.(\d{1,9})\.")


def load_gguf_config(file: Path) -> PreTrainedConfig:
    """The config in the header of a llama.cpp model."""
    header = without_vocabulary(check_gguf(file))
    with quiet(), readable(file, USE_CHECKPOINT), fast_gguf(file, header):
        return _read_gguf_config(file, header)


def _read_gguf_config(file: Path, header: Any) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    _check_rope_base(file, header, config)
    return config


def _check_rope_base(file: Path, header: Any, config: PreTrainedConfig) -> None:
    """Refuse a base of the rotation that transformers does not read, as that of Starcoder 2."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    bases = [kind["rope_theta"] for kind in kinds if "rope_theta" in kind]
    for key, field in header.fields.items():
        if not key.endswith(".rope.freq_base") or not bases:
            continue
        if not any(math.isclose(field.contents(), base, rel_tol=1e-6) for base in bases):
            raise FarspanError(
                f"{file.name} rotates with base {field.contents():,.0f}, and transformers would "
                f"use {bases[0]:,.0f}; {USE_CHECKPOINT}"
            )


def load_gguf(
    file: Path,
    dtype: torch.dtype | str | None,
    device: str | torch.device | None,
    progress: Progress,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A llama.cpp model, its weights dequantized, and its tokenizer."""
    header = check_gguf(file)
    # Dequantizing shows a progress bar that no setting turns off.
    with quiet(), readable(file, USE_CHECKPOINT), contextlib.redirect_stderr(io.StringIO()):
        with fast_gguf(file, without_vocabulary(header), progress):
            model, report = AutoModelForCausalLM.from_pretrained(
                file.parent,
                config=_read_gguf_config(file, header),
                trust_remote_code=False,  # of files beside this one
                gguf_file=file.name,
                dtype=dtype or dequantized_dtype(device),
                ignore_mismatched_sizes=True,  # reported, and refused below
                output_loading_info=True,
            )
        check_report(file, model, report)
        _check_biases(file, model, header)
        _forget_quantizer(model)
        tokenizer = _read_tokenizer(file, header)
    return model.to(device).eval() if device else model.eval(), tokenizer


def _check_biases(file: Path, model: PreTrainedModel, header: Any) -> None:
    """Refuse biases of an architecture that transformers builds without them.

    llama.cpp adds those of a llama wherever a file has some; transformers would leave them out.
    """
    biases = [tensor.name for tensor in header.tensors if tensor.name.endswith(".bias")]
    if biases and not any(name.endswith("bias") for name in model.state_dict()):
        raise FarspanError(
            f"{file.name} has {len(biases)} biases, first {biases[0]!r}, and transformers would "
            f"leave them out; {USE_CHECKPOINT}"
        )


def _forget_quantizer(model: PreTrainedModel) -> None:
    """Its weights are dequantized: it can be saved as any other model, which transformers refuses
    as long as it counts as quantized."""
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a file; no weight is read, and none is checked."""
    if not file.is_file():
        raise MissingModelError(f"{file} does not exist; check the path")
    with quiet(), readable(file, USE_CHECKPOINT), contextlib.redirect_stderr(io.StringIO()):
        return _read_tokenizer(file, read_header(file))


def _read_tokenizer(file: Path, header: Any) -> PreTrainedTokenizerBase:
    with fast_gguf(file, header):
        tokenizer = read_tokenizer(file.parent, gguf_file=file.name)
    if (rules := header.fields.get(PRE_TOKENIZER)) and rules.contents() in SINGLE_DIGITS:
        # transformers splits as GPT-2 does, where " 12" is one word
        tokenizer.backend_tokenizer.pre_tokenizer = split_of_single_digits()
    if (adds := header.fields.get(BOS)) is not None:  # transformers does not read it
        add_begin_of_text(tokenizer, bool(adds.contents()))
    return tokenizer


def dequantized_dtype(device: str | torch.device | None) -> torch.dtype:
    """bf16 on a GPU, where SDPA has no float32 kernel for grouped-query attention."""
    return torch.float32 if torch.device(device or "cpu").type == "cpu" else torch.bfloat16


def check_gguf(file: Path) -> Any:
    """The header of a file; refuse what transformers would misread.

    It drops the rope scaling of most architectures silently, and it reads no model without
    rotation.
    """
    if not file.is_file():
        raise MissingModelError(f"{file} does not exist; check the path")
    header = read_header(file)
    try:
        _check_header(file, header)
    except (TypeError, ValueError) as error:  # a value of another type than its key has
        raise CorruptError(
            f"{file} is damaged or no GGUF file ({first_line(error)}); download or export it again"
        ) from None
    return header


def _check_header(file: Path, header: Any) -> None:
    if (scaling := _rope_scaling(header)) is not None:
        raise FarspanError(
            f"{file.name} scales its rotation ({scaling}), and transformers would ignore that; "
            f"{USE_CHECKPOINT}"
        )
    for key, field in header.fields.items():
        if key.endswith(".block_count"):
            _check_layer_count(file, field.contents(), [tensor.name for tensor in header.tensors])
    rotation = header.fields.get("granite.rope.scaling.finetuned")
    if rotation is not None and not rotation.contents():  # so farspan writes NoPE models
        raise FarspanError(
            f"{file.name} is a granite model without rotation, which llama.cpp supports and "
            f"transformers does not; {USE_CHECKPOINT}"
        )


def _rope_scaling(header: Any) -> str | None:
    """The scaling of the rotation that transformers would ignore; None without one."""
    for key, field in header.fields.items():
        scaled = key.endswith(".rope.scaling.type") and field.contents() != "none"
        if scaled and not key.startswith("gpt-oss."):
            return str(field.contents())
        if key.endswith(".rope.scale_linear") and field.contents() != 1:  # of old files
            return f"linear, by {field.contents():g}"
    if any(key.startswith("gemma4.") for key in header.fields):
        return None  # its factors stand for rotation in part, which is in transformers' config
    for tensor in header.tensors:
        if tensor.name in FREQUENCY_FACTORS and (tensor.data != 1).any():
            return f"by its tensor {tensor.name}"
    return None


def _check_layer_count(file: Path, layers: int, names: list[str]) -> None:
    """Refuse a number of layers that does not fit the tensors.

    transformers would make a config of so many layers, and leave out tensors of further ones.
    """
    last = max((int(name[1]) for name in map(LAYER_TENSOR.match, names) if name), default=-1)
    if not last < layers <= max(1, len(names)):
        raise CorruptError(
            f"{file} claims {layers} layers and has {len(names)} tensors of {last + 1} layers; "
            "download or export it again"
        )
