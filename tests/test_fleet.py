"""A fleet is its models, each as if it were alone: logits, gradients, steps and answers."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from farspan.attention import seam
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.lab import fleet as stacked
from farspan.lab import lesson
from farspan.lab.fleet import Fleet, Rows, over_models, tells
from farspan.lab.lesson import Lesson, Plan, chances, train
from farspan.lab.study import ENCODINGS
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.train.optim import Optimization, optimizers, set_rate

WORDS = 24


def network(encoding: str = "none", **changes) -> FarspanConfig:
    position, fraction = ENCODINGS[encoding]
    shape = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(max_position_embeddings=24, embedding_scale=4.0, pad_token_id=0, mlp="relu")
    return FarspanConfig(**shape | changes, position=position, rotary_fraction=fraction)


def models(count: int, config: FarspanConfig) -> list[FarspanForCausalLM]:
    return [FarspanForCausalLM(config).double() for _ in range(count)]


def rows(count: int, seed: int, longest: int = 14) -> Rows:
    """Random rows; the second half of each is its answer."""
    draw = torch.Generator().manual_seed(seed)
    stop = torch.randint(4, longest + 1, (count,), generator=draw)
    ids = torch.randint(1, WORDS, (count, longest), generator=draw)
    return Rows(ids * (torch.arange(longest) < stop[:, None]), stop // 2, stop)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_logits_and_gradients_are_those_of_each_model_alone(encoding):
    own = models(3, network(encoding))
    fleet = Fleet(own)
    ids = torch.randint(1, WORDS, (3, 2, 16))  # 0 is padding, which stands after the last token that counts
    logits = fleet.logits(ids)
    weight = torch.randn_like(logits)
    (gradient,) = torch.autograd.grad((logits * weight).sum(), fleet.weights)
    for number, model in enumerate(own):
        alone = model(ids[number], use_cache=False).logits
        (alone * weight[number]).sum().backward()
        flat = fleet.flat({name: parameter.grad for name, parameter in model.named_parameters()})
        assert (alone - logits[number]).abs().max() < 1e-8
        assert (flat - gradient[number]).abs().max() < 1e-8


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_step_is_the_optimizers_on_the_mean_loss_of_the_answers(alone, optimizer):
    """Against torch's optimizers on rows that were never padded, put in buckets or stacked."""
    plan = Plan(5, 8, 2, optimizer, matrix_rate=5.0, weight_decay=0.1, clip=0.5, warmup=0.4, decay=0.5)
    rates, seeds = ([3e-3], [7]) if alone else ([3e-3, 1e-3], [7, 8])
    data = [rows(40, seed) for seed in seeds]
    own = models(len(seeds), network("t5"))
    fleet = Fleet(own)
    assert fleet.alone == alone
    told = train(fleet, data, plan, rates=rates, seeds=seeds)
    close = 1e-8 if optimizer == "adamw" else 1e-6  # our single Muon rounds to float32
    for number, model in enumerate(own):
        losses = by_hand(model, data[number], plan, rates[number], seeds[number])
        assert (fleet.flat(dict(model.named_parameters())) - fleet.weights[number]).abs().max() < close
        assert np.abs(told[:, number] - losses).max() < 1e-5


def by_hand(model, data: Rows, plan: Plan, lr: float, seed: int) -> list[float]:
    how = Optimization(plan.optimizer, lr, lr * plan.matrix_rate, plan.beta1, plan.beta2, plan.weight_decay)
    made = optimizers(model, how)
    parts, losses = data.by_length().tensor_split(plan.buckets), []
    for step in range(plan.steps):
        chance = chances([seed], 0, plan.batch)[step, 0].chunk(plan.buckets)
        taken = torch.cat([part[(some * len(part)).long()] for part, some in zip(parts, chance, strict=True)])
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in taken.tolist():
            ids, start = data.ids[row, : data.stop[row]], int(data.start[row])
            logits = model(ids[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits[start - 1 : -1], ids[start:], reduction="sum")
            count += len(ids) - start
        set_rate(made, plan.rate(step))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        for each in made:
            each.step()
            each.zero_grad()
        losses.append(float(total.detach() / count))
    return losses


def test_a_model_sees_the_same_rows_whoever_trains_beside_it():
    beside = chances([3, 5], 2, 8)
    assert torch.equal(beside[:, 1], chances([5], 2, 8)[:, 0])
    assert not torch.equal(beside[:, 0], beside[:, 1])
    assert beside.min() >= 0
    assert beside.max() < 1


def test_a_model_that_diverges_harms_no_other():
    own, plan = models(2, network()), Plan(steps=4, batch=4, buckets=1, clip=0.0)
    data = [rows(20, 0), rows(20, 1)]
    calm, wild = Fleet(own), Fleet(own)
    train(calm, data, plan, rates=[1e-3, 1e-3], seeds=[0, 1])
    losses = train(wild, data, plan, rates=[1e-3, 1e300], seeds=[0, 1])
    assert not np.isfinite(losses[-1, 1])
    assert torch.equal(calm.weights[0], wild.weights[0])


def test_buckets_that_go_through_the_network_together_give_the_same_gradient(monkeypatch):
    fleet, data, plan = Fleet(models(2, network("t5"))), [rows(40, 0, 30), rows(40, 1, 30)], Plan(1, 12, 4)
    apart, buckets, passes = Lesson(fleet, data, plan), lesson._buckets, []
    monkeypatch.setattr(lesson, "_buckets", lambda *given: buckets(*given[:3], 10))
    pairs = Lesson(fleet, data, plan)
    monkeypatch.setattr(lesson, "_buckets", lambda *given: buckets(*given[:3], 1e9))
    whole = Lesson(fleet, data, plan)
    losses = fleet.losses
    monkeypatch.setattr(fleet, "losses", lambda rows: passes.append(rows.ids.shape[1:]) or losses(rows))
    found = []
    for each in (apart, pairs, whole):
        each.chance.copy_(chances([0, 1], 0, plan.batch)[0])
        found.append(each.gradient())
    assert passes == [(3, 17), (3, 25), (6, 33), (3, 17), (9, 33), (12, 33)]
    for losses, gradient in found[1:]:
        assert (losses - found[0][0]).abs().max() < 1e-12
        assert (gradient - found[0][1]).abs().max() < 1e-12


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7).map(sorted), st.floats(0, 80))
def test_shared_widths_are_the_cheapest_of_all(widths, a_pass):
    def cost(chosen):
        return sum(chosen) + a_pass * len(set(chosen))

    choices = itertools.product(*(widths[place:] for place in range(len(widths))))
    found = lesson.shared(widths, a_pass)
    assert all(wide >= width for wide, width in zip(found, widths, strict=True))
    assert cost(found) == pytest.approx(min(map(cost, choices)))


def test_buckets_hold_every_row_once_and_pad_little():
    data = rows(41, 0, longest=21)
    buckets = lesson._buckets([data, rows(17, 1), data], 4, torch.device("cpu"))
    assert sum(len(bucket.rows) for bucket in buckets) == 41 + 17
    widths = [bucket.rows.ids.shape[1] for bucket in buckets]
    assert widths == sorted(widths)
    assert all(width % stacked.MULTIPLE == 1 for width in widths)
    seen = set()
    for bucket in buckets:
        assert bucket.first[0] == bucket.first[2], "models of one task share its rows"
        for chance in torch.linspace(0, 0.9999, 200):
            taken = bucket.take(chance.repeat(3, 1))
            seen.add(tuple(taken.ids[0, 0, : taken.stop[0, 0]].tolist()))
    assert seen == {tuple(row[:stop].tolist()) for row, stop in zip(data.ids, data.stop, strict=True)}


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_model_tells_is_what_greedy_decoding_says(count):
    fleet = Fleet(models(count, network("alibi", eos_token_id=None)))
    data = []
    for number in range(count):
        prompts = rows(5, number)
        model = fleet.model(number)
        ids = torch.zeros(10, 20, dtype=torch.long)
        for row in range(5):
            begin = int(prompts.start[row])
            said = model.generate(prompts.ids[row : row + 1, :begin], max_new_tokens=4, do_sample=False, pad_token_id=0)
            ids[row, : begin + 4] = ids[row + 5, : begin + 4] = said[0]
            ids[row + 5, begin + 1 + row % 3] = (said[0, begin + 1 + row % 3] + 1) % WORDS  # one token amiss
        start = prompts.start.repeat(2)
        data.append(Rows(ids, start, start + 4))
    for right in tells(fleet, data):
        assert right.tolist() == [True] * 5 + [False] * 5


def test_answers_do_not_depend_on_how_many_are_asked_at_once(monkeypatch):
    fleet = Fleet(models(2, network("rotary")))
    data = [rows(13, 0), rows(9, 1)]
    for each, model in zip(data, (fleet.model(0), fleet.model(1)), strict=True):
        likeliest = model(each.ids, use_cache=False).logits.argmax(-1)
        each.start[:4] = each.stop[:4] - 1  # one token to tell
        each.ids[torch.arange(4), each.start[:4]] = likeliest[torch.arange(4), each.start[:4] - 1]
    at_once = tells(fleet, data)
    monkeypatch.setattr(stacked, "LOGITS", 1)
    for whole, one_by_one in zip(at_once, tells(fleet, data), strict=True):
        assert whole[:4].all()
        assert whole.tolist() == one_by_one.tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_scales_reach_every_layer_of_every_model(count):
    config = network("t5")
    own = models(count, config)
    fleet = Fleet(own)
    ids = torch.randint(WORDS, (count, 2, 12))
    before = fleet.logits(ids)
    with fleet.scaled(1.7):
        scaled = fleet.logits(ids)
    for number, model in enumerate(own):
        seam.install(model, Scales.uniform(1.7, range(config.num_hidden_layers), config.num_attention_heads))
        assert (model(ids[number], use_cache=False).logits - scaled[number]).abs().max() < 1e-8
    assert torch.equal(fleet.logits(ids), before)
    assert (scaled - before).abs().max() > 1e-6


def test_a_model_of_a_fleet_is_the_model_it_was_made_from():
    own = models(2, network("learned"))
    back = Fleet(own).model(1)
    ids = torch.randint(WORDS, (1, 9))
    assert torch.equal(back(ids).logits, own[1](ids).logits)
    assert back.state_dict().keys() == own[1].state_dict().keys()


@pytest.mark.parametrize("changes", [dict(position="none/4"), dict(num_key_value_heads=2)])
def test_layers_with_windows_or_shared_keys_make_no_fleet(changes):
    shape = dict(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(FarspanError, match="layers of a fleet see all that came before"):
        Fleet(models(2, FarspanConfig(**shape | changes)))


def test_models_of_a_fleet_drop_out_apart():
    model = FarspanForCausalLM(network(dropout=0.3))
    fleet = Fleet([model, copy.deepcopy(model)])
    ids = torch.randint(WORDS, (1, 2, 9)).repeat(2, 1, 1)
    fleet.network.train()
    one, other = fleet.logits(ids)
    assert (one - other).abs().max() > 1e-3
    fleet.network.eval()
    one, other = fleet.logits(ids)
    assert torch.equal(one, other)


def test_a_layer_compiles_whole_and_all_layers_share_it():
    fleet = Fleet([FarspanForCausalLM(network("t5")) for _ in range(2)])
    lesson = Lesson(fleet, [rows(8, 0), rows(8, 1)], Plan(steps=1, batch=4, buckets=1))
    losses, gradient = lesson.gradient()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fleet.layer = torch.compile(over_models, backend=count, fullgraph=True)
    again, same = lesson.gradient()
    assert torch.allclose(losses, again, atol=1e-6)
    assert torch.allclose(gradient, same, atol=1e-6)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (dict(steps=0), "train.steps is 0; give 1 or more"),
        (dict(steps=9, batch=10, buckets=4), "a batch of 10 examples .* multiple of 4"),
        (dict(steps=9, optimizer="sgd"), "'sgd' is unknown; choose muon or adamw"),
    ],
)
def test_a_plan_that_cannot_be(plan, said):
    with pytest.raises(FarspanError, match=said):
        Plan(**plan)


def test_too_few_rows_for_the_buckets():
    fleet = Fleet(models(1, network()))
    with pytest.raises(FarspanError, match="3 examples do not fill 4 buckets"):
        train(fleet, [rows(3, 0)], Plan(steps=1), rates=[1e-3], seeds=[0])
