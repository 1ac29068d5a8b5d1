"""farspan: a toolkit for long context.

Public names are imported on first use, so that `import farspan` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan import lab, report
    from farspan.attention.patch import Patch
    from farspan.errors import FarspanError
    from farspan.loading import load
    from farspan.workflows.check import check
    from farspan.workflows.compare import compare
    from farspan.workflows.diagnose import diagnose
    from farspan.workflows.evaluate import evaluate
    from farspan.workflows.export import export
    from farspan.workflows.extend import extend
    from farspan.workflows.generate import generate
    from farspan.workflows.inspect import inspect
    from farspan.workflows.pretrain import pretrain
    from farspan.workflows.reproduce import reproduce

__version__ = "0.2.0"
__all__ = [
    "FarspanError",
    "Patch",
    "check",
    "compare",
    "diagnose",
    "evaluate",
    "export",
    "extend",
    "generate",
    "inspect",
    "lab",
    "load",
    "pretrain",
    "report",
    "reproduce",
]

_MODULES = {
    "FarspanError": "farspan.errors",
    "Patch": "farspan.attention.patch",
    "check": "farspan.workflows.check",
    "compare": "farspan.workflows.compare",
    "diagnose": "farspan.workflows.diagnose",
    "evaluate": "farspan.workflows.evaluate",
    "export": "farspan.workflows.export",
    "extend": "farspan.workflows.extend",
    "generate": "farspan.workflows.generate",
    "inspect": "farspan.workflows.inspect",
    "load": "farspan.loading",
    "pretrain": "farspan.workflows.pretrain",
    "reproduce": "farspan.workflows.reproduce",
}
_CALLABLE_PACKAGES = ("lab", "report")  # packages that are commands too


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return import_module(f"farspan.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'farspan' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
