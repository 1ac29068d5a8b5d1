"""Perplexity scores exactly the defined tokens, once each, for every batch size and family."""

from __future__ import annotations

import math
import tempfile
import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn import functional as F

from families import FAMILIES, OURS, tokens
from farspan.attention import seam
from farspan.attention.backends import visible_keys
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.evals import perplexity, suites
from farspan.evals.longppl import Contrast, Evaluator, are_key_tokens
from farspan.evals.perplexity import Perplexity, Text, read_text
from farspan.evals.scores import bootstrap, wilson
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.loss import last_logits, last_losses, token_losses

TOKENIZER = SimpleNamespace(bos_token_id=1)


def text(*sizes: int, seed: int = 0) -> Text:
    rows = [tokens(size, 1, seed + number)[0].int() for number, size in enumerate(sizes)]
    return Text(
        "text",
        tuple(f"document {number}" for number in range(len(sizes))),
        tuple(rows),
        f"{sizes} {seed}",
    )


def tiny(**shape) -> FarspanForCausalLM:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 128,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        **shape,
    }
    model = FarspanForCausalLM(FarspanConfig(**shape, intermediate_size=16))
    for parameter in model.parameters():
        parameter.data.mul_(10)  # losses that differ from window to window
    return model.double().eval()


def samples(evaluation: Perplexity, model, tokenizer=TOKENIZER) -> list[dict]:
    return [
        sample for cell in evaluation.cells() for sample in evaluation.run(cell, model, tokenizer)
    ]


@torch.no_grad()
def brute_force_losses(model, contexts: list[tuple[int, ...]], targets: list[int]) -> list[float]:
    """−ln p of each target after its context, in a separate row for every target.

    Contexts of one length share a forward pass.
    """
    losses = [math.nan] * len(contexts)
    for length in {len(context) for context in contexts}:
        numbers = [n for n, context in enumerate(contexts) if len(context) == length]
        rows = torch.tensor([contexts[n] for n in numbers])
        logits = model(input_ids=rows, use_cache=False).logits[:, -1].double()
        expected = torch.tensor([targets[n] for n in numbers])
        values = F.cross_entropy(logits, expected, reduction="none").tolist()
        for number, value in zip(numbers, values, strict=True):
            losses[number] = value
    return losses


@pytest.mark.long
def test_sliding_windows_equal_brute_force_token_by_token():
    """300 random texts, lengths and strides in float64.

    Every token from the first full window of the longest length on is scored once at every length.
    """
    model, rng = tiny(), np.random.default_rng(0)
    contexts: list[tuple[int, ...]] = []
    targets: list[int] = []
    scored_samples: list[tuple[dict, slice]] = []
    for case in range(300):
        stride = int(rng.integers(1, 6))
        lengths = tuple(
            sorted({int(rng.integers(stride + 1, stride + 12)) for _ in range(1 + case % 2)})
        )
        size = max(lengths) + int(rng.integers(0, 9))
        corpus = text(size, seed=case)
        (ids,) = corpus.ids
        evaluation = Perplexity((corpus,), lengths, stride=stride)
        windows = [
            sample
            for cell in evaluation.cells()
            if "curve" not in cell.settings
            for sample in evaluation.run(cell, model, TOKENIZER)
        ]
        for length in lengths:
            at_length = [sample for sample in windows if sample["length"] == length]
            scored = [i for s in at_length for i in range(s["end"] - s["scored"], s["end"])]
            assert sorted(scored) == list(range(max(lengths) - stride, size))
            for sample in at_length:
                start, end = sample["start"], sample["end"]
                assert end - start == length
                first = len(targets)
                for index in range(end - sample["scored"], end):
                    contexts.append(tuple(ids[start:index].tolist()))
                    targets.append(int(ids[index]))
                scored_samples.append((sample, slice(first, len(targets))))
    losses = brute_force_losses(model, contexts, targets)
    for sample, tokens_of_sample in scored_samples:
        assert sample["nll"] == pytest.approx(sum(losses[tokens_of_sample]), abs=1e-10)


def test_tokens_in_front_of_a_window_count_in_its_length():
    evaluation = Perplexity((text(60),), (8, 16), stride=4, begin=(1, 2))
    windows = [sample for sample in samples(evaluation, tiny()) if "losses" not in sample]
    assert {sample["length"] for sample in windows} == {8, 16}
    for sample in windows:
        assert sample["end"] - sample["start"] + 2 == sample["length"]


def label_loss(model, ids: torch.Tensor, last: int) -> torch.Tensor:
    """The mean loss of the last tokens of a window, by labels as the two papers' scripts do it."""
    labels = ids.clone()
    labels[:, :-last] = -100
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[0, :-1], labels[0, 1:])


@torch.no_grad()
@pytest.mark.parametrize("length", [8, 13, 40])
def test_mode_yarn_equals_its_definition(length):
    model, corpus, stride, losses = tiny(), text(30, 5, 61, 3), 4, []
    for ids in corpus.ids:
        before = 0
        for begin in range(0, len(ids), stride):
            end = min(begin + length - 1, len(ids))
            window = torch.cat((torch.tensor([1]), ids[begin:end].long()))[None]
            losses.append(label_loss(model, window, end - before))
            before = end
            if end == len(ids):
                break
    evaluation = Perplexity((corpus,), (length,), "yarn", stride)
    (score,) = evaluation.score(samples(evaluation, model))
    assert math.log(score.value) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-10)
    assert score.n == 30 + 5 + 61 + 3
    assert score.tags["windows"] == len(losses)


@torch.no_grad()
@pytest.mark.parametrize("budget", [None, 40])
def test_mode_paper_a_equals_its_definition(budget):
    model, corpus, stride, length = tiny(), text(30, 7, 61), 4, 12
    losses, left = [], budget or perplexity.BUDGET
    for ids in corpus.ids:
        for begin in range(0, len(ids) - length + 1, stride):
            if left >= stride:
                losses.append(label_loss(model, ids[None, begin : begin + length].long(), stride))
                left -= stride
    evaluation = Perplexity((corpus,), (length,), "paper-a", stride, budget)
    (score,) = evaluation.score(samples(evaluation, model))
    assert math.log(score.value) == pytest.approx(float(torch.stack(losses).mean()), abs=1e-10)
    assert score.n == stride * len(losses) == (budget or 4 * (5 + 13))
    assert score.tags["skipped"] == 1, "the document of 7 tokens"


def test_default_budget_is_that_of_wang_2024():
    assert perplexity.BUDGET == 2_097_152


def test_random_subset_depends_on_the_seed_and_not_on_the_length():
    corpus = text(400, 300, 20)
    base = Perplexity((corpus,), (16, 32), stride=8)
    total = len(base.plans["text", 32])
    drawn = {}
    for seed in (0, 1):
        subset = replace(base, windows=10, seed=seed)
        plans = [
            [(w.document, w.end, w.scored) for w in subset.plans["text", length]]
            for length in (16, 32)
        ]
        assert plans[0] == plans[1]
        assert len(plans[0]) == 10 < total
        drawn[seed] = plans[0]
    assert drawn[0] != drawn[1]
    assert len(replace(base, budget=80).plans["text", 16]) == 10
    assert [cell.settings for cell in base.cells()] != [
        cell.settings for cell in replace(base, seed=1).cells()
    ]


def test_counts_documents_that_are_too_short():
    evaluation = Perplexity((text(60, 10, 31),), (16, 32), stride=8)
    scores = [
        score for score in evaluation.score(samples(evaluation, tiny())) if score.metric == "ppl"
    ]
    assert [score.length for score in scores] == [16, 32]
    assert {score.tags["skipped"] for score in scores} == {2}
    assert {score.tags["documents"] for score in scores} == {1}
    assert {score.n for score in scores} == {60 - (32 - 8)}


def test_tokens_have_equal_weight_and_many_documents_are_resampled():
    evaluation = Perplexity((text(*range(40, 52)),), (16,), stride=8)
    windows = [sample for sample in samples(evaluation, tiny()) if "losses" not in sample]
    (score,) = [score for score in evaluation.score(windows) if score.metric == "ppl"]
    mean = sum(sample["nll"] for sample in windows) / sum(sample["scored"] for sample in windows)
    assert math.log(score.value) == pytest.approx(mean)
    assert score.low < score.value < score.high
    assert score.tags["interval"] == "documents"
    few = evaluation.score([sample for sample in windows if sample["document"] < "document 3"])
    assert few[0].tags["interval"] == "windows"


def test_loss_by_position_averages_full_windows():
    model, corpus = tiny(), text(300)
    evaluation = Perplexity((corpus,), (64,), stride=8)
    curves = [sample for sample in samples(evaluation, model) if "losses" in sample]
    assert len(curves) == 4, "as many full windows as the text has"
    for curve in curves:
        ids = corpus.ids[0][curve["start"] : curve["end"]].long()[None]
        losses = token_losses(model, ids)[0]
        assert curve["positions"][-1] == 64
        assert curve["losses"][-1] == pytest.approx(float(losses[-2:].mean()), abs=1e-4)
        assert curve["nll"] == pytest.approx(float(losses.sum()))
        sizes = np.diff([1, *curve["positions"]])  # the first token has no loss
        assert sizes @ curve["losses"] == pytest.approx(curve["nll"], abs=1e-3), "bins tile it"
    scores = [score for score in evaluation.score(curves) if score.metric == "loss"]
    assert [score.length for score in scores] == curves[0]["positions"]


def test_a_document_of_one_window_has_a_loss_by_position():
    """In 32 bins, or one for each token of a shorter window."""
    curves = [
        sample
        for length in (40, 17)
        for sample in samples(Perplexity((text(length),), (length,), stride=8), tiny())
        if "losses" in sample
    ]
    assert [curve["end"] for curve in curves] == [40, 17]
    assert [len(curve["losses"]) for curve in curves] == [32, 16]
    assert curves[1]["positions"] == list(range(2, 18))


def test_default_lengths_reach_to_the_longest_document(monkeypatch):
    monkeypatch.setattr(suites, "_read_texts", lambda *_: (text(64), text(32, 16)))
    monkeypatch.setattr(suites, "begin_of_text", lambda tokenizer: [])
    model = SimpleNamespace(tokenizer=None)
    plan = SimpleNamespace(config=suites.EvalConfig(), texts={}, evaluator=None)
    plan.lengths, plan.lengths_requested = (16, 32, 64), False
    assert suites._perplexity(None)(model, plan).lengths == (16, 32)


def test_mode_yarn_scores_a_document_of_one_token():
    """It follows the begin-of-text token."""
    model = tiny()
    (sample,) = samples(Perplexity((text(1),), (16,), "yarn", stride=8), model)
    (loss,) = brute_force_losses(model, [(1,)], text(1).ids[0].tolist())
    assert sample["nll"] == pytest.approx(loss)


def test_results_do_not_depend_on_batches_or_out_of_memory(monkeypatch):
    model, evaluation = (
        tiny(num_hidden_layers=2).float(),
        Perplexity((text(200, 150),), (16, 32), stride=8),
    )
    single, sizes = samples(evaluation, model), []

    def run_out_of_memory(model, rows, count):
        sizes.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return last_losses(model, rows, count)

    monkeypatch.setattr(perplexity, "last_losses", run_out_of_memory)
    assert samples(evaluation, model) == single
    assert set(sizes) == {1}, "on the CPU every batch has one row"
    monkeypatch.setattr(perplexity, "rows_per_batch", lambda model, length, requested: 10)
    halved = samples(evaluation, model)
    assert {10, 5, 2} <= set(sizes)
    for one, other in zip(single, halved, strict=True):
        assert one["nll"] == pytest.approx(other["nll"], rel=1e-5)


# LongPPL.

CONTRAST = Contrast("model", 16, 32)


def test_key_tokens_gain_two_nats_and_are_predicted_well():
    cases = [
        (5.0, 1.0, True),
        (3.01, 1.0, True),
        (3.0, 1.0, False),  # a gain of 2 is not more than 2
        (9.0, 1.99, True),
        (9.0, 2.0, False),  # a log-likelihood of -2 is not above -2
        (9.0, 5.0, False),  # gains, and is still predicted badly
        (0.5, 0.1, False),  # is predicted well from near
        (1.0, 5.0, False),
    ]
    short, long, expected = zip(*cases, strict=True)
    assert are_key_tokens(short, long).tolist() == list(expected)


def token_windows(length: int, *losses: list[float]) -> list[dict]:
    """Samples as a cell with token losses stores them: a window for each list, two a document."""
    return [
        {
            "eval": "perplexity",
            "task": "text",
            "length": length,
            "document": f"document {number // 2}",
            "end": 40 + number,
            "scored": len(row),
            "nll": sum(row),
            "token_losses": row,
        }
        for number, row in enumerate(losses)
    ]


def test_longppl_is_the_perplexity_of_the_key_tokens():
    evaluation = Perplexity((text(80),), (16, 32, 64), stride=8, contrast=CONTRAST)
    measured = token_windows(16, [6.0, 6.0, 1.0], [7.0, 2.0], [1.0, 1.0])
    measured += token_windows(32, [1.0, 5.0, 1.0], [0.5, 1.9], [1.0, 1.0])
    measured += token_windows(64, [3.0, 0.0, 0.0], [4.0, 0.0], [0.0, 0.0])
    scores = {s.length: s for s in evaluation.score(measured) if s.metric == "longppl"}
    assert list(scores) == [16, 32, 64]
    for length, (first, second) in {16: (6.0, 7.0), 32: (1.0, 0.5), 64: (3.0, 4.0)}.items():
        score = scores[length]
        assert score.n == 2, "the first token of the first two windows"
        mean, low, high = bootstrap([first, second], [1, 1], within=(0, math.inf))
        assert (score.value, score.low, score.high) == pytest.approx(
            (math.exp(mean), math.exp(low), math.exp(high))
        )
        assert score.tags["interval"] == "windows"
        assert (score.tags["evaluator"], score.tags["short"], score.tags["long"]) == (
            "model",
            16,
            32,
        )
    plain = replace(evaluation, contrast=None).score(measured)
    assert evaluation.score(measured)[: len(plain)] == plain, "ppl is as without longppl"


def test_longppl_resamples_documents_if_there_are_many():
    evaluation = Perplexity((text(80),), (16, 32), stride=8, contrast=CONTRAST)
    losses = [6.0 + 0.1 * number for number in range(18)]
    measured = token_windows(16, *([loss, loss] for loss in losses))
    measured += token_windows(32, *([1.0, 0.5] for _ in losses))
    score = next(score for score in evaluation.score(measured) if score.metric == "longppl")
    assert (score.length, score.n, score.tags["interval"]) == (16, 36, "documents")
    documents = [number // 2 for number in range(18)]
    _, low, high = bootstrap(losses, [2] * 18, documents)
    assert (math.log(score.low), math.log(score.high)) == pytest.approx((low, high))


def test_the_evaluator_chooses_the_key_tokens():
    evaluation = Perplexity((text(80),), (16, 32), stride=8, contrast=CONTRAST)
    own = token_windows(16, [6.0, 3.0]) + token_windows(32, [1.0, 3.0])
    others = token_windows(16, [6.0, 6.0]) + token_windows(32, [6.0, 1.0])
    for evaluator, values in ((own, [6.0, 1.0]), (others, [3.0, 3.0])):
        scores = [s for s in evaluation.score(own, evaluator) if s.metric == "longppl"]
        assert [math.log(score.value) for score in scores] == pytest.approx(values)


def test_text_without_key_tokens_has_no_longppl():
    evaluation = Perplexity((text(80),), (16, 32), stride=8, contrast=CONTRAST)
    measured = token_windows(16, [3.0, 3.0]) + token_windows(32, [3.0, 3.0])
    assert [score.metric for score in evaluation.score(measured)] == ["ppl", "ppl"]


def bigram_losses(model, rows: torch.Tensor, count: int) -> torch.Tensor:
    """A model that only copies: −ln p is 0.1 if a pair of tokens stands earlier in the row."""
    losses = torch.full((len(rows), count), 5.0)
    for number, row in enumerate(rows.tolist()):
        seen, pairs = set(), list(pairwise(row))
        for place, pair in enumerate(pairs):
            if pair in seen and place >= len(pairs) - count:
                losses[number, place - len(pairs) + count] = 0.1
            seen.add(pair)
    return losses


def test_spans_that_repeat_beyond_the_short_length_are_key_tokens(monkeypatch):
    """48 tokens, 24 of them again, 24 new ones: the pairs that stand again are key tokens."""
    monkeypatch.setattr(perplexity, "last_losses", bigram_losses)
    ids = torch.arange(48).int()
    ids = torch.cat((ids, ids[:24], torch.arange(48, 72).int()))
    evaluation = Perplexity(
        (Text("text", ("one",), (ids,), "repeats"),),
        (16, 64, 72),
        stride=8,
        contrast=Contrast("model", 16, 64),
    )
    measured = samples(evaluation, tiny())
    keys = [score.key for score in evaluation.score(measured) if not score.tags.get("detail")]
    assert keys == evaluation.score_keys()
    ppl, longppl = (
        {s.length: s for s in evaluation.score(measured) if s.metric == metric}
        for metric in ("ppl", "longppl")
    )
    assert ppl[64].n == 96 - (72 - 8)
    assert longppl[64].n == 8, "the last third of the second copy is scored"
    assert [math.log(longppl[n].value) for n in (16, 64, 72)] == pytest.approx([5.0, 0.1, 0.1])
    assert math.log(ppl[64].value) == pytest.approx((8 * 0.1 + 24 * 5.0) / 32)


def test_token_losses_sum_to_the_loss_of_the_window():
    evaluation = Perplexity((text(70, 45),), (16, 32), stride=8, contrast=CONTRAST)
    plain = samples(replace(evaluation, contrast=None), tiny())
    stored = samples(evaluation, tiny())
    windows = [sample for sample in stored if "token_losses" in sample]
    assert len(windows) == len([sample for sample in plain if "end" in sample]) - 3, "3 curves"
    for window in windows:
        assert len(window["token_losses"]) == window["scored"]
        assert sum(window["token_losses"]) == pytest.approx(window["nll"], abs=1e-4)
    without = [{k: v for k, v in sample.items() if k != "token_losses"} for sample in stored]
    assert without == plain


def test_only_longppl_changes_the_settings_of_cells():
    evaluation = Perplexity((text(80),), (16, 32), stride=8)
    earlier = {  # of cells of earlier versions
        "sha256": "(80,) 0",
        "mode": "same",
        "stride": 8,
        "seed": 0,
        "budget": perplexity.BUDGET,
        "windows": None,
        "longest": 32,
        "first": 0,
        "count": 64,
    }
    curve = {"sha256": "(80,) 0", "seed": 0, "curve": 8}
    assert [cell.settings for cell in evaluation.cells()] == [earlier, earlier, curve]
    stored = {**earlier, "token_losses": True}
    cells = replace(evaluation, contrast=CONTRAST).cells()
    assert [cell.settings for cell in cells] == [stored, stored, curve]


def test_an_evaluator_compares_two_lengths_that_it_was_trained_on():
    evaluator = Evaluator("model", 512)
    assert evaluator.contrast((64, 256, 512, 1024)) == Contrast("model", 64, 512)
    assert evaluator.contrast((1000, 300, 100)) == Contrast("model", 100, 300)
    for lengths, sentence in (
        ((512, 1024), r"of 512, 1024 only one is; .* --lengths 128,512,1024"),
        ((1024,), r"of 1024 none is; .* --lengths 128,512,1024"),
        ((256,), r"of 256 only one is; .* --lengths 64,256"),
    ):
        with pytest.raises(FarspanError, match=rf"train length of model \(512\), but {sentence}$"):
            evaluator.contrast(lengths)
    with pytest.raises(FarspanError, match="the config of model does not give its train length"):
        Evaluator("model", None).contrast((64, 256))


WITHOUT_SEAM = {
    "bloom": lambda: hf.BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: hf.MptConfig(vocab_size=128, d_model=32, n_layers=2, n_heads=4),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        word_embed_proj_dim=32,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*(family.name for family in FAMILIES), *WITHOUT_SEAM])
def test_every_family_is_scored_by_its_logits(name):
    if name in WITHOUT_SEAM:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(WITHOUT_SEAM[name]()).eval()
    else:
        model = next(family for family in FAMILIES if family.name == name).build()
    corpus = text(40)
    (sample,) = samples(Perplexity((corpus,), (24,), "paper-a", 17), model)
    ids = corpus.ids[0][None, :24].long()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    assert sample["nll"] == pytest.approx(
        float(F.cross_entropy(logits[0, 6:23], ids[0, 7:], reduction="sum")), rel=1e-4
    )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("family", OURS, ids=lambda family: family.name)
def test_computing_only_the_last_queries_changes_no_logit(family, scaled):
    """The last layer of farspan's models computes only the last queries.

    Also under a schedule, which counts the visible keys of each query, and after a KV cache.
    """
    model, ids = family.build(dtype=torch.float64), tokens(40)
    if scaled:
        table = torch.linspace(1.1, 1.9, 4).repeat(4, 1)
        seam.install(model, Scales(tuple(range(4)), table, table / 8, "log", 8))
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
        for count in (1, 7, 39, 40):
            assert torch.allclose(
                last_logits(model, ids, count), full[:, -count:], rtol=0, atol=1e-9
            )
            output = model.model(input_ids=ids, use_cache=False, positions_to_keep=count)
            assert output.last_hidden_state.shape[1] == count
        cache = hf.DynamicCache(config=model.config)
        last_logits(model, ids[:, :25], 1, cache)
        assert torch.allclose(
            last_logits(model, ids[:, 25:], 4, cache), full[:, -4:], rtol=0, atol=1e-9
        )
        assert cache.get_seq_length() == 40, "the cache holds every position"


def test_last_layer_computes_only_the_last_queries():
    model, calls = FAMILIES[0].build(), []

    def record(call: seam.Call) -> None:
        visible = visible_keys(call.q, call.k, call.mask)
        calls.append((call.q.shape[2], visible[0].tolist()))

    with torch.no_grad(), seam.observing(model, record):
        last_logits(model, tokens(24), 3)
    assert [queries for queries, _ in calls] == [24, 24, 24, 3]
    assert calls[-1][1] == [22, 23, 24]


def test_document_intervals_have_95_percent_coverage():
    """Values of one document are correlated; of 300 intervals at least 88%, not all, cover 0."""
    rng = np.random.default_rng(0)
    covered = value_covered = 0
    for _ in range(300):
        documents = np.repeat(np.arange(25), 8)
        values = rng.normal(0, 1, 25)[documents] + rng.normal(0, 1, 200)
        _, low, high = bootstrap(values, groups=documents, draws=400)
        covered += low <= 0 <= high
        _, low, high = bootstrap(values, draws=400)
        value_covered += low <= 0 <= high
    assert 0.88 * 300 <= covered < 300
    assert value_covered < 0.75 * 300, "resampling single values is overconfident"


def test_intervals_of_window_samples_cover_the_full_perplexity():
    """Of 300 samples of 40 windows, at least 88% of the intervals cover that of all 2,000."""
    rng = np.random.default_rng(1)
    losses = rng.gamma(4, 0.75, 2000)
    evaluation, covered = Perplexity((text(50),), (16,), stride=8), 0
    for _ in range(300):
        drawn = rng.choice(losses, 40, replace=False)
        windows = [
            {
                "eval": "perplexity",
                "task": "text",
                "length": 16,
                "document": "one",
                "scored": 8,
                "nll": 8 * loss,
            }
            for loss in drawn.tolist()
        ]
        (score,) = evaluation.score(windows)
        covered += score.low <= math.exp(losses.mean()) <= score.high
    assert 0.88 * 300 <= covered < 300


@pytest.mark.parametrize("windows", [2, 4, 8])
def test_intervals_of_few_windows_have_95_percent_coverage(windows):
    """Of 500, at least 88% cover the truth; plain percentiles would reach 48%, 79% and 90%."""
    rng = np.random.default_rng(2)
    intervals = [
        bootstrap(rng.gamma(4, 0.75, windows), draws=400, within=(0, math.inf))[1:]
        for _ in range(500)
    ]
    assert 0.88 * 500 <= sum(low <= 3 <= high for low, high in intervals) < 500
    assert min(low for low, _ in intervals) >= 0


def test_a_single_window_has_no_interval():
    evaluation = Perplexity((text(60),), (16,), stride=8, windows=1)
    (score,) = [
        score for score in evaluation.score(samples(evaluation, tiny())) if score.metric == "ppl"
    ]
    assert (score.tags["windows"], score.tags["interval"], score.tags["stride"]) == (1, "none", 8)
    assert score.low == score.value == score.high


@torch.no_grad()
def test_losses_of_large_vocabularies_are_unbiased():
    """A naive float32 sum over 100,000 logits is off by 1e-4, always in the same direction."""
    torch.manual_seed(0)
    config = FarspanConfig(
        vocab_size=100_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1
    )
    model = FarspanForCausalLM(config).eval()
    model.lm_head.weight.normal_(0, 0.6)
    ids = torch.randint(100_000, (1, 65))
    losses = last_losses(model, ids, 64).double()
    assert float((losses - token_losses(model.double(), ids)).mean().abs()) < 1e-5


def test_perplexity_of_a_huge_loss_is_finite():
    windows = [
        {
            "eval": "perplexity",
            "task": "text",
            "length": 16,
            "document": "one",
            "scored": 1,
            "nll": loss,
        }
        for loss in (800.0, 900.0)
    ]
    (score,) = Perplexity((text(50),), (16,), stride=8).score(windows)
    assert math.isfinite(score.value)
    assert score.low <= score.value <= score.high
    assert score.tags["nll"] == 850


@pytest.mark.parametrize(
    ("length", "windows"),
    [(512, 64), (1024, 64), (2048, 32), (4096, 16), (8192, 8), (16_384, 8), (100_000, 8)],
)
def test_cells_are_whole_batches_on_a_gpu(length, windows):
    """Compiled layers do not run batches of another size. A cell has 2^16 tokens, or 8 windows."""
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    (cell, *_) = Perplexity((text(length + 9),), (length,), "paper-a", 1).cells()
    assert cell.settings["count"] == windows
    assert windows % perplexity.rows_per_batch(gpu, length, None) == 0


def test_wilson_interval_is_valid_at_0_and_1():
    assert wilson(0, 10)[:2] == (0.0, 0.0)
    assert wilson(10, 10)[::2] == pytest.approx((1.0, 1.0))
    assert 0.25 < wilson(0, 10)[2] < 0.31
    share, low, high = wilson(40, 100)
    assert (share, round(low, 3), round(high, 3)) == (0.4, 0.309, 0.498)


def test_bad_input_raises_a_clear_error(tmp_path):
    with pytest.raises(
        FarspanError, match=r"no document of text has 64 tokens \(the longest of 2 has 50\)"
    ):
        Perplexity((text(50, 30),), (16, 64), stride=8)
    with pytest.raises(FarspanError, match="a stride of 8 does not fit windows of 8 tokens"):
        Perplexity((text(50),), (8,), stride=8)
    with pytest.raises(FarspanError, match="perplexity mode 'jarn' is unknown"):
        Perplexity((text(50),), (16,), "jarn", 8)
    without = Perplexity((text(50),), (16,), "yarn", 8)
    with pytest.raises(
        FarspanError, match="this tokenizer has none; choose the mode same or paper-a"
    ):
        samples(without, tiny(), SimpleNamespace(bos_token_id=None))
    with pytest.raises(
        FarspanError, match="a budget of 10 scored tokens does not cover one window of 16"
    ):
        Perplexity((text(50),), (16,), "yarn", 8, budget=10).cells()
    with pytest.raises(
        FarspanError, match="a budget of 7 scored tokens does not cover one window of 16"
    ):
        Perplexity((text(50),), (16,), "same", 8, budget=7).cells()
    broken = tiny()
    broken.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(FarspanError, match="the loss on text is nan in windows of 16 tokens"):
        samples(Perplexity((text(50),), (16,), stride=8), broken)


def test_read_text_tokenizes_every_document(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "b.txt").write_text("four five")
    tokenizer = lambda words, **options: {"input_ids": [len(word) for word in words.split()]}  # noqa: E731
    corpus = read_text("words", tmp_path, tokenizer)
    assert [ids.tolist() for ids in corpus.ids] == [[3, 3, 5], [4, 4]]
    assert corpus.documents == ("a.txt", "b.txt")
    assert corpus.longest == 3
    (tmp_path / "b.txt").write_text("four six")
    assert read_text("words", tmp_path, tokenizer).sha256 != corpus.sha256
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "a.txt").write_text("one")
    names = set(read_text("words", tmp_path, tokenizer).documents)
    assert len(names) == 3, "files of one name in two folders stay distinct"
    for path in tmp_path.rglob("*.txt"):
        path.write_text("")
    assert [len(ids) for ids in read_text("words", tmp_path, tokenizer).ids] == [0, 0, 0]


def test_tokens_of_a_long_text_are_not_held_in_memory(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("a" * 100_000)

    def tokenizer(text, **options):
        return {"input_ids": np.arange(len(text), dtype=np.int32)}

    tracemalloc.start()
    try:
        corpus = read_text("long", tmp_path, tokenizer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(ids.nbytes for ids in corpus.ids)
    assert size == 20 * 100_000 * 4
    assert peak < size / 4, "about one document"
    assert all(torch.equal(ids, torch.arange(100_000, dtype=torch.int32)) for ids in corpus.ids)


def test_a_full_disk_names_the_folder_of_temporary_files(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one two three")
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb", 0))
    with pytest.raises(OSError, match="No space left on device") as caught:
        read_text("text", tmp_path, lambda words, **options: {"input_ids": [1, 2, 3]})
    assert caught.value.filename == tempfile.gettempdir()
