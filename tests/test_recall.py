"""Rows that reward looking far back: spans that stand twice, and facts asked for at the end."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from farspan.data import passkey, recall
from farspan.data.passkey import HELD_OUT
from farspan.data.recall import (
    FACTS,
    NAMES,
    WORDS,
    FactRows,
    PasskeyRows,
    recall_rows,
    repeat_spans,
)
from farspan.evals import needle
from farspan.evals.ruler import Ruler
from farspan.evals.ruler_tasks import RulerTasks, variants

ROW = torch.arange(2048)  # every token once, so that a repetition can only be made


class CharacterTokenizer:
    """Every character is a token."""

    def __call__(self, text: str, **_options) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def text_of(row: torch.Tensor) -> str:
    return "".join(map(chr, row.tolist()))


def repeated(seed: int, min_distance: int, length: int = len(ROW)):
    return repeat_spans(ROW[:length], np.random.default_rng(seed), min_distance)


# Spans that stand twice.


@pytest.mark.parametrize("min_distance", [0, 64, 500, 2000])
def test_known_tokens_follow_the_same_token_far_before(min_distance):
    """Each one: no later span destroys an earlier one."""
    counts = []
    for seed in range(200):
        row, known = repeated(seed, min_distance)
        pairs = (row[:-1] * len(ROW) + row[1:]).numpy()
        _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
        places = known.nonzero()[:, 0].numpy()
        distances = places - 1 - first[inverse[places - 1]]
        assert (distances > min_distance).all(), seed
        counts.append(len(places))
    assert min(counts) >= 1
    assert np.mean(counts) > min(100, (len(ROW) - min_distance) // 4)


def test_tokens_that_stand_twice_are_known_except_the_first_of_a_span():
    for seed in range(200):
        row, known = repeated(seed, 64)
        again = torch.ones_like(known)
        again[np.unique(row.numpy(), return_index=True)[1]] = False
        assert not (known & ~again).any()
        surprises = again & ~known
        assert not (surprises[1:] & surprises[:-1]).any()
        assert 1 <= int(surprises.sum()) <= len(row) // recall.SPAN_EVERY


def test_other_tokens_stay_where_they_were():
    row, known = repeated(0, 64)
    changed = row != ROW
    spans = known.clone()
    spans[:-1] |= known[1:]  # with the first token of each span
    assert bool(changed.any())
    assert torch.equal(changed, spans)
    assert torch.equal(ROW, torch.arange(2048)), "the row itself is not changed"


def test_spans_are_a_function_of_the_generator():
    first, again, other = (repeated(seed, 64) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(("length", "min_distance"), [(1, 0), (3, 0), (20, 17), (20, 20), (20, 99)])
def test_rows_too_short_for_two_spans_stay_unchanged(length, min_distance):
    row, known = repeated(0, min_distance, length)
    assert torch.equal(row, ROW[:length])
    assert not known.any()


@pytest.mark.parametrize("sizes", [(2, 3), (40, 41), (100, 200)])
def test_spans_have_the_sizes_that_are_asked_for(sizes):
    for seed in range(50):
        row, known = repeat_spans(ROW[:512], np.random.default_rng(seed), 64, sizes)
        assert sizes[0] <= int(known.sum()) + 1 < sizes[1], "one span in 512 tokens"
        assert int((row != ROW[:512]).sum()) == int(known.sum()) + 1


@pytest.mark.parametrize(("length", "min_distance"), [(4, 0), (20, 16), (21, 16)])
def test_the_shortest_rows_hold_two_tokens_twice(length, min_distance):
    row, known = repeated(0, min_distance, length)
    assert known.sum() == 1
    assert len(set(row.tolist())) == length - 2


# Facts.


FILLER = torch.tensor([ord("~")] * 2000)


def fact_rows(count: int = 300, length: int = 600) -> list[str]:
    maker = FactRows(CharacterTokenizer())
    rows = [maker.row(FILLER[:length], np.random.default_rng(seed))[0] for seed in range(count)]
    assert all(len(row) == length and row.dtype == FILLER.dtype for row in rows)
    return [text_of(row) for row in rows]


def pattern_of(template: str) -> str:
    fields = {"thing": "|".join(recall.THINGS), "name": "[A-Z][a-z]+", "value": "[a-z0-9 ]+?"}
    several = {f"{field}s": f"{fields[field]}(, {fields[field]})+" for field in ("name", "value")}
    fields |= several | {"source": fields["name"]}
    pattern = re.escape(template)
    for field, allowed in fields.items():
        name = rf"\{{{field}\}}"
        pattern = pattern.replace(name, f"(?P<{field}>{allowed})", 1)
        pattern = pattern.replace(name, f"(?P={field})")
    return pattern


def asked_facts(text: str) -> tuple[list[str], str]:
    """The facts that the end of a row asks for, and the text before the questions."""
    for fact, question in FACTS:
        asked = []
        while match := re.search(pattern_of(question) + r"\Z", text):
            asked.append(fact.format(**match.groupdict()))
            text = text[: match.start()]
        if asked:
            return asked, text
    raise AssertionError(f"no question at the end of {text[-80:]!r}")


@pytest.mark.parametrize(("length", "most"), [(600, 4), (2000, 8)])
def test_every_asked_fact_stands_once_before_the_questions(length, most):
    counts, questions, places = set(), set(), []
    for text in fact_rows(300, length):
        asked, before = asked_facts(text)
        assert len(set(asked)) == len(asked)
        assert all(before.count(fact) == 1 for fact in asked)
        places += [before.index(fact) / len(before) for fact in asked]
        facts = [
            match["name"] for each, _ in FACTS for match in re.finditer(pattern_of(each), before)
        ]
        assert len(set(facts)) == len(facts), "names tell the facts of a row apart"
        counts.add(len(facts))
        questions.add(len(asked))
    assert counts == set(range(1, most + 1))
    assert questions == {1, 2, 3, 4}
    assert min(places) < 0.1
    assert max(places) > 0.8


def test_the_other_tokens_of_a_row_with_facts_are_its_beginning_or_one_span_over_and_over():
    """In their order: facts are put between them, and only the end is cut."""
    letters = torch.arange(0x4E00, 0x4E00 + 600)
    tiled = []
    for seed in range(200):
        row, _ = FactRows(CharacterTokenizer()).row(letters, np.random.default_rng(seed))
        kept = row[row >= 0x4E00]
        assert 50 < len(kept) < 600
        if torch.equal(kept, letters[: len(kept)]):
            continue
        span = kept.unique()
        tiled.append(len(span))
        assert span[-1] - span[0] == len(span) - 1, "it stands so in the row"
        expected = span.repeat(600 // len(span) + 1)[: len(kept)]
        assert torch.equal(kept, expected)
    assert 45 <= len(tiled) <= 90, "a third of the rows"
    assert 16 <= min(tiled) < 24
    assert 120 < max(tiled) < 128


def test_facts_are_a_function_of_the_generator():
    assert fact_rows(20) == fact_rows(20)
    assert len(set(fact_rows(20))) == 20


def test_rows_too_short_for_facts_stay_unchanged():
    maker, short = FactRows(CharacterTokenizer()), 0
    for length in (0, 1, 40, 110):
        for seed in range(20):
            row, _ = maker.row(FILLER[:length], np.random.default_rng(seed))
            assert len(row) == length
            short += torch.equal(row, FILLER[:length])
            if length <= 40:
                assert torch.equal(row, FILLER[:length])
    assert 60 < short < 80, "of 110 tokens some rows hold their facts, and some do not"


def test_facts_that_leave_one_token_of_a_row_are_put_in():
    maker, starts = FactRows(CharacterTokenizer()), set()
    for seed in range(5):
        rows = [
            maker.row(FILLER[:length], np.random.default_rng(seed))[0] for length in range(40, 127)
        ]
        changed = [row for row in rows if ord("~") in row and row.unique().numel() > 1]
        assert text_of(changed[0]).count("~") == 1, "in the shortest row that holds a fact"
        starts.add(text_of(changed[0])[0])
    assert starts - {"~"}, "a fact may begin a row"


@pytest.mark.long
def test_facts_share_nothing_with_the_evaluations():
    """No number of their lengths, no sentence, and none of their words as names or values."""
    texts = [*fact_rows(1000), *(text for text, _ in several_rows(500))]
    numbers = {len(number) for text in texts for number in re.findall(r"\d+", text)}
    evaluated = {
        len(str(number)) for each in (needle.NUMBERS, needle.VALUES) for number in each[:1]
    }
    assert evaluated | {len(str(passkey.KEYS[0]))} == {5, 7}
    assert numbers == set(recall.DIGITS)
    assert not numbers & {5, 7}
    keys = {*needle.ADJECTIVES.split(), *needle.NOUNS.split()}
    assert not keys & {word.lower() for word in (*WORDS, *NAMES)}
    templates = [*FACTS, *recall.LISTS, *recall.TOGETHER, *recall.CHAINS]
    ours = {sentence for each in templates for part in each for sentence in sentences(part)}
    theirs = {sentence for text in evaluation_texts() for sentence in sentences(text)}
    assert len(ours) >= 8
    assert len(theirs) > 10
    assert ours & theirs <= {"question", "answer"}


def sentences(text: str) -> list[str]:
    """The sentences of a template or a text, with every field, number and key as a star."""
    text = re.sub(r"\{\w+\}|\d+|\w+-\w+|VAR [A-Z]{5}", "*", text)
    return [part.strip().lower() for part in re.split(r"[.?!:\n]", text) if part.strip(" *")]


def evaluation_texts() -> list[str]:
    samples = [
        needle.Needle((256,))._make_sample(task, number)
        for task in needle.TASKS
        for number in range(3)
    ]
    asked = [text for sample in samples for text in (*sample.needles, sample.question)]
    passkeys = [passkey.TASK, passkey.FILLER, passkey.INFO, passkey.QUESTION]
    tasks = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt")
    cells = Ruler((512,), tasks).cells()
    prompts = [
        RulerTasks(0, 3, "", {}).prompt(cell, number, variants(cell.task, 512)[0])
        for cell in cells
        for number in (0, 1)
    ]
    ruler = [part for each in prompts for part in (each.head, each.context(8), each.question)]
    return [*passkeys, needle.INTRO, *needle.INTROS.values(), *asked, *ruler]


def test_the_mask_of_a_row_with_facts_covers_the_answers_alone(monkeypatch):
    """With the space in front of them, and the bracket that closes one template."""
    values: list[str] = []
    make_value = recall._value
    monkeypatch.setattr(recall, "_value", lambda rng: values.append(make_value(rng)) or values[-1])
    for seed in range(200):
        values.clear()
        row, answers = FactRows(CharacterTokenizer()).row(FILLER, np.random.default_rng(seed))
        text = text_of(row)
        asked, _ = asked_facts(text)
        pairs = zip(text, answers.tolist(), strict=True)
        runs = "".join(character if marked else "|" for character, marked in pairs)
        marked = [run.removeprefix(" ").removesuffix("]") for run in runs.split("|") if run]
        assert marked == values[: len(asked)]


# Questions with several answers.


def several_rows(count: int = 300, share: float = 1.0) -> list[tuple[str, str]]:
    """The text of each row, and what is marked as its answers."""
    maker = FactRows(CharacterTokenizer(), share)
    rows = [maker.row(FILLER, np.random.default_rng(seed)) for seed in range(count)]
    return [(text_of(row), text_of(row[answers])) for row, answers in rows]


def stated(template: str, text: str) -> list[dict[str, str]]:
    """The fields of every fact of this form."""
    return [match.groupdict() for match in re.finditer(pattern_of(template), text)]


def test_a_question_for_all_values_of_a_name_has_them_in_their_order():
    sizes = set()
    for text, marked in several_rows():
        for fact, question in recall.LISTS:
            if asked := re.search(pattern_of(question) + r"\Z", text):
                facts = stated(fact, text)
                own = [each["value"] for each in facts if each["name"] == asked["name"]]
                assert answers_of(marked) == own
                assert len({each["value"] for each in facts}) == len(facts)
                sizes.add(len(own))
    assert sizes == {2, 3, 4}


def test_a_question_for_several_names_has_the_value_of_each():
    sizes = set()
    for text, marked in several_rows():
        for fact, question in recall.TOGETHER:
            if asked := re.search(pattern_of(question) + r"\Z", text):
                values = {each["name"]: each["value"] for each in stated(fact, text)}
                names = asked["names"].split(", ")
                assert answers_of(marked) == [values[name] for name in names]
                assert len(set(values.values())) == len(values)
                sizes.add(len(names))
    assert sizes == {2, 3, 4}


def test_a_question_for_the_names_of_a_value_follows_who_took_it_over():
    sizes, others = set(), 0
    for text, marked in several_rows():
        for first, later, question in recall.CHAINS:
            if asked := re.search(pattern_of(question) + r"\Z", text):
                owners = [each for each in stated(first, text) if each["value"] == asked["value"]]
                assert len(owners) == 1
                names = [owners[0]["name"]]
                for link in stated(later, text):
                    assert link["source"] == names[-1], "each takes over from the last one before"
                    names.append(link["name"])
                assert answers_of(marked) == names
                sizes.add(len(names))
                others += len(stated(first, text)) - 1
    assert sizes == {2, 3, 4}
    assert others > 50, "names with values of their own"


def answers_of(marked: str) -> list[str]:
    """The answers in the marked text, which has the space before and a closing bracket, too."""
    return marked.removeprefix(" ").removesuffix("]").split(", ")


@pytest.mark.long
def test_the_share_of_rows_with_several_answers():
    counts = [
        sum(", " in marked for _, marked in several_rows(400, share)) for share in (0.0, 0.5, 1.0)
    ]
    assert counts[0] == 0
    assert 135 <= counts[1] <= 215
    assert 320 <= counts[2] <= 380


def test_a_share_of_several_answers_leaves_the_other_rows_as_they_were():
    change = recall_rows(
        0, repeats=0.3, min_distance=64, facts=0.4, several=0.5, tokenizer=CharacterTokenizer()
    )
    before = recall_rows(0, repeats=0.3, min_distance=64, facts=0.4, tokenizer=CharacterTokenizer())
    text = ROW + 0x4E00
    answers = [(change(text, number)[1], before(text, number)[1]) for number in range(200)]
    assert all(new.any() == old.any() for new, old in answers)
    assert any(not torch.equal(new, old) for new, old in answers)
    for number, (new, _) in enumerate(answers):
        if not new.any():
            assert torch.equal(change(text, number)[0], before(text, number)[0])


def test_values_are_numbers_of_the_given_digits_and_one_or_two_words():
    rng = np.random.default_rng(0)
    values = [recall._value(rng) for _ in range(500)]
    numbers = {len(word) for value in values for word in value.split() if word.isdigit()}
    words = {sum(word in WORDS for word in value.split()) for value in values}
    assert numbers == set(recall.DIGITS)
    assert words == {0, 1, 2}
    assert {bool(re.fullmatch("[a-z]+", value)) for value in values} == {True, False}


def test_rows_without_facts_have_no_answers():
    short = FILLER[:40]
    assert not FactRows(CharacterTokenizer()).row(short, np.random.default_rng(0))[1].any()
    change = recall_rows(0, repeats=0.5, min_distance=64)
    assert not any(change(ROW, number)[1].any() for number in range(20))


# Rows that begin with a passkey document.


def test_a_passkey_document_stands_in_front_of_the_text():
    """Its answer is marked and stands in it before, and no key is one that is scored."""
    rows, text = PasskeyRows(CharacterTokenizer()), FILLER[:600]
    lengths = set()
    for seed in range(30):
        row, marks = rows.row(text, np.random.default_rng(seed))
        assert len(row) == len(marks) == len(text)
        answer = text_of(row[marks]).strip()
        assert int(answer) % HELD_OUT, "a key that is scored"
        end = int(marks.nonzero()[-1]) + 1
        document = text_of(row[:end])
        assert document.endswith(f"The pass key is {answer}")
        assert document.count(answer) == 3
        assert torch.equal(row[end:], text[end:])
        lengths.add(end)
    assert len(lengths) > 20
    assert max(lengths) > 500


def test_passkey_documents_of_every_doubling_are_as_frequent():
    """As many below the geometric mean of the shortest and the longest as above it."""
    rows, text = PasskeyRows(CharacterTokenizer()), FILLER[:900]
    ends = []
    for seed in range(400):
        _, marks = rows.row(text, np.random.default_rng(seed))
        ends.append(int(marks.nonzero()[-1]) + 1)
    middle = (min(ends) * max(ends)) ** 0.5
    assert 0.42 < np.mean(np.array(ends) < middle) < 0.58
    assert max(ends) > 850


def test_a_row_as_long_as_the_shortest_document_has_a_passkey():
    rows = PasskeyRows(CharacterTokenizer())
    shortest = rows._documents.shortest
    marks = [rows.row(FILLER[: shortest + more], np.random.default_rng(0))[1] for more in (-1, 0)]
    assert [bool(each.any()) for each in marks] == [False, True]


def test_a_row_without_room_for_a_passkey_stays():
    row, marks = PasskeyRows(CharacterTokenizer()).row(FILLER[:60], np.random.default_rng(0))
    assert torch.equal(row, FILLER[:60])
    assert not marks.any()


def test_an_end_of_text_token_ends_a_passkey_document():
    tokenizer = CharacterTokenizer()
    tokenizer.eos_token_id = 3
    row, marks = PasskeyRows(tokenizer).row(FILLER[:900], np.random.default_rng(0))
    end = int(marks.nonzero()[-1]) + 1
    assert row[end] == 3
    assert torch.equal(row[end + 1 :], FILLER[end + 1 : 900])


def test_shares_of_spans_and_passkeys_add_up():
    change = recall_rows(
        0, repeats=0.4, min_distance=64, passkeys=0.3, tokenizer=CharacterTokenizer()
    )
    text = ROW[:600]
    rows = [change(text, number) for number in range(400)]
    with_answers = sum(bool(marks.any()) for _, marks in rows)
    unchanged = sum(torch.equal(row, text) for row, _ in rows)
    assert 90 <= with_answers <= 150
    assert 90 <= unchanged <= 150


# Windows of a run.


def test_shares_decide_how_many_windows_change():
    tokenizer = CharacterTokenizer()
    change = recall_rows(0, repeats=0.3, min_distance=64, facts=0.2, tokenizer=tokenizer)
    rows = [change(ROW, number)[0] for number in range(400)]
    repeats = sum(len(row.unique()) < len(ROW) - 8 and "Note" not in text_of(row) for row in rows)
    unchanged = sum(torch.equal(row, ROW) for row in rows)
    assert 160 <= unchanged <= 240
    assert repeats >= 60


def test_half_a_window_is_far_enough_if_it_is_shorter_than_the_distance():
    row, _ = recall_rows(0, repeats=1.0, min_distance=len(ROW))(ROW, 0)
    repeated = (row != ROW).nonzero()[:, 0]
    assert len(repeated) > 0
    assert (repeated - row[repeated] >= len(ROW) // 2).all()


def test_a_window_of_a_run_depends_on_seed_and_number_alone():
    change, again = (recall_rows(3, repeats=1.0, min_distance=64) for _ in range(2))
    row, _ = change(ROW, 5)
    assert torch.equal(row, again(ROW, 5)[0])
    assert not torch.equal(row, change(ROW, 6)[0])
    assert not torch.equal(row, recall_rows(4, repeats=1.0, min_distance=64)(ROW, 5)[0])
    assert recall_rows(3, repeats=0.0, min_distance=64) is None
