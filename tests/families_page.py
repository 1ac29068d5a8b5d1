"""docs/families.md: a table of every family, written from the outcomes of `make families`."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import transformers

from family_checks import ABSENT, CHECKS, HOLDS, REFUSED, TRACEBACK, Outcome

CELLS = {HOLDS: "yes", REFUSED: "refused", ABSENT: "–", TRACEBACK: "**traceback**"}
Outcomes = dict[str, Outcome]
INTRODUCTION = """# Families

`make families` wrote this page. It builds a tiny random model of every causal family of the
installed transformers, and of every model of text and images with a text part of its own, and runs
the checks below on it. A family has a process of its own, so that none can stop the rest. `make
families` resumes; `python tests/sweep.py --fresh` measures all of them again, and
`python tests/sweep.py NAME` shows the outcomes of one. The tests run a few of them.

| column | what is checked |
|---|---|
| layers | [`inspect`](inspect.md) on the model: position encodings and windows (here 8 keys) |
| config | `inspect` on the family's default config, of full size, without weights |
| identity | the attention seam changes no bit of the logits: plain, behind padding, with a cache |
| scale | a scale of 1.5 multiplies the queries by 1.5, and changes the logits |
| cache | scales that grow with the context give the same logits with a cache |
| padding | they give the same logits behind left padding |
| fold | scales become weights: one for each head, or one for each layer if a norm allows no more |
| extend | `extend --method uniform` fits, saves, verifies and reloads a patch |

*yes*: it holds. *refused*: farspan says why in a sentence, see [below](#refused). *–*: the family
itself does not do this (its own cache or padding changes its logits), or nothing is there to
check."""


def write_page(path: Path, outcomes: dict[str, Outcomes], families: list[str]) -> None:
    path.write_text(page(outcomes, families))


def page(outcomes: dict[str, Outcomes], families: list[str]) -> str:
    """`families` that have no outcomes yet are listed as not measured."""
    parts = [INTRODUCTION, "## Counts", *_counts(outcomes), "## Table", *_table(outcomes)]
    parts += ["## Refused", *_refusals(outcomes), "## Not built", *_not_built(outcomes)]
    if missing := sorted(set(families) - outcomes.keys()):
        rows = ["| not measured yet |", "|---|", *(f"| {family} |" for family in missing)]
        parts += ["## Not measured", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def counts(outcomes: dict[str, Outcomes]) -> dict[str, int]:
    """The families by the outcome of the seam."""
    built = {name: parts for name, parts in outcomes.items() if parts["build"].state == HOLDS}
    states = [parts["identity"].state for parts in built.values()]
    broken = [
        name
        for name, parts in outcomes.items()
        if any(part.state == TRACEBACK for part in parts.values())
    ]
    return {
        "families": len(outcomes),
        "built": len(built),
        "identical under the seam": states.count(HOLDS),
        "refused by the seam": states.count(REFUSED),
        "with a traceback": len(broken),
    }


def _counts(outcomes: dict[str, Outcomes]) -> list[str]:
    rows = ["| | families |", "|---|---|"]
    rows += [f"| {name} | {count} |" for name, count in counts(outcomes).items()]
    return [f"transformers {transformers.__version__}:", "\n".join(rows)]


def _table(outcomes: dict[str, Outcomes]) -> list[str]:
    columns = [name for name in CHECKS if name != "inspect"]
    rows = [
        "| family | layers | " + " | ".join(columns) + " |",
        "|" + "---|" * (len(columns) + 2),
    ]
    for family, parts in sorted(outcomes.items()):
        if parts["build"].state != HOLDS:
            continue
        layers = parts["inspect"].detail if parts["inspect"].state == HOLDS else "refused"
        cells = [_cell(name, parts[name]) for name in columns]
        rows.append(f"| {family} | {layers} | " + " | ".join(cells) + " |")
    return ["\n".join(rows)]


def _cell(name: str, outcome: Outcome) -> str:
    if name == "fold" and outcome.state == HOLDS:
        return outcome.detail.removeprefix("scales ")
    return CELLS[outcome.state]


def _refusals(outcomes: dict[str, Outcomes]) -> list[str]:
    """Every reason, with the families and checks that it stopped."""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for family, parts in sorted(outcomes.items()):
        for name, outcome in parts.items():
            if outcome.state == REFUSED:
                reason = _general(outcome.detail, parts["build"].detail)
                reasons[reason].setdefault(family, []).append(name)
    rows = ["| reason | families |", "|---|---|"]
    for reason, where in sorted(reasons.items(), key=lambda entry: -len(entry[1])):
        names = [f"{family} ({', '.join(checks)})" for family, checks in where.items()]
        rows.append(f"| {reason} | {', '.join(names)} |")
    return ["\n".join(rows)]


def _general(reason: str, owner: str) -> str:
    """The reason without the class and the folder of one family, before its way out."""
    reason = re.sub(r"/\S+/", "", reason.partition("; ")[0]).replace(owner, "the class")
    return reason.replace("|", "\\|").replace("\n", " ")


def _not_built(outcomes: dict[str, Outcomes]) -> list[str]:
    rows = ["| family | reason |", "|---|---|"]
    for family, parts in sorted(outcomes.items()):
        if parts["build"].state != HOLDS:
            rows.append(f"| {family} | {parts['build'].detail.replace('|', ' ')} |")
    return ["\n".join(rows)] if len(rows) > 2 else ["None."]
