"""Why a causal model needs no position encoding: Kazemnejad 2023's two theorems as weights.

1. One layer computes absolute positions. All keys are equal, so position t attends uniformly to t
   tokens, and the begin token's mark arrives as 1/t. A ReLU layer with a breakpoint at every 1/k
   turns that into any function of t, exactly.
2. The next layer scores by relative distance. From functions of t in the query and of i in the key,
   q·k can form a line or a parabola in t − i, plus a term that depends on the two tokens.

Conversely, `read_positions` reads from a trained model what its layers know of positions, by ridge
regression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.batching import run_in_batches
from farspan.errors import FarspanError
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.summaries import Plotted

CONSTANT = 1e9  # a coordinate this large dominates the norm, so that RMSNorm divides by a constant
POSITION = 3  # the coordinate of the hidden state that holds t/N after the first layer
ROWS = 256  # rows of scores in memory at once
RIDGE = 1e-2  # of `read_positions`
BATCH = 4  # texts whose hidden states are in memory at once


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """A score as a function of distance, and how q·k computes it from the two positions.

    The features are functions of t = 1 … N that the first layer writes; the first one is t/N.
    """

    name: str
    expected: Callable[[np.ndarray], np.ndarray]  # distance t − i -> score
    features: np.ndarray  # [F, N]
    query: np.ndarray  # [D, 1 + F]: the query as a linear map of 1 and the features
    key: np.ndarray  # [D, 1 + F]

    @property
    def length(self) -> int:
        return self.features.shape[1]


def linear(length: int, slope: float) -> AttentionRule:
    """−slope · (t − i), as in ALiBi."""
    u = np.arange(1, length + 1)[None] / length
    scale = slope * length
    return AttentionRule(
        "linear",
        lambda distance: -slope * distance,
        u,
        _rows([0, -scale], [scale, 0]),
        _rows([1, 0], [0, 1]),
    )


def look_back(length: int, steps: int, sharpness: float) -> AttentionRule:
    """−sharpness · (t − i − steps)²: the token `steps` back has the highest score."""
    u = np.arange(1, length + 1) / length
    m, c = steps / length, sharpness * length**2
    query = _rows([-c * m**2, 2 * c * m, -c], [-2 * c * m, 2 * c, 0], [-c, 0, 0])  # of 1, u, u²
    key = _rows([1, 0, 0], [0, 1, 0], [0, 0, 1])
    return AttentionRule(
        "look back",
        lambda distance: -sharpness * (distance - steps) ** 2,
        np.stack([u, u**2]),
        query,
        key,
    )


def _rows(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=float)


def breakpoints(values: np.ndarray) -> np.ndarray:
    """The weights c_k of values(t) = values(1) + Σ_{k<t} c_k · max(0, 1/k − 1/t), at t = 1 … N.

    Values are [F, N]. A piecewise linear function has one slope between 1/(k+1) and 1/k; c_k is the
    change of slope at 1/k. For values(t) = t it is 2k, for t² it is 6k².
    """
    k = np.arange(1, values.shape[-1])
    slopes = np.diff(values) * k * (k + 1)
    return np.diff(slopes, prepend=0)


def construct(rule: AttentionRule, num_words: int = 8, match: float = 1.0) -> FarspanForCausalLM:
    """A two-layer model without position encoding that attends by distance.

    Its second layer scores token i for token t by match · [same word] + rule(t − i), in every text
    no longer than the rule. Token 0 begins a text; tokens 1 … words are its words, and the logits
    are the attention that the second layer gives to each word. It is an ordinary farspan model in
    float64, norms included: only its weights are constructed.
    """
    functions, length = rule.features.shape
    word_start = POSITION + functions
    attended = slice(
        word_start + num_words, word_start + 2 * num_words
    )  # what the second layer writes
    config = FarspanConfig(
        vocab_size=1 + num_words,
        hidden_size=attended.stop,
        intermediate_size=length,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=len(rule.query) + num_words,
        max_position_embeddings=length,
        position="none",
        base_scale=1.0,
        mlp="relu",
        tie_word_embeddings=False,
    )
    model = FarspanForCausalLM(config).double().eval()
    columns = _Columns(
        constant=0,
        begin=1,
        inverse=2,
        feature=slice(POSITION, word_start),
        word=slice(word_start, word_start + num_words),
        attended=attended,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        _write_embeddings(model, columns, num_words)
        _write_first_layer(model.model.layers[0], columns, rule)
        _write_second_layer(model.model.layers[1], columns, rule, num_words, match)
        model.lm_head.weight[1:, attended] = torch.eye(num_words, dtype=torch.float64)
    return model


@dataclass(frozen=True)
class _Columns:
    """What the coordinates of the hidden state hold."""

    constant: int
    begin: int  # 1 for the begin token
    inverse: int  # 1/t after the first attention
    feature: slice  # the rule's features after the first MLP
    word: slice  # one-hot word
    attended: slice  # the attention that the second layer gives to each word


def _write_embeddings(model: FarspanForCausalLM, columns: _Columns, num_words: int) -> None:
    """The embeddings, and norms that undo the division by the constant coordinate."""
    width = model.config.hidden_size
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)):
        norm.weight.fill_(CONSTANT / width**0.5)
        norm.weight[columns.constant] = width**-0.5  # 1 after the norm: it replaces biases
    embedding = model.model.embed_tokens.weight
    embedding[:, columns.constant] = CONSTANT
    embedding[0, columns.begin] = 1
    embedding[1:, columns.word] = torch.eye(num_words, dtype=torch.float64)


def _write_first_layer(layer: Any, columns: _Columns, rule: AttentionRule) -> None:
    # With q = k = 0 attention is the mean over all tokens up to t, so the begin token adds 1/t.
    layer.self_attn.v_proj.weight[0, columns.begin] = 1
    layer.self_attn.o_proj.weight[columns.inverse, 0] = 1
    mlp, k = layer.mlp, torch.arange(1, rule.length, dtype=torch.float64)
    mlp.up_proj.weight[:-1, columns.constant] = 1 / k
    mlp.up_proj.weight[:-1, columns.inverse] = -1
    mlp.up_proj.weight[-1, columns.constant] = 1
    slopes = np.hstack([breakpoints(rule.features), rule.features[:, :1]])
    mlp.down_proj.weight[columns.feature] = torch.from_numpy(slopes)


def _write_second_layer(
    layer: Any, columns: _Columns, rule: AttentionRule, num_words: int, match: float
) -> None:
    attention, size = layer.self_attn, len(rule.query)
    identity = torch.eye(num_words, dtype=torch.float64)
    for projection, table in ((attention.q_proj, rule.query), (attention.k_proj, rule.key)):
        projection.weight[:size, columns.constant] = torch.from_numpy(table[:, 0])
        projection.weight[:size, columns.feature] = torch.from_numpy(table[:, 1:])
        projection.weight[size:, columns.word] = identity
    attention.q_proj.weight[size:] *= match
    attention.v_proj.weight[size:, columns.word] = identity
    attention.o_proj.weight[columns.attended, size:] = identity


@dataclass(frozen=True, eq=False)
class TheoremProof:
    """What a constructed model computes, and its largest errors."""

    rule: str
    positions: np.ndarray  # [T] as computed by the first layer; they should be 1 … T
    position_error: float
    scores: np.ndarray  # [T] of the last token by distance 0 … T − 1, without the word term
    expected: np.ndarray  # [T]
    score_error: float  # over all pairs of tokens


@dataclass(frozen=True, eq=False, repr=False)
class PositionAnalysis(Plotted):
    """Kazemnejad 2023's theorems proven by construction, and positions read from trained models."""

    proofs: list[TheoremProof]
    readings: dict[str, list[PositionReadout]]  # for each model, after each layer

    def to_json(self) -> dict[str, Any]:
        errors = ("rule", "position_error", "score_error")
        return {
            "proofs": [{name: getattr(proof, name) for name in errors} for proof in self.proofs],
            "readings": {
                name: [{"r2": readout.r2, "error": readout.error} for readout in readouts]
                for name, readouts in self.readings.items()
            },
        }


@torch.no_grad()
def prove(
    rule: AttentionRule,
    length: int | None = None,
    *,
    num_words: int = 8,
    match: float = 1.0,
    seed: int = 0,
) -> TheoremProof:
    """Run the constructed model on random words and check every position and every score.

    >>> prove(linear(4096, slope=0.5)).score_error < 1e-3
    True
    """
    length = length or rule.length
    model = construct(rule, num_words, match)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 1 + num_words, (1, length), generator=draw)
    ids[0, 0] = 0
    calls: dict[int, seam.Call] = {}
    with seam.observing(model, lambda call: calls.update({call.layer: call})):
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    positions = states[1][0, :, POSITION].numpy() * rule.length
    q, k = (side[0, 0] * calls[1].scaling ** 0.5 for side in (calls[1].q, calls[1].k))
    same = torch.nn.functional.one_hot(ids[0], 1 + num_words)[:, 1:].double()
    index, error, last = np.arange(length), 0.0, np.empty(0)

    def check_rows(start: int, stop: int) -> None:
        nonlocal error, last
        scores = (q[start:stop] @ k.T - match * same[start:stop] @ same.T).numpy()
        distance = index[start:stop, None] - index
        errors = np.abs(scores - rule.expected(distance.clip(0)))
        error = max(error, float(errors[distance >= 0].max()))
        last = scores[-1, ::-1]

    run_in_batches(length, ROWS, check_rows)
    return TheoremProof(
        rule=rule.name,
        positions=positions,
        position_error=float(np.abs(positions - index - 1).max()),
        scores=last,
        expected=rule.expected(index),
        score_error=error,
    )


@dataclass(frozen=True)
class PositionReadout:
    """How well a token's position can be predicted from the hidden state after a layer."""

    layer: int  # 0: the embeddings; the last layer is read after the final norm
    r2: float  # on held-out texts; below 0: worse than always predicting the middle
    error: float  # mean absolute error in tokens


@torch.no_grad()
def read_positions(model: PreTrainedModel, ids: Tensor) -> list[PositionReadout]:
    """Ridge regression of the position on the hidden states after each layer of any model.

    It is fitted to the first half of the rows of ids [B, T] and scored on the other half. The ridge
    is a fraction of each coordinate's variance.
    """
    half, length = len(ids) // 2, ids.shape[1]
    if not half:
        raise FarspanError(
            "reading positions needs at least two texts, one to fit and one to score; add text"
        )
    positions = torch.arange(1, length + 1, dtype=torch.float64)
    sums: dict[int, Tensor] = {}

    def states(start: int, stop: int) -> list[Tensor]:
        """The hidden states, a constant 1 and the position, [n, d + 2] for each layer."""
        rows = ids[start:stop].to(model.device)
        output = model(input_ids=rows, output_hidden_states=True, use_cache=False)
        extra = torch.stack([torch.ones_like(positions), positions], 1).repeat(len(rows), 1)
        return [
            torch.cat([hidden.flatten(0, 1).double().cpu(), extra], 1)
            for hidden in output.hidden_states
        ]

    def gather(start: int, stop: int) -> None:
        for layer, features in enumerate(states(start, stop)):
            sums[layer] = sums.get(layer, 0) + features.T @ features

    run_in_batches(half, BATCH, gather)
    weights = {layer: _ridge(total, RIDGE) for layer, total in sums.items()}
    squared, absolute = dict.fromkeys(sums, 0.0), dict.fromkeys(sums, 0.0)

    def score(start: int, stop: int) -> None:
        for layer, features in enumerate(states(half + start, half + stop)):
            errors = features[:, :-1] @ weights[layer] - features[:, -1]
            squared[layer] += float(errors.square().sum())
            absolute[layer] += float(errors.abs().sum())

    run_in_batches(len(ids) - half, BATCH, score)
    count = (len(ids) - half) * length
    spread = float(positions.var(correction=0)) * count
    return [
        PositionReadout(layer, 1 - squared[layer] / spread, absolute[layer] / count)
        for layer in sums
    ]


def _ridge(total: Tensor, ridge: float) -> Tensor:
    """Weights and intercept of a ridge regression from sums of products of inputs, 1 and output."""
    inputs, output = slice(0, -2), -1
    count = total[-2, -2]
    mean, level = total[inputs, -2] / count, total[output, -2] / count
    covariance = total[inputs, inputs] / count - torch.outer(mean, mean)
    # A constant coordinate gets no weight: its computed variance is rounding error, which grows
    # with its mean.
    penalty = ridge * covariance.diagonal().clamp(min=0) + 1e-12 * (1 + mean.square())
    slope = torch.linalg.solve(
        covariance + penalty.diag(), total[inputs, output] / count - mean * level
    )
    return torch.cat([slope, (level - mean @ slope)[None]])
