"""SHOT against the published code, one pass and several."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor, nn
from torch.nn import functional as F

import ttac
from ttac import Classifier, checks
from ttac.methods.shot import Shot, centroid_labels
from ttac.model.networks import ResNet


def published_labels(features: Tensor, posterior: Tensor, threshold: int = 0) -> Tensor:
    """Centroid pseudo labels in numpy and scipy, with means and distances spelt out."""
    points = np.concatenate([features.numpy(), np.ones((len(features), 1))], 1)
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    weights, labels = posterior.numpy(), posterior.numpy().argmax(1)
    for _ in range(2):
        centroids = weights.T @ points / (1e-8 + weights.sum(0)[:, None])
        known = np.array([k for k in range(weights.shape[1]) if (labels == k).sum() > threshold])
        labels = known[cdist(points, centroids[known], "cosine").argmin(1)]
        weights = np.eye(weights.shape[1])[labels]
    return torch.from_numpy(labels)


@pytest.mark.parametrize(("classes", "threshold"), [(2, 0), (5, 0), (5, 12), (40, 0), (40, 2)])
def test_centroid_labels_are_the_published_ones(classes: int, threshold: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(80, 7, generator=generator, dtype=torch.float64).relu()
        logits = 2 * features @ torch.randn(7, classes, generator=generator, dtype=torch.float64)
        posterior = (logits + torch.randn(80, classes, generator=generator)).softmax(1)
        expected = published_labels(features, posterior, threshold)
        assert torch.equal(centroid_labels(features, posterior, threshold=threshold), expected)
    assert not torch.equal(expected, posterior.argmax(1))


def test_centroid_labels_survive_what_is_unusual() -> None:
    features = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    posterior = 0.1 + F.one_hot(torch.tensor([0, 1, 1, 1, 2, 3]), 4) / 2
    assert centroid_labels(features, posterior, threshold=100).unique().numel() == 1  # the largest class takes all
    assert len(centroid_labels(features[:1], posterior[:1])) == 1
    spoilt, lost = features.clone(), posterior.clone()
    spoilt[0], lost[0] = torch.nan, torch.nan
    quiet, zero = features.clone(), posterior.clone()
    quiet[0], zero[0] = 0, 0
    assert torch.equal(centroid_labels(spoilt, lost), centroid_labels(quiet, zero))


class Reference:
    """The published loop, on a network whose statistics are always those of the last minibatch (`bn_clip=1`)."""

    def __init__(self, model: Classifier, lr: float) -> None:
        self.model, self.lr = model.requires_grad_(True), lr
        self.norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        for module in self.norms:
            module.momentum = 1.0
        backbone = [value for name, value in model.named_parameters() if ".fc." not in name]
        self.optimizer = torch.optim.SGD(backbone, lr, momentum=0.9, weight_decay=1e-3, nesterov=True)

    @torch.no_grad()
    def label(self, images: Tensor, window: Tensor | None = None) -> Tensor:
        """Label images with the statistics of a window, or with those that are there."""
        if window is not None:
            for module in self.norms:
                module.train()
            self.model(window)
        self.model.eval()
        features, logits = self.model.features_and_logits(images)
        return published_labels(features, logits.softmax(1))

    def step(self, images: Tensor, labels: Tensor, progress: float = 0.0) -> None:
        for module in self.norms:
            module.train()
        logits = self.model(images)
        posterior = logits.softmax(1)
        mean = posterior.mean(0)
        sharpness = -(posterior * posterior.log()).sum(1).mean()
        loss = 0.3 * F.cross_entropy(logits, labels) + sharpness + (mean * mean.log()).sum()
        self.optimizer.param_groups[0]["lr"] = self.lr * (1 + 10 * progress) ** -0.75
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.model.eval()


OPTIONS: dict[str, Any] = {"lr": 0.02, "bn_clip": 1}


def test_one_pass_is_the_published_loss_on_labels_of_the_queue() -> None:
    subject = checks.subject("shot", **OPTIONS)  # a queue of two windows, two passes
    adapter = subject.make()
    reference = Reference(adapter.classifier.copy(), 0.02)
    generator = torch.Generator().manual_seed(0)
    queue = torch.empty(0, 3, 16, 16)
    for number, window in enumerate(subject.batches()[:4]):
        adapter(window)
        if number < 2:
            queue = torch.cat([queue, window])
        else:  # the ring overwrites the oldest window in place
            queue[(number % 2) * 8 : (number % 2) * 8 + 8] = window
        labels = reference.label(queue, window)
        for _ in range(2):
            for slots in torch.randperm(len(queue), generator=generator).tensor_split(len(queue) // 8):
                reference.step(queue[slots], labels[slots])
    ours, theirs = adapter.predict(subject.images), reference.model(subject.images).detach()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert float((ours - subject.make().predict(subject.images)).abs().max()) > 0.05
    assert torch.equal(adapter.classifier.head.weight, subject.make().classifier.head.weight)


@pytest.mark.parametrize("bn_clip", [1, 512])
def test_labels_are_of_the_statistics_that_the_window_is_predicted_with(bn_clip: int) -> None:
    # Images of many colours under a faint light, which the stored statistics of a new network do not know.
    images = 0.1 * torch.rand(5 * 16, 3, 1, 1, generator=torch.Generator().manual_seed(0)).expand(-1, -1, 16, 16)
    torch.manual_seed(0)
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1).eval()
    adapter = ttac.adapt(classifier, "shot", window=16, bn_clip=bn_clip, lr=1e-9)
    method = adapter.method
    assert isinstance(method, Shot)
    differ = 0
    for window in images.split(16):
        before = adapter.classifier.copy()
        adapter(window)  # the weights stay, the statistics follow: the adapter now predicts as it has labelled
        with torch.no_grad():
            found, old = (one.features_and_logits(window) for one in (adapter.classifier, before))
        assert torch.equal(method.targets, published_labels(found[0], found[1].softmax(1)))
        differ += not torch.equal(method.targets, published_labels(old[0], old[1].softmax(1)))
    assert differ > 0
    assert adapter.norms.seen == min(len(images), bn_clip)  # each window counts once


def test_statistics_that_a_window_has_spoilt_label_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checks.subject("shot", passes=1)
    adapter = subject.make()
    method = adapter.method
    assert isinstance(method, Shot)
    first, second, *_ = subject.batches()
    adapter(first)
    before = adapter.classifier.copy()
    monkeypatch.setattr(adapter.norms, "finite", lambda: torch.tensor(False))
    adapter(second)
    with torch.no_grad():
        features, logits = before.features_and_logits(torch.cat([first, second]))
    assert torch.equal(method.targets, published_labels(features, logits.softmax(1)))


def test_several_passes_are_the_published_loop() -> None:
    subject = checks.subject("shot", **OPTIONS, queue=0, passes=1)
    adapter = subject.make()
    reference = Reference(adapter.classifier.copy(), 0.02)
    images, epochs = subject.images, 3
    labels = torch.arange(len(images)) % 4
    # Arrival batches that cut across windows, and a window that holds the end of one epoch and the start of the next.
    ttac.evaluate(adapter, list(zip(images.split(5), labels.split(5), strict=True)), "N-M-SF", epochs=epochs)
    waiting: list[tuple[int, int]] = []
    for epoch in range(epochs):
        found = reference.label(images)
        for place in range(len(images)):
            waiting.append((place, int(found[place])))
            if len(waiting) == 8:
                places, own = (torch.tensor(part) for part in zip(*waiting, strict=True))
                reference.step(images[places], own, (epoch + (place + 1) / len(images)) / epochs)
                waiting = []
    torch.testing.assert_close(adapter.predict(images), reference.model(images).detach(), rtol=1e-3, atol=1e-4)
    assert adapter.counters()["steps"] == 3 * 44 // 8


def test_a_sample_keeps_the_label_of_its_epoch_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = checks.subject("shot", passes=1).make()
    method = adapter.method
    assert isinstance(method, Shot)
    images = checks.subject("shot").images[:16]
    answers = [torch.arange(16) % 4, (torch.arange(16) + 1) % 4]
    monkeypatch.setattr(adapter.method, "_find_labels", lambda _batches: answers.pop(0))
    adapter.begin_epoch(0, 2, [images])
    adapter.learn(images)
    assert torch.equal(method.targets, torch.arange(16) % 4)
    adapter.begin_epoch(1, 2, [images])
    adapter.learn(images[:8])
    expected = torch.cat([(torch.arange(8) + 1) % 4, torch.arange(8, 16) % 4])
    assert torch.equal(method.targets, expected)
    adapter.learn(images[8:])
    answers.append(torch.full((16,), 3))
    adapter(images[:8])  # a stream that follows the epochs labels its own samples again
    assert torch.equal(method.targets, torch.cat([torch.full((8,), 3), (torch.arange(8, 16) + 1) % 4]))
    assert method.course is None


def test_a_state_of_the_middle_of_an_epoch_goes_on_the_same() -> None:
    subject = checks.subject("shot")
    whole, resumed = subject.make(), subject.make()
    batches = subject.batches(5)
    whole.begin_epoch(0, 2, batches)
    for images in batches[:5]:
        whole.learn(images)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for adapter in (whole, resumed):
        for images in batches[5:]:
            adapter.learn(images)
        adapter.begin_epoch(1, 2, batches)
        adapter.learn(subject.images)
    assert checks._same(whole.state_dict(), resumed.state_dict())


def test_several_passes_with_a_queue_run_and_the_rate_falls() -> None:
    subject = checks.subject("shot")
    adapter = subject.make()
    rates: list[float] = []
    real = adapter.steps.set_rate
    adapter.steps.set_rate = lambda lr: (rates.append(lr), real(lr))[1]  # type: ignore[method-assign,func-returns-value]
    labels = torch.arange(checks.WINDOW) % 4
    record = ttac.evaluate(
        adapter, [(images, labels[: len(images)]) for images in subject.batches()], "N-M-SF", epochs=2
    )
    assert record.samples == len(subject.images)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-3 * 11**-0.75)  # 88 samples are eleven whole windows


def test_without_pseudo_labels_nothing_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checks.subject("shot", label_weight=0.0)
    adapter = subject.make()
    monkeypatch.setattr(adapter.method, "_find_labels", lambda _batches: pytest.fail("labels were made"))
    adapter(subject.images)
    assert adapter.counters()["steps"] > 0


def test_options_are_checked_and_presets_hold(tiny_classifier: Classifier) -> None:
    for name in ("weight_decay", "entropy_weight", "diversity_weight", "label_weight", "threshold"):
        with pytest.raises(ValueError, match=name):
            ttac.adapt(tiny_classifier, "shot", **{name: -1})
    for preset in Shot.presets:
        assert ttac.adapt(tiny_classifier, "shot", preset=preset).options.window == 64
