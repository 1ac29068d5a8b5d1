"""Tensors that may be sharded over processes: gather them, shard them, sync their gradients.

Accelerate launches the processes and wraps data-parallel models. Sharding calls torch's
`fully_shard` directly: without a GPU, Accelerate's plugin silently falls back to plain data
parallelism and could not be tested.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from farspan.attention import seam


def processes() -> PartialState:
    """The process group: one process, or those that torchrun started."""
    return PartialState() if torch.cuda.is_available() else PartialState(cpu=True)


def data_parallel(module: nn.Module, model: PreTrainedModel | None = None) -> nn.Module:
    """The module with gradients averaged over the processes; unchanged if there is only one.

    model: the one that it trains, if text may not reach all of its weights.
    """
    if processes().num_processes == 1:
        return module
    searches = model is not None and not text_reaches_all(model)
    options = DistributedDataParallelKwargs(find_unused_parameters=searches)
    return Accelerator(kwargs_handlers=[options]).prepare_model(module)


def text_reaches_all(model: PreTrainedModel) -> bool:
    """Whether two tokens give every trained weight a gradient: they give none to those of a vision
    tower or, in some families, to experts that were not chosen."""
    with seam.eval_mode(model), torch.enable_grad():
        logits = model(input_ids=seam.two_tokens(model), use_cache=False).logits
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(logits.sum(), trained, allow_unused=True)
    return all(gradient is not None for gradient in gradients)


def shard(module: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """Shard the weights of every layer over the processes (FSDP2); a layer gathers them to run."""
    on_gpu = next(module.parameters()).is_cuda
    precision = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    )
    for layer in layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(module, mp_policy=precision)
    return module


def sync_gradients(module: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass reduces gradients over the processes or only accumulates."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    elif isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = enabled


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor. If it is sharded, every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a whole tensor, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return full
    # Every process has the whole tensor already: nothing needs to be sent.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
