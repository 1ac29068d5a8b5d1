"""`farspan diagnose`: loss and entropy by position, side by side, and in one sentence what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.data.documents import read_documents
from farspan.data.windows import Windows, cut_windows
from farspan.diagnosis.curves import Curves, check_losses, measure
from farspan.diagnosis.knees import Rule, above_at_the_end, distracted_heads, find_knee, smooth, suggest_scale
from farspan.errors import FarspanError, first_line
from farspan.files import check_free, new_folder
from farspan.loading import check_source, chosen_device, load_config, load_for_text, patch_in
from farspan.memory import out_of_memory
from farspan.model.loss import token_losses
from farspan.progress import Progress, silent
from farspan.record import write_record
from farspan.report import figures, style
from farspan.workflows.inspection import train_length as trained_on

MIN_BINS, BINS_INSIDE = 256, 64  # of positions: in all, and inside the training length


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What one model, at one scale, does by position."""

    label: str
    train_length: int
    curves: Curves
    loss_knee: int | None
    entropy_knee: int | None
    coincide: bool | None  # None where there are not two knees to compare
    distracted_heads: list[tuple[int, int]]
    heads: int
    suggested_scale: float | None  # None where none suggests itself
    verdict: str
    smooth_loss: np.ndarray
    smooth_entropy: np.ndarray
    scales: Scales | None = None  # of a patch, for the figure that sets them against entropy
    uniform: float | None = None  # of a sweep

    def to_json(self) -> dict[str, Any]:
        curves = self.curves
        return {
            "model": self.label,
            "train_length": self.train_length,
            "positions": curves.positions.round(1).tolist(),
            "loss": _listed(curves.loss),
            "entropy": _listed(curves.entropy),
            "entropy_of_every": curves.every,
            "windows": curves.windows,
            "bound": _listed(np.log(curves.positions)),
            "entropy_by_head": {str(layer): _listed(table) for layer, table in curves.heads.items()},
            "loss_knee": self.loss_knee,
            "entropy_knee": self.entropy_knee,
            "knees_coincide": self.coincide,
            "distracted_heads": [list(pair) for pair in self.distracted_heads],
            "suggested_scale": self.suggested_scale,
            "verdict": self.verdict,
        }


def diagnose(
    models: str | Path | Sequence[str | Path],
    data: str | Path = "python-docs",
    lengths: Sequence[int] = (),
    *,
    scales: Sequence[float] = (),
    windows: int = 8,
    train_length: int | None = None,
    position: str | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    rule: Rule | None = None,
    progress: Progress = silent,
) -> list[Diagnosis]:
    """One diagnosis for each model, or, with `scales`, for each model and uniform scale.

    Each window is read once at the largest length, or at twice the longest training length where none is given. With
    `out`, a record and figures are written to that folder.

    >>> farspan.diagnose("path/to/model", lengths=[512, 4096])[0].verdict
    """
    sources = [models] if isinstance(models, str | Path) else list(models)
    rule = rule or Rule()
    lengths = lengths or usual_lengths(sources, train_length, position, trust_remote_code)
    if min(lengths) < 2:
        raise FarspanError(f"a length of {min(lengths)} leaves nothing to predict; ask for 2 or more")
    if out is not None:
        check_free(Path(out))
    device = chosen_device(device)
    for source in sources:
        _check_scalable(source, scales)
        check_source(source, position=position, trust_remote_code=trust_remote_code)
    found: list[Diagnosis] = []
    read: dict[str, Any] = {}

    def look(source: str | Path, name: str) -> None:  # which holds one model at a time
        ready = progress(f"{name}: load and read", 2)
        options = {"position": position, "device": device, "trust_remote_code": trust_remote_code}
        model, tokenizer = load_for_text(source, **options)
        ready()
        cut = cut_windows(read_documents(data), tokenizer, max(lengths), windows)
        ready()
        read[str(source)] = cut.describe()
        length = _checked_length(model, source, cut, train_length)
        usual = _loss_inside(model, source, cut, length) if scales else None
        for value in scales or (None,):
            label = name if value is None else f"{name} λ̂={value:g}"
            found.append(_diagnose_one(model, source, label, cut, value, length, usual, rule, progress))

    for source, name in zip(sources, model_names(sources), strict=True):
        look(source, name)
    if out is not None:
        settings = {
            "data": str(data),
            "lengths": list(lengths),
            "scales": list(scales),
            "windows": windows,
            "train_length": train_length,
            "position": position,
            "device": device,
            "rule": asdict(rule),
        }
        _write(Path(out), found, read, settings)
    return found


def usual_lengths(
    sources: Sequence[str | Path],
    train_length: int | None = None,
    position: str | None = None,
    trust_remote_code: bool = False,
) -> list[int]:
    """Half of the longest training length, all of it, and twice as much."""
    if train_length is None:
        told = [_told_length(source, position, trust_remote_code) for source in sources]
        if None in told:
            raise FarspanError(f"{sources[told.index(None)]} does not tell its training length; give --lengths")
        train_length = max(length for length in told if length is not None)
    return [max(2, train_length // 2), train_length, 2 * train_length]


def _told_length(source: str | Path, position: str | None, trust_remote_code: bool) -> int | None:
    """What was trained on, without loading weights; a .gguf does not tell it so."""
    if (patch := patch_in(source)) is not None:
        return patch.train_length
    if Path(source).suffix == ".gguf":
        return None
    return trained_on(load_config(source, position=position, trust_remote_code=trust_remote_code))


def _diagnose_one(
    model: PreTrainedModel,
    source: str | Path,
    label: str,
    cut: Windows,
    value: float | None,
    length: int,
    usual: float | None,
    rule: Rule,
    progress: Progress,
) -> Diagnosis:
    longest, layers = cut.ids.shape[1], probe(model)
    if value is not None:
        seam.install(model, Scales.uniform(value, [layer.index for layer in layers], layers[0].heads))
    # Bins narrow enough for a trend inside the training length, and not so narrow that each is noise.
    bins = max(MIN_BINS, round(BINS_INSIDE * longest / length))
    try:
        with _running(source, longest):
            curves = measure(model, cut.ids, bins=bins, name=label, after_window=progress(label, len(cut.ids)))
    finally:
        if value is not None:
            seam.uninstall(model)
    patch = patch_in(source)
    return judge(
        label,
        length,
        curves,
        rule,
        without_positions=any(layer.position == "none" for layer in layers),
        scales=patch.scales if patch else None,
        uniform=value,
        usual=usual,
    )


def _check_scalable(source: str | Path, scales: Sequence[float]) -> None:
    patch = patch_in(source)
    if scales and patch is not None and patch.scales is not None:
        raise FarspanError(f"{source} is a patch with scales of its own; compare uniform scales on its base model")


def _checked_length(model: PreTrainedModel, source: str | Path, cut: Windows, train_length: int | None) -> int:
    """The training length of a model that can be diagnosed on these windows."""
    patch = patch_in(source)
    length = train_length or (patch.train_length if patch else trained_on(model.config))
    if length is None:
        raise FarspanError(f"the config of {source} does not tell its training length; give --train-length")
    longest = cut.ids.shape[1]
    if longest < 1.25 * length:
        raise FarspanError(
            f"{source} was trained on {length} tokens and the largest length asked for is {longest}; "
            f"ask for at least a quarter more, say --lengths {length}:{2 * length}"
        )
    if int(cut.ids.max()) >= model.get_input_embeddings().num_embeddings:
        raise FarspanError(f"the tokenizer of {source} knows more tokens than the model; use the model's own tokenizer")
    return length


def _loss_inside(model: PreTrainedModel, source: str | Path, cut: Windows, length: int) -> float:
    """The loss of a model as it is, over the last quarter of its training length."""
    with _running(source, length):
        losses = [token_losses(model, window[None, :length].to(model.device))[0] for window in cut.ids]
    for each in losses:
        check_losses(model, each, str(source))
    return float(np.mean([float(each[-max(1, length // 4) :].mean()) for each in losses]))


@contextmanager
def _running(source: str | Path, tokens: int) -> Iterator[None]:
    """What goes wrong inside a model, as one sentence."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        why = "memory is short" if out_of_memory(error) else f"{type(error).__name__}: {first_line(error)}"
        raise FarspanError(
            f"{source} cannot run on {tokens} tokens at once ({why}); ask for shorter lengths"
        ) from error


def model_names(sources: Sequence[str | Path]) -> list[str]:
    """A name for each model, no two alike: the last two parts of its path; all of it where others share those; and a
    number for a model that is named twice.

    >>> model_names(["runs/a/model", "runs/b/model", "nope-twin", "nope-twin"])
    ['a/model', 'b/model', 'nope-twin', 'nope-twin (2)']
    """
    short = [_short_name(source) for source in sources]
    names: list[str] = []
    for source, name in zip(sources, short, strict=True):
        name = name if short.count(name) == 1 else str(source)
        free, number = name, 1
        while free in names:
            number += 1
            free = f"{name} ({number})"
        names.append(free)
    return names


def _short_name(source: str | Path) -> str:
    """The last two parts of a path tell models apart that bear one name; a hub id or a twin is its own name."""
    parts = Path(source).parts if Path(source).exists() else ()
    return "/".join(parts[-2:]) or str(source)


def judge(
    label: str,
    train_length: int,
    curves: Curves,
    rule: Rule,
    *,
    without_positions: bool,
    scales: Scales | None = None,
    uniform: float | None = None,
    usual: float | None = None,
) -> Diagnosis:
    """Knees, distracted heads, a suggestion and a verdict from measured curves.

    usual: the loss over the last quarter of the training length without the uniform scale; far above it, there is no
    trend that could be left.

    A scale is suggested to a model that has layers without positions, as it was trained: no uniform scale mends a model
    that has none (paper A's Figure 2), and where scales are on already the law of `suggest_scale` says nothing.
    """
    positions, entropy = curves.positions, curves.entropy
    loss_knee = find_knee(positions, curves.loss, train_length, rule, rising=False)
    entropy_knee = find_knee(positions, entropy, train_length, rule, rising=True)
    coincide = None
    if loss_knee is not None and entropy_knee is not None:
        coincide = abs(loss_knee - entropy_knee) <= train_length / 4
    distracted = distracted_heads(positions, curves.heads, train_length, rule)
    as_trained = scales is None and uniform is None
    suggested = None
    if coincide is not None and without_positions and as_trained:
        suggested = suggest_scale(train_length, curves.length)
    start = _way_on(suggested, curves.length) if as_trained else ""
    mend = ", and a scale alone will not mend it" if as_trained else ""
    heads = sum(len(table) for table in curves.heads.values())
    return Diagnosis(
        label=label,
        train_length=train_length,
        curves=curves,
        loss_knee=loss_knee,
        entropy_knee=entropy_knee,
        coincide=coincide,
        distracted_heads=distracted,
        heads=heads,
        suggested_scale=suggested,
        verdict=_failure_inside(curves, train_length, rule, usual)
        or _doubt(curves, train_length, rule, loss_knee)
        or _verdict(
            train_length, curves.length, loss_knee, entropy_knee, coincide, f"{len(distracted)} of {heads}", start, mend
        ),
        smooth_loss=smooth(positions, curves.loss, rule.smoothing * train_length),
        smooth_entropy=smooth(positions, entropy, rule.smoothing * train_length),
        scales=scales,
        uniform=uniform,
    )


def _failure_inside(curves: Curves, train_length: int, rule: Rule, usual: float | None) -> str:
    """That a scale fails the model where it was trained, in a sentence; empty where it does not."""
    loss = curves.loss_at(train_length, max(1, train_length // 4))
    if usual is None or loss <= usual + rule.inside_margin:
        return ""
    return (
        "Under this scale the model already fails inside its training length, so there is no trend to leave: its loss "
        f"before {train_length:,} tokens is {loss:.2f}, and {usual:.2f} without the scale."
    )


def _doubt(curves: Curves, train_length: int, rule: Rule, loss_knee: int | None) -> str:
    """That a loss ends far above its trend and noise does not let us say that it left it; empty where it does not."""
    above = above_at_the_end(curves.positions, curves.loss, train_length, rule, rising=False)
    if loss_knee is not None or above <= rule.doubt:
        return ""
    read = "one window is" if curves.windows == 1 else f"{curves.windows} windows are"
    return (
        f"Loss ends {above:.2f} nats above its trend at {curves.length:,} tokens, but {read} too noisy to say where it "
        "leaves it; read more of them with --windows, or longer ones."
    )


def _verdict(
    train_length: int,
    longest: int,
    loss_knee: int | None,
    entropy_knee: int | None,
    coincide: bool | None,
    distracted: str,
    start: str,
    mend: str,
) -> str:
    if loss_knee is None and entropy_knee is None:
        times = f"{longest / train_length:.3g} × the training length"
        return f"Loss and entropy keep their trends up to {longest:,} tokens, {times}."
    if loss_knee is None:
        return (
            f"Loss keeps its trend up to {longest:,} tokens although entropy leaves its own at {entropy_knee:,}: "
            "attention spreads and the model bears it."
        )
    where = f"Loss leaves its trend at {loss_knee:,} tokens, {loss_knee / train_length:.2f} × the training length"
    if entropy_knee is None:
        return f"{where}, but entropy does not: this is no distraction{mend}."
    meet = "where entropy does too" if coincide else f"and entropy its own at {entropy_knee:,}"
    return f"{where}, {meet}: {distracted} heads are distracted{start}."


def _way_on(suggested: float | None, longest: int) -> str:
    if suggested is None:
        return "; no uniform scale suggests itself, for no layer is seen to be without positions"
    return f"; to read {longest:,} tokens, a scale of {suggested:g} is a place to start"


def _listed(values: np.ndarray) -> list:
    return np.round(values.astype(float), 5).tolist()


def _write(out: Path, found: list[Diagnosis], read: dict[str, Any], settings: dict[str, Any]) -> None:
    with new_folder(out) as new:
        for name, figure in figures.diagnosis_figures(found).items():
            style.save(figure, new / name)
        results = {"read": read, "models": [diagnosis.to_json() for diagnosis in found]}
        write_record(new / "record.json", "diagnose", settings, results)
