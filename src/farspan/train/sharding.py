"""Tensors that may be spread over processes: seen whole, cut again, and when their gradients meet.

Accelerate launches the processes and wraps data parallel models. Sharding calls torch's own `fully_shard`: where there
is no GPU, Accelerate's plugin silently falls back to plain data parallel, and could not be tested.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def processes() -> PartialState:
    """Who runs together: one process, or those that torchrun started. Without a GPU Accelerate wants to be told so."""
    return PartialState() if torch.cuda.is_available() else PartialState(cpu=True)


def data_parallel(module: nn.Module) -> nn.Module:
    """The module with its gradients averaged over the processes; itself, where there is one."""
    return module if processes().num_processes == 1 else Accelerator().prepare_model(module)


def shard(module: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """FSDP2: every layer's weights spread over the processes, gathered while it computes."""
    on_gpu = next(module.parameters()).is_cuda
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for layer in layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(module, mp_policy=precision)
    return module


def meet_gradients(module: nn.Module, now: bool) -> None:
    """Let the next backward pass reduce gradients over the processes, or only add up its own."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
    elif isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = now


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Where it is sharded every process must ask, for each holds a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(full: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, spread as another tensor is."""
    if not isinstance(like, DTensor):
        return full
    # Every process has the whole already: nothing needs to be sent.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
