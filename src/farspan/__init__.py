"""farspan: longer context for causal language models by the sharpness of their attention.

What is public is imported when first used, so that `import farspan` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan.attention.patch import Patch
    from farspan.errors import FarspanError
    from farspan.loading import load
    from farspan.workflows.diagnosing import diagnose
    from farspan.workflows.evaluating import evaluate
    from farspan.workflows.exporting import export
    from farspan.workflows.extending import extend
    from farspan.workflows.generating import generate
    from farspan.workflows.inspection import inspect

__version__ = "0.1.0"
__all__ = ["FarspanError", "Patch", "diagnose", "evaluate", "export", "extend", "generate", "inspect", "load"]

_HOMES = {
    "FarspanError": "farspan.errors",
    "Patch": "farspan.attention.patch",
    "diagnose": "farspan.workflows.diagnosing",
    "evaluate": "farspan.workflows.evaluating",
    "export": "farspan.workflows.exporting",
    "extend": "farspan.workflows.extending",
    "generate": "farspan.workflows.generating",
    "inspect": "farspan.workflows.inspection",
    "load": "farspan.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'farspan' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
