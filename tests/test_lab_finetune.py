"""Fine-tuning a pretrained model on a lab task: rows, loss, exact match, resumption, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import farspan
from farspan import cli
from farspan.custom_code import import_code
from farspan.errors import FarspanError
from farspan.lab import finetune as lab_finetuning
from farspan.lab.custom_tasks import CustomTask, load_custom_task
from farspan.lab.examples import draw_examples
from farspan.lab.finetune import (
    AnswerLoss,
    FinetuneConfig,
    draw_batch,
    encode_texts,
    finetune_model,
    make_text_data,
    match_answers,
)
from farspan.lab.rows import Rows
from farspan.lab.tasks import find_task
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.workflows import lab_finetune
from farspan.workflows.lab_finetune import finetune
from lab_data import hash_of_data

CONFIG = FinetuneConfig("tiny", "parity", "1:4", "5:6", train_examples=20, test_examples=8, batch=6)
PARITY = find_task("parity")


@pytest.fixture(scope="module")
def tokenizer():
    return farspan.load("nope-twin").tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer) -> str:
    """The folder of a small untrained model with the tokenizer of a bundled one."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = FarspanConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        position="none",
    )
    FarspanForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_rows_are_input_line_break_target_and_end(tokenizer):
    examples = draw_examples(find_task("addition"), (1, 3), 12, 0, scratchpad="full")
    rows = encode_texts(examples, tokenizer)
    for example, ids, start, stop in zip(examples, rows.ids, rows.start, rows.stop, strict=True):
        assert tokenizer.decode(ids[:start]) == f"{example.input}\n"
        assert tokenizer.decode(ids[start : stop - 1]) == example.target
        assert (ids[stop - 1 :] == tokenizer.eos_token_id).all()


@pytest.mark.parametrize(
    ("task", "scratchpad", "even", "sha256"),
    [("addition", "full", False, "e309d139e46a8ded"), ("parity", "none", True, "c013d9220720f3b7")],
)
def test_the_data_of_a_fine_tuning_keep_every_bit(task, scratchpad, even, sha256, tokenizer):
    sizes = {"train_examples": 300, "test_examples": 40}
    config = FinetuneConfig("tiny", task, scratchpad=scratchpad, even_lengths=even, **sizes)
    assert hash_of_data(make_text_data(config, find_task(task), tokenizer)) == sha256


def test_examples_of_the_splits_are_disjoint_and_of_their_lengths(tokenizer):
    data = make_text_data(CONFIG, PARITY, tokenizer)
    texts = [
        {tokenizer.decode(ids[:start]) for ids, start in zip(rows.ids, rows.start, strict=True)}
        for rows in (data.train, data.held_out, data.beyond)
    ]
    assert sum(map(len, texts)) == len(set.union(*texts))
    assert set(data.held_out_lengths) <= {1, 2, 3, 4}
    assert set(data.beyond_lengths) == {5, 6}


@torch.no_grad()
def test_loss_counts_the_answers_only(tiny, tokenizer):
    model, rows = farspan.load(tiny).model, make_text_data(CONFIG, PARITY, tokenizer).train
    batch = draw_batch(rows, CONFIG, 3)
    assert torch.equal(batch, draw_batch(rows, CONFIG, 3))
    assert not torch.equal(batch, draw_batch(rows, CONFIG, 4))
    losses = []
    for ids in batch[0]:
        text = tokenizer.decode(ids)
        start = len(tokenizer.encode(text[: text.index("\n") + 1], add_special_tokens=False))
        stop = start + int((ids[start:] == tokenizer.eos_token_id).nonzero()[0]) + 1
        logits = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        losses += [-logits[place - 1, ids[place]] for place in range(start, stop)]
    assert float(AnswerLoss(model)(batch)) == pytest.approx(float(sum(losses)) / len(losses))


def test_exact_match_equals_greedy_decoding():
    """Answers that transformers generates match; with any other token they do not."""
    model, tokenizer = farspan.load("nope-twin")
    prompts = [tokenizer.encode(text) for text in ("Once upon a time", "The", "She said that he")]
    answers = [
        model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0]
        for ids in prompts
    ]
    start = torch.tensor(list(map(len, prompts)))
    stop = torch.tensor(list(map(len, answers)))
    ids = torch.zeros(len(answers), int(stop.max()), dtype=torch.long)
    for row, answer in zip(ids, answers, strict=True):
        row[: len(answer)] = answer
    assert match_answers(model, Rows(ids, start, stop)).tolist() == [True] * 3
    for row in range(3):
        for place in range(int(start[row]), int(stop[row])):
            wrong = ids.clone()
            wrong[row, place] = (wrong[row, place] + 1) % len(tokenizer)
            expected = np.arange(3) != row
            assert (match_answers(model, Rows(wrong, start, stop)) == expected).all()


@pytest.mark.parametrize(("logits", "expected"), [(2 * 5 * 7 + 1, [2, 2, 1]), (1, [1] * 5)])
def test_exact_match_computes_no_more_logits_at_once_than_allowed(logits, expected, monkeypatch):
    """Of at least one row."""
    monkeypatch.setattr(lab_finetuning, "MAX_LOGITS", logits)
    sizes: list[int] = []

    class Model(torch.nn.Module):
        """Its most likely token is always 3."""

        device = torch.device("cpu")
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7))

        def forward(self, input_ids, use_cache):
            sizes.append(len(input_ids))
            logits = torch.zeros(*input_ids.shape, 7)
            logits[..., 3] = 1
            return SimpleNamespace(logits=logits)

    ids = torch.full((5, 5), 3)
    ids[1, 4] = 2  # in an answer
    ids[2, 1] = 2  # in a prompt
    rows = Rows(ids, torch.full((5,), 3), torch.full((5,), 5))
    assert match_answers(Model(), rows).tolist() == [True, False, True, True, True]
    assert sizes == expected


def test_a_step_counts_the_tokens_of_its_rows(tiny, tokenizer, tmp_path):
    rows = make_text_data(CONFIG, PARITY, tokenizer).train
    counted: list[int] = []
    finetune_model(
        farspan.load(tiny).model,
        rows,
        replace(CONFIG, steps=2),
        tmp_path / "run",
        lambda metrics: counted.append(metrics.tokens),
    )
    assert counted == [6 * rows.ids.shape[1], 2 * 6 * rows.ids.shape[1]]


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(lab_finetune.style, "save", lambda figure, stem: None)


SETTINGS = [
    'train_lengths="1:4"',
    'test_lengths="5:6"',
    "train_examples=30",
    "test_examples=8",
    "batch=16",
    "lr=1e-2",
    "warmup=2",
]


@pytest.mark.long
def test_finetune_learns_resumes_and_records(tiny, tmp_path, no_figures):
    out = tmp_path / "run"
    result = finetune(tiny, "parity", [*SETTINGS, "steps=40"], out)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == list(range(1, 41))
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 4
    record = json.loads((out / "record.json").read_text())
    assert record["settings"]["task"] == "parity"
    assert (record["in_range"], record["beyond"]) == (result.in_range, result.beyond)
    assert sum(total for _, total in result.beyond.values()) == 8
    assert set(result.beyond) == {"5", "6"}
    lengths = result.plot().axes[0].lines[0].get_xdata()
    assert {*map(str, lengths)} == {*result.in_range, *result.beyond}
    again = finetune(tiny, "parity", [*SETTINGS, "steps=40"], out)
    assert (again.in_range, again.beyond, again.loss) == (
        result.in_range,
        result.beyond,
        result.loss,
    )
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 40, "it is not trained again"
    with pytest.raises(FarspanError, match="holds another run: steps is 40 there and 41 here"):
        finetune(tiny, "parity", [*SETTINGS, "steps=41"], out)
    with pytest.raises(FarspanError, match="is not empty and holds no run of farspan"):
        finetune(tiny, "parity", SETTINGS, tmp_path)


def test_examples_beyond_a_learned_table_are_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(lab_finetune, "max_positions", lambda config, layers: 12)
    with pytest.raises(FarspanError, match="has a table of 12 positions; test on shorter lengths"):
        finetune(tiny, "parity", SETTINGS, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    other = type("Tokenizer", (), {"eos_token_id": None, "bos_token_id": None})()
    with pytest.raises(FarspanError, match="no end-of-text token"):
        encode_texts(draw_examples(find_task("copy"), (2, 2), 1, 0), other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope-twin", "cpoy"], "'cpoy' is unknown; did you mean copy"),
        (["nope-twin", "copy", "steps=0"], "steps is 0; set it to 1 or more"),
        (["nope-twin", "copy", "lr=0.0"], "lr is 0; choose a learning rate above 0"),
        (["nope-twin", "copy", 'scratchpad="full"'], "copy has no scratchpad"),
        (["nope-twin", "copy", 'train_lengths="9:2"'], "'9:2' is not a range of lengths"),
        (["nope-twin", "copy", "stpes=2"], "stpes"),
        (["nope-twin", "scan", "test_lengths=50:60"], "scan has no example of 50 to 60 actions"),
        (["nope-twni", "copy"], "nope-twni"),
        (["nope-twin", "my.toml"], "my.toml is a recipe; name one of its tasks, as my.toml:TASK"),
    ],
)
def test_invalid_usage_is_one_sentence(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["farspan", "lab", "finetune", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir()), "nothing is written"


RECIPE = """
tasks = ["mine"]
encodings = ["back"]
[custom_tasks.mine]
file = "mine.py:make"
train_lengths = "1:4"
test_lengths = "5:6"
[custom_encodings]
back = "mine.py:Back"
"""
CODE = """
from farspan.model.encodings import Encoding

class Back(Encoding):
    def scores(self, q, k, q_positions, k_positions):
        return (k_positions - q_positions[:, None]) * 0.5

def make(length, rng):
    bits = rng.integers(2, size=length)
    return " ".join(map(str, bits)), str(bits.sum() % 2)
"""


@pytest.fixture
def own_task(tmp_path) -> str:
    (tmp_path / "my.toml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path / 'my.toml'}:mine"


@pytest.mark.long
def test_own_task_and_model_with_its_own_encoding_need_trust(
    own_task, tokenizer, tmp_path, no_figures
):
    reference = f"{tmp_path / 'mine.py'}:Back"
    import_code(reference, "encoding", trust_remote_code=True)
    config = FarspanConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        position="back",
        custom_encodings={"back": reference},
    )
    FarspanForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model, out = str(tmp_path / "model"), tmp_path / "run"
    settings = ["steps=2", "batch=4", "train_examples=20", "test_examples=6"]
    for task in (own_task, "parity"):
        with pytest.raises(FarspanError, match="runs Python code .* add --trust-remote-code"):
            finetune(model, task, settings, out)
    result = finetune(model, own_task, settings, out, trust_remote_code=True)
    assert set(result.beyond) == {"5", "6"}
    (tmp_path / "mine.py").write_text(CODE + "# changed\n")
    with pytest.raises(FarspanError, match="holds another run: task_sha256 is"):
        finetune(model, own_task, settings, out, trust_remote_code=True)


def test_splits_of_a_folder_are_used_as_they_are(tmp_path, tokenizer):
    for number, split in enumerate(("train", "validation", "test")):
        rows = [
            {"input": f"{number} {n}", "target": "a", "length": 1 + n % 3 // 2} for n in range(6)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text)
    task = load_custom_task("mine", CustomTask(str(tmp_path)))
    config = replace(CONFIG, train_lengths="1:3", test_lengths="1:3")
    data = make_text_data(config, task, tokenizer)
    for number, rows in enumerate((data.train, data.held_out, data.beyond)):
        assert all(tokenizer.decode(ids).startswith(str(number)) for ids in rows.ids)
    assert len(data.train) == 8, "the two longer ones are repeated"
    as_in_the_file = make_text_data(replace(config, even_lengths=False), task, tokenizer)
    assert len(as_in_the_file.train) == 6


@pytest.mark.parametrize(
    ("name", "least"),
    [("train_examples", 1), ("test_examples", 2), ("steps", 1), ("batch", 1)],
)
def test_numbers_are_taken_from_the_least_one_on(name, least):
    assert getattr(replace(CONFIG, **{name: least}), name) == least
    with pytest.raises(FarspanError, match=f"{name} is {least - 1}; set it to {least} or more"):
        replace(CONFIG, **{name: least - 1})


def test_seeds_are_those_that_training_can_use():
    replace(CONFIG, seed=2**20 - 1)
    for seed in (-1, 2**20, 20261118):
        with pytest.raises(FarspanError, match=f"seed is {seed}; choose it from 0 to 1048575"):
            replace(CONFIG, seed=seed)


def test_ranges_need_one_length_of_the_released_data():
    """Of PCFG SET, which has examples of 32 functions and none of 31, 33 or 34."""
    config = replace(CONFIG, train_lengths="31:32", even_lengths=False)
    config.check_task(find_task("pcfg"))
    with pytest.raises(FarspanError, match="have no example of 33 to 34 functions"):
        replace(config, train_lengths="33:34").check_task(find_task("pcfg"))


def test_ranges_without_an_example_are_refused():
    """Commands of SCAN have 22 or 24 actions, and none has 23."""
    for lengths in ("22:23", "23:24"):
        replace(CONFIG, train_lengths=lengths).check_task(find_task("scan"))
    with pytest.raises(FarspanError, match="scan has no example of 23 to 23 actions"):
        replace(CONFIG, train_lengths="23:23").check_task(find_task("scan"))


def test_too_few_examples_to_hold_some_out_are_refused(tokenizer):
    """There are two bits, and both are trained on."""
    with pytest.raises(
        FarspanError,
        match="parity has too few examples of 1 to 1 bits to hold some out; train on more lengths",
    ):
        make_text_data(replace(CONFIG, train_lengths="1:1"), PARITY, tokenizer)


def test_ranges_default_to_those_of_the_task():
    assert replace(CONFIG, train_lengths="", test_lengths="").ranges(PARITY) == ((1, 8), (9, 16))
