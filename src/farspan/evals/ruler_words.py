"""The words, keys, values and chains that RULER's prompts are made of, drawn at random."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from farspan.evals import needle
from farspan.evals.needle import draw_distinct, draw_names

DEPTHS = 40  # evenly from the beginning to the end of a text
WORDS_FILE = Path(__file__).parent.parent / "assets" / "words.txt"  # none contains another

ADJECTIVES = f"""{needle.ADJECTIVES} ancient blunt bright broad careful cheerful clumsy cold
common crisp curious deep distant dull early elegant empty famous fierce firm fragile fresh frozen
funny giant grand grateful happy harsh heavy honest humble jealous large late lazy lively lonely
loud lucky modest narrow neat nervous odd patient plain polite proud pure purple rare robust rough
royal rural sharp shiny shy simple sleepy slow smooth sour steady steep strict sturdy subtle sweet
tall tidy tiny vivid warm weary witty young"""
NOUNS = f"""{needle.NOUNS} artist autumn bakery basket beacon blanket bottle bridge butter cabin
camera canyon carpet castle cellar chimney circus citizen copper cottage cousin curtain dancer
diamond doctor dolphin drawer eagle elbow emperor factory farmer feather fiddle fountain galaxy
glacier guitar hammer helmet honey jungle kitchen ladder lawyer lemon letter library lizard magnet
marble mirror monkey mountain museum napkin novel ocean onion oyster palace parrot pencil pepper
piano pirate planet potato puzzle rabbit river rocket sailor scarf shadow shovel spider statue
stomach teacher tiger tractor village violin wagon whistle wizard zebra"""


def draw_depths(rng: np.random.Generator, count: int) -> tuple[float, ...]:
    return tuple((rng.choice(DEPTHS, count, replace=False) / (DEPTHS - 1)).tolist())


def draw_places(rng: np.random.Generator, count: int) -> tuple[float, ...]:
    """Depths anywhere in repeated noise or other needles, in order."""
    return tuple(sorted(rng.random(count).tolist()))


def draw_uuids(rng: np.random.Generator) -> Iterator[str]:
    while True:
        yield str(uuid.UUID(bytes=rng.bytes(16), version=4))


def draw_values(rng: np.random.Generator, uuids: bool) -> Iterator[str]:
    """Distinct numbers of seven digits, or UUIDs."""
    if uuids:
        yield from draw_uuids(rng)
    taken: set[int] = set()
    while True:
        number = int(rng.integers(needle.NUMBERS.start, needle.NUMBERS.stop))
        if number not in taken:
            taken.add(number)
            yield str(number)


def draw_keys(rng: np.random.Generator, uuids: bool = False) -> Iterator[str]:
    """Distinct pairs of an adjective and a noun (then with a second adjective), or UUIDs."""
    if uuids:
        yield from draw_uuids(rng)
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    order = rng.permutation(len(adjectives) * len(nouns)).tolist()
    for first in ("", *(f"{adjectives[place]}-" for place in rng.permutation(len(adjectives)))):
        for place in order:
            yield f"{first}{adjectives[place // len(nouns)]}-{nouns[place % len(nouns)]}"


@cache
def plain_words() -> tuple[str, ...]:
    return tuple(WORDS_FILE.read_text(encoding="utf-8").split())


def draw_words(rng: np.random.Generator) -> Iterator[str]:
    """Distinct words; when all are drawn, compounds."""
    words = plain_words()
    yield from (words[place] for place in rng.permutation(len(words)))
    yield from (key.replace("-", "") for key in draw_keys(rng))


def numbered(words: list[str], start: int = 0) -> str:
    return " ".join(f"{start + place}. {word}" for place, word in enumerate(words, 1))


def draw_chain(
    rng: np.random.Generator, letters: int, exclude: str = ""
) -> tuple[list[str], str, list[str]]:
    """The variables of a chain with four hops, their value, and the assignments."""
    names = draw_names(rng, 5, letters)
    value = next(each for each in draw_distinct(rng, needle.VALUES, 2) if each != exclude)
    sources = [value, *(f"VAR {name} " for name in names)]  # RULER's spaces
    return names, value, [f"VAR {name} = {of}" for name, of in zip(names, sources, strict=False)]
