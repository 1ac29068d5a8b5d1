"""Train byte-level tokenizers, and fingerprint any tokenizer, so that packed tokens name theirs.

Digits are split one by one, so that a number costs the same tokens in any context. Every byte has a
token, so that any text is encoded without loss.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import check_links, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"  # the bos, eos and pad token
DECISION = "begins_texts"  # attribute of a tokenizer: whether texts begin with its token
MIN_VOCABULARY = 257  # every byte, and END
WORD_BOUNDARY = re.compile(r"\w(?= \w)")
PIECE = 1 << 20  # characters that are encoded at once: each of their tokens takes 500 bytes then
CONTEXT = 1024  # characters before a piece that are encoded with it
FILES = ("tokenizer.json", "tokenizer_config.json")


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without special ones."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocabulary` tokens.

    The same texts in the same order give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < MIN_VOCABULARY:
        raise FarspanError(
            f"a vocabulary of {vocabulary} cannot hold all bytes and {END}; "
            f"use at least {MIN_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split_of_single_digits()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_nonempty(texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )


def split_of_single_digits() -> Any:
    """The pre-tokenizer of GPT-2, for which every digit is a word of its own before that."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _nonempty(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts that are not empty; raise if there are none."""
    empty = True
    for text in texts:
        if text:
            empty = False
            yield text
    if empty:
        raise FarspanError(
            "there is no text to train a tokenizer on; give at least one document that is not empty"
        )


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the rules that turn text into tokens.

    Padding and truncation are excluded, because calling the tokenizer changes them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        rules = json.loads(backend.to_str())
        rules.pop("padding", None)
        rules.pop("truncation", None)
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def encode_pieces(tokenizer: Any, text: str) -> Iterator[np.ndarray]:
    """The tokens of a text without special ones, int32, in consecutive pieces if it is long.

    Tokenizers also split between words, so pieces that end there have the tokens of the whole text.
    A piece is encoded with some text before it, whose tokens are dropped: a tokenizer may treat the
    beginning of a text as a word of its own.
    """
    ends = [len(text)]
    if getattr(tokenizer, "is_fast", False):
        ends = [_piece_end(text, stop) for stop in range(PIECE, len(text), PIECE)] + ends
    start = 0
    for end in dict.fromkeys(ends):
        before = max(0, start - CONTEXT)
        options = {"return_offsets_mapping": True} if before < start else {}
        encoded = tokenizer(text[before:end], add_special_tokens=False, verbose=False, **options)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        if options:
            offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64)
            ids = ids[offsets[:, 0] >= start - before]
        yield ids
        start = end


def _piece_end(text: str, near: int) -> int:
    """The next place between two words, or `near` itself in text without spaces."""
    boundary = WORD_BOUNDARY.search(text, near, near + PIECE // 2)
    return boundary.start() + 1 if boundary else near


def adds_begin_of_text(tokenizer: Any) -> bool:
    """Whether the tokenizer itself begins a text with its begin-of-text token."""
    token = tokenizer.bos_token_id
    return token is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [token]


def adds_end_of_text(tokenizer: Any) -> bool:
    """Whether the tokenizer itself ends a text with its end-of-text token."""
    token = tokenizer.eos_token_id
    return token is not None and tokenizer("a", verbose=False)["input_ids"][-1:] == [token]


def add_begin_of_text(tokenizer: Any, adds: bool) -> None:
    """Make a tokenizer begin every text with its begin-of-text token, or not.

    Its rules stay untouched where it does so already.
    """
    tokenizer.init_kwargs["add_bos_token"] = adds
    if tokenizer.bos_token_id is not None and adds_begin_of_text(tokenizer) != adds:
        tokenizer.add_bos_token = adds


def read_tokenizer(
    source: str | Path, trust_remote_code: bool = False, **options: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id, as transformers reads it.

    Without a value for trust_remote_code transformers asks on standard input whether to run code.
    """
    from transformers import AutoTokenizer

    if Path(source).is_dir():
        check_links(Path(source))
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer files that exist in a folder."""
    return [folder / name for name in FILES if (folder / name).exists()]


def check_tokenizer(folder: Path) -> None:
    """Raise if a tokenizer file is broken.

    Call this only after transformers failed to load the tokenizer: a full check is slow.
    """
    from tokenizers import Tokenizer

    for file in tokenizer_files(folder):
        read_json(file)
        if file.name == FILES[0]:
            try:
                Tokenizer.from_file(str(file))
            except Exception as error:  # tokenizers raises plain Exception
                raise CorruptError(
                    f"{file} is not a valid tokenizer ({first_line(error)}); "
                    "download or export it again"
                ) from None
