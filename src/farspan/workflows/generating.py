"""`farspan generate`: text after a prompt, piece by piece as it comes, by any model that farspan loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, TextIteratorStreamer

from farspan.diagnosis.curves import check_finite
from farspan.errors import FarspanError
from farspan.evals.decoding import end_tokens, own_settings_set_aside
from farspan.loading import chosen_device, load_for_text, quiet
from farspan.workflows.inspection import longest

COLDEST = 1e-6  # of a temperature: logits divided by it are still numbers


def read_prompt(file: Path) -> str:
    """The text of a prompt file, whole."""
    if not file.is_file():
        raise FarspanError(f"{file} is no file; give the prompt as a text file, or as --prompt TEXT")
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FarspanError(f"{file} is not UTF-8 text (byte {error.start}); convert it to UTF-8") from None


def generate(
    source: str | Path,
    prompt: str,
    *,
    tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    position: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Iterator[str]:
    """At most so many tokens after the prompt, in pieces of text. Temperature 0 takes the likeliest token each time.

    >>> print("".join(farspan.generate("nope-twin", "The pass key is", tokens=8)))
    """
    if not prompt:
        raise FarspanError("the prompt is empty, and a model goes on from something; give some text")
    if tokens < 1:
        raise FarspanError(f"{tokens} tokens are none; ask for 1 or more")
    if not 0 <= temperature < float("inf"):
        raise FarspanError(f"a temperature of {temperature:g} has no meaning; give 0 for the likeliest, or more")
    if 0 < temperature < COLDEST:
        raise FarspanError(
            f"a temperature of {temperature:g} is too small to divide by; give 0 for the likeliest token, or "
            f"{COLDEST:g} or more"
        )
    if not 0 <= seed < 2**64:
        raise FarspanError(f"a seed of {seed} is out of range; give a number from 0 to 2^64 - 1")
    options = {"position": position, "device": chosen_device(device), "trust_remote_code": trust_remote_code}
    model, tokenizer = load_for_text(source, **options)
    asked = tokenizer(prompt, return_tensors="pt", verbose=False).to(model.device)
    length, limit = asked["input_ids"].shape[1], longest(model)
    if limit is not None and length + tokens > limit:
        raise FarspanError(
            f"the prompt has {length} tokens and {tokens} more are asked for, and the position table of {source} ends "
            f"at {limit}; give a shorter prompt, or ask for fewer tokens"
        )
    ends = end_tokens(model, tokenizer)
    given = {
        "input_ids": asked["input_ids"],
        "attention_mask": asked["attention_mask"],
        "max_new_tokens": tokens,
        "do_sample": temperature > 0,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }
    if temperature > 0:
        given |= {"temperature": temperature, "top_k": 0}  # of all tokens, and not of transformers' fifty likeliest
    return _pieces(model, tokenizer, given, seed, str(source))


def _pieces(model: PreTrainedModel, tokenizer, options: dict, seed: int, name: str) -> Iterator[str]:
    """What `model.generate` says, as it says it: it runs in a thread, and stops when nobody listens any more."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    left = threading.Event()
    failed: list[BaseException] = []

    def finite(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_finite(model, scores, f"{name} after {ids.shape[1]} tokens")
        return scores

    def work() -> None:
        try:
            with quiet(), own_settings_set_aside(model), torch.random.fork_rng():
                torch.manual_seed(seed)
                model.generate(
                    **options,
                    streamer=streamer,
                    logits_processor=LogitsProcessorList([finite]),
                    stopping_criteria=StoppingCriteriaList([lambda ids, scores, **_: _all(ids, left.is_set())]),
                )
        except BaseException as error:  # told to the one who listens
            failed.append(error)
            streamer.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from filter(None, streamer)
    finally:
        left.set()
        thread.join()
    if failed:
        raise failed[0]


def _all(ids: torch.Tensor, value: bool) -> torch.Tensor:
    return torch.full((len(ids),), value, device=ids.device)
