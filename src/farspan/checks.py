"""Checks of the numbers of a recipe. None, a default, passes them; NaN does not."""

from __future__ import annotations

from typing import Any

from farspan.errors import FarspanError


def check_least(config: Any, least: float, *names: str, part: str = "") -> None:
    """Refuse settings below `least`. part: before their names, as "search."."""
    for name in names:
        if (value := getattr(config, name)) is not None and not value >= least:
            raise FarspanError(f"{part}{name} is {value:g}; choose {least} or more")


def check_shares(config: Any, *names: str, part: str = "") -> None:
    """Refuse settings that are no shares."""
    for name in names:
        if (value := getattr(config, name)) is not None and not 0 <= value <= 1:
            raise FarspanError(f"{part}{name} is {value:g}; choose a share from 0 to 1")
