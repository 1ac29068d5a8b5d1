"""Perplexity by sliding windows, in which it is exact which tokens are scored, and with how much context.

A window of L tokens ends in a block of S tokens, the stride, and only the block is scored: each of its tokens has
between L − S and L − 1 tokens before it (Press et al.). Three definitions of which blocks:

- `same`: the same tokens at every length. Blocks begin where the longest length asked for has its first full window,
  at the token longest − S, and run to the end of the document, the last block being what is left. A window of a shorter
  length ends where the longest does, so only the context differs. A budget keeps a subset of the blocks, drawn by the
  seed, the same at every length. Tokens count alike.
- `paper-a`: windows of exactly L tokens from each document's beginning, S apart, their last S tokens scored, one
  document after the other until the budget is used up. What is scored depends on the length. Tokens count alike.
- `yarn`: a begin-of-text token and up to L − 1 tokens; the first window of a document scores all of its tokens, each
  next one what is new. Windows count alike, however many tokens they score.

A document that is too short for a single window is skipped, and counted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import forget_lengths
from farspan.data.documents import read_documents
from farspan.errors import FarspanError
from farspan.evals.scores import Cell, Place, Sample, Score, bootstrap
from farspan.memory import in_pieces
from farspan.model.fast import quick_attention
from farspan.model.loss import last_losses, token_losses

NAME = "perplexity"
MODES = ("same", "paper-a", "yarn")
STRIDE = 256
BUDGET = 16_384 * 128  # scored tokens: paper A's
CURVES, BINS = 8, 32  # windows that show loss by position, and in how many bins
MANY = 8  # documents, from which on they and not windows are drawn for an interval
LARGEST = 700.0  # nats, of which e to their number is still a number
BUSY = 2**16  # tokens at once that keep a GPU busy


@dataclass(frozen=True, eq=False)
class Text:
    """A corpus in a model's tokens."""

    name: str
    documents: tuple[str, ...]
    ids: tuple[Tensor, ...]  # of each document, int32
    sha256: str  # of the ids

    @property
    def longest(self) -> int:
        return max((len(ids) for ids in self.ids), default=0)


def read_text(name: str, source: str | Path, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The documents of a source (see data/documents.py) as tokens, no begin-of-text before them."""
    names: dict[str, None] = {}
    rows: list[Tensor] = []
    digest = hashlib.sha256()
    for document in read_documents(source):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        alike = document.name in names  # files of one name in two folders are two documents
        names[f"{document.name} ({len(rows)})" if alike else document.name] = None
        rows.append(torch.tensor(ids, dtype=torch.int32))
        digest.update(rows[-1].numpy().tobytes() + b"|")
    return Text(name, tuple(names), tuple(rows), digest.hexdigest())


@dataclass(frozen=True)
class Window:
    """Tokens start to end of a document, of which the last ones, so many, are scored."""

    document: int
    start: int
    end: int
    scored: int


@dataclass(frozen=True, eq=False)
class Perplexity:
    """Perplexity of texts at several lengths. The stored sample is a window with its summed loss."""

    texts: tuple[Text, ...]
    lengths: tuple[int, ...]
    mode: str = "same"
    stride: int = STRIDE
    budget: int | None = None  # scored tokens at most; paper A's unless given, and all of them for yarn
    windows: int | None = None  # at most so many, drawn by the seed
    seed: int = 0
    batch: int | None = None  # windows at once; on the CPU always one, so that nothing depends on it

    def __post_init__(self):
        if self.mode not in MODES:
            raise FarspanError(f"perplexity mode {self.mode!r} is unknown; choose one of {', '.join(MODES)}")
        if not self.lengths or min(self.lengths) <= self.stride or self.stride < 1:
            raise FarspanError(
                f"windows of {min(self.lengths, default=0)} tokens cannot move by {self.stride}; "
                "ask for longer lengths, or a shorter stride"
            )
        for text in self.texts:
            needed = {"same": max(self.lengths), "paper-a": max(self.lengths), "yarn": 1}[self.mode]
            if text.longest < needed:
                raise FarspanError(
                    f"no document of {text.name} has {needed} tokens (the longest of {len(text.ids)} has "
                    f"{text.longest}); give longer text, or ask for shorter lengths"
                )

    def cells(self) -> list[Cell]:
        found = []
        for text in self.texts:
            settings = {"sha256": text.sha256, "mode": self.mode, "stride": self.stride, "seed": self.seed}
            settings |= {"budget": self._budget, "windows": self.windows}
            if self.mode == "same":
                settings["longest"] = max(self.lengths)
            for length in self.lengths:
                windows, size = len(self.plans[text.name, length]), min(64, max(8, BUSY // length))  # whole batches
                if not windows:
                    raise FarspanError(
                        f"a budget of {self._budget} tokens is less than a window of {length} scores; give a larger one"
                    )
                for first in range(0, windows, size):
                    found.append(Cell(NAME, text.name, length, {**settings, "first": first, "count": size}))
            if self.mode == "same":
                curve = {"sha256": text.sha256, "seed": self.seed, "curve": CURVES}
                found.append(Cell(NAME, text.name, max(self.lengths), curve))
        return found

    def places(self) -> list[Place]:
        return list(dict.fromkeys(Place(NAME, cell.task, "ppl", cell.length) for cell in self.cells()))

    def run(self, cell: Cell, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        text = next(text for text in self.texts if text.name == cell.task)
        if "curve" in cell.settings:
            return list(self._curves(text, cell.length, model))
        first, count = cell.settings["first"], cell.settings["count"]
        mine = self.plans[text.name, cell.length][first : first + count]
        losses = self._losses(model, text, mine, self._start_token(tokenizer))
        samples = [self._sample(text, cell.length, window, loss) for window, loss in zip(mine, losses, strict=True)]
        return samples + (self._skipped(text, cell.length) if first == 0 else [])

    def score(self, samples: list[Sample]) -> list[Score]:
        groups: dict[tuple[str, int], list[Sample]] = {}
        for sample in samples:
            groups.setdefault((sample["task"], sample["length"]), []).append(sample)
        return [score for (task, length), some in groups.items() for score in self._scores(task, length, some)]

    @cached_property
    def plans(self) -> dict[tuple[str, int], list[Window]]:
        """The windows of each text and length, in the order of the text."""
        return {(text.name, length): self._plan(text, length) for text in self.texts for length in self.lengths}

    def _plan(self, text: Text, length: int) -> list[Window]:
        if self.mode == "same":
            blocks = [block for number, ids in enumerate(text.ids) for block in self._blocks(number, len(ids))]
            kept = _drawn(blocks, self._allowed(len(blocks)), (self.seed, 0))
            return [Window(block.document, block.end - length, block.end, block.scored) for block in kept]
        walk = self._walk_paper_a if self.mode == "paper-a" else self._walk_yarn
        windows: list[Window] = []
        left = self._budget or math.inf
        for number, ids in enumerate(text.ids):
            for window in walk(number, len(ids), length):
                if left >= window.scored:
                    windows.append(window)
                left -= window.scored
        return _drawn(windows, self.windows or len(windows), (self.seed, length))

    @property
    def _budget(self) -> int | None:
        return self.budget or (None if self.mode == "yarn" else BUDGET)

    def _allowed(self, blocks: int) -> int:
        return int(min(blocks, (self._budget or math.inf) // self.stride, self.windows or math.inf))

    def _blocks(self, document: int, tokens: int) -> Iterator[Window]:
        """The scored blocks of `same`, each within the longest window that ends with it."""
        longest = max(self.lengths)
        before = longest - self.stride
        for end in [*range(longest, tokens, self.stride), tokens] if tokens >= longest else []:
            yield Window(document, end - longest, end, end - before)
            before = end

    def _walk_paper_a(self, document: int, tokens: int, length: int) -> Iterator[Window]:
        for start in range(0, tokens - length + 1, self.stride):
            yield Window(document, start, start + length, self.stride)

    def _walk_yarn(self, document: int, tokens: int, length: int) -> Iterator[Window]:
        before = 0
        for start in range(0, tokens, self.stride):
            end = min(start + length - 1, tokens)  # one place is the begin-of-text token's
            yield Window(document, start, end, end - before)
            before = end
            if end == tokens:
                return

    def _start_token(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        if self.mode != "yarn":
            return None
        if tokenizer.bos_token_id is None:
            raise FarspanError(
                "yarn's definition begins every window with a begin-of-text token, and this tokenizer "
                "has none; choose the mode same or paper-a"
            )
        return tokenizer.bos_token_id

    def _losses(self, model: PreTrainedModel, text: Text, windows: Sequence[Window], start: int | None) -> list[float]:
        """The summed loss of each window's scored tokens. Windows of one shape are read together."""
        sums = torch.zeros(len(windows), dtype=torch.float64)
        shapes = [(window.end - window.start, max(window.scored, min(self.stride, window.end - window.start - 1)))
                  for window in windows]  # fmt: skip
        for (_, count), numbers in groupby(sorted(range(len(windows)), key=shapes.__getitem__), shapes.__getitem__):
            mine = list(numbers)
            rows = torch.stack([text.ids[windows[n].document][windows[n].start : windows[n].end] for n in mine]).long()
            if start is not None:
                rows = torch.cat((torch.full((len(rows), 1), start), rows), 1)
            losses = self._of_rows(model, rows, count)
            for number, row in zip(mine, losses, strict=True):
                sums[number] = row[count - windows[number].scored :].sum()
        return sums.tolist()

    def _of_rows(self, model: PreTrainedModel, rows: Tensor, count: int) -> Tensor:
        """The losses of the last `count` tokens of each row, float64 on the CPU. The host waits once, at the end."""
        forget_lengths(model)
        rows = rows.to(model.device)
        batch = rows_at_once(model, rows.shape[1], self.batch)
        found: list[Tensor] = []

        def some(first: int, last: int) -> None:
            # Layers may be compiled for whole batches; for another shape that would take longer than it gains.
            odd = torch.compiler.set_stance("force_eager") if last - first < batch else nullcontext()
            with odd:
                found.append(last_losses(model, rows[first:last], count))

        with quick_attention() if model.device.type == "cuda" else nullcontext():
            in_pieces(len(rows), batch, some)
        return torch.cat(found).cpu().double()

    def _sample(self, text: Text, length: int, window: Window, loss: float) -> Sample:
        if not math.isfinite(loss):
            raise FarspanError(
                f"the loss on {text.name} is {loss} in windows of {length} tokens: the model's numbers overflow there; "
                "leave that length away"
            )
        where = {"document": text.documents[window.document], "start": window.start, "end": window.end}
        return {"eval": NAME, "task": text.name, "length": length, **where, "scored": window.scored, "nll": loss}

    def _skipped(self, text: Text, length: int) -> list[Sample]:
        """The documents too short for a window, one sample each."""
        least = {"same": max(self.lengths), "paper-a": length, "yarn": 1}[self.mode]
        return [
            {"eval": NAME, "task": text.name, "length": length, "document": name, "scored": 0, "skipped": len(ids)}
            for name, ids in zip(text.documents, text.ids, strict=True)
            if len(ids) < least
        ]

    def _curves(self, text: Text, length: int, model: PreTrainedModel) -> Iterator[Sample]:
        """Loss by position: of a few whole windows, every token, in bins."""
        places = [
            Window(number, start, start + length, length - 1)
            for number, ids in enumerate(text.ids)
            for start in range(0, len(ids) - length + 1, length)
        ]
        edges = np.unique(np.linspace(0, length - 1, BINS + 1).round().astype(int))
        for window in _drawn(places, CURVES, (self.seed, 1)):
            forget_lengths(model)
            ids = text.ids[window.document][window.start : window.end].long()[None].to(model.device)
            with torch.compiler.set_stance("force_eager"):  # too few to compile for
                losses = token_losses(model, ids)[0].double().cpu().numpy()
            means = np.add.reduceat(losses, edges[:-1]) / np.diff(edges)
            sample = self._sample(text, length, window, float(losses.sum()))
            yield {**sample, "positions": (edges[1:] + 1).tolist(), "losses": means.round(5).tolist()}

    def _scores(self, task: str, length: int, samples: list[Sample]) -> Iterator[Score]:
        windows = [sample for sample in samples if "nll" in sample and "losses" not in sample]
        skipped = sum("skipped" in sample for sample in samples)
        if windows:
            scored = [window["scored"] for window in windows]
            documents = [window["document"] for window in windows]
            over = "documents" if len(set(documents)) >= MANY else "windows" if len(windows) > 1 else "none"
            mean, low, high = bootstrap(
                [window["nll"] / window["scored"] for window in windows],
                weights=None if self.mode == "yarn" else scored,
                groups=documents if over == "documents" else None,
                within=(0, LARGEST),
            )
            tags = {"task": task, "mode": self.mode, "stride": self.stride, "nll": mean, "windows": len(windows)}
            tags |= {"documents": len(set(documents)), "skipped": skipped, "interval": over}
            ppl = math.exp(min(mean, LARGEST))
            yield Score(NAME, "ppl", length, ppl, math.exp(low), math.exp(high), sum(scored), tags)
        curves = [sample for sample in samples if "losses" in sample]
        for number, position in enumerate(curves[0]["positions"] if curves else []):
            mean, low, high = bootstrap([curve["losses"][number] for curve in curves], within=(0, math.inf))
            tags = {"task": task, "by": "position", "windows": len(curves), "detail": True}
            yield Score(NAME, "loss", position, mean, low, high, len(curves), tags)


def rows_at_once(model: PreTrainedModel, length: int, asked: int | None) -> int:
    """How many rows any evaluation gives a model: on a GPU as many as make it busy, or as asked for. On the CPU one, so
    that the last bit of a result cannot depend on a row's neighbours; only to generate token by token takes longer."""
    if model.device.type == "cpu":
        return 1
    return asked or min(64, max(1, BUSY // length))


def _drawn(windows: list[Window], count: int, seed: tuple[int, int]) -> list[Window]:
    """So many of them, all subsets equally likely, in their own order."""
    if count >= len(windows):
        return windows
    chosen = np.random.default_rng(seed).permutation(len(windows))[:count]
    return [windows[number] for number in sorted(chosen)]
