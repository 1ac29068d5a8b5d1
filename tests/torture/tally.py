"""What happened to the cases of a category: tried, survived, refused, wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

MAX_FAILURES = 5  # of one case, that are kept in words


@dataclass
class Tally:
    """Counts of trials.

    survived: the right result; refused: one sentence and an exit code; wrong: anything else.
    """

    survived: int = 0
    refused: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.survived + self.refused + self.wrong

    def fail(self, reason: str) -> None:
        self.wrong += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(reason)

    def add(self, other: Tally) -> None:
        self.survived += other.survived
        self.refused += other.refused
        self.wrong += other.wrong
        self.failures += other.failures

    def to_line(self, **extra: str) -> str:
        return json.dumps({**extra, **asdict(self)}) + "\n"

    @classmethod
    def from_json(cls, value: dict) -> Tally:
        return cls(**{name: value[name] for name in ("survived", "refused", "wrong", "failures")})


def table(tallies: Iterable[tuple[str, Tally]]) -> str:
    """The counts by category, as a table of Markdown."""
    rows = [
        (name, tally.tried, tally.survived, tally.refused, tally.wrong) for name, tally in tallies
    ]
    lines = ["| category | tried | survived | refused | wrong |", "|---|---:|---:|---:|---:|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {name} | " + " | ".join(f"{n:,}" for n in counts) + " |"
                for name, *counts in rows
            ),
        ]
    )
