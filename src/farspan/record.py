"""record.json: the settings of a run, its machine and package versions, and its results."""

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
    """Package versions and hardware, without user names or paths; device: the one that was used."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    used = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(used) if used.type == "cuda" else platform.machine()
    return {
        "farspan": __version__,
        "python": platform.python_version(),
        "device": name,
        "packages": versions,
    }


def format_number(value: float) -> str:
    """A number for tables: 0.92, 22.10, 284.3, 1,284; very large or small: 3.4e+32, 0.0042.

    Two decimals below 100, one below 1,000, none from there on; integers in full.
    """
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e6:  # the end of a confidence interval of few windows
        return f"{value:.1e}"
    if 0 < abs(value) < 0.005:  # 0.00 would read as zero
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def write_record(
    path: Path,
    command: str,
    settings: dict[str, Any],
    results: dict[str, Any],
    arguments: Sequence[str] | None = None,
) -> None:
    """Write record.json: the settings that reproduce a run, and its results.

    arguments: those of the command line; default: sys.argv.
    """
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
