"""`farspan check` says whether an engine computes the model, its base, or something else."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import farspan
from engine_server import EngineServer
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.cli import app
from farspan.data.tokens import encode
from farspan.errors import FarspanError
from farspan.evals.agreement import Agreement, Continuation, compare_continuations, compare_losses
from farspan.evals.engine import Engine
from farspan.workflows import check as check_workflow
from farspan.workflows.check import CheckResult, _compared_by, _kept_lengths, _sure_tokens

pytestmark = pytest.mark.usefixtures("only_loopback")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LENGTH = 640


@pytest.fixture(scope="module")
def patch(tmp_path_factory):
    """YaRN and scales for each head, on a bundled model."""
    generator = torch.Generator().manual_seed(3)
    scales = Scales(tuple(range(6)), 1 + 0.6 * torch.rand(6, 8, generator=generator))
    model = farspan.load("rope-twin").model
    patch = Patch("test", fingerprint(model), 2048, 512, rope=YARN, scales=scales, name="rope-twin")
    return patch.save(tmp_path_factory.mktemp("patch") / "patch")


@pytest.fixture(scope="module")
def stock(patch):
    farspan.export(patch, patch.parent / "stock", "stock")
    return patch.parent / "stock"


def changed_config(stock, folder, **rope):
    """A copy of a stock export with other rope parameters in its config."""
    shutil.copytree(stock, folder)
    config = json.loads((folder / "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    config["rope_parameters"] = (
        {**config["rope_parameters"], **rope}
        if rope
        else {
            "rope_type": "default",
            "rope_theta": theta,
        }
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.long
def test_a_live_load_and_every_export_are_equal(patch, stock, tmp_path):
    farspan.export(patch, tmp_path / "folded", "folded")
    for engine in (patch, stock, tmp_path / "folded"):
        result = farspan.check(patch, engine, length=LENGTH)
        assert result.agreement.verdict == "equal", engine
        assert result.agreement.difference < 1e-3
        assert "it applies the patch" in result.sentence


@pytest.mark.long
def test_the_base_model_is_recognized(patch):
    result = farspan.check(patch, "rope-twin", length=LENGTH)
    assert result.agreement == Agreement("base", None, 0.0, result.agreement.tolerance)
    assert "it ignores the extension" in result.sentence


@pytest.mark.long
def test_a_config_without_its_scaling_is_noticed(patch, stock, tmp_path):
    """The folded scales are still there, so it is neither the model nor its base."""
    dropped = changed_config(stock, tmp_path / "dropped")
    result = farspan.check(patch, dropped, length=LENGTH)
    assert (result.agreement.verdict, result.holds) == ("different", False)
    yarn_only = tmp_path / "yarn"
    model = farspan.load("rope-twin").model
    Patch("test", fingerprint(model), 2048, 512, rope=YARN, name="rope-twin").save(yarn_only)
    farspan.export(yarn_only, tmp_path / "yarn-stock", "stock")
    ignored = changed_config(tmp_path / "yarn-stock", tmp_path / "ignored")
    assert farspan.check(yarn_only, ignored, length=LENGTH).agreement.verdict == "base"


@pytest.mark.long
def test_the_command_exits_with_3_and_one_sentence(patch, stock, tmp_path, monkeypatch, capsys):
    runner = CliRunner()
    arguments = ["check", str(patch), "--length", str(LENGTH), "--engine"]
    result = runner.invoke(app, [*arguments, str(stock)])
    assert result.exit_code == 0
    assert result.output.startswith("the log-probabilities of")
    result = runner.invoke(app, [*arguments, "rope-twin", "--json"])
    assert result.exception.exit_code == 3
    content = json.loads(result.output)
    assert (content["holds"], content["agreement"]["verdict"]) == (False, "base")


@pytest.mark.long
@pytest.mark.parametrize("source", ["patch", "base"])
@pytest.mark.parametrize("losses", ["prompt_logprobs", ""])
def test_servers_with_and_without_log_probabilities(losses, source, patch):
    """The server wraps the live model, or its base; it is asked for losses or continuations."""
    model, tokenizer = farspan.load(patch if source == "patch" else "rope-twin")
    server = EngineServer(tokenizer, model.float(), losses)
    result = farspan.check(patch, server.url, length=256)
    server.close()
    assert result.agreement.verdict == ("equal" if source == "patch" else "base")
    assert result.by == ("log-probabilities" if losses else "greedy continuations")
    assert ("it returns no log-probabilities of prompts" in result.sentence) == (not losses)


@pytest.mark.long
def test_continuations_end_where_a_server_ends_them(tmp_path):
    """Here at the end of a line, which the model often comes to."""
    model, tokenizer = farspan.load("nope-twin")
    (line_end,) = tokenizer("\n")["input_ids"]
    model.generation_config.eos_token_id = line_end
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    server = EngineServer(tokenizer, model.float())
    result = farspan.check(tmp_path / "model", server.url, length=256)
    server.close()
    assert (result.by, result.agreement) == ("greedy continuations", Agreement("equal"))


@pytest.mark.long
def test_llama_cpp_runs_a_gguf_file(patch, tmp_path):
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    farspan.export(patch, tmp_path / "gguf", "gguf")
    result = farspan.check(patch, tmp_path / "gguf" / "model.gguf", length=256)
    assert (result.agreement.verdict, result.by) == ("equal", "greedy continuations")
    assert result.runtime == "llama.cpp"


@pytest.mark.long
def test_a_gguf_file_without_llama_cpp_says_what_ran_it(tmp_path, monkeypatch):
    """Its bits are those of transformers, which says nothing about llama.cpp."""
    pytest.importorskip("gguf")
    monkeypatch.setattr(check_workflow, "has_llama", lambda: False)
    farspan.export("rope-twin", tmp_path / "gguf", "gguf")
    file = tmp_path / "gguf" / "model.gguf"
    arguments = ["check", "rope-twin", "--engine", str(file), "--length", "128"]
    result = CliRunner().invoke(app, arguments)
    sentence = " ".join(result.output.split())
    assert result.exit_code == 0
    assert "model.gguf in transformers are those of rope-twin up to 128 tokens" in sentence
    assert sentence.endswith("; llama.cpp was not asked, which needs xllamacpp")
    content = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert content["runtime"] == "transformers"


@pytest.mark.parametrize(
    ("engine", "llama", "runtime"),
    [
        ("http://localhost:8000/v1", True, "a server"),
        ("model.gguf", True, "llama.cpp"),
        ("model.gguf", False, "transformers"),
        ("rope-twin", True, "transformers"),
        ("swan-twin", True, "farspan"),
    ],
)
def test_the_sentence_names_what_computes_an_engine(engine, llama, runtime, monkeypatch):
    monkeypatch.setattr(check_workflow, "has_llama", lambda: llama)
    assert check_workflow._runtime(engine) == runtime
    result = CheckResult("m", engine, "log-probabilities", 640, Agreement("equal"), True, runtime)
    place = "" if runtime == "a server" else f" in {runtime}"
    assert f"the log-probabilities of {engine}{place} are those of m" in result.sentence
    assert ("llama.cpp was not asked" in result.sentence) == (
        (engine, runtime) == ("model.gguf", "transformers")
    )


def test_a_difference_starts_at_a_position():
    here, base = [1.0] * 200, [1.0] * 100 + [2.0] * 100
    assert compare_losses(here, here, base).verdict == "equal"
    assert compare_losses(base, here, base).verdict == "base"
    engine = [1.0] * 150 + [3.0] * 50
    assert compare_losses(engine, here, base) == Agreement("different", 152, 2.0, 0.05)
    assert compare_losses(engine, here, tolerance=2.5).verdict == "equal"
    assert compare_losses(engine, here, tolerance=2).verdict == "equal", "up to the tolerance"
    assert compare_losses(here, here, tolerance=0).verdict == "equal"
    rounded = [1.0] * 199 + [1.01]
    assert compare_losses(rounded, here).verdict == "equal"
    exact = compare_losses(rounded, here, tolerance=0)
    assert (exact.verdict, exact.position, exact.tolerance) == ("different", 201, 0)
    single = [1.0] * 192 + [1.5]
    assert compare_losses(single, [1.0] * 193).verdict == "equal", "32 positions or more at a time"
    assert compare_losses([1.0] * 20 + [3.0], [1.0] * 21).position == 22, "one block, however short"
    late = [1.0] * 199 + [9.0]
    assert compare_losses(late, [1.0] * 200).position == 201, "in the longer last block"
    weak = [1.0] * 190 + [1.2] * 10
    assert compare_losses(weak, here, weak).verdict == "base", "the tolerance follows the effect"


class LineTokenizer:
    """Letters are tokens, and so is an empty line at the end of a text."""

    bos_token_id = None

    def __call__(self, text, **_):
        pieces = re.findall(r"\n\n\Z|.", text, re.DOTALL)
        return {"input_ids": [0 if piece == "\n\n" else ord(piece) for piece in pieces]}

    def decode(self, ids):
        return "".join(chr(token) if token else "\n\n" for token in ids)


@pytest.mark.parametrize(("takes_tokens", "expected"), [(False, [2, 3, 5]), (True, [2, 4, 5])])
def test_prompts_as_text_end_where_a_server_reads_the_same_tokens(takes_tokens, expected):
    engine = Engine(None, LineTokenizer(), "m", "completions", takes_tokens, False)
    ids = encode(engine.tokenizer, "ab\n\nc")
    assert len(ids) == 5
    assert _kept_lengths(engine, ids, [2, 4, 5]) == expected
    lost = [98, 0, 99]  # is read as four tokens
    assert _kept_lengths(engine, lost, [3]) == ([3] if takes_tokens else [2])


def test_a_patch_without_effect_is_refused():
    with pytest.raises(FarspanError, match="its effect cannot be checked; use a longer --length"):
        compare_losses([1.0] * 9, [1.0] * 9, [1.0001] * 9)
    same = [Continuation(8, " a b")]
    with pytest.raises(FarspanError, match="are the same at these lengths"):
        compare_continuations([" a b c"], same, same)


def test_continuations_without_a_sure_token_are_refused():
    with pytest.raises(FarspanError, match="there is nothing to compare; use a longer --length"):
        compare_continuations([" a", " b"], [Continuation(8, ""), Continuation(16, " ")])
    assert compare_continuations([" a", " b"], [Continuation(8, ""), Continuation(16, " b")])


def test_continuations_are_compared_as_far_as_they_are_sure():
    here = [Continuation(8, " a b"), Continuation(16, " c")]
    base = [Continuation(8, " a b"), Continuation(16, " d")]
    assert compare_continuations(["a b x", " c d"], here, base) == Agreement("equal")
    assert compare_continuations([" a b x", " d d"], here, base) == Agreement("base")
    assert compare_continuations([" a b x", " e d"], here, base) == Agreement("different", 16)
    assert compare_continuations([" a x", " c"], here) == Agreement("different", 8)
    assert _sure_tokens(torch.tensor([[1.0, 3.0], [2.0, 2.05], [9.0, 1.0]])) == 1


def test_the_sentence_names_the_position():
    agreement = Agreement("different", 513, 2, 0.05)
    sentence = CheckResult("m", "e", "log-probabilities", 640, agreement, True, "a server").sentence
    assert "differ from those of m from position 513 on, to 2 nats (allowed 0.05)" in sentence


def test_the_engine_must_exist(patch, tmp_path):
    with pytest.raises(FarspanError, match="is neither a folder nor a hub id"):
        farspan.check(patch, tmp_path / "absent")
    with pytest.raises(FarspanError, match="does not exist; check the path"):
        farspan.check(patch, tmp_path / "absent.gguf")


def test_options_of_servers_are_for_servers(patch):
    with pytest.raises(FarspanError, match="--model m is a setting of a server, and rope-twin"):
        farspan.check(patch, "rope-twin", served_model="m")
    silent = SimpleNamespace(loss_form=None)
    url = "http://localhost:8000/v1"
    with pytest.raises(FarspanError, match=r"--tolerance 0.1 is in nats, .* no log-probabilities"):
        _compared_by(silent, url, 0.1)
    assert _compared_by(silent, url, None) == "greedy continuations"
    assert _compared_by(SimpleNamespace(loss_form="echo"), url, 0.1) == "log-probabilities"
    assert _compared_by(None, "rope-twin", 0.1) == "log-probabilities"
