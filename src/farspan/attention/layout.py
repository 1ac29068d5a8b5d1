"""The layout of a model: which layers rotate, and which see a window.

A layout changes attention layer by layer without touching the config or the weights. A layer is
written like a position of farspan's own models: `rope/512` rotates and sees the last 512 keys,
`none` has no rotation and sees all keys. `rope:8192` rotates only the dimensions that make at least
one full turn within 8,192 tokens. Layers that the layout does not name stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farspan.errors import FarspanError

MIN_WINDOW = 2  # transformers' sliding caches keep every key of a window of 1
MIN_PERIOD = 7  # tokens; without rope scaling the fastest dimension turns in 2π
THETA = 10_000.0  # of rotation that a layout adds
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rope types whose frequencies follow the text's length
# Under these names attention modules receive cosines and sines, or complex numbers.
ROTATION_ARGUMENTS = ("position_embeddings", "angles")

_LAYER = re.compile(r"(none|rope(:(?P<period>[1-9]\d*))?)(/(?P<window>[1-9]\d*))?")

Attention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class LayerLayout:
    """One layer: whether it rotates, how many keys it sees at most (None: all), and up to which
    period in tokens its dimensions rotate (None: all of them)."""

    rotary: bool
    window: int | None = None
    max_period: int | None = None

    @classmethod
    def parse(cls, text: str) -> LayerLayout:
        """`rope/512` -> rotary with a window of 512 keys; `none` -> global without rotation."""
        match = _LAYER.fullmatch(text) if isinstance(text, str) else None
        if match is not None:
            window, period = (int(match[key] or 0) for key in ("window", "period"))
            if not (0 < window < MIN_WINDOW or 0 < period < MIN_PERIOD):
                return cls(text.startswith("rope"), window or None, period or None)
        raise FarspanError(
            f"layer layout {text!r} is unknown; write it as rope, rope/512, rope:8192, none or "
            f"none/512, with a window of {MIN_WINDOW} or more and a period of {MIN_PERIOD} or "
            "more"
        )

    def __str__(self) -> str:
        kind = "rope" if self.rotary else "none"
        period = "" if self.max_period is None else f":{self.max_period}"
        return kind + period + ("" if self.window is None else f"/{self.window}")


@dataclass(frozen=True)
class Layout:
    """The layout of some or all layers, by layer index."""

    layers: Mapping[int, LayerLayout]

    @classmethod
    def parse(cls, entries: Mapping[Any, str] | Sequence[str]) -> Layout:
        """A layout from text: one entry per layer, or a mapping from index to entry.

        >>> Layout.parse(["rope/512", "rope/512", "none"]).global_layers
        (2,)
        """
        items = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
        return cls({int(index): LayerLayout.parse(entry) for index, entry in items})

    def to_json(self) -> dict[str, str]:
        return {str(index): str(layer) for index, layer in sorted(self.layers.items())}

    def then(self, later: Layout | None) -> Layout:
        """Both layouts as one; the later one wins where both name a layer."""
        return self if later is None else Layout({**self.layers, **later.layers})

    @property
    def global_layers(self) -> tuple[int, ...]:
        return tuple(index for index, layer in sorted(self.layers.items()) if not layer.window)

    @property
    def windows(self) -> dict[int, int]:
        """The window of each layer that has one."""
        return {index: layer.window for index, layer in self.layers.items() if layer.window}


def limit_to_window(
    key: Tensor, value: Tensor, mask: Tensor | None, queries: int, window: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and mask of a call whose queries see their last `window` keys only.

    Without a mask, several queries stay causal from the first key: `banded` applies the window.
    """
    if mask is None:
        # A single query stands at the end of the cache, several stand at its start.
        keep = slice(-window, None) if queries == 1 else slice(None, queries)
        return key[:, :, keep], value[:, :, keep], None
    start, mask = _window_of_mask(mask, key.shape[2], window)
    return key[:, :, start:], value[:, :, start:], mask


def _window_of_mask(mask: Tensor, keys: int, window: int) -> tuple[int, Tensor]:
    """The first of the last `keys` keys that any query sees, and the mask from there on.

    All layers receive the same mask, so the result is kept with it. A compiled graph reads no
    values and keeps all keys.
    """
    if torch.compiler.is_compiling():
        return 0, _hide_beyond(mask[..., -keys:], window)
    kept = mask.__dict__.setdefault("_farspan_windows", {})
    if (keys, window) not in kept:
        part = mask[..., -keys:]  # a windowed cache holds the last keys only
        start = _first_visible(part, window)
        kept[keys, window] = start, _hide_beyond(part, window)[..., start:]
    return kept[keys, window]


def _hide_beyond(mask: Tensor, window: int) -> Tensor:
    slots = torch.arange(mask.shape[-1], device=mask.device)
    hidden = slots <= query_slots(mask)[..., None] - window
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _first_visible(mask: Tensor, window: int) -> int:
    """The first key in the window of any query; 0 while a CUDA graph is recorded."""
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return 0
    slots = query_slots(mask)
    slots = slots[slots >= 0]  # padding sees nothing
    return max(0, int(slots.min()) - window + 1) if len(slots) else 0


def visible_mask(mask: Tensor) -> Tensor:
    """A boolean or additive mask as booleans: True where the key is visible."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def query_slots(mask: Tensor) -> Tensor:
    """The place of each query among the keys, [..., Q]: the last key that its mask shows.

    A static cache has empty places after it, so it is not K − Q + i. A query that sees nothing is
    padding and stands at −1.
    """
    slots = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(visible_mask(mask), slots, -1).amax(-1)


def banded(
    attention: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within a window, computed in blocks of one window.

    The queries of a block see keys of their own block and of the one before. All blocks after the
    first are one call with one mask [window, 2·window], so memory grows with the length alone.
    """
    batch, length = query.shape[0], query.shape[2]
    first, _ = attention(
        module, *(part[:, :, :window] for part in (query, key, value)), None, **options
    )
    blocks = -(-length // window)
    padding = (0, 0, 0, blocks * window - length)
    query, key, value = (nn.functional.pad(part, padding) for part in (query, key, value))

    def as_batch(part: Tensor) -> Tensor:  # [B, H, blocks, rows, D] -> [B·blocks, H, rows, D]
        return part.transpose(1, 2).flatten(0, 1)

    rows = torch.arange(window, device=query.device)
    keys = torch.arange(2 * window, device=query.device)
    distance = rows[:, None] + window - keys
    mask = ((distance >= 0) & (distance < window))[None, None]
    rest, _ = attention(
        module,
        as_batch(query[:, :, window:].unflatten(2, (-1, window))),
        *(as_batch(part.unfold(2, 2 * window, window).transpose(-1, -2)) for part in (key, value)),
        mask,
        **options,
    )
    rest = rest.unflatten(0, (batch, -1)).flatten(1, 2)
    return torch.cat((first, rest), dim=1)[:, :length], None


def rotate_by_slot(
    query: Tensor, key: Tensor, places: Tensor, theta: float = THETA
) -> tuple[Tensor, Tensor]:
    """Rotary encoding of queries and keys by their places among the keys.

    Scores depend on distances alone, and a place differs from a position by the same number for
    all keys of a text, whatever padding, packing or cache it has.
    """
    slots = torch.arange(key.shape[2], device=query.device)
    return _rotate(query, places, theta), _rotate(key, slots, theta)


def _rotate(x: Tensor, slots: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    powers = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = slots[..., None].float() * theta**-powers
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half].float(), x[..., half:].float()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class RotationFilter:
    """A forward pre-hook: the attention module receives an identity in its slow dimensions.

    angles: by which each dimension turns in one token; None: no dimension may turn.
    max_period: of the dimensions that may, in tokens.
    """

    def __init__(self, angles: Tensor | None = None, max_period: int = 0):
        self._fixed = torch.ones((), dtype=torch.bool)
        if angles is None:
            return
        self._fixed = angles.abs() * max_period < 2 * math.pi
        if self._fixed.all():
            shortest = 2 * math.pi / angles.abs().max().item()
            raise FarspanError(
                f"no dimension makes a full turn within {max_period} tokens, the fastest takes "
                f"{shortest:.0f}; write none, or a longer period"
            )

    @property
    def fixes_some(self) -> bool:
        return bool(self._fixed.any())

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        return change_rotation(self._filter, args, kwargs)

    def _filter(self, rotation: Any) -> Any:
        """YaRN's factor on cosines and sines goes with the rotation of a dimension."""
        if isinstance(rotation, Tensor):  # complex numbers, in Llama 4
            return torch.where(self._mask(rotation), torch.ones_like(rotation), rotation)
        cos, sin = rotation
        return cos.masked_fill(self._mask(cos), 1), sin.masked_fill(self._mask(sin), 0)

    def _mask(self, part: Tensor) -> Tensor:
        if self._fixed.device != part.device:  # the model was moved
            self._fixed = self._fixed.to(part.device)
        return self._fixed


def change_rotation(
    change: Callable[[Any], Any], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of an attention module with another rotation."""
    named = {
        name: change(value) if name in ROTATION_ARGUMENTS and value is not None else value
        for name, value in kwargs.items()
    }
    # Families that pass it by position pass the hidden states first, which no rotation looks like.
    return tuple(change(value) if _is_rotation(value) else value for value in args), named


def step_angles(rotation: Any) -> Tensor:
    """The angle by which each dimension turns in one token, from the rotation of positions 0, 1."""
    if isinstance(rotation, Tensor):
        return rotation.angle().flatten(end_dim=-2)[1]
    cos, sin = (part.flatten(end_dim=-2)[1].float() for part in rotation)
    return torch.atan2(sin, cos)


def length_dependent_rotation(model: nn.Module) -> bool:
    """Whether the RoPE frequencies depend on the length of the text."""
    # rope_type is a string, or a dict by layer type
    kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    return any(name in kind for kind in kinds for name in LENGTH_DEPENDENT)


def _is_rotation(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(isinstance(part, Tensor) for part in value)
