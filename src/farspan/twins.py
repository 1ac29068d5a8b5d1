"""The models that ship with farspan, by name."""

from __future__ import annotations

import re
from pathlib import Path

TWINS = Path(__file__).parent / "assets" / "twins"


def is_twin(name: str) -> bool:
    """Is it one of them?"""
    return re.fullmatch(r"[a-z]+-twin", name) is not None and (TWINS / name).is_dir()


def located(source: str | Path) -> str | Path:
    """Where a twin lies, if that is what is named; a folder of the same name goes first.

    >>> located("nope-twin").name
    'nope-twin'
    """
    return TWINS / str(source) if is_twin(str(source)) and not Path(source).exists() else source
