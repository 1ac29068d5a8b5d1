"""The suites of `farspan eval`: evaluations, texts and settings of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.probe import Layer
from farspan.begin_of_text import UNDECIDED, BeginOfText
from farspan.data.passkey import SCORED
from farspan.errors import FarspanError, option_name, suggest
from farspan.evals.chat import chat_frame
from farspan.evals.commonsense import TASKS as COMMONSENSE_TASKS
from farspan.evals.commonsense import Commonsense
from farspan.evals.engine import Engine, EngineOptions
from farspan.evals.longbench import LongBench
from farspan.evals.longppl import Evaluator
from farspan.evals.needle import TASKS as NEEDLE_TASKS
from farspan.evals.needle import Needle, haystack_name
from farspan.evals.nonliteral import NonLiteral
from farspan.evals.passkey import Passkey, grid_lengths, scored_documents
from farspan.evals.perplexity import LONGPPL, METRICS, MODES, STRIDE, Perplexity, Text, read_text
from farspan.evals.ruler import THRESHOLD, Ruler
from farspan.evals.ruler_qa import QA_FILES, qa_digest
from farspan.evals.ruler_tasks import ESSAYS
from farspan.evals.ruler_tasks import TASKS as RULER_TASKS
from farspan.evals.scores import Eval
from farspan.lengths import doublings, parse_lengths
from farspan.train.metadata import begin_of_text

DEFAULT_TEXT = "python-docs/score"
QUICK_WINDOWS = 32
PRESETS = ("quick", "full")
PRESET_WINDOWS, PRESET_LIMIT, PRESET_KEYS = 8, 5, 1  # of the preset quick
NO_ENGINE = EngineOptions()
NEEDLE_SAMPLES = 20  # of each task at each length, of needle and RULER


@dataclass(frozen=True)
class EvalConfig:
    """The settings of an evaluation; None is the suite's default."""

    lengths: Sequence[int] = ()  # or "512:4096"; default: doublings from the train length
    data: str | Path | Mapping[str, str | Path] | None = None  # one text, or several by name
    mode: str | None = None  # of perplexity: same, paper-a or yarn
    metric: str = METRICS[0]  # of perplexity: ppl, or longppl beside it
    stride: int | None = None  # of perplexity: 256, or half the shortest length if that is less
    budget: int | None = None  # of perplexity: the most tokens to score
    windows: int | None = None  # of perplexity: score only so many random windows
    beams: int | None = None  # of LongBench; 1 is greedy decoding
    limit: int | None = None  # samples of each task, except perplexity and passkeys
    tasks: Sequence[str] = ()  # of needle, RULER, commonsense; or "vt,cwe"; default: all with data
    apply_chat_template: bool = False  # of RULER: prompts as messages to a chat model
    system_instruction: str | None = None  # of RULER: the system message of the chat
    threshold: float | None = None  # of RULER: the score of an effective length; default 85.6
    batch_size: int | None = None  # prompts answered together; default: one on a CPU
    seed: int = 0  # of keys, needles and subsets
    preset: str = "full"  # quick: fewer windows, examples and passkeys, where these are not set
    engine: EngineOptions = NO_ENGINE  # of a server, if the model is a URL

    def __post_init__(self):
        if self.preset not in PRESETS:
            raise FarspanError(
                f"preset {self.preset!r} is unknown; {suggest(self.preset, PRESETS)}"
            )
        tasks = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks
        object.__setattr__(self, "tasks", tuple(task.strip() for task in tasks if task.strip()))
        object.__setattr__(self, "lengths", tuple(parse_lengths(self.lengths)))
        if self.mode is not None and self.mode not in MODES:
            hint = suggest(self.mode, MODES)
            raise FarspanError(f"perplexity mode {self.mode!r} is unknown; {hint}")
        if self.metric not in METRICS:
            hint = suggest(self.metric, METRICS)
            raise FarspanError(f"perplexity metric {self.metric!r} is unknown; {hint}")
        if self.metric == LONGPPL and self.mode not in (None, "same"):
            raise FarspanError(
                f"longppl compares the same tokens at two lengths, and mode {self.mode} scores "
                "others at each; choose --mode same"
            )
        for name in ("stride", "budget", "windows", "beams", "limit", "batch_size"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise FarspanError(f"{option_name(name)} is {count}; use 1 or more")
        if self.seed < 0:
            raise FarspanError(f"--seed is {self.seed}; use 0 or more")
        if self.system_instruction is not None and not self.apply_chat_template:
            raise FarspanError("--system-instruction is part of a chat; add --apply-chat-template")

    def with_settings(
        self, settings: Mapping[str, Any], parameters: Iterable[str] = ()
    ) -> EvalConfig:
        """This config with some fields replaced by keyword arguments.

        parameters: further names that a wrong one may stand for.
        """
        names = [each.name for each in fields(EvalConfig)]
        for name in settings:
            if name not in names:
                hint = suggest(name, [*names, *parameters])
                raise TypeError(f"evaluate() has no setting {name!r}; {hint}")
        return replace(self, **settings)


@dataclass(frozen=True)
class EvalPlan:
    """A config with every length and text resolved for one model."""

    config: EvalConfig
    lengths: tuple[int, ...]  # of perplexity and needles
    grid: tuple[int, ...]  # of passkeys
    contexts: tuple[int, ...]  # of LongBench and commonsense
    context: int | None  # trained on, or extended to
    lengths_requested: bool  # by the user; else derived from the model
    texts: Mapping[str, str | Path] = field(default_factory=dict)
    evaluator: Evaluator | None = None  # chooses the key tokens of LongPPL, if that is measured

    def to_json(self) -> dict[str, Any]:
        """The settings of record.json; `items` is the limit."""
        settings = asdict(self.config)
        del settings["engine"]
        settings["items"] = settings.pop("limit")
        return settings | {
            "lengths": self.lengths,
            "grid": self.grid,
            "contexts": self.contexts,
            "context": self.context,
            "data": {name: str(path) for name, path in self.texts.items()},
        }


@dataclass(frozen=True, eq=False)
class EvalModel:
    """A loaded model and the facts that evaluations need."""

    name: str
    model: PreTrainedModel | Engine
    tokenizer: PreTrainedTokenizerBase
    train_length: int | None
    extended_length: int | None  # the target of its patch, or the train length
    max_positions: int | None  # the rows of a learned position table
    passkeys_in_training: str  # "yes", "no" or "unknown"
    identity: Mapping[str, str]  # everything of it that a result depends on
    begin: BeginOfText = UNDECIDED  # of its texts
    layers: Sequence[Layer] | None = None  # None: off transformers' attention interface

    @property
    def engine(self) -> Engine | None:
        """The model, if it is served."""
        return self.model if isinstance(self.model, Engine) else None

    @property
    def local(self) -> PreTrainedModel | None:
        """The model, if it is loaded."""
        return None if isinstance(self.model, Engine) else self.model

    def check_lengths(self, lengths: Sequence[int]) -> None:
        if self.max_positions is not None and max(lengths) > self.max_positions:
            raise FarspanError(
                f"length {max(lengths)} is beyond the position table of {self.name}, which has "
                f"{self.max_positions} rows; choose lengths up to {self.max_positions}"
            )

    def supported(self, lengths: Sequence[int]) -> tuple[int, ...]:
        limit = self.max_positions
        return tuple(length for length in lengths if limit is None or length <= limit)


Build = Callable[[EvalModel, EvalPlan], Eval]


@dataclass(frozen=True)
class Suite:
    builds: tuple[Build, ...]
    grid: int = 16  # number of passkey lengths
    mode: str = MODES[0]  # of perplexity
    texts: tuple[str, ...] | None = None  # names that --data takes; None: any, for perplexity
    required: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()  # of SUITE_SETTINGS, those that it uses
    tasks: tuple[str, ...] = ()  # that --tasks takes
    reach: int = 2  # train lengths that the default lengths go up to
    perplexity_only: bool = False  # requested lengths are those of perplexity alone

    def complete(self, config: EvalConfig) -> EvalConfig:
        """The settings with this suite's mode of perplexity, and those of the preset, if none were
        chosen."""
        config = replace(config, mode=config.mode or self.mode)
        if config.preset == "full":
            return config
        windows = config.windows or (PRESET_WINDOWS if "windows" in self.settings else None)
        limit = config.limit or (PRESET_LIMIT if "limit" in self.settings else None)
        return replace(config, windows=windows, limit=limit)


def _read_texts(model: EvalModel, plan: EvalPlan, names: Sequence[str]) -> tuple[Text, ...]:
    texts = tuple(read_text(name, plan.texts[name], model.tokenizer) for name in names)
    if model.local is None:  # a server refuses what it does not know
        return texts
    vocabulary = model.local.get_input_embeddings().num_embeddings
    if any(int(ids.max()) >= vocabulary for text in texts for ids in text.ids if len(ids)):
        raise FarspanError(
            f"the tokenizer of {model.name} has more tokens than the model; use the model's own"
        )
    return texts


def _perplexity(names: Sequence[str] | None, windows: int | None = None) -> Build:
    def build(model: EvalModel, plan: EvalPlan) -> Eval:
        config = plan.config
        texts = _read_texts(model, plan, list(plan.texts) if names is None else names)
        longest = min(text.longest for text in texts)
        fitting = [n for n in plan.lengths if plan.lengths_requested or n <= longest]
        lengths = tuple(fitting) or plan.lengths[:1]
        return Perplexity(
            texts,
            lengths,
            config.mode or MODES[0],
            config.stride or min(STRIDE, min(lengths) // 2),
            config.budget,
            config.windows or windows,
            config.seed,
            contrast=plan.evaluator.contrast(lengths) if plan.evaluator else None,
            begin=tuple(begin_of_text(model.tokenizer)),
        )

    return build


def _passkey(depths: int, keys: int) -> Build:
    def build(model: EvalModel, plan: EvalPlan) -> Eval:
        if getattr(getattr(model.model, "base_model", None), "draws_positions", False):
            raise FarspanError(
                f"{model.name} draws its positions for a whole text, so passkeys, which share a "
                "cached beginning, would get others; choose a suite without passkeys, for example "
                "perplexity or needle"
            )
        if not plan.grid:
            shortest = scored_documents(model.tokenizer).shortest_of(SCORED)
            raise FarspanError(
                f"a passkey document has at least {shortest} tokens, and the position table of "
                f"{model.name} has {model.max_positions} rows; choose a suite without passkeys, "
                "for example perplexity"
            )
        seed, trained = plan.config.seed, model.passkeys_in_training
        count = PRESET_KEYS if plan.config.preset == "quick" else keys
        grid = Passkey(plan.grid, depths, count, seed, trained, plan.context)
        for cell in grid.cells()[:depths]:  # the shortest length is refused now if it is too short
            grid.documents(cell, model.tokenizer)
        return grid

    return build


def _needle(model: EvalModel, plan: EvalPlan) -> Eval:
    config, haystack = plan.config, plan.texts.get("haystack", "")
    tasks, samples = _chosen_tasks(config, NEEDLE_TASKS), config.limit or NEEDLE_SAMPLES
    batch = config.batch_size
    return Needle(plan.lengths, tasks, samples, haystack, seed=config.seed, batch=batch)


def _nonliteral(model: EvalModel, plan: EvalPlan) -> Eval:
    config, haystack = plan.config, plan.texts.get("haystack", "")
    return NonLiteral(
        plan.lengths,
        samples=config.limit or NEEDLE_SAMPLES,
        haystack=haystack,
        seed=config.seed,
        batch=config.batch_size,
    )


def _ruler(model: EvalModel, plan: EvalPlan) -> Eval:
    config, texts = plan.config, plan.texts
    for name, file in texts.items():  # paths that the chosen tasks do not read are checked, too
        if name in QA_FILES.values():
            qa_digest(Path(file))
        else:
            haystack_name(file, min(plan.lengths))
    with_data = [task for task in RULER_TASKS if task not in QA_FILES or QA_FILES[task] in texts]
    evaluation = Ruler(
        plan.lengths,
        _chosen_tasks(config, with_data),
        config.limit or NEEDLE_SAMPLES,
        texts.get("haystack", ESSAYS),
        texts.get("squad", ""),
        texts.get("hotpotqa", ""),
        frame=chat_frame(model.tokenizer, config.system_instruction)
        if config.apply_chat_template
        else None,
        threshold=THRESHOLD if config.threshold is None else config.threshold,
        seed=config.seed,
        batch=config.batch_size,
    )
    evaluation.check_least(model.tokenizer)  # a length that is too short is refused now
    return evaluation


def _longbench(beams: int) -> Build:
    def build(model: EvalModel, plan: EvalPlan) -> Eval:
        folder, config = plan.texts["longbench"], plan.config
        width, batch = config.beams or beams, config.batch_size
        return LongBench(folder, plan.contexts, width, config.limit, batch)

    return build


def _commonsense(model: EvalModel, plan: EvalPlan) -> Eval:
    config, folder = plan.config, plan.texts.get("commonsense", "")
    tasks = _chosen_tasks(config, COMMONSENSE_TASKS)
    return Commonsense(folder, max(plan.contexts), tasks, limit=config.limit)


def _chosen_tasks(config: EvalConfig, default: Iterable[str]) -> tuple[str, ...]:
    """Each task once, even if it was named twice."""
    return tuple(dict.fromkeys(config.tasks or default))


PERPLEXITY_SETTINGS = ("mode", "metric", "stride", "budget", "windows")
RULER_SETTINGS = ("apply_chat_template", "system_instruction", "threshold")
# The settings that only some suites use.
SUITE_SETTINGS = (*PERPLEXITY_SETTINGS, "beams", "limit", "tasks", *RULER_SETTINGS, "batch_size")

SUITES = {
    "quick": Suite(
        (_perplexity(None, QUICK_WINDOWS), _passkey(5, 2)), grid=4, settings=PERPLEXITY_SETTINGS
    ),
    "paper": Suite(
        (_perplexity(("pg19", "proofpile")), _passkey(10, 10), _longbench(5), _commonsense),
        mode="paper-a",
        texts=("pg19", "proofpile", "longbench", "commonsense"),
        required=("pg19", "proofpile", "longbench"),
        settings=tuple(name for name in SUITE_SETTINGS if name not in ("tasks", *RULER_SETTINGS)),
        reach=8,
        perplexity_only=True,
    ),
    "perplexity": Suite((_perplexity(None),), settings=PERPLEXITY_SETTINGS),
    "passkey": Suite((_passkey(10, 10),), texts=()),
    "needle": Suite(
        (_needle,),
        texts=("haystack",),
        settings=("limit", "tasks", "batch_size"),
        tasks=NEEDLE_TASKS,
    ),
    "nonliteral": Suite((_nonliteral,), texts=("haystack",), settings=("limit", "batch_size")),
    "ruler": Suite(
        (_ruler,),
        texts=("haystack", *QA_FILES.values()),
        settings=("limit", "tasks", "batch_size", *RULER_SETTINGS),
        tasks=RULER_TASKS,
    ),
    "longbench": Suite(
        (_longbench(1),),
        texts=("longbench",),
        required=("longbench",),
        settings=("beams", "limit", "batch_size"),
    ),
    "commonsense": Suite(
        (_commonsense,),
        texts=("commonsense",),
        settings=("limit", "tasks"),
        tasks=tuple(COMMONSENSE_TASKS),
    ),
}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise FarspanError(f"suite {name!r} is unknown; {suggest(name, SUITES)}")
    return SUITES[name]


def check_unused_settings(name: str, config: EvalConfig) -> None:
    """Refuse a setting that the suite does not use, and a task that it does not have."""
    for setting in SUITE_SETTINGS:
        value = getattr(config, setting)
        if value != getattr(EvalConfig, setting) and setting not in SUITES[name].settings:
            users = ", ".join(other for other, suite in SUITES.items() if setting in suite.settings)
            shown = "" if value is True else f" {','.join(value) if setting == 'tasks' else value}"
            raise FarspanError(
                f"suite {name} does not use {option_name(setting)}{shown}; remove it, or choose "
                f"a suite that does: {users}"
            )
    for task in config.tasks:
        if task not in (tasks := SUITES[name].tasks):
            raise FarspanError(f"{name} has no task {task!r}; {suggest(task, tasks)}")


def named_texts(
    name: str, suite: Suite, data: str | Path | Mapping[str, str | Path] | None
) -> dict[str, str | Path]:
    """The texts of --data by the names that the suite takes."""
    if data is None:
        texts: dict[str, str | Path] = {"python-docs": DEFAULT_TEXT} if suite.texts is None else {}
    elif isinstance(data, str | Path):
        stem = Path(data).name.partition(".")[0]
        only = stem if suite.texts is None else next(iter(suite.texts), "")
        texts = {only or "text": data}
    else:
        texts = dict(data)
    for text in texts:
        if suite.texts is not None and text not in suite.texts:
            if not suite.texts:
                raise FarspanError(f"suite {name} reads no text; remove --data")
            choices = ", ".join(f"{choice}=PATH" for choice in suite.texts)
            raise FarspanError(f"suite {name} does not read --data {text}=; it takes {choices}")
    if missing := [text for text in suite.required if text not in texts]:
        options = " ".join(f"--data {text}=PATH" for text in missing)
        raise FarspanError(f"suite {name} needs {' and '.join(missing)}; add {options}")
    return texts


def make_plan(
    model: EvalModel, suite: Suite, config: EvalConfig, texts: Mapping[str, str | Path]
) -> EvalPlan:
    """Resolve the lengths: those requested, or the defaults for this model."""
    config, context = suite.complete(config), model.extended_length
    requested = tuple(sorted(set(config.lengths)))
    if requested:
        model.check_lengths(requested)
        if not suite.perplexity_only:
            return EvalPlan(config, requested, requested, requested, context, True, texts)
    if model.train_length is None:
        way_out = "choose suites that take --lengths for all" if requested else "add --lengths"
        raise FarspanError(f"the config of {model.name} does not give its train length; {way_out}")
    train, reach = model.train_length, model.extended_length or 0
    defaults = {*doublings(train, suite.reach * train), *doublings(train, max(train, reach))}
    lengths = requested or model.supported(sorted(defaults))
    furthest = min(2 * reach, model.max_positions or 2 * reach)
    shortest = scored_documents(model.tokenizer).shortest_of(SCORED)
    grid = model.supported(grid_lengths(furthest, shortest, suite.grid))
    model.check_lengths((*lengths, *grid))
    return EvalPlan(config, lengths, grid, (reach,), context, bool(requested), texts)
