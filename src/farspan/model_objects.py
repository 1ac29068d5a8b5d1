"""Model objects where a model is named: `farspan.evaluate(model)` for a model in memory."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch, applied_patch
from farspan.bundled import bundled_name
from farspan.device_map import is_placed

# A name or path, a model object, or what `load` returns: a model and its tokenizer.
ModelLike = str | Path | PreTrainedModel | tuple[PreTrainedModel, PreTrainedTokenizerBase | None]
ARGUMENTS = ("model", "models", "baseline")
P = ParamSpec("P")
T = TypeVar("T")


class ModelObject(str):
    """The name of a model that is in memory: where it was loaded from, or else its class."""

    __slots__ = ("model", "patch", "tokenizer")
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    patch: Patch | None  # that it has

    @classmethod
    def wrap(cls, value: Any) -> Any:
        """A model object, or a pair with its tokenizer, under its name; anything else as it is."""
        if _is_pair(value):
            model, tokenizer = value
        elif isinstance(value, PreTrainedModel):
            model, tokenizer = value, None
        else:
            return [cls.wrap(each) for each in value] if isinstance(value, list | tuple) else value
        applied = applied_patch(model)
        folder = applied.folder if applied else ""
        path = folder or getattr(model, "name_or_path", "") or type(model).__name__
        name = cls(bundled_name(path))
        name.model, name.tokenizer = model, tokenizer
        name.patch = applied.patch if applied else None
        return name

    def copy_model(self, device: Any) -> PreTrainedModel:
        """A copy in evaluation mode: functions patch, convert and move what they load.

        One with a device map stays on its devices."""
        copied = copy.deepcopy(self.model).eval()
        return copied.to(device) if device and not is_placed(self.model) else copied


def _is_pair(value: Any) -> bool:
    """Whether this is a model and its tokenizer, and not two models."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], PreTrainedModel)
        and not isinstance(value[1], PreTrainedModel | str | Path | tuple)
    )


def accepts_model_objects(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function whose arguments name models take model objects too."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def accepting(*args: P.args, **options: P.kwargs) -> T:
        bound = signature.bind(*args, **options)
        for name in ARGUMENTS:
            if name in bound.arguments:
                bound.arguments[name] = ModelObject.wrap(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return accepting
