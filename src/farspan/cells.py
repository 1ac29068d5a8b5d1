"""Work in cells: each cell is computed once, by one of any number of processes.

Processes and machines share a results folder without a server. A finished cell is one JSON file,
written atomically. A process claims a cell before it computes it. A claim is a hard link to a file
that names the process: exactly one process can create a given link, also on a shared file system.
The claims on a cell are numbered. When the process of the last claim has died, the process that
creates the next number owns the cell, so two processes cannot both take it over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from farspan.errors import CorruptError, FarspanError
from farspan.files import (
    check_can_create,
    create_locked,
    naming,
    read_json,
    remove_abandoned,
    write_json,
)
from farspan.progress import Say, ignore

HEARTBEAT = 10.0  # seconds between two heartbeats of a claim
STALE = 120.0  # seconds without a heartbeat after which a process on another machine counts as dead
CLAIM_NUMBER = re.compile(r"[0-9]{1,9}")
OWNER = r"\.[0-9a-f]{32}"  # the name of the file that claims are links to
WAIT = 0.2  # seconds to wait when other processes have claimed every missing cell

T = TypeVar("T")


def cell_key(description: Mapping[str, Any]) -> str:
    """The name of a cell: a SHA-256 of everything that its result depends on.

    >>> cell_key({"b": 1, "a": [2.5]}) == cell_key({"a": (2.5,), "b": 1})
    True
    """
    text = json.dumps(
        description, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_results_folder(folder: Path, command: str) -> None:
    """Refuse a folder that cannot take the results of a command, before the work starts.

    It may hold other files, belong to another command, or be read-only.
    """
    if not folder.exists():
        check_can_create(folder)
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "cells").is_dir()):
        raise FarspanError(f"{folder} exists and is not a results folder; choose another name")
    folders = (folder, folder / "cells", folder / "claims")
    if not all(os.access(path, os.W_OK) for path in folders if path.exists()):
        raise FarspanError(f"the results folder {folder} is not writable; choose another name")
    if (owner := _command_of(folder)) not in (None, command):
        raise FarspanError(
            f"{folder} holds the results of `farspan {owner}`; "
            f"choose another name for the results of {command}"
        )


def _command_of(folder: Path) -> str | None:
    """The command whose results a folder holds, if a file there names it."""
    if (folder / "record.json").is_file():
        with suppress(FarspanError):  # a broken record will be rewritten
            return read_json(folder / "record.json").get("command")
    return "reproduce" if (folder / "results.json").is_file() else None


class Cells:
    """A results folder: cells/KEY.json for a finished cell, claims/KEY.N for a claimed one."""

    def __init__(self, folder: Path, *, say: Say = ignore):
        self._results, self._claims = folder / "cells", folder / "claims"
        self._say = say
        for path in (self._results, self._claims):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                raise FarspanError(
                    f"{path} cannot be created ({reason}); choose a writable results folder"
                ) from None
        self._remove_obsolete_claims()

    def _remove_obsolete_claims(self) -> None:
        """Remove the claims on finished cells whose processes were killed before they could."""
        for claim in self._claims.glob("*.*"):
            finished = (self._results / f"{claim.stem}.json").exists()
            if finished and CLAIM_NUMBER.fullmatch(claim.suffix[1:]) and not self._is_live(claim):
                claim.unlink(missing_ok=True)

    def get(self, key: str) -> dict[str, Any] | None:
        """The result of a finished cell, or None.

        A corrupt file is renamed and reported, and the cell counts as missing.
        """
        file = self._results / f"{key}.json"
        if not file.exists():
            return None
        try:
            content = read_json(file)
            if cell_key(content["result"]) != content["sha256"]:
                raise CorruptError(f"{file} does not match its checksum")
            if content.get("key", key) != key:  # cells of earlier releases do not name theirs
                raise CorruptError(f"{file} holds the result of another cell")
        except (CorruptError, KeyError, TypeError, ValueError) as error:
            self._quarantine(file, error)
            return None
        except FarspanError:
            return None  # another process has just renamed it
        return content["result"]

    def _quarantine(self, file: Path, error: Exception) -> None:
        """Rename a corrupt file and report it."""
        broken = file.with_name(f"{file.stem}.{uuid.uuid4().hex[:8]}.broken")
        reason = f"{file} is incomplete"
        if isinstance(error, CorruptError):
            reason = str(error).partition(";")[0]
        with suppress(FileNotFoundError):  # another process was faster
            file.rename(broken)
            self._say(f"{reason}; it is set aside as {broken.name} and computed again")

    def put(self, key: str, description: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Store a finished cell atomically."""
        result = json.loads(json.dumps(result, allow_nan=False))  # as it will be read
        content = {
            "key": key,
            "description": description,
            "sha256": cell_key(result),
            "result": result,
        }
        write_json(self._results / f"{key}.json", content)

    @contextmanager
    def claimed(self, keys: Sequence[str]) -> Iterator[list[str]]:
        """Claim the cells that are not finished and that no live process has claimed.

        Yields their keys. The claims end with the block, whether its cells were finished or not.
        """
        free = [key for key in keys if self._next_claim(key) is not None]
        claims = self._claim_all(free) if free else {}
        with _heartbeat(list(claims.values()), min(HEARTBEAT, STALE / 4)):
            try:
                yield list(claims)
            finally:
                for key, claim in claims.items():
                    self._release(key, claim)

    def _claim_all(self, keys: list[str]) -> dict[str, Path]:
        """The claims that succeeded, by key: hard links to one file that names this process."""
        remove_abandoned(self._claims, OWNER)
        with naming(self._claims):
            owner, handle = create_locked(self._new_owner)
        claims: dict[str, Path | None] = {}
        try:
            with naming(owner), os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps({"host": _host(), "pid": os.getpid()}))
                file.flush()
                for key in keys:
                    claims[key] = self._claim(key, owner)
        except BaseException:
            for claim in filter(None, claims.values()):
                claim.unlink(missing_ok=True)
            raise
        finally:
            owner.unlink(missing_ok=True)
        return {key: claim for key, claim in claims.items() if claim is not None}

    def _new_owner(self) -> tuple[Path, int]:
        path = self._claims / f".{uuid.uuid4().hex}"
        return path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)

    def _claim(self, key: str, owner: Path) -> Path | None:
        claim = self._next_claim(key)
        if claim is None:
            return None
        try:
            os.link(owner, claim)
        except FileExistsError:
            return None  # another process was faster
        except OSError as error:
            raise FarspanError(
                f"the file system of {self._claims} does not support hard links "
                f"({error.strerror}), which processes need to share work; "
                "choose a results folder on another file system"
            ) from None
        # A claim is released after its result is written, so another process may have finished
        # the cell between the two checks.
        if self.get(key) is not None:
            self._release(key, claim)
            return None
        return claim

    def _next_claim(self, key: str) -> Path | None:
        """The claim file to create for a cell, or None while a live process has claimed it."""
        numbers = [claim.suffix[1:] for claim in self._claims.glob(f"{key}.*")]
        # Other files, such as an editor's copy KEY.0~, are no claims.
        last = max(
            (int(number) for number in numbers if CLAIM_NUMBER.fullmatch(number)), default=-1
        )
        if last >= 0 and self._is_live(self._claims / f"{key}.{last}"):
            return None
        return self._claims / f"{key}.{last + 1}"

    def _release(self, key: str, claim: Path) -> None:
        claim.unlink(missing_ok=True)
        if (self._results / f"{key}.json").exists():  # claims of dead processes are obsolete now
            for leftover in self._claims.glob(f"{key}.*"):
                leftover.unlink(missing_ok=True)

    def _is_live(self, claim: Path) -> bool:
        """Whether the process that made a claim still works on it.

        A process that is gone from this machine does not. For one on another machine, or one
        whose process id was reused, only the heartbeat counts.
        """
        owner: dict[str, Any] = {}  # if the claim cannot be read
        try:
            heartbeat = claim.stat().st_mtime
            with suppress(CorruptError, PermissionError):
                owner = read_json(claim)
        except (FileNotFoundError, FarspanError):
            return True  # it has just been released; the next pass checks again
        pid = owner.get("pid")
        if owner.get("host") == _host() and type(pid) is int and not _process_exists(pid):
            return False
        return self._now() - heartbeat < STALE

    def _now(self) -> float:
        """The time by the clock of the file system, which may be another machine's."""
        with tempfile.TemporaryFile(dir=self._claims) as probe:
            return os.fstat(probe.fileno()).st_mtime


def _host() -> str:
    """The scope of a process id: containers can share a host name but not process ids."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


@contextmanager
def _heartbeat(files: list[Path], interval: float) -> Iterator[None]:
    """Touch the files regularly while the block runs."""
    ended = threading.Event()

    def touch_files() -> None:
        while not ended.wait(interval):
            for file in files:
                with suppress(OSError):  # released, or a network error: the next one may succeed
                    os.utime(file)

    thread = threading.Thread(target=touch_files, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def repeat_until_done(run_pass: Callable[[], int]) -> None:
    """Call `run_pass` until it returns 0, the number of cells that are still missing.

    It sleeps only after a pass that finished nothing: then other processes have claimed every
    missing cell.
    """
    before = None
    while missing := run_pass():
        if missing == before:
            time.sleep(WAIT)
        before = missing


def compute_unclaimed(
    cells: Cells,
    todo: Mapping[str, T],
    work: Callable[[T], dict[str, Any]],
    *,
    describe: Callable[[T], Mapping[str, Any]] = lambda item: {},
    on_done: Callable[[str], None] = ignore,
) -> dict[str, dict[str, Any]]:
    """One pass: read the finished cells, compute those that nobody has claimed, skip the rest."""
    results: dict[str, dict[str, Any]] = {}
    for key, item in todo.items():
        result = cells.get(key)
        if result is None:
            with cells.claimed([key]) as claimed_keys:
                if claimed_keys:
                    cells.put(key, describe(item), work(item))
                    result = cells.get(key)
        if result is not None:
            results[key] = result
            on_done(key)
    return results


def finish(
    cells: Cells,
    todo: Mapping[str, T],
    work: Callable[[T], dict[str, Any]],
    *,
    describe: Callable[[T], Mapping[str, Any]] = lambda item: {},
    on_done: Callable[[str], None] = ignore,
) -> dict[str, dict[str, Any]]:
    """The results of all cells, in the order of `todo`.

    Finished cells are read. Missing cells are computed by this process, unless another process
    has claimed them: then this one waits for the result. `on_done` gets the key of every cell
    when it is read or finished.

    >>> todo = {cell_key({"x": x}): x for x in range(9)}
    >>> finish(Cells(folder), todo, lambda x: {"square": x * x})
    """
    results: dict[str, dict[str, Any]] = {}

    def run_pass() -> int:
        missing = {key: item for key, item in todo.items() if key not in results}
        results.update(compute_unclaimed(cells, missing, work, describe=describe, on_done=on_done))
        return len(todo) - len(results)

    repeat_until_done(run_pass)
    return {key: results[key] for key in todo}
