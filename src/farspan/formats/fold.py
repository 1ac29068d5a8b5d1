"""Put constant per-head scales into the weights, exactly, or say why that cannot be.

λ̂_h·q_h can be had by scaling whichever weights make q_h and nothing else: rows of a projection, a part of a
fused one, columns of a Conv1D, entries of a norm that spans all heads. Which they are is found by
differentiating q, head by head, not by knowing the family; and every site is tried out before it is believed.
A norm shared by the heads, or one that cancels any scale put before it, leaves no site, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.scales import Scales
from farspan.errors import FarspanError, ProofError

# How a scale s enters a weight w. Gemma's norms multiply by 1 + w.
RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda w, s: w * s,
    "one-plus": lambda w, s: (1 + w) * s - 1,
}
NOBODY, ALL = -1, -2
TOLERANCE = 1e-5  # of a site tried out in float64, where some families still compute norms and angles in float32


@dataclass(frozen=True)
class Site:
    """Where the scales of one attention module go: for each parameter of one submodule, the dimension along
    which heads lie, and the head that owns each index there, or NOBODY, or ALL of them."""

    name: str  # of the submodule within the attention module, as "q_proj"
    rule: str
    owners: dict[str, tuple[int, Tensor]]

    def scaled(self, parameter: str, weight: Tensor, scale: Tensor) -> Tensor:
        """The weight with scale [heads] put in, computed in at least float32, in the weight's own dtype."""
        dim, owner = self.owners[parameter]
        owner = owner.to(weight.device)
        scale = scale.to(weight.device).detach()
        factor = torch.where(owner >= 0, scale[owner.clamp(min=0)], torch.where(owner == ALL, scale[0], 1.0))
        shape = [1] * weight.ndim
        shape[dim] = -1
        wide = torch.promote_types(weight.dtype, torch.float32)
        folded = RULES[self.rule](weight.to(wide), factor.to(wide).reshape(shape))
        untouched = (owner == NOBODY).reshape(shape)
        return torch.where(untouched, weight, folded.to(weight.dtype))


@dataclass(frozen=True)
class Proof:
    """How a folded model compares with the live one on the same tokens."""

    tokens: int
    max_abs_logit: float
    kl: float  # nats, mean over tokens
    same_argmax: float  # share of tokens
    tolerance: float
    rounding: float = 0.0  # what the model's own arithmetic does to these logits, where that had to be asked

    @property
    def holds(self) -> bool:
        return self.max_abs_logit <= self.tolerance


def fold(model: PreTrainedModel, scales: Scales, tokens: Tensor | None = None) -> Proof:
    """Fold the scales into the model's weights in place, and prove it by the logits of `tokens` [B, T].

    The proof runs the model live and folded. If they differ by more than rounding, the weights are put back and
    a `ProofError` says by how much. The model must not be on the seam.
    """
    if not scales.constant:
        raise FarspanError(
            f"scales with basis {scales.basis!r} grow with the context and no weight can hold that; "
            "keep the patch live (--format live), or fit constant scales (uniform, headscale)"
        )
    if seam.installed(model):
        raise FarspanError("the model is on the seam already; take it off with seam.uninstall before folding")
    seam.check_fit(scales, seam.attention_calls(model))
    tokens = random_tokens(model) if tokens is None else tokens
    live = _live_logits(model, scales, tokens)
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for parameter, folded in _folded_weights(model, scales):
            before.append((parameter, parameter.detach().clone()))
            parameter.data.copy_(folded)
        proof = prove(live, model, tokens)
        if not proof.holds:
            raise ProofError(
                f"the folded model differs from the live one by {proof.max_abs_logit:.2g} in a logit (allowed "
                f"{proof.tolerance:.2g}); the weights were put back, so keep the patch live"
            )
    except BaseException:
        for parameter, original in before:
            parameter.data.copy_(original)
        raise
    return proof


def prove(
    reference: Tensor, model: PreTrainedModel, tokens: Tensor, *, keep: int = 0, dtype: torch.dtype | None = None
) -> Proof:
    """Compare a model with the logits that it should give for these tokens.

    Some models magnify rounding a thousandfold (the NoPE twin does). Where the usual allowance is missed, the model
    runs once more in float64, and four times what its own rounding does is allowed.
    """
    found = logits(model, tokens, keep)
    proof = compare(reference, found, dtype)
    if proof.holds:
        return proof
    exact = logits(copy.deepcopy(model).double(), tokens, keep)
    return compare(reference, found, dtype, rounding=(exact - found).abs().max().item())


def compare(reference: Tensor, candidate: Tensor, dtype: torch.dtype | None = None, rounding: float = 0.0) -> Proof:
    """Two sets of logits [B, T, V] of the same tokens. Of the largest logit (or of 1), fp32 may differ by 2e-5
    and narrower types by eight of their own steps: that is what rounding weights once does over a few layers.

    dtype: that of the candidate's weights, where it is not the logits' own.
    """
    allowed = max(8 * torch.finfo(dtype or reference.dtype).eps, 2e-5)
    reference, candidate = reference.double(), candidate.double()
    p, q = reference.log_softmax(-1), candidate.log_softmax(-1)
    return Proof(
        tokens=reference.shape[0] * reference.shape[1],
        max_abs_logit=(reference - candidate).abs().max().item(),
        kl=(p.exp() * (p - q)).sum(-1).mean().item(),
        same_argmax=(p.argmax(-1) == q.argmax(-1)).float().mean().item(),
        tolerance=max(allowed * max(1.0, reference.abs().max().item()), 4 * rounding),
        rounding=rounding,
    )


def find_sites(model: PreTrainedModel, scales: Scales) -> dict[int, Site | str]:
    """For each layer that the scales name: where they fold, or the reason why they do not.

    Layers of the same build share one search, and each is tried out with its own scales all the same.
    """
    sites: dict[int, Site | str] = {}
    known: dict[tuple[str, bool], Site | str] = {}
    with _capturing(model) as attentions:
        for layer, scale in zip(scales.layers, scales.base.detach(), strict=True):
            attention = attentions[layer]
            build = (repr(attention.module), bool((scale == scale[0]).all()))
            site = known.get(build)
            if site is None or (isinstance(site, Site) and not attention.holds(site, scale)):
                site = attention.search(scale)
            known[build] = sites[layer] = site
    return sites


def _folded_weights(model: PreTrainedModel, scales: Scales) -> Iterator[tuple[nn.Parameter, Tensor]]:
    modules = {call.layer: call.module for call in seam.attention_calls(model)}
    seen: set[nn.Parameter] = set()
    for (layer, site), scale in zip(find_sites(model, scales).items(), scales.base, strict=True):
        if isinstance(site, str):
            raise FarspanError(
                f"the scales of layer {layer} cannot be folded: {site}; keep the patch live (--format live), or use "
                "one scale a layer if a shared norm is the reason"
            )
        submodule = modules[layer].get_submodule(site.name)
        for name in site.owners:
            parameter = submodule.get_parameter(name)
            if parameter in seen:
                raise FarspanError(
                    f"layer {layer} shares {site.name} with another layer, and one weight cannot hold two scales; "
                    "keep the patch live (--format live)"
                )
            seen.add(parameter)
            yield parameter, site.scaled(name, parameter.detach(), scale)


class _Attention:
    """One attention module with the inputs of a real call, to be called again with other weights, in float64."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], made: list[tuple[Tensor, ...]]):
        self.module, self._made = module, made
        self._args, self._kwargs = tree_map(_double, (args, kwargs))
        self._weights = {name: _double(weight.detach()) for name, weight in module.named_parameters()}

    def qkv(self, weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values as they reach the seam under these weights."""
        self._made.clear()
        functional_call(self.module, weights, self._args, self._kwargs)
        return self._made[0]

    def search(self, scale: Tensor) -> Site | str:
        """The first submodule that can hold these scales; those whose heads lie apart come first."""
        reasons = []
        for name, owners in self._candidates():
            if _shared(owners) and not bool((scale == scale[0]).all()):
                reasons.append(f"{name} is shared by all heads")
                continue
            for rule in RULES:
                site = Site(name, rule, owners)
                if self.holds(site, scale):
                    return site
            reasons.append(f"a norm after {name} cancels its scale")
        return " and ".join(reasons) or "no weight makes the queries and nothing else"

    def holds(self, site: Site, scale: Tensor) -> bool:
        """Does the site give λ̂·q, and the same k and v?"""
        weights = dict(self._weights)
        for parameter in site.owners:
            name = f"{site.name}.{parameter}"
            weights[name] = site.scaled(parameter, weights[name], scale)
        q, k, v = self.qkv(self._weights)
        wanted = (q * _double(scale.to(q.device))[:, None, None], k, v)
        return all(
            bool((made - want).abs().max() <= TOLERANCE * want.abs().max())
            for made, want in zip(self.qkv(weights), wanted, strict=True)
        )

    def _candidates(self) -> list[tuple[str, dict[str, tuple[int, Tensor]]]]:
        """Submodules all of whose parameters fall apart into what makes q and what does not."""
        reach = self._reach()
        candidates = []
        for name, submodule in self.module.named_modules():
            parameters = [parameter for parameter, _ in submodule.named_parameters(recurse=False)]
            if not name or not parameters:
                continue
            found = {parameter: _owners(reach[f"{name}.{parameter}"]) for parameter in parameters}
            owners = {parameter: owner for parameter, owner in found.items() if owner is not None}
            if len(owners) == len(found) and any((owner != NOBODY).any() for _, owner in owners.values()):
                candidates.append((name, owners))
        return sorted(candidates, key=lambda candidate: _shared(candidate[1]))

    def _reach(self) -> dict[str, list[Tensor]]:
        """For each parameter: where the derivative of each head's q, and of k and v together, is not zero."""
        with torch.enable_grad():
            weights = {name: weight.clone().requires_grad_() for name, weight in self._weights.items()}
            q, k, v = self.qkv(weights)
            outputs = [*q.unbind(1), torch.cat((k.flatten(), v.flatten()))]
            generator = torch.Generator(device=q.device).manual_seed(0)
            reach: dict[str, list[Tensor]] = {name: [] for name in weights}
            for output in outputs:
                direction = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=q.device)
                gradients = torch.autograd.grad(
                    (output * direction).sum(), list(weights.values()), retain_graph=True, allow_unused=True
                )
                for name, gradient in zip(weights, gradients, strict=True):
                    reach[name].append(torch.zeros_like(weights[name]) if gradient is None else gradient != 0)
        return {name: [reached.bool() for reached in heads] for name, heads in reach.items()}


def _shared(owners: Mapping[str, tuple[int, Tensor]]) -> bool:
    return any(bool((owner == ALL).any()) for _, owner in owners.values())


def _owners(reached: list[Tensor]) -> tuple[int, Tensor] | None:
    """The dimension along which heads lie apart from each other (or all share), and who owns each index.

    `reached` holds a mask of the parameter for each head, and last one for keys and values. None if no
    dimension tells q from k and v.
    """
    for dim in range(reached[0].ndim):
        others = [other for other in range(reached[0].ndim) if other != dim]
        *heads, rest = (mask.any(dim=others) if others else mask for mask in reached)
        by_head = torch.stack(heads)  # [H, indices]
        count = by_head.sum(0)
        single, shared = count == 1, count == len(heads)
        if (rest & (count > 0)).any() or not (single | shared | (count == 0)).all():
            continue
        owner = torch.where(single, by_head.int().argmax(0), torch.where(count == 0, NOBODY, ALL))
        return dim, owner
    return None


@contextmanager
def _capturing(model: PreTrainedModel) -> Iterator[dict[int, _Attention]]:
    """Every attention module of the model, ready to be called again by itself."""
    made: list[tuple[Tensor, ...]] = []

    def backend(module, query, key, value, mask, **kwargs):
        made.append((query, key, value))
        batch, heads, queries, _ = query.shape
        return query.new_zeros(batch, queries, heads, value.shape[-1]), None

    calls = seam.attention_calls(model)
    inputs: dict[nn.Module, tuple[tuple, dict]] = {}
    hooks = [
        call.module.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.update({module: (args, kwargs)}), with_kwargs=True
        )
        for call in calls
    ]
    try:
        with seam.evaluating(model):
            model(input_ids=random_tokens(model)[:, :3], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    with seam.evaluating(model), seam.using(model, backend):
        yield {call.layer: _Attention(call.module, *inputs[call.module], made) for call in calls}


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def random_tokens(model: PreTrainedModel, length: int = 64) -> Tensor:
    vocabulary = model.get_input_embeddings().num_embeddings
    length = min(length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (1, length), generator=generator).to(model.device)


def logits(model: PreTrainedModel, tokens: Tensor, keep: int = 0) -> Tensor:
    """Of these tokens [B, T], or of the last few alone."""
    options = {"logits_to_keep": keep} if keep else {}
    with seam.evaluating(model):
        return model(input_ids=tokens, use_cache=False, **options).logits[:, -keep:]


def _live_logits(model: PreTrainedModel, scales: Scales, tokens: Tensor) -> Tensor:
    seam.install(model, scales)
    try:
        return logits(model, tokens)
    finally:
        seam.uninstall(model)
