"""The text that a method is fitted on: windows of documents, or rows of a mixture.

A mixture is what a model was pretrained on: weighted sources, packed documents, passkey documents.
Wang 2024 searches scales on such rows. A mixture file is a pretraining recipe, or has the keys of
its [data].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from farspan.data.documents import read_documents, share_text
from farspan.data.windows import Windows, cut_windows, split_windows
from farspan.errors import FarspanError
from farspan.progress import Progress, silent
from farspan.recipe import load_recipe, recipe_keys
from farspan.train.corpus import (
    DataConfig,
    TrainingData,
    matching_files,
    pack_mixture,
    source_files,
)
from farspan.train.pretrain import RECIPE_DIR, PretrainConfig

SEARCH = "search"
SEARCH_SEED = 1 << 20  # seeds of pretraining are smaller
MIXTURES = Path(__file__).parent.parent / "assets" / "recipes" / "mixture"


@dataclass(frozen=True)
class MixtureConfig(DataConfig):
    """A mixture file: [data] of a pretraining recipe, with passkey documents only by request."""

    table: ClassVar[str] = ""
    passkey: float = 0.0


def is_mixture(source: str | Path) -> bool:
    return Path(source).suffix == ".toml"


def find_mixture(file: str | Path) -> Path:
    """The file, or the mixture or pretraining recipe of that name that comes with farspan.

    >>> find_mixture("small-mixture.toml").is_file() and find_mixture("small-nope.toml").is_file()
    True
    """
    candidates = (Path(file), MIXTURES / file, RECIPE_DIR / file)
    return next((path for path in candidates if path.is_file()), Path(file))


def read_mixture(file: str | Path, folder: str = "") -> DataConfig:
    """The mixture in a file, or [data] of a recipe; its texts lie in `folder` if it names none."""
    path = find_mixture(file)
    data: DataConfig
    if "data" in recipe_keys(path, recipe_dir=RECIPE_DIR):
        data = load_recipe(PretrainConfig, path, recipe_dir=RECIPE_DIR).data
    else:
        data = load_recipe(MixtureConfig, path, recipe_dir=RECIPE_DIR)
    return replace(data, folder=data.folder or folder)


def text_files(source: str | Path, folder: str = "") -> list[Path]:
    """The files of a mixture, or the source itself."""
    if not is_mixture(source):
        return [Path(source)]
    by_source = source_files(read_mixture(source, folder))
    return [file for files in by_source.values() for file in files]


def overlapping(first: str | Path, second: str | Path, folder: str = "") -> bool:
    """Whether two texts share a file; files of a mixture that do not exist are not compared."""
    return any(
        share_text(one, other)
        for one in _existing_files(first, folder)
        for other in _existing_files(second, folder)
    )


def _existing_files(source: str | Path, folder: str) -> list[Path]:
    if not is_mixture(source):
        return [Path(source)]
    data = read_mixture(source, folder)
    used = [name for name, each in data.sources.items() if each.weight]
    return [file for name in used for file in matching_files(data, name)]


def describe_search_text(
    source: str | Path, tokenizer: PreTrainedTokenizerBase, packed: bool
) -> dict[str, Any]:
    """For the record: whether it is a mixture or a text, and whether short documents are joined."""
    if is_mixture(source):
        data = read_mixture(source)
        return {
            "source": f"mixture {source}",
            "packed": not data.inside,
            "passkey": data.passkey,
        }
    return {
        "source": f"text {source}",
        "packed": packed and tokenizer.eos_token_id is not None,
    }


def search_text(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    limit: int,
    train_length: int,
    *,
    seed: int = 0,
    packed: bool = True,
    folder: str = "",
    begin: Sequence[int] = (),
    progress: Progress = silent,
) -> Windows:
    """Windows of one text, or rows of a mixture.

    begin: tokens in front of every window, which count in its length.
    packed: documents that are shorter than a window follow one another, and windows tile them; a
        mixture says itself whether its windows lie inside one document.
    """
    if not is_mixture(source):
        documents = read_documents(source)
        return cut_windows(documents, tokenizer, length, limit, join_short=packed, begin=begin)
    data = read_mixture(source, folder)
    packed_data = _pack(data, tokenizer, length, seed, train_length, progress)
    return _rows(packed_data, 0, limit, length, begin)


def split_text(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Mapping[str, int],
    limits: Mapping[str, int],
    train_length: int,
    *,
    seed: int = 0,
    packed: bool = True,
    begin: Sequence[int] = (),
    progress: Progress = silent,
) -> dict[str, Windows]:
    """Windows for the splits of one text or mixture; no two splits share a token.

    Only the search split of a mixture has passkey documents.
    """
    if not is_mixture(source):
        join = SEARCH if packed else None
        documents = read_documents(source)
        return split_windows(documents, tokenizer, lengths, limits, join_short=join, begin=begin)
    data, longest, total = read_mixture(source), max(lengths.values()), sum(limits.values())
    rows = _pack(data, tokenizer, longest, seed, train_length, progress)
    plain = _pack(replace(data, passkey=0.0), tokenizer, longest, seed, train_length, progress)
    available = rows.mixture.rows_before_repetition(total)
    start = limits[SEARCH] - (total - available)  # the other splits are served first
    if start < 1:
        raise FarspanError(
            f"{source} has {available} different windows of {longest} tokens, and the splits take "
            f"at least {total - limits[SEARCH] + 1}; use more text, or a shorter target"
        )
    splits = {SEARCH: _rows(rows, 0, start, lengths[SEARCH], begin)}
    for name in [name for name in lengths if name != SEARCH]:
        splits[name] = _rows(plain, start, limits[name], lengths[name], begin)
        start += limits[name]
    return splits


def _pack(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    seed: int,
    train_length: int,
    progress: Progress,
) -> TrainingData:
    """The mixture in rows of `length` tokens; passkey documents are as long as in pretraining.

    The rows are drawn with another seed than those of pretraining, as in Wang 2024.
    """
    seed += SEARCH_SEED
    return pack_mixture(
        data, tokenizer, length - 1, seed, passkey_length=train_length, progress=progress
    )


def _rows(data: TrainingData, start: int, count: int, length: int, begin: Sequence[int]) -> Windows:
    ids = data.mixture.rows(start, count)[:, : length - len(begin)]
    used: Sequence[dict] = [{"source": name, **facts} for name, facts in data.summary.items()]
    return Windows(ids, tuple(used), ()).starting_with(begin)
