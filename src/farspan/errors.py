"""What can go wrong through no fault of the program, each with the exit code it ends in.

A message is one sentence that a user can act on: the cause, the value and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FarspanError(Exception):
    """The user can mend this. The command line prints the message, without a traceback, and exits 2."""

    exit_code = 2


class ProofError(FarspanError):
    """A result did not hold when it was checked: a fold that changes logits, a gate that was missed."""

    exit_code = 3


class CorruptError(FarspanError):
    """A file is damaged or is not what it claims to be."""

    exit_code = 4


class PreemptedError(FarspanError):
    """The run was asked to stop and saved itself; the same command goes on from there."""

    exit_code = 75


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def nearest(name: str, known: Iterable[str]) -> str:
    """The way out for a name that is unknown.

    >>> nearest("headscal", ["uniform", "headscale"])
    'the nearest is headscale'
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"the nearest is {near[0]}" if near else f"choose one of {', '.join(known)}"
