"""From measured curves to a diagnosis: knees, distracted heads, a suggested scale and a verdict."""

from __future__ import annotations

from dataclasses import replace

from farspan.attention.scales import Scales
from farspan.diagnosis.curves import Curves
from farspan.diagnosis.knees import (
    KneeRule,
    distracted_heads,
    excess_at_end,
    find_knee,
    smooth,
    suggest_scale,
)
from farspan.diagnosis.result import Diagnosis


def assess(
    label: str,
    train_length: int,
    curves: Curves,
    rule: KneeRule,
    *,
    without_positions: bool,
    scales: Scales | None = None,
    uniform: float | None = None,
    unscaled_loss: float | None = None,
) -> Diagnosis:
    """Diagnose a model from its curves.

    without_positions: whether the model has layers without position encoding.
    scales, uniform: the scales of a patch, or the uniform scale, that were on.
    unscaled_loss: the loss over the last quarter of the train length without the uniform scale;
    a scale whose loss is far above it fails inside the train length.
    """
    positions, entropy = curves.positions, curves.entropy
    width = rule.smoothing * train_length
    loss_knee = find_knee(positions, curves.loss, train_length, rule, rising=False)
    entropy_knee = None
    if curves.heads:
        entropy_knee = find_knee(positions, entropy, train_length, rule, rising=True)
    coincide = None
    if loss_knee is not None and entropy_knee is not None:
        coincide = abs(loss_knee - entropy_knee) <= train_length / 4
    suggested = None
    # A uniform scale does not help a model whose layers all have positions (Wang 2024, Figure 2),
    # and the law of `suggest_scale` does not apply where scales are already on.
    if coincide is not None and without_positions and scales is None and uniform is None:
        suggested = suggest_scale(train_length, curves.length)
    diagnosis = Diagnosis(
        label=label,
        train_length=train_length,
        curves=curves,
        loss_knee=loss_knee,
        entropy_knee=entropy_knee,
        coincide=coincide,
        distracted_heads=distracted_heads(positions, curves.heads, train_length, rule),
        heads=sum(len(table) for table in curves.heads.values()),
        suggested_scale=suggested,
        verdict="",
        smooth_loss=smooth(positions, curves.loss, width),
        smooth_entropy=smooth(positions, entropy, width) if curves.heads else entropy,
        scales=scales,
        uniform=uniform,
    )
    verdict = (
        _failure_inside(diagnosis, rule, unscaled_loss)
        or _inconclusive(diagnosis, rule)
        or _verdict(diagnosis)
    )
    return replace(diagnosis, verdict=verdict)


def _failure_inside(diagnosis: Diagnosis, rule: KneeRule, unscaled_loss: float | None) -> str:
    """The verdict on a scale that fails inside the train length; empty for any other."""
    length = diagnosis.train_length
    loss = diagnosis.curves.loss_at(length, train_length=length)
    if unscaled_loss is None or loss <= unscaled_loss + rule.inside_margin:
        return ""
    return (
        "With this scale the model already fails inside its train length, so there is no trend "
        f"to leave: its loss before {length:,} tokens is {loss:.2f}, against {unscaled_loss:.2f} "
        "without the scale."
    )


def _inconclusive(diagnosis: Diagnosis, rule: KneeRule) -> str:
    """The verdict on a loss that ends far above its trend, but in noise; empty for any other."""
    curves = diagnosis.curves
    above = excess_at_end(curves.positions, curves.loss, diagnosis.train_length, rule, rising=False)
    if diagnosis.loss_knee is not None or above <= rule.doubt:
        return ""
    windows = "one window is" if curves.windows == 1 else f"{curves.windows} windows are"
    return (
        f"Loss ends {above:.2f} nats above its trend at {curves.length:,} tokens, but {windows} "
        "too noisy to locate the knee; use more windows, or longer ones."
    )


def _verdict(diagnosis: Diagnosis) -> str:
    longest, train_length = diagnosis.curves.length, diagnosis.train_length
    loss_knee, entropy_knee = diagnosis.loss_knee, diagnosis.entropy_knee
    as_trained = diagnosis.scales is None and diagnosis.uniform is None
    if not diagnosis.heads:
        return _verdict_without_entropy(diagnosis)
    if loss_knee is None and entropy_knee is None:
        factor = f"{longest / train_length:.3g} × the train length"
        return f"Loss and entropy follow their trends up to {longest:,} tokens, {factor}."
    if loss_knee is None:
        return (
            f"Loss follows its trend up to {longest:,} tokens although entropy leaves its own at "
            f"{entropy_knee:,}: attention spreads out, but the loss does not suffer."
        )
    factor = f"{loss_knee / train_length:.2f} × the train length"
    start = f"Loss leaves its trend at {loss_knee:,} tokens, {factor}"
    if entropy_knee is None:
        limit = ", and a scale alone will not help" if as_trained else ""
        return f"{start}, but entropy does not: attention is not distracted{limit}."
    entropy = "where entropy does too"
    if not diagnosis.coincide:
        entropy = f"and entropy leaves its own at {entropy_knee:,}"
    distracted = f"{len(diagnosis.distracted_heads)} of {diagnosis.heads} heads are distracted"
    advice = _advice(diagnosis.suggested_scale, longest) if as_trained else ""
    return f"{start}, {entropy}: {distracted}{advice}."


def _verdict_without_entropy(diagnosis: Diagnosis) -> str:
    place, verb = diagnosis.loss_knee, "leaves its trend at"
    if place is None:
        place, verb = diagnosis.curves.length, "follows its trend up to"
    return (
        f"Loss {verb} {place:,} tokens, {place / diagnosis.train_length:.2f} × the train length; "
        "entropy was not measured, because this model computes attention itself."
    )


def _advice(suggested_scale: float | None, longest: int) -> str:
    if suggested_scale is None:
        return "; no uniform scale is suggested because every layer seems to have positions"
    return f"; for {longest:,} tokens, start with a scale of {suggested_scale:g}"
