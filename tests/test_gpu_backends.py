"""FlashAttention and compiled FlexAttention under the seam, on a GPU: equal to SDPA in bf16."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers.utils import is_flash_attn_2_available

from farspan.attention import seam
from farspan.errors import FarspanError
from test_backends import error
from test_visible_keys import schedules

LENGTH, PADDING = 256, 40
SHAPE = dict(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.1,  # sharp attention, so that a scale changes the output
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
flash = pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs flash-attn")
every_backend = pytest.mark.parametrize(
    "backend", ["flex_attention", pytest.param("flash_attention_2", marks=flash)]
)


def build(backend: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).eval()
    model.config._attn_implementation = backend
    return model.to("cuda", torch.bfloat16)


def inputs(padded: bool) -> dict[str, torch.Tensor]:
    """Two rows of tokens, the first with padding on its left."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, : PADDING * padded] = 0
    ids = torch.randint(SHAPE["vocab_size"], (2, LENGTH), generator=generator)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    named = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: value.to("cuda") for name, value in named.items()}


@torch.no_grad()
def logits(model: hf.PreTrainedModel, padded: bool) -> torch.Tensor:
    output = model(**inputs(padded), use_cache=False).logits.float()
    return output[:, PADDING * padded :]


@every_backend
@pytest.mark.parametrize("padded", [False, True], ids=["whole rows", "left padding"])
@pytest.mark.parametrize("kind", ["constant", "log"])
def test_scales_are_those_of_sdpa(kind: str, padded: bool, backend: str):
    reference, model = build("sdpa"), build(backend)
    stock = logits(reference, padded)
    assert error(stock, logits(model, padded)) < 0.05
    scales = schedules(reference)[kind]
    expected = logits(seam.install(reference, scales), padded)
    assert error(stock, expected) > 0.3, "the scales change the output"
    assert error(expected, logits(seam.install(model, scales), padded)) < 0.05
    seam.uninstall(model)
    assert model.config._attn_implementation == backend


@every_backend
@torch.no_grad()
def test_growing_scales_count_the_keys_of_a_cache(backend: str):
    """A last token that reads the cache of the others is as in one pass over all."""
    reference, model = build("sdpa"), build(backend)
    scales = schedules(reference)["log"]
    expected = logits(seam.install(reference, scales), False)[:, -1]
    seam.install(model, scales)
    ids = inputs(False)["input_ids"]
    past = model(ids[:, :-1], use_cache=True).past_key_values
    last = model(ids[:, -1:], past_key_values=past, use_cache=True).logits.float()
    assert error(expected, last[:, -1]) < 0.05


@flash
def test_growing_scales_of_packed_texts_are_refused_on_flash():
    """Its mask does not show where a text begins."""
    model = build("flash_attention_2")
    seam.install(model, schedules(build("sdpa"))["log"])
    positions = torch.arange(LENGTH // 2, device="cuda").repeat(2)[None]
    with pytest.raises(FarspanError, match="packed texts; run one text per row"):
        model(inputs(False)["input_ids"][:1], position_ids=positions, use_cache=False)
