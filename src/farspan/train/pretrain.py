"""Pretraining: build a model and its training data from a recipe, and train it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farspan.batching import out_of_memory
from farspan.bundled import resolve_bundled
from farspan.checks import check_least, check_shares
from farspan.errors import FarspanError
from farspan.files import read_tensors, read_text, weight_files, write_text
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.compile import compile_layers, prefer_cudnn
from farspan.model.recompute import kernel_contexts
from farspan.model.transformer import zero_outputs
from farspan.progress import Progress, ignore, silent
from farspan.recipe import from_toml, to_toml
from farspan.train import checkpoint
from farspan.train.corpus import DataConfig, TrainingData, prepare_data
from farspan.train.loop import StepCallback, TrainPlan, train
from farspan.train.optim import OptimizerConfig, make_optimizers
from farspan.train.sharding import data_parallel, processes, shard
from farspan.train.steps import TrainingTask

RECIPE_DIR = Path(__file__).parent.parent / "assets" / "recipes" / "pretrain"
RECIPE = "recipe.toml"
DATA_HASH = "# its first rows: "  # the last line of recipe.toml: the hash of the first rows


@dataclass(frozen=True)
class ModelShape:
    """[model] A Llama architecture with a choice of position encodings."""

    position: str | tuple[str, ...] = "none"
    layers: int = 8
    width: int = 512
    heads: int = 8
    kv_heads: int = 0  # 0: as many as heads
    ff: int = 1344
    tied: bool = True
    table: int = 0  # rows of a learned position table; rows beyond the train length stay untrained
    zero_outputs: bool = True  # the output projections of layers start at zero


@dataclass(frozen=True)
class TrainConfig:
    """[train]"""

    steps: int = 2300
    length: int = 512
    batch: int = 256  # rows of a step, over all processes
    micro_batch: int = 256  # rows at once on one device
    save_every: int = 500
    keep_at: tuple[float, ...] = (0.2,)  # shares of the steps whose checkpoints are kept
    log_every: int = 10
    precision: str = "auto"  # auto: bf16 on a GPU, fp32 elsewhere
    compile: str = "auto"  # auto: yes on a GPU
    parallel: str = "ddp"  # or fsdp
    checkpoint_layers: bool = False  # recompute activations instead of keeping them
    tensorboard: bool = False
    dtype: str = "bfloat16"  # of the weights in the finished model


@dataclass(frozen=True)
class PretrainConfig:
    """A recipe of `farspan pretrain`."""

    data: DataConfig
    model: ModelShape = field(default_factory=ModelShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimization: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    from_: str = ""  # a bundled model, or a model folder of farspan, whose weights are the start
    title: str = ""  # one line for people

    def __post_init__(self):
        self._check_choices()
        self._check_shape()
        if not 0 <= self.seed < 2**20:
            raise FarspanError(f"seed is {self.seed}; choose it from 0 to {2**20 - 1}")
        if not all(0 < share <= 1 for share in self.train.keep_at):
            raise FarspanError(
                f"train.keep_at is {list(self.train.keep_at)}; give shares of the steps, up to 1"
            )
        check_shares(self.data, "passkey", part="data.")

    def _check_choices(self) -> None:
        choices = {
            "train.precision": (self.train.precision, ("auto", "bf16", "fp32")),
            "train.compile": (self.train.compile, ("auto", "yes", "no")),
            "train.parallel": (self.train.parallel, ("ddp", "fsdp")),
            "train.dtype": (self.train.dtype, ("bfloat16", "float32")),
        }
        for key, (value, allowed) in choices.items():
            if value not in allowed:
                raise FarspanError(f"{key} is {value!r}; choose one of {', '.join(allowed)}")
        sizes = ("steps", "length", "batch", "micro_batch", "save_every", "log_every")
        check_least(self.train, 1, *sizes, part="train.")

    def _check_shape(self) -> None:
        check_least(self.model, 1, "layers", "width", "heads", "ff", part="model.")
        heads, kv_heads = self.model.heads, self.model.kv_heads or self.model.heads
        for key, divisor, whole_key, whole in (
            ("heads", heads, "width", self.model.width),
            ("kv_heads", kv_heads, "heads", heads),
        ):
            if divisor < 1 or whole % divisor:
                raise FarspanError(
                    f"model.{key} is {divisor}, which does not divide model.{whole_key}, {whole}; "
                    "choose a divisor"
                )
        if self.model.table and self.model.table < self.train.length:
            raise FarspanError(
                f"model.table has {self.model.table} rows for windows of {self.train.length} "
                "tokens; give at least as many rows, or 0"
            )

    @property
    def plan(self) -> TrainPlan:
        steps = self.train.steps
        keep = tuple(max(1, round(share * steps)) for share in self.train.keep_at)
        return TrainPlan(
            steps, self.seed, self.optimization, self.train.save_every, keep, self.train.log_every
        )

    def config(self, vocabulary: int | None = None, eos: int | None = None) -> FarspanConfig:
        """The model's config; vocabulary and eos: of the tokenizer, once there is one."""
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
            bos_token_id=eos,
            eos_token_id=eos,
            pad_token_id=eos,
        )


# Keys that may change when a run resumes: paths, and how the work is split.
FREE_KEYS = (
    "title",
    "data.folder",
    "data.cache",
    "data.processes",
    "train.micro_batch",
    "train.save_every",
    "train.log_every",
    "train.compile",
    "train.parallel",
    "train.checkpoint_layers",
    "train.tensorboard",
)


def load_training_data(recipe: PretrainConfig, progress: Progress = silent) -> TrainingData:
    return prepare_data(
        recipe.data, recipe.train.length, recipe.seed, str(resolve_bundled(recipe.from_)), progress
    )


def build_model(recipe: PretrainConfig, config: FarspanConfig) -> FarspanForCausalLM:
    """The model before training: newly initialized, or with the weights of recipe.from_."""
    torch.manual_seed(recipe.seed)
    model = FarspanForCausalLM(config)
    if recipe.from_:
        start = Path(resolve_bundled(recipe.from_))
        weights = {
            name: tensor
            for file in weight_files(start)
            for name, tensor in read_tensors(file).items()
        }
        if not weights:
            raise FarspanError(
                f"from={recipe.from_} holds no weights; give a model folder that farspan wrote"
            )
        checkpoint.copy_tensors(weights, dict(model.named_parameters()), start)
    elif recipe.model.zero_outputs:
        zero_outputs(model)
    return model


class NextTokenLoss(nn.Module):
    """The mean next-token loss of a batch of rows."""

    def __init__(self, model: FarspanForCausalLM, precision: torch.dtype | None, compiled: bool):
        super().__init__()
        self.model, self.precision = model, precision
        self.head_loss = torch.compile(head_loss, dynamic=False) if compiled else head_loss
        if compiled:
            compile_layers(model)

    def forward(self, rows: Tensor) -> Tensor:
        with (
            torch.autocast(rows.device.type, self.precision, enabled=self.precision is not None),
            prefer_cudnn(),
        ):
            hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            return self.head_loss(hidden, self.model.lm_head.weight, rows[:, 1:])


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of hidden states [B, T, d] against tokens [B, T]; the logits are float32."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pretrain(
    recipe: PretrainConfig,
    run: Path,
    *,
    training_data: TrainingData | None = None,
    progress: Progress = silent,
    on_step: StepCallback = ignore,
) -> tuple[FarspanForCausalLM, TrainingData, list[dict[str, Any]]]:
    """Start or resume the run of a recipe in the folder `run`; returns model, data and metrics."""
    state = processes()
    check_same_recipe(recipe, run)
    recipe.config()  # refuses an impossible shape before any text is read
    if recipe.from_ and not Path(resolve_bundled(recipe.from_)).is_dir():
        raise FarspanError(
            f"from is {recipe.from_}, which is not a folder; train that model first, or set "
            "from=PATH"
        )
    training_data = training_data or load_training_data(recipe, progress)
    tokenizer = training_data.tokenizer
    config = recipe.config(len(tokenizer), tokenizer.eos_token_id)
    model = build_model(recipe, config).to(state.device)
    task = make_training_task(recipe, model, training_data)
    data_hash = hash_first_rows(training_data)
    check_same_text(data_hash, run)
    if state.is_main_process and not (run / RECIPE).exists():
        write_text(run / RECIPE, f"{to_toml(recipe)}\n{DATA_HASH}{data_hash}\n")
    try:
        metrics = train(task, recipe.plan, run, on_step).metrics
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise FarspanError(
            f"out of memory with a micro batch of {recipe.train.micro_batch} rows; rerun the same "
            f"command with train.micro_batch={max(1, recipe.train.micro_batch // 2)}"
        ) from error
    return model, training_data, metrics


def make_training_task(
    recipe: PretrainConfig, model: FarspanForCausalLM, training_data: TrainingData
) -> TrainingTask:
    """The task of the training loop: the model, its optimizers, and this process's rows."""
    state = processes()
    on_gpu = state.device.type == "cuda"
    config = recipe.train
    use_bf16 = config.precision == "bf16" or (config.precision == "auto" and on_gpu)
    if config.checkpoint_layers:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": kernel_contexts})
    model.train()
    compiled = config.compile == "yes" or (config.compile == "auto" and on_gpu)
    if config.parallel == "fsdp" and state.num_processes == 1:
        raise FarspanError(
            "train.parallel=fsdp needs several processes; start it with torchrun --nproc-per-node=N"
        )
    loss = NextTokenLoss(model, torch.bfloat16 if use_bf16 else None, compiled)
    module = shard(loss, model.model.layers) if config.parallel == "fsdp" else data_parallel(loss)
    rows, count = batch_split(config, state.num_processes)
    first = state.process_index * rows * count
    mixture = training_data.mixture

    def batches(step: int) -> list[Tensor]:
        start = step * config.batch + first
        micro_batches = [mixture.rows(start + number * rows, rows) for number in range(count)]
        return [
            (batch.pin_memory() if on_gpu else batch).to(state.device, non_blocking=True)
            for batch in micro_batches
        ]

    def write_extras(folder: Path) -> None:
        model.config.save_pretrained(folder)
        training_data.tokenizer.save_pretrained(folder)

    return TrainingTask(
        module,
        dict(model.named_parameters()),
        make_optimizers(model, recipe.optimization),
        batches,
        tokens=config.batch * config.length,
        flops=flops_per_token(model.config, config.length),
        graphed=on_gpu and compiled and state.num_processes == 1 and not config.checkpoint_layers,
        write_extras=write_extras,
    )


def batch_split(config: TrainConfig, processes: int) -> tuple[int, int]:
    """Rows per micro batch, and micro batches per step, of every process."""
    per_process, rest = divmod(config.batch, processes)
    if rest:
        raise FarspanError(
            f"a batch of {config.batch} rows cannot be split over {processes} processes; change "
            "train.batch"
        )
    rows = min(config.micro_batch, per_process)
    if per_process % rows:
        raise FarspanError(
            f"{per_process} rows per process are not a multiple of train.micro_batch={rows}; "
            f"choose a divisor of {per_process}"
        )
    return rows, per_process // rows


def flops_per_token(config: FarspanConfig, length: int) -> float:
    """Forward and backward: 6 FLOPs per matrix weight and token, plus causal attention."""
    weights = matrix_weights(config)
    heads = config.num_attention_heads * config.head_dim
    return 6.0 * weights + 6.0 * config.num_hidden_layers * heads * length


def matrix_weights(config: FarspanConfig) -> int:
    """The number of weights in matrix products, with the head."""
    width = config.hidden_size
    attention = (
        2 * width * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    )
    mlp = (3 if config.mlp == "swiglu" else 2) * width * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp) + config.vocab_size * width


def check_same_recipe(recipe: Any, run: Path, kind: str = "training run") -> None:
    """Refuse a folder that holds anything but a run of this recipe."""
    file = run / RECIPE
    if run.exists() and not run.is_dir():
        raise FarspanError(
            f"{run} is a file, and a run needs a folder; choose another name with -o"
        )
    if file.exists():
        try:
            stored = from_toml(type(recipe), read_text(file))
        except FarspanError:
            raise FarspanError(f"{run} holds no {kind}; choose another folder with -o") from None
        difference = first_difference(stored, recipe)
        if difference:
            key, stored_value, value = difference
            raise FarspanError(
                f"{run} holds another run: {key} is {stored_value!r} there and {value!r} here; "
                "choose another folder with -o"
            )
        return
    # Hidden files may be left over from a killed run.
    if run.exists() and any(path.name[0] != "." for path in run.iterdir()):
        raise FarspanError(
            f"{run} is not empty and holds no run of farspan; choose another folder with -o"
        )


def hash_first_rows(training_data: TrainingData) -> str:
    return hashlib.sha256(training_data.mixture.rows(0, 64).numpy().tobytes()).hexdigest()[:16]


def check_same_text(data_hash: str, run: Path) -> None:
    """Refuse to resume a run on other text. The text may move, so its path is not compared."""
    lines = read_text(run / RECIPE).splitlines() if (run / RECIPE).exists() else []
    stored = [line.removeprefix(DATA_HASH) for line in lines if line.startswith(DATA_HASH)]
    if stored and stored != [data_hash]:
        raise FarspanError(
            f"{run} was trained on other rows ({stored[0]}) than its text gives now ({data_hash}): "
            "the text or its tokenizer has changed; restore them, or choose another folder with -o"
        )


def first_difference(
    one: object, other: object, prefix: str = ""
) -> tuple[str, object, object] | None:
    """The first key where two recipes differ, except FREE_KEYS, with both values."""
    for name, value in vars(one).items():
        key, second = f"{prefix}{name.rstrip('_')}", getattr(other, name)
        if key in FREE_KEYS or value == second:
            continue
        if hasattr(value, "__dataclass_fields__"):
            deeper = first_difference(value, second, f"{key}.")
            if deeper:
                return deeper
            continue
        return key, value, second
    return None
