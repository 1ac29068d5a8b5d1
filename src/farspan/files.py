"""Reading and writing that is atomic, checked and safe: nothing half-written, nothing unpickled.

A folder on disk is untrusted: its JSON may be broken, its weights cut short, its shard index may point
outside it. Everything that reads a checkpoint or a patch comes through here, so each is checked once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from farspan.errors import CorruptError, FarspanError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst", ".zip")
UMASK = os.umask(0o077)  # asked for once, for it cannot be asked for without being set
os.umask(UMASK)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a broken file is named with the place where it breaks."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FarspanError(f"{path} does not exist; give a folder that holds {path.name}") from None
    except (IsADirectoryError, NotADirectoryError, RecursionError) as error:  # other errors are not the file's
        raise CorruptError(f"{path} cannot be read ({type(error).__name__}); fetch or export it again") from None
    except UnicodeDecodeError as error:
        raise CorruptError(f"{path} is not UTF-8 text (byte {error.start}); fetch or export the file again") from None
    except json.JSONDecodeError as error:
        raise CorruptError(
            f"{path} is not valid JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}; "
            "fetch or export the file again"
        ) from None
    if not isinstance(value, dict):
        raise CorruptError(f"{path} holds a JSON {type(value).__name__} where an object is needed; export it again")
    return value


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file that was cut short or damaged, before anything maps it into memory."""
    from safetensors import SafetensorError, safe_open

    def corrupt(what: str) -> CorruptError:
        return CorruptError(f"{path} is not a whole safetensors file: {what}; fetch or export it again")

    if not path.is_file():
        raise corrupt("it is a folder")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise corrupt(f"it has {size} bytes")
        (length,) = struct.unpack("<Q", head)
        if length > size - 8:
            raise corrupt(f"its header claims {length} bytes and the file has {size}")
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise corrupt("its header cannot be read") from None
    if size != 8 + length + end:
        raise corrupt(f"it should have {8 + length + end} bytes and has {size}")
    try:
        with safe_open(path, "numpy"):  # the library's own checks: types, shapes, overlaps
            pass
    except SafetensorError as error:
        raise corrupt(str(error)) from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, every one checked; empty when it holds no weights."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = _shards(folder, index) if index.exists() else []
    if single.exists():  # beside an index too, for transformers would open it first
        files.append(single)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles and not files:
        raise FarspanError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), and a pickle can run any code, so farspan "
            "never opens one; convert it to safetensors with save_pretrained on a machine you trust it on"
        )
    for file in files:
        check_safetensors(file)
    return files


def _shards(folder: Path, index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CorruptError(f"{index} has no weight_map; fetch or export the checkpoint again")
    files = [_inside(folder, name, index) for name in sorted(set(map(str, names.values())))]
    for file in files:
        if not file.exists():
            raise CorruptError(f"{file} is named by {index.name} but missing; fetch the checkpoint again")
    return files


def _inside(folder: Path, name: str, index: Path) -> Path:
    if Path(name).is_absolute() or len(Path(name).parts) != 1 or name in ("", ".", ".."):
        raise CorruptError(f"{index} points outside its folder ({name!r}); do not trust this checkpoint")
    return folder / name


def read_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, on the CPU, checked first."""
    from safetensors.torch import load_file

    check_safetensors(path)
    return load_file(path)


def check_unpacked(path: Path) -> None:
    """Refuse an archive where a file or folder is read."""
    if path.is_file() and path.name.endswith(ARCHIVES):
        raise FarspanError(f"{path} is an archive; unpack it, and give the file or folder that is meant")


def check_free(path: Path) -> None:
    """Refuse a name that is taken, or cannot be; to be asked before long work whose result goes there."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FarspanError(f"{path} exists already and is not empty; choose another name, or remove it first")
    home = next(parent for parent in path.absolute().parents if parent.exists())
    if not home.is_dir() or not os.access(home, os.W_OK):
        raise FarspanError(f"{path} cannot be written, for {home} is no folder that you may write to; choose another")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under its name whole, or not at all, and never in the place of another.

    The block fills a temporary neighbour; only when it ends well is that neighbour given the name.
    """
    path = Path(path)
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield staging
        for inside in (staging, *staging.rglob("*")):  # libraries that write files make them their owner's alone
            _as_others(inside)
            if inside.is_file():
                _flush(inside)
        os.rename(staging, path)  # over an empty folder, or into nothing
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _as_others(Path(name))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what to tell
            os.unlink(name)
        raise


def _as_others(path: Path) -> None:
    """Let those read it who may read what the user writes elsewhere."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~UMASK)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
