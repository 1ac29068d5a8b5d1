"""A key counts as told exactly when greedy decoding tells it, however much was computed once for all keys."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import transformers as hf

import farspan
import tritonlike
from families import FAMILIES, OURS, tokens
from farspan.attention import seam
from farspan.attention.patch import set_rope
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.data.passkey import HELD_OUT, KEYS, SCORED, Passkeys
from farspan.errors import FarspanError
from farspan.evals import passkey
from farspan.evals.passkey import Beginning, Passkey, attend_lower_right, grid_lengths, passkey_share
from farspan.model.loss import ending_logits


@pytest.fixture(scope="module")
def twin():
    """The NoPE twin with blunted attention: it tells some keys and misses others."""
    model, tokenizer = farspan.load("nope-twin", dtype=torch.float32)
    layers = probe(model)
    seam.install(model, Scales.uniform(0.85, [layer.index for layer in layers], layers[0].heads))
    return model, tokenizer


def run(grid: Passkey, model, tokenizer) -> dict[tuple[int, float, int], bool]:
    begun = Beginning(model)
    found = [sample for cell in grid.cells() for sample in grid.run(cell, model, tokenizer, begun)]
    return {(sample["length"], sample["depth"], sample["key"]): sample["hit"] for sample in found}


@pytest.fixture(scope="module")
def grid(twin) -> Passkey:
    shortest = Passkeys(twin[1]).shortest
    return Passkey(tuple(range(shortest, shortest + 40, 4)), depths=10, keys=1)


@pytest.fixture(scope="module")
def hits(twin, grid):
    """Of a hundred cells, most of which go on from what others have computed."""
    with pytest.MonkeyPatch.context() as patch:
        used: list[int] = []
        reach = Beginning.reach
        patch.setattr(passkey, "CHUNK", 16)
        patch.setattr(Beginning, "reach", lambda self, rows: (reach(self, rows), used.append(self.shared))[0])
        found = run(grid, *twin)
        assert len(found) == len(grid.cells()) == len(used) == 100
        assert sum(shared > 0 for shared in used) > 50
    assert 20 < sum(found.values()) < 80, "a grid that is all alike would prove little"
    return found


def test_hits_are_those_of_greedy_generation_on_every_cell_of_a_hundred(twin, grid, hits):
    model, tokenizer = twin
    generated = {}
    for length in grid.lengths:
        here = [cell for cell in grid.cells() if cell.length == length]
        made = [grid.documents(cell, tokenizer) for cell in here]
        (count,) = {answers[0] for _, _, answers in made}
        rows = torch.tensor([documents[0] for _, documents, _ in made])
        said = model.generate(
            rows[:, :-count], max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        right = (said[:, -count:] == rows[:, -count:]).all(1).tolist()
        for cell, (keys, _, _), hit in zip(here, made, right, strict=True):
            generated[length, cell.settings["depth"], keys[0]] = hit
    assert hits == generated


def test_what_was_said_is_the_answer_to_the_letter_where_it_hit(twin):
    """With the space before it, too: a right number after a line break is a miss, and must look like one."""
    model, tokenizer = twin
    grid = Passkey((Passkeys(tokenizer).shortest + 20,), depths=10, keys=1)
    found = [sample for cell in grid.cells() for sample in grid.run(cell, model, tokenizer)]
    assert {sample["hit"] for sample in found} == {True, False}
    for sample in found:
        assert (sample["said"] == f" {sample['key']}") == sample["hit"]


def test_computing_a_beginning_once_changes_no_hit(twin, grid, hits):
    assert hits == run(replace(grid, reuse=False), *twin)


def test_a_grid_remembers_nothing_of_a_model_that_has_changed(monkeypatch):
    """The same grid and the same model, sharpened in between: what was begun before is not gone on from."""
    monkeypatch.setattr(passkey, "CHUNK", 16)
    model, tokenizer = farspan.load("nope-twin", dtype=torch.float32)
    layers, read = probe(model), []
    own = passkey.ending_logits
    monkeypatch.setattr(passkey, "ending_logits", lambda *given: (read.append(found := own(*given)), found)[1])
    grid = Passkey((Passkeys(tokenizer).shortest + 30,), depths=2, keys=1)

    def logits_at(scale: float, evaluation: Passkey) -> list[torch.Tensor]:
        seam.install(model, Scales.uniform(scale, [layer.index for layer in layers], layers[0].heads))
        read.clear()
        for cell in evaluation.cells():
            evaluation.run(cell, model, tokenizer)
        return [logits for logits in read if logits.shape[1] > 1]

    logits_at(1.0, grid)
    changed = logits_at(0.7, grid)
    assert len(read) > len(changed) == 2, "something was shared"
    assert all(map(torch.equal, changed, logits_at(0.7, replace(grid))))


def test_cells_go_on_from_what_those_before_them_have_computed(twin, monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 16)
    tokens: list[int] = []
    own = passkey.ending_logits
    monkeypatch.setattr(passkey, "ending_logits", lambda *given: (tokens.append(given[1].numel()), own(*given))[1])
    grid = Passkey((240,), depths=4, keys=1)
    run(grid, *twin)
    together, tokens[:] = sum(tokens), []
    for cell in grid.cells():
        grid.run(cell, *twin)
    assert together < 0.8 * sum(tokens)
    tokens.clear()
    passkey_share(*twin, 240, depths=4)
    assert sum(tokens) == together, "nor does the share that other commands tell begin anew with every depth"


def test_cells_do_not_depend_on_their_order(twin, monkeypatch):
    """What is shared is grown in fixed chunks, so that even the last bit of a logit is the same."""
    model, tokenizer = twin
    monkeypatch.setattr(passkey, "CHUNK", 32)
    grid = Passkey((150, 240), depths=3, keys=2)
    found = []
    for seed in (None, 1):
        cells = grid.cells()
        if seed is not None:
            random.Random(seed).shuffle(cells)
        begun, logits = Beginning(model), {}
        for cell in cells:
            _, rows, _ = grid.documents(cell, tokenizer)  # of two keys, or all of it would be shared
            with torch.no_grad():
                begun.reach(torch.tensor(rows))
                given = torch.tensor(rows[:1])[:, begun.shared :]
                logits[cell.length, cell.settings["depth"]] = ending_logits(model, given, 6, begun.branch(1))
        found.append(logits)
    assert set(found[0]) == set(found[1])
    assert all(torch.equal(found[0][place], found[1][place]) for place in found[0])


@torch.no_grad()
def branched(model, rows: torch.Tensor, count: int) -> tuple[int, torch.Tensor]:
    begun = Beginning(model)
    begun.reach(rows)
    return begun.shared, ending_logits(model, rows[:, begun.shared :], count, begun.branch(len(rows)))


OFF_THE_SEAM = {
    "bloom": lambda: hf.BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: hf.MptConfig(vocab_size=128, d_model=32, n_layers=2, n_heads=4),
    "falcon": lambda: hf.FalconConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
}
SHARING = {"farspan-none", "farspan-rope", "farspan-alibi", "farspan-t5", "llama", "qwen3", "gpt2", *OFF_THE_SEAM}


@pytest.mark.parametrize("name", [*(family.name for family in FAMILIES), *OFF_THE_SEAM])
def test_every_family_goes_on_from_a_shared_beginning(name, monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 4)
    if name in OFF_THE_SEAM:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(OFF_THE_SEAM[name]()).eval()
    else:
        model = next(family for family in FAMILIES if family.name == name).build()
    rows = tokens(40, 3)
    rows[:, :30] = rows[0, :30]
    shared, logits = branched(model, rows, 6)
    with torch.no_grad():
        whole = model(input_ids=rows, use_cache=False).logits[:, -6:]
    assert torch.allclose(logits, whole, atol=1e-4 * float(whole.abs().max()))
    assert shared == (28 if name in SHARING else shared)


@pytest.mark.parametrize("family", OURS, ids=lambda family: family.name)
def test_attention_without_the_mask_is_attention_with_it(family, monkeypatch):
    """The GPU's way, which reads no mask; a schedule still counts the keys that each query sees."""
    monkeypatch.setattr(passkey, "CHUNK", 4)
    model, rows = family.build(dtype=torch.float64), tokens(40, 3)
    rows[:, :30] = rows[0, :30]
    table = torch.linspace(1.1, 1.9, 4).repeat(4, 1)
    seam.install(model, Scales(tuple(range(4)), table, table / 8, "log", 8))
    _, own = branched(model, rows, 6)
    with seam.using(model, attend_lower_right):
        _, quick = branched(model, rows, 6)
    assert torch.allclose(own, quick, rtol=0, atol=1e-9)


@pytest.mark.parametrize("heads", [4, 2])
@torch.no_grad()
def test_our_kernel_sees_what_the_mask_shows(heads, monkeypatch):
    """In bf16 on a GPU the last queries go through our own kernel; here its source runs on the CPU."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, n, t, 16).bfloat16() for n, t in ((4, 11), (heads, 30), (heads, 30)))
    mask = torch.ones(11, 30, dtype=torch.bool).tril(19)
    repeated = (part.repeat_interleave(4 // heads, 1).float() for part in (key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(query.float(), *repeated, mask, scale=0.3)
    with tritonlike.installed() as kernels:
        monkeypatch.setattr(passkey, "kernels_for", lambda scores, v: kernels)
        monkeypatch.setattr(kernels, "SMALL", kernels.Tiles(16, 16, 4, 2))
        found, _ = attend_lower_right(None, query, key, value, mask[None, None], scaling=0.3)
    assert torch.allclose(found.float().transpose(1, 2), exact, atol=0.02)


@pytest.mark.parametrize("rope", ["dynamic", "default"])
def test_a_rotation_that_depends_on_the_length_shares_nothing(rope, monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 4)
    model, rows = FAMILIES[1].build(), tokens(100, 2)
    set_rope(model, {"rope_type": rope, "factor": 2.0} if rope == "dynamic" else {"rope_type": rope})
    rows[:, :90] = rows[0, :90]
    begun = Beginning(model)
    with torch.no_grad():
        begun.reach(rows)
    assert (begun.shared == 0) == (rope == "dynamic")


class Pairs:
    """A tokenizer that writes some numbers with more tokens than others: digits in pairs unless the first is even."""

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


def test_answers_of_different_lengths_fill_documents_of_one_length(monkeypatch):
    monkeypatch.setattr(passkey, "CHUNK", 8)
    grid, model = Passkey((120,), depths=3, keys=12), FAMILIES[0].build()
    for cell in grid.cells():
        keys, rows, answers = grid.documents(cell, Pairs())
        assert {len(row) for row in rows} == {120}
        assert set(answers) == {3, 5}
        assert all(key % HELD_OUT == 0 for key in keys)
        hits = [sample["hit"] for sample in grid.run(cell, model, Pairs())]
        said = model(torch.tensor(rows)).logits.argmax(-1).tolist()
        pairs = zip(rows, said, answers, strict=True)
        assert hits == [row[-count:] == told[-count - 1 : -1] for row, told, count in pairs]


class Sparing(Pairs):
    """A tokenizer that writes the keys that are scored with one token, and all others with two."""

    def __call__(self, words: str, **options) -> dict:
        ids: list[int] = []
        for word in words.split():
            key = word.strip(".")
            if key.isdecimal():
                ids += [3 + int(key) % 60] * (1 if int(key) % HELD_OUT == 0 else 2)
            else:
                ids.append(64 + sum(map(ord, word)) % 60)
        return {"input_ids": ids}


def test_where_no_other_key_has_room_nothing_is_shared(monkeypatch):
    """By another key it is told how far texts are alike; the shortest text holds keys that are scored, and no other."""
    monkeypatch.setattr(passkey, "CHUNK", 8)
    model, shared, shortest = FAMILIES[0].build(), [], Passkeys(Sparing()).shortest_of(SCORED)
    reach = Beginning.reach
    monkeypatch.setattr(Beginning, "reach", lambda self, rows: (reach(self, rows), shared.append(self.shared))[0])
    for length in (shortest, shortest + 60):
        grid = Passkey((length,), depths=2, keys=2)
        assert len(grid.run(grid.cells()[-1], model, Sparing())) == 2
    assert shared[0] == 0 < shared[1]


def test_every_key_that_is_asked_for_has_room_in_the_shortest_text():
    maker = Passkeys(Pairs())
    shortest = maker.shortest_of(SCORED)
    assert {len(maker.document(shortest, 0.5, key)) for key in SCORED} == {shortest}
    with pytest.raises(FarspanError, match="has no room"):
        for key in SCORED:
            maker.document(shortest - 1, 0.5, key)
    assert set(SCORED) == {key for key in KEYS if key % HELD_OUT == 0}


def test_keys_are_drawn_by_the_seed_for_each_cell_by_itself(twin):
    _, tokenizer = twin
    grid = Passkey((120, 200), depths=2, keys=5)
    drawn = [tuple(grid.documents(cell, tokenizer)[0]) for cell in grid.cells()]
    assert len(set(drawn)) == 4
    again = Passkey((200,), depths=2, keys=5)
    assert [tuple(again.documents(cell, tokenizer)[0]) for cell in again.cells()] == drawn[2:]
    other = replace(grid, seed=1)
    assert tuple(other.documents(other.cells()[0], tokenizer)[0]) != drawn[0]


def test_scores_are_shares_by_length_over_the_grid_and_by_depth():
    made = [
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
    scores = Passkey((100, 200), depths=2, keys=4, trained="no").score(made)
    assert [(score.metric, score.length, score.value, score.n) for score in scores] == [
        ("passkey", 100, 1.0, 8),
        ("passkey", 200, 0.5, 8),
        ("passkey_mean", 200, 0.75, 16),
        *(("passkey_at_depth", length, 1.0 if length == 100 else 0.5, 4) for length in (100, 100, 200, 200)),
    ]
    assert {score.tags["trained_on_passkeys"] for score in scores} == {"no"}
    assert all(0 <= score.low <= score.value <= score.high <= 1 for score in scores)


@pytest.mark.parametrize("options", [{"depths": 10}, {"depths": 2, "keys": 3, "seed": 5, "batch": 2}])
def test_the_share_that_extend_tells_is_the_score_of_the_evaluation(twin, grid, monkeypatch, options):
    """By the same documents to the last token, or the two would differ for one patch."""
    model, tokenizer = twin
    length, read = grid.lengths[-1], []
    documents = Passkey.documents
    monkeypatch.setattr(
        Passkey, "documents", lambda self, *cell: (read.append(found := documents(self, *cell)), found)[1]
    )
    share = passkey_share(model, tokenizer, length, **options)
    mine, read[:] = list(read), []
    one = Passkey((length,), **{"keys": 1, **options})
    samples = [sample for cell in one.cells() for sample in one.run(cell, model, tokenizer)]
    assert one.score(samples)[0].value == share
    assert 0 < share < 1, "all or none told would prove little"
    assert mine == read
    assert len(samples) == options["depths"] * options.get("keys", 1)


def test_the_lengths_of_a_grid():
    assert grid_lengths(16_384, 100) == tuple(range(1024, 16_385, 1024))
    close = grid_lengths(1024, 90)
    assert (len(close), close[0], close[-1]) == (16, 90, 1024)
    assert grid_lengths(64, 90) == (90,)


def test_a_grid_of_nothing_and_a_text_too_short_are_sentences(twin):
    with pytest.raises(FarspanError, match="1 lengths and 0 depths with 10 keys make no grid; give 1 or more of each"):
        Passkey((100,), depths=0)
    with pytest.raises(FarspanError, match="0 lengths and 10 depths with 10 keys make no grid"):
        Passkey(())
    grid = Passkey((20,))
    with pytest.raises(FarspanError, match="a passkey text of 20 tokens has no room"):
        grid.run(grid.cells()[0], *twin)
