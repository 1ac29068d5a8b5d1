"""`farspan check`: does an engine apply what a patch does?

One long text, position by position: the log-probabilities of the engine are those of the model
here, those of its base model, or neither. Engines without log-probabilities of prompts are compared
by greedy continuations at several lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention.model_facts import config_train_length
from farspan.attention.patch import Patch
from farspan.attention.rope import reset_dynamic_rope
from farspan.begin_of_text import load_with_begin_of_text
from farspan.bundled import resolve_bundled
from farspan.data.documents import PYTHON_DOCS, check_text, read_documents
from farspan.data.windows import cut_windows
from farspan.errors import FarspanError
from farspan.evals.agreement import (
    DIFFERENT,
    EQUAL,
    Agreement,
    Continuation,
    compare_continuations,
    compare_losses,
)
from farspan.evals.decoding import end_tokens, generate_tokens
from farspan.evals.engine import Engine, EngineOptions
from farspan.evals.engine_http import is_url
from farspan.evals.engine_llama import has_llama, serve_gguf
from farspan.loading import (
    LoadOptions,
    check_source,
    find_patch,
    is_patch,
    load,
    load_base,
    resolve_device,
    upcast_small_model,
)
from farspan.model.loss import last_logits, token_losses
from farspan.model_objects import ModelLike, accepts_model_objects
from farspan.summaries import Summarized
from farspan.workflows.evaluate_engine import check_engine_options

LONGEST = 4096  # tokens, unless the train length is longer or --length says so
PROMPTS = 32  # lengths of greedy continuations
NEW_TOKENS = 8  # of each continuation
MOVED = 16  # tokens by which a prompt may become shorter, so that a server reads the same tokens
SURE = 0.1  # nats between the two likeliest tokens, from which on rounding changes no token
SERVER, LLAMA, TRANSFORMERS, FARSPAN = "a server", "llama.cpp", "transformers", "farspan"
LOSSES, CONTINUATIONS = "log-probabilities", "greedy continuations"


@dataclass(frozen=True, repr=False)
class CheckResult(Summarized):
    """Whether an engine computes what the model does here."""

    model: str
    engine: str
    by: str  # log-probabilities or greedy continuations
    length: int  # tokens of the text
    agreement: Agreement
    has_base: bool
    runtime: str  # a server, llama.cpp, transformers or farspan

    @property
    def holds(self) -> bool:
        return self.agreement.verdict == EQUAL

    @property
    def sentence(self) -> str:
        agreement, subject = self.agreement, f"the {self.by} of {self.engine}"
        if self.runtime != SERVER:
            subject += f" in {self.runtime}"
        measured = ""
        if agreement.difference is not None:
            measured = f", to {agreement.difference:.2g} nats (allowed {agreement.tolerance:.2g})"
        if self.by == CONTINUATIONS:
            measured = " (it returns no log-probabilities of prompts)"
        if self.holds:
            applied = ": it applies the patch" if self.has_base else ""
            unasked = Path(self.engine).suffix == ".gguf" and self.runtime == TRANSFORMERS
            return (
                f"{subject} are those of {self.model} up to {self.length} tokens{measured}{applied}"
                + "; llama.cpp was not asked, which needs xllamacpp" * unasked
            )
        if agreement.verdict == DIFFERENT:
            at = "in a prompt of" if self.by == CONTINUATIONS else "from position"
            after = "tokens on" if self.by == CONTINUATIONS else "on"
            return (
                f"{subject} differ from those of {self.model} {at} {agreement.position} {after}"
                f"{measured}; export the model in a format that this engine supports"
            )
        return (
            f"{subject} are those of the base model of {self.model} up to {self.length} tokens"
            f"{measured}: it ignores the extension; export the model in a format that this engine "
            "supports"
        )

    def facts(self) -> dict[str, str]:
        return {"model": self.model, "engine": self.engine, "verdict": self.sentence}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds, "sentence": self.sentence}


@accepts_model_objects
def check(
    model: ModelLike,
    engine: str | Path,
    *,
    length: int | None = None,
    tolerance: float | None = None,
    data: str | Path = PYTHON_DOCS,
    served_model: str = "",
    bos: str = "auto",
    position: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> CheckResult:
    """Compare an engine with a model, and with the base model of its patch.

    engine: a URL, a folder that transformers loads, or a .gguf file (run by llama.cpp if xllamacpp
        is installed).
    length: tokens of the text; default: the target of the patch, at most 4,096 or twice the train
        length.
    tolerance: nats that the mean of 32 positions may differ by.

    >>> farspan.check("rope-1k", farspan.export("rope-1k", "rope-1k-stock", "stock").folder).holds
    True
    """
    check_text(data)
    options: LoadOptions = {
        "device": resolve_device(device),
        "position": position,
        "trust_remote_code": trust_remote_code,
    }
    _check_engine(engine, served_model, trust_remote_code)
    patch = find_patch(model)
    live, tokenizer, begin = load_with_begin_of_text(model, bos, **options)
    live = upcast_small_model(live)
    train = (patch.train_length if patch else config_train_length(live.config)) or 0
    reach = length or min(patch.target if patch else train or LONGEST, max(2 * train, LONGEST))
    windows = cut_windows(read_documents(data), tokenizer, reach, 1, begin=begin.ids)
    ids = windows.ids[0].tolist()
    with _opened(engine, tokenizer, len(ids), served_model) as server:
        by = _compared_by(server, engine, tolerance)
        by_continuations = by == CONTINUATIONS
        prompts = _prompt_lengths(train or reach, reach)
        if server is not None and by_continuations:
            prompts = _kept_lengths(server, ids, prompts)

        def measure(each: PreTrainedModel) -> Any:
            return (
                _continuations(each, tokenizer, ids, prompts)
                if by_continuations
                else model_losses(each, ids)
            )

        here = measure(live)
        del live  # one model is in memory at a time
        base = measure(_load_base(Path(model), patch, options)) if patch else None
        if server is None:
            stock: LoadOptions = {**options, "position": None}
            other = measure(upcast_small_model(load(engine, **stock).model))
        elif by_continuations:
            rows = [ids[:count] for count in prompts]
            other = [answer.text for answer in server.generate(rows, NEW_TOKENS)]
        else:
            (other,) = server.losses([ids])
    agreement = (
        compare_continuations(other, here, base or ())
        if by_continuations
        else compare_losses(other, here, base, tolerance)
    )
    return CheckResult(
        str(model), str(engine), by, len(ids), agreement, patch is not None, _runtime(engine)
    )


def _check_engine(engine: str | Path, served_model: str, trust_remote_code: bool) -> None:
    """Refuse an engine that is not there before the model is loaded."""
    if _is_llama(engine):
        if not Path(engine).is_file():
            raise FarspanError(f"{engine} does not exist; check the path")
    elif not is_url(engine):
        check_source(engine, trust_remote_code=trust_remote_code)
    check_engine_options([engine], EngineOptions(served_model))


def _compared_by(server: Engine | None, engine: str | Path, tolerance: float | None) -> str:
    """Losses, unless the engine is a server that returns none."""
    if server is None or server.loss_form is not None:
        return LOSSES
    if tolerance is not None:
        raise FarspanError(
            f"--tolerance {tolerance:g} is in nats, and {engine} returns no log-probabilities, so "
            "texts are compared; remove it"
        )
    return CONTINUATIONS


def _is_llama(engine: str | Path) -> bool:
    """Whether llama.cpp runs it; without llama.cpp, transformers dequantizes a .gguf file."""
    return Path(engine).suffix == ".gguf" and has_llama()


def _runtime(engine: str | Path) -> str:
    """What computes it."""
    if is_url(engine):
        return SERVER
    if _is_llama(engine):
        return LLAMA
    return FARSPAN if is_patch(engine) else TRANSFORMERS


def _load_base(folder: Path, patch: Patch, options: LoadOptions) -> PreTrainedModel:
    folder = Path(resolve_bundled(folder))
    return upcast_small_model(load_base(folder, patch, **options).model)


def _prompt_lengths(train: int, longest: int) -> list[int]:
    """Half the train length, and evenly from there to the end of the text, with room to answer."""
    last = longest - NEW_TOKENS
    first = max(1, min(train // 2, last))
    return sorted({first + (last - first) * step // (PROMPTS - 1) for step in range(PROMPTS)})


def _kept_lengths(server: Engine, ids: list[int], lengths: Sequence[int]) -> list[int]:
    """Lengths at which a prompt as text is read as the same tokens: each one, or the next below.

    A tokenizer can join the last tokens of a text that was cut between them.
    """

    def kept(length: int) -> int:
        below = range(length, max(0, length - MOVED), -1)
        return next((count for count in below if server.keeps(ids[:count])), length)

    return sorted(set(map(kept, lengths)))


@contextmanager
def _opened(
    engine: str | Path, tokenizer: Any, length: int, served_model: str
) -> Iterator[Engine | None]:
    """The server, or that of a .gguf file; None for what transformers loads."""
    settings = EngineOptions(served_model)
    if is_url(engine):
        yield Engine.connect(str(engine), tokenizer, settings, keeps_answers=False)
    elif _is_llama(engine):
        with serve_gguf(Path(engine), length + NEW_TOKENS) as url:
            yield Engine.connect(url, tokenizer, settings, keeps_answers=False)
    else:
        yield None


def model_losses(model: PreTrainedModel, ids: Sequence[int]) -> list[float]:
    """The loss of every token but the first."""
    reset_dynamic_rope(model)
    rows = torch.tensor([ids], device=model.device)
    if int(rows.max()) >= model.get_input_embeddings().num_embeddings:
        raise FarspanError("the engine has a smaller vocabulary than the model; use its own export")
    return token_losses(model, rows)[0].double().tolist()


@torch.no_grad()
def _continuations(
    model: PreTrainedModel, tokenizer: Any, ids: Sequence[int], lengths: Sequence[int]
) -> list[Continuation]:
    """Greedy, each up to the first token that rounding could change, or to the end of the text."""
    continuations, end_ids = [], end_tokens(model, tokenizer)
    for length in lengths:
        prompt = torch.tensor([ids[:length]])
        (new,) = generate_tokens(model, prompt, NEW_TOKENS, end_ids=end_ids)
        reset_dynamic_rope(model)
        row = torch.tensor([[*ids[:length], *new]], device=model.device)
        sure = _sure_tokens(last_logits(model, row, len(new) + 1)[0, :-1])
        continuations.append(Continuation(length, tokenizer.decode(new[:sure])))
    return continuations


def _sure_tokens(logits: Tensor) -> int:
    """Leading tokens whose two largest logits [T, V] are far enough apart."""
    top = logits.float().topk(2).values
    close = (top[:, 0] - top[:, 1] < SURE).tolist()
    return close.index(True) if True in close else len(close)
