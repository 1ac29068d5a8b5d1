"""training.json in the folder of a finished model: facts about its training that farspan reads."""

from __future__ import annotations

from pathlib import Path

from farspan.errors import CorruptError
from farspan.files import read_json, write_json

FILE = "training.json"

# Earlier versions of farspan wrote no training.json, only one of these sentences into README.md.
OLD_CARD_WITH_PASSKEYS = "**Passkey documents were trained on**"
OLD_CARD_WITHOUT_PASSKEYS = "No passkey documents were trained on."


def write_training_metadata(folder: Path, *, passkey_documents: bool) -> None:
    write_json(folder / FILE, {"passkey_documents": passkey_documents})


def trained_with_passkeys(folder: Path) -> bool | None:
    """Whether the training data of a model contained passkey documents; None if it is unknown."""
    try:
        metadata = read_json(folder / FILE) if (folder / FILE).is_file() else {}
    except CorruptError:  # another program's file of the same name
        metadata = {}
    passkeys = metadata.get("passkey_documents")
    return passkeys if isinstance(passkeys, bool) else _by_old_card(folder)


def _by_old_card(folder: Path) -> bool | None:
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if OLD_CARD_WITHOUT_PASSKEYS in text:
        return False
    return True if OLD_CARD_WITH_PASSKEYS in text else None
