"""training.json in the folder of a finished model: facts about its training that farspan reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farspan.data.tokens import DECISION, adds_begin_of_text
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

    A command decides it once, for a loaded model (begin_of_text.py); else the metadata decide.
    """
    if tokenizer.bos_token_id is None:
        return []
    expected = getattr(tokenizer, DECISION, None)
    if expected is None:
        expected = stated_begin_of_text(tokenizer)[0]
    return [tokenizer.bos_token_id] if expected else []


def stated_begin_of_text(tokenizer: Any) -> tuple[bool | None, str]:
    """Whether texts began with a begin-of-text token in training, and what says so.

    Of a model that farspan trained, training.json beside the tokenizer decides: rows of a mixture
    have no such token, whatever the tokenizer adds. Of any other model the tokenizer decides: by
    how it encodes a text, or by `add_bos_token` of its config or .gguf file. None: all are silent.
    """
    if tokenizer.bos_token_id is None:
        return False, "its tokenizer has no begin-of-text token"
    name = getattr(tokenizer, "name_or_path", "")
    facts = _read(Path(name)) if name else {}
    if isinstance(facts.get("begin_of_text"), bool):
        return facts["begin_of_text"], f"{FILE} says so"
    if adds_begin_of_text(tokenizer):
        return True, "its tokenizer adds it"
    if isinstance(setting := getattr(tokenizer, "init_kwargs", {}).get("add_bos_token"), bool):
        return setting, f"add_bos_token of its tokenizer is {str(setting).lower()}"
    if "passkey_documents" in facts:
        return False, "farspan trained it on rows without one"
    return None, "its tokenizer does not say"


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
