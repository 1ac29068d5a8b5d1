"""Rows of tokens: a prompt, its answer, and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor
from torch.nn import functional as F

WIDTH_MULTIPLE = 8  # input widths are multiples of it, which tensor cores need


@dataclass(frozen=True, eq=False)
class Rows:
    """Examples as tokens, padded on the right. Only the answers are trained on and scored."""

    ids: Tensor  # [N, T] integers
    start: Tensor  # [N] the answer's first token
    stop: Tensor  # [N] the end of the answer and of the row

    @classmethod
    def pad(
        cls,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        token: int,
        dtype: DTypeLike,
    ) -> Rows:
        """Prompts, each followed by its answer, padded with a token."""
        start = torch.tensor([len(prompt) for prompt in prompts])
        stop = start + torch.tensor([len(answer) for answer in answers])
        ids = np.full((len(prompts), int(stop.max())), token, dtype)
        for row, prompt, answer in zip(ids, prompts, answers, strict=True):
            row[: len(prompt) + len(answer)] = prompt + answer
        return cls(torch.from_numpy(ids), start, stop)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor, width: int) -> Rows:
        """The selected rows, cut or padded to a width."""
        ids = F.pad(self.ids[rows], (0, width - self.ids.shape[1]))
        return Rows(ids, self.start[rows], self.stop[rows])

    def by_length(self) -> Tensor:
        """Row indices, the shortest row first."""
        return torch.argsort(self.stop, stable=True)

    def to(self, device: torch.device) -> Rows:
        return Rows(self.ids.to(device), self.start.to(device), self.stop.to(device))

    @property
    def answer_mask(self) -> Tensor:
        """Whether each token from the second on belongs to the answer: bool, like ids[..., 1:]."""
        position = torch.arange(1, self.ids.shape[-1], device=self.ids.device)
        return (position >= self.start[..., None]) & (position < self.stop[..., None])


def concat_rows(parts: Sequence[Rows], dim: int) -> Rows:
    """Concatenate rows of equal width."""
    names = ("ids", "start", "stop")
    return Rows(*(torch.cat([getattr(rows, name) for rows in parts], dim) for name in names))


def stack_rows(parts: Sequence[Rows]) -> Rows:
    """Stack equally many rows of equal width, one part per model."""
    names = ("ids", "start", "stop")
    return Rows(*(torch.stack([getattr(rows, name) for rows in parts]) for name in names))


def padded_width(longest: int) -> int:
    """The width of rows whose inputs, all tokens but the last, fill whole tiles."""
    return -(-(longest - 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE + 1
