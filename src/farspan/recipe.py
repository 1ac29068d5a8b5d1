"""Read TOML recipes into frozen dataclasses, and write them back.

A run is described by one small file, the bases it inherits from and a few `key=value` overrides.
They are checked against the types of a dataclass before the run starts, so that a misspelled key
does not cost a night of training. Writing a recipe and reading it back gives an equal dataclass:
a resumed run is the run that was started.

TOML has no null. None is an absent key, or the empty string where the default is not None.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from farspan.errors import FarspanError, suggest
from farspan.progress import ignore

T = TypeVar("T")
Keys = tuple[str, ...]
Prepare = Callable[[dict[str, Any], Path], None]

_type_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)  # slow, and asked for often
WIDTH = 100  # a longer list is written with one item a line
CLOSE = 0.6  # least similarity of a suggested name, as that of difflib.get_close_matches
WORD = 0.95  # similarity of a name with a whole word of it
TYPE_NAMES = {  # singular, plural
    str: ("a string", "strings"),
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    bool: ("true or false", "booleans"),
}


def load_recipe(
    kind: type[T],
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe_dir: Path,
    prepare: Prepare = ignore,
) -> T:
    """Read a recipe by its name in recipe_dir or by the path of a `.toml` file.

    Its bases are read first, then the file, then the overrides; later values win. `prepare` may
    change the document of each file, whose values are not checked yet, given the folder of the
    file; last the whole document, for the overrides, given the folder of the recipe's path.
    """
    document = _document(_find(str(source), recipe_dir), recipe_dir, prepare)
    for text in overrides:
        document = _overridden(kind, document, text)
    prepare(document, Path(source).parent)
    return _checked(kind, document)


def results_folder(name: str, out: str | Path | None = None) -> Path:
    """Where the results of a recipe are, by its name or path; default: runs/NAME.

    >>> str(results_folder("own/mine.toml"))
    'runs/mine'
    """
    return Path(out) if out is not None else Path("runs") / Path(name).name.removesuffix(".toml")


def recipe_keys(source: str | Path, *, recipe_dir: Path) -> set[str]:
    """The keys and tables at the top of a recipe and its bases, which say what kind it is."""
    return set(_document(_find(str(source), recipe_dir), recipe_dir))


def apply_overrides(recipe: T, overrides: Sequence[str]) -> T:
    """The recipe with `key=value` overrides."""
    document = _parse(to_toml(recipe), "the recipe")
    for text in overrides:
        document = _overridden(type(recipe), document, text)
    return _checked(type(recipe), document)


def from_toml(kind: type[T], text: str) -> T:
    """The recipe in a TOML text without a base."""
    return _checked(kind, _parse(text, "the recipe"))


def to_toml(recipe: Any) -> str:
    """The recipe with its defaults as TOML; `from_toml` reads it back as an equal dataclass."""
    return "\n".join(block + "\n" for block in _blocks(_plain(recipe)))


# Files and bases.


def _find(source: str, recipe_dir: Path, child: Path | None = None) -> Path:
    if source.endswith(".toml"):
        return child.parent / source if child else Path(source)
    names = sorted(path.stem for path in recipe_dir.glob("*.toml"))
    if source in names:
        return recipe_dir / f"{source}.toml"
    needed_by = f", the base of {child}," if child else ""
    way_out = suggest(source, names) if names else f"{recipe_dir} is empty, so give a path"
    raise FarspanError(
        f"recipe {source!r}{needed_by} was not found (a path must end in .toml); {way_out}"
    )


def _document(
    path: Path, recipe_dir: Path, prepare: Prepare = ignore, children: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """A file merged over its base, recursively."""
    document = _parse(_text(path), str(path))
    if path.resolve() in [child.resolve() for child in children]:
        cycle = " -> ".join(map(str, (*children, path)))
        raise FarspanError(f"the bases of {children[0]} form a cycle, {cycle}; remove one base")
    base = document.pop("base", None)
    prepare(document, path.parent)
    if base is None:
        return document
    if not isinstance(base, str):
        raise FarspanError(
            f"base = {_format_value(base)} in {path} is invalid; write the name or path of a recipe"
        )
    inherited = _document(_find(base, recipe_dir, path), recipe_dir, prepare, (*children, path))
    inherited.pop("title", None)  # it describes the base only
    return _merge(inherited, document)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
    except FileNotFoundError:
        raise FarspanError(
            f"{path} does not exist; give the name of a recipe or the path of a .toml file"
        ) from None
    except UnicodeDecodeError as error:
        raise FarspanError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise FarspanError(
            f"{path} cannot be read ({type(error).__name__}); give a readable file"
        ) from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FarspanError(f"{name} is nested too deeply; use fewer levels") from None
    except ValueError as error:  # a TOMLDecodeError, or a number of thousands of digits
        raise FarspanError(f"{name} is not valid TOML: {error}; fix that line") from None


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Two documents as one; the values of `changes` win, table by table."""
    tables = {
        key: _merge(base[key], value)
        for key, value in changes.items()
        if _are_tables(base.get(key), value)
    }
    return {**base, **changes, **tables}


def _are_tables(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


# Types: which keys and values a dataclass accepts.


def _schema(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    """The fields of a dataclass with their types, by TOML key: the field `from_` is `from`."""
    hints = _type_hints(kind)
    return {
        field.name.removesuffix("_"): (field, hints[field.name])
        for field in fields(kind)
        if field.init
    }


def _members(kind: Any) -> list[Any]:
    """The types of a union; float last, since it would accept integers meant for other members."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return sorted(members, key=lambda member: member is float)


def _is_config(kind: Any) -> bool:
    return is_dataclass(kind)


def _is_table(kind: Any) -> bool:
    return _is_config(kind) or get_origin(kind) is dict


def _is_only_table(kind: Any) -> bool:
    return all(_is_table(member) or member is NoneType for member in _members(kind))


def _accepts(kind: Any, value: Any) -> bool:
    """Whether a TOML value fits a type; what is in a table is checked when the table is read."""
    if get_origin(kind) in (Union, UnionType):
        return any(_accepts(member, value) for member in _members(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_accepts(get_args(kind)[0], item) for item in value)
    if _is_table(kind):
        return isinstance(value, dict)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind  # not isinstance: True is an int


def _type_at(kind: Any, keys: Keys) -> Any:
    """The type of the value at a dotted key; None if there is no such key."""
    for key in keys:
        table = next(filter(_is_table, _members(kind)), None)
        if table is None:
            return None
        if _is_config(table) and key not in _schema(table):
            return None
        kind = _schema(table)[key][1] if _is_config(table) else get_args(table)[1]
    return kind


def _leaves(kind: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Every dotted key that holds a value, with `*` for the keys of a dict."""
    for member in _members(kind):
        if _is_config(member):
            for key, (_, hint) in _schema(member).items():
                yield from _leaves(hint, (*keys, key))
        elif get_origin(member) is dict:
            yield from _leaves(get_args(member)[1], (*keys, "*"))
    if not _is_only_table(kind):
        yield keys


def _expected(kind: Any) -> str:
    """The description of a type for messages: `int | tuple[str, ...]` is
    "an integer or a list of strings"."""
    names = [_type_name(member) for member in _members(kind) if member is not NoneType]
    none = ', or "" for none' if _accepts(kind, None) and not _accepts(kind, "") else ""
    return " or ".join(names) + none


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {TYPE_NAMES.get(get_args(kind)[0], ('', 'values'))[1]}"
    return "a table" if _is_table(kind) else TYPE_NAMES.get(kind, (str(kind),))[0]


# Reading.


def _checked(kind: type[T], document: Mapping[str, Any]) -> T:
    for keys, value in _all_items(document):
        hint = _type_at(kind, keys)
        if hint is None:
            raise _unknown(kind, keys)
        absent = value in (None, "") and _accepts(hint, None)
        if _is_only_table(hint) and not isinstance(value, dict) and not absent:
            raise _not_a_table(kind, keys, value)
    return _build(kind, document, (), None)


def _all_items(table: Mapping[str, Any], prefix: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in table.items():
        yield (*prefix, key), value
        if isinstance(value, dict):
            yield from _all_items(value, (*prefix, key))


def _build(kind: type[T], table: Mapping[str, Any], prefix: Keys, default: T | None) -> T:
    """A dataclass from a table whose keys are all known; absent keys are as in the default."""
    values = {}
    for key, (field, hint) in _schema(kind).items():
        absent = _absent(field, hint, default)
        values[field.name] = (
            _read(hint, table[key], (*prefix, key), absent) if key in table else absent
        )
        if values[field.name] is MISSING:
            raise FarspanError(f"{_dotted((*prefix, key))} is missing; set it to {_expected(hint)}")
    return kind(**values)


def _absent(field: Field[Any], hint: Any, default: Any) -> Any:
    """The value of a field whose key is absent; MISSING if the key is required."""
    if default is not None:
        return getattr(default, field.name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING and _accepts(hint, None) else field.default


def _read(kind: Any, raw: Any, keys: Keys, default: Any = None) -> Any:
    value: Any = None if raw == "" and not _accepts(kind, "") else raw
    member = next((member for member in _members(kind) if _accepts(member, value)), None)
    if member is None:
        raise FarspanError(
            f"{_dotted(keys)} = {_format_value(raw)} is invalid; write {_expected(kind)}"
        )
    if _is_config(member):
        return _build(member, value, keys, default if type(default) is member else None)
    if get_origin(member) is dict:
        return {
            name: _read(get_args(member)[1], item, (*keys, name)) for name, item in value.items()
        }
    if get_origin(member) is tuple:
        return tuple(_read(get_args(member)[0], item, keys) for item in value)
    return float(value) if member is float else value


def _format_value(value: Any) -> str:
    text = "{…}" if isinstance(value, dict) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


def _unknown(kind: type, keys: Keys) -> FarspanError:
    """The error for an unknown key, with the closest known one if one is close."""
    closest = _value_above(kind, keys) or _closest(kind, keys)
    way_out = f"did you mean {'.'.join(closest)}?" if closest else ""
    way_out = way_out or f"choose one of {', '.join(_schema(kind))}"
    return FarspanError(f"a recipe has no key {_dotted(keys)}; {way_out}")


def _value_above(kind: type, keys: Keys) -> Keys:
    """The beginning of an unknown key that is a value and not a table: train.steps of
    train.steps.deep."""
    known = (keys[:depth] for depth in range(1, len(keys)) if _type_at(kind, keys[:depth]))
    return next((key for key in known if not _is_only_table(_type_at(kind, key))), ())


def _closest(kind: type, keys: Keys) -> Keys:
    """The key whose last name is closest: a value before a table, then the closest as a whole."""
    leaves = {_fill_names(leaf, keys) for leaf in _leaves(kind)}
    tables = {leaf[:depth] for leaf in leaves for depth in range(1, len(leaf))}

    def closeness(known: Keys) -> tuple[float, bool, float]:
        whole = _similarity(_dotted(known), _dotted(keys))
        return _name_similarity(known[-1], keys[-1]), known in leaves, whole

    best = max(sorted(leaves | tables), key=closeness)
    return best if closeness(best)[0] >= CLOSE else ()


def _not_a_table(kind: type, keys: Keys, value: Any) -> FarspanError:
    """The error for a value in place of a table, with the keys that may be meant."""
    leaves = list(_leaves(kind))
    same_name = [leaf for leaf in leaves if leaf[-1] == keys[-1]]
    below = [leaf for leaf in leaves if _fill_names(leaf, keys)[: len(keys)] == keys][:1]
    meant = [".".join(_fill_names(leaf, keys)) for leaf in same_name + below]
    return FarspanError(
        f"{_dotted(keys)} = {_format_value(value)} is invalid; write "
        f"{_expected(_type_at(kind, keys))}, or set {' or '.join(meant)}"
    )


def _name_similarity(known: str, typed: str) -> float:
    """`windows` is closer to `report_windows` than to `window`."""
    return max(_similarity(known, typed), WORD * (typed in known.split("_")))


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _fill_names(known: Keys, keys: Keys) -> Keys:
    """A known key with each `*` replaced by the name in `keys`, up to where the two differ."""
    for depth, (name, typed) in enumerate(zip(known, keys, strict=False)):
        if name == "*":
            known = (*known[:depth], typed, *known[depth + 1 :])
        elif name != typed:
            break
    return known


# Overrides.


def _overridden(kind: type, document: dict[str, Any], text: str) -> dict[str, Any]:
    """The document with `train.steps=100`.

    A dict is replaced as a whole, as by `methods={…}`; to a config, `search={…}` adds.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key or not equals:
        raise FarspanError(f"the override {text!r} is invalid; write it as key=value")
    keys = _resolve_key(kind, key)
    hint = _type_at(kind, keys)
    if any(get_origin(member) is dict for member in _members(hint)):
        document = _merge(document, _nested(keys, None))
    return _merge(document, _nested(keys, _value(hint, value)))


def _nested(keys: Keys, value: Any) -> dict[str, Any]:
    """("train", "steps"), 100 -> {"train": {"steps": 100}}."""
    for name in reversed(keys):
        value = {name: value}
    return value


def _resolve_key(kind: type, key: str) -> Keys:
    """The full key of a key that is typed in full, or as the last name of exactly one."""
    keys = _split(key)
    if _type_at(kind, keys) is not None:
        return keys
    matches = [leaf for leaf in _leaves(kind) if leaf[-1:] == keys]
    if not matches:
        raise _unknown(kind, keys)
    if len(matches) > 1 or "*" in matches[0]:
        raise FarspanError(
            f"the key {key} could be {' or '.join(map('.'.join, matches))}; write it in full"
        )
    return matches[0]


def _split(key: str) -> Keys:
    """`sources."a.b".weight` -> its three names, by TOML's rules where the key is valid TOML."""
    names: Keys = ()
    try:
        rest: Any = tomllib.loads(f"{key} = 0")
        while isinstance(rest, dict):
            ((name, rest),) = rest.items()
            names += (name,)
    except ValueError:  # a name that TOML would want quoted
        return tuple(key.split("."))
    return names


def _value(kind: Any, text: str) -> Any:
    """An argument of the command line as a TOML value, or as a plain string where the field takes
    a string and not the type that TOML reads."""
    if not text and _accepts(kind, None):
        return None
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):
        return text
    scalar = not isinstance(value, (list, dict))
    return text if scalar and _accepts(kind, "") and not _accepts(kind, value) else value


# Writing.


def _plain(recipe: Any, default: Any = None, prefix: Keys = ()) -> dict[str, Any]:
    """A dataclass as nested dicts by TOML key, without the keys whose absence means None."""
    table: dict[str, Any] = {}
    for key, (field, hint) in _schema(type(recipe)).items():
        value, absent = getattr(recipe, field.name), _absent(field, hint, default)
        keys = (*prefix, key)
        if is_dataclass(value):
            table[key] = _plain(value, absent if type(absent) is type(value) else None, keys)
        elif isinstance(value, dict):
            table[key] = {
                n: _plain(v, None, (*keys, n)) if is_dataclass(v) else v for n, v in value.items()
            }
        elif value is not None or absent is not None:
            table[key] = _none_value(hint, keys) if value is None else value
    return table


def _none_value(kind: Any, keys: Keys) -> str:
    if _accepts(kind, ""):
        raise FarspanError(
            f"{_dotted(keys)} is None, which TOML cannot express here; give it a string"
        )
    return ""


def _blocks(table: Mapping[str, Any], keys: Keys = ()) -> Iterator[str]:
    """The values of a table under its header, then its subtables; an empty table is one header."""
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = [
        f"{_dotted((key,))} = {_literal(value, (*keys, key))}"
        for key, value in table.items()
        if key not in tables
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
        raise TypeError(f"{_dotted(keys)} = {value!r} has a type that a recipe cannot hold")
    if not abs(value) <= sys.float_info.max:
        raise FarspanError(
            f"{_dotted(keys)} = {value} cannot be written to a recipe; use a finite number"
        )
    return re.sub(r"e\+?(-?)0*", r"e\1", float.__repr__(value))  # 1e-5 rather than 1e-05


def _list(items: list[str]) -> str:
    line = ", ".join(items)
    return (
        f"[{line}]"
        if len(line) <= WIDTH
        else "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    )


def _quoted(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FarspanError(
            f"{text!r} is not Unicode text and cannot be in a recipe; write it as UTF-8"
        ) from None
    # TOML's escapes are JSON's, except for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _dotted(keys: Keys) -> str:
    return ".".join(key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key) for key in keys)
