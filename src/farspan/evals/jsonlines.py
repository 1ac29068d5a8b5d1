"""JSON Lines of benchmarks: one object a line, each with the number of its line, for errors that name the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farspan.errors import CorruptError


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, with their lines counted from 1."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # and not at the other line ends that Unicode knows
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptError(f"{file} cannot be read ({type(error).__name__}); give JSON Lines in UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{file}, line {number} is not JSON ({error}); fetch the file again") from None
        if not isinstance(row, dict):
            raise CorruptError(f"{file}, line {number} is no JSON object; fetch the file again")
        yield number, row
