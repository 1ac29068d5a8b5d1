"""All categories, in the order of the table."""

from __future__ import annotations

from torture.corruption import CORRUPTION
from torture.faults import IO_FAULTS
from torture.fuzzing import FUZZING
from torture.kills import KILLS

CATEGORIES = {category.name: category for category in (KILLS, IO_FAULTS, CORRUPTION, FUZZING)}
