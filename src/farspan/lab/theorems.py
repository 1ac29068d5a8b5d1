"""Why a causal model needs no position encoding: paper B's two theorems as weights written down, in our own model.

1. One layer finds where a token stands. All keys are equal, so position t attends to each of t tokens alike, and the
   begin token's mark arrives as 1/t. A ReLU layer with a knee at every 1/k turns that into any function of t, exactly.
2. The next layer scores by distance. From functions of t in the query and of i in the key, q·k can make a line, a
   parabola, or with enough width any function of t − i, beside what the tokens themselves have to do with each other.

And the reverse: what a trained model wrote of positions into its layers is read by regression, and without the causal
mask there is nothing to read, for then the order of tokens changes nothing but the order of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention import seam
from farspan.errors import FarspanError
from farspan.memory import in_pieces
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.model.config import FULL

STILL = 1e9  # one coordinate so much larger than all others that it alone makes the norm: RMSNorm becomes a constant
PLACE = 3  # the coordinate of the hidden state that holds t/N after the first layer
ROWS = 256  # of scores, held at once


@dataclass(frozen=True, eq=False)
class Rule:
    """A function of distance, and how q·k makes it of functions of the two positions."""

    name: str
    wanted: Callable[[np.ndarray], np.ndarray]  # distance t − i -> score
    features: np.ndarray  # [F, N]: functions of t = 1 … N that the first layer writes; the first of them is t/N
    query: np.ndarray  # [D, 1 + F]: what the query makes of 1 and the features
    key: np.ndarray  # [D, 1 + F]

    @property
    def length(self) -> int:
        return self.features.shape[1]


def linear(length: int, slope: float) -> Rule:
    """−slope · (t − i), as ALiBi has it."""
    u = np.arange(1, length + 1)[None] / length
    scale = slope * length
    return Rule("linear", lambda distance: -slope * distance, u, _rows([0, -scale], [scale, 0]), _rows([1, 0], [0, 1]))


def look_back(length: int, steps: int, sharpness: float) -> Rule:
    """−sharpness · (t − i − steps)²: the highest score has the token so many steps back."""
    u = np.arange(1, length + 1) / length
    m, c = steps / length, sharpness * length**2
    query = _rows([-c * m**2, 2 * c * m, -c], [-2 * c * m, 2 * c, 0], [-c, 0, 0])  # of 1, u, u²
    key = _rows([1, 0, 0], [0, 1, 0], [0, 0, 1])
    return Rule("look back", lambda distance: -sharpness * (distance - steps) ** 2, np.stack([u, u**2]), query, key)


def any_function(values: np.ndarray) -> Rule:
    """values[t − i], whatever they are: a Fourier series, as wide as the function is long."""
    length = len(values)
    waves = np.fft.rfft(values) / length
    weight = np.full(len(waves), 2.0)
    weight[0] = 1
    if length % 2 == 0:
        weight[-1] = 1
    a, b = weight * waves.real, -weight * waves.imag  # values[d] = Σ a cos(ωd) + b sin(ωd)
    angle = 2 * np.pi / length * np.outer(np.arange(len(waves)), np.arange(1, length + 1))
    none, one = np.zeros((len(waves), 2)), np.eye(len(waves))
    query = np.block([[none, np.diag(a), np.diag(b)], [none, -np.diag(b), np.diag(a)]])  # a C + b S, a S − b C
    key = np.block([[none, one, 0 * one], [none, 0 * one, one]])  # C, S
    features = np.concatenate([np.arange(1, length + 1)[None] / length, np.cos(angle), np.sin(angle)])
    return Rule("any function", lambda distance: values[distance], features, query, key)


def _rows(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=float)


def knees(values: np.ndarray) -> np.ndarray:
    """The weights c_k with values(t) = values(1) + Σ_{k<t} c_k · max(0, 1/k − 1/t), for values [F, N] at t = 1 … N.

    Between 1/(k+1) and 1/k a broken line has one slope; c_k is by how much it changes at 1/k. For values(t) = t it is
    2k, for t² it is 6k².
    """
    k = np.arange(1, values.shape[-1])
    slopes = np.diff(values) * k * (k + 1)
    return np.diff(slopes, prepend=0)


def construct(rule: Rule, words: int = 8, match: float = 1.0) -> FarspanForCausalLM:
    """A model of two layers, without positions, whose second layer scores token i for token t by
    match · [same word] + rule(t − i), in every text that is no longer than the rule.

    Token 0 begins a text; tokens 1 … words are its words, and the logits are the shares in which the second layer
    attends to each of them. It is an ordinary farspan model in float64, norms and all: only its weights were written.
    """
    functions, length = rule.features.shape
    still, begin, inverse = range(PLACE)
    feature = slice(PLACE, PLACE + functions)
    word = slice(feature.stop, feature.stop + words)
    found = slice(word.stop, word.stop + words)  # the words that the second layer attended to
    config = FarspanConfig(
        vocab_size=1 + words,
        hidden_size=found.stop,
        intermediate_size=length,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=len(rule.query) + words,
        max_position_embeddings=length,
        position="none",
        base_scale=1.0,
        mlp="relu",
        tie_word_embeddings=False,
    )
    model = FarspanForCausalLM(config).double().eval()
    first, second = model.model.layers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)):
            norm.weight.fill_(STILL / config.hidden_size**0.5)
            norm.weight[still] = config.hidden_size**-0.5  # 1 afterwards: what takes the place of biases
        embedding = model.model.embed_tokens.weight
        embedding[:, still] = STILL
        embedding[0, begin] = 1
        embedding[1:, word] = torch.eye(words, dtype=torch.float64)

        first.self_attn.v_proj.weight[0, begin] = 1  # q and k are zero: the mean over all tokens so far is 1/t
        first.self_attn.o_proj.weight[inverse, 0] = 1
        mlp, k = first.mlp, torch.arange(1, length, dtype=torch.float64)
        mlp.up_proj.weight[:-1, still] = 1 / k
        mlp.up_proj.weight[:-1, inverse] = -1
        mlp.up_proj.weight[-1, still] = 1
        mlp.down_proj.weight[feature] = torch.from_numpy(np.hstack([knees(rule.features), rule.features[:, :1]]))

        attention, size = second.self_attn, len(rule.query)
        for projection, table in ((attention.q_proj, rule.query), (attention.k_proj, rule.key)):
            projection.weight[:size, still] = torch.from_numpy(table[:, 0])
            projection.weight[:size, feature] = torch.from_numpy(table[:, 1:])
            projection.weight[size:, word] = torch.eye(words, dtype=torch.float64)
        attention.q_proj.weight[size:] *= match
        attention.v_proj.weight[size:, word] = torch.eye(words, dtype=torch.float64)
        attention.o_proj.weight[found, size:] = torch.eye(words, dtype=torch.float64)
        model.lm_head.weight[1:, found] = torch.eye(words, dtype=torch.float64)
    return model


@dataclass(frozen=True, eq=False)
class Proof:
    """What a constructed model does, beside what it was made to do."""

    rule: str
    positions: np.ndarray  # [T] as the first layer wrote them; they should be 1 … T
    position_error: float  # the largest
    scores: np.ndarray  # [T] the last token's scores by distance 0 … T − 1, less what the words add
    wanted: np.ndarray  # [T]
    score_error: float  # the largest, over all pairs of tokens


@torch.no_grad()
def prove(rule: Rule, length: int | None = None, *, words: int = 8, match: float = 1.0, seed: int = 0) -> Proof:
    """Run the constructed model over random words and compare every position and every score of its second layer.

    >>> prove(linear(4096, slope=0.5)).score_error < 1e-3
    True
    """
    length = length or rule.length
    model = construct(rule, words, match)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 1 + words, (1, length), generator=draw)
    ids[0, 0] = 0
    calls: dict[int, seam.Call] = {}
    with seam.observing(model, lambda call: calls.update({call.layer: call})):
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    positions = states[1][0, :, PLACE].numpy() * rule.length
    q, k = (side[0, 0] * calls[1].scaling ** 0.5 for side in (calls[1].q, calls[1].k))
    same = torch.nn.functional.one_hot(ids[0], 1 + words)[:, 1:].double()
    place, error, last = np.arange(length), 0.0, np.empty(0)

    def some_rows(start: int, stop: int) -> None:
        nonlocal error, last
        scores = (q[start:stop] @ k.T - match * same[start:stop] @ same.T).numpy()
        distance = place[start:stop, None] - place
        seen = distance >= 0
        error = max(error, float(np.abs(scores - rule.wanted(distance.clip(0)))[seen].max()))
        last = scores[-1, ::-1]

    in_pieces(length, ROWS, some_rows)
    return Proof(
        rule=rule.name,
        positions=positions,
        position_error=float(np.abs(positions - place - 1).max()),
        scores=last,
        wanted=rule.wanted(place),
        score_error=error,
    )


@torch.no_grad()
def moved_by_order(model: FarspanForCausalLM, ids: Tensor, order: Tensor, causal: bool) -> float:
    """How far the hidden states of ids [B, T] move when the tokens change places and the states are put back, relative
    to the largest of them. Without a causal mask and without positions it is 0, but for rounding."""
    shown = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
    mask = None if causal else {FULL: shown}
    before, after = (
        model.model(input_ids=each, attention_mask=mask, use_cache=False).last_hidden_state
        for each in (ids, ids[:, order])
    )
    return float((after - before[:, order]).abs().max() / before.abs().max())


@dataclass(frozen=True)
class Reading:
    """How well the position of a token can be read from the hidden state after a layer, on texts not fitted to."""

    layer: int  # 0: the embeddings; the last is seen after the final norm
    r2: float  # below 0: worse than always guessing the middle
    error: float  # mean, in tokens


@torch.no_grad()
def read_positions(model: PreTrainedModel, ids: Tensor, *, ridge: float = 1e-2, batch: int = 4) -> list[Reading]:
    """Ridge regression of the position on the hidden states after each layer of any Hugging Face model.

    Fitted to the first half of the rows of ids [B, T] and scored on the other half. The ridge is a share of each
    coordinate's variance.
    """
    half, length = len(ids) // 2, ids.shape[1]
    if not half:
        raise FarspanError("reading positions takes two texts, one to fit and one to score; give more text")
    places = torch.arange(1, length + 1, dtype=torch.float64)
    sums: dict[int, Tensor] = {}

    def states(start: int, stop: int) -> list[Tensor]:
        """With a one for the constant and the position beside them, [n, d + 2] for each layer."""
        rows = ids[start:stop].to(model.device)
        output = model(input_ids=rows, output_hidden_states=True, use_cache=False)
        beside = torch.stack([torch.ones_like(places), places], 1).repeat(len(rows), 1)
        return [torch.cat([each.flatten(0, 1).double().cpu(), beside], 1) for each in output.hidden_states]

    def gather(start: int, stop: int) -> None:
        for layer, found in enumerate(states(start, stop)):
            sums[layer] = sums.get(layer, 0) + found.T @ found

    in_pieces(half, batch, gather)
    weights = {layer: _ridge(total, ridge) for layer, total in sums.items()}
    squared, absolute = dict.fromkeys(sums, 0.0), dict.fromkeys(sums, 0.0)

    def score(start: int, stop: int) -> None:
        for layer, found in enumerate(states(half + start, half + stop)):
            missed = found[:, :-1] @ weights[layer] - found[:, -1]
            squared[layer] += float(missed.square().sum())
            absolute[layer] += float(missed.abs().sum())

    in_pieces(len(ids) - half, batch, score)
    count = (len(ids) - half) * length
    spread = float(places.var(correction=0)) * count
    return [Reading(layer, 1 - squared[layer] / spread, absolute[layer] / count) for layer in sums]


def _ridge(total: Tensor, ridge: float) -> Tensor:
    """Weights and constant of a ridge regression, from the sums of products of inputs, a one and the output."""
    inputs, output = slice(0, -2), -1
    count = total[-2, -2]
    mean, level = total[inputs, -2] / count, total[output, -2] / count
    covariance = total[inputs, inputs] / count - torch.outer(mean, mean)
    # A coordinate that never moves gets no weight: what is left of its variance is rounding, and grows with its mean.
    penalty = ridge * covariance.diagonal().clamp(min=0) + 1e-12 * (1 + mean.square())
    slope = torch.linalg.solve(covariance + penalty.diag(), total[inputs, output] / count - mean * level)
    return torch.cat([slope, (level - mean @ slope)[None]])
