"""The first thing on the page: for each model its claimed and effective length, cost and gates."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farspan.evals.needle import effective_length
from farspan.evals.results import stored_scores
from farspan.record import format_number

RISE = 1.1  # perplexity may rise to this multiple of its value at the train length
RETRIEVED = 0.85  # share of passkeys from which on a length is effective

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Effective:
    """The longest measured length up to which a measure holds."""

    measure: str
    length: int
    measured: int  # the longest measured length
    counted: str = ""  # the texts behind it, where they are few
    shown: bool = True  # false: too few texts to tell whether it holds there

    def __str__(self) -> str:
        return f"{'≥ ' * (self.length >= self.measured)}{self.length:,}"


@dataclass
class ModelSummary:
    """What the runs of a report say about one model."""

    name: str
    about: str = ""
    train_length: int | None = None
    claimed: int | None = None
    effective: list[Effective] = field(default_factory=list)
    cost: str = ""
    gain: str = ""
    gates: list[Record] = field(default_factory=list)
    knee: str = ""


def summaries(runs: Sequence[tuple[str, Record]]) -> list[ModelSummary]:
    """One summary for each model of named runs; `eval` says more than `extend` and `diagnose`."""
    models: dict[str, ModelSummary] = {}
    for command, collect in (
        ("eval", _collect_eval),
        ("extend", _collect_extend),
        ("diagnose", _collect_diagnose),
    ):
        for name, record in runs:
            if record["command"] == command:
                collect(name, record, models)
    return list(models.values())


def _collect_eval(name: str, record: Record, models: dict[str, ModelSummary]) -> None:
    scores = stored_scores(record["scores"])
    settings = record.get("settings") or {}
    length = settings.get("train_length")
    summary = models.setdefault(name, ModelSummary(name))
    summary.train_length = summary.train_length or length
    summary.claimed = summary.claimed or settings.get("context") or length
    summary.effective += effective_by_scores(scores, length)
    summary.gates += record.get("gates") or ()
    if baseline := record.get("vs"):
        base_scores = stored_scores(baseline["scores"])
        summary.cost = summary.cost or _cost(scores, base_scores, length)
        summary.gain = summary.gain or _gain(scores, base_scores, length, summary.claimed)
        if baseline["model"] not in models:
            # records of earlier versions do not say what the baseline was trained on
            own = settings.get("baseline") or {"train_length": length, "context": length}
            base = ModelSummary(baseline["model"], "baseline", own["train_length"], own["context"])
            base.effective += effective_by_scores(base_scores, base.train_length)
            models[base.name] = base


def effective_by_scores(scores: Sequence[Record], train_length: int | None) -> list[Effective]:
    """By every measure that an evaluation has: RULER or needles, perplexity, passkeys."""
    effective = [
        Effective(score["eval"], int(score["value"]), score["length"])
        for score in _overall(
            score
            for score in scores
            if score["metric"] == "effective_length" and not score["tags"].get("detail")
        )
    ]
    texts = _texts(scores)
    for text in texts:
        values = _by_length(scores, "ppl", text)
        # More context lowers perplexity, so lengths below the train length say nothing.
        start = max((n for n in values if train_length and n <= train_length), default=min(values))
        shares = {n: values[start] / value for n, value in values.items() if n >= start}
        name = "perplexity" if len(texts) == 1 else f"perplexity on {text}"
        effective.append(Effective(name, effective_length(shares, 1 / RISE), max(values)))
    if passkeys := [score for score in scores if score["metric"] == "passkey"]:
        effective.append(_effective_by_passkeys(passkeys))
    return effective


def _effective_by_passkeys(scores: Sequence[Record]) -> Effective:
    """A length fails if even the upper end of its interval is below the threshold."""
    bounds = {score["length"]: score.get("high", score["value"]) for score in scores}
    length = effective_length(bounds, RETRIEVED)
    shown = next((score for score in scores if score["length"] == length), scores[0])
    keys, unclear = shown.get("n"), length > 0 and shown["value"] < RETRIEVED
    counted = f"{round(shown['value'] * keys)} of {keys} at {shown['length']:,}" if keys else ""
    if unclear:
        counted += f", too few to tell from {RETRIEVED:.0%}"
    return Effective("passkeys", length, max(bounds), counted, not unclear)


def _overall(scores: Iterable[Record]) -> list[Record]:
    """The scores of averages over tasks; of evaluations without an average, every score."""
    scores = list(scores)
    averaged = {score["eval"] for score in scores if _is_average(score)}
    return [score for score in scores if _is_average(score) or score["eval"] not in averaged]


def _is_average(score: Record) -> bool:
    return score["tags"].get("task", "").startswith("average")


def _texts(scores: Sequence[Record]) -> list[str]:
    """The texts of perplexity."""
    return list(dict.fromkeys(s["tags"]["task"] for s in scores if s["metric"] == "ppl"))


def _by_length(scores: Sequence[Record], metric: str, task: str | None = None) -> dict[int, float]:
    return {
        score["length"]: score["value"]
        for score in scores
        if score["metric"] == metric and task in (None, score["tags"].get("task"))
    }


def _cost(scores: Sequence[Record], base: Sequence[Record], train_length: int | None) -> str:
    """The rise of perplexity at the longest length within the train length."""
    return _largest_rise(scores, base, range(1, (train_length or 0) + 1))


def _gain(
    scores: Sequence[Record],
    base: Sequence[Record],
    train_length: int | None,
    target: int | None,
) -> str:
    """The change of perplexity at the longest length up to the target, if beyond training."""
    return _largest_rise(scores, base, range((train_length or 0) + 1, (target or 0) + 1))


def _largest_rise(scores: Sequence[Record], base: Sequence[Record], lengths: range) -> str:
    """The change of perplexity against the baseline at the longest of these lengths.

    Of several texts, that of the text with the largest rise.
    """
    texts, changes = _texts(scores), []
    for text in texts:
        after, before = _by_length(scores, "ppl", text), _by_length(base, "ppl", text)
        if shared := [n for n in after if n in before and n in lengths]:
            length = max(shared)
            rise = after[length] / before[length] - 1
            values = f"{format_number(before[length])} → {format_number(after[length])}"
            on = f" on {text}" if len(texts) > 1 else ""
            changes.append((rise, f"perplexity{on} at {length:,} ({values})"))
    if not changes:
        return ""
    rise, where = max(changes)
    return f"{_signed_percent(rise)} {where}"


def _signed_percent(share: float) -> str:
    text = f"{abs(share):.1%}"
    return text if text == "0.0%" else f"{'−' if share < 0 else '+'}{text}"


def _collect_extend(name: str, record: Record, models: dict[str, ModelSummary]) -> None:
    settings, before, after = record["settings"], record["before"], record["after"]
    summary = models.setdefault(name, ModelSummary(name))
    length = settings["train_length"]
    method = record.get("method") or settings["method"]
    summary.about = f"{settings.get('model') or 'a model'} with {method}"
    summary.train_length, summary.claimed = length, settings.get("to")
    at_train_length = f"loss@{length}"
    if not summary.cost and at_train_length in after:
        summary.cost = _loss_change(before, after, length)
    if not summary.gain and f"loss@{settings.get('to')}" in after:
        summary.gain = _loss_change(before, after, settings["to"])
    if not summary.effective:
        summary.effective += _effective_by_extend(after, length)


def _loss_change(before: Record, after: Record, length: int) -> str:
    change = after[f"loss@{length}"] - before[f"loss@{length}"]
    return f"{change:+.3f} nats at {length:,}".replace("-", "−")


def _effective_by_extend(after: Record, train_length: int) -> Iterator[Effective]:
    losses, passkeys = (_values(after, measure) for measure in ("loss", "passkey"))
    if train_length in losses:
        inside = losses[train_length]
        beyond = {n: math.exp(inside - loss) for n, loss in losses.items() if n >= train_length}
        yield Effective("loss", effective_length(beyond, 1 / RISE), max(beyond))
    if passkeys:
        yield Effective("passkeys", effective_length(passkeys, RETRIEVED), max(passkeys))


def _values(measured: Record, measure: str) -> dict[int, float]:
    """`{"loss@512": 3.0}` -> `{512: 3.0}`"""
    pairs = (key.split("@") for key in measured if key.startswith(f"{measure}@"))
    return {int(length): measured[f"{name}@{length}"] for name, length in pairs}


def _collect_diagnose(name: str, record: Record, models: dict[str, ModelSummary]) -> None:
    for model in record["models"]:
        summary = models.setdefault(model["model"], ModelSummary(model["model"]))
        summary.train_length = summary.train_length or model["train_length"]
        summary.claimed = summary.claimed or model["train_length"]
        if model["loss_knee"]:
            summary.knee = f"loss leaves its trend at {round(model['loss_knee']):,} tokens"


def summary_cards(runs: Sequence[tuple[str, Record]]) -> str:
    cards = [_card(summary) for summary in summaries(runs)]
    if not cards:
        return ""
    rule = (
        "Effective: the longest measured length up to which perplexity stays within "
        f"{RISE - 1:.0%} of its value at the train length and {RETRIEVED:.0%} of passkeys are "
        "retrieved (up to the upper end of the 95% interval, since keys can be few), or the "
        "effective length that an evaluation such as RULER reports."
    )
    return f'<div class="cards">{"".join(cards)}</div><p class="rule">{rule}</p>'


def _card(summary: ModelSummary) -> str:
    trained = f"trained on {summary.train_length:,} tokens" if summary.train_length else ""
    about = ", ".join(filter(None, (summary.about, trained)))
    shortest = min(summary.effective, key=lambda effective: effective.length, default=None)
    facts = [("claimed length", f"{summary.claimed:,}" if summary.claimed else "unknown", "")]
    if shortest is not None:
        by = " · ".join(
            f"{each.measure} {each}" + f" ({each.counted})" * bool(each.counted)
            for each in summary.effective
        )
        facts.append(("effective length", str(shortest), by))
    else:
        facts.append(("effective length", "–", "not measured; farspan eval measures it"))
    lines = [
        ("short-range cost", summary.cost),
        ("gain at the target", summary.gain),
        ("diagnosis", summary.knee),
    ]
    escape = html.escape
    return (
        f'<article class="card"><h3>{escape(summary.name)}</h3><p>{escape(about)}</p>'
        f'{_bar(summary, shortest)}<dl class="facts">'
        + "".join(
            f"<div><dt>{label}</dt><dd>{escape(value)}<small>{escape(by)}</small></dd></div>"
            for label, value, by in facts
        )
        + '</dl><dl class="lines">'
        + "".join(
            f"<div><dt>{label}</dt><dd>{escape(text)}</dd></div>" for label, text in lines if text
        )
        + _gates(summary.gates)
        + "</dl></article>"
    )


def _bar(summary: ModelSummary, shortest: Effective | None) -> str:
    """The effective length as a part of the claimed one.

    Neutral where no longer one was tried, or where passkeys are too few to tell.
    """
    if shortest is None or not summary.claimed:
        return ""
    share = min(1.0, shortest.length / summary.claimed)
    failed = shortest.length < shortest.measured
    shown = all(each.shown for each in summary.effective)
    kind = "wrong" if failed and share < 1 else "right" if share == 1 and shown else "open"
    return f'<div class="bar {kind}" aria-hidden="true"><i style="width: {share:.1%}"></i></div>'


def _gates(gates: Sequence[Record]) -> str:
    if not gates:
        return ""
    count = sum(bool(gate["holds"]) for gate in gates)
    kind = "right" if count == len(gates) else "wrong"
    return f'<div><dt>gates</dt><dd class="{kind}">{count} of {len(gates)} hold</dd></div>'


def gate_list(gates: Sequence[tuple[str, Record]]) -> str:
    """Every gate with its outcome, under the name of its run."""
    lines = "".join(
        f'<li class="{"right" if gate["holds"] else "wrong"}"><b>{_outcome(gate)}</b> '
        f"{html.escape(name)}: {html.escape(str(gate['told']))}</li>"
        for name, gate in gates
    )
    return f'<ul class="gates">{lines}</ul>' if lines else ""


def _outcome(gate: Record) -> str:
    return "holds" if gate["holds"] else "fails"
