"""Temperatures that grow with the position are measured in any family, and are no rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention

import farspan
from families import FAMILIES, SHAPE, SPARSE, TEMPERED, randomized, tokens
from farspan.attention import temperature as temperature_module
from farspan.attention.probe import probe
from farspan.attention.temperature import LONGEST, MAX_DEVIATION, temperatures
from farspan.errors import FarspanError


def build(name: str, seed: int = 0) -> hf.PreTrainedModel:
    if name in TEMPERED:
        return randomized(TEMPERED[name], seed)
    return next(family for family in FAMILIES if family.name == name).build(seed)


# The laws as the families' papers and code give them, of positions p.
LAWS: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "llama4": (
        "1 + 0.1·ln(1 + ⌊n/8⌋)",
        (3,),
        lambda p: 1 + 0.1 * torch.log1p(((p + 1) / 8).floor()),
    ),
    "ministral3": (
        "1 + 0.1·ln(1 + ⌊p/16⌋)",
        (0, 1, 2, 3),
        lambda p: 1 + 0.1 * torch.log1p((p / 16).floor()),
    ),
    "inkling": (
        "1 + 0.1·ln(max(n/16, 1))",
        (1, 3),
        lambda p: 1 + 0.1 * torch.log(((p + 1) / 16).clamp(min=1)),
    ),
    "beam": (
        "(1 + n/2048)^0.1",
        (3,),
        lambda p: ((1 + (p + 1) / 2048) / (1 + 1 / 2048)) ** 0.1,
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_a_family_is_measured(name: str):
    formula, layers, law = LAWS[name]
    model = build(name)
    (temperature,) = temperatures(model, probe(model), length=50)
    assert temperature.formula == formula
    assert temperature.layers == layers
    assert {0, 49, LONGEST} <= set(temperature.positions.tolist())
    expected = law(temperature.positions.double())
    assert torch.allclose(temperature.factors, expected.expand_as(temperature.factors), rtol=1e-5)
    assert temperature.at(50) == pytest.approx((float(law(torch.tensor(49.0))),) * 2, rel=1e-5)


def few_runs(law: Callable[[int], float], most: int = 60) -> Callable[[int], Tensor]:
    """The law as norms or factors of one head, which may be asked for a few dozen positions."""
    asked = []

    def values_at(position: int) -> Tensor:
        asked.append(position)
        assert len(asked) <= most, "a few dozen runs of the model"
        return torch.tensor([[law(position)]], dtype=torch.float64)

    return values_at


@pytest.mark.parametrize("width", [100, 5000, 8192, 131_072, LONGEST // 2 + 3])
@pytest.mark.parametrize(
    ("formula", "basis"),
    [
        ("ln(1 + ⌊n/{}⌋)", lambda p, width: math.log1p((p + 1) // width)),
        ("ln(1 + ⌊p/{}⌋)", lambda p, width: math.log1p(p // width)),
        ("ln(max(n/{}, 1))", lambda p, width: math.log(max((p + 1) / width, 1))),
    ],
)
def test_every_law_is_recognized_at_any_width(formula, basis, width, monkeypatch):
    norms_at = few_runs(lambda position: 2 + 2 * 0.1 * basis(position, width))
    monkeypatch.setattr(temperature_module, "_norm_reader", lambda model, layers: norms_at)
    norms, growing = temperature_module._sample(None, (), None, MAX_DEVIATION)
    assert growing == [0]
    positions = torch.tensor(sorted(norms))
    factors = torch.stack([norms[p] / norms[0] for p in positions.tolist()], dim=-1)
    (law,) = temperature_module._group([3], positions, factors, MAX_DEVIATION)
    digits = f"{width:.4g}" if "max" in formula else width
    assert (law.layers, law.formula) == ((3,), "1 + 0.1·" + formula.format(digits))


def test_no_length_is_twice_as_long_as_the_sample_before_it(monkeypatch):
    """At any number of tokens the factor is that of a sample more than half as long."""
    norms_at = few_runs(lambda position: 1 + 0.1 * math.log(position + 1))
    monkeypatch.setattr(temperature_module, "_norm_reader", lambda model, layers: norms_at)
    norms, _ = temperature_module._sample(None, (), None, MAX_DEVIATION)
    positions = sorted(norms)
    assert positions[:2] == [0, 1]
    assert positions[-1] == LONGEST
    assert all(after <= 2 * before for before, after in pairwise(positions[1:]))


POSITIONS = torch.tensor([0, *(2**power for power in range(22))], dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 100, 2048, 131_072])
def test_a_power_of_the_length_is_recognized_at_any_width(width: int):
    """Relative to the first token, as norms are measured."""
    factors = ((1 + (POSITIONS + 1) / width) / (1 + 1 / width)) ** 0.1
    fit = temperature_module._fit(POSITIONS, factors[None])
    assert fit.law == f"(1 + n/{width:.4g})^{{rate}}"
    assert fit.rates == pytest.approx((0.1,))
    assert fit.deviation < 1e-6


def test_a_logarithm_of_the_length_is_recognized_with_the_rate_of_each_head():
    rates = torch.tensor([0.05, 0.3], dtype=torch.float64)
    fit = temperature_module._fit(POSITIONS, 1 + rates[:, None] * (POSITIONS + 1).log())
    assert fit.law == "1 + {rate}·ln(n)"
    assert fit.rates == pytest.approx(rates.tolist())


def test_a_line_is_fitted_to_three_points_and_not_to_two():
    """Any two points are on a line."""
    positions = torch.tensor([0.0, 9, 999, 9999, 99_999])
    for grown in (2, 3):
        factors = (1 + 0.1 * ((positions + 1) / 10 ** (5 - grown)).clamp(min=1).log())[None]
        fits = temperature_module._clamp_fit(positions.double(), factors.double())
        assert [fit.deviation < 1e-6 for fit in fits] == [True] * (grown == 3)


def test_a_law_with_a_rate_for_each_head():
    model = build("mistral_large4")
    (temperature,) = temperatures(model, probe(model))
    assert temperature.layers == (0, 1, 2, 3)
    scaling = [layer.self_attn.softmax_scaling for layer in model.model.language_model.layers]
    rates = torch.stack([(part.scale / part.bias).detach() for part in scaling])  # [layers, heads]
    law = 1 + rates[..., None] * (temperature.positions + 1).log()
    assert torch.allclose(temperature.factors.float(), law, rtol=1e-4)
    low, high = float(rates.min()), float(rates.max())
    assert temperature.formula == f"1 + a·ln(n) with a from {low:.3g} to {high:.3g} by head"


@torch.no_grad()
def rotating_layers(model: hf.PreTrainedModel) -> list[bool]:
    """Whether the cached keys of each layer follow the position.

    With one token attention returns its value at any temperature, so that all layers receive the
    same hidden states at both positions."""
    caches = [
        model(
            input_ids=tokens(1, batch=1),
            attention_mask=torch.ones(1, 1),
            position_ids=torch.tensor([[position]]),
            use_cache=True,
        ).past_key_values
        for position in (0, 1000)
    ]
    return [
        not (
            torch.allclose(first.keys, second.keys) and torch.allclose(first.values, second.values)
        )
        for first, second in zip(*(cache.layers for cache in caches), strict=True)
    ]


@pytest.mark.parametrize("name", ["beam", "mistral_large4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_temperature_is_no_rotation(name: str, dtype: torch.dtype):
    for seed in range(3):
        model = build(name, seed)
        rotating = rotating_layers(model)
        assert rotating == [True, True, True, False]
        positions = [layer.position for layer in probe(model.to(dtype))]
        assert positions == ["rope" if rotates else "none" for rotates in rotating]


class ScaledQueries(LlamaAttention):
    """Llama without keys that rotate: `change(query, position)` is all that positions do."""

    def __init__(self, config, index: int, change):
        super().__init__(config, index)
        self.q_proj.register_forward_hook(lambda module, args, output: self._changed(output))
        self.change = change

    def _changed(self, queries: Tensor) -> Tensor:
        split = queries.unflatten(-1, (-1, self.head_dim))
        return self.change(split, self.positions[:, :, None, None].to(queries.dtype)).flatten(-2)

    def forward(self, hidden_states, position_embeddings, *args, position_ids=None, **kwargs):
        self.positions = position_ids
        cos, sin = position_embeddings
        identity = (torch.ones_like(cos), torch.zeros_like(sin))
        return super().forward(hidden_states, identity, *args, **kwargs)


def llama_with(change) -> hf.PreTrainedModel:
    class ChangedLlama(hf.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for index, layer in enumerate(self.model.layers):
                layer.self_attn = ScaledQueries(config, index, change)

    torch.manual_seed(0)
    return ChangedLlama(hf.LlamaConfig(**SHAPE)).eval()


def test_a_query_direction_that_moves_is_rotation_and_a_length_is_not():
    def turn(q, p):
        a, b = q.chunk(2, dim=-1)
        return torch.cat((a * p.cos() - b * p.sin(), a * p.sin() + b * p.cos()), dim=-1)

    turning = llama_with(turn)
    assert {layer.position for layer in probe(turning)} == {"rope"}
    growing = llama_with(lambda q, p: q * (1 + p / 100))
    assert {layer.position for layer in probe(growing)} == {"none"}


def test_a_temperature_of_no_known_law_is_shown_without_a_formula():
    model = llama_with(lambda q, p: q * (1 + torch.tanh(p / 50)))
    (temperature,) = temperatures(model, probe(model), length=64)
    assert temperature.formula is None
    assert temperature.at(64) == pytest.approx((1 + math.tanh(63 / 50),) * 2, rel=1e-5)
    text = farspan.inspect(model).temperature
    assert text == "a growing factor that no known law fits in layers 0–3: ×1.85 at 64 tokens"


@pytest.mark.parametrize("name", ["llama", "cohere2", "gpt2", "farspan-alibi", "kimi-linear"])
def test_families_without_a_temperature(name: str):
    model = build(name)
    assert temperatures(model, probe(model)) == []
    assert farspan.inspect(model).temperature is None


@torch.no_grad()
def test_measuring_leaves_rotations_that_follow_the_length_as_they_were():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, rope_parameters=rope)).eval()
    ids = tokens(100, batch=1)
    before = model(ids).logits
    model(ids[:, :8])
    assert temperatures(model, probe(model)) == []
    assert torch.equal(model(ids).logits, before)


def test_inspect_says_what_the_model_scales_already():
    inspection = farspan.inspect(build("llama4"))
    factor = 1 + 0.1 * math.log(1 + 8)
    text = f"1 + 0.1·ln(1 + ⌊n/8⌋) in layers 3: ×{factor:.3g} at 64 tokens"
    assert inspection.temperature == text
    assert (
        f"the model already scales its attention ({text}); farspan's scales multiply it"
        in inspection.warnings
    )


def test_a_model_that_cannot_be_measured_is_reported():
    model = randomized(SPARSE["minimax_m3_vl"])
    with pytest.raises(FarspanError, match="has a built-in temperature is unknown"):
        temperatures(model, probe(model))
    inspection = farspan.inspect(model)
    assert inspection.temperature is None
    assert any("built-in temperature is unknown" in warning for warning in inspection.warnings)


def test_the_norms_of_all_heads_are_read():
    model = next(family for family in FAMILIES if family.name == "llama").build()
    layers = probe(model)
    norms = temperature_module._norm_reader(model, layers)(3)
    assert norms.shape == (len(layers), layers[0].heads)
    assert len(set(norms[0].tolist())) == layers[0].heads, "heads of random weights differ"


@pytest.mark.parametrize(
    ("width", "rate"),
    [
        (8192, 0.003),  # a growth of 1.7% at the longest position
        (1.5, 0.1),
    ],
)
def test_a_clamped_logarithm_is_recognized_when_it_grows_little_or_early(width, rate):
    factors = 1 + rate * ((POSITIONS + 1) / width).clamp(min=1).log()
    assert (
        temperature_module._fit(POSITIONS, factors[None]).law
        == f"1 + {{rate}}·ln(max(n/{width}, 1))"
    )


EXACT = 2**-10  # a deviation that floats hold exactly, close to MAX_DEVIATION


def test_a_deviation_of_the_tolerance_is_no_growth(monkeypatch):
    def law(position: int) -> float:
        return 1.0 + (position >= 10) * EXACT + (position >= 100)

    factors = {p: torch.tensor([[law(p)]]) for p in (0, 1, 64, 128, 256, LONGEST)}
    temperature_module._sample_onset(factors, few_runs(law), 0, EXACT)
    assert {99, 100, 200} <= set(factors)
    assert not {9, 20} & set(factors)

    monkeypatch.setattr(temperature_module, "_norm_reader", lambda model, layers: norms_at)

    def norms_at(position: int) -> Tensor:
        return torch.tensor([[2 + 2 * EXACT * (position > 0)]])

    assert temperature_module._sample(None, (), None, EXACT)[1] == []

    monkeypatch.setattr(temperature_module, "MAX_DEVIATION", EXACT)
    positions = torch.tensor([0.0, 9, 99, 199], dtype=torch.float64)
    rows = torch.tensor([[1, 1 + EXACT, 1.1, 1.2]], dtype=torch.float64)
    laws = [fit.law for fit in temperature_module._floor_fits(positions, rows)]
    assert laws == ["1 + {rate}·ln(1 + ⌊n/100⌋)", "1 + {rate}·ln(1 + ⌊p/99⌋)"]

    grown = 1 + 0.1 * ((POSITIONS + 1) / 1024).clamp(min=1).log()
    grown[3] = 1 + 10 * EXACT
    (fit,) = temperature_module._clamp_fit(POSITIONS, grown[None])
    assert fit.law == "1 + {rate}·ln(max(n/1024, 1))", "the line is of what grew by more"


@pytest.mark.parametrize(
    ("deviation", "closest", "law"),
    [(1e-5, 0.0, "line"), (1.1e-5, 0.0, "power"), (3e-3, 1e-3, "line"), (3.1e-3, 1e-3, "power")],
)
def test_a_simple_law_may_deviate_three_times_as_far(deviation, closest, law, monkeypatch):
    """And by what rounding can do, 1e-5."""
    line = temperature_module._Fit("line", (0.1,), deviation)
    power = temperature_module._Fit("power", (0.1,), closest)
    for name, fits in {
        "_linear_fit": line,
        "_floor_fits": [],
        "_clamp_fit": [],
        "_power_fit": power,
    }.items():
        monkeypatch.setattr(temperature_module, name, lambda *_, fits=fits: fits)
    assert temperature_module._fit(POSITIONS, torch.ones(1, len(POSITIONS))).law == law


@pytest.mark.parametrize("first", [1, 1000, LONGEST // 3, LONGEST - 1])
def test_the_first_growth_is_found_by_halving_the_gap(first: int):
    factors_at = few_runs(lambda p: 1.0 + (p >= first), most=1 + int(math.log2(LONGEST)))
    factors = {0: torch.tensor([[1.0]]), LONGEST: torch.tensor([[2.0]])}
    temperature_module._sample_onset(factors, factors_at, 0, MAX_DEVIATION)
    assert {first - 1, first, 2 * first} <= set(factors)


@pytest.mark.long
def test_a_half_precision_model_that_grows_by_more_than_its_rounding_is_reported():
    def grow(q: Tensor, p: Tensor) -> Tensor:  # by 1.5% at the longest position
        return (q.float() * (1 + 0.00105 * (p.float() + 1).log())).to(q.dtype)

    model = llama_with(grow).bfloat16()
    (temperature,) = temperatures(model, probe(model))
    assert temperature.at(LONGEST + 1)[1] == pytest.approx(1.015, abs=4e-3)


def test_norms_are_those_of_a_token_that_is_no_padding():
    """Padding is often all zeros, which have no norm."""
    model = llama_with(lambda q, p: q)
    with torch.no_grad():
        model.get_input_embeddings().weight[:-1] = 0
    norms = temperature_module._norm_reader(model, probe(model))(3)
    assert float(norms.min()) > 0
