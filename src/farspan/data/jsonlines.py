"""JSON Lines: one object a line, with its line number for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farspan.errors import CorruptError


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, with their line numbers from 1."""
    try:
        # Not splitlines(): it also splits at U+2028 and others, which may stand inside a string.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptError(
            f"{file} cannot be read ({type(error).__name__}); give JSON Lines in UTF-8"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptError(
                f"{file}, line {number} is not JSON ({error}); correct it, or download it again"
            ) from None
        if not isinstance(row, dict):
            raise CorruptError(
                f"{file}, line {number} is not a JSON object; correct it, or download it again"
            )
        yield number, row
