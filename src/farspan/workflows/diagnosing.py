"""`farspan diagnose`: loss and entropy by position, side by side, and in one sentence what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.data.documents import read_documents
from farspan.data.windows import Windows, cut_windows
from farspan.diagnosis.curves import Curves, measure
from farspan.diagnosis.knees import Rule, distracted_heads, find_knee, smooth, suggest_scale
from farspan.errors import FarspanError
from farspan.files import check_free, new_folder
from farspan.loading import first_line, load
from farspan.memory import out_of_memory
from farspan.progress import Progress, silent
from farspan.record import write_record
from farspan.report import figures
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
    suggested_scale: float
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
    lengths: Sequence[int] = (512, 4096),
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

    Each window is read once at the largest length. With `out`, a record and figures are written to that folder.

    >>> farspan.diagnose("path/to/model", lengths=[512, 4096])[0].verdict
    """
    sources = [models] if isinstance(models, str | Path) else list(models)
    rule = rule or Rule()
    if min(lengths) < 2:
        raise FarspanError(f"a length of {min(lengths)} leaves nothing to predict; ask for 2 or more")
    if out is not None:
        check_free(Path(out))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    found: list[Diagnosis] = []
    read: dict[str, Any] = {}
    for source in sources:
        ready = progress(f"{_name(source)}: load and read", 2)
        model, tokenizer = load(source, position=position, device=device, trust_remote_code=trust_remote_code)
        ready()
        if tokenizer is None:
            raise FarspanError(f"{source} has no tokenizer, and text must become tokens; add its tokenizer.json")
        cut = cut_windows(read_documents(data), tokenizer, max(lengths), windows)
        ready()
        read[str(source)] = cut.describe()
        for value in scales or (None,):
            found.append(_diagnose_one(model, source, cut, value, train_length, rule, progress))
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


def _diagnose_one(
    model: PreTrainedModel,
    source: str | Path,
    cut: Windows,
    value: float | None,
    train_length: int | None,
    rule: Rule,
    progress: Progress,
) -> Diagnosis:
    label = _name(source) + ("" if value is None else f" λ̂={value:g}")
    patch = Patch.load(Path(source)) if (Path(source) / "patch.json").exists() else None
    if patch is not None and value is not None:
        raise FarspanError(f"{source} is a patch with scales of its own; compare uniform scales on its base model")
    length = train_length or trained_on(model.config.get_text_config())
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
    if value is not None:
        layers = probe(model)
        seam.install(model, Scales.uniform(value, [layer.index for layer in layers], layers[0].heads))
    # Bins narrow enough for a trend inside the training length, and not so narrow that each is noise.
    bins = max(MIN_BINS, round(BINS_INSIDE * longest / length))
    try:
        curves = measure(model, cut.ids, bins=bins, after_window=progress(label, len(cut.ids)))
    except (IndexError, RuntimeError) as error:
        why = "memory is short" if out_of_memory(error) else f"{type(error).__name__}: {first_line(error)}"
        raise FarspanError(
            f"{source} cannot run on {longest} tokens at once ({why}); ask for shorter lengths"
        ) from error
    finally:
        if value is not None:
            seam.uninstall(model)
    return judge(label, length, curves, rule, scales=patch.scales if patch else None, uniform=value)


def _name(source: str | Path) -> str:
    """The last two parts of a path tell models apart that bear one name."""
    return "/".join(Path(source).parts[-2:]) if Path(source).exists() else str(source)


def judge(
    label: str,
    train_length: int,
    curves: Curves,
    rule: Rule,
    *,
    scales: Scales | None = None,
    uniform: float | None = None,
) -> Diagnosis:
    """Knees, distracted heads, a suggestion and a verdict from measured curves."""
    positions, entropy = curves.positions, curves.entropy
    loss_knee = find_knee(positions, curves.loss, train_length, rule, rising=False)
    entropy_knee = find_knee(positions, entropy, train_length, rule, rising=True)
    coincide = None
    if loss_knee is not None and entropy_knee is not None:
        coincide = abs(loss_knee - entropy_knee) <= train_length / 4
    distracted = distracted_heads(positions, curves.heads, train_length, rule)
    variance = np.concatenate(list(curves.variance.values())).mean(0)
    both = loss_knee is not None and entropy_knee is not None
    suggested = suggest_scale(positions, entropy, variance, train_length, rule) if both else 1.0
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
        verdict=_verdict(
            train_length, curves.length, loss_knee, entropy_knee, coincide, f"{len(distracted)} of {heads}", suggested
        ),
        smooth_loss=smooth(positions, curves.loss, rule.smoothing * train_length),
        smooth_entropy=smooth(positions, entropy, rule.smoothing * train_length),
        scales=scales,
        uniform=uniform,
    )


def _verdict(
    train_length: int,
    longest: int,
    loss_knee: int | None,
    entropy_knee: int | None,
    coincide: bool | None,
    distracted: str,
    suggested: float,
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
        return f"{where}, but entropy does not: this is no distraction, and a scale alone will not mend it."
    meet = "where entropy does too" if coincide else f"and entropy its own at {entropy_knee:,}"
    start = f"a scale of {suggested:g} is a place to start" if suggested > 1 else "no uniform scale suggests itself"
    return f"{where}, {meet}: {distracted} heads are distracted; {start}."


def _listed(values: np.ndarray) -> list:
    return np.round(values.astype(float), 5).tolist()


def _write(out: Path, found: list[Diagnosis], read: dict[str, Any], settings: dict[str, Any]) -> None:
    with new_folder(out) as new:
        for name, figure in figures.diagnosis_figures(found).items():
            figures.save(figure, new / name)
        results = {"read": read, "models": [diagnosis.to_json() for diagnosis in found]}
        write_record(new / "record.json", "diagnose", settings, results)
