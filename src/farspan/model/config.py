"""The Hugging Face config of a farspan model, with a position encoding for every layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Integral
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from farspan.errors import FarspanError, suggest
from farspan.model.positions import MODEL_WIDE, PER_LAYER

FULL, SLIDING = "full_attention", "sliding_attention"
MIN_WINDOW = 2  # transformers' sliding caches keep every key of a window of 1
DERIVED = ("num_key_value_heads", "head_dim", "position_table")  # None: derived from the others
COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "t5_buckets", "t5_max_distance", *DERIVED),
)


class FarspanConfig(PreTrainedConfig):
    """Llama's architecture with a choice of position encoding per layer.

    `position` is one name for all layers, or a pattern that is repeated over them. An entry may
    have a window: `["rope/128", "rope/128", "rope/128", "none"]` is three rotary layers with a
    sliding window of 128 tokens, then one full-attention layer without positions. It is stored
    expanded, one name per layer, with windows in `layer_types` and `sliding_window`, where Hugging
    Face's caches read them. `max_position_embeddings` is the train length; rows of a learned table
    beyond it (`position_table`) are untrained. `custom_encodings` names the code of encodings that
    are not farspan's own: {"mine": "mine.py:Mine"}.
    """

    model_type = "farspan"
    keys_to_ignore_at_inference = ("past_key_values",)
    custom_encodings: ClassVar[dict[str, str]] = {}

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = 1344
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]  # default: num_attention_heads
    head_dim: int = None  # type: ignore[assignment]  # default: hidden_size / heads
    max_position_embeddings: int = 512
    position: str | list[str] = "none"
    # Rows of a learned table; default: max_position_embeddings.
    position_table: int = None  # type: ignore[assignment]
    layer_types: list[str] = None  # type: ignore[assignment]  # default: all full_attention
    sliding_window: int | None = None
    rope_parameters: dict = None  # type: ignore[assignment]  # default: rope_theta 10,000
    rotary_fraction: float = 1.0
    t5_buckets: int = 32
    t5_max_distance: int = 128
    base_scale: float = None  # type: ignore[assignment]  # multiplies q·k; default: 1/√head_dim
    embedding_scale: float = 1.0  # multiplies the token embeddings before positions are added
    mlp: str = "swiglu"
    dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        # Not a field: configs without such encodings stay as they were, and their hashes too.
        if custom := kwargs.pop("custom_encodings", None):
            self.custom_encodings = _checked_encodings(custom)
        self._check_shape()
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.base_scale = self.base_scale if self.base_scale is not None else self.head_dim**-0.5
        self.position_table = self.position_table or self.max_position_embeddings
        self._expand_positions()
        if (self.rope_parameters or {}).get("rope_type") == "none":  # rotation was removed
            self.position = ["none" if kind == "rope" else kind for kind in self.position]
        if "rope" in self.position:
            self.rope_parameters = {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                **(self.rope_parameters or {}),
            }
            if self.rotary_fraction != 1:
                self.rope_parameters["partial_rotary_factor"] = self.rotary_fraction
                self.ignore_keys_at_rope_validation = {"partial_rotary_factor"}
        else:
            # Stock Llama does not know this type and refuses it, instead of adding rotation.
            self.rope_parameters = {"rope_type": "none"}
        super().__post_init__(**kwargs)

    def _check_shape(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is None and name in DERIVED:
                continue
            if not (isinstance(value, Integral) and int(value) >= 1):
                raise FarspanError(f"{name} is {value!r}; set a whole number of 1 or more")
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % kv_heads:
            raise FarspanError(
                f"{self.num_attention_heads} query heads cannot share {kv_heads} key heads evenly; "
                "choose num_key_value_heads as a divisor of num_attention_heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise FarspanError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} "
                "heads; set head_dim"
            )
        if self.mlp not in ("swiglu", "relu"):
            raise FarspanError(f"mlp {self.mlp!r} is unknown; choose swiglu or relu")
        self._check_numbers()
        self._check_encodings()

    def _check_numbers(self) -> None:
        for name in ("rms_norm_eps", "base_scale"):
            value = getattr(self, name)
            valid = isinstance(value, int | float) and 0 < value < math.inf
            if not valid and not (name == "base_scale" and value is None):
                raise FarspanError(f"{name} is {value!r}; set a number above 0")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            if not all(isinstance(token, Integral | None) for token in _as_list(value)):
                raise FarspanError(f"{name} is {value!r}; set the number of a token")

    def _check_encodings(self) -> None:
        """Refuse widths and settings that the position encodings cannot use."""
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        rotated = round(head_dim * self.rotary_fraction)
        if any(str(entry).startswith("rope") for entry in _as_list(self.position)):
            if not (0 < self.rotary_fraction <= 1 and rotated):
                raise FarspanError(
                    f"rotary_fraction is {self.rotary_fraction:g}, which rotates {rotated} "
                    "dimensions of a head; choose a fraction of at most 1 that rotates at least "
                    "one pair"
                )
            if rotated % 2:
                raise FarspanError(
                    f"rotation needs pairs of dimensions, and {rotated} dimensions of a head are "
                    "rotated; choose an even number"
                )
        if not self.t5_max_distance > self.t5_buckets // 2 >= 1:
            raise FarspanError(
                f"t5_buckets is {self.t5_buckets} and t5_max_distance is {self.t5_max_distance}; "
                "set 2 buckets or more, and a distance of more than half as many"
            )
        waves = {"sinusoidal", "randomized"} & set(map(str, _as_list(self.position)))
        if self.hidden_size % 2 and waves:
            raise FarspanError(
                f"sinusoidal positions come in pairs, and hidden_size is {self.hidden_size}; "
                "choose an even size"
            )

    def _expand_positions(self) -> None:
        """Expand the short form; expanded values stay as they are, so a saved config reloads."""
        entries = _as_list(self.position)
        parsed = [parse_position(entry, self.custom_encodings) for entry in entries]
        kinds, windows = [kind for kind, _ in parsed], [window for _, window in parsed]
        layers = self.num_hidden_layers
        if not entries or layers % len(entries):
            raise FarspanError(
                f"a position pattern of {len(entries)} entries does not fit {layers} layers; "
                "set one entry, one per layer, or a pattern that divides the number of layers"
            )
        absolute = sorted(set(kinds) & set(MODEL_WIDE))
        if absolute and len(set(kinds)) > 1:
            raise FarspanError(
                f"position {absolute[0]!r} is added to the embeddings, so it applies to the whole "
                f"model and cannot be combined with {sorted(set(kinds) - {absolute[0]})}; "
                "choose one of them"
            )
        repeat = layers // len(entries)
        self.position = kinds * repeat
        if any(windows):
            sizes = sorted(set(filter(None, windows)))
            if len(sizes) > 1 or self.sliding_window not in (None, sizes[0]):
                named = sorted({*sizes, *filter(None, [self.sliding_window])})
                raise FarspanError(
                    f"position names the window sizes {named}, but a model has one sliding_window; "
                    "choose one size"
                )
            self.sliding_window = sizes[0]
            self.layer_types = [SLIDING if window else FULL for window in windows] * repeat
        self.layer_types = list(self.layer_types or [FULL] * layers)
        self._check_windows()

    def _check_windows(self) -> None:
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise FarspanError(
                f"layer_types names {unknown[0]!r}, which is unknown; choose {FULL} or {SLIDING}"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise FarspanError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} "
                "layers; set one per layer"
            )
        if SLIDING in self.layer_types and (self.sliding_window or 0) < MIN_WINDOW:
            raise FarspanError(
                f"layer_types has {SLIDING}, but sliding_window is {self.sliding_window}; "
                f"set a window size of {MIN_WINDOW} or more"
            )
        if SLIDING not in self.layer_types:
            self.sliding_window = None  # a cache would otherwise slide every layer

    def _validate_none_rope_parameters(self, rope_parameters, ignore_keys=None) -> None:
        """rope_type "none" has no parameters."""

    def convert_rope_params_to_dict(self, **kwargs):
        if self.rope_parameters == {"rope_type": "none"}:
            for legacy in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
                kwargs.pop(legacy, None)
            return kwargs
        return super().convert_rope_params_to_dict(**kwargs)


def parse_position(entry: str, custom: Iterable[str] = ()) -> tuple[str, int | None]:
    """`rope/128` -> ("rope", 128), `none` -> ("none", None)."""
    if not isinstance(entry, str):
        raise FarspanError(f"position {entry!r} is not a name; write it as none, rope or rope/128")
    kind, _, window = entry.partition("/")
    known = (*PER_LAYER, *MODEL_WIDE, *custom)
    if kind not in known:
        raise FarspanError(f"position {entry!r} is unknown; {suggest(kind, known)}")
    if not window and "/" not in entry:
        return kind, None
    if not window.isdecimal() or int(window) < MIN_WINDOW:
        raise FarspanError(
            f"position {entry!r} has no valid window; write it as {kind}/128, with a window of "
            f"{MIN_WINDOW} or more"
        )
    return kind, int(window)


def _checked_encodings(custom: Any) -> dict[str, str]:
    """Names in `position` with their code; a name is also that of a file in the model's folder."""
    if not isinstance(custom, dict):
        raise FarspanError(f"custom_encodings is {custom!r}; write names with file.py:Class")
    for name, reference in custom.items():
        if name in (*PER_LAYER, *MODEL_WIDE) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise FarspanError(
                f"custom_encodings has the name {name!r}; write a name that is not built in, with "
                "letters, digits, - and _"
            )
        if not isinstance(reference, str):
            raise FarspanError(f"custom_encodings.{name} is {reference!r}; write file.py:Class")
    return dict(custom)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
