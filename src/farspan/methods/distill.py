"""Self-distillation: a changed model learns to predict what its base predicts, on short windows.

The base teaches by KL(base ‖ changed), so that any text will do and nothing pulls the model towards
that text.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.model.compile import prefer_cudnn
from farspan.model.loss import BUDGET, GPU_BUDGET, mean_kl


def make_teacher(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the model as it is; in bf16 on a GPU, where products are bf16 anyway."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    return cast_weights(teacher, torch.bfloat16 if model.device.type == "cuda" else torch.float32)


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the weights alone: rotation frequencies, which are buffers, are too coarse in bf16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class DistillModule(nn.Module):
    """The mean KL of a batch of windows between a teacher and the model that learns from it.

    answers: the weight of the mean cross-entropy of a window's answers, which the teacher may not
        know, in the mean over all windows. Batches are then [2, B, T]: tokens, and the counts of
        FitJob.batches. A mean over windows does not depend on micro batches or processes.
    length: of a window when its answers were counted; it may have been cut since.
    begin: the tokens in front of every window, also of one that was cut out of another.
    The teacher is no submodule, so it is neither trained nor saved nor distributed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel,
        answers: float,
        length: int = 0,
        begin: int = 0,
    ):
        super().__init__()
        if answers and not length:
            raise ValueError("the weight of answers depends on the length of a window; give it")
        self.model, self.answers, self.length, self.begin = model, answers, length, begin
        self._teacher = (teacher,)

    def forward(self, batch: Tensor) -> Tensor:
        ids, counts = batch if self.answers else (batch, None)
        weights = None
        if counts is not None:
            size = ids.shape[1]
            parts = (self.length - self.begin) // (size - self.begin)  # 1 unless it was cut
            kept = parts * size
            # Without answers: infinity, which is replaced.
            weights = torch.where(counts > 0, self.answers * kept / counts, 0.0)
        budget = GPU_BUDGET if ids.is_cuda else BUDGET
        autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda)
        with prefer_cudnn(), autocast:
            return mean_kl(
                self.model,
                self._teacher[0],
                ids,
                token_weights=weights,
                budget=budget,
            )
