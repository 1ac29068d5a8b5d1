"""Text becomes tokens once, is never half on disk, and comes back as rows that only their number decides."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from farspan.data import mixture as mixing
from farspan.data import passkey, shards
from farspan.data.documents import Document, read_documents
from farspan.data.mixture import Mixture, Source
from farspan.data.passkey import Passkeys
from farspan.data.shards import open_shards, pack
from farspan.data.tokens import END, fingerprint, train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.train import corpus
from farspan.train.corpus import Data

TEXT = next(read_documents("python-docs")).text[:60_000]
CORPUS = [TEXT, *[passkey.TASK + passkey.FILLER + passkey.INFO + passkey.QUESTION] * 60]  # so that passkeys are short
VOCABULARY = 400
WORDS = {"source": "words", "shard_tokens": 900}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, VOCABULARY)


def cut(text: str, seed: int, count: int, longest: int) -> list[Document]:
    """Documents of many sizes, some empty and some that spell the end of text."""
    sizes = random.Random(seed)
    starts = [sizes.randrange(len(text) - longest) for _ in range(count)]
    texts = [text[start : start + sizes.choice([0, 1, 30, longest // 2, longest])] for start in starts]
    texts[2] += f"{END} is how text ends 2026 £ 字 \0"
    return [Document(str(number), text) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def documents():
    return cut(TEXT, 0, 24, 900)


@pytest.fixture(scope="module")
def packed(tokenizer, documents, tmp_path_factory):
    return pack(documents, tokenizer, tmp_path_factory.mktemp("packed") / "words", **WORDS)


@pytest.fixture(scope="module")
def sources(tokenizer, packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    small = pack(cut(TEXT, 1, 9, 900), tokenizer, folder / "small")
    large = pack(cut(TEXT, 2, 90, 1_200), tokenizer, folder / "large", shard_tokens=4_000)
    return [Source("packed", packed, 1.0), Source("small", small, 0.3), Source("large", large, 2.5)]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Tokens


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_whole(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_split_one_by_one(tokenizer):
    ids = tokenizer("in 1234567 years")["input_ids"]
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if token[-1].isdigit()] == list("1234567")


def test_the_same_texts_give_the_same_tokenizer(tokenizer, tmp_path):
    again = train_tokenizer(iter(CORPUS), VOCABULARY)
    for name, one in (("one", tokenizer), ("two", again)):
        one.save_pretrained(tmp_path / name)
    one, two = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert one == two
    assert len(again) == VOCABULARY
    assert again.bos_token == again.eos_token == again.pad_token == END


def test_a_fingerprint_outlives_use_and_disk_and_nothing_else(tokenizer, tmp_path):
    before = fingerprint(tokenizer)
    tokenizer(["a", "bb cc dd"], padding=True, truncation=True, max_length=3)
    assert fingerprint(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == before
    assert fingerprint(train_tokenizer(CORPUS, VOCABULARY + 1)) != before

    class Slow:
        def __init__(self, vocabulary):
            self.get_vocab = lambda: vocabulary

    assert fingerprint(Slow({"a": 0, "b": 1})) == fingerprint(Slow({"b": 1, "a": 0})) != fingerprint(Slow({"a": 0}))


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", '{"a": '])
def test_a_broken_tokenizer_is_one_sentence(tokenizer, broken: str, text: str, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    data = Data(sources={}, tokenizer=str(tmp_path))
    assert corpus._tokenizer(data, str(tmp_path), {}, tmp_path).get_vocab() == tokenizer.get_vocab()
    (tmp_path / broken).write_text(text)
    with pytest.raises(CorruptError, match=f"{broken} is not valid JSON"):
        corpus._tokenizer(data, str(tmp_path), {}, tmp_path)


def test_a_file_that_holds_no_tokenizer_is_named(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(CorruptError, match="tokenizer.json holds no tokenizer"):
        corpus._tokenizer(Data(sources={}, tokenizer=str(tmp_path)), str(tmp_path), {}, tmp_path)


def test_a_tokenizer_needs_text_and_room():
    for texts in ([], ["", ""]):
        with pytest.raises(FarspanError, match="no text"):
            train_tokenizer(texts, 300)
    with pytest.raises(FarspanError, match="256"):
        train_tokenizer(["a"], 256)
    assert len(train_tokenizer(["a"], 257)) == 257


# Shards


def test_the_stream_is_every_document_and_its_end(tokenizer, documents, packed):
    texts = [document.text for document in documents if document.text]
    expected = tokenizer(texts, split_special_tokens=True)["input_ids"]  # what spells the end of text is text
    expected = [[*ids, packed.eos] for ids in expected]
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


@given(st.data())
def test_any_part_is_read_across_borders_here_and_in_a_copy(packed, data):
    start = data.draw(st.integers(0, packed.tokens))
    length = data.draw(st.integers(0, packed.tokens - start))
    whole = packed.read(0, packed.tokens)
    for one in (packed, pickle.loads(pickle.dumps(packed))):
        assert (one.read(start, length) == whole[start : start + length]).all()


def test_processes_do_not_change_a_byte(tokenizer, documents, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 2_000)
    told: list[int] = []
    pack(documents, tokenizer, tmp_path / "two", processes=2, progress=told.append, **WORDS)
    assert contents(tmp_path / "two") == contents(packed.folder)
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == packed.tokens


class Killed(BaseException):
    pass


@pytest.mark.parametrize("litter", [False, True])
def test_killed_at_any_file_packing_goes_on_to_the_same_bytes(tokenizer, documents, packed, tmp_path, litter):
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
            if litter:  # as when no handler runs
                patch.setattr(os, "unlink", lambda path: None)
            with pytest.raises(Killed):
                pack(documents, tokenizer, folder, **WORDS)
        assert any(path.name[0] == "." for path in folder.iterdir()) == litter
        if (folder / "manifest.json").exists():
            with pytest.raises(FarspanError, match="not packed to its end"):
                open_shards(folder)
        pack(documents, tokenizer, folder, **WORDS)
        assert contents(folder) == contents(packed.folder)


def test_what_is_finished_is_not_tokenized_again(tokenizer, documents, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 1)
    sizes = np.cumsum([shard.documents for shard in packed.manifest.shards[:-1]])  # the last is not full
    tokenized: list[str] = []
    encode = shards._Encoder.__call__
    monkeypatch.setattr(shards._Encoder, "__call__", lambda self, texts: tokenized.extend(texts) or encode(self, texts))

    def failing(after: int):
        yield from documents[:after]
        raise RuntimeError("the disk with the text went away")

    for after in (0, 5, len(documents)):
        folder = tmp_path / str(after)
        with pytest.raises(RuntimeError, match="went away"):
            pack(failing(after), tokenizer, folder, **WORDS)
        given = sum(bool(document.text) for document in documents[:after])
        finished = max((size for size in sizes if size <= given), default=0)
        tokenized.clear()
        pack(documents, tokenizer, folder, **WORDS)
        assert tokenized == [document.text for document in documents if document.text][finished:]
        tokenized.clear()
        assert pack(iter([]), tokenizer, folder, **WORDS).tokens == packed.tokens, "what is complete is opened"
        assert not tokenized
        assert contents(folder) == contents(packed.folder)


@pytest.fixture
def begun(tokenizer, documents, tmp_path, monkeypatch):
    """A folder whose packing was interrupted after two shards."""

    monkeypatch.setattr(shards, "BATCH", 1)

    def some():
        yield from documents[:20]
        raise Killed

    with pytest.raises(Killed):
        pack(some(), tokenizer, tmp_path / "begun", **WORDS)
    assert len(json.loads((tmp_path / "begun" / "manifest.json").read_text())["shards"]) >= 2
    return tmp_path / "begun"


def test_packing_goes_on_only_with_the_same_text_and_tokenizer(tokenizer, documents, packed, begun):
    before = contents(begun)
    with pytest.raises(FarspanError, match="was packed with the tokenizer"):
        pack(documents, train_tokenizer(CORPUS, VOCABULARY + 1), begun, **WORDS)
    with pytest.raises(FarspanError, match="source 'words'.*'other'"):
        pack(documents, tokenizer, begun, source="other", shard_tokens=900)
    with pytest.raises(FarspanError, match="shard_tokens 900"):
        pack(documents, tokenizer, begun, source="words", shard_tokens=901)
    with pytest.raises(FarspanError, match="gives only 1;"):
        pack([documents[2]], tokenizer, begun, **WORDS)
    assert contents(begun) == before
    first = begun / "tokens-00001.safetensors"
    first.write_bytes(first.read_bytes()[:-1])  # what was finished and is damaged is made again
    pack(documents, tokenizer, begun, **WORDS)
    assert contents(begun) == contents(packed.folder)
    with pytest.raises(FarspanError, match="source"):
        pack(documents, tokenizer, begun, source="other", shard_tokens=900)


def test_a_folder_of_something_else_is_left_alone(tokenizer, documents, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FarspanError, match="not empty"):
        pack(documents, tokenizer, tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"mine"}


def test_an_empty_corpus_is_named_and_leaves_nothing(tokenizer, tmp_path):
    for documents in ([], [Document("a", ""), Document("b", "")]):
        with pytest.raises(FarspanError, match="a-corpus holds no text"):
            pack(documents, tokenizer, tmp_path / "out", source="a-corpus")
        assert not list(tmp_path.iterdir())


@settings(max_examples=30)
@given(st.data())
def test_one_bit_or_the_end_of_a_shard_is_missed(packed, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    for name, content in contents(packed.folder).items():
        (folder / name).write_bytes(content)
    assert open_shards(folder).tokens == packed.tokens
    shard = data.draw(st.sampled_from(packed.manifest.shards))
    whole = (folder / shard.name).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :]
    for damaged in (flipped, whole[:place], whole + b"\0"):
        (folder / shard.name).write_bytes(damaged)
        with pytest.raises(CorruptError, match=f"{shard.name} is damaged.*pack it again"):
            open_shards(folder)
    (folder / shard.name).unlink()
    with pytest.raises(CorruptError, match=f"{shard.name} is named by manifest.json but missing"):
        open_shards(folder)


def test_a_broken_manifest_is_one_sentence(packed, tmp_path):
    whole = contents(packed.folder)
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    manifest = tmp_path / "manifest.json"
    value = json.loads(whole["manifest.json"])
    manifest.write_bytes(whole["manifest.json"][:100])
    with pytest.raises(CorruptError, match="not valid JSON"):
        open_shards(tmp_path)
    outside = {**value["shards"][0], "name": "../tokens"}
    for wrong in ({"shards": [outside]}, {"shards": []}, {"shards": 3}, {"eos": "0"}, {"dtype": "float64"}, {"x": 1}):
        manifest.write_text(json.dumps(value | wrong))
        with pytest.raises(CorruptError, match="no manifest of packed tokens"):
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


def test_shards_know_their_tokenizer(tokenizer, packed):
    other = train_tokenizer(CORPUS, VOCABULARY + 1)
    assert open_shards(packed.folder, tokenizer).manifest.vocabulary == VOCABULARY
    with pytest.raises(FarspanError, match=f"{fingerprint(tokenizer)[:12]}.*{fingerprint(other)[:12]}") as caught:
        open_shards(packed.folder, other)
    assert caught.value.exit_code == 2
    with pytest.raises(FarspanError, match="slow"):
        pack([], type("Slow", (), {"eos_token_id": 0})(), packed.folder)


def test_a_large_vocabulary_takes_wider_tokens(tokenizer, documents, packed, tmp_path):
    wide = pickle.loads(pickle.dumps(tokenizer))
    wide.add_tokens([f"<{number}>" for number in range(1 << 16)])
    result = pack([*documents, Document("wide", "<65535>")], wide, tmp_path / "wide")
    assert result.manifest.dtype == "uint32"
    assert (result.read(0, packed.tokens) == packed.read(0, packed.tokens)).all()
    assert result.read(packed.tokens, 2).tolist() == [VOCABULARY + 65535, packed.eos]
    assert packed.manifest.dtype == "uint16"


class FaultyDisk:
    """Fails at the n-th operation: a write that stops half-way, a flush, or a rename. Flushes are not waited for."""

    def __init__(self, fatal: int, code: int, unlinks: bool):
        self.left, self.code, self.unlinks = fatal, code, unlinks
        self.open, self.replace, self.unlink = os.fdopen, os.replace, os.unlink

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
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

        def renamed(*paths):
            disk.step()
            disk.replace(*paths)

        def unlinked(path):
            if not disk.unlinks:
                raise OSError(errno.EROFS, "the disk went away")
            disk.unlink(path)

        patch.setattr(os, "fdopen", lambda handle, mode: io.BufferedWriter(Raw(handle, mode)))
        patch.setattr(os, "fsync", lambda handle: disk.step())
        patch.setattr(os, "replace", renamed)
        patch.setattr(os, "unlink", unlinked)


def test_two_hundred_faults_leave_nothing_half_written(tokenizer, documents, packed, tmp_path):
    whole = contents(packed.folder)
    operations = 3 * (2 * len(packed.manifest.shards) + 2)
    chance = random.Random(0)
    seen = Counter()
    for number in range(200):
        folder = tmp_path / str(number)
        fatal, code, unlinks = number % operations, chance.choice([errno.ENOSPC, errno.EIO]), chance.random() < 0.8
        with pytest.MonkeyPatch.context() as patch:
            FaultyDisk(fatal, code, unlinks).install(patch)
            with pytest.raises(OSError, match="No space left|Input/output error") as caught:
                pack(documents, tokenizer, folder, **WORDS)
        assert caught.value.errno == code, "the first fault is the one that is told"
        left = contents(folder)
        final = {name: content for name, content in left.items() if name[0] != "."}
        assert final == left or not unlinks, "no litter where it can be removed"
        listed = json.loads(final.pop("manifest.json", b'{"complete": false, "shards": []}'))
        assert not listed["complete"]
        assert all(content == whole[name] for name, content in final.items())
        assert {shard["name"] for shard in listed["shards"]} <= set(final)
        seen[fatal % 3, code] += 1
        if number % 4 == 0:
            with pytest.MonkeyPatch.context() as patch:
                FaultyDisk(10**9, code, True).install(patch)
                pack(documents, tokenizer, folder, **WORDS)
            assert contents(folder) == whole
    assert len(seen) == 6, "writes, flushes and renames failed, for both reasons"


# Passkeys


@pytest.fixture(scope="module")
def passkeys(tokenizer):
    return Passkeys(tokenizer)


@given(st.integers(0, 600), st.floats(0, 1), st.sampled_from(passkey.KEYS))
def test_a_passkey_document_has_its_length_and_its_sentences(tokenizer, passkeys, more, depth, key):
    length = passkeys.shortest + more
    document = passkeys.document(length, depth, key)
    answer = passkeys.answer(key)
    prompt = passkeys.prompt(length - len(answer), depth, key)
    assert len(document) == length
    assert document == prompt + answer
    assert tokenizer.decode(answer) == f" {key}"
    text = tokenizer.decode(prompt)
    info = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    assert text.startswith(passkey.TASK)
    assert text.endswith("\nWhat is the pass key? The pass key is")
    before, after = text.removeprefix(passkey.TASK).split(info)
    after = after.removesuffix(passkey.QUESTION)
    filler = passkey.FILLER * 100
    assert filler.startswith(before)
    assert filler.startswith(after)
    assert len(tokenizer(before)["input_ids"]) == pytest.approx(depth * more, abs=3)  # a cut word has other tokens


def test_a_passkey_document_has_a_shortest_length(passkeys):
    assert len(passkeys.document(passkeys.shortest, 0.5, 12345)) == passkeys.shortest
    with pytest.raises(FarspanError, match=f"ask for {passkeys.shortest} or more"):
        passkeys.document(passkeys.shortest - 1, 0.5, 12345)
    least = passkeys.shortest - len(passkeys.answer(12345))
    with pytest.raises(FarspanError, match=f"ask for {least} or more"):
        passkeys.prompt(least - 1, 0.5, 12345)


def test_no_key_is_both_trained_and_tested():
    rng = np.random.default_rng(0)
    trained = [passkey.train_key(rng) for _ in range(3_000)]
    tested = [passkey.held_out_key(rng) for _ in range(3_000)]
    assert all(key % 11 for key in trained)
    assert not any(key % 11 for key in tested)
    assert set(trained) | set(tested) <= set(range(10_000, 100_000))
    assert min(tested) < 10_300 < 99_700 < max(tested)


# Mixtures


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_no_source_is_ever_a_row_off_its_share_after_a_block(weights):
    parts = mixing._millionths(weights)
    taken = mixing._taken(parts)
    assert sum(parts) == 1_000_000
    blocks = np.arange(len(taken))
    assert (np.diff(taken, axis=0) >= 0).all()
    assert (taken.sum(axis=1) == 1_000 * blocks).all()
    assert (np.abs(taken - np.outer(blocks, parts) / 1_000) < 1).all()
    assert taken[-1].tolist() == parts


def test_shares_are_exact(sources, passkeys):
    tiny = [*sources, Source("tiny", sources[1].shards, 2e-4)]
    mixture = Mixture(tiny, passkeys.shortest + 20, 3, passkeys=passkeys, passkey_share=0.0725)
    origins = [mixture.origin(index) for index in range(10_000)]
    total = sum(source.weight for source in tiny)
    counts = Counter(origin.source for origin in origins)
    for source in tiny:
        assert abs(counts[source.name] - 10_000 * source.weight / total) <= 1
    assert sum(origin.passkey for origin in origins) == 725
    assert {sum(origin.passkey for origin in origins[at : at + 1_000]) for at in range(0, 10_000, 1_000)} == {72, 73}
    with_passkeys = Counter(origin.source for origin in origins if origin.passkey)
    assert with_passkeys["large"] == pytest.approx(725 * 2.5 / total, rel=0.15), "whatever the source"
    order = [origin.source for origin in origins]
    assert order[:1_000] != order[1_000:2_000]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 2), st.booleans())
def test_every_window_comes_once_an_epoch(sources, length, seed, number, inside):
    source = sources[number]
    mixture = Mixture([source], length, seed, inside=inside)
    ends = source.shards.ends
    begins = np.concatenate([[0], ends[:-1]])
    tokens = source.shards.tokens
    if inside:
        count = int(((ends - begins - 1) // length).sum())
    else:
        count = max(tokens // length - 1, 1)
    epochs = [[mixture.origin(epoch * count + place) for place in range(count)] for epoch in range(2)]
    for epoch, origins in enumerate(epochs):
        assert {origin.epoch for origin in origins} == {epoch}
        starts = np.array(sorted(origin.start for origin in origins))
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
            assert (np.diff(targets) == 1).all(), "every token is a target, but for the ends"
            assert starts[0] < length
            assert tokens - len(targets) <= 2 * length
    orders = [[origin.start for origin in origins] for origins in epochs]
    assert orders[0] != orders[1] or count < 3 or length == 1
    assert count < 9 or orders[0] != sorted(orders[0])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 80), st.integers(0, 2**40), st.integers(0, 5_000), st.integers(0, 40), st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_a_row_is_a_pure_function_of_its_number(sources, passkeys, more, seed, start, count, inside, share):
    length = passkeys.shortest + more
    options = dict(inside=inside, passkeys=passkeys, passkey_share=share)
    mixture = Mixture(sources, length, seed, **options)
    rows = mixture.rows(start, count)
    assert rows.shape == (count, length + 1)
    again = pickle.loads(pickle.dumps(Mixture(sources, length, seed, **options)))
    for index in reversed(range(count)):  # another order, another process
        assert rows[index].tolist() == again.row(start + index).tolist()
    if count > 10:
        assert rows.tolist() != mixture.rows(start + 1, count).tolist()
        assert rows.tolist() != Mixture(sources, length, seed + 1, **options).rows(start, count).tolist()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 80), st.integers(0, 2**40), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_a_row_is_what_its_origin_says(tokenizer, sources, passkeys, more, seed, inside, share):
    length = passkeys.shortest + more
    mixture = Mixture(sources, length, seed, inside=inside, passkeys=passkeys, passkey_share=share)
    shards_of = {source.name: source.shards for source in sources}
    for index in range(40):
        origin, row, documents = mixture.origin(index), mixture.row(index), mixture.documents(index)
        eos = shards_of[origin.source].eos
        before = np.concatenate([[0], np.cumsum(row == eos)[:-1]])
        assert documents.tolist() == before.tolist(), "an end of text ends a document, and nothing else does"
        opening = int(np.flatnonzero(row == eos)[0]) + 1 if origin.passkey else 0
        text = shards_of[origin.source].read(origin.start, length + 1)
        assert row[opening:].tolist() == text[: length + 1 - opening].tolist()
        if inside:
            assert documents.max() <= origin.passkey
        if origin.passkey:
            document = tokenizer.decode(row[: opening - 1])
            assert passkeys.shortest <= opening - 1 <= length
            assert document.startswith(passkey.TASK)
            key = int(document.rpartition(" ")[2])
            assert f"The pass key is {key}. Remember it." in document
            assert key % 11


def test_passkeys_have_every_length_and_depth(sources, passkeys):
    mixture = Mixture(sources, passkeys.shortest + 4, 0, passkeys=passkeys, passkey_share=1.0)
    ends = Counter(int(np.flatnonzero(mixture.row(index) == 0)[0]) for index in range(300))
    assert set(ends) == {passkeys.shortest + more for more in range(5)}
    assert len({tuple(row[:30]) for row in mixture.rows(0, 50).tolist()}) == 1, "the task comes first"


def test_a_mixture_says_what_it_cannot_do(tokenizer, sources, passkeys, tmp_path):
    source = sources[0]
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(FarspanError, match="weight of packed"):
            Mixture([Source("packed", source.shards, weight)], 100, 0)
    with pytest.raises(FarspanError, match="millionth"):
        Mixture([source, Source("dust", source.shards, 1e-9)], 100, 0)
    with pytest.raises(FarspanError, match="one source or more"):
        Mixture([], 100, 0)
    tokens = source.shards.tokens
    assert Mixture([source], tokens - 1, 0).row(7).tolist() == source.shards.read(0, tokens).tolist()
    with pytest.raises(FarspanError, match=f"packed has {tokens} tokens in all"):
        Mixture([source], tokens, 0)
    longest = int(np.diff(source.shards.ends, prepend=0).max())
    with pytest.raises(FarspanError, match=f"packed has {longest} tokens in its longest document"):
        Mixture([source], longest, 0, inside=True)
    with pytest.raises(FarspanError, match="needs passkeys"):
        Mixture([source], 100, 0, passkey_share=0.1)
    with pytest.raises(FarspanError, match="no share"):
        Mixture([source], 100, 0, passkeys=passkeys, passkey_share=1.1)
    with pytest.raises(FarspanError, match=f"which takes {passkeys.shortest}"):
        Mixture([source], passkeys.shortest - 1, 0, passkeys=passkeys, passkey_share=0.1)
    other = train_tokenizer([TEXT], 300)
    with pytest.raises(FarspanError, match="use one tokenizer"):
        Mixture([source], 100, 0, passkeys=Passkeys(other), passkey_share=0.1)
    foreign = Source("foreign", pack([Document("a", TEXT)], other, tmp_path / "other"), 1.0)
    with pytest.raises(FarspanError, match="foreign and packed were packed with different tokenizers"):
        Mixture([source, foreign], 100, 0)
