"""`farspan eval`: run a suite on a model, cell by cell, in any number of processes.

The results folder holds every finished cell under a key of everything that it depends on: model,
patch, tokenizer, task, length, depth, seed. A finished cell is read and never measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.model_facts import config_train_length, max_positions, probe_or_none
from farspan.attention.patch import Patch
from farspan.batching import out_of_memory
from farspan.begin_of_text import BeginOfText, check_choice, load_with_begin_of_text
from farspan.bundled import resolve_bundled
from farspan.cells import Cells, cell_key, check_results_folder, compute_unclaimed, finish
from farspan.data.tokens import adds_begin_of_text
from farspan.data.tokens import fingerprint as tokenizer_fingerprint
from farspan.deprecation import renamed_arguments
from farspan.diagnosis.curves import check_finite
from farspan.errors import FarspanError, first_line
from farspan.evals.decoding import end_tokens
from farspan.evals.gates import Gate, check_gate, check_gates, parse_gate
from farspan.evals.longppl import Evaluator
from farspan.evals.passkey import UNKNOWN, Passkey, PrefixCache
from farspan.evals.perplexity import LONGPPL, Perplexity
from farspan.evals.results import EvalResult
from farspan.evals.scores import Eval, EvalCell, Sample, Score
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
    check_source,
    find_patch,
    find_train_length,
    upcast_small_model,
)
from farspan.model.compile import compiled_layers
from farspan.model.loss import last_logits
from farspan.progress import Progress, silent
from farspan.record import write_record
from farspan.report import figures, style
from farspan.train.metadata import begin_of_text, trained_with_passkeys
from farspan.train.sharding import processes

FORMAT = 1  # of cells; raised whenever what a cell of any evaluation computes changes
COMPILE_FROM = 1e16  # tokens × parameters of work from which compiling pays on a GPU


@renamed_arguments(source="model", vs="baseline", require="gate", items="limit")
def evaluate(
    model: str | Path,
    suite: str = "quick",
    out: str | Path = "eval",
    *,
    baseline: str | Path | None = None,
    gate: Sequence[str] = (),
    config: EvalConfig | None = None,
    position: str | None = None,
    bos: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> EvalResult:
    """Measure a model; cells that the results folder `out` already holds are not measured again.

    suite: quick, paper, perplexity, passkey, needle, ruler, longbench or commonsense.
    baseline: a second model, measured on the same.
    gate: conditions such as "ppl@512<=1.05x"; `EvalResult.gates` says which hold.
    settings: EvalConfig's: lengths, data, mode, metric, stride, budget, windows, beams, limit,
        seed, tasks, apply_chat_template, system_instruction, threshold.
    position: the position encoding of a llama checkpoint, for the model and the baseline.
    bos: yes, no or auto: whether texts begin with a begin-of-text token.

    >>> farspan.evaluate("nope-twin", "quick", "results").scores[0].value
    """
    state, config = processes(), (config or EvalConfig()).with_settings(settings)
    run = _EvalRun.prepare(suite, config, gate, Path(out), progress, say, bos)
    if baseline is None:
        baseline = _default_baseline(model, run.gates)
    options: LoadOptions = {
        "position": position,
        "device": device or state.device,
        "trust_remote_code": trust_remote_code,
        "progress": progress,
    }
    if baseline is not None:  # refused before the model is measured
        baseline_position = _position(baseline, model, position)
        check_source(baseline, position=baseline_position, trust_remote_code=trust_remote_code)
    if config.metric == LONGPPL:
        train_length = find_train_length(baseline or model, trust_remote_code)
        run = replace(run, evaluator=Evaluator(str(baseline or model), train_length))
    options["position"] = _position(model, baseline, position)
    measured = [run.measure(model, options)]
    if baseline is not None:
        options["position"] = baseline_position
        measured.append(run.measure(baseline, options, measured[0]))
    return run.finish(measured, list(gate), options)


@dataclass(frozen=True, eq=False)
class _Measurement:
    """The samples of one model."""

    name: str
    identity: Mapping[str, str]
    train_length: int | None
    plan: EvalPlan
    evaluations: Sequence[Eval]
    samples: list[list[Sample]]  # of each evaluation
    notes: tuple[str, ...]
    begin: BeginOfText

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
    say: Callable[[str], None]
    bos: str
    evaluator: Evaluator | None = None  # chooses the key tokens of LongPPL

    @classmethod
    def prepare(
        cls,
        name: str,
        config: EvalConfig,
        gates: Sequence[str],
        out: Path,
        progress: Progress,
        say: Callable[[str], None],
        bos: str,
    ) -> _EvalRun:
        """Check everything that can be checked before a model is loaded."""
        check_choice(bos)
        suite, parsed = find_suite(name), [parse_gate(text) for text in gates]
        texts = named_texts(name, suite, config.data)
        check_unused_settings(name, config)
        config = suite.complete(config)
        check_results_folder(out, "eval")
        _check_suite(out, name)
        return cls(name, suite, config, texts, parsed, out, progress, say, bos)

    def measure(
        self, source: str | Path, options: LoadOptions, compared: _Measurement | None = None
    ) -> _Measurement:
        """Measure one model; the baseline gets the plan of the model that it is compared with.

        Only one model is in memory.
        """
        model = _load_eval_model(source, options, self.bos)
        if compared is None:
            plan = make_plan(model, self.suite, self.config, self.texts)
            plan = replace(plan, evaluator=self.evaluator)
        else:
            plan = replace(compared.plan, lengths_requested=True)
            model.check_lengths((*plan.lengths, *plan.grid))
        evaluations = [build(model, plan) for build in self.suite.builds]
        # Perplexity leaves out lengths that its text does not reach, for the baseline too.
        texts_reach = [e.lengths for e in evaluations if isinstance(e, Perplexity)]
        plan = replace(plan, lengths=next(iter(texts_reach), plan.lengths))
        if compared is not None:
            _check_same_tokens(model.name, evaluations, compared)
        else:
            check_gates(self.gates, [key for each in evaluations for key in each.score_keys()])
        cells = Cells(self.out, say=self.say)  # makes the folder, once nothing is refused any more
        samples = _run_cells(model, evaluations, cells, self.progress)
        notes = _notes(model, plan, evaluations)
        return _Measurement(
            model.name,
            model.identity,
            model.train_length,
            plan,
            evaluations,
            samples,
            notes,
            model.begin,
        )

    def finish(
        self, measured: Sequence[_Measurement], gates: list[str], options: LoadOptions
    ) -> EvalResult:
        """Check the gates, and write samples, figures and record."""
        model, baseline = measured[0], measured[1] if len(measured) > 1 else None
        evaluator = measured[-1]
        scores = model.scores(evaluator)
        baseline_scores = baseline.scores(evaluator) if baseline else ()
        notes = (*model.notes, *_missing_longppl(model, scores), *_begin_notes(measured))
        if baseline and baseline.identity["tokenizer"] != model.identity["tokenizer"]:
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
                "require": gates,
                "device": torch.device(options["device"] or "cpu").type,
                "begin_of_text": {each.name: each.begin.to_json() for each in measured},
                **model.plan.to_json(),
            }
            _write(result, {each.name: each.samples for each in measured}, settings)
        processes().wait_for_everyone()
        return result


def _default_baseline(model: str | Path, gates: Sequence[Gate]) -> str | None:
    """The base model of a patch, if a gate compares with a baseline."""
    if not any(gate.relative for gate in gates):
        return None
    if (patch := find_patch(model)) is None:
        raise FarspanError("a gate with x compares with a baseline; add --baseline MODEL")
    return base_source(Path(model), patch)


def _check_same_tokens(name: str, evaluations: Sequence[Eval], compared: _Measurement) -> None:
    """Refuse a baseline that cannot choose the key tokens of the model."""
    for own, other in zip(evaluations, compared.evaluations, strict=True):
        if isinstance(own, Perplexity) and isinstance(other, Perplexity) and own.contrast:
            hashes = [[text.sha256 for text in each.texts] for each in (own, other)]
            if hashes[0] != hashes[1]:
                raise FarspanError(
                    f"longppl scores the key tokens of {name}, whose tokenizer splits the text "
                    f"into other tokens than that of {compared.name}; choose a baseline with the "
                    "same tokenizer"
                )


def _begin_notes(measured: Sequence[_Measurement]) -> Iterator[str]:
    """How the texts of each model begin, and why."""
    if len({each.begin.notes for each in measured}) == 1:
        yield from measured[0].begin.notes
        return
    for each in measured:
        yield from (f"{each.name}: {note}" for note in each.begin.notes)


def _missing_longppl(model: _Measurement, scores: Sequence[Score]) -> tuple[str, ...]:
    """A note for each text without key tokens."""
    if model.plan.evaluator is None:
        return ()
    keys = {key: None for each in model.evaluations for key in each.score_keys()}
    for score in scores:
        keys.pop(score.key, None)
    tasks = dict.fromkeys(key.task for key in keys if key.metric == LONGPPL)
    return tuple(
        f"{task} has no key token of {model.plan.evaluator.name}, so there is no longppl of it; "
        "use longer text or a shorter shortest length"
        for task in tasks
    )


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
    if position is not None or other is None or (patch := find_patch(other)) is None:
        return position
    base = base_source(Path(other), patch)
    same = Path(resolve_bundled(source)).resolve() == Path(resolve_bundled(base)).resolve()
    return patch.position if same else None


def _load_eval_model(source: str | Path, options: LoadOptions, bos: str = "auto") -> EvalModel:
    model, tokenizer, begin = load_with_begin_of_text(source, bos, **options)
    model = upcast_small_model(model)
    _check_head(model, source)
    layers = probe_or_none(model)
    on_gpu = model.device.type == "cuda" and model._can_set_attn_implementation()
    if on_gpu and not seam.installed(model):
        with suppress(FarspanError):  # once for all passkeys; without the seam where unsupported
            seam.install(model)
    patch = find_patch(source)
    length = patch.train_length if patch else config_train_length(model.config)
    return EvalModel(
        str(source),
        model,
        tokenizer,
        length,
        patch.target if patch else length,
        max_positions(model.config, layers),
        passkeys_in_training(source),
        model_identity(model, tokenizer, patch),
        begin,
    )


@torch.no_grad()
def _check_head(model: PreTrainedModel, source: str | Path) -> None:
    """Prove that the logits computed for a few positions are the model's own."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(16, device=model.device)[None] % vocabulary
    expected = model(input_ids=ids, use_cache=False).logits[:, -4:].float()
    check_finite(
        model, expected, f"{source} on {ids.shape[1]} tokens, the first of its vocabulary,"
    )
    difference = float((last_logits(model, ids, 4).float() - expected).abs().max())
    if not difference <= 1e-2 * float(expected.abs().max()):
        raise FarspanError(
            f"farspan's logits of {type(model).__name__} differ from the model's by "
            f"{difference:.2g}, so this family cannot be evaluated; use another engine"
        )


def model_identity(model: PreTrainedModel, tokenizer: Any, patch: Patch | None) -> dict[str, str]:
    """Hashes of everything of a model that a result depends on.

    A patch identifies its base by weights rounded to bf16; here every bit counts.
    """
    config = json.loads(model.config.to_json_string(use_diff=False))
    for incidental in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        config.pop(incidental, None)
    identity = {
        "weights": _weights_digest(model),
        "config": cell_key(config),
        "dtype": str(model.dtype).partition(".")[2],
    }
    if patch is not None and patch.scales is not None:
        scales = patch.scales
        tables = [None if t is None else t.tolist() for t in (scales.base, scales.slope)]
        at = [list(scales.layers), scales.basis, scales.length]
        identity["scales"] = cell_key({"at": at, "tables": tables})
    identity["tokenizer"] = tokenizer_fingerprint(tokenizer)
    identity["begin and ends"] = f"{tokenizer.bos_token_id} {end_tokens(model, tokenizer)}"
    start, adds = begin_of_text(tokenizer), adds_begin_of_text(tokenizer)
    if start or adds:  # else the keys of cells are those of earlier versions
        identity["begin of text"] = str(start)
    return identity


def _weights_digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def passkeys_in_training(source: str | Path) -> str:
    """Did the model see passkey documents in training: "yes", "no" or "unknown"."""
    folder = Path(source)
    if (patch := find_patch(folder)) is not None:
        return passkeys_in_training(base_source(folder, patch))
    trained = trained_with_passkeys(Path(resolve_bundled(source)))
    return UNKNOWN if trained is None else "yes" if trained else "no"


def _notes(model: EvalModel, plan: EvalPlan, evaluations: Sequence[Eval]) -> tuple[str, ...]:
    """What was left out without a request."""
    if plan.lengths_requested:
        return ()
    if model.max_positions is not None:
        rows = model.max_positions
        return (f"its position table has {rows} rows; no longer input was measured",)
    notes = []
    wanted = max(2 * (model.train_length or 0), model.extended_length or 0)
    for evaluation in evaluations:
        if isinstance(evaluation, Perplexity):
            longest = min(text.longest for text in evaluation.texts)
            if longest < wanted:
                notes.append(
                    f"the longest document has {longest} tokens, so perplexity stops there; give "
                    "longer text for more"
                )
    return tuple(notes)


def _run_cells(
    model: EvalModel, evaluations: Sequence[Eval], cells: Cells, progress: Progress
) -> list[list[Sample]]:
    """The samples of each evaluation: first the cells that no process has claimed, length by
    length, then those that others compute."""
    shared = {"format": FORMAT, "model": dict(model.identity)}
    by_evaluation = [
        {cell_key({**shared, **asdict(cell)}): (each, cell) for cell in each.cells()}
        for each in evaluations
    ]
    every_cell = {key: item for items in by_evaluation for key, item in items.items()}
    advance, counted = progress(model.name, len(every_cell)), set()
    # Passkey prompts share a prefix; the cache lives for this run, in which the model is fixed.
    has_passkeys = any(isinstance(each, Passkey) for each in evaluations)
    prefix_cache = PrefixCache(model.model) if has_passkeys else None

    def on_done(key: str) -> None:
        if key not in counted:
            counted.add(key)
            cell = every_cell[key][1]
            advance(1, " ".join(dict.fromkeys((cell.eval, cell.task, f"@{cell.length}"))))

    def work(item: tuple[Eval, EvalCell]) -> dict[str, Any]:
        return {"samples": _run_cell(model, *item, prefix_cache)}

    def describe(item: tuple[Eval, EvalCell]) -> dict[str, Any]:
        return {**shared, "name": model.name, **asdict(item[1])}

    for group in _groups(every_cell):
        missing = [cell for key, (_, cell) in group.items() if cells.get(key) is None]
        with _maybe_compiled(model.model, missing):
            compute_unclaimed(cells, group, work, describe=describe, on_done=on_done)
    results = finish(cells, every_cell, work, describe=describe, on_done=on_done)
    return [
        [sample for key in items for sample in results[key]["samples"]] for items in by_evaluation
    ]


def _groups(
    cells: dict[str, tuple[Eval, EvalCell]],
) -> Iterator[dict[str, tuple[Eval, EvalCell]]]:
    """Consecutive cells of one evaluation, text and length."""

    def group_of(key: str) -> tuple[str, str, int]:
        cell = cells[key][1]
        return cell.eval, cell.task, cell.length

    for _, keys in groupby(cells, group_of):
        yield {key: cells[key] for key in keys}


def _maybe_compiled(
    model: PreTrainedModel, cells: Sequence[EvalCell]
) -> AbstractContextManager[None]:
    """Compiled layers, if enough perplexity windows share a shape."""
    perplexity = [cell for cell in cells if cell.eval == "perplexity"]
    tokens = sum(cell.length * cell.settings.get("count", 0) for cell in perplexity)
    pays = tokens * model.num_parameters() >= COMPILE_FROM
    return compiled_layers(model) if pays else nullcontext()


def _run_cell(
    model: EvalModel, evaluation: Eval, cell: EvalCell, prefix_cache: PrefixCache | None
) -> list[Sample]:
    try:
        if isinstance(evaluation, Passkey):
            return evaluation.run(cell, model.model, model.tokenizer, prefix_cache)
        return evaluation.run(cell, model.model, model.tokenizer)
    except (IndexError, RuntimeError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        why = "out of memory" if out_of_memory(error) else why
        raise FarspanError(
            f"{model.name} cannot run {cell.eval} on {cell.length} tokens ({why}); choose shorter "
            "lengths"
        ) from error


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
