"""HeadScale (Wang 2024, §3): one λ̂ per head, found by gradient descent on frozen weights.

`headlog` is farspan's own: λ̂(n) = a + b·ln⁺(n/L), two numbers per head, which costs less loss
at short context. The constraint a ≥ 1, b ≥ 0 projects the float32 parameters after every step.
With one growth for all heads (`search.shared`) it is the formula of a stock class instead.

The search ends when the loss on the choose split no longer falls. With a number of steps it is that
of Wang 2024 instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.scales import BASES, RelativeScales, Scales
from farspan.data.passkey import PasskeyDocuments, train_key
from farspan.data.recall import recall_rows
from farspan.errors import FarspanError
from farspan.methods.job import (
    MICRO_BATCH_TOKENS,
    FitJob,
    default_micro_batch,
    loss_margin,
    lowest_loss,
    scaled_loss,
)
from farspan.methods.search_config import SearchConfig, SearchPlan
from farspan.methods.uniform import uniform
from farspan.model.compile import MIN_COMPILED_SIZE, compiled_layers, prefer_cudnn
from farspan.model.loss import last_losses, mean_loss, token_losses
from farspan.model.recompute import recomputed_activations
from farspan.progress import by_step
from farspan.train.loop import StepMetrics, TrainPlan, TrainResult, train
from farspan.train.optim import OptimizerConfig, store_base_rates
from farspan.train.sharding import data_parallel, processes
from farspan.train.steps import TrainingTask

MIN_SCALE = 0.01  # lower bound of λ̂ without the constraint: a negative λ̂ inverts attention
MIN_COSINE = 0.99  # of the bf16 gradient to that of float32
# By which gradients of a float16 model are multiplied while they pass through it.
GRADIENT_FACTOR = float(MICRO_BATCH_TOKENS)
VALIDATED = 4  # windows of the choose split that the plateau is judged on


def headscale(model: PreTrainedModel, job: FitJob, search: SearchConfig | None = None) -> Patch:
    """One constant λ̂ per head."""
    search = search or SearchConfig()
    check_init(search, job)
    if job.start is None:
        start = Scales(job.layers, _first(model, job, search))
        return _search(model, job, search, "headscale", start)
    if not job.start.constant:
        raise FarspanError(
            f"the scales of {job.start_name} grow with the context, and headscale searches "
            "constant ones; use headlog, which starts from them, or extend the base model"
        )
    return _search(model, job, search, "headscale", job.start)


def headlog(model: PreTrainedModel, job: FitJob, search: SearchConfig | None = None) -> Patch:
    """λ̂(n) = a + b·ln⁺(n/L) per head; with `search.shared` a·(1 + r·basis(n)), one r for all.

    The search starts from a = 1 and the b that gives the λ̂ to start from at the target. A shared
    search starts from that λ̂ at any length: a step at L from 1 to more would break the model.
    """
    search = search or SearchConfig()
    check_init(search, job)
    if search.shared:
        return _shared_headlog(model, job, search)
    if job.start is not None:
        return _search(model, job, search, "headlog", _growing(job.start, job))
    first, length = _first(model, job, search), job.train_length
    slope = ((first - 1) / _basis_at(job.target, "log", length)).clamp(min=0)
    scales = Scales(job.layers, torch.ones_like(first), slope, "log", length)
    return _search(model, job, search, "headlog", scales)


def _shared_headlog(model: PreTrainedModel, job: FitJob, search: SearchConfig) -> Patch:
    if job.start is not None:
        raise FarspanError(
            f"search.shared=true cannot start from the scales of {job.start_name}, whose heads "
            "grow each by itself; extend the base model"
        )
    first, basis = _first(model, job, search), _stock_basis(model, job.layers)
    relative = RelativeScales(job.layers, first, 0 * first, basis, job.train_length)
    patch = _search(model, job, search, "headlog", relative)
    assert isinstance(patch.scales, RelativeScales)
    return replace(patch, scales=patch.scales.absolute())


def _stock_basis(model: PreTrainedModel, layers: Sequence[int]) -> str:
    """Ministral 3 counts positions and rotates every layer; Llama 4 counts keys where none does."""
    rotary = all(layer.position == "rope" for layer in probe(model) if layer.index in layers)
    return "floor-position" if rotary else "floor"


def _basis_at(n: int, basis: str, length: int) -> float:
    return float(BASES[basis](torch.tensor(float(n)), length))


def _growing(start: Scales, job: FitJob) -> Scales:
    """Existing scales as a + b·ln⁺(n/L)."""
    if start.constant:
        zeros = torch.zeros_like(start.base)
        return replace(start, slope=zeros, basis="log", length=job.train_length)
    if (start.basis, start.length) != ("log", job.train_length):
        raise FarspanError(
            f"the scales of {job.start_name} follow another formula than a + b·ln⁺(n/L) with "
            f"L = {job.train_length} (basis {start.basis}), so headlog cannot start from them; "
            "extend the base model"
        )
    return start


def _first(model: PreTrainedModel, job: FitJob, search: SearchConfig) -> Tensor:
    """The λ̂ that a search without a patch starts from, [layers, heads]."""
    value = search.init or (best_uniform(model, job, search) if search.steps else 1.0)
    return torch.tensor(value).reshape(-1, 1).expand(len(job.layers), job.heads).clone()


def best_uniform(model: PreTrainedModel, job: FitJob, search: SearchConfig) -> float:
    """The best uniform λ̂ that the constraint allows."""
    scales = uniform(model, job).scales
    assert scales is not None
    (best,) = scales.base.unique().tolist()
    return search.allowed(best)


def check_init(search: SearchConfig, job: FitJob) -> None:
    """Refuse a start that has no effect, or not one scale for each layer."""
    if search.init and job.start is not None:
        raise FarspanError(
            f"the search starts from the scales of {job.start_name}, so search.init={search.init} "
            "would have no effect; remove it"
        )
    if isinstance(search.init, tuple) and len(search.init) != len(job.layers):
        raise FarspanError(
            f"search.init has {len(search.init)} scales, and {len(job.layers)} layers are scaled "
            f"({', '.join(map(str, job.layers))}); choose one for each, or one number"
        )


def _search(
    model: PreTrainedModel, job: FitJob, search: SearchConfig, method: str, start: Scales
) -> Patch:
    """Search with each learning rate; the loss on the choose split selects the result."""
    plan = search.resolve(job.has_nope)
    if search.passkeys and job.tokenizer is None:
        raise FarspanError(
            "search.passkeys needs a tokenizer, and this model has none; set search.passkeys=0"
        )
    if (
        search.passkeys is None
        and plan.passkeys
        and not all_processes_agree(retrieves_passkeys(model, job), model.device)
    ):
        plan = replace(plan, passkeys=0.0)
    if method == "headlog":  # two numbers move one scale
        plan = replace(plan, lr=tuple(lr / 2 for lr in plan.lr))
    candidates = {
        lr: optimize_scales(model, job, search, plan, method, start, lr) for lr in plan.lr
    }
    if len(candidates) == 1:
        return job.patch(method, scales=candidates[plan.lr[0]])
    losses = {lr: scaled_loss(model, job.choose, scales) for lr, scales in candidates.items()}
    return job.patch(method, scales=candidates[lowest_loss(losses)])


@torch.no_grad()
def retrieves_passkeys(model: PreTrainedModel, job: FitJob, keys: int = 5) -> bool:
    """Whether passkeys at the train length are more likely than not, token by token."""
    if job.tokenizer is None:
        return False
    documents, length = PasskeyDocuments(job.tokenizer, job.begin), job.train_length
    if documents.shortest > length:
        return False
    rng = np.random.default_rng(job.seed)
    losses = []
    for depth in np.linspace(0, 1, keys).tolist():
        key = train_key(rng)
        ids = torch.tensor([documents.document(length, depth, key)], device=model.device)
        losses.append(float(last_losses(model, ids, len(documents.answer(key))).mean()))
    return math.fsum(losses) / keys < math.log(2)


def all_processes_agree(value: bool, device: torch.device) -> bool:
    """Whether it is true in every process: all of them must read the same text."""
    votes = torch.tensor(int(value), device=device)
    if processes().num_processes > 1:
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
    return bool(votes)


class ScaledModel(nn.Module):
    """The mean loss of a batch under trainable scales.

    answers: the weight of the mean loss of a row's answers, which batches [2, B, T] mark, in the
        mean over rows.
    tail: extra weight of the last quarter of a window.
    The model is not a submodule, so only the scales are distributed, reduced and saved.
    """

    def __init__(
        self, model: PreTrainedModel, start: Scales, answers: float = 0.0, tail: float = 0.0
    ):
        super().__init__()
        self.answers, self.tail = answers, tail
        self.base = nn.Parameter(start.base.clone().to(model.device))
        self.shared = isinstance(start, RelativeScales)
        self.slope = None
        if start.slope is not None:  # one number if it is shared, else a table
            slope = start.slope[:1, :1] if self.shared else start.slope
            self.slope = nn.Parameter(slope.clone().to(model.device))
        self.use_bf16 = False  # for matrix products
        # Each of many tokens changes the mean loss by less than float16 can hold.
        self._gradient_factor = factor = GRADIENT_FACTOR if model.dtype == torch.float16 else 1.0
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient / factor)
        self._model = (model,)  # a tuple hides it from nn.Module
        self._start = start

    @property
    def scales(self) -> Scales:
        slope = None if self.slope is None else self.slope.expand_as(self.base)
        return replace(self._start, base=self.base, slope=slope)

    def forward(self, batch: Tensor) -> Tensor:
        ids, answers = batch if batch.dim() == 3 else (batch, None)
        with prefer_cudnn(), torch.autocast(ids.device.type, torch.bfloat16, enabled=self.use_bf16):
            return mean_loss(
                self._model[0],
                ids,
                answers=answers,
                answer_weight=self.answers,
                tail_weight=self.tail,
                gradient_factor=self._gradient_factor,
            )

    def bf16_is_accurate(self, ids: Tensor) -> bool:
        """Whether bf16 products give the float32 gradient on these windows.

        They do not where attention scores are large. In float32 a window keeps twice the memory of
        a step in bf16, so activations are computed again.
        """
        before, gradients = self.use_bf16, []
        for self.use_bf16 in (False, True):
            with recomputed_activations():
                parts = torch.autograd.grad(self(ids), [*self.parameters()])
            gradients.append(torch.cat([part.flatten() for part in parts]))
        self.use_bf16 = before
        exact, rounded = gradients
        return float(torch.cosine_similarity(exact, rounded, dim=0)) > MIN_COSINE

    @torch.no_grad()
    def validation_loss(self, windows: Tensor) -> float:
        """The mean loss over windows, of which each process computes its share."""
        state = processes()
        ids = windows[state.process_index :: state.num_processes].to(self.base.device)
        total = torch.zeros((), dtype=torch.float64, device=self.base.device)
        with (
            prefer_cudnn(),
            torch.autocast(ids.device.type, torch.bfloat16, enabled=self.use_bf16),
            torch.compiler.set_stance("force_eager"),  # their length is compiled for nothing else
        ):
            for row in ids:
                total += token_losses(self._model[0], row[None]).double().mean()
        if state.num_processes > 1:
            torch.distributed.all_reduce(total)
        return float(total) / len(windows)

    @torch.no_grad()
    def project(self, constraint: bool, length: int) -> None:
        """Clamp to λ̂ ≥ 1 for any number of keys; unconstrained, to λ̂ > 0 for up to `length`."""
        self.base.clamp_(min=1.0 if constraint else MIN_SCALE)
        if self.slope is not None:
            base = torch.ones_like(self.slope) if self.shared else self.base
            lowest = (MIN_SCALE - base) / _basis_at(length, self._start.basis, self._start.length)
            self.slope.clamp_(min=torch.zeros_like(lowest) if constraint else lowest)


def optimize_scales(
    model: PreTrainedModel,
    job: FitJob,
    search: SearchConfig,
    plan: SearchPlan,
    method: str,
    start: Scales,
    lr: float,
) -> Scales:
    """The scales that a search with one learning rate ends in.

    A job with a folder resumes from its last checkpoint.
    """
    # Of the rows with a passkey, of which there are so many in a batch on average.
    answers = plan.answers / plan.passkeys if plan.passkeys else 0.0
    start = replace(start, layer_heads=job.layer_heads)
    scaled = ScaledModel(model, start, answers, plan.tail)
    scaled.project(search.constraint, job.search.shape[1])
    config = OptimizerConfig(
        "adamw",
        lr=lr,
        weight_decay=0.0,
        warmup=plan.warmup,
        schedule="constant" if plan.plateau else "cosine",
        floor=0.1,
        clip=1.0,
    )
    validations: list[float] = []
    task = _search_task(model, scaled, job, search, plan, config, validations)
    steps = TrainPlan(
        plan.steps,
        job.seed,
        config,
        search.save_every,
        log_every=1,
        plateau=plan.plateau,
        margin=loss_margin(answers),
    )
    advance = job.progress(f"{method} lr {lr:g}", plan.steps)
    advance_to = by_step(advance)

    def on_step(metrics: StepMetrics) -> None:
        table = start.used(scaled.base.detach())
        extremes = f"λ̂ {table.min():.2f}–{table.max():.2f}, mean {table.mean():.2f}"
        chosen = f", on the choose split {validations[-1]:.4f}" if validations else ""
        advance_to(metrics.step, f"loss {metrics.loss:.4f}{chosen}, {extremes}")

    with seam.scaled(model, scaled.scales):
        if model.device.type == "cuda" and model.dtype == torch.float32:
            with seam.frozen(model):
                scaled.use_bf16 = scaled.bf16_is_accurate(job.search[:1].to(model.device))
        with (
            seam.frozen(model),
            compiled_layers(model, min_size=MIN_COMPILED_SIZE),
            job.checkpoint_dir(f"{method}-lr{lr:g}") as folder,
        ):
            result = train(task, steps, folder, on_step)
    job.details.setdefault("searches", []).append(_describe(method, lr, plan, result))
    advance(0, job.details["searches"][-1]["end"])
    scales = scaled.scales
    return replace(
        scales,
        base=scales.base.detach().cpu(),
        slope=None if scales.slope is None else scales.slope.detach().cpu(),
    )


def _describe(method: str, lr: float, plan: SearchPlan, result: TrainResult) -> dict[str, Any]:
    """For the record: how long a search was, and why it ended."""
    rule, end = plan.plateau, f"after {result.steps} steps, as search.steps says"
    if rule is not None and rule.plateau(result.validations) is None:
        end = f"after {result.steps} steps, the limit; the loss on the choose split still fell"
    elif rule is not None:
        end = (
            f"after {result.steps} steps: the loss on the choose split fell by less than "
            f"{rule.min_gain:g} nats in {rule.patience * rule.every} steps"
        )
    return {
        "method": method,
        "lr": lr,
        "steps": result.steps,
        "batch": plan.batch,
        "repeats": plan.repeats,
        "passkeys": plan.passkeys,
        "answers": plan.answers if plan.passkeys else 0.0,
        "tail": plan.tail,
        "end": end,
        "choose_losses": [round(loss, 5) for loss in result.validations],
    }


def _search_task(
    model: PreTrainedModel,
    scaled: ScaledModel,
    job: FitJob,
    search: SearchConfig,
    plan: SearchPlan,
    config: OptimizerConfig,
    validations: list[float],
) -> TrainingTask:
    trained: dict[str, Tensor] = dict(scaled.named_parameters())
    betas = (config.beta1, config.beta2)
    # A gradient of the norm that is clipped to, spread over all scales, has this size. Scales with
    # a much smaller one stay where they are: retrieval may need them there.
    eps = 1e-8 if plan.plateau is None else sum(map(Tensor.numel, trained.values())) ** -0.5
    optimizer = torch.optim.AdamW(trained.values(), config.lr, betas, eps, weight_decay=0.0)

    def validate() -> float:
        validations.append(scaled.validation_loss(job.choose[:VALIDATED]))
        return validations[-1]

    return TrainingTask(
        data_parallel(scaled),
        trained,
        store_base_rates([optimizer]),
        job.batches(
            plan.batch,
            plan.micro_batch or default_micro_batch(plan.batch, job.search.shape[1]),
            model.device,
            recall_rows(
                job.seed,
                repeats=plan.repeats,
                min_distance=job.train_length // 4,
                spans=search.spans,
                passkeys=plan.passkeys,
                tokenizer=job.tokenizer,
            ),
            with_answers=plan.passkeys > 0,
        ),
        tokens=plan.batch * (job.search.shape[1] - 1),
        after_step=lambda: scaled.project(search.constraint, job.search.shape[1]),
        validate=validate,
        can_retry=True,
    )
