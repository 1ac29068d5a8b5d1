"""Fold constant per-head scales into the weights, exactly, or give the reason why that fails.

λ̂_h·q_h is obtained by scaling the weights that produce q_h and nothing else: rows of a projection,
part of a fused one, columns of a Conv1D, or entries of a norm that spans all heads. Differentiating
q head by head finds them, without knowledge of the model family, and every candidate is tried out
before it is used. A norm that the heads share, or one that cancels any scale before it, leaves no
candidate, and folding is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.model_facts import config_train_length
from farspan.attention.scales import Scales
from farspan.errors import FarspanError, ProofError, first_line

# Ways to put a scale s into a weight w. Gemma's norms multiply by 1 + w.
RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda w, s: w * s,
    "one-plus": lambda w, s: (1 + w) * s - 1,
}
NO_HEAD, ALL_HEADS = -1, -2
# For a site tried out in float64, in which some families still compute norms and angles in float32.
TOLERANCE = 1e-5
WIDER = 10  # times the usual tolerance of logits, where float64 cannot show the rounding error


@dataclass(frozen=True)
class Site:
    """Where the scales of one attention module go.

    owners: for each parameter of the submodule, the dimension that is divided among heads, and for
        each index of that dimension its head, NO_HEAD or ALL_HEADS.
    """

    name: str  # of the submodule in the attention module, such as "q_proj"
    rule: str
    owners: dict[str, tuple[int, Tensor]]

    def scaled(self, parameter: str, weight: Tensor, scale: Tensor) -> Tensor:
        """The weight times scale [heads], computed in at least float32, in the weight's dtype."""
        dim, owner = self.owners[parameter]
        owner = owner.to(weight.device)
        scale = scale.to(weight.device).detach()
        factor = torch.where(
            owner >= 0, scale[owner.clamp(min=0)], torch.where(owner == ALL_HEADS, scale[0], 1.0)
        )
        shape = [1] * weight.ndim
        shape[dim] = -1
        wide = torch.promote_types(weight.dtype, torch.float32)
        folded = RULES[self.rule](weight.to(wide), factor.to(wide).reshape(shape))
        unscaled = (owner == NO_HEAD).reshape(shape)
        return torch.where(unscaled, weight, folded.to(weight.dtype))


@dataclass(frozen=True)
class LogitProof:
    """The difference between a model and its reference on the same tokens."""

    tokens: int
    max_abs_logit: float
    kl: float  # nats, mean over tokens
    same_argmax: float  # share of tokens
    tolerance: float
    rounding: float = 0.0  # error of float32 itself in these logits; measured only if needed
    note: str | None = None  # why the tolerance is wider than usual

    @property
    def holds(self) -> bool:
        return self.max_abs_logit <= self.tolerance


def fold(model: PreTrainedModel, scales: Scales, tokens: Tensor | None = None) -> LogitProof:
    """Fold the scales into the model's weights in place, and prove it on `tokens` [B, T].

    The proof compares the logits with live and with folded scales. If they differ by more than
    rounding, the weights are restored and a `ProofError` names the difference. The model must not
    be on the seam.
    """
    if not scales.constant:
        raise FarspanError(
            f"scales with basis {scales.basis!r} grow with the context, which weights cannot "
            "express; keep the patch live (--format live), or fit constant scales (uniform, "
            "headscale)"
        )
    if seam.installed(model):
        raise FarspanError("the model is on the seam already; call seam.uninstall before folding")
    seam.check_scales_fit(scales, seam.attention_calls(model))
    tokens = random_tokens(model) if tokens is None else tokens
    with seam.scaled(model, scales):
        live = logits(model, tokens)
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for parameter, folded in _folded_weights(model, scales):
            before.append((parameter, parameter.detach().clone()))
            parameter.data.copy_(folded)
        proof = compare_logits(live, model, tokens)
        if not proof.holds:
            raise ProofError(
                f"the folded model differs from the live one by {proof.max_abs_logit:.2g} in a "
                f"logit (allowed {proof.tolerance:.2g}), so the weights were restored; keep the "
                "patch live"
            )
    except BaseException:
        for parameter, original in before:
            parameter.data.copy_(original)
        raise
    return proof


def compare_logits(
    reference: Tensor,
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    keep: int = 0,
    dtype: torch.dtype | None = None,
) -> LogitProof:
    """Compare a model's logits for these tokens with reference logits.

    Some models magnify rounding a thousandfold (nope-twin does). Where the usual tolerance is
    missed, the model also runs in float64, and four times its own rounding error is allowed. A
    model with a kernel that has no float64 gets a wider tolerance, and the proof says so.
    """
    candidate = logits(model, tokens, keep)
    proof = _compare(reference, candidate, dtype)
    if proof.holds:
        return proof
    try:
        exact = _float64_logits(model, tokens, keep)
    except (RuntimeError, NotImplementedError) as error:
        note = (
            f"the model cannot run in float64 ({first_line(error)}), so {WIDER} times the usual "
            "tolerance is allowed"
        )
        return replace(proof, tolerance=WIDER * proof.tolerance, note=note)
    rounding = (exact - candidate).abs().max().item()
    return _compare(reference, candidate, dtype, rounding=rounding)


def _float64_logits(model: PreTrainedModel, tokens: Tensor, keep: int) -> Tensor:
    exact = copy.deepcopy(model).double()
    if getattr(exact.config, "_experts_implementation", None) not in (None, "eager"):
        exact.set_experts_implementation("eager")  # grouped products have no float64
    return logits(exact, tokens, keep)


def _compare(
    reference: Tensor, candidate: Tensor, dtype: torch.dtype | None = None, rounding: float = 0.0
) -> LogitProof:
    """Compare two sets of logits [B, T, V] of the same tokens.

    Relative to the largest logit (or to 1), fp32 may differ by 2e-5 and narrower types by eight of
    their steps: that is the effect of rounding the weights once over a few layers.

    dtype: of the candidate's weights, if it is not that of the logits.
    """
    allowed = max(8 * torch.finfo(dtype or reference.dtype).eps, 2e-5)
    reference, candidate = reference.double(), candidate.double()
    p, q = reference.log_softmax(-1), candidate.log_softmax(-1)
    return LogitProof(
        tokens=reference.shape[0] * reference.shape[1],
        max_abs_logit=(reference - candidate).abs().max().item(),
        kl=(p.exp() * (p - q)).sum(-1).mean().item(),
        same_argmax=(p.argmax(-1) == q.argmax(-1)).float().mean().item(),
        tolerance=max(allowed * max(1.0, reference.abs().max().item()), 4 * rounding),
        rounding=rounding,
    )


def find_sites(model: PreTrainedModel, scales: Scales) -> dict[int, Site | str]:
    """For each scaled layer: where its scales fold, or the reason why they do not.

    Layers with equal modules share one search, but each is tried out with its own scales.
    """
    sites: dict[int, Site | str] = {}
    sites_by_kind: dict[tuple[str, bool], Site | str] = {}
    with _capturing(model) as attentions:
        for layer, scale in zip(scales.layers, scales.base.detach(), strict=True):
            attention = attentions[layer]
            scale = scale[: attention.heads]
            kind = (repr(attention.module), bool((scale == scale[0]).all()))
            site = sites_by_kind.get(kind)
            if site is None or (isinstance(site, Site) and not attention.holds(site, scale)):
                site = attention.search(scale)
            sites_by_kind[kind] = sites[layer] = site
    return sites


def _folded_weights(
    model: PreTrainedModel, scales: Scales
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    modules = {call.layer: call.module for call in seam.attention_calls(model)}
    seen: set[nn.Parameter] = set()
    for (layer, site), scale in zip(find_sites(model, scales).items(), scales.base, strict=True):
        if isinstance(site, str):
            raise FarspanError(
                f"the scales of layer {layer} cannot be folded: {site}; keep the patch live "
                "(--format live), or use one scale per layer if a shared norm is the reason"
            )
        submodule = modules[layer].get_submodule(site.name)
        for name in site.owners:
            parameter = submodule.get_parameter(name)
            if parameter in seen:
                raise FarspanError(
                    f"layer {layer} shares {site.name} with another layer, and one weight cannot "
                    "hold two scales; keep the patch live (--format live)"
                )
            seen.add(parameter)
            yield parameter, site.scaled(name, parameter.detach(), scale)


class _Attention:
    """An attention module and the inputs of a real call, to rerun in float64 with any weights."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        captured: list[tuple[Tensor, ...]],
        heads: int,
    ):
        self.module, self._captured, self.heads = module, captured, heads
        self._args, self._kwargs = tree_map(_double, (args, kwargs))

    def weights(self) -> dict[str, Tensor]:
        """In float64, made anew: those of every layer at once would take the memory of the model
        twice."""
        return {name: _double(weight.detach()) for name, weight in self.module.named_parameters()}

    def qkv(self, weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values as they reach the seam with these weights."""
        self._captured.clear()
        functional_call(self.module, weights, self._args, self._kwargs)
        return self._captured[0]

    def search(self, scale: Tensor) -> Site | str:
        """The first submodule that can hold these scales; those with separate heads come first."""
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
        return " and ".join(reasons) or "no weight produces only the queries"

    def holds(self, site: Site, scale: Tensor) -> bool:
        """Whether the site gives λ̂·q, and the same k and v."""
        weights = self.weights()
        q, k, v = self.qkv(weights)
        for parameter in site.owners:
            name = f"{site.name}.{parameter}"
            weights[name] = site.scaled(parameter, weights[name], scale)
        expected = (q * _double(scale.to(q.device))[:, None, None], k, v)
        return all(
            bool((actual - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
            for actual, wanted in zip(self.qkv(weights), expected, strict=True)
        )

    def _candidates(self) -> list[tuple[str, dict[str, tuple[int, Tensor]]]]:
        """Submodules whose parameters divide into parts that affect q and parts that do not."""
        affected = self._affected_entries()
        candidates = []
        for name, submodule in self.module.named_modules():
            parameters = [parameter for parameter, _ in submodule.named_parameters(recurse=False)]
            if not name or not parameters:
                continue
            all_owners = {key: _find_owners(affected[f"{name}.{key}"]) for key in parameters}
            owners = {key: owner for key, owner in all_owners.items() if owner is not None}
            if len(owners) == len(parameters) and any(
                (owner != NO_HEAD).any() for _, owner in owners.values()
            ):
                candidates.append((name, owners))
        return sorted(candidates, key=lambda candidate: _shared(candidate[1]))

    def _affected_entries(self) -> dict[str, list[Tensor]]:
        """For each parameter, masks of its entries that affect each head's q, and k or v.

        An entry affects an output if the derivative is not zero.
        """
        with torch.enable_grad():
            weights = {
                name: weight.clone().requires_grad_() for name, weight in self.weights().items()
            }
            q, k, v = self.qkv(weights)
            outputs = [*q.unbind(1), torch.cat((k.flatten(), v.flatten()))]
            generator = torch.Generator(device=q.device).manual_seed(0)
            masks: dict[str, list[Tensor]] = {name: [] for name in weights}
            for output in outputs:
                if not output.requires_grad:  # keys and values that another layer computed
                    for name, weight in weights.items():
                        masks[name].append(torch.zeros_like(weight, dtype=torch.bool))
                    continue
                direction = torch.randn(
                    output.shape, generator=generator, dtype=output.dtype, device=q.device
                )
                gradients = torch.autograd.grad(
                    (output * direction).sum(),
                    list(weights.values()),
                    retain_graph=True,
                    allow_unused=True,
                )
                for name, gradient in zip(weights, gradients, strict=True):
                    unused = torch.zeros_like(weights[name], dtype=torch.bool)
                    masks[name].append(unused if gradient is None else gradient != 0)
        return masks


def _shared(owners: Mapping[str, tuple[int, Tensor]]) -> bool:
    return any(bool((owner == ALL_HEADS).any()) for _, owner in owners.values())


def _find_owners(masks: list[Tensor]) -> tuple[int, Tensor] | None:
    """The dimension that is divided among heads (or shared by all), and the owner of each index.

    masks: the entries of the parameter that affect each head's q, and last those that affect k or
        v. None if no dimension separates q from k and v.
    """
    for dim in range(masks[0].ndim):
        others = [other for other in range(masks[0].ndim) if other != dim]
        *heads, rest = (mask.any(dim=others) if others else mask for mask in masks)
        by_head = torch.stack(heads)  # [H, indices]
        count = by_head.sum(0)
        single, shared = count == 1, count == len(heads)
        if (rest & (count > 0)).any() or not (single | shared | (count == 0)).all():
            continue
        owner = torch.where(
            single, by_head.int().argmax(0), torch.where(count == 0, NO_HEAD, ALL_HEADS)
        )
        return dim, owner
    return None


@contextmanager
def _capturing(model: PreTrainedModel) -> Iterator[dict[int, _Attention]]:
    """Every attention module of the model by layer, ready to be rerun on its own."""
    captured: list[tuple[Tensor, ...]] = []

    def backend(module, query, key, value, mask, **kwargs):
        captured.append((query, key, value))
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
        with seam.eval_mode(model):
            model(input_ids=random_tokens(model)[:, :3], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    with seam.eval_mode(model), seam.using(model, backend):
        yield {
            call.layer: _Attention(
                call.module, *inputs[call.module], captured, heads=call.q.shape[1]
            )
            for call in calls
        }


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def random_tokens(model: PreTrainedModel, length: int = 64) -> Tensor:
    vocabulary = model.get_input_embeddings().num_embeddings
    length = min(length, config_train_length(model.config) or length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (1, length), generator=generator).to(model.device)


def logits(model: PreTrainedModel, tokens: Tensor, keep: int = 0) -> Tensor:
    """The logits of these tokens [B, T]; keep: only of the last `keep` tokens."""
    options = {"logits_to_keep": keep} if keep else {}
    with seam.eval_mode(model):
        return model(input_ids=tokens, use_cache=False, **options).logits[:, -keep:]
