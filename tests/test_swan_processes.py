"""Weights that several processes train are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from families import SHAPE
from farspan.methods import long_windows as long_windows_module
from farspan.methods.rope import fit_rope
from farspan.methods.swan import swan
from farspan.train.sharding import text_reaches_all
from swan_models import BY_NAME, EVEN, QUICK, SETTINGS, TARGET, build, job_for
from test_train import in_processes


def of_text_and_images() -> PreTrainedModel:
    """A model with a vision tower, which no text reaches."""
    text = {**SHAPE, "sliding_window": 8, "query_pre_attn_scalar": 8}
    text["layer_types"] = ["sliding_attention", "full_attention"] * 2
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    tokens = {"image_token_index": 100, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = hf.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    return hf.Gemma3ForConditionalGeneration(config).eval()


def test_text_reaches_all_weights_but_those_of_a_vision_tower():
    for model, expected in ((build("llama-tied"), True), (of_text_and_images(), False)):
        assert text_reaches_all(model) == expected
        assert all(weight.grad is None for weight in model.parameters())
    mixture = BY_NAME["mixtral"].build()
    mixture.model.norm.requires_grad_(False)
    assert text_reaches_all(mixture), "all that are trained"


def check_that_two_processes_train(weights, tmp_path) -> dict[str, torch.Tensor]:
    """Compare what `weights()` returns here and in two processes."""
    expected = weights()

    def save(rank: int) -> None:
        torch.save(weights(), tmp_path / f"{rank}.pt")

    in_processes(2, save, tmp_path)
    for rank in range(2):
        trained = torch.load(tmp_path / f"{rank}.pt")
        assert trained.keys() == expected.keys()
        for name, weight in expected.items():
            assert (trained[name] - weight).abs().max() < 1e-6, name
    return expected


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_processes_convert_the_text_part_of_a_model_of_images(rank, tmp_path):
    """Its other weights stay as they are."""

    def convert() -> dict[str, torch.Tensor]:
        model = of_text_and_images()
        tuning = replace(QUICK, rank=rank, lr=1e-5)
        return swan(model, job_for(model), replace(SETTINGS, window=0), tuning).weights

    weights = check_that_two_processes_train(convert, tmp_path)
    assert weights
    assert all("language_model" in name or "lm_head" in name for name in weights)


@pytest.mark.long
def test_processes_tune_the_text_part_of_a_model_of_images(tmp_path):
    def tune() -> dict[str, torch.Tensor]:
        model = of_text_and_images()
        return fit_rope(model, job_for(model), "pi", replace(QUICK, steps=2, lr=1e-5)).weights

    assert check_that_two_processes_train(tune, tmp_path)


@pytest.mark.long
def test_processes_train_on_long_windows(tmp_path, monkeypatch):
    """Each reads its share of the long windows and of the short ones beside them."""
    monkeypatch.setattr(long_windows_module, "LONG_TOKENS", 2 * TARGET)

    def convert() -> dict[str, torch.Tensor]:
        model = build("llama")
        settings = replace(EVEN, long=0.5, tokens=2 * 4 * 4 * TARGET)
        job = job_for(model)
        weights = swan(model, job, settings, QUICK).weights
        assert job.details["long_windows"]["steps"] == 4
        return weights

    assert check_that_two_processes_train(convert, tmp_path)
