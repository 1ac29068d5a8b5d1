"""One step: the gradient of a batch, then the update. Done plainly, or recorded once and replayed.

A GPU computes a small model's step faster than Python can launch its kernels. Recorded as two CUDA graphs, with a look
at the loss in between, a step is two launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farspan.train.sharding import meet_gradients, whole

WARM = 3  # steps before recording: kernels are compiled and buffers made in them


@dataclass(eq=False)
class Work:
    """What learns, and from what."""

    module: nn.Module  # called with a micro batch it gives the mean loss; its gradients meet over the processes
    trained: Mapping[str, Tensor]  # what is saved, by the names it is saved under
    optimizers: Sequence[Optimizer]
    batches: Callable[[int], Sequence[Tensor]]  # step -> this process's micro batches, equal in size
    tokens: int = 0  # of a step, over all processes
    flops: float = 0.0  # of a token, forward and backward
    recorded: bool = False  # replay steps as CUDA graphs: one process, shapes that never change
    after_step: Callable[[], None] = lambda: None  # a projection, say
    beside: Callable[[Path], None] = lambda folder: None  # adds files to a checkpoint


class Steps:
    """Steps of a work, launched by Python one kernel at a time."""

    def __init__(self, work: Work, clip: float):
        self.work, self.clip = work, clip

    def gradients(self, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Clipped gradients of the mean loss over the micro batches of all processes; returns this process's mean loss
        and the norm before clipping, still on the device."""
        losses = []
        for number, batch in enumerate(batches, 1):
            meet_gradients(self.work.module, number == len(batches))
            loss = self.work.module(batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        learning = [parameter for parameter in self.work.trained.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in learning])
        if self.clip:
            nn.utils.clip_grads_with_norm_(learning, self.clip, norm)
        return torch.stack(losses).sum(), whole(norm)

    def update(self) -> None:
        for optimizer in self.work.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.work.after_step()


class RecordedSteps(Steps):
    """The same, replayed from CUDA graphs once it is warm."""

    def __init__(self, work: Work, clip: float):
        super().__init__(work, clip)
        self.taken = 0
        self.aside = torch.cuda.Stream()  # graphs want their warm-up on a stream of its own
        self.forth, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def gradients(self, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self.taken < WARM:
            with on_stream(self.aside):
                return super().gradients(batches)
        if self.taken == WARM:
            self.inputs = [batch.clone() for batch in batches]
            with torch.cuda.graph(self.forth, stream=self.aside):
                self.outputs = super().gradients(self.inputs)
            self.grads = {name: parameter.grad for name, parameter in self.work.trained.items()}
        torch._foreach_copy_(self.inputs, list(batches))
        self.forth.replay()
        for name, parameter in self.work.trained.items():
            parameter.grad = self.grads[name]
        return self.outputs

    def update(self) -> None:
        self.taken += 1
        if self.taken <= WARM:
            with on_stream(self.aside):
                super().update()
            return
        if self.taken == WARM + 1:
            with torch.cuda.graph(self.back, stream=self.aside):
                super().update()
        self.back.replay()


@contextmanager
def on_stream(aside: torch.cuda.Stream) -> Iterator[None]:
    """Work on the stream that a graph is recorded on: a gradient that was first taken on another binds later ones to
    that."""
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        yield
    torch.cuda.current_stream().wait_stream(aside)
