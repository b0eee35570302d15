"""How far sets of Gaussians of one family are from each other."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ttac.gaussian.families import Gaussians

Direction = Literal["symmetric", "one-sided"]


def kl_divergence(first: Gaussians, second: Gaussians) -> Tensor:
    """Compute `KL(first || second)` of each pair: `[G]`.

    The paper's closed form lacks the 1/2 before the trace and brackets `2 pi^d` wrongly; this is the textbook one.

    >>> from ttac.gaussian import Diagonal
    >>> unit = Gaussians(torch.zeros(1, 2), Diagonal(torch.ones(1, 2)))
    >>> kl_divergence(unit, Gaussians(torch.ones(1, 2), unit.covariance))
    tensor([1.])
    """
    dim = first.mean.shape[1]
    trace = second.covariance.trace_solve(first.covariance)
    distance = second.covariance.mahalanobis(first.mean - second.mean)
    return 0.5 * (trace + distance - dim + second.covariance.logdet() - first.covariance.logdet())


def divergence(source: Gaussians, target: Gaussians, direction: Direction) -> Tensor:
    """Compute `KL(source || target)`, as the paper writes, or the sum of both directions, as its code does: `[G]`.

    In the sum the log-determinants cancel, so they are not computed.
    """
    if direction == "one-sided":
        return kl_divergence(source, target)
    difference = source.mean - target.mean
    total = source.mean.new_tensor(-2.0 * source.mean.shape[1])
    for here, there in ((source.covariance, target.covariance), (target.covariance, source.covariance)):
        total = total + there.trace_solve(here) + there.mahalanobis(difference)
    return 0.5 * total


def responsibilities(gaussians: Gaussians, vectors: Tensor) -> Tensor:
    """Compute the posteriors of equally weighted Gaussians given `vectors [n, D]`, the E step of a mixture: `[n, G]`.

    >>> from ttac.gaussian import Diagonal
    >>> pair = Gaussians(torch.tensor([[0.0], [2.0]]), Diagonal(torch.ones(2, 1)))
    >>> responsibilities(pair, torch.tensor([[1.0], [0.0]]))
    tensor([[0.5000, 0.5000],
            [0.8808, 0.1192]])
    """
    factor = torch.linalg.cholesky(gaussians.covariance.dense())  # [G, D, D]
    deviations = (vectors - gaussians.mean[:, None]).mT  # [G, D, n]
    white = torch.linalg.solve_triangular(factor, deviations, upper=False)
    log_density = -0.5 * white.square().sum(1) - factor.diagonal(dim1=1, dim2=2).log().sum(1)[:, None]
    return log_density.softmax(0).mT


def moment_distance(source: Gaussians, target: Gaussians) -> Tensor:
    """Compute the squared L2 distances of means and of covariances, as TTT++ matches them: `[G]`.

    Each is relative to what the source has of its kind (trace, squared Frobenius norm), so that the distance does not
    change with the units of the features and one weight serves all networks.

    >>> from ttac.gaussian import Diagonal
    >>> unit = Gaussians(torch.zeros(1, 2), Diagonal(torch.ones(1, 2)))
    >>> moment_distance(unit, Gaussians(torch.ones(1, 2), Diagonal(2 * torch.ones(1, 2))))
    tensor([2.])
    """
    here, there = source.covariance.dense(), target.covariance.dense()
    means = (source.mean - target.mean).square().sum(1) / source.covariance.diagonal().sum(1)
    return means + (here - there).square().sum((1, 2)) / here.square().sum((1, 2))
