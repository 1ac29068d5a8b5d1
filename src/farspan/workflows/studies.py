"""The recipe of a study: which models, methods, targets and seeds it has, and which of them make a cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from farspan.data.documents import share_text
from farspan.errors import FarspanError, nearest
from farspan.methods.uniform import STEP
from farspan.recipe import changed, load_recipe
from farspan.train.checkpoint import name_of
from farspan.train.corpus import data_folder
from farspan.twins import is_twin
from farspan.workflows.fitting import (
    METHODS,
    USES,
    Extension,
    check_combination,
    check_used,
)
from farspan.workflows.pretraining import read_recipe

SHELF = Path(__file__).parent.parent / "assets" / "recipes" / "study"


@dataclass(frozen=True)
class Study:
    """A recipe of `farspan reproduce`."""

    methods: dict[str, tuple[str, ...]]  # model recipe -> methods, "none" among them; a variant is method:key=value
    folder: str = ""  # of the data; empty: $FARSPAN_DATA, else ./data
    runs: str = "runs"  # where the models are, or will be trained
    factors: tuple[int, ...] = (2, 4, 8)
    seeds: tuple[int, ...] = (0, 1, 2)  # of searches; what does not depend on chance has one
    search: str = "books_train_a.jsonl.xz"
    choose: str = "books_train_b.jsonl.xz"
    report: tuple[str, ...] = ("books_val.jsonl.xz", "pg19_test_a.jsonl.xz")
    report_windows: int = 24
    report_factor: int = 8  # every cell is measured on windows of so many training lengths
    passkeys: int = 4  # keys at each of ten depths
    grids: tuple[str, ...] = ()  # models whose best λ̂ by position is found, at every checkpoint that was kept
    grid_low: float = 0.8
    grid_high: float = 2.6
    extension: Extension = field(default_factory=Extension)

    def __post_init__(self):
        for name in ("methods", "factors", "seeds", "report"):
            if not getattr(self, name):
                raise FarspanError(f"{name} is empty, and so is the study; name at least one")
        for model, methods in self.methods.items():
            if not methods:
                raise FarspanError(f"methods.{model} is empty; name at least one method, or none: the model as it is")
        # Of what is named twice there is one cell, and the study would wait for the other.
        lists = {f"methods.{model}": methods for model, methods in self.methods.items()}
        lists |= {name: getattr(self, name) for name in ("factors", "seeds", "report", "grids")}
        for name, given in lists.items():
            if len(set(given)) < len(given):
                raise FarspanError(f"{name} names something twice: {list(given)}; name each once")
        for model in self.grids:
            if model not in self.methods:
                known = ", ".join(self.methods)
                raise FarspanError(f"grids names {model!r}, which is not under [methods] ({known}); add it there")
        self._check_numbers()
        self._check_texts()

    def path(self, file: str) -> Path:
        return data_folder(self.folder) / file

    @property
    def files(self) -> tuple[str, ...]:
        return self.search, self.choose, *self.report

    def _check_numbers(self) -> None:
        for name in ("report_windows", "report_factor", "passkeys"):
            if getattr(self, name) < 1:
                raise FarspanError(f"{name} is {getattr(self, name)}; give 1 or more")
        if min(self.factors) < 2:
            raise FarspanError(
                f"factors names {min(self.factors)}, and a target is so many training lengths; give 2 or more"
            )
        if self.report_factor < max(self.factors):
            raise FarspanError(
                f"report_factor is {self.report_factor} and factors names {max(self.factors)}, so a target would not "
                "be measured; let report_factor be as large"
            )
        for seed in self.seeds:
            if not 0 <= seed < 2**20:
                raise FarspanError(f"seeds names {seed}; choose each from 0 to {2**20 - 1}")
        if not STEP <= self.grid_low <= self.grid_high:
            raise FarspanError(
                f"grid_low is {self.grid_low:g} and grid_high {self.grid_high:g}, and no scale lies between; let "
                f"grid_low be {STEP} or more, and grid_high no less than it"
            )

    def _check_texts(self) -> None:
        """What was searched or chosen by is not reported on, and each text that is has a name of its own."""
        for one, other in combinations(self.files, 2):
            if share_text(self.path(one), self.path(other)):
                raise FarspanError(
                    f"search, choose and report are to share no text, and {one} and {other} do; name each text once"
                )
        names = [text_name(file) for file in self.report]
        if len(set(names)) < len(names):
            raise FarspanError(
                f"report has texts of one name, {', '.join(names)}, by which results are told apart; rename a file"
            )


def read_study(source: str, changes: list[str]) -> Study:
    return load_recipe(Study, source, changes, shelf=SHELF)


def text_name(file: str) -> str:
    """The name under which the losses on a text are told.

    >>> text_name("../books_val.jsonl.xz")
    'books_val'
    """
    return Path(file).name.partition(".")[0] or file


@dataclass(frozen=True)
class Cell:
    model: str
    method: str
    factor: int  # 1: as trained
    seed: int

    def of(self, model: Path) -> Path:
        return model


@dataclass(frozen=True)
class Grid:
    """The loss under every λ̂, at one checkpoint of a model."""

    model: str
    checkpoint: str  # "model": the last

    def of(self, model: Path) -> Path:
        return model if self.checkpoint == "model" else model.parent / "checkpoints" / self.checkpoint


def grids(study: Study) -> list[Grid]:
    """Those that the study asks for, at every checkpoint that is kept."""
    found = []
    for model in study.grids:
        keep = () if is_twin(model) else read_recipe(model).plan.keep
        found += [Grid(model, name_of(step)) for step in keep] + [Grid(model, "model")]
    return found


STEPPING = ("headscale", "headlog", "drope")  # methods that take steps whatever `tune` says


def cells(study: Study) -> list[Cell]:
    """Every cell of the study, models one after the other."""
    found = []
    for model, methods in study.methods.items():
        for method in methods:
            names = method.partition(":")[0].split("+")
            unknown = [name for name in names if name not in METHODS and name != "none"]
            if unknown:
                way = nearest(unknown[0], ["none", *METHODS])
                raise FarspanError(f"methods.{model} names {unknown[0]!r}, which is unknown; {way}")
            if method == "none":
                found.append(Cell(model, method, 1, 0))
                continue
            _check_method(study, model, method)
            seeds = study.seeds if _by_chance(study, method) else study.seeds[:1]
            found += [Cell(model, method, factor, seed) for factor in study.factors for seed in seeds]
    return found


def _by_chance(study: Study, method: str) -> bool:
    """Does what a method finds depend on its seed, by which steps draw their text?"""
    tuned = bool(in_force(study.extension, method).tune)
    names = method.partition(":")[0].split("+")
    return any(name in STEPPING or (tuned and "tune" in USES[name]) for name in names)


def in_force(how: Extension, method: str) -> Extension:
    """The settings of a method: the study's own, and what its variant changes."""
    variant = method.partition(":")[2]
    return changed(how, variant.split(",")) if variant else how


def _check_method(study: Study, model: str, method: str) -> None:
    """Refuse what would be measured under a name that promises more. The study's own settings serve many methods, and
    each uses what it can; what a variant sets is for that one."""
    name, _, variant = method.partition(":")
    names = name.split("+")
    if "none" in names:
        raise FarspanError(f"methods.{model} names {method!r}, and none is the model as it is; give it alone")
    check_combination(name)
    if variant:
        check_used(names, in_force(study.extension, method), study.extension)
