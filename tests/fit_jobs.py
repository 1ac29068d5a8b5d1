"""Fit jobs on random tokens, for tests of methods and searches."""

from __future__ import annotations

from dataclasses import replace

import torch

from families import FAMILIES, VOCABULARY
from farspan.attention.patch import fingerprint
from farspan.attention.probe import probe
from farspan.methods.job import FitJob
from farspan.methods.search_config import SearchConfig

QUICK = SearchConfig(steps=4, batch=2, micro_batch=2, lr=(0.1,), warmup=1, init=1.2)
LENGTH, TARGET = 16, 40
BY_NAME = {family.name: family for family in FAMILIES}
FOUR = ("farspan-none", "llama", "qwen3", "gpt2")


def job_for(model, **changes) -> FitJob:
    layers = probe(model)
    ids = torch.randint(VOCABULARY, (6, TARGET + 5), generator=torch.Generator().manual_seed(1))
    job = FitJob(
        TARGET,
        LENGTH,
        search=ids,
        choose=ids[:2, :TARGET],
        layers=tuple(layer.index for layer in layers),
        heads=layers[0].heads,
        model=fingerprint(model),
    )
    return replace(job, **changes)


def job_without_model(**changes) -> FitJob:
    ids = torch.zeros(6, TARGET + 5, dtype=torch.long)
    job = FitJob(TARGET, LENGTH, search=ids, choose=ids, layers=(0,), heads=4, model="")
    return replace(job, **changes)
