"""The costs of farspan's work on one GPU at the 1.1B shape of Wang 2024, from 2K to 128K tokens.

    python benchmarks/costs.py --out costs.json       # the table of docs/performance.md
    python benchmarks/costs.py --shape tiny --lengths 256,512 --micro-batch 512 \\
        --own-length 256                              # without a GPU

Random weights and tokens, by the code of each command:

- `pretrain`: a step of AdamW in bf16 under autocast, eagerly launched, in micro batches of 16,384
  tokens, four in a step. Longer rows come one at a time.
- `diagnose`: loss and entropy by position of one window.
- `headscale`: the gradient of the scales for one window, with frozen weights.
- `perplexity`: a batch of windows, of which 256 tokens are scored.
- `passkeys`: three depths with one key each; the text that they share is computed once.
- `conversion`: a step of self-distillation to windows of 512 tokens (`farspan extend --method
  swan`), in the same micro batches as `pretrain`.

Each is measured at its own length (bold), and then at the lengths that differ from it by more than
an eighth. `per token` is the time of a token relative to the shortest length. The floor is the time
of the FLOPs of `farspan.attention.model_facts.forward_flops` at the peak that the training loop
uses for its MFU. A backward pass counts twice its forward pass; that of `headscale` has no
gradients of weights. Logits count where they are computed. The last layer counts in full, also
where only scored tokens leave it. Times are medians between synchronizations. Memory is the peak of
allocations, with the weights. Each kind of work has an equal share of the time that is left, after
which it starts no other length.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers
from distill import SHAPES, Distillation
from search import make_ours, timed
from torch import Tensor

from farspan.attention import seam
from farspan.attention.model_facts import forward_flops
from farspan.attention.probe import probe
from farspan.batching import out_of_memory
from farspan.diagnosis.curves import measure_curves
from farspan.evals.passkey import Passkey, PrefixCache
from farspan.evals.perplexity import Perplexity, Text, rows_per_batch
from farspan.loading import load_tokenizer
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.compile import compiled_layers
from farspan.train.loop import peak_flops
from farspan.train.optim import OptimizerConfig, make_optimizers
from farspan.train.pretrain import NextTokenLoss
from farspan.train.steps import EagerSteps, TrainingTask

MICRO_BATCHES = 4  # in a step of training
SCORED = 256  # tokens of a perplexity window
WINDOW = 512  # tokens that a converted layer sees


class Work:
    """What is timed: `run` does it once, and `flops` are those of one run."""

    compiles = True  # for each length

    def __init__(self, shape: dict, device: str, micro_batch: int, stack: ExitStack):
        self.device, self.vocabulary = device, shape["vocab_size"]
        self.micro_batch = micro_batch  # tokens
        self.build(shape, stack)

    def build(self, shape: dict, stack: ExitStack) -> None:
        raise NotImplementedError

    def make_model(self, shape: dict, dtype: torch.dtype | None = None) -> FarspanForCausalLM:
        """Without positions, in bf16 on a GPU."""
        torch.manual_seed(0)
        dtype = dtype or (torch.bfloat16 if self.device == "cuda" else torch.float32)
        with torch.device(self.device):
            return FarspanForCausalLM(FarspanConfig(**shape, position="none")).to(dtype).eval()

    def keep(self, model: transformers.PreTrainedModel) -> None:
        """Probe the model before its layers are compiled."""
        self.model, self.layers = model, probe(model)

    def random_ids(self, *size: int) -> Tensor:
        return torch.randint(self.vocabulary, size, device=self.device)

    def micro_batches(self, length: int, extra: int = 0) -> list[Tensor]:
        rows = max(1, self.micro_batch // length)
        count = max(1, self.micro_batch * MICRO_BATCHES // (rows * length))
        return [self.random_ids(rows, length + extra) for _ in range(count)]

    def text_flops(self, length: int, logits: int) -> float:
        """Of a forward pass over a text, of which the last tokens have logits."""
        head = self.model.get_output_embeddings().weight.numel()
        return length * forward_flops(self.model, self.layers, length) - 2 * head * (
            length - logits
        )

    def inputs(self, length: int) -> object:
        return self.random_ids(1, length)

    def tokens(self, length: int) -> int:
        return length

    def run(self, inputs) -> None:
        raise NotImplementedError

    def flops(self, length: int) -> float:
        raise NotImplementedError

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Pretraining(Work):
    def build(self, shape: dict, stack: ExitStack) -> None:
        self.keep(self.make_model(shape, torch.float32).train())
        on_gpu = self.device == "cuda"
        module = NextTokenLoss(self.model, torch.bfloat16 if on_gpu else None, compiled=on_gpu)
        optimizers = make_optimizers(self.model, OptimizerConfig(optimizer="adamw"))
        parameters = dict(self.model.named_parameters())
        self.steps = EagerSteps(TrainingTask(module, parameters, optimizers, lambda step: []), 1.0)

    def inputs(self, length: int) -> list[Tensor]:
        return self.micro_batches(length, extra=1)

    def tokens(self, length: int) -> int:
        return sum(rows.numel() for rows in self.micro_batches(length))

    def run(self, inputs: list[Tensor]) -> None:
        self.steps.gradients(inputs)
        self.steps.update()

    def flops(self, length: int) -> float:
        return 3 * self.tokens(length) * forward_flops(self.model, self.layers, length)


class Diagnosing(Work):
    compiles = False

    def build(self, shape: dict, stack: ExitStack) -> None:
        self.keep(self.make_model(shape))
        seam.install(self.model)

    def run(self, inputs: Tensor) -> None:
        measure_curves(self.model, inputs, bins=256)

    def flops(self, length: int) -> float:
        return self.text_flops(length, length)


class Searching(Work):
    def build(self, shape: dict, stack: ExitStack) -> None:
        self.keep(self.make_model(shape))  # for its FLOPs
        dtype = self.model.dtype
        self.model.to("meta")
        self.scaled = make_ours(shape, self.device, dtype)

    def run(self, inputs: Tensor) -> None:
        self.scaled(inputs).backward()

    def flops(self, length: int) -> float:
        products = forward_flops(self.model, [], length)
        attention = forward_flops(self.model, self.layers, length) - products
        return length * (2 * products + 3 * attention)

    def clear(self) -> None:
        self.scaled.zero_grad(set_to_none=True)


class PerplexityWindows(Work):
    def build(self, shape: dict, stack: ExitStack) -> None:
        self.keep(self.make_model(shape))
        stack.enter_context(compiled_layers(self.model))

    def windows(self, length: int) -> int:
        return rows_per_batch(self.model, length, None)

    def inputs(self, length: int) -> Perplexity:
        stride = min(SCORED, length // 2)
        count = length + (self.windows(length) - 1) * stride
        ids = self.random_ids(count).int().cpu()
        return Perplexity((Text("random", ("random",), (ids,), ""),), (length,), "paper-a", stride)

    def tokens(self, length: int) -> int:
        return self.windows(length) * length

    def run(self, inputs: Perplexity) -> None:
        for cell in inputs.cells():
            inputs.run(cell, self.model, None)

    def flops(self, length: int) -> float:
        return self.windows(length) * self.text_flops(length, min(SCORED, length // 2))


class Passkeys(Work):
    compiles = False

    def build(self, shape: dict, stack: ExitStack) -> None:
        self.keep(self.make_model(shape))
        seam.install(self.model)
        self.tokenizer = load_tokenizer("nope-twin")

    def inputs(self, length: int) -> Passkey:
        return Passkey((length,), depths=3, keys=1)

    def run(self, inputs: Passkey) -> None:
        prefix_cache, self.shared = PrefixCache(self.model), []
        for cell in inputs.cells():
            inputs.run(cell, self.model, self.tokenizer, prefix_cache)
            self.shared.append(prefix_cache.shared)

    def tokens(self, length: int) -> int:
        return max(self.shared) + sum(length - shared for shared in self.shared)

    def flops(self, length: int) -> float:
        """Of the last run: the longest shared text once, and what follows it in each prompt."""
        prefixes = {shared: self.text_flops(shared, 0) for shared in self.shared if shared} | {0: 0}
        whole = self.text_flops(length, 0)
        return max(prefixes.values()) + sum(whole - prefixes[shared] for shared in self.shared)


class Converting(Work):
    def build(self, shape: dict, stack: ExitStack) -> None:
        self.distillation = Distillation.build(shape, WINDOW, self.device)
        self.model = self.distillation.model
        stack.enter_context(compiled_layers(self.model, self.distillation.teacher))

    def inputs(self, length: int) -> list[Tensor]:
        return self.micro_batches(length)

    def tokens(self, length: int) -> int:
        return sum(ids.numel() for ids in self.inputs(length))

    def run(self, inputs: list[Tensor]) -> None:
        self.distillation.step(inputs)

    def flops(self, length: int) -> float:
        return self.tokens(length) * self.distillation.flops(length)


# name -> the work, and the length at which it is asked for
WORKS = {
    "diagnose": (Diagnosing, 16_384),  # the quickest first: they leave time to the others
    "perplexity": (PerplexityWindows, 16_384),
    "passkeys": (Passkeys, 32_768),
    "pretrain": (Pretraining, 2048),
    "headscale": (Searching, 18_432),
    "conversion": (Converting, 2048),
}


def measure(work: Work, length: int, warmup: int, rounds: int) -> dict:
    """The median time of a run, its peak memory and its FLOPs; or why there are none."""
    on_gpu = work.device == "cuda"
    try:
        work.run(work.inputs(length if work.compiles else warmup))
        inputs = work.inputs(length)
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = [timed(work.run, inputs, work.device)]
        while len(times) < rounds and sum(times) < 2:
            times.append(timed(work.run, inputs, work.device))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return {"note": "out of memory"}
    finally:
        work.clear()
        gc.collect()
    return {
        "tokens": work.tokens(length),
        "seconds": statistics.median(times),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "flops": work.flops(length),
    }


def measure_all(options: argparse.Namespace, device: str) -> Iterator[dict]:
    end, names = time.perf_counter() + options.seconds, options.only.split(",")
    for number, name in enumerate(names):
        kind, own_length = WORKS[name]
        own_length = options.own_length or own_length
        now = time.perf_counter()
        share_end = now + (end - now) / (len(names) - number)
        rows = []
        with ExitStack() as stack:
            work = kind(SHAPES[options.shape], device, options.micro_batch, stack)
            others = [n for n in options.lengths if abs(n - own_length) > own_length / 8]
            for length in (own_length, *others):
                late = rows and time.perf_counter() > share_end
                cost = {"note": "no time left"} if late else None
                cost = cost or measure(work, length, min(options.lengths), options.rounds)
                rows.append({"work": name, "own": length == own_length, "length": length, **cost})
        del work
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()
        yield from sorted(rows, key=lambda row: row["length"])


def per_token(row: dict) -> float:
    return row["seconds"] / row["tokens"]


def table_row(row: dict, first: dict, peak: float | None) -> str:
    """`first` is the row of the same work at the shortest length."""
    name = f"**{row['work']}**" if row["own"] else row["work"]
    start = f"| {name} | {row['length']:,} |"
    if "note" in row:
        return f"{start} | {row['note']} | | | | |"
    growth = ""
    if "seconds" in first:
        growth = f"{per_token(row) / per_token(first):.2f}"
    memory = "" if row["gib"] is None else f"{row['gib']:.1f} GiB"
    floor = "unknown |"
    if peak:
        floor = f"{1e3 * row['flops'] / peak:.1f} ms | {row['seconds'] * peak / row['flops']:.2f}"
    return (
        f"{start} {row['tokens']:,} | {1e3 * row['seconds']:.1f} ms | {growth} | {memory} | "
        f"{floor} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--lengths", default="2048,131072,16384", help="in the order of their runs")
    parser.add_argument(
        "--own-length", type=int, help="of every kind of work; default: by its kind"
    )
    parser.add_argument("--micro-batch", type=int, default=16_384, help="tokens, in training")
    parser.add_argument("--only", default=",".join(WORKS), help="of " + ", ".join(WORKS))
    parser.add_argument("--rounds", type=int, default=3, help="at most; two seconds are enough")
    parser.add_argument("--seconds", type=float, default=150, help="in which lengths are started")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.lengths = [int(length) for length in options.lengths.split(",")]
    device, peak = "cuda" if torch.cuda.is_available() else "cpu", peak_flops()
    print("| work | length | tokens | time | per token | memory | floor | time ÷ floor |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[dict] = []
    for row in measure_all(options, device):
        first = next((each for each in rows if each["work"] == row["work"]), row)
        print(table_row(row, first, peak), flush=True)
        rows.append(row)
    results = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": options.shape,
        "peak_flops": peak,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
