"""Files appear whole or not at all, and what is broken is found before it is used."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from farspan.errors import CorruptError, FarspanError
from farspan.files import UMASK, check_safetensors, new_folder, write_json, write_text


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "out"
    with new_folder(target) as new:
        (new / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    with pytest.raises(RuntimeError), new_folder(tmp_path / "deep" / "failed") as new:
        (new / "b").write_text("2")
        raise RuntimeError
    assert [path.name for path in target.parent.iterdir()] == ["out"], "nothing is left of a failure"
    with pytest.raises(FarspanError, match="exists already"), new_folder(target):
        pass
    assert (target / "a").read_text() == "1", "nothing that stands there is replaced"
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as new:
        (new / "c").write_text("3")
    assert (tmp_path / "empty" / "c").read_text() == "3"


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    """safetensors and tempfile make files that are their owner's alone."""
    with new_folder(tmp_path / "new") as folder:
        (folder / "inside").mkdir(mode=0o700)
        for file in (folder / "a.safetensors", folder / "inside" / "b"):
            file.touch(mode=0o600)
    write_text(tmp_path / "c", "text")
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*"), tmp_path / "c"]
    assert len(made) == 5
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~UMASK


def test_a_file_is_replaced_or_untouched(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    write_json(target, {"a": 1})
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_text(target, "new")
    assert target.read_text() == '{\n  "a": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(target, {"a": float("nan")})


@given(st.data())
def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path_factory, data):
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
