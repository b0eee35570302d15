"""TTAC++ deep on digits under noise and blur: it beats BN, and a weight ten times too large does not break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ttac
from ttac import Classifier, SourceStatistics
from ttac.data.corruptions import Corruption
from ttac.data.sets.digits import load_digits
from ttac.model.networks import ResNet
from ttac.source.train import Recipe, train_source

WINDOW = 50
SHIFTS = (Corruption("gaussian_noise", strength=(0.4,), seed=5), Corruption("contrast", seed=5))


@pytest.fixture(scope="module")
def source() -> tuple[Classifier, SourceStatistics]:
    images, labels = load_digits("train", 5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        network = ResNet(8, 10, channels=1, width=8, stem_stride=2)
    classifier = Classifier(network, mean=(float(images.mean()),), std=(float(images.std()),))
    train_source(classifier, (255 * images).round().byte(), labels, Recipe(8, batch=64, flip=False, seed=5))
    return classifier, SourceStatistics.collect(classifier, [(images, labels)])


def wrong(source: tuple[Classifier, SourceStatistics], method: str, **options: Any) -> float:
    """Percent of wrong answers over both shifts, 600 digits each."""
    classifier, stats = source
    clean, labels = load_digits("test", 5)
    clean, labels = clean[:600], labels[:600]
    found: list[Tensor] = []
    for shift in SHIFTS:
        images = shift((255 * clean).round().byte(), torch.arange(len(clean))).float() / 255
        adapter = ttac.adapt(classifier, method, stats=stats, window=WINDOW, **options)
        found += [
            (adapter(part).argmax(1) != truth)
            for part, truth in zip(images.split(WINDOW), labels.split(WINDOW), strict=True)
        ]
    return 100 * float(torch.cat(found).float().mean())


def test_it_beats_bn_and_cannot_diverge(source: tuple[Classifier, SourceStatistics]) -> None:
    options = {"queue": 0, "passes": 1, "flip": False}
    bn = wrong(source, "bn")
    assert wrong(source, "ttac++", preset="deep", **options) < bn - 1
    assert wrong(source, "ttac++", preset="deep", **options, depth_weight=200.0) < bn + 1


def test_distances_are_told_in_units_of_the_source(source: tuple[Classifier, SourceStatistics]) -> None:
    classifier, stats = source
    images, _ = load_digits("test", 5)
    told = []
    for batch in (images[:WINDOW], SHIFTS[0]((255 * images[:WINDOW]).byte(), torch.arange(WINDOW)).float() / 255):
        adapter = ttac.adapt(classifier, "ttac++", stats=stats, preset="deep", window=WINDOW, queue=0, passes=1)
        adapter(batch)
        told.append(float(adapter.last_step.measures["distance to the source"]))
    clean, noisy = told
    assert 0.3 < clean < 3
    assert noisy > 3 * clean


def test_statistics_without_depths_are_refused(source: tuple[Classifier, SourceStatistics]) -> None:
    classifier, stats = source
    with pytest.raises(ValueError, match="collect them again"):
        ttac.adapt(classifier, "ttac++", stats=replace(stats, depths={}, floors={}), preset="deep")


def test_without_source_data_it_beats_bn_too(source: tuple[Classifier, SourceStatistics]) -> None:
    classifier, _ = source
    inferred = (classifier, SourceStatistics.infer(classifier))
    options = {"queue": 0, "passes": 1, "flip": False, "strong": "own-range"}  # of faint digits too
    assert wrong(inferred, "ttac++", preset="deep", **options) < wrong(inferred, "bn") - 1


def test_without_source_data_depths_compare_what_enters_batch_norm(source: tuple[Classifier, SourceStatistics]) -> None:
    classifier, _ = source
    images = SHIFTS[0]((255 * load_digits("test", 5)[0][:WINDOW]).byte(), torch.arange(WINDOW)).float() / 255
    adapter = ttac.adapt(
        classifier, "ttac++", stats=SourceStatistics.infer(classifier), preset="deep", window=WINDOW, queue=0, passes=1,
        flip=False, self_train_weight=0.0,
    )  # fmt: skip
    plain = classifier.copy().train()
    layers = {name: layer for name, layer in plain.named_modules() if isinstance(layer, torch.nn.BatchNorm2d)}
    stored = {name: (layer.running_mean.clone(), layer.running_var.clone()) for name, layer in layers.items()}
    found: list[float] = []

    def compare(name: str, entering: Tensor) -> None:
        mean, variance = stored[name]
        vectors, ridge = entering.detach().transpose(0, 1).flatten(1), variance.max() / 30
        here = torch.distributions.Normal(vectors.mean(1), (vectors.var(1, correction=0) + ridge).sqrt())
        there = torch.distributions.Normal(mean, (variance + ridge).sqrt())
        kl = torch.distributions.kl_divergence
        found.append(float((kl(here, there) + kl(there, here)).mean()))

    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, given, name=name: compare(name, given[0]))
    with torch.no_grad():
        plain(images)
    adapter(images)
    assert float(adapter.last_step.losses["depths"]) == pytest.approx(20 * sum(found) / len(found), rel=1e-3)


def test_batch_norm_that_no_weight_moves_or_no_pass_runs_is_left_out() -> None:
    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.unused = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(5)
            self.rest = ResNet(8, 4, width=4)
            self.fc, self.rest.fc = self.rest.fc, torch.nn.Identity()

        def forward(self, images: Tensor) -> Tensor:
            return self.fc(self.rest(self.norm(images)))

    classifier = Classifier(First(), mean=0, std=1)
    adapter = ttac.adapt(
        classifier, "ttac++", stats=SourceStatistics.infer(classifier), preset="deep", window=8, queue=0, passes=1
    )
    assert adapter(torch.rand(8, 3, 16, 16)).isfinite().all()
    assert adapter.counters()["steps"] == 1
    assert float(adapter.last_step.losses["depths"]) > 0
