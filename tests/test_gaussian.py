"""Every family against torch.distributions, torch.cov, and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from ttac.gaussian import (
    Diagonal,
    Full,
    Gaussians,
    Isotropic,
    LowRank,
    RunningGaussians,
    choose_family,
    divergence,
    kl_divergence,
)
from ttac.gaussian.families import FAMILIES, Covariance

D, G = 6, 3


def covariance(family: str, seed: int) -> Covariance:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if family == "full":
        root = draw(G, D, 2 * D)
        return Full(root @ root.mT / D)
    if family == "diagonal":
        return Diagonal(draw(G, D).square() + 0.1)
    if family == "low-rank":
        return LowRank(draw(G, D, 2), draw(G).square() + 0.1)
    return Isotropic(draw(G).square() + 0.1, torch.tensor(D))


def gaussians(family: str, seed: int) -> Gaussians:
    mean = torch.randn(G, D, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)
    return Gaussians(mean, covariance(family, seed))


def reference(first: Gaussians, second: Gaussians) -> Tensor:
    normals = [MultivariateNormal(each.mean, each.covariance.dense()) for each in (first, second)]
    return torch.distributions.kl_divergence(*normals)


@pytest.mark.parametrize("family", FAMILIES)
def test_divergences_equal_torch_distributions(family: str) -> None:
    source, target = gaussians(family, 0), gaussians(family, 1)
    forward, backward = reference(source, target), reference(target, source)
    torch.testing.assert_close(kl_divergence(source, target), forward, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(divergence(source, target, "one-sided"), forward, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(divergence(source, target, "symmetric"), forward + backward, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_of_equals_is_zero(family: str) -> None:
    source = gaussians(family, 0)
    torch.testing.assert_close(divergence(source, source, "symmetric"), torch.zeros(G, dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_the_interface_equal_dense_arithmetic(family: str) -> None:
    ours, other = covariance(family, 0), covariance(family, 1)
    dense, vectors = ours.dense(), torch.randn(G, D, dtype=torch.float64)
    inverse = torch.linalg.inv(dense)
    torch.testing.assert_close(ours.logdet(), torch.logdet(dense))
    torch.testing.assert_close(ours.mahalanobis(vectors), torch.einsum("gi,gij,gj->g", vectors, inverse, vectors))
    torch.testing.assert_close(ours.trace_solve(other), torch.einsum("gij,gji->g", inverse, other.dense()))
    torch.testing.assert_close(ours.diagonal(), dense.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(ours.plus(0.3).dense(), dense + 0.3 * torch.eye(D))
    factor = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(ours.scaled(factor).dense(), dense * factor[:, None, None])
    torch.testing.assert_close(ours.rows(torch.tensor([2, 0])).dense(), dense[[2, 0]])


@pytest.mark.parametrize("direction", ["one-sided", "symmetric"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_finite_differences(family: str, direction: str) -> None:
    anchors = gaussians(family, 0)
    running = RunningGaussians(gaussians(family, 1), torch.tensor([20.0, 30.0, 40.0]).double(), clip=32, rank=2)
    assignment = torch.tensor([0, 1, 1, -1, 2, 1, 0])

    def loss(features: Tensor) -> Tensor:
        blend = running.blend(features, assignment)
        return divergence(anchors.rows(blend.rows).plus(0.1), blend.gaussians.plus(0.1), direction).sum()

    features = torch.randn(len(assignment), D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (features,), eps=1e-6, atol=1e-6, rtol=1e-5)
    loss(features).backward()
    assert features.grad is not None
    assert bool((features.grad[assignment < 0] == 0).all()), "a sample that is assigned to nothing has no gradient"
    assert bool((features.grad[assignment >= 0] != 0).any(1).all())


@pytest.mark.parametrize("seed", range(5))
def test_running_statistics_equal_torch_cov_for_any_split(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(400, D, generator=generator, dtype=torch.float64) * 3 + 5
    labels = torch.randint(0, G, (400,), generator=generator)
    cuts = (
        torch.randperm(399, generator=generator)[: int(torch.randint(1, 40, (1,), generator=generator))].sort().values
        + 1
    )
    running = RunningGaussians.empty(G, D, family="full", dtype=torch.float64)
    for part, assignment in zip(features.tensor_split(cuts), labels.tensor_split(cuts), strict=True):
        running.commit(running.blend(part, assignment))
    assert running.counts.tolist() == torch.bincount(labels, minlength=G).tolist()
    for k in range(G):
        own = features[labels == k]
        torch.testing.assert_close(running.gaussians.mean[k], own.mean(0), rtol=0, atol=1e-10)
        expected = torch.cov(own.mT, correction=0)
        torch.testing.assert_close(running.gaussians.covariance.dense()[k], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_blends_to_its_part_of_the_full_update(family: str) -> None:
    start = gaussians(family, 3)
    counts = torch.tensor([5.0, 50.0, 500.0], dtype=torch.float64)
    features, assignment = torch.randn(40, D, dtype=torch.float64), torch.arange(40) % G
    dense = RunningGaussians(start.as_family("full"), counts, clip=64).blend(features, assignment).gaussians
    ours = RunningGaussians(start, counts, clip=64, rank=D).blend(features, assignment).gaussians
    torch.testing.assert_close(ours.mean, dense.mean)
    expected = dense.covariance.dense()
    if family == "diagonal":
        expected = torch.diag_embed(expected.diagonal(dim1=1, dim2=2))
    if family == "isotropic":
        expected = expected.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close(ours.covariance.dense(), expected)


def test_update_is_the_written_equation() -> None:
    start, features = gaussians("full", 3), torch.randn(10, D, dtype=torch.float64)
    running = RunningGaussians(start.rows(torch.tensor([0])), torch.tensor([100.0]).double(), clip=50)
    blend = running.blend(features, torch.zeros(10, dtype=torch.long))
    a, mean, sigma = 1 / 50, start.mean[0], start.covariance.dense()[0]
    delta = a * sum(z - mean for z in features)
    expected = sigma + a * sum(torch.outer(z - mean, z - mean) - sigma for z in features) - torch.outer(delta, delta)
    torch.testing.assert_close(blend.gaussians.mean[0], mean + delta)
    torch.testing.assert_close(blend.gaussians.covariance.dense()[0], expected)
    torch.testing.assert_close(running.gaussians.mean[0], mean)  # nothing is stored before commit


def test_a_minibatch_larger_than_the_clip_stays_positive_definite() -> None:
    features = torch.randn(256, D, dtype=torch.float64)
    running = RunningGaussians(gaussians("full", 0), torch.full((G,), 128.0).double(), clip=128)
    running.commit(running.blend(features, torch.zeros(256, dtype=torch.long)))
    torch.testing.assert_close(running.gaussians.mean[0], features.mean(0))
    torch.testing.assert_close(running.gaussians.covariance.dense()[0], torch.cov(features.mT, correction=0))
    assert running.counts[0] == 128


def test_nothing_assigned_changes_nothing() -> None:
    running = RunningGaussians(gaussians("full", 0), torch.ones(G).double())
    before = {name: tensor.clone() for name, tensor in running.state().items()}
    blend = running.blend(torch.randn(4, D, dtype=torch.float64), torch.full((4,), -1))
    running.commit(blend)
    assert len(blend.rows) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in running.state().items())


def test_low_rank_compaction_keeps_trace_and_leading_directions() -> None:
    wide = LowRank(
        torch.randn(1, 30, 20, dtype=torch.float64) * torch.logspace(0, -3, 20), torch.tensor([0.01]).double()
    )
    narrow = wide.compacted(8)
    dense, approximation = wide.dense()[0], narrow.dense()[0]
    torch.testing.assert_close(approximation.trace(), dense.trace())
    values, vectors = torch.linalg.eigh(dense)
    kept, directions = torch.linalg.eigh(approximation)
    torch.testing.assert_close(kept[-8:], values[-8:], rtol=1e-6, atol=1e-9)
    overlap = (vectors[:, -8:].mT @ directions[:, -8:]).square().sum() / 8
    assert overlap > 1 - 1e-9


def test_low_rank_running_statistics_are_exact_while_the_rank_suffices() -> None:
    basis = torch.randn(4, 20, dtype=torch.float64)
    features = torch.randn(300, 4, dtype=torch.float64) @ basis + 2
    running = RunningGaussians.empty(1, 20, family="low-rank", rank=6, dtype=torch.float64)
    for part in features.split(17):
        running.commit(running.blend(part, torch.zeros(len(part), dtype=torch.long)))
    expected = torch.cov(features.mT, correction=0)
    torch.testing.assert_close(running.gaussians.covariance.dense()[0], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("other", FAMILIES)
def test_conversion_between_families(family: str, other: str) -> None:
    source = gaussians(family, 0)
    converted = source.as_family(other, rank=D).covariance
    assert converted.family == other
    torch.testing.assert_close(converted.diagonal().sum(1), source.covariance.diagonal().sum(1))
    richness = ["isotropic", "diagonal", "full"]
    if other in ("full", "low-rank") or (family in richness and richness.index(family) <= richness.index(other)):
        torch.testing.assert_close(converted.dense(), source.covariance.dense())


def test_not_positive_definite_gives_nan_instead_of_an_exception() -> None:
    broken = Full(-torch.eye(D)[None])
    assert torch.isnan(broken.logdet()).all()
    assert torch.isnan(broken.mahalanobis(torch.ones(1, D))).all()


def test_a_thousand_classes_of_2048_features_fit() -> None:
    family, rank = choose_family(1000, 2048)
    assert family == "low-rank"
    assert 4 * 1000 * 2048 * rank <= 2 * 2**30 / 4  # anchors, target and a working copy stay far below 2 GiB
    assert choose_family(1, 2048)[0] == "full"
    assert choose_family(100_000, 4096)[0] == "diagonal"
