"""KV cache and decoding speed of a model and of its conversion to SWAN, at one context length.

    python benchmarks/decode.py --length 65536 --batch 8        # the table of docs/performance.md

Both are stock models of one shape with random weights: a Llama, and the SmolLM3 that
`farspan export --format stock` makes of its conversion. Decoding reads a static cache that holds
`length` tokens, whose content does not change the speed. `graph` is torch.compile with CUDA graphs
(`reduce-overhead`), `eager` launches every kernel. Times are medians over steps, between
synchronizations of the device.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from distill import SHAPES
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StaticCache,
)

from farspan.methods.swan_config import SwanConfig
from farspan.methods.swan_layout import even_layers


def build(shape: str, window: int) -> dict[str, PreTrainedModel]:
    """The base, and its conversion with the default share of global layers."""
    settings = dict(SHAPES[shape], max_position_embeddings=2**20)
    layers = settings["num_hidden_layers"]
    global_layers = even_layers(range(layers), round(layers * SwanConfig().global_share))
    types = ["full_attention" if i in global_layers else "sliding_attention" for i in range(layers)]
    converted = SmolLM3Config(
        **settings,
        layer_types=types,
        no_rope_layers=[int(index not in global_layers) for index in range(layers)],
        use_sliding_window=True,
        sliding_window=window,
        pad_token_id=0,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {
        "base": LlamaForCausalLM(LlamaConfig(**settings)),
        "SWAN": SmolLM3ForCausalLM(converted),
    }
    return {name: model.to(device, torch.bfloat16).eval() for name, model in models.items()}


def filled_cache(model: PreTrainedModel, batch: int, length: int) -> tuple[StaticCache, int]:
    """A static cache for `length` tokens that counts all but the last 64 as read, and its bytes.

    Reading them would take a minute and change nothing: what a cache holds does not decide the
    speed. A first text fills the windows.
    """
    cache, filled = StaticCache(config=model.config, max_cache_len=length), length - 64
    ids = torch.zeros((batch, min(filled, 1024)), dtype=torch.long, device=model.device)
    model.model(ids, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.cumulative_length.fill_(filled)
        if layer.is_sliding:
            layer.cumulative_length_int = filled
    tensors = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    return cache, sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def measure(
    model: PreTrainedModel, batch: int, length: int, steps: int
) -> tuple[int, float, float]:
    """Bytes of the cache, and seconds of a decoding step, eager and compiled to CUDA graphs."""
    cache, size = filled_cache(model, batch, length)
    token = torch.zeros((batch, 1), dtype=torch.long, device=model.device)
    sliding = [layer for layer in cache.layers if layer.is_sliding]

    def step() -> torch.Tensor:
        # A number that grows would record a new graph at every step.
        for layer in sliding:
            layer.cumulative_length_int = length - 64
        return model(token, past_key_values=cache, use_cache=True).logits

    eager = median_seconds(step, steps)
    # A graph recorded by hand fails: the cache of sliding layers makes a tensor on the CPU.
    model.forward = torch.compile(model.forward, mode="reduce-overhead")
    for _ in range(4):
        step()
    return size, eager, median_seconds(step, steps)


def median_seconds(run, steps: int) -> float:
    times = []
    for _ in range(steps):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[len(times) // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="135M", choices=SHAPES)
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    print("| model | cache | eager, tokens/s | graph, tokens/s |\n|---|---|---|---|")
    for name, model in build(args.shape, args.window).items():
        size, eager, graph = measure(model, args.batch, args.length, args.steps)
        speeds = " | ".join(f"{args.batch / seconds:,.0f}" for seconds in (eager, graph))
        print(f"| {name} | {size / 2**20:,.0f} MiB | {speeds} |", flush=True)


if __name__ == "__main__":
    main()
