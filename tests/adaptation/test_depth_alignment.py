"""Alignment at every depth against plain arithmetic: explicit inverses, and autograd through all of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from references.gaussians import gaussians
from ttac.adaptation.depths import DepthAlignment
from ttac.adaptation.reduction import Reduction
from ttac.gaussian import RIDGE, Gaussians
from ttac.source.statistics import Origin, SourceStatistics

SAMPLES, BEYOND, WINDOW = 6, 4, 64
SHAPES = {"stem": (5, 4, 3), "blocks.0": (3, 2, 2), "blocks.1": (7, 4)}  # [C, H, W], and [T, C] of tokens
FAMILIES = pytest.mark.parametrize("family", ["full", "diagonal"])


def channels(name: str) -> int:
    return SHAPES[name][0] if len(SHAPES[name]) == 3 else SHAPES[name][-1]


def known(family: str, floors: Mapping[str, float] | None = None) -> SourceStatistics:
    depths = {name: gaussians(family, seed, 1, channels(name)) for seed, name in enumerate(SHAPES)}
    features = gaussians("full", 9)
    origin = Origin("collected", "model", 3, (1, 1, 1), "label")
    overall = features.rows(torch.tensor([0]))
    return SourceStatistics(features, overall, origin, depths=depths, floors=floors or {})


def draw(rows: int = SAMPLES + BEYOND) -> dict[str, Tensor]:
    """Outputs far from the anchors, with means that vary by channel."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: (2 * torch.randn(rows, *shape, generator=generator, dtype=torch.float64) + 0.7).requires_grad_()
        for name, shape in SHAPES.items()
    }


def plain_divergence(anchor: Gaussians, output: Tensor) -> Tensor:
    """Write out the symmetric KL by channel between the source and the channel vectors of an output."""
    rows = output.permute(0, 2, 3, 1).reshape(-1, output.shape[1]) if output.ndim == 4 else output.flatten(0, 1)
    mean_s, cov_s = anchor.mean[0], anchor.covariance.dense()[0]
    mean_t = rows.mean(0)
    cov_t = (rows - mean_t).T @ (rows - mean_t) / len(rows)
    if anchor.covariance.family == "diagonal":
        cov_t = cov_t.diagonal().diag()
    ridge = cov_s.diagonal().max() / 30 * torch.eye(len(mean_s)).double()
    inverse_s, inverse_t = torch.linalg.inv(cov_s + ridge), torch.linalg.inv(cov_t + ridge)
    gap = mean_s - mean_t
    traces = (inverse_t @ (cov_s + ridge)).trace() + (inverse_s @ (cov_t + ridge)).trace() - 2 * len(mean_s)
    return 0.5 * (traces + gap @ (inverse_s + inverse_t) @ gap) / len(mean_s)


def plain_gradients(statistics: SourceStatistics, weight: float, pulling: set[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over the depths that pull of what autograd makes of it: its value and gradients by the outputs."""
    outputs = draw()
    terms = [plain_divergence(statistics.depths[name], outputs[name][:SAMPLES]) for name in sorted(pulling)]
    total = weight * torch.stack(terms).sum() / len(SHAPES)
    total.backward()
    return total.detach(), {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in outputs.items()
    }


def pulled(alignment: DepthAlignment, weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    outputs = draw()
    pull = alignment.pull(outputs, SAMPLES, weight)
    torch.autograd.backward(pull.tensors, pull.gradients)
    return pull.value(), {name: tensor.grad for name, tensor in outputs.items() if tensor.grad is not None}


@FAMILIES
def test_the_pull_is_the_gradient_of_the_written_divergence(family: str) -> None:
    assert pytest.approx(1 / 30) == RIDGE
    statistics = known(family)
    value, found = pulled(DepthAlignment(statistics.depths, statistics.floors, WINDOW), 20.0)
    expected_value, expected = plain_gradients(statistics, 20.0, set(SHAPES))
    torch.testing.assert_close(value, expected_value)
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-12)
        assert bool((found[name][SAMPLES:] == 0).all()), "rows beyond the samples are not pulled"
        assert float(found[name].norm()) > 0


@FAMILIES
def test_outputs_of_the_samples_alone_are_pulled_alike(family: str) -> None:
    alignment = DepthAlignment(known(family).depths, known(family).floors, WINDOW)
    _, with_others = pulled(alignment, 1.0)
    alone = {name: tensor.detach()[:SAMPLES].requires_grad_() for name, tensor in draw().items()}
    pull = alignment.pull(alone, SAMPLES, 1.0)
    for name, tensor, gradient in zip(SHAPES, pull.tensors, pull.gradients, strict=True):
        assert tensor is alone[name]
        torch.testing.assert_close(gradient, with_others[name][:SAMPLES])


@FAMILIES
def test_a_depth_below_its_floor_pulls_nothing(family: str) -> None:
    outputs = draw()
    depths = known(family).depths
    distances = {name: float(plain_divergence(depths[name], outputs[name].detach()[:SAMPLES])) for name in SHAPES}
    scale = SAMPLES / 256  # floors are told for windows of 256, and fewer samples are noisier
    floors = {"stem": 1.01 * distances["stem"] * scale, "blocks.1": 0.99 * distances["blocks.1"] * scale}
    statistics = known(family, floors)
    alignment = DepthAlignment(statistics.depths, statistics.floors, WINDOW)
    value, found = pulled(alignment, 2.0)
    assert float(alignment.noise()) == pytest.approx((1 / 1.01 + 1 / 0.99) / 2)
    _, expected = plain_gradients(statistics, 2.0, {"blocks.0", "blocks.1"})
    assert bool((found["stem"] == 0).all())
    for name in SHAPES:  # what pulls does so with its whole divergence's slope
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-12)
    assert float(value) == pytest.approx(2 / 3 * (distances["blocks.0"] + 0.01 * distances["blocks.1"]))


@FAMILIES
def test_less_precise_outputs_are_pulled_in_their_own_precision(family: str) -> None:
    exact = known(family)
    single = {name: one.map(lambda tensor: tensor.float()) for name, one in exact.depths.items()}
    statistics = SourceStatistics(exact.classes, exact.overall, exact.origin, depths=single)
    _, expected = plain_gradients(exact, 1.0, set(SHAPES))
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)):
        outputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in draw().items()}
        pull = DepthAlignment(statistics.depths, statistics.floors, WINDOW).pull(outputs, SAMPLES, 1.0)
        for name, gradient in zip(SHAPES, pull.gradients, strict=True):
            assert gradient.dtype == dtype
            wanted = expected[name]
            assert float((gradient - wanted).norm() / wanted.norm()) < tolerance


class Rank(Reduction):
    """One of two ranks: first it notes what it would send, and with what the other sent it computes."""

    ranks = 2

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.other: Rank | None = None
        self.asked = 0

    def count(self, samples: int) -> int:
        return int(self.gather(torch.tensor([samples])).sum())

    def gather(self, rows: Tensor) -> Tensor:
        if self.other is None:
            self.sent.append(rows)
            return rows
        self.asked += 1
        assert torch.equal(rows, self.sent[self.asked - 1]), "what is sent must not depend on what is received"
        return torch.cat([rows, self.other.sent[self.asked - 1]])


@FAMILIES
def test_two_ranks_pull_as_one_does(family: str) -> None:
    statistics = known(family)
    _, whole = pulled(DepthAlignment(statistics.depths, statistics.floors, WINDOW), 3.0)
    halves = [slice(0, 2), slice(2, SAMPLES)]  # of different sizes
    ranks = [Rank(), Rank()]

    def pull(rank: Rank, rows: slice) -> dict[str, Tensor]:
        outputs = {name: tensor.detach()[rows].requires_grad_() for name, tensor in draw().items()}
        pull = DepthAlignment(statistics.depths, statistics.floors, WINDOW, rank).pull(
            outputs, len(outputs["stem"]), 3.0
        )
        return dict(zip(SHAPES, pull.gradients, strict=True))

    for rank, rows in zip(ranks, halves, strict=True):
        pull(rank, rows)
    ranks[0].other, ranks[1].other = ranks[1], ranks[0]
    parts = [pull(rank, rows) for rank, rows in zip(ranks, halves, strict=True)]
    # By a parameter that all rows share, gradients of the rows add up within a rank, and are averaged over ranks.
    for name in SHAPES:
        torch.testing.assert_close(torch.cat([part[name] for part in parts]) / 2, whole[name][:SAMPLES])
