"""Methods find what they claim to find, and `extend` proves it: gradients, constraints, patches, every family."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import farspan
from families import FAMILIES, VOCABULARY
from farspan.attention import seam
from farspan.attention.patch import Patch, fingerprint, set_rope
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.data.documents import Document
from farspan.data.windows import split_windows
from farspan.errors import CorruptError, FarspanError, ProofError
from farspan.methods import headscale as searching
from farspan.methods.drope import drope
from farspan.methods.headscale import Search, headlog, headscale
from farspan.methods.job import Job, best_of, least, loss_by_position, scaled_loss
from farspan.methods.rope import ROPES, roped, roped_as
from farspan.methods.rope import _rope as rope_for
from farspan.methods.schedules import SCHEDULES, scheduled
from farspan.methods.tuning import Tuning
from farspan.methods.uniform import fit_log, full_grid, uniform
from farspan.model.loss import mean_loss, token_losses
from farspan.train.steps import Steps
from farspan.workflows import extending, fitting
from farspan.workflows.extending import extend
from farspan.workflows.fitting import METHODS, Extension, check_used, fit_in_turn, read_extension

QUICK = Search(steps=4, batch=2, micro_batch=2, lr=(0.1,), warmup=1, init=1.2)
LENGTH, TARGET = 16, 40
BY_NAME = {family.name: family for family in FAMILIES}
FOUR = ("farspan-none", "llama", "qwen3", "gpt2")  # ours and three of others'


def job_for(model, **changes) -> Job:
    layers = probe(model)
    ids = torch.randint(VOCABULARY, (6, TARGET + 5), generator=torch.Generator().manual_seed(1))
    job = Job(
        TARGET,
        LENGTH,
        search=ids,
        choose=ids[:2, :TARGET],
        layers=tuple(layer.index for layer in layers),
        heads=layers[0].heads,
        model=fingerprint(model),
    )
    return replace(job, **changes)


# The loss and its gradient.


@pytest.mark.parametrize("name", ["farspan-none", "farspan-swan", "farspan-t5", "llama", "gemma2", "cohere2", "qwen3"])
def test_gradients_to_scales_are_finite_differences(name):
    """In float64, constant and growing scales, with the logits taken a few rows at a time."""
    model = BY_NAME[name].build().double()
    # Other families compute norms and angles in float32 whatever they are given, which a tiny step would drown in.
    ours = name.startswith("farspan")
    step, near = (1e-5, dict(rel=1e-4, abs=1e-9)) if ours else (1e-2, dict(rel=1e-2, abs=1e-5))
    layers = [call.layer for call in seam.attention_calls(model)]
    heads = seam.attention_calls(model)[0].q.shape[1]
    base = torch.full((len(layers), heads), 1.1, dtype=torch.float64).requires_grad_()
    slope = torch.full_like(base, 0.2).detach().requires_grad_()
    ids = torch.randint(VOCABULARY, (2, 24))
    seam.install(model, Scales(tuple(layers), base, slope, "log", 8))
    with seam.frozen(model):
        loss = mean_loss(model, ids, budget=3 * VOCABULARY)
        loss.backward()
    assert loss.item() == pytest.approx(token_losses(model, ids).mean().item(), abs=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())
    for table in (base, slope):
        for place in ((0, 0), (len(layers) - 1, heads - 1)):
            with torch.no_grad():
                table[place] += step
                above = token_losses(model, ids).mean()
                table[place] -= 2 * step
                below = token_losses(model, ids).mean()
                table[place] += step
            assert table.grad[place].item() == pytest.approx(((above - below) / (2 * step)).item(), **near)


def test_the_mean_loss_never_holds_all_logits():
    model = BY_NAME["farspan-none"].build()
    ids = torch.randint(VOCABULARY, (2, 40))
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    whole = mean_loss(model, ids)
    assert seen == [39]
    seen.clear()
    assert mean_loss(model, ids, budget=10 * VOCABULARY).item() == pytest.approx(whole.item(), abs=1e-6)
    hook.remove()
    assert max(seen) == 5
    assert sum(seen) == 39


# Methods.


def test_best_of_finds_the_least_to_its_step():
    for best in (0.8, 1.0, 1.234, 2.17, 3.0):
        found, asked = best_of(lambda value, best=best: (value - best) ** 2, np.arange(0.8, 3.01, 0.2), 0.01)
        assert found == pytest.approx(round(best, 2), abs=0.0051)
        assert len(asked) < 40
        assert all(abs(value * 100 - round(value * 100)) < 1e-6 for value in asked)
    with pytest.raises(FarspanError, match="no scale gives a finite loss"):
        best_of(lambda value: math.nan, (1.0, 2.0), 0.1)


@pytest.mark.parametrize("name", FOUR)
def test_uniform_finds_the_best_single_scale(name):
    model = BY_NAME[name].build()
    job = job_for(model)
    found = uniform(model, job).scales
    best = scaled_loss(model, job.choose, found)
    for other in (0.8, 1.0, 1.2, 1.6, 2.0, 3.0):
        assert best <= scaled_loss(model, job.choose, job.uniform(other)) + 1e-6
    assert not seam.installed(model)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", [headscale, headlog])
def test_searches_lower_the_loss_on_what_they_search(name, method):
    model = BY_NAME[name].build()
    job = job_for(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    patch = method(model, job, replace(QUICK, steps=12))
    start = job.uniform(1.2) if method is headscale else None
    reference = scaled_loss(model, job.search, start) if start else float(loss_by_position(model, job.search).mean())
    assert scaled_loss(model, job.search, patch.scales) < reference
    assert patch.scales.base.std() > 0
    assert patch.method == method.__name__
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("method", [headscale, headlog])
def test_the_constraint_holds_at_every_step_on_the_optimised_parameter(method, monkeypatch):
    model = BY_NAME["farspan-none"].build()
    seen = []
    own = Steps.update

    def update(self) -> None:
        own(self)
        seen.append({name: parameter.detach().clone() for name, parameter in self.work.trained.items()})
        assert all(parameter.dtype == torch.float32 for parameter in self.work.trained.values())

    monkeypatch.setattr(Steps, "update", update)
    free = replace(QUICK, steps=10, constraint=False, lr=(0.5,), init=1.0)
    method(model, job_for(model), free)
    assert min(float(step["base"].min()) for step in seen) < 1, "without the constraint it goes below"
    seen.clear()
    patch = method(model, job_for(model), replace(free, constraint=True))
    assert len(seen) == 10
    assert all(float(step["base"].min()) >= 1 for step in seen)
    assert all(float(step["slope"].min()) >= 0 for step in seen if "slope" in step)
    assert torch.equal(patch.scales.base, seen[-1]["base"])


@pytest.mark.parametrize("method", [headscale, headlog])
def test_without_the_constraint_scales_stay_above_zero(method):
    """With steps this large a free search goes through 0, where no patch could hold its scales."""
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    scales = method(model, job, replace(QUICK, steps=10, constraint=False, lr=(5.0,), init=1.0)).scales
    ends = scales.at(torch.tensor([1.0, job.target]))
    assert 0 < float(ends.min()) < 0.1
    assert float(ends.max()) > 2


@pytest.mark.parametrize(("sharper", "bears"), [(1.0, True), (300.0, False)])
def test_bf16_is_used_where_it_gives_the_gradient_of_float32(sharper, bears):
    """Queries that make scores of many thousands turn the gradient of a scale to noise; the search must notice."""
    model = BY_NAME["farspan-none"].build().float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(sharper)
            layer.self_attn.k_proj.weight.mul_(sharper)
    job = job_for(model)
    scaled = searching.Scaled(model, job.uniform(1.2))
    seam.install(model, scaled.scales)
    with seam.frozen(model):
        assert scaled.bears_rounding(job.search[:1]) is bears
    assert not scaled.rounded


def test_the_second_split_chooses_the_learning_rate():
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    both = headscale(model, job, replace(QUICK, lr=(0.1, 1e-6)))
    losses = [
        scaled_loss(model, job.choose, headscale(model, job, replace(QUICK, lr=(lr,))).scales) for lr in (0.1, 1e-6)
    ]
    assert scaled_loss(model, job.choose, both.scales) == pytest.approx(min(losses), abs=1e-6)


def test_a_stopped_search_goes_on_to_the_same_scales(tmp_path):
    model = BY_NAME["farspan-none"].build()
    straight = headscale(model, job_for(model), QUICK)

    def stop(label, steps):
        def advance(count=1, note=""):
            raise KeyboardInterrupt

        return advance

    job = job_for(model, folder=tmp_path, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        headscale(model, job, replace(QUICK, save_every=1))
    again = headscale(model, replace(job, progress=job_for(model).progress), replace(QUICK, save_every=1))
    assert torch.equal(straight.scales.base, again.scales.base)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_their_formulas(name):
    model = BY_NAME["farspan-none"].build()
    job = job_for(model)
    patch = scheduled(model, job, name, fitted=False)
    n = torch.tensor([2.0, LENGTH, LENGTH + 1, 2 * LENGTH, TARGET])
    found = patch.scales.at(n)[0, 0]
    formulas = {
        "logn": [max(1.0, math.log(x) / math.log(LENGTH)) for x in n.tolist()],
        "llama4": [1 + 0.1 * math.log(1 + x // LENGTH) for x in n.tolist()],
        "ssmax": [math.log(x) / math.log(LENGTH) for x in n.tolist()],
    }
    if name in formulas:
        assert found.tolist() == pytest.approx(formulas[name], abs=1e-5)
    else:
        assert found[:2].tolist() == [1.0, 1.0]
    fitted = scheduled(model, job, name, fitted=True)
    assert scaled_loss(model, job.choose, fitted.scales) <= scaled_loss(model, job.choose, patch.scales) + 1e-6


@pytest.mark.parametrize("name", ["farspan-rope", "llama", "qwen3", "smollm3"])
@pytest.mark.parametrize("method", ROPES)
def test_rotary_methods_leave_the_model_as_it_was_and_apply_as_they_were_fitted(name, method):
    family = BY_NAME[name]
    model = family.build()
    ids = torch.randint(VOCABULARY, (1, TARGET))
    before = model(ids).logits.detach()
    patch = roped(model, job_for(model), method, None)
    assert torch.equal(model(ids).logits, before)
    patched = patch.apply(model)
    if method != "dynamic-ntk":  # which waits for the length that the config tells, far beyond these tokens
        assert not torch.equal(patched(ids).logits, before)
    kinds = {"pi": "linear", "ntk": "default", "dynamic-ntk": "dynamic", "yarn": "yarn"}
    assert patch.rope["rope_type"] == kinds[method]


@pytest.mark.parametrize("method", ["pi", "yarn", "dynamic-ntk"])
def test_no_stretch_falls_short_of_the_target_however_good_its_loss(method, monkeypatch):
    model = BY_NAME["farspan-rope"].build()

    def the_less_the_better(model, ids):
        return torch.tensor(model.config.rope_parameters["factor"])

    monkeypatch.setattr("farspan.methods.rope.loss_by_position", the_less_the_better)
    assert roped(model, job_for(model), method, None).rope["factor"] == TARGET / LENGTH


STRETCHED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
}


@pytest.mark.parametrize("own", [None, *STRETCHED])
def test_a_stretch_of_one_changes_nothing_and_what_is_stretched_stays_so(own):
    model = BY_NAME["llama"].build()
    if own is not None:
        set_rope(model, STRETCHED[own])
    config, layers, ids = model.config, probe(model), torch.randint(VOCABULARY, (1, 64))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        for method in ROPES if own is None else ("ntk",):
            with roped_as(model, rope_for(model, job_for(model), method, 1.0)):
                assert torch.allclose(model(ids, use_cache=False).logits, before, atol=1e-6), method
    if own is None:
        assert fitting._candidates(layers, config) == ["ntk", "yarn"]
        return
    assert fitting._candidates(layers, config) == ["ntk", "uniform"]
    assert not fitting.suited(["ntk"], layers, config, "m")
    for method in ("pi", "yarn", "dynamic-ntk"):
        message = f"the rotation of m is stretched already .{own}., and {method} would take the place of that; use ntk"
        with pytest.raises(FarspanError, match=message):
            fitting.suited([method, "headscale"], layers, config, "m")


def test_where_only_windows_rotate_there_is_nothing_to_stretch():
    model = BY_NAME["llama"].build()
    model.config.rope_parameters = {"sliding_attention": dict(model.config.rope_parameters), "full_attention": None}
    with pytest.raises(FarspanError, match="only layers with windows rotate in LlamaForCausalLM, and yarn would"):
        rope_for(model, job_for(model), "yarn", 2.0)


def test_tuning_lowers_the_loss_and_the_patch_carries_the_weights():
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    plain = roped(model, job, "pi", None)
    tuned = roped(model, job, "pi", Tuning(steps=20, batch=2, micro_batch=2, lr=1e-2, warmup=2))
    assert fingerprint(model) == job.model
    assert tuned.rope["factor"] == TARGET / LENGTH
    losses = []
    for patch in (plain, tuned):
        patched = patch.apply(BY_NAME["farspan-rope"].build())
        losses.append(float(loss_by_position(patched, job.search).mean()))
    assert losses[1] < losses[0]


def test_dropped_rotation_is_a_model_without_positions_to_which_scales_can_be_put():
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    dropped = drope(model, job, Tuning(steps=4, batch=2, micro_batch=2, lr=1e-3, warmup=1))
    patched = dropped.apply(BY_NAME["farspan-rope"].build())
    ids = torch.randint(VOCABULARY, (1, 12))
    positions = torch.arange(12)[None]
    with torch.no_grad():
        moved = patched(ids, position_ids=positions + 100, use_cache=False).logits
        assert torch.allclose(patched(ids, position_ids=positions, use_cache=False).logits, moved, atol=1e-5)
    whole = dropped.then(headscale(patched, job, QUICK))
    assert whole.method == "drope+headscale"
    assert whole.apply(BY_NAME["farspan-rope"].build())


def test_the_law_of_the_best_scale_is_recovered():
    positions = np.arange(64, 4096, 64.0)
    best = 1 + 0.35 * np.log(np.maximum(positions / 512, 1))
    slope, (low, high), r2 = fit_log(positions, best, 512)
    assert slope == pytest.approx(0.35)
    assert low <= 0.35 <= high
    assert r2 == pytest.approx(1.0)
    model = BY_NAME["farspan-none"].build()
    grid = full_grid(model, job_for(model), torch.randint(VOCABULARY, (2, 64)), 0.95, 1.05, bins=8)
    assert grid.loss.shape == (11, 8)
    assert set(grid.best) <= set(grid.values)
    assert not seam.installed(model)


# Text.


class Letters:
    """A tokenizer in which every character is a token."""

    def __call__(self, text, **_options):
        return {"input_ids": [ord(letter) for letter in text]}


def test_splits_share_no_token():
    lengths, limits = {"search": 9, "choose": 8, "report": 8}, {"search": 100, "choose": 2, "report": 3}
    one = "".join(chr(1000 + number) for number in range(400))
    found = split_windows([Document("one", one)], Letters(), lengths, limits)
    seen = [set(windows.ids.flatten().tolist()) for windows in found.values()]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]  # noqa: PT018
    assert {name: len(windows.ids) for name, windows in found.items()} == {"search": 40, "choose": 2, "report": 3}
    many = [Document(str(number), one[number * 40 : number * 40 + 40]) for number in range(10)]
    found = split_windows(many, Letters(), lengths, limits)
    used = [{entry["document"] for entry in windows.used} for windows in found.values()]
    assert not used[0] & used[1] and not used[0] & used[2] and not used[1] & used[2]  # noqa: PT018
    with pytest.raises(FarspanError, match="windows that share none of them take at least 25"):
        split_windows([Document("short", one[:20])], Letters(), lengths, limits)


# The command.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of two layers with a tokenizer, trained on 16 tokens by its config, and its rotary sister."""
    from farspan.data.documents import read_documents
    from farspan.data.tokens import train_tokenizer
    from farspan.model import FarspanConfig, FarspanForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    text = next(iter(read_documents("python-docs"))).text[:30_000]
    tokenizer = train_tokenizer([text], 300)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=300)
    for name, position in (("none", "none"), ("rope", "rope"), ("hybrid", ["rope", "none"])):
        torch.manual_seed(0)
        config = FarspanConfig(**shape, max_position_embeddings=64, position=position)
        FarspanForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text(text)
    return folder


FEW = Extension(choose_windows=2, report_windows=2, passkeys=0)
SEARCHED = replace(FEW, search=QUICK)
TUNED = replace(FEW, tuning=Tuning(steps=2, batch=2, micro_batch=2))
RECIPES = {"headscale": SEARCHED, "headlog": SEARCHED, "drope": TUNED}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_extends_and_proves_it(tiny, tmp_path, method):
    source = tiny / ("rope" if method in fitting.ROPED else "none")
    found = extend(source, 128, tmp_path / "patch", method, data=tiny / "text.txt", recipe=RECIPES.get(method, FEW))
    assert found.proof == pytest.approx(0, abs=1e-4)
    assert set(found.before) == {"loss@32", "loss@64", "loss@128"}
    model, _ = farspan.load(tmp_path / "patch")
    assert seam.installed(model) == (method in fitting.SCALED)
    told = json.loads((tmp_path / "patch" / "patch.json").read_text())
    assert (told["target"], told["train_length"]) == (128, 64)
    assert told["model"]["name"] == str(source)
    assert {"scales", "rope"} & set(told)
    files = {path.name for path in (tmp_path / "patch").iterdir()}
    assert {"patch.json", "recipe.toml", "record.json", "before_after.png", "before_after.svg"} <= files
    record = json.loads((tmp_path / "patch" / "record.json").read_text())
    assert record["before"] == found.before
    assert [path.name for path in tmp_path.iterdir()] == ["patch"], "the search leaves nothing behind"


def test_methods_combine_and_hybrids_are_scaled_where_there_are_no_positions(tiny, tmp_path):
    found = extend(tiny / "hybrid", 128, tmp_path / "both", "yarn+headscale", data=tiny / "text.txt", recipe=SEARCHED)
    assert found.patch.method == "yarn+headscale"
    assert found.patch.scales.layers == (1,)
    assert found.patch.rope["rope_type"] == "yarn"
    assert seam.installed(farspan.load(tmp_path / "both").model)
    over = extend(tiny / "rope", 128, tmp_path / "drope", "drope+uniform", data=tiny / "text.txt", recipe=TUNED)
    assert over.patch.weights
    assert over.proof == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("kind", "chosen"), [("none", {"uniform", "headscale", "headlog"}), ("rope", {"ntk", "yarn"})])
def test_auto_chooses_and_says_why(tiny, tmp_path, kind, chosen):
    found = extend(tiny / kind, 128, tmp_path / "auto", "auto", data=tiny / "text.txt", recipe=SEARCHED)
    unused = [note for note in found.notes if "did nothing" in note]
    assert bool(unused) == (kind == "rope"), "a rotary model is not searched for scales"
    assert found.patch.method in chosen
    assert f"auto chose {found.patch.method}: loss" in found.notes[-1]


def test_auto_chooses_by_the_loss_of_what_it_would_apply():
    """Weights that were tuned count: the loss that is told is the patched model's."""
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    tuning = Tuning(steps=8, batch=2, micro_batch=2, lr=1e-2, warmup=1)
    patch, (why,) = fit_in_turn(model, job, replace(FEW, tune="fair", tuning=tuning), ["auto"])
    assert patch.weights
    fresh = patch.apply(BY_NAME["farspan-rope"].build())
    assert f": loss {float(loss_by_position(fresh, job.choose).mean()):.4f} on" in why
    assert torch.equal(model.model.norm.weight, patch.weights["model.norm.weight"])
    untuned = BY_NAME["farspan-rope"].build()
    before = {name: parameter.detach().clone() for name, parameter in untuned.named_parameters()}
    fitting._loss_with(untuned, patch, job.choose)
    assert all(torch.equal(before[name], parameter) for name, parameter in untuned.named_parameters())


def test_text_can_be_named_for_each_purpose(tiny, tmp_path):
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    (tmp_path / "third.txt").write_text((tiny / "text.txt").read_text().swapcase())
    text = {"search": tiny / "text.txt", "choose": tmp_path / "third.txt", "report": tmp_path / "other.txt"}
    extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=text, recipe=FEW)
    for name in ("choose", "report"):  # one file by another spelling is the same text
        same = {**text, name: str(tiny / ".." / tiny.name / "text.txt")}
        with pytest.raises(FarspanError, match=f"search=.* and {name}=.* share text; give three that do not"):
            extend(tiny / "none", 128, tmp_path / "no", "uniform", data=same, recipe=FEW)
    with pytest.raises(FarspanError, match="give one corpus, or three as search=PATH"):
        extend(tiny / "none", 128, tmp_path / "no", "uniform", data={"train": "x"}, recipe=FEW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": 64}, "was trained on 64 tokens already; ask for more"),
        ({"method": "headscal"}, "method 'headscal' is unknown; the nearest is headscale"),
        ({"method": "yarn"}, "yarn changes rotation, and no layer of .* rotates .*; use uniform, headscale"),
        ({"method": "headscale+uniform"}, "scales attention twice or too early"),
        ({"method": "uniform+yarn"}, "scales attention twice or too early"),
        ({"method": "auto+headscale"}, "auto chooses by itself"),
        (
            {"method": "pi+ntk"},
            r"pi\+ntk sets rotation 2 times, and only ntk would be left of it; choose one of pi, ntk",
        ),
        ({"method": "drope+yarn"}, "only yarn would be left of it; choose one of drope, yarn"),
        ({"method": "yarn+ntk+headscale"}, "only ntk would be left of it"),
        ({"to": 100_000}, "no document has 112500 tokens"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(tiny, tmp_path, changes, message):
    asked = {"to": 128, "method": "uniform", **changes}
    with pytest.raises(FarspanError, match=message) as caught:
        extend(tiny / "none", out=tmp_path / "out", data=tiny / "text.txt", recipe=FEW, **asked)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("yarn", ["tuning.steps=3"], r"yarn tunes nothing, so it has no use for tuning.steps=3; add tune=fair"),
        ("yarn+headscale", ["tuning.lr=0.5"], r"yarn\+headscale tunes nothing, so .* tuning.lr=0.5; add tune=fair"),
        ("headscale", ["tune=fair"], "headscale has no use for tune=fair; leave it away, .*: pi, ntk, .*, yarn, auto$"),
        ("headscale", ["fitted=false"], "no use for fitted=false; .* a method that has: logn, llama4, ssmax$"),
        ("piecewise", ["fitted=false"], "piecewise has no use for fitted=false"),
        ("uniform", ["search.lr=[0.1]"], r"no use for search.lr=\[0.1\]; .*: headscale, headlog, auto$"),
        ("drope", ["tune=raw"], "drope has no use for tune=raw"),
        ("auto", ["fitted=false"], "auto has no use for fitted=false"),
        ("auto", ["tuning.steps=3"], "auto tunes nothing"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(tmp_path, method, changes, message):
    with pytest.raises(FarspanError, match=message) as caught:
        extend("nope-twin", 1024, tmp_path / "out", method, recipe=read_extension(None, changes))
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("yarn", ["tune=raw", "tuning.steps=3"]),
        ("yarn+headscale", ["tune=fair", "search.steps=3"]),
        ("drope+headlog", ["tuning.steps=3", "search.init=1"]),
        ("ssmax", ["fitted=false"]),
        ("auto", ["tune=fair", "tuning.steps=3", "search.steps=3"]),
        ("uniform", ["search_windows=3", "passkeys=0", "seed=1"]),
    ],
)
def test_settings_that_a_method_uses_are_taken(method, changes):
    check_used(method.split("+"), read_extension(None, changes))


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        (["tune=fair"], 200),
        (["tune=raw"], 1000),
        (["tune=fair", "tuning.steps=50"], 50),
        (["tune=raw", "tuning.steps=7"], 7),
        (["tune=raw", "tuning.steps=200"], 200),
    ],
)
def test_steps_that_were_asked_for_are_tuned(changes, steps, monkeypatch):
    monkeypatch.setattr(fitting, "roped", lambda model, job, method, tuning: tuning.steps)
    assert METHODS["yarn"](None, None, read_extension(None, changes)) == steps


def test_a_table_of_positions_is_not_asked_beyond_its_end(tiny, tmp_path):
    from farspan.model import FarspanConfig, FarspanForCausalLM

    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=300)
    config = FarspanConfig(**shape, max_position_embeddings=64, position="learned", position_table=128)
    FarspanForCausalLM(config).save_pretrained(tmp_path / "learned")
    farspan.load(tiny / "none").tokenizer.save_pretrained(tmp_path / "learned")
    asked = dict(out=tmp_path / "out", method="uniform", data=tiny / "text.txt", recipe=FEW)
    with pytest.raises(FarspanError, match="has 128 learned positions, and a search for 128 tokens reads 144"):
        extend(tmp_path / "learned", 128, **asked)
    assert not (tmp_path / "out").exists()


def test_scales_on_a_rotary_model_are_fitted_and_doubted(tiny, tmp_path):
    found = extend(tiny / "rope", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert "scales alone do little there" in found.notes[0]


def test_a_patch_that_does_not_take_effect_is_not_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Patch, "apply", lambda self, model: model)
    with pytest.raises(ProofError, match="changes no logit; nothing was written") as caught:
        extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "patch").exists()


def test_a_difference_that_is_no_number_proves_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(extending, "last_logits", lambda model, tokens, keep: torch.full((1, 4), torch.nan))
    with pytest.raises(ProofError, match="differs from the fitted model by nan in a logit .*; nothing was written"):
        extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert not (tmp_path / "patch").exists()


def test_a_model_whose_weights_are_infinite_is_one_sentence(tiny, tmp_path):
    model, tokenizer = farspan.load(tiny / "none")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    recipe = replace(FEW, fitted=False)
    with pytest.raises(
        CorruptError, match=r"the loss of .*broken turns nan at position 1, and model.norm.weight holds"
    ):
        extend(tmp_path / "broken", 128, tmp_path / "patch", "logn", data=tiny / "text.txt", recipe=recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_method_that_ruins_the_model_is_told_apart_from_a_ruined_model(tiny, tmp_path, monkeypatch):
    weights = {"model.norm.weight": torch.full((32,), torch.nan)}
    monkeypatch.setitem(METHODS, "uniform", lambda model, job, how: job.patch("uniform", weights=weights))
    with pytest.raises(FarspanError, match=r"none by uniform has losses that are no numbers; .*smaller learning rate"):
        extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_runs_out_names_the_way_out(tiny, tmp_path, monkeypatch):
    def hungry(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(searching, "mean_loss", hungry)
    with pytest.raises(FarspanError, match=r"memory does not reach for windows of 144 tokens; .*search.micro_batch=1"):
        extend(tiny / "none", 128, tmp_path / "patch", "headscale", data=tiny / "text.txt", recipe=SEARCHED)
    monkeypatch.setattr(extending, "loss_by_position", hungry)
    for recipe, way in ((FEW, ""), (replace(FEW, tune="fair"), "tuning.micro_batch=1, or ")):
        with pytest.raises(FarspanError, match=rf"the same command with {way}a shorter target than 128$"):
            extend(tiny / "rope", 128, tmp_path / "patch", "yarn", data=tiny / "text.txt", recipe=recipe)


def test_a_loss_that_is_no_number_is_never_the_least():
    assert least({"a": math.nan, "b": 2.0, "c": 1.0, "d": math.inf}) == "c"
    assert least({0.1: math.nan}) == 0.1


def test_another_unfinished_search_is_not_touched(tiny, tmp_path):
    work = tmp_path / ".patch.search"
    (work / "headscale" / "checkpoints" / "step-0000050").mkdir(parents=True)
    (work / "claim.toml").write_text("# another")
    with pytest.raises(FarspanError, match="holds the unfinished search of another extension"):
        extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert (work / "claim.toml").read_text() == "# another"
    shutil.rmtree(work / "headscale")  # one that was killed before it had anything to go on from is in nobody's way
    extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert not work.exists()


def test_the_same_extension_twice_at_once_leaves_the_first_one_alone(tiny, tmp_path):
    asked = dict(data=tiny / "text.txt", recipe=replace(FEW, search=QUICK))

    def twice(label, steps):
        def advance(count=1, note=""):
            if "headscale" in label:  # the first one is at its search
                with pytest.raises(FarspanError, match="another process trains in .*.patch.search; wait for it"):
                    extend(tiny / "none", 128, tmp_path / "patch", "headscale", **asked)
                advance.tried += 1

        advance.tried = 0
        tried.append(advance)
        return advance

    tried = []
    extend(tiny / "none", 128, tmp_path / "patch", "headscale", progress=twice, **asked)
    assert sum(advance.tried for advance in tried) > 0
    assert (tmp_path / "patch" / "patch.json").exists()
    assert not (tmp_path / ".patch.search").exists()


def test_a_patch_that_makes_it_worse_says_so(tiny, tmp_path):
    worse = replace(FEW, search=replace(QUICK, steps=1, warmup=0, lr=(1e-9,), init=9.0))
    found = extend(tiny / "none", 128, tmp_path / "patch", "headscale", data=tiny / "text.txt", recipe=worse)
    assert found.after["loss@128"] > found.before["loss@128"]
    assert any("makes the loss at 128 tokens worse" in note for note in found.notes)


def test_dynamic_rotation_has_the_length_of_the_config_alone(tiny, tmp_path):
    with pytest.raises(
        FarspanError, match="dynamic-ntk begins where the config of .* at 64, whatever --train-length 32"
    ):
        extend(tiny / "rope", 128, tmp_path / "no", "dynamic-ntk", data=tiny / "text.txt", train_length=32, recipe=FEW)


def test_a_stopped_extension_goes_on_with_the_same_text_and_no_other(tiny, tmp_path):
    """Stopped in the middle of its search, it ends in the scales of one that was not; what may change may change."""
    recipe = replace(FEW, search=replace(QUICK, steps=6, save_every=2))
    straight = extend(tiny / "none", 128, tmp_path / "straight", "headscale", data=tiny / "text.txt", recipe=recipe)

    def stop(label, steps):
        def advance(count=1, note=""):
            advance.count += 1
            if "headscale" in label and advance.count == 4:
                raise KeyboardInterrupt

        advance.count = 0
        return advance

    asked = (tiny / "none", 128, tmp_path / "patch", "headscale")
    with pytest.raises(KeyboardInterrupt):
        extend(*asked, data=tiny / "text.txt", recipe=recipe, progress=stop)
    assert (tmp_path / ".patch.search").exists()
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    with pytest.raises(FarspanError, match="unfinished search of another"):
        extend(*asked, data=tmp_path / "other.txt", recipe=recipe)
    again = extend(*asked, data=tiny / "text.txt", recipe=replace(recipe, search=replace(recipe.search, save_every=1)))
    assert torch.equal(again.patch.scales.base, straight.patch.scales.base)
    assert not (tmp_path / ".patch.search").exists()


def test_a_patch_is_not_extended_again(tiny, tmp_path):
    extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    with pytest.raises(FarspanError, match="is a patch already; extend its base model"):
        extend(tmp_path / "patch", 256, tmp_path / "again", "uniform", data=tiny / "text.txt", recipe=FEW)


def test_a_patch_finds_its_base_from_any_folder(tiny, tmp_path, monkeypatch):
    """Fitted on a path as short as a hub id; called by that in what is given to others."""
    shutil.copytree(tiny / "none", tmp_path / "runs" / "model")
    monkeypatch.chdir(tmp_path)
    extend("runs/model", 128, "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    record = json.loads((tmp_path / "patch" / "record.json").read_text())
    assert record["settings"]["model"] == "runs/model"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert seam.installed(farspan.load("../patch").model)
    assert Patch.load(tmp_path / "patch").name == str(tmp_path / "runs" / "model")
    for format in ("stock", "live"):
        farspan.export("../patch", format, format)
        written = [path.read_text() for path in Path(format).iterdir() if path.suffix in (".json", ".md")]
        assert any("runs/model, extended from 64 to 128" in text for text in written)
        assert not any(str(tmp_path / "runs") in text for text in written)


@pytest.mark.parametrize("name", ["nope-twin", "owner/model"])
def test_twins_and_hub_ids_keep_their_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patch = Patch("test", "0" * 64, 128, 64, name=name)
    assert extending._located(patch, name) is patch


def test_a_patch_whose_base_is_gone_says_what_it_looked_for(tiny, tmp_path, monkeypatch):
    def unreachable(*_args, **_options):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    shutil.copytree(tiny / "none", tmp_path / "model")
    extend(tmp_path / "model", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    patch = Patch.load(tmp_path / "patch")
    (tmp_path / "model").rename(tmp_path / "moved")
    for number, name in enumerate((patch.name, "runs/model", "model.gguf")):
        folder = replace(patch, name=name).save(tmp_path / str(number))
        with pytest.raises(FarspanError, match="names a base model that is not found") as caught:
            farspan.load(folder)
        for part in (f"the patch in {folder} ", name, f"put that model into {folder / 'base'}, or name its place in"):
            assert part in str(caught.value)
    shutil.copytree(tmp_path / "moved", tmp_path / "0" / "base")
    assert seam.installed(farspan.load(tmp_path / "0").model), "the way out is one"


def test_dynamic_rotation_forgets_between_measurements(tiny, tmp_path):
    """Beyond twice the length, where what it remembers of longer text would change shorter text."""
    found = extend(tiny / "rope", 192, tmp_path / "patch", "dynamic-ntk", data=tiny / "text.txt", recipe=FEW)
    assert found.proof == pytest.approx(0, abs=1e-4)


def test_bf16_weights_are_tuned_in_float32():
    """Steps too small for bf16 add up; and the model is given back as it was."""
    model = BY_NAME["farspan-rope"].build().bfloat16()
    job = job_for(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    patch = roped(model, job, "pi", Tuning(steps=16, batch=2, micro_batch=2, lr=1e-3, warmup=1))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(weight.dtype == torch.bfloat16 for weight in patch.weights.values())
    moved = [bool((patch.weights[name] != before[name]).any()) for name in before if "norm" in name]
    assert sum(moved) > len(moved) / 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Search(lr=()),
        lambda: Search(lr=(-1.0,)),
        lambda: Search(batch=0),
        lambda: Search(save_every=0),
        lambda: Tuning(steps=-1),
        lambda: Extension(passkeys=-1),
        lambda: Extension(choose_windows=0),
        lambda: Extension(seed=-1),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_name(wrong):
    with pytest.raises(FarspanError, match="(lr|batch|save_every|steps|passkeys|choose_windows|seed) is"):
        wrong()


def test_the_recipe_has_the_papers_numbers():
    how = read_extension(None, [])
    assert how == Extension()
    assert (how.search.steps, how.search.batch, how.search.warmup, how.search.lr) == (200, 8, 20, (0.1, 0.05))
    assert read_extension(None, ["search.steps=3", "tune=fair"]).search.steps == 3
    with pytest.raises(FarspanError, match="choose fair"):
        read_extension(None, ["tune=much"])


def test_the_nope_twin_reaches_twice_its_length(tmp_path):
    """The main job, in little: a uniform scale of 1.1 mends what broke at 1,024 tokens."""
    model, tokenizer = farspan.load("nope-twin")
    from farspan.data.documents import read_documents

    text = next(iter(read_documents("python-docs/score"))).text
    ids = torch.tensor(tokenizer(text)["input_ids"])[: 2 * 1024].view(2, 1024)
    before = loss_by_position(model, ids)
    seam.install(model, Scales.uniform(1.1, layers=range(6), heads=8))
    after = loss_by_position(model, ids)
    assert after[-128:].mean() < before[-128:].mean() - 3
    assert after[256:511].mean() < before[256:511].mean() + 0.1


def test_torchrun_shares_the_batches_of_a_search(tiny, tmp_path):
    """Two processes, started as a user would start them, come to the scales that one finds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "farspan"]
    few = ["search.steps=4", "search.batch=2", "search.lr=[0.1]", "search.init=1.2", "search.warmup=1", "passkeys=0"]
    few += ["choose_windows=2", "report_windows=2"]
    words = ["extend", str(tiny / "none"), "--to", "128", "--method", "headscale", "--data", str(tiny / "text.txt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, start in (("two", torchrun), ("one", [sys.executable, "-m", "farspan"])):
        run = [*start, *words, "-o", str(tmp_path / name), *few]
        done = subprocess.run(run, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("loss after") == 1
    scales = [Patch.load(tmp_path / name).scales.base for name in ("one", "two")]
    assert torch.allclose(*scales, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
