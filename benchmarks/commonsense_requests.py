"""Commonsense on a machine without lm-evaluation-harness: its requests, written as tokens where it
is installed, are scored where only the model is.

    python benchmarks/commonsense_requests.py write MODEL bench requests.jsonl.xz --limit 1000
    python benchmarks/commonsense_requests.py score requests.jsonl.xz MODEL … --out scores.jsonl

MODEL is anything that farspan loads; all of them must have the tokenizer of the first. Scores are
those of `farspan eval --suite commonsense`, up to the rounding of another batch.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import farspan
from farspan.evals.commonsense import TASKS, Commonsense, evaluate_task, silenced
from farspan.files import write_text
from farspan.loading import load_tokenizer


def write_requests(model: str, data: Path, limit: int, out: Path) -> None:
    from lm_eval.api.model import TemplateLM

    tokenizer = load_tokenizer(model)

    class RequestWriter(TemplateLM):
        """Keeps the tokens of each request; every likelihood is 0."""

        backend = "causal"
        eot_token_id = tokenizer.eos_token_id
        tokenizer_name = str(model)
        requests: list[tuple[list[int], list[int]]]

        def tok_encode(self, string: str, add_special_tokens: bool = False, **kwargs: Any):
            return tokenizer.encode(string, add_special_tokens=add_special_tokens)

        def _loglikelihood_tokens(self, requests, **kwargs):
            self.requests = [(context, continuation) for _, context, continuation in requests]
            return [(0.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests, **kwargs):
            raise NotImplementedError

        def generate_until(self, requests, **kwargs):
            raise NotImplementedError

    lines = []
    for name in TASKS:
        writer = RequestWriter()
        with tempfile.TemporaryDirectory() as folder, silenced():
            task = Commonsense(data, 0, limit=limit)._task(name, Path(folder))
            items = evaluate_task(writer, task, limit)
        requests = iter(writer.requests)
        for item in items:
            # acc_norm divides by the length of a choice without the space in front of it
            texts = [continuation.removeprefix(" ") for _, continuation in item["arguments"]]
            tokens = [next(requests) for _ in texts]
            # winogrande's target is a text; its two requests have it after either option
            target = int(item["doc"]["answer"]) - 1 if name == "winogrande" else item["target"]
            lines.append({"task": name, "target": int(target), "texts": texts, "tokens": tokens})
    with lzma.open(out, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@torch.no_grad()
def likelihoods(model: PreTrainedModel, requests: list, batch_tokens: int) -> list[float]:
    """The log-likelihood of each continuation after its context; rows are padded on the right."""
    results = [0.0] * len(requests)
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    while order:
        width = sum(map(len, requests[order[0]]))
        count = max(1, batch_tokens // width)
        batch, order = order[:count], order[count:]
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens = [token for part in requests[i] for token in part]
            ids[row, : len(tokens)] = torch.tensor(tokens)
        logits = model(ids.to(model.device), use_cache=False).logits
        for row, i in enumerate(batch):
            context, continuation = requests[i]
            start = len(context) - 1
            rows = logits[row, start : start + len(continuation)].float().log_softmax(-1)
            wanted = torch.tensor(continuation, device=rows.device)[:, None]
            results[i] = rows.gather(1, wanted).sum().item()
    return results


def score(model: PreTrainedModel, lines: list[dict[str, Any]], batch_tokens: int) -> dict:
    """acc_norm of each task, acc where the harness has no other, and their mean."""
    requests = [tokens for line in lines for tokens in line["tokens"]]
    scored = iter(likelihoods(model, requests, batch_tokens))
    hits: dict[str, list[bool]] = defaultdict(list)
    for line in lines:
        values = [next(scored) for _ in line["texts"]]
        if "acc_norm" in TASKS[line["task"]].metrics:
            values = [value / len(text) for value, text in zip(values, line["texts"], strict=True)]
        hits[line["task"]].append(values.index(max(values)) == line["target"])
    shares = {task: round(sum(right) / len(right), 4) for task, right in hits.items()}
    items = {task: len(right) for task, right in hits.items()}
    return {"scores": shares, "average": sum(shares.values()) / len(shares), "items": items}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    writing = modes.add_parser("write")
    writing.add_argument("model")
    writing.add_argument("data", type=Path)
    writing.add_argument("out", type=Path)
    writing.add_argument("--limit", type=int, default=1000)
    scoring = modes.add_parser("score")
    scoring.add_argument("requests", type=Path)
    scoring.add_argument("models", nargs="+")
    scoring.add_argument("--batch-tokens", type=int, default=16_384)
    scoring.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.mode == "write":
        write_requests(args.model, args.data, args.limit, args.out)
        return
    with lzma.open(args.requests, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    results = []
    for name in args.models:
        model, _ = farspan.load(name, dtype=dtype, device=device)
        results.append({"model": Path(name).name, **score(model, lines, args.batch_tokens)})
        print(json.dumps(results[-1]), flush=True)
    write_text(args.out, "".join(json.dumps(line) + "\n" for line in results))


if __name__ == "__main__":
    main()
