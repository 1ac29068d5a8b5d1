"""The seam: one registered attention function through which any Hugging Face model runs.

At the seam, and nowhere else, queries are multiplied by their head's scale, and observers see each call. The
work itself is done by the model's own backend: with nothing attached, a model runs bit for bit as before.

State is a plain object in the `__dict__` of each attention module: no parameter, no buffer, so nothing leaks
into a saved checkpoint, and a compiled layer reads the same attribute in every layer instead of indexing a
table, which would make one graph a layer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farspan.attention.scales import Scales
from farspan.errors import FarspanError

PREFIX = "farspan_seam_"
_KEY = "_farspan_seam"

Backend = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call as it reaches the backend: what an observer sees."""

    layer: int
    module: nn.Module
    q: Tensor  # [B, H, Q, D], already scaled
    k: Tensor  # [B, KV, K, D], after rotation and cache
    v: Tensor
    mask: Tensor | None  # boolean or additive; None is causal
    scaling: float  # multiplies q·k
    options: dict[str, Any]  # the rest: bias, sliding_window, s_aux, softcap, …

    @property
    def n(self) -> Tensor:
        """How many keys each query sees, [B or 1, Q]."""
        return visible_keys(self.q, self.k, self.mask)


Observer = Callable[[Call], None]


@dataclass
class _State:
    """What the seam holds for one attention module."""

    layer: int
    scales: Scales | None = None  # one row
    backend: Backend | None = None  # instead of the model's own
    observers: tuple[Observer, ...] = ()


def install(model: PreTrainedModel, scales: Scales | None = None) -> PreTrainedModel:
    """Put the model on the seam, with these scales; a second call replaces the scales.

    >>> install(model, Scales.uniform(1.2, layers=range(22), heads=32))
    """
    calls = attention_calls(model)
    if scales is not None:
        check_fit(scales, calls)
    if not installed(model):
        own_config(model)
        _switch(model, PREFIX + model.config._attn_implementation)
    for call in calls:
        state = call.module.__dict__.setdefault(_KEY, _State(call.layer))
        state.scales = None
        if scales is not None and call.layer in scales.layers:
            row = scales.row(scales.layers.index(call.layer))
            # The row is a view: a trainable table receives the gradient of every layer and is seen as it moves. What
            # stands still goes to the device once, and not at every call.
            state.scales = row if row.base.requires_grad else row.to(call.q.device)
    return model


def uninstall(model: PreTrainedModel) -> PreTrainedModel:
    """Take the model off the seam. State dict, config and outputs are as they were."""
    for module in model.modules():
        module.__dict__.pop(_KEY, None)
    if installed(model):
        _switch(model, model.config._attn_implementation.removeprefix(PREFIX))
    return model


def installed(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation.startswith(PREFIX)


@contextmanager
def observing(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Let an observer see every attention call in this block. It changes nothing and gets no gradient."""
    with _attached(model) as states:
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
    """Compute attention by this function instead of the model's own in this block."""
    with _attached(model) as states:
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
    """Stop gradients to all weights in this block: only trainable scales learn."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def _attached(model: PreTrainedModel) -> Iterator[list[_State]]:
    """The states of a model on the seam; a model that was put there for this block alone leaves it again, unless
    something else has come to need it."""
    here = installed(model)
    if not here:
        install(model)
    states = [module.__dict__[_KEY] for module in model.modules() if _KEY in module.__dict__]
    try:
        yield states
    finally:
        if not here and not any(state.scales or state.observers or state.backend for state in states):
            uninstall(model)


def attention_calls(model: PreTrainedModel) -> list[Call]:
    """Every attention call of one forward pass over two tokens: which modules attend, and in what shapes.

    Behaviour tells this where names do not: hybrids skip layers, and families name their modules as they like.
    """
    calls: list[Call] = []
    recorder = _State(layer=-1, observers=(calls.append,))
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(2, device=model.device)[None] % vocabulary
    with _seam_name(model), _state_everywhere(model, recorder), evaluating(model):
        model(input_ids=ids, use_cache=False)
    if not calls:
        raise FarspanError(
            f"no attention call of {type(model).__name__} reached the seam: it has no softmax attention that "
            "transformers can redirect, so there is nothing to scale"
        )
    _refuse_dropped_terms(model, calls)
    first = list({call.module: call for call in reversed(calls)}.values())[::-1]  # some call twice a layer
    numbers = [int(getattr(call.module, "layer_idx", None) or 0) for call in first]
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):  # not told, or not told apart
        numbers = list(range(len(first)))
    return [replace(call, layer=number) for call, number in zip(first, numbers, strict=True)]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """A look at the model that leaves no mark: no dropout, no gradient, no compilation."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _state_everywhere(model: PreTrainedModel, state: _State) -> Iterator[None]:
    """Give every module this state, for only the ones that attend will read it."""
    before = {module: module.__dict__.get(_KEY) for module in model.modules()}
    for module in before:
        module.__dict__[_KEY] = state
    try:
        yield
    finally:
        for module, previous in before.items():
            del module.__dict__[_KEY]
            if previous is not None:
                module.__dict__[_KEY] = previous


@contextmanager
def _seam_name(model: PreTrainedModel) -> Iterator[None]:
    """The model on the seam's name for this block, without state."""
    if installed(model):
        yield
        return
    _refuse_off_interface(model)
    own = model.config._attn_implementation
    _switch(model, PREFIX + own)
    try:
        yield
    finally:
        _switch(model, own)


def _switch(model: PreTrainedModel, name: str) -> None:
    if name.startswith(PREFIX):
        own = name.removeprefix(PREFIX)
        AttentionInterface.register(name, attend_at_seam)
        # Without a mask function under the same name the mask is silently None: padding, windows and static
        # caches would all go wrong.
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    try:
        model.set_attn_implementation(name)
    except ValueError as error:  # transformers' own word that this model cannot run on that backend
        raise FarspanError(
            f"{type(model).__name__} cannot run on attention {name.removeprefix(PREFIX)!r}: sinks or a soft cap would "
            'be dropped; load it with attn_implementation="eager"'
        ) from error


def own_config(model: PreTrainedModel) -> None:
    """Give the model its own copy of its config: the attention name in a config object that two models share
    would reach both."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in copies:
            module.config = copies[id(config)]


def _refuse_off_interface(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise FarspanError(
            f"a {type(model).__name__} is not a transformers model; load it with farspan.load or AutoModelForCausalLM"
        )
    if not model._can_set_attn_implementation():
        raise FarspanError(
            f"{type(model).__name__} does not call transformers' attention interface, so its attention cannot be "
            "scaled or observed; evaluate it as it is, or convert it to a family that does (Llama, Mistral, …)"
        )
    name = model.config._attn_implementation
    if name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys() or ALL_MASK_ATTENTION_FUNCTIONS[name] not in (
        sdpa_mask,
        eager_mask,
    ):
        raise FarspanError(
            f"{type(model).__name__} runs on attention {name!r}, whose mask does not tell how many keys a query "
            'sees; load it with attn_implementation="sdpa"'
        )


def _refuse_dropped_terms(model: PreTrainedModel, calls: list[Call]) -> None:
    """SDPA has no place for sinks or soft caps and would drop them without a word."""
    if model.config._attn_implementation.removeprefix(PREFIX) == "eager":
        return
    for call in calls:
        for term in ("s_aux", "softcap"):
            if call.options.get(term) is not None:
                raise FarspanError(
                    f"{type(model).__name__} has {'attention sinks' if term == 's_aux' else 'a soft cap'}, which "
                    'SDPA drops; load it with attn_implementation="eager"'
                )


def check_fit(scales: Scales, calls: list[Call]) -> None:
    """Refuse scales that are no scales, or whose layers or heads are not those of the model that made these calls."""
    scales.check(target_length=2)
    heads = {call.layer: call.q.shape[1] for call in calls}
    unknown = [layer for layer in scales.layers if layer not in heads]
    if unknown:
        raise FarspanError(
            f"the scales name layer {unknown[0]} and this model attends in layers {sorted(heads)}; "
            "use scales that were fitted on this model"
        )
    for layer in scales.layers:
        if scales.heads != heads[layer]:
            raise FarspanError(
                f"the scales have {scales.heads} heads and layer {layer} has {heads[layer]}; "
                "use scales that were fitted on this model"
            )


def visible_keys(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """How many keys each query sees, [B or 1, Q], from the very mask that the backend receives.

    Position ids would be wrong under padding, sliding caches and packing; the mask is right in all of them.
    """
    queries, keys = q.shape[2], k.shape[2]
    if mask is None:  # causal; a single query sees all that the cache holds
        first = keys if queries == 1 else 1
        return torch.arange(first, first + queries, device=q.device)[None]
    return shown(mask)[:, 0].sum(dim=-1)


def shown(mask: Tensor) -> Tensor:
    """Which keys a mask shows, as booleans, be it boolean or additive."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def attend_at_seam(module: nn.Module, query, key, value, attention_mask, **kwargs):
    """The registered function: scale the queries, show the call, let the model's own backend compute."""
    state = module.__dict__.get(_KEY)
    backend = own_backend(module)
    if state is None:
        return backend(module, query, key, value, attention_mask, **kwargs)
    if state.scales is not None:
        query = scale_queries(query, key, attention_mask, state.scales)
    if state.observers:
        _show(state, module, query, key, value, attention_mask, kwargs)
    return (state.backend or backend)(module, query, key, value, attention_mask, **kwargs)


def scale_queries(q: Tensor, k: Tensor, mask: Tensor | None, scales: Scales) -> Tensor:
    """λ̂(n)·q for one layer's scales, multiplied in float32 and rounded once."""
    scales = scales.to(q.device)
    if scales.constant:
        scale = scales.base[0][:, None]  # [H, 1]
    else:
        scale = scales.at(visible_keys(q, k, mask))[0].transpose(0, 1)  # [B or 1, H, Q]
    return (q * scale[..., None]).to(q.dtype)


def own_backend(module: Any) -> Backend:
    """The function that the model would call without the seam."""
    name = module.config._attn_implementation.removeprefix(PREFIX)
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    for kind in type(module).__mro__:  # by convention each family's own function, beside its attention class
        if own := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            return own
    raise FarspanError(
        f"{type(module).__name__} runs on eager attention but has no eager_attention_forward beside it; "
        'load the model with attn_implementation="sdpa"'
    )


@torch.compiler.disable
def _show(state: _State, module, query, key, value, mask, kwargs) -> None:
    # Inside a backward pass this is gradient checkpointing computing the call again: it was seen already.
    if torch._C._current_graph_task_id() != -1:
        return
    call = as_call(state.layer, module, query, key, value, mask, kwargs)
    with torch.no_grad():
        for observer in state.observers:
            observer(call)


def as_call(layer: int, module, query: Tensor, key: Tensor, value: Tensor, mask, kwargs: dict[str, Any]) -> Call:
    """The arguments of an attention function as one value."""
    options = dict(kwargs)
    scaling = options.pop("scaling", None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return Call(layer, module, query.detach(), key.detach(), value.detach(), mask, scaling, options)
