"""Perplexity of the windows that `farspan eval` scored, by a plain loop over a transformers model.

    farspan eval MODEL --suite perplexity --data TEXT --lengths 512,2048 --windows 3 -o results
    python benchmarks/plain_perplexity.py MODEL TEXT results [--bos]

--bos puts the begin-of-text token in the place of the first token, as `eval` does for models that
were trained with one.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch.nn import functional as F

import farspan
from farspan.evals.perplexity import read_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("results", type=Path, help="the folder of `farspan eval`")
    parser.add_argument("--bos", action="store_true")
    options = parser.parse_args()
    model, tokenizer = farspan.load(options.model)
    text = read_text(options.text.name, options.text, tokenizer)
    for file in sorted((options.results / "cells").glob("*.json")):
        windows = json.loads(file.read_text(encoding="utf-8"))["result"]["samples"]
        total = 0.0
        for window in windows:
            document = text.ids[text.documents.index(window["document"])]
            ids = document[window["start"] : window["end"]].long()[None]
            if options.bos:
                ids = torch.cat([ids.new_tensor([[tokenizer.bos_token_id]]), ids[:, 1:]], dim=1)
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, -window["scored"] - 1 : -1].float()
            total += F.cross_entropy(logits, ids[0, -window["scored"] :], reduction="sum").item()
        tokens = sum(window["scored"] for window in windows)
        ours = math.exp(sum(window["nll"] for window in windows) / tokens)
        print(
            f"{len(windows)} windows of {windows[0]['length']} tokens: "
            f"farspan {ours:.4f}, plain {math.exp(total / tokens):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
