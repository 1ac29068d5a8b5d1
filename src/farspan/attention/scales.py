"""Scales: the multiplier λ̂ on q·k/√d of each layer and query head for n visible keys.

    λ̂(n) = base + slope · basis(n; length)

A scale of 1 is the pretrained model. With slope None the scale is constant and can be folded into
the weights; otherwise it grows with the context and is applied at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from farspan.errors import FarspanError

# Every basis is non-decreasing in n, so λ̂ is largest and smallest at the ends of a range.
BASES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "constant": lambda n, length: torch.zeros_like(n),
    "log": lambda n, length: (n / length).log().clamp(min=0),  # max(0, ln(n/L))
    "step": lambda n, length: (n > length).to(n.dtype),  # 1 beyond L
    "floor": lambda n, length: (n / length).floor().log1p(),  # ln(1 + ⌊n/L⌋): Llama 4's
    # ln(1 + ⌊p/L⌋) at position p = n − 1: Ministral 3's
    "floor-position": lambda n, length: ((n - 1).clamp(min=0) / length).floor().log1p(),
    "ln": lambda n, length: n.clamp(min=1).log(),  # ln n
}
SHARED_TOLERANCE = 1e-6  # of a rate that float32 tables of base and slope hold
NEEDS_LENGTH = tuple(name for name in BASES if name not in ("constant", "ln"))


@dataclass(frozen=True, eq=False)
class Scales:
    """A table of scales with one row per layer and one column per query head.

    A layer with fewer heads than the table has columns uses the first ones.
    """

    layers: tuple[int, ...]  # the layer of each row; all other layers have scale 1
    base: Tensor  # [len(layers), heads] float32
    slope: Tensor | None = None  # the same shape
    basis: str = "constant"
    length: int = 0
    layer_heads: Mapping[int, int] = field(default_factory=dict)  # of each layer; default: heads

    @classmethod
    def uniform(cls, value: float, layers: Sequence[int], heads: int) -> Scales:
        """One λ̂ for all heads of these layers."""
        return cls(tuple(layers), torch.full((len(layers), heads), float(value)))

    @property
    def heads(self) -> int:
        return self.base.shape[1]

    @property
    def head_counts(self) -> tuple[int, ...]:
        """The heads of the layer of each row."""
        return tuple(self.layer_heads.get(layer, self.heads) for layer in self.layers)

    def used(self, table: Tensor) -> Tensor:
        """The entries of a table [layers, heads, ...] that belong to a head, in one row."""
        rows = zip(table, self.head_counts, strict=True)
        return torch.cat([row[:count] for row, count in rows]).flatten()

    @property
    def constant(self) -> bool:
        return self.slope is None

    @property
    def rate(self) -> float | None:
        """The r of λ̂(n) = base·(1 + r·basis(n)) if all heads share it, as in stock classes."""
        if self.slope is None:
            return None
        rates = (self.slope.detach().double() / self.base.detach().double()).flatten()
        rate = float(rates.mean())
        return rate if bool(((rates - rate).abs() <= SHARED_TOLERANCE * abs(rate)).all()) else None

    def row(self, index: int, heads: int | None = None) -> Scales:
        """The scales of one layer with so many heads: a row that shares this table's storage."""
        slope = None if self.slope is None else self.slope[index : index + 1, :heads]
        return replace(
            self,
            layers=self.layers[index : index + 1],
            base=self.base[index : index + 1, :heads],
            slope=slope,
        )

    def to(self, device: torch.device) -> Scales:
        if self.base.device == device:
            return self
        slope = None if self.slope is None else self.slope.to(device)
        return replace(self, base=self.base.to(device), slope=slope)

    def equals(self, other: Scales) -> bool:
        """Whether both tables hold the same numbers."""
        formulas = [(each.layers, each.basis, each.length) for each in (self, other)]
        tables = zip((self.base, self.slope), (other.base, other.slope), strict=True)
        return formulas[0] == formulas[1] and all(
            one is two if one is None or two is None else torch.equal(one.cpu(), two.cpu())
            for one, two in tables
        )

    def at(self, n: Tensor) -> Tensor:
        """λ̂ for numbers of visible keys n [...]: float32 [layers, heads, ...]."""
        ones = (1,) * n.ndim
        value = self.base.reshape(*self.base.shape, *ones)
        if self.slope is None:
            return value.expand(*self.base.shape, *n.shape)
        basis = BASES[self.basis](n.to(self.base.dtype), self.length)
        return value + self.slope.reshape(*self.slope.shape, *ones) * basis

    def check(self, target_length: int) -> Scales:
        """Return these scales, or raise an error if they cannot be used up to that length."""
        if self.basis not in BASES:
            raise FarspanError(
                f"scale basis {self.basis!r} is unknown; choose one of {', '.join(BASES)}"
            )
        if (self.slope is None) != (self.basis == "constant"):
            raise FarspanError(
                f"basis {self.basis!r} {'has no' if self.slope is None else 'has a'} slope; "
                "a constant scale has none and every other basis needs one"
            )
        if self.basis in NEEDS_LENGTH and self.length < 1:
            raise FarspanError(
                f"basis {self.basis!r} needs the train length, not {self.length}; set length"
            )
        self._check_table("base", self.base)
        if self.slope is not None:
            self._check_table("slope", self.slope)
        if len(set(self.layers)) != len(self.layers):
            raise FarspanError(
                f"scales name a layer twice: {list(self.layers)}; keep one row per layer"
            )
        for layer, count in zip(self.layers, self.head_counts, strict=True):
            if type(count) is not int or not 1 <= count <= self.heads:
                raise FarspanError(
                    f"layer {layer} has {count!r} heads by its scales, whose table has columns for "
                    f"1 to {self.heads}; fit the patch again"
                )
        if self.layers:
            self._check_positive(target_length)
        return self

    def _check_table(self, name: str, table: Tensor) -> None:
        layers = len(self.layers)
        if table.ndim != 2 or table.shape[0] != layers or table.shape != self.base.shape:
            raise FarspanError(
                f"scales {name} has shape {list(table.shape)} for {layers} layers; "
                "it must be [layers, heads]"
            )
        if table.dtype not in (torch.float32, torch.float64):
            raise FarspanError(
                f"scales {name} is {table.dtype}; scales are float32, convert them with .float()"
            )
        if not torch.isfinite(table).all():
            raise FarspanError(f"scales {name} holds NaN or infinity; fit the patch again")

    def _check_positive(self, target_length: int) -> None:
        ends = torch.tensor([2, target_length], device=self.base.device)
        lowest = self.at(ends).detach().amin(dim=-1)
        if (lowest <= 0).any():
            layer, head = (lowest <= 0).nonzero()[0].tolist()
            raise FarspanError(
                f"the scale of layer {self.layers[layer]}, head {head} falls to "
                f"{lowest[layer, head]:.3g} between 2 and {target_length} keys; scales must stay "
                "above 0, so raise its base or lower the target"
            )


class RelativeScales(Scales):
    """λ̂(n) = base·(1 + slope·basis(n)): a slope relative to its base, for a search that shares it.

    No patch holds these; `absolute` gives the table that it saves.
    """

    def at(self, n: Tensor) -> Tensor:
        assert self.slope is not None
        shape = (*self.base.shape, *(1,) * n.ndim)
        basis = BASES[self.basis](n.to(self.base.dtype), self.length)
        return self.base.reshape(shape) * (1 + self.slope.reshape(shape) * basis)

    def absolute(self) -> Scales:
        assert self.slope is not None
        if not self.slope.any():
            return Scales(self.layers, self.base, layer_heads=self.layer_heads)
        slope = self.base * self.slope
        return Scales(
            self.layers, self.base, slope, self.basis, self.length, layer_heads=self.layer_heads
        )
