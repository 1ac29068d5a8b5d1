"""RULER's prompts have exactly the requested length and the answers that they ask for."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from farspan.bundled import BUNDLED_MODELS
from farspan.errors import CorruptError, FarspanError
from farspan.evals.ruler import (
    ADJECTIVES,
    NIAH_TASKS,
    NOISE,
    NOUNS,
    TASKS,
    Ruler,
    most_units,
    string_match,
)

CITIES = ("Amsterdam", "Berlin", "Cairo", "Dublin", "Essen", "Florence", "Geneva", "Hanover")
TRADES = ("baker", "miller", "sailor", "tailor", "weaver", "farmer", "hunter", "singer", "painter")
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (\S+) is: ([\w-]+)\.")


class WordTokenizer:
    """Every word and every other character is a token; the vocabulary grows with the text."""

    bos_token_id = None

    def __init__(self):
        self.vocabulary: dict[str, int] = {}

    def __call__(self, text, **_):
        pieces = re.findall(r"\w+|\W", text)
        return {"input_ids": [self.vocabulary.setdefault(p, len(self.vocabulary)) for p in pieces]}

    def decode(self, ids):
        pieces = list(self.vocabulary)
        return "".join(pieces[token] for token in ids)


@pytest.fixture(scope="session")
def tokenizers():
    """Three ways to split text: learned subwords, bytes, and words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    byte.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte.decoder = decoders.ByteLevel()
    return {
        "subword": hf.AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin"),
        "byte": hf.PreTrainedTokenizerFast(tokenizer_object=byte),
        "word": WordTokenizer(),
    }


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Questions in the layouts of SQuAD and HotpotQA, with facts of their own."""
    folder = tmp_path_factory.mktemp("questions")

    def fact(city, number):
        return f"The oldest {TRADES[number % 9]} of {city} lives in house {number}. " * 3

    articles = [
        {
            "title": city,
            "paragraphs": [
                {
                    "context": fact(city, number),
                    "qas": [
                        {
                            "question": f"Where lives the oldest {TRADES[number % 9]} of {city}?",
                            "answers": [
                                {"text": f"house {number}"},
                                {"text": f"in house {number}"},
                            ],
                        },
                        {"question": f"Who rules {city}?", "answers": [], "is_impossible": True},
                    ],
                }
                for number in range(place * 200, place * 200 + 200)
            ],
        }
        for place, city in enumerate(CITIES)
    ]
    hops = [
        {
            "question": f"Which letter does the {trade} of {city} send?",
            "answer": f"letter {number}",
            "context": [
                [f"{city} {part}", [f"The {trade} of {city} sends letter {number + part}.", " So."]]
                for part in range(10)
            ],
        }
        for city in CITIES
        for number, trade in zip(range(1000, 90_000, 20), TRADES * 16, strict=False)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    (folder / "hotpot.json").write_text(json.dumps(hops))
    return {"squad": str(folder / "squad.json"), "hotpotqa": str(folder / "hotpot.json")}


# The checker reads the text of a prompt as a person would, with nothing of the generator.


def check_needles(task, text, sample):
    hidden = NEEDLE.findall(text)
    (asked,) = re.findall(r"\nWhat (?:is|are all) the special magic \w+ for (.*?) mentioned", text)
    keys = re.split(r", and |, ", asked)
    assert text.endswith(
        (
            f"for {asked} mentioned in the provided text is",
            f"for {asked} mentioned in the provided text are",
        )
    )
    assert sorted(value for key, value in hidden if key in keys) == sorted(sample.answers)
    uuid = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    kinds = {"niah_single_3": (r"\w+-\w+", uuid), "niah_multikey_3": (uuid, uuid)}
    for key, value in hidden:
        for pattern, word in zip(
            kinds.get(task, (r"\w+-\w+", r"\d{7}")), (key, value), strict=True
        ):
            assert re.fullmatch(pattern, word)
    counts = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
    asked_for = {"niah_multivalue": (1, 4), "niah_multiquery": (4, 4)}
    assert (len(keys), len(sample.answers)) == asked_for.get(task, (1, 1))
    if NIAH_TASKS[task].haystack != "needle":
        assert len(hidden) == counts.get(task, 1)
    else:
        assert len({key for key, _ in hidden}) == len(hidden)


def check_depths(task, text, sample):
    """Lines are noise or needles; the last one is cut."""
    context = text.partition("afterwards.\n")[2].rpartition("\nWhat ")[0]
    if task in NIAH_TASKS and NIAH_TASKS[task].haystack == "essay":
        marks = sorted(context.index(f"is: {answer}") for answer in sample.answers)
        if len(context) > 8000:  # sentences are short against it
            depths = sorted(sample.depths)
            if task != "niah_multikey_1":  # asks for one of four
                wanted = [depth * len(context) for depth in depths]
                assert marks == pytest.approx(wanted, abs=0.15 * len(context))
        return
    if task == "vt":
        context = text.rpartition("following text.\n\n")[2].rpartition("\nQuestion")[0]
    lines = context.split("\n")
    wanted = [line for line in lines if any(answer in line for answer in sample.answers)]
    units = [line for line in lines if line not in wanted]
    whole = [line for line in units if line == NOISE or NEEDLE.fullmatch(line)]
    assert len(units) - len(whole) <= 1
    assert whole == units[: len(whole)]
    places = [lines.index(line) - number for number, line in enumerate(wanted)]
    if task == "vt":
        wanted_places = [int(depth * len(whole)) for depth in sample.depths]
        assert len(wanted) == 5
        assert places == wanted_places
    else:
        assert places == [int(sample.depths[0] * len(whole))]


def check_variables(text, sample):
    context, question = text.rpartition("following text.\n\n")[2].rsplit("\nQuestion: ", 1)
    (value,) = re.findall(r"that are assigned the value (\d{5}) in", question)
    holders = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context):
        if source in holders:
            holders.add(name)
    assert holders - {value} == set(sample.answers)
    assert len(sample.answers) == 5
    assert question.endswith(f"5 variables are assigned the value {value}, they are:")


def check_words(task, text, sample):
    if task == "cwe":
        context = text.rpartition("appear most often.\n")[2].rpartition("\nQuestion: What")[0]
        listed = re.findall(r"(\d+)\. (\w+)", context)
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        words = [word for _, word in listed]
    else:
        context = text.partition("coded words. ")[2].rpartition("\nQuestion: Do not")[0]
        words = [word for word in context.split() if "." not in word]
        assert all(len(word) == 6 for word in words)
    count = len(sample.answers)
    assert count == (10 if task == "cwe" else 3)
    ranked = Counter(words).most_common()
    assert {word for word, _ in ranked[:count]} == set(sample.answers)
    assert ranked[count - 1][1] > ranked[count][1]
    assert not any(answer in word for answer in sample.answers for word, _ in ranked[count:])


def check_documents(task, text, sample):
    context, question = text.partition("given documents.\n\n")[2].rsplit("\n\nAnswer the ", 1)
    context = context.partition("The following are given documents.\n\n")[2] or context
    numbers = [int(number) for number in re.findall(r"(?:^|\n\n)Document (\d+):\n", context)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert question.endswith(" Answer:")
    if task == "qa_1":
        (trade, city) = re.findall(r"lives the oldest (\w+) of (\w+)\?", question)[0]
        place = re.findall(rf"The oldest {trade} of {city} lives in (house \d+)\.", context)
        assert sample.answers[0] in place
        assert sample.answers == (sample.answers[0], f"in {sample.answers[0]}")
    else:
        trade, city = re.findall(r"does the (\w+) of (\w+) send", question)[0]
        assert f"The {trade} of {city} sends {sample.answers[0]}." in context
        assert len(numbers) >= 10


def check(task, text, sample):
    if task in NIAH_TASKS:
        check_needles(task, text, sample)
    if task in NIAH_TASKS or task == "vt":
        check_depths(task, text, sample)
    if task == "vt":
        check_variables(text, sample)
    if task in ("cwe", "fwe"):
        check_words(task, text, sample)
    if task.startswith("qa"):
        check_documents(task, text, sample)


def long_length(length, samples):
    return pytest.param(length, samples, marks=pytest.mark.long)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("length", "samples"),
    [(512, 8), (4096, 2), long_length(512, 1000), long_length(4096, 200), long_length(32_768, 50)],
)
@pytest.mark.parametrize("name", ["subword", "byte", "word"])
def test_prompts_are_exact_and_ask_for_what_they_hide(
    tokenizers, files, name, length, samples, task
):
    tokenizer = tokenizers[name]

    def prompts(length):
        evaluation = Ruler((length,), tasks=(task,), samples=samples, **files)
        return evaluation.prompts(evaluation.cells()[0], tokenizer)

    try:
        made = prompts(length)
    except FarspanError as error:  # too short for the task with this tokenizer
        least = int(re.search(r"needs (\d+) tokens with this tokenizer", str(error))[1])
        assert least > length
        assert (length, name) != (4096, "subword")
        with pytest.raises(FarspanError, match=f"needs {least} tokens"):
            prompts(least - 1)
        length, made = least, prompts(least)
    for sample, row in zip(made[0], made[1], strict=True):
        assert len(row) + made[2] == length
        check(task, tokenizer.decode(row), sample)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_prompts_and_another_one_others(tokenizers, files, task):
    def rows(seed, length=1500):
        evaluation = Ruler((length,), tasks=(task,), samples=2, seed=seed, **files)
        return evaluation.prompts(evaluation.cells()[0], tokenizers["subword"])

    (samples, first, _), (_, second, _), (_, other, _) = rows(0), rows(0), rows(1)
    assert first == second != other
    assert first[0] != first[1]
    assert [sample.answers for sample in rows(0, 3000)[0]] == [sample.answers for sample in samples]


@settings(deadline=None, max_examples=15)
@given(length=st.integers(700, 3000), task=st.sampled_from(TASKS[:11]))
def test_prompts_of_any_length_are_exact(tokenizers, length, task):
    evaluation = Ruler((length,), tasks=(task,), samples=1)
    _, (row,), answer_tokens = evaluation.prompts(evaluation.cells()[0], tokenizers["subword"])
    assert len(row) + answer_tokens == length


def test_words_repeat_as_published(tokenizers):
    def counts(length):
        evaluation = Ruler((length,), tasks=("cwe",), samples=1)
        _, (row,), _ = evaluation.prompts(evaluation.cells()[0], tokenizers["subword"])
        parts = tokenizers["subword"].decode(row).split("appear most often.\n")[1:]
        lists = [re.findall(r"\d+\. (\w+)", part.partition("\nQuestion")[0]) for part in parts]
        return [sorted(Counter(words).values(), reverse=True) for words in lists]

    example, listed = counts(8192)
    assert example == [10] * 10 + [3] * 30
    assert listed[:12] == [30] * 10 + [3] * 2
    example, listed = counts(2048)
    assert example == [3] * 10 + [1] * 10
    assert listed[:11] == [6] * 10 + [1]
    (listed,) = counts(512)
    assert listed[:11] == [3] * 10 + [1]


def test_no_word_contains_another():
    words = [*ADJECTIVES.split(), *NOUNS.split()]
    assert len(set(words)) == len(words) > 200
    assert not [(one, two) for one in words for two in words if one != two and one in two]
    pairs = [one + two for one in ADJECTIVES.split() for two in NOUNS.split()]
    assert len({*pairs, *words}) == len(pairs) + len(words)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    room=st.integers(0, 300),
    least=st.integers(0, 5),
)
def test_as_many_units_as_fit(sizes, room, least):
    least = min(least, len(sizes))
    room = max(room, sum(sizes[:least]))
    units = most_units(lambda number: sum(sizes[:number]), room, least, len(sizes))
    assert sum(sizes[:units]) <= room
    assert units == len(sizes) or sum(sizes[: units + 1]) > room


def test_string_match_is_part_for_questions_and_all_for_the_rest():
    assert (
        string_match("niah_multivalue", " 1234567, 7654321", ["1234567", "7654321", "1", "9"])
        == 0.75
    )
    assert string_match("vt", "abcde", ["ABCDE", "FGHIJ"]) == 0.5
    assert string_match("qa_2", "It was PARIS", ["London", "Paris"]) == 1
    assert string_match("qa_2", "", ["London"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "no lengths"),
        ({"tasks": ("niah_single",)}, "no task 'niah_single'; did you mean niah_single_"),
        ({"tasks": ("qa_2",)}, "the task qa_2 needs a file; add --data hotpotqa=PATH"),
        ({"tasks": ("qa_1",), "squad": "nowhere.json"}, "'nowhere.json' is not a file"),
        ({"samples": 0}, "the ruler setting samples is 0"),
        ({"haystack": "nowhere.txt"}, "'nowhere.txt' is not a file"),
    ],
)
def test_bad_settings_raise_clear_errors(options, message):
    with pytest.raises(FarspanError, match=message):
        Ruler(**{"lengths": (4096,), **options}).cells()


def test_bad_question_files_raise_clear_errors(tokenizers, files, tmp_path):
    def prompts(content, samples=1, length=2000):
        (tmp_path / "file.json").write_text(content)
        evaluation = Ruler((length,), ("qa_1",), samples, squad=tmp_path / "file.json")
        return evaluation.prompts(evaluation.cells()[0], tokenizers["subword"])

    for broken in ("{", "[]", '{"data": [{"paragraphs": [{}]}]}', '{"data": 3}'):
        with pytest.raises(CorruptError, match="file.json is not JSON in the layout of SQuAD"):
            prompts(broken)
    with pytest.raises(FarspanError, match="has no question with an answer"):
        prompts('{"data": []}')
    question = {"question": "Who?", "answers": [{"text": "Ann"}]}
    paragraph = {"context": "Ann was here.", "qas": [question]}
    small = json.dumps({"data": [{"paragraphs": [paragraph]}]})
    with pytest.raises(FarspanError, match=r"have \d+ tokens, but \d+ are needed; use a larger"):
        prompts(small)
    with pytest.raises(FarspanError, match="has 1 questions with answers, but 2 are needed"):
        prompts(small, samples=2)
