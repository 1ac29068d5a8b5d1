"""Sliding-window perplexity, with an exact definition of the scored tokens and their context.

A window of L tokens ends in a block of S tokens, the stride, and only the block is scored: each of
its tokens has between L − S and L − 1 tokens of context (Press et al.). The modes select blocks:

- `same`: the same tokens at every length. Blocks start where the longest length has its first full
  window, at the token longest − S, and cover the rest of the document; the last block may be
  shorter. A window of a shorter length ends where the longest does, so only the context differs. A
  budget keeps a random subset of the blocks, the same at every length. Tokens have equal weight.
- `paper-a` (Wang 2024): windows of exactly L tokens from the start of each document, S apart, their
  last S tokens scored, document by document until the budget is used up. The scored tokens depend
  on the length. Tokens have equal weight.
- `yarn`: a begin-of-text token and up to L − 1 tokens. The first window of a document scores all of
  its tokens, each later one its new tokens. Windows have equal weight, however many tokens they
  score.

Windows of `same` begin with the model's begin-of-text token, if it was trained with one. It takes
the place of the first token, so the scored tokens are the same for every model. `paper-a` never has
one, `yarn` always.

Documents too short for a single window are skipped and counted.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.rope import reset_dynamic_rope
from farspan.batching import run_in_batches
from farspan.data.documents import read_documents
from farspan.data.tokens import encode_pieces
from farspan.data.windows import prepend
from farspan.errors import FarspanError
from farspan.evals.engine import Engine
from farspan.evals.longppl import Contrast, key_windows
from farspan.evals.scores import EvalCell, Sample, Score, ScoreKey, bootstrap
from farspan.files import naming
from farspan.model.compile import prefer_cudnn
from farspan.model.loss import last_losses, token_losses

NAME = "perplexity"
MODES = ("same", "paper-a", "yarn")
PPL, LONGPPL = METRICS = ("ppl", "longppl")
STRIDE = 256
BUDGET = 16_384 * 128  # scored tokens in Wang 2024
CURVE_WINDOWS, CURVE_BINS = 8, 32  # of the loss-by-position curve
MIN_DOCUMENTS = 8  # for an interval over documents; with fewer it is over windows
MAX_NLL = 700.0  # nats; exp() of much more overflows
GPU_BATCH_TOKENS = 2**16  # enough to keep a GPU busy

LossModel: TypeAlias = PreTrainedModel | Engine


@dataclass(frozen=True, eq=False)
class Text:
    """A tokenized corpus."""

    name: str
    documents: tuple[str, ...]
    ids: tuple[Tensor, ...]  # of each document, int32; mapped from a file, read where they are used
    sha256: str  # of the ids

    @property
    def longest(self) -> int:
        return max((len(ids) for ids in self.ids), default=0)


def read_text(name: str, source: str | Path, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Tokenize the documents of a source (see data/documents.py), without begin-of-text tokens.

    Windows are drawn from all tokens, and their hash is part of every cell. So all are made, but
    kept in a temporary file.
    """
    names: dict[str, None] = {}
    sizes: list[int] = []
    digest = hashlib.sha256()
    with naming(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
        for document in read_documents(source):
            duplicate = document.name in names  # two folders may hold files of the same name
            names[f"{document.name} ({len(sizes)})" if duplicate else document.name] = None
            sizes.append(0)
            for piece in encode_pieces(tokenizer, document.text):
                file.write(piece.tobytes())
                digest.update(piece.tobytes())
                sizes[-1] += len(piece)
            digest.update(b"|")
        file.flush()
        # a copy on write, for torch warns of arrays that cannot be written
        ids = np.memmap(file, np.int32, "c") if sum(sizes) else np.empty(0, np.int32)
    rows = torch.from_numpy(ids).split(sizes) if sizes else ()
    return Text(name, tuple(names), tuple(rows), digest.hexdigest())


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens `start` to `end` of a document, the last `scored` of which are scored."""

    document: int
    start: int
    end: int
    scored: int


@dataclass(frozen=True, eq=False)
class Perplexity:
    """Perplexity of texts at several lengths. A stored sample is a window with its summed loss.

    Without a `budget` of scored tokens the modes same and paper-a use that of Wang 2024, and yarn
    scores everything. `windows` limits their number, drawn by the seed. With a `contrast`, samples
    also hold the loss of every scored token, and LongPPL is scored. `begin` is the begin-of-text
    token of the model, if it expects one.
    """

    texts: tuple[Text, ...]
    lengths: tuple[int, ...]
    mode: str = "same"
    stride: int = STRIDE
    budget: int | None = None
    windows: int | None = None
    seed: int = 0
    contrast: Contrast | None = None
    begin: tuple[int, ...] = ()

    def __post_init__(self):
        if self.mode not in MODES:
            raise FarspanError(
                f"perplexity mode {self.mode!r} is unknown; choose one of {', '.join(MODES)}"
            )
        if min(self.lengths, default=2) < 2:
            raise FarspanError(
                f"a length of {min(self.lengths)} leaves nothing to predict; use 2 or more"
            )
        if not self.lengths or min(self.lengths) <= self.stride or self.stride < 1:
            raise FarspanError(
                f"a stride of {self.stride} does not fit windows of "
                f"{min(self.lengths, default=0)} tokens; use a stride of 1 or more that is shorter "
                "than every length"
            )
        for text in self.texts:
            needed = {"same": max(self.lengths), "paper-a": max(self.lengths), "yarn": 1}[self.mode]
            if text.longest < needed:
                raise FarspanError(
                    f"no document of {text.name} has {needed} tokens (the longest of "
                    f"{len(text.ids)} has {text.longest}); use longer text or shorter lengths"
                )

    def cells(self) -> list[EvalCell]:
        cells = []
        for text in self.texts:
            settings = {
                "sha256": text.sha256,
                "mode": self.mode,
                "stride": self.stride,
                "seed": self.seed,
            }
            settings |= {"budget": self._budget, "windows": self.windows}
            if self.mode == "same":
                settings["longest"] = max(self.lengths)
            if self.contrast:  # else the key of a cell is that of earlier versions
                settings["token_losses"] = True
            begin = {"begin of text": list(self.begin)} if self._begin_tokens else {}  # likewise
            settings |= begin
            for length in self.lengths:
                windows = len(self.plans[text.name, length])
                size = min(64, max(8, GPU_BATCH_TOKENS // length))  # whole batches
                if not windows:
                    raise FarspanError(
                        f"a budget of {self._budget} scored tokens does not cover one window of "
                        f"{length} tokens; increase the budget"
                    )
                for first in range(0, windows, size):
                    part = {**settings, "first": first, "count": size}
                    cells.append(EvalCell(NAME, text.name, length, part))
            if self.mode == "same":
                curve = {"sha256": text.sha256, "seed": self.seed, "curve": CURVE_WINDOWS} | begin
                cells.append(EvalCell(NAME, text.name, max(self.lengths), curve))
        return cells

    def score_keys(self) -> list[ScoreKey]:
        measured = dict.fromkeys((cell.task, cell.length) for cell in self.cells())
        metrics = METRICS if self.contrast else (PPL,)
        return [
            ScoreKey(NAME, task, metric, length) for metric in metrics for task, length in measured
        ]

    def run(
        self, cell: EvalCell, model: LossModel, tokenizer: PreTrainedTokenizerBase
    ) -> list[Sample]:
        text = next(text for text in self.texts if text.name == cell.task)
        if "curve" in cell.settings:
            return list(self._position_losses(text, cell.length, model))
        first, count = cell.settings["first"], cell.settings["count"]
        windows = self.plans[text.name, cell.length][first : first + count]
        losses = self._window_losses(model, text, windows, self._first_tokens(tokenizer))
        samples = [
            self._sample(text, cell.length, window, float(row.sum()))
            for window, row in zip(windows, losses, strict=True)
        ]
        if "token_losses" in cell.settings:
            for sample, row in zip(samples, losses, strict=True):
                sample["token_losses"] = row.numpy().round(5).tolist()
        return samples + (self._skipped(text, cell.length) if first == 0 else [])

    def score(
        self, samples: list[Sample], evaluator_samples: list[Sample] | None = None
    ) -> list[Score]:
        """With a contrast, the key tokens are those of the evaluator; default: these samples."""
        scores = self._scores(samples)
        if self.contrast is not None:
            kept = [*key_windows(samples, evaluator_samples or samples, self.contrast)]
            kept += [sample for sample in samples if "skipped" in sample]
            for score in self._scores(kept):
                tags = {**score.tags, **asdict(self.contrast)}
                scores.append(replace(score, metric=LONGPPL, tags=tags))
        return scores

    @cached_property
    def plans(self) -> dict[tuple[str, int], list[Window]]:
        """The windows of each text and length, in text order."""
        return {
            (text.name, length): self._plan(text, length)
            for text in self.texts
            for length in self.lengths
        }

    def _plan(self, text: Text, length: int) -> list[Window]:
        if self.mode == "same":
            blocks = [
                block
                for number, ids in enumerate(text.ids)
                for block in self._blocks(number, len(ids), length)
            ]
            return _draw(blocks, self._block_limit(len(blocks)), (self.seed, 0))
        walk = self._walk_paper_a if self.mode == "paper-a" else self._walk_yarn
        windows: list[Window] = []
        left = self._budget or math.inf
        for number, ids in enumerate(text.ids):
            for window in walk(number, len(ids), length):
                if left >= window.scored:
                    windows.append(window)
                left -= window.scored
        return _draw(windows, self.windows or len(windows), (self.seed, length))

    @property
    def _budget(self) -> int | None:
        return self.budget or (None if self.mode == "yarn" else BUDGET)

    def _block_limit(self, blocks: int) -> int:
        return int(min(blocks, (self._budget or math.inf) // self.stride, self.windows or math.inf))

    def _blocks(self, document: int, tokens: int, length: int) -> Iterator[Window]:
        """The scored blocks of `same`, which are those of the longest windows at every length."""
        longest = max(self.lengths)
        before = longest - self.stride
        for end in [*range(longest, tokens, self.stride), tokens] if tokens >= longest else []:
            yield Window(document, end - length + self._begin_tokens, end, end - before)
            before = end

    def _walk_paper_a(self, document: int, tokens: int, length: int) -> Iterator[Window]:
        for start in range(0, tokens - length + 1, self.stride):
            yield Window(document, start, start + length, self.stride)

    def _walk_yarn(self, document: int, tokens: int, length: int) -> Iterator[Window]:
        before = 0
        for start in range(0, tokens, self.stride):
            end = min(start + length - 1, tokens)  # the begin-of-text token takes one position
            yield Window(document, start, end, end - before)
            before = end
            if end == tokens:
                return

    @property
    def _begin_tokens(self) -> int:
        """How many of the L tokens of a window of `same` are not of the text."""
        return len(self.begin) if self.mode == "same" else 0

    def _first_tokens(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """The tokens in front of every window."""
        if self.mode != "yarn":
            return self.begin if self._begin_tokens else ()
        if tokenizer.bos_token_id is None:
            raise FarspanError(
                "the mode yarn starts every window with a begin-of-text token, and this tokenizer "
                "has none; choose the mode same or paper-a"
            )
        return (tokenizer.bos_token_id,)

    def _window_losses(
        self,
        model: LossModel,
        text: Text,
        windows: Sequence[Window],
        first: tuple[int, ...],
    ) -> list[Tensor]:
        """The losses of each window's scored tokens. Windows of one shape are batched."""
        scored: list[Tensor] = [torch.empty(0)] * len(windows)
        shapes = []
        for window in windows:
            size = window.end - window.start
            shapes.append((size, max(window.scored, min(self.stride, size - 1))))
        by_shape = sorted(range(len(windows)), key=shapes.__getitem__)
        for (_, count), group in groupby(by_shape, shapes.__getitem__):
            numbers = list(group)
            rows = torch.stack(
                [text.ids[windows[n].document][windows[n].start : windows[n].end] for n in numbers]
            ).long()
            losses = self._row_losses(model, prepend(rows, first), count)
            for number, row in zip(numbers, losses, strict=True):
                scored[number] = row[count - windows[number].scored :]
        return scored

    def _row_losses(self, model: LossModel, rows: Tensor, count: int) -> Tensor:
        """The losses of the last `count` tokens of each row, float64 on the CPU.

        The host synchronizes with the GPU once, at the end.
        """
        if isinstance(model, Engine):
            return _all_losses(model, rows)[:, -count:]
        reset_dynamic_rope(model)
        rows = rows.to(model.device)
        batch = rows_per_batch(model, rows.shape[1], None)
        losses: list[Tensor] = []

        def run_batch(first: int, last: int) -> None:
            # Layers may be compiled for whole batches; compiling for another shape would not pay.
            eager = (
                torch.compiler.set_stance("force_eager") if last - first < batch else nullcontext()
            )
            with eager:
                losses.append(last_losses(model, rows[first:last], count))

        with prefer_cudnn() if model.device.type == "cuda" else nullcontext():
            run_in_batches(len(rows), batch, run_batch)
        return torch.cat(losses).cpu().double()

    def _sample(self, text: Text, length: int, window: Window, loss: float) -> Sample:
        if not math.isfinite(loss):
            raise FarspanError(
                f"the loss on {text.name} is {loss} in windows of {length} tokens because the "
                "model's activations overflow; remove that length"
            )
        return {
            "eval": NAME,
            "task": text.name,
            "length": length,
            "document": text.documents[window.document],
            "start": window.start,
            "end": window.end,
            "scored": window.scored,
            "nll": loss,
        }

    def _skipped(self, text: Text, length: int) -> list[Sample]:
        """One sample for each document that is too short for a window."""
        shortest = {"same": max(self.lengths), "paper-a": length, "yarn": 1}[self.mode]
        return [
            {
                "eval": NAME,
                "task": text.name,
                "length": length,
                "document": name,
                "scored": 0,
                "skipped": len(ids),
            }
            for name, ids in zip(text.documents, text.ids, strict=True)
            if len(ids) < shortest
        ]

    def _position_losses(self, text: Text, length: int, model: LossModel) -> Iterator[Sample]:
        """Loss by position: all tokens of a few full windows, averaged in bins."""
        candidates = [
            Window(number, start + self._begin_tokens, start + length, length - 1)
            for number, ids in enumerate(text.ids)
            for start in range(0, len(ids) - length + 1, length)
        ]
        edges = np.unique(np.linspace(0, length - 1, CURVE_BINS + 1).round().astype(int))
        for window in _draw(candidates, CURVE_WINDOWS, (self.seed, 1)):
            ids = text.ids[window.document][window.start : window.end].long()[None]
            ids = prepend(ids, self.begin if self._begin_tokens else ())
            losses = _all_losses(model, ids)[0].numpy()
            means = np.add.reduceat(losses, edges[:-1]) / np.diff(edges)
            sample = self._sample(text, length, window, float(losses.sum()))
            yield {
                **sample,
                "positions": (edges[1:] + 1).tolist(),
                "losses": means.round(5).tolist(),
            }

    def _scores(self, samples: list[Sample]) -> list[Score]:
        groups: dict[tuple[str, int], list[Sample]] = {}
        for sample in samples:
            groups.setdefault((sample["task"], sample["length"]), []).append(sample)
        return [
            score
            for (task, length), group in groups.items()
            for score in self._scores_at(task, length, group)
        ]

    def _scores_at(self, task: str, length: int, samples: list[Sample]) -> Iterator[Score]:
        windows = [sample for sample in samples if "nll" in sample and "losses" not in sample]
        skipped = sum("skipped" in sample for sample in samples)
        if windows:
            yield self._perplexity_score(task, length, windows, skipped)
        curves = [sample for sample in samples if "losses" in sample]
        for number, position in enumerate(curves[0]["positions"] if curves else []):
            mean, low, high = bootstrap(
                [curve["losses"][number] for curve in curves], within=(0, math.inf)
            )
            tags = {"task": task, "by": "position", "windows": len(curves), "detail": True}
            yield Score(NAME, "loss", position, mean, low, high, len(curves), tags)

    def _perplexity_score(
        self, task: str, length: int, windows: list[Sample], skipped: int
    ) -> Score:
        scored = [window["scored"] for window in windows]
        documents = [window["document"] for window in windows]
        if len(set(documents)) >= MIN_DOCUMENTS:
            interval = "documents"
        else:
            interval = "windows" if len(windows) > 1 else "none"
        mean, low, high = bootstrap(
            [window["nll"] / window["scored"] for window in windows],
            weights=None if self.mode == "yarn" else scored,
            groups=documents if interval == "documents" else None,
            within=(0, MAX_NLL),
        )
        tags = {
            "task": task,
            "mode": self.mode,
            "stride": self.stride,
            "nll": mean,
            "windows": len(windows),
            "documents": len(set(documents)),
            "skipped": skipped,
            "interval": interval,
        }
        value = math.exp(min(mean, MAX_NLL))
        return Score(NAME, PPL, length, value, math.exp(low), math.exp(high), sum(scored), tags)


def _all_losses(model: LossModel, rows: Tensor) -> Tensor:
    """The losses of all tokens of each row but the first, float64 on the CPU."""
    if isinstance(model, Engine):
        return torch.tensor(model.losses(rows.tolist())).double()
    reset_dynamic_rope(model)
    with torch.compiler.set_stance("force_eager"):  # too few windows to compile for
        return token_losses(model, rows.to(model.device)).double().cpu()


def rows_per_batch(model: PreTrainedModel, length: int, requested: int | None) -> int:
    """How many rows an evaluation runs at once: on a GPU as requested, or enough to keep it busy.

    On the CPU always one, so that the last bit of a result cannot depend on the other rows of a
    batch. That costs time only in token-by-token generation.
    """
    if model.device.type == "cpu":
        return 1
    return requested or min(64, max(1, GPU_BATCH_TOKENS // length))


def _draw(windows: list[Window], count: int, seed: tuple[int, int]) -> list[Window]:
    """A uniformly random subset of `count` windows, in text order."""
    if count >= len(windows):
        return windows
    chosen = np.random.default_rng(seed).permutation(len(windows))[:count]
    return [windows[number] for number in sorted(chosen)]
