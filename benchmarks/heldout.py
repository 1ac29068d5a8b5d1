"""Loss and passkey retrieval inside and beyond the train length, on text no model has seen.

    python benchmarks/heldout.py nope-twin rope-twin --data path/to/data --out curves.jsonl
    python benchmarks/heldout.py runs/small-*/model --data path/to/data --out curves.jsonl
    python benchmarks/heldout.py curves.jsonl more.jsonl --figure curves     # earlier measurements

Loss is in nats per token by position: each number is the mean over the quarter of the train length
that ends there, over windows of eight train lengths, equally many of every document. The knee is
that of the loss on books (docs/diagnose.md). Passkeys are held out from training, equally many at
every depth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import farspan
from farspan.attention.model_facts import config_train_length
from farspan.data.documents import read_documents
from farspan.data.windows import cut_windows
from farspan.diagnosis.curves import mean_before
from farspan.diagnosis.knees import KneeRule, find_knee
from farspan.evals.passkey import passkey_accuracy
from farspan.files import write_text
from farspan.model.loss import token_losses
from farspan.report.figures import loss_curves
from farspan.report.style import save

SETS = ("books_val", "pg19_test_a", "math_test", "code_test")
MARKS = (0.5, 1, 1.25, 1.5, 2, 4, 8)  # in train lengths
BIN = 16  # positions; the knee is that of the whole curve


def losses(model, tokenizer, text: Path, length: int, windows: int, batch: int) -> np.ndarray:
    """Loss by position [length - 1], averaged over windows."""
    ids = cut_windows(read_documents(text), tokenizer, length, windows).ids
    total = torch.zeros(length - 1, dtype=torch.float64)
    for rows in ids.split(batch):
        total += token_losses(model, rows.to(model.device)).double().sum(0).cpu()
    return (total / len(ids)).numpy()


def measure(name: str, options: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = farspan.load(name, device=device)
    train_length = config_train_length(model.config)
    length = round(train_length * max(MARKS))
    curves = {
        text: losses(
            model,
            tokenizer,
            options.data / f"{text}.jsonl.xz",
            length,
            options.windows,
            options.batch,
        )
        for text in SETS
    }
    positions = np.arange(1, length)
    bins = range(BIN, length, BIN)
    path = Path(name)
    return {
        "label": (path.parent if path.name == "model" else path).name,
        "train_length": train_length,
        "knee": find_knee(positions, curves[SETS[0]], train_length, KneeRule(), rising=False),
        "positions": [float(part.mean()) for part in np.split(positions, bins)],
        "loss": {
            text: [round(float(part.mean()), 4) for part in np.split(curve, bins)]
            for text, curve in curves.items()
        },
        "passkey": {
            str(mark): passkey_accuracy(
                model, tokenizer, mark, keys=options.keys, batch=options.batch
            )
            for mark in marks(train_length)
        },
        "windows": options.windows,
        "keys": options.keys * 10,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def marks(train_length: int) -> list[int]:
    return [round(train_length * mark) for mark in MARKS]


def draw(table: list[dict], stem: Path) -> None:
    """Loss by position on books, one line per model."""
    curves = {result["label"]: np.repeat(result["loss"][SETS[0]], BIN) for result in table}
    save(loss_curves(curves, table[0]["train_length"], f"Loss on {SETS[0]}"), stem)


def scores(result: dict) -> dict[str, list[float]]:
    """By the name of a text, the mean loss before each mark; and the share of passkeys."""
    train_length = result["train_length"]
    rows = {
        text: [
            mean_before(mark, train_length, result["positions"], curve)
            for mark in marks(train_length)
        ]
        for text, curve in result["loss"].items()
    }
    return {**rows, "passkey": [result["passkey"][str(mark)] for mark in marks(train_length)]}


def show(result: dict) -> None:
    train_length = result["train_length"]
    print(
        f"\n{result['label']}, trained on {train_length} tokens"
        + (f", knee at {result['knee']}" if result["knee"] else "")
    )
    print("".join([f"{'':14}", *(f"{mark:>8}" for mark in marks(train_length))]))
    for name, row in scores(result).items():
        print("".join([f"{name:14}", *(f"{score:>8.3f}" for score in row)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="models, or .jsonl files of earlier runs")
    parser.add_argument("--data", type=Path, help="a folder with " + ", ".join(SETS))
    parser.add_argument("--windows", type=int, default=24, help="maximum number in each text set")
    parser.add_argument("--keys", type=int, default=10, help="at each of 10 depths")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a .jsonl file, one model a line")
    parser.add_argument("--figure", type=Path, help="path without a suffix")
    options = parser.parse_args()
    if options.data is None and not all(name.endswith(".jsonl") for name in options.models):
        parser.error("measuring a model needs text; give its folder with --data")
    table: list[dict] = []
    for name in options.models:
        results = (
            [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
            if name.endswith(".jsonl")
            else [measure(name, options)]
        )
        table += results
        for result in results:
            show(result)
        if options.out:
            write_text(options.out, "".join(json.dumps(result) + "\n" for result in table))
    if options.figure:
        draw(table, options.figure)


if __name__ == "__main__":
    main()
