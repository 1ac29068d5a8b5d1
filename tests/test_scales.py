"""Scales: the bases are the published schedules, and invalid tables are refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from farspan.attention.scales import BASES, RelativeScales, Scales
from farspan.errors import FarspanError

ONE = torch.ones(1, 1)


def at(basis: str, n: int, base: float, slope: float, length: int) -> float:
    return Scales((0,), base * ONE, slope * ONE, basis, length).at(torch.tensor([n])).item()


@settings(deadline=None)
@given(st.integers(2, 1_000_000), st.integers(2, 10_000))
def test_bases_are_the_published_schedules(n: int, length: int):
    log_n = max(1.0, math.log(n) / math.log(length))
    assert at("log", n, 1, 1 / math.log(length), length) == pytest.approx(log_n, rel=1e-5)
    assert at("floor", n, 1, 0.1, 8192) == pytest.approx(
        1 + 0.1 * math.log(1 + n // 8192), rel=1e-5
    )
    assert at("ln", n, 0, 0.43, 0) == pytest.approx(0.43 * math.log(n), rel=1e-5)
    assert at("step", n, 1, 0.5, length) == (1.5 if n > length else 1.0)
    position = get_llama_4_attn_scale(torch.tensor([[n - 1]]), 0.1, length).item()
    assert at("floor-position", n, 1, 0.1, length) == pytest.approx(position, rel=1e-5)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(BASES)),
    st.lists(st.integers(0, 100_000), min_size=2),
    st.integers(1, 5000),
)
def test_bases_are_finite_and_non_decreasing(basis: str, counts: list[int], length: int):
    """So `check` needs only the two ends of a range. A padded query has n = 0."""
    values = BASES[basis](torch.tensor(sorted(counts)).float(), length)
    assert torch.isfinite(values).all()
    assert (values.diff() >= 0).all()


def test_scales_broadcast_over_visible_keys():
    scales = Scales((2, 5), torch.rand(2, 3), torch.rand(2, 3), "log", 8)
    assert scales.at(torch.ones(4, 7)).shape == (2, 3, 4, 7)
    assert torch.equal(scales.row(1).base, scales.base[1:])
    assert scales.row(1).layers == (5,)


@settings(deadline=None)
@given(st.sampled_from((0.0, 0.1, 0.37, 5.0)), st.sampled_from(sorted(set(BASES) - {"constant"})))
def test_relative_scales_are_those_with_one_rate(rate: float, basis: str):
    base = 0.5 + torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    relative = RelativeScales((0, 1, 4), base, torch.full_like(base, rate), basis, 8)
    n = torch.tensor([0.0, 1, 7, 8, 9, 16, 17, 100])
    absolute = relative.absolute()
    assert type(absolute) is Scales
    assert torch.allclose(relative.at(n), absolute.at(n), rtol=1e-6)
    assert type(relative.row(1)) is RelativeScales
    assert torch.equal(relative.row(1).at(n), relative.at(n)[1:2])
    assert absolute.constant == (rate == 0), "without growth every format can hold them"
    assert absolute.rate == (pytest.approx(rate, rel=1e-6) if rate else None)


def test_different_rates_are_not_one():
    base = torch.tensor([[1.0, 2.0]])
    assert Scales((0,), base).rate is None
    assert Scales((0,), base, torch.tensor([[0.1, 0.2]]), "log", 8).rate == pytest.approx(0.1)
    assert Scales((0,), base, torch.tensor([[0.1, 0.1]]), "log", 8).rate is None
    assert Scales((0,), base, torch.tensor([[0.1, 0.20001]]), "log", 8).rate is None
    assert Scales((0,), base, 0 * base, "log", 8).rate == 0


BAD = {
    "has shape": Scales((0, 1), torch.ones(3, 4)),
    "has shape .2, 3.": Scales((0, 1), torch.ones(2, 4), torch.ones(2, 3), "log", 8),
    "NaN": Scales((0,), torch.tensor([[1.0, math.nan]])),
    "falls to -0.5": Scales((3,), torch.tensor([[1.0, -0.5]])),
    "layer 3, head 1 falls to 0 between": Scales((3,), torch.tensor([[1.0, 0.0]])),
    "falls to -0.00685 between 2 and 1024": Scales((3,), -0.7 * ONE, ONE, "ln"),
    "layer 3, head 1 falls to": Scales(
        (3,), torch.ones(1, 2), torch.tensor([[0.1, -1.0]]), "log", 8
    ),
    "'cubic' is unknown": Scales((0,), ONE, ONE, "cubic"),
    "needs the train length": Scales((0,), ONE, ONE, "log"),
    "has no slope": Scales((0,), ONE, None, "log", 8),
    "has a slope": Scales((0,), ONE, ONE),
    "torch.bfloat16": Scales((0,), ONE.bfloat16()),
    "name a layer twice": Scales((0, 0), torch.ones(2, 1)),
}


@pytest.mark.parametrize("message", BAD)
def test_check_refuses_invalid_scales(message: str):
    with pytest.raises(FarspanError, match=message) as error:
        BAD[message].check(1024)
    assert ";" in str(error.value), "the message gives a cause and a way out"


@pytest.mark.parametrize("value", [1.2, 0.01])
def test_check_returns_valid_scales_unchanged(value: float):
    scales = Scales.uniform(value, range(4), 8)
    assert scales.check(4096) is scales
    assert scales.constant
    assert scales.heads == 8


def test_scales_with_a_slope_are_not_those_without():
    base = torch.ones(1, 2)
    constant, growing = Scales((0,), base), Scales((0,), base, 0 * base, "constant")
    assert not constant.equals(growing)
    assert not growing.equals(constant)
    assert constant.equals(Scales((0,), base.clone()))
    assert growing.equals(Scales((0,), base, 0 * base, "constant"))
