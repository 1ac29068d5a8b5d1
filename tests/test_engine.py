"""Evaluations of a served model: the numbers of the loaded one, and every failure in a sentence."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import sys
import time
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx2
import pytest

import farspan
from engine_server import MODEL, EngineServer, error, fails_after, slow
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.scales import Scales
from farspan.begin_of_text import load_with_begin_of_text
from farspan.bundled import BUNDLED_MODELS
from farspan.cli import main
from farspan.data.passkey import FILLER, TASK
from farspan.data.tokens import DECISION
from farspan.errors import CorruptError, FarspanError
from farspan.evals import engine_http
from farspan.evals.chat import chat_frame
from farspan.evals.engine import (
    Engine,
    EngineOptions,
    Generated,
    _only_model,
    prompt_losses,
    without_frame,
)
from farspan.evals.engine_llama import has_llama
from farspan.evals.passkey import Passkey
from farspan.evals.suites import EvalConfig
from farspan.train.metadata import begin_of_text
from farspan.workflows import evaluate as evaluate_workflow
from farspan.workflows.evaluate_engine import connect_eval_model

pytestmark = pytest.mark.usefixtures("without_figures", "only_loopback")

KEY = "sk-a-key-that-nobody-may-read"
TWIN = str(BUNDLED_MODELS / "nope-twin")


@pytest.fixture(autouse=True)
def _quick_and_with_a_key(monkeypatch):
    """No attempt waits long, and nothing is drawn."""
    monkeypatch.setattr(engine_http, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(evaluate_workflow.figures, "evaluation_figures", lambda result: {})
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture(scope="module")
def twin():
    model, tokenizer = farspan.load("nope-twin")
    return model.float(), tokenizer


@pytest.fixture
def server(twin):
    """It answers what a text hides, without a model."""
    server = EngineServer(twin[1])
    yield server
    server.close()


def run(monkeypatch, capsys, url: str, out, *options: str) -> tuple[int, str]:
    """The exit code of `farspan eval`, and what it prints."""
    arguments = ["farspan", "eval", url, "-o", str(out), "--model", MODEL, "--tokenizer", TWIN]
    arguments += [*options, "--lengths", "256"] if "--lengths" not in options else options
    monkeypatch.setattr("sys.argv", arguments)
    try:
        main()
        code = 0
    except SystemExit as exit:
        code = int(exit.code or 0)
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


def scores(out) -> dict:
    record = json.loads((out / "record.json").read_text())
    return {(s["metric"], s["tags"]["task"], s["length"]): s for s in record["scores"]}


NEEDLES = ("--suite", "needle", "--limit", "3")


def test_a_served_model_is_measured_by_its_answers(server, tmp_path, monkeypatch, capsys):
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *NEEDLES)
    assert code == 0, printed
    measured = scores(tmp_path / "out")
    assert measured["recall", "single", 256]["value"] == 1
    assert measured["recall", "multi-query", 256]["value"] == 0.25, "it says one of four numbers"
    lengths = {len(body["prompt"]) + body["max_tokens"] for body in server.requests[2:]}
    assert lengths == {256}
    assert {body["temperature"] for body in server.requests} == {0}, "greedily"
    assert server.keys == {f"Bearer {KEY}"}
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert len(files) > 15
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_prompts_are_text_where_a_server_takes_no_tokens(server, tmp_path, monkeypatch, capsys):
    server.takes_tokens = False
    code, _ = run(monkeypatch, capsys, server.url, tmp_path / "out", *NEEDLES)
    assert code == 0
    assert all(isinstance(body["prompt"], str) for body in server.requests[2:])
    assert scores(tmp_path / "out")["recall", "single", 256]["value"] == 1


@pytest.mark.long
def test_messages_to_a_chat_model(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Passkey, "cells", _first_cells(Passkey.cells, 2))
    options = ("--api", "chat", "--suite", "passkey", "--lengths", "256")
    code, _ = run(monkeypatch, capsys, server.url, tmp_path / "out", *options)
    assert code == 0
    assert all([m["role"] for m in body["messages"]] == ["user"] for body in server.requests)
    assert scores(tmp_path / "out")["passkey", "passkey", 256]["value"] == 1
    assert len(server.requests) == 20


FAULTS = {
    "killed": ((0, b""), 75, "cannot be reached"),
    "status 500": (error(500, "CUDA error"), 75, "fails (status 500: 'CUDA error'; 2 attempts)"),
    "garbage": ((200, b"<html>gateway</html>"), 4, "not a JSON object: '<html>gateway</html>'"),
    "other JSON": ((200, b'{"choices": []}'), 4, "is not in the form of OpenAI's API"),
    "no text": ((200, b'{"choices": [[]], "usage": {}}'), 4, "is not in the form of OpenAI's API"),
    "parts": ((200, b'{"choices": [{"text": ["7"]}]}'), 4, "no text, but of the type list"),
    "nested": ((200, b"[" * 100_000), 4, "not a JSON object"),
    "too long": (error(400, "maximum context length is 99"), 2, "refuses a prompt as too long"),
    "no key": (error(401, f"wrong key {KEY}"), 2, "refuses the key (status 401: 'wrong key …')"),
    "odd": (error(422, "no such field"), 2, "refuses a request (status 422: 'no such field')"),
}


def test_a_reply_without_counts_is_taken(server, tmp_path, monkeypatch, capsys):
    server.fault = lambda number, body: (200, b'{"choices": [{"text": null}], "usage": []}')
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *NEEDLES)
    assert code == 0, printed
    assert scores(tmp_path / "out")["recall", "single", 256]["value"] == 0
    assert "15 of 15 answers are empty" in printed


def test_only_empty_answers_are_counted(server, tmp_path, monkeypatch, capsys):
    null = (200, b'{"choices": [{"message": {"content": null}}]}')
    server.fault = lambda number, body: null if number < 3 else None
    options = (*NEEDLES, "--api", "chat", "--num-concurrent", "1")
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *options)
    assert code == 0, printed
    assert "2 of 15 answers are empty" in printed


def test_a_served_baseline_is_refused_before_the_model_is_measured(server, tmp_path, monkeypatch):
    server.close()
    monkeypatch.setattr(evaluate_workflow, "run_cells", lambda *_, **__: pytest.fail("measured"))
    engine = EngineOptions(served_model=MODEL, tokenizer=TWIN, max_retries=0)
    with pytest.raises(FarspanError, match="cannot be reached"):
        farspan.evaluate(
            "nope-twin",
            "needle",
            tmp_path / "out",
            baseline=server.url,
            engine=engine,
            lengths=[256],
            limit=1,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("suite", "settings", "sentence"),
    [
        ("commonsense", {}, "run on a loaded model only"),
        ("perplexity", {"data": "text.txt"}, "returns no log-probabilities of prompts"),
        ("longbench", {"data": "bench.jsonl", "beams": 2}, "has 2 beams; use --beams 1"),
    ],
)
def test_what_a_served_baseline_lacks_is_refused_before_the_model_is_measured(
    suite, settings, sentence, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate_workflow, "run_cells", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("This text is long enough for a window. " * 200)
    row = {"dataset": "trec", "prompt": "Type:", "gold": ["a"], "idx": 0}
    Path("bench.jsonl").write_text(json.dumps(row))
    engine = EngineOptions(served_model=MODEL, tokenizer=TWIN)
    options = dict(baseline=server.url, engine=engine, lengths=[256], **settings)
    with pytest.raises(FarspanError, match=sentence):
        farspan.evaluate("nope-twin", suite, "out", **options)
    assert not Path("out").exists()


@pytest.mark.parametrize("key", ["sk-\u00e9t\u00e9", "sk a"])
def test_a_broken_key_is_not_printed(key, server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *NEEDLES)
    assert code == 2
    assert "has characters that no key has; set it again" in printed
    assert key not in printed


def test_a_key_from_a_file_with_a_line_break_is_not_printed(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    server.fault = lambda number, body: error(401, f"wrong key {KEY}")
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *NEEDLES)
    assert (code, server.keys) == (2, {f"Bearer {KEY}"})
    assert "'wrong key …'" in printed
    assert KEY not in printed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_one_sentence_and_loses_nothing(fault, server, tmp_path, monkeypatch, capsys):
    """The server fails after some answers; the same command asks only for the others."""
    answer, expected_code, sentence = FAULTS[fault]
    out, asked = tmp_path / "out", 15  # and two requests that find out what the server takes
    server.fault = fails_after(9, answer)
    options = (*NEEDLES, "--max-retries", "1", "--num-concurrent", "2")
    code, printed = run(monkeypatch, capsys, server.url, out, *options)
    assert (code, printed.count("error ")) == (expected_code, 1), printed
    assert sentence in printed
    assert KEY not in printed
    assert not (out / "record.json").exists()
    kept = len(list((out / "answers" / "cells").glob("*.json")))
    assert kept in (6, 7), "all but one that may be on its way when the other one fails"
    server.fault, server.requests[:] = lambda number, body: None, []
    assert run(monkeypatch, capsys, server.url, out, *options)[0] == 0
    # A request that the first run left open may come late: count prompts, not requests.
    prompts = {json.dumps(body["prompt"]) for body in server.requests}
    assert len(prompts) == 2 + asked - kept
    assert scores(out)["recall", "single", 256]["value"] == 1


def test_a_slow_server_and_a_stopped_one(server, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    server.fault = slow(1.0)
    code, printed = run(
        monkeypatch, capsys, server.url, out, *NEEDLES, "--timeout", "0.2", "--max-retries", "0"
    )
    assert code == 75
    assert "did not answer within 0.2 seconds (1 attempt)" in printed
    server.close()
    code, printed = run(monkeypatch, capsys, server.url, out, *NEEDLES, "--max-retries", "1")
    assert code == 75
    assert "cannot be reached" in printed
    assert "rerun the same command" in printed


def test_failures_that_pass_are_waited_for(server, tmp_path, monkeypatch, capsys):
    failing = iter([error(503, "loading"), error(429, "slow down")])
    server.fault = lambda number, body: next(failing, None)
    assert run(monkeypatch, capsys, server.url, tmp_path / "out", *NEEDLES)[0] == 0


def test_a_wrong_model_name_lists_the_served_ones(server, tmp_path, monkeypatch, capsys):
    options = (*NEEDLES, "--model", "serve")
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *options)
    assert code == 2
    assert "has no model 'serve'" in printed
    assert "with --model, did you mean served?" in printed


def test_a_prompt_that_a_server_cuts_is_refused(server, tmp_path, monkeypatch, capsys):
    """As a server does that takes the end of what is too long."""
    whole = server.answer

    def cut(number, body):
        prompt = body["prompt"]
        return whole(number, {**body, "prompt": prompt[-100:] if len(prompt) > 200 else prompt})

    server.answer = cut
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *NEEDLES)
    assert code == 2
    assert "read 100 tokens of a prompt of" in printed


REFUSED = {
    "--tokenizer": (("--tokenizer", ""), "add --tokenizer PATH"),
    "absent tokenizer": (("--tokenizer", "/absent"), "'/absent' is neither a folder nor a hub id"),
    "another tokenizer": ((), "give the tokenizer of the served model"),
    "commonsense": (("--suite", "commonsense"), "run on a loaded model only"),
    "perplexity": (("--suite", "perplexity"), "returns no log-probabilities of prompts"),
    "beams": (("--suite", "longbench", "--beams", "2"), "a server decodes greedily"),
    "--api": (("--api", "chats"), "did you mean chat?"),
    "--batch-size": ((*NEEDLES, "--batch-size", "2"), "makes its own batches; use --num-conc"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_refused(case, server, tmp_path, monkeypatch, capsys):
    options, sentence = REFUSED[case]
    if case == "another tokenizer":
        server._encode = lambda text: [1] * 5
    if case == "beams":
        row = {"dataset": "trec", "prompt": "Type:", "gold": ["a"], "idx": 0}
        (tmp_path / "bench.jsonl").write_text(json.dumps(row))
        options = (*options, "--data", f"longbench={tmp_path / 'bench.jsonl'}")
    code, printed = run(monkeypatch, capsys, server.url, tmp_path / "out", *options)
    assert code == 2
    assert sentence in printed
    assert not (tmp_path / "out" / "record.json").exists()


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        (f"http://user:{KEY}@localhost/v1", {}, "not the plain URL of a server"),
        (f"http://localhost/v1?key={KEY}", {}, "not the plain URL of a server"),
        ("http://localhost:99999999/v1", {}, "not the plain URL of a server"),
        ("http://[::1/v1", {}, "not the plain URL of a server"),
        ("nope-twin", {"timeout": 5.0}, "--timeout 5.0 is a setting of a server"),
        ("nope-twin", {"served_model": "x"}, "--model x is a setting of a server"),
        ("http://localhost:1/v1/chat/completions", {}, "request; give http://localhost:1/v1$"),
        ("http://localhost:1/v1", {"num_concurrent": 0}, "--num-concurrent is 0; use 1 or more"),
    ],
)
def test_settings_are_checked(model, settings, sentence, tmp_path):
    options = EngineOptions(**({"tokenizer": TWIN} if "http" in model else {}), **settings)
    with pytest.raises(FarspanError, match=sentence) as refused:
        farspan.evaluate(model, "needle", tmp_path / "out", lengths=[256], engine=options)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
@pytest.mark.long
def test_perplexity_by_log_probabilities_of_the_prompt(form, twin, tmp_path):
    """In vLLM's documented form, and in that of servers that echo a prompt; recorded, not run."""
    model, tokenizer = twin
    server = EngineServer(tokenizer, model, form)
    (tmp_path / "text.txt").write_text(TASK + FILLER * 30)
    settings = {"lengths": [64, 128], "windows": 2, "data": tmp_path / "text.txt"}
    options = EngineOptions(MODEL, TWIN)
    served = farspan.evaluate(server.url, "perplexity", tmp_path / "a", engine=options, **settings)
    server.close()
    asked = {(body["max_tokens"], body["temperature"]) for body in server.requests}
    assert asked == {(1, 0)}, "nothing is generated but what the API demands"
    here = farspan.evaluate("nope-twin", "perplexity", tmp_path / "b", **settings)
    assert [score.value for score in served.scores] == pytest.approx(
        [score.value for score in here.scores], rel=1e-4
    )
    assert len(served.scores) > 30, "two perplexities, and the loss by position"


def test_quick_leaves_perplexity_out_where_there_are_no_losses(server, tmp_path):
    options = EngineOptions(MODEL, TWIN)
    result = farspan.evaluate(server.url, "quick", tmp_path / "a", engine=options, lengths=[256])
    assert {score.eval for score in result.scores} == {"passkey"}
    assert "so perplexity is left out" in result.notes[0]


def answers(status: int, *names: str):
    """A status for what a server does not know: token ids, or a field of a request."""

    def fault(number, body):
        unknown = "tokens" in names and isinstance(body.get("prompt"), list)
        return error(status, "internal") if unknown or {*names} & {*body} else None

    return fault


@pytest.mark.parametrize("unknown", ["tokens", "prompt_logprobs", "echo"])
def test_a_probe_that_a_server_answers_with_500_is_a_no(unknown, twin):
    server = EngineServer(twin[1], twin[0], "echo")
    server.fault = answers(500, unknown)
    engine = Engine.connect(server.url, twin[1], EngineOptions(MODEL, TWIN))
    assert engine.takes_tokens == (unknown != "tokens")
    assert engine.loss_form == (None if unknown == "echo" else "echo")
    server.close()
    assert len(server.requests) == 4, "none is repeated"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("unknown", ["tokens", "echo"])
def test_a_probe_that_fails_for_a_while_says_nothing(unknown, status, server, twin):
    server.fault = answers(status, unknown)
    options = EngineOptions(MODEL, TWIN, max_retries=1)
    with pytest.raises(engine_http.FailingError, match=f"status {status}.*; 2 attempts"):
        assert Engine.connect(server.url, twin[1], options).loss_form


def test_the_first_request_is_no_probe(server, twin):
    server.fault = lambda number, body: error(500, "internal")
    with pytest.raises(engine_http.FailingError, match="status 500.*; 2 attempts"):
        Engine.connect(server.url, twin[1], EngineOptions(MODEL, TWIN, max_retries=1))


def test_quick_leaves_perplexity_out_where_asking_for_losses_fails(server, tmp_path):
    server.fault = answers(500, "prompt_logprobs", "echo")
    options = EngineOptions(MODEL, TWIN, max_retries=0)
    result = farspan.evaluate(server.url, "quick", tmp_path / "a", engine=options, lengths=[256])
    assert {score.eval for score in result.scores} == {"passkey"}


CLIENT = engine_http.EngineClient("http://localhost:1/v1")
ONCE_MORE = (408, 409, 425, 429, 500, 502, 503, 504, 529)


@pytest.mark.parametrize("status", [200, 299, 300, 301, 400, 404, 418, 501, 530, *ONCE_MORE])
def test_a_status_is_taken_refused_or_asked_for_again(status):
    response = httpx2.Response(status, json={"object": "list"})
    if status in ONCE_MORE:
        with pytest.raises(engine_http.FailingError):
            CLIENT._reply(response, None)
    elif status >= 300:
        with pytest.raises(engine_http.RefusedError, match=f"status {status}"):
            CLIENT._reply(response, None)
    else:
        assert CLIENT._reply(response, None) == {"object": "list"}


@pytest.mark.parametrize("problem", [None, {"code": 429, "message": "slow down"}])
def test_a_reply_with_an_error_is_none_unless_that_is_empty(problem):
    """Some servers name an error of null in every reply."""
    response = httpx2.Response(200, json={"choices": [], "error": problem})
    if problem is None:
        assert CLIENT._reply(response, None)["choices"] == []
    else:
        with pytest.raises(CorruptError, match="slow down"):
            CLIENT._reply(response, None)


@pytest.mark.parametrize(
    ("retry_after", "expected"),
    [("", [0.01, 0.02, 0.04]), ("7", [7] * 3), ("99", [30] * 3), ("²", [0.01, 0.02, 0.04])],
)
def test_waits_double_unless_the_server_asks_for_others(retry_after, expected, monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    async def fail(*_, **__):
        return httpx2.Response(503, headers={"retry-after": retry_after.encode()}, text="loading")

    monkeypatch.setattr(engine_http.asyncio, "sleep", sleep)
    client = replace(CLIENT, max_retries=3)
    with pytest.raises(engine_http.FailingError, match="status 503: 'loading'; 4 attempts"):
        asyncio.run(client._request(SimpleNamespace(request=fail), "GET", "/models", None))
    assert waits == pytest.approx(expected, rel=0 if expected[0] >= 1 else 0.25)


def test_a_url_without_its_version_is_named():
    client = replace(CLIENT, url="http://localhost:1/api")
    refused = str(client._refusal(404, "Not Found", {"model": "x"}))
    assert refused.endswith("give its URL with http://localhost:1/api/v1")


def test_only_what_is_kept_is_said_to_be():
    for kept in (True, False):
        client = replace(CLIENT, keeps_answers=kept)
        for cause in (TimeoutError(), OSError("gone"), engine_http.FailingError("x")):
            assert ("finished answers are kept" in str(client._failure(cause, 1))) == kept


@pytest.mark.parametrize(
    ("status", "text", "body", "sentence"),
    [
        (404, "gone", {"model": "x"}, "has no model 'x'"),
        (400, "unknown model", {"model": "x"}, "has no model 'x'"),
        (400, "gone", {"model": "x"}, "refuses a request"),
        (404, "gone", {}, "refuses a request"),
        (401, "unknown model", {"model": "x"}, "refuses the key"),
        (403, "gone", {"model": "x"}, "refuses the key"),
        (404, "too long", {"model": "x"}, "too long"),
        (400, "max_tokens 9 + inputs must be <= 8", {"model": "x"}, "too long"),
        (404, "The model `a-context` does not exist.", {"model": "a-context"}, "has no model"),
        (400, "Unsupported parameter: 'max_tokens'", {"model": "x"}, "refuses a request"),
        (400, "This model does not support echo", {"model": "x"}, "refuses a request"),
        (400, "the model could not be found", {"model": "x"}, "has no model 'x'"),
    ],
)
def test_a_refusal_names_its_cause(status, text, body, sentence, monkeypatch):
    monkeypatch.setattr(engine_http.EngineClient, "models", lambda self: [])
    assert sentence in str(CLIENT._refusal(status, text, body))


@pytest.mark.parametrize("message", ["Connection refused", ""])
def test_a_server_out_of_reach_is_named_with_the_cause(message):
    failure = CLIENT._failure(OSError(message), 1)
    assert f"cannot be reached ({message or 'OSError'}; 1 attempt)" in str(failure)


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b"]])
def test_the_only_served_model_needs_no_name(names):
    client = SimpleNamespace(url="http://x", models=lambda: [{"id": name} for name in names])
    if len(names) == 1:
        assert _only_model(client) == "a"
    else:
        expected = "serves a, b; add --model NAME$"
        if not names:
            expected = "does not say what it serves; add --model NAME, or use http://x/v1"
        with pytest.raises(FarspanError, match=expected):
            _only_model(client)


@pytest.mark.parametrize("installed", [True, False])
def test_llama_is_used_where_it_is_installed(installed, monkeypatch):
    module = ModuleType("xllamacpp")
    module.__spec__ = ModuleSpec("xllamacpp", None)
    monkeypatch.setitem(sys.modules, "xllamacpp", module if installed else None)
    assert has_llama() == installed


def test_a_reply_with_too_few_losses_is_refused():
    reply = {"prompt_logprobs": [None, {"5": {"logprob": -2}}]}
    assert prompt_losses("prompt_logprobs", reply, [4, 5]) == [2.0]
    with pytest.raises(KeyError):
        prompt_losses("prompt_logprobs", reply, [4, 6])
    with pytest.raises(ValueError, match="1 finite log-probabilities of 3 tokens"):
        prompt_losses("echo", {"logprobs": {"token_logprobs": [None, -1.0]}}, [4, 5, 6])


@pytest.mark.parametrize("text", ["something else", "<user>cut", "What?<end>", "<usr>What?<end>"])
def test_a_template_that_does_not_decode_is_refused(text):
    with pytest.raises(FarspanError, match="does not decode its own chat template"):
        without_frame(text, ("<user>", "<end>"))


def test_a_template_without_an_end_of_a_message_is_refused():
    with pytest.raises(FarspanError, match="adds nothing behind the message of the user"):
        without_frame("<user>What?", ("<user>", ""))


def check_within_interval(served, here, prompts: int) -> None:
    """Each score of the served model is in the interval of the loaded one, of as many prompts."""
    loaded = {score.key: score for score in here.scores if not score.tags.get("detail")}
    compared = [score for score in served.scores if score.key in loaded]
    assert len(compared) == len(loaded) > 0
    for score in compared:
        assert loaded[score.key].low <= score.value <= loaded[score.key].high, score.key
        assert score.n == loaded[score.key].n
    assert max(score.n for score in compared) == prompts


@pytest.mark.long
@pytest.mark.parametrize("engine", ["transformers serve", "llama.cpp"])
def test_a_served_bundled_model_scores_as_the_loaded_one(engine, tmp_path, monkeypatch):
    """On passkeys and needles, by real servers, one that takes text and one that takes tokens."""
    format, start = {"transformers serve": ("stock", _transformers), "llama.cpp": ("gguf", _llama)}[
        engine
    ]
    farspan.export("nope-twin", tmp_path / format, format)
    same: list[float] = []
    name, url, stop = start(tmp_path / format)
    try:
        monkeypatch.setattr(Passkey, "cells", _first_cells(Passkey.cells, 4))  # of ten depths
        for suite, settings, prompts in (("passkey", {}, 40), ("needle", {"limit": 3}, 5 * 3)):
            settings |= {"lengths": [256], "preset": "full"}
            options = EngineOptions(name, TWIN)
            out = tmp_path / suite
            served = farspan.evaluate(url, suite, out, engine=options, **settings)
            here = farspan.evaluate("nope-twin", suite, tmp_path / f"{suite}-here", **settings)
            check_within_interval(served, here, prompts)
            same.append(same_answers(out, tmp_path / f"{suite}-here"))
    finally:
        stop()
    assert same[0] == 1, "every key"
    assert same[1] >= 0.8, "a bundled model names no number, so its words are compared"


def same_answers(*folders) -> float:
    """The share of samples with the same answer in two results folders."""
    texts = []
    for folder in folders:
        (file,) = (folder / "samples").glob("*.jsonl")
        samples = map(json.loads, file.read_text().splitlines())
        texts.append([sample.get("prediction", sample.get("said")) for sample in samples])
    return sum(map(str.__eq__, *texts)) / len(texts[0])


def _first_cells(cells, count):
    return lambda self: cells(self)[:count]


def _transformers(folder):
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Serve(str(folder), host="127.0.0.1", port=port, device="cpu", non_blocking=True)
    while not server.server.started:
        time.sleep(0.01)
    return str(folder), f"http://127.0.0.1:{port}/v1", server.kill_server


def _llama(folder):
    xllamacpp = pytest.importorskip("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(folder / "model.gguf")
    settings.n_gpu_layers, settings.cpuparams.n_threads, settings.warmup = 0, 1, False
    settings.verbosity = -1
    server = xllamacpp.Server(settings)
    return "", f"{server.listening_address}/v1", lambda: server and None  # it lives as long


TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '' if enable_thinking else '\n' }}{% endif %}"
)


def test_ruler_in_a_chat_leaves_the_template_to_the_server(server, twin, tmp_path):
    """The message has the prompt and the start of the answer; the template is counted, not sent."""
    tokenizer = copy.deepcopy(twin[1])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = {"tasks": ("niah_single_1",), "lengths": [1024], "limit": 2}
    settings |= {"apply_chat_template": True, "system_instruction": "Be brief."}
    options = EngineOptions(MODEL, str(tmp_path / "tokenizer"), "chat")
    result = farspan.evaluate(server.url, "ruler", tmp_path / "out", engine=options, **settings)
    assert result.scores[0].value == 100
    for body in server.requests:
        system, user = body["messages"]
        assert system == {"role": "system", "content": "Be brief."}
        assert user["content"].startswith("A special magic number is hidden within")
        assert user["content"].endswith("mentioned in the provided text is")
        assert "<|" not in user["content"]
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "tokens of difference to the exact lengths" in result.notes[-1]


@pytest.mark.parametrize("remembered", [True, False])
def test_prompts_for_a_served_patch_begin_as_it_remembers(remembered, server, twin, tmp_path):
    model, tokenizer = twin
    scales = Scales.uniform(1.2, [0], model.config.num_attention_heads)
    patch = Patch("test", fingerprint(model), 1024, 256, scales, name=TWIN)
    folder = replace(patch, begin_of_text=remembered).save(tmp_path / "patch")
    config = EvalConfig(engine=EngineOptions(MODEL, str(folder)))
    served = connect_eval_model(server.url, config, "auto", {})
    local = load_with_begin_of_text(folder).begin
    assert served.begin == local
    assert served.begin.ids == (tokenizer.bos_token_id,) * remembered
    assert begin_of_text(served.tokenizer) == list(served.begin.ids)
    overridden = connect_eval_model(server.url, config, "no" if remembered else "yes", {})
    assert bool(overridden.begin.ids) != remembered


@pytest.mark.parametrize("before", ["", "{{ bos_token }}"])
def test_a_message_has_no_begin_of_text_token(before, twin):
    """The server adds it, whether the template has it (Llama 3, Gemma, Mistral) or not."""
    tokenizer = copy.deepcopy(twin[1])
    setattr(tokenizer, DECISION, True)
    tokenizer.chat_template = before + TEMPLATE
    frame = chat_frame(tokenizer)
    assert frame[0].startswith(tokenizer.bos_token) == bool(before)
    row = tokenizer(f"{frame[0]}What is it?{frame[1]}It is")["input_ids"]
    assert (row[0] == tokenizer.bos_token_id) == bool(before)
    engine = Engine(CLIENT, tokenizer, MODEL, "chat", False, False)
    assert engine._prompt(row, frame) == [{"role": "user", "content": "What is it? It is"}]
    plain = [tokenizer.bos_token_id, *tokenizer("The sky")["input_ids"]]
    assert engine._prompt(plain) == [{"role": "user", "content": "The sky"}]


@pytest.mark.parametrize(("adds_begin", "begins"), [(True, False), (False, True)])
def test_a_begin_of_text_token_is_in_a_text_once(adds_begin, begins, twin):
    """A server that adds it gets a text without it."""
    tokenizer = copy.deepcopy(twin[1])
    setattr(tokenizer, DECISION, True)
    client = engine_http.EngineClient("http://localhost:1/v1")
    engine = Engine(client, tokenizer, MODEL, "completions", False, adds_begin)
    text = engine._prompt([tokenizer.bos_token_id, *tokenizer("The sky")["input_ids"]])
    assert text == tokenizer.bos_token * begins + "The sky"


@pytest.mark.parametrize("added", [0, 1])
@pytest.mark.parametrize("takes_tokens", [True, False])
def test_a_server_begins_texts_if_it_counts_one_token_more(takes_tokens, added, twin):
    def post(path, body):
        prompt, text = body["prompt"], isinstance(body["prompt"], str)
        if not (text or takes_tokens):
            raise engine_http.RefusedError("prompt must be a string")
        count = len(twin[1](prompt)["input_ids"]) + added if text else len(prompt)
        return {"usage": {"prompt_tokens": count}}

    client = SimpleNamespace(url="http://localhost:1/v1", post=post, probe=post)
    engine = Engine(client, twin[1], MODEL, "completions", False, False)
    assert engine._probe() == (takes_tokens, bool(added))


@pytest.mark.parametrize("begins", [False, True])
def test_losses_belong_to_the_tokens_of_the_row_where_a_server_adds_one(begins, twin):
    """Texts to a server that begins them itself: its first token counts only if the row has it."""
    tokenizer = copy.deepcopy(twin[1])
    setattr(tokenizer, DECISION, begins)
    client = engine_http.EngineClient("http://localhost:1/v1")
    engine = Engine(client, tokenizer, MODEL, "completions", False, adds_begin=True)
    row = [tokenizer.bos_token_id] * begins + [7, 8, 9]
    values = [None, -1.0, -2.0, -3.0]  # of the added token, 7, 8 and 9
    choice = {"logprobs": {"token_logprobs": [*values, -0.5]}}
    losses = prompt_losses("echo", choice, row, engine._offset)
    assert losses == ([1.0, 2.0, 3.0] if begins else [2.0, 3.0])


@pytest.mark.parametrize("read", [2, 3, 4, 99])
@pytest.mark.parametrize("adds_begin", [False, True])
def test_losses_of_a_text_that_a_server_splits_otherwise_are_refused(read, adds_begin, twin):
    """Its list has a generated token, too, and may be as long as that of the right tokens."""

    def post_all(path, bodies, on_reply):
        values = [None, *[-1.0] * read]
        choice = {"text": "", "logprobs": {"token_logprobs": values}}
        on_reply(0, {"choices": [choice], "usage": {"prompt_tokens": read + adds_begin}})

    client = SimpleNamespace(url="http://localhost:1/v1", post_all=post_all)
    engine = Engine(client, twin[1], MODEL, "completions", False, adds_begin)
    engine._loss_form = "echo"
    if read == 3:
        assert engine.losses([[7, 8, 9]]) == [[1.0, 1.0]]
    else:
        with pytest.raises(FarspanError, match="its log-probabilities are of other tokens"):
            engine.losses([[7, 8, 9]])


@pytest.mark.parametrize(("takes_tokens", "prompts"), [(True, "tokens"), (False, "text")])
def test_answers_depend_on_the_kind_of_prompts(takes_tokens, prompts, twin):
    engine = Engine(CLIENT, twin[1], MODEL, "completions", takes_tokens, False)
    assert engine.identity["prompts"] == prompts


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo", None])
def test_the_form_of_losses_is_the_one_that_a_server_answers_in(form, twin):
    """It is asked for each form with the same few tokens; other fields of a request are ignored."""

    def post(path, body):
        count = len(body["prompt"])
        logprobs = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        return {
            "choices": [
                {
                    "text": "",
                    **({"prompt_logprobs": logprobs} if form == "prompt_logprobs" else {}),
                    "logprobs": {"token_logprobs": [None] + [-1.0] * count}
                    if form == "echo" and body.get("echo")
                    else None,
                }
            ]
        }

    client = SimpleNamespace(url="http://localhost:1/v1", post=post, probe=post)
    assert Engine(client, twin[1], MODEL, "completions", True, False).loss_form == form


def test_a_list_of_models_is_asked_for_once(monkeypatch):
    """It serves an advice only, so a server that does not list them is not waited for."""
    asked: list[str] = []

    async def fail(self, method, url, **_):
        asked.append(url)
        return httpx2.Response(503, text="loading")

    monkeypatch.setattr(httpx2.AsyncClient, "request", fail)
    assert CLIENT.models() == []
    assert asked == ["http://localhost:1/v1/models"]


def test_a_chat_model_answers_a_passkey_in_32_tokens(twin):
    rooms: list[int] = []

    def generate(prompts, room):
        rooms.append(room)
        return [Generated("It is not known.", 1) for _ in prompts]

    evaluation = Passkey((256,), keys=2)
    engine = SimpleNamespace(api="chat", generate=generate)
    keys, rows, sizes = evaluation.documents(evaluation.cells()[0], twin[1])
    samples = evaluation._ask(evaluation.cells()[0], engine, keys, rows, sizes)
    assert rooms == [32]
    assert not any(sample["hit"] for sample in samples)


def test_a_chat_has_no_losses_and_is_not_asked_for_them(twin):
    def post(path, body):
        raise AssertionError(path)

    client = SimpleNamespace(url="http://localhost:1/v1", post=post, probe=post)
    assert Engine(client, twin[1], MODEL, "chat", False, False).loss_form is None


def test_a_server_is_probed_with_tokens_that_none_begins():
    """A tokenizer that begins texts would hide that the server does so, too."""

    def tokenizer(text, add_special_tokens=True, **_):
        return {"input_ids": [0] * add_special_tokens + list(map(ord, text))}

    def post(path, body):
        prompt = body["prompt"]
        read = len(prompt) + 1 if isinstance(prompt, str) else len(prompt)
        return {"usage": {"prompt_tokens": read}}

    client = SimpleNamespace(url="http://localhost:1/v1", post=post, probe=post)
    assert Engine(client, tokenizer, MODEL, "completions", False, False)._probe() == (True, True)


@pytest.mark.parametrize("letters", [200, 300])
def test_what_a_server_says_is_cut_after_200_letters(letters):
    said = engine_http._message(httpx2.Response(400, text="x" * letters))
    assert said == repr("x" * 200 + "…" * (letters > 200))


@pytest.mark.parametrize(("api", "share"), [("completions", 0.02), ("chat", 0.1)])
def test_a_server_may_count_a_few_tokens_less(api, share, twin):
    """In a chat a tenth: its template may be another one."""
    engine = Engine(
        engine_http.EngineClient("http://localhost:1/v1"), twin[1], MODEL, api, False, False
    )
    engine._check_whole(round(1000 * (1 - share)), 1000)
    with pytest.raises(FarspanError, match="of a prompt of 1000"):
        engine._check_whole(round(1000 * (1 - 1.5 * share)) - 8, 1000)


def test_the_only_model_needs_no_name(server, tmp_path):
    options = EngineOptions(tokenizer=TWIN)
    farspan.evaluate(server.url, "needle", tmp_path / "out", engine=options, lengths=[256], limit=1)
    assert {body["model"] for body in server.requests} == {MODEL}


def test_longbench_asks_a_server_and_cuts_after_a_line(server, tmp_path):
    """samsum ends with its first line; triviaqa keeps all that the server says."""
    rows = [
        {"dataset": task, "prompt": f"The sky is {task}.", "gold": ["blue sky"], "idx": 0}
        for task in ("samsum", "triviaqa")
    ]
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    server._text = lambda ids, count: "\nblue sky\nand more"
    options = EngineOptions(MODEL, TWIN)
    data = {"longbench": tmp_path / "bench.jsonl"}
    farspan.evaluate(
        server.url, "longbench", tmp_path / "out", engine=options, lengths=[512], data=data
    )
    samples = (tmp_path / "out" / "samples" / "longbench.jsonl").read_text().splitlines()
    predictions = {s["task"]: s["prediction"] for s in map(json.loads, samples)}
    assert predictions == {"samsum": "\nblue sky", "triviaqa": "\nblue sky\nand more"}
