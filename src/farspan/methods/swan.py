"""SWAN: turn a model into one with a few global layers among rotary layers that see a window, and
let its base recalibrate it.

Rotary layers fail beyond the train length because they meet distances that they never saw. In a
window they never do. The global layers carry what lies farther back: without rotation, or with that
of fast dimensions, which had every angle in training. The layout is changed first; then the weights
learn, on windows no longer than the train length, to predict what the base predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.layout import (
    LENGTH_DEPENDENT,
    MIN_PERIOD,
    MIN_WINDOW,
    LayerLayout,
    Layout,
)
from farspan.attention.layout_change import set_layout
from farspan.attention.model_facts import forward_flops
from farspan.attention.patch import Patch
from farspan.attention.probe import Layer, probe
from farspan.attention.scales import Scales
from farspan.checks import check_least, check_shares
from farspan.data.recall import ChangeRow, recall_rows
from farspan.errors import FarspanError
from farspan.files import read_json, write_json
from farspan.methods.distill import DistillModule, make_teacher
from farspan.methods.job import (
    MICRO_BATCH_TOKENS,
    FitJob,
    largest_micro_batch,
    loss_margin,
    shared_batch,
    split_batch,
)
from farspan.methods.layer_costs import (
    as_table,
    choose_layers,
    measure_layers,
    rows_with_repeats,
)
from farspan.methods.long_windows import LongPlan, check_long_length, train_on_long_windows
from farspan.methods.rope import existing_rope_scaling
from farspan.methods.tuning import (
    LossModule,
    TuningConfig,
    WeightTraining,
    train_weights,
    weights_override,
)
from farspan.model.compile import compiled_layers
from farspan.model.loss import token_losses
from farspan.train.optim import OptimizerConfig
from farspan.train.sharding import processes

CHOICES = ("measured", "even")
ROTATIONS = ("fast", "none")
LOSSES = ("kl", "cross-entropy")
LEARNING_RATE = 1e-3
MIN_LENGTH = 2  # one token predicts nothing
MAX_WINDOW, MAX_LENGTH, MAX_LONG_LENGTH = 512, 8192, 32_768
SLOPES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)  # of the scales of global layers
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


def swan(model: PreTrainedModel, job: FitJob, config: SwanConfig, tuning: TuningConfig) -> Patch:
    """Choose the global layers, change the layout, and distill the base into the changed model."""
    plan = DistillPlan.make(config, tuning, job.train_length)
    long_plan = config.long_plan(job.train_length, job.target)
    whole, job = job, job.with_windows(plan.length)
    teacher = make_teacher(model)
    layout = _stored_layout(model, teacher, job, config)
    job.details["layout"] = layout.to_json()
    job.say(f"{job.details['choice']}; layout: {_count_entries(layout)}")
    job.details["distillation"] = {**vars(plan), "tokens": plan.tokens}
    try:
        set_layout(model, layout)
        with compiled_layers(model, teacher):
            weights = _distill(model, teacher, job, config, tuning, plan)
            if long_plan is not None:
                job.details["long_windows"] = {**vars(long_plan), "tokens": long_plan.tokens}
                rows = _recall_rows(job, config)
                flops = long_flops(model, probe(model), probe(teacher), long_plan)
                with weights_override(model, weights):
                    weights |= train_on_long_windows(
                        model,
                        teacher,
                        whole,
                        long_plan,
                        tuning,
                        rows,
                        flops / long_plan.tokens,
                        plan.steps * plan.batch,
                    )
        scales = None
        if config.sharpen:
            with weights_override(model, weights):
                scales = _sharpen(model, job, layout.global_layers, config.max_loss)
    finally:
        seam.remove_layout(model)
    return job.patch("swan", layout=layout, weights=weights, scales=scales)


def _count_entries(layout: Layout) -> str:
    """`7 × rope/128, 1 × rope:256`"""
    counts = Counter(str(entry) for entry in layout.layers.values())
    return ", ".join(f"{count} × {entry}" for entry, count in counts.most_common())


def _sharpen(
    model: PreTrainedModel, job: FitJob, layers: Sequence[int], max_loss: float
) -> Scales | None:
    """The scales that retrieve best over the target length without a higher loss; None: no scales.

    Attention over many more keys than in training is too flat to pick out one of them."""
    distance = min(job.train_length, job.target // 2)
    ids, known = rows_with_repeats(job.choose, job.seed, distance)
    advance = job.progress("sharpen", len(SLOPES))
    table = torch.ones(len(layers), job.heads)
    losses: dict[float, tuple[float, float]] = {}

    def scales_with(slope: float) -> Scales:
        slopes = torch.full_like(table, slope)
        return Scales(tuple(layers), table, slopes, "log", job.train_length)

    for slope in SLOPES:
        with seam.scaled(model, scales_with(slope)):
            by_token = [token_losses(model, row[None].to(model.device))[0].cpu() for row in ids]
        by_row = torch.stack(by_token)
        losses[slope] = by_row[~known[:, 1:]].mean().item(), by_row[known[:, 1:]].mean().item()
        advance(1, "slope {:g}: loss {:.4f}, repeated tokens {:.4f}".format(slope, *losses[slope]))
    job.details["sharpening"] = [
        {"slope": slope, "loss": round(loss, 5), "retrieval": round(retrieval, 5)}
        for slope, (loss, retrieval) in losses.items()
    ]
    best = best_slope(losses, max_loss)
    return scales_with(best) if best else None


def best_slope(losses: Mapping[float, tuple[float, float]], max_loss: float) -> float:
    """Of the slopes whose loss is within `max_loss` of the lowest, the one that retrieves best."""
    lowest = min(loss for loss, _ in losses.values())
    allowed = {slope: pair for slope, pair in losses.items() if pair[0] <= lowest + max_loss}
    return min(allowed, key=lambda slope: allowed[slope][1])


def _stored_layout(
    model: PreTrainedModel, teacher: PreTrainedModel, job: FitJob, config: SwanConfig
) -> Layout:
    """The layout that was chosen when this run began: a resumed run must not choose another one,
    and neither must another process."""
    if job.folder is None:
        return _choose_layout(model, teacher, job, config)
    file = job.folder / "layout.json"
    with processes().main_process_first():
        if not file.exists():
            layout = _choose_layout(model, teacher, job, config)
            write_json(file, {"layout": layout.to_json(), "details": job.details})
    stored = read_json(file)
    job.details.update(stored["details"])
    return Layout.parse(stored["layout"])


def _choose_layout(
    model: PreTrainedModel, teacher: PreTrainedModel, job: FitJob, config: SwanConfig
) -> Layout:
    """The new layout; the sentence that explains it goes to the record."""
    layers = probe(model)
    window = config.window_for(job.train_length)
    scaling = existing_rope_scaling(model.config)
    check_layers(layers, type(model).__name__, config, scaling)
    open_layers = [layer for layer in layers if layer.window is None]
    if len(open_layers) < len(layers):
        job.details["choice"] = (
            "the model has windows of its own, so only the layers that see all keys change: "
            f"they become {config.global_layout(open_layers[0], job.train_length)}"
        )
        return Layout(
            {layer.index: config.global_layout(layer, job.train_length) for layer in open_layers}
        )
    indices = [layer.index for layer in layers]
    count = _global_count(layers, config)
    if count == len(layers) and all(layer.position == "none" for layer in layers):
        raise FarspanError(
            f"no layer of {type(model).__name__} has positions, and with a swan.global_share of "
            f"{config.global_share:g} none gets a window, so nothing would change; choose a "
            "smaller share"
        )
    if not measures_layers(layers, config):
        chosen = even_layers(indices, count)
        job.details["choice"] = (
            f"{_layers_are(chosen)} global, {count} of {len(layers)} layers at equal distances"
        )
    else:
        rotary = [layer.index for layer in layers if layer.position == "rope"]
        costs = measure_layers(model, teacher, job, indices, rotary, window, config.measured_rows)
        chosen = choose_layers(costs, count, config.spacing)
        retrieval = {cost.layer: cost.window_retrieval for cost in costs}
        dearest = max(retrieval[layer] for layer in chosen)
        others = max(retrieval[layer] for layer in indices if layer not in chosen)
        job.details["layer_costs"] = as_table(costs)
        job.details["choice"] = (
            f"{_layers_are(chosen)} global: of layers {config.spacing} or more apart, a window of "
            f"{window} keys costs retrieval most there, up to {dearest:.3f} nats a token, and at "
            f"most {others:.3f} in any other layer"
        )
    # Among rotary layers, layers without positions stay so: rotation would be new to them.
    unrotated = {"none"} if any(layer.position == "rope" for layer in layers) else set()
    return Layout(
        {
            layer.index: (
                config.global_layout(layer, job.train_length)
                if layer.index in chosen
                else LayerLayout(layer.position not in unrotated, window)
            )
            for layer in layers
        }
    )


def check_layers(
    layers: Sequence[Layer], name: str, config: SwanConfig, scaling: str | None = None
) -> None:
    """Refuse models that no layout can change, and settings that would have no effect.

    scaling: the RoPE scaling that the model has already.
    """
    other = next((layer for layer in layers if layer.position not in ("rope", "none")), None)
    if other is not None:
        raise FarspanError(
            f"swan changes rotary layers and layers without positions, and layer {other.index} of "
            f"{name} has {other.position} positions; use uniform, headscale or headlog"
        )
    if all(layer.window is not None for layer in layers):
        raise FarspanError(
            f"every layer of {name} sees a window by its config, so none can become global; "
            "choose a model with layers that see all keys"
        )
    seeing_all = [layer for layer in layers if layer.window is None]
    if len(seeing_all) < len(layers) and all(layer.position == "none" for layer in seeing_all):
        raise FarspanError(
            f"{name} has this layout already: its layers that see all keys have no positions, and "
            "the others see a window; use uniform, headscale or headlog"
        )
    rotates = any(layer.position == "rope" for layer in layers)
    all_lose_it = config.rotation == "none" and _global_count(layers, config) == len(layers)
    if scaling in LENGTH_DEPENDENT and rotates and not all_lose_it:
        same = " or set its rope_type to default, which is the same up to max_position_embeddings"
        raise FarspanError(
            f"the rotation of {name} changes with the length of the text ({scaling}), also in "
            "windows, which would turn in ways that were not distilled; use ntk"
            + same
            * (scaling == "dynamic")
        )
    if config.max_period and config.rotation == "none":
        raise FarspanError(
            f"with swan.rotation=none, swan.max_period={config.max_period} would have no effect; "
            "remove one of them"
        )
    if config.max_period and all(layer.position == "none" for layer in seeing_all):
        raise FarspanError(
            f"no layer of {name} rotates, so swan.max_period={config.max_period} would have no "
            "effect; remove it"
        )
    for setting in ("window", "global_share", "layers", "spacing"):
        value = getattr(config, setting)
        if len(seeing_all) < len(layers) and value != getattr(SwanConfig, setting):
            raise FarspanError(
                f"{name} has windows of its own, which stay, so swan.{setting}={value} would have "
                "no effect; remove it"
            )


def even_layers(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` layers at equal distances, the last one included: 3 and 7 of 8."""
    return tuple(indices[round((number + 1) * len(indices) / count) - 1] for number in range(count))


def _layers_are(layers: Sequence[int]) -> str:
    """
    >>> _layers_are((3, 7))
    'layers 3, 7 are'
    """
    if len(layers) == 1:
        return f"layer {layers[0]} is"
    return f"layers {', '.join(map(str, layers))} are"


def _distill(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    job: FitJob,
    config: SwanConfig,
    tuning: TuningConfig,
    plan: DistillPlan,
) -> dict[str, Tensor]:
    by_kl, answer_weight = config.loss == "kl", config.answer_weight
    training = WeightTraining(
        # Windows without answers count in its mean, so that the weight is that of the others.
        DistillModule(
            model,
            teacher,
            answer_weight and answer_weight / config.facts,
            plan.length,
            len(job.begin),
        )
        if by_kl
        else LossModule(model),
        _with_short_windows(
            job.batches(
                plan.batch,
                plan.micro_batch,
                model.device,
                _recall_rows(job, config),
                with_answers=answer_weight > 0,
            ),
            job.seed,
            config.short,
            min(plan.length, config.window_for(job.train_length)),
            len(job.begin),
        ),
        tokens=plan.batch * plan.length,
        steps=plan.steps,
        optimization=OptimizerConfig(
            "adamw",
            lr=tuning.lr or LEARNING_RATE,
            weight_decay=0.0,
            warmup=min(tuning.warmup, plan.steps),
            schedule="linear",
            decay=1.0,
        ),
        flops=distillation_flops(
            model,
            probe(model),
            probe(teacher) if by_kl else (),
            plan.length,
        ),
        margin=loss_margin(answer_weight),
    )
    return train_weights(model, job, "distill", tuning, training)


def _with_short_windows(
    batches: Callable[[int], list[Tensor]], seed: int, share: float, length: int, begin: int
) -> Callable[[int], list[Tensor]]:
    """Cut a share of the micro batches into windows of `length` tokens, each with the `begin`
    tokens that stand in front of the whole one.

    Short prompts depend on the first positions of a window, which few tokens of long windows are.
    """

    def cut(ids: Tensor) -> Tensor:
        front, text, size = ids[..., None, :begin], ids[..., begin:], length - begin
        count = text.shape[-1] // size  # answers stand at the end
        rows = text[..., -count * size :].unflatten(-1, (count, size))
        return torch.cat((front.expand(*rows.shape[:-1], -1), rows), -1).flatten(-3, -2)

    def batches_of_step(step: int) -> list[Tensor]:
        rng = np.random.default_rng((seed, 2, step))
        return [cut(ids) if rng.random() < share else ids for ids in batches(step)]

    return batches_of_step


def _recall_rows(job: FitJob, config: SwanConfig) -> ChangeRow | None:
    if config.facts and job.tokenizer is None:
        raise FarspanError(
            "swan.facts needs a tokenizer, and this model has none; set swan.facts=0"
        )
    return recall_rows(
        job.seed,
        repeats=config.repeats,
        min_distance=config.window_for(job.train_length),
        facts=config.facts,
        several=config.several,
        tokenizer=job.tokenizer,
    )


def distillation_flops(
    model: PreTrainedModel, layers: Sequence[Layer], base: Sequence[Layer], length: int
) -> float:
    """Of one token: the forward and backward pass of the model, whose layers are `layers`, and the
    forward pass of its base; without base layers, of the model alone."""
    teaching = forward_flops(model, base, length) if base else 0.0
    return 3 * forward_flops(model, layers, length) + teaching


def long_flops(
    model: PreTrainedModel, layers: Sequence[Layer], base: Sequence[Layer], plan: LongPlan
) -> float:
    """Of the training on long windows and on the short ones beside them."""
    long = plan.long_tokens * distillation_flops(model, layers, (), plan.length)
    short = plan.tokens - plan.long_tokens
    return long + short * distillation_flops(model, layers, base, plan.short_length)


def planned_layers(layers: Sequence[Layer], config: SwanConfig, train_length: int) -> list[Layer]:
    """The layers of the converted model, with the global ones at equal distances."""
    window, count = config.window_for(train_length), _global_count(layers, config)
    chosen = even_layers([layer.index for layer in layers], count)
    if any(layer.window for layer in layers):  # its windows stay
        return list(layers)
    return [layer if layer.index in chosen else replace(layer, window=window) for layer in layers]


def measures_layers(layers: Sequence[Layer], config: SwanConfig) -> bool:
    """Whether the global layers are chosen by measuring; windows of the model's own stay."""
    if config.layers == "even" or any(layer.window is not None for layer in layers):
        return False
    return _global_count(layers, config) < len(layers)


def _global_count(layers: Sequence[Layer], config: SwanConfig) -> int:
    return max(1, round(config.global_share * len(layers)))
