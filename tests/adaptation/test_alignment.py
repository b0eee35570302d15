"""The pull towards the anchors against autograd through the written equations, in all families."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from references.alignment import Written
from references.gaussians import D, G, copied, gaussians, stored
from ttac.adaptation.alignment import Alignment, Distance
from ttac.adaptation.step import Surrogate
from ttac.gaussian import FAMILIES, Direction, Full, Gaussians, covariance

CLIP, RIDGE = 32, 0.1
CASES = [("kl", "symmetric"), ("kl", "one-sided"), ("l2", "symmetric")]
HARD = torch.tensor([0, 1, 1, -1, 1, 1, 0, 1])  # uneven, one sample of none, and the third Gaussian has nothing
SOFT = torch.rand(8, G, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TINY = SOFT * torch.tensor([1e-4, 1.0, 1e-13])  # the last is too little to count
ASSIGNMENTS = pytest.mark.parametrize("assignment", [HARD, SOFT, TINY], ids=["hard", "soft", "tiny"])


def make(
    family: str,
    kind: Distance = "kl",
    direction: Direction = "symmetric",
    *,
    means_only: bool = False,
    clip: int = CLIP,
    count: int = G,
    dim: int = D,
) -> Alignment:
    """Make an alignment whose target has moved: it was updated once, and started with other counts."""
    anchors = gaussians(family, 0, count, dim)
    options = {"ridge": RIDGE, "clip": clip, "means_only": means_only}
    alignment = Alignment(anchors, **options, distance=kind, direction=direction)  # type: ignore[arg-type]
    alignment.running.counts.copy_(torch.tensor([20.0, 30.0, 32.0][:count]).clamp_max(clip))
    features = torch.randn(20, dim, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 2
    alignment.running.commit(alignment.running.blend(features, torch.arange(20) % count))
    return alignment


def written(alignment: Alignment, family: str) -> Written:
    return Written(alignment, gaussians(family, 0, *alignment.anchors.mean.shape))


def unchanged(alignment: Alignment, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in stored(alignment.running).items())


def pulled(alignment: Alignment, features: Tensor, assignment: Tensor) -> Tensor:
    pull, _ = alignment.pull(features, assignment)
    assert pull.tensors[0] is features
    return pull.gradients[0]


def finite(pull: Surrogate) -> bool:
    return bool(pull.gradients[0].isfinite().all())


def draw(dim: int = D) -> Tensor:
    features = torch.randn(8, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (features + 0.5).requires_grad_()


@pytest.mark.parametrize("means_only", [False, True])
@ASSIGNMENTS
@pytest.mark.parametrize(("kind", "direction"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pull_is_the_gradient_of_the_written_loss(
    family: str, kind: Distance, direction: Direction, assignment: Tensor, means_only: bool
) -> None:
    alignment, features = make(family, kind, direction, means_only=means_only), draw()
    found = pulled(alignment, features, assignment)
    expected = written(alignment, family).gradient(features, assignment)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    if assignment is HARD:
        assert bool((found[HARD < 0] == 0).all()), "a sample that is assigned to nothing has no gradient"
        assert bool((found[HARD >= 0] != 0).any(1).all())


@pytest.mark.parametrize(
    ("clip", "count", "dim"), [(4, G, D), (CLIP, 1, D), (4, 1, D), (CLIP, G, 1)],
    ids=["more samples than the clip", "one Gaussian", "one, more than the clip", "one dimension"],
)  # fmt: skip
@ASSIGNMENTS
@pytest.mark.parametrize(("kind", "direction"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pull_at_the_edges_is_the_gradient_of_the_written_loss(
    family: str, kind: Distance, direction: Direction, assignment: Tensor, clip: int, count: int, dim: int
) -> None:
    assignment = assignment[:, :count] if assignment.ndim == 2 else assignment.clamp_max(count - 1)
    for means_only in (False, True):
        alignment = make(family, kind, direction, means_only=means_only, clip=clip, count=count, dim=dim)
        found = pulled(alignment, draw(dim), assignment)
        expected = written(alignment, family).gradient(draw(dim), assignment)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    if assignment.ndim == 1 and clip == 4:  # nothing of the past is left
        assert min(float(part.keep.min()) for part in alignment.running.blend(draw(dim), assignment).parts) == 0


@pytest.mark.parametrize("means_only", [False, True])
@pytest.mark.parametrize(("kind", "direction"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_distances_are_those_of_torch_distributions(
    family: str, kind: Distance, direction: Direction, means_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alignment = make(family, kind, direction, means_only=means_only)
    target, equations = alignment.running.gaussians, written(alignment, family)
    each = [equations.distance(k, target.mean[k], target.covariance.dense()[k]) for k in range(G)]
    torch.testing.assert_close(alignment.distances(), torch.stack(each), rtol=1e-9, atol=1e-11)
    monkeypatch.setattr(covariance, "CHUNK", 1)
    torch.testing.assert_close(alignment.distances(), torch.stack(each), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_the_pull_is_the_slope_of_the_distances_after_the_step(family: str) -> None:
    features, assignment = draw().detach(), HARD

    def loss(features: Tensor) -> float:
        alignment = make(family)
        alignment.running.commit(alignment.running.blend(features, assignment))
        return float(alignment.distances().sum() * alignment.scale)

    found = pulled(make(family), features.clone().requires_grad_(), assignment)
    for i, j in itertools.product((0, 1, 3), range(2)):
        nudge = torch.zeros_like(features)
        nudge[i, j] = 1e-5
        slope = (loss(features + nudge) - loss(features - nudge)) / 2e-5
        assert float(found[i, j]) == pytest.approx(slope, rel=1e-5, abs=1e-9)


@ASSIGNMENTS
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_one_pull_as_written(family: str, assignment: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariance, "CHUNK", 1)
    alignment = make(family)
    assert all(len(part.rows) == 1 for part in alignment.running.blend(draw(), assignment).parts)
    expected = written(alignment, family).gradient(draw(), assignment)
    torch.testing.assert_close(pulled(alignment, draw(), assignment), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["kl", "l2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_value_of_a_pull_is_that_of_the_written_loss_after_the_commit(family: str, kind: Distance) -> None:
    alignment = make(family, kind)
    expected = 3 * written(alignment, family).loss(draw(), HARD)
    pull, blend = alignment.pull(draw(), HARD, weight=3.0)
    alignment.running.commit(blend)
    moved = sorted({int(k) for k in HARD if k >= 0})  # the written loss leaves the others out
    others = [k for k in range(G) if k not in moved]
    rest = 3 * alignment.scale * alignment.distances()[others].sum()
    # What is committed has been cut back to its rank.
    rtol = 1e-2 if family == "low-rank" else 1e-8
    torch.testing.assert_close(pull.value() - rest, expected.detach(), rtol=rtol, atol=1e-10)


def test_a_blend_holds_no_graph() -> None:
    _, blend = make("full").pull(draw(), HARD)
    assert not any(tensor.requires_grad for part in blend.parts for tensor in (part.features, part.mean, part.weights))


@pytest.mark.parametrize("sample", [0, 1])  # of the Gaussian with few and of that with many
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("assignment", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_finite_gives_a_pull_that_is_refused(
    family: str, assignment: Tensor, broken: float, sample: int
) -> None:
    features = draw().detach()
    features[sample, 0] = broken
    alignment = make(family)
    before = copied(alignment.running)
    assert not finite(alignment.pull(features.requires_grad_(), assignment)[0])
    assert not finite(alignment.pull(features, alignment.share(features))[0])
    assert unchanged(alignment, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_that_is_not_positive_definite_gives_a_pull_that_is_refused(family: str) -> None:
    alignment = make(family)
    tensors = stored(alignment.running)
    if family == "full":
        tensors["matrix"][1].fill_diagonal_(-5.0)
    else:
        tensors["variance" if family == "diagonal" else "noise"][1] = -5.0
    before = copied(alignment.running)
    assert not finite(alignment.pull(draw(), HARD)[0])
    assert finite(alignment.pull(draw(), torch.zeros(8).long())[0])  # the others are not touched
    assert not finite(alignment.pull(draw(), alignment.share(draw()))[0])  # each share depends on all Gaussians
    assert alignment.distances().isfinite().tolist() == [True, False, True]
    assert unchanged(alignment, before)


def test_nobody_assigned_is_not_pulled() -> None:
    features = draw()
    assert bool((pulled(make("full"), features, torch.full((8,), -1)) == 0).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_single_precision_is_close(family: str) -> None:
    alignment = make(family)
    exact = written(alignment, family).gradient(draw(), HARD)
    single = Alignment(
        gaussians(family, 0).map(lambda tensor: tensor.float() if tensor.ndim else tensor),
        ridge=RIDGE, clip=CLIP, means_only=False,
    )  # fmt: skip
    for name, tensor in stored(alignment.running).items():
        stored(single.running)[name].copy_(tensor)
    found = pulled(single, draw().detach().float().requires_grad_(), HARD)
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 1e-4
    found = pulled(single, draw().detach().half().requires_grad_(), HARD)
    assert found.dtype == torch.float16
    assert float((found - exact).norm() / exact.norm()) < 1e-2
    blend = single.pull(draw().half(), single.share(draw().half()))[1]
    single.running.commit(blend)
    assert single.running.gaussians.mean.dtype == torch.float32


def test_anchors_of_any_rank_are_where_the_target_starts() -> None:
    anchors = Gaussians(torch.zeros(1, 100), Full(torch.eye(100)[None])).as_family("low-rank", rank=80)
    alignment = Alignment(anchors, ridge=RIDGE, clip=CLIP, means_only=False)
    torch.testing.assert_close(alignment.distances(), torch.zeros(1), rtol=0, atol=1e-3)
    assert stored(alignment.running)["factor"].shape == (1, 100, 80)
