"""Written .gguf files hold the model as gguf, transformers and YaRN's paper define it."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from families import SHAPE
from farspan.data.tokens import train_tokenizer
from farspan.errors import FarspanError
from farspan.formats import gguf as writing

gguf = pytest.importorskip("gguf")
ONE_LAYER = {**SHAPE, "vocab_size": 300, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("dtype", "file_type", "query_factor", "name"),
    [
        (torch.float32, "ALL_F32", 2**-10, ""),
        (torch.float16, "MOSTLY_F16", 1, "half"),  # small float16 numbers are coarse
        (torch.bfloat16, "MOSTLY_BF16", 2**-10, "bf16"),
    ],
)
def test_a_file_holds_the_model_in_its_dtype(dtype, file_type, query_factor, name, tmp_path):
    torch.manual_seed(0)
    model = hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**ONE_LAYER, no_rope_layers=[0])).to(dtype)
    model.model.norm.weight.data.normal_()
    tokenizer = train_tokenizer(["some text to cut, 12 times"], 270)
    writing.write_gguf(model, tokenizer, tmp_path / "model.gguf", name)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.file_type"] == gguf.LlamaFileType[file_type]
    assert fields.get("general.name") == (name or None)
    stored = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }
    layer = model.model.layers[0]
    queries = stored["blk.0.attn_q.weight"]
    assert torch.equal(queries, layer.self_attn.q_proj.weight.float() * query_factor)
    assert torch.equal(stored["output_norm.weight"], model.model.norm.weight.float())
    assert torch.equal(stored["blk.0.attn_k.weight"], layer.self_attn.k_proj.weight.float())
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    norms = {key for key in types if "norm" in key}
    assert {types[key] for key in norms} == {"F32"}, "llama.cpp expects norms in float32"
    assert {types[key] for key in types.keys() - norms} == {file_type.split("_")[1]}
    assert fields["granite.rope.scaling.finetuned"] is False, "llama.cpp would rotate"
    # The factors of transformers' Granite, under llama.cpp's names.
    plain = hf.GraniteConfig()
    assert fields["granite.attention.scale"] * query_factor == pytest.approx(8**-0.5)
    assert fields["granite.embedding_scale"] == plain.embedding_multiplier == 1
    assert fields["granite.residual_scale"] == plain.residual_multiplier == 1
    assert fields["granite.logit_scale"] == plain.logits_scaling == 1


@pytest.mark.parametrize("head_dim", [8, 16])
def test_heads_have_the_width_of_their_weights(head_dim):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**ONE_LAYER, "head_dim": head_dim}))
    shape = writing._shape(model.config)
    rows = model.model.layers[0].self_attn.q_proj.out_features
    assert shape["attention.key_length"] * shape["attention.head_count"] == rows
    assert shape["attention.value_length"] == shape["rope.dimension_count"] == head_dim


def yarn(**changes) -> hf.LlamaConfig:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    return hf.LlamaConfig(**{**ONE_LAYER, "rope_parameters": rope | {"rope_theta": 1e4} | changes})


def test_yarn_as_transformers_has_it_by_default_is_llama_cpps():
    config = yarn()
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert factor == pytest.approx(0.1 * math.log(4) + 1), "of YaRN's paper"
    stated = yarn(beta_fast=32.0, beta_slow=1.0, attention_factor=factor)
    same, _ = ROPE_INIT_FUNCTIONS["yarn"](stated, torch.device("cpu"))
    assert torch.equal(frequencies, same)
    written = {
        "rope.freq_base": 1e4,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    }
    assert writing._rope(config, "llama") == writing._rope(stated, "llama") == written
    assert writing._rope(yarn(factor=1.5), "llama") == written | {"rope.scaling.factor": 1.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta_fast": 33.0}, "beta_fast 32 and the patch has 33"),
        ({"beta_slow": 2.0}, "beta_slow 1 and the patch has 2"),
        ({"attention_factor": 1.0}, "attention_factor 1.13863 and the patch has 1"),
        ({"factor": 1.0}, "does not support YaRN with these parameters"),
        ({"truncate": False}, "does not support YaRN with these parameters"),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, "does not support YaRN with these parameters"),
    ],
)
def test_other_yarn_is_refused(changes, message):
    with pytest.raises(FarspanError, match=message):
        writing._rope(yarn(**changes), "llama")


def test_every_id_has_a_token_with_its_llama_cpp_type():
    ids = {"a": 0, "<eos>": 1, "<user>": 2}
    added = [{"id": 1, "special": True}, {"id": 2, "special": False}]
    tokens, types = writing._tokens_and_types(ids, added, 4)
    assert tokens[:3] == list(ids)
    names = [gguf.TokenType(number).name for number in types]
    assert names == ["NORMAL", "CONTROL", "USER_DEFINED", "UNUSED"]
    assert writing._tokens_and_types(ids, added, 3) == (tokens[:3], types[:3])
    with pytest.raises(FarspanError, match="more tokens than the model"):
        writing._tokens_and_types(ids, added, 2)
