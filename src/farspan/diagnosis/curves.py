"""Loss and attention entropy by position, measured in one pass over each window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.entropy import EntropyByPosition
from farspan.device_map import stored_tensors
from farspan.errors import CorruptError, FarspanError
from farspan.model.loss import token_losses

# On a CPU the entropy of one query costs about as much as the model does, so queries are sampled.
QUERIES_ON_CPU = 2048


@dataclass(frozen=True, eq=False)
class Curves:
    """Means over windows in bins of positions. Position n is where the model has seen n tokens."""

    positions: np.ndarray  # [bins] bin centers
    loss: np.ndarray  # [bins] nats per token
    heads: dict[int, np.ndarray]  # layer -> [heads, bins] entropy in nats; empty: not measured
    windows: int
    length: int  # tokens per window
    every: int  # entropy is measured at every n-th query
    windowed: frozenset[int] = frozenset()  # layers whose window the text outgrows

    @property
    def entropy(self) -> np.ndarray:
        """Mean over the heads of all layers, [bins]; empty if entropy was not measured.

        Layers with a window are left out, unless all have one: whatever the length, they see the
        same number of keys, and would hide what the others do.
        """
        seeing_all = [table for layer, table in self.heads.items() if layer not in self.windowed]
        tables = seeing_all or list(self.heads.values())
        return np.concatenate(tables).mean(0) if tables else np.empty(0)

    def loss_at(self, mark: int, *, train_length: int) -> float:
        """Mean loss over the quarter of the train length that ends at `mark`."""
        return mean_before(mark, train_length, self.positions, self.loss)

    def since(self, position: int) -> Curves:
        """The part after a position."""
        kept = self.positions > position
        heads = {layer: table[:, kept] for layer, table in self.heads.items()}
        return replace(self, positions=self.positions[kept], loss=self.loss[kept], heads=heads)


def join_curves(parts: Sequence[Curves]) -> Curves:
    """Parts of consecutive positions as one; the last part says how long the windows are."""
    last = parts[-1]
    return replace(
        last,
        positions=np.concatenate([part.positions for part in parts]),
        loss=np.concatenate([part.loss for part in parts]),
        heads={
            layer: np.concatenate([part.heads[layer] for part in parts], axis=1)
            for layer in last.heads
        },
    )


def mean_before(
    mark: int,
    train_length: int,
    positions: Sequence[float] | np.ndarray,
    values: Sequence[float] | np.ndarray,
) -> float:
    """Mean of a curve over the quarter of the train length that ends at position `mark`.

    >>> mean_before(8, 16, [5, 6, 7, 8], [1.0, 2.0, 3.0, 6.0])
    3.0
    """
    positions, span = np.array(positions), max(1, train_length // 4)
    near = (positions > mark - span) & (positions <= mark)
    if not near.any():  # the span is narrower than a bin: use the nearest one
        near[np.abs(positions - mark).argmin()] = True
    return float(np.array(values)[near].mean())


def measure_curves(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    bins: int,
    entropy: bool = True,
    name: str = "the model",
    after_window: Callable[[], None] = lambda: None,
) -> Curves:
    """Run the model once over each window of ids [windows, length]; memory is that of one window.

    entropy: measure it, which needs a model that calls transformers' attention interface.
    Curves are finite: a NaN or infinite value raises an error that names the model, at the first
    window that has one.
    """
    length = ids.shape[1]
    # At least two tokens per bin: the last token predicts nothing, and the last bin needs a loss.
    bins = min(bins, length // 2)
    every = 1 if model.device.type == "cuda" else max(1, length // QUERIES_ON_CPU)
    profile = EntropyByPosition(length, bins=bins, every=min(every, length // bins))
    bin_index = torch.arange(length - 1) * bins // length
    total = torch.zeros(bins, dtype=torch.float64)
    count = torch.bincount(bin_index, minlength=bins)
    with seam.using(model, profile.fused_backend(model)) if entropy else nullcontext():
        for window in ids:
            (losses,) = token_losses(model, window[None].to(model.device))
            check_losses(model, losses, name)
            total.index_add_(0, bin_index, losses.double().cpu())
            after_window()
    edges = np.arange(bins + 1) * length / bins
    positions = (edges[:-1] + edges[1:] + 1) / 2
    heads = profile.entropy if entropy else {}
    _check_entropy(model, heads, positions, name)
    return Curves(
        positions=positions,
        loss=(total / (count * len(ids))).numpy(),
        heads={layer: table.numpy() for layer, table in heads.items()},
        windows=len(ids),
        length=length,
        every=profile.every,
    )


def check_losses(model: PreTrainedModel, losses: Tensor, name: str) -> None:
    """Refuse losses [T] by position that are not finite.

    NaN compares as above no trend, so such a model would look healthy.
    """
    bad = torch.isfinite(losses).logical_not().nonzero()
    if len(bad):
        first = int(bad[0])
        raise _not_finite(model, f"the loss of {name}", float(losses[first]), first + 1)


def check_finite(model: PreTrainedModel, logits: Tensor, name: str) -> None:
    """Refuse logits [..., V] that hold NaN or +infinity; -infinity may mask a token on purpose."""
    if bool(logits.amax(-1).isfinite().all()):  # amax is NaN where any logit is
        return
    message = f"the logits of {name} are not finite"
    if (weight := nonfinite_weight(model)) is not None:
        raise CorruptError(
            f"{message} because {weight} holds NaN or infinity; "
            "download or export the checkpoint again"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    raise FarspanError(
        f"{message} because values overflow {dtype}; "
        "use shorter text, or a checkpoint in a wider precision"
    )


def _check_entropy(
    model: PreTrainedModel, heads: dict[int, Tensor], positions: np.ndarray, name: str
) -> None:
    """Refuse entropies that are not finite.

    Scores can overflow while the loss stays finite, because the loss depends on the largest only.
    """
    for layer, table in heads.items():
        bad = torch.isfinite(table).logical_not().T.nonzero()  # (bin, head), ordered by bin
        if len(bad):
            place, head = bad[0].tolist()
            what = f"the attention entropy of {name} in head {head} of layer {layer}"
            raise _not_finite(model, what, float(table[head, place]), round(positions[place]))


def nonfinite_weight(model: PreTrainedModel) -> str | None:
    """The name of the first weight that holds NaN or infinity, if any."""
    weights = (
        (name, values)
        for name, values in stored_tensors(model, model.state_dict().items())
        if values.is_floating_point()
    )
    return next((name for name, values in weights if not torch.isfinite(values).all()), None)


def _not_finite(model: PreTrainedModel, what: str, value: float, position: int) -> FarspanError:
    """The error for a damaged checkpoint, or for sound weights whose products overflow."""
    message = f"{what} is {value} at position {position}"
    if (weight := nonfinite_weight(model)) is not None:
        return CorruptError(
            f"{message} because {weight} holds NaN or infinity; "
            "download or export the checkpoint again"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    wider = ', or set "dtype": "float32" in its config.json' if model.dtype.itemsize < 4 else ""
    # Some kernels multiply masked values by 0, so one that is not finite turns the positions that
    # do not see it to NaN: a NaN at position 1 does not show which length is safe.
    shorter = f"use fewer than {position} tokens" if position > 1 else "use fewer tokens"
    return FarspanError(
        f"{message} although the weights are finite: values overflow {dtype}; {shorter}{wider}"
    )
