"""The switches that the paper's ablation tables need, each against what it is defined as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributions import MultivariateNormal

from ttac import checks
from ttac.adaptation.alignment import Alignment
from ttac.adaptation.filters import FilterKind, Remembered, filter_pseudo_labels
from ttac.adaptation.losses import filtered_labels
from ttac.gaussian import FAMILIES, Full, Gaussians, RunningGaussians, moment_distance, responsibilities
from ttac.methods.ttac import TTAC

ABLATIONS: list[dict[str, Any]] = [
    {"class_weight": 0.0},
    {"filter": "none"},
    {"filter": "posterior"},
    {"filter": "soft"},
    {"global_weight": 0.0},
    {"global_distance": "l2"},
    {"self_train_weight": 0.0},
]


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_every_switch_changes_the_outcome_and_keeps_the_promises(options: dict[str, Any]) -> None:
    # With a threshold between the posteriors of a random network, filters let some samples through and not others.
    usual: dict[str, Any] = {"tau_pp": 0.3, "filter": "temporal+posterior"}
    subject = checks.subject("ttac++", **usual | options)
    images = subject.images
    adapters = [made.make() for made in (checks.subject("ttac++", **usual), subject)]
    for adapter in adapters:
        adapter(images)
    assert not torch.equal(*(adapter.predict(images) for adapter in adapters))
    for check in (checks.state_round_trips, checks.one_class_survives, checks.batches_do_not_matter):
        check(subject)


@pytest.mark.parametrize("family", FAMILIES)
def test_soft_assignments_are_the_weighted_moments(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    weights = torch.randn(40, 3, generator=generator, dtype=torch.float64).softmax(1)
    running = RunningGaussians.empty(3, 5, family=family, rank=5, dtype=torch.float64)
    for part, share in zip(features.split(16), weights.split(16), strict=True):
        running.commit(running.blend(part, share))
    for k in range(3):
        mean = (weights[:, k, None] * features).sum(0) / weights[:, k].sum()
        covariance = torch.cov(features.mT, aweights=weights[:, k], correction=0)
        torch.testing.assert_close(running.gaussians.mean[k], mean)
        if family in ("full", "low-rank"):
            torch.testing.assert_close(running.gaussians.covariance.dense()[k], covariance)
        elif family == "diagonal":
            torch.testing.assert_close(running.gaussians.covariance.diagonal()[k], covariance.diagonal())
        else:
            assert running.gaussians.covariance.diagonal()[k, 0].item() == pytest.approx(covariance.trace().item() / 5)


def test_certain_soft_assignments_equal_hard_ones() -> None:
    features = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 3
    hard, soft = (RunningGaussians.empty(4, 4, family="full", clip=8, dtype=torch.float64) for _ in range(2))
    for rows in torch.arange(30).split(7):
        hard.commit(hard.blend(features[rows], labels[rows]))
        soft.commit(soft.blend(features[rows], torch.nn.functional.one_hot(labels[rows], 4).double()))
    torch.testing.assert_close(soft.gaussians.mean, hard.gaussians.mean)
    torch.testing.assert_close(soft.gaussians.covariance.dense(), hard.gaussians.covariance.dense())
    torch.testing.assert_close(soft.counts, hard.counts)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("none", [0, 0, 1]), ("posterior", [0, -1, 1]), ("temporal+posterior", [0, -1, -1])],
)
def test_filters_that_are_left_out_reject_nobody(kind: FilterKind, expected: list[int]) -> None:
    posterior = torch.tensor([[0.95, 0.05], [0.6, 0.4], [0.05, 0.95]])
    # The third was surer of its label before, so temporal consistency rejects it.
    memory = Remembered(
        torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.01, 0.99]]), torch.ones(3).long(), torch.zeros(3).long()
    )
    filtered = filter_pseudo_labels(posterior, memory, xi=0.9, tau_tc=-0.001, tau_pp=0.9, cooldown=5, kind=kind)
    assert filtered.assignment.tolist() == expected


def test_responsibilities_are_those_of_a_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    means = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    covariances = roots @ roots.mT + torch.eye(4, dtype=torch.float64)
    vectors = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    densities = MultivariateNormal(means, covariances).log_prob(vectors[:, None]).exp()
    expected = densities / densities.sum(1, keepdim=True)
    torch.testing.assert_close(responsibilities(Gaussians(means, Full(covariances)), vectors), expected)


def test_soft_clusters_take_every_sample_by_its_responsibility(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = checks.subject("ttac", filter="soft", queue=0, passes=1).make()
    assert isinstance(adapter.method, TTAC)
    images = checks.subject("ttac").images[: checks.WINDOW]
    anchor = adapter.method.alignments["anchor"]
    shares = anchor.share(adapter.classifier.features(images))
    torch.testing.assert_close(shares.sum(1), torch.ones(checks.WINDOW))
    monkeypatch.setattr(anchor, "share", lambda features: torch.full((len(features), 4), 0.25))
    before = anchor.running.gaussians.mean.clone()
    adapter(images)
    assert bool(((anchor.running.gaussians.mean - before).norm(dim=1) > 0).all())


def test_without_weights_the_clusters_follow_and_nothing_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = checks.subject("ttac", class_weight=0.0, global_weight=0.0).make()
    method = adapter.method
    assert isinstance(method, TTAC)
    monkeypatch.setattr(Alignment, "pull", lambda *_: pytest.fail("a pull was computed that has no weight"))
    before = {name: alignment.running.gaussians.mean.clone() for name, alignment in method.alignments.items()}
    adapter(checks.subject("ttac").images)
    for name, alignment in method.alignments.items():
        assert not torch.equal(alignment.running.gaussians.mean, before[name])


def test_inferred_anchors_leave_the_source_weights_as_an_anchor() -> None:
    images = checks.subject("ttac").images

    def distance(**options: Any) -> float:
        adapter = checks.subject("ttac", lr=0.02, **options).make()
        source = {name: value.clone() for name, value in adapter.classifier.state_dict().items()}
        adapter(images)
        moved = (value.detach() - source[name] for name, value in adapter.classifier.named_parameters())
        return sum(float(step.norm()) for step in moved)

    # Far beyond the default, so that it is seen after a few steps.
    assert distance(source_free=True, hold_weight=10.0) < 0.7 * distance(source_free=True, hold_weight=0.0)
    assert distance(hold_weight=10.0) == distance(hold_weight=0.0)  # collected anchors need no such hold


def test_filtered_labels_teach_alone() -> None:
    options = {"class_weight": 0.0, "global_weight": 0.0, "self_train_weight": 0.0, "tau_pp": 0.3}
    subject = checks.subject("ttac++", filtered_weight=1.0, **options)
    adapter, nothing = subject.make(), checks.subject("ttac++", **options).make()
    for made in (adapter, nothing):
        made(subject.images)
    assert adapter.counters()["steps"] > 0
    assert nothing.counters()["steps"] == 0
    logits, assignment = torch.randn(6, 3), torch.tensor([0, -1, 2, -1, 1, 1])
    chosen = assignment >= 0
    by_hand = torch.nn.functional.cross_entropy(logits[chosen], assignment[chosen]) * chosen.float().mean()
    torch.testing.assert_close(filtered_labels(logits, assignment), by_hand)


def test_moment_distance_is_relative_to_the_source() -> None:
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
    means = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    covariances = roots @ roots.mT
    source, target = (Gaussians(means[i : i + 1], Full(covariances[i : i + 1])) for i in range(2))
    expected = (means[0] - means[1]).dot(means[0] - means[1]) / covariances[0].trace()
    around = covariances[0].trace() ** 2 + torch.linalg.matrix_norm(covariances[0]) ** 2
    expected += 2 * ((covariances[0] - covariances[1]) ** 2).sum() / around
    assert moment_distance(source, target).item() == pytest.approx(expected.item())
    scaled = (Gaussians(3 * g.mean, Full(9 * g.covariance.dense())) for g in (source, target))
    assert moment_distance(*scaled).item() == pytest.approx(expected.item())
