"""A model behind a server with OpenAI's API: continuations of prompts, and losses of their tokens.

A prompt is sent as token ids where the server takes them, else as text. Every answer is stored when
it arrives, so that a failure loses none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from farspan.cells import Cells, cell_key
from farspan.data.tokens import encode, fingerprint
from farspan.errors import CorruptError, FarspanError, suggest
from farspan.evals.chat import thinking_switch
from farspan.evals.engine_http import VERSION, EngineClient, RefusedError, Reply
from farspan.train.metadata import begin_of_text

APIS = ("completions", "chat")
# Different tokenizers split this into different numbers of tokens.
PROBE = (
    "The 1,234,567 quick brown foxes don't jump over “naïve” dogs (α = 0.25);\n\tsee "
    "def parse_lengths(text: str) -> list[int]:  # antidisestablishmentarianism, Überprüfung\n"
)
MALFORMED = (KeyError, TypeError, IndexError, ValueError, AttributeError)  # reading a reply
# Of a prompt; a server that reads less has cut it. It may have another chat template than ours.
LOST_SHARES = {"completions": 0.02, "chat": 0.1}


@dataclass(frozen=True)
class EngineOptions:
    """The settings of a server; `num_concurrent`, `timeout` and `max_retries` change no result."""

    served_model: str = ""  # its name on the server; default: the only one
    tokenizer: str = ""  # any MODEL with the tokenizer of the served one
    api: str = APIS[0]
    num_concurrent: int = 8  # requests at a time
    timeout: float = 600.0  # seconds for one answer
    max_retries: int = 5

    def __post_init__(self):
        if self.api not in APIS:
            raise FarspanError(f"--api {self.api} is unknown; {suggest(self.api, APIS)}")


class Generated(NamedTuple):
    """A continuation, and the tokens that the model read before it."""

    text: str
    tokens: int


@dataclass(eq=False)
class Engine:
    """One served model, in the place of a loaded one."""

    client: EngineClient
    tokenizer: Any
    model: str
    api: str
    takes_tokens: bool  # prompts as token ids
    adds_begin: bool  # its tokenizer begins a text with a begin-of-text token
    system: str | None = None  # the system message of a chat
    answers: Cells | None = None  # what was answered before
    on_answer: Callable[[int, int], None] = lambda done, total: None
    _loss_form: str | None = field(default=None, init=False)

    @classmethod
    def connect(
        cls, url: str, tokenizer: Any, options: EngineOptions, keeps_answers: bool = True
    ) -> Engine:
        """Ask the server for its models, and find out which prompts it takes.

        keeps_answers: whether the caller will store them.
        """
        patience = (options.num_concurrent, options.timeout, options.max_retries)
        client = EngineClient(url, *patience, keeps_answers)
        model = options.served_model or _only_model(client)
        engine = cls(client, tokenizer, model, options.api, False, False)
        if options.api == "completions":
            engine.takes_tokens, engine.adds_begin = engine._probe()
        return engine

    @property
    def identity(self) -> dict[str, str]:
        """What an answer depends on, as far as a client can know it."""
        return {
            "engine": self.client.url,
            "model": self.model,
            "api": self.api,
            "prompts": "tokens" if self.takes_tokens else "text",
            "tokenizer": fingerprint(self.tokenizer),
            "begin of text": str(begin_of_text(self.tokenizer)),
        }

    def generate(
        self, rows: Sequence[list[int]], max_new_tokens: int, frame: tuple[str, str] | None = None
    ) -> list[Generated]:
        """The greedy continuation of each prompt.

        frame: the text of a chat template in the prompts, which the chat API adds by itself.
        """
        prompts = [self._prompt(row, frame) for row in rows]
        body = {"model": self.model, "max_tokens": max_new_tokens, "temperature": 0}
        chat = self.api == "chat"
        bodies = [{**body, **({"messages": p} if chat else {"prompt": p})} for p in prompts]
        if chat and (switch := thinking_switch(self.tokenizer)):
            bodies = [{**each, "chat_template_kwargs": switch} for each in bodies]

        def read(number: int, reply: Reply) -> dict[str, Any]:
            choice = reply["choices"][0]
            text = choice["message"]["content"] if chat else choice["text"]
            if not isinstance(text, str | None):
                raise TypeError(f"an answer is no text, but of the type {type(text).__name__}")
            counted = _prompt_tokens(reply)
            tokens = len(rows[number]) if counted is None else counted
            self._check_whole(tokens, len(rows[number]))
            return {"text": text or "", "tokens": tokens}

        path = "/chat/completions" if chat else "/completions"
        return [Generated(**answer) for answer in self._ask(path, bodies, read)]

    def losses(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """The loss in nats of every token of each row but the first."""
        form = self.loss_form
        if form is None:
            raise FarspanError(
                f"the server at {self.client.url} returns no log-probabilities of prompts; choose "
                "a suite of generated answers: passkey, needle, ruler or longbench"
            )
        bodies = [{**self._loss_body(form), "prompt": self._prompt(row)} for row in rows]

        def read(number: int, reply: Reply) -> dict[str, Any]:
            row, counted = rows[number], _prompt_tokens(reply)
            expected = len(row) + self._offset
            if counted not in (None, expected):
                self._check_whole(counted, expected)
                raise RefusedError(
                    f"the server at {self.client.url} takes prompts as text and reads {counted} "
                    f"tokens for {expected}, so its log-probabilities are of other tokens; choose "
                    "a suite of generated answers, or a server that takes token ids"
                )
            return {"losses": prompt_losses(form, reply["choices"][0], row, self._offset)}

        return [answer["losses"] for answer in self._ask("/completions", bodies, read)]

    @property
    def loss_form(self) -> str | None:
        """Where the log-probabilities of a prompt are in a reply; None: the server has none."""
        if self._loss_form is None:
            ids = [*begin_of_text(self.tokenizer), *encode(self.tokenizer, PROBE)]
            self._loss_form = next((form for form in LOSS_FORMS if self._has(form, ids)), "")
        return self._loss_form or None

    def _has(self, form: str, ids: list[int]) -> bool:
        if self.api != "completions":
            return False
        try:
            reply = self.client.probe(
                "/completions", {**self._loss_body(form), "prompt": self._prompt(ids)}
            )
            prompt_losses(form, reply["choices"][0], ids, self._offset)
        except (RefusedError, CorruptError, *MALFORMED):
            return False
        return True

    def _loss_body(self, form: str) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": 1, "temperature": 0, **LOSS_FORMS[form]}

    @property
    def _offset(self) -> int:
        """Tokens that a server puts in front of a text which the row does not have."""
        return int(not self.takes_tokens and self.adds_begin and not begin_of_text(self.tokenizer))

    def _ask(
        self, path: str, bodies: Sequence[Any], read: Callable[[int, Reply], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The answers to all requests: stored ones first, each new one stored at once."""
        keys = [cell_key({"engine": self.client.url, "path": path, **body}) for body in bodies]
        answers = [self.answers.get(key) if self.answers else None for key in keys]
        missing = [number for number, answer in enumerate(answers) if answer is None]

        def on_reply(position: int, reply: Reply) -> None:
            number = missing[position]
            try:
                answer = read(number, reply)
            except MALFORMED as error:
                raise CorruptError(
                    f"a reply of the server at {self.client.url} is not in the form of OpenAI's "
                    f"API ({type(error).__name__}: {error}); check the URL and --api {self.api}"
                ) from None
            answers[number] = answer
            if self.answers is not None:
                self.answers.put(keys[number], {"path": path, "model": self.model}, answer)
            self.on_answer(sum(each is not None for each in answers), len(bodies))

        self.client.post_all(path, [bodies[number] for number in missing], on_reply)
        return [answer for answer in answers if answer is not None]

    def _prompt(self, row: Sequence[int], frame: tuple[str, str] | None = None) -> Any:
        """What stands for a row of tokens in a request."""
        if self.takes_tokens:
            return list(row)
        begin, chat = begin_of_text(self.tokenizer), self.api == "chat"
        # A frame goes as a whole, with the begin-of-text token that it may have.
        added = frame is None if chat else self.adds_begin
        if added and list(row[: len(begin)]) == begin:
            row = row[len(begin) :]
        text = self.tokenizer.decode(list(row))
        if not chat:
            return text
        if frame is not None:
            text = without_frame(text, frame)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]

    def keeps(self, row: Sequence[int]) -> bool:
        """Whether the server reads these tokens, as far as its tokenizer is that of the client."""
        if self.takes_tokens:
            return True
        begin = begin_of_text(self.tokenizer)
        text = list(row[len(begin) :] if list(row[: len(begin)]) == begin else row)
        return encode(self.tokenizer, self.tokenizer.decode(text)) == text

    def _probe(self) -> tuple[bool, bool]:
        """Does the server take token ids, and does it begin texts with a token of its own?"""
        ids = encode(self.tokenizer, PROBE)
        body = {"model": self.model, "max_tokens": 1, "temperature": 0}
        reply = self.client.post("/completions", {**body, "prompt": PROBE})
        counted = _prompt_tokens(reply)
        if counted is not None and counted - len(ids) not in (0, 1):
            raise FarspanError(
                f"the server at {self.client.url} splits a text into {counted} tokens, and "
                f"--tokenizer into {len(ids)}; give the tokenizer of the served model"
            )
        try:
            reply = self.client.probe("/completions", {**body, "prompt": ids})
        except RefusedError:
            return False, counted == len(ids) + 1
        read = _prompt_tokens(reply)
        return read in (None, len(ids)), counted == len(ids) + 1

    def _check_whole(self, read: int, sent: int) -> None:
        """Refuse a server that silently drops a part of a prompt."""
        least = sent * (1 - LOST_SHARES[self.api]) - 8
        if read < least or (self.takes_tokens and read != sent):
            raise RefusedError(
                f"the server at {self.client.url} read {read} tokens of a prompt of {sent}; start "
                "it with a longer context, or choose shorter --lengths"
            )


# By form: what a request adds. vLLM has a field of its own; others echo the prompt.
LOSS_FORMS: Mapping[str, Mapping[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True, "logprobs": 1},
}


def prompt_losses(
    form: str, choice: Mapping[str, Any], ids: Sequence[int], offset: int = 0
) -> list[float]:
    """The losses of all tokens but the first, from one choice of a reply.

    >>> prompt_losses("echo", {"logprobs": {"token_logprobs": [None, -0.5, -2.0]}}, [7, 8])
    [0.5]
    """
    if form == "prompt_logprobs":
        entries = choice["prompt_logprobs"][offset:]
        logprobs: list[Any] = [
            entry[str(token)]["logprob"] if entry else None
            for entry, token in zip(entries, ids, strict=True)
        ]
    else:
        logprobs = choice["logprobs"]["token_logprobs"][offset : offset + len(ids)]
    losses = [-float(value) for value in logprobs[1:]]
    if len(logprobs) != len(ids) or not all(map(math.isfinite, losses)):
        raise ValueError(f"{len(losses)} finite log-probabilities of {len(ids)} tokens")
    return losses


def without_frame(text: str, frame: tuple[str, str]) -> str:
    """The message in a prompt with a chat template, followed by the start of the answer.

    >>> without_frame("<user>What is it?<end><bot>It is", ("<user>", "<end><bot>"))
    'What is it? It is'
    """
    before, after = frame
    if not after:
        raise FarspanError(
            "the tokenizer's chat template adds nothing behind the message of the user, so the "
            "start of the answer cannot be told from it; use --api completions"
        )
    message, separator, answer = text.removeprefix(before).rpartition(after)
    if not text.startswith(before) or not separator:
        raise FarspanError(
            "the tokenizer does not decode its own chat template; use --api completions"
        )
    return f"{message} {answer}" if answer else message


def _prompt_tokens(reply: Reply) -> int | None:
    """The tokens of a prompt as the server counts them, if it does."""
    usage = reply.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None


def _only_model(client: EngineClient) -> str:
    names = [str(each.get("id")) for each in client.models()]
    if len(names) != 1:
        served = f"serves {', '.join(names)}" if names else "does not say what it serves"
        version = "" if names or VERSION.search(client.url) else f", or use {client.url}/v1"
        raise FarspanError(f"the server at {client.url} {served}; add --model NAME{version}")
    return names[0]
