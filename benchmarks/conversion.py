"""Judge a patch of `swan` beside its base: the loss of the same tokens by the length of their
context, as paired differences to the base, and passkeys; also for other slopes of global layers.

    python benchmarks/conversion.py PATCH --text books_val.jsonl.xz --text pg19_test_a.jsonl.xz \\
        --longest 65536 --slopes 0 0.1 0.3 --out results.json

The result is one line for a file of docs/records.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

import farspan
from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.begin_of_text import load_with_begin_of_text
from farspan.data.documents import read_documents
from farspan.data.windows import cut_windows
from farspan.evals.passkey import passkey_accuracy
from farspan.files import write_text
from farspan.intervals import mean_bound
from farspan.lengths import doublings
from farspan.model.loss import losses_by_context


def set_slope(model: PreTrainedModel, patch: Patch, slope: float) -> None:
    layers, heads = patch.layout.global_layers, probe(model)[0].heads
    ones = torch.ones(len(layers), heads)
    seam.install(model, Scales(layers, ones, slope * ones, "log", patch.train_length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(";")[0])
    parser.add_argument("patch", type=Path)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--longest", type=int, required=True, help="tokens of a window")
    parser.add_argument("--shortest", type=int, help="default: an eighth of the train length")
    parser.add_argument("--windows", type=int, default=64, help="of each text, one of a document")
    parser.add_argument("--scored", type=int, help="tokens at the end; default: at most 512")
    parser.add_argument("--slopes", type=float, nargs="*", default=[], help="beside the patch")
    parser.add_argument("--keys", type=int, default=20, help="passkeys at each of 10 depths")
    parser.add_argument("--group", help="the tables of docs/results that show this group")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    patch = Patch.load(args.patch)
    if args.shortest and args.shortest > patch.train_length:
        parser.error(
            f"--shortest is {args.shortest}, and the base is measured up to its train length of "
            f"{patch.train_length}; choose that or less"
        )
    base = farspan.load(patch.name, dtype=dtype, device=device).model
    model, tokenizer, begin = load_with_begin_of_text(args.patch, dtype=dtype, device=device)
    for note in begin.notes:
        print(note)
    args.begin = len(begin.ids)
    contexts = doublings(args.shortest or patch.train_length // 8, args.longest)
    args.scored = args.scored or min(512, contexts[0] // 2)
    inside = [context for context in contexts if context <= patch.train_length]
    cut = [
        cut_windows(read_documents(text), tokenizer, args.longest, args.windows, begin=begin.ids)
        for text in args.text
    ]
    windows = torch.cat([each.ids[: len(each.used)] for each in cut])  # documents take turns
    documents = [
        f"{text} {number}"
        for text, each in zip(args.text, cut, strict=True)
        for number in each.documents[: len(each.used)]
    ]
    losses: dict[str, dict[int, list[float]]] = {}
    passkeys: dict[str, dict[str, float]] = {}
    losses["base"], passkeys["base"] = measure(base, tokenizer, windows, inside, args)
    for slope in (None, *args.slopes):
        name = "patch" if slope is None else f"slope {slope:g}"
        if slope is not None:
            set_slope(model, patch, slope)
        losses[name], passkeys[name] = measure(model, tokenizer, windows, contexts, args)
        size = f"{len(windows)} windows of {len(set(documents))} documents"
        print(f"{name}, {size}: loss minus that of the base")
        for context in contexts:
            expected = losses["base"][min(context, inside[-1])]
            difference = np.subtract(losses[name][context], expected)
            bound = mean_bound(difference, documents)
            shown = "" if bound is None else f" ± {bound:.4f}"
            print(f"  {context:7,d}  {difference.mean():+.4f}{shown}", flush=True)
    rounded = {
        name: {str(context): np.round(values, 5).tolist() for context, values in own.items()}
        for name, own in losses.items()
    }
    record = {"label": args.patch.name, "group": args.group, "texts": args.text}
    record |= {"scored": args.scored, "documents": documents, "losses": rounded}
    if args.keys:
        record["passkeys"] = {"n": 10 * args.keys, **passkeys}
    write_text(args.out, json.dumps(record) + "\n")


def measure(
    model: PreTrainedModel,
    tokenizer: object,
    windows: torch.Tensor,
    contexts: list[int],
    args: argparse.Namespace,
) -> tuple[dict[int, list[float]], dict[str, float]]:
    losses = losses_by_context(model, windows, contexts, args.scored, args.begin)
    passkeys = {
        str(context): passkey_accuracy(model, tokenizer, context, keys=args.keys, batch=10)
        for context in contexts
        if args.keys
    }
    print(f"passkeys {passkeys}", flush=True)
    return losses, passkeys


if __name__ == "__main__":
    main()
