"""Every way of calling a model gives the logits of one plain forward pass, with scales too.

A scale that depends on the number of visible keys is right only if they are counted right in every
kind of call. The schedules start at 6 of 20 keys, so a wrong count changes the logits.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers import StaticCache

from families import FAMILIES, Family, tokens
from farspan.attention import seam
from farspan.attention.backends import visible_keys
from farspan.attention.layout import LayerLayout, Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.probe import probe
from farspan.attention.scales import Scales

LENGTH, PADDING = 20, 5


def plain(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def in_chunks(model, ids, ends, past=None):
    """Logits of one call after another, each on the tokens up to its end and the same cache."""
    parts = []
    for start, stop in itertools.pairwise((0, *ends)):
        output = model(input_ids=ids[:, start:stop], past_key_values=past, use_cache=True)
        past = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1)


def token_by_token(model, ids):
    """Single tokens from 6 to 12 cross the edge of windows and chunks of 8."""
    return in_chunks(model, ids, (*range(6, 13), LENGTH))


def chunked(model, ids):
    return in_chunks(model, ids, (7, 8, 15, LENGTH))


def left_padded(model, ids):
    padded = torch.cat((torch.zeros(len(ids), PADDING, dtype=torch.long), ids), 1)
    mask = (torch.arange(LENGTH + PADDING) >= PADDING).long().expand(len(ids), -1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(
        input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits[:, PADDING:]


def right_padded(model, ids):
    padded = torch.cat((ids, torch.zeros(len(ids), PADDING, dtype=torch.long)), 1)
    mask = (torch.arange(LENGTH + PADDING) < LENGTH).long().expand(len(ids), -1)
    return model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, :LENGTH]


def static_cache(model, ids):
    """A prompt, then single tokens that cross the edge of the second chunk of 8."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    return in_chunks(model, ids, range(14, LENGTH + 1), cache)


def packed(model, ids):
    """Two documents in one row, separated by position ids that restart."""
    row = ids.reshape(1, -1)
    positions = torch.arange(LENGTH).repeat(len(ids))[None]
    return model(input_ids=row, position_ids=positions, use_cache=False).logits.reshape(
        len(ids), LENGTH, -1
    )


KINDS = [token_by_token, chunked, left_padded, right_padded, static_cache, packed]

# Calls that the families get wrong without farspan; the test fails once a family fixes one.
STOCK_LIMITS = {
    ("llama4", "left_padded"): "its built-in temperature counts padding",
    ("llama4", "packed"): "its built-in temperature and chunks continue across documents",
    ("granitemoehybrid", "packed"): "its recurrent state continues across documents",
    ("nemotron-h", "packed"): "its recurrent state continues across documents",
    ("kimi-linear", "packed"): "its recurrent state continues across documents",
    ("gpt-oss", "packed"): "its masks ignore the position ids",
}


CONVERTIBLE = [family for family in FAMILIES if set(family.positions) <= {"rope", "none"}]


def schedules(model) -> dict[str, Scales | None]:
    layers = probe(model)
    indices, shape = tuple(layer.index for layer in layers), (len(layers), layers[0].heads)
    generator = torch.Generator().manual_seed(3)
    base = 1 + torch.rand(shape, generator=generator)
    slope = 1 + torch.rand(shape, generator=generator)
    return {
        "stock": None,
        "constant": Scales(indices, base),
        "log": Scales(indices, base, slope, "log", 6).check(64),
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_every_kind_of_call_equals_a_plain_forward_pass(family: Family):
    model, ids = family.build(), tokens(LENGTH)
    for name, scales in schedules(model).items():
        seam.install(model, scales)
        expected = plain(model, ids)
        for kind in KINDS:
            error = (kind(model, ids) - expected).abs().max() / expected.abs().max()
            if (family.name, kind.__name__) in STOCK_LIMITS:
                assert name != "stock" or error > 1e-4, (
                    f"{family.name} now gets {kind.__name__} right: remove it from STOCK_LIMITS"
                )
            else:
                assert error < 2e-5, f"{kind.__name__} with {name} scales is off by {error:.1e}"


def converted(model, kind: str) -> Layout | None:
    """A layout as `swan` makes it: windows, and one layer that sees all keys without rotation or
    with that of fast dimensions; None: the model has no such layer."""
    layers = [layer for layer in probe(model) if layer.window is None]
    rotary = [layer for layer in layers if layer.position == "rope"]
    if not (rotary if kind == "fast" else layers):
        return None
    last = (rotary if kind == "fast" else layers)[-1].index
    entries = {
        layer.index: LayerLayout(kind == "none" or layer.position == "rope", 3) for layer in layers
    }
    entries[last] = LayerLayout(False) if kind == "none" else LayerLayout(True, max_period=20)
    return Layout(entries)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "fast"])
@pytest.mark.parametrize("family", CONVERTIBLE, ids=lambda family: family.name)
@torch.no_grad()
def test_every_kind_of_call_of_a_converted_model_equals_a_plain_one(family: Family, kind: str):
    """Windows, removed and partial rotation, and scales that grow, all at once."""
    model, ids = family.build(), tokens(LENGTH)
    if (layout := converted(model, kind)) is None:
        pytest.skip("the model has no layer that could become global so")
    set_layout(model, layout)
    seam.install(model, schedules(model)["log"])
    expected = plain(model, ids)
    for call in KINDS:
        if (family.name, call.__name__) not in STOCK_LIMITS:
            error = (call(model, ids) - expected).abs().max() / expected.abs().max()
            assert error < 2e-5, f"{call.__name__} is off by {error:.1e}"


@pytest.mark.parametrize("queries", [1, 3, 8])
def test_keys_without_a_mask_are_counted_as_the_backends_align_them(queries: int):
    """The causal order of SDPA begins at the first key, and that of FlashAttention ends at the
    last; transformers gives SDPA a causal order if there are several queries."""
    keys = 8
    q, k, v = torch.zeros(1, 1, queries, 4), torch.zeros(1, 1, keys, 4), torch.eye(keys)[None, None]
    output = F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1)
    assert torch.equal(visible_keys(q, k, None), (output[:, 0] > 0).sum(-1))
    at_the_end = torch.arange(keys - queries + 1, keys + 1)[None]
    assert torch.equal(visible_keys(q, k, None, flash=True), at_the_end)
    assert torch.equal(visible_keys(q, k, None, 2, flash=True), at_the_end.clamp(max=2))
