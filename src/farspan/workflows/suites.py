"""What a suite of `farspan eval` is: which evaluations, on which texts, by which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.data.passkey import SCORED, Passkeys
from farspan.errors import FarspanError, nearest
from farspan.evals.commonsense import Commonsense
from farspan.evals.longbench import LongBench
from farspan.evals.needle import Needle
from farspan.evals.passkey import Passkey
from farspan.evals.perplexity import MODES, STRIDE, Perplexity, Text, read_text
from farspan.evals.scores import Eval

DEFAULT_TEXT = "python-docs/score"
QUICK_WINDOWS = 32
NEEDLES = 20  # samples of a task at a length


@dataclass(frozen=True)
class Scope:
    """What a suite covers: which lengths, which texts, how much of them."""

    lengths: tuple[int, ...] = ()  # of perplexity and needles; empty: doublings from the training length
    grid: tuple[int, ...] = ()  # of passkeys; as lengths where they were asked for, else to twice the extended length
    contexts: tuple[int, ...] = ()  # of LongBench; the same, else the extended length
    data: Mapping[str, str | Path] = field(default_factory=dict)
    mode: str = MODES[0]
    stride: int | None = None  # 256, or half the shortest length where that is less
    budget: int | None = None
    windows: int | None = None
    beams: int | None = None
    items: int | None = None
    seed: int = 0
    asked: bool = False  # were the lengths asked for, or derived?


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to be measured, and what is known of it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train_length: int | None
    reach: int | None  # the length it was extended to, or trained on
    limit: int | None  # rows of a learned position table
    trained: str  # on passkey documents: "yes", "no" or "unknown"
    identity: Mapping[str, str]  # all of it that a result depends on


Build = Callable[[Subject, Scope], Eval]


def _texts(subject: Subject, scope: Scope, names: Sequence[str]) -> tuple[Text, ...]:
    texts = tuple(read_text(name, scope.data[name], subject.tokenizer) for name in names)
    known = subject.model.get_input_embeddings().num_embeddings
    if any(int(ids.max()) >= known for text in texts for ids in text.ids if len(ids)):
        raise FarspanError(f"the tokenizer of {subject.name} knows more tokens than the model; use the model's own")
    return texts


def _perplexity(names: Sequence[str] | None, windows: int | None = None) -> Build:
    def build(subject: Subject, scope: Scope) -> Eval:
        texts = _texts(subject, scope, list(scope.data) if names is None else names)
        room = min(text.longest for text in texts)
        lengths = tuple(length for length in scope.lengths if scope.asked or length <= room) or scope.lengths[:1]
        stride = scope.stride or min(STRIDE, min(lengths) // 2)
        return Perplexity(texts, lengths, scope.mode, stride, scope.budget, scope.windows or windows, scope.seed)

    return build


def _passkey(depths: int, keys: int) -> Build:
    def build(subject: Subject, scope: Scope) -> Eval:
        if not scope.grid:
            shortest = Passkeys(subject.tokenizer).shortest_of(SCORED)
            raise FarspanError(
                f"a passkey text takes {shortest} tokens, and the position table of {subject.name} ends at "
                f"{subject.limit}; choose a suite without passkeys, as perplexity"
            )
        grid = Passkey(scope.grid, depths, keys, scope.seed, subject.trained)
        for cell in grid.cells()[:depths]:  # of the shortest length, which is refused now if it has no room
            grid.documents(cell, subject.tokenizer)
        return grid

    return build


def _needle(subject: Subject, scope: Scope) -> Eval:
    haystack = scope.data.get("haystack", "")
    return Needle(scope.lengths, haystack=haystack, samples=scope.items or NEEDLES, seed=scope.seed)


def _longbench(beams: int) -> Build:
    return lambda subject, scope: LongBench(scope.data["longbench"], scope.contexts, scope.beams or beams, scope.items)


def _commonsense(subject: Subject, scope: Scope) -> Eval:
    return Commonsense(scope.data.get("commonsense", ""), max(scope.contexts), limit=scope.items)


@dataclass(frozen=True)
class Suite:
    builds: tuple[Build, ...]
    grid: int = 16  # lengths of passkeys
    texts: tuple[str, ...] | None = None  # names that --data may have; None: any, each a text for perplexity
    needed: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()  # of OPTIONS


OPTIONS = {
    "mode": "--mode",
    "stride": "--stride",
    "budget": "--budget",
    "windows": "--sample-windows",
    "beams": "--beams",
    "items": "--items",
}
OF_PERPLEXITY = ("mode", "stride", "budget", "windows")

SUITES = {
    "quick": Suite((_perplexity(None, QUICK_WINDOWS), _passkey(5, 2)), grid=4, uses=OF_PERPLEXITY),
    "paper": Suite(
        (_perplexity(("pg19", "proofpile")), _passkey(10, 10), _longbench(5), _commonsense),
        texts=("pg19", "proofpile", "longbench", "commonsense"),
        needed=("pg19", "proofpile", "longbench"),
        uses=tuple(OPTIONS),
    ),
    "perplexity": Suite((_perplexity(None),), uses=OF_PERPLEXITY),
    "passkey": Suite((_passkey(10, 10),), texts=()),
    "needle": Suite((_needle,), texts=("haystack",), uses=("items",)),
    "longbench": Suite((_longbench(1),), texts=("longbench",), needed=("longbench",), uses=("beams", "items")),
    "commonsense": Suite((_commonsense,), texts=("commonsense",), uses=("items",)),
}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise FarspanError(f"suite {name!r} is unknown; {nearest(name, SUITES)}")
    return SUITES[name]


def named_texts(name: str, suite: Suite, data: str | Path | Mapping[str, str | Path] | None) -> dict[str, str | Path]:
    """The texts by name, as this suite takes them."""
    if data is None:
        given: dict[str, str | Path] = {"python-docs": DEFAULT_TEXT} if suite.texts is None else {}
    elif isinstance(data, str | Path):
        only = Path(data).name.partition(".")[0] if suite.texts is None else next(iter(suite.texts), "")
        given = {only or "text": data}
    else:
        given = dict(data)
    for text in given:
        if suite.texts is not None and text not in suite.texts:
            if not suite.texts:
                raise FarspanError(f"the suite {name} reads no text; leave --data away")
            takes = ", ".join(f"{name}=PATH" for name in suite.texts)
            raise FarspanError(f"--data {text}= is nothing that the suite {name} reads; it takes {takes}")
    missing = [text for text in suite.needed if text not in given]
    if missing:
        ways = " ".join(f"--data {text}=PATH" for text in missing)
        raise FarspanError(f"the suite {name} needs {' and '.join(missing)}; give {ways}")
    return given


def check_used(name: str, scope: Scope) -> None:
    """Refuse a setting that would change nothing."""
    for setting, option in OPTIONS.items():
        value = getattr(scope, setting)
        if value != getattr(Scope, setting) and setting not in SUITES[name].uses:
            others = ", ".join(other for other, suite in SUITES.items() if setting in suite.uses)
            raise FarspanError(
                f"the suite {name} has no use for {option} {value}; leave it away, or choose a suite that has: {others}"
            )
