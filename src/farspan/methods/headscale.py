"""HeadScale (paper A, §3): λ̂ for every head, found by gradient descent with everything else frozen.

`headlog` goes beyond the paper: λ̂(n) = a + b·ln⁺(n/L), two numbers a head, which costs less where the context is short.
The constraint a ≥ 1, b ≥ 0 is a projection of the very float32 numbers that are optimised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.methods.job import Job, least, scaled_loss
from farspan.methods.uniform import uniform
from farspan.model.fast import compiled_layers, quick_attention
from farspan.model.loss import mean_loss
from farspan.train.loop import Moment, Plan, train
from farspan.train.optim import Optimization, with_rates
from farspan.train.sharding import data_parallel
from farspan.train.steps import Work

POSITIVE = 0.01  # λ̂ of a search without the constraint; below 0 a head would attend to what it had least use for
FAITHFUL = 0.99  # cosine to the gradient in float32


@dataclass(frozen=True)
class Search:
    """How scales are searched for: the paper's numbers."""

    steps: int = 200
    batch: int = 8
    micro_batch: int = 8
    lr: tuple[float, ...] = (0.1, 0.05)  # tried in turn; the second split chooses
    warmup: int = 20
    constraint: bool = True  # λ̂ ≥ 1
    init: float = 0.0  # 0: the best uniform λ̂
    save_every: int = 50

    def __post_init__(self):
        for name in ("steps", "batch", "micro_batch", "save_every"):
            if getattr(self, name) < 1:
                raise FarspanError(f"search.{name} is {getattr(self, name)}; give 1 or more")
        if not self.lr or min(self.lr) <= 0:
            raise FarspanError(f"search.lr is {list(self.lr)}; give one or more learning rates above 0")
        if self.init < 0 or self.warmup < 0:
            raise FarspanError(f"search.init {self.init:g} and search.warmup {self.warmup} cannot be less than 0")


def headscale(model: PreTrainedModel, job: Job, search: Search | None = None) -> Patch:
    """One constant λ̂ a head."""
    search = search or Search()
    start = search.init or best_uniform(model, job, search)
    return _searched(model, job, search, "headscale", job.uniform(start))


def headlog(model: PreTrainedModel, job: Job, search: Search | None = None) -> Patch:
    """λ̂(n) = a + b·ln⁺(n/L) a head, from a = 1 and the b that meets the best uniform λ̂ at the target."""
    search = search or Search()
    search = replace(search, lr=tuple(lr / 2 for lr in search.lr))  # two numbers move one scale
    reach = math.log(job.target / job.train_length)
    slope = ((search.init or best_uniform(model, job, search)) - 1) / reach
    table = torch.full((len(job.layers), job.heads), max(0.0, slope))
    scales = Scales(job.layers, torch.ones_like(table), table, "log", job.train_length)
    return _searched(model, job, search, "headlog", scales)


def best_uniform(model: PreTrainedModel, job: Job, search: Search) -> float:
    """Where a search begins: the best single λ̂ that it may have."""
    found = uniform(model, job).scales
    assert found is not None
    return max(1.0, float(found.base[0, 0])) if search.constraint else float(found.base[0, 0])


def _searched(model: PreTrainedModel, job: Job, search: Search, method: str, start: Scales) -> Patch:
    """The best on the second split of what each learning rate comes to."""
    found = {lr: descend(model, job, search, method, start, lr) for lr in search.lr}
    if len(found) == 1:
        return job.patch(method, scales=found[search.lr[0]])
    losses = {lr: scaled_loss(model, job.choose, scales) for lr, scales in found.items()}
    return job.patch(method, scales=found[least(losses)])


class Scaled(nn.Module):
    """The mean loss of a batch under scales that learn. The model is not a part of it: what is spread over processes,
    reduced and saved is the scales alone."""

    def __init__(self, model: PreTrainedModel, start: Scales):
        super().__init__()
        self.base = nn.Parameter(start.base.clone().to(model.device))
        self.slope = None if start.slope is None else nn.Parameter(start.slope.clone().to(model.device))
        self.rounded = False  # products in bf16
        self._model = (model,)  # in a tuple it is no submodule
        self._start = start

    @property
    def scales(self) -> Scales:
        return replace(self._start, base=self.base, slope=self.slope)

    def forward(self, ids: Tensor) -> Tensor:
        with quick_attention(), torch.autocast(ids.device.type, torch.bfloat16, enabled=self.rounded):
            return mean_loss(self._model[0], ids)

    def bears_rounding(self, ids: Tensor) -> bool:
        """Whether products in bf16 give the gradient of float32, told by these windows; where scores are large they do
        not."""
        before, found = self.rounded, []
        for self.rounded in (False, True):
            found.append(torch.cat([part.flatten() for part in torch.autograd.grad(self(ids), [*self.parameters()])]))
        self.rounded = before
        exact, rounded = found
        return float(torch.cosine_similarity(exact, rounded, dim=0)) > FAITHFUL

    @torch.no_grad()
    def project(self, constraint: bool, length: int) -> None:
        """λ̂ ≥ 1 at every number of keys; without the constraint λ̂ > 0, at up to so many."""
        self.base.clamp_(min=1.0 if constraint else POSITIVE)
        if self.slope is not None:
            falling = (POSITIVE - self.base) / math.log(length / self._start.length)
            self.slope.clamp_(min=torch.zeros_like(falling) if constraint else falling)


def descend(model: PreTrainedModel, job: Job, search: Search, method: str, start: Scales, lr: float) -> Scales:
    """Scales after the search at one learning rate; resumed where it was stopped if the job has a folder."""
    scaled = Scaled(model, start)
    trained: dict[str, Tensor] = dict(scaled.named_parameters())
    how = Optimization("adamw", lr=lr, weight_decay=0.0, warmup=search.warmup, schedule="cosine", floor=0.1, clip=1.0)
    optimizer = torch.optim.AdamW(trained.values(), lr, (how.beta1, how.beta2), weight_decay=0.0)
    work = Work(
        data_parallel(scaled),
        trained,
        with_rates([optimizer]),
        job.batches(search.batch, search.micro_batch, model.device),
        tokens=search.batch * (job.search.shape[1] - 1),
        after_step=lambda: scaled.project(search.constraint, job.search.shape[1]),
    )
    plan = Plan(search.steps, job.seed, how, save_every=search.save_every, log_every=1)
    advance = job.progress(f"{method} lr {lr:g}", search.steps)

    def listen(moment: Moment) -> None:
        table = scaled.base.detach()
        advance(1, f"loss {moment.loss:.4f}, λ̂ {table.min():.2f}–{table.max():.2f}, mean {table.mean():.2f}")

    seam.install(model, scaled.scales)
    try:
        if model.device.type == "cuda" and model.dtype == torch.float32:
            with seam.frozen(model):
                scaled.rounded = scaled.bears_rounding(job.search[:1].to(model.device))
        with seam.frozen(model), compiled_layers(model), job.kept(f"{method}-lr{lr:g}") as folder:
            train(work, plan, folder, listen)
    finally:
        seam.uninstall(model)
    found = scaled.scales
    return replace(
        found, base=found.base.detach().cpu(), slope=None if found.slope is None else found.slope.detach().cpu()
    )
