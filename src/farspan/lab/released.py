"""Examples from JSON Lines: farspan's own form, and the forms of Kazemnejad 2023's released data.

The released files hold the parts of a question, not its text: two numbers and their sum, or a list
and the sorted list. They become the questions of farspan's tasks, in words with single spaces. The
released prompts differ in wording only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.data.jsonlines import read_rows
from farspan.errors import CorruptError
from farspan.lab.tasks import Example, answer, digits, format_list

Row = Mapping[str, Any]
Text = tuple[str, str]  # input, target


def read_examples(file: Path) -> list[Example]:
    """The distinct examples of a file, in its order."""
    rows = list(read_rows(file))
    # Parity and summation have the same fields; the numbers of a sum go beyond bits.
    bits = all(_is_bits(row.get("values", ())) for _, row in rows)
    examples: dict[str, Example] = {}
    for number, row in rows:
        example = _read_example(row, bits, f"{file}, line {number}")
        if examples.setdefault(example.input, example).target != example.target:
            raise CorruptError(
                f"{file}, line {number} has the input of an earlier line and another target; "
                "remove one of them"
            )
    if not examples:
        raise CorruptError(f"{file} has no examples; write one JSON object a line")
    return list(examples.values())


def _is_bits(values: Any) -> bool:
    return (isinstance(values, list) and all(value in (0, 1) for value in values)) or not values


def _read_example(row: Row, bits: bool, place: str) -> Example:
    form = next((form for form in FORMS if set(form) <= row.keys()), None)
    if form is None:
        missing = [field for field in FORMS_OWN if field not in row]
        raise CorruptError(
            f"{place} has no {missing[0]!r}; write input and target as text, and length as an "
            "integer"
        )
    own = form == FORMS_OWN
    length = row["length"] if own else _category(row[form[-1]])
    if type(length) is not int or length < 1:
        raise CorruptError(
            f"{place} has the {form[-1]} {row[form[-1]]!r}; write an integer above 0"
        )
    try:
        text = FORMS[form]({**row, "bits": bits})
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise CorruptError(
            f"{place} has the fields {', '.join(form)} with values of other types "
            f"({type(error).__name__}: {error}); correct it"
        ) from None
    for field, part in zip(("input", "target"), text, strict=True):
        if not isinstance(part, str) or not part.split():
            raise CorruptError(f"{place} has the {field} {part!r}; write text of one or more words")
        if any("\ud800" <= character <= "\udfff" for character in part):
            raise CorruptError(
                f"{place} has the {field} {part[:60]!r} with half of a surrogate pair, which is no "
                "character; write whole characters"
            )
    question, target = (" ".join(part.split()) for part in text)
    return Example(question, target, length)


def _category(value: Any) -> Any:
    """The length by the released category: 5, "5", "5-by-3" (digits) or [5, 4] (LEGO's clauses)."""
    numbers = [int(number) for number in re.findall(r"\d+", str(value))]
    return max(numbers, default=None)


def _own(row: Row) -> Text:
    return row["input"], row["target"]


def _language(row: Row) -> Text:
    return row["source"], row["target"]


def _addition(row: Row) -> Text:
    question = f"Compute {digits(int(row['a']))} + {digits(int(row['b']))} ?"
    return question, answer([digits(int(row["sum"]))])


def _polynomial(row: Row) -> Text:
    pairs = zip(row["coeffs"], row["degrees"], strict=True)
    terms = " ".join(f"{'-' if c < 0 else '+'} {abs(c)} x ** {power}" for c, power in pairs)
    question = f"Evaluate x = {digits(row['x'])} in ( {terms} ) % 10 ?"
    return question, answer([digits(row["answer"] % 10)])


def _lego(row: Row) -> Text:
    clauses = " , ".join(re.sub(r"([+-])(\S)", r"\1 \2", clause) for clause in row["clauses"])
    question = f"If {clauses} . Then , what is the value of {row['query']} ?"
    value = dict(row["truth_values"])[row["query"]]
    return question, answer([{"0": "- 1", "1": "+ 1"}[str(value)]])


def _values(row: Row) -> Text:
    if not row["bits"]:
        question = f"Compute ( {' + '.join(map(str, row['values']))} ) % 10 ?"
        return question, answer([digits(row["answer"] % 10)])
    question = f"Is the number of ones even in {' '.join(map(str, row['values']))} ?"
    even = {"0": "yes", "1": "no"}.get(str(row["answer"]), str(row["answer"]).lower())
    return question, answer([even])


def _sequence(row: Row) -> Text:
    """Text is copied or reversed, a list is sorted."""
    source, target = row["src_seq"], row["tgt_seq"]
    if isinstance(source, str):
        if {"source_char", "target_char"} <= row.keys():
            source = f"Replace {row['source_char']} with {row['target_char']} in {source}"
        return source, target
    return f"Sort {_format(source)} ?", answer([_format(target)])


def _format(items: Sequence[Any]) -> str:
    numbers = all(isinstance(item, int) for item in items)
    return format_list(items) if numbers else " ".join(items)


FORMS_OWN = ("input", "target", "length")
# Fields -> text; the last field is the length.
FORMS: dict[tuple[str, ...], Callable[[Row], Text]] = {
    FORMS_OWN: _own,
    ("source", "target", "category"): _language,  # SCAN, PCFG SET
    ("a", "b", "sum", "cat"): _addition,
    ("coeffs", "degrees", "x", "answer", "cat"): _polynomial,
    ("clauses", "truth_values", "query", "cat"): _lego,
    ("values", "answer", "cat"): _values,  # summation, parity
    ("src_seq", "tgt_seq", "cat"): _sequence,  # copy, reverse, sort
}
