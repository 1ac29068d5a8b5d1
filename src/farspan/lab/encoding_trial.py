"""A trial of an encoding of the user's own, before anything is trained.

A network of one layer reads texts as long as the longest row of the study. What is wrong with the
encoding is an error of one sentence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from farspan.errors import FarspanError, first_line
from farspan.lab.fleet import Fleet
from farspan.lab.networks import NetworkShape, init_model, network_config
from farspan.lab.tokenizer import WordTokenizer
from farspan.model.config import FarspanConfig
from farspan.model.encodings import Encoding, encoding_class
from farspan.model.transformer import FarspanForCausalLM

METHODS = ("embed", "rotate", "scores")
TEXTS = 3  # of a trial
ROUNDING = 1e-4  # of logits, between texts or batches of different sizes
FLEET_ROUNDING = 1e-3


@lru_cache(maxsize=64)
def try_encoding(
    name: str, reference: str, shape: NetworkShape, version: str, lengths: tuple[int, int]
) -> None:
    """Raise an error if an encoding fails, or gives logits that a study must not use.

    `lengths` are the train length and the longest row. `version` is a hash of the encoding's file,
    so that a changed file is tried again.
    """
    del version
    cls = encoding_class(name, {name: reference})
    assert cls is not None
    small = replace(shape, layers=1, ff=8, dropout=0.0, zero_outputs=False)
    try:
        config = network_config(small, name, WordTokenizer(), *lengths, {name: reference})
        problem = _find_problem(cls, config)
    except (Exception, SystemExit) as error:  # whatever the code raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise FarspanError(
            f"custom_encodings.{name} ({reference}) failed in a trial run ({reason}) with texts of "
            f"up to {lengths[1] - 1:,} tokens; fix the code"
        ) from error
    if problem:
        raise FarspanError(f"custom_encodings.{name} ({reference}) {problem}")


def _find_problem(cls: type[Encoding], config: FarspanConfig) -> str | None:
    """What is wrong with an encoding, and the way out."""
    if all(getattr(cls, method) is getattr(Encoding, method) for method in METHODS):
        return "defines no method that farspan calls; define embed, rotate or scores"
    models = [init_model(config, seed, zero_output_weights=False).eval() for seed in (0, 1)]
    rng = np.random.default_rng(0)
    shape = (TEXTS, config.position_table - 1)  # the last token of a row is no input
    ids = torch.from_numpy(rng.integers(4, config.vocab_size, size=shape))
    with torch.no_grad():
        problem = _find_random_numbers(models[0], ids, cls.random)
        problem = problem or _find_wrong_dependence(models[0], ids)
    return problem or _find_fleet_problem(models, ids)


def _find_random_numbers(model: FarspanForCausalLM, ids: Tensor, random: bool) -> str | None:
    """Logits that are not finite, or that differ when the model reads the same texts again."""
    first, again = model(ids).logits, model(ids).logits
    model.train()
    trained, trained_again = model(ids).logits, model(ids).logits
    model.eval()
    if not (first.isfinite().all() and trained.isfinite().all()):
        return f"gives logits that are not finite in texts of {ids.shape[1]:,} tokens; fix the code"
    if not _close(first, again):
        return (
            "gives other logits when the same texts are tested again; draw random numbers in "
            "training only, and set random = True in the class"
        )
    if not random and not _close(trained, trained_again):
        return (
            "gives other logits when it trains on the same texts again; set random = True in the "
            "class if it draws random numbers"
        )
    return None


def _find_wrong_dependence(model: FarspanForCausalLM, ids: Tensor) -> str | None:
    """Logits that depend on later tokens, on other texts, or on the number of tokens."""
    logits, half = model(ids).logits, ids.shape[1] // 2
    changed = ids.clone()
    changed[:, half:] = ids[:, half:].flip(0)
    if not _close(logits[0, :half], model(changed).logits[0, :half]):
        return "lets tokens see later tokens; fix the code"
    if not _close(logits[:1], model(ids[:1]).logits):
        return "gives a text other logits in a batch than by itself; use nothing of other texts"
    if not _close(logits[:, :half], model(ids[:, :half]).logits):
        return (
            "gives tokens other logits when more tokens follow, as padding does; use nothing that "
            "depends on the number of tokens"
        )
    return None


def _find_fleet_problem(models: list[FarspanForCausalLM], ids: Tensor) -> str | None:
    """Other logits in a fleet than by itself, or gradients that are not finite."""
    with torch.no_grad():
        single = torch.stack([model(ids).logits for model in models])
    fleet = Fleet(models)
    logits = fleet.logits(ids.repeat(len(models), 1, 1))
    (gradient,) = torch.autograd.grad(logits.square().sum(), fleet.weights)
    if not gradient.isfinite().all():
        return (
            f"gives gradients that are not finite in texts of {ids.shape[1]:,} tokens; fix the "
            "code (later keys have negative distances: clamp them before log or sqrt)"
        )
    if not torch.allclose(single, logits, atol=FLEET_ROUNDING):
        return (
            "gives other logits in a fleet of models, which may differ in parameters only; fix the "
            "code"
        )
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=ROUNDING)
