"""Fleets: logits, gradients, steps and answers equal those of each model by itself."""

from __future__ import annotations

import contextlib
import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from farspan.attention import seam
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.lab import fleet as fleet_module
from farspan.lab import fleet_training
from farspan.lab.fleet import Fleet, exact_match, map_models
from farspan.lab.fleet_training import (
    FleetPlan,
    FleetTrainer,
    GraphedFleetTrainer,
    draw_uniform,
    train_fleet,
)
from farspan.lab.networks import ENCODINGS, ROTARY_FRACTIONS
from farspan.lab.rows import WIDTH_MULTIPLE, Rows, padded_width
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.train.optim import OptimizerConfig, make_optimizers, set_learning_rate

VOCABULARY = 24


def network(encoding: str = "none", **overrides) -> FarspanConfig:
    shape = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    shape |= dict(max_position_embeddings=24, embedding_scale=4.0, pad_token_id=0, mlp="relu")
    fraction = ROTARY_FRACTIONS.get(encoding, 1.0)
    shape |= dict(position=ENCODINGS[encoding], rotary_fraction=fraction)
    return FarspanConfig(**shape | overrides)


def models(count: int, config: FarspanConfig) -> list[FarspanForCausalLM]:
    built = [FarspanForCausalLM(config).double().eval() for _ in range(count)]
    for model in built:
        for parameter in model.model.positions.parameters():  # some start at zero
            parameter.data += 0.1 * torch.randn_like(parameter)
    return built


def rows(count: int, seed: int, longest: int = 14) -> Rows:
    """Random rows; the second half of each is its answer."""
    draw = torch.Generator().manual_seed(seed)
    stop = torch.randint(4, longest + 1, (count,), generator=draw)
    ids = torch.randint(1, VOCABULARY, (count, longest), generator=draw)
    return Rows(ids * (torch.arange(longest) < stop[:, None]), stop // 2, stop)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_logits_and_gradients_equal_those_of_single_models(encoding):
    single_models = models(3, network(encoding))
    fleet = Fleet(single_models)
    ids = torch.randint(1, VOCABULARY, (3, 2, 16))  # without padding, which is 0
    logits = fleet.logits(ids)
    weight = torch.randn_like(logits)
    (gradient,) = torch.autograd.grad((logits * weight).sum(), fleet.weights)
    for number, model in enumerate(single_models):
        single = model(ids[number], use_cache=False).logits
        (single * weight[number]).sum().backward()
        flat = fleet.flatten({name: weight.grad for name, weight in model.named_parameters()})
        assert (single - logits[number]).abs().max() < 1e-8
        assert (flat - gradient[number]).abs().max() < 1e-8


@pytest.mark.parametrize(
    ("optimizer", "encoding"), [("adamw", "t5"), ("muon", "t5"), ("muon", "fire")]
)
@pytest.mark.parametrize("single", [True, False])
def test_steps_equal_the_optimizers_on_the_mean_loss_of_answers(single, optimizer, encoding):
    """Compared with torch's optimizers on rows without padding, buckets or stacking."""
    plan = FleetPlan(
        5, 8, 2, optimizer, matrix_rate=5.0, weight_decay=0.1, clip=0.5, warmup=0.4, decay=0.5
    )
    rates, seeds = ([3e-3], [7]) if single else ([3e-3, 1e-3], [7, 8])
    data = [rows(40, seed) for seed in seeds]
    single_models = models(len(seeds), network(encoding))
    fleet = Fleet(single_models)
    assert fleet.single == single
    fleet_losses = train_fleet(fleet, data, plan, rates=rates, seeds=seeds)
    tolerance = 1e-8 if optimizer == "adamw" else 1e-6  # our single Muon rounds to float32
    for number, model in enumerate(single_models):
        losses = train_single(model, data[number], plan, rates[number], seeds[number])
        weights = fleet.flatten(dict(model.named_parameters()))
        assert (weights - fleet.weights[number]).abs().max() < tolerance
        assert np.abs(fleet_losses[:, number] - losses).max() < 1e-5


def train_single(model, data: Rows, plan: FleetPlan, lr: float, seed: int) -> list[float]:
    config = OptimizerConfig(
        plan.optimizer, lr, lr * plan.matrix_rate, plan.beta1, plan.beta2, plan.weight_decay
    )
    optimizers = make_optimizers(model, config)
    parts, losses = data.by_length().tensor_split(plan.buckets), []
    for step in range(plan.steps):
        draws = draw_uniform([seed], 0, plan.batch)[step, 0].chunk(plan.buckets)
        batch = torch.cat(
            [part[(draw * len(part)).long()] for part, draw in zip(parts, draws, strict=True)]
        )
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in batch.tolist():
            ids, start = data.ids[row, : data.stop[row]], int(data.start[row])
            logits = model(ids[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits[start - 1 : -1], ids[start:], reduction="sum")
            count += len(ids) - start
        set_learning_rate(optimizers, plan.lr_factor(step))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(total.detach() / count))
    return losses


def test_every_model_of_a_fleet_draws_its_own_positions():
    model, ids = models(1, network("randomized"))[0], torch.randint(1, VOCABULARY, (1, 2, 16))
    fleet = Fleet([model, model])
    fleet.network.train()
    first, second = fleet.logits(ids.repeat(2, 1, 1))
    assert (first - second).abs().max() > 1e-3
    (gradient,) = torch.autograd.grad((first - second).square().sum(), fleet.weights)
    assert gradient.isfinite().all()


def test_rows_of_a_model_depend_on_its_seed_only():
    draws = draw_uniform([3, 5], 2, 8)
    assert torch.equal(draws[:, 1], draw_uniform([5], 2, 8)[:, 0])
    assert not torch.equal(draws[:, 0], draws[:, 1])
    assert draws.min() >= 0
    assert draws.max() < 1


def test_diverging_model_does_not_affect_others():
    both, plan = models(2, network()), FleetPlan(steps=4, batch=4, buckets=1, clip=0.0)
    data = [rows(20, 0), rows(20, 1)]
    stable, diverging = Fleet(both), Fleet(both)
    train_fleet(stable, data, plan, rates=[1e-3, 1e-3], seeds=[0, 1])
    steps: dict[int, float] = {}
    losses = train_fleet(
        diverging, data, plan, rates=[1e-3, 1e300], seeds=[0, 1], on_step=steps.__setitem__
    )
    assert not np.isfinite(losses[-1, 1])
    means = [np.mean(row[np.isfinite(row)]) for row in losses]
    assert steps == pytest.approx(dict(zip((1, 2, 3, 4), means, strict=True)))
    assert torch.equal(stable.weights[0], diverging.weights[0])


def test_an_update_is_that_of_torch():
    """torch's own Muon and AdamW, after clipping to a norm of 1."""
    draw = torch.Generator().manual_seed(0)
    vector, matrix = (torch.randn(3, generator=draw), torch.randn(8, 4, generator=draw))
    weights = torch.cat([vector, matrix.flatten()])[None].clone()
    state = fleet_training._State(
        weights,
        torch.zeros_like(weights),
        torch.zeros(1, 3),
        torch.tensor([0.01]),
        torch.zeros(()),
        [(3, 35, (8, 4))],
    )
    parameters = [torch.nn.Parameter(vector), torch.nn.Parameter(matrix)]
    optimizers = [
        torch.optim.AdamW(parameters[:1], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.Muon(parameters[1:], lr=0.07, weight_decay=0.0),
    ]
    for scale in (5.0, 0.01):
        gradient = scale * torch.randn(1, 35, generator=draw)
        fleet_training._update(state, gradient, FleetPlan(steps=2))
        for parameter, part in zip(parameters, gradient[0].split([3, 32]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    error = (state.weights[0] - expected).abs()
    assert error[:3].max() < 1e-6
    assert error[3:].max() < 2e-3, "torch's Muon rounds its directions to bf16"


def test_directions_are_made_with_the_settings_of_torch():
    settings = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    for name, value in fleet_training.NEWTON_SCHULZ.items():
        assert value == settings[name], name


class FakeGraph:
    """Stands in for a CUDA graph: it counts its replays."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(fleet_training.gc, "collect", lambda: None)  # takes most of a second
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    monkeypatch.setattr(fleet_training, "on_stream", lambda stream: contextlib.nullcontext())


@pytest.mark.usefixtures("fake_cuda")
def test_steps_are_recorded_once_after_warm_up_and_then_replayed():
    losses = itertools.count()
    trainer = GraphedFleetTrainer(lambda: next(losses))
    warm_up = list(range(fleet_training.WARMUP_STEPS))
    assert [trainer() for _ in warm_up] == warm_up
    assert trainer.graph is None
    assert {trainer() for _ in range(5)} == {len(warm_up)}, "the result is that of the recording"
    assert trainer.graph.replays == 5
    assert next(losses) == len(warm_up) + 1


@pytest.mark.usefixtures("fake_cuda")
def test_a_recording_that_fails_leaves_plain_steps_unless_memory_is_short(monkeypatch, caplog):
    monkeypatch.setattr(fleet_training, "WARMUP_STEPS", 0)
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not permitted")):
        outcomes = iter([error, 1, 2])

        def step(outcomes=outcomes):
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        trainer = GraphedFleetTrainer(step)
        if isinstance(error, torch.OutOfMemoryError):
            with pytest.raises(torch.OutOfMemoryError):
                trainer()
        else:
            assert [trainer(), trainer()] == [1, 2]
            assert "the fleet trains without: not permitted" in caplog.text


def test_merged_buckets_give_the_same_gradient(monkeypatch):
    fleet, plan = Fleet(models(2, network("t5"))), FleetPlan(1, 12, 4)
    data = [rows(40, 0, 30), rows(40, 1, 30)]
    trainers = []
    for pass_cost in (0.0, 10.0, 1e9):
        trainer = FleetTrainer(fleet, data, plan)
        widths = [bucket.rows.ids.shape[1] for bucket in trainer.buckets]
        assert widths == [17, 25, 33, 33], "a CPU makes one more pass rather than pad"
        trainer.buckets = fleet_training._make_buckets(data, 4, fleet.device, pass_cost)
        trainers.append(trainer)
    losses_of, passes = fleet.losses, []

    def counting_losses(rows):
        passes.append(rows.ids.shape[1:])
        return losses_of(rows)

    monkeypatch.setattr(fleet, "losses", counting_losses)
    gradients = []
    for trainer in trainers:
        trainer.draws.copy_(draw_uniform([0, 1], 0, plan.batch)[0])
        gradients.append(trainer.gradient())
    assert passes == [(3, 17), (3, 25), (6, 33), (3, 17), (9, 33), (12, 33)]
    for losses, gradient in gradients[1:]:
        assert (losses - gradients[0][0]).abs().max() < 1e-12
        assert (gradient - gradients[0][1]).abs().max() < 1e-12


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7).map(sorted), st.floats(0, 80))
def test_shared_widths_minimize_cost(widths, pass_cost):
    def cost(chosen):
        return sum(chosen) + pass_cost * len(set(chosen))

    choices = itertools.product(*(widths[index:] for index in range(len(widths))))
    shared = fleet_training.shared_widths(widths, pass_cost)
    assert all(wide >= width for wide, width in zip(shared, widths, strict=True))
    assert cost(shared) == pytest.approx(min(map(cost, choices)))


def test_inputs_are_padded_to_the_next_multiple():
    """A row's input has all tokens but the last."""
    inputs = [padded_width(longest) - 1 for longest in (1, 2, 8, 9, 10, 17, 18)]
    assert inputs == [0, 8, 8, 8, 16, 16, 24]


def test_buckets_hold_every_row_once_and_pad_little():
    data = rows(41, 0, longest=21)
    buckets = fleet_training._make_buckets([data, rows(17, 1), data], 4, torch.device("cpu"))
    assert sum(len(bucket.rows) for bucket in buckets) == 41 + 17
    widths = [bucket.rows.ids.shape[1] for bucket in buckets]
    assert widths == sorted(widths)
    assert all(width % WIDTH_MULTIPLE == 1 for width in widths)
    taken = set()
    for bucket in buckets:
        assert bucket.first[0] == bucket.first[2], "models of one task share its rows"
        for draw in torch.linspace(0, 0.9999, 200):
            batch = bucket.take(draw.repeat(3, 1))
            taken.add(tuple(batch.ids[0, 0, : batch.stop[0, 0]].tolist()))
    assert taken == {
        tuple(row[:stop].tolist()) for row, stop in zip(data.ids, data.stop, strict=True)
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_logits_do_not_depend_on_padding_behind_or_on_other_rows(encoding):
    fleet = Fleet(models(2, network(encoding, position_table=80)))
    fleet.network.eval()
    ids = torch.randint(1, VOCABULARY, (2, 3, 80))
    padded = ids.clone()
    padded[:, :, 20:] = 0
    unpadded = fleet.logits(ids[:, :1, :20])
    for batch in (ids, padded):
        assert (fleet.logits(batch)[:, :1, :20] - unpadded).abs().max() < 1e-8


@pytest.mark.parametrize(("encoding", "count"), [("alibi", 1), ("alibi", 2), ("randomized", 1)])
def test_exact_match_equals_greedy_decoding(encoding, count):
    fleet = Fleet(models(count, network(encoding, eos_token_id=None)))
    data = []
    for number in range(count):
        prompts = rows(5, number)
        model = fleet.model(number)
        ids = torch.zeros(10, 20, dtype=torch.long)
        for row in range(5):
            start = int(prompts.start[row])
            (generated,) = model.generate(
                prompts.ids[row : row + 1, :start],
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
            )
            ids[row, : start + 4] = ids[row + 5, : start + 4] = generated
            wrong = start + 1 + row % 3
            ids[row + 5, wrong] = (generated[wrong] + 1) % VOCABULARY
        start = prompts.start.repeat(2)
        data.append(Rows(ids, start, start + 4))
    for correct in exact_match(fleet, data):
        assert correct.tolist() == [True] * 5 + [False] * 5


@pytest.mark.parametrize("encoding", ["rotary", "randomized"])
def test_exact_match_does_not_depend_on_batch_size(monkeypatch, encoding):
    fleet = Fleet(models(2, network(encoding)))
    data = [rows(13, 0), rows(9, 1)]
    first = torch.arange(4)
    for number, examples in enumerate(data):
        predictions = fleet.model(number)(examples.ids, use_cache=False).logits.argmax(-1)
        examples.start[:4] = examples.stop[:4] - 1  # the answer is one token, predicted correctly
        examples.ids[first, examples.start[:4]] = predictions[first, examples.start[:4] - 1]
    batched = exact_match(fleet, data)
    monkeypatch.setattr(fleet_module, "MAX_LOGITS", 1)
    logits, sizes = fleet.logits, []
    monkeypatch.setattr(fleet, "logits", lambda ids: (sizes.append(ids.shape[1]), logits(ids))[1])
    single = exact_match(fleet, data)
    assert sizes == [1] * 13
    for one_batch, row_by_row in zip(batched, single, strict=True):
        assert one_batch[:4].all()
        assert one_batch.tolist() == row_by_row.tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_scales_reach_every_layer_of_every_model(count):
    config = network("t5")
    single_models = models(count, config)
    fleet = Fleet(single_models)
    ids = torch.randint(VOCABULARY, (count, 2, 12))
    before = fleet.logits(ids)
    with fleet.scaled(1.7):
        scaled = fleet.logits(ids)
    for number, model in enumerate(single_models):
        seam.install(
            model, Scales.uniform(1.7, range(config.num_hidden_layers), config.num_attention_heads)
        )
        assert (model(ids[number], use_cache=False).logits - scaled[number]).abs().max() < 1e-8
    assert torch.equal(fleet.logits(ids), before)
    assert (scaled - before).abs().max() > 1e-6


def test_fleet_returns_its_models_unchanged():
    originals = models(2, network("learned"))
    copied = Fleet(originals).model(1)
    ids = torch.randint(VOCABULARY, (1, 9))
    assert torch.equal(copied(ids).logits, originals[1](ids).logits)
    assert copied.state_dict().keys() == originals[1].state_dict().keys()


@pytest.mark.parametrize("overrides", [dict(position="none/4"), dict(num_key_value_heads=2)])
def test_fleet_refuses_windows_and_shared_keys(overrides):
    shape = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    with pytest.raises(FarspanError, match="a fleet supports only full attention"):
        Fleet(models(2, FarspanConfig(**shape | overrides)))


def test_dropout_differs_between_models():
    model = FarspanForCausalLM(network(dropout=0.3))
    fleet = Fleet([model, copy.deepcopy(model)])
    ids = torch.randint(VOCABULARY, (1, 2, 9)).repeat(2, 1, 1)
    fleet.network.train()
    one, other = fleet.logits(ids)
    assert (one - other).abs().max() > 1e-3
    fleet.network.eval()
    one, other = fleet.logits(ids)
    assert torch.equal(one, other)


@pytest.mark.long
def test_layers_compile_to_one_shared_graph():
    fleet = Fleet([FarspanForCausalLM(network("t5")) for _ in range(2)])
    trainer = FleetTrainer(fleet, [rows(8, 0), rows(8, 1)], FleetPlan(steps=1, batch=4, buckets=1))
    losses, gradient = trainer.gradient()
    graphs = []

    def record_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fleet.layer = torch.compile(map_models, backend=record_graph, fullgraph=True)
    compiled_losses, compiled_gradient = trainer.gradient()
    assert torch.allclose(losses, compiled_losses, atol=1e-6)
    assert torch.allclose(gradient, compiled_gradient, atol=1e-6)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(steps=0), "train.steps is 0; set it to 1 or more"),
        (dict(steps=9, batch=10, buckets=4), "a batch of 10 examples .* multiple of 4"),
        (dict(steps=9, optimizer="sgd"), "'sgd' is unknown; choose muon or adamw"),
    ],
)
def test_plan_refuses_invalid_settings(settings, message):
    with pytest.raises(FarspanError, match=message):
        FleetPlan(**settings)


@pytest.mark.parametrize(
    "settings",
    [dict(beta1=0.0), dict(beta2=0.0), dict(weight_decay=0.0, clip=0.0), dict(matrix_rate=0.5)],
)
def test_plan_accepts_the_ends_of_its_ranges(settings):
    """Without a memory, a decay or a clip, or with slower matrices than the rest."""
    assert vars(FleetPlan(steps=9, **settings)).items() >= settings.items()


def test_as_many_rows_as_buckets_are_enough():
    fleet = Fleet(models(1, network()))
    plan = FleetPlan(steps=1, batch=4, buckets=4)
    assert train_fleet(fleet, [rows(4, 0)], plan, rates=[1e-3], seeds=[0]).shape == (1, 1)


@pytest.mark.parametrize(("steps", "shown"), [(7, range(1, 8)), (305, [*range(3, 305, 3), 305])])
def test_every_hundredth_of_a_run_and_its_last_step_are_recorded(steps, shown, monkeypatch):
    class Counting:
        def __init__(self, fleet, data, plan):
            self.state = SimpleNamespace(rates=torch.zeros(1))
            self.draws, self.steps = torch.zeros(1, plan.batch), 0

        def __call__(self):
            self.steps += 1
            return torch.tensor([float(self.steps)])

    monkeypatch.setattr(fleet_training, "FleetTrainer", Counting)
    fleet = SimpleNamespace(network=torch.nn.Identity(), device=torch.device("cpu"), layer=None)
    calls = []
    history = train_fleet(
        fleet,
        [],
        FleetPlan(steps=steps),
        rates=[1e-3],
        seeds=[0],
        on_step=lambda step, loss: calls.append((step, loss)),
    )
    early = {1, 4, 16} if steps > 16 else set()
    assert calls == [(step, float(step)) for step in sorted({*shown} | early)]
    assert history[:, 0].tolist() == list(shown)


def test_training_refuses_fewer_rows_than_buckets():
    fleet = Fleet(models(1, network()))
    with pytest.raises(FarspanError, match="3 examples do not fill 4 buckets"):
        train_fleet(fleet, [rows(3, 0)], FleetPlan(steps=1), rates=[1e-3], seeds=[0])
