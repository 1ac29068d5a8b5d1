"""Models of none and rope layers become stock transformers models with the same logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, SmolLM3ForCausalLM

import farspan
from families import SHAPE, tokens
from farspan.attention import seam
from farspan.errors import FarspanError, ProofError
from farspan.formats import stock as stock_module
from farspan.formats.stock import to_stock
from farspan.model import FarspanConfig, FarspanForCausalLM

MIXTURES = [
    "none",
    "rope",
    "rope/8",
    "none/8",
    ["rope", "rope", "rope", "none"],
    ["rope/8", "rope/8", "rope/8", "none"],
    ["none/8", "rope"],
]


def build(position, **extra) -> FarspanForCausalLM:
    model = FarspanForCausalLM(FarspanConfig(**{**SHAPE, "position": position, **extra})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("position", MIXTURES, ids=str)
@torch.no_grad()
def test_every_mixture_has_an_equal_stock_model(position):
    model = build(position)
    stock = to_stock(model)
    assert type(stock) is (LlamaForCausalLM if position == "rope" else SmolLM3ForCausalLM)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(stock.config, token) == getattr(model.config, token)
    assert (stock(tokens(40)).logits - model(tokens(40)).logits).abs().max() < 1e-5


@pytest.mark.parametrize("base_scale", [1.0, 2 / SHAPE["head_dim"] ** 0.5])
@torch.no_grad()
def test_base_scale_is_folded_into_the_queries(base_scale):
    model = build("none", base_scale=base_scale)
    stock = to_stock(model)
    assert (stock(tokens()).logits - model(tokens()).logits).abs().max() < 1e-5


def test_a_stock_model_ends_texts_where_the_model_does():
    """A chat model may have a second end token, which its config does not name."""
    model = build("rope")
    model.generation_config.eos_token_id = [2, 5]
    stock = to_stock(model)
    assert stock.generation_config.eos_token_id == [2, 5]
    assert stock.generation_config is not model.generation_config


@torch.no_grad()
def test_saved_checkpoint_is_read_by_transformers_alone(tmp_path):
    """tests/test_export.py reads one in a process that cannot import farspan."""
    model = build(["rope/8", "rope/8", "rope/8", "none"])
    to_stock(model).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock) is SmolLM3ForCausalLM
    assert (stock(tokens()).logits - model(tokens()).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("message", "position", "extra"),
    [
        ("no stock family has alibi", "alibi", {}),
        ("no stock family has t5", ["none", "t5"], {}),
        ("no stock family has learned", "learned", {}),
        ("relu mlp", "none", {"mlp": "relu"}),
        ("rotates 0.25 of each", "rope", {"rotary_fraction": 0.25}),
    ],
)
def test_refuses_models_that_stock_cannot_express(message: str, position, extra, tmp_path):
    build(position, **extra).save_pretrained(tmp_path / "model")
    with pytest.raises(FarspanError, match=message):
        farspan.export(tmp_path / "model", tmp_path / "stock", "stock")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_refuses_models_on_the_seam():
    with pytest.raises(FarspanError, match="on the seam"):
        to_stock(seam.install(build("none")))


def test_failed_stock_proof_writes_nothing(tmp_path, monkeypatch):
    build("none").save_pretrained(tmp_path / "model")
    # The config of an exporter that forgot `no_rope_layers`.
    wrong = stock_module.stock_config(build("rope").config)
    monkeypatch.setattr(stock_module, "stock_config", lambda config: wrong)
    with pytest.raises(ProofError, match="differs from the farspan model"):
        farspan.export(tmp_path / "model", tmp_path / "stock", "stock")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_that_rounding_to_bf16_would_hide_is_refused(tmp_path, monkeypatch):
    model = build("rope")
    model.save_pretrained(tmp_path / "model")
    wrong = stock_module.stock_config(model.config)
    wrong.rope_parameters["rope_theta"] *= 1.001
    monkeypatch.setattr(stock_module, "stock_config", lambda config: wrong)
    with pytest.raises(ProofError, match="differs from the farspan model"):
        farspan.export(tmp_path / "model", tmp_path / "stock", "stock", dtype="bfloat16")
