"""Tiny models, settings and jobs for tests of the conversion to SWAN."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
import transformers as hf
from torch.nn import functional as F

from families import FAMILIES, SHAPE, Family, tokens
from farspan.attention import seam
from farspan.attention.model_facts import most_heads
from farspan.attention.patch import fingerprint
from farspan.attention.probe import probe
from farspan.methods.job import FitJob
from farspan.methods.swan_config import SwanConfig
from farspan.methods.tuning import TuningConfig

LENGTH, WINDOW, TARGET = 32, 8, 64
ROPE = ("rope",) * 4
MORE_FAMILIES = [
    Family(
        "llama-tied",
        lambda: hf.LlamaConfig(**SHAPE, tie_word_embeddings=True),
        ROPE,
        None,
    ),
    Family(  # logits divided by a constant
        "granite", lambda: hf.GraniteConfig(**SHAPE, logits_scaling=3.0), ROPE, None
    ),
    Family("phi", lambda: hf.PhiConfig(**SHAPE), ROPE, None),  # a head with a bias
    Family(
        "mixtral",
        lambda: hf.MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
        ROPE,
        None,
    ),
]
BY_NAME = {family.name: family for family in (*FAMILIES, *MORE_FAMILIES)}
SETTINGS = SwanConfig(window=WINDOW, rotation="none", measured_rows=1, facts=0, sharpen=False)
EVEN = replace(SETTINGS, layers="even")
QUICK = TuningConfig(steps=6, batch=4, micro_batch=2, lr=1e-3, warmup=1)


class WordTokenizer:
    """Every word is a token."""

    def __call__(self, text: str, **_options) -> dict[str, list[int]]:
        return {"input_ids": [3 + zlib.crc32(word.encode()) % 100 for word in text.split()]}


def build(name: str, dtype: torch.dtype = torch.float32):
    """A tiny model whose output depends on far keys and on rotation, as a trained one's does."""
    model = BY_NAME[name].build()
    with torch.no_grad():
        model.model.norm.weight.add_(10)
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "q_norm"):
                layer.self_attn.q_norm.weight.add_(5)
            else:
                layer.self_attn.q_proj.weight.mul_(6)
    return model.to(dtype)


def job_for(model, **changes) -> FitJob:
    layers = probe(model)
    ids = tokens(TARGET, batch=8)
    job = FitJob(
        TARGET,
        LENGTH,
        search=ids,
        choose=ids[:2],
        layers=tuple(layer.index for layer in layers),
        heads=most_heads(layers),
        model=fingerprint(model),
    )
    return replace(job, **changes)


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(tokens(LENGTH), use_cache=False).logits


def snapshot(model) -> dict:
    """Everything that a method must restore."""
    return {
        "logits": logits_of(model),
        "weights": {name: weight.detach().clone() for name, weight in model.named_parameters()},
        "trainable": [weight.requires_grad for weight in model.parameters()],
        "training": model.training,
        "config": model.config.to_dict(),
        "modules": [type(module) for module in model.modules()],
    }


def assert_unchanged(model, before: dict) -> None:
    after = snapshot(model)
    for name, weight in before["weights"].items():
        assert weight.dtype == after["weights"][name].dtype
        assert torch.equal(weight, after["weights"][name]), name
    assert torch.equal(before["logits"], after["logits"])
    assert all(before[key] == after[key] for key in ("trainable", "training", "config", "modules"))
    assert not seam.installed(model)
    assert not seam.attached_states(model)
    assert all(weight.grad is None for weight in model.parameters())
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def plain_kl(student, teacher, ids: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) at each position, [B, T], from whole logits."""
    log_q, log_p = (
        model(ids, use_cache=False).logits.log_softmax(-1) for model in (student, teacher)
    )
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def stop_at(step: int):
    """A progress that kills the run in a step of the distillation, before the step is saved."""

    def progress(label, steps):
        def advance(count=1, note=""):
            advance.count += count
            if label == "distill" and advance.count == step:
                raise KeyboardInterrupt

        advance.count = 0
        return advance

    return progress
