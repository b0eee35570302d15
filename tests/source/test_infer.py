"""Inferred class means: against the authors' solver, SciPy, and the lower bound of the dual problem."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch
from torch.nn import functional as F

from ttac.source import infer
from ttac.source.infer import WEIGHT_DECAY, anchors_around, infer_means


def rmsprop_means(weight: torch.Tensor, bias: torch.Tensor, parameterisation: str) -> torch.Tensor:
    """The authors' way: RMSprop with momentum on the parameter itself, here with a falling rate so that it settles."""
    root = torch.full_like(weight, 0.1).requires_grad_()
    solver = torch.optim.RMSprop([root], lr=1e-2, weight_decay=WEIGHT_DECAY, momentum=0.9)
    mean = {"absolute": torch.abs, "square": torch.square, "signed": torch.clone}[parameterisation]
    for step in range(6000):
        solver.param_groups[0]["lr"] = 1e-2 * 0.999**step
        loss = F.cross_entropy(mean(root) @ weight.mT + bias, torch.arange(len(weight)), reduction="sum")
        solver.zero_grad()
        loss.backward()
        solver.step()
    return mean(root.detach())


@pytest.mark.parametrize("parameterisation", ["absolute", "square", "signed"])
def test_inferred_means_are_what_the_authors_solver_tends_to(parameterisation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    bias = 0.1 * torch.randn(4, generator=generator, dtype=torch.float64)
    ours, theirs = infer_means(weight, bias, parameterisation), rmsprop_means(weight, bias, parameterisation)
    assert F.cosine_similarity(ours, theirs).min() > 0.999
    torch.testing.assert_close(ours, theirs, atol=0.03 * float(theirs.abs().max()), rtol=0)
    assert (ours @ weight.mT + bias).argmax(1).tolist() == [0, 1, 2, 3]
    if parameterisation != "signed":
        assert ours.min() >= 0


def some_head(classes: int = 9, dim: int = 24, scale: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    weight[1] = weight[0] + 0.3 * weight[1]  # two classes that look alike
    return scale * weight, 0.3 * torch.randn(classes, generator=generator, dtype=torch.float64)


def scipy_means(weight: torch.Tensor, bias: torch.Tensor, parameterisation: str) -> tuple[np.ndarray, np.ndarray]:
    """Means `[K, D]` and objectives `[K]` by SciPy's bounded quasi-Newton method, class by class."""
    matrix, offset = weight.numpy(), bias.numpy()

    def objective(mean: np.ndarray, own: int) -> tuple[float, np.ndarray]:
        logits = matrix @ mean + offset
        penalty, pull = (mean @ mean, 2 * mean) if parameterisation != "square" else (mean.sum(), np.ones_like(mean))
        slope = (scipy.special.softmax(logits) - np.eye(len(matrix))[own]) @ matrix
        loss = scipy.special.logsumexp(logits) - logits[own]
        return loss + WEIGHT_DECAY / 2 * penalty, slope + WEIGHT_DECAY / 2 * pull

    start, limits = np.zeros(matrix.shape[1]), [(None if parameterisation == "signed" else 0, None)] * matrix.shape[1]
    options = {"maxiter": 5000, "maxfun": 50000, "ftol": 1e-15, "gtol": 1e-9, "maxcor": 30}
    found = [
        scipy.optimize.minimize(objective, start, (own,), "L-BFGS-B", True, bounds=limits, options=options)
        for own in range(len(matrix))
    ]
    return np.stack([one.x for one in found]), np.array([one.fun for one in found])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [0.02, 0.4, 3.0])
@pytest.mark.parametrize("parameterisation", ["absolute", "square", "signed"])
def test_inferred_means_are_the_optimum(
    parameterisation: str, scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer, "BLOCK", 4)  # more than one
    weight, bias = some_head(scale=scale)
    best, lowest = scipy_means(weight, bias, parameterisation)
    means = infer_means(weight.to(dtype), bias.to(dtype), parameterisation)
    found = means.double()
    error = np.linalg.norm(found.numpy() - best, axis=1)
    # The square parameterisation is a lasso, which has no curvature of its own to bound the error of the means.
    limit = 1e-2 if parameterisation == "square" else 1e-3
    assert (error <= limit * np.linalg.norm(best, axis=1)).all()
    loss = F.cross_entropy(found @ weight.mT + bias, torch.arange(len(weight)), reduction="none")
    penalty = found.sum(1) if parameterisation == "square" else found.square().sum(1)
    assert (loss + WEIGHT_DECAY / 2 * penalty).numpy() == pytest.approx(lowest, abs=1e-6)


def test_heads_at_the_edge_have_means_or_a_clear_error() -> None:
    weight, bias = some_head()
    assert infer_means(torch.zeros(3, 4), None, "absolute").tolist() == [[0.0] * 4] * 3
    assert infer_means(weight.bfloat16(), bias.bfloat16(), "absolute").dtype == torch.float32
    bias[3] = -200  # its probability is zero in float32 at the start
    means = infer_means(weight.float(), bias.float(), "signed").double()
    assert (means @ weight.mT + bias).argmax(1).tolist() == list(range(9))
    weight[2, 5] = torch.nan
    with pytest.raises(ValueError, match="are they finite"):
        infer_means(weight, bias, "absolute")


def objectives(weight: torch.Tensor, bias: torch.Tensor, means: torch.Tensor, parameterisation: str) -> torch.Tensor:
    loss = F.cross_entropy(means @ weight.mT + bias, torch.arange(len(weight)), reduction="none")
    return loss + WEIGHT_DECAY / 2 * (means.sum(1) if parameterisation == "square" else means.square().sum(1))


def lower_bounds(weight: torch.Tensor, bias: torch.Tensor, means: torch.Tensor, parameterisation: str) -> torch.Tensor:
    """What no means can be better than `[K]`, by weak duality.

    For any distribution p over the classes and `r = p - e_k`, the optimum is at least `H(p) + r b - g*(-W^T r)`, where
    g* is the conjugate of the penalty. The softmax at the optimum makes this an equality; that at `means` is near it.
    """
    own = torch.eye(len(weight)).to(weight)
    residual = torch.softmax(means @ weight.mT + bias, 1) - own
    push = -residual @ weight
    if parameterisation == "square":  # g* is 0 up to wd / 2 in each feature and infinite beyond
        residual = residual * (WEIGHT_DECAY / 2 / push.amax(1, keepdim=True)).clamp(0, 1)
        conjugate = torch.zeros_like(bias)
    else:
        push = push if parameterisation == "signed" else push.clamp_min(0)
        conjugate = push.square().sum(1) / (2 * WEIGHT_DECAY)
    return torch.special.entr((own + residual).clamp_min(0)).sum(1) + residual @ bias - conjugate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias_scale", [0.3, 5.0, 10.0, 20.0, 40.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("parameterisation", ["absolute", "square", "signed"])
def test_heads_with_large_biases_have_the_optimum_too(
    parameterisation: str, scale: float, bias_scale: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (scale * torch.randn(10, 32, generator=generator, dtype=torch.float64)).to(dtype)
    bias = (bias_scale * torch.randn(10, generator=generator, dtype=torch.float64)).to(dtype)
    means = infer_means(weight, bias, parameterisation).double()
    assert means.isfinite().all()
    problem = (weight.double(), bias.double(), means, parameterisation)
    found, bound = objectives(*problem), lower_bounds(*problem)
    assert (found - bound <= 1e-4 * found.clamp_min(1)).all()
    assert (found - bound >= -1e-9 * found.clamp_min(1)).all()  # else the bound is none


@pytest.mark.parametrize("bias_scale", [10.0, 40.0])
@pytest.mark.parametrize("parameterisation", ["absolute", "square", "signed"])
def test_no_long_run_of_another_solver_finds_less(parameterisation: str, bias_scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(10, 32, generator=generator, dtype=torch.float64)
    bias = bias_scale * torch.randn(10, generator=generator, dtype=torch.float64)
    rate = 1 / (torch.linalg.matrix_norm(weight, 2).square() / 2 + WEIGHT_DECAY)
    mean = lead = torch.zeros_like(weight)
    for number in range(3000):  # Nesterov's
        residual = torch.softmax(lead @ weight.mT + bias, 1) - torch.eye(10).double()
        pull = WEIGHT_DECAY / 2 if parameterisation == "square" else WEIGHT_DECAY * lead
        following = lead - rate * (residual @ weight + pull)
        following = following if parameterisation == "signed" else following.clamp_min(0)
        lead, mean = following + number / (number + 3) * (following - mean), following
    theirs = objectives(weight, bias, mean, parameterisation)
    for dtype in (torch.float32, torch.float64):
        means = infer_means(weight.to(dtype), bias.to(dtype), parameterisation).double()
        ours = objectives(weight, bias, means, parameterisation)
        assert (ours - theirs <= 1e-4 * theirs.clamp_min(1)).all()


def test_classes_that_stay_unsolved_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "ROUNDS", 1)
    monkeypatch.setattr(infer, "PATIENCE", 1)
    weight, bias = some_head(scale=3.0)
    with pytest.warns(UserWarning, match="of 9 classes are not the best ones"):
        assert infer_means(weight, 40 * bias, "square").isfinite().all()


@pytest.mark.parametrize("parameterisation", ["absolute", "square", "signed"])
def test_classes_that_cannot_be_told_apart_are_solved(parameterisation: str) -> None:
    row = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    assert infer_means(row.expand(3, -1), None, parameterisation).abs().max() < 1e-3
    assert infer_means(row, torch.ones(1), parameterisation).tolist() == [[0.0] * 6]  # the only class


def test_a_search_without_success_changes_nothing() -> None:
    weight, bias = some_head()
    problem = infer._Problem(weight, bias, torch.arange(9), "signed")
    mean = torch.zeros_like(weight)
    logits = problem.logits(mean)
    _, residual = problem.fit(logits)
    gradient = problem.gradient(mean, residual)
    direction = torch.where(torch.arange(9) % 2 == 0, 1.0, -1.0)[:, None] * gradient  # half of them uphill
    fraction, tried, slopes = infer._search(problem, mean, direction, logits, residual, -gradient.square().sum(1))
    assert fraction[::2].tolist() == [0.0] * 5
    assert torch.equal(tried[::2], logits[::2])
    assert torch.equal(slopes[::2], residual[::2])
    torch.testing.assert_close(tried, problem.logits(mean + fraction[:, None] * direction))
    assert (fraction[1::2] > 0).all()


def test_anchors_are_the_moments_of_their_mixture() -> None:
    means = torch.randn(5, 7, dtype=torch.float64)
    classes, overall = anchors_around(means)
    between = torch.cov(means.mT, correction=0)
    gamma = torch.linalg.svdvals(between)[0] / 30
    torch.testing.assert_close(classes.covariance.dense(), gamma * torch.eye(7).double().expand(5, 7, 7))
    torch.testing.assert_close(overall.mean[0], means.mean(0))
    torch.testing.assert_close(overall.covariance.dense()[0], gamma * torch.eye(7).double() + between)
