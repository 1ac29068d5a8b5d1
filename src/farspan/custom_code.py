"""Python code that a recipe or a model folder names as `file.py:name` or `module:name`.

Nothing is imported until one call allows it with trust_remote_code. What was imported then stays
available to the process, so that functions deep below need no permission of their own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from farspan.errors import FarspanError, first_line

_FORM = "write file.py:name, or module:name of an installed package"
_imported: dict[str, tuple[ModuleType, str]] = {}  # by module name, with the hash of the source


def resolve_reference(reference: str, folder: Path, key: str) -> str:
    """The reference with an absolute path; modules stay as they are. `key` names it in messages."""
    source, name = _split(reference, key)
    if not source.endswith(".py"):
        return reference
    return f"{resolve_inside(source, folder, key)}:{name}"


def resolve_inside(path: str, folder: Path, key: str) -> Path:
    """A relative path inside a folder, or an absolute path, which must exist."""
    full = (folder / path).resolve()
    if not Path(path).is_absolute() and not full.is_relative_to(folder.resolve()):
        raise FarspanError(
            f"{key} is {path!r}, which leads out of {folder}; keep the file in that folder, or "
            "write its absolute path"
        )
    if not full.exists():
        raise FarspanError(f"{key} is {path!r}, and {full} does not exist; correct the path")
    return full


def import_attribute(reference: str, key: str, *, trust_remote_code: bool = False) -> Any:
    """What a reference names. Its module is imported once, and again when its file has changed."""
    module, name = _import(reference, key, trust_remote_code)[0], _split(reference, key)[1]
    if not hasattr(module, name):
        raise FarspanError(f"{key} is {reference!r}, but its file defines no {name}; correct it")
    return getattr(module, name)


def source_hash(reference: str, key: str) -> str:
    """The SHA-256 of the file of an imported reference."""
    return _import(reference, key, trust_remote_code=False)[1]


def _split(reference: str, key: str) -> tuple[str, str]:
    source, _, name = reference.rpartition(":")
    valid_source = source.endswith(".py") or re.fullmatch(r"\w+(\.\w+)*", source)
    if not valid_source or not name.isidentifier():
        raise FarspanError(f"{key} is {reference!r}, which names no Python code; {_FORM}")
    return source, name


def _import(reference: str, key: str, trust_remote_code: bool) -> tuple[ModuleType, str]:
    source, _ = _split(reference, key)
    content = b""
    name = source
    if source.endswith(".py"):
        content = _read(Path(source), key)
        # The name includes the content: a file that has changed is another module.
        name = f"_farspan_custom_{hashlib.sha256(source.encode() + content).hexdigest()[:16]}"
    if name in _imported:
        return _imported[name]
    if not trust_remote_code:
        raise FarspanError(
            f"{key} runs Python code ({reference}); if you trust it, add --trust-remote-code"
        )
    try:
        module = _run_file(name, source) if content else importlib.import_module(source)
    except Exception as error:  # whatever the code raises
        sys.modules.pop(name, None) if content else None
        raise FarspanError(
            f"{key} is {reference!r}, which cannot be imported ({type(error).__name__}: "
            f"{first_line(error)}); fix the code"
        ) from error
    if not content and getattr(module, "__file__", None):
        content = _read(Path(str(module.__file__)), key)
    _imported[name] = module, hashlib.sha256(content).hexdigest()
    return _imported[name]


def _read(file: Path, key: str) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise FarspanError(f"{key} names {file}, which cannot be read ({reason})") from None
    if not content:
        raise FarspanError(f"{key} names {file}, which is empty; write the code there")
    return content


def _run_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch look classes up by the name of their module
    spec.loader.exec_module(module)
    return module
