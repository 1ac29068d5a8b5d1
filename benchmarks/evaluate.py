"""Evaluation against the straightforward loops: how much faster, and are the numbers the same?

    python benchmarks/evaluate.py                # the tables of docs/performance.md
    python benchmarks/evaluate.py --small --length 512 --stride 64 --longest 512     # to try it without a GPU

A 1.1B rotary model, random weights in bf16, as ours and as transformers' Llama with the same weights. `ours` is what
`farspan eval` runs: windows in batches, compiled layers, logits of scored tokens alone, in the last layer their
queries alone; passkeys with their answers given ahead, the keys of a cell together, the beginning that all texts share
computed once. `plain` is what one would write by hand: Llama on SDPA, one window at a time with full logits and labels,
and `generate` for one prompt at a time. Both take turns in one process; times are medians between synchronisations.
Since random weights tell no key, hits are compared on the NoPE twin as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from shapes import SHAPE, SMALL
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import farspan
from farspan.attention import seam
from farspan.evals.passkey import Beginning, Passkey, grid_lengths
from farspan.evals.perplexity import Perplexity, Text
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.fast import compiled_layers


def twice(shape: dict, device: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One set of weights as our model and as Llama."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        ours = FarspanForCausalLM(FarspanConfig(**shape, position="rope")).to(dtype).eval()
        plain = LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).eval()
    left = plain.load_state_dict(ours.state_dict(), strict=False)
    assert not left.missing_keys, left
    return ours, plain


def timed(work: Callable[[], object], device: str) -> tuple[float, object]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


@torch.no_grad()
def window_by_window(model: PreTrainedModel, windows: Tensor, stride: int) -> list[float]:
    """The loss of each window's last tokens, by labels."""
    losses = []
    for window in windows:
        ids = window[None].to(model.device)
        labels = ids.clone()
        labels[:, :-stride] = -100
        losses.append(model(input_ids=ids, labels=labels, use_cache=False).loss)
    return torch.stack(losses).double().tolist()


def perplexity(ours: PreTrainedModel, plain: PreTrainedModel, options: argparse.Namespace, device: str) -> dict:
    length, stride, count = options.length, options.stride, options.windows
    ids = torch.randint(ours.config.vocab_size, (length + (count - 1) * stride,), dtype=torch.int32)
    evaluation = Perplexity((Text("random", ("random",), (ids,), ""),), (length,), "paper-a", stride)
    cells = evaluation.cells()
    windows = ids.unfold(0, length, stride).long()
    ways = {
        "ours": lambda: [s["nll"] / s["scored"] for cell in cells for s in evaluation.run(cell, ours, None)],
        "plain": lambda: window_by_window(plain, windows, stride),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    with compiled_layers(ours) if device == "cuda" else nullcontext():
        for way in ways.values():  # compilation, and what else happens once
            for _ in range(2):
                timed(way, device)
        for number in range(options.rounds):
            for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
                seconds, found[name] = timed(ways[name], device)
                times[name].append(seconds)
    median = {name: 1e3 * statistics.median(some) / count for name, some in times.items()}
    means = {name: statistics.mean(losses) for name, losses in found.items()}
    return {
        "milliseconds_a_window": median,
        "ratio": statistics.median(a / b for a, b in zip(times["ours"], times["plain"], strict=True)),
        "difference_of_nll": abs(means["ours"] - means["plain"]),
    }


@torch.no_grad()
def prompt_by_prompt(model: PreTrainedModel, documents: list[tuple[list[int], int]]) -> list[bool]:
    """Greedy generation after each prompt: does it say the answer?"""
    hits = []
    for row, count in documents:
        prompt = torch.tensor([row[:-count]], device=model.device)
        said = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        hits.append(said[0, prompt.shape[1] :].tolist() == row[-count:])
    return hits


def passkeys(ours: PreTrainedModel, plain: PreTrainedModel, tokenizer, grid: Passkey, some: int, device: str) -> dict:
    """Ours asks for all keys of the grid, the plain loop for `some` of each cell; times are those of one prompt."""
    seam.install(ours)  # as it is in `farspan eval`
    first, last = grid.cells()[0], grid.cells()[-1]
    for cell in (first, last):
        grid.run(cell, ours, tokenizer)
        prompt_by_prompt(plain, [(grid.documents(cell, tokenizer)[1][0], grid.documents(cell, tokenizer)[2][0])])
    seconds, prompts = {"ours": 0.0, "plain": 0.0}, {"ours": 0, "plain": 0}
    same = told = 0
    begun = Beginning(ours)
    for cell in grid.cells():  # the two take turns, cell by cell
        taken, samples = timed(lambda cell=cell: grid.run(cell, ours, tokenizer, begun), device)
        seconds["ours"] += taken
        prompts["ours"] += len(samples)
        _, rows, answers = grid.documents(cell, tokenizer)
        few = list(zip(rows, answers, strict=True))[:some]
        taken, hits = timed(lambda few=few: prompt_by_prompt(plain, few), device)
        seconds["plain"] += taken
        prompts["plain"] += len(few)
        same += sum(sample["hit"] == hit for sample, hit in zip(samples, hits, strict=False))
        told += sum(hits)
    each = {name: 1e3 * seconds[name] / prompts[name] for name in seconds}
    return {
        "milliseconds_a_prompt": each,
        "times_as_fast": each["plain"] / each["ours"],
        "prompts": prompts,
        "compared": prompts["plain"],
        "same_hits": same,
        "told": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16_384, help="of perplexity's windows")
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=16_384, help="of the passkey grid")
    parser.add_argument("--grid", type=int, nargs=3, default=(16, 10, 10), help="lengths, depths and keys")
    parser.add_argument("--plain-keys", type=int, default=1, help="keys of each cell that the plain loop asks for")
    parser.add_argument("--only", choices=("perplexity", "passkey", "twin"))
    parser.add_argument("--small", action="store_true", help="a few layers, to try the script without a GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts: dict = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    ours, plain = twice(SMALL if options.small else SHAPE, device)
    twin, tokenizer = farspan.load("nope-twin", dtype=torch.float32, device=device)
    lengths, depths, keys = options.grid
    if options.only in (None, "perplexity"):
        facts["perplexity"] = found = perplexity(ours, plain, options, device)
        each = found["milliseconds_a_window"]
        print(f"perplexity, windows of {options.length}, {options.stride} tokens scored in each")
        print(f"  ours {each['ours']:.1f} ms, plain {each['plain']:.1f} ms a window: {found['ratio']:.3f} of the time")
        print(f"  the mean losses differ by {found['difference_of_nll']:.1e} nats", flush=True)
    if options.only in (None, "passkey"):
        grid = Passkey(grid_lengths(options.longest, 128, lengths), depths, keys)
        facts["passkey"] = show(passkeys(ours, plain, tokenizer, grid, options.plain_keys, device), options.longest)
    if options.only in (None, "twin"):
        grid = Passkey(grid_lengths(1024 if device == "cuda" else 256, 128, 5), depths, keys)
        facts["twin"] = show(passkeys(twin, twin, tokenizer, grid, keys, device), grid.lengths[-1])
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1))


def show(found: dict, longest: int) -> dict:
    each, counts = found["milliseconds_a_prompt"], found["prompts"]
    print(f"passkeys to {longest}: ours all {counts['ours']} prompts, plain {counts['plain']} of them")
    print(f"  ours {each['ours']:.1f} ms, plain {each['plain']:.1f} ms a prompt", end="")
    print(f": {found['times_as_fast']:.1f} times as fast")
    print(f"  the same hit or miss in {found['same_hits']} of {found['compared']}, {found['told']} told", flush=True)
    return found


if __name__ == "__main__":
    main()
