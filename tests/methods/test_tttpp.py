"""TTT++ against the published losses, written down naively, and what its protocols admit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ttac
from ttac import Classifier, SourceStatistics, checks
from ttac.adaptation.step import Loss
from ttac.evaluation.protocols import ProtocolError
from ttac.gaussian import Full, Gaussians, moment_distance
from ttac.methods.tttpp import TTTPlusPlus
from ttac.model.branches import ContrastiveBranch
from ttac.model.views import strong_view

CLIP = 32


def matched(source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """What the published loss is for a weight of 1, where batches of the source are of a Gaussian and n - 1 is n."""
    (mean_s, cov_s), (mean_t, cov_t) = source, target
    of_means = 2 * cov_s.trace() / CLIP
    of_covariances = 2 * (cov_s.trace() ** 2 + cov_s.square().sum()) / CLIP
    return (cov_s - cov_t).square().sum() / of_covariances + 0.5 * (mean_s - mean_t).square().sum() / of_means


@pytest.mark.parametrize("dim", [3, 40])
def test_weights_refer_to_batches_of_the_source_as_published(dim: int) -> None:
    """The published normalisation, measured on batches of a source: one is the reference of all others."""
    generator = torch.Generator().manual_seed(dim)
    root = torch.randn(dim, dim, generator=generator, dtype=torch.float64) / torch.arange(1, dim + 1)
    source = torch.randn(dim, generator=generator, dtype=torch.float64), root @ root.T

    def moments(count: int) -> tuple[Tensor, Tensor]:
        batch = source[0] + torch.randn(count, dim, generator=generator, dtype=torch.float64) @ root.T
        return batch.mean(0), torch.cov(batch.T)

    def published(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
        mmd = (first[0] - second[0]).square().mean()
        return torch.stack([(first[1] - second[1]).square().sum() / (4 * dim**2), mmd])

    # Many references, as a single one is a draw of its own.
    apart = torch.stack([published(moments(400), moments(400)) for _ in range(800)]).mean(0)
    target = source[0] + 1, 2 * source[1]
    expected = 0.05 * (published(source, target) * torch.tensor([1, 0.5]) / apart).sum()
    ours = moment_distance(*(Gaussians(mean[None], Full(cov[None])) for mean, cov in (source, target)))
    torch.testing.assert_close(0.05 * 400 / 4 * ours.sum(), expected, rtol=0.05, atol=0)


def mixed(past: tuple[Tensor, Tensor], vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the past, which counts as what is left of the clip, and of the vectors together."""
    mean, cov = past
    share = len(vectors) / CLIP
    own_mean, own_cov = vectors.mean(0), torch.cov(vectors.mT, correction=0)
    gap = own_mean - mean
    return mean + share * gap, (1 - share) * cov + share * own_cov + share * (1 - share) * torch.outer(gap, gap)


def naive_contrast(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    both = torch.cat([first, second])
    count = len(first)
    terms = []
    for i in range(2 * count):
        partner = (i + count) % (2 * count)
        others = torch.stack([(both[i] @ both[j] / temperature).exp() for j in range(2 * count) if j != i])
        terms.append(-((both[i] @ both[partner] / temperature).exp() / others.sum()).log())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("contrastive_weight", [0.0, 0.4])
def test_steps_are_the_written_algorithm(contrastive_weight: float) -> None:
    subject = checks.subject(
        "ttt++", queue=0, passes=1, flip=False, operations=0, lr=0.05, clip=CLIP,
        feature_weight=0.1, projection_weight=0.04, contrastive_weight=contrastive_weight,
    )  # fmt: skip
    adapter = subject.make()
    method = adapter.method
    assert isinstance(method, TTTPlusPlus)
    stats, model = adapter.stats, adapter.classifier.copy()
    assert stats is not None
    adapter(subject.images[: 2 * checks.WINDOW])

    source = stats.overall.mean[0], stats.overall.covariance.dense()[0]
    anchors = {"features": source}
    if stats.projected is not None:
        anchors["projections"] = stats.projected.mean[0], stats.projected.covariance.dense()[0]
    running = dict(anchors)
    backbone = [value for name, value in model.named_parameters() if ".fc." not in name and "branch" not in name]
    optimizer = torch.optim.SGD([value.requires_grad_() for value in backbone], lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm2d)
    for images in subject.batches()[:2]:
        images = images[torch.randperm(len(images), generator=generator)]
        features = model.features(images)
        target = {"features": mixed(running["features"], features)}
        loss = 0.1 * matched(source, target["features"])
        if contrastive_weight:
            assert isinstance(model.branch, ContrastiveBranch)
            projections = model.branch(features)
            strong = strong_view(images, generator, flip=False, kind="own-range", operations=0)
            target["projections"] = mixed(running["projections"], projections)
            loss = loss + 0.04 * matched(anchors["projections"], target["projections"])
            loss = loss + contrastive_weight * naive_contrast(projections, model.branch(model.features(strong)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = {name: (mean.detach(), cov.detach()) for name, (mean, cov) in target.items()}
    moved = dict(adapter.classifier.named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(moved[name], value, rtol=1e-3, atol=2e-5, msg=name)
    for name, (mean, covariance) in running.items():
        found = method.alignments[name].running.gaussians
        torch.testing.assert_close(found.mean[0], mean, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found.covariance.dense()[0], covariance, rtol=1e-3, atol=1e-5)


def test_the_published_numbers_are_the_defaults() -> None:
    names = ("lr", "clip", "feature_weight", "projection_weight", "window", "momentum", "trust")
    wide = TTTPlusPlus.options_type(**TTTPlusPlus.presets["paper-cifar100"])
    assert [getattr(TTTPlusPlus.options_type(), name) for name in names] == [0.01, 1536, 0.05, 0.2, 256, 0.9, 0.0]
    assert [getattr(wide, name) for name in names] == [0.0001, 2048, 5.0, 20.0, 256, 0.9, 0.0]


def test_inferred_statistics_match_means_alone() -> None:
    subject = checks.subject("ttt++", source_free=True, queue=0, passes=1)
    adapter = subject.make()
    assert bool(adapter(subject.images).isfinite().all())
    assert adapter.counters()["steps"] == 5


def test_protocols_admit_the_branch_where_source_training_had_it() -> None:
    plain = checks.subject("ttt++")
    stream = [(images, torch.arange(len(images)) % 4) for images in plain.batches()]
    assert ttac.evaluate(plain.make(), stream, "N-O-SL").counters["steps"] > 0
    assert ttac.evaluate(plain.make(), stream, "N-M-SL", epochs=2).samples == len(plain.images)
    with pytest.raises(ProtocolError, match="Y-O-SL is for models trained with a branch"):
        ttac.evaluate(plain.make(), stream, "Y-O-SL")
    with pytest.raises(ProtocolError, match="not defined under N-O-SF"):
        ttac.evaluate(plain.make(), stream, "N-O-SF")
    branched = checks.subject("ttt++", contrastive_weight=1.0, operations=0, passes=1)
    for protocol in ("N-O-SL", "N-M-SL"):
        with pytest.raises(ProtocolError, match="uses the model's contrastive branch: switch that off"):
            ttac.evaluate(branched.make(), stream, protocol)
    known = ttac.evaluate(branched.make(), stream, "Y-O-SL").provenance["knowledge"]
    assert known["contrastive branch"] == {"level": "objective", "branch": "contrastive branch"}
    assert known["statistics"]["level"] == "light"
    assert ttac.evaluate(branched.make(), stream, "Y-M-SL", epochs=2).provenance["epochs"] == 2


def test_statistics_without_projections_are_refused_with_the_branch(tiny_classifier: Classifier) -> None:
    tiny_classifier.branch = ContrastiveBranch(tiny_classifier.feature_dim)
    images, labels = torch.rand(40, 3, 8, 8), torch.arange(40) % 10
    stats = SourceStatistics.collect(tiny_classifier, [(images, labels)])
    without = replace(stats, projected=None)
    options = {"stats": without, "contrastive_weight": 1.0}
    with pytest.raises(ValueError, match=r"collect them again with SourceStatistics\.collect and the model with its"):
        ttac.adapt(tiny_classifier, "ttt++", **options)
    both = ("statistics", "contrastive branch")
    assert ttac.adapt(tiny_classifier, "ttt++", **options, projection_weight=0.0).uses == both
    assert ttac.adapt(tiny_classifier, "ttt++", stats=stats, contrastive_weight=1.0).uses == both
    unused = ttac.adapt(tiny_classifier, "ttt++", stats=without)
    assert (unused.uses, unused.brings, tuple(unused.knowledge)) == (("statistics",), both, ("statistics",))
    assert unused.classifier.branch is None


def test_values_that_make_no_sense_are_refused() -> None:
    for name, value in (("clip", 0), ("feature_weight", -1.0), ("projection_weight", -1.0), ("predict", "during")):
        with pytest.raises(ValueError, match=name):
            TTTPlusPlus.options_type(**{name: value})


def test_matching_lowers_the_distance_of_a_shifted_stream() -> None:
    subject = checks.subject("ttt++", window=16, queue=0, passes=4, clip=64, lr=3e-4)
    adapter = subject.make()
    method = adapter.method
    assert isinstance(method, TTTPlusPlus)
    distances = []
    real = adapter.steps.take

    def spy(losses: Mapping[str, Loss], sound: Tensor | None) -> bool:
        distances.append(float(method.alignments["features"].distances()))
        return real(losses, sound)

    adapter.steps.take = spy  # type: ignore[assignment,method-assign]
    for _ in range(6):
        adapter(subject.images[:16].square())
    assert math.isfinite(distances[-1])
    assert distances[-1] < 0.5 * max(distances)
