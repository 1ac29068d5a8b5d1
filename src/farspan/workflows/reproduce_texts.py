"""The texts of a study: found, hashed, and cut into windows once per model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from farspan.begin_of_text import load_with_begin_of_text
from farspan.bundled import resolve_bundled
from farspan.data.documents import read_documents
from farspan.data.windows import Windows, cut_windows
from farspan.errors import FarspanError
from farspan.files import sha256_of, weight_files
from farspan.loading import load_config, load_tokenizer
from farspan.methods.fit import search_windows
from farspan.model import FarspanConfig
from farspan.train.metadata import begin_of_text, stated_begin_of_text
from farspan.train.search_text import is_mixture, search_text, text_files
from farspan.workflows.reproduce_study import ReproduceStudy, method_config, method_names


class StudyTexts:
    """The texts of a study, and intermediate results that consecutive cells share.

    Each text is cut into windows of tokens once per model.
    """

    def __init__(self, study: ReproduceStudy):
        self.study = study
        # (model, target, constraint, windows) -> best λ̂, and the seconds that it took
        self.uniform_scales: dict[tuple[str, int, bool, int], tuple[float, float]] = {}
        self._windows: dict[tuple[str | int, ...], Windows] = {}
        self._weight_hashes: dict[Path, list[str]] = {}
        self._begins: dict[Path, tuple[int, ...]] = {}

    def windows(self, file: str, model: str, tokenizer: Any, length: int, limit: int) -> Windows:
        key = (file, model, length, limit)
        if key not in self._windows:
            # Drop the windows of the previous model: its cells are done.
            self._windows = {old: kept for old, kept in self._windows.items() if old[1] == model}
            documents = read_documents(self.study.path(file))
            begin = begin_of_text(tokenizer)
            self._windows[key] = cut_windows(documents, tokenizer, length, limit, begin=begin)
        return self._windows[key]

    def search_windows(
        self, model: str, tokenizer: Any, length: int, limit: int, train_length: int, seed: int
    ) -> torch.Tensor:
        """Windows of the search text; of a mixture, every seed draws others."""
        study, key = self.study, (self.study.search, model, length, limit, seed)
        if key not in self._windows:
            self._windows[key] = search_text(
                study.path(study.search),
                tokenizer,
                length,
                limit,
                train_length,
                seed=seed,
                packed=study.extension.packed,
                folder=study.folder,
                begin=begin_of_text(tokenizer),
            )
        return self._windows[key].ids

    def begin_of_text(self, folder: Path) -> tuple[int, ...]:
        """The token that the texts of a model begin with, if any."""
        if folder not in self._begins:
            tokenizer = load_tokenizer(folder)
            silent = stated_begin_of_text(tokenizer)[0] is None
            if silent and not isinstance(load_config(folder), FarspanConfig):
                self._begins[folder] = load_with_begin_of_text(folder).begin.ids
            else:
                self._begins[folder] = tuple(begin_of_text(tokenizer))
        return self._begins[folder]

    def weight_hashes(self, folder: Path) -> list[str]:
        """The SHA-256 of a model's weight files, which do not change while a study runs."""
        if folder not in self._weight_hashes:
            self._weight_hashes[folder] = [
                sha256_of(file) for file in weight_files(Path(resolve_bundled(folder)))
            ]
        return self._weight_hashes[folder]

    def check(self) -> None:
        """Refuse a study with a missing text, before anything is trained."""
        for file in self.study.files:
            if not (path := self.study.path(file)).exists():
                raise FarspanError(
                    f"{path}, a text of the study, was not found; set its folder with folder=PATH"
                )
            try:
                text_files(path, self.study.folder)
            except FarspanError as error:
                raise type(error)(f"{file} cannot be read: {error}") from None
        _ = self.benchmark_sources

    def check_long_enough(self, model: str, tokenizer: Any, length: int) -> None:
        """Refuse a text that has no document as long as the longest window to cut from it."""
        study, target = self.study, length * max(self.study.factors)
        needed = [("report", file, length * study.report_factor) for file in study.report]
        for method in filter("none".__ne__, study.methods[model]):
            configs = {
                factor: method_config(study.extension_for(factor), method)
                for factor in study.factors
            }
            window = max(
                search_windows(method_names(method), config, length * factor, length)[0]
                for factor, config in configs.items()
            )
            needed += [("search", study.search, window), ("choose", study.choose, target)]
        if model in study.grids:
            needed.append(("choose", study.choose, 8 * length))
        for key, file, window in dict.fromkeys(needed):
            try:
                if key == "search":
                    self.search_windows(model, tokenizer, window, 1, length, 0)
                else:
                    cut_windows(read_documents(study.path(file)), tokenizer, window, 1)
            except FarspanError as error:
                raise type(error)(
                    f"{key} names {file}, which cannot be used for {model}: {error}"
                ) from None

    @cached_property
    def benchmark_sources(self) -> list[Any]:
        return self.study.benchmarks.sources(self.study.path)

    @cached_property
    def hashes(self) -> dict[str, list[str]]:
        """The SHA-256 of the files of every text, since a file name does not fix its content."""
        hashes = {}
        for name in self.study.files:
            path = self.study.path(name)
            files = [path] if path.is_file() else sorted(path.rglob("*"))
            if is_mixture(path):
                files += text_files(path, self.study.folder)
            hashes[name] = [sha256_of(file) for file in files if file.is_file()]
        return hashes
