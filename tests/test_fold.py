"""Folded scales give the logits of live scales; where they cannot be folded, a reason is given."""

from __future__ import annotations

import copy

import pytest
import torch

from families import FAMILIES, Family, tokens
from farspan.attention import seam
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.errors import FarspanError, ProofError
from farspan.formats import fold as fold_module
from farspan.formats.fold import Site, find_sites, fold

all_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def per_head_scales(layers, selected: tuple[int, ...] | None = None) -> Scales:
    indices = tuple(layer.index for layer in layers if selected is None or layer.index in selected)
    generator = torch.Generator().manual_seed(2)
    return Scales(indices, 0.8 + torch.rand(len(indices), layers[0].heads, generator=generator))


def live_logits(model, scales: Scales) -> torch.Tensor:
    with torch.no_grad():
        logits = seam.install(model, scales)(tokens(), use_cache=False).logits
        seam.uninstall(model)
    return logits


@pytest.mark.parametrize("rest", [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]])
def test_no_entry_is_scaled_that_a_head_shares_with_keys_or_values(rest):
    """Scaling it would change k or v as well."""
    heads = [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    owners = fold_module._find_owners([torch.tensor(mask).bool() for mask in (*heads, rest)])
    if rest[0]:
        assert owners is None
    else:
        dim, owner = owners
        assert (dim, owner.tolist()) == (0, [0, 0, 1, 1, fold_module.NO_HEAD])


@all_families
def test_per_head_scales_fold_exactly_or_are_refused(family: Family):
    model = family.build()
    layers = probe(model)
    sites = find_sites(model, per_head_scales(layers))
    refused = tuple(layer.index for layer in layers) if family.folds is None else family.refused
    for index, site in sites.items():
        if index in refused:
            assert isinstance(site, str), f"layer {index} should not fold"
            assert "norm" in site
        else:
            assert isinstance(site, Site), site
            assert site.name == family.folds
    if family.folds is None:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(FarspanError, match="layer 0 cannot be folded.*keep the patch live"):
            fold(model, per_head_scales(layers))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return
    scales = per_head_scales(layers, tuple(index for index in sites if index not in refused))
    stock, live = model(tokens(), use_cache=False).logits, live_logits(model, scales)
    proof = fold(model, scales)
    folded = model(tokens(), use_cache=False).logits
    assert (folded - live).abs().max() <= 2e-5
    assert (folded - stock).abs().max() > 1e-4, "scales without an effect would prove nothing"
    assert proof.holds
    assert proof.same_argmax == 1


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.uniform], ids=lambda family: family.name
)
def test_one_scale_per_layer_folds_into_a_shared_norm(family: Family):
    model = family.build()
    indices = [layer.index for layer in probe(model)]
    scales = Scales(
        tuple(indices), torch.linspace(1.1, 1.6, len(indices))[:, None].expand(-1, 4).contiguous()
    )
    assert {site.name for site in find_sites(model, scales).values()} == {family.uniform}
    live = live_logits(model, scales)
    fold(model, scales)
    assert (model(tokens(), use_cache=False).logits - live).abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["farspan-none", "llama-bias", "gpt2", "olmo2"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without a bf16 matmul
def test_folding_bf16_weights_rounds_once(name: str):
    model = next(family for family in FAMILIES if family.name == name).build(dtype=torch.bfloat16)
    scales = per_head_scales(probe(model))
    expected = copy.deepcopy(model).float()
    fold(expected, scales)
    proof = fold(model, scales)
    assert proof.holds
    for (name, folded), wide in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(folded, wide.bfloat16()), f"{name} was rounded more than once"


def test_refuses_schedules_and_models_on_the_seam():
    model = FAMILIES[0].build()
    schedule = Scales((0,), torch.ones(1, 4), torch.ones(1, 4), "log", 8)
    with pytest.raises(FarspanError, match="'log' grow with the context.*keep the patch live"):
        fold(model, schedule)
    seam.install(model)
    with pytest.raises(FarspanError, match="on the seam already"):
        fold(model, Scales.uniform(1.2, range(4), 4))


@pytest.mark.parametrize(("difference", "holds"), [(0.0, True), (0.25, True), (0.2500001, False)])
def test_a_proof_holds_up_to_its_tolerance(difference, holds):
    tolerance = min(difference, 0.25)
    proof = fold_module.LogitProof(8, difference, kl=0.0, same_argmax=1.0, tolerance=tolerance)
    assert proof.holds == holds


def test_failed_fold_restores_the_weights(monkeypatch):
    model = FAMILIES[0].build()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setitem(fold_module.RULES, "times", lambda w, s: w * s * 1.01)
    monkeypatch.setattr(fold_module, "TOLERANCE", 1.0)  # so that the wrong site is accepted
    with pytest.raises(ProofError, match="differs from the live one by .*restored"):
        fold(model, Scales.uniform(1.2, range(4), 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_refuses_layers_that_share_weights():
    model = FAMILIES[0].build()
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    with pytest.raises(FarspanError, match="shares q_proj with another layer"):
        fold(model, Scales.uniform(1.2, range(4), 4))
