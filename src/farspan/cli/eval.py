"""`farspan eval`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from farspan.cli.choices import PRESETS, SUITES, complete
from farspan.cli.console import (
    IS_MAIN_PROCESS,
    console,
    format_count,
    make_table,
    note,
    print_json,
    print_line,
    print_notes,
    print_saved,
    required_width,
)
from farspan.cli.options import (
    MODEL_KINDS,
    AsJson,
    Bos,
    Device,
    DeviceMap,
    Position,
    TrustRemoteCode,
    out_option,
    parse_data,
)
from farspan.record import format_number
from farspan.signals import stoppable

if TYPE_CHECKING:
    from farspan.evals.results import EvalResult
    from farspan.evals.scores import Score

# Left out in this order on a narrow terminal; the record has them all.
OPTIONAL_COLUMNS = ("skipped", "truncated", "n", "95% CI")

Out = Annotated[
    Path, out_option("Results folder. Cells that it already holds are not measured again.")
]
SuiteName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="quick, paper, perplexity, passkey, needle, nonliteral, ruler, longbench or "
        "commonsense.",
        autocompletion=complete(SUITES),
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="quick (8 windows of perplexity, 5 examples of each task, 1 passkey at each depth, "
        "where no option sets them) or full (all of the suite).",
        show_default="quick on a CPU, else full",
        autocompletion=complete(PRESETS),
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        "--lengths",
        metavar="LENGTHS",
        help="Context lengths in tokens, e.g. 512,1024 or 512:4096 (doublings).",
        show_default="from the train length on",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="PATH, or NAME=PATH for a suite of several texts, e.g. pg19=data/pg19; repeatable.",
        show_default="python-docs/score in quick and perplexity",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model to compare with, evaluated in the same way."),
]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="GATE",
        help='Condition on a score, e.g. "ppl@512<=20", or "ppl@512<=1.05x" for 1.05 times the '
        "baseline; repeatable. If one fails, the exit code is 3.",
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, metavar="N", help="Random seed of passkeys, needles and samples.")
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Perplexity: same (the same tokens at every length), paper-a (as Wang 2024) or yarn "
        "(as YaRN).",
        show_default="same; paper-a in suite paper",
        rich_help_panel="Evaluation settings",
    ),
]
Metric = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Perplexity: ppl, or longppl beside it: perplexity over tokens that need far context.",
        rich_help_panel="Evaluation settings",
    ),
]


def _count_option(help: str, default: str) -> Any:
    """A number of the evaluation settings, with its computed default."""
    return typer.Option(
        min=1,
        metavar="N",
        help=help,
        show_default=default,
        rich_help_panel="Evaluation settings",
    )


Stride = Annotated[
    int | None,
    _count_option("Perplexity: tokens scored per window.", "256, at most half the shortest length"),
]
Budget = Annotated[
    int | None,
    _count_option("Perplexity: maximum number of scored tokens.", "2,097,152; none in mode yarn"),
]
SampledWindows = Annotated[
    int | None,
    _count_option(
        "Perplexity: maximum number of windows, sampled at random.",
        "8 with preset quick; else all, or 32 in suite quick",
    ),
]
Beams = Annotated[
    int | None,
    _count_option(
        "LongBench: beams of the beam search; 1 decodes greedily.", "1; 5 in suite paper"
    ),
]
Limit = Annotated[
    int | None,
    _count_option(
        "needle, nonliteral, ruler, longbench, commonsense: examples per task.",
        "5 with preset quick; else 20 in needle, nonliteral and ruler, all in others",
    ),
]
Tasks = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Tasks with commas. needle: single, multi-key, multi-value, multi-query, variables. "
        "ruler: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt, "
        "cwe, fwe, qa_1, qa_2. commonsense: arc_challenge, arc_easy, boolq, hellaswag, openbookqa, "
        "piqa, winogrande.",
        show_default="all; qa_1 and qa_2 with --data squad= and hotpotqa=",
        rich_help_panel="Evaluation settings",
    ),
]
ApplyChatTemplate = Annotated[
    bool,
    typer.Option(
        "--apply-chat-template",
        help="RULER: send prompts as messages, by the chat template of the tokenizer.",
        rich_help_panel="Evaluation settings",
    ),
]
SystemInstruction = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="RULER: system message of the chat.",
        rich_help_panel="Evaluation settings",
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=100,
        metavar="SCORE",
        help="RULER: score from which on a length is effective.",
        show_default="85.6",
        rich_help_panel="Evaluation settings",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="needle, nonliteral, ruler, longbench: prompts answered together; above 1 rounding "
        "can change answers.",
        show_default="1 on a CPU, else as many as fit",
        rich_help_panel="Evaluation settings",
    ),
]


SERVER = "A model behind a server (MODEL is a URL; a key is read from OPENAI_API_KEY)"
ServedModel = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Name of the model on the server.",
        show_default="the only one",
        rich_help_panel=SERVER,
    ),
]
Tokenizer = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="Required for a server: a MODEL with the tokenizer of the served one. Its train "
        "length gives the default lengths.",
        rich_help_panel=SERVER,
    ),
]
Api = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="completions (prompts as they are) or chat (prompts as messages of the user).",
        rich_help_panel=SERVER,
    ),
]
NumConcurrent = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Requests at a time.", rich_help_panel=SERVER),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.001, metavar="SECONDS", help="Time for one answer.", rich_help_panel=SERVER),
]
MaxRetries = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Further attempts after a failure, each after a longer wait.",
        rich_help_panel=SERVER,
    ),
]


def eval_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"Model: {MODEL_KINDS}, or the URL of a server, e.g. http://localhost:8000/v1.",
        ),
    ],
    out: Out,
    suite: SuiteName = "quick",
    preset: Preset = None,
    lengths: Lengths = "",
    data: Data = None,
    baseline: Baseline = None,
    gate: Gates = None,
    seed: Seed = 0,
    device: Device = None,
    as_json: AsJson = False,
    mode: Mode = None,
    metric: Metric = "ppl",
    stride: Stride = None,
    budget: Budget = None,
    windows: SampledWindows = None,
    beams: Beams = None,
    limit: Limit = None,
    tasks: Tasks = "",
    apply_chat_template: ApplyChatTemplate = False,
    system_instruction: SystemInstruction = None,
    threshold: Threshold = None,
    batch_size: BatchSize = None,
    position: Position = None,
    bos: Bos = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    served_model: ServedModel = "",
    tokenizer: Tokenizer = "",
    api: Api = "completions",
    num_concurrent: NumConcurrent = 8,
    timeout: Timeout = 600.0,
    max_retries: MaxRetries = 5,
) -> None:
    """Evaluate a model by length: perplexity, passkeys, needles, RULER, LongBench, commonsense.

    Rerun the same command to resume.
    """
    from farspan.evals.engine import EngineOptions
    from farspan.lengths import parse_lengths
    from farspan.progress import bars
    from farspan.workflows.evaluate import evaluate

    engine = EngineOptions(served_model, tokenizer, api, num_concurrent, timeout, max_retries)
    with stoppable(f"finished results are in {out}"), bars() as progress:
        evaluation = evaluate(
            model,
            suite,
            out,
            baseline=baseline,
            gate=gate or [],
            preset=preset,
            lengths=parse_lengths(lengths) if lengths else [],
            data=parse_data(data) if data else None,
            mode=mode,
            metric=metric,
            stride=stride,
            budget=budget,
            windows=windows,
            beams=beams,
            limit=limit,
            tasks=tasks,
            apply_chat_template=apply_chat_template,
            system_instruction=system_instruction,
            threshold=threshold,
            batch_size=batch_size,
            seed=seed,
            position=position,
            bos=bos,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            progress=progress,
            say=note,
            engine=engine,
        )
    if as_json:
        print_json(evaluation.to_json())
    else:
        show_evaluation(evaluation)
    if IS_MAIN_PROCESS:
        _check_gates(evaluation)


def _check_gates(evaluation: EvalResult) -> None:
    from farspan.errors import ProofError

    if failed := [gate.detail for gate in evaluation.gates if not gate.holds]:
        count = "a gate" if len(failed) == 1 else f"{len(failed)} gates"
        raise ProofError(f"{count} failed: {'; '.join(failed)}")


def show_evaluation(evaluation: EvalResult) -> None:
    compared = evaluation.baseline is not None
    scores = _shown_scores(evaluation)
    columns = ["length", "model" if compared else "value", "95% CI"]
    columns += [*(("baseline", "ratio") if compared else ()), "n", "truncated", "skipped"]
    table = _table(evaluation, scores, columns)
    for column in OPTIONAL_COLUMNS:
        if required_width(table) <= console.width:
            break
        columns.remove(column)
        table = _table(evaluation, scores, columns)
    if compared:
        baseline = escape(evaluation.baseline or "")
        console.print(f"{escape(evaluation.model)}  [dim]baseline[/] {baseline}\n")
    console.print(table)
    console.print()
    _show_data(evaluation, scores)
    print_notes(evaluation.notes)
    for gate in evaluation.gates:
        mark = "[green]holds[/]" if gate.holds else "[red]failed[/]"
        print_line(f"{mark}  {escape(gate.gate)}  [dim]{escape(gate.detail)}[/]")
    print_saved("record, samples and figures", evaluation.folder)


def _shown_scores(evaluation: EvalResult) -> list[Score]:
    """The scores without details, and without a mean that repeats another."""
    from farspan.evals.results import without_repeated_means

    scores = without_repeated_means(evaluation.scores, getattr)
    return [score for score in scores if not score.tags.get("detail")]


def _show_data(evaluation: EvalResult, scores: Sequence[Score]) -> None:
    if data := _tag_values(scores, "data"):
        print_line(f"[dim]data:[/] {escape('; '.join(data))}")
    if trained := _tag_values(scores, "trained_on_passkeys"):
        of_baseline = _tag_values(evaluation.baseline_scores, "trained_on_passkeys")
        values = [*trained, *(f"baseline: {value}" for value in of_baseline)]
        console.print(f"[dim]trained on passkey documents:[/] {', '.join(values)}")


def _table(evaluation: EvalResult, scores: Sequence[Score], columns: Sequence[str]) -> Table:
    from farspan.evals.scores import matching_score

    table = make_table(padding=1 if evaluation.baseline else 2)
    table.add_column("", overflow="fold")
    styles = {"model": "bold", "value": "bold", "length": "", "baseline": "", "ratio": ""}
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, style=styles.get(column, "dim"))
    previous = None
    for score in scores:
        label = _label(score)
        cells = _cells(score, matching_score(score, evaluation.baseline_scores))
        row = [cells[column] for column in columns]
        table.add_row("" if label == previous else escape(label), *row)
        previous = label
    return table


def _label(score: Score) -> str:
    """The metric, and the task where there are several."""
    task = score.tags.get("task", "")
    if task in ("", score.eval):
        return score.metric
    if task == score.metric != score.eval:
        return f"{score.eval} {task}"
    return f"{score.metric} {task}"


def _cells(score: Score, baseline: Score | None) -> dict[str, str]:
    """The cells of a row, by column."""
    interval = f"{format_number(score.low)}–{format_number(score.high)}"
    return {
        "length": f"{score.length:,}",
        "model": format_number(score.value),
        "value": format_number(score.value),
        # A single window, or prompts that all failed, give no interval.
        "95% CI": interval if score.low < score.high else "",
        "baseline": format_number(baseline.value) if baseline else "",
        "ratio": f"{score.value / baseline.value:.3f}" if baseline and baseline.value else "",
        "n": format_count(score.n),
        **{name: f"{score.tags.get(name, 0):,}" for name in ("truncated", "skipped")},
    }


def _tag_values(scores: Sequence[Score], tag: str) -> list[str]:
    """The distinct values of a tag, averages left out."""
    tags = [score.tags for score in scores if score.tags.get("task") != "average"]
    return list(dict.fromkeys(values[tag] for values in tags if tag in values))
