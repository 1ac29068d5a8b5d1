"""Passkey retrieval with the strings of Wang 2024: repeat a five-digit number hidden in filler.

Keys are held out from training. The model reads the right answer (teacher forcing), and each of its
tokens must be the argmax. That is equivalent to greedy decoding, in one forward pass. All documents
of a grid start with the same text, so the KV cache of that prefix is computed once and every key
continues from it. The caller that runs the cells owns the cache, and must drop it when the model
changes.
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
from farspan.attention.backends import own_attention
from farspan.attention.entropy import supported_kernels
from farspan.attention.layout import length_dependent_rotation
from farspan.attention.rope import reset_dynamic_rope
from farspan.attention.scores import Scores
from farspan.batching import run_in_batches
from farspan.data.passkey import PasskeyDocuments, held_out_key
from farspan.data.tokens import shared_length
from farspan.errors import FarspanError
from farspan.evals.engine import Engine
from farspan.evals.perplexity import rows_per_batch
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey, wilson
from farspan.model.compile import prefer_cudnn
from farspan.model.loss import last_logits
from farspan.train.metadata import begin_of_text

NAME = "passkey"
CHUNK, GPU_CHUNK = 256, 2048  # tokens of a shared prefix per forward pass
CONTINUATION = 4096  # tokens after the prefix per pass; each has a row in a mask over all keys
BATCH = 10  # rows per batch on a GPU
CHAT_ANSWER = 32  # tokens, of a chat model behind a server
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Passkey:
    """A grid of lengths and depths, with a number of keys in each cell.

    `trained` says whether the model saw passkey documents in training: "yes", "no" or "unknown".
    `context` is the length that the model was trained on or extended to, if it is known: the mean
    of Figure 6 of Wang 2024 is over lengths up to it. Documents start with a begin-of-text token
    where the model expects one.

    >>> len(Passkey((256, 512), depths=10).cells())
    20
    """

    lengths: tuple[int, ...]
    depths: int = 10
    keys: int = 10
    seed: int = 0
    trained: str = UNKNOWN
    context: int | None = None
    batch: int = BATCH

    def __post_init__(self):
        if not self.lengths or self.depths < 1 or self.keys < 1:
            raise FarspanError(
                f"a passkey grid of {len(self.lengths)} lengths, {self.depths} depths and "
                f"{self.keys} keys is empty; use at least 1 of each"
            )

    def cells(self) -> list[EvalCell]:
        """One cell for each length and depth."""
        depths = [round(float(depth), 6) for depth in np.linspace(0, 1, self.depths)]
        return [
            EvalCell(NAME, NAME, length, {"depth": depth, "keys": self.keys, "seed": self.seed})
            for length in sorted(self.lengths)
            for depth in depths
        ]

    def score_keys(self) -> list[ScoreKey]:
        """One for each length, and one for each mean over lengths."""
        lengths = sorted(set(self.lengths))
        keys = [ScoreKey(NAME, NAME, "passkey", length) for length in lengths]
        means = self._means(lengths).items()
        return keys + [ScoreKey(NAME, NAME, metric, group[-1]) for metric, group in means]

    def _means(self, lengths: Sequence[int]) -> dict[str, list[int]]:
        """The lengths behind each mean; a single length has none."""
        if len(lengths) < 2:
            return {}
        inside = [length for length in lengths if length <= (self.context or 0)]
        return ({"passkey_mean": inside} if inside else {}) | {"passkey_grid_mean": list(lengths)}

    def run(
        self,
        cell: EvalCell,
        model: PreTrainedModel | Engine,
        tokenizer: PreTrainedTokenizerBase,
        prefix_cache: PrefixCache | None = None,
    ) -> list[Sample]:
        """`prefix_cache` holds what earlier cells computed with the same, unchanged model."""
        keys, rows, answer_sizes = self.documents(cell, tokenizer)
        if isinstance(model, Engine):
            return self._ask(cell, model, keys, rows, answer_sizes)
        reset_dynamic_rope(model)
        prefix_cache = prefix_cache or PrefixCache(model)
        assert prefix_cache.model is model
        prefix_cache.extend_to(self._rows_with_probe(cell, tokenizer, keys[0], rows))
        predictions = self._predict(model, torch.tensor(rows), max(answer_sizes), prefix_cache)
        return [
            # with the leading space: the key after another separator is a miss
            _sample(
                cell,
                key,
                tokenizer.decode(prediction[-count:]),
                prediction[-count:] == row[-count:],
            )
            for key, row, count, prediction in zip(
                keys, rows, answer_sizes, predictions.tolist(), strict=True
            )
        ]

    def _ask(
        self,
        cell: EvalCell,
        engine: Engine,
        keys: list[int],
        rows: list[list[int]],
        answer_sizes: list[int],
    ) -> list[Sample]:
        """By text: the answer of a server begins with the key, after at most one space.

        What follows does not count: keys of a cell can have different numbers of tokens, and all
        prompts get room for the longest. A chat model writes a sentence, which must contain the
        key.
        """
        chat = engine.api == "chat"
        prompts = [row[:-count] for row, count in zip(rows, answer_sizes, strict=True)]
        room = CHAT_ANSWER if chat else max(answer_sizes)
        return [
            _sample(
                cell,
                key,
                answer.text,
                str(key) in answer.text
                if chat
                else answer.text.removeprefix(" ").startswith(str(key)),
            )
            for key, answer in zip(keys, engine.generate(prompts, room), strict=True)
        ]

    def documents(
        self, cell: EvalCell, tokenizer: Any
    ) -> tuple[list[int], list[list[int]], list[int]]:
        """The keys of a cell, its documents of exactly `length` tokens, and the answers' sizes."""
        maker = scored_documents(tokenizer)
        depth = cell.settings["depth"]
        rng = np.random.default_rng((self.seed, cell.length, round(depth * 10**6)))
        keys = [held_out_key(rng) for _ in range(self.keys)]
        rows = [maker.document(cell.length, depth, key) for key in keys]
        return keys, rows, [len(maker.answer(key)) for key in keys]

    def score(self, samples: list[Sample]) -> list[Score]:
        """The share of keys retrieved at each length, over several lengths, and in each cell."""
        by_length: dict[int, list[Sample]] = {}
        for sample in samples:
            by_length.setdefault(sample["length"], []).append(sample)
        tags = {"task": NAME, "trained_on_passkeys": self.trained}
        scores = [
            _accuracy("passkey", length, group, tags) for length, group in sorted(by_length.items())
        ]
        for metric, lengths in self._means(sorted(by_length)).items():
            mean_tags = {**tags, "lengths": len(lengths)}
            if metric == "passkey_mean":
                mean_tags["context"] = self.context
            group = [sample for length in lengths for sample in by_length[length]]
            scores.append(_accuracy(metric, lengths[-1], group, mean_tags))
        for length, group in sorted(by_length.items()):
            for depth in sorted({sample["depth"] for sample in group}):
                at_depth = [sample for sample in group if sample["depth"] == depth]
                depth_tags = {**tags, "depth": depth, "detail": True}
                scores.append(_accuracy("passkey_at_depth", length, at_depth, depth_tags))
        return scores

    def _rows_with_probe(
        self, cell: EvalCell, tokenizer: Any, key: int, rows: list[list[int]]
    ) -> Tensor | None:
        """The rows, and one with a key of another first digit; None if nothing is to be shared.

        All keys of a cell may start alike. The added row differs from its first digit on, which
        marks the end of the prefix that any key shares.
        """
        other = key + (50_000 if key < 50_000 else -40_000)
        try:
            probe = scored_documents(tokenizer).document(cell.length, cell.settings["depth"], other)
        except FarspanError:  # the other key may have more tokens than the scored ones
            return None
        return torch.tensor([*rows, probe])

    @torch.no_grad()
    def _predict(
        self, model: PreTrainedModel, rows: Tensor, count: int, prefix_cache: PrefixCache
    ) -> Tensor:
        predictions = torch.empty(len(rows), count, dtype=torch.long)

        def run_batch(start: int, stop: int) -> None:
            predictions[start:stop] = teacher_forced_argmax(
                model,
                rows[start:stop, prefix_cache.shared :],
                count,
                prefix_cache.branch(stop - start),
            )

        fast_kernels = prefer_cudnn() if model.device.type == "cuda" else nullcontext()
        with fast_kernels, prefix_cache.maskless_attention():
            run_in_batches(len(rows), rows_per_batch(model, rows.shape[1], self.batch), run_batch)
        return predictions


class PrefixCache:
    """The KV cache of a prefix that documents share, extended chunk by chunk.

    It is valid only for the model as it was: never keep it across a change of weights, scales or
    position encoding. Chunk boundaries are fixed, so that the numbers do not depend on which
    documents came first. Nothing is shared where the RoPE frequencies change with the length, or
    where a layer's cache is not a plain list of keys and values.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._tokens: list[int] = []
        self.shared = 0  # tokens of the prefix that the current documents share
        self._chunk = GPU_CHUNK if model.device.type == "cuda" else CHUNK
        self._cache = DynamicCache(config=model.config)
        fixed = not length_dependent_rotation(model)
        self._usable = fixed and all(type(layer) is DynamicLayer for layer in self._cache.layers)

    @torch.no_grad()
    def extend_to(self, rows: Tensor | None) -> None:
        """Compute the prefix that all rows [B, T] share, in whole chunks.

        A prefix below a quarter of the row is not worth the attention mask it needs. Without rows,
        nothing is shared.
        """
        self.shared = 0
        if rows is None or not self._usable:
            return
        equal = (rows == rows[:1]).all(0).long().cumprod(0).sum()
        shared = min(int(equal), rows.shape[1] - self._chunk) // self._chunk * self._chunk
        if 4 * shared < rows.shape[1]:
            return
        prefix = rows[0, :shared].tolist()
        known = shared_length(prefix, self._tokens) // self._chunk * self._chunk
        if known < min(shared, len(self._tokens)):  # the cached text diverges: drop the rest
            self._cache.crop(known - len(self._tokens))
            del self._tokens[known:]
        with self._maskless():  # cuDNN would build a new plan for each length of the masks
            for start in range(len(self._tokens), shared, self._chunk):
                ids = rows[:1, start : start + self._chunk].to(self.model.device)
                last_logits(self.model, ids, 1, self._cache)
                self._tokens += ids[0].tolist()
        self.shared = shared

    def branch(self, rows: int) -> DynamicCache | None:
        """A copy of the shared prefix for `rows` continuations; None if nothing is shared."""
        if not self.shared:
            return None
        branch = DynamicCache(config=self.model.config)
        for number, layer in enumerate(self._cache.layers):
            keys, values = (
                part[:, :, : self.shared].expand(rows, -1, -1, -1)
                for part in (layer.keys, layer.values)
            )
            branch.update(keys, values, number)
        return branch

    def maskless_attention(self) -> AbstractContextManager[None]:
        """On a GPU, attention that does not read the mask of the continuations."""
        return self._maskless() if self.shared else nullcontext()

    def _maskless(self) -> AbstractContextManager[None]:
        model = self.model
        on_gpu_sdpa = model.device.type == "cuda" and "sdpa" in model.config._attn_implementation
        if on_gpu_sdpa and model._can_set_attn_implementation():
            return seam.using(model, lower_right_attention)
        return nullcontext()


def lower_right_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs
):
    """Causal attention of the last queries to all keys, by kernels that need no attention mask.

    cuDNN has no such kernel. In 16 bits farspan's own is nearly as fast; torch's, by flash
    attention, is not. Layers that do more than that are left to the model's own backend.
    """
    special = ("bias", "position_bias", "sliding_window", "s_aux", "softcap")
    plain = all(kwargs.get(name) is None for name in special) and key.shape[-1] == value.shape[-1]
    grouped = query.shape[1] != key.shape[1]
    # float32 has no flash kernel, and the fallback takes no grouped heads
    slow = grouped and query.dtype == torch.float32
    if attention_mask is None or slow or not plain:
        return own_attention(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    scores = Scores(query, key, scaling)
    kernels = supported_kernels(scores, value)
    if kernels is not None and query.element_size() == 2:
        output, _ = kernels.attention(scores, value)
    else:
        bias: Any = causal_lower_right(query.shape[2], key.shape[2])
        output = F.scaled_dot_product_attention(
            query, key, value, bias, scale=scaling, enable_gqa=grouped
        )
    return output.transpose(1, 2).contiguous(), None


def teacher_forced_argmax(
    model: PreTrainedModel, rows: Tensor, count: int, past: Cache | None = None
) -> Tensor:
    """The argmax, given the right tokens before, at each of the last `count` positions of rows."""
    rows, start = rows.to(model.device), 0
    while past is not None and rows.shape[1] - start > CONTINUATION + count:
        last_logits(model, rows[:, start : start + CONTINUATION], 1, past)
        start += CONTINUATION
    return last_logits(model, rows[:, start:], count + 1, past)[:, :-1].argmax(-1).cpu()


def _sample(cell: EvalCell, key: int, said: str, hit: bool) -> Sample:
    return {
        "eval": NAME,
        "task": NAME,
        "length": cell.length,
        "depth": cell.settings["depth"],
        "key": key,
        "said": said,
        "hit": hit,
    }


def _accuracy(metric: str, length: int, samples: Sequence[Sample], tags: dict[str, Any]) -> Score:
    hits = sum(sample["hit"] for sample in samples)
    return Score(NAME, metric, length, *wilson(hits, len(samples)), len(samples), tags)


def scored_documents(tokenizer: Any) -> PasskeyDocuments:
    """Documents as a model is tested on them: with its begin-of-text token, if it expects one."""
    return PasskeyDocuments(tokenizer, begin_of_text(tokenizer))


def grid_lengths(longest: int, shortest: int, count: int = 16) -> tuple[int, ...]:
    """`count` evenly spaced lengths up to the longest, none below the shortest possible document.

    >>> grid_lengths(1024, 90, 4)
    (256, 512, 768, 1024)
    """
    step = longest / count
    lengths = [round(step * number) for number in range(1, count + 1)]
    if lengths[0] < shortest:
        lengths = [
            round(float(length)) for length in np.linspace(shortest, max(longest, shortest), count)
        ]
    return tuple(sorted(set(lengths)))


def passkey_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    depths: int = 10,
    keys: int = 1,
    seed: int = 0,
    batch: int = 4,
) -> float:
    """The share of keys retrieved at one length, as the evaluation scores it on equal documents.

    >>> passkey_accuracy(model, tokenizer, 1024, keys=2)
    """
    grid = Passkey((length,), depths, keys, seed, batch=batch)
    prefix_cache = PrefixCache(model)
    hits = [
        sample["hit"]
        for cell in grid.cells()
        for sample in grid.run(cell, model, tokenizer, prefix_cache)
    ]
    return sum(hits) / len(hits)
