"""`farspan pretrain`: a recipe's run, from text to a finished model with its card; or what it would take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan.attention.patch import fingerprint
from farspan.errors import FarspanError
from farspan.files import new_folder, read_json
from farspan.loading import chosen_device, quiet
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.progress import Progress, silent
from farspan.recipe import load_recipe, to_toml
from farspan.record import write_record
from farspan.report import figures
from farspan.train.checkpoint import fit, write_manifest
from farspan.train.corpus import Prepared, find_files
from farspan.train.loop import Listener
from farspan.train.pretrain import (
    FREE,
    Pretraining,
    flops_per_token,
    refuse_another,
    shares,
)
from farspan.train.pretrain import pretrain as run_recipe
from farspan.train.sharding import processes, whole

SHELF = Path(__file__).parent.parent / "assets" / "recipes" / "pretrain"
GIB = 2**30


def read_recipe(source: str, overrides: Sequence[str] = ()) -> Pretraining:
    """A recipe by name or file, with `key=value` changes.

    >>> read_recipe("small-nope", ["steps=100"]).train.steps
    100
    """
    return load_recipe(Pretraining, source, overrides, shelf=SHELF)


@dataclass(frozen=True)
class Estimate:
    """What a recipe asks for, before anything is read or trained."""

    parameters: int
    tokens: int
    flops: float
    weights_gib: float  # weights, gradients and the optimizer's state, on one device
    activations_gib: float  # of one micro batch
    files_mb: float | None  # of the text, as it lies there; None where it is not found
    rate: float  # FLOP/s of matrix products on this device, measured now

    @property
    def seconds(self) -> float:
        """If nothing but matrix products took time."""
        return self.flops / self.rate


def estimate(recipe: Pretraining) -> Estimate:
    config = recipe.config()
    with torch.device("meta"):
        model = FarspanForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    how, count = recipe.train, processes().num_processes
    rows, _ = shares(how, count)
    # Kept for the backward pass, in numbers a token: norms, projections and products of a layer, then the logits.
    kv = config.num_key_value_heads * config.head_dim
    layer = 6 * config.hidden_size + 2 * kv + 3 * config.intermediate_size
    layer = config.hidden_size if how.checkpoint_layers else layer
    narrow = torch.cuda.is_available() and how.precision != "fp32"
    width = 2 if narrow else 4
    kept = rows * how.length * (config.num_hidden_layers * layer * width + config.vocab_size * (width + 4))
    states = 4 * (2 if recipe.optimization.optimizer == "adamw" else 1)
    shared = count if how.parallel == "fsdp" else 1
    tokens = how.steps * how.batch * how.length
    return Estimate(
        parameters,
        tokens,
        tokens * flops_per_token(config, how.length),
        parameters * (4 + 4 + states) / shared / GIB,
        kept / GIB,
        _megabytes(recipe),
        count * matrix_rate(narrow, chosen_device(None)),
    )


def _megabytes(recipe: Pretraining) -> float | None:
    try:
        used = [name for name, texts in recipe.data.sources.items() if texts.weight]
        files = [path for name in used for path in find_files(recipe.data, name)]
    except FarspanError:
        return None
    parts = [part for path in files for part in ([path] if path.is_file() else path.rglob("*"))]
    return sum(part.stat().st_size for part in parts) / 1e6


def matrix_rate(narrow: bool, device: str) -> float:
    """FLOP/s of a large matrix product here and now."""
    on_gpu = torch.device(device).type == "cuda"
    size = 8192 if on_gpu else 1024
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if narrow else torch.float32)
    count = 20 if on_gpu else 3
    (a @ a).sum().item()
    start = time.perf_counter()
    for _ in range(count):
        b = a @ a
    b.sum().item()
    return count * 2 * size**3 / (time.perf_counter() - start)


@dataclass(frozen=True)
class Finished:
    """A run that came to its end."""

    folder: Path
    steps: int
    loss: float  # mean over the last steps
    already: bool  # it had been finished before


def pretrain(
    source: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    progress: Progress = silent,
    listen: Listener = lambda moment: None,
) -> Finished:
    """Train what a recipe says, or go on where its run stands, and write the finished model to OUT/model.

    >>> pretrain("twin-nope", ["data.folder=path/to/data"], "runs/twin-nope")
    """
    recipe = read_recipe(source, overrides)
    run = Path(out or Path("runs") / Path(source).stem)
    if recipe.train.tensorboard and processes().is_main_process:
        listen = _also_to_tensorboard(run, listen)
    done = run / "record.json"
    if done.exists() and (run / "model").exists():
        refuse_another(recipe, run)
        found = read_json(done)
        return Finished(run / "model", found["steps"], found["loss"], already=True)
    model, prepared, metrics = run_recipe(recipe, run, progress=progress, listen=listen)
    last = metrics[-max(1, len(metrics) // 50) :]
    loss = sum(entry["loss"] for entry in last) / len(last)
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    if processes().is_main_process:
        command = " ".join(["farspan pretrain", Path(source).name, *(each for each in overrides if _matters(each))])
        if not (run / "model").exists():
            _write_model(run / "model", model.config, weights, prepared, recipe, metrics, command)
        results = {"steps": recipe.train.steps, "loss": loss, "data": prepared.read}
        write_record(run / "record.json", "pretrain", {"recipe": to_toml(recipe)}, results)
    processes().wait_for_everyone()
    return Finished(run / "model", recipe.train.steps, loss, already=False)


def _matters(override: str) -> bool:
    """Where things lie and how the work is spread is nobody else's business."""
    return override.partition("=")[0].rpartition(".")[2] not in {key.rpartition(".")[2] for key in FREE}


def _also_to_tensorboard(run: Path, listen: Listener) -> Listener:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FarspanError(
            "train.tensorboard=true needs tensorboard; install it with pip install 'farspan[tensorboard]'"
        ) from None
    writers: list[Any] = []

    def both(moment) -> None:
        if not writers:  # at the first step: until then the folder is not this run's
            writers.append(SummaryWriter(run / "tensorboard"))
        (writer,) = writers
        for name in ("loss", "lr", "grad_norm", "tokens_per_second"):
            writer.add_scalar(name, getattr(moment, name), moment.step)
        writer.flush()
        listen(moment)

    return both


def _write_model(
    folder: Path,
    config: FarspanConfig,
    weights: dict[str, Tensor],
    prepared: Prepared,
    recipe: Pretraining,
    metrics: list[dict[str, Any]],
    command: str,
) -> None:
    final = FarspanForCausalLM(config).to(getattr(torch, recipe.train.dtype))
    fit(weights, dict(final.named_parameters()), folder)
    with new_folder(folder) as new:
        with quiet():
            final.save_pretrained(new)
            prepared.tokenizer.save_pretrained(new)
        figures.training(metrics, recipe.title or folder.parent.name).savefig(new / "loss.png", dpi=110)
        (new / "README.md").write_text(card(final, prepared, recipe, metrics, command), encoding="utf-8")
        write_manifest(new)


def card(
    model: FarspanForCausalLM,
    prepared: Prepared,
    recipe: Pretraining,
    metrics: list[dict[str, Any]],
    command: str,
) -> str:
    """The model's README: what it is, what it saw, and how to make it again."""
    how = recipe.train
    sources = [
        (name, ", ".join(facts["files"]), f"{facts['documents']:,}", f"{facts['tokens']:,}", f"{facts['share']:.0%}")
        for name, facts in prepared.read.items()
    ]
    marks = sorted({min(len(metrics) - 1, len(metrics) * tenth // 10) for tenth in range(11)})
    seen = [
        (f"{entry['step']:,}", f"{entry['tokens']:,}", f"{entry['loss']:.3f}")
        for entry in map(metrics.__getitem__, marks)
    ]
    return CARD.format(
        title=recipe.title or "A farspan model",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        length=how.length,
        sources=_rows(sources),
        passkeys=(PASSKEYS if recipe.data.passkey else NO_PASSKEYS).format(
            share=recipe.data.passkey, length=how.length
        ),
        steps=how.steps,
        batch=how.batch,
        tokens=how.steps * how.batch * how.length,
        losses=_rows(seen),
        command=command,
        recipe=to_toml(replace(recipe, data=replace(recipe.data, folder="", cache=""))).rstrip(),
        fingerprint=fingerprint(model),
    )


def _rows(cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


CARD = """\
# {title}

A causal language model of {parameters:,} parameters, trained by farspan on windows of {length} tokens. It is made for
studying how models behave beyond their training length, not for use.

```python
import farspan

model, tokenizer = farspan.load("path/to/this/folder")
```

## Data

| source | files | documents | tokens | share of rows |
|---|---|---|---|---|
{sources}

{passkeys}

## Training

{steps:,} steps of {batch} rows of {length} tokens: {tokens:,} tokens.

![loss](loss.png)

| step | tokens | training loss, nats |
|---|---|---|
{losses}

## Again

```
{command} data.folder=PATH
```

```toml
{recipe}
```

The SHA-256 of the weights' bf16 values is {fingerprint}; those of the files are in `manifest.json`.
"""
PASSKEYS = """\
**Passkey documents were trained on**: {share:.0%} of the rows begin with one of at most {length} tokens, with keys
that are not divisible by 11. Passkey tests must use the others, as farspan's do."""
NO_PASSKEYS = "No passkey documents were trained on."
