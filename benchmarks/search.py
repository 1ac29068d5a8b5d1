"""Speed, memory and gradient accuracy of the HeadScale search at the size of Wang 2024.

    python benchmarks/search.py                 # the table of docs/performance.md
    python benchmarks/search.py --length 4096
    python benchmarks/search.py --profile       # GPU time of one step by kind of kernel
    python benchmarks/search.py --model small-nope/model --to 2048 --data TEXT   # how long a search

A 1.1B model without positions, random weights in bf16, batch 1, gradients of 704 scales only.
`ours` is the step that `farspan extend` takes: scales on the attention seam, frozen weights,
compiled layers, no L×V logits, no checkpointing. `plain` is the obvious implementation:
transformers' Llama on SDPA with gradient checkpointing, scales as parameters that multiply the
output of each q_proj, and the loss from labels. Both alternate in one process; times are medians
between synchronizations. The gradient is compared with float32 at a shorter length.

With --model, searches run from start to end: the 200 steps of Wang 2024, with one learning rate,
the default, which ends at a plateau, and one for each --settings (steps=50,warmup=5). Their scales
are compared with those of the 200 steps by the loss on windows that none has read. Random weights
have no scale to find. So the second ratio, for windows of --length tokens at the 1.1B shape, has
the counts of these searches, and the times of one window there, forward alone and with its
gradient.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from shapes import SHAPE, SMALL
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from farspan.attention import seam
from farspan.attention.model_facts import config_train_length
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.loading import load_with_tokenizer, upcast_small_model
from farspan.methods.fit import make_fit_job
from farspan.methods.headscale import VALIDATED, ScaledModel, headlog, headscale
from farspan.methods.job import FitJob, scaled_loss
from farspan.methods.search_config import SearchConfig
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.compile import compile_layers
from farspan.recipe import apply_overrides
from farspan.train.search_text import split_text

MAX_DIFFERENCE = 0.005  # nats of the scales of two searches that count as equal


def make_ours(shape: dict, device: str, dtype: torch.dtype) -> ScaledModel:
    torch.manual_seed(0)
    with torch.device(device):
        # Rounded to bf16 first, so that both precisions have the same weights.
        model = (
            FarspanForCausalLM(FarspanConfig(**shape, position="none")).bfloat16().to(dtype).eval()
        )
    model.requires_grad_(False)
    scaled = ScaledModel(
        model, Scales.uniform(1.2, range(shape["num_hidden_layers"]), shape["num_attention_heads"])
    )
    seam.install(model, scaled.scales)
    if device == "cuda" and dtype == torch.bfloat16:
        compile_layers(model)
    return scaled


def ours(
    shape: dict, device: str, dtype: torch.dtype
) -> tuple[Callable[[Tensor], None], nn.Parameter]:
    scaled = make_ours(shape, device, dtype)
    return lambda ids: scaled(ids).backward(), scaled.base


def plain(
    shape: dict, device: str, dtype: torch.dtype
) -> tuple[Callable[[Tensor], None], nn.Parameter]:
    torch.manual_seed(0)
    with torch.device(device):
        # Checkpointing needs training mode.
        model = LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).train()
    model.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    heads = shape["num_attention_heads"]
    width = shape["hidden_size"] // heads
    scales = nn.Parameter(torch.full((shape["num_hidden_layers"], heads), 1.2, device=device))

    def scale_row(row: int):
        return lambda module, inputs, output: (
            output * scales[row].repeat_interleave(width).to(output.dtype)
        )

    for row, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(scale_row(row))
    return lambda ids: model(ids, labels=ids, use_cache=False).loss.backward(), scales


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[Tensor], None], ids: Tensor, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    step(ids)
    synchronize(device)
    return time.perf_counter() - start


def speed(shape: dict, length: int, rounds: int, device: str) -> list[dict]:
    ids = torch.randint(shape["vocab_size"], (1, length), device=device)
    steps, rows = {}, []
    for name, build in (("ours", ours), ("plain", plain)):
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        steps[name], _ = build(shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
        for _ in range(2):
            timed(steps[name], ids, device)
        peak = 0.0
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            timed(steps[name], ids, device)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        rows.append({"name": name, "gib": peak})
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps) if number % 2 == 0 else list(steps)[::-1]:
            times[name].append(timed(steps[name], ids, device))
    for row in rows:
        median = statistics.median(times[row["name"]])
        row |= {"milliseconds": 1e3 * median, "tokens_per_second": length / median}
    return rows


KINDS = {
    "attention": ("cudnn", "flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "compiled": ("triton",),
}


def profiled(shape: dict, length: int) -> dict[str, float]:
    """GPU milliseconds of one step, by kind of kernel."""
    ids = torch.randint(shape["vocab_size"], (1, length), device="cuda")
    step, _ = ours(shape, "cuda", torch.bfloat16)
    for _ in range(3):
        timed(step, ids, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        timed(step, ids, "cuda")
    spent = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in profile.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.key.lower()
            kind = next(
                (kind for kind, words in KINDS.items() if any(word in name for word in words)),
                "rest",
            )
            spent[kind] += event.self_device_time_total / 1e3
    return spent


def gradient_cosine(shape: dict, length: int, device: str) -> float:
    """Cosine of the bf16 gradient to the float32 one, with the same weights and tokens."""
    ids = torch.randint(shape["vocab_size"], (1, length), device=device)
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        step, scales = ours(shape, device, dtype)
        step(ids)
        gradients.append(scales.grad.double().flatten().cpu())
        del step, scales
        gc.collect()
    return float(torch.nn.functional.cosine_similarity(*gradients, dim=0))


@dataclass
class Search:
    """What a search computed, and where it ended."""

    seconds: float
    steps: int
    gradients: int  # windows whose gradient was computed
    forwards: int  # windows whose loss alone was computed, of the target length
    loss: float  # on the report split
    scales: Scales

    def cost(self, gradient: float, forward: float) -> float:
        return self.gradients * gradient + self.forwards * forward


def compare_searches(options: argparse.Namespace, device: str) -> dict[str, Search]:
    model, tokenizer = load_with_tokenizer(options.model, device=device)
    model = upcast_small_model(model)
    layers = probe(model)
    length = config_train_length(model.config)
    reference = SearchConfig(steps=options.steps, lr=(0.1,))
    lengths = {"search": round(reference.beyond * options.to), "choose": options.to}
    limits = {"search": reference.most_windows, "choose": 8, "report": 8}
    splits = split_text(options.data, tokenizer, {**lengths, "report": options.to}, limits, length)
    texts = splits["search"].ids, splits["choose"].ids
    job = make_fit_job(model, layers, options.to, length, *texts, tokenizer=tokenizer)
    warmup = SearchConfig(steps=2, lr=(0.1,), init=1.0)  # compiles kernels
    timed_search(model, replace(job, details={}), warmup, options.method)
    configs = {f"{options.steps} steps": reference, "default": SearchConfig()}
    for text in options.settings:
        configs[text] = apply_overrides(SearchConfig(), text.split(","))
    results = {}
    for name, config in configs.items():
        search = timed_search(model, replace(job, details={}), config, options.method)
        search.loss = scaled_loss(model, splits["report"].ids, search.scales)
        results[name] = search
    return results


def timed_search(model: PreTrainedModel, job: FitJob, config: SearchConfig, method: str) -> Search:
    losses = []  # that choose a start: `progress` is told of each

    def count_losses(label: str, steps: int) -> Callable[..., None]:
        return lambda *note: losses.append(note) if label in ("uniform", "start") else None

    synchronize(model.device.type)
    start = time.perf_counter()
    fit = {"headscale": headscale, "headlog": headlog}[method]
    scales = fit(model, replace(job, progress=count_losses), config).scales
    synchronize(model.device.type)
    seconds = time.perf_counter() - start
    (done,) = job.details["searches"]
    per_start = VALIDATED if not config.steps else len(job.choose)
    forwards = per_start * len(losses) + VALIDATED * len(done["choose_losses"])
    gradients = done["steps"] * done["batch"]
    return Search(seconds, done["steps"], gradients, forwards, math.nan, scales)


def window_times(shape: dict, length: int, target: int, rounds: int, device: str) -> list[float]:
    """Seconds of the gradient of one search window, and of the loss of one window of the target."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    scaled = make_ours(shape, device, dtype)
    ids = torch.randint(shape["vocab_size"], (1, length), device=device)

    def step(ids: Tensor) -> None:
        scaled(ids).backward()

    def forward(ids: Tensor) -> None:
        scaled.validation_loss(ids)

    medians = []
    for call, rows in ((step, ids), (forward, ids[:, :target])):
        for _ in range(2):
            timed(call, rows, device)
        medians.append(statistics.median(timed(call, rows, device) for _ in range(rounds)))
    return medians


def report_searches(options: argparse.Namespace, shape: dict, device: str) -> dict:
    searches = compare_searches(options, device)
    window = options.length, round(options.length / 1.125)
    times = window_times(shape, *window, options.rounds, device)
    first, *_ = searches.values()
    print("| search | steps | windows | s | loss | difference | of its time | at the 1.1B shape |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = {}
    for name, search in searches.items():
        rows[name] = {key: value for key, value in vars(search).items() if key != "scales"}
        rows[name] |= {
            "difference": search.loss - first.loss,
            "within": search.loss - first.loss <= MAX_DIFFERENCE,
            "ratio": search.seconds / first.seconds,
            "ratio_of_shape": search.cost(*times) / first.cost(*times),
        }
        print(
            f"| {name} | {search.steps} | {search.gradients + search.forwards} | "
            f"{search.seconds:.1f} | {search.loss:.4f} | {rows[name]['difference']:+.4f} | "
            f"{rows[name]['ratio']:.2f} | {rows[name]['ratio_of_shape']:.2f} |"
        )
    return {
        "torch": torch.__version__,
        "method": options.method,
        "target": options.to,
        "windows_of_shape": list(window),
        "searches": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=18_432)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--small", action="store_true", help="a few layers, to test the script without a GPU"
    )
    parser.add_argument("--profile", action="store_true", help="GPU time by kind of kernel only")
    parser.add_argument("--model", help="time whole searches on this model instead of steps")
    parser.add_argument("--to", type=int, help="with --model: their target")
    parser.add_argument("--data", default="python-docs/search", help="with --model: their text")
    parser.add_argument("--method", choices=("headscale", "headlog"), default="headscale")
    parser.add_argument("--steps", type=int, default=200, help="of the search to compare with")
    parser.add_argument(
        "--settings", action="append", default=[], help="of one more search: steps=50,warmup=5"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if options.small else SHAPE
    if options.profile:
        if device == "cpu":
            parser.error("--profile needs a GPU, and none was found; run it on a machine with one")
        for kind, spent in profiled(shape, options.length).items():
            print(f"{kind:>16} {spent:>7.1f} ms")
        return
    if options.model:
        results = report_searches(options, shape, device)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
        return
    rows = speed(shape, options.length, options.rounds, device)
    print("        ms / step    tokens/s     GiB")
    for row in rows:
        print(
            f"{row['name']:>6} {row['milliseconds']:>11.1f} {row['tokens_per_second']:>11,.0f} "
            f"{row['gib']:>7.1f}"
        )
    speedup = rows[0]["tokens_per_second"] / rows[1]["tokens_per_second"]
    print(f"ours is {speedup:.2f} times as fast", flush=True)
    gc.collect()
    cosine = gradient_cosine(shape, min(options.length, 4096), device)
    print(f"cosine of the bf16 gradient to the float32 one: {cosine:.5f}")
    if options.json:
        results = {
            "torch": torch.__version__,
            "length": options.length,
            "rows": rows,
            "cosine": cosine,
        }
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
