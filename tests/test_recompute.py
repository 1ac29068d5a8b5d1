"""Gradients with activations that are computed again in the backward pass."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from families import FAMILIES
from farspan.attention import seam
from farspan.attention.probe import probe
from farspan.attention.scales import Scales
from farspan.errors import FarspanError
from farspan.methods import headscale as headscale_module
from farspan.methods.distill import DistillModule
from farspan.methods.headscale import ScaledModel
from farspan.methods.tuning import LossModule
from farspan.model.compile import decoder_layers
from farspan.model.loss import mean_kl, mean_loss, training_loss
from farspan.model.recompute import recomputed_activations
from farspan.train.corpus import DataConfig
from farspan.train.pretrain import PretrainConfig, TrainConfig, make_training_task
from farspan.train.steps import EagerSteps, TrainingTask
from farspan.workflows.extend import extend
from test_extend import SEARCHED, _no_figures, tiny  # noqa: F401

BY_NAME = {family.name: family for family in FAMILIES}
CHECKED = ["farspan-rope", "farspan-t5", "farspan-swan", "llama", "gemma3", "gpt-oss"]
IDS = torch.arange(48).remainder(23)[None]


def gradients(model, loss_of, recompute):
    """The loss, all gradients, and the activations that autograd keeps for them, in numbers."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    model.zero_grad(set_to_none=True)
    with recomputed_activations(recompute):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, IDS)
        loss.backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return loss.detach(), grads, sum(kept.values())


@pytest.mark.parametrize("name", CHECKED)
def test_gradients_are_the_same_and_less_is_kept(name):
    model = BY_NAME[name].build()
    loss, grads, kept = gradients(model, training_loss, False)
    again, grads_again, kept_again = gradients(model, training_loss, True)
    assert torch.equal(loss, again)
    assert len(grads) == len(grads_again) > 0
    assert all(map(torch.equal, grads, grads_again))
    assert kept_again < kept / 2


@pytest.mark.parametrize("name", ["farspan-none", "llama"])
def test_scales_get_the_same_gradient(name):
    """Only scales on the seam learn, so that no input of a layer has a gradient at first."""
    model = BY_NAME[name].build()
    layers = [layer.index for layer in probe(model)]
    results = []
    for recompute in (False, True):
        base = torch.full((len(layers), model.config.num_attention_heads), 1.2, requires_grad=True)
        seam.install(model, Scales(layers, base))
        try:
            with seam.frozen(model), recomputed_activations(recompute):
                (gradient,) = torch.autograd.grad(mean_loss(model, IDS), base)
        finally:
            seam.remove_scales(model)
        results.append(gradient)
    assert results[0].abs().max() > 0
    assert torch.equal(*results)


def seen_kernels(model, loss_of):
    """The order of preference of attention kernels at every pass of a layer."""
    orders = []
    attention = decoder_layers(model)[0].self_attn
    attention.register_forward_hook(lambda *_: orders.append(torch._C._get_sdp_priority_order()))
    with recomputed_activations():
        loss_of(IDS).backward()
    return orders


def test_the_backward_pass_prefers_the_same_attention_kernels():
    """Kernels keep tensors of different shapes, and torch refuses to compute others again."""
    models = [BY_NAME["llama"].build() for _ in range(3)]
    teacher = copy.deepcopy(models[2]).requires_grad_(False)
    scales = Scales.uniform(1.2, [layer.index for layer in probe(models[1])], 4)
    scaled = ScaledModel(models[1], scales)
    seam.install(models[1], scaled.scales)
    losses = [LossModule(models[0]), scaled, DistillModule(models[2], teacher, 0.0)]
    for model, loss in zip(models, losses, strict=True):
        first, again = seen_kernels(model, loss)
        assert again == first != torch._C._get_sdp_priority_order()


def test_a_search_compares_its_precisions_without_keeping_activations():
    """A float32 window keeps twice the memory of a step, and no step follows one that fails."""
    model, kept = BY_NAME["farspan-none"].build(), []
    layers = [layer.index for layer in probe(model)]
    for recomputed in (False, True):
        scaled = ScaledModel(model, Scales.uniform(1.2, layers, model.config.num_attention_heads))
        seam.install(model, scaled.scales)
        numbers = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, numbers=numbers: (numbers.append(tensor.numel()), tensor)[1],
            lambda tensor: tensor,
        )
        with seam.frozen(model), hooks:
            if recomputed:
                assert scaled.bf16_is_accurate(IDS)
            else:
                torch.autograd.grad(scaled(IDS), [*scaled.parameters()])
        kept.append(sum(numbers))
    assert kept[1] < kept[0]  # of two passes against one


def test_pretraining_prefers_the_same_attention_kernels_in_the_backward_pass():
    model = BY_NAME["farspan-rope"].build()
    shape = TrainConfig(checkpoint_layers=True, batch=1, micro_batch=1)
    recipe = PretrainConfig(DataConfig(sources={}), train=shape)
    task = make_training_task(recipe, model, SimpleNamespace(mixture=None))
    first, again = seen_kernels(model, task.module)
    assert again == first != torch._C._get_sdp_priority_order()


def test_a_copy_runs_its_own_layers():
    """A teacher is a copy of its student, made before or after a loss with recomputed layers."""
    student = BY_NAME["llama"].build()
    teacher = copy.deepcopy(student).requires_grad_(False)
    with recomputed_activations():
        mean_kl(student, teacher, IDS).backward()
        late = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
        assert torch.equal(late(IDS).logits, teacher(IDS).logits)
    assert all("forward" not in vars(layer) for layer in decoder_layers(student))


class Loss(torch.nn.Module):
    """The loss of a model, after a number of errors."""

    def __init__(self, model, errors):
        super().__init__()
        self.model, self.errors, self.calls = model, errors, []

    def forward(self, ids):
        self.calls.append(len(self.calls))
        if len(self.calls) <= self.errors:
            training_loss(self.model, ids).backward()  # as if the memory ended after it
            raise torch.OutOfMemoryError("CUDA out of memory")
        return training_loss(self.model, ids)


def step(errors, can_retry=True, rows=1):
    model = BY_NAME["llama"].build()
    module, parameters = Loss(model, errors), dict(model.named_parameters())
    task = TrainingTask(module, parameters, [], lambda _: [IDS], can_retry=can_retry)
    steps = EagerSteps(task, clip=0.0)
    ids = torch.cat([IDS + number for number in range(rows)])
    loss, norm = steps.gradients([ids, ids.flip(0)])
    return steps, loss, norm


def test_a_step_without_memory_is_taken_again(caplog):
    _, loss, norm = step(errors=0)
    with caplog.at_level(logging.WARNING):
        steps, loss_again, norm_again = step(errors=1)
    assert (loss, norm) == (loss_again, norm_again)  # nothing of the first try is left
    assert "out of memory; activations are computed again" in caplog.text
    assert steps.recomputes
    steps.gradients([IDS])
    assert len(steps.task.module.calls) == 4  # a later step needs one pass


def test_a_step_without_memory_is_taken_again_with_fewer_rows_at_once(caplog):
    """Three of six rows, then two, then one; then activations are computed again."""
    _, loss, norm = step(errors=0, rows=6)
    for errors, calls, recomputes in ((1, 4, False), (2, 6, False), (3, 12, False), (4, 12, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            steps, loss_again, norm_again = step(errors, rows=6)
        torch.testing.assert_close((loss, norm), (loss_again, norm_again), rtol=1e-5, atol=0)
        assert steps.recomputes == recomputes
        assert "out of memory; micro batches are split into 2 from now on" in caplog.text
        assert ("activations are computed again" in caplog.text) == recomputes
        assert len(steps.task.module.calls) == errors + calls
    with pytest.raises(torch.OutOfMemoryError):
        step(errors=5, rows=6)


class MeanOfRows(torch.nn.Module):
    """The mean over all rows of a parameter times a number; fails for more rows than fit."""

    def __init__(self, most):
        super().__init__()
        self.weight, self.most = torch.nn.Parameter(torch.ones(())), most

    def forward(self, batch):
        if batch.shape[-2] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.weight * batch.double().mean()


@pytest.mark.parametrize("shape", [(8, 2), (2, 8, 2)])
@pytest.mark.parametrize("others", [3, 1, 5])
def test_parts_of_any_size_weigh_as_much_as_their_rows(shape, others):
    """Of tokens, and of tokens with the counts of answers; a later step has other micro batches."""
    batches = [torch.rand(shape), torch.rand((*shape[:-2], others, 2))]
    module = MeanOfRows(most=2)
    task = TrainingTask(module, {"weight": module.weight}, [], lambda _: [], can_retry=True)
    loss, norm = EagerSteps(task, clip=0.0).gradients(batches)
    expected = torch.stack([batch.double().mean() for batch in batches]).mean()
    torch.testing.assert_close(torch.stack((loss, norm.double())), torch.stack((expected,) * 2))


def test_batches_of_single_rows_recompute_before_others_are_split():
    """Long windows, one at a time, beside several short ones."""
    module = MeanOfRows(most=2)
    task = TrainingTask(module, {"weight": module.weight}, [], lambda _: [], can_retry=True)
    steps = EagerSteps(task, clip=0.0)
    steps.gradients([torch.rand(1, 8), torch.rand(4, 2)])
    assert (steps.recomputes, steps.parts) == (True, 2)


@pytest.mark.parametrize("loss_of", [mean_loss, mean_kl])
def test_a_head_without_memory_counts_every_token_once(loss_of, monkeypatch):
    """Memory ends in the gradient of its first rows, and of half of them; then a few rows fit."""
    model = BY_NAME["llama"].build().double()
    others = () if loss_of is mean_loss else (copy.deepcopy(model).requires_grad_(False),)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    grad, sizes = torch.autograd.grad, []

    def little(outputs, inputs, *args, **options):
        sizes.append(inputs[0].shape[1] if isinstance(inputs, list) else inputs.shape[1])
        if sizes[-1] > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grad(outputs, inputs, *args, **options)

    results = []
    for function in (grad, little):
        monkeypatch.setattr(torch.autograd, "grad", function)
        loss = loss_of(model, *others, IDS)
        monkeypatch.setattr(torch.autograd, "grad", grad)
        model.zero_grad()
        loss.backward()
        parts = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
        results.append(torch.cat([loss.detach()[None], *parts]))
    assert sizes[:2] == [IDS.shape[1] - (loss_of is mean_loss), sizes[0] // 2]
    assert max(sizes[2:]) <= 12
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


class NoMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")


class Saved:
    """A tensor that autograd saves for a backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", ["text", "teacher", "scales"])
def test_a_pass_without_memory_is_freed_before_the_next_one(kind, in_backward):
    """A traceback, or a circle of references, would hold what took the memory."""
    model, saved, alive = BY_NAME["llama"].build(), [], []
    teacher = copy.deepcopy(model).requires_grad_(False)
    scaled = ScaledModel(model, Scales.uniform(1.2, range(4), 4))
    modules = {
        "text": LossModule(model),
        "teacher": DistillModule(model, teacher, 0.0),
        "scales": scaled,
    }
    module = modules[kind]
    if kind == "scales":
        seam.install(model, scaled.scales)

    def pack(tensor):
        kept = Saved(tensor)
        saved.append(weakref.ref(kept))
        return kept

    def first_fails(norm, inputs):
        if len(alive) > 1:
            return None
        if in_backward:
            return (NoMemoryInBackward.apply(*inputs),)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def count_alive(*_):
        alive.append(sum(reference() is not None for reference in saved))

    module.register_forward_pre_hook(count_alive)
    model.model.norm.register_forward_pre_hook(first_fails)
    task = TrainingTask(module, dict(module.named_parameters()), [], lambda _: [], can_retry=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
    gc.collect()
    gc.disable()
    try:
        with hooks, seam.frozen(model) if kind == "scales" else nullcontext():
            EagerSteps(task, clip=0.0).gradients([torch.cat((IDS, IDS + 1))])
    finally:
        gc.enable()
    assert alive[:2] == [0, 0]
    assert len(saved) > 100


@pytest.mark.parametrize(("errors", "can_retry"), [(2, True), (1, False)])
def test_a_step_that_cannot_be_saved_raises(errors, can_retry):
    with pytest.raises(torch.OutOfMemoryError):
        step(errors, can_retry)


@pytest.mark.parametrize(
    ("micro_batch", "message"),
    [(1, "activations are computed again"), (2, "split into 2 from now on")],
)
def test_a_search_that_runs_out_of_memory_goes_on(
    tiny,  # noqa: F811
    tmp_path,
    monkeypatch,
    caplog,
    micro_batch,
    message,
):
    search = replace(SEARCHED.search, micro_batch=micro_batch)
    options = dict(data=tiny / "text.txt", recipe=replace(SEARCHED, search=search))
    expected = extend(tiny / "none", 128, tmp_path / "enough", "headscale", **options)
    original, train, errors = headscale_module.mean_loss, headscale_module.train, []

    def start(*args):
        errors.append(torch.OutOfMemoryError("CUDA out of memory"))
        return train(*args)

    def first_fails(*args, **kwargs):
        if errors:
            raise errors.pop()
        return original(*args, **kwargs)

    monkeypatch.setattr(headscale_module, "train", start)
    monkeypatch.setattr(headscale_module, "mean_loss", first_fails)
    again = extend(tiny / "none", 128, tmp_path / "little", "headscale", **options)
    own, wanted = again.patch.scales.base, expected.patch.scales.base
    torch.testing.assert_close(own, wanted, rtol=0 if micro_batch == 1 else 1e-4, atol=0)
    assert message in caplog.text

    def always_fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(headscale_module, "mean_loss", always_fails)
    with pytest.raises(FarspanError, match="out of memory on windows of 144 tokens"):
        extend(tiny / "none", 128, tmp_path / "none", "headscale", **options)
