"""A model as `farspan eval` measures it: loaded, checked, and identified by hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.attention.model_facts import config_train_length, max_positions, probe_or_none
from farspan.attention.patch import Patch
from farspan.begin_of_text import load_with_begin_of_text
from farspan.bundled import resolve_bundled
from farspan.cells import cell_key
from farspan.custom_code import source_hash
from farspan.data.tokens import adds_begin_of_text
from farspan.data.tokens import fingerprint as tokenizer_fingerprint
from farspan.device_map import stored_tensors
from farspan.diagnosis.curves import check_finite
from farspan.errors import FarspanError
from farspan.evals.decoding import end_tokens
from farspan.evals.passkey import UNKNOWN
from farspan.evals.suites import EvalModel
from farspan.files import read_json
from farspan.loading import LoadOptions, base_source, find_patch, upcast_small_model
from farspan.model.loss import last_logits
from farspan.train.metadata import begin_of_text, trained_with_passkeys


def load_eval_model(source: str | Path, options: LoadOptions, bos: str = "auto") -> EvalModel:
    model, tokenizer, begin = load_with_begin_of_text(source, bos, **options)
    model = upcast_small_model(model)
    _check_head(model, source)
    layers = probe_or_none(model)
    on_gpu = model.device.type == "cuda" and model._can_set_attn_implementation()
    if on_gpu and not seam.installed(model):
        with suppress(FarspanError):  # once for all passkeys; without the seam where unsupported
            seam.install(model)
    patch = find_patch(source)
    length = patch.train_length if patch else config_train_length(model.config)
    return EvalModel(
        str(source),
        model,
        tokenizer,
        length,
        patch.target if patch else length,
        max_positions(model.config, layers),
        passkeys_in_training(source),
        model_identity(model, tokenizer, patch),
        begin,
        layers,
    )


@torch.no_grad()
def _check_head(model: PreTrainedModel, source: str | Path) -> None:
    """Prove that the logits computed for a few positions are the model's own."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(16, device=model.device)[None] % vocabulary
    expected = model(input_ids=ids, use_cache=False).logits[:, -4:].float()
    check_finite(
        model, expected, f"{source} on {ids.shape[1]} tokens, the first of its vocabulary,"
    )
    difference = float((last_logits(model, ids, 4).float() - expected).abs().max())
    if not difference <= 1e-2 * float(expected.abs().max()):
        raise FarspanError(
            f"farspan's logits of {type(model).__name__} differ from the model's by "
            f"{difference:.2g}, so this family cannot be evaluated; use another engine"
        )


def model_identity(model: PreTrainedModel, tokenizer: Any, patch: Patch | None) -> dict[str, str]:
    """Hashes of everything of a model that a result depends on.

    A patch identifies its base by weights rounded to bf16; here every bit counts.
    """
    config = json.loads(model.config.to_json_string(use_diff=False))
    for incidental in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        config.pop(incidental, None)
    for name, reference in config.get("custom_encodings", {}).items():  # code counts, not its path
        code = source_hash(reference, f"the encoding {name}")
        config["custom_encodings"][name] = [code, reference.rpartition(":")[2]]
    identity = {
        "weights": _weights_digest(model),
        "config": cell_key(config),
        "dtype": str(model.dtype).partition(".")[2],
    }
    if patch is not None and patch.scales is not None:
        scales = patch.scales
        tables = [None if t is None else t.tolist() for t in (scales.base, scales.slope)]
        at = [list(scales.layers), scales.basis, scales.length]
        identity["scales"] = cell_key({"at": at, "tables": tables})
    if patch is not None and patch.layout is not None and not patch.weights:
        identity["layout"] = cell_key(patch.layout.to_json())  # weights that fit it differ already
    identity["tokenizer"] = tokenizer_fingerprint(tokenizer)
    identity["begin and ends"] = f"{tokenizer.bos_token_id} {end_tokens(model, tokenizer)}"
    start, adds = begin_of_text(tokenizer), adds_begin_of_text(tokenizer)
    if start or adds:  # else the keys of cells are those of earlier versions
        identity["begin of text"] = str(start)
    return identity


def _weights_digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in stored_tensors(model, sorted(model.state_dict().items())):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def passkeys_in_training(source: str | Path) -> str:
    """Did the model see passkey documents in training, or a search for its scales: "yes", "no" or
    "unknown"."""
    folder = Path(source)
    if (patch := find_patch(folder)) is not None:
        record = folder / "record.json"
        if record.is_file() and searched_on_passkeys(read_json(record)):
            return "yes"
        return passkeys_in_training(base_source(folder, patch))
    trained = trained_with_passkeys(Path(resolve_bundled(source)))
    return UNKNOWN if trained is None else "yes" if trained else "no"


def searched_on_passkeys(record: Mapping[str, Any]) -> bool:
    """Whether a search for scales, in a record or a cell, read passkey documents."""
    return any(search.get("passkeys") for search in record.get("searches", ()))
