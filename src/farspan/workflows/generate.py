"""`farspan generate`: stream the continuation of a prompt, with any model that farspan loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from farspan.attention import caches
from farspan.attention.model_facts import max_positions, probe_or_none
from farspan.batching import failure_reason
from farspan.begin_of_text import load_with_begin_of_text
from farspan.checkpoints import quiet
from farspan.deprecation import renamed_arguments
from farspan.diagnosis.curves import check_finite
from farspan.errors import FarspanError
from farspan.evals.decoding import default_generation_config, encode_prompt, end_tokens
from farspan.loading import resolve_device
from farspan.model_objects import ModelLike, accepts_model_objects
from farspan.progress import Progress, Say, ignore, silent

MIN_TEMPERATURE = 1e-6  # logits divided by less may overflow


def read_prompt(file: Path) -> str:
    """The text of a prompt file."""
    if not file.is_file():
        raise FarspanError(f"{file} is not a file; give a text file, or --prompt TEXT")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FarspanError(
            f"{file} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from None


@renamed_arguments(source="model", tokens="max_new_tokens")
@accepts_model_objects
def generate(
    model: ModelLike,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    position: str | None = None,
    bos: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    say: Say = ignore,
) -> Iterator[str]:
    """Yield the continuation of a prompt in pieces of text.

    temperature: 0 is greedy decoding.
    bos: whether the prompt begins with a begin-of-text token: yes, no, or auto, by the model's
        metadata, and where they are silent by its loss.

    >>> len("".join(farspan.generate("nope-twin", "The pass key is", max_new_tokens=2))) > 0
    True
    """
    _check_settings(prompt, max_new_tokens, temperature, seed)
    loaded, tokenizer, begin = load_with_begin_of_text(
        model,
        bos,
        position=position,
        device=resolve_device(device),
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    for text in begin.notes:
        say(text)
    ids = torch.tensor([encode_prompt(tokenizer, prompt)], device=loaded.device)
    length = ids.shape[1]
    limit = max_positions(loaded.config, probe_or_none(loaded))
    if limit is not None and length + max_new_tokens - 1 > limit:  # the last one is not read
        raise FarspanError(
            f"the prompt has {length} tokens, {max_new_tokens} more are requested, and the "
            f"position table of {model} has {limit} rows; shorten the prompt, or lower "
            "--max-new-tokens"
        )
    ends = end_tokens(loaded, tokenizer)
    options = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": max_new_tokens,
        "do_sample": temperature > 0,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}  # not transformers' top_k of 50
    return _stream(loaded, tokenizer, options, seed, str(model))


def _check_settings(prompt: str, max_new_tokens: int, temperature: float, seed: int) -> None:
    if not prompt:
        raise FarspanError("the prompt is empty; give some text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that are not UTF-8
        raise FarspanError(
            f"the prompt is not UTF-8 text (character {error.start}); convert it to UTF-8"
        ) from None
    if max_new_tokens < 1:
        raise FarspanError(f"--max-new-tokens is {max_new_tokens}; choose 1 or more")
    if not 0 <= temperature < float("inf"):
        raise FarspanError(f"temperature is {temperature:g}; choose 0 for greedy decoding, or more")
    if 0 < temperature < MIN_TEMPERATURE:
        raise FarspanError(
            f"temperature {temperature:g} is too small to divide by; choose 0 for greedy decoding, "
            f"or {MIN_TEMPERATURE:g} or more"
        )
    if not 0 <= seed < 2**64:
        raise FarspanError(f"seed is {seed}; choose it from 0 to 2^64 - 1")


def _stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
    seed: int,
    name: str,
) -> Iterator[str]:
    """Run `model.generate` in a thread, which stops when the caller stops reading."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stopped = threading.Event()
    errors: list[BaseException] = []

    def check_scores(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_finite(model, scores, f"{name} after {ids.shape[1]} tokens")
        return scores

    def stop(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), stopped.is_set(), device=ids.device)

    def run() -> None:
        try:
            with quiet(), default_generation_config(model), torch.random.fork_rng():
                torch.manual_seed(seed)
                model.generate(
                    **options,
                    **caches.cache_options(model),
                    streamer=streamer,
                    logits_processor=LogitsProcessorList([check_scores]),
                    stopping_criteria=StoppingCriteriaList([stop]),
                )
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
            streamer.end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield from filter(None, streamer)
    finally:
        stopped.set()
        thread.join()
    if errors and isinstance(errors[0], IndexError | RuntimeError):
        raise FarspanError(
            f"{name} cannot continue a prompt of {options['input_ids'].shape[1]} tokens "
            f"({failure_reason(errors[0])}); shorten the prompt, or lower --max-new-tokens"
        ) from errors[0]
    if errors:
        raise errors[0]
