"""`farspan lab finetune`: length generalization of a pretrained model on a lab task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from farspan.attention.model_facts import max_positions, probe_or_none
from farspan.begin_of_text import load_with_begin_of_text
from farspan.errors import FarspanError
from farspan.files import file_name, write_text
from farspan.lab.finetune import FinetuneConfig, finetune_model, make_text_data, match_answers
from farspan.lab.ranking import LEARNED_THRESHOLD, LabEntry, accuracy
from farspan.lab.task_data import count_by_length
from farspan.lab.tasks import LabTask
from farspan.loading import check_source, resolve_device
from farspan.progress import Progress, automatic, shows_progress
from farspan.recipe import apply_overrides, results_folder, to_toml
from farspan.record import write_record
from farspan.report import lab_figures, style
from farspan.summaries import Plotted, draw
from farspan.train.loop import StepMetrics
from farspan.train.pretrain import check_same_recipe
from farspan.workflows.lab import resolve_task

RECIPE = "recipe.toml"


@dataclass(frozen=True, eq=False, repr=False)
class FinetuneResult(Plotted):
    """The exact match of a fine-tuned model, [correct, total] by length."""

    in_range: dict[str, list[int]]
    beyond: dict[str, list[int]]
    loss: float  # of the last step, in nats per token of the answers
    folder: Path
    panel: lab_figures.Panel

    @property
    def learned(self) -> bool:
        return accuracy(self.in_range) >= LEARNED_THRESHOLD

    def facts(self) -> dict[str, str]:
        learned = "learned" if self.learned else "not learned"
        return {
            "exact match in range": f"{accuracy(self.in_range):.3f} ({learned})",
            "exact match beyond": f"{accuracy(self.beyond):.3f}",
            "loss": f"{self.loss:.4g}",
            "folder": str(self.folder),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "in_range": accuracy(self.in_range),
            "beyond": accuracy(self.beyond),
            "learned": self.learned,
            "loss": self.loss,
            "folder": str(self.folder),
        }


@draw.register
def _(result: FinetuneResult) -> Figure:
    return lab_figures.accuracy_by_length([result.panel])


@shows_progress
def finetune(
    model: str,
    task: str,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
) -> FinetuneResult:
    """Fine-tune a model on a lab task, or resume, and test it within and beyond the train lengths.

    task: a built-in task, or RECIPE.toml:TASK for a task of a recipe's own.
    trust_remote_code: run the code of the model and of the recipe.

    >>> finetune("nope-twin", "copy", ["steps=200"], "runs/copy").learned
    """
    config = apply_overrides(FinetuneConfig(str(model), task), overrides)
    lab_task, _, version = resolve_task(config.task, trust_remote_code)
    config = replace(config, task_sha256=version)
    config.check_task(lab_task)
    folder = results_folder(f"{file_name(model)}-{lab_task.name}", out)
    device = resolve_device(device)
    check_source(model, trust_remote_code=trust_remote_code)
    check_same_recipe(config, folder, "fine-tuning")
    loaded, tokenizer, _ = load_with_begin_of_text(
        model, device=device, trust_remote_code=trust_remote_code
    )
    data = make_text_data(config, lab_task, tokenizer)
    limit = max_positions(loaded.config, probe_or_none(loaded))
    if limit is not None and data.max_length > limit:
        raise FarspanError(
            f"examples of {task} have up to {data.max_length} tokens, but {model} has a table of "
            f"{limit} positions; test on shorter lengths"
        )
    write_text(folder / RECIPE, to_toml(config))
    advance = progress("fine-tune", config.steps)

    def on_step(metrics: StepMetrics) -> None:
        advance(1, f"loss {metrics.loss:.4f}")

    trained = finetune_model(loaded, data.train, config, folder, on_step)
    in_range = count_by_length(match_answers(loaded, data.held_out), data.held_out_lengths)
    beyond = count_by_length(match_answers(loaded, data.beyond), data.beyond_lengths)
    panel = _panel(config, lab_task, in_range, beyond)
    result = FinetuneResult(in_range, beyond, trained.metrics[-1]["loss"], folder, panel)
    _write_result(config, result, device)
    return result


def _panel(
    config: FinetuneConfig,
    task: LabTask,
    in_range: dict[str, list[int]],
    beyond: dict[str, list[int]],
) -> lab_figures.Panel:
    results = ({"in_range": in_range, "beyond": beyond},)
    entry = LabEntry(
        task.name, "", config.scratchpad, config.model, config.lr, results, (config.seed,)
    )
    curves = {Path(config.model).name: entry.curve()}
    return lab_figures.Panel(task.name, config.ranges(task)[0][1], task.length_unit, curves)


def _write_result(config: FinetuneConfig, result: FinetuneResult, device: str) -> None:
    style.save(lab_figures.accuracy_by_length([result.panel]), result.folder / "accuracy")
    write_record(
        result.folder / "record.json",
        "lab finetune",
        {**asdict(config), "device": device},
        {
            "loss": result.loss,
            "learned": result.learned,
            "in_range": result.in_range,
            "beyond": result.beyond,
        },
    )
