"""Whether texts begin with a begin-of-text token: one rule for every command.

A model that was trained with such a token can be useless without it: Gemma 3 predicts a sentence
with 9.7 nats per token instead of 4.0. Metadata decide; where they are silent, losses do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch
from farspan.attention.rope import reset_dynamic_rope
from farspan.data.documents import PYTHON_DOCS, read_documents
from farspan.data.tokens import DECISION
from farspan.data.windows import cut_windows
from farspan.errors import FarspanError, suggest
from farspan.loading import LoadOptions, find_patch, load_with_tokenizer
from farspan.model.config import FarspanConfig
from farspan.model.loss import token_losses
from farspan.train.metadata import stated_begin_of_text

CHOICES = ("auto", "yes", "no")
WINDOWS, LENGTH = 4, 64  # of python-docs, on which losses are measured
MARGIN = 0.1  # nats; a token that a model never saw in front of a text changes less
DISAGREEMENT = 0.5  # nats, from which metadata that losses contradict are worth a warning


@dataclass(frozen=True)
class BeginOfText:
    """The decision for one model, and the reason."""

    ids: tuple[int, ...]  # in front of every window and prompt; empty: none
    why: str
    losses: Mapping[str, float] | None = None  # in nats, "with" and "without" the token
    warning: str = ""
    remembered: bool | None = None  # by a patch; None: the metadata of its base say the same

    def to_json(self) -> dict[str, Any]:
        """For records."""
        return {key: value for key, value in asdict(self).items() if key != "remembered"}

    @property
    def notes(self) -> tuple[str, ...]:
        """For the output: nothing where no text changes and no loss was decisive."""
        measured = self.losses is not None and self.why.startswith("measured")
        if not self.ids and not measured and not self.warning:
            return ()
        action = "texts begin with" if self.ids else "texts begin without"
        note = f"{action} a begin-of-text token: {self.why}"
        return (note, self.warning) if self.warning else (note,)


UNDECIDED = BeginOfText((), "not decided")


class LoadedText(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    begin: BeginOfText


def load_with_begin_of_text(
    source: str | Path, bos: str = "auto", **options: Unpack[LoadOptions]
) -> LoadedText:
    """A model, its tokenizer, and how its texts begin."""
    check_choice(bos)
    model, tokenizer = load_with_tokenizer(source, **options)
    begin = decide_begin_of_text(model, tokenizer, bos, find_patch(source))
    return LoadedText(model, tokenizer, begin)


def check_choice(bos: str) -> None:
    if bos not in CHOICES:
        raise FarspanError(f"--bos {bos} is unknown; {suggest(bos, CHOICES)}")


def decide_begin_of_text(
    model: PreTrainedModel | None, tokenizer: Any, bos: str = "auto", patch: Patch | None = None
) -> BeginOfText:
    """Decide how the texts of a model begin; `begin_of_text(tokenizer)` then says the same.

    model: None for a served one, of which no loss is measured.
    bos: yes or no, or auto: by the patch, by metadata, and where they are silent by the loss.
    """
    decision = _decide(model, tokenizer, bos, patch)
    setattr(tokenizer, DECISION, bool(decision.ids))
    return decision


def _decide(
    model: PreTrainedModel | None, tokenizer: Any, bos: str, patch: Patch | None
) -> BeginOfText:
    token = tokenizer.bos_token_id
    if bos != "auto":
        if bos == "yes" and token is None:
            raise FarspanError(
                "--bos yes needs a begin-of-text token, and this tokenizer has none; remove it"
            )
        return BeginOfText((token,) * (bos == "yes"), f"--bos {bos}", remembered=bos == "yes")
    if patch is not None and patch.begin_of_text is not None and token is not None:
        chosen = patch.begin_of_text
        return BeginOfText((token,) * chosen, "its patch was made so", remembered=chosen)
    stated, why = stated_begin_of_text(tokenizer)
    own = model is not None and isinstance(model.config, FarspanConfig)
    if stated is None and own:
        stated, why = False, "farspan trains on rows without one"
    if token is None or model is None or own:
        return BeginOfText((token,) * bool(stated), why, remembered=stated or None)
    losses = _measure(model, tokenizer)
    gain = losses["without"] - losses["with"] if losses else 0.0
    if stated is None:
        chosen, compared = gain > MARGIN, _compare(losses)
        return BeginOfText(
            (token,) * chosen, f"measured, since {why}: {compared}", losses, "", chosen
        )
    warning = ""
    if (gain if not stated else -gain) > DISAGREEMENT:
        warning = (
            f"the losses contradict that: {_compare(losses)}; "
            f"set --bos {'no' if stated else 'yes'} if {why} by mistake"
        )
    return BeginOfText((token,) * stated, why, losses, warning, stated or None)


def _compare(losses: Mapping[str, float] | None) -> str:
    if losses is None:
        return "no loss could be measured"
    return f"a loss of {losses['with']:.2f} with it and {losses['without']:.2f} without"


@torch.no_grad()
def _measure(model: PreTrainedModel, tokenizer: Any) -> dict[str, float] | None:
    """The loss of the same tokens with and without a begin-of-text token before each window.

    None where that is impossible: a Python without its documentation, a vocabulary that is not the
    model's, or losses that are not finite. What follows reports such a model in its own words.
    """
    try:
        ids = cut_windows(read_documents(PYTHON_DOCS), tokenizer, LENGTH, WINDOWS).ids
    except (ImportError, FarspanError):
        return None
    ids = ids.to(model.device)
    token = torch.full((len(ids), 1), tokenizer.bos_token_id, device=model.device)
    if int(max(ids.max(), token.max())) >= model.get_input_embeddings().num_embeddings:
        return None
    losses = {}
    for name, rows in (("with", torch.cat((token, ids), 1)), ("without", ids)):
        reset_dynamic_rope(model)
        try:
            scored = token_losses(model, rows)[:, 1 - LENGTH :]
        except (IndexError, RuntimeError):  # as a shorter position table, or too little memory
            return None
        losses[name] = round(float(scored.double().mean()), 4)
    reset_dynamic_rope(model)
    return losses if all(map(math.isfinite, losses.values())) else None
