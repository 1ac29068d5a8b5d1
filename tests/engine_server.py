"""A server with OpenAI's completions and chat API, for tests: it can fail in every way."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

MODEL = "served"
CONTEXT = 4096  # tokens

Answer = tuple[int, bytes]


class EngineServer:
    """Serves on a free port of this machine; `fault` may answer a request in the place of it."""

    def __init__(self, tokenizer: Any, model: Any = None, losses: str = ""):
        self.tokenizer, self.model, self.losses = tokenizer, model, losses
        self.fault: Callable[[int, dict], Answer | None] = lambda number, body: None
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.takes_tokens = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._send(200, json.dumps({"data": [{"id": MODEL}]}).encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.keys.add(self.headers.get("Authorization", ""))
                server.requests.append(body)
                status, content = server.answer(len(server.requests), body)
                if status:
                    self._send(status, content)
                else:
                    self.close_connection = True

            def _send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, number: int, body: dict[str, Any]) -> Answer:
        if (fault := self.fault(number, body)) is not None:
            return fault
        if body["model"] != MODEL:
            return error(404, f"The model `{body['model']}` does not exist.")
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) and not self.takes_tokens:
            return error(400, "prompt must be a string.")
        if "messages" in body:
            prompt = body["messages"][-1]["content"]
        ids = prompt if isinstance(prompt, list) else self._encode(prompt)
        if len(ids) + body["max_tokens"] > CONTEXT:
            return error(400, f"This model's maximum context length is {CONTEXT} tokens.")
        choice = {"index": 0, "finish_reason": "length", **self._choice(ids, body)}
        usage = {"prompt_tokens": len(ids), "completion_tokens": body["max_tokens"]}
        return 200, json.dumps({"choices": [choice], "usage": usage}).encode()

    def _choice(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        text = self._text(ids, body["max_tokens"])
        if "messages" in body:
            return {"message": {"role": "assistant", "content": text}}
        if self.losses == "prompt_logprobs" and "prompt_logprobs" in body:
            return {"text": text, "prompt_logprobs": self._vllm(ids)}
        if self.losses == "echo" and body.get("echo"):
            values = [None, *self._logprobs(ids).tolist(), -1.0]
            return {"text": text, "logprobs": {"token_logprobs": values}}
        return {"text": text}

    def _text(self, ids: list[int], count: int) -> str:
        """The model's continuation; without a model, the key or number that the text hides."""
        if self.model is not None:
            new = self.model.generate(
                torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
            return self.tokenizer.decode(new[0, len(ids) :])
        hidden = re.findall(r"pass key is (\d+)|is: (\d+)", self.tokenizer.decode(ids))
        return f" {next((key or number for key, number in hidden), 'nothing')}"

    def _vllm(self, ids: list[int]) -> list[Any]:
        """vLLM's documented form: a dict of each token's alternatives, by id."""
        return [None] + [
            {
                str(token): {"logprob": value, "rank": 3, "decoded_token": "x"},
                str(token + 1): {"logprob": -0.1, "rank": 1, "decoded_token": "y"},
            }
            for token, value in zip(ids[1:], self._logprobs(ids).tolist(), strict=True)
        ]

    @torch.no_grad()
    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def error(status: int, message: str) -> Answer:
    return status, json.dumps({"error": {"message": message}}).encode()


def slow(seconds: float) -> Callable[[int, dict], Answer | None]:
    def fault(number: int, body: dict) -> Answer | None:
        time.sleep(seconds)
        return None

    return fault


def fails_after(count: int, answer: Answer) -> Callable[[int, dict], Answer | None]:
    return lambda number, body: answer if number > count else None
