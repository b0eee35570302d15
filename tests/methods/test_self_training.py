"""Self-Training against FixMatch's unlabelled term, written down naively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ttac
from ttac import Classifier, checks
from ttac.model.views import strong_view, weak_view


def test_it_is_the_unlabelled_term_of_fixmatch() -> None:
    # A queue of two windows, two passes.
    subject = checks.subject("self-training", lr=0.1, momentum=0.9, trust=0.0, tau_st=0.4, bn_clip=1)
    adapter = subject.make()
    model = adapter.classifier.copy().requires_grad_(True)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    backbone = [value for name, value in model.named_parameters() if ".fc." not in name]
    optimizer = torch.optim.SGD(backbone, 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    used = []
    adapter(subject.images[:16])
    for queue in (subject.images[:8], subject.images[:16]):
        for _ in range(2):
            for slots in torch.randperm(len(queue), generator=generator).tensor_split(len(queue) // 8):
                images = queue[slots]
                for module in norms:
                    module.train()
                    module.momentum = 1.0
                with torch.no_grad():
                    posterior = model(weak_view(images, generator, flip=True, crop=False)).softmax(1)
                for module in norms:
                    module.momentum = 0.0
                logits = model(strong_view(images, generator, flip=True))
                model.eval()
                loss = torch.zeros(())
                for row, q in zip(logits, posterior, strict=True):
                    if q.max() >= 0.4:
                        loss = loss - row.log_softmax(0)[q.argmax()] / len(images)
                used.append(float((posterior.amax(1) >= 0.4).float().mean()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert 0 < sum(used) / len(used) < 1
    torch.testing.assert_close(adapter.predict(subject.images), model(subject.images).detach(), rtol=1e-3, atol=1e-4)
    assert torch.equal(adapter.classifier.head.weight, subject.make().classifier.head.weight)


def test_several_passes_run() -> None:
    subject = checks.subject("self-training")
    adapter = subject.make()
    labels = torch.arange(checks.WINDOW) % 4
    stream = [(images, labels[: len(images)]) for images in subject.batches()]
    record = ttac.evaluate(adapter, stream, "N-M-SF", epochs=2)
    assert record.samples == len(subject.images)
    assert adapter.counters()["samples"] == 2 * len(subject.images)
    # The first window finds half of the queue filled and makes one minibatch of it a pass, the ten others two.
    assert adapter.counters()["steps"] == 2 * (1 + 2 * 10)


def test_what_the_weak_view_is_not_sure_of_teaches_nothing() -> None:
    subject = checks.subject("self-training", tau_st=1.0)
    adapter = subject.make()
    before = {name: value.detach().clone() for name, value in adapter.classifier.named_parameters()}
    adapter(subject.images)
    assert all(torch.equal(value, before[name]) for name, value in adapter.classifier.named_parameters())


def test_it_learns_a_stream_that_it_is_mostly_right_about() -> None:
    """On two separable classes seen through a shift in brightness, the confident samples teach the others."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    labels = torch.arange(256) % 2
    images = torch.rand(256, 3, 8, 8) * 0.4
    images[labels == 1, 0] += 0.3
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
    options: dict[str, Any] = {"window": 32, "lr": 0.05, "tau_st": 0.8, "strong": "own-range", "operations": 0}
    adapter = ttac.adapt(Classifier(network.eval(), mean=0, std=1), "self-training", **options)
    shifted = (images + 0.1).clamp(0, 1)
    losses = [float(F.cross_entropy(adapter.predict(shifted), labels))]
    adapter(shifted)
    losses.append(float(F.cross_entropy(adapter.predict(shifted), labels)))
    assert losses[1] < losses[0]


def test_options_are_checked(tiny_classifier: Classifier) -> None:
    for name, value in (
        ("tau_st", 1.1),
        ("operations", -1),
        ("magnitude", 31),
        ("strong", "weak"),
        ("predict", "during"),
    ):
        with pytest.raises(ValueError, match=name):
            ttac.adapt(tiny_classifier, "self-training", **{name: value})
    with pytest.raises(ValueError, match="this model is a linear head alone"):
        ttac.adapt(Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), mean=0, std=1), "self-training")
