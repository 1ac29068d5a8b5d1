"""Reading .gguf files: the same weights and fields as transformers and gguf read, only faster."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import farspan
from families import FAMILIES
from farspan import cli, gguf_reading
from farspan.data.tokens import train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.formats import gguf as formats_gguf
from farspan.formats.gguf import write_gguf
from farspan.formats.stock import to_stock
from farspan.gguf_loading import load_gguf_config
from farspan.loading import load_tokenizer
from farspan.train.metadata import stated_begin_of_text
from farspan.workflows import inspect as inspect_module

gguf = pytest.importorskip("gguf")
PACKED = [kind for kind in gguf.quants._type_traits if kind.name != "BF16"]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A tiny Llama in float32."""
    file = tmp_path_factory.mktemp("original") / "model.gguf"
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["some text to cut, 12 times"], 270)
    model = next(family for family in FAMILIES if family.name == "llama").build()
    model.resize_token_embeddings(300)
    model.config.vocab_size = 300
    write_gguf(model, tokenizer, file)
    return file


def rewrite(original: Path, file: Path, kind=None, names=None, fields=None, more=None) -> Path:
    """A copy with matrices of another quantization, tensors of other names, or other fields.

    more: tensors that are added.

    names, fields: old name -> new name or value; None leaves it out.
    """
    reader = gguf.GGUFReader(original)
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    old = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    values = {key: (field.contents(), field.types) for key, field in old.items()}
    del values["general.architecture"]
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
    }
    values |= {key: (value, [kinds.get(type(value))]) for key, value in (fields or {}).items()}
    for key, (value, types) in values.items():
        if value is not None:
            writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        name = (names or {}).get(tensor.name, tensor.name)
        packs = kind is not None and tensor.data.ndim == 2 and tensor.data.shape[1] % 32 == 0
        if name and packs:
            writer.add_tensor(name, gguf.quants.quantize(tensor.data, kind), raw_dtype=kind)
        elif name:
            writer.add_tensor(name, np.array(tensor.data))
    for name, data in (more or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # random bytes may be NaN
@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_unpacks_every_quantization_as_the_gguf_package_does(kind, monkeypatch):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (2, 7, 3 * size), dtype=np.uint8)
    monkeypatch.setattr(gguf_reading, "BLOCK", 6 * block)  # two rows at once: an odd one is left
    with ThreadPoolExecutor(2) as pool:
        parallel = gguf_reading._unpack(data, kind, pool, gguf.dequantize)
        expected = gguf.dequantize(data, kind)
    assert parallel.shape == expected.shape == (2, 7, 3 * block)
    np.testing.assert_array_equal(parallel, expected)


def test_reads_the_header_as_the_gguf_package_does(original):
    fast, plain = gguf_reading.read_header(original), gguf.GGUFReader(original)
    assert list(fast.fields) == list(plain.fields)
    for key, field in plain.fields.items():
        assert fast.fields[key].types == field.types, key
        assert fast.fields[key].contents() == field.contents(), key
    for ours, theirs in zip(fast.tensors, plain.tensors, strict=True):
        assert (ours.name, ours.tensor_type) == (theirs.name, theirs.tensor_type)
        np.testing.assert_array_equal(ours.data, theirs.data)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_loads_the_same_weights_as_transformers(kind, original, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    file = rewrite(original, tmp_path / "model.gguf", None if kind.name == "F32" else kind)
    assert kind in {tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype="float32")
    steps = []
    loaded = farspan.load(file, progress=lambda label, total: lambda: steps.append(label)).model
    expected = plain.state_dict()
    assert expected.keys() == loaded.state_dict().keys()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert steps == ["unpack model.gguf"] * len(gguf.GGUFReader(file).tensors)
    assert gguf.GGUFReader.__name__ == "GGUFReader", "the package is as it was"


def test_a_loaded_file_is_saved_as_any_other_model(original, tmp_path):
    quantized = gguf.GGMLQuantizationType.Q4_0
    loaded, tokenizer = farspan.load(rewrite(original, tmp_path / "model.gguf", quantized))
    assert not loaded.is_quantized
    loaded.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = farspan.load(tmp_path / "saved").model
    assert "quantization_config" not in again.config.to_dict()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.parametrize("new_name", ["blk.1.attn_query.weight", None])
def test_refuses_a_renamed_or_missing_tensor(new_name, original, tmp_path, capsys, monkeypatch):
    names = {"blk.1.attn_q.weight": new_name}
    file = rewrite(original, tmp_path / "model.gguf", names=names)
    with pytest.raises(
        CorruptError, match="lacks 1 weight that .*layers.1.self_attn.q_proj.weight"
    ):
        farspan.load(file)
    monkeypatch.setattr("sys.argv", ["farspan", "generate", str(file), "--prompt", "some text"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 4
    assert "lacks 1 weight that" in capsys.readouterr().err


def test_refuses_a_file_whose_vocabulary_is_cut_off(original, tmp_path):
    """Inside the arrays, which have their own reader."""
    data = original.read_bytes()
    cut = data.index(b"tokenizer.ggml.tokens") + 400
    (tmp_path / "model.gguf").write_bytes(data[:cut])
    with pytest.raises(CorruptError, match="is damaged or no GGUF file"):
        farspan.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["UINT32", "STRING", "ARRAY", "UINT64"])
def test_refuses_a_short_file_with_an_endless_array(kind, order, tmp_path):
    file, key = tmp_path / "model.gguf", b"llama.block_count"
    head = b"GGUF" + struct.pack(f"{order}IQQQ", 3, 0, 1, len(key)) + key
    array = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind], 1 << 60
    file.write_bytes(head + struct.pack(f"{order}IIQ", *array) + b"\0" * 40)
    with pytest.raises(CorruptError, match="is damaged or no GGUF file"):
        farspan.inspect(file)


@pytest.mark.parametrize("name", ["rope_freqs", "rope_factors_long", "rope_factors_short"])
@pytest.mark.parametrize("value", [1.0, 8.0])
def test_refuses_factors_of_frequencies_but_those_of_one(name, value, original, tmp_path):
    """Llama 3.1 has its scaling as rope_freqs.weight, without a key in the metadata."""
    factors = {f"{name}.weight": np.array([1, 1, 1, value], dtype=np.float32)}
    file = rewrite(original, tmp_path / "model.gguf", more=factors)
    if value == 1:
        assert farspan.load(file).model.config.rope_parameters["rope_type"] == "default"
        return
    for command in (farspan.load, farspan.inspect):
        with pytest.raises(FarspanError, match=f"scales its rotation .by its tensor {name}.weight"):
            command(file)


@pytest.mark.parametrize("value", [1.0, 4.0])
def test_refuses_the_linear_scaling_of_old_files(value, original, tmp_path):
    fields = {"llama.rope.scale_linear": value}
    file = rewrite(original, tmp_path / "model.gguf", fields=fields)
    if value == 1:
        farspan.inspect(file)
        return
    with pytest.raises(FarspanError, match="scales its rotation .linear, by 4"):
        farspan.inspect(file)


@pytest.mark.parametrize("base", [1e4, 999999.4420358813])
def test_refuses_a_base_of_rotation_that_transformers_does_not_read(base, tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "starcoder2")
    for name in ("block_count", "embedding_length", "attention.head_count"):
        writer.add_uint32(f"starcoder2.{name}", 1)
    writer.add_float32("starcoder2.rope.freq_base", base)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((1, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if base == 1e4:
        assert load_gguf_config(file).rope_parameters["rope_theta"] == base
        return
    with pytest.raises(FarspanError, match="base 999,999, and transformers would use 10,000"):
        load_gguf_config(file)


def test_refuses_biases_that_the_model_has_no_place_for(original, tmp_path):
    biases = {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}
    file = rewrite(original, tmp_path / "model.gguf", more=biases)
    with pytest.raises(FarspanError, match="has 1 biases, first 'blk.0.attn_q.bias'"):
        farspan.load(file)


@pytest.mark.parametrize("count", [0, 3, 1 << 31])
def test_refuses_a_layer_count_that_the_tensors_do_not_fit(count, original, tmp_path):
    file = rewrite(original, tmp_path / "model.gguf", fields={"llama.block_count": count})
    with pytest.raises(CorruptError, match=f"claims {count} layers and has .* of 4 layers"):
        farspan.inspect(file)


@pytest.mark.parametrize(
    ("key", "value"), [("llama.block_count", "four"), ("llama.rope.scale_linear", "much")]
)
def test_refuses_values_of_another_type(key, value, tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string(key, value)
    writer.add_tensor("blk.0.attn_q.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CorruptError, match="model.gguf is damaged or no GGUF file"):
        farspan.inspect(file)


def test_refuses_a_layer_count_without_tensors_for_the_last(original, tmp_path):
    file = rewrite(original, tmp_path / "model.gguf", fields={"llama.block_count": 5})
    with pytest.raises(CorruptError, match="lacks 9 weights that its config requires"):
        farspan.load(file)


def test_inspects_a_file_by_its_header(original, monkeypatch):
    whole = farspan.inspect(farspan.load(original).model)

    def refuse(*args, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(inspect_module, "load", refuse)
    monkeypatch.setattr(gguf, "dequantize", refuse)
    inspection = farspan.inspect(original)
    assert inspection.layers == whole.layers
    assert (inspection.parameters, inspection.heads) == (whole.parameters, whole.heads)
    assert inspection.train_length == whole.train_length
    assert inspection.warnings[0].startswith("only its header was read")


def test_the_config_needs_no_vocabulary(original, tmp_path, monkeypatch):
    file = rewrite(original, tmp_path / "model.gguf", fields={"llama.vocab_size": None})
    header = gguf_reading.read_header(file)
    monkeypatch.setattr(gguf_reading, "LONG_ARRAY", 10)
    short = gguf_reading.without_vocabulary(header)
    assert "tokenizer.ggml.merges" in header.fields
    assert "tokenizer.ggml.merges" not in short.fields
    assert load_gguf_config(file).vocab_size == 300


def test_the_tokenizer_splits_digits_as_the_file_says(tmp_path):
    """Spaces and line breaks before a number are words without it, in SmolLM2 as in ours."""
    text = "a\n\n12 b   34\n    5 = 6"
    original = farspan.load("rope-twin")
    write_gguf(to_stock(original.model), original.tokenizer, tmp_path / "model.gguf")
    loaded = load_tokenizer(tmp_path / "model.gguf")
    loaded.save_pretrained(tmp_path / "saved")
    ids = original.tokenizer(text)["input_ids"]
    for tokenizer in (loaded, load_tokenizer(tmp_path / "saved")):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    assert formats_gguf._tokenizer_rules(loaded)[1] == ("Digits", "ByteLevel"), "written as it was"


@pytest.mark.parametrize("adds", [True, False, None])
def test_the_tokenizer_begins_texts_as_the_file_says(adds, original, tmp_path):
    fields = {gguf_reading.BOS: adds}
    tokenizer = farspan.load(rewrite(original, tmp_path / "model.gguf", fields=fields)).tokenizer
    ids = tokenizer("some text")["input_ids"]
    assert (ids[0] == tokenizer.bos_token_id) == bool(adds)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "some text"
    assert stated_begin_of_text(tokenizer)[0] is adds


def test_written_files_say_how_texts_begin(original, tmp_path):
    model, tokenizer = farspan.load(original)
    for begins in (True, False):
        tokenizer.begins_texts = begins
        write_gguf(model, tokenizer, tmp_path / f"{begins}.gguf")
        fields = gguf_reading.read_header(tmp_path / f"{begins}.gguf").fields
        assert fields[gguf_reading.BOS].contents() is begins
