"""The settings of swan, and the size of its distillation."""

from __future__ import annotations

from dataclasses import dataclass

from farspan.attention.layout import MIN_PERIOD, MIN_WINDOW, LayerLayout
from farspan.attention.probe import Layer
from farspan.checks import check_least, check_shares
from farspan.errors import FarspanError
from farspan.methods.job import (
    MICRO_BATCH_TOKENS,
    largest_micro_batch,
    shared_batch,
    split_batch,
)
from farspan.methods.long_windows import LongPlan, check_long_length
from farspan.methods.tuning import TuningConfig

CHOICES = ("measured", "even")
ROTATIONS = ("fast", "none")
LOSSES = ("kl", "cross-entropy")
MIN_LENGTH = 2  # one token predicts nothing
MAX_WINDOW, MAX_LENGTH, MAX_LONG_LENGTH = 512, 8192, 32_768
BATCH_TOKENS = 65_536


@dataclass(frozen=True)
class SwanConfig:
    """Settings of swan; 0 is a default that depends on the train length L."""

    window: int = 0  # keys that a rotary layer sees; 0: L/4, at most 512
    global_share: float = 0.125  # of the layers, that see all keys
    layers: str = "measured"  # where the global layers are: measured, or even (at equal distances)
    rotation: str = "fast"  # of global layers: fast (dimensions up to max_period) or none
    max_period: int = 0  # of the dimensions that global layers rotate, in tokens; 0: L/2
    spacing: int = 2  # measured layers are at least this far apart
    measured_rows: int = 8  # windows of text that layers are measured on
    tokens: int = 32_000_000  # of training
    length: int = 0  # of its windows; 0: L, at most 8,192
    loss: str = "kl"  # kl: from the base; cross-entropy: on the text
    short: float = 0.0  # share of the micro batches cut into windows as long as swan.window
    long: float = 0.0  # share of the tokens read last, half of them in windows of long_length
    long_length: int = 0  # 0: the target, at most 32,768
    repeats: float = 0.25  # share of the windows with spans that stand twice
    facts: float = 0.25  # share of the windows with facts that are asked for at the end
    several: float = 0.5  # share of those windows with one question that has several answers
    answers: float = 0.01  # weight of the cross-entropy of their answers beside the KL
    sharpen: bool = True  # scale the global layers by 1 + slope·ln⁺(n/L), where that pays
    max_loss: float = 0.005  # nats a token that sharpening may cost

    def __post_init__(self):
        if not 0 < self.global_share <= 1:
            raise FarspanError(
                f"swan.global_share is {self.global_share:g}; choose a share above 0 and up to 1, "
                "because without global layers nothing beyond the window is seen"
            )
        choices_of = {"layers": CHOICES, "rotation": ROTATIONS, "loss": LOSSES}
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise FarspanError(
                    f"swan.{name} is {getattr(self, name)!r}; choose {' or '.join(choices)}"
                )
        check_shares(self, "repeats", "facts", "several", "short", part="swan.")
        if not 0 <= self.long < 1:
            raise FarspanError(
                f"swan.long is {self.long:g}; choose a share from 0 to less than 1, because the "
                "base teaches on the other tokens"
            )
        check_least(self, 0, "max_loss", "answers", part="swan.")
        if self.long_length and not self.long:
            raise FarspanError(
                f"without swan.long, swan.long_length={self.long_length} would have no effect; set "
                "swan.long to a share of the tokens, or remove it"
            )
        if self.repeats + self.facts > 1:
            raise FarspanError(
                f"swan.repeats and swan.facts are {self.repeats + self.facts:g} together; "
                "choose shares of the windows that add up to at most 1"
            )
        check_least(self, 1, "spacing", "measured_rows", "tokens", part="swan.")
        minima = {"window": MIN_WINDOW, "length": MIN_LENGTH, "long_length": MIN_LENGTH}
        for name, minimum in (minima | {"max_period": MIN_PERIOD}).items():
            if getattr(self, name):
                check_least(self, minimum, name, part="swan.")

    @property
    def answer_weight(self) -> float:
        """Of the cross-entropy of answers; as a loss on the text, it counts all tokens anyway."""
        return self.answers if self.loss == "kl" and self.facts else 0.0

    def global_layout(self, layer: Layer, train_length: int) -> LayerLayout:
        if self.rotation == "none" or layer.position == "none":
            return LayerLayout(False)
        # Dimensions that make two full turns within the train length had every angle often.
        return LayerLayout(True, max_period=self.max_period or max(MIN_PERIOD, train_length // 2))

    def window_for(self, train_length: int) -> int:
        window = self.window or max(MIN_WINDOW, min(MAX_WINDOW, train_length // 4))
        if window > train_length:
            raise FarspanError(
                f"swan.window is {window}, more than the train length of {train_length}: rotary "
                "layers would see distances that they were not trained on; choose a shorter window"
            )
        return window

    def length_for(self, train_length: int) -> int:
        length = self.length or min(MAX_LENGTH, train_length)
        if length > train_length:
            raise FarspanError(
                f"swan.length is {length}, more than the train length of {train_length}, where the "
                "base predicts badly and teaches that; choose shorter windows"
            )
        return length

    def long_plan(self, train_length: int, target: int) -> LongPlan | None:
        """The size of the training on long windows, None without it."""
        if not self.long:
            return None
        length = self.long_length or min(MAX_LONG_LENGTH, target)
        check_long_length(length, train_length, target)
        return LongPlan.make(self.long * self.tokens, length, self.length_for(train_length))


@dataclass(frozen=True)
class DistillPlan:
    """The size of a distillation run."""

    length: int  # tokens of a window
    batch: int  # windows of a step
    micro_batch: int
    steps: int

    @classmethod
    def make(cls, config: SwanConfig, tuning: TuningConfig, train_length: int) -> DistillPlan:
        length = config.length_for(train_length)
        rows = max(1, MICRO_BATCH_TOKENS // length)
        batch = tuning.batch or shared_batch(rows * max(1, BATCH_TOKENS // (rows * length)))
        if tuning.batch and tuning.micro_batch:
            micro_batch = min(batch, tuning.micro_batch)
        else:  # the batch is the same for any micro batch
            micro_batch = largest_micro_batch(batch, tuning.micro_batch or rows)
        split_batch(batch, micro_batch)  # refused here, before layers are measured
        tokens = (1 - config.long) * config.tokens
        steps = tuning.steps or max(1, round(tokens / (batch * length)))
        return cls(length, batch, micro_batch, steps)

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.length
