"""The recipe of a study: its models, methods, targets and seeds, and the cells they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from farspan.bundled import is_bundled
from farspan.errors import FarspanError, suggest
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.registry import METHOD_SETTINGS, METHODS, TRAINED_METHODS
from farspan.methods.rules import check_combination, check_unused_settings
from farspan.methods.uniform import STEP
from farspan.progress import ignore
from farspan.recipe import apply_overrides, load_recipe
from farspan.train.checkpoint import checkpoint_name
from farspan.train.corpus import data_folder
from farspan.train.search_text import find_mixture, is_mixture, overlapping
from farspan.workflows.pretrain import read_recipe
from farspan.workflows.reproduce_benchmarks import StudyBenchmarks

RECIPE_DIR = Path(__file__).parent.parent / "assets" / "recipes" / "study"


# Methods that draw training text, and so depend on the seed, whatever `tune` is.
RANDOM_METHODS = TRAINED_METHODS | {"headscale", "headlog"}


@dataclass(frozen=True)
class ReproduceStudy:
    """A recipe of `farspan reproduce`."""

    # Model recipe -> methods; "none" is the model as trained, a variant is method:key=value.
    methods: dict[str, tuple[str, ...]]
    folder: str = ""  # of the texts; empty: $FARSPAN_DATA, else ./data
    runs: str = "runs"  # where models are found, or trained
    factors: tuple[int, ...] = (2, 4, 8)  # targets, in train lengths
    seeds: tuple[int, ...] = (0, 1, 2)  # a method without randomness runs with the first only
    search: str = "books_train_a.jsonl.xz"  # or a mixture, a .toml file
    choose: str = "books_train_b.jsonl.xz"
    report: tuple[str, ...] = ("books_val.jsonl.xz", "pg19_test_a.jsonl.xz")
    report_windows: int = 24
    report_factor: int = 8  # every cell is measured on windows of this many train lengths
    passkeys: int = 4  # keys at each of ten depths
    # The last tokens of each report window, scored with every doubling of the context; 0: none.
    same_tokens: int = 0
    grids: tuple[str, ...] = ()  # models whose best λ̂ by position is measured at each checkpoint
    grid_low: float = 0.8
    grid_high: float = 2.6
    extension: ExtendConfig = field(default_factory=ExtendConfig)
    # Factor -> search.beyond of its cells; Wang 2024 searches beyond the target at 8 times only.
    beyond: dict[str, float] = field(default_factory=dict)
    benchmarks: StudyBenchmarks = field(default_factory=StudyBenchmarks)

    def __post_init__(self):
        self._check_lists()
        self._check_numbers()
        self._check_texts()

    def path(self, file: str) -> Path:
        """A text lies in the folder of texts; a mixture there, anywhere else, or in farspan."""
        path = data_folder(self.folder) / file
        if is_mixture(file) and (Path(file).is_file() or not path.is_file()):
            return find_mixture(file)
        return path

    def extension_for(self, factor: int) -> ExtendConfig:
        """The settings of methods for a target of `factor` train lengths."""
        search = self.extension.search
        beyond = self.beyond.get(str(factor), search.beyond)
        return replace(self.extension, search=replace(search, beyond=beyond))

    @property
    def files(self) -> tuple[str, ...]:
        return self.search, self.choose, *self.report

    @property
    def has_benchmarks(self) -> bool:
        return self.benchmarks != StudyBenchmarks()

    def _check_lists(self) -> None:
        for name in ("methods", "factors", "seeds", "report"):
            if not getattr(self, name):
                raise FarspanError(f"{name} is empty; name at least one")
        for model, methods in self.methods.items():
            if not methods:
                raise FarspanError(
                    f"methods.{model} is empty; name at least one method, "
                    "or none for the model as trained"
                )
        # Equal entries share one cell, and the study would wait for a second one forever.
        lists = {f"methods.{model}": methods for model, methods in self.methods.items()}
        lists |= {name: getattr(self, name) for name in ("factors", "seeds", "report", "grids")}
        for name, entries in lists.items():
            if len(set(entries)) < len(entries):
                raise FarspanError(
                    f"{name} has duplicate entries: {list(entries)}; name each entry once"
                )
        for model in self.grids:
            if model not in self.methods:
                known = ", ".join(self.methods)
                raise FarspanError(
                    f"grids names {model!r}, which is not under [methods] ({known}); add it there"
                )

    def _check_numbers(self) -> None:
        for name in ("report_windows", "report_factor", "passkeys"):
            if getattr(self, name) < 1:
                raise FarspanError(f"{name} is {getattr(self, name)}; choose 1 or more")
        if self.same_tokens < 0:
            raise FarspanError(f"same_tokens is {self.same_tokens}; choose 0 or more")
        if min(self.factors) < 2:
            raise FarspanError(
                f"factors names {min(self.factors)}, and a target is a multiple of the train "
                "length; choose 2 or more"
            )
        if self.report_factor < max(self.factors):
            raise FarspanError(
                f"report_factor is {self.report_factor} and factors names {max(self.factors)}, so "
                "that target would not be measured; raise report_factor"
            )
        if unknown := set(self.beyond) - set(map(str, self.factors)):
            raise FarspanError(
                f"beyond names {min(unknown)}, which is no target of this study; choose from the "
                f"factors {', '.join(map(str, self.factors))}"
            )
        for factor in self.factors:
            self.extension_for(factor)  # refuses a share below 1
        for seed in self.seeds:
            if not 0 <= seed < 2**20:
                raise FarspanError(f"seeds names {seed}; choose seeds from 0 to {2**20 - 1}")
        if not STEP <= self.grid_low <= self.grid_high:
            raise FarspanError(
                f"grid_low is {self.grid_low:g} and grid_high {self.grid_high:g}; "
                f"choose {STEP} <= grid_low <= grid_high"
            )

    def _check_texts(self) -> None:
        """Refuse to report on text that was used for search or choice, and equal text names."""
        for file, other in combinations(self.files, 2):
            if overlapping(self.path(file), self.path(other), self.folder):
                raise FarspanError(
                    f"search, choose and report must not share text, but {file} and {other} do; "
                    "use each text once"
                )
        names = [text_name(file) for file in self.report]
        if len(set(names)) < len(names):
            raise FarspanError(
                f"report has texts with equal names ({', '.join(names)}), which results are "
                "stored by; rename a file"
            )


def read_study(study: str, overrides: Sequence[str] = ()) -> ReproduceStudy:
    """A study by name or file, with `key=value` overrides.

    What a bundled study names in `beyond` is ignored for factors that are not measured.

    >>> read_study("extend-small", ["factors=[4]"]).beyond
    {}
    """
    keys = [text.partition("=")[0].strip() for text in overrides]
    own = {key.removeprefix("beyond.").strip("'\"") for key in keys if key.startswith("beyond.")}
    bundled: set[str] = set()

    def ignore_unmeasured(document: dict[str, Any], folder: Path) -> None:
        beyond, factors = document.get("beyond"), document.get("factors")
        if isinstance(beyond, dict):
            measured = set(map(str, factors)) if isinstance(factors, list) else set()
            for factor in bundled - own - measured:
                beyond.pop(factor, None)
            # A file comes before its base, and the whole study last.
            (bundled if folder == RECIPE_DIR else own).update(beyond)

    prepare = ignore if "beyond" in keys else ignore_unmeasured
    return load_recipe(ReproduceStudy, study, overrides, recipe_dir=RECIPE_DIR, prepare=prepare)


def text_name(file: str) -> str:
    """The key of a text in the results.

    >>> text_name("../books_val.jsonl.xz")
    'books_val'
    """
    return Path(file).name.partition(".")[0] or file


@dataclass(frozen=True)
class StudyCell:
    model: str
    method: str
    factor: int  # 1: as trained
    seed: int

    @property
    def label(self) -> str:
        return f"{self.model} {self.method} ×{self.factor} s{self.seed}"

    def folder(self, model: Path) -> Path:
        """The weights that the cell measures, where `model` is the fully trained model."""
        return model


@dataclass(frozen=True)
class GridCell:
    """The loss under every λ̂, at one checkpoint of a model."""

    model: str
    checkpoint: str  # "model": the last

    @property
    def label(self) -> str:
        return f"{self.model} {self.checkpoint}"

    def folder(self, model: Path) -> Path:
        """The weights that the cell measures, where `model` is the fully trained model."""
        if self.checkpoint == "model":
            return model
        return model.parent / "checkpoints" / self.checkpoint


def list_grids(study: ReproduceStudy) -> list[GridCell]:
    """The grid cells of a study, one for every checkpoint that is kept."""
    cells = []
    for model in study.grids:
        steps = () if is_bundled(model) else read_recipe(model).plan.keep
        cells += [GridCell(model, checkpoint_name(step)) for step in steps]
        cells.append(GridCell(model, "model"))
    return cells


def list_cells(study: ReproduceStudy) -> list[StudyCell]:
    """Every cell of a study, one model after the other."""
    cells = []
    for model, methods in study.methods.items():
        for method in methods:
            _check_method(study, model, method)
            if method == "none":
                cells.append(StudyCell(model, method, 1, 0))
                continue
            seeds = study.seeds if _is_random(study, method) else study.seeds[:1]
            cells += [
                StudyCell(model, method, factor, seed) for factor in study.factors for seed in seeds
            ]
    return cells


def _is_random(study: ReproduceStudy, method: str) -> bool:
    """Whether the result of a method depends on the seed, which orders its training text."""
    tuned = bool(method_config(study.extension, method).tune)
    return any(
        name in RANDOM_METHODS or (tuned and "tune" in METHOD_SETTINGS[name])
        for name in method_names(method)
    )


def method_names(method: str) -> list[str]:
    """`yarn+headscale:search.steps=50` -> ["yarn", "headscale"]."""
    return method.partition(":")[0].split("+")


def method_config(config: ExtendConfig, method: str) -> ExtendConfig:
    """The settings of a method: those of the study with the overrides of its variant."""
    variant = method.partition(":")[2]
    return apply_overrides(config, variant.split(",")) if variant else config


def _check_method(study: ReproduceStudy, model: str, method: str) -> None:
    """Refuse a method that is unknown, or that would ignore a part of its name.

    The settings of a study may be used by some of its methods only. Those of a variant must be
    used by its method.
    """
    name, _, variant = method.partition(":")
    names = name.split("+")
    unknown = [part for part in names if part not in METHODS and part != "none"]
    if unknown:
        hint = suggest(unknown[0], ["none", *METHODS])
        raise FarspanError(f"methods.{model} names {unknown[0]!r}, which is unknown; {hint}")
    if method == "none":
        return
    if "none" in names:
        raise FarspanError(
            f"methods.{model} names {method!r}, but none is the model as trained; "
            "remove the rest of the name"
        )
    check_combination(name)
    if variant:
        check_unused_settings(names, method_config(study.extension, method), study.extension)
