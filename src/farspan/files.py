"""Reading and writing files: atomic writes, checked reads, no pickles.

A folder on disk is untrusted: its JSON may be broken, its weights truncated, its shard index may
point outside it. Everything that reads a checkpoint or a patch uses these functions, so the checks
are in one place.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from farspan.errors import CorruptError, FarspanError, first_line

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst", ".zip")
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MANIFEST = "manifest.json"
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
UNREAD = (".md", ".png", ".svg", ".pdf")  # files of a model that no program reads
UMASK = os.umask(0o077)  # the umask can only be read by setting it
os.umask(UMASK)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RUST_ERROR = re.compile(r"\(os error (\d{1,3})\)")


def system_error(error: BaseException) -> OSError | None:
    """The error of the operating system behind an exception, such as a full disk.

    safetensors and tokenizers raise classes of their own, with its number in the message.

    >>> system_error(Exception("No space left on device (os error 28)"))
    OSError(28, 'No space left on device')
    """
    if isinstance(error, OSError):
        return error
    number = None if isinstance(error, FarspanError) else RUST_ERROR.search(str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def describe_system_error(error: OSError) -> str:
    """An error of the operating system as one sentence."""
    if error.errno in DISK_FULL:
        subject = error.filename or "a file or the output"
        return f"{subject} cannot be written ({error.strerror}); free some space on its disk"
    cause = f"{error.filename} cannot be used ({error.strerror})" if error.filename else str(error)
    return f"{cause}; check the path, or choose another one"


@contextmanager
def naming(path: Path, staging: Path | None = None) -> Iterator[None]:
    """In the block, an error of the operating system names this path instead of none.

    staging: the temporary name of the path, which means nothing to a user.
    """
    try:
        yield
    except Exception as error:
        cause = system_error(error)
        if cause is None or cause.errno is None:
            raise
        if cause.filename and not (staging and str(cause.filename).startswith(str(staging))):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; not of a device or a pipe, which may never end."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise CorruptError(f"{path} cannot be read (it is {kind}); download or export it again")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FarspanError(
            f"{path} does not exist; choose a folder that contains {path.name}"
        ) from None
    except (IsADirectoryError, NotADirectoryError) as error:
        raise CorruptError(
            f"{path} cannot be read ({type(error).__name__}); download or export it again"
        ) from None
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"{path} is not UTF-8 text (byte {error.start}); download or export the file again"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; the error for a broken file says where it breaks."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CorruptError(
            f"{path} is not valid JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, "
            f"column {error.colno}; download or export the file again"
        ) from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise CorruptError(
            f"{path} cannot be read ({first_line(error)}); download or export it again"
        ) from None
    if not isinstance(value, dict):
        raise CorruptError(
            f"{path} holds a JSON {type(value).__name__} where an object is needed; export it again"
        )
    return value


def check_links(folder: Path) -> None:
    """Refuse a model with a pipe, a device, or a link to another folder among its text files.

    What these hold is shown, and written with an export: a file of the user's own must not be.
    Weights may be links, and every file may be one into the hub's cache.
    """
    root = Path(os.path.realpath(folder))
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for entry in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        if entry.suffix in WEIGHT_SUFFIXES or entry.is_dir():
            continue
        target = Path(os.path.realpath(entry))
        if not target.is_file():
            raise CorruptError(
                f"{entry} cannot be read (it is no regular file); download or export it again"
            )
        if not any(target.is_relative_to(path) for path in allowed):
            raise CorruptError(
                f"{entry} is a link that leads out of its folder; if you trust it, put a copy of "
                "the file there"
            )


def check_safetensors(path: Path) -> None:
    """Refuse a truncated or damaged safetensors file before anything maps it into memory."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise _incomplete(path, "it is a folder")
    size = path.stat().st_size
    with path.open("rb") as file:
        expected = _expected_size(path, file, size)
    if size != expected:
        raise _incomplete(path, f"it should have {expected} bytes and has {size}")
    try:
        with safe_open(path, "numpy"):  # the library checks types, shapes and overlaps
            pass
    except SafetensorError as error:
        raise _incomplete(path, str(error)) from None


def _expected_size(path: Path, file: BinaryIO, size: int) -> int:
    """The size in bytes that the header of a safetensors file implies."""
    head = file.read(8)
    if len(head) < 8:
        raise _incomplete(path, f"it has {size} bytes")
    (length,) = struct.unpack("<Q", head)
    if length > min(size - 8, MAX_HEADER):
        raise _incomplete(path, f"its header claims {length} bytes and the file has {size}")
    try:
        header = json.loads(file.read(length))
        end = max(
            (entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"),
            default=0,
        )
        if not isinstance(end, int):
            raise TypeError
        return 8 + length + end
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise _incomplete(path, "its header cannot be read") from None


def _incomplete(path: Path, reason: str) -> CorruptError:
    return CorruptError(
        f"{path} is not a complete safetensors file: {reason}; download or export it again"
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, all checked; empty if it has no weights."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = _shards(folder, index) if index.exists() else []
    if single.exists():  # beside an index too: transformers would open it first
        files.append(single)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles and not files:
        raise FarspanError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code and "
            "which farspan never opens; convert it to safetensors with save_pretrained on a "
            "machine where you trust it"
        )
    for file in files:
        check_safetensors(file)
    return files


def _shards(folder: Path, index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CorruptError(f"{index} has no weight_map; download or export the checkpoint again")
    files = [_shard_path(folder, name, index) for name in sorted(set(map(str, names.values())))]
    for file in files:
        if not file.exists():
            raise CorruptError(
                f"{file} is listed in {index.name} but missing; download the checkpoint again"
            )
    return files


def _shard_path(folder: Path, name: str, index: Path) -> Path:
    if Path(name).is_absolute() or len(Path(name).parts) != 1 or name in ("", ".", ".."):
        raise CorruptError(
            f"{index} points outside its folder ({name!r}); do not trust this checkpoint"
        )
    if not name.endswith(".safetensors"):
        raise CorruptError(
            f"{index} names {name!r}, which is no safetensors file and is not opened; convert the "
            "checkpoint with save_pretrained on a machine where you trust it"
        )
    return folder / name


def read_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, on the CPU, after its checks."""
    from safetensors.torch import load_file

    check_safetensors(path)
    return load_file(path)


def file_name(path: str | Path) -> str:
    """The last part of a path; of "." that of the current folder."""
    return Path(os.path.abspath(path)).name


def check_unpacked(path: Path) -> None:
    """Refuse an archive where a file or folder is expected."""
    if path.is_file() and path.name.endswith(ARCHIVES):
        raise FarspanError(f"{path} is an archive; unpack it and name the file or folder inside")


def check_absent(path: Path) -> None:
    """Refuse an output path that is taken or not writable; call it before long work."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FarspanError(
            f"{path} already exists and is not empty; choose another name, or remove it first"
        )
    check_can_create(path)


def check_can_create(path: Path) -> None:
    """Refuse an output path whose folder is not writable, or no folder."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise FarspanError(
            f"{path} cannot be written because {parent} is not a writable folder; choose another"
        )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Create a folder atomically: complete under its name, or not at all. Never replaces another.

    The block fills a temporary folder beside it, which is renamed when the block ends normally.
    """
    path = Path(path)
    check_absent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        staging, handle = _staging(path, _staging_folder)
    try:
        with naming(path, staging):
            yield staging
            for entry in (staging, *staging.rglob("*")):
                _apply_umask(entry)
                if entry.is_file():
                    _flush(entry)
            os.rename(staging, path)  # replaces an empty folder at most
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def _staging_folder(path: Path) -> tuple[Path, int]:
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    return staging, os.open(staging, os.O_RDONLY)


def _staging_file(path: Path) -> tuple[Path, int]:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    return Path(name), handle


def _staging(path: Path, create: Callable[[Path], tuple[Path, int]]) -> tuple[Path, int]:
    """A temporary file or folder beside `path`; those of killed processes are removed first."""
    remove_abandoned(path.parent, re.escape(f".{path.name}.") + r"[a-z0-9_]{8}")
    return create_locked(lambda: create(path))


def create_locked(create: Callable[[], tuple[Path, int]]) -> tuple[Path, int]:
    """A new file or folder that is open, and locked until it is closed or the process ends."""
    while True:
        path, handle = create()
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return path, handle
        os.close(handle)  # another process removed it before it was locked


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove the entries of a folder whose names match, and that no process locks."""
    temporary = re.compile(pattern)
    for entry in os.scandir(folder):
        if not temporary.fullmatch(entry.name) or entry.is_symlink():
            continue
        with suppress(OSError):
            handle = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if entry.is_dir():
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
            finally:
                os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        staging, handle = _staging(path, _staging_file)
    try:
        with naming(path, staging), os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            _apply_umask(staging)
            os.replace(staging, path)
    except BaseException:
        with suppress(OSError):  # report the first error, not this one
            os.unlink(staging)
        raise


def _apply_umask(path: Path) -> None:
    """Set the permissions of the user's umask: tempfile and safetensors write owner-only files."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~UMASK)


def write_text(path: Path, text: str) -> None:
    # A path that is not UTF-8 has half characters, which JSON reads back from their escapes.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_manifest(folder: Path) -> None:
    """Write manifest.json: the SHA-256 of every file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    write_json(
        folder / MANIFEST,
        {"sha256": {str(file.relative_to(folder)): sha256_of(file) for file in files}},
    )


def check_manifest(folder: Path) -> None:
    """Refuse a folder whose files differ from its manifest."""
    checksums = read_json(folder / MANIFEST).get("sha256")
    if not isinstance(checksums, dict):
        raise CorruptError(
            f"{folder / MANIFEST} lists no files; remove {folder}, which is incomplete"
        )
    check_checksums(folder, checksums, MANIFEST, f"remove {folder}, which is damaged")


def check_listed_files(folder: Path) -> None:
    """Refuse a model whose files differ from its manifest, if it has one of farspan's.

    Cards and figures may change: nothing reads them.
    """
    if not (folder / MANIFEST).is_file():
        return
    checksums = read_json(folder / MANIFEST).get("sha256")
    if isinstance(checksums, dict):
        read = {name: checksums[name] for name in checksums if not name.endswith(UNREAD)}
        way_out = "copy or download it again; if you changed it yourself, remove manifest.json"
        check_checksums(folder, read, MANIFEST, way_out)


def check_checksums(
    folder: Path, checksums: Mapping[str, Any], list_name: str, way_out: str
) -> None:
    """Refuse files that are missing or have another SHA-256 than a list in the folder says."""
    for name, checksum in checksums.items():
        file = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CorruptError(
                f"{folder / list_name} points outside its folder ({name!r}); do not trust it"
            )
        if not file.is_file() or sha256_of(file) != checksum:
            raise CorruptError(f"{file} does not match {folder.name}/{list_name}; {way_out}")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
