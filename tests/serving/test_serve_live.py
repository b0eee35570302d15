"""The model that answers: what it answers with, and when it changes over."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ttac.model.classifier import Classifier
from ttac.serving.live import LiveModel
from ttac.serving.shared import Slots
from ttac.serving.weights import WeightsLayout


def factor_of(version: int) -> float:
    """By powers of two, which rounding leaves alone: answers are compared bit for bit."""
    return 2.0 ** (version % 8)


def scaled(classifier: Classifier, factor: float) -> dict[str, torch.Tensor]:
    """The weights of a classifier whose logits are `factor` times as large."""
    copy = classifier.copy()
    with torch.no_grad():
        copy.head.weight.mul_(factor)
        copy.head.bias.mul_(factor)
    return dict(copy.model.state_dict())


@pytest.fixture
def linear() -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), mean=0, std=1).eval()


@pytest.fixture
def slots(linear: Classifier) -> Slots:
    size = WeightsLayout.of(linear.model).size
    return Slots(memoryview(bytearray(Slots.bytes_needed(size))), size)


def publish(slots: Slots, classifier: Classifier, version: int) -> None:
    slots.publish(version, WeightsLayout.of(classifier.model).pack(scaled(classifier, factor_of(version))))


def test_answers_come_from_the_version_they_name(linear: Classifier, slots: Slots) -> None:
    live = LiveModel(linear.copy(), slots)
    images = torch.rand(5, 3, 2, 2)
    expected = linear(images).detach()
    assert live.version == 0
    assert torch.equal(live.predict(images).logits, expected)
    assert not live.refresh()
    for version in (1, 2, 5):
        publish(slots, linear, version)
        assert live.predict(images).version < version, "nothing changes before a refresh"
        assert live.refresh()
        assert live.version == version
        answer = live.predict(images)
        assert answer.version == version
        assert torch.equal(answer.logits, factor_of(version) * expected)


def test_weights_that_nobody_asked_for_make_room_for_newer_ones(linear: Classifier, slots: Slots) -> None:
    live = LiveModel(linear.copy(), slots)
    images = torch.rand(2, 3, 2, 2)
    for version in (1, 2, 3):
        publish(slots, linear, version)
        live.refresh()
    answer = live.predict(images)
    assert answer.version == 3
    assert torch.equal(answer.logits, factor_of(3) * linear(images).detach())


def test_a_content_that_does_not_fit_leaves_the_model_as_it_is(linear: Classifier, slots: Slots) -> None:
    live = LiveModel(linear.copy(), slots)
    images = torch.rand(2, 3, 2, 2)
    slots.publish(1, b"of something else")
    with pytest.raises(ValueError, match="another model"):
        live.refresh()
    torch.testing.assert_close(live.predict(images).logits, linear(images).detach())
    publish(slots, linear, 2)
    assert live.refresh()
    assert live.predict(images).version == 2


def test_no_answer_mixes_versions_while_weights_arrive(linear: Classifier, slots: Slots) -> None:
    live = LiveModel(linear.copy(), slots)
    images = torch.rand(4, 3, 2, 2)
    expected = linear(images).detach()
    ended = threading.Event()

    def arrive() -> None:
        for version in range(1, 400):
            publish(slots, linear, version)
            live.refresh()
        ended.set()

    writer = threading.Thread(target=arrive)
    writer.start()
    seen = set()
    while not ended.is_set() or not seen:
        answer = live.predict(images)
        assert torch.equal(answer.logits, factor_of(answer.version) * expected)
        seen.add(answer.version)
    writer.join()
    assert live.predict(images).version == 399
