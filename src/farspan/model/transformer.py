"""A Llama-shaped causal transformer whose position encoding is a choice, as a Hugging Face model.

Parameter names are Llama's, so weights move between the two; with rotation on every layer the two agree to
rounding. Every attention call goes through Hugging Face's attention interface: that is where the seam sits.
"""

from __future__ import annotations

from dataclasses import replace
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
from transformers.utils.generic import can_return_tuple

from farspan.errors import FarspanError
from farspan.model import attend as biased
from farspan.model.config import FULL, SLIDING, FarspanConfig
from farspan.model.positions import AlibiBias, PlacedBias, Position, alibi_slopes, build, rotate

eager_attention_forward = biased.attend  # where the seam looks for a family's eager function
MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}


class Embedding(nn.Embedding):
    """A vector a token, times a constant: beside positions that are added to it, it has to be as large as they are.

    Padding has a vector like any other. Where the end of a text pads as well, a vector of its own that is kept at zero
    would keep the model from learning what an end is.
    """

    def __init__(self, config: FarspanConfig):
        super().__init__(config.vocab_size, config.hidden_size)
        self.scale = config.embedding_scale

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return x if self.scale == 1 else x * self.scale


class FarspanAttention(nn.Module):
    """Grouped-query attention. Whatever the position encoding does to q, k or the scores is handed in."""

    def __init__(self, config: FarspanConfig, layer_idx: int):
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.layer_idx, self.head_dim = config, layer_idx, head_dim
        self.num_key_value_groups = heads // kv_heads
        self.scaling = config.base_scale
        self.is_causal = True
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == SLIDING else None
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(
        self, hidden_states, attention_mask=None, angles=None, bias=None, past_key_values=None, last=0, **kwargs
    ):
        q = self.q_proj(hidden_states[:, -last:])  # 0: all positions ask
        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))  # [B, H, Q, D]
        if angles is not None:
            q, k = rotate(q, k, angles)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if bias is not None:
            kwargs["bias"] = bias
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, biased.attend)
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

    def forward(self, x: Tensor, last: int = 0, **kwargs) -> Tensor:
        """With `last`, only so many positions come out, and only they ask; all are keys and values."""
        x = x[:, -last:] + self.dropout(self.self_attn(self.input_layernorm(x), last=last, **kwargs)[0])
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

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Layers with a score bias need the one function that does not drop it."""
        if not {"alibi", "t5"} & set(self.config.position):
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        if requested_attention in (None, "sdpa"):
            return biased.NAME
        if biased.NAME not in requested_attention:
            raise FarspanError(
                f"attention {requested_attention!r} would drop the score bias of alibi and t5 layers; "
                "leave attn_implementation unset"
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AlibiBias):  # a buffer that is not saved: loading builds it on no device
            slopes = torch.tensor(alibi_slopes(module.slopes.numel()))
            module.slopes = slopes.to(module.slopes.device)


class FarspanModel(FarspanPreTrainedModel):
    def __init__(self, config: FarspanConfig):
        super().__init__(config)
        self.embed_tokens = Embedding(config)
        self.positions = nn.ModuleDict({kind: build(kind, config) for kind in sorted(set(config.position))})
        self.layers = nn.ModuleList(FarspanLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        last: int = 0,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states of all positions, or of the `last` so many: the last layer then spares the others."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not (self.gradient_checkpointing and self.training):
            past_key_values = DynamicCache(config=self.config)
        packed = position_ids is not None
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + past)[None]
        masks = self._masks(x, attention_mask, position_ids if packed else None, past_key_values)
        biases = self._biases(x.shape[1], x.device, past_key_values)
        angles = {}
        for kind in self.positions:
            x = self._position(kind).embed(x, position_ids)
            angles[kind] = self._position(kind).angles(x, position_ids)
        if torch.is_autocast_enabled(x.device.type):
            # Autocast leaves sums in float32, and so the whole residual stream: twice the memory traffic for nothing.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = self.dropout(x)
        states = []
        for layer, kind, span in zip(self.layers, self.config.position, self.config.layer_types, strict=True):
            if output_hidden_states:
                states.append(x)
            placed = {"attention_mask": masks[span], "angles": angles[kind], "bias": biases.get((kind, span))}
            if layer is self.layers[-1] and self._spares(last, x):
                placed |= self._ending(last, x, masks[span], biases.get((kind, span)), past_key_values)
            x = layer(x, past_key_values=past_key_values, **placed, **kwargs)
        x = self.norm(x[:, -last:])
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*states, x) if output_hidden_states else None,
        )

    def _position(self, kind: str) -> Position:
        return self.positions[kind]  # type: ignore[return-value]  # a ModuleDict forgets what it holds

    def _masks(self, x, attention_mask, position_ids, past_key_values) -> dict[str, Tensor | None]:
        """One mask a kind of layer. Without cache, padding, packing or a window that hides a key it is None: causal
        SDPA needs none, and one that exists would cost the flash kernel."""
        if isinstance(attention_mask, dict):  # `generate` prepares them ahead for a static cache
            return attention_mask
        # Said here, for while a CUDA graph is recorded some versions of transformers would make a mask. FlexAttention
        # alone is causal by its mask.
        plain = attention_mask is past_key_values is position_ids is None
        plain &= "flex" not in self.config._attn_implementation
        reach = {FULL: x.shape[1], SLIDING: self.config.sliding_window or 0}
        return {
            span: None
            if plain and reach[span] >= x.shape[1]
            else MASKS[span](
                config=self.config,
                inputs_embeds=x,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for span in set(self.config.layer_types)
        }

    def _spares(self, last: int, x: Tensor) -> bool:
        """Can the last layer leave out all but the last queries? Flash backends take no mask to place them by."""
        return 0 < last < x.shape[1] and "sdpa" in self.config._attn_implementation

    def _ending(self, last: int, x: Tensor, mask, bias: PlacedBias | None, past_key_values) -> dict[str, Any]:
        """What the last layer is told when only the last queries count. A causal mask that was left away must be there
        now, for SDPA would take these queries for the first."""
        queries = keys = x.shape[1]
        if mask is not None:
            mask = mask[:, :, -last:]
        else:
            if past_key_values is not None:
                keys, _ = past_key_values.get_mask_sizes(queries, len(self.layers) - 1)
            slots = torch.arange(keys, device=x.device)
            mask = (slots[queries - last : queries, None] >= slots)[None, None]
        if bias is not None:
            bias = replace(bias, query_index=bias.query_index[-last:], blocks=None)
        return {"attention_mask": mask, "bias": bias, "last": last}

    def _biases(self, queries: int, device, past_key_values) -> dict[tuple[str, str], PlacedBias]:
        """The score bias of each kind of layer, placed where this call's queries and keys stand in the cache."""
        pairs = zip(self.config.position, self.config.layer_types, strict=True)
        first = {pair: index for index, pair in reversed(list(enumerate(pairs)))}
        placed = {}
        for (kind, span), index in first.items():
            rule = self._position(kind).bias
            if rule is None:
                continue
            seen, keys, offset = 0, queries, 0
            if past_key_values is not None:
                seen = past_key_values.get_seq_length(index)
                keys, offset = past_key_values.get_mask_sizes(queries, index)
            placed[kind, span] = PlacedBias(
                rule(keys),
                rule.heads,
                torch.arange(queries, device=device) + seen,
                torch.arange(keys, device=device) + offset,
                biased.causal_blocks(queries, device) if device.type == "cuda" and past_key_values is None else None,
            )
        return placed


class FarspanForCausalLM(FarspanPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (the base class's form)

    def __init__(self, config: FarspanConfig):
        super().__init__(config)
        self.model = FarspanModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,  # named here, or `generate` would not place left-padded prompts
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` positions (0: all), or of the positions it lists."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
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
        )


def zero_outputs(model: PreTrainedModel) -> None:
    """Let what each layer adds to the stream start at zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
