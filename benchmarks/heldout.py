"""Loss and passkey retrieval inside and beyond the train length, on text no model has seen.

    python benchmarks/heldout.py nope-twin rope-twin --data ../shared/data   # of docs/results.md
    python benchmarks/heldout.py runs/small-*/model --data ../shared/data --json curves.json
    python benchmarks/heldout.py curves.json more.json --figure curves       # earlier measurements

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
from farspan.model.loss import token_losses
from farspan.report.figures import loss_curves
from farspan.report.style import save

SETS = ("books_val", "pg19_test_a", "math_test", "code_test")
MARKS = (0.5, 1, 1.25, 1.5, 2, 4, 8)  # in train lengths


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
    result: dict = {
        "model": name,
        "train_length": train_length,
        "loss": {},
        "passkey": {},
        "knee": None,
    }
    for text in SETS:
        length = round(train_length * max(MARKS))
        curve = losses(
            model,
            tokenizer,
            options.data / f"{text}.jsonl.xz",
            length,
            options.windows,
            options.batch,
        )
        result["loss"][text] = curve.round(4).tolist()
    for mark in MARKS:
        length = round(train_length * mark)
        result["passkey"][str(length)] = passkey_accuracy(
            model, tokenizer, length, keys=options.keys, batch=options.batch
        )
    books = np.array(result["loss"]["books_val"])
    result["knee"] = find_knee(
        np.arange(1, len(books) + 1), books, train_length, KneeRule(), rising=False
    )
    return result


def draw(table: list[dict], stem: Path) -> None:
    """Loss by position on books, one line per model."""
    names = [Path(result["model"]) for result in table]
    curves = {
        (name.parent if name.name == "model" else name).name: np.array(result["loss"][SETS[0]])
        for name, result in zip(names, table, strict=True)
    }
    save(loss_curves(curves, table[0]["train_length"], f"Loss on {SETS[0]}"), stem)


def show(result: dict) -> None:
    train_length = result["train_length"]
    marks = [round(train_length * mark) for mark in MARKS]
    print(
        f"\n{result['model']}, trained on {train_length} tokens"
        + (f", knee at {result['knee']}" if result["knee"] else "")
    )
    print("".join([f"{'':14}", *(f"{mark:>8}" for mark in marks)]))
    for text, curve in result["loss"].items():
        cells = [mean_before(mark, train_length, range(1, len(curve) + 1), curve) for mark in marks]
        print("".join([f"{text:14}", *(f"{cell:>8.3f}" for cell in cells)]), flush=True)
    print(
        "".join([f"{'passkey':14}", *(f"{result['passkey'][str(mark)]:>8.2f}" for mark in marks)]),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="models, or .json files of an earlier --json")
    parser.add_argument("--data", type=Path, help="a folder with " + ", ".join(SETS))
    parser.add_argument("--windows", type=int, default=24, help="maximum number in each text set")
    parser.add_argument("--keys", type=int, default=10, help="at each of 10 depths")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="path without a suffix")
    options = parser.parse_args()
    if options.data is None and not all(name.endswith(".json") for name in options.models):
        parser.error("measuring a model needs text; give its folder with --data")
    table: list[dict] = []
    for name in options.models:
        results = (
            json.loads(Path(name).read_text())
            if name.endswith(".json")
            else [measure(name, options)]
        )
        table += results
        for result in results:
            show(result)
        if options.json:
            options.json.write_text(json.dumps(table))
    if options.figure:
        draw(table, options.figure)


if __name__ == "__main__":
    main()
