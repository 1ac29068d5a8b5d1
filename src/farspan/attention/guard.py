"""Whether the seam changes what a model computes, measured by running it with and without the seam.

A model may test the name of its attention implementation, and the seam has a name of its own. So a
small random model of the same class and config is compared before the seam is installed. Its
windows, chunks and top-k selections are so short that a dropped one shows.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from farspan.attention.small_config import SPAN, short_config
from farspan.errors import FarspanError

TOKENS = 3 * SPAN
DECODED = 2  # tokens that are read one at a time from a cache
# Of the largest logit. Two orders of the same float32 sums differ by 1e-6, a dropped mask by 1e-2.
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.float64: 1e-6}
MAX_HALF_DIFFERENCE = 2e-2

MAX_PARAMETERS = 100_000_000  # of a small model: 0.4 GB

OnSeam = Callable[[PreTrainedModel], AbstractContextManager[None]]
_differences: dict[str, float] = {}  # of the models that were compared, by class and config


def check_unchanged(model: PreTrainedModel, on_seam: OnSeam) -> None:
    """Refuse a model whose outputs the seam would change."""
    key = _key(model)
    if key not in _differences:
        _differences[key] = _small_difference(model, on_seam)
    if not _differences[key] <= MAX_DIFFERENCE[torch.float32]:
        raise FarspanError(
            f"the attention seam would change what {type(model).__name__} computes: with and "
            f"without it the logits of a small model of this config differ by "
            f"{_differences[key]:.2g} of the largest, as in families that test the name of the "
            "attention implementation; evaluate the model as it is, without scales and entropies"
        )


def max_difference(model: PreTrainedModel) -> float:
    """The difference that rounding explains, of the largest logit."""
    return MAX_DIFFERENCE.get(model.dtype, MAX_HALF_DIFFERENCE)


def difference(
    model: PreTrainedModel, ids: Tensor, on_seam: OnSeam, decoded: int = DECODED
) -> dict[str, float]:
    """The largest change of a logit by the seam, of the largest logit, without and with a cache.

    A model that runs with no cache by itself has nothing to compare there.
    """
    decoded = min(decoded, ids.shape[1] - 1)
    plain, plain_cached = _logits(model, ids), _cached_logits(model, ids, decoded)
    with on_seam(model):
        changes = {"uncached": relative_change(plain, _logits(model, ids)), "cached": 0.0}
        if plain_cached is not None:
            cached = _cached_logits(model, ids, decoded)
            changes["cached"] = (
                math.inf if cached is None else relative_change(plain_cached, cached)
            )
    return changes


def _key(model: PreTrainedModel) -> str:
    """The class, the backend and the short config: widths make no difference."""
    config = model.config
    with suppress(Exception):  # a config without heads
        config = short_config(config)
    values = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        values.pop(name, None)
    owner = f"{type(model).__module__}.{type(model).__qualname__}"
    parts = [owner, model.config._attn_implementation, values]
    return json.dumps(parts, default=str)


def _small_difference(model: PreTrainedModel, on_seam: OnSeam) -> float:
    """The difference of a small model of this config, or of the model itself if none can be
    built."""
    try:
        small = _small_random_model(model)
        return max(difference(small, _ids(small), on_seam).values())
    except Exception:  # a family whose sizes depend on each other, or that has other large tables
        scale = max_difference(model) / MAX_DIFFERENCE[torch.float32]
        return max(difference(model, _ids(model), on_seam).values()) / scale


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of transformers about a small config are none about the model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _small_random_model(model: PreTrainedModel) -> PreTrainedModel:
    """In float32 on the CPU; the state of the random numbers stays as it is."""
    config = short_config(model.config)

    def build() -> PreTrainedModel:
        return type(model)._from_config(
            copy.deepcopy(config),
            dtype=torch.float32,
            attn_implementation=model.config._attn_implementation,
        )

    with _quiet(), torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            if (size := build().num_parameters()) > MAX_PARAMETERS:
                raise ValueError(f"{size:,} parameters of a short config")
        torch.manual_seed(0)
        with torch.device("cpu"):
            small = build()
        spread_weights(small)
    return small.eval()


def spread_weights(model: PreTrainedModel) -> None:
    """Give every matrix random weights of a standard deviation of 1/√inputs: new ones are so small
    that attention is almost uniform."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            bound = (3 / parameter.shape[-1]) ** 0.5
            torch.nn.init.uniform_(parameter, -bound, bound)


def _ids(model: PreTrainedModel) -> Tensor:
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 0
    tokens = min(TOKENS, limit) if limit > 1 else TOKENS  # 0, 1 and −1 stand for no limit
    vocabulary = model.get_input_embeddings().num_embeddings
    # Steps of a prime: neighbours differ, and no token is twice in a window.
    return (torch.arange(tokens, device=model.device) * 7)[None] % vocabulary


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return model(input_ids=ids, use_cache=False)[0]  # a model without a head has states


@torch.no_grad()
def _cached_logits(model: PreTrainedModel, ids: Tensor, decoded: int) -> Tensor | None:
    """None if the model fails with a cache."""
    try:
        with torch.compiler.set_stance("force_eager"):
            output = model(input_ids=ids[:, :-decoded], use_cache=True)
            parts = [output[0]]
            for index in range(ids.shape[1] - decoded, ids.shape[1]):
                past, token = output.past_key_values, ids[:, index : index + 1]
                output = model(input_ids=token, past_key_values=past, use_cache=True)
                parts.append(output[0])
    except Exception:
        return None
    return torch.cat(parts, dim=1)


def relative_change(first: Tensor, second: Tensor) -> float:
    first, second = first.float(), second.float()
    same = (first == second) | (first.isnan() & second.isnan())
    change = torch.where(same, 0.0, (first - second).abs()).max()
    return float(change / first.abs().nan_to_num().max().clamp(min=1e-30))
