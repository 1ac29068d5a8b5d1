"""RULER's prompts have exactly the requested length and the answers that they ask for."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import farspan
from families import SHAPE
from farspan.bundled import BUNDLED_MODELS
from farspan.cli import main
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.evals import ruler, ruler_tasks
from farspan.evals.chat import chat_frame
from farspan.evals.decoding import generate_tokens
from farspan.evals.engine import Generated
from farspan.evals.gates import METRICS
from farspan.evals.ruler import Ruler, most_units, string_match
from farspan.evals.ruler_qa import read_qa
from farspan.evals.ruler_tasks import ANSWER_TOKENS, NIAH_TASKS, NOISE, TASKS, variants
from farspan.evals.ruler_words import ADJECTIVES, NOUNS, draw_depths, draw_words, plain_words
from farspan.model import FarspanConfig, FarspanForCausalLM

pytestmark = pytest.mark.usefixtures("without_figures")

DATA = Path(os.environ.get("FARSPAN_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
ARCHIVE = DATA / "bench.tar.xz"

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
        marks = [context.index(f"is: {answer}") for answer in sample.answers]
        if len(context) > 8000:  # sentences are short against it
            depths = sample.depths[: len(marks)]  # niah_multikey_1 asks for the first of four
            wanted = [depth * len(context) for depth in depths]
            assert marks == pytest.approx(wanted, abs=0.15 * len(context))
        return
    lines = context.split("\n")
    wanted = [line for line in lines if any(answer in line for answer in sample.answers)]
    units = [line for line in lines if line not in wanted]
    whole = [line for line in units if line == NOISE or NEEDLE.fullmatch(line)]
    assert len(units) - len(whole) <= 1
    assert whole == units[: len(whole)]
    places = [lines.index(line) - number for number, line in enumerate(wanted)]
    assert places == [int(sample.depths[0] * len(whole))]


ASSIGNMENT = re.compile(r"VAR [A-Z]{5} = (\d{5}|VAR [A-Z]{5} ) ")


def check_lines_of_variables(text, sample):
    """Noise, or an assignment before noise; the last line is cut, and an empty one follows."""
    context = text.rpartition("following text.\n\n")[2].rpartition("\n\nQuestion")[0]
    lines = context.rstrip("\n").split("\n ")
    whole = [line for line in lines if line.endswith(NOISE)]
    assert len(lines) - len(whole) <= 1
    assert whole == lines[: len(whole)]
    assigned = {place: line for place, line in enumerate(whole) if line != NOISE}
    assert len(assigned) == 5
    assert all(ASSIGNMENT.fullmatch(line.removesuffix(NOISE)) for line in assigned.values())
    free = len(whole) - 4
    assert [*assigned] == [int(depth * free) + place for place, depth in enumerate(sample.depths)]


def check_variables(text, sample):
    context, question = text.rpartition("following text.\n\n")[2].rsplit("\nQuestion: ", 1)
    (value,) = re.findall(r"that are assigned the value (\d{5}) in", question)
    holders = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context):
        if source in holders:
            holders.add(name)
    assert holders - {value} == set(sample.answers)
    assert len(sample.answers) == 5
    assert question.endswith(f"5 variables are assgined the value {value}, they are:")


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
    listed = [word for word, _ in ranked]
    assert not any(one != word and one in word for one in sample.answers for word in listed)


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
        check_depths(task, text, sample)
    if task == "vt":
        check_lines_of_variables(text, sample)
        check_variables(text, sample)
    if task in ("cwe", "fwe"):
        check_words(task, text, sample)
    if task.startswith("qa"):
        check_documents(task, text, sample)


def by_hand(length, samples):
    return pytest.param(length, samples, marks=pytest.mark.manual)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("length", "samples"),
    [(512, 8), (4096, 2), by_hand(512, 1000), by_hand(4096, 200), by_hand(32_768, 50)],
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


class TwoTokensPerCharacter:
    bos_token_id = None

    def __call__(self, text, **_):
        return {"input_ids": [half for letter in text for half in (ord(letter), 0)]}


def test_answers_have_as_many_tokens_as_hsieh_2024_publishes():
    assert [ANSWER_TOKENS[task] for task in TASKS] == [128] * 8 + [30, 120, 50, 32, 32]


@pytest.mark.long
def test_the_answer_has_its_published_room_or_more_if_its_tokens_need_it(tokenizers, files):
    def rooms(tokenizer, tasks=TASKS, length=4096):
        evaluation = Ruler((length,), tasks, 2, **files)
        return [evaluation.prompts(cell, tokenizer)[2] for cell in evaluation.cells()]

    assert rooms(tokenizers["subword"]) == [128] * 8 + [30, 120, 50, 32, 32]
    assert rooms(TwoTokensPerCharacter(), ("vt", "fwe"), 9000) == [2 * (5 * 5 + 5), 50]


NIAH_SETTINGS = {  # of Hsieh 2024: keys hidden, values of each, keys asked for, kind of value
    "niah_single_1": (1, 1, 1, "number"),
    "niah_single_2": (1, 1, 1, "number"),
    "niah_single_3": (1, 1, 1, "uuid"),
    "niah_multikey_1": (4, 1, 1, "number"),
    "niah_multikey_2": (1, 1, 1, "number"),  # and as many others as fit
    "niah_multikey_3": (1, 1, 1, "uuid"),
    "niah_multivalue": (1, 4, 1, "number"),
    "niah_multiquery": (4, 1, 4, "number"),
}


@pytest.fixture(scope="session")
def essay(tmp_path_factory):
    file = tmp_path_factory.mktemp("essay") / "essay.txt"
    file.write_text("The sun rose over the hills. Nobody was awake. " * 40)
    return file


@pytest.mark.parametrize("task", NIAH_SETTINGS)
def test_needles_are_those_of_the_published_settings(task, essay):
    keys, values, queries, kind = NIAH_SETTINGS[task]
    ruler = Ruler((4096,), (task,), 1, essay)
    prompt = ruler._maker.prompt(ruler.cells()[0], 0, ())
    hidden = NEEDLE.findall(prompt.context(0))
    assert Counter(Counter(key for key, _ in hidden).values()) == {values: keys}
    asked = re.search(r" for (.*) mentioned", prompt.question)[1]
    assert len(re.split(r", and |, ", asked)) == queries
    assert {*prompt.answers} == {value for key, value in hidden if key in asked}
    assert len(prompt.answers) == queries * values
    if queries * values > 1:
        assert prompt.head.startswith(f"Some special magic {kind}s are hidden")
        assert prompt.question.startswith(f"\nWhat are all the special magic {kind}s for")
        assert prompt.answer_start.endswith("are")
    else:
        assert prompt.head.startswith(f"A special magic {kind} is hidden")
        assert prompt.question.startswith(f"\nWhat is the special magic {kind} for")
        assert prompt.answer_start.endswith("is")


def test_cells_name_their_haystacks(essay):
    cells = Ruler((4096,), samples=1, haystack=essay).cells()
    names = {cell.task: cell.settings["haystack"].partition(" ")[0] for cell in cells}
    own = {"niah_single_1": "noise", "niah_multikey_2": "needle", "niah_multikey_3": "needle"}
    own |= {"vt": "noise", "cwe": "words", "fwe": "words"}
    assert names == dict.fromkeys(TASKS[:11], "essay.txt") | own


def test_a_long_sentence_is_split_so_that_needles_fit_between_its_parts(tmp_path):
    """Into parts of 40 words, as a table without a full stop would be."""
    file = tmp_path / "table.txt"
    words = [f"w{number}" for number in range(100)]
    file.write_text(" ".join(words) + ". A short one.")
    parts = ruler_tasks._essay(str(file), 512, "table")
    assert [len(part.split()) for part in parts] == [40, 40, 20, 3]
    assert " ".join(parts).replace(".", "").split()[:100] == words


def test_needles_lie_at_40_even_depths():
    depths = draw_depths(np.random.default_rng(0), 40)
    assert sorted(depths) == pytest.approx(np.linspace(0, 1, 40).tolist())


def test_common_words_are_filled_up_by_the_next_words():
    ruler = Ruler((4096,), ("cwe",), 1)
    prompt = ruler._maker.prompt(ruler.cells()[0], 0, (30, 3, 10, 3, 40))

    def listed(text):
        pairs = re.findall(r"(\d+)\. (\S+)", text)
        return [int(number) for number, _ in pairs], [word for _, word in pairs]

    numbers, words = listed(prompt.context(5))
    more, filler = listed(prompt.filler(5, 8))
    assert numbers + more == list(range(1, 30 * 10 + 3 * 5 + 8 + 1))
    assert {*words, *filler} == {*listed(prompt.context(13))[1]}
    assert not {*filler} & {*words}


@pytest.mark.parametrize(("score", "length"), [(0.86, 4096), (0.85, 0)])
def test_a_length_is_effective_from_the_published_threshold_on(score, length):
    """Llama-2-7B's 85.6 at 4K tokens."""
    sample = {"task": "vt", "length": 4096, "haystack": "noise", "score": score}
    *_, effective = Ruler((4096,), ("vt",)).score([sample] * 3)
    assert (effective.metric, effective.value) == ("effective_length", length)
    assert effective.tags["threshold"] == 85.6


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


def test_word_lists_are_the_full_ones_from_4096_tokens_on():
    """RULER's script takes the smaller numbers for a max_seq_length below 4096."""
    repeats = [variants("cwe", length)[0][:2] for length in (4095, 4096)]
    assert repeats == [(6, 1), (30, 3)]


def test_variables_have_five_letters_and_those_of_the_example_three(tokenizers):
    """As in RULER's generate_chains: k = 5, and 3 for the solved example."""
    evaluation = Ruler((4096,), tasks=("vt",), samples=1)
    _, (row,), _ = evaluation.prompts(evaluation.cells()[0], tokenizers["subword"])
    names = re.findall(r"VAR (\w+) =", tokenizers["subword"].decode(row))
    assert [len(name) for name in names] == [3] * 5 + [5] * 5


def parts(word):
    return {word[i:j] for i in range(len(word)) for j in range(i + 1, len(word) + 1)} - {word}


@pytest.mark.long
def test_no_word_contains_another():
    words = plain_words()
    assert len(set(words)) == len(words) > 5000
    assert not [word for word in words if parts(word) & {*words}]
    assert all(re.fullmatch("[a-z]+", word) for word in words)
    pairs = [one + two for one in ADJECTIVES.split() for two in NOUNS.split()]
    assert len({*pairs, *words}) == len(pairs) + len(words)


def test_keys_are_pairs_of_different_words():
    words = [*ADJECTIVES.split(), *NOUNS.split()]
    assert len(set(words)) == len(words) > 200
    assert not [word for word in words if parts(word) & {*words}]


def test_compounds_follow_when_all_words_are_drawn():
    words = [*islice(draw_words(np.random.default_rng(0)), len(plain_words()) + 9)]
    assert {*words[:-9]} == {*plain_words()}
    pairs = {one + two for one in ADJECTIVES.split() for two in NOUNS.split()}
    assert {*words[-9:]} <= pairs


def test_cells_of_changed_prompts_or_depths_have_a_format_of_their_own():
    """So the finished cells of the other tasks stay valid."""
    formats = {cell.task: cell.settings.get("format") for cell in Ruler((4096,)).cells()}
    kept = ("niah_single_2", "niah_single_3")
    assert formats == dict.fromkeys(TASKS[:11], 2) | dict.fromkeys(kept)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    room=st.integers(0, 300),
    least=st.integers(0, 5),
    guess=st.integers(0, 70),
)
def test_as_many_units_as_fit(sizes, room, least, guess):
    least = min(least, len(sizes))
    room = max(room, sum(sizes[:least]))
    units = most_units(lambda number: sum(sizes[:number]), room, least, len(sizes), guess)
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
    with pytest.raises(FarspanError, match=r"has \d+ tokens with .* are needed; use a larger"):
        prompts(small)
    with pytest.raises(FarspanError, match="has 1 questions with answers, but 2 are needed"):
        prompts(small, samples=2)


HOTPOT_ROW = {"question": "When?", "answer": "1990", "context": [["Ann", ["She came."]]]}
SQUAD_QUESTION = {"question": "Who?", "answers": [{"text": "Ann"}]}


def squad_of(question, context="Ann was here."):
    return {"data": [{"paragraphs": [{"context": context, "qas": [question]}]}]}


@pytest.mark.parametrize(
    ("task", "content"),
    [
        ("qa_2", [{**HOTPOT_ROW, "answer": 1990}]),
        ("qa_2", [{**HOTPOT_ROW, "question": None}]),
        ("qa_1", squad_of({"question": 3, "answers": [{"text": "Ann"}]})),
        ("qa_1", squad_of({"question": "Who?", "answers": [{"text": None}]})),
        ("qa_1", squad_of(SQUAD_QUESTION, context=7)),
    ],
)
def test_questions_of_other_types_are_refused(task, content, tmp_path):
    (tmp_path / "file.json").write_text(json.dumps(content))
    with pytest.raises(CorruptError, match=r"is not JSON in the layout of .* \(TypeError\)"):
        read_qa(task, str(tmp_path / "file.json"), task)


def test_questions_with_empty_answers_are_left_out(tmp_path):
    """An empty text is in every prediction."""
    file = tmp_path / "file.json"
    file.write_text(json.dumps([{**HOTPOT_ROW, "answer": " "}, HOTPOT_ROW]))
    assert read_qa("qa_2", str(file), "b").questions == (("When?", ("1990",)),)
    answers = [{"text": ""}, {"text": "Ann"}]
    file.write_text(json.dumps(squad_of({"question": "Who?", "answers": answers})))
    assert read_qa("qa_1", str(file), "c").questions == (("Who?", ("Ann",)),)
    file.write_text(json.dumps(squad_of({"question": "Who?", "answers": answers[:1]})))
    with pytest.raises(FarspanError, match="has no question with an answer"):
        read_qa("qa_1", str(file), "d")


def test_a_small_file_of_questions_is_refused_before_anything_is_measured(tmp_path, tokenizers):
    """By the longest length, and with the question alone."""
    (tmp_path / "file.json").write_text(json.dumps([HOTPOT_ROW] * 2))
    file = str(tmp_path / "file.json")
    evaluation = Ruler((700, 4096), ("fwe", "qa_2"), 1, hotpotqa=file)
    sentence = (
        r"of the question 'When\?' has \d+ tokens with all documents of its file, but \d+ are"
    )
    with pytest.raises(FarspanError, match=sentence):
        evaluation.check_least(tokenizers["subword"])
    replace(evaluation, lengths=(700,), tasks=("fwe",)).check_least(tokenizers["subword"])


def test_the_least_length_is_that_of_all_tasks(tokenizers):
    """One repetition with the named length is enough."""
    evaluation = Ruler((100,), samples=2)
    with pytest.raises(FarspanError, match="of ruler need up to") as refused:
        evaluation.check_least(tokenizers["subword"])
    least = int(re.search(r"use lengths from (\d+) on", str(refused.value))[1])
    replace(evaluation, lengths=(least,)).check_least(tokenizers["subword"])
    with pytest.raises(FarspanError, match=f"the task .* of ruler needs {least} tokens"):
        replace(evaluation, lengths=(least - 1,)).check_least(tokenizers["subword"])


def test_related_documents_of_a_question_are_the_others_of_its_article(tmp_path):
    def paragraph(context):
        answers = [{"text": context}]
        return {"context": context, "qas": [{"question": f"{context}?", "answers": answers}]}

    articles = [[paragraph(context) for context in part] for part in (("a", "b", "c"), ("d",))]
    content = {"data": [{"paragraphs": article} for article in articles]}
    (tmp_path / "file.json").write_text(json.dumps(content))
    file = read_qa("qa_1", str(tmp_path / "file.json"), "file.json")
    assert file.documents == ("a", "b", "c", "d")
    assert file.given == ((0,), (1,), (2,), (3,))
    assert file.related == ((1, 2), (0, 2), (0, 1), ())


# The evaluation.


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A small random model with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    text = next(iter(read_documents("python-docs/score"))).text
    tokenizer = train_tokenizer([text[:40_000]], 800)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 800, "num_hidden_layers": 1}
    FarspanForCausalLM(FarspanConfig(**shape, position="none")).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scores_of(evaluation, answer):
    """The scores if the model answered every prompt of three samples with `answer(task)`."""
    answers = ["1111111", "2222222", "3333333", "4444444"]
    samples = [
        {
            "task": cell.task,
            "length": cell.length,
            "haystack": cell.settings["haystack"],
            "score": string_match(cell.task, answer(cell), answers),
        }
        for cell in evaluation.cells()
        for _ in range(3)
    ]
    return {
        (score.tags["task"], score.metric, score.length): score
        for score in evaluation.score(samples)
    }


def test_the_average_says_of_how_many_tasks_it_is(files):
    everything = "1111111 2222222 3333333 4444444"
    half = "1111111 3333333"

    def answer(cell):
        return everything if cell.length < 8192 else half if cell.task == "vt" else everything

    evaluation = Ruler((4096, 8192), samples=3)
    scores = scores_of(evaluation, answer)
    assert scores["average_of_11", "string_match", 4096].value == 100
    assert scores["vt", "string_match", 8192].value == 50
    average = scores["average_of_11", "string_match", 8192]
    assert average.value == pytest.approx((10 * 100 + 50) / 11)
    assert (average.n, average.tags["tasks"]) == (33, 11)
    assert average.low < average.value < average.high <= 100.0001
    assert scores["average_of_11", "effective_length", 8192].value == 8192
    strict = scores_of(replace(evaluation, threshold=96), answer)
    assert strict["average_of_11", "effective_length", 8192].value == 4096
    assert strict["average_of_11", "effective_length", 8192].tags["threshold"] == 96
    assert Ruler((4096,)).threshold == 85.6
    for tasks in (("vt",), ("vt", "cwe")):
        part = Ruler((4096, 8192), tasks, 3)
        assert {score.key for score in scores_of(part, answer).values()} == set(part.score_keys())
    whole = scores_of(Ruler((4096,), TASKS, 3, **files), answer)
    assert whole["average_of_13", "string_match", 4096].n == 39
    assert whole["qa_1", "string_match", 4096].tags["haystack"] == "squad.json"


@pytest.mark.long
def test_a_model_runs_the_suite(tiny, tmp_path, files):
    result = farspan.evaluate(
        tiny,
        "ruler",
        tmp_path / "results",
        lengths=[1200],
        limit=1,
        data={"squad": files["squad"]},
    )
    assert {score.tags["task"] for score in result.scores} == {*TASKS[:12], "average_of_12"}
    evaluation = Ruler((1200,), TASKS[:12], squad=files["squad"])
    assert [score.key for score in result.scores] == evaluation.score_keys()
    assert {key.metric for key in evaluation.score_keys()} <= {*METRICS}
    lines = (tmp_path / "results" / "samples" / "ruler.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 12
    for sample in samples:
        assert sample["tokens"] + sample["answer_tokens"] == 1200
        assert sample["score"] == string_match(
            sample["task"], sample["prediction"], sample["answers"]
        )


def test_a_batch_size_is_used_recorded_and_noted(tiny, tmp_path, monkeypatch):
    sizes = []

    def generate(model, rows, *rest, **more):
        sizes.append(len(rows))
        return generate_tokens(model, rows, *rest, **more)

    monkeypatch.setattr("farspan.evals.answers.generate_tokens", generate)
    settings = {"lengths": [700], "limit": 3, "tasks": ("fwe",), "batch_size": 2}
    result = farspan.evaluate(tiny, "ruler", tmp_path / "out", **settings)
    assert sizes == [2, 1]
    assert "2 prompts were answered at a time" in result.notes[0]
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["settings"]["batch_size"] == 2
    with pytest.raises(FarspanError, match="--batch-size is 0; use 1 or more"):
        farspan.evaluate(tiny, "ruler", tmp_path / "out", **{**settings, "batch_size": 0})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--lengths", "256"],
            r"the tasks niah_single_1, .* of ruler need up to \d+ tokens with this tokenizer,",
        ),
        (["--lengths", "600", "--tasks", "vt,cwee"], "ruler has no task 'cwee'; did you mean cwe?"),
        (
            ["--lengths", "900", "--tasks", "fwe", "--data", "squad=absent.json"],
            "'absent.json' is not a file; check the path",
        ),
        (
            ["--lengths", "900", "--tasks", "fwe", "--data", "haystack=absent.txt"],
            "'absent.txt' is not a file, folder or data set",
        ),
        (["--lengths", "600", "--tasks", "qa_1"], "the task qa_1 needs a file; add --data squad="),
        (["--data", "essays=x.txt"], "it takes haystack=PATH, squad=PATH, hotpotqa=PATH"),
        (["--system-instruction", "Be brief."], "is part of a chat; add --apply-chat-template"),
        (
            ["--suite", "needle", "--lengths", "256", "--tasks", "vt"],
            "needle has no task 'vt'; choose one of single, multi-key",
        ),
        (
            ["--suite", "nonliteral", "--tasks", "vt"],
            "suite nonliteral does not use --tasks vt; remove it",
        ),
        (
            ["--suite", "needle", "--apply-chat-template"],
            "suite needle does not use --apply-chat-template; remove it",
        ),
        (["--suite", "paper", "--threshold", "3"], "suite paper needs pg19"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    tiny, tmp_path, capsys, monkeypatch, words, message
):
    suite = [] if "--suite" in words else ["--suite", "ruler"]
    command = ["farspan", "eval", str(tiny), *suite, *words, "-o", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "results").exists()


# Chat models.

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_prompts_are_the_template_around_the_message(tokenizers, tiny, system):
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny)
    frame = chat_frame(tokenizer, system)
    before = "[system]Be brief.[end][user]" if system else "[user]"
    assert frame == (before, "[end][assistant]<think></think>")
    for length in (1400, 1401):
        evaluation = Ruler((length,), samples=2, frame=frame)
        for cell in evaluation.cells():
            samples, rows, answer_tokens = evaluation.prompts(cell, tokenizer)
            for sample, row in zip(samples, rows, strict=True):
                assert len(row) + answer_tokens == length
                text = tokenizer.decode(row)
                assert text.startswith(before + sample.head)
                assert text.endswith(f"{sample.question}{frame[1]}{sample.answer_start}")
                message = text.removeprefix(before).replace(frame[1], " ")
                check(cell.task, message, sample)


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_thinking_is_off_in_templates_with_either_switch(tiny, switch):
    """Qwen's and DeepSeek's."""
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if " + switch + " %}<think>{% else %}</think>{% endif %}"
    )
    assert chat_frame(tokenizer) == ("", "</think>")


@pytest.mark.parametrize(
    ("beginning", "shown"),
    [
        ("\n {{ date_string }}", "\n 26 Jul 2024"),
        ("\n {{ strftime_now('%Y-%m-%d') }}", "\n 2024-07-26"),
        (" {% set today = strftime_now('%d %B %Y') %}{{ today }}", "26 July 2024"),
        (" {% if date_string is not defined %}{{ strftime_now('%b') }}{% endif %}", ""),
    ],
)
def test_a_template_shows_the_same_date_every_day(beginning, shown, tiny):
    """Llama's takes an argument; Mistral's and gpt-oss's ask for today. White space stays."""
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = beginning + TEMPLATE
    assert chat_frame(tokenizer) == (f"{shown}[user]", "[end][assistant]<think></think>")


def test_the_template_decides_the_begin_of_text_token(tiny):
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $0",
        special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)],
    )
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    for frame in (None, chat_frame(tokenizer)):
        evaluation = Ruler((900,), ("fwe",), 1, frame=frame)
        _, ((first, second, *rest),), answer_tokens = evaluation.prompts(
            evaluation.cells()[0], tokenizer
        )
        assert (first, len(rest) + 2 + answer_tokens) == (tokenizer.bos_token_id, 900)
        assert tokenizer.bos_token_id not in (second, *rest)


def test_templates_that_do_not_work_raise_clear_errors(tiny):
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny)
    for template, system, message in (
        (None, None, "has no chat template; leave --apply-chat-template out"),
        ("{{ raise_exception('no system role') }}", "x", "failed .no system role.; leave --system"),
        ("{{ messages[0].role }}", None, "leaves the user's message out"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(FarspanError, match=message):
            chat_frame(tokenizer, system)


def test_the_command_applies_the_chat_template(tiny, tmp_path, capsys, monkeypatch):
    frames = []
    monkeypatch.setattr(Ruler, "check_least", lambda self, _: frames.append(self.frame))
    words = ["--tasks", "fwe", "--lengths", "900", "--limit", "1", "--threshold", "10"]
    chat = ["--apply-chat-template", "--system-instruction", "Be brief."]
    for number, more in enumerate(([], chat)):
        folder = str(tmp_path / str(number))
        command = ["farspan", "eval", str(tiny), "--suite", "ruler", *words, *more, "-o", folder]
        monkeypatch.setattr("sys.argv", [*command, "--json"])
        with pytest.raises(SystemExit) as error:
            main()
        assert error.value.code in (0, None)
        scores = json.loads(capsys.readouterr().out)["scores"]
        assert [score["metric"] for score in scores] == ["string_match", "effective_length"]
        assert scores[1]["tags"]["threshold"] == 10
    assert frames == [None, ("[system]Be brief.[end][user]", "[end][assistant]<think></think>")]


# The official generator's prompts, which are not part of the repository.


@pytest.fixture(scope="session")
def official():
    if not ARCHIVE.exists():
        pytest.skip(f"{ARCHIVE} is not there")
    with tarfile.open(ARCHIVE) as archive:
        file = archive.extractfile("bench/ruler/4096_niah_multikey_3.jsonl")
        return [json.loads(line) for line in file]


def test_official_prompts_have_our_form(official, tokenizers):
    """The official texts, and ours without the cut line, follow from their facts alike."""
    evaluation = Ruler((4096,), ("niah_multikey_3",), 3)
    samples, rows, _ = evaluation.prompts(evaluation.cells()[0], tokenizers["subword"])
    ours = [
        (tokenizers["subword"].decode(row), sample.answers)
        for sample, row in zip(samples, rows, strict=True)
    ]
    theirs = [(row["input"], tuple(row["outputs"])) for row in official]
    assert len(theirs) > 100
    for text, answers in [*ours, *theirs]:
        facts = NEEDLE.findall(text)
        ((key, value),) = [fact for fact in facts if fact[1] in answers]
        lines = [f"One of the special magic uuids for {k} is: {v}." for k, v in facts]
        head, tail = (
            "A special magic uuid is hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the uuid afterwards.",
            f"What is the special magic uuid for {key} mentioned in the provided text? "
            f"The special magic uuid for {key} mentioned in the provided text is",
        )
        first, *middle, last = text.split("\n")
        assert (first, last, value) == (head, tail, answers[0])
        assert middle[: len(lines)] == lines
        assert len(middle) - len(lines) <= ((text, answers) in ours)


def test_scores_agree_on_official_prompts(official):
    """RULER's string_match_all, written here from its definition, on right and wrong answers."""
    for number, row in enumerate(official):
        answer = row["outputs"][0]
        near = NEEDLE.findall(row["input"])[number % 7][1]
        for text in (f" {answer}.", answer.upper(), answer[:-1], near, f"{near}, {answer}", ""):
            expected = sum(1.0 if each.lower() in text.lower() else 0.0 for each in row["outputs"])
            expected /= len(row["outputs"])
            assert string_match("niah_multikey_3", text, row["outputs"]) == expected


def test_samples_say_which_form_of_a_task_they_have(tokenizers, monkeypatch):
    """Without the solved example, where a length has no room for it."""

    def answers(model, tokenizer, rows, *_):
        return [Generated("", len(row)) for row in rows]

    monkeypatch.setattr(ruler, "generate_texts", answers)
    tokenizer = tokenizers["subword"]
    forms = []
    for task, length in (("vt", 450), ("vt", 4096), ("cwe", 700), ("cwe", 2048), ("fwe", 1024)):
        evaluation = Ruler((length,), tasks=(task,), samples=1)
        (sample,) = evaluation.run(evaluation.cells()[0], None, tokenizer)
        forms.append(sample.get("form"))
    assert forms == ["short", "published", "short", "published", None]
