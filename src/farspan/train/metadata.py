"""training.json in the folder of a finished model: facts about its training that farspan reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farspan.errors import CorruptError
from farspan.files import read_json, write_json

FILE = "training.json"

# Earlier versions of farspan wrote no training.json, only one of these sentences into README.md.
OLD_CARD_WITH_PASSKEYS = "**Passkey documents were trained on**"
OLD_CARD_WITHOUT_PASSKEYS = "No passkey documents were trained on."


def write_training_metadata(
    folder: Path, *, passkey_documents: bool, begin_of_text: bool = False
) -> None:
    """begin_of_text: whether texts in training began with a begin-of-text token."""
    facts = {"passkey_documents": passkey_documents, "begin_of_text": begin_of_text}
    write_json(folder / FILE, facts)


def trained_with_passkeys(folder: Path) -> bool | None:
    """Whether the training data of a model contained passkey documents; None if it is unknown."""
    passkeys = _read(folder).get("passkey_documents")
    return passkeys if isinstance(passkeys, bool) else _by_old_card(folder)


def begin_of_text(tokenizer: Any) -> list[int]:
    """The begin-of-text token that a model expects before a text; empty if it expects none.

    Of a model that farspan trained, training.json beside the tokenizer decides: rows of a mixture
    have no such token, whatever the tokenizer adds. Of any other model the tokenizer decides, by
    how it encodes an empty text (transformers applies `add_bos_token` of its config there).
    """
    if tokenizer.bos_token_id is None:
        return []
    expected = _read(Path(getattr(tokenizer, "name_or_path", "") or "")).get("begin_of_text")
    if not isinstance(expected, bool):
        first = tokenizer("", verbose=False)["input_ids"][:1]
        expected = first == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id] if expected else []


def _read(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / FILE) if (folder / FILE).is_file() else {}
    except CorruptError:  # another program's file of the same name
        return {}


def _by_old_card(folder: Path) -> bool | None:
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if OLD_CARD_WITHOUT_PASSKEYS in text:
        return False
    return True if OLD_CARD_WITH_PASSKEYS in text else None
