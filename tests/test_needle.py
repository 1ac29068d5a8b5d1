"""Needles: prompts of exactly the length asked for, that hold what is asked; recall of what was hidden, and no more."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

import farspan
from families import SHAPE
from farspan.data.documents import read_documents
from farspan.data.tokens import END, train_tokenizer
from farspan.errors import FarspanError
from farspan.evals import needle
from farspan.evals.needle import TASKS, Needle, effective_length, hidden
from farspan.model import FarspanConfig, FarspanForCausalLM

TEXT = next(iter(read_documents("python-docs"))).text


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT[:100_000]], 600)


@pytest.fixture(scope="module")
def twin():
    """The tokenizer of a twin."""
    return farspan.load("nope-twin").tokenizer


def model_of(vocabulary: int, position: str = "none"):
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": vocabulary, "eos_token_id": 0, "pad_token_id": 0, "num_hidden_layers": 2}
    return FarspanForCausalLM(FarspanConfig(**shape, position=position)).eval()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("haystack", ["", "python-docs"])
def test_prompt_and_answer_have_exactly_the_length(tokenizer, task, haystack):
    evaluation = Needle((512, 777, 1500), tasks=(task,), samples=5, haystack=haystack)
    for cell in evaluation.cells():
        riddles, rows, room = evaluation.prompts(cell, tokenizer)
        for riddle, row in zip(riddles, rows, strict=True):
            assert len(row) + room == cell.length
            assert room >= 2 * len(tokenizer(" " + ", ".join(riddle.answers))["input_ids"])
            text = tokenizer.decode(row)
            assert text.endswith(riddle.question)
            for words in riddle.needles:
                assert text.count(words) == 1
            for answer in riddle.answers:
                assert answer in text


def test_the_shortest_length_has_room_for_every_task(twin):
    for cell in Needle((256,), samples=4).cells():
        _, rows, room = Needle((256,), samples=4).prompts(cell, twin)
        assert {len(row) for row in rows} == {256 - room}


def test_tasks_hide_what_they_say(tokenizer):
    evaluation = Needle((1024,), samples=3, keys=5, values=3, queries=2, hops=6, chains=2)
    riddles = {cell.task: evaluation.prompts(cell, tokenizer)[0] for cell in evaluation.cells()}
    counts = {task: (len(found[0].needles), len(found[0].answers)) for task, found in riddles.items()}
    assert counts == {
        "single": (1, 1),
        "multi-key": (5, 1),
        "multi-value": (3, 3),
        "multi-query": (2, 2),
        "variables": (14, 7),
    }
    for found in riddles.values():
        for riddle in found:
            assert len(set(riddle.answers)) == len(riddle.answers)
            assert len(riddle.depths) == len(riddle.needles)
    for task in ("single", "multi-key"):
        assert [riddle.depths[0] for riddle in riddles[task]] == [0, 0.5, 1]
    for riddle in riddles["multi-query"]:
        asked = re.findall(r"[a-z]+-[a-z]+", riddle.question)
        told = [next(words for words in riddle.needles if f" {key} " in words) for key in asked]
        assert [re.search(r"\d{7}", words)[0] for words in told] == list(riddle.answers)


def test_variables_are_assigned_in_their_order(tokenizer):
    evaluation = Needle((1024,), tasks=("variables",), samples=10, chains=2)
    (cell,) = evaluation.cells()
    riddles, rows, _ = evaluation.prompts(cell, tokenizer)
    for riddle, row in zip(riddles, rows, strict=True):
        text = tokenizer.decode(row)
        held: dict[str, str] = {}
        for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text):
            held[name] = held.get(source, source)
        asked = re.search(r"hold (\d{5}) are: VAR$", text)[1]
        assert {name for name, value in held.items() if value == asked} == set(riddle.answers)
        assert len(held) == 10


def test_the_same_seed_hides_the_same_at_every_length(tokenizer):
    def riddles(length: int, seed: int, haystack: str = ""):
        evaluation = Needle((length,), tasks=("multi-key",), samples=4, seed=seed, haystack=haystack)
        return evaluation.prompts(evaluation.cells()[0], tokenizer)

    assert riddles(512, 0) == riddles(512, 0)
    assert riddles(512, 0)[0] == riddles(1024, 0)[0]
    assert riddles(512, 0)[0] != riddles(512, 1)[0]
    rows = riddles(1024, 0, "python-docs")[1]
    assert len({tuple(row[60:100]) for row in rows}) > 1, "haystacks of text begin elsewhere in each sample"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_needles_stand_between_sentences_at_their_depths(sizes, depths):
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    hay = list(range(ends[-1]))
    found = hidden(hay, ends, [[-1 - number] for number in range(len(depths))], depths)
    assert [token for token in found if token >= 0] == hay
    for number, depth in enumerate(depths):
        before = sum(token >= 0 for token in found[: found.index(-1 - number)])
        assert before == max(end for end in ends if end <= depth * len(hay))


def test_a_tokenizer_that_begins_texts_does_so_here(tokenizer):
    begins = train_tokenizer([TEXT[:20_000]], 400)
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, begins.bos_token_id)]
    )
    evaluation = Needle((512,), tasks=("single",), samples=2)
    (cell,) = evaluation.cells()
    for row in evaluation.prompts(cell, begins)[1]:
        assert row.count(begins.bos_token_id) == 1
        assert row[0] == begins.bos_token_id
    assert all(row[0] != tokenizer.bos_token_id for row in evaluation.prompts(cell, tokenizer)[1])


def answering(monkeypatch, tokenizer, evaluation: Needle, how) -> list[dict]:
    samples = []
    for cell in evaluation.cells():
        riddles, rows, _ = evaluation.prompts(cell, tokenizer)
        said = {tuple(row): how(riddle) for riddle, row in zip(riddles, rows, strict=True)}

        def told(model, prompts, tokens, said=said, **_):
            return [tokenizer(said[tuple(row)], add_special_tokens=False)["input_ids"] for row in prompts.tolist()]

        monkeypatch.setattr(needle, "continuations", told)
        samples += evaluation.run(cell, model_of(600), tokenizer)
    return samples


def test_recall_is_the_share_of_what_was_hidden(tokenizer, monkeypatch):
    evaluation = Needle((512, 1024), samples=4, batch=3)
    all_told = answering(monkeypatch, tokenizer, evaluation, lambda riddle: f" {', '.join(riddle.answers)}. And so on")
    nothing = answering(monkeypatch, tokenizer, evaluation, lambda riddle: "")
    one = answering(monkeypatch, tokenizer, evaluation, lambda riddle: f" {riddle.answers[0]}")
    assert {sample["score"] for sample in all_told} == {1}
    assert {sample["score"] for sample in nothing} == {0}
    assert all(sample["score"] == 1 / len(sample["answers"]) for sample in one)
    assert json.loads(json.dumps(one)) == one
    scores = evaluation.score(one)
    recall = {(score.tags["task"], score.length): score.value for score in scores if score.metric == "recall"}
    assert recall["single", 512] == 1
    assert recall["multi-value", 1024] == 1 / 4
    assert recall["average", 1024] == pytest.approx((1 + 1 + 1 / 4 + 1 / 4 + 1 / 5) / 5)
    effective = {score.tags["task"]: score for score in scores if score.metric == "effective_length"}
    assert (effective["single"].value, effective["multi-value"].value, effective["average"].value) == (1024, 0, 0)
    assert all(score.low <= score.value <= score.high for score in scores)
    single = [score for score in scores if score.tags["task"] == "single" and score.metric == "recall"]
    assert all(score.low < 0.6 for score in single), "four that were told do not make a certainty"
    assert (effective["single"].low, effective["single"].high) == (0, 1024)
    assert effective["single"].n == 8


@given(st.dictionaries(st.integers(256, 9999), st.floats(0, 1), min_size=1), st.floats(0, 1))
def test_effective_length_is_the_longest_up_to_which_all_hold(scores, threshold):
    found = effective_length(scores, threshold)
    good = [length for length in scores if all(scores[other] >= threshold for other in scores if other <= length)]
    assert found == max(good, default=0)


def test_on_the_cpu_prompts_are_answered_one_at_a_time(tokenizer, monkeypatch):
    sizes: list[int] = []
    own = needle.continuations
    monkeypatch.setattr(
        needle,
        "continuations",
        lambda model, rows, *rest, **more: (sizes.append(len(rows)), own(model, rows, *rest, **more))[1],
    )
    evaluation = Needle((300,), tasks=("single",), samples=3, batch=2)
    evaluation.run(evaluation.cells()[0], model_of(600), tokenizer)
    assert sizes == [1, 1, 1]
    monkeypatch.setattr(needle, "rows_at_once", lambda model, length, asked: asked)  # as on a GPU
    evaluation.run(evaluation.cells()[0], model_of(600), tokenizer)
    assert sizes[3:] == [2, 1]


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "bloom", "mpt"])
def test_no_sample_depends_on_the_batch(tokenizer, name, monkeypatch):
    monkeypatch.setattr(needle, "rows_at_once", lambda model, length, asked: asked)  # as on a GPU
    shape = {"vocab_size": 600, "n_layer": 2}
    foreign = {
        "bloom": lambda: hf.BloomConfig(**shape, hidden_size=32, n_head=4),
        "mpt": lambda: hf.MptConfig(vocab_size=600, d_model=32, n_heads=4, n_layers=2, max_seq_len=1024),
    }
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(foreign[name]()).eval() if name in foreign else model_of(600, name)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    found = []
    for batch in (1, 4):
        evaluation = Needle((400,), tasks=("single",), samples=4, batch=batch)
        (cell,) = evaluation.cells()
        found.append(evaluation.run(cell, model, tokenizer))
    assert found[0] == found[1]
    assert len(found[0]) == 4
    assert all(sample["prediction"] for sample in found[0])


def test_a_haystack_is_named_whole():
    made = {"task": "single", "length": 256, "score": 1.0, "haystack": "my essays.txt 0123456789abcdef"}
    assert Needle((256,)).score([made])[0].tags["haystack"] == "my essays.txt"
    assert Needle((256,)).score([{**made, "haystack": "filler"}])[0].tags["haystack"] == "filler"


def test_batch_and_threshold_are_no_part_of_a_cell():
    assert Needle((256,), batch=1, threshold=0.1).cells() == Needle((256,)).cells()
    assert Needle((256,), seed=1).cells() != Needle((256,)).cells()
    one, two = (Needle((256,), haystack=f"python-docs/{part}").cells()[0] for part in ("search", "score"))
    assert one.settings["haystack"] != two.settings["haystack"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (255,)}, "needles take 256 tokens, and 255 are asked for"),
        ({"tasks": ("multikey",)}, "no task 'multikey'; the nearest is multi-key"),
        ({"samples": 0}, "needle's samples are 0"),
        ({"hops": 0}, "needle's hops are 0"),
        ({"haystack": "nowhere.txt"}, "'nowhere.txt' is no file"),
    ],
)
def test_bad_settings_are_a_sentence(options, message):
    with pytest.raises(FarspanError, match=message):
        Needle(**{"lengths": (256,), **options}).cells()


def test_what_has_no_room_or_no_text_is_a_sentence(tokenizer, tmp_path):
    def prompts(**options):
        evaluation = Needle((300,), tasks=("multi-key",), samples=1, **options)
        return evaluation.prompts(evaluation.cells()[0], tokenizer)

    with pytest.raises(FarspanError, match=r"300 tokens have no room for multi-key, which takes \d+ without"):
        prompts(keys=40)
    with pytest.raises(FarspanError, match="needle has 576 keys, and 577 are asked for"):
        prompts(keys=577)
    for text in ("Too short.", ""):
        (tmp_path / "hay.txt").write_text(text)
        with pytest.raises(FarspanError, match=r"hay.txt has \d+ tokens, and \d+ are needed"):
            prompts(haystack=str(tmp_path / "hay.txt"), keys=1)


@settings(deadline=None, max_examples=20)
@given(length=st.integers(256, 3000))
def test_any_length_is_met(twin, length):
    evaluation = Needle((length,), tasks=("multi-query",), samples=1)
    _, (row,), room = evaluation.prompts(evaluation.cells()[0], twin)
    assert len(row) + room == length
