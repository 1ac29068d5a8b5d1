"""Distillation: the KL between two models and its gradients, and the teacher."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from families import VOCABULARY, tokens
from farspan.data.windows import prepend
from farspan.methods.distill import DistillModule, cast_weights, make_teacher
from farspan.model.loss import mean_kl, token_kl, token_losses
from swan_models import (
    BY_NAME,
    plain_kl,
)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    by_weight = torch.autograd.grad(loss, weights, materialize_grads=True)
    return dict(zip(names, by_weight, strict=True))


# The KL between two models.

HEADS = {  # by what is special about the head
    "farspan-rope": "tied",
    "llama": "untied",
    "gemma2": "tied, soft cap",
    "cohere2": "tied, logit scale",
    "granite": "untied, logits divided",
    "phi": "untied, bias",
    "gpt2": "tied, decoder with another name",
    "mixtral": "untied, experts",
}


def student_and_teacher(name: str):
    """Two different models of a family, in float64 unless it has experts, which lack it."""
    dtype = torch.float32 if "experts" in HEADS[name] else torch.float64
    teacher = BY_NAME[name].build(seed=1, dtype=dtype)
    return BY_NAME[name].build(dtype=dtype), teacher.requires_grad_(False)


@pytest.mark.parametrize("name", HEADS)
def test_mean_kl_and_its_gradients_equal_the_plain_computation(name):
    """For all weights, with logits of a few rows at a time."""
    student, teacher = student_and_teacher(name)
    tolerance = 1e-4 if student.dtype == torch.float32 else 1e-6
    ids = tokens(25)
    expected = plain_kl(student, teacher, ids).mean()
    assert expected > 1e-5
    expected_gradients = gradients(student, expected)
    for rows in (4, 25):
        kl = mean_kl(student, teacher, ids, budget=rows * len(ids) * VOCABULARY)
        assert kl.item() == pytest.approx(expected.item(), rel=tolerance)
        # A factor after the KL reaches every weight.
        for weight, gradient in gradients(student, 3 * kl).items():
            reference = 3 * expected_gradients[weight]
            assert reference.any() == gradient.any(), weight
            error = (gradient - reference).norm() / reference.norm().clamp(min=1e-12)
            assert error < tolerance, (weight, rows)
    assert all(weight.grad is None for weight in teacher.parameters())


def test_mean_kl_adds_the_weighted_cross_entropy_of_tokens():
    """The first token of a window is predicted by nothing."""
    student, teacher = student_and_teacher("llama")
    ids = tokens(25)
    weights = torch.zeros(ids.shape)
    weights[0, 7:9] = 3.0
    weights[-1, [0, 24]] = 0.5
    asked = F.cross_entropy(student(ids).logits[:, :-1].mT, ids[:, 1:], reduction="none")
    expected = plain_kl(student, teacher, ids).mean() + (asked * weights[:, 1:]).sum() / ids.numel()
    expected_gradients = gradients(student, expected)
    for rows in (4, 25):
        budget = rows * len(ids) * VOCABULARY
        loss = mean_kl(student, teacher, ids, token_weights=weights, budget=budget)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for weight, gradient in gradients(student, loss).items():
            assert torch.allclose(gradient, expected_gradients[weight], atol=1e-7), (weight, rows)
    without = mean_kl(student, teacher, ids, token_weights=torch.zeros(ids.shape))
    assert without.item() == pytest.approx(mean_kl(student, teacher, ids).item(), rel=1e-6)


@pytest.mark.parametrize("begin", [0, 1])
def test_the_weight_of_answers_does_not_depend_on_the_micro_batch(begin):
    """The mean over four windows, of which two have answers, as long as they were or cut."""
    student, teacher = student_and_teacher("llama")
    ids = torch.randint(3, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(3))
    answers = torch.zeros_like(ids)
    answers[1, 13:15] = answers[3, 13:24] = 1
    batch = torch.stack((ids, answers * answers.sum(1, keepdim=True)))
    module = DistillModule(student, teacher, 0.5, 24, begin)
    for width in (24, 12, 7, 3):  # without begin, the last 21 of 24 tokens make three windows of 7
        size = width - begin
        kept = (24 - begin) // size * size
        windows, marks, counts = (
            prepend(part[:, -kept:].reshape(-1, size), [front] * begin)
            for part, front in ((ids, 1), (answers, 0), (batch[1], 0))
        )
        asked = F.cross_entropy(
            student(windows).logits[:, :-1].mT, windows[:, 1:], reduction="none"
        )
        by_window = (asked * marks[:, 1:]).view(4, -1).sum(1) / answers.sum(1).clamp(min=1)
        expected = plain_kl(student, teacher, windows).mean() + 0.5 * by_window.mean()
        for rows in (4, 2, 1):
            parts = torch.stack((windows, counts)).split(rows * (kept // size), dim=1)
            loss = torch.stack([module(part) for part in parts]).mean()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6), (width, rows)
    with pytest.raises(ValueError, match="the length of a window"):
        DistillModule(student, teacher, answers=0.5)


def test_mean_kl_computes_logits_in_chunks():
    student, teacher = student_and_teacher("llama")
    rows: dict[str, list[int]] = {"student": [], "teacher": []}
    for key, model in (("student", student), ("teacher", teacher)):
        model.lm_head.register_forward_hook(
            lambda module, inputs, output, key=key: rows[key].append(output.shape[1])
        )
    mean_kl(student, teacher, tokens(25), budget=10 * VOCABULARY)
    assert rows == {"student": [5] * 5, "teacher": [5] * 5}


def test_mean_kl_gives_frozen_weights_no_gradient():
    student, teacher = student_and_teacher("llama")
    student.lm_head.requires_grad_(False)
    mean_kl(student, teacher, tokens(12)).backward()
    assert student.lm_head.weight.grad is None
    assert student.model.norm.weight.grad.any()


def test_mean_kl_allows_weights_that_make_no_logits():
    student, teacher = student_and_teacher("llama")
    student.value_head = torch.nn.Linear(32, 1)
    mean_kl(student, teacher, tokens(12)).backward()
    assert not student.value_head.weight.grad.any()
    assert student.lm_head.weight.grad.any()


@pytest.mark.parametrize("name", HEADS)
def test_token_kl_equals_the_plain_computation(name):
    student, teacher = student_and_teacher(name)
    ids = tokens(25)
    for rows in (4, 25):
        kl, losses = token_kl(student, teacher, ids, budget=2 * rows * len(ids) * VOCABULARY)
        assert torch.allclose(
            kl.double(), plain_kl(student, teacher, ids)[:, :-1].double(), atol=1e-5
        )
        assert torch.allclose(losses.double(), token_losses(student, ids).double(), atol=1e-5)
        assert not kl.requires_grad


# The teacher.


def test_the_teacher_is_a_frozen_copy_that_does_not_follow_the_model():
    model = BY_NAME["llama"].build().train()
    model.requires_grad_(True)
    ids = tokens(12)
    teacher = make_teacher(model)
    expected = teacher(ids).logits
    assert not any(weight.requires_grad for weight in teacher.parameters())
    assert not teacher.training
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert torch.equal(teacher(ids).logits, expected)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    module = DistillModule(model, teacher, answers=0.0)
    assert {id(weight) for weight in module.parameters()} == set(map(id, model.parameters()))


def test_a_teacher_in_bf16_keeps_its_rotation_in_float32():
    """In bf16 the angles at position 2,000 would be wrong by up to a turn."""
    model = BY_NAME["llama"].build()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cast_weights(model, torch.bfloat16)
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
