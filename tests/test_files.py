"""Files and folders are written atomically, and damaged ones are refused before use."""

from __future__ import annotations

import os
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from farspan.batching import out_of_memory
from farspan.data.documents import share_text
from farspan.errors import CorruptError, FarspanError
from farspan.files import UMASK, check_safetensors, file_name, new_folder, write_json, write_text
from farspan.loading import _supported_dtype
from farspan.record import environment


def test_a_folder_is_written_atomically(tmp_path):
    target = tmp_path / "deep" / "out"
    with new_folder(target) as new:
        (new / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    with pytest.raises(RuntimeError), new_folder(tmp_path / "deep" / "failed") as new:
        (new / "b").write_text("2")
        raise RuntimeError
    assert [path.name for path in target.parent.iterdir()] == ["out"], "a failure leaves nothing"
    with pytest.raises(FarspanError, match="already exists"), new_folder(target):
        pass
    assert (target / "a").read_text() == "1", "an existing folder is not replaced"
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as new:
        (new / "c").write_text("3")
    assert (tmp_path / "empty" / "c").read_text() == "3"


def test_new_files_have_the_permissions_of_the_umask(tmp_path):
    """safetensors and tempfile write files that only their owner can read."""
    with new_folder(tmp_path / "new") as folder:
        (folder / "inside").mkdir(mode=0o700)
        for file in (folder / "a.safetensors", folder / "inside" / "b"):
            file.touch(mode=0o600)
    write_text(tmp_path / "c", "text")
    paths = [tmp_path / "new", *(tmp_path / "new").rglob("*"), tmp_path / "c"]
    assert len(paths) == 5
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~UMASK


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "model" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model" / "below")
    assert [file_name(path) for path in (".", "..", "a/b", "a")] == ["below", "model", "b", "a"]


def test_a_file_is_written_atomically(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    write_json(target, {"a": 1})
    monkeypatch.setattr(
        os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(OSError, match="no space left"):
        write_text(target, "new")
    assert target.read_text() == '{\n  "a": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(target, {"a": float("nan")})


@settings(deadline=None)  # a busy machine is slow
@given(st.data())
def test_refuses_a_safetensors_file_truncated_anywhere(tmp_path_factory, data):
    whole = save({"a": torch.arange(6.0), "b": torch.zeros(2, 2, dtype=torch.bfloat16)})
    path = tmp_path_factory.mktemp("cut") / "x.safetensors"
    path.write_bytes(whole)
    check_safetensors(path)
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CorruptError):
        check_safetensors(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptError):
        check_safetensors(path)


def test_a_record_names_the_device_that_was_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert environment("cuda:1")["device"] == "GPU cuda:1"
    assert environment()["device"] == "GPU cuda"
    assert environment("cpu")["device"] == environment("cpu:0")["device"] == platform.machine()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_out_of_memory_is_recognized_by_its_message(message, expected):
    assert out_of_memory(RuntimeError(message)) == expected


def test_sources_share_text_if_one_contains_the_other(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert share_text(tmp_path, tmp_path / "a.txt")
    assert share_text(tmp_path / "a.txt", tmp_path / "." / "a.txt")
    assert share_text("python-docs/score", "python-docs")
    assert not share_text("python-docs/score", "python-docs/search")
    assert not share_text(tmp_path / "a.txt", tmp_path / "b.txt")


def test_half_precision_becomes_float32_only_where_the_cpu_emulates_it(monkeypatch):
    assert _supported_dtype(torch.float32, "cpu") is None
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert _supported_dtype(torch.float32, "cpu") is None
    assert _supported_dtype(torch.bfloat16, "cpu") == torch.float32
    assert _supported_dtype(torch.bfloat16, "cuda:0") is None


def test_a_folder_by_the_name_of_the_bundled_text_is_that_folder(tmp_path, monkeypatch):
    """Without one, the name means the bundled text, which is in no folder."""
    monkeypatch.chdir(tmp_path)
    assert not share_text("python-docs", tmp_path / "python-docs")
    assert not share_text("python-docs", ".")
    (tmp_path / "python-docs").mkdir()
    assert share_text("python-docs", tmp_path / "python-docs")
    assert share_text("python-docs", ".")
