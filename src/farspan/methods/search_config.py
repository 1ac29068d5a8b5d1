"""The settings of the search for scales, and what they mean for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from farspan.checks import check_least, check_shares
from farspan.data.recall import SPAN_SIZES
from farspan.errors import FarspanError
from farspan.methods.job import shared_batch
from farspan.train.loop import PlateauRule

REPEATS = 0.5  # share of the windows with repeated spans, for models with NoPE layers
PASSKEYS = 0.25  # share of the windows with a passkey, for those that retrieve passkeys


class SearchDefaults(NamedTuple):
    batch: int
    lr: tuple[float, ...]
    warmup: int
    min_gain: float
    answers: float


PAPER = SearchDefaults(8, (0.1, 0.05), 20, 0.0, 0.3)  # with a number of steps; no plateau ends it
FULL = SearchDefaults(8, (0.1,), 4, 0.005, 0.3)
QUICK = SearchDefaults(2, (0.2,), 4, 0.02, 0.125)


@dataclass(frozen=True)
class SearchConfig:
    """Settings of the search for scales; None: see `resolve`."""

    steps: int = 0  # exactly so many; 0: until the loss on the choose split no longer falls
    max_steps: int = 200  # of a search that ends at a plateau
    quick: bool = False  # to a plateau with few windows: minutes on a CPU, and a coarser result
    min_gain: float | None = None  # nats; a smaller fall of the loss is a plateau
    batch: int | None = None  # windows per step
    micro_batch: int = 0  # windows in memory at once; 0: by their tokens
    lr: tuple[float, ...] | None = None  # each is tried; the choose split selects one
    warmup: int | None = None  # steps until the learning rate is reached
    constraint: bool = True  # λ̂ ≥ 1
    # The λ̂ to start from, or one for each scaled layer; 0: 1, with a number of steps the best
    # uniform λ̂
    init: float | tuple[float, ...] = 0.0
    beyond: float = 1.125  # windows are so many times the target: Wang 2024 reads 18K for 16K
    repeats: float | None = None  # share of the windows with spans that stand twice
    spans: tuple[int, ...] = SPAN_SIZES  # tokens of such a span, at least and below
    passkeys: float | None = None  # share of the windows that begin with a passkey document
    answers: float | None = None  # weight of the mean loss of its answers
    tail: float = 0.0  # extra weight of the last quarter of a window
    shared: bool = False  # headlog: one growth for all heads, as Llama 4 and Ministral 3 have it
    save_every: int = 50

    def __post_init__(self):
        settings = ("steps", "micro_batch", "min_gain", "warmup", "answers", "tail")
        check_least(self, 0, *settings, part="search.")
        check_least(self, 1, "max_steps", "batch", "save_every", part="search.")
        check_shares(self, "repeats", "passkeys", part="search.")
        if self.lr is not None and (not self.lr or min(self.lr) <= 0):
            raise FarspanError(
                f"search.lr is {list(self.lr)}; choose one or more learning rates above 0"
            )
        if not 1 <= self.beyond <= 2:
            raise FarspanError(f"search.beyond is {self.beyond:g}; choose a factor from 1 to 2")
        if (self.repeats or 0) + (self.passkeys or 0) > 1:
            raise FarspanError(
                f"search.repeats is {self.repeats:g} and search.passkeys {self.passkeys:g}; "
                "choose shares of one whole: together at most 1"
            )
        if len(self.spans) != 2 or not 2 <= self.spans[0] < self.spans[1]:
            raise FarspanError(
                f"search.spans is {list(self.spans)}; choose two lengths in tokens, the first 2 or "
                "more and below the second"
            )
        if isinstance(self.init, tuple):
            if not self.init or min(self.init) <= 0:
                raise FarspanError(
                    f"search.init is {list(self.init)}; choose one scale above 0 for each scaled "
                    "layer, or one number"
                )
        else:
            check_least(self, 0, "init", part="search.")

    def allowed(self, scale: float) -> float:
        """The scale, or the least that the constraint allows."""
        return max(1.0, scale) if self.constraint else scale

    @property
    def most_windows(self) -> int:
        """The most windows that a search reads."""
        plan = self.resolve(False)
        return plan.steps * plan.batch

    def resolve(self, has_nope: bool) -> SearchPlan:
        """With a number of steps, what is not set is as in Wang 2024.

        A model with NoPE layers reads windows that reward retrieval.
        """
        default = PAPER if self.steps else QUICK if self.quick else FULL
        # A tenth of the paper's 200 steps; of fewer steps, a tenth too.
        warmup = min(default.warmup, self.steps // 10) if self.steps else default.warmup
        rewards = has_nope and default is not PAPER
        repeats, passkeys = self.repeats, self.passkeys
        if repeats is None:
            repeats = min(REPEATS, 1 - (passkeys or 0.0)) if rewards else 0.0
        if passkeys is None:
            passkeys = min(PASSKEYS, 1 - repeats) if rewards else 0.0
        return SearchPlan(
            self.steps or self.max_steps,
            self.batch or shared_batch(default.batch),
            self.micro_batch,
            self.lr or default.lr,
            warmup if self.warmup is None else self.warmup,
            repeats,
            passkeys,
            default.answers if self.answers is None else self.answers,
            self.tail,
            None
            if self.steps
            else PlateauRule(min_gain=default.min_gain if self.min_gain is None else self.min_gain),
        )


@dataclass(frozen=True)
class SearchPlan:
    """The size of a search, and what it reads."""

    steps: int  # at most, with a plateau rule
    batch: int
    micro_batch: int
    lr: tuple[float, ...]
    warmup: int
    repeats: float
    passkeys: float
    answers: float
    tail: float
    plateau: PlateauRule | None
