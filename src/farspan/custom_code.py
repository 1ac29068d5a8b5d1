"""Python code that a recipe or a model folder names as `file.py:name` or `module:name`.

`import_code` is the only place that runs it, and only with trust_remote_code. What it has imported
stays as it was, even if the file changes: `imported` returns it to functions deep below, and
`source_hash` and `source_code` are of the code that runs.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from farspan.errors import FarspanError, first_line

_FORM = "write file.py:name, or module:name of an installed package"


@dataclass(frozen=True, eq=False)
class _Code:
    module: ModuleType
    source: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()


_imported: dict[str, _Code] = {}  # by path, or by the name of a module


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


def import_code(reference: str, key: str, *, trust_remote_code: bool) -> Any:
    """Run the code of a reference if it is trusted, again if its file has changed."""
    if not trust_remote_code:
        raise _untrusted(reference, key)
    source, _ = _split(reference, key)
    if source.endswith(".py"):
        content = _read(Path(source), key)
        if source not in _imported or _imported[source].source != content:
            _imported[source] = _Code(_run(source, content, reference, key), content)
    elif source not in _imported:
        module = _run(source, None, reference, key)
        file = getattr(module, "__file__", None)
        _imported[source] = _Code(module, _read(Path(file), key) if file else b"")
    return imported(reference, key)


def imported(reference: str, key: str) -> Any:
    """What a reference names, of imported code."""
    module, name = _code(reference, key).module, _split(reference, key)[1]
    if not hasattr(module, name):
        raise FarspanError(f"{key} is {reference!r}, but its file defines no {name}; correct it")
    return getattr(module, name)


def source_hash(reference: str, key: str) -> str:
    """The SHA-256 of imported code."""
    return _code(reference, key).sha256


def source_code(reference: str, key: str) -> bytes:
    """The file of imported code, as it was when it was imported."""
    return _code(reference, key).source


def _code(reference: str, key: str) -> _Code:
    source, _ = _split(reference, key)
    if source not in _imported:
        raise _untrusted(reference, key)
    return _imported[source]


def _untrusted(reference: str, key: str) -> FarspanError:
    return FarspanError(
        f"{key} runs Python code ({reference}); if you trust it, add --trust-remote-code"
    )


def _split(reference: str, key: str) -> tuple[str, str]:
    source, _, name = reference.rpartition(":")
    valid_source = source.endswith(".py") or re.fullmatch(r"\w+(\.\w+)*", source)
    if not valid_source or not name.isidentifier():
        raise FarspanError(f"{key} is {reference!r}, which names no Python code; {_FORM}")
    return source, name


def _read(file: Path, key: str) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise FarspanError(
            f"{key} names {file}, which cannot be read ({reason}); correct the path"
        ) from None
    if not content.strip():
        raise FarspanError(f"{key} names {file}, which is empty; write the code there")
    return content


def _run(source: str, content: bytes | None, reference: str, key: str) -> ModuleType:
    """Import a module, or a file with this content."""
    try:
        if content is None:
            return importlib.import_module(source)
        # Another content is another module: instances of the earlier classes stay valid.
        name = f"farspan_custom_{hashlib.sha256(source.encode() + content).hexdigest()[:16]}"
        module = ModuleType(name)
        module.__file__ = source
        sys.modules[name] = module  # pickle and dataclasses look classes up there
        exec(compile(content, source, "exec"), module.__dict__)
        return module
    except (Exception, SystemExit) as error:  # whatever the code raises
        raise FarspanError(
            f"{key} is {reference!r}, which cannot be imported ({type(error).__name__}: "
            f"{first_line(error)}); fix the code"
        ) from error
