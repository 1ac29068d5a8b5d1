"""Pretraining: a recipe becomes a model on prepared text, and a run of the loop."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farspan.errors import FarspanError
from farspan.files import read_tensors, weight_files, write_text
from farspan.memory import out_of_memory
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.fast import compile_layers, quick_attention
from farspan.model.transformer import zero_outputs
from farspan.progress import Progress, silent
from farspan.recipe import from_toml, to_toml
from farspan.train import checkpoint
from farspan.train.corpus import Data, Prepared, prepare
from farspan.train.loop import Listener, Plan, train
from farspan.train.optim import Optimization, optimizers
from farspan.train.sharding import data_parallel, processes, shard
from farspan.train.steps import Work
from farspan.twins import located

RECIPE = "recipe.toml"
SAME_TEXT = "# its first rows: "  # the line of a run's recipe that tells one text, and one tokenizer, from another


@dataclass(frozen=True)
class Shape:
    """[model] A Llama with a choice of position encoding."""

    position: str | tuple[str, ...] = "none"
    layers: int = 8
    width: int = 512
    heads: int = 8
    kv_heads: int = 0  # 0: as many as heads
    ff: int = 1344
    tied: bool = True
    table: int = 0  # rows of a learned position table; those beyond the training length stay untrained
    zero_outputs: bool = True  # what a layer adds to the stream starts at zero


@dataclass(frozen=True)
class Training:
    """[train]"""

    steps: int = 2300
    length: int = 512
    batch: int = 256  # rows of a step, over all processes
    micro_batch: int = 256  # rows at once on one device
    save_every: int = 500
    keep_at: tuple[float, ...] = (0.2,)  # shares of the steps whose checkpoints stay
    log_every: int = 10
    precision: str = "auto"  # bf16 on a GPU, fp32 elsewhere
    compile: str = "auto"  # yes on a GPU
    parallel: str = "ddp"  # or fsdp
    checkpoint_layers: bool = False  # compute activations again instead of keeping them
    tensorboard: bool = False
    dtype: str = "bfloat16"  # of the weights in the finished model


@dataclass(frozen=True)
class Pretraining:
    """A recipe of `farspan pretrain`."""

    data: Data
    model: Shape = field(default_factory=Shape)
    train: Training = field(default_factory=Training)
    optimization: Optimization = field(default_factory=Optimization)
    seed: int = 0
    from_: str = ""  # a twin, or a model folder of ours, whose weights are the start
    title: str = ""  # one line for people

    def __post_init__(self):
        choices = {
            "train.precision": (self.train.precision, ("auto", "bf16", "fp32")),
            "train.compile": (self.train.compile, ("auto", "yes", "no")),
            "train.parallel": (self.train.parallel, ("ddp", "fsdp")),
            "train.dtype": (self.train.dtype, ("bfloat16", "float32")),
        }
        for key, (value, allowed) in choices.items():
            if value not in allowed:
                raise FarspanError(f"{key} is {value!r}; choose one of {', '.join(allowed)}")
        for key in ("steps", "length", "batch", "micro_batch", "save_every", "log_every"):
            if getattr(self.train, key) < 1:
                raise FarspanError(f"train.{key} is {getattr(self.train, key)}; give 1 or more")
        for key in ("layers", "width", "heads", "ff"):
            if getattr(self.model, key) < 1:
                raise FarspanError(f"model.{key} is {getattr(self.model, key)}; give 1 or more")
        heads, kv_heads = self.model.heads, self.model.kv_heads or self.model.heads
        for key, part, of, whole in (
            ("heads", heads, "width", self.model.width),
            ("kv_heads", kv_heads, "heads", heads),
        ):
            if part < 1 or whole % part:
                raise FarspanError(f"model.{key} is {part} and no divisor of model.{of}, {whole}; choose one")
        if self.model.table and self.model.table < self.train.length:
            raise FarspanError(
                f"model.table has {self.model.table} rows for windows of {self.train.length} tokens; give as many, or 0"
            )
        if not 0 <= self.seed < 2**20:
            raise FarspanError(f"seed is {self.seed}; choose it from 0 to {2**20 - 1}")
        if not all(0 < share <= 1 for share in self.train.keep_at):
            raise FarspanError(f"train.keep_at is {list(self.train.keep_at)}; these are shares of the steps, up to 1")
        if not 0 <= self.data.passkey <= 1:
            raise FarspanError(f"data.passkey is {self.data.passkey:g}; it is a share of the rows, from 0 to 1")

    @property
    def plan(self) -> Plan:
        steps = self.train.steps
        keep = tuple(max(1, round(share * steps)) for share in self.train.keep_at)
        return Plan(steps, self.seed, self.optimization, self.train.save_every, keep, self.train.log_every)

    def config(self, vocabulary: int | None = None, end: int | None = None) -> FarspanConfig:
        shape = self.model
        return FarspanConfig(
            vocab_size=vocabulary or self.data.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.ff,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads or shape.heads,
            max_position_embeddings=self.train.length,
            position=shape.position if isinstance(shape.position, str) else list(shape.position),
            position_table=shape.table or None,
            tie_word_embeddings=shape.tied,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
        )


# What may differ between a run and its resumption: where things lie and how the work is spread.
FREE = (
    *("title", "data.folder", "data.cache", "data.processes"),
    *("train.micro_batch", "train.save_every", "train.log_every", "train.compile", "train.parallel"),
    *("train.checkpoint_layers", "train.tensorboard"),
)


def prepared_for(recipe: Pretraining, progress: Progress = silent) -> Prepared:
    return prepare(recipe.data, recipe.train.length, recipe.seed, str(located(recipe.from_)), progress)


def build(recipe: Pretraining, config: FarspanConfig) -> FarspanForCausalLM:
    """The model at its start: fresh, or with another's weights."""
    torch.manual_seed(recipe.seed)
    model = FarspanForCausalLM(config)
    if recipe.from_:
        start = Path(located(recipe.from_))
        weights = {name: tensor for file in weight_files(start) for name, tensor in read_tensors(file).items()}
        if not weights:
            raise FarspanError(f"from={recipe.from_} holds no weights; give a model folder that farspan wrote")
        checkpoint.fit(weights, dict(model.named_parameters()), start)
    elif recipe.model.zero_outputs:
        zero_outputs(model)
    return model


class NextToken(nn.Module):
    """The mean loss of a batch of rows: each token predicted from those before it."""

    def __init__(self, model: FarspanForCausalLM, precision: torch.dtype | None, compiled: bool):
        super().__init__()
        self.model, self.precision = model, precision
        self.head_loss = torch.compile(head_loss, dynamic=False) if compiled else head_loss
        if compiled:
            compile_layers(model)

    def forward(self, rows: Tensor) -> Tensor:
        with (
            torch.autocast(rows.device.type, self.precision, enabled=self.precision is not None),
            quick_attention(),
        ):
            hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            return self.head_loss(hidden, self.model.lm_head.weight, rows[:, 1:])


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of hidden states [B, T, d] against tokens [B, T], in float32 from the logits on."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pretrain(
    recipe: Pretraining,
    run: Path,
    *,
    prepared: Prepared | None = None,
    progress: Progress = silent,
    listen: Listener = lambda moment: None,
) -> tuple[FarspanForCausalLM, Prepared, list[dict[str, Any]]]:
    """Train, or go on training, what the recipe says in the folder `run`; returns model, data and metrics."""
    state = processes()
    refuse_another(recipe, run)
    recipe.config()  # a shape that cannot be is known before any text is read
    if recipe.from_ and not Path(located(recipe.from_)).is_dir():
        raise FarspanError(
            f"from is {recipe.from_}, and there is no such folder; train that model first, or name one with from=PATH"
        )
    prepared = prepared or prepared_for(recipe, progress)
    config = recipe.config(len(prepared.tokenizer), prepared.tokenizer.eos_token_id)
    model = build(recipe, config).to(state.device)
    work = pretraining(recipe, model, prepared)
    rows = first_rows(prepared)
    refuse_other_text(rows, run)
    if state.is_main_process and not (run / RECIPE).exists():
        write_text(run / RECIPE, f"{to_toml(recipe)}\n{SAME_TEXT}{rows}\n")
    try:
        metrics = train(work, recipe.plan, run, listen)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise FarspanError(
            f"out of memory with {recipe.train.micro_batch} rows at once; give the same command with "
            f"train.micro_batch={max(1, recipe.train.micro_batch // 2)}"
        ) from error
    return model, prepared, metrics


def pretraining(recipe: Pretraining, model: FarspanForCausalLM, prepared: Prepared) -> Work:
    """The work of the loop: a model, its optimizers, and this process's rows of every step."""
    state = processes()
    on_gpu = state.device.type == "cuda"
    how = recipe.train
    precision = torch.bfloat16 if how.precision == "bf16" or (how.precision == "auto" and on_gpu) else None
    if how.checkpoint_layers:
        model.gradient_checkpointing_enable()
    model.train()
    compiled = how.compile == "yes" or (how.compile == "auto" and on_gpu)
    if how.parallel == "fsdp" and state.num_processes == 1:
        raise FarspanError("train.parallel=fsdp needs several processes; start it with torchrun --nproc-per-node=N")
    alone = NextToken(model, precision, compiled)
    module = shard(alone, model.model.layers) if how.parallel == "fsdp" else data_parallel(alone)
    rows, count = shares(how, state.num_processes)
    first = state.process_index * rows * count
    mixture = prepared.mixture

    def batches(step: int) -> list[Tensor]:
        start = step * how.batch + first
        mine = [mixture.rows(start + number * rows, rows) for number in range(count)]
        return [(each.pin_memory() if on_gpu else each).to(state.device, non_blocking=True) for each in mine]

    def beside(folder: Path) -> None:
        model.config.save_pretrained(folder)
        prepared.tokenizer.save_pretrained(folder)

    return Work(
        module,
        dict(model.named_parameters()),
        optimizers(model, recipe.optimization),
        batches,
        tokens=how.batch * how.length,
        flops=flops_per_token(model.config, how.length),
        recorded=on_gpu and compiled and state.num_processes == 1 and not how.checkpoint_layers,
        beside=beside,
    )


def shares(how: Training, processes: int) -> tuple[int, int]:
    """Rows of a micro batch and micro batches of a step, for each process."""
    mine, rest = divmod(how.batch, processes)
    if rest:
        raise FarspanError(f"a batch of {how.batch} rows cannot be shared by {processes} processes; change train.batch")
    rows = min(how.micro_batch, mine)
    if mine % rows:
        raise FarspanError(
            f"{mine} rows a process are no multiple of train.micro_batch={rows}; choose a divisor of {mine}"
        )
    return rows, mine // rows


def flops_per_token(config: FarspanConfig, length: int) -> float:
    """Forward and backward: 6 for every weight that a token is multiplied with, and causal attention."""
    weights = matrix_weights(config)
    heads = config.num_attention_heads * config.head_dim
    return 6.0 * weights + 6.0 * config.num_hidden_layers * heads * length


def matrix_weights(config: FarspanConfig) -> int:
    """The weights of all matrix products, the head's among them."""
    width = config.hidden_size
    attention = 2 * width * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    mlp = (3 if config.mlp == "swiglu" else 2) * width * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp) + config.vocab_size * width


def refuse_another(recipe: Pretraining, run: Path) -> None:
    """A folder is free or holds a run of this very recipe."""
    file = run / RECIPE
    if run.exists() and not run.is_dir():
        raise FarspanError(f"{run} is a file, and a run needs a folder; choose another name with -o")
    if file.exists():
        try:
            other = from_toml(Pretraining, file.read_text(encoding="utf-8"))
        except FarspanError:
            raise FarspanError(f"{run} holds no training run; choose another folder with -o") from None
        key = first_difference(other, recipe)
        if key:
            name, there, here = key
            raise FarspanError(
                f"{run} holds another run: {name} is {there!r} there and {here!r} here; choose another folder with -o"
            )
        return
    if run.exists() and any(path.name[0] != "." for path in run.iterdir()):  # a killed run's litter is nobody's
        raise FarspanError(f"{run} is not empty and holds no run of farspan's; choose another folder with -o")


def first_rows(prepared: Prepared) -> str:
    return hashlib.sha256(prepared.mixture.rows(0, 64).numpy().tobytes()).hexdigest()[:16]


def refuse_other_text(rows: str, run: Path) -> None:
    """Text may move between a run and its resumption, not change: a folder's name says nothing of what is in it."""
    there = (run / RECIPE).read_text(encoding="utf-8").splitlines() if (run / RECIPE).exists() else []
    known = [line.removeprefix(SAME_TEXT) for line in there if line.startswith(SAME_TEXT)]
    if known and known != [rows]:
        raise FarspanError(
            f"{run} was trained on other rows ({known[0]}) than its text gives now ({rows}): the text or its tokenizer "
            "has changed; bring them back, or choose another folder with -o"
        )


def first_difference(one: object, other: object, prefix: str = "") -> tuple[str, object, object] | None:
    """The first key in which two recipes differ, those aside that may, with both values."""
    for name, value in vars(one).items():
        key, second = f"{prefix}{name.rstrip('_')}", getattr(other, name)
        if key in FREE or value == second:
            continue
        if hasattr(value, "__dataclass_fields__"):
            deeper = first_difference(value, second, f"{key}.")
            if deeper:
                return deeper
            continue
        return key, value, second
    return None
