"""Requests to a server with OpenAI's API: many at a time, repeated when it fails for a while.

Every failure is one sentence. A key is read from the environment, and no message contains it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from farspan.errors import CorruptError, FarspanError, UnavailableError, option_name, suggest

KEY = "OPENAI_API_KEY"
TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
CONNECT_TIMEOUT = 10.0  # seconds
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between two attempts, doubled each time
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOO_LONG = re.compile(
    r"context|too long|too many tokens|exceed|max\w*.?(model.?len|length)|max\w*.?tokens.*\d"
)
NO_MODEL = re.compile(
    r"model\b.*(not|n.t) (be )?(exist|found|available|loaded|served)|"
    r"model\W*(is )?(unknown|invalid)|(no such|unknown|invalid|unsupported|not a valid) model|"
    r"model.?not.?found|pinned to"
)
VERSION = re.compile(r"/v\d\w*$")  # the end of the URL of most servers

T = TypeVar("T")
Reply = dict[str, Any]


class RefusedError(FarspanError):
    """The server answered with a status that another attempt would not change."""


class FailingError(UnavailableError):
    """The server answers, with a status that another attempt may change."""

    retry_after: float | None = None  # seconds, as the server asks for


def _is_plain(url: str) -> bool:
    """A host, perhaps with a port and a path, and nothing that could be a secret."""
    try:
        httpx2.URL(url)
        parts = urlsplit(url)
        secrets = (parts.username, parts.password, parts.query, parts.fragment)
        return bool(parts.hostname) and parts.port != 0 and not any(secrets)
    except (httpx2.InvalidURL, ValueError):
        return False


def is_url(source: object) -> bool:
    """
    >>> is_url("http://localhost:8000/v1"), is_url("runs/extended")
    (True, False)
    """
    return str(source).startswith(("http://", "https://"))


@dataclass(frozen=True)
class EngineClient:
    """A server by its URL, with the patience that requests have."""

    url: str  # up to and with /v1
    num_concurrent: int = 8
    timeout: float = 600.0  # seconds for one answer
    max_retries: int = 5
    keeps_answers: bool = True  # so that a repeated command asks only for the others
    temporary: tuple[int, ...] = TEMPORARY  # statuses after which a request is repeated

    def __post_init__(self):
        if not _is_plain(self.url):
            raise FarspanError(
                f"{self.url[:12]}… is not the plain URL of a server; give it as "
                f"http://localhost:8000/v1, and a key by the environment variable {KEY}"
            )
        for name, least in (("num_concurrent", 1), ("timeout", 0.001), ("max_retries", 0)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise FarspanError(f"{option_name(name)} is {value}; use {least} or more")
        object.__setattr__(self, "url", self.url.rstrip("/"))
        if self.url.endswith("/completions"):
            whole = self.url.removesuffix("/completions").removesuffix("/chat")
            raise FarspanError(f"{self.url} is the URL of a request; give {whole}")

    def models(self) -> list[dict[str, Any]]:
        """What the server says that it serves; empty if it does not say."""
        once = replace(self, max_retries=0)

        async def ask(client: httpx2.AsyncClient) -> list[dict[str, Any]]:
            try:
                data = (await once._request(client, "GET", "/models", None)).get("data")
            except (RefusedError, CorruptError, FailingError):
                return []
            listed = data if isinstance(data, list) else []
            return [each for each in listed if isinstance(each, dict)]

        return _run(self._with_client(ask))

    def post_all(
        self, path: str, bodies: Sequence[Any], on_reply: Callable[[int, Reply], None]
    ) -> None:
        """Send all bodies; `on_reply` gets each reply with its number as soon as it is there.

        The first failure stops the rest.
        """

        async def ask_all(client: httpx2.AsyncClient) -> None:
            slots = asyncio.Semaphore(self.num_concurrent)

            async def ask(number: int) -> None:
                async with slots:
                    on_reply(number, await self._request(client, "POST", path, bodies[number]))

            await asyncio.gather(*map(ask, range(len(bodies))))

        _run(self._with_client(ask_all))

    def post(self, path: str, body: Any) -> Reply:
        replies: list[Reply] = []
        self.post_all(path, [body], lambda number, reply: replies.append(reply))
        return replies[0]

    def probe(self, path: str, body: Any) -> Reply:
        """Post what a server may not support; a status 500 is then its refusal, too."""
        statuses = tuple(status for status in self.temporary if status != 500)
        return replace(self, temporary=statuses).post(path, body)

    async def _with_client(self, ask: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        key, parts = _key(), urlsplit(self.url)
        if not re.fullmatch(r"[!-~]*", key):
            raise FarspanError(
                f"the environment variable {KEY} has characters that no key has; set it again"
            )
        async with httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(self.timeout, connect=CONNECT_TIMEOUT),
            limits=httpx2.Limits(max_connections=self.num_concurrent),
            verify=parts.scheme == "https",  # reading certificates takes a while
            trust_env=parts.hostname not in LOOPBACK,  # no proxy for this machine
        ) as client:
            return await ask(client)

    async def _request(
        self, client: httpx2.AsyncClient, method: str, path: str, body: Any
    ) -> Reply:
        """A JSON object, after as many attempts as needed."""
        wait = FIRST_WAIT
        for attempt in range(self.max_retries + 1):
            try:
                async with asyncio.timeout(self.timeout):
                    response = await client.request(method, f"{self.url}{path}", json=body)
                return self._reply(response, body)
            except (TimeoutError, httpx2.RequestError, FailingError, CorruptError) as error:
                if attempt == self.max_retries:
                    raise self._failure(error, attempt + 1) from None
                asked = getattr(error, "retry_after", None)
                await asyncio.sleep(min(LONGEST_WAIT, asked or wait * random.uniform(0.75, 1.25)))
                wait *= 2
        raise AssertionError("every attempt returns or raises")

    def _reply(self, response: httpx2.Response, body: Any) -> Reply:
        status = response.status_code
        if status in self.temporary:
            error = FailingError(f"status {status}: {_message(response)}")
            after = response.headers.get("retry-after", "")
            error.retry_after = float(after) if after.isdecimal() else None
            raise error
        if status >= 300:
            raise self._refusal(status, _message(response), body or {})
        try:
            reply = response.json()
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("error"):
            raise CorruptError(f"a reply that is not a JSON object: {_message(response)}")
        return reply

    def _failure(self, error: Exception, attempts: int) -> FarspanError:
        """The last error, when no attempt is left."""
        tried = f"{attempts} attempt{'s' * (attempts > 1)}"
        kept = "finished answers are kept: " * self.keeps_answers
        way_out = f"{kept}start the server, and rerun the same command"
        if isinstance(error, CorruptError):
            return CorruptError(
                f"the server at {self.url} sends {error} ({tried}); check that the URL is that of "
                "an OpenAI-compatible API, and rerun the same command"
            )
        if isinstance(error, FailingError):
            return FailingError(f"the server at {self.url} fails ({error}; {tried}); {way_out}")
        if isinstance(error, TimeoutError | httpx2.TimeoutException):
            return UnavailableError(
                f"the server at {self.url} did not answer within {self.timeout:g} seconds "
                f"({tried}); {kept}rerun the same command"
                + ", with a longer --timeout or a smaller --num-concurrent"
                * self.keeps_answers
            )
        why = str(error) or type(error).__name__
        return UnavailableError(
            f"the server at {self.url} cannot be reached ({why}; {tried}); {way_out}"
        )

    def _refusal(self, status: int, message: str, body: Any) -> RefusedError:
        reason, model = f"status {status}: {message}", str(body.get("model") or "")
        text = re.sub(rf"(?<!\w){re.escape(model)}(?!\w)", "", message) if model else message
        text = text.lower()  # without the name, which may say anything
        if status in (401, 403):
            return RefusedError(
                f"the server at {self.url} refuses the key ({reason}); set {KEY} in the environment"
            )
        if TOO_LONG.search(text):
            return RefusedError(
                f"the server at {self.url} refuses a prompt as too long ({reason}); choose shorter "
                "--lengths, or start it with a longer context"
            )
        named = model and NO_MODEL.search(text)
        if status in (404, 405) and not named and not VERSION.search(self.url):
            return RefusedError(
                f"the server at {self.url} has no such page ({reason}); give its URL with "
                f"{self.url}/v1"
            )
        if named or (model and status == 404):
            return RefusedError(
                f"the server at {self.url} has no model {model!r} ({reason}); "
                f"{self._way_to_model(model)}"
            )
        return RefusedError(
            f"the server at {self.url} refuses a request ({reason}); check the URL, and what the "
            "server supports"
        )

    def _way_to_model(self, name: str) -> str:
        try:
            names = [str(each.get("id")) for each in self.models()]
        except FarspanError:
            names = []
        return f"with --model, {suggest(name, names)}" if names else "check --model and the URL"


def _key() -> str:
    """The key as it is sent; a file that it was read from may end with a line break."""
    return os.environ.get(KEY, "").strip()


def _message(response: httpx2.Response) -> str:
    """The beginning of what a server says, without the key."""
    text = response.text
    try:
        content = json.loads(text)  # most servers wrap it in one of these
        for name in ("error", "detail", "message"):
            content = content.get(name, content) if isinstance(content, dict) else content
        text = content if isinstance(content, str) else json.dumps(content)
    except (ValueError, RecursionError):
        pass
    if key := _key():
        text = text.replace(key, "…")
    text = " ".join(text.split())
    return repr(text[:200] + "…" * (len(text) > 200)) if text else "an empty reply"


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, also where a loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def run_in_thread() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_in_thread)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
