"""The presets of the paper against a plain re-writing of the authors' loop: autograd, textbook KL, torch's SGD.

Draws of views and of the order of samples come from a generator of the same seed, in the same order. All is in float64:
filters are steps, running Gaussians of few samples are nearly singular, and momentum carries every difference on, so
that in float32 the roundings of two ways to compute one gradient would differ by more than 1e-4 after twenty steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence
from torch.nn import functional as F

import ttac
from ttac import Classifier, SourceStatistics
from ttac.methods.registry import methods
from ttac.model.networks import ResNet
from ttac.model.views import strong_view, weak_view

CLASSES, SIDE, WINDOWS = 4, 16, 4
WINDOW, QUEUE, CLIP_GLOBAL, CLIP_CLASS = 32, 96, 160, 32
SIZES: dict[str, Any] = {
    "window": WINDOW, "queue": QUEUE, "clip_global": CLIP_GLOBAL, "clip_class": CLIP_CLASS, "samples_a_pass": WINDOW,
}  # fmt: skip


def draw(count: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw digits of a kind: a pattern of strokes for each class, at any brightness, under noise."""
    generator = torch.Generator().manual_seed(seed)
    strokes = torch.rand(CLASSES, 3, SIDE // 4, SIDE // 4, generator=torch.Generator().manual_seed(9)).double()
    labels = torch.randint(CLASSES, (count,), generator=generator)
    light = 0.5 + 0.5 * torch.rand(count, 1, 1, 1, generator=generator).double()
    images = light * F.interpolate(strokes, scale_factor=4)[labels]
    images = images + noise * torch.randn(images.shape, generator=generator).double()
    return images.clamp(0, 1), labels


@pytest.fixture(scope="module")
def source() -> tuple[Classifier, SourceStatistics]:
    """A small network that has learned the classes, and its statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = Classifier(ResNet(8, CLASSES, width=4).double(), mean=0, std=1)
    images, labels = draw(512, 0.1, 0)
    optimizer = torch.optim.Adam(classifier.parameters(), 3e-3)
    classifier.train()
    for step in range(48):
        rows = torch.arange(512).roll(64 * step)[:64]
        loss = F.cross_entropy(classifier(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    classifier.eval()
    return classifier, SourceStatistics.collect(classifier, [(images, labels)])


@dataclass
class Run:
    """What the plain loop gives, and what happened in it."""

    posteriors: list[Tensor] = field(default_factory=list)
    model: Classifier | None = None
    steps: int = 0
    inconsistent: int = 0  # samples that temporal consistency rejects
    waiting: int = 0  # consistent ones that are still out
    unsure: int = 0
    taught: int = 0
    pulled: int = 0  # by the Gaussian of their class
    visits: int = 0


class Gaussian:
    """One running Gaussian: `alpha` is one by the count, up to the clip."""

    def __init__(self, dim: int, clip: int) -> None:
        self.mean, self.covariance, self.count, self.clip = torch.zeros(dim).double(), torch.zeros(dim, dim), 0, clip

    def update(self, features: Tensor) -> tuple[Tensor, Tensor]:
        assert len(features) <= self.clip  # beyond it the past would weigh negatively, which is not reproduced
        self.count += len(features)
        alpha = 1 / min(self.count, self.clip)
        deviations = features - self.mean
        delta = alpha * deviations.sum(0)
        mean = self.mean + delta
        scatter = deviations.T @ deviations - len(features) * self.covariance
        covariance = self.covariance + alpha * scatter - torch.outer(delta, delta)
        self.mean, self.covariance = mean.detach(), covariance.detach()
        return mean, covariance


def plain(source: Classifier, stats: SourceStatistics, images: Tensor, self_train: bool) -> Run:
    """The authors' loop over the queue, as their script has it."""
    run, iters = Run(), 4
    model = run.model = source.copy()
    model.requires_grad_(False)
    backbone = [value.requires_grad_(True) for name, value in model.named_parameters() if ".fc." not in name]
    optimizer = torch.optim.SGD(backbone, lr=0.01, momentum=0.9)
    mean_all, covariance_all = stats.overall.mean[0], stats.overall.covariance.dense()[0]
    dim = len(mean_all)
    ridge = covariance_all.max() / 30 * torch.eye(dim).double()

    def both_ways(mean: Tensor, covariance: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        here = MultivariateNormal(mean, covariance + ridge)
        there = MultivariateNormal(target[0], target[1] + ridge)
        return kl_divergence(here, there) + kl_divergence(there, here)

    running = [Gaussian(dim, CLIP_CLASS) for _ in range(CLASSES)]
    running_all = Gaussian(dim, CLIP_GLOBAL)
    average = torch.zeros(len(images), CLASSES)  # of each sample's posteriors
    alpha = torch.ones(len(images))  # 1: takes part; rejected: 0, and a fifth more with every pass
    generator = torch.Generator().manual_seed(0)
    indices: list[int] = []
    for arrived in torch.arange(len(images)).split(WINDOW):
        indices = [*indices, *arrived.tolist()][-QUEUE:]
        slots = sorted(indices, key=lambda index: index % QUEUE)  # the order in which the package's queue has them
        model.train()
        for iteration in range(min(iters, len(indices) // WINDOW + 1) + 1):
            if iteration > 0:
                alpha = torch.where(alpha < 1, alpha + 0.2, torch.ones_like(alpha))
            order = torch.tensor(slots)[torch.randperm(len(slots), generator=generator)]
            for batch in order.split(WINDOW):
                weak = weak_view(images[batch], generator, flip=True, crop=False)
                views = [weak, strong_view(images[batch], generator, flip=True)] if self_train else [weak]
                features, logits = model.features_and_logits(torch.cat(views))
                if iteration == 0:
                    continue  # the statistics of batch-norm have moved, which is all
                weak_features, weak_logits = features[:WINDOW], logits[:WINDOW]
                loss = torch.zeros(()).double()
                if self_train:
                    sure, target = weak_logits.softmax(-1).detach().max(-1)
                    mask = sure.ge(0.95)
                    loss = loss + (F.cross_entropy(logits[WINDOW:], target, reduction="none") * mask).mean()
                    run.taught += int(mask.sum())
                with torch.no_grad():
                    model.eval()
                    posterior = model(weak).softmax(-1).float()
                    model.train()
                value, place = posterior.max(1)
                accepted = value > average[batch, place] - 0.001
                alpha[batch] = torch.where(accepted, alpha[batch], 0.0)
                known = average[batch] != 0
                average[batch] = torch.where(known, 0.1 * average[batch] + 0.9 * posterior, posterior)
                sure, labels = average[batch].max(1)
                chosen = (alpha[batch] == 1) & (sure > 0.9)
                run.inconsistent += int((~accepted).sum())
                run.waiting += int((accepted & (alpha[batch] < 1)).sum())
                run.unsure += int((sure <= 0.9).sum())
                for k in range(CLASSES):
                    own = weak_features[chosen & (labels == k)]
                    if not len(own):
                        continue
                    target_k = running[k].update(own)
                    if iteration > iters // 2:
                        run.pulled += len(own)
                        anchor = stats.classes.mean[k], stats.classes.covariance.dense()[k]
                        loss = loss + 0.05 * both_ways(*anchor, target_k) / CLASSES
                loss = loss + 0.05 * both_ways(mean_all, covariance_all, running_all.update(weak_features))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.steps += 1
                run.visits += len(batch)
        model.eval()
        with torch.no_grad():
            run.posteriors.append(model(images[arrived]).softmax(1))
    return run


@pytest.mark.parametrize("method", ["ttac", "ttac++"])
def test_the_preset_is_the_authors_loop(method: str, source: tuple[Classifier, SourceStatistics]) -> None:
    classifier, stats = source
    images, _ = draw(WINDOW * WINDOWS, 0.2, 1)
    adapter = ttac.adapt(classifier, method, stats=stats, preset="paper", **SIZES)
    expected = plain(classifier, stats, images, self_train=method == "ttac++")
    for window, posterior in zip(images.split(WINDOW), expected.posteriors, strict=True):
        torch.testing.assert_close(adapter(window).softmax(1), posterior, rtol=0, atol=1e-4)
    assert expected.model is not None
    theirs = expected.model.state_dict()
    for name, value in adapter.classifier.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)

    # Nothing of this was idle.
    assert adapter.counters()["steps"] == expected.steps == 32  # 1 minibatch x 2 passes, 2 x 3, 3 x 4, 3 x 4
    before = dict(classifier.named_parameters())
    moved = [(value - before[name]).detach().norm() for name, value in adapter.classifier.named_parameters()]
    assert float(torch.stack(moved).norm()) > 0.1
    for some in (expected.inconsistent, expected.waiting, expected.unsure, expected.pulled):
        assert 0 < some < 0.9 * expected.visits
    assert (expected.taught > 0) is (method == "ttac++")


@pytest.mark.parametrize("method", ["ttac", "ttac++", "ttac+shot"])
@pytest.mark.parametrize("preset", ["paper", "paper-cifar100", "paper-visda", "paper-imagenet"])
def test_presets_say_all_that_could_change_them(method: str, preset: str) -> None:
    """Defaults are ours to tune: what a preset leaves to them must not be part of the update."""
    found = methods()[method]
    left = set(vars(found.options_type())) - set(found.presets[preset])
    # The rate of a step is given, stored statistics have a momentum, and strong views are TTAC++'s alone.
    beside = {"seed", "reset_every", "rate", "bn_clip", "contrastive_weight"}
    assert left == beside | (set() if method == "ttac++" else {"strong", "operations", "magnitude"})


def test_the_preset_works_with_inferred_anchors(source: tuple[Classifier, SourceStatistics]) -> None:
    classifier, _ = source
    images, _ = draw(2 * WINDOW, 0.2, 1)
    adapter = ttac.adapt(classifier, "ttac++", stats=SourceStatistics.infer(classifier), preset="paper", **SIZES)
    assert bool(adapter(images).isfinite().all())
    assert adapter.counters()["skipped_steps"] == 0
