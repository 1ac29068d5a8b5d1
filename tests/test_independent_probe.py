"""Positions, windows and temperatures of families with mixed layers, measured a second way.

Nothing here uses the attention seam. Queries and keys are read where torch's own attention function
(or the family's eager one) receives them, for one token at two positions. Windows are what a change
of the first token reaches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from every_family import VOCABULARY, families, tiny_model
from farspan.attention.probe import probe
from farspan.attention.temperature import temperatures

TOKENS, FAR = 24, 100_000
LOCAL, NOPE = ("rope", 8, False), ("none", None, False)
# Of each attention layer: its position encoding, its window in keys, and whether queries grow.
EXPECTED = {
    "beam": [*[LOCAL] * 5, ("none", None, True)],
    "inkling_text": [*[("unknown", 8, False)] * 5, ("unknown", None, False)],  # a learned bias
    "mistral_large4": [*[("rope", None, True)] * 3, ("none", None, True)],
    "kolibri1": [*[LOCAL] * 4, NOPE],
    "afmoe": [*[LOCAL] * 3, NOPE],
    "granite_swa": [("rope", None, False), *[LOCAL] * 3],
    "cohere2_moe": [*[LOCAL] * 3, NOPE],
    "exaone_moe": [*[LOCAL] * 3, NOPE],
    "olmo_hybrid": [("rope", None, False)],  # its other layers are linear
    "muse_glimmer": [*[LOCAL] * 3, NOPE],
    "muse_spark": [LOCAL, NOPE, LOCAL, LOCAL],
}


@pytest.fixture(params=EXPECTED)
def name(request) -> str:
    if request.param not in families():
        pytest.skip(f"this release of transformers lacks {request.param}")
    return request.param


def build(name: str) -> PreTrainedModel:
    model = tiny_model(name)
    for part, parameter in model.named_parameters():
        if part.endswith("softmax_scaling.scale"):  # zero in a new model
            parameter.data.uniform_(0.01, 0.3)
        if part.endswith("sconv.conv1d.weight"):  # carries a token into those after it
            parameter.data[..., :-1] = 0
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = TOKENS  # every key is selected: only windows hide keys
    return model


@contextmanager
def recording(model: PreTrainedModel) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Queries and keys of every attention module that runs in this block."""
    running: list[nn.Module] = []
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def leave(module: nn.Module, args: tuple, output) -> None:
        running.pop()

    hooks = []
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            enter = module.register_forward_pre_hook(lambda module, args: running.append(module))
            hooks += [enter, module.register_forward_hook(leave)]
    original = nn.functional.scaled_dot_product_attention

    def sdpa(query, key, *args, **kwargs):
        seen[running[-1]] = query, key
        return original(query, key, *args, **kwargs)

    owner = sys.modules[type(model).__module__]
    own_eager = getattr(owner, "eager_attention_forward", None)

    def eager(module, query, key, *args, **kwargs):
        seen[module] = query, key
        return own_eager(module, query, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", sdpa)
        if own_eager is not None:
            patch.setattr(owner, "eager_attention_forward", eager)
        yield seen
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def one_token(model: PreTrainedModel, position: int) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """At any position attention to one key returns its value, so all layers receive the same."""
    with recording(model) as seen:
        model(
            input_ids=torch.tensor([[5]]),
            attention_mask=torch.ones(1, 1, dtype=torch.long),
            position_ids=torch.tensor([[position]]),
            use_cache=False,
        )
    return seen


@torch.no_grad()
def attention_outputs(model: PreTrainedModel, modules: list[nn.Module], first: float) -> list:
    """The output of each module for the same random states, but for those of the first token."""
    outputs: dict[nn.Module, Tensor] = {}

    def replace(module: nn.Module, args: tuple, kwargs: dict):
        states = args[0] if args else kwargs["hidden_states"]
        states = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
        states[:, 0] *= first
        return (
            ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})
        )

    def record(module: nn.Module, args: tuple, output) -> None:
        outputs[module] = output[0] if isinstance(output, tuple) else output

    hooks = [module.register_forward_pre_hook(replace, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(record) for module in modules]
    model(input_ids=torch.arange(3, 3 + TOKENS)[None] % VOCABULARY, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [outputs[module][0] for module in modules]  # [tokens, hidden]


def windows(model: PreTrainedModel, modules: list[nn.Module]) -> list[int | None]:
    """After how many tokens a change of the first one no longer shows."""
    sizes: list[int | None] = []
    pairs = (attention_outputs(model, modules, first) for first in (1.0, -2.0))
    for before, after in zip(*pairs, strict=True):
        changed = ((before - after).abs().amax(-1) > 1e-6 * before.abs().max()).tolist()
        sizes.append(None if changed[-1] else len(changed) - changed[::-1].index(True))
    return sizes


def test_layers_are_read_as_an_independent_probe_reads_them(name: str):
    model, expected = build(name), EXPECTED[name]
    near, far = one_token(model, 0), one_token(model, FAR)
    modules = list(near)
    rotates = [not torch.allclose(near[part][1], far[part][1], atol=1e-4) for part in modules]
    growth = [float(far[part][0].norm() / near[part][0].norm()) for part in modules]
    assert rotates == [position == "rope" for position, _, _ in expected]
    assert [value > 1.01 for value in growth] == [grows for _, _, grows in expected]
    assert windows(model, modules) == [window for _, window, _ in expected]

    layers = probe(model)
    growing = {index for part in temperatures(model, layers) for index in part.layers}
    measured = [(layer.position, layer.window, layer.index in growing) for layer in layers]
    assert measured == expected
