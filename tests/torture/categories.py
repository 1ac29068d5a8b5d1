"""All categories, in the order of the table."""

from __future__ import annotations

from torture.corruption import CORRUPTION
from torture.faults import IO_FAULTS
from torture.fuzzing import FUZZING
from torture.hostile import HOSTILE
from torture.kills import KILLS
from torture.many import MANY
from torture.memory import MEMORY_BOUNDS

CATEGORIES = {
    category.name: category
    for category in (KILLS, IO_FAULTS, CORRUPTION, HOSTILE, FUZZING, MANY, MEMORY_BOUNDS)
}
