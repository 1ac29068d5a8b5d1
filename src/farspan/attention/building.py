"""Models that are built from a config: their class, their size, and small ones for probing."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from farspan.attention.model_facts import required_attention
from farspan.attention.small_config import keep_layers, layer_kinds, narrow_config

MAX_LAYERS = 160  # that are built; Llama 3.1 405B has 126
REPEATS = 120  # patterns of 1 to 6, 8, 10, 12 … layers repeat within so many


def model_class(config: PreTrainedConfig) -> Any:
    """The class that generates text by this config.

    This is what AutoModelForCausalLM knows, else the class that the config names, else a model of
    text and images. Where transformers has none, it is AutoModelForCausalLM, whose error says so.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        return AutoModelForCausalLM
    for name in config.architectures or ():
        named: Any = getattr(transformers, name, None)
        is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
        if is_model and named.can_generate():
            return named
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def new_model(config: PreTrainedConfig, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    """A model of this config with random weights; without a head if transformers has only that."""
    owner = model_class(config)
    if owner is AutoModelForCausalLM and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # The text part of a model of text and images may have no class with a head.
        owner = AutoModel if type(config) in MODEL_MAPPING else owner
    if issubclass(owner, PreTrainedModel):
        return owner._from_config(config, **options)
    return owner.from_config(config, trust_remote_code=trust_remote_code, **options)


def small_model(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """A random model with the layers of the config, narrow where width changes no pattern.

    It has the first MAX_LAYERS layers."""
    small = narrow_config(config)
    keep_layers(small.get_text_config(), MAX_LAYERS)
    options = {"dtype": torch.float32, "attn_implementation": required_attention(config)}
    return new_model(small, trust_remote_code, **options).eval()


def count_parameters(config: PreTrainedConfig, trust_remote_code: bool) -> int:
    """The number of parameters, without memory for them."""
    built = copy.deepcopy(config)
    keep_layers(built.get_text_config(), MAX_LAYERS)
    with torch.device("meta"):
        model = new_model(built, trust_remote_code)
    total = model.num_parameters()
    stands_for = repeated_layers(config)
    if not stands_for:
        return total
    (layers,) = (
        part
        for part in model.modules()
        if isinstance(part, nn.ModuleList) and len(part) == MAX_LAYERS
    )
    sizes = [sum(part.numel() for part in layer.parameters()) for layer in layers]
    return total + sum(sizes[index] for index in stands_for.values())


def repeated_layers(config: PreTrainedConfig) -> dict[int, int]:
    """For each layer that is not built, the layer that stands for it.

    It has the same kind by the lists of the config, if one has, and the same place in a pattern."""
    text = config.get_text_config()
    kinds = layer_kinds(text)
    stands_for = {}
    for index in range(MAX_LAYERS, text.num_hidden_layers):
        same_place = MAX_LAYERS - REPEATS + (index - MAX_LAYERS) % REPEATS
        candidates = [same_place, *reversed(range(MAX_LAYERS))]
        stands_for[index] = next(
            (other for other in candidates if kinds[other] == kinds[index]), same_place
        )
    return stands_for
