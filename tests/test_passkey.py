"""A passkey is a hit exactly when greedy decoding retrieves it, shared prefix or not."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import farspan
import tritonlike
from families import FAMILIES, OURS, tokens
from farspan.attention import seam
from farspan.attention.layout import Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.probe import probe
from farspan.attention.rope import set_rope
from farspan.attention.scales import Scales
from farspan.bundled import BUNDLED_MODELS
from farspan.data.passkey import HELD_OUT, KEYS, SCORED, PasskeyDocuments
from farspan.data.tokens import END
from farspan.errors import FarspanError
from farspan.evals import passkey
from farspan.evals.passkey import (
    Passkey,
    PrefixCache,
    grid_lengths,
    lower_right_attention,
    passkey_accuracy,
)
from farspan.model.loss import last_logits
from farspan.train.metadata import begin_of_text, write_training_metadata


@pytest.fixture(scope="module")
def blunted():
    """The bundled NoPE model with flattened attention: it retrieves only a part of the keys."""
    model, tokenizer = farspan.load("nope-twin", dtype=torch.float32)
    layers = probe(model)
    seam.install(model, Scales.uniform(0.85, [layer.index for layer in layers], layers[0].heads))
    return model, tokenizer


def run(grid: Passkey, model, tokenizer) -> dict[tuple[int, float, int], bool]:
    prefix_cache = PrefixCache(model)
    samples = [
        sample for cell in grid.cells() for sample in grid.run(cell, model, tokenizer, prefix_cache)
    ]
    return {(sample["length"], sample["depth"], sample["key"]): sample["hit"] for sample in samples}


@pytest.fixture(scope="module")
def grid(blunted) -> Passkey:
    shortest = PasskeyDocuments(blunted[1]).shortest
    return Passkey(tuple(range(shortest, shortest + 40, 4)), depths=10, keys=1)


@pytest.fixture(scope="module")
def hits(blunted, grid):
    """Hits of a hundred cells, most of which reuse the prefix of earlier cells."""
    with pytest.MonkeyPatch.context() as patch:
        shared: list[int] = []
        extend_to = PrefixCache.extend_to
        patch.setattr(passkey, "CHUNK", 16)
        patch.setattr(
            PrefixCache,
            "extend_to",
            lambda self, rows: (extend_to(self, rows), shared.append(self.shared))[0],
        )
        hits = run(grid, *blunted)
        assert len(hits) == len(grid.cells()) == len(shared) == 100
        assert sum(count > 0 for count in shared) > 50
    assert 20 < sum(hits.values()) < 80, "all hits or all misses would prove little"
    return hits


@pytest.mark.long
def test_hits_equal_greedy_generation_on_100_cells(blunted, grid, hits):
    model, tokenizer = blunted
    generated = {}
    for length in grid.lengths:
        cells = [cell for cell in grid.cells() if cell.length == length]
        prompts = [grid.documents(cell, tokenizer) for cell in cells]
        (count,) = {answers[0] for _, _, answers in prompts}
        rows = torch.tensor([documents[0] for _, documents, _ in prompts])
        output = model.generate(
            rows[:, :-count],
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        right = (output[:, -count:] == rows[:, -count:]).all(1).tolist()
        for cell, (keys, _, _), hit in zip(cells, prompts, right, strict=True):
            generated[length, cell.settings["depth"], keys[0]] = hit
    assert hits == generated


def test_stored_prediction_equals_the_answer_exactly_on_a_hit(blunted):
    """Leading space included: a right number after a line break is a miss and must show it."""
    model, tokenizer = blunted
    grid = Passkey((PasskeyDocuments(tokenizer).shortest + 20,), depths=10, keys=1)
    samples = [sample for cell in grid.cells() for sample in grid.run(cell, model, tokenizer)]
    assert {sample["hit"] for sample in samples} == {True, False}
    for sample in samples:
        assert (sample["said"] == f" {sample['key']}") == sample["hit"]


@pytest.mark.long
def test_reusing_a_prefix_changes_no_hit(blunted, grid, hits, monkeypatch):
    lengths = grid.lengths[::3]
    expected = {key: hit for key, hit in hits.items() if key[0] in lengths}
    assert len(expected) == 40
    monkeypatch.setattr(Passkey, "_rows_with_probe", lambda *args: None)  # nothing is shared
    assert expected == run(replace(grid, lengths=lengths), *blunted)


def test_no_prefix_is_kept_when_the_model_changes(monkeypatch):
    """The same grid and model with other scales: the old prefix must not be reused."""
    monkeypatch.setattr(passkey, "CHUNK", 16)
    model, tokenizer = farspan.load("nope-twin", dtype=torch.float32)
    layers, outputs = probe(model), []
    last_logits = passkey.last_logits
    monkeypatch.setattr(
        passkey,
        "last_logits",
        lambda *args: (outputs.append(logits := last_logits(*args)), logits)[1],
    )
    grid = Passkey((PasskeyDocuments(tokenizer).shortest + 30,), depths=2, keys=1)

    def logits_at(scale: float, evaluation: Passkey) -> list[torch.Tensor]:
        seam.install(
            model, Scales.uniform(scale, [layer.index for layer in layers], layers[0].heads)
        )
        outputs.clear()
        for cell in evaluation.cells():
            evaluation.run(cell, model, tokenizer)
        return [logits for logits in outputs if logits.shape[1] > 1]

    logits_at(1.0, grid)
    changed = logits_at(0.7, grid)
    assert len(outputs) > len(changed) == 2, "a prefix was shared"
    assert all(map(torch.equal, changed, logits_at(0.7, replace(grid))))


@pytest.mark.long
def test_cells_reuse_the_prefix_of_earlier_cells(blunted, monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 16)
    tokens: list[int] = []
    last_logits = passkey.last_logits
    monkeypatch.setattr(
        passkey,
        "last_logits",
        lambda *args: (tokens.append(args[1].numel()), last_logits(*args))[1],
    )
    grid = Passkey((240,), depths=4, keys=1)
    run(grid, *blunted)
    together, tokens[:] = sum(tokens), []
    for cell in grid.cells():
        grid.run(cell, *blunted)
    assert together < 0.8 * sum(tokens)
    tokens.clear()
    passkey_accuracy(*blunted, 240, depths=4)
    assert sum(tokens) == together, "passkey_accuracy shares one prefix over all depths"


@pytest.mark.long
def test_logits_do_not_depend_on_the_order_of_cells(blunted, monkeypatch):
    """The prefix is computed in fixed chunks, so that logits are equal to the last bit."""
    model, tokenizer = blunted
    monkeypatch.setattr(passkey, "CHUNK", 32)
    grid = Passkey((150, 240), depths=3, keys=2)
    runs = []
    for seed in (None, 1):
        cells = grid.cells()
        if seed is not None:
            random.Random(seed).shuffle(cells)
        prefix_cache, logits = PrefixCache(model), {}
        for cell in cells:
            # two keys, or the whole row would be shared
            _, rows, _ = grid.documents(cell, tokenizer)
            with torch.no_grad():
                prefix_cache.extend_to(torch.tensor(rows))
                rest = torch.tensor(rows[:1])[:, prefix_cache.shared :]
                logits[cell.length, cell.settings["depth"]] = last_logits(
                    model, rest, 6, prefix_cache.branch(1)
                )
        runs.append(logits)
    in_order, shuffled = runs
    assert set(in_order) == set(shuffled)
    assert all(torch.equal(in_order[cell], shuffled[cell]) for cell in in_order)


@torch.no_grad()
def logits_after_prefix(model, rows: torch.Tensor, count: int) -> tuple[int, torch.Tensor]:
    prefix_cache = PrefixCache(model)
    prefix_cache.extend_to(rows)
    return prefix_cache.shared, last_logits(
        model, rows[:, prefix_cache.shared :], count, prefix_cache.branch(len(rows))
    )


WITHOUT_SEAM = {
    "bloom": lambda: hf.BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: hf.MptConfig(vocab_size=128, d_model=32, n_layers=2, n_heads=4),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
}
SHARING = {
    "farspan-none",
    "farspan-rope",
    "farspan-alibi",
    "farspan-t5",
    "llama",
    "qwen3",
    "gpt2",
    *WITHOUT_SEAM,
}


@pytest.mark.parametrize("name", [*(family.name for family in FAMILIES), *WITHOUT_SEAM])
def test_every_family_continues_from_a_shared_prefix(name, monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 4)
    if name in WITHOUT_SEAM:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(WITHOUT_SEAM[name]()).eval()
    else:
        model = next(family for family in FAMILIES if family.name == name).build()
    rows = tokens(40, 3)
    rows[:, :30] = rows[0, :30]
    shared, logits = logits_after_prefix(model, rows, 6)
    with torch.no_grad():
        full = model(input_ids=rows, use_cache=False).logits[:, -6:]
    assert torch.allclose(logits, full, atol=1e-4 * float(full.abs().max()))
    assert shared == (28 if name in SHARING else shared)


@pytest.mark.parametrize("layout", [None, ["rope/7", "none", "rope:20", "rope/7"]])
def test_a_continuation_is_read_in_pieces(layout, monkeypatch):
    """In one piece its mask has a row for each of its tokens: 64K² booleans are 4 GiB."""
    monkeypatch.setattr(passkey, "CHUNK", 4)
    model = next(family for family in FAMILIES if family.name == "llama").build()
    if layout is not None:
        set_layout(model, Layout.parse(layout))
    rows = tokens(64, 3)
    rows[:, :20] = rows[0, :20]
    with torch.no_grad():
        expected = model(input_ids=rows[:, :-1], use_cache=False).logits[:, -6:].argmax(-1)
    sizes: list[int] = []
    last_logits = passkey.last_logits

    def counted(model, rows, *rest):
        sizes.append(rows.shape[1])
        return last_logits(model, rows, *rest)

    monkeypatch.setattr(passkey, "last_logits", counted)
    for size, pieces in ((4096, [44]), (10, [10, 10, 10, 14]), (20, [20, 24])):
        monkeypatch.setattr(passkey, "CONTINUATION", size)
        prefix_cache = PrefixCache(model)
        prefix_cache.extend_to(rows)
        sizes.clear()
        predictions = passkey.teacher_forced_argmax(
            model, rows[:, prefix_cache.shared :], 6, prefix_cache.branch(3)
        )
        assert torch.equal(predictions, expected)
        assert sizes == pieces


@pytest.mark.parametrize("family", OURS, ids=lambda family: family.name)
def test_attention_without_a_mask_equals_attention_with_it(family, monkeypatch):
    """The GPU path reads no mask; a schedule still counts the visible keys of each query."""
    monkeypatch.setattr(passkey, "CHUNK", 4)
    model, rows = family.build(dtype=torch.float64), tokens(40, 3)
    rows[:, :30] = rows[0, :30]
    table = torch.linspace(1.1, 1.9, 4).repeat(4, 1)
    seam.install(model, Scales(tuple(range(4)), table, table / 8, "log", 8))
    _, masked = logits_after_prefix(model, rows, 6)
    with seam.using(model, lower_right_attention):
        _, maskless = logits_after_prefix(model, rows, 6)
    assert torch.allclose(masked, maskless, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scaling", [{}, {"scaling": None}, {"scaling": 0.3}])
def test_the_last_queries_attend_with_the_scale_of_the_head(scaling):
    """By torch's own attention, whose default scale is 1/√width."""
    query, key, value = (torch.randn(1, 2, length, 16) for length in (5, 9, 9))
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    output, _ = lower_right_attention(None, query, key, value, mask, **scaling)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scaling.get("scaling")
    )
    assert torch.allclose(output.transpose(1, 2), expected, atol=1e-6)


@pytest.mark.parametrize("other", [{}, {"shared": 0}, {"device": "cpu"}, {"name": "eager"}])
def test_only_a_shared_prefix_on_a_gpu_replaces_attention(other, monkeypatch):
    case = {"shared": 4, "device": "cuda", "name": "sdpa"} | other
    cache = PrefixCache.__new__(PrefixCache)
    cache.shared = case["shared"]
    cache.model = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation=case["name"]),
        device=torch.device(case["device"]),
        _can_set_attn_implementation=lambda: True,
    )
    monkeypatch.setattr(passkey.seam, "using", lambda model, attention: attention)
    assert (cache.maskless_attention() is lower_right_attention) == (not other)


def test_a_prefix_is_computed_without_masks_on_a_gpu(monkeypatch):
    """cuDNN builds a plan for each shape of a mask, and every chunk has another one."""
    monkeypatch.setattr(passkey, "GPU_CHUNK", 4)
    uses, lengths = [], []
    monkeypatch.setattr(
        passkey.seam, "using", lambda model, attention: uses.append(attention) or nullcontext()
    )
    monkeypatch.setattr(
        passkey, "last_logits", lambda model, ids, count, past: lengths.append(ids.shape[1])
    )
    model = FAMILIES[0].build()
    on_gpu = SimpleNamespace(
        config=model.config,
        device=torch.device("cuda"),
        modules=model.modules,
        _can_set_attn_implementation=lambda: True,
    )
    monkeypatch.setattr(torch.Tensor, "to", lambda ids, device: ids)
    prefix_cache = PrefixCache(on_gpu)
    prefix_cache.extend_to(torch.arange(18).expand(2, -1))
    assert uses == [lower_right_attention]
    assert lengths == [4, 4, 4]
    assert prefix_cache.shared == 12


@pytest.mark.parametrize("heads", [4, 2])
@torch.no_grad()
def test_farspan_kernel_attends_to_the_visible_keys(heads, monkeypatch):
    """farspan's kernel runs the last queries in bf16 on a GPU; here its source runs on the CPU."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, n, t, 16).bfloat16() for n, t in ((4, 11), (heads, 30), (heads, 30))
    )
    mask = torch.ones(11, 30, dtype=torch.bool).tril(19)
    repeated = (part.repeat_interleave(4 // heads, 1).float() for part in (key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.float(), *repeated, mask, scale=0.3
    )
    with tritonlike.installed() as kernels:
        monkeypatch.setattr(passkey, "supported_kernels", lambda scores, v: kernels)
        monkeypatch.setattr(kernels, "SMALL", kernels.Tiles(16, 16, 4, 2))
        monkeypatch.setattr(passkey.F, "scaled_dot_product_attention", None)  # not called
        output, _ = lower_right_attention(None, query, key, value, mask[None, None], scaling=0.3)
    assert torch.allclose(output.float().transpose(1, 2), exact, atol=0.02)


@pytest.mark.parametrize("rope", ["dynamic", "default"])
def test_length_dependent_rope_shares_no_prefix(rope, monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 4)
    model, rows = FAMILIES[1].build(), tokens(100, 2)
    set_rope(
        model, {"rope_type": rope, "factor": 2.0} if rope == "dynamic" else {"rope_type": rope}
    )
    rows[:, :90] = rows[0, :90]
    prefix_cache = PrefixCache(model)
    with torch.no_grad():
        prefix_cache.extend_to(rows)
    assert (prefix_cache.shared == 0) == (rope == "dynamic")


class PairTokenizer:
    """Numbers take different numbers of tokens: digits in pairs, or single if the first is even."""

    bos_token_id = None

    def __call__(self, words: str, **options) -> dict:
        ids: list[int] = []
        for word in words.split():
            if word.strip(".").isdecimal():
                size = 1 if int(word[0]) % 2 == 0 else 2
                digits = word.strip(".")
                ids += [3 + int(digits[i : i + size]) % 60 for i in range(0, len(digits), size)]
            else:
                ids.append(64 + sum(map(ord, word)) % 60)
        return {"input_ids": ids}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_documents_have_one_length_whatever_the_size_of_the_answer(monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 8)
    grid, model = Passkey((120,), depths=3, keys=12), FAMILIES[0].build()
    for cell in grid.cells():
        keys, rows, answers = grid.documents(cell, PairTokenizer())
        assert {len(row) for row in rows} == {120}
        assert set(answers) == {3, 5}
        assert all(key % HELD_OUT == 0 for key in keys)
        hits = [sample["hit"] for sample in grid.run(cell, model, PairTokenizer())]
        predictions = model(torch.tensor(rows)).logits.argmax(-1).tolist()
        triples = zip(rows, predictions, answers, strict=True)
        assert hits == [row[-n:] == prediction[-n - 1 : -1] for row, prediction, n in triples]


class ShortScoredKeys(PairTokenizer):
    """Scored keys take one token, all other numbers two."""

    def __call__(self, words: str, **options) -> dict:
        ids: list[int] = []
        for word in words.split():
            key = word.strip(".")
            if key.isdecimal():
                ids += [3 + int(key) % 60] * (1 if int(key) % HELD_OUT == 0 else 2)
            else:
                ids.append(64 + sum(map(ord, word)) % 60)
        return {"input_ids": ids}


def test_no_prefix_is_shared_where_the_probe_key_does_not_fit(monkeypatch):
    """Another key marks the end of the prefix, and the shortest document fits only scored keys."""
    monkeypatch.setattr(passkey, "CHUNK", 8)
    model, shared, shortest = (
        FAMILIES[0].build(),
        [],
        PasskeyDocuments(ShortScoredKeys()).shortest_of(SCORED),
    )
    extend_to = PrefixCache.extend_to
    monkeypatch.setattr(
        PrefixCache,
        "extend_to",
        lambda self, rows: (extend_to(self, rows), shared.append(self.shared))[0],
    )
    for length in (shortest, shortest + 60):
        grid = Passkey((length,), depths=2, keys=2)
        assert len(grid.run(grid.cells()[-1], model, ShortScoredKeys())) == 2
    assert shared[0] == 0 < shared[1]


@pytest.mark.parametrize("key", [10_000, 49_999, 50_000, 99_999])
def test_the_probe_is_a_passkey_with_another_first_digit(key, monkeypatch):
    asked = []
    maker = SimpleNamespace(document=lambda length, depth, key: asked.append(key) or [0] * length)
    monkeypatch.setattr(passkey, "scored_documents", lambda tokenizer: maker)
    grid = Passkey((100,))
    grid._rows_with_probe(grid.cells()[0], None, key, [[0] * 100])
    assert asked[0] in KEYS
    assert str(asked[0])[0] != str(key)[0]


def test_a_new_cache_shares_nothing():
    assert PrefixCache(FAMILIES[0].build()).branch(2) is None


def test_shortest_document_fits_every_scored_key():
    maker = PasskeyDocuments(PairTokenizer())
    shortest = maker.shortest_of(SCORED)
    assert {len(maker.document(shortest, 0.5, key)) for key in SCORED} == {shortest}
    with pytest.raises(FarspanError, match="has no room"):
        for key in SCORED:
            maker.document(shortest - 1, 0.5, key)
    assert set(SCORED) == {key for key in KEYS if key % HELD_OUT == 0}


def test_keys_of_a_cell_depend_only_on_the_cell_and_the_seed(blunted):
    _, tokenizer = blunted
    grid = Passkey((120, 200), depths=2, keys=5)
    drawn = [tuple(grid.documents(cell, tokenizer)[0]) for cell in grid.cells()]
    assert len(set(drawn)) == 4
    again = Passkey((200,), depths=2, keys=5)
    assert [tuple(again.documents(cell, tokenizer)[0]) for cell in again.cells()] == drawn[2:]
    other = replace(grid, seed=1)
    assert tuple(other.documents(other.cells()[0], tokenizer)[0]) != drawn[0]


def test_scores_by_length_over_the_grid_and_by_depth():
    samples = [
        {
            "eval": "passkey",
            "task": "passkey",
            "length": length,
            "depth": depth,
            "key": key,
            "hit": length < 200 or key > 1,
        }
        for length in (100, 200)
        for depth in (0.0, 1.0)
        for key in range(4)
    ]
    grid = Passkey((100, 200), depths=2, keys=4, trained="no", context=150)
    scores = grid.score(samples)
    assert [(score.metric, score.length, score.value, score.n) for score in scores] == [
        ("passkey", 100, 1.0, 8),
        ("passkey", 200, 0.5, 8),
        ("passkey_mean", 100, 1.0, 8),
        ("passkey_grid_mean", 200, 0.75, 16),
        *(
            ("passkey_at_depth", length, 1.0 if length == 100 else 0.5, 4)
            for length in (100, 100, 200, 200)
        ),
    ]
    assert scores[2].tags["context"] == 150, "the mean of Figure 6 is within the context"
    for context, metrics in ((200, 4), (99, 3), (None, 3)):
        keys = replace(grid, context=context).score_keys()
        assert len(keys) == metrics
        shown = replace(grid, context=context).score(samples)
        assert keys == [score.key for score in shown if not score.tags.get("detail")]
    assert {score.tags["trained_on_passkeys"] for score in scores} == {"no"}
    assert all(0 <= score.low <= score.value <= score.high <= 1 for score in scores)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"depths": 10}, {"depths": 2, "keys": 3, "seed": 5, "batch": 2}]
)
def test_passkey_accuracy_equals_the_score_of_the_evaluation(blunted, grid, monkeypatch, options):
    """Both read the same documents, so that `extend` and `eval` report equal numbers."""
    model, tokenizer = blunted
    length, calls = grid.lengths[-1], []
    documents = Passkey.documents
    monkeypatch.setattr(
        Passkey,
        "documents",
        lambda self, *cell: (calls.append(made := documents(self, *cell)), made)[1],
    )
    accuracy = passkey_accuracy(model, tokenizer, length, **options)
    accuracy_documents, calls[:] = list(calls), []
    row = Passkey((length,), **{"keys": 1, **options})
    samples = [sample for cell in row.cells() for sample in row.run(cell, model, tokenizer)]
    assert row.score(samples)[0].value == accuracy
    assert 0 < accuracy < 1, "all hits or all misses would prove little"
    assert accuracy_documents == calls
    assert len(samples) == options["depths"] * options.get("keys", 1)


def test_passkey_accuracy_is_the_share_of_hits_of_one_key_at_each_depth(monkeypatch):
    asked = []

    def run(self, cell, *_):
        asked.append((cell.length, self.keys))
        return [{"hit": len(asked) % 4 != 0} for _ in range(self.keys)]

    monkeypatch.setattr(Passkey, "run", run)
    monkeypatch.setattr(passkey, "PrefixCache", lambda model: None)
    assert passkey_accuracy(None, None, 300, depths=8) == 6 / 8
    assert asked == [(300, 1)] * 8


def test_grid_lengths_are_even_and_not_too_short():
    assert grid_lengths(16_384, 100) == tuple(range(1024, 16_385, 1024))
    close = grid_lengths(1024, 90)
    assert (len(close), close[0], close[-1]) == (16, 90, 1024)
    assert grid_lengths(64, 90) == (90,)


def test_empty_grids_and_short_documents_raise_clear_errors(blunted):
    with pytest.raises(
        FarspanError,
        match="a passkey grid of 1 lengths, 0 depths and 10 keys is empty; use at least 1 of each",
    ):
        Passkey((100,), depths=0)
    with pytest.raises(FarspanError, match="0 lengths, 10 depths and 10 keys is empty"):
        Passkey(())
    assert [cell.settings["depth"] for cell in Passkey((100,), depths=1, keys=1).cells()] == [0]
    grid = Passkey((20,))
    with pytest.raises(FarspanError, match="a passkey text of 20 tokens has no room"):
        grid.run(grid.cells()[0], *blunted)


def with_begin_of_text(tokenizer, folder, **training):
    """The tokenizer, adding a begin-of-text token, and training.json beside it."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    if training:
        write_training_metadata(folder, passkey_documents=True, **training)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("training", "expected"),
    [({}, True), ({"begin_of_text": False}, False), ({"begin_of_text": True}, True)],
)
def test_documents_begin_as_texts_did_in_training(tmp_path, training, expected):
    """The tokenizer decides, except for models that farspan trained: their rows had no such token.
    Documents keep their length and their answer."""
    plain = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")
    own = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")
    tokenizer = with_begin_of_text(own, tmp_path, **training)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert begin_of_text(tokenizer) == [tokenizer.bos_token_id] * expected
    assert begin_of_text(plain) == []
    grid = Passkey((200,), depths=2, keys=2)
    for cell in grid.cells():
        keys, rows, sizes = grid.documents(cell, tokenizer)
        plain_keys, plain_rows, plain_sizes = grid.documents(cell, plain)
        assert (keys, sizes) == (plain_keys, plain_sizes)
        for row, plain_row, size in zip(rows, plain_rows, sizes, strict=True):
            assert len(row) == 200
            assert (row[0] == tokenizer.bos_token_id) == expected
            assert row[expected:20] == plain_row[: 20 - expected]
            assert row[-size:] == plain_row[-size:]


@pytest.mark.parametrize(
    ("api", "format", "hits"),
    [
        ("completions", " {}", True),
        ("completions", "{}", True),
        ("completions", " {}. Remember", True),  # keys of a cell differ in tokens: room is left
        ("completions", " The key is {}", False),
        ("completions", "  {}", False),
        ("chat", "The key is {}.", True),
        ("chat", "nothing", False),
    ],
)
def test_an_answer_of_a_server_begins_with_the_key(api, format, hits):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODELS / "nope-twin")
    keys = [12345, 67890]
    answers = [SimpleNamespace(text=format.format(key)) for key in keys]
    engine = SimpleNamespace(api=api, generate=lambda prompts, room: answers)
    grid = Passkey((256,), depths=1, keys=2)
    rows = [tokenizer(f"The pass key is {key}")["input_ids"] for key in keys]
    samples = grid._ask(grid.cells()[0], engine, keys, rows, [2, 2])
    assert [sample["hit"] for sample in samples] == [hits, hits]


@torch.no_grad()
def test_the_rest_behind_any_number_of_passes_has_all_answer_tokens(monkeypatch):
    """Of four tokens each; an answer of three tokens and the one before must stay for the last."""
    monkeypatch.setattr(passkey, "CONTINUATION", 4)
    model = next(family for family in FAMILIES if family.name == "llama").build().eval()
    ids = tokens(16)
    for length in (6, 7, 8, 11, 12):
        whole = model(ids[:, :length]).logits[:, -4:-1].argmax(-1)
        past = hf.DynamicCache(config=model.config)
        assert passkey.teacher_forced_argmax(model, ids[:, :length], 3, past).equal(whole)
