"""The end of a stream: a window that is not full is learned from where the stream says that it ends."""

from __future__ import annotations

import copy

import pytest
import torch

from ttac import Classifier, adapt, checks


def moved(adapter: object, classifier: Classifier) -> bool:
    now = adapter.adapted().state_dict()  # type: ignore[attr-defined]
    return any(not torch.equal(value, now[name]) for name, value in classifier.state_dict().items())


@pytest.mark.parametrize("method", ["bn", "tent", "shot", "ttac++"])
def test_a_stream_shorter_than_a_window_is_one_window(method: str) -> None:
    images = checks.subject(method).images[:6]
    whole, small = checks.subject(method, window=64, queue=64), checks.subject(method, window=6, queue=64)
    short, full = whole.make(), small.make()
    assert torch.equal(short(images, last=True), full(images))
    assert len(short.last_step.update_seconds) == 1
    assert short.counters() == full.counters()
    assert moved(short, whole.make().classifier)


def test_without_its_end_a_short_stream_waits() -> None:
    subject = checks.subject("tent", window=64, queue=0)
    adapter = subject.make()
    adapter(subject.images[:6])
    assert not moved(adapter, subject.make().classifier)


def test_the_last_arrival_is_predicted_after_the_update_and_earlier_ones_were_before() -> None:
    subject = checks.subject("bn", window=8)
    adapter, first, second = subject.make(), subject.images[:3], subject.images[3:7]
    source = subject.make()
    assert torch.equal(adapter(first), source.predict(first))
    answered = adapter(second, last=True)
    assert not torch.allclose(answered, source.predict(second))
    assert torch.equal(answered, adapter.predict(second))


def test_the_statistics_of_bn_are_those_of_the_short_stream(tiny_classifier: Classifier) -> None:
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    adapter = adapt(tiny_classifier, "bn", window=256)
    adapter(images[:2])
    adapter(images[2:], last=True)
    by_hand = copy.deepcopy(tiny_classifier.model).train()
    for module in by_hand.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        by_hand(images)
    for name, buffer in by_hand.named_buffers():
        if "running" in name:
            torch.testing.assert_close(adapter.classifier.model.get_buffer(name), buffer)


@pytest.mark.parametrize(("images", "updates"), [(1, 0), (2, 1), (8, 1), (9, 1), (10, 2)])
def test_a_remainder_of_one_has_no_statistics_and_is_only_predicted(images: int, updates: int) -> None:
    subject = checks.subject("tent", window=8)
    adapter = subject.make()
    assert len(adapter(subject.images[:images], last=True)) == images
    assert len(adapter.last_step.update_seconds) == updates


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_each_moment_of_prediction_has_its_end(moment: str) -> None:
    subject = checks.subject("tent", window=8, predict=moment)
    adapter, source, images = subject.make(), subject.make(), subject.images[:5]
    logits = adapter(images, last=True)
    before, after = source.predict(images), adapter.predict(images)
    assert not torch.allclose(before, after)
    assert torch.equal(logits, before) == (moment == "before")
    assert torch.equal(logits, after) == (moment == "after")


def test_a_new_stream_begins_a_new_window() -> None:
    subject = checks.subject("tent", window=8)
    adapter = subject.make()
    adapter(subject.images[:5], last=True)
    adapter(subject.images[5:12])
    assert not adapter.last_step.update_seconds
    adapter(subject.images[12:13])
    assert len(adapter.last_step.update_seconds) == 1
