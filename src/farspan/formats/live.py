"""Model and patch in one folder that goes anywhere: the base model inside, what changes it beside.

The config at the top names a type that stock transformers does not know, so that it refuses the folder: read as its
base model alone it would run, and be another model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.attention.patch import Patch
from farspan.files import write_json
from farspan.loading import BASE, quiet

MODEL_TYPE = "farspan-patched"


def write_live(base: PreTrainedModel, patch: Patch, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Fill a folder with the base model, as it is without the patch, and the patch; `farspan.load` reads it."""
    save_model(base, tokenizer, folder / BASE)
    # The model inside was saved as it was read, so its config says its position itself.
    replace(patch, position=None).write_into(folder)
    write_json(folder / "config.json", {"model_type": MODEL_TYPE, "base": BASE, "patch": "patch.json"})


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """A model folder with its tokenizer, without a word from transformers."""
    with quiet():
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
