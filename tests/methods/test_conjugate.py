"""Conjugate PL: the conjugate against its definition, and the method against the published loop and TENT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

import ttac
from ttac import Classifier, checks
from ttac.adaptation.losses import entropy
from ttac.methods.conjugate import Conjugate, conjugate_labels, conjugate_loss


def some_logits(count: int, classes: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(count, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 6.0, -0.9])
@pytest.mark.parametrize("classes", [2, 5, 30])
def test_labels_solve_the_equation_that_defines_them(classes: int, epsilon: float) -> None:
    """Dg(h)^T y = grad f(h) by automatic differentiation of the two parts of the source loss."""
    for h in some_logits(4, classes):
        gradient = jacobian(lambda x: x.logsumexp(0) + epsilon, h)
        matrix = jacobian(lambda x: x + epsilon * x.softmax(0), h)
        assert isinstance(gradient, Tensor)
        assert isinstance(matrix, Tensor)
        expected = torch.linalg.solve(matrix.T, gradient)
        found = conjugate_labels(h[None].softmax(1), epsilon)[0]
        torch.testing.assert_close(found, expected)
        assert float(found.min()) > 0
        assert float(found.sum()) == pytest.approx(1)
        loss = h.logsumexp(0) + epsilon - (expected * (h + epsilon * h.softmax(0))).sum()
        torch.testing.assert_close(conjugate_loss(h[None], epsilon), loss)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 6.0, -0.9])
def test_a_source_loss_is_stationary_at_its_conjugate_label(epsilon: float) -> None:
    logits = some_logits(5, 6).requires_grad_(True)
    labels = conjugate_labels(logits.detach().softmax(1), epsilon)
    posterior = logits.softmax(1)
    loss = -(labels * posterior.log()).sum() + epsilon * (labels * (1 - posterior)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_gradients_go_through_the_labels() -> None:
    logits = some_logits(4, 5, scale=1.0).requires_grad_(True)
    for epsilon in (0.0, 2.0, -0.5):
        assert torch.autograd.gradcheck(lambda x, e=epsilon: conjugate_loss(x, e), (logits,))


def test_the_conjugate_of_cross_entropy_is_entropy() -> None:
    logits = some_logits(6, 7).requires_grad_(True)
    torch.testing.assert_close(conjugate_loss(logits), entropy(logits), rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss(logits), logits)[0] for loss in (conjugate_loss, entropy)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    assert float(conjugate_loss(torch.tensor([[1e4, -1e4, 0.0]]), 3.0)) == 0  # a posterior of one and zeros


def test_with_cross_entropy_it_is_tent() -> None:
    subject = checks.subject("conjugate")
    conjugate, tent = subject.make(), checks.subject("tent").make()
    for images in subject.batches():
        torch.testing.assert_close(conjugate(images), tent(images), rtol=1e-4, atol=1e-5)
    assert conjugate.parameters.keys() == tent.parameters.keys()


def test_with_poly_loss_it_is_the_published_loop() -> None:
    epsilon, temperature = 6.0, 1.5
    options = {"source_loss": "poly", "epsilon": epsilon, "temperature": temperature, "optimizer": "sgd", "lr": 0.1}
    subject = checks.subject("conjugate", queue=0, passes=1, predict="during", **options)
    adapter = subject.make()
    model = adapter.classifier.copy().requires_grad_(False)
    parameters = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
            parameters += [module.weight.requires_grad_(True), module.bias.requires_grad_(True)]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)
    for images in subject.batches()[:5]:
        ours = adapter(images)
        theirs = model(images)
        scaled = theirs / temperature
        s = scaled.softmax(1)
        matrix = torch.eye(4) + epsilon * (torch.diag_embed(s) - s[:, :, None] * s[:, None, :])
        y = torch.linalg.solve(matrix, s[:, :, None])[:, :, 0]
        loss = (scaled.logsumexp(1) - (y * scaled - epsilon * y * (1 - s)).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-4)


def test_the_source_loss_and_the_temperature_matter() -> None:
    variants: list[dict[str, Any]] = [{}, {"source_loss": "poly"}, {"temperature": 3.0}]
    outcomes = []
    for options in variants:
        subject = checks.subject("conjugate", optimizer="sgd", lr=0.1, **options)
        adapter = subject.make()
        adapter(subject.images)
        outcomes.append(adapter.predict(subject.images))
    assert not torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_options_are_checked_and_presets_hold(tiny_classifier: Classifier) -> None:
    for name, value in (("epsilon", -1.0), ("temperature", 0.0), ("source_loss", "mse"), ("optimizer", "lbfgs")):
        with pytest.raises(ValueError, match=name):
            ttac.adapt(tiny_classifier, "conjugate", **{name: value})
    for preset in Conjugate.presets:
        assert ttac.adapt(tiny_classifier, "conjugate", preset=preset).options.source_loss == "poly"
    with pytest.raises(ValueError, match="the affine parameters of norm layers"):
        ttac.adapt(Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), mean=0, std=1), "conjugate")
