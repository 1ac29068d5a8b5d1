"""`farspan eval`: run a suite on a model, cell by cell, in any number of processes.

The results folder holds every finished cell under a key of everything that it depends on: model,
patch, tokenizer, task, length, depth, seed. A finished cell is read and never measured again.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from farspan.begin_of_text import BeginOfText, check_choice
from farspan.bundled import resolve_bundled
from farspan.cells import Cells, check_results_folder
from farspan.data.documents import check_text
from farspan.data.tokens import fingerprint
from farspan.deprecation import renamed_arguments
from farspan.device_map import DeviceMap, check_device_map
from farspan.errors import FarspanError
from farspan.evals.engine import Engine
from farspan.evals.engine_http import is_url
from farspan.evals.gates import Gate, check_gate, check_gates, parse_gate
from farspan.evals.longppl import Evaluator
from farspan.evals.perplexity import LONGPPL, Perplexity, read_text
from farspan.evals.results import EvalResult
from farspan.evals.scores import Eval, Sample, Score
from farspan.evals.suites import (
    EvalConfig,
    EvalModel,
    EvalPlan,
    Suite,
    check_unused_settings,
    find_suite,
    make_plan,
    named_texts,
)
from farspan.files import read_json, write_text
from farspan.loading import (
    LoadOptions,
    base_source,
    check_device,
    check_source,
    find_patch,
    find_train_length,
    load_tokenizer,
)
from farspan.model_objects import ModelLike, ModelObject, accepts_model_objects
from farspan.progress import Progress, Say, automatic, ignore, shows_progress
from farspan.record import write_record
from farspan.report import figures, style
from farspan.train.sharding import processes
from farspan.workflows.eval_cells import run_cells
from farspan.workflows.eval_models import load_eval_model
from farspan.workflows.eval_notes import begin_notes, measurement_notes, missing_longppl
from farspan.workflows.evaluate_engine import (
    check_engine_options,
    connect_eval_model,
    served_evaluations,
)


@renamed_arguments(source="model", vs="baseline", require="gate", items="limit")
@accepts_model_objects
@shows_progress
def evaluate(
    model: ModelLike,
    suite: str = "quick",
    out: str | Path = "eval",
    *,
    baseline: ModelLike | None = None,
    gate: str | Sequence[str] = (),
    preset: str | None = None,
    config: EvalConfig | None = None,
    position: str | None = None,
    bos: str = "auto",
    device: str | None = None,
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
    say: Say = ignore,
    **settings: Any,
) -> EvalResult:
    """Measure a model; cells that the results folder `out` already holds are not measured again.

    model: a name or path, a model object, what `load` returns, or the URL of a server.
    suite: quick, paper, perplexity, passkey, needle, nonliteral, ruler, longbench, commonsense.
    baseline, gate: a second model, and conditions such as "ppl@512<=1.05x".
    preset: quick (less text, on a CPU the default) or full.
    settings: EvalConfig's: lengths, data, mode, metric, stride, budget, windows, beams, limit,
        seed, tasks, apply_chat_template, system_instruction, threshold, batch_size, engine.
    position: the position encoding of a llama checkpoint, for the model and the baseline.
    bos: yes, no or auto: whether texts begin with a begin-of-text token.
    device_map: as in transformers, for models that one device does not hold.

    >>> farspan.evaluate("nope-twin", "perplexity", "results", lengths="256", windows=1).suite
    'perplexity'
    """
    options = _load_options(device, device_map, trust_remote_code, progress)
    if preset := preset or _default_preset(model, device or processes().device, config):
        settings["preset"] = preset
    parameters = inspect.signature(evaluate).parameters
    config = (config or EvalConfig()).with_settings(settings, parameters)
    check_engine_options([model, baseline], config.engine)
    run = _EvalRun.prepare(suite, config, gate, Path(out), progress, say, bos)
    baseline = _default_baseline(model, run.gates) if baseline is None else baseline
    baseline_position = None if baseline is None else _position(baseline, model, position)
    run = run.check_baseline(baseline, {**options, "position": baseline_position})
    run = run.with_models(model, baseline, trust_remote_code)
    measured = [run.measure(model, {**options, "position": _position(model, baseline, position)})]
    if baseline is not None:
        options["position"] = baseline_position
        measured.append(run.measure(baseline, options, measured[0]))
    return run.finish(measured, options)


def _load_options(
    device: str | None, device_map: DeviceMap | None, trust_remote_code: bool, progress: Progress
) -> LoadOptions:
    check_device_map(device_map, device)
    check_device(device)
    options = LoadOptions(trust_remote_code=trust_remote_code, progress=progress)
    if device_map is not None:
        return {**options, "device_map": device_map}
    return {**options, "device": device or processes().device}


def _default_preset(
    model: Any, device: str | torch.device, config: EvalConfig | None
) -> str | None:
    """quick for a model that runs here, on a CPU, unless a config gives all settings."""
    slow = config is None and not is_url(model) and torch.device(device).type == "cpu"
    return "quick" if slow else None


@dataclass(frozen=True, eq=False)
class _Measurement:
    """The samples of one model."""

    name: str
    identity: Mapping[str, str]
    train_length: int | None
    extended_length: int | None
    plan: EvalPlan
    evaluations: Sequence[Eval]
    samples: list[list[Sample]]  # of each evaluation
    notes: tuple[str, ...]
    begin: BeginOfText

    @property
    def texts(self) -> dict[str, str]:
        """The hash of the tokens of each text of perplexity."""
        perplexity = _perplexity(self.evaluations)
        return {text.name: text.sha256 for text in perplexity.texts} if perplexity else {}

    def scores(self, evaluator: _Measurement) -> tuple[Score, ...]:
        """The scores of every evaluation; LongPPL scores the key tokens of the evaluator."""
        scores: list[Score] = []
        for number, evaluation in enumerate(self.evaluations):
            if isinstance(evaluation, Perplexity):
                scores += evaluation.score(self.samples[number], evaluator.samples[number])
            else:
                scores += evaluation.score(self.samples[number])
        return tuple(scores)


@dataclass(frozen=True, eq=False)
class _EvalRun:
    """A suite with its settings and its results folder."""

    name: str
    suite: Suite
    config: EvalConfig
    texts: Mapping[str, str | Path]
    gates: list[Gate]
    out: Path
    progress: Progress
    say: Say
    bos: str
    evaluator: Evaluator | None = None  # chooses the key tokens of LongPPL
    baseline: str | Path | None = None
    served_baseline: Engine | None = None

    @classmethod
    def prepare(
        cls,
        name: str,
        config: EvalConfig,
        gates: str | Sequence[str],
        out: Path,
        progress: Progress,
        say: Say,
        bos: str,
    ) -> _EvalRun:
        """Check everything that can be checked before a model is loaded."""
        check_choice(bos)
        gates = [gates] if isinstance(gates, str) else gates
        suite, parsed = find_suite(name), [parse_gate(text) for text in gates]
        texts = named_texts(name, suite, config.data)
        for text in texts.values() if suite.texts is None else ():  # others have other forms
            check_text(text)
        check_unused_settings(name, config)
        config = suite.complete(config)
        check_results_folder(out, "eval")
        _check_suite(out, name)
        return cls(name, suite, config, texts, parsed, out, progress, say, bos)

    def check_baseline(self, baseline: str | Path | None, options: LoadOptions) -> _EvalRun:
        """Refuse a baseline that cannot be measured, before the model is; connect a served one."""
        if is_url(baseline):
            served = connect_eval_model(str(baseline), self.config, self.bos, options)
            return replace(self, served_baseline=served.engine)
        if baseline is not None:
            trust = options.get("trust_remote_code", False)
            check_source(baseline, position=options.get("position"), trust_remote_code=trust)
        return self

    def with_models(
        self, model: str | Path, baseline: str | Path | None, trust_remote_code: bool
    ) -> _EvalRun:
        """The run with the model that chooses the key tokens of LongPPL, if that is measured."""
        run, model = replace(self, baseline=baseline), baseline or model
        if self.config.metric != LONGPPL:
            return run
        train_length = find_train_length(self._with_files(model), trust_remote_code)
        return replace(run, evaluator=Evaluator(str(model), train_length))

    def _with_files(self, model: str | Path) -> str | Path:
        """The model, or for the URL of a served one the MODEL behind --tokenizer."""
        return self.config.engine.tokenizer if is_url(model) else model

    def measure(
        self, source: str | Path, options: LoadOptions, compared: _Measurement | None = None
    ) -> _Measurement:
        """Measure one model; the baseline gets the plan of the model that it is compared with.

        Only one model is in memory.
        """
        if is_url(source):
            model = connect_eval_model(str(source), self.config, self.bos, options)
        else:
            model = load_eval_model(source, options, self.bos)
        if compared is None:
            plan = make_plan(model, self.suite, self.config, self.texts)
            plan = replace(plan, evaluator=self.evaluator)
        else:
            plan = replace(compared.plan, lengths_requested=True)
            model.check_lengths((*plan.lengths, *plan.grid))
        evaluations, left_out = _build(model, plan, self.suite, self.name)
        if compared is None and self.served_baseline is not None:  # refused now, not later
            served_evaluations(self.served_baseline, evaluations, self.name)
        if perplexity := _perplexity(evaluations):
            # It leaves out lengths that its text does not reach, for the baseline too.
            plan = replace(plan, lengths=perplexity.lengths)
        if compared is None:
            if perplexity and perplexity.contrast:
                self._check_same_tokens(model, perplexity, options)
            check_gates(self.gates, [key for each in evaluations for key in each.score_keys()])
        cells = Cells(self.out, say=self.say)  # makes the folder, once nothing is refused any more
        if model.engine:
            model.engine.answers = Cells(self.out / "answers", say=self.say)
        samples = run_cells(
            model,
            evaluations,
            cells,
            preset=self.config.preset,
            baseline_follows=self.baseline is not None and compared is None,
            progress=self.progress,
            say=self.say,
        )
        notes = (*left_out, *measurement_notes(model, plan, evaluations, samples))
        return _Measurement(
            model.name,
            model.identity,
            model.train_length,
            model.extended_length,
            plan,
            evaluations,
            samples,
            notes,
            model.begin,
        )

    def _check_same_tokens(
        self, model: EvalModel, perplexity: Perplexity, options: LoadOptions
    ) -> None:
        """Refuse a baseline that cannot choose the key tokens of the model."""
        if self.baseline is None:
            return
        trust = options.get("trust_remote_code", False)
        tokenizer = load_tokenizer(self._with_files(self.baseline), trust)
        if fingerprint(tokenizer) == model.identity["tokenizer"]:
            return
        for text in perplexity.texts:
            if read_text(text.name, self.texts[text.name], tokenizer).sha256 != text.sha256:
                raise FarspanError(
                    f"longppl scores the key tokens of {self.baseline}, whose tokenizer splits the "
                    f"text into other tokens than that of {model.name}; choose a baseline with the "
                    "same tokenizer"
                )

    def finish(self, measured: Sequence[_Measurement], options: LoadOptions) -> EvalResult:
        """Check the gates, and write samples, figures and record."""
        model, *others = measured
        baseline = others[0] if others else None
        if baseline and baseline.name == model.name and baseline.identity != model.identity:
            baseline = replace(baseline, name=f"{baseline.name} (baseline)")  # of model objects
            measured = [model, baseline]
        evaluator = measured[-1]
        scores = model.scores(evaluator)
        baseline_scores = baseline.scores(evaluator) if baseline else ()
        notes = model.notes
        if self.evaluator:
            notes += tuple(missing_longppl(self.evaluator.name, model.evaluations, scores))
        notes += tuple(begin_notes({each.name: each.begin for each in measured}))
        same_tokenizer = baseline and baseline.identity["tokenizer"] == model.identity["tokenizer"]
        if baseline and model.texts and not same_tokenizer:
            notes += ("the tokenizers differ, so the two perplexities cannot be compared",)
        result = EvalResult(
            model.name,
            self.name,
            scores,
            self.out,
            baseline.name if baseline else None,
            baseline_scores,
            tuple(check_gate(gate, scores, baseline_scores) for gate in self.gates),
            notes,
            model.train_length,
        )
        if processes().is_main_process:
            settings = {
                "identities": {each.name: each.identity for each in measured},
                "require": [gate.text for gate in self.gates],
                "device": torch.device(options.get("device") or processes().device).type,
                "begin_of_text": {each.name: each.begin.to_json() for each in measured},
                "train_length": model.train_length,
                "texts": [each.texts for each in measured],
                **model.plan.to_json(),
            }
            if baseline:
                lengths = {"train_length": baseline.train_length}
                settings["baseline"] = {**lengths, "context": baseline.extended_length}
            _write(result, {each.name: each.samples for each in measured}, settings)
        processes().wait_for_everyone()
        return result


def _build(
    model: EvalModel, plan: EvalPlan, suite: Suite, name: str
) -> tuple[list[Eval], tuple[str, ...]]:
    """The evaluations of a suite; what a server cannot do is left out, with a note, or refused."""
    evaluations = [build(model, plan) for build in suite.builds]
    if model.engine is None:
        return evaluations, ()
    return served_evaluations(model.engine, evaluations, name)


def _perplexity(evaluations: Sequence[Eval]) -> Perplexity | None:
    """A suite has at most one."""
    return next((each for each in evaluations if isinstance(each, Perplexity)), None)


def _default_baseline(model: str | Path, gates: Sequence[Gate]) -> str | None:
    """The base model of a patch, if a gate compares with a baseline."""
    if not any(gate.relative for gate in gates):
        return None
    if (patch := find_patch(model)) is None:
        raise FarspanError("a gate with x compares with a baseline; add --baseline MODEL")
    return base_source(Path(model), patch)


def _check_suite(out: Path, suite: str) -> None:
    """Refuse a folder with the record and figures of another suite, which would be lost."""
    other = suite
    with suppress(FarspanError):  # there is no record, or a broken one, which is written anew
        other = read_json(out / "record.json").get("suite", suite)
    if other != suite:
        raise FarspanError(f"{out} holds the results of suite {other}; choose another folder")


def _position(source: str | Path, other: str | Path | None, position: str | None) -> str | None:
    """The position encoding to load a model with: the requested one, or, for the base model of a
    patch, the one that the patch names."""
    if position is not None or other is None or isinstance(source, ModelObject):
        return position
    if (patch := find_patch(other)) is None:
        return None
    base = base_source(Path(other), patch)
    same = Path(resolve_bundled(source)).resolve() == Path(resolve_bundled(base)).resolve()
    return patch.position if same else None


def _write(
    result: EvalResult, samples: Mapping[str, list[list[Sample]]], settings: Mapping[str, Any]
) -> None:
    """Write samples as JSON Lines, figures and the record; files of an earlier run are replaced."""
    lines: dict[str, list[str]] = {}
    for model, groups in samples.items():
        for sample in (sample for group in groups for sample in group):
            line = json.dumps({"model": model, **sample}, ensure_ascii=False)
            lines.setdefault(sample["eval"], []).append(line)
    for name, rows in lines.items():
        write_text(result.folder / "samples" / f"{name}.jsonl", "\n".join(rows) + "\n")
    for name, figure in figures.evaluation_figures(result).items():
        style.save(figure, result.folder / name)
    settings = {"suite": result.suite, **settings}
    write_record(result.folder / "record.json", "eval", settings, result.to_json())
