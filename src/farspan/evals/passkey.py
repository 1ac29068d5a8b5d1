"""Passkey: is a five-digit number, hidden in irrelevant text, told when asked for? Paper A's strings, held-out keys."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from farspan.data.passkey import Passkeys, held_out_key
from farspan.memory import in_pieces


def passkey_share(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    depths: int = 10,
    keys: int = 1,
    seed: int = 0,
    batch: int = 4,
) -> float:
    """The share of keys told right in documents of exactly `length` tokens, `keys` of them at each of `depths`."""
    maker, rng = Passkeys(tokenizer), np.random.default_rng((seed, length))
    places = [float(depth) for depth in np.linspace(0, 1, depths) for _ in range(keys)]
    rows, answers = [], []
    for depth in places:
        key = held_out_key(rng)
        rows.append(maker.document(length, depth, key))
        answers.append(len(maker.answer(key)))
    told = 0

    def some(start: int, stop: int) -> None:
        nonlocal told
        told += int(tells(model, torch.tensor(rows[start:stop]), answers[start:stop]).sum())

    in_pieces(len(rows), batch, some)
    return told / len(rows)


@torch.no_grad()
def tells(model: PreTrainedModel, rows: Tensor, answers: list[int]) -> Tensor:
    """For each row [B, T], whose last tokens, so many, are the answer: would greedy decoding say them all? [B] bool

    Given the right tokens before it, each must be the likeliest. That is what greedy decoding gives as well: it goes
    astray at the first token that is not.
    """
    longest = max(answers)
    logits = model(input_ids=rows.to(model.device), logits_to_keep=longest + 1, use_cache=False).logits
    right = logits[:, -longest - 1 : -1].argmax(-1).cpu() == rows[:, -longest:]
    before = torch.arange(longest, 0, -1) > torch.tensor(answers)[:, None]  # still the question
    return (right | before).all(1)
