"""`farspan eval` measures each cell once and gives the same numbers however it is run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import farspan
from farspan import cli
from farspan.attention import seam
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.cells import cell_key
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import FarspanError
from farspan.evals import perplexity
from farspan.evals.commonsense import TASKS, Commonsense
from farspan.evals.gates import METRICS, GateResult, check_gate, parse_gate
from farspan.evals.longbench import load_tasks
from farspan.evals.needle import Needle
from farspan.evals.nonliteral import NonLiteral
from farspan.evals.passkey import Passkey, PrefixCache
from farspan.evals.perplexity import Perplexity, Text
from farspan.evals.results import EvalResult
from farspan.evals.ruler import Ruler
from farspan.evals.scores import Score, ScoreKey, matching_score
from farspan.evals.suites import SUITES, EvalConfig, EvalPlan, make_plan
from farspan.loading import UPCAST_BELOW, upcast_small_model
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.report.figures import evaluation_figures, passkey_heatmap
from farspan.train.metadata import write_training_metadata
from farspan.workflows import eval_cells, eval_models
from farspan.workflows import evaluate as evaluate_workflow
from farspan.workflows.eval_models import (
    load_eval_model,
    model_identity,
    passkeys_in_training,
)
from farspan.workflows.evaluate import evaluate
from test_train import in_processes

LENGTH = 256
SHAPE = dict(
    vocab_size=800, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
)
QUICK = {"stride": 64, "windows": 6}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Small random models with a tokenizer, a patch for one of them, and text."""
    folder = tmp_path_factory.mktemp("tiny")
    text = next(iter(read_documents("python-docs/score"))).text
    tokenizer = train_tokenizer([text[:40_000]], 800)
    torch.manual_seed(0)
    for position in ("none", "learned"):
        model = FarspanForCausalLM(
            FarspanConfig(**SHAPE, max_position_embeddings=LENGTH, position=position)
        )
        model.save_pretrained(folder / position)
        tokenizer.save_pretrained(folder / position)
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=800, hidden_size=32, n_layer=1, n_head=2))
    bloom.save_pretrained(folder / "bloom")
    tokenizer.save_pretrained(folder / "bloom")
    base = farspan.load(folder / "none").model
    scales = Scales.uniform(1.3, range(2), 2)
    Patch("test", fingerprint(base), 512, LENGTH, scales, name=str(folder / "none")).save(
        folder / "patch"
    )
    for number in range(9):
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{number}.txt").write_text(
            text[number * 3000 : (number + 1) * 3000 + 500 * number]
        )
    (folder / "text" / "short.txt").write_text("Too short to be read.")
    return folder


def measure(tiny: Path, out: Path, model: str = "none", **options) -> EvalResult:
    settings = {"data": str(tiny / "text"), "lengths": (256, 384), **QUICK, **options}
    return evaluate(tiny / model, "quick", out, **settings)


def numbers(result: EvalResult) -> list[tuple]:
    return [
        (s.eval, s.metric, s.length, s.value, s.low, s.high, s.n, tuple(sorted(s.tags.items())))
        for s in result.scores
    ]


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch):
    """Figures take longest; those of `whole` are drawn, because it is measured before."""
    monkeypatch.setattr(evaluate_workflow.figures, "evaluation_figures", lambda result: {})


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> EvalResult:
    return measure(tiny, tmp_path_factory.mktemp("whole") / "results")


@pytest.fixture
def counted(monkeypatch) -> Counter:
    """The number of cells that each evaluation computes."""
    times: Counter = Counter()
    for kind in (Perplexity, Passkey):

        def run(self, *args, own=kind.run, name=kind.__name__):
            times[name] += 1
            return own(self, *args)

        monkeypatch.setattr(kind, "run", run)
    return times


def test_quick_suite_scores_and_files(whole):
    shown = [(score.metric, score.length) for score in whole.scores if not score.tags.get("detail")]
    assert shown == [
        ("ppl", 256),
        ("ppl", 384),
        ("passkey", 256),
        ("passkey", 384),
        ("passkey_mean", 256),
        ("passkey_grid_mean", 384),
    ]
    ppl = whole.scores[0]
    assert ppl.tags["task"] == "text"
    assert ppl.tags["skipped"] >= 1
    assert ppl.tags["windows"] == 6
    assert ppl.low < ppl.value < ppl.high
    record = json.loads((whole.folder / "record.json").read_text())
    assert record["command"] == "eval"
    assert set(record["scores"][0]) == {
        "eval",
        "metric",
        "length",
        "value",
        "low",
        "high",
        "n",
        "tags",
    }
    assert [score["value"] for score in record["scores"]] == [score.value for score in whole.scores]
    lines = [
        json.loads(line)
        for line in (whole.folder / "samples" / "passkey.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 2 * 5, "one key at each depth: the preset of a CPU"
    assert {line["length"] for line in lines} == {256, 384}
    windows = [
        json.loads(line)
        for line in (whole.folder / "samples" / "perplexity.jsonl").read_text().splitlines()
    ]
    assert (
        sum(line["scored"] for line in windows if line["length"] == 256 and "losses" not in line)
        == ppl.n
    )
    for name in ("perplexity.png", "perplexity.svg", "passkey.png", "passkey.svg"):
        assert (whole.folder / name).stat().st_size > 1000
    assert not list((whole.folder / "claims").iterdir())


def test_finished_cells_are_not_measured_again(tiny, whole, counted):
    assert numbers(measure(tiny, whole.folder)) == numbers(whole)
    assert not counted
    more = measure(tiny, whole.folder, lengths=(256, 384), seed=1)
    assert counted["Passkey"] == 10, "another seed is another cell"
    assert numbers(more) != numbers(whole)


def test_a_results_folder_holds_one_suite(tiny, whole, counted):
    with pytest.raises(
        FarspanError, match="holds the results of suite quick; choose another folder"
    ):
        evaluate(tiny / "none", "passkey", whole.folder, lengths=(256,))
    assert not counted


@pytest.mark.long
def test_an_interrupted_run_resumes_to_the_same_numbers(tiny, whole, tmp_path, monkeypatch):
    times = 0
    for kind in (Perplexity, Passkey):

        def run(self, *args, own=kind.run):
            nonlocal times
            times += 1
            if times in (2, 5):
                raise KeyboardInterrupt
            return own(self, *args)

        monkeypatch.setattr(kind, "run", run)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measure(tiny, tmp_path / "results")
        assert not (tmp_path / "results" / "record.json").exists()
    assert numbers(measure(tiny, tmp_path / "results")) == numbers(whole)
    assert times == 2 + sum(1 for _ in (tmp_path / "results" / "cells").glob("*.json"))


def test_a_broken_cell_is_set_aside_and_measured_again(tiny, whole, tmp_path, counted):
    measure(tiny, tmp_path / "results")
    before, messages = counted.total(), []
    victim = sorted((tmp_path / "results" / "cells").glob("*.json"))[0]
    victim.write_text(victim.read_text()[:100])
    assert numbers(measure(tiny, tmp_path / "results", say=messages.append)) == numbers(whole)
    assert counted.total() == before + 1
    assert len(messages) == 1
    assert "set aside" in messages[0]


@pytest.mark.long
def test_two_processes_share_cells_with_equal_numbers(tiny, whole, tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "farspan",
    ]
    words = [
        "eval",
        str(tiny / "none"),
        "--data",
        str(tiny / "text"),
        "--lengths",
        "256,384",
        "--stride",
        "64",
    ]
    words += ["--windows", "6", "-o", str(tmp_path / "results")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("passkey_mean") == 1, "one process prints"
    record = json.loads((tmp_path / "results" / "record.json").read_text())
    assert [score["value"] for score in record["scores"]] == [score.value for score in whole.scores]
    assert [score["low"] for score in record["scores"]] == [score.low for score in whole.scores]


@pytest.mark.long
def test_four_processes_share_cells_with_equal_numbers(tiny, whole, tmp_path):
    def check(rank: int) -> None:
        assert numbers(measure(tiny, tmp_path / "results")) == numbers(whole)

    in_processes(4, check, tmp_path)
    record = json.loads((tmp_path / "results" / "record.json").read_text())
    assert [score["value"] for score in record["scores"]] == [score.value for score in whole.scores]


@pytest.mark.long
def test_a_baseline_is_measured_on_the_same_cells(tiny, whole, tmp_path):
    result = measure(tiny, tmp_path / "results", "patch", baseline=tiny / "none")
    assert result.baseline == str(tiny / "none")
    assert [score.value for score in result.baseline_scores] == [
        score.value for score in whole.scores
    ]
    ppl = result.scores[0]
    other = matching_score(ppl, result.baseline_scores)
    assert (other.metric, other.length, other.n) == ("ppl", 256, ppl.n)
    assert other.value != ppl.value, "the patch does something"
    record = json.loads((tmp_path / "results" / "record.json").read_text())
    assert record["vs"]["model"] == result.baseline
    assert len(record["vs"]["scores"]) == len(record["scores"])


@pytest.mark.long
def test_a_baseline_is_loaded_with_the_position_of_its_patch(tiny, tmp_path):
    """A checkpoint typed llama that was trained without rotation, beside a patch that knows it."""
    base = tmp_path / "typed-llama"
    hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, max_position_embeddings=LENGTH)).save_pretrained(
        base
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / "none" / file, base)
    patch = Patch(
        "test", fingerprint(farspan.load(base, position="none").model), 512, LENGTH, position="none"
    )
    patch = replace(patch, scales=Scales.uniform(1.0 + 1e-6, range(2), 2), name=str(base))
    patch.save(tmp_path / "patch")
    options = {"data": str(tiny / "text"), "lengths": (256,), "windows": 2}
    result = evaluate(
        tmp_path / "patch", "perplexity", tmp_path / "results", baseline=base, **options
    )
    assert result.baseline_scores[0].value == pytest.approx(result.scores[0].value, rel=1e-6)
    rotary = evaluate(base, "perplexity", tmp_path / "alone", **options)
    assert rotary.scores[0].value != pytest.approx(result.scores[0].value, rel=1e-6), (
        "with rotation it is another model"
    )


@pytest.mark.parametrize("model", ["bloom", "learned"])
def test_any_family_is_measured(tiny, tmp_path, model):
    result = measure(tiny, tmp_path / "results", model, lengths=(200,))
    assert {score.metric for score in result.scores} >= {"ppl", "passkey"}


def test_default_lengths_depend_on_the_model(tiny):
    model = load_eval_model(tiny / "none", {})
    plan = make_plan(model, SUITES["quick"], EvalConfig(), {})
    assert plan.lengths == (256, 512)
    assert plan.grid[-1] == 512
    assert len(plan.grid) == 4
    patched = replace(model, extended_length=1000)
    assert make_plan(patched, SUITES["quick"], EvalConfig(), {}).lengths == (256, 512, 1000)
    plan = make_plan(patched, SUITES["paper"], EvalConfig(), {})
    assert plan.lengths == (256, 512, 1000, 1024, 2048), "to 8 L, as Table 2 of Wang 2024"
    assert (len(plan.grid), plan.grid[-1], plan.contexts) == (16, 2000, (1000,))
    asked = make_plan(patched, SUITES["paper"], EvalConfig((128, 512)), {})
    assert (asked.lengths, asked.lengths_requested) == ((128, 512), True)
    assert (asked.grid, asked.contexts) == (plan.grid, plan.contexts), "--lengths of perplexity"
    with pytest.raises(FarspanError, match="train length; choose suites that take --lengths"):
        make_plan(replace(model, train_length=None), SUITES["paper"], EvalConfig((128,)), {})
    limited = replace(model, max_positions=300)
    plan = make_plan(limited, SUITES["quick"], EvalConfig(), {})
    assert max(plan.lengths) <= 300
    assert (len(plan.grid), plan.grid[-1]) == (4, 300), "up to the end of its table"


@pytest.mark.parametrize("name", ["needle", "nonliteral", "ruler"])
@pytest.mark.parametrize(("limit", "samples"), [(None, 20), (3, 3)])
def test_needles_have_20_samples_or_the_limit(tiny, name, limit, samples):
    model = load_eval_model(tiny / "none", {})
    config = EvalConfig((2048,), limit=limit, tasks=("vt",) if name == "ruler" else ())
    (build,) = SUITES[name].builds
    assert build(model, make_plan(model, SUITES[name], config, {})).samples == samples


@pytest.mark.parametrize(
    ("name", "task"), [("needle", "single"), ("ruler", "vt"), ("commonsense", "piqa")]
)
def test_suites_measure_the_chosen_tasks_once(tiny, name, task):
    model = load_eval_model(tiny / "none", {})
    (build,) = SUITES[name].builds

    def tasks(*chosen: str) -> tuple[str, ...]:
        config = EvalConfig((2048,), tasks=chosen)
        return build(model, make_plan(model, SUITES[name], config, {})).tasks

    assert tasks(task, task) == (task,)
    assert len(tasks()) > 1, "all of the suite"


def test_requested_lengths_are_not_cut_to_the_text(tiny):
    model = load_eval_model(tiny / "none", {})
    plan = make_plan(model, SUITES["perplexity"], EvalConfig((256, 10**6)), {"a": tiny / "text"})
    (build,) = SUITES["perplexity"].builds
    with pytest.raises(FarspanError, match="no document of a has 1000000 tokens"):
        build(model, plan)
    assert build(model, replace(plan, lengths_requested=False)).lengths == (256,)
    none_fits = replace(plan, lengths=(10**6, 10**7), lengths_requested=False)
    with pytest.raises(FarspanError, match="no document of a has 1000000 tokens"):
        build(model, none_fits)


@pytest.mark.parametrize(
    ("suite", "preset", "depths", "keys"),
    [("quick", "quick", 5, 1), ("quick", "full", 5, 2), ("passkey", "full", 10, 10)],
)
def test_suite_and_preset_decide_the_passkeys(tiny, suite, preset, depths, keys):
    model = load_eval_model(tiny / "none", {})
    *_, build = SUITES[suite].builds
    grid = build(model, make_plan(model, SUITES[suite], EvalConfig((256,), preset=preset), {}))
    assert (grid.depths, grid.keys) == (depths, keys)


def test_modes_of_perplexity_follow_the_suite_unless_one_is_chosen(tiny, tmp_path):
    for name, suite in SUITES.items():
        assert suite.complete(EvalConfig()).mode == ("paper-a" if name == "paper" else "same")
        assert suite.complete(EvalConfig(mode="yarn")).mode == "yarn"
    texts = dict.fromkeys(("pg19", "proofpile", "longbench"), tiny / "text")
    with pytest.raises(FarspanError, match="mode paper-a scores others at each; choose --mode"):
        evaluate(tiny / "none", "paper", tmp_path / "out", data=texts, metric="longppl")


# LongPPL.


def measure_longppl(tiny: Path, out: Path, model: str = "none", **options) -> EvalResult:
    settings = {"lengths": (64, 256, 384), "stride": 32, "windows": 12, "metric": "longppl"}
    settings |= {"data": str(tiny / "text"), **options}
    return evaluate(tiny / model, "perplexity", out, **settings)


@pytest.fixture
def copying(monkeypatch):
    """Models predict pairs of tokens that stand earlier in the window; a patched one does not."""

    def losses(model, rows, count):
        token_losses = torch.full((len(rows), count), 5.0)
        if seam.installed(model):
            return token_losses - 2
        for number, row in enumerate(rows.tolist()):
            pairs = list(pairwise(row))
            for place in range(len(pairs) - count, len(pairs)):
                if pairs[place] in pairs[:place]:
                    token_losses[number, place - len(pairs)] = 0.1
        return token_losses

    monkeypatch.setattr(perplexity, "last_losses", losses)


def of_metric(scores, metric: str = "longppl") -> dict[int, Score]:
    return {score.length: score for score in scores if score.metric == metric}


def test_facts_name_the_gates_that_fail():
    gates = (GateResult("ppl<=9", True, "ppl is 8"), GateResult("ppl<=7", False, "ppl is too high"))
    result = EvalResult("model", "quick", (), Path("out"), gates=gates)
    assert result.facts()["failed gates"] == "ppl is too high"


def test_longppl_is_scored_on_the_key_tokens_of_the_baseline(tiny, tmp_path, copying):
    gates = ["longppl@256<=1.05x", "text:longppl@64<=1x"]
    result = measure_longppl(
        tiny, tmp_path / "results", "patch", baseline=tiny / "none", gate=gates
    )
    own, base = of_metric(result.scores), of_metric(result.baseline_scores)
    assert list(own) == list(base) == [64, 256, 384]
    assert len({score.n for score in (*own.values(), *base.values())}) == 1
    assert 0 < own[64].n < of_metric(result.scores, "ppl")[64].n
    assert [math.log(score.value) for score in own.values()] == pytest.approx([3, 3, 3])
    assert [math.log(score.value) for score in base.values()] == pytest.approx([5, 0.1, 0.1])
    assert base[256].value < of_metric(result.baseline_scores, "ppl")[256].value
    assert own[64].tags["evaluator"] == str(tiny / "none")
    assert (own[64].tags["short"], own[64].tags["long"]) == (64, 256), "384 is not trained on"
    assert [gate.holds for gate in result.gates] == [False, True]
    assert not result.notes
    metrics = [score.metric for score in result.scores if not score.tags.get("detail")]
    assert metrics[:6] == ["ppl"] * 3 + ["longppl"] * 3


@pytest.mark.long
def test_without_a_baseline_a_model_chooses_its_own_key_tokens(tiny, tmp_path, copying):
    result = measure_longppl(tiny, tmp_path / "results")
    assert of_metric(result.scores)[384].tags["evaluator"] == str(tiny / "none")
    patched = measure_longppl(tiny, tmp_path / "patched", "patch")
    assert not of_metric(patched.scores)
    assert patched.notes == (
        f"text has no key token of {tiny / 'patch'}, so there is no longppl of it; use longer "
        "text or a shorter shortest length",
    )


def test_longppl_is_in_the_table_and_in_json(tiny, tmp_path, copying, monkeypatch, capsys):
    words = ["--suite", "perplexity", "--metric", "longppl", "--lengths", "64,256"]
    words += ["--windows", "12", "--data", str(tiny / "text"), "-o", str(tmp_path / "results")]
    code, out, _ = run_command(monkeypatch, capsys, str(tiny / "none"), *words)
    assert code == 0
    assert "longppl text" in out
    code, out, _ = run_command(monkeypatch, capsys, str(tiny / "none"), *words, "--json")
    scores = [score for score in json.loads(out)["scores"] if score["metric"] == "longppl"]
    assert [score["length"] for score in scores] == [64, 256]
    assert {"value", "low", "high", "n"} <= set(scores[0])


@pytest.mark.long
def test_longppl_leaves_the_cells_of_perplexity(tiny, tmp_path, counted):
    plain = measure_longppl(tiny, tmp_path / "results", metric="ppl")
    before = counted["Perplexity"]
    with_longppl = measure_longppl(tiny, tmp_path / "results")
    assert counted["Perplexity"] == before + 3, "windows again; loss by position is reused"
    assert numbers(with_longppl)[: len(plain.scores)] == numbers(plain)
    counted.clear()
    assert numbers(measure_longppl(tiny, tmp_path / "results", metric="ppl")) == numbers(plain)
    assert numbers(measure_longppl(tiny, tmp_path / "results")) == numbers(with_longppl)
    assert not counted


def test_evaluators_that_cannot_choose_key_tokens_are_refused(tiny, tmp_path, counted):
    (tmp_path / "other").mkdir()
    for file in (tiny / "none").iterdir():
        shutil.copy(file, tmp_path / "other")
    train_tokenizer(["other words " * 99], 300).save_pretrained(tmp_path / "other")
    with pytest.raises(FarspanError, match="the config of .*bloom does not give its train length"):
        measure_longppl(tiny, tmp_path / "results", baseline=tiny / "bloom")
    with pytest.raises(FarspanError, match="two lengths up to the train length of .*none"):
        results, lengths = tmp_path / "results", (256, 384)
        measure_longppl(tiny, results, "patch", baseline=tiny / "none", lengths=lengths)
    with pytest.raises(
        FarspanError, match="other tokens than that of .*none; choose a baseline with the same"
    ):
        measure_longppl(tiny, tmp_path / "results", baseline=tmp_path / "other")
    assert not counted, "nothing was measured"
    assert not (tmp_path / "results").exists()


def test_a_baseline_of_the_same_name_keeps_its_own_samples(tiny, tmp_path):
    """A model object that has changed is named as the folder that it was loaded from."""
    model, tokenizer = farspan.load(tiny / "none")
    torch.nn.init.normal_(model.lm_head.weight)
    settings = {"lengths": (64,), "stride": 32, "windows": 2, "data": str(tiny / "text")}
    out, name = tmp_path / "out", str(tiny / "none")
    result = evaluate((model, tokenizer), "perplexity", out, baseline=tiny / "none", **settings)
    assert (result.model, result.baseline) == (name, f"{name} (baseline)")
    rows = [json.loads(line) for line in (out / "samples/perplexity.jsonl").open()]
    losses = {row["model"]: row["nll"] for row in rows if "nll" in row}
    assert losses.keys() == {result.model, result.baseline}
    assert losses[result.model] != losses[result.baseline]
    record = json.loads((out / "record.json").read_text())
    assert record["settings"]["identities"].keys() == losses.keys()
    same = evaluate(tiny / "none", "perplexity", tmp_path / "same", baseline=name, **settings)
    assert same.baseline == name


# What a result depends on.


def test_model_identity_depends_on_what_the_model_computes(tiny, tmp_path):
    model, tokenizer = farspan.load(tiny / "none")
    own = model_identity(model, tokenizer, None)
    model.save_pretrained(tmp_path / "moved")
    tokenizer.save_pretrained(tmp_path / "moved")
    assert model_identity(*farspan.load(tmp_path / "moved"), None) == own
    assert model_identity(model.half(), tokenizer, None) != own
    patch = Patch.load(tiny / "patch")
    patched, _ = farspan.load(tiny / "patch")
    names = [model_identity(patched, tokenizer, patch)]
    stronger = replace(patch, scales=Scales.uniform(1.31, range(2), 2))
    names.append(model_identity(patched, tokenizer, stronger))
    names.append(model_identity(farspan.load(tiny / "learned").model, tokenizer, None))
    assert len({str(name) for name in (own, *names)}) == 4


def test_model_identity_sees_changes_below_bf16(tiny):
    model, tokenizer = farspan.load(tiny / "none")
    own = model_identity(model, tokenizer, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    rounded = model_identity(model, tokenizer, None)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1 + 1e-4)
    assert fingerprint(model) == fingerprint(farspan.load(tiny / "none").model), (
        "equal for a patch, which rounds to bf16"
    )
    assert len({str(name) for name in (own, rounded, model_identity(model, tokenizer, None))}) == 3


def test_model_identity_includes_begin_and_end_tokens(tiny):
    model, tokenizer = farspan.load(tiny / "none")
    names = [model_identity(model, tokenizer, None)]
    model.generation_config.eos_token_id = [0, 5]  # where needles and LongBench's answers end
    names.append(model_identity(model, tokenizer, None))
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)  # with which yarn's windows begin
    names.append(model_identity(model, tokenizer, None))
    assert len({str(name) for name in names}) == 3


def test_a_new_cell_format_is_measured_again(tiny, whole, tmp_path, counted, monkeypatch):
    measure(tiny, tmp_path / "results", lengths=(256,))
    before = counted.total()
    monkeypatch.setattr(eval_cells, "FORMAT", 99)
    measure(tiny, tmp_path / "results", lengths=(256,))
    assert counted.total() == 2 * before > 0


def test_passkeys_in_training_are_read_from_the_model_folder(tiny, tmp_path):
    assert passkeys_in_training("nope-twin") == passkeys_in_training("rope-twin") == "yes"
    assert passkeys_in_training(tiny / "none") == "unknown"
    assert passkeys_in_training("owner/name") == "unknown"
    write_training_metadata(tmp_path, passkey_documents=False)
    assert passkeys_in_training(tmp_path) == "no"
    base = farspan.load(tiny / "none").model
    Patch("test", fingerprint(base), 512, LENGTH, name="nope-twin").save(tmp_path / "patch")
    assert passkeys_in_training(tmp_path / "patch") == "yes", "a patch inherits it from its base"
    searched = tmp_path / "searched"
    Patch("test", fingerprint(base), 512, LENGTH, name=str(tiny / "none")).save(searched)
    for share, expected in ((0.0, "unknown"), (0.25, "yes")):
        record = {"searches": [{"passkeys": 0.0}, {"passkeys": share}]}
        (searched / "record.json").write_text(json.dumps(record))
        assert passkeys_in_training(searched) == expected


# Gates.


def score(metric: str, length: int, value: float, **tags) -> Score:
    return Score("perplexity", metric, length, value, value, value, 1, {"task": "text", **tags})


@pytest.mark.parametrize(
    ("gate", "holds"),
    [
        ("ppl@512<=20", True),
        ("ppl@512<20", False),
        ("ppl@512 >= 20", True),
        ("ppl@512>19.9", True),
        ("ppl@512<=1.05x", True),
        ("ppl@512<=0.9x", False),
        ("ppl@1k<=1.05x", False),
        ("ppl<=30", True),
        ("ppl<=25", False),
        ("text:ppl@512<=20", True),
        ("perplexity:ppl@512<=20", True),
        ("ppl@512<=2e1", True),
    ],
)
def test_gates(gate, holds):
    mine = (score("ppl", 512, 20.0), score("ppl", 1024, 30.0), score("ppl", 512, 99.0, detail=True))
    base = (score("ppl", 512, 20.0), score("ppl", 1024, 20.0))
    verdict = check_gate(parse_gate(gate), mine, base)
    assert verdict.holds == holds
    assert ("not " in verdict.detail) == (not holds)


@pytest.mark.parametrize(
    "metric", sorted({*METRICS, *(task.metric for task in load_tasks().values())})
)
def test_every_metric_can_stand_in_a_gate(metric):
    gate = parse_gate(f"some-task:{metric}@2k>=0.5")
    assert (gate.task, gate.metric, gate.length) == ("some-task", metric, 2048)


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        ("ppl@512", "'ppl@512' is not a valid gate; write it as ppl@512<=1.05x"),
        ("ppl@512<=1.05y", "is not a valid gate"),
        ("ppl@512=<20", "is not a valid gate"),
        ("pppl@512<=20", "uses the unknown metric 'pppl'; did you mean ppl"),
        ("ppl@five<=20", "'five' is not a length"),
    ],
)
def test_invalid_gates_are_refused(gate, sentence):
    with pytest.raises(FarspanError, match=sentence):
        parse_gate(gate)


def test_gates_on_unmeasured_scores_are_refused(tiny, tmp_path, counted):
    for gate, sentence in (
        (
            "ppl@777<=20",
            "uses the length 777, but ppl is measured at 256, 384; change the length or --lengths",
        ),
        ("passkey_mean@384>=0.5", "uses the length 384, but passkey_mean is measured at 256"),
        ("average:ppl<=9", "uses the task average, but ppl is measured on text"),
        ("recall>=0.5", "uses recall, but this suite measures ppl, passkey, passkey_mean"),
        ("pg91:ppl<=9", "uses the task pg91, but ppl is measured on text"),
        ("f1>=3", "uses f1"),
    ):
        with pytest.raises(FarspanError, match=sentence):
            measure(tiny, tmp_path / "results", gate=[gate])
    assert not counted, "nothing was measured"
    with pytest.raises(
        FarspanError, match="a gate with x compares with a baseline; add --baseline MODEL"
    ):
        measure(tiny, tmp_path / "results", gate=["ppl@256<=1.05x"])


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    """One item each of two LongBench tasks and of two harness tasks, one without acc_norm."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = [
        {"dataset": task, "context": "A stone.", "input": "What?", "answers": ["stone"]}
        for task in LONG
    ]
    (folder / "longbench.jsonl").write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    )
    items = {
        "boolq": {"passage": "A stone is old.", "question": "is a stone old", "answer": True},
        "piqa": {"goal": "Clean a stone", "sol1": "with water", "sol2": "with fire", "label": 0},
    }
    for task, item in items.items():
        (folder / task).mkdir()
        (folder / task / "val.jsonl").write_text(json.dumps(item) + "\n")
    return folder


LONG = ("hotpotqa", "trec")


def build_evaluation(name: str, lengths: tuple[int, ...], bench: Path, tiny: Path):
    if name == "commonsense":
        pytest.importorskip("lm_eval")
        return Commonsense(bench, max(lengths), tasks=("piqa", "boolq"))
    data = {
        "perplexity": {"a": tiny / "text", "b": tiny / "text"},
        "longbench": {"longbench": bench / "longbench.jsonl"},
    }
    config = EvalConfig(lengths, limit=1, windows=2, stride=64)
    model = load_eval_model(tiny / "none", {})
    (build,) = SUITES[name].builds
    return build(model, make_plan(model, SUITES[name], config, data.get(name, {})))


def test_the_paper_suite_measures_what_wang_2024_measures(tiny, bench):
    """The last tokens of windows of exactly each length, 16 lengths × 10 depths × 10 passkeys up to
    twice the target, and LongBench with 5 beams."""
    model = replace(load_eval_model(tiny / "none", {}), extended_length=8 * LENGTH)
    texts = {
        "pg19": tiny / "text",
        "proofpile": tiny / "text",
        "longbench": bench / "longbench.jsonl",
    }
    plan = make_plan(model, SUITES["paper"], EvalConfig(), texts)
    perplexity, passkey, long, commonsense = (
        build(model, plan) for build in SUITES["paper"].builds
    )
    assert [text.name for text in perplexity.texts] == ["pg19", "proofpile"]
    assert (perplexity.mode, perplexity.stride) == ("paper-a", 128), "half the shortest length"
    assert plan.to_json()["mode"] == "paper-a"
    assert passkey.score_keys()[-2:] == [
        ScoreKey("passkey", "passkey", "passkey_mean", 8 * LENGTH),
        ScoreKey("passkey", "passkey", "passkey_grid_mean", 16 * LENGTH),
    ]
    cells = passkey.cells()
    assert len(cells) == 160
    assert {cell.length for cell in cells} == {256 * number for number in range(1, 17)}
    depths = Counter(cell.settings["depth"] for cell in cells)
    assert sorted(depths) == pytest.approx([number / 9 for number in range(10)], abs=1e-6)
    for cell in cells[::40]:
        keys, _, _ = passkey.documents(cell, model.tokenizer)
        assert len(keys) == cell.settings["keys"] == 10
    assert [cell.task for cell in long.cells()] == list(LONG)
    assert {cell.settings["beams"] for cell in long.cells()} == {5}
    assert (commonsense.tasks, commonsense.limit) == (tuple(TASKS), None)


@pytest.mark.parametrize("lengths", [pytest.param((256,), marks=pytest.mark.long), (256, 300)])
@pytest.mark.parametrize("name", ["perplexity", "passkey", "needle", "longbench", "commonsense"])
def test_score_keys_are_known_before_the_run(tiny, bench, name, lengths):
    evaluation = build_evaluation(name, lengths, bench, tiny)
    captured = evaluation.score_keys()
    model, tokenizer = farspan.load(tiny / "none")
    samples = [
        sample for cell in evaluation.cells() for sample in evaluation.run(cell, model, tokenizer)
    ]
    assert captured == [
        each.key for each in evaluation.score(samples) if not each.tags.get("detail")
    ]
    assert {place.metric for place in captured} <= {
        *METRICS,
        *(task.metric for task in load_tasks().values()),
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_metrics_of_commonsense_are_those_that_the_harness_defines(task):
    lm_eval = pytest.importorskip("lm_eval")
    folder = Path(lm_eval.__file__).parent / "tasks"
    text = (folder / TASKS[task].definition).read_text()
    if "include:" in text and "metric_list" not in text:
        text = (
            (folder / TASKS[task].definition)
            .with_name(text.split("include: ")[1].split()[0])
            .read_text()
        )
    assert tuple(re.findall(r"metric: (\w+)", text)) == TASKS[task].metrics


@pytest.mark.parametrize(
    ("name", "lengths", "gate", "sentence"),
    [
        ("passkey", (256,), "passkey_mean>=0.1", "passkey_mean, but this suite measures passkey;"),
        (
            "needle",
            (256, 512),
            "effective_length@256>=256",
            "the length 256, but effective_length is measured at 512;",
        ),
        (
            "longbench",
            (256,),
            "hotpotqa:average>=1",
            "the task hotpotqa, but average is measured on average;",
        ),
        ("longbench", (256,), "trec:f1>=1", "the task trec, but f1 is measured on hotpotqa;"),
        (
            "commonsense",
            (256,),
            "boolq:acc_norm>=0.1",
            "the task boolq, but acc_norm is measured on arc_challenge, arc_easy, h",
        ),
    ],
)
def test_a_gate_without_a_score_is_refused_before_measuring(
    tiny, bench, tmp_path, monkeypatch, name, lengths, gate, sentence
):
    if name == "commonsense":
        pytest.importorskip("lm_eval")
    monkeypatch.setattr(eval_cells, "_run_cell", None)
    data = bench / "longbench.jsonl" if name == "longbench" else None
    with pytest.raises(FarspanError, match=f"the gate '{gate}' uses {sentence}"):
        evaluate(tiny / "none", name, tmp_path / "results", lengths=lengths, data=data, gate=[gate])
    assert not (tmp_path / "results").exists()


def test_an_undecidable_gate_fails_and_results_are_written(tiny, tmp_path, monkeypatch):
    undecided = check_gate(
        parse_gate("ppl@512<=1x"), [score("ppl", 512, 20.0)], [score("ppl", 256, 20.0)]
    )
    assert (undecided.holds, undecided.detail) == (
        False,
        "text ppl@512 is 20, but the baseline has no score to compare with",
    )
    monkeypatch.setattr(
        evaluate_workflow, "check_gates", lambda gates, places: None
    )  # as if one had slipped through
    result = measure(tiny, tmp_path / "results", lengths=(256,), gate=["recall@256>=0.5"])
    (verdict,) = result.gates
    assert not verdict.holds
    assert (
        verdict.detail
        == "recall@256>=0.5 matches no score of this suite; choose one of ppl@256, passkey@256"
    )
    record = json.loads((tmp_path / "results" / "record.json").read_text())
    assert record["gates"][0]["holds"] is False
    assert record["scores"]


def run_command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["farspan", "eval", *words])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return stop.value.code or 0, captured.out, captured.err


@pytest.mark.long
def test_relative_gates_use_the_base_model_and_a_failed_gate_exits_3(
    tiny, tmp_path, monkeypatch, capsys
):
    words = [
        str(tiny / "patch"),
        "--data",
        str(tiny / "text"),
        "--lengths",
        "256",
        "--stride",
        "64",
    ]
    words += ["--windows", "4", "-o", str(tmp_path / "results")]
    code, out, err = run_command(monkeypatch, capsys, *words, "--gate", "ppl@256<=1.5x")
    assert (code, err.strip()) == (0, "")
    assert "holds" in out
    assert str(tiny / "none") in out, "the base of the patch is the baseline"
    code, out, err = run_command(monkeypatch, capsys, *words, "--gate", "ppl@256<=0.5x")
    assert code == 3
    assert "failed" in out
    assert "a gate failed: text ppl@256 is" in err
    code, out, _ = run_command(monkeypatch, capsys, *words, "--json")
    assert code == 0
    assert {"model", "scores", "gates", "notes"} <= set(json.loads(out))


# Bad input.


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--suite", "quik"], "suite 'quik' is unknown; did you mean quick"),
        (
            ["--suite", "paper"],
            "suite paper needs pg19 and proofpile and longbench; add --data pg19=PATH",
        ),
        (
            ["--suite", "passkey", "--data", "x=y"],
            "suite passkey reads no text; remove --data",
        ),
        (["--data", "a=x", "--data", "a=y"], "--data a= was given 2 times; give each name once"),
        (
            ["--suite", "needle", "--data", "hay=y"],
            "suite needle does not read --data hay=; it takes haystack=PATH",
        ),
        (["--mode", "jarn"], "perplexity mode 'jarn' is unknown; did you mean yarn"),
        (["--metric", "longpl"], "perplexity metric 'longpl' is unknown; did you mean longppl"),
        (
            ["--metric", "longppl", "--mode", "yarn"],
            "longppl compares the same tokens at two lengths, and mode yarn scores others at each; "
            "choose --mode same",
        ),
        (
            ["--metric", "longppl"],
            "of 256, 512 only one is; add a shorter length, for example --lengths 64,256,512",
        ),
        (["--suite", "needle", "--metric", "longppl"], "does not use --metric longppl"),
        (["--lengths", "64", "--stride", "64"], "a stride of 64 does not fit windows of 64 tokens"),
        (["--lengths", "1"], "a length of 1 leaves nothing to predict; use 2 or more"),
        (["--lengths", "100k"], "no document of python-docs has 102400 tokens"),
        (["--data", "nowhere.txt"], "'nowhere.txt' is not a file, folder or data set"),
        (["--gate", "nonsense"], "'nonsense' is not a valid gate"),
        (
            ["--beams", "5"],
            "suite quick does not use --beams 5; remove it, or choose a suite that does: paper,",
        ),
        (["--suite", "passkey", "--mode", "yarn"], "suite passkey does not use --mode yarn"),
        (
            ["--suite", "needle", "--windows", "4"],
            "suite needle does not use --windows 4",
        ),
        (
            ["--suite", "perplexity", "--limit", "4"],
            "suite perplexity does not use --limit 4",
        ),
    ],
)
def test_invalid_options_are_one_sentence(tiny, tmp_path, monkeypatch, capsys, words, sentence):
    code, out, err = run_command(
        monkeypatch, capsys, str(tiny / "none"), "-o", str(tmp_path / "results"), *words
    )
    assert code == 2
    assert out == ""
    assert sentence in err


def test_unusable_models_and_folders_are_one_sentence(tiny, tmp_path, monkeypatch, capsys):
    FarspanForCausalLM(FarspanConfig(**SHAPE)).save_pretrained(tmp_path / "mute")
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    cases = (
        (tmp_path / "mute", "results", [], "has no tokenizer to encode text with"),
        (
            tiny / "learned",
            "results",
            ["--lengths", "300"],
            "length 300 is beyond the position table of",
        ),
        (tiny / "none", "file", [], "exists and is not a results folder"),
        (tiny / "none", "full", [], "exists and is not a results folder"),
    )
    for model, out, words, sentence in cases:
        code, _, err = run_command(
            monkeypatch, capsys, str(model), "-o", str(tmp_path / out), *words
        )
        assert code == 2
        assert sentence in err
    assert not (tmp_path / "results").exists()


def test_a_position_table_shorter_than_a_passkey_document_is_refused(tiny, tmp_path):
    config = FarspanConfig(**SHAPE, max_position_embeddings=64, position="learned")
    FarspanForCausalLM(config).save_pretrained(tmp_path / "short")
    farspan.load(tiny / "none").tokenizer.save_pretrained(tmp_path / "short")
    for suite in ("quick", "passkey"):
        with pytest.raises(
            FarspanError,
            match=r"a passkey document has at least \d+ tokens, and .*short has 64 rows; choose",
        ):
            evaluate(
                tmp_path / "short",
                suite,
                tmp_path / "results",
                data=tiny / "text" if suite == "quick" else None,
            )
    result = evaluate(
        tmp_path / "short", "perplexity", tmp_path / "results", data=tiny / "text", windows=2
    )
    assert {score.length for score in result.scores if score.metric == "ppl"} == {64}


def test_passkeys_of_one_run_share_a_prefix_cache(tiny, tmp_path, monkeypatch):
    caches: list[object] = []
    original = Passkey.run
    monkeypatch.setattr(
        Passkey, "run", lambda self, *rest: (caches.append(rest[-1]), original(self, *rest))[1]
    )
    evaluate(
        tiny / "none", "passkey", tmp_path / "results", lengths=(256,), baseline=tiny / "patch"
    )
    assert all(isinstance(each, PrefixCache) for each in caches)
    assert len({id(each) for each in caches}) == 2, "one for the model, and one for its base"


def test_a_record_has_the_lengths_of_both_models(tiny, tmp_path):
    options = {"lengths": (256,), "baseline": tiny / "patch"}
    evaluate(tiny / "none", "passkey", tmp_path / "results", **options)
    settings = json.loads((tmp_path / "results" / "record.json").read_text())["settings"]
    assert (settings["train_length"], settings["context"]) == (LENGTH, LENGTH)
    assert settings["baseline"] == {"train_length": LENGTH, "context": 512}, "as the patch says"


def test_the_settings_of_a_record_keep_their_names():
    config = EvalConfig((512,), data="here.txt", limit=3, tasks="vt,cwe")
    plan = EvalPlan(config, (256, 512), (128,), (64,), 1024, True, {"here": Path("here.txt")})
    assert plan.to_json() == {
        "lengths": (256, 512),
        "grid": (128,),
        "contexts": (64,),
        "context": 1024,
        "data": {"here": "here.txt"},
        "preset": "full",
        "mode": None,
        "metric": "ppl",
        "stride": None,
        "budget": None,
        "windows": None,
        "beams": None,
        "items": 3,
        "tasks": ("vt", "cwe"),
        "apply_chat_template": False,
        "system_instruction": None,
        "threshold": None,
        "batch_size": None,
        "seed": 0,
    }


TINY_TEXT = Text("text", ("document",), (torch.arange(64, dtype=torch.int32),), "hash")


@pytest.mark.parametrize(
    ("evaluation", "key"),
    [
        (Needle((256,)), "bb892bd8d673e15d629cfd67efef981a"),
        (NonLiteral((256,)), "83f8196447cb8ce2c8b3d93be826a976"),
        (Passkey((256,)), "a389ace5bfa204f2502334cff30c0b95"),
        (Perplexity((TINY_TEXT,), (16, 32), stride=8), "b53b2453dd5aa62a431417ed424610be"),
        (Ruler((512,), ("vt",)), "261f7de550a6eca5fd8b32a7489b8587"),
    ],
)
def test_cells_keep_their_keys(evaluation, key):
    """Else finished results would be measured again."""
    assert cell_key(asdict(evaluation.cells()[0])) == key


def test_a_family_with_other_logits_is_refused(tiny, monkeypatch):
    other = lambda model, ids, count: model(input_ids=ids).logits[:, -count:] + 1  # noqa: E731
    monkeypatch.setattr(eval_models, "last_logits", other)
    with pytest.raises(
        FarspanError, match="differ from the model's by .*, so this family cannot be evaluated"
    ):
        load_eval_model(tiny / "none", {})


@pytest.mark.parametrize(
    ("value", "why"),
    [(torch.nan, "model.norm.weight holds NaN"), (1e38, "values overflow float32")],
)
def test_nonfinite_logits_are_reported_as_the_models_own(tiny, tmp_path, value, why):
    model, tokenizer = farspan.load(tiny / "none")
    with torch.no_grad():
        model.model.norm.weight.fill_(value)
        model.lm_head.weight.mul_(1e3)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(
        FarspanError, match="on 16 tokens, the first of its vocabulary, are not finite"
    ) as caught:
        measure(tiny, tmp_path / "results", str(tmp_path / "model"))
    assert why in str(caught.value)
    assert str(tmp_path / "model") in str(caught.value)


def test_small_models_are_measured_in_float32():
    for size, device, keys, exact in (
        (UPCAST_BELOW - 1, "cpu", 2, True),
        (UPCAST_BELOW - 1, "cuda", 4, True),
        (UPCAST_BELOW - 1, "cuda", 2, False),
        (UPCAST_BELOW, "cpu", 4, False),
    ):
        config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=keys)
        model = SimpleNamespace(
            dtype=torch.bfloat16,
            device=torch.device(device),
            config=SimpleNamespace(get_text_config=lambda config=config: config),
            num_parameters=lambda size=size: size,
            float=lambda: "exact",
        )
        assert (upcast_small_model(model) == "exact") == exact
    captured = (Path(__file__).parent.parent / "docs" / "eval.md").read_text()
    assert f"Models below {UPCAST_BELOW // 10**6}M parameters run in float32" in captured


def test_text_shorter_than_the_default_lengths_is_noted(tiny, tmp_path):
    (tmp_path / "text.txt").write_text((tiny / "text" / "0.txt").read_text()[:1200])
    tokens = len(
        farspan.load(tiny / "none").tokenizer((tmp_path / "text.txt").read_text())["input_ids"]
    )
    assert 256 < tokens < 512
    options = {"data": tmp_path / "text.txt", "lengths": ()}
    result = measure(tiny, tmp_path / "results", **options, baseline=tiny / "none")
    assert [score.length for score in result.scores if score.metric == "ppl"] == [256]
    assert result.notes == (
        f"the longest document has {tokens} tokens, so perplexity stops there; "
        "give longer text for more",
    )
    with pytest.raises(FarspanError, match="no document of text has 512 tokens"):
        measure(tiny, tmp_path / "results", **{**options, "lengths": (512,)})


def test_late_failures_are_found_before_measuring(tiny, tmp_path, counted):
    for options, sentence in (
        ({"baseline": "nowhere"}, "'nowhere' is neither a folder nor a hub id"),
        ({"lengths": (80,), "stride": 16}, "a passkey text of 80 tokens has no room for its key"),
    ):
        with pytest.raises(FarspanError, match=sentence):
            measure(tiny, tmp_path / "results", **options)
    for lacks, sentence in (
        ("model.safetensors", "has a config but no weights"),
        ("tokenizer*", "has no tokenizer"),
        ("", "is not a complete safetensors file"),
    ):
        bad = tmp_path / f"without {lacks}"
        shutil.copytree(tiny / "none", bad)
        (bad / "model.safetensors").write_bytes(
            (bad / "model.safetensors").read_bytes()[: None if lacks else -9]
        )
        for file in bad.glob(lacks) if lacks else ():
            file.unlink()
        with pytest.raises(FarspanError, match=sentence):
            measure(tiny, tmp_path / "results", baseline=bad)
    assert not counted, "nothing was measured"
    with pytest.raises(FarspanError, match="length 384 is beyond the position table of .*learned"):
        measure(tiny, tmp_path / "results", baseline=tiny / "learned")


@pytest.mark.long
def test_limit_is_the_number_of_samples_a_task(tiny, tmp_path, monkeypatch, capsys):
    words = [
        "--suite",
        "needle",
        "--lengths",
        "512",
        "--limit",
        "2",
        "-o",
        str(tmp_path / "results"),
        "--json",
    ]
    code, out, _ = run_command(monkeypatch, capsys, str(tiny / "none"), *words)
    assert code == 0
    scores = [score for score in json.loads(out)["scores"] if score["metric"] == "recall"]
    assert [score["n"] for score in scores] == [2, 2, 2, 2, 2, 10]


def test_models_of_one_name_in_two_folders_are_two_lines():
    tags = {"task": "text"}
    scores = tuple(
        Score("perplexity", "ppl", length, 9.0, 8.0, 10.0, 1, tags) for length in (256, 512)
    )
    result = EvalResult(
        "one/run/model", "quick", scores, Path(), baseline="two/run/model", baseline_scores=scores
    )
    (axes,) = evaluation_figures(result)["perplexity"].axes
    assert len(axes.get_legend_handles_labels()[1]) == 2


def test_figures_of_one_length():
    scores = [Score("perplexity", "ppl", 512, 18.9, 13.2, 32.6, 1024, {"task": "text"})]
    for depth in (0.0, 1.0):
        tags = {"task": "passkey", "depth": depth, "trained_on_passkeys": "yes"}
        scores.append(Score("passkey", "passkey_at_depth", 512, 1.0, 0.7, 1.0, 2, tags))
    figures = evaluation_figures(
        EvalResult("model", "quick", tuple(scores), Path(), train_length=512)
    )
    (axes,) = figures["perplexity"].axes
    low, high = axes.get_ylim()
    assert low < 13.2 < 32.6 < high, "the interval is drawn"
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3
    assert figures["passkey"].get_supxlabel() == "length (tokens)", (
        "no line is captured of where there is none"
    )


def test_passkey_grids_have_no_empty_panel():
    tags = {"task": "passkey", "depth": 0.5, "trained_on_passkeys": "no"}
    scores = [
        Score("passkey", "passkey_at_depth", length, 1.0, 0.7, 1.0, 2, tags)
        for length in (256, 512)
    ]
    figure = passkey_heatmap({f"model {number}": scores for number in range(4)}, 256)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title("left") for axes in panels] == [
        f"model {number}\nnever trained on passkey documents" for number in range(4)
    ]
    assert len({axes.get_subplotspec().colspan.start for axes in panels}) == 3
    assert all(
        axes.images or axes.get_label() == "<colorbar>" or not axes.axison for axes in figure.axes
    )


def test_a_tokenizer_of_another_model_is_refused(tiny, tmp_path):
    FarspanForCausalLM(FarspanConfig(**{**SHAPE, "vocab_size": 300})).save_pretrained(
        tmp_path / "model"
    )
    farspan.load(tiny / "none").tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(FarspanError, match="has more tokens than the model; use the model.s own"):
        evaluate(tmp_path / "model", "quick", tmp_path / "results", data=tiny / "text")


@pytest.mark.parametrize("suite", ["passkey", "quick"])
def test_passkeys_of_randomized_positions_are_refused(suite, tiny, tmp_path):
    """They are drawn for a whole text; passkeys continue a cached beginning."""
    config = FarspanConfig(**SHAPE, max_position_embeddings=LENGTH, position="randomized")
    FarspanForCausalLM(config).save_pretrained(tmp_path / "model")
    farspan.load(tiny / "none").tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(FarspanError, match="draws its positions for a whole text"):
        evaluate(tmp_path / "model", suite, tmp_path / "out", lengths=(256,))
    assert not (tmp_path / "out").exists()
