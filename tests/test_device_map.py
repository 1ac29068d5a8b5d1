"""Models that one device does not hold: results equal those of the plain load, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import farspan
from farspan.attention.patch import Patch, fingerprint
from farspan.cli import app
from farspan.device_map import is_placed
from farspan.diagnosis.curves import nonfinite_weight
from farspan.errors import FarspanError
from test_extend import FEW, SEARCHED, _no_figures, tiny  # noqa: F401

PARTS = ("embed_tokens", "norm", "rotary_emb", "dropout", "positions", "layers.0")
ON_DISK = {f"model.{part}": "cpu" for part in PARTS} | {"model.layers.1": "disk", "lm_head": "disk"}


@pytest.fixture(scope="module")
def llama(tiny, tmp_path_factory):  # noqa: F811
    """A family of transformers, whose head is on the disk too."""
    folder = tmp_path_factory.mktemp("llama")
    shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=300)
    torch.manual_seed(0)
    config = LlamaConfig(**shape, num_hidden_layers=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    farspan.load(tiny / "rope").tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def maps(monkeypatch):
    """The device maps of all models that were loaded."""
    noted = []
    load = PreTrainedModel.from_pretrained.__func__

    def noting(cls, *args, **options):
        noted.append(options.get("device_map"))
        return load(cls, *args, **options)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(noting))
    return noted


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(40)[None]).logits


def test_weights_on_the_disk_are_read_for_each_pass(llama):
    plain, placed = (farspan.load(llama, device_map=each).model for each in (None, ON_DISK))
    assert is_placed(placed)
    assert not is_placed(plain)
    assert not is_placed(farspan.load(llama, device_map={"": "cpu"}).model)
    outside = {name for name, weight in placed.named_parameters() if weight.is_meta}
    names = {name for name, _ in plain.named_parameters()}
    assert outside == {name for name in names if name.startswith(("model.layers.1.", "lm_head"))}
    assert torch.equal(logits(placed), logits(plain))
    assert fingerprint(placed) == fingerprint(plain)
    assert {name for name, weight in placed.named_parameters() if weight.is_meta} == outside


def test_new_weights_outside_memory_are_refused_before_anything_changes(llama):
    plain, placed = (farspan.load(llama, device_map=each).model for each in (None, ON_DISK))
    first, norm = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
    weights = {name: 2 * dict(plain.named_parameters())[name].detach() for name in (norm, first)}
    linear = {"rope_type": "linear", "factor": 4.0}
    patch = Patch("test", fingerprint(plain), 128, 64, rope=linear, weights=weights)
    before = logits(placed)
    with pytest.raises(FarspanError, match=f"replaces 1 weights .* outside memory, first {first};"):
        patch.apply(placed)
    assert torch.equal(logits(placed), before)
    inside = replace(patch, weights={norm: weights[norm]})
    assert torch.equal(logits(inside.apply(placed)), logits(inside.apply(plain)))
    assert not torch.equal(logits(placed), before)


def test_a_weight_on_the_disk_that_is_not_finite_is_named(llama, tmp_path):
    model = farspan.load(llama).model
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    placed = farspan.load(tmp_path, device_map=ON_DISK).model
    assert nonfinite_weight(placed) == "model.layers.1.mlp.down_proj.weight"


def test_diagnose(tiny, llama, maps):  # noqa: F811
    options = dict(data=tiny / "text.txt", lengths=[128], windows=2, scales=[1.0, 1.2])
    plain = farspan.diagnose(llama, **options)
    placed = farspan.diagnose(llama, device_map=ON_DISK, **options)
    assert maps == [None, ON_DISK]
    for one, other in zip(plain, placed, strict=True):
        assert np.array_equal(one.curves.loss, other.curves.loss)
        assert all(np.array_equal(one.curves.heads[n], other.curves.heads[n]) for n in (0, 1))


@torch.no_grad()
def test_an_object_with_layers_on_the_disk_stays_there(tiny, llama):  # noqa: F811
    placed, tokenizer = farspan.load(llama, device_map=ON_DISK)
    options = dict(data=tiny / "text.txt", lengths=[128], windows=2)
    (expected,) = farspan.diagnose(llama, **options)
    (measured,) = farspan.diagnose((placed, tokenizer), **options)
    assert np.array_equal(measured.curves.loss, expected.curves.loss)
    with pytest.raises(
        FarspanError, match="a device map keeps 10 of this LlamaForCausalLM outside"
    ):
        farspan.inspect(placed)
    with pytest.raises(FarspanError, match="in torch.float32; load it with dtype=torch.bfloat16"):
        farspan.load(placed, dtype=torch.bfloat16)


@pytest.mark.long
def test_evaluate(tiny, llama, tmp_path, maps):  # noqa: F811
    options = dict(lengths="64,128", data=str(tiny / "text.txt"), windows=2)
    plain = farspan.evaluate(llama, "perplexity", tmp_path / "plain", **options)
    options["device_map"] = ON_DISK
    placed = farspan.evaluate(llama, "perplexity", tmp_path / "placed", **options)
    assert [score.value for score in placed.scores] == [score.value for score in plain.scores]
    assert maps == [None, ON_DISK]
    folders = [tmp_path / name / "cells" for name in ("plain", "placed")]
    cells = [{path.name for path in folder.iterdir()} for folder in folders]
    assert cells[0] == cells[1], "equal weights have equal keys"


@pytest.mark.long
def test_extend(tiny, llama, tmp_path, maps):  # noqa: F811
    """Rotation is rebuilt, and gradients of scales go through layers on the disk."""
    options = dict(method="yarn+headscale", data=tiny / "text.txt", recipe=SEARCHED)
    plain = farspan.extend(llama, 128, tmp_path / "plain", **options)
    placed = farspan.extend(llama, 128, tmp_path / "placed", device_map=ON_DISK, **options)
    assert maps == [None, None, ON_DISK, ON_DISK], "the patch is proven on a fresh model"
    assert torch.equal(placed.patch.scales.base, plain.patch.scales.base)
    assert not torch.equal(plain.patch.scales.base, torch.ones_like(plain.patch.scales.base))
    assert (placed.before, placed.after) == (plain.before, plain.after)
    patched = [farspan.load(tmp_path / "plain", device_map=each).model for each in (None, ON_DISK)]
    assert torch.equal(logits(patched[0]), logits(patched[1]))


@pytest.mark.parametrize(
    "command",
    [
        "diagnose MODEL --lengths 128 --windows 1",
        "eval MODEL --suite perplexity --lengths 64 --windows 1",
        "extend MODEL --to 128 --method yarn passkeys=0 choose_windows=1 report_windows=1",
    ],
)
def test_commands_have_the_option_of_transformers(tiny, tmp_path, maps, command):  # noqa: F811
    words = [str(tiny / "rope") if word == "MODEL" else word for word in command.split()]
    words += ["--data", str(tiny / "text.txt"), "--device-map", "auto", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert set(maps) == {"auto"}


def test_maps_that_cannot_be_used_are_refused(tiny, llama, tmp_path, monkeypatch):  # noqa: F811
    with pytest.raises(FarspanError, match="the device is 'cpu' and the device map 'auto'; give"):
        farspan.load(llama, device="cpu", device_map="auto")
    with pytest.raises(FarspanError, match="'much' is unknown; choose one of auto, balanced"):
        farspan.evaluate(llama, device_map="much")
    with pytest.raises(FarspanError, match="no memory for the embeddings of .*; give a map that"):
        farspan.load(llama, device_map={**ON_DISK, "model.embed_tokens": "disk"})
    with pytest.raises(FarspanError, match="a model object is on its devices already"):
        farspan.diagnose(farspan.load(llama), lengths=[128], device_map="auto")
    with pytest.raises(FarspanError, match="is dequantized in memory"):
        farspan.load("model.gguf", device_map="auto")
    for method, recipe in (("swan", FEW), ("yarn", replace(FEW, tune="fair"))):
        with pytest.raises(FarspanError, match="trains weights, which a device map may keep on"):
            farspan.extend(
                tiny / "rope", 128, tmp_path / "p", method, recipe=recipe, device_map="auto"
            )
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FarspanError, match="torchrun started 2; remove torchrun"):
        farspan.load(llama, device_map="auto")
