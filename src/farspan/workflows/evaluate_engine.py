"""`farspan eval URL`: a model behind a server in the place of a loaded one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from farspan.begin_of_text import decide_begin_of_text
from farspan.errors import FarspanError, option_name
from farspan.evals.commonsense import Commonsense
from farspan.evals.engine import Engine, EngineOptions
from farspan.evals.engine_http import is_url
from farspan.evals.longbench import LongBench
from farspan.evals.perplexity import Perplexity
from farspan.evals.scores import Eval
from farspan.evals.suites import EvalConfig, EvalModel
from farspan.loading import LoadOptions, find_patch, find_train_length, load_tokenizer
from farspan.workflows.eval_models import passkeys_in_training

WITH_SERVERS = "quick, perplexity, passkey, needle, nonliteral, ruler or longbench"


def check_engine_options(sources: Sequence[object], options: EngineOptions) -> None:
    """Refuse settings of a server where there is none."""
    if not any(map(is_url, sources)):
        for name in (each.name for each in fields(options)):
            if getattr(options, name) != getattr(EngineOptions, name):
                option = "--model" if name == "served_model" else option_name(name)
                raise FarspanError(
                    f"{option} {getattr(options, name)} is a setting of a server, and {sources[0]} "
                    "is not a URL; remove it, or give a MODEL as http://localhost:8000/v1"
                )


def connect_eval_model(url: str, config: EvalConfig, bos: str, options: LoadOptions) -> EvalModel:
    """A served model, with the tokenizer and the lengths of the MODEL behind --tokenizer."""
    source = config.engine.tokenizer
    if not source:
        raise FarspanError(
            f"the prompts for {url} need the tokenizer of its model; add --tokenizer PATH"
        )
    if config.batch_size is not None:
        raise FarspanError(
            f"--batch-size {config.batch_size} is for loaded models, and {url} is a server, which "
            "makes its own batches; use --num-concurrent"
        )
    trust = options.get("trust_remote_code", False)
    tokenizer: Any = load_tokenizer(source, trust)
    patch = find_patch(source)
    begin = decide_begin_of_text(None, tokenizer, bos, patch)
    engine = Engine.connect(url, tokenizer, config.engine)
    engine.system = config.system_instruction
    length = None
    with suppress(FarspanError):  # a folder with nothing but a tokenizer
        length = find_train_length(source, trust)
    reach = patch.target if patch else length
    return EvalModel(
        url,
        engine,
        tokenizer,
        length,
        reach,
        None,
        passkeys_in_training(source),
        engine.identity,
        begin,
    )


def served_evaluations(
    engine: Engine, evaluations: Sequence[Eval], suite: str
) -> tuple[list[Eval], tuple[str, ...]]:
    """The evaluations that a server can answer, and a note of what is left out."""
    if any(isinstance(each, Commonsense) for each in evaluations):
        raise FarspanError(
            f"suite {suite} has commonsense tasks, which run on a loaded model only; choose "
            f"{WITH_SERVERS}"
        )
    beams = max((each.beams for each in evaluations if isinstance(each, LongBench)), default=1)
    if beams > 1:
        raise FarspanError(
            f"a server decodes greedily, and LongBench has {beams} beams; use --beams 1"
        )
    kept = [each for each in evaluations if not isinstance(each, Perplexity)]
    if len(kept) == len(evaluations) or engine.loss_form:
        return list(evaluations), ()
    if not kept:
        engine.losses([])  # refused, in its words
    return kept, (
        f"the server at {engine.client.url} returns no log-probabilities of prompts, so "
        "perplexity is left out",
    )
