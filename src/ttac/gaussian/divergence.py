"""How far sets of Gaussians of one family are from each other, and what moves them closer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ttac.gaussian.families import Gaussians

Direction = Literal["symmetric", "one-sided"]

RIDGE = 1 / 30  # added to the variances of source and target, as a share of the source's largest


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
    distance = _mahalanobis(second, first.mean[:, None])[:, 0]
    return 0.5 * (trace + distance - dim + second.covariance.logdet() - first.covariance.logdet())


def divergence(source: Gaussians, target: Gaussians, direction: Direction) -> Tensor:
    """Compute `KL(source || target)`, as the paper writes, or the sum of both directions, as its code does: `[G]`.

    In the sum the log-determinants cancel, so they are not computed.
    """
    if direction == "one-sided":
        return kl_divergence(source, target)
    total = source.mean.new_tensor(-2.0 * source.mean.shape[1])
    for here, there in ((source, target), (target, source)):
        total = total + there.covariance.trace_solve(here.covariance) + _mahalanobis(there, here.mean[:, None])[:, 0]
    return 0.5 * total


def divergence_gradients(
    source: Gaussians, target: Gaussians, vectors: Tensor, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Differentiate `divergence` by the target: by its means, `[G, D]`, and by its covariances, times `vectors`.

    With `S` and `T` the covariances and `d = mu_t - mu_s`, the symmetric divergence has
    `g = (S^-1 + T^-1) d` and `H = 1/2 [S^-1 - T^-1 (S + d d^T) T^-1]`; one-sided, the first `S^-1` is missing and the
    second is `T^-1`. Given is `H v` of each of `vectors [G, m, D]`, for which few solutions with `T` are enough: the
    value needs its whole inverse.
    """
    given = torch.cat([(target.mean - source.mean)[:, None], vectors], 1)
    solved = target.covariance.solve(given)
    here, within = solved[:, 0], solved[:, 1:]  # T^-1 d, T^-1 v
    curved = target.covariance.solve(source.covariance.apply(within)) + target.covariance.outer(here, vectors)
    if direction == "one-sided":
        return here, 0.5 * (within - curved)
    straight = source.covariance.solve(given)
    return straight[:, 0] + here, 0.5 * (straight[:, 1:] - curved)


def moment_distance(source: Gaussians, target: Gaussians) -> Tensor:
    """Compute the squared L2 distances of means and of covariances, weighed as TTT++ weighs them: `[G]`.

    TTT++ divides each by what it is on average between two batches of the source, and takes half of the means'. For n
    samples of a Gaussian with covariance `S` those averages are `2 tr(S) / n` and `2 (tr(S)^2 + |S|^2) / (n - 1)`. So
    this is `|d|^2 / tr(S) + 2 |T - S|^2 / (tr(S)^2 + |S|^2)`, and TTT++'s sum is n / 4 times that. It does not change
    with the units of the features.

    >>> from ttac.gaussian import Diagonal
    >>> unit = Gaussians(torch.zeros(1, 2), Diagonal(torch.ones(1, 2)))
    >>> moment_distance(unit, Gaussians(torch.ones(1, 2), Diagonal(2 * torch.ones(1, 2))))
    tensor([1.6667])
    """
    of_means, of_covariances = _moment_scales(source)
    means = (source.mean - target.mean).square().sum(1)
    difference = torch.linalg.vector_norm(source.covariance.dense() - target.covariance.dense(), dim=(1, 2))
    return means / of_means + difference.square() / of_covariances


def moment_gradients(source: Gaussians, target: Gaussians, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate `moment_distance` as `divergence_gradients` does."""
    of_means, of_covariances = _moment_scales(source)
    means = 2 * (target.mean - source.mean) / of_means[:, None]
    difference = target.covariance.apply(vectors) - source.covariance.apply(vectors)
    return means, 2 * difference / of_covariances[:, None, None]


def _moment_scales(source: Gaussians) -> tuple[Tensor, Tensor]:
    """Give what `moment_distance` divides by, for means and for covariances: `[G]` each."""
    trace = source.covariance.diagonal().sum(1)
    return trace, (trace.square() + source.covariance.squared_norm()) / 2


def responsibilities(gaussians: Gaussians, vectors: Tensor, ridge: float = 0.0) -> Tensor:
    """Compute the posteriors of equally weighted Gaussians given `vectors [n, D]`, the E step of a mixture: `[n, G]`.

    `ridge` is added to every covariance's diagonal.

    >>> from ttac.gaussian import Diagonal
    >>> pair = Gaussians(torch.tensor([[0.0], [2.0]]), Diagonal(torch.ones(2, 1)))
    >>> responsibilities(pair, torch.tensor([[1.0], [0.0]]))
    tensor([[0.5000, 0.5000],
            [0.8808, 0.1192]])
    """
    log_densities = []
    for piece in gaussians.pieces(extra=vectors.nbytes):
        raised = piece.plus(ridge)
        distance = _mahalanobis(raised, vectors.expand(len(raised.mean), *vectors.shape))
        log_densities.append(-0.5 * (distance + raised.covariance.logdet()[:, None]))
    return torch.cat(log_densities).softmax(0).mT


def _mahalanobis(gaussians: Gaussians, vectors: Tensor) -> Tensor:
    """Compute `(v - mu)^T Sigma^-1 (v - mu)` of `vectors [G, m, D]`: `[G, m]`."""
    deviations = vectors - gaussians.mean[:, None]
    return (deviations * gaussians.covariance.solve(deviations)).sum(2)
