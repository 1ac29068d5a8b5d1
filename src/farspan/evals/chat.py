"""Prompts as messages: the text that a chat template puts around the message of the user."""

from __future__ import annotations

import re
from typing import Any

from farspan.errors import FarspanError, first_line

MESSAGE = "The-message-of-the-user"
DATE = "26 Jul 2024"  # the default of templates that show the date; today's would change prompts
# In front of a template that asks for today's date by itself, which no argument can answer. The
# line break is not part of the text, and lets the template begin a line, as it did.
FIXED_DATE = (
    "{%- macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%m', '07') "
    "| replace('%d', '26') | replace('%B', 'July') | replace('%b', 'Jul') }}{% endmacro %}\n"
)


def chat_frame(tokenizer: Any, system: str | None = None) -> tuple[str, str]:
    """The text of a tokenizer's chat template before and after the message of the user.

    Thinking is switched off in templates that can do that.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise FarspanError(
            "the tokenizer has no chat template; leave --apply-chat-template out, or use a chat "
            "model"
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": MESSAGE})
    try:
        template = tokenizer.get_chat_template()
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=FIXED_DATE * ("strftime_now" in template) + template,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
            thinking=False,
            date_string=DATE,
        )
    except Exception as error:  # a template can raise anything
        raise FarspanError(
            f"the chat template of the tokenizer failed ({first_line(error)}); leave "
            f"{'--system-instruction' if system else '--apply-chat-template'} out"
        ) from None
    before, message, after = text.partition(MESSAGE)
    if not message:
        raise FarspanError(
            "the chat template of the tokenizer leaves the user's message out; leave "
            "--apply-chat-template out"
        )
    return before, after


def thinking_switch(tokenizer: Any) -> dict[str, bool]:
    """The arguments that switch thinking off in a chat template, if it has such a switch."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    switches = ("enable_thinking", "thinking")
    return {name: False for name in switches if re.search(rf"\b{name}\b", template)}
