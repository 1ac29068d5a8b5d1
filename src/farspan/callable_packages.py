"""Packages that are commands too: `farspan.report(folders)` beside `farspan.report.figures`."""

from __future__ import annotations

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
        module, function = COMMANDS[self.__name__]
        return getattr(import_module(module), function)(*args, **options)


def make_callable(name: str) -> None:
    sys.modules[name].__class__ = CallablePackage
