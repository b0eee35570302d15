"""Every family against torch.distributions, torch.cov, and dense arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from references.gaussians import D, G, copied, gaussians, make_covariance, stored
from ttac.gaussian import (
    FAMILIES,
    Covariance,
    Diagonal,
    Full,
    Gaussians,
    Isotropic,
    LowRank,
    RunningGaussians,
    choose_family,
    covariance,
    divergence,
    kl_divergence,
    responsibilities,
)


def own_part(family: str, matrix: Tensor) -> Tensor:
    """Project `[G, D, D]` on what a family can hold after an update."""
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    if family == "isotropic":
        diagonal = diagonal.mean(1, keepdim=True).expand_as(diagonal)
    return torch.diag_embed(diagonal) if family in ("diagonal", "isotropic") else matrix


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
def test_responsibilities_with_a_ridge_are_those_of_a_mixture(family: str) -> None:
    mixture, vectors = gaussians(family, 0), torch.randn(7, D, dtype=torch.float64)
    normals = MultivariateNormal(mixture.mean, mixture.covariance.dense() + 0.3 * torch.eye(D).double())
    densities = normals.log_prob(vectors[:, None]).exp()
    expected = densities / densities.sum(1, keepdim=True)
    torch.testing.assert_close(responsibilities(mixture, vectors, 0.3), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_the_interface_equal_dense_arithmetic(family: str, prepared: bool) -> None:
    ours, other = make_covariance(family, 0), make_covariance(family, 1)
    if prepared:
        ours.prepare()
    dense, vectors, direction = ours.dense(), torch.randn(G, 4, D).double(), torch.randn(G, D).double()
    inverse = torch.linalg.inv(dense)
    torch.testing.assert_close(ours.logdet(), torch.logdet(dense))
    torch.testing.assert_close(ours.apply(vectors), vectors @ dense)
    torch.testing.assert_close(ours.solve(vectors), vectors @ inverse)
    outer = own_part(family, direction[:, :, None] * direction[:, None])
    torch.testing.assert_close(ours.outer(direction, vectors), vectors @ outer)
    torch.testing.assert_close(ours.trace_solve(other), torch.einsum("gij,gji->g", inverse, other.dense()))
    torch.testing.assert_close(ours.diagonal(), dense.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(ours.squared_norm(), torch.linalg.matrix_norm(dense).square())
    torch.testing.assert_close(ours.plus(0.3).dense(), dense + 0.3 * torch.eye(D))
    keep, roots = torch.tensor([0.5, 1.0, 0.0]).double(), torch.randn(G, 4, D).double()
    blended = ours.blended(keep, roots, ridge=0.2).dense()
    added = own_part(family, roots.mT @ roots)
    torch.testing.assert_close(blended, keep[:, None, None] * dense + added + 0.2 * torch.eye(D))
    for rows in ([2, 0], [1]):
        taken = ours.rows(torch.tensor(rows))
        torch.testing.assert_close(taken.dense(), dense[rows])
        torch.testing.assert_close(taken.solve(vectors[rows]), vectors[rows] @ inverse[rows])


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
def test_each_family_stores_its_part_of_the_written_equation(family: str) -> None:
    start = gaussians(family, 3)
    if family == "low-rank":
        start = start.as_family(family, rank=D)  # room for all directions
    counts = torch.tensor([5.0, 50.0, 500.0], dtype=torch.float64)
    # One Gaussian has many samples, one has few, one has a single one, and some samples belong to none.
    features, assignment = torch.randn(40, D, dtype=torch.float64), torch.tensor([0] * 30 + [1] * 5 + [2] + [-1] * 4)
    running = RunningGaussians(start, counts, clip=64)
    blend = running.blend(features, assignment)
    torch.testing.assert_close(running.gaussians.mean, start.mean, rtol=0, atol=0)  # nothing is stored before commit
    running.commit(blend)
    assert running.counts.tolist() == [35, 55, 64]
    for k, count in enumerate((35, 55, 64)):
        a, mean, sigma, own = 1 / count, start.mean[k], start.covariance.dense()[k], features[assignment == k]
        delta = a * sum(z - mean for z in own)
        expected = sigma + a * sum(torch.outer(z - mean, z - mean) - sigma for z in own) - torch.outer(delta, delta)
        torch.testing.assert_close(running.gaussians.mean[k], mean + delta)
        stored = running.gaussians.covariance.dense()[k]
        torch.testing.assert_close(stored, own_part(family, expected[None])[0])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_any_size_give_the_same(family: str, soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(30, D, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0] * 20 + [1] * 3 + [2] * 4 + [-1] * 3)
    assignment = torch.randn(30, G, generator=generator).softmax(1).double() if soft else labels
    states = []
    for size in (1, 700, 2**20):
        monkeypatch.setattr(covariance, "CHUNK", size)
        running = RunningGaussians(gaussians(family, 3), torch.tensor([5.0, 50.0, 500.0]).double(), clip=64)
        blend = running.blend(features, assignment)
        assert size > 1 or all(len(part.rows) == 1 for part in blend.parts)
        running.commit(blend)
        states.append(stored(running))
    for state in states[1:]:
        for name, tensor in state.items():
            # The sign of a direction is free.
            found, expected = (
                each[name] @ each[name].mT if name == "factor" else each[name] for each in (state, states[0])
            )
            torch.testing.assert_close(found, expected, msg=f"{name} {tensor.shape}")


def test_a_large_class_does_not_widen_the_small_ones() -> None:
    running = RunningGaussians.empty(200, D, family="low-rank", rank=2)
    labels = torch.cat([torch.zeros(100), torch.arange(1, 151)]).long()
    blend = running.blend(torch.randn(250, D), labels[torch.randperm(250)])
    assert sum(part.weights.numel() for part in blend.parts) <= 2 * 250
    rows = torch.cat([part.rows for part in blend.parts])
    assert rows.sort().values.tolist() == list(range(151))


def test_a_minibatch_larger_than_the_clip_stays_positive_definite() -> None:
    features = torch.randn(256, D, dtype=torch.float64)
    running = RunningGaussians(gaussians("full", 0), torch.full((G,), 128.0).double(), clip=128)
    running.commit(running.blend(features, torch.zeros(256, dtype=torch.long)))
    torch.testing.assert_close(running.gaussians.mean[0], features.mean(0))
    torch.testing.assert_close(running.gaussians.covariance.dense()[0], torch.cov(features.mT, correction=0))
    assert running.counts[0] == 128


def test_nothing_assigned_changes_nothing() -> None:
    running = RunningGaussians(gaussians("full", 0), torch.ones(G).double())
    before = copied(running)
    blend = running.blend(torch.randn(4, D, dtype=torch.float64), torch.full((4,), -1))
    running.commit(blend)
    assert len(blend.parts) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored(running).items())


def test_a_commit_forgets_the_inverses_from_before() -> None:
    running = RunningGaussians(gaussians("full", 0), torch.ones(G).double())
    running.gaussians.covariance.prepare()
    running.commit(running.blend(torch.randn(9, D, dtype=torch.float64), torch.arange(9) % G))
    vectors = torch.randn(G, 1, D, dtype=torch.float64)
    solved = running.gaussians.covariance.plus(0.1).solve(vectors)
    torch.testing.assert_close(solved, vectors @ torch.linalg.inv(running.gaussians.plus(0.1).covariance.dense()))
    assert "precision" not in running.gaussians.covariance.__dict__


@pytest.mark.parametrize("family", FAMILIES)
def test_a_load_forgets_the_inverses_from_before(family: str) -> None:
    running = RunningGaussians(gaussians(family, 0), torch.ones(G).double())
    vectors = torch.randn(G, 1, D, dtype=torch.float64)
    running.gaussians.covariance.prepare()
    running.gaussians.covariance.solve(vectors)
    other = RunningGaussians(gaussians(family, 1), torch.ones(G).double())
    running.load_state(other.state())
    expected = vectors @ torch.linalg.inv(other.gaussians.covariance.dense())
    torch.testing.assert_close(running.gaussians.covariance.solve(vectors), expected)


@pytest.mark.parametrize(
    ("family", "place", "shape"),
    [("full", ("gaussians", "mean"), (1, D)), ("full", ("counts",), ()), ("full", ("counts",), (G + 1,)),
     ("full", ("gaussians", "covariance", "matrix"), (1, D, D)),
     ("low-rank", ("gaussians", "covariance", "factor"), (G, D, 1)),
     ("low-rank", ("gaussians", "covariance", "factor"), (G, D, 3)),
     ("diagonal", ("gaussians", "covariance", "variance"), (G, 1))],
)  # fmt: skip
def test_a_state_of_other_shapes_is_refused(family: str, place: tuple[str, ...], shape: tuple[int, ...]) -> None:
    running = RunningGaussians(gaussians(family, 0), torch.ones(G).double())
    for damage in ("another shape", "missing"):
        state = RunningGaussians(gaussians(family, 1), 2 * torch.ones(G).double()).state()
        *outer, name = place
        inner = state
        for key in outer:
            inner = inner[key]
        inner[name] = torch.ones(shape).double()
        if damage == "missing":
            del inner[name]
        with pytest.raises((ValueError, KeyError)):
            running.load_state(state)


def test_a_blend_is_valid_until_the_next_commit_or_load() -> None:
    running = RunningGaussians(gaussians("full", 0), torch.ones(G).double())
    features, assignment = torch.randn(9, D, dtype=torch.float64), torch.arange(9) % G
    blend = running.blend(features, assignment)
    running.commit(blend)
    before = copied(running)
    with pytest.raises(ValueError, match="out of date"):
        running.commit(blend)
    blend = running.blend(features, assignment)
    running.load_state(running.state())
    with pytest.raises(ValueError, match="out of date"):
        running.commit(blend)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored(running).items())


def test_many_samples_of_one_class_are_decomposed_in_few_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(20_000, 8, dtype=torch.float64) * torch.arange(1, 9)
    sides, decompose = [], torch.linalg.eigh

    def watched(matrix: Tensor) -> tuple[Tensor, Tensor]:
        sides.append(matrix.shape[-1])
        return decompose(matrix)

    running = RunningGaussians.empty(1, 8, family="low-rank", rank=3, dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", watched)
        running.commit(running.blend(features, torch.zeros(len(features)).long()))
    assert max(sides) == 8  # 20,003 samples and directions on the other side
    values = torch.linalg.eigvalsh(torch.cov(features.mT, correction=0))
    values[:5] = values[:5].mean()
    torch.testing.assert_close(torch.linalg.eigvalsh(running.gaussians.covariance.dense()[0]), values)


def test_gram_matrices_count_towards_the_size_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    running = RunningGaussians.empty(8, 64, family="low-rank", rank=2)
    features, assignment = torch.randn(8 * 60, 64), torch.arange(8 * 60) % 8
    monkeypatch.setattr(covariance, "CHUNK", 4 * 62 * 62 * 4 * 4)
    parts = running.blend(features, assignment).parts
    assert all(2 * 4 * 62 * 62 * len(part.rows) < covariance.CHUNK for part in parts)
    assert sum(len(part.rows) for part in parts) == 8


@pytest.mark.parametrize("rank", [0, 1, 4, 7, 9])
@pytest.mark.parametrize("width", [3, 5, 12])
def test_low_rank_compaction_has_the_rank_and_the_trace(rank: int, width: int) -> None:
    wide = LowRank(torch.randn(2, 6, width, dtype=torch.float64), torch.ones(2).double())
    narrow = wide.compacted(rank)
    assert narrow.factor.shape == (2, 6, rank)
    torch.testing.assert_close(narrow.diagonal().sum(1), wide.diagonal().sum(1))
    expected = torch.linalg.eigvalsh(wide.dense())
    expected[:, : max(6 - rank, 0)] = expected[:, : max(6 - rank, 0)].mean(1, keepdim=True)
    torch.testing.assert_close(torch.linalg.eigvalsh(narrow.dense()), expected)


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        RunningGaussians.empty(2, D, family="low-rank", rank=0)


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
    pair = torch.stack([torch.eye(D), -torch.eye(D)])
    for prepared in (False, True):
        mixed = Full(pair)
        if prepared:
            mixed.prepare()
        solved = mixed.solve(torch.ones(2, 1, D))
        torch.testing.assert_close(solved[0], torch.ones(1, D))  # the others are not touched
        assert torch.isnan(solved[1]).all()
        assert torch.isnan(mixed.logdet()).tolist() == [False, True]


@pytest.mark.parametrize(
    "broken",
    [Diagonal(torch.tensor([[1.0, 1.0], [1.0, -1.0]])), Isotropic(torch.tensor([1.0, -1.0]), torch.tensor(2)),
     LowRank(torch.zeros(2, 2, 1), torch.tensor([1.0, -1.0])), LowRank(torch.zeros(2, 2, 1), torch.tensor([1.0, 0.0]))],
)  # fmt: skip
def test_structured_matrices_that_are_not_positive_definite_give_nan_too(broken: Covariance) -> None:
    solved = broken.solve(torch.ones(2, 1, 2))
    torch.testing.assert_close(solved[0], torch.ones(1, 2))
    assert torch.isnan(solved[1]).any()


def test_a_single_row_out_of_range_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        gaussians("full", 0).rows(torch.tensor([G]))


def test_a_thousand_classes_of_2048_features_fit() -> None:
    family, rank = choose_family(1000, 2048)
    assert family == "low-rank"
    assert 4 * 1000 * 2048 * rank <= 2 * 2**30 / 4  # anchors, target and a working copy stay far below 2 GiB
    assert choose_family(1, 2048)[0] == "full"
    assert choose_family(100_000, 4096)[0] == "diagonal"
