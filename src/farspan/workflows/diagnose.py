"""`farspan diagnose`: loss and attention entropy by position, and a verdict in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.model_facts import config_train_length, most_heads, probe_or_none
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.batching import failure_reason
from farspan.begin_of_text import BeginOfText, check_choice, load_with_begin_of_text
from farspan.data.documents import check_text, read_documents
from farspan.data.windows import Windows, cut_windows
from farspan.device_map import DeviceMap, check_device_map
from farspan.diagnosis.curves import check_losses, measure_curves
from farspan.diagnosis.knees import KneeRule
from farspan.diagnosis.result import Diagnoses, Diagnosis
from farspan.diagnosis.verdict import assess
from farspan.errors import FarspanError, at_least_one
from farspan.files import check_absent, new_folder
from farspan.lengths import parse_lengths
from farspan.loading import (
    LoadOptions,
    check_source,
    find_patch,
    find_train_length,
    resolve_device,
)
from farspan.model.loss import token_losses
from farspan.model_objects import ModelLike, accepts_model_objects
from farspan.progress import (
    SAID_FROM,
    Progress,
    Say,
    Stage,
    automatic,
    format_duration,
    ignore,
    shows_progress,
    with_total,
)
from farspan.record import write_record
from farspan.report import figures, style
from farspan.workflows.timing import ForwardSpeed, fastest_run, measured_part

MIN_BINS, BINS_INSIDE = 256, 64  # position bins: in total, and inside the train length


@accepts_model_objects
@shows_progress
def diagnose(
    models: ModelLike | Sequence[ModelLike],
    data: str | Path = "python-docs",
    lengths: Sequence[int] | str = (),
    *,
    scales: Sequence[float] = (),
    windows: int = 8,
    train_length: int | None = None,
    position: str | None = None,
    bos: str = "auto",
    out: str | Path | None = None,
    device: str | None = None,
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
    rule: KneeRule | None = None,
    progress: Progress = automatic,
    say: Say = ignore,
) -> Diagnoses:
    """One diagnosis per model or, with `scales`, per model and uniform scale.

    models: one model or several: names, paths, model objects, or what `load` returns.
    lengths: as [512, 1024] or "256:4096" (doublings). Each window is read once at the largest
        length; default: twice the longest train length.
    With `out`, a record and figures are written to that folder.
    bos: yes, no or auto: whether windows begin with a begin-of-text token.
    device_map: as in transformers, for models that one device does not hold.

    >>> diagnoses = farspan.diagnose("nope-twin", lengths="256:1024", windows=1)
    >>> diagnoses[0].train_length
    512
    """
    sources = at_least_one(models, "a model")
    rule = rule or KneeRule()
    lengths = parse_lengths(lengths) or default_lengths(sources, train_length, trust_remote_code)
    _check_lengths(lengths)
    check_choice(bos)
    if out is not None:
        check_absent(Path(out))
    check_device_map(device_map, device)
    check_text(data)
    device = None if device_map else resolve_device(device)
    for source in sources:
        _check_scalable(source, scales)
        check_source(source, position=position, trust_remote_code=trust_remote_code)
    diagnoses: list[Diagnosis] = []
    text_read: dict[str, Any] = {}
    for source, name in zip(sources, model_names(sources), strict=True):
        loading = progress(f"load and read {name}", 2)
        options: LoadOptions = {
            "position": position,
            "device": device,
            "device_map": device_map,
            "trust_remote_code": trust_remote_code,
            "progress": progress,
        }
        subject = _Subject(source, name, *load_with_begin_of_text(source, bos, **options))
        loading()
        for note in subject.begin.notes:
            say(f"{name}: {note}" if len(sources) > 1 else note)
        documents, begin = read_documents(data), subject.begin.ids
        cut = cut_windows(documents, subject.tokenizer, max(lengths), windows, begin=begin)
        loading()
        text_read[str(source)] = cut.describe() | {"begin_of_text": subject.begin.to_json()}
        diagnoses += _diagnose_model(subject, cut, scales, train_length, rule, progress, say)
        del subject  # hold one model at a time
    if out is not None:
        settings = {
            "data": str(data),
            "lengths": list(lengths),
            "scales": list(scales),
            "windows": windows,
            "train_length": train_length,
            "position": position,
            "device": device or resolve_device(None),
            "rule": asdict(rule),
        }
        _write(Path(out), diagnoses, text_read, settings)
    return Diagnoses(diagnoses)


def _check_lengths(lengths: Sequence[int]) -> None:
    if min(lengths) < 2:
        raise FarspanError(f"a length of {min(lengths)} leaves nothing to predict; use 2 or more")


def default_lengths(
    sources: Sequence[str | Path],
    train_length: int | None = None,
    trust_remote_code: bool = False,
) -> list[int]:
    """Half the longest train length, all of it, and twice as much."""
    if train_length is None:
        train_lengths = [find_train_length(source, trust_remote_code) for source in sources]
        if None in train_lengths:
            raise FarspanError(
                f"{sources[train_lengths.index(None)]} does not state its train length; "
                "set the train length, or the lengths"
            )
        train_length = max(length for length in train_lengths if length is not None)
    return [max(2, train_length // 2), train_length, 2 * train_length]


@dataclass(frozen=True, eq=False)
class _Subject:
    """A loaded model under diagnosis."""

    source: str | Path
    name: str
    model: PreTrainedModel
    tokenizer: Any
    begin: BeginOfText  # of its windows


def _announce(
    subject: _Subject,
    cut: Windows,
    readings: int,
    progress: Progress,
    say: Say,
) -> Progress:
    """Time a short window, and say what all windows take; the progress then shows the time left.

    readings: of the windows of this model.
    """
    model, (windows, length) = subject.model, cut.ids.shape
    layers, ids = probe_or_none(model), measured_part(model, cut.ids[:1])
    with _model_errors(subject.source, length):
        seconds = fastest_run(
            model.device,
            lambda: measure_curves(
                model, ids, bins=MIN_BINS, entropy=layers is not None, name=str(subject.source)
            ),
        )
    each = windows * ForwardSpeed(model, layers or (), seconds, ids.shape[1]).of(length)
    if (total := readings * each) >= SAID_FROM:
        count = f"{windows * readings} window{'s' * (windows * readings > 1)} of {length:,} tokens"
        say(f"{subject.name}: {count}, about {format_duration(total)}")
    return with_total(progress, [Stage(subject.name, each, windows)] * readings)


def _diagnose_model(
    subject: _Subject,
    cut: Windows,
    scales: Sequence[float],
    train_length: int | None,
    rule: KneeRule,
    progress: Progress,
    say: Say,
) -> Iterator[Diagnosis]:
    """The diagnosis of a model as it is, or one for each uniform scale."""
    length = _checked_length(subject, cut, train_length)
    progress = _announce(subject, cut, len(scales) or 1, progress, say)
    unscaled_loss = _loss_inside(subject, cut, length) if scales else None
    for value in scales or (None,):
        yield _diagnose_scale(subject, cut, value, length, unscaled_loss, rule, progress)


def _diagnose_scale(
    subject: _Subject,
    cut: Windows,
    value: float | None,
    train_length: int,
    unscaled_loss: float | None,
    rule: KneeRule,
    progress: Progress,
) -> Diagnosis:
    model, longest = subject.model, cut.ids.shape[1]
    label = subject.name if value is None else f"{subject.name} λ̂={value:g}"
    layers = probe_or_none(model) if value is None else probe(model)
    scales = None
    if value is not None and layers is not None:
        scales = Scales.uniform(value, [layer.index for layer in layers], most_heads(layers))
    # Bins narrow enough for a trend inside the train length, and wide enough to average noise.
    bins = max(MIN_BINS, round(BINS_INSIDE * longest / train_length))
    advance = progress(label, len(cut.ids))
    with seam.scaled(model, scales), _model_errors(subject.source, longest):
        curves = measure_curves(
            model,
            cut.ids,
            bins=bins,
            entropy=layers is not None,
            name=label,
            after_window=advance,
        )
    patch = find_patch(subject.source)
    windowed = frozenset(
        layer.index for layer in layers or () if layer.window and layer.window < train_length
    )
    return assess(
        label,
        train_length,
        replace(curves, windowed=windowed),
        rule,
        without_positions=any(layer.position == "none" for layer in layers or ()),
        scales=patch.scales if patch else None,
        uniform=value,
        unscaled_loss=unscaled_loss,
    )


def _check_scalable(source: str | Path, scales: Sequence[float]) -> None:
    patch = find_patch(source)
    if scales and patch is not None and patch.scales is not None:
        raise FarspanError(
            f"{source} is a patch that already has scales; compare uniform scales on its base model"
        )


def _checked_length(subject: _Subject, cut: Windows, train_length: int | None) -> int:
    """The train length of a model that can be diagnosed on these windows."""
    source, model, patch = subject.source, subject.model, find_patch(subject.source)
    length = train_length or (patch.train_length if patch else config_train_length(model.config))
    if length is None:
        raise FarspanError(
            f"the config of {source} does not state its train length; set the train length"
        )
    longest = cut.ids.shape[1]
    if longest < 1.25 * length:
        raise FarspanError(
            f"{source} was trained on {length} tokens and the largest length is {longest}; "
            "add one that is at least a quarter longer, as in the "
            f"lengths {length}:{2 * length}"
        )
    if int(cut.ids.max()) >= model.get_input_embeddings().num_embeddings:
        raise FarspanError(
            f"the tokenizer of {source} has tokens outside the model's vocabulary; "
            "use the tokenizer that belongs to the model"
        )
    return length


def _loss_inside(subject: _Subject, cut: Windows, length: int) -> float:
    """The loss of a model without scales over the last quarter of its train length."""
    model = subject.model
    with _model_errors(subject.source, length):
        losses = [
            token_losses(model, window[None, :length].to(model.device))[0] for window in cut.ids
        ]
    for window_losses in losses:
        check_losses(model, window_losses, str(subject.source))
    quarter = max(1, length // 4)
    return float(np.mean([float(window_losses[-quarter:].mean()) for window_losses in losses]))


@contextmanager
def _model_errors(source: str | Path, tokens: int) -> Iterator[None]:
    """Report an error inside the model's forward pass as one sentence."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        raise FarspanError(
            f"{source} cannot run on {tokens} tokens at once ({failure_reason(error)}); use "
            "shorter lengths"
        ) from error


def model_names(sources: Sequence[str | Path]) -> list[str]:
    """A distinct name for each model.

    The name is the last two parts of the path, or the whole path if two models share these; a
    model that is listed twice gets a number.

    >>> model_names(["runs/a/model", "runs/b/model", "nope-twin", "nope-twin"])
    ['a/model', 'b/model', 'nope-twin', 'nope-twin (2)']
    """
    short = [_short_name(source) for source in sources]
    names: list[str] = []
    for source, name in zip(sources, short, strict=True):
        name = name if short.count(name) == 1 else str(source)
        unique, number = name, 1
        while unique in names:
            number += 1
            unique = f"{name} ({number})"
        names.append(unique)
    return names


def _short_name(source: str | Path) -> str:
    """The last two parts of a path; a hub id or a bundled model as it is."""
    parts = Path(source).parts if Path(source).exists() else ()
    return "/".join(parts[-2:]) or str(source)


def _write(
    out: Path, diagnoses: list[Diagnosis], text_read: dict[str, Any], settings: dict[str, Any]
) -> None:
    with new_folder(out) as new:
        for name, figure in figures.diagnosis_figures(diagnoses).items():
            style.save(figure, new / name)
        results = {
            "read": text_read,
            "models": [diagnosis.to_json() for diagnosis in diagnoses],
        }
        write_record(new / "record.json", "diagnose", settings, results)
