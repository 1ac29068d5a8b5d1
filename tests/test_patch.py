"""A patch is data: saved, loaded, combined and applied, it is the same change to the same model."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import farspan
from families import FAMILIES, SHAPE, tokens
from farspan.attention import seam
from farspan.attention.patch import Patch, fingerprint, forget_lengths, set_rope
from farspan.attention.scales import Scales
from farspan.errors import CorruptError, FarspanError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def family(name: str):
    return next(family for family in FAMILIES if family.name == name).build()


def patch_for(model, **parts) -> Patch:
    return Patch("test", fingerprint(model), target=256, train_length=64, **parts)


def head_scales(slope: bool = False) -> Scales:
    base = 1 + torch.rand(4, 4)
    return Scales(tuple(range(4)), base, torch.rand(4, 4), "log", 8) if slope else Scales(tuple(range(4)), base)


@pytest.mark.parametrize("name", ["llama", "farspan-rope", "smollm3"])
@torch.no_grad()
def test_a_saved_patch_is_the_same_patch(name: str, tmp_path):
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
    text = json.loads((tmp_path / "patch" / "patch.json").read_text())
    assert text["model"]["sha256"] == patch.model
    assert text["scales"].keys() >= {"basis", "min", "mean", "max"}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_a_dynamic_rotation_forgets_longer_text(name: str):
    """Families whose layers rotate in several ways keep each one's frequencies by the layers' name."""
    model = family(name)
    set_rope(model, {"rope_type": "dynamic", "factor": 4.0})
    middle, long = tokens(100), tokens(240)
    expected = model(middle).logits
    model(long)
    forget_lengths(model)
    assert torch.equal(model(middle).logits, expected)


@torch.no_grad()
def test_rope_parameters_act_as_if_the_model_was_built_with_them():
    model = family("llama")
    rope = {**YARN, "rope_theta": 10_000.0}
    built = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "rope_parameters": rope})).eval()
    built.load_state_dict(model.state_dict())
    stock = model(tokens()).logits
    patch_for(model, rope=YARN).apply(model)
    assert torch.equal(model(tokens()).logits, built(tokens()).logits)
    assert not torch.equal(model(tokens()).logits, stock)
    assert model.config.rope_parameters["rope_theta"] == 10_000.0, "an override must not lose the base frequency"


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "llama4", "gemma3", "farspan-rope"])
@torch.no_grad()
def test_removing_rotation_leaves_a_model_that_ignores_positions(name: str):
    model = family(name)
    mask, shuffled = torch.ones(2, 24, dtype=torch.long), torch.randperm(24)[None]
    call = {"input_ids": tokens(), "attention_mask": mask}
    assert not torch.equal(model(**call).logits, model(**call, position_ids=shuffled).logits)
    patch_for(model, rope={"rope_type": "none"}).apply(model)
    assert torch.equal(model(**call).logits, model(**call, position_ids=shuffled).logits)


@torch.no_grad()
def test_only_layers_that_see_everything_get_new_rope_parameters():
    model = family("gemma3")
    local = model.model.rotary_emb.sliding_attention_inv_freq.clone()
    wide = model.model.rotary_emb.full_attention_inv_freq.clone()
    set_rope(model, {"rope_type": "linear", "factor": 4.0})
    assert torch.equal(model.model.rotary_emb.sliding_attention_inv_freq, local)
    assert torch.allclose(model.model.rotary_emb.full_attention_inv_freq, wide / 4)


@torch.no_grad()
def test_rotation_can_be_removed_and_given_back():
    model = family("llama")
    set_rope(model, YARN)
    yarn = model(tokens()).logits
    set_rope(model, {"rope_type": "none"})
    assert model.model.rotary_emb.attention_scaling == 1.0, "YaRN's factor must go with the rotation"
    set_rope(model, YARN)
    assert torch.equal(model(tokens()).logits, yarn)


@torch.no_grad()
def test_our_model_without_its_rotation_is_saved_and_exported_as_nope(tmp_path):
    from farspan.formats.stock import to_stock

    model = family("farspan-rope")
    set_rope(model, {"rope_type": "none"})
    model.save_pretrained(tmp_path)
    loaded = farspan.load(tmp_path).model
    assert loaded.config.position == ["none"] * 4
    assert (loaded(tokens()).logits - model(tokens()).logits).abs().max() < 1e-6
    assert to_stock(model)[1].holds
    found = farspan.inspect(model)
    assert {(layer.position, layer.claimed) for layer in found.layers} == {("none", "none")}


def test_a_rotary_fraction_survives_new_rope_parameters():
    for name in ("farspan-quarter-rope", "gpt-neox"):
        model = family(name)
        rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
        width = len(rotary.inv_freq)
        set_rope(model, {"rope_type": "linear", "factor": 4.0})
        rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
        assert len(rotary.inv_freq) == width


def test_new_rope_parameters_stay_in_one_model():
    config = LlamaConfig(**SHAPE)
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    set_rope(first, YARN)
    assert second.config.rope_parameters["rope_type"] == "default"


def test_one_checkpoint_read_in_two_ways_is_two_models(tmp_path):
    llama = family("llama")
    llama.save_pretrained(tmp_path / "base")
    nope = farspan.load(tmp_path / "base", position="none").model
    patch = patch_for(nope, scales=head_scales())
    with pytest.raises(FarspanError, match="fitted on weights"):
        patch.apply(llama)
    replace(patch, name=str(tmp_path / "base"), position="none").save(tmp_path / "patch")
    assert {layer.position for layer in farspan.inspect(tmp_path / "patch").layers} == {"none"}


def test_a_label_is_what_others_see_of_a_place_on_this_disk(tmp_path):
    patch = replace(patch_for(family("llama"), rope=YARN), name="/home/me/runs/a", label="runs/a")
    loaded = Patch.load(patch.save(tmp_path / "patch"))
    assert (loaded.name, loaded.label) == ("/home/me/runs/a", "runs/a")
    assert "/home/me" not in json.dumps(loaded.for_others().describe())
    assert loaded.for_others().name == "runs/a"
    assert replace(patch, label="").for_others().name == patch.name


def test_of_two_patches_the_later_wins():
    model = family("llama")
    one, two = torch.ones(32), 2 * torch.ones(32)
    first = patch_for(model, rope=YARN, weights={"model.norm.weight": one})
    second = replace(first, target=512, rope={"rope_type": "linear", "factor": 2.0}, weights={"model.norm.weight": two})
    both = first.then(second)
    assert both.target == 512
    assert both.rope["rope_type"] == "linear"
    assert torch.equal(both.weights["model.norm.weight"], two)
    assert first.then(replace(second, rope=None)).rope == YARN


@torch.no_grad()
def test_then_applies_both():
    first, second = family("smollm3"), family("smollm3")
    yarn = patch_for(first, rope=YARN)
    scales = patch_for(first, scales=head_scales())
    both = yarn.then(scales)
    assert both.method == "test+test"
    yarn.apply(first)
    seam.install(first, scales.scales)
    assert torch.equal(both.apply(second)(tokens()).logits, first(tokens()).logits)


@pytest.mark.parametrize("slope", [False, True])
def test_scales_of_two_patches_multiply(slope: bool):
    model = family("farspan-none")
    a = Scales((0, 2), 1 + torch.rand(2, 4))
    b = Scales((2, 3), 1 + torch.rand(2, 4), torch.rand(2, 4) if slope else None, "log" if slope else "constant", 8)
    for first, second in ((a, b), (b, a)):
        product = patch_for(model, scales=first).then(patch_for(model, scales=second)).scales
        assert product.layers == (0, 2, 3)
        for n in (4, 8, 100):
            count = torch.tensor(n)
            expected = torch.stack((a.at(count)[0], a.at(count)[1] * b.at(count)[0], b.at(count)[1]))
            assert torch.allclose(product.at(count), expected)


def test_patches_that_do_not_fit_change_nothing():
    model, other = family("llama"), family("farspan-none")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FarspanError, match="fitted on weights .*apply it to its own base model"):
        patch_for(other, scales=head_scales()).apply(model)
    with pytest.raises(FarspanError, match="replaces 'lm_head.bias'"):
        patch_for(model, weights={"lm_head.bias": torch.ones(3)}, rope=YARN).apply(model)
    with pytest.raises(FarspanError, match="layer 9"):
        bad = Scales.uniform(1.2, (9,), 4)
        patch_for(model, scales=bad, rope=YARN, weights={"model.norm.weight": torch.ones(32)}).apply(model)
    with pytest.raises(FarspanError, match="fitted on another base model"):
        patch_for(model).then(patch_for(other))
    schedules = patch_for(model, scales=head_scales(slope=True))
    with pytest.raises(FarspanError, match="two schedules"):
        schedules.then(schedules)
    with pytest.raises(FarspanError, match="does not run with rope parameters .*; give what that rope_type needs"):
        patch_for(model, rope={"rope_type": "yarn"}).apply(model)
    with pytest.raises(FarspanError, match="no rotary layer"):
        patch_for(other, rope=YARN).apply(other)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.rope_parameters["rope_type"] == "default"
    assert not seam.installed(model)


def test_rope_parameters_with_which_a_family_does_not_run_change_nothing():
    """Ministral's attention reads more of them than rotation needs."""
    model = family("ministral3")
    with torch.no_grad():
        before = model(tokens(), use_cache=False).logits
        with pytest.raises(FarspanError, match="Ministral3ForCausalLM does not run with rope parameters"):
            set_rope(model, {"rope_type": "linear", "factor": 2.0})
        assert torch.equal(model(tokens(), use_cache=False).logits, before)


def test_a_patch_is_loaded_in_any_precision(tmp_path):
    model, tokenizer = farspan.load("rope-twin")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    scales = Scales.uniform(1.2, range(model.config.num_hidden_layers), model.config.num_attention_heads)
    patch_for(model, scales=scales, name=str(tmp_path / "base")).save(tmp_path / "patch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded, _ = farspan.load(tmp_path / "patch", dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        assert seam.installed(loaded)


def test_the_fingerprint_knows_weights_and_not_their_dtype():
    model = family("llama")
    mark = fingerprint(model)
    assert fingerprint(copy.deepcopy(model).bfloat16()) == mark
    assert fingerprint(copy.deepcopy(model).bfloat16().float()) == mark
    assert fingerprint(seam.install(copy.deepcopy(model))) == mark
    model.lm_head.weight.data[0, 0] += 1
    assert fingerprint(model) != mark


@pytest.mark.parametrize("damage", ["missing", "truncated", "nan", "json", "format", "shape"])
def test_a_damaged_patch_is_refused(damage: str, tmp_path):
    from safetensors.torch import save_file

    patch_for(family("llama"), scales=head_scales()).save(tmp_path / "patch")
    tables, text = tmp_path / "patch" / "scales.safetensors", tmp_path / "patch" / "patch.json"
    if damage == "missing":
        tables.unlink()
    elif damage == "truncated":
        tables.write_bytes(tables.read_bytes()[:-7])
    elif damage == "nan":
        save_file({"base": torch.full((4, 4), torch.nan)}, tables)
    elif damage == "shape":
        save_file({"base": torch.ones(3, 4)}, tables)
    elif damage == "json":
        text.write_text(text.read_text()[:-5])
    else:
        text.write_text(text.read_text().replace('"format": 1', '"format": 99'))
    expected = FarspanError if damage == "format" else CorruptError
    with pytest.raises(expected, match=rf"^{tmp_path}/patch.*;"):
        Patch.load(tmp_path / "patch")
