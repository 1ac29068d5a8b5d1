"""Constant per-head scales as an adapter that stock peft loads, merges and serves.

IA3 multiplies the outputs of a linear layer by a vector. With each head's scale repeated over the
rows that produce its queries, and 1 elsewhere, the adapter is exact, and a few kilobytes in size.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.checkpoints import quiet
from farspan.errors import FarspanError, install_hint
from farspan.files import write_json
from farspan.formats.fold import Site, find_sites


def write_peft(model: PreTrainedModel, patch: Patch, folder: Path) -> None:
    """Write the adapter for a base model that is not on the seam."""
    from safetensors.torch import save_file

    if importlib.util.find_spec("peft") is None:
        raise FarspanError(
            f"proving an adapter needs peft, which is not installed; {install_hint('peft')}"
        )
    vectors = ia3_vectors(model, patch)
    save_file(
        {f"base_model.model.{name}.ia3_l": vector for name, vector in vectors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "IA3",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": patch.name,
            "target_modules": sorted({name.rpartition(".")[2] for name in vectors}),
            "feedforward_modules": [],
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_ia3_weights": True,
            "modules_to_save": None,
        },
    )


def ia3_vectors(model: PreTrainedModel, patch: Patch) -> dict[str, Tensor]:
    """The factors [out, 1] of the outputs of every linear layer that the adapter targets, by name.

    peft selects layers by the last part of their names, so layers without scales get ones.
    """
    scales = patch.scales
    if scales is None or patch.rope or patch.weights or patch.layout:
        if patch.layout is not None:
            content = "a layout"
        elif patch.rope is not None:
            content = "rope parameters"
        else:
            content = "tuned weights" if patch.weights else "no scales"
        raise FarspanError(
            f"the patch holds {content}, and an IA3 adapter can hold only scales; "
            "use --format stock or live"
        )
    if not scales.constant:
        raise FarspanError(
            f"scales with basis {scales.basis!r} grow with the context and an adapter is constant; "
            "use --format live"
        )
    modules = {call.layer: call.module for call in seam.attention_calls(model)}
    vectors: dict[nn.Module, Tensor] = {}
    for (layer, site), scale in zip(
        find_sites(model, scales).items(), scales.base.detach(), strict=True
    ):
        if isinstance(site, str):
            raise FarspanError(
                f"the scales of layer {layer} cannot be an adapter: {site}; use --format live"
            )
        linear = _checked_linear(modules[layer].get_submodule(site.name), site, layer)
        vectors[linear] = site.scaled("weight", torch.ones(linear.out_features, 1), scale.cpu())
    targets = {
        name.rpartition(".")[2] for name, module in model.named_modules() if module in vectors
    }
    return {
        name: vectors.get(module, torch.ones(module.out_features, 1))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    }


def _checked_linear(module: nn.Module, site: Site, layer: int) -> nn.Linear:
    if not isinstance(module, nn.Linear) or site.rule != "times" or site.owners["weight"][0] != 0:
        raise FarspanError(
            f"the scales of layer {layer} go into {site.name}, a {type(module).__name__}, and IA3 "
            "scales only rows of linear layers; use --format folded"
        )
    heads = site.owners["weight"][1]
    if bool((heads < 0).any()):
        raise FarspanError(
            f"layer {layer} computes queries, keys and values in one {site.name}, and the adapter "
            "needs a separate query projection; use --format folded"
        )
    return module


def read_peft(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The base model with the adapter loaded and merged by stock peft."""
    from peft import PeftModel

    with quiet():
        return PeftModel.from_pretrained(base, folder).merge_and_unload()
