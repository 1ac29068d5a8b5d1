"""One rule says whether texts begin with a begin-of-text token, and every command follows it."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import farspan
from farspan import begin_of_text as rule
from farspan.attention.layout import Layout
from farspan.attention.patch import Patch, fingerprint
from farspan.bundled import BUNDLED_MODELS
from farspan.data.documents import Document
from farspan.data.tokens import END, add_begin_of_text, adds_begin_of_text
from farspan.data.windows import cut_windows, split_windows
from farspan.errors import CorruptError, FarspanError
from farspan.evals import commonsense
from farspan.evals.decoding import encode_prompt
from farspan.evals.perplexity import Perplexity, Text
from farspan.evals.scores import EvalCell
from farspan.methods.job import FitJob
from farspan.model.loss import losses_by_context, token_losses
from farspan.train.metadata import begin_of_text, stated_begin_of_text
from farspan.workflows import extend as extend_workflow
from farspan.workflows import generate as generate_workflow
from farspan.workflows import reproduce
from farspan.workflows.attention_analysis import compare_attention
from farspan.workflows.eval_models import model_identity

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama whose tokenizer has a begin-of-text token and does not say whether to add it."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def losses(monkeypatch):
    """Set what the measurement says."""

    def set_losses(with_token: float, without: float) -> None:
        measured = {"with": with_token, "without": without}
        monkeypatch.setattr(rule, "_measure", lambda model, tokenizer: measured)

    return set_losses


def decide(folder, **options):
    return rule.load_with_begin_of_text(folder, **options)


def adding(tokenizer):
    """The tokenizer with rules that add a begin-of-text token."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize(("without", "expected"), [(4.2, True), (4.05, False), (3.0, False)])
def test_losses_decide_where_metadata_are_silent(checkpoint, losses, without, expected):
    losses(4.0, without)
    loaded = decide(checkpoint)
    token = loaded.tokenizer.bos_token_id
    assert loaded.begin.ids == (token,) * expected
    assert begin_of_text(loaded.tokenizer) == [token] * expected
    assert loaded.begin.remembered is expected
    (note,) = loaded.begin.notes
    compared = f"a loss of 4.00 with it and {without:.2f} without"
    assert note.endswith(f"measured, since its tokenizer does not say: {compared}")
    assert loaded.begin.to_json()["losses"] == {"with": 4.0, "without": without}


def test_measures_the_same_tokens_with_and_without(checkpoint, monkeypatch):
    model, tokenizer, begin = decide(checkpoint)
    rows = []

    def record(model, ids):
        rows.append(ids)
        return token_losses(model, ids)

    monkeypatch.setattr(rule, "token_losses", record)
    assert rule._measure(model, tokenizer) == begin.losses
    with_token, without = rows
    assert torch.equal(with_token[:, 1:], without)
    assert (with_token[:, 0] == tokenizer.bos_token_id).all()
    expected = token_losses(model, with_token)[:, 1:].mean()
    assert begin.losses["with"] == pytest.approx(float(expected), abs=1e-4)
    assert begin.losses["without"] == pytest.approx(
        float(token_losses(model, without).mean()), 1e-4
    )


@pytest.mark.parametrize("stated", [True, False])
def test_metadata_decide_and_a_large_disagreement_is_a_warning(checkpoint, losses, stated):
    model, tokenizer, _ = decide(checkpoint)
    add_begin_of_text(tokenizer, stated)
    for gap, warns in ((0.4, False), (0.6, True)):
        losses(*((4.0 + gap, 4.0) if stated else (4.0, 4.0 + gap)))
        begin = rule.decide_begin_of_text(model, tokenizer)
        assert bool(begin.ids) == stated
        assert bool(begin.warning) == warns
        if warns:
            assert f"--bos {'no' if stated else 'yes'}" in begin.warning
            assert begin.notes[-1] == begin.warning
    losses(*((4.0, 9.0) if stated else (9.0, 4.0)))
    assert not rule.decide_begin_of_text(model, tokenizer).warning


def test_a_tokenizer_without_a_path_has_no_metadata(checkpoint, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.name_or_path = ""
    (tmp_path / "training.json").write_text('{"begin_of_text": true}')
    monkeypatch.chdir(tmp_path)
    assert stated_begin_of_text(tokenizer)[0] is None


def test_the_tokenizers_own_setting_is_read(checkpoint):
    load = AutoTokenizer.from_pretrained
    assert stated_begin_of_text(load(checkpoint))[0] is None
    assert stated_begin_of_text(load(checkpoint, add_bos_token=False))[0] is False
    assert stated_begin_of_text(load(checkpoint, add_bos_token=True))[0] is True
    assert stated_begin_of_text(adding(load(checkpoint))) == (True, "its tokenizer adds it")
    tokenizer = adding(load(checkpoint))
    add_begin_of_text(tokenizer, False)
    assert not adds_begin_of_text(tokenizer)
    tokenizer.bos_token = None
    assert stated_begin_of_text(tokenizer)[0] is False


def test_the_option_overrides_everything(checkpoint, losses):
    losses(1.0, 9.0)
    begin = decide(checkpoint, bos="no").begin
    assert (begin.ids, begin.why, begin.remembered) == ((), "--bos no", False)
    assert decide(BUNDLED_MODELS / "nope-twin", bos="yes").begin.ids == (0,)
    with pytest.raises(FarspanError, match="--bos maybe is unknown; choose one of auto, yes, no"):
        decide(checkpoint, bos="maybe")
    loaded = decide(checkpoint)
    loaded.tokenizer.bos_token = None
    with pytest.raises(FarspanError, match="--bos yes needs a begin-of-text token"):
        rule.decide_begin_of_text(loaded.model, loaded.tokenizer, "yes")


def test_bundled_models_are_not_measured(monkeypatch):
    monkeypatch.setattr(rule, "_measure", None)
    for name in ("nope-twin", "rope-twin", "swan-twin"):
        begin = decide(name).begin
        assert (begin.ids, begin.notes, begin.remembered) == ((), (), None)


def test_the_token_counts_in_the_length_of_windows():
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")
    documents = [Document("a", "one two three four five six " * 60)]
    plain = cut_windows(documents, tokenizer, 16, 3).ids
    with_token = cut_windows(documents, tokenizer, 17, 3, begin=[7]).ids
    assert torch.equal(with_token[:, 1:], plain)
    assert with_token[:, 0].tolist() == [7] * 3
    lengths, limits = {"search": 20, "choose": 16}, {"search": 2, "choose": 2}
    for name, windows in split_windows(documents, tokenizer, lengths, limits, begin=[7]).items():
        assert windows.ids.shape[1] == lengths[name]
        assert windows.ids[:, 0].tolist() == [7] * len(windows.ids)


def test_shorter_windows_of_a_job_begin_anew():
    rows = torch.arange(2 * 9).view(2, 9)
    rows[:, 0] = 99
    job = FitJob(8, 4, rows, rows, (0,), 1, "", begin=(99,)).with_windows(5)
    texts = ([1, 2, 3, 4], [5, 6, 7, 8], [10, 11, 12, 13], [14, 15, 16, 17])
    assert job.search.tolist() == [[99, *text] for text in texts]
    changed = job.batches(4, 4, torch.device("cpu"), lambda text, number: (text * 0, text > 0))(0)
    assert changed[0].tolist() == [[99, 0, 0, 0, 0]] * 4
    with pytest.raises(FarspanError, match=r"windows of 6 tokens do not fit .* of 5; choose 5"):
        job.with_windows(6)


def test_shorter_contexts_keep_the_token(checkpoint):
    model = farspan.load(checkpoint).model
    rows = torch.arange(1, 25).view(1, 24)
    by_context = losses_by_context(model, rows, [8, 24], 4, begin=1)
    short = torch.cat((rows[:, :1], rows[:, -7:]), 1)
    assert by_context[8][0] == pytest.approx(float(token_losses(model, short)[0, -4:].mean()))
    assert by_context[24][0] == pytest.approx(float(token_losses(model, rows)[0, -4:].mean()))


JUDGED = ("one two three four five six " * 60, "two four six one three five " * 60)


@pytest.fixture
def judge(checkpoint, tmp_path, monkeypatch):
    """Runs benchmarks/conversion.py on a patch of the checkpoint; returns its losses."""
    lines = (json.dumps({"text": text}) for text in JUDGED)
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    script = Path(__file__).parent.parent / "benchmarks" / "conversion.py"

    def run(begin_of_text: bool | None, *options: str) -> dict[str, dict[str, list[float]]]:
        patch = Patch(
            "swan",
            fingerprint(farspan.load(checkpoint).model),
            64,
            32,
            name=str(checkpoint),
            layout=Layout.parse(["rope/8", "none"]),
            begin_of_text=begin_of_text,
        )
        patch.save(tmp_path / "patch")
        words = [tmp_path / "patch", "--text", tmp_path / "text.jsonl", "--windows", 4]
        words += ["--longest", 64, "--shortest", 16, "--keys", 0]
        words += ["--out", tmp_path / "out.json", *options]
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, words)])
        runpy.run_path(str(script), run_name="__main__")
        return json.loads((tmp_path / "out.json").read_text())["losses"]

    return run


@pytest.mark.parametrize("begins", [True, False])
def test_a_conversion_is_judged_on_texts_that_begin_as_it_expects(judge, checkpoint, begins):
    model, tokenizer, begin = decide(checkpoint, bos="yes" if begins else "no")
    documents = [Document(text[:3], text) for text in JUDGED]
    windows = cut_windows(documents, tokenizer, 64, 2, begin=begin.ids).ids  # one of each
    losses = judge(begins)
    assert [*losses["patch"]] == ["16", "32", "64"]
    for context in (16, 32):
        rows = torch.cat((windows[:, :begins], windows[:, begins - context :]), 1)
        expected = token_losses(model, rows)[:, -8:].mean(1)
        assert losses["base"][str(context)] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_conversion_is_judged_from_lengths_that_its_base_was_trained_on(judge, capsys):
    with pytest.raises(SystemExit) as caught:
        judge(None, "--shortest", "64")
    assert caught.value.code == 2
    assert "--shortest is 64, and the base is measured up to its" in capsys.readouterr().err


def perplexity(mode: str, begin: tuple[int, ...]) -> Perplexity:
    ids = torch.arange(100, 148, dtype=torch.int32)
    text = Text("text", ("document",), (ids,), "hash")
    return Perplexity((text,), (16, 32), mode, stride=8, begin=begin)


def test_windows_of_same_score_the_same_tokens_with_and_without_the_token(checkpoint):
    model, tokenizer, _ = decide(checkpoint)
    plain, with_token = perplexity("same", ()), perplexity("same", (7,))
    for length in (16, 32):
        for without, window in zip(
            plain.plans["text", length], with_token.plans["text", length], strict=True
        ):
            assert window == replace(without, start=without.start + 1)
    cell = with_token.cells()[0]
    sample = with_token.run(cell, model, tokenizer)[0]
    row = torch.tensor([[7, *range(100 + sample["start"], 100 + sample["end"])]])
    assert row.shape[1] == cell.length == 16
    expected = float(token_losses(model, row)[0, -8:].sum())
    assert sample["nll"] == pytest.approx(expected, rel=1e-5)
    curve = with_token.run(with_token.cells()[-1], model, tokenizer)[0]
    row = torch.tensor([[7, *range(101, 132)]])
    assert curve["nll"] == pytest.approx(float(token_losses(model, row).sum()), rel=1e-5)


def test_modes_that_fix_the_token_keep_their_cells():
    for mode in ("paper-a", "yarn"):
        assert perplexity(mode, (7,)).cells() == perplexity(mode, ()).cells()
        assert perplexity(mode, (7,)).plans == perplexity(mode, ()).plans
    for with_token, without in zip(
        perplexity("same", (7,)).cells(), perplexity("same", ()).cells(), strict=True
    ):
        assert with_token.settings == {**without.settings, "begin of text": [7]}


def test_prompts_begin_with_exactly_one_token(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    plain, token = tokenizer("some text")["input_ids"], tokenizer.bos_token_id
    for each in (tokenizer, adding(AutoTokenizer.from_pretrained(checkpoint))):
        each.begins_texts = True
        assert encode_prompt(each, "some text") == [token, *plain]
        assert encode_prompt(each, f"{END}some text") == [token, *plain]
        each.begins_texts = False
        assert encode_prompt(each, "some text") == plain


def test_a_prompt_does_not_end_with_the_end_of_text_token_of_its_tokenizer(checkpoint):
    """The model would begin another text instead of an answer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.begins_texts = False
    plain, end = encode_prompt(tokenizer, "some text"), tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert tokenizer("some text")["input_ids"] == [*plain, tokenizer.eos_token_id]
    assert encode_prompt(tokenizer, "some text") == plain


def test_generate_follows_the_rule_and_says_why(checkpoint, losses, monkeypatch):
    losses(4.0, 9.0)
    prompts, notes = [], []

    def stream(model, tokenizer, options, seed, name):
        prompts.append(options["input_ids"][0].tolist())
        return iter(())

    monkeypatch.setattr(generate_workflow, "_stream", stream)
    for bos in ("auto", "no"):
        list(farspan.generate(checkpoint, "some text", bos=bos, say=notes.append))
    assert prompts[0] == [0, *prompts[1]]
    assert len(notes) == 1
    assert "a loss of 4.00 with it and 9.00 without" in notes[0]


@pytest.mark.long
def test_eval_keys_and_records_name_the_rule(checkpoint, losses, tmp_path):
    losses(4.0, 9.0)
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six " * 60)
    options = {"lengths": [32], "data": str(text), "stride": 8, "windows": 2}
    results = {
        bos: farspan.evaluate(checkpoint, "perplexity", tmp_path / bos, bos=bos, **options)
        for bos in ("auto", "yes", "no")
    }
    values = {bos: result.scores[0].value for bos, result in results.items()}
    assert values["auto"] == values["yes"] != values["no"]
    keys = {bos: {file.name for file in (tmp_path / bos / "cells").iterdir()} for bos in results}
    assert keys["auto"] == keys["yes"]
    assert not keys["auto"] & keys["no"]
    assert any("a loss of 4.00 with it" in note for note in results["auto"].notes)
    assert not results["no"].notes
    record = json.loads((tmp_path / "auto" / "record.json").read_text())
    assert record["settings"]["begin_of_text"][str(checkpoint)]["ids"] == [0]


def test_identities_without_the_token_are_those_of_earlier_versions(checkpoint):
    model, tokenizer, _ = decide(checkpoint, bos="no")
    assert "begin of text" not in model_identity(model, tokenizer, None)
    tokenizer.begins_texts = True
    assert model_identity(model, tokenizer, None)["begin of text"] == "[0]"
    adds = adding(AutoTokenizer.from_pretrained(checkpoint))
    adds.begins_texts = False  # other prompts than the tokenizer makes
    assert model_identity(model, adds, None)["begin of text"] == "[]"


def test_extend_fits_with_the_token_and_the_patch_remembers_it(checkpoint, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six " * 400)
    jobs = []
    monkeypatch.setattr(
        extend_workflow, "fit_methods", lambda model, layers, job, *rest: jobs.append(job) or 1 / 0
    )
    for bos in ("yes", "no"):
        with pytest.raises(ZeroDivisionError):
            farspan.extend(checkpoint, 96, tmp_path / bos, "uniform", data=str(text), bos=bos)
    with_token, plain = jobs
    assert with_token.begin == (0,)
    for split in ("search", "choose"):
        ids = getattr(with_token, split)
        assert ids.shape[1] == getattr(plain, split).shape[1]
        assert (ids[:, 0] == 0).all()
        assert not (getattr(plain, split)[:, 0] == 0).any()


def test_a_patch_applies_what_it_remembers(checkpoint, losses, tmp_path):
    losses(9.0, 4.0)
    model = farspan.load(checkpoint).model
    scales = farspan.attention.scales.Scales.uniform(1.2, [0, 1], 2)
    patch = Patch("test", fingerprint(model), 96, 64, scales, name=str(checkpoint))
    for number, remembered in enumerate((None, True, False)):
        folder = replace(patch, begin_of_text=remembered).save(tmp_path / str(number))
        assert Patch.load(folder).begin_of_text is remembered
        assert begin_of_text(farspan.load(folder).tokenizer) == [0] * bool(remembered)
        begin = decide(folder).begin
        assert begin.ids == ((0,) if remembered else ())
        assert (begin.why == "its patch was made so") == (remembered is not None)
    described = patch.describe()
    assert "begin_of_text" not in described, "patches of other models are as they were"
    assert replace(patch, begin_of_text=True).describe() == {**described, "begin_of_text": True}
    assert replace(patch, begin_of_text=True).then(patch).begin_of_text is True
    record = json.loads((tmp_path / "1" / "patch.json").read_text())
    (tmp_path / "1" / "patch.json").write_text(json.dumps({**record, "begin_of_text": "yes"}))
    with pytest.raises(CorruptError, match="begin_of_text is 'yes'"):
        Patch.load(tmp_path / "1")


def test_models_that_read_the_same_tokens_must_begin_alike(checkpoint, losses, tmp_path):
    losses(4.0, 9.0)
    other = "nope-twin"
    options = {"length": 16, "windows": 1}
    with pytest.raises(FarspanError, match="expects a begin-of-text token.*choose --bos yes or"):
        compare_attention([str(checkpoint), other], **options)
    for bos in ("yes", "no"):
        assert compare_attention([str(checkpoint)] * 2, bos=bos, **options).tokens == 16


def test_diagnose_reads_windows_with_the_token(checkpoint, losses, tmp_path):
    losses(4.0, 9.0)
    text, notes = tmp_path / "text.txt", []
    text.write_text("one two three four five six " * 100)
    options = {"lengths": [32, 96], "windows": 1, "say": notes.append, "out": tmp_path / "out"}
    (diagnosis,) = farspan.diagnose(checkpoint, str(text), **options)
    assert diagnosis.curves.length == 96
    assert len(notes) == 1
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["read"][str(checkpoint)]["begin_of_text"]["ids"] == [0]


def test_commonsense_items_begin_as_the_rule_says(checkpoint, monkeypatch):
    tokenizer, encoded = AutoTokenizer.from_pretrained(checkpoint), []

    def harness(model, tokenizer, length, batch):
        encoded.append(tokenizer("some text")["input_ids"])
        raise FarspanError("enough")

    monkeypatch.setattr(commonsense, "_harness", harness)
    monkeypatch.setattr(commonsense.Commonsense, "_task", lambda *args: None)
    model, cell = farspan.load(checkpoint).model, EvalCell("commonsense", "piqa", 64, {})
    for begins in (True, False):
        tokenizer.begins_texts = begins
        with pytest.raises(FarspanError, match="enough"):
            commonsense.Commonsense("", 64).run(cell, model, tokenizer)
    assert encoded == [[0, *encoded[1]], encoded[1]]
    assert not adds_begin_of_text(tokenizer), "the tokenizer itself is as it was"


def test_cells_of_studies_name_the_token(checkpoint, losses):
    losses(4.0, 9.0)
    texts = reproduce.StudyTexts(reproduce.read_study("extend-small"))
    texts.hashes, texts.benchmark_sources = {}, []  # the texts are not here
    cell = reproduce.StudyCell("small-none", "none", 2, 0)
    described = reproduce._describe(texts, cell, checkpoint)
    assert described["begin of text"] == [0]
    assert "begin of text" not in reproduce._describe(texts, cell, Path("nope-twin"))
