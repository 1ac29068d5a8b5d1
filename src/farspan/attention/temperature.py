"""Temperatures that are built into a model: factors of its queries that grow with the position.

They are measured, not read from a config. A token runs behind an empty cache that claims p earlier
tokens, with the hidden states of position 0 in every attention module. What multiplies the norms
of the queries is the temperature τ(p), relative to that of the first token. Rotation changes
no norm. The laws of the field are then fitted to a few dozen lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from farspan.attention import seam
from farspan.attention.probe import Layer, run_replayed
from farspan.errors import FarspanError, first_line

LONGEST = 2**21  # the position at which every temperature of the field has grown
MAX_DEVIATION = 1e-3  # of a fitted law
MAX_HALF_DEVIATION = 1e-2


@dataclass(frozen=True)
class Temperature:
    """How the queries of some layers grow with the position, by a law or by samples."""

    layers: tuple[int, ...]
    formula: str | None  # in n, the number of tokens, or p = n − 1; None: no known law fits
    positions: Tensor  # [P]
    factors: Tensor  # τ at these positions, [layers, heads, P]

    def at(self, tokens: int) -> tuple[float, float]:
        """The smallest and the largest factor of a head at the last of so many tokens, from the
        nearest sample that is not longer."""
        index = int((self.positions < tokens).nonzero().max())
        values = self.factors[..., index]
        return float(values.min()), float(values.max())


class _EmptyPast(DynamicCache):
    """A cache that claims earlier tokens and holds none."""

    def __init__(self, model: PreTrainedModel, tokens: int):
        super().__init__(config=model.config)
        self.tokens = tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, self.tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.tokens


def temperatures(
    model: PreTrainedModel, layers: Sequence[Layer], length: int | None = None
) -> list[Temperature]:
    """The growing temperatures of the model, one for each law; length: a position to sample.

    >>> temperatures(llama4, probe(llama4))[0].formula
    '1 + 0.1·ln(1 + ⌊n/8192⌋)'
    """
    if any(layer.position == "learned" for layer in layers):
        return []  # no position beyond the table can be run
    tolerance = MAX_DEVIATION if model.dtype.itemsize > 2 else MAX_HALF_DEVIATION
    try:
        with seam.observing(model, lambda call: None):  # on the seam once, not at every length
            sampled, growing = _sample(model, layers, length, tolerance)
    except Exception as error:
        raise FarspanError(
            f"whether {type(model).__name__} has a built-in temperature is unknown: it cannot run "
            f"a token behind an empty cache ({type(error).__name__}: {first_line(error)}); read "
            "its code"
        ) from error
    finally:
        seam.run_two_tokens(model)  # rotations that follow the length return to their own
    if not growing:
        return []
    positions = torch.tensor(sorted(sampled))
    factors = torch.stack([sampled[int(p)] for p in positions], dim=-1)[growing]
    indices = [layers[index].index for index in growing]
    return _group(indices, positions, factors.double(), tolerance)


def _sample(
    model: PreTrainedModel, layers: Sequence[Layer], length: int | None, tolerance: float
) -> tuple[dict[int, Tensor], list[int]]:
    """The norms of the queries at a few dozen positions, relative to the first token, and the
    layers where they grow; at two positions if they grow nowhere."""
    norms_at = _norm_reader(model, layers)
    first = norms_at(0)

    def factors_at(position: int) -> Tensor:
        return norms_at(position) / first

    factors = {0: torch.ones_like(first), LONGEST: factors_at(LONGEST)}
    growth = (factors[LONGEST] - 1).abs()
    growing = [index for index, row in enumerate(growth) if row.max() > tolerance]
    if not growing:
        return factors, growing
    for position in (2**power for power in range(int(math.log2(LONGEST)))):
        factors[position] = factors_at(position)
    if length:
        last = min(length, LONGEST) - 1
        factors[last] = factors_at(last)
    for index in growing:  # a floor shows its width at its first step only
        _sample_onset(factors, factors_at, index, tolerance)
    return factors, growing


def _norm_reader(model: PreTrainedModel, layers: Sequence[Layer]) -> Callable[[int], Tensor]:
    """A function of a position: the norms of all queries there, [layers, heads]."""
    modules = [layer.module for layer in layers]
    last = model.get_input_embeddings().num_embeddings - 1  # the first may be padding: all zeros
    ids = torch.tensor([[last]], device=model.device)

    def run(position: int, replay: dict[nn.Module, Tensor] | None):
        past = _EmptyPast(model, position)
        return run_replayed(
            model, modules, replay, input_ids=ids, past_key_values=past, use_cache=True
        )

    _, inputs = run(0, None)

    def norms_at(position: int) -> Tensor:
        calls, _ = run(position, inputs)
        heads = max(call.q.shape[1] for call in calls)
        rows = [call.q[0, :, 0].float().norm(dim=-1).cpu() for call in calls]
        # Layers with fewer heads repeat one, which changes no range.
        return torch.stack([row[torch.arange(heads) % len(row)] for row in rows])

    return norms_at


def _sample_onset(
    factors: dict[int, Tensor],
    factors_at: Callable[[int], Tensor],
    layer: int,
    tolerance: float,
) -> None:
    """Sample the first position whose factor is not 1 and the one before, by bisection, and the
    double of the first, where ⌊n/F⌋ and ⌊p/F⌋ differ."""

    def grown(position: int) -> bool:
        return bool((factors[position][layer] - 1).abs().max() > tolerance)

    high = min(position for position in factors if grown(position))
    low = max(position for position in factors if position < high)
    while high - low > 1:
        middle = (low + high) // 2
        factors[middle] = factors_at(middle)
        low, high = (low, middle) if grown(middle) else (middle, high)
    factors[2 * high] = factors_at(2 * high)


@dataclass(frozen=True)
class _Fit:
    """A law with its parameters: those that all heads share, and a rate for each head."""

    law: str  # the formula with {rate}
    rates: tuple[float, ...]
    deviation: float


def _group(
    indices: list[int], positions: Tensor, factors: Tensor, tolerance: float
) -> list[Temperature]:
    """One law for all layers if it fits, else the layers of each law."""
    together = _fit(positions.double(), factors.flatten(0, 1))
    if together.deviation <= tolerance:
        return [Temperature(tuple(indices), _formula(together.law, [together]), positions, factors)]
    fits = [_fit(positions.double(), rows) for rows in factors]
    groups: dict[str | None, list[int]] = {}
    for number, fit in enumerate(fits):
        law = fit.law if fit.deviation <= tolerance else None
        groups.setdefault(law, []).append(number)
    return [
        Temperature(
            tuple(indices[number] for number in numbers),
            None if law is None else _formula(law, [fits[number] for number in numbers]),
            positions,
            factors[numbers],
        )
        for law, numbers in groups.items()
    ]


def _formula(law: str, fits: list[_Fit]) -> str:
    rates = [rate for fit in fits for rate in fit.rates]
    low, high = min(rates), max(rates)
    if high - low <= 0.01 * abs(high):
        return law.format(rate=f"{sum(rates) / len(rates):.3g}")
    return f"{law.format(rate='a')} with a from {low:.3g} to {high:.3g} by head"


def _fit(positions: Tensor, factors: Tensor) -> _Fit:
    """The simplest law that fits as well as any, up to rounding; factors: [heads, P]."""
    fits = [
        _linear_fit("1 + {rate}·ln(n)", (positions + 1).log(), factors),
        *_floor_fits(positions, factors),
        *_clamp_fit(positions, factors),
        _power_fit(positions, factors),
    ]
    smallest = min(fit.deviation for fit in fits)
    return next(fit for fit in fits if fit.deviation <= 3 * smallest + 1e-5)


def _linear_fit(law: str, basis: Tensor, factors: Tensor) -> _Fit:
    """τ = 1 + rate·basis for each head, by least squares."""
    rates = ((factors - 1) * basis).sum(-1) / basis.square().sum().clamp(min=1e-30)
    return _as_fit(law, rates, 1 + rates[:, None] * basis, factors)


def _as_fit(law: str, rates: Tensor, fitted: Tensor, factors: Tensor) -> _Fit:
    deviation = float((fitted / factors - 1).abs().max())
    return _Fit(law, tuple(rates.tolist()), deviation if math.isfinite(deviation) else math.inf)


def _floor_fits(positions: Tensor, factors: Tensor) -> list[_Fit]:
    """1 + rate·ln(1 + ⌊n/F⌋) and the same of p (Llama 4, Ministral 3)."""
    grown = ((factors - 1).abs() > MAX_DEVIATION).any(0)
    onset = int(positions[grown].min())
    return [
        _linear_fit(
            f"1 + {{rate}}·ln(1 + ⌊{name}/{onset + shift}⌋)",
            ((positions + shift) / (onset + shift)).floor().log1p(),
            factors,
        )
        for name, shift in (("n", 1), ("p", 0))
    ]


def _clamp_fit(positions: Tensor, factors: Tensor) -> list[_Fit]:
    """1 + rate·ln(max(n/F, 1)) (Inkling): a line in ln n where it has grown."""
    mean = factors.mean(0)
    grown = mean > 1 + 10 * MAX_DEVIATION
    x, y = (positions + 1).log()[grown], mean[grown]
    if len(x) < 3:
        return []
    centered = x - x.mean()
    rate = (centered * y).sum() / centered.square().sum()
    # At a width of 1 it is the plain logarithm, which is simpler.
    width = max(1.0, float(torch.exp(x.mean() - (y.mean() - 1) / rate)))
    basis = ((positions + 1) / width).clamp(min=1).log()
    return [_linear_fit(f"1 + {{rate}}·ln(max(n/{width:.4g}, 1))", basis, factors)]


def _power_fit(positions: Tensor, factors: Tensor) -> _Fit:
    """(1 + n/F)^rate (Beam): F by a search, the rate by least squares.

    Relative to the first token this is (1 + p/(F + 1))^rate."""
    from scipy.optimize import minimize_scalar

    y = factors.mean(0).log()

    def fit(log_width: float) -> tuple[Tensor, Tensor]:
        basis = torch.log1p(positions / math.exp(log_width))
        rate = (basis * y).sum() / basis.square().sum()
        return rate, (rate * basis - y).square().sum()

    bounds = (0.0, math.log(LONGEST))
    search = minimize_scalar(lambda x: float(fit(x)[1]), bounds=bounds, method="bounded")
    rate, width = fit(search.x)[0], math.exp(search.x)
    fitted = (1 + positions / width) ** rate
    return _as_fit(f"(1 + n/{width - 1:.4g})^{{rate}}", rate.expand(len(factors)), fitted, factors)
