"""One training step: the gradient of a batch, then the update; run eagerly or as CUDA graphs.

A GPU computes the step of a small model faster than Python can launch its kernels. Captured as two
CUDA graphs, with the loss read in between, a step is two launches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farspan.batching import out_of_memory
from farspan.model.recompute import recomputed_activations
from farspan.train.sharding import full_tensor, processes, sync_gradients

log = logging.getLogger(__name__)

WARMUP_STEPS = 3  # eager steps before the capture: they compile kernels and allocate buffers


@dataclass(eq=False)
class TrainingTask:
    """What to train, and on which batches."""

    module: nn.Module  # micro batch -> mean loss; reduces its gradients over the processes
    parameters: Mapping[str, Tensor]  # by the names under which a checkpoint saves them
    optimizers: Sequence[Optimizer]
    batches: Callable[[int], Sequence[Tensor]]  # step -> micro batches of this process, equal sizes
    tokens: int = 0  # of a step, over all processes
    flops: float = 0.0  # of a token, forward and backward
    graphed: bool = False  # use CUDA graphs: needs one process and constant shapes
    after_step: Callable[[], None] = lambda: None  # a projection, for example
    # The loss that a plateau rule judges by; the same value in every process.
    validate: Callable[[], float] = lambda: math.nan
    write_extras: Callable[[Path], None] = lambda folder: None  # adds files to a checkpoint
    # Whether a step that runs out of memory is taken again with less: the loss is a mean over the
    # rows [..., B, T] of a micro batch, and one of farspan.model.loss.
    can_retry: bool = False


class EagerSteps:
    """Steps of a task; Python launches every kernel.

    Where the task allows it, a step that runs out of memory is taken again, and all later ones,
    with smaller micro batches, and at last with activations that are computed again in the backward
    pass.
    """

    def __init__(self, task: TrainingTask, clip: float):
        self.task, self.clip = task, clip
        self.parts = 1  # of a micro batch
        self.recomputes = False

    def gradients(self, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the clipped gradients of the mean loss over the micro batches of all processes.

        Returns the mean loss of this process and the gradient norm before clipping, both still on
        the device.
        """
        try:
            with recomputed_activations(self.recomputes):
                return self._gradients(batches)
        except RuntimeError as error:
            single = processes().num_processes == 1  # others would wait for its gradients
            retries = self.task.can_retry and single and out_of_memory(error)
            if not retries or not self._save_memory(batches):
                raise
        # Here the error is gone, and with it what its frames kept in memory.
        for parameter in self.task.parameters.values():
            parameter.grad = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.gradients(batches)

    def _save_memory(self, batches: Sequence[Tensor]) -> bool:
        """Split micro batches into more parts, or recompute activations; False: nothing is left.

        Recomputing takes longer, so it is for batches of which some cannot be split any more.
        """
        rows = [batch.shape[-2] for batch in batches]
        if min(rows) > self.parts or (self.recomputes and max(rows) > self.parts):
            self.parts *= 2
            log.warning("out of memory; micro batches are split into %d from now on", self.parts)
            return True
        if self.recomputes:
            return False
        log.warning(
            "out of memory; activations are computed again in the backward pass from now on, "
            "which takes one more forward pass a step"
        )
        self.recomputes = True
        return True

    def _parts(self, batches: Sequence[Tensor]) -> list[tuple[Tensor, float]]:
        """Each part of the micro batches, and its share of the rows of its micro batch."""
        if self.parts == 1:
            return [(batch, 1.0) for batch in batches]
        return [
            (part, part.shape[-2] / batch.shape[-2])
            for batch in batches
            for part in batch.chunk(self.parts, dim=-2)
        ]

    def _gradients(self, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        losses, parts = [], self._parts(batches)
        for number, (part, share) in enumerate(parts, 1):
            sync_gradients(self.task.module, number == len(parts))
            loss = self.task.module(part) * share / len(batches)
            loss.backward()
            losses.append(loss.detach())
        updated = [
            parameter for parameter in self.task.parameters.values() if parameter.grad is not None
        ]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in updated])
        if self.clip:
            nn.utils.clip_grads_with_norm_(updated, self.clip, norm)
        return torch.stack(losses).sum(), full_tensor(norm)

    def update(self) -> None:
        for optimizer in self.task.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.task.after_step()


class GraphedSteps(EagerSteps):
    """The same steps, replayed from CUDA graphs after the warmup."""

    def __init__(self, task: TrainingTask, clip: float):
        super().__init__(task, clip)
        self.steps_done = 0
        self.capture_stream = torch.cuda.Stream()  # warmup and capture must share a side stream
        self.gradient_graph, self.update_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def gradients(self, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if self.steps_done < WARMUP_STEPS:
            with on_stream(self.capture_stream):
                return self._gradients(batches)
        if self.steps_done == WARMUP_STEPS:
            self.inputs = [batch.clone() for batch in batches]
            with torch.cuda.graph(self.gradient_graph, stream=self.capture_stream):
                self.outputs = self._gradients(self.inputs)
            self.grads = {name: parameter.grad for name, parameter in self.task.parameters.items()}
        torch._foreach_copy_(self.inputs, list(batches))
        self.gradient_graph.replay()
        for name, parameter in self.task.parameters.items():
            parameter.grad = self.grads[name]
        return self.outputs

    def update(self) -> None:
        self.steps_done += 1
        if self.steps_done <= WARMUP_STEPS:
            with on_stream(self.capture_stream):
                super().update()
            return
        if self.steps_done == WARMUP_STEPS + 1:
            with torch.cuda.graph(self.update_graph, stream=self.capture_stream):
                super().update()
        self.update_graph.replay()


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on the stream of the capture.

    Autograd accumulates a gradient on the stream where it was first computed, so a gradient that
    was first computed on another stream would break the capture.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
