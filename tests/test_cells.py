"""Cells are computed once, whoever races for them, whoever dies, and whatever happens to their files."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.cells import Cells, check_folder, finish, key_of, sweep
from farspan.errors import FarspanError, PreemptedError
from farspan.signals import stoppable

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_key_depends_on_what_is_described_and_not_on_its_order(description):
    backwards = dict(reversed(list(description.items())))
    assert key_of(description) == key_of(backwards) == key_of(json.loads(json.dumps(description)))
    assert key_of(description) != key_of({**description, "one more": 1})


def test_what_is_finished_is_never_computed_again(tmp_path):
    computed: list[int] = []

    def square(x: int) -> dict:
        computed.append(x)
        return {"square": x * x}

    todo = {key_of({"x": x}): x for x in range(5)}
    first = finish(Cells(tmp_path), todo, square)
    assert list(first) == list(todo)
    assert [result["square"] for result in first.values()] == [0, 1, 4, 9, 16]
    assert finish(Cells(tmp_path), {**todo, key_of({"x": 5}): 5}, square).items() >= first.items()
    assert computed == list(range(6))
    assert not list((tmp_path / "claims").iterdir())


def test_a_result_comes_back_as_it_was_put(tmp_path):
    result = {"samples": [{"nll": 0.1 + 0.2, "said": "größer “x”", 7: [1, None, True]}]}
    Cells(tmp_path).put("key", {"what": "this"}, result)
    found = Cells(tmp_path).get("key")
    assert found["samples"][0]["nll"] == 0.1 + 0.2
    assert found == json.loads(json.dumps(result))
    with pytest.raises(ValueError, match="not JSON compliant"):
        Cells(tmp_path).put("other", {}, {"nll": float("nan")})
    assert Cells(tmp_path).get("other") is None


def test_a_reading_that_failed_says_nothing_about_the_file(tmp_path, monkeypatch):
    cells = Cells(tmp_path)
    cells.put("key", {}, {"x": 1})

    def fails(*_args, **_kwargs):
        raise OSError(24, "too many files")

    with monkeypatch.context() as system:
        system.setattr(Path, "read_text", fails)
        with pytest.raises(OSError, match="too many files"):
            cells.get("key")
    assert cells.get("key") == {"x": 1}


@pytest.mark.parametrize("damage", ["{", "", '{"result": {"x": 1}}', "[1]", "\xff", None])
def test_a_broken_file_is_set_aside_said_and_computed_again(tmp_path, damage):
    said: list[str] = []
    cells = Cells(tmp_path, say=said.append)
    key = key_of({"x": 1})
    cells.put(key, {}, {"x": 1})
    file = tmp_path / "cells" / f"{key}.json"
    broken = file.read_text().replace('"x": 1', '"x": 2') if damage is None else damage
    file.write_bytes(broken.encode("latin-1"))
    assert finish(cells, {key: 1}, lambda x: {"x": x}) == {key: {"x": 1}}
    (sentence,) = said
    (aside,) = (tmp_path / "cells").glob("*.broken")
    assert f"is set aside as {aside.name} and computed again" in sentence
    assert aside.read_bytes() == broken.encode("latin-1")


def test_a_claim_keeps_others_away_and_ends_with_its_block(tmp_path):
    mine, theirs = Cells(tmp_path), Cells(tmp_path)
    theirs.put("done", {}, {"x": 0})
    with mine.claimed(["a", "b", "done"]) as got:
        assert got == ["a", "b"]
        with theirs.claimed(["a", "b", "c"]) as rest:
            assert rest == ["c"]
        assert sweep(theirs, {"a": 1, "done": 1}, lambda x: {"x": x}) == {"done": {"x": 0}}
    with theirs.claimed(["a"]) as got:
        assert got == ["a"]
    with pytest.raises(RuntimeError, match="halfway"), mine.claimed(["a"]):
        raise RuntimeError("halfway")
    with theirs.claimed(["a"]) as got:
        assert got == ["a"]


def test_the_claim_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path):
    script = f"""
import os, sys
from pathlib import Path
from farspan.cells import Cells
with Cells(Path({str(tmp_path)!r})).claimed(["a"]) as got:
    assert got == ["a"]
    os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    assert [claim.name for claim in (tmp_path / "claims").iterdir()] == ["a.0"]
    first, second = Cells(tmp_path), Cells(tmp_path)
    with first.claimed(["a"]) as got, second.claimed(["a"]) as late:
        assert (got, late) == (["a"], [])
        first.put("a", {}, {"x": 1})
    assert not list((tmp_path / "claims").iterdir()), "what the dead left is swept when the cell is finished"


def test_a_claim_from_elsewhere_stands_as_long_as_it_shows_signs_of_life(tmp_path):
    cells = Cells(tmp_path, stale=60)
    claim = tmp_path / "claims" / "a.0"
    claim.write_text(json.dumps({"host": "another machine", "pid": 1}))
    with cells.claimed(["a"]) as got:
        assert got == []
    old = time.time() - 61
    os.utime(claim, (old, old))
    with cells.claimed(["a"]) as got:
        assert got == ["a"]
        with Cells(tmp_path, stale=60).claimed(["a"]) as late:
            assert late == []


def test_containers_that_share_a_name_count_their_processes_for_themselves(tmp_path, monkeypatch):
    with Cells(tmp_path).claimed(["a"]) as got:
        claim = tmp_path / "claims" / "a.0"
        owner = json.loads(claim.read_text())
        claim.write_text(json.dumps({**owner, "pid": 2**30}))  # as it would be told elsewhere
        monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
        with Cells(tmp_path).claimed(["a"]) as late:
            assert (got, late) == (["a"], [])


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_claim_that_nobody_can_read_stands_as_long_as_it_is_fresh(tmp_path, content):
    cells = Cells(tmp_path, stale=60)
    claim = tmp_path / "claims" / "a.0"
    claim.write_text(content)
    with cells.claimed(["a"]) as got:
        assert got == []
    old = time.time() - 61
    os.utime(claim, (old, old))
    with cells.claimed(["a"]) as got:
        assert got == ["a"]


def test_a_long_computation_shows_signs_of_life(tmp_path):
    cells = Cells(tmp_path, stale=0.4)
    with cells.claimed(["a"]):
        time.sleep(1.0)
        with Cells(tmp_path, stale=0.4).claimed(["a"]) as late:
            assert late == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FarspanError, match="cannot be made .*; choose a results folder to write to"):
        Cells(tmp_path / "file" / "results")


# The race.

NUMBERS = 1000


def _race(folder: Path, log: Path, seed: int) -> None:
    """Compute all cells, or what is left of them, telling of each in a log that loses no line."""
    order = list(range(NUMBERS))
    random.Random(seed).shuffle(order)

    def work(number: int) -> dict:
        with log.open("a") as file:
            file.write(f"{number}\n")
        time.sleep(random.Random(number).random() / 500)
        return {"square": number * number}

    finish(Cells(folder), {key_of({"number": number}): number for number in order}, work, wait=0.01)


def test_a_thousand_cells_raced_by_four_processes_that_are_killed_at_random(tmp_path):
    """Each computed, none lost, none doubled; only what a killed process was at is begun again."""
    spawn = multiprocessing.get_context("fork")
    logs = tmp_path / "logs"
    logs.mkdir()
    rng, kills, started = random.Random(0), 0, 0
    running: list = []
    finished = 0
    while finished < 4:
        while len(running) < 4 - finished:
            started += 1
            process = spawn.Process(target=_race, args=(tmp_path / "results", logs / f"{started}.log", started))
            process.start()
            running.append(process)
        time.sleep(0.05)
        if kills < 12 and rng.random() < 0.5:
            victim = rng.choice(running)
            if victim.is_alive():
                os.kill(victim.pid, signal.SIGKILL)
                kills += 1
        for process in [process for process in running if not process.is_alive()]:
            process.join()  # a process that nobody has buried still has its number
            running.remove(process)
            finished += process.exitcode == 0
    assert kills >= 4
    cells = Cells(tmp_path / "results")
    found = [cells.get(key_of({"number": number})) for number in range(NUMBERS)]
    assert found == [{"square": number * number} for number in range(NUMBERS)]
    assert len(list((tmp_path / "results" / "cells").glob("*.json"))) == NUMBERS
    times = Counter(int(line) for log in logs.iterdir() for line in log.read_text().split())
    assert set(times) == set(range(NUMBERS))
    assert sum(times.values()) - NUMBERS <= kills, "a cell was computed twice without a kill"


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_command_that_is_asked_to_stop_says_how_to_go_on(tmp_path, number, name):
    """`lab run` on a CPU: exit code 75, and nothing is claimed any more."""
    command = [sys.executable, "-m", "farspan", "lab", "run", "lab-tiny", "processes=1", "-o", str(tmp_path / "lab")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    claims = tmp_path / "lab" / "claims"
    while process.poll() is None and not (claims.is_dir() and any(claims.iterdir())):
        time.sleep(0.1)
    time.sleep(1)  # the first model is being trained
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"stopped by {name}; what is finished is in" in said
    assert "Traceback" not in said
    assert not any(claims.iterdir())


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_request_to_stop_that_is_lost_is_repeated_in_silence(tmp_path):
    class Leaving:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)  # Python drops what is raised here, and prints it

    hook = sys.unraisablehook
    with pytest.raises(PreemptedError, match="stopped by SIGTERM"), stoppable("all is kept"):
        leaving = Leaving()
        del leaving
        for _ in range(100):
            time.sleep(0.1)
    assert sys.unraisablehook is hook


def test_a_folder_of_another_command_is_left_alone(tmp_path):
    (tmp_path / "cells").mkdir()
    check_folder(tmp_path, "eval")
    for name, content, owner in (
        ("results.json", "[]", "reproduce"),
        ("record.json", '{"command": "lab run"}', "lab run"),
    ):
        (tmp_path / name).write_text(content)
        check_folder(tmp_path, owner)
        with pytest.raises(
            FarspanError, match=f"holds the results of `farspan {owner}`; choose another name for those"
        ):
            check_folder(tmp_path, "eval")
