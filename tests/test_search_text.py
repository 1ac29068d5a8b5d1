"""The text that a method is fitted on: joined short documents, mixtures, and their splits."""

from __future__ import annotations

import json
import logging
import random
import re
from dataclasses import replace
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from transformers import logging as hf_logging

from farspan.bundled import BUNDLED_MODELS
from farspan.data.documents import Document
from farspan.data.windows import _Reading, cut_windows, split_windows
from farspan.errors import FarspanError
from farspan.files import sha256_of
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.fit import search_windows
from farspan.methods.search_config import SearchConfig
from farspan.methods.swan_config import SwanConfig
from farspan.methods.tuning import TuningConfig
from farspan.train.corpus import DataConfig, pack_mixture
from farspan.train.search_text import (
    describe_search_text,
    find_mixture,
    overlapping,
    read_mixture,
    search_text,
    split_text,
    text_files,
)
from farspan.workflows.extend import extend
from farspan.workflows.pretrain import read_recipe
from farspan.workflows.reproduce_study import ReproduceStudy, read_study
from farspan.workflows.reproduce_texts import StudyTexts

LENGTH, TRAIN_LENGTH = 256, 160
MIX = """
folder = "{folder}"
cache = "{folder}/cache"
passkey = {passkey}
processes = 1

[sources.numbers]
files = "numbers.txt"
weight = 3

[sources.words]
files = "words.txt"
weight = 1
"""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every number stands once, so that shared text would show; passkeys have five digits."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "numbers.txt").write_text(" ".join(map(str, range(100_000, 110_000))))
    (folder / "words.txt").write_text("alpha beta gamma delta " * 4_000)
    return folder


def mixture(folder, passkey: float = 0.0):
    file = folder / f"mix-{passkey}.toml"
    file.write_text(MIX.format(folder=folder, passkey=passkey))
    return file


def numbers_in(tokenizer, ids) -> set[str]:
    """The whole numbers of some windows, without the broken ones at their ends."""
    return {
        number for row in ids for number in re.findall(r"(?<= )\d{6}(?= )", tokenizer.decode(row))
    }


# Documents that are shorter than a window.


def short_documents(count: int) -> list[Document]:
    return [Document(f"d{number}", f"note {number} " * 8) for number in range(count)]


def test_windows_know_their_documents(tokenizer):
    """Documents take turns, and one may have more windows than another."""
    texts = [Document(name, f"{name} " * count) for name, count in (("b", 12), ("c", 4), ("d", 9))]
    windows = cut_windows(texts, tokenizer, 4, 5)
    names = [tokenizer.decode(row).strip()[0] for row in windows.ids]
    assert len(windows.ids) == 5
    assert [texts[number].name for number in windows.documents] == names
    assert sorted(set(windows.documents)) == [0, 1, 2]


def test_the_beginning_of_a_text_has_its_first_tokens(tokenizer):
    text = "Once upon a time, in 1234,  a girl said: don't go (yet)! She\nran home. " * 2
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    for characters in range(len(text)):
        start = _Reading(Document("one", text)).beginning(characters)
        ids = tokenizer(start, add_special_tokens=False)["input_ids"]
        assert len(start) >= characters
        assert ids == whole[: len(ids)]


def test_texts_beyond_the_length_of_a_tokenizer_are_read_without_a_warning():
    """They are cut into windows: transformers would say that they are too long for the model."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin", model_max_length=8)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_warning()
    hf_logging.add_handler(handler)
    try:
        cut_windows([Document("long", "word " * 50)], tokenizer, 16, 1)
        assert not said
        tokenizer("word " * 50)
        assert "is longer than the specified maximum" in said[0]
    finally:
        hf_logging.remove_handler(handler)
        hf_logging.set_verbosity(verbosity)


def test_windows_have_the_tokens_of_the_text_alone():
    """A tokenizer that begins every text with a token does not put it into windows by itself."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")
    begin = ("<|endoftext|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[begin]
    )
    text = "a word " * 20
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer(text)["input_ids"] == [begin[1], *own]
    windows = cut_windows([Document("text", text)], tokenizer, 16, 1)
    assert windows.ids[0].tolist() == own[:16]
    with_begin = cut_windows([Document("text", text)], tokenizer, 16, 1, begin=begin[1:])
    assert with_begin.ids[0].tolist() == [begin[1], *own[:15]]


def test_short_documents_are_joined_with_an_end_of_text_token(tokenizer):
    documents = short_documents(12)
    with pytest.raises(FarspanError, match="no document has 100 tokens"):
        cut_windows(documents, tokenizer, 100, 2)
    windows = cut_windows(documents, tokenizer, 100, 2, join_short=True)
    encoded = [tokenizer(each.text, add_special_tokens=False)["input_ids"] for each in documents]
    stream = [token for ids in encoded for token in (*ids, tokenizer.eos_token_id)]
    assert windows.ids[0].tolist() == stream[:100]
    assert windows.ids[1].tolist() == stream[100:200], "it begins where the first one ends"
    for entry, row in zip(windows.used, windows.ids.tolist(), strict=True):
        first, last = (int(name[1:]) for name in entry["document"].split(" to "))
        assert entry["joined"] == last + 1 - first > 1
        (start,) = entry["starts"]
        assert row[:5] == [*encoded[first], tokenizer.eos_token_id][start : start + 5]
        before_last = sum(len(ids) + 1 for ids in encoded[first:last]) - start
        assert row[before_last:] == [*encoded[last], tokenizer.eos_token_id][: 100 - before_last]


def test_windows_of_joined_documents_lose_almost_no_token(tokenizer):
    """Documents of 78% of a window: joining whole ones would lose a quarter of all tokens."""
    documents = [Document(f"d{number}", f"note {number} " * 28) for number in range(40)]
    encoded = [tokenizer(each.text, add_special_tokens=False)["input_ids"] for each in documents]
    assert {len(ids) for ids in encoded} <= set(range(80, 150))
    length = max(map(len, encoded)) + 30
    windows = cut_windows(documents, tokenizer, length, 1000, join_short=True)
    stream = [token for ids in encoded for token in (*ids, tokenizer.eos_token_id)]
    assert windows.ids.flatten().tolist() == stream[: windows.ids.numel()]
    assert len(stream) - windows.ids.numel() < length
    assert windows.skipped == ()


def test_the_documents_behind_the_last_window_are_listed(tokenizer):
    documents = short_documents(7)
    (size,) = {len(tokenizer(each.text)["input_ids"]) + 1 for each in documents}
    windows = cut_windows(documents, tokenizer, 5 * size // 2, 10, join_short=True)
    assert [entry["document"] for entry in windows.used] == ["d0 to d2", "d2 to d4"]
    assert [entry["document"] for entry in windows.skipped] == ["d5", "d6"]


def test_every_split_tiles_joined_documents_by_its_own_length(tokenizer):
    """A conversion reads windows of the train length, and chooses by longer ones."""
    long = [Document(f"long {number}", f"book {number} " * 200) for number in range(9)]
    lengths, limits = {"search": 60, "choose": 100}, {"search": 100, "choose": 2}
    documents = [*short_documents(9), *long]
    splits = split_windows(documents, tokenizer, lengths, limits, join_short="search")
    encoded = [tokenizer(each.text, add_special_tokens=False)["input_ids"] for each in documents]
    stream = [token for ids in encoded[:9] for token in (*ids, tokenizer.eos_token_id)]
    joined = [stream[start : start + 60] for start in range(0, len(stream) - 59, 60)]
    rows = splits["search"].ids.tolist()
    assert len(joined) > 2
    assert all(row in rows for row in joined)


def test_joining_leaves_the_windows_of_long_documents_as_they_were(tokenizer):
    long = Document("long", "something else entirely " * 100)
    plain = cut_windows([long], tokenizer, 100, 2)
    joined = cut_windows([*short_documents(3), long], tokenizer, 100, 2, join_short=True)
    assert joined.ids.tolist() == plain.ids.tolist()
    assert [entry["document"] for entry in joined.skipped] == ["d0", "d1", "d2"]


def test_empty_documents_count_for_nothing(tokenizer):
    """A line of JSON may have an empty text: it is neither joined nor listed."""
    empty = [Document(f"empty {number}", "") for number in range(150)]
    short = short_documents(12)
    mixed = [*empty, *(each for pair in zip(short, empty, strict=False) for each in pair)]
    windows = cut_windows(mixed, tokenizer, 100, 2, join_short=True)
    without = cut_windows(short, tokenizer, 100, 2, join_short=True)
    assert windows.ids.tolist() == without.ids.tolist()
    assert (windows.used, windows.skipped) == (without.used, without.skipped)
    plain = cut_windows([*mixed, Document("long", "word " * 200)], tokenizer, 100, 2)
    assert [entry["document"] for entry in plain.skipped] == [each.name for each in short]
    with pytest.raises(FarspanError, match=r"no document has 100 tokens .the longest of 150 has 0"):
        cut_windows(empty, tokenizer, 100, 2, join_short=True)


def test_only_the_search_split_gets_joined_documents_if_long_ones_suffice(tokenizer):
    long = [Document(f"long {number}", f"book {number} " * 200) for number in range(9)]
    lengths, limits = (
        {"search": 100, "choose": 80, "report": 80},
        {"search": 30, "choose": 12, "report": 12},
    )
    splits = split_windows(
        [*short_documents(20), *long], tokenizer, lengths, limits, join_short="search"
    )
    names = {name: {entry["document"] for entry in each.used} for name, each in splits.items()}
    assert any(name.startswith("d0 to") for name in names["search"])
    assert not any("to d" in name for name in names["choose"] | names["report"])
    assert len(names["search"] | names["choose"] | names["report"]) >= 10


def test_the_record_says_how_the_search_text_was_made(folder, tokenizer):
    text = {"source": "text notes.txt", "packed": True}
    assert describe_search_text("notes.txt", tokenizer, True) == text
    assert describe_search_text("notes.txt", tokenizer, False) == text | {"packed": False}
    file = mixture(folder, 0.5)
    rows = {"source": f"mixture {file}", "packed": True, "passkey": 0.5}
    assert describe_search_text(file, tokenizer, False) == rows
    (inside := folder / "inside.toml").write_text("inside = true\n" + file.read_text())
    assert describe_search_text(inside, tokenizer, True)["packed"] is False
    without_end = SimpleNamespace(eos_token_id=None)
    assert describe_search_text("notes.txt", without_end, True) == text | {"packed": False}


# Mixtures.


def test_rows_of_a_mixture_have_the_shares_of_its_sources(folder, tokenizer):
    windows = search_text(mixture(folder), tokenizer, LENGTH, 200, TRAIN_LENGTH)
    assert windows.ids.shape == (200, LENGTH)
    texts = [tokenizer.decode(row) for row in windows.ids]
    assert sum("gamma" in text for text in texts) == pytest.approx(50, abs=15)
    assert {entry["source"]: entry["share"] for entry in windows.used} == {
        "numbers": 0.75,
        "words": 0.25,
    }


def test_passkey_documents_of_a_mixture_are_no_longer_than_in_pretraining(folder, tokenizer):
    windows = search_text(mixture(folder, 1.0), tokenizer, LENGTH, 40, TRAIN_LENGTH)
    ends = [row.tolist().index(tokenizer.eos_token_id) for row in windows.ids]
    assert max(ends) <= TRAIN_LENGTH
    assert len(set(ends)) > 5
    assert all("pass key" in tokenizer.decode(row[: TRAIN_LENGTH + 1]) for row in windows.ids)


def test_splits_of_a_mixture_share_no_text(folder, tokenizer):
    lengths = {"search": LENGTH, "choose": 200, "report": 200}
    limits = {"search": 100, "choose": 20, "report": 20}
    splits = split_text(mixture(folder, 0.5), tokenizer, lengths, limits, TRAIN_LENGTH)
    assert {name: tuple(each.ids.shape) for name, each in splits.items()} == {
        "search": (100, LENGTH),
        "choose": (20, 200),
        "report": (20, 200),
    }
    numbers = {name: numbers_in(tokenizer, each.ids) for name, each in splits.items()}
    assert all(len(part) > 300 for part in numbers.values())
    assert not numbers["search"] & numbers["choose"]
    assert not numbers["search"] & numbers["report"]
    assert not numbers["choose"] & numbers["report"]
    assert not any("pass key" in tokenizer.decode(row) for row in splits["report"].ids)


def test_a_mixture_with_little_text_has_fewer_search_windows_or_is_refused(folder, tokenizer):
    lengths = dict.fromkeys(("search", "choose", "report"), LENGTH)
    limits = {"search": 5000, "choose": 8, "report": 8}
    splits = split_text(mixture(folder), tokenizer, lengths, limits, TRAIN_LENGTH)
    assert 30 < len(splits["search"].ids) < 1000
    limits = {"search": 1, "choose": 2000, "report": 2000}
    with pytest.raises(FarspanError, match=r"different windows of 256 tokens, and the splits take"):
        split_text(mixture(folder), tokenizer, lengths, limits, TRAIN_LENGTH)


def test_a_mixture_overlaps_with_the_files_that_it_names(folder):
    assert overlapping(mixture(folder), folder / "words.txt")
    assert overlapping(folder, mixture(folder))
    assert not overlapping(mixture(folder), folder / "other.txt")


RECIPE = """
title = "a small model"
{passkey}
data.folder = "{folder}"
data.cache = "{folder}/cache"
data.processes = 1
data.tokenizer = "not read: the model has its own"

[data.sources.numbers]
files = "numbers.txt"
weight = 3

[data.sources.words]
files = "words.txt"
weight = 1

[train]
length = 64
"""


def pretraining_recipe(folder, passkey: str = ""):
    file = folder / f"recipe{len(passkey)}.toml"
    file.write_text(RECIPE.format(folder=folder, passkey=passkey))
    return file


def test_a_pretraining_recipe_is_a_mixture(folder, tokenizer):
    """The same rows as a mixture file with its keys, passkey documents included."""
    recipe = pretraining_recipe(folder, "data.passkey = 0.5")
    assert read_mixture(recipe) == read_recipe(str(recipe)).data
    lengths = {"search": LENGTH, "choose": 200, "report": 200}
    limits = {"search": 100, "choose": 20, "report": 20}
    splits = split_text(recipe, tokenizer, lengths, limits, TRAIN_LENGTH)
    same = split_text(mixture(folder, 0.5), tokenizer, lengths, limits, TRAIN_LENGTH)
    assert all(splits[name].ids.tolist() == same[name].ids.tolist() for name in lengths)
    assert any("pass key" in tokenizer.decode(row) for row in splits["search"].ids)
    assert overlapping(recipe, folder / "words.txt")
    assert not overlapping(recipe, folder / "other.txt")
    record = {"source": f"mixture {recipe}", "packed": True, "passkey": 0.5}
    assert describe_search_text(recipe, tokenizer, True) == record


def test_a_recipe_has_the_passkey_documents_of_its_pretraining(folder, tmp_path):
    """They are a default of pretraining, unlike in a mixture file."""
    assert read_mixture(pretraining_recipe(folder)).passkey == DataConfig({}).passkey > 0
    (child := tmp_path / "child.toml").write_text('base = "small-nope-nopk"\nseed = 1')
    assert read_mixture(child) == read_recipe("small-nope-nopk").data
    assert read_mixture(child).passkey == 0


def test_recipes_that_come_with_farspan_are_found_by_name():
    assert read_mixture("small-nope.toml", "books") == replace(
        read_recipe("small-nope").data, folder="books"
    )
    assert find_mixture("small-mixture.toml").parent.name == "mixture"
    with pytest.raises(FarspanError, match="data.folder=PATH, or FARSPAN_DATA=PATH"):
        text_files("small-nope.toml", "no such folder")


def test_a_recipe_that_is_no_mixture_is_refused(folder, tmp_path):
    (other := tmp_path / "other.toml").write_text("search.steps = 3")
    with pytest.raises(FarspanError, match="a recipe has no key search"):
        read_mixture(other)
    (both := tmp_path / "both.toml").write_text(
        "sources.x = {files = 'x', weight = 1}\n" + pretraining_recipe(folder).read_text()
    )
    with pytest.raises(FarspanError, match="no key sources; did you mean data.sources"):
        read_mixture(both)


@pytest.mark.usefixtures("without_figures")
@pytest.mark.long
def test_extend_searches_on_a_mixture(folder, tokenizer, tmp_path):
    (tmp_path / "other.txt").write_text("one text to choose by " * 4000)
    (tmp_path / "report.txt").write_text("and one to report on " * 4000)
    data = {
        "search": str(mixture(folder, 0.5)),
        "choose": str(tmp_path / "other.txt"),
        "report": str(tmp_path / "report.txt"),
    }
    search = SearchConfig(steps=2, batch=2, micro_batch=2, lr=(0.1,), init=1.1, beyond=1.0)
    recipe = ExtendConfig(search=search, choose_windows=1, report_windows=1, passkeys=0)
    out = tmp_path / "patch"
    result = extend("nope-twin", 640, out, "headscale", data=data, recipe=recipe)
    assert result.patch.method == "headscale"
    text = (out / "record.json").read_text()
    assert '"source": "numbers"' in text
    made = {"source": f"mixture {data['search']}", "packed": True, "passkey": 0.5}
    assert json.loads(text)["search_text"] == made
    with pytest.raises(
        FarspanError, match="choose=small-nope.toml is a mixture, which only search"
    ):
        choose = {"choose": "small-nope.toml"}
        extend("nope-twin", 640, tmp_path / "no", "headscale", data=data | choose, recipe=recipe)
    with pytest.raises(FarspanError, match="overlap; give three disjoint texts"):
        extend(
            "nope-twin",
            640,
            tmp_path / "other",
            "headscale",
            data=data | {"choose": str(folder / "words.txt")},
            recipe=recipe,
        )


def test_a_search_draws_other_rows_than_pretraining(folder, tokenizer):
    """Also with the same seed: else it would read the same passkeys at the same places."""
    data = read_mixture(mixture(folder, 0.5))
    rows = pack_mixture(data, tokenizer, LENGTH - 1, 0, passkey_length=TRAIN_LENGTH).mixture
    searched = search_text(mixture(folder, 0.5), tokenizer, LENGTH, 200, TRAIN_LENGTH, seed=0).ids
    first, second = (  # rows of four words without a passkey are alike
        {tuple(row) for row in ids.tolist() if len(set(row)) > 8}
        for ids in (rows.rows(0, 200), searched)
    )
    assert min(len(first), len(second)) > 150
    assert not first & second


def test_a_study_searches_on_a_mixture_and_knows_its_files(folder, tokenizer):
    (folder / "choose.txt").write_text("one text to choose by " * 400)
    (folder / "report.txt").write_text("and one to report on " * 400)
    settings = {"choose": "choose.txt", "report": ("report.txt",), "folder": str(folder)}
    study = ReproduceStudy(
        {"nope-twin": ("headscale",)}, search=str(mixture(folder, 0.5)), **settings
    )
    texts = StudyTexts(study)
    windows, others = (
        texts.search_windows("nope-twin", tokenizer, LENGTH, 8, TRAIN_LENGTH, seed)
        for seed in (0, 1)
    )
    assert windows.shape == others.shape == (8, LENGTH)
    assert not (windows == others).all(1).any(), "every seed reads other windows"
    assert sha256_of(folder / "words.txt") in texts.hashes[study.search]
    with pytest.raises(FarspanError, match="must not share text"):
        ReproduceStudy(
            {"nope-twin": ("none",)},
            search=str(mixture(folder, 0.5)),
            **settings | {"choose": "words.txt"},
        )


# How many windows, and how long.


def test_a_search_reads_no_window_twice_if_the_text_has_enough():
    config = ExtendConfig()
    assert search_windows(["headscale"], config, 16_384, 2048) == (18_432, 1600)
    quick = ExtendConfig(search=SearchConfig(quick=True))
    assert search_windows(["headscale"], quick, 16_384, 2048) == (18_432, 400)
    paper = ExtendConfig(search=SearchConfig(steps=200))
    assert search_windows(["headscale"], paper, 16_384, 2048) == (18_432, 1600)
    shorter = ExtendConfig(search=SearchConfig(steps=50, beyond=1.0), search_windows=64)
    assert search_windows(["headlog"], shorter, 16_384, 2048) == (16_384, 64)
    tuned = ExtendConfig(tune="fair", tuning=TuningConfig(batch=4))
    assert search_windows(["yarn"], tuned, 4096, 2048) == (4096, 800), "only searches read beyond"
    assert search_windows(["uniform"], config, 4096, 2048) == (4096, 1)


def test_windows_of_two_methods_hold_the_text_of_a_distillation():
    length, count = search_windows(["swan", "headscale"], ExtendConfig(), 16_384, 2048)
    assert length == 18_432
    assert count * length == pytest.approx(SwanConfig().tokens, rel=0.01)


@pytest.mark.parametrize(("method", "length"), [("swan", 2048), ("swan+headscale", 18_432)])
def test_a_limit_of_search_windows_holds_for_a_distillation(method: str, length: int):
    few = ExtendConfig(search_windows=3)
    assert search_windows(method.split("+"), few, 16_384, 2048) == (length, 3)


@pytest.mark.parametrize("beyond", [0.9, 2.1])
def test_windows_shorter_than_the_target_are_refused(beyond):
    with pytest.raises(FarspanError, match=f"search.beyond is {beyond:g}; choose a factor"):
        SearchConfig(beyond=beyond)


def test_the_study_of_wang_2024_searches_on_the_pretraining_mixture():
    """Sources, weights and passkeys are those of the recipe; text that chooses is left out."""
    study, recipe = read_study("extend-small"), read_recipe("small-nope").data
    mixture = read_mixture(study.search)
    assert mixture.passkey == recipe.passkey > 0
    assert not mixture.inside, "documents are packed"
    weights = [
        {name: source.weight for name, source in data.sources.items()} for data in (mixture, recipe)
    ]
    assert weights[0] == weights[1]
    for name, source in mixture.sources.items():
        assert fnmatch(source.files, recipe.sources[name].files)
        assert not fnmatch(study.choose, source.files)


def test_a_mixture_has_passkey_documents_only_by_request(folder):
    """A pretraining recipe has them by default; they would teach a conversion what is measured."""
    file = mixture(folder)
    file.write_text(file.read_text().replace("passkey = 0.0\n", ""))
    assert read_mixture(file).passkey == 0 < DataConfig({}).passkey


def test_a_study_with_a_mixture_is_read_without_its_texts(tmp_path):
    """Tables of finished cells need no text; a run is refused before anything is trained."""
    study = read_study("extend-small", [f"folder={tmp_path}"])
    for file in (study.choose, *study.report):
        (tmp_path / file).touch()
    message = f"small-mixture.toml cannot be read: {re.escape(str(tmp_path))} has no books_train_a"
    with pytest.raises(FarspanError, match=f"{message}.* the text with folder=PATH, or"):
        StudyTexts(study).check()
    with pytest.raises(FarspanError, match="small-mixture.toml and code_train.jsonl.xz do"):
        (tmp_path / "code_train.jsonl.xz").touch()
        read_study("extend-small", [f"folder={tmp_path}", "choose=code_train.jsonl.xz"])


# Splits of a text.


class CharacterTokenizer:
    """Every character is a token, and the end-of-text token is none of them."""

    eos_token_id = 0

    def __call__(self, texts, **_options):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_splits_share_no_token():
    lengths, limits = (
        {"search": 9, "choose": 8, "report": 8},
        {"search": 100, "choose": 2, "report": 3},
    )
    one = "".join(chr(1000 + number) for number in range(400))
    splits = split_windows([Document("one", one)], CharacterTokenizer(), lengths, limits)
    ids = [set(windows.ids.flatten().tolist()) for windows in splits.values()]
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]  # noqa: PT018
    counts = {name: len(windows.ids) for name, windows in splits.items()}
    assert counts == {"search": 40, "choose": 2, "report": 3}
    many = [Document(str(number), one[number * 40 : number * 40 + 40]) for number in range(10)]
    splits = split_windows(many, CharacterTokenizer(), lengths, limits)
    used = [{entry["document"] for entry in windows.used} for windows in splits.values()]
    assert not used[0] & used[1] and not used[0] & used[2] and not used[1] & used[2]  # noqa: PT018
    with pytest.raises(FarspanError, match="windows that share none of them take at least 25"):
        split_windows([Document("short", one[:20])], CharacterTokenizer(), lengths, limits)


def test_splits_that_need_more_than_there_is_share_it_evenly():
    names = ("search", "choose", "report")
    lengths, limits = dict.fromkeys(names, 8), dict.fromkeys(names, 100)
    document = Document("one", "".join(map(chr, range(1000, 1096))))
    splits = split_windows([document], CharacterTokenizer(), lengths, limits)
    assert [windows.ids.flatten()[[0, -1]].tolist() for windows in splits.values()] == [
        [1000, 1031],
        [1032, 1063],
        [1064, 1095],
    ]


# Splits of joined documents.


def documents_of(*sizes: int) -> list[Document]:
    """Documents whose tokens all differ."""
    ends = [1000 + sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [
        Document(str(number), "".join(map(chr, range(end - size, end))))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def check_shares_no_token(splits) -> None:
    tokens = torch.cat([windows.ids.flatten() for windows in splits.values()])
    counts = torch.bincount(tokens)[1:]  # the end-of-text token apart
    assert int(counts.max()) == 1


LENGTHS = {"search": 9, "choose": 8, "report": 8}
LIMITS = {"search": 100, "choose": 3, "report": 2}


def test_short_documents_serve_every_split():
    """A corpus without any document as long as a window: nothing is shared, and little is lost."""
    splits = split_windows(
        documents_of(*[4] * 30), CharacterTokenizer(), LENGTHS, LIMITS, join_short="search"
    )
    assert {name: len(windows.ids) for name, windows in splits.items()} == {
        "search": (30 * 5 - 3 * 8 - 2 * 8) // 9,
        "choose": 3,
        "report": 2,
    }
    check_shares_no_token(splits)
    for windows in splits.values():
        assert windows.joined == len(windows.ids)
        assert all(entry["joined"] > 1 for entry in windows.used)
        assert [entry["document"] for entry in windows.skipped] == []


def test_joined_documents_only_add_what_long_ones_lack():
    documents = documents_of(*[4] * 40, 27)
    splits = split_windows(documents, CharacterTokenizer(), LENGTHS, LIMITS, join_short="search")
    check_shares_no_token(splits)
    for name, count in (("choose", 3), ("report", 2)):
        first, *rest = splits[name].used
        assert first["document"] == "40", "the long document comes first"
        assert "joined" not in first
        assert len(rest) == count - 1 == splits[name].joined
    windows = cut_windows(documents, CharacterTokenizer(), 9, 5, join_short=True, long_first=True)
    assert [entry["document"] for entry in windows.used[:2]] == ["40", "0 to 1"]
    assert len(windows.used[0]["starts"]) == 3
    assert windows.joined == 2
    enough = cut_windows(documents, CharacterTokenizer(), 9, 3, join_short=True, long_first=True)
    assert enough.joined == 0
    assert len(enough.skipped) == 40


def test_a_document_that_fills_a_window_with_its_end_is_not_joined():
    windows = cut_windows(documents_of(8, 8, 4, 3), CharacterTokenizer(), 9, 9, join_short=True)
    assert [entry["document"] for entry in windows.used] == ["0", "1", "2 to 3"]
    assert windows.joined == 1


def test_documents_that_cannot_be_split_are_joined():
    """Each is as long as a window of every split, and too short for windows of all three."""
    documents = documents_of(*[20] * 5)
    with pytest.raises(FarspanError, match="0 has 20 tokens, and windows that share none of them"):
        split_windows(documents, CharacterTokenizer(), LENGTHS, LIMITS)
    splits = split_windows(documents, CharacterTokenizer(), LENGTHS, LIMITS, join_short="search")
    check_shares_no_token(splits)
    assert [len(windows.ids) for windows in splits.values()] == [7, 3, 2]


def test_too_little_text_is_refused_though_it_is_joined():
    sentence = "2 documents have 24 tokens when joined, and windows that share none of them take at"
    with pytest.raises(FarspanError, match=f"{sentence} least 25"):
        split_windows(
            documents_of(6, 16), CharacterTokenizer(), LENGTHS, LIMITS, join_short="search"
        )
    with pytest.raises(FarspanError, match=r"\(the longest of 2 has 3, and joined they have 7\)"):
        cut_windows(documents_of(2, 3), CharacterTokenizer(), 8, 2, join_short=True)


@pytest.mark.parametrize("seed", range(20))
def test_splits_of_any_documents_share_no_token(seed):
    draw, long = random.Random(seed), seed % 4 / 4  # a quarter of the corpora has short ones only
    weights = [3, 3, 5, 2, long, long, long]
    sizes = draw.choices([0, 1, 3, 8, 12, 30, 200], weights=weights, k=90)
    limits = {"search": draw.choice([1, 20, 500]), "choose": draw.randint(1, 9), "report": 4}
    splits = split_windows(
        documents_of(*sizes), CharacterTokenizer(), LENGTHS, limits, join_short="search"
    )
    check_shares_no_token(splits)
    for name, windows in splits.items():
        assert 0 < len(windows.ids) <= limits[name]
        assert windows.ids.shape[1] == LENGTHS[name]


@pytest.mark.usefixtures("without_figures")
@pytest.mark.long
def test_extend_takes_a_corpus_of_short_documents(tmp_path):
    (file := tmp_path / "notes.jsonl").write_text(
        "".join(json.dumps({"text": f"note {number} " * 20}) + "\n" for number in range(200))
    )
    recipe = ExtendConfig(fitted=False, choose_windows=1, report_windows=2, passkeys=0)
    for data in (file, None):
        names = ("search", "choose", "report")
        each = {name: tmp_path / f"{name}.jsonl" for name in names}
        for copy in each.values():
            copy.write_bytes(file.read_bytes())
        out = tmp_path / ("one" if data else "three")
        result = extend("nope-twin", 640, out, "logn", data=data or each, recipe=recipe)
        note = "1 of 1 windows of the choose split and 2 of 2 windows of the report split hold"
        assert any(text.startswith(note) for text in result.notes)
        record = json.loads((out / "record.json").read_text())
        assert all(entry["joined"] > 1 for entry in record["text"]["report"]["used"])
        assert record["notes"] == list(result.notes)
