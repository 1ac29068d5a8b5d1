"""`extend`: patches and their proof, refusals, searches that resume, several processes."""

from __future__ import annotations

import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Ministral3ForCausalLM

import farspan
from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.cli.console import console
from farspan.cli.extend import show_estimate
from farspan.errors import CorruptError, FarspanError, ProofError
from farspan.methods import auto, registry, search_config
from farspan.methods import headscale as headscale_module
from farspan.methods.extend_config import ExtendConfig, read_extend_config
from farspan.methods.fit import fit_methods
from farspan.methods.job import loss_by_position
from farspan.methods.registry import METHODS
from farspan.methods.rules import check_unused_settings
from farspan.methods.search_config import SearchConfig
from farspan.methods.swan_config import SwanConfig
from farspan.methods.tuning import TuningConfig
from farspan.report import style
from farspan.workflows import extend as extend_workflow
from farspan.workflows import search_folder
from farspan.workflows.extend import extend
from farspan.workflows.extend_estimate import ExtendEstimate
from farspan.workflows.extend_prepare import ExtendRun
from fit_jobs import BY_NAME, QUICK, job_for
from test_train import in_processes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Models of two layers with a tokenizer: without positions, with RoPE, and a hybrid."""
    from farspan.data.documents import read_documents
    from farspan.data.tokens import train_tokenizer
    from farspan.model import FarspanConfig, FarspanForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    text = next(iter(read_documents("python-docs"))).text[:30_000]
    tokenizer = train_tokenizer([text], 300)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=300,
    )
    for name, position in (("none", "none"), ("rope", "rope"), ("hybrid", ["rope", "none"])):
        torch.manual_seed(0)
        config = FarspanConfig(**shape, max_position_embeddings=64, position=position)
        FarspanForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text(text)
    return folder


SAVE = style.save


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Drawing is slow: `extend` writes an empty file instead of its figure."""
    monkeypatch.setattr(style, "save", lambda figure, stem: stem.touch())


FEW = ExtendConfig(choose_windows=2, report_windows=2, passkeys=0)
SEARCHED = replace(FEW, search=QUICK)
TUNED = replace(FEW, tuning=TuningConfig(steps=2, batch=2, micro_batch=2))
CONVERTED = replace(TUNED, swan=SwanConfig(measured_rows=1, window=8))
RECIPES = {
    "headscale": SEARCHED,
    "headlog": SEARCHED,
    "drope": TUNED,
    "continue": TUNED,
    "swan": CONVERTED,
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_a_proven_patch(tiny, tmp_path, method):
    source = tiny / ("none" if method in registry.SCALE_METHODS else "rope")
    recipe = RECIPES.get(method, FEW)
    result = extend(source, 128, tmp_path / "patch", method, data=tiny / "text.txt", recipe=recipe)
    assert result.proof == pytest.approx(0, abs=1e-4)
    assert set(result.before) == {"loss@32", "loss@64", "loss@128"}
    model, _ = farspan.load(tmp_path / "patch")
    assert seam.installed(model) == (method == "swan" or method in registry.SCALE_METHODS)
    patch = json.loads((tmp_path / "patch" / "patch.json").read_text())
    assert (patch["target"], patch["train_length"]) == (128, 64)
    assert patch["model"]["name"] == str(source)
    assert {"scales", "rope", "layout", "weights"} & set(patch)
    files = {path.name for path in (tmp_path / "patch").iterdir()}
    assert {"patch.json", "recipe.toml", "record.json", "before_after"} <= files
    record = json.loads((tmp_path / "patch" / "record.json").read_text())
    assert record["before"] == result.before
    assert record["search_text"] == {"source": f"text {tiny / 'text.txt'}", "packed": True}
    assert [path.name for path in tmp_path.iterdir()] == ["patch"], "the search folder is removed"


def test_writes_the_loss_curves_as_png_and_svg(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "save", SAVE)
    recipe = replace(FEW, fitted=False)
    extend(tiny / "none", 128, tmp_path / "patch", "logn", data=tiny / "text.txt", recipe=recipe)
    for name, start in (("before_after.png", b"\x89PNG"), ("before_after.svg", b"<?xml")):
        assert (tmp_path / "patch" / name).read_bytes().startswith(start)


@pytest.mark.long
def test_methods_combine_and_hybrids_scale_layers_without_positions(tiny, tmp_path):
    patch = extend(
        tiny / "hybrid",
        128,
        tmp_path / "both",
        "yarn+headscale",
        data=tiny / "text.txt",
        recipe=SEARCHED,
    ).patch
    assert patch.method == "yarn+headscale"
    assert patch.scales.layers == (1,)
    assert patch.rope["rope_type"] == "yarn"
    assert seam.installed(farspan.load(tmp_path / "both").model)
    result = extend(
        tiny / "rope",
        128,
        tmp_path / "drope",
        "drope+uniform",
        data=tiny / "text.txt",
        recipe=TUNED,
    )
    assert result.patch.weights
    assert result.proof == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "chosen"), [("none", {"uniform", "headscale", "headlog"}), ("rope", {"ntk", "yarn"})]
)
def test_auto_chooses_and_explains(tiny, tmp_path, kind, chosen):
    result = extend(
        tiny / kind, 128, tmp_path / "auto", "auto", data=tiny / "text.txt", recipe=SEARCHED
    )
    unused = [note for note in result.notes if "was not used" in note]
    assert bool(unused) == (kind == "rope"), "auto searches no scales for a RoPE model"
    assert result.patch.method in chosen
    assert f"auto chose {result.patch.method}: loss" in result.notes[-1]


def test_auto_chooses_by_the_loss_of_the_patched_model():
    """The reported loss includes tuned weights."""
    model = BY_NAME["farspan-rope"].build()
    job = job_for(model)
    tuning = TuningConfig(steps=8, batch=2, micro_batch=2, lr=1e-2, warmup=1)
    config = replace(FEW, tune="fair", tuning=tuning)
    patch, (note,) = fit_methods(model, probe(model), job, config, ["auto"])
    assert patch.weights
    fresh = patch.apply(BY_NAME["farspan-rope"].build())
    assert f": loss {float(loss_by_position(fresh, job.choose).mean()):.4f} on" in note
    assert torch.equal(model.model.norm.weight, patch.weights["model.norm.weight"])
    untuned = BY_NAME["farspan-rope"].build()
    before = {name: parameter.detach().clone() for name, parameter in untuned.named_parameters()}
    auto._patched_loss(untuned, patch, job.choose)
    assert all(
        torch.equal(before[name], parameter) for name, parameter in untuned.named_parameters()
    )


def test_accepts_one_text_per_split(tiny, tmp_path):
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    (tmp_path / "third.txt").write_text((tiny / "text.txt").read_text().swapcase())
    text = {
        "search": tiny / "text.txt",
        "choose": tmp_path / "third.txt",
        "report": tmp_path / "other.txt",
    }
    extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=text, recipe=FEW)
    for name in ("choose", "report"):  # another path to the same file
        same = {**text, name: str(tiny / ".." / tiny.name / "text.txt")}
        with pytest.raises(
            FarspanError, match=f"search=.* and {name}=.* overlap; give three disjoint texts"
        ):
            extend(tiny / "none", 128, tmp_path / "no", "uniform", data=same, recipe=FEW)
    with pytest.raises(FarspanError, match="give one corpus, or three as search=PATH"):
        extend(tiny / "none", 128, tmp_path / "no", "uniform", data={"train": "x"}, recipe=FEW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": 64}, "was already trained on 64 tokens; choose a longer --to"),
        ({"method": "headscal"}, "method 'headscal' is unknown; did you mean headscale"),
        (
            {"method": "yarn"},
            "yarn changes rotation, and .* has no rotary layer .*; use uniform, headscale",
        ),
        ({"method": "headscale+uniform"}, "scales attention twice or too early"),
        ({"method": "yarn+yarn"}, r"yarn\+yarn has yarn 2 times, .*; write yarn once"),
        ({"method": "uniform+yarn"}, "scales attention twice or too early"),
        ({"method": "auto+headscale"}, "combines auto with other methods"),
        (
            {"method": "pi+ntk"},
            r"pi\+ntk sets rotation 2 times, and only ntk would take effect; choose one of pi, ntk",
        ),
        ({"method": "drope+yarn"}, "only yarn would take effect; choose one of drope, yarn"),
        ({"method": "yarn+ntk+headscale"}, "only ntk would take effect"),
        ({"to": 100_000}, "no document has 100000 tokens"),
    ],
)
def test_bad_requests_raise_one_sentence_and_write_nothing(tiny, tmp_path, changes, message):
    request = {"to": 128, "method": "uniform", **changes}
    with pytest.raises(FarspanError, match=message) as caught:
        extend(tiny / "none", out=tmp_path / "out", data=tiny / "text.txt", recipe=FEW, **request)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "yarn",
            ["tuning.steps=3"],
            r"yarn tunes no weights, so it does not use tuning.steps=3; add tune=fair",
        ),
        (
            "yarn+headscale",
            ["tuning.lr=0.5"],
            r"yarn\+headscale tunes no weights, so .* tuning.lr=0.5; add tune=fair",
        ),
        (
            "headscale",
            ["tune=fair"],
            "headscale does not use tune=fair; remove it, .*: pi, ntk, .*, yarn, auto$",
        ),
        (
            "headscale",
            ["fitted=false"],
            "does not use fitted=false; .* a method that does: logn, llama4, ssmax$",
        ),
        ("piecewise", ["fitted=false"], "piecewise does not use fitted=false"),
        (
            "uniform",
            ["search.lr=[0.1]"],
            r"does not use search.lr=\[0.1\]; .*: headscale, headlog, auto$",
        ),
        ("drope", ["tune=raw"], "drope does not use tune=raw"),
        ("auto", ["fitted=false"], "auto does not use fitted=false"),
        ("auto", ["tuning.steps=3"], "auto tunes no weights"),
    ],
)
def test_unused_settings_are_refused(tmp_path, method, changes, message):
    with pytest.raises(FarspanError, match=message) as caught:
        extend(
            "nope-twin", 1024, tmp_path / "out", method, recipe=read_extend_config(None, changes)
        )
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
def test_used_settings_are_accepted(method, changes):
    check_unused_settings(method.split("+"), read_extend_config(None, changes))


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
def test_tune_sets_the_steps(changes, steps, monkeypatch):
    monkeypatch.setattr(registry, "fit_rope", lambda model, job, method, tuning: tuning.steps)
    assert METHODS["yarn"](None, None, read_extend_config(None, changes)) == steps


def test_refuses_targets_beyond_a_position_table(tiny, tmp_path):
    from farspan.model import FarspanConfig, FarspanForCausalLM

    shape = dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=300,
    )
    config = FarspanConfig(
        **shape, max_position_embeddings=64, position="learned", position_table=128
    )
    FarspanForCausalLM(config).save_pretrained(tmp_path / "learned")
    farspan.load(tiny / "none").tokenizer.save_pretrained(tmp_path / "learned")
    options = dict(out=tmp_path / "out", data=tiny / "text.txt", recipe=FEW)
    for to, method, reads in (
        (128, "headscale", "144; set search.beyond=1"),
        (136, "uniform", "136; choose a target within its table"),
    ):
        message = f"has 128 learned positions, and a search for {to} tokens reads {reads}"
        with pytest.raises(FarspanError, match=message):
            extend(tmp_path / "learned", to, method=method, **options)
    assert not (tmp_path / "out").exists()
    assert extend(tmp_path / "learned", 128, method="uniform", **options).patch.target == 128


def test_scales_on_a_rope_model_come_with_a_warning(tiny, tmp_path):
    result = extend(
        tiny / "rope", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
    )
    assert "scales alone gain little there" in result.notes[0]


def test_patch_without_effect_is_not_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Patch, "apply", lambda self, model: model)
    with pytest.raises(
        ProofError, match="changes no logit of a fresh model; nothing was written"
    ) as caught:
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert caught.value.exit_code == 3
    assert not (tmp_path / "patch").exists()


def test_nan_difference_fails_the_proof(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        extend_workflow,
        "last_logits_cpu",
        lambda model, tokens, keep: torch.full((1, 4), torch.nan),
    )
    with pytest.raises(
        ProofError, match="differs from the fitted model by nan in a logit .*; nothing was written"
    ):
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert not (tmp_path / "patch").exists()


def test_infinite_weights_raise_one_sentence(tiny, tmp_path):
    model, tokenizer = farspan.load(tiny / "none")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    recipe = replace(FEW, fitted=False)
    with pytest.raises(
        CorruptError,
        match=r"the loss of .*broken is nan at position 1 because model.norm.weight holds",
    ):
        extend(
            tmp_path / "broken",
            128,
            tmp_path / "patch",
            "logn",
            data=tiny / "text.txt",
            recipe=recipe,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_nonfinite_losses_after_a_method_blame_the_method(tiny, tmp_path, monkeypatch):
    weights = {"model.norm.weight": torch.full((32,), torch.nan)}
    monkeypatch.setitem(
        METHODS, "uniform", lambda model, job, config: job.patch("uniform", weights=weights)
    )
    with pytest.raises(
        FarspanError,
        match=r"none extended by uniform has losses that are not finite; .*smaller learning rate",
    ):
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert list(tmp_path.iterdir()) == []


def test_quantized_weights_are_not_trained(tiny, tmp_path, monkeypatch):
    load = ExtendRun.load

    def load_quantized(run):
        model, tokenizer = load(run)
        model.is_quantized = True
        return model, tokenizer

    monkeypatch.setattr(ExtendRun, "load", load_quantized)
    options = dict(data=tiny / "text.txt", recipe=FEW)
    for method, recipe in (("continue", FEW), ("yarn", replace(FEW, tune="fair"))):
        with pytest.raises(FarspanError, match="trains weights, which are quantized in .*rope; gi"):
            extend(tiny / "rope", 128, tmp_path / "out", method, **{**options, "recipe": recipe})
    assert list(tmp_path.iterdir()) == []
    extend(tiny / "rope", 128, tmp_path / "out", "yarn", **options)


def test_out_of_memory_suggests_a_shorter_target(tiny, tmp_path, monkeypatch):
    """One process has tried smaller micro batches by itself."""

    def out_of_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    data, out = tiny / "text.txt", tmp_path / "patch"
    monkeypatch.setattr(headscale_module, "mean_loss", out_of_memory)
    with pytest.raises(
        FarspanError,
        match=r"out of memory on windows of 144 tokens; rerun with a shorter target than 128$",
    ):
        extend(tiny / "none", 128, out, "headscale", data=data, recipe=SEARCHED)
    monkeypatch.setattr(extend_workflow, "loss_by_position", out_of_memory)
    with pytest.raises(FarspanError, match="rerun with a shorter target than 128$"):
        extend(tiny / "rope", 128, out, "yarn", data=data, recipe=FEW)


@pytest.mark.parametrize(
    ("names", "recipe", "settings"),
    [
        (["headscale"], SEARCHED, "search.micro_batch=1, or "),
        (["yarn"], FEW, ""),
        (["yarn"], replace(FEW, tune="fair"), "tuning.micro_batch=1, or "),
    ],
)
def test_out_of_memory_of_several_processes_suggests_smaller_settings(
    names, recipe, settings, monkeypatch
):
    assert extend_workflow._smaller_batches(names, recipe) == ""
    monkeypatch.setattr(extend_workflow, "processes", lambda: SimpleNamespace(num_processes=2))
    assert extend_workflow._smaller_batches(names, recipe) == settings


def test_refuses_a_folder_with_another_unfinished_search(tiny, tmp_path):
    work = tmp_path / ".patch.search"
    (work / "headscale" / "checkpoints" / "step-0000050").mkdir(parents=True)
    (work / "claim.toml").write_text("# another")
    with pytest.raises(FarspanError, match="holds the unfinished search of another extension"):
        extend(
            tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
        )
    assert (work / "claim.toml").read_text() == "# another"
    shutil.rmtree(work / "headscale")  # a search without a checkpoint is overwritten
    extend(tiny / "none", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW)
    assert not work.exists()


def test_a_search_of_other_defaults_is_another_search(monkeypatch):
    """Defaults change between versions; where a setting is given, they do not matter."""
    job = job_for(BY_NAME["farspan-none"].build())

    def claim(search: SearchConfig) -> str:
        run = SimpleNamespace(config=replace(FEW, search=search), method="headlog", start=None)
        return extend_workflow._search_claim(job, run)

    default, given = SearchConfig(), SearchConfig(answers=0.2)
    before = [claim(default), claim(given)]
    full = search_config.FULL
    monkeypatch.setattr(search_config, "FULL", full._replace(answers=2 * full.answers))
    assert claim(default) != before[0]
    assert claim(given) == before[1]
    assert claim(replace(given, micro_batch=4)) == before[1], "micro batches change no result"


@pytest.mark.long
def test_checkpoints_without_a_claim_are_not_adopted(tiny, tmp_path, monkeypatch):
    """Another extension's search, which was killed while it removed its folder."""
    options = dict(recipe=replace(FEW, search=QUICK))
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    expected = extend(
        tiny / "none", 128, tmp_path / "a", "headscale", data=tiny / "text.txt", **options
    )
    removed = []

    def killed(folder, ignore_errors=False):
        removed.append(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_folder.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            extend(
                tiny / "none",
                128,
                tmp_path / "b",
                "headscale",
                data=tmp_path / "other.txt",
                **options,
            )
    work = tmp_path / ".b.search"
    assert removed[0].parent == work
    assert list(work.glob("*/checkpoints/step-*")), "the kill left checkpoints"
    shutil.copytree(work, tmp_path / "copy")
    with pytest.raises(FarspanError, match="already exists"):
        extend(tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", **options)
    assert not work.exists(), "the command again removes what belongs to nobody"
    (tmp_path / "copy").rename(work)
    shutil.rmtree(tmp_path / "b")
    result = extend(
        tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", **options
    )
    assert torch.equal(result.patch.scales.base, expected.patch.scales.base)
    assert not work.exists()


def test_a_search_that_cannot_be_removed_does_not_spoil_the_patch(tiny, tmp_path, monkeypatch):
    remove = search_folder._remove

    def fail_at_the_end(folder):
        if (tmp_path / "b").exists():
            raise OSError(5, "Input/output error")
        remove(folder)

    monkeypatch.setattr(search_folder, "_remove", fail_at_the_end)
    recipe = replace(FEW, search=QUICK)
    extend(tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", recipe=recipe)
    assert (tmp_path / "b" / "patch.json").exists()


def test_an_output_that_appears_meanwhile_is_refused_before_the_search(tiny, tmp_path, monkeypatch):
    """Another process wrote it and gave its lock back."""
    prepare = extend_workflow.prepare

    def prepare_late(*arguments):
        prepared = prepare(*arguments)
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "patch.json").touch()
        return prepared

    monkeypatch.setattr(extend_workflow, "prepare", prepare_late)
    monkeypatch.setattr(extend_workflow, "_fit", lambda *arguments: pytest.fail("it searches"))
    with pytest.raises(FarspanError, match="already exists"):
        extend(tiny / "none", 128, tmp_path / "b", "headscale", data=tiny / "text.txt", recipe=FEW)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.long
def test_concurrent_extension_to_the_same_folder_is_refused(tiny, tmp_path):
    options = dict(data=tiny / "text.txt", recipe=replace(FEW, search=QUICK))

    def extend_again(label, steps):
        def advance(count=1, note=""):
            if "headscale" in label:  # the first one is searching
                with pytest.raises(
                    FarspanError,
                    match="another process is training in .*.patch.search; wait for it",
                ):
                    extend(tiny / "none", 128, tmp_path / "patch", "headscale", **options)
                advance.tried += 1

        advance.tried = 0
        tried.append(advance)
        return advance

    tried = []
    extend(tiny / "none", 128, tmp_path / "patch", "headscale", progress=extend_again, **options)
    assert sum(advance.tried for advance in tried) > 0
    assert (tmp_path / "patch" / "patch.json").exists()
    assert not (tmp_path / ".patch.search").exists()


def test_says_what_the_model_itself_scales_at_the_target(tiny, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / "none" / name, tmp_path / name)
    config = BY_NAME["ministral3"].config()
    config.vocab_size = 300
    Ministral3ForCausalLM(config).save_pretrained(tmp_path)
    estimate = extend_workflow.estimate_extension(
        tmp_path, 128, "headscale", data=tiny / "text.txt", recipe=FEW
    )
    factor = 1 + 0.1 * math.log(1 + 127 // 16)
    assert any(f"in layers 0–3: ×{factor:.3g} at 128 tokens" in note for note in estimate.notes)


@pytest.mark.parametrize(
    ("is_auto", "row"), [(False, "method  yarn+continue"), (True, "auto tries")]
)
def test_an_estimate_says_auto_only_where_auto_was_asked_for(is_auto, row):
    text, stages = {"search": 10}, {"yarn": 3.0}
    estimate = ExtendEstimate(("yarn", "continue"), text, (), "quick", stages, 9.0, is_auto=is_auto)
    with console.capture() as captured:
        show_estimate(estimate, as_json=False)
    assert captured.get().startswith(row)


def test_warns_about_a_patch_that_raises_the_loss(tiny, tmp_path):
    worse = replace(FEW, search=replace(QUICK, steps=1, warmup=0, lr=(1e-9,), init=900.0))
    result = extend(
        tiny / "none", 128, tmp_path / "patch", "headscale", data=tiny / "text.txt", recipe=worse
    )
    assert result.after["loss@128"] > result.before["loss@128"]
    assert any("makes the loss at 128 tokens worse" in note for note in result.notes)
    equal_to_three_digits = {"loss@128": 8.3361}, {"loss@128": 8.3364}
    assert not list(extend_workflow._warnings(*equal_to_three_digits, 128))


def test_dynamic_ntk_refuses_another_train_length(tiny, tmp_path):
    with pytest.raises(
        FarspanError,
        match="dynamic-ntk starts at the .* of .*, 64, whatever --train-length 32",
    ):
        extend(
            tiny / "rope",
            128,
            tmp_path / "no",
            "dynamic-ntk",
            data=tiny / "text.txt",
            train_length=32,
            recipe=FEW,
        )


@pytest.mark.long
def test_extension_resumes_only_with_the_same_text(tiny, tmp_path):
    """An interrupted search ends in the same scales; settings without effect may change."""
    recipe = replace(FEW, search=replace(QUICK, steps=6, save_every=2))
    uninterrupted = extend(
        tiny / "none",
        128,
        tmp_path / "uninterrupted",
        "headscale",
        data=tiny / "text.txt",
        recipe=recipe,
    )

    def stop(label, steps):
        def advance(count=1, note=""):
            advance.count += 1
            if "headscale" in label and advance.count == 4:
                raise KeyboardInterrupt

        advance.count = 0
        return advance

    request = (tiny / "none", 128, tmp_path / "patch", "headscale")
    with pytest.raises(KeyboardInterrupt):
        extend(*request, data=tiny / "text.txt", recipe=recipe, progress=stop)
    assert (tmp_path / ".patch.search").exists()
    (tmp_path / "other.txt").write_text((tiny / "text.txt").read_text()[::-1])
    with pytest.raises(FarspanError, match="unfinished search of another"):
        extend(*request, data=tmp_path / "other.txt", recipe=recipe)
    resumed = extend(
        *request,
        data=tiny / "text.txt",
        recipe=replace(recipe, search=replace(recipe.search, save_every=1)),
    )
    assert torch.equal(resumed.patch.scales.base, uninterrupted.patch.scales.base)
    assert not (tmp_path / ".patch.search").exists()


STILL = SearchConfig(steps=1, batch=2, micro_batch=2, lr=(1e-9,), warmup=1)


def extend_patch(tiny, source, out, method="headlog", search=STILL, **options):
    options = {"data": tiny / "text.txt", "recipe": replace(FEW, search=search), **options}
    return extend(source, 192, out, method, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "method"),
    [
        ("uniform", "headscale"),
        ("uniform", "headlog"),
        ("headscale", "headscale"),
        ("headscale", "headlog"),
        ("logn", "headlog"),
        ("headlog", "headlog"),
    ],
)
def test_a_search_on_a_patch_starts_from_its_scales(tiny, tmp_path, first, method):
    """One step with a learning rate of almost 0 ends where it started, in one patch of the base."""
    text = tiny / "text.txt"
    recipe = RECIPES.get(first, FEW)
    before = extend(tiny / "none", 128, tmp_path / "first", first, data=text, recipe=recipe)
    result = extend_patch(tiny, tmp_path / "first", tmp_path / "second", method)
    lengths = torch.tensor([32.0, 128.0, 192.0])
    start, end = before.patch.scales, result.patch.scales
    assert torch.allclose(end.at(lengths), start.at(lengths).clamp(min=1), atol=1e-6)
    assert end.constant == (method == "headscale")
    assert result.patch.method == f"{first}+{method}"
    assert (result.patch.name, result.patch.target) == (str(tiny / "none"), 192)
    assert result.before["loss@128"] == pytest.approx(before.after["loss@128"], abs=0.5)
    before_is = f"values before are those of {tmp_path / 'first'}"
    assert any(before_is in note for note in result.notes)
    record = json.loads((tmp_path / "second" / "record.json").read_text())
    assert record["settings"]["start"]["method"] == first
    assert farspan.load(tmp_path / "second").model is not None


@pytest.mark.long
def test_a_search_on_a_patch_measures_and_keeps_all_of_it(tiny, tmp_path):
    """Layout, weights and scales: `before` is the patched model, and the search changes λ̂ only."""
    text, texts = (tiny / "text.txt").read_text(), tmp_path / "texts"
    texts.mkdir()
    data = {name: texts / f"{name}.txt" for name in ("search", "choose", "report")}
    for number, file in enumerate(data.values()):
        file.write_text(text[number * 10_000 : (number + 1) * 10_000])
    recipe = replace(CONVERTED, swan=replace(CONVERTED.swan, sharpen=False))
    swan = extend(tiny / "rope", 192, tmp_path / "swan", "swan", data=data, recipe=recipe)
    result = extend_patch(tiny, tmp_path / "swan", tmp_path / "out", search=QUICK, data=data)
    assert result.before == swan.after
    assert result.after != result.before
    assert not any("rotary" in note for note in result.notes), "advice for layers without windows"
    assert result.patch.layout == swan.patch.layout
    assert result.patch.scales.layers == swan.patch.layout.global_layers
    assert set(result.patch.weights) == set(swan.patch.weights)
    for name, weight in swan.patch.weights.items():
        assert torch.equal(result.patch.weights[name], weight), name
    again = extend_patch(tiny, tmp_path / "out", tmp_path / "again", data=data)
    assert again.before == result.after, "scales of the patch too"
    assert again.patch.method == "swan+headlog+headlog"


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "first", "tried"),
    [
        ("none", "uniform", ["headlog", "headscale"]),
        ("none", "logn", ["headlog"]),  # headscale refuses scales that grow
        ("rope", "swan", ["headlog", "headscale"]),  # other weights and no scales
    ],
)
def test_auto_on_a_patch_searches_on_from_it(tiny, tmp_path, source, first, tried):
    text = tiny / "text.txt"
    unsharpened = replace(CONVERTED, swan=replace(CONVERTED.swan, sharpen=False))
    recipe = unsharpened if first == "swan" else FEW
    extend(tiny / source, 128, tmp_path / "first", first, data=text, recipe=recipe)
    options = {"data": text, "recipe": replace(FEW, search=STILL)}
    estimate = extend_workflow.estimate_extension(tmp_path / "first", 192, **options)
    assert list(estimate.methods) == tried
    result = extend(tmp_path / "first", 192, tmp_path / "second", **options)
    assert result.patch.method in {f"{first}+{method}" for method in tried}
    assert ("against" in result.notes[-1]) == (len(tried) > 1)
    assert all(method in result.notes[-1] for method in tried)
    assert bool(result.patch.layout) == (first == "swan")
    assert seam.installed(farspan.load(tmp_path / "second").model)
    record = json.loads((tmp_path / "second" / "record.json").read_text())
    assert record["settings"]["start"]["method"] == first


def test_a_start_for_other_layers_is_refused_before_anything_is_measured(tiny, monkeypatch):
    monkeypatch.setattr(extend_workflow, "_announce", lambda prepared: pytest.fail("it starts"))
    recipe = replace(FEW, search=replace(QUICK, init=(1.1, 1.2, 1.3)))
    with pytest.raises(FarspanError, match="search.init has 3 scales, and 2 layers are scaled"):
        extend(tiny / "none", 128, method="headscale", data=tiny / "text.txt", recipe=recipe)


@pytest.mark.parametrize(
    ("first", "method", "search", "options", "message"),
    [
        ("uniform", "yarn", None, {}, "only scales can be fitted on one, not yarn"),
        ("ssmax", "auto", STILL, {}, r"another formula .* \(basis ln\)"),
        ("uniform", "logn", None, {}, "is a patch with scales, which logn would replace"),
        ("logn", "headscale", STILL, {}, "grow with the context, and headscale searches"),
        ("ssmax", "headlog", STILL, {}, r"another formula .* \(basis ln\)"),
        ("uniform", "headlog", QUICK, {}, "search.init=1.2 would have no effect"),
        ("uniform", "headlog", STILL, {"train_length": 32}, "trained on 64 tokens, and --train"),
    ],
)
def test_refuses_what_makes_no_sense_on_a_patch(
    tiny, tmp_path, first, method, search, options, message
):
    text = tiny / "text.txt"
    extend(tiny / "none", 128, tmp_path / "first", first, data=text, recipe=FEW)
    with pytest.raises(FarspanError, match=message):
        extend_patch(
            tiny,
            tmp_path / "first",
            tmp_path / "second",
            method,
            search=search or SearchConfig(),
            **options,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_patch_finds_its_base_from_any_folder(tiny, tmp_path, monkeypatch):
    """The base path looks like a hub id; exports show the relative path."""
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
        written = [
            path.read_text() for path in Path(format).iterdir() if path.suffix in (".json", ".md")
        ]
        assert any("runs/model, extended from 64 to 128" in text for text in written)
        assert not any(str(tmp_path / "runs") in text for text in written)


@pytest.mark.parametrize("name", ["nope-twin", "owner/model"])
def test_bundled_models_and_hub_ids_keep_their_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    patch = Patch("test", "0" * 64, 128, 64, name=name)
    assert extend_workflow._with_absolute_base(patch, name) is patch


def test_missing_base_is_reported_with_a_way_out(tiny, tmp_path, monkeypatch):
    def unreachable(*_args, **_options):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    shutil.copytree(tiny / "none", tmp_path / "model")
    extend(
        tmp_path / "model", 128, tmp_path / "patch", "uniform", data=tiny / "text.txt", recipe=FEW
    )
    patch = Patch.load(tmp_path / "patch")
    (tmp_path / "model").rename(tmp_path / "moved")
    for number, name in enumerate((patch.name, "runs/model", "model.gguf")):
        folder = replace(patch, name=name).save(tmp_path / str(number))
        with pytest.raises(
            FarspanError, match="the base model of the patch .* was not found"
        ) as caught:
            farspan.load(folder)
        way_out = f"put it into {folder / 'base'}, or set its path in"
        for part in (f"the patch in {folder} ", name, way_out):
            assert part in str(caught.value)
    shutil.copytree(tmp_path / "moved", tmp_path / "0" / "base")
    assert seam.installed(farspan.load(tmp_path / "0").model), "the way out works"


def test_dynamic_ntk_is_reset_between_measurements(tiny, tmp_path):
    """Beyond twice the length, the state kept from longer text would change shorter text."""
    result = extend(
        tiny / "rope", 192, tmp_path / "patch", "dynamic-ntk", data=tiny / "text.txt", recipe=FEW
    )
    assert result.proof == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SearchConfig(lr=()),
        lambda: SearchConfig(min_gain=-0.1),
        lambda: SearchConfig(lr=(-1.0,)),
        lambda: SearchConfig(batch=0),
        lambda: SearchConfig(save_every=0),
        lambda: SearchConfig(repeats=1.5),
        lambda: SearchConfig(passkeys=-0.5),
        lambda: SearchConfig(answers=-1.0),
        lambda: SearchConfig(repeats=0.6, passkeys=0.5),
        lambda: SearchConfig(spans=(1, 8)),
        lambda: SearchConfig(spans=(8, 8)),
        lambda: SearchConfig(spans=(8,)),
        lambda: SearchConfig(spans=(2, 4, 8)),
        lambda: TuningConfig(steps=-1),
        lambda: ExtendConfig(passkeys=-1),
        lambda: ExtendConfig(choose_windows=0),
        lambda: ExtendConfig(seed=-1),
        lambda: ExtendConfig(seed=2**20),
    ],
)
def test_invalid_settings_are_refused_by_name(wrong):
    with pytest.raises(
        FarspanError,
        match="(lr|min_gain|batch|save_every|repeats|answers|spans|steps|passkeys|choose_windows|"
        "seed) is",
    ):
        wrong()


def test_seeds_of_twenty_bits_are_accepted():
    assert ExtendConfig(seed=1_048_575).seed == 1_048_575


def test_default_recipe_is_the_default_config():
    assert read_extend_config(None, []) == ExtendConfig()
    assert read_extend_config(None, ["seed=0", "swan.max_loss=0.005"]) == ExtendConfig()
    assert read_extend_config(None, ["search.steps=3", "tune=fair"]).search.steps == 3
    with pytest.raises(FarspanError, match="choose fair"):
        read_extend_config(None, ["tune=much"])


@pytest.mark.long
def test_the_benchmark_compares_whole_searches(tiny, tmp_path, monkeypatch, capsys):
    """On a CPU: the counts of both searches, and ratios that follow from them."""
    script = Path(__file__).parent.parent / "benchmarks" / "search.py"
    options = ["--to", "128", "--data", str(tiny / "text.txt"), "--steps", "12"]
    options += ["--small", "--length", "64", "--rounds", "1", "--json", str(tmp_path / "out.json")]
    options += ["--settings", "steps=6,warmup=1,lr=[0.1]"]
    monkeypatch.setattr(sys, "argv", [str(script), "--model", str(tiny / "none"), *options])
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    results = json.loads((tmp_path / "out.json").read_text())
    reference, default, short = results["searches"].values()
    assert (reference["steps"], reference["gradients"]) == (12, 12 * 8)
    assert (short["steps"], short["gradients"]) == (6, 6 * 8)
    assert default["gradients"] == 8 * default["steps"]
    assert reference["forwards"] > default["forwards"] > 0
    assert (reference["ratio"], reference["difference"], reference["within"]) == (1, 0, True)
    for search in (default, short):
        assert search["ratio"] == search["seconds"] / reference["seconds"]
        assert search["difference"] == pytest.approx(search["loss"] - reference["loss"])
        assert search["within"] == (search["difference"] <= 0.005)
    rows = capsys.readouterr().out.splitlines()
    assert f"| {short['difference']:+.4f} | {short['ratio']:.2f} |" in rows[-1]


@pytest.mark.long
def test_uniform_scale_doubles_the_context_of_the_nope_model(tmp_path):
    """A uniform scale of 1.1 lowers the loss at 1,024 tokens by more than 3 nats."""
    model, tokenizer = farspan.load("nope-twin")
    from farspan.data.documents import read_documents

    text = next(iter(read_documents("python-docs/score"))).text
    ids = torch.tensor(tokenizer(text)["input_ids"])[: 2 * 1024].view(2, 1024)
    before = loss_by_position(model, ids)
    seam.install(model, Scales.uniform(1.1, layers=range(6), heads=8))
    after = loss_by_position(model, ids)
    assert after[-128:].mean() < before[-128:].mean() - 3
    assert after[256:511].mean() < before[256:511].mean() + 0.1


@pytest.mark.long
def test_four_processes_give_the_patch_of_one(tiny, tmp_path):
    """Each takes its share of every batch."""
    recipe = replace(FEW, search=replace(QUICK, batch=4))

    def search_scales(rank: int) -> None:
        extend(tiny / "none", 128, tmp_path / "four", "headscale", **options)

    options = dict(data=tiny / "text.txt", recipe=recipe)
    in_processes(4, search_scales, tmp_path)
    extend(tiny / "none", 128, tmp_path / "one", "headscale", **options)
    one, four = (Patch.load(tmp_path / name) for name in ("one", "four"))
    assert (one.scales.base - four.scales.base).abs().max() <= 1e-6
    assert not torch.equal(one.scales.base, torch.ones_like(one.scales.base))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
SHORT_SEARCH = ["search.steps=4", "search.batch=2", "search.lr=[0.1]", "search.init=1.2"]
MIXTURE = """
folder = "{folder}"
cache = "{folder}/cache"
processes = 1

[sources.first]
files = "first.txt"
weight = 3

[sources.second]
files = "second.txt"
weight = 1
"""
SHORT_TUNING = ["tuning.steps=4", "tuning.batch=4", "tuning.micro_batch=2", "swan.measured_rows=1"]


def data_with_a_mixture(folder: Path, text: str) -> dict[str, str]:
    """A mixture to search on, and other text to choose by and to report on."""
    lines = text.splitlines(keepends=True)
    for number, name in enumerate(("first", "second", "choose", "report")):
        (folder / f"{name}.txt").write_text("".join(lines[number::4]))
    (folder / "mix.toml").write_text(MIXTURE.format(folder=folder))
    names = {"search": "mix.toml", "choose": "choose.txt", "report": "report.txt"}
    return {split: str(folder / name) for split, name in names.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "method", "settings"),
    [
        pytest.param(
            *("none", "headscale", [*SHORT_SEARCH, "search.warmup=1"]),
            marks=pytest.mark.manual,  # headlog takes the same path, and its plateau
        ),
        ("none", "headlog", ["search.warmup=1"]),
        ("rope", "swan", [*SHORT_TUNING, "tuning.warmup=1", "swan.window=8"]),
    ],
)
def test_torchrun_gives_the_patch_of_one_process(
    model, method, settings, tiny, tmp_path, tmp_path_factory
):
    """Two processes, started as a user would, find what one process finds. Scales are searched on
    a mixture, which one process packs and both read."""
    texts, data = tmp_path_factory.mktemp("texts"), str(tiny / "text.txt")
    words = ["--data", data]
    if method != "swan":
        data = data_with_a_mixture(texts, (tiny / "text.txt").read_text())
        words = [f"--data={name}={file}" for name, file in data.items()]
    overrides = [*settings, "passkeys=0", "choose_windows=2", "report_windows=2"]
    options = ["--to", "128", "--method", method, *words]
    command = [*TORCHRUN, "-m", "farspan", "extend", str(tiny / model), *options]
    process = subprocess.run(
        [*command, "-o", str(tmp_path / "two"), *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.count("loss after") == 1
    shutil.rmtree(texts / "cache", ignore_errors=True)  # the other run packs the mixture again
    extend(tiny / model, 128, tmp_path / "one", method, data=data, overrides=overrides)
    one, two = (Patch.load(tmp_path / name) for name in ("one", "two"))
    assert one.layout == two.layout
    if method != "swan":
        assert torch.allclose(one.scales.base, two.scales.base, atol=1e-5)
        searches = [
            json.loads((tmp_path / name / "record.json").read_text())["searches"][0]
            for name in ("one", "two")
        ]
        assert searches[0]["end"] == searches[1]["end"]
        losses = [search["choose_losses"] for search in searches]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    else:
        assert len(one.weights) > 10
        for name, weight in one.weights.items():
            assert torch.allclose(weight, two.weights[name], atol=1e-5), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
