"""One run on disk: what was asked, on what machine, with which versions, and what came out."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from farspan import __version__
from farspan.files import write_json

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def environment() -> dict[str, Any]:
    """Versions and machine, without names or paths of the one who ran it."""
    import torch

    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"farspan": __version__, "python": platform.python_version(), "device": device, "packages": found}


def brief(value: float) -> str:
    """Three digits that count: 0.92, 22.1, 1,284, 3.4e+32; of a whole number, all."""
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e6:  # the end of an interval of few windows
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def write_record(path: Path, command: str, settings: dict[str, Any], results: dict[str, Any]) -> None:
    """record.json: the settings that reproduce a run, and its results."""
    write_json(
        path,
        {
            "command": command,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "arguments": sys.argv[1:],
            "environment": environment(),
            "settings": settings,
            **results,
        },
    )
