"""The models that ship with farspan, by name."""

from __future__ import annotations

import re
from pathlib import Path

TWINS = Path(__file__).parent / "assets" / "twins"


def located(source: str | Path) -> str | Path:
    """Where a twin lies, if that is what is named; a folder of the same name goes first.

    >>> located("nope-twin").name
    'nope-twin'
    """
    twin = TWINS / str(source)
    return twin if re.fullmatch(r"[a-z]+-twin", str(source)) and not Path(source).exists() and twin.exists() else source
