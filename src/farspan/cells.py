"""Work in cells: each is computed once, whoever computes it, and never again.

A results folder is shared by any number of processes and machines, without a server. A finished cell is one JSON file,
written whole. Who works on a cell has claimed it: the claim is a hard link to a file that tells who that is, and a link
is made by one process alone, on every file system that machines share. Claims on a cell are numbered. When the last
one is of a process that died, whoever makes the next number owns the cell: two that take it over cannot both succeed.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from farspan.errors import CorruptError, FarspanError
from farspan.files import read_json, write_json

BEAT = 10.0  # seconds between two signs of life
STALE = 120.0  # seconds without one, after which a process on another machine counts as dead
WAIT = 0.2  # seconds between two looks at what others are computing

T = TypeVar("T")


def key_of(description: Mapping[str, Any]) -> str:
    """The name of a cell: a SHA-256 of all that its result depends on.

    >>> key_of({"b": 1, "a": [2.5]}) == key_of({"a": (2.5,), "b": 1})
    True
    """
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_folder(folder: Path, command: str) -> None:
    """Refuse what is no results folder, another command's, and one that cannot be written to, before work whose results
    go there."""
    if folder.exists() and not (folder.is_dir() and ((folder / "cells").is_dir() or not any(folder.iterdir()))):
        raise FarspanError(f"{folder} exists already and is no results folder; choose another name")
    homes = (folder, folder / "cells", folder / "claims")
    if not all(os.access(home, os.W_OK) for home in homes if home.exists()):
        raise FarspanError(f"{folder} is a results folder that you may not write to; choose another name")
    if (owner := _owner(folder)) not in (None, command):
        raise FarspanError(
            f"{folder} holds the results of `farspan {owner}`; choose another name for those of {command}"
        )


def _owner(folder: Path) -> str | None:
    """The command whose results a folder holds, where it says so."""
    if (folder / "record.json").is_file():
        with suppress(FarspanError):  # a broken one will be written anew
            return read_json(folder / "record.json").get("command")
    return "reproduce" if (folder / "results.json").is_file() else None


class Cells:
    """A results folder: cells/KEY.json for each finished cell, claims/KEY.N while one is worked on."""

    def __init__(self, folder: Path, *, say: Callable[[str], None] = lambda text: None, stale: float = STALE):
        self._results, self._claims, self._say, self._stale = folder / "cells", folder / "claims", say, stale
        for home in (self._results, self._claims):
            try:
                home.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = error.strerror or type(error).__name__
                raise FarspanError(f"{home} cannot be made ({why}); choose a results folder to write to") from None

    def get(self, key: str) -> dict[str, Any] | None:
        """The result of a finished cell. A broken file is set aside, said, and counts as not there."""
        file = self._results / f"{key}.json"
        if not file.exists():
            return None
        try:
            found = read_json(file)
            if key_of(found["result"]) != found["sha256"]:
                raise CorruptError(f"{file} is not what was written")
        except (CorruptError, KeyError, TypeError, ValueError) as error:
            aside = file.with_name(f"{key}.{uuid.uuid4().hex[:8]}.broken")
            with suppress(FileNotFoundError):  # another process was quicker
                file.rename(aside)
                why = str(error).partition(";")[0] if isinstance(error, CorruptError) else f"{file} has no whole result"
                self._say(f"{why}; it is set aside as {aside.name} and computed again")
            return None
        except FarspanError:
            return None  # another process has just set it aside
        return found["result"]

    def put(self, key: str, description: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Store a finished cell, whole or not at all."""
        result = json.loads(json.dumps(result, allow_nan=False))  # as it will be read
        content = {"description": description, "sha256": key_of(result), "result": result}
        write_json(self._results / f"{key}.json", content)

    @contextmanager
    def claimed(self, keys: Sequence[str]) -> Iterator[list[str]]:
        """Those of the cells that nobody has finished and no live process has claimed: now they are this process's.

        The claims end with the block, whether its cells were finished or not.
        """
        free = [key for key in keys if self._vacancy(key) is not None]
        mine = self._claim_all(free) if free else {}
        with _touched(list(mine.values()), min(BEAT, self._stale / 4)):
            try:
                yield list(mine)
            finally:
                for key, claim in mine.items():
                    self._release(key, claim)

    def _claim_all(self, keys: list[str]) -> dict[str, Path]:
        """The claims that could be made, by key: links to one file that tells who we are."""
        sign = self._claims / f".{uuid.uuid4().hex}"
        write_json(sign, {"host": _host(), "pid": os.getpid()})
        try:
            claims = {key: self._claim(key, sign) for key in keys}
        finally:
            sign.unlink()
        return {key: claim for key, claim in claims.items() if claim is not None}

    def _claim(self, key: str, sign: Path) -> Path | None:
        claim = self._vacancy(key)
        if claim is None:
            return None
        try:
            os.link(sign, claim)
        except FileExistsError:
            return None  # another process was quicker
        except OSError as error:
            raise FarspanError(
                f"{self._claims} is on a file system that makes no hard links ({error.strerror}), by which processes "
                "share work; choose a results folder elsewhere"
            ) from None
        if self.get(key) is not None:  # finished since we looked: a claim ends after its result is there
            self._release(key, claim)
            return None
        return claim

    def _vacancy(self, key: str) -> Path | None:
        """The claim to be made on a cell: one more than the last, if that one's process is dead; None if it lives."""
        last = max((int(claim.suffix[1:]) for claim in self._claims.glob(f"{key}.*")), default=-1)
        if last >= 0 and self._lives(self._claims / f"{key}.{last}"):
            return None
        return self._claims / f"{key}.{last + 1}"

    def _release(self, key: str, claim: Path) -> None:
        claim.unlink(missing_ok=True)
        if (self._results / f"{key}.json").exists():  # then what the dead left behind has no use
            for left in self._claims.glob(f"{key}.*"):
                left.unlink(missing_ok=True)

    def _lives(self, claim: Path) -> bool:
        """Does the process that made this claim still work? One that is gone from this machine does not; of others,
        and of one whose number another process has now, only signs of life tell."""
        owner: dict[str, Any] = {}  # as long as nobody can read whose it is
        try:
            beat = claim.stat().st_mtime
            with suppress(CorruptError, PermissionError):
                owner = read_json(claim)
        except (FileNotFoundError, FarspanError):
            return True  # it was released just now; look again later
        if owner.get("host") == _host() and not _runs(owner["pid"]):
            return False
        return self._now() - beat < self._stale

    def _now(self) -> float:
        """The time by the clock that marks the files, which may be another machine's."""
        probe = self._claims / f".now.{uuid.uuid4().hex}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now


def _host() -> str:
    """Where a process's number means something: containers may share a machine's name and count for themselves."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


@contextmanager
def _touched(files: list[Path], every: float) -> Iterator[None]:
    """Signs of life: the files are touched as long as the block lasts."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every):
            for file in files:
                with suppress(OSError):  # released, or a network that stumbles: the next beat may come through
                    os.utime(file)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sweep(
    cells: Cells,
    todo: Mapping[str, T],
    work: Callable[[T], dict[str, Any]],
    *,
    describe: Callable[[T], Mapping[str, Any]] = lambda item: {},
    done: Callable[[str], None] = lambda key: None,
) -> dict[str, dict[str, Any]]:
    """The results of the cells that are finished, or that nobody is at: these are computed now. None is waited for."""
    results: dict[str, dict[str, Any]] = {}
    for key, item in todo.items():
        found = cells.get(key)
        if found is None:
            with cells.claimed([key]) as mine:
                if mine:
                    cells.put(key, describe(item), work(item))
                    found = cells.get(key)
        if found is not None:
            results[key] = found
            done(key)
    return results


def finish(
    cells: Cells,
    todo: Mapping[str, T],
    work: Callable[[T], dict[str, Any]],
    *,
    describe: Callable[[T], Mapping[str, Any]] = lambda item: {},
    done: Callable[[str], None] = lambda key: None,
    wait: float = WAIT,
) -> dict[str, dict[str, Any]]:
    """The results of all cells, in the order of `todo`: those found are read, those missing are computed here unless
    another process is at it, and then waited for. `done` is told of each cell as it is found or finished.

    >>> finish(Cells(folder), {key_of({"x": x}): x for x in range(9)}, lambda x: {"square": x * x})
    """
    results: dict[str, dict[str, Any]] = {}
    while missing := {key: item for key, item in todo.items() if key not in results}:
        found = sweep(cells, missing, work, describe=describe, done=done)
        results |= found
        if not found:
            time.sleep(wait)
    return {key: results[key] for key in todo}
