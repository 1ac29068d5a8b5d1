"""Loss and attention entropy by position, from one pass over each window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.entropy import EntropyByPosition
from farspan.errors import CorruptError, FarspanError
from farspan.model.loss import token_losses

ROWS_ON_CPU = 2048  # entropy is taken of about so many queries of a window where it costs as much as the model


@dataclass(frozen=True, eq=False)
class Curves:
    """Means over windows, by bins of positions; a position is the number of tokens that the model has seen there."""

    positions: np.ndarray  # [bins] the middle of each bin
    loss: np.ndarray  # [bins] nats a token
    heads: dict[int, np.ndarray]  # layer -> [H, bins] entropy in nats
    windows: int
    length: int  # tokens of a window
    every: int  # entropy is of every so-many-th query

    @property
    def entropy(self) -> np.ndarray:
        """Mean over all heads of all layers, [bins]."""
        return np.concatenate(list(self.heads.values())).mean(0)

    def loss_at(self, length: int, span: int) -> float:
        """Mean loss over the `span` positions before a length."""
        near = (self.positions > length - span) & (self.positions <= length)
        if not near.any():  # the span is narrower than a bin: the nearest one stands for it
            near[np.abs(self.positions - length).argmin()] = True
        return float(self.loss[near].mean())


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    bins: int,
    every: int | None = None,
    name: str = "the model",
    after_window: Callable[[], None] = lambda: None,
) -> Curves:
    """Run the model once over each window of ids [windows, length]; memory is that of one window.

    Curves are finite: a model that gives NaN or infinity is refused by this name, at the first window that shows it.
    """
    length = ids.shape[1]
    bins = min(bins, length // 2)  # so that the last one holds a prediction too: the last token makes none
    if every is None:
        every = 1 if model.device.type == "cuda" else max(1, length // ROWS_ON_CPU)
    profile = EntropyByPosition(length, bins=bins, every=min(every, length // bins))
    bin_of = torch.arange(length - 1) * bins // length
    total, count = torch.zeros(bins, dtype=torch.float64), torch.bincount(bin_of, minlength=bins)
    with seam.using(model, profile.fused(model)):
        for window in ids:
            (losses,) = token_losses(model, window[None].to(model.device))
            check_losses(model, losses, name)
            total.index_add_(0, bin_of, losses.double().cpu())
            after_window()
    edges = np.arange(bins + 1) * length / bins
    positions = (edges[:-1] + edges[1:] + 1) / 2
    entropy = profile.entropy
    _check_entropy(model, entropy, positions, name)
    return Curves(
        positions=positions,
        loss=(total / (count * len(ids))).numpy(),
        heads={layer: table.numpy() for layer, table in entropy.items()},
        windows=len(ids),
        length=length,
        every=profile.every,
    )


def check_losses(model: PreTrainedModel, losses: Tensor, name: str) -> None:
    """Refuse losses [T] by position that are NaN or infinite: NaN is above no trend, and such a model seems healthy."""
    wrong = torch.isfinite(losses).logical_not().nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise _not_finite(model, f"the loss of {name}", float(losses[first]), first + 1)


def check_finite(model: PreTrainedModel, found: Tensor, name: str) -> None:
    """Refuse logits [..., V] that are NaN or infinite: no token is likeliest, and nothing equals them."""
    if bool(found.amax(-1).isfinite().all()):  # the largest is NaN where one is; −∞ may hide a token on purpose
        return
    told = f"the logits of {name} are not finite"
    if (weight := broken_weight(model)) is not None:
        raise CorruptError(f"{told}, for {weight} holds NaN or infinity; fetch or export the checkpoint again")
    kind = str(model.dtype).removeprefix("torch.")
    raise FarspanError(f"{told}, for numbers outgrow {kind}; give shorter text, or a checkpoint in a wider precision")


def _check_entropy(model: PreTrainedModel, heads: dict[int, Tensor], positions: np.ndarray, name: str) -> None:
    """Scores may outgrow their numbers where the loss, which sees no more than the largest of them, does not."""
    for layer, table in heads.items():
        wrong = torch.isfinite(table).logical_not().T.nonzero()  # (bin, head), the first bin first
        if len(wrong):
            place, head = wrong[0].tolist()
            what = f"the attention entropy of {name} in head {head} of layer {layer}"
            raise _not_finite(model, what, float(table[head, place]), round(positions[place]))


def broken_weight(model: PreTrainedModel) -> str | None:
    """The name of the first weight that holds NaN or infinity, if there is one."""
    weights = ((name, values) for name, values in model.state_dict().items() if values.is_floating_point())
    return next((name for name, values in weights if not torch.isfinite(values).all()), None)


def _not_finite(model: PreTrainedModel, what: str, value: float, position: int) -> FarspanError:
    """Damaged weights are told from sound ones whose products grow too large."""
    told = f"{what} turns {value} at position {position}"
    if (weight := broken_weight(model)) is not None:
        return CorruptError(
            f"{told}, and {weight} holds NaN or infinity; fetch the checkpoint again, or export it again"
        )
    kind = str(model.dtype).removeprefix("torch.")
    wider = ', or write "dtype": "float32" into its config.json' if model.dtype.itemsize < 4 else ""
    # A number that is not finite, weighed with 0, is NaN: some kernels spread it to positions that do not see it.
    shorter = f"ask for fewer than {position} tokens" if position > 1 else "ask for fewer tokens"
    return FarspanError(f"{told} although its weights are finite: numbers outgrow {kind}; {shorter}{wider}")
