"""Errors that a user can fix, each with the exit code of the command.

A message is one sentence: the cause, the value and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class FarspanError(Exception):
    """Invalid usage or input. The CLI prints the message without a traceback and exits with 2.

    >>> try:
    ...     farspan.load("nope-twn")
    ... except farspan.FarspanError as error:
    ...     print(str(error).partition("; ")[2])
    did you mean the bundled model nope-twin?
    """

    exit_code = 2


class WrongBaseError(FarspanError):
    """The model's weights are not the ones that the patch was fitted on."""


class IncompatiblePatchError(FarspanError):
    """A patch does not fit the model that it was fitted on, so the patch itself is wrong."""


class ProofError(FarspanError):
    """A check of a result failed: a fold that changes logits, or a gate that was missed."""

    exit_code = 3


class CorruptError(FarspanError):
    """A file is damaged or is not what it claims to be."""

    exit_code = 4


class PreemptedError(FarspanError):
    """The run received a signal to stop and saved its state; the same command resumes it."""

    exit_code = 75


class UnavailableError(FarspanError):
    """A server does not answer; what it answered before is kept, and the same command resumes."""

    exit_code = 75


def option_name(setting: str) -> str:
    """The CLI option of a setting.

    >>> option_name("batch_size")
    '--batch-size'
    """
    return "--" + setting.replace("_", "-")


def install_hint(extra: str) -> str:
    """The command that installs an extra; farspan itself is installed from a clone."""
    return f"run pip install '.[{extra}]' in the clone of farspan"


def first_line(error: BaseException) -> str:
    """The first line of a library's error message."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def at_least_one(values: Any, what: str) -> list[Any]:
    """One name, path or model, or several of them, as a list; `what`: one of its values.

    >>> at_least_one("results", "a folder")
    ['results']
    """
    values = [values] if isinstance(values, str | Path) else list(values)
    if not values:
        raise FarspanError(f"the list is empty; give at least {what}")
    return values


def suggest(name: str, known: Iterable[str]) -> str:
    """The way out for an unknown name: the closest known one, or all of them.

    >>> suggest("headscal", ["uniform", "headscale"])
    'did you mean headscale?'
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
