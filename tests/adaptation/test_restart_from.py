"""Adapters that go on from published weights, and that let others go first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttac import Classifier, checks
from ttac.adaptation.adapter import Adapter
from ttac.methods.registry import methods

NAMES = tuple(methods())


def weights_of(adapter: Adapter) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in adapter.adapted().model.state_dict().items()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize("method", NAMES)
def test_it_predicts_as_the_weights_do_and_remembers_nothing_else(method: str) -> None:
    subject = checks.subject(method)
    teacher, adapter, fresh = (subject.make() for _ in range(3))
    first, second = subject.images[: 2 * checks.WINDOW], subject.images[2 * checks.WINDOW :]
    teacher(first)
    weights = weights_of(teacher)
    adapter(second)
    adapter.restart_from(weights)
    fresh.restart_from(weights)
    with torch.no_grad():
        expected = teacher.adapted()(second)
    # T3A normalises prototypes that are normalised already.
    torch.testing.assert_close(adapter.predict(second), expected, rtol=1e-5, atol=1e-6)
    if method != "t3a":
        assert same(weights_of(adapter), weights)
    assert adapter.samples_seen == 0
    assert same(adapter.state_dict(), fresh.state_dict())
    assert same(adapter(first), fresh(first))
    adapter.reset()
    assert same(adapter.state_dict(), subject.make().state_dict())


@pytest.mark.parametrize("damage", ["missing", "another shape", "one more", "empty"])
def test_weights_of_another_model_are_refused_and_nothing_changes(damage: str) -> None:
    subject = checks.subject("tent")
    adapter = subject.make()
    adapter(subject.images)
    before = adapter.state_dict()
    weights = weights_of(subject.make())
    name = next(iter(weights))
    if damage == "missing":
        del weights[name]
    elif damage == "another shape":
        weights[name] = weights[name][:1]
    elif damage == "one more":
        weights["more.weight"] = torch.zeros(1)
    else:
        weights.clear()
    with pytest.raises(ValueError, match="the weights are not of this adapter's model"):
        adapter.restart_from(weights)
    assert same(adapter.state_dict(), before)


class TwoNames(nn.Module):
    """A network whose head is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.fc = nn.Linear(6, 4)
        self.classifier = self.fc

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.body(images))


def test_a_head_with_two_names_stays_one() -> None:
    torch.manual_seed(0)
    subject = checks.subject(
        "adacontrast", Classifier(TwoNames(), mean=0, std=1).eval()
    )  # a method that moves the head
    teacher, adapter = subject.make(), subject.make()
    teacher(subject.images)
    weights = weights_of(teacher)
    assert {"fc.weight", "classifier.weight"} <= weights.keys()
    adapter.restart_from(weights)
    assert adapter.classifier.model.fc is adapter.classifier.model.classifier
    assert same(adapter.predict(subject.images), teacher.predict(subject.images))


def test_the_hook_comes_before_each_step_and_changes_nothing() -> None:
    subject = checks.subject("tent")
    plain, hooked = subject.make(), subject.make()
    seen: list[int] = []
    hooked.before_step = lambda: seen.append(hooked.counters()["steps"])
    plain(subject.images)
    hooked(subject.images)
    assert seen == list(range(plain.counters()["steps"]))
    assert len(seen) > 5
    assert same(hooked.state_dict(), plain.state_dict())
    assert hooked.memory_parts() == plain.memory_parts()
