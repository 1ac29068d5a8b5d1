"""Hub ids, and a quick check whether the hub serves one.

The check asks once with a short timeout. transformers, datasets and lm-evaluation-harness would
retry for half a minute and print every failure.
"""

from __future__ import annotations

from typing import Literal

TIMEOUT = 5.0  # seconds


def is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name that the hub accepts.

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


def unavailable_reason(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why a model or data set cannot be downloaded, as an error's name; None if it can."""
    from huggingface_hub import HfApi

    request = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        request(name, timeout=TIMEOUT)
    except Exception as error:  # the network and the hub raise errors of many classes
        return type(error).__name__
    return None
