"""The bundled models, by name."""

from __future__ import annotations

import re
from pathlib import Path

BUNDLED_MODELS = Path(__file__).parent / "assets" / "models"


def is_bundled(name: str) -> bool:
    """Whether this is the name of a bundled model."""
    return re.fullmatch(r"[a-z]+-twin", name) is not None and (BUNDLED_MODELS / name).is_dir()


def resolve_bundled(model: str | Path) -> str | Path:
    """The folder of a bundled model; any other model unchanged. A local folder takes precedence.

    >>> resolve_bundled("nope-twin").name
    'nope-twin'
    """
    if is_bundled(str(model)) and not Path(model).exists():
        return BUNDLED_MODELS / str(model)
    return model


def bundled_name(path: str) -> str:
    """The name of a bundled model whose folder this is; any other path unchanged.

    >>> bundled_name(str(resolve_bundled("nope-twin")))
    'nope-twin'
    """
    return Path(path).name if Path(path).parent == BUNDLED_MODELS else path
