"""Packages that are commands too: `farspan.report(folders)` beside `farspan.report.figures`."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

COMMANDS = {
    "farspan.lab": ("farspan.workflows.lab", "run"),
    "farspan.report": ("farspan.workflows.report", "report"),
}


class CallablePackage(ModuleType):
    """A package whose call is the Python function of the command of the same name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _function(self)(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function(self))


def _package_doc(package: ModuleType) -> str:
    """The text of `help`: about the package, and about its function."""
    function = _function(package)
    call = f"{package.__name__}{inspect.signature(function)}"
    return f"{vars(package)['__doc__']}\n\n{call}\n\n{inspect.getdoc(function)}"


CallablePackage.__doc__ = property(_package_doc)  # type: ignore[assignment]


def _function(package: ModuleType) -> Any:
    module, name = COMMANDS[package.__name__]
    return getattr(import_module(module), name)


def make_callable(name: str) -> None:
    sys.modules[name].__class__ = CallablePackage
