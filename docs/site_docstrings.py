"""Docstrings as Markdown for the API page: lists of arguments, and examples as code."""

from __future__ import annotations

import re

import griffe

ARGUMENT = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (.*)")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A line `name: text` as an entry of a list, and lines from `>>>` on as a fenced block.

    >>> as_markdown("Load.\\n\\nmodel: a folder.\\n>>> load()")
    'Load.\\n\\n- `model`: a folder.\\n\\n```pycon\\n>>> load()\\n```'
    >>> as_markdown("Write a new folder: patch.json.")
    'Write a new folder: patch.json.'
    """
    prose, arrows, example = text.partition(">>>")
    lines = [ARGUMENT.sub(r"- `\1`: \2", line) for line in prose.splitlines()]
    for number in range(len(lines) - 1, 0, -1):  # Markdown wants a blank line before a list
        before = lines[number - 1]
        if lines[number].startswith("- `") and before and not before.startswith(("- `", "  ")):
            lines.insert(number, "")
    text = "\n".join(lines).rstrip()
    return f"{text}\n\n```pycon\n{arrows}{example.rstrip()}\n```" if arrows else text
