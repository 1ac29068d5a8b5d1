"""Packed token shards on disk: text is tokenized once, and then read at any place without loading it.

A folder holds `tokens-00000.safetensors`, … and `manifest.json`. A shard has `tokens`, every document followed by one
end-of-text token, and `ends`, where each document ends in it. No document spans two shards, so a shard is finished or
absent, and packing that was killed goes on after the last finished one.
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
from farspan.files import check_free, check_safetensors, read_json, sha256_of, write_bytes, write_json
from farspan.signals import end_with_parent

FORMAT = 1
MANIFEST = "manifest.json"
NAME = "tokens-{:05d}.safetensors"
DTYPES = {"uint16": "U16", "uint32": "U32", "int64": "I64"}  # as numpy and as safetensors call them
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
    """What a folder holds and how it was made; all but the last two fields must agree for packing to go on."""

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
    """The packed stream of a folder, mapped into memory. A copy sent to another process maps the same files again."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = Path(folder).absolute(), manifest
        self._mapped = [_map(self.folder / shard.name, shard, manifest.dtype) for shard in manifest.shards]
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
        """Where each document ends in the stream, its end-of-text token included: [documents] int64."""
        return np.concatenate([ends + border for (_, ends), border in zip(self._mapped, self._borders, strict=False)])

    def read(self, start: int, length: int) -> np.ndarray:
        """`length` tokens of the stream from `start` on, across the borders of shards: [length] int64."""
        if start < 0 or length < 0 or start + length > self.tokens:
            raise IndexError(f"tokens {start} to {start + length} are not among the {self.tokens} of {self.folder}")
        result = np.empty(length, np.int64)
        filled = 0
        number = bisect_right(self._borders, start) - 1
        while filled < length:
            inside = start + filled - self._borders[number]
            piece = self._mapped[number][0][inside : inside + length - filled]
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return result


def open_shards(folder: Path, tokenizer: Any = None) -> Shards:
    """The shards of a folder that `pack` finished, each checked against its sum, and all against the tokenizer."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if not manifest.complete:
        raise FarspanError(
            f"{folder} is not packed to its end (it has {len(manifest.shards)} finished shards); "
            "pack the same text into it again, which goes on from there"
        )
    if tokenizer is not None:
        _check_tokenizer(folder, manifest, fingerprint(tokenizer))
    for damage in _damages(folder, manifest.shards):
        if damage:
            raise CorruptError(f"{damage}; remove {folder} and pack it again, or fetch it again")
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
    """Tokenize documents into shards of at least `shard_tokens` tokens (the last may be smaller); empty ones are left
    out. The bytes do not depend on the number of processes, nor on how often packing was killed and called again.

    `progress` is told, now and then, how many tokens there are so far.
    """
    folder = Path(folder)
    encode = _Encoder.of(tokenizer)
    manifest = _begin(folder, _plan(tokenizer, source, shard_tokens))
    if manifest.complete:
        return open_shards(folder, tokenizer)
    texts: Iterator[str] = (document.text for document in documents if document.text)
    texts = _after(texts, sum(shard.documents for shard in manifest.shards), folder, source)
    so_far = sum(shard.tokens for shard in manifest.shards)
    with closing(_encoded(_grouped(texts, BATCH), encode, processes)) as encoded:
        for content in _grouped(_told(encoded, so_far, progress), shard_tokens):
            manifest = _add_shard(folder, manifest, content)
    if not manifest.shards:
        raise FarspanError(f"{source or 'the source'} holds no text to pack; give documents that are not empty")
    manifest = replace(manifest, complete=True)
    _write_manifest(folder, manifest)
    return Shards(folder, manifest)


def _plan(tokenizer: Any, source: str, shard_tokens: int) -> Manifest:
    if tokenizer.eos_token_id is None:
        raise FarspanError("the tokenizer has no end-of-text token to put between documents; set its eos_token")
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


def _begin(folder: Path, plan: Manifest) -> Manifest:
    """The plan with the shards that are finished already; refuses a folder that was packed by another plan."""
    for litter in chain(folder.glob(".tokens-*.safetensors.*"), folder.glob(f".{MANIFEST}.*")):  # of a killed process
        litter.unlink(missing_ok=True)
    if not (folder / MANIFEST).exists():
        check_free(folder)
        return plan
    manifest = _read_manifest(folder)
    _check_tokenizer(folder, manifest, plan.tokenizer)
    for name in ("eos", "vocabulary", "dtype", "source", "shard_tokens"):
        there, here = getattr(manifest, name), getattr(plan, name)
        if there != here:
            raise FarspanError(
                f"{folder} was begun with {name} {there!r} and cannot go on with {here!r}; choose another folder"
            )
    if manifest.complete:
        return manifest
    whole = takewhile(lambda pair: not pair[1], zip(manifest.shards, _damages(folder, manifest.shards), strict=True))
    return replace(manifest, shards=tuple(shard for shard, _ in whole))


def _check_tokenizer(folder: Path, manifest: Manifest, used: str) -> None:
    if manifest.tokenizer != used:
        raise FarspanError(
            f"{folder} was packed with the tokenizer {manifest.tokenizer[:12]} and this one is {used[:12]}; "
            "use the tokenizer it was packed with, or pack the text again into another folder"
        )


def _after(texts: Iterator[str], count: int, folder: Path, source: str) -> Iterator[str]:
    """The texts after the first `count`, which are packed already."""
    for number in range(count):
        if next(texts, None) is None:
            raise FarspanError(
                f"{folder} has {count} documents packed already and {source or 'the source'} now gives only {number}; "
                "give the documents it was begun with, or choose another folder"
            )
    return texts


@dataclass(frozen=True)
class _Encoder:
    """Texts to tokens, each followed by the end of text: all that a worker needs to know of a tokenizer."""

    rules: str
    eos: int

    @classmethod
    def of(cls, tokenizer: Any) -> _Encoder:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise FarspanError(f"{type(tokenizer).__name__} is a slow tokenizer; load its fast version to pack text")
        return cls(backend.to_str(), tokenizer.eos_token_id)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.rules)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # text that spells an end of text does not end a document
        return tokenizer

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self.eos], np.uint32) for encoding in encodings]


def _encoded(batches: Iterable[list[str]], encode: _Encoder, processes: int) -> Generator[list[np.ndarray]]:
    """Batches in their order; no more than two a process are under way, so memory stays bounded."""
    if processes <= 1:
        yield from map(encode, batches)
        return
    # Not by fork: the threads of torch and of tokenizers would not live on in the copy.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _start_worker, (encode,))
    waiting: deque[Future[list[np.ndarray]]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) == 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise FarspanError(
            f"one of the {processes} processes that tokenize died, for want of memory or because the script that calls "
            "pack has no `if __name__ == '__main__':`; mend that and pack again, or use one process"
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


def _told(batches: Iterable[list[np.ndarray]], so_far: int, progress: Callable[[int], None]) -> Iterator[np.ndarray]:
    """The documents of all batches, telling after each batch how many tokens there are so far."""
    for batch in batches:
        yield from batch
        so_far += sum(map(len, batch))
        progress(so_far)


def _grouped(items: Iterable[Sized], size: int) -> Iterator[list[Sized]]:
    """Consecutive items in groups: a group is closed once its items are `size` long together."""
    group: list[Sized] = []
    held = 0
    for item in items:
        group.append(item)
        held += len(item)
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


def _add_shard(folder: Path, manifest: Manifest, documents: list[np.ndarray]) -> Manifest:
    from safetensors.numpy import save

    if not manifest.shards:
        _write_manifest(folder, manifest)  # before the first shard, so that whoever finds one knows whose it is
    tokens = np.concatenate(documents).astype(manifest.dtype)
    content = save({"tokens": tokens, "ends": np.cumsum([len(document) for document in documents], dtype=np.int64)})
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
        raise FarspanError(f"{path} has format {value.get('format')} and not {FORMAT}; pack the text again")
    try:
        shards = tuple(_checked(Shard(**shard)) for shard in value["shards"])
        manifest = _checked(Manifest(**{**value, "shards": shards}))
        right = manifest.dtype in ("uint16", "uint32") and bool(shards or not manifest.complete)
        for number, shard in enumerate(shards):
            right &= shard.name == NAME.format(number) and shard.tokens > 0 and shard.documents > 0
    except (TypeError, KeyError):
        right = False
    if not right:
        raise CorruptError(f"{path} is no manifest of packed tokens; remove {folder} and pack the text again")
    return manifest


def _checked(entry: Any) -> Any:
    """The same, when each field has the type that its annotation names."""
    for field in fields(entry):
        if type(getattr(entry, field.name)).__name__ != str(field.type).partition("[")[0]:
            raise TypeError(field.name)
    return entry


def _damages(folder: Path, shards: tuple[Shard, ...]) -> list[str]:
    """What is wrong with each shard, or nothing; read by several threads, for hashing is slower than most disks."""

    def damage(shard: Shard) -> str:
        path = folder / shard.name
        if not path.is_file():
            return f"{path} is named by {MANIFEST} but missing"
        if sha256_of(path) != shard.sha256:
            return f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}"
        return ""

    with ThreadPoolExecutor() as threads:
        return list(threads.map(damage, shards))


def _map(path: Path, shard: Shard, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and the ends of a shard, where they lie in its file."""
    check_safetensors(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))

    def tensor(name: str, dtype: str, count: int) -> np.ndarray:
        entry = header.get(name, {})
        if entry.get("dtype") != DTYPES[dtype] or entry.get("shape") != [count]:
            raise CorruptError(f"{path} has no {count} {name} of type {dtype}, as {MANIFEST} says; pack the text again")
        return np.asarray(np.memmap(path, dtype, "r", 8 + length + entry["data_offsets"][0], (count,)))

    return tensor("tokens", dtype, shard.tokens), tensor("ends", "int64", shard.documents)
