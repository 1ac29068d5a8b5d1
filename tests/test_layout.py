"""Layouts: windows and rotation by layer, on every family, under every kind of cache and mask."""

from __future__ import annotations

import copy
import json
import math
from contextlib import nullcontext

import pytest
import torch
import transformers as hf
from transformers import DynamicCache, StaticCache

from families import FAMILIES, SHAPE, Family, tokens
from farspan.attention import caches, layout_change, seam
from farspan.attention import call as call_module
from farspan.attention import layout as layout_module
from farspan.attention import probe as probe_module
from farspan.attention.backends import own_attention, visible_keys
from farspan.attention.entropy import EntropyByPosition
from farspan.attention.layout import LayerLayout, Layout, step_angles
from farspan.attention.layout_change import set_layout
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import Layer, probe
from farspan.attention.rope import set_rope
from farspan.attention.scales import Scales
from farspan.errors import CorruptError, FarspanError
from farspan.evals.decoding import generate_tokens
from farspan.methods.distill import cast_weights
from farspan.model import FarspanConfig, FarspanForCausalLM

LENGTH, WINDOW = 33, 3
LAYOUT_POSITIONS = {"rope", "none"}
SUPPORTED = [family for family in FAMILIES if set(family.positions) <= LAYOUT_POSITIONS]
ROTARY = [family for family in SUPPORTED if set(family.positions) == {"rope"}]
# Layers that keep a state of the past besides keys run without a cache only, or with their own.
RECURRENT = ("granitemoehybrid", "nemotron-h", "kimi-linear")
every_family = pytest.mark.parametrize("family", SUPPORTED, ids=lambda family: family.name)


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def windowed(model, window: int = WINDOW) -> Layout:
    """Every layer keeps its rotation, or its lack of it, and sees a window."""
    return Layout(
        {layer.index: LayerLayout(layer.position == "rope", window) for layer in probe(model)}
    )


def swan(model, window: int = WINDOW) -> Layout:
    """Rotary windows, and every layer that sees all keys by itself global without rotation."""
    layers = [layer.index for layer in probe(model) if layer.window is None]
    return Layout(
        {
            index: LayerLayout(index != layers[-1], None if index == layers[-1] else window)
            for index in layers
        }
    )


@every_family
@torch.no_grad()
def test_a_window_equals_a_mask_at_every_attention_call(family: Family):
    model, ids = family.build(), tokens(LENGTH)
    expected = logits_with_band(model, ids, WINDOW)
    set_layout(model, windowed(model))
    assert (model(ids, use_cache=False).logits - expected).abs().max() < 1e-5
    assert [layer.window for layer in probe(model)] == [WINDOW] * len(family.positions)
    assert tuple(layer.position for layer in probe(model)) == family.positions


def logits_with_band(model, ids: torch.Tensor, window: int) -> torch.Tensor:
    """The logits with a banded mask, and the model's own mask, at every attention call."""

    def attend(module, query, key, value, mask, **options):
        length = query.shape[2]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        visible = ((distance >= 0) & (distance < window))[None, None]
        if mask is not None and mask.dtype != torch.bool:
            visible = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
        elif mask is not None:
            visible = visible & mask
        return own_attention(module, query, key, value, visible, **options)

    with seam.using(model, attend):
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", ROTARY, ids=lambda family: family.name)
@torch.no_grad()
def test_removed_rotation_equals_zero_frequencies(family: Family):
    model, ids = family.build(), tokens(LENGTH)
    reference = copy.deepcopy(model)
    set_rope(reference, {"rope_type": "none"})
    expected = reference(ids, use_cache=False).logits
    base = model(ids, use_cache=False).logits
    config = model.config.to_dict()
    own = [layer.window for layer in probe(model)]
    layers = {
        layer.index: LayerLayout(False, layer.window if layer.window else None)
        for layer in probe(model)
    }
    set_layout(model, Layout(layers))
    assert (model(ids, use_cache=False).logits - expected).abs().max() < 1e-6
    assert [layer.position for layer in probe(model)] == ["none"] * 4
    assert [layer.window for layer in probe(model)] == own
    seam.uninstall(model)
    assert torch.equal(model(ids, use_cache=False).logits, base)
    assert model.config.to_dict() == config


PERIOD = 100  # some dimensions of the families turn within it, and some do not
# In these one pair of dimensions turns, or YaRN's factor stays where the reference has no rotation.
NOT_PARTIAL = ("farspan-quarter-rope", "gpt-neox", "ministral3", "gpt-oss")
PARTIAL = [family for family in ROTARY if family.name not in NOT_PARTIAL]


@pytest.mark.parametrize("family", PARTIAL, ids=lambda family: family.name)
@torch.no_grad()
def test_partial_rotation_equals_zero_slow_frequencies(family: Family):
    model, ids = family.build(), tokens(LENGTH)
    reference = copy.deepcopy(model)
    zeroed = 0
    for name, frequencies in reference.named_buffers():
        if name.endswith("inv_freq"):
            slow = frequencies * PERIOD < 2 * math.pi
            frequencies.masked_fill_(slow, 0)
            zeroed += int(slow.sum())
    assert zeroed
    expected = reference(ids, use_cache=False).logits
    base = model(ids, use_cache=False).logits
    rotary = [layer for layer in probe(model) if layer.position == "rope"]
    set_layout(
        model,
        Layout({layer.index: LayerLayout(True, layer.window, PERIOD) for layer in rotary}),
    )
    assert (model(ids, use_cache=False).logits - expected).abs().max() < 1e-5
    assert tuple(layer.position for layer in probe(model)) == family.positions
    seam.uninstall(model)
    assert torch.equal(model(ids, use_cache=False).logits, base)


def test_partial_rotation_that_is_not_applied_is_refused(monkeypatch):
    monkeypatch.setattr(
        layout_module.RotationFilter, "__call__", lambda self, module, args, kwargs: (args, kwargs)
    )
    model = family_named("llama").build()
    message = "8 dimensions turn in layer 3 of LlamaForCausalLM as before, .* rope:9"
    with pytest.raises(FarspanError, match=message):
        set_layout(model, Layout.parse({3: "rope:9"}))
    assert seam.installed_layout(model) is None
    set_layout(model, Layout.parse({3: "rope:100000"}))  # all dimensions are faster


@pytest.mark.parametrize("entry", ["none/8", "rope:9/8"])
@torch.no_grad()
def test_rotation_by_complex_numbers_is_removed_or_limited(entry: str):
    """Llama 4 hands its attention modules complex numbers."""
    model, ids = family_named("llama4").build(), tokens(LENGTH)
    reference = copy.deepcopy(model)
    for name, frequencies in reference.named_buffers():
        if name.endswith("inv_freq"):
            period = 9 if entry.startswith("rope") else 0
            frequencies.masked_fill_(frequencies * period < 2 * math.pi, 0)
    base, expected = (each(ids, use_cache=False).logits for each in (model, reference))
    set_layout(model, Layout.parse(dict.fromkeys(range(3), entry)))
    logits = model(ids, use_cache=False).logits
    assert (logits - expected).abs().max() < 1e-5
    assert (logits - base).abs().max() > 0.1


LAYOUTS = [
    ["rope/5", "rope/5", "rope/5", "none"],
    ["none", "rope/4", "none", "rope/4"],
    ["rope/2"] * 4,
    ["none"] * 4,
    ["rope", "rope/7", "rope/7", "rope"],
]


@pytest.mark.parametrize("positions", LAYOUTS, ids=str)
@pytest.mark.parametrize("start", ["farspan-rope", "farspan-none", "llama"])
@torch.no_grad()
def test_a_live_layout_equals_our_model_with_that_layout(start: str, positions: list[str]):
    model, ids = family_named(start).build(), tokens(LENGTH)
    native = FarspanForCausalLM(
        FarspanConfig(**{**SHAPE, "position": positions, "tie_word_embeddings": start != "llama"})
    ).eval()
    native.load_state_dict(model.state_dict())
    layout = Layout.parse(positions)
    set_layout(model, layout)
    expected = native(ids, use_cache=False).logits
    assert (model(ids, use_cache=False).logits - expected).abs().max() < 1e-5
    observed = [(layer.position, layer.window) for layer in probe(model)]
    assert observed == [(layer.position, layer.window) for layer in probe(native)]


def test_a_model_that_has_the_layout_already_is_not_changed():
    model = family_named("farspan-swan").build()
    expected = model(tokens(LENGTH), use_cache=False).logits
    set_layout(model, Layout.parse(["rope/8", "rope/8", "rope/8", "none"]))
    assert (model(tokens(LENGTH), use_cache=False).logits - expected).abs().max() < 1e-6


CACHES = {
    "windowed": caches.make_cache,
    "plain": lambda model: DynamicCache(),
    "config": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=LENGTH + 9),
}


CHUNKS = (7, 1, 1, 16, 2, 6)  # below, at and above the window


@pytest.mark.parametrize(
    "family", [family for family in SUPPORTED if family.name not in RECURRENT], ids=lambda f: f.name
)
@torch.no_grad()
def test_caches_and_chunks_change_nothing(family: Family):
    if family.name == "llama4":
        pytest.skip("transformers' own chunked caches need the mask of its generate")
    model, ids = family.build(), tokens(LENGTH)
    own_windows = any(layer.window for layer in probe(model))
    layout = swan(model)
    set_layout(model, layout)
    seam.install(model, growing_scales(model))
    expected = model(ids, use_cache=False).logits
    # A family with windows of its own needs a cache made from its config, which without windows
    # is the plain one.
    for cache in ("windowed", "config" if own_windows else "plain", "static"):
        past = CACHES[cache](model)
        parts = [
            model(piece, past_key_values=past, use_cache=True).logits
            for piece in ids.split(CHUNKS, 1)
        ]
        assert (torch.cat(parts, dim=1) - expected).abs().max() < 2e-5, cache
        if cache == "windowed":
            kept = {index: past.layers[index].keys.shape[2] for index in layout.windows}
            assert kept == dict.fromkeys(layout.windows, WINDOW - 1)


def growing_scales(model) -> Scales:
    layers = probe(model)
    table = 1 + torch.rand(len(layers), layers[0].heads, generator=torch.Generator().manual_seed(3))
    return Scales(tuple(layer.index for layer in layers), table, table / 4, "log", 4)


@pytest.mark.parametrize("name", ["llama", "farspan-rope", "farspan-none", "gemma3", "gemma2"])
@torch.no_grad()
def test_padding_and_packing_change_nothing(name: str):
    model = family_named(name).build()
    set_layout(model, swan(model))
    seam.install(model, growing_scales(model))
    ids = tokens(LENGTH, batch=1)
    expected = model(ids, use_cache=False).logits
    padded = torch.cat((torch.zeros(1, 6, dtype=torch.long), ids), dim=1)
    mask = torch.cat((torch.zeros(1, 6, dtype=torch.long), torch.ones_like(ids)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[
        :, 6:
    ]
    assert (logits - expected).abs().max() < 2e-5
    two = torch.cat((ids, tokens(LENGTH, batch=1, seed=4)), dim=1)
    positions = torch.arange(LENGTH).repeat(2)[None]
    packed = model(two, position_ids=positions, use_cache=False).logits
    assert (packed[:, :LENGTH] - expected).abs().max() < 2e-5
    second = model(two[:, LENGTH:], use_cache=False).logits
    assert (packed[:, LENGTH:] - second).abs().max() < 2e-5


@pytest.mark.parametrize("name", ["llama", "farspan-none", "qwen3", "gpt-neox"])
@torch.no_grad()
def test_generate_decodes_what_the_whole_text_predicts(name: str):
    model = family_named(name).build()
    set_layout(model, swan(model))
    for options in ({}, {"cache_implementation": "static"}, {"past_key_values": "windowed"}):
        if "past_key_values" in options:
            options = {"past_key_values": caches.make_cache(model)}
        ids = model.generate(tokens(9, batch=1), max_new_tokens=12, do_sample=False, **options)
        predicted = model(ids, use_cache=False).logits.argmax(-1)
        assert ids[0, 9:].tolist() == predicted[0, 8:-1].tolist()


@pytest.mark.parametrize("cache", [*CACHES])
@pytest.mark.parametrize("name", ["llama", "farspan-none"])
@torch.no_grad()
def test_padded_prompts_are_continued_by_growing_scales_as_each_alone_is(name: str, cache: str):
    """With every cache, also one whose last places are empty: windows and n count a row's own."""
    model = family_named(name).build()
    set_layout(model, swan(model))
    seam.install(model, growing_scales(model))
    sizes, longest = (12, 7, 3), 12
    ids = tokens(longest, batch=len(sizes))
    mask = torch.arange(longest) >= longest - torch.tensor(sizes)[:, None]
    generated = model.generate(
        ids * mask,
        attention_mask=mask.long(),
        past_key_values=CACHES[cache](model),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(generated.logits, 1)
    for row, size in enumerate(sizes):
        single = generated.sequences[row : row + 1, longest - size :]
        expected = model(single, use_cache=False).logits[0, size - 1 : -1]
        assert (logits[row] - expected).abs().max() < 2e-5, size


SHORT_FIRST = [
    ("llama", ["rope/3", "rope/9", "rope/9", "rope/9"]),
    ("farspan-none", ["none/3", "none/9", "none/3", "none/9"]),
    ("gemma3", {3: "none/16"}),  # the others have windows of 8 by the config
    ("granitemoehybrid", {1: "rope/8", 3: "none"}),
    ("nemotron-h", {1: "rope/8", 3: "none"}),
    pytest.param("kimi-linear", {1: "none/4", 3: "none/9"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "entries"), SHORT_FIRST, ids=str)
@torch.no_grad()
def test_windows_of_several_sizes_share_one_mask(name: str, entries):
    """It has the keys of the longest, whichever layer comes first: padding and chunks need it."""
    model, ids = family_named(name).build(), tokens(20)
    set_layout(model, Layout.parse(entries))
    expected = model(ids, use_cache=False).logits
    past = caches.make_cache(model)
    parts = [model(part, past_key_values=past, use_cache=True).logits for part in ids.split(6, 1)]
    assert (torch.cat(parts, dim=1) - expected).abs().max() < 2e-5

    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = dict(attention_mask=mask, max_new_tokens=4, do_sample=False, output_logits=True)
    plain, small = (
        model.generate(ids, **options, **cache, return_dict_in_generate=True).logits
        for cache in ({}, {"past_key_values": caches.make_cache(model)})
    )
    assert (torch.stack(plain) - torch.stack(small)).abs().max() < 2e-5


@torch.no_grad()
def test_decoding_uses_the_small_cache(monkeypatch):
    model, ids = family_named("llama").build(), tokens(20, batch=2)
    assert caches.cache_options(model) == {}, "without windows the model makes its own cache"
    options = {"end_ids": [], "beams": 2}
    set_layout(model, swan(model))
    expected = [model.generate(row[None], max_new_tokens=6, do_sample=False) for row in ids]
    made, make_cache = [], caches.make_cache

    def recording_make_cache(model):
        made.append(make_cache(model))
        return made[-1]

    monkeypatch.setattr(caches, "make_cache", recording_make_cache)
    greedy = generate_tokens(model, ids, 6, end_ids=[])
    assert greedy == [row[0, 20:].tolist() for row in expected]
    sizes = [layer.keys.shape[2] for layer in made[0].layers]
    assert sizes == [WINDOW - 1] * 3 + [25]
    assert len(generate_tokens(model, ids, 6, **options)) == 2, "beams reorder the cache"


@torch.no_grad()
def test_windows_come_before_scales_and_observers():
    """A scale that grows with the number of visible keys stops growing at the window."""
    model = family_named("farspan-none").build()
    set_layout(model, Layout({index: LayerLayout(False, WINDOW) for index in range(4)}))
    counts = []

    def record(call: seam.Call) -> None:
        window = call.options.get("sliding_window")
        counts.append(visible_keys(call.q, call.k, call.mask, window)[0].tolist())

    ids = tokens(9, batch=1)
    with seam.observing(model, record):
        model(ids, use_cache=False)
        model(ids, attention_mask=torch.cat((torch.zeros(1, 2), torch.ones(1, 7)), 1).long())
    assert counts[:4] == [[1, 2, 3, 3, 3, 3, 3, 3, 3]] * 4
    assert counts[4:] == [[0, 0, 1, 2, 3, 3, 3, 3, 3]] * 4


@torch.no_grad()
def test_entropy_is_measured_inside_the_window():
    model, ids = family_named("farspan-none").build(), tokens(LENGTH)
    set_layout(model, windowed(model))
    native = FarspanForCausalLM(FarspanConfig(**{**SHAPE, "position": f"none/{WINDOW}"})).eval()
    native.load_state_dict(model.state_dict())
    profiles = []
    for each in (model, native):
        profiles.append(EntropyByPosition(LENGTH))
        with seam.observing(each, profiles[-1]):
            each(ids, use_cache=False)
    fused = EntropyByPosition(LENGTH)
    with seam.using(model, fused.fused_backend(model)):
        logits = model(ids, use_cache=False).logits
    assert (logits - model(ids, use_cache=False).logits).abs().max() < 1e-6
    for layer in range(4):
        for profile in (profiles[0], fused):
            difference = profile.entropy[layer] - profiles[1].entropy[layer]
            assert difference.abs().max() < 1e-5


def test_gradients_flow_through_windows():
    model, ids = family_named("llama").build(), tokens(LENGTH)
    native = FarspanForCausalLM(
        FarspanConfig(**{**SHAPE, "position": "rope/5", "tie_word_embeddings": False})
    )
    native.load_state_dict(model.state_dict())
    set_layout(model, windowed(model, 5))
    for each in (model, native):
        each(ids, labels=ids, use_cache=False).loss.backward()
    expected = dict(native.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name].grad).abs().max() < 1e-6, name


@torch.no_grad()
def test_layout_survives_scales_copies_and_blocks():
    model, ids = family_named("llama").build(), tokens(LENGTH)
    base = model(ids, use_cache=False).logits
    set_layout(model, swan(model))
    expected = model(ids, use_cache=False).logits
    twin = copy.deepcopy(model)
    seam.install(model, growing_scales(model))
    assert not torch.equal(model(ids, use_cache=False).logits, expected)
    seam.remove_scales(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    with seam.observing(model, lambda call: None):
        pass
    assert seam.installed_layout(model) == seam.installed_layout(twin)
    seam.uninstall(model)
    assert torch.equal(model(ids, use_cache=False).logits, base)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(twin(ids, use_cache=False).logits, expected), "a copy has its own hooks"
    seam.uninstall(twin)
    assert torch.equal(twin(ids, use_cache=False).logits, base)


def test_no_mask_of_queries_by_keys_without_a_cache():
    """At 64K tokens such a mask would be 4 GiB; windows use blocks instead."""
    model = family_named("llama").build()
    set_layout(model, windowed(model, 8))
    sizes = []

    def attend(module, query, key, value, mask, **options):
        sizes.append(mask)
        return own_attention(module, query, key, value, mask, **options)

    with seam.using(model, attend), torch.no_grad():
        model(tokens(LENGTH), use_cache=False)
    assert sizes == [None] * 4


@pytest.mark.long
@torch.no_grad()
def test_a_compiled_decoding_step_is_one_graph():
    model, ids = family_named("llama").build(), tokens(LENGTH)
    set_layout(model, swan(model))
    expected = model(ids, use_cache=False).logits
    past = StaticCache(config=model.config, max_cache_len=LENGTH + 9)
    model(ids[:, : LENGTH - 1], past_key_values=past, use_cache=True)
    step = torch.compile(model, backend="eager", fullgraph=True)
    last = step(ids[:, -1:], past_key_values=past, use_cache=True).logits
    assert (last - expected[:, -1:]).abs().max() < 1e-5


def test_windows_read_only_the_keys_that_they_show():
    """A chunk after a long cache costs what its window costs, not what the cache holds."""
    model, ids = family_named("llama").build(), tokens(LENGTH)
    set_layout(model, windowed(model))
    sizes = []
    with seam.observing(model, lambda call: sizes.append(call.k.shape[2])), torch.no_grad():
        past = DynamicCache()
        model(ids[:, :20], past_key_values=past, use_cache=True)
        model(ids[:, 20:24], past_key_values=past, use_cache=True)
        model(ids[:, 24:25], past_key_values=past, use_cache=True)
    assert sizes == [20] * 4 + [4 + WINDOW - 1] * 4 + [WINDOW] * 4


# What is refused


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if not set(family.positions) <= LAYOUT_POSITIONS],
    ids=lambda family: family.name,
)
def test_other_positions_are_refused_and_the_model_is_unchanged(family: Family):
    model, ids = family.build(), tokens()
    expected = model(ids, use_cache=False).logits
    index = next(
        i for i, position in enumerate(family.positions) if position not in LAYOUT_POSITIONS
    )
    with pytest.raises(FarspanError, match=f"layer {index} .* positions; a layout changes only"):
        set_layout(model, Layout({index: LayerLayout(True, 4)}))
    assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_added_rotation_that_is_not_applied_is_refused(monkeypatch):
    monkeypatch.setattr(call_module, "rotate_by_slot", lambda query, key, places: (query, key))
    model = family_named("farspan-none").build()
    with pytest.raises(FarspanError, match="layer 1 cannot become rope"):
        set_layout(model, Layout.parse({1: "rope"}))
    assert seam.installed_layout(model) is None


def test_a_family_that_hands_over_no_rotation_is_refused(monkeypatch):
    model, ids = family_named("llama").build(), tokens()
    expected = model(ids, use_cache=False).logits
    monkeypatch.setattr("farspan.attention.layout.ROTATION_ARGUMENTS", ())
    with pytest.raises(FarspanError, match="does not hand the rotation to its attention modules"):
        set_layout(model, Layout({0: LayerLayout(False)}))
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert seam.installed_layout(model) is None


@pytest.mark.parametrize(
    ("expected", "position", "window", "message"),
    [
        ("rope/4", "rope", 4, None),
        ("rope/4", "rope", None, "layer 2 of Identity does not keep to a window of 4 keys"),
        ("rope/4", "rope", 5, "does not keep to a window of 4 keys"),
        ("rope", "rope", 8, None),  # a window of its own
        ("none", "rope", None, "does not hand the rotation to its attention modules, so layer 2"),
        ("rope", "none", None, "does not hand the rotation to its attention modules, so layer 2"),
    ],
)
def test_layers_that_behave_unlike_their_layout_are_refused(expected, position, window, message):
    (entry,) = Layout.parse({2: expected}).layers.values()
    module = torch.nn.Identity()
    layer = Layer(2, module, position, window, heads=4, kv_heads=2, head_dim=8, base_scale=1.0)
    refused = pytest.raises(FarspanError, match=message) if message else nullcontext()
    with refused:
        layout_change._check_observed(module, layer, entry)


def test_a_window_is_measured_to_the_key():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, "num_hidden_layers": 1})).eval()
    set_layout(model, Layout.parse({0: "rope/5"}))
    (call,) = seam.attention_calls(model)
    assert [size for size in range(2, 9) if probe_module._hides_beyond(call, size)] == [5]


def test_the_steps_of_a_rotation_are_read_from_complex_numbers_too():
    angles = torch.tensor([1.0, 0.1, 0.01])
    turned = (torch.arange(2)[:, None] * angles)[None]  # [B, T, D]
    for rotation in (torch.polar(torch.ones_like(turned), turned), (turned.cos(), turned.sin())):
        assert torch.allclose(step_angles(rotation), angles)


def test_a_dimension_that_takes_the_whole_period_for_a_turn_still_turns():
    """A turn in 8 tokens by steps of 2π/8, and slower ones."""
    angles = 2 * math.pi / torch.tensor([8.0, 8.001, 16.0])
    cos, sin = angles.cos(), angles.sin()
    turned = layout_module.RotationFilter(angles, 8)._filter((cos, sin))
    assert torch.equal(turned[0], torch.tensor([cos[0], 1.0, 1.0]))
    assert torch.equal(turned[1], torch.tensor([sin[0], 0.0, 0.0]))


@pytest.mark.parametrize("name", ["farspan-none", "llama"])
def test_rotation_that_is_not_there_cannot_be_limited(name, monkeypatch):
    model = family_named(name).build()
    if name == "llama":
        set_rope(model, {"rope_type": "none"})
    with pytest.raises(FarspanError, match="does not rotate.*rope:9/4; write rope/4.* or none/4"):
        set_layout(model, Layout.parse({0: "rope:9/4"}))
    assert seam.installed_layout(model) is None


def test_a_family_that_hands_over_no_rotation_cannot_rotate_in_part(monkeypatch):
    model = family_named("llama").build()
    monkeypatch.setattr("farspan.attention.layout.ROTATION_ARGUMENTS", ())
    with pytest.raises(FarspanError, match="does not hand the rotation .*cannot become rope:9"):
        set_layout(model, Layout.parse({0: "rope:9"}))


def llama(rope: dict, dtype: torch.dtype = torch.float32, **shape) -> hf.PreTrainedModel:
    config = hf.LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 256, **shape, "rope_parameters": rope}
    )
    torch.manual_seed(0)
    return cast_weights(hf.LlamaForCausalLM(config).eval(), dtype)


def test_a_period_that_no_dimension_reaches_is_refused():
    model = llama({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0})
    with pytest.raises(FarspanError, match="within 40 tokens, the fastest takes 50; write none"):
        set_layout(model, Layout.parse({0: "rope:40"}))
    assert seam.installed_layout(model) is None


def test_rotation_that_depends_on_the_length_cannot_be_limited():
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    with pytest.raises(FarspanError, match="changes with the length of the text"):
        set_layout(llama(rope), Layout.parse({0: "rope:40"}))


@torch.no_grad()
@pytest.mark.parametrize("period", [900, 7800, 14900])
def test_the_same_dimensions_rotate_in_bf16(period):
    """Angles of these periods are rounded to the other side of the limit in bf16."""
    masks = []
    for dtype in (torch.float32, torch.bfloat16):
        rope = {"rope_type": "default", "rope_theta": 1e6}
        model = llama(rope, dtype, head_dim=128, num_hidden_layers=1)
        set_layout(model, Layout.parse({0: f"rope:{period}"}))
        (hook,) = model.model.layers[0].self_attn._forward_pre_hooks.values()
        masks.append(hook._fixed)
    assert torch.equal(*masks)
    assert 0 < int(masks[0].sum()) < 128


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_layer_cannot_see_more_than_its_config_lets_it(name: str):
    model = family_named(name).build()
    with pytest.raises(FarspanError, match="sees 8 keys by its config, so it cannot become none"):
        set_layout(model, Layout({0: LayerLayout(False)}))


@pytest.mark.parametrize("text", ["rope", "rope/512", "rope:8192", "rope:64/8", "none", "none/2"])
def test_layer_layouts_are_written_as_they_are_read(text):
    assert str(LayerLayout.parse(text)) == text


INVALID = [
    "rope/1",
    "rope/",
    "rope/x",
    "alibi",
    "",
    "none/-3",
    5,
    None,
    "rope:1",
    "rope:6",
    "none:8",
    "rope:",
]


@pytest.mark.parametrize("text", INVALID)
def test_unknown_layer_layouts_are_refused(text):
    with pytest.raises(FarspanError, match="is unknown; write it as rope, rope/512"):
        LayerLayout.parse(text)


# Patches with a layout


def test_a_patch_carries_the_layout(tmp_path):
    model, ids = family_named("llama").build(), tokens(LENGTH)
    layout = swan(model)
    weights = {"model.norm.weight": model.model.norm.weight.detach() * 1.5}
    patch = Patch("swan", fingerprint(model), 256, 64, layout=layout, weights=weights)
    patch.save(tmp_path / "patch")
    record = json.loads((tmp_path / "patch" / "patch.json").read_text())
    assert record["format"] == 2
    assert record["layout"] == {"0": "rope/3", "1": "rope/3", "2": "rope/3", "3": "none"}
    loaded = Patch.load(tmp_path / "patch")
    assert loaded.layout == layout
    first, second = copy.deepcopy(model), model
    patch.apply(first)
    loaded.apply(second)
    with torch.no_grad():
        assert torch.equal(first(ids, use_cache=False).logits, second(ids, use_cache=False).logits)


def test_patches_without_a_layout_keep_the_format_of_older_releases(tmp_path):
    model = family_named("llama").build()
    scales = Scales.uniform(1.1, range(4), 4)
    Patch("test", fingerprint(model), 256, 64, scales).save(tmp_path / "patch")
    assert json.loads((tmp_path / "patch" / "patch.json").read_text())["format"] == 1


@pytest.mark.parametrize("layout", [{"0": "rope/1"}, {"x": "rope"}, {"0": 5}, [1], "none", None])
def test_a_damaged_layout_is_named(tmp_path, layout):
    model = family_named("llama").build()
    patch = Patch("swan", fingerprint(model), 256, 64, layout=swan(model))
    patch.save(tmp_path / "patch")
    file = tmp_path / "patch" / "patch.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "layout": layout}))
    with pytest.raises(CorruptError, match="is not a complete patch"):
        Patch.load(tmp_path / "patch")


def test_patches_join_their_layouts():
    model = family_named("llama").build()
    parts = {"model": fingerprint(model), "target": 256, "train_length": 64}
    swan_patch = Patch("swan", **parts, layout=swan(model))
    scaled = Patch("headscale", **parts, scales=Scales.uniform(1.1, (3,), 4))
    joined = swan_patch.then(scaled)
    assert joined.method == "swan+headscale"
    assert joined.layout == swan(model)
    assert joined.scales is not None
    other = Patch("other", **parts, layout=Layout({3: LayerLayout(True, 9)}))
    assert str(swan_patch.then(other).layout.layers[3]) == "rope/9"


def test_swan_layouts_of_stock_smollm3_match(tmp_path):
    """SmolLM3 has the same layout by its config."""
    ids = tokens(LENGTH)
    stock = hf.SmolLM3ForCausalLM(
        hf.SmolLM3Config(
            **SHAPE,
            no_rope_layers=[1, 1, 1, 0],
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            use_sliding_window=True,
            sliding_window=5,
        )
    ).eval()
    llama = hf.LlamaForCausalLM(
        hf.LlamaConfig(**SHAPE, rope_parameters=stock.config.rope_parameters)
    )
    llama.load_state_dict(stock.state_dict())
    set_layout(llama.eval(), Layout.parse(["rope/5"] * 3 + ["none"]))
    with torch.no_grad():
        expected = stock(ids, use_cache=False).logits
        assert (llama(ids, use_cache=False).logits - expected).abs().max() < 1e-5


def test_a_compiled_graph_applies_the_window_to_the_keys_that_the_cache_holds(monkeypatch):
    """The mask is wider than a cache that holds the last keys only."""
    causal = torch.ones(3, 8, dtype=torch.bool).tril(5)[None, None]
    eager = layout_module._window_of_mask(causal, 5, 4)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    start, mask = layout_module._window_of_mask(causal, 5, 4)
    assert start == 0
    assert torch.equal(mask[..., eager[0] :], eager[1])
    places = torch.arange(2, 5)  # of three queries at the end of five keys
    distance = places[:, None] - torch.arange(5)
    assert torch.equal(mask[0, 0], (distance >= 0) & (distance < 4))


def test_a_cache_gets_the_layers_that_the_config_does_not_count(monkeypatch):
    model = family_named("llama").build()
    set_layout(model, windowed(model, 4))
    monkeypatch.setattr(caches, "DynamicCache", lambda config: DynamicCache())
    windows = [layer.sliding_window for layer in caches.make_cache(model).layers]
    assert windows == [4] * model.config.num_hidden_layers
