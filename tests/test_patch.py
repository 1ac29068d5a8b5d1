"""Patches: saving, loading, combining and applying them to a model."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import farspan
from families import FAMILIES, SHAPE, tokens
from farspan.attention import seam
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.rope import reset_dynamic_rope, set_rope
from farspan.attention.scales import Scales
from farspan.errors import CorruptError, FarspanError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def family(name: str):
    return next(family for family in FAMILIES if family.name == name).build()


def patch_for(model, **parts) -> Patch:
    return Patch("test", fingerprint(model), target=256, train_length=64, **parts)


def head_scales(slope: bool = False) -> Scales:
    layers, base = tuple(range(4)), 1 + torch.rand(4, 4)
    return Scales(layers, base, torch.rand(4, 4), "log", 8) if slope else Scales(layers, base)


@pytest.mark.parametrize("name", ["llama", "farspan-rope", "smollm3"])
@torch.no_grad()
def test_saved_patch_reloads_with_equal_logits(name: str, tmp_path):
    model, fresh = family(name), family(name)
    weights = {"model.norm.weight": torch.rand_like(model.model.norm.weight)}
    patch = patch_for(model, scales=head_scales(slope=True), rope=YARN, weights=weights)
    patch.save(tmp_path / "patch")
    expected = patch.apply(model)(tokens()).logits
    loaded = Patch.load(tmp_path / "patch")
    assert loaded.describe() == patch.describe()
    assert torch.equal(loaded.apply(fresh)(tokens()).logits, expected)
    assert {file.name for file in (tmp_path / "patch").iterdir()} == {
        "patch.json",
        "scales.safetensors",
        "weights.safetensors",
    }
    record = json.loads((tmp_path / "patch" / "patch.json").read_text())
    assert record["model"]["sha256"] == patch.model
    assert record["scales"].keys() >= {"basis", "min", "mean", "max"}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_reset_dynamic_rope_forgets_longer_inputs(name: str):
    """Gemma 3 keeps the frequencies of each layer type under a prefixed name."""
    model = family(name)
    set_rope(model, {"rope_type": "dynamic", "factor": 4.0})
    middle, long = tokens(100), tokens(240)
    expected = model(middle).logits
    model(long)
    reset_dynamic_rope(model)
    assert torch.equal(model(middle).logits, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_reset_dynamic_rope_adds_nothing_to_the_saved_weights(name: str):
    model = family(name)
    names = model.state_dict().keys()
    set_rope(model, {"rope_type": "dynamic", "factor": 4.0})
    reset_dynamic_rope(model)
    assert model.state_dict().keys() == names


@torch.no_grad()
def test_patched_rope_equals_a_model_built_with_it():
    model = family("llama")
    rope = {**YARN, "rope_theta": 10_000.0}
    built = LlamaForCausalLM(
        LlamaConfig(**{**model.config.to_dict(), "rope_parameters": rope})
    ).eval()
    built.load_state_dict(model.state_dict())
    stock = model(tokens()).logits
    patch_for(model, rope=YARN).apply(model)
    assert torch.equal(model(tokens()).logits, built(tokens()).logits)
    assert not torch.equal(model(tokens()).logits, stock)
    assert model.config.rope_parameters["rope_theta"] == 10_000.0, (
        "an override must not lose the base frequency"
    )


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "llama4", "gemma3", "farspan-rope"])
@torch.no_grad()
def test_model_without_rotation_ignores_position_ids(name: str):
    model = family(name)
    mask, shuffled = torch.ones(2, 24, dtype=torch.long), torch.randperm(24)[None]
    call = {"input_ids": tokens(), "attention_mask": mask}
    assert not torch.equal(model(**call).logits, model(**call, position_ids=shuffled).logits)
    patch_for(model, rope={"rope_type": "none"}).apply(model)
    assert torch.equal(model(**call).logits, model(**call, position_ids=shuffled).logits)


@torch.no_grad()
def test_only_full_attention_layers_get_new_rope_parameters():
    model = family("gemma3")
    sliding = model.model.rotary_emb.sliding_attention_inv_freq.clone()
    full = model.model.rotary_emb.full_attention_inv_freq.clone()
    set_rope(model, {"rope_type": "linear", "factor": 4.0})
    assert torch.equal(model.model.rotary_emb.sliding_attention_inv_freq, sliding)
    assert torch.allclose(model.model.rotary_emb.full_attention_inv_freq, full / 4)


@torch.no_grad()
def test_rotation_can_be_removed_and_restored():
    model = family("llama")
    set_rope(model, YARN)
    yarn = model(tokens()).logits
    set_rope(model, {"rope_type": "none"})
    assert model.model.rotary_emb.attention_scaling == 1.0, (
        "YaRN's factor must be removed with the rotation"
    )
    set_rope(model, YARN)
    assert torch.equal(model(tokens()).logits, yarn)


@torch.no_grad()
def test_farspan_model_without_rotation_is_saved_and_exported_as_nope(tmp_path):
    from farspan.formats.stock import to_stock

    model = family("farspan-rope")
    set_rope(model, {"rope_type": "none"})
    model.save_pretrained(tmp_path)
    loaded = farspan.load(tmp_path).model
    assert loaded.config.position == ["none"] * 4
    assert (loaded(tokens()).logits - model(tokens()).logits).abs().max() < 1e-6
    assert (to_stock(model)(tokens()).logits - model(tokens()).logits).abs().max() < 1e-5
    layers = farspan.inspect(model).layers
    assert {(layer.position, layer.claimed) for layer in layers} == {("none", "none")}


def test_new_rope_parameters_keep_the_rotary_fraction():
    for name in ("farspan-quarter-rope", "gpt-neox"):
        model = family(name)
        rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
        width = len(rotary.inv_freq)
        set_rope(model, {"rope_type": "linear", "factor": 4.0})
        rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
        assert len(rotary.inv_freq) == width


def test_set_rope_does_not_change_a_shared_config():
    config = LlamaConfig(**SHAPE)
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    set_rope(first, YARN)
    assert second.config.rope_parameters["rope_type"] == "default"


def test_position_override_changes_the_fingerprint_and_is_saved(tmp_path):
    llama = family("llama")
    llama.save_pretrained(tmp_path / "base")
    nope = farspan.load(tmp_path / "base", position="none").model
    patch = patch_for(nope, scales=head_scales())
    with pytest.raises(FarspanError, match="fitted on weights"):
        patch.apply(llama)
    replace(patch, name=str(tmp_path / "base"), position="none").save(tmp_path / "patch")
    assert {layer.position for layer in farspan.inspect(tmp_path / "patch").layers} == {"none"}


def test_portable_patch_has_the_label_instead_of_the_local_path(tmp_path):
    patch = replace(patch_for(family("llama"), rope=YARN), name="/home/me/runs/a", label="runs/a")
    loaded = Patch.load(patch.save(tmp_path / "patch"))
    assert (loaded.name, loaded.label) == ("/home/me/runs/a", "runs/a")
    assert "/home/me" not in json.dumps(loaded.portable().describe())
    assert loaded.portable().name == "runs/a"
    assert replace(patch, label="").portable().name == patch.name


def test_then_prefers_the_later_patch():
    model = family("llama")
    one, two = torch.ones(32), 2 * torch.ones(32)
    first = patch_for(model, rope=YARN, weights={"model.norm.weight": one})
    second = replace(
        first,
        target=512,
        rope={"rope_type": "linear", "factor": 2.0},
        weights={"model.norm.weight": two},
    )
    both = first.then(second)
    assert both.target == 512
    assert both.rope["rope_type"] == "linear"
    assert torch.equal(both.weights["model.norm.weight"], two)
    assert first.then(replace(second, rope=None)).rope == YARN


@torch.no_grad()
def test_then_applies_both_patches():
    first, second = family("smollm3"), family("smollm3")
    yarn = patch_for(first, rope=YARN)
    scales = patch_for(first, scales=head_scales())
    both = yarn.then(scales)
    assert both.method == "test+test"
    yarn.apply(first)
    seam.install(first, scales.scales)
    assert torch.equal(both.apply(second)(tokens()).logits, first(tokens()).logits)


@pytest.mark.parametrize("slope", [False, True])
def test_then_multiplies_scales(slope: bool):
    model = family("farspan-none")
    a = Scales((0, 2), 1 + torch.rand(2, 4))
    b = Scales(
        (2, 3),
        1 + torch.rand(2, 4),
        torch.rand(2, 4) if slope else None,
        "log" if slope else "constant",
        8,
    )
    for first, second in ((a, b), (b, a)):
        product = patch_for(model, scales=first).then(patch_for(model, scales=second)).scales
        assert product.layers == (0, 2, 3)
        for n in (4, 8, 100):
            count = torch.tensor(n)
            expected = torch.stack(
                (a.at(count)[0], a.at(count)[1] * b.at(count)[0], b.at(count)[1])
            )
            assert torch.allclose(product.at(count), expected)


def test_refused_patches_leave_the_model_unchanged():
    model, other = family("llama"), family("farspan-none")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FarspanError, match="fitted on weights .*apply it to its own base model"):
        patch_for(other, scales=head_scales()).apply(model)
    with pytest.raises(FarspanError, match="replaces 'lm_head.bias'"):
        patch_for(model, weights={"lm_head.bias": torch.ones(3)}, rope=YARN).apply(model)
    with pytest.raises(FarspanError, match="layer 9"):
        bad = Scales.uniform(1.2, (9,), 4)
        patch_for(
            model, scales=bad, rope=YARN, weights={"model.norm.weight": torch.ones(32)}
        ).apply(model)
    with pytest.raises(FarspanError, match="fitted on another base model"):
        patch_for(model).then(patch_for(other))
    schedules = patch_for(model, scales=head_scales(slope=True))
    with pytest.raises(FarspanError, match="two schedules"):
        schedules.then(schedules)
    with pytest.raises(
        FarspanError,
        match="does not run with rope parameters .*; set all parameters that this rope_type needs",
    ):
        patch_for(model, rope={"rope_type": "yarn"}).apply(model)
    with pytest.raises(FarspanError, match="no rotary layer"):
        patch_for(other, rope=YARN).apply(other)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.rope_parameters["rope_type"] == "default"
    assert not seam.installed(model)


def test_refused_rope_parameters_leave_the_model_unchanged():
    """Ministral's attention reads more rope parameters than rotation needs."""
    model = family("ministral3")
    with torch.no_grad():
        before = model(tokens(), use_cache=False).logits
        with pytest.raises(
            FarspanError, match="Ministral3ForCausalLM does not run with rope parameters"
        ):
            set_rope(model, {"rope_type": "linear", "factor": 2.0})
        assert torch.equal(model(tokens(), use_cache=False).logits, before)


@pytest.mark.long
def test_patched_model_loads_in_any_dtype(tmp_path):
    model, tokenizer = farspan.load("rope-twin")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    scales = Scales.uniform(
        1.2, range(model.config.num_hidden_layers), model.config.num_attention_heads
    )
    patch_for(model, scales=scales, name=str(tmp_path / "base")).save(tmp_path / "patch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded, _ = farspan.load(tmp_path / "patch", dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        assert seam.installed(loaded)


def test_fingerprint_of_a_patch_depends_on_where_its_scales_stand():
    """Their smallest, mean and largest values, which patch.json shows, may be equal."""
    scales = Scales((0, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2), "log", 8)
    patch = patch_for(family("llama"), scales=scales)
    permuted = replace(patch, scales=replace(scales, base=scales.base.flip(1)))
    assert permuted.describe() == patch.describe()
    steeper = replace(patch, scales=replace(scales, slope=scales.slope.flip(1)))
    equal = replace(patch, scales=replace(scales, base=scales.base.clone()))
    assert len({each.fingerprint for each in (patch, permuted, steeper)}) == 3
    assert equal.fingerprint == patch.fingerprint


def test_fingerprint_depends_on_weights_and_not_on_dtype():
    model = family("llama")
    before = fingerprint(model)
    assert fingerprint(copy.deepcopy(model).bfloat16()) == before
    assert fingerprint(copy.deepcopy(model).bfloat16().float()) == before
    assert fingerprint(seam.install(copy.deepcopy(model))) == before
    model.lm_head.weight.data[0, 0] += 1
    assert fingerprint(model) != before


@pytest.mark.parametrize("damage", ["missing", "truncated", "nan", "json", "format", "shape"])
def test_load_refuses_a_damaged_patch(damage: str, tmp_path):
    from safetensors.torch import save_file

    patch_for(family("llama"), scales=head_scales()).save(tmp_path / "patch")
    tables, record = tmp_path / "patch" / "scales.safetensors", tmp_path / "patch" / "patch.json"
    if damage == "missing":
        tables.unlink()
    elif damage == "truncated":
        tables.write_bytes(tables.read_bytes()[:-7])
    elif damage == "nan":
        save_file({"base": torch.full((4, 4), torch.nan)}, tables)
    elif damage == "shape":
        save_file({"base": torch.ones(3, 4)}, tables)
    elif damage == "json":
        record.write_text(record.read_text()[:-5])
    else:
        record.write_text(record.read_text().replace('"format": 1', '"format": 99'))
    expected = FarspanError if damage == "format" else CorruptError
    with pytest.raises(expected, match=rf"^{tmp_path}/patch.*;"):
        Patch.load(tmp_path / "patch")


@pytest.mark.parametrize("key", ["target", "train_length"])
@pytest.mark.parametrize(("value", "loads"), [(1, True), (0, False), (-1, False), (1.5, False)])
def test_lengths_of_a_patch_are_whole_numbers_of_at_least_one(key, value, loads, tmp_path):
    Patch("test", "0" * 64, target=8, train_length=8, rope=YARN).save(tmp_path / "patch")
    record = tmp_path / "patch" / "patch.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {key: value}))
    if loads:
        assert getattr(Patch.load(tmp_path / "patch"), key) == value
        return
    with pytest.raises(CorruptError, match=f"{key} is {value}, not a whole number of 1 or more"):
        Patch.load(tmp_path / "patch")


@torch.no_grad()
def test_patches_of_version_0_1_load_with_the_same_logits():
    """`headlog` for nope-twin, written by 0.1.0, and the logits that 0.1.0 computed with it."""
    model = farspan.load(Path(__file__).parent / "data" / "patch-0.1.0", dtype="float32").model
    logits = model(torch.arange(768)[None] * 7 % 4096).logits[0, -1, :4]
    assert logits.tolist() == pytest.approx([-0.8473, 2.2706, -0.2800, -2.1925], abs=1e-3)
