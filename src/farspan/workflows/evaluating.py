"""`farspan eval`: a suite of evaluations on any model, cell by cell, by any number of processes; one table, one record.

The results folder holds every finished cell under a name that tells all it depends on: model, patch, tokenizer, task,
length, depth, seed. Whatever was measured before, by whichever process, is read and not measured again.
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
from farspan.attention.patch import Patch
from farspan.cells import Cells, check_folder, finish, key_of, sweep
from farspan.data.passkey import SCORED, Passkeys
from farspan.data.tokens import fingerprint as tokens_of
from farspan.diagnosis.curves import check_finite
from farspan.errors import FarspanError, first_line, nearest
from farspan.evals.decoding import end_tokens
from farspan.evals.gates import Verdict, check_gates, judge, parse_gate
from farspan.evals.passkey import UNKNOWN, Beginning, Passkey, grid_lengths
from farspan.evals.perplexity import MODES, Perplexity
from farspan.evals.scores import Cell, Eval, Sample, Score
from farspan.files import read_json, write_text
from farspan.lengths import doublings
from farspan.loading import base_source, check_source, in_exact_numbers, load_for_text, patch_in
from farspan.memory import out_of_memory
from farspan.model.fast import compiled_layers
from farspan.model.loss import ending_logits
from farspan.progress import Progress, silent
from farspan.record import write_record
from farspan.report import figures, style
from farspan.train.sharding import processes
from farspan.twins import located
from farspan.workflows.inspection import longest
from farspan.workflows.inspection import train_length as trained_on
from farspan.workflows.pretraining import NO_PASSKEYS, PASSKEYS
from farspan.workflows.suites import Scope, Subject, Suite, check_used, find_suite, named_texts

FORMAT = 1  # of cells; raised whenever what a cell of any evaluation computes changes
COMPILES = 1e16  # tokens × parameters of work, from which on compiling pays on a GPU


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What came of it."""

    model: str
    suite: str
    scores: tuple[Score, ...]
    folder: Path
    base: str | None = None
    base_scores: tuple[Score, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()
    train_length: int | None = None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model, "suite": self.suite, "scores": [asdict(s) for s in self.scores]}
        if self.base is not None:
            found["vs"] = {"model": self.base, "scores": [asdict(score) for score in self.base_scores]}
        return found | {"gates": [asdict(verdict) for verdict in self.verdicts], "notes": list(self.notes)}


def evaluate(
    source: str | Path,
    suite: str = "quick",
    out: str | Path = "eval",
    *,
    lengths: Sequence[int] = (),
    data: str | Path | Mapping[str, str | Path] | None = None,
    vs: str | Path | None = None,
    require: Sequence[str] = (),
    mode: str = MODES[0],
    stride: int | None = None,
    budget: int | None = None,
    windows: int | None = None,
    beams: int | None = None,
    items: int | None = None,
    seed: int = 0,
    position: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluated:
    """Measure a model by a suite of SUITES; what is in the results folder `out` already is not measured again.

    lengths: of everything that has a length; else what suits the model.
    data: one text, or several by name; which names, the suite tells.
    vs: a model to set beside it, measured on the same.
    require: gates, as "ppl@512<=1.05x"; whether they hold, `verdicts` tells.
    mode, stride, budget, windows: of perplexity (evals/perplexity.py). beams: of LongBench.
    items: of each task of needle, LongBench and commonsense, so many.
    position: how to read a llama checkpoint, the model's and the base's alike.

    >>> farspan.evaluate("nope-twin", "quick", "results").scores[0].value
    """
    chosen, gates, out, state = find_suite(suite), [parse_gate(text) for text in require], Path(out), processes()
    if mode not in MODES:
        raise FarspanError(f"perplexity mode {mode!r} is unknown; {nearest(mode, MODES)}")
    scope = Scope(
        lengths=tuple(sorted(set(lengths))),
        data=named_texts(suite, chosen, data),
        mode=mode,
        stride=stride,
        budget=budget,
        windows=windows,
        beams=beams,
        items=items,
        seed=seed,
    )
    check_used(suite, scope)
    if vs is None and any(gate.relative for gate in gates):
        if (patch := patch_in(source)) is None:
            raise FarspanError("a gate with x compares with another model; name it with --vs BASE")
        vs = base_source(Path(source), patch)
    check_folder(out, "eval")
    _check_suite(out, suite)
    place = device or state.device

    def options(name: str | Path, other: str | Path | None) -> dict[str, Any]:
        return {"position": position or _told_position(name, other), "trust_remote_code": trust_remote_code}

    if vs is not None:
        check_source(vs, **options(vs, source))  # before the other one is measured
    first = _subject(source, device=place, **options(source, vs))
    scope = _resolved(first, chosen, scope)
    evaluations = [build(first, scope) for build in chosen.builds]
    # Perplexity's text may not reach as far as the model does, and what it leaves away the base leaves away too.
    scope = replace(scope, lengths=next((e.lengths for e in evaluations if isinstance(e, Perplexity)), scope.lengths))
    check_gates(gates, [place for evaluation in evaluations for place in evaluation.places()])
    cells = Cells(out, say=say)
    samples = {first.name: _measured(first, evaluations, cells, progress)}
    identities = {first.name: first.identity}
    found = Evaluated(
        first.name,
        suite,
        _scored(evaluations, samples[first.name]),
        out,
        notes=_notes(first, scope, evaluations),
        train_length=first.train_length,
    )
    if vs is not None:
        tokens = first.identity["tokenizer"]
        del first, evaluations  # a GPU need not hold two models
        second = _subject(vs, device=place, **options(vs, source))
        _check_limit(second, (*scope.lengths, *scope.grid))
        others = [build(second, replace(scope, asked=True)) for build in chosen.builds]
        samples[second.name] = _measured(second, others, cells, progress)
        identities[second.name] = second.identity
        notes = found.notes
        if second.identity["tokenizer"] != tokens:
            notes += ("the two have different tokenizers, so their perplexities count different things",)
        base_scores = _scored(others, samples[second.name])
        found = replace(found, base=second.name, base_scores=base_scores, notes=notes)
    found = replace(found, verdicts=tuple(judge(gate, found.scores, found.base_scores) for gate in gates))
    if state.is_main_process:
        how = {"identities": identities, "require": list(require), "device": torch.device(place).type}
        _write(found, samples, how | _settings(scope))
    state.wait_for_everyone()
    return found


def _check_suite(out: Path, suite: str) -> None:
    """Refuse a folder whose record and figures are another suite's, for they would be lost or left without a record."""
    other = suite
    with suppress(FarspanError):  # there is none, or a broken one, which is written anew
        other = read_json(out / "record.json").get("suite", suite)
    if other != suite:
        raise FarspanError(f"{out} holds the results of suite {other}; choose another name for those of {suite}")


def _subject(source: str | Path, **options: Any) -> Subject:
    model, tokenizer = load_for_text(source, **options)
    model = in_exact_numbers(model)
    _check_head(model, source)
    if model.device.type == "cuda" and model._can_set_attn_implementation() and not seam.installed(model):
        with suppress(FarspanError):  # once for all passkeys; what the seam refuses is measured as it is
            seam.install(model)
    patch = patch_in(source)
    length = patch.train_length if patch else trained_on(model.config)
    return Subject(
        str(source),
        model,
        tokenizer,
        length,
        patch.target if patch else length,
        longest(model),
        saw_passkeys(source),
        identity(model, tokenizer, patch),
    )


@torch.no_grad()
def _check_head(model: PreTrainedModel, source: str | Path) -> None:
    """Logits are made of a few positions alone; prove on some tokens that they are the model's own."""
    ids = torch.arange(16, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    own = model(input_ids=ids, use_cache=False).logits[:, -4:].float()
    check_finite(model, own, f"{source} on {ids.shape[1]} tokens, the first of its vocabulary,")
    difference = float((ending_logits(model, ids, 4).float() - own).abs().max())
    if not difference <= 1e-2 * float(own.abs().max()):
        raise FarspanError(
            f"the logits that farspan takes from {type(model).__name__} differ from its own by {difference:.2g}; "
            "this family cannot be evaluated"
        )


def identity(model: PreTrainedModel, tokenizer: Any, patch: Patch | None) -> dict[str, str]:
    """All of a model that a result depends on, hashed: weights, config, precision, scales, tokenizer, and which tokens
    begin and end a text. A patch knows its base by weights rounded to bf16; here every bit counts."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    for passing in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        config.pop(passing, None)
    found = {"weights": _digest(model), "config": key_of(config), "dtype": str(model.dtype).partition(".")[2]}
    if patch is not None and patch.scales is not None:
        scales = patch.scales
        tables = [None if table is None else table.tolist() for table in (scales.base, scales.slope)]
        found["scales"] = key_of({"at": [list(scales.layers), scales.basis, scales.length], "tables": tables})
    ends = f"{tokenizer.bos_token_id} {end_tokens(model, tokenizer)}"
    return {**found, "tokenizer": tokens_of(tokenizer), "begin and ends": ends}


def _digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _told_position(source: str | Path, other: str | Path | None) -> str | None:
    """How a model is to be read that stands beside a patch of its own: as the patch tells, whatever its config says."""
    if other is None or (patch := patch_in(other)) is None:
        return None
    places = [Path(located(each)).resolve() for each in (source, base_source(Path(other), patch))]
    return patch.position if places[0] == places[1] else None


def saw_passkeys(source: str | Path) -> str:
    """Did a model see passkey documents in training, by its card: "yes", "no", or "unknown" where nothing tells."""
    folder = Path(source)
    if (patch := patch_in(folder)) is not None:
        return saw_passkeys(base_source(folder, patch))
    card = Path(located(source)) / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if NO_PASSKEYS in text:
        return "no"
    return "yes" if PASSKEYS.partition(":")[0] in text else UNKNOWN


def _resolved(subject: Subject, suite: Suite, scope: Scope) -> Scope:
    """The scope with all lengths told: those asked for, or what suits the model."""
    asked = bool(scope.lengths)
    if not asked and subject.train_length is None:
        raise FarspanError(f"the config of {subject.name} does not tell its training length; give --lengths")
    lengths = grid = contexts = scope.lengths
    if not asked:
        length, reach = subject.train_length or 0, subject.reach or 0
        lengths = _within(subject, tuple(doublings(length, max(2 * length, reach))))
        furthest = min(2 * reach, subject.limit or 2 * reach)
        shortest = Passkeys(subject.tokenizer).shortest_of(SCORED)
        grid = _within(subject, grid_lengths(furthest, shortest, suite.grid))
        contexts = (reach,)
    _check_limit(subject, (*lengths, *grid))
    return replace(scope, lengths=lengths, grid=grid, contexts=contexts, asked=asked)


def _check_limit(subject: Subject, lengths: Sequence[int]) -> None:
    if subject.limit is not None and max(lengths) > subject.limit:
        raise FarspanError(
            f"a length of {max(lengths)} is beyond the position table of {subject.name}, which ends at "
            f"{subject.limit}; ask for lengths up to {subject.limit}"
        )


def _within(subject: Subject, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in lengths if subject.limit is None or length <= subject.limit)


def _notes(subject: Subject, scope: Scope, evaluations: Sequence[Eval]) -> tuple[str, ...]:
    """What was left away although nobody asked for that."""
    notes = []
    if subject.limit is not None and not scope.asked:
        notes.append(f"its position table ends at {subject.limit} tokens, and nothing longer was measured")
    for evaluation in evaluations:
        if isinstance(evaluation, Perplexity) and not scope.asked:
            room = min(text.longest for text in evaluation.texts)
            if room < max(2 * (subject.train_length or 0), subject.reach or 0) and subject.limit is None:
                notes.append(
                    f"the text has {room} tokens in one document, and perplexity stops there; give longer text"
                )
    return tuple(notes)


def _measured(subject: Subject, evaluations: Sequence[Eval], cells: Cells, progress: Progress) -> list[list[Sample]]:
    """The samples of each evaluation. First what nobody is at, length by length; then what others have claimed."""
    known = {"format": FORMAT, "model": dict(subject.identity)}
    todo = [{key_of({**known, **asdict(cell)}): (each, cell) for cell in each.cells()} for each in evaluations]
    everything = {key: item for some in todo for key, item in some.items()}
    advance, seen = progress(subject.name, len(everything)), set()
    # What passkeys share is kept for this run alone, through which the model stays as it is.
    begun = Beginning(subject.model) if any(isinstance(each, Passkey) for each in evaluations) else None

    def done(key: str) -> None:
        if key not in seen:
            seen.add(key)
            cell = everything[key][1]
            advance(1, " ".join(dict.fromkeys((cell.eval, cell.task, f"@{cell.length}"))))

    def work(item: tuple[Eval, Cell]) -> dict[str, Any]:
        return {"samples": _run(subject, *item, begun)}

    def describe(item: tuple[Eval, Cell]) -> dict[str, Any]:
        return {**known, "name": subject.name, **asdict(item[1])}

    for group in _groups(everything):
        missing = {key: item for key, item in group.items() if cells.get(key) is None}
        with _quickly(subject.model, [cell for _, cell in missing.values()]):
            sweep(cells, group, work, describe=describe, done=done)
    found = finish(cells, everything, work, describe=describe, done=done)
    return [[sample for key in some for sample in found[key]["samples"]] for some in todo]


def _groups(todo: dict[str, tuple[Eval, Cell]]) -> Iterator[dict[str, tuple[Eval, Cell]]]:
    """Cells of one evaluation, text and length, one after the other."""
    for _, group in groupby(todo, lambda key: (todo[key][1].eval, todo[key][1].task, todo[key][1].length)):
        yield {key: todo[key] for key in group}


def _quickly(model: PreTrainedModel, cells: Sequence[Cell]) -> AbstractContextManager[None]:
    """Compiled layers where many windows have one shape."""
    tokens = sum(cell.length * cell.settings.get("count", 0) for cell in cells if cell.eval == "perplexity")
    return compiled_layers(model) if tokens * model.num_parameters() >= COMPILES else nullcontext()


def _run(subject: Subject, evaluation: Eval, cell: Cell, begun: Beginning | None) -> list[Sample]:
    try:
        if isinstance(evaluation, Passkey):
            return evaluation.run(cell, subject.model, subject.tokenizer, begun)
        return evaluation.run(cell, subject.model, subject.tokenizer)
    except (IndexError, RuntimeError) as error:
        why = "memory is short" if out_of_memory(error) else f"{type(error).__name__}: {first_line(error)}"
        raise FarspanError(
            f"{subject.name} cannot run {cell.eval} on {cell.length} tokens ({why}); ask for shorter lengths"
        ) from error


def _scored(evaluations: Sequence[Eval], samples: Sequence[list[Sample]]) -> tuple[Score, ...]:
    pairs = zip(evaluations, samples, strict=True)
    return tuple(score for evaluation, some in pairs for score in evaluation.score(some))


def _settings(scope: Scope) -> dict[str, Any]:
    told = {key: value for key, value in asdict(scope).items() if key != "asked"}
    return told | {"data": {name: str(path) for name, path in scope.data.items()}}


def _write(found: Evaluated, samples: Mapping[str, list[list[Sample]]], settings: Mapping[str, Any]) -> None:
    """Samples as JSON Lines, figures, and the record; each replaces what an earlier command left under its name."""
    lines: dict[str, list[str]] = {}
    for model, groups in samples.items():
        for sample in (sample for group in groups for sample in group):
            line = json.dumps({"model": model, **sample}, ensure_ascii=False)
            lines.setdefault(sample["eval"], []).append(line)
    for name, some in lines.items():
        write_text(found.folder / "samples" / f"{name}.jsonl", "\n".join(some) + "\n")
    for name, figure in figures.evaluation_figures(found).items():
        style.save(figure, found.folder / name)
    write_record(found.folder / "record.json", "eval", {"suite": found.suite, **settings}, found.to_json())
