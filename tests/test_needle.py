"""Needle prompts have exactly the requested length; recall counts exactly the hidden answers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from families import SHAPE
from farspan.bundled import BUNDLED_MODELS
from farspan.data.documents import read_documents
from farspan.data.tokens import END, train_tokenizer
from farspan.errors import FarspanError
from farspan.evals import answers, needle
from farspan.evals.needle import (
    CHARACTERS_PER_TOKEN,
    NUMBERS,
    TASKS,
    Needle,
    effective_length,
    haystack_text,
    insert_needles,
    recall_keys,
)
from farspan.evals.nonliteral import NonLiteral
from farspan.evals.ruler import Ruler
from farspan.model import FarspanConfig, FarspanForCausalLM

TEXT = next(iter(read_documents("python-docs"))).text


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT[:100_000]], 600)


@pytest.fixture(scope="module")
def bundled_tokenizer():
    return hf.AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")


def small_model(vocabulary: int, position: str = "none"):
    torch.manual_seed(0)
    shape = {
        **SHAPE,
        "vocab_size": vocabulary,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "num_hidden_layers": 2,
    }
    return FarspanForCausalLM(FarspanConfig(**shape, position=position)).eval()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("haystack", ["", "python-docs"])
def test_prompt_and_answer_have_exactly_the_requested_length(tokenizer, task, haystack):
    evaluation = Needle((512, 777, 1500), tasks=(task,), samples=5, haystack=haystack)
    for cell in evaluation.cells():
        samples, rows, answer_tokens = evaluation.prompts(cell, tokenizer)
        for sample, row in zip(samples, rows, strict=True):
            assert len(row) + answer_tokens == cell.length
            assert answer_tokens >= 2 * len(tokenizer(" " + ", ".join(sample.answers))["input_ids"])
            text = tokenizer.decode(row)
            assert text.endswith(sample.question)
            for words in sample.needles:
                assert text.count(words) == 1
            for answer in sample.answers:
                assert answer in text


def test_shortest_length_fits_every_task(bundled_tokenizer):
    for cell in Needle((256,), samples=4).cells():
        _, rows, answer_tokens = Needle((256,), samples=4).prompts(cell, bundled_tokenizer)
        assert {len(row) for row in rows} == {256 - answer_tokens}


def test_tasks_hide_the_configured_number_of_needles(tokenizer):
    evaluation = Needle((1024,), samples=3)
    samples = {cell.task: evaluation.prompts(cell, tokenizer)[0] for cell in evaluation.cells()}
    counts = {
        task: (len(group[0].needles), len(group[0].answers)) for task, group in samples.items()
    }
    assert counts == {
        "single": (1, 1),
        "multi-key": (4, 1),
        "multi-value": (4, 4),
        "multi-query": (4, 4),
        "variables": (5, 5),
    }
    for group in samples.values():
        for sample in group:
            assert len(set(sample.answers)) == len(sample.answers)
            assert len(sample.depths) == len(sample.needles)
    for task in ("single", "multi-key"):
        assert [sample.depths[0] for sample in samples[task]] == [0, 0.5, 1]
    two, cell = replace(evaluation, samples=2), evaluation.cells()[0]
    assert [sample.depths[0] for sample in two.prompts(cell, tokenizer)[0]] == [0, 1]
    for sample in samples["multi-query"]:
        keys = re.findall(r"[a-z]+-[a-z]+", sample.question)
        needles = [next(words for words in sample.needles if f" {key} " in words) for key in keys]
        assert [re.search(r"\d{7}", words)[0] for words in needles] == list(sample.answers)


@pytest.mark.parametrize(("task", "count"), [("multi-value", 1), ("multi-query", 4), ("single", 1)])
def test_a_question_for_several_numbers_is_in_the_plural(task, count):
    sample = Needle((512,))._make_sample(task, 0)
    assert len(re.findall(r"[a-z]+-[a-z]+", sample.question)) == count
    words = ("number", "is") if task == "single" else ("numbers", "are")
    assert re.fullmatch(rf"\nThe magic {words[0]} of .+ {words[1]}:", sample.question)


@pytest.mark.parametrize("tasks", [["single"], ["single", "variables"]])
def test_several_tasks_have_an_average(tasks):
    keys = recall_keys("needle", tasks, (512, 1024))
    assert dict.fromkeys(key.task for key in keys) == dict.fromkeys(
        tasks if len(tasks) == 1 else [*tasks, "average"]
    )


def test_variables_are_assigned_in_order(tokenizer):
    evaluation = Needle((1024,), tasks=("variables",), samples=10)
    (cell,) = evaluation.cells()
    samples, rows, _ = evaluation.prompts(cell, tokenizer)
    for sample, row in zip(samples, rows, strict=True):
        text = tokenizer.decode(row)
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text):
            values[name] = values.get(source, source)
        queried = re.search(r"hold (\d{5}) are: VAR$", text)[1]
        assert {name for name, value in values.items() if value == queried} == set(sample.answers)
        assert len(values) == 5


def test_samples_depend_on_the_seed_and_not_on_the_length(tokenizer):
    def prompts(length: int, seed: int, haystack: str = ""):
        evaluation = Needle(
            (length,), tasks=("multi-key",), samples=4, seed=seed, haystack=haystack
        )
        return evaluation.prompts(evaluation.cells()[0], tokenizer)

    assert prompts(512, 0) == prompts(512, 0)
    assert prompts(512, 0)[0] == prompts(1024, 0)[0]
    assert prompts(512, 0)[0] != prompts(512, 1)[0]
    rows = prompts(1024, 0, "python-docs")[1]
    starts = {tuple(row[60:100]) for row in rows}
    assert len(starts) > 1, "each sample starts elsewhere in a haystack text"


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_needles_are_inserted_between_sentences_at_their_depths(sizes, depths):
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    hay = list(range(ends[-1]))
    tokens = insert_needles(hay, ends, [[-1 - number] for number in range(len(depths))], depths)
    assert [token for token in tokens if token >= 0] == hay
    for number, depth in enumerate(depths):
        before = sum(token >= 0 for token in tokens[: tokens.index(-1 - number)])
        assert before == max(end for end in ends if end <= depth * len(hay))


def test_prompts_start_with_bos_if_the_tokenizer_adds_it(tokenizer):
    with_bos = train_tokenizer([TEXT[:20_000]], 400)
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, with_bos.bos_token_id)]
    )
    evaluation = Needle((512,), tasks=("single",), samples=2)
    (cell,) = evaluation.cells()
    for row in evaluation.prompts(cell, with_bos)[1]:
        assert row.count(with_bos.bos_token_id) == 1
        assert row[0] == with_bos.bos_token_id
    assert all(row[0] != tokenizer.bos_token_id for row in evaluation.prompts(cell, tokenizer)[1])


def answering(monkeypatch, tokenizer, evaluation: Needle, model, answer) -> list[dict]:
    """The samples of all cells if the model answers each prompt with `answer(sample)`."""
    results = []
    for cell in evaluation.cells():
        samples, rows, _ = evaluation.prompts(cell, tokenizer)
        texts = {tuple(row): answer(sample) for sample, row in zip(samples, rows, strict=True)}

        def generate(model, prompts, max_new_tokens, texts=texts, **_):
            return [
                tokenizer(texts[tuple(row)], add_special_tokens=False)["input_ids"]
                for row in prompts.tolist()
            ]

        monkeypatch.setattr(answers, "generate_tokens", generate)
        results += evaluation.run(cell, model, tokenizer)
    return results


def test_recall_is_the_share_of_hidden_answers(tokenizer, monkeypatch):
    evaluation = Needle((512, 1024), samples=4, batch=3)
    setup = monkeypatch, tokenizer, evaluation, small_model(600)
    everything = answering(*setup, lambda sample: f" {', '.join(sample.answers)}. And so on")
    nothing = answering(*setup, lambda sample: "")
    one = answering(*setup, lambda sample: f" {sample.answers[0]}")
    assert {sample["score"] for sample in everything} == {1}
    assert {sample["score"] for sample in nothing} == {0}
    assert all(sample["score"] == 1 / len(sample["answers"]) for sample in one)
    assert json.loads(json.dumps(one)) == one
    scores = evaluation.score(one)
    recall = {
        (score.tags["task"], score.length): score.value
        for score in scores
        if score.metric == "recall"
    }
    assert recall["single", 512] == 1
    assert recall["multi-value", 1024] == 1 / 4
    assert recall["average", 1024] == pytest.approx((1 + 1 + 1 / 4 + 1 / 4 + 1 / 5) / 5)
    effective = {
        score.tags["task"]: score for score in scores if score.metric == "effective_length"
    }
    assert (
        effective["single"].value,
        effective["multi-value"].value,
        effective["average"].value,
    ) == (1024, 0, 0)
    assert all(score.low <= score.value <= score.high for score in scores)
    single = [
        score for score in scores if score.tags["task"] == "single" and score.metric == "recall"
    ]
    assert all(score.low < 0.6 for score in single), "four hits leave uncertainty"
    assert (effective["single"].low, effective["single"].high) == (0, 1024)
    assert effective["single"].n == 8


@given(st.dictionaries(st.integers(256, 9999), st.floats(0, 1), min_size=1), st.floats(0, 1))
def test_effective_length_is_the_longest_with_all_shorter_ones_passing(scores, threshold):
    passing = [
        length
        for length in scores
        if all(scores[other] >= threshold for other in scores if other <= length)
    ]
    assert effective_length(scores, threshold) == max(passing, default=0)


def test_prompts_run_one_at_a_time_on_the_cpu_unless_a_batch_is_chosen(tokenizer, monkeypatch):
    sizes: list[int] = []
    generate_tokens = answers.generate_tokens
    monkeypatch.setattr(
        answers,
        "generate_tokens",
        lambda model, rows, *rest, **more: (
            sizes.append(len(rows)),
            generate_tokens(model, rows, *rest, **more),
        )[1],
    )
    evaluation = Needle((300,), tasks=("single",), samples=3)
    evaluation.run(evaluation.cells()[0], small_model(600), tokenizer)
    chosen = replace(evaluation, batch=2)
    chosen.run(chosen.cells()[0], small_model(600), tokenizer)
    assert sizes == [1, 1, 1, 2, 1]
    lengths: list[int] = []
    monkeypatch.setattr(
        answers,
        "rows_per_batch",
        lambda model, length, requested: (lengths.append(length), 2)[1],
    )  # as on a GPU
    evaluation.run(evaluation.cells()[0], small_model(600), tokenizer)
    assert sizes[5:] == [2, 1]
    assert lengths == [300], "memory is for prompts and their answers"


@pytest.mark.parametrize("kind", [Needle, NonLiteral, Ruler])
def test_a_batch_above_one_is_part_of_the_key(kind):
    settings = [kind((300,), batch=batch).cells()[0].settings for batch in (None, 1, 2, 3)]
    assert settings[0] == settings[1] != settings[2] != settings[3]
    assert [each.get("batch") for each in settings] == [None, None, 2, 3]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mpt"])
def test_as_many_prompts_are_decoded_together_as_a_gpu_holds(name):
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 4, "d_model": 32, "n_heads": 4, "n_layers": 2}
    shape |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    shape |= {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(name, **shape))
    row = 1024 * 4 * (2 * 2 * 32 + 8 * 128)  # bytes of 1,024 tokens: the cache, and one layer
    free = 4 * row  # of which three quarters are used
    assert answers.rows_in_memory(model, 1024, free) == 3
    assert answers.rows_in_memory(model, 512, free) == 6
    assert answers.rows_in_memory(model, 1024, row // 2) == 1
    assert answers.rows_in_memory(model, 1, free) == 64


@pytest.mark.parametrize(
    ("config", "row"),
    [
        (hf.MambaConfig(hidden_size=32, intermediate_size=64), 8 * 64),  # no heads, no cache
        (
            hf.Gemma3nTextConfig(
                hidden_size=32,
                intermediate_size=[64, 128],
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
            ),
            2 * 2 * 2 * 8 + 8 * 128,
        ),
    ],
)
def test_memory_of_prompts_for_configs_without_heads_or_with_several_widths(config, row):
    model = SimpleNamespace(config=config, dtype=torch.float32)
    assert answers.rows_in_memory(model, 1024, 4 * 4 * 1024 * row) == 3


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "bloom", "mpt"])
def test_samples_do_not_depend_on_the_batch_size(tokenizer, name, monkeypatch):
    monkeypatch.setattr(
        answers, "rows_per_batch", lambda model, length, requested: requested
    )  # as on a GPU
    shape = {"vocab_size": 600, "n_layer": 2}
    foreign = {
        "bloom": lambda: hf.BloomConfig(**shape, hidden_size=32, n_head=4),
        "mpt": lambda: hf.MptConfig(
            vocab_size=600, d_model=32, n_heads=4, n_layers=2, max_seq_len=1024
        ),
    }
    torch.manual_seed(0)
    model = (
        hf.AutoModelForCausalLM.from_config(foreign[name]()).eval()
        if name in foreign
        else small_model(600, name)
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    results = []
    for batch in (1, 4):
        evaluation = Needle((400,), tasks=("single",), samples=4, batch=batch)
        (cell,) = evaluation.cells()
        results.append(evaluation.run(cell, model, tokenizer))
    assert results[0] == results[1]
    assert len(results[0]) == 4
    assert all(sample["prediction"] for sample in results[0])


def test_haystack_tag_is_the_file_name_without_its_hash():
    sample = {
        "task": "single",
        "length": 256,
        "score": 1.0,
        "haystack": "my essays.txt 0123456789abcdef",
    }
    assert Needle((256,)).score([sample])[0].tags["haystack"] == "my essays.txt"
    assert Needle((256,)).score([{**sample, "haystack": "filler"}])[0].tags["haystack"] == "filler"


@pytest.mark.parametrize(("other", "tag"), [("a.txt", "a.txt"), ("b.txt", None)])
def test_an_average_names_the_haystack_that_all_tasks_share(other, tag):
    samples = [
        {"task": task, "length": 256, "score": 1.0, "haystack": f"{file} 0123456789abcdef"}
        for task, file in (("single", "a.txt"), ("multi-key", other))
    ]
    scores = Needle((256,)).score(samples)
    assert next(s.tags.get("haystack") for s in scores if s.tags["task"] == "average") == tag


def test_a_haystack_is_read_until_its_documents_have_enough_characters(tmp_path):
    size = CHARACTERS_PER_TOKEN * 4
    lines = [json.dumps({"text": text}) for text in ("a" * (size - 1), "b" * 9, "c")]
    (tmp_path / "hay.jsonl").write_text("\n".join(lines))
    assert haystack_text(tmp_path / "hay.jsonl", 4) == "a" * (size - 1) + " "
    lines = [json.dumps({"text": text}) for text in ("a" * (size - 1) + "\n", "not read")]
    (tmp_path / "hay.jsonl").write_text("\n".join(lines))
    assert haystack_text(tmp_path / "hay.jsonl", 4) == "a" * (size - 1)


def test_a_haystack_needs_as_many_tokens_as_a_sample():
    evaluation = Needle((256,), haystack="words.txt")
    hay, ends = evaluation._hay([[1, 2], [3]], 3, 0)
    assert sorted(hay) == [1, 2, 3]
    assert ends[-1] == 3
    with pytest.raises(FarspanError, match=r"words.txt has 3 tokens, but 4 are needed"):
        evaluation._hay([[1, 2], [3]], 4, 0)


def test_magic_numbers_are_all_numbers_of_seven_digits():
    """As in RULER: 10⁶ to 10⁷ − 1."""
    assert (NUMBERS[0], NUMBERS[-1]) == (10**6, 10**7 - 1)


def test_cells_do_not_contain_a_batch_of_one():
    assert Needle((256,), batch=1).cells() == Needle((256,)).cells()
    assert Needle((256,), seed=1).cells() != Needle((256,)).cells()
    one, two = (
        Needle((256,), haystack=f"python-docs/{part}").cells()[0] for part in ("search", "score")
    )
    assert one.settings["haystack"] != two.settings["haystack"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (255,)}, "needle prompts need 256 tokens, but the shortest length is 255"),
        ({"tasks": ("multikey",)}, "no task 'multikey'; did you mean multi-key"),
        ({"samples": 0}, "the needle setting samples is 0"),
        ({"batch": 0}, "the needle setting batch is 0"),
        ({"haystack": "nowhere.txt"}, "'nowhere.txt' is not a file"),
    ],
)
def test_bad_settings_raise_clear_errors(options, message):
    with pytest.raises(FarspanError, match=message):
        Needle(**{"lengths": (256,), **options}).cells()


def test_too_little_room_or_text_raises_clear_errors(tokenizer, tmp_path, monkeypatch):
    def prompts(**options):
        evaluation = Needle((300,), tasks=("multi-key",), samples=1, **options)
        return evaluation.prompts(evaluation.cells()[0], tokenizer)

    for text in ("Too short.", ""):
        (tmp_path / "hay.txt").write_text(text)
        with pytest.raises(FarspanError, match=r"hay.txt has \d+ tokens, but \d+ are needed"):
            prompts(haystack=str(tmp_path / "hay.txt"))
    monkeypatch.setattr(needle, "KEYS", 40)
    with pytest.raises(
        FarspanError, match=r"a length of 300 is too short for multi-key, which needs \d+ tokens"
    ):
        prompts()


@settings(deadline=None, max_examples=20)
@given(length=st.integers(256, 3000))
def test_prompts_of_any_length_are_exact(bundled_tokenizer, length):
    evaluation = Needle((length,), tasks=("multi-query",), samples=1)
    _, (row,), answer_tokens = evaluation.prompts(evaluation.cells()[0], bundled_tokenizer)
    assert len(row) + answer_tokens == length
