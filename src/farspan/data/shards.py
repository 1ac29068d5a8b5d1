"""Packed token shards on disk: text is tokenized once and then read at any offset.

A folder holds `tokens-00000.safetensors`, … and `manifest.json`. A shard has `tokens`, in which an
end-of-text token follows every document, and `ends`, the offset at which each document ends. No
document spans two shards, so a shard is either complete or absent, and interrupted packing resumes
after the last complete shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from farspan.data.documents import Document
from farspan.data.tokens import fingerprint
from farspan.errors import CorruptError, FarspanError
from farspan.files import (
    check_absent,
    check_safetensors,
    read_json,
    sha256_of,
    write_bytes,
    write_json,
)
from farspan.signals import end_with_parent

FORMAT = 1
MANIFEST = "manifest.json"
NAME = "tokens-{:05d}.safetensors"
DTYPES = {"uint16": "U16", "uint32": "U32", "int64": "I64"}  # numpy name: safetensors name
BATCH = 1 << 20  # characters tokenized at once

Sized = TypeVar("Sized", str, np.ndarray)


@dataclass(frozen=True)
class Shard:
    name: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds and how it was packed.

    Packing resumes only if all fields but the last two match.
    """

    format: int
    tokenizer: str
    eos: int
    vocabulary: int
    dtype: str
    source: str
    shard_tokens: int
    complete: bool
    shards: tuple[Shard, ...]


class Shards:
    """The packed stream of a folder, memory-mapped; a pickled copy maps the same files again."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = Path(folder).absolute(), manifest
        self._mapped = [
            _memory_map(self.folder / shard.name, shard, manifest.dtype)
            for shard in manifest.shards
        ]
        self._borders = list(accumulate((shard.tokens for shard in manifest.shards), initial=0))

    def __reduce__(self) -> Any:
        return Shards, (self.folder, self.manifest)

    @property
    def fingerprint(self) -> str:
        return self.manifest.tokenizer

    @property
    def eos(self) -> int:
        return self.manifest.eos

    @property
    def tokens(self) -> int:
        return self._borders[-1]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.manifest.shards)

    @cached_property
    def ends(self) -> np.ndarray:
        """The offset just after each document's end-of-text token: [documents] int64."""
        return np.concatenate(
            [ends + border for (_, ends), border in zip(self._mapped, self._borders, strict=False)]
        )

    def read(self, start: int, length: int) -> np.ndarray:
        """Read `length` tokens from `start`, across shard borders: [length] int64."""
        if start < 0 or length < 0 or start + length > self.tokens:
            raise IndexError(
                f"tokens {start} to {start + length} are out of range: {self.folder} has "
                f"{self.tokens} tokens"
            )
        tokens = np.empty(length, np.int64)
        filled = 0
        number = bisect_right(self._borders, start) - 1
        while filled < length:
            offset = start + filled - self._borders[number]
            piece = self._mapped[number][0][offset : offset + length - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return tokens


def open_shards(folder: Path, tokenizer: Any = None) -> Shards:
    """Open a folder that `pack` completed; check all SHA-256 sums, and the tokenizer if given."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if not manifest.complete:
        raise FarspanError(
            f"{folder} is not packed completely (it has {len(manifest.shards)} complete shards); "
            "pack the same text into it again to resume"
        )
    if tokenizer is not None:
        _check_tokenizer(folder, manifest, fingerprint(tokenizer))
    for damage in _find_damage(folder, manifest.shards):
        if damage:
            raise CorruptError(f"{damage}; remove {folder} and pack it again, or download it again")
    return Shards(folder, manifest)


def pack(
    documents: Iterable[Document],
    tokenizer: Any,
    folder: Path,
    *,
    source: str = "",
    processes: int = 1,
    shard_tokens: int = 1 << 26,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Shards:
    """Tokenize documents into shards of at least `shard_tokens` tokens (the last may be smaller).

    Empty documents are left out. The bytes written depend neither on the number of processes nor on
    how often packing was interrupted and resumed. `progress` is called after every batch with the
    total number of tokens.
    """
    folder = Path(folder)
    encode = _Encoder.of(tokenizer)
    manifest = _resume(folder, _new_manifest(tokenizer, source, shard_tokens))
    if manifest.complete:
        return open_shards(folder, tokenizer)
    texts: Iterator[str] = (document.text for document in documents if document.text)
    texts = _skip_packed(texts, sum(shard.documents for shard in manifest.shards), folder, source)
    packed_tokens = sum(shard.tokens for shard in manifest.shards)
    with closing(_encode_batches(_group(texts, BATCH), encode, processes)) as batches:
        encoded = _report_progress(batches, packed_tokens, progress)
        for content in _group(encoded, shard_tokens):
            manifest = _add_shard(folder, manifest, content)
    if not manifest.shards:
        raise FarspanError(
            f"{source or 'the source'} has no text to pack; use documents that are not empty"
        )
    manifest = replace(manifest, complete=True)
    _write_manifest(folder, manifest)
    return Shards(folder, manifest)


def _new_manifest(tokenizer: Any, source: str, shard_tokens: int) -> Manifest:
    if tokenizer.eos_token_id is None:
        raise FarspanError(
            "the tokenizer has no end-of-text token to separate documents; set its eos_token"
        )
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    return Manifest(
        format=FORMAT,
        tokenizer=fingerprint(tokenizer),
        eos=tokenizer.eos_token_id,
        vocabulary=vocabulary,
        dtype="uint16" if vocabulary <= 1 << 16 else "uint32",
        source=source,
        shard_tokens=shard_tokens,
        complete=False,
        shards=(),
    )


def _resume(folder: Path, new: Manifest) -> Manifest:
    """The new manifest, or that of the folder with its complete shards; refuse other settings."""
    leftovers = chain(folder.glob(".tokens-*.safetensors.*"), folder.glob(f".{MANIFEST}.*"))
    for file in leftovers:  # of a killed process
        file.unlink(missing_ok=True)
    if not (folder / MANIFEST).exists():
        check_absent(folder)
        return new
    manifest = _read_manifest(folder)
    _check_tokenizer(folder, manifest, new.tokenizer)
    for name in ("eos", "vocabulary", "dtype", "source", "shard_tokens"):
        old_value, new_value = getattr(manifest, name), getattr(new, name)
        if old_value != new_value:
            raise FarspanError(
                f"{folder} was packed with {name} {old_value!r} and cannot be resumed with "
                f"{new_value!r}; choose another folder"
            )
    if manifest.complete:
        return manifest
    damage = _find_damage(folder, manifest.shards)
    intact = takewhile(lambda pair: not pair[1], zip(manifest.shards, damage, strict=True))
    return replace(manifest, shards=tuple(shard for shard, _ in intact))


def _check_tokenizer(folder: Path, manifest: Manifest, used: str) -> None:
    if manifest.tokenizer != used:
        raise FarspanError(
            f"{folder} was packed with the tokenizer {manifest.tokenizer[:12]} and this one is "
            f"{used[:12]}; use the tokenizer it was packed with, or pack the text again into "
            "another folder"
        )


def _skip_packed(texts: Iterator[str], count: int, folder: Path, source: str) -> Iterator[str]:
    """The texts after the first `count`, which are packed already."""
    for number in range(count):
        if next(texts, None) is None:
            raise FarspanError(
                f"{folder} has {count} documents packed already and {source or 'the source'} now "
                f"has only {number}; use the documents it was packed from, or choose another folder"
            )
    return texts


@dataclass(frozen=True)
class _Encoder:
    """Encodes texts and appends end-of-text tokens: all that a worker needs of a tokenizer."""

    rules: str
    eos: int

    @classmethod
    def of(cls, tokenizer: Any) -> _Encoder:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise FarspanError(
                f"{type(tokenizer).__name__} is a slow tokenizer; use its fast version to pack text"
            )
        return cls(backend.to_str(), tokenizer.eos_token_id)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.rules)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # A text that contains the end-of-text string must not end a document.
        tokenizer.encode_special_tokens = True
        return tokenizer

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self.eos], np.uint32) for encoding in encodings]


def _encode_batches(
    batches: Iterable[list[str]], encode: _Encoder, processes: int
) -> Generator[list[np.ndarray]]:
    """Encode batches in order, with at most two per process in flight, which bounds memory."""
    if processes <= 1:
        yield from map(encode, batches)
        return
    # Not fork: the threads of torch and tokenizers do not survive it.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (encode,))
    pending: deque[Future[list[np.ndarray]]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) == 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise FarspanError(
            f"one of the {processes} tokenizer processes died, out of memory or because the script "
            "that calls pack has no `if __name__ == '__main__':`; fix that and pack again, or use "
            "one process"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(encode: _Encoder) -> None:
    global _encode
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()
    _encode = encode


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    return _encode(texts)


_encode: Callable[[list[str]], list[np.ndarray]]  # in a worker


def _report_progress(
    batches: Iterable[list[np.ndarray]], tokens: int, progress: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Yield the documents of all batches; report the total number of tokens after each batch."""
    for batch in batches:
        yield from batch
        tokens += sum(map(len, batch))
        progress(tokens)


def _group(items: Iterable[Sized], size: int) -> Iterator[list[Sized]]:
    """Group consecutive items; a group ends once the lengths of its items add up to `size`."""
    group: list[Sized] = []
    length = 0
    for item in items:
        group.append(item)
        length += len(item)
        if length >= size:
            yield group
            group, length = [], 0
    if group:
        yield group


def _add_shard(folder: Path, manifest: Manifest, documents: list[np.ndarray]) -> Manifest:
    from safetensors.numpy import save

    if not manifest.shards:
        _write_manifest(folder, manifest)  # before the first shard, so that packing can resume
    tokens = np.concatenate(documents).astype(manifest.dtype)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    content = save({"tokens": tokens, "ends": ends})
    name = NAME.format(len(manifest.shards))
    shard = Shard(name, len(tokens), len(documents), hashlib.sha256(content).hexdigest())
    write_bytes(folder / name, content)
    manifest = replace(manifest, shards=(*manifest.shards, shard))
    _write_manifest(folder, manifest)
    return manifest


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, asdict(manifest))


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    value = read_json(path)
    if value.get("format") != FORMAT:
        raise FarspanError(
            f"{path} has format {value.get('format')} and farspan reads format {FORMAT}; "
            "pack the text again"
        )
    try:
        shards = tuple(_check_types(Shard(**shard)) for shard in value["shards"])
        manifest = _check_types(Manifest(**{**value, "shards": shards}))
        valid = manifest.dtype in ("uint16", "uint32") and bool(shards or not manifest.complete)
        for number, shard in enumerate(shards):
            valid &= shard.name == NAME.format(number) and shard.tokens > 0 and shard.documents > 0
    except (TypeError, KeyError):
        valid = False
    if not valid:
        raise CorruptError(
            f"{path} is not a valid manifest of packed tokens; "
            f"remove {folder} and pack the text again"
        )
    return manifest


def _check_types(entry: Any) -> Any:
    """The entry unchanged; raise TypeError if a field does not have its annotated type."""
    for field in fields(entry):
        if type(getattr(entry, field.name)).__name__ != str(field.type).partition("[")[0]:
            raise TypeError(field.name)
    return entry


def _find_damage(folder: Path, shards: tuple[Shard, ...]) -> list[str]:
    """What is wrong with each shard; empty if it is intact.

    Threads hash the files in parallel, because hashing is slower than most disks.
    """

    def damage(shard: Shard) -> str:
        path = folder / shard.name
        if not path.is_file():
            return f"{path} is listed in {MANIFEST} but missing"
        if sha256_of(path) != shard.sha256:
            return f"{path} is damaged: its SHA-256 differs from {MANIFEST}"
        return ""

    with ThreadPoolExecutor() as threads:
        return list(threads.map(damage, shards))


def _memory_map(path: Path, shard: Shard, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and the ends of a shard, mapped from its file."""
    check_safetensors(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))

    def tensor(name: str, dtype: str, count: int) -> np.ndarray:
        entry = header.get(name, {})
        if entry.get("dtype") != DTYPES[dtype] or entry.get("shape") != [count]:
            raise CorruptError(
                f"{path} does not have {count} {name} of type {dtype} as {MANIFEST} says; "
                "pack the text again"
            )
        return np.asarray(
            np.memmap(path, dtype, "r", 8 + length + entry["data_offsets"][0], (count,))
        )

    return tensor("tokens", dtype, shard.tokens), tensor("ends", "int64", shard.documents)
