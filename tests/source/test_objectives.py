"""Objectives of source training against what their formulas say, and where their gradients go."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import ttac
from ttac import Classifier
from ttac.model.branches import rotate
from ttac.model.networks import ResNet
from ttac.model.norms import batch_norms
from ttac.model.views import strong_view
from ttac.source.knowledge import TrainingLoss
from ttac.source.objectives import OBJECTIVES, Objective, SourceBatch, make_objective


def trainee(objective: Objective) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, 3, width=4)
        return Classifier(network, branch=objective.new_branch(16), mean=0, std=1).train()


@pytest.fixture
def batch() -> SourceBatch:
    generator = torch.Generator().manual_seed(0)
    images, weak = (torch.rand(6, 3, 16, 16, generator=generator) for _ in range(2))
    return SourceBatch(images, weak, torch.tensor([0, 1, 2, 0, 1, 2]), flip=True)


def naive_ce(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = [-math.log(row.double().softmax(0)[label]) for row, label in zip(logits.detach(), labels, strict=True)]
    return torch.tensor(sum(rows) / len(rows))


def naive_poly(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p = logits.detach().softmax(1)[range(len(labels)), labels]
    # The first terms of its series: 2 (1 - p) + (1 - p)^2 / 2 + (1 - p)^3 / 3 + ...
    return (2 * (1 - p) + sum((1 - p) ** j / j for j in range(2, 2000))).mean()


def naive_contrast(classifier: Classifier, batch: SourceBatch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    strong = strong_view(batch.images, generator, flip=True, kind="own-range", operations=2, magnitude=10)
    assert classifier.branch is not None
    z = torch.cat([classifier.branch(classifier.features(view)).detach() for view in (batch.weak, strong)])
    total, count = 0.0, len(batch.labels)
    for i in range(2 * count):
        others = [math.exp(float(z[i] @ z[j]) / 0.5) for j in range(2 * count) if j != i]
        total += -math.log(math.exp(float(z[i] @ z[(i + count) % (2 * count)]) / 0.5) / sum(others))
    return torch.tensor(0.3 * total / (2 * count))


def naive_rotation(classifier: Classifier, batch: SourceBatch) -> torch.Tensor:
    turns = torch.randint(4, (6,), generator=torch.Generator().manual_seed(7))
    turned = torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(batch.weak, turns, strict=True)])
    assert classifier.branch is not None
    return 0.5 * naive_ce(classifier.branch(classifier.features(turned)), turns)


@pytest.mark.parametrize(
    ("name", "by_labels", "by_branch"),
    [
        ("ce", naive_ce, None),
        ("poly", naive_poly, None),
        ("ce+contrastive", naive_ce, naive_contrast),
        ("ce+rotation", naive_ce, naive_rotation),
    ],
)
def test_losses_are_those_of_the_formulas(
    name: str,
    by_labels: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    by_branch: Callable[[Classifier, SourceBatch], torch.Tensor] | None,
    batch: SourceBatch,
) -> None:
    objective = make_objective(name)
    losses = list(objective.losses(trainee(objective), batch, torch.Generator().manual_seed(7)).values())
    reference = trainee(objective)  # batch norms of a training network predict from the batch, whatever they store
    expected = [by_labels(reference(batch.weak), batch.labels)]
    if by_branch is not None:
        expected.append(by_branch(reference, batch))
    torch.testing.assert_close(torch.stack(losses).detach(), torch.stack(expected).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_reach_backbone_head_and_branch(name: str, batch: SourceBatch) -> None:
    objective = make_objective(name)
    classifier = trainee(objective)
    losses = objective.losses(classifier, batch, torch.Generator().manual_seed(7))
    torch.stack(list(losses.values())).sum().backward()
    idle = [key for key, value in classifier.named_parameters() if value.grad is None or not value.grad.any()]
    assert idle == []
    if objective.branch is not None:
        classifier.zero_grad()
        losses = objective.losses(classifier, batch, torch.Generator().manual_seed(7))
        losses[objective.branch].backward()
        assert classifier.model.conv1.weight.grad.any()  # type: ignore[union-attr]
        assert classifier.head.weight.grad is None  # the branch alone says nothing of classes


@pytest.mark.parametrize("name", ["ce+contrastive", "ce+rotation"])
def test_the_second_view_leaves_the_stored_statistics_alone(name: str, batch: SourceBatch) -> None:
    objective = make_objective(name)
    with_branch, without = trainee(objective), trainee(objective)
    objective.losses(with_branch, batch, torch.Generator())
    without(batch.weak)
    for mine, plain in zip(batch_norms(with_branch), batch_norms(without), strict=True):
        assert mine.training
        assert mine.momentum == plain.momentum == 0.1
        assert torch.equal(mine.running_mean, plain.running_mean)  # type: ignore[arg-type]
        assert torch.equal(mine.running_var, plain.running_var)  # type: ignore[arg-type]


def test_rotation_of_the_reference_is_that_of_the_branch(batch: SourceBatch) -> None:
    assert torch.equal(rotate(batch.weak, torch.full((6,), 3))[0], batch.weak[0].rot90(3, (1, 2)))


def test_poly_with_no_change_is_cross_entropy(batch: SourceBatch) -> None:
    objective = make_objective("poly", epsilon=0.0)
    loss = objective.losses(trainee(objective), batch, torch.Generator())["poly"]
    torch.testing.assert_close(loss, F.cross_entropy(trainee(objective)(batch.weak), batch.labels))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_survive_a_round_trip(name: str) -> None:
    objective = make_objective(name)
    assert make_objective(**objective.as_dict()) == objective


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("hinge", {}, "unknown objective: 'hinge'"),
        ("ce", {"epsilon": 1.0}, "unknown parameter of the objective ce: 'epsilon'"),
        ("poly", {"epsilon": "much"}, "epsilon"),
        ("poly", {"epsilon": math.nan}, "epsilon"),
        ("poly", {"epsilon": True}, "epsilon"),
        ("poly", {"epsilon": 10**400}, "epsilon"),
        ("ce+rotation", {"branch_weight": -1.0}, "branch_weight"),
        ("ce+contrastive", {"magnitude": 31}, "magnitude must be from 0 to 30"),
        ("ce+contrastive", {"operations": 1.5}, "operations"),
    ],
)
def test_objectives_that_make_no_sense(name: str, parameters: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_objective(name, **parameters)


def test_the_loss_of_the_labels_is_known_to_methods_that_go_by_it() -> None:
    for name in ("ce", "ce+contrastive", "ce+rotation"):
        assert make_objective(name).training_loss() == TrainingLoss("ce")
    poly = make_objective("poly", epsilon=2.0).training_loss()
    assert poly == TrainingLoss("poly", {"epsilon": 2.0})
    options = ttac.adapt(trainee(make_objective("poly")), "conjugate", knowledge=[poly]).options
    assert (options.source_loss, options.epsilon) == ("poly", 2.0)
