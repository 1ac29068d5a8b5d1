"""Tokenizers of our own, and the name by which packed tokens remember whose they are.

Digits are split one by one, so that a number costs the same tokens wherever it stands; every byte has a token, so
that any text comes back whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"  # begins, ends and pads
SMALLEST = 257  # every byte, and END
FILES = ("tokenizer.json", "tokenizer_config.json")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocabulary` tokens; the same texts in the same order give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < SMALLEST:
        raise FarspanError(
            f"a vocabulary of {vocabulary} has no room for all bytes and {END}; ask for {SMALLEST} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def _some(texts: Iterable[str]) -> Iterator[str]:
    """The texts that are not empty, of which there must be one."""
    found = False
    for text in texts:
        if text:
            found = True
            yield text
    if not found:
        raise FarspanError("there is no text to train a tokenizer on; give one document or more that is not empty")


def fingerprint(tokenizer: Any) -> str:
    """A SHA-256 of how text becomes tokens. Padding and truncation are left out, for mere use sets them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        rules = json.loads(backend.to_str())
        rules.pop("padding", None)
        rules.pop("truncation", None)
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """Those of a tokenizer's files that a folder has."""
    return [folder / name for name in FILES if (folder / name).exists()]


def check_tokenizer(folder: Path) -> None:
    """Refuse files that are broken. Asked once transformers has stumbled: to read all of them each time takes long."""
    from tokenizers import Tokenizer

    for file in tokenizer_files(folder):
        read_json(file)
        if file.name == FILES[0]:
            try:
                Tokenizer.from_file(str(file))
            except Exception as error:  # the class that tokenizers raises has no other name
                why = first_line(error)
                raise CorruptError(f"{file} holds no tokenizer ({why}); fetch or export it again") from None
