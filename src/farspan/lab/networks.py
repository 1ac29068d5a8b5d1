"""The network of a lab study: its shape, its position encoding and its initial weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from farspan.errors import FarspanError
from farspan.lab.tokenizer import WordTokenizer
from farspan.model.config import FarspanConfig
from farspan.model.transformer import FarspanForCausalLM, zero_outputs

ENCODINGS = {  # -> the network's position setting
    "none": "none",
    "t5": "t5",
    "alibi": "alibi",
    "rotary": "rope",
    "rotary-quarter": "rope",
    "sinusoidal": "sinusoidal",  # called APE in Kazemnejad 2023
    "learned": "learned",  # rows beyond the train length stay untrained
    "kerple": "kerple",
    "fire": "fire",
    "cope": "cope",
    "randomized": "randomized",
}
OTHER_NAMES = {"rope": "rotary", "ape": "sinusoidal", "nope": "none"}
# The rotated fraction of each head, if not all; Kazemnejad 2023's code trained this as rotary.
ROTARY_FRACTIONS = {"rotary-quarter": 0.25}


@dataclass(frozen=True)
class NetworkShape:
    """The shape of a network, without its encoding."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    ff: int = 1024
    mlp: str = "relu"
    dropout: float = 0.0
    base_scale: float = 0.0  # multiplies q·k; 0: 1/√(head width)
    zero_outputs: bool = True  # initialize the output projections of each layer with zeros
    rate: float = 1.0  # multiplies the study's learning rates

    def check(self, size: str) -> None:
        """Raise an error for a network that cannot be built or trained."""
        for name in ("layers", "width", "heads", "ff"):
            if getattr(self, name) < 1:
                raise FarspanError(
                    f"sizes.{size}.{name} is {getattr(self, name)}; set it to 1 or more"
                )
        if self.width % self.heads:
            raise FarspanError(
                f"sizes.{size} has width {self.width}, which {self.heads} heads do not divide; "
                "choose a multiple"
            )
        if not 0 <= self.dropout < 1:
            raise FarspanError(
                f"sizes.{size}.dropout is {self.dropout:g}; set it to a fraction from 0 to below 1"
            )
        if not (0 <= self.base_scale < math.inf and 0 < self.rate < math.inf):
            raise FarspanError(
                f"sizes.{size} has base_scale {self.base_scale:g} and rate {self.rate:g}; set rate "
                "above 0, and base_scale above 0, or to 0 for 1/√(head width)"
            )


def network_config(
    shape: NetworkShape,
    encoding: str,
    tokenizer: WordTokenizer,
    train_length: int,
    reach: int,
    custom_encodings: Mapping[str, str] | None = None,
) -> FarspanConfig:
    """The network of an encoding. Learned positions have `reach` rows, trained or not."""
    own = {name: code for name, code in (custom_encodings or {}).items() if name == encoding}
    return FarspanConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=train_length,
        position_table=reach,
        position=encoding if own else ENCODINGS[encoding],
        rotary_fraction=ROTARY_FRACTIONS.get(encoding, 1.0),
        base_scale=shape.base_scale or None,
        mlp=shape.mlp,
        dropout=shape.dropout,
        # Token embeddings start as large as the sinusoidal positions added to them, and logits
        # about as large.
        initializer_range=shape.width**-0.5,
        embedding_scale=shape.width**0.5,
        pad_token_id=tokenizer.pad,
        bos_token_id=tokenizer.begin,
        eos_token_id=tokenizer.end,
        custom_encodings=own,
    )


def init_model(config: FarspanConfig, seed: int, zero_output_weights: bool) -> FarspanForCausalLM:
    """An untrained model, initialized like T5: every matrix by the number of its inputs.

    Initial scores have the same size for every `base_scale`: T5 needs no 1/√d because its queries
    start that much smaller. Otherwise attention starts on single tokens and stays there.
    """
    torch.manual_seed(seed)
    model = FarspanForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("q_proj.weight"):
            parameter.data *= config.head_dim**-0.5 / config.base_scale
        if name.endswith("down_proj.weight"):
            parameter.data *= (config.hidden_size / config.intermediate_size) ** 0.5
    if zero_output_weights:
        zero_outputs(model)
    return model
