"""The recipe of `farspan extend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farspan.checks import check_least
from farspan.errors import FarspanError
from farspan.methods.search_config import SearchConfig
from farspan.methods.swan_config import SwanConfig
from farspan.methods.tuning import FAIR_STEPS, RAW_STEPS, TuningConfig
from farspan.recipe import apply_overrides, load_recipe

RECIPE_DIR = Path(__file__).parent.parent / "assets" / "recipes" / "extend"
TUNING_STEPS = {"": None, "fair": FAIR_STEPS, "raw": RAW_STEPS}


@dataclass(frozen=True)
class ExtendConfig:
    """The recipe of `farspan extend`."""

    search: SearchConfig = field(default_factory=SearchConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    swan: SwanConfig = field(default_factory=SwanConfig)
    tune: str = ""  # rotary methods: "fair" or "raw" tunes all weights, 200 or 1000 steps
    fitted: bool = True  # schedules: fit their slope, or take it from their formula
    search_windows: int = 0  # at most; 0: as many as a search reads
    packed: bool = True  # windows tile the documents that are shorter than a search window
    choose_windows: int = 8
    report_windows: int = 8
    passkeys: int = 2  # keys at each of ten depths; 0 measures no passkeys
    seed: int = 0

    def __post_init__(self):
        if self.tune not in TUNING_STEPS:
            raise FarspanError(
                f"tune is {self.tune!r}; choose fair (200 steps) or raw (1000 steps), or remove it"
            )
        check_least(self, 0, "search_windows", "passkeys")
        check_least(self, 1, "choose_windows", "report_windows")
        if not 0 <= self.seed < 2**20:
            raise FarspanError(f"seed is {self.seed}; choose it from 0 to {2**20 - 1}")


def read_extend_config(
    recipe: str | Path | ExtendConfig | None = None, overrides: Sequence[str] = ()
) -> ExtendConfig:
    """A recipe by name, file or object, with `key=value` overrides.

    >>> read_extend_config(overrides=["search.steps=50"]).search.steps
    50
    """
    if isinstance(recipe, ExtendConfig):
        return apply_overrides(recipe, list(overrides)) if overrides else recipe
    return load_recipe(
        ExtendConfig, str(recipe or "default"), list(overrides), recipe_dir=RECIPE_DIR
    )
