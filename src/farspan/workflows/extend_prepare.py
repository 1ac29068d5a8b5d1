"""What `farspan extend` reads and checks before it fits: settings, model, lengths, text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.describe import describe_temperatures
from farspan.attention.model_facts import config_train_length, max_positions
from farspan.attention.patch import Patch, fingerprint
from farspan.attention.probe import Layer, probe
from farspan.begin_of_text import BeginOfText, check_choice, decide_begin_of_text
from farspan.bundled import resolve_bundled
from farspan.data.documents import check_text, read_documents
from farspan.data.windows import Windows, cut_windows
from farspan.device_map import check_device_map
from farspan.errors import FarspanError, first_line
from farspan.loading import (
    LoadOptions,
    base_source,
    check_device,
    find_patch,
    is_quantized,
    load_with_tokenizer,
    upcast_small_model,
)
from farspan.methods.extend_config import ExtendConfig, read_extend_config
from farspan.methods.fit import make_fit_job, search_windows, start_from
from farspan.methods.headscale import check_init
from farspan.methods.job import FitJob
from farspan.methods.presets import choose_preset, preset_config
from farspan.methods.registry import SCALE_METHODS
from farspan.methods.rules import (
    check_compatible,
    check_start,
    check_trains_no_weights,
    check_unused_settings,
    parse_methods,
    unused_settings,
)
from farspan.model.loss import token_losses
from farspan.model_objects import ModelObject
from farspan.progress import Progress, Say
from farspan.train.metadata import begin_of_text
from farspan.train.search_text import (
    describe_search_text,
    is_mixture,
    overlapping,
    read_mixture,
    search_text,
    split_text,
)
from farspan.train.sharding import processes
from farspan.workflows.search_folder import search_path

SPLITS = ("search", "choose", "report")
Data = str | Path | Mapping[str, str | Path]


@dataclass(frozen=True)
class FitOptions:
    """What to fit, as the user wrote it."""

    method: str
    preset: str | None
    recipe: ExtendConfig | str | Path | None
    overrides: Sequence[str]


@dataclass(frozen=True, eq=False)
class ExtendRun:
    """What to extend, and with which methods."""

    model: str | Path  # as the user wrote it
    source: str | Path  # what is loaded: the model, or the base model of a patch
    start: Patch | None  # the patch
    names: list[str]
    config: ExtendConfig
    preset: str | None  # None: a recipe
    overrides: tuple[str, ...]
    loading: LoadOptions
    bos: str
    progress: Progress
    say: Say

    @property
    def method(self) -> str:
        return "+".join(self.names)

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A fresh model."""
        model, tokenizer = load_with_tokenizer(self.source, **self.loading, progress=self.progress)
        searches_scales = bool({*SCALE_METHODS, "auto"} & set(self.names))
        return upcast_small_model(model) if searches_scales else model, tokenizer


def make_run(
    model: Any, options: FitOptions, loading: LoadOptions, *, bos: str, progress: Progress, say: Say
) -> ExtendRun:
    device, device_map = loading["device"], loading["device_map"]
    check_choice(bos)
    check_device_map(device_map, device)
    check_device(device)
    names, device = parse_methods(options.method), str(device or processes().device)
    preset = choose_preset(options.preset, options.recipe, device)
    default = preset_config(preset)
    recipe = default if options.recipe is None else options.recipe
    config = read_extend_config(recipe, options.overrides)
    check_unused_settings(names, config, default)
    if device_map:
        problem = "a device map may keep on the disk"
        check_trains_no_weights(names, config, problem, "remove the device map")
    source, start = model, find_patch(model)
    position = loading["position"]
    if start is not None:
        check_start(model, start, names)
        source = base_source(Path(resolve_bundled(model)), start)
        position = position or start.position
    return ExtendRun(
        model=model,
        source=source,
        start=start,
        names=names,
        config=config,
        preset=preset,
        overrides=tuple(options.overrides),
        loading={**loading, "position": position, "device": None if device_map else device},
        bos=bos,
        progress=progress,
        say=say,
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A loaded and checked model, with its text and its job."""

    run: ExtendRun
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: Sequence[Layer]
    splits: Mapping[str, Windows]
    search_text: Mapping[str, Any]  # for the record: how the search split was made
    job: FitJob
    notes: tuple[str, ...]
    begin: BeginOfText


def prepare(run: ExtendRun, data: Data, to: int, train_length: int | None, out: Path) -> Prepared:
    """Load the model, check that it can be extended so, and cut its text."""
    _check_texts(data)
    advance = run.progress("load and read", 2)
    model, tokenizer = run.load()
    if is_quantized(model):
        problem = f"are quantized in {run.model}"
        check_trains_no_weights(run.names, run.config, problem, "give a model that is not")
    if run.start is not None:
        replace(run.start, scales=None).apply(model)
        _check_same_weights(run.model, model)
    advance()
    layers = probe(model)  # refuses what no text can run
    begin = decide_begin_of_text(model, tokenizer, run.bos, run.start)
    length = _check_lengths(run, model, layers, to, train_length)
    notes = check_compatible(run.names, layers, model.config, str(run.model), run.config)
    if run.start is not None and run.start.layout is not None:
        notes = ()  # advice for rotary layers that see everything
    notes = (*begin.notes, *notes, *describe_temperatures(model, layers, to)[1])
    splits = _split_text(data, tokenizer, to, length, run, begin.ids)
    notes = (*notes, *_joined_note(splits))
    source = data if isinstance(data, str | Path) else data["search"]
    made = describe_search_text(source, tokenizer, run.config.packed)
    _check_reads(model, layers, splits["search"].ids[:1])
    advance()
    job = _make_job(run, model, tokenizer, layers, splits, to, length, out)
    if run.start is not None:
        job = start_from(run.start, job, str(run.model))
        notes = (*notes, f"values before are those of {job.start_name}, a patch of {run.source}")
    if not {"swan", "drope"} & set(run.names):  # they leave other layers to scale
        check_init(run.config.search, job)
    default = preset_config(run.preset)
    unused = unused_settings(run.names, layers, model, job, run.config, default)
    return Prepared(run, model, tokenizer, layers, splits, made, job, (*notes, *unused), begin)


def _check_texts(data: Data) -> None:
    """Refuse texts that are not there or cannot be used, by their names."""
    texts = {"search": data} if isinstance(data, str | Path) else data
    if texts is data and set(texts) != set(SPLITS):
        raise FarspanError(
            f"the texts are named {', '.join(texts)}; give one corpus, or three as search=PATH, "
            "choose=PATH and report=PATH"
        )
    for name, text in texts.items():
        if not is_mixture(text):
            check_text(text)
        elif name == "search":
            read_mixture(text)
        else:
            raise FarspanError(
                f"{name}={text} is a mixture, which only search can be; give a text, or the "
                "mixture alone, which is then split"
            )
    for one, other in combinations(texts, 2):
        if overlapping(texts[one], texts[other]):
            raise FarspanError(
                f"{one}={texts[one]} and {other}={texts[other]} overlap; give three disjoint texts"
            )


def _check_same_weights(source: str | Path, patched: PreTrainedModel) -> None:
    """Refuse a model object whose weights are not those of its base model and its patch."""
    if isinstance(source, ModelObject) and fingerprint(source.model) != fingerprint(patched):
        raise FarspanError(
            f"the weights of this {type(patched).__name__} have changed since its patch was "
            "applied, so no patch of its base model describes it; give the patch folder"
        )


def _joined_note(splits: Mapping[str, Windows]) -> tuple[str, ...]:
    """A note if settings are chosen by joined documents, or tables measured on them."""
    judging = {name: splits[name] for name in ("choose", "report")}
    if not any(windows.joined for windows in judging.values()):
        return ()
    counts = " and ".join(
        f"{windows.joined} of {len(windows.ids)} windows of the {name} split"
        for name, windows in judging.items()
    )
    return (f"{counts} hold joined documents: too few of those that were read are long enough",)


def _check_reads(model: PreTrainedModel, layers: Sequence[Layer], ids: Tensor) -> None:
    """Refuse a model that cannot read so many tokens: positions may come from a table that no
    parameter shows."""
    if all(layer.position in ("none", "rope", "alibi", "t5") for layer in layers):
        return
    try:
        token_losses(model, ids.to(model.device))
    except IndexError as error:
        raise FarspanError(
            f"{type(model).__name__} cannot read {ids.shape[1]} tokens ({first_line(error)}): its "
            "table of positions ends before; such a model cannot be extended beyond its table"
        ) from error


def _make_job(
    run: ExtendRun,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[Layer],
    splits: Mapping[str, Windows],
    to: int,
    train_length: int,
    out: Path,
) -> FitJob:
    return make_fit_job(
        model,
        layers,
        to,
        train_length,
        splits["search"].ids,
        splits["choose"].ids,
        name=str(run.model),
        position=run.loading["position"],
        seed=run.config.seed,
        folder=search_path(out),
        tokenizer=tokenizer,
        begin=tuple(begin_of_text(tokenizer)),
        progress=run.progress,
        say=run.say,
    )


def _check_lengths(
    run: ExtendRun,
    model: PreTrainedModel,
    layers: Sequence[Layer],
    to: int,
    train_length: int | None,
) -> int:
    """The train length; refuse a target that cannot be reached from it."""
    source, config_length = run.model, config_train_length(model.config)
    if run.start is not None:
        if train_length not in (None, run.start.train_length):
            raise FarspanError(
                f"{source} is a patch for a model that was trained on {run.start.train_length} "
                f"tokens, and --train-length says {train_length}; remove it, or extend its base "
                "model"
            )
        train_length = run.start.train_length
    length, rows = train_length or config_length, max_positions(model.config, layers)
    if length is None:
        raise FarspanError(
            f"the config of {source} does not give its train length; add --train-length"
        )
    if to <= length:
        raise FarspanError(
            f"{source} was already trained on {length} tokens; choose a longer --to than that"
        )
    window = max(to, search_windows(run.names, run.config, to, length)[0])
    if rows is not None and window > rows:
        way_out = "set search.beyond=1" if to <= rows else "choose a target within its table"
        raise FarspanError(
            f"{source} has {rows} learned positions, and a search for {to} tokens reads "
            f"{window}; {way_out}"
        )
    if "dynamic-ntk" in run.names and length != config_length:
        # transformers' dynamic rotation reads the length from the config alone.
        raise FarspanError(
            f"dynamic-ntk starts at the max_position_embeddings of {source}, {config_length}, "
            f"whatever --train-length {length} says; remove --train-length, or choose ntk or yarn"
        )
    return length


def _split_text(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    to: int,
    train_length: int,
    run: ExtendRun,
    begin: tuple[int, ...],
) -> dict[str, Windows]:
    search_length, searched = search_windows(run.names, run.config, to, train_length)
    lengths = {"search": search_length, "choose": to, "report": to}
    limits = {
        "search": searched,
        "choose": run.config.choose_windows,
        "report": run.config.report_windows,
    }
    options: dict[str, Any] = {
        "seed": run.config.seed,
        "packed": run.config.packed,
        "begin": begin,
        "progress": run.progress,
    }
    if isinstance(data, str | Path):
        return split_text(data, tokenizer, lengths, limits, train_length, **options)
    search = search_text(
        data["search"], tokenizer, search_length, searched, train_length, **options
    )
    return {"search": search} | {
        name: cut_windows(
            read_documents(data[name]),
            tokenizer,
            lengths[name],
            limits[name],
            join_short=run.config.packed,
            long_first=True,
            begin=begin,
        )
        for name in ("choose", "report")
    }
