"""Python as a notebook likes it: short results, progress by itself, names and lengths as typed."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import json
import pydoc
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rich.progress
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

import farspan
from families import FAMILIES
from farspan import progress as progress_module
from farspan.attention.layout import Layout
from farspan.attention.patch import Patch
from farspan.attention.scales import Scales
from farspan.bundled import resolve_bundled
from farspan.cli import app
from farspan.data.documents import read_documents
from farspan.diagnosis.curves import Curves
from farspan.diagnosis.result import Diagnoses, Diagnosis
from farspan.errors import FarspanError
from farspan.evals.agreement import Agreement
from farspan.evals.results import EvalResult
from farspan.evals.scores import Score
from farspan.formats.fold import LogitProof
from farspan.lab.distance import AttentionComparison, Distance
from farspan.lab.ranking import Rank
from farspan.lab.theorems import PositionAnalysis, PositionReadout, TheoremProof
from farspan.lengths import parse_length, parse_lengths
from farspan.loading import LoadedModel, load_tokenizer
from farspan.methods import presets
from farspan.model_objects import ModelObject
from farspan.progress import Stage, bars, by_step, format_duration, shows_progress, with_total
from farspan.recipe import results_folder
from farspan.report.comparison import ComparedScore
from farspan.report.lab_figures import Panel
from farspan.summaries import Plotted, ResultList, Summarized, plain, shorten
from farspan.train.loop import METRICS
from farspan.workflows import lab as lab_workflow
from farspan.workflows.check import CheckResult
from farspan.workflows.compare import CompareResult
from farspan.workflows.eval_models import model_identity
from farspan.workflows.export import ExportResult
from farspan.workflows.extend import ExtendResult
from farspan.workflows.extend_estimate import ExtendEstimate
from farspan.workflows.lab import LabResult, summarize
from farspan.workflows.lab_estimate import LabEstimate
from farspan.workflows.lab_finetune import FinetuneResult
from farspan.workflows.pretrain import PretrainEstimate, PretrainResult
from farspan.workflows.report import report
from farspan.workflows.reproduce import StudyResults
from test_extend import _no_figures, tiny  # noqa: F401

BY_NAME = {family.name: family for family in FAMILIES}
MAX_LINES, MAX_CHARACTERS = 14, 1400


def make_diagnosis() -> Diagnosis:
    positions = np.arange(1.0, 65.0)
    loss, heads = np.linspace(3, 5, 64), np.ones((2, 64))
    curves = Curves(positions, loss, {0: heads}, 8, 128, 1)
    knees = dict(loss_knee=64, entropy_knee=None, coincide=None, distracted_heads=[(0, 1)])
    return Diagnosis(
        "tiny", 64, curves, **knees, heads=2, suggested_scale=1.2, verdict="fails beyond 64",
        smooth_loss=loss, smooth_entropy=loss,
    )  # fmt: skip


def make_patch() -> Patch:
    return Patch(
        "headscale", "0" * 64, 128, 64, Scales.uniform(1.2, tuple(range(40)), 32), name="m"
    )


def make_extension() -> ExtendResult:
    curve = np.linspace(3, 4, 127)
    before = {f"loss@{length}": 3.0 for length in (32, 64, 128)}
    cache = {"before": {"at_target": 1}, "after": {"at_target": 1}}
    curves = {"before": curve, "after": curve}
    notes = ("a note of many words " * 20,)
    return ExtendResult(make_patch(), Path("out"), before, before, curves, cache, 0.0, 1.0, notes)


def make_evaluation() -> EvalResult:
    scores = tuple(
        Score("perplexity", "ppl", length, 20.0, 19.0, 21.0, 100, {"task": "text"})
        for length in range(64, 64 * 40, 64)
    )
    return EvalResult("tiny", "perplexity", scores, Path("out"), train_length=64)


def make_compared() -> tuple[ComparedScore, ...]:
    return tuple(
        ComparedScore(run, "perplexity", "docs", "ppl", length, 20.0, 19.0, 21.0, 100)
        for run in "abcdefghi"  # more than there are colors
        for length in (64, 128)
    )


def make_panel() -> Panel:
    return Panel("copy", 2, "symbols", {"rotary": (np.array([2, 3]), np.array([[1.0, 0.5]]))})


def make_distance() -> Distance:
    return Distance(np.ones((1, 2, 4, 4)), np.array([512]))


def make_proof() -> TheoremProof:
    ramp = np.arange(8.0)
    return TheoremProof("linear", ramp + 1, 1e-9, ramp, ramp, 1e-9)


def make_lab_result() -> LabResult:
    ranks, ranks_of_all = [Rank("rotary", 1.0, 1)], [Rank("none", 0.75, 1)]
    return LabResult([], ranks, ranks_of_all, (1, 2), {}, Path("lab"), (make_panel(),))


def make_finetuning() -> FinetuneResult:
    return FinetuneResult({"2": [1, 2]}, {"3": [0, 2]}, 0.1, Path("tuned"), make_panel())


def make_comparison() -> AttentionComparison:
    mass, attended, ablation = np.ones((2, 4, 512)), np.full((2, 4, 20), 0.05), np.ones((2, 4))
    pairs = {(0, 1): make_distance()}
    return AttentionComparison(["a", "b"], 512, pairs, 2 * [mass], 2 * [attended], 2 * [ablation])


def make_analysis() -> PositionAnalysis:
    return PositionAnalysis([make_proof(), make_proof()], {"a": [PositionReadout(0, 0.5, 3.0)]})


def make_run(folder: Path) -> Path:
    """The folder of a training run with its metrics."""
    lines = [{"step": step, "tokens": 1000 * step, "loss": 5 - step / 10} for step in range(1, 9)]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_study_result() -> dict:
    positions = np.linspace(2, 126, 32)
    curve = {"loss": {"docs": np.linspace(3, 4, 32).tolist()}, "passkey": {"64": 0.5}}
    names = {"model": "tiny", "method": "none", "factor": 1, "seed": 0}
    return {**names, "train_length": 64, "positions": positions.tolist(), **curve}


@pytest.fixture(scope="module")
def model():
    return BY_NAME["farspan-none"].build()


@pytest.fixture(scope="module")
def results(model, tmp_path_factory) -> list[Summarized]:
    diagnosis, patch = make_diagnosis(), make_patch()
    agreement = Agreement("equal", None, 0.0, 0.1)
    return [
        LoadedModel(model, None),
        farspan.inspect(model),
        diagnosis,
        Diagnoses([diagnosis, diagnosis]),
        patch,
        make_extension(),
        ExtendEstimate(("uniform",), {"search": 10}, (), "quick", {"uniform": 3.0}, 9.0),
        make_evaluation(),
        ExportResult(Path("out"), "stock", 1000, {}),
        CheckResult("tiny", "http://x", "log-probabilities", 128, agreement, False, "a server"),
        CompareResult("a", make_compared(), (), Path("compare.md")),
        PretrainEstimate(100, 10**9, 6e14, 0.5, 0.25, None, 4.4e10),
        PretrainResult(make_run(tmp_path_factory.mktemp("run")) / "model", 100, 3.2, False),
        make_lab_result(),
        LabEstimate("rotary", "", 1, 1, 100, 1000, 0.1, 2.0),
        make_finetuning(),
        make_comparison(),
        make_analysis(),
        StudyResults([make_study_result()]),
    ]


def test_every_result_is_short_and_becomes_json(results):
    for result in results:
        text = repr(result)
        assert len(text.splitlines()) <= MAX_LINES, text
        assert len(text) <= MAX_CHARACTERS, text
        assert text.startswith(type(result).__name__)
        assert "object at 0x" not in text
        page = Summarized._repr_html_(result)
        assert page.startswith("<table>")
        assert "</table>" in page
        json.dumps(result.to_dict(), allow_nan=True)


@pytest.mark.parametrize(
    ("command", "function", "result_class", "keys"),
    [
        (
            "extend nope-twin --to 1k",
            "extend.extend",
            ExtendResult,
            "patch before after folder cache_bytes notes",
        ),
        (
            "extend nope-twin --to 1k --dry-run",
            "extend.estimate_extension",
            ExtendEstimate,
            "methods text notes preset stages full_seconds tokens steps flops is_auto shortened_by "
            "seconds",
        ),
        ("pretrain twin-nope", "pretrain.pretrain", PretrainResult, "model steps loss"),
        (
            "pretrain twin-nope --dry-run",
            "pretrain.estimate",
            PretrainEstimate,
            "parameters tokens flops weights_gib activations_gib files_mb rate missing_text "
            "seconds_at_least",
        ),
        (
            "lab run lab-tiny",
            "lab.run",
            LabResult,
            "learned models mean_reciprocal_rank mean_reciprocal_rank_of_all folder",
        ),
        (
            "lab finetune nope-twin copy",
            "lab_finetune.finetune",
            FinetuneResult,
            "in_range beyond learned loss folder",
        ),
        (
            "lab distance a b",
            "attention_analysis.compare_attention",
            AttentionComparison,
            "tokens distances loss_without_head attended_distance",
        ),
        ("lab theorems a", "attention_analysis.theorems", PositionAnalysis, "proofs readings"),
        ("reproduce extend-small", "reproduce.reproduce", StudyResults, "results"),
    ],
)
def test_a_command_prints_its_result_as_to_dict_has_it(
    command, function, result_class, keys, results, monkeypatch
):
    (result,) = (each for each in results if type(each) is result_class)
    monkeypatch.setattr(f"farspan.workflows.{function}", lambda *_, **__: result)
    run = CliRunner().invoke(app, [*command.split(), "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout) == result.to_dict()
    assert [*result.to_dict()] == keys.split()


def test_the_comparison_as_json_has_the_mean_over_heads():
    comparison = make_comparison().to_dict()
    (distance,) = comparison["distances"]
    assert distance == {"models": ["a", "b"], "nearest": [1.0, 1.0], "matched": [1.0, 1.0]}
    assert comparison["loss_without_head"]["b"] == np.ones((2, 4)).tolist()
    assert comparison["attended_distance"]["a"] == pytest.approx(20 * [0.05])


def result_classes() -> set[type]:
    """All classes that summarize themselves."""

    def below(base: type) -> set[type]:
        return {each for sub in base.__subclasses__() for each in ({sub} | below(sub))}

    in_farspan = {each for each in below(Summarized) if each.__module__.startswith("farspan")}
    return in_farspan - {Plotted, *(each for each in in_farspan if each.__name__ == "ResultList")}


def test_every_class_of_results_is_among_the_tested(results):
    assert result_classes() == {type(result) for result in results}


def test_the_page_of_the_api_has_every_public_name_and_result():
    page = (Path(__file__).parent.parent / "docs/api.md").read_text()
    on_page = {pydoc.locate(name) for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    packages = {"lab": lab_workflow.run, "report": report}
    public = {packages.get(name) or getattr(farspan, name) for name in farspan.__all__}
    assert public | result_classes() <= on_page
    assert None not in on_page, "a name that does not exist"


def test_results_say_what_they_hold():
    agreement = Agreement("equal", None, 0.0, 0.1)
    checked = CheckResult("tiny", "http://x", "log-probabilities", 128, agreement, True, "a server")
    assert checked.facts()["verdict"] == checked.sentence
    assert " ".join(repr(checked).split()).endswith(checked.sentence), "wrapped, not cut"
    scores = (
        ComparedScore("a", "needle", "vt", "recall", 4096, 0.5, 0.4, 0.6, 10),
        ComparedScore("b", "needle", "vt", "recall", 4096, 0.75, 0.7, 0.8, 10),
    )
    compared = repr(CompareResult("a", scores, (), Path("compare.md")))
    assert "needle vt recall @4,096: a 0.50, b 0.75" in compared
    proof = LogitProof(128, 1e-6, 0.0, 1.0, 1e-5)
    exported = repr(ExportResult(Path("out"), "stock", 23_700_000, {"inside": proof}))
    assert "stock, 23.7 MB" in exported
    assert (
        "128 tokens, logits within 1e-06 (allowed 1e-05), same likeliest token at 100" in exported
    )
    estimate = repr(PretrainEstimate(100, 10**9, 6e14, 0.5, 0.25, None, 4.4e10))
    assert "at least 3.8 hours at 0.044 TFLOP/s" in estimate
    assert "tokens: 1,000,000,000" in estimate


def test_a_table_has_the_whole_verdict_of_a_result_within_a_result():
    verdict = "fails beyond 64 tokens " * 8
    inner = replace(make_diagnosis(), verdict=verdict.strip())
    page = Summarized._repr_html_(ResultList([inner]))
    assert verdict.strip() in page


@pytest.mark.parametrize("name", farspan.__all__)
def test_no_signature_shows_an_address_in_memory(name):
    assert " at 0x" not in pydoc.render_doc(getattr(farspan, name))


@pytest.mark.parametrize(("package", "parameter"), [("lab", "recipe"), ("report", "folders")])
def test_help_of_a_package_shows_its_function(package, parameter):
    module = getattr(farspan, package)
    assert next(iter(inspect.signature(module).parameters)) == parameter
    assert f"farspan.{package}({parameter}: " in module.__doc__
    assert " = ignore" in module.__doc__
    assert "Write" in module.__doc__ or "write results" in module.__doc__


def test_every_kind_of_model_has_its_tokenizer():
    words = load_tokenizer("rope-twin").get_vocab()
    assert load_tokenizer("swan-twin").get_vocab() == words, "a patch has that of its base"
    model, tokenizer = farspan.load("rope-twin")
    assert load_tokenizer(ModelObject.wrap((model, tokenizer))) is tokenizer
    assert load_tokenizer(ModelObject.wrap(model)).get_vocab() == words


@pytest.mark.long
def test_results_with_a_figure_draw_it(results):
    drawn = [result for result in results if isinstance(result, Plotted)]
    without = {type(result).__name__ for result in results} - {
        type(each).__name__ for each in drawn
    }
    assert without == {
        "LoadedModel", "Inspection", "Patch", "ExportResult", "CheckResult",
        "ExtendEstimate", "PretrainEstimate", "LabEstimate",
    }, "they hold no curve"  # fmt: skip
    for result in drawn:
        figure = result.plot()
        assert isinstance(figure, Figure)
        lines = [line for axes in figure.axes for line in (*axes.lines, *axes.images)]
        assert lines, f"{type(result).__name__} draws something"
        assert "<img alt='figure of" in result._repr_html_()
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows it"


def test_an_evaluation_lists_its_scores_without_the_details():
    tags = {"task": "passkey"}
    mean = Score("passkey", "passkey", 64, 0.5, 0.4, 0.6, 20, tags)
    depth = Score("passkey", "passkey_at_depth", 64, 0.0, 0.0, 0.2, 2, {**tags, "detail": True})
    facts = EvalResult("tiny", "passkey", (mean, depth), Path("out")).facts()
    assert facts["passkey passkey @64"] == "0.5 (0.4–0.6)"
    assert not any("at_depth" in name for name in facts)
    assert facts["model"] == "tiny, suite passkey, in out"
    compared = EvalResult("tiny", "passkey", (mean,), Path("out"), baseline="base").facts()
    assert compared["model"] == "tiny, baseline base, suite passkey, in out"
    one_window = Score("perplexity", "ppl", 64, 18.3, 18.3, 18.3, 1, {})
    assert "18.3" in EvalResult("tiny", "perplexity", (one_window,), Path("out")).facts().values()


@pytest.mark.parametrize(
    ("value", "shown"), [(0.4, ", baseline 0.4, ratio 1.250"), (0.0, ", baseline 0")]
)
def test_an_evaluation_shows_its_baseline(value, shown):
    tags = {"task": "passkey"}
    score = Score("passkey", "passkey", 64, 0.5, 0.4, 0.6, 20, tags)
    others = tuple(replace(score, value=value, length=length) for length in (64, 128))
    result = EvalResult("tiny", "passkey", (score,), Path("out"), "base", others)
    assert repr(result).endswith(f"passkey passkey @64: 0.5 (0.4–0.6){shown}")


def test_a_suite_without_a_figure_has_a_table_only():
    result = EvalResult("tiny", "ruler", (), Path("out"))
    with pytest.raises(FarspanError, match="suite ruler has no figure"):
        result.plot()
    assert "<img" not in result._repr_html_()


def test_a_comparison_without_perplexity_has_a_table_only():
    with pytest.raises(FarspanError, match="no perplexity to draw; use `farspan report`"):
        CompareResult("a", (), (), Path("compare.md")).plot()


def test_a_comparison_draws_every_run():
    (axes,) = CompareResult("a", make_compared(), (), Path("compare.md")).plot().axes
    assert len(axes.lines) == 9


def test_a_single_model_draws_its_heads():
    mass, losses = [np.ones((2, 4, 512))], [np.ones((2, 4))]
    figure = AttentionComparison(["a"], 512, {}, mass, [], losses).plot()
    assert figure.axes[0].get_title(loc="left") == "a, layer 0"


def test_loaded_models_still_unpack(model):
    loaded = LoadedModel(model, None)
    first, second = loaded
    assert first is model is loaded.model
    assert second is None is loaded.tokenizer


def test_html_escapes_what_a_name_contains():
    page = PretrainResult(Path("<script>"), 1, 1.0, True)._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_values_are_shortened_and_made_plain():
    assert shorten([1, 2]) == "1, 2"
    assert shorten(list(range(9))) == "9 items"
    assert shorten(np.ones((3, 4))) == "array [3, 4]"
    assert plain({"a": (torch.ones(2), Path("x")), 3: np.float64(1.5)}) == {
        "a": [[1.0, 1.0], "x"],
        "3": 1.5,
    }


@pytest.mark.long
def test_extend_says_its_time_without_matplotlib():
    """It takes a tenth of the time until then, and only the end of the command draws."""
    code = (
        "import farspan, sys\n"
        "def say(text):\n"
        "    sys.exit('matplotlib' in sys.modules)\n"
        "farspan.extend('nope-twin', 1024, 'never', 'uniform', say=say)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Lengths and models.


def test_lengths_are_written_as_on_the_command_line():
    assert parse_length("16k") == parse_length(16384) == 16384
    assert parse_lengths("256:1024") == parse_lengths([256, 512, 1024])
    assert parse_lengths("256") == parse_lengths(256) == [256]
    assert parse_lengths(["256", "1k", 512]) == [256, 1024, 512]
    assert parse_lengths(np.array([64, 128])) == [64, 128]
    assert parse_lengths(np.int64(64)) == [parse_length(np.int64(64))] == [64]
    with pytest.raises(FarspanError, match=r"'128\.0' is not a length"):
        parse_lengths(128.0)
    with pytest.raises(FarspanError, match=r"'1024\.0' is not a length; write it as 2048 or 16k"):
        parse_length(1024.0)


@pytest.mark.parametrize("name", ["rope-twin", "swan-twin"])
def test_the_object_of_a_bundled_model_has_its_name_and_its_tokenizer(name):
    loaded = farspan.load(name)
    assert ModelObject.wrap(loaded.model) == name
    again = farspan.load(loaded.model)
    assert again.tokenizer("a word")["input_ids"] == loaded.tokenizer("a word")["input_ids"]


@pytest.mark.parametrize("name", ["half", "float16", torch.float16])
def test_a_dtype_may_be_a_name(name, model, patched):
    assert farspan.load(model, dtype=name).model.dtype == torch.float16
    assert farspan.load(patched, dtype=name).model.dtype == torch.float16
    assert farspan.load(model, dtype="auto").model.dtype == torch.float32
    for wrong in ("flot16", "int8", torch.int8):
        with pytest.raises(FarspanError, match=f"dtype '?{wrong}'? is unknown; choose float32, bf"):
            farspan.load(model, dtype=wrong)


def test_one_of_several_needs_no_list(tmp_path):
    with pytest.raises(FarspanError, match="some-run was not found"):
        farspan.report("some-run", tmp_path / "report.html")
    with pytest.raises(FarspanError, match="some-run was not found"):
        farspan.compare("some-run", tmp_path / "table.md")
    with pytest.raises(FarspanError, match="'ppl' is not a valid gate"):
        farspan.evaluate("nope-twin", "perplexity", tmp_path / "out", gate="ppl")


def test_the_lab_has_the_folder_of_the_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert results_folder("own/mine.toml") == Path("runs/mine")
    assert results_folder("llama-3.1-copy") == Path("runs/llama-3.1-copy")
    assert results_folder("lab-tiny", "out") == Path("out")
    with pytest.raises(FarspanError, match="runs/lab-tiny holds no results of this study"):
        summarize("lab-tiny")


def test_a_model_object_is_used_under_its_name_and_stays_as_it_is(model):
    name = ModelObject.wrap(model)
    assert name == "FarspanForCausalLM"
    copied = farspan.load(model).model
    assert copied is not model
    assert all(
        torch.equal(a, b) for a, b in zip(copied.parameters(), model.parameters(), strict=True)
    )
    assert ModelObject.wrap(["nope-twin", model])[0] == "nope-twin"
    for others in ((model,), ("nope-twin",), ((model, None),)):
        both = ModelObject.wrap((model, *others))
        assert [isinstance(each, str) for each in both] == [True, True]
        assert ModelObject.wrap((model, *others, "x"))[0].model is model
    with pytest.raises(FarspanError, match=r"has no tokenizer .* give \(model, tokenizer\)"):
        farspan.evaluate(model, "perplexity", "unused")


@pytest.mark.long
def test_functions_take_model_objects(tiny, tmp_path):  # noqa: F811
    loaded = farspan.load(tiny / "none")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    options = dict(data=tiny / "text.txt")
    less = ["fitted=false", "choose_windows=1", "report_windows=1", "passkeys=0"]
    out = tmp_path / "patch"
    extended = farspan.extend(loaded, "128", out, "logn", overrides=less, **options)
    assert extended.patch.name == str(tiny / "none"), "so that farspan.load finds the base"
    assert farspan.load(out).model.num_parameters() == loaded.model.num_parameters()
    assert farspan.diagnose(loaded, lengths="64:128", windows=1, **options)[0].train_length == 64
    measured = farspan.evaluate(
        loaded.model, "perplexity", tmp_path / "eval", lengths="64", windows=1, **options
    )
    assert measured.model == str(tiny / "none")
    assert any(score.metric == "ppl" and score.length == 64 for score in measured.scores)
    exported = farspan.export(loaded, tmp_path / "exported", "stock")
    assert exported.proofs["inside"].holds
    assert "".join(farspan.generate(loaded.model, "The", max_new_tokens=1)) is not None
    after = loaded.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not farspan.attention.seam.installed(loaded.model)


# Model objects with a patch.

LESS = ["choose_windows=1", "report_windows=1", "passkeys=0"]


@pytest.fixture(scope="module")
def patched(tiny, tmp_path_factory) -> Path:  # noqa: F811
    """A patch folder with scales that grow, for the tiny model without positions."""
    out, data = tmp_path_factory.mktemp("patched") / "patch", tiny / "text.txt"
    farspan.extend(tiny / "none", 128, out, "logn", overrides=LESS, data=data)
    return out


def logits_of(loaded: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return loaded(input_ids=torch.arange(100)[None]).logits


def test_a_copy_of_a_patched_object_has_its_patch(patched):
    loaded = farspan.load(patched)
    base = farspan.load(Patch.load(patched).name).model
    assert not torch.equal(logits_of(loaded.model), logits_of(base))
    for given in (loaded, loaded.model):
        copied = farspan.load(given)
        assert torch.equal(logits_of(copied.model), logits_of(loaded.model))
        assert copied.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    farspan.attention.seam.uninstall(copied.model)
    assert not torch.equal(logits_of(copied.model), logits_of(loaded.model))


def test_a_copy_keeps_layout_weights_and_rotation():
    loaded = farspan.load("swan-twin").model
    assert torch.equal(logits_of(farspan.load(loaded).model), logits_of(loaded))
    name = ModelObject.wrap(loaded)
    original = Patch.load(Path(resolve_bundled(name)))
    assert name.patch.describe() == {**original.describe(), "model": name.patch.describe()["model"]}
    rounded = {key: weight.bfloat16() for key, weight in original.weights.items()}
    assert all(
        torch.equal(rounded[key], each.bfloat16()) for key, each in name.patch.weights.items()
    )


@pytest.mark.long
def test_a_patched_object_is_measured_as_its_folder(patched, tiny, tmp_path):  # noqa: F811
    options = dict(data=tiny / "text.txt", lengths="128", windows=1)
    folder = farspan.evaluate(patched, "perplexity", tmp_path, **options)
    cells = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    loaded = farspan.load(patched)
    for given in (loaded, loaded.model):
        measured = farspan.evaluate(given, "perplexity", tmp_path, **options)
        assert (measured.scores, measured.model) == (folder.scores, str(patched))
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    assert after == cells, "it is the same model"
    base = farspan.evaluate(Patch.load(patched).name, "perplexity", tmp_path, **options)
    assert base.scores[0].value != folder.scores[0].value


def test_a_layout_is_part_of_what_is_measured(tiny):  # noqa: F811
    base, tokenizer = farspan.load(tiny / "rope")
    identity = farspan.attention.patch.fingerprint(base)
    patches = [None] + [
        Patch("hand", identity, 128, 64, layout=Layout.parse([f"rope/{window}"] * 2))
        for window in (8, 16)
    ]
    assert len({str(model_identity(base, tokenizer, patch)) for patch in patches}) == 3


@pytest.mark.long
def test_a_patched_object_is_extended_as_its_folder(patched, tiny, tmp_path):  # noqa: F811
    search = ["search.steps=1", "search.batch=1", "search.micro_batch=1", "search.passkeys=0"]
    options = dict(overrides=[*LESS, *search], data=tiny / "text.txt")
    patches = [
        farspan.extend(given, 256, tmp_path / name, "headlog", **options).patch
        for name, given in {"folder": patched, "object": farspan.load(patched)}.items()
    ]
    assert patches[0].describe() == patches[1].describe()
    assert patches[0].scales.equals(patches[1].scales)


def test_a_patched_object_is_exported_inspected_and_diagnosed(patched, tiny, tmp_path):  # noqa: F811
    loaded = farspan.load(patched)
    exported = farspan.export(loaded, tmp_path / "live", "live")
    assert exported.proofs["beyond"].holds
    inspected = farspan.inspect(loaded)
    assert inspected.patch == farspan.inspect(patched).patch
    assert "farspan.evaluate(" in inspected.next_commands[0]
    with pytest.raises(FarspanError, match="already has scales"):
        farspan.diagnose(loaded, data=tiny / "text.txt", scales=[1.2])


def test_an_object_patched_in_memory_has_a_patch(model, patched):
    base = farspan.load(Patch.load(patched).name).model
    Patch.load(patched).apply(base)
    name = ModelObject.wrap(base)
    assert name.patch.method == "logn"
    assert name == Patch.load(patched).name, "of the base model: there is no folder"
    assert ModelObject.wrap(model).patch is None


def test_rotation_is_part_of_the_patch_of_an_object(tiny):  # noqa: F811
    base = farspan.load(tiny / "rope").model
    rope = {"rope_type": "linear", "factor": 2.0}
    identity = farspan.attention.patch.fingerprint(base)
    Patch("pi", identity, 128, 64, rope=rope, name=str(tiny / "rope")).apply(base)
    assert not farspan.attention.seam.installed(base)
    assert ModelObject.wrap(base).patch.rope == rope
    scales = Scales.uniform(1.2, (0, 1), 2)
    Patch("uniform", identity, 128, 64, scales).apply(base)
    both = ModelObject.wrap(base).patch
    assert (both.method, both.rope, both.scales.equals(scales)) == ("pi+uniform", rope, True)


def test_scales_without_a_patch_are_refused_until_they_are_off(patched):
    loaded = farspan.load(patched).model
    fitted = ModelObject.wrap(loaded).patch.scales
    stronger = replace(fitted, base=1.1 * fitted.base)
    for scales in (stronger, Scales.uniform(1.2, (0,), 2)):
        farspan.attention.seam.install(loaded, scales)
        with pytest.raises(FarspanError, match="no patch gave it; apply them with Patch.apply"):
            ModelObject.wrap(loaded)
    farspan.attention.seam.uninstall(loaded)
    assert ModelObject.wrap(loaded).patch is None


def test_a_patched_object_with_other_weights_is_not_extended(patched, tiny, tmp_path):  # noqa: F811
    loaded = farspan.load(patched)
    next(loaded.model.parameters()).data += 1
    options = dict(overrides=LESS, data=tiny / "text.txt")
    with pytest.raises(FarspanError, match="have changed since its patch was applied"):
        farspan.extend(loaded, 256, tmp_path / "out", "headlog", **options)


def test_packages_that_are_commands_can_be_called(monkeypatch):
    import farspan.lab
    import farspan.report
    from farspan.workflows import lab, report

    monkeypatch.setattr(report, "report", lambda folders: ("report", folders))
    monkeypatch.setattr(lab, "run", lambda recipe: ("lab", recipe))
    assert farspan.report(["a"]) == ("report", ["a"])
    assert farspan.lab("lab-tiny") == ("lab", "lab-tiny")


# Progress.


@shows_progress
def count_to_three(*, progress=progress_module.automatic, say=lambda text: None) -> str:
    say("three steps")
    advance = progress("count", 3)
    for _ in range(3):
        advance(1, "counting")
    return "done"


def test_nothing_is_shown_without_a_terminal(capsys):
    assert count_to_three() == "done"
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_bars_and_notes(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert count_to_three() == "done"
    shown = capsys.readouterr().err
    assert "three steps" in shown
    assert "3/3" in shown


def test_only_the_outer_function_shows_its_bars(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")

    @shows_progress
    def outer(*, progress=progress_module.automatic) -> None:
        progress("outer", 1)()
        assert len(progress_module._displays) == 1
        count_to_three()

    outer()
    shown = capsys.readouterr().err
    assert "outer" in shown
    assert "count" not in shown
    assert not progress_module._displays


def test_a_notebook_shows_bars_in_one_output(monkeypatch):
    pages = []
    handle = types.SimpleNamespace(update=lambda page: pages.append(page))
    display = types.ModuleType("IPython.display")
    display.HTML = lambda text: text
    display.display = lambda page, display_id: pages.append(page) or handle
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(progress_module, "in_notebook", lambda: True)
    monkeypatch.setattr(progress_module, "NOTEBOOK_INTERVAL", -1)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a kernel
    assert count_to_three() == "done"
    assert any("3/3" in page for page in pages)
    assert pages[-1].startswith("<pre>three steps\ntook ")
    assert not any("\x1b" in page for page in pages)


def test_the_total_says_what_is_left_and_jumps_over_saved_work(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    notes, counts = [], []

    def record(label, steps):
        def advance(count=1, note=""):
            if label == "total":
                notes.append(note)
                counts.append(count)

        return advance

    stages = [Stage("first", 10.0, 10), Stage("search lr", 60.0), Stage("last", 30.0)]
    progress = with_total(record, stages)
    assert notes == ["about 100 seconds left"], "before the first step"
    first = progress("first", 0)
    now[0] = 2.0
    first()  # it takes twice as long as estimated
    assert notes[-1] == "about 3.3 minutes left"
    progress("search lr 0.2", 60)()
    last = progress("last", 1)
    last()
    assert sum(counts) == pytest.approx(100)
    assert notes[-1] == "about 0 seconds left"
    progress("not a stage", 1)()
    assert sum(counts) == pytest.approx(100)


def test_steps_of_an_earlier_run_are_done_and_took_no_time(monkeypatch):
    now, notes, counts = [0.0], [], []
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])

    def record(label, steps):
        def advance(count=1, note=""):
            if label == "total":
                notes.append(note)
            else:
                counts.append(count)

        return advance

    progress = with_total(record, [Stage("first", 60.0, 60), Stage("last", 40.0)])
    advance_to = by_step(progress("first", 60))
    for step in (51, 52):
        now[0] += 1.0
        advance_to(step, "a loss")
    assert counts == [50, 1, 1]
    assert notes[-1] == "about 48 seconds left"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 seconds"), (0.6, "1 second"), (1.6, "2 seconds"), (9000, "2.5 hours")],
)
def test_a_duration_is_counted_in_words(seconds, words):
    assert format_duration(seconds) == words


@pytest.fixture
def timed_total(monkeypatch):
    """Two stages of costs without a unit, the notes of their total bar, and what was said."""
    clock = types.SimpleNamespace(now=0.0, notes=[], said=[])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock.now)

    def record(label, steps):
        return lambda count=1, note="": clock.notes.append(note) if label == "total" else None

    def start(*, processes=1):
        stages = [Stage("first", 100, 10), Stage("second", 300, 10)]
        return with_total(record, stages, clock.said.append, processes)

    clock.start = start
    return clock


def test_a_total_without_a_unit_is_said_once_steps_were_timed(timed_total):
    first = timed_total.start()("first", 10)
    assert set(timed_total.notes) == {""}, "nothing is known yet"
    timed_total.now = 30.0
    first()  # it compiles, so its time does not count
    timed_total.now = 30.5
    first()
    assert not timed_total.said, "half a second shows no pace"
    timed_total.now = 32.0
    first()
    assert timed_total.said == ["about 69 seconds in all, by the first steps"], "32 + 370 / 10"
    timed_total.now = 33.0
    first()
    assert timed_total.notes[-1] == "about 36 seconds left"
    assert len(timed_total.said) == 1


def test_processes_share_a_total(timed_total):
    first = timed_total.start(processes=2)("first", 10)
    first()
    timed_total.now = 10.0
    first()
    assert timed_total.said == ["about 3.3 minutes in all, by the first steps"], "10 + 380 / 2"


def test_a_short_total_is_not_said(timed_total):
    first = timed_total.start()("first", 10)
    first()
    timed_total.now = 1.0
    first(9)
    assert timed_total.notes[-1] == "about 3 seconds left"
    assert not timed_total.said


def test_a_single_stage_has_no_second_bar():
    labels = []

    def record(label, steps):
        labels.append(label)
        return lambda count=1, note="": None

    with_total(record, [Stage("only", 10.0, 10)])("only", 10)()
    assert labels == ["only"]


def test_a_bar_of_unknown_length_ends_when_the_next_begins():
    display = progress_module._Display(rich.progress.Progress(disable=True))
    search = display.bar("uniform", 0)
    search(3)
    task = display.progress.tasks[0]
    assert task.total is None
    display.bar("measure after", 2)
    assert (task.total, task.finished) == (3, True)
    search()
    assert (task.completed, task.total) == (4, 4), "it went on after all"


def test_bars_can_be_opened_by_hand(capsys):
    with bars() as bar:
        bar("work", 2)()
    assert capsys.readouterr().out == ""


# Examples.


FIRST = ("extend", "evaluate")  # their folders are the subject of other examples


@pytest.mark.long
def test_the_examples_of_docstrings_run(tmp_path, monkeypatch):
    """Every public name has one. With less text than the preset that they take."""
    less = ("search.max_steps=2", "choose_windows=1", "report_windows=1", "passkeys=0")
    monkeypatch.setitem(presets.PRESETS, "quick", less)
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts")
    runner = doctest.DocTestRunner(verbose=False)
    for name in (*FIRST, *(each for each in farspan.__all__ if each not in FIRST)):
        example = example_of(name)
        with contextlib.redirect_stdout(sys.stderr):
            outcome = runner.run(example)
        assert not outcome.failed, name


@pytest.mark.parametrize("name", farspan.__all__)
def test_every_public_name_has_an_example_with_an_outcome(name):
    assert any(example.want for example in example_of(name).examples)


def example_of(name: str) -> doctest.DocTest:
    text = inspect.getdoc(getattr(farspan, name))
    return doctest.DocTestParser().get_doctest(text, {"farspan": farspan}, name, None, None)


def write_texts(folder: Path) -> None:
    """Three texts of 60,000 characters."""
    folder.mkdir()
    text = next(iter(read_documents("python-docs"))).text
    for number, name in enumerate("abc"):
        part = text[number * 60_000 : (number + 1) * 60_000]
        (folder / f"{name}.txt").write_text(part)
