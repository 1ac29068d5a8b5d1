"""Training data: text files become a tokenizer and packed tokens (cached), then a mixture."""

from __future__ import annotations

import glob
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import current_process
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from farspan.data.documents import Document, read_documents
from farspan.data.mixture import Mixture, Source
from farspan.data.passkey import PasskeyDocuments
from farspan.data.shards import Shards, pack
from farspan.data.tokens import check_tokenizer, fingerprint, read_tokenizer, train_tokenizer
from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import (
    MANIFEST,
    check_manifest,
    new_folder,
    read_json,
    sha256_of,
    write_json,
    write_manifest,
)
from farspan.progress import Progress, silent
from farspan.train.sharding import processes

TOKENIZER_SAMPLE = 100_000  # characters of a document that a tokenizer is trained on


@dataclass(frozen=True)
class SourceConfig:
    """[data.sources.NAME] Files in the data folder, and their share of the rows."""

    files: str  # a glob pattern
    weight: float  # 0: not used, so that a recipe can drop a source of its base


@dataclass(frozen=True)
class DataConfig:
    """[data]"""

    table: ClassVar[str] = "data."  # where its keys lie in a recipe
    sources: dict[str, SourceConfig]
    folder: str = ""  # default: $FARSPAN_DATA, else ./data
    cache: str = ""  # of tokenizers and packed tokens; default: $FARSPAN_CACHE, ~/.cache/farspan
    tokenizer: str = ""  # a folder with a tokenizer; default: train one on the data
    vocabulary: int = 8192
    tokenizer_megabytes: float = 40.0  # of text that the tokenizer is trained on
    passkey: float = 0.05  # share of rows that begin with a passkey document
    inside: bool = False  # windows lie inside one document instead of being packed
    processes: int = 0  # 0: one per core

    def __post_init__(self):
        for name, source in self.sources.items():
            if not 0 <= source.weight < math.inf:
                raise FarspanError(
                    f"data.sources.{name}.weight is {source.weight:g}; give a number of 0 or more"
                )
        if self.sources and not any(source.weight for source in self.sources.values()):
            raise FarspanError(
                "the weight of every source in data.sources is 0, which means unused; raise one"
            )


@dataclass(frozen=True, eq=False)
class TrainingData:
    tokenizer: PreTrainedTokenizerBase
    mixture: Mixture
    summary: dict[str, Any]  # for the record: source -> files, documents, tokens, share


def prepare_data(
    data: DataConfig, length: int, seed: int, start: str = "", progress: Progress = silent
) -> TrainingData:
    """Tokenizer and packed data for rows of `length` tokens, from the cache if they are there.

    start: a model folder whose tokenizer is used. With several processes the main process does the
    work and the others read its result; runs that share a cache pack one after the other.
    """
    data, cache = _without_unused(data), _cache_folder(data)
    files = source_files(data)
    with processes().main_process_first():
        tokenizer = _tokenizer(data, data.tokenizer or start, files, cache)
    return pack_mixture(data, tokenizer, length, seed, progress=progress)


def pack_mixture(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    seed: int,
    *,
    passkey_length: int = 0,
    progress: Progress = silent,
) -> TrainingData:
    """The mixture in rows of `length` tokens and one, packed with this tokenizer.

    passkey_length: of the longest passkey document; 0: the length of a row.
    """
    data, cache = _without_unused(data), _cache_folder(data)
    files = source_files(data)
    with processes().main_process_first(), _cache_lock(cache):
        workers = data.processes or os.cpu_count() or 1
        shards = {
            name: _packed(name, paths, tokenizer, cache, workers, progress)
            for name, paths in files.items()
        }
    sources = [Source(name, shards[name], source.weight) for name, source in data.sources.items()]
    passkeys = PasskeyDocuments(tokenizer) if data.passkey else None
    mixture = Mixture(
        sources,
        length,
        seed,
        inside=data.inside,
        passkeys=passkeys,
        passkey_share=data.passkey,
        passkey_length=passkey_length,
    )
    return TrainingData(tokenizer, mixture, _summary(sources, files))


def source_files(data: DataConfig) -> dict[str, list[Path]]:
    """The files of every source that is used."""
    return {name: find_files(data, name) for name in _without_unused(data).sources}


def _without_unused(data: DataConfig) -> DataConfig:
    used = {name: source for name, source in data.sources.items() if source.weight}
    return replace(data, sources=used)


def _cache_folder(data: DataConfig) -> Path:
    return Path(data.cache or os.environ.get("FARSPAN_CACHE", "~/.cache/farspan")).expanduser()


def _summary(sources: Sequence[Source], files: dict[str, list[Path]]) -> dict[str, Any]:
    total = sum(source.weight for source in sources)
    return {
        source.name: {
            "files": [path.name for path in files[source.name]],
            "documents": source.shards.documents,
            "tokens": source.shards.tokens,
            "share": source.weight / total,
        }
        for source in sources
    }


def data_folder(configured: str) -> Path:
    """The folder of the text: the configured one, else $FARSPAN_DATA, else ./data."""
    return Path(configured or os.environ.get("FARSPAN_DATA", "data")).expanduser()


def matching_files(data: DataConfig, source: str) -> list[Path]:
    """The files of a source in the data folder, sorted; there may be none."""
    folder = glob.escape(str(data_folder(data.folder)))  # its own brackets are no pattern
    return sorted(map(Path, glob.glob(os.path.join(folder, data.sources[source].files))))


def find_files(data: DataConfig, source: str) -> list[Path]:
    """The files of a source in the data folder, sorted."""
    if not (files := matching_files(data, source)):
        raise FarspanError(
            f"{data_folder(data.folder)} has no {data.sources[source].files} for "
            f"{data.table}sources.{source}; set the folder of the text with "
            f"{data.table}folder=PATH, or FARSPAN_DATA=PATH"
        )
    return files


def _documents(paths: Sequence[Path]) -> Iterator[Document]:
    for path in paths:
        yield from read_documents(path)


def _description(paths: Sequence[Path], cache: Path) -> str:
    """Names, sizes and checksums of files, which identify a corpus."""
    files = [
        part
        for path in paths
        for part in ([path] if path.is_file() else sorted(path.rglob("*")))
        if part.is_file()
    ]
    return " ".join(f"{file.name}:{file.stat().st_size}:{_checksum(file, cache)}" for file in files)


def _checksum(file: Path, cache: Path) -> str:
    """The beginning of a file's SHA-256, which the cache keeps until the file changes.

    Whoever writes to a file changes its ctime, and nobody can set that.
    """
    status = file.stat()
    times = status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
    note = cache / "checksums" / f"{_digest(file.resolve(), status.st_size, *times)}.json"
    if note.exists():
        with suppress(FarspanError):  # damaged: it is written again
            if isinstance(checksum := read_json(note).get("sha256"), str):
                return checksum
    checksum = sha256_of(file)[:16]
    if cache.exists():  # it is created when there is something to keep
        write_json(note, {"sha256": checksum})
    return checksum


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _tokenizer(
    data: DataConfig, source: str, files: dict[str, list[Path]], cache: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder `source`; if that is empty, one trained on the text."""
    if source:
        if not (Path(source) / "tokenizer.json").exists():
            problem = "holds no tokenizer.json" if Path(source).is_dir() else "is not a folder"
            raise FarspanError(
                f"{source} {problem}; give a folder with a tokenizer with data.tokenizer=PATH"
            )
        return _load_tokenizer(Path(source))
    shares = {name: config.weight for name, config in data.sources.items()}
    corpus = [_description(paths, cache) for paths in files.values()]
    folder = (
        cache / f"tokenizer-{data.vocabulary}-{_digest(corpus, shares, data.tokenizer_megabytes)}"
    )
    if not folder.exists():
        tokenizer = train_tokenizer(_sample(data, files), data.vocabulary)
        with _cache_lock(cache):
            if not folder.exists():  # another run may have written the same one meanwhile
                with new_folder(folder) as new:
                    tokenizer.save_pretrained(new)
                    write_manifest(new)
    if (folder / MANIFEST).exists():  # tokenizers of earlier releases have none
        check_manifest(folder)
    return _load_tokenizer(folder)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return read_tokenizer(folder)
    except Exception as error:  # transformers raises errors of many classes
        check_tokenizer(folder)
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CorruptError(
            f"the tokenizer in {folder} cannot be read ({reason}); download or export it again"
        ) from None


def _cache_lock(cache: Path) -> FileLock:
    """The lock of the cache; creates the cache if needed."""
    # A worker of the process that holds the lock would wait forever.
    if getattr(current_process(), "_inheriting", False):
        raise FarspanError(
            "a script that prepares data runs again in each of its workers; put its code under "
            "`if __name__ == '__main__':`, or set data.processes=1"
        )
    cache.mkdir(parents=True, exist_ok=True)
    return FileLock(cache / "lock")


def _sample(data: DataConfig, files: dict[str, list[Path]]) -> Iterator[str]:
    """The beginnings of documents, from every source by its share."""
    total = sum(source.weight for source in data.sources.values())
    for name, source in data.sources.items():
        left = int(data.tokenizer_megabytes * 1e6 * source.weight / total)
        for document in _documents(files[name]):
            yield document.text[: min(left, TOKENIZER_SAMPLE)]
            left -= min(len(document.text), TOKENIZER_SAMPLE)
            if left <= 0:
                break


def _packed(
    name: str,
    paths: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    processes: int,
    progress: Progress,
) -> Shards:
    source = _description(paths, cache)
    folder = cache / f"{name}-{_digest(source, fingerprint(tokenizer))}"
    advance = progress(f"pack {name}", 0)

    def show_tokens(tokens: int) -> None:
        advance(0, f"{tokens / 1e6:.1f}M tokens")

    return pack(
        _documents(paths),
        tokenizer,
        folder,
        source=source,
        processes=processes,
        progress=show_tokens,
    )
