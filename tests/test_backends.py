"""Scales, layouts and observers do on FlashAttention and FlexAttention what they do on SDPA.

FlexAttention runs in steps, on any machine. FlashAttention needs a GPU: a function in its place
reads masks as it does, in plain operations. On a GPU, test_gpu_backends.py runs both for real.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers as hf
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers.masking_utils import flash_attention_mask

from families import FAMILIES, Family, tokens
from farspan.attention import backends, block_masks, caches, seam
from farspan.attention.backends import visible_keys
from farspan.attention.layout import Layout
from farspan.attention.layout_change import set_layout
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from test_visible_keys import KINDS, LENGTH, PADDING, packed, plain, schedules, static_cache

FLASH = "flash_in_steps"
BACKENDS = ("flex_attention", FLASH)
# transformers itself gets static caches wrong: FlashAttention reads empty places of a cache without
# a mask, and FlexAttention's mask moves when a layer writes to the cache.
DYNAMIC = [kind for kind in KINDS if kind is not static_cache]

every_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def flash_in_steps(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    sliding_window=None,
    position_ids=None,
    **options,
):
    """What FlashAttention computes for the padding [B, K] or None; the last query is at the last
    key, and position ids that restart separate texts."""
    assert module.config._attn_implementation == FLASH, "FlashAttention loads kernels by this name"
    keys = key.shape[2] if attention_mask is None else attention_mask.shape[1]
    places, slots = torch.arange(keys - query.shape[2], keys)[:, None], torch.arange(keys)
    visible = ((slots <= places) & (slots > places - (sliding_window or keys)))[None, None]
    if attention_mask is not None:
        visible = visible & attention_mask.bool()[:, None, None]
    elif position_ids is not None and query.shape[:3:2] == (1, keys):
        texts = F.pad(position_ids.diff(dim=-1) != 1, (1, 0)).cumsum(-1)
        visible = visible & (texts[:, None, :, None] == texts[:, None, None])
    key, value = (part[:, :, :keys] for part in (key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, visible, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


@pytest.fixture(autouse=True)
def _backends(monkeypatch):
    monkeypatch.setitem(hf.AttentionInterface._global_mapping, FLASH, flash_in_steps)
    monkeypatch.setitem(hf.AttentionMaskInterface._global_mapping, FLASH, flash_attention_mask)
    with torch.compiler.set_stance("force_eager"):
        yield


def family(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def models(name: str, backend: str) -> tuple[hf.PreTrainedModel, hf.PreTrainedModel]:
    """The same model on SDPA and on another backend."""
    return family(name).build(), on_backend(family(name).build(), backend)


def on_backend(model: hf.PreTrainedModel, backend: str) -> hf.PreTrainedModel:
    model.config._attn_implementation = backend  # transformers itself would load kernels for it
    return model


def error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return ((expected - actual).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("backend", [FLASH, pytest.param("flex_attention", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["mistral", "farspan-hybrid"])
@torch.no_grad()
def test_scales_are_exact_in_every_kind_of_call(name: str, backend: str):
    """n is right with padding, caches and windows; FlashAttention does not know it when packed."""
    reference, model = models(name, backend)
    for kind_of_scales, scales in schedules(reference).items():
        expected = plain(seam.install(reference, scales), tokens(LENGTH))
        seam.install(model, scales)
        assert seam.installed(model)
        for kind in (plain, *DYNAMIC):
            refused = backend == FLASH and kind is packed and kind_of_scales == "log"
            with (
                pytest.raises(FarspanError, match="packed texts; run one text per row")
                if refused
                else contextlib.nullcontext()
            ):
                change = error(expected, kind(model, tokens(LENGTH)))
                assert change < 2e-5, f"{kind.__name__} with {kind_of_scales} scales"
    seam.uninstall(model)
    assert model.config._attn_implementation == backend


@torch.no_grad()
def test_static_caches_are_wrong_on_flex_without_the_seam():
    """The test fails once transformers is right; then DYNAMIC can go."""
    reference, model = models("llama", "flex_attention")
    expected = plain(reference, tokens(LENGTH))
    assert error(expected, static_cache(model, tokens(LENGTH))) > 1e-3


@torch.no_grad()
def test_a_constant_scale_only_multiplies_the_queries(monkeypatch):
    """The backend receives what it would receive from the model, times λ̂."""
    queries: list[torch.Tensor] = []

    def record(module, query, *arguments, **options):
        queries.append(query)
        return flash_in_steps(module, query, *arguments, **options)

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, FLASH, record)
    model = on_backend(hf.LlamaForCausalLM(hf.LlamaConfig(**LAYER)), FLASH)
    seam.install(model)
    model(tokens(), use_cache=False)
    seam.install(model, Scales((0,), torch.tensor([[1.0, 1.5, 2.0, 3.0]])))
    queries.clear()
    model(tokens(), use_cache=False)
    scaled = queries.pop()
    seam.uninstall(model)
    model(tokens(), use_cache=False)
    assert torch.equal(scaled, queries.pop() * torch.tensor([1.0, 1.5, 2.0, 3.0])[:, None, None])


@torch.no_grad()
def test_packed_texts_are_refused_for_growing_scales_alone():
    model = on_backend(hf.LlamaForCausalLM(hf.LlamaConfig(**LAYER)), FLASH)
    packed = {"position_ids": torch.arange(4).repeat(2)[None], "use_cache": False}
    table = torch.ones(1, 4)
    seam.install(model, Scales((0,), 1.5 * table))
    assert model(tokens(8, batch=1), **packed).logits.isfinite().all()
    seam.install(model, Scales((0,), table, table, "log", 4))
    with pytest.raises(FarspanError, match="packed texts; run one text per row"):
        model(tokens(8, batch=1), **packed)


LAYER = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
)


@pytest.mark.long
@every_backend
@pytest.mark.parametrize(
    ("name", "entries"),
    [("llama", ["rope/8", "none", "rope/4", "rope"]), ("farspan-none", ["rope", "rope/8"] * 2)],
    ids=["windows and no rotation", "rotation where there was none"],
)
@torch.no_grad()
def test_layouts_and_growing_scales_are_exact(name: str, entries: list[str], backend: str):
    reference, model = models(name, backend)
    scales = schedules(reference)["log"]
    for part in (reference, model):
        set_layout(part, Layout.parse(entries))
        seam.install(part, scales)
    expected = plain(reference, tokens(LENGTH))
    for kind in (plain, *DYNAMIC):
        if backend == FLASH and kind is packed:
            continue  # growing scales are refused
        assert error(expected, kind(model, tokens(LENGTH))) < 2e-5, kind.__name__
    assert error(*(padded_generation(part) for part in (reference, model))) < 2e-5


def padded_generation(model: hf.PreTrainedModel) -> torch.Tensor:
    """Logits of new tokens after padded prompts, with a cache that keeps windows only."""
    output = model.generate(
        F.pad(tokens(12), (PADDING, 0)),
        attention_mask=F.pad(torch.ones(2, 12, dtype=torch.long), (PADDING, 0)),
        past_key_values=caches.make_cache(model),
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(output.logits)


@every_backend
@torch.no_grad()
def test_observers_see_the_same_calls(backend: str):
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :5] = 0
    counts = []
    for model in models("mistral", backend):
        calls: list[seam.Call] = []
        with seam.observing(model, calls.append):
            for options in ({}, {"attention_mask": mask}):
                past = model(tokens(), **options).past_key_values
            model(tokens(3), attention_mask=F.pad(mask, (0, 3), value=1), past_key_values=past)
        windows = [call.options.get("sliding_window") for call in calls]
        counts.append(
            [
                visible_keys(call.q, call.k, call.mask, window).expand(2, -1)
                for call, window in zip(calls, windows, strict=True)
            ]
        )
    assert len(counts[0]) == len(counts[1]) == 12
    for expected, actual in zip(*counts, strict=True):
        assert torch.equal(expected, actual)


def test_refuses_backends_whose_masks_are_unknown(monkeypatch):
    model = family("llama").build()
    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "mine", flash_in_steps)
    for name in ("mine", "owner/kernel"):
        monkeypatch.setattr(model.config, "_attn_implementation_internal", name)
        with pytest.raises(FarspanError, match=f"'{name}', whose mask does not show.*load it with"):
            seam.install(model)


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (5, 5), (2, 5)])
def test_observers_get_no_mask_from_flash_where_causal_order_says_it_all(
    queries, keys, monkeypatch
):
    monkeypatch.setattr(backends, "is_flash", lambda module: True)
    q, k = torch.zeros(1, 1, queries, 2), torch.zeros(1, 1, keys, 2)
    mask = backends.tensor_mask(torch.nn.Identity(), q, k, None, None)
    if queries in (1, keys):
        assert mask is None
    else:  # the last query is at the last key
        assert mask.tolist() == [[[[True] * 4 + [False], [True] * 5]]]


@pytest.mark.parametrize("kind", ["booleans", "numbers", "none"])
def test_sdpa_gets_a_selection_of_keys_in_booleans(kind):
    """GLM 5 Next makes the mask itself: of booleans, or of numbers that are added to scores."""
    selected = torch.tensor([[[[True, False], [True, True]]]])
    added = torch.zeros(1, 1, 2, 2).masked_fill_(~selected, torch.finfo(torch.float32).min)
    mask = {"booleans": selected, "numbers": added, "none": None}[kind]
    module = torch.nn.Module()
    module.config = hf.LlamaConfig(attn_implementation="sdpa")
    module.build_attention_mask_from_topk = None
    query = torch.zeros(1, 1, 2, 4)
    seen = backends.mask_of_selected_keys(module, query, query, mask, {})
    assert seen is None if kind == "none" else torch.equal(seen, selected)


def test_no_more_of_a_block_mask_is_evaluated_at_once_than_allowed(monkeypatch):
    sizes = []

    def counted(function, *shape, device):
        sizes.append(shape)
        return create_mask(function, *shape, device=device)

    monkeypatch.setattr(block_masks, "create_mask", counted)
    monkeypatch.setattr(block_masks, "MAX_ELEMENTS", 3 * (2 * 4 * 10))  # three rows of 10 keys
    mask = create_block_mask(lambda b, h, query, key: key <= query, 2, 4, 7, 10, device="cpu")
    seen = block_masks.seen_keys(mask)
    assert sizes == [(2, 4, 3, 10), (2, 4, 3, 10), (2, 4, 1, 10)]
    assert torch.equal(seen.counts, torch.arange(1, 8).expand(2, 4, -1))
