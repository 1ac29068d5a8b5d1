"""Tokenizers, packed shards, passkey documents, and mixture rows.

Packing survives interruption and disk faults without partial files, and a mixture row depends only
on its number.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
from collections import Counter
from concurrent.futures import Future
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from farspan.data import mixture as mixture_module
from farspan.data import passkey, recall, shards, tokens
from farspan.data.documents import Document, read_documents
from farspan.data.jsonlines import read_rows
from farspan.data.mixture import Mixture, Source
from farspan.data.passkey import PasskeyDocuments
from farspan.data.shards import open_shards, pack
from farspan.data.tokens import END, fingerprint, read_tokenizer, train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.train import corpus
from farspan.train.corpus import DataConfig, SourceConfig, matching_files
from farspan.workflows.generate import read_prompt

TEXT = next(read_documents("python-docs")).text[:60_000]
CORPUS = [
    TEXT,
    # Repeated, so that passkey sentences take few tokens.
    *[passkey.TASK + passkey.FILLER + passkey.INFO + passkey.QUESTION] * 60,
]
VOCABULARY = 400
PACK_OPTIONS = {"source": "words", "shard_tokens": 900}


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """Flushing every file would take half of the time; no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, VOCABULARY)


def test_a_tokenizer_that_links_out_of_its_folder_is_refused(tokenizer, tmp_path):
    """An export would write the linked file of somebody else."""
    tokenizer.save_pretrained(tmp_path / "own")
    assert read_tokenizer(tmp_path / "own")("a word")["input_ids"]
    secret = tmp_path / "secret.txt"
    secret.write_text("{{ a secret }}")
    (tmp_path / "own" / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(CorruptError, match="chat_template.jinja is a link that leads out"):
        read_tokenizer(tmp_path / "own")


def make_documents(text: str, seed: int, count: int, longest: int) -> list[Document]:
    """Documents of many sizes; some are empty, and one contains the end-of-text string."""
    sizes = random.Random(seed)
    starts = [sizes.randrange(len(text) - longest) for _ in range(count)]
    texts = [
        text[start : start + sizes.choice([0, 1, 30, longest // 2, longest])] for start in starts
    ]
    texts[2] += f"{END} is end of text 2026 £ 字 \0"
    return [Document(str(number), text) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def documents():
    return make_documents(TEXT, 0, 24, 900)


@pytest.fixture(scope="module")
def packed(tokenizer, documents, tmp_path_factory):
    return pack(documents, tokenizer, tmp_path_factory.mktemp("packed") / "words", **PACK_OPTIONS)


@pytest.fixture(scope="module")
def sources(tokenizer, packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    small = pack(make_documents(TEXT, 1, 9, 900), tokenizer, folder / "small")
    large = pack(
        make_documents(TEXT, 2, 90, 1_200), tokenizer, folder / "large", shard_tokens=4_000
    )
    return [Source("packed", packed, 1.0), Source("small", small, 0.3), Source("large", large, 2.5)]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Tokenizers


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_splits_digits(tokenizer):
    ids = tokenizer("in 1234567 years")["input_ids"]
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if token[-1].isdigit()] == list(
        "1234567"
    )


def test_tokenizer_training_is_deterministic(tokenizer, tmp_path):
    retrained = train_tokenizer(iter(CORPUS), VOCABULARY)
    tokenizer.save_pretrained(tmp_path / "first")
    retrained.save_pretrained(tmp_path / "second")
    first, second = (
        (tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second")
    )
    assert first == second
    assert len(retrained) == VOCABULARY
    assert retrained.bos_token == retrained.eos_token == retrained.pad_token == END


def test_fingerprint_ignores_use_and_saving_but_no_change_of_rules(tokenizer, tmp_path):
    before = fingerprint(tokenizer)
    tokenizer(["a", "bb cc dd"], padding=True, truncation=True, max_length=3)
    assert fingerprint(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == before
    assert fingerprint(train_tokenizer(CORPUS, VOCABULARY + 1)) != before

    class Slow:
        def __init__(self, vocabulary):
            self.get_vocab = lambda: vocabulary

    assert (
        fingerprint(Slow({"a": 0, "b": 1}))
        == fingerprint(Slow({"b": 1, "a": 0}))
        != fingerprint(Slow({"a": 0}))
    )


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", '{"a": '])
def test_refuses_broken_tokenizer_files(tokenizer, broken: str, text: str, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    data = DataConfig(sources={}, tokenizer=str(tmp_path))
    assert corpus._tokenizer(data, str(tmp_path), {}, tmp_path).get_vocab() == tokenizer.get_vocab()
    (tmp_path / broken).write_text(text)
    with pytest.raises(CorruptError, match=f"{broken} is not valid JSON"):
        corpus._tokenizer(data, str(tmp_path), {}, tmp_path)


def test_refuses_json_that_is_not_a_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(CorruptError, match="tokenizer.json is not a valid tokenizer"):
        corpus._tokenizer(
            DataConfig(sources={}, tokenizer=str(tmp_path)), str(tmp_path), {}, tmp_path
        )


def test_a_folder_of_text_may_have_brackets_in_its_name(tmp_path):
    """They are a pattern in the names of files alone."""
    folder = tmp_path / "runs [v2]"
    folder.mkdir()
    for name in ("a1.txt", "a2.txt", "b1.txt"):
        (folder / name).write_text("text")
    data = DataConfig(sources={"docs": SourceConfig("a[12].txt", 1.0)}, folder=str(folder))
    assert [path.name for path in matching_files(data, "docs")] == ["a1.txt", "a2.txt"]


def test_json_is_not_read_as_text(tmp_path):
    (tmp_path / "docs.json").write_text('[{"text": "one"}]')
    with pytest.raises(FarspanError, match="would be read as one text, JSON syntax included"):
        read_documents(tmp_path / "docs.json")
    (tmp_path / "docs.ndjson").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [document.text for document in read_documents(tmp_path / "docs.ndjson")] == [
        "one",
        "two",
    ]


def test_tokenizer_training_needs_text_and_a_vocabulary_for_all_bytes():
    for texts in ([], ["", ""]):
        with pytest.raises(FarspanError, match="no text"):
            train_tokenizer(texts, 300)
    with pytest.raises(FarspanError, match="256"):
        train_tokenizer(["a"], 256)
    assert len(train_tokenizer(["a"], 257)) == 257
    assert list(tokens._nonempty(["", "a", "", "b"])) == ["a", "b"]


# Shards


def test_stream_holds_every_document_and_an_end_token(tokenizer, documents, packed):
    texts = [document.text for document in documents if document.text]
    # The end-of-text string inside a document is plain text.
    encoded = tokenizer(texts, split_special_tokens=True)["input_ids"]
    expected = [[*ids, packed.eos] for ids in encoded]
    stream = packed.read(0, packed.tokens)
    assert stream.dtype == np.int64
    assert stream.tolist() == [token for ids in expected for token in ids]
    assert packed.ends.tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
    assert (np.flatnonzero(stream == packed.eos) + 1).tolist() == packed.ends.tolist()
    assert packed.documents == len(expected)
    assert len(packed.manifest.shards) > 3
    assert all(shard.tokens >= 900 for shard in packed.manifest.shards[:-1])
    with pytest.raises(IndexError):
        packed.read(packed.tokens - 1, 2)


@settings(deadline=None)
@given(st.data())
def test_reads_any_range_across_shards_and_from_a_pickled_copy(packed, data):
    start = data.draw(st.integers(0, packed.tokens))
    length = data.draw(st.integers(0, packed.tokens - start))
    whole = packed.read(0, packed.tokens)
    for stream in (packed, pickle.loads(pickle.dumps(packed))):
        assert (stream.read(start, length) == whole[start : start + length]).all()


def test_reads_from_and_to_every_shard_border(packed):
    whole = packed.read(0, packed.tokens)
    ends = np.cumsum([shard.tokens for shard in packed.manifest.shards]).tolist()
    places = sorted(
        {0, 1, *(end + near for end in ends for near in (-1, 0, 1))} - {packed.tokens + 1}
    )
    for number, start in enumerate(places):
        for stop in places[number:]:
            assert (packed.read(start, stop - start) == whole[start:stop]).all()


def test_packing_with_two_processes_writes_the_same_bytes(
    tokenizer, documents, packed, tmp_path, monkeypatch
):
    monkeypatch.setattr(shards, "BATCH", 2_000)
    totals: list[int] = []
    pack(
        documents, tokenizer, tmp_path / "two", processes=2, progress=totals.append, **PACK_OPTIONS
    )
    assert contents(tmp_path / "two") == contents(packed.folder)
    assert len(totals) > 2
    assert totals == sorted(totals)
    assert totals[-1] == packed.tokens


def test_two_batches_for_each_process_are_in_flight(monkeypatch):
    """More would take more memory, and with fewer a process could wait."""
    submitted: list[int] = []

    def submit(encode, batch) -> Future:
        submitted.append(batch)
        future: Future = Future()
        future.set_result(batch)
        return future

    pool = SimpleNamespace(submit=submit, shutdown=lambda cancel_futures: None)
    monkeypatch.setattr(shards, "ProcessPoolExecutor", lambda *options: pool)
    results = enumerate(shards._encode_batches(range(10), None, processes=3))
    ahead = [(len(submitted) - number, result) for number, result in results]
    assert ahead == list(zip([6] * 5 + [5, 4, 3, 2, 1], range(10), strict=True))


def test_every_shard_ends_with_the_document_that_fills_it(tokenizer, tmp_path):
    """Also those after the first."""
    documents = [Document(str(number), "a") for number in range(9)]
    packed = pack(documents, tokenizer, tmp_path / "even", source="words", shard_tokens=5)
    assert packed.tokens == 2 * len(documents), "a letter and the end of text"
    manifest = json.loads((packed.folder / "manifest.json").read_text())
    assert [shard["documents"] for shard in manifest["shards"]] == [3, 3, 3]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("leftovers", [False, True])
def test_packing_killed_at_any_rename_resumes_to_the_same_bytes(
    tokenizer, documents, packed, tmp_path, leftovers
):
    replaces = 2 * len(packed.manifest.shards) + 2
    for fatal in range(replaces):
        folder = tmp_path / str(fatal)
        count = iter(range(replaces))

        def replace(*paths, fatal=fatal, count=count, real=os.replace):
            if next(count) == fatal:
                raise Killed
            real(*paths)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", replace)
            if leftovers:  # as after SIGKILL, when nothing cleans up
                patch.setattr(os, "unlink", lambda path: None)
            with pytest.raises(Killed):
                pack(documents, tokenizer, folder, **PACK_OPTIONS)
        assert any(path.name[0] == "." for path in folder.iterdir()) == leftovers
        if (folder / "manifest.json").exists():
            with pytest.raises(FarspanError, match="not packed completely"):
                open_shards(folder)
        pack(documents, tokenizer, folder, **PACK_OPTIONS)
        assert contents(folder) == contents(packed.folder)


def test_resuming_does_not_tokenize_complete_shards_again(
    tokenizer, documents, packed, tmp_path, monkeypatch
):
    monkeypatch.setattr(shards, "BATCH", 1)
    full_shards = packed.manifest.shards[:-1]  # the last is not full
    sizes = np.cumsum([shard.documents for shard in full_shards])
    tokenized: list[str] = []
    encode = shards._Encoder.__call__
    monkeypatch.setattr(
        shards._Encoder,
        "__call__",
        lambda self, texts: tokenized.extend(texts) or encode(self, texts),
    )

    def failing(after: int):
        yield from documents[:after]
        raise RuntimeError("the disk with the text went away")

    for after in (0, 5, len(documents)):
        folder = tmp_path / str(after)
        with pytest.raises(RuntimeError, match="went away"):
            pack(failing(after), tokenizer, folder, **PACK_OPTIONS)
        nonempty = sum(bool(document.text) for document in documents[:after])
        finished = max((size for size in sizes if size <= nonempty), default=0)
        tokenized.clear()
        pack(documents, tokenizer, folder, **PACK_OPTIONS)
        assert tokenized == [document.text for document in documents if document.text][finished:]
        tokenized.clear()
        assert pack(iter([]), tokenizer, folder, **PACK_OPTIONS).tokens == packed.tokens, (
            "a complete folder is only opened"
        )
        assert not tokenized
        assert contents(folder) == contents(packed.folder)


@pytest.fixture
def interrupted(tokenizer, documents, tmp_path, monkeypatch):
    """A folder whose packing was interrupted after at least two shards."""
    monkeypatch.setattr(shards, "BATCH", 1)

    def killed_after_20():
        yield from documents[:20]
        raise Killed

    folder = tmp_path / "interrupted"
    with pytest.raises(Killed):
        pack(killed_after_20(), tokenizer, folder, **PACK_OPTIONS)
    assert len(json.loads((folder / "manifest.json").read_text())["shards"]) >= 2
    return folder


def test_packing_resumes_only_with_the_same_text_and_tokenizer(
    tokenizer, documents, packed, interrupted
):
    before = contents(interrupted)
    with pytest.raises(FarspanError, match="was packed with the tokenizer"):
        pack(documents, train_tokenizer(CORPUS, VOCABULARY + 1), interrupted, **PACK_OPTIONS)
    with pytest.raises(FarspanError, match="source 'words'.*'other'"):
        pack(documents, tokenizer, interrupted, source="other", shard_tokens=900)
    with pytest.raises(FarspanError, match="shard_tokens 900"):
        pack(documents, tokenizer, interrupted, source="words", shard_tokens=901)
    with pytest.raises(FarspanError, match="now has only 1;"):
        pack([documents[2]], tokenizer, interrupted, **PACK_OPTIONS)
    assert contents(interrupted) == before
    second = interrupted / "tokens-00001.safetensors"
    second.write_bytes(second.read_bytes()[:-1])  # a damaged shard is packed again
    pack(documents, tokenizer, interrupted, **PACK_OPTIONS)
    assert contents(interrupted) == contents(packed.folder)
    with pytest.raises(FarspanError, match="source"):
        pack(documents, tokenizer, interrupted, source="other", shard_tokens=900)


def test_refuses_to_pack_into_a_folder_with_other_files(tokenizer, documents, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FarspanError, match="not empty"):
        pack(documents, tokenizer, tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"mine"}


def test_refuses_an_empty_corpus_and_writes_nothing(tokenizer, tmp_path):
    for documents in ([], [Document("a", ""), Document("b", "")]):
        with pytest.raises(FarspanError, match="a-corpus has no text"):
            pack(documents, tokenizer, tmp_path / "out", source="a-corpus")
        assert not list(tmp_path.iterdir())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_detects_flipped_truncated_extended_and_missing_shards(packed, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    for name, content in contents(packed.folder).items():
        (folder / name).write_bytes(content)
    assert open_shards(folder).tokens == packed.tokens
    shard = data.draw(st.sampled_from(packed.manifest.shards))
    whole = (folder / shard.name).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = (
        whole[:place]
        + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))])
        + whole[place + 1 :]
    )
    for damaged in (flipped, whole[:place], whole + b"\0"):
        (folder / shard.name).write_bytes(damaged)
        with pytest.raises(CorruptError, match=f"{shard.name} is damaged.*pack it again"):
            open_shards(folder)
    (folder / shard.name).unlink()
    with pytest.raises(CorruptError, match=f"{shard.name} is listed in manifest.json but missing"):
        open_shards(folder)


def test_refuses_broken_manifests(packed, tmp_path):
    whole = contents(packed.folder)
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    manifest = tmp_path / "manifest.json"
    value = json.loads(whole["manifest.json"])
    manifest.write_bytes(whole["manifest.json"][:100])
    with pytest.raises(CorruptError, match="not valid JSON"):
        open_shards(tmp_path)
    outside = {**value["shards"][0], "name": "../tokens"}
    for wrong in (
        {"shards": [outside]},
        {"shards": [{**value["shards"][0], "documents": 0}]},
        {"shards": []},
        {"shards": 3},
        {"eos": "0"},
        {"dtype": "float64"},
        {"x": 1},
    ):
        manifest.write_text(json.dumps(value | wrong))
        with pytest.raises(CorruptError, match="not a valid manifest of packed tokens"):
            open_shards(tmp_path)
    manifest.write_text(json.dumps(value | {"dtype": "uint32"}))
    with pytest.raises(CorruptError, match="of type uint32"):
        open_shards(tmp_path)
    manifest.write_text(json.dumps(value | {"format": 2}))
    with pytest.raises(FarspanError, match="format 2"):
        open_shards(tmp_path)
    manifest.unlink()
    with pytest.raises(FarspanError, match="does not exist"):
        open_shards(tmp_path)


def test_refuses_shards_of_another_tokenizer_and_slow_tokenizers(tokenizer, packed):
    other = train_tokenizer(CORPUS, VOCABULARY + 1)
    assert open_shards(packed.folder, tokenizer).manifest.vocabulary == VOCABULARY
    with pytest.raises(
        FarspanError, match=f"{fingerprint(tokenizer)[:12]}.*{fingerprint(other)[:12]}"
    ) as caught:
        open_shards(packed.folder, other)
    assert caught.value.exit_code == 2
    with pytest.raises(FarspanError, match="slow"):
        pack([], type("Slow", (), {"eos_token_id": 0})(), packed.folder)


@pytest.mark.parametrize(("last", "dtype"), [(65535, "uint16"), (65536, "uint32")])
def test_tokens_above_65535_are_packed_as_uint32(
    last, dtype, tokenizer, documents, packed, tmp_path
):
    wide = pickle.loads(pickle.dumps(tokenizer))
    wide.add_tokens([f"<{number}>" for number in range(VOCABULARY, last + 1)])
    repacked = pack([*documents, Document("wide", f"<{last}>")], wide, tmp_path / "wide")
    assert (repacked.manifest.vocabulary, repacked.manifest.dtype) == (last + 1, dtype)
    assert (repacked.read(0, packed.tokens) == packed.read(0, packed.tokens)).all()
    assert repacked.read(packed.tokens, 2).tolist() == [last, packed.eos]


class FaultyDisk:
    """Fails at the n-th operation: a write that stops half-way, a flush, or a rename."""

    def __init__(self, fatal: int, code: int, unlinks: bool):
        self.remaining, self.code, self.unlinks = fatal, code, unlinks
        self.replace, self.unlink = os.replace, os.unlink

    def step(self) -> None:
        self.remaining -= 1
        if self.remaining == -1:
            raise OSError(self.code, os.strerror(self.code))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        disk = self

        class Raw(io.FileIO):
            def write(self, content):
                try:
                    disk.step()
                except OSError:
                    super().write(bytes(content)[: len(content) // 2])
                    raise
                return super().write(content)

        def replace(*paths):
            disk.step()
            disk.replace(*paths)

        def unlink(path):
            if not disk.unlinks:
                raise OSError(errno.EROFS, "the disk went away")
            disk.unlink(path)

        patch.setattr(os, "fdopen", lambda handle, mode: io.BufferedWriter(Raw(handle, mode)))
        patch.setattr(os, "fsync", lambda handle: disk.step())
        patch.setattr(os, "replace", replace)
        patch.setattr(os, "unlink", unlink)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_fault_at_any_disk_operation_leaves_no_partial_file(tokenizer, documents, tmp_path, code):
    """Every write, flush and rename fails once, with and without the chance to clean up."""
    documents = documents[:15]
    packed = pack(documents, tokenizer, tmp_path / "whole", **PACK_OPTIONS)
    assert len(packed.manifest.shards) > 2
    whole = contents(packed.folder)
    operations = 3 * (2 * len(packed.manifest.shards) + 2)
    for fatal, unlinks in product(range(operations), (True, False)):
        folder = tmp_path / f"{fatal}-{unlinks}"
        with pytest.MonkeyPatch.context() as patch:
            FaultyDisk(fatal, code, unlinks).install(patch)
            with pytest.raises(OSError, match="No space left|Input/output error") as caught:
                pack(documents, tokenizer, folder, **PACK_OPTIONS)
        assert caught.value.errno == code, "the first fault is the one that is raised"
        files = contents(folder)
        final = {name: content for name, content in files.items() if name[0] != "."}
        assert final == files or not unlinks, "temporary files are removed where possible"
        listed = json.loads(final.pop("manifest.json", b'{"complete": false, "shards": []}'))
        assert not listed["complete"]
        assert all(content == whole[name] for name, content in final.items())
        assert {shard["name"] for shard in listed["shards"]} <= set(final)
        if unlinks == (fatal % 2 == 0):
            pack(documents, tokenizer, folder, **PACK_OPTIONS)
            assert contents(folder) == whole


# Passkeys


@pytest.fixture(scope="module")
def passkeys(tokenizer):
    return PasskeyDocuments(tokenizer)


@settings(deadline=None)
@given(st.integers(0, 600), st.floats(0, 1), st.sampled_from(passkey.KEYS))
def test_passkey_document_has_its_exact_length_and_all_parts(
    tokenizer, passkeys, extra, depth, key
):
    length = passkeys.shortest + extra
    document = passkeys.document(length, depth, key)
    answer = passkeys.answer(key)
    assert len(document) == length
    assert document[-len(answer) :] == answer
    assert tokenizer.decode(answer) == f" {key}"
    prompt = tokenizer.decode(document[: -len(answer)])
    info = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    assert prompt.startswith(passkey.TASK)
    assert prompt.endswith("\nWhat is the pass key? The pass key is")
    before, after = prompt.removeprefix(passkey.TASK).split(info)
    after = after.removesuffix(passkey.QUESTION)
    filler = passkey.FILLER * 100
    assert filler.startswith(before)
    assert filler.startswith(after)
    # A word that is cut has other tokens.
    assert len(tokenizer(before)["input_ids"]) == pytest.approx(depth * extra, abs=3)


def test_refuses_passkey_documents_below_the_shortest_length(passkeys):
    assert len(passkeys.document(passkeys.shortest, 0.5, 12345)) == passkeys.shortest
    with pytest.raises(FarspanError, match=f"use a length of at least {passkeys.shortest}"):
        passkeys.document(passkeys.shortest - 1, 0.5, 12345)


def test_train_keys_and_held_out_keys_are_disjoint():
    rng = np.random.default_rng(0)
    trained = [passkey.train_key(rng) for _ in range(3_000)]
    tested = [passkey.held_out_key(rng) for _ in range(3_000)]
    assert all(key % 11 for key in trained)
    assert not any(key % 11 for key in tested)
    assert set(trained) | set(tested) <= set(range(10_000, 100_000))
    assert min(tested) < 10_300 < 99_700 < max(tested)


# Mixtures

FIRST_NUMBER = 1_000_000  # above every token id


class NumberedShards:
    """Stands in for shards: every token is a number that names its source and its offset."""

    def __init__(self, original, number: int):
        self.tokens, self.ends = original.tokens, original.ends
        self.fingerprint, self.eos = original.fingerprint, original.eos
        self._first = FIRST_NUMBER * (number + 1)

    def read(self, start: int, length: int) -> np.ndarray:
        return self._first + np.arange(start, start + length)


def numbered(sources: list[Source]) -> list[Source]:
    """The same sources with numbers for tokens; a mixture takes the same windows of them."""
    return [
        Source(source.name, NumberedShards(source.shards, number), source.weight)
        for number, source in enumerate(sources)
    ]


def find_windows(rows: torch.Tensor) -> tuple[list[int], list[int]]:
    """The source number and the start of every row of numbers."""
    assert (rows.diff(dim=1) == 1).all(), "a window is a consecutive part of one source"
    first = rows[:, 0]
    return (first // FIRST_NUMBER - 1).tolist(), (first % FIRST_NUMBER).tolist()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_every_source_stays_within_one_row_of_its_share(weights):
    parts = mixture_module._millionths(weights)
    quotas = mixture_module._cumulative_quotas(parts)
    assert sum(parts) == 1_000_000
    blocks = np.arange(len(quotas))
    assert (np.diff(quotas, axis=0) >= 0).all()
    assert (quotas.sum(axis=1) == 1_000 * blocks).all()
    assert (np.abs(quotas - np.outer(blocks, parts) / 1_000) < 1).all()
    assert quotas[-1].tolist() == parts


def test_source_and_passkey_shares_are_exact(sources, passkeys):
    weighted = [*sources, Source("tiny", sources[1].shards, 2e-4)]
    length = passkeys.shortest + 20
    plain = Mixture(numbered(weighted), length, 3)
    mixture = Mixture(numbered(weighted), length, 3, passkeys=passkeys, passkey_share=0.0725)
    order = [weighted[number].name for number in find_windows(plain.rows(0, 10_000))[0]]
    has_passkey = (mixture.rows(0, 10_000)[:, 0] < FIRST_NUMBER).tolist()
    total = sum(source.weight for source in weighted)
    counts = Counter(order)
    for source in weighted:
        assert abs(counts[source.name] - 10_000 * source.weight / total) <= 1
    assert sum(has_passkey) == 725
    assert {sum(has_passkey[at : at + 1_000]) for at in range(0, 10_000, 1_000)} == {72, 73}
    with_passkeys = Counter(
        name for name, present in zip(order, has_passkey, strict=True) if present
    )
    assert with_passkeys["large"] == pytest.approx(725 * 2.5 / total, rel=0.15), (
        "passkeys do not depend on the source"
    )
    assert order[:1_000] != order[1_000:2_000]


def test_rows_are_counted_on_after_the_quotas_repeat():
    """A row's ordinal is the number of rows of its kind before it, also beyond a million rows."""
    parts = mixture_module._millionths([1, 2, 4])
    sampler = mixture_module._QuotaSampler(parts, (0, 0))
    for millions in (0, 1, 2):
        drawn = [sampler.draw(millions * 1_000_000 + offset) for offset in range(1_000)]
        for kind, part in enumerate(parts):
            ordinals = [ordinal for drawn_kind, ordinal in drawn if drawn_kind == kind]
            assert ordinals == [millions * part + place for place in range(len(ordinals))]


def test_rows_before_repetition_end_with_the_first_epoch_of_a_source(sources):
    mixture = Mixture(numbered(sources), 50, 3)
    windows = [max(source.shards.tokens // 50 - 1, 1) for source in sources]
    order = find_windows(mixture.rows(0, 2 * sum(windows)))[0]
    row = next(row for row, kind in enumerate(order) if order[:row].count(kind) == windows[kind])
    assert mixture.rows_before_repetition(2 * sum(windows)) == row > 0
    assert mixture.rows_before_repetition(row) == row
    assert mixture.rows_before_repetition(row - 1) == row - 1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 1), st.booleans())
def test_every_window_comes_once_per_epoch(sources, length, seed, number, inside):
    source = sources[number]
    mixture = Mixture(numbered([source]), length, seed, inside=inside)
    ends = source.shards.ends
    begins = np.concatenate([[0], ends[:-1]])
    tokens = source.shards.tokens
    if inside:
        count = int(((ends - begins - 1) // length).sum())
    else:
        count = max(tokens // length - 1, 1)
    epochs = [find_windows(mixture.rows(epoch * count, count))[1] for epoch in range(2)]
    for epoch in epochs:
        starts = np.array(sorted(epoch))
        targets = (starts[:, None] + np.arange(1, length + 1)).ravel()
        assert len(np.unique(targets)) == len(targets), "no token is a target twice"
        assert starts[0] >= 0
        assert targets.max() < tokens
        if inside:
            document = np.searchsorted(ends, starts, side="right")
            assert (starts + length < ends[document]).all()
            assert Counter(document.tolist()) == Counter(
                {place: int(n) for place, n in enumerate((ends - begins - 1) // length) if n}
            )
        else:
            assert (np.diff(targets) == 1).all(), "every token is a target, except at the ends"
            assert starts[0] < length
            assert tokens - len(targets) <= 2 * length
    assert epochs[0] != epochs[1] or count < 3 or length == 1
    assert count < 9 or epochs[0] != sorted(epochs[0])


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 80),
    st.integers(0, 2**40),
    st.integers(0, 5_000),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_row_is_a_pure_function_of_its_number(
    sources, passkeys, extra, seed, start, count, inside, share
):
    length = passkeys.shortest + extra
    options = dict(inside=inside, passkeys=passkeys, passkey_share=share)
    mixture = Mixture(sources, length, seed, **options)
    rows = mixture.rows(start, count)
    assert rows.shape == (count, length + 1)
    again = pickle.loads(pickle.dumps(Mixture(sources, length, seed, **options)))
    for index in reversed(range(count)):  # in another order, from a pickled copy
        assert rows[index].tolist() == again.row(start + index).tolist()
    if count > 10:
        assert rows.tolist() != mixture.rows(start + 1, count).tolist()
        assert (
            rows.tolist()
            != Mixture(sources, length, seed + 1, **options).rows(start, count).tolist()
        )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 80), st.integers(0, 2**40), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_row_is_a_passkey_document_and_a_window_of_one_source(
    tokenizer, sources, passkeys, extra, seed, inside, share
):
    length = passkeys.shortest + extra
    plain = Mixture(numbered(sources), length, seed, inside=inside)
    mixture = Mixture(sources, length, seed, inside=inside, passkeys=passkeys, passkey_share=share)
    passkey_rows = 0
    for index, (number, start) in enumerate(zip(*find_windows(plain.rows(0, 40)), strict=True)):
        stream, row = sources[number].shards, mixture.row(index)
        window = stream.read(start, length + 1)
        ends = set(stream.ends.tolist())
        document_ends = [start + offset + 1 in ends for offset in range(length + 1)]
        assert (window == stream.eos).tolist() == document_ends, "eos ends every document"
        if inside:
            assert not any(document_ends[:-1]), "the window lies in one document"
        if row.tolist() == window.tolist():
            continue
        passkey_rows += 1
        prefix = int(np.flatnonzero(row == stream.eos)[0]) + 1
        assert row[prefix:].tolist() == window[: length + 1 - prefix].tolist()
        document = tokenizer.decode(row[: prefix - 1])
        assert passkeys.shortest <= prefix - 1 <= length
        assert document.startswith(passkey.TASK)
        key = int(document.rpartition(" ")[2])
        assert f"The pass key is {key}. Remember it." in document
        assert key % 11
    assert bool(passkey_rows) == bool(share)


def test_passkey_prefixes_have_every_length(sources, passkeys):
    mixture = Mixture(sources, passkeys.shortest + 4, 0, passkeys=passkeys, passkey_share=1.0)
    ends = Counter(int(np.flatnonzero(mixture.row(index) == 0)[0]) for index in range(300))
    assert set(ends) == {passkeys.shortest + extra for extra in range(5)}
    assert len({tuple(row[:30]) for row in mixture.rows(0, 50).tolist()}) == 1, (
        "the task comes first"
    )


def test_refuses_invalid_mixtures(tokenizer, sources, passkeys, tmp_path):
    source = sources[0]
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(FarspanError, match="weight of packed"):
            Mixture([Source("packed", source.shards, weight)], 100, 0)
    with pytest.raises(FarspanError, match="millionth"):
        Mixture([source, Source("dust", source.shards, 1e-9)], 100, 0)
    with pytest.raises(FarspanError, match="at least one source"):
        Mixture([], 100, 0)
    tokens = source.shards.tokens
    assert (
        Mixture([source], tokens - 1, 0).row(7).tolist() == source.shards.read(0, tokens).tolist()
    )
    with pytest.raises(FarspanError, match=f"packed has {tokens} tokens in total"):
        Mixture([source], tokens, 0)
    longest = int(np.diff(source.shards.ends, prepend=0).max())
    with pytest.raises(FarspanError, match=f"packed has {longest} tokens in its longest document"):
        Mixture([source], longest, 0, inside=True)
    with pytest.raises(FarspanError, match="needs passkeys"):
        Mixture([source], 100, 0, passkey_share=0.1)
    with pytest.raises(FarspanError, match="a passkey share of 1.1 is out of range"):
        Mixture([source], 100, 0, passkeys=passkeys, passkey_share=1.1)
    with pytest.raises(FarspanError, match=f"which takes {passkeys.shortest}"):
        Mixture([source], passkeys.shortest - 1, 0, passkeys=passkeys, passkey_share=0.1)
    other = train_tokenizer([TEXT], 300)
    with pytest.raises(FarspanError, match="use one tokenizer"):
        Mixture([source], 100, 0, passkeys=PasskeyDocuments(other), passkey_share=0.1)
    foreign = Source("foreign", pack([Document("a", TEXT)], other, tmp_path / "other"), 1.0)
    with pytest.raises(
        FarspanError, match="foreign and packed were packed with different tokenizers"
    ):
        Mixture([source, foreign], 100, 0)


def metaspace_tokenizer():
    """As Llama 2 has it: a text begins with a space of its own, and words are not split first."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("▁", -3.0), *((letter, -4.0) for letter in "abcdefghij, ")]
    pieces += [("▁ab", -1.0), ("cd", -1.5), ("▁abcd", -2.0), ("j,▁", -1.0)]
    backend = Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def encoded(tokenizer, text: str) -> list[int]:
    return [token for piece in tokens.encode_pieces(tokenizer, text) for token in piece.tolist()]


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_long_text_has_the_same_tokens_in_pieces(kind, tokenizer, monkeypatch):
    tokenizer = tokenizer if kind == "bytes" else metaspace_tokenizer()
    words = np.random.default_rng(0).choice(["abcd", "ab", "ghij,", "é\n", "a", "hijab"], 3000)
    text = " ".join(words)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    sizes = []
    assert tokens.PIECE * 500 <= 1 << 30, "memory holds a piece"
    monkeypatch.setattr(tokens, "PIECE", 500)
    monkeypatch.setattr(tokens, "CONTEXT", 40)

    def count_characters(piece, **options):
        sizes.append(len(piece))
        return tokenizer(piece, **options)

    count_characters.is_fast = True
    assert encoded(count_characters, text) == expected
    assert len(sizes) > 20
    assert max(sizes) < 600
    assert encoded(tokenizer, "") == []


def test_long_text_without_spaces_is_encoded_in_pieces_too(tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 500)
    text = "abcd" * 1000
    assert tokenizer.decode(encoded(tokenizer, text)) == text


def test_a_tokenizer_that_may_have_no_offsets_is_given_a_long_text_whole(monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 50)
    texts = []

    def slow(text, **options):
        assert not options.get("return_offsets_mapping")
        texts.append(text)
        return {"input_ids": list(map(ord, text))}

    text = "a few words " * 20
    assert encoded(slow, text) == list(map(ord, text))
    assert texts == [text]


@pytest.mark.parametrize("size", [9, 2000])
def test_a_tiled_row_keeps_its_length_wherever_its_span_starts(size):
    row = torch.arange(size)
    for seed in range(30):
        tiled = recall._tile(row, np.random.default_rng(seed))
        assert tiled.shape == row.shape
        span = len(tiled.unique())
        assert torch.equal(tiled, tiled[0] + torch.arange(size) % span)


def test_facts_have_no_numbers_of_as_many_digits_as_passkeys_and_needles():
    """Five and seven; and all others that they may have occur."""
    rng = np.random.default_rng(0)
    values = " ".join(recall._value(rng) for _ in range(3000)).split()
    assert {len(value) for value in values if value.isdigit()} == {2, 3, 4, 6, 8}


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    """Some editors put one first; a model would read it as a token."""
    text, lines = tmp_path / "text.txt", tmp_path / "lines.jsonl"
    text.write_text("words", encoding="utf-8-sig")
    lines.write_text('{"text": "words"}', encoding="utf-8-sig")
    assert [document.text for document in read_documents(tmp_path)] == ["words", "words"]
    assert read_prompt(text) == "words"
    assert list(read_rows(lines)) == [(1, {"text": "words"})]
