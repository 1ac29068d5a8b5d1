"""The file operations of a command, counted by an audit hook, so that any of them can be disturbed.

The hook sees what Python opens, renames, creates and removes, in libraries too. It cannot be
removed, so it belongs into a forked process. What it raises is raised by the operation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

CHANGES = {
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.utime",
    "shutil.rmtree",
    "tempfile.mkdtemp",
    "tempfile.mkstemp",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def is_inside(path: object, folder: Path) -> bool:
    """Whether a path of an event is in the folder of a case, which is the current one."""
    if isinstance(path, int) or path is None:
        return False
    text = os.fsdecode(path)
    return not text.startswith("/") or text.startswith(f"{folder}/")


def watch(folder: Path, on_event: Callable[[int, str, str], None], reads: bool = False) -> None:
    """Call on_event(number, event, path) before every change to a file in the folder.

    reads: before every opening to read, instead.
    """
    number = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal number
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & WRITING) if mode is None else bool(set("wax+") & set(mode))
            if writes == reads or not is_inside(path, folder):
                return
        elif reads or event not in CHANGES or not is_inside(arguments[0], folder):
            return
        number += 1
        on_event(number, event, os.fsdecode(arguments[0]))

    sys.addaudithook(hook)
