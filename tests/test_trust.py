"""A full disk, a kill and hostile files: one sentence, no code run, nothing half-written."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import io
import json
import lzma
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import farspan
from families import FAMILIES
from farspan import cells as cells_module
from farspan import cli
from farspan.bundled import BUNDLED_MODELS
from farspan.cells import Cells, cell_key
from farspan.cli.console import console, make_table, print_error, print_text
from farspan.data import documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.files import new_folder, read_json, write_json, write_text
from farspan.loading import load_with_tokenizer
from farspan.signals import exit_on_sigterm
from farspan.train import corpus
from farspan.train.corpus import DataConfig, SourceConfig, prepare_data
from farspan.train.pretrain import check_same_text
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


def test_files_of_killed_processes_are_removed_and_those_of_live_ones_stay(tmp_path):
    for name in (".a.json.abcd_123", ".a.json.live1234", ".a.json.backup", ".b.json.abcd1234"):
        (tmp_path / name).touch()
    with (tmp_path / ".a.json.live1234").open() as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        write_json(tmp_path / "a.json", {})
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == [".a.json.backup", ".a.json.live1234", ".b.json.abcd1234", "a.json"]


def test_claims_of_killed_processes_on_finished_cells_are_removed(tmp_path):
    """A process can be killed between the end of a cell and that of its claim."""
    cells, claims = Cells(tmp_path), tmp_path / "claims"
    cells.put("done", {}, {})
    dead = {"host": cells_module._host(), "pid": 99999999}
    for name in ("done.0", "open.0", "." + "ab" * 16, "done.0~"):
        write_json(claims / name, dead)
    with Cells(tmp_path).claimed(["other"]):
        assert sorted(path.name for path in claims.iterdir()) == ["done.0~", "open.0", "other.0"]


def test_sigterm_leaves_nothing_half_written(tmp_path):
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a runner of tests has its own
    folder = new_folder(tmp_path / "new")
    try:
        with pytest.raises(SystemExit) as stop, exit_on_sigterm(), folder as new:
            (new / "a").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert stop.value.code == 143
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["farspan.cli.app", "farspan.workflows.export.export"])
def test_ctrl_c_is_no_traceback_of_any_command(place, capsys, monkeypatch):
    """While the command is looked up, and in one that does not resume."""

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    arguments = ("export", "nope-twin", "--format", "live", "-o", "new")
    status, error = run_refused(capsys, monkeypatch, *arguments)
    assert status == 130
    assert error in ("", "error stopped by Ctrl-C; rerun the same command\n")


@pytest.mark.long
def test_every_loader_of_transformers_is_given_trust_remote_code():
    """Without a value, transformers asks on standard input."""
    calls = [
        (path.name, node)
        for path in Path(farspan.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value) != "PeftModel"  # an adapter has no code
    ]
    assert len(calls) >= 5
    for name, call in calls:
        arguments = {keyword.arg for keyword in call.keywords}
        assert arguments & {"trust_remote_code", None}, f"{name}: {ast.unparse(call)}"


@pytest.mark.parametrize("kind", ["tokenizer", "beside a gguf file"])
def test_code_of_a_tokenizer_does_not_run_and_nobody_is_asked(kind, tmp_path, monkeypatch):
    def refuse(*_args):
        raise AssertionError("asked on standard input")

    monkeypatch.setattr("builtins.input", refuse)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODELS / "nope-twin" / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    if kind == "tokenizer":
        data = DataConfig(sources={}, tokenizer=str(tmp_path))
        with pytest.raises(CorruptError, match="cannot be read .*contains custom code"):
            corpus._tokenizer(data, str(tmp_path), {}, tmp_path)
    else:
        pytest.importorskip("gguf")
        from farspan.formats.gguf import write_gguf

        model = next(family for family in FAMILIES if family.name == "llama").build()
        model.resize_token_embeddings(270)
        write_gguf(model, train_tokenizer(["some text"], 270), tmp_path / "model.gguf")
        with contextlib.suppress(FarspanError):
            farspan.load(tmp_path / "model.gguf")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def text_data(tmp_path) -> DataConfig:
    (tmp_path / "a.txt").write_text("some text, 12 times " * 50)
    return DataConfig(
        {"a": SourceConfig("a.txt", 1.0)},
        str(tmp_path),
        str(tmp_path / "cache"),
        vocabulary=270,
        passkey=0.0,
        processes=1,
    )


def test_a_damaged_tokenizer_in_the_cache_is_refused(text_data, tmp_path):
    prepare_data(text_data, 16, 0)
    (file,) = (tmp_path / "cache").glob("tokenizer-*/tokenizer.json")
    file.write_text(file.read_text().replace("so", "os", 1))
    with pytest.raises(CorruptError, match=r"tokenizer.json does not match .*/manifest.json"):
        prepare_data(text_data, 16, 0)


def test_changed_text_of_equal_size_and_time_is_packed_again(text_data, tmp_path):
    file = tmp_path / "a.txt"
    before = prepare_data(text_data, 16, 0).mixture.row(0)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("some", "more"))
    os.utime(file, ns=times)
    after = prepare_data(text_data, 16, 0).mixture.row(0)
    assert before.tolist() != after.tolist()
    for note in (tmp_path / "cache" / "checksums").iterdir():
        note.write_text("{")
    assert prepare_data(text_data, 16, 0).mixture.row(0).tolist() == after.tolist()


@pytest.mark.parametrize("length", [0, 1, -1])
def test_a_config_without_a_train_length_is_inspected(length, tmp_path):
    next(family for family in FAMILIES if family.name == "llama").build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_position_embeddings"] = length
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert farspan.inspect(tmp_path).train_length is None


def test_tokens_beyond_the_vocabulary_are_one_sentence(tmp_path):
    model = FAMILIES[0].build()
    model.save_pretrained(tmp_path)
    tokenizer = train_tokenizer(["some text"], 300)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_with_tokenizer(tmp_path)
    rows = model.config.vocab_size
    loaded(input_ids=torch.tensor([[rows - 1]]))
    message = f"makes token {rows} and its model has {rows} embeddings; use the tokenizer"
    with pytest.raises(FarspanError, match=message):
        loaded(input_ids=torch.tensor([[1, rows]]))


@pytest.mark.parametrize(
    ("name", "content", "claimable"),
    [
        ("{key}.0~", "{}", True),
        ("{key}.backup", "{}", True),
        ("{key}.²", "{}", True),
        ("{key}.0", '{"host": HOST}', False),
        ("{key}.0", '{"host": HOST, "pid": "x"}', False),
        ("{key}.0", '{"host": HOST, "pid": null}', False),
        ("{key}.0", '{"host": HOST, "pid": 1e400}', False),
        ("{key}.0", '{"host": HOST, "pid": 99999999999999999999}', True),
        ("{key}.0", "[" * 100_000, False),
    ],
)
def test_a_stray_or_damaged_claim_stops_no_process(name, content, claimable, tmp_path):
    cells, key = Cells(tmp_path), cell_key({"x": 1})
    file = tmp_path / "claims" / name.format(key=key)
    file.write_text(content.replace("HOST", json.dumps(cells_module._host())))
    with cells.claimed([key]) as claimed:
        assert bool(claimed) == claimable
    os.utime(file, (0, 0))  # a damaged claim counts while it is fresh
    with cells.claimed([key]) as claimed:
        assert claimed == [key]


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    assert documents.MAX_LINE <= 1 << 30, "memory holds a line"
    monkeypatch.setattr(documents, "MAX_LINE", 1000)
    file = tmp_path / "a.jsonl.xz"
    file.write_bytes(lzma.compress(b'{"text": "a"}\n' + b" " * 1_000_000))
    with pytest.raises(CorruptError, match=r"a.jsonl.xz, line 2 has more than 1000 bytes"):
        list(documents.read_documents(file))
    file.write_bytes(lzma.compress(b'{"text": "a"}\n\n{"text": "b"}'))
    assert [document.text for document in documents.read_documents(file)] == ["a", "b"]
    longest = b'{"text": "a"}'.ljust(999) + b"\n"
    file.write_bytes(lzma.compress(longest * 2))
    assert [document.text for document in documents.read_documents(file)] == ["a", "a"]


@pytest.mark.parametrize("kind", ["line", "table", "error"])
def test_control_characters_of_names_are_shown_and_not_obeyed(kind, capsys):
    name = "a\x1b]0;title\x07\x1b[2Jb\x9b"
    if kind == "table":
        table = make_table("model")
        table.add_row(name)
        console.print(table)
    else:
        {"line": print_text, "error": print_error}[kind](name)
    captured = capsys.readouterr()
    output = captured.err if kind == "error" else captured.out
    assert "a\\x1b]0;title" in output
    assert not set("\x1b\x07\x9b") & set(output)


def test_a_name_that_is_not_utf8_is_written_and_read_back(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "record.json", {"model": name})
    assert read_json(tmp_path / "record.json") == {"model": name}


def test_a_terminal_of_ascii_gets_escapes(tmp_path, monkeypatch):
    (tmp_path / "café").mkdir()
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.argv", ["farspan", "inspect", str(tmp_path / "café")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    terminal.flush()
    assert rb"caf\xe9 has no config.json" in terminal.buffer.getvalue()


def test_a_recipe_of_a_run_that_is_not_utf8_is_one_sentence(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(b"\xff")
    with pytest.raises(CorruptError, match=r"recipe.toml is not UTF-8 text \(byte 0\)"):
        check_same_text("hash", tmp_path)
