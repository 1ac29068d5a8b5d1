"""The text that a model is trained on: files become a tokenizer and packed tokens, once, and then rows of a mixture."""

from __future__ import annotations

import glob
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from farspan.data.documents import Document, read_documents
from farspan.data.mixture import Mixture, Source
from farspan.data.passkey import Passkeys
from farspan.data.shards import Shards, pack
from farspan.data.tokens import check_tokenizer, fingerprint, train_tokenizer
from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import new_folder
from farspan.progress import Progress, silent
from farspan.train.sharding import processes

SAMPLE = 100_000  # characters of a document that a tokenizer learns from


@dataclass(frozen=True)
class Texts:
    """[data.sources.NAME] Files by pattern inside the data folder, and their share of the rows."""

    files: str
    weight: float  # 0: left out, so that a recipe can do without a source of its base


@dataclass(frozen=True)
class Data:
    """[data]"""

    sources: dict[str, Texts]
    folder: str = ""  # empty: $FARSPAN_DATA, else ./data
    cache: str = ""  # of tokenizers and packed tokens; empty: $FARSPAN_CACHE, else ~/.cache/farspan
    tokenizer: str = ""  # a folder with one; empty: train one on the data
    vocabulary: int = 8192
    tokenizer_megabytes: float = 40.0  # of text that the tokenizer learns from
    passkey: float = 0.05  # share of rows that begin with a passkey document
    inside: bool = False  # windows inside one document, instead of packed
    processes: int = 0  # 0: one a core

    def __post_init__(self):
        for name, texts in self.sources.items():
            if not 0 <= texts.weight < math.inf:
                raise FarspanError(f"data.sources.{name}.weight is {texts.weight:g}; give a number of 0 or more")
        if self.sources and not any(texts.weight for texts in self.sources.values()):
            raise FarspanError("the weight of every source in data.sources is 0, and 0 leaves a source out; raise one")


@dataclass(frozen=True, eq=False)
class Prepared:
    tokenizer: PreTrainedTokenizerBase
    mixture: Mixture
    read: dict[str, Any]  # for the record: source -> documents, tokens, weight


def prepare(data: Data, length: int, seed: int, start: str = "", progress: Progress = silent) -> Prepared:
    """Tokenizer and packed data for rows of `length` tokens, from the cache where they are there already.

    start: a model folder whose tokenizer is taken. With several processes the first one does the work and the others
    find it done; runs that share a cache pack one after the other.
    """
    data = replace(data, sources={name: texts for name, texts in data.sources.items() if texts.weight})
    files = {name: find_files(data, name) for name in data.sources}
    cache = Path(data.cache or os.environ.get("FARSPAN_CACHE", "~/.cache/farspan")).expanduser()
    with processes().main_process_first():
        tokenizer = _tokenizer(data, data.tokenizer or start, files, cache)
        with _alone(cache):
            shards = {
                name: _packed(name, paths, tokenizer, cache, data.processes or os.cpu_count() or 1, progress)
                for name, paths in files.items()
            }
    sources = [Source(name, shards[name], texts.weight) for name, texts in data.sources.items()]
    passkeys = Passkeys(tokenizer) if data.passkey else None
    mixture = Mixture(
        sources,
        length,
        seed,
        inside=data.inside,
        passkeys=passkeys,
        passkey_share=data.passkey,
    )
    total = sum(source.weight for source in sources)
    read = {
        source.name: {
            "files": [path.name for path in files[source.name]],
            "documents": source.shards.documents,
            "tokens": source.shards.tokens,
            "share": source.weight / total,
        }
        for source in sources
    }
    return Prepared(tokenizer, mixture, read)


def data_folder(given: str) -> Path:
    """Where text lies: the folder that is given, else $FARSPAN_DATA, else ./data."""
    return Path(given or os.environ.get("FARSPAN_DATA", "data")).expanduser()


def find_files(data: Data, source: str) -> list[Path]:
    """The files of a source, sorted, from the data folder."""
    folder = data_folder(data.folder)
    pattern = data.sources[source].files
    found = sorted(Path(path) for path in glob.glob(str(folder / pattern)))
    if not found:
        raise FarspanError(
            f"{folder} has no {pattern} for data.sources.{source}; say where the text lies with data.folder=PATH"
        )
    return found


def _documents(paths: Sequence[Path]) -> Iterator[Document]:
    for path in paths:
        yield from read_documents(path)


def _described(paths: Sequence[Path]) -> str:
    """Names, sizes and times: what tells one corpus from another without reading it."""
    files = [part for path in paths for part in ([path] if path.is_file() else sorted(path.rglob("*")))]
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime:.0f}" for file in files)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _tokenizer(data: Data, given: str, files: dict[str, list[Path]], cache: Path) -> PreTrainedTokenizerBase:
    """The one that is given, or one trained on the text."""
    if given:
        if not (Path(given) / "tokenizer.json").exists():
            what = "holds no tokenizer.json" if Path(given).is_dir() else "is no folder"
            raise FarspanError(f"{given} {what}; give one that holds a tokenizer with data.tokenizer=PATH")
        return _given_tokenizer(Path(given))
    shares = {name: texts.weight for name, texts in data.sources.items()}
    corpus = [_described(paths) for paths in files.values()]
    folder = cache / f"tokenizer-{data.vocabulary}-{_digest(corpus, shares, data.tokenizer_megabytes)}"
    if not folder.exists():
        made = train_tokenizer(_sample(data, files), data.vocabulary)
        with _alone(cache):
            if not folder.exists():  # another run may have been quicker; it made the same
                with new_folder(folder) as new:
                    made.save_pretrained(new)
    return AutoTokenizer.from_pretrained(folder)


def _given_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of many classes
        check_tokenizer(folder)
        why = f"{type(error).__name__}: {first_line(error)}"
        raise CorruptError(f"the tokenizer in {folder} cannot be read ({why}); fetch or export it again") from None


def _alone(cache: Path) -> FileLock:
    """A lock of the cache, which is made where there is none."""
    if getattr(current_process(), "_inheriting", False):  # a worker of the one that holds the lock would wait for ever
        raise FarspanError(
            "a script that prepares data runs again in each of its workers; begin its work with "
            "`if __name__ == '__main__':`, or set data.processes=1"
        )
    cache.mkdir(parents=True, exist_ok=True)
    return FileLock(cache / "lock")


def _sample(data: Data, files: dict[str, list[Path]]) -> Iterator[str]:
    """The beginnings of documents, each source by its share."""
    total = sum(texts.weight for texts in data.sources.values())
    for name, texts in data.sources.items():
        left = int(data.tokenizer_megabytes * 1e6 * texts.weight / total)
        for document in _documents(files[name]):
            yield document.text[: min(left, SAMPLE)]
            left -= min(len(document.text), SAMPLE)
            if left <= 0:
                break


def _packed(
    name: str, paths: list[Path], tokenizer: PreTrainedTokenizerBase, cache: Path, processes: int, progress: Progress
) -> Shards:
    source = _described(paths)
    folder = cache / f"{name}-{_digest(source, fingerprint(tokenizer))}"
    advance = progress(f"pack {name}", 0)

    def so_far(tokens: int) -> None:
        advance(0, f"{tokens / 1e6:.1f}M tokens")

    return pack(_documents(paths), tokenizer, folder, source=source, processes=processes, progress=so_far)
