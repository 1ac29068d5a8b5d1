"""Write stock models as gguf files for llama.cpp, with the tokenizer, and read them back.

Rotary models become llama.cpp's `llama`; SmolLM3's pattern of rotary layers becomes its `smollm3`.
A model without rotation becomes a `granite`, the only dense family there whose metadata can turn
rotation off.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from farspan.errors import FarspanError, ProofError, install_hint
from farspan.model.config import SLIDING
from farspan.train.metadata import begin_of_text

FILE = "model.gguf"
WAY_OUT = "use --format stock, or keep the patch live (--format live)"
# transformers' names -> llama.cpp's, without ".weight"; {} is the layer.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
# A tokenizer's pre-tokenizers -> llama.cpp's name for the same rules.
PRE_TOKENIZERS = {
    ("Digits", "ByteLevel"): "smollm",
    ("ByteLevel",): "gpt-2",
}
# Raw q·k of a model without positions can overflow half precision (nope-twin's reach 4 million), in
# which llama.cpp keeps keys. Smaller queries and a larger attention scale, by a power of two, give
# exactly the same model.
QUERY_FACTOR = 2.0**-10
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # llama.cpp's token types
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}


def write_gguf(model: PreTrainedModel, tokenizer: Any, file: Path, name: str = "") -> None:
    """Write a stock Llama, or a SmolLM3 with a layer pattern that llama.cpp supports."""
    if importlib.util.find_spec("gguf") is None:
        raise FarspanError(
            f"writing {file.name} needs gguf, which is not installed; {install_hint('gguf')}"
        )
    from gguf import GGUFWriter

    architecture = architecture_of(model)
    metadata = {
        **_shape(model.config),
        **_rope(model.config, architecture),
        **_multipliers(model, architecture),
    }
    vocabulary = _vocabulary(tokenizer, model.config.vocab_size)
    writer = GGUFWriter(file, architecture)
    if name:
        writer.add_name(name)
    writer.add_file_type(FILE_TYPES[model.dtype])
    for key, value in metadata.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in vocabulary.items():
        _add(writer, f"tokenizer.{key}", value)
    for tensor_name, weight in _tensors(model, architecture).items():
        _add_tensor(writer, tensor_name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture_of(model: PreTrainedModel) -> str:
    """llama.cpp's name for the family; raise if it has none."""
    config = model.config
    if not isinstance(model, LlamaForCausalLM | SmolLM3ForCausalLM):
        raise FarspanError(
            f"farspan writes only Llama-shaped models as gguf, and this is a {config.model_type}; "
            "use --format stock and llama.cpp's own converter"
        )
    if isinstance(model, SmolLM3ForCausalLM) and SLIDING in (config.layer_types or ()):
        raise FarspanError(
            "llama.cpp's smollm3 has neither sliding windows nor a choice of the layers without "
            f"rotation, and this model has windows of {config.sliding_window} keys; {WAY_OUT}"
        )
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise FarspanError(
            f"this {config.model_type} has biases or an activation other than silu, which farspan "
            f"does not write as gguf; {WAY_OUT}"
        )
    if isinstance(model, LlamaForCausalLM):
        return "llama"
    rotated = list(config.no_rope_layers)
    if not any(rotated):
        return "granite"
    if rotated != [int((layer + 1) % 4 != 0) for layer in range(len(rotated))]:
        raise FarspanError(
            "llama.cpp supports rotation in all layers, in none, or in three of four (smollm3), "
            f"and these are {rotated}; {WAY_OUT}"
        )
    return "smollm3"


def _shape(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim,
    }


def _multipliers(model: PreTrainedModel, architecture: str) -> dict[str, float]:
    """Granite's multipliers; all but the attention scale are 1, because our models have none."""
    if architecture != "granite":
        return {}
    return {
        "attention.scale": float(model.model.layers[0].self_attn.scaling) / _query_factor(model),
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_scale": 1.0,
    }


def _rope(config: Any, architecture: str) -> dict[str, Any]:
    """Rope parameters in llama.cpp's terms."""
    if architecture == "granite":
        return {"rope.scaling.finetuned": False}  # with this, llama.cpp does not rotate a granite
    rope = dict(config.rope_parameters)
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "yarn"):
        raise FarspanError(f"gguf metadata for the rope type {kind!r} is not supported; {WAY_OUT}")
    metadata: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if kind != "default":
        metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        _check_yarn(rope)
        original = int(rope["original_max_position_embeddings"])
        metadata["rope.scaling.original_context_length"] = original
    return metadata


def _check_yarn(rope: Mapping[str, Any]) -> None:
    """llama.cpp computes YaRN's ramp and attention factor itself, as YaRN's paper does."""
    fixed = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 0.1 * math.log(rope["factor"]) + 1,
    }
    for key, value in fixed.items():
        if abs((rope.get(key) or value) - value) > 1e-6:
            raise FarspanError(
                f"llama.cpp runs YaRN with {key} {value:g} and the patch has {rope[key]:g}; "
                f"{WAY_OUT}"
            )
    if rope["factor"] <= 1 or rope.get("truncate") is False or rope.get("mscale"):
        raise FarspanError(
            f"llama.cpp does not support YaRN with these parameters: {dict(rope)}; {WAY_OUT}"
        )


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """Weights by llama.cpp's names, in its layout; it expects tied output weights to be absent."""
    config, tensors = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = weight.detach().cpu()
        if (heads := _rotated_heads(name, config)) and architecture != "granite":
            weight = _interleave(weight, heads)
        elif name.endswith("q_proj.weight"):
            weight = weight * _query_factor(model)
        tensors[_gguf_name(name)] = weight
    return tensors


def _query_factor(model: PreTrainedModel) -> float:
    return 1.0 if model.dtype == torch.float16 else QUERY_FACTOR  # small float16 numbers are coarse


def _rotated_heads(name: str, config: Any) -> int:
    """The number of heads in a query or key weight; 0 for any other."""
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2], 0
    )


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Move rows i and i + d/2 of each head to 2i and 2i + 1.

    llama.cpp rotates neighboring rows, transformers the two halves of a head.
    """
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _separate(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `_interleave`."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    layer = re.search(r"\.(\d+)\.", stem)
    key = re.sub(r"\.\d+\.", ".{}.", stem, count=1)
    return NAMES[key].format(layer.group(1) if layer else "") + ".weight"


def _vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer as llama.cpp's metadata."""
    rules, pre_tokenizers = _tokenizer_rules(tokenizer)
    tokens, types = _tokens_and_types(tokenizer.get_vocab(), rules["added_tokens"], size)
    pairs = (
        pair.split(" ") if isinstance(pair, str) else pair for pair in rules["model"]["merges"]
    )
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": PRE_TOKENIZERS[pre_tokenizers],
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": [" ".join(pair) for pair in pairs],
        "ggml.add_bos_token": bool(begin_of_text(tokenizer)),
        "ggml.add_space_prefix": False,
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (token_id := getattr(tokenizer, f"{name}_token_id")) is not None:
            metadata[f"ggml.{key}_token_id"] = token_id
    if template := getattr(tokenizer, "chat_template", None):
        metadata["chat_template"] = template
    return metadata


def _tokenizer_rules(tokenizer: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The rules of a byte-level BPE tokenizer and its pre-tokenizers; raise for any other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise FarspanError(
            "a gguf file contains its tokenizer, and this model has none that can be read; "
            f"{WAY_OUT}"
        )
    rules = json.loads(backend.to_str())
    names = _pre_tokenizer_names(rules)
    if rules["model"]["type"] != "BPE" or names not in PRE_TOKENIZERS or rules.get("normalizer"):
        raise FarspanError(
            "farspan writes only byte-level BPE tokenizers as gguf, and this one is "
            f"{rules['model']['type']} with the pre-tokenizers {', '.join(names) or 'none'}; "
            "use --format stock and llama.cpp's own converter"
        )
    return rules, names


def _tokens_and_types(
    ids: Mapping[str, int], added_tokens: Sequence[Mapping[str, Any]], size: int
) -> tuple[list[str], list[int]]:
    """All tokens by id and their llama.cpp types; ids without a token are marked as unused."""
    if max(ids.values()) >= size:
        raise FarspanError(
            "the tokenizer has more tokens than the model; use the model's own tokenizer"
        )
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in ids.items():
        tokens[index], types[index] = token, NORMAL
    for added in added_tokens:
        types[added["id"]] = CONTROL if added["special"] else USER
    return tokens, types


def _pre_tokenizer_names(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """The types of the pre-tokenizers in order; one with other settings than llama.cpp's is given
    in full."""
    supported = {
        "Digits": {"individual_digits": True},
        "ByteLevel": {"add_prefix_space": False, "use_regex": True},
    }
    outer = rules.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    names = []
    for part in outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]:
        settings = supported.get(part["type"], {})
        matches = all(part.get(key, value) == value for key, value in settings.items())
        names.append(part["type"] if matches else str(part))
    return tuple(names)


def _add(writer: Any, key: str, value: Any) -> None:
    types = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{types[type(value)]}")(key, value)


def _add_tensor(writer: Any, name: str, weight: Tensor) -> None:
    from gguf import GGMLQuantizationType

    if weight.ndim == 1 or weight.dtype == torch.float32:  # llama.cpp expects norms in float32
        writer.add_tensor(name, weight.float().contiguous().numpy())
    elif weight.dtype == torch.float16:
        writer.add_tensor(name, weight.contiguous().numpy())
    else:
        raw = weight.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)


def read_gguf(file: Path, tokenizer: Any) -> PreTrainedModel:
    """The stock model that a file of `write_gguf` describes, in float32, from the file alone.

    The file must contain this tokenizer.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    for key, value in _vocabulary(tokenizer, len(fields["tokenizer.ggml.tokens"])).items():
        if fields.get(f"tokenizer.{key}") != value:
            raise ProofError(
                f"the tokenizer's {key} in {file.name} differs from the model's, so nothing was "
                "written; use --format stock"
            )
    architecture = fields["general.architecture"]
    metadata = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    tensors = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }
    config = _config(metadata, architecture, tied="output.weight" not in tensors)
    model = (LlamaForCausalLM if architecture == "llama" else SmolLM3ForCausalLM)(config)
    weights = {}
    for name in model.state_dict():
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        weight = tensors["token_embd.weight" if tied else _gguf_name(name)]
        heads = _rotated_heads(name, config)
        weights[name] = _separate(weight, heads) if heads and architecture != "granite" else weight
    model.load_state_dict(weights)
    if architecture == "granite":
        for layer in model.model.layers:
            layer.self_attn.scaling = metadata["attention.scale"]
    return model.eval()


def _config(
    metadata: Mapping[str, Any], architecture: str, tied: bool
) -> LlamaConfig | SmolLM3Config:
    rope = {
        "rope_type": metadata.get("rope.scaling.type", "default"),
        "rope_theta": metadata.get("rope.freq_base", 10_000.0),
    }
    if "rope.scaling.factor" in metadata:
        rope["factor"] = metadata["rope.scaling.factor"]
    if "rope.scaling.original_context_length" in metadata:
        rope["original_max_position_embeddings"] = metadata["rope.scaling.original_context_length"]
    shape = dict(
        vocab_size=metadata["vocab_size"],
        max_position_embeddings=metadata["context_length"],
        hidden_size=metadata["embedding_length"],
        num_hidden_layers=metadata["block_count"],
        intermediate_size=metadata["feed_forward_length"],
        num_attention_heads=metadata["attention.head_count"],
        num_key_value_heads=metadata["attention.head_count_kv"],
        head_dim=metadata["attention.key_length"],
        rms_norm_eps=metadata["attention.layer_norm_rms_epsilon"],
        tie_word_embeddings=tied,
        rope_parameters=rope,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    if architecture == "llama":
        return LlamaConfig(**shape)
    layers = range(metadata["block_count"])
    rotates = metadata.get("rope.scaling.finetuned", True)
    return SmolLM3Config(
        **shape,
        no_rope_layers=[int(rotates and (layer + 1) % 4 != 0) for layer in layers],
        layer_types=["full_attention" for _ in layers],
        use_sliding_window=False,
    )
