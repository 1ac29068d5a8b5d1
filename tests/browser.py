"""A page in headless Chromium, driven by the DevTools protocol over two pipes.

python tests/browser.py report.html FOLDER    # screenshots at three widths, light and dark
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTHS = (390, 800, 1400)  # a phone, a tablet, a desktop
SCHEMES = ("light", "dark")


def chromium() -> str | None:
    """Debian's program, or that of other distributions."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Browser:
    """One tab; `requests` and `errors` collect what the pages asked for and complained about."""

    def __init__(self, program: str) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._numbers = itertools.count(1)
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4. The copies have higher
        # numbers, so that neither replaces the other.
        high = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 10) for pipe in (commands, answers)]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--disable-dev-shm-usage"]  # containers have little of it
        options += ["--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"]
        options += [f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [program, *options],
            preexec_fn=lambda: [os.dup2(pipe, 3 + number) for number, pipe in enumerate(high)],
            pass_fds=(3, 4),
            stderr=subprocess.DEVNULL,
        )
        for pipe in (commands, answers, *high):
            os.close(pipe)
        self._unread = b""
        self._session: dict[str, str] = {}
        targets = self.call("Target.getTargets")["targetInfos"]
        (tab,) = (target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._out)  # Chromium ends when nobody can send it commands
        self._process.wait(20)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not (part := os.read(self._in, 1 << 16)):
                raise RuntimeError("Chromium ended")
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            if not (url := details["request"]["url"]).startswith("data:"):
                self.requests.append(url)
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("warning", "error"):
            self.errors.append(details["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("warning", "error"):
            self.errors.append(json.dumps(details["args"]))

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript; a promise is awaited."""
        options = {"awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def open(self, page: Path, width: int = WIDTHS[-1], scheme: str = SCHEMES[0]) -> None:
        self._emulate(width, scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._wait_until_drawn(width, scheme)

    def open_site(self, page: Path, width: int, scheme: str) -> None:
        """A page that is no report."""
        self._emulate(width, scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._wait_until("document.readyState === 'complete'")

    def show(self, width: int, scheme: str) -> None:
        """Change the size of the window and the color scheme of the open report."""
        self._emulate(width, scheme)
        self._wait_until_drawn(width, scheme)

    def _emulate(self, width: int, scheme: str) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 600, **size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)

    def _wait_until_drawn(self, width: int, scheme: str) -> None:
        """A report writes down for which screen its charts are drawn."""
        self._wait_until(f"document.documentElement?.dataset.drawn === '{width} {scheme}'")

    def _wait_until(self, condition: str) -> None:
        """At most 30 s."""
        self.evaluate(
            "new Promise((done, fail) => { const start = Date.now(); (function wait() {"
            f"if ({condition}) done(); else if (Date.now() - start > 30000) fail('not drawn');"
            "else setTimeout(wait, 20) })() })"
        )

    def screenshot(self, file: Path) -> None:
        """The whole page, as far as it scrolls."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))


def main(page: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Browser(chromium() or sys.exit("install chromium")) as browser:
        browser.open(page)
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            browser.show(width, scheme)
            browser.screenshot(folder / f"{page.stem}-{width}-{scheme}.png")
        sys.stdout.write("\n".join([*browser.errors, *browser.requests]) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
