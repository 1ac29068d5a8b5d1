"""Fine-tune a pretrained model on a lab task, and test it at unseen lengths.

An example is a text in the model's own tokens: the input, a line break, the target and the end of
text. Loss and exact match count the target and the end only, as for the models of a study.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.seam import eval_mode
from farspan.batching import run_in_batches
from farspan.errors import FarspanError
from farspan.lab.examples import check_lengths
from farspan.lab.fleet import MAX_LOGITS
from farspan.lab.rows import Rows
from farspan.lab.scratchpad import parse_parts
from farspan.lab.task_data import TaskData
from farspan.lab.tasks import Example, LabTask, Range
from farspan.progress import ignore
from farspan.train.loop import StepCallback, TrainPlan, TrainResult, train
from farspan.train.metadata import begin_of_text
from farspan.train.optim import OptimizerConfig, make_optimizers
from farspan.train.sharding import data_parallel
from farspan.train.steps import TrainingTask

IGNORED = -100  # the label that torch's loss leaves out


@dataclass(frozen=True)
class FinetuneConfig:
    """The settings of `farspan lab finetune`."""

    model: str
    task: str
    train_lengths: str = ""  # as 2:20; default: those of the task
    test_lengths: str = ""
    scratchpad: str = "none"
    train_examples: int = 20_000
    test_examples: int = 1_000  # in range, and as many beyond
    even_lengths: bool = True
    steps: int = 1_000
    batch: int = 32
    lr: float = 1e-4  # of AdamW, with a linear warmup and a cosine to a tenth
    warmup: int = 50
    weight_decay: float = 0.05
    seed: int = 0  # of the examples and their order
    task_sha256: str = ""  # of a recipe's own task

    def __post_init__(self):
        minima = {"train_examples": 1, "test_examples": 2, "steps": 1, "batch": 1}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise FarspanError(f"{name} is {getattr(self, name)}; set it to {minimum} or more")
        if not 0 <= self.seed < 2**20:
            raise FarspanError(f"seed is {self.seed}; choose it from 0 to {2**20 - 1}")
        if not 0 < self.lr < math.inf:
            raise FarspanError(f"lr is {self.lr:g}; choose a learning rate above 0")
        self.optimization()

    def check_task(self, task: LabTask) -> None:
        """Raise an error if the task lacks these lengths or this scratchpad."""
        parse_parts(self.scratchpad, task.name)
        check_lengths(task, self.ranges(task), self.even_lengths)

    def ranges(self, task: LabTask) -> tuple[Range, Range]:
        """The lengths to train on and to test on."""
        return task.ranges(self.train_lengths, self.test_lengths)

    def optimization(self) -> OptimizerConfig:
        return OptimizerConfig(
            "adamw",
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup=self.warmup,
            schedule="cosine",
            floor=0.1,
        )


def make_text_data(
    config: FinetuneConfig, task: LabTask, tokenizer: PreTrainedTokenizerBase
) -> TaskData:
    """The examples of the task as rows of the model's tokens."""
    return TaskData.make(
        task,
        config.ranges(task),
        lambda examples: encode_texts(examples, tokenizer),
        train_examples=config.train_examples,
        test_examples=config.test_examples,
        seed=config.seed,
        scratchpad=config.scratchpad,
        even_lengths=config.even_lengths,
    )


def encode_texts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Input, line break, target and end of text, padded on the right."""
    end = tokenizer.eos_token_id
    if end is None:
        raise FarspanError(
            "the tokenizer has no end-of-text token, so answers have no end; choose another model"
        )
    first = begin_of_text(tokenizer)

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    prompts = [[*first, *ids] for ids in encode([f"{example.input}\n" for example in examples])]
    targets = [[*ids, end] for ids in encode([example.target for example in examples])]
    return Rows.pad(prompts, targets, end, np.int64)


class AnswerLoss(nn.Module):
    """The mean loss over the answers of a batch [2, B, T] of tokens and labels."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        ids, labels = batch
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten())


def draw_batch(rows: Rows, config: FinetuneConfig, step: int) -> Tensor:
    """The batch of a step, [2, B, T]: tokens, and labels that leave out all but the answers."""
    rng = np.random.default_rng((config.seed, step))
    drawn = torch.from_numpy(rng.integers(len(rows), size=config.batch))
    batch = rows.take(drawn, int(rows.stop[drawn].max()))
    labels = batch.ids.clone()
    labels[:, 0] = IGNORED
    labels[:, 1:][~batch.answer_mask] = IGNORED
    return torch.stack((batch.ids, labels))


def finetune_model(
    model: PreTrainedModel,
    rows: Rows,
    config: FinetuneConfig,
    folder: Path,
    on_step: StepCallback = ignore,
) -> TrainResult:
    """Train all weights in float32 on the answers of the rows, or resume the run in the folder."""
    model.float().train()
    task = TrainingTask(
        data_parallel(AnswerLoss(model), model),
        dict(model.named_parameters()),
        make_optimizers(model, config.optimization()),
        lambda step: [draw_batch(rows, config, step).to(model.device)],
        tokens=config.batch * rows.ids.shape[1],
    )
    plan = TrainPlan(config.steps, config.seed, config.optimization(), log_every=1)
    try:
        return train(task, plan, folder, on_step)
    finally:
        model.eval()


@torch.no_grad()
def match_answers(model: PreTrainedModel, rows: Rows) -> np.ndarray:
    """Whether greedy decoding gives the whole answer of each row: bool [N].

    By teacher forcing: greedy decoding fails at the first token that is not the most likely one.
    """
    order = rows.by_length()
    correct = np.zeros(len(rows), dtype=bool)

    def evaluate(first: int, last: int) -> None:
        picked = order[first:last]
        batch = rows.take(picked, int(rows.stop[picked].max())).to(model.device)
        predictions = model(input_ids=batch.ids[:, :-1], use_cache=False).logits.argmax(-1)
        matches = (predictions == batch.ids[:, 1:]) | ~batch.answer_mask
        correct[picked.numpy()] = matches.all(1).cpu().numpy()

    per_row = rows.ids.shape[1] * model.config.get_text_config().vocab_size
    with eval_mode(model):
        run_in_batches(len(rows), max(1, MAX_LOGITS // per_row), evaluate)
    return correct
