"""What may be a name on the hub, and whether it is given there: asked once, with patience of seconds, where
transformers, datasets and the harness would try for half a minute and print each failure."""

from __future__ import annotations

from typing import Literal

PATIENCE = 5.0  # seconds


def is_hub_id(name: str) -> bool:
    """owner/name, in letters that the hub takes.

    >>> is_hub_id("HuggingFaceTB/SmolLM2-135M"), is_hub_id("./models")
    (True, False)
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def refusal(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why a model or data set cannot be had, in a word; None if it can."""
    from huggingface_hub import HfApi

    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        ask(name, timeout=PATIENCE)
    except Exception as error:  # whatever the network or the hub has to say
        return type(error).__name__
    return None
