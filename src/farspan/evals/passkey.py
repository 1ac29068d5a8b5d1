"""Passkey: is a five-digit number, hidden in irrelevant text, told when asked for? Paper A's strings, held-out keys.

The right answer is given to the model a token ahead, and each of its tokens must be the likeliest. That is what greedy
decoding says as well, in one pass. All texts of a grid begin alike, so what the model makes of their beginning is
computed once, and each key goes on from there. It is kept by whoever runs the cells, and no longer than they know the
model to stay as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from farspan.attention import seam
from farspan.attention.entropy import Scores, kernels_for
from farspan.attention.patch import forget_lengths
from farspan.data.passkey import Passkeys, held_out_key
from farspan.errors import FarspanError
from farspan.evals.perplexity import rows_at_once
from farspan.evals.scores import Cell, Place, Sample, Score, wilson
from farspan.memory import in_pieces
from farspan.model.fast import quick_attention
from farspan.model.loss import ending_logits

NAME = "passkey"
CHUNK = 256  # tokens of a shared beginning that are computed at a time
BATCH = 10  # rows at once on a GPU
UNKNOWN = "unknown"
MOVING = ("dynamic", "longrope")  # rotations that depend on how long the text is


@dataclass(frozen=True)
class Passkey:
    """A grid of lengths and depths, with some keys in each of its cells.

    >>> len(Passkey((256, 512), depths=10).cells())
    20
    """

    lengths: tuple[int, ...]
    depths: int = 10
    keys: int = 10
    seed: int = 0
    trained: str = UNKNOWN  # did the model see passkey documents in training? "yes", "no" or "unknown"
    reuse: bool = True  # compute a shared beginning once
    batch: int = BATCH

    def __post_init__(self):
        if not self.lengths or self.depths < 1 or self.keys < 1:
            raise FarspanError(
                f"{len(self.lengths)} lengths and {self.depths} depths with {self.keys} keys make no grid; "
                "give 1 or more of each"
            )

    def cells(self) -> list[Cell]:
        """A cell is a length and a depth."""
        depths = [round(float(depth), 6) for depth in np.linspace(0, 1, self.depths)]
        return [
            Cell(NAME, NAME, length, {"depth": depth, "keys": self.keys, "seed": self.seed})
            for length in sorted(self.lengths)
            for depth in depths
        ]

    def places(self) -> list[Place]:
        """The mean over the grid tells of nothing new where it has one length."""
        lengths = sorted(set(self.lengths))
        found = [Place(NAME, NAME, "passkey", length) for length in lengths]
        return found + [Place(NAME, NAME, "passkey_mean", lengths[-1])] * (len(lengths) > 1)

    def run(
        self,
        cell: Cell,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        begun: Beginning | None = None,
    ) -> list[Sample]:
        """`begun` is what the cells before this one have computed: with it, the model must be as it was for them."""
        depth = cell.settings["depth"]
        keys, rows, answers = self.documents(cell, tokenizer)
        forget_lengths(model)
        begun = begun or Beginning(model)
        assert begun.model is model
        begun.reach(self._alike(cell, tokenizer, keys[0], rows))
        said = self._likeliest(model, torch.tensor(rows), max(answers), begun)
        return [
            {
                "eval": NAME,
                "task": NAME,
                "length": cell.length,
                "depth": depth,
                "key": key,
                "said": tokenizer.decode(told[-count:]),  # with its space: a key after another one is a miss
                "hit": told[-count:] == row[-count:],
            }
            for key, row, count, told in zip(keys, rows, answers, said.tolist(), strict=True)
        ]

    def documents(self, cell: Cell, tokenizer: Any) -> tuple[list[int], list[list[int]], list[int]]:
        """The keys of a cell, its documents of exactly `length` tokens, and how many tokens each answer has."""
        maker = Passkeys(tokenizer)
        depth = cell.settings["depth"]
        rng = np.random.default_rng((self.seed, cell.length, round(depth * 10**6)))
        keys = [held_out_key(rng) for _ in range(self.keys)]
        rows = [maker.document(cell.length, depth, key) for key in keys]
        return keys, rows, [len(maker.answer(key)) for key in keys]

    def score(self, samples: list[Sample]) -> list[Score]:
        """The share of keys told at each length, over the whole grid, and in each of its cells."""
        by_length: dict[int, list[Sample]] = {}
        for sample in samples:
            by_length.setdefault(sample["length"], []).append(sample)
        tags = {"task": NAME, "trained_on_passkeys": self.trained}
        found = [_share("passkey", length, some, tags) for length, some in sorted(by_length.items())]
        if len(by_length) > 1:
            found.append(_share("passkey_mean", max(by_length), samples, {**tags, "lengths": len(by_length)}))
        for length, some in sorted(by_length.items()):
            for depth in sorted({sample["depth"] for sample in some}):
                here = [sample for sample in some if sample["depth"] == depth]
                found.append(_share("passkey_at_depth", length, here, {**tags, "depth": depth, "detail": True}))
        return found

    def _alike(self, cell: Cell, tokenizer: Any, key: int, rows: list[list[int]]) -> Tensor | None:
        """The rows, and one of a key with another first digit: where it parts from the others, what all share has
        ended. None where nothing is to be shared."""
        other = key + (50_000 if key < 50_000 else -40_000)
        try:
            parting = Passkeys(tokenizer).document(cell.length, cell.settings["depth"], other)
        except FarspanError:  # it may take more tokens than the keys that are asked for
            return None
        return torch.tensor([*rows, parting]) if self.reuse else None

    @torch.no_grad()
    def _likeliest(self, model: PreTrainedModel, rows: Tensor, count: int, begun: Beginning) -> Tensor:
        said = torch.empty(len(rows), count, dtype=torch.long)

        def some(start: int, stop: int) -> None:
            said[start:stop] = likeliest(model, rows[start:stop, begun.shared :], count, begun.branch(stop - start))

        with quick_attention() if model.device.type == "cuda" else nullcontext(), begun.attending():
            in_pieces(len(rows), rows_at_once(model, rows.shape[1], self.batch), some)
        return said


class Beginning:
    """What a model makes of the beginning that texts share: keys and values, grown a chunk at a time and kept. They are
    those of the model as it is now, so nothing that outlives a change of its weights, scales or rotation may hold this.

    Chunks are always the same, so that what is computed does not depend on which texts came first. A rotation that
    changes with the length leaves nothing to share, nor does a memory that is not a list of keys and values.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._tokens: list[int] = []
        self.shared = 0  # tokens of it that the texts at hand begin with
        self._cache = DynamicCache(config=model.config)
        kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}  # a text or, by layer, a dict
        fixed = not any(moving in kind for kind in kinds for moving in MOVING)
        self._usable = fixed and all(type(layer) is DynamicLayer for layer in self._cache.layers)

    @torch.no_grad()
    def reach(self, rows: Tensor | None) -> None:
        """Have ready what all rows [B, T] begin with, in whole chunks; less than a quarter is not worth a mask. Without
        rows, nothing is shared."""
        self.shared = 0
        if rows is None or not self._usable:
            return
        alike = (rows == rows[:1]).all(0).long().cumprod(0).sum()
        shared = min(int(alike), rows.shape[1] - CHUNK) // CHUNK * CHUNK
        if 4 * shared < rows.shape[1]:
            return
        wanted = rows[0, :shared].tolist()
        known = _common(wanted, self._tokens) // CHUNK * CHUNK
        if known < min(shared, len(self._tokens)):  # another text: what follows is of no use to it
            self._cache.crop(known - len(self._tokens))
            del self._tokens[known:]
        for start in range(len(self._tokens), shared, CHUNK):
            ids = rows[:1, start : start + CHUNK].to(self.model.device)
            ending_logits(self.model, ids, 1, self._cache)
            self._tokens += ids[0].tolist()
        self.shared = shared

    def branch(self, rows: int) -> DynamicCache | None:
        """The shared beginning for so many rows, each of which goes on in its own way; None where nothing is shared."""
        if not self.shared:
            return None
        branch = DynamicCache(config=self.model.config)
        for number, layer in enumerate(self._cache.layers):
            keys, values = (part[:, :, : self.shared].expand(rows, -1, -1, -1) for part in (layer.keys, layer.values))
            branch.update(keys, values, number)
        return branch

    def attending(self) -> AbstractContextManager[None]:
        """On a GPU, attention that needs not read the mask of those who go on."""
        name = self.model.config._attn_implementation
        if not self.shared or self.model.device.type != "cuda" or "sdpa" not in name:
            return nullcontext()
        return (
            seam.using(self.model, attend_lower_right) if self.model._can_set_attn_implementation() else nullcontext()
        )


def attend_lower_right(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """Causal attention of the last queries to all keys: what their mask says too, by kernels that take none. cuDNN has
    none such, and ours is nearly as fast as it is; torch's, by flash attention, is not. Layers that do more than that
    are left to the model's own backend."""
    special = ("bias", "position_bias", "sliding_window", "s_aux", "softcap")
    plain = all(kwargs.get(name) is None for name in special) and key.shape[-1] == value.shape[-1]
    grouped = query.shape[1] != key.shape[1]
    slow = grouped and query.dtype == torch.float32  # it has no flash kernel, and the next takes no grouped heads
    if attention_mask is None or slow or not plain:
        return seam.own_backend(module)(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    scores = Scores(query, key, scaling)
    kernels = kernels_for(scores, value)
    if kernels is not None and query.element_size() == 2:
        output, _ = kernels.attention(scores, value)
    else:
        place: Any = causal_lower_right(query.shape[2], key.shape[2])
        output = F.scaled_dot_product_attention(query, key, value, place, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2).contiguous(), None


def likeliest(model: PreTrainedModel, rows: Tensor, count: int, past: Cache | None = None) -> Tensor:
    """The likeliest token, given the right ones before it, at each of the last `count` places of rows [B, T]."""
    return ending_logits(model, rows.to(model.device), count + 1, past)[:, :-1].argmax(-1).cpu()


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts share before they part."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _share(metric: str, length: int, samples: Sequence[Sample], tags: dict[str, Any]) -> Score:
    hits = sum(sample["hit"] for sample in samples)
    return Score(NAME, metric, length, *wilson(hits, len(samples)), len(samples), tags)


def grid_lengths(longest: int, shortest: int, count: int = 16) -> tuple[int, ...]:
    """So many lengths up to the longest, evenly spaced, none below the shortest that holds a key and its question.

    >>> grid_lengths(1024, 90, 4)
    (256, 512, 768, 1024)
    """
    step = longest / count
    evenly = [round(step * number) for number in range(1, count + 1)]
    if evenly[0] < shortest:
        evenly = [round(float(length)) for length in np.linspace(shortest, max(longest, shortest), count)]
    return tuple(sorted(set(evenly)))


def passkey_share(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    depths: int = 10,
    keys: int = 1,
    seed: int = 0,
    batch: int = 4,
) -> float:
    """The share of keys told right in documents of exactly `length` tokens, `keys` of them at each of `depths`: what
    the evaluation scores at that length, on the same documents.

    >>> passkey_share(model, tokenizer, 1024, keys=2)
    """
    grid, begun = Passkey((length,), depths, keys, seed, batch=batch), Beginning(model)
    hits = [sample["hit"] for cell in grid.cells() for sample in grid.run(cell, model, tokenizer, begun)]
    return sum(hits) / len(hits)
