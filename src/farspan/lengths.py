"""The grammar of lengths and ranges, the same in every command."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from farspan.errors import FarspanError

MAX_EXAMPLE_LENGTH = 10_000


def parse_lengths(text: str | float | Iterable[float | str]) -> list[int]:
    """Lengths and ranges, separated by commas; a range is doubled up to its end.

    `512,1024` -> [512, 1024]; `512:4096` -> [512, 1024, 2048, 4096]; `16k` -> [16384]. Numbers are
    lengths already.
    """
    if not isinstance(text, str | Iterable):
        return [parse_length(text)]
    if not isinstance(text, str):
        return [length for part in text for length in parse_lengths(part)]
    lengths: list[int] = []
    for part in text.split(","):
        low, colon, high = part.partition(":")
        first = _length(low, text)
        last = _length(high, text) if colon else first
        if last < first:
            raise FarspanError(f"lengths {text!r} are in the wrong order; write {high}:{low}")
        lengths += doublings(first, last)
    return sorted(set(lengths))


def doublings(first: int, last: int) -> list[int]:
    """The first length, its doublings below the last, and the last.

    >>> doublings(512, 3000)
    [512, 1024, 2048, 3000]
    """
    lengths = []
    while 0 < first < last:
        lengths.append(first)
        first *= 2
    return [*lengths, last]


def parse_length(text: str | float) -> int:
    """`2048` -> 2,048; `16k` -> 16,384. A whole number is a length already."""
    if isinstance(text, Integral):
        return int(text)
    return _length(str(text), str(text), "2048 or 16k")


def _length(text: str, whole: str, form: str = "512,1024 or 512:4096 or 16k") -> int:
    number = text.strip().lower()
    factor = 1024 if number.endswith("k") else 1
    digits = number.removesuffix("k")
    if not digits.isdecimal() or len(digits) > 12 or int(digits) == 0:
        where = f"{text!r} in {whole!r}" if text != whole else repr(text)
        raise FarspanError(f"{where} is not a length; write it as {form}")
    return int(digits) * factor


def parse_length_range(text: str) -> tuple[int, int]:
    """`2:20` -> (2, 20), both ends included; `7` -> (7, 7). Lengths of examples of the lab."""
    low, _, high = text.partition(":")
    high = high or low
    if not (low.isdecimal() and high.isdecimal()) or not 1 <= int(low) <= int(high):
        raise FarspanError(
            f"{text!r} is not a range of lengths; write the shortest and the longest, as in 2:20"
        )
    if int(high) > MAX_EXAMPLE_LENGTH:
        raise FarspanError(
            f"length {high} is too long for the lab; choose at most {MAX_EXAMPLE_LENGTH}"
        )
    return int(low), int(high)


def parse_scales(text: str) -> list[float]:
    """`0.8:1.4:0.1` -> [0.8, 0.9, …, 1.4]; `1.2` -> [1.2]; `1,1.5` -> [1.0, 1.5]."""
    try:
        if ":" not in text:
            values = [float(part) for part in text.split(",")]
        else:
            low, high, step = (float(part) for part in text.split(":"))
            count = (high - low) / step + 1e-6
            values = (
                [round(low + i * step, 6) for i in range(int(count) + 1)]
                if 0 <= count < 1000
                else []
            )
        if not values or not all(0 < value < 1000 for value in values):
            raise ValueError
    except (ValueError, ZeroDivisionError, OverflowError):
        raise FarspanError(
            f"{text!r} is not a range of scales; write it as 0.8:1.4:0.1 or 1.2,1.5"
        ) from None
    return values
