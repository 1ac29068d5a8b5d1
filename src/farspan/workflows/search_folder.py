"""The folder of an unfinished search, beside the patch that it is for: `.NAME.search`.

Its claim says which extension the checkpoints belong to. One process writes there at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farspan.errors import FarspanError
from farspan.files import check_absent, write_bytes
from farspan.train.loop import LOCK, lock_run
from farspan.train.sharding import processes

CLAIM = "claim.toml"


def search_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.search")


def check_output(out: Path) -> None:
    """Refuse an output that is there already; remove what the kill of its process left."""
    folder = search_path(out)
    if out.exists() and folder.is_dir() and not (folder / CLAIM).exists():
        with suppress(FarspanError), lock_run(folder):  # refused while its process lives
            _remove(folder)
            shutil.rmtree(folder, ignore_errors=True)
    check_absent(out)


@contextmanager
def search_folder(folder: Path, claim: str) -> Iterator[None]:
    """Resume an interrupted search of the same extension, refuse another one's, clean up.

    claim: everything that the result depends on. A search that finished, or that failed before its
    first checkpoint, leaves nothing behind.
    """
    file, is_main = folder / CLAIM, processes().is_main_process
    with lock_run(folder):
        stored = file.read_bytes() if file.exists() else None
        if stored not in (None, claim.encode()) and _checkpoints(folder):
            raise FarspanError(
                f"{folder} holds the unfinished search of another extension; finish that one, or "
                "remove the folder"
            )
        if is_main:
            if stored != claim.encode():
                _remove(folder)
            write_bytes(file, claim.encode())
        try:
            yield
        except BaseException:
            if is_main and not _checkpoints(folder):
                _remove(folder)
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if is_main:
            with suppress(OSError):  # the patch is written; the next command removes the rest
                _remove(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob("*/checkpoints/step-*"))


def _remove(folder: Path) -> None:
    """Remove the files of a search except its lock.

    The claim goes first: what a kill leaves is then nobody's, and the next search removes it.
    """
    (folder / CLAIM).unlink(missing_ok=True)
    for leftover in [path for path in folder.iterdir() if path.name != LOCK]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
