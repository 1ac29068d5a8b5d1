"""AdamW and Muon with the learning-rate schedules of the papers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from farspan.errors import FarspanError
from farspan.train.sharding import cut_like, whole

SHAPES = ("linear", "cosine", "constant")
OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class Optimization:
    """How parameters learn. `muon` takes the matrices of the layers; AdamW takes everything else, or everything."""

    optimizer: str = "muon"
    lr: float = 3e-3  # of AdamW
    matrix_lr: float = 0.02  # of Muon
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.05  # of matrices, times the learning rate
    warmup: int = 100  # steps from 0 to the full rate
    schedule: str = "linear"
    decay: float = 0.35  # linear: the last share of the steps, over which the rate falls
    floor: float = 0.0  # the share of the rate at the end
    clip: float = 1.0  # of the gradient's norm; 0 leaves it

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise FarspanError(f"optimizer {self.optimizer!r} is unknown; choose {' or '.join(OPTIMIZERS)}")
        if self.schedule not in SHAPES:
            raise FarspanError(f"schedule {self.schedule!r} is unknown; choose one of {', '.join(SHAPES)}")
        for name in ("decay", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise FarspanError(f"{name} is {getattr(self, name):g}; choose it from 0 to 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise FarspanError(f"{name} is {getattr(self, name):g}; choose it from 0 to below 1")
        for name in ("lr", "matrix_lr", "weight_decay", "warmup", "clip"):
            if getattr(self, name) < 0:
                raise FarspanError(f"{name} is {getattr(self, name):g}; it cannot be less than 0")


def rate(step: int, steps: int, how: Optimization) -> float:
    """The multiplier of every learning rate at a step, 0-based."""
    if step < how.warmup:
        return (step + 1) / how.warmup
    if how.schedule == "linear":
        left = (steps - step) / max(1, how.decay * steps)
        return how.floor + (1 - how.floor) * min(1.0, left)
    if how.schedule == "cosine":
        gone = (step - how.warmup) / max(1, steps - how.warmup)
        return how.floor + (1 - how.floor) * (1 + math.cos(math.pi * gone)) / 2
    return 1.0


def optimizers(module: nn.Module, how: Optimization) -> list[Optimizer]:
    """The optimizers of a module's trainable parameters. Tables and vectors are never decayed."""
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    if (head := getattr(module, "get_output_embeddings", lambda: None)()) is not None:
        tables.add(id(head.weight))  # a head of its own is a table of tokens too
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in tables]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
    betas = (how.beta1, how.beta2)
    # On a GPU the rates are tensors and the steps fused, so that a recorded step can follow the schedule.
    on_gpu = trained[0].is_cuda
    faster = {"fused": True, "capturable": True} if on_gpu else {}
    lr, matrix_lr = (torch.tensor(lr).to(trained[0].device) if on_gpu else lr for lr in (how.lr, how.matrix_lr))
    if how.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": how.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return with_rates([AdamW([group for group in groups if group["params"]], lr, betas, **faster)])
    made: list[Optimizer] = [StackedMuon(matrices, matrix_lr, how.weight_decay)] if matrices else []  # type: ignore[arg-type]
    if rest:
        made.append(AdamW(rest, lr, betas, weight_decay=0.0, **faster))
    return with_rates(made)


def with_rates(made: list[Optimizer]) -> list[Optimizer]:
    """Remember each group's full learning rate, which the schedule multiplies."""
    for optimizer in made:
        for group in optimizer.param_groups:
            group["full_lr"] = float(group["lr"])
    return made


def set_rate(made: Sequence[Optimizer], multiplier: float) -> None:
    for optimizer in made:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["full_lr"] * multiplier)
            else:
                group["lr"] = group["full_lr"] * multiplier


class StackedMuon(Muon):
    """torch's Muon, with all matrices of one shape orthogonalised in one batched product.

    Its own loop launches some twenty small kernels for each matrix, which costs a small model a third of its step
    (docs/performance.md). The state is torch's, so either can go on from the other's checkpoint.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_together(parameters, shape, group)

    def _step_together(self, parameters: list[Tensor], shape: torch.Size, group: dict) -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, grad in zip(parameters, grads, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(grad)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momentum, lr = group["momentum"], group["lr"]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov's look ahead
        directions = orthogonalise(torch.stack([whole(update) for update in updates]), group).float()
        directions *= -lr * math.sqrt(max(1, shape[0] / shape[1]))
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        steps = [cut_like(each, like) for each, like in zip(directions.unbind(), parameters, strict=True)]
        torch._foreach_add_(parameters, steps)


def orthogonalise(updates: Tensor, group: dict) -> Tensor:
    """Newton–Schulz on a stack [n, rows, columns]: each matrix's singular values go towards 1.

    In bf16, which it bears; but not on a CPU, where that is a hundred times slower than float32.
    """
    a, b, c = group["ns_coefficients"]
    tall = updates.shape[1] > updates.shape[2]
    x = updates.bfloat16() if updates.is_cuda else updates
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
