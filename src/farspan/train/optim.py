"""AdamW and Muon, with the learning rate schedules of the papers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from farspan.checks import check_least, check_shares
from farspan.errors import FarspanError
from farspan.model.positions import Position
from farspan.train.sharding import full_tensor, shard_like

SCHEDULES = ("linear", "cosine", "constant")
OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimization] `muon` trains the matrices of the layers with Muon and the rest with AdamW;
    `adamw` trains everything with AdamW."""

    optimizer: str = "muon"
    lr: float = 3e-3  # of AdamW
    matrix_lr: float = 0.02  # of Muon
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.05  # of matrices, times the learning rate
    warmup: int = 100  # steps from 0 to the full learning rate
    schedule: str = "linear"
    decay: float = 0.35  # linear: the last share of the steps, over which the rate falls
    floor: float = 0.0  # the share of the learning rate that is left at the end
    clip: float = 1.0  # largest gradient norm; 0: no clipping

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise FarspanError(
                f"optimizer {self.optimizer!r} is unknown; choose {' or '.join(OPTIMIZERS)}"
            )
        if self.schedule not in SCHEDULES:
            raise FarspanError(
                f"schedule {self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}"
            )
        check_shares(self, "decay", "floor")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise FarspanError(
                    f"{name} is {getattr(self, name):g}; choose it from 0 to below 1"
                )
        check_least(self, 0, "lr", "matrix_lr", "weight_decay", "warmup", "clip")


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The multiplier of every learning rate at a step, counted from 0."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "linear":
        left = (steps - step) / max(1, config.decay * steps)
        return config.floor + (1 - config.floor) * min(1.0, left)
    if config.schedule == "cosine":
        done = (step - config.warmup) / max(1, steps - config.warmup)
        return config.floor + (1 - config.floor) * (1 + math.cos(math.pi * done)) / 2
    return 1.0


def make_optimizers(module: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """The optimizers of a module's trainable parameters. Embeddings and vectors never decay."""
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    if (head := getattr(module, "get_output_embeddings", lambda: None)()) is not None:
        tables.add(id(head.weight))  # an untied head is a table of tokens too
    for child in module.modules():
        if isinstance(child, Position):  # Muon is for the matrices of the layers
            tables |= {id(parameter) for parameter in child.parameters()}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [
        parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in tables
    ]
    matrix_ids = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trained if id(parameter) not in matrix_ids]
    betas = (config.beta1, config.beta2)
    # On a GPU the rates are tensors and the steps fused, so that a CUDA graph follows the schedule.
    on_gpu = trained[0].is_cuda
    gpu_options = {"fused": True, "capturable": True} if on_gpu else {}
    lr, matrix_lr = (
        torch.tensor(rate).to(trained[0].device) if on_gpu else rate
        for rate in (config.lr, config.matrix_lr)
    )
    if config.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return store_base_rates(
            [AdamW([group for group in groups if group["params"]], lr, betas, **gpu_options)]
        )
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(StackedMuon(matrices, matrix_lr, config.weight_decay))  # type: ignore[arg-type]
    if rest:
        optimizers.append(AdamW(rest, lr, betas, weight_decay=0.0, **gpu_options))
    return store_base_rates(optimizers)


def store_base_rates(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Store the full learning rate of every group, which the schedule multiplies."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = float(group["lr"])
    return optimizers


def set_learning_rate(optimizers: Sequence[Optimizer], multiplier: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["full_lr"] * multiplier)
            else:
                group["lr"] = group["full_lr"] * multiplier


class StackedMuon(Muon):
    """torch's Muon, with all matrices of one shape orthogonalized in one batched product.

    torch's loop launches about twenty small kernels for every matrix, which costs a small model a
    third of its step (docs/performance.md). The state is the same, so that either class can resume
    from a checkpoint of the other.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_stacked(parameters, shape, group)

    def _step_stacked(self, parameters: list[Tensor], shape: torch.Size, group: dict) -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, grad in zip(parameters, grads, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(grad)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momentum, lr = group["momentum"], group["lr"]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov momentum
        directions = orthogonalize(
            torch.stack([full_tensor(update) for update in updates]), group
        ).float()
        directions *= -lr * math.sqrt(max(1, shape[0] / shape[1]))
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        steps = [
            shard_like(direction, parameter)
            for direction, parameter in zip(directions.unbind(), parameters, strict=True)
        ]
        torch._foreach_add_(parameters, steps)


def orthogonalize(updates: Tensor, group: dict) -> Tensor:
    """Newton–Schulz on a stack [n, rows, columns]: moves all singular values towards 1.

    In bf16 on a GPU, which is precise enough; on a CPU bf16 is a hundred times slower than float32.
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
