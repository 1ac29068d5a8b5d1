"""MODEL -> model and tokenizer, for every verb alike: a folder, hub id, twin's name, .gguf file, or patch folder.

What lies on disk is checked before transformers opens it, so that a broken or hostile checkpoint is one
sentence and not a traceback. Nothing pickled is read, and no code that comes with a checkpoint is run unless
its caller asked for that by name.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from farspan.attention.patch import OtherModelError, Patch, UnfitError, not_whole
from farspan.data.tokens import check_tokenizer, tokenizer_files
from farspan.errors import CorruptError, FarspanError, first_line
from farspan.files import read_json, weight_files
from farspan.hub import is_hub_id, refusal
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.twins import TWINS, located

BASE = "base"  # where a patch folder that carries its model keeps it
MADE_FROM = "load the checkpoint that it was made from"  # the way out for a .gguf
EXACT_BELOW = 300_000_000  # parameters


class _AbsentError(FarspanError):
    """Nothing is where the name of a model points."""


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase | None  # None where the checkpoint has none


def load(
    source: str | Path,
    *,
    position: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """The model that a folder, hub id, twin (nope-twin, rope-twin) or patch folder names, in evaluation mode, with its
    tokenizer.

    position: "none" loads a Llama-typed checkpoint that was trained without rotation as what it is.
    dtype: as the checkpoint says unless given, or float32 on a CPU that has no arithmetic for it. A .gguf file is
        unpacked to bf16 on a GPU and to float32 on a CPU.
    attention: transformers' attn_implementation.

    >>> model, tokenizer = farspan.load("path/to/checkpoint")
    """
    check_device(device)
    source = located(source)
    if is_patch(source):
        return _load_patched(
            Path(source),
            position=position,
            dtype=dtype,
            device=device,
            attention=attention,
            trust_remote_code=trust_remote_code,
        )
    if Path(source).suffix == ".gguf":
        return _load_gguf(Path(source), dtype, device)
    config = load_config(source, position=position, trust_remote_code=trust_remote_code)
    _check_weights(source)
    dtype = dtype or _bearable(getattr(config, "dtype", None), device)
    options = {"dtype": dtype or "auto", "use_safetensors": True, "trust_remote_code": trust_remote_code}
    options["ignore_mismatched_sizes"] = True  # so that they are told, and refused by us with both shapes
    if (attention := attention or needed_attention(config)) is not None:
        options["attn_implementation"] = attention
    # A config that we changed must not be overruled by the one in the folder, so its own class loads.
    auto = FarspanForCausalLM if isinstance(config, FarspanConfig) else AutoModelForCausalLM
    with quiet(), _readable(source):
        model, report = auto.from_pretrained(source, config=config, output_loading_info=True, **options)
    _check_report(source, model, report)
    return Loaded(model.to(device).eval() if device else model.eval(), _tokenizer(source, trust_remote_code))


def _check_weights(source: str | Path) -> None:
    if Path(source).is_dir() and not weight_files(Path(source)):
        raise FarspanError(
            f"{source} has a config but no weights; add model.safetensors, or look at the config with "
            f"`farspan inspect {source}`"
        )


def _check_report(source: str | Path, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that is not the model its config describes: transformers would go on, with random numbers
    where weights are missing or of another shape, and without the layers that the config does not know."""
    again = "fetch or export the checkpoint again"
    if missing := sorted(report["missing_keys"]):
        raise CorruptError(
            f"{source} lacks weights that its config asks for, {missing[0]!r} first of {len(missing)}; {again}"
        )
    if other := sorted(report["mismatched_keys"]):
        name, stored, asked = other[0]
        raise CorruptError(
            f"{source} holds weights of other shapes than its config asks for, {name} as {list(stored)} instead of "
            f"{list(asked)} first of {len(other)}; {again}"
        )
    if left := _left_out_layers(model, report["unexpected_keys"]):
        raise CorruptError(
            f"{source} holds weights of layers that its config leaves out, {left[0]!r} first of {len(left)}; {again}"
        )


def _left_out_layers(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Weights of layers after the last one, in the order of layers. Other leftovers do no harm: buffers of old
    releases, a tower for images. Layers that predict further tokens are left out on purpose."""
    counts = {name: len(part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)}
    further = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    left = []
    for key in unexpected:
        for number in re.finditer(r"\.(\d+)\.", key):
            parent, index = key[: number.start()], int(number[1])
            count = counts.get(parent, counts.get(f"{model.base_model_prefix}.{parent}"))
            if count is not None and index >= count + further:
                left.append((index, key))
    return [key for _, key in sorted(left)]


def load_for_text(source: str | Path, **options: Any) -> tuple[PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The model that `load` gives, and the tokenizer that it must have."""
    model, tokenizer = load(source, **options)
    return model, _given(tokenizer, source)


def load_tokenizer(source: str | Path, trust_remote_code: bool = False) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer that a folder, hub id or twin must have."""
    return _given(_tokenizer(located(source), trust_remote_code), source)


def _given(
    tokenizer: transformers.PreTrainedTokenizerBase | None, source: str | Path
) -> transformers.PreTrainedTokenizerBase:
    if tokenizer is None:
        raise FarspanError(f"{source} has no tokenizer, and text must become tokens; add its tokenizer.json")
    return tokenizer


def check_source(source: str | Path, *, position: str | None = None, trust_remote_code: bool = False) -> None:
    """Refuse by its files alone what `load_for_text` would refuse: asked of every model before one is measured."""
    if (patch := patch_in(source)) is not None:
        with _base_of(Path(source), patch) as base:
            check_source(base, position=position or patch.position, trust_remote_code=trust_remote_code)
    elif Path(source).suffix == ".gguf":
        _check_gguf(Path(source))
    else:
        load_config(source, position=position, trust_remote_code=trust_remote_code)
        _check_weights(located(source))
        load_tokenizer(source, trust_remote_code)


def patch_in(source: str | Path) -> Patch | None:
    """The patch of a folder, if the source names one."""
    return Patch.load(Path(source)) if is_patch(source) else None


def is_patch(source: str | Path) -> bool:
    return (Path(source) / "patch.json").exists()


def load_config(
    source: str | Path, *, position: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The config of a folder, hub id or twin, checked; with `position`, converted to ours."""
    source = located(source)
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise FarspanError(f"{folder} holds no config.json; give {_meant(folder)}")
        text = read_json(folder / "config.json")
        if text.get("auto_map") and not trust_remote_code:
            raise FarspanError(
                f"{folder} asks to run Python code that comes with it (auto_map in its config.json); "
                "if you trust it, say so with --trust-remote-code"
            )
    elif folder.exists():
        raise FarspanError(f"{folder} is a file; give the folder that holds the checkpoint")
    elif not is_hub_id(str(source)):
        near = difflib.get_close_matches(str(source), [twin.name for twin in TWINS.iterdir()], 1)
        hint = f"the nearest twin is {near[0]}" if near else "check the path"
        raise _AbsentError(f"{str(source)!r} is neither a folder nor a hub id (owner/name); {hint}")
    else:
        _check_hub(str(source))
    try:
        with quiet(), _readable(source):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except FarspanError as error:
        named = str(source) in str(error)  # our own config tells which value is wrong, and not whose
        raise error if named else type(error)(f"in the config of {source}, {error}") from None
    return config if position is None else with_position(config, position)


def _meant(folder: Path) -> str:
    """What someone may have meant by a folder that is no checkpoint: one that a run or an export wrote holds it."""
    inside = [path.parent for path in sorted(folder.glob("*/config.json"))] + sorted(folder.glob("*.gguf"))
    return str(inside[0]) if len(inside) == 1 else "the folder that save_pretrained wrote"


def chosen_device(device: str | None) -> str:
    """The device that was asked for, or a GPU where there is one."""
    check_device(device)
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def check_device(device: str | torch.device | None) -> None:
    """Refuse a device that is misspelt or not here, before anything is read."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = first_line(error) if len(first_line(error)) < 80 else "torch knows no such device"
        raise FarspanError(f"device {str(device)!r} cannot be used ({why}); choose cpu, or cuda:0") from None
    if torch.device(device or "cpu").type == "meta":
        raise FarspanError("device 'meta' holds no numbers to compute with; choose cpu, or cuda:0")


def _bearable(dtype: torch.dtype | None, device: str | torch.device | None) -> torch.dtype | None:
    """float32 instead of what the CPU could only emulate, a hundred times slower; None where there is no need."""
    native = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if torch.device(device or "cpu").type != "cpu" or dtype not in native:
        return None
    able = torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, native[dtype])()
    return None if able else torch.float32


def _check_hub(name: str) -> None:
    fetched = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)
    if not fetched and (why := refusal(name, "model")) is not None:
        raise _AbsentError(
            f"{name} is no folder here, and the hub does not give it ({why}); check the path, the name, or the network"
        )


def needed_attention(config: PreTrainedConfig) -> str | None:
    """The backend that a model cannot do without; some releases of transformers let SDPA drop a soft cap."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def with_position(config: PreTrainedConfig, position: str) -> FarspanConfig:
    """A Llama config as ours with another encoding: for checkpoints typed llama but trained without rotation."""
    if isinstance(config, FarspanConfig):
        raise FarspanError(
            f"this checkpoint is farspan's own and says its position itself ({config.position[0]}); "
            "leave --position away"
        )
    if config.model_type != "llama":
        raise FarspanError(
            f"--position reads a llama checkpoint in another way, and this one is {config.model_type!r}; leave it away"
        )
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise FarspanError(
            "this llama checkpoint has biases or an activation other than silu, which farspan's model has not; "
            "load it without --position"
        )
    shared = FarspanConfig().to_dict().keys() - {"position", "rope_parameters", "layer_types", "base_scale"}
    values = {key: value for key, value in config.to_dict().items() if key in shared and key != "model_type"}
    rope = config.rope_parameters if position.startswith("rope") else None
    return FarspanConfig(**{**values, "position": position, "rope_parameters": rope})


def _load_gguf(file: Path, dtype: torch.dtype | str | None, device: str | torch.device | None) -> Loaded:
    """A llama.cpp model, its weights unpacked to floating point."""
    _check_gguf(file)
    # The unpacking has a progress bar of its own that no setting turns off.
    with quiet(), _readable(file, MADE_FROM), contextlib.redirect_stderr(io.StringIO()):
        kind = dtype or unpacked_dtype(device)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=kind)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return Loaded(model.to(device).eval() if device else model.eval(), tokenizer)


def in_exact_numbers(model: PreTrainedModel) -> PreTrainedModel:
    """A model that is not large in float32, whatever its checkpoint says: where scores are large, bf16 drowns the
    gradient of a scale, and so small a model has the memory and the time. Not so on a GPU if its heads share keys: SDPA
    has no kernel for these in float32, and would write out all T² scores."""
    exact = model.dtype == torch.float32 or getattr(model, "is_quantized", False)  # what was quantized is left as it is
    config = model.config.get_text_config()
    heads, keys = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    shared = model.device.type == "cuda" and keys not in (None, heads)
    return model if exact or shared or model.num_parameters() >= EXACT_BELOW else model.float()


def unpacked_dtype(device: str | torch.device | None) -> torch.dtype:
    """Of quantised weights. In float32, heads that share keys make SDPA write out all T² scores on a GPU."""
    return torch.float32 if torch.device(device or "cpu").type == "cpu" else torch.bfloat16


def _check_gguf(file: Path) -> None:
    """transformers leaves the rope scaling of most files away, without a word, and reads no model without rotation."""
    if not file.is_file():
        raise _AbsentError(f"{file} does not exist; check the path")
    if importlib.util.find_spec("gguf") is None:
        raise FarspanError(f"reading {file.name} needs gguf; install it with pip install 'farspan[gguf]'")
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
    except Exception as error:  # it reads whatever it finds, and stumbles anywhere
        raise CorruptError(f"{file} is no whole GGUF file ({first_line(error)}); fetch or export it again") from None
    for key, field in fields.items():
        if key.endswith(".rope.scaling.type") and not key.startswith("gpt-oss.") and field.contents() != "none":
            raise FarspanError(
                f"{file.name} scales its rotation ({field.contents()}), and transformers would read it without that; "
                f"{MADE_FROM}"
            )
    unturned = fields.get("granite.rope.scaling.finetuned")
    if unturned is not None and not unturned.contents():  # as farspan writes models without positions
        raise FarspanError(
            f"{file.name} is a granite without rotation, which llama.cpp reads and transformers does not; {MADE_FROM}"
        )


def _load_patched(folder: Path, *, dtype: torch.dtype | str | None = None, **options) -> Loaded:
    patch = Patch.load(folder)
    # A patch knows its base by weights rounded to bf16, and those that were rounded to float16 may round otherwise.
    late = dtype in (torch.float16, "float16")
    base, tokenizer = load_base(folder, patch, dtype=None if late else dtype, **options)
    try:
        model = patch.apply(base)
        if late:
            for parameter in model.parameters():
                parameter.data = parameter.data.half()
        return Loaded(model, tokenizer)
    except OtherModelError as error:
        raise FarspanError(
            f"the patch in {folder} names {base_source(folder, patch)} as its base, and what lies there is another "
            f"model ({str(error).partition(';')[0]}); put its own base model into {folder / BASE}, or name the place "
            f"of that in {folder / 'patch.json'}"
        ) from None
    except UnfitError as error:
        raise not_whole(folder, error) from None


def load_base(folder: Path, patch: Patch, *, position: str | None = None, **options) -> Loaded:
    """The model that a patch folder is for, without the patch: the one inside the folder, or the one it names."""
    with _base_of(folder, patch) as source:
        return load(source, position=position or patch.position, **options)


@contextlib.contextmanager
def _base_of(folder: Path, patch: Patch) -> Iterator[str]:
    """What a patch folder has as its base, for a block that needs it to be there."""
    source = base_source(folder, patch)
    if not source or is_patch(source):
        raise FarspanError(
            f"{folder} names {source or 'nothing'!r} as the model it patches; load its base model and use Patch.apply"
        )
    try:
        yield source
    except _AbsentError as error:
        raise FarspanError(
            f"the patch in {folder} names a base model that is not found ({str(error).partition(';')[0]}); put that "
            f"model into {folder / BASE}, or name its place in {folder / 'patch.json'}"
        ) from None


def base_source(folder: Path, patch: Patch) -> str:
    """Where the model of a patch folder lies: inside it, or where the patch says."""
    return str(folder / BASE) if (folder / BASE).is_dir() else patch.name


def _tokenizer(source: str | Path, trust_remote_code: bool) -> transformers.PreTrainedTokenizerBase | None:
    folder = Path(source)
    if folder.is_dir() and not tokenizer_files(folder):
        return None
    with quiet(), _readable(source, "check its tokenizer_config.json and that this transformers knows the tokenizer"):
        try:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception:
            check_tokenizer(folder)
            raise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers: what matters is said by farspan."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    of_hub = huggingface_hub.utils.logging.get_verbosity()
    logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        huggingface_hub.utils.logging.set_verbosity(of_hub)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _readable(
    source: str | Path, way_out: str = "check its config.json and that this transformers knows the family"
) -> Iterator[None]:
    """transformers' own errors about a checkpoint, as one sentence."""
    try:
        yield
    except FarspanError:
        raise
    except Exception as error:  # a checkpoint can be wrong in more ways than transformers has words for
        raise FarspanError(
            f"{source} cannot be loaded by transformers ({type(error).__name__}: {first_line(error)}); {way_out}"
        ) from error
