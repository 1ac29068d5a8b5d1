"""Model and patch in one self-contained folder: the base model inside, the patch beside it.

The top-level config names a model type that stock transformers does not know, so that it refuses
the folder instead of running the base model without its patch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch
from farspan.checkpoints import quiet
from farspan.files import write_json
from farspan.loading import BASE

MODEL_TYPE = "farspan-patched"


def write_live(
    base: PreTrainedModel, patch: Patch, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """Write the unpatched base model and the patch into a folder that `farspan.load` reads."""
    save_model(base, tokenizer, folder / BASE)
    # The saved base model has the position that it was loaded with in its config.
    replace(patch, position=None).write_into(folder)
    write_json(
        folder / "config.json", {"model_type": MODEL_TYPE, "base": BASE, "patch": "patch.json"}
    )


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """Save a model and its tokenizer without output from transformers."""
    with quiet():
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
