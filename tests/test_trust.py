"""A full disk, a kill and hostile files: one sentence, no code run, nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal

import pytest
import torch
from safetensors.torch import save_file

import farspan
from families import FAMILIES
from farspan.files import new_folder, write_text
from farspan.signals import exit_on_sigterm
from test_bad_input import run_refused


@contextlib.contextmanager
def full_disk(size: int = 4096):
    """Every write beyond `size` bytes of a file fails, in Python and in libraries."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_weights(folder):
    save_file({"a": torch.zeros(10_000)}, folder / "a.safetensors")


def write_tokenizer(folder):
    farspan.loading.load_tokenizer("nope-twin").save_pretrained(folder)


def write_plain_file(folder):
    (folder / "a").write_bytes(bytes(10_000))


@pytest.mark.parametrize("write", [write_weights, write_tokenizer, write_plain_file])
def test_a_full_disk_is_an_error_of_the_new_folder(write, tmp_path):
    """safetensors and tokenizers raise classes of their own."""
    refused = pytest.raises(OSError, match="File too large")
    with full_disk(), refused as caught, new_folder(tmp_path / "new") as new:
        write(new)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "new"))
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_a_full_disk_names_the_file(tmp_path):
    with full_disk(), pytest.raises(OSError, match=f"File too large: '{tmp_path / 'a.json'}'"):
        write_text(tmp_path / "a.json", "a" * 10_000)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence_of_a_command(tmp_path, capsys, monkeypatch):
    FAMILIES[0].build().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    with full_disk():
        status, error = run_refused(
            capsys, monkeypatch, "export", str(tmp_path / "model"), "--format", "stock", "-o", out
        )
    assert status == 2
    reason = "cannot be written (File too large); free some space on its disk"
    assert error == f"error {out} {reason}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folders_of_killed_processes_are_removed_and_those_of_live_ones_stay(tmp_path):
    for name in (".new.abcd_123", ".new.live1234", ".new.search", ".other.abcd1234"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    live = os.open(tmp_path / ".new.live1234", os.O_RDONLY)
    fcntl.flock(live, fcntl.LOCK_EX)
    with new_folder(tmp_path / "new") as new:
        other = os.open(new, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(live)
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == [".new.live1234", ".new.search", ".other.abcd1234", "new"]


def test_sigterm_leaves_nothing_half_written(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, exit_on_sigterm(), new_folder(tmp_path / "new") as new:
        (new / "a").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.value.code == 143
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before
