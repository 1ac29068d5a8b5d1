"""How methods are fitted one after the other, compared and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from families import FAMILIES, tokens
from farspan.attention.patch import fingerprint
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.methods import auto
from farspan.methods.extend_config import ExtendConfig
from farspan.methods.headscale import headscale
from farspan.methods.job import FitJob, loss_by_position
from farspan.methods.search_config import SearchConfig

BY_NAME = {family.name: family for family in FAMILIES}


def job_for(model, **changes) -> FitJob:
    layers = tuple(layer.index for layer in probe(model))
    ids, heads = tokens(40), model.config.num_attention_heads
    job = FitJob(40, 16, search=ids, choose=ids, layers=layers, heads=heads, model="")
    return replace(job, model=fingerprint(model), **changes)


def count_into(advanced: dict):
    """A progress that collects the counts of every label and total."""
    return lambda label, total: (
        lambda count, note="": advanced.setdefault((label, total), []).append(count)
    )


def test_methods_of_a_candidate_are_all_fitted_in_turn(monkeypatch):
    """`auto` names a candidate as `ntk+uniform`."""
    model = BY_NAME["llama"].build()
    parts = {"ntk": {"rope": {"rope_type": "default", "rope_theta": 5e5}}, "uniform": {}}

    def fit(name):
        def fit_part(model, job, config):
            thetas.append(model.config.rope_parameters["rope_theta"])
            return job.patch(name, **(parts[name] or {"scales": job.uniform(1.5)}))

        return fit_part

    thetas: list[float] = []
    before = model.config.rope_parameters["rope_theta"]
    monkeypatch.setattr(auto, "METHODS", {name: fit(name) for name in parts})
    patch = auto._fit_in_turn(model, job_for(model), ExtendConfig(), ["ntk", "uniform"])
    assert patch.method == "ntk+uniform"
    assert (patch.rope["rope_theta"], float(patch.scales.base[0, 0])) == (5e5, 1.5)
    assert thetas == [before, 5e5]
    assert model.config.rope_parameters["rope_theta"] == before


def test_the_loss_of_a_candidate_is_that_of_the_model_with_its_scales():
    model, fresh = (BY_NAME["farspan-none"].build() for _ in range(2))
    job = job_for(model)
    patch = job.patch("uniform", scales=Scales.uniform(8.0, job.layers, job.heads))
    expected = float(loss_by_position(patch.apply(fresh), job.choose).mean())
    unscaled = float(loss_by_position(model, job.choose).mean())
    assert abs(expected - unscaled) > 1e-4
    assert auto._patched_loss(model, patch, job.choose) == pytest.approx(expected, abs=1e-6)
    assert float(loss_by_position(model, job.choose).mean()) == unscaled


def test_auto_counts_each_candidate_that_it_compares(monkeypatch):
    model, advanced = BY_NAME["farspan-none"].build(), {}
    job = job_for(model, progress=count_into(advanced))
    monkeypatch.setattr(auto, "candidate_methods", lambda *_: ["uniform", "logn", "headlog"])
    monkeypatch.setattr(
        auto,
        "_fit_in_turn",
        lambda model, job, config, names: job.patch(names[0], scales=job.uniform(1.3)),
    )
    auto.fit_best(model, probe(model), job, ExtendConfig())
    assert advanced == {("compare", 3): [1, 1, 1]}


def test_a_search_counts_each_of_its_steps():
    model, advanced = BY_NAME["farspan-none"].build(), {}
    search = SearchConfig(steps=3, batch=2, micro_batch=2, lr=(0.1,), warmup=1, init=1.2)
    headscale(model, job_for(model, progress=count_into(advanced)), search)
    assert advanced["headscale lr 0.1", 3] == [1, 1, 1, 0], "the last is a note on its end"


def test_spans_of_two_tokens_can_be_repeated():
    """One predicts the other, as no span of one token does."""
    assert SearchConfig(spans=(2, 3)).spans == (2, 3)
