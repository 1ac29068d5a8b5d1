"""SCAN: navigation commands and their actions, as a grammar and an interpreter.

The grammar is small enough to enumerate: the whole language has 20,910 commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

VERBS = {"walk": ("I_WALK",), "look": ("I_LOOK",), "run": ("I_RUN",), "jump": ("I_JUMP",)}
SIDES = {"left": "I_TURN_LEFT", "right": "I_TURN_RIGHT"}
TIMES = {"twice": 2, "thrice": 3}
VOCABULARY = (
    *(*VERBS, "turn", *SIDES, "opposite", "around", *TIMES, "and", "after"),
    *(action for actions in VERBS.values() for action in actions),
    *SIDES.values(),
)


def commands() -> Iterator[str]:
    """Every command of the language, each once."""
    single = [" ".join(words) for words in _repeated()]
    yield from single
    for first, join, second in product(single, ("and", "after"), single):
        yield f"{first} {join} {second}"


def _repeated() -> Iterator[tuple[str, ...]]:
    for phrase, times in product(_phrases(), ((), *((word,) for word in TIMES))):
        yield (*phrase, *times)


def _phrases() -> Iterator[tuple[str, ...]]:
    """A verb, or a verb (or `turn`) with a direction."""
    yield from ((verb,) for verb in VERBS)
    for verb, manner, side in product((*VERBS, "turn"), ((), ("opposite",), ("around",)), SIDES):
        yield (verb, *manner, side)


def actions(command: str) -> tuple[str, ...]:
    """The actions of a command.

    >>> actions("jump left after walk twice")
    ('I_WALK', 'I_WALK', 'I_TURN_LEFT', 'I_JUMP')
    """
    words = command.split()
    if "and" in words:
        first, second = command.split(" and ")
        return actions(first) + actions(second)
    if "after" in words:
        second, first = command.split(" after ")
        return actions(first) + actions(second)
    if words[-1] in TIMES:
        return actions(" ".join(words[:-1])) * TIMES[words[-1]]
    verb = VERBS.get(words[0], ())  # `turn` has no action besides its direction
    if len(words) == 1:
        return verb
    side = (SIDES[words[-1]],)
    if "around" in words:
        return (side + verb) * 4
    if "opposite" in words:
        return side * 2 + verb
    return side + verb
