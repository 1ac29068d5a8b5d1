"""Each cell is computed once: under races, killed processes and corrupt files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan import cells as cells_module
from farspan.cells import (
    Cells,
    cell_key,
    check_results_folder,
    compute_unclaimed,
    finish,
    repeat_until_done,
)
from farspan.cli import main
from farspan.errors import FarspanError, PreemptedError
from farspan.signals import stoppable

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
@settings(max_examples=50, deadline=None)
def test_cell_key_depends_on_content_not_on_order(description):
    reordered = dict(reversed(list(description.items())))
    assert (
        cell_key(description)
        == cell_key(reordered)
        == cell_key(json.loads(json.dumps(description)))
    )
    assert cell_key(description) != cell_key({**description, "one more": 1})


def test_finished_cells_are_never_recomputed(tmp_path):
    computed: list[int] = []

    def square(x: int) -> dict:
        computed.append(x)
        return {"square": x * x}

    todo = {cell_key({"x": x}): x for x in range(5)}
    first = finish(Cells(tmp_path), todo, square)
    assert list(first) == list(todo)
    assert [result["square"] for result in first.values()] == [0, 1, 4, 9, 16]
    assert finish(Cells(tmp_path), {**todo, cell_key({"x": 5}): 5}, square).items() >= first.items()
    assert computed == list(range(6))
    assert not list((tmp_path / "claims").iterdir())


def test_result_is_read_back_as_written(tmp_path):
    result = {"samples": [{"nll": 0.1 + 0.2, "output": "größer “x”", 7: [1, None, True]}]}
    Cells(tmp_path).put("key", {"what": "this"}, result)
    stored = Cells(tmp_path).get("key")
    assert stored["samples"][0]["nll"] == 0.1 + 0.2
    assert stored == json.loads(json.dumps(result))
    with pytest.raises(ValueError, match="not JSON compliant"):
        Cells(tmp_path).put("other", {}, {"nll": float("nan")})
    assert Cells(tmp_path).get("other") is None


def test_system_error_while_reading_does_not_discard_a_cell(tmp_path, monkeypatch):
    cells = Cells(tmp_path)
    cells.put("key", {}, {"x": 1})

    def fail(*_args, **_kwargs):
        raise OSError(24, "too many files")

    with monkeypatch.context() as system:
        system.setattr(Path, "read_text", fail)
        with pytest.raises(OSError, match="too many files"):
            cells.get("key")
    assert cells.get("key") == {"x": 1}


@pytest.mark.parametrize("damage", ["{", "", '{"result": {"x": 1}}', "[1]", "\xff", None])
def test_corrupt_file_is_set_aside_reported_and_recomputed(tmp_path, damage):
    messages: list[str] = []
    cells = Cells(tmp_path, say=messages.append)
    key = cell_key({"x": 1})
    cells.put(key, {}, {"x": 1})
    file = tmp_path / "cells" / f"{key}.json"
    broken = file.read_text().replace('"x": 1', '"x": 2') if damage is None else damage
    file.write_bytes(broken.encode("latin-1"))
    assert finish(cells, {key: 1}, lambda x: {"x": x}) == {key: {"x": 1}}
    (message,) = messages
    (quarantined,) = (tmp_path / "cells").glob("*.broken")
    assert f"is set aside as {quarantined.name} and computed again" in message
    assert quarantined.read_bytes() == broken.encode("latin-1")


def test_swapped_files_are_set_aside(tmp_path):
    cells, files = Cells(tmp_path), [tmp_path / "cells" / f"{key}.json" for key in "ab"]
    for key, file in zip("ab", files, strict=True):
        cells.put(key, {}, {"key": key})
        file.rename(file.with_suffix(f".{key}"))
    files[0].with_suffix(".a").rename(files[1])
    files[1].with_suffix(".b").rename(files[0])
    assert [cells.get(key) for key in "ab"] == [None, None]
    assert len(list((tmp_path / "cells").glob("*.broken"))) == 2


def test_a_cell_of_an_earlier_release_does_not_name_its_key(tmp_path):
    result = {"x": 1}
    content = {"description": {}, "sha256": cell_key(result), "result": result}
    cells = Cells(tmp_path)
    (tmp_path / "cells" / "key.json").write_text(json.dumps(content))
    assert cells.get("key") == result


def test_claim_is_exclusive_and_ends_with_its_block(tmp_path):
    first, second = Cells(tmp_path), Cells(tmp_path)
    second.put("done", {}, {"x": 0})
    with first.claimed(["a", "b", "done"]) as keys:
        assert keys == ["a", "b"]
        with second.claimed(["a", "b", "c"]) as remaining:
            assert remaining == ["c"]
        results = compute_unclaimed(second, {"a": 1, "done": 1}, lambda x: {"x": x})
        assert results == {"done": {"x": 0}}
    with second.claimed(["a"]) as keys:
        assert keys == ["a"]
    with pytest.raises(RuntimeError, match="halfway"), first.claimed(["a"]):
        raise RuntimeError("halfway")
    with second.claimed(["a"]) as keys:
        assert keys == ["a"]


@pytest.mark.parametrize(
    ("missing", "sleeps"),
    [([0], 0), ([3, 1, 0], 0), ([2, 2, 2, 1, 1, 0], 3), ([5, 4, 4, 0], 1)],
)
def test_waits_only_after_a_pass_that_finished_nothing(monkeypatch, missing, sleeps):
    calls, waits = iter(missing), []
    monkeypatch.setattr(cells_module.time, "sleep", waits.append)
    repeat_until_done(lambda: next(calls))
    assert waits == [cells_module.WAIT] * sleeps
    assert not list(calls), "it stops at 0"


def test_claim_of_a_dead_process_is_taken_over_at_once(tmp_path):
    script = f"""
import os, sys
from pathlib import Path
from farspan.cells import Cells
with Cells(Path({str(tmp_path)!r})).claimed(["a"]) as keys:
    assert keys == ["a"]
    os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    assert [claim.name for claim in (tmp_path / "claims").iterdir()] == ["a.0"]
    first, second = Cells(tmp_path), Cells(tmp_path)
    with first.claimed(["a"]) as keys, second.claimed(["a"]) as late:
        assert (keys, late) == (["a"], [])
        first.put("a", {}, {"x": 1})
    assert not list((tmp_path / "claims").iterdir()), "finishing a cell removes dead claims"


def test_claim_of_another_machine_holds_while_its_heartbeat_is_fresh(tmp_path):
    cells = Cells(tmp_path)
    claim = tmp_path / "claims" / "a.0"
    claim.write_text(json.dumps({"host": "another machine", "pid": 1}))
    with cells.claimed(["a"]) as keys:
        assert keys == []
    old = time.time() - cells_module.STALE - 1
    os.utime(claim, (old, old))
    with cells.claimed(["a"]) as keys:
        assert keys == ["a"]
        with Cells(tmp_path).claimed(["a"]) as late:
            assert late == []


def test_process_ids_of_other_containers_on_a_host_are_not_checked(tmp_path, monkeypatch):
    with Cells(tmp_path).claimed(["a"]) as keys:
        claim = tmp_path / "claims" / "a.0"
        owner = json.loads(claim.read_text())
        claim.write_text(json.dumps({**owner, "pid": 2**30}))  # of another container
        monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
        with Cells(tmp_path).claimed(["a"]) as late:
            assert (keys, late) == (["a"], [])


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_unreadable_claim_holds_while_its_heartbeat_is_fresh(tmp_path, content):
    cells = Cells(tmp_path)
    claim = tmp_path / "claims" / "a.0"
    claim.write_text(content)
    with cells.claimed(["a"]) as keys:
        assert keys == []
    old = time.time() - cells_module.STALE - 1
    os.utime(claim, (old, old))
    with cells.claimed(["a"]) as keys:
        assert keys == ["a"]


@pytest.mark.long
def test_long_computation_keeps_its_claim_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "STALE", 0.4)
    cells = Cells(tmp_path)
    with cells.claimed(["a"]):
        time.sleep(1.0)
        with Cells(tmp_path).claimed(["a"]) as late:
            assert late == []


def test_refuses_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FarspanError, match="cannot be created .*; choose a writable results"):
        Cells(tmp_path / "file" / "results")


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_interrupted_command_releases_its_claims(tmp_path, monkeypatch, capsys, number, name):
    """`lab run` exits with code 75, says where the results are, and leaves no claim."""
    out = tmp_path / "lab"
    claims, ended = out / "claims", threading.Event()
    arguments = ["lab", "run", "lab-tiny", "train.steps=100000", "train_examples=200"]
    options = ["processes=1", "-o", str(out), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["farspan", *arguments, *options])
    monkeypatch.setenv("COLUMNS", "400")
    # A background job ignores SIGINT.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while not ended.wait(0.05):
            if claims.is_dir() and any(claims.iterdir()):
                # The second signal only ends a test that fails.
                for signum, delay in ((number, 1), (signal.SIGTERM, 60)):
                    if not ended.wait(delay):
                        os.kill(os.getpid(), signum)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, previous)
    assert stop.value.code == 75
    stderr = capsys.readouterr().err
    assert f"stopped by {name}; finished results are in" in stderr
    assert "Traceback" not in stderr
    assert not any(claims.iterdir())


@pytest.mark.long
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_stop_signal_lost_in_a_destructor_is_raised_again(number, name):
    class SignalInDestructor:
        def __del__(self):
            signal.raise_signal(number)  # Python prints and drops exceptions raised here

    hook = sys.unraisablehook
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(PreemptedError, match=f"stopped by {name}"), stoppable("all is kept"):
            garbage = SignalInDestructor()
            del garbage
            for _ in range(100):
                time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert sys.unraisablehook is hook


def test_refuses_a_results_folder_that_cannot_be_made(tmp_path):
    check_results_folder(tmp_path / "new" / "deep", "eval")
    (tmp_path / "file").touch()
    with pytest.raises(FarspanError, match="file is not a writable folder; choose another"):
        check_results_folder(tmp_path / "file" / "results", "eval")


def test_refuses_the_results_folder_of_another_command(tmp_path):
    (tmp_path / "cells").mkdir()
    check_results_folder(tmp_path, "eval")
    for name, content, owner in (
        ("results.json", "[]", "reproduce"),
        ("record.json", '{"command": "lab run"}', "lab run"),
    ):
        (tmp_path / name).write_text(content)
        check_results_folder(tmp_path, owner)
        with pytest.raises(
            FarspanError,
            match=f"holds the results of `farspan {owner}`; choose another name",
        ):
            check_results_folder(tmp_path, "eval")
