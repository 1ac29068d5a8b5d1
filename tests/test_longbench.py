"""LongBench's numbers are LongBench's: the same metrics, prompts and cuts, and nothing cut without being counted."""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import string
import tarfile
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from families import OURS
from farspan.attention.patch import set_rope
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.evals import longbench, metrics
from farspan.evals.decoding import continuations
from farspan.evals.longbench import LongBench, read_collections, score_of, shortened, tasks
from farspan.evals.scores import average, bootstrap, wilson
from farspan.model import FarspanForCausalLM

DATA = Path(os.environ.get("FARSPAN_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
BENCH = DATA / "bench.tar.xz"
WORDS = st.sampled_from(["a", "the", "cat", "Cat", "sat", "on", "mat", ".", ". ", "dog,", "ran"])


# Metrics: each beside another way to compute it, and beside what the authors' own code gave.


def wanted_f1(said: str, answer: str) -> float:
    """By pairing off words one by one."""

    def plain(text: str) -> list[str]:
        kept = "".join(
            " " if letter.isspace() else letter for letter in text.lower() if letter not in string.punctuation
        )
        return [word for word in re.split(r"\b(?:a|an|the)\b|\s", kept) if word]

    words, left = plain(said), plain(answer)
    right = len(left)
    for word in words:
        if word in left:
            left.remove(word)
    same = right - len(left)
    if not same:
        return 0.0
    precision, recall = same / len(words), same / right
    return 2 * precision * recall / (precision + recall)


def wanted_rouge(said: str, answer: str) -> float:
    """By precision and recall, with subsequences found by recursion on what is left of two sentences."""

    @cache
    def longest(right: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
        if not right or not words:
            return ()
        if right[-1] == words[-1]:
            return (*longest(right[:-1], words[:-1]), right[-1])
        up, left = longest(right[:-1], words), longest(right, words[:-1])
        return up if len(up) > len(left) else left

    def sentences(text: str) -> list[tuple[str, ...]]:
        return [tuple(" ".join(part.split()).split(" ")) for part in text.split(".") if part]

    ours, theirs = sentences(said), sentences(answer)
    if not ours or not theirs:
        return 0.0
    common = {word for right in theirs for words in ours for word in longest(right, words)}
    precision, recall = (len(common) / len({word for part in parts for word in part}) for parts in (ours, theirs))
    return 2 * precision * recall / (precision + recall) if common else 0.0


def wanted_likeness(one: str, other: str) -> float:
    """Twice the letters in matching blocks: the longest common substring, then the same on both sides of it."""

    def matching(a: str, b: str) -> int:
        best = (0, 0, 0)
        for i in range(len(a)):
            for j in range(len(b)):
                size = 0
                while i + size < len(a) and j + size < len(b) and a[i + size] == b[j + size]:
                    size += 1
                if size > best[0]:
                    best = (size, i, j)
        size, i, j = best
        return size + matching(a[:i], b[:j]) + matching(a[i + size :], b[j + size :]) if size else 0

    return round(100 * 2 * matching(one, other) / (len(one) + len(other))) / 100 if one or other else 1.0


@given(st.lists(WORDS, max_size=12).map(" ".join), st.lists(WORDS, min_size=1, max_size=12).map(" ".join))
def test_f1_and_rouge_equal_their_references(said, answer):
    assert metrics.f1(said, answer) == pytest.approx(wanted_f1(said, answer), abs=1e-12)
    assert metrics.rouge_l(said, answer) == pytest.approx(wanted_rouge(said, answer), abs=1e-12)


@given(st.text("xy =()", max_size=14), st.text("xy =()", max_size=14))
def test_edit_similarity_equals_its_reference(said, answer):
    assert metrics.edit_similarity(said, answer) == wanted_likeness(said, answer)


@given(st.lists(st.sampled_from(["4", " 12", "x", "Paragraph 4", ", "]), max_size=6).map("".join))
def test_count_and_retrieval_are_shares_of_the_numbers_said(said):
    numbers = "".join(letter if letter.isdigit() else " " for letter in said).split()
    wanted = sum(number == "4" for number in numbers) / len(numbers) if numbers else 0.0
    assert metrics.count(said, "4") == metrics.retrieval(said, "Paragraph 4") == wanted


@pytest.mark.parametrize(
    ("metric", "said", "answer", "official"),
    [
        (metrics.f1, "The answer is Bob Dylan.", "Bob Dylan", 2 / 3),
        (metrics.f1, "an apple", "the", 0.0),
        (metrics.rouge_l, "the cat sat on the mat", "the cat lay on a mat", 0.7272727223),
        (metrics.rouge_l, "One two. Three four. ", "Four three. one two five.", 0.1999999950),
        (metrics.rouge_l, "the cat. sat on the mat", "the mat. the cat sat", 0.8888888840),
        (metrics.rouge_l, ".", "a word", 0.0),
        (metrics.edit_similarity, "    if e.text == lang:\n        pass", "            if e.text == language:", 0.79),
        (metrics.edit_similarity, "\n\n# a comment\nreturn x", "return y", 0.88),
        (metrics.edit_similarity, "`return y`", "return y", 0.0),
        (metrics.edit_similarity, "", "return y", 0.0),
        (metrics.count, "There are 46, or 47.", "46", 0.5),
        (metrics.retrieval, "Paragraph 19", "Paragraph 19", 1.0),
        (metrics.retrieval, "Paragraph 1 or 19", "Paragraph 19", 0.5),
    ],
)
def test_metrics_equal_what_the_official_code_gave(metric, said, answer, official):
    """Figures from LongBench's metrics.py with rouge 1.0.1 and fuzzywuzzy 0.18.0 without python-Levenshtein."""
    assert metric(said, answer) == pytest.approx(official, abs=1e-8)


def test_a_class_shares_with_those_named_beside_it():
    classes = ["City", "Country", "State", "City or State"]
    assert metrics.class_match("City", "City", classes) == 1
    assert metrics.class_match("It is a City or a Country", "City", classes) == 1 / 2
    assert metrics.class_match("Country", "City", classes) == 0
    # A class inside the right one does not count against it; of two in a row the authors' loop passes one over.
    assert metrics.class_match("City or State", "City or State", ["City", "Food", "City or State"]) == 1
    assert metrics.class_match("City or State", "City or State", classes) == 1 / 2


def test_long_summaries_have_a_score():
    """The package overflows its stack here, and LongBench takes that for 0."""
    text = " ".join(f"word{number % 400}" for number in range(1200))
    assert metrics.rouge_l(text, text) == 1


# Prompts, cuts and answers.

ANSWERS = {
    "f1": ["no such thing", "Bob Dylan"],
    "rouge_l": ["The report says much. It says little."],
    "class_match": ["City"],
    "count": ["12"],
    "retrieval": ["Paragraph 7"],
    "edit_similarity": ["    return self.value"],
}


def official(task: str, number: int) -> dict:
    return {
        "_id": f"{task}-{number}",
        "dataset": task,
        "context": f"context {number} " * 20,
        "input": "question",
        "answers": ANSWERS[tasks()[task].metric],
        "all_classes": ["City", "Country"] if task == "trec" else None,
    }


def written(folder: Path, rows: list[dict], name: str = "data.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([next(iter(read_documents("python-docs"))).text[:50_000]], 500)


def sharpened(model):
    """Fresh weights say one token for ever; larger ones have something to say."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data.mul_(16)
    return model.eval()


def model_of(position: str = "none"):
    config = next(family for family in OURS if family.name == f"farspan-{position}").config()
    config.vocab_size, config.eos_token_id, config.pad_token_id = 500, 0, 0
    torch.manual_seed(0)
    return sharpened(FarspanForCausalLM(config))


@pytest.fixture
def everything(tmp_path) -> Path:
    return written(tmp_path / "lb", [official(task, number) for task in tasks() for number in range(3)])


def answering(monkeypatch, tokenizer, evaluation: LongBench, how) -> list[dict]:
    """The samples of all cells by a model that says what `how` makes of a prompt, through the real tokenizer."""
    by_prompt = {
        tuple(
            shortened(tokenizer(prompt.text)["input_ids"], length - min(tasks()[task].answer_tokens, length // 2))[0]
        ): how(prompt)
        for length in evaluation.lengths
        for task, found in evaluation.collections.items()
        for prompt in found.prompts
    }

    def said(model, prompts, tokens, **_):
        return [tokenizer(by_prompt[tuple(row)], add_special_tokens=False)["input_ids"] for row in prompts.tolist()]

    monkeypatch.setattr(longbench, "continuations", said)
    return [sample for cell in evaluation.cells() for sample in evaluation.run(cell, model_of(), tokenizer)]


def test_gold_scores_100_on_every_task_and_silence_0(everything, tokenizer, monkeypatch):
    evaluation = LongBench(everything, (4096,))
    gold = evaluation.score(answering(monkeypatch, tokenizer, evaluation, lambda prompt: prompt.answers[-1]))
    silence = evaluation.score(answering(monkeypatch, tokenizer, evaluation, lambda prompt: ""))
    assert [score.tags["task"] for score in gold] == [*tasks(), "average"]
    for best, worst in zip(gold, silence, strict=True):
        assert (best.value, best.low, best.high) == (100, 100, 100)
        assert (worst.value, worst.low, worst.high) == (0, 0, 0)
        assert best.length == 4096
    assert [score.n for score in gold] == [3] * 16 + [48]
    assert gold[0].tags["data"] == "3 prompts of data.jsonl"


def test_only_the_first_line_counts_where_officially_so(everything):
    for task, found in read_collections(everything).items():
        prompt = found.prompts[0]
        said = "\n" + prompt.answers[0] + "\nNext line 99 Country"
        alone = score_of(task, prompt.answers[0], prompt)
        if tasks()[task].first_line or tasks()[task].metric == "edit_similarity":
            assert score_of(task, said, prompt) == alone == 100
        else:
            assert score_of(task, said, prompt) < alone == 100


def test_prompts_of_one_length_are_decoded_together_and_each_gets_its_own_answer():
    rows = [[number] * (3 if number % 3 else 5) for number in range(10)]
    shapes = []

    def say(batch):
        shapes.append(tuple(batch.shape))
        return [[row[0] + 100, len(row)] for row in batch.tolist()]

    assert longbench.by_length(rows, 4, say) == [[number + 100, len(row)] for number, row in enumerate(rows)]
    assert sorted(shapes) == [(2, 3), (4, 3), (4, 5)]


def test_answers_are_those_of_prompts_asked_one_by_one(everything, tokenizer, monkeypatch):
    """As they are on the CPU; a GPU answers several at once."""
    evaluation, model, sizes = LongBench(everything, (128,)), model_of(), []
    cells = [cell for cell in evaluation.cells() if cell.task in ("qasper", "trec", "lcc")]

    def said(model, rows, *rest, **more):
        sizes.append(len(rows))
        return continuations(model, rows, *rest, **more)

    monkeypatch.setattr(longbench, "continuations", said)
    alone = [evaluation.run(cell, model, tokenizer) for cell in cells]
    assert set(sizes) == {1}
    monkeypatch.setattr(longbench, "rows_at_once", lambda model, length, asked: asked)
    assert alone == [evaluation.run(cell, model, tokenizer) for cell in cells]
    assert max(sizes) > 1


@given(st.integers(0, 300), st.integers(64, 200))
def test_what_is_cut_is_the_middle_and_is_counted(size, room):
    ids = list(range(size))
    kept, cut = shortened(ids, room)
    assert len(kept) + cut == size
    assert len(kept) <= room
    assert (cut == 0) == (size <= room)
    half = len(kept) // 2
    assert kept == ids if not cut else kept == ids[:half] + ids[size - half :]


def test_every_sample_declares_what_was_cut(everything, tokenizer, monkeypatch):
    evaluation = LongBench(everything, (64, 128, 4096))
    samples = answering(monkeypatch, tokenizer, evaluation, lambda prompt: "7")
    texts = {prompt.id: prompt.text for found in evaluation.collections.values() for prompt in found.prompts}
    for sample in samples:
        whole = len(tokenizer(texts[sample["id"]])["input_ids"])
        assert sample["tokens"] + sample["cut"] == whole
        assert sample["tokens"] + sample["answer_tokens"] <= sample["length"]
        assert (sample["cut"] > 0) == (whole + sample["answer_tokens"] > sample["length"])
    for score in evaluation.score(samples):
        task = score.tags["task"]
        mine = [s for s in samples if s["length"] == score.length and task in (s["task"], "average")]
        assert score.tags["truncated"] == sum(sample["cut"] > 0 for sample in mine)
        assert score.tags["cut"] == sum(sample["cut"] for sample in mine)
        assert (score.tags["truncated"] == 0) == (score.length == 4096)


def test_the_first_prompts_of_each_task_are_named_so(everything, tokenizer, monkeypatch):
    evaluation = LongBench(everything, (128,), limit=2)
    scores = evaluation.score(answering(monkeypatch, tokenizer, evaluation, lambda prompt: ""))
    assert {score.n for score in scores[:-1]} == {2}
    assert {score.tags["data"] for score in scores} == {"first 2 of 3 prompts of data.jsonl"}
    assert LongBench(everything, (128,), limit=3).cells() == LongBench(everything, (128,)).cells()
    assert evaluation.cells() != LongBench(everything, (128,)).cells()
    with pytest.raises(FarspanError, match="a limit of 0 prompts leaves none"):
        LongBench(everything, (128,), limit=0).cells()


def test_averages_count_tasks_alike():
    many, few = (bootstrap([0.0, 100.0] * count) for count in (50, 5))
    assert average([(100.0, 99.0, 100.0), (0.0, 0.0, 1.0)])[0] == 50
    mean, low, high = average([many, few])
    assert low < mean < high
    assert few[2] - few[1] > high - low, "more tasks, less doubt"
    assert average([few]) == pytest.approx(few)
    assert average([wilson(0, 20)] * 5) == pytest.approx((0, 0, wilson(0, 20)[2] / 5**0.5)), (
        "none told is not certainty"
    )


def test_the_cells_know_their_data(everything):
    cells = LongBench(everything, (128, 256)).cells()
    assert len(cells) == 32
    everything.write_text(everything.read_text().replace("question", "questions"))
    assert {cell.settings["sha256"] for cell in cells}.isdisjoint(
        cell.settings["sha256"] for cell in LongBench(everything, (128,)).cells()
    )


def test_official_prompts_are_whole(everything):
    for task, found in read_collections(everything).items():
        text = found.prompts[0].text
        assert "context 0" in text
        assert ("question" in text) == ("{input}" in tasks()[task].prompt)
        assert "{" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"dataset": "qaspr", "context": "", "input": "", "answers": ["x"]}',
            "'qaspr' is no .* the nearest is qasper",
        ),
        ('{"dataset": "qasper", "context": ""}', "line 1 is no prompt of LongBench .KeyError: 'input'"),
        ('{"dataset": "qasper", "context": "", "input": "", "answers": []}', "line 1 is no prompt of LongBench"),
        ('{"dataset": "qasper", ', "line 1 is not JSON"),
        ("[1]", "line 1 is no JSON object"),
        ('{"dataset": "dureader"}', "holds no prompt"),
    ],
)
def test_broken_data_is_a_sentence(tmp_path, content, message):
    (tmp_path / "data.jsonl").write_text(content + "\n")
    with pytest.raises(FarspanError, match=message):
        LongBench(tmp_path, (128,)).cells()


def test_data_that_is_not_there_or_twice_there_is_a_sentence(tmp_path, everything):
    with pytest.raises(FarspanError, match="does not exist"):
        LongBench(tmp_path / "nowhere", (128,)).cells()
    written(everything.parent, [official("lcc", 0)], "more.jsonl")
    with pytest.raises(FarspanError, match="lcc is in data.jsonl and in more.jsonl"):
        LongBench(everything.parent, (128,)).cells()
    (everything.parent / "more.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptError, match="cannot be read"):
        LongBench(everything.parent, (128,)).cells()
    (everything.parent / "bench.tar.xz").write_bytes(b"")
    with pytest.raises(FarspanError, match=r"bench.tar.xz is an archive; unpack it"):
        LongBench(everything.parent / "bench.tar.xz", (128,)).cells()
    with pytest.raises(FarspanError, match="a context of 32 tokens leaves nothing"):
        LongBench(everything, (32,)).cells()


# What a model says.

FOREIGN = {
    "bloom": lambda: hf.BloomConfig(vocab_size=500, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: hf.MptConfig(vocab_size=500, d_model=32, n_layers=2, n_heads=4, expansion_ratio=2, max_seq_len=64),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=500, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
}


def any_model(name: str):
    if name not in FOREIGN:
        return model_of(name)
    torch.manual_seed(0)
    return sharpened(hf.AutoModelForCausalLM.from_config(FOREIGN[name]()))


@torch.no_grad()
def by_hand(model, ids: list[int], tokens: int, end: int) -> list[int]:
    """Greedy, without a cache."""
    said: list[int] = []
    while len(said) < tokens:
        best = int(model(torch.tensor([ids + said]), use_cache=False).logits[0, -1].argmax())
        if best == end:
            break
        said.append(best)
    return said


@torch.no_grad()
def beams_by_hand(model, ids: list[int], tokens: int, beams: int) -> list[int]:
    """The likeliest of the beams after so many tokens, without a cache and without an end."""
    held: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(tokens):
        rows = torch.tensor([ids + said for _, said in held])
        chances = model(rows, use_cache=False).logits[:, -1].double().log_softmax(-1)
        best = [
            (score + float(chance), [*said, int(token)])
            for (score, said), row in zip(held, chances, strict=True)
            for chance, token in zip(*row.topk(beams), strict=True)
        ]
        held = sorted(best, key=lambda entry: -entry[0])[:beams]
    return held[0][1]


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "t5", "learned", "swan", *FOREIGN])
def test_decoding_is_the_argmax_of_every_step_and_no_row_depends_on_others(name):
    model = any_model(name)
    rows = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(1))
    together = continuations(model, rows, 12, ends=[0])
    assert together == [by_hand(model, row, 12, 0) for row in rows.tolist()]
    assert together == [continuations(model, row[None], 12, ends=[0])[0] for row in rows]
    assert len({token for said in together for token in said}) > 4


def test_a_prompt_is_answered_alike_before_and_after_a_longer_one():
    """Under a rotation that grows with the longest text seen."""
    torch.manual_seed(0)
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=500)
    model = sharpened(hf.LlamaForCausalLM(hf.LlamaConfig(**shape, max_position_embeddings=32)))
    set_rope(model, {"rope_type": "dynamic", "factor": 4.0})
    short, long = (torch.randint(3, 500, (1, size), generator=torch.Generator().manual_seed(1)) for size in (60, 200))
    first = continuations(model, short, 12, ends=[])
    continuations(model, long, 2, ends=[])
    assert continuations(model, short, 12, ends=[]) == first


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "t5", "bloom", "mpt"])
def test_beams_are_reordered_with_their_cache(name):
    model = any_model(name)
    rows = torch.randint(3, 500, (2, 16), generator=torch.Generator().manual_seed(2))
    for row in rows:
        (said,) = continuations(model, row[None], 8, ends=[], beams=5)
        assert said == beams_by_hand(model, row.tolist(), 8, 5)


def test_settings_for_sampling_in_a_checkpoint_change_nothing(tokenizer):
    model, row = model_of(), torch.arange(10, 40)[None]
    plain = continuations(model, row, 16, ends=[0])
    own = model.generation_config
    own.do_sample, own.temperature, own.repetition_penalty, own.num_beams = True, 5.0, 9.0, 2
    assert continuations(model, row, 16, ends=[0]) == plain
    assert model.generation_config is own
    assert own.repetition_penalty == 9.0


def test_a_first_token_cannot_end_where_one_is_asked_for():
    model, row = model_of(), torch.arange(10, 40)[None]
    (said,) = continuations(model, row, 4, ends=[0])
    assert continuations(model, row, 4, ends=[said[0]]) == [[]]
    assert len(continuations(model, row, 4, ends=[said[0]], least=1)[0]) >= 1


@pytest.mark.parametrize("beams", [1, 5])
def test_a_real_model_runs_all_tasks(everything, tokenizer, beams):
    rows = [official(task, 0) for task in tasks()]
    evaluation = LongBench(written(everything.parent, rows), (128,), beams=beams)
    model = model_of("rope")
    samples = [sample for cell in evaluation.cells()[::5] for sample in evaluation.run(cell, model, tokenizer)]
    assert json.loads(json.dumps(samples)) == samples
    assert all(0 <= sample["score"] <= 100 and sample["beams"] == beams for sample in samples)
    assert [sample["prediction"] for sample in samples] == [
        sample["prediction"] for cell in evaluation.cells()[::5] for sample in evaluation.run(cell, model, tokenizer)
    ]
    assert any(sample["prediction"] for sample in samples)


@pytest.mark.skipif(not BENCH.exists(), reason="the benchmark data is not here")
def test_minilongbench_is_named_so_and_gold_scores_100(tmp_path, tokenizer):
    with tarfile.open(BENCH) as archive:
        content = io.BytesIO(archive.extractfile("bench/longbench/minilongbench_en.jsonl").read())
    (tmp_path / "mini.jsonl").write_bytes(content.getvalue())
    evaluation = LongBench(tmp_path / "mini.jsonl", (2048,))
    found = evaluation.collections
    assert list(found) == list(tasks())
    assert {collection.name for collection in found.values()} == {"MiniLongBench"}
    assert sum(len(collection.prompts) for collection in found.values()) == 187
    for task, collection in found.items():
        for prompt in collection.prompts:
            assert max(score_of(task, answer, prompt) for answer in prompt.answers) == 100
            assert score_of(task, "", prompt) == 0


def test_difflib_is_what_the_fuzzy_package_uses():
    """Long lines: its heuristic for frequent letters is on, as it is there."""
    one, other = "x" * 150 + "ab" * 60, "ab" * 60 + "x" * 150
    plain = difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()
    assert metrics.edit_similarity(one, other) == round(100 * difflib.SequenceMatcher(None, one, other).ratio()) / 100
    assert metrics.edit_similarity(one, other) != round(100 * plain) / 100
