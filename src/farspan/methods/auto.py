"""The method `auto`: which methods it tries on a model, and which of them it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.layout import LENGTH_DEPENDENT
from farspan.attention.layout_change import set_layout
from farspan.attention.patch import Patch
from farspan.attention.probe import Layer
from farspan.batching import out_of_memory
from farspan.device_map import is_placed
from farspan.errors import FarspanError
from farspan.loading import is_quantized
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.job import FitJob, loss_by_position, lowest_loss
from farspan.methods.layer_costs import retrieval_loss
from farspan.methods.registry import METHODS
from farspan.methods.rope import existing_rope_scaling, rope_override
from farspan.methods.tuning import weights_override
from farspan.train.sharding import processes

SWAN_FACTOR = 4  # auto tries swan for targets beyond this multiple of the train length
MAX_LOST = 0.1  # nats a repeated token that auto lets swan lose inside the train length


def candidate_methods(
    names: Sequence[str], layers: Sequence[Layer], model: PreTrainedModel, job: FitJob
) -> list[str]:
    """The methods themselves, or those among which auto chooses."""
    if list(names) != ["auto"]:
        return list(names)
    if job.start_name:  # a patch
        constant = job.start is None or job.start.constant
        # headlog first: it refuses some scales, which should not take a search to learn.
        return ["headlog", "headscale"] if constant else ["headlog"]
    rotary = [layer for layer in layers if layer.position == "rope"]
    scaling = existing_rope_scaling(model.config)
    scaled = scaling is not None
    candidates = ["uniform", "headscale", "headlog"]
    if len(rotary) == len(layers):
        candidates = ["ntk", "uniform"] if scaled else ["ntk", "yarn"]
    elif "+" in (first := recommended_method(layers, scaled) or ""):  # SmolLM3
        candidates = [first.partition("+")[0], "headlog", first]
    far = job.target > SWAN_FACTOR * job.train_length
    # elsewhere training takes hours, or weights do not fit or are no numbers
    on_gpu = model.device.type == "cuda" and not is_placed(model) and not is_quantized(model)
    plain = all(layer.position in ("rope", "none") and not layer.window for layer in layers)
    plain = plain and scaling not in LENGTH_DEPENDENT
    return [*candidates, "swan"] if far and on_gpu and plain else candidates


def recommended_method(layers: Sequence[Any], scaled: bool) -> str | None:
    """The method to try first, as the table of docs/extend.md has it; None if there is none.

    layers: anything with a position and a window.
    scaled: whether the config scales the rotation already.
    """
    positions = {layer.position for layer in layers}
    if not positions or not positions <= {"rope", "none"}:
        return None
    rescaling = "ntk" if scaled else "yarn"
    if positions == {"rope"}:
        return rescaling
    if positions == {"none"}:
        return "headscale"
    windowed = all(layer.window for layer in layers if layer.position == "rope")
    return "headlog" if windowed else f"{rescaling}+headscale"


def fit_best(
    model: PreTrainedModel, layers: Sequence[Layer], job: FitJob, config: ExtendConfig
) -> tuple[Patch, tuple[str, ...]]:
    """Of the candidates, the method with the lowest loss on the choose split, not yet applied."""
    patches: dict[str, Patch] = {}
    details: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for name in candidate_methods(["auto"], layers, model, job):
        details[name] = {}
        own_job = replace(job, details=details[name])
        try:
            patches[name] = _fit_in_turn(model, own_job, config, name.split("+"))
        except FarspanError as error:
            if name != "swan" or error.exit_code != FarspanError.exit_code:
                raise
            notes.append(f"auto left out swan, which failed: {error}")
        except RuntimeError as error:
            single = processes().num_processes == 1  # others would wait for its gradients
            if name != "swan" or not out_of_memory(error) or not single:
                raise
            notes.append(
                "auto left out swan, which ran out of memory; try tuning.rank=64, which trains "
                "fewer weights, or shorter windows (swan.length)"
            )
        if name == "swan" and torch.cuda.is_available():
            torch.cuda.empty_cache()  # here an error is gone, and with it what its frames kept
        if name == "uniform" and config.search.steps and not config.search.init:
            # The searches of Wang 2024 start from it.
            scales = patches[name].scales
            assert scales is not None
            start = config.search.allowed(float(scales.base[0, 0]))
            config = replace(config, search=replace(config.search, init=start))
    if "swan" in patches and (lost := _lost_retrieval(model, patches["swan"], job)) > MAX_LOST:
        notes.append(
            f"auto rejected swan: inside the train length its loss on repeated tokens is "
            f"{lost:.3f} nats higher than that of the base, more than {MAX_LOST}; try more "
            "swan.tokens"
        )
        del patches["swan"]
    advance, losses = job.progress("compare", len(patches)), {}
    for name, patch in patches.items():
        losses[name] = _patched_loss(model, patch, job.choose)
        advance(1, f"{name}: loss {losses[name]:.4f}")
    best = lowest_loss(losses)
    others = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != best)
    job.details.update(details[best])
    compared = (
        f", against {others}" if others else ", the only method that starts from growing scales"
    )
    notes.append(f"auto chose {best}: loss {losses[best]:.4f} on the choose split{compared}")
    return patches[best], tuple(notes)


def _fit_in_turn(
    model: PreTrainedModel, job: FitJob, config: ExtendConfig, names: Sequence[str]
) -> Patch:
    """Fit each method on the model that those before it patched; the model is left as it was."""
    patch = METHODS[names[0]](model, job, config)
    for name in names[1:]:
        with _patched(model, patch):
            part = METHODS[name](model, job, config)
        patch = patch.then(part)
    return patch


def _patched_loss(model: PreTrainedModel, patch: Patch, windows: Tensor) -> float:
    """The loss with a patch; the model is left as it was."""
    with _patched(model, patch):
        return float(loss_by_position(model, windows).mean())


def _lost_retrieval(model: PreTrainedModel, patch: Patch, job: FitJob) -> float:
    """How much worse the patched model predicts what stands twice inside the train length."""
    before = retrieval_loss(model, job)
    with _patched(model, patch):
        return retrieval_loss(model, job) - before


@contextmanager
def _patched(model: PreTrainedModel, patch: Patch) -> Iterator[None]:
    """Run a block with all parts of a patch."""
    with ExitStack() as stack:
        if patch.rope is not None:
            stack.enter_context(rope_override(model, dict(patch.rope)))
        if patch.layout is not None:
            set_layout(model, patch.layout)
            stack.callback(seam.remove_layout, model)
        stack.enter_context(seam.scaled(model, patch.scales))
        stack.enter_context(weights_override(model, patch.weights or {}))
        yield
