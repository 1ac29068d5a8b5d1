"""HeadScale (Wang 2024, §3): one λ̂ per head, found by gradient descent on frozen weights.

`headlog` is farspan's own: λ̂(n) = a + b·ln⁺(n/L), two numbers per head, which costs less loss
at short context. The constraint a ≥ 1, b ≥ 0 projects the float32 parameters after every step.
With one growth for all heads (`search.shared`) it is the formula of a stock class instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.scales import BASES, RelativeScales, Scales
from farspan.data.recall import recall_rows
from farspan.errors import FarspanError
from farspan.methods.job import FitJob, lowest_loss, scaled_loss
from farspan.methods.uniform import uniform
from farspan.model.compile import compiled_layers, prefer_cudnn
from farspan.model.loss import mean_loss
from farspan.train.loop import StepMetrics, TrainPlan, train
from farspan.train.optim import OptimizerConfig, store_base_rates
from farspan.train.sharding import data_parallel
from farspan.train.steps import TrainingTask

MIN_SCALE = 0.01  # lower bound of λ̂ without the constraint: a negative λ̂ inverts attention
MIN_COSINE = 0.99  # of the bf16 gradient to that of float32


@dataclass(frozen=True)
class SearchConfig:
    """Settings of the search for scales; the defaults are those of Wang 2024."""

    steps: int = 200
    batch: int = 8
    micro_batch: int = 8
    lr: tuple[float, ...] = (0.1, 0.05)  # each is tried; the choose split selects one
    warmup: int = 20
    constraint: bool = True  # λ̂ ≥ 1
    init: float = 0.0  # 0: the best uniform λ̂
    beyond: float = 1.125  # windows are so many times the target: Wang 2024 reads 18K for 16K
    repeats: float = 0.0  # share of the windows with spans that stand twice
    shared: bool = False  # headlog: one growth for all heads, as Llama 4 and Ministral 3 have it
    save_every: int = 50

    def __post_init__(self):
        for name in ("steps", "batch", "micro_batch", "save_every"):
            if getattr(self, name) < 1:
                raise FarspanError(f"search.{name} is {getattr(self, name)}; choose 1 or more")
        if not self.lr or min(self.lr) <= 0:
            raise FarspanError(
                f"search.lr is {list(self.lr)}; choose one or more learning rates above 0"
            )
        if not 1 <= self.beyond <= 2:
            raise FarspanError(f"search.beyond is {self.beyond:g}; choose a factor from 1 to 2")
        if not 0 <= self.repeats <= 1:
            raise FarspanError(f"search.repeats is {self.repeats:g}; choose a share from 0 to 1")
        if self.init < 0 or self.warmup < 0:
            raise FarspanError(
                f"search.init is {self.init:g} and search.warmup is {self.warmup}; "
                "choose 0 or more for both"
            )


def headscale(model: PreTrainedModel, job: FitJob, search: SearchConfig | None = None) -> Patch:
    """One constant λ̂ per head."""
    search = search or SearchConfig()
    start = search.init or best_uniform(model, job, search)
    return _search(model, job, search, "headscale", job.uniform(start))


def headlog(model: PreTrainedModel, job: FitJob, search: SearchConfig | None = None) -> Patch:
    """λ̂(n) = a + b·ln⁺(n/L) per head; with `search.shared` a·(1 + r·basis(n)), one r for all.

    The search starts from a = 1 and the b that gives the best uniform λ̂ at the target. A shared
    search starts from that λ̂ at any length: a step at L from 1 to more would break the model.
    """
    search = search or SearchConfig()
    search = replace(search, lr=tuple(lr / 2 for lr in search.lr))  # two numbers move one scale
    start = search.init or best_uniform(model, job, search)
    ones, length = torch.ones(len(job.layers), job.heads), job.train_length
    if not search.shared:
        slope = max(0.0, (start - 1) / _basis_at(job.target, "log", length))
        scales = Scales(job.layers, ones, slope * ones, "log", length)
        return _search(model, job, search, "headlog", scales)
    basis = _stock_basis(model, job.layers)
    relative = RelativeScales(job.layers, start * ones, 0 * ones, basis, length)
    patch = _search(model, job, search, "headlog", relative)
    assert isinstance(patch.scales, RelativeScales)
    return replace(patch, scales=patch.scales.absolute())


def _stock_basis(model: PreTrainedModel, layers: Sequence[int]) -> str:
    """Ministral 3 counts positions and rotates every layer; Llama 4 counts keys where none does."""
    rotary = all(layer.position == "rope" for layer in probe(model) if layer.index in layers)
    return "floor-position" if rotary else "floor"


def _basis_at(n: int, basis: str, length: int) -> float:
    return float(BASES[basis](torch.tensor(float(n)), length))


def best_uniform(model: PreTrainedModel, job: FitJob, search: SearchConfig) -> float:
    """The best uniform λ̂ that the constraint allows: where a search starts."""
    scales = uniform(model, job).scales
    assert scales is not None
    return max(1.0, float(scales.base[0, 0])) if search.constraint else float(scales.base[0, 0])


def _search(
    model: PreTrainedModel, job: FitJob, search: SearchConfig, method: str, start: Scales
) -> Patch:
    """Search with each learning rate; the loss on the choose split selects the result."""
    candidates = {lr: optimize_scales(model, job, search, method, start, lr) for lr in search.lr}
    if len(candidates) == 1:
        return job.patch(method, scales=candidates[search.lr[0]])
    losses = {lr: scaled_loss(model, job.choose, scales) for lr, scales in candidates.items()}
    return job.patch(method, scales=candidates[lowest_loss(losses)])


class ScaledModel(nn.Module):
    """The mean loss of a batch under trainable scales.

    The model is not a submodule, so only the scales are distributed, reduced and saved.
    """

    def __init__(self, model: PreTrainedModel, start: Scales):
        super().__init__()
        self.base = nn.Parameter(start.base.clone().to(model.device))
        self.shared = isinstance(start, RelativeScales)
        self.slope = None
        if start.slope is not None:  # one number if it is shared, else a table
            slope = start.slope[:1, :1] if self.shared else start.slope
            self.slope = nn.Parameter(slope.clone().to(model.device))
        self.use_bf16 = False  # for matrix products
        self._model = (model,)  # a tuple hides it from nn.Module
        self._start = start

    @property
    def scales(self) -> Scales:
        slope = None if self.slope is None else self.slope.expand_as(self.base)
        return replace(self._start, base=self.base, slope=slope)

    def forward(self, ids: Tensor) -> Tensor:
        with prefer_cudnn(), torch.autocast(ids.device.type, torch.bfloat16, enabled=self.use_bf16):
            return mean_loss(self._model[0], ids)

    def bf16_is_accurate(self, ids: Tensor) -> bool:
        """Whether bf16 products give the float32 gradient on these windows.

        They do not where attention scores are large.
        """
        before, gradients = self.use_bf16, []
        for self.use_bf16 in (False, True):
            parts = torch.autograd.grad(self(ids), [*self.parameters()])
            gradients.append(torch.cat([part.flatten() for part in parts]))
        self.use_bf16 = before
        exact, rounded = gradients
        return float(torch.cosine_similarity(exact, rounded, dim=0)) > MIN_COSINE

    @torch.no_grad()
    def project(self, constraint: bool, length: int) -> None:
        """Clamp to λ̂ ≥ 1 for any number of keys; unconstrained, to λ̂ > 0 for up to `length`."""
        self.base.clamp_(min=1.0 if constraint else MIN_SCALE)
        if self.slope is not None:
            base = torch.ones_like(self.slope) if self.shared else self.base
            lowest = (MIN_SCALE - base) / _basis_at(length, self._start.basis, self._start.length)
            self.slope.clamp_(min=torch.zeros_like(lowest) if constraint else lowest)


def optimize_scales(
    model: PreTrainedModel, job: FitJob, search: SearchConfig, method: str, start: Scales, lr: float
) -> Scales:
    """The scales that a search with one learning rate ends in.

    A job with a folder resumes from its last checkpoint.
    """
    scaled = ScaledModel(model, start)
    config = OptimizerConfig(
        "adamw",
        lr=lr,
        weight_decay=0.0,
        warmup=search.warmup,
        schedule="cosine",
        floor=0.1,
        clip=1.0,
    )
    task = _search_task(model, scaled, job, search, config)
    plan = TrainPlan(search.steps, job.seed, config, save_every=search.save_every, log_every=1)
    advance = job.progress(f"{method} lr {lr:g}", search.steps)

    def on_step(metrics: StepMetrics) -> None:
        table = scaled.base.detach()
        extremes = f"λ̂ {table.min():.2f}–{table.max():.2f}, mean {table.mean():.2f}"
        advance(1, f"loss {metrics.loss:.4f}, {extremes}")

    seam.install(model, scaled.scales)
    try:
        if model.device.type == "cuda" and model.dtype == torch.float32:
            with seam.frozen(model):
                scaled.use_bf16 = scaled.bf16_is_accurate(job.search[:1].to(model.device))
        with (
            seam.frozen(model),
            compiled_layers(model),
            job.checkpoint_dir(f"{method}-lr{lr:g}") as folder,
        ):
            train(task, plan, folder, on_step)
    finally:
        seam.remove_scales(model)
    scales = scaled.scales
    return replace(
        scales,
        base=scales.base.detach().cpu(),
        slope=None if scales.slope is None else scales.slope.detach().cpu(),
    )


def _search_task(
    model: PreTrainedModel,
    scaled: ScaledModel,
    job: FitJob,
    search: SearchConfig,
    config: OptimizerConfig,
) -> TrainingTask:
    trained: dict[str, Tensor] = dict(scaled.named_parameters())
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(trained.values(), config.lr, betas, weight_decay=0.0)
    return TrainingTask(
        data_parallel(scaled),
        trained,
        store_base_rates([optimizer]),
        job.batches(
            search.batch,
            search.micro_batch,
            model.device,
            recall_rows(job.seed, repeats=search.repeats, min_distance=job.train_length // 4),
        ),
        tokens=search.batch * (job.search.shape[1] - 1),
        after_step=lambda: scaled.project(search.constraint, job.search.shape[1]),
    )
