"""The shape of a farspan model, as a Hugging Face config that says for every layer which encoding it has."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from transformers import PreTrainedConfig

from farspan.errors import FarspanError, nearest
from farspan.model.positions import MODEL_WIDE, PER_LAYER

FULL, SLIDING = "full_attention", "sliding_attention"
FOLLOWING = ("num_key_value_heads", "head_dim", "position_table")  # None: they follow from the others
COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "t5_buckets", "t5_max_distance", *FOLLOWING),
)


class FarspanConfig(PreTrainedConfig):
    """Llama's shape with the position encoding as a choice, layer by layer.

    `position` is one name for all layers, or a pattern that is repeated over them. An entry may carry a window:
    `["rope/128", "rope/128", "rope/128", "none"]` is three rotary layers that see 128 tokens, then one global
    layer without positions. It is stored spelled out, one name a layer, with windows in `layer_types` and
    `sliding_window`, as Hugging Face's caches expect them. `max_position_embeddings` is the training length; rows of a
    learned table beyond it (`position_table`) are untrained.
    """

    model_type = "farspan"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = 1344
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]  # as many as query heads
    head_dim: int = None  # type: ignore[assignment]  # hidden_size / heads
    max_position_embeddings: int = 512
    position: str | list[str] = "none"
    position_table: int = None  # type: ignore[assignment]  # rows of a learned table: max_position_embeddings
    layer_types: list[str] = None  # type: ignore[assignment]  # all full_attention
    sliding_window: int | None = None
    rope_parameters: dict = None  # type: ignore[assignment]  # base frequency 10,000
    rotary_fraction: float = 1.0
    t5_buckets: int = 32
    t5_max_distance: int = 128
    base_scale: float = None  # type: ignore[assignment]  # multiplies q·k: 1/√head_dim
    embedding_scale: float = 1.0  # multiplies the embeddings of tokens, before positions are added
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
        self._check_shape()
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.base_scale = self.base_scale if self.base_scale is not None else self.head_dim**-0.5
        self.position_table = self.position_table or self.max_position_embeddings
        self._spell_out_positions()
        if (self.rope_parameters or {}).get("rope_type") == "none":  # rotation was removed from a rotary model
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
            # Stock Llama has no such type and refuses, instead of rotating what was never rotated.
            self.rope_parameters = {"rope_type": "none"}
        super().__post_init__(**kwargs)

    def _check_shape(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is None and name in FOLLOWING:
                continue
            if not (isinstance(value, Integral) and int(value) >= 1):
                raise FarspanError(f"{name} is {value!r}; give a whole number of 1 or more")
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % kv_heads:
            raise FarspanError(
                f"{self.num_attention_heads} query heads cannot share {kv_heads} key heads evenly; "
                "choose num_key_value_heads as a divisor of num_attention_heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise FarspanError(
                f"hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads; set head_dim"
            )
        turned = round((self.head_dim or self.hidden_size // self.num_attention_heads) * self.rotary_fraction)
        turns = any(str(entry).startswith("rope") for entry in _listed(self.position))
        if turns and not (0 < self.rotary_fraction <= 1 and turned):
            raise FarspanError(
                f"rotary_fraction is {self.rotary_fraction:g}, which turns {turned} dimensions of a head; "
                "choose a share of at most 1 that turns at least one pair"
            )
        if turns and turned % 2:
            raise FarspanError(
                f"rotation turns pairs, and {turned} dimensions of a head are no pairs; choose an even width"
            )
        if not self.t5_max_distance > self.t5_buckets // 2 >= 1:
            raise FarspanError(
                f"t5_buckets is {self.t5_buckets} and t5_max_distance is {self.t5_max_distance}; "
                "give 2 buckets or more, and a distance of more than half as many"
            )
        if self.hidden_size % 2 and "sinusoidal" in _listed(self.position):
            raise FarspanError(
                f"sinusoidal positions come in pairs, and hidden_size is {self.hidden_size}; choose an even one"
            )
        if self.mlp not in ("swiglu", "relu"):
            raise FarspanError(f"mlp {self.mlp!r} is unknown; choose swiglu or relu")

    def _spell_out_positions(self) -> None:
        """Expand the short form; already expanded values pass unchanged, so a saved config loads as it was."""
        entries = _listed(self.position)
        kinds, windows = zip(*(parse_position(entry) for entry in entries), strict=True) if entries else ((), ())
        layers = self.num_hidden_layers
        if not entries or layers % len(entries):
            raise FarspanError(
                f"a position pattern of {len(entries)} entries does not fit {layers} layers; "
                "give one entry, one a layer, or a pattern that divides the number of layers"
            )
        absolute = sorted(set(kinds) & set(MODEL_WIDE))
        if absolute and len(set(kinds)) > 1:
            raise FarspanError(
                f"position {absolute[0]!r} is added to the embeddings and so holds for the whole model; "
                f"it cannot stand beside {sorted(set(kinds) - {absolute[0]})}"
            )
        repeat = layers // len(entries)
        self.position = list(kinds) * repeat
        if any(windows):
            sizes = sorted(set(filter(None, windows)))
            if len(sizes) > 1 or self.sliding_window not in (None, sizes[0]):
                named = sorted({*sizes, *filter(None, [self.sliding_window])})
                raise FarspanError(
                    f"position names the window sizes {named}, and a model has one sliding_window; choose one size"
                )
            self.sliding_window = sizes[0]
            self.layer_types = [SLIDING if window else FULL for window in windows] * repeat
        self.layer_types = list(self.layer_types or [FULL] * layers)
        self._check_windows()

    def _check_windows(self) -> None:
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise FarspanError(f"layer_types names {unknown[0]!r}; farspan knows {FULL} and {SLIDING}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise FarspanError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers; give one a layer"
            )
        if SLIDING in self.layer_types and not (self.sliding_window and self.sliding_window > 0):
            raise FarspanError(
                f"layer_types asks for {SLIDING} but sliding_window is {self.sliding_window}; set a window size"
            )
        if SLIDING not in self.layer_types:
            self.sliding_window = None  # a cache would otherwise slide every layer

    def _validate_none_rope_parameters(self, rope_parameters, ignore_keys=None) -> None:
        """rope_type "none" needs nothing more."""

    def convert_rope_params_to_dict(self, **kwargs):
        if self.rope_parameters == {"rope_type": "none"}:
            for legacy in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
                kwargs.pop(legacy, None)
            return kwargs
        return super().convert_rope_params_to_dict(**kwargs)


def parse_position(entry: str) -> tuple[str, int | None]:
    """`rope/128` -> ("rope", 128), `none` -> ("none", None)."""
    if not isinstance(entry, str):
        raise FarspanError(f"position {entry!r} is no name; write it as none, rope or rope/128")
    kind, _, window = entry.partition("/")
    known: Sequence[str] = PER_LAYER + MODEL_WIDE
    if kind not in known:
        raise FarspanError(f"position {entry!r} is unknown; {nearest(kind, known)}")
    if not window and "/" not in entry:
        return kind, None
    if not window.isdecimal() or int(window) < 1:
        raise FarspanError(f"position {entry!r} has no valid window; write it as {kind}/128")
    return kind, int(window)


def _listed(position: str | list[str] | tuple[str, ...]) -> list[str]:
    return list(position) if isinstance(position, list | tuple) else [position]
