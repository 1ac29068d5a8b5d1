"""How good are models inside their training length, and how do they fail beyond it? On text none of them has seen.

    python benchmarks/heldout.py nope-twin rope-twin --data ../shared/data            # the tables of docs/results.md
    python benchmarks/heldout.py runs/small-*/model --data ../shared/data --json curves.json --figure curves
    python benchmarks/heldout.py curves.json more.json --figure curves                # what was measured before, again

Loss in nats a token by position (a position's number is the mean over the quarter of the training length that ends
with it, over windows of eight training lengths, as many of every document), the knee of the loss on books
(docs/diagnose.md), and the share of passkeys told right, with keys that no model was trained on, as many of every
depth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import farspan
from farspan.data.documents import read_documents
from farspan.data.windows import cut_windows
from farspan.diagnosis.knees import Rule, find_knee
from farspan.evals.passkey import passkey_share
from farspan.model.loss import token_losses
from farspan.report.figures import loss_curves
from farspan.report.study import quarter_before
from farspan.report.style import save
from farspan.workflows.inspection import train_length

SETS = ("books_val", "pg19_test_a", "math_test", "code_test")
MARKS = (0.5, 1, 1.25, 1.5, 2, 4, 8)  # of the training length


def losses(model, tokenizer, text: Path, length: int, windows: int, batch: int) -> np.ndarray:
    """Loss by position [length - 1], the mean over windows."""
    ids = cut_windows(read_documents(text), tokenizer, length, windows).ids
    total = torch.zeros(length - 1, dtype=torch.float64)
    for rows in ids.split(batch):
        total += token_losses(model, rows.to(model.device)).double().sum(0).cpu()
    return (total / len(ids)).numpy()


def measure(name: str, options: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = farspan.load(name, device=device)
    trained = train_length(model.config)
    found: dict = {"model": name, "train_length": trained, "loss": {}, "passkey": {}, "knee": None}
    for text in SETS:
        length = round(trained * max(MARKS))
        curve = losses(model, tokenizer, options.data / f"{text}.jsonl.xz", length, options.windows, options.batch)
        found["loss"][text] = curve.round(4).tolist()
    for mark in MARKS:
        length = round(trained * mark)
        found["passkey"][str(length)] = passkey_share(model, tokenizer, length, keys=options.keys, batch=options.batch)
    books = np.array(found["loss"]["books_val"])
    found["knee"] = find_knee(np.arange(1, len(books) + 1), books, trained, Rule(), rising=False)
    return found


def draw(table: list[dict], stem: Path) -> None:
    """Loss by position on books, a line a model."""
    names = [Path(found["model"]) for found in table]
    curves = {
        (name.parent if name.name == "model" else name).name: np.array(found["loss"][SETS[0]])
        for name, found in zip(names, table, strict=True)
    }
    save(loss_curves(curves, table[0]["train_length"], f"Loss on {SETS[0]}"), stem)


def show(found: dict) -> None:
    trained = found["train_length"]
    marks = [round(trained * mark) for mark in MARKS]
    print(f"\n{found['model']}, trained on {trained} tokens" + (f", knee at {found['knee']}" if found["knee"] else ""))
    print("".join([f"{'':14}", *(f"{mark:>8}" for mark in marks)]))
    for text, curve in found["loss"].items():
        cells = [quarter_before(mark, trained, range(1, len(curve) + 1), curve) for mark in marks]
        print("".join([f"{text:14}", *(f"{cell:>8.3f}" for cell in cells)]), flush=True)
    print("".join([f"{'passkey':14}", *(f"{found['passkey'][str(mark)]:>8.2f}" for mark in marks)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="models, or .json files of an earlier --json")
    parser.add_argument("--data", type=Path, help="a folder with " + ", ".join(SETS))
    parser.add_argument("--windows", type=int, default=24, help="of text, at most, in each set")
    parser.add_argument("--keys", type=int, default=10, help="of each of 10 depths")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="without its ending")
    options = parser.parse_args()
    if options.data is None and not all(name.endswith(".json") for name in options.models):
        parser.error("models are measured on text; say where it lies with --data")
    table: list[dict] = []
    for name in options.models:
        more = json.loads(Path(name).read_text()) if name.endswith(".json") else [measure(name, options)]
        table += more
        for found in more:
            show(found)
        if options.json:
            options.json.write_text(json.dumps(table))
    if options.figure:
        draw(table, options.figure)


if __name__ == "__main__":
    main()
