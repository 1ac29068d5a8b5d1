"""TOML recipes become frozen dataclasses, and go back.

A run is told by one small file, its bases and a few `key=value` words. They are checked here once, against the
types of a dataclass, so that a misspelt key stops a run before it starts and not after a night. What was read can
be written, and reading that gives an equal dataclass: a run that is resumed is the run that was started.

TOML has no null. None is a key that is absent; where absence means something else, it is the empty string.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from farspan.errors import FarspanError

T = TypeVar("T")
Keys = tuple[str, ...]

WIDTH = 100  # a longer list is written with one item a line
WORDS = {
    str: ("a string", "strings"),
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    bool: ("true or false", "booleans"),
}


def load_recipe(kind: type[T], source: str | Path, overrides: Sequence[str] = (), *, shelf: Path) -> T:
    """The recipe in a `.toml` file, or of a name on the shelf, over its bases and under the overrides."""
    document = _document(_find(str(source), shelf), shelf)
    for text in overrides:
        document = _overlay(document, _override(kind, text))
    return _checked(kind, document)


def changed(recipe: T, overrides: Sequence[str]) -> T:
    """The recipe with `key=value` changes."""
    document = _parse(to_toml(recipe), "the recipe")
    for text in overrides:
        document = _overlay(document, _override(type(recipe), text))
    return _checked(type(recipe), document)


def from_toml(kind: type[T], text: str) -> T:
    """The recipe in a text that stands alone, without a base."""
    return _checked(kind, _parse(text, "the recipe"))


def to_toml(recipe: Any) -> str:
    """The whole recipe, defaults too, as text that `from_toml` reads back as an equal dataclass."""
    return "\n".join(block + "\n" for block in _blocks(_plain(recipe)))


# Files and bases.


def _find(source: str, shelf: Path, child: Path | None = None) -> Path:
    if source.endswith(".toml"):
        return child.parent / source if child else Path(source)
    names = sorted(path.stem for path in shelf.glob("*.toml"))
    if source in names:
        return shelf / f"{source}.toml"
    near = difflib.get_close_matches(source, names, 1)
    known = f"the nearest is {near[0]}" if near else f"there are {', '.join(names)}" if names else f"{shelf} is empty"
    asked = f", the base of {child}" if child else ""
    raise FarspanError(f"there is no recipe {source!r}{asked}; {known}, and a path must end in .toml")


def _document(path: Path, shelf: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file laid over its base, and that over its own."""
    document = _parse(_text(path), str(path))
    if path.resolve() in [other.resolve() for other in above]:
        circle = " -> ".join(map(str, (*above, path)))
        raise FarspanError(f"the bases of {above[0]} run in a circle, {circle}; take one base out")
    base = document.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise FarspanError(f"base = {_shown(base)} in {path} does not fit; write the name or path of one recipe")
    below = _document(_find(base, shelf, path), shelf, (*above, path))
    below.pop("title", None)  # it tells of the base
    return _overlay(below, document)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
    except FileNotFoundError:
        raise FarspanError(f"{path} does not exist; give a recipe's name, or the path of a .toml file") from None
    except UnicodeDecodeError as error:
        raise FarspanError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise FarspanError(f"{path} cannot be read ({type(error).__name__}); give a file that you may read") from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FarspanError(f"{name} is nested too deeply to be read; write it flatter") from None
    except ValueError as error:  # a TOMLDecodeError, or a number of thousands of digits
        raise FarspanError(f"{name} is not valid TOML: {error}; mend it there") from None


def _overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _overlay(base[key], value) for key, value in over.items() if _are_tables(base.get(key), value)}
    return {**base, **over, **both}


def _are_tables(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


# Types: what a dataclass has a place for.


def _schema(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    """The fields of a dataclass with their types, by the key each has in TOML: `from_` is `from`."""
    hints = get_type_hints(kind)
    return {field.name.removesuffix("_"): (field, hints[field.name]) for field in fields(kind) if field.init}


def _members(kind: Any) -> list[Any]:
    """The types of a union; float last, for it would take the integers of its neighbours."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return sorted(members, key=lambda member: member is float)


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind)


def _is_table(kind: Any) -> bool:
    return _is_record(kind) or get_origin(kind) is dict


def _takes(kind: Any, value: Any) -> bool:
    """Whether a TOML value has the shape of a type; what is in a table is asked when the table is read."""
    if get_origin(kind) in (Union, UnionType):
        return any(_takes(member, value) for member in _members(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_takes(get_args(kind)[0], item) for item in value)
    if _is_table(kind):
        return isinstance(value, dict)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind  # and not isinstance, for a bool is no int


def _at(kind: Any, keys: Keys) -> Any:
    """The type of what stands at a dotted key; None where there is no place."""
    for key in keys:
        table = next(filter(_is_table, _members(kind)), None)
        if table is None:
            return None
        if _is_record(table) and key not in _schema(table):
            return None
        kind = _schema(table)[key][1] if _is_record(table) else get_args(table)[1]
    return kind


def _leaves(kind: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Every dotted key that holds a value, with `*` for the free names of a dict."""
    for member in _members(kind):
        if _is_record(member):
            for key, (_, hint) in _schema(member).items():
                yield from _leaves(hint, (*keys, key))
        elif get_origin(member) is dict:
            yield from _leaves(get_args(member)[1], (*keys, "*"))
    if not all(_is_table(member) or member is NoneType for member in _members(kind)):
        yield keys


def _wanted(kind: Any) -> str:
    """`int | tuple[str, ...]` in words: an integer or a list of strings."""
    words = [_word(member) for member in _members(kind) if member is not NoneType]
    none = ', or "" for none' if _takes(kind, None) and not _takes(kind, "") else ""
    return " or ".join(words) + none


def _word(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {WORDS.get(get_args(kind)[0], ('', 'values'))[1]}"
    return "a table" if _is_table(kind) else WORDS.get(kind, (str(kind),))[0]


# Reading.


def _checked(kind: type[T], document: Mapping[str, Any]) -> T:
    for keys in _all_keys(document):
        if _at(kind, keys) is None:
            raise _unknown(kind, keys)
    return _build(kind, document, (), None)


def _all_keys(table: Mapping[str, Any], above: Keys = ()) -> Iterator[Keys]:
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _all_keys(value, (*above, key))


def _build(kind: type[T], table: Mapping[str, Any], above: Keys, default: T | None) -> T:
    """A dataclass from a table whose keys are all known; what is absent is as in the default, where there is one."""
    values = {}
    for key, (field, hint) in _schema(kind).items():
        absent = _absent(field, hint, default)
        values[field.name] = _read(hint, table[key], (*above, key), absent) if key in table else absent
        if values[field.name] is MISSING:
            raise FarspanError(f"{_dotted((*above, key))} is missing; write {_wanted(hint)} for it")
    return kind(**values)


def _absent(field: Field[Any], hint: Any, default: Any) -> Any:
    """What a field is when a recipe does not say it; MISSING when it has to."""
    if default is not None:
        return getattr(default, field.name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING and _takes(hint, None) else field.default


def _read(kind: Any, given: Any, keys: Keys, default: Any = None) -> Any:
    value: Any = None if given == "" and not _takes(kind, "") else given
    member = next((member for member in _members(kind) if _takes(member, value)), None)
    if member is None:
        raise FarspanError(f"{_dotted(keys)} = {_shown(given)} does not fit; write {_wanted(kind)}")
    if _is_record(member):
        return _build(member, value, keys, default if type(default) is member else None)
    if get_origin(member) is dict:
        return {name: _read(get_args(member)[1], item, (*keys, name)) for name, item in value.items()}
    if get_origin(member) is tuple:
        return tuple(_read(get_args(member)[0], item, keys) for item in value)
    return float(value) if member is float else value


def _shown(value: Any) -> str:
    text = "{…}" if isinstance(value, dict) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


def _unknown(kind: type, keys: Keys) -> FarspanError:
    """A misspelt key is near a known one as a whole, or by its last name in another table."""

    def nearness(known: Keys) -> tuple[float, float]:
        whole, last = _alike(_dotted(known), _dotted(keys)), _alike(known[-1], keys[-1])
        return max(whole, last), whole

    known = {_named(leaf[:depth], keys) for leaf in _leaves(kind) for depth in range(1, len(leaf) + 1)}
    nearest: Keys = max(sorted(known), key=nearness)
    return FarspanError(f"a recipe has no key {_dotted(keys)}; the nearest is {'.'.join(nearest)}")


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _named(known: Keys, keys: Keys) -> Keys:
    """A known key with its `*` named as in the key that was given, as far as the two agree."""
    for depth, (name, given) in enumerate(zip(known, keys, strict=False)):
        if name == "*":
            known = (*known[:depth], given, *known[depth + 1 :])
        elif name != given:
            break
    return known


# Overrides.


def _override(kind: type, text: str) -> dict[str, Any]:
    """`train.steps=100` -> the small document {"train": {"steps": 100}}."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key or not equals:
        raise FarspanError(f"the override {text!r} is no key and value; write it as key=value")
    keys = _resolved(kind, key)
    tree = _value(_at(kind, keys), value)
    for name in reversed(keys):
        tree = {name: tree}
    return tree


def _resolved(kind: type, key: str) -> Keys:
    """The full key for a full key, or for the last name of exactly one."""
    keys = _split(key)
    if _at(kind, keys) is not None:
        return keys
    meant = [leaf for leaf in _leaves(kind) if leaf[-1:] == keys]
    if not meant:
        raise _unknown(kind, keys)
    if len(meant) > 1 or "*" in meant[0]:
        raise FarspanError(f"the key {key} could be {' or '.join(map('.'.join, meant))}; write it in full")
    return meant[0]


def _split(key: str) -> Keys:
    """`sources."a.b".weight` -> its three names, by TOML's own rules where they hold."""
    names: Keys = ()
    try:
        rest: Any = tomllib.loads(f"{key} = 0")
        while isinstance(rest, dict):
            ((name, rest),) = rest.items()
            names += (name,)
    except ValueError:  # no TOML key; a name that should be quoted may still be plain
        return tuple(key.split("."))
    return names


def _value(kind: Any, text: str) -> Any:
    """A word of the command line as TOML, or as it stands where the field takes a string and not what TOML makes."""
    if not text and _takes(kind, None):
        return None
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):
        return text
    scalar = not isinstance(value, (list, dict))
    return text if scalar and _takes(kind, "") and not _takes(kind, value) else value


# Writing.


def _plain(recipe: Any, default: Any = None, above: Keys = ()) -> dict[str, Any]:
    """A dataclass as nested dicts by TOML key, without what is None when absent."""
    table: dict[str, Any] = {}
    for key, (field, hint) in _schema(type(recipe)).items():
        value, absent, keys = getattr(recipe, field.name), _absent(field, hint, default), (*above, key)
        if is_dataclass(value):
            table[key] = _plain(value, absent if type(absent) is type(value) else None, keys)
        elif isinstance(value, dict):
            table[key] = {n: _plain(v, None, (*keys, n)) if is_dataclass(v) else v for n, v in value.items()}
        elif value is not None or absent is not None:
            table[key] = _written_none(hint, keys) if value is None else value
    return table


def _written_none(kind: Any, keys: Keys) -> str:
    if _takes(kind, ""):
        raise FarspanError(f"{_dotted(keys)} is None, which TOML cannot tell from its default; give it a string")
    return ""


def _blocks(table: Mapping[str, Any], keys: Keys = ()) -> Iterator[str]:
    """A table's own values under its header, then its tables; an empty table is a header alone."""
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = [
        f"{_dotted((key,))} = {_literal(value, (*keys, key))}" for key, value in table.items() if key not in tables
    ]
    if keys and (lines or not tables):
        lines.insert(0, f"[{_dotted(keys)}]")
    if lines:
        yield "\n".join(lines)
    for key, value in tables.items():
        yield from _blocks(value, (*keys, key))


def _literal(value: Any, keys: Keys) -> str:
    if isinstance(value, tuple):
        return _list([_literal(item, keys) for item in value])
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, float):
        raise TypeError(f"{_dotted(keys)} = {value!r} is of a type that a recipe cannot hold")
    if not abs(value) <= sys.float_info.max:
        raise FarspanError(f"{_dotted(keys)} = {value} cannot be written to a recipe; give it a finite number")
    return re.sub(r"e\+?(-?)0*", r"e\1", float.__repr__(value))  # 1e-5 rather than 1e-05


def _list(items: list[str]) -> str:
    line = ", ".join(items)
    return f"[{line}]" if len(line) <= WIDTH else "[\n" + "".join(f"    {item},\n" for item in items) + "]"


def _quoted(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FarspanError(f"{text!r} is not Unicode text and cannot be in a recipe; write it as UTF-8") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's, but for DEL


def _dotted(keys: Keys) -> str:
    return ".".join(key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key) for key in keys)
