"""`headlog` with `search.shared`: one base per head, and one growth that stock classes have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from families import FAMILIES, VOCABULARY
from farspan.attention import seam
from farspan.attention.patch import Patch
from farspan.attention.probe import probe
from farspan.attention.scales import RelativeScales, Scales
from farspan.errors import FarspanError
from farspan.methods import headscale as headscale_module
from farspan.methods.extend_config import read_extend_config
from farspan.methods.fit import make_fit_job
from farspan.methods.headscale import ScaledModel, headlog
from farspan.methods.job import FitJob, loss_by_position, scaled_loss
from farspan.methods.rules import check_unused_settings
from farspan.methods.search_config import SearchConfig
from farspan.train.steps import EagerSteps

QUICK = SearchConfig(
    steps=12, batch=2, micro_batch=2, lr=(0.1,), warmup=1, init=1.2, shared=True, beyond=1.0
)
LENGTH, TARGET = 16, 40
BY_NAME = {family.name: family for family in FAMILIES}
STOCK_BASES = {
    "farspan-none": "floor",
    "farspan-hybrid": "floor",
    "smollm3": "floor",
    "llama": "floor-position",
    "farspan-rope": "floor-position",
}


def job_for(model) -> FitJob:
    ids = torch.randint(VOCABULARY, (4, 45), generator=torch.Generator().manual_seed(7))
    return make_fit_job(model, probe(model), TARGET, LENGTH, ids, ids[:2, :TARGET])


@pytest.fixture
def parameters_by_step(monkeypatch) -> list[dict[str, torch.Tensor]]:
    seen = []
    original = EagerSteps.update

    def update(self) -> None:
        original(self)
        seen.append({name: value.detach().clone() for name, value in self.task.parameters.items()})

    monkeypatch.setattr(EagerSteps, "update", update)
    return seen


@pytest.mark.parametrize("name", STOCK_BASES)
def test_one_slope_and_a_base_for_each_head_are_searched(name: str, parameters_by_step):
    model = BY_NAME[name].build()
    job = job_for(model)
    patch = headlog(model, job, replace(QUICK, constraint=False))
    scales, last = patch.scales, parameters_by_step[-1]
    assert patch.method == "headlog"
    assert type(scales) is Scales
    assert (scales.basis, scales.length) == (STOCK_BASES[name], LENGTH)
    assert last["slope"].shape == (1, 1)
    assert torch.equal(scales.base, last["base"])
    assert torch.equal(scales.slope, last["base"] * last["slope"])
    assert last["slope"].item() != parameters_by_step[0]["slope"].item(), "the slope is trained"
    assert scales.base.std() > 0
    before = float(loss_by_position(model, job.search).mean())
    assert scaled_loss(model, job.search, scales) < before


def test_saved_patches_of_both_bases_load(tmp_path):
    """An older farspan refuses the basis that it does not know by the format."""
    for name, number in (("farspan-none", 1), ("llama", 3)):
        model = BY_NAME[name].build()
        patch = headlog(model, job_for(model), replace(QUICK, steps=1, constraint=False))
        assert patch.describe()["format"] == number
        loaded = Patch.load(patch.save(tmp_path / name))
        assert loaded.scales.basis == STOCK_BASES[name]
        assert torch.equal(loaded.scales.slope, patch.scales.slope)


@pytest.mark.parametrize("name", ["farspan-none", "farspan-rope"])
def test_shared_gradients_match_finite_differences(name: str):
    """Also those of a second step, on the views that the seam has held since the first."""
    model = BY_NAME[name].build().double()
    base = torch.full((4, 4), 1.1, dtype=torch.float64)
    start = RelativeScales((0, 1, 2, 3), base, 0.3 * torch.ones_like(base), STOCK_BASES[name], 8)
    scaled = ScaledModel(model, start)
    ids = torch.randint(VOCABULARY, (2, 24))
    seam.install(model, scaled.scales)
    with seam.frozen(model):
        for _ in range(2):
            scaled.zero_grad()
            scaled(ids).backward()
            for parameter in (scaled.slope, scaled.base):
                with torch.no_grad():
                    parameter[0, 0] += 1e-5
                    above = scaled(ids)
                    parameter[0, 0] -= 2e-5
                    below = scaled(ids)
                    parameter[0, 0] += 1e-5
                expected = ((above - below) / 2e-5).item()
                assert parameter.grad[0, 0].item() == pytest.approx(expected, rel=1e-4, abs=1e-9)
            with torch.no_grad():
                scaled.slope += 0.2
                scaled.base += 0.1


def test_search_starts_from_the_best_uniform_scale_at_any_length(monkeypatch):
    monkeypatch.setattr(headscale_module, "best_uniform", lambda *arguments: 1.37)
    model = BY_NAME["farspan-none"].build()
    scales = headlog(model, job_for(model), replace(QUICK, steps=1, lr=(1e-9,), init=0.0)).scales
    ends = scales.at(torch.tensor([1.0, TARGET]))
    assert torch.allclose(ends, torch.full_like(ends, 1.37), atol=1e-6)


@pytest.mark.parametrize("basis", ["floor", "floor-position"])
@torch.no_grad()
def test_projection_keeps_scales_at_1_or_above_0(basis: str):
    model = BY_NAME["farspan-none"].build()
    table = torch.linspace(-3, 3, 16).reshape(4, 4)
    scaled = ScaledModel(model, RelativeScales((0, 1, 2, 3), table, 0 * table - 5, basis, LENGTH))
    scaled.project(constraint=False, length=TARGET)
    assert torch.equal(scaled.base, table.clamp(min=0.01))
    lowest = scaled.scales.at(torch.tensor([float(TARGET)]))[..., 0]
    assert torch.allclose(lowest, 0.01 * scaled.base, atol=1e-6), "a hundredth of the base"
    scaled.project(constraint=True, length=TARGET)
    assert torch.equal(scaled.base, table.clamp(min=1))
    assert scaled.slope.item() == 0


def test_only_headlog_shares_its_growth():
    config = read_extend_config(None, ["search.shared=true"])
    for name in ("headlog", "auto"):
        check_unused_settings([name], config)
    with pytest.raises(FarspanError, match=r"not use search.shared=true; .*: headlog, auto$"):
        check_unused_settings(["headscale"], config)


def test_only_continue_chooses_the_length_of_its_windows():
    config = read_extend_config(None, ["tuning.length=256"])
    check_unused_settings(["continue"], config)
    for name in ("yarn", "drope", "swan"):
        with pytest.raises(FarspanError, match=r"not use tuning.length=256; .*: continue$"):
            check_unused_settings([name], config)
