"""`farspan lab distance` and `lab theorems`: compare attention, prove theorems, read positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from farspan.begin_of_text import BeginOfText, check_choice, load_with_begin_of_text
from farspan.data.documents import check_text, read_documents
from farspan.data.windows import cut_windows
from farspan.diagnosis.curves import check_losses
from farspan.errors import FarspanError, at_least_one
from farspan.files import check_absent, new_folder
from farspan.lab.distance import (
    MINIMA,
    RULES,
    AttentionComparison,
    ablation,
    attended_distance,
    distances,
    mass_by_distance,
)
from farspan.lab.examples import draw_examples
from farspan.lab.task_data import encode_examples
from farspan.lab.tasks import LabTask
from farspan.lab.theorems import (
    PositionAnalysis,
    PositionReadout,
    linear,
    look_back,
    prove,
    read_positions,
)
from farspan.lab.tokenizer import WordTokenizer
from farspan.loading import check_source, load, resolve_device
from farspan.model.loss import token_losses
from farspan.progress import Progress, Say, automatic, ignore, shows_progress
from farspan.record import write_record
from farspan.report import lab_figures, style
from farspan.workflows.diagnose import model_names
from farspan.workflows.lab import resolve_task


@shows_progress
def compare_attention(
    models: Sequence[str],
    data: str | None = None,
    out: str | Path | None = None,
    *,
    task: str | None = None,
    lengths: str = "",
    scratchpad: str | None = None,
    length: int | None = None,
    windows: int = 4,
    rule: str = "jsd",
    minimum: str = "sample",
    to: str | None = None,
    bos: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
    say: Say = ignore,
) -> AttentionComparison:
    """Compare the attention of models on text, or on examples of a lab task.

    Measures the attention distance between every two models, the attention mass by distance, how
    far back the most attended token is, and how much the loss rises without each head.

    data: default: python-docs.
    length: of a window of text, in tokens; default: 512.
    task: for models of the lab: read examples of this task, of these `lengths` and with this
        `scratchpad`, instead of text; RECIPE.toml:TASK for a task of a recipe's own.
    minimum: the nearest heads: "sample", of each window or example, or "mean", of all together.
    to: only the distances to this model, which need not be in `models`.
    bos: whether windows begin with a begin-of-text token: yes, no, or auto, by the models'
        metadata, and where they are silent by their loss.
    """
    check_choice(bos)
    models = at_least_one(models, "a model")
    _check_options(rule, minimum, task, lengths, scratchpad, data, length)
    if to is not None and to not in models:
        models = [*models, to]
    reference = None if to is None else list(models).index(to)
    if out is not None:
        check_absent(Path(out))
    device, data, length = resolve_device(device), data or "python-docs", length or 512
    source: dict[str, Any]
    if task is not None:
        source = {"task": task, "lengths": lengths, "scratchpad": scratchpad or "none"}
        lab_task, words, _ = resolve_task(task, trust_remote_code)
        batches, starts = _example_batches(lab_task, words, lengths, windows, scratchpad)
        loaded = _load_lab_models(models, device, words, trust_remote_code)
    else:
        check_text(data)
        for model in models:
            check_source(model, trust_remote_code=trust_remote_code)
        loaded, tokenizer, begin = _load_with_shared_tokenizer(
            models, bos, device, trust_remote_code
        )
        source = {"data": data, "length": length, "begin_of_text": begin.to_json()}
        for note in begin.notes:
            say(note)
        cut = cut_windows(read_documents(data), tokenizer, length, windows, begin=begin.ids)
        batches, starts = list(cut.ids.split(1)), None
    advance = progress("compare", 3 * len(models) + 1)
    names = model_names(models)
    comparison = _compare_models(loaded, names, batches, starts, rule, minimum, reference, advance)
    if out is not None:
        settings = {
            "models": list(models),
            **source,
            "windows": windows,
            "rule": rule,
            "minimum": minimum,
            "to": to,
            "device": device,
        }
        _write_comparison(comparison, Path(out), settings)
    return comparison


def _check_options(
    rule: str,
    minimum: str,
    task: str | None,
    lengths: str,
    scratchpad: str | None,
    data: str | None,
    length: int | None,
) -> None:
    if rule not in RULES:
        raise FarspanError(f"rule {rule!r} is unknown; choose {' or '.join(RULES)}")
    if minimum not in MINIMA:
        raise FarspanError(f"minimum {minimum!r} is unknown; choose {' or '.join(MINIMA)}")
    if task is None and lengths:
        raise FarspanError(
            f"--lengths {lengths} applies to examples of a task; add --task, or use --length"
        )
    if task is None and scratchpad is not None:
        raise FarspanError(
            f"--scratchpad {scratchpad} applies to examples of a task; add --task, or remove it"
        )
    for option, value in (("--data", data), ("--length", length)):
        if task is not None and value is not None:
            raise FarspanError(
                f"{option} {value} applies to text, but --task {task} reads examples; "
                f"remove {option} or --task"
            )


def _example_batches(
    task: LabTask, tokenizer: WordTokenizer, lengths: str, count: int, scratchpad: str | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Examples of a task, in batches of rows of equal length, and where their answers begin.

    An answer begins after the last step of its scratchpad."""
    length_range, _ = task.ranges(lengths)
    rows, rows_without_steps = (
        encode_examples(draw_examples(task, length_range, count, 0, scratchpad=parts), tokenizer)
        for parts in (scratchpad, None)  # the same examples
    )
    starts = rows.stop - (rows_without_steps.stop - rows_without_steps.start)
    stops = rows.stop.unique().tolist()
    batches = [rows.ids[rows.stop == stop, :stop].long() for stop in stops]
    return batches, [starts[rows.stop == stop] for stop in stops]


def _load_lab_models(
    models: Sequence[str], device: str, tokenizer: WordTokenizer, trust_remote_code: bool
) -> list[PreTrainedModel]:
    loaded = [
        load(model, device=device, trust_remote_code=trust_remote_code).model for model in models
    ]
    words = len(tokenizer)
    for name, model in zip(models, loaded, strict=True):
        if model.config.vocab_size != words:
            raise FarspanError(
                f"{name} has a vocabulary of {model.config.vocab_size} tokens, but the tasks have "
                f"{words} words; remove --task, or choose lab models of this version"
            )
    return loaded


def _load_with_shared_tokenizer(
    models: Sequence[str], bos: str, device: str, trust_remote_code: bool
) -> tuple[list[PreTrainedModel], Any, BeginOfText]:
    """The models and their tokenizer, which must be the same: they read the same tokens."""
    all_loaded = [
        load_with_begin_of_text(model, bos, device=device, trust_remote_code=trust_remote_code)
        for model in models
    ]
    _, tokenizer, begin = all_loaded[0]
    for name, (_, other, other_begin) in zip(models, all_loaded, strict=True):
        if other.get_vocab() != tokenizer.get_vocab():
            raise FarspanError(
                f"{name} and {models[0]} have different vocabularies, so they cannot read the same "
                "tokens; choose models with the same tokenizer"
            )
        if other_begin.ids != begin.ids:
            raise FarspanError(
                f"only one of {name} and {models[0]} expects a begin-of-text token, so they cannot "
                "read the same tokens; choose --bos yes or --bos no for both"
            )
    return [loaded.model for loaded in all_loaded], tokenizer, begin


def _compare_models(
    models: Sequence[PreTrainedModel],
    names: list[str],
    batches: Sequence[Tensor],
    starts: Sequence[Tensor] | None,
    rule: str,
    minimum: str,
    reference: int | None,
    advance: Callable[[], None],
) -> AttentionComparison:
    for model, name in zip(models, names, strict=True):
        _check_finite(model, batches, name)
    pairs = {}
    if len(models) > 1:
        pairs = distances(models, batches, rule=rule, minimum=minimum, reference=reference)
    advance()
    mass, attended, ablations = [], [], []
    for model in models:
        mass.append(mass_by_distance(model, batches))
        advance()
        attended.append(attended_distance(model, batches, starts))
        advance()
        ablations.append(ablation(model, batches))
        advance()
    tokens = sum(ids.numel() for ids in batches)
    return AttentionComparison(names, tokens, pairs, mass, attended, ablations)


def _check_finite(model: PreTrainedModel, batches: Sequence[Tensor], name: str) -> None:
    """Raise an error if a loss is not finite: all measurements would be NaN."""
    for ids in batches:
        for losses in token_losses(model, ids.to(model.device)):
            check_losses(model, losses, name)


def _write_comparison(comparison: AttentionComparison, out: Path, settings: dict[str, Any]) -> None:
    names = comparison.models
    pairs = [
        {
            "models": [names[one], names[other]],
            "nearest": distance.nearest.round(5).tolist(),
            "matched": distance.matched.round(5).tolist(),
            "pairs": distance.pairs.round(5).tolist(),
        }
        for (one, other), distance in comparison.pairs.items()
    ]
    heads = [
        {
            "model": name,
            "mass_by_distance": mass.round(6).tolist(),
            "attended_distance": attended.round(6).tolist(),
            "loss_without_head": increases.round(6).tolist(),
        }
        for name, mass, attended, increases in zip(
            names, comparison.mass, comparison.attended, comparison.ablations, strict=True
        )
    ]
    results = {"tokens": comparison.tokens, "distances": pairs, "heads": heads}
    with new_folder(out) as staging:
        if comparison.pairs:
            style.save(lab_figures.attention_distance(comparison), staging / "distance")
        style.save(lab_figures.attention_heads(comparison), staging / "heads")
        style.save(lab_figures.attended_distance(comparison), staging / "attended")
        write_record(staging / "record.json", "lab distance", settings, results)


def theorems(
    models: Sequence[str] = (),
    data: str = "python-docs",
    out: str | Path | None = None,
    *,
    length: int = 512,
    windows: int = 8,
    bos: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    say: Say = ignore,
) -> PositionAnalysis:
    """Prove Kazemnejad 2023's theorems by constructed weights, and read positions from models.

    The constructions are checked on texts of `length` tokens. The positions of tokens are read from
    the hidden states of each model by regression.

    bos: whether windows begin with a begin-of-text token: yes, no, or auto, by each model's
        metadata, and where they are silent by its loss.
    """
    check_choice(bos)
    if out is not None:
        check_absent(Path(out))
    device = resolve_device(device)
    for model in models:
        check_source(model, trust_remote_code=trust_remote_code)
    check_text(data)
    proofs = [prove(linear(length, 0.5)), prove(look_back(length, 3, 1.0))]

    def read(model: str, name: str) -> list[PositionReadout]:  # one model in memory at a time
        loaded, tokenizer, begin = load_with_begin_of_text(
            model, bos, device=device, trust_remote_code=trust_remote_code
        )
        for note in begin.notes:
            say(f"{name}: {note}")
        ids = cut_windows(read_documents(data), tokenizer, length, windows, begin=begin.ids).ids
        _check_finite(loaded, ids.split(1), name)
        return read_positions(loaded, ids)

    names = model_names(models)
    readings = {name: read(model, name) for model, name in zip(models, names, strict=True)}
    analysis = PositionAnalysis(proofs, readings)
    if out is not None:
        settings = {
            "length": length,
            "models": list(models),
            "data": data,
            "windows": windows,
            "bos": bos,
            "device": device,
        }
        _write_analysis(analysis, Path(out), settings)
    return analysis


def _write_analysis(analysis: PositionAnalysis, out: Path, settings: dict[str, Any]) -> None:
    errors = {
        proof.rule: {"position_error": proof.position_error, "score_error": proof.score_error}
        for proof in analysis.proofs
    }
    readings = {
        name: [asdict(readout) for readout in readouts]
        for name, readouts in analysis.readings.items()
    }
    with new_folder(out) as staging:
        style.save(lab_figures.theorem_figure(analysis.proofs), staging / "theorems")
        results = {"theorems": errors, "readings": readings}
        write_record(staging / "record.json", "lab theorems", settings, results)
