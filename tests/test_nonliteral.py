"""The nonliteral needles: no word gives an answer away, and unsolved tasks are not reported."""

from __future__ import annotations

import json
import re

import pytest

import farspan
from engine_server import MODEL, EngineServer
from farspan.bundled import BUNDLED_MODELS
from farspan.errors import FarspanError
from farspan.evals.engine import EngineOptions
from farspan.evals.nonliteral import (
    FACTS,
    INTRO,
    NAMES,
    PEOPLE,
    SHORT,
    TASKS,
    NonLiteral,
    first_name,
)

pytestmark = pytest.mark.usefixtures("without_figures", "only_loopback")

TWIN = BUNDLED_MODELS / "nope-twin"
COMMON_WORDS = "a an the and of in on at to by for with from is as that who her its all"


def content_words(text: str) -> set[str]:
    """The words that say something, without their endings."""
    words = set(re.findall(r"[a-z]+", text.lower())) - set(COMMON_WORDS.split())
    return {re.sub(r"(ing|ed|es|s|er)$", "", word) for word in words}


@pytest.fixture(scope="module")
def tokenizer():
    return farspan.load(TWIN).tokenizer


@pytest.mark.parametrize("task", TASKS)
def test_a_needle_shares_no_content_word_with_its_question(task):
    question, kinds = FACTS[task]
    for kind, needles in kinds.items():
        asked = content_words(question.format(kind=kind))
        for needle in needles:
            assert not asked & content_words(needle.format(name="Mara")), needle
            assert kind.lower() not in needle.lower()
            assert needle.count("{name}") == 1


def test_every_needle_belongs_to_one_kind():
    needles = [
        needle for _, kinds in FACTS.values() for group in kinds.values() for needle in group
    ]
    assert len(set(needles)) == len(needles)
    assert len(set(NAMES)) == len(NAMES)
    assert all(len(kinds) > PEOPLE for _, kinds in FACTS.values())


@pytest.mark.parametrize("task", TASKS)
def test_samples_name_people_of_different_kinds(task):
    evaluation = NonLiteral((512,), samples=10)
    asked = []
    for number in range(10):
        sample = evaluation.make_sample(task, number)
        assert sample == evaluation.make_sample(task, number)
        (name,) = sample.answers
        assert name in sample.needles[0]
        assert sum(name in needle for needle in sample.needles) == 1
        kinds = [
            kind
            for needle in sample.needles
            for kind, group in FACTS[task][1].items()
            for phrase in group
            if phrase.replace("{name}", "") in needle
            or needle.strip(" .").endswith(phrase.removeprefix("{name}"))
        ]
        assert len(set(kinds)) == PEOPLE
        assert kinds[0] in sample.question
        asked.append(sample.depths[0])
    assert asked == pytest.approx([number / 9 for number in range(10)])


def test_prompts_have_exactly_their_length(tokenizer):
    evaluation = NonLiteral((512,), samples=3)
    for cell in evaluation.cells():
        samples, rows, answer_tokens = evaluation.prompts(cell, tokenizer)
        for sample, row in zip(samples, rows, strict=True):
            assert len(row) + answer_tokens == cell.length
            text = tokenizer.decode(row)
            assert text.startswith(INTRO.strip())
            assert text.endswith(sample.question)
            assert all(needle in text for needle in sample.needles)


def test_the_first_name_counts():
    assert first_name(" Mara.", ["Mara"]) == 1
    assert first_name(" Mara, not Felix", ["Mara"]) == 1
    assert first_name(" the man Felix, or Mara", ["Mara"]) == 0
    assert first_name(" nobody", ["Mara"]) == 0


class Knowing(EngineServer):
    """A server that knows the facts of some tasks, up to a number of tokens."""

    tasks, reach = TASKS, 10_000

    def _text(self, ids, count):
        text = self.tokenizer.decode(ids)
        for task in self.tasks if len(ids) <= self.reach else ():
            question, kinds = FACTS[task]
            for kind, needles in kinds.items():
                if text.endswith(question.format(kind=kind)):
                    for needle in needles:
                        before, end, _ = text.partition(needle.removeprefix("{name}"))
                        if end:
                            return f" {before.split()[-1]}."
        return " Nobody."


@pytest.fixture
def server(tokenizer):
    server = Knowing(tokenizer)
    yield server
    server.close()


def measure(server, folder, **settings):
    options = EngineOptions(MODEL, str(TWIN))
    return farspan.evaluate(server.url, "nonliteral", folder, engine=options, limit=4, **settings)


def test_only_solved_tasks_are_reported(server, tmp_path):
    """Of an unsolved one only the short length, which says so."""
    server.tasks, server.reach = ("place", "work"), 600
    result = measure(server, tmp_path / "out", lengths=(512, 1024))
    values = {(s.tags["task"], s.metric, s.length): s.value for s in result.scores}
    assert values["place", "recall", 512] == values["work", "recall", SHORT] == 1
    assert values["place", "recall", 1024] == 0
    assert values["average", "effective_length", 1024] == 512
    assert values["animal", "recall", SHORT] == 0
    assert ("animal", "recall", 512) not in values
    assert [s.tags["task"] for s in result.scores if s.tags.get("unsolved")] == ["animal"]
    assert result.notes[0].startswith("animal is not solved at 256 tokens (recall below 0.7)")
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["notes"] == list(result.notes)


@pytest.mark.parametrize(("right", "solved"), [(6, set()), (7, {"place"})])
def test_a_task_is_solved_by_seven_of_ten_right_answers(right, solved):
    samples = [
        {"task": "place", "length": length, "score": float(number < right)}
        for number in range(10)
        for length in (SHORT, 512)
    ]
    assert NonLiteral((512,)).solved(samples) == solved


def test_a_model_without_the_facts_has_no_scores_beyond(server, tmp_path):
    server.tasks = ()
    result = measure(server, tmp_path / "out", lengths=(512,))
    assert {score.length for score in result.scores} == {SHORT}
    assert {score.metric for score in result.scores} == {"recall"}
    assert len(result.notes) == len(TASKS)


def test_small_settings_are_refused():
    with pytest.raises(FarspanError, match="use 1 sample and 256 tokens or more"):
        NonLiteral((128,)).cells()
    with pytest.raises(FarspanError, match="use 1 sample and 256 tokens or more"):
        NonLiteral((256,), samples=0).cells()
    assert [cell.length for cell in NonLiteral((256,), samples=1).cells()] == [256] * len(TASKS)
