"""What farspan promises for a model of any family, checked on one tiny model.

Each check holds, or farspan refuses in a sentence. Anything else is a traceback. Where the family
itself breaks the law (a cache that changes its outputs), the check does not apply.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

import farspan
from every_family import POSITIONS, VOCABULARY, default_config, tiny_model
from farspan.attention import guard, seam
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import FarspanError
from farspan.formats.fold import find_sites, fold
from farspan.methods.extend_config import ExtendConfig
from farspan.report import style
from farspan.workflows.extend import extend
from farspan.workflows.inspect import Inspection

HOLDS, REFUSED, ABSENT, TRACEBACK = "holds", "refused", "absent", "traceback"
TOKENS, DECODED, PADDING = 24, 3, 5
# Of the largest logit: what another order of the same float32 sums can do.
ROUNDING = 1e-3
SEEDS = 3
QUICK = ExtendConfig(choose_windows=1, report_windows=1, passkeys=0)


class AbsentError(Exception):
    """The family itself lacks what a check is about."""


@dataclass
class Outcome:
    state: str
    detail: str = ""


@dataclass
class Subject:
    """A tiny model of a family, on disk and in memory."""

    family: str
    folder: Path

    @cached_property
    def model(self) -> PreTrainedModel:
        return tiny_model(self.family)

    @cached_property
    def saved(self) -> Path:
        """The model with a tokenizer, and beside it a text."""
        text = next(iter(read_documents("python-docs"))).text[:30_000]
        (self.folder / "text.txt").write_text(text)
        try:
            self.model.save_pretrained(self.folder / "model")
        except StrictDataclassError as error:  # sizes of the tiny config contradict each other
            raise AbsentError(f"transformers does not save the tiny model: {error}") from None
        train_tokenizer([text], VOCABULARY - 84).save_pretrained(self.folder / "model")
        return self.folder / "model"

    @cached_property
    def inspection(self) -> Inspection:
        return farspan.inspect(self.saved)

    @property
    def tokens(self) -> Tensor:
        return random_tokens(0)

    def growing(self) -> Scales:
        layers = probe(self.model)
        table = torch.linspace(0.1, 0.3, max(layer.heads for layer in layers))
        table = table.repeat(len(layers), 1)
        return Scales(tuple(layer.index for layer in layers), 1 + table, table, "log", TOKENS // 4)


def check_inspect(subject: Subject) -> str:
    inspection = subject.inspection
    parts = []
    for layer in inspection.layers:
        part = layer.position + (f"/{layer.window}" if layer.window else "")
        if part not in parts:
            parts.append(part)
    return ", ".join(parts)


def check_config(subject: Subject) -> str:
    """The config of full size, without weights."""
    default_config(subject.family).save_pretrained(subject.folder / "config")
    inspection = farspan.inspect(subject.folder / "config")
    return f"{inspection.parameters:,} parameters, {len(inspection.layers)} layers"


@torch.no_grad()
def check_identity(subject: Subject) -> str:
    """The seam changes no output, with a cache and padding, too."""
    model = subject.model
    runs = (plain_logits, padded_logits, cached_logits)
    before = [_or_none(run, model, subject.tokens) for run in runs]
    seam.install(model)
    try:
        for run, expected in zip(runs, before, strict=True):
            if expected is not None:
                actual = run(model, subject.tokens)
                same = torch.equal(actual, expected) or _change(actual, expected) == 0
                assert same, f"{run.__name__} changes by {_change(actual, expected):.2g}"
    finally:
        seam.uninstall(model)
    return "" if all(part is not None for part in before) else "without what the family lacks"


@torch.no_grad()
def check_scale(subject: Subject) -> str:
    """Queries are multiplied, and logits change."""
    model, layers = subject.model, probe(subject.model)
    before = plain_logits(model, subject.tokens)
    queries = [_first_queries(model, subject.tokens)]
    heads = max(layer.heads for layer in layers)
    seam.install(model, Scales.uniform(1.5, [layer.index for layer in layers], heads))
    try:
        queries.append(_first_queries(model, subject.tokens))
        assert torch.allclose(queries[1], 1.5 * queries[0], rtol=1e-4, atol=1e-5)
        assert _change(plain_logits(model, subject.tokens), before) > 1e-5, "no logit changes"
    finally:
        seam.uninstall(model)
    return ""


def check_cache(subject: Subject) -> str:
    """Growing scales give the same logits with a cache and without one."""
    return _check_same(subject, cached_logits, "a cache changes its logits")


def check_padding(subject: Subject) -> str:
    """Growing scales give the same logits behind padding."""
    return _check_same(subject, padded_logits, "padding changes its logits")


def check_fold(subject: Subject) -> str:
    """Scales fold into the weights of every layer that can hold them."""
    model, layers = copy.deepcopy(subject.model), probe(subject.model)
    heads = max(layer.heads for layer in layers)
    rows = {"scales by head": torch.linspace(1.1, 1.9, heads), "scales by layer": torch.ones(heads)}
    for name, row in rows.items():
        row = row if name == "scales by head" else 1.5 * row
        indices = tuple(layer.index for layer in layers)
        sites = find_sites(model, Scales(indices, row.repeat(len(indices), 1)))
        folding = tuple(index for index, site in sites.items() if not isinstance(site, str))
        if folding:
            fold(model, Scales(folding, row.repeat(len(folding), 1)), subject.tokens)
            count = "" if len(folding) == len(indices) else f" on {len(folding)} of {len(indices)}"
            return f"{name}{count}"
    raise FarspanError(next(str(site) for site in sites.values()))


def check_extend(subject: Subject) -> str:
    # Drawing takes longer than extending.
    with patch.object(style, "save", lambda figure, stem: stem.touch()):
        result = extend(
            subject.saved,
            2 * POSITIONS,
            subject.folder / "patch",
            "uniform",
            data=subject.folder / "text.txt",
            recipe=QUICK,
            train_length=POSITIONS,
            device="cpu",
        )
    assert farspan.load(subject.folder / "patch").model is not None
    assert result.after.keys() == result.before.keys()
    return ""


CHECKS: dict[str, Callable[[Subject], str]] = {
    "inspect": check_inspect,
    "config": check_config,
    "identity": check_identity,
    "scale": check_scale,
    "cache": check_cache,
    "padding": check_padding,
    "fold": check_fold,
    "extend": check_extend,
}


def run_checks(subject: Subject) -> dict[str, Outcome]:
    """The outcome of every check; of `build` alone if no model of the family can be built."""
    try:
        assert subject.model is not None
    except Exception as error:
        return {"build": Outcome(ABSENT, _sentence(error))}
    outcomes = {"build": Outcome(HOLDS, type(subject.model).__name__)}
    for name, check in CHECKS.items():
        try:
            outcomes[name] = Outcome(HOLDS, check(subject))
        except FarspanError as error:
            outcomes[name] = Outcome(REFUSED, str(error))
        except AbsentError as error:
            outcomes[name] = Outcome(ABSENT, str(error))
        except Exception:
            outcomes[name] = Outcome(TRACEBACK, traceback.format_exc()[-3000:])
    return outcomes


def random_tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 84, (1, TOKENS), generator=generator)


def plain_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def padded_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of the tokens behind left padding."""
    padding = torch.zeros(1, PADDING, dtype=torch.long)
    mask = torch.cat((padding, torch.ones_like(ids)), dim=1)
    ids = torch.cat((padding, ids), dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    options = {"position_ids": positions} if _takes(model, "position_ids") else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
    return logits[:, PADDING:]


def cached_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The last tokens are read one at a time."""
    output = model(input_ids=ids[:, :-DECODED], use_cache=True)
    parts = [output.logits]
    for index in range(ids.shape[1] - DECODED, ids.shape[1]):
        token = ids[:, index : index + 1]
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


@torch.no_grad()
def _check_same(subject: Subject, run: Callable, lack: str) -> str:
    if _or_none(run, subject.model, subject.tokens) is None:
        raise AbsentError("the family cannot run so")
    if min(_differences(subject, run)) > ROUNDING:
        raise AbsentError(lack)
    change = min(_differences(subject, run, subject.growing()))
    assert change <= ROUNDING, f"the logits change by {change:.2g}"
    return ""


def _differences(subject: Subject, run: Callable, scales: Scales | None = None) -> Iterator[float]:
    """What a run changes, of other tokens and in float64, too, until it is no more than rounding.

    Rounding decides which of two almost equal keys or experts a model selects.
    """
    for seed in range(SEEDS):
        yield (change := _difference(subject.model, random_tokens(seed), run, scales))
        if change <= ROUNDING:
            break
    else:
        exact = copy.deepcopy(subject.model).double()
        if getattr(exact.config, "_experts_implementation", None) is not None:
            exact.set_experts_implementation("eager")
        with suppress(RuntimeError):  # a kernel without float64
            yield _difference(exact, subject.tokens, run, scales)


def _difference(
    model: PreTrainedModel, tokens: Tensor, run: Callable, scales: Scales | None
) -> float:
    plain = plain_logits(model, tokens)
    if scales is None:
        return _change(plain, run(model, tokens))
    seam.install(model, scales)
    try:
        whole = plain_logits(model, tokens)
        assert _change(whole, plain) > 1e-5, "the scales change nothing"
        return _change(whole, run(model, tokens))
    finally:
        seam.uninstall(model)


def _first_queries(model: PreTrainedModel, ids: Tensor) -> Tensor:
    calls: list[seam.Call] = []
    with seam.observing(model, calls.append):
        plain_logits(model, ids)
    return calls[0].q


def _or_none(run: Callable, model: PreTrainedModel, ids: Tensor) -> Tensor | None:
    """None where the family itself fails."""
    try:
        return run(model, ids)
    except Exception:
        return None


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in type(model).forward.__code__.co_varnames


def _change(first: Tensor, second: Tensor) -> float:
    return guard.relative_change(first, second)


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
