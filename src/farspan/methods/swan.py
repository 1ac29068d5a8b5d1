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

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.layout import Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.model_facts import forward_flops
from farspan.attention.patch import Patch
from farspan.attention.probe import Layer, probe
from farspan.attention.scales import Scales
from farspan.data.recall import ChangeRow, recall_rows
from farspan.errors import FarspanError
from farspan.files import read_json, write_json
from farspan.methods.distill import DistillModule, make_teacher
from farspan.methods.job import FitJob, loss_margin
from farspan.methods.layer_costs import rows_with_repeats
from farspan.methods.long_windows import LongPlan, train_on_long_windows
from farspan.methods.swan_config import DistillPlan, SwanConfig
from farspan.methods.swan_layout import choose_layout
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

LEARNING_RATE = 1e-3
SLOPES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)  # of the scales of global layers


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
        return choose_layout(model, teacher, job, config)
    file = job.folder / "layout.json"
    with processes().main_process_first():
        if not file.exists():
            layout = choose_layout(model, teacher, job, config)
            write_json(file, {"layout": layout.to_json(), "details": job.details})
    stored = read_json(file)
    job.details.update(stored["details"])
    return Layout.parse(stored["layout"])


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
