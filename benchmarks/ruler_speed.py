"""RULER's generation against the loop of lm-evaluation-harness, on the same prompts in one run.

    python benchmarks/ruler_speed.py --out ruler_speed.json       # the table of docs/performance.md
    python benchmarks/ruler_speed.py --shape tiny --length 512 --samples 4 --harness-batches 1 2

A Llama with random weights that never ends an answer early. `farspan` is what
`farspan eval --suite ruler` calls for a cell: equally long prompts, none padded, decoded together.
`harness` is `generate_until` of the harness's HF backend. Where that package is absent, its loop is
rebuilt here: requests of one answer length, sorted by their tokens, the longest first; each batch
tokenized from text and padded on the left; `generate` on the full prompts with a criterion that
decodes the last tokens of every row at each step. Neither shares a prefix between prompts. The
harness's own default is a batch of 1; large batches run all prompts, a batch of 1 the first of each
task. Tokens are those of prompts and answers; making the prompts is timed apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from distill import SHAPES
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from farspan.bundled import resolve_bundled
from farspan.evals.answers import generate_texts
from farspan.evals.ruler import Ruler
from farspan.evals.scores import EvalCell

Generate = Callable[[list[str], int, int], list[str]]  # texts, answer tokens, batch size


def build(shape: str, tokenizer: Any, length: int) -> PreTrainedModel:
    """Random weights in bf16 on a GPU; the end-of-text logit is 0, below the largest of others."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = dict(SHAPES[shape], max_position_embeddings=length)
    settings["vocab_size"] = max(settings["vocab_size"], len(tokenizer))
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**settings, eos_token_id=tokenizer.eos_token_id))
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    if tokenizer.eos_token_id is not None:
        model.lm_head.weight.data[tokenizer.eos_token_id] = 0
    return model


class EndText(StoppingCriteria):
    """Stop when the end-of-text string is in the last decoded tokens of every row."""

    def __init__(self, tokenizer: Any, end: str, prompt: int, rows: int):
        self.tokenizer, self.end, self.prompt = tokenizer, end, prompt
        self.done = [False] * rows
        self.back = len(tokenizer.encode(end, add_special_tokens=False)) + 2

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt :][:, -self.back :])
        self.done = [done or self.end in text for done, text in zip(self.done, texts, strict=True)]
        return all(self.done)


def rebuilt_loop(model: PreTrainedModel, tokenizer: Any) -> Generate:
    """The loop of the harness's HF backend for requests of one answer length."""
    end = tokenizer.eos_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = end

    @torch.no_grad()
    def generate(texts: list[str], answer_tokens: int, batch: int) -> list[str]:
        order = sorted(
            range(len(texts)), key=lambda i: (-len(tokenizer.encode(texts[i])), texts[i])
        )
        answers = [""] * len(texts)
        for start in range(0, len(order), batch):
            chunk = order[start : start + batch]
            tokenizer.padding_side = "left"
            encoded = tokenizer([texts[i] for i in chunk], padding="longest", return_tensors="pt")
            encoded = encoded.to(model.device)
            prompt = encoded["input_ids"].shape[1]
            generated = model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                max_length=prompt + answer_tokens,
                stopping_criteria=StoppingCriteriaList(
                    [EndText(tokenizer, end, prompt, len(chunk))]
                ),
                pad_token_id=tokenizer.pad_token_id,
                use_cache=True,
                do_sample=False,
            )
            for i, row in zip(chunk, generated.tolist(), strict=True):
                text = tokenizer.decode(row[prompt:], skip_special_tokens=True)
                answers[i] = text.split(end)[0]
        return answers

    return generate


def package_loop(model: PreTrainedModel, tokenizer: Any, length: int) -> Generate:
    """`generate_until` of the installed package."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    def generate(texts: list[str], answer_tokens: int, batch: int) -> list[str]:
        harness = HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=2 * length
        )
        options = {"do_sample": False, "temperature": 0.0, "max_gen_toks": answer_tokens}
        requests = [
            Instance("generate_until", {}, (text, {**options, "until": []}), number)
            for number, text in enumerate(texts)
        ]
        return harness.generate_until(requests, disable_tqdm=True)

    return generate


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, output


def measure_task(
    evaluation: Ruler, cell: EvalCell, model: Any, tokenizer: Any, harness: Generate, options: Any
) -> Iterator[dict[str, Any]]:
    """The speed of each loop on the prompts of one cell."""
    seconds, (_, rows, answer_tokens) = timed(lambda: evaluation.prompts(cell, tokenizer))
    texts = [tokenizer.decode(row) for row in rows]
    lengths = [len(tokenizer.encode(text)) for text in texts]
    facts = {"task": cell.task, "length": cell.length, "prompts_made_s": seconds}
    generate_texts(model, tokenizer, rows[:1], 2, 1)  # warm up
    harness(texts[:1], 2, 1)
    seconds, generated = timed(
        lambda: generate_texts(model, tokenizer, rows, answer_tokens, evaluation.batch)
    )
    speed = len(rows) * cell.length / seconds
    yield {**facts, "loop": "farspan", "prompts": len(rows), "seconds": seconds, "speed": speed}
    for batch in options.harness_batches:
        count = len(rows) if batch > 1 else min(len(rows), options.single_prompts)
        seconds, answers = timed(
            lambda batch=batch, count=count: harness(texts[:count], answer_tokens, batch)
        )
        yield {
            **facts,
            "loop": f"harness, batch {batch}",
            "prompts": count,
            "seconds": seconds,
            "speed": count * cell.length / seconds,
            "ratio": speed * seconds / (count * cell.length),
            "tokens_of_texts": [min(lengths[:count]), max(lengths[:count])],
            "equal_answers": sum(
                a.text == b for a, b in zip(generated[:count], answers, strict=True)
            ),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.1B", choices=SHAPES)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--tasks", default="niah_multikey_1,vt,cwe", help="names with commas")
    parser.add_argument("--samples", type=int, default=16, help="of each task")
    parser.add_argument("--harness-batches", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--single-prompts", type=int, default=4, help="of a task at batch 1")
    parser.add_argument("--tokenizer", default="nope-twin", help="name or path")
    parser.add_argument("--rebuilt", action="store_true", help="even if the harness is installed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_bundled(options.tokenizer))
    model = build(options.shape, tokenizer, options.length)
    rebuilt = options.rebuilt or importlib.util.find_spec("lm_eval") is None
    harness = (
        rebuilt_loop(model, tokenizer)
        if rebuilt
        else package_loop(model, tokenizer, options.length)
    )
    evaluation = Ruler((options.length,), tuple(options.tasks.split(",")), options.samples)
    print(f"harness: {'rebuilt' if rebuilt else 'the installed package'}\n")
    print(
        "| task | loop | prompts | s | tokens/s | farspan is faster by |\n|---|---|---|---|---|---|"
    )
    results = []
    for cell in evaluation.cells():
        for row in measure_task(evaluation, cell, model, tokenizer, harness, options):
            results.append(row)
            ratio = f"{row['ratio']:.1f} ×" if "ratio" in row else ""
            print(
                f"| {row['task']} | {row['loop']} | {row['prompts']} | {row['seconds']:.1f} | "
                f"{row['speed']:,.0f} | {ratio} |",
                flush=True,
            )
    summary = {
        f"harness, batch {batch}": statistics.geometric_mean(
            row["ratio"] for row in results if row["loop"] == f"harness, batch {batch}"
        )
        for batch in options.harness_batches
    }
    print()
    for loop, ratio in summary.items():
        print(f"farspan against {loop}: {ratio:.1f} × (geometric mean of the tasks)")
    if options.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        facts = {"device": device, "torch": torch.__version__, "rebuilt": rebuilt}
        facts |= {"shape": options.shape, "summary": summary, "rows": results}
        options.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
