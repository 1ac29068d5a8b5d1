"""One run on disk: what was asked, on what machine, with which versions, and what came out."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from farspan import __version__
from farspan.files import write_json

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions and machine, without names or paths of the one who ran it; device: which was used, if known."""
    import torch

    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else platform.machine()
    return {"farspan": __version__, "python": platform.python_version(), "device": name, "packages": found}


def brief(value: float) -> str:
    """Two decimals, from 100 on one, from 1,000 on none: 0.92, 22.10, 284.3, 1,284; two digits of what is far larger
    or smaller: 3.4e+32, 0.0042; of a whole number, all."""
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e6:  # the end of an interval of few windows
        return f"{value:.1e}"
    if 0 < abs(value) < 0.005:  # 0.00 is nothing at all
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def write_record(
    path: Path,
    command: str,
    settings: dict[str, Any],
    results: dict[str, Any],
    arguments: Sequence[str] | None = None,
) -> None:
    """record.json: the settings that reproduce a run, and its results; arguments: of the command, unless given."""
    write_json(
        path,
        {
            "command": command,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "arguments": sys.argv[1:] if arguments is None else list(arguments),
            "environment": environment(settings.get("device")),
            "settings": settings,
            **results,
        },
    )
