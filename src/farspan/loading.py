"""MODEL -> model and tokenizer, for every command: a folder, hub id, bundled model, .gguf file or
patch folder.

Files on disk are checked before transformers opens them, so a broken or hostile checkpoint is one
sentence and not a traceback. Pickles are never read. Code that comes with a checkpoint runs only
with trust_remote_code.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import huggingface_hub
import torch
import transformers
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from farspan.attention.building import model_class
from farspan.attention.model_facts import config_train_length, required_attention
from farspan.attention.patch import Patch, corrupt_patch, remember_folder
from farspan.bundled import BUNDLED_MODELS, resolve_bundled
from farspan.checkpoints import MissingModelError, check_report, check_weights, quiet, readable
from farspan.custom_code import import_code, resolve_reference
from farspan.data.tokens import (
    DECISION,
    check_tokenizer,
    read_tokenizer,
    tokenizer_files,
)
from farspan.deprecation import renamed_arguments
from farspan.device_map import DeviceMap, check_device_map, check_placed, is_placed, placement
from farspan.errors import (
    CorruptError,
    FarspanError,
    IncompatiblePatchError,
    WrongBaseError,
    first_line,
)
from farspan.files import check_links, read_json
from farspan.gguf_loading import (
    USE_CHECKPOINT,
    check_gguf,
    load_gguf,
    load_gguf_config,
    load_gguf_tokenizer,
)
from farspan.hub import is_hub_id, unavailable_reason
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model_objects import ModelLike, ModelObject, accepts_model_objects
from farspan.progress import Progress, automatic, shows_progress
from farspan.summaries import Summarized

MAX_CONFIG_LAYERS = 100_000  # of a config; lists of more would be made before any weight is read
BASE = "base"  # the subfolder of a patch folder that may hold its base model
UPCAST_BELOW = 300_000_000  # parameters


class _ModelAndTokenizer(NamedTuple):
    model: PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase | None  # None if the checkpoint has none


class LoadedModel(Summarized, _ModelAndTokenizer):
    """A model and its tokenizer; it unpacks like a tuple."""

    def facts(self) -> dict[str, str]:
        model, tokenizer = self
        length = config_train_length(model.config)
        return {
            "model": f"{type(model).__name__}, {model.num_parameters():,} parameters",
            "train length": f"{length:,} tokens" if length else "unknown",
            "dtype": f"{str(model.dtype).removeprefix('torch.')} on {model.device}",
            "tokenizer": f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens"
            if tokenizer
            else "none",
        }

    def to_dict(self) -> dict[str, Any]:
        return {**self.facts(), "config": self.model.config.to_dict()}


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of `load`."""

    position: str | None
    dtype: torch.dtype | str | None
    device: str | torch.device | None
    device_map: DeviceMap | None
    attn_implementation: str | None
    trust_remote_code: bool
    progress: Progress


@renamed_arguments(source="model", attention="attn_implementation")
@accepts_model_objects
@shows_progress
def load(
    model: ModelLike,
    *,
    position: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    device_map: DeviceMap | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = automatic,
) -> LoadedModel:
    """Load a model in evaluation mode, with its tokenizer.

    model: a folder, hub id, bundled model (nope-twin, rope-twin, swan-twin), .gguf file or patch
        folder; of a model object, a copy is returned.
    position: "none" loads a checkpoint typed `llama` that was trained without rotation.
    dtype: default: the checkpoint's, or float32 on a CPU that only emulates it. A .gguf file is
        dequantized to bf16 on a GPU and to float32 on a CPU.
    device_map, attn_implementation: as in transformers.

    >>> model, tokenizer = farspan.load("nope-twin")
    >>> model.config.max_position_embeddings
    512
    """
    check_device(device)
    _check_options(model, device_map, device, position, attn_implementation)
    dtype = parse_dtype(dtype)
    if isinstance(model, ModelObject):
        return _copied(model, dtype, device)
    source = resolve_bundled(model)
    if is_patch(source):
        return _load_patched(
            Path(source),
            position=position,
            dtype=dtype,
            device=device,
            device_map=device_map,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if Path(source).suffix == ".gguf":
        return LoadedModel(*load_gguf(Path(source), dtype, device, progress))
    config = load_config(source, position=position, trust_remote_code=trust_remote_code)
    check_weights(source)
    used = resolve_device(None) if device_map is not None else device
    dtype = dtype or _supported_dtype(getattr(config, "dtype", None), used)
    options: dict[str, Any] = {
        "dtype": dtype or "auto",
        "use_safetensors": True,
        "trust_remote_code": trust_remote_code,
        "ignore_mismatched_sizes": True,  # so that they are reported, and refused with both shapes
    }
    if (backend := attn_implementation or required_attention(config)) is not None:
        options["attn_implementation"] = backend
    # A config that we changed must not be overruled by the one in the folder: its own class loads.
    ours = isinstance(config, FarspanConfig)
    loading_class = FarspanForCausalLM if ours else model_class(config)
    with quiet(), readable(source):
        loaded, report = loading_class.from_pretrained(
            source, config=config, output_loading_info=True, **options, **placement(device_map)
        )
    check_report(source, loaded, report)
    check_placed(loaded, source)
    loaded = loaded.to(device).eval() if device else loaded.eval()
    _lift_length_limit(loaded)
    return LoadedModel(loaded, _load_tokenizer(source, trust_remote_code))


def _copied(
    model: ModelObject, dtype: torch.dtype | str | None, device: str | torch.device | None
) -> LoadedModel:
    loaded = model.copy_model(device)
    placed = is_placed(loaded)
    if placed and dtype not in (None, "auto", loaded.dtype):
        raise FarspanError(
            f"the device map of {model} keeps its weights in {loaded.dtype}; load it with "
            f"dtype={dtype}"
        )
    if isinstance(dtype, torch.dtype) and not placed:
        loaded = loaded.to(dtype=dtype)
    return LoadedModel(loaded, _tokenizer_of(model))


def _check_options(
    model: str | Path,
    device_map: DeviceMap | None,
    device: str | torch.device | None,
    position: str | None,
    attn_implementation: str | None,
) -> None:
    """Refuse options that a model object or a .gguf file cannot follow."""
    check_device_map(device_map, device)
    is_object = isinstance(model, ModelObject)
    is_file = not is_object and Path(model).suffix == ".gguf"
    for name, value in {"position": position, "attn_implementation": attn_implementation}.items():
        if value is not None and (is_object or is_file):
            kind = "a model object is loaded already" if is_object else f"{model} is a .gguf file"
            raise FarspanError(
                f"{name} {value!r} is for checkpoints in safetensors, and {kind}; remove it, or "
                f"{USE_CHECKPOINT}"
            )
    if device_map is not None and is_object:
        raise FarspanError("a model object is on its devices already; remove the device map")
    if device_map is not None and is_file:
        raise FarspanError(
            f"{model} is dequantized in memory, without a device map; remove it, or "
            f"{USE_CHECKPOINT}"
        )


def _tokenizer_of(source: ModelObject) -> transformers.PreTrainedTokenizerBase | None:
    """That of the object, or of the folder or hub id that it was loaded from."""
    if source.tokenizer is not None:
        return source.tokenizer
    name = str(resolve_bundled(str(source)))
    if source.patch is not None:
        name = str(resolve_bundled(base_source(Path(name), source.patch)))
    known = Path(name).is_dir() or is_hub_id(name)
    return _load_tokenizer(name, False) if known else None


def _lift_length_limit(model: PreTrainedModel) -> None:
    """Let MPT read more than `max_seq_len` tokens.

    transformers makes its ALiBi biases for that many keys, and fails beyond. They depend on
    distances alone, so more of them change nothing inside. The config is as it was after each pass.
    """

    def raise_limit(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs: Any = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        past = kwargs.get("past_key_values")
        keys = inputs.shape[1] + (past.get_seq_length() if past is not None else 0)
        decoder.config.max_seq_len = max(limit, keys)

    def restore(decoder: Any, args: tuple, output: Any) -> None:
        decoder.config.max_seq_len = limit

    for module in model.modules():
        if isinstance(module, transformers.MptModel):
            limit = module.config.max_seq_len
            module.register_forward_pre_hook(raise_limit, with_kwargs=True)
            module.register_forward_hook(restore, always_call=True)


def load_with_tokenizer(
    source: str | Path, **options: Unpack[LoadOptions]
) -> tuple[PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """`load`, for commands that need a tokenizer."""
    model, tokenizer = load(source, **options)
    tokenizer = _require_tokenizer(tokenizer, source)
    _check_token_ids(model, tokenizer, source)
    return model, tokenizer


def _check_token_ids(
    model: PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, source: str | Path
) -> None:
    """Refuse tokens that the model has no embedding for, where its tokenizer can make some.

    A few of them may be harmless: many models have a padding token beyond their vocabulary.
    """
    embeddings: Any = model.get_input_embeddings()
    rows = getattr(embeddings, "num_embeddings", None)
    if rows is None or len(tokenizer) <= rows:
        return

    def check(module: Any, args: tuple) -> None:
        if args and args[0].numel() and (highest := int(args[0].max())) >= rows:
            raise FarspanError(
                f"the tokenizer of {source} makes token {highest} and its model has {rows} "
                "embeddings; use the tokenizer that belongs to the model"
            )

    embeddings.register_forward_pre_hook(check)


def load_tokenizer(
    source: str | Path, trust_remote_code: bool = False
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a model, which must have one; that of a patch may be with its base."""
    if isinstance(source, ModelObject):
        return _require_tokenizer(_tokenizer_of(source), source)
    if (file := Path(source)).suffix == ".gguf":
        return load_gguf_tokenizer(file)
    tokenizer = _load_tokenizer(resolve_bundled(source), trust_remote_code)
    if tokenizer is None and (patch := find_patch(source)) is not None:
        return load_tokenizer(base_source(file, patch), trust_remote_code)
    return _require_tokenizer(tokenizer, source)


def _require_tokenizer(
    tokenizer: transformers.PreTrainedTokenizerBase | None, source: str | Path
) -> transformers.PreTrainedTokenizerBase:
    if tokenizer is None:
        way_out = "add its tokenizer.json"
        if isinstance(source, ModelObject):
            way_out = "give (model, tokenizer)"
        raise FarspanError(f"{source} has no tokenizer to encode text with; {way_out}")
    return tokenizer


def check_source(
    source: str | Path, *, position: str | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse, by files alone, what `load_with_tokenizer` would refuse.

    Commands check every model before they measure the first one.
    """
    if isinstance(source, ModelObject):
        return
    if (patch := find_patch(source)) is not None:
        with _existing_base(Path(source), patch) as base:
            position = position or patch.position
            check_source(base, position=position, trust_remote_code=trust_remote_code)
    elif Path(source).suffix == ".gguf":
        check_gguf(Path(source))
    else:
        load_config(source, position=position, trust_remote_code=trust_remote_code)
        check_weights(resolve_bundled(source))
        load_tokenizer(source, trust_remote_code)


def find_train_length(source: str | Path, trust_remote_code: bool = False) -> int | None:
    """The train length of a model, by its patch or its config alone."""
    if (patch := find_patch(source)) is not None:
        return patch.train_length
    if isinstance(source, ModelObject):
        return config_train_length(source.model.config)
    file = Path(source)
    if file.suffix != ".gguf":
        return config_train_length(load_config(source, trust_remote_code=trust_remote_code))
    return config_train_length(load_gguf_config(file))


def find_patch(source: str | Path) -> Patch | None:
    """The patch in a folder, of a bundled model or of a model object; None without one."""
    if isinstance(source, ModelObject):
        return source.patch
    return Patch.load(Path(resolve_bundled(source))) if is_patch(source) else None


def is_patch(source: str | Path) -> bool:
    return (Path(resolve_bundled(source)) / "patch.json").exists()


def _missing(source: str | Path) -> MissingModelError:
    bundled = [path.name for path in BUNDLED_MODELS.iterdir()]
    near = difflib.get_close_matches(str(source), bundled, 1)
    hint = f"did you mean the bundled model {near[0]}?" if near else "check the path"
    return MissingModelError(
        f"{str(source)!r} is neither a folder nor a hub id (owner/name); {hint}"
    )


def load_config(
    source: str | Path, *, position: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The checked config of a model; with `position`, converted to FarspanConfig."""
    source = resolve_bundled(source)
    folder = Path(source)
    if folder.is_dir():
        _check_config_file(folder, trust_remote_code)
    elif folder.exists():
        raise FarspanError(f"{folder} is a file; give the folder that holds the checkpoint")
    elif not is_hub_id(str(source)):
        raise _missing(source)
    else:
        _check_hub(str(source))
    try:
        with quiet(), readable(source):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except FarspanError as error:
        if str(source) in str(error):
            raise
        # FarspanConfig's own checks name the value, not the model.
        raise type(error)(f"in the config of {source}, {error}") from None
    if isinstance(config, FarspanConfig) and config.custom_encodings:
        _import_encodings(config, source, trust_remote_code)
    return config if position is None else with_position(config, position)


def _import_encodings(config: FarspanConfig, source: str | Path, trust_remote_code: bool) -> None:
    """Import the code of a model's encodings from its folder; the config gets their full paths."""
    if not Path(source).is_dir():
        raise FarspanError(
            f"{source} has position encodings with code of their own; download it, and give its "
            "folder"
        )
    for name, reference in config.custom_encodings.items():
        key = f"the encoding {name} of {source}"
        full = resolve_reference(reference, Path(source), key)
        import_code(full, key, trust_remote_code=trust_remote_code)
        config.custom_encodings[name] = full


def _check_config_file(folder: Path, trust_remote_code: bool) -> None:
    check_links(folder)
    if is_patch(folder) and not (folder / "config.json").exists():
        raise FarspanError(f"{folder} is a patch, not a model; give its base model")
    if not (folder / "config.json").exists():
        raise FarspanError(f"{folder} has no config.json; give {_suggest_folder(folder)}")
    config = read_json(folder / "config.json")
    if config.get("auto_map") and not trust_remote_code:
        raise FarspanError(
            f"{folder} wants to run Python code that comes with it (auto_map in config.json); "
            "if you trust it, add --trust-remote-code"
        )
    for part in (config, config.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > MAX_CONFIG_LAYERS:
            raise CorruptError(
                f"{folder / 'config.json'} claims {layers} layers; a model has at most "
                f"{MAX_CONFIG_LAYERS}, so download or export it again"
            )


def _suggest_folder(folder: Path) -> str:
    """The checkpoint inside a folder that a run or an export wrote, which may be meant."""
    configs = [path.parent for path in sorted(folder.glob("*/config.json"))]
    inside = configs + sorted(folder.glob("*.gguf"))
    return str(inside[0]) if len(inside) == 1 else "the folder that save_pretrained wrote"


def resolve_device(device: str | None) -> str:
    """The requested device; default: a GPU if there is one, else the CPU."""
    check_device(device)
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def check_device(device: str | torch.device | None) -> None:
    """Refuse a misspelled or absent device before anything is read."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = first_line(error) if len(first_line(error)) < 80 else "unknown to torch"
        raise FarspanError(
            f"device {str(device)!r} cannot be used ({why}); choose {_usable_devices()}"
        ) from None
    if torch.device(device or "cpu").type == "meta":
        raise FarspanError(f"device 'meta' cannot compute; choose {_usable_devices()}")


def _usable_devices() -> str:
    return "cpu, or cuda:0" if torch.cuda.is_available() else "cpu"


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """`"half"` -> torch.float16; "auto", the dtype of the checkpoint, stays."""
    if dtype in (None, "auto"):
        return dtype
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(named, torch.dtype) and named.is_floating_point:
        return named
    raise FarspanError(f"dtype {dtype!r} is unknown; choose float32, bfloat16, float16 or auto")


def _supported_dtype(
    dtype: torch.dtype | None, device: str | torch.device | None
) -> torch.dtype | None:
    """float32 if the CPU only emulates `dtype`, a hundred times slower; else None."""
    native = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    if torch.device(device or "cpu").type != "cpu" or dtype not in native:
        return None
    able = torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, native[dtype])()
    return None if able else torch.float32


def _check_hub(name: str) -> None:
    cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)
    if not cached and (why := unavailable_reason(name, "model")) is not None:
        raise MissingModelError(
            f"{name} is no local folder and could not be fetched from the hub ({why}); check the "
            "path, the name, or the network"
        )


def with_position(config: PreTrainedConfig, position: str) -> FarspanConfig:
    """A Llama config as FarspanConfig with another position encoding."""
    if isinstance(config, FarspanConfig):
        raise FarspanError(
            f"this is farspan's own architecture, whose config sets the position encoding "
            f"({config.position[0]}); remove --position"
        )
    if config.model_type != "llama":
        raise FarspanError(
            f"--position works on llama checkpoints, and this one is {config.model_type!r}; "
            "remove --position"
        )
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise FarspanError(
            "this llama checkpoint has biases or an activation other than silu, which --position "
            "does not support; remove --position"
        )
    replaced = {"position", "rope_parameters", "layer_types", "base_scale", "model_type"}
    shared = FarspanConfig().to_dict().keys() - replaced
    values = {key: value for key, value in config.to_dict().items() if key in shared}
    rope = config.rope_parameters if position.startswith("rope") else None
    return FarspanConfig(**{**values, "position": position, "rope_parameters": rope})


def is_quantized(model: PreTrainedModel) -> bool:
    return getattr(model, "is_quantized", False)


def upcast_small_model(model: PreTrainedModel) -> PreTrainedModel:
    """A small model in float32, whatever the dtype of its checkpoint.

    Where scores are large, bf16 loses the gradient of a scale, and a small model has the memory
    and the time. Quantized models stay as they are. So do models with grouped-query attention on
    a GPU: SDPA has no float32 kernel for them and would materialize all T² scores.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
    grouped_on_gpu = model.device.type == "cuda" and kv_heads not in (None, heads)
    keep = model.dtype == torch.float32 or is_quantized(model) or grouped_on_gpu
    return model if keep or model.num_parameters() >= UPCAST_BELOW else model.float()


def _load_patched(folder: Path, **options: Unpack[LoadOptions]) -> LoadedModel:
    patch = Patch.load(folder)
    # A patch identifies its base by weights rounded to bf16; rounding to float16 first could
    # give other bf16 values, so float16 comes after the patch.
    half = options.get("dtype") == torch.float16
    if half:
        options["dtype"] = None
    base, tokenizer = load_base(folder, patch, **options)
    try:
        model = patch.apply(base)
    except WrongBaseError as error:
        raise FarspanError(
            f"the patch in {folder} was made for another model than {base_source(folder, patch)} "
            f"({str(error).partition(';')[0]}); put its base model into {folder / BASE}, or set "
            f"its path in {folder / 'patch.json'}"
        ) from None
    except IncompatiblePatchError as error:
        raise corrupt_patch(folder, error) from None
    remember_folder(model, folder, base_source(folder, patch))
    if half:
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
    if tokenizer is not None and patch.begin_of_text is not None:
        setattr(tokenizer, DECISION, patch.begin_of_text)
    return LoadedModel(model, tokenizer)


def load_base(folder: Path, patch: Patch, **options: Unpack[LoadOptions]) -> LoadedModel:
    """The base model of a patch folder, without the patch."""
    options["position"] = options.get("position") or patch.position
    with _existing_base(folder, patch) as source:
        return load(source, **options)


@contextlib.contextmanager
def _existing_base(folder: Path, patch: Patch) -> Iterator[str]:
    """The base model of a patch folder; in the block, a missing base is explained."""
    source = base_source(folder, patch)
    if not source or is_patch(source):
        raise FarspanError(
            f"{folder} names {source or 'nothing'!r} as its base model; load the base model and "
            "use Patch.apply"
        )
    try:
        yield source
    except MissingModelError as error:
        raise FarspanError(
            f"the base model of the patch in {folder} was not found "
            f"({str(error).partition(';')[0]}); put it into {folder / BASE}, or set its path in "
            f"{folder / 'patch.json'}"
        ) from None


def base_source(folder: Path, patch: Patch) -> str:
    """The path or id of a patch folder's base model: inside the folder, or as the patch says."""
    return str(folder / BASE) if (folder / BASE).is_dir() else patch.name


def _load_tokenizer(
    source: str | Path, trust_remote_code: bool
) -> transformers.PreTrainedTokenizerBase | None:
    folder = Path(source)
    if folder.is_dir() and not tokenizer_files(folder):
        return None
    if not folder.exists() and not is_hub_id(str(source)):
        raise _missing(source)
    way_out = "check its tokenizer_config.json and that this transformers supports the tokenizer"
    with quiet(), readable(source, way_out):
        try:
            return read_tokenizer(source, trust_remote_code)
        except Exception:
            check_tokenizer(folder)
            raise
