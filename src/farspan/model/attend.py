"""Attention with a score bias, as functions for Hugging Face's attention interface.

Stock SDPA takes no bias function, and Hugging Face's flex function silently drops a score_mod. Here
one bias serves both paths: FlexAttention on CUDA, where the bias takes no memory, and a
materialized bias elsewhere. Without a bias this is Hugging Face's SDPA. The eager function
materializes the weights too, and returns them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from farspan.model.compile import raise_recompile_limit
from farspan.model.encodings import PlacedEncoding
from farspan.model.positions import PlacedBias, TableBias

NAME = "farspan_sdpa"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    bias: PlacedBias | PlacedEncoding | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """softmax(scaling · q·k + bias) v, [B, Q, H, D]; scaling q does not scale the bias."""
    if bias is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    plain = attention_mask is None and query.shape[2] > 1 and not kwargs.get("dropout")
    if query.is_cuda and plain and isinstance(bias, PlacedBias):
        return attend_flex(query, key, value, bias, kwargs.get("scaling"), compiled=True), None
    position_bias = bias.tensor().to(query.dtype)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, position_bias=position_bias, **kwargs
    )


def attend_eager(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    bias: PlacedBias | PlacedEncoding | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """The same in steps, and the weights [B, H, Q, K]; without a mask it is causal, as SDPA is."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.mT * scaling
    if bias is not None:
        scores = scores + bias.tensor().to(scores.dtype)
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = torch.ones_like(scores[:1, :1], dtype=torch.bool).tril()
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = F.dropout(weights.to(value.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: PlacedBias,
    scaling: float | None,
    compiled: bool,
) -> Tensor:
    """The same for a plain causal call by FlexAttention: [B, H, Q, D] in, [B, Q, H, D] out."""
    length = query.shape[2]
    # Inside a compiled layer FlexAttention is compiled with the layer.
    flex = _compiled_flex() if compiled and not torch.compiler.is_compiling() else flex_attention
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64}
    output = flex(
        query,
        key[:, :, :length],
        value[:, :, :length],
        score_mod=bias.score_mod(length),
        block_mask=bias.blocks or causal_blocks(length, query.device),
        # Triton also stages a gathered bias in shared memory, where larger tiles do not fit.
        kernel_options=tiles if isinstance(bias.function, TableBias) else None,
        scale=scaling,
        enable_gqa=True,
    )
    return output.transpose(1, 2).contiguous()


@functools.cache
def _compiled_flex():
    raise_recompile_limit()  # a passkey grid has more than eight lengths and batch sizes
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=8)
def causal_blocks(length: int, device: torch.device):
    return create_block_mask(
        lambda batch, head, row, column: row >= column, None, None, length, length, device=device
    )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
