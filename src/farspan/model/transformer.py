"""A Llama-shaped Hugging Face model with a choice of position encoding per layer.

Parameter names are Llama's, so weights can be exchanged; with rotation in every layer the outputs
agree to rounding. Every attention call goes through Hugging Face's attention interface, and so
through the attention seam.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from farspan.custom_code import source_code
from farspan.errors import FarspanError
from farspan.model import attend as biased_attention
from farspan.model.config import FULL, SLIDING, FarspanConfig
from farspan.model.encodings import (
    Encoding,
    PlacedEncoding,
    adds_scores,
    build_position,
    rotate_by,
)
from farspan.model.positions import (
    AlibiBias,
    PlacedBias,
    Position,
    TableBias,
    alibi_slopes,
    rotate,
)

eager_attention_forward = biased_attention.attend_eager  # the seam looks it up here
# Built-in scores that depend on the keys from j to i alone, so packed texts do not change them.
RELATIVE = ("kerple", "cope")
MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times a constant, so that they match the magnitude of added positions.

    There is no padding_idx: the token that ends a text is often the padding token too, and a vector
    fixed at zero would keep the model from learning the end of a text.
    """

    def __init__(self, config: FarspanConfig):
        super().__init__(config.vocab_size, config.hidden_size)
        self.scale = config.embedding_scale

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return x if self.scale == 1 else x * self.scale


class FarspanAttention(nn.Module):
    """Grouped-query attention; what the position encoding does is an argument.

    That is angles or a rotation (an encoding of the open protocol with positions [B or 1, tokens]),
    and a bias of the scores."""

    def __init__(self, config: FarspanConfig, layer_idx: int):
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.layer_idx, self.head_dim = config, layer_idx, head_dim
        self.num_key_value_groups = heads // kv_heads
        self.scaling = config.base_scale
        self.is_causal = True
        self.sliding_window = (
            config.sliding_window if config.layer_types[layer_idx] == SLIDING else None
        )
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        angles=None,
        rotation=None,
        bias=None,
        past_key_values=None,
        positions_to_keep=0,
        **kwargs,
    ):
        q = self.q_proj(hidden_states[:, -positions_to_keep:])  # 0: queries of all positions
        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        # [B, H, Q, D]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if angles is not None:
            q, k = rotate(q, k, angles)
        if rotation is not None:
            encoding, positions = rotation
            q, k = rotate_by(encoding, q, k, positions)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if bias is not None:
            if isinstance(bias, PlacedEncoding):
                bias = bias.bind(q * self.scaling, k)
            kwargs["bias"] = bias
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.dropout if self.training else 0.0
        output, weights = attention(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.flatten(-2)), weights


class SwiGLU(nn.Module):
    def __init__(self, config: FarspanConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class ReluMLP(nn.Module):
    def __init__(self, config: FarspanConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(F.relu(self.up_proj(x))))


MLPS = {"swiglu": SwiGLU, "relu": ReluMLP}


class FarspanLayer(GradientCheckpointingLayer):
    def __init__(self, config: FarspanConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = FarspanAttention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLPS[config.mlp](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, table: Tensor | None = None, positions_to_keep: int = 0, **kwargs
    ) -> Tensor:
        """The hidden states of the last `positions_to_keep` positions (0: all).

        Only these are queries; all positions are keys and values. `table` has the values of the
        bias: reentrant checkpointing gives gradients to positional arguments only."""
        if table is not None:
            kwargs["bias"] = replace(kwargs["bias"], function=TableBias(table))
        # Sliced first: the order of operations on x fixes the rounding of its gradient.
        residual = x[:, -positions_to_keep:]
        attended, _ = self.self_attn(
            self.input_layernorm(x), positions_to_keep=positions_to_keep, **kwargs
        )
        x = residual + self.dropout(attended)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class FarspanPreTrainedModel(PreTrainedModel):
    config_class = FarspanConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("FarspanLayer",)
    _skip_keys_device_placement = ("past_key_values",)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012 (the base class's form)
        "hidden_states": FarspanLayer,
        "attentions": FarspanAttention,
    }

    def __init__(self, config: FarspanConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if self._biased_kinds():  # they would drop the bias
            self._supports_flash_attn = self._supports_flex_attn = False

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """Layers with a score bias need the attention function that does not drop it."""
        if not self._biased_kinds():
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        if requested_attention in (None, "sdpa"):
            return biased_attention.NAME
        keeps_bias = requested_attention.endswith((biased_attention.NAME, "eager"))
        if not keeps_bias or "|" in requested_attention:  # "paged|eager" is not ours
            raise FarspanError(
                f"attention {requested_attention!r} would drop the score bias of "
                f"{' and '.join(self._biased_kinds())} layers; do not set attn_implementation, or "
                "set eager"
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> None:
        """As transformers does, with the code of the model's own encodings in the folder."""
        paths = self.config.custom_encodings
        for name, reference in paths.items():
            file, _, cls = reference.rpartition(":")
            if file.endswith(".py"):
                Path(save_directory).mkdir(parents=True, exist_ok=True)
                code = source_code(reference, f"the encoding {name}")
                (Path(save_directory) / f"{name}.py").write_bytes(code)
                self.config.custom_encodings = {
                    **self.config.custom_encodings,
                    name: f"{name}.py:{cls}",
                }
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            if paths:
                self.config.custom_encodings = paths

    def _biased_kinds(self) -> list[str]:
        custom = self.config.custom_encodings
        return [kind for kind in sorted(set(self.config.position)) if adds_scores(kind, custom)]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AlibiBias):  # its buffer is not saved and loads on the meta device
            slopes = torch.tensor(alibi_slopes(module.slopes.numel()))
            module.slopes = slopes.to(module.slopes.device)


class FarspanModel(FarspanPreTrainedModel):
    def __init__(self, config: FarspanConfig):
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(config)
        self.positions = nn.ModuleDict(
            {kind: build_position(kind, config) for kind in sorted(set(config.position))}
        )
        self.layers = nn.ModuleList(
            FarspanLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        positions_to_keep: int = 0,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the last `positions_to_keep` positions (0: all).

        The last layer computes no others, where its attention backend allows that."""
        if (input_ids is None) == (inputs_embeds is None):
            raise FarspanError(
                "the model needs input_ids or inputs_embeds, and got "
                f"{'neither' if input_ids is None else 'both'}; pass one of them"
            )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self._check_call(attention_mask, position_ids, past_key_values, bool(use_cache))
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        packed = position_ids is not None
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + past)[None]
        masks = self._masks(x, attention_mask, position_ids if packed else None, past_key_values)
        if packed:
            kwargs["position_ids"] = position_ids  # FlashAttention separates packed texts by them
        biases = self._biases(x.shape[1], x.device, past_key_values)
        x, angles = self._embed_positions(x, position_ids)
        for layer, kind, span in zip(
            self.layers, self.config.position, self.config.layer_types, strict=True
        ):
            mask, bias = masks[span], biases.get((kind, span))
            options = {"attention_mask": mask, "angles": angles[kind], "bias": bias}
            if isinstance(self._position(kind), Encoding):
                options["rotation"] = self._position(kind), position_ids
            if layer is self.layers[-1] and self._can_skip_queries(positions_to_keep, x):
                options |= self._last_layer_options(
                    positions_to_keep, x, mask, bias, past_key_values
                )
            function = None if bias is None else bias.function
            table = function.values if isinstance(function, TableBias) else None
            x = layer(x, table, past_key_values=past_key_values, **options, **kwargs)
        x = self.norm(x[:, -positions_to_keep:])
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
        )

    def _embed_positions(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The embeddings with absolute positions and dropout, and the angles of each encoding."""
        angles = {}
        for kind in self.positions:
            x = self._position(kind).embed(x, position_ids)
            angles[kind] = self._position(kind).angles(x, position_ids)
        if torch.is_autocast_enabled(x.device.type):
            # Autocast keeps sums in float32, and with them the residual stream: twice the memory
            # traffic for no gain.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.dropout(x), angles

    @property
    def draws_positions(self) -> bool:
        """Whether an encoding draws random numbers, for a whole text."""
        return any(getattr(position, "random", False) for position in self.positions.values())

    def _check_call(self, attention_mask, position_ids, past_key_values, use_cache: bool) -> bool:
        """Refuse what an encoding of the open protocol cannot do; returns whether to cache."""
        if self.draws_positions:
            if past_key_values is not None:
                raise FarspanError(
                    "randomized positions are drawn for a whole text, so its cached start would "
                    "have others; run whole texts, with use_cache=False"
                )
            return False
        scoring = [
            kind
            for kind, encoding in self.positions.items()
            if isinstance(encoding, Encoding) and encoding.adds_scores
        ]
        absolute = [kind for kind in scoring if kind not in RELATIVE]
        # transformers' masks find packed texts so, too.
        may_pack = position_ids is not None and attention_mask is past_key_values is None
        if absolute and may_pack and (position_ids.diff(dim=-1) != 1).any():
            raise FarspanError(
                f"{absolute[0]} layers cannot run packed texts; run one text per row"
            )
        if scoring and attention_mask is not None:
            # Their scores depend on more than distances, which padding does not change.
            if isinstance(attention_mask, dict):
                raise FarspanError(
                    f"{scoring[0]} layers cannot use a static cache; use a dynamic one"
                )
            if not attention_mask.all():
                raise FarspanError(
                    f"{scoring[0]} layers cannot run a padded batch; run texts of one length, or "
                    "one text at a time"
                )
        return use_cache

    def _position(self, kind: str) -> Position:
        return self.positions[kind]  # type: ignore[return-value]  # ModuleDict is untyped

    def _masks(self, x, attention_mask, position_ids, past_key_values) -> dict[str, Tensor | None]:
        """One mask per layer type.

        It is None without cache, padding, packing or a window that hides a key: causal SDPA needs
        no mask, and a mask rules out the flash kernel."""
        if isinstance(attention_mask, dict):  # prepared by `generate` for a static cache
            return attention_mask
        # Decided here because some versions of transformers make a mask while a CUDA graph is
        # recorded. FlexAttention needs a mask to be causal.
        plain = attention_mask is past_key_values is position_ids is None
        plain &= "flex" not in self.config._attn_implementation
        windows = {FULL: x.shape[1], SLIDING: self.config.sliding_window or 0}
        return {
            span: None
            if plain and windows[span] >= x.shape[1]
            else MASKS[span](
                config=self.config,
                inputs_embeds=x,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for span in set(self.config.layer_types)
        }

    def _can_skip_queries(self, positions_to_keep: int, x: Tensor) -> bool:
        """Whether the last layer can compute the last queries only; flash backends take no mask."""
        return 0 < positions_to_keep < x.shape[1] and "sdpa" in self.config._attn_implementation

    def _last_layer_options(
        self,
        count: int,
        x: Tensor,
        mask,
        bias: PlacedBias | PlacedEncoding | None,
        past_key_values,
    ) -> dict[str, Any]:
        """The arguments of the last layer for the last `count` queries only.

        They need an explicit causal mask, for SDPA would take them for the first queries."""
        queries = keys = x.shape[1]
        if mask is not None:
            mask = mask[:, :, -count:]
        else:
            if past_key_values is not None:
                keys, _ = past_key_values.get_mask_sizes(queries, len(self.layers) - 1)
            slots = torch.arange(keys, device=x.device)
            mask = (slots[queries - count : queries, None] >= slots)[None, None]
        if bias is not None:
            bias = replace(bias, query_index=bias.query_index[-count:], blocks=None)
        return {"attention_mask": mask, "bias": bias, "positions_to_keep": count}

    def _biases(
        self, queries: int, device, past_key_values
    ) -> dict[tuple[str, str], PlacedBias | PlacedEncoding]:
        """The score bias of each encoding and layer type, at the cache slots of this call."""
        pairs = zip(self.config.position, self.config.layer_types, strict=True)
        first = {pair: index for index, pair in reversed(list(enumerate(pairs)))}
        placed: dict[tuple[str, str], PlacedBias | PlacedEncoding] = {}
        for (kind, span), index in first.items():
            position = self._position(kind)
            own = isinstance(position, Encoding) and position.adds_scores
            if not own and position.bias is None:
                continue
            past, keys, offset, blocks = 0, queries, 0, None
            if past_key_values is not None:
                past = past_key_values.get_seq_length(index)
                keys, offset = past_key_values.get_mask_sizes(queries, index)
            elif device.type == "cuda":
                blocks = biased_attention.causal_blocks(queries, device)
            query_index = torch.arange(queries, device=device) + past
            key_index = torch.arange(keys, device=device) + offset
            if isinstance(position, Encoding):
                placed[kind, span] = PlacedEncoding(position, query_index, key_index)
            elif (bias := position.bias) is not None:
                placed[kind, span] = PlacedBias(
                    bias(keys), bias.heads, query_index, key_index, blocks
                )
        return placed


class FarspanForCausalLM(FarspanPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (the base class's form)

    def __init__(self, config: FarspanConfig):
        super().__init__(config)
        self.model = FarspanModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args, **kwargs):
        """As transformers does, without a cache where an encoding draws positions."""
        if self.model.draws_positions:
            kwargs.setdefault("use_cache", False)
        return super().generate(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,  # `generate` passes it only if the signature has it
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` positions (0: all), or of the listed positions."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,  # whatever the config says
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


def zero_outputs(model: PreTrainedModel) -> None:
    """Set the output projections of every layer to zero, so that layers start as the identity."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
