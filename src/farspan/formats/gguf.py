"""Stock models as files that llama.cpp runs, with the tokenizer inside, and read back to be proven.

Rotary models are llama.cpp's `llama`, and SmolLM3's own pattern of rotary layers is its `smollm3`. A model without
rotation is a `granite`: the one dense family there whose metadata can say that nothing is rotated.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from farspan.errors import FarspanError, ProofError
from farspan.model.config import SLIDING

FILE = "model.gguf"
WAY_OUT = "use --format stock, or keep the patch live (--format live)"
# Our names -> llama.cpp's, without ".weight"; {} is the layer.
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
# How a tokenizer cuts text before it merges -> llama.cpp's name for the same cuts.
CUTS = {
    ("Digits", "ByteLevel"): "smollm",
    ("ByteLevel",): "gpt-2",
}
# Raw q·k of a model without positions can pass what half precision holds (the NoPE twin's reach 4 million), and
# llama.cpp keeps keys in that: smaller queries and a larger scale, by a power of two, are exactly the same model.
SMALLER = 2.0**-10
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}


def write_gguf(model: PreTrainedModel, tokenizer: Any, file: Path, name: str = "") -> None:
    """Write a stock Llama, or a SmolLM3 in one of the patterns that llama.cpp knows, with its tokenizer."""
    if importlib.util.find_spec("gguf") is None:
        raise FarspanError(f"writing {file.name} needs gguf; install it with pip install 'farspan[gguf]'")
    from gguf import GGUFWriter

    architecture = architecture_of(model)
    metadata = {**_shape(model.config), **_rope(model.config, architecture), **_multipliers(model, architecture)}
    words = _vocabulary(tokenizer, model.config.vocab_size)
    writer = GGUFWriter(file, architecture)
    if name:
        writer.add_name(name)
    writer.add_file_type(FILE_TYPES[model.dtype])
    for key, value in metadata.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in words.items():
        _add(writer, f"tokenizer.{key}", value)
    for their_name, weight in _tensors(model, architecture).items():
        _add_tensor(writer, their_name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture_of(model: PreTrainedModel) -> str:
    """llama.cpp's name for the family, or the reason why it has none."""
    config = model.config
    if not isinstance(model, LlamaForCausalLM | SmolLM3ForCausalLM):
        raise FarspanError(
            f"farspan writes Llama-shaped models as gguf, and this one is a {config.model_type}; use --format stock "
            "and llama.cpp's own converter"
        )
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise FarspanError(f"this {config.model_type} has biases or an activation other than silu; {WAY_OUT}")
    if isinstance(model, LlamaForCausalLM):
        return "llama"
    rotated = list(config.no_rope_layers)
    if SLIDING in (config.layer_types or ()):
        raise FarspanError(f"llama.cpp has no family of this shape with sliding windows; {WAY_OUT}")
    if not any(rotated):
        return "granite"
    if rotated != [int((layer + 1) % 4 != 0) for layer in range(len(rotated))]:
        raise FarspanError(
            f"llama.cpp knows rotation in all layers, in none, or in three of four, and these are {rotated}; {WAY_OUT}"
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
    """Granite's own; all but the attention's are 1, for a model that has none of them."""
    if architecture != "granite":
        return {}
    return {
        "attention.scale": float(model.model.layers[0].self_attn.scaling) / _smaller(model),
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_scale": 1.0,
    }


def _rope(config: Any, architecture: str) -> dict[str, Any]:
    """Rope parameters in llama.cpp's terms."""
    if architecture == "granite":
        return {"rope.scaling.finetuned": False}  # where granite has this set to false, llama.cpp does not rotate
    rope = dict(config.rope_parameters)
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "yarn"):
        raise FarspanError(f"llama.cpp has no metadata for rope type {kind!r} that farspan writes; {WAY_OUT}")
    written = {"rope.freq_base": float(rope["rope_theta"])}
    if kind != "default":
        written |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        _check_yarn(rope)
        written |= {"rope.scaling.original_context_length": int(rope["original_max_position_embeddings"])}
    return written


def _check_yarn(rope: Mapping[str, Any]) -> None:
    """llama.cpp computes YaRN's ramp and attention factor itself, as the paper has them."""
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.1 * math.log(rope["factor"]) + 1}
    for key, value in usual.items():
        if abs((rope.get(key) or value) - value) > 1e-6:
            raise FarspanError(f"llama.cpp runs YaRN with {key} {value:g} and the patch has {rope[key]:g}; {WAY_OUT}")
    if rope["factor"] <= 1 or rope.get("truncate") is False or rope.get("mscale"):
        raise FarspanError(f"llama.cpp runs YaRN with none of these parameters: {dict(rope)}; {WAY_OUT}")


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """Weights by llama.cpp's names, in its layout; tied output weights are left out, as it wants them."""
    config, tensors = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = weight.detach().cpu()
        if (heads := _turned(name, config)) and architecture != "granite":
            weight = _interleave(weight, heads)
        elif name.endswith("q_proj.weight"):
            weight = weight * _smaller(model)
        tensors[_their_name(name)] = weight
    return tensors


def _smaller(model: PreTrainedModel) -> float:
    return 1.0 if model.dtype == torch.float16 else SMALLER  # whose own small numbers are coarse


def _turned(name: str, config: Any) -> int:
    """How many heads the rows of a weight make, if they are queries or keys."""
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbours, transformers the two halves of a head: rows i and i + d/2 become 2i and 2i + 1."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _separate(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `_interleave`."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _their_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    layer = re.search(r"\.(\d+)\.", stem)
    key = re.sub(r"\.\d+\.", ".{}.", stem, count=1)
    return NAMES[key].format(layer.group(1) if layer else "") + ".weight"


def _vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer in llama.cpp's terms."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise FarspanError(f"a gguf file carries its tokenizer, and this model has none that can be read; {WAY_OUT}")
    rules = json.loads(backend.to_str())
    cuts = _cuts(rules)
    if rules["model"]["type"] != "BPE" or cuts not in CUTS or rules.get("normalizer"):
        raise FarspanError(
            f"farspan writes byte-level BPE tokenizers as gguf, and this one is {rules['model']['type']} with cuts by "
            f"{', '.join(cuts) or 'nothing'}; use --format stock and llama.cpp's own converter"
        )
    ids = tokenizer.get_vocab()
    if max(ids.values()) >= size:
        raise FarspanError("the tokenizer knows more tokens than the model; give the model its own tokenizer")
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in ids.items():
        tokens[index], kinds[index] = token, NORMAL
    for added in rules["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in rules["model"]["merges"])
    special = {
        f"ggml.{key}_token_id": getattr(tokenizer, f"{name}_token_id")
        for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
        if getattr(tokenizer, f"{name}_token_id") is not None
    }
    return {
        "ggml.model": "gpt2",
        "ggml.pre": CUTS[cuts],
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": [" ".join(pair) for pair in pairs],
        "ggml.add_bos_token": tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id,
        "ggml.add_space_prefix": False,
        **special,
        **({"chat_template": tokenizer.chat_template} if getattr(tokenizer, "chat_template", None) else {}),
    }


def _cuts(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of a tokenizer's cuts, in order; one that is not as llama.cpp has it is named with its settings."""
    usual = {
        "Digits": {"individual_digits": True},
        "ByteLevel": {"add_prefix_space": False, "use_regex": True},
    }
    cut = rules.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    found = []
    for part in cut["pretokenizers"] if cut["type"] == "Sequence" else [cut]:
        kind = part["type"]
        wanted = usual.get(kind, {})
        found.append(kind if all(part.get(key, value) == value for key, value in wanted.items()) else str(part))
    return tuple(found)


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _add_tensor(writer: Any, name: str, weight: Tensor) -> None:
    from gguf import GGMLQuantizationType

    if weight.ndim == 1 or weight.dtype == torch.float32:  # llama.cpp wants norms in float32
        writer.add_tensor(name, weight.float().contiguous().numpy())
    elif weight.dtype == torch.float16:
        writer.add_tensor(name, weight.contiguous().numpy())
    else:
        raw = weight.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)


def read_gguf(file: Path, tokenizer: Any) -> PreTrainedModel:
    """The stock model that a file of ours says it is, in float32, from nothing but the file; and the tokenizer that it
    holds must be this one."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    for key, value in _vocabulary(tokenizer, len(fields["tokenizer.ggml.tokens"])).items():
        if fields.get(f"tokenizer.{key}") != value:
            raise ProofError(f"the tokenizer's {key} reads otherwise than it was written, so nothing was written")
    architecture = fields["general.architecture"]
    own = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    tensors = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()) for tensor in reader.tensors
    }
    config = _config(own, architecture, tied="output.weight" not in tensors)
    model = (LlamaForCausalLM if architecture == "llama" else SmolLM3ForCausalLM)(config)
    weights = {}
    for name in model.state_dict():
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        weight = tensors["token_embd.weight" if tied else _their_name(name)]
        heads = _turned(name, config)
        weights[name] = _separate(weight, heads) if heads and architecture != "granite" else weight
    model.load_state_dict(weights)
    if architecture == "granite":
        for layer in model.model.layers:
            layer.self_attn.scaling = own["attention.scale"]
    return model.eval()


def _config(own: Mapping[str, Any], architecture: str, tied: bool) -> LlamaConfig | SmolLM3Config:
    rope = {"rope_type": own.get("rope.scaling.type", "default"), "rope_theta": own.get("rope.freq_base", 10_000.0)}
    if "rope.scaling.factor" in own:
        rope["factor"] = own["rope.scaling.factor"]
    if "rope.scaling.original_context_length" in own:
        rope["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    shape = dict(
        vocab_size=own["vocab_size"],
        max_position_embeddings=own["context_length"],
        hidden_size=own["embedding_length"],
        num_hidden_layers=own["block_count"],
        intermediate_size=own["feed_forward_length"],
        num_attention_heads=own["attention.head_count"],
        num_key_value_heads=own["attention.head_count_kv"],
        head_dim=own["attention.key_length"],
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        tie_word_embeddings=tied,
        rope_parameters=rope,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    if architecture == "llama":
        return LlamaConfig(**shape)
    layers = range(own["block_count"])
    rotates = own.get("rope.scaling.finetuned", True)
    return SmolLM3Config(
        **shape,
        no_rope_layers=[int(rotates and (layer + 1) % 4 != 0) for layer in layers],
        layer_types=["full_attention" for _ in layers],
        use_sliding_window=False,
    )
