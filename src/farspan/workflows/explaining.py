"""`farspan lab distance` and `lab theorems`: how alike the attention of several models is, what their heads do, and
why a model without positions knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from farspan.data.documents import read_documents
from farspan.data.windows import cut_windows
from farspan.diagnosis.curves import check_losses
from farspan.errors import FarspanError
from farspan.files import check_free, new_folder
from farspan.lab.distance import RULES, Distance, ablation, distances, mass_by_distance
from farspan.lab.study import as_rows, parse_range
from farspan.lab.tasks import draw, find_task
from farspan.lab.theorems import Proof, Reading, linear, look_back, prove, read_positions
from farspan.lab.words import Words
from farspan.loading import check_source, chosen_device, load, load_for_text
from farspan.model.loss import token_losses
from farspan.progress import Progress, silent
from farspan.record import write_record
from farspan.report import laboratory, style
from farspan.workflows.diagnosing import model_names


@dataclass(frozen=True, eq=False)
class Compared:
    """Several models that read the same tokens."""

    models: list[str]
    tokens: int
    pairs: dict[tuple[int, int], Distance]
    mass: list[np.ndarray]  # of each model, [layers, heads, distances]
    ablations: list[np.ndarray]  # of each model, [layers, heads] nats a token


def compare(
    sources: Sequence[str],
    data: str | None = None,
    out: Path | None = None,
    *,
    task: str | None = None,
    lengths: str = "",
    length: int | None = None,
    windows: int = 4,
    rule: str = "jsd",
    device: str | None = None,
    progress: Progress = silent,
) -> Compared:
    """Attention distance between every two models, attention mass by distance, and what each head is worth: on text, or
    on examples of a task (of these `lengths`) for models of the laboratory.

    data: python-docs. length: of a window of text, in tokens; 512.
    """
    if rule not in RULES:
        raise FarspanError(f"rule {rule!r} is unknown; choose {' or '.join(RULES)}")
    if task is None and lengths:
        raise FarspanError(f"--lengths {lengths} is of examples of a task; give --task too, or --length for text")
    for option, value in (("--data", data), ("--length", length)) if task is not None else ():
        if value is not None:
            raise FarspanError(f"{option} {value} is of text, and --task {task} reads none; give one of the two")
    if out is not None:
        check_free(out)
    device, data, length = chosen_device(device), data or "python-docs", length or 512
    if task is not None:
        batches = _examples(task, lengths, windows)
        models = [load(source, device=device).model for source in sources]
        _check_words(models, sources)
    else:
        loaded = [load_for_text(source, device=device) for source in sources]
        models = [model for model, _ in loaded]
        tokenizer = _one_of([tokenizer for _, tokenizer in loaded], sources)
        batches = list(cut_windows(read_documents(data), tokenizer, length, windows).ids.split(1))
    names = model_names(sources)
    for model, name in zip(models, names, strict=True):
        _check_finite(model, batches, name)
    advance = progress("compare", 2 * len(models) + 1)
    pairs = distances(models, batches, rule=rule) if len(models) > 1 else {}
    advance()
    mass, ablations = [], []
    for model in models:
        mass.append(mass_by_distance(model, batches))
        advance()
        ablations.append(ablation(model, batches))
        advance()
    tokens = sum(ids.numel() for ids in batches)
    found = Compared(names, tokens, pairs, mass, ablations)
    if out is not None:
        read = {"task": task, "lengths": lengths} if task else {"data": data, "length": length}
        settings = {"models": list(sources), **read, "windows": windows, "rule": rule, "device": device}
        _write_comparison(found, out, settings)
    return found


def _one_of(tokenizers: Sequence[Any], sources: Sequence[str]) -> Any:
    """The tokenizer that all the models share: what is compared is attention on the same tokens."""
    for each, source in zip(tokenizers, sources, strict=True):
        if each.get_vocab() != tokenizers[0].get_vocab():
            raise FarspanError(
                f"{source} and {sources[0]} have different vocabularies, so no text is the same tokens to both; "
                "compare models of one tokenizer"
            )
    return tokenizers[0]


def _check_finite(model: PreTrainedModel, batches: Sequence[Tensor], name: str) -> None:
    """One more pass, which says what is wrong where all that follows would be NaN."""
    for ids in batches:
        for losses in token_losses(model, ids.to(model.device)):
            check_losses(model, losses, name)


def _check_words(models: Sequence[Any], sources: Sequence[str]) -> None:
    for model, source in zip(models, sources, strict=True):
        if model.config.vocab_size != len(Words()):
            raise FarspanError(
                f"{source} has {model.config.vocab_size} tokens and the tasks have {len(Words())} words, so it cannot "
                "read them; leave --task out, or give models of the laboratory"
            )


def _examples(task: str, lengths: str, count: int) -> list[Tensor]:
    """Rows of a task in batches of equal length."""
    own = find_task(task)
    rows = as_rows(draw(own, parse_range(lengths) if lengths else own.train, count, 0), Words())
    return [rows.ids[rows.stop == stop, :stop].long() for stop in rows.stop.unique().tolist()]


def _write_comparison(found: Compared, out: Path, settings: dict[str, Any]) -> None:
    with new_folder(out) as staging:
        if found.pairs:
            style.save(laboratory.attention_distance(found), staging / "distance")
        style.save(laboratory.what_heads_do(found), staging / "heads")
        pairs = [
            {
                "models": [found.models[one], found.models[other]],
                "nearest": distance.nearest.round(5).tolist(),
                "matched": distance.matched.round(5).tolist(),
                "pairs": distance.pairs.round(5).tolist(),
            }
            for (one, other), distance in found.pairs.items()
        ]
        heads = [
            {"model": name, "mass_by_distance": mass.round(6).tolist(), "loss_without_head": worth.round(6).tolist()}
            for name, mass, worth in zip(found.models, found.mass, found.ablations, strict=True)
        ]
        results = {"tokens": found.tokens, "distances": pairs, "heads": heads}
        write_record(staging / "record.json", "lab distance", settings, results)


# Why a model without positions knows them.


@dataclass(frozen=True, eq=False)
class Positions:
    """Paper B's theorems, proven on weights that were written down, and what trained models know of positions."""

    proofs: list[Proof]
    readings: dict[str, list[Reading]]  # of each model, after each layer


def theorems(
    sources: Sequence[str] = (),
    data: str = "python-docs",
    out: Path | None = None,
    *,
    length: int = 512,
    windows: int = 8,
    device: str | None = None,
) -> Positions:
    """Write down the weights of both theorems for texts of so many tokens and check them; then read the positions of
    tokens from the hidden states of models."""
    if out is not None:
        check_free(out)
    device = chosen_device(device)
    for source in sources:
        check_source(source)
    proofs = [prove(linear(length, 0.5)), prove(look_back(length, 3, 1.0))]

    def read(source: str, name: str) -> list[Reading]:  # of which one model is held at a time
        model, tokenizer = load_for_text(source, device=device)
        ids = cut_windows(read_documents(data), tokenizer, length, windows).ids
        _check_finite(model, ids.split(1), name)
        return read_positions(model, ids)

    readings = {name: read(source, name) for source, name in zip(sources, model_names(sources), strict=True)}
    if out is not None:
        with new_folder(out) as staging:
            style.save(laboratory.draw_theorem(proofs), staging / "theorems")
            errors = {
                proof.rule: {"position_error": proof.position_error, "score_error": proof.score_error}
                for proof in proofs
            }
            told = {name: [asdict(each) for each in found] for name, found in readings.items()}
            settings = {"length": length, "models": list(sources), "data": data, "windows": windows, "device": device}
            write_record(staging / "record.json", "lab theorems", settings, {"theorems": errors, "readings": told})
    return Positions(proofs, readings)
