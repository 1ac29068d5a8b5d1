"""Our none/rope models run in stock transformers, in a process that cannot import farspan."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM, SmolLM3ForCausalLM

from families import SHAPE, tokens
from farspan.attention import seam
from farspan.errors import FarspanError, ProofError
from farspan.formats import stock as stocks
from farspan.formats.stock import save_stock, to_stock
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
def test_every_mixture_has_a_stock_twin(position):
    model = build(position)
    stock, proof = to_stock(model)
    assert type(stock) is (LlamaForCausalLM if position == "rope" else SmolLM3ForCausalLM)
    assert proof.holds
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(stock.config, token) == getattr(model.config, token)
    assert (stock(tokens(40)).logits - model(tokens(40)).logits).abs().max() < 1e-5


@torch.no_grad()
def test_an_unusual_base_scale_goes_into_the_queries():
    model = build("none", base_scale=1.0)
    stock, _ = to_stock(model)
    assert (stock(tokens()).logits - model(tokens()).logits).abs().max() < 1e-5


def test_a_process_without_farspan_gives_the_same_logits(tmp_path):
    model = build(["rope/8", "rope/8", "rope/8", "none"])
    save_stock(model, tmp_path / "stock")
    torch.save(tokens(), tmp_path / "ids.pt")
    script = f"""
import sys
sys.modules["farspan"] = None  # any import of it now fails
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "stock")!r})
with torch.no_grad():
    torch.save(model(torch.load({str(tmp_path / "ids.pt")!r})).logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (torch.load(tmp_path / "logits.pt") - model(tokens()).logits).abs().max() < 1e-5


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
def test_what_stock_cannot_express_is_refused(message: str, position, extra, tmp_path):
    with pytest.raises(FarspanError, match=message):
        save_stock(build(position, **extra), tmp_path / "stock")
    assert list(tmp_path.iterdir()) == []


def test_live_scales_and_failed_proofs_write_nothing(tmp_path, monkeypatch):
    model = build("none")
    seam.install(model)
    with pytest.raises(FarspanError, match="on the seam"):
        save_stock(model, tmp_path / "stock")
    seam.uninstall(model)
    # What an exporter that forgot `no_rope_layers` would write.
    wrong = stocks.stock_config(build("rope").config)
    monkeypatch.setattr(stocks, "stock_config", lambda config: wrong)
    with pytest.raises(ProofError, match="differs from ours"):
        save_stock(model, tmp_path / "stock")
    assert list(tmp_path.iterdir()) == []
