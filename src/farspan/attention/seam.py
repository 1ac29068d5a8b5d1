"""The attention seam: one registered attention function through which any Hugging Face model runs.

Only at the seam are queries multiplied by the scale of their head and limited to the window of
their layer, and only there do observers see calls. The model's own backend computes attention: with
nothing attached, outputs are bit-identical. `call.py` has the function; here models get on and off
the seam.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from farspan.attention import guard
from farspan.attention.backends import (
    PREFIX,
    Backend,
    backend_name,
    supported,
    takes_tensor_masks,
)
from farspan.attention.call import STATE_KEY, Call, Observer, SeamState, seam_attention
from farspan.attention.layout import (
    Layout,
    RotationFilter,
    change_rotation,
    length_dependent_rotation,
    step_angles,
)
from farspan.attention.scales import Scales
from farspan.errors import FarspanError, first_line


def install(model: PreTrainedModel, scales: Scales | None = None) -> PreTrainedModel:
    """Route the model's attention through the seam with these scales; a second call replaces them.

    A layout stays as it is.

    >>> install(model, Scales.uniform(1.2, layers=range(22), heads=32))
    """
    calls = attention_calls(model)
    if scales is not None:
        check_scales_fit(scales, calls)
    for call, state in _states(model, calls):
        state.scales = None
        if scales is not None and call.layer in scales.layers:
            row = scales.row(scales.layers.index(call.layer), call.q.shape[1])
            # The row is a view: a trainable table receives the gradient of every layer, and every
            # layer sees its updates. A fixed table is moved to the device once, not at every call.
            state.scales = row if row.base.requires_grad else row.to(call.q.device)
    return model


@contextmanager
def scaled(model: PreTrainedModel, scales: Scales | None) -> Iterator[None]:
    """Run a block with these scales, after which the model has none; without them, as it is."""
    if scales is None:
        yield
        return
    install(model, scales)
    try:
        yield
    finally:
        remove_scales(model)


def _states(model: PreTrainedModel, calls: list[Call]) -> Iterator[tuple[Call, SeamState]]:
    """Put the model on the seam: the state of each attention module, with its recorded call."""
    if not installed(model):
        with eval_mode(model):
            guard.check_unchanged(model, nothing_attached)
        unshare_config(model)
        _set_attention(model, PREFIX + model.config._attn_implementation)
    for call in calls:
        yield call, call.module.__dict__.setdefault(STATE_KEY, SeamState(call.layer))


def install_layout(
    model: PreTrainedModel, layout: Layout | None, without_rotation: Collection[int] = ()
) -> PreTrainedModel:
    """Give the model's attention this layout; None restores its own. Scales stay as they are.

    without_rotation: the layers that do not rotate by themselves, to which `rope` adds rotation.
    `layout_change.set_layout` finds them and checks the outcome.
    """
    calls = attention_calls(model)
    for _, state in _states(model, calls):
        _clear_layout(state)
    if layout is None:
        return model
    filters = _rotation_filters(model, layout, calls)
    for call, state in _states(model, calls):
        entry = layout.layers.get(call.layer)
        if entry is None:
            continue
        state.layout = entry
        state.adds_rotation = entry.rotary and call.layer in without_rotation
        if call.layer in filters:
            state.fixes_dimensions = filters[call.layer].fixes_some
            state.rotation_hook = call.module.register_forward_pre_hook(
                filters[call.layer], with_kwargs=True
            )
    return model


def _rotation_filters(
    model: PreTrainedModel, layout: Layout, calls: list[Call]
) -> dict[int, RotationFilter]:
    """For each layer that rotates less than its module does, what removes the rest."""
    filters = {
        index: RotationFilter() for index, entry in layout.layers.items() if not entry.rotary
    }
    partial = {
        call.module: (call.layer, entry.max_period)
        for call in calls
        if (entry := layout.layers.get(call.layer)) is not None and entry.max_period is not None
    }
    if not partial:
        return filters

    if length_dependent_rotation(model):
        raise FarspanError(
            f"the rotation of {type(model).__name__} changes with the length of the text (dynamic "
            "or longrope), so no dimension has one period; write none, or rope without a period"
        )

    def read_rotation(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        def read(rotation: Any) -> Any:
            if module in partial:
                index, max_period = partial[module]
                filters[index] = RotationFilter(step_angles(rotation), max_period)
            if isinstance(rotation, Tensor):
                return rotation
            return tuple(part.to(model.dtype) for part in rotation)

        return change_rotation(read, args, kwargs)

    with ExitStack() as stack:
        for module in model.modules():
            if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
                # Rounded to bf16, an angle could fall on the other side of the limit.
                stack.callback(module.register_forward_pre_hook(_in_float32).remove)
        for call in calls:
            hook = call.module.register_forward_pre_hook(read_rotation, with_kwargs=True)
            stack.callback(hook.remove)
        run_two_tokens(model)
    for index, _ in partial.values():
        if index not in filters:
            raise FarspanError(
                f"{type(model).__name__} does not hand the rotation to its attention modules, so "
                f"layer {index} cannot become {layout.layers[index]}; use scales (headscale) or "
                "rope parameters (yarn)"
            )
    return filters


def _in_float32(module: nn.Module, args: tuple) -> tuple:
    """A forward pre-hook of a rotary module, whose result has the dtype of its first argument."""
    return (args[0].float(), *args[1:]) if args else args


def _clear_layout(state: SeamState) -> None:
    if state.rotation_hook is not None:
        state.rotation_hook.remove()
    state.layout, state.rotation_hook = None, None
    state.adds_rotation = state.fixes_dimensions = False


def installed_layout(model: PreTrainedModel) -> Layout | None:
    """The layout that the seam gives the model; None if it has its own."""
    layers = {
        state.layer: state.layout for state in attached_states(model) if state.layout is not None
    }
    return Layout(layers) if layers else None


def attached_states(model: nn.Module) -> list[SeamState]:
    return [
        module.__dict__[STATE_KEY] for module in model.modules() if STATE_KEY in module.__dict__
    ]


def adds_rotation(module: nn.Module) -> bool:
    """Whether the seam adds rotation to an attention module that has none."""
    state = module.__dict__.get(STATE_KEY)
    return state is not None and state.adds_rotation


def window_of(module: nn.Module) -> int | None:
    """The window that the seam gives an attention module."""
    state = module.__dict__.get(STATE_KEY)
    return None if state is None or state.layout is None else state.layout.window


def remove_scales(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the scales, and take the model off the seam if nothing else is attached."""
    for state in attached_states(model):
        state.scales = None
    return _uninstall_unused(model)


def remove_layout(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the layout, and take the model off the seam if nothing else is attached."""
    for state in attached_states(model):
        _clear_layout(state)
    return _uninstall_unused(model)


def _uninstall_unused(model: PreTrainedModel) -> PreTrainedModel:
    in_use = any(state.in_use for state in attached_states(model))
    return model if in_use else uninstall(model)


def uninstall(model: PreTrainedModel) -> PreTrainedModel:
    """Take the model off the seam and restore its state dict, config and outputs."""
    for module in model.modules():
        if (state := module.__dict__.pop(STATE_KEY, None)) is not None:
            _clear_layout(state)
    if installed(model):
        _set_attention(model, backend_name(model.config))
    return model


def installed(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation.startswith(PREFIX)


@contextmanager
def observing(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Show every attention call in this block to an observer, detached from the graph."""
    with attached(model) as states:
        for state in states:
            state.observers += (observer,)
        try:
            yield
        finally:
            for state in states:
                last = len(state.observers) - 1 - state.observers[::-1].index(observer)
                state.observers = state.observers[:last] + state.observers[last + 1 :]


@contextmanager
def using(model: PreTrainedModel, backend: Backend) -> Iterator[None]:
    """Compute attention by this function instead of the model's own backend in this block."""
    with attached(model) as states:
        before = [state.backend for state in states]
        for state in states:
            state.backend = backend
        try:
            yield
        finally:
            for state, previous in zip(states, before, strict=True):
                state.backend = previous


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Stop gradients to all weights in this block, so that only trainable scales learn."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[list[SeamState]]:
    """The states of a model on the seam.

    A model that was installed for this block is uninstalled at its end, unless scales, observers,
    a backend or a layout were attached in the meantime."""
    was_installed = installed(model)
    if not was_installed:
        install(model)
    states = attached_states(model)
    try:
        yield states
    finally:
        if not was_installed and not any(state.in_use for state in states):
            uninstall(model)


def attention_calls(model: PreTrainedModel) -> list[Call]:
    """Every attention call of one forward pass over two tokens, with its module and shapes.

    Module names are not reliable: hybrids skip layers, and families name modules differently.
    """
    calls: list[Call] = []
    recorder = SeamState(layer=-1, observers=(calls.append,))
    with _on_seam(model), _shared_state(model, recorder):
        run_two_tokens(model)
    if not calls:
        raise FarspanError(
            f"{type(model).__name__} has no softmax attention that transformers can redirect, so "
            "there is nothing to scale or observe; choose a model with attention layers"
        )
    _check_dropped_terms(model, calls)
    # Some families call attention twice in a layer: keep the first call of each module.
    first_calls = list({call.module: call for call in reversed(calls)}.values())[::-1]
    indices = [int(getattr(call.module, "layer_idx", None) or 0) for call in first_calls]
    if min(indices) < 0 or len(set(indices)) < len(indices):  # missing or not unique
        indices = list(range(len(first_calls)))
    return [replace(call, layer=index) for call, index in zip(first_calls, indices, strict=True)]


def two_tokens(model: PreTrainedModel) -> Tensor:
    vocabulary = model.get_input_embeddings().num_embeddings
    return torch.arange(2, device=model.device)[None] % vocabulary


def run_two_tokens(model: PreTrainedModel) -> None:
    """A forward pass for hooks and observers."""
    try:
        with eval_mode(model):
            model(input_ids=two_tokens(model), use_cache=False)
    except FarspanError:
        raise
    except Exception as error:
        raise FarspanError(
            f"{type(model).__name__} does not run on text alone ({type(error).__name__}: "
            f"{first_line(error)}), so its attention cannot be observed; give a causal language "
            "model"
        ) from error


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode for a block: no dropout, no gradient, no compilation."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _shared_state(model: PreTrainedModel, state: SeamState | None) -> Iterator[None]:
    """Give every module this state for a block; only attention modules read it."""
    before = {module: module.__dict__.get(STATE_KEY) for module in model.modules()}
    for module in before:
        module.__dict__[STATE_KEY] = state
    try:
        yield
    finally:
        for module, previous in before.items():
            del module.__dict__[STATE_KEY]
            if previous is not None:
                module.__dict__[STATE_KEY] = previous


@contextmanager
def _on_seam(model: PreTrainedModel) -> Iterator[None]:
    """Route attention through the seam for a block, without attaching any state."""
    if installed(model):
        yield
        return
    _check_interface(model)
    before = model.config._attn_implementation
    _set_attention(model, PREFIX + before)
    try:
        yield
    finally:
        _set_attention(model, before)


@contextmanager
def nothing_attached(model: PreTrainedModel) -> Iterator[None]:
    """The seam with no scales, layout or observers, which must change nothing."""
    with _on_seam(model), _shared_state(model, None):
        yield


def _set_attention(model: PreTrainedModel, name: str) -> None:
    if name.startswith(PREFIX):
        AttentionInterface.register(name, seam_attention)
        # Without a mask function under the same name transformers silently passes no mask, and
        # padding, windows and static caches would all be wrong.
        mask_function = ALL_MASK_ATTENTION_FUNCTIONS[name.removeprefix(PREFIX)]
        AttentionMaskInterface.register(name, mask_function)
    if is_flash_attention_requested(requested_attention_implementation=name):
        model.config._attn_implementation = name  # else transformers loads kernels of this name
        return
    try:
        model.set_attn_implementation(name)
    except ValueError as error:  # transformers refuses this backend for this model
        raise FarspanError(
            f"{type(model).__name__} cannot run on attention {name.removeprefix(PREFIX)!r}: sinks "
            'or a soft cap would be dropped; load it with attn_implementation="eager"'
        ) from error


def unshare_config(model: PreTrainedModel) -> None:
    """Give the model a copy of its config: an attention name set in a config object that two models
    share would change both."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in copies:
            module.config = copies[id(config)]


def _check_interface(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise FarspanError(
            f"a {type(model).__name__} is not a transformers model; "
            "load it with farspan.load or AutoModelForCausalLM"
        )
    if not model._can_set_attn_implementation():
        raise FarspanError(
            f"{type(model).__name__} does not call transformers' attention interface, so its "
            "attention cannot be scaled or observed; evaluate it as it is, or convert it to a "
            "family that does (Llama, Mistral, …)"
        )
    name = model.config._attn_implementation
    if not supported(name):
        raise FarspanError(
            f"{type(model).__name__} runs on attention {name!r}, whose mask does not show how many "
            'keys a query sees; load it with attn_implementation="sdpa"'
        )


def _check_dropped_terms(model: PreTrainedModel, calls: list[Call]) -> None:
    """Refuse sinks and soft caps on SDPA, which silently drops them."""
    if backend_name(model.config) == "eager" or not takes_tensor_masks(model):
        return
    for call in calls:
        for option, term in (("s_aux", "attention sinks"), ("softcap", "a soft cap")):
            if call.options.get(option) is not None:
                raise FarspanError(
                    f"{type(model).__name__} has {term}, which SDPA drops; "
                    'load it with attn_implementation="eager"'
                )


def check_scales_fit(scales: Scales, calls: list[Call]) -> None:
    """Refuse invalid scales, and scales whose layers or heads the model of these calls lacks."""
    scales.check(target_length=2)
    heads = {call.layer: call.q.shape[1] for call in calls}
    unknown = [layer for layer in scales.layers if layer not in heads]
    if unknown:
        raise FarspanError(
            f"the scales name layer {unknown[0]}, but this model has attention in layers "
            f"{sorted(heads)}; "
            "use scales that were fitted on this model"
        )
    most = max(heads[layer] for layer in scales.layers or heads)
    if scales.heads not in (most, max(heads.values())):
        layer = next(layer for layer in scales.layers or heads if heads[layer] == most)
        raise FarspanError(
            f"the scales have {scales.heads} heads, but layer {layer} has {most}; "
            "use scales that were fitted on this model"
        )
