"""RULER's prompts have the layout, counts and scores of lm-evaluation-harness's own generators."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import transformers as hf

from farspan.bundled import BUNDLED_MODELS
from farspan.evals.ruler import Ruler, string_match
from farspan.evals.ruler_qa import read_qa
from farspan.evals.ruler_tasks import ANSWER_TOKENS, NIAH_TASKS, TASKS, RulerPrompt, variants
from farspan.evals.ruler_words import ADJECTIVES, NOUNS, plain_words

SENTENCE = "Nobody was awake at noon."  # the harness cuts essays after 500 words
CATEGORIES = {
    "noun": [*plain_words()[::2]],
    "adjective": [*plain_words()[1::2]],
    "verb": [],
    "nouns": NOUNS.split(),
    "adjectives": ADJECTIVES.split(),
    "verbs": [],
}
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def harness():
    """The harness's modules of RULER, with words and essays of ours: it downloads its own."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    nltk = pytest.importorskip("nltk", reason="nltk, which the harness's RULER needs, is missing")
    words = ModuleType("wonderwords")
    words.RandomWord = lambda: SimpleNamespace(_categories=CATEGORIES)
    names = ("common", "cwe", "fwe", "niah", "qa", "vt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wonderwords", words)
        patch.setattr(nltk.data, "find", lambda name: name)  # its rule to split sentences
        modules = {
            name: importlib.import_module(f"lm_eval.tasks.ruler.{name}")
            for name in (*(f"{name}_utils" for name in names), "prepare_niah")
        }
        split = re.compile(r"(?<=\.) ").split
        patch.setattr(modules["prepare_niah"], "cached_sent_tokenize", split)
        essay = " ".join([SENTENCE] * 2000).split(" ")
        haystack = modules["prepare_niah"].get_haystack
        given = {"essay": lambda **_: essay}
        patch.setattr(
            modules["niah_utils"],
            "get_haystack",
            lambda type_haystack: given.get(type_haystack, haystack)(type_haystack=type_haystack),
        )
        random.seed(0)
        np.random.seed(0)
        yield SimpleNamespace(**modules)


@pytest.fixture(scope="module")
def tokenizer():
    return hf.AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")


@pytest.fixture(scope="module")
def essay(tmp_path_factory):
    file = tmp_path_factory.mktemp("essay") / "essay.txt"
    file.write_text(" ".join([SENTENCE] * 2000))
    return file


def prompt_of(evaluation: Ruler, variant: int = 0) -> RulerPrompt:
    (cell,) = evaluation.cells()
    return evaluation._maker.prompt(cell, 0, variants(cell.task, cell.length)[variant])


def text_of(prompt: RulerPrompt, units: int) -> str:
    """With whole units only, as the harness has them."""
    return f"{prompt.head}{prompt.context(units)}{prompt.question} {prompt.answer_start}"


def full_text(sample: dict) -> str:
    return f"{sample['input']} {sample['gen_prefix']}"


def masked(text: str, *patterns: str) -> str:
    for number, pattern in enumerate(patterns):
        text = re.sub(pattern, f"<{number}>", text)
    return text


UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def needles_masked(text: str) -> tuple[str, Counter[str], str]:
    """What is before, in and behind the haystack, without its words, numbers and order."""
    text = re.sub(r"[a-z]+-[a-z]+|" + UUID, "<0>", re.sub(r"\b\d{7}\b", "<1>", text))
    head, context, question = re.fullmatch(
        r"(.*?afterwards\.\n)(.*)(\nWhat .*)", text, re.DOTALL
    ).groups()
    separator = "\n" if "\n" in context else r"(?<=\.) +"  # two where no sentence is between
    return head, Counter(re.split(separator, context.strip())), question


@pytest.mark.parametrize("task", NIAH_TASKS)
def test_needles_are_hidden_as_in_the_harness(task, harness, tokenizer, essay, monkeypatch):
    samples = []

    def generate(*arguments, **settings):
        samples.extend(
            harness.prepare_niah.generate_samples(*arguments, **{**settings, "num_samples": 2})
        )

    monkeypatch.setattr(harness.niah_utils, "generate_samples", generate)
    monkeypatch.setattr(harness.niah_utils, "download_dataset", list)
    monkeypatch.setattr(harness.niah_utils, "get_tokenizer", lambda name: tokenizer)
    getattr(harness.niah_utils, task)(max_seq_lengths=[2048], tokenizer="")
    ours = prompt_of(Ruler((2048,), (task,), 1, essay))
    for sample in samples:
        theirs = needles_masked(full_text(sample))
        hidden = theirs[1].total() - len(ours.depths)
        assert hidden > 4
        assert needles_masked(text_of(ours, hidden)) == theirs
        assert len(ours.answers) == len(sample["outputs"])


def variables_masked(text: str) -> Counter[str]:
    """Lines, whose order is random; the first one of a context has no space before it."""
    text = masked(text, r"\b[A-Z]{3}\b(?<!VAR)", r"\b[A-Z]{5}\b", r"\b\d{5}\b")
    return Counter(re.split(r"\n (?=VAR|The)|(?<=text\.\n\n)|(?=\n\nQuestion)", text))


def test_a_chain_is_hidden_as_in_the_harness(harness, tokenizer):
    make = harness.vt_utils.sys_vartrack_w_noise_random
    (example,) = make(tokenizer, 1, 500, 5)  # the call of get_dataset, which makes 500 samples
    ours = prompt_of(Ruler((2048,), ("vt",), 1))
    for sample in make(tokenizer, 2, 2048, icl_example=example):
        text = full_text(sample)
        units = text.count("grass") - example["input"].count("grass")
        assert variables_masked(text_of(ours, units)) == variables_masked(text)
        assert len(ours.answers) == len(sample["outputs"])


def counted_words(text: str) -> tuple[str, list[list[int]]]:
    """The text with a mark for each word of a list, and how often each word is in each list."""
    lists = re.findall(r"(?:^|(?<=\n))1\. .*", text)
    words = [re.findall(r"\d+\. ([a-z]+)", each.partition(" Answer")[0]) for each in lists]
    return re.sub(r"(\d+\.) [a-z]+", r"\1 <>", text), [
        sorted(Counter(each).values(), reverse=True) for each in words
    ]


@pytest.mark.parametrize(("length", "words"), [(2048, 60), (4096, 200), (32_768, 900)])
def test_words_are_listed_as_in_the_harness(length, words, harness):
    """Whose task leaves out the example that it makes, and a space that RULER has by now."""
    example, text, answers = harness.cwe_utils.generate_input_output(words, length)
    ours = prompt_of(Ruler((length,), ("cwe",), 1))
    text = "{}\n{}".format(example.replace(" list are:1. ", " list are: 1. "), text)
    assert counted_words(text_of(ours, words - 10)) == counted_words(text)
    assert len(ours.answers) == len(answers) == 10


@pytest.mark.parametrize("length", [2048, 4096, 8192])
def test_coded_words_are_counted_as_in_the_harness(length, harness):
    words = 2 * (length // 50) ** 2  # so that every word of the vocabulary appears

    def counts(text):
        head, context, question = re.fullmatch(
            r"(.*coded words\. )(\S.*?)(\nQuestion.*)", text, re.DOTALL
        ).groups()
        each = Counter(context.split(" "))
        assert {len(word) for word in each} == {3, 6}
        return head, each.pop("..."), sorted(each.values()), question

    none = SimpleNamespace(input_ids=())
    text, answers, _ = harness.fwe_utils.generate_input_output(
        length, lambda text: none, words, vocab_size=length // 50
    )
    ours = prompt_of(Ruler((length,), ("fwe",), 1))
    assert counts(text_of(ours, words)) == counts(text)
    assert len(ours.answers) == len(answers) == 3


SQUAD = {
    "data": [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"{title} has {number} gates.",
                    "qas": [
                        {
                            "question": f"How many gates has {title}?",
                            "answers": [{"text": f"{number}"}, {"text": f"{number} gates"}],
                            "is_impossible": False,
                        }
                    ],
                }
                for number in range(11, 15)
            ],
        }
        for title in ("Cairo", "Essen", "Rome")
    ]
}
HOTPOTQA = [
    {
        "question": f"Who rules {title}?",
        "answer": f"King {title}",
        "context": [[f"{title} {part}", [f"It has {part} towns.", " So."]] for part in range(3)],
    }
    for title in ("Norway", "Spain", "Tonga")
]


def documents(text: str) -> tuple[list[str], list[int], list[str]]:
    """The documents in any order, their numbers, and the rest with its line breaks."""
    parts = re.split(r"(?<=\n\n)(?=Document |Answer )", text)
    numbered = [re.fullmatch(r"Document (\d+):\n(.*\n\n)", part, re.DOTALL) for part in parts]
    others = [part for part, match in zip(parts, numbered, strict=True) if not match]
    matches = [match.groups() for match in numbered if match]
    return sorted(text for _, text in matches), [int(number) for number, _ in matches], others


@pytest.mark.parametrize(("task", "content"), [("qa_1", SQUAD), ("qa_2", HOTPOTQA)])
def test_documents_are_those_of_the_harness(task, content, harness, tmp_path, monkeypatch):
    reader = {"qa_1": harness.qa_utils.read_squad, "qa_2": harness.qa_utils.read_hotpotqa}[task]
    monkeypatch.setattr(harness.qa_utils, "download_json", lambda url: content)
    questions, texts = reader.__wrapped__()
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    ours = prompt_of(Ruler((4096,), (task,), 1, squad=file, hotpotqa=file))
    asked = ours.question.rpartition("Question: ")[2]
    read = read_qa(task, str(file), task)
    index = next(
        number
        for number, each in enumerate(questions)
        if each["query"] == asked and tuple(each["outputs"]) == ours.answers
    )
    given, related = len(questions[index]["context"]), questions[index].get("more_context", [])
    assert sorted(read.documents) == texts
    for units in (0, len(related), len(texts) - given):
        text, answers = harness.qa_utils.generate_input_output(
            index, given + units, questions, texts
        )
        assert documents(text_of(ours, units)) == documents(f"{text} Answer:")
        assert ours.answers == tuple(answers)


FILES = {"vt": "vt", "cwe": "cwe", "fwe": "fwe", "qa_1": "qa_squad", "qa_2": "qa_hotpot"}


def setting(folder: Path, name: str, pattern: str) -> str:
    """A setting of a task of the harness, or of the one that it includes."""
    text = (folder / f"{name}.yaml").read_text()
    match = re.search(pattern, text)
    return match[1] if match else setting(folder, re.search(r"include: (\w+)", text)[1], pattern)


@pytest.mark.parametrize("task", TASKS)
def test_answers_have_the_room_and_the_score_of_the_harness(task, harness):
    folder = Path(harness.common_utils.__file__).parent
    name = FILES.get(task, task)
    assert int(setting(folder, name, r"max_gen_toks: (\d+)")) == ANSWER_TOKENS[task]
    process = getattr(
        harness.common_utils,
        setting(folder, name, r"process_results: !function common_utils\.(\w+)"),
    )
    references = ["Blue-Harbor", "1234567", "12345", "Cairo"]
    for text in ("", " blue-harbor 1234567.", "12345\n\x02", "1234567, CAIRO blue", "Blue Harbor"):

        def of_harness(answers, text=text):
            return process({"max_length": 4096, "outputs": answers}, [text])["4096"]

        for answer in references:
            assert string_match(task, text, [answer]) == of_harness([answer])
        # Of a question RULER takes the best of its answers; the harness takes their mean.
        expected = of_harness(references)
        if task.startswith("qa"):
            expected = max(of_harness([answer]) for answer in references)
        assert string_match(task, text, references) == expected
