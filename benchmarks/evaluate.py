"""Evaluation against straightforward loops: how much faster is it, and are the numbers equal?

    python benchmarks/evaluate.py                # the tables of docs/performance.md
    python benchmarks/evaluate.py --small --length 512 --stride 64 --longest 512     # without a GPU

A 1.1B rotary model with random weights in bf16, as farspan's model and as transformers' Llama with
the same weights. `ours` is what `farspan eval` runs: batched windows, compiled layers, logits of
scored tokens only, and only their queries in the last layer; passkeys with teacher forcing, the
keys of a cell in one batch, the shared prefix computed once. `plain` is what one would write by
hand: Llama on SDPA, one window at a time with full logits and labels, and `generate` for one prompt
at a time. Both alternate in one process; times are medians between synchronizations. Random weights
retrieve no key, so hits are also compared on the bundled NoPE model.
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
from farspan.evals.passkey import Passkey, PrefixCache, grid_lengths
from farspan.evals.perplexity import Perplexity, Text
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.compile import compiled_layers


def build_models(shape: dict, device: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One set of weights as farspan's model and as Llama."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        ours = FarspanForCausalLM(FarspanConfig(**shape, position="rope")).to(dtype).eval()
        plain = LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).eval()
    incompatible = plain.load_state_dict(ours.state_dict(), strict=False)
    assert not incompatible.missing_keys, incompatible
    return ours, plain


def timed(work: Callable[[], object], device: str) -> tuple[float, object]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, output


@torch.no_grad()
def window_by_window(model: PreTrainedModel, windows: Tensor, stride: int) -> list[float]:
    """The loss of each window's last tokens, with labels."""
    losses = []
    for window in windows:
        ids = window[None].to(model.device)
        labels = ids.clone()
        labels[:, :-stride] = -100
        losses.append(model(input_ids=ids, labels=labels, use_cache=False).loss)
    return torch.stack(losses).double().tolist()


def perplexity(
    ours: PreTrainedModel, plain: PreTrainedModel, options: argparse.Namespace, device: str
) -> dict:
    length, stride, count = options.length, options.stride, options.windows
    ids = torch.randint(ours.config.vocab_size, (length + (count - 1) * stride,), dtype=torch.int32)
    evaluation = Perplexity(
        (Text("random", ("random",), (ids,), ""),), (length,), "paper-a", stride
    )
    cells = evaluation.cells()
    windows = ids.unfold(0, length, stride).long()
    methods = {
        "ours": lambda: [
            s["nll"] / s["scored"] for cell in cells for s in evaluation.run(cell, ours, None)
        ],
        "plain": lambda: window_by_window(plain, windows, stride),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    losses = {}
    with compiled_layers(ours) if device == "cuda" else nullcontext():
        for method in methods.values():  # warm up, compilation included
            for _ in range(2):
                timed(method, device)
        for number in range(options.rounds):
            for name in list(methods) if number % 2 == 0 else list(methods)[::-1]:
                seconds, losses[name] = timed(methods[name], device)
                times[name].append(seconds)
    median = {name: 1e3 * statistics.median(runs) / count for name, runs in times.items()}
    means = {name: statistics.mean(values) for name, values in losses.items()}
    return {
        "milliseconds_a_window": median,
        "ratio": statistics.median(
            a / b for a, b in zip(times["ours"], times["plain"], strict=True)
        ),
        "difference_of_nll": abs(means["ours"] - means["plain"]),
    }


@torch.no_grad()
def prompt_by_prompt(model: PreTrainedModel, documents: list[tuple[list[int], int]]) -> list[bool]:
    """Whether greedy generation retrieves the answer of each prompt."""
    hits = []
    for row, count in documents:
        prompt = torch.tensor([row[:-count]], device=model.device)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        hits.append(output[0, prompt.shape[1] :].tolist() == row[-count:])
    return hits


def passkeys(
    ours: PreTrainedModel,
    plain: PreTrainedModel,
    tokenizer,
    grid: Passkey,
    plain_keys: int,
    device: str,
) -> dict:
    """`ours` runs all keys of the grid, `plain` the first of each cell; times are per prompt."""
    seam.install(ours)  # as in `farspan eval`
    first, last = grid.cells()[0], grid.cells()[-1]
    for cell in (first, last):
        grid.run(cell, ours, tokenizer)
        _, rows, answers = grid.documents(cell, tokenizer)
        prompt_by_prompt(plain, [(rows[0], answers[0])])
    seconds, prompts = {"ours": 0.0, "plain": 0.0}, {"ours": 0, "plain": 0}
    same = retrieved = 0
    prefix_cache = PrefixCache(ours)
    for cell in grid.cells():  # alternate cell by cell
        elapsed, samples = timed(
            lambda cell=cell: grid.run(cell, ours, tokenizer, prefix_cache), device
        )
        seconds["ours"] += elapsed
        prompts["ours"] += len(samples)
        _, rows, answers = grid.documents(cell, tokenizer)
        subset = list(zip(rows, answers, strict=True))[:plain_keys]
        elapsed, hits = timed(lambda subset=subset: prompt_by_prompt(plain, subset), device)
        seconds["plain"] += elapsed
        prompts["plain"] += len(subset)
        same += sum(sample["hit"] == hit for sample, hit in zip(samples, hits, strict=False))
        retrieved += sum(hits)
    milliseconds = {name: 1e3 * seconds[name] / prompts[name] for name in seconds}
    return {
        "milliseconds_a_prompt": milliseconds,
        "times_as_fast": milliseconds["plain"] / milliseconds["ours"],
        "prompts": prompts,
        "compared": prompts["plain"],
        "same_hits": same,
        "told": retrieved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16_384, help="of perplexity windows")
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=16_384, help="of the passkey grid")
    parser.add_argument(
        "--grid", type=int, nargs=3, default=(16, 10, 10), help="lengths, depths and keys"
    )
    parser.add_argument(
        "--plain-keys", type=int, default=1, help="keys of each cell in the plain loop"
    )
    parser.add_argument("--only", choices=("perplexity", "passkey", "twin"))
    parser.add_argument("--small", action="store_true", help="a few layers, to run without a GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    ours, plain = build_models(SMALL if options.small else SHAPE, device)
    bundled, tokenizer = farspan.load("nope-twin", dtype=torch.float32, device=device)
    lengths, depths, keys = options.grid
    if options.only in (None, "perplexity"):
        results["perplexity"] = result = perplexity(ours, plain, options, device)
        times = result["milliseconds_a_window"]
        print(f"perplexity, windows of {options.length}, {options.stride} tokens scored in each")
        print(
            f"  ours {times['ours']:.1f} ms, plain {times['plain']:.1f} ms per window: "
            f"{result['ratio']:.3f} of the time"
        )
        print(f"  the mean losses differ by {result['difference_of_nll']:.1e} nats", flush=True)
    if options.only in (None, "passkey"):
        grid = Passkey(grid_lengths(options.longest, 128, lengths), depths, keys)
        results["passkey"] = show(
            passkeys(ours, plain, tokenizer, grid, options.plain_keys, device), options.longest
        )
    if options.only in (None, "twin"):
        grid = Passkey(grid_lengths(1024 if device == "cuda" else 256, 128, 5), depths, keys)
        results["twin"] = show(
            passkeys(bundled, bundled, tokenizer, grid, keys, device), grid.lengths[-1]
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def show(result: dict, longest: int) -> dict:
    times, counts = result["milliseconds_a_prompt"], result["prompts"]
    print(
        f"passkeys to {longest}: ours all {counts['ours']} prompts, plain {counts['plain']} of them"
    )
    print(f"  ours {times['ours']:.1f} ms, plain {times['plain']:.1f} ms per prompt", end="")
    print(f": {result['times_as_fast']:.1f} times as fast")
    print(
        f"  equal hits or misses in {result['same_hits']} of {result['compared']}, "
        f"{result['told']} retrieved",
        flush=True,
    )
    return result


if __name__ == "__main__":
    main()
