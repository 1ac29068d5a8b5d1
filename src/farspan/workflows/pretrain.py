"""`farspan pretrain`: train a recipe and write the model with its card, or estimate the cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from farspan.attention.patch import fingerprint
from farspan.checkpoints import quiet
from farspan.data.jsonlines import read_rows
from farspan.deprecation import renamed_arguments
from farspan.errors import CorruptError, FarspanError, install_hint
from farspan.files import new_folder, read_json, write_manifest
from farspan.loading import resolve_device
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.progress import (
    SAID_FROM,
    Progress,
    Say,
    Stage,
    automatic,
    format_duration,
    ignore,
    shows_progress,
    with_total,
)
from farspan.recipe import load_recipe, results_folder, to_toml
from farspan.record import write_record
from farspan.report import figures
from farspan.summaries import Plotted, Summarized, draw
from farspan.train.checkpoint import copy_tensors
from farspan.train.corpus import TrainingData, find_files
from farspan.train.loop import METRICS, StepCallback, StepMetrics
from farspan.train.metadata import begin_of_text, write_training_metadata
from farspan.train.pretrain import (
    FREE_KEYS,
    RECIPE_DIR,
    PretrainConfig,
    batch_split,
    check_same_recipe,
    flops_per_token,
)
from farspan.train.pretrain import pretrain as train_recipe
from farspan.train.sharding import full_tensor, processes

GIB = 2**30


def read_recipe(recipe: str, overrides: Sequence[str] = ()) -> PretrainConfig:
    """A recipe by name or file, with `key=value` overrides.

    >>> read_recipe("small-nope", ["steps=100"]).train.steps
    100
    """
    return load_recipe(PretrainConfig, recipe, overrides, recipe_dir=RECIPE_DIR)


@dataclass(frozen=True, repr=False)
class PretrainEstimate(Summarized):
    """The cost of a recipe, estimated without reading text or training; keys of --json."""

    parameters: int
    tokens: int
    flops: float
    weights_gib: float  # weights, gradients and optimizer state, on one device
    activations_gib: float  # of one micro batch
    files_mb: float | None  # of the text files; None if they were not found
    rate: float  # FLOP/s of matrix products on this device, measured now
    missing_text: str = ""  # why a run is refused, if text was not found

    @property
    def seconds(self) -> float:
        """A lower bound: the time of the matrix products."""
        return self.flops / self.rate

    @property
    def time(self) -> str:
        return f"at least {format_duration(self.seconds)} at {self.rate / 1e12:.3g} TFLOP/s"

    def facts(self) -> dict[str, str]:
        size = self.files_mb
        return {
            "parameters": f"{self.parameters:,}",
            "tokens": f"{self.tokens:,}",
            "time": self.time,
            "memory": f"{self.weights_gib:.1f} GiB for weights, gradients and optimizer; about "
            f"{self.activations_gib:.1f} GiB for activations",
            "text": "not found" if size is None else f"{size:,.0f} MB of files",
        }

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds_at_least": self.seconds}


def estimate(recipe: PretrainConfig) -> PretrainEstimate:
    config = recipe.config()
    with torch.device("meta"):
        model = FarspanForCausalLM(config)
    parameters = model.num_parameters()
    train, count = recipe.train, processes().num_processes
    half_precision = torch.cuda.is_available() and train.precision != "fp32"
    optimizer_bytes = 4 * (2 if recipe.optimization.optimizer == "adamw" else 1)
    shards = count if train.parallel == "fsdp" else 1
    tokens = train.steps * train.batch * train.length
    megabytes, missing = _text_size(recipe)
    return PretrainEstimate(
        parameters,
        tokens,
        tokens * flops_per_token(config, train.length),
        parameters * (4 + 4 + optimizer_bytes) / shards / GIB,
        _activation_bytes(recipe, config, count, 2 if half_precision else 4) / GIB,
        megabytes,
        count * matmul_flops_per_second(half_precision, resolve_device(None)),
        missing,
    )


def _activation_bytes(
    recipe: PretrainConfig, config: FarspanConfig, processes: int, number_bytes: int
) -> int:
    """What the backward pass of a micro batch keeps: norms, projections and products of every
    layer, and the logits."""
    rows, _ = batch_split(recipe.train, processes)
    kv = config.num_key_value_heads * config.head_dim
    layer = 6 * config.hidden_size + 2 * kv + 3 * config.intermediate_size
    layer = config.hidden_size if recipe.train.checkpoint_layers else layer
    logits = config.vocab_size * (number_bytes + 4)
    return rows * recipe.train.length * (config.num_hidden_layers * layer * number_bytes + logits)


def _text_size(recipe: PretrainConfig) -> tuple[float | None, str]:
    """The megabytes of the text files, or None and why they were not found."""
    try:
        used = [name for name, source in recipe.data.sources.items() if source.weight]
        files = [path for name in used for path in find_files(recipe.data, name)]
    except FarspanError as error:
        return None, str(error)
    parts = [part for path in files for part in ([path] if path.is_file() else path.rglob("*"))]
    return sum(part.stat().st_size for part in parts) / 1e6, ""


def matmul_flops_per_second(half_precision: bool, device: str) -> float:
    """FLOP/s of a large matrix product on a device, measured now."""
    on_gpu = torch.device(device).type == "cuda"
    size = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if half_precision else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    count = 20 if on_gpu else 3
    (a @ a).sum().item()
    start = time.perf_counter()
    for _ in range(count):
        b = a @ a
    b.sum().item()
    return count * 2 * size**3 / (time.perf_counter() - start)


@dataclass(frozen=True, repr=False)
class PretrainResult(Plotted):
    """A finished run."""

    folder: Path
    steps: int
    loss: float  # mean over the last steps
    already: bool  # it was finished before this call

    def to_json(self) -> dict[str, Any]:
        return {"model": str(self.folder), "steps": self.steps, "loss": self.loss}


@draw.register
def _(result: PretrainResult) -> Figure:
    run = result.folder.parent
    return figures.training_loss([entry for _, entry in read_rows(run / METRICS)], run.name)


@renamed_arguments(source="recipe")
@shows_progress
def pretrain(
    recipe: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    progress: Progress = automatic,
    on_step: StepCallback = ignore,
    say: Say = ignore,
) -> PretrainResult:
    """Train a recipe, or resume its run, and write the finished model to OUT/model.

    recipe: twin-nope, twin-rope, small-POSITION (nope, rope, swan, …), paper-nope, paper-rope, or a
        .toml file; overrides: its settings, as "key=value".
    out: default: runs/RECIPE.

    >>> text = ["data.folder=texts", 'data.sources={own={files="*.txt", weight=1.0}}']
    >>> size = ["model.layers=2", "train.batch=2", "train.steps=2"]
    >>> farspan.pretrain("twin-nope", [*text, *size], "runs/own").steps
    2
    """
    config = read_recipe(recipe, overrides)
    run = results_folder(recipe, out)
    if config.train.tensorboard and processes().is_main_process:
        on_step = _log_to_tensorboard(run, on_step)
    record_file = run / "record.json"
    if record_file.exists() and (run / "model").exists():
        check_same_recipe(config, run)
        record = read_json(record_file)
        if not {"steps", "loss"} <= record.keys():
            raise CorruptError(
                f"{record_file} has no steps and loss, so it is damaged; remove it and rerun the "
                "same command, which writes it anew"
            )
        return PretrainResult(run / "model", record["steps"], record["loss"], already=True)
    if processes().is_main_process:
        on_step = _announce(config, Path(recipe).stem, progress, on_step, say)
    model, training_data, metrics = train_recipe(config, run, progress=progress, on_step=on_step)
    last = metrics[-max(1, len(metrics) // 50) :]
    loss = sum(entry["loss"] for entry in last) / len(last)
    weights = {
        name: full_tensor(parameter.detach()) for name, parameter in model.named_parameters()
    }
    if processes().is_main_process:
        command = " ".join(
            ["farspan pretrain", Path(recipe).name, *filter(_changes_the_model, overrides)]
        )
        if not (run / "model").exists():
            _write_model(
                run / "model", model.config, weights, training_data, config, metrics, command
            )
        results = {"steps": config.train.steps, "loss": loss, "data": training_data.summary}
        write_record(record_file, "pretrain", {"recipe": to_toml(config)}, results)
    processes().wait_for_everyone()
    return PretrainResult(run / "model", config.train.steps, loss, already=False)


def _announce(
    config: PretrainConfig,
    name: str,
    progress: Progress,
    on_step: StepCallback,
    say: Say,
) -> StepCallback:
    """Say what the training takes at least; the steps show a bar, and when timed, their total."""
    cost, steps = estimate(config), config.train.steps
    if cost.seconds >= SAID_FROM and cost.files_mb is not None:  # else the run is refused
        say(f"{cost.tokens:,} tokens to train on, {cost.time}")
    advance: Callable[..., None] | None = None  # the bar follows those of reading the text
    last_step = 0

    def show_step(metrics: StepMetrics) -> None:
        nonlocal advance, last_step
        if advance is None:
            label = f"pretrain {name}"
            advance = with_total(progress, [Stage(label, steps)], say)(label, steps)
        speed = f"{metrics.tokens_per_second:,.0f} tokens/s"
        mfu = f", MFU {metrics.mfu:.0%}" if metrics.mfu else ""
        advance(metrics.step - last_step, f"loss {metrics.loss:.3f}, {speed}{mfu}")
        last_step = metrics.step
        on_step(metrics)

    return show_step


def _changes_the_model(override: str) -> bool:
    """Whether an override belongs in the model card; paths and the split of the work do not."""
    return override.partition("=")[0].rpartition(".")[2] not in {
        key.rpartition(".")[2] for key in FREE_KEYS
    }


def _log_to_tensorboard(run: Path, on_step: StepCallback) -> StepCallback:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FarspanError(
            "train.tensorboard=true needs tensorboard, which is not installed; "
            + install_hint("tensorboard")
        ) from None
    writers: list[Any] = []

    def log_step(metrics: StepMetrics) -> None:
        if not writers:  # opened at the first step: before that the folder may be another run's
            writers.append(SummaryWriter(run / "tensorboard"))
        (writer,) = writers
        for name in ("loss", "lr", "grad_norm", "tokens_per_second"):
            writer.add_scalar(name, getattr(metrics, name), metrics.step)
        writer.flush()
        on_step(metrics)

    return log_step


def _write_model(
    folder: Path,
    config: FarspanConfig,
    weights: dict[str, Tensor],
    training_data: TrainingData,
    recipe: PretrainConfig,
    metrics: list[dict[str, Any]],
    command: str,
) -> None:
    model = FarspanForCausalLM(config).to(getattr(torch, recipe.train.dtype))
    copy_tensors(weights, dict(model.named_parameters()), folder)
    with new_folder(folder) as new:
        with quiet():
            model.save_pretrained(new)
            training_data.tokenizer.save_pretrained(new)
        figures.training_loss(metrics, recipe.title or folder.parent.name).savefig(
            new / "loss.png", dpi=110
        )
        card = model_card(model, training_data, recipe, metrics, command)
        (new / "README.md").write_text(card, encoding="utf-8")
        write_training_metadata(
            new,
            passkey_documents=recipe.data.passkey > 0,
            # Rows have no such token; a model that goes on keeps what it first learned.
            begin_of_text=bool(recipe.from_ and begin_of_text(training_data.tokenizer)),
        )
        write_manifest(new)


def model_card(
    model: FarspanForCausalLM,
    training_data: TrainingData,
    recipe: PretrainConfig,
    metrics: list[dict[str, Any]],
    command: str,
) -> str:
    """The model's README: what it is, its training data, its loss, and how to reproduce it."""
    train = recipe.train
    sources = [
        (
            name,
            ", ".join(source["files"]),
            f"{source['documents']:,}",
            f"{source['tokens']:,}",
            f"{source['share']:.0%}",
        )
        for name, source in training_data.summary.items()
    ]
    indexes = sorted({min(len(metrics) - 1, len(metrics) * tenth // 10) for tenth in range(11)})
    losses = [
        (f"{entry['step']:,}", f"{entry['tokens']:,}", f"{entry['loss']:.3f}")
        for entry in map(metrics.__getitem__, indexes)
    ]
    return CARD.format(
        title=recipe.title or "A farspan model",
        parameters=model.num_parameters(),
        length=train.length,
        sources=_table_rows(sources),
        passkeys=(PASSKEYS if recipe.data.passkey else NO_PASSKEYS).format(
            share=recipe.data.passkey, length=train.length
        ),
        steps=train.steps,
        batch=train.batch,
        tokens=train.steps * train.batch * train.length,
        losses=_table_rows(losses),
        command=command,
        recipe=to_toml(replace(recipe, data=replace(recipe.data, folder="", cache=""))).rstrip(),
        fingerprint=fingerprint(model),
    )


def _table_rows(cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


CARD = """\
# {title}

A causal language model with {parameters:,} parameters, trained by farspan on windows of {length}
tokens. It is meant for studies of length generalization, not for production.

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

## Reproduce

```
{command} data.folder=PATH
```

```toml
{recipe}
```

The SHA-256 of the weights in bf16 is {fingerprint}; `manifest.json` has those of the files.
"""
PASSKEYS = """\
The training data **contains passkey documents**: {share:.0%} of the rows begin with one of at most
{length} tokens. Its keys are not divisible by 11, so a passkey test must use keys that are, as
farspan's tests do."""
NO_PASSKEYS = "The training data contains no passkey documents."
