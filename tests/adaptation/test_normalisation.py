"""How stored batch-norm statistics follow passes and windows, against passes that are made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ttac
from ttac.adaptation.method import Batch
from ttac.adaptation.normalisation import FollowingNorms
from ttac.model.networks import ResNet
from ttac.model.norms import batch_norms

WINDOW = 16


def made(**options: Any) -> ttac.Adapter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = ttac.Classifier(ResNet(8, 4, width=4), mean=0, std=1).double()
    images = images_of(3, 64)
    stats = ttac.SourceStatistics.collect(classifier, [(images, torch.arange(64) % 4)])
    fixed = {"window": WINDOW, "queue": 0, "passes": 1, "tau_st": 0.0}
    return ttac.adapt(classifier, "ttac++", stats=stats, **(fixed | options))


def images_of(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_statistics_follow_passes_by_counts_or_by_a_momentum(momentum: float | None) -> None:
    layer = nn.BatchNorm2d(3).double()
    norms = FollowingNorms(layer, clip=24, momentum=momentum)
    mean = torch.zeros(3, dtype=torch.float64)
    for number, weight in enumerate((1.0, 0.5, 8 / 24, 8 / 24)):
        images = images_of(number, 8)
        with norms.following(8):
            layer(images)
        weight = weight if momentum is None else momentum
        mean = (1 - weight) * mean + weight * images.mean((0, 2, 3))
        torch.testing.assert_close(layer.running_mean, mean)


def test_a_joint_pass_normalises_both_views_together_and_leaves_the_stored_statistics() -> None:
    adapter = made(views="joint")
    adapter.memory_in_use.push(images_of(0, WINDOW))
    before = adapter.norms.snapshot()
    batch = Batch(adapter, torch.arange(WINDOW), 0)
    state = adapter.generator.get_state()
    weak, strong = batch.pair(0.5)
    adapter.generator.set_state(state)
    views = torch.cat([batch.weakened(), batch.strengthened(0.5)])
    plain = adapter.classifier.copy()
    for layer in batch_norms(plain):
        layer.train()
    torch.testing.assert_close(torch.cat([weak.logits, strong.logits]), plain(views))
    for kept, now in zip(before[1], adapter.norms.snapshot()[1], strict=True):
        assert torch.equal(kept, now)


@pytest.mark.parametrize("views", ["joint", "apart"])
def test_a_window_is_predicted_by_its_statistics_under_the_weights_that_predict_it(views: str) -> None:
    adapter = made(views=views, lr=0.05, trust=0.0)
    images = images_of(1, WINDOW)
    logits = adapter(images)
    by_hand = adapter.classifier.copy()
    for layer in batch_norms(by_hand):
        layer.train()
        layer.momentum = 1.0  # the first window replaces the source's statistics
    with torch.no_grad():
        by_hand(images)
    torch.testing.assert_close(logits, by_hand.eval()(images))
    assert adapter.norms.seen == WINDOW  # once, however many passes have seen it


def test_statistics_that_overflow_under_the_new_weights_are_not_taken() -> None:
    adapter = made(views="apart")
    adapter(images_of(1, WINDOW))
    method: Any = adapter.method
    before = adapter.norms.snapshot()
    method.before_update()
    with torch.no_grad():
        next(adapter.classifier.model.parameters()).fill_(torch.inf)
    method.after_update(adapter.memory_in_use.newest(WINDOW), torch.zeros(WINDOW, 4))
    for kept, now in zip(before[1], adapter.norms.snapshot()[1], strict=True):
        assert torch.equal(kept, now)
